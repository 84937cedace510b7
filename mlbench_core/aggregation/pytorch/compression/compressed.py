"""Code shared by the aggregations that send less than the whole gradients.

It has the base classes, :func:`ratio_of` for compression ratios, :func:`recall` for error memories,
:func:`orthonormal_rows` with its part :func:`normalize_` for approximations of low rank, and
:func:`flush_tiny_` for values near the denormal numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    AggregationFunction,
    Denominator,
    UnknownOperationError,
)
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport.messages import (
    as_bytes,
    divide,
    from_bytes,
    nbytes_of,
)
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["CompressedAggregation", "LossyAggregation"]


class LossyAggregation(Aggregation):
    r"""Base class of aggregations that send less than the whole gradients.

    They may remember the rest.

    The error memory :math:`e` of a tensor is the part that this worker has not sent yet, kept at
    least in float32. If no worker has a gradient of a parameter, the parameter is skipped, and its
    memory stays. Only gradients (or steps) can be sent in this way. Weights would lose the part
    that is not sent.

    Args:
        uncompressed: Averages the tensors that are not compressed over the same workers.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
    """

    def __init__(self, uncompressed: AllReduceAggregation, use_cuda: bool = False) -> None:
        super().__init__(use_cuda=use_cuda, process_group=uncompressed.group)
        self._uncompressed = uncompressed
        self._memory: dict[str, Tensor] = {}
        self._original_bytes = 0
        self._compressed_bytes = 0

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the bytes of the gradients over those sent for them; 1 before any message."""
        return ratio_of(self._original_bytes, self._compressed_bytes)

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Raise an error, because compression would destroy weights.

        Raises:
            UnknownOperationError: Always. It is a ValueError and a NotImplementedError.
        """
        raise UnknownOperationError(
            f"{type(self).__name__} compresses gradients and would destroy weights: build the "
            "optimizer with agg_grad=True, or average weights with AllReduceAggregation"
        )

    def memory(self, name: str) -> Tensor | None:
        """Return a tensor's error memory, the part not sent yet by this worker; None without one.

        Args:
            name: The tensor's name.
        """
        return self._memory.get(name)

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return the error memories."""
        return [self._memory]

    def _aggregate_alone(
        self, parameters: Mapping[str, Tensor], op: str, denom: Denominator | None
    ) -> None:
        """Aggregate the gradients of a single worker.

        Missing gradients take part as they do with several workers, so that the random generator
        draws as often.
        """
        if any(parameter.grad is None for parameter in parameters.values()):
            self._aggregate_some_gradients(parameters, op, denom)
        else:
            super()._aggregate_alone(parameters, op, denom)

    def _average_uncompressed(self, tensors: Iterable[Tensor], divisor: Denominator) -> None:
        """Replace tensors by their sum over the workers divided by a number, in place."""
        before = self._uncompressed.bytes_sent
        self._uncompressed.average(tensors, divisor)
        sent_bytes = self._uncompressed.bytes_sent - before
        self.bytes_sent += sent_bytes
        self.last_bytes += sent_bytes

    def _count_compression(
        self, tensors: Iterable[Tensor], extra: Iterable[Tensor], bytes_before: int
    ) -> None:
        """Add to the counts of bytes from which :attr:`compression_ratio` is computed.

        Args:
            tensors: The tensors that were compressed.
            extra: Those that traveled with them as they are, and do not count.
            bytes_before: :attr:`bytes_sent` before the first message.
        """
        # One worker alone sends nothing, and its ratio stays 1.
        if self.world_size > 1:
            # These are two calls of nbytes_of, written out so that a step of PowerSGD goes through
            # fewer files, as a test of tools/trace_step.py demands.
            self._original_bytes += sum(tensor.nbytes for tensor in tensors)
            extra_bytes = sum(tensor.nbytes for tensor in extra)
            self._compressed_bytes += self.bytes_sent - bytes_before - extra_bytes


class CompressedAggregation(LossyAggregation):
    r"""Base class of lossy aggregations that compress every tensor.

    It passes all tensors to :meth:`_aggregate_kind`, in groups of one dtype and device. Extra
    tensors travel uncompressed at the end of the first message of their device, because on a slow
    network a message of a few bytes costs as much time as a longer one. An error memory has the
    shape of its tensor.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.
    """

    takes_complex = False

    _named_state: ClassVar[tuple[str, ...]] = ("memory",)
    _own_state: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(
        self, use_cuda: bool = False, *, world_size: int | None = None, process_group: Any = None
    ) -> None:
        uncompressed = AllReduceAggregation(
            world_size, use_cuda=use_cuda, process_group=process_group
        )
        super().__init__(uncompressed, use_cuda)

    def aggregate(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Replace every tensor by the workers' common result, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"`` or ``"avg_custom"``.
            denom: For ``"avg_custom"``, the divisor of sums over workers: a positive number or a
                tensor with one element, the same on every worker.
            extra: Tensors to average as they are.

        Raises:
            UnknownOperationError: ``op`` is neither.
            ValueError: ``denom`` is missing or not positive, or a tensor does not fit its error
                memory.
            TypeError: A tensor holds no real floating-point numbers.
        """
        divisor = self._divisor(op, denom)
        # A message holds tensors of one dtype and device.
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.numel() > 0:
                if not tensor.is_floating_point():
                    raise TypeError(
                        f"{name!r} has dtype {tensor.dtype}; only real "
                        "floating-point tensors can be compressed"
                    )
                kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
        waiting: dict[torch.device, list[Tensor]] = {}
        for tensor in extra:
            waiting.setdefault(tensor.device, []).append(tensor)
        bytes_before = self.bytes_sent
        for (_, device), kind in kinds.items():
            riders: list[Tensor] = []
            # One worker alone sends no message with which they could travel.
            if self.world_size > 1:
                riders = waiting.pop(device, [])
            self._aggregate_kind(kind, divisor, riders)
        if waiting:
            self._average_uncompressed(chain(*waiting.values()), divisor)
        self._count_compression(tensors.values(), extra, bytes_before)

    @abstractmethod
    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        """Aggregate tensors of one dtype and device, none of them empty, in place.

        Args:
            tensors: The tensors by name.
            divisor: The divisor of sums over workers.
            extra: Tensors on the same device to average as they are, for the last gather.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the error memory by parameter name under ``"memory"``; empty without one."""
        if not self._memory:
            return {}
        return {"memory": dict(self._memory)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state clears the memory.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("memory",))
        self._memory = copies_by_plain_name(state_dict.get("memory", {}))

    def _gather(self, message: Tensor, divisor: Denominator, extra: Sequence[Tensor]) -> Tensor:
        """Return every worker's message, shape (k, length), by rank; one worker sends nothing.

        Extra tensors travel at the end of the message. They are replaced by their sum over the
        workers, divided by the divisor.
        """
        if self.world_size > 1:
            self._count("all_gather", self.world_size, nbytes_of([message, *extra]))
        return self._start_gather(message, divisor, extra, is_async=False)()

    def _start_gather(
        self, message: Tensor, divisor: Denominator, extra: Sequence[Tensor], is_async: bool
    ) -> Callable[[], Tensor]:
        """Begin :meth:`_gather`, which is not counted; the result waits for the messages."""
        if self.world_size == 1:
            return lambda: message[None]
        whole = message
        if extra:
            whole = as_bytes(message, *extra)
        sent = self._sendable(whole)
        # The messages arrive in the rows of one tensor, so they need not
        # be copied together afterward.
        rows = sent.new_empty(self.world_size, sent.numel())
        work = process_groups.dist.all_gather(list(rows), sent, group=self.group, async_op=is_async)

        def receive() -> Tensor:
            if work is not None:
                work.wait()
            gathered = rows.to(message.device)
            start = len(message)
            for tensor in extra:
                theirs = [from_bytes(row, start, tensor.numel(), tensor.dtype) for row in gathered]
                tensor.copy_(divide(torch.stack(theirs).sum(dim=0), divisor).view(tensor.shape))
                start += tensor.nbytes
            return gathered[:, : len(message)]

        return receive

    def _sendable(self, message: Tensor) -> Tensor:
        """Return a message in the host's memory for Gloo's gathers, and on the GPU for NCCL's."""
        if process_groups.backend(self.group) == "gloo":
            return message.cpu()
        return process_groups.get_backend_tensor(message, self.group)


def ratio_of(original_bytes: int, sent_bytes: int) -> float:
    """Return a compression ratio; 1 before anything was sent."""
    if not sent_bytes:
        return 1.0
    return original_bytes / sent_bytes


def recall(memory: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the tensor that a memory has under a name; create it with zeros at first.

    Args:
        memory: The memory. The result is the tensor in it, so in-place changes of the result are
            remembered.
        name: The name.
        like: A tensor with the shape and the device of the result.

    Returns:
        A tensor at least in float32, because in half precision many small errors would not add up.

    Raises:
        ValueError: The memory has a tensor of another shape under this name.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    remembered = memory.get(name)
    if remembered is None:
        remembered = torch.zeros(like.shape, dtype=dtype, device=like.device)
    elif remembered.shape != like.shape:
        raise ValueError(
            f"the memory of {name!r} has shape {tuple(remembered.shape)}, its gradient "
            f"{tuple(like.shape)}: the state was loaded from a run with another model"
        )
    # The model may have moved to another device or dtype since the last
    # call or since the checkpoint.
    memory[name] = remembered = remembered.to(device=like.device, dtype=dtype)
    return remembered


def orthonormal_rows(rows: Tensor) -> Tensor:
    r"""Return an orthonormal basis of a matrix's rows, with zeros for dependent rows.

    It is computed by Gram-Schmidt, from the first row to the last:

    .. math:: q_i = \frac{(I - Q_{<i}^\top Q_{<i})\, p_i}{\lVert (I - Q_{<i}^\top Q_{<i})\, p_i
      \rVert}

    Every row is projected and normalized three times. If a row depends on those before it, the
    first projection leaves only rounding errors, which still have a part in the span of the rows
    before. The next projection removes this part. A row that the last projection still shortens by
    more than half lies in that span, and becomes zero.

    The vectors are rows and not columns, because a row is contiguous in memory, which is faster.

    Args:
        rows: Shape (r, n), float32 or float64, r and n at least 1. It does not change.

    Returns:
        Shape (r, n). Values that are not finite stay so, so that the caller can see an overflow.

    Example:
        >>> orthonormal_rows(torch.tensor([[2.0, 0.0], [0.0, 0.0], [3.0, 5.0]]))
        tensor([[1., 0.],
                [0., 0.],
                [0., 1.]])

    References:
        L. Giraud, J. Langou, M. Rozloznik, E. van den Eshof: Rounding error analysis of the
        classical Gram-Schmidt orthogonalization process. Numerische Mathematik 101, 2005 (two
        projections suffice for independent rows). Its use in compression: T. Vogels, S. P.
        Karimireddy, M. Jaggi: PowerSGD, arXiv:1905.13727.
    """
    # Each row is scaled to a largest value of 1. Otherwise the squares of huge values overflow, and
    # those of tiny ones become 0.
    peak = rows.abs().amax(dim=1, keepdim=True)
    rows = rows / torch.where(peak == 0, 1, peak)
    for i, row in enumerate(rows):
        norm = normalize_(row)
        if i == 0:
            continue
        for _ in range(3):
            row -= (rows[:i] @ row) @ rows[:i]
            norm = normalize_(row)
        # A unit vector that the last projection shortens by more than half lies in
        # the span of the rows before.
        row.masked_fill_(norm < 0.5, 0)
    return rows


def normalize_(vector: Tensor) -> Tensor:
    """Divide a vector by its norm, in place, unless that is zero; return the norm."""
    norm = torch.linalg.vector_norm(vector)
    vector /= torch.where(norm == 0, 1, norm)
    return norm


def flush_tiny_(values: Tensor) -> Tensor:
    """Replace values near the denormal numbers by 0, in place, and return the tensor.

    A product with a denormal number may be rounded to twice its value, and a matrix of them would
    be sent as a larger one. A compression that sends zeros instead leaves out no more than there
    was.

    Example:
        >>> flush_tiny_(torch.tensor([1.0, -1e-37, torch.nan]))
        tensor([1., 0., nan])
    """
    return values.masked_fill_(values.abs() < 2**10 * torch.finfo(values.dtype).tiny, 0)
