"""Implement torch's process group over MPI."""

# torch's stubs have each method twice, for its two callers; only one of them calls a group written
# in Python.
# mypy: disable-error-code="override, assignment, attr-defined, call-arg"

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from mlbench_core.distributed.pytorch import private_store
from mlbench_core.distributed.pytorch.mpi.blocking import MAX_ELEMENTS, Transfers, chunks
from mlbench_core.distributed.pytorch.mpi.buffers import Buffer, flat
from mlbench_core.distributed.pytorch.mpi.queue import Test, Work
from mlbench_core.distributed.pytorch.mpi.world import World

__all__ = ["MPIProcessGroup"]

Job: TypeAlias = tuple[Callable[[], None], Sequence[Buffer]]
"""A part of a collective: a call that blocks in MPI, and the buffers that it has filled."""


class MPIProcessGroup(dist.ProcessGroup):
    """A process group whose operations are done by MPI.

    ``torch.distributed.init_process_group("mpi")`` and ``new_group`` create it after
    :func:`~mlbench_core.distributed.pytorch.mpi.register`. The methods are those that the functions
    of ``torch.distributed`` call.

    Args:
        world: MPI's world.
        comm: The communicator, which this group frees at its end.
        timeout_s: Seconds after which an operation fails that other workers do not join.
        store: A store in which the workers of the whole world leave each other notices; None for
            other groups.

    Attributes:
        notices: The store, until the group is shut down.
    """

    def __init__(
        self, world: World, comm: Any, timeout_s: float, store: dist.Store | None = None
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.timeout_s = timeout_s
        self.notices = store
        self._world = world
        self._comm = comm
        self._transfers = Transfers(world, comm)
        self._name = self._description = ""
        self._collected: list[Work] | None = None
        world.works.add_group()
        self._place = f"rank {comm.Get_rank()} of {comm.Get_size()}"

    # torch calls these methods by these names

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "mpi"

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        """Return the object that does the operations of a device: this one, for all."""
        return self

    def setGroupName(self, name: str) -> None:
        """Set the name that torch gives this group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name that torch gave this group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._description

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time limit of the operations that follow."""
        self.timeout_s = timeout.total_seconds()

    # Reductions

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options(opts, dist.AllreduceOptions)
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options(opts, dist.AllreduceCoalescedOptions)
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        jobs: list[Job] = []
        for tensor in tensors:
            reduction = self._world.datatypes.reduction(opts.reduceOp, tensor.dtype)
            buffer = Buffer(tensor, on_host=reduction.on_host)
            jobs.append((partial(self._transfers.all_reduce, buffer.memory, reduction), [buffer]))
        return self._collective(name, jobs, tensors, opts)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options(opts, dist.ReduceOptions)
        tensor = _only(tensors, "reduce")
        root = self._peer(opts.rootRank, "reduce")
        reduction = self._world.datatypes.reduction(opts.reduceOp, tensor.dtype)
        buffer = Buffer(tensor, on_host=reduction.on_host)
        reduce = partial(self._transfers.reduce, buffer.memory, root, reduction)
        # Only the root receives a result; the tensors of the others must keep their values.
        filled = []
        if root == self.rank():
            filled.append(buffer)
        return self._collective("reduce", [(reduce, filled)], tensors, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> Work:
        output, parts = _only(outputs, "reduce_scatter"), _only(inputs, "reduce_scatter")
        self._check_parts("reduce_scatter", parts, output)
        return self._reduce_scatter("reduce_scatter", [output], [flat(parts)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._reduce_scatter("reduce_scatter_single", [output], [source], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        jobs: list[Job] = []
        for output, source in zip(outputs, inputs, strict=True):
            self._check_whole(name, "input", source, "output", output)
            reduction = self._world.datatypes.reduction(opts.reduceOp, output.dtype)
            target = Buffer(output, fill=False, on_host=reduction.on_host)
            memory = Buffer(source, on_host=reduction.on_host).memory
            call = partial(self._transfers.reduce_scatter, target.memory, memory, reduction)
            jobs.append((call, [target]))
        return self._collective(name, jobs, outputs, opts)

    # Moving data

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options(opts, dist.BroadcastOptions)
        root = self._peer(opts.rootRank, "broadcast")
        is_root = root == self.rank()
        jobs: list[Job] = []
        for tensor in tensors:
            # The others' values are overwritten, so they need not be copied to the memory of MPI.
            buffer = Buffer(tensor, fill=is_root)
            call = partial(self._transfers.broadcast, buffer.memory, root)
            if is_root:
                jobs.append((call, []))
            else:
                jobs.append((call, [buffer]))
        return self._collective("broadcast", jobs, tensors, opts)

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        return self._all_gather_lists("all_gather", outputs, inputs, opts)

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        by_input = list(map(list, zip(*outputs, strict=True)))
        return self._all_gather_lists("all_gather_coalesced", by_input, inputs, opts)

    def _all_gather_lists(
        self,
        name: str,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> Work:
        for parts, source in zip(outputs, inputs, strict=True):
            self._check_parts(name, parts, source)
        # MPI gathers into one piece of memory, and the list's tensors lie
        # apart: so gather, then copy.
        wholes: list[torch.Tensor] = []
        spread: list[Job] = []
        tensors: list[torch.Tensor] = []
        for parts, source in zip(outputs, inputs, strict=True):
            whole = source.new_empty(self.size() * source.numel())
            wholes.append(whole)
            spread.append((partial(_spread, whole, parts), ()))
            tensors += parts
        return self._all_gather(name, wholes, inputs, opts, tensors, spread)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._all_gather("all_gather_single", [output], [source], opts, [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._all_gather("all_gather_into_tensor_coalesced", outputs, inputs, opts, outputs)

    _allgather_base = all_gather_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
        result: Sequence[torch.Tensor],
        then: Sequence[Job] = (),
    ) -> Work:
        jobs: list[Job] = []
        for output, source in zip(outputs, inputs, strict=True):
            self._check_whole(name, "output", output, "input", source)
            target, memory = Buffer(output, fill=False), Buffer(source).memory
            call = partial(self._transfers.all_gather, target.memory, memory)
            jobs.append((call, [target]))
        opts = _options(opts, dist.distributed_c10d.AllgatherOptions)
        return self._collective(name, [*jobs, *then], result, opts)

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Work:
        opts = _options(opts, dist.GatherOptions)
        source, root = _only(inputs, "gather"), self._peer(opts.rootRank, "gather")
        buffer, whole = Buffer(source), None
        parts: list[torch.Tensor] = []
        then: list[Job] = []
        if root == self.rank():
            parts += _only(outputs, "gather")
            self._check_parts("gather", parts, source)
            whole = buffer.memory.new_empty(self.size() * source.numel())
            then.append((partial(_spread, whole, parts), ()))
        gather = partial(self._transfers.gather, whole, buffer.memory, root)
        return self._collective("gather", [(gather, ()), *then], parts, opts)

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> Work:
        opts = _options(opts, dist.ScatterOptions)
        output, root = _only(outputs, "scatter"), self._peer(opts.rootRank, "scatter")
        buffer, whole = Buffer(output, fill=False), None
        if root == self.rank():
            parts = _only(inputs, "scatter")
            self._check_parts("scatter", parts, output)
            whole = Buffer(flat(parts)).memory
        scatter = partial(self._transfers.scatter, buffer.memory, whole, root)
        return self._collective("scatter", [(scatter, [buffer])], outputs, opts)

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for name, parts in (("output", outputs), ("input", inputs)):
            if len(parts) != self.size():
                raise ValueError(
                    f"all_to_all has {len(parts)} {name} tensors "
                    f"for a group of {self.size()} workers"
                )
        received = [Buffer(part, fill=False) for part in outputs]
        incoming = [buffer.memory for buffer in received]
        outgoing = [Buffer(part).memory for part in inputs]
        return self._all_to_all(incoming, outgoing, received, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        received, sent = Buffer(output, fill=False), Buffer(source)
        incoming = self._rows("output", received.memory, output_split_sizes)
        outgoing = self._rows("input", sent.memory, input_split_sizes)
        return self._all_to_all(incoming, outgoing, [received], [output], opts)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        incoming: Sequence[torch.Tensor],
        outgoing: Sequence[torch.Tensor],
        received: Sequence[Buffer],
        result: Sequence[torch.Tensor],
        opts: Any,
    ) -> Work:
        opts = _options(opts, dist.AllToAllOptions)
        exchange = partial(self._transfers.all_to_all, incoming, outgoing)
        return self._collective("all_to_all", [(exchange, received)], result, opts)

    def _rows(self, name: str, memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Split a tensor into each worker's rows (entries of the first dimension)."""
        size = self.size()
        # A tensor without dimensions counts as one row.
        rows = 1
        if memory.dim() > 0:
            rows = memory.shape[0]
        if not sizes:
            if rows % size:
                raise ValueError(
                    f"all_to_all_single's {name} has {rows} rows: "
                    f"{size} workers cannot share them evenly"
                )
            sizes = [rows // size] * size
        if len(sizes) != size or sum(sizes) != rows:
            raise ValueError(
                f"all_to_all_single's {name}_split_sizes are {list(sizes)}; they must be {size} "
                f"numbers, one for each worker, whose sum is the {name}'s {rows} rows"
            )
        if memory.dim():
            return list(memory.split(list(sizes)))
        return [memory]

    # Messages

    def send(self, tensors: Sequence[torch.Tensor], dst_rank: int, tag: int = 0) -> Work:
        buffer = Buffer(_only(tensors, "send"))
        peer, tag = self._peer(dst_rank, "send"), self._tag(tag)

        def post() -> list[Test]:
            messages = map(self._transfers.message, chunks(buffer.memory))
            return [self._comm.Isend(message, peer, tag).Test for message in messages]

        return self._submit(self._work(f"send to {peer}", post, None, tensors), background=True)

    def recv(self, tensors: Sequence[torch.Tensor], src_rank: int, tag: int = 0) -> Work:
        return self._receive(tensors, self._peer(src_rank, "recv"), tag, f"recv from {src_rank}")

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work:
        elements = _only(tensors, "recv").numel()
        # With any source, each of the messages could come from another worker.
        if elements > MAX_ELEMENTS:
            raise ValueError(
                f"a tensor of {elements} elements comes in several messages, so its source has to "
                f"be named: pass src, or send at most {MAX_ELEMENTS} elements"
            )
        return self._receive(tensors, self._world.mpi.ANY_SOURCE, tag, "recv from any")

    def _receive(self, tensors: Sequence[torch.Tensor], source: int, tag: int, name: str) -> Work:
        buffer, tag = Buffer(_only(tensors, "recv"), fill=False), self._tag(tag)
        status = self._world.mpi.Status()

        def post() -> list[Test]:
            messages = map(self._transfers.message, chunks(buffer.memory))
            requests = [self._comm.Irecv(message, source, tag) for message in messages]
            # Only the first chunk's status is kept: all chunks come from the same worker.
            return [partial(requests[0].Test, status), *(request.Test for request in requests[1:])]

        def finish() -> None:
            buffer.write_back()
            work.source = status.Get_source()

        # Made before it is submitted: a message that has already arrived is
        # finished while it is submitted.
        work = self._work(name, post, finish, tensors)
        return self._submit(work, background=True)

    # Barrier, blocks of operations, and the end

    def barrier(self, opts: Any = None) -> Work:
        # No job: the non-blocking barrier with which every collective begins is all that it needs.
        return self._collective("barrier", [], [], _options(opts, dist.BarrierOptions))

    # torch calls these two around a block of operations, for which one handle is returned.
    def _start_coalescing(self, device: torch.device) -> None:
        self._collected = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._collected = self._collected or [], None

        # One work represents all: it is due when they are done, and passes on the first error.
        def finish() -> None:
            for work in works:
                work.wait()

        def post() -> list[Test]:
            # Not is_completed(), which makes MPI progress: these tests are called while it does.
            return [partial(getattr, work, "done") for work in works]

        tensors = list(chain.from_iterable(work.result() for work in works))
        together = self._work("coalesced operations", post, finish, tensors)
        return self._submit(together, background=True)

    def shutdown(self) -> None:
        """Finish the operations under way and free the communicator."""
        if self._comm is None:
            return
        self._world.works.remove_group(self, drain=not self._world.failed)
        # Free() is a collective: a worker that failed, or whose MPI is stuck, must not wait in it.
        if self._world.works.broken is None and not self._world.failed:
            self._comm.Free()
        file = getattr(self.notices, "path", None)  # a store on a port has none
        self._comm = self.notices = None
        if file is not None:
            private_store.leave(Path(file), self.size())

    def abort(self) -> None:
        """End all workers of the run at once."""
        self._world.mpi.COMM_WORLD.Abort(1)

    # From an operation to a work

    def _collective(
        self, name: str, jobs: Sequence[Job], result: Sequence[torch.Tensor], opts: Any
    ) -> Work:
        def finish() -> None:
            for call, buffers in jobs:
                call()
                for buffer in buffers:
                    buffer.write_back()

        def post() -> list[Test]:
            # It completes when all workers have come; only then does finish() block in MPI.
            return [self._comm.Ibarrier().Test]

        work = self._work(name, post, finish, result, opts.timeout, in_order=True)
        return self._submit(work, opts.asyncOp)

    def _work(
        self,
        name: str,
        post: Callable[[], Sequence[Test]],
        finish: Callable[[], None] | None,
        result: Sequence[torch.Tensor],
        timeout: datetime.timedelta = datetime.timedelta(0),
        in_order: bool = False,
    ) -> Work:
        limit_s = timeout.total_seconds()
        # Options that do not set a time limit have a negative one, which torch calls "unset".
        if limit_s <= 0:
            limit_s = self.timeout_s
        works, full_name = self._world.works, f"{name}, {self._place}"
        return Work(works, self, full_name, post, finish, result, limit_s, in_order)

    def _submit(self, work: Work, background: bool) -> Work:
        if self._comm is None:
            raise dist.DistBackendError(f"MPI: {work.name}: this process group was destroyed")
        # No caller waits for one of the collected operations alone, so the
        # communication thread must do them.
        self._world.works.submit(work, background or self._collected is not None)
        if self._collected is not None:
            self._collected.append(work)
        return work

    def _peer(self, rank: int, name: str) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(
                f"{name} needs a rank of the group, from 0 to {self.size() - 1}, not {rank}"
            )
        return int(rank)

    def _tag(self, tag: int) -> int:
        # The highest tag belongs to messages of collectives, see Transfers.
        if not 0 <= tag < self._transfers.own_tag:
            raise ValueError(f"tag must be from 0 to {self._transfers.own_tag - 1}, not {tag}")
        return int(tag)

    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], single: torch.Tensor) -> None:
        """Check that there is one part per worker, of the shape and dtype it gives or takes."""
        if len(parts) != self.size():
            raise ValueError(
                f"{name} has a list of {len(parts)} tensors; the group has {self.size()} workers"
            )
        for part in parts:
            if part.numel() != single.numel() or part.dtype != single.dtype:
                raise ValueError(
                    f"{name} needs tensors of one size and dtype, not {tuple(part.shape)} of "
                    f"{part.dtype} with {tuple(single.shape)} of {single.dtype}"
                )

    def _check_whole(
        self, name: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
    ) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise ValueError(
                f"{name}'s {whole_name} must have {self.size()} times the elements of its "
                f"{part_name}, in the same dtype: {tuple(whole.shape)} of {whole.dtype} and "
                f"{tuple(part.shape)} of {part.dtype} do not fit"
            )


def _options(opts: Any, kind: Callable[[], Any]) -> Any:
    """Return an operation's options: those of the caller, or torch's defaults."""
    if opts is not None:
        return opts
    return kind()


def _only(items: Sequence[Any], name: str) -> Any:
    if len(items) != 1:
        raise ValueError(f"{name} takes one tensor or list for each worker and got {len(items)}")
    return items[0]


def _spread(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy consecutive elements into the tensors of a list."""
    if not parts or not parts[0].numel():
        return
    with torch.no_grad():
        for part, values in zip(parts, whole.split(parts[0].numel()), strict=True):
            part.copy_(values.view(part.shape))
    # The copies run on this thread's stream, and the caller may read the tensors on another one.
    if parts[0].is_cuda:
        torch.cuda.current_stream(parts[0].device).synchronize()
