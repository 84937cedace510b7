"""Compare runs of the master as ``mlbench compare`` does, from the results that the runs sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlbench_core.comparison.group_repeats import Group, usable
from mlbench_core.comparison.master_metrics import Metrics, latest_json
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.table import Comparison, compare_runs
from mlbench_core.errors import ConfigurationError
from mlbench_master.database.store import Run, Store, run_owner
from mlbench_master.dates import format_date
from mlbench_master.runs.result_files import RESULT_METRIC

__all__ = ["FINAL_STATES", "Compared", "compare"]

FINAL_STATES = ("finished", "failed")
"""States of a run that has ended."""

# Programs of users write results, which may hold anything in place of a number or a text.
_BAD_RESULT = (
    ConfigurationError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_WAITING = {
    "initialized": "Queued: it joins when it ends.",
    "started": "Running: it joins when it ends.",
}


@dataclass(frozen=True)
class Compared:
    """The comparison of some runs.

    Attributes:
        groups: The groups of repeats; empty if no run can be compared.
        table: Their comparison.
        notes: A sentence for each run that is not in the table, by the run's id.
        problem: Why the runs cannot be compared with each other, or an empty text.
        goals: If the runs have different goals: the ids of the runs of each goal, by its text.
    """

    groups: Sequence[Group] = ()
    table: Comparison = field(default_factory=lambda: Comparison(rows=()))
    notes: dict[int, str] = field(default_factory=dict)
    problem: str = ""
    goals: dict[str, list[int]] = field(default_factory=dict)


def compare(
    store: Store, runs: Sequence[Run], pricing: Pricing, baseline: str | None = None
) -> Compared:
    """Compare runs.

    Args:
        store: The database.
        runs: The runs. One that has not ended gets a note.
        pricing: Price of the machines.
        baseline: Label of the groups against which all others are tested; None or an unknown label
            to test every pair.
    """
    notes: dict[int, str] = {}
    records: dict[int, RunRecord] = {}
    for run in runs:
        if run.state not in FINAL_STATES:
            notes[run.id] = _WAITING.get(run.state, f"Its state is {run.state!r}.")
            continue
        try:
            record = RunRecord.from_metrics(_metrics(store, run), run.to_json())
            # One damaged result must not hide the others.
            alone, _ = compare_runs([record])
        except _BAD_RESULT:
            notes[run.id] = "Its result cannot be read: it does not follow the schema of a result."
            continue
        if not alone:
            notes[run.id] = f"{usable([record])[1][0]}."
        records[run.id] = record
    # As in the command: an equal order gives equal texts.
    ordered = sorted(records.values(), key=lambda record: (record.workers or 0, record.name))
    try:
        groups, table = _compare(ordered, pricing, baseline)
    except ConfigurationError as error:
        return Compared(notes=notes, problem=str(error), goals=_by_goal(records))
    except _BAD_RESULT:
        problem = "the results hold numbers that cannot be compared: remove one after the other"
        return Compared(notes=notes, problem=problem)
    return Compared(groups, table, notes)


def _metrics(store: Store, run: Run) -> Metrics:
    """Return the latest entries of the metrics from which a result is made, as the API does."""
    owner = run_owner(run.id)
    sent = {RESULT_METRIC: [{"value": store.newest_value(owner, RESULT_METRIC)}]}
    # The result takes precedence over all other metrics, of which there may be thousands.
    if latest_json(sent, RESULT_METRIC):
        return sent
    metrics = {}
    for name, point in store.latest(owner):
        entry = {"value": point.value, "cumulative": point.cumulative}
        metrics[name] = [{"date": format_date(point.date), **entry}]
    return metrics


def _compare(
    records: Sequence[RunRecord], pricing: Pricing, baseline: str | None
) -> tuple[Sequence[Group], Comparison]:
    groups, table = compare_runs(records, pricing=pricing)
    # A label can change when a run joins, and an address with the old one must still work.
    if baseline is not None and any(group.label == baseline for group in groups):
        return compare_runs(records, pricing=pricing, baseline=baseline)
    return groups, table


def _by_goal(records: dict[int, RunRecord]) -> dict[str, list[int]]:
    by_goal: dict[str, list[int]] = {}
    for run_id, record in records.items():
        if usable([record])[0]:
            by_goal.setdefault(record.goal_text, []).append(run_id)
    return by_goal
