"""Average weights periodically: workers train by themselves for H steps in between.

:class:`PeriodicAggregation` wraps another aggregation A. It counts the calls t of each tensor::

                  t mod H != 0: nothing is sent
                    +-------+
                    |       v
    t = 0 -------> LOCAL STEPS ------- t mod H = 0 -------> AGGREGATE with A
                    ^                                            |
                    +--------------------------------------------+

:class:`DiLoCoAggregation`, which DiLoCo wraps as A, keeps the weights theta that all workers share::

    NOT SHARED --- start(model): theta = weights of the model ------------+
        |                                                                 v
        +--------- first call: theta = average of the workers -------> SHARED
        |                                                               |    ^
        +--------- load_state_dict: theta and outer state ------------->|    |
                                                                        +----+
                             every call: average theta - theta_i, outer step, theta_i = theta
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mlbench_core.aggregation.pytorch.aggregation import BOOKKEEPING, Aggregation, Denominator, trainable
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import check_average, refuse_gradients
from mlbench_core.aggregation.pytorch.names import by_plain_name, check_keys
from mlbench_core.arguments import check_int

__all__ = ["DiLoCoAggregation", "PeriodicAggregation"]


class PeriodicAggregation(Aggregation):
    r"""Aggregate every H-th time only, and send nothing in between.

    Let :math:`t = 1, 2, \ldots` count the steps, and let :math:`A` be the wrapped aggregation, for example the average
    over all workers. Then

    .. math:: x_i \leftarrow A(x_1, \ldots, x_k) \text{ if } H \mid t, \text{ else } x_i.

    Every tensor has its own counter, by name. So calls with one layer at a time, buffers, and parameters that are added
    later need no special case. If all tensors take part from the first step on, their counters are equal and all are
    sent in the same step. Every H-th step sends the bytes of the wrapped aggregation, and the others send nothing.

    Attributes:
        inside: The wrapped aggregation.
        period: H.

    Args:
        aggregation: The aggregation to wrap, which every H-th step uses.
        period: H, a positive integer; with 1, every step aggregates.

    Raises:
        TypeError: ``period`` is not an integer, or ``aggregation`` is not an aggregation.
        ValueError: ``period`` is not positive, or the aggregation overlaps with the backward pass or takes gradients
            only.

    Example:
        >>> aggregation = PeriodicAggregation(AllReduceAggregation(world_size=1), period=8)
        >>> aggregation.agg_model()(nn.Linear(2, 1), "avg_world")
        >>> aggregation.state_dict()
        {'counts': {'weight': 1, 'bias': 1}}

    References:
        S. Stich: Local SGD Converges Fast and Communicates Little. arXiv:1805.09767
    """

    _named_state = ("counts",)

    def __init__(self, aggregation: Aggregation, period: int) -> None:
        if not isinstance(aggregation, Aggregation):
            raise TypeError(f"aggregation must be an Aggregation, not {type(aggregation).__name__}")
        if aggregation.overlap:
            raise ValueError(
                "overlap must be False for a periodic aggregation, which averages weights after the step instead of "
                f"gradients: leave it out of {type(aggregation).__name__}(...)"
            )
        # Raises an error for aggregations that compress gradients, because they would destroy weights.
        aggregation.agg_model()
        super().__init__(use_cuda=aggregation.use_cuda, process_group=aggregation.group)
        self.inside = aggregation
        self.period = check_int("period", period)
        self._counts: dict[str, int] = {}

    @property
    def world_size(self) -> int:
        """Return the number of workers that take part."""
        return self.inside.world_size

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the compression ratio of the wrapped aggregation; steps that send nothing do not count."""
        return self.inside.compression_ratio

    # The other workers would never receive the gradients of a step that sends nothing.
    agg_grad = refuse_gradients

    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None) -> None:
        """Count a step of every tensor. Aggregate the tensors whose count is a multiple of H, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: As in the wrapped aggregation.
            denom: As in the wrapped aggregation.
        """
        for name in tensors:
            self._counts[name] = self._counts.get(name, 0) + 1
        due = {name: tensor for name, tensor in tensors.items() if self._counts[name] % self.period == 0}
        self._delegate(self.inside, due, op, denom)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters by name, and the state of the wrapped aggregation if it has one."""
        inside = self.inside.state_dict()
        return {"counts": dict(self._counts), **({"inside": inside} if inside else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        check_keys(self, state_dict, (), ("counts", "inside"))
        self.inside.load_state_dict(state_dict.get("inside", {}))
        self._counts = {name: int(count) for name, count in by_plain_name(state_dict.get("counts", {})).items()}

    def shared_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries that differ between workers. The counters are the same on all workers."""
        inside = {"inside": self.inside.shared_state(state_dict["inside"])} if "inside" in state_dict else {}
        return {**state_dict, **inside}

    def remembered_names(self, state_dict: Mapping[str, Any]) -> set[str]:
        """Return the names of the parameters that have an entry in a state."""
        return super().remembered_names(state_dict) | self.inside.remembered_names(state_dict.get("inside", {}))


class DiLoCoAggregation(Aggregation):
    r"""Update weights that all workers share by the average of the workers' changes.

    With :math:`\theta` the shared weights and :math:`\theta_i` the current weights of worker :math:`i` of :math:`k`, a
    call computes the outer gradient

    .. math:: \Delta = \theta - \frac{1}{k} \sum_i \theta_i = \frac{1}{k} \sum_i (\theta - \theta_i).

    The outer optimizer updates :math:`\theta` with this gradient. Then every :math:`\theta_i` is set to
    :math:`\theta`. If the outer optimizer is SGD with learning rate 1 and no momentum, the result is the average of the
    :math:`\theta_i`.

    The differences are averaged in the dtype of the tensors. For half-precision weights, :math:`\theta` is kept in
    float32. Buffers and other bookkeeping are only averaged. A single worker takes outer steps too, and sends nothing.
    A call sends the bytes of the tensors.

    Attributes:
        outer_optimizer: The outer optimizer; a change of its learning rate takes effect at the next call.

    Args:
        outer_optimizer: A function that creates a torch optimizer from an iterable of parameters. The default is SGD
            with learning rate 0.7 and Nesterov momentum 0.9.
        world_size: Number of workers; None takes that of the process group.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        TypeError: ``outer_optimizer`` does not create a torch optimizer.
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> aggregation = DiLoCoAggregation(partial(SGD, lr=0.5))
        >>> _ = nn.init.zeros_(model.weight)
        >>> aggregation.start(model)
        >>> _ = nn.init.ones_(model.weight)
        >>> aggregation.agg_model()(model, "avg_world")
        >>> model.weight.item()
        0.5

    References:
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models. arXiv:2311.08105
    """

    _named_state: ClassVar[tuple[str, ...]] = ("shared", "outer_state")

    def __init__(
        self,
        outer_optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
        world_size: int | None = None,
        use_cuda: bool = False,
        *,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self._all_reduce = AllReduceAggregation(world_size, use_cuda=use_cuda, process_group=process_group)
        self._shared: dict[str, nn.Parameter] = {}  # theta by name
        self.outer_optimizer = _make_outer(outer_optimizer)

    @property
    def world_size(self) -> int:
        """Return the number of workers that take part."""
        return self._all_reduce.world_size

    # Only weights can move the shared weights, so aggregating gradients would leave them as they are.
    agg_grad = refuse_gradients

    def start(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Use the weights of a model, which are equal on all workers, as shared weights. A second call does nothing.

        Parameters that are added later are averaged without an outer step at their first aggregation, and take outer
        steps from then on. Without this call, this holds for all parameters.

        Args:
            model: The model before its first step, or a mapping from names to parameters.
        """
        if not self._shared:
            for name, parameter in trainable(model):
                self._share(name, parameter)

    @torch.no_grad()
    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None) -> None:
        """Take an outer step and replace every tensor by the shared weights, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
            ValueError: A tensor does not have the shape of its shared weights.
        """
        check_average(op)
        steps = {name: tensor for name, tensor in tensors.items() if name in self._shared}
        outer_gradients = {name: self._difference(name, theta_i) for name, theta_i in steps.items()}
        averages = {name: tensor for name, tensor in tensors.items() if name not in steps}
        self._average(outer_gradients, averages)
        for name, gradient in outer_gradients.items():
            self._shared[name].grad = gradient.to(self._shared[name].dtype)
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for name, theta_i in steps.items():
            theta_i.copy_(self._shared[name])
        # These tensors were averaged for the first time. From now on they take outer steps.
        for name, average in averages.items():
            if not name.startswith(BOOKKEEPING):
                self._share(name, average)

    def _average(self, outer_gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> None:
        """Replace the outer gradients, and tensors that are only averaged, by their averages; in one message."""
        self._delegate(self._all_reduce, {**outer_gradients, **averages}, AVG_WORLD)

    def _difference(self, name: str, theta_i: Tensor) -> Tensor:
        """Return theta - theta_i in the dtype of theta_i."""
        theta = self._shared[name]
        if theta.shape != theta_i.shape:
            raise ValueError(
                f"{name!r} must have the shape {tuple(theta.shape)} of its shared weights, not {tuple(theta_i.shape)}: "
                "load a state of this model"
            )
        if theta.device != theta_i.device:  # the model was moved after start()
            theta.data = theta.data.to(theta_i.device)
        return (theta - theta_i).to(theta_i.dtype)

    def _share(self, name: str, weights: Tensor) -> None:
        """Store a copy of weights as shared weights, and let the outer optimizer update it."""
        theta = nn.Parameter(weights.detach().to(torch.promote_types(weights.dtype, torch.float32), copy=True))
        self._shared[name] = theta
        # All weights are in one group, so that its options, such as the learning rate, hold for all of them.
        self.outer_optimizer.param_groups[0]["params"].append(theta)

    def state_dict(self) -> dict[str, Any]:
        """Return the shared weights and the outer optimizer's state, by parameter name, and its options."""
        if not self._shared:
            return {}
        # The group's parameters are the shared weights, which have a key of their own.
        options = {key: value for key, value in self.outer_optimizer.param_groups[0].items() if key != "params"}
        return {
            "shared": {name: theta.detach() for name, theta in self._shared.items()},
            "outer_state": {name: dict(self.outer_optimizer.state.get(p, {})) for name, p in self._shared.items()},
            "outer_options": options,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        if state_dict:
            check_keys(self, state_dict, ("shared", "outer_state", "outer_options"))
        # The outer optimizer stays the same object, so that references to it and its schedulers remain valid.
        self._shared.clear()
        self.outer_optimizer.state.clear()
        self.outer_optimizer.param_groups[0]["params"].clear()
        self.outer_optimizer.param_groups[0].update(state_dict.get("outer_options", {}))
        outer_state = by_plain_name(state_dict.get("outer_state", {}))
        for name, theta in by_plain_name(state_dict.get("shared", {})).items():
            self._share(name, theta)
            # A copy, because the outer optimizer changes its state in place and the caller may still use the
            # checkpoint.
            self.outer_optimizer.state[self._shared[name]] = copy.deepcopy(outer_state[name])


def _make_outer(make: Callable[[Iterable[Tensor]], Optimizer] | None) -> Optimizer:
    """Create the outer optimizer, with one group without parameters."""
    make = make or partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
    # torch refuses an empty list of parameters, so this one is removed below.
    outer = make([nn.Parameter(torch.zeros(()))])
    if not isinstance(outer, Optimizer):
        raise TypeError(f"outer_optimizer must make a torch.optim.Optimizer, not {type(outer).__name__}")
    outer.param_groups[0]["params"].clear()
    return outer
