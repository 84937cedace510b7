"""The training loop, and evaluating its checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.controlflow.pytorch.checkpoints_evaluation import CheckpointsEvaluationControlFlow
from mlbench_core.controlflow.pytorch.train_validation import TrainValidation
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import ReduceLROnPlateauWithWarmup
from mlbench_core.optim.pytorch import CentralizedSGD, CustomCentralizedOptimizer
from mlbench_core.tasks import TRAIN_LIMIT
from mlbench_core.utils import Tracker
from tests.helpers.ranks import run_ranks


def batches_of(count: int, size: int = 8, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two well separated classes."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        target = torch.randint(0, 2, (size,), generator=generator)
        data = torch.randn(size, 4, generator=generator) + 2.0 * target[:, None]
        batches.append((data, target))
    return batches


def model_of() -> nn.Linear:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return model


@pytest.fixture(autouse=True)
def log(mocker) -> Any:
    """What is sent to the master."""
    return mocker.patch("mlbench_core.tracking.tracker.LogMetrics").log


def test_a_round_is_the_plain_loop() -> None:
    batches = batches_of(5)
    model = model_of()
    plain = copy.deepcopy(model)
    loss = train_round(
        batches, model, SGD(model.parameters(), 0.1), F.cross_entropy, [], None, "fp32"
    )
    optimizer, losses = SGD(plain.parameters(), 0.1), []
    for data, target in batches:
        optimizer.zero_grad()
        value = F.cross_entropy(plain(data), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert torch.equal(model.weight, plain.weight)
    assert loss == pytest.approx(sum(losses) / 5)


class MarkingSGD(SGD):
    """Marks aggregation and update itself, as the centralized optimizers do."""

    def step(self, closure: Any = None, tracker: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if tracker is not None:
            tracker.record_batch_agg()
            tracker.record_batch_opt_step()


@pytest.mark.parametrize(
    ("optimizer_class", "update"), [(SGD, ["opt_step"]), (MarkingSGD, ["agg", "opt_step"])]
)
def test_every_step_of_a_batch_is_marked_once_in_order(
    optimizer_class, update, monkeypatch
) -> None:
    tracker = Tracker([], "run", 0)
    marks: list[str] = []
    real = tracker.record_batch_step
    monkeypatch.setattr(tracker, "record_batch_step", lambda name: (marks.append(name), real(name)))
    model = model_of()
    train_round(
        batches_of(1), model, optimizer_class(model.parameters(), 0.1), F.cross_entropy, [], None,
        "fp32",
        tracker=tracker,
    )  # fmt: skip
    assert marks == [
        "batch_load",
        "init",
        "fwd_pass",
        "comp_loss",
        "backprop",
        *update,
        "comp_metrics",
    ]
    assert tracker.summary().samples == 8


def test_loss_and_metrics_are_recorded_and_the_last_batch_is_sent(log) -> None:
    metric = TopKAccuracy()
    tracker = Tracker([metric], "run", 0)
    tracker.validation()
    model = model_of()
    train_round(
        batches_of(30), model, SGD(model.parameters(), 0.1), F.cross_entropy, [metric], None,
        "fp32", tracker=tracker,
        max_batch_per_epoch=28,
    )  # fmt: skip
    assert tracker.epoch_stats["train_loss"].count == 28 * 8
    names = [call.args[3] for call in log.call_args_list]
    assert names == ["train_loss", "train_Prec@1"] * 3  # batches 0, 25 and 27


@pytest.mark.parametrize("sized", [True, False])
def test_no_batch_beyond_the_maximum_and_none_left_open(sized: bool) -> None:
    drawn = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches_of(5):
                drawn.append(1)
                yield batch

    class SizedLoader(Loader):
        def __len__(self) -> int:
            return 5

    loader = SizedLoader() if sized else Loader()
    model = model_of()
    for maximum, expected in ((2, 2), (None, 5), (9, 5), (0, 0)):
        drawn.clear()
        tracker = Tracker([], "run", 0)
        train_round(
            loader, model, SGD(model.parameters(), 0.1), F.cross_entropy, [], None, "fp32",
            max_batch_per_epoch=maximum, tracker=tracker,
        )  # fmt: skip
        assert len(drawn) == tracker.summary().batches == expected


def test_schedules_per_batch_or_epoch() -> None:
    model = model_of()
    for per, steps in (("batch", 5), ("epoch", 1)):
        optimizer = SGD(model.parameters(), 1.0)
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train_round(
            batches_of(5), model, optimizer, F.cross_entropy, [], schedule, "fp32", schedule_per=per
        )
        assert optimizer.param_groups[0]["lr"] == 0.5**steps
    with pytest.raises(ValueError, match="'step'"):
        train_round(
            batches_of(1),
            model,
            optimizer,
            F.cross_entropy,
            [],
            schedule,
            "fp32",
            schedule_per="step",
        )


def test_a_plateau_schedule_warms_up_by_batches_and_waits_for_validation() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), 1.0)
    by_batches = ReduceLROnPlateauWithWarmup(optimizer, 0.0, 1.0, 2, batches_per_epoch=5)
    train_round(
        batches_of(5),
        model,
        optimizer,
        F.cross_entropy,
        [],
        by_batches,
        "fp32",
        schedule_per="batch",
    )
    assert optimizer.param_groups[0]["lr"] == 0.5
    by_epochs = ReduceLROnPlateauWithWarmup(optimizer, 0.0, 1.0, 2)
    for per in ("batch", "epoch"):
        train_round(
            batches_of(5),
            model,
            optimizer,
            F.cross_entropy,
            [],
            by_epochs,
            "fp32",
            schedule_per=per,
        )
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_loss_scaling_optimizers_do_their_own_backward_pass() -> None:
    model = model_of()
    optimizer = MagicMock()
    optimizer.backward_loss.side_effect = lambda loss: loss.backward()
    optimizer.step = lambda: None
    train_round(batches_of(3), model, optimizer, F.cross_entropy, [], None, "fp32")
    assert optimizer.backward_loss.call_count == 3


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulated_batches_are_one_big_batch_and_the_rest_is_the_last_update(
    weighted: bool,
) -> None:
    batches = batches_of(5)
    model = model_of()
    big = copy.deepcopy(model)
    joined = [
        tuple(torch.cat(part) for part in zip(*batches[i : i + 2], strict=True)) for i in (0, 2, 4)
    ]
    train_round(joined, big, SGD(big.parameters(), 0.1), F.cross_entropy, [], None, "fp32")
    seen: list[int] = []

    def divisor(parts: Any) -> dict[str, int]:
        seen.append(len(parts))
        return {"denom": sum(len(target) for _, target in parts)}

    def summed(output: Any, target: Any) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    optimizer: Any = SGD(model.parameters(), 0.1)
    if weighted:
        optimizer = CustomCentralizedOptimizer(model, None, optimizer, average_custom=True)
    schedule = StepLR(optimizer, 1, gamma=1.0)
    tracker = Tracker([], "run", 0)
    train_round(
        batches, model, optimizer, summed if weighted else F.cross_entropy, [], schedule, "fp32",
        "batch",
        tracker=tracker, update_freq=2, step_arguments=divisor if weighted else None,
    )  # fmt: skip
    assert torch.allclose(model.weight, big.weight, atol=1e-7)
    assert schedule.last_epoch == 3
    assert tracker.summary().batches == 5
    assert seen == ([2, 2, 1] if weighted else [])


def test_accumulation_needs_a_length_and_a_count() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="update_freq is 2, but list_iterator has no length"):
        train_round(
            iter(batches_of(2)), model, optimizer, F.cross_entropy, [], None, "fp32", update_freq=2
        )
    with pytest.raises(ValueError, match="update_freq must be at least 1, not 0"):
        train_round(
            batches_of(2), model, optimizer, F.cross_entropy, [], None, "fp32", update_freq=0
        )


def accumulate(
    rank: int, world_size: int, batches: Any, overlap: bool
) -> tuple[torch.Tensor, float]:
    model = model_of()
    exchange = AllReduceAggregation(overlap=overlap, bucket_size_bytes=0)
    optimizer = CentralizedSGD(world_size, model, 0.1, aggregation=exchange)
    train_round(
        batches[rank::world_size],
        model,
        optimizer,
        F.cross_entropy,
        [],
        None,
        "fp32",
        update_freq=3,
    )
    return model.weight.detach(), optimizer.aggregation.bytes_sent


def accumulate_both_ways(rank: int, world_size: int, batches: Any) -> Any:
    return [accumulate(rank, world_size, batches, overlap) for overlap in (False, True)]


def test_workers_send_accumulated_gradients_once() -> None:
    batches = batches_of(8)
    model = model_of()
    train_round(
        batches[:6],
        model,
        SGD(model.parameters(), 0.1),
        F.cross_entropy,
        [],
        None,
        "fp32",
        update_freq=6,
    )
    train_round(
        batches[6:],
        model,
        SGD(model.parameters(), 0.1),
        F.cross_entropy,
        [],
        None,
        "fp32",
        update_freq=2,
    )
    for ways in run_ranks(2, accumulate_both_ways, batches):
        for weight, _ in ways:
            assert torch.allclose(weight, model.weight, atol=1e-6)
        assert ways[0][1] == ways[1][1] > 0  # overlapped: no message for the batches in between


def training(
    model: nn.Module, epochs: int, folder: Path | None = None, **kwargs: Any
) -> TrainValidation:
    metrics = [TopKAccuracy()]
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = StepLR(optimizer, 1, gamma=0.9)
    checkpoint = Checkpointer(str(folder), 0, CheckpointFreq.ALL) if folder is not None else None
    return TrainValidation(
        model, optimizer, F.cross_entropy, metrics, scheduler, 8, epochs, 0, 1, "run", "fp32",
        checkpoint=checkpoint,
        **kwargs,
    )  # fmt: skip


def test_training_stops_at_the_goal() -> None:
    tracker = Tracker([TopKAccuracy()], "run", 0, goal=time_to_accuracy_goal(90))
    training(model_of(), 50, tracker=tracker).run(batches_of(6), batches_of(4, seed=9))
    assert tracker.goal_reached
    assert tracker.current_epoch < 50
    assert tracker.best_metric_value >= 90


def train_for_25_s(rank: int, world_size: int) -> int:
    """Train with a limit of 25 s; an epoch takes 10 s on the first worker and 20 s on the
    second."""
    seconds = mock.patch.object(
        Tracker, "get_total_train_time", lambda tracker: 10.0 * (rank + 1) * tracker.current_epoch
    )
    with seconds, mock.patch.dict(os.environ, {TRAIN_LIMIT: "25"}):
        trained = training(model_of(), 50)
        trained.run(batches_of(2), batches_of(2, seed=9))
    return trained.tracker.current_epoch


def test_training_ends_at_the_limit_of_its_training_time_on_all_workers() -> None:
    # After the second epoch, the slower worker has trained for 40 s.
    assert run_ranks(2, train_for_25_s) == [2, 2]


def test_a_resumed_training_ends_where_the_uninterrupted_one_does(tmp_path) -> None:
    whole = model_of()
    training(whole, 4).run(batches_of(6), batches_of(4, seed=9))
    training(model_of(), 2, tmp_path).run(batches_of(6), batches_of(4, seed=9))
    resumed = model_of()
    again = training(resumed, 4, tmp_path)
    again.run(batches_of(6), batches_of(4, seed=9), resume=True)
    assert again.tracker.current_epoch == 4
    assert torch.equal(resumed.weight, whole.weight)


def test_batches_can_be_dealt_out_anew_each_epoch() -> None:
    seeds: list[int] = []

    def make() -> list[Any]:
        seeds.append(len(seeds))
        return batches_of(2, seed=seeds[-1])

    training(model_of(), 3, validate=False).run(
        dataloader_train_fn=make, repartition_per_epoch=True
    )
    assert seeds == [0, 1, 2]
    seeds.clear()
    training(model_of(), 3, validate=False).run(dataloader_train_fn=make)
    assert seeds == [0]


def test_missing_batches_are_named() -> None:
    with pytest.raises(ValueError, match="dataloader_val"):
        training(model_of(), 1).run(batches_of(1))
    with pytest.raises(ValueError, match="not both"):
        training(model_of(), 1).run(
            batches_of(1), batches_of(1), dataloader_train_fn=lambda: batches_of(1)
        )
    with pytest.raises(ValueError, match="checkpoint="):
        training(model_of(), 1).run(batches_of(1), batches_of(1), resume=True)


def train_and_average(rank: int, world_size: int) -> list[float]:
    model = model_of()
    run = TrainValidation(
        model, SGD(model.parameters(), 0.05), F.cross_entropy, [TopKAccuracy()], None, 8, 1, rank,
        world_size, "run",
        "fp32", average_models=True,
    )  # fmt: skip
    run.run(batches_of(3, seed=rank), batches_of(2, seed=50 + rank))
    return model.weight.flatten().tolist()


def test_models_are_averaged_after_each_epoch() -> None:
    workers = run_ranks(2, train_and_average)
    alone = []
    for rank in (0, 1):
        model = model_of()
        train_round(
            batches_of(3, seed=rank),
            model,
            SGD(model.parameters(), 0.05),
            F.cross_entropy,
            [],
            None,
            "fp32",
        )
        alone.append(model.weight.detach().flatten())
    assert workers[0] == workers[1] == pytest.approx(((alone[0] + alone[1]) / 2).tolist(), rel=1e-6)


def evaluate_checkpoints(rank: int, world_size: int, folder: str) -> list[dict[str, float]]:
    tracker = Tracker([], "run", rank)
    checkpointer = Checkpointer(folder, rank, CheckpointFreq.ALL)
    for epoch in range(3):
        tracker.current_epoch = epoch
        model = model_of()
        with torch.no_grad():
            model.weight.fill_(float(epoch + rank))
            model.weight[0] *= -1
        checkpointer.save(tracker, model, None, None, is_best=False)
    flow = CheckpointsEvaluationControlFlow(
        folder,
        rank,
        world_size,
        checkpointer,
        model_of(),
        3,
        F.cross_entropy,
        [TopKAccuracy()],
        dtype="fp32",
    )
    return flow.evaluate_by_epochs(batches_of(2, seed=rank))


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_epochs_averaged_model_is_evaluated(world_size: int, tmp_path) -> None:
    results = run_ranks(world_size, evaluate_checkpoints, str(tmp_path))
    batches = [batch for rank in range(world_size) for batch in batches_of(2, seed=rank)]
    for epoch in range(3):
        model = model_of()
        with torch.no_grad():
            model.weight.fill_(epoch + (world_size - 1) / 2)
            model.weight[0] *= -1
        metric = TopKAccuracy()
        values, loss = validation_round(batches, model, F.cross_entropy, [metric], "fp32")
        for of_rank in results:
            assert of_rank[epoch] == {
                "epoch": epoch, "loss": pytest.approx(loss, rel=1e-6),
                "Prec@1": pytest.approx(values[metric]),
            }  # fmt: skip


def test_the_tracker_may_be_started_before(tmp_path: Path) -> None:
    model, metric = model_of(), TopKAccuracy()
    optimizer = SGD(model.parameters(), 0.1)
    tracker = Tracker([metric], "1", 0)
    tracker.start()
    started_at = tracker.start_time
    training = TrainValidation(
        model,
        optimizer,
        F.cross_entropy,
        [metric],
        StepLR(optimizer, 1),
        8,
        2,
        0,
        1,
        "1",
        "fp32",
        tracker=tracker,
    )
    training.run(batches_of(3), batches_of(2, seed=4))
    assert tracker.start_time == started_at
    assert tracker.current_epoch == 2


def train_on_parts_of_different_length(rank: int, world_size: int) -> tuple[int, int, list[float]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(101, 4), torch.randn(101, 1))
    part = partition_dataset_by_rank(data, rank, world_size)
    model = nn.Linear(4, 1)
    optimizer = CentralizedSGD(world_size=world_size, model=model, lr=0.1)
    tracker = Tracker([], "1", rank)
    tracker.start()
    loader = DataLoader(part, batch_size=10)
    train_round(loader, model, optimizer, nn.MSELoss(), [], None, "fp32", tracker=tracker)
    return len(loader), tracker.summary().batches, model.weight.flatten().tolist()


def test_workers_with_a_batch_more_do_not_wait_for_ever() -> None:
    (length_0, batches_0, weights_0), (length_1, batches_1, weights_1) = run_ranks(
        2, train_on_parts_of_different_length, timeout_s=120
    )
    assert {length_0, length_1} == {5, 6}
    assert batches_0 == batches_1 == 5
    assert weights_0 == weights_1
