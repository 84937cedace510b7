"""A template for your training script: the network of the tutorial, on MNIST, until 80 % accuracy.

``run_task`` reads the command line with ``task_main``, connects the workers, and writes the result
folder. Replace the network, the data and the metrics by your own.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchinfo import summary

from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.imagerecognition.pytorch import MNIST
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.optim.pytorch import CentralizedSGD


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this script to those of every task."""
    add_run_arguments(parser, epochs=10)
    parser.add_argument("--data", help="folder of the data set, if not below --root-dataset")


def train(run: Run) -> None:
    """Train one worker; ``run`` has its rank, the number of workers, folders and arguments."""
    folder = run.args.data or run.dataset_dir
    train_data = MNIST(folder, train=True, download=True, channels=1, pad=0, augment=False)
    part = partition_dataset_by_rank(train_data, run.rank, run.world_size)
    # The batches of all workers together have 128 images, whatever the number of workers.
    train_set = DataLoader(part, batch_size=128 // run.world_size, shuffle=True)
    test_data = MNIST(folder, train=False, download=True, channels=1, pad=0)
    val_set = DataLoader(
        partition_dataset_by_rank(test_data, run.rank, run.world_size), batch_size=128
    )
    model, metrics = Net(), [TopKAccuracy(topk=1)]
    optimizer = CentralizedSGD(world_size=run.world_size, model=model, lr=0.01, momentum=0.5)
    tracker = run.track(metrics, task1_time_to_accuracy_goal())

    def validate() -> tuple[dict[TopKAccuracy, float], float]:
        return validation_round(val_set, model, F.nll_loss, metrics, "fp32", tracker=tracker)

    if run.rank == 0:
        print(summary(model, verbose=0))
    for _ in run.epochs(model, optimizer, None, validate):
        train_round(train_set, model, optimizer, F.nll_loss, metrics, None, "fp32", tracker=tracker)


if __name__ == "__main__":
    run_task(train, "mine", add_arguments)
