"""Call MPI's blocking collectives on contiguous tensors with any number of elements.

MPI counts elements in a C ``int``, so longer messages are sent in chunks. If the layout does not
allow chunks, as in a gather, each worker's part is sent as a separate message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mlbench_core.distributed.pytorch.mpi.datatypes import Reduction
from mlbench_core.distributed.pytorch.mpi.world import World

__all__ = ["Transfers", "chunks"]

MAX_ELEMENTS = 2**31 - 1
"""Largest number of elements in one message."""


def chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a contiguous tensor into pieces that MPI can count; yield a short tensor unchanged."""
    if tensor.numel() <= MAX_ELEMENTS:
        yield tensor
    else:
        yield from tensor.view(-1).split(MAX_ELEMENTS)


class Transfers:
    """The collectives of one communicator.

    All tensors must be contiguous, and those of one call must have the same dtype.

    Args:
        world: MPI's world.
        comm: The communicator.

    Attributes:
        rank: This worker's rank in the communicator.
        size: The communicator's number of workers.
        own_tag: Tag of messages that belong to collectives.
    """

    def __init__(self, world: World, comm: Any) -> None:
        self.mpi = world.mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        # The highest tag. send() and recv() refuse it, so messages of users cannot be mistaken for
        # messages of all_to_all.
        self.own_tag: int = comm.Get_attr(world.mpi.TAG_UB)
        self._datatypes = world.datatypes

    def message(
        self, tensor: torch.Tensor, datatype: Any = None, count: int | None = None
    ) -> list[Any]:
        """Describe a contiguous tensor to mpi4py.

        Args:
            tensor: The tensor.
            datatype: MPI's datatype of the elements; by default one for moving, not for computing.
            count: Number of elements for each worker; by default all elements of the tensor.
        """
        if count is None:
            count = tensor.numel()
        if datatype is None:
            datatype = self._datatypes.moving(tensor.dtype)
        memory = self.mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, count, datatype]

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce in place; every worker gets the result."""
        for chunk in chunks(tensor):
            message = self.message(chunk, reduction.datatype)
            self.comm.Allreduce(self.mpi.IN_PLACE, message, reduction.op)
        self._divide(tensor, reduction)

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """Reduce in place on ``root``; on other workers the tensor does not change."""
        for chunk in chunks(tensor):
            message = self.message(chunk, reduction.datatype)
            if self.rank == root:
                self.comm.Reduce(self.mpi.IN_PLACE, message, reduction.op, root)
            else:
                self.comm.Reduce(message, None, reduction.op, root)
        if self.rank == root:
            self._divide(tensor, reduction)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction
    ) -> None:
        """Reduce ``source``, and write this worker's part of the result to ``output``."""
        if source.numel() <= MAX_ELEMENTS:
            sent = self.message(source, reduction.datatype, output.numel())
            received = self.message(output, reduction.datatype)
            self.comm.Reduce_scatter_block(sent, received, reduction.op)
            self._divide(output, reduction)
            return
        # Each part may be longer than one message: reduce() sends it in chunks. The part
        # of this worker is copied, because reduce() works in place and must not change source.
        for root, part in enumerate(source.view(-1).split(output.numel())):
            whole = part
            if self.rank == root:
                whole = part.clone()
            self.reduce(whole, root, reduction)
            if self.rank == root:
                output.view(-1).copy_(whole)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy ``root``'s tensor to all workers."""
        for chunk in chunks(tensor):
            self.comm.Bcast(self.message(chunk), root)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Put every worker's ``source`` into ``output``, in the order of the ranks."""
        if output.numel() <= MAX_ELEMENTS:
            self.comm.Allgather(self.message(source), self.message(output, count=source.numel()))
            return
        for root, part in enumerate(output.view(-1).split(source.numel())):
            if root == self.rank:
                part.copy_(source.view(-1))
            self.broadcast(part, root)

    def all_to_all(self, output: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Send one part to each worker and receive one from each; parts may differ in size.

        Args:
            output: The tensors to receive into, by the sender's rank. They may be empty.
            source: The tensors to send, by the receiver's rank. They may be empty.
        """
        tag = self.own_tag
        requests = []
        # Post receives first: MPI need not buffer a message whose receive is already posted.
        for peer, part in enumerate(output):
            for chunk in filter(torch.numel, chunks(part)):
                requests.append(self.comm.Irecv(self.message(chunk), peer, tag))
        for peer, part in enumerate(source):
            for chunk in filter(torch.numel, chunks(part)):
                requests.append(self.comm.Isend(self.message(chunk), peer, tag))
        self.mpi.Request.Waitall(requests)

    def gather(self, output: torch.Tensor | None, source: torch.Tensor, root: int) -> None:
        """Put every worker's ``source`` into ``root``'s ``output``, in the order of the ranks."""
        if source.numel() * self.size <= MAX_ELEMENTS:
            received = None
            if output is not None:
                # The count is that of one worker's elements, not of the whole output.
                received = self.message(output, count=source.numel())
            self.comm.Gather(self.message(source), received, root)
            return
        # MPI cannot count the whole output, so each worker's part is sent in separate messages. All
        # other parts are empty.
        incoming: Sequence[torch.Tensor] = self._empty_parts(source)
        if output is not None:
            incoming = output.view(-1).split(source.numel())
        outgoing = self._empty_parts(source)
        outgoing[root] = source
        self.all_to_all(incoming, outgoing)

    def scatter(self, output: torch.Tensor, source: torch.Tensor | None, root: int) -> None:
        """Give each worker its part of ``root``'s ``source``, in the order of the ranks."""
        if output.numel() * self.size <= MAX_ELEMENTS:
            sent = None
            if source is not None:
                # As in gather(), the count is that of one worker.
                sent = self.message(source, count=output.numel())
            self.comm.Scatter(sent, self.message(output), root)
            return
        incoming = self._empty_parts(output)
        incoming[root] = output
        outgoing: Sequence[torch.Tensor] = self._empty_parts(output)
        if source is not None:
            outgoing = source.view(-1).split(output.numel())
        self.all_to_all(incoming, outgoing)

    def _empty_parts(self, like: torch.Tensor) -> list[torch.Tensor]:
        return [like.new_empty(0)] * self.size

    def _divide(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction.divide:
            tensor.div_(self.size)
