"""Training loops as scripts of version 3.0 have them, on one and two workers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.helpers import (
    convert_dtype,
    iterate_dataloader,
    prepare_batch,
)
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch.process_groups import global_average
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import F1Score, MLBenchMetric, TopKAccuracy
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.utils import Tracker
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

EPOCHS, BATCH = 8, 8


class ErrorRate(MLBenchMetric):
    """A metric of the user's own that fills the meter itself."""

    @property
    def name(self) -> str:
        return "Error"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) != target).float().mean().reshape(1)

    def update(self, perc: float, size: int) -> None:
        self.average_meter.update(perc, size)


def images() -> TensorDataset:
    """Bytes of two classes that a linear model tells apart."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(100) % 2
    pixels = torch.randint(0, 150, (100, 6), generator=generator)
    pixels += 100 * torch.cat(
        [labels[:, None].repeat(1, 3), 1 - labels[:, None].repeat(1, 3)], dim=1
    )
    return TensorDataset(pixels.to(torch.uint8), labels)


def train_batches(
    loader: Any, model: nn.Module, optimizer: Any, metrics: list[MLBenchMetric], tracker: Tracker
) -> None:
    model.train()
    tracker.train()
    for batch_idx, (data, target) in enumerate(iterate_dataloader(loader, "fp32")):
        tracker.batch_start()
        optimizer.zero_grad()
        tracker.record_batch_init()
        output = model(data / 255)
        tracker.record_batch_fwd_pass()
        loss = F.cross_entropy(output, target)
        tracker.record_batch_comp_loss()
        loss.backward()
        tracker.record_batch_backprop()
        optimizer.step(tracker=tracker)
        results = compute_train_batch_metrics(output, target, metrics)
        tracker.record_batch_comp_metrics()
        tracker.batch_end()
        record_train_batch_stats(batch_idx, loss.item(), output, results, tracker, len(loader))


def validate_with_the_library(
    loader: Any, model: nn.Module, metrics: list[MLBenchMetric], tracker: Tracker, rank: int
) -> bool:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / 255, target)  # of a linear model without bias

    values, loss = validation_round(
        loader, model, loss_of, metrics, dtype="fp32", tracker=tracker, use_cuda=False
    )
    return record_validation_stats(values, loss, tracker=tracker, rank=rank)


def validate_by_hand(
    loader: Any, model: nn.Module, metrics: list[MLBenchMetric], tracker: Tracker, rank: int
) -> bool:
    model.eval()
    tracker.validation()
    tracker.validation_start()
    loss_sum, count = 0.0, 0
    for metric in metrics:
        metric.reset()
    with torch.no_grad():
        for data, target in loader:
            data, target = prepare_batch(
                data, target, "fp32", transform_target_dtype=False, use_cuda=False
            )
            output = model(data / 255)
            loss_sum += F.cross_entropy(output, target).item() * len(data)
            count += len(data)
            for metric in metrics:
                metric.update(metric(output, target).item(), data.size(0))
    tracker.validation_end()
    tracker.record_loss(global_average(loss_sum, count).item(), log_to_api=rank == 0)
    for metric in metrics:
        value = metric.average().item()
        tracker.record_metric(metric, value, log_to_api=rank == 0)
        tracker.record_stat(f"global_{metric.name}", value, log_to_api=rank == 0)
    return tracker.is_best()


def run_script(rank: int, world_size: int, by_hand: bool) -> dict[str, Any]:
    """A whole run; what it made of the model, the tracker and the master."""
    torch.manual_seed(0)
    train_set = partition_dataset_by_rank(images(), rank, world_size, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=BATCH // world_size)
    val_set = partition_dataset_by_rank(images(), rank, world_size, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=7)
    model = convert_dtype("fp32", nn.Linear(6, 2, bias=False))
    metrics = [TopKAccuracy(topk=1), ErrorRate()]
    optimizer = CentralizedSGD(world_size=world_size, model=model, lr=0.004, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.1)
    validate = validate_by_hand if by_hand else validate_with_the_library
    best = []
    with patch("mlbench_core.tracking.tracker.LogMetrics") as log_metrics:
        tracker = Tracker(metrics, "1", rank, goal=task1_time_to_accuracy_goal)
        tracker.start()
        for _ in range(EPOCHS):
            train_batches(train_loader, model, optimizer, metrics, tracker)
            best.append(validate(val_loader, model, metrics, tracker, rank))
            scheduler.step()
            tracker.epoch_end()
            if tracker.goal_reached:
                break
    return {
        "weights": [w.tolist() for w in model.parameters()],
        "best": best,
        "value": (tracker.best_metric_value, tracker.best_epoch),
        "records": {
            name: list(values.values()) for name, values in tracker.records.items() if "val" in name
        },
        "epochs": len(tracker.epoch_metrics["agg"]),
        "steps": sorted(tracker.epoch_metrics),
        "sent": [entry.args[3] for entry in log_metrics.log.call_args_list],
        "text": tracker.goal_text,
        "val_s": tracker.get_total_val_time(),
    }


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_a_script_trains_validates_and_reaches_its_goal(world_size: int) -> None:
    for by_hand in (False, True):
        results = run_ranks(world_size, run_script, by_hand)
        for rank, result in enumerate(results):
            assert result["weights"] == results[0]["weights"]
            assert result["records"] == results[0]["records"]
            accuracies = result["records"]["val_global_Prec@1"]
            assert accuracies == result["records"]["val_Prec@1"]
            assert accuracies[-1] >= 80 > max(accuracies[:-1])
            errors = result["records"]["val_global_Error"]
            assert [100 * (1 - error) for error in errors] == pytest.approx(accuracies, rel=1e-5)
            assert result["best"][-1]
            assert result["value"] == (accuracies[-1], len(accuracies) - 1)
            assert result["epochs"] == len(accuracies) <= EPOCHS
            assert {"agg", "backprop", "comp_loss", "comp_metrics", "fwd_pass", "init"} <= set(
                result["steps"]
            )
            assert result["text"].startswith("80% Top 1 Validation Accuracy reached in ")
            assert result["val_s"] > 0
            sent = result["sent"]
            assert (
                sent.count("TaskResult")
                == sent.count("TotalCumulativeTrainTime")
                == (1 if rank == 0 else 0)
            )
            assert ("val_global_Prec@1" in sent) == (rank == 0)
            for name in (
                "train_loss",
                "train_Prec@1",
                "fwd_pass",
                "cum_fwd_pass",
                "CumulativeTrainTimeEpoch",
            ):
                assert name in sent


def test_values_of_a_batch_can_be_indexed_and_the_same_metric_serves_training_and_validation() -> (
    None
):
    accuracy, f1 = TopKAccuracy(), F1Score()
    output, target = torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1])
    assert accuracy(output, target)[0].item() == 50.0
    for _ in range(3):
        compute_train_batch_metrics(output[:, 1], target, [f1])  # of training: never taken in
    f1.reset()
    for index in range(2):
        f1.update(f1(output[index : index + 1, 1], target[index : index + 1]).item(), 1)
    assert f1.average().item() == pytest.approx(2 / 3)
