"""Train ResNet-20 on CIFAR-10 in a plain PyTorch loop, the peer in `task1a_epoch.py`.

It uses torchvision's transforms image by image, DataLoader, DistributedDataParallel and
torch.optim.SGD, with contiguous float32 tensors. Nothing of this project is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output."""
        out = relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return relu(out + self.shortcut(x))


def resnet20() -> nn.Module:
    """Make three stages of three blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for _ in range(3):
            # The first block of the second and third stage halves the image.
            layers.append(Block(inputs, outputs, stride=outputs // inputs))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Images(Dataset):
    """An array of images that are transformed one by one, as in torchvision's CIFAR10."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def make(
    images: np.ndarray,
    labels: np.ndarray,
    rank: int,
    workers: int,
    batch_size: int,
    loader_processes: int,
) -> Callable[[int], None]:
    """Make a function that trains for a number of steps.

    Args:
        images: uint8 of shape (N, 32, 32, 3).
        labels: Classes, shape (N,).
        rank: Rank of this worker.
        workers: Number of workers.
        batch_size: Images per worker.
        loader_processes: ``num_workers`` of the DataLoader.
    """
    torch.manual_seed(42)
    dataset = Images(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=workers, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=loader_processes)
    model = DistributedDataParallel(resnet20())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02 * workers, momentum=0.9, nesterov=True, weight_decay=1e-4
    )  # fmt: skip
    epoch = 0

    def train(steps: int) -> None:
        nonlocal epoch
        sampler.set_epoch(epoch)
        epoch += 1
        model.train()
        running_loss, correct, total = 0.0, 0, 0
        for step, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            correct += outputs.argmax(1).eq(targets).sum().item()
            total += len(targets)
            if step == steps:
                break

    return train
