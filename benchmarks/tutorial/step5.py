"""Tutorial, step 5: train until a metric on held-out data reaches a goal. The end of the tutorial.

Start one process per worker::

    python step5.py --hosts 127.0.0.1,127.0.0.1 --rank 0 --run_id 1
    python step5.py --hosts 127.0.0.1,127.0.0.1 --rank 1 --run_id 1
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.dataset.imagerecognition.pytorch import MNIST
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch import initialize_backends
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.optim.pytorch import CentralizedSGD
from mlbench_core.tracking import Tracker


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


def run(rank: int, size: int, run_id: str, folder: str, epochs: int) -> None:
    """Train until 80 % of the test images are recognized, for at most a number of epochs."""
    train_data = MNIST(folder, train=True, download=True, channels=1, pad=0, augment=False)
    part = partition_dataset_by_rank(train_data, rank, size)
    # The batches of all workers together have 128 images, whatever the number of workers.
    train_set = DataLoader(part, batch_size=128 // size, shuffle=True)
    test_data = MNIST(folder, train=False, download=True, channels=1, pad=0)
    val_set = DataLoader(partition_dataset_by_rank(test_data, rank, size), batch_size=128)
    model = Net()
    optimizer = CentralizedSGD(world_size=size, model=model, lr=0.01, momentum=0.5)
    metrics = [TopKAccuracy(topk=1)]
    goal = task1_time_to_accuracy_goal()
    tracker = Tracker(metrics, run_id, rank, goal=goal, results="auto")
    tracker.start()
    for epoch in range(epochs):
        epoch_loss = 0.0
        model.train()
        tracker.train()
        batches = iter(train_set)
        for batch_idx in range(len(train_set)):
            # The Tracker measures the time between two calls, so each call comes after its part. A
            # loop over the batches themselves would load each of them before the first call.
            tracker.batch_start()
            images, target = next(batches)
            tracker.record_batch_load()
            optimizer.zero_grad()
            tracker.record_batch_init()
            output = model(images)
            tracker.record_batch_fwd_pass()
            loss = F.nll_loss(output, target)
            epoch_loss += loss.item()
            tracker.record_batch_comp_loss()
            loss.backward()
            tracker.record_batch_backprop()
            # The optimizer itself marks the aggregation and the update.
            optimizer.step(tracker=tracker)
            results = compute_train_batch_metrics(output, target, metrics)
            tracker.record_batch_comp_metrics()
            tracker.batch_end(samples=len(images))
            record_train_batch_stats(
                batch_idx, loss.item(), output, results, tracker, len(train_set)
            )
        print("rank", rank, "epoch", epoch, "loss", epoch_loss / len(train_set))
        values, val_loss = validation_round(
            val_set, model, F.nll_loss, metrics, "fp32", tracker=tracker
        )
        record_validation_stats(values, val_loss, tracker, rank)
        tracker.epoch_end()
        # The goal is judged on averages over all workers, so all of them stop in the same epoch.
        if tracker.goal_reached:
            break
    if rank == 0:
        print(tracker)
        for part, share in tracker.summary().shares.items():
            print(f"{part}: {share:.0%} of the training time")
    tracker.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network on MNIST")
    parser.add_argument("--run_id", required=True, help="id of this run")
    parser.add_argument("--rank", type=int, required=True, help="rank of this worker")
    parser.add_argument("--hosts", required=True, help="hosts of all workers, separated by commas")
    parser.add_argument("--data", default="data", help="folder of the data set")
    parser.add_argument("--epochs", type=int, default=10, help="largest number of epochs")
    args = parser.parse_args()
    backends = initialize_backends("gloo", hosts=args.hosts, rank=args.rank, seed=1234)
    with backends as (rank, size, _):
        run(rank, size, args.run_id, args.data, args.epochs)
