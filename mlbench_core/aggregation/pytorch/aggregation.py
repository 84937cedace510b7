"""The interface for all communication of gradients and weights.

An :class:`Aggregation` takes named tensors that every worker has. It replaces each tensor, in
place, by a result of all workers, such as their average (:meth:`Aggregation.aggregate`). For every
kind of aggregation this module selects the tensors of a model that take part, fixes their order,
and handles parameters without a gradient.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.transport.layout import Layout, start_comparing, takes_part
from mlbench_core.aggregation.pytorch.transport.messages import (
    Denominator,
    check_denominator,
    divide,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    COMPILED,
    Parameters,
    is_buffer,
    name_of_buffer,
    plain_name,
)
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.lost_workers import (
    introduce,
    name_lost_workers,
    naming_lost_workers,
)
from mlbench_core.distributed.pytorch.timing import count_collective

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "Aggregation",
    "AggregationFunction",
    "Denominator",
    "UnknownOperationError",
]

AVG_WORLD = "avg_world"
"""Divide the sum over workers by their number."""

AVG_CUSTOM = "avg_custom"
"""Divide the sum over workers by the denominator given with the call."""

_T = TypeVar("_T")


class UnknownOperationError(ValueError, NotImplementedError):
    """An aggregation was asked for an operation that it does not have."""


class AggregationFunction(Protocol):
    """The function that :meth:`Aggregation.agg_grad` and :meth:`Aggregation.agg_model` return."""

    def __call__(self, model: Parameters, op: str, denom: Denominator | None = None) -> None:
        """Aggregate the model's tensors in place."""


class Aggregation(ABC):
    """A way to combine the tensors of k workers.

    A subclass implements :meth:`aggregate`; the rest is shared.

    Every worker must call the same functions with models of the same layout: the collectives run in
    the order in which the model registers its parameters, which is the same everywhere whatever the
    backward pass did. The first aggregation compares names, shapes, dtypes, order and
    ``requires_grad`` of the parameters, by one message of 16 bytes, which is not counted. If they
    differ, all workers raise a ValueError that names the difference. Values are not compared,
    because some algorithms allow them to differ.

    A parameter that is frozen at the first aggregation does not travel. If a worker trains it
    later, it travels from then on. A parameter that is frozen later, on all workers or on some,
    keeps its place in the messages, so that the workers' weights stay the same.

    Attributes:
        overlap: True if an optimizer sends gradients through it during the backward pass; see
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        use_cuda: As given.
        group: The process group; None for all workers.
        world_size: Number of workers that take part.
        bytes_sent: Bytes this worker handed to collectives since it was made.
        last_bytes: Bytes of the last call of an aggregation function.
        compression_ratio: Bytes of the values in memory over bytes of the values as sent; 1 without
            compression.
        layout: The parameters that travel.
        averages_gradients: True if the result for gradients is their average, exact or compressed;
            False for another direction, such as a vote of signs.
        takes_complex: True if it combines complex numbers; False if it compresses real ones only.

    Args:
        use_cuda: True if training runs on GPUs. Tensors are sent from the device that they and the
            backend need whatever this says; it is kept for scripts that give it.
        process_group: The workers that take part, from ``torch.distributed.new_group``; None for
            all.
    """

    world_size: int
    compression_ratio: float = 1.0
    overlap: bool = False
    takes_complex: bool = True
    averages_gradients: bool = True

    # True if not every call sends: then `aggregate` gets all weights, and calls
    # `_traveling` before it sends.
    _selects_late: ClassVar[bool] = False
    # Keys of state_dict() under which values are kept by parameter name.
    _named_state: ClassVar[tuple[str, ...]] = ()
    # Those of them whose values differ from worker to worker.
    _own_state: ClassVar[tuple[str, ...]] = ()
    # True if `aggregate` has the parameter `extra`.
    _takes_extra: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._takes_extra = "extra" in inspect.signature(cls.aggregate).parameters

    def __init__(self, use_cuda: bool = False, *, process_group: Any = None) -> None:
        self.use_cuda = use_cuda
        self.group = process_groups.check_group(process_group)
        # Not by assignment, because a subclass may have a property of this name.
        vars(self)["world_size"] = process_groups.world_size(self.group)
        self.bytes_sent = 0
        self.last_bytes = 0
        self.layout = Layout()
        introduce()

    @abstractmethod
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Replace every tensor by the workers' common result, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
                Dense, of any strides. An aggregation remembers values of a tensor under its name.
                Aggregations of weights must not compress, remember or extrapolate a buffer; see
                :func:`~mlbench_core.aggregation.pytorch.transport.names.is_buffer`.
            op: The operation, for example ``"avg_world"``.
            denom: Divisor for the operations that take one.
        """

    def combine(
        self,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
        extra: Sequence[Tensor] = (),
    ) -> None:
        """Call :meth:`aggregate`, and average extra tensors over the workers as they are, in place.

        If the method :meth:`aggregate` of a subclass has a fourth parameter ``extra``, it averages
        them itself, in its own messages. Otherwise each of them is a separate message.

        Args:
            tensors: See :meth:`aggregate`.
            op: See :meth:`aggregate`.
            denom: See :meth:`aggregate`.
            extra: A few numbers, such as a loss. Their sum over the workers is divided by ``denom``
                if ``op`` is ``"avg_custom"``, and otherwise by the number of workers.
        """
        if self._takes_extra:
            self.aggregate(tensors, op, denom, extra)  # type: ignore[call-arg]
            return
        self.aggregate(tensors, op, denom)
        for tensor in extra:
            self._reduce(tensor, process_groups.dist.ReduceOp.SUM)
            # Every operation but "avg_custom", such as a vote of signs, averages a loss or a flag.
            if op == AVG_CUSTOM:
                divide(tensor, check_denominator(denom))
            else:
                divide(tensor, self.world_size)

    def agg_grad(self, by_layer: bool = False) -> AggregationFunction:
        """Make the function that aggregates a model's gradients.

        It covers every parameter that required a gradient, or had one, in this or an earlier call,
        so the messages have one layout on all workers. A parameter whose gradient is None on this
        worker counts as zeros. Flags in the same message show whether another worker had a
        gradient. If so, the gradient is created, also for a parameter that is frozen on this worker
        alone. If no worker had one, it stays None, and the parameter's update is skipped as without
        communication.

        If some parameters have always been frozen, a mark in these flags shows whether a worker has
        begun to train one of them. Then the workers agree on these parameters and aggregate their
        gradients, too.

        On a GPU, a worker on which a gradient is None, or with a parameter that has always been
        frozen, waits for the message to read those flags; the others wait for nothing.

        Args:
            by_layer: Send each parameter in separate messages instead of all together.

        Returns:
            A function ``(model, op, denom=None)``. ``model`` may also be a mapping from names to
            parameters.
        """
        return functools.partial(self._aggregate_gradients, by_layer=by_layer)

    def agg_model(self, by_layer: bool = False) -> AggregationFunction:
        """Make the function that aggregates a model's weights.

        It covers every parameter that required a gradient, or had one, in this or an earlier call
        on some worker, and every floating-point buffer, such as the running mean and variance of a
        BatchNorm layer. Other buffers (counters) and parameters that have always been frozen are
        left alone. If there are such parameters, the workers first ask each other whether one of
        them has trained one, by a message of 4 bytes for each and 4 more. Values are written into
        the tensors' own memory.

        Args:
            by_layer: Send each tensor in separate messages instead of all together.

        Returns:
            A function ``(model, op, denom=None)``. ``model`` may also be a mapping from names to
            parameters.
        """
        return functools.partial(self._aggregate_weights, by_layer=by_layer)

    @torch.no_grad()
    @naming_lost_workers()
    def any_worker(self, flag: Tensor) -> None:
        """Raise a flag on every worker if one worker raised it, in place.

        It makes decisions that must be the same on all workers, such as skipping an update after an
        overflow. A worker that skips alone would leave the others waiting. It costs one message of
        ``flag``'s size, and none in a world of one worker.

        Args:
            flag: Zero for no, positive for yes; any shape, floating point or integer. Every worker
                gives one.
        """
        self._reduce(flag, process_groups.dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce a tensor over the workers, in place, in a separate message.

        One worker alone sends none.
        """
        if self.world_size == 1:
            return
        # Gloo needs it in the host's memory, NCCL on the GPU.
        sent = process_groups.get_backend_tensor(tensor, self.group)
        process_groups.dist.all_reduce(sent, op=op, group=self.group)
        self._count("all_reduce", self.world_size, sent.nbytes)
        if sent is not tensor:
            tensor.copy_(sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the values kept between calls, by parameter name; empty if there are none."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            ValueError: There is something to restore and this aggregation remembers nothing.
        """
        if state_dict:
            raise ValueError(
                f"{type(self).__name__} keeps no state but was given "
                f"{sorted(state_dict)}: the checkpoint was written with another "
                "aggregation; build the optimizer with that one"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Aggregation:
        """Return a copy in the same process group, because a group cannot be copied."""
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = object.__new__(type(self))
        state = copy.deepcopy(self.__getstate__(), memo)
        getattr(copied, "__setstate__", copied.__dict__.update)(state)
        return copied

    def shared_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries that differ between workers, such as the error memory.

        The other entries, such as the state of a random generator, are the same on all workers and
        must stay so. A worker starts from this state if it has only that of another worker, or of a
        run with another number of workers.

        Args:
            state_dict: The result of :meth:`state_dict`, on any worker.
        """
        shared = dict(state_dict)
        for key in self._own_state:
            if key in shared:
                shared[key] = {}
        return shared

    def remembered_names(self, state_dict: Mapping[str, Any]) -> set[str]:
        """Return the names of the parameters that have an entry in a state.

        Args:
            state_dict: The result of :meth:`state_dict`.
        """
        names: set[str] = set()
        for key in self._named_state:
            names.update(map(plain_name, state_dict.get(key, {})))
        return {name for name in names if not is_buffer(name)}

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return the remembered values by name, which must not change if a tensor is skipped."""
        return []

    def _divisor(self, op: str, denom: Denominator | None) -> Denominator:
        """Return the number by which ``op`` divides a sum over workers."""
        if op == AVG_WORLD:
            return self.world_size
        if op == AVG_CUSTOM:
            return check_denominator(denom)
        raise UnknownOperationError(f"op must be '{AVG_WORLD}' or '{AVG_CUSTOM}', not {op!r}")

    def _count(self, op: str, group: int, size_bytes: int, overlapped: bool = False) -> None:
        """Count a collective for the tracker, and its bytes; see :func:`count_collective`."""
        self.bytes_sent += size_bytes
        self.last_bytes += size_bytes
        count_collective(op, group, size_bytes, overlapped)

    def _delegate(
        self,
        part: Aggregation,
        tensors: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None = None,
    ) -> None:
        """Aggregate tensors by another aggregation, and count its bytes as this one's."""
        if tensors:
            with self._counting_bytes_of(part):
                part.aggregate(tensors, op, denom)

    @contextmanager
    def _counting_bytes_of(self, part: Aggregation) -> Iterator[None]:
        """Count the bytes that another aggregation sends in the block as this one's."""
        before = part.bytes_sent
        yield
        sent_bytes = part.bytes_sent - before
        self.bytes_sent += sent_bytes
        self.last_bytes += sent_bytes

    @torch.no_grad()
    def _aggregate_gradients(
        self,
        model: Parameters,
        op: str,
        denom: Denominator | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        self.last_bytes = 0
        try:
            parameters = parameters_of(model)
            refuse_sparse(parameters)
            self.compare_models(parameters)
            if self.world_size == 1:
                # Only other workers could have trained a parameter that is frozen here.
                self.layout.admit(self.layout.trained & parameters.keys())
                self._aggregate_alone(self._without_frozen(parameters), op, denom)
                return
            sent = self._without_frozen(parameters)
            frozen = [name for name in parameters if name in self.layout.frozen]
            # The flags of the first message ask about the frozen parameters; if no parameter
            # travels, a separate message does.
            asked = frozen
            if sent:
                for part in _messages(sent, by_layer):
                    self._aggregate_some_gradients(part, op, denom, asked)
                    asked = []
            if asked:
                self.admit(asked)
            # The admitted parameters were not in the messages above, but their gradients belong to
            # this step.
            admitted = {name: parameters[name] for name in frozen if name not in self.layout.frozen}
            if admitted:
                self._aggregate_some_gradients(admitted, op, denom)
        except RuntimeError as error:
            name_lost_workers(error)
            raise

    def mark(self, flags: Tensor, frozen: Collection[str]) -> None:
        """Mark the first flag of a message if this worker has trained a frozen parameter.

        The mark is infinite, so it stays in a sum over any number of workers in any dtype, and
        needs no room.

        Args:
            flags: The flags, one for each parameter in the message.
            frozen: Names of the frozen parameters.
        """
        if not self.layout.trained.isdisjoint(frozen):
            flags[0] = math.inf

    def read_mark(self, flags: Tensor, frozen: Sequence[str], is_present: bool) -> None:
        """Let the frozen parameters that a worker has trained travel, if the first flag has a mark.

        It replaces the mark by the flag itself.

        Args:
            flags: As in :meth:`mark`, after the message has arrived.
            frozen: As in :meth:`mark`.
            is_present: True if this worker had a gradient of the first parameter.
        """
        if not flags[0].isfinite():
            # The mark has overwritten the flag on one worker at least, so all send theirs again.
            flags[0] = self.admit(frozen, is_present)

    def admit(self, frozen: Sequence[str], flag: bool = False) -> float:
        """Let the frozen parameters that a worker has trained travel from now on.

        It is a collective operation, and its result is the same on all workers.

        Args:
            frozen: Names of frozen parameters, the same on all workers.
            flag: A flag that travels in the same message.

        Returns:
            1 if a worker raised the flag, else 0.
        """
        own = [name in self.layout.trained for name in frozen]
        flags = torch.tensor([*own, flag], dtype=torch.get_default_dtype())
        self.any_worker(flags)
        *trained, raised = flags.tolist()
        self.layout.admit(list(itertools.compress(frozen, trained)))
        return raised

    def _without_frozen(self, values: Mapping[str, _T]) -> dict[str, _T]:
        return {name: value for name, value in values.items() if name not in self.layout.frozen}

    def compare_models(
        self,
        parameters: Mapping[str, Tensor] | None = None,
        pending: list[Callable[[], None]] | None = None,
    ) -> None:
        """Compare the parameters that are new in the layout with those of the other workers.

        It is a collective operation.

        Args:
            parameters: Parameters to note in the layout before, by name.
            pending: Gets the function that waits for the comparison, if the caller does not wait
                here.

        Raises:
            ValueError: They differ. All workers raise it.
        """
        # In most steps there is nothing to note: all parameters are known, and none is frozen.
        parameters = parameters or {}
        if self.layout.frozen or not parameters.keys() <= self.layout.known:
            self.layout.note(parameters)
        new, self.layout.new = self.layout.new, []
        if new and self.world_size > 1:
            wait = start_comparing(new, self.group)
            if pending is None:
                wait()
            else:
                pending.append(wait)

    def _aggregate_alone(
        self, parameters: Mapping[str, Tensor], op: str, denom: Denominator | None
    ) -> None:
        """Aggregate the gradients of the only worker, who knows which of them exist."""
        gradients = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        self.aggregate(gradients, op, denom)

    def _aggregate_some_gradients(
        self,
        parameters: Mapping[str, Tensor],
        op: str,
        denom: Denominator | None,
        frozen: Sequence[str] = (),
    ) -> None:
        """Aggregate gradients together, with flags for the gradients that exist here.

        Args:
            parameters: Their parameters by name, at least one.
            op: The operation.
            denom: Its divisor.
            frozen: Frozen parameters for which the flags may have a mark; see :meth:`mark`.
        """
        gradients: dict[str, Tensor] = {}
        missing: list[str] = []
        # A message has tensors of one dtype and device, so each kind has its own flags.
        names_by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                missing.append(name)
                gradient = torch.zeros_like(parameter)
            gradients[name] = gradient
            names_by_kind.setdefault((gradient.dtype, gradient.device), []).append(name)
        flags: list[Tensor] = []
        for (dtype, device), names in names_by_kind.items():
            present = [float(parameters[name].grad is not None) for name in names]
            flags.append(torch.tensor(present, dtype=dtype, device=device))
        # A flag of 1 divided by a large number would be rounded to 0 in half precision.
        if op == AVG_CUSTOM:
            number = check_denominator(denom)
            for flag in flags:
                divisor = torch.as_tensor(number, dtype=torch.float64, device=flag.device)
                flag.mul_(divisor.clamp(1, torch.finfo(flag.dtype).max))
        # If no worker has a gradient of one of them, its step is undone, and the zeros above must
        # leave no trace in what is remembered.
        before: list[dict[str, Any]] = []
        for remembered in self._remembered_by_name():
            kept = {name: remembered[name] for name in missing if name in remembered}
            before.append(copy.deepcopy(kept))
        if frozen:
            self.mark(flags[0], frozen)
        self.combine(gradients, op, denom, flags)
        if frozen:
            first = next(iter(parameters))
            self.read_mark(flags[0], frozen, parameters[first].grad is not None)
        for names, flag in zip(names_by_kind.values(), flags, strict=True):
            # Only a worker without a gradient reads the flags, because
            # reading them waits for a GPU.
            if all(parameters[name].grad is not None for name in names):
                continue
            for name, is_present in zip(names, flag.abs().tolist(), strict=True):
                if parameters[name].grad is None and is_present > 0:
                    parameters[name].grad = gradients[name]
                elif parameters[name].grad is None:
                    self._restore(name, before)

    def _restore(self, name: str, before: Iterable[Mapping[str, Any]]) -> None:
        """Restore the remembered values of a parameter that no worker has a gradient of."""
        for remembered, kept in zip(self._remembered_by_name(), before, strict=True):
            if name not in kept:
                remembered.pop(name, None)
            elif name in remembered and isinstance(kept[name], Tensor):
                # In place, because a state_dict() that the caller holds shares the tensor.
                remembered[name].copy_(kept[name])
            else:
                remembered[name] = kept[name]

    @torch.no_grad()
    def _aggregate_weights(
        self,
        model: Parameters,
        op: str,
        denom: Denominator | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        self.last_bytes = 0
        try:
            parameters = parameters_of(model)
            self.layout.note(parameters)
            weights = weights_of(model)
            if not self._selects_late:
                weights = self._traveling(weights)
            for message in _messages(weights, by_layer):
                self.aggregate(message, op, denom)
        except RuntimeError as error:
            name_lost_workers(error)
            raise

    def _traveling(
        self, weights: Mapping[str, Tensor], pending: list[Callable[[], None]] | None = None
    ) -> dict[str, Tensor]:
        """Return the weights that travel, the same on all workers; all call it before they send.

        Args:
            weights: All weights.
            pending: See :meth:`compare_models`.
        """
        frozen = [name for name in weights if name in self.layout.frozen]
        if frozen:
            # The message about frozen parameters has one layout only if the models are the same, so
            # the comparison must end before it.
            self.compare_models()
            self.admit(frozen)
        else:
            self.compare_models(pending=pending)
        return self._without_frozen(weights)


def _messages(tensors: dict[str, Tensor], by_layer: bool) -> list[dict[str, Tensor]]:
    """Return the tensors of each message."""
    if by_layer:
        return [{name: tensor} for name, tensor in tensors.items()]
    return [tensors]


def parameters_of(model: Parameters) -> dict[str, Tensor]:
    """Return the parameters of a model, each once, as registered, by their plain names."""
    named: Iterable[tuple[str, Tensor]]
    if isinstance(model, nn.Module):
        named = model.named_parameters()
    else:
        named = model.items()
    # This is plain_name, written out so that a step goes through fewer files, as a test of
    # tools/trace_step.py demands.
    return {name.replace(COMPILED, ""): parameter for name, parameter in named}


def weights_of(model: Parameters) -> dict[str, Tensor]:
    """Return the tensors that an aggregation of weights may cover, by name.

    Args:
        model: A model, or a mapping from names to parameters.
    """
    weights = {name: parameter.detach() for name, parameter in parameters_of(model).items()}
    if isinstance(model, nn.Module):
        for name, buffer in model.named_buffers():
            # Counters, such as BatchNorm's num_batches_tracked, are integers, of which an
            # average makes no sense.
            if buffer.is_floating_point() or buffer.is_complex():
                weights[name_of_buffer(name)] = buffer.detach()
    return weights


def trainable(model: Parameters) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that an optimizer may change; see :func:`parameters_of`."""
    return ((name, p) for name, p in parameters_of(model).items() if takes_part(p))


def refuse_complex(aggregation: Aggregation, parameters: Mapping[str, Tensor]) -> None:
    """Raise a TypeError if a trained parameter is complex and the aggregation takes only reals."""
    for name, parameter in parameters.items():
        if parameter.is_complex() and parameter.requires_grad and not aggregation.takes_complex:
            raise TypeError(
                f"parameter {name!r} must be real for {type(aggregation).__name__}, not complex "
                f"({parameter.dtype}): use AllReduceAggregation, or train torch.view_as_real of it"
            )


def refuse_sparse(parameters: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a gradient is sparse."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of {name!r} has layout {parameter.grad.layout}; only dense "
                "gradients (torch.strided) can be aggregated: build the layer without "
                "sparse=True, or call parameter.grad.to_dense() first"
            )
