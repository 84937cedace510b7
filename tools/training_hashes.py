"""Print a SHA-256 of all weights after 20 training steps, to compare two versions bit for bit.

``python tools/training_hashes.py`` trains task 1a's ResNet-20 on digits, a small network with
several optimizers, and task 3a's small language model on a made-up text, each with 1 and with 2
Gloo workers on the CPU, one thread each. A hash covers the weights and buffers of all workers in
the order of their ranks. Two runs on one machine print the same lines; another CPU or another torch
may round differently.

It imports only paths of version 3.0 and documented ones, so that one script runs before and after
modules move."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from mlbench_core.controlflow.pytorch.train_validation import train_round
from mlbench_core.dataset.imagerecognition.pytorch import Digits, ImageBatches
from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch.initialize import initialize_backends
from mlbench_core.evaluation.pytorch.criterion import ActivationRegularization
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import LRLinearWarmUp, ReduceLROnPlateauWithWarmup
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.centralized import (
    CentralizedAdam,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    CustomCentralizedOptimizer,
    PowerSGD,
)
from mlbench_core.optim.pytorch.decentralized import DecentralizedSGD
from mlbench_core.optim.pytorch.optim import SignSGD

STEPS = 20
WORLD_SIZES = (1, 2)


def train_digits(rank: int, world_size: int, *, overlap: bool) -> nn.Module:
    """Train ResNet-20 as task 1a does, with smaller batches."""
    part = partition_dataset_by_rank(Digits(train=True), rank, world_size)
    batches = ImageBatches(part, 32, augment=True, shuffle=True, rank=rank)
    torch.manual_seed(1)
    model = get_resnet_model("resnet20", 1, "fp32", num_classes=10)
    optimizer = CentralizedSGD(
        world_size=world_size, model=model, lr=0.02, momentum=0.9, nesterov=True,
        weight_decay=1e-4, overlap=overlap,
    )  # fmt: skip
    scheduler = ReduceLROnPlateauWithWarmup(
        optimizer, warmup_init_lr=0.02, scaled_lr=0.02 * world_size,
        warmup_epochs=1, batches_per_epoch=STEPS,
    )  # fmt: skip
    train_round(
        batches, model, optimizer, nn.CrossEntropyLoss(), [TopKAccuracy(topk=1)], scheduler,
        "fp32", schedule_per="batch", max_batch_per_epoch=STEPS,
    )  # fmt: skip
    return model


def make_optimizer(name: str, model: nn.Module, rank: int, world_size: int) -> Optimizer:
    """Make an optimizer with the arguments that it had in version 3.0."""
    if name == "PowerSGD":
        return PowerSGD(
            model, lr=0.05, momentum=0.9, weight_decay=1e-4,
            reuse_query=True, world_size=world_size, rank=2,
        )  # fmt: skip
    if name == "CentralizedAdam":
        return CentralizedAdam(world_size=world_size, model=model, lr=0.01, by_layer=True)
    if name == "CentralizedSparsifiedSGD":
        parameters = list(model.parameters())
        return CentralizedSparsifiedSGD(
            parameters, lr=0.05, random_sparse=True, world_size=world_size
        )
    if name == "SignSGD":
        return SignSGD(list(model.parameters()), lr=0.001, momentum=0.9)
    neighbors = [other for other in range(world_size) if other != rank]
    return DecentralizedSGD(rank=rank, neighbors=neighbors, model=model, lr=0.05, momentum=0.9)


def train_small(rank: int, world_size: int, *, name: str) -> nn.Module:
    """Train a small network to repeat a linear map, each worker on different samples."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 16))
    target = torch.randn(48, 16)
    optimizer = make_optimizer(name, model, rank, world_size)
    samples = torch.Generator().manual_seed(100 + rank)
    # An optimizer that draws from the global generator draws the same on every worker.
    torch.manual_seed(3)
    for _ in range(STEPS):
        inputs = torch.randn(32, 48, generator=samples)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs @ target).backward()
        optimizer.step()
    return model


def train_language_model(rank: int, world_size: int, *, folder: Path) -> nn.Module:
    """Train task 3a's small model on random words, as the task does until SGD averages."""
    sequences, bptt = 20, 35
    text = Wikitext2Dataset(str(folder), bptt, train=True)
    text.generate_batches(sequences * world_size, sequences, rank)
    text.generate_sequence_lengths(random=True)
    torch.manual_seed(4)
    model = LSTMLanguageModel(
        len(text.dictionary), 200, 400, 2,
        dropout=0.2, dropouth=0.1, dropouti=0.2, dropoute=0.0, wdrop=0.1, tie_weights=True,
    )  # fmt: skip
    # Weights are the same on all workers, and the dropout masks differ.
    torch.manual_seed(5 + rank)
    sgd = partial(SGD, lr=30.0, weight_decay=1.2e-6)
    optimizer = CustomCentralizedOptimizer(
        model, world_size, sgd, grad_clip=0.25, average_world=True
    )
    scheduler = LRLinearWarmUp(optimizer, init_lr=10.0, scaled_lr=30.0, warmup_duration=STEPS)
    regularization = ActivationRegularization(alpha=2.0, beta=1.0)
    model.train()
    hidden = model.init_hidden(sequences)
    for step in range(STEPS):
        words, next_words = text.get_batch(step)
        optimizer.zero_grad()
        hidden = [(h.detach(), c.detach()) for h, c in hidden]
        scores, hidden, raw, dropped = model(words, hidden, return_h=True)
        loss = F.cross_entropy(scores.view(next_words.numel(), -1), next_words.flatten())
        (loss + regularization(dropped[-1], raw[-1])).backward()
        optimizer.step()
        scheduler.step()
    return model


def recipes(folder: Path) -> dict[str, Callable[[int, int], nn.Module]]:
    """List the trainings, by the name that is printed."""
    trainings: dict[str, Callable[[int, int], nn.Module]] = {
        "digits, CentralizedSGD": partial(train_digits, overlap=False),
        "digits, CentralizedSGD, overlap": partial(train_digits, overlap=True),
    }
    for name in (
        "PowerSGD", "CentralizedAdam", "CentralizedSparsifiedSGD", "SignSGD", "DecentralizedSGD",
    ):  # fmt: skip
        trainings[f"small network, {name}"] = partial(train_small, name=name)
    language_model = partial(train_language_model, folder=folder)
    trainings["language model, CustomCentralizedOptimizer"] = language_model
    return trainings


def work(rank: int, world_size: int, folder: Path) -> None:
    """Be one worker: train everything, and leave the digest of each model in the folder."""
    torch.set_num_threads(1)
    hosts = ",".join(["127.0.0.1"] * world_size)
    with initialize_backends(
        "gloo", hosts, rank, logging_level="WARNING", seed=0, ckpt_run_dir=str(folder / "ckpt")
    ):
        for number, (title, train) in enumerate(recipes(folder).items()):
            digest = hashlib.sha256()
            for name, tensor in train(rank, world_size).state_dict().items():
                if not torch.isfinite(tensor).all():
                    raise ValueError(
                        f"{title}: {name} is not finite, and its hash would hide a difference"
                    )
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().contiguous().numpy().tobytes())
            (folder / f"{number}-{world_size}-{rank}").write_text(digest.hexdigest())


def main() -> None:
    """Start the workers of each world, and print one line for each model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # MLBENCH_HOME keeps the files that the data set caches out of the user's folders.
        os.environ.update(OMP_NUM_THREADS="1", MLBENCH_HOME=str(folder / "home"))
        words = [f"w{(number * number * 7 + number * 13) % 401}" for number in range(40_000)]
        text = "\n".join(" ".join(words[i : i + 20]) for i in range(0, len(words), 20))
        for part in ("train", "valid", "test"):
            (folder / f"{part}.txt").write_text(text)
        for world_size in WORLD_SIZES:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
            torch.multiprocessing.spawn(work, (world_size, folder), nprocs=world_size)
        for number, title in enumerate(recipes(folder)):
            for world_size in WORLD_SIZES:
                total = hashlib.sha256()
                for rank in range(world_size):
                    total.update((folder / f"{number}-{world_size}-{rank}").read_bytes())
                print(f"{total.hexdigest()}  {title}, workers: {world_size}")


if __name__ == "__main__":
    main()
