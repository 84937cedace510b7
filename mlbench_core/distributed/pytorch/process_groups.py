"""Query the world of workers, and reduce over it, with or without a process group.

This module alone covers the case without a process group: one process is then a world of size 1.
Its rank is 0, and its collectives do nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlbench_core import torch_private

__all__ = [
    "backend",
    "barrier",
    "check_group",
    "get_backend_tensor",
    "global_average",
    "global_rank",
    "is_distributed",
    "machine",
    "rank",
    "smallest",
    "start_comparing",
    "store",
    "sum_over_workers",
    "timeout_s",
    "world_size",
]


def is_distributed() -> bool:
    """Return True if this process belongs to a process group.

    Returns:
        True after ``init_process_group`` (also in a group of one process), False before it and
        after its end.

    Example:
        >>> is_distributed()
        False
    """
    return bool(dist.is_available()) and bool(dist.is_initialized())


def check_group(group: Any) -> Any:
    """Check that this process belongs to a subgroup of workers, and return the subgroup.

    Args:
        group: The group that ``torch.distributed.new_group`` returned; None for all workers.

    Raises:
        ValueError: This process is not one of its workers.
        TypeError: It is not a process group.

    Example:
        >>> check_group(None) is None
        True
    """
    if group is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group must be a group that this process belongs to: call "
            "torch.distributed.new_group on all workers, and give each the group that has its rank"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a group from torch.distributed.new_group, "
            f"or None, not {type(group).__name__}"
        )
    return group


def _members(group: Any) -> Any:
    """Return a group itself: torch's functions take None for that of all workers."""
    if group is not None:
        return group
    return dist.group.WORLD


def world_size(group: Any = None) -> int:
    """Return the number of workers; 1 without a process group.

    Args:
        group: Count the workers of this subgroup alone. It has the same meaning in all functions
            here.

    Example:
        >>> world_size()
        1
    """
    if not is_distributed():
        return 1
    return int(dist.get_world_size(group))


def rank(group: Any = None) -> int:
    """Return this worker's rank in its group, from 0; 0 without a process group.

    Example:
        >>> rank()
        0
    """
    if not is_distributed():
        return 0
    return int(dist.get_rank(group))


def global_rank(rank: int, group: Any = None) -> int:
    """Return the rank among all workers of the worker that has rank ``rank`` in a group.

    Example:
        >>> global_rank(0)
        0
    """
    if group is None:
        return rank
    return int(dist.get_global_rank(group, rank))


def backend(group: Any = None) -> str | None:
    """Return the communication backend, such as ``"gloo"``; None without a process group.

    Example:
        >>> backend() is None
        True
    """
    if not is_distributed():
        return None
    return dist.get_backend(group)


def machine() -> str:
    """Return a name of the running kernel, network namespace and user; empty if unknown.

    Two hosts that are emulated on one machine have their own network namespaces. Messages between
    them must cross the emulated network, so they do not count as one machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except (FileNotFoundError, PermissionError):
        return ""


def start_comparing(text: bytes, group: Any = None) -> Callable[[], bool]:
    """Begin to compare bytes of all workers of a group, in a message of 16 bytes.

    It is a collective operation for the preparation of training. So it calls the group itself and
    not ``torch.distributed.all_reduce``, in which tools record the messages of training steps.

    Returns:
        A function that waits and returns True if the bytes of all workers are the same.

    Example:
        >>> start_comparing(b"model")()
        True
    """
    if world_size(group) == 1:
        return lambda: True
    # Seven bytes, because eight may not fit into a signed int64.
    number = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    # The maximum of the negated numbers is the negated minimum.
    largest = get_backend_tensor(torch.tensor([number, -number]), group)
    members = _members(group)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    work = members.allreduce([largest], options)

    def wait() -> bool:
        work.wait()
        return int(largest.sum()) == 0

    return wait


def store() -> Any:
    """Return the process group's store, through which workers exchange a few bytes by key.

    Raises:
        RuntimeError: This process has no process group, or the group has no store, as with an MPI
            built into torch.
    """
    if not is_distributed():
        raise RuntimeError("this process has no process group")
    # For mpi, torch returns an abstract store, which fails when it is used.
    if backend() == "mpi":
        group_store = getattr(dist.group.WORLD, "notices", None)
    else:
        group_store = torch_private.default_store()
    if group_store is None:
        raise RuntimeError("the process group has no store")
    return group_store


def timeout_s(group: Any = None) -> float:
    """Return the time limit in seconds of a collective operation that other workers do not join.

    Raises:
        RuntimeError: This process has no process group, or the group does not give its limit.
    """
    if is_distributed():
        group = _members(group)
        # Only the groups of this library's backend mpi have this attribute.
        if hasattr(group, "timeout_s"):
            return float(group.timeout_s)
        device = "cpu"
        if backend(group) == dist.Backend.NCCL:
            device = "cuda"
        limit = torch_private.group_timeout_s(group, device)
        if limit is not None:
            return limit
    return float(store().timeout.total_seconds())


def barrier() -> None:
    """Wait until every worker calls this function; return at once without a process group."""
    if is_distributed():
        dist.barrier()


def smallest(count: int) -> int:
    """Return the smallest of all workers' counts; ``count`` itself in a world of one.

    Args:
        count: This worker's count, for example its number of batches. Every worker gives one.

    Returns:
        The minimum over the workers, the same on each.

    Example:
        >>> smallest(7)
        7
    """
    if world_size() == 1:
        return count
    least = get_backend_tensor(torch.tensor(count, dtype=torch.int64))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def get_backend_tensor(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Move a tensor to a device from which the backend can send it.

    Args:
        tensor: Any tensor.
        group: The group whose backend sends it; None for all workers.

    Returns:
        ``tensor`` on the current GPU if the backend is NCCL, which sends nothing else; otherwise
        ``tensor`` itself.

    Example:
        >>> x = torch.ones(2)
        >>> get_backend_tensor(x) is x
        True
    """
    if backend(group) == dist.Backend.NCCL:
        return tensor.cuda()
    return tensor


def global_average(
    sum: float | torch.Tensor, count: float | torch.Tensor, group: Any = None
) -> torch.Tensor:
    r"""Average over all workers, given the sum and the count of each.

    .. math:: \frac{\sum_{k} \text{sum}_k}{\sum_{k} \text{count}_k}

    Both sums run in float64, so that counts stay exact up to :math:`2^{53}` (float32 loses single
    counts from :math:`2^{24}`).

    Args:
        sum: This worker's sum: a number, or a tensor of any shape (then the average is taken
            element by element). Every worker gives the same shape.
        count: Number of values that went into ``sum``: a number or a tensor with one element.
        group: Average over the workers of this subgroup alone.

    Returns:
        The average, float64, in the shape of ``sum`` (no dimensions for a number). If all counts
        are 0 it is 0 instead of nan, so that it can be logged.

    Raises:
        ValueError: ``count`` has more than one element.

    Example:
        >>> global_average(10.0, 4).item()
        2.5
        >>> global_average(0.0, 0).item()
        0.0
    """
    # The dtype is given at once: without it, a float would be rounded to float32 first.
    local_sum = torch.as_tensor(sum, dtype=torch.float64).detach()
    local_count = torch.as_tensor(count, dtype=torch.float64, device=local_sum.device).detach()
    if local_count.numel() != 1:
        raise ValueError(
            f"count must be one number, not {local_count.numel()} "
            f"elements (shape {tuple(local_count.shape)})"
        )
    # Sums and count travel in one message: a small collective costs latency, not bandwidth.
    totals = get_backend_tensor(torch.cat([local_sum.reshape(-1), local_count.reshape(-1)]), group)
    if is_distributed():
        dist.all_reduce(totals, group=group)
    total_sum, total_count = totals[:-1].reshape(local_sum.shape), totals[-1]
    return torch.where(total_count == 0, torch.zeros_like(total_sum), total_sum / total_count)


def sum_over_workers(tensor: Tensor) -> Tensor:
    r"""Sum over all workers so that gradients flow through the sum.

    With :math:`y = \sum_j x_j` on every worker and the loss :math:`L = \sum_i L_i` of all of them
    together,

    .. math:: \frac{\partial L}{\partial x_i} = \sum_j \frac{\partial L_j}{\partial y},

    so the backward pass sums over the workers too. Every worker must call it, and run the backward
    pass.

    Args:
        tensor: This worker's summand, of the same shape and dtype on every worker.

    Returns:
        The sum, the same on every worker; ``tensor`` itself in a world of one.

    Example:
        >>> sum_over_workers(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if world_size() == 1:
        return tensor
    return _SumOverWorkers.apply(tensor)


class _SumOverWorkers(torch.autograd.Function):
    """The autograd function of :func:`sum_over_workers`."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:  # type: ignore[override]
        # all_reduce works in place, and autograd forbids changing an input.
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
