"""The runs of a sweep: their order, their ends, and what a killed process leaves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mlbench_core import files
from mlbench_core.errors import ConfigurationError, MasterRequestError
from mlbench_core.results.folder import read_result
from mlbench_core.sweep import runner
from mlbench_core.sweep.runner import Observer, Runner
from mlbench_core.sweep.sweep_folder import Done, Failure, SweepFolder
from mlbench_core.sweep.toml_file import Point, Sweep, parse_sweep
from tests.results.helpers import write_run
from tests.sweep.master import Killed, MemoryMaster, plain

CONTENT: dict[str, Any] = {
    "task": "1a",
    "workers": [1, 2],
    "networks": ["lan-1g"],
    "algorithms": ["centralized_sgd", "power_sgd"],
}


class Ends(Observer):
    def __init__(self) -> None:
        self.ends: dict[str, Done | Failure] = {}
        self.notes: list[str] = []

    def end(self, point: Point, ended: Done | Failure) -> None:
        self.ends[point.name] = ended

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    monkeypatch.setattr(runner, "GUARD_S", 0.0)
    # Killed processes lose nothing that the system has, and no test cuts the power.
    monkeypatch.setattr(files, "_sync", lambda path: None)


@pytest.fixture
def master() -> MemoryMaster:
    return MemoryMaster()


def start(folder: Path, master: MemoryMaster, sweep: Sweep | None = None) -> Ends:
    """Do what the command does."""
    sweep, state, ends = sweep or parse_sweep(CONTENT), SweepFolder(folder), Ends()
    source = folder.with_suffix(".toml")
    source.write_text("")
    points = state.planned(sweep)
    done, failures = state.done(sweep, points), state.failures(points)
    pending = [
        point
        for point in points
        if point.name not in done and state.may_try(failures.get(point.name))
    ]
    with state.open(source, {}):
        Runner(sweep, state, lambda: master, ends).run(pending)
    return ends


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def test_all_runs_in_order_and_once(tmp_path: Path, master: MemoryMaster) -> None:
    start(tmp_path / "out", master)
    expected = [
        f"{name}-{end}-s42"
        for end in ("1", "2-lan-1g")
        for name in ("centralized-sgd", "power-sgd")
    ]
    assert [plain(request["name"]) for request in master.requests] == expected
    assert master.requests[3]["network"] == "1gbit" and "network" not in master.requests[0]
    assert master.requests[3]["arguments"] == ["--optimizer", "power_sgd", "--seed", "42"]
    start(tmp_path / "out", master, parse_sweep({**CONTENT, "seeds": 2}))
    assert [plain(request["name"]) for request in master.requests[4:]] == [
        name[:-1] + "3" for name in expected
    ]
    assert names(tmp_path / "out") == sorted(plain(request["name"]) for request in master.requests)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_request(tmp_path: Path, when: str) -> None:
    """A sweep that is killed at its n-th request, for every n, and started again has every run
    exactly once."""
    sweep = parse_sweep({**CONTENT, "workers": [1]})
    for number in itertools.count(1):
        master, folder = MemoryMaster(), tmp_path / str(number)
        calls = itertools.count(1)

        def kill(name: str, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                raise Killed(name)

        setattr(master, when, kill)
        try:
            start(folder, master, sweep)
            assert number > 8  # this one was not killed any more
            return
        except Killed:
            start(folder, master, sweep)
        requested = [plain(request["name"]) for request in master.requests]
        assert sorted(requested) == names(folder)
        assert not (folder / "current.json").exists()


def test_a_change_of_the_question_is_refused(tmp_path: Path, master: MemoryMaster) -> None:
    start(tmp_path / "out", master)
    for key, value in {"limit": "1min", "light": True, "arguments": ["--lr", "1"]}.items():
        with pytest.raises(ConfigurationError, match=f"^{key} changed from .*another --output"):
            start(tmp_path / "out", master, parse_sweep({**CONTENT, key: value}))
    assert len(master.requests) == 4


def test_a_failed_run_is_tried_again_once(tmp_path: Path, master: MemoryMaster) -> None:
    failing = "power-sgd-1-s42"
    master.reasons[failing] = "worker 0 failed: exit status 3"
    ended = start(tmp_path / "out", master).ends[failing]
    assert ended == Failure("worker 0 failed: exit status 3", 1, "the last line")
    assert len(names(tmp_path / "out")) == 3
    assert start(tmp_path / "out", master).ends[failing].tries == 2  # type: ignore[union-attr]
    assert start(tmp_path / "out", master).ends == {}
    (tmp_path / "out" / "failed" / f"{failing}.json").unlink()
    master.reasons.clear()
    assert start(tmp_path / "out", master).ends == {failing: Done("finished", 60.0)}


def test_a_run_that_misses_its_goal_at_the_limit_has_that_outcome(
    tmp_path: Path, master: MemoryMaster
) -> None:
    master.missing = {"power-sgd-1-s42"}
    # It trains for 20 s.
    for limit, outcome in (("15s", "limit"), ("25s", "finished")):
        sweep = parse_sweep({**CONTENT, "limit": limit})
        ends = start(tmp_path / limit, master, sweep).ends
        assert ends["power-sgd-1-s42"] == Done(outcome, 60.0)  # type: ignore[arg-type]
        assert float(master.requests[-1]["environment"]["MLBENCH_TRAIN_LIMIT_S"]) == float(
            limit[:-1]
        )
        assert start(tmp_path / limit, master, sweep).ends == {}
    start(tmp_path / "none", master, parse_sweep(CONTENT))
    assert "environment" not in master.requests[-1]


def test_a_goal_that_is_reached_after_the_limit_is_missed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=3)
    reached_s = read_result(folder)["goal"]["time_to_goal_s"]["slowest"]
    assert [runner._missed_at(folder, limit) for limit in (reached_s - 0.1, reached_s, None)] == [
        True,
        False,
        False,
    ]


def test_a_run_that_does_not_end_at_its_limit_has_failed(
    tmp_path: Path, master: MemoryMaster
) -> None:
    master.lasting = {"power-sgd-1-s42"}
    ends = start(tmp_path / "out", master, parse_sweep({**CONTENT, "limit": "0.001s"})).ends
    reason = "stopped after 0.01 s: its training did not end at the limit of 0.001 s"
    assert ends["power-sgd-1-s42"] == Failure(reason, 1, "the last line")


def test_a_stopped_run_is_not_repeated_if_the_file_says_so(
    tmp_path: Path, master: MemoryMaster
) -> None:
    content = {**CONTENT, "limit": "0.001s", "seeds": 3}
    master.missing = {"power-sgd-1-s42", "centralized-sgd-1-s43"}
    expected = {point.name for point in parse_sweep(content).points()} - {
        "power-sgd-1-s43",
        "power-sgd-1-s44",
    }
    sweep = parse_sweep({**content, "repeat_stopped": False})
    ends = start(tmp_path / "out", master, sweep).ends
    assert set(ends) == expected, "the first seed decides"
    assert start(tmp_path / "out", master, sweep).ends == {}
    rest = start(tmp_path / "out", master, parse_sweep(content)).ends
    assert set(rest) == {"power-sgd-1-s43", "power-sgd-1-s44"}
    assert len(SweepFolder(tmp_path / "out").planned(sweep)) == 12, "what has run stays"


def test_nothing_starts_after_the_budget(tmp_path: Path, master: MemoryMaster) -> None:
    start(tmp_path / "out", master, parse_sweep({**CONTENT, "budget": "0.000001s"}))
    assert master.requests == []


@pytest.mark.parametrize("number", range(1, 12))
def test_sweeps_on_one_master_leave_each_other_alone(
    tmp_path: Path, master: MemoryMaster, number: int
) -> None:
    """One sweep is killed, another with the same names runs in between, and then the first one
    continues."""
    calls = itertools.count(1)

    def kill(name: str) -> None:
        if next(calls) == number:
            raise Killed(name)

    master.after = kill
    with pytest.raises(Killed):
        start(tmp_path / "first", master)
    start(tmp_path / "second", master, parse_sweep({**CONTENT, "arguments": ["--lr", "1"]}))
    start(tmp_path / "first", master)
    assert names(tmp_path / "first") == names(tmp_path / "second")
    assert len(master.items) == len(master.requests) == 8


def test_a_run_that_an_earlier_version_started_is_taken_over(
    tmp_path: Path, master: MemoryMaster
) -> None:
    state, point = SweepFolder(tmp_path / "out"), parse_sweep(CONTENT).points()[0]
    master.create(point.request)
    state.set_current(point)
    current = tmp_path / "out" / "current.json"
    current.write_text(current.read_text().replace('"run"', '"after"'))
    ends = start(tmp_path / "out", master)
    assert ends.notes == [f"{point.name} was started before: going on with it"]
    assert len(master.requests) == 4


def test_a_master_that_does_not_answer_is_looked_for_again(
    tmp_path: Path, master: MemoryMaster
) -> None:
    failing = itertools.cycle([False, False, True])

    def fail(name: str) -> None:
        # The request has arrived, and its answer has not.
        if next(failing):
            raise MasterRequestError("the master does not answer")

    master.after = fail
    start(tmp_path / "out", master)
    assert len(names(tmp_path / "out")) == len(master.requests) == 4


def test_a_run_that_is_not_wanted_any_more_is_deleted_even_if_the_answer_is_lost(
    tmp_path: Path, master: MemoryMaster
) -> None:
    def kill(name: str) -> None:
        if name == "create":
            raise Killed(name)

    master.after = kill
    with pytest.raises(Killed):
        start(tmp_path / "out", master)
    (old,) = master.items
    calls: list[str] = []

    def lose(name: str) -> None:
        calls.append(name)
        if calls.count("delete") == 1 and name == "delete":
            raise MasterRequestError("the master does not answer")

    master.after = lose
    start(tmp_path / "out", master, parse_sweep({**CONTENT, "algorithms": ["ef_sign_sgd"]}))
    assert old not in master.items and len(names(tmp_path / "out")) == 2


def test_a_refused_request_is_the_failure_of_its_run(tmp_path: Path, master: MemoryMaster) -> None:
    def refuse(name: str) -> None:
        if name == "create" and len(master.requests) == 1:
            master.before = lambda name: None
            raise MasterRequestError("network: must be left out", 422)

    master.before = refuse
    assert start(tmp_path / "out", master).ends["power-sgd-1-s42"] == Failure(
        "network: must be left out"
    )
    assert len(names(tmp_path / "out")) == 3


def test_a_lost_run_is_replaced_once(tmp_path: Path, master: MemoryMaster) -> None:
    master.reasons["power-sgd-1-s42"] = "lost: the run is not running, and it left no status"
    assert isinstance(start(tmp_path / "out", master).ends["power-sgd-1-s42"], Failure)
    assert [plain(request["name"]) for request in master.requests].count("power-sgd-1-s42") == 2


def test_ctrl_c_stops_the_run(tmp_path: Path, master: MemoryMaster) -> None:
    def interrupt(name: str) -> None:
        if name == "run":
            master.after = lambda name: None
            raise KeyboardInterrupt

    master.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "out", master)
    assert [item["state"] for item in master.items.values()] == ["failed"]
    start(tmp_path / "out", master)
    assert len(names(tmp_path / "out")) == 4


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, master: MemoryMaster) -> None:
    state = SweepFolder(tmp_path / "out")
    source = tmp_path / "a.toml"
    source.write_text("")
    with state.open(source, {}), pytest.raises(ConfigurationError, match="another sweep uses"):
        start(tmp_path / "out", master)
