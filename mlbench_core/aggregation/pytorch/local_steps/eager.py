"""Run DiLoCo so that a worker uses its own change at once, and those of the others a call later.

With D_i(t) the change of worker i before call t, and D(t) the changes of all::

    IN FLIGHT, H local steps --- call t: wait for the average of D(t - 1) ---> ARRIVED
         ^                                                                        |
         +--- outer step with it and the own D_i(t) <--- start to average D(t) <--+
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD
from mlbench_core.aggregation.pytorch.local_steps.periodic import (
    Correction,
    DiLoCoAggregation,
    all_corrections,
    take_corrections,
)
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, is_buffer

__all__ = ["EagerDiLoCoAggregation"]


class EagerDiLoCoAggregation(DiLoCoAggregation):
    r"""Take outer steps along this worker's change of this call and the others' of the last call.

    Every worker :math:`i` of :math:`k` has its own slow weights :math:`\theta_i` and outer
    momentum. In call :math:`t`, let :math:`D_i(t)` be :math:`\theta_i` minus the current weights of
    the worker. The worker starts to average :math:`D_i(t)` and does not wait. Its outer optimizer
    updates :math:`\theta_i` with

    .. math:: \frac{1}{k} \sum_j D_j(t - 1) + \frac{1}{k} \left( D_i(t) - D_i(t - 1) \right),

    with :math:`D_j(0) = 0` before the first call, :math:`t = 1`. Then the current weights are set
    to :math:`\theta_i`. The average may travel during all steps until the next call, which waits
    for it. If the outer optimizer is SGD without momentum, with the learning rate :math:`\eta`,

    .. math:: \theta_i(t) = \theta(0) - \eta \left( \sum_{s < t} \frac{1}{k} \sum_j D_j(s) +
      \frac{1}{k} D_i(t) \right).

    According to a secondary text, the paper's outer learning rate is 0.4.

    With one worker this is DiLoCo. The weights of several workers are never all equal: average them
    before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Workers differ only by changes that still travel, and by the momentum of these, as long as the
    outer learning rate is constant. Nothing removes other differences: those of rounding, of a
    changed learning rate, and of a layer that is frozen while it has an outer momentum.

    Buffers stay those of the worker. The others' values of the call before would be out of date, as
    the running statistics of BatchNorm are after H steps. For parameters that were not given to
    :meth:`start`, the first call waits for a plain average. They take outer steps from then on.

    A call sends the bytes of the parameters in one all-reduce for each dtype. A copy and a message
    need twice their memory. State: :math:`\theta_i`, the state of the outer optimizer, and what
    remains of the last average without the own part. All of it differs between workers.

    Args:
        outer_optimizer: A function that creates an SGD optimizer of torch from an iterable of
            parameters. The default has the learning rate 0.7 and Nesterov momentum 0.9.
        world_size: Number of workers; None takes that of the process group.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        TypeError: ``outer_optimizer`` does not create an SGD optimizer of torch.
        ValueError: ``world_size`` is not the number of workers in the process group.

    Example:
        >>> import torch
        >>> weights = {"x": torch.zeros(1)}
        >>> aggregation = EagerDiLoCoAggregation(lambda params: SGD(params, lr=0.5))
        >>> aggregation.start({"x": torch.nn.Parameter(weights["x"])})
        >>> weights["x"] += 1
        >>> aggregation.aggregate(weights, "avg_world")
        >>> weights["x"]
        tensor([0.5000])

    References:
        S. Kale, A. Douillard, Y. Donchev: Eager Updates for Overlapped Communication and
        Computation in DiLoCo. arXiv:2502.12996
    """

    _named_state = ("shared", "outer_state", "corrections")
    _own_state = ("shared", "outer_state", "corrections")

    def __init__(
        self,
        outer_optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
        world_size: int | None = None,
        use_cuda: bool = False,
        *,
        process_group: Any = None,
    ) -> None:
        super().__init__(outer_optimizer, world_size, use_cuda, process_group=process_group)
        if not isinstance(self.outer_optimizer, SGD):
            # The own part of a call is taken back in the next one, which needs a linear step.
            raise TypeError(
                "outer_optimizer must make a torch.optim.SGD, not "
                f"{type(self.outer_optimizer).__name__}, with which the workers would drift "
                "apart: give other optimizers to DiLoCoAggregation or StreamingDiLoCoAggregation"
            )
        self._flights: list[Correction] = []

    def _average(
        self, outer_gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]
    ) -> None:
        """Set gradients to the own part of this call and the others' of the call before."""
        new = {name: tensor for name, tensor in averages.items() if not is_buffer(name)}
        self._delegate(self._all_reduce, new, AVG_WORLD)
        # Before this call sends its own gradients, which have the same names.
        corrections = take_corrections(self._flights, outer_gradients)
        if outer_gradients and self.world_size > 1:
            self._send(outer_gradients)
        for name, gradient in outer_gradients.items():
            gradient.div_(self.world_size)
            if name in corrections:
                gradient.add_(corrections[name].to(gradient))

    def _send(self, gradients: Mapping[str, Tensor]) -> None:
        """Start to average copies of gradients, which become the corrections of the next call."""
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        with self._counting_bytes_of(self._all_reduce):
            pending = self._all_reduce.start_averages(
                copies.values(), self._remove_own_part, overlapped=True
            )
        self._flights.append(Correction(copies, pending=pending))

    def _remove_own_part(self, own: Tensor, average: Tensor) -> None:
        """Replace a copy by the average without the part of this worker."""
        # The same division as in _average, so that the own quotient is taken back as it was added.
        own.div_(-self.world_size).add_(average)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without messages on their way, which belong to this process."""
        all_corrections(self._flights)
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return DiLoCo's state, and the averages not used yet without the part of this worker."""
        corrections, state = all_corrections(self._flights), super().state_dict()
        if corrections:
            state["corrections"] = corrections
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        A worker without own slow weights starts from its weights at the next step.

        Raises:
            ValueError: It is another aggregation's state.
        """
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "corrections"})
        # The other workers count on this worker's part of every message.
        all_corrections(self._flights)
        corrections = by_plain_name(state_dict.get("corrections", {}))
        self._flights = []
        if corrections:
            self._flights.append(Correction(corrections))
