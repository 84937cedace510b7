"""Group runs that are repeats of each other, and name the differences between groups.

Two runs are repeats if their configurations, machines and software are equal except for the seed.
Groups that differ only in the number of workers are a series: it shows how a configuration scales.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_core.comparison.goal_times import complete, is_miss
from mlbench_core.comparison.result_record import UNKNOWN, RunRecord
from mlbench_core.comparison.significance import known_values
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import goal_text, length_text

__all__ = [
    "Group",
    "Series",
    "check_comparable",
    "differences",
    "plural",
    "pool",
    "series",
    "usable",
    "workload",
]

# These options name the run and the folders of its files.
_NEUTRAL_OPTIONS = {"resume", "run_id", "seed", "root_checkpoint", "root_dataset", "root_output"}
# The configuration has separate fields for these options.
_SAME_AS = {"optimizer": "algorithm", "light_target": "light", "gpu": "device"}
# A label begins with these, and the options follow, as in "power_sgd, rank 2".
_FIRST = ("task", "program", "series", "dataset", "preset", "algorithm")
# With more workers, a run may use more machines and GPUs.
_OF_THE_SIZE = ("workers", "machine.hosts", "machine.gpus")


@dataclass(frozen=True)
class Group:
    """Runs that are repeats of each other.

    Attributes:
        label: The settings that distinguish the group from the others, except the number of
            workers.
        workers: Number of workers.
        configuration: The configuration of the runs, without the seed.
        records: The runs.
        remarks: Notes for people, for example which run was left out because its seed occurs twice.
    """

    label: str
    workers: int
    configuration: Mapping[str, Any]
    records: tuple[RunRecord, ...]
    remarks: tuple[str, ...] = ()

    @property
    def machine(self) -> Mapping[str, Any]:
        """Return the machine of the runs."""
        return self.records[0].machine

    @property
    def software(self) -> Mapping[str, Any]:
        """Return the software of the runs."""
        return self.records[0].software

    @property
    def reached(self) -> tuple[RunRecord, ...]:
        """Return all runs except those that missed their goal; one without a goal is not a miss."""
        return tuple(itertools.filterfalse(is_miss, self.records))

    @property
    def missed(self) -> int:
        """Return the number of runs that missed their goal or failed."""
        return len(self.records) - len(self.reached)

    def values(self, name: str) -> list[float]:
        """Return an attribute of every run that knows it, to be averaged.

        The list is empty if a run missed its goal: a mean over the other runs would make the group
        look better for its misses.

        Args:
            name: Attribute of :class:`~mlbench_core.comparison.result_record.RunRecord`, such as
                ``"total_s"``.
        """
        return known_values(map(operator.attrgetter(name), complete(self.records)))


@dataclass(frozen=True)
class Series:
    """Groups that differ only in the number of workers.

    Attributes:
        label: The label of all its groups.
        groups: The groups, fewest workers first.
    """

    label: str
    groups: tuple[Group, ...]


def usable(records: Iterable[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Select the runs that can be compared.

    These are the runs that finished, or reached their goal before they were killed.

    A run that failed is a repeat that missed if another run has its configuration: a failure must
    not make the others look better. A run that neither finished nor failed may still go on, so it
    is left out. Runs that sent no times are left out, too.

    Returns:
        The runs, and a sentence with the reason for each run that is left out.
    """
    kept: list[RunRecord] = []
    remarks: list[str] = []
    records = list(records)
    not_failed = set()
    for record in records:
        if record.state != "failed":
            not_failed.add(_key(record))
    for record in records:
        failed = record.state == "failed"
        # A run that was killed after it reached its goal has a valid time to the goal.
        killed_at_goal = record.state == "unfinished" and record.reached
        ended = killed_at_goal or record.state in ("finished", UNKNOWN)
        # All repeats that were started are reported, also those that failed.
        if failed and record.workers is not None and _key(record) in not_failed:
            kept.append(record)
            if not record.reached:
                remarks.append(
                    f"{record.name} has the state 'failed': it counts as a run that missed"
                )
        elif not ended:
            progress = _progress(record)
            remarks.append(f"{record.name} has the state '{record.state}'{progress}: left out")
        elif record.workers is None:
            remarks.append(f"{record.name} has no recorded number of workers: left out")
        elif record.configuration.get("task") == "0":
            # It measures, and has neither a goal nor a training time.
            kept.append(record)
        elif record.total_s is None and not record.steps_s and record.reached is None:
            # A row without any value would only lengthen the labels of the others.
            remarks.append(
                f"{record.name} sent no times, because its program does not use the Tracker: "
                "left out"
            )
        else:
            kept.append(record)
    return kept, remarks


def _progress(record: RunRecord) -> str:
    """Return how far a run came, for the remark that leaves it out."""
    missed = " and did not reach its goal" if record.state == "unfinished" else ""
    if not record.train_s:
        return missed
    length = length_text(record.epochs or None, record.batches, record.unit)
    if length:
        length += ", "
    return f"{missed} ({length}{record.train_s:.1f} s of training)"


def plural(number: float, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "run"), plural(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def workload(record: RunRecord | Group) -> tuple[str, str]:
    """Return the task (or the program) and the data set.

    Times of different workloads have nothing in common.
    """
    configuration = record.configuration
    name = configuration.get("task") or configuration.get("program")
    if not name and configuration.get("goal"):
        # Archives of version 3.0 may name neither. Those of one goal have different names for each
        # backend.
        name = goal_text(configuration["goal"])
    return str(name or configuration.get("series")), str(configuration.get("dataset"))


def check_comparable(records: Sequence[RunRecord]) -> None:
    """Check that all runs of one workload had the same goal.

    Raises:
        ConfigurationError: Two goals differ; the message names both.
    """
    first: dict[tuple[str, str], RunRecord] = {}
    for record in records:
        # The goal of a run without a result folder may be unknown, which is not a different goal.
        if "goal" not in record.configuration:
            continue
        other = first.setdefault(workload(record), record)
        # A lower threshold is not a cheaper version of the same result: an algorithm can be first
        # at 70 % accuracy and never reach 80 %.
        if other.goal_text != record.goal_text:
            raise ConfigurationError(
                f"runs must have the same goal, not '{other.goal_text}' ({other.name}) and "
                f"'{record.goal_text}' ({record.name}): compare the runs of each goal separately"
            )


def pool(records: Sequence[RunRecord]) -> list[Group]:
    """Group the runs that are repeats of each other.

    A seed that occurs twice in a group counts once, because the second run is not an independent
    repeat.

    Args:
        records: Runs whose number of workers is known, see :func:`usable`.

    Returns:
        Groups, series by series and fewest workers first. Their labels name the differences between
        the series.
    """
    repeats: dict[str, list[RunRecord]] = {}
    for record in records:
        # Everything except the seed must be equal, also the commit and its local difference.
        repeats.setdefault(_key(record), []).append(record)
    # Without the number of workers, so that the groups of a series have one label.
    rows = [_of_series(same[0]) for same in repeats.values()]
    groups = []
    for label, same in zip(_labels(rows), repeats.values(), strict=True):
        kept, remarks = _one_of_each_seed(same)
        configuration = dict(same[0].configuration)
        configuration.pop("seed", None)
        groups.append(
            Group(label, same[0].workers or 0, configuration, tuple(kept), tuple(remarks))
        )
    return sorted(groups, key=operator.attrgetter("label", "workers"))


def _one_of_each_seed(records: Iterable[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Return the repeats whose seeds differ, and a remark on each run that is left out."""
    kept: list[RunRecord] = []
    remarks = []
    # A failed run that was repeated with its seed counts no more than any other twin.
    for record in sorted(records, key=lambda record: record.state == "failed"):
        twin: RunRecord | None = None
        # The same run may have been measured twice, and would look like a sample without variation.
        for other in kept:
            if other.seed is not None and other.seed == record.seed:
                twin = other
        if twin is None:
            kept.append(record)
        else:
            remarks.append(
                f"{record.name} has the seed {record.seed} of {twin.name}: it counts once"
            )
    return kept, remarks


def series(groups: Sequence[Group]) -> list[Series]:
    """Group the groups that differ only in the number of workers."""
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(_text(_of_series(group.records[0])), []).append(group)
    every = []
    for same in members.values():
        by_workers = sorted(same, key=operator.attrgetter("workers"))
        every.append(Series(same[0].label, tuple(by_workers)))
    return every


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Name the differences between groups.

    Returns:
        Properties, for example ``"algorithm"``, ``"options.rank"`` or ``"machine.cpu"``, and their
        different values. The value is None for a group that does not have the property.
    """
    return _differences([_properties(group.records[0]) for group in groups])


def _differences(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the properties in which rows differ, in the order in which labels show them."""
    differing = {}
    for name in sorted(dict.fromkeys(itertools.chain.from_iterable(rows)), key=_position):
        # The values need not be hashable, so their texts decide if they are equal.
        values = {}
        for row in rows:
            value = row.get(name)
            values[_text(value)] = value
        if len(values) > 1:
            differing[name] = list(values.values())
    return differing


def _position(name: str) -> int:
    """Return the position of a property in a label."""
    # The empty text has the position of all properties that are not named.
    order = (*_FIRST, "options", "", "machine", "software")
    section = name.partition(".")[0]
    return order.index(section if section in order else "")


def _properties(record: RunRecord) -> dict[str, Any]:
    """Return everything in which two runs can differ; a property that is unknown is missing."""
    properties: dict[str, Any] = {}
    for name, value in record.configuration.items():
        if name not in ("seed", "options") and value is not None:
            properties[name] = value
    options = {}
    for option, value in sorted((record.configuration.get("options") or {}).items()):
        has_field = _SAME_AS.get(option, option) in properties
        if not has_field and option.replace("-", "_") not in _NEUTRAL_OPTIONS:
            options[option] = value
    sections = {"options": options, "machine": record.machine, "software": record.software}
    for section, values in sections.items():
        for name, value in values.items():
            if value is not None:
                properties[f"{section}.{name}"] = value
    return properties


def _key(record: RunRecord) -> str:
    """Return a text that is equal for runs that are repeats of each other."""
    return _text(_properties(record))


def _of_series(record: RunRecord) -> dict[str, Any]:
    properties = _properties(record)
    for name in _OF_THE_SIZE:
        properties.pop(name, None)
    return properties


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short label for each row: the values of the properties in which rows differ.

    Every part of the configuration that differs is in the label. Goal, machine and software are
    added only if two labels would be equal without them. The goal follows from the task, and many
    properties of a machine differ together.
    """
    differing = _differences(rows)
    chosen = [name for name in differing if not name.startswith(("goal", "machine.", "software."))]
    for name in differing:
        if name not in chosen and _distinct(rows, [*chosen, name]) > _distinct(rows, chosen):
            chosen.append(name)
    if not chosen and rows:
        # One configuration alone is called by its algorithm or its program, and an unchanged script
        # by both: the method alone does not say what was trained.
        names = ("algorithm", "task", "program", "series")
        chosen = list(filter(rows[0].__contains__, names))[:1]
        if rows[0].keys() >= {"program", "algorithm"} and "task" not in rows[0]:
            chosen = ["program", "algorithm"]
    labels = []
    for row in rows:
        parts = [_part(name, row.get(name)) for name in chosen]
        labels.append(", ".join(dict.fromkeys(filter(None, parts))) or "default")
    return _numbered(labels, rows)


def _distinct(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    """Return the number of different rows if they had only these properties."""
    different = set()
    for row in rows:
        values = list(map(row.get, names))
        different.add(_text(values))
    return len(different)


def _numbered(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add a number to equal labels of different rows.

    Two programs with the same file name have such labels.
    """
    rows_of: dict[str, list[str]] = {}
    numbered = []
    for label, row in zip(labels, rows, strict=True):
        text, earlier = _text(row), rows_of.setdefault(label, [])
        if text not in earlier:
            earlier.append(text)
        number = earlier.index(text) + 1
        numbered.append(f"{label} #{number}" if number > 1 else label)
    return numbered


def _part(name: str, value: Any) -> str:
    """Return one property as a part of a label; an empty text for a flag that is off."""
    if value is None or value is False:
        return ""
    if name == "goal":
        return goal_text(value)
    if name.startswith("options."):
        option = name.removeprefix("options.").replace("_", " ")
        return option if value is True else f"{option} {value}"
    if name.startswith(("machine.", "software.")):
        name = name.partition(".")[2]
        if name in ("cpu", "gpu", "os"):
            return str(value)
        # The beginning of a hash is enough to distinguish two of them.
        return f"{name.replace('_', ' ')} {str(value)[:12]}"
    if name == "threads" and isinstance(value, int | float):
        return plural(value, "thread")
    # In the open division, the hyper-parameters that are not the task's own.
    if name == "changed":
        if not value or not isinstance(value, list):
            return ""
        return f"changed {' '.join(map(str, value))}"
    shown = {
        "task": f"task {value}",
        # "python -u /long/path/train.py" is shown as "train.py".
        "program": Path(str(value).rsplit(" ", 1)[-1]).name,
        "preset": f"preset {value}",
        "device": {"cpu": "CPU", "cuda": "GPU"}.get(str(value), str(value)),
        "light": "light goal",
        "max_bandwidth": f"{value} Mbit/s",
    }
    return shown.get(name, str(value))
