"""Any torch optimizer, made distributed by any aggregation, and the wrapper that it is built on."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import required

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    refuse_complex,
)
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport.messages import check_denominator
from mlbench_core.aggregation.pytorch.transport.names import check_names
from mlbench_core.aggregation.pytorch.transport.overlap import OverlappedReduction
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from mlbench_core.optim.pytorch.updates.fused import is_dense

__all__ = [
    "Closure",
    "GenericCentralizedOptimizer",
    "OptimizerFactory",
    "OptimizerWrapper",
    "check_aggregation",
    "check_denominator_and_clipping",
    "check_lr",
    "evaluate",
    "evaluates_repeatedly",
    "must_skip",
    "refuse_partial_state",
    "shared_optimizer_state",
    "state_without_hooks",
]

Closure: TypeAlias = Callable[[], Any]
OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
_AggregationT = TypeVar("_AggregationT", bound=Aggregation)

# Sent instead of 0 or 1 as the overflow flag, so that the maximum over workers raises the error on
# all of them.
_TOO_EARLY = 2


class _NoOptimizerYet(Optimizer):
    """A placeholder that holds the parameters until a real optimizer is set."""

    _MESSAGE = (
        "there is no torch optimizer yet: give optimizer=..., or set the attribute .optimizer"
    )

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        raise RuntimeError(self._MESSAGE)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1] = _GroupWithoutOptions(self.param_groups[-1])


class _GroupWithoutOptions(dict[str, Any]):
    """A parameter group without a learning rate, which raises an error if a scheduler reads it."""

    def __missing__(self, option: str) -> Any:
        raise RuntimeError(f"a parameter group has no {option!r}: {_NoOptimizerYet._MESSAGE}")


class OptimizerWrapper(Optimizer):
    """A :class:`torch.optim.Optimizer` with the groups, state and defaults of a wrapped optimizer.

    Everything that works on a torch optimizer works on this one: learning-rate schedulers, hooks,
    ``add_param_group``, ``state_dict``, ``deepcopy`` and pickling. The groups and the state are the
    wrapped optimizer's objects, so a change through either is seen by both, also after
    ``load_state_dict`` and after the wrapped optimizer was swapped. A subclass adds ``step``.

    As in torch, hooks stay with the object they were registered on: copies and pickles have none.

    Attributes:
        own_state: Keys of ``state_dict()`` whose values differ between workers although all workers
            have the same weights. A checkpoint holds these of every worker.

    Args:
        params: Parameters to hold until :attr:`optimizer` is set.
    """

    own_state: ClassVar[tuple[str, ...]] = ()
    _inner: Optimizer

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        self._inner = _NoOptimizerYet(params)
        super().__init__(params, {})

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the wrapped torch optimizer; None before one was set. Setting it swaps it.

        Schedulers that were built on this object continue with the new optimizer's groups if it has
        the same number.
        """
        if isinstance(self._inner, _NoOptimizerYet):
            return None
        return self._inner

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        # A wrapper within itself would call its own methods without end.
        inside: Optimizer = optimizer
        while isinstance(inside, OptimizerWrapper):
            if inside is self:
                raise ValueError("an optimizer cannot be put inside itself")
            inside = inside._inner
        self.check_inside(optimizer)
        self._inner = optimizer

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer cannot be wrapped; a subclass may refuse some."""

    # mypy expects plain attributes as in Optimizer; here they are those of the wrapped optimizer.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups of the wrapped optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """Return the state of the wrapped optimizer, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the defaults of the wrapped optimizer."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, whose defaults fill in missing options."""
        self._inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimized parameters.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        self._inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer and the entries of :meth:`extra_state`.

        The format is torch's. As in torch, its tensors are the optimizer's own: they change with
        the next step. Copy it with :func:`copy.deepcopy` if both this optimizer and the one that
        loads it continue in one process.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint.state_dict`` calls it, which would lose the
                extra entries.
        """
        for pre_hook in torch_private.optimizer_hooks(self, "state_dict_pre"):
            pre_hook(self)
        refuse_partial_state(self, self.extra_state)
        state_dict = {**self._inner.state_dict(), **self.extra_state()}
        for post_hook in torch_private.optimizer_hooks(self, "state_dict_post"):
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the result of :meth:`state_dict`. A plain torch optimizer's state fits as well.

        Args:
            state_dict: The state of an optimizer with the same groups.
        """
        state_dict = dict(state_dict)
        for pre_hook in torch_private.optimizer_hooks(self, "load_state_dict_pre"):
            state_dict = pre_hook(self, state_dict) or state_dict
        extra = dict(state_dict)
        own = {key: extra.pop(key) for key in ("state", "param_groups") if key in extra}
        refuse_partial_state(self, self.extra_state)
        # The extra state goes first, so that a refused one leaves the wrapped optimizer as it was.
        self.load_extra_state(extra)
        self._inner.load_state_dict(own)
        for post_hook in torch_private.optimizer_hooks(self, "load_state_dict_post"):
            post_hook(self)

    def shared_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries of one worker; see :func:`shared_optimizer_state`."""
        return shared_optimizer_state(self, state_dict)

    def extra_state(self) -> dict[str, Any]:
        """Return additional entries of :meth:`state_dict`; a subclass may have some."""
        return {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore the result of :meth:`extra_state`; ``extra`` is empty if a state has none."""

    def extra_parameters(self, known: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the parameters in the groups that are not known, by name: ``"group{i}.{j}"``."""
        ids = set(map(id, known))
        extra: dict[str, Tensor] = {}
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in ids:
                    extra[f"group{i}.{j}"] = parameter
        return extra

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but hooks and a patched ``step``, which belong to this object."""
        return state_without_hooks(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # torch creates the hooks here, which the state does not have.
        super().__setstate__({})


def is_called_by_checkpoint_functions() -> bool:
    """Return True if ``torch.distributed.checkpoint.state_dict`` has called the caller."""
    frame = inspect.currentframe()
    # A few frames of decorators and hooks lie between.
    for _ in range(13):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False


def refuse_partial_state(
    optimizer: Any, extra: Callable[[], Mapping[str, Any]] | None = None
) -> None:
    """Raise an error if ``torch.distributed.checkpoint`` asks for a state of which it loses a part.

    Its functions keep only the state of each parameter and the options of each group. They also
    take the values of one worker for those of all workers.

    Args:
        optimizer: The optimizer.
        extra: Returns the entries that they would lose; None if other entries differ between
            workers, too.

    Raises:
        RuntimeError: There are such entries, and the caller is one of these functions.
    """
    if is_called_by_checkpoint_functions() and (extra is None or extra()):
        raise RuntimeError(
            f"torch.distributed.checkpoint.state_dict cannot save {type(optimizer).__name__}, "
            "because it would lose the state of the communication, such as error memories or "
            "shared weights: save optimizer.state_dict() on every worker by torch.save and restore "
            "it by load_state_dict, or use the Checkpointer of mlbench_core"
        )


def shared_optimizer_state(optimizer: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without the entries of one worker alone.

    A worker that has no saved state, or that is in a run with another number of workers, loads
    this. An error memory of another worker would be applied twice.

    Args:
        optimizer: The optimizer, with its aggregation if it has one.
        state_dict: Its state, saved by any worker.

    Returns:
        The state as given, without error memories and the like; see
        :meth:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation.shared_state`.
    """
    if "aggregation" not in state_dict:
        return dict(state_dict)
    return {
        **state_dict,
        "aggregation": optimizer.aggregation.shared_state(state_dict["aggregation"]),
    }


def state_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that copies and pickles of an optimizer get, for ``__getstate__``."""
    # A learning-rate scheduler replaces step by its own method, and sets _opt_called to see that it
    # was called.
    own = {"step", *torch_private.PRIVATE_OPTIMIZER_ATTRIBUTES}
    state = {}
    for name, value in optimizer.__dict__.items():
        if name not in own and not name.endswith("_hooks"):
            state[name] = value
    return state


def grouped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class GenericCentralizedOptimizer(OptimizerWrapper):
    r"""Any torch optimizer, made distributed by any aggregation.

    With ``agg_grad=True`` the workers average their gradients and each takes the same step; with
    :math:`k` workers, gradients :math:`g_i` and the step :math:`U` of the wrapped optimizer,

    .. math:: x \leftarrow U\Bigl(x, \frac{1}{k} \sum_{i=1}^{k} g_i\Bigr).

    If every worker's loss is the mean over its share of a batch and the shares are equal, this
    equals the step of one worker on the whole batch. With ``agg_grad=False`` each takes its own
    step and the weights are averaged afterwards:

    .. math:: x \leftarrow \frac{1}{k} \sum_{i=1}^{k} U(x, g_i).

    Workers must start from equal weights (use the same seed). Floating-point buffers, such as
    BatchNorm's running statistics, are averaged together with weights. If gradients are averaged,
    each worker keeps its own buffers.

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
        by_layer: Send each parameter in separate messages instead of all together.
        divide_before: Divide before the sum instead of after it, for half-precision gradients.
        agg_grad: Average gradients before the step; False averages weights after it.
        optimizer: A torch optimizer, or a function that makes one of an iterable of parameters. If
            it is left out, set the attribute before the first step.
        aggregation: How gradients or weights travel; None for an all-reduce with ``world_size``,
            ``divide_before`` and ``use_cuda``. All other settings, such as overlap with the
            backward pass, the dtype that is sent or a subgroup of workers, belong to the
            aggregation: for example ``AllReduceAggregation(overlap=True,
            comm_dtype=torch.bfloat16)``.

    Raises:
        ValueError: ``model`` is missing or without parameters, ``world_size`` is not that of the
            process group, an argument contradicts the aggregation, or the aggregation does not fit
            the model or the other arguments.
        TypeError: An argument has the wrong type, or a parameter is complex and the aggregation
            takes real ones only.

    Example:
        >>> from functools import partial
        >>> model = nn.Linear(2, 1)
        >>> make = partial(torch.optim.RMSprop, lr=0.01)
        >>> optimizer = GenericCentralizedOptimizer(None, model, optimizer=make)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.001]
    """

    own_state = ("aggregation",)
    # torch.amp.GradScaler then leaves unscaling and skipping to step(), where the workers agree on
    # them.
    _step_supports_amp_scaling = True

    # Divisor of the sums over workers, if the operation takes one.
    _denom: Denominator | None = None

    def __init__(
        self,
        world_size: int | None,
        model: nn.Module | None,
        use_cuda: bool = False,
        by_layer: bool = False,
        divide_before: bool = False,
        agg_grad: bool = True,
        *,
        optimizer: Optimizer | OptimizerFactory | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        if model is None:
            raise ValueError("model is missing: give model=, the torch.nn.Module to train")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        super().__init__(model.parameters())
        self.model = model
        self.agg_grad = agg_grad
        self.agg_mode = AVG_WORLD
        if aggregation is None:
            aggregation = AllReduceAggregation(world_size, divide_before, use_cuda)
        self.aggregation = check_aggregation(
            aggregation,
            Aggregation,  # type: ignore[type-abstract]
            world_size=world_size,
            divide_before=divide_before or None,
            use_cuda=use_cuda or None,
        )
        self._check_memory()
        refuse_complex(self.aggregation, dict(model.named_parameters()))
        self.world_size = self.aggregation.world_size
        # Scripts of version 3.0 read and call optimizer.agg.
        if agg_grad:
            self.agg = self.aggregation.agg_grad(by_layer=by_layer)
        else:
            self.agg = self.aggregation.agg_model(by_layer=by_layer)
        self._clock = CommunicationClock()
        self._was_skipped = False
        # True if clip_grad_norm_ has aggregated the gradients before the step.
        self._is_aggregated = False
        # The gradient that clip_grad_norm_ left in each parameter, and the version of this tensor.
        self._clipped: list[tuple[Tensor, Tensor | None, int | None]] = []
        self._reduction: OverlappedReduction | None = None
        if aggregation.overlap:
            self._reduction = self._make_reduction(by_layer)
        # A torch optimizer may be callable too, so its type decides.
        if callable(optimizer) and not isinstance(optimizer, Optimizer):
            optimizer = optimizer(model.parameters())
        if optimizer is not None:
            self.optimizer = optimizer

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, tracker: Any | None = None
    ) -> Any:
        """Aggregate and take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the
                loss. It is called before the gradients are aggregated.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the
                end of the aggregation and of the update, and the cost of the communication.

        Returns:
            The closure's result, this worker's loss; None without a closure.
        """
        return self._step(closure, tracker, self._denom)

    def check_inside(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if an optimizer has none of the model's parameters."""
        ids = set(map(id, self.model.parameters()))
        if ids.isdisjoint(map(id, grouped_parameters(optimizer))):
            raise ValueError(
                f"optimizer must update parameters of the model, but {type(optimizer).__name__} "
                "has none of them: create it with model.parameters() of the same model"
            )

    def extra_state(self) -> dict[str, Any]:
        """Return the state of the aggregation under the key ``"aggregation"``, if it has any."""
        remembered = self.aggregation.state_dict()
        if not remembered:
            return {}
        return {"aggregation": remembered}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restore the state of the aggregation.

        Raises:
            ValueError: It is the state of another aggregation, or has entries of parameters that do
                not exist.
        """
        remembered = extra.get("aggregation", {})
        named = dict(self.model.named_parameters(remove_duplicate=False))
        extra_named = self.extra_parameters(self.model.parameters())
        check_names(self.aggregation.remembered_names(remembered), [*named, *extra_named])
        self.aggregation.load_state_dict(remembered)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients without communication.

        Only ``overlap=True`` sends messages during a backward pass; the next pass after the block
        sends the sum. Otherwise this changes nothing: :meth:`step` sends the accumulated gradients.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> sgd = torch.optim.SGD(model.parameters(), 0.1)
            >>> optimizer = GenericCentralizedOptimizer(None, model, optimizer=sgd)
            >>> with optimizer.no_sync():
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
        """
        if self._reduction is None:
            yield
            return
        with self._reduction.no_sync():
            yield

    def synchronize(self) -> None:
        """Ensure that gradients are averages before the step; without ``overlap`` do nothing.

        It sends the gradients that no backward pass has sent, so every worker must call it.
        """
        if self._reduction is not None:
            self._reduction.average()

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Average the gradients over the workers, and clip the norm of the averages.

        Call it on all workers right before :meth:`step`, in place of
        :func:`torch.nn.utils.clip_grad_norm_`, which would clip the gradients of one worker before
        they are averaged. The result is that of one worker on the joined batch, with or without
        ``overlap``. With a compressing aggregation, the aggregated gradient is clipped. The step
        after it sends nothing more. With a GradScaler, call ``scaler.unscale_(optimizer)`` before.

        Args:
            max_norm: Largest norm of the gradients of all parameters of this optimizer together.
            norm_type: The p of the p-norm; infinity for the largest entry.
            error_if_nonfinite: Raise an error if the norm is infinite or not a number.
            foreach: As in torch.

        Returns:
            The norm of the averages before they were clipped, without dimensions; the same on all
            workers.

        Raises:
            ValueError: The optimizer averages weights, the aggregation has no average gradient as
                its result, or it divides by a custom denominator.
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is True.

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> sgd = torch.optim.SGD(model.parameters(), 0.1)
            >>> optimizer = GenericCentralizedOptimizer(None, model, optimizer=sgd)
            >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> optimizer.clip_grad_norm_(1.0)
            tensor(5.)
            >>> optimizer.step()
        """
        name = type(self.aggregation).__name__
        if not self.agg_grad:
            raise ValueError(
                f"clip_grad_norm_ must have gradients that are averaged, but {name} combines "
                "weights: clip the gradients of each worker by torch.nn.utils.clip_grad_norm_"
            )
        if not self.aggregation.averages_gradients:
            raise ValueError(
                f"clip_grad_norm_ must have gradients that are averaged, but the result of {name} "
                "is another direction: clip the gradients of each worker by "
                "torch.nn.utils.clip_grad_norm_"
            )
        if self.agg_mode == AVG_CUSTOM:
            raise ValueError(
                "clip_grad_norm_ must have averages over the workers, not sums divided by the "
                "denom of step(): give grad_clip to the optimizer"
            )
        if not self._is_aggregated:
            self._communicate(None)
            self._is_aggregated = True
        parameters = grouped_parameters(self)
        norm = nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
        self._clipped = []
        for p in parameters:
            version = None
            if p.grad is not None:
                version = torch_private.version(p.grad)
            self._clipped.append((p, p.grad, version))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all optimized parameters.

        Args:
            set_to_none: Set them to None instead of zero.
        """
        self._is_aggregated = False
        if self._reduction is not None:
            # Messages of a pass that raised an error must not arrive in gradients that are zero by
            # then.
            self._reduction.synchronize()
            # Gradients that a script sets by hand from here on were not reduced.
            self._reduction.forget()
        super().zero_grad(set_to_none)

    def _step(
        self,
        closure: Closure | None,
        tracker: Any | None,
        denom: Denominator | None = None,
        grad_clip: float = math.inf,
    ) -> Any:
        """Take one step; ``denom`` is for the aggregation, and clipping comes before the update."""
        self._before_step()
        if is_called_by_checkpoint_functions():
            # They take a step of size 0 with zeros as gradients, perhaps on one worker alone, to
            # create the state.
            refuse_partial_state(self, self.extra_state)
            return self._inner.step()
        looked_too_early = False
        if self._is_aggregated and getattr(self, "grad_scale", None) is not None:
            raise ValueError(
                "clip_grad_norm_ must get gradients without the scale of a GradScaler: call "
                "scaler.unscale_(optimizer) before it"
            )
        if self._reduction is not None and hasattr(self, "found_inf") and not self._is_aggregated:
            looked_too_early = not self._reduction.is_reduced
            # The other workers' backward passes have sent their gradients, so these must go before
            # any other message.
            self._reduction.average()
        # The decision comes before the closure and the aggregation, so that all workers skip the
        # step or none does.
        self._was_skipped = must_skip(self, self.aggregation, looked_too_early)
        if self._was_skipped:
            self._is_aggregated = False
            if self._reduction is not None:
                self._reduction.forget()
            return None
        if closure is not None and evaluates_repeatedly(self._inner):
            return self._step_with_evaluations(closure, tracker, denom, grad_clip)
        loss = evaluate(closure)
        if self.agg_grad:
            self._aggregate(tracker, denom)
        # Clipped after the aggregation: the norm is that of the common gradient, so all workers
        # clip alike.
        self._clip(grad_clip)
        self._take_step()
        if tracker is not None:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        return loss

    def _before_step(self) -> None:
        """Do nothing; a subclass may read the weights here, before every step."""

    def _take_step(self) -> None:
        """Let the wrapped optimizer take a step."""
        _match_strides(self._inner)
        late = _without_momentum(self._inner)
        if not late:
            self._inner.step()
            return
        # Torch's fused SGD needs momentum buffers of all parameters or of none. Parameters that get
        # their first gradient later than others, such as layers that were frozen, take their first
        # step in a separate call.
        whole = [group["params"] for group in self.param_groups]
        try:
            for is_late in (True, False):
                for group, params in zip(self.param_groups, whole, strict=True):
                    group["params"] = [p for p in params if (id(p) in late) == is_late]
                self._inner.step()
        # Also after an error, or the other parameters would be lost.
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    def _step_with_evaluations(
        self, closure: Closure, tracker: Any | None, denom: Denominator | None, grad_clip: float
    ) -> Any:
        """Take a step of an optimizer, such as LBFGS, that evaluates the loss as often as it needs.

        If gradients are averaged, the optimizer gets the average of the losses too, so that all
        workers decide alike.
        """
        losses: list[Any] = []

        def average_loss() -> Any:
            losses.append(evaluate(closure))
            shared = losses[-1]
            if self.agg_grad:
                self._aggregate(tracker, denom)
                # A copy: the script may report the loss of this worker.
                shared = torch.as_tensor(losses[-1]).detach().clone()
                self.aggregation.combine({}, self.agg_mode, denom, [shared])
            self._clip(grad_clip)
            return shared

        self._inner.step(average_loss)
        if tracker is not None:
            tracker.record_batch_opt_step()
        if not self.agg_grad:
            self._aggregate(tracker, denom)
        if not losses:
            return None
        return losses[0]

    def _aggregate(self, tracker: Any | None, denom: Denominator | None) -> None:
        """Aggregate, if :meth:`clip_grad_norm_` has not done so, and report the cost."""
        if not self._is_aggregated:
            self._communicate(denom)
        # With overlap, a backward pass sends its gradients itself.
        elif self._reduction is None and not self._has_clipped_gradients():
            raise RuntimeError(
                "clip_grad_norm_ must come right before step(), but gradients have changed since: "
                "call it after the last backward pass, and after zero_grad()"
            )
        self._is_aggregated, self._clipped = False, []
        if tracker is not None:
            tracker.record_batch_agg()
        if self._reduction is not None:
            self._reduction.report(tracker)
        self._clock.report(tracker)

    def _has_clipped_gradients(self) -> bool:
        """Return whether the gradients are still those that :meth:`clip_grad_norm_` left."""
        for parameter, gradient, version in self._clipped:
            if parameter.grad is not gradient:
                return False
            if gradient is not None and torch_private.version(gradient) != version:
                return False
        return True

    def _communicate(self, denom: Denominator | None) -> None:
        """Aggregate the model and the extra parameters of the optimizer."""
        parts: list[nn.Module | dict[str, Tensor]] = []
        if self._reduction is None:
            parts.append(self.model)
        else:
            # k/d turns an average over k workers into a sum divided by d. It is known before the
            # wait, so that a wrong denominator raises its error first.
            scale = None
            if self.agg_mode == AVG_CUSTOM:
                scale = self.world_size / check_denominator(denom)
            self._reduction.complete()
            if scale is not None:
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                torch_private.foreach_mul_(gradients, scale)
        extra = self.extra_parameters(self.model.parameters())
        if extra:
            parts.append(extra)
        if parts:
            with self._clock.measure(next(self.model.parameters()).device) as interval:
                for part in parts:
                    self.agg(part, self.agg_mode, denom)
                    interval.size_bytes += self.aggregation.last_bytes

    def _clip(self, max_norm: float) -> None:
        """Scale the gradients down to the norm ``max_norm`` if theirs is larger."""
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(grouped_parameters(self), max_norm)

    def _check_memory(self) -> None:
        """Raise a ValueError if the model is not in the memory that the aggregation shares."""
        devices = {str(p.device) for p in self.model.parameters() if p.device.type != "cpu"}
        if getattr(self.aggregation, "shared_memory", False) and devices:
            raise ValueError(
                f"shared_memory must be False for a model on {', '.join(sorted(devices))}, "
                "because it sums in the host's memory: leave it out of the aggregation"
            )

    def _make_reduction(self, by_layer: bool) -> OverlappedReduction | None:
        """Make the reduction during the backward pass; None for one worker, who sends nothing."""
        if not self.agg_grad:
            raise ValueError(
                "overlap must be False with agg_grad=False, because it sends gradients during the "
                "backward pass and not weights after the step: leave one of the two out"
            )
        if by_layer:
            raise ValueError(
                "by_layer must be False with overlap, which sends buckets of "
                "parameters: for a message per parameter write "
                "AllReduceAggregation(overlap=True, bucket_size_bytes=0)"
            )
        # Only this aggregation has the setting.
        assert isinstance(self.aggregation, AllReduceAggregation)
        if self.world_size <= 1:
            return None
        return OverlappedReduction(self.model, self.aggregation)


def check_aggregation(
    aggregation: Any, kind: type[_AggregationT], *, world_size: int | None = None, **given: Any
) -> _AggregationT:
    """Return an aggregation if an optimizer can use it.

    Args:
        aggregation: As the user gave it.
        kind: The class that the optimizer needs.
        world_size: Number of workers that the optimizer was given.
        **given: Other arguments of the optimizer that describe the exchange; None for those that
            were left out.

    Raises:
        TypeError: The aggregation is of another class.
        ValueError: An argument contradicts the aggregation.

    Example:
        >>> aggregation = AllReduceAggregation(divide_before=True)
        >>> check_aggregation(aggregation, Aggregation, divide_before=True).world_size
        1
    """
    name = type(aggregation).__name__
    if not isinstance(aggregation, kind):
        hint = ""
        if isinstance(aggregation, type):
            hint = f": write {aggregation.__name__}(...)"
        raise TypeError(f"aggregation must be of the class {kind.__name__}, not {name}{hint}")
    if world_size is not None and world_size != aggregation.world_size:
        workers = "1 worker"
        if aggregation.world_size > 1:
            workers = f"{aggregation.world_size} workers"
        raise ValueError(
            f"world_size is {world_size}, but the process group has {workers}, and so the "
            f"aggregation: give {aggregation.world_size}, or leave world_size out"
        )
    for argument, value in given.items():
        own = getattr(aggregation, argument, None)
        if value is not None and value != own:
            raise ValueError(
                f"{argument} must be left out or {own!r}, not {value!r}, because the aggregation "
                f"decides on it: write {argument}={value!r} in {name}(...)"
            )
    return aggregation


def check_denominator_and_clipping(
    average_world: bool, average_custom: bool, grad_clip: float
) -> None:
    """Raise a ValueError if two denominators are asked for, or ``grad_clip`` is not a norm."""
    if average_world and average_custom:
        raise ValueError("average_world and average_custom are both True: set the one to divide by")
    # Not "grad_clip <= 0", which is false for NaN.
    if not grad_clip > 0:
        raise ValueError(f"grad_clip must be positive, or inf for no clipping, not {grad_clip}")


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


def evaluates_repeatedly(optimizer: Optimizer) -> bool:
    """Return whether an optimizer requires a closure, as it may evaluate the loss several times."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _without_momentum(optimizer: Optimizer) -> set[int]:
    """Return the ids of parameters without momentum, if others in groups of a fused SGD have it."""
    late: set[int] = set()
    if not isinstance(optimizer, SGD):
        return late
    is_mixed = False
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        stepping = [p for p in group["params"] if p.grad is not None]
        new = [p for p in stepping if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        late.update(map(id, new))
        is_mixed = is_mixed or 0 < len(new) < len(stepping)
    if not is_mixed:
        late.clear()
    return late


def _match_strides(optimizer: Optimizer) -> None:
    """Copy the gradients whose strides differ from their parameters', for torch's fused kernels.

    These kernels read the memory of parameter and gradient in parallel and ignore strides.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                gradient = p.grad
                if gradient is not None and gradient.stride() != p.stride() and is_dense(p):
                    p.grad = torch.empty_like(p).copy_(gradient)


@torch.no_grad()
def must_skip(
    optimizer: Optimizer, aggregation: Aggregation, looked_too_early: bool = False
) -> bool:
    """Unscale the gradients that a :class:`torch.amp.GradScaler` left scaled, or skip the step.

    During the step a scaler sets ``found_inf`` and ``grad_scale`` on optimizers that have
    ``_step_supports_amp_scaling``. Workers agree on ``found_inf`` before any other message, so that
    all of them skip a step. An aggregation could otherwise remember an overflow as the error of its
    compression. Gradients are unscaled before they are aggregated, since the scales of the workers
    may differ.

    Args:
        optimizer: The optimizer whose ``step`` this is.
        aggregation: The aggregation that exchanges the overflow.
        looked_too_early: True if the scaler read the gradients of this worker before they were
            averaged.

    Returns:
        True if gradients overflowed on any worker; False also without a scaler.

    Raises:
        ValueError: Gradients to be unscaled are float16, in which small ones would vanish; or a
            scaler read one worker's gradients too early (on every worker alike).
    """
    found_inf: Tensor | int | None = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    # torch gives the integer 0 if no parameter has a gradient.
    found_inf = torch.as_tensor(found_inf, dtype=torch.float32)
    if looked_too_early:
        found_inf = torch.full_like(found_inf, _TOO_EARLY)
    else:
        # torch adds up the flags of several devices, and a sum of 2 would mean "too early".
        found_inf = found_inf.clamp(max=1)
    aggregation.any_worker(found_inf)
    if found_inf.item() == _TOO_EARLY:
        raise ValueError(
            "a GradScaler read the gradients of a worker before they were averaged, because the "
            "worker had no backward pass outside no_sync: use "
            "mlbench_core.optim.pytorch.DistributedGradScaler, which averages them first"
        )
    if found_inf.item() > 0:
        return True
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    # None if the script has called unscale_ before.
    if scale is not None:
        _unscale(optimizer, scale)
    return False


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide all gradients by the scale, in place."""
    # As torch does it, so that results equal those of its own scaler bit for bit.
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                raise ValueError(
                    "a GradScaler needs float32 parameters under autocast, but these "
                    "gradients are float16, in which unscaled gradients vanish: "
                    "train a float16 model with FP16Optimizer"
                )
            parameter.grad.mul_(inverse.to(parameter.grad.device))
