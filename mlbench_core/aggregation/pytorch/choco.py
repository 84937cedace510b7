"""Average with neighbors, sending only compressed differences (CHOCO-Gossip).

:class:`ChocoAggregation` explains the public copies and sums. The copies and sums of all workers
must come from the same run, graph and call. So the workers compare them in the first call, and
again after each restored state::

    __init__, load_state_dict(state)
        |       copies of another rank or number of workers are dropped, with a warning
        v
    NOT COMPARED <------------------------------------------------- load_state_dict(state) ----+
        |                                                                                      |
        |  first call: all workers exchange their neighbors and a tag, which is a hash of      |
        |  the number of calls, the restored graph, and the names and sizes of the copies      |
        |                                                                                      |
        +-- all tags are equal, the graph is the restored one: keep the state --+              |
        |                                                                       v              |
        +-- otherwise, all workers start from zero ------------------------> COMPARED ---------+
                                                                             |      ^
                                                                             +------+
                                          every call: send q_i, add q_j to copies and sums, move x_i
"""

from __future__ import annotations

import copy
import hashlib
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import ratio_of, recall
from mlbench_core.aggregation.pytorch.compression.sign import (
    mean_in_range,
    pack_signs,
    scaled_signs,
    unpack_part,
)
from mlbench_core.aggregation.pytorch.compression.sparsified import (
    coordinates_sent,
    draw_coordinates,
    largest_entries,
)
from mlbench_core.aggregation.pytorch.decentralized import (
    TAG_BYTES,
    DecentralizedAggregation,
    check_average,
    refuse_gradients,
)
from mlbench_core.aggregation.pytorch.transport.messages import (
    KeptMemory,
    all_finite,
    as_bytes,
    as_real,
    fill,
    from_bytes,
    in_blocks,
    nbytes_of,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    check_keys,
    copies_by_plain_name,
    is_buffer,
)
from mlbench_core.aggregation.pytorch.transport.topology import Topology

__all__ = [
    "ChocoAggregation",
    "Compressed",
    "Compression",
    "Identity",
    "RandomK",
    "ScaledSign",
    "TopK",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compressed:
    """A compressed flat tensor.

    Attributes:
        sent: The tensors to send; their shapes and dtypes follow from those of the tensor that was
            compressed.
        agreed: Data that the receiver knows without a message, such as indices that all workers
            draw from the same seed.
    """

    sent: tuple[Tensor, ...]
    agreed: Tensor | None = None


class Compression(ABC):
    r"""A compression :math:`Q` whose result is closer to the tensor than zero is (a contraction).

    .. math:: \mathbb{E} \|Q(x) - x\|^2 \le (1 - \delta) \|x\|^2, \qquad 0 < \delta \le 1.
    """

    @abstractmethod
    def compress(self, x: Tensor) -> Compressed:
        """Compress a tensor of shape (n,), with n at least 1."""

    def compress_difference(self, x: Tensor, y: Tensor, kept: KeptMemory) -> Compressed:
        """Compress x - y, shape (n,), in the dtype of ``x``; ``kept`` provides the memory."""
        difference = torch.sub(x, y, out=kept.flat("difference", len(x), x.dtype, x.device))
        return _without_views(self.compress(difference), difference)

    @abstractmethod
    def add_to(self, y: Tensor, q: Compressed, weight: float) -> None:
        """Add ``weight`` times the decompressed tensor to ``y`` of shape (n,), in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values that change from call to call; an empty dictionary if none do."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of :meth:`state_dict`."""


class Identity(Compression):
    """Keep everything: Q(x) = x, delta = 1."""

    def compress(self, x: Tensor) -> Compressed:
        """Compress a tensor of shape (n,) to itself."""
        return Compressed((x,))

    def add_to(self, y: Tensor, q: Compressed, weight: float) -> None:
        """Add ``weight`` times the tensor to ``y``."""
        y.add_(q.sent[0].to(y.dtype), alpha=weight)


class TopK(Compression):
    """Keep the k = max(1, round(ratio n)) entries of largest magnitude; delta = k / n.

    Args:
        ratio: Share of the entries that are kept, in (0, 1].

    Example:
        >>> TopK(0.5).compress(torch.tensor([1.0, -3.0, 2.0, 0.0])).sent
        (tensor([-3.,  2.]), tensor([1, 2], dtype=torch.int32))
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = _check_ratio(ratio)

    def compress(self, x: Tensor) -> Compressed:
        """Keep the largest entries of a tensor of shape (n,)."""
        return self._compress(x.__getitem__, len(x), KeptMemory())

    def compress_difference(self, x: Tensor, y: Tensor, kept: KeptMemory) -> Compressed:
        """Keep the largest entries of a difference, without writing the others to memory."""

        def part(chosen: slice) -> Tensor:
            a, b = x[chosen], y[chosen]
            return torch.sub(a, b, out=kept.flat("difference", len(a), x.dtype, x.device))

        return self._compress(part, len(x), kept)

    def _compress(
        self, part: Callable[[slice], Tensor], numel: int, kept: KeptMemory
    ) -> Compressed:
        if numel > torch.iinfo(torch.int32).max:
            raise ValueError(
                "top_k sends positions as int32, so a tensor must have fewer than 2**31 "
                f"numbers, not {numel}: split it"
            )
        indices, values = largest_entries(part, numel, coordinates_sent(self.ratio, numel), kept)
        return Compressed((values, indices))

    def add_to(self, y: Tensor, q: Compressed, weight: float) -> None:
        """Add ``weight`` times the kept entries to ``y``."""
        values, indices = q.sent
        y.index_add_(0, indices, values.to(y.dtype), alpha=weight)


class RandomK(Compression):
    """Keep k = max(1, round(ratio n)) random entries, the same on all workers; delta = k / n.

    Indices are not sent, because all workers draw them from generators with the same seed.

    Args:
        ratio: Share of the entries that are kept, in (0, 1].
        seed: Seed of the generator; the same on every worker.
    """

    def __init__(self, ratio: float, seed: int = 0) -> None:
        self.ratio = _check_ratio(ratio)
        self._generator = torch.Generator().manual_seed(operator.index(seed))

    def compress(self, x: Tensor) -> Compressed:
        """Keep random entries of a tensor of shape (n,)."""
        count = coordinates_sent(self.ratio, x.numel())
        drawn = draw_coordinates(x.numel(), count, self._generator)
        indices = drawn.sort().values.to(x.device)
        # The neighbors must also learn of an infinity or nan at a coordinate that is not sent.
        values = x.index_select(0, indices).masked_fill_(~all_finite(x), torch.nan)
        return Compressed((values,), agreed=indices)

    def add_to(self, y: Tensor, q: Compressed, weight: float) -> None:
        """Add ``weight`` times the kept entries to ``y``."""
        assert q.agreed is not None
        y.index_add_(0, q.agreed, q.sent[0].to(y.dtype), alpha=weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the generator's state."""
        self._generator.set_state(state_dict["generator"].cpu())


class ScaledSign(Compression):
    r"""Keep one bit per entry and the mean magnitude.

    .. math:: Q(x) = \frac{\|x\|_1}{n} \operatorname{sign}(x)

    :math:`\delta = \|x\|_1^2 / (n \|x\|^2)`, at least 1/n. The sign of zero is taken as positive. A
    complex number counts as two real ones.
    """

    def compress(self, x: Tensor) -> Compressed:
        """Keep the signs of a tensor of shape (n,), eight per byte, and the mean magnitude."""
        x = as_real(x)
        # A sum of many half-precision magnitudes would be too coarse, so only the mean has the
        # dtype of the message.
        sizes = x.abs().to(torch.promote_types(x.dtype, torch.float32))
        scale = mean_in_range(sizes.mean(), x).to(x.dtype)
        return Compressed((pack_signs([x]), scale.view(1)))

    def add_to(self, y: Tensor, q: Compressed, weight: float) -> None:
        """Add ``weight`` times the scaled signs to ``y``."""
        packed, scale = q.sent
        y = as_real(y)
        step, start = weight * scale.to(y.dtype), 0
        for part in in_blocks(y):
            part += scaled_signs(unpack_part(packed, start, start + len(part)), step)
            start += len(part)


class ChocoAggregation(DecentralizedAggregation):
    r"""Average with the neighbors, sending compressed differences (CHOCO-Gossip).

    Every worker keeps a public copy :math:`\hat x_i` of its tensor, initially zero. Its neighbors
    know this copy from the messages they receive. With a compression :math:`Q`, the mixing matrix
    :math:`W` and a consensus step size :math:`\gamma`, a call computes

    .. math::

        q_i &= Q(x_i - \hat x_i) && \text{(sent to the neighbors)} \\
        \hat x_j &\leftarrow \hat x_j + q_j && \text{(for itself and the neighbors)} \\
        x_i &\leftarrow x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i).

    The average of all workers does not change. As the copies come closer to the tensors, the
    differences become smaller, and so do the errors of compression. The workers approach a
    common value at a linear rate for every contraction :math:`Q` if :math:`\gamma` is small enough.
    Instead of the neighbors' copies, a worker keeps only the sum :math:`s_i = \sum_j W_{ij} (\hat
    x_j - \hat x_i)`. So the extra memory is twice that of the weights, for any number of neighbors.

    Each tensor is compressed separately. A call sends one message to each neighbor. In
    this message, a tensor of n numbers of b bytes takes k (b + 4) bytes for ``top_k`` and k b bytes
    for ``random_k``, with k = max(1, round(ratio n)). It takes b bytes plus n / 8 bytes, rounded
    up, for ``sign``, and n b bytes for ``identity``.
    Half-precision tensors are sent in half precision; copies and sums are kept in float32. Buffers
    are not compressed. They are averaged as in
    :class:`~mlbench_core.aggregation.pytorch.decentralized.DecentralizedAggregation`.

    If a worker has an infinite or nan number, its message is not finite either. All neighbors
    receive it in the same call. A worker that is d edges away receives it after d calls.

    The sums are correct only together with the copies of all neighbors. An error in them would move
    the weights in every call, indefinitely. So a saved state names its worker, graph and call, and
    the workers compare these in the first call. If the states do not belong together, copies and
    sums start from zero on all workers. This happens, for example, if a run continues with another
    number of workers. It costs only a few calls until the copies are close to the weights again.

    Attributes:
        compression: The compression Q.
        gamma: Consensus step size.

    Args:
        rank: This worker's rank in the process group; None to take it from the group.
        neighbors: Ranks of this worker's neighbors, or None; see :class:`DecentralizedAggregation`.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        topology: The whole graph, instead of ``neighbors``.
        compression: ``"top_k"``, ``"random_k"``, ``"sign"``, ``"identity"`` or a
            :class:`Compression`.
        ratio: Share of the entries that ``top_k`` and ``random_k`` keep, in (0, 1].
        gamma: Consensus step size in (0, 1]. A stronger compression needs a smaller one. With
            ``identity`` and 1, a call is the uncompressed average with the neighbors.
        seed: Seed of the generator of ``random_k``; the same on every worker.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``compression`` is unknown, ``ratio`` or ``gamma`` is out of range, or an
            argument is wrong for :class:`DecentralizedAggregation`.

    Example:
        >>> aggregation = ChocoAggregation(rank=0, neighbors=None, compression="sign", gamma=0.4)
        >>> aggregation.compression_ratio
        1.0

    References:
        A. Koloskova, S. Stich, M. Jaggi: Decentralized Stochastic Optimization and Gossip
        Algorithms with Compressed Communication. arXiv:1902.00340

        A. Koloskova, T. Lin, S. Stich, M. Jaggi: Decentralized Deep Learning with Arbitrary
        Communication Compression. arXiv:1907.09356
    """

    # Copies and sums are valid only for the worker that saved them. A worker without its own state
    # starts from zero.
    _named_state = _own_state = ("copies", "sums")

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        use_cuda: bool = False,
        *,
        topology: Topology | None = None,
        compression: str | Compression = "top_k",
        ratio: float = 0.1,
        gamma: float = 0.2,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(rank, neighbors, use_cuda, topology=topology, process_group=process_group)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma, the consensus step size, must be in (0, 1], not {gamma}")
        self.compression = _make_compression(compression, ratio, seed)
        self.gamma = gamma
        self._copies: dict[str, Tensor] = {}  # x_hat_i by name, flat
        self._sums: dict[str, Tensor] = {}  # s_i by name, flat
        self._calls = 0
        # Graph of the restored copies and sums, until the workers have compared it.
        self._edges_of_state: list[list[int]] | None = None
        self._must_agree = True
        # State of the compression to return to if the states of the workers do not belong together.
        self._first_compression = copy.deepcopy(self.compression.state_dict())
        self._raw_bytes = self._compressed_bytes = 0

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the bytes of the tensors over those sent for them; 1 before any message."""
        return ratio_of(self._raw_bytes, self._compressed_bytes)

    # Weights change little from step to step, so a compressed difference brings the copies closer.
    # Gradients change too much for that.
    agg_grad = refuse_gradients

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Move every tensor toward those of the neighbors, in place.

        Args:
            tensors: Tensors by name; order, shapes and dtypes are the same on every worker.
            op: ``"avg_world"``.
            denom: Not used.
            extra: Tensors to average over all workers.

        Raises:
            UnknownOperationError: ``op`` is not ``"avg_world"``.
            ValueError: A tensor does not have the size of its restored copy, a tensor has 2**31
                numbers or more with ``top_k``, or the workers' lists of neighbors contradict
                each other.
        """
        check_average(op)
        compressed, buffers = {}, {}
        for name, tensor in tensors.items():
            if is_buffer(name):
                buffers[name] = tensor
            elif tensor.numel():
                compressed[name] = tensor
        if self.world_size > 1 and compressed:
            self._mix_compressed(compressed)
        # Buffers are only mixed; see is_buffer().
        super().aggregate(buffers, op, denom, extra)

    def _mix_compressed(self, tensors: Mapping[str, Tensor]) -> None:
        # A worker without a restored state compares too, because the others may have one.
        if self._must_agree:
            self._agree_on_state()
        own: dict[str, Compressed] = {}
        parts: list[Tensor] = []
        for name, x_i in tensors.items():
            flat = x_i.reshape(-1)
            recall(self._sums, name, flat)
            # q_i = Q(x_i - x_hat_i), in the dtype of x_i. The next difference includes the rounding
            # error, like every error of the compression.
            x_hat = recall(self._copies, name, flat)
            own[name] = self.compression.compress_difference(flat, x_hat, self._kept)
            parts += own[name].sent
        # All tensors travel in one message of bytes, because values, indices and bits have
        # different dtypes. Parameters on several devices share the message too.
        message = as_bytes(*(part.to(parts[0].device) for part in parts))
        arrive = self._start_exchange(message)
        self._calls += 1
        self._raw_bytes += nbytes_of(tensors.values())
        self._compressed_bytes += message.numel()
        # s_i gains sum_j W_ij (q_j - q_i), so the neighbors' copies themselves need not be stored.
        # The part with q_i is added while the messages travel.
        for name, q_i in own.items():
            self.compression.add_to(self._copies[name], q_i, 1.0)
            self.compression.add_to(self._sums[name], q_i, -sum(self._weights))
        try:
            received = list(map(partial(_unpack_like, own), arrive()))
        except BaseException:
            # The sums have this worker's part without that of the
            # neighbors, so they must not be saved.
            self.load_state_dict({})
            raise
        for name, x_i in tensors.items():
            s_i = self._sums[name]
            for w_ij, q_j in zip(self._weights, received, strict=True):
                self.compression.add_to(s_i, q_j[name], w_ij)
            if x_i.dtype == s_i.dtype:
                x_i.add_(s_i.view(x_i.shape), alpha=self.gamma)
            else:
                # s_i has at least float32, so a half-precision x_i is rounded only once, when the
                # result is copied.
                fill(x_i, partial(self._moved, x_i.reshape(-1), s_i))

    def _moved(self, x_i: Tensor, s_i: Tensor, start: int, stop: int) -> Tensor:
        """Return a part of a flat tensor after its step toward the neighbors."""
        return x_i[start:stop] + self.gamma * s_i[start:stop]

    def _agree_on_state(self) -> None:
        """Keep copies and sums if those of all workers belong together, or else start from zero."""
        sizes = {name: len(x_hat) for name, x_hat in self._copies.items()}
        # Not Python's hash(), which differs between processes. repr() of these values is the same
        # on every worker.
        values = repr((self._calls, self._edges_of_state, sizes)).encode()
        fits = self._compare_neighbors(hashlib.blake2b(values, digest_size=TAG_BYTES).digest())
        if not fits or self._edges_of_state not in (None, self._edges()):
            if self._copies:
                _log.warning(
                    "the restored public copies of ChocoSGD do not belong to these workers and "
                    "their graph: all workers start them from zero"
                )
            self._copies.clear()
            self._sums.clear()
            # random_k draws the same indices on all workers only if their
            # generators have the same state.
            self.compression.load_state_dict(self._first_compression)
            self._calls = 0
        self._edges_of_state = None
        self._must_agree = False

    def _edges(self) -> list[list[int]] | None:
        """Return the edges of the graph as lists, for a checkpoint; None before they are known."""
        if self.topology is None:
            return None
        return list(map(list, self.topology.edges))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        Returns:
            The public copies and the sums by parameter name under ``"copies"`` and ``"sums"``, the
            compression's state under ``"compression"``, and their worker, graph and number of calls
            under ``"origin"``.
        """
        return {
            "copies": dict(self._copies),
            "sums": dict(self._sums),
            "compression": self.compression.state_dict(),
            "origin": {
                "rank": self.rank,
                "world_size": self.world_size,
                # A state that is saved before its first use keeps its own graph.
                "edges": self._edges_of_state or self._edges(),
                "calls": self._calls,
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Every worker must load its own state. Copies and sums of another worker, or of another
        number of workers, are dropped with a warning. All workers then start from zero, as the
        class describes.

        Raises:
            ValueError: ``state_dict`` is the state of another aggregation or another compression.
        """
        start = {"rank": self.rank, "world_size": self.world_size, "edges": None, "calls": 0}
        empty = {"copies": {}, "sums": {}, "compression": self._first_compression, "origin": start}
        if state_dict:
            check_keys(self, state_dict, empty.keys())
        state = {**empty, **state_dict}
        if set(state["compression"]) != set(self._first_compression):
            raise ValueError(
                f"the compression in the state must have {sorted(self._first_compression)} for "
                f"{type(self.compression).__name__}, not {sorted(state['compression'])}: build the "
                "optimizer with the compression of the checkpoint"
            )
        origin = state["origin"]
        is_of_this_worker = origin["rank"] == self.rank and origin["world_size"] == self.world_size
        if state["copies"] and not is_of_this_worker:
            _log.warning(
                "the public copies of ChocoSGD belong to worker %s of %s, not to "
                "worker %d of %d: they start from zero",
                origin["rank"],
                origin["world_size"],
                self.rank,
                self.world_size,
            )
            state["copies"] = state["sums"] = {}
        self._copies = copies_by_plain_name(state["copies"])
        self._sums = copies_by_plain_name(state["sums"])
        self.compression.load_state_dict(state["compression"])
        self._calls = int(origin["calls"])
        # Workers may load at different times, so they compare their states in the next call, which
        # is a collective.
        self._edges_of_state = None
        if self._copies:
            self._edges_of_state = list(map(list, origin["edges"] or ()))
        self._must_agree = True


def _without_views(q: Compressed, x: Tensor) -> Compressed:
    """Copy the parts that share the memory of ``x``, which the next tensor overwrites."""
    memory = x.untyped_storage().data_ptr()
    parts = []
    for part in q.sent:
        if part.untyped_storage().data_ptr() == memory:
            part = part.clone()
        parts.append(part)
    return replace(q, sent=tuple(parts))


def _unpack_like(own: Mapping[str, Compressed], message: Tensor) -> dict[str, Compressed]:
    """Split a neighbor's message into tensors of the sizes and dtypes of this worker's own."""
    result, start = {}, 0
    for name, q_i in own.items():
        parts = []
        for part in q_i.sent:
            parts.append(from_bytes(message, start, part.numel(), part.dtype).to(part.device))
            start += part.nbytes
        result[name] = replace(q_i, sent=tuple(parts))
    return result


def _make_compression(compression: str | Compression, ratio: float, seed: int) -> Compression:
    if isinstance(compression, Compression):
        return compression
    makers: dict[str, Callable[[], Compression]] = {
        "top_k": partial(TopK, ratio),
        "random_k": partial(RandomK, ratio, seed),
        "sign": ScaledSign,
        "identity": Identity,
    }
    if compression not in makers:
        raise ValueError(
            f"compression must be a Compression or one of {', '.join(makers)}, not {compression!r}"
        )
    return makers[compression]()


def _check_ratio(ratio: float) -> float:
    if not 0 < ratio <= 1:
        raise ValueError(
            f"ratio, the share of entries that are sent, must be in (0, 1], not {ratio}"
        )
    return float(ratio)  # an integer would mean a number of entries
