"""Averages lent for a validation, and sums through which gradients flow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.aggregation.pytorch.consensus import averaged_weights, consensus_distance
from mlbench_core.distributed.pytorch.process_groups import sum_over_workers
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from mlbench_core.tracking import Tracker
from tests.helpers.ranks import run_ranks


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def work(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2))
    model[0].weight.grad = torch.ones(2, 2)
    before = values(model)
    CommunicationClock().report(None)
    consensus_distance(model)
    with averaged_weights(model) as average:
        assert average is model
        inside = values(model)
    after = values(model)
    recorded: list[Any] = []
    CommunicationClock().report(
        SimpleNamespace(record_collective=lambda *collective: recorded.append(collective))
    )
    assert recorded == [], "averages outside of a training step"
    with pytest.raises(KeyError), averaged_weights(model):
        raise KeyError
    assert values(model) == before
    assert model[0].weight.grad is not None

    x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    total = sum_over_workers(x)
    (total * torch.tensor([1.0, 10.0]) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return {
        "before": before,
        "inside": inside,
        "after": after,
        "total": total.tolist(),
        "grad": x.grad.tolist(),
    }


class Odd(nn.Module):
    """Has what a state_dict lacks or what is no tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(rank)))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.register_buffer("kept", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("cache", None)
        self.register_buffer("replaced", torch.full((2,), float(rank)))
        self.register_buffer("counter", torch.tensor(rank))
        self.calls = {"seen": rank}

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state

    def values(self) -> dict[str, Any]:
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {
            "calls": dict(self.calls),
            **{name: tensor.tolist() for name, tensor in tensors.items()},
        }


def lend_odd(rank: int, world_size: int) -> dict[str, Any]:
    model = nn.Sequential(Odd(rank))
    odd = model[0]
    memory = [tensor.data_ptr() for tensor in (odd.weight, odd.kept, odd.replaced)]
    before = odd.values()
    with averaged_weights(model):
        inside = odd.values()
        odd.calls["seen"] += 5
        odd.counter += 5
        odd.cache, odd.replaced, odd.kept = torch.ones(3), torch.zeros(2), odd.kept * 7
    assert [tensor.data_ptr() for tensor in (odd.weight, odd.kept, odd.replaced)] == memory
    return {"before": before, "inside": inside, "after": odd.values()}


def test_all_is_given_back() -> None:
    for result in run_ranks(2, lend_odd):
        assert result["after"] == result["before"]
        assert (
            result["inside"]["weight"]
            == result["inside"]["kept"]
            == result["inside"]["frozen"]
            == [0.5, 0.5]
        )


def test_two_workers() -> None:
    results = run_ranks(2, work)
    for result in results:
        assert result["after"] == result["before"]
        assert result["total"] == [3.0, 4.0]
        assert result["grad"] == [3.0, 30.0]  # (1 + 2) of either worker's loss
    assert results[0]["inside"] == results[1]["inside"]
    assert results[0]["before"] != results[1]["before"]
    for name, mean in results[0]["inside"].items():
        own = [torch.tensor(result["before"][name], dtype=torch.float64) for result in results]
        torch.testing.assert_close(
            torch.tensor(mean, dtype=torch.float64), sum(own) / 2, rtol=1e-6, atol=1e-7
        )


def test_alone_nothing_changes() -> None:
    model = nn.Linear(2, 1)
    before = values(model)
    with averaged_weights(model):
        assert values(model) == before
    x = torch.ones(2, requires_grad=True)
    assert sum_over_workers(x) is x


def charged(rank: int, world_size: int) -> dict[str, Any]:
    """Validate the average of equal and of different weights, with a tracker."""
    found: dict[str, Any] = {}
    for name, seed in (("equal", 0), ("different", rank)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        # The statistics of batch norm differ in any case.
        model(torch.randn(4, 3) + rank)
        tracker = Tracker([], "run", rank, sinks=[])
        with averaged_weights(model, tracker=tracker) as average:
            inside = values(average)
        totals = tracker.totals()
        found[name] = {
            "inside": inside, "train_s": totals["train_s"],
            "agg": totals["steps_s"].get("agg", 0.0),
            "exposed_s": totals["communication_exposed_s"], "exchanges": totals["exchanges"],
            "handed_over": totals["communication_size_bytes"],
            "on_wire": totals["communication_wire_bytes"],
        }  # fmt: skip
    return found


def test_an_average_that_a_validation_needs_is_a_part_of_training() -> None:
    found = run_ranks(3, charged)
    for worker in found:
        equal, different = worker["equal"], worker["different"]
        assert [equal[name] for name in ("train_s", "exchanges", "handed_over", "on_wire")] == [
            0,
            0,
            0,
            0,
        ]
        assert different["train_s"] == different["agg"] == different["exposed_s"] > 0
        # 8 parameters of the layer, 4 of batch norm, 4 statistics.
        assert (different["exchanges"], different["handed_over"]) == (1, 4 * 16)
        assert different["on_wire"] == round(4 * 16 * 2 * 2 / 3)
        assert different["inside"] == found[0]["different"]["inside"], (
            "the average is that without a tracker"
        )
