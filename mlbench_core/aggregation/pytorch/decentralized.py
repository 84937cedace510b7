"""Average with neighbors: each worker exchanges tensors with only a few others."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    UnknownOperationError,
)
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation, messages_of
from mlbench_core.aggregation.pytorch.transport.messages import (
    KeptMemory,
    by_dtype_and_device,
    in_blocks,
    pack,
    unpack,
)
from mlbench_core.aggregation.pytorch.transport.topology import Topology, from_edges
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["DecentralizedAggregation"]

TAG_BYTES = 8  # size of a hash that is sent with a list of neighbors


class DecentralizedAggregation(Aggregation):
    r"""Average with the neighbors, uncompressed.

    With :math:`x_i` the tensor of worker :math:`i` and :math:`W` the mixing matrix of the graph,

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j = x_i + \sum_{j \ne i} W_{ij} (x_j - x_i).

    :math:`W` has Metropolis-Hastings weights, see
    :class:`~mlbench_core.aggregation.pytorch.transport.topology.Topology`. It is doubly stochastic
    for every graph, so the average of all workers does not change (up to rounding). If all workers
    have the same number of neighbors, the weights are :math:`1 / (1 + \deg)`. Values that are equal
    on all workers do not change, bit for bit.

    Each worker knows only its own neighbors. In the first aggregation, the workers exchange their
    lists once. If only one of two workers lists the other, it would wait for messages indefinitely,
    so all workers raise an error.

    To every neighbor, a call sends a tensor of at least 8 MiB in a separate message, without a
    copy, and the smaller ones of the same dtype and device in one message. All travel in their own
    dtype: ``degree`` times the bytes of the tensors. After an error in an aggregation, such as a
    lost worker, their values are undefined. Half-precision numbers are mixed in float32. Buffers
    are mixed like weights. A single worker sends nothing.

    An infinity or nan of a worker reaches its neighbors in the same call, and every other worker
    after as many calls as it is edges away.

    Attributes:
        rank: This worker's number in the process group.
        neighbors: The ranks of its neighbors, ascending.
        topology: The graph; None until the workers have exchanged their lists, if it was not given.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks in the process group of this worker's neighbors; order and repetition do
            not matter. None if ``topology`` is given or the worker is alone.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        topology: The whole graph, instead of ``neighbors``.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``rank`` is not the rank of this process, ``neighbors`` is missing or names a
            rank that does not exist, or ``topology`` is for another number of workers.

    Example:
        >>> from mlbench_core.aggregation.pytorch.transport.topology import ring
        >>> aggregation = DecentralizedAggregation(rank=0, neighbors=None, topology=ring(1))
        >>> aggregation.topology.spectral_gap
        1.0

    References:
        X. Lian, C. Zhang, H. Zhang, C. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms
        Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic
        Gradient Descent. arXiv:1705.09056
    """

    # How the exchanges are counted: with a pair, more workers do not mean more peers.
    _kind: ClassVar[str] = "neighbors"

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        use_cuda: bool = False,
        *,
        topology: Topology | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self._all_reduce = AllReduceAggregation(
            None, use_cuda=use_cuda, process_group=process_group
        )
        self._kept = KeptMemory()
        self.rank = process_groups.rank(self.group)
        if rank not in (None, self.rank):
            raise ValueError(
                f"rank must be {self.rank}, the rank of this process among "
                f"{self.world_size}, not {reprlib.repr(rank)}: enter initialize_backends "
                "first and give the rank that it yields, or None"
            )
        self.neighbors = _check_neighbors(neighbors, topology, self.rank, self.world_size)
        self.topology = topology
        if self.world_size == 1:
            self.topology = from_edges(1, ())
        # W_ij of each neighbor. It is empty only before the exchange of the lists, because every
        # worker in a connected graph has a neighbor.
        self._weights: tuple[float, ...] = ()

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Replace every tensor by its average with the neighbors', in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.
            extra: Tensors to average over all workers.

        Raises:
            UnknownOperationError: ``op`` is another one. It is a ValueError and a
                NotImplementedError.
            ValueError: The workers' lists of neighbors do not fit together.
        """
        check_average(op)
        if self.world_size > 1:
            # An empty tensor needs no message.
            for kind in by_dtype_and_device(filter(torch.numel, tensors.values())):
                self._mix(kind)
        with self._counting_bytes_of(self._all_reduce):
            self._all_reduce.average(extra, self.world_size)

    def _mix(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors of one dtype and device with the neighbors', weighted and in place."""
        if not self._weights:
            self._compare_neighbors()
        groups = messages_of(tensors)
        # All messages are packed before one is changed, because two tensors may share memory.
        messages = []
        for i, (group, own) in enumerate(groups):
            if own is None:
                numel, first = sum(map(torch.numel, group)), group[0]
                memory = self._kept.flat(("packed", i), numel, first.dtype, first.device)
                messages.append(pack(group, out=memory))
            else:
                messages.append(own)
        # Two messages are in transit at a time: one is mixed while the other travels.
        arrivals = [self._start_exchange(message, i % 2) for i, message in enumerate(messages[:2])]
        for i, message in enumerate(messages):
            self._average(message, arrivals[i]())
            if i + 2 < len(messages):
                # The memory of this slot is free again: its tensors were mixed just above.
                arrivals.append(self._start_exchange(messages[i + 2], i % 2))
            group, own = groups[i]
            if own is None:
                unpack(message, group)

    def _average(self, x_i: Tensor, received: Sequence[Tensor]) -> None:
        """Replace a flat tensor by its weighted average with those of the neighbors, in place."""
        # At least in float32: in half precision each addition would be
        # rounded, and not only the result.
        dtype = torch.promote_types(x_i.dtype, torch.float32)
        for block, *others in zip(in_blocks(x_i), *map(in_blocks, received), strict=True):
            own = block.to(dtype)
            # A sum of products W_ij x_j would round equal values. Their differences are exactly 0.
            # They take the place of the received values.
            differences = [x_j.to(dtype).sub_(own) for x_j in others]
            for w_ij, difference in zip(self._weights, differences, strict=True):
                own.add_(difference, alpha=w_ij)
            if own is not block:
                block.copy_(own)

    def _start_exchange(self, message: Tensor, slot: int = 0) -> Callable[[], list[Tensor]]:
        """Begin to send a flat tensor to the neighbors and to receive theirs.

        The tensors of all workers have the same length and dtype, and all workers exchange them in
        the same order.

        Args:
            message: The tensor; it must not be changed before the returned function was called.
            slot: Number of the memory for the neighbors' tensors. The next exchange with this
                number overwrites them.

        Returns:
            A function that waits, and returns the neighbors' tensors in the order of ``neighbors``.
        """
        sent = process_groups.get_backend_tensor(message, self.group)
        if process_groups.backend(self.group) == "gloo":
            sent = sent.cpu()  # Gloo's send and receive need tensors in host memory
        dist = process_groups.dist
        received, sends, receives = [], [], []
        targets = self._targets()
        for rank in targets:
            # torch's send and receive take ranks among all workers, also within a subgroup.
            peer = process_groups.global_rank(rank, self.group)
            sends.append(dist.P2POp(dist.isend, sent, peer, self.group))
        for rank in self.neighbors:
            peer = process_groups.global_rank(rank, self.group)
            buffer = self._kept.flat((slot, rank), sent.numel(), sent.dtype, sent.device)
            received.append(buffer)
            receives.append(dist.P2POp(dist.irecv, buffer, peer, self.group))
        # Sends and receives start together. In a blocking order, two
        # neighbors could wait for each other.
        works = dist.batch_isend_irecv(sends + receives)
        # All neighbors at once: their messages share this worker's link but not their delays.
        self._count(self._kind, len(targets) + 1, sent.nbytes * len(targets))

        def arrive() -> list[Tensor]:
            for work in works:
                work.wait()
            return [buffer.to(message.device) for buffer in received]

        return arrive

    def _targets(self) -> Sequence[int]:
        """Return the ranks to which an exchange sends; in a directed graph they may be others."""
        return self.neighbors

    def _compare_neighbors(self, tag: bytes = bytes(TAG_BYTES)) -> bool:
        """Exchange the lists of neighbors, build the graph from them, and set the mixing weights.

        Args:
            tag: TAG_BYTES bytes that are sent with the list, for example a hash of this worker's
                state.

        Returns:
            True if all workers gave the same tag. The result is the same on every worker.

        Raises:
            ValueError: Only one of two workers lists the other, or the graph is not connected. All
                workers raise it.
        """
        size = self.world_size
        # A 1 for each neighbor among all ranks, then the tag.
        flags = [int(rank in self.neighbors) for rank in range(size)]
        row = torch.tensor([*flags, *tag], dtype=torch.uint8)
        sent = process_groups.get_backend_tensor(row, self.group)
        gathered = sent.new_empty(size, len(row))
        process_groups.dist.all_gather(list(gathered), sent, group=self.group)
        rows = gathered.cpu()
        # All workers look at the same gathered lists, so all of them raise the same error.
        edges = _check_edges(rows[:, :size])
        agreed = from_edges(size, edges)
        # A given topology stays, because it has a name.
        if self.topology is None or self.topology.edges != agreed.edges:
            self.topology = agreed
        w_i = self.topology.mixing_matrix[self.rank].tolist()
        self._weights = tuple(w_i[j] for j in self.neighbors)
        return bool((rows[:, size:] == rows[0, size:]).all())


def check_average(op: str) -> None:
    """Raise an error for operations other than ``"avg_world"``.

    Averages of weights are divided only by the number of workers.

    Raises:
        UnknownOperationError: ``op`` is another one.
    """
    if op != AVG_WORLD:
        raise UnknownOperationError(f"op must be {AVG_WORLD!r} if weights are averaged, not {op!r}")


def refuse_gradients(aggregation: Aggregation, by_layer: bool = False) -> NoReturn:
    """Raise an error. This is the method ``agg_grad`` of aggregations that average weights.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{type(aggregation).__name__} averages weights, not "
        "gradients: use agg_model, or agg_grad=False"
    )


def _check_neighbors(
    neighbors: Iterable[int] | None, topology: Topology | None, rank: int, world_size: int
) -> tuple[int, ...]:
    """Return this worker's neighbors, ascending, each once."""
    if neighbors is not None and topology is not None:
        raise ValueError("neighbors and topology are both given: give only one of them")
    if topology is not None:
        if topology.world_size != world_size:
            raise ValueError(
                f"topology is for {topology.world_size} workers, but there are {world_size}"
            )
        return topology.neighbours(rank)
    if neighbors is None:
        if world_size == 1:
            return ()
        raise ValueError(
            "neighbors is missing: give the ranks that this worker averages with, or topology=, "
            f"for example mlbench_core.aggregation.pytorch.transport.topology.ring({world_size})"
        )
    ranks = sorted(set(map(int, neighbors)))
    wrong = [neighbor for neighbor in ranks if neighbor == rank or not 0 <= neighbor < world_size]
    if wrong:
        raise ValueError(
            f"neighbors has {wrong}: rank {rank}'s neighbors must "
            f"be other ranks from 0 to {world_size - 1}"
        )
    return tuple(ranks)


def _check_edges(adjacency: Tensor) -> list[tuple[int, int]]:
    """Return the edges of a graph, if both workers of each edge list each other.

    Row i of ``adjacency``, of shape (k, k), has a 1 for each neighbor that worker i lists.
    """
    one_sided = (adjacency > adjacency.T).nonzero().tolist()
    if one_sided:
        (listing, listed), *others = one_sided
        more = ""
        if others:
            more = f"; so for {others}"
        raise ValueError(
            f"rank {listing} has rank {listed} as a neighbor, but not the reverse: neighbors "
            f"exchange tensors, so both must list the edge ({listing}, {listed}){more}"
        )
    return [(i, j) for i, j in adjacency.nonzero().tolist()]
