"""SGD whose workers average weights with a few others (D-PSGD, SGP)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, UnknownOperationError
from mlbench_core.aggregation.pytorch.all_reduce import check_world_size
from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.aggregation.pytorch.consensus import average_weights, consensus_distance
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.push_sum import PushSumAggregation
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["SGP", "DecentralizedSGD", "GossipOptimizer"]


class GossipOptimizer(GenericCentralizedOptimizer):
    """Base of the optimizers that average with a few others; see :class:`DecentralizedSGD`."""

    _kind: ClassVar[type[DecentralizedAggregation] | type[ChocoAggregation]]

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        aggregation: Aggregation | None = None,
    ) -> None:
        if not average_world:
            raise UnknownOperationError(
                f"average_world must be True, not {average_world!r}: neighbors only average"
            )
        if aggregation is None:
            aggregation = self._kind(rank, neighbors, use_cuda=use_cuda)
        else:
            check_aggregation(aggregation, self._kind)
            for name, value in (("rank", rank), ("neighbors", neighbors)):
                if value is not None:
                    raise ValueError(
                        f"{name} must be left out, not {value!r}, because the aggregation has its "
                        f"own: write it in {self._kind.__name__}(...)"
                    )
        make = make_sgd(type(self).__name__, lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(
            None,
            model,
            use_cuda,
            by_layer,
            agg_grad=False,
            optimizer=make,
            aggregation=aggregation,
        )

    def consensus_distance(self) -> float:
        """Measure how far the workers are apart; every worker must call it.

        See :func:`~mlbench_core.aggregation.pytorch.consensus.consensus_distance`.
        """
        return consensus_distance(self.model, self.aggregation.group)

    def average_weights(self, tracker: Any = None) -> None:
        """Give every worker the average of all workers' weights, for example to evaluate.

        Every worker must call it.

        Args:
            tracker: See :func:`~mlbench_core.aggregation.pytorch.consensus.average_weights`.
        """
        average_weights(self.model, self.aggregation.group, tracker)


class DecentralizedSGD(GossipOptimizer):
    r"""Stochastic gradient descent on every worker, then an average with the neighbors (D-PSGD).

    With :math:`g_i` the gradient of worker :math:`i`, :math:`\eta` the learning rate and :math:`W`
    the mixing matrix,

    .. math:: x_i \leftarrow \sum_j W_{ij} (x_j - \eta g_j).

    The average over workers takes the step of one worker with the average gradient. The distance of
    each worker to this average is of order :math:`\eta / (1 - |\lambda_2(W)|)`. Each worker has its
    own momentum. See
    :class:`~mlbench_core.aggregation.pytorch.decentralized.DecentralizedAggregation` for the
    weights and the bytes.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks of this worker's neighbors. None if the worker is alone, or ``aggregation``
            is given.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        average_world: Must be True: neighbors only average.
        aggregation: The exchange with all its settings, instead of ``rank`` and ``neighbors``, for
            example ``DecentralizedAggregation(topology=ring(4))`` for the whole graph.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model``, ``lr`` or, with several workers, ``neighbors`` is missing; ``rank``
            is not this process's; ``neighbors`` has a rank that is not there; or they are given
            with ``aggregation``.
        TypeError: The aggregation is of another class.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DecentralizedSGD(rank=0, neighbors=[], model=model, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consensus_distance()
        0.0

    References:
        X. Lian, C. Zhang, H. Zhang, C. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms
        Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic
        Gradient Descent. arXiv:1705.09056
    """

    _kind = DecentralizedAggregation


class SGP(GossipOptimizer):
    r"""SGD on every worker, then half of its weights to one other (stochastic gradient push).

    Worker :math:`i` has a sum :math:`x_i` and a push-sum weight :math:`w_i`. With :math:`g_i` the
    gradient at :math:`z_i = x_i / w_i`, which the model holds, :math:`\eta` the learning rate and
    :math:`p_i(t)` the worker to which it sends in step :math:`t`,

    .. math::

        x_i &\leftarrow x_i - \eta g_i(z_i) \\
        x_i &\leftarrow \frac{1}{2} \Bigl( x_i + \sum_{j: p_j(t) = i} x_j \Bigr), \qquad
        w_i \leftarrow \frac{1}{2} \Bigl( w_i + \sum_{j: p_j(t) = i} w_j \Bigr), \qquad
        z_i \leftarrow x_i / w_i.

    By default all :math:`w_i` stay 1, so the average of the workers takes the step of one worker
    with the average gradient. Each worker has its own momentum, which is never sent. The
    authors' code has learning rate 0.1, momentum 0.9 and weight decay 0.0001. See
    :class:`~mlbench_core.aggregation.pytorch.push_sum.PushSumAggregation` for the peers and the
    bytes.

    Args:
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        aggregation: The exchange with all its settings, for example other ``peers``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, or ``world_size`` is not that of the process
            group.
        TypeError: The aggregation is of another class.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SGP(model=model, lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.aggregation.weight
        1.0

    References:
        M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep
        Learning. arXiv:1811.10792
    """

    _kind = PushSumAggregation

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        aggregation: PushSumAggregation | None = None,
    ) -> None:
        if aggregation is None:
            check_world_size(world_size)
            aggregation = PushSumAggregation(use_cuda=use_cuda)
        check_aggregation(aggregation, PushSumAggregation, world_size=world_size)
        super().__init__(
            model=model,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            use_cuda=use_cuda,
            by_layer=by_layer,
            aggregation=aggregation,
        )
