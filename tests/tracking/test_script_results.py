"""The result folder that a tracker writes for a script: where it is, what it holds, how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.results.raw_lines import read_lines, statistics
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.ranks import run_ranks


def train(tracker: Tracker, batches: int, samples: int = 1) -> None:
    for _ in range(batches):
        tracker.batch_start()
        tracker.record_batch_fwd_pass()
        tracker.batch_end(samples=samples)
        tracker.record_loss(0.5)


def _worker(rank: int, world_size: int, output: str, fails: bool) -> None:
    sys.argv = ["/home/me/mine.py", "--lr", "0.1", "--rank", str(rank), "--seed=3", "--token", "x"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLBENCH_OUTPUT", output)
        with Tracker([], "7", rank, results="auto", unit="steps") as tracker:
            train(tracker, 3, samples=rank + 1)
            if fails:
                raise KeyError("the data")


def test_the_workers_of_a_script_write_one_folder_where_the_master_looks(tmp_path: Path) -> None:
    run_ranks(2, _worker, str(tmp_path), False)
    folder = tmp_path / "mine" / "7"
    assert verify_folder(folder) == []
    result = read_result(folder)
    assert (result["run"]["state"], result["batches"], result["samples"]) == ("finished", 3, 9)
    configuration = result["configuration"]
    assert configuration["options"] == {"lr": "0.1", "token": "***"}
    settings = ("program", "workers", "backend", "threads", "seed", "unit", "division")
    expected = ["mine.py", 2, "gloo", 1, 3, "steps", "open"]
    assert [configuration[name] for name in settings] == expected
    assert {line["rank"] for line in read_lines(folder)} == {0, 1}


def test_the_result_of_a_script_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the data"):
        run_ranks(2, _worker, str(tmp_path), True)
    folder = tmp_path / "mine" / "7"
    assert verify_folder(folder) == []
    run = read_result(folder)["run"]
    assert (run["state"], run["reason"]) == ("failed", "KeyError: 'the data'")


@pytest.mark.parametrize(("ending", "state"), [("", "finished"), ("raise OSError(5)", "failed")])
def test_a_tracker_that_nobody_closes_writes_its_result_at_the_exit(
    tmp_path: Path, ending: str, state: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from mlbench_core.tracking import Tracker\n"
        "def main():\n"
        "    tracker = Tracker([], 'my-run', 0, results='auto')\n"
        "    tracker.batch_start()\n"
        "    tracker.batch_end()\n"
        f"main()\n{ending}\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, check=False)
    folder = tmp_path / "mlbench-results" / "my-run"
    for each in (folder, folder / "earlier-1"):
        assert verify_folder(each) == []
        result = read_result(each)
        assert (result["run"]["state"], result["batches"]) == (state, 1)
        assert result["configuration"]["program"] == "mine.py"


def test_a_resumed_script_continues_its_folder(tmp_path: Path) -> None:
    with Tracker([], "7", 0, results=tmp_path / "run") as tracker:
        train(tracker, 2)
    with Tracker([], "7", 0, results=str(tmp_path / "run")) as again:
        again.load_state_dict(tracker.state_dict())
        train(again, 3)
    assert verify_folder(tmp_path / "run") == []
    result = read_result(tmp_path / "run")
    assert (result["batches"], result["run"]["times_resumed"]) == (5, 1)
    steps = [line["step"] for line in statistics(read_lines(tmp_path / "run"), "train_loss")]
    assert steps == [1, 2, 3, 4, 5]


def test_an_evaluation_before_the_first_step_is_in_the_folder(tmp_path: Path) -> None:
    with Tracker([], "7", 0, results=tmp_path) as tracker:
        tracker.validation()
        tracker.record_loss(4.25)
        tracker.train()
        train(tracker, 1)
    (line,) = statistics(read_lines(tmp_path), "val_loss")
    assert (line["step"], line["value"]) == (0, 4.25)


def test_wrong_arguments_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match='results must be "auto", a folder or None, not 3'):
        Tracker([], "7", 0, results=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit must be one of epochs, steps, not 'hours'"):
        Tracker([], "7", 0, unit="hours")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run_id must be a name for a folder, not '\.\./7'"):
        Tracker([], "../7", 0, results="auto").start()
    # A second worker, and a first one of two, that have not joined a process group.
    with pytest.raises(ConfigurationError, match="start the Tracker after init_process_group"):
        Tracker([], "7", 1, results="auto").start()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="by all 2 workers together"):
        Tracker([], "7", 0, results="auto").start()
    assert list(tmp_path.iterdir()) == []
