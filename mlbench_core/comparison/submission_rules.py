"""Check result folders against the rules of a submission, as far as a program can.

The rules are in ``docs/reference/rules.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.comparison.convergence import check_convergence, find_reference
from mlbench_core.comparison.group_repeats import Group, plural, pool, usable
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.results.folder import verify_folder
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.run_terms import TRACKER_PHASES

__all__ = ["LEAST_REPEATS", "Finding", "check_rules"]

# Two repeats are almost useless, and five give a much narrower interval than three.
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
    findings: list[Finding] = []
    for record in records:
        findings += _check_run(record)
    for group in pool(usable(records)[0]):
        findings += _check_group(group)
    return findings


def _judged(accepted: bool, subject: str, reason: str) -> Finding:
    return Finding("ok" if accepted else "fail", subject, reason)


def _check_run(record: RunRecord) -> Iterable[Finding]:
    if record.folder is None:
        yield Finding("cannot be checked", record.name, "it has no result folder")
        return
    if record.state != "finished":
        # A repeat that failed is part of the result, so it breaks no rule. It counts for nothing
        # below.
        reason = f"the run has the state '{record.state}' and is reported with it"
        yield Finding("ok", record.name, reason)
    # Who invents all raw lines consistently is not found: that needs a repeat of the run.
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
    division = record.configuration.get("division")
    changed = ", ".join(map(str, record.configuration.get("changed") or []))
    if division not in ("closed", "open"):
        return Finding("cannot be checked", record.name, "the division is not recorded")
    if division == "open":
        # A script of the user is always in the open division, without a list of changes.
        reason = f"open division, changed: {changed or 'the program itself'}"
        return Finding("ok", record.name, reason)
    if changed:
        reason = f"the closed division allows no changed hyper-parameter, not {changed}"
        return Finding("fail", record.name, reason)
    return Finding("ok", record.name, "closed division: the hyper-parameters are those of the task")


def _check_source(record: RunRecord) -> Finding:
    commit, difference = record.software.get("commit"), record.software.get("difference_sha256")
    if not commit:
        reason = "the commit of the source is not known: run it in a checkout"
        return Finding("fail", record.name, reason)
    source = f"the source is commit {str(commit)[:12]}"
    if not difference:
        return Finding("ok", record.name, source)
    source += f" with the local difference {str(difference)[:12]}"
    if record.configuration.get("division") == "open":
        # The difference must be published with the result, which its folder cannot show.
        reason = f"{source}: publish the difference with the result"
        return Finding("cannot be checked", record.name, reason)
    # In the closed division, the code is that of a commit that is named.
    return Finding("fail", record.name, f"{source}: the closed division allows no difference")


def _check_phases(record: RunRecord, folder: Path) -> Finding:
    """Check that no worker's phases take longer than its training: a step must not count twice."""
    totals_of = {}
    for line in read_lines(folder):
        if isinstance(line.get("totals"), dict):
            # Totals only grow, so the last line of a worker has all of them.
            totals_of[line["rank"]] = line["totals"]
    excesses = []
    for totals in totals_of.values():
        train_s = totals.get("train_s") or 0.0
        phases_s = []
        for phase in TRACKER_PHASES.values():
            phases_s.append(totals.get(f"{phase}_s") or 0.0)
        # A smaller sum is not wrong: the rest of the training time is the phase "other".
        excess_s = max(sum(phases_s) - train_s, 0.0)
        excesses.append(excess_s / train_s if train_s else 0.0)
    if not excesses:
        return Finding("cannot be checked", record.name, "the training time is not recorded")
    worst = max(excesses)
    reason = f"the sum of the phases exceeds the training time by {worst:.1%} at most"
    return _judged(worst <= _MOST_DIFFERENCE, record.name, reason)


def _check_group(group: Group) -> Iterable[Finding]:
    subject = f"{group.label}, {plural(group.workers, 'worker')}"
    # pool() leaves out a run whose seed occurs twice, and adds a remark.
    for remark in group.remarks:
        yield Finding("fail", subject, remark)
    seeds = [record.seed for record in group.records]
    if None in seeds:
        yield Finding("fail", subject, "a run did not record its seed")
    elif not group.remarks:
        yield Finding("ok", subject, f"the seeds differ: {', '.join(map(str, seeds))}")
    runs = plural(len(group.records), "run")
    reason = f"{runs}, at least {LEAST_REPEATS} are required"
    yield _judged(len(group.records) >= LEAST_REPEATS, subject, reason)
    if group.records[0].goal is not None:
        reason = f"{len(group.reached)} of {len(group.records)} runs reached the goal"
        missed = [record.name for record in group.records if record.reached is False]
        if missed:
            reason += f", not {', '.join(missed)}"
        # A repeat that misses the goal is counted and named, but is not refused.
        yield _judged(bool(group.reached), subject, reason)
    yield _check_epochs(group, subject)


def _check_epochs(group: Group, subject: str) -> Finding:
    reference = find_reference(group.configuration)
    in_steps = reference is not None and reference.unit == "steps"
    name = "steps_to_goal" if in_steps else "epochs_to_goal"
    values = []
    for record in group.records:
        values.append(getattr(record, name) if record.reached else None)
    check = check_convergence(values, reference)
    if check.verdict == "no reference":
        reason = "there is no convergence reference for this configuration"
        return Finding("cannot be checked", subject, reason)
    if check.verdict == "too few runs":
        reason = "the convergence reference needs at least 3 runs"
        return Finding("cannot be checked", subject, reason)
    numbers = (
        f"{check.mean:.2f} {check.unit} to the goal, the reference allows "
        f"{check.smallest:.2f} to {check.largest:.2f}"
    )
    # A run that needs fewer epochs than the reference has probably changed the problem.
    if check.verdict == "fast":
        return Finding("fail", subject, f"suspiciously fast: {numbers}")
    # A slow run has no advantage, so the rules accept it.
    if check.verdict == "slow":
        numbers = f"slow: {numbers}"
    return Finding("ok", subject, numbers)
