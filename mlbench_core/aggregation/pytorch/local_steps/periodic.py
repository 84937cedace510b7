"""Average weights periodically: workers train independently for H steps in between.

:class:`PeriodicAggregation` wraps another aggregation A. It counts the calls t of each tensor::

                  t mod H != 0: nothing is sent
                    +-------+
                    |       v
    t = 0 -------> LOCAL STEPS ------- t mod H = 0 -------> AGGREGATE with A
                    ^                                            |
                    +--------------------------------------------+

With a delay of tau steps, A is an average that does not block::

    LOCAL STEPS --- t mod H = 0: start to average copies of x_i ---> IN FLIGHT (tau more steps)
         ^                                                               |
         +--- add (average - copy) to x_i <--- t mod H = tau: wait ------+

A worker waits for a message only in the step that adds it, or when its state is saved or copied.

:class:`DiLoCoAggregation`, which DiLoCo wraps as A, keeps the weights theta that all workers
share::

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
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator, trainable
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation, Flight
from mlbench_core.aggregation.pytorch.compression.compressed import LossyAggregation
from mlbench_core.aggregation.pytorch.decentralized import check_average, refuse_gradients
from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.aggregation.pytorch.local_steps.penalty import OutlierPenalty
from mlbench_core.aggregation.pytorch.transport.layout import Layout
from mlbench_core.aggregation.pytorch.transport.names import (
    by_plain_name,
    check_keys,
    counts_by_plain_name,
    is_buffer,
)
from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = [
    "Correction",
    "DiLoCoAggregation",
    "PeriodicAggregation",
    "all_corrections",
    "check_delay",
    "count_step",
    "take_corrections",
]


@dataclass
class Correction(Flight):
    """Averages on their way.

    Attributes:
        values: By name: copies of this worker's tensors, and once the averages have arrived,
            their corrections.
    """

    values: dict[str, Tensor]


class PeriodicAggregation(Aggregation):
    r"""Aggregate every H-th time only, and send nothing in between.

    Let :math:`t = 1, 2, \ldots` count the steps, and let :math:`A` be the wrapped aggregation, for
    example the average over all workers. Then

    .. math:: x_i \leftarrow A(x_1, \ldots, x_k) \text{ if } H \mid t, \text{ else } x_i.

    Every tensor has its own counter, by name, so calls with one layer at a time and buffers need no
    special case. A tensor that comes into a call later counts from the counters of the others in
    it, so all are sent in the same step. This holds for layers that are frozen or unfrozen, too.
    Parameters outside the model, which are aggregated in separate calls, count from their first
    step. Every H-th step sends the bytes of the wrapped aggregation, and the others send nothing.

    With a delay :math:`\tau > 0`, the workers do not wait for the average. At a step :math:`t` with
    :math:`H \mid t`, they start to average copies of their tensors. They take :math:`\tau` more
    steps, and then

    .. math:: x_i \leftarrow x_i(t + \tau) + \left( \frac{1}{k} \sum_{j=1}^{k} x_j(t) - x_i(t)
      \right).

    So the progress since step :math:`t` is kept. The corrections of all workers add up to zero, so
    they do not change the average of the workers. The workers' weights are never all equal: average
    them before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`. This holds for
    floating-point buffers, too: a running variance of one worker alone may even become negative. A
    copy and a message of all tensors need twice their memory.

    Attributes:
        inside: The wrapped aggregation.
        period: H.
        delay: :math:`\tau`.

    Args:
        aggregation: The aggregation to wrap, which every H-th step uses. With a delay, an
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        period: H, a positive integer; with 1, every step aggregates.
        delay: :math:`\tau`, the number of steps during which an average travels; less than H.

    Raises:
        TypeError: ``period`` or ``delay`` is not an integer, or ``aggregation`` is not an
            aggregation. Or there is a delay, and ``aggregation`` is not an
            ``AllReduceAggregation``.
        ValueError: ``period`` is not positive, ``delay`` is negative or not less than ``period``,
            or the aggregation overlaps with the backward pass or takes gradients only. Or there is
            a delay, and the aggregation sums through shared memory.

    Example:
        >>> aggregation = PeriodicAggregation(AllReduceAggregation(world_size=1), period=8)
        >>> aggregation.agg_model()(nn.Linear(2, 1), "avg_world")
        >>> aggregation.state_dict()
        {'counts': {'weight': 1, 'bias': 1}}

    References:
        S. Stich: Local SGD Converges Fast and Communicates Little. arXiv:1805.09767 Q. Zhou et al.:
        DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
        Averaging. arXiv:2006.00441
    """

    _selects_late = True
    _named_state = ("counts", "corrections")
    _own_state = ("corrections",)

    def __init__(self, aggregation: Aggregation, period: int, delay: int = 0) -> None:
        if not isinstance(aggregation, Aggregation):
            raise TypeError(f"aggregation must be an Aggregation, not {type(aggregation).__name__}")
        if aggregation.overlap:
            raise ValueError(
                "overlap must be False for a periodic aggregation, which averages weights after "
                f"the step instead of gradients: leave it out of {type(aggregation).__name__}(...)"
            )
        # Raises an error for aggregations that compress gradients,
        # because they would destroy weights.
        aggregation.agg_model()
        super().__init__(use_cuda=aggregation.use_cuda, process_group=aggregation.group)
        self.world_size = aggregation.world_size
        self.inside = aggregation
        self.takes_complex = aggregation.takes_complex
        self.period = check_int("period", period)
        self.delay = check_delay(delay, self.period)
        if self.delay:
            _check_travels(aggregation)
        self._counts: dict[str, int] = {}
        self._flights: list[Correction] = []

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the wrapped aggregation's ratio; steps that send nothing do not count."""
        return self.inside.compression_ratio

    # The other workers would never receive the gradients of a step that sends nothing.
    agg_grad = refuse_gradients

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Count a step of every tensor, and aggregate those whose count is a multiple of H.

        With a delay, start to average these tensors, and correct those whose average is due.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: As in the wrapped aggregation; with a delay, ``"avg_world"``.
            denom: As in the wrapped aggregation.

        Raises:
            UnknownOperationError: There is a delay, and ``op`` is another one.
        """
        if self.delay:
            check_average(op)
        count_step(self._counts, tensors)
        due, to_correct = {}, {}
        for name, tensor in tensors.items():
            phase = self._counts[name] % self.period
            if phase == 0:
                due[name] = tensor
            # A state may come from a run with a longer delay. Its corrections
            # are added as soon as possible.
            if phase == 0 or phase >= self.delay:
                to_correct[name] = tensor
        self._add_corrections(to_correct)
        if not due:
            return
        if self.delay:
            # The comparison of new parameters travels with the copies, and is waited for with them.
            pending: list[Callable[[], None]] = []
            self._send(self._traveling(due, pending), pending)
        else:
            self._delegate(self.inside, self._traveling(due), op, denom)

    def _send(self, due: Mapping[str, Tensor], pending: list[Callable[[], None]]) -> None:
        """Start to average copies of tensors, and also wait for the pending messages.

        A worker alone is its own average.
        """
        if due and self.world_size > 1:
            assert isinstance(self.inside, AllReduceAggregation)
            # Training changes the tensors while the averages travel.
            copies = {name: tensor.clone() for name, tensor in due.items()}
            with self._counting_bytes_of(self.inside):
                pending += self.inside.start_averages(
                    copies.values(), _subtract_from, overlapped=True
                )
            # The copies are the own values at this step. Their corrections are written in their
            # place.
            self._flights.append(Correction(copies, pending=pending))

    def _add_corrections(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the corrections of tensors, if there are any, after their arrival."""
        for name, correction in take_corrections(self._flights, tensors).items():
            tensors[name].add_(correction.to(tensors[name]))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without messages on their way, which belong to this process."""
        all_corrections(self._flights)
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters by name, and the state of the wrapped aggregation if it has one.

        With a delay, return also the corrections by name that are not added yet, after their
        arrival. They differ between workers.
        """
        corrections, inside = all_corrections(self._flights), self.inside.state_dict()
        state: dict[str, Any] = {"counts": self._without_frozen(self._counts)}
        if corrections:
            state["corrections"] = corrections
        if inside:
            state["inside"] = inside
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        check_keys(self, state_dict, (), ("counts", "corrections", "inside"))
        self.inside.load_state_dict(state_dict.get("inside", {}))
        # The other workers count on this worker's part of every message.
        all_corrections(self._flights)
        self._counts = counts_by_plain_name(state_dict.get("counts", {}))
        self.layout = Layout(traveled=set(self._counts))
        corrections = by_plain_name(state_dict.get("corrections", {}))
        self._flights = []
        if corrections:
            self._flights.append(Correction(corrections))

    def shared_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without the entries that differ between workers.

        The counters are the same on all workers.
        """
        state = super().shared_state(state_dict)
        if "inside" in state_dict:
            state["inside"] = self.inside.shared_state(state_dict["inside"])
        return state

    def remembered_names(self, state_dict: Mapping[str, Any]) -> set[str]:
        """Return the names of the parameters that have an entry in a state."""
        inside = self.inside.remembered_names(state_dict.get("inside", {}))
        return super().remembered_names(state_dict) | inside


class DiLoCoAggregation(Aggregation):
    r"""Update weights that all workers share by the average of the workers' changes.

    With :math:`\theta` the shared weights and :math:`\theta_i` the current weights of worker
    :math:`i` of :math:`k`, a call computes the outer gradient

    .. math:: \Delta = \theta - \frac{1}{k} \sum_i \theta_i = \frac{1}{k} \sum_i (\theta -
      \theta_i).

    The outer optimizer updates :math:`\theta` with this gradient. Then every :math:`\theta_i` is
    set to :math:`\theta`. If the outer optimizer is SGD with learning rate 1 and no momentum, the
    result is the average of the :math:`\theta_i`.

    If no worker has moved a tensor since the last call, as for a frozen layer, it takes no outer
    step.

    The differences are averaged in the dtype of the tensors. For half-precision weights,
    :math:`\theta` is kept in float32. Buffers are only averaged. A single worker takes outer steps
    too, and sends nothing. A call sends the bytes of the tensors.

    With a penalty (EDiT), :math:`\Delta` is a weighted average instead, in which workers with an
    unusually long change do not take part. A call then gathers 4 more bytes for each tensor first.

    With compression, outer gradients travel by another aggregation, for example in 8 bits. What it
    keeps for later, such as an error memory, moves a frozen layer on. Other tensors travel as they
    are.

    In an elastic run, :math:`k` counts the workers of the round that were not healed in it. If a
    round is not committed, :math:`\theta` takes no outer step, and every :math:`\theta_i` is set to
    it. The norms of its changes are not fed to a penalty. A worker that joins receives the norms of
    the donor.

    Attributes:
        outer_optimizer: The outer optimizer; a change of its learning rate takes effect at the next
            call.
        penalty: As given.
        compressed: As given.
        elastic: As given.

    Args:
        outer_optimizer: A function that creates a torch optimizer from an iterable of parameters.
            The default is SGD with learning rate 0.7 and Nesterov momentum 0.9.
        world_size: Number of workers; None takes that of the process group.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.
        penalty: Finds outliers among the workers, and weighs the others; None for the plain
            average. Its state belongs to this worker.
        compressed: Averages the outer gradients over the same workers, for example
            ``QuantizedAllReduceAggregation(bits=8)``; None for an all-reduce.
        elastic: Averages over workers that may die or join; None for the fixed workers of the
            process group.

    Raises:
        TypeError: ``outer_optimizer`` does not create a torch optimizer, or ``compressed`` does not
            average gradients in a compressed form.
        ValueError: ``world_size`` is not the number of workers in the process group, or
            ``compressed`` is given with a penalty or has another process group. Or ``elastic`` is
            given with ``compressed``.

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
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models.
        arXiv:2311.08105
    """

    _named_state: ClassVar[tuple[str, ...]] = ("shared", "outer_state", "norms")
    _own_state: ClassVar[tuple[str, ...]] = ("norms",)

    def __init__(
        self,
        outer_optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
        world_size: int | None = None,
        use_cuda: bool = False,
        *,
        process_group: Any = None,
        penalty: OutlierPenalty | None = None,
        compressed: LossyAggregation | None = None,
        elastic: ElasticAverage | None = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self.penalty = penalty
        self.compressed = compressed
        self.elastic = elastic
        if elastic is not None:
            self.takes_complex = elastic.takes_complex
            if compressed is not None:
                raise ValueError(
                    "elastic must be None with compression, which knows no other workers than "
                    f"those of the start, not {type(elastic).__name__}: leave one out"
                )
        if compressed is not None:
            _check_compressed(compressed, self.group, penalty)
            self.takes_complex = compressed.takes_complex
        self._all_reduce = AllReduceAggregation(
            world_size, use_cuda=use_cuda, process_group=process_group
        )
        self._shared: dict[str, nn.Parameter] = {}  # theta by name
        self.outer_optimizer = _make_outer(outer_optimizer)

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]
        """Return the bytes of outer gradients over those sent for them; 1 before any message."""
        if self.compressed is None:
            return 1.0
        return self.compressed.compression_ratio

    # Only weights can move the shared weights, so aggregating gradients
    # would leave them as they are.
    agg_grad = refuse_gradients

    def start(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Use a model's weights, which are equal on all workers, as shared weights.

        A second call does nothing.

        Parameters that are added later are averaged without an outer step at their first
        aggregation, and take outer steps from then on. Without this call, this holds for all
        parameters.

        Args:
            model: The model before its first step, or a mapping from names to parameters.
        """
        if not self._shared:
            for name, parameter in trainable(model):
                self._share(name, parameter)

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
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
        healed = self._meet(tensors)
        outer_gradients, averages = {}, {}
        for name, tensor in tensors.items():
            if name not in self._shared:
                averages[name] = tensor
                continue
            outer_gradients[name] = self._difference(name, tensor)
            if healed:
                # In half precision, theta_i differs from theta by its rounding alone. That is not a
                # change, and a penalty must not count its norm.
                outer_gradients[name].zero_()
        self._average(outer_gradients, averages)
        self._take_outer_step(outer_gradients)
        for name in outer_gradients:
            tensors[name].copy_(self._shared[name])
        # These tensors were averaged for the first time. From now on they take outer steps.
        for name, average in averages.items():
            self._share(name, average)

    def _meet(self, tensors: Mapping[str, Tensor], steps: int = 0) -> bool:
        """Agree on the round of an elastic run; a worker that is behind gets the shared weights.

        Return True if this worker has got them.
        """
        if self.elastic is None:
            return False
        with self._counting_bytes_of(self.elastic):
            healed = self.elastic.meet(tensors, steps)
        if healed:
            for name in tensors.keys() & self._shared.keys():
                tensors[name].copy_(self._shared[name])
        return healed

    def _average(
        self, outer_gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]
    ) -> None:
        """Average the outer gradients, and tensors that are only averaged."""
        if self.elastic is not None:
            with self._counting_bytes_of(self.elastic):
                self._average_of_round(self.elastic, outer_gradients, averages)
            return
        if self.penalty is not None and outer_gradients:
            self._weigh(self.penalty, outer_gradients)
        if self.compressed is None:
            averages = {**outer_gradients, **averages}
        else:
            self._delegate(self.compressed, outer_gradients, AVG_WORLD)
        self._delegate(self._all_reduce, averages, AVG_WORLD)
        if self.penalty is not None:
            self.penalty.clip_(list(outer_gradients.values()))

    def _average_of_round(
        self,
        elastic: ElasticAverage,
        outer_gradients: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
    ) -> None:
        """Average over the members of a round of an elastic run."""
        if self.penalty is None or not outer_gradients:
            elastic.exchange(outer_gradients, averages)
            return
        norms = self.penalty.state_dict()
        self._weigh(self.penalty, outer_gradients)
        if elastic.exchange(outer_gradients, averages):
            self.penalty.clip_(list(outer_gradients.values()))
        else:
            # The steps that they belong to are lost.
            self.penalty.load_state_dict(norms)

    def _weigh(self, penalty: OutlierPenalty, outer_gradients: Mapping[str, Tensor]) -> None:
        """Multiply this worker's outer gradients by k times its weights."""
        own = penalty.own_norms(outer_gradients)
        gathered, rank = own[None], 0
        if self.elastic is not None:
            gathered, rank = self.elastic.gather(own)
        elif self.world_size > 1:
            sent = process_groups.get_backend_tensor(own, self.group)
            everyone = sent.new_empty(self.world_size, len(sent))
            process_groups.dist.all_gather(list(everyone), sent, group=self.group)
            self._count("all_gather", self.world_size, sent.nbytes)
            gathered, rank = everyone.cpu(), process_groups.dist.get_rank(self.group)
        # The average below divides by k, but the weights of a tensor already add up to 1.
        weights = penalty.weights(gathered)[rank] * len(gathered)
        for gradient, weight in zip(outer_gradients.values(), weights.tolist(), strict=True):
            gradient.mul_(weight)

    def _take_outer_step(self, outer_gradients: Mapping[str, Tensor]) -> None:
        """Update the shared weights that a worker has moved."""
        for name, gradient in outer_gradients.items():
            # The outer momentum would go on moving a layer that all workers have frozen. On meta
            # there are no values.
            if gradient.is_meta or gradient.any():
                self._shared[name].grad = gradient.to(self._shared[name])
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()

    def _difference(self, name: str, theta_i: Tensor) -> Tensor:
        """Return theta - theta_i in the dtype of theta_i."""
        theta = self._shared[name]
        if theta.shape != theta_i.shape:
            raise ValueError(
                f"{name!r} must have the shape {tuple(theta.shape)} of its shared weights, not "
                f"{tuple(theta_i.shape)}: load a state of this model"
            )
        return (self._moved(name, theta_i) - theta_i).to(theta_i.dtype)

    def _moved(self, name: str, theta_i: Tensor) -> nn.Parameter:
        """Return shared weights on the device of a tensor, and at least in its dtype.

        The model may have moved since the last call or since the checkpoint. The outer optimizer's
        state moves, too.
        """
        theta, dtype = self._shared[name], torch.promote_types(theta_i.dtype, torch.float32)
        if (theta.device, theta.dtype) == (theta_i.device, dtype):
            return theta
        moved = self._shared[name] = nn.Parameter(theta.detach().to(theta_i.device, dtype))
        params, state = self.outer_optimizer.param_groups[0]["params"], self.outer_optimizer.state
        # Not params.index(theta), which would compare the values of tensors.
        position = next(i for i, parameter in enumerate(params) if parameter is theta)
        params[position] = moved
        if theta in state:
            values = state.pop(theta)
            for key, value in values.items():
                # As torch does it: its optimizers keep the number of steps on the CPU.
                if key != "step" and isinstance(value, Tensor):
                    values[key] = value.to(moved.device, dtype)
            state[moved] = values
        return moved

    def _share(self, name: str, weights: Tensor) -> None:
        """Store a copy of weights as shared weights for the outer optimizer; leave out buffers."""
        if is_buffer(name):
            return
        dtype = torch.promote_types(weights.dtype, torch.float32)
        theta = nn.Parameter(weights.detach().to(dtype, copy=True))
        self._shared[name] = theta
        # All weights are in one group, so that its options, such as the
        # learning rate, hold for all of them.
        self.outer_optimizer.param_groups[0]["params"].append(theta)

    def state_dict(self) -> dict[str, Any]:
        """Return shared weights and outer optimizer state by parameter name, and its options."""
        if not self._shared:
            return {}
        shared, outer_state = {}, {}
        for name, theta in self._shared.items():
            shared[name] = theta.detach()
            outer_state[name] = dict(self.outer_optimizer.state.get(theta, {}))
        options = dict(self.outer_optimizer.param_groups[0])
        # The group's parameters are the shared weights, which have their own key.
        del options["params"]
        state = {"shared": shared, "outer_state": outer_state, "outer_options": options}
        if self.penalty is not None:
            state["norms"] = self.penalty.state_dict()
        if self.compressed is not None:
            state["compressed"] = self.compressed.state_dict()
        if self.elastic is not None:
            state["elastic"] = self.elastic.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        if state_dict:
            optional: list[str] = []
            if self.penalty is not None:
                optional.append("norms")
            if self.compressed is not None:
                optional.append("compressed")
            if self.elastic is not None:
                optional.append("elastic")
            check_keys(self, state_dict, ("shared", "outer_state", "outer_options"), optional)
        if self.penalty is not None:
            self.penalty.load_state_dict(state_dict.get("norms", {}))
        if self.compressed is not None:
            self.compressed.load_state_dict(state_dict.get("compressed", {}))
        if self.elastic is not None:
            self.elastic.load_state_dict(state_dict.get("elastic", {}))
        # The outer optimizer stays the same object, so that references to it and
        # its schedulers remain valid.
        self._shared.clear()
        self.outer_optimizer.state.clear()
        self.outer_optimizer.param_groups[0]["params"].clear()
        self.outer_optimizer.param_groups[0].update(state_dict.get("outer_options", {}))
        outer_state = by_plain_name(state_dict.get("outer_state", {}))
        for name, theta in by_plain_name(state_dict.get("shared", {})).items():
            self._share(name, theta)
            # A copy, because the outer optimizer changes its state in place and the caller may
            # still use the checkpoint.
            self.outer_optimizer.state[self._shared[name]] = copy.deepcopy(outer_state[name])

    def shared_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without norms and error memories, which differ between workers."""
        state = super().shared_state(state_dict)
        if self.compressed is not None and "compressed" in state:
            state["compressed"] = self.compressed.shared_state(state["compressed"])
        return state


def take_corrections(flights: list[Correction], names: Container[str]) -> dict[str, Tensor]:
    """Wait for the corrections of tensors, and take them out of the flights.

    Args:
        flights: Averages on their way; those without any correction left are removed.
        names: The tensors.
    """
    taken: dict[str, Tensor] = {}
    for flight in flights:
        # A copy of the names, because the loop takes values out.
        for name in list(flight.values):
            if name in names:
                flight.arrive()
                taken[name] = flight.values.pop(name)
    flights[:] = [flight for flight in flights if flight.values]
    return taken


def all_corrections(flights: Iterable[Correction]) -> dict[str, Tensor]:
    """Wait for all averages on their way, and return the corrections not used yet.

    Args:
        flights: The averages.
    """
    corrections: dict[str, Tensor] = {}
    for flight in flights:
        flight.arrive()
        corrections.update(flight.values)
    return corrections


def count_step(counts: dict[str, int], names: Iterable[str]) -> None:
    """Count a step of the tensors of a call; a new one starts from the count of the others.

    Args:
        counts: Numbers of steps by name.
        names: The tensors.

    Example:
        >>> counts = {"old": 5}
        >>> count_step(counts, ["old", "new"])
        >>> counts
        {'old': 6, 'new': 6}
    """
    names = list(names)
    before = max((counts[name] for name in names if name in counts), default=0)
    for name in names:
        counts[name] = counts.get(name, before) + 1


def check_delay(delay: int, period: int) -> int:
    """Return the number of steps during which a message travels, if it is less than the period.

    Raises:
        TypeError: ``delay`` is not an integer.
        ValueError: ``delay`` is negative or not less than ``period``.

    Example:
        >>> check_delay(3, period=4)
        3
    """
    delay = check_int("delay", delay, least=0)
    if delay >= period:
        raise ValueError(
            f"delay must be less than period, {period}, not {delay}: a message "
            "must arrive before the next one is sent"
        )
    return delay


def _check_travels(aggregation: Aggregation) -> None:
    """Raise an error for an aggregation whose messages cannot travel while training goes on."""
    # A subclass may aggregate in another way than by an average.
    if type(aggregation) is not AllReduceAggregation:
        raise TypeError(
            "aggregation must be an AllReduceAggregation if there is a delay, not "
            f"{type(aggregation).__name__}: leave "
            "out delay, or for DiLoCo, use StreamingDiLoCoAggregation(delay=...)"
        )
    if aggregation.shared_memory:
        raise ValueError(
            "shared_memory must be False if there is a delay, not True, because no message "
            "moves through it during a step: leave it out"
        )


def _check_compressed(
    compressed: LossyAggregation, group: Any, penalty: OutlierPenalty | None
) -> None:
    """Raise an error for an aggregation that cannot average the outer gradients of a group."""
    if not isinstance(compressed, LossyAggregation) or not compressed.averages_gradients:
        raise TypeError(
            "compressed must be an aggregation that compresses and averages gradients, such as "
            f"QuantizedAllReduceAggregation, not {type(compressed).__name__}: leave it out"
        )
    if penalty is not None:
        raise ValueError(
            f"compressed must be None with a penalty, not {type(compressed).__name__}, whose error "
            "would count as a part of the outer gradients: leave one of them out"
        )
    if compressed.group is not group:
        raise ValueError("process_group must be that of compressed, not another: give it to both")


def _subtract_from(copy_: Tensor, average: Tensor) -> None:
    """Replace a copy by average - copy."""
    torch.sub(average, copy_, out=copy_)


def _make_outer(make: Callable[[Iterable[Tensor]], Optimizer] | None) -> Optimizer:
    """Create the outer optimizer, with one group without parameters."""
    make = make or partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
    # torch refuses an empty list of parameters, so this one is removed below.
    outer = make([nn.Parameter(torch.zeros(()))])
    if not isinstance(outer, Optimizer):
        raise TypeError(
            f"outer_optimizer must make a torch.optim.Optimizer, not {type(outer).__name__}"
        )
    outer.param_groups[0]["params"].clear()
    return outer
