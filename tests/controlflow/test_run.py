"""What a task's script does around its training."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlbench_core.controlflow.pytorch import run as run_module
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import AccuracyAfterTime, TimeToGoal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.results.folder import read_result
from mlbench_core.tasks import TRAIN_LIMIT
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.ranks import run_ranks


class FakeWorker:
    """Connects no workers; notes what reached the backends and the training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
        self.seen: dict[str, Any] = {}
        self.rank = rank
        monkeypatch.setattr(run_module, "initialize_backends", self.backends)

    @contextlib.contextmanager
    def backends(self, **arguments: Any) -> Iterator[tuple[int, int, None]]:
        self.seen["backend"] = arguments
        yield self.rank, 3, None

    def train(self, run: Run) -> None:
        self.seen["run"] = run
        run.track([])

    def run(self, folder: Path, *argv: str, **options: Any) -> None:
        roots = [f"--root-{name}={folder}" for name in ("dataset", "checkpoint", "output")]
        run_task(
            self.train,
            "task9z",
            add_run_arguments,
            argv=["--run_id", "7", *argv, *roots],
            **options,
        )


def test_arguments_reach_backend_and_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWorker(monkeypatch)

    def prepare(args: argparse.Namespace) -> None:
        assert "backend" not in fake.seen
        args.prepared = True

    fake.run(tmp_path, "--seed", "5", "--timeout", "9", "--light", prepare=prepare)
    backend = fake.seen["backend"]
    assert (backend["seed"], backend["timeout_s"], backend["comm_backend"]) == (5, 9.0, "gloo")
    run = fake.seen["run"]
    assert (run.rank, run.world_size, run.run_id, run.gpu, run.light, run.validation_only) == (
        1, 3, "7", False, True, False,
    )  # fmt: skip
    assert (run.dataset_dir, run.ckpt_run_dir) == (
        str(tmp_path / "torch" / "task9z"),
        str(tmp_path / "task9z" / "7"),
    )
    assert run.args.prepared
    assert not (tmp_path / "task9z" / "7" / "result.json").exists()  # rank 0 writes it


@pytest.mark.parametrize(("argv", "is_written"), [((), True), (("--validation_only",), False)])
def test_the_output_folder_gets_the_result(
    argv: tuple[str, ...], is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker(monkeypatch, rank=0).run(tmp_path, "--seed", "3", "--epochs", "2", *argv)
    folder = tmp_path / "task9z" / "7"
    assert (folder / "result.json").exists() == is_written
    if is_written:
        result = read_result(folder)
        configuration = result["configuration"]
        # The other two workers of this run do not exist.
        assert (result["run"]["id"], result["run"]["state"], result["goal"]) == (
            "7",
            "unfinished",
            None,
        )
        assert (configuration["workers"], configuration["seed"], configuration["division"]) == (
            3,
            3,
            "open",
        )
        assert (configuration["options"], configuration["changed"]) == ({"epochs": 2}, [])


def test_rank_0_writes_to_the_sinks_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        path = tmp_path / f"{rank}.csv"
        fake = FakeWorker(monkeypatch, rank=rank)
        monkeypatch.setattr(fake, "train", lambda run: run.track([]).record_loss(0.5))
        fake.run(tmp_path, "--sink", f"csv:{path}", "--sink", f"jsonl:{path}.jsonl")
        assert path.exists() == Path(f"{path}.jsonl").exists() == (rank == 0)
    assert (tmp_path / "0.csv").read_text() == "epoch,step,name,value\n0,0,train_loss,0.5\n"
    with pytest.raises(SystemExit):
        FakeWorker(monkeypatch, rank=0).run(tmp_path, "--sink", "paper")


class Sink:
    """Notes whether it was closed."""

    is_closed = False

    def __call__(self, *number: Any) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def start(
    folder: Path,
    *argv: str,
    validation_only: bool = False,
    rank: int = 0,
    output_dir: str | None = None,
) -> Run:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser, epochs=3)
    args = parser.parse_args(argv)
    args.run_id, args.gpu, args.light_target, args.validation_only = (
        "7",
        False,
        False,
        validation_only,
    )
    return Run(args, rank, 1, str(folder), str(folder), output_dir=output_dir)


class Training:
    """Trains nothing: each epoch adds 1 to a weight, and its validation loss is what a list
    says."""

    def __init__(self, losses: list[float], goal: Any = None) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.metric = TopKAccuracy(topk=1)
        self.losses = losses
        self.goal = goal

    def validate(self) -> tuple[dict[Any, float], float]:
        loss = self.losses.pop(0)
        return {self.metric: -loss}, loss

    def train(
        self, run: Run, shares: dict[int, float] | None = None, budget: int | None = None
    ) -> list[int]:
        """Return the epochs; those with a share are trained in parts."""
        run.track([self.metric], self.goal)
        epochs = []
        for epoch in run.epochs(
            self.model, self.optimizer, self.scheduler, self.validate, budget=budget
        ):
            epochs.append(epoch)
            run.tracker.train()
            run.tracker.record_loss(10.0 * epoch)
            if shares and epoch in shares:
                for part in run.parts(range(4), shares[epoch]):
                    self.model.weight.data += len(part) / 4
            else:
                self.model.weight.data += 1
        return epochs


def weight_of(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["model"]["weight"])


def test_epochs_are_validated_and_saved_and_resumed(tmp_path: Path) -> None:
    first = Training([3.0, 2.0, 2.5])
    with start(tmp_path) as run:
        assert first.train(run) == [0, 1, 2]
    assert run.tracker.records["val_global_loss"] == {0: 3.0, 1: 2.0, 2: 2.5}
    assert run.tracker.start_time is not None
    assert first.optimizer.param_groups[0]["lr"] == 0.5  # the plateau
    assert weight_of(tmp_path / "model_best.pth.tar") == 2.0
    assert not list(tmp_path.glob("*_0.pth.tar"))
    rest = Training([1.0, 4.0])
    with start(tmp_path, "--resume") as run:
        assert rest.train(run, budget=4) == [2, 3]  # after the best
    assert rest.model.weight.item() == 4.0
    assert weight_of(tmp_path / "model_best.pth.tar") == 3.0


def test_a_run_that_only_validates_trains_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Any] = []
    monkeypatch.setattr(
        Tracker, "publish_summary", lambda tracker, world_size: published.append(world_size)
    )
    with start(tmp_path, "--checkpoint") as run:
        Training([3.0, 2.0, 1.0]).train(run)
    assert published == [1]
    assert sorted(path.name for path in tmp_path.glob("*_0.pth.tar")) == [
        "1_0.pth.tar",
        "2_0.pth.tar",
        "3_0.pth.tar",
    ]
    training = Training([2.5, 1.5, 0.5])
    with start(tmp_path, validation_only=True) as run:
        assert training.train(run) == []
    assert training.model.weight.item() == 3.0
    assert run.tracker.epoch_stats["val_global_loss"].avg == 0.5
    assert (training.losses, published) == ([], [1])


def test_nothing_is_saved_if_no_checkpoint_is_wanted(tmp_path: Path) -> None:
    with start(tmp_path, "--no-checkpoint") as run:
        assert len(Training([3.0, 2.0, 1.0]).train(run)) == 3
    assert not list(tmp_path.rglob("*.pth.tar"))
    with pytest.raises(SystemExit):
        start(tmp_path, "--no-checkpoint", "--checkpoint")


def stats_in(folder: Path) -> list[Any]:
    return [json.loads((folder / f"{part}_stats.json").read_text()) for part in ("val", "train")]


def test_every_checkpoint_is_validated_and_its_statistics_are_written(tmp_path: Path) -> None:
    with start(tmp_path, "--checkpoint") as run:
        Training([3.0, 2.0, 1.0]).train(run)
    with start(tmp_path, validation_only=True, output_dir=str(tmp_path / "out")) as run:
        Training([2.5, float("nan"), 0.5]).train(run)
    assert stats_in(tmp_path / "out") == [
        [
            {"epoch": 1, "loss": 2.5, "Prec@1": -2.5},
            {"epoch": 2, "loss": None, "Prec@1": None},
            {"epoch": 3, "loss": 0.5, "Prec@1": -0.5},
        ],
        [{"epoch": 1, "loss": 0.0}, {"epoch": 2, "loss": 10.0}, {"epoch": 3, "loss": 20.0}],
    ]


def test_the_best_checkpoint_is_validated_if_no_other_is_kept(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        Training([3.0, 1.0, 2.0]).train(run)
    with start(tmp_path, validation_only=True, output_dir=str(tmp_path)) as run:
        Training([0.25]).train(run)
    assert stats_in(tmp_path) == [
        [{"epoch": 2, "loss": 0.25, "Prec@1": -0.25}],
        [{"epoch": 2, "loss": 10.0}],
    ]


def run_worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train until the time of the slower worker is over, and validate the checkpoints that both
    workers have."""
    own = Path(folder, str(rank))
    # An epoch takes worker 0 ten seconds and worker 1 twenty.
    seconds = mock.patch.object(
        Tracker,
        "get_total_train_time",
        lambda tracker: 10.0 * (rank + 1) * (tracker.current_epoch + 1),
    )
    goal = TimeToGoal("val_global_Prec@1", -100.0, description="Score of {threshold}")
    with seconds, start(own, "--checkpoint", "--goal-after", "35", rank=rank) as run:
        epochs = Training([3.0, 4.0, 2.0], goal).train(run)
    if rank == 1:
        (own / "1_1.pth.tar").unlink()  # as if it had been lost
    validating = Training([0.5], goal)
    with start(own, validation_only=True, rank=rank, output_dir=str(own / "out")) as validated:
        validating.train(validated)
    return {
        "epochs": epochs,
        "goal": run.tracker.goal_result,
        "left": validating.losses,
        "written": sorted(path.name for path in own.glob("out/*")),
    }


def test_workers_with_other_clocks_and_other_files_do_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_worker, str(tmp_path))
    assert first["epochs"] == second["epochs"] == [0, 1]
    assert (first["goal"]["value"], second["goal"]["value"]) == (
        -3.0,
        -3.0,
    )  # the best, and not the last
    assert (first["goal"]["time_to_goal_s"], second["goal"]["time_to_goal_s"]) == (20.0, 40.0)
    assert first["goal"]["text"].startswith("Score of -3.000 after 20.000 seconds")
    assert first["left"] == second["left"] == []
    assert (first["written"], second["written"]) == (["train_stats.json", "val_stats.json"], [])


def limited_worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train with a limit of 35 s; an epoch takes 10 s on the first worker and 20 s on the
    second."""
    own = Path(folder, str(rank))
    seconds = mock.patch.object(
        Tracker, "get_total_train_time", lambda tracker: 10.0 * (rank + 1) * tracker.current_epoch
    )
    found = {}
    for name, threshold in (("missed", 100.0), ("reached", -100.0)):
        with (
            seconds,
            mock.patch.dict(os.environ, {TRAIN_LIMIT: "35"}),
            start(own / name, "--past-goal", rank=rank) as run,
        ):
            epochs = Training(
                [3.0, 4.0, 2.0, 1.0], TimeToGoal("val_global_Prec@1", threshold)
            ).train(run)
        found[name] = (epochs, run.tracker.goal_reached)
    return found


def test_a_run_ends_at_the_limit_of_its_training_time_on_all_workers(tmp_path: Path) -> None:
    first, second = run_ranks(2, limited_worker, str(tmp_path))
    # After the second epoch, the slower worker has trained for 40 s.
    assert first["missed"] == second["missed"] == ([0, 1], False)
    assert first["reached"] == second["reached"] == ([0, 1, 2], True)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "a minute"])
def test_a_wrong_limit_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(TRAIN_LIMIT, text)
    with (
        pytest.raises(ConfigurationError, match=f"{TRAIN_LIMIT} must be a positive number"),
        start(tmp_path),
    ):
        pass


def test_a_goal_after_a_time_takes_the_place_of_a_value_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, "--goal-after", "5") as run:
        for goal in (None, lambda name, value, tracker: None):
            with pytest.raises(
                ConfigurationError, match="--goal-after needs a task whose goal is a value"
            ):
                run.track([], goal)
    fake = FakeWorker(monkeypatch)
    with pytest.raises(SystemExit):
        fake.run(tmp_path, "--light", "--goal-after", "5")
    assert "backend" not in fake.seen


def test_a_goal_on_a_statistic_that_is_not_recorded_ends_after_the_first_validation(
    tmp_path: Path,
) -> None:
    training = Training([3.0, 2.0], TimeToGoal("val_global_prec@1", 80))
    with start(tmp_path) as run, pytest.raises(ConfigurationError) as caught:
        training.train(run)
    assert str(caught.value) == (
        "metric of the goal must be a statistic that this run records, not 'val_global_prec@1': "
        "use one of train_loss, val_Prec@1, val_global_Prec@1, val_global_loss, val_loss"
    )
    assert training.losses == [2.0]


def test_the_goal_says_if_the_primary_metric_shall_become_small(tmp_path: Path) -> None:
    metric = TopKAccuracy(topk=1)
    name = "val_global_Prec@1"
    for goal in (TimeToGoal(name, 20, minimize=True), AccuracyAfterTime(20, name, minimize=True)):
        with start(tmp_path) as run:
            with pytest.raises(
                ConfigurationError,
                match=r"minimize must be True, as in the goal on val_global_Prec@1",
            ):
                run.track([metric], goal, minimize=False)
            assert run.track([metric], goal).minimize


def test_the_limit_ends_the_epoch_after_the_part_in_which_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training([3.0, 2.5, 1.0, 2.75], TimeToGoal("val_global_Prec@1", 80))
    # A validation of each part takes one loss from the list, and a part 10 s.
    monkeypatch.setattr(
        Tracker, "get_total_train_time", lambda tracker: 10.0 * (4 - len(training.losses))
    )
    monkeypatch.setenv(TRAIN_LIMIT, "15")
    with start(tmp_path, "--checkpoint") as run:
        assert training.train(run, {0: 0.25}) == [0]
    assert not run.tracker.goal_reached and len(training.losses) == 2
    assert weight_of(tmp_path / "1_0.pth.tar") == 0.5


@pytest.mark.parametrize("past_goal", [False, True])
def test_a_goal_ends_the_epoch_after_the_part_that_reaches_it(
    tmp_path: Path, past_goal: bool
) -> None:
    def goal(name: str, value: float, tracker: Tracker) -> str | None:
        return "reached" if name == "val_global_loss" and value < 2 else None

    training = Training([3.0, 2.5, 1.0, 2.75, 2.0, 2.25], goal)
    argv = ("--past-goal",) if past_goal else ()
    with start(tmp_path, "--checkpoint", *argv) as run:
        assert training.train(run, {0: 0.25}) == ([0, 1, 2] if past_goal else [0])
    assert run.tracker.goal_reached
    assert len(training.losses) == (0 if past_goal else 3)  # a part is validated once
    means = {0: 2.75, 1: 2.0, 2: 2.25} if past_goal else {0: 1.0}
    assert run.tracker.records["val_global_loss"] == means  # an epoch in parts has that of the last
    assert training.model.weight.item() == (3.0 if past_goal else 0.75)
    assert weight_of(tmp_path / "1_0.pth.tar") == (1.0 if past_goal else 0.75)
    assert weight_of(tmp_path / "model_best.pth.tar") == 0.75  # in the middle of an epoch


def test_the_tracker_is_closed_after_an_error(tmp_path: Path) -> None:
    sink = Sink()
    with pytest.raises(ZeroDivisionError), start(tmp_path) as run:
        run.track([], sinks=[sink])
        raise ZeroDivisionError
    assert sink.is_closed
