"""The parts of the tests of eager updates that run in each worker process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import EagerDiLoCoAggregation
from mlbench_core.optim.pytorch import DiLoCo
from tests.helpers.collectives import recording_collectives
from tests.optim.weight_averaging import Weights, descend, start

PERIOD, STEPS, LR = 3, 15, 0.05
ROUNDS, OUTER_LR = 6, 0.4
BUFFER = ":buffer:mean"


def change(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(start().shape, generator=generator, dtype=torch.float64)


def make(by_layer: bool = False) -> tuple[Weights, DiLoCo]:
    model = Weights(x=start(), y=start()[0])
    eager = EagerDiLoCoAggregation()
    return model, DiLoCo(model=model, lr=LR, period=PERIOD, by_layer=by_layer, aggregation=eager)


def take(rank: int, model: Weights, optimizer: DiLoCo, steps: range) -> list[Tensor]:
    """Train x and y; return x after each step."""
    history = []
    for step in steps:
        model.y.grad = change(rank, step)[0]
        history += descend(rank, model, optimizer, range(step, step + 1))
    return history


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """A run, its messages, the runs resumed from each of its steps, a copy, and one by layer."""
    model, optimizer = make()
    history, saved = [], []
    sent: list[tuple[str, int]] = []
    messages = []
    for step in range(STEPS):
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        with recording_collectives(lambda name, size_bytes: sent.append((name, size_bytes))):
            history += take(rank, model, optimizer, range(step, step + 1))
        messages.append([*sent])
        sent.clear()
        if step == PERIOD:
            copied = copy.deepcopy((model, optimizer))
    ends = [take(rank, *copied, range(PERIOD + 1, STEPS))[-1]]
    for cut in range(2, 9):
        resumed, again = make()
        resumed.load_state_dict(saved[cut][0])
        again.load_state_dict(saved[cut][1])
        ends.append(take(rank, resumed, again, range(cut, STEPS))[-1])
    return {
        "history": history,
        "messages": messages[PERIOD:],
        "counted": optimizer.aggregation.bytes_sent,
        "ends": ends,
        "by layer": take(rank, *make(by_layer=True), range(STEPS))[-1],
    }


def moved(rank: int, world_size: int) -> list[Tensor]:
    """The weights after each round with outer SGD without momentum."""
    x = start()
    aggregation = EagerDiLoCoAggregation(partial(SGD, lr=OUTER_LR))
    aggregation.start({"x": nn.Parameter(x)})
    history = []
    for step in range(ROUNDS):
        x -= change(rank, step)
        aggregation.aggregate({"x": x}, "avg_world")
        history.append(x.clone())
    return history


def others(rank: int, world_size: int) -> list[tuple[float, float]]:
    """A buffer of the worker and a parameter that comes late, after each of three rounds."""
    aggregation = EagerDiLoCoAggregation(partial(SGD, lr=1.0))
    seen = []
    tensors = {BUFFER: torch.zeros(1), "late": torch.full((1,), float(rank))}
    for step in range(3):
        tensors[BUFFER].fill_(10 * step + rank)
        aggregation.aggregate(tensors, "avg_world")
        seen.append((tensors[BUFFER].item(), tensors["late"].item()))
        tensors["late"] += rank
    return seen


def ahead(rank: int, world_size: int) -> bool:
    """Worker 0 sends a second message before the others go on after the first, and trains on.

    In the first round the workers compare their models, and wait for it.
    """
    model, optimizer = make()
    take(rank, model, optimizer, range(PERIOD))
    flag = torch.zeros(1)
    if rank > 0:
        dist.recv(flag, 0)
    take(rank, model, optimizer, range(PERIOD, 3 * PERIOD - 1))
    if rank == 0:
        for other in range(1, world_size):
            dist.send(torch.ones(1), other)
    take(rank, model, optimizer, range(3 * PERIOD - 1, 3 * PERIOD))
    return flag.item() == float(rank > 0)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    scenarios = (trained, moved, others, ahead)
    return {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}
