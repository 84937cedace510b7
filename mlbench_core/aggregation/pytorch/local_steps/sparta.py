"""Average a few weights after each step, drawn at random and the same on all workers (SPARTA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import (
    coordinates_sent,
    draw_coordinates,
)
from mlbench_core.aggregation.pytorch.decentralized import check_average, refuse_gradients
from mlbench_core.aggregation.pytorch.transport.messages import by_dtype_and_device
from mlbench_core.aggregation.pytorch.transport.names import check_keys
from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["SPARTAAggregation"]


class SPARTAAggregation(Aggregation):
    r"""Average a random share of the weights; all others stay as they are.

    A call draws the positions of :math:`s = \max(1, \operatorname{round}(p d))` of the :math:`d`
    weights of a dtype, every set of them with the same probability, and the same on all workers. In
    these positions, every worker's weight becomes the average of the :math:`k` workers:

    .. math:: x_{i,j} \leftarrow \frac{1}{k} \sum_{l=1}^{k} x_{l,j} \quad \text{for the drawn } j.

    So the average of the workers stays the same, and without training the squared distances of the
    workers from it fall on average by the factor :math:`1 - s / d` in each call. The workers'
    weights are never all equal: average them before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`. Floating-point buffers
    count as weights.

    A call sends :math:`b s` bytes for weights of :math:`b` bytes in one all-reduce, without
    positions. The code of ExoGym broadcasts a mask of :math:`d` bytes in addition, and draws the
    number of positions, too. The only state is that of the random generator. A single worker does
    nothing.

    Attributes:
        share: :math:`p`.

    Args:
        world_size: Number of workers; None takes that of the process group.
        share: :math:`p`, above 0 and at most 1.
        seed: Seed of the generator that draws the positions; the same on all workers.
        process_group: See
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`.

    Raises:
        TypeError: A number has the wrong type.
        ValueError: A number is out of range, or ``world_size`` is not the number of workers in the
            process group.

    Example:
        >>> SPARTAAggregation(share=0.01).share
        0.01

    References:
        SPARTA in ExoGym: github.com/exo-explore/gym, exogym/strategy/sparta.py
    """

    def __init__(
        self,
        world_size: int | None = None,
        *,
        share: float = 0.005,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(process_group=process_group)
        self._all_reduce = AllReduceAggregation(world_size, process_group=process_group)
        check_finite_at_least_0("share", share)
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share}")
        self.share = float(share)
        self._generator = torch.Generator().manual_seed(check_int("seed", seed, least=0))

    # A worker would step with gradients that are averaged in a few places only.
    agg_grad = refuse_gradients

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Average the weights in positions that are drawn for this call, in place.

        Args:
            tensors: By name, in the same order with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
        """
        check_average(op)
        if self.world_size == 1:
            return
        drawn: list[tuple[Tensor, Tensor]] = []
        for kind in by_dtype_and_device(tensors.values()):
            drawn += self._draw(kind)
        sent = {}
        for i, (tensor, positions) in enumerate(drawn):
            # An all-reduce needs an order and no names.
            sent[str(i)] = tensor.reshape(-1).index_select(0, positions)
        self._delegate(self._all_reduce, sent, op)
        for (tensor, positions), average in zip(drawn, sent.values(), strict=True):
            flat = tensor.reshape(-1)
            flat.index_copy_(0, positions, average)
            # The flat tensor is a copy if the numbers are not in their logical order in memory.
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _draw(self, kind: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors of one dtype and device of which positions were drawn, with these."""
        ends = torch.tensor([tensor.numel() for tensor in kind]).cumsum(0)
        d = int(ends[-1])
        if d == 0:
            return []
        drawn = draw_coordinates(d, coordinates_sent(self.share, d), self._generator)
        # Sorted, so that the positions in each tensor follow each other.
        drawn = drawn.sort().values
        counts = torch.searchsorted(drawn, ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        result = []
        for tensor, end, own in zip(kind, ends, drawn.split(counts.tolist()), strict=True):
            if len(own):
                # The drawn positions count through all tensors, these through one.
                result.append((tensor, (own - end + tensor.numel()).to(tensor.device)))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator under ``"generator"``."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state keeps the generator.

        Raises:
            ValueError: It is another aggregation's state.
        """
        if state_dict:
            check_keys(self, state_dict, ("generator",))
            self._generator.set_state(state_dict["generator"].cpu())
