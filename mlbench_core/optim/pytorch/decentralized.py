"""Optimizers whose workers average their weights with a few neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import UnknownOperationError
from mlbench_core.aggregation.pytorch.choco import ChocoAggregation, Compression
from mlbench_core.aggregation.pytorch.consensus import average_weights, consensus_distance
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.topology import Topology
from mlbench_core.optim.pytorch.generic import GenericCentralizedOptimizer, check_lr

__all__ = ["ChocoSGD", "DecentralizedSGD"]


class GossipOptimizer(GenericCentralizedOptimizer):
    """Base of the optimizers whose workers have similar, but not equal weights."""

    def consensus_distance(self) -> float:
        """Measure how far the workers are apart; every worker must call it.

        See :func:`~mlbench_core.aggregation.pytorch.consensus.consensus_distance`.
        """
        return consensus_distance(self.model, self.aggregation.group)

    def average_weights(self) -> None:
        """Give every worker the average of all workers' weights, for example to evaluate; every worker must call it."""
        average_weights(self.model, self.aggregation.group)


class DecentralizedSGD(GossipOptimizer):
    r"""Stochastic gradient descent on every worker, then an average with the neighbors (D-PSGD).

    With :math:`g_i` the gradient of worker :math:`i`, :math:`\eta` the learning rate and :math:`W` the mixing matrix,

    .. math:: x_i \leftarrow \sum_j W_{ij} (x_j - \eta g_j).

    The average over workers takes the step of one worker with the average gradient. The distance of each worker to this
    average is of order :math:`\eta / (1 - |\lambda_2(W)|)`. Each worker has its own momentum. See
    :class:`~mlbench_core.aggregation.pytorch.decentralized.DecentralizedAggregation` for the weights and the bytes.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks of this worker's neighbors. None if ``topology`` is given or the worker is alone.
        model: The model.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        average_world: Must be True: neighbors only average.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        topology: The whole graph, instead of ``neighbors``.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model``, ``lr`` or, with several workers, ``neighbors`` is missing; ``rank`` is not this
            process's; or ``neighbors`` has a rank that is not there.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DecentralizedSGD(rank=0, neighbors=[], model=model, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consensus_distance()
        0.0

    References:
        X. Lian, C. Zhang, H. Zhang, C. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms Outperform Centralized
        Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent. arXiv:1705.09056
    """

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
        topology: Topology | None = None,
        process_group: Any = None,
    ) -> None:
        _check_average(average_world)
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=_sgd(type(self).__name__, lr, momentum, dampening, weight_decay, nesterov),
            aggregation=DecentralizedAggregation(
                rank, neighbors, use_cuda=use_cuda, topology=topology, process_group=process_group
            ),
        )


class ChocoSGD(GossipOptimizer):
    r"""Stochastic gradient descent on every worker, then an average with the neighbors by compressed differences.

    With :math:`x_i` the weights after the local step, public copies :math:`\hat x_i`, a compression :math:`Q`, the
    mixing matrix :math:`W` and the consensus step size :math:`\gamma`,

    .. math::

        q_i &= Q(x_i - \hat x_i) \\
        \hat x_j &\leftarrow \hat x_j + q_j \\
        x_i &\leftarrow x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i).

    Each worker has its own momentum. See :class:`~mlbench_core.aggregation.pytorch.choco.ChocoAggregation` for the
    compressions and the bytes.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks of this worker's neighbors. None if ``topology`` is given or the worker is alone.
        model: The model.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        average_world: Must be True: neighbors only average.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        topology: The whole graph, instead of ``neighbors``.
        compression: ``"top_k"``, ``"random_k"``, ``"sign"``, ``"identity"`` or a
            :class:`~mlbench_core.aggregation.pytorch.choco.Compression`.
        ratio: Share of the entries that ``top_k`` and ``random_k`` keep, in (0, 1].
        gamma: Consensus step size in (0, 1]: the stronger the compression, the smaller.
        seed: For ``random_k``; the same on every worker.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: As in :class:`DecentralizedSGD`, or ``compression``, ``ratio`` or ``gamma`` is not allowed.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = ChocoSGD(rank=0, neighbors=[], model=model, lr=0.1, compression="sign", gamma=0.4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        A. Koloskova, S. Stich, M. Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication. arXiv:1902.00340
        A. Koloskova, T. Lin, S. Stich, M. Jaggi: Decentralized Deep Learning with Arbitrary Communication Compression.
        arXiv:1907.09356
    """

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
        topology: Topology | None = None,
        compression: str | Compression = "top_k",
        ratio: float = 0.1,
        gamma: float = 0.2,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        _check_average(average_world)
        aggregation = ChocoAggregation(
            rank,
            neighbors,
            use_cuda=use_cuda,
            topology=topology,
            compression=compression,
            ratio=ratio,
            gamma=gamma,
            seed=seed,
            process_group=process_group,
        )
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=_sgd(type(self).__name__, lr, momentum, dampening, weight_decay, nesterov),
            aggregation=aggregation,
        )


def _check_average(average_world: bool) -> None:
    if not average_world:
        raise UnknownOperationError(f"average_world must be True, not {average_world!r}: neighbours only average")


def _sgd(
    name: str, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
) -> Callable[[Iterable[Tensor]], Optimizer]:
    """Return a function that makes every worker's own optimizer."""
    return partial(
        SGD,
        lr=check_lr(lr, name),
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )
