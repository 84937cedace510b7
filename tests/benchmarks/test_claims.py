"""The experiment that compares recent methods with those of their papers: tuning and tables."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import SGD

from tests.benchmarks.test_failing_hosts import load
from tests.helpers.ranks import run_ranks

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "claims"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("claims")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return load("claims_page")


def result(steps: int | None, loss: float | None = 1.0) -> dict[str, Any]:
    return {"steps": steps, "loss": loss}


def trials(script: ModuleType, steps_at: dict[float, int | None]) -> list[float]:
    """Return the rates that the rule tries around 1, with these steps to the goal."""
    tried: dict[float, Any] = {}
    while (lr := script.next_rate(tried, 1.0)) is not None:
        tried[lr] = [result(steps_at[lr])]
    return list(tried)


def test_the_grid_grows_while_the_best_rate_is_at_its_edge(script: ModuleType) -> None:
    assert trials(script, {0.5: 20, 1: 10, 2: 30}) == [0.5, 1, 2]
    assert trials(script, {1: 20, 0.5: 10, 2: 30, 0.25: 15}) == [0.5, 1, 2, 0.25]
    falling = {1: 40, 0.5: 50, 2: 30, 4: 20, 8: 10, 16: 5}
    assert trials(script, falling) == [0.5, 1, 2, 4, 8]


def test_the_best_rate_misses_least_then_is_first_then_has_the_lowest_loss(
    script: ModuleType,
) -> None:
    def best(**results: list[dict[str, Any]]) -> float:
        return script.best_rate({float(lr[1:]): found for lr, found in results.items()}, 2.0)

    assert best(_1=[result(20)], _2=[result(10)], _4=[result(None)]) == 2
    assert best(_1=[result(20), result(20)], _2=[result(10), result(None)]) == 1
    assert best(_1=[result(20), result(5)], _2=[result(10), result(12)]) == 2
    missed = {"_1": [result(None, 0.7)], "_2": [result(None, None)], "_4": [result(None, 0.6)]}
    assert best(**missed) == 4
    # Of equal ones, the nearest to the usual rate, and then the smaller.
    assert best(_1=[result(10)], _2=[result(10)], _4=[result(10)]) == 2
    assert best(_1=[result(10)], _2=[result(30)], _4=[result(10)]) == 1


def test_each_seed_trains_once_with_the_best_rate(script: ModuleType) -> None:
    done: list[dict[str, Any]] = []
    seen = []
    for lr, seed in script.cases(done, "digits", "float32"):
        seen.append((lr, seed))
        steps = 10 if lr == 0.3 else 20
        done.append({"problem": "digits", "method": "float32", "lr": lr, "seed": seed,
                     **result(steps)})  # fmt: skip
    trials = [(lr, seed) for lr in (0.15, 0.3, 0.6) for seed in (1, 2, 3)]
    assert seen == [*trials, *((0.3, seed) for seed in range(42, 52))]
    assert not list(script.cases(done, "digits", "float32"))
    # What an interrupted call has done is not done again.
    left = list(script.cases(done[:-3], "digits", "float32"))
    assert left == [(0.3, 49), (0.3, 50), (0.3, 51)]


def lines_of(method: str, values: list[int | None]) -> list[Any]:
    """Return a trial, whose seed is 1, and the trainings of the results."""
    return [
        {"problem": "digits", "method": method, "lr": 0.1, "seed": seed, "steps": value,
         "loss": 1.0, "sent_bytes": 100, "collectives": 1}
        for seed, value in zip([1, 42, 43, 44], [7, *values], strict=False)
    ]  # fmt: skip


def outcome(page: ModuleType, strict: bool, own: list[int | None], peer: list[int | None]) -> Any:
    claim = page.Claim("text", "a", "b", "digits", "steps", strict)
    return page.outcome_of([*lines_of("a", own), *lines_of("b", peer)], claim)


def test_a_claim_holds_if_its_interval_excludes_the_wrong_sign(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(page.SEEDS, "digits", 3)
    better = outcome(page, True, [10, 11, 12], [20, 22, 24])
    assert better.verdict == "reproduced"
    assert better.ratio == pytest.approx(0.5)
    assert outcome(page, True, [20, 22, 24], [10, 11, 12]).verdict == "contradicted"
    unclear = outcome(page, True, [10, 30, 10], [11, 12, 30])
    assert unclear.verdict == "undecided"
    assert unclear.interval[0] < 1 < unclear.interval[1]
    # 5 % more is as good within the margin of 10 %, and not better.
    similar = [105, 210, 315], [100, 200, 300]
    assert outcome(page, False, *similar).verdict == "reproduced"
    assert outcome(page, True, *similar).verdict == "contradicted"
    # A claim with missing trainings has no outcome.
    assert outcome(page, True, [10, 11], [20, 22]) is None


def test_a_missed_goal_never_helps(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(page.SEEDS, "digits", 3)
    one_miss = outcome(page, False, [10, 10, None], [20, 20, 20])
    assert one_miss.verdict == "undecided"
    assert one_miss.ratio is None
    assert outcome(page, False, [None] * 3, [20, 20, 20]).verdict == "contradicted"
    assert outcome(page, True, [10, 10, 10], [None] * 3).verdict == "reproduced"
    assert outcome(page, True, [10, 10, 10], [None, 20, None]).verdict == "undecided"
    # Bytes of a training that missed are not bytes to the goal.
    claim = page.Claim("text", "a", "b", "digits", "sent_bytes", True)
    lines = [*lines_of("a", [10, None]), *lines_of("b", [10, 10])]
    assert page.values_of(lines, claim, "a") == [100.0, math.inf]


def test_lines_of_two_experiments_are_refused(page: ModuleType) -> None:
    with pytest.raises(ValueError, match="a has two trainings with seed 42 on digits"):
        page.results_of([*lines_of("a", [10]), *lines_of("a", [11])], "digits", "a")


def test_the_page_has_a_figure_and_the_tables(
    page: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(page.SEEDS, "digits", 3)
    runs = tmp_path / "runs.jsonl"
    found = [*lines_of("int8", [10, 10, 12]), *lines_of("float32", [10, 11, 12])]
    runs.write_text("".join(json.dumps(each) + "\n" for each in found))
    page.main([str(runs), "-o", str(tmp_path / "page")])
    names = {file.name for file in (tmp_path / "page").iterdir()}
    assert names == {"runs.jsonl", *(f"claims.{kind}" for kind in ("png", "svg", "csv"))}
    assert (
        "| 8 bits are as good as 32 | digits | steps to a loss of 0.1 |" in capsys.readouterr().out
    )


def test_all_claims_are_about_methods_of_their_problem(
    page: ModuleType, script: ModuleType
) -> None:
    used = set()
    for claim in page.make_claims():
        used |= {(claim.problem, claim.method), (claim.problem, claim.peer)}
    known = set()
    for problem, (_, methods) in script.PROBLEMS.items():
        known |= {(problem, name) for name in methods}
    assert used == known


LOCAL_STEPS = ("diloco_5", "eager_5", "late_5", "diloco_20", "no_loco", "des_loc", "local_adam")


def train_shortly(rank: int, world_size: int) -> dict[str, Any]:
    """Train each method of the digits for some steps, and those with local steps for 50."""
    script = load("claims")
    script.WORKERS = world_size
    kind, methods = script.PROBLEMS["digits"]
    kind.goal = None
    results = {"again": None, **dict.fromkeys(methods)}
    for name in results:
        method = methods["float32" if name == "again" else name]
        kind.steps = 50 if name in LOCAL_STEPS else 5
        results[name] = script.train(kind, method.make, method.lr, 42, None)
    return results


def test_all_workers_agree_on_each_training() -> None:
    first, second = run_ranks(2, train_shortly)
    assert first == second
    assert first["again"] == first["float32"]
    sent = {name: one["sent_bytes"] for name, one in first.items()}
    assert sent["float32"] > 3.9 * sent["int8"] > 0
    assert sent["diloco_5"] == 5 * sent["diloco_20"] > 0
    # Six times the weights and as often both moments, or the moments twice and once.
    assert sent["local_adam"] == 2 * sent["des_loc"] > 0
    losses = [one["loss"] for one in first.values()]
    assert None not in losses
    assert len({first[name]["loss"] for name in ("diloco_5", "eager_5", "late_5")}) == 3


def test_the_naive_delay_steps_along_the_changes_of_the_round_before(script: ModuleType) -> None:
    aggregation = script.LateDiLoCoAggregation(partial(SGD, lr=1.0))
    weights = {"x": torch.zeros(1)}
    aggregation.start({"x": torch.nn.Parameter(weights["x"].clone())})
    found = []
    for change in (1.0, 10.0, 100.0):
        weights["x"] += change
        aggregation.aggregate(weights, "avg_world")
        found.append(float(weights["x"]))
    assert found == [0, 1, 11]


class MadeUp:
    """A problem of one number, whose losses are given in advance."""

    steps, validate_every, warm_up, goal, corrupt_from, decays = 6, 1, 0, None, 2, False
    losses: tuple[float, ...] = (9.0, 1.0, 4.0, 3.0, 5.0, 2.0)

    def __init__(self, seed: int, rank: int, data: Path | None) -> None:
        self.model = torch.nn.Linear(1, 1)
        self._left = iter(self.losses[1:] if self.corrupt_from else self.losses)

    def loss(self, step: int) -> Any:
        return self.model(torch.ones(1, 1)).sum()

    def score(self) -> torch.Tensor:
        return torch.tensor([next(self._left), 1.0])


def train_made_up(rank: int, world_size: int) -> list[dict[str, Any]]:
    script = load("claims")
    make = script.PROBLEMS["digits"][1]["float32"].make
    results = [script.train(MadeUp, make, 0.1, seed, None) for seed in (42, 1)]
    MadeUp.corrupt_from, MadeUp.losses = 0, (1.0, math.nan, 2.0, 2.0, 2.0, 2.0)
    results.append(script.train(MadeUp, make, 0.1, 42, None))
    MadeUp.losses, MadeUp.goal = (1.0, 0.5, 0.1, 0.0), 0.5
    return [*results, script.train(MadeUp, make, 0.1, 42, None)]


def test_the_figures_are_the_worst_loss_after_the_corruption_and_the_steps_to_the_goal() -> None:
    (results,) = run_ranks(1, train_made_up)
    corrupt, tuning, diverged, reached = results
    assert (corrupt["loss_before"], corrupt["loss"]) == (1, 5)
    # The rate is chosen before the corruption.
    assert (tuning["loss_before"], tuning["loss"]) == (1, 1)
    assert (diverged["loss"], diverged["steps"]) == (None, None)
    assert (reached["loss"], reached["steps"]) == (0.5, 2)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="not measured yet")
def test_the_published_tables_follow_from_the_lines(page: ModuleType) -> None:
    lines = load("_lines").read_lines(PUBLISHED / "runs.jsonl")
    text = (PUBLISHED / "index.md").read_text(encoding="utf-8")
    assert page.claims_table(lines) in text
    assert page.methods_table(lines) in text
