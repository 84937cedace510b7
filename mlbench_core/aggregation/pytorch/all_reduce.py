"""The average over all workers, uncompressed."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import (
    AVG_CUSTOM,
    AVG_WORLD,
    Aggregation,
    AggregationFunction,
    Denominator,
)
from mlbench_core.aggregation.pytorch.transport import pairwise
from mlbench_core.aggregation.pytorch.transport.buckets import BUCKET_SIZE_BYTES
from mlbench_core.aggregation.pytorch.transport.messages import (
    as_real,
    by_dtype_and_device,
    divide,
    pack,
)
from mlbench_core.aggregation.pytorch.transport.names import Parameters
from mlbench_core.aggregation.pytorch.transport.shared_memory import SharedMemorySum
from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "AllReduceAggregation",
    "Flight",
    "Transfer",
    "check_world_size",
]

COMM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# From this size on, a separate message costs less time than the copies into a common one and
# back. It is not smaller, because each message also waits for the round trips of the network.
LARGE_BYTES = 8 << 20


@dataclass
class Transfer:
    """A flat message on its way.

    Attributes:
        message: The tensor that receives the sum.
        sent: The tensor that is sent: the message, or a copy in another dtype or on another device.
        work: torch's handle.
    """

    message: Tensor
    sent: Tensor
    work: Any

    @property
    def size_bytes(self) -> int:
        """Return the bytes that this worker handed to the collective."""
        return self.sent.numel() * self.sent.element_size()


@dataclass
class Flight:
    """Messages that travel while the workers go on training.

    Attributes:
        pending: Functions that each wait for one message and write its result; empty once all have
            arrived.
    """

    pending: list[Callable[[], None]] = field(default_factory=list, kw_only=True)

    @naming_lost_workers()
    def arrive(self) -> None:
        """Wait for the messages."""
        for receive in self.pending:
            receive()
        self.pending.clear()


class AllReduceAggregation(Aggregation):
    r"""Average over all workers, uncompressed.

    With :math:`x_i` the tensor of worker :math:`i` of :math:`k`, every worker's tensor becomes

    .. math:: \frac{1}{d} \sum_{i=1}^{k} x_i,

    where :math:`d = k` for ``"avg_world"`` and :math:`d` is ``denom`` for ``"avg_custom"``.

    A tensor of at least 8 MiB travels alone, out of its own memory and back into it, without a
    copy. The smaller ones of the same dtype and device travel in one flat message, in their own
    dtype, and are written back into their own memory, whatever their strides. With
    ``by_layer=True``, every tensor travels alone. One worker alone sends nothing. If all workers
    run on one machine and use Gloo, averages of CPU tensors travel by sends and receives instead of
    Gloo's all-reduce, unless ``overlap`` or ``shared_memory`` is True. The result is the same bit
    for bit. Received parts need up to 64 MiB during the call; see
    :mod:`mlbench_core.aggregation.pytorch.transport.pairwise`. Tensors must be on a CPU on all
    workers, or on a GPU on all workers. After an error in an aggregation, such as a lost worker,
    the values of its tensors are undefined.

    Args:
        world_size: Number of workers; None takes that of the process group.
        divide_before: Divide before the sum instead of after it, so that sums of half-precision
            numbers stay in range.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        overlap: Let an optimizer send gradients in buckets while the backward pass still computes
            others. ``backward()`` returns when all of them are averages. Calls of the functions
            that :meth:`agg_grad` and :meth:`agg_model` return do not change. See
            :mod:`mlbench_core.aggregation.pytorch.transport.overlap`.
        comm_dtype: The dtype in which tensors travel, for example ``torch.bfloat16``; None for each
            tensor's own. A message that is converted is divided before it is sent, so that its sum
            stays in range. If workers send half precision, all get the same values, rounded to it.
        bucket_size_bytes: With ``overlap``, a bucket is sent when it holds this number of bytes; 0
            sends each gradient in its own message.
        shared_memory: Sum through memory that the workers share instead of the backend's
            all-reduce. All workers must run on one machine, with their tensors in its memory. The
            sums of two workers equal the backend's to the last bit, those of more workers to
            rounding. Every worker must make its aggregations in the same order. See
            :mod:`mlbench_core.aggregation.pytorch.transport.shared_memory`.
        process_group: Average over the workers of a subgroup, from ``torch.distributed.new_group``;
            None for all. ``world_size`` is then their number. Each group is a separate world: its
            result is that of a run of its workers alone.

    Raises:
        TypeError: ``overlap`` or ``shared_memory`` is not a bool, or ``world_size`` is not an
            integer.
        ValueError: ``world_size`` is not the number of workers in the process group, this process
            does not belong to it, ``comm_dtype`` is not a floating-point type that travels, or
            ``bucket_size_bytes`` is negative.
        BackendError: ``shared_memory`` is asked for, but the workers share none.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = model(torch.ones(1, 2)).sum().backward()
        >>> aggregate = AllReduceAggregation(world_size=1).agg_grad()
        >>> aggregate(model, AVG_CUSTOM, denom=2)
        >>> model.weight.grad
        tensor([[0.5000, 0.5000]])
    """

    def __init__(
        self,
        world_size: int | None = None,
        divide_before: bool = False,
        use_cuda: bool = False,
        *,
        overlap: bool = False,
        comm_dtype: torch.dtype | None = None,
        bucket_size_bytes: int = BUCKET_SIZE_BYTES,
        shared_memory: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        if not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True or False, not {overlap!r}")
        if comm_dtype is not None and comm_dtype not in COMM_DTYPES:
            raise ValueError(
                "comm_dtype must be None or one of "
                f"{', '.join(map(str, COMM_DTYPES))}, not {comm_dtype}"
            )
        check_world_size(world_size, self.group)
        self.divide_before = divide_before
        self.overlap = overlap
        self.comm_dtype = comm_dtype
        self.bucket_size_bytes = check_int("bucket_size_bytes", bucket_size_bytes, least=0)
        self.shared_memory = shared_memory
        self._is_by_layer = False
        self._shared: SharedMemorySum | None = None
        if shared_memory and self.world_size > 1:
            # Workers meet here and not at the first message, so that a machine without shared
            # memory fails early.
            self._shared = SharedMemorySum(self.group)

    def agg_grad(self, by_layer: bool = False) -> AggregationFunction:
        """Make the function that aggregates gradients; see :meth:`Aggregation.agg_grad`."""
        function = super().agg_grad()
        if by_layer:
            function = functools.partial(self._aggregate_by_layer, function)
        return function

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Make the function that aggregates weights; see :meth:`Aggregation.agg_model`."""
        function = super().agg_model()
        if by_layer:
            function = functools.partial(self._aggregate_by_layer, function)
        return function

    def _aggregate_by_layer(
        self,
        function: AggregationFunction,
        model: Parameters,
        op: str,
        denom: Denominator | None = None,
    ) -> None:
        """Let a function send every tensor in a separate message, one right after another."""
        self._is_by_layer = True
        try:
            function(model, op, denom)
        finally:
            self._is_by_layer = False

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Replace every tensor by the sum over workers divided by k or ``denom``, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"`` or ``"avg_custom"``.
            denom: Divisor for ``"avg_custom"``: a positive number or a tensor with one element, the
                same on every worker.
            extra: More tensors to average, after the others.

        Raises:
            UnknownOperationError: ``op`` is neither. It is a ValueError and a NotImplementedError.
            ValueError: ``denom`` is missing or not positive.
        """
        self.average([*tensors.values(), *extra], self._divisor(op, denom))

    def average(self, tensors: Iterable[Tensor], divisor: Denominator) -> None:
        """Replace every tensor by the sum over workers divided by a number, in place.

        Args:
            tensors: In the same order with the same shapes and dtypes on every worker.
            divisor: A positive number or a tensor with one element, the same on every worker.
        """
        # A message has tensors of one dtype and device. An empty tensor needs no message. This is
        # by_dtype_and_device, written out so that a step goes through fewer files, as a test of
        # tools/trace_step.py demands. For the same reason, _average_kind does not call pack.
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for kind in kinds.values():
            if self.world_size > 1:
                self._average_kind(kind, divisor)
            # An average over one worker is the tensor itself.
            elif isinstance(divisor, Tensor) or divisor != 1:
                for tensor in kind:
                    divide(tensor, divisor)

    def divides_early(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of a dtype are divided before they are sent.

        This is so on request, and if the message is converted.

        Args:
            dtype: Of the tensors; complex numbers travel as pairs of real ones.
        """
        return self.divide_before or self.comm_dtype not in (None, dtype.to_real())

    def start(self, message: Tensor, overlapped: bool = False) -> Transfer:
        """Begin to sum a flat message over the workers; do not touch it before :meth:`finish`.

        Args:
            message: The message.
            overlapped: True if training goes on before :meth:`finish`; for the record of
                collectives only.
        """
        sent = process_groups.get_backend_tensor(self._converted(message), self.group)
        if self.shared_memory:
            op = "shared_memory_sum"
            work: Any = self._shared_sum().start(sent)
        else:
            op = "all_reduce"
            work = process_groups.dist.all_reduce(sent, group=self.group, async_op=True)
        self._count(op, self.world_size, sent.nbytes, overlapped)
        return Transfer(message, sent, work)

    def _converted(self, message: Tensor) -> Tensor:
        """Return a message in the dtype in which it travels, without a copy if that is its own."""
        # Complex numbers travel as pairs of real ones, because comm_dtype is a real type.
        if self.comm_dtype is None:
            return message
        return as_real(message).to(self.comm_dtype)

    def _shared_sum(self) -> SharedMemorySum:
        """Return the sum through shared memory; renew it in a copy or in a new process group."""
        if self._shared is None or not self._shared.is_of_this_group():
            self._shared = SharedMemorySum(self.group)
        return self._shared

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; shared memory belongs to this process and is left out."""
        return {**self.__dict__, "_shared": None}

    def finish(self, transfer: Transfer) -> None:
        """Wait until the sum is in the message. On a GPU the stream waits, not the host."""
        transfer.work.wait()
        self._write_back(transfer.sent, transfer.message)

    def _write_back(self, sent: Tensor, message: Tensor) -> None:
        """Copy the result into the message, if a converted or moved copy of it was sent."""
        if sent.data_ptr() == message.data_ptr():
            return
        # A converted message of complex numbers has traveled as pairs of real ones.
        if not sent.is_complex():
            message = as_real(message)
        message.copy_(sent)

    def start_averages(
        self,
        tensors: Iterable[Tensor],
        write: Callable[[Tensor, Tensor], Any],
        overlapped: bool = False,
    ) -> list[Callable[[], None]]:
        """Begin to average tensors over the workers, in one message for each dtype and device.

        Args:
            tensors: Of any shapes and strides. Their values are copied before this returns.
            write: Gets a tensor and its average, of the same shape and dtype, once the average has
                arrived.
            overlapped: See :meth:`start`.

        Returns:
            Functions for :attr:`Flight.pending`, one for each message. One worker alone sends none.
        """
        if self.world_size == 1:
            return []
        kinds = by_dtype_and_device(tensors)
        return [self._start_average(kind, write, overlapped) for kind in kinds]

    def _start_average(
        self, kind: Sequence[Tensor], write: Callable[[Tensor, Tensor], Any], overlapped: bool
    ) -> Callable[[], None]:
        message = pack(kind)
        early = self.divides_early(message.dtype)
        if early:
            divide(as_real(message), self.world_size)
        transfer = self.start(message, overlapped)

        def receive() -> None:
            self.finish(transfer)
            if not early:
                divide(as_real(message), self.world_size)
            _deliver(message, kind, write)

        return receive

    def _average_kind(self, tensors: Sequence[Tensor], divisor: Denominator) -> None:
        """Sum tensors of one dtype and device over the workers and divide them, in place."""
        # Half precision has room for an average over many workers, but not for their sum.
        early = self.divides_early(tensors[0].dtype)
        large_bytes = None
        if self._is_by_layer:
            # From one byte on a tensor counts as large, and large ones travel alone.
            large_bytes = 1
        groups = messages_of(tensors, large_bytes)
        # All messages are packed before one is sent, because two tensors may share memory.
        messages = []
        for group, own in groups:
            if own is None:
                messages.append(torch.cat([tensor.reshape(-1) for tensor in group]))
            else:
                messages.append(own)
        # Complex numbers are divided as pairs of real ones. A complex division would turn infinite
        # numbers into nan.
        numbers = messages
        if tensors[0].is_complex():
            numbers = list(map(as_real, messages))
        late_divisor: Denominator | None = divisor
        if early:
            for flat in numbers:
                divide(flat, divisor)
            late_divisor = None
        if self._goes_directly(tensors[0]):
            self._average_directly(numbers, late_divisor)
        else:
            self._average_by_backend(numbers, late_divisor)
        for (group, own), message in zip(groups, messages, strict=True):
            if own is None:
                _deliver(message, group, Tensor.copy_)

    def _goes_directly(self, tensor: Tensor) -> bool:
        """Return whether the workers average by sends and receives; the same on all workers."""
        return not self.shared_memory and pairwise.suits(tensor, self.group)

    def _average_directly(self, messages: Sequence[Tensor], divisor: Denominator | None) -> None:
        sent = list(map(self._converted, messages))
        for tensor in sent:
            self._count("all_reduce", self.world_size, tensor.nbytes)
        pairwise.average(sent, divisor, self.group)
        for message, tensor in zip(messages, sent, strict=True):
            self._write_back(tensor, message)

    def _average_by_backend(self, messages: Sequence[Tensor], divisor: Denominator | None) -> None:
        # The backend gets all of them at once, and need not wait for this thread between two.
        ahead = len(messages)
        if self.shared_memory:
            # Memory is shared only for two, so that it does not grow to the size of the model.
            ahead = 2
        transfers = list(map(self.start, messages[:ahead]))
        for i, message in enumerate(messages):
            self.finish(transfers[i])
            if i + ahead < len(messages):
                transfers.append(self.start(messages[i + ahead]))
            if divisor is not None:
                divide(message, divisor)


def _deliver(
    message: Tensor, tensors: Sequence[Tensor], write: Callable[[Tensor, Tensor], Any]
) -> None:
    """Call a function with each tensor and its part of a flat message, in the tensor's shape."""
    # With Tensor.copy_ it is unpack of transport/messages.py; see AllReduceAggregation.average.
    parts = message.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        write(tensor, part.view(tensor.shape))


def messages_of(
    tensors: Sequence[Tensor], large_bytes: int | None = None
) -> list[tuple[list[Tensor], Tensor | None]]:
    """Distribute tensors of one dtype and device over messages.

    The layout depends on the tensors' sizes alone, so that it is the same on all workers.

    Args:
        tensors: Of any strides; two of them may share memory.
        large_bytes: From this size on, a tensor is large; None for ``LARGE_BYTES``.

    Returns:
        The large tensors one by one, then the small ones together. Each group comes with the flat
        view of its memory that can be sent as it is. This view is None if the group must be packed.

    Example:
        >>> tensors = [torch.zeros(3), torch.zeros(20, 10), torch.zeros(20, 30).t(), torch.zeros(2)]
        >>> groups = messages_of(tensors, large_bytes=800)
        >>> [([tuple(t.shape) for t in group], own is not None) for group, own in groups]
        [([(20, 10)], True), ([(30, 20)], False), ([(3,), (2,)], False)]
    """
    if large_bytes is None:
        large_bytes = LARGE_BYTES
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    small: list[Tensor] = []
    groups: list[tuple[list[Tensor], Tensor | None]] = []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() < large_bytes:
            small.append(tensor)
            continue
        # Messages have the logical order of the elements, which is that of the memory only if it is
        # contiguous. A sum in place would change the values of another tensor in the same memory.
        # Torch conjugates and negates lazily, so the memory of such a tensor has other numbers.
        is_lazy = tensor.is_conj() or tensor.is_neg()
        is_shared = users[tensor.untyped_storage().data_ptr()] > 1
        own = None
        if tensor.is_contiguous() and not is_lazy and not is_shared:
            own = tensor.detach().view(-1)
        groups.append(([tensor], own))
    if small:
        groups.append((small, None))
    return groups


def check_world_size(world_size: int | None, group: Any = None) -> int:
    """Check a number of workers against the process group.

    Args:
        world_size: Number of workers that the caller expects; None for the actual number.
        group: The process group; None for that of all workers.

    Returns:
        The number of workers; 1 without a process group.

    Raises:
        TypeError: ``world_size`` is not an integer.
        ValueError: It is not the actual number of workers.

    Example:
        >>> check_world_size(None)
        1
    """
    actual = process_groups.world_size(group)
    if world_size is None:
        return actual
    try:
        world_size = operator.index(world_size)
    except TypeError:
        raise TypeError(f"world_size must be an integer or None, not {world_size!r}") from None
    if world_size != actual:
        there = "there is 1 process"
        if process_groups.is_distributed():
            there = f"the process group has {actual} workers"
        raise ValueError(
            f"world_size is {world_size}, but {there}: enter initialize_backends first and give "
            "the world_size it yields, or None"
        )
    return world_size
