"""Find and group runs by any field of their configuration, which the record of a run has as text.

A field is a part of the configuration, such as ``network``, or an option of the command, such as
``lr``. The text of a search holds words and conditions: ``digits network=lan-1g lr=0.1`` finds the
runs with the word, the network and the learning rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlbench_core.comparison.master_metrics import describe_run
from mlbench_core.network.named_networks import NETWORKS
from mlbench_master.database.store import Run, Store
from mlbench_master.runs.run_goals import RunGoal, goal_of_task, task_of_image

__all__ = ["MOST_READ", "MOST_TEXT", "Fields", "RunQuery", "condition", "fields_of", "goal_of"]

MOST_READ = 2000
"""The number of runs among which a search by a field looks: the database has no fields."""

MOST_TEXT = 500
"""Most characters of a search: a condition for a long value fits."""

# The record of a run has the text of its network, also if the network has a name.
_NETWORK_NAMES = {network.text: name for name, network in NETWORKS.items()}

Fields = Mapping[str, Sequence[str]]

# An address holds a value, so it must not have thousands of characters.
_MOST_CHARACTERS = 100
_CONDITION = re.compile(r'([A-Za-z_][\w.-]*)=("(?:[^"\\]|\\.)*"|\S*)(?=\s|$)|(\S+)')


def fields_of(run: Run) -> Fields:
    """Return the values of each field of a run; one with several values, ``tag``, has all of them.

    Example:
        >>> run = Run(name="a", num_workers=2, backend="gloo", command="train.py --lr 0.1")
        >>> fields_of(run)["lr"], fields_of(run)["workers"]
        (['0.1'], ['2'])
    """
    configuration = describe_run(run.to_json(), run.num_workers)
    options = configuration.pop("options", {})
    # The record of the master names the task by its image, also if the command is another program.
    task = task_of_image(str(run.image))
    method = configuration.pop("algorithm", None) or options.pop("optimizer", None)
    if task is not None:
        configuration["task"] = task.key
        if not method and task.optimizers:
            method = task.optimizers[0]
    network = str(configuration.get("network", ""))
    configuration["network"] = _NETWORK_NAMES.get(network, network)
    goal = goal_of(run)
    aim = None if goal is None else goal.aim
    values = {"method": method, **options, **configuration, "goal": aim}
    fields = {"tag": run.tags} if run.tags else {}
    for name, value in values.items():
        text = str(value)[:_MOST_CHARACTERS]
        if value is not None and text:
            fields[name] = [text]
    return fields


def goal_of(run: Run) -> RunGoal | None:
    """Return the goal of a run: the one that its workers sent, else that of its task."""
    # A damaged record may hold any type.
    return run.goal_record or goal_of_task(str(run.image), str(run.command), run.light_target)


def condition(field: str, value: str) -> str:
    """Return the text of a search for the runs with a value of a field, empty for those without it.

    Example:
        >>> condition("method", "ddp"), condition("goal", "Prec@1 >= 95"), condition("network", "")
        ('method=ddp', 'goal="Prec@1 >= 95"', 'network=')
    """
    if re.search(r'[\s"\\]', value):
        value = json.dumps(value, ensure_ascii=False)
    return f"{field}={value}"


@dataclass(frozen=True)
class RunQuery:
    """The text of a search for runs.

    Attributes:
        text: The words that name, image, command or backend of a run must have, each of them.
        conditions: Field and value of each condition. As a command may hold such a word itself, it
            also finds the runs with this word.

    Example:
        >>> RunQuery.parse('digits goal="Prec@1 >= 95" lr=0.1')
        RunQuery(text='digits', conditions=(('goal', 'Prec@1 >= 95'), ('lr', '0.1')))
    """

    text: str
    conditions: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> RunQuery:
        """Split a text into words and conditions; see :func:`condition`."""
        words = []
        conditions = []
        for field, value, word in _CONDITION.findall(text):
            if word:
                words.append(word)
                continue
            if value.startswith('"'):
                try:
                    value = json.loads(value, strict=False)
                except ValueError:
                    value = value.strip('"')
            conditions.append((field, value))
        return cls(" ".join(words), tuple(conditions))

    def matches(self, run: Run, fields: Fields) -> bool:
        """Return True if a run, which has the words, meets all conditions, too."""
        texts = " ".join(map(str, (run.name, run.image, run.command, run.backend))).casefold()
        for field, value in self.conditions:
            found = [text.casefold() for text in fields.get(field, [""])]
            if value.casefold() not in found and f"{field}={value}".casefold() not in texts:
                return False
        return True

    def find(
        self, store: Store, *states: str, sort: str = "-created_at"
    ) -> list[tuple[Run, Fields]]:
        """Return the runs that match, of the first :data:`MOST_READ` with some states.

        Args:
            store: The database.
            *states: As for :meth:`~mlbench_master.database.store.Store.runs`, as is ``sort``.
            sort: Their order.

        Returns:
            The runs, each with its fields.
        """
        found = []
        for run in store.runs(*states, text=self.text, sort=sort, limit=MOST_READ):
            fields = fields_of(run)
            if self.matches(run, fields):
                found.append((run, fields))
        return found
