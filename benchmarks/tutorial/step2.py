"""Tutorial, step 2: the data sets and partitions of MLBench.

Start one process per worker::

    python step2.py --hosts 127.0.0.1,127.0.0.1 --rank 0
    python step2.py --hosts 127.0.0.1,127.0.0.1 --rank 1
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

from mlbench_core.dataset.imagerecognition.pytorch import MNIST
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch import initialize_backends


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


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the workers."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            # Every worker receives the sum, so dividing it by their number gives the mean.
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def run(rank: int, size: int, folder: str, epochs: int) -> None:
    """Train for a number of epochs."""
    train_data = MNIST(folder, train=True, download=True, channels=1, pad=0, augment=False)
    part = partition_dataset_by_rank(train_data, rank, size)
    # The batches of all workers together have 128 images, whatever the number of workers.
    train_set = DataLoader(part, batch_size=128 // size, shuffle=True)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(epochs):
        epoch_loss = 0.0
        for images, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("rank", rank, "epoch", epoch, "loss", epoch_loss / len(train_set))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network on MNIST")
    parser.add_argument("--rank", type=int, required=True, help="rank of this worker")
    parser.add_argument("--hosts", required=True, help="hosts of all workers, separated by commas")
    parser.add_argument("--data", default="data", help="folder of the data set")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs")
    args = parser.parse_args()
    backends = initialize_backends("gloo", hosts=args.hosts, rank=args.rank, seed=1234)
    with backends as (rank, size, _):
        run(rank, size, args.data, args.epochs)
