"""Base of the optimizers whose workers exchange compressed steps: signs, a few coordinates."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch.aggregation import refuse_complex, refuse_sparse
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD
from mlbench_core.aggregation.pytorch.compression.compressed import LossyAggregation
from mlbench_core.aggregation.pytorch.transport.messages import KeptMemory
from mlbench_core.aggregation.pytorch.transport.names import check_names, plain_name
from mlbench_core.arguments import check_finite_at_least_0, check_number
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    check_lr,
    evaluate,
    must_skip,
    refuse_partial_state,
    shared_optimizer_state,
    state_without_hooks,
)

__all__ = ["CompressedOptimizer", "Params", "adam_defaults", "sgd_defaults"]

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"


class CompressedOptimizer(Optimizer):
    """Base of optimizers whose workers exchange directions or steps by a lossy aggregation.

    Each worker makes a tensor from each of its gradients (:meth:`_local`). The aggregation replaces
    it by the workers' common result, which is multiplied by :meth:`_rate` and subtracted from the
    parameter. The workers start from equal parameters and keep them equal.

    The aggregation remembers values of a parameter under its name: the given one
    (``named_parameters()``), else ``"group{i}.{j}"``.

    Attributes:
        aggregation: The aggregation; it counts the bytes.
        world_size: Number of workers.
        agg_grad: True: communication comes before the update.

    Args:
        params: Parameters, groups of them, or pairs of name and parameter; each worker gives the
            same in the same order.
        defaults: Options of a group that does not name them, for example from :func:`sgd_defaults`.
        aggregation: How to aggregate.

    Raises:
        TypeError: ``lr`` is not a number, or a parameter is complex and the aggregation takes real
            ones only.
        ValueError: Parameters or ``lr`` are missing, ``lr`` is negative or not finite, or two
            parameters have one name.
    """

    agg_grad = True
    # False leaves the sum over workers.
    _average = True
    # Momentum is that of this worker's gradients, so a checkpoint holds that of every worker.
    own_state = ("state", "aggregation")
    # torch.amp.GradScaler then leaves unscaling and skipping to step(), where the workers agree on
    # them.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Params | None, defaults: dict[str, Any], aggregation: LossyAggregation
    ) -> None:
        if params is None:
            raise ValueError("params is missing: give params=, for example model.parameters()")
        check_lr(defaults["lr"], type(self).__name__)
        self.aggregation = aggregation
        self.world_size = aggregation.world_size
        self._aggregate_named = aggregation.agg_grad()
        self._clock = CommunicationClock()
        self._kept = KeptMemory()
        # Not super().__init__: SignSGD is a torch.optim.SGD too, whose constructor takes other
        # options.
        Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, tracker: Any | None = None
    ) -> Any:
        """Exchange directions or steps and take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the
                loss.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker` (or None) that records the
                end of the communication and of the update, and the cost of the communication.

        Returns:
            The closure's result, this worker's loss; None without a closure.
        """
        # The momentum differs between workers, too.
        refuse_partial_state(self)
        if must_skip(self, self.aggregation):
            return None
        self._before_step()
        loss = evaluate(closure)
        named = list(self._named_parameters())
        refuse_sparse({name: parameter for name, parameter, _ in named})
        # The aggregation overwrites gradients, but a script may still read its own after the step.
        # So it gets other tensors on the parameters' memory, whose grad holds the values to send.
        proxies: dict[str, Tensor] = {}
        for name, parameter, group in named:
            proxy = parameter.detach().requires_grad_(parameter.requires_grad)
            if parameter.grad is not None:
                proxy.grad = self._local(parameter, group)
            proxies[name] = proxy
        self._exchange(proxies, tracker)
        for name, parameter, group in named:
            agreed = proxies[name].grad
            # Aggregations ignore parameters without elements.
            if agreed is not None and parameter.numel():
                self._update(name, parameter, agreed, group)
        if tracker is not None:
            tracker.record_batch_opt_step()
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the block accumulate gradients without communication.

        Only :meth:`step` sends messages, so this changes nothing. It exists for scripts that
        accumulate gradients with any optimizer. :meth:`step` compresses and sends the accumulated
        gradients.
        """
        yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> NoReturn:
        """Raise an error, because the workers exchange compressed steps, not gradients.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "clip_grad_norm_ must have gradients that are averaged, but the workers of "
            f"{type(self).__name__} exchange compressed steps: clip the gradients of each worker "
            "by torch.nn.utils.clip_grad_norm_"
        )

    def _before_step(self) -> None:
        """Do nothing; a subclass may read the parameters here, before a step that is taken."""

    @abstractmethod
    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Compute the tensor that this worker aggregates; the next step may reuse its memory."""

    def _direction(self, parameter: Tensor, group: dict[str, Any], factor: float = 1.0) -> Tensor:
        r"""Return a factor times the direction of :class:`torch.optim.SGD`.

        SGD's step is the learning rate times its direction. With gradient :math:`g`, weight decay
        :math:`\lambda`, momentum :math:`\mu`, dampening :math:`\tau`,

        .. math::

            g &\leftarrow g + \lambda x \\
            b &\leftarrow \mu b + (1 - \tau) g \quad \text{(the first time } b = g \text{)}

        it is :math:`b`, or :math:`g + \mu b` with Nesterov momentum, or :math:`g` without momentum.
        """
        assert parameter.grad is not None
        # The aggregation overwrites the result, so it is neither the gradient nor the momentum, but
        # separate memory.
        direction = self._kept.like(parameter, parameter)
        g = parameter.grad
        if group["weight_decay"]:
            g = torch.add(g, parameter, alpha=group["weight_decay"], out=direction)
        # The factor rides with the copy, because another pass over the memory takes as long as the
        # copy.
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
            named = list(self._named_parameters())
            counts = Counter(name for name, _, _ in named)
            repeated = sorted(name for name, count in counts.items() if count > 1)
            # Two parameters of one name would share an error memory.
            if repeated:
                raise ValueError(
                    f"several parameters are called {', '.join(repeated)}: "
                    "give every parameter its own name"
                )
            parameters = {name: parameter for name, parameter, _ in named}
            refuse_complex(self.aggregation, parameters)
        except (TypeError, ValueError):
            # A refused group leaves the optimizer as it was.
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, and that of the aggregation under ``"aggregation"``.

        As in torch, its tensors are the optimizer's own: they change with the next step.

        Raises:
            RuntimeError: ``torch.distributed.checkpoint.state_dict`` calls it, which would lose a
                part.
        """
        refuse_partial_state(self)
        state_dict = super().state_dict()
        remembered = self.aggregation.state_dict()
        if not remembered:
            return state_dict
        return {**state_dict, "aggregation": remembered}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the result of :meth:`state_dict`.

        Args:
            state_dict: The state of an optimizer with the same groups. As in torch, parameters get
                the names of the state if it has names.

        Raises:
            ValueError: It does not fit the groups or the aggregation, or has entries of parameters
                that do not exist. This happens if parameters had no names when it was saved and
                have names now.
        """
        refuse_partial_state(self)
        remembered = state_dict.get("aggregation", {})
        # Not strict: torch's own error about another number of groups is clearer.
        groups = zip(self.param_groups, state_dict["param_groups"], strict=False)
        names: list[str] = []
        for i, (own, saved) in enumerate(groups):
            names += _names_in_group(i, {**own, **saved})
        # Names are checked before the first change, so that a state of other parameters changes
        # nothing.
        check_names(self.aggregation.remembered_names(remembered), names)
        super().load_state_dict(dict(state_dict))
        self.aggregation.load_state_dict(remembered)

    def shared_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries of one worker: error memory and momentum.

        See :func:`~mlbench_core.optim.pytorch.distributed.shared_optimizer_state`.
        """
        shared = shared_optimizer_state(self, state_dict)
        shared["state"] = {}
        for parameter, state in state_dict["state"].items():
            shared["state"][parameter] = dict(state)
            shared["state"][parameter].pop("momentum_buffer", None)
        return shared

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but hooks and a patched ``step``, which belong to this object."""
        return state_without_hooks(self)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield every parameter with its name and its group."""
        for i, group in enumerate(self.param_groups):
            for name, parameter in zip(_names_in_group(i, group), group["params"], strict=True):
                yield name, parameter, group

    def _exchange(self, named: Mapping[str, Tensor], tracker: Any | None) -> None:
        """Aggregate, and report the cost."""
        device = next(iter(named.values())).device
        with self._clock.measure(device) as interval:
            if self._average:
                self._aggregate_named(named, AVG_WORLD)
            else:
                # Divided by 1, the sum over workers stays.
                self._aggregate_named(named, AVG_CUSTOM, 1)
            interval.size_bytes = self.aggregation.last_bytes
        if tracker is not None:
            tracker.record_batch_agg()
        self._clock.report(tracker)


def _names_in_group(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return the plain names of a group's parameters, ``"group{i}.{j}"`` if it has none."""
    names = group.get("param_names")
    if not names:
        return [f"group{number}.{j}" for j in range(len(group["params"]))]
    return list(map(plain_name, names))


def sgd_defaults(
    lr: float, momentum: float, weight_decay: float, dampening: float = 0, nesterov: bool = False
) -> dict[str, Any]:
    """Return the options of a parameter group, as :class:`torch.optim.SGD` has them.

    Raises:
        TypeError: An option is not a number.
        ValueError: ``momentum`` or ``weight_decay`` is negative or not finite, or ``nesterov`` is
            True without momentum or with dampening.
    """
    check_finite_at_least_0("momentum", momentum)
    check_finite_at_least_0("weight_decay", weight_decay)
    check_number("dampening", dampening)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            "nesterov=True needs a momentum above 0 and no dampening, not "
            f"momentum={momentum}, dampening={dampening}"
        )
    return {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "dampening": dampening,
        "nesterov": nesterov,
    }


def adam_defaults(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
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
