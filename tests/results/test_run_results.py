"""The result folder of several workers, with and without a shared folder."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from mlbench_core.controlflow.pytorch.run_results import RunResults
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.ranks import run_ranks
from tests.results.helpers import ENVIRONMENT, GOAL


def reach(name: str, value: float, tracker: Tracker) -> str | None:
    return "reached" if name == GOAL["metric"] and value >= 90 else None


def train(rank: int, world_size: int, folders: list[str]) -> bool:
    configuration = Configuration(workers=world_size, goal=GOAL)
    with (
        RunResults(
            Path(folders[rank]), configuration, "7", rank, environment=ENVIRONMENT
        ) as results,
        Tracker([], "7", rank, reach, sinks=[results.sink]) as tracker,
    ):
        tracker.start()
        for epoch in range(2):
            for _ in range(3):
                tracker.batch_start()
                tracker.record_batch_fwd_pass()
                tracker.batch_end(samples=10 * (rank + 1))
            tracker.validation()
            tracker.record_stat("global_Prec@1", 85 + 5 * epoch)
            tracker.train()
            tracker.epoch_end()
    return results.result is not None


@pytest.mark.parametrize("is_shared", [True, False])
def test_rank_0_has_the_lines_of_all_workers(tmp_path: Path, is_shared: bool) -> None:
    folders = [tmp_path / ("0" if is_shared else str(rank)) for rank in range(3)]
    if not is_shared:
        folders[2] = folders[1]  # two workers on the other host
    assert run_ranks(3, train, [str(folder) for folder in folders]) == [True, False, False]
    assert verify_folder(folders[0]) == []
    result = read_result(folders[0])
    assert (result["run"]["state"], result["samples"], result["epochs"]) == (
        "finished",
        2 * 3 * 60,
        2,
    )
    assert (result["goal"]["reached"], result["goal"]["step"], result["goal"]["epochs"]) == (
        True,
        6,
        2,
    )
    assert {line["rank"] for line in read_lines(folders[0])} == {0, 1, 2}
    if not is_shared:
        assert list(folders[1].iterdir()) == []


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        RunResults(tmp_path / "run", Configuration(workers=1), "7") as results,
        Tracker([], "7", 0, sinks=[results.sink]) as tracker,
    ):
        tracker.start()
        raise KeyError("the data\nset")
    run = read_result(tmp_path / "run")["run"]
    assert (run["state"], run["reason"]) == ("failed", "KeyError: 'the data\\nset'")


@pytest.mark.parametrize("fails", [False, True])
def test_a_lost_result_is_an_error_unless_the_training_failed(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"the result in {tmp_path / 'run'} is incomplete: "
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ZeroDivisionError if fails else MLBenchError, match=None if fails else text),
        RunResults(tmp_path / "run", Configuration(workers=1), "7") as results,
    ):
        with Tracker([], "7", 0, sinks=[results.sink]) as tracker:
            tracker.start()
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").touch()
        if fails:
            raise ZeroDivisionError
    assert results.result is None
    assert [record.message.startswith(text) for record in caplog.records] == [True] * fails


def test_the_examples_of_the_documentation_leave_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "result_folder.md"
    monkeypatch.chdir(tmp_path)
    for block in page.read_text(encoding="utf-8").split("```python\n")[1:]:
        exec(compile(block.split("```")[0], str(page), "exec"), {})
    shortest, folder = tmp_path / "mlbench-results" / "first", tmp_path / "results" / "run-1"
    assert verify_folder(shortest) == verify_folder(folder) == []
    assert read_result(shortest)["samples"] == 96
    result = read_result(folder)
    assert (result["goal"]["reached"], result["goal"]["epochs"], result["samples"]) == (True, 2, 64)


def test_two_runs_never_write_to_one_folder(tmp_path: Path) -> None:
    with RunResults(tmp_path / "run", Configuration(workers=1), "7") as results:
        with Tracker([], "7", 0, sinks=[results.sink]) as tracker:
            tracker.start()
        with pytest.raises(
            ConfigurationError, match=r"another run is writing to .*run: give another --run_id"
        ):
            RunResults(tmp_path / "run", Configuration(workers=1), "8")
    assert verify_folder(tmp_path / "run") == []
    with RunResults(tmp_path / "run", Configuration(workers=1), "8"):
        pass
    assert read_result(tmp_path / "run" / "earlier-1")["run"]["id"] == "7"


def test_a_folder_without_space_is_one_message_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigurationError, match=r"written \(No space left on device\): choose"):
        RunResults(tmp_path / "run", Configuration(workers=1), "7")
    assert list((tmp_path / "run").glob("environment*")) == []
