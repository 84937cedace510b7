"""Send the largest coordinates of the change of each worker's gradient (EF21, EF21-SGDM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import recall
from mlbench_core.aggregation.pytorch.compression.sparsified import SparsifiedAggregation
from mlbench_core.aggregation.pytorch.transport.names import check_keys, copies_by_plain_name
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["EF21Aggregation"]


class EF21Aggregation(SparsifiedAggregation):
    r"""Estimate the average gradient from compressed changes of the workers' gradients.

    Worker :math:`i` of :math:`k` has a momentum :math:`M_i` of its gradients :math:`g_i` and an
    estimate :math:`G_i` of it. All workers know :math:`G`, the average of the :math:`G_i`. With the
    momentum factor :math:`\mu` and :math:`C`, which keeps the coordinates that are largest in
    absolute value on that worker (top-k),

    .. math::

        M_i &\leftarrow \mu M_i + (1 - \mu) g_i \\
        R_i &= C(M_i - G_i) \\
        G_i &\leftarrow G_i + R_i, \qquad G \leftarrow G + \frac{1}{k} \sum_i R_i

    and every worker's tensor becomes :math:`G` (or :math:`k G` over ``denom``). With :math:`\mu =
    0` this is EF21, and otherwise EF21-SGDM, whose paper writes :math:`1 - \mu` as :math:`\eta`.
    The error of each :math:`G_i` vanishes when the gradients settle, even if the gradients of the
    workers differ. The error memory of :class:`SparsifiedAggregation` then stays as large as they
    are.

    The first step of a tensor sets :math:`G_i = M_i = g_i` by one all-reduce of the whole tensor.
    EF21 itself starts with :math:`G_i = C(g_i)`, without this message. According to the authors'
    later paper (arXiv:2110.03294), the start may be arbitrary. Their code for the experiments,
    github.com/IgorSokoloff/ef21_experiments_source_code, starts with the whole gradient, as here.

    All state has the shape of the tensor and is at least in float32. A worker keeps :math:`G`,
    :math:`M_i` and the error :math:`e_i = M_i - G_i` in place of :math:`G_i`. In the first step, a
    worker sends the tensors in the dtype of the state, of :math:`b` bytes, in an all-reduce. In
    each later step, it sends :math:`(b + 4) K` bytes, the values and their int32 positions, in one
    all-gather, with :math:`K` the number of coordinates sent of the tensors of one dtype.

    If a value is infinite or nan on one worker, all workers see it in the same step. No worker
    counts what was sent at this coordinate, so :math:`G` stays the average of the :math:`G_i`. A
    worker that starts from a state of another one sets :math:`G_i = M_i = G`.

    Attributes:
        momentum: As given.

    Args:
        model: See :class:`SparsifiedAggregation`.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        size: Share of the coordinates of each tensor that is sent (a float, at most 1.0; at least
            one coordinate is sent), or their number (an integer).
        momentum: :math:`\mu`, from 0 to less than 1.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: A number has the wrong type.

    Example:
        >>> aggregation = EF21Aggregation(None, size=1, momentum=0)
        >>> for values in ([1.0, -3.0, 2.0], [2.0, -3.0, 4.0]):
        ...     gradient = torch.tensor(values)
        ...     aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([ 1., -3.,  4.]), tensor([1., 0., 0.]))

    References:
        Richtárik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and Practically
        Faster Error Feedback. arXiv:2106.05203

        Fatkhullin, Tyurin, Richtárik: Momentum Provably Improves Error Feedback! arXiv:2305.15155
    """

    _named_state = ("memory", "momentum", "estimates")
    # All workers compute the same G.
    _own_state = ("memory", "momentum")

    def __init__(
        self,
        model: nn.Module | None,
        use_cuda: bool = False,
        *,
        size: int | float = 0.1,
        momentum: float = 0.9,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            model, use_cuda, size=size, world_size=world_size, process_group=process_group
        )
        check_finite_at_least_0("momentum", momentum)
        if momentum >= 1:
            raise ValueError(f"momentum must be below 1, not {momentum}: gradients would not count")
        self.momentum = momentum
        self._momentum: dict[str, Tensor] = {}
        self._estimates: dict[str, Tensor] = {}

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        # The state does not depend on the denominator, which may vary.
        scale: float | Tensor
        if isinstance(divisor, Tensor):
            scale = self.world_size / divisor.double().to(next(iter(tensors.values())).device)
        else:
            scale = self.world_size / divisor
        # All workers have estimates of the same tensors.
        new = {name: tensor for name, tensor in tensors.items() if name not in self._estimates}
        if new:
            self._start(new, divisor, scale, extra)
            extra = ()
        changes = {}
        for name, tensor in tensors.items():
            if name not in new:
                changes[name] = self._change(name, tensor)
        if changes:
            self._compress(changes, divisor, extra)
        for name, change in changes.items():
            G = recall(self._estimates, name, change)
            tensors[name].copy_((G + change).mul_(scale))
            G.add_(change.nan_to_num_(nan=0, posinf=0, neginf=0))

    def _compress(
        self, changes: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        """Add changes to e_i, and replace them by the average of what the workers send of it."""
        super()._aggregate_kind(changes, divisor, extra)

    def _start(
        self,
        tensors: Mapping[str, Tensor],
        divisor: Denominator,
        scale: float | Tensor,
        extra: Sequence[Tensor],
    ) -> None:
        """Set G_i = M_i = g_i and G to their average, and the tensors to the result."""
        for name, tensor in tensors.items():
            # The average is in the dtype of the state, or it would differ from that of the G_i.
            recall(self._momentum, name, tensor).copy_(tensor)
            self._estimates[name] = self._momentum[name].clone()
        averages = [self._estimates[name] for name in tensors]
        self._average_uncompressed([*averages, *extra], divisor)
        for (name, tensor), G in zip(tensors.items(), averages, strict=True):
            tensor.copy_(G)
            lost = ~G.div_(scale).isfinite()
            for state in (G, self._momentum[name]):
                state.masked_fill_(lost, 0)

    def _change(self, name: str, tensor: Tensor) -> Tensor:
        """Update M_i, and return its change, which the caller adds to e_i."""
        G = self._estimates[name]
        # A shared state has the estimates alone, because the momentum belongs to a worker.
        if name not in self._momentum:
            self._momentum[name] = G.clone()
        m, e = recall(self._momentum, name, tensor), recall(self._memory, name, tensor)
        change = torch.sub(tensor, m).mul_(1 - self.momentum)
        # If the message is not finite, e_i becomes 0. G_i = M_i - e_i must stay as it is.
        m.add_(torch.where((e + change).isfinite(), change, -e))
        return change

    def _add_up(
        self,
        name: str,
        tensor: Tensor,
        of_workers: Sequence[tuple[Tensor, Tensor]],
        divisor: Denominator,
    ) -> None:
        super()._add_up(name, tensor, of_workers, self.world_size)
        # The result is G and not this sum, so all of its coordinates may change.
        self._changed.pop(name, None)
        # Return what other workers cannot count to e_i.
        values, coordinates = of_workers[process_groups.rank(self.group)]
        average = tensor.reshape(-1).index_select(0, coordinates)
        returned = torch.where(values.isfinite() & ~average.isfinite(), values, 0)
        self._memory[name].view(-1).index_add_(0, coordinates, returned)

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return the errors, the momentum and the estimates."""
        return [self._memory, self._momentum, self._estimates]

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name; an empty dictionary before the first step.

        The keys are ``"memory"`` (:math:`e_i`), ``"momentum"`` (:math:`M_i`) and ``"estimates"``
        (:math:`G`).
        """
        if not self._estimates:
            return {}
        return dict(zip(self._named_state, map(dict, self._remembered_by_name()), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts with an all-reduce.

        Raises:
            ValueError: The state is that of another aggregation or another model.
        """
        if state_dict:
            check_keys(self, state_dict, self._named_state)
        super().load_state_dict({"memory": state_dict.get("memory", {})})
        self._momentum = copies_by_plain_name(state_dict.get("momentum", {}))
        self._estimates = copies_by_plain_name(state_dict.get("estimates", {}))
