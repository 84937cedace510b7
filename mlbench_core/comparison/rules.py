"""Check result folders against the rules of a submission, as far as a program can: see ``docs/reference/rules.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.comparison.convergence import check_convergence, find_reference
from mlbench_core.comparison.pool import Group, plural, pool, usable
from mlbench_core.comparison.record import RunRecord
from mlbench_core.results.folder import verify_folder
from mlbench_core.results.lines import read_lines
from mlbench_core.run_terms import TRACKER_PHASES

__all__ = ["LEAST_REPEATS", "Finding", "check_rules"]

LEAST_REPEATS = 5
"""Runs of one configuration that a submission needs."""

# Share of the training time by which the sum of the phases may exceed it.
_MOST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Finding:
    """The outcome of one rule for one run or one configuration.

    Attributes:
        status: ``"ok"``, ``"fail"`` or ``"cannot be checked"``.
        subject: The run or the configuration.
        reason: The reason for the status, for people.
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
        # A repeat that failed is part of the result, so it breaks no rule. It counts for nothing
        # below.
        yield Finding(
            "ok", record.name, f"the run has the state '{record.state}' and is reported with it"
        )
    problems = verify_folder(record.folder)
    if problems:
        yield Finding("fail", record.name, f"it cannot be verified: {'; '.join(problems)}")
    else:
        yield Finding("ok", record.name, "the result follows from the raw lines")
    yield _check_division(record)
    yield _check_source(record)
    # A failure inside a batch leaves steps without the time of their batch.
    if record.state != "failed":
        yield _check_phases(record, record.folder)


def _check_division(record: RunRecord) -> Finding:
    division, changed = (
        record.configuration.get("division"),
        record.configuration.get("changed") or [],
    )
    names = ", ".join(map(str, changed))
    if division not in ("closed", "open"):
        return Finding("cannot be checked", record.name, "the division is not recorded")
    if division == "open":
        return Finding(
            "ok", record.name, f"open division, changed: {names or 'the program itself'}"
        )
    if changed:
        return Finding(
            "fail",
            record.name,
            f"the closed division allows no changed hyper-parameter, not {names}",
        )
    return Finding("ok", record.name, "closed division: the hyper-parameters are those of the task")


def _check_source(record: RunRecord) -> Finding:
    commit, difference = record.software.get("commit"), record.software.get("difference_sha256")
    if not commit:
        return Finding(
            "fail", record.name, "the commit of the source is not known: run it in a checkout"
        )
    source = f"the source is commit {str(commit)[:12]}"
    if not difference:
        return Finding("ok", record.name, source)
    source += f" with the local difference {str(difference)[:12]}"
    if record.configuration.get("division") == "open":
        return Finding(
            "cannot be checked", record.name, f"{source}: publish the difference with the result"
        )
    return Finding("fail", record.name, f"{source}: the closed division allows no difference")


def _check_phases(record: RunRecord, folder: Path) -> Finding:
    """Check that the phases of no worker add up to more than its training time: a step must not count twice."""
    last = {
        line["rank"]: line["totals"]
        for line in read_lines(folder)
        if isinstance(line.get("totals"), dict)
    }
    excesses = []
    for totals in last.values():
        train_s = totals.get("train_s") or 0.0
        total_s = sum(totals.get(f"{phase}_s") or 0.0 for phase in TRACKER_PHASES.values())
        # A smaller sum is not wrong: the rest of the training time is the phase "other".
        excesses.append(max(total_s - train_s, 0.0) / train_s if train_s else 0.0)
    if not excesses:
        return Finding("cannot be checked", record.name, "the training time is not recorded")
    worst = max(excesses)
    reason = f"the sum of the phases exceeds the training time by {worst:.1%} at most"
    return Finding("ok" if worst <= _MOST_DIFFERENCE else "fail", record.name, reason)


def _check_group(group: Group) -> Iterable[Finding]:
    subject = f"{group.label}, {plural(group.workers, 'worker')}"
    # pool() leaves out a run whose seed occurs twice, and adds a remark.
    yield from (Finding("fail", subject, remark) for remark in group.remarks)
    seeds = [record.seed for record in group.records]
    if None in seeds:
        yield Finding("fail", subject, "a run did not record its seed")
    elif not group.remarks:
        yield Finding("ok", subject, f"the seeds differ: {', '.join(map(str, seeds))}")
    enough = len(group.records) >= LEAST_REPEATS
    yield Finding(
        "ok" if enough else "fail",
        subject,
        f"{plural(len(group.records), 'run')}, at least {LEAST_REPEATS} are required",
    )
    if group.records[0].goal is not None:
        missed = ", ".join(record.name for record in group.records if record.reached is False)
        reason = f"{len(group.reached)} of {len(group.records)} runs reached the goal"
        yield Finding(
            "ok" if group.reached else "fail",
            subject,
            reason + (f", not {missed}" if missed else ""),
        )
    yield _check_epochs(group, subject)


def _check_epochs(group: Group, subject: str) -> Finding:
    reference = find_reference(group.configuration)
    name = (
        "steps_to_goal" if reference is not None and reference.unit == "steps" else "epochs_to_goal"
    )
    values = [getattr(record, name) if record.reached else None for record in group.records]
    check = check_convergence(values, reference)
    if check.verdict == "no reference":
        return Finding(
            "cannot be checked", subject, "there is no convergence reference for this configuration"
        )
    if check.verdict == "too few runs":
        return Finding(
            "cannot be checked", subject, "the convergence reference needs at least 3 runs"
        )
    numbers = (
        f"{check.mean:.2f} {check.unit} to the goal, the reference allows "
        f"{check.smallest:.2f} to {check.largest:.2f}"
    )
    if check.verdict == "fast":
        return Finding("fail", subject, f"suspiciously fast: {numbers}")
    # A slow run has no advantage, so the rules accept it.
    return Finding("ok", subject, f"slow: {numbers}" if check.verdict == "slow" else numbers)
