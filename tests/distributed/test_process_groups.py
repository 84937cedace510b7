"""Averages over workers, and a world of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.process_groups import get_backend_tensor, global_average
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some


def test_one_process_is_a_world_of_size_one() -> None:
    assert not process_groups.is_distributed()
    assert (process_groups.rank(), process_groups.world_size(), process_groups.backend()) == (
        0,
        1,
        None,
    )
    process_groups.barrier()
    assert global_average(3, 4).item() == 0.75


def _averages(
    rank: int, world_size: int
) -> tuple[float, float, list[float], float, int, int, str | None]:
    return (
        global_average(float(rank + 1), rank + 1).item(),
        global_average(torch.tensor(10.0 * rank), torch.tensor(2)).item(),
        global_average(torch.tensor([rank, 2 * rank]), 1).tolist(),
        global_average(2**24 + rank, 1).item(),
        process_groups.rank(),
        process_groups.world_size(),
        process_groups.backend(),
    )


@pytest.mark.parametrize("world_size", some([2, 4]))
def test_average_over_workers(world_size: int) -> None:
    results = run_ranks(world_size, _averages)
    mean_rank = (world_size - 1) / 2
    for rank, result in enumerate(results):
        assert result == (
            1.0,
            5 * mean_rank,
            [mean_rank, 2 * mean_rank],
            2**24 + mean_rank,
            rank,
            world_size,
            "gloo",
        )


def test_counts_above_2_to_the_24_are_exact() -> None:
    count = 2**24 + 1
    assert global_average(count, 1).item() == count
    assert global_average(float(count), 1).item() == count
    assert global_average(torch.tensor(count), count).item() == 1.0


def test_average_of_nothing_is_zero_not_nan() -> None:
    assert global_average(0.0, 0).item() == 0.0
    assert global_average(torch.zeros(3), 0).tolist() == [0.0] * 3


def test_average_takes_no_part_in_autograd_and_leaves_its_arguments() -> None:
    total = torch.tensor([4.0], requires_grad=True)
    average = global_average(total, 2)
    assert average.dtype == torch.float64
    assert average.tolist() == [2.0]
    assert not average.requires_grad
    assert total.tolist() == [4.0]


def test_count_with_several_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be one number, not 2 elements"):
        global_average(1.0, torch.ones(2))


def test_with_a_mocked_process_group() -> None:
    with mock.patch("mlbench_core.distributed.pytorch.process_groups.dist") as dist:
        assert global_average(10, 4).item() == 2.5
        assert dist.all_reduce.call_count == 1
        assert process_groups.world_size() == 1


def test_tensors_go_to_the_gpu_for_nccl_only() -> None:
    tensor = mock.Mock(spec=torch.Tensor)
    with mock.patch("mlbench_core.distributed.pytorch.process_groups.dist") as dist:
        dist.Backend.NCCL = "nccl"
        dist.get_backend.return_value = "nccl"
        assert get_backend_tensor(tensor) is tensor.cuda.return_value
        dist.get_backend.return_value = "gloo"
        assert get_backend_tensor(tensor) is tensor


def limit(rank: int, world_size: int) -> tuple[float, bytes]:
    """The time limit, and what worker 0 has left in the store."""
    if rank == 0:
        process_groups.store().set("left", "here")
    return process_groups.timeout_s(), process_groups.store().get("left")


def test_the_time_limit_is_the_process_groups_and_not_its_stores() -> None:
    """The store is made before the group, with a limit of its own."""
    assert run_ranks(2, limit, timeout_s=77.0) == [(77.0, b"here")] * 2


@pytest.mark.parametrize("ask", [process_groups.store, process_groups.timeout_s])
def test_without_a_process_group_there_is_neither_store_nor_limit(ask: Any) -> None:
    with pytest.raises(RuntimeError, match="this process has no process group"):
        ask()
