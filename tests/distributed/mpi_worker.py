"""What each worker does in test_mpi.py, started by mpirun: every scenario once, and what went wrong
into a file."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # before an optimizer is made
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mlbench_core.distributed.pytorch import lost_workers, mpi
from mlbench_core.distributed.pytorch.lost_workers import introduce, naming_lost_workers
from mlbench_core.errors import ConfigurationError
from mlbench_core.optim.pytorch import CentralizedSGD
from mlbench_core.utils.pytorch import initialize_backends

SCENARIOS: dict[str, Callable[[], None]] = {}
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)
Op = dist.ReduceOp
gather_single = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the newer name, where there is one
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def values(worker: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """Small whole numbers that differ from worker to worker; products of four of them fit into
    every dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    numbers = torch.arange(count) % 3 + 1 + (torch.arange(count) + worker) % 2
    if dtype == torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    return numbers.to(torch.float32).to(dtype).reshape(shape)


def reduced(op: Any, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """What a reduction over all workers must give, computed one worker after the other in wide
    numbers."""
    wide = (
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.int64
    )
    parts = [values(worker, dtype, shape).to(wide) for worker in range(size())]
    folds: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }
    total = functools.reduce(folds[op], parts)
    return (total / size() if op == Op.AVG else total).to(dtype)


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    same = actual.contiguous().view(torch.uint8) if actual.dtype == torch.float8_e4m3fn else actual
    wanted = (
        expected.contiguous().view(torch.uint8)
        if expected.dtype == torch.float8_e4m3fn
        else expected
    )
    assert torch.equal(same, wanted), (
        f"{actual.dtype}: {actual.tolist()} is not {expected.tolist()}"
    )


def refused(kind: type[Exception], words: str, function: Callable[[], object]) -> None:
    try:
        function()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")


@scenario
def all_reduce_of_every_dtype() -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        ops = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
        ops += [Op.AVG] if dtype.is_floating_point else [Op.BAND, Op.BOR, Op.BXOR]
        for op in ops:
            tensor = values(rank(), dtype)
            dist.all_reduce(tensor, op=op)
            equal(tensor, reduced(op, dtype))
    for dtype in (torch.complex64, torch.complex128):
        tensor = values(rank(), dtype) * 1j
        dist.all_reduce(tensor)
        equal(tensor, reduced(Op.SUM, dtype) * 1j)


@scenario
def all_reduce_of_every_layout() -> None:
    whole = torch.zeros(6, 8)
    whole[:5:2, 1::2] = values(rank(), torch.float32, (3, 4))
    dist.all_reduce(whole[:5:2, 1::2])
    equal(whole[:5:2, 1::2], reduced(Op.SUM, torch.float32, (3, 4)))
    assert not whole[1].any() and not whole[:, 0].any()
    images = values(rank(), torch.float32, (2, 3, 2, 2)).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    equal(images.contiguous(), reduced(Op.SUM, torch.float32, (2, 3, 2, 2)))
    number = values(rank(), torch.float64, ())
    dist.all_reduce(number)
    equal(number, reduced(Op.SUM, torch.float64, ()))
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    assert empty.shape == (0, 3)
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf.data)
    equal(leaf.detach(), torch.full((3,), float(size())))
    refused(Exception, "dense", lambda: dist.group.WORLD.broadcast([torch.eye(2).to_sparse()]))  # type: ignore[union-attr]


@scenario
def half_precision_is_rounded_once_a_step() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(3)
        parts = [torch.randn(50_001).to(dtype) for _ in range(size())]
        mine = parts[rank()].clone()
        dist.all_reduce(mine)
        exact = torch.stack(parts).double().sum(0)
        bound = torch.stack(parts).double().abs().sum(0) * torch.finfo(dtype).eps * (size() - 1)
        assert bool(((mine.double() - exact).abs() <= bound).all())
        everyones = [torch.empty_like(mine) for _ in range(size())]
        dist.all_gather(everyones, mine)
        assert all(torch.equal(other, mine) for other in everyones), "workers got different sums"


@scenario
def operators_that_are_not_defined() -> None:
    def reduce_by(op: Any, dtype: torch.dtype) -> Callable[[], object]:
        return lambda: dist.all_reduce(torch.ones(2).to(dtype), op=op)

    refused(
        ValueError,
        "PREMUL_SUM is not defined",
        reduce_by(dist._make_nccl_premul_sum(2.0), torch.float32),
    )
    refused(
        ValueError,
        "BAND is not defined over MPI for tensors of torch.float32",
        reduce_by(Op.BAND, torch.float32),
    )
    refused(
        ValueError,
        "AVG is not defined over MPI for tensors of torch.int64",
        reduce_by(Op.AVG, torch.int64),
    )
    group: Any = dist.group.WORLD
    refused(
        TypeError, "float8_e4m3fn", lambda: group.allreduce([torch.ones(2).to(torch.float8_e4m3fn)])
    )
    refused(
        ValueError,
        "send needs a rank of the group, from 0 to",
        lambda: group.send([torch.ones(2)], size(), 0),
    )
    refused(ValueError, "tag must be from 0 to", lambda: group.send([torch.ones(2)], 0, -1))


@scenario
def broadcast_and_gathers() -> None:
    for dtype in (*INTEGERS, *FLOATS, *OTHERS):
        for root in {0, size() - 1}:
            tensor = values(rank(), dtype)
            dist.broadcast(tensor, root)
            equal(tensor, values(root, dtype))
        mine = values(rank(), dtype)
        outputs = [torch.empty_like(mine) for _ in range(size())]
        dist.all_gather(outputs, mine)
        whole = torch.empty(5 * size(), 3, dtype=dtype)
        gather_single(whole, mine)
        for worker in range(size()):
            equal(outputs[worker], values(worker, dtype))
            equal(whole[5 * worker : 5 * worker + 5], values(worker, dtype))
        if dtype not in OTHERS:
            root = size() - 1
            gathered = (
                [torch.empty_like(mine).t().contiguous().t() for _ in range(size())]
                if rank() == root
                else None
            )
            dist.gather(mine, gathered, dst=root)
            for worker, tensor in enumerate(gathered or []):
                equal(tensor, values(worker, dtype))
            out = torch.empty_like(mine)
            dist.scatter(
                out,
                [values(9 + worker, dtype) for worker in range(size())] if rank() == 0 else None,
                src=0,
            )
            equal(out, values(9 + rank(), dtype))
    refused(
        ValueError,
        "one size and dtype",
        lambda: dist.all_gather([torch.empty(2)] * size(), torch.ones(3)),
    )


@scenario
def reduces_and_reduce_scatters() -> None:
    for dtype in (*INTEGERS, *FLOATS, torch.bool):
        for op in (Op.SUM, Op.MAX, Op.AVG) if dtype.is_floating_point else (Op.SUM, Op.MAX):
            root = size() - 1
            tensor = values(rank(), dtype)
            dist.reduce(tensor, root, op=op)
            equal(tensor, reduced(op, dtype) if rank() == root else values(rank(), dtype))
            shape = (2 * size(), 3)
            total, mine = reduced(op, dtype, shape), slice(2 * rank(), 2 * rank() + 2)
            out = torch.empty(2, 3, dtype=dtype)
            scatter_single(out, values(rank(), dtype, shape), op=op)
            equal(out, total[mine])
            out = torch.empty(2, 3, dtype=dtype)
            dist.reduce_scatter(out, list(values(rank(), dtype, shape).split(2)), op=op)
            equal(out, total[mine])
    refused(ValueError, "times the elements", lambda: scatter_single(torch.empty(2), torch.ones(3)))


@scenario
def all_to_alls() -> None:
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
        inputs = [values(3 * rank() + worker, dtype, (worker + 1, 2)) for worker in range(size())]
        outputs = [torch.empty(rank() + 1, 2, dtype=dtype) for _ in range(size())]
        dist.all_to_all(outputs, inputs)
        for worker, output in enumerate(outputs):
            equal(output, values(3 * worker + rank(), dtype, (rank() + 1, 2)))
        output = torch.empty(size() * (rank() + 1), 2, dtype=dtype)
        splits = [worker + 1 for worker in range(size())]
        dist.all_to_all_single(output, torch.cat(inputs), [rank() + 1] * size(), splits)
        equal(
            output,
            torch.cat(
                [values(3 * worker + rank(), dtype, (rank() + 1, 2)) for worker in range(size())]
            ),
        )
    even = torch.empty(2 * size())
    dist.all_to_all_single(even, torch.arange(2.0 * size()) + 100 * rank())
    equal(
        even, torch.cat([torch.arange(2.0) + 2 * rank() + 100 * worker for worker in range(size())])
    )
    refused(
        ValueError,
        "whose sum is",
        lambda: dist.all_to_all_single(even, even.clone(), [1] * size(), [2] * size()),
    )


@scenario
def messages() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool):
        received = torch.empty(5, 3, dtype=dtype)
        sending = dist.isend(values(rank(), dtype), right)
        dist.recv(received, left)
        assert sending is not None and sending.wait() and sending.is_completed()
        equal(received, values(left, dtype))
    # both directions at once, the later message taken first, into a tensor that is not contiguous
    first, second = torch.empty(4), torch.empty(4, 2)[:, 0]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, second, left, tag=2),
            dist.P2POp(dist.irecv, first, left, tag=1),
            dist.P2POp(dist.isend, torch.full((4,), 1.0 + rank()), right, tag=1),
            dist.P2POp(dist.isend, torch.full((4,), 10.0 + rank()), right, tag=2),
        ]
    )
    for work in works:
        work.wait()
    equal(first, torch.full((4,), 1.0 + left))
    equal(second, torch.full((4,), 10.0 + left))
    if rank() == 0:
        froms = set()
        for _ in range(size() - 1):
            tensor = torch.empty(1)
            source = dist.recv(tensor)
            assert int(tensor) == source
            froms.add(source)
        assert froms == set(range(1, size()))
    else:
        dist.send(torch.tensor([float(rank())]), 0)


@scenario
def a_message_beside_a_collective_that_others_are_late_for() -> None:
    total, token = torch.ones(200_000), torch.tensor([7.0])
    if rank() == 0:
        work = dist.all_reduce(total, async_op=True)
        dist.send(token, 1)
        work.wait()
    else:
        if rank() == 1:
            dist.recv(token.zero_(), 0)
        dist.all_reduce(total)
    assert float(token) == 7 and bool((total == size()).all())


@scenario
def works_and_futures() -> None:
    tensor = torch.full((1000,), 1.0 + rank())
    expected = torch.full((1000,), size() * (size() + 1) / 2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    equal(doubled.wait(), 2 * expected)
    assert work.is_completed() and work.is_success() and work.exception() is None
    equal(work.result()[0], expected)
    equal(work.get_future().wait()[0], expected)
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(50)]
    while not works[-1].is_completed():
        time.sleep(0.001)
    assert all(work.wait() for work in reversed(works))
    late = torch.zeros(1)
    if rank() == 0:
        work = dist.irecv(late, 1)
        refused(
            dist.DistBackendError,
            "not done within 0.05 s",
            lambda: work.wait(datetime.timedelta(seconds=0.05)),
        )
    dist.barrier()
    if rank() == 1:
        dist.send(torch.ones(1), 0)
    if rank() == 0:
        assert work.wait() and late.item() == 1


@scenario
def operations_from_several_threads() -> None:
    groups = [dist.new_group(list(range(size()))) for _ in range(2)]
    totals = [torch.zeros(1), torch.zeros(1)]
    errors: list[BaseException] = []

    def count(index: int) -> None:
        try:
            for _ in range(100):
                step = torch.ones(1)
                work = dist.all_reduce(step, group=groups[index], async_op=True)
                if work is not None:
                    work.wait()
                totals[index] += step
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=count, args=(index,)) for index in range(1)]
    for thread in threads:
        thread.start()
    for _ in range(20):  # meanwhile, messages of this thread
        sending = dist.isend(torch.ones(2), (rank() + 1) % size())
        dist.recv(torch.empty(2), (rank() - 1) % size())
        assert sending is not None
        sending.wait()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert totals[0].item() == 100 * size()
    for group in groups:
        dist.destroy_process_group(group)


@scenario
def coalesced() -> None:
    tensors = [values(rank(), torch.float32), values(rank(), torch.float32, (4,))]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    equal(tensors[0], reduced(Op.SUM, torch.float32))
    equal(tensors[1], reduced(Op.SUM, torch.float32, (4,)))
    wholes = [torch.empty(2 * size()), torch.empty(3 * size())]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for length, whole in zip((2, 3), wholes, strict=True):
            gather_single(whole, torch.full((length,), float(rank())))
    equal(wholes[1], torch.arange(float(size())).repeat_interleave(3))
    outs = [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for length, out in zip((1, 2), outs, strict=True):
            scatter_single(out, torch.arange(float(length * size())))
    equal(outs[1], size() * torch.arange(2.0 * size())[2 * rank() : 2 * rank() + 2])
    device, sum_, given = torch.device("cpu"), torch.ones(2), torch.zeros(2)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:  # type: ignore[attr-defined]
        dist.isend(torch.full((2,), 1.0 + rank()), (rank() + 1) % size())
        dist.irecv(given, (rank() - 1) % size())
        dist.broadcast(sum_, 0)
    manager.wait()
    equal(given, torch.full((2,), 1.0 + (rank() - 1) % size()))


@scenario
def subgroups() -> None:
    odd = [worker for worker in range(size()) if worker % 2]
    group = dist.new_group(odd)
    if rank() in odd:
        tensor = torch.tensor([float(rank())])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(odd)
        assert dist.get_backend(group) == "mpi" and dist.get_world_size(group) == len(odd)
        given = torch.tensor([float(rank())])
        dist.broadcast(given, odd[-1], group=group)
        assert given.item() == odd[-1]
        dist.destroy_process_group(group)
    mine, _ = dist.new_subgroups(max(size() // 2, 1))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == max(size() // 2, 1)
    backward = dist.new_group(list(reversed(range(size()))))
    dist.barrier(backward)
    assert dist.get_group_rank(backward, rank()) == backward.rank()


@scenario
def objects() -> None:
    everyones: list[Any] = [None] * size()
    dist.all_gather_object(everyones, {"rank": rank(), "text": "x" * 100 * rank()})
    assert [one["rank"] for one in everyones] == list(range(size()))
    given: list[Any] = [["a", rank()], None] if rank() == 0 else [None, 1]
    dist.broadcast_object_list(given, 0)
    assert given == [["a", 0], None]
    gathered: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() ** 2, gathered, 0)
    assert gathered is None or gathered == [worker**2 for worker in range(size())]


@scenario
def long_messages_go_in_chunks() -> None:
    names = ("blocking.MAX_ELEMENTS", "group.MAX_ELEMENTS")
    with mock.patch(f"mlbench_core.distributed.pytorch.mpi.{names[0]}", 4):
        all_reduce_of_every_layout()
        broadcast_and_gathers()
        reduces_and_reduce_scatters()
        all_to_alls()
        right, left = (rank() + 1) % size(), (rank() - 1) % size()
        received = torch.empty(11)
        sending = dist.isend(torch.arange(11.0) + rank(), right)
        dist.recv(received, left)
        assert sending is not None
        sending.wait()
        equal(received, torch.arange(11.0) + left)
    with mock.patch(f"mlbench_core.distributed.pytorch.mpi.{names[1]}", 4):
        refused(ValueError, "its source has to be named", lambda: dist.recv(torch.empty(5)))


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(8, 6), torch.randn(8, 1)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[rank() :: size()]


@scenario
def ddp_equals_one_process() -> None:
    alone, replica = (
        model().eval(),
        model().eval(),
    )  # without batch statistics, which differ by worker
    ddp = DistributedDataParallel(replica, bucket_cap_mb=1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, ddp)]
    inputs, targets = batch()
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs), targets).backward()
        torch.nn.functional.mse_loss(ddp(share(inputs)), share(targets)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(alone.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@scenario
def centralized_sgd_equals_the_joined_batch() -> None:
    alone, replica = model().eval(), model().eval()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    centralized = CentralizedSGD(
        world_size=size(), model=replica, lr=0.1, momentum=0.9, weight_decay=1e-3
    )
    inputs, targets = batch()
    for _ in range(5):
        plain.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs), targets).backward()
        plain.step()
        centralized.zero_grad()
        torch.nn.functional.mse_loss(replica(share(inputs)), share(targets)).backward()
        centralized.step()
    for one, other in zip(alone.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index**2


@scenario
def loaders_with_worker_processes() -> None:
    work = dist.all_reduce(torch.ones(100), async_op=True)
    loader = torch.utils.data.DataLoader(
        Squares(), 4, num_workers=1, multiprocessing_context="fork"
    )
    assert torch.cat(list(loader)).tolist() == [index**2 for index in range(8)]
    assert work is not None and work.wait()
    dist.barrier()


@scenario
def lost_workers_know_their_way() -> None:
    introduce()
    with naming_lost_workers():
        dist.barrier()
    error = str(
        lost_workers.explained(RuntimeError("connection closed"))
    )  # all say that they have noticed
    assert error == (
        "communication failed, although all workers answer: was "
        "the network interrupted?; the backend says: "
    ) + ("connection closed")
    assert len(lost_workers._known.records) == size()
    dist.barrier()


@scenario
def groups_are_not_pickled_and_calls_are_repeatable() -> None:
    refused(TypeError, "pickle", lambda: pickle.dumps(dist.group.WORLD))
    assert mpi.register() and mpi.is_registered() and mpi.is_available() and dist.is_mpi_available()
    assert dist.get_backend() == "mpi" and dist.group.WORLD is not None


def in_and_out_of_worlds(folder: Path) -> None:
    """Everything that makes its own process group."""
    before, threads = dict(os.environ), threading.active_count()
    hosts = ",".join(["127.0.0.1"] * int(os.environ["OMPI_COMM_WORLD_SIZE"]))
    mine = int(os.environ["OMPI_COMM_WORLD_RANK"])
    for given in ({}, {"hosts": hosts, "rank": mine}, {"hosts": hosts}):
        with initialize_backends(
            "mpi", logging_level="WARNING", ckpt_run_dir=folder, timeout_s=50, **given
        ) as world:
            assert (world[0], world[1]) == (rank(), size()) == (mine, int(os.environ["WORLD_SIZE"]))
            assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
            assert os.environ["MASTER_ADDR"] == "127.0.0.1"
            assert dist.group.WORLD.timeout_s == 50  # type: ignore[union-attr]
            work = dist.all_reduce(torch.ones(300_000), async_op=True)  # still under way at the end
        assert work is not None and work.is_success()
        assert not dist.is_initialized() and threading.active_count() == threads
    assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {}

    def enter(hosts: str, rank: int) -> Callable[[], object]:
        return lambda: initialize_backends(
            "mpi", hosts, rank, "WARNING", ckpt_run_dir=folder
        ).__enter__()

    count = len(hosts.split(","))
    refused(
        ConfigurationError,
        f"says {count + 1} workers, but MPI's world has {count}",
        enter(hosts + ",a", mine),
    )
    refused(ConfigurationError, f"says {count + 1} workers", enter(hosts + ",a", -1))
    refused(
        ConfigurationError, f"but for MPI it is worker {mine}", enter(hosts, (mine + 1) % count)
    )
    with mock.patch.dict(
        os.environ, RANK="0", WORLD_SIZE="7", MASTER_ADDR="localhost", TORCHELASTIC_RUN_ID="x"
    ):
        refused(ConfigurationError, "mpirun -n 7", enter(hosts, mine))
    try:  # an exception on all workers, which they survive
        with initialize_backends("mpi", logging_level="WARNING", ckpt_run_dir=folder):
            dist.barrier()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert mpi.world().failed == "ZeroDivisionError: "


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(250, exit=True)
    folder = Path(sys.argv[1])
    path = folder / f"{os.environ['OMPI_COMM_WORLD_RANK']}.json"
    report: dict[str, str | None] = {}

    def attempt(name: str, function: Callable[[], None]) -> None:
        report[name] = "did not end"
        path.write_text(json.dumps(report))
        try:
            function()
            report[name] = None
        except BaseException:
            report[name] = traceback.format_exc()
            raise
        finally:
            path.write_text(json.dumps(report))

    attempt("in_and_out_of_worlds", lambda: in_and_out_of_worlds(folder))
    mpi.register(timeout_s=30)
    dist.init_process_group("mpi")
    assert mpi.world().failed == ""
    for name, function in SCENARIOS.items():
        attempt(name, function)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
