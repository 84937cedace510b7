"""Observe the collectives of torch.distributed and the hook of DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlbench_core.observe.methods import Method, refusal
from mlbench_core.observe.patches import Patches
from mlbench_core.observe.steps import StepClock

__all__ = ["CommunicationObserver"]

# Function of torch.distributed: the argument with this worker's payload, and the kind in the table
# of wire_bytes whose cost it has. A reduction to one worker sends as much as a broadcast, and an
# exchange of parts as much as a reduce-scatter.
_COLLECTIVES = {
    "all_reduce": ("tensor", "all_reduce"),
    "all_reduce_coalesced": ("tensors", "all_reduce"),
    "reduce": ("tensor", "broadcast"),
    "broadcast": ("tensor", "broadcast"),
    "all_gather": ("tensor", "all_gather"),
    "all_gather_coalesced": ("input_tensor_list", "all_gather"),
    "all_gather_into_tensor": ("input_tensor", "all_gather"),
    "gather": ("tensor", "broadcast"),
    "scatter": ("tensor", "broadcast"),
    "reduce_scatter": ("input_list", "reduce_scatter"),
    "reduce_scatter_tensor": ("input", "reduce_scatter"),
    "all_to_all": ("input_tensor_list", "reduce_scatter"),
    "all_to_all_single": ("input", "reduce_scatter"),
    "send": ("tensor", "neighbors"),
    "isend": ("tensor", "neighbors"),
    # The sender counts the bytes.
    "recv": (None, ""),
    "irecv": (None, ""),
    "barrier": (None, ""),
}
# The clock of the script of this process.
_clock: StepClock | None = None

_ALWAYS_ASYNC = ("isend", "irecv")


@dataclass
class _HookState:
    """The state of the hook that DDP has while it is observed.

    Attributes:
        observer: Receives the times.
        group: DDP's process group.
        factor: The mean is the sum times this number, as DDP computes it without a hook.
        state: State of the hook of the script or of the method.
        hook: That hook; None for DDP's default.
    """

    observer: CommunicationObserver
    group: Any
    factor: float
    state: Any = None
    hook: Callable[[Any, Any], Any] | None = None


class CommunicationObserver:
    """Count collectives and measure the time that training waits for them.

    Args:
        clock: The clock of the steps, with the traffic that the counts go to.
        methods: The methods that take the place of the script's own exchange.

    Attributes:
        models: The DDP models of the script.
        unmeasured: Each thing that cannot be seen, with the reason; the values mean nothing.
    """

    def __init__(
        self,
        clock: StepClock,
        methods: Sequence[Method] = (),
    ) -> None:
        self.clock = clock
        self._methods = methods
        self._hooks: weakref.WeakKeyDictionary[DistributedDataParallel, _HookState] = (
            weakref.WeakKeyDictionary()
        )
        # Models whose exchange is that of a method.
        self._exchanged: weakref.WeakKeyDictionary[DistributedDataParallel, Method] = (
            weakref.WeakKeyDictionary()
        )
        self._sent_s: dict[Any, float] = {}
        self.unmeasured: dict[str, None] = {}

    @property
    def models(self) -> list[DistributedDataParallel]:
        """Return the DDP models of the script that are observed."""
        return list(self._hooks)

    def install(self, patches: Patches) -> None:
        """Replace the functions of torch."""
        for name, (payload, op) in _COLLECTIVES.items():
            if not hasattr(dist, name):
                continue
            wrap = functools.partial(self._collective, name, payload, op)
            patches.replace(dist, name, wrap)
            # Functions of this module, such as all_gather_object, call each other by its names.
            patches.put(dist.distributed_c10d, name, getattr(dist, name))
        global _clock
        _clock = self.clock
        patches.replace(dist.Work, "wait", self._wait)
        patches.replace(DistributedDataParallel, "__init__", self._constructor)
        patches.replace(DistributedDataParallel, "register_comm_hook", self._register)

    # ------------------------------------------------------------------ collectives

    def _collective(
        self, name: str, payload: str | None, op: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)
        payload_at = _position(names, payload)
        group_at, async_at = _position(names, "group"), _position(names, "async_op")
        is_always_async = name in _ALWAYS_ASYNC
        clock, traffic = self.clock, self.clock.traffic

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            # Before training, in an evaluation, and inside another collective nothing is counted.
            if not clock.is_open or clock.is_waiting:
                return original(*args, **kwargs)
            is_async = is_always_async or _argument(args, kwargs, async_at, "async_op")
            if payload is not None:
                group = _argument(args, kwargs, group_at, "group")
                size_bytes = _size_bytes(_argument(args, kwargs, payload_at, payload))
                workers = dist.get_world_size(group)
                if workers > 1:
                    traffic.add(op, workers, size_bytes, bool(traffic.in_hook or is_async))
            if traffic.in_hook or not clock.is_here():
                return original(*args, **kwargs)
            if is_async:
                begin_s = time.perf_counter()
                work = original(*args, **kwargs)
                if work is not None:
                    self._sent_s[work] = begin_s
                return work
            clock.wait_begins()
            try:
                return original(*args, **kwargs)
            finally:
                clock.wait_ends()

        return observed

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock, sent_s = self.clock, self._sent_s

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s = sent_s.pop(work, None)
            # A work that the wrapper above did not return, such as that of DDP's hook.
            if begin_s is None or not clock.is_open or clock.is_waiting:
                return original(work, *args, **kwargs)
            clock.traffic.add_hidden(time.perf_counter() - begin_s)
            clock.wait_begins()
            try:
                return original(work, *args, **kwargs)
            finally:
                clock.wait_ends()

        return wait

    # ------------------------------------------------------------------ DDP

    def _constructor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            model.register_forward_pre_hook(_before_forward, with_kwargs=True)
            self._observe(model)

        return init

    def _observe(self, model: DistributedDataParallel) -> None:
        """Register the hook that measures, unless the constructor has registered one of its own."""
        size = dist.get_world_size(model.process_group)
        if model.broadcast_buffers and any(True for _ in model.module.buffers()):
            self.unmeasured["the broadcasts of buffers by DistributedDataParallel, in C++"] = None
        if model.find_unused_parameters:
            self.unmeasured["the search for unused parameters by DistributedDataParallel"] = None
        for method in self._methods:
            arguments = method.hook(model)
            if arguments is not None:
                if model in self._hooks:
                    raise refusal(method.choice, "own hook")
                self._register_observed(model, *arguments)
                self._exchanged[model] = method
        if model in self._hooks:
            return
        # DDP multiplies a gradient by 1 / size, or divides it by size if the gradient is a view of
        # the bucket already. Both have the same bits for a power of two only.
        if model.gradient_as_bucket_view and size & (size - 1):
            self.unmeasured[
                "the communication of DistributedDataParallel with gradient_as_bucket_view on "
                f"{size} workers, as a hook would change the last bit of gradients"
            ] = None
            return
        self._hooks[model] = _HookState(self, model.process_group, 1.0 / size)
        self._register_original(model, self._hooks[model], _observed_hook)

    def _register_observed(self, model: DistributedDataParallel, state: Any, hook: Any) -> None:
        self._hooks[model] = _HookState(self, model.process_group, 1.0, state, hook)
        self._register_original(model, self._hooks[model], _observed_hook)

    def _register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._register_original = original

        @functools.wraps(original)
        def register_comm_hook(model: DistributedDataParallel, state: Any, hook: Any) -> None:
            if model in self._exchanged:
                raise refusal(self._exchanged[model].choice, "own hook")
            ours = self._hooks.get(model)
            if ours is None:
                self._register_observed(model, state, hook)
            elif ours.hook is None:
                # DDP takes one hook in its life, and that is ours.
                ours.state, ours.hook = state, hook
            else:
                original(model, state, hook)

        return register_comm_hook


def _before_forward(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Note the begin of DDP's forward pass, and count its samples; a hook of the model.

    It is a function of this module, because a script may copy or pickle its model with the hook.
    """
    if torch.compiler.is_compiling() or _clock is None:
        return
    if torch.is_grad_enabled() and not _clock.is_evaluating:
        _clock.forward_begins((args, kwargs))


# DDP compares the annotations of a hook with types, which postponed ones are not.
def _observed_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Call the hook of the script, the method or DDP, and measure the time until it is done."""
    traffic = state.observer.clock.traffic
    tensor = bucket.buffer()
    is_cuda = tensor.is_cuda
    traffic.bucket_begins(is_cuda)
    traffic.in_hook = True
    try:
        if state.hook is not None:
            future = state.hook(state.state, bucket)
        else:
            if tensor.is_sparse:
                tensor.div_(round(1 / state.factor))
            else:
                tensor.mul_(state.factor)
            work = dist.all_reduce(tensor, group=state.group, async_op=True)
            future = work.get_future()
    finally:
        traffic.in_hook = False
    is_default = state.hook is None

    def arrived(done: torch.futures.Future[Any]) -> Any:
        value = done.value()
        traffic.bucket_ends(is_cuda)
        return value[0] if is_default else value

    return future.then(arrived)


def _position(names: list[str], name: str | None) -> int:
    return names.index(name) if name in names else 1 << 30


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    if position < len(args):
        return args[position]
    return kwargs.get(name)


def _size_bytes(payload: Any) -> int:
    """Return the bytes of a tensor or of a list of tensors."""
    if isinstance(payload, torch.Tensor):
        if payload.is_sparse:
            return int(payload._nnz()) * payload.element_size()
        return payload.nbytes
    return sum(map(_size_bytes, payload or ()))
