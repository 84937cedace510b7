"""Rules that every communication hook of DDP and of FSDP2 obeys; a new aggregation in their tables
gets them, too."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlbench_core.aggregation.pytorch import AllReduceAggregation, as_ddp_hook, set_fsdp_hooks
from tests.aggregation import ddp_hook_workers, fsdp_hook_workers
from tests.helpers.ranks import run_ranks

WORLD_SIZE = 2
TAKE_COMPLEX = {
    *("all-reduce", "overlap", "overlap in bf16", "power", "warm power", "power in turns", "Dion")
}


class Complex(nn.Module):
    """Complex parameters of several strides, and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.complex64)

        self.matrix = nn.Parameter(draw(4, 3))
        self.transposed = nn.Parameter(draw(3, 4).t())
        self.scalar = nn.Parameter(draw())
        self.head = nn.Linear(3, 2)
        for parameter in self.head.parameters():
            nn.init.constant_(parameter, 0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        products = (inputs.to(torch.complex64) @ self.matrix) * (
            inputs.to(torch.complex64) @ self.transposed
        )
        return self.head((products * self.scalar).abs())


def complex_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(5, 4, generator=generator)).square().mean()


def complex_gradients(kind: str, bucket_cap_mb: float, as_view: bool) -> Any:
    model = Complex()
    ddp_model = DistributedDataParallel(
        model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=as_view
    )
    try:
        hook = as_ddp_hook(ddp_hook_workers.KINDS[kind](model), ddp_model)
    except TypeError as error:
        return str(error)
    ddp_model.register_comm_hook(*hook)
    found = []
    for step in range(3):
        model.zero_grad()
        complex_loss(ddp_model, dist.get_rank(), step).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found


def ddp_bytes(kind: str) -> list[tuple[int, int]]:
    """Bytes of each pass as the aggregation tells them, and as it adds them up."""
    model = ddp_hook_workers.make_network()
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=ddp_hook_workers.SMALL_MB)
    aggregation = ddp_hook_workers.KINDS[kind](model)
    ddp_model.register_comm_hook(*as_ddp_hook(aggregation, ddp_model))
    found = []
    for step in range(3):
        before = aggregation.bytes_sent
        ddp_hook_workers.backward(ddp_model, dist.get_rank(), step)
        found.append((aggregation.last_bytes, aggregation.bytes_sent - before))
        model.zero_grad()
    return found


def renamed() -> str:
    """The error of a model that has another name for a layer on worker 1."""
    model = nn.ModuleDict({"first" if dist.get_rank() == 0 else "other": nn.Linear(2, 2)})
    model.forward = lambda inputs: sum(layer(inputs) for layer in model.values())
    ddp_model = DistributedDataParallel(model)
    ddp_model.register_comm_hook(*as_ddp_hook(AllReduceAggregation(), ddp_model))
    try:
        ddp_model(torch.ones(1, 2)).sum().backward()
    except ValueError as error:
        return str(error)
    return "no error"


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    layouts = [(25.0, False), (0.0001, False), (0.0001, True)]
    return {
        "complex": {
            kind: [complex_gradients(kind, *layout) for layout in layouts]
            for kind in ddp_hook_workers.KINDS
        },
        "bytes": {kind: ddp_bytes(kind) for kind in ddp_hook_workers.KINDS},
        "renamed": renamed(),
    }


@functools.cache
def trained() -> list[dict[str, Any]]:
    return run_ranks(WORLD_SIZE, run_all)


@pytest.mark.parametrize("kind", ddp_hook_workers.KINDS)
def test_both_halves_of_complex_gradients_are_averaged_or_the_hook_is_refused(kind: str) -> None:
    for result in trained():
        for found in result["complex"][kind]:
            if kind not in TAKE_COMPLEX:
                assert re.match(r"parameter 'matrix' must be real for \w+, not complex", found)
                continue
            for step, gradients in enumerate(found):
                model = Complex()
                (
                    sum(complex_loss(model, rank, step) for rank in range(WORLD_SIZE)) / WORLD_SIZE
                ).backward()
                for name, parameter in model.named_parameters():
                    # The real head is compressed by Dion and in half precision; complex numbers are
                    # not compressed.
                    if parameter.is_complex():
                        tolerance = 2e-2 if "bf16" in kind else 1e-5
                        torch.testing.assert_close(
                            gradients[name], parameter.grad, rtol=tolerance, atol=tolerance
                        )


@pytest.mark.parametrize("kind", ddp_hook_workers.KINDS)
def test_last_bytes_are_those_of_the_last_pass(kind: str) -> None:
    for result in trained():
        for last, added in result["bytes"][kind]:
            assert last == added > 0


def test_models_with_other_names_are_refused() -> None:
    for result in trained():
        assert "worker 0 has 'first.weight', and worker 1 does not" in result["renamed"]


def run_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    mesh = fsdp_hook_workers.make_mesh()
    found: dict[str, Any] = {}
    for kind in fsdp_hook_workers.KINDS:
        sharded = fsdp_hook_workers.Sharded(kind, mesh, fsdp_hook_workers.make_network())
        aggregation, last, add = sharded.state.aggregation, [], []
        aggregate = aggregation.aggregate

        def recorded(
            *args: Any, aggregate: Any = aggregate, aggregation: Any = aggregation, **named: Any
        ) -> None:
            before = aggregation.bytes_sent
            aggregate(*args, **named)
            last.append(aggregation.last_bytes)  # noqa: B023
            add.append(aggregation.bytes_sent - before)  # noqa: B023

        aggregation.aggregate = recorded
        sharded.train(range(2))
        found[kind] = last, add
    try:
        model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
        fully_shard(model, mesh=mesh["shard"])
        set_fsdp_hooks(AllReduceAggregation(process_group=mesh["replica"].get_group()), model)
    except TypeError as error:
        found["complex"] = str(error)
    return found


def test_hooks_of_fsdp_count_the_bytes_of_each_module_and_refuse_complex_numbers() -> None:
    for result in run_ranks(4, run_fsdp):
        assert "must be real, not complex" in result.pop("complex")
        for last, added in result.values():
            assert last == added
            assert len(last) >= 4
            assert min(last) > 0
