"""A resume that is refused changes nothing on disk, and says what differs."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.pytorch.run_results import RunResults
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.errors import CheckpointError, ConfigurationError
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.files import digest
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.ranks import run_ranks


def train(run: Run, optimizer: str = "sgd", width: int = 2) -> None:
    model = torch.nn.Linear(width, 2)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rprop": torch.optim.Rprop}[optimizer]
    metric = TopKAccuracy(topk=1)
    run.track([metric])
    updates: Any = kind(model.parameters(), lr=0.1)
    for _ in run.epochs(model, updates, None, lambda: ({metric: 1.0}, 1.0)):
        run.tracker.batch_start()
        updates.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        updates.step()
        run.tracker.batch_end(samples=1)


def start(folder: Path, *argv: str, **options: Any) -> None:
    def add_arguments(parser: Any) -> None:
        add_run_arguments(parser, epochs=2)
        parser.add_argument("--optimizer", default="sgd")
        parser.add_argument("--dataset", default="digits")
        parser.add_argument("--batch-size", type=int, default=8)

    roots = [f"--root-{name}={folder / name}" for name in ("dataset", "checkpoint", "output")]
    run_task(
        partial(train, **options), "task9z", add_arguments, argv=["--checkpoint", *argv, *roots]
    )


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): digest(path) for path in folder.rglob("*") if path.is_file()
    }


def damage(folder: Path) -> None:
    for path in (folder / "checkpoint").rglob("*.pth.tar"):
        path.write_bytes(path.read_bytes()[:100])


def delete(folder: Path) -> None:
    for path in (folder / "checkpoint").rglob("*.pth.tar"):
        path.unlink()


@pytest.mark.parametrize(
    ("argv", "options", "before", "words"),
    [
        (
            (),
            {"optimizer": "adam"},
            None,
            r"does not fit the optimizer .* another optimizer, with the settings .*momen",
        ),
        (
            (),
            {"optimizer": "rprop"},
            None,
            r"does not fit the optimizer .* and without capturable, etas, step_sizes",
        ),
        ((), {"width": 3}, None, r"does not fit the model .* size mismatch"),
        (("--optimizer", "adam"), {}, None, r"algorithm was 'sgd' and is 'adam': "),
        (("--dataset", "other"), {}, None, r"dataset was 'digits' and is 'other': "),
        (("--batch-size", "16"), {}, None, r"batch_size was not set and is 16: give the same"),
        (("--seed", "7"), {}, None, r"seed was 42 and is 7: "),
        ((), {}, damage, r"checkpoint .* cannot be read"),
        ((), {}, delete, r"there is no checkpoint"),
    ],
)
def test_a_refused_resume_changes_nothing(
    argv: tuple[str, ...], options: dict[str, Any], before: Any, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start(tmp_path)
    folder = tmp_path / "output" / "task9z" / "1"
    if before is not None:
        before(tmp_path)
    saved = content(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        start(tmp_path, "--resume", "--epochs", "3", *argv, **options)
    assert ended.value.code == 1
    assert content(tmp_path) == saved
    assert verify_folder(folder) == [] and read_result(folder)["run"]["state"] == "finished"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert re.search(words, line), line
    # The run can still be resumed with its own settings, unless its checkpoints are gone.
    if before is None:
        start(tmp_path, "--resume", "--epochs", "3")
        assert verify_folder(folder) == [] and read_result(folder)["run"]["times_resumed"] == 1


def _two_workers(rank: int, size: int, folder: str) -> tuple[str, dict[str, Any] | None]:
    """The second worker's checkpoint does not fit; no worker continues."""
    with RunResults(Path(folder), Configuration(workers=2), "7", rank, resume=True) as results:
        run = Run.__new__(Run)

        def load() -> tuple[()]:
            if rank == 1:
                raise CheckpointError("does not fit")
            return ()

        try:
            run._load_together(load)
        except CheckpointError as error:
            return str(error), results.result
    raise AssertionError("the checkpoint was accepted")


def _fail(rank: int, size: int, folder: str, first: int) -> None:
    """Both workers fail, one of them after the other has left the result folder."""
    with (
        pytest.raises(ZeroDivisionError),
        RunResults(Path(folder), Configuration(workers=2), "7", rank) as results,
        Tracker([], "7", rank, sinks=[results.sink]) as tracker,
    ):
        tracker.start()
        tracker.record_loss(1.0)
        results.sink.flush()
        while rank != first and not Path(folder, "left").exists():
            time.sleep(0.01)
        raise ZeroDivisionError
    if rank == first:
        Path(folder, "left").touch()


def test_all_workers_accept_the_checkpoint_or_none(tmp_path: Path) -> None:
    run_ranks(2, _fail, str(tmp_path), 0)
    saved = content(tmp_path)
    told = run_ranks(2, _two_workers, str(tmp_path))
    assert told == [
        ("another worker cannot continue from its checkpoint: see its error", None),
        ("does not fit", None),
    ]
    assert content(tmp_path) == saved


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_run_has_the_lines_of_the_worker_that_ended_last(
    first: int, tmp_path: Path
) -> None:
    run_ranks(2, _fail, str(tmp_path), first)
    assert verify_folder(tmp_path) == []
    assert not list(tmp_path.glob("metrics.rank-*.jsonl"))
    run = read_result(tmp_path)["run"]
    assert (run["state"], run["reason"]) == ("failed", "ZeroDivisionError:")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [sum(f'"rank":{rank},"kind":"end"' in line for line in lines) for rank in (0, 1)] == [
        1,
        1,
    ]


def test_a_resume_with_fewer_workers_is_refused(tmp_path: Path) -> None:
    with RunResults(tmp_path, Configuration(workers=1, options={"lr": (1, 2)}), "7"):
        pass
    with RunResults(
        tmp_path, Configuration(workers=1, options={"lr": (1, 2), "epochs": 5}), "7", resume=True
    ):
        pass
    saved = content(tmp_path)
    with pytest.raises(ConfigurationError, match="workers was 1 and is 2: give the same settings"):
        RunResults(tmp_path, Configuration(workers=2, options={"lr": (1, 2)}), "7", resume=True)
    assert content(tmp_path) == saved
