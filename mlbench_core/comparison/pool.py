"""Group runs that are repeats of each other, and name the differences between groups.

Two runs are repeats if their configurations, machines and software are equal except for the seed.
Groups that differ only in the number of workers are a series: it shows how a configuration scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_core.comparison.record import UNKNOWN, RunRecord
from mlbench_core.comparison.times import complete, is_miss
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import goal_text

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
        """Return all runs except those that missed their goal; a run without a goal has not missed it."""
        return tuple(record for record in self.records if not is_miss(record))

    @property
    def missed(self) -> int:
        """Return the number of runs that missed their goal or failed."""
        return len(self.records) - len(self.reached)

    def values(self, name: str) -> list[float]:
        """Return an attribute of every run that knows it, to be averaged; an empty list if a run missed its goal.

        A mean over the other runs would make the group look better for its misses.

        Args:
            name: Attribute of :class:`~mlbench_core.comparison.record.RunRecord`, for example
                ``"total_s"``.
        """
        return [
            value
            for record in complete(self.records)
            if (value := getattr(record, name)) is not None
        ]


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
    """Select the runs that can be compared: those that finished, or reached their goal before they were killed.

    A run that failed is a repeat that missed if another run has its configuration: a failure must
    not make the others look better. A run that neither finished nor failed may still go on, so it
    is left out. Runs that sent no times are left out, too.

    Returns:
        The runs, and a sentence with the reason for each run that is left out.
    """
    kept: list[RunRecord] = []
    remarks: list[str] = []
    records = list(records)
    whole = {_text(_properties(record)) for record in records if record.state != "failed"}
    for record in records:
        # A run that was killed after it reached its goal has a valid time to the goal.
        ended = record.state in ("finished", UNKNOWN) or (
            record.state == "unfinished" and record.reached
        )
        if (
            record.state == "failed"
            and record.workers is not None
            and _text(_properties(record)) in whole
        ):
            kept.append(record)
            if not record.reached:
                remarks.append(
                    f"{record.name} has the state 'failed': it counts as a run that missed"
                )
        elif not ended:
            known = [
                f"{record.epochs} epochs" if record.epochs else "",
                f"{record.train_s or 0:.1f} s of training",
            ]
            after = f" ({', '.join(filter(None, known))})" if record.train_s else ""
            missed = " and did not reach its goal" if record.state == "unfinished" else ""
            remarks.append(f"{record.name} has the state '{record.state}'{missed}{after}: left out")
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


def plural(number: float, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "run"), plural(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def workload(record: RunRecord | Group) -> tuple[str, str]:
    """Return the task (or the program) and the data set. Times of different workloads have nothing in common."""
    known = record.configuration
    name = known.get("task") or known.get("program")
    if not name and known.get("goal"):
        # Archives of version 3.0 may name neither. Those of one goal have different names for each
        # backend.
        name = goal_text(known["goal"])
    return str(name or known.get("series")), str(known.get("dataset"))


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
        if other.goal_text != record.goal_text:
            raise ConfigurationError(
                f"runs must have the same goal, not '{other.goal_text}' ({other.name}) and "
                f"'{record.goal_text}' "
                f"({record.name}): compare the runs of each goal separately"
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
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(_text(_properties(record)), []).append(record)
    members = list(found.values())
    named = _labels([_of_series(group[0]) for group in members])
    groups = []
    for label, same in zip(named, members, strict=True):
        kept: list[RunRecord] = []
        remarks = []
        # A failed run that was repeated with its seed counts no more than any other twin.
        for record in sorted(same, key=lambda one: one.state == "failed"):
            twin = next(
                (one for one in kept if one.seed is not None and one.seed == record.seed), None
            )
            if twin is not None:
                remarks.append(
                    f"{record.name} has the seed {record.seed} of {twin.name}: it counts once"
                )
            else:
                kept.append(record)
        configuration = {
            key: value for key, value in same[0].configuration.items() if key != "seed"
        }
        groups.append(
            Group(label, same[0].workers or 0, configuration, tuple(kept), tuple(remarks))
        )
    return sorted(groups, key=lambda group: (group.label, group.workers))


def series(groups: Sequence[Group]) -> list[Series]:
    """Group the groups that differ only in the number of workers."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(_text(_of_series(group.records[0])), []).append(group)
    return [
        Series(same[0].label, tuple(sorted(same, key=lambda group: group.workers)))
        for same in found.values()
    ]


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Name the differences between groups.

    Returns:
        Properties, for example ``"algorithm"``, ``"options.rank"`` or ``"machine.cpu"``, and their
        different values. The value is None for a group that does not have the property.
    """
    rows = [_properties(group.records[0]) for group in groups]
    found: dict[str, list[Any]] = {}
    for name in _names(rows):
        values = list({_text(row.get(name)): row.get(name) for row in rows}.values())
        if len(values) > 1:
            found[name] = values
    return found


def _properties(record: RunRecord) -> dict[str, Any]:
    """Return everything in which two runs can differ; a property that is unknown is missing."""
    found = {
        key: value
        for key, value in record.configuration.items()
        if key != "seed" and key != "options"
    }
    options = {
        option: value
        for option, value in (record.configuration.get("options") or {}).items()
        if option.replace("-", "_") not in _NEUTRAL_OPTIONS
        and found.get(_SAME_AS.get(option, option)) is None
    }
    items = [
        *found.items(),
        *((f"options.{name}", value) for name, value in sorted(options.items())),
    ]
    items += [(f"machine.{key}", value) for key, value in record.machine.items()]
    items += [(f"software.{key}", value) for key, value in record.software.items()]
    return {key: value for key, value in items if value is not None}


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all properties, in the order in which labels show them."""
    order = {
        name: place for place, name in enumerate((*_FIRST, "options", "", "machine", "software"))
    }
    names = dict.fromkeys(name for row in rows for name in row)
    return sorted(names, key=lambda name: order.get(name.partition(".")[0], order[""]))


def _of_series(record: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in _properties(record).items() if key not in _OF_THE_SIZE}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short label for each row: the values of the properties in which rows differ.

    Every part of the configuration that differs is in the label. Goal, machine and software are
    added only if two labels would be equal without them. The goal follows from the task, and many
    properties of a machine differ together.
    """
    differing = [name for name in _names(rows) if len({_text(row.get(name)) for row in rows}) > 1]
    chosen = [name for name in differing if not name.startswith(("goal", "machine.", "software."))]
    for name in differing:
        if name not in chosen and _distinct(rows, [*chosen, name]) > _distinct(rows, chosen):
            chosen.append(name)
    if not chosen:
        # One configuration alone is called by its algorithm or its program.
        chosen = [
            name for name in ("algorithm", "task", "program", "series") if rows and name in rows[0]
        ][:1]
    found = []
    for row in rows:
        parts = (_part(name, row.get(name)) for name in chosen)
        found.append(", ".join(dict.fromkeys(part for part in parts if part)) or "default")
    return _numbered(found, rows)


def _distinct(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    return len({_text([row.get(name) for name in names]) for row in rows})


def _numbered(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add a number to equal labels of different rows, for example of two programs with the same file name."""
    seen: dict[str, list[str]] = {}
    found = []
    for label, row in zip(labels, rows, strict=True):
        kinds = seen.setdefault(label, [])
        if _text(row) not in kinds:
            kinds.append(_text(row))
        place = kinds.index(_text(row))
        found.append(f"{label} #{place + 1}" if place else label)
    return found


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
        return (
            str(value)
            if name in ("cpu", "gpu", "os")
            else f"{name.replace('_', ' ')} {str(value)[:12]}"
        )
    shown = {
        "task": f"task {value}",
        # "python -u /long/path/train.py" is shown as "train.py".
        "program": Path(str(value).rsplit(" ", 1)[-1]).name,
        "preset": f"preset {value}",
        "threads": plural(value, "thread") if isinstance(value, int | float) else str(value),
        "device": {"cpu": "CPU", "cuda": "GPU"}.get(str(value), str(value)),
        "light": "light goal",
        "changed": "changed " + " ".join(map(str, value))
        if isinstance(value, list) and value
        else "",
        "max_bandwidth": f"{value} Mbit/s",
    }
    return shown.get(name, str(value))
