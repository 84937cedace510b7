"""Observe the collectives of torch.distributed and the hook of DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlbench_core import torch_private
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from mlbench_core.observe.communication.ddp_times import DDPTimes
from mlbench_core.observe.methods.apply import Method, refusal
from mlbench_core.observe.patches import Patches
from mlbench_core.observe.steps import StepClock
from mlbench_core.tracking.clock import cuda_in_use

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
    "all_gather_single": ("input_tensor", "all_gather"),
    "gather": ("tensor", "broadcast"),
    "scatter": ("tensor", "broadcast"),
    "reduce_scatter": ("input_list", "reduce_scatter"),
    "reduce_scatter_tensor": ("input", "reduce_scatter"),
    "reduce_scatter_single": ("input", "reduce_scatter"),
    "all_to_all": ("input_tensor_list", "reduce_scatter"),
    "all_to_all_single": ("input", "reduce_scatter"),
    "send": ("tensor", "neighbors"),
    "isend": ("tensor", "neighbors"),
    # The sender counts the bytes.
    "recv": (None, ""),
    "irecv": (None, ""),
    "barrier": (None, ""),
}
_ON_STREAMS = (
    "the time of collectives on GPUs that are asynchronous, on another stream or in another thread "
    "than the steps, outside DistributedDataParallel's hook"
)
_IN_GRAPHS = "collectives in CUDA graphs"
_SHADOWED = "the all-reduces by DistributedDataParallel after a worker's data has ended (Join)"
_COMPILED = "collectives in compiled code"

_ALWAYS_ASYNC = ("isend", "irecv")


@dataclass
class _HookState:
    """The state of the hook that DDP has while it is observed.

    Attributes:
        observer: Receives the times.
        group: DDP's process group.
        size: Its number of workers.
        state: State of the hook of the script or of the method.
        hook: That hook; None for DDP's default.
    """

    observer: CommunicationObserver
    group: Any
    size: int
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
        self._method_clock = CommunicationClock()
        self._nested = threading.local()
        # Works and futures of collectives whose end nobody has waited for yet, with the moment of
        # the call on a clock that stands still during waits. They hold tensors, so the script alone
        # keeps them.
        self._sent_s: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._waited_s = 0.0
        self.unmeasured: dict[str, None] = {}

    @property
    def models(self) -> list[DistributedDataParallel]:
        """Return the DDP models of the script that are observed."""
        models = list(self._hooks)
        for times in self.clock.traffic.timed:
            model = times.model()
            if model is not None:
                models.append(model)
        return models

    def install(self, patches: Patches) -> None:
        """Replace the functions of torch."""
        for name, (payload, op) in _COLLECTIVES.items():
            if not hasattr(dist, name):
                continue
            wrap = functools.partial(self._collective, name, payload, op)
            patches.replace(dist, name, wrap)
            # Functions of this module, such as all_gather_object, call each other by its names.
            patches.put(dist.distributed_c10d, name, getattr(dist, name))
        patches.replace(dist.Work, "wait", self._wait)
        patches.replace(dist.Work, "get_future", self._derived)
        # The futures of works are of the base class.
        future_class = torch.futures.Future.__mro__[1]
        patches.replace(future_class, "wait", self._wait)
        patches.replace(future_class, "then", self._derived)
        patches.replace(torch.futures, "collect_all", self._collected)
        patches.replace(torch.futures, "wait_all", self._wait_all)
        patches.replace(DistributedDataParallel, "__init__", self._constructor)
        # A hook of each model would cost more, and a script may copy its model with the hook.
        patches.replace(DistributedDataParallel, "forward", self._forward)
        if self._methods:
            patches.replace(CommunicationClock, "report", self._report)
        patches.replace(DistributedDataParallel, "register_comm_hook", self._register)
        patches.replace(DistributedDataParallel, "join_hook", self._join_hook)

    # ------------------------------------------------------------------ collectives

    def _collective(
        self, name: str, payload: str | None, op: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)
        payload_at = _position(names, payload)
        group_at, async_at = _position(names, "group"), _position(names, "async_op")
        is_always_async = name in _ALWAYS_ASYNC
        clock, traffic = self.clock, self.clock.traffic

        nested, gathers = self._nested, op == "all_gather"

        def note_compiled() -> None:
            self.unmeasured[_COMPILED] = None

        # The compiler calls it itself, and compiled code does not.
        torch_private.mark_constant(note_compiled)

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                note_compiled()
                return original(*args, **kwargs)
            if cuda_in_use() and torch.cuda.is_current_stream_capturing():
                self.unmeasured[_IN_GRAPHS] = None
                return original(*args, **kwargs)
            if gathers and clock.began_s is None:
                clock.gather_begins()
            # Before training, in an evaluation, and inside another collective nothing is counted:
            # some functions call each other.
            if not clock.is_open or clock.is_waiting or getattr(nested, "is_inside", False):
                return original(*args, **kwargs)
            is_async = is_always_async or _argument(args, kwargs, async_at, "async_op")
            if payload is not None and not self._is_of_method(inspect.currentframe()):
                size_bytes = _size_bytes(_argument(args, kwargs, payload_at, payload))
                workers = dist.get_world_size(_argument(args, kwargs, group_at, "group"))
                if workers > 1:
                    traffic.add(op, workers, size_bytes, bool(traffic.in_hook or is_async))
            waits = not (is_async or traffic.in_hook) and self._is_in_step()
            begin_s = time.perf_counter()
            nested.is_inside = True
            if waits:
                clock.wait_begins()
            try:
                work = original(*args, **kwargs)
            finally:
                nested.is_inside = False
                if waits:
                    clock.wait_ends()
                    self._waited_s += time.perf_counter() - begin_s
            if is_async and work is not None and not traffic.in_hook:
                self._sent_s[work] = begin_s - self._waited_s
            return work

        return observed

    def _is_in_step(self) -> bool:
        """Return True in the thread and on the stream of the steps, where time can be measured."""
        is_in_step = threading.get_ident() == self.clock.thread
        if cuda_in_use():
            # FSDP2 has other streams for its collectives.
            if self.clock.stream is not None:
                is_in_step = is_in_step and torch.cuda.current_stream() == self.clock.stream
            if not is_in_step:
                self.unmeasured[_ON_STREAMS] = None
        return is_in_step

    def _is_of_method(self, frame: FrameType | None) -> bool:
        """Return True if the caller of a frame sends a message of a method.

        The library counts the collectives that its own transports make of such messages.
        """
        if not self._methods or frame is None or frame.f_back is None:
            return False
        name = str(frame.f_back.f_globals.get("__name__"))
        return name.startswith("mlbench_core.") and name != __name__

    def end_step(self) -> None:
        """Take over the collectives that the methods have counted."""
        self._method_clock.report(self)

    def _report(self, original: Callable[..., None]) -> Callable[..., None]:
        """Take over the collectives of the library's optimizers, which have no tracker here."""

        def report(clock: CommunicationClock, tracker: Any | None) -> None:
            if tracker is None:
                tracker = self
            original(clock, tracker)

        return report

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        """Count collectives of a method, as a tracker does."""
        self.clock.traffic.add(op, group, size_bytes, overlapped, calls)

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock, sent_s = self.clock, self._sent_s

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s = sent_s.pop(work, None)
            # A work that the wrapper above did not return, such as that of DDP's hook.
            if begin_s is None or not clock.is_open or clock.is_waiting:
                return original(work, *args, **kwargs)
            if not self._is_in_step():
                return original(work, *args, **kwargs)
            wait_s = time.perf_counter()
            if cuda_in_use():
                # The host does not wait for it, so its times say nothing.
                self.unmeasured[_ON_STREAMS] = None
            else:
                clock.traffic.add_hidden(begin_s, wait_s - self._waited_s)
            clock.wait_begins()
            try:
                return original(work, *args, **kwargs)
            finally:
                clock.wait_ends()
                self._waited_s += time.perf_counter() - wait_s

        return wait

    def _derived(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let the future of a work, or one that follows another, have the same moment."""
        sent_s = self._sent_s

        @functools.wraps(original)
        def derived(source: Any, *args: Any, **kwargs: Any) -> Any:
            future = original(source, *args, **kwargs)
            begin_s = sent_s.get(source)
            if begin_s is not None:
                sent_s[future] = begin_s
            return future

        return derived

    def _collected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let the future of several ones have the moment of the first."""

        @functools.wraps(original)
        def collect_all(futures: Any) -> Any:
            futures = list(futures)
            collected = original(futures)
            moments = [self._sent_s.pop(future, None) for future in futures]
            known = [moment for moment in moments if moment is not None]
            if known:
                self._sent_s[collected] = min(known)
            return collected

        return collect_all

    def _wait_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait_all(futures: Any) -> Any:
            futures = list(futures)
            torch.futures.collect_all(futures).wait()
            return original(futures)

        return wait_all

    # ------------------------------------------------------------------ DDP

    def _constructor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._observe(model)

        return init

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock, timed = self.clock, self.clock.traffic.timed

        @functools.wraps(original)
        def forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(model, *args, **kwargs)
            if not torch.is_grad_enabled():
                if clock.is_open:
                    clock.forward_without_gradients()
            elif clock.is_open or clock.began_s is None or clock.may_evaluate:
                clock.forward_begins(id(model), (args, kwargs))
                for times in timed:
                    if times.model() is model:
                        times.forward_begins(model)
            return original(model, *args, **kwargs)

        return forward

    def _join_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note that a worker whose data has ended shadows the others; see Join."""

        @functools.wraps(original)
        def join_hook(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            self.unmeasured[_SHADOWED] = None
            return original(model, *args, **kwargs)

        return join_hook

    def _observe(self, model: DistributedDataParallel) -> None:
        """Register the hook that measures, unless the constructor has registered one of its own."""
        size = dist.get_world_size(model.process_group)
        if size > 1 and model.broadcast_buffers and any(True for _ in model.module.buffers()):
            self.unmeasured["the broadcasts of buffers by DistributedDataParallel, in C++"] = None
        if size > 1 and model.find_unused_parameters:
            self.unmeasured["the search for unused parameters by DistributedDataParallel"] = None
        for method in self._methods:
            # An optimizer that the method makes, such as DiLoCo's outer one, ends no step.
            self.clock.optimizer_depth += 1
            try:
                arguments = method.hook(model)
            finally:
                self.clock.optimizer_depth -= 1
            if arguments is not None:
                if model in self._hooks:
                    raise refusal(method.choice, "own hook")
                self._register_observed(model, *arguments)
                self._exchanged[model] = method
        if model in self._hooks:
            return
        if _has_dense_cpu_gradients(model) and torch_private.time_ddp(model):
            self.clock.traffic.timed.append(DDPTimes(model, size))
            return
        # DDP multiplies a gradient by 1 / size, or divides it by size if the gradient is a view of
        # the bucket already. Both have the same bits for a power of two only.
        if model.gradient_as_bucket_view and size & (size - 1):
            self.unmeasured[
                "the communication of DistributedDataParallel with gradient_as_bucket_view on "
                f"{size} workers, as a hook would change the last bit of gradients"
            ] = None
            return
        self._hooks[model] = _HookState(self, model.process_group, size)
        self._register_original(model, self._hooks[model], _observed_hook)

    def _register_observed(self, model: DistributedDataParallel, state: Any, hook: Any) -> None:
        group = model.process_group
        self._hooks[model] = _HookState(self, group, dist.get_world_size(group), state, hook)
        self._register_original(model, self._hooks[model], _observed_hook)

    def _register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._register_original = original

        @functools.wraps(original)
        def register_comm_hook(model: DistributedDataParallel, state: Any, hook: Any) -> None:
            if model in self._exchanged:
                raise refusal(self._exchanged[model].choice, "own hook")
            ours = self._hooks.get(model)
            timed = self.clock.traffic.timed
            timed[:] = [times for times in timed if times.model() is not model]
            if ours is None:
                self._register_observed(model, state, hook)
            elif ours.hook is None:
                # DDP takes one hook in its life, and that is ours.
                ours.state, ours.hook = state, hook
            else:
                original(model, state, hook)

        return register_comm_hook


def _has_dense_cpu_gradients(model: DistributedDataParallel) -> bool:
    """Return True if the sizes of the buckets are those of the messages, and no device has them."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            return False
    return bool(model.device_type == "cpu")


# DDP compares the annotations of a hook with types, which postponed ones are not.
def _observed_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Call the hook of the script, the method or DDP, and measure the time until it is done."""
    traffic = state.observer.clock.traffic
    tensor = bucket.buffer()
    is_cuda = tensor.is_cuda
    if is_cuda and torch.cuda.is_current_stream_capturing():
        state.observer.unmeasured[_IN_GRAPHS] = None
    traffic.bucket_begins(is_cuda)
    traffic.in_hook = True
    try:
        if state.hook is not None:
            future = state.hook(state.state, bucket)
        else:
            if tensor.is_sparse:
                tensor.div_(state.size)
            else:
                # DDP multiplies gradients by this number. Division gives other bits.
                tensor.mul_(1.0 / state.size)
            # The method of the group, as DDP calls it: torch.distributed's function takes longer.
            future = state.group.allreduce([tensor]).get_future()
            if state.observer.clock.is_open and state.size > 1:
                traffic.add("all_reduce", state.size, _size_bytes(tensor), True)
    finally:
        traffic.in_hook = False
    is_default = state.hook is None

    def arrived(done: torch.futures.Future[Any]) -> Any:
        value = done.value()
        traffic.bucket_ends(is_cuda)
        if is_default:
            return value[0]
        return value

    return future.then(arrived)


def _position(names: list[str], name: str | None) -> int:
    if name not in names:
        # Greater than the number of arguments of any call.
        return 1 << 30
    return names.index(name)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    if position < len(args):
        return args[position]
    return kwargs.get(name)


def _size_bytes(payload: Any) -> int:
    """Return the bytes of a tensor or of a list of tensors."""
    if isinstance(payload, torch.Tensor):
        if payload.is_sparse:
            return torch_private.sparse_bytes(payload)
        return payload.nbytes
    return sum(map(_size_bytes, payload or ()))
