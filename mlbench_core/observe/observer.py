"""Observe the training script of this process: its steps, losses, data and communication."""

from __future__ import annotations

import inspect
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mlbench_core.observe import table
from mlbench_core.observe.communication.collectives import CommunicationObserver
from mlbench_core.observe.communication.traffic import Traffic
from mlbench_core.observe.data_loading import DataObserver
from mlbench_core.observe.losses import LossObserver
from mlbench_core.observe.methods.apply import Method, Obstacle, refusal
from mlbench_core.observe.patches import Patches
from mlbench_core.observe.steps import StepClock
from mlbench_core.tracking.tracker import Tracker

__all__ = ["Observer"]

_FIRST_STEP_S = 60.0
_NO_COLLECTIVE = (
    "communication: no collective of torch.distributed was called in training. Perhaps each worker "
    "trains alone, without DistributedDataParallel, or communicates by code of its own"
)
_OTHER_THREAD = "data: a thread that does not train read the DataLoader"
_NO_SAMPLES = "samples: neither a DataLoader nor a forward pass of DistributedDataParallel was seen"
_NO_TENSOR = "samples: no tensor was found in the batches of the DataLoader"
_OF_DTENSOR = "collectives that DTensor issues in C++, as for the norm of sharded gradients"


class Observer:
    """Measure a script while it runs; use it as a context manager around the script.

    Args:
        tracker: Receives all numbers.
        methods: The methods that take the place of the script's own exchange or optimizer.
        on_begin: Called before training begins.
        first_step_s: A notice is printed if no step was seen after this number of seconds.
        interval_s: Seconds of an interval of steps, after which numbers are read and sent.

    Attributes:
        clock: The clock of the steps.
        losses: The losses.
    """

    def __init__(
        self,
        tracker: Tracker,
        methods: Sequence[Method] = (),
        *,
        on_begin: Callable[[], None] = lambda: None,
        first_step_s: float = _FIRST_STEP_S,
        interval_s: float = 1.0,
    ) -> None:
        self.tracker = tracker
        self._methods = methods
        self.losses = LossObserver(tracker)
        end_step = self.losses.end_step
        if methods:
            end_step = self._end_step
        self.clock = StepClock(
            tracker, Traffic(), self._read, end_step, on_begin, interval_s, self._exchange
        )
        self.data = DataObserver(self.clock)
        self.communication = CommunicationObserver(self.clock, methods)
        self._patches = Patches()
        self._first: dict[str, Any] | None = None
        self._first_step_s = first_step_s
        self._notice: threading.Timer | None = None

    def __enter__(self) -> Observer:
        patches, clock = self._patches, self.clock
        self.losses.install(patches, clock)
        self.data.install(patches)
        self.communication.install(patches)
        patches.replace(Optimizer, "__init__", self._optimizer_constructor)
        hooks = [register_optimizer_step_pre_hook(clock.before_optimizer)]
        if self._methods:
            hooks.append(register_optimizer_step_pre_hook(self._check_methods))
            self._replace_optimizers()
            patches.replace(torch.amp.GradScaler, "scale", self._scale)
        hooks.append(register_optimizer_step_post_hook(clock.after_optimizer))
        for hook in hooks:
            patches.add_undo(hook.remove)
        self._notice = threading.Timer(self._first_step_s, self._say_no_step)
        self._notice.daemon = True
        self._notice.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._notice is not None:
            self._notice.cancel()
        self._patches.restore()
        self.clock.close()

    # ------------------------------------------------------------------ methods

    def _check_methods(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a script that a method does not fit; a hook before each step."""
        if self.communication.models:
            return
        obstacle: Obstacle = "no DDP"
        if _is_sharded(optimizer):
            obstacle = "FSDP"
        raise refusal(self._methods[0].choice, obstacle)

    def _check_by_hand(self) -> None:
        """Refuse a script that updates its weights by hand and that a method does not fit."""
        for method in self._methods:
            if method.choice.kind != "gradients":
                raise refusal(method.choice, "no optimizer")
            if not self.communication.models:
                raise refusal(method.choice, "no DDP")

    def _exchange(self, optimizer: Optimizer) -> None:
        """Let the methods act on the weights, after the last optimizer of a step."""
        for method in self._methods:
            method.after_step(optimizer)

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse a GradScaler with a method on weights."""

        def scale(scaler: Any, outputs: Any) -> Any:
            for method in self._methods:
                if method.choice.kind == "weights" and scaler.is_enabled():
                    raise refusal(method.choice, "GradScaler")
            return original(scaler, outputs)

        return scale

    def _replace_optimizers(self) -> None:
        """Let a call of the constructor of an optimizer return that of a method."""
        makers = [method for method in self._methods if method.choice.kind == "optimizer"]
        if not makers:
            return
        is_making = False

        def new(cls: type[Optimizer], *args: Any, **kwargs: Any) -> Any:
            nonlocal is_making
            # Optimizers of the library and of torch may have others inside, and a copy passes no
            # arguments.
            frame = inspect.currentframe()
            module = ""
            if frame is not None and frame.f_back is not None:
                module = str(frame.f_back.f_globals.get("__name__"))
            is_inside = module.startswith(("torch.", "mlbench_core."))
            # That of Accelerate and others is around one that is replaced already.
            is_around = any(isinstance(value, Optimizer) for value in (*args, *kwargs.values()))
            if is_making or is_inside or is_around or not (args or kwargs):
                return object.__new__(cls)
            is_making = True
            try:
                return makers[0].new_optimizer(cls, args, kwargs)
            finally:
                is_making = False

        # Python calls no __init__ if __new__ returns an object of another class.
        Optimizer.__new__ = new  # type: ignore[method-assign, assignment]

    def _optimizer_constructor(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.clock.add_optimizer(optimizer)

        return init

    def _end_step(self, position: tuple[int, float]) -> None:
        self.losses.end_step(position)
        if not self.clock.has_optimizer:
            self._check_by_hand()
        self.communication.end_step()

    def _read(self) -> None:
        self.losses.read()
        optimizer = self.clock.optimizer
        if self._first is None:
            self._first = self.tracker.totals()
            if optimizer is not None and _is_sharded(optimizer):
                self.communication.unmeasured[_OF_DTENSOR] = None

    def _say_no_step(self) -> None:
        if self.clock.steps == 0:
            seconds = self._first_step_s
            sys.stderr.write(
                f"mlbench observe: no optimizer step seen yet: {seconds:g} s after the start, "
                "nothing has trained in this process. The script may still prepare data, or train "
                "in processes of its own\n"
            )

    # ------------------------------------------------------------------ the end

    def unmeasured(self, world_size: int) -> list[str]:
        """Return each thing that was not measured, with the reason.

        Args:
            world_size: Number of workers.
        """
        totals = self.tracker.totals()
        reasons = list(self.communication.unmeasured)
        if world_size > 1 and not reasons and not totals["communication_measured"]:
            reasons.append(_NO_COLLECTIVE)
        if not self.clock.has_fetched:
            if self.data.other_thread_reads:
                reasons.append(_OTHER_THREAD)
            else:
                reasons.append("data: no DataLoader was read")
        if not self.clock.has_optimizer:
            reasons.append(
                "optimizer: the script has no torch.optim.Optimizer, so each backward pass ends a "
                "step, and the update after it is a part of the next one"
            )
        if not totals["samples"]:
            if self.clock.has_fetched:
                reasons.append(_NO_TENSOR)
            else:
                reasons.append(_NO_SAMPLES)
        for times in self.clock.traffic.timed:
            if times.own_hook:
                reasons.append(f"the bytes of DistributedDataParallel's hook {times.own_hook}")
        if self.losses.first is None:
            reasons.append("loss: backward() was not called on a number that each worker has")
        return reasons

    def table(self, world_size: int, unmeasured: Sequence[str]) -> str:
        """Return the table of this worker.

        Args:
            world_size: Number of workers.
            unmeasured: Each thing that was not measured, with the reason.
        """
        totals, first = self.tracker.totals(), self._first
        if first is None:
            return table.table({"steps": "0"}, unmeasured)
        return table.table(self._rows(totals, first, world_size), unmeasured)

    def _rows(
        self, totals: dict[str, Any], first: dict[str, Any], world_size: int
    ) -> dict[str, str | None]:
        losses = [self.losses.first, self.losses.last]
        known = [loss for loss in losses if loss is not None]
        rows = table.run_rows(totals, first, world_size, known)
        if not self.clock.has_fetched:
            rows["  data"] = None
        if not self.clock.has_optimizer:
            rows["  optimizer"] = None
        rows["peak memory"] = self._memory()
        return rows

    def _memory(self) -> str | None:
        peak = self.tracker.summary().memory_peak_bytes
        if peak is not None:
            return f"{table.size(peak)} on the GPU"
        # Linux counts in kilobytes, and macOS in bytes.
        factor = 1024
        if sys.platform == "darwin":
            factor = 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
        return f"{table.size(peak)} of the process"


def _is_sharded(optimizer: Optimizer) -> bool:
    """Return True if the parameters of an optimizer are those of FSDP2 or another DTensor."""
    # A script with such parameters has imported this module already. Importing it here would take
    # every other script half as long as the import of torch.
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    return any(isinstance(param, tensor.DTensor) for param in optimizer.param_groups[0]["params"])
