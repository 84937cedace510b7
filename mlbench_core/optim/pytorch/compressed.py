"""Optimizers of given parameters whose workers exchange signs, a few coordinates, or other compressed steps."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import refuse_complex, refuse_sparse
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD
from mlbench_core.aggregation.pytorch.compressed import CompressedAggregation, LossyAggregation
from mlbench_core.aggregation.pytorch.sign import EFSignAggregation, SignAggregation
from mlbench_core.aggregation.pytorch.sparsified import SparsifiedAggregation, check_size, coordinates_sent
from mlbench_core.aggregation.pytorch.transport.messages import KeptMemory
from mlbench_core.aggregation.pytorch.transport.names import check_names, plain_name
from mlbench_core.aggregation.pytorch.transport.timing import CommunicationClock
from mlbench_core.arguments import check_finite_at_least_0, check_number
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    check_aggregation,
    check_lr,
    evaluate,
    must_skip,
    refuse_partial_state,
    shared_optimizer_state,
    state_without_hooks,
)

__all__ = ["CentralizedSparsifiedSGD", "CompressedOptimizer", "EFSignSGD", "Params", "SignSGD", "SparsifiedSGD"]

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"


class CompressedOptimizer(Optimizer):
    """Base of optimizers whose workers exchange directions or steps by a lossy aggregation.

    Each worker makes a tensor from each of its gradients (:meth:`_local`). The aggregation replaces it by the workers'
    common result, which is multiplied by :meth:`_rate` and subtracted from the parameter. The workers start from equal
    parameters and keep them equal.

    The aggregation remembers values of a parameter under its name: the given one (``named_parameters()``), else
    ``"group{i}.{j}"``.

    Attributes:
        aggregation: The aggregation; it counts the bytes.
        world_size: Number of workers.
        agg_grad: True: communication comes before the update.

    Args:
        params: Parameters, groups of them, or pairs of name and parameter; each worker gives the same in the same
            order.
        defaults: Options of a group that does not name them, for example from :func:`sgd_defaults`.
        aggregation: How to aggregate.

    Raises:
        TypeError: ``lr`` is not a number, or a parameter is complex and the aggregation takes real ones only.
        ValueError: Parameters or ``lr`` are missing, ``lr`` is negative or not finite, or two parameters have one name.
    """

    agg_grad = True
    _average = True  # False leaves the sum over workers
    # Momentum is that of this worker's gradients, so a checkpoint holds that of every worker.
    own_state = ("state", "aggregation")
    # torch.amp.GradScaler then leaves unscaling and skipping to step(), where the workers agree on them.
    _step_supports_amp_scaling = True

    def __init__(self, params: Params | None, defaults: dict[str, Any], aggregation: LossyAggregation) -> None:
        if params is None:
            raise ValueError("params is missing: give params=, for example model.parameters()")
        check_lr(defaults["lr"], type(self).__name__)
        self.aggregation = aggregation
        self._aggregate_named = aggregation.agg_grad()
        self._clock = CommunicationClock()
        self._kept = KeptMemory()
        # Not super().__init__: SignSGD is a torch.optim.SGD too, whose constructor takes other options.
        Optimizer.__init__(self, params, defaults)

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.aggregation.world_size

    @torch.no_grad()
    def step(self, closure: Closure | None = None, tracker: Any | None = None) -> Any:  # type: ignore[override]
        """Exchange directions or steps and take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the loss.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the end of the
                communication and of the update, and the cost of the communication.

        Returns:
            The closure's result, this worker's loss; None without a closure.
        """
        # The momentum differs between workers, too.
        refuse_partial_state(self)
        if must_skip(self, self.aggregation):
            return None
        self._before_step()
        loss = evaluate(closure)
        named = dict(self._named_parameters())
        refuse_sparse({name: parameter for name, (parameter, _) in named.items()})
        # The aggregation overwrites gradients, but a script may still read its own after the step.
        stand_ins = {name: self._stand_in(parameter, group) for name, (parameter, group) in named.items()}
        self._exchange(stand_ins, tracker)
        for name, (parameter, group) in named.items():
            agreed = stand_ins[name].grad
            # Aggregations know nothing of parameters without elements.
            if agreed is not None and parameter.numel():
                self._update(name, parameter, agreed, group)
        if tracker is not None:
            tracker.record_batch_opt_step()
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients without communication.

        Only :meth:`step` sends messages, so this changes nothing. It exists for scripts that accumulate gradients with
        any optimizer. :meth:`step` compresses and sends the accumulated gradients.
        """
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> NoReturn:
        """Raise an error, because the workers exchange compressed steps or directions, not gradients.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"clip_grad_norm_ must have gradients that are averaged, but the workers of {type(self).__name__} exchange "
            "compressed steps: clip the gradients of each worker by torch.nn.utils.clip_grad_norm_"
        )

    def _before_step(self) -> None:
        """Do nothing; a subclass may read the parameters here, before a step that is not skipped."""

    @abstractmethod
    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Compute the tensor that this worker hands to the aggregation for a parameter; the next step may reuse it."""

    def _direction(self, parameter: Tensor, group: dict[str, Any], factor: float = 1.0) -> Tensor:
        r"""Return a factor times the direction of :class:`torch.optim.SGD`, whose step is the learning rate times it.

        With gradient :math:`g`, weight decay :math:`\lambda`, momentum :math:`\mu`, dampening :math:`\tau`,

        .. math::

            g &\leftarrow g + \lambda x \\
            b &\leftarrow \mu b + (1 - \tau) g \quad \text{(the first time } b = g \text{)}

        it is :math:`b`, or :math:`g + \mu b` with Nesterov momentum, or :math:`g` without momentum.
        """
        assert parameter.grad is not None
        # The aggregation overwrites the result, which is neither the gradient nor the momentum, but memory of its own.
        direction = self._kept.like(parameter, parameter)
        g = parameter.grad
        if group["weight_decay"]:
            g = torch.add(g, parameter, alpha=group["weight_decay"], out=direction)
        # The factor rides with the copy, because another pass over the memory takes as long as the copy.
        if not group["momentum"]:
            return torch.mul(g, factor, out=direction)
        state = self.state[parameter]
        b = state.get("momentum_buffer")
        if b is None:
            b = state["momentum_buffer"] = g.clone()
        else:
            b.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
        if group["nesterov"]:
            return torch.add(g, b, alpha=group["momentum"], out=direction).mul_(factor)
        return torch.mul(b, factor, out=direction)

    def _rate(self, group: dict[str, Any]) -> float:
        """Return the factor of the aggregated tensors; 1 if they are steps already."""
        return 1.0

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        """Take the step of a parameter, given the workers' common result; it may be overwritten."""
        parameter.add_(agreed, alpha=-self._rate(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options it does not name get the defaults."""
        super().add_param_group(param_group)
        try:
            counts = Counter(name for name, _ in self._named_parameters())
            repeated = sorted(name for name, count in counts.items() if count > 1)
            # Two parameters of one name would share an error memory.
            if repeated:
                raise ValueError(
                    f"several parameters are called {', '.join(repeated)}: give every parameter its own name"
                )
            refuse_complex(self.aggregation, {name: parameter for name, (parameter, _) in self._named_parameters()})
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, and that of the aggregation under ``"aggregation"``.

        As in torch, its tensors are the optimizer's own: they change with the next step.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint.state_dict`` calls it, which would lose a part.
        """
        refuse_partial_state(self)
        state_dict = super().state_dict()
        remembered = self.aggregation.state_dict()
        return {**state_dict, "aggregation": remembered} if remembered else state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the result of :meth:`state_dict`.

        Args:
            state_dict: The state of an optimizer with the same groups. As in torch, parameters get the names of the
                state if it has names.

        Raises:
            ValueError: It does not fit the groups or the aggregation, or has entries of parameters that do not exist.
                This happens if parameters had no names when it was saved and have names now.
        """
        refuse_partial_state(self)
        remembered = state_dict.get("aggregation", {})
        # Not strict: torch's own error about another number of groups is clearer.
        groups = zip(self.param_groups, state_dict["param_groups"], strict=False)
        names = [name for i, (own, saved) in enumerate(groups) for name in _names_in_group(i, {**own, **saved})]
        # Names are checked before the first change, so that a state of other parameters changes nothing.
        check_names(self.aggregation.remembered_names(remembered), names)
        super().load_state_dict(dict(state_dict))
        self.aggregation.load_state_dict(remembered)

    def shared_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries that differ between workers: error memory and momentum.

        See :func:`~mlbench_core.optim.pytorch.distributed.shared_optimizer_state`.
        """
        shared = shared_optimizer_state(self, state_dict)
        shared["state"] = {
            parameter: {name: value for name, value in state.items() if name != "momentum_buffer"}
            for parameter, state in state_dict["state"].items()
        }
        return shared

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but hooks and a ``step`` that a scheduler patched, which belong to this object."""
        return state_without_hooks(self)

    def _named_parameters(self) -> Iterable[tuple[str, tuple[Tensor, dict[str, Any]]]]:
        """Yield every parameter by its name, with its group."""
        for i, group in enumerate(self.param_groups):
            for name, parameter in zip(_names_in_group(i, group), group["params"], strict=True):
                yield name, (parameter, group)

    def _stand_in(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Make a tensor that stands for a parameter in the aggregation; its ``grad`` holds the values to send."""
        stand_in = parameter.detach().requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            stand_in.grad = self._local(parameter, group)
        return stand_in

    def _exchange(self, stand_ins: Mapping[str, Tensor], tracker: Any | None) -> None:
        """Aggregate, and report the cost."""
        device = next(iter(stand_ins.values())).device
        with self._clock.measure(device) as interval:
            if self._average:
                self._aggregate_named(stand_ins, AVG_WORLD)
            else:
                # Divided by 1, the sum over workers stays.
                self._aggregate_named(stand_ins, AVG_CUSTOM, 1)
            interval.size_bytes = self.aggregation.last_bytes
        if tracker is not None:
            tracker.record_batch_agg()
        self._clock.report(tracker)


def _names_in_group(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return the plain names of a group's parameters, ``"group{i}.{j}"`` if it has none."""
    names = group.get("param_names") or [f"group{number}.{j}" for j in range(len(group["params"]))]
    return [plain_name(name) for name in names]


def sgd_defaults(
    lr: float, momentum: float, weight_decay: float, dampening: float = 0, nesterov: bool = False
) -> dict[str, Any]:
    """Return the options of a parameter group, as :class:`torch.optim.SGD` has them.

    Raises:
        TypeError: An option is not a number.
        ValueError: ``momentum`` or ``weight_decay`` is negative or not finite, or ``nesterov`` is True without momentum
            or with dampening.
    """
    check_finite_at_least_0("momentum", momentum)
    check_finite_at_least_0("weight_decay", weight_decay)
    check_number("dampening", dampening)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True needs a momentum above 0 and no dampening, not momentum={momentum}, dampening={dampening}"
        )
    return {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "dampening": dampening,
        "nesterov": nesterov,
    }


def adam_defaults(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """Return the options of a parameter group, as :class:`torch.optim.Adam` has them.

    Raises:
        TypeError: An option is not a number.
        ValueError: An option is negative or not finite, or one of ``betas`` is not below 1.
    """
    for i, beta in enumerate(betas):
        check_finite_at_least_0(f"betas[{i}]", beta)
        if beta >= 1:
            raise ValueError(f"betas[{i}] must be below 1, not {beta}: gradients would not count")
    check_finite_at_least_0("eps", eps)
    check_finite_at_least_0("weight_decay", weight_decay)
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


class _OneBitSGD(CompressedOptimizer):
    """Base of the optimizers that send one bit per weight."""

    _kind: ClassVar[type[SignAggregation] | type[EFSignAggregation]]

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        *,
        world_size: int | None = None,
        aggregation: CompressedAggregation | None = None,
    ) -> None:
        defaults = sgd_defaults(lr, momentum, weight_decay, dampening, nesterov)
        if aggregation is None:
            aggregation = self._kind(world_size=world_size)
        super().__init__(params, defaults, check_aggregation(aggregation, self._kind, world_size=world_size))


class SignSGD(_OneBitSGD, SGD):  # type: ignore[misc]  # their step takes a tracker too
    r"""SignSGD with majority vote, which sends one bit per weight.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` (gradient, weight decay, momentum)
    and votes with its signs; with :math:`k` workers and the learning rate :math:`\eta`,

    .. math:: x \leftarrow x - \eta \operatorname{sign}\Bigl(\sum_{i=1}^{k} \operatorname{sign}(d_i)\Bigr).

    With momentum this is Signum. A tie moves nothing. For zeros and bytes see
    :class:`~mlbench_core.aggregation.pytorch.sign.SignAggregation`. Every step has the size :math:`\eta`, so
    the rate must decay for the parameters to settle. The class is a :class:`torch.optim.SGD`, since its options are
    those of SGD; only the step is another one.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`, the distance that each parameter moves per step.
        momentum: Momentum factor of the local direction.
        weight_decay: L2 penalty, part of the direction.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        world_size: Number of workers; None takes that of the process group, when the optimizer is made.
        aggregation: The exchange, for example ``SignAggregation(process_group=group)`` for a subgroup of workers.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the process group.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> optimizer = SignSGD([x], lr=0.25)
        >>> x.grad = torch.tensor([0.001, -30.0])
        >>> optimizer.step()
        >>> x.tolist()
        [0.75, -0.75]

    References:
        Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD: Compressed Optimisation for Non-Convex Problems.
        arXiv:1802.04434
    """

    _kind = SignAggregation

    def __setstate__(self, state: dict[str, Any]) -> None:
        # SGD's own method would add options that this class does not have.
        Optimizer.__setstate__(self, state)

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group)

    def _rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])


class EFSignSGD(_OneBitSGD):
    r"""Scaled signs with error feedback, which send one bit per weight and converge like SGD.

    Worker :math:`i` computes the direction :math:`d_i` of :class:`torch.optim.SGD` and, for each tensor of :math:`d`
    coordinates, with the learning rate :math:`\eta` and :math:`k` workers,

    .. math::

        p_i &= \eta d_i + e_i \\
        \Delta_i &= \frac{\lVert p_i \rVert_1}{d} \operatorname{sign}(p_i) \\
        e_i &\leftarrow p_i - \Delta_i \\
        x &\leftarrow x - \frac{1}{k} \sum_{i=1}^{k} \Delta_i

    The memory :math:`e_i` is in units of steps, as in the paper, and contains the learning rate. So
    :math:`x - \frac{1}{k} \sum_i e_i` moves as SGD does under any schedule. Steps that are sent later keep the rate of
    their own step.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        aggregation: The exchange, for example ``EFSignAggregation(process_group=group)`` for a subgroup of workers.

    Other arguments: see :class:`SignSGD`.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, or ``world_size`` is not that of the process group.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = EFSignSGD([x], lr=1.0)
        >>> x.grad = torch.tensor([3.0, -1.0])
        >>> optimizer.step()
        >>> x.tolist(), optimizer.aggregation.memory("group0.0").tolist()
        ([-2.0, 2.0], [1.0, 1.0])

    References:
        Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
        arXiv:1901.09847
    """

    _kind = EFSignAggregation

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        # The rate goes into the memory, so that a later rate does not rescale errors of earlier steps.
        return self._direction(parameter, group, group["lr"])


class SparsifiedSGD(CompressedOptimizer):
    r"""SGD that sends the :math:`k` largest coordinates of each tensor and remembers the rest (Mem-SGD).

    With gradient :math:`g_i` (and weight decay) of worker :math:`i` of :math:`n`, and the learning rate
    :math:`\eta`, for each tensor

    .. math::

        m_i &\leftarrow m_i + \eta g_i \\
        c_i &= \operatorname{comp}_k(m_i) \\
        x &\leftarrow x - \frac{1}{n} \sum_{i=1}^{n} c_i \\
        m_i &\leftarrow m_i - c_i

    The memory :math:`m_i` is in units of steps: the learning rate is inside.
    :class:`~mlbench_core.lr_scheduler.pytorch.lr.SparsifiedSGDLR` is the paper's schedule. For messages and bytes see
    :class:`~mlbench_core.aggregation.pytorch.sparsified.SparsifiedAggregation`.

    Args:
        params: Parameters, groups of them, or ``model.named_parameters()``.
        lr: Learning rate :math:`\eta`.
        weight_decay: L2 penalty.
        sparse_grad_size: :math:`k`, coordinates sent per tensor (an integer), or their share (a float).
        momentum: Momentum factor of the local direction, which then stands for :math:`g_i`.
        world_size: Number of workers; None takes that of the process group, when the optimizer is made.
        aggregation: The exchange with all its settings, instead of ``sparse_grad_size``: for example
            ``SparsifiedAggregation(None, size=0.01, random=True)``.

    Raises:
        ValueError: ``lr`` is missing, an option is out of range, ``world_size`` is not that of the process group, or
            ``sparse_grad_size`` contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = SparsifiedSGD([x], lr=1.0, sparse_grad_size=1)
        >>> x.grad = torch.tensor([1.0, -3.0, 2.0])
        >>> optimizer.step()
        >>> x.tolist(), optimizer.aggregation.memory("group0.0").tolist()
        ([0.0, 3.0, 0.0], [1.0, 0.0, 2.0])

    References:
        Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. arXiv:1809.07599
    """

    aggregation: SparsifiedAggregation

    def __init__(
        self,
        params: Params | None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        sparse_grad_size: int | float = 10,
        *,
        momentum: float = 0,
        world_size: int | None = None,
        aggregation: SparsifiedAggregation | None = None,
    ) -> None:
        if aggregation is None:
            size = check_size(sparse_grad_size, "sparse_grad_size")
            aggregation = SparsifiedAggregation(None, size=size, world_size=world_size)
        self._size = check_aggregation(aggregation, SparsifiedAggregation, world_size=world_size).size
        # The default of version 3.0 counts as left out.
        if sparse_grad_size not in (10, self._size):
            raise ValueError(
                f"sparse_grad_size must be left out or {self._size}, not {sparse_grad_size}, because the aggregation "
                f"decides on it: write size={sparse_grad_size} in SparsifiedAggregation(...)"
            )
        super().__init__(params, sgd_defaults(lr, momentum, weight_decay), aggregation)

    def get_estimated_weights(self) -> list[Tensor]:
        r"""Return the weighted average of the iterates, the estimate for which the paper proves convergence.

        .. math:: \bar{x}_T = \frac{1}{\sum_t w_t} \sum_{t=0}^{T-1} w_t x_t, \qquad w_t = (a + t)^2

        with :math:`x_t` the parameters before step :math:`t` and the shift :math:`a` = d/k of the tensor of which the
        smallest share is sent, one for all parameters. A step that a gradient scaler skips is not counted.

        Returns:
            One tensor per parameter, in the order of the groups and their parameters, on its device in its dtype. It is
            the running average itself, so copy it before you write to it. Before the first step, copies of the
            parameters.

        Example:
            >>> import torch
            >>> x = torch.nn.Parameter(torch.tensor([2.0]))
            >>> optimizer = SparsifiedSGD([x], lr=1.0)
            >>> for _ in range(2):  # x is 2, then 1
            ...     x.grad = torch.tensor([1.0])
            ...     optimizer.step()
            >>> optimizer.get_estimated_weights()  # (1 * 2 + 4 * 1) / 5
            [tensor([1.2000])]
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return [self.state[p].get("estimated_weights", p.detach().clone()) for p in parameters]

    def update_estimated_weights(self, iteration: int | None = None, sparse_vector_size: int | None = None) -> None:
        """Do nothing, because :meth:`step` keeps the estimate up to date; for scripts of version 3.0.

        Args:
            iteration: Not used; the steps are counted here.
            sparse_vector_size: Not used; the number of coordinates sent is known here.
        """

    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return self._direction(parameter, group, group["lr"])

    def _update(self, name: str, parameter: Tensor, agreed: Tensor, group: dict[str, Any]) -> None:
        changed = self.aggregation.changed(name)
        if changed is None or not (parameter.is_contiguous() and agreed.is_contiguous()):
            super()._update(name, parameter, agreed, group)
            return
        # Several workers may have sent a coordinate. Each writes the same result.
        x, steps = parameter.view(-1), agreed.view(-1).index_select(0, changed)
        x.index_copy_(0, changed, x.index_select(0, changed).sub_(steps))

    def _before_step(self) -> None:
        """Add the parameters before a step to the averages."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.numel() > 0]
        # The theorem needs a shift of at least d/k for every tensor, so the one for all is the largest.
        a = max((p.numel() / coordinates_sent(self._size, p.numel()) for p in parameters), default=1.0)
        for x in parameters:
            state = self.state[x]
            t = state["step"] = state.get("step", -1) + 1
            if "estimated_weights" in state:
                state["estimated_weights"].lerp_(x, _newest_share(t, a))
            else:
                state["estimated_weights"] = x.detach().clone()


class CentralizedSparsifiedSGD(SparsifiedSGD):
    r"""SGD that sends a few coordinates of each tensor, the largest or random ones, and remembers the rest.

    See :class:`SparsifiedSGD`, which this is with the number of workers stated and the choice of coordinates.

    Args:
        random_sparse: Send random coordinates, the same on all workers, instead of the largest.
        world_size: Number of workers; None takes that of the process group. In a group of several, the default of 1 is
            refused rather than letting the workers train apart.
        average_world: Divide the sum over workers by their number; False leaves the sum.
        aggregation: The exchange with all its settings, instead of ``sparse_grad_size``, ``random_sparse`` and
            ``world_size``.

    Other arguments: see :class:`SparsifiedSGD`.

    Raises:
        ValueError: ``params`` or ``lr`` is missing, an option is out of range, ``world_size`` is not that of the
            process group, or an argument contradicts the aggregation.
        TypeError: An option is not a number, or the aggregation is of another class.

    Example:
        >>> import torch
        >>> x = torch.nn.Parameter(torch.zeros(100))
        >>> optimizer = CentralizedSparsifiedSGD([x], lr=1.0, sparse_grad_size=0.05, random_sparse=True)
        >>> x.grad = torch.ones(100)
        >>> optimizer.step()
        >>> x.count_nonzero()
        tensor(5)

    References:
        Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. arXiv:1809.07599
    """

    def __init__(
        self,
        params: Params | None = None,
        lr: float = required,  # type: ignore[assignment]
        weight_decay: float = 0,
        sparse_grad_size: int | float = 10,
        random_sparse: bool = False,
        world_size: int | None = 1,
        average_world: bool = True,
        *,
        momentum: float = 0,
        aggregation: SparsifiedAggregation | None = None,
    ) -> None:
        if aggregation is None:
            size = check_size(sparse_grad_size, "sparse_grad_size")
            aggregation = SparsifiedAggregation(None, size=size, random=random_sparse, world_size=world_size)
        # The default of 1 comes from version 3.0, and counts as left out.
        check_aggregation(aggregation, SparsifiedAggregation, world_size=None if world_size == 1 else world_size)
        if random_sparse and not aggregation.random:
            raise ValueError(
                "random_sparse must be left out or False, not True, because the aggregation sends the largest "
                "coordinates: write random=True in SparsifiedAggregation(...)"
            )
        super().__init__(params, lr, weight_decay, sparse_grad_size, momentum=momentum, aggregation=aggregation)
        self._average = average_world


def _newest_share(t: int, a: float) -> float:
    r"""Return :math:`w_t / \sum_{s \le t} w_s` for :math:`w_t = (a + t)^2`.

    Example:
        >>> _newest_share(0, 3.0), _newest_share(1, 1.0)
        (1.0, 0.8)
    """
    # The closed form of the sum of (a + s)^2 over s = 0, ..., t.
    total = (t + 1) * (a * a + a * t + t * (2 * t + 1) / 6)
    return (a + t) ** 2 / total
