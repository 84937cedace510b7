"""The factor that keeps half-precision gradients in range."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mlbench_core.arguments import check_int, check_number

__all__ = ["DynamicLossScaler"]


class DynamicLossScaler:
    r"""A loss scale that follows the range of half-precision gradients.

    The gradients of :math:`s L` are :math:`s` times those of the loss :math:`L`. With a large :math:`s` small gradients
    do not vanish in float16, but too large a scale overflows. So the scale starts at :math:`s_0`. It is divided by the
    factor :math:`f` at every overflow, and multiplied by it after :math:`w` consecutive updates without one:

    .. math:: s \leftarrow \begin{cases} s / f & \text{on overflow} \\
              \min(s f, s_\text{max}) & \text{after } w \text{ updates running without} \\
              s & \text{otherwise.} \end{cases}

    Attributes:
        loss_scale: The scale :math:`s`, a float.

    Args:
        init_scale: First scale :math:`s_0`.
        scale_factor: The factor :math:`f`, at least 1. With 1 the scale stays as it is.
        scale_window: The number :math:`w` of updates running without an overflow.
        max_scale: The largest scale :math:`s_\text{max}`; None for no limit.
        min_scale: The scale at which :meth:`update_scale` gives up; None for no limit.

    Raises:
        ValueError: A number is out of its range; the message has it and its range.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=8.0, scale_window=2, max_scale=16.0)
        >>> scales = []
        >>> for overflow in (True, False, False, False, False):
        ...     scaler.update_scale(overflow)
        ...     scales.append(scaler.loss_scale)
        >>> scales
        [4.0, 4.0, 8.0, 8.0, 16.0]

    References:
        Micikevicius et al.: Mixed Precision Training. arXiv:1710.03740
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float | None = None,
        *,
        min_scale: float | None = None,
    ) -> None:
        self.scale_factor = _in_range("scale_factor", scale_factor, 1.0)
        self.max_scale = None if max_scale is None else _in_range("max_scale", max_scale, 0.0)
        self.min_scale = None if min_scale is None else _in_range("min_scale", min_scale, 0.0)
        self.scale_window = check_int("scale_window", scale_window, 1)
        self.loss_scale = self._within_limits(init_scale)
        self.updates_without_overflow = 0

    def has_overflow(self, grad_norm: float | Tensor) -> bool:
        """Return whether a gradient's norm shows that some gradient went out of range.

        Args:
            grad_norm: The norm: a number or a tensor with one element. Reading a tensor waits for its device.

        Returns:
            True if it is infinite or not a number.

        Example:
            >>> scaler = DynamicLossScaler()
            >>> scaler.has_overflow(float("nan")), scaler.has_overflow(1e30)
            (True, False)
        """
        return not math.isfinite(grad_norm)

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale after an update.

        Args:
            overflow: True if the update met an overflow and was skipped.

        Raises:
            FloatingPointError: The scale fell to ``min_scale``; the message names it.
        """
        if overflow:
            self.loss_scale /= self.scale_factor
            self.updates_without_overflow = 0
            if self.min_scale is not None and self.loss_scale <= self.min_scale:
                raise FloatingPointError(
                    f"the loss scale fell to {self.loss_scale:g}, which is not above the minimum scale "
                    f"{self.min_scale:g}: gradients overflow however little the loss is scaled, so training diverges; "
                    "lower the learning rate, clip gradients (grad_clip), or look for inf and nan in data and loss"
                )
        else:
            self.updates_without_overflow += 1
            if self.updates_without_overflow == self.scale_window:
                self.updates_without_overflow = 0
                # Without a limit the scale would reach infinity in a long run without an overflow.
                largest = sys.float_info.max if self.max_scale is None else self.max_scale
                self.loss_scale = min(self.loss_scale * self.scale_factor, largest)

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and how many updates have run without an overflow since it last changed."""
        return {"loss_scale": self.loss_scale, "updates_without_overflow": self.updates_without_overflow}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            ValueError: Something is missing or out of range.
        """
        missing = {"loss_scale", "updates_without_overflow"} - set(state_dict)
        if missing:
            raise ValueError(
                f"the state of a DynamicLossScaler lacks {sorted(missing)}; it has {sorted(state_dict)}: give what "
                "its state_dict() returned"
            )
        loss_scale = _in_range("loss_scale", state_dict["loss_scale"], 0.0)
        self.updates_without_overflow = check_int("updates_without_overflow", state_dict["updates_without_overflow"], 0)
        self.loss_scale = loss_scale

    def _within_limits(self, init_scale: float) -> float:
        init_scale = _in_range("init_scale", init_scale, 0.0)
        if self.max_scale is not None and init_scale > self.max_scale:
            raise ValueError(f"init_scale is {init_scale:g}, above max_scale {self.max_scale:g}: start at most there")
        if self.min_scale is not None and init_scale <= self.min_scale:
            raise ValueError(f"init_scale is {init_scale:g}, not above min_scale {self.min_scale:g}: start above it")
        return init_scale


def _in_range(name: str, value: float, least: float) -> float:
    """Return a positive finite number that is at least ``least``."""
    check_number(name, value)
    if not (math.isfinite(value) and value > 0 and value >= least):
        raise ValueError(f"{name} is {value}; it must be finite and {f'at least {least:g}' if least else 'positive'}")
    return float(value)
