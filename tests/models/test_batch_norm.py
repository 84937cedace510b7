"""Batch normalisation over all workers' batches, against torch's over the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from mlbench_core.models.pytorch.batch_norm import DistributedBatchNorm2d, convert_batch_norm
from tests.helpers.ranks import run_ranks

SIZES = (6, 10)  # images of the two workers: parts need not be equal


def make_network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3),
        nn.BatchNorm2d(2, momentum=None),
    ]
    return nn.Sequential(*layers).to(dtype)


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(sum(SIZES), 3, 8, 8, generator=generator, dtype=torch.float64) * 3 + 1
        for _ in range(3)
    ]


def run(network: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    """Outputs, gradients of a sum of losses, and buffers after a few batches, in training and then
    in evaluation."""
    outputs, inputs = [], [batch.clone().requires_grad_() for batch in batches]
    for batch in inputs:
        outputs.append(network(batch))
        outputs[-1].square().mul(torch.linspace(0, 1, 4, dtype=batch.dtype)).sum().backward()
    network.eval()
    return {
        "outputs": [output.detach() for output in outputs],
        "inputs": [batch.grad for batch in inputs],
        "weights": [parameter.grad for parameter in network.parameters()],
        "buffers": list(network.buffers()),
        "evaluation": network(batches[0]).detach(),
    }


def run_part(rank: int, world_size: int) -> dict[str, Any]:
    start = sum(SIZES[:rank])
    return run(
        convert_batch_norm(make_network()), [b[start : start + SIZES[rank]] for b in make_batches()]
    )


def test_two_workers_compute_what_one_computes_with_both_batches() -> None:
    whole = run(make_network(), make_batches())
    parts = run_ranks(2, run_part)
    for what in ("outputs", "inputs"):
        for number, expected in enumerate(whole[what]):
            torch.testing.assert_close(torch.cat([part[what][number] for part in parts]), expected)
    for number, expected in enumerate(whole["weights"]):
        torch.testing.assert_close(
            parts[0]["weights"][number] + parts[1]["weights"][number], expected
        )
    for part in parts:
        for found, expected in zip(part["buffers"], whole["buffers"], strict=True):
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.cat([p["evaluation"] for p in parts]), whole["evaluation"])


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_alone_it_is_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, **options)
    ours = DistributedBatchNorm2d(3, **options)
    for batch in torch.randn(4, 5, 3, 4, 4) * 2 + 5:
        torch.testing.assert_close(ours(batch), plain(batch))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    torch.testing.assert_close(ours.eval()(batch), plain.eval()(batch))


def test_half_precision_is_normalised_in_float32() -> None:
    batch = torch.randn(64, 2, 16, 16, dtype=torch.bfloat16) * 4 + 100
    normalised = DistributedBatchNorm2d(2)(batch)
    assert normalised.dtype == torch.bfloat16
    torch.testing.assert_close(normalised, nn.BatchNorm2d(2)(batch.float()).bfloat16())


def test_conversion_keeps_parameters_and_names() -> None:
    network = make_network()
    names, parameters = list(network.state_dict()), list(network.parameters())
    converted = convert_batch_norm(network)
    assert converted is network
    assert list(network.state_dict()) == names
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert [type(m) for m in network.modules()].count(DistributedBatchNorm2d) == 2
    assert type(convert_batch_norm(nn.BatchNorm2d(2).eval())) is DistributedBatchNorm2d
    assert not convert_batch_norm(nn.BatchNorm2d(2).eval()).training


def test_wrong_shape() -> None:
    with pytest.raises(ValueError, match="4D"):
        DistributedBatchNorm2d(2)(torch.ones(3, 2))
