"""A small language model for sweeps: a Transformer that predicts the bytes of WikiText-2.

Its goal is 3.2 bits per byte, the light goal 3.5. Two layers with 64 features read 32 bytes of
text. Each worker trains on 16 random pieces of its own part of the training text in a step, and 20
steps make an epoch. The validation text is the first 32 KiB of WikiText-2's, in parts of the same
size for all workers. One worker needs seconds to the light goal, so that a sweep of hundreds of
runs takes an hour:

    mlbench sweep benchmarks/experiments/language_networks.toml --output FOLDER
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mlbench_core.aggregation.pytorch import (
    Aggregation,
    AllReduceAggregation,
    ChunkedTopKAggregation,
    DionAggregation,
    PowerAggregation,
    QSGDAggregation,
    SparseLoCoAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.local_files import find_file, open_file
from mlbench_core.errors import DatasetNotFoundError
from mlbench_core.evaluation.goals import TimeToGoal
from mlbench_core.evaluation.pytorch.metrics import BitsPerByte
from mlbench_core.optim.pytorch import GenericCentralizedOptimizer, MuonAdamW, get_optimizer

GOAL, LIGHT_GOAL = 3.2, 3.5  # bits per byte
LENGTH, SEQUENCES, STEPS = 32, 16, 20
VALIDATION_BYTES, VALIDATION_SEQUENCES = 2**15, 64
WIDTH, HEADS, LAYERS = 64, 4, 2
LR = 0.005  # of Adam, the same for any number of workers


class ByteTransformer(nn.Module):
    """A causal Transformer with normalization before its parts (Radford et al. 2019).

    The byte embedding is also the output layer. It reads bytes of shape (batch, length), int64, and
    returns the scores of the next byte, (batch, length, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next byte at each place."""
        x = self.bytes(text) + self.positions[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.bytes.weight)


class _Layer(nn.Module):
    """Attention to the bytes before, then a perceptron; both are added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the scores of all bytes."""
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class Pieces:
    """Batches of text and of the same text one byte later, each (sequences, length), int64.

    Args:
        text: The bytes.
        starts: First byte of each piece, one row for each batch.
    """

    def __init__(self, text: Tensor, starts: Tensor) -> None:
        self._text = text
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Any:
        for starts in self._starts:
            piece = self._text[starts[:, None] + torch.arange(LENGTH + 1)].long()
            yield piece[:, :-1], piece[:, 1:]


def read_bytes(folder: Path, name: str) -> Tensor:
    """Return the bytes of ``train.txt`` or ``valid.txt``, plain or compressed, as uint8.

    Raises:
        DatasetNotFoundError: The folder does not have the file.
    """
    path = find_file([folder, folder / "wikitext-2"], [f"{name}.txt", f"wiki.{name}.tokens"])
    if path is None:
        raise DatasetNotFoundError(
            f"no {name}.txt of WikiText-2 in {folder}: name its folder with --data"
        )
    with open_file(path) as file:
        return torch.from_numpy(np.frombuffer(file.read(), dtype=np.uint8).copy())


def part_of(text: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a worker's part of the text; all parts have the same length."""
    length = len(text) // world_size
    return text[rank * length : (rank + 1) * length]


Make = Callable[[nn.Module], Optimizer]


def averaged(aggregation: Callable[[nn.Module], Aggregation], lr: float = LR) -> Make:
    """Return a function that makes AdamW for gradients that an aggregation has averaged."""
    return lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(AdamW, lr=lr), aggregation=aggregation(model)
    )


def of_model(name: str, lr: float = LR, **options: Any) -> Make:
    """Return a function that makes an optimizer that takes a model."""
    return lambda model: get_optimizer(name, model=model, lr=lr, **_made(options))


def of_parameters(name: str, lr: float = LR, **options: Any) -> Make:
    """Return a function that makes an optimizer that takes parameters."""
    return lambda model: get_optimizer(
        name, params=model.named_parameters(), lr=lr, **_made(options)
    )


def _made(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the aggregation made, which needs the process group of the run."""
    if "aggregation" not in options:
        return options
    return {**options, "aggregation": options["aggregation"]()}


def muon(params: Any) -> Optimizer:
    """Make Muon for the matrices."""
    return MuonAdamW(params, lr=LR)


# Rates and periods were chosen with one and two workers.
OPTIMIZERS: dict[str, Make] = {
    "adam": averaged(lambda model: AllReduceAggregation()),
    "adam_bf16": averaged(lambda model: AllReduceAggregation(comm_dtype=torch.bfloat16)),
    "power_sgd": averaged(
        lambda model: PowerAggregation(model, reuse_query=True, world_size=None, rank=4), lr=0.003
    ),
    "qsgd": averaged(lambda model: QSGDAggregation(levels=7, norm=math.inf)),
    "sign_sgd": of_parameters("sign_sgd", lr=0.001, momentum=0.9),
    "one_bit_adam": of_parameters("one_bit_adam", lr=0.003, warmup_steps=60),
    "demo": of_parameters("demo", lr=0.002),
    "dion": of_parameters(
        "dion", lr=0.02, aggregation=lambda: DionAggregation(rank=16, momentum=0.9)
    ),
    "muon": lambda model: GenericCentralizedOptimizer(None, model, optimizer=muon),
    # The outer momentum of 0.9 from the paper is for trainings that are much longer: it overshoots
    # within 400 steps.
    "diloco": of_model("diloco", lr=0.003, period=20, outer_momentum=0.5),
    "streaming_diloco": of_model(
        "streaming_diloco",
        lr=0.002,
        aggregation=lambda: StreamingDiLoCoAggregation(
            period=10, fragments=2, delay=1, quantize=True
        ),
    ),
    "sparse_loco": of_model(
        "sparse_loco",
        aggregation=lambda: SparseLoCoAggregation(ChunkedTopKAggregation(density=0.03)),
        period=10,
    ),
    "muloco": lambda model: get_optimizer("diloco", model=model, period=10, inner_optimizer=muon),
}


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args = run.args
    folder = Path(args.data or run.dataset_dir)
    text = part_of(read_bytes(folder, "train"), run.rank, run.world_size)
    valid = part_of(read_bytes(folder, "valid")[:VALIDATION_BYTES], run.rank, run.world_size)
    starts = torch.arange(0, len(valid) - LENGTH, LENGTH)
    # view() needs whole batches.
    whole = len(starts) // VALIDATION_SEQUENCES * VALIDATION_SEQUENCES
    validation = Pieces(valid, starts[:whole].view(-1, VALIDATION_SEQUENCES))
    model = ByteTransformer()
    optimizer = OPTIMIZERS[args.optimizer](model)
    metrics = [BitsPerByte()]
    goal = TimeToGoal(
        "val_global_BitsPerByte",
        LIGHT_GOAL if run.light else GOAL,
        minimize=True,
        description="{threshold} bits per byte",
    )
    tracker = run.track(metrics, goal)

    def validate() -> tuple[dict[BitsPerByte, float], float]:
        # With some methods, the weights of the workers differ.
        with averaged_weights(model, tracker=tracker):
            return validation_round(
                validation, model, cross_entropy, metrics, "fp32", tracker=tracker
            )

    for epoch in run.epochs(model, optimizer, None, validate):
        # The pieces depend on seed, rank and epoch only, so a resumed run sees the same ones.
        generator = torch.Generator().manual_seed((args.seed * 1009 + run.rank) * 100_003 + epoch)
        starts = torch.randint(len(text) - LENGTH, (STEPS, SEQUENCES), generator=generator)
        train_round(
            Pieces(text, starts), model, optimizer, cross_entropy, metrics, None, "fp32",
            tracker=tracker,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment."""
    add_run_arguments(parser, 100)
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="adam", metavar="NAME",
        help=", ".join(OPTIMIZERS))  # fmt: skip
    add("--data", metavar="FOLDER",
        help="folder of train.txt and valid.txt (default: below --root-dataset)")  # fmt: skip


if __name__ == "__main__":
    run_task(train, "small_language_model", add_arguments)
