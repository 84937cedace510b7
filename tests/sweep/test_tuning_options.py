"""The tuning of a sweep: trials whose outcome is a known function of the rate."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_core import files
from mlbench_core.comparison.load_results import load
from mlbench_core.errors import ConfigurationError
from mlbench_core.sweep import page, runner
from mlbench_core.sweep.runner import Runner
from mlbench_core.sweep.sentences import tuning_rule
from mlbench_core.sweep.sweep_folder import SweepFolder
from mlbench_core.sweep.toml_file import Sweep, parse_sweep
from mlbench_core.sweep.tuning_search import Score, Search, score
from mlbench_core.tasks import option_value
from tests.results.helpers import GOAL, write_run
from tests.sweep.master import Killed, MemoryMaster, plain
from tests.sweep.test_runner import Ends

TUNING: dict[str, Any] = {"parameter": "--lr", "default": 0.1}
CONTENT: dict[str, Any] = {
    "task": "1a",
    "workers": [1],
    "algorithms": ["power_sgd"],
    "tuning": TUNING,
}
Accuracies = Callable[[dict[str, Any]], tuple[float, ...]]


def rate(request: dict[str, Any], option: str = "--lr") -> float:
    """Return the rate with which a run was requested."""
    return float(option_value(request["arguments"], option) or math.nan)


def distance(request: dict[str, Any], best: float, option: str = "--lr") -> int:
    """Return how many factors of two a rate is away from the best one, rounded."""
    return round(abs(math.log2(rate(request, option) / best)))


def nearest_to(best: float) -> Accuracies:
    """Return runs that need one epoch more for each factor of two away from the best rate."""
    return lambda request: (80.0,) * distance(request, best) + (90.0,)


class RateMaster(MemoryMaster):
    """A master whose runs have the accuracies that a function of their request returns."""

    def __init__(self, accuracies: Accuracies) -> None:
        super().__init__()
        self.accuracies = accuracies

    def fetch_result(self, run_id: Any, target: Path, *, unfinished: bool = False) -> bool:
        name = self.items[run_id]["name"]
        (request,) = (one for one in self.requests if one["name"] == name)
        workers = request["num_workers"]
        write_run(target, workers=workers, accuracies=self.accuracies(request))
        return True

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The requests with the seed of the tuning."""
        return [one for one in self.requests if one["arguments"][-1] == "1"]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The other requests."""
        return [one for one in self.requests if one["arguments"][-1] != "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    monkeypatch.setattr(files, "_sync", lambda path: None)


def start(folder: Path, master: MemoryMaster, sweep: Sweep) -> list[Search]:
    """Run what is left of a sweep, as the command does, and return its tuning."""
    state = SweepFolder(folder)
    points = state.planned(sweep)
    done, failures = state.done(sweep, points), state.failures(points)
    pending = [
        point
        for point in points
        if point.name not in done and state.may_try(failures.get(point.name))
    ]
    source = folder.with_suffix(".toml")
    source.write_text("")
    with state.open(source, {}):
        Runner(sweep, state, lambda: master, Ends()).run(pending)
    # From the folder alone.
    return SweepFolder(folder).searches(sweep)


def value(search: Search) -> float | None:
    return None if search.chosen is None else search.chosen.value


def test_the_best_value_of_a_known_function_is_given_to_all_results(tmp_path: Path) -> None:
    best = {("power_sgd", 1): 0.1, ("power_sgd", 2): 0.2, ("demo", 1): 0.01, ("demo", 2): 0.005}

    def accuracies(request: dict[str, Any]) -> tuple[float, ...]:
        algorithm = str(option_value(request["arguments"], "--optimizer"))
        return nearest_to(best[algorithm, request["num_workers"]])(request)

    default = {"power_sgd": 0.1, "demo": 0.01}
    sweep = parse_sweep(
        {
            **CONTENT,
            "algorithms": list(default),
            "workers": [1, 2],
            "networks": ["lan-1g", "mobile-lte"],
            "seeds": 2,
            "limit": "1min",
            "tuning": {"parameter": "--lr", "default": default},
        }
    )
    assert len(SweepFolder(tmp_path / "out").planned(sweep)) == 4 * 5 + 2 * 2 * 3
    master = RateMaster(accuracies)
    found = start(tmp_path / "out", master, sweep)
    assert {(one.algorithm, one.workers): value(one) for one in found} == best
    assert [(len(one.points), one.is_at_edge) for one in found] == [(5, False)] * 4
    assert master.requests[:20] == master.trials, "trials come first"
    assert not any("network" in request for request in master.trials)
    assert {request["environment"]["MLBENCH_TRAIN_LIMIT_S"] for request in master.trials} == {
        "60.0"
    }
    for request in master.results:
        algorithm = str(option_value(request["arguments"], "--optimizer"))
        assert rate(request) == best[algorithm, request["num_workers"]]
    assert {request.get("network") for request in master.results} == {
        None,
        *map(str, sweep.networks.values()),
    }
    names = {path.name for path in (tmp_path / "out" / "tuning").iterdir()}
    assert names == {plain(request["name"]) for request in master.trials}
    record = json.loads(
        (tmp_path / "out" / "tuning" / "demo-2-lr-0-005-s1" / "run.json").read_text()
    )
    assert record["trial"] == {"parameter": "--lr", "factor": 0.5, "value": 0.005}


@pytest.mark.parametrize(
    ("best", "factor", "trials", "is_at_edge"),
    [
        (0.1, 1.0, 5, False),
        (0.4, 4.0, 6, False),
        (0.8, 8.0, 7, False),
        (1.6, 16.0, 7, True),
        (100.0, 16.0, 7, True),
        (0.025, 0.25, 6, False),
        (0.0125, 0.125, 7, False),
        (0.001, 0.0625, 7, True),
    ],
)
def test_the_grid_grows_at_both_edges_at_most_twice(
    tmp_path: Path, best: float, factor: float, trials: int, is_at_edge: bool
) -> None:
    sweep = parse_sweep(CONTENT)
    (found,) = start(tmp_path / "out", RateMaster(nearest_to(best)), sweep)
    assert found.chosen is not None and found.chosen.factor == factor
    assert (len(found.points), found.is_at_edge) == (trials, is_at_edge)
    assert found.chosen_score.steps_to_goal == 10 * (1 + round(abs(math.log2(0.1 * factor / best))))


def test_several_parameters_are_tuned_one_after_the_other(tmp_path: Path) -> None:
    tuning = {
        "parameter": ["--lr", "--weight-decay"],
        "default": {"--lr": 0.1, "--weight-decay": 1e-4},
    }

    def accuracies(request: dict[str, Any]) -> tuple[float, ...]:
        misses = distance(request, 0.2)
        if "--weight-decay" in request["arguments"]:
            misses += distance(request, 5e-5, "--weight-decay")
        return (80.0,) * misses + (90.0,)

    master, sweep = RateMaster(accuracies), parse_sweep({**CONTENT, "tuning": tuning})
    assert len(SweepFolder(tmp_path / "out").planned(sweep)) == 2 * 5 + 1
    found = start(tmp_path / "out", master, sweep)
    assert [(one.parameter, value(one)) for one in found] == [
        ("--lr", 0.2),
        ("--weight-decay", 5e-5),
    ]
    assert {rate(request) for request in master.trials[5:]} == {0.2}
    assert master.results[0]["arguments"] == [
        *("--optimizer", "power_sgd", "--lr", "0.2", "--weight-decay", "5e-05", "--seed", "42")
    ]


def test_a_killed_tuning_continues_to_the_same_choice(tmp_path: Path) -> None:
    """Killed at its n-th request, for every third n, and started again."""
    sweep = parse_sweep({**CONTENT, "tuning": {**TUNING, "factors": [1, 2]}})
    whole = RateMaster(nearest_to(0.4))
    expected = start(tmp_path / "whole", whole, sweep)
    assert value(expected[0]) == 0.4 and len(expected[0].points) == 4
    for number in itertools.count(1, 3):
        master = RateMaster(nearest_to(0.4))
        calls = itertools.count(1)

        def kill(name: str, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                raise Killed(name)

        master.after = kill
        try:
            found = start(tmp_path / str(number), master, sweep)
            assert number > 20, "this one was not killed any more"
            return
        except Killed:
            found = start(tmp_path / str(number), master, sweep)
        assert found == expected
        assert [plain(one["name"]) for one in master.requests] == [
            plain(one["name"]) for one in whole.requests
        ]
        assert master.results[-1]["arguments"] == whole.results[-1]["arguments"]


def test_failed_and_diverged_trials_are_the_worst(tmp_path: Path) -> None:
    def accuracies(request: dict[str, Any]) -> tuple[float, ...]:
        # No run reaches 90. The largest rates have the best value, until they diverge.
        if rate(request) > 0.1:
            return (89.0, math.nan)
        return (60.0 + 100 * rate(request),)

    master, sweep = RateMaster(accuracies), parse_sweep(CONTENT)
    failing = "power-sgd-1-lr-0-1-s1"
    master.reasons[failing] = "worker 0 failed: exit status 1"
    (found,) = start(tmp_path / "out", master, sweep)
    assert value(found) == 0.05
    assert found.scores == (
        Score(None, 62.5),
        Score(None, 65.0),
        Score(),
        Score(),
        Score(),
    )
    # It was tried again at once, because the choice depends on it, and never after that.
    names = [plain(request["name"]) for request in master.requests]
    assert names.count(failing) == 2 and names[-1] == "power-sgd-1-s42"
    requests = len(master.requests)
    assert start(tmp_path / "out", master, sweep) == [found] and len(master.requests) == requests


@pytest.mark.parametrize(
    ("outcomes", "chosen"),
    [
        # Reached, then the best value.
        ({0.1: 5, 0.2: None}, 0.1),
        ({0.1: None, 0.2: 50}, 0.2),
        # Equal: nearer to the default, then smaller.
        ({0.05: 3, 0.1: 4, 0.2: 3}, 0.05),
        ({0.025: 3, 0.2: 3}, 0.2),
        ({0.025: 3, 0.05: 3, 0.1: 3, 0.2: 3, 0.4: 3}, 0.1),
    ],
)
def test_the_order_of_trials(
    tmp_path: Path, outcomes: dict[float, int | None], chosen: float
) -> None:
    def accuracies(request: dict[str, Any]) -> tuple[float, ...]:
        epochs = outcomes.get(rate(request), 60)
        return (89.0,) if epochs is None else (80.0,) * (epochs - 1) + (90.0,)

    (found,) = start(tmp_path / "out", RateMaster(accuracies), parse_sweep(CONTENT))
    assert value(found) == chosen


def test_of_losses_the_smallest_is_the_best() -> None:
    assert Score(None, 1.0, minimize=True).rank < Score(None, 2.0, minimize=True).rank
    assert Score(None, 1.0).rank > Score(None, 2.0).rank


def test_a_trial_without_a_goal_ends_the_sweep(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", goal=None)
    with pytest.raises(ConfigurationError, match="the trial run must have a goal"):
        score(load([folder])[0])


def test_trials_of_a_fixed_training_time_are_compared_by_their_value(tmp_path: Path) -> None:
    goal = {**GOAL, "threshold": None, "budget_s": 25.0}
    records = []
    # With epochs of 20 s, a run has fewer steps by then. The first one goes on to a better value.
    for name, epoch_s, accuracies in (
        ("good", 10.0, (70.0, 90.0, 80.0, 95.0)),
        ("slow", 20.0, (70.0, 85.0)),
        ("diverged", 10.0, (90.0, 80.0, math.nan)),
    ):
        folder = tmp_path / name
        write_run(folder, epoch_s=epoch_s, accuracies=accuracies, goal=goal)
        records += load([folder])
    assert [record.reached for record in records] == [True] * 3
    found = list(map(score, records))
    assert found == [Score(None, 90.0), Score(None, 85.0), Score()]
    assert sorted(found, key=lambda each: each.rank) == found
    for record in records[:2]:
        smaller = {**record.configuration, "goal": {**goal, "minimize": True}}
        value = record.goal_value
        assert score(replace(record, configuration=smaller)) == Score(None, value, minimize=True)


def test_the_horizon_is_that_of_the_trials_alone(tmp_path: Path) -> None:
    arguments, horizon = ["--epochs", "40"], ["--epochs", "3"]
    content = {**CONTENT, "arguments": arguments, "tuning": {**TUNING, "horizon": horizon}}
    master, sweep = RateMaster(nearest_to(0.1)), parse_sweep(content)
    start(tmp_path / "out", master, sweep)
    assert len(master.trials) == 5 and master.results
    for requests, words in ((master.trials, arguments + horizon), (master.results, arguments)):
        for request in requests:
            found = request["arguments"]
            # The last one counts for the script.
            epochs = [found[k : k + 2] for k, word in enumerate(found) if word == "--epochs"]
            assert [word for pair in epochs for word in pair] == words
    assert sweep.tuning is not None
    assert ", and --epochs 3 in all trials. The value" in tuning_rule(sweep.tuning)


def test_a_change_of_the_tuning_is_refused_before_any_trial(tmp_path: Path) -> None:
    master = RateMaster(nearest_to(0.1))
    start(tmp_path / "out", master, parse_sweep(CONTENT))
    other = parse_sweep({**CONTENT, "tuning": {**TUNING, "default": 0.3}})
    requests = len(master.requests)
    with pytest.raises(ConfigurationError, match="tuning must stay as it was before"):
        start(tmp_path / "out", master, other)
    assert len(master.requests) == requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tuning": True}, "tuning must be a table, not True"),
        ({"tuning": {}}, "parameter of tuning must be an option, not None"),
        ({"parameter": "lr"}, "parameter of tuning must be an option such as --lr, not 'lr'"),
        ({"parameter": ["--lr", "--LR"], "default": {"--lr": 1, "--LR": 1}}, "must differ in"),
        ({"parameter": "--seed"}, "parameter of tuning must not be --seed"),
        ({"parameter": ["--lr"]}, "default of tuning must have an entry for each parameter"),
        ({"default": None}, "default of --lr for power_sgd must be a number, not None"),
        ({"default": 0}, "default of --lr for power_sgd must be finite and positive, not 0"),
        ({"default": {"demo": 1}}, "default of --lr must name algorithms of the sweep, not 'demo'"),
        ({"default": {}}, "default of --lr must have all algorithms, not only []: add 'power_sgd'"),
        ({"factors": [1]}, "factors of tuning must be a list of at least two numbers, not [1]"),
        ({"factors": [1, "2"]}, "a factor of tuning must be a number, not '2'"),
        ({"factors": [1, 2, 1.0]}, "factors of tuning must differ"),
        ({"seed": 42}, "seed of tuning must be a whole number from 0 to 41, not 42"),
        ({"seed": True}, "seed of tuning must be a whole number from 0 to 41, not True"),
        ({"limit": 3}, "key 'limit' of tuning must be one that it has"),
        ({"horizon": 3}, "horizon of tuning must be a list of arguments, not 3"),
        ({"horizon": ["--lr", "1"]}, "horizon of tuning must not have --lr"),
        ({"arguments": ["--lr=1"]}, "arguments must not have --lr: it is tuned"),
        ({"script": "a.py"}, "goal must be given with tuning"),
    ],
)
def test_a_wrong_table_is_refused(change: dict[str, Any], message: str) -> None:
    content = {**CONTENT, "tuning": dict(TUNING)}
    for key, changed in change.items():
        if key in ("tuning", "arguments"):
            content[key] = changed
        elif key == "script":
            content = {"script": changed, "methods": ["as-is"], "workers": [1]}
            content["tuning"] = TUNING
        else:
            content["tuning"][key] = changed
    with pytest.raises((ValueError, ConfigurationError), match=re.escape(message)):
        parse_sweep(content)


def test_a_script_and_a_command_get_the_tuned_value() -> None:
    tuning = {**TUNING, "factors": [1, 2]}
    script = {"script": "a.py", "methods": ["bf16"], "workers": [1], "goal": "train_loss<=1"}
    command = {"command": "a.py --seed {seed}", "workers": [1], "variants": [
        {"name": "power_sgd", "arguments": ["--x"]}]}  # fmt: skip
    for content, end in ((script, "a.py --lr 0.1"), (command, "a.py --seed 1 --x --lr 0.1")):
        sweep = parse_sweep({**content, "tuning": tuning})
        trial, *_ = SweepFolder(Path("none")).planned(sweep)
        assert trial.request["command"].endswith(end) and trial.seed == 1


def test_the_page_of_a_tuned_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = {"workers": [1, 2], "networks": ["lan-1g"]}
    sweep = parse_sweep({**CONTENT, "algorithms": ["power_sgd", "demo"], **networks})

    def accuracies(request: dict[str, Any]) -> tuple[float, ...]:
        best = 0.2 if "demo" in request["arguments"] else 100
        return nearest_to(best)(request)

    start(tmp_path / "out", RateMaster(accuracies), sweep)
    monkeypatch.setattr(page, "_figures", lambda *_: ([], {}, []))
    page.write_page(tmp_path / "out", sweep=sweep)
    text = (tmp_path / "out" / "index.md").read_text(encoding="utf-8")
    assert "| power\\_sgd | 1 | --lr | 1.6 | 16.0 | 70 | 90.00 | 7 | at the edge |" in text
    assert "| demo | 2 | --lr | 0.2 | 2.0 | 10 | 90.00 | 5 | inside |" in text
    assert "--lr at 0.25, 0.5, 1, 2 and 4 times the default, one run each with seed 1" in text
    assert "demo was fastest, 10.1 s" in text and "not tuned" not in text
    assert "- Tuning: 24 trials, 24.0 min" in text
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert '<section id="tuning"><h2>Tuning</h2>' in html and "<td>at the edge</td>" in html
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    trials = json.loads((tmp_path / "out" / "tuning.json").read_text(encoding="utf-8"))
    assert results["tuning"] == trials
    assert [row["trials"] for row in trials["rows"]] == [7, 5, 7, 5]
    assert {one["run"] for row in trials["rows"] for one in row["tried"]} == {
        path.name for path in (tmp_path / "out" / "tuning").iterdir()
    }
