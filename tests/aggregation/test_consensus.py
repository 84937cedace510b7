"""Averages lent for a validation, and sums through which gradients flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.utils.pytorch.distributed import sum_over_workers
from tests.helpers.ranks import run_ranks


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def work(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2))
    model[0].weight.grad = torch.ones(2, 2)
    before = values(model)
    with averaged_weights(model) as average:
        assert average is model
        inside = values(model)
    after = values(model)
    with pytest.raises(KeyError), averaged_weights(model):
        raise KeyError
    assert values(model) == before
    assert model[0].weight.grad is not None

    x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    total = sum_over_workers(x)
    (total * torch.tensor([1.0, 10.0]) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return {"before": before, "inside": inside, "after": after, "total": total.tolist(), "grad": x.grad.tolist()}


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
        torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), sum(own) / 2, rtol=1e-6, atol=1e-7)


def test_alone_nothing_changes() -> None:
    model = nn.Linear(2, 1)
    before = values(model)
    with averaged_weights(model):
        assert values(model) == before
    x = torch.ones(2, requires_grad=True)
    assert sum_over_workers(x) is x
