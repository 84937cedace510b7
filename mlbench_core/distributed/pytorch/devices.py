"""Give a worker its place among all workers, and its device."""

from __future__ import annotations

import os

import torch

from mlbench_core.arguments import check_at_least
from mlbench_core.errors import ConfigurationError

__all__ = ["FCGraph"]


class FCGraph:
    """The graph in which every worker communicates with every other, with rank and device.

    Args:
        rank: This worker's number, 0 to ``world_size - 1``.
        world_size: Number of workers.
        use_cuda: True to compute on a GPU. Workers of one machine take its GPUs in turn by their
            local rank (``LOCAL_RANK``, else the rank).

    Raises:
        ValueError: ``world_size`` is not positive, or ``rank`` lies outside.
        ConfigurationError: ``use_cuda`` is set, but this machine has no GPU.

    Example:
        >>> graph = FCGraph(rank=1, world_size=3)
        >>> graph.current_device_name, graph.neighbours
        ('cpu', (0, 2))
    """

    def __init__(self, rank: int, world_size: int, use_cuda: bool = False) -> None:
        check_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be from 0 to {world_size - 1} with world_size {world_size}, not {rank}"
            )
        self.rank = rank
        self.world_size = world_size
        self.use_cuda = use_cuda
        if use_cuda:
            # Fails here, at the start of a run, on a machine without a GPU.
            _gpu_index(rank)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Return the other workers' ranks, ascending."""
        return tuple(other for other in range(self.world_size) if other != self.rank)

    @property
    def current_device_name(self) -> str:
        """Return the device this worker computes on: ``"cpu"`` or ``"cuda:<index>"``."""
        if not self.use_cuda:
            return "cpu"
        return f"cuda:{_gpu_index(self.rank)}"

    @property
    def current_device(self) -> torch.device:
        """Return the device this worker computes on."""
        return torch.device(self.current_device_name)

    def assigned_gpu_id(self) -> int | None:
        """Make this worker's GPU the current CUDA device.

        Returns:
            Its index; None without ``use_cuda``, and then nothing is changed.
        """
        if not self.use_cuda:
            return None
        index = _gpu_index(self.rank)
        torch.cuda.set_device(index)
        return index

    def __str__(self) -> str:
        return (
            f"FCGraph(rank={self.rank}, world_size={self.world_size}, "
            f"device={self.current_device_name})"
        )

    __repr__ = __str__


def _gpu_index(rank: int) -> int:
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigurationError(
            "use_cuda=True, but torch sees no GPU on this machine: leave out use_cuda "
            "(and --gpu) to compute on the CPU, or install a torch build with CUDA and "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    # The global rank may exceed the number of GPUs, and several workers may
    # share a GPU: hence the remainder.
    return int(os.environ.get("LOCAL_RANK") or rank) % count
