"""Check result folders against the rules of a submission, as far as a program can: see ``docs/rules.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.errors import ConfigurationError
from mlbench_core.results.convergence import check_convergence, find_reference
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.results.pool import Group, pool, usable
from mlbench_core.results.record import RunRecord

__all__ = ["CHANGES_FILE", "LEAST_REPEATS", "Finding", "check_rules"]

LEAST_REPEATS = 5
"""Runs of one configuration that a submission needs."""

CHANGES_FILE = "changes.md"
"""File in a result folder, or in the folder above it, that declares how the source differs from its commit."""

# Share of the training time by which the sum of the phases may differ from it.
_MOST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Finding:
    """The outcome of one rule for one run or one configuration.

    Attributes:
        status: ``"ok"``, ``"fail"`` or ``"cannot be checked"``.
        subject: The run or the configuration.
        reason: What was found.
    """

    status: str
    subject: str
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.subject}: {self.reason}"


def check_rules(records: Sequence[RunRecord]) -> list[Finding]:
    """Check runs against the rules.

    Args:
        records: Runs with result folders.

    Returns:
        First the findings of each run, then those of each configuration.
    """
    found = [finding for record in records for finding in _check_run(record)]
    for group in pool(usable(records)[0]):
        found += _check_group(group)
    return found


def _check_run(record: RunRecord) -> Iterable[Finding]:
    if record.folder is None:
        yield Finding("cannot be checked", record.name, "it has no result folder")
        return
    if record.state != "finished":
        yield Finding("fail", record.name, f"the run is {record.state} and not finished")
    problems = verify_folder(record.folder)
    if problems:
        yield Finding("fail", record.name, f"it cannot be verified: {'; '.join(problems)}")
    else:
        yield Finding("ok", record.name, "the result follows from the raw lines")
    yield _check_division(record)
    yield _check_source(record, record.folder)
    yield _check_phases(record, record.folder)


def _check_division(record: RunRecord) -> Finding:
    division, changed = record.configuration.get("division"), record.configuration.get("changed") or []
    names = ", ".join(map(str, changed))
    if division not in ("closed", "open"):
        return Finding("cannot be checked", record.name, "the division is not recorded")
    if division == "open":
        return Finding("ok", record.name, f"open division, changed: {names or 'the program itself'}")
    if changed:
        return Finding("fail", record.name, f"the closed division allows no change of hyper-parameters, not of {names}")
    return Finding("ok", record.name, "closed division: the hyper-parameters are those of the task")


def _check_source(record: RunRecord, folder: Path) -> Finding:
    commit, difference = record.software.get("commit"), record.software.get("difference_sha256")
    if not commit:
        return Finding("fail", record.name, "the commit of the source must be known: run it in a checkout")
    if not difference:
        return Finding("ok", record.name, f"the source is commit {str(commit)[:12]}")
    for place in (folder, folder.parent):
        path = place / CHANGES_FILE
        # The hash in the file shows that it describes this difference, and not an earlier one.
        if path.is_file() and str(difference)[:12] in path.read_text(encoding="utf-8", errors="replace"):
            return Finding("ok", record.name, f"the difference to commit {str(commit)[:12]} is declared in {path}")
    return Finding(
        "fail",
        record.name,
        f"the source differs from commit {str(commit)[:12]}: commit the difference, or describe it in {CHANGES_FILE} "
        f"with its hash {str(difference)[:12]}",
    )


def _check_phases(record: RunRecord, folder: Path) -> Finding:
    try:
        # All times of one worker are of one clock. Those of the slowest worker are a maximum for each phase.
        times = (read_result(folder).get("times") or {}).get("rank_0") or {}
    except ConfigurationError as error:
        return Finding("fail", record.name, str(error))
    train_s = times.get("train_s")
    if not train_s:
        return Finding("cannot be checked", record.name, "the training time is not recorded")
    names = ("compute_s", "communication_s", "metrics_s", "data_s", "other_s")
    total_s = sum(times.get(name) or 0.0 for name in names)
    reason = f"the phases add up to {total_s:.3f} s of {train_s:.3f} s of training"
    return Finding("ok" if abs(total_s - train_s) <= _MOST_DIFFERENCE * train_s else "fail", record.name, reason)


def _check_group(group: Group) -> Iterable[Finding]:
    subject = f"{group.label}, {group.workers} worker{'' if group.workers == 1 else 's'}"
    # A run whose seed occurs twice is left out of the group, with a remark.
    yield from (Finding("fail", subject, remark) for remark in group.remarks)
    seeds = [record.seed for record in group.records]
    if None in seeds:
        yield Finding("fail", subject, "the seed of every run must be recorded")
    elif not group.remarks:
        yield Finding("ok", subject, f"the seeds differ: {', '.join(map(str, seeds))}")
    enough = len(group.records) >= LEAST_REPEATS
    yield Finding("ok" if enough else "fail", subject, f"{len(group.records)} of at least {LEAST_REPEATS} runs")
    missed = len(group.records) - len(group.reached)
    if group.records[0].goal is not None:
        yield Finding(
            "fail" if missed else "ok", subject, f"{len(group.reached)} of {len(group.records)} reached the goal"
        )
    yield _check_epochs(group, subject)


def _check_epochs(group: Group, subject: str) -> Finding:
    reference = find_reference(group.configuration)
    name = "steps_to_goal" if reference is not None and reference.unit == "steps" else "epochs_to_goal"
    values = [getattr(record, name) if record.reached else None for record in group.records]
    check = check_convergence(values, reference)
    if check.verdict == "no reference":
        return Finding("cannot be checked", subject, "there is no convergence reference for this configuration")
    if check.verdict == "too few runs":
        return Finding("cannot be checked", subject, "the convergence reference needs at least 3 runs")
    numbers = (
        f"{check.mean:.2f} {check.unit} to the goal, the reference allows {check.smallest:.2f} to {check.largest:.2f}"
    )
    if check.verdict == "consistent":
        return Finding("ok", subject, numbers)
    return Finding("fail", subject, f"suspiciously {check.verdict}: {numbers}")
