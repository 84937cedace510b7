"""Training of half-precision models with float32 master weights and a loss scale."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.centralized import (
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
    AllReduceAggregationHVD,
)
from mlbench_core.aggregation.pytorch.timing import CommunicationClock
from mlbench_core.optim.pytorch.generic import Closure, evaluate
from mlbench_core.optim.pytorch.inner import evaluates_repeatedly, parameters_beside
from mlbench_core.optim.pytorch.loss_scaling import DynamicLossScaler
from mlbench_core.optim.pytorch.wrapper import OptimizerWrapper

__all__ = ["DynamicLossScaler", "FP16Optimizer"]


class FP16Optimizer(OptimizerWrapper):
    r"""Any torch optimizer on a half-precision model, with float32 master weights and a dynamic loss scale.

    Updates are often too small to change a half-precision weight, so the sum of them is kept in float32: all trainable
    weights lie one after the other in :attr:`fp32_params`, the master weights :math:`x`, and the model holds them
    rounded. With the loss scale :math:`s`, :math:`k` workers and the scaled gradients :math:`\nabla s L_i` that
    :meth:`backward_loss` accumulated in the model's own dtype, :meth:`step` computes in float32

    .. math::
        g = \frac{1}{s m} \Bigl( \frac{1}{d} \sum_{i=1}^{k} \nabla s L_i \Bigr), \qquad
        x \leftarrow U(x, g), \qquad \text{model} \leftarrow \text{round}(x),

    where the bracket is aggregated in half precision, :math:`U` is the wrapped optimizer, and

    * :math:`d = k`, or the ``denom`` of :meth:`step` with ``average_custom``,
    * :math:`m` is the ``multiplier`` of :meth:`step`.

    Divide by a large number in two parts: by a ``denom`` that keeps sums over workers in the range of float16, and
    by the ``multiplier`` in float32. With :math:`u` batches accumulated before an update:

    * mean over :math:`k u` batches whose loss is a mean (task 4a): ``step(denom=k * u)``;
    * mean over :math:`n` tokens of all workers, losses being sums over tokens (task 4b):
      ``step(denom=k * u, multiplier=n / (k * u))``.

    If the norm of :math:`g` on any worker is infinite or not a number, all workers skip the update and reduce the
    scale. This check costs a message of 4 bytes per update. Models in bfloat16, which has the range of float32, are not
    scaled: their scale is always 1.

    Parameters that are float32 in an otherwise half-precision model (normalization layers) are trained too. A
    parameter without a gradient on all workers gets zeros, since it is a part of the one master tensor. An optimizer
    with momentum or weight decay may still move it. The master tensor does not contain frozen parameters.

    Attributes:
        fp16_model: As given.
        fp32_params: The master weights, one flat float32 parameter of n elements in the order of the model's
            parameters; build the wrapped optimizer over ``[fp32_params]``. Its ``grad`` has g after a step.
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
        by_layer: One message per parameter instead of one for the whole model.
        grad_clip: Largest norm of g; larger gradients are scaled down to it. Infinite: no clipping.
        init_scale: First loss scale.
        scale_factor: Factor by which the loss scale shrinks and grows.
        scale_window: Number of updates running without an overflow after which the scale grows.
        max_scale: Largest loss scale; None for no limit.
        min_scale: Loss scale at which training ends with an error.
        average_world: Divide sums by the number of workers. It is the default if neither flag is set.
        average_custom: Divide sums by the ``denom`` given to :meth:`step`.
        divide_before: Divide before the sum instead of after it, so that sums of half-precision numbers stay in range.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: An argument is out of its range, both averages are asked for, the model has nothing to train, or
            ``world_size`` is not that of the process group.
        TypeError: ``fp16_model`` is not a module, or has parameters that float32 does not hold.

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
        process_group: Any = None,
    ) -> None:
        if average_world and average_custom:
            raise ValueError("average_world and average_custom are both True: set the one to divide by")
        if not grad_clip > 0:
            raise ValueError(f"grad_clip must be positive, or inf for no clipping, not {grad_clip}")
        self.fp16_model = fp16_model
        self._weights = _trainable_parameters(fp16_model)
        self.fp32_params = _flat_master(self._weights.values())
        super().__init__([self.fp32_params])
        self.loss_scaler = (
            DynamicLossScaler(init_scale, scale_factor, scale_window, max_scale, min_scale=min_scale)
            if _needs_scaling(self._weights.values())
            else DynamicLossScaler(init_scale=1.0, scale_factor=1.0)
        )
        self.grad_clip = grad_clip
        if use_horovod and process_group is not None:
            raise ValueError("process_group must be None with use_horovod: Horovod uses no process groups of torch")
        self.aggregation: AllReduceAggregation = (
            AllReduceAggregationHVD(world_size, divide_before, use_cuda)
            if use_horovod
            else AllReduceAggregation(world_size, divide_before, use_cuda, process_group=process_group)
        )
        self.world_size = self.aggregation.world_size
        self.agg = self.aggregation.agg_grad(by_layer=by_layer)
        self.agg_mode = AVG_CUSTOM if average_custom else AVG_WORLD
        self._clock = CommunicationClock()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Set the torch optimizer that updates the master weights, as setting the attribute ``optimizer`` does.

        Args:
            optimizer: An optimizer over ``[fp32_params]``.

        Raises:
            TypeError: It is not a torch optimizer.
            ValueError: It does not optimize the master weights, or evaluates the loss several times in a step (LBFGS).
        """
        self.optimizer = optimizer

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer does not optimize the master weights, or needs several evaluations."""
        if not any(p is self.fp32_params for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} does not optimize the float32 master weights: build it over "
                "[fp_optimizer.fp32_params], not over model.parameters()"
            )
        if evaluates_repeatedly(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss several times in a step, which a scale that may "
                "change at each overflow does not allow: use an optimizer that needs no closure"
            )

    def backward_loss(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss and add them to the model's; the loss stays as it is.

        Several calls before one step accumulate.

        Args:
            loss: One element, best in float32. In a half-precision loss sums of many terms go out of range.

        Raises:
            TypeError: ``loss`` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss must be a tensor that depends on the model, not {loss!r}")
        (loss * self.loss_scaler.loss_scale).backward()  # not in place: the caller may report the loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let calls of :meth:`backward_loss` in the block accumulate gradients without communication.

        Only :meth:`step` sends messages, so this changes nothing. It exists for scripts that accumulate gradients with
        any optimizer. Gradients are summed in the model's half precision: use few or small ones, and divide by their
        number through ``denom`` or ``multiplier``.
        """
        yield

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Closure | None = None,
        tracker: Any | None = None,
        multiplier: float | Tensor = 1,
        denom: Denominator | None = None,
    ) -> bool:
        """Aggregate, unscale, clip and take one step, or skip it if gradients overflowed on any worker.

        Args:
            closure: Clears the gradients, computes the loss and calls :meth:`backward_loss`. It is called once, before
                anything else.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the end of the aggregation
                and of the update (unless it was skipped), and the cost of the communication.
            multiplier: Divisor of gradients in float32, in addition to the loss scale: a positive number or a tensor
                with one element, the same on every worker.
            denom: With ``average_custom``, the divisor of sums over workers in half precision: as ``multiplier``.
                Otherwise it is not used.

        Returns:
            True if the weights were updated, the same on every worker.

        Raises:
            FloatingPointError: The loss scale fell to ``min_scale``.
            RuntimeError: No optimizer is set yet.
            ValueError: ``multiplier`` or, with ``average_custom``, ``denom`` is not positive.
        """
        if self.optimizer is None:
            raise RuntimeError("there is no torch optimizer yet: call set_optimizer(optimizer over [fp32_params])")
        divisor = self._unscaling_divisor(multiplier)
        evaluate(closure)
        self._aggregate(denom)
        if tracker is not None:
            tracker.record_batch_agg()
        norm = self._unscaled_norm(divisor)
        overflow = self._any_overflow(norm)  # all workers must skip the same updates, or their weights would differ
        self._clock.report(tracker)
        if not overflow:
            if self.grad_clip < math.inf:
                nn.utils.clip_grads_with_norm_([self.fp32_params, *self._beside().values()], self.grad_clip, norm)
            self._inner.step()
            self._round_into_model()
            if tracker is not None:
                tracker.record_batch_opt_step()
        self.loss_scaler.update_scale(overflow)
        return not overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model.

        Args:
            set_to_none: Set them to None instead of zero. The flat gradient of the master weights keeps its memory;
                the next step overwrites it.
        """
        for parameter in (*self._weights.values(), *self._beside().values()):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def reset_master_weights(self) -> None:
        """Copy the model's weights into the master weights, for example after a script has loaded them."""
        torch_private.foreach_copy_(self._parts(self.fp32_params), list(self._weights.values()))

    def extra_state(self) -> dict[str, Any]:
        """Return the master weights and the loss scale, under ``"fp32_params"`` and ``"loss_scaler"``."""
        return {"fp32_params": self.fp32_params.detach(), "loss_scaler": self.loss_scaler.state_dict()}

    @torch.no_grad()
    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore master weights and loss scale, and round the former into the model."""
        if not extra:
            return
        master = extra["fp32_params"]
        if master.shape != self.fp32_params.shape:
            raise ValueError(
                f"the state has {master.numel()} master weights, but the model has {self.fp32_params.numel()} "
                "trainable ones: load it into the model that it was saved with, with the same parameters frozen"
            )
        self.loss_scaler.load_state_dict(extra["loss_scaler"])
        self.fp32_params.copy_(master)
        self._round_into_model()

    def _aggregate(self, denom: Denominator | None) -> None:
        """Aggregate the gradients of the model, in its own dtypes, and those of the extra parameters."""
        with self._clock.measure(self.fp32_params.device) as interval:
            self.agg({**self._weights, **self._beside()}, self.agg_mode, denom)
            interval.size_bytes = self.aggregation.last_bytes

    def _unscaling_divisor(self, multiplier: float | Tensor) -> float | Tensor:
        """Return the loss scale times the multiplier, s m."""
        if isinstance(multiplier, Tensor):
            if multiplier.numel() != 1:
                raise ValueError(f"multiplier must have one element, not shape {tuple(multiplier.shape)}")
            if multiplier.device.type != "cpu":  # reading the value would wait for the device
                return multiplier.detach().reshape(()).to(self.fp32_params.device) * self.loss_scaler.loss_scale
            multiplier = multiplier.item()
        if not (math.isfinite(multiplier) and multiplier > 0):
            raise ValueError(
                f"multiplier must be a positive finite number, not {multiplier}: gradients are divided by it"
            )
        return multiplier * self.loss_scaler.loss_scale

    def _unscaled_norm(self, divisor: float | Tensor) -> Tensor:
        """Gather the model's gradients in the flat float32 one, unscale them, and return their norm."""
        if self.fp32_params.grad is None:
            self.fp32_params.grad = torch.empty_like(self.fp32_params)
        sources, targets = [], []
        for part, parameter in zip(self._parts(self.fp32_params.grad), self._weights.values(), strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                sources.append(parameter.grad)
                targets.append(part)
        if sources:
            torch_private.foreach_copy_(targets, sources)
        gradients = [self.fp32_params.grad, *(p.grad for p in self._beside().values() if p.grad is not None)]
        torch_private.foreach_div_(gradients, divisor)
        return nn.utils.get_total_norm(gradients)

    def _any_overflow(self, norm: Tensor) -> bool:
        """Return whether the norm is infinite or nan on any worker; all workers get the same answer."""
        overflowed = norm.isfinite().logical_not().float()
        before = self.aggregation.bytes_sent
        with self._clock.measure(self.fp32_params.device) as interval:
            self.aggregation.any_worker(overflowed)
            interval.size_bytes = self.aggregation.bytes_sent - before
        return self.loss_scaler.has_overflow(norm.masked_fill(overflowed > 0, math.nan))

    def _round_into_model(self) -> None:
        """Write the master weights into the model, rounded to its dtypes."""
        torch_private.foreach_copy_(list(self._weights.values()), self._parts(self.fp32_params))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """View a flat tensor as tensors of the shapes of the model's parameters."""
        parts = flat.split([weight.numel() for weight in self._weights.values()])
        return [part.view(weight.shape) for part, weight in zip(parts, self._weights.values(), strict=True)]

    def _beside(self) -> dict[str, Tensor]:
        """Return the extra parameters, which the wrapped optimizer updates outside the master weights, by name."""
        return parameters_beside(self.param_groups, [self.fp32_params])


def _trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, each once, if float32 master weights can stand for them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fp16_model must be a torch.nn.Module, not {type(model).__name__}")
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not weights:
        raise ValueError("fp16_model has no parameter that requires a gradient: there is nothing to train")
    for name, parameter in weights.items():
        if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}, which float32 master weights cannot hold: convert the model "
                "with .half() or .bfloat16(), or freeze that parameter"
            )
    devices = sorted({str(parameter.device) for parameter in weights.values()})
    if len(devices) > 1:
        raise ValueError(f"fp16_model is spread over {', '.join(devices)}; its master weights lie on one device")
    return weights


def _flat_master(weights: Iterable[Tensor]) -> nn.Parameter:
    """Return one flat float32 parameter with the values of all weights, and a gradient of zeros."""
    flat = torch.cat([weight.detach().reshape(-1).float() for weight in weights])
    master = nn.Parameter(flat)
    # Every step overwrites this gradient, so its memory is allocated once.
    master.grad = torch.zeros_like(flat)
    return master


def _needs_scaling(weights: Iterable[Tensor]) -> bool:
    """Return whether gradients need a scale; bfloat16 does not, because it has the range of float32."""
    dtypes = {weight.dtype for weight in weights}
    return torch.bfloat16 not in dtypes or torch.float16 in dtypes
