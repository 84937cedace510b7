"""Read the losses of which a script calls backward(), without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from mlbench_core import torch_private
from mlbench_core.observe.patches import Patches
from mlbench_core.observe.steps import StepClock
from mlbench_core.tracking.tracker import Tracker

__all__ = ["LossObserver"]

# The mean of one step: its position, and the values with the divisors of its micro-batches.
_Step = tuple[tuple[int, float], list[tuple["float | Tensor", float]]]


class LossObserver:
    """Keep the loss of each micro-batch, and read those on a device once per interval.

    The value is that before GradScaler multiplies it. If a script divides the loss of each
    micro-batch by their number, the value is that before the division.

    Args:
        tracker: Receives the mean loss of each step.

    Attributes:
        first: Loss of the first step; None before it is read.
        last: Loss of the last step that was read.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._tracker = tracker
        self._micro: list[tuple[float | Tensor, float]] = []
        self._steps: list[_Step] = []
        self._scaled: Tensor | None = None
        self._unscaled: Tensor | None = None
        # The number of micro-batches by which the script has divided losses.
        self._accumulated = 1

    def install(self, patches: Patches, clock: StepClock) -> None:
        """Replace ``torch.autograd.backward``, which ``Tensor.backward`` calls too."""
        patches.replace(torch.autograd, "backward", functools.partial(self._backward, clock))
        patches.replace(torch.amp.GradScaler, "scale", self._scale)

    def _backward(self, clock: StepClock, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # Reentrant checkpointing runs a backward pass within another one.
            if clock.is_in_backward or get_ident() != clock.thread:
                original(tensors, *args, **kwargs)
                return
            # A generator can be read once. An edge of the graph is a tuple of a class of its own.
            if not isinstance(tensors, (Tensor, tuple)):
                tensors = tuple(tensors)
            self._keep(tensors)
            clock.backward_begins()
            try:
                original(tensors, *args, **kwargs)
            except BaseException:
                clock.backward_fails()
                raise
            clock.backward_ends()

        return backward

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, Tensor):
                self._scaled, self._unscaled = scaled, outputs
            return scaled

        return scale

    def _keep(self, tensors: Any) -> None:
        loss = tensors
        if not isinstance(tensors, Tensor):
            loss = next(iter(tensors), None)
        if loss is not None and loss is self._scaled:
            loss = self._unscaled
        self._scaled = self._unscaled = None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        divisor = torch_private.divisor(loss)
        if type(loss) is not Tensor:
            loss = _local(loss)
            if loss is None:
                return
        if loss.is_cpu:
            self._micro.append((loss.item(), divisor))
        else:
            # A copy, because a CUDA graph may write the next loss to the same memory.
            self._micro.append((loss.detach().clone(), divisor))

    def end_step(self, position: tuple[int, float]) -> None:
        """Note that the micro-batches so far were those of one step.

        Args:
            position: Number of steps before it, and the seconds since training began.
        """
        if self._micro:
            self._steps.append((position, self._micro))
            self._micro = []

    def read(self) -> None:
        """Pass the losses of the steps so far on to the tracker."""
        steps, self._steps = self._steps, []
        values = _values([value for _, micro in steps for value, _ in micro])
        for number, (position, micro) in enumerate(steps, 1):
            count, total = len(micro), 0.0
            for _, divisor in micro:
                value, factor = next(values), round(divisor)
                # The last step of an epoch may have fewer, and divide by the usual number.
                # Another factor is a part of the loss.
                if factor in (count, self._accumulated):
                    value *= factor
                    if count > 1:
                        self._accumulated = factor
                total += value
            mean = total / count
            if self.first is None:
                self.first = mean
            self.last = mean
            log = number == len(steps) and self._tracker.rank == 0
            self._tracker.record_stat("loss", mean, log_to_api=log, at=position)


def _local(loss: Any) -> Tensor | None:
    """Return this worker's copy of a DTensor; None if reading it would take a collective."""
    placements = getattr(loss, "placements", None)
    if not placements or not all(placement.is_replicate() for placement in placements):
        return None
    with torch.no_grad():
        local = loss.to_local()
    if type(local) is not Tensor:
        return None
    return local


def _values(losses: list[float | Tensor]) -> Any:
    """Yield numbers; those on the same device are copied at once."""
    tensors: dict[torch.device, list[Tensor]] = {}
    for loss in losses:
        if isinstance(loss, Tensor):
            tensors.setdefault(loss.device, []).append(loss.reshape(()))
    # One copy for all of a device, because each one waits for it.
    copied = {device: iter(torch.stack(there).tolist()) for device, there in tensors.items()}
    for loss in losses:
        if isinstance(loss, Tensor):
            yield next(copied[loss.device])
        else:
            yield loss
