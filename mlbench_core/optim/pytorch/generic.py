"""Any torch optimizer, made distributed by any aggregation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import required

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import BOOKKEEPING, Aggregation, Denominator, check_denominator
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.names import check_names
from mlbench_core.aggregation.pytorch.overlap import BUCKET_SIZE_BYTES, OverlappedReduction
from mlbench_core.aggregation.pytorch.timing import CommunicationClock
from mlbench_core.arguments import check_at_least, check_finite_at_least_0
from mlbench_core.optim.pytorch.grad_scaler import must_skip
from mlbench_core.optim.pytorch.inner import (
    divides_gradients,
    dividing,
    evaluates_repeatedly,
    lay_out_like_parameters,
    parameters_beside,
    without_momentum,
)
from mlbench_core.optim.pytorch.wrapper import OptimizerWrapper

__all__ = [
    "Closure",
    "GenericCentralizedOptimizer",
    "OptimizerOrFactory",
    "Overlap",
    "check_lr",
    "evaluate",
]

Closure: TypeAlias = Callable[[], Any]
Overlap: TypeAlias = "bool | Literal['step']"
OptimizerOrFactory: TypeAlias = "Optimizer | Callable[[Iterable[Tensor]], Optimizer]"


class GenericCentralizedOptimizer(OptimizerWrapper):
    r"""Any torch optimizer, made distributed by any aggregation.

    With ``agg_grad=True`` the workers average their gradients and each takes the same step; with :math:`k` workers,
    gradients :math:`g_i` and the step :math:`U` of the wrapped optimizer,

    .. math:: x \leftarrow U\Bigl(x, \frac{1}{k} \sum_{i=1}^{k} g_i\Bigr).

    If every worker's loss is the mean over its share of a batch and the shares are equal, this equals the step of one
    worker on the whole batch. With ``agg_grad=False`` each takes its own step and the weights are averaged afterwards:

    .. math:: x \leftarrow \frac{1}{k} \sum_{i=1}^{k} U(x, g_i).

    Workers must start from equal weights (use the same seed). Floating-point buffers, such as BatchNorm's running
    statistics, are averaged together with weights. If gradients are averaged, each worker keeps its own buffers.

    Attributes:
        model: As given.
        world_size: Number of workers.
        optimizer: The wrapped torch optimizer. Setting it swaps it.
        aggregation: The aggregation; it counts the bytes.
        agg: The function ``(model, op, denom)`` that :meth:`step` calls.
        agg_mode: The operation it is called with.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model whose gradients or weights are aggregated.
        use_cuda: True if training runs on GPUs; see the aggregation.
        by_layer: One message per parameter instead of one for the whole model.
        divide_before: Divide before the sum instead of after it, for half-precision gradients.
        agg_grad: Average gradients before the step; False averages weights after it.
        optimizer: A torch optimizer, or a function that makes one of an iterable of parameters. If it is left out, set
            the attribute before the first step.
        aggregation: How to aggregate, instead of a plain all-reduce. It then decides on ``use_cuda`` and
            ``divide_before``.
        overlap: Average gradients while the backward pass still computes others, in buckets: ``backward()`` returns
            when all are averages. With ``"step"`` it returns at once, and :meth:`step` updates each bucket's parameters
            while others are still on their way. Gradients must then not be read before the step, unless
            :meth:`synchronize` is called first. The wrapped optimizer must update each parameter by itself, as
            torch's do. See :class:`~mlbench_core.aggregation.pytorch.overlap.OverlappedReduction`.
        comm_dtype: The dtype in which gradients or weights travel, for example ``torch.float16``; None for their own.
        shared_memory: Sum through memory that the workers share instead of the backend's all-reduce. All workers must
            run on one machine and train on its processors; see
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        bucket_size_bytes: With ``overlap``, a message is sent when it holds this number of bytes.
        process_group: The workers that train together, from ``torch.distributed.new_group``; None for all. Ranks and
            ``world_size`` are then counted in the group, and its result is that of a run of its workers alone.

    Raises:
        ValueError: ``model`` is missing or without parameters, ``world_size`` is not that of the process group, or
            ``overlap``, ``comm_dtype`` or ``shared_memory`` does not fit the aggregation or the model.
        BackendError: ``shared_memory`` is asked for, but the workers share none.
        TypeError: An argument has the wrong type.

    Example:
        >>> from functools import partial
        >>> model = nn.Linear(2, 1)
        >>> optimizer = GenericCentralizedOptimizer(None, model, optimizer=partial(torch.optim.RMSprop, lr=0.01))
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.001]
    """

    own_state = ("aggregation",)
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to step()

    def __init__(
        self,
        world_size: int | None,
        model: nn.Module | None,
        use_cuda: bool = False,
        by_layer: bool = False,
        divide_before: bool = False,
        agg_grad: bool = True,
        *,
        optimizer: OptimizerOrFactory | None = None,
        aggregation: Aggregation | None = None,
        overlap: Overlap = False,
        comm_dtype: torch.dtype | None = None,
        shared_memory: bool = False,
        bucket_size_bytes: int = BUCKET_SIZE_BYTES,
        process_group: Any = None,
    ) -> None:
        model = _check_model(model)
        super().__init__(model.parameters())
        self.model = model
        self.agg_grad = agg_grad
        self.agg_mode = AVG_WORLD
        if aggregation is None:
            aggregation = AllReduceAggregation(
                world_size,
                divide_before,
                use_cuda,
                comm_dtype=comm_dtype,
                shared_memory=_check_shared_memory(shared_memory, model),
                process_group=process_group,
            )
        self.aggregation = _check_aggregation(aggregation, world_size, comm_dtype, shared_memory, process_group)
        self.world_size = self.aggregation.world_size
        make = self.aggregation.agg_grad if agg_grad else self.aggregation.agg_model
        self.agg = make(by_layer=by_layer)
        self._clock = CommunicationClock()
        self._was_skipped = False
        self._reduction = (
            _overlapped(model, self.aggregation, agg_grad, by_layer, bucket_size_bytes, overlap) if overlap else None
        )
        if optimizer is not None:
            self.optimizer = _make_optimizer(optimizer, model)

    @torch.no_grad()
    def step(self, closure: Closure | None = None, tracker: Any | None = None) -> Any:  # type: ignore[override]
        """Aggregate and take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the loss. It is called
                before the gradients are aggregated.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the end of the aggregation
                and of the update, and the cost of the communication.

        Returns:
            The closure's result, this worker's loss; None without a closure.
        """
        return self._step(closure, tracker)

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer has none of the model's parameters."""
        known = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"optimizer must update parameters of the model, but {type(optimizer).__name__} has none of them: "
                "create it with model.parameters() of the same model"
            )

    def extra_state(self) -> dict[str, Any]:
        """Return the state of the aggregation under the key ``"aggregation"``, if it has any."""
        remembered = self.aggregation.state_dict()
        return {"aggregation": remembered} if remembered else {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore the state of the aggregation.

        Raises:
            ValueError: It is the state of another aggregation, or has entries of parameters that do not exist.
        """
        remembered = extra.get("aggregation", {})
        parameters = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        check_names(self.aggregation.remembered_names(remembered), [*parameters, *self._beside()])
        self.aggregation.load_state_dict(remembered)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients without communication.

        Only ``overlap=True`` sends messages during a backward pass; the next pass after the block sends the sum.
        Otherwise this changes nothing: :meth:`step` sends the accumulated gradients.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> optimizer = GenericCentralizedOptimizer(None, model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
            >>> with optimizer.no_sync():
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
        """
        with self._reduction.no_sync() if self._reduction is not None else contextlib.nullcontext():
            yield

    def synchronize(self) -> None:
        """Ensure that gradients are averages before the step; without ``overlap`` do nothing.

        It waits for gradients that are on their way, and sends those that no backward pass has sent. So every worker
        must call it.
        """
        if self._reduction is not None:
            self._reduction.average()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimized parameters.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        if self._reduction is not None:
            self._reduction.synchronize()
            self._reduction.forget()  # gradients that a script sets by hand from here on were not reduced
        super().zero_grad(set_to_none)

    def _step(
        self,
        closure: Closure | None,
        tracker: Any | None,
        denom: Denominator | None = None,
        grad_clip: float = math.inf,
    ) -> Any:
        """Take one step; ``denom`` goes to the aggregation, and gradients are clipped right before the update."""
        looked_too_early = False
        if self._reduction is not None and hasattr(self, "found_inf"):
            looked_too_early = not self._reduction.is_reduced
            # The other workers' backward passes have sent their gradients, so these must go before any other message.
            self._reduction.average()
        # The decision comes before the closure and the aggregation, so that all workers skip the step or none does.
        self._was_skipped = must_skip(self, self.aggregation, looked_too_early)
        if self._was_skipped:
            if self._reduction is not None:
                self._reduction.forget()
            return None
        if closure is not None and evaluates_repeatedly(self._inner):
            return self._step_with_evaluations(closure, tracker, denom, grad_clip)
        loss = evaluate(closure)
        # Clipping needs the norm of all gradients, so with it no update can start before the last average.
        if self._reduction is not None and not self._reduction.waits_in_backward and grad_clip == math.inf:
            self._step_as_averages_arrive(self._reduction, tracker, denom)
            return loss
        if self.agg_grad:
            self._aggregate(tracker, denom)
        self._clip(grad_clip)
        self._take_step()
        if tracker is not None:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        return loss

    def _step_as_averages_arrive(
        self, reduction: OverlappedReduction, tracker: Any | None, denom: Denominator | None
    ) -> None:
        """Update the parameters of each bucket when its averages are there, then the extra parameters.

        A fused optimizer divides sums in its own kernel: a division before it would cost a pass over the memory.
        """
        divisor = check_denominator(denom) if self.agg_mode == AVG_CUSTOM else self.world_size
        for parameters, are_sums in reduction.arrivals(as_sums=divides_gradients(self._inner)):
            if tracker is not None:
                tracker.record_batch_agg()
            scale = self._scale(denom)
            if scale is not None and not are_sums:
                torch_private.foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
            with dividing(self._inner, divisor if are_sums else None, parameters[0].device):
                self._update(parameters)
            if tracker is not None:
                tracker.record_batch_opt_step()
        reduction.report(tracker)
        beside = self._beside()
        if beside:
            self._exchange([beside], denom)
            self._update(beside.values())
            self._clock.report(tracker)

    def _take_step(self) -> None:
        """Let the wrapped optimizer take a step.

        Torch's fused SGD needs momentum buffers of all parameters or of none. Parameters that get their first gradient
        later than others, such as layers that were frozen, take their first step in a separate call.
        """
        lay_out_like_parameters(self._inner)
        newcomers = without_momentum(self._inner)
        if newcomers:
            others = {id(parameter) for parameter in newcomers}
            self._update(newcomers)
            self._update([p for group in self.param_groups for p in group["params"] if id(p) not in others])
        else:
            self._inner.step()

    def _update(self, parameters: Iterable[Tensor]) -> None:
        """Let the wrapped optimizer take a step on some parameters alone."""
        chosen = {id(parameter) for parameter in parameters}
        whole = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
            self._take_step()
        finally:  # also after an error, or the other parameters would be lost
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    def _step_with_evaluations(
        self, closure: Closure, tracker: Any | None, denom: Denominator | None, grad_clip: float
    ) -> Any:
        """Take a step of an optimizer, such as LBFGS, that evaluates the loss as often as it needs.

        If gradients are averaged, the optimizer gets the average of the losses too, so that all workers decide alike.
        """
        losses: list[Any] = []

        def average_loss() -> Any:
            losses.append(evaluate(closure))
            shared = losses[-1]
            if self.agg_grad:
                self._aggregate(tracker, denom)
                shared = torch.as_tensor(losses[-1]).detach().clone()
                self.aggregation.aggregate({f"{BOOKKEEPING}loss": shared}, self.agg_mode, denom)
            self._clip(grad_clip)
            return shared

        self._inner.step(average_loss)
        if tracker is not None:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        return losses[0] if losses else None

    def _aggregate(self, tracker: Any | None, denom: Denominator | None) -> None:
        """Aggregate the model and the extra parameters of the optimizer, and report the cost."""
        beside = self._beside()
        if self._reduction is not None:
            self._finish_reduction(self._reduction, denom)
        to_aggregate: list[nn.Module | dict[str, Tensor]] = [self.model] if self._reduction is None else []
        to_aggregate += [beside] if beside else []
        if to_aggregate:
            self._exchange(to_aggregate, denom)
        if tracker is not None:
            tracker.record_batch_agg()
        if self._reduction is not None:
            self._reduction.report(tracker)
        self._clock.report(tracker)

    def _exchange(self, parts: Sequence[nn.Module | dict[str, Tensor]], denom: Denominator | None) -> None:
        """Aggregate a model, or parameters by name, and measure the time."""
        with self._clock.measure(next(self.model.parameters()).device) as interval:
            for part in parts:
                self.agg(part, self.agg_mode, denom)
                interval.size_bytes += self.aggregation.last_bytes

    def _beside(self) -> dict[str, Tensor]:
        """Return the extra parameters, which the wrapped optimizer updates but the model does not have, by name."""
        return parameters_beside(self.param_groups, self.model.parameters())

    def _finish_reduction(self, reduction: OverlappedReduction, denom: Denominator | None) -> None:
        """Wait for the averages of the backward pass, and scale them if the operation takes a denominator."""
        scale = self._scale(denom)
        reduction.complete()
        if scale is not None:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch_private.foreach_mul_(gradients, scale)

    def _scale(self, denom: Denominator | None) -> Denominator | None:
        """Return k/d, which turns an average over k workers into a sum divided by d; None to keep the average."""
        return self.world_size / check_denominator(denom) if self.agg_mode == AVG_CUSTOM else None

    def _clip(self, max_norm: float) -> None:
        """Scale the gradients down to the norm ``max_norm`` if theirs is larger."""
        if max_norm < math.inf:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, max_norm)


def _check_model(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise ValueError("model is missing: give model=, the torch.nn.Module to train")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    return model


def _make_optimizer(optimizer: OptimizerOrFactory, model: nn.Module) -> Optimizer:
    """Return the optimizer as given, or the one that the given function makes of the model's parameters."""
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        return optimizer
    return optimizer(model.parameters())


def _check_shared_memory(shared_memory: bool, model: nn.Module) -> bool:
    """Return ``shared_memory`` if the model is in the host's memory."""
    others = {str(parameter.device) for parameter in model.parameters() if parameter.device.type != "cpu"}
    if shared_memory and others:
        raise ValueError(
            f"shared_memory=True sums in the host's memory, but the model is on {', '.join(sorted(others))}"
        )
    return shared_memory


def _check_aggregation(
    aggregation: Aggregation,
    world_size: int | None,
    comm_dtype: torch.dtype | None,
    shared_memory: bool,
    process_group: Any,
) -> Aggregation:
    """Return the aggregation if it fits the number of workers and the other arguments on communication."""
    if not isinstance(aggregation, Aggregation):
        raise TypeError(f"aggregation must be an Aggregation, not {type(aggregation).__name__}")
    if world_size is not None and world_size != aggregation.world_size:
        raise ValueError(f"world_size is {world_size}, but the aggregation is for {aggregation.world_size} workers")
    if comm_dtype is not None and getattr(aggregation, "comm_dtype", None) != comm_dtype:
        raise ValueError(
            f"comm_dtype is {comm_dtype}, but an aggregation is given too, which decides on that itself: give "
            f"{type(aggregation).__name__} its own comm_dtype, or leave comm_dtype out"
        )
    if shared_memory and not getattr(aggregation, "shared_memory", False):
        raise ValueError(
            "shared_memory is True, but an aggregation is given too, which decides on that itself: make an "
            "AllReduceAggregation(..., shared_memory=True), or leave shared_memory out"
        )
    if process_group is not None and aggregation.group is not process_group:
        raise ValueError(
            f"process_group must be that of the aggregation, which has other workers: give the process_group to "
            f"{type(aggregation).__name__}"
        )
    return aggregation


def _overlapped(
    model: nn.Module,
    aggregation: Aggregation,
    agg_grad: bool,
    by_layer: bool,
    bucket_size_bytes: int,
    overlap: Overlap,
) -> OverlappedReduction | None:
    """Make the reduction during the backward pass; None for one worker, who has nothing to send."""
    if overlap not in (True, "step"):
        raise ValueError(f"overlap must be True, False or 'step', not {overlap!r}")
    if type(aggregation) is not AllReduceAggregation:
        raise ValueError(
            f"overlap=True needs a plain all-reduce, and {type(aggregation).__name__} needs all gradients at once: "
            "leave overlap out"
        )
    if not agg_grad:
        raise ValueError("overlap=True sends gradients during the backward pass, but agg_grad=False sends weights")
    if by_layer:
        raise ValueError(
            "by_layer must be False with overlap, which sends buckets of parameters: for a message per parameter give "
            "bucket_size_bytes=0"
        )
    check_at_least("bucket_size_bytes", bucket_size_bytes, 0)
    if aggregation.world_size == 1:
        return None
    return OverlappedReduction(model, aggregation, bucket_size_bytes, waits_in_backward=overlap != "step")


def evaluate(closure: Closure | None) -> Any:
    """Return the result of a closure, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_lr(lr: Any, optimizer: str) -> Any:
    """Return a learning rate as given, if it is one.

    Raises:
        TypeError: It is not a number.
        ValueError: It is missing, negative or not finite, or a tensor with several elements.
    """
    if lr is required or lr is None:
        raise ValueError(f"lr is missing: {optimizer} needs a learning rate, for example lr=0.1")
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must have one element, not shape {tuple(lr.shape)}")
        check_finite_at_least_0("lr", lr.item())
    else:
        check_finite_at_least_0("lr", lr)
    return lr
