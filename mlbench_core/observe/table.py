"""Print the numbers of an observed script at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["FAILED_EARLY", "NOT_MEASURED", "NO_STEP", "run_rows", "table"]

NOT_MEASURED = "not measured"
NO_STEP = (
    "no step was seen in this process, neither a backward pass nor a step of an optimizer. "
    "Processes that the script starts itself, as with mp.spawn, are not observed"
)
"""Why the result of a script is empty."""
FAILED_EARLY = "the script ended before its first step"


def table(rows: Mapping[str, str | None], unmeasured: Iterable[str]) -> str:
    """Return the table at the end of a run.

    Args:
        rows: Texts by name; None for a number that was not measured.
        unmeasured: Each thing that was not measured, with the reason.

    Example:
        >>> print(table({"steps": "4", "data": None}, ["data: no DataLoader"]))
        mlbench observe
          steps  4
          data   not measured
          not measured: data: no DataLoader
    """
    width = max(map(len, rows), default=0)
    lines = ["mlbench observe"]
    for name, text in rows.items():
        if text is None:
            text = NOT_MEASURED
        lines.append(f"  {name:<{width}}  {text}")
    reasons = "; ".join(unmeasured)
    if reasons:
        lines.append(f"  {NOT_MEASURED}: {reasons}")
    return "\n".join(lines)


def seconds(value: float | None) -> str | None:
    """Return a time as text.

    Example:
        >>> seconds(0.01234), seconds(12.5)
        ('12.34 ms', '12.50 s')
    """
    if value is None:
        return None
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms"


def size(value: float | None) -> str | None:
    """Return a number of bytes as text.

    Example:
        >>> size(1234567.0)
        '1.23 MB'
    """
    if value is None:
        return None
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB"):
        value /= 1000
        if value < 1000:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} GB"


def _before(totals: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the totals after the first step; none if no step followed."""
    if totals["batches"] > first["batches"]:
        return first
    return {}


def _rows_of_a_step(numbers: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the rows of the parts of a step of one worker.

    Args:
        numbers: Totals of the tracker at the end.
        first: Totals after the first step, which also compiles and allocates; the times of a step
            are those of the others.
    """
    before = _before(numbers, first)
    steps = numbers["batches"]
    later = max(1, steps - before.get("batches", 0))

    def per_step(name: str) -> float:
        return float(numbers[name] - before.get(name, 0.0)) / later

    steps_s, before_s = numbers["steps_s"], before.get("steps_s", {})
    optimizer_s = (steps_s.get("opt_step", 0.0) - before_s.get("opt_step", 0.0)) / later
    train_s = per_step("train_s")
    named = {
        "data": per_step("preprocess_s"),
        "compute": per_step("compute_s") - optimizer_s,
        "waiting": per_step("communication_s"),
        "optimizer": optimizer_s,
    }
    rows: dict[str, str | None] = {"steps": str(steps), "seconds of a step": seconds(train_s)}
    for name, value in named.items():
        rows[f"  {name}"] = seconds(value)
    rows["  other"] = seconds(max(0.0, train_s - sum(named.values())))
    # The worker would compute all the time if it never waited for data and for the others.
    computing_s = named["compute"] + named["optimizer"]
    rows["compute utilization"] = None
    if train_s:
        rows["compute utilization"] = f"{computing_s / train_s:.0%}"
    return rows


def run_rows(
    totals: Mapping[str, Any],
    first: Mapping[str, Any],
    world_size: int,
    losses: Sequence[float],
) -> dict[str, str | None]:
    """Return the rows of a run, by the numbers of its first worker.

    Args:
        totals: Totals of the tracker at the end.
        first: Totals after the first step, which also compiles and allocates. The
            times of a step and the data per second are those of the later ones.
        world_size: Number of workers.
        losses: The losses in their order; empty if none was seen.
    """
    steps = totals["batches"]
    rows = _rows_of_a_step(totals, first)
    if world_size > 1:
        hidden_s = totals["communication_total_s"] - totals["communication_exposed_s"]
        wire_bytes = totals.get("communication_wire_bytes")
        rows["hidden communication"] = None
        rows["bytes on the wire"] = None
        if totals["communication_measured"] and steps:
            rows["hidden communication"] = f"{seconds(hidden_s / steps)} a step"
            if wire_bytes is not None:
                rows["bytes on the wire"] = f"{size(wire_bytes / steps)} a step"
        else:
            # It is a part of the backward pass then.
            rows["  waiting"] = rows["compute utilization"] = None
    rows["samples per second"] = None
    before = _before(totals, first)
    train_s = totals["train_s"] - before.get("train_s", 0.0)
    for name in ("samples", "tokens"):
        count = totals[name] - before.get(name, 0)
        if count and train_s:
            rows[f"{name} per second"] = f"{count * world_size / train_s:,.1f}"
    rows["loss"] = None
    if losses:
        rows["loss"] = f"{losses[0]:.6g} first, {losses[-1]:.6g} last"
    return rows
