"""Numbers of half precision, and tensors that are worked on in blocks, lose nothing on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import nn

from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.aggregation.pytorch.compression.sign import EFSignAggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import SparsifiedAggregation
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.local_steps.periodic import DiLoCoAggregation
from mlbench_core.aggregation.pytorch.transport.messages import BLOCK_ELEMENTS
from mlbench_core.aggregation.pytorch.transport.topology import ring
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("random", [False, True])
def test_what_rounding_of_sent_values_loses_is_remembered(random: bool) -> None:
    """1 + 2^-9 is sent as 1 in bfloat16; the memory in float32 keeps the rest."""
    aggregation = SparsifiedAggregation(None, size=1, random=random)
    rest = torch.tensor([2.0**-9])
    aggregation.load_state_dict(
        {
            "memory": {"w": rest.clone()},
            **({"generator": torch.Generator().get_state()} if random else {}),
        }
    )
    sent = torch.ones(1, dtype=torch.bfloat16)
    aggregation.aggregate({"w": sent}, "avg_world")
    assert sent.item() == 1.0
    assert torch.equal(aggregation.memory("w"), rest)


def test_the_scale_of_signs_is_the_mean_over_all_blocks() -> None:
    values = torch.ones(BLOCK_ELEMENTS + 1000)
    values[BLOCK_ELEMENTS:] = -5.0
    expected = values.abs().double().mean().item()
    EFSignAggregation().aggregate({"w": values}, "avg_world")
    assert values[0].item() == pytest.approx(expected, rel=1e-5)
    assert values[-1].item() == pytest.approx(-expected, rel=1e-5)


def far_apart(rank: int, world_size: int) -> dict[str, Any]:
    """The difference of two numbers of float16 that is beyond its range, and sums that bfloat16
    rounds away."""
    x = torch.tensor([60000.0 if rank else -60000.0, 0.0], dtype=torch.float16)
    DecentralizedAggregation(None, None, topology=ring(world_size)).aggregate({"x": x}, "avg_world")

    choco = ChocoAggregation(
        None, None, topology=ring(world_size), compression="identity", gamma=0.5
    )
    y = torch.ones(3, dtype=torch.bfloat16)
    choco.aggregate({"y": y}, "avg_world")

    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    diloco = DiLoCoAggregation(lambda parameters: torch.optim.SGD(parameters, lr=2.0**-9))
    diloco.start(model)
    for _ in range(4):  # steps of 2^-9, half a unit of the last place of bfloat16 below 1
        model.weight.data -= 1.0
        diloco.aggregate({"weight": model.weight.data}, "avg_world")
    return {
        "mixed": x.tolist(),
        "copies": choco.state_dict()["copies"]["y"].dtype,
        "sums": choco.state_dict()["sums"]["y"].dtype,
        "shared": diloco.state_dict()["shared"]["weight"].item(),
    }


def test_half_precision_is_mixed_and_remembered_in_float32() -> None:
    for result in run_ranks(2, far_apart):
        assert result["mixed"] == [0.0, 0.0]
        assert result["copies"] == result["sums"] == torch.float32
        assert result["shared"] == pytest.approx(1 - 4 * 2.0**-9, abs=2.0**-11)
