"""Functions that the tests of FSDP2's hooks run in four workers: two replicas of two shards
each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from mlbench_core.aggregation import pytorch as aggregations
from mlbench_core.aggregation.pytorch import Aggregation, set_fsdp_hooks

REPLICAS = SHARDS = 2
STEPS = 5
LR = 0.1

KINDS: dict[str, Callable[[Any], Aggregation]] = {
    "all-reduce": lambda group: aggregations.AllReduceAggregation(process_group=group),
    "sign": lambda group: aggregations.SignAggregation(process_group=group),
    "EF-sign": lambda group: aggregations.EFSignAggregation(process_group=group),
    "top-k": lambda group: aggregations.SparsifiedAggregation(None, size=3, process_group=group),
    "random-k": lambda group: aggregations.SparsifiedAggregation(
        None, size=3, random=True, process_group=group
    ),
    "QSGD": lambda group: aggregations.QSGDAggregation(process_group=group),
    "quantized": lambda group: aggregations.QuantizedAllReduceAggregation(process_group=group),
}


def make_network() -> nn.Sequential:
    """Return the same network on every worker; the rows of its matrices can be divided by the
    number of shards."""
    torch.manual_seed(1)
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs, targets = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    return nn.functional.mse_loss(model(inputs), targets)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))


def shard(network: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for module in (network[0], network[2], network):
        fully_shard(module, mesh=mesh)
    return network


class Sharded:
    """A sharded model whose replicas exchange gradients by hooks."""

    def __init__(self, kind: str, mesh: DeviceMesh, network: nn.Sequential) -> None:
        self.model = shard(network, mesh["shard"])
        self.state = set_fsdp_hooks(KINDS[kind](mesh["replica"].get_group()), self.model)
        self.optimizer = SGD(self.model.parameters(), lr=LR)

    def train(self, steps: range) -> None:
        for step in steps:
            loss_of(self.model, dist.get_rank(), step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """Return the whole weights of this replica."""
        return [parameter.full_tensor().detach() for parameter in self.model.parameters()]


def trained(kind: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Train without interruption, and resume in the middle from the weights and the state of this
    worker."""
    run = Sharded(kind, mesh, make_network())
    run.train(range(2))
    network, state = make_network(), copy.deepcopy(run.state.state_dict())
    for parameter, values in zip(network.parameters(), run.weights(), strict=True):
        parameter.data.copy_(values)
    run.train(range(2, STEPS))
    again = Sharded(kind, mesh, network)
    again.state.load_state_dict(state)
    again.train(range(2, STEPS))
    return {
        "weights": run.weights(),
        "resumed": again.weights(),
        "bytes": run.state.aggregation.bytes_sent,
    }


def joined() -> list[Tensor]:
    """Train in one process on the batches of all workers."""
    network = make_network()
    optimizer = SGD(network.parameters(), lr=LR)
    for step in range(STEPS):
        losses = [loss_of(network, rank, step) for rank in range(REPLICAS * SHARDS)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in network.parameters()]


def scaled_signs() -> list[Tensor]:
    """Train in one process by the formulas of EF-sign, on the shards of both replicas."""
    network = make_network()
    weights = list(network.parameters())
    errors = [[torch.zeros_like(w) for w in weights] for _ in range(REPLICAS)]
    for step in range(STEPS):
        steps = [torch.zeros_like(w) for w in weights]
        for replica in range(REPLICAS):
            losses = [loss_of(network, replica * SHARDS + i, step) for i in range(SHARDS)]
            gradients = torch.autograd.grad(torch.stack(losses).mean(), weights)
            for total, error, gradient in zip(steps, errors[replica], gradients, strict=True):
                error += gradient
                for rows, part in zip(error.chunk(SHARDS), total.chunk(SHARDS), strict=True):
                    delta = rows.abs().mean() * torch.where(rows >= 0, 1.0, -1.0).to(rows)
                    rows -= delta
                    part += delta / REPLICAS
        with torch.no_grad():
            for weight, total in zip(weights, steps, strict=True):
                weight -= LR * total
    return [weight.detach() for weight in weights]


def errors(mesh: DeviceMesh) -> dict[str, str]:
    """Return the message of each wrong use."""
    between, within = mesh["replica"].get_group(), mesh["shard"].get_group()
    model = shard(make_network(), mesh["shard"])
    all_reduce = aggregations.AllReduceAggregation
    wrong: dict[str, tuple[Any, nn.Module]] = {
        "no aggregation": (all_reduce, model),
        "not sharded": (all_reduce(process_group=between), make_network()),
        "two dimensions": (all_reduce(process_group=between), shard(make_network(), mesh)),
        "other group": (all_reduce(process_group=within), model),
        "all workers": (all_reduce(), model),
        "DiLoCo": (aggregations.DiLoCoAggregation(process_group=between), model),
        "Dion": (aggregations.DionAggregation(rank=2, process_group=between), model),
    }
    messages = {}
    for name, (aggregation, network) in wrong.items():
        try:
            set_fsdp_hooks(aggregation, network)
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    state = set_fsdp_hooks(aggregations.EFSignAggregation(process_group=between), model)
    try:
        state.load_state_dict({"memory": {"0.weight": torch.zeros(24)}})
    except ValueError as error:
        messages["other names"] = str(error)
    return messages


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    mesh = make_mesh()
    assert any(isinstance(p, DTensor) for p in shard(make_network(), mesh["shard"]).parameters())
    return {
        "runs": {kind: trained(kind, mesh) for kind in KINDS},
        "joined": joined(),
        "scaled signs": scaled_signs(),
        "errors": errors(mesh),
    }
