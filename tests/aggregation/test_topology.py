"""Graphs of workers against the textbook's values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from mlbench_core.aggregation.pytorch.transport.topology import (
    Topology,
    complete,
    exponential,
    from_edges,
    ring,
    torus,
)
from mlbench_core.distributed.pytorch import FCGraph
from mlbench_core.errors import ConfigurationError

FAMILIES = [ring, torus, exponential, complete]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8, 16])
def test_mixing_matrix_is_symmetric_doubly_stochastic_and_mixes(
    family: Callable[[int], Topology], world_size: int
) -> None:
    topology = family(world_size)
    weights = topology.mixing_matrix
    ones = torch.ones(world_size, dtype=torch.float64)
    assert torch.equal(weights, weights.T)
    assert torch.allclose(weights @ ones, ones, atol=1e-14)
    assert (weights >= 0).all()
    for rank in range(world_size):
        others = [
            other for other in range(world_size) if other != rank and weights[rank, other] > 0
        ]
        assert list(topology.neighbours(rank)) == others
        assert all(rank in topology.neighbours(other) for other in others)
    values = torch.arange(world_size, dtype=torch.float64) ** 2
    distance = (values - values.mean()).norm()
    after = (weights @ values - values.mean()).norm()
    assert 0 < topology.spectral_gap <= 1 + 1e-12
    assert after <= (1 - topology.spectral_gap) * distance + 1e-9


@pytest.mark.parametrize("world_size", [4, 5, 8, 16])
def test_spectral_gap_of_a_ring(world_size: int) -> None:
    eigenvalues = [
        (1 + 2 * math.cos(2 * math.pi * k / world_size)) / 3 for k in range(1, world_size)
    ]
    assert ring(world_size).spectral_gap == pytest.approx(1 - max(map(abs, eigenvalues)), abs=1e-12)


def test_sparser_graphs_mix_slower() -> None:
    gaps = [family(16).spectral_gap for family in (ring, torus, exponential, complete)]
    assert gaps == sorted(gaps)
    assert len(set(gaps)) == 4
    assert gaps[-1] == pytest.approx(1)


def test_neighbours() -> None:
    assert ring(2).neighbours(1) == (0,)
    assert torus(12, rows=3).neighbours(5) == (1, 4, 6, 9)
    assert exponential(16).neighbours(0) == (1, 2, 4, 8, 12, 14, 15)
    assert complete(3).neighbours(1) == (0, 2)
    assert ring(1).neighbours(0) == ()


def test_metropolis_weights_of_a_star() -> None:
    star = from_edges(4, [(0, 1), (2, 0), (0, 3), (3, 0)])
    assert star.edges == ((0, 1), (0, 2), (0, 3))
    expected = (
        torch.tensor([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]], dtype=torch.float64)
        / 4
    )
    assert torch.allclose(star.mixing_matrix, expected, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_edges(3, [(0, 0)]), "two different ranks"),
        (lambda: from_edges(3, [(0, 3)]), "from 0 to 2"),
        (lambda: from_edges(4, [(0, 1), (2, 3)]), r"ranks \[2, 3\] cannot be reached"),
        (lambda: torus(6, rows=4), "rows must be a divisor of world_size 6, not 4"),
        (lambda: ring(0), "world_size must be at least 1, not 0"),
        (lambda: ring(3).neighbours(3), "rank must be from 0 to 2, not 3"),
        (lambda: FCGraph(2, 2), "rank must be from 0 to 1 with world_size 2, not 2"),
        (lambda: FCGraph(0, 0), "world_size must be at least 1, not 0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_fully_connected_graph_on_the_cpu() -> None:
    graph = FCGraph(1, 3)
    assert graph.current_device_name == "cpu"
    assert graph.current_device == torch.device("cpu")
    assert graph.neighbours == (0, 2)
    assert graph.assigned_gpu_id() is None
    assert str(graph) == "FCGraph(rank=1, world_size=3, device=cpu)"


def test_workers_of_a_machine_take_its_gpus_in_turn() -> None:
    with (
        mock.patch("torch.cuda.device_count", return_value=2),
        mock.patch("torch.cuda.set_device") as set_device,
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("LOCAL_RANK", None)
        assert FCGraph(3, 4, use_cuda=True).current_device == torch.device("cuda:1")
        os.environ["LOCAL_RANK"] = "0"
        graph = FCGraph(3, 4, use_cuda=True)
        assert graph.current_device_name == "cuda:0"
        assert graph.assigned_gpu_id() == 0
        set_device.assert_called_once_with(0)


def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with (
        mock.patch("torch.cuda.device_count", return_value=0),
        pytest.raises(ConfigurationError, match=r"sees no GPU.*leave out use_cuda"),
    ):
        FCGraph(0, 1, use_cuda=True)
