"""Base classes of the aggregations that send less than the whole gradients."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import (
    BOOKKEEPING,
    Aggregation,
    AggregationFunction,
    Denominator,
    UnknownOperationError,
)
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport.messages import as_bytes, divide, from_bytes
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, check_keys
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["CompressedAggregation", "LossyAggregation"]


class LossyAggregation(Aggregation):
    r"""Base class of aggregations that send less than the whole gradients and may remember the rest.

    The error memory :math:`e` of a tensor is the part that this worker has not sent yet, kept at least in float32. If
    no worker has a gradient of a parameter, the parameter is skipped, and its memory stays. Only gradients (or steps)
    can be sent in this way. Weights would lose the part that is not sent.

    Args:
        uncompressed: Averages the tensors that are not compressed, such as bookkeeping, over the same workers.
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
        """Return the bytes of the gradients over those sent for them, without bookkeeping; 1 before any message."""
        return self._original_bytes / self._compressed_bytes if self._compressed_bytes else 1.0

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Raise an error, because compression would destroy weights.

        Raises:
            UnknownOperationError: Always. It is a ValueError and a NotImplementedError.
        """
        raise UnknownOperationError(
            f"{type(self).__name__} compresses gradients and would destroy weights: build the optimizer with "
            "agg_grad=True, or average weights with AllReduceAggregation"
        )

    def memory(self, name: str) -> Tensor | None:
        """Return a tensor's error memory, the part that this worker has not sent yet; None without one.

        Args:
            name: The tensor's name.
        """
        return self._memory.get(name)

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return all mappings from names to remembered values. The values of a skipped tensor must not change."""
        return [self._memory]

    def _aggregate_alone(self, parameters: Mapping[str, Tensor], op: str, denom: Denominator | None) -> None:
        """Aggregate the gradients of a single worker.

        Missing gradients take part as they do with several workers, so that the random generator draws as often.
        """
        if any(parameter.grad is None for parameter in parameters.values()):
            self._aggregate_some_gradients(parameters, op, denom)
        else:
            super()._aggregate_alone(parameters, op, denom)

    def _aggregate_some_gradients(self, parameters: Mapping[str, Tensor], op: str, denom: Denominator | None) -> None:
        """Aggregate, then restore the memory of tensors for which no worker had a gradient."""
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        before = [
            copy.deepcopy({name: remembered[name] for name in missing if name in remembered})
            for remembered in self._remembered_by_name()
        ]
        super()._aggregate_some_gradients(parameters, op, denom)
        skipped = [name for name in missing if parameters[name].grad is None]
        for remembered, kept in zip(self._remembered_by_name(), before, strict=True):
            for name in skipped:
                if name not in kept:
                    remembered.pop(name, None)
                elif isinstance(kept[name], Tensor):
                    # In place, because a state_dict() that the caller holds shares the tensor.
                    remembered[name].copy_(kept[name])
                else:
                    remembered[name] = kept[name]

    def _count_compression(self, original_bytes: int, compressed_bytes: int) -> None:
        """Add to the counts of bytes from which :attr:`compression_ratio` is computed."""
        # One worker alone sends nothing, and its ratio stays 1.
        if self.world_size > 1:
            self._original_bytes += original_bytes
            self._compressed_bytes += compressed_bytes


class CompressedAggregation(LossyAggregation):
    r"""Base class of lossy aggregations that compress every tensor.

    It passes all tensors but bookkeeping to :meth:`_aggregate_kind`, in groups of one dtype and device. Each group is
    one message. Bookkeeping travels uncompressed at the end of the first message of its device, because on a slow
    network a message of a few bytes costs as much time as a longer one. An error memory has the shape of its tensor.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        world_size: Number of workers; None takes that of the process group.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: ``world_size`` is not the number of workers in the process group.
    """

    takes_complex = False

    _named_state: ClassVar[tuple[str, ...]] = ("memory",)
    _own_state: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(self, use_cuda: bool = False, *, world_size: int | None = None, process_group: Any = None) -> None:
        uncompressed = AllReduceAggregation(world_size, use_cuda=use_cuda, process_group=process_group)
        super().__init__(uncompressed, use_cuda)
        # Bookkeeping that waits for the next message, and the divisor of its sum.
        self._riders: dict[str, Tensor] = {}
        self._riders_divisor: Denominator = 1

    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None) -> None:
        """Replace every tensor by the workers' common result, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"`` or ``"avg_custom"``.
            denom: For ``"avg_custom"``, the divisor of sums over workers: a positive number or a tensor with one
                element, the same on every worker.

        Raises:
            UnknownOperationError: ``op`` is neither.
            ValueError: ``denom`` is missing or not positive, or a tensor does not fit its error memory.
            TypeError: A tensor holds no real floating-point numbers.
        """
        divisor = self._divisor(op, denom)
        # A message holds tensors of one dtype and device.
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if not name.startswith(BOOKKEEPING) and tensor.numel() > 0:
                if not tensor.is_floating_point():
                    raise TypeError(
                        f"{name!r} has dtype {tensor.dtype}; only real floating-point tensors can be compressed"
                    )
                kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
        bookkeeping = {name: tensor for name, tensor in tensors.items() if name.startswith(BOOKKEEPING)}
        self._riders, self._riders_divisor = bookkeeping, divisor
        before = self.bytes_sent
        for kind in kinds.values():
            self._aggregate_kind(kind, divisor)
        original = sum(tensor.nbytes for kind in kinds.values() for tensor in kind.values())
        left = self._take_riders()
        ridden_bytes = sum(tensor.nbytes for name, tensor in bookkeeping.items() if name not in left)
        self._count_compression(original, self.bytes_sent - before - ridden_bytes)
        self._delegate(self._uncompressed, left, op, denom)

    @abstractmethod
    def _aggregate_kind(self, tensors: Mapping[str, Tensor], divisor: Denominator) -> None:
        """Aggregate tensors of one dtype and device, none of them empty, in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the error memory by parameter name under ``"memory"``; an empty dictionary without one."""
        return {"memory": dict(self._memory)} if self._memory else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state clears the memory.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        check_keys(self, state_dict, (), ("memory",))
        memory = by_plain_name(state_dict.get("memory", {}))
        self._memory = {name: error.clone() for name, error in memory.items()}

    def _take_riders(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Remove and return the bookkeeping that travels with the next message, by name.

        Args:
            device: Take only tensors on this device, because a message is on one device; None for all.
        """
        riders = {name: rider for name, rider in self._riders.items() if device in (None, rider.device)}
        self._riders = {name: rider for name, rider in self._riders.items() if name not in riders}
        return riders

    def _gather(self, message: Tensor) -> Tensor:
        """Return every worker's message, shape (k, length), in the order of ranks; one worker sends nothing."""
        if self.world_size == 1:
            return message[None]
        riders = list(self._take_riders(message.device).values())
        whole = as_bytes(message, *riders) if riders else message
        is_gloo = process_groups.backend(self.group) == "gloo"
        sent = whole.cpu() if is_gloo else process_groups.get_backend_tensor(whole, self.group)
        # The messages arrive in the rows of one tensor, so they need not be copied together afterward.
        gathered = sent.new_empty(self.world_size, sent.numel())
        process_groups.dist.all_gather(list(gathered), sent, group=self.group)
        self._count("all_gather", self.world_size, sent.nbytes)
        gathered = gathered.to(message.device)
        start = len(message)
        for rider in riders:
            theirs = [from_bytes(row, start, rider.numel(), rider.dtype) for row in gathered]
            rider.copy_(divide(torch.stack(theirs).sum(dim=0), self._riders_divisor).view(rider.shape))
            start += rider.nbytes
        return gathered[:, : len(message)]


def recall(memory: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the tensor that a memory has under a name; create it with zeros at first.

    Args:
        memory: The memory. The result is the tensor in it, so in-place changes of the result are remembered.
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
            f"the memory of {name!r} has shape {tuple(remembered.shape)}, its gradient {tuple(like.shape)}: the state "
            "was loaded from a run with another model"
        )
    # The model may have moved to another device or dtype since the last call or since the checkpoint.
    memory[name] = remembered = remembered.to(device=like.device, dtype=dtype)
    return remembered
