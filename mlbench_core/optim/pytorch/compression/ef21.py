"""SGD along an estimate of the average gradient from compressed changes (EF21, EF21-SGDM)."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.ef21 import EF21Aggregation
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["EF21"]


class EF21(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on compressed changes of momentum (EF21-SGDM), or EF21.

    With the estimate :math:`G` of
    :class:`~mlbench_core.aggregation.pytorch.compression.ef21.EF21Aggregation`, every worker takes
    the step

    .. math:: x \leftarrow x - \text{lr} \cdot G.

    Momentum acts before the compression. It is an average, as in Adam: for the same length of
    steps, the learning rate is :math:`1 / (1 - \text{momentum})` times that of
    :class:`torch.optim.SGD`. The paper takes a step with the last estimate before it computes the
    next gradient, which gives the same sequence of weights.

    Give ``EF21Aggregation`` to another optimizer for other steps along :math:`G`. With
    :class:`~mlbench_core.optim.pytorch.updates.muon.MuonAdamW` without momentum, it is EF21-Muon
    (arXiv:2510.00643), without the compression of weights on their way back to the workers.

    Args:
        world_size: Number of workers; None takes that of the process group.
        lr: Learning rate.
        momentum: Momentum factor before the compression, from 0 (EF21) to less than 1; None for
            0.9.
        weight_decay: L2 penalty; it acts after the compression.
        size: Share of the coordinates of each tensor that is sent (a float), or their number (an
            integer); None for 0.1.
        aggregation: The compression with all its settings, instead of ``momentum`` and ``size``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group,
            a number is out of range, or an argument contradicts the aggregation.
        TypeError: The aggregation is not an
            :class:`~mlbench_core.aggregation.pytorch.compression.ef21.EF21Aggregation`.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 6)
        >>> optimizer = EF21(model=model, lr=1.0)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()

    References:
        Richtárik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and Practically
        Faster Error Feedback. arXiv:2106.05203

        Fatkhullin, Tyurin, Richtárik: Momentum Provably Improves Error Feedback! arXiv:2305.15155
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float | None = None,
        weight_decay: float = 0,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        size: int | float | None = None,
        aggregation: EF21Aggregation | None = None,
    ) -> None:
        if aggregation is None:
            # None, and not a default value, shows the check below that an argument was left out.
            sent_share: int | float = 0.1
            if size is not None:
                sent_share = size
            factor = 0.9
            if momentum is not None:
                factor = momentum
            aggregation = EF21Aggregation(
                model, use_cuda, size=sent_share, momentum=factor, world_size=world_size
            )
        check_aggregation(
            aggregation, EF21Aggregation, world_size=world_size, momentum=momentum, size=size
        )
        # SGD without momentum, which has acted already.
        make = make_sgd("EF21", lr, 0, 0, weight_decay, nesterov=False)
        super().__init__(
            world_size, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation
        )
