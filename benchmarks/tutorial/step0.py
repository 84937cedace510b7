"""Train a small network on MNIST with several workers, all by hand: the start of the tutorial.

Every worker computes gradients on its part of the data, and ``average_gradients`` averages them
over all workers, as in the PyTorch tutorial "Writing Distributed Applications with PyTorch". Start
one process per worker::

    python step0.py --rank 0 --world-size 2
    python step0.py --rank 1 --world-size 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms


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
    # The workers start from the same weights, because they draw them with the same seed.
    torch.manual_seed(1234)
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    data = datasets.MNIST(folder, train=True, download=True, transform=transform)
    # Each worker takes every k-th image, so the parts are disjoint and cover the data set.
    part = Subset(data, range(rank, len(data), size))
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
    parser.add_argument("--world-size", type=int, required=True, help="number of workers")
    parser.add_argument("--data", default="data", help="folder of the data set")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs")
    args = parser.parse_args()
    # The workers find one another at worker 0's address.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world_size)
    run(args.rank, args.world_size, args.data, args.epochs)
    dist.destroy_process_group()
