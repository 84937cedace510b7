"""Convergence references follow MLPerf's rule, and those that ship fit the runs of their task."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from mlbench_core.comparison.convergence import (
    Reference,
    check_convergence,
    deciding_options,
    find_reference,
    load_references,
)
from mlbench_core.errors import ConfigurationError
from mlbench_core.tasks import get_task

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=40)
GOAL = {"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False}


def make(*values: float, **others: Any) -> Reference:
    seeds = dict(enumerate(values, 1))
    return Reference("1a", "digits", GOAL, "centralized_sgd", 1, 128, seeds, **others)


VARIED = make(9, 8, 10, 9, 8, 9, 10, 9, 8, 12)
SAME = make(*[3] * 10)


@repeatable
@given(
    seeds=st.lists(st.integers(2, 12), min_size=10, max_size=16),
    runs=st.lists(st.integers(1, 14), min_size=5, max_size=5),
)
def test_limits_and_verdicts_are_those_of_mlperfs_checker(
    seeds: list[int], runs: list[int]
) -> None:
    """With a resolution of 0; MLPerf's 'resnet' asks for 5 runs."""
    record = {
        "Benchmark": "resnet",
        "BS": 128,
        "Hyperparams": {},
        "Epochs to converge": list(seeds),
    }
    checker = RCP_Checker(
        "training", "5.0.0", "resnet", False, io.StringIO(json.dumps({"one": record}))
    )
    theirs = checker._find_rcp(128, "full_rcps")
    reference = make(*seeds, resolution=0)
    check = check_convergence(runs, reference)
    assert reference.mean == pytest.approx(theirs["RCP Mean"])
    assert reference.standard_deviation == pytest.approx(theirs["RCP Stdev"])
    assert check.smallest == pytest.approx(theirs["Min Epochs"], abs=1e-4)
    # Their search for the limit stops within 1e-4 of it.
    assume(abs(check.mean - check.smallest) > 2e-4 or reference.standard_deviation == 0)
    passed, factor = checker._eval_submission_record(theirs, list(runs), "")
    assert (check.verdict != "fast") == passed
    assert check.score_factor == pytest.approx(factor)
    # The p value of their test, which is over the sizes of the olympic means.
    if reference.standard_deviation > 0:
        deviation = reference.standard_deviation
        above, p = checker._find_p_value(
            check.mean, deviation, 3, reference.mean, deviation, len(seeds) - 2
        )
        assert check.p_fast == pytest.approx(p, abs=1e-9)
        assert above == passed


def test_fast_slow_and_consistent_runs() -> None:
    assert VARIED.mean == pytest.approx(9)
    for runs, verdict in (
        ([9, 8, 9], "consistent"),
        ([6, 6, 7, 6, 6], "fast"),
        ([12, 13, 12, 12, 14], "slow"),
    ):
        check = check_convergence(runs, VARIED)
        assert (check.verdict, check.runs, check.not_reached, check.unit) == (
            verdict,
            len(runs),
            0,
            "epochs",
        )
        assert check.p_fast + check.p_slow == pytest.approx(1)
        assert (check.p_fast < 0.05, check.p_slow < 0.05) == (verdict == "fast", verdict == "slow")
        assert (check.smallest <= check.mean <= check.largest) == (verdict == "consistent")
    assert check_convergence([6, 6, 7, 6, 6], VARIED).score_factor == pytest.approx(9 / 6)
    assert check_convergence([12, 13, 12], VARIED).score_factor == 1


def test_the_limits_lie_on_both_sides_and_come_closer_with_more_runs() -> None:
    few, many = VARIED.limits(3), VARIED.limits(50)
    assert few[0] < many[0] < VARIED.mean < many[1] < few[1]
    assert VARIED.mean - few[0] == pytest.approx(few[1] - VARIED.mean)
    # No run needs less than no epoch, however much the seeds differ.
    assert make(1, 1, 1, 1, 1, 20, 20, 20, 20, 20).limits(3)[0] == 0


def test_one_run_without_the_goal_is_the_slowest_and_two_are_slow() -> None:
    one = check_convergence([9, None, 8, 9, 9], VARIED)
    assert (one.verdict, one.not_reached, one.mean) == ("consistent", 1, 9)
    two = check_convergence([9, None, 8, None, 9], VARIED)
    assert (two.verdict, two.not_reached, two.mean, two.p_slow, two.score_factor) == (
        "slow",
        2,
        math.inf,
        0,
        1,
    )


def test_seeds_that_all_need_the_same_epochs_allow_a_rounding_error() -> None:
    assert SAME.standard_deviation == pytest.approx(1 / math.sqrt(12))
    assert check_convergence([3, 3, 3, 3, 3], SAME).verdict == "consistent"
    assert check_convergence([2, 2, 3, 3, 3], SAME).verdict == "consistent"
    assert check_convergence([2, 2, 2, 3, 3], SAME).verdict == "fast"
    assert check_convergence([4, 4, 4, 3, 3], SAME).verdict == "slow"
    exact = replace(SAME, resolution=0)
    assert exact.limits(5) == (3, 3)
    # Without a resolution there is no variance, and the means alone decide.
    for runs, verdict, p_fast in (
        ([3] * 5, "consistent", 0.5),
        ([2, 2, 3, 3, 3], "fast", 0),
        ([4, 4, 3, 3, 3], "slow", 1),
    ):
        check = check_convergence(runs, exact)
        assert (check.verdict, check.p_fast) == (verdict, p_fast)


def test_no_reference_and_too_few_runs_are_verdicts() -> None:
    none = check_convergence([3, 4, None], None)
    assert (none.verdict, none.runs, none.not_reached, none.mean) == ("no reference", 3, 1, None)
    few = check_convergence([9, 9], VARIED)
    assert (few.verdict, few.runs, few.mean, few.smallest) == ("too few runs", 2, None, None)
    assert few.reference_mean == VARIED.mean


def configuration(**changes: Any) -> dict[str, Any]:
    return {
        "task": "1a", "dataset": "digits", "preset": None, "algorithm": "centralized_sgd",
        "workers": 1,
        "options": {"channels_last": True, "data": "/somewhere"}, "backend": "gloo", "seed": 7,
        "goal": dict(GOAL),
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "2a"},
        {"dataset": "mnist"},
        {"preset": "small"},
        {"algorithm": "powersgd"},
        {"workers": 2},
        {"options": {"batch-size": 32}},
        {"goal": None},
        {"goal": {**GOAL, "threshold": 90.0}},
        {"goal": {**GOAL, "minimize": True}},
    ],
)
def test_a_reference_is_found_for_its_own_configuration_only(changes: dict[str, Any]) -> None:
    other = replace(VARIED, dataset="other")
    assert find_reference(configuration(), [other, VARIED]) is VARIED
    assert find_reference(configuration(backend="mpi", seed=1, options={}), [VARIED]) is VARIED
    assert find_reference(configuration(**changes), [VARIED]) is None


def test_a_reference_with_options_needs_these_options() -> None:
    small = replace(VARIED, options={"batch_size": 32}, batch_size=32)
    assert (
        find_reference(configuration(options={"--batch-size": 32, "seed": 3}), [VARIED, small])
        is small
    )
    assert deciding_options({"root-output": "x", "no_augment": True}) == {"no_augment": True}


def test_a_reference_survives_its_file(tmp_path: Path) -> None:
    written = replace(
        VARIED,
        options={"batch_size": 32},
        machine="A, 2 cores",
        date="2026-11-22",
        command="python x",
    )
    written.save(tmp_path / "folder" / "b.json")
    replace(written, dataset="other").save(tmp_path / "folder" / "a.json")
    assert load_references(tmp_path / "folder") == [replace(written, dataset="other"), written]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "its content is not an object in braces"),
        ("{}", "its schema_version is None, not 1"),
        ('{"schema_version": 2}', "its schema_version is 2, not 1"),
        ('{"schema_version": 1}', "the field 'values' is missing"),
        ('{"schema_version": 1, "values": {}}', "missing 6 required"),
        ('{"schema_version": 1, "values": {"one": 2}}', "invalid literal"),
    ],
)
def test_a_damaged_reference_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigurationError, match=rf"bad\.json is not a .*: .*{message}.*; make it"):
        load_references(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent does not exist: give a folder"):
        load_references(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": {1: 2, 2: 3}}, "values must have at least 10 seeds, not 2: run more seeds"),
        (
            {"values": dict.fromkeys(range(10), 0)},
            "the value of seed 0 must be finite and positive, not 0",
        ),
        ({"unit": "hours"}, "unit must be 'epochs' or 'steps', not 'hours'"),
        ({"resolution": -1}, "resolution must be finite and at least 0, not -1"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
    ],
)
def test_a_wrong_reference_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(VARIED, **changes)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_wrong_number_of_epochs_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^each value must be finite and positive"):
        check_convergence([3, 3, value], None)
    with pytest.raises(ValueError, match=r"^runs must be at least 3, not 2"):
        VARIED.limits(2)


def test_references_ship() -> None:
    assert "digits" in {reference.dataset for reference in load_references()}


@pytest.mark.parametrize("reference", load_references(), ids=lambda reference: reference.dataset)
def test_a_reference_that_ships_fits_its_task(reference: Reference) -> None:
    dataset = reference.dataset
    goal = {**GOAL, "threshold": get_task("1a").goal_on(dataset)}
    assert find_reference(configuration(dataset=dataset, goal=goal)) == reference
    assert sorted(reference.values) == list(range(1, 11))
    assert (reference.batch_size, reference.unit, reference.resolution) == (128, "epochs", 1)
    assert reference.version
    assert reference.date
    assert reference.machine
    assert f"references/make.py {dataset}" in reference.command
    # The runs of a reference agree with it themselves.
    assert check_convergence(reference.values.values(), reference).verdict == "consistent"
