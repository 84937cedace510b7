"""Averaging with neighbors: each worker exchanges tensors with a few others only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import BOOKKEEPING, Aggregation, Denominator, UnknownOperationError
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.messages import by_dtype_and_device, in_blocks, pack, unpack
from mlbench_core.aggregation.pytorch.topology import Topology, from_edges
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["DecentralizedAggregation"]

BUFFER = f"{BOOKKEEPING}buffer:"


class DecentralizedAggregation(Aggregation):
    r"""Average with the neighbors, uncompressed.

    With :math:`x_i` the tensor of worker :math:`i` and :math:`W` the mixing matrix of the graph,

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j = x_i + \sum_{j \ne i} W_{ij} (x_j - x_i).

    :math:`W` has Metropolis-Hastings weights, see :class:`~mlbench_core.aggregation.pytorch.topology.Topology`. It is
    doubly stochastic for every graph, so the average of all workers does not change (to rounding). If all workers have
    the same number of neighbors, the weights are :math:`1 / (1 + \deg)`. Workers that agree keep their bits.

    Each worker knows its own neighbors only. At the first aggregation, or at :meth:`connect`, the workers exchange
    their lists once, with one flag per worker. If only one end of an edge knew of it, that end would wait indefinitely,
    so all workers refuse such an edge.

    A call sends one flat message per dtype and device to every neighbor, in the tensors' own dtype: ``degree`` times
    the bytes of the tensors. Half-precision numbers are mixed in float32. Buffers are mixed like weights; other
    bookkeeping, such as a loss, is averaged over all workers. One worker alone sends nothing.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks in the process group of this worker's neighbors; order and repetition do not matter. None
            where ``topology`` is given or the worker is alone.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        topology: The whole graph, instead of ``neighbors``.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``rank`` is not this process's, ``neighbors`` is missing or has a rank that is not there, or
            ``topology`` is for another number of workers.

    Example:
        >>> from mlbench_core.aggregation.pytorch.topology import ring
        >>> aggregation = DecentralizedAggregation(rank=0, neighbors=None, topology=ring(1))
        >>> aggregation.spectral_gap
        1.0

    References:
        X. Lian, C. Zhang, H. Zhang, C. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms Outperform Centralized
        Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent. arXiv:1705.09056
    """

    def __init__(
        self,
        rank: int | None,
        neighbors: Iterable[int] | None,
        use_cuda: bool = False,
        *,
        topology: Topology | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self._world_size = process_groups.world_size(self.group)
        self.rank = _check_rank(rank, self.group)
        self.neighbors = _check_neighbors(neighbors, topology, self.rank, self._world_size)
        self.topology = topology if self._world_size > 1 else from_edges(1, ())
        self._weights: tuple[float, ...] | None = None  # W_ij by neighbor; known once the workers are connected
        self._all_reduce = AllReduceAggregation(self._world_size, use_cuda=use_cuda, process_group=process_group)

    @property
    def world_size(self) -> int:
        """Return the number of workers in the graph."""
        return self._world_size

    @property
    def spectral_gap(self) -> float | None:
        """Return the rate of agreement, see :class:`Topology`; None before the workers exchanged their lists."""
        return None if self.topology is None else self.topology.spectral_gap

    def connect(self) -> Topology:
        """Exchange the lists of neighbors, once; every worker must call this (the first aggregation does).

        Returns:
            The graph, the same on every worker.

        Raises:
            ValueError: An edge is known to one of its ends only, or the graph is not connected; on every worker alike.
        """
        if self._weights is None or self.topology is None:
            self.agree()
        assert self.topology is not None
        return self.topology

    def agree(self, tag: int = 0) -> bool:
        """Exchange the lists of neighbors, as :meth:`connect` does, also if they were exchanged before.

        Args:
            tag: A number from 0 to 2^63 - 1 that is sent with the list.

        Returns:
            True if all workers gave the same tag; the same answer on every worker.

        Raises:
            ValueError: As in :meth:`connect`.
        """
        tags = {tag}
        if self.world_size > 1:
            self.topology, tags = _agreed_topology(self.neighbors, self.topology, self.group, tag)
        assert self.topology is not None
        row = self.topology.mixing_matrix[self.rank].tolist()
        self._weights = tuple(row[j] for j in self.neighbors)
        return len(tags) == 1

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the mixing weights :math:`W_{ij}` of the neighbors, in their order; connect the workers if needed."""
        self.connect()
        assert self._weights is not None
        return self._weights

    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None) -> None:
        """Replace every tensor by its average with the neighbors', in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one. It is a ValueError and a NotImplementedError.
            ValueError: The workers' lists of neighbors do not fit together.
        """
        check_gossip_operation(op)
        shared = {name: t for name, t in tensors.items() if name.startswith(BOOKKEEPING) and not is_buffer(name)}
        mixed = [tensor for name, tensor in tensors.items() if name not in shared]
        for kind in by_dtype_and_device(mixed):
            if self.world_size > 1:
                message = pack(kind)
                self._mix(message)
                unpack(message, kind)
        self._delegate(self._all_reduce, shared, op, denom)

    def _mix(self, x_i: Tensor) -> None:
        """Replace a flat message by its weighted average with the neighbors', in place."""
        weights, messages = self.weights, self.exchange(x_i)
        for block, *theirs in zip(in_blocks(x_i), *map(in_blocks, messages), strict=True):
            own = block.to(computing_dtype(block.dtype))
            mixed = own.clone()
            for w_ij, x_j in zip(weights, theirs, strict=True):
                mixed.add_(x_j.to(own.dtype) - own, alpha=w_ij)
            # Adding differences, not products W_ij x_j, keeps the bits of workers that agree.
            block.copy_(mixed)

    def exchange(self, message: Tensor) -> list[Tensor]:
        """Send a flat tensor to every neighbor and return their messages, in the order of :attr:`neighbors`.

        Args:
            message: One-dimensional, with the same length and dtype on every worker.

        Returns:
            The neighbors' messages, on the same device.
        """
        sent = _sendable(message, self.group)
        received = [torch.empty_like(sent) for _ in self.neighbors]
        if sent.numel():
            dist = process_groups.dist
            peers = [process_groups.global_rank(rank, self.group) for rank in self.neighbors]
            transfers = [dist.P2POp(dist.isend, sent, peer, self.group) for peer in peers]
            transfers += [
                dist.P2POp(dist.irecv, buffer, peer, self.group) for buffer, peer in zip(received, peers, strict=True)
            ]
            # One batch of sends and receives: a blocking order of them could let neighbors wait for each other.
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        for _ in self.neighbors:
            self._count_bytes(sent)
        return [buffer.to(message.device) for buffer in received]


def is_buffer(name: str) -> bool:
    """Return whether a name belongs to a model's buffer."""
    return name.startswith(BUFFER)


def check_gossip_operation(op: str) -> None:
    """Refuse operations other than ``"avg_world"``, the only one that neighbors can do by themselves.

    Raises:
        UnknownOperationError: It is another one.
    """
    if op != AVG_WORLD:
        raise UnknownOperationError(f"op must be {AVG_WORLD!r} where workers average with their neighbours, not {op!r}")


def refuse_gradients(aggregation: Aggregation) -> NoReturn:
    """Refuse to aggregate gradients with an aggregation that is made for weights.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{type(aggregation).__name__} averages weights, not gradients: use agg_model, or agg_grad=False")


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up numbers of a dtype: float32 for half precision, otherwise itself.

    Example:
        >>> computing_dtype(torch.bfloat16), computing_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sendable(message: Tensor, group: Any) -> Tensor:
    """Return a message on a device from which the backend can send it; Gloo sends to one worker from the host only."""
    sent = process_groups.get_backend_tensor(message, group)
    return sent.cpu() if process_groups.backend(group) == "gloo" else sent


def _check_rank(rank: int | None, group: Any) -> int:
    actual = process_groups.rank(group)
    if rank is not None and rank != actual:
        raise ValueError(
            f"rank is {rank!r}, but this process has rank {actual} of {process_groups.world_size(group)}: enter "
            "initialize_backends first and give the rank it yields, or None"
        )
    return actual


def _check_neighbors(
    neighbors: Iterable[int] | None, topology: Topology | None, rank: int, world_size: int
) -> tuple[int, ...]:
    """Return this worker's neighbors, ascending, each once."""
    if neighbors is not None and topology is not None:
        raise ValueError("neighbors and topology are both given: give only one of them")
    if topology is not None:
        if topology.world_size != world_size:
            raise ValueError(f"topology is for {topology.world_size} workers, but there are {world_size}")
        return topology.neighbours(rank)
    if neighbors is None:
        if world_size == 1:
            return ()
        raise ValueError(
            "neighbors is missing: give the ranks this worker averages with, or topology=, for example "
            f"mlbench_core.aggregation.pytorch.topology.ring({world_size})"
        )
    ranks = sorted({int(neighbor) for neighbor in neighbors})
    wrong = [neighbor for neighbor in ranks if neighbor == rank or not 0 <= neighbor < world_size]
    if wrong:
        raise ValueError(
            f"neighbors has {wrong}: rank {rank}'s neighbours must be other ranks from 0 to {world_size - 1}"
        )
    return tuple(ranks)


def _agreed_topology(
    neighbors: tuple[int, ...], topology: Topology | None, group: Any, tag: int
) -> tuple[Topology, set[int]]:
    """Build the graph from the neighbors of every worker; return it and the tags of all workers."""
    world_size = process_groups.world_size(group)
    row = torch.zeros(world_size + 8, dtype=torch.uint8)  # a flag per worker, then the tag in eight bytes
    row[list(neighbors)] = 1
    row[world_size:] = torch.tensor(list(tag.to_bytes(8, "big")), dtype=torch.uint8)
    sent = process_groups.get_backend_tensor(row, group)
    rows = [torch.empty_like(sent) for _ in range(world_size)]
    process_groups.dist.all_gather(rows, sent, group=group)
    gathered = torch.stack(rows).cpu()
    adjacency = gathered[:, :world_size]
    tags = {int.from_bytes(bytes(row), "big") for row in gathered[:, world_size:].tolist()}
    # All workers look at the same gathered lists, so all of them raise the same error.
    one_sided = (adjacency > adjacency.T).nonzero().tolist()
    if one_sided:
        listing, listed = one_sided[0]
        raise ValueError(
            f"rank {listing} has rank {listed} as a neighbor, but not the reverse: neighbors exchange "
            f"tensors, so both must list the edge ({listing}, {listed})"
            + (f"; so for {one_sided[1:]}" if one_sided[1:] else "")
        )
    agreed = from_edges(world_size, [(i, j) for i, j in adjacency.nonzero().tolist()])
    return topology if topology is not None and topology.edges == agreed.edges else agreed, tags
