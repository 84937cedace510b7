"""Optimizers of given parameters whose workers exchange compressed directions or steps."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch.aggregation import refuse_sparse
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD
from mlbench_core.aggregation.pytorch.compressed import CompressedAggregation
from mlbench_core.aggregation.pytorch.names import check_names, plain_name
from mlbench_core.aggregation.pytorch.timing import CommunicationClock
from mlbench_core.arguments import check_finite_at_least_0, check_number
from mlbench_core.optim.pytorch.generic import Closure, check_lr, evaluate
from mlbench_core.optim.pytorch.grad_scaler import must_skip
from mlbench_core.optim.pytorch.wrapper import shared_optimizer_state, state_without_hooks

__all__ = ["CompressedOptimizer", "Params", "sgd_defaults"]

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
        defaults: Options of a group that does not name them, from :func:`sgd_defaults`.
        aggregation: How to aggregate.
        average: Divide sums over workers by their number; False leaves the sum.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: Parameters or ``lr`` are missing, ``lr`` is negative or not finite, or two parameters have one name.
    """

    agg_grad = True
    own_state = ("state", "aggregation")  # momentum is that of this worker's gradients
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to step()

    def __init__(
        self, params: Params | None, defaults: dict[str, Any], aggregation: CompressedAggregation, average: bool = True
    ) -> None:
        if params is None:
            raise ValueError("params is missing: give params=, for example model.parameters()")
        check_lr(defaults["lr"], type(self).__name__)
        self.aggregation = aggregation
        self._aggregate_named = aggregation.agg_grad()
        self._average = average
        self._clock = CommunicationClock()
        Optimizer.__init__(self, params, defaults)  # a subclass may be a torch.optim.SGD too, whose options differ

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
        if must_skip(self, self.aggregation):
            return None
        self._before_step()
        loss = evaluate(closure)
        named = dict(self._named_parameters())
        refuse_sparse({name: parameter for name, (parameter, _) in named.items()})
        stand_ins = {name: self._stand_in(parameter, group) for name, (parameter, group) in named.items()}
        self._exchange(stand_ins, tracker)
        for name, (parameter, group) in named.items():
            agreed = stand_ins[name].grad
            if agreed is not None:
                parameter.add_(agreed, alpha=-self._rate(group))
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

    def _before_step(self) -> None:
        """Do nothing; a subclass may read the parameters here, before a step that is not skipped."""

    @abstractmethod
    def _local(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Make the new tensor that this worker hands to the aggregation for a parameter with a gradient."""

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        r"""Return the direction of :class:`torch.optim.SGD`, whose step is the learning rate times it; a new tensor.

        With gradient :math:`g`, weight decay :math:`\lambda`, momentum :math:`\mu`, dampening :math:`\tau`,

        .. math::

            g &\leftarrow g + \lambda x \\
            b &\leftarrow \mu b + (1 - \tau) g \quad \text{(the first time } b = g \text{)}

        it is :math:`b`, or :math:`g + \mu b` with Nesterov momentum, or :math:`g` without momentum.
        """
        assert parameter.grad is not None
        g = parameter.grad.add(parameter, alpha=group["weight_decay"])
        if not group["momentum"]:
            return g
        state = self.state[parameter]
        b = state.get("momentum_buffer")
        if b is None:
            b = state["momentum_buffer"] = g.clone()
        else:
            b.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
        return g.add_(b, alpha=group["momentum"]) if group["nesterov"] else b.clone()

    def _rate(self, group: dict[str, Any]) -> float:
        """Return the factor of the aggregated tensors; 1 if they are steps already."""
        return 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options it does not name get the defaults."""
        super().add_param_group(param_group)
        counts = Counter(name for name, _ in self._named_parameters())
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:  # two parameters of one name would share an error memory
            self.param_groups.pop()
            raise ValueError(f"several parameters are called {', '.join(repeated)}: give every parameter its own name")

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, and that of the aggregation under ``"aggregation"``.

        As in torch, its tensors are the optimizer's own: they change with the next step.
        """
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
        remembered = state_dict.get("aggregation", {})
        groups = zip(self.param_groups, state_dict["param_groups"], strict=False)  # torch refuses other groups
        names = [name for i, (own, saved) in enumerate(groups) for name in _names_in_group(i, {**own, **saved})]
        # Names are checked before the first change, so that a state of other parameters changes nothing.
        check_names(self.aggregation.remembered_names(remembered), names)
        super().load_state_dict(dict(state_dict))
        self.aggregation.load_state_dict(remembered)

    def shared_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries that differ between workers: error memory and momentum.

        See :func:`~mlbench_core.optim.pytorch.wrapper.shared_optimizer_state`.
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
        if parameter.grad is not None and parameter.requires_grad:
            stand_in.grad = self._local(parameter, group)
        return stand_in

    def _exchange(self, stand_ins: Mapping[str, Tensor], tracker: Any | None) -> None:
        """Aggregate, and report the cost."""
        device = next(iter(stand_ins.values())).device
        with self._clock.measure(device) as interval:
            if self._average:
                self._aggregate_named(stand_ins, AVG_WORLD)
            else:
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
