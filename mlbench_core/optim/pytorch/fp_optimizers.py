"""Training in half precision: float32 master weights, loss scales, automatic mixed precision."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport.horovod import AllReduceAggregationHVD
from mlbench_core.arguments import check_int, check_number
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    OptimizerWrapper,
    check_aggregation,
    check_denominator_and_clipping,
    evaluate,
    evaluates_repeatedly,
    grouped_parameters,
    refuse_partial_state,
)

__all__ = ["DistributedGradScaler", "DynamicLossScaler", "FP16Optimizer"]


class DynamicLossScaler:
    r"""A loss scale that follows the range of half-precision gradients.

    The gradients of :math:`s L` are :math:`s` times those of the loss :math:`L`. With a large
    :math:`s` small gradients do not vanish in float16, but too large a scale overflows. So the
    scale starts at :math:`s_0`. It is divided by the factor :math:`f` at every overflow, and
    multiplied by it after :math:`w` consecutive updates without one:

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
        if max_scale is not None:
            max_scale = _in_range("max_scale", max_scale, 0.0)
        if min_scale is not None:
            min_scale = _in_range("min_scale", min_scale, 0.0)
        self.max_scale, self.min_scale = max_scale, min_scale
        self.scale_window = check_int("scale_window", scale_window, 1)
        self.loss_scale = self._within_limits(init_scale)
        self.updates_without_overflow = 0

    def has_overflow(self, grad_norm: float | Tensor) -> bool:
        """Return whether a gradient's norm shows that some gradient went out of range.

        Args:
            grad_norm: The norm: a number or a tensor with one element. Reading a tensor waits for
                its device.

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
                    f"the loss scale fell to {self.loss_scale:g}, which is not above the minimum "
                    f"scale {self.min_scale:g}: gradients overflow however little the loss is "
                    "scaled, so training diverges; lower the learning rate, clip gradients "
                    "(grad_clip), or look for inf and nan in data and loss"
                )
        else:
            self.updates_without_overflow += 1
            if self.updates_without_overflow == self.scale_window:
                self.updates_without_overflow = 0
                # Without a limit the scale would reach infinity in a long run without an overflow.
                largest = sys.float_info.max
                if self.max_scale is not None:
                    largest = self.max_scale
                self.loss_scale = min(self.loss_scale * self.scale_factor, largest)

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the number of updates without an overflow since it last changed."""
        return {
            "loss_scale": self.loss_scale,
            "updates_without_overflow": self.updates_without_overflow,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            ValueError: Something is missing or out of range.
        """
        missing = {"loss_scale", "updates_without_overflow"} - set(state_dict)
        if missing:
            raise ValueError(
                f"the state of a DynamicLossScaler lacks {sorted(missing)}; it has "
                f"{sorted(state_dict)}: give the result of its state_dict()"
            )
        loss_scale = _in_range("loss_scale", state_dict["loss_scale"], 0.0)
        self.updates_without_overflow = check_int(
            "updates_without_overflow", state_dict["updates_without_overflow"], 0
        )
        self.loss_scale = loss_scale

    def _within_limits(self, init_scale: float) -> float:
        init_scale = _in_range("init_scale", init_scale, 0.0)
        if self.max_scale is not None and init_scale > self.max_scale:
            raise ValueError(
                f"init_scale is {init_scale:g}, above max_scale "
                f"{self.max_scale:g}: start at most there"
            )
        if self.min_scale is not None and init_scale <= self.min_scale:
            raise ValueError(
                f"init_scale is {init_scale:g}, not above "
                f"min_scale {self.min_scale:g}: start above it"
            )
        return init_scale


def _in_range(name: str, value: float, least: float) -> float:
    """Return a positive finite number that is at least ``least``."""
    check_number(name, value)
    if not (math.isfinite(value) and value > 0 and value >= least):
        bound = "positive"
        if least:
            bound = f"at least {least:g}"
        raise ValueError(f"{name} is {value}; it must be finite and {bound}")
    return float(value)


class FP16Optimizer(OptimizerWrapper):
    r"""Any torch optimizer on a half-precision model, with float32 master weights and a loss scale.

    Updates are often too small to change a half-precision weight, so the sum of them is kept in
    float32: all trainable weights lie one after the other in :attr:`fp32_params`, the master
    weights :math:`x`, and the model holds them rounded. With the loss scale :math:`s`, :math:`k`
    workers and the scaled gradients :math:`\nabla s L_i` that :meth:`backward_loss` accumulated in
    the model's own dtype, :meth:`step` computes in float32

    .. math::
        g = \frac{1}{s m} \Bigl( \frac{1}{d} \sum_{i=1}^{k} \nabla s L_i \Bigr), \qquad
        x \leftarrow U(x, g), \qquad \text{model} \leftarrow \text{round}(x),

    where the bracket is aggregated in half precision, :math:`U` is the wrapped optimizer, and

    * :math:`d = k`, or the ``denom`` of :meth:`step` with ``average_custom``,
    * :math:`m` is the ``multiplier`` of :meth:`step`.

    Divide by a large number in two parts: by a ``denom`` that keeps sums over workers in the range
    of float16, and by the ``multiplier`` in float32. With :math:`u` batches accumulated before an
    update:

    * mean over :math:`k u` batches whose loss is a mean (task 4a): ``step(denom=k * u)``;
    * mean over :math:`n` tokens of all workers, losses being sums over tokens (task 4b):
      ``step(denom=k * u, multiplier=n / (k * u))``.

    If the norm of :math:`g` on any worker is infinite or not a number, all workers skip the update
    and reduce the scale. This check costs a message of 4 bytes per update. Models in bfloat16,
    which has the range of float32, are not scaled: their scale is always 1.

    Parameters that are float32 in an otherwise half-precision model (normalization layers) are
    trained too. A parameter without a gradient on all workers gets zeros, since it is a part of the
    one master tensor. An optimizer with momentum or weight decay may still move it. The master
    tensor does not contain frozen parameters.

    Attributes:
        fp16_model: As given.
        fp32_params: The master weights, one flat float32 parameter of n elements in the order of
            the model's parameters; build the wrapped optimizer over ``[fp32_params]``. Its ``grad``
            has g after a step.
        loss_scaler: The :class:`DynamicLossScaler`.
        aggregation: The aggregation; it counts the bytes.
        agg: The function ``(model, op, denom)`` that :meth:`step` calls.
        agg_mode: The operation it is called with.
        agg_grad: True: gradients are aggregated, never weights.
        world_size: Number of workers.

    Args:
        fp16_model: The model, on one device. Every worker's must have the same weights.
        world_size: Number of workers; None takes that of the process group.
        use_cuda: True if training runs on GPUs.
        use_horovod: Communicate through Horovod instead of ``torch.distributed``.
        by_layer: Send each parameter in a separate message instead of all together.
        grad_clip: Largest norm of g; larger gradients are scaled down to it. Infinite: no clipping.
        init_scale: First loss scale.
        scale_factor: Factor by which the loss scale shrinks and grows.
        scale_window: Number of updates running without an overflow after which the scale grows.
        max_scale: Largest loss scale; None for no limit.
        min_scale: Loss scale at which training ends with an error.
        average_world: Divide sums by the number of workers. It is the default if neither flag is
            set.
        average_custom: Divide sums by the ``denom`` given to :meth:`step`.
        divide_before: Divide before the sum instead of after it, so that sums of half-precision
            numbers stay in range.
        aggregation: How gradients travel, instead of ``world_size``, ``use_cuda``, ``use_horovod``
            and ``divide_before``. It must not overlap: gradients are complete after the last
            :meth:`backward_loss`.

    Raises:
        ValueError: An argument is out of its range or contradicts the aggregation, both averages
            are asked for, the model has nothing to train, or ``world_size`` is not that of the
            process group.
        TypeError: ``fp16_model`` is not a module, or has parameters that float32 does not hold, or
            the aggregation is not an all-reduce.

    Example:
        >>> model = nn.Linear(2, 1).half()
        >>> fp_optimizer = FP16Optimizer(model, world_size=1)
        >>> fp_optimizer.set_optimizer(torch.optim.AdamW([fp_optimizer.fp32_params], lr=0.01))
        >>> fp_optimizer.zero_grad()
        >>> fp_optimizer.backward_loss(model(torch.ones(4, 2).half()).float().mean())
        >>> fp_optimizer.step()
        True
        >>> fp_optimizer.fp32_params.dtype, fp_optimizer.fp32_params.shape, model.weight.dtype
        (torch.float32, torch.Size([3]), torch.float16)

    References:
        Micikevicius et al.: Mixed Precision Training. arXiv:1710.03740
    """

    agg_grad = True

    def __init__(
        self,
        fp16_model: nn.Module,
        world_size: int | None,
        use_cuda: bool = False,
        use_horovod: bool = False,
        by_layer: bool = False,
        grad_clip: float = float("inf"),
        init_scale: float = 1024,
        scale_factor: float = 2,
        scale_window: int = 128,
        max_scale: float | None = None,
        min_scale: float = 1e-4,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
        *,
        aggregation: AllReduceAggregation | None = None,
    ) -> None:
        check_denominator_and_clipping(average_world, average_custom, grad_clip)
        self.fp16_model = fp16_model
        self._weights = _trainable_parameters(fp16_model)
        flat = torch.cat([weight.detach().reshape(-1).float() for weight in self._weights.values()])
        self.fp32_params = nn.Parameter(flat)
        # Every step overwrites this gradient, so its memory is allocated once.
        self.fp32_params.grad = torch.zeros_like(flat)
        super().__init__([self.fp32_params])
        dtypes = {weight.dtype for weight in self._weights.values()}
        # bfloat16 has the range of float32, so its gradients neither vanish nor overflow.
        needs_scaling = torch.bfloat16 not in dtypes or torch.float16 in dtypes
        if needs_scaling:
            self.loss_scaler = DynamicLossScaler(
                init_scale, scale_factor, scale_window, max_scale, min_scale=min_scale
            )
        else:
            self.loss_scaler = DynamicLossScaler(init_scale=1.0, scale_factor=1.0)
        self.grad_clip = grad_clip
        self.aggregation = self._check_exchange(
            aggregation, world_size, use_cuda, use_horovod, divide_before
        )
        self.world_size = self.aggregation.world_size
        self.agg = self.aggregation.agg_grad(by_layer=by_layer)
        self.agg_mode = AVG_WORLD
        if average_custom:
            self.agg_mode = AVG_CUSTOM
        self._clock = CommunicationClock()

    def _check_exchange(
        self,
        aggregation: AllReduceAggregation | None,
        world_size: int | None,
        use_cuda: bool,
        use_horovod: bool,
        divide_before: bool,
    ) -> AllReduceAggregation:
        """Return the aggregation if it fits the other arguments, or make the one they describe."""
        if aggregation is None:
            make: type[AllReduceAggregation] = AllReduceAggregation
            # Horovod is imported only on request, because it is an optional package.
            if use_horovod:
                make = AllReduceAggregationHVD
            aggregation = make(world_size, divide_before, use_cuda)
        elif use_horovod and not isinstance(aggregation, AllReduceAggregationHVD):
            raise ValueError(
                f"use_horovod must be False, not True, because {type(aggregation).__name__} sends "
                "without Horovod: give AllReduceAggregationHVD(...) as aggregation"
            )
        # The state of another aggregation, such as an error memory, would be missing in
        # state_dict().
        check_aggregation(
            aggregation,
            AllReduceAggregation,
            world_size=world_size,
            divide_before=divide_before or None,
            use_cuda=use_cuda or None,
        )
        if aggregation.overlap:
            raise ValueError(
                "overlap must be False with FP16Optimizer, which sends all gradients in step(): "
                "leave it out of the aggregation"
            )
        return aggregation

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Set the torch optimizer of the master weights, as setting ``optimizer`` does.

        Args:
            optimizer: An optimizer over ``[fp32_params]``.

        Raises:
            TypeError: It is not a torch optimizer.
            ValueError: It does not optimize the master weights, or evaluates the loss several times
                in a step (LBFGS).
        """
        self.optimizer = optimizer

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer lacks the master weights or reevaluates the loss."""
        # Compared by identity: == of tensors compares their elements.
        if id(self.fp32_params) not in map(id, grouped_parameters(optimizer)):
            raise ValueError(
                f"{type(optimizer).__name__} does not optimize the float32 master weights: build "
                "it over [fp_optimizer.fp32_params], not over model.parameters()"
            )
        if evaluates_repeatedly(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss several times in a "
                "step, which a scale that may change at each overflow does not "
                "allow: use an optimizer that needs no closure"
            )

    def backward_loss(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss and add them to the model's.

        The loss itself does not change. Several calls before one step accumulate.

        Args:
            loss: One element, best in float32. In a half-precision loss sums of many terms go out
                of range.

        Raises:
            TypeError: ``loss`` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must be a tensor that depends on the model, not {loss!r}")
        # Not in place, because the script may report the loss.
        (loss * self.loss_scaler.loss_scale).backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let :meth:`backward_loss` in the block accumulate gradients without communication.

        Only :meth:`step` sends messages, so this changes nothing. It exists for scripts that
        accumulate gradients with any optimizer. Gradients are summed in the model's half precision:
        use few or small ones, and divide by their number through ``denom`` or ``multiplier``.
        """
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> NoReturn:
        """Raise an error, because :meth:`step` unscales gradients and clips them to ``grad_clip``.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "clip_grad_norm_ must have gradients without a loss scale, which only step() removes: "
            f"give FP16Optimizer(..., grad_clip={max_norm}), or set its attribute grad_clip"
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Closure | None = None,
        tracker: Any | None = None,
        multiplier: float | Tensor = 1,
        denom: Denominator | None = None,
    ) -> bool:
        """Aggregate, unscale, clip and take one step; skip it if any worker's gradients overflowed.

        Args:
            closure: Clears the gradients, computes the loss and calls :meth:`backward_loss`. It is
                called once, before anything else.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the
                end of the aggregation and of the update (unless it was skipped), and the cost of
                the communication.
            multiplier: Divisor of gradients in float32, in addition to the loss scale: a positive
                number or a tensor with one element, the same on every worker.
            denom: With ``average_custom``, the divisor of sums over workers in half precision: as
                ``multiplier``. Otherwise it is not used.

        Returns:
            True if the weights were updated, the same on every worker.

        Raises:
            FloatingPointError: The loss scale fell to ``min_scale``.
            RuntimeError: No optimizer is set yet.
            ValueError: ``multiplier`` or, with ``average_custom``, ``denom`` is not positive.
        """
        refuse_partial_state(self)
        if self.optimizer is None:
            raise RuntimeError(
                "there is no torch optimizer yet: call set_optimizer(optimizer over [fp32_params])"
            )
        divisor = self._unscaling_divisor(multiplier)
        evaluate(closure)
        # In the model's own dtypes: half the bytes of the float32 gradients.
        with self._clock.measure(self.fp32_params.device) as interval:
            self.agg({**self._weights, **self._extra()}, self.agg_mode, denom)
            interval.size_bytes = self.aggregation.last_bytes
        if tracker is not None:
            tracker.record_batch_agg()
        norm = self._unscaled_norm(divisor)
        # All workers must skip the same updates, or their weights would differ.
        overflow = self._any_overflow(norm)
        self._clock.report(tracker)
        if not overflow:
            if self.grad_clip < math.inf:
                nn.utils.clip_grads_with_norm_(
                    [self.fp32_params, *self._extra().values()], self.grad_clip, norm
                )
            self._inner.step()
            self._round_into_model()
            if tracker is not None:
                tracker.record_batch_opt_step()
        self.loss_scaler.update_scale(overflow)
        return not overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model.

        Args:
            set_to_none: Set them to None instead of zero. The flat gradient of the master weights
                keeps its memory; the next step overwrites it.
        """
        for parameter in (*self._weights.values(), *self._extra().values()):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def reset_master_weights(self) -> None:
        """Copy the model's weights into the master weights, for example after loading them."""
        torch_private.foreach_copy_(self._parts(self.fp32_params), list(self._weights.values()))

    def extra_state(self) -> dict[str, Any]:
        """Return the master weights as ``"fp32_params"``, the loss scale as ``"loss_scaler"``."""
        return {
            "fp32_params": self.fp32_params.detach(),
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    @torch.no_grad()
    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore master weights and loss scale, and round the former into the model."""
        if not extra:
            return
        master = extra["fp32_params"]
        if master.shape != self.fp32_params.shape:
            raise ValueError(
                f"the state has {master.numel()} master weights, but the model has "
                f"{self.fp32_params.numel()} trainable ones: load it into the model that it was "
                "saved with, with the same parameters frozen"
            )
        self.loss_scaler.load_state_dict(extra["loss_scaler"])
        self.fp32_params.copy_(master)
        self._round_into_model()

    def _unscaling_divisor(self, multiplier: float | Tensor) -> float | Tensor:
        """Return the loss scale times the multiplier, s m."""
        if isinstance(multiplier, Tensor):
            if multiplier.numel() != 1:
                raise ValueError(
                    f"multiplier must have one element, not shape {tuple(multiplier.shape)}"
                )
            # Reading the value to check it would wait for the device.
            if multiplier.device.type != "cpu":
                multiplier = multiplier.detach().reshape(()).to(self.fp32_params.device)
                return multiplier * self.loss_scaler.loss_scale
            multiplier = multiplier.item()
        if not (math.isfinite(multiplier) and multiplier > 0):
            raise ValueError(
                "multiplier must be a positive finite number, not "
                f"{multiplier}: gradients are divided by it"
            )
        return multiplier * self.loss_scaler.loss_scale

    def _unscaled_norm(self, divisor: float | Tensor) -> Tensor:
        """Gather the model's gradients in the flat float32 one, unscale them, return their norm."""
        if self.fp32_params.grad is None:
            self.fp32_params.grad = torch.empty_like(self.fp32_params)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for part, parameter in zip(
            self._parts(self.fp32_params.grad), self._weights.values(), strict=True
        ):
            if parameter.grad is None:
                # The part still has the gradient of an earlier step.
                part.zero_()
            else:
                sources.append(parameter.grad)
                targets.append(part)
        if sources:
            torch_private.foreach_copy_(targets, sources)
        gradients = [self.fp32_params.grad]
        for extra in self._extra().values():
            if extra.grad is not None:
                gradients.append(extra.grad)
        torch_private.foreach_div_(gradients, divisor)
        return nn.utils.get_total_norm(gradients)

    def _any_overflow(self, norm: Tensor) -> bool:
        """Return whether the norm is infinite or nan on any worker, the same on all workers."""
        overflowed = norm.isfinite().logical_not().float()
        before = self.aggregation.bytes_sent
        with self._clock.measure(self.fp32_params.device) as interval:
            self.aggregation.any_worker(overflowed)
            interval.size_bytes = self.aggregation.bytes_sent - before
        # Masked instead of read twice, so that a GPU is waited for once.
        return self.loss_scaler.has_overflow(norm.masked_fill(overflowed > 0, math.nan))

    def _round_into_model(self) -> None:
        """Write the master weights into the model, rounded to its dtypes."""
        torch_private.foreach_copy_(list(self._weights.values()), self._parts(self.fp32_params))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """View a flat tensor as tensors of the shapes of the model's parameters."""
        weights = self._weights.values()
        parts = flat.split([weight.numel() for weight in weights])
        return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]

    def _extra(self) -> dict[str, Tensor]:
        """Return the optimizer's parameters outside the master weights, by name."""
        return self.extra_parameters([self.fp32_params])


def _trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, each once, if float32 can represent them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fp16_model must be a torch.nn.Module, not {type(model).__name__}")
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not weights:
        raise ValueError(
            "fp16_model has no parameter that requires a gradient: there is nothing to train"
        )
    for name, parameter in weights.items():
        if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}, which float32 master weights cannot "
                "hold: convert the model with .half() or .bfloat16(), or freeze that parameter"
            )
    devices = sorted({str(parameter.device) for parameter in weights.values()})
    if len(devices) > 1:
        raise ValueError(
            f"fp16_model is spread over {', '.join(devices)}; its master weights lie on one device"
        )
    return weights


class DistributedGradScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` whose scale is the same on all workers.

    Torch's own scaler looks for overflows in the gradients of its worker alone. The optimizers of
    this library still take or skip each step on all workers alike, since they agree on it in
    ``step``. But only the worker with the overflow halves its scale, so from then on the scales
    differ. (That changes no result, because each worker unscales its gradients before they are
    averaged.)

    With this scaler the workers agree in the search for overflows. So the scale, ``unscale_`` and
    ``update`` are the same on all workers, also with other optimizers. It costs a message of 4
    bytes per step and device.

    With ``overlap`` it waits for gradients that are on their way before it reads them, and lets a
    worker without a batch take part in their average.

    Args:
        *args: As for :class:`torch.amp.GradScaler`.
        aggregation: The aggregation that exchanges the overflow; None for the optimizer's, or an
            all-reduce over the process group if it has none.
        **kwargs: As for :class:`torch.amp.GradScaler`.

    Example:
        >>> from mlbench_core.optim.pytorch import CentralizedSGD
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = CentralizedSGD(model=model, lr=0.1)
        >>> scaler = DistributedGradScaler("cpu", init_scale=8.0)
        >>> with torch.autocast("cpu", dtype=torch.float16):
        ...     loss = model(torch.ones(4, 2)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        8.0

    References:
        Micikevicius et al.: Mixed Precision Training. arXiv:1710.03740
    """

    def __init__(self, *args: Any, aggregation: Aggregation | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._aggregation = aggregation

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this worker's gradients and agree on whether there was an overflow."""
        # With overlap, a worker without a batch would otherwise read gradients that are not
        # averages yet.
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        found_infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # This worker may have no gradient at all, but must take part in the agreement.
        found_infs.setdefault(found_inf.device, found_inf)
        flags = list(found_infs.values())
        overflow = torch.stack([flag.to(found_inf.device) for flag in flags]).amax()
        aggregation = self._aggregation
        if aggregation is None:
            aggregation = getattr(optimizer, "aggregation", None)
        if aggregation is None:
            aggregation = AllReduceAggregation(None)
        aggregation.any_worker(overflow)
        for flag in flags:
            flag.copy_(overflow)
        return found_infs
