"""Scripts of many kinds, each compared with its run without observation."""

from __future__ import annotations

import re

import pytest

from mlbench_core.results.folder import verify_folder
from tests.helpers.thorough import some
from tests.observe.conftest import Run, Runner

STEPS = {
    "plain": 8, "accumulation": 6, "tokens": 5, "scaler": 5, "gan": 5, "lbfgs": 4, "compiled": 5,
    "fsdp2": 5, "hand_written": 5, "by_hand": 5, "own_hook": 5, "evaluation": 6,
    "translation": 6, "trainer": 6, "futures": 5,
}  # fmt: skip


def both(runner: Runner, script: str, workers: int, *options: str) -> Run:
    """Run a script with and without observation, and compare all that it computes."""
    observed = runner.run(script, workers, options=options)
    plain = runner.run(script, workers, observed=False)
    assert observed.statuses == plain.statuses == [0] * workers, observed.logs + plain.logs
    for with_it, without in zip(observed.reports, plain.reports, strict=True):
        for name in ("weights", "losses", "main"):
            assert with_it[name] == without[name], name
        # The first argument is the folder of the run.
        assert with_it["argv"][2:] == without["argv"][2:]
        assert with_it["argv"][0] == without["argv"][0]
    return observed


def check(run: Run, steps: int) -> None:
    """Compare the numbers of an observed run with those that the script knows."""
    result = run.result
    workers = result["configuration"]["workers"]
    assert result["run"]["state"] == "finished"
    assert result["batches"] == steps
    assert verify_folder(run.folder) == []
    for rank, report in enumerate(run.reports):
        (end,) = run.lines("end", rank)
        totals = end["totals"]
        # Every moment of a step belongs to a phase: a phase begins with the reading of the clock
        # that has ended the one before.
        assert sum(totals["steps_s"].values()) == pytest.approx(totals["train_s"], rel=1e-9)
        inside_s = totals["train_s"] + totals["validation_s"]
        assert inside_s <= totals["wall_s"]
        sent = report["bytes"] if workers > 1 else 0
        assert totals["communication_size_bytes"] == sent
        assert sum(entry["bytes"] for entry in end["collectives"]) == sent
        assert totals["samples"] == report.get("samples", totals["samples"])
        assert totals["tokens"] == report.get("tokens", 0)
        losses = [line["value"] for line in run.lines("stat", rank) if line["name"] == "train_loss"]
        assert losses == pytest.approx(report["losses"], rel=1e-6)
    assert re.search(rf"^  steps +{steps}$", run.logs[0], re.MULTILINE)


@pytest.mark.parametrize("workers", some([2, 1]))
@pytest.mark.parametrize("script", STEPS)
def test_kind_of_script(runner: Runner, script: str, workers: int) -> None:
    check(both(runner, script, workers), STEPS[script])
