"""What the tests of sums through shared memory run in each worker process."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import resource
import signal
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport.shared_memory import SharedMemorySum
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import BackendError

SIZES = (0, 1, 2, 5, 1000, 200_003)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
MANY = 2000
CLONE_NEWNET = 0x40000000


def values(rank: int, number: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100_000 * rank + number)
    return torch.randn(size, generator=generator).mul(8).to(dtype)


def sums(
    rank: int, world_size: int
) -> dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]]:
    """By size and dtype: the sum, Gloo's, and that of all workers' values in float64."""
    shared, result = SharedMemorySum(), {}
    for number, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in DTYPES):
        message = values(rank, number, size, dtype)
        gloo = message.clone()
        dist.all_reduce(gloo)
        shared.start(message).wait()
        summands = [values(i, number, size, dtype).double() for i in range(world_size)]
        result[size, dtype] = (message, gloo, torch.stack(summands).sum(0))
    return result


def many_on_their_way(rank: int, world_size: int) -> tuple[bool, bool]:
    """Worker 0 starts everything before the others start anything: more signs than a socket
    takes."""
    shared = SharedMemorySum()
    if rank != 0:
        dist.barrier()
    messages = [values(rank, number, 7) for number in range(MANY)]
    exchanges = [shared.start(message) for message in messages]
    were_kept_back = all(peer.unsent for peer in shared._peers)
    if rank == 0:
        dist.barrier()
    for exchange in reversed(exchanges):
        exchange.wait()
    expected = [sum(values(i, number, 7) for i in range(world_size)) for number in range(MANY)]
    are_right = all(
        torch.allclose(m, e, atol=1e-4) for m, e in zip(messages, expected, strict=True)
    )
    dist.barrier()
    return were_kept_back, are_right


def memory_is_used_again(rank: int, world_size: int) -> int:
    """Bytes of memory after a hundred messages of a MiB, three of which are on their way at a
    time."""
    shared = SharedMemorySum()
    shared._timeout_s = 1e9  # more than a system call takes
    for _ in range(100):
        for exchange in [shared.start(torch.ones(1 << 18)) for _ in range(3)]:
            exchange.wait()
    return len(shared._arena._bytes)


def one_is_slow_to_collect(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Worker 0 starts a second message when the others have summed up the first, and not collected
    it."""
    shared = SharedMemorySum()
    first, second = (torch.full((6,), float(factor * (rank + 1))) for factor in (1, 10))
    if rank == 0:
        exchange = shared.start(first)
    dist.barrier()
    if rank != 0:
        exchange = shared.start(first)
    dist.barrier()
    if rank != 0:
        shared.progress()
    dist.barrier()
    if rank == 0:
        exchange.wait()
        last = shared.start(second)
    dist.barrier()
    if rank != 0:
        assert not exchange.is_done
        exchange.wait()
        last = shared.start(second)
    last.wait()
    dist.barrier()
    return first.tolist(), second.tolist()


def copies(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """An average by an aggregation and by its copy, in turns."""
    original = AllReduceAggregation(world_size, shared_memory=True)
    twin = copy.deepcopy(original)
    averages: list[list[float]] = [[], []]
    for step in range(2):
        for aggregation, seen in zip((original, twin), averages, strict=True):
            tensor = torch.tensor([float(rank + step)])
            aggregation.aggregate({"x": tensor}, AVG_WORLD)
            seen.append(tensor.item())
    return averages[0], averages[1]


def weights_and_layers(rank: int, world_size: int) -> list[Tensor]:
    """Weights averaged in one message and layer by layer, beside the average itself."""
    result = []
    for by_layer in (False, True):
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2)
        AllReduceAggregation(world_size, shared_memory=True).agg_model(by_layer)(model, AVG_WORLD)
        result.append(model.weight.detach())
    drawn = []
    for i in range(world_size):
        torch.manual_seed(i)
        drawn.append(torch.nn.Linear(3, 2).weight.detach())
    return [*result, torch.stack(drawn).mean(0)]


def small_sockets(rank: int, world_size: int) -> int:
    """Sockets have room for a few signs only, and after the last message nobody looks at shared
    memory again."""
    shared, late = SharedMemorySum(), 0
    for peer in shared._peers:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2304)
    for number in range(20):
        messages = [values(rank, i, 5) for i in range(40)]
        if (rank + number) % world_size == 0:
            time.sleep(0.01)
        exchanges = [shared.start(message) for message in messages]
        for exchange in exchanges if number % 2 else reversed(exchanges):
            late += not exchange.is_done
            exchange.wait()
        dist.barrier()
        expected = [sum(values(j, i, 5) for j in range(world_size)) for i in range(40)]
        assert all(torch.allclose(m, e, atol=1e-4) for m, e in zip(messages, expected, strict=True))
    return late


def in_another_order(rank: int, world_size: int) -> list[float]:
    """Two sums, whose messages some workers wait for in the one and some in the other order."""
    pair = [SharedMemorySum(), SharedMemorySum()]
    messages = [torch.tensor([float(rank)]), torch.tensor([10.0 * rank])]
    exchanges = [shared.start(message) for shared, message in zip(pair, messages, strict=True)]
    for exchange in exchanges if rank % 2 else reversed(exchanges):
        exchange.wait()
    dist.barrier()
    return [message.item() for message in messages]


def other_dtypes(rank: int, world_size: int) -> str:
    """Workers whose gradients have other types of one size."""
    shared = SharedMemorySum()
    try:
        shared.start(torch.zeros(4, dtype=torch.bfloat16 if rank == 0 else torch.float16)).wait()
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


def too_many_files(rank: int, world_size: int) -> str:
    """The limit of open files is reached on all workers."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(1))
        SharedMemorySum()
    except (BackendError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
        dist.barrier()
    return "no error"


def second_group(rank: int, world_size: int) -> tuple[str, float]:
    """An aggregation without a process group, and in the next one, in which ranks are others."""
    aggregation = AllReduceAggregation(world_size, shared_memory=True)
    path = process_groups.store().underlying_store.path
    dist.barrier()
    dist.destroy_process_group()
    tensor, said = torch.tensor([float(rank)]), ""
    try:
        aggregation.aggregate({"x": tensor}, AVG_WORLD)
    except BackendError as error:
        said = str(error)
    store = dist.FileStore(f"{path}-of-the-second", world_size)
    dist.init_process_group("gloo", store=store, rank=world_size - 1 - rank, world_size=world_size)
    aggregation.aggregate({"x": tensor}, AVG_WORLD)
    return said, tensor.item()


def other_sizes(rank: int, world_size: int) -> str:
    """Workers whose models differ."""
    shared = SharedMemorySum()
    try:
        shared.start(torch.zeros(4 + rank)).wait()
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


def who_does_not_come(rank: int, world_size: int) -> str:
    """The last worker is late, and the others come at about the same time."""
    shared = SharedMemorySum()
    dist.barrier()
    if rank < world_size - 1:
        shared._timeout_s = 1.5
        try:
            shared.start(torch.ones(10)).wait()
        except RuntimeError as error:
            dist.barrier()
            return str(error)
    dist.barrier()
    return "no error"


def who_ends_while_a_child_goes_on(rank: int, world_size: int) -> tuple[str, bool]:
    """The last worker lets go; a process that it has forked, as a DataLoader does, lives on."""
    shared = SharedMemorySum()
    if rank == world_size - 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)  # until the child has run what it runs after a fork
        del shared
        gc.collect()
        dist.barrier()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "", True
    start, message = time.monotonic(), ""
    try:
        shared.start(torch.ones(10)).wait()
    except RuntimeError as error:
        message = str(error)
    is_soon = time.monotonic() - start < 30
    dist.barrier()
    return message, is_soon


def files_stay_open(rank: int, world_size: int) -> int:
    """How many more files are open after a sum was made, used and dropped."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedMemorySum()
    shared.start(torch.ones(10)).wait()
    assert not any(
        os.get_inheritable(arena.descriptor)
        for arena in (shared._arena, *(p.arena for p in shared._peers))
    )
    dist.barrier()
    del shared
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - before


def other_machine(rank: int, world_size: int) -> str:
    """The last worker runs elsewhere."""
    original = process_groups.machine
    if rank == world_size - 1:
        process_groups.machine = lambda: "elsewhere"
    try:
        SharedMemorySum()
    except BackendError as error:
        return str(error)
    finally:
        process_groups.machine = original
    return "no error"


def other_network(rank: int, world_size: int) -> str:
    """Worker 1 has moved into a network namespace of its own, as an emulated host has, and stays
    there."""
    if rank == 1 and ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        raise PermissionError("only root may")
    try:
        SharedMemorySum()
    except BackendError as error:
        return str(error)
    return "no error"


SCENARIOS = (
    sums,
    many_on_their_way,
    memory_is_used_again,
    one_is_slow_to_collect,
    copies,
    weights_and_layers,
    small_sockets,
    in_another_order,
    other_sizes,
    other_dtypes,
    too_many_files,
    who_does_not_come,
    who_ends_while_a_child_goes_on,
    files_stay_open,
    other_machine,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS
    }
    result["second_group"] = second_group(rank, world_size)
    if os.geteuid() == 0:
        result["other_network"] = other_network(rank, world_size)
    return result
