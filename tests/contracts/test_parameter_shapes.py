"""Every optimizer trains parameters without elements, without dimensions, of one element, and of
any strides.

The contract tests of distributed optimizers have a parameter without dimensions. Here a model has
all of these kinds. Parameters without elements change nothing: the others move as in the same model
without them, bit for bit."""

from __future__ import annotations

import functools
import traceback
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    StreamingDiLoCoAggregation,
    as_ddp_hook,
)
from mlbench_core.optim.pytorch import QSGD, CentralizedSGD, LocalSGD, StreamingDiLoCo
from tests.aggregation.ddp_hook_workers import KINDS as HOOKS
from tests.contracts.test_distributed_optimizers import MEMBERS, Member
from tests.contracts.test_not_finite import MORE
from tests.helpers.ranks import run_ranks

STEPS = 7
EMPTY = {"rows": (0, 4), "columns": (4, 0), "list": (0,), "kernel": (2, 0, 3, 3)}


class Net(nn.Module):
    """Parameters of many shapes and strides. Those without elements come last, so that all others
    keep their places."""

    def __init__(self, has_empty: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.matrix = nn.Parameter(randn(12, 10))
        self.transposed = nn.Parameter(randn(10, 12).t())
        self.kernel = nn.Parameter(randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.every_other = nn.Parameter(randn(7, 8)[:, ::2])
        self.one = nn.Parameter(randn(1))
        self.one_by_one = nn.Parameter(randn(1, 1))
        self.number = nn.Parameter(randn())
        for name, shape in EMPTY.items() if has_empty else ():
            self.register_parameter(f"empty_{name}", nn.Parameter(randn(*shape)))

    def forward(self, rank: int, step: int) -> Tensor:
        """Return a loss with random gradients; also those of empty parameters exist."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        total = torch.zeros(())
        for parameter in self.parameters():
            factor = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            total = total + (parameter * factor).sum().float()
        return total


def streaming(quantize: bool, model: Any, rank: int, world_size: int) -> StreamingDiLoCo:
    """Fragments of one parameter each, so some have no element."""
    exchange = StreamingDiLoCoAggregation(period=11, fragments=11, delay=1, quantize=quantize)
    return StreamingDiLoCo(world_size, model, lr=0.1, aggregation=exchange)


ALL = {
    **MEMBERS,
    **MORE,
    # Its fused kernel refuses a part of a larger tensor, so here it is another.
    "sgd in small buckets": Member(
        lambda m, r, k: CentralizedSGD(
            k, m, lr=0.05, aggregation=AllReduceAggregation(overlap=True, bucket_size_bytes=100)
        )
    ),
    "streaming one by one": Member(partial(streaming, False), period=11),
    "streaming one by one in 4 bits": Member(partial(streaming, True), period=11),
    "local by layer, delayed": Member(
        lambda m, r, k: LocalSGD(k, m, lr=0.05, period=3, delay=1, by_layer=True),
        period=3,
        without=lambda m: None,
    ),
    "qsgd by layer": Member(lambda m, r, k: QSGD(k, m, lr=0.05, by_layer=True)),
}
# Their fragments follow from the positions of all parameters, or their random numbers from the
# number of messages.
COUNTS_ALL = {"streaming one by one", "streaming one by one in 4 bits", "qsgd by layer"}


def train(name: str, rank: int, world_size: int, has_empty: bool) -> dict[str, Tensor]:
    member = ALL[name]
    model = Net(has_empty, member.dtype)
    optimizer = member.make(model, rank, world_size)  # type: ignore[arg-type]
    for step in range(max(STEPS, member.period + 2)):
        optimizer.zero_grad()
        getattr(optimizer, "backward_loss", Tensor.backward)(model(rank, step))
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_with_hook(name: str, rank: int, world_size: int, has_empty: bool) -> dict[str, Tensor]:
    model = Net(has_empty)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(*as_ddp_hook(HOOKS[name](model), wrapped))
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        wrapped(rank, step).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run_all(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for function, names in ((train, ALL), (train_with_hook, HOOKS)):
        for name in names:
            for has_empty in (False, True):
                try:
                    found[function.__name__, name, has_empty] = function(
                        name, rank, world_size, has_empty
                    )
                except Exception:
                    found[function.__name__, name, has_empty] = traceback.format_exc()
    return found


@functools.cache
def trained(world_size: int) -> list[dict[Any, Any]]:
    return run_ranks(world_size, run_all, timeout_s=200) if world_size > 1 else [run_all(0, 1)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("train", name) for name in ALL), *(("train_with_hook", name) for name in HOOKS)],
)
def test_parameters_of_every_shape_train(kind: str, name: str, world_size: int) -> None:
    if kind == "train_with_hook" and world_size == 1:
        pytest.skip("DDP needs a process group")
    start = dict(
        Net(
            has_empty=True, dtype=ALL[name].dtype if kind == "train" else torch.float32
        ).named_parameters()
    )
    for found in trained(world_size):
        weights, without = found[kind, name, True], found[kind, name, False]
        assert not isinstance(weights, str), weights
        assert not isinstance(without, str), without
        for key, value in weights.items():
            assert value.shape == start[key].shape
            assert value.isfinite().all()
            if value.numel():
                is_tie = value.numel() == 1 and "sign" in name  # of two workers, in every step
                assert is_tie or not torch.equal(value, start[key]), f"{key} does not move"
                assert name in COUNTS_ALL or torch.equal(value, without[key]), key
