"""Train a network on handwritten digits with DistributedDataParallel, without MLBench.

Start it by ``torchrun --nproc-per-node 2 train.py``.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="Train a network on handwritten digits")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="images in a batch of a worker")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=1)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    # The last 360 of the 1797 images are for validation.
    train_set = TensorDataset(images[:-360], labels[:-360])
    sampler: DistributedSampler[int] = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    net = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                val_loss = cross_entropy(net(images[-360:]), labels[-360:]).item()
            print(f"epoch {epoch} train loss {loss.item():.4f} val loss {val_loss:.4f}")


if __name__ == "__main__":
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    main(arguments)
    dist.destroy_process_group()
