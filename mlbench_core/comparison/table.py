"""Compare groups of repeated runs in a table, as terminal text, CSV, JSON or Markdown.

A group with a run that missed its goal has a median and a cost per success, and no mean: see
:mod:`mlbench_core.comparison.goal_times`. Times of a program without a goal are its training times.

Runs whose goal is the best value after a fixed training time are compared by this value. Their
times are equal by definition, so they have no speed-up, no test and no performance profile.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlbench_core.comparison.goal_times import compare_times, cost_per_success_s, median_s
from mlbench_core.comparison.group_repeats import (
    Group,
    Series,
    check_comparable,
    differences,
    plural,
    pool,
    series,
    usable,
    workload,
)
from mlbench_core.comparison.prices import Pricing, price_index
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import (
    describe,
    holm,
    known_values,
    log_interval,
    performance_profile,
    performance_score,
)
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import goal_text

__all__ = [
    "COLUMNS",
    "RATIOS",
    "Column",
    "Comparison",
    "Price",
    "cell",
    "compare_groups",
    "compare_runs",
    "escape",
    "safe_cell",
    "times_to_goal",
]

Price = Callable[[float, int], "float | None"]
"""Function that returns the price of a run from its seconds and its number of workers.

The price is None if it is unknown.
"""

RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Factors of the best time at which performance profiles are given."""

_MEGA = 1e6
# All except tab and line feed: a name with such characters could change the reader's terminal.
# Marks that turn the direction of text, and characters without width, make it look like another
# name.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: Name in JSON and CSV; the unit is its last part if it has one.
        header: Title with the unit, for people.
        digits: Digits after the decimal point; None for a text.
        table: Title of the table for people that has this column.
        missing: Text for people if the value of a row is unknown.
    """

    key: str
    header: str
    digits: int | None = None
    table: str = "time"
    missing: str = "-"


_NOT_MEASURED = "not measured"

_NAMES = (Column("label", "CONFIGURATION"), Column("workers", "WORKERS", 0))

COLUMNS = (
    *_NAMES,
    Column("workload", "TASK", table="data"),
    Column("goal", "GOAL", table="data"),
    Column("runs", "N", 0),
    # Empty if the runs have no goal.
    Column("reached", "REACHED", 0),
    Column("missed", "MISSED", 0),
    # Only of a goal with a fixed training time, whose times are equal by definition.
    Column("goal_value", "VALUE", 2),
    Column("goal_value_standard_deviation", "VALUE SD", 2),
    # A row with a miss has none of these except the median and the cost per success.
    Column("mean_s", "MEAN (s)", 2),
    Column("standard_deviation_s", "SD (s)", 2),
    Column("median_s", "MEDIAN (s)", 2),
    Column("interval_low_s", "95 % FROM (s)", 2),
    Column("interval_high_s", "TO (s)", 2),
    # As MLPerf scores repeats: without the fastest and the slowest one.
    Column("olympic_mean_s", "OLYMPIC (s)", 2),
    Column("cost_per_success_s", "COST PER SUCCESS (s)", 2),
    # The time to the goal is the product of these two. The first hardly depends on the machine, and
    # the second hardly on the seed.
    Column("epochs_to_goal", "EPOCHS TO GOAL", 1),
    Column("seconds_per_epoch_s", "EPOCH (s)", 3),
    # Of runs that count steps, instead of the two before.
    Column("steps_to_goal", "STEPS TO GOAL", 0),
    Column("tokens_to_goal", "TOKENS TO GOAL", 0),
    Column("train_s", "TRAINING (s)", 2, "scaling"),
    Column("times_as_fast", "x BASELINE", 2, "scaling"),
    # The time of the fewest workers divided by this time.
    Column("speedup", "SPEED-UP", 2, "scaling"),
    # If it differs from the speed-up, the network limits the scaling.
    Column("speedup_without_communication", "WITHOUT COMM.", 2, "scaling"),
    Column("efficiency", "EFFICIENCY", 2, "scaling"),
    # Exposed time includes waiting for a slower worker.
    Column("communication_exposed_s", "EXPOSED (s)", 2, "scaling", _NOT_MEASURED),
    Column("communication_hidden_s", "HIDDEN (s)", 2, "scaling", _NOT_MEASURED),
    # Bytes and samples are sums over all workers, and every time is that of the slowest one.
    Column("bytes_on_wire_mb", "ON THE WIRE (MB)", 2, "scaling", _NOT_MEASURED),
    # Workers handed these to collectives, which put those of the column before on the wire.
    Column("bytes_sent_mb", "HANDED OVER (MB)", 2, "scaling", _NOT_MEASURED),
    Column("samples_per_s", "SAMPLES/S", 0, "scaling"),
    Column("best", "BEST", 2, "scaling"),
    # The price of the cost per success; without misses, it is that of the mean.
    Column("price", "PRICE", 4, "scaling"),
    # Below 1, more workers pay for themselves.
    Column("price_index", "PRICE INDEX", 2, "scaling"),
)
"""All columns, in the order of the CSV file."""

_TESTS = (
    Column("a", "A"),
    Column("b", "B"),
    Column("workers", "WORKERS"),
    Column("test", "TEST"),
    Column("ratio", "A / B", 2),
    Column("ratio_low", "95 % FROM", 2),
    Column("ratio_high", "TO", 2),
    Column("effect", "EFFECT (g)", 2),
    Column("p", "P", 4),
    # Without a correction, of 20 pairs that are equal, one would be called different.
    Column("p_holm", "P (HOLM)", 4),
    Column("verdict", "IS A FASTER?"),
)


@dataclass(frozen=True)
class Comparison:
    """The table of some groups, with the tests between them.

    Attributes:
        rows: One for each group, with an entry for each of :data:`COLUMNS` and ``names``, the names
            of its runs.
        tests: One for each pair of groups: ``a``, ``b``, ``workers``, ``test``, ``ratio``,
            ``ratio_low``, ``ratio_high``, ``effect``, ``p``, ``p_holm`` and ``verdict``.
        profile: Share of the tasks that each algorithm solves within each of :data:`RATIOS` of the
            best time, and ``score``; empty with one task.
        differences: Differences between the groups, see
            :func:`~mlbench_core.comparison.group_repeats.differences`.
        remarks: Sentences for people.
    """

    rows: tuple[dict[str, Any], ...]
    tests: tuple[dict[str, Any], ...] = ()
    profile: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    differences: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def tables(self) -> list[tuple[Sequence[Column], Sequence[Mapping[str, Any]]]]:
        """Return the tables for people: columns and rows.

        A column without any value is left out, unless it says of a row with several workers that it
        was not measured.
        """
        tables: list[tuple[Sequence[Column], Sequence[Mapping[str, Any]]]] = []
        for title in ("time", "scaling"):
            columns = []
            for column in COLUMNS[len(_NAMES) :]:
                if column.table == title and _is_shown(column, self.rows):
                    columns.append(column)
            if columns:
                tables.append(([*_NAMES, *columns], self.rows))
        if self.tests:
            tables.append((_TESTS, self.tests))
        if self.profile:
            columns = [Column("algorithm", "PERFORMANCE PROFILE"), Column("score", "SCORE", 2)]
            for ratio in RATIOS:
                columns.append(Column(f"{ratio:g}", f"<= {ratio:g} x BEST", 2))
            rows: list[dict[str, Any]] = []
            for name, shares in self.profile.items():
                rows.append({"algorithm": name, **shares})
            tables.append((columns, rows))
        return tables

    def notes(self) -> list[str]:
        """Return the lines below the tables: the differences between rows, and remarks."""
        lines = []
        if self.differences:
            parts = itertools.starmap(_difference_text, self.differences.items())
            lines.append(f"The rows differ in {'; '.join(parts)}.")
        # A dictionary has each goal once, in the order of the rows.
        goals: dict[str, None] = {}
        has_miss = has_value = False
        for row in self.rows:
            goals[f"{row['workload']}: {row['goal']}"] = None
            has_miss = has_miss or bool(row.get("missed"))
            has_value = has_value or row.get("goal_value") is not None
        times = "training times until the goal"
        # Runs without a goal end after their epochs, so "until the goal" would be wrong.
        if all(row["goal"] == goal_text(None) for row in self.rows):
            times = "training times"
        lines.append(
            f"Goal: {'; '.join(goals)}. Times are {times}, and the interval is that of the "
            "geometric mean."
        )
        # Only columns that the table shows are explained.
        if has_miss:
            lines.append(
                "A row with a missed run has no mean. Its median counts a miss as longer than "
                "every time. The cost per success is the training time of all runs, divided by "
                "the number of those that reached the goal."
            )
        if has_value:
            lines.append(
                "VALUE is the mean of the best values after the training time, and VALUE SD "
                "their deviation."
            )
        if self.tests:
            lines.append(
                "Tests: t tests on the logarithms of the times, two-sided at 5 % after Holm's "
                "correction for all pairs: paired if both have the same seeds, Welch's otherwise. "
                "A / B is the ratio of the geometric means. The effect is Hedges' g; 0.8 and more "
                "is large."
            )
        return [*lines, *self.remarks]

    def as_csv(self) -> str:
        """Return all columns as CSV; a value that is unknown is empty."""
        return csv_text(COLUMNS, self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; a value that is unknown or not finite is None."""
        content = {
            "rows": self.rows,
            "tests": self.tests,
            "profile": self.profile,
            "differences": self.differences,
            "remarks": self.remarks,
        }
        finite: dict[str, Any] = _finite(content)
        return finite

    def as_markdown(self) -> str:
        """Return the tables for people and the notes as Markdown."""
        parts = []
        for columns, rows in self.tables():
            parts.append("\n".join(markdown_lines(columns, rows)))
        return "\n\n".join([*parts, *map(escape, self.notes())]) + "\n"


def compare_runs(
    records: Iterable[RunRecord], *, pricing: Pricing | None = None, baseline: str | None = None
) -> tuple[list[Group], Comparison]:
    """Pool the runs that can be compared, and compare the groups.

    Args:
        records: The runs.
        pricing: Price of the machines; None if it is unknown.
        baseline: See :func:`compare_groups`.

    Returns:
        The groups, and their comparison, in which a remark names each run that is left out. Both
        are empty if no run can be compared.

    Raises:
        ConfigurationError: Runs had different goals, or no group has the label ``baseline``.
    """
    kept, left_out = usable(records)
    if not kept:
        return [], Comparison(rows=(), remarks=tuple(left_out))
    check_comparable(kept)
    groups = pool(kept)
    pricing = pricing or Pricing()
    price: Price | None = None
    if pricing.machine:
        price = pricing.price
    return groups, compare_groups(
        groups, price=price, baseline=baseline, remarks=[*pricing.remarks, *left_out]
    )


def compare_groups(
    groups: Sequence[Group],
    *,
    price: Price | None = None,
    baseline: str | None = None,
    remarks: Iterable[str] = (),
) -> Comparison:
    """Compare groups of repeated runs.

    Args:
        groups: The groups, see :func:`~mlbench_core.comparison.group_repeats.pool`.
        price: Price of a run; None if it is unknown.
        baseline: Label of the groups against which all others are tested. By default, every pair is
            tested that has the same number of workers.
        remarks: Further sentences for people.

    Raises:
        ConfigurationError: No group has the label ``baseline``; the message lists the labels.
    """
    labels = dict.fromkeys(map(operator.attrgetter("label"), groups))
    if baseline is not None and baseline not in labels:
        quoted = ", ".join(f"'{label}'" for label in labels)
        raise ConfigurationError(
            f"baseline must be one of {quoted}, not {baseline!r}: give the label of a row"
        )
    rows: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    for each in series(groups):
        of_series = _rows(each, price)
        rows += of_series
        # The times of a goal with a fixed training time are equal by definition.
        if not each.groups[0].records[0].has_fixed_time:
            timed += of_series
    _add_ratios(timed, baseline)
    # In the order of the groups, whatever the order of the series.
    order: dict[tuple[str, int], int] = {}
    for position, group in enumerate(groups):
        order[group.label, group.workers] = position
    rows.sort(key=lambda row: order[row["label"], row["workers"]])
    all_remarks: list[str] = []
    for group in groups:
        all_remarks += group.remarks
    for group in groups:
        for record in group.records:
            for remark in record.remarks:
                all_remarks.append(f"{record.name}: {remark}")
    all_remarks += remarks
    return Comparison(
        rows=tuple(rows),
        tests=tuple(_tests(groups, baseline)),
        profile=_profile(groups),
        differences=differences(groups),
        remarks=tuple(dict.fromkeys(all_remarks)),
    )


def _difference_text(name: str, values: Iterable[Any]) -> str:
    """Return a property in which rows differ and its values, for people."""
    longest: int | None = None
    # The beginning of a hash is enough to distinguish two of them.
    if name.endswith(("commit", "sha256")):
        longest = 12
    texts = []
    for value in values:
        if value is None:
            text = "none"
        elif name == "goal":
            text = goal_text(value)
        else:
            text = str(value)
        texts.append(text[:longest])
    return f"{name} ({', '.join(texts)})"


def _rows(of: Series, price: Price | None) -> list[dict[str, Any]]:
    """Return the rows of one series."""
    groups = of.groups
    # Without the time of the fewest workers there is no reference: that of more workers would look
    # like a better one. Nor is there one if they ran on several numbers of hosts or GPUs.
    base, *others = groups
    has_base = all(group.workers > base.workers for group in others)
    rows = []
    for group in groups:
        row = _times(group, price)
        if has_base and not group.records[0].has_fixed_time:
            row |= _scaling(group, base, price)
        rows.append(row)
    return rows


def _scaling(group: Group, base: Group, price: Price | None) -> dict[str, float]:
    """Return the known columns that compare a group with that of the fewest workers."""
    total_s, base_s = _mean(group, "total_s"), _mean(base, "total_s")
    if not total_s or not base_s:
        return {}
    compute_s = _mean(group, "without_communication_s")
    speedup = base_s / total_s
    columns = {"speedup": speedup, "efficiency": speedup * base.workers / group.workers}
    if compute_s:
        columns["speedup_without_communication"] = base_s / compute_s
    if price is not None and price(total_s, group.workers) is not None:
        columns["price_index"] = price_index(total_s, group.workers, base_s, base.workers)
    return columns


def _add_ratios(rows: Sequence[dict[str, Any]], baseline: str | None) -> None:
    """Set how many times as fast each row is as the baseline with its task and workers."""
    base: dict[tuple[str, int], float | None] = {}
    for row in rows:
        if row["label"] == baseline:
            key = (row["workload"], row["workers"])
            # Of equal workers on several numbers of hosts or GPUs, none is the baseline.
            base[key] = None if key in base else row["mean_s"]
    for row in rows:
        mean = base.get((row["workload"], row["workers"]))
        if mean and row["mean_s"]:
            row["times_as_fast"] = mean / row["mean_s"]


def _times(group: Group, price: Price | None) -> dict[str, Any]:
    """Return a row with the columns that need no other group, and None in the others."""
    seconds = describe(group.values("total_s"))
    low, high = log_interval(group.values("total_s")) or (None, None)
    cost_s = cost_per_success_s(group.records)
    row: dict[str, Any] = dict.fromkeys(map(operator.attrgetter("key"), COLUMNS))
    row |= {
        "label": group.label,
        "workers": group.workers,
        "workload": _workload_text(group),
        "goal": group.records[0].goal_text,
        "names": list(map(operator.attrgetter("name"), group.records)),
        "runs": len(group.records),
        "mean_s": seconds.mean,
        "standard_deviation_s": seconds.standard_deviation,
        "median_s": median_s(group.records),
        "interval_low_s": low,
        "interval_high_s": high,
        "olympic_mean_s": seconds.olympic_mean,
        "cost_per_success_s": cost_s,
        "epochs_to_goal": _mean(group, "epochs_to_goal"),
        "seconds_per_epoch_s": _mean(group, "seconds_per_epoch"),
        "train_s": _mean(group, "train_s"),
        "communication_exposed_s": _mean(group, "communication_exposed_s"),
        "communication_hidden_s": _mean(group, "communication_hidden_s"),
        "samples_per_s": _mean(group, "samples_per_s"),
        "best": describe(_values_of_all(group, "best")).mean,
    }
    # Without a goal, or if it is not known, the columns stay empty.
    if known_values(map(operator.attrgetter("reached"), group.records)):
        row |= {"reached": len(group.reached), "missed": group.missed}
    if group.records[0].unit == "steps":
        for name in ("steps_to_goal", "tokens_to_goal"):
            row[name] = _mean(group, name)
    if group.records[0].has_fixed_time:
        values = describe(_values_of_all(group, "goal_value"))
        row["goal_value"] = values.mean
        row["goal_value_standard_deviation"] = values.standard_deviation
    for name in ("bytes_sent", "bytes_on_wire"):
        mean_bytes = _mean(group, name)
        if mean_bytes is not None:
            row[f"{name}_mb"] = mean_bytes / _MEGA
    if price is not None and cost_s is not None:
        row["price"] = price(cost_s, group.workers)
    return row


def _mean(group: Group, name: str) -> float | None:
    values = group.values(name)
    if not values:
        return None
    return statistics.fmean(values)


def _values_of_all(group: Group, name: str) -> list[float]:
    """Return an attribute of every run, to be averaged; an empty list if a run lacks it.

    A metric that is not a number has no value, and without it the other runs would look better.
    """
    values = group.values(name)
    if len(values) < len(group.records):
        return []
    return values


def _workload_text(group: Group) -> str:
    name, dataset = workload(group.records[0])
    if group.configuration.get("task"):
        name = f"task {name}"
    if dataset != "None":
        name += f" on {dataset}"
    return name


def _tests(groups: Sequence[Group], baseline: str | None) -> list[dict[str, Any]]:
    """Test each pair of groups of one workload that have equal numbers of workers or labels."""
    tests = []
    several = len(set(map(operator.attrgetter("label"), groups))) > 1
    for a, b in itertools.combinations(groups, 2):
        # Times of separate workloads allow no conclusion, nor do fixed training times.
        if workload(a.records[0]) != workload(b.records[0]) or a.records[0].has_fixed_time:
            continue
        # Groups of one series are compared only if there is nothing else to compare: their
        # speed-ups are in the table.
        if several and a.workers != b.workers:
            continue
        if baseline is not None and several:
            if baseline not in (a.label, b.label):
                continue
            if a.label == baseline:
                a, b = b, a
        tests.append(_test(a, b))
    tested = [row for row in tests if row["p"] is not None]
    # Over all pairs of the table: the probability of any wrong "yes" in it stays below 5 %.
    adjusted = holm(list(map(operator.itemgetter("p"), tested)))
    for row, p_holm in zip(tested, adjusted, strict=True):
        row["p_holm"] = p_holm
        if p_holm >= 0.05:
            # This does not mean that they are equally fast: the interval has the ratios that the
            # data does not exclude.
            row["verdict"] = "no difference shown"
        elif row["ratio"] < 1:
            row["verdict"] = "yes"
        else:
            row["verdict"] = "no, slower"
    return tests


def _test(a: Group, b: Group) -> dict[str, Any]:
    """Return the test of two groups, without the columns that depend on the other tests."""
    workers = str(a.workers) if a.workers == b.workers else f"{a.workers} and {b.workers}"
    row: dict[str, Any] = {
        "a": a.label,
        "b": b.label,
        "workers": workers,
        **dict.fromkeys(("test", "ratio", "ratio_low", "ratio_high", "effect", "p", "p_holm")),
    }
    test = compare_times(a.records, b.records)
    if test is not None:
        row |= {"test": test.kind, "ratio": test.ratio, "effect": test.effect, "p": test.p}
        row["ratio_low"], row["ratio_high"] = test.interval
    elif a.missed or b.missed:
        row["verdict"] = "not tested: a run missed the goal"
    else:
        row["verdict"] = "not tested: each needs two runs with a time"
    return row


def times_to_goal(groups: Sequence[Group]) -> dict[str, dict[str, float | None]]:
    """Return the median time to the goal of each algorithm on each workload.

    Performance profiles need these times. In the median, a miss is longer than every time, so a
    setting solves the workload if more than half of its runs reach the goal. Of several settings of
    one algorithm, the fastest counts, as after tuning.

    Args:
        groups: Groups of runs. Those whose goal has a fixed training time are left out.

    Returns:
        Algorithm with its number of workers to workload to seconds; None if the workload is not
        solved.
    """
    times: dict[str, dict[str, float | None]] = {}
    for group in groups:
        if group.records[0].has_fixed_time:
            continue
        algorithm = str(group.configuration.get("algorithm") or "default")
        name = f"{algorithm}, {plural(group.workers, 'worker')}"
        median = median_s(group.records)
        row, task = times.setdefault(name, {}), _workload_text(group)
        if median:
            row[task] = min(median, row.get(task) or math.inf)
        else:
            row.setdefault(task, None)
    return times


def _profile(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return AlgoPerf's performance profiles over the workloads; empty with a single workload."""
    times = times_to_goal(groups)
    if len(set(itertools.chain.from_iterable(times.values()))) < 2:
        return {}
    scores = performance_score(times)
    columns = [f"{ratio:g}" for ratio in RATIOS]
    profile = {}
    for name, shares in performance_profile(times, RATIOS).items():
        profile[name] = {"score": scores[name], **dict(zip(columns, shares, strict=True))}
    return profile


def csv_text(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table as CSV with the keys of its columns; a value that is unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(map(operator.attrgetter("key"), columns))
    writer.writerow(keys)
    values_of = operator.itemgetter(*keys)
    for row in rows:
        writer.writerow(map(safe_cell, values_of(row)))
    return text.getvalue()


def markdown_lines(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a table for people as lines of Markdown."""
    headers: list[str] = []
    rulers: list[str] = []
    for column in columns:
        headers.append(column.header)
        # The colon aligns numbers on the right.
        rulers.append("---" if column.digits is None else "---:")
    table = [headers, rulers]
    for row in rows:
        table.append([escape(cell(column, row)) for column in columns])
    return [f"| {' | '.join(cells)} |" for cells in table]


def cell(column: Column, row: Mapping[str, Any]) -> str:
    """Return the value of a row in a column as a text for people."""
    value = row[column.key]
    if value is None:
        # A row with a miss has no means, also of quantities that were measured.
        return "-" if row.get("missed") else column.missing
    if column.key in ("p", "p_holm") and value < 1e-4:
        return "< 0.0001"
    if column.digits is None:
        return str(value)
    return f"{value:,.{column.digits}f}"


def _is_shown(column: Column, rows: Iterable[Mapping[str, Any]]) -> bool:
    for row in rows:
        if row[column.key] is not None:
            return True
        if cell(column, row) == _NOT_MEASURED and row["workers"] > 1:
            return True
    return False


def safe_cell(value: Any) -> Any:
    """Return a value for a CSV file that people may open in a spreadsheet."""
    if not isinstance(value, str):
        return value
    text = _CONTROL.sub("", value)
    # A spreadsheet would run a text that begins with one of these as a formula.
    if text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{text}"
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    if isinstance(value, str | int | float | None):
        return value
    return json.loads(json.dumps(value, default=str))


def escape(text: str) -> str:
    """Escape the characters of a text that Markdown or HTML would interpret."""
    for character in "\\|`*_<>[]":
        text = text.replace(character, f"\\{character}")
    return _CONTROL.sub("", " ".join(text.split()))
