"""Average momentum with one bit per coordinate, and error feedback on both sides (1-bit Adam)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.compression.compressed import recall
from mlbench_core.aggregation.pytorch.compression.sign import (
    EFSignAggregation,
    mean_in_range,
    scaled_signs,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    check_keys,
    copies_by_plain_name,
    counts_by_plain_name,
)
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["OneBitAggregation"]


class OneBitAggregation(EFSignAggregation):
    r"""Turn gradients into a common momentum that is averaged with one bit per coordinate.

    In its first steps (the warm-up), a tensor becomes the plain average :math:`g` of the workers'
    gradients :math:`g_i`, and the momentum :math:`m` follows it: :math:`m \leftarrow \beta m + (1 -
    \beta) g`. In all later steps, with the scaled signs :math:`C(p) = \frac{\lVert p \rVert_1}{d}
    \operatorname{sign}(p)` of a tensor of :math:`d` coordinates, and the error memories :math:`e_i`
    of worker :math:`i` of :math:`k` and :math:`\delta` of the average,

    .. math::

        p_i &= \beta m + (1 - \beta) g_i + e_i, & e_i &\leftarrow p_i - C(p_i) \\
        p &= \frac{1}{k} \sum_i C(p_i) + \delta, & \delta &\leftarrow p - C(p) \\
        m &\leftarrow C(p)

    and the tensor becomes :math:`m`. With ``denom`` instead of :math:`k`, the sum of gradients is
    divided by it. The sign of zero is 1. If a value is infinite or nan on one worker, the tensor
    has values that are not finite on all workers. They are not remembered, neither in the errors
    nor in :math:`m`.

    Implementations differ. Some give each worker a part of the coordinates to average, and send
    :math:`C(p)` in a second message. Here every worker computes :math:`p`, :math:`\delta` and
    :math:`C(p)` itself, in the same bits, from one all-gather. So a worker sends :math:`\lceil d /
    8 \rceil` bytes for the :math:`d` coordinates of one dtype and 4 bytes for each tensor (8 for
    float64) in each step after the warm-up, and the bytes of the tensors before.

    Attributes:
        beta: As given.
        warmup_steps: As given.

    Args:
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.
        beta: :math:`\beta`, from 0 to less than 1.
        warmup_steps: Number of first steps of each tensor in which it is averaged uncompressed.
        world_size: Number of workers; None takes that of the process group.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.
        TypeError: ``warmup_steps`` is not an integer, or ``beta`` is not a number.

    Example:
        >>> import torch
        >>> aggregation = OneBitAggregation(beta=0.5, warmup_steps=0)
        >>> gradient = torch.tensor([6.0, -2.0])
        >>> aggregation.aggregate({"weight": gradient}, "avg_world")
        >>> gradient, aggregation.memory("weight")
        (tensor([ 2., -2.]), tensor([1., 1.]))

    References:
        Tang et al.: 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
        Convergence Speed. arXiv:2102.02888
    """

    averages_gradients = False

    _named_state = ("errors", "average_errors", "momentum", "steps")
    # Only the errors of the workers differ. All compute the same average,
    # and so the same error of it.
    _own_state = ("errors",)

    def __init__(
        self,
        use_cuda: bool = False,
        *,
        beta: float = 0.9,
        warmup_steps: int = 100,
        world_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, world_size=world_size, process_group=process_group)
        check_finite_at_least_0("beta", beta)
        if beta >= 1:
            raise ValueError(f"beta must be below 1, not {beta}: gradients would not count")
        self.beta = beta
        self.warmup_steps = check_int("warmup_steps", warmup_steps, least=0)
        self._average_errors: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}

    def momentum(self, name: str) -> Tensor:
        """Return the momentum of a tensor, the same on all workers; not to be changed.

        Args:
            name: The tensor's name.
        """
        return self._momentum[name]

    def steps(self, name: str) -> int:
        """Return the number of steps that a tensor has taken, warm-up included.

        Args:
            name: The tensor's name.
        """
        return self._steps.get(name, 0)

    def _aggregate_kind(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        for name in tensors:
            self._steps[name] = self.steps(name) + 1
        warming = {}
        for name, tensor in tensors.items():
            if self.steps(name) <= self.warmup_steps:
                warming[name] = tensor
        if warming:
            self._average_uncompressed([*warming.values(), *extra], divisor)
            extra = ()
        for name, tensor in warming.items():
            m = recall(self._momentum, name, tensor)
            # m = beta m + (1 - beta) g
            m.lerp_(tensor.to(m.dtype), 1 - self.beta).nan_to_num_(nan=0, posinf=0, neginf=0)
        # In the order of the tensors, which is the same on all workers.
        candidates = {}
        for name, tensor in tensors.items():
            if name in warming:
                continue
            m = recall(self._momentum, name, tensor)
            # The sum over workers is divided by the divisor, but each of
            # the k workers has the whole m.
            factor = divisor
            if isinstance(divisor, Tensor):
                factor = divisor.to(m)
            shared = m * factor / self.world_size
            candidates[name] = shared.lerp_(tensor.to(m.dtype), 1 - self.beta)
        if candidates:
            self._compress(candidates, divisor, extra)
        for name, average in candidates.items():
            tensors[name].copy_(average)
            self._momentum[name].copy_(average.nan_to_num_(nan=0, posinf=0, neginf=0))

    def _compress(
        self, tensors: Mapping[str, Tensor], divisor: Denominator, extra: Sequence[Tensor]
    ) -> None:
        """Replace tensors by their compressed average, in place."""
        super()._aggregate_kind(tensors, divisor, extra)
        for name, average in tensors.items():
            # p = average of C(p_i) + delta, in the memory of delta, which then keeps p - C(p).
            p = recall(self._average_errors, name, average).add_(average)
            average.copy_(scaled_signs(p >= 0, mean_in_range(p.abs().mean(), p)))
            p.sub_(average).nan_to_num_(nan=0, posinf=0, neginf=0)

    def _remembered_by_name(self) -> list[dict[str, Any]]:
        """Return both error memories, the momentum and the counts of steps."""
        return [self._memory, self._average_errors, self._momentum, self._steps]

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name; an empty dictionary before the first step.

        The keys are ``"errors"``, ``"average_errors"``, ``"momentum"`` and ``"steps"``.
        """
        if not self._steps:
            return {}
        return dict(zip(self._named_state, map(dict, self._remembered_by_name()), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: The state is that of another aggregation.
        """
        if state_dict:
            check_keys(self, state_dict, self._named_state)
        self._memory = copies_by_plain_name(state_dict.get("errors", {}))
        self._average_errors = copies_by_plain_name(state_dict.get("average_errors", {}))
        self._momentum = copies_by_plain_name(state_dict.get("momentum", {}))
        self._steps = counts_by_plain_name(state_dict.get("steps", {}))
