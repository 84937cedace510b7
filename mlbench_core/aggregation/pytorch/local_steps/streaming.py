"""DiLoCo in fragments, whose messages travel while the workers go on training.

Each fragment of the parameters goes around this circle once in H steps, each at its own offset::

    LOCAL STEPS --- step t: start to average theta - theta_i ---> IN FLIGHT (delay more steps)
         ^                                                            |
         +--- outer step on theta <--- step t + delay: wait ----------+
              theta_i = mix of theta_i and theta

All workers start messages in the same order, because the offsets depend only on the names and the
number of calls. A worker waits for a message only in the step that merges it, or when its state is
saved or copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch.aggregation import AggregationFunction, Denominator
from mlbench_core.aggregation.pytorch.all_reduce import Flight
from mlbench_core.aggregation.pytorch.compression.compressed import ratio_of
from mlbench_core.aggregation.pytorch.decentralized import check_average
from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.aggregation.pytorch.local_steps.periodic import (
    DiLoCoAggregation,
    check_delay,
    count_step,
)
from mlbench_core.aggregation.pytorch.transport.layout import Layout
from mlbench_core.aggregation.pytorch.transport.messages import (
    as_bytes,
    by_dtype_and_device,
    from_bytes,
    nbytes_of,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    by_plain_name,
    counts_by_plain_name,
    is_buffer,
)
from mlbench_core.aggregation.pytorch.transport.packing import (
    pack_codes,
    packed_bytes,
    unpack_codes,
)
from mlbench_core.arguments import check_finite_at_least_0, check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["StreamingDiLoCoAggregation", "from_float4", "to_float4"]


@dataclass
class _Fragment(Flight):
    """A fragment on its way.

    Attributes:
        left: Calls from now until it is merged.
        gradients: Outer gradients by name, and their averages once they have arrived.
        averages: The same for tensors that are only averaged.
    """

    left: int
    gradients: dict[str, Tensor]
    averages: dict[str, Tensor]


class StreamingDiLoCoAggregation(DiLoCoAggregation):
    r"""Update weights that all workers share fragment by fragment.

    The update of a fragment comes some steps after its message was started.

    Parameter :math:`j` belongs to fragment :math:`p = j \bmod P`. Let :math:`t` count the calls. If
    :math:`t \equiv \lfloor p H / P \rfloor \pmod H`, the workers start to average the outer
    gradient of the fragment, with :math:`\theta` its shared weights and :math:`\theta_i` those of
    worker :math:`i` of :math:`k`:

    .. math:: \Delta = \frac{1}{k} \sum_i (\theta - \theta_i).

    After :math:`\tau` more calls, the outer optimizer updates :math:`\theta` with :math:`\Delta`,
    and

    .. math:: \theta_i \leftarrow \alpha \theta_i + (1 - \alpha) \theta.

    With one fragment, :math:`\tau = 0` and :math:`\alpha = 0`, this is
    :class:`~mlbench_core.aggregation.pytorch.local_steps.periodic.DiLoCoAggregation` every H-th
    call. It needs no
    :class:`~mlbench_core.aggregation.pytorch.local_steps.periodic.PeriodicAggregation`: call it
    after every step.

    Buffers, and parameters that were not given to :meth:`start`, are averaged and mixed with the
    first fragment, without an outer step. Such parameters take outer steps from then on. With
    ``quantize``, outer gradients travel as :func:`to_float4` makes them, in an all-gather, and
    every worker adds them up in the dtype of :math:`\theta`, at least float32.

    In an elastic run, each fragment has its own round, without a delay. The members of a round have
    taken the same number of steps, so they send the same fragment. A worker that joins receives
    :math:`\theta` of all fragments, their outer momentum and the number of steps. If a round is not
    committed, its fragment takes no outer step, and is mixed with :math:`\theta` all the same. The
    other fragments keep the progress of their workers.

    Attributes:
        period: As given.
        fragments: As given.
        delay: As given.
        mixing: As given.
        quantize: As given.
        outer_optimizer: The outer optimizer; a change of its learning rate takes effect at the next
            merge.

    Args:
        outer_optimizer: As in
            :class:`~mlbench_core.aggregation.pytorch.local_steps.periodic.DiLoCoAggregation`.
        world_size: Number of workers; None takes that of the process group.
        period: H, the number of steps from one message of a fragment to the next.
        fragments: P, at most H, so that no step starts messages of two fragments.
        delay: :math:`\tau`, the number of steps during which a message travels; less than H.
        mixing: :math:`\alpha`, the share of a worker's own weights, from 0 to 1.
        quantize: Send outer gradients with 4 bits per weight: a sign and an exponent of 3 bits.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        elastic: Averages over workers that may die or join; None for the fixed workers of the
            process group.

    Raises:
        TypeError: A number has the wrong type, or ``outer_optimizer`` does not create a torch
            optimizer.
        ValueError: A number is out of range, ``world_size`` is not the number of workers in the
            process group, or ``elastic`` is given with a delay or with ``quantize``.

    Example:
        >>> from functools import partial
        >>> weights = {"x": torch.zeros(1)}
        >>> sgd = partial(torch.optim.SGD, lr=1)
        >>> aggregation = StreamingDiLoCoAggregation(sgd, period=2, fragments=1, delay=1)
        >>> aggregation.start({"x": torch.nn.Parameter(weights["x"])})
        >>> for _ in range(3):
        ...     weights["x"] += 1
        ...     aggregation.aggregate(weights, "avg_world")
        >>> weights["x"]  # 2 was sent after the second step, and mixed with 3 after the third
        tensor([2.5000])

    References:
        A. Douillard et al.: Streaming DiLoCo with overlapping communication. arXiv:2501.18512
    """

    _selects_late = True
    _named_state = ("shared", "outer_state", "counts")

    def __init__(
        self,
        outer_optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
        world_size: int | None = None,
        *,
        period: int = 100,
        fragments: int = 4,
        delay: int = 5,
        mixing: float = 0.5,
        quantize: bool = False,
        process_group: Any = None,
        elastic: ElasticAverage | None = None,
    ) -> None:
        super().__init__(outer_optimizer, world_size, process_group=process_group, elastic=elastic)
        self.period = check_int("period", period)
        self.fragments = check_int("fragments", fragments)
        if self.fragments > self.period:
            raise ValueError(
                f"fragments must be at most period, {self.period}, "
                f"not {fragments}: take longer periods"
            )
        self.delay = check_delay(delay, self.period)
        check_finite_at_least_0("mixing", mixing)
        if mixing > 1:
            raise ValueError(
                f"mixing must be at most 1, not {mixing}: it is the share of a worker's own weights"
            )
        self.mixing = mixing
        self.quantize = quantize
        if elastic is not None and (self.delay or quantize):
            raise ValueError(
                "delay must be 0 and quantize must be False in an elastic run, not "
                f"{self.delay} and {quantize}: the workers commit a fragment in the step in which "
                "they send it, as it is; give delay=0 and leave out quantize"
            )
        self.takes_complex = self.takes_complex and not quantize
        self._counts: dict[str, int] = {}
        self._flights: list[_Fragment] = []
        # Of quantized outer gradients.
        self._bytes_before = self._bytes_after = 0

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the outer gradients' bytes over those sent; 1 before any quantized message."""
        return ratio_of(self._bytes_before, self._bytes_after)

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Make the function that aggregates a model's weights.

        Args:
            by_layer: False, because the message of a step is a fragment.

        Raises:
            ValueError: ``by_layer`` is true.
        """
        if by_layer:
            raise ValueError(
                "by_layer must be False, because each message is a fragment: set fragments instead"
            )
        return super().agg_model()

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Count a step, start the message of the fragment that is due, and merge the arriving one.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
            ValueError: A tensor does not have the shape of its shared weights.
        """
        check_average(op)
        for flight in self._flights:
            # A call may have other tensors, such as parameters outside the model.
            if not tensors.keys().isdisjoint({**flight.gradients, **flight.averages}):
                flight.left -= 1
        count_step(self._counts, tensors)
        due = self._due(tensors)
        if due and self._meet(tensors, max(self._counts[name] for name in tensors)):
            self._take_over(tensors)
            due = self._due(tensors)
        if due:
            self._send(due)
        arriving, traveling = [], []
        for flight in self._flights:
            if flight.left <= 0:
                arriving.append(flight)
            else:
                traveling.append(flight)
        self._flights = traveling
        for flight in arriving:
            flight.arrive()
            self._merge(flight, tensors)

    def _take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Count and send the tensors as the donor, whose state was loaded during this step."""
        # The donor counted this step before it sent its state. Of a frozen parameter, no state has
        # a count.
        steps = max((self._counts[name] for name in tensors if name in self._counts), default=0)
        for name in tensors:
            self._counts.setdefault(name, steps)
        # The tensors require no gradient here. So those that travel are those in the donor's state.
        self.layout.note({name: x for name, x in tensors.items() if not is_buffer(name)})

    def _due(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors whose fragment is sent in this step."""
        # The order of the shared weights is saved with them, and
        # freezing a layer does not change it.
        offsets = {}
        for position, name in enumerate(self._shared):
            # Parameter j is in fragment p = j mod P, which is sent if t = floor(p H / P) mod H.
            offsets[name] = position % self.fragments * self.period // self.fragments
        due = {}
        for name, tensor in tensors.items():
            if self._counts[name] % self.period == offsets.get(name, 0):
                due[name] = tensor
        return due

    def _send(self, due: Mapping[str, Tensor]) -> None:
        """Start the messages of tensors."""
        pending: list[Callable[[], None]] = []
        if self.delay:
            # The comparison of new parameters travels with the fragment, and is waited for with it.
            due = self._traveling(due, pending)
        else:
            due = self._traveling(due)
        gradients, averages = {}, {}
        for name, theta_i in due.items():
            if name in self._shared:
                gradients[name] = self._difference(name, theta_i)
            else:
                averages[name] = theta_i.clone()
        flight = _Fragment(self.delay, gradients, averages, pending=pending)
        self._flights.append(flight)
        if self.elastic is not None:
            with self._counting_bytes_of(self.elastic):
                self.elastic.exchange(gradients, averages)
            return
        plain = [*averages.values()]
        if self.quantize:
            # A worker alone rounds too, so that it can show the effect of rounding.
            for kind in by_dtype_and_device(filter(torch.numel, gradients.values())):
                flight.pending.append(self._start_gather(kind))
        else:
            plain = [*gradients.values(), *plain]
        with self._counting_bytes_of(self._all_reduce):
            flight.pending += self._all_reduce.start_averages(
                plain, Tensor.copy_, overlapped=self.delay > 0
            )

    def _start_gather(self, kind: Sequence[Tensor]) -> Callable[[], None]:
        """Start to gather quantized tensors.

        Return the function that waits and replaces them by their averages.
        """
        message = torch.cat(list(map(to_float4, kind)))
        gathered, work = message[None], None
        if self.world_size > 1:
            # Gloo's all_gather needs tensors in the host's memory, NCCL's on the GPU.
            if process_groups.backend(self.group) == "gloo":
                message = message.cpu()
            else:
                message = process_groups.get_backend_tensor(message, self.group)
            gathered = message.new_empty(self.world_size, len(message))
            work = process_groups.dist.all_gather(
                list(gathered), message, group=self.group, async_op=True
            )
            self._count("all_gather", self.world_size, message.nbytes, overlapped=self.delay > 0)
            self._bytes_before += nbytes_of(kind)
            self._bytes_after += len(message)

        def receive() -> None:
            if work is not None:
                work.wait()
            start = 0
            for tensor in kind:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                end = start + wide.itemsize + packed_bytes(tensor.numel(), 4)
                rows = gathered[:, start:end].to(tensor.device)
                # Added in the order of ranks, because sums in different
                # orders differ in their last bits.
                total = torch.zeros(tensor.numel(), dtype=wide, device=tensor.device)
                for row in rows:
                    total += from_float4(row, tensor.numel(), wide)
                tensor.copy_((total / self.world_size).view(tensor.shape))
                start = end

        return receive

    def _merge(self, flight: _Fragment, tensors: Mapping[str, Tensor]) -> None:
        """Take the outer steps of an arrived fragment, and mix the result into the tensors."""
        self._take_outer_step(flight.gradients)
        for name, average in flight.averages.items():
            self._share(name, average)
        for name in (*flight.gradients, *flight.averages):
            if name in tensors:
                merged = self._shared.get(name, flight.averages.get(name))
                assert merged is not None
                merged = merged.to(tensors[name].device)
                own = tensors[name].to(merged)
                tensors[name].copy_(merged.lerp(own, self.mixing))

    def _arrive_all(self) -> list[_Fragment]:
        """Wait for messages on their way; return the flights, which are merged at their time."""
        for flight in self._flights:
            flight.arrive()
        return self._flights

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without messages on their way, which belong to this process."""
        self._arrive_all()
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return DiLoCo's state, the counters by name, and the averages that are not merged yet.

        The averages are the same on all workers.
        """
        if not self._counts:
            return super().state_dict()
        flights: list[dict[str, Any]] = []
        for f in self._arrive_all():
            flights.append({"left": f.left, "gradients": f.gradients, "averages": f.averages})
        counts = self._without_frozen(self._counts)
        return {**super().state_dict(), "counts": counts, "flights": flights}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        own = ("counts", "flights")
        base = {key: value for key, value in state_dict.items() if key not in own}
        super().load_state_dict(base)
        # The other workers count on this worker's part of every message.
        self._arrive_all()
        self._counts = counts_by_plain_name(state_dict.get("counts", {}))
        self.layout = Layout(traveled=set(self._counts))
        self._flights = []
        for flight in copy.deepcopy(state_dict.get("flights", [])):
            gradients = by_plain_name(flight["gradients"])
            averages = by_plain_name(flight["averages"])
            self._flights.append(_Fragment(int(flight["left"]), gradients, averages))


def to_float4(values: Tensor) -> Tensor:
    r"""Return values as 4-bit numbers with a sign and an exponent of 3 bits.

    With :math:`s` the largest size, a number is :math:`\pm s \{0, 2^{-6}, 2^{-5}, \ldots, 1\}`, the
    nearest one.

    Args:
        values: Any shape, not empty.

    Returns:
        uint8: :math:`s` in the dtype of the values, at least float32, and half a byte per value.

    Example:
        >>> from_float4(to_float4(torch.tensor([8.0, -3.5, 2.5, 0.01])), 4, torch.float32)
        tensor([ 8., -4.,  2.,  0.])
    """
    flat = values.reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
    scale = flat.abs().amax()
    levels = _levels(flat)
    # Zero over zero is NaN. Its code is that of the scale, which is 0.
    codes = torch.bucketize(flat.abs() / scale, (levels[1:] + levels[:-1]) / 2)
    return as_bytes(scale, pack_codes(codes.to(torch.int32) + 8 * (flat < 0), 4))


def from_float4(message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the values in a message of :func:`to_float4`.

    Args:
        message: The message.
        count: Number of values.
        dtype: That of the scale.
    """
    scale = from_bytes(message, 0, 1, dtype)
    codes = unpack_codes(message[dtype.itemsize :], count, 4).long()
    levels = _levels(scale)
    return torch.cat([levels, -levels])[codes] * scale


def _levels(like: Tensor) -> Tensor:
    """Return the sizes of 4-bit numbers of scale 1."""
    sizes = [0, *(2.0**-e for e in range(6, -1, -1))]
    return torch.tensor(sizes, dtype=like.dtype, device=like.device)
