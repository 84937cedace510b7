"""SGD on gradients that are averaged in 8 or 4 bits (quantized all-reduce, LoCo)."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.quantized import QuantizedAllReduceAggregation
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["QuantizedSGD"]


class QuantizedSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on gradients that are averaged in 8 or 4 bits.

    Every worker takes the step of :class:`torch.optim.SGD` with the result of
    :class:`~mlbench_core.aggregation.pytorch.compression.quantized.QuantizedAllReduceAggregation`.
    With ``bits=4`` and ``error_decay=0.8``, the communication is that of LoCo.

    Args:
        world_size: Number of workers; None takes that of the process group.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty; it acts after the communication.
        nesterov: Use Nesterov momentum.
        bits: Bits of a number, 8 or 4; None for 8.
        error_decay: Factor of the old error in the error memory, from 0 to less than 1; None for no
            error feedback.
        aggregation: The communication with all its settings, instead of ``bits`` and
            ``error_decay``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group,
            a number is out of range, or an argument contradicts the aggregation.
        TypeError: The aggregation is not a
            :class:`.QuantizedAllReduceAggregation`.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 6)
        >>> optimizer = QuantizedSGD(model=model, lr=0.1, momentum=0.9, bits=4, error_decay=0.8)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()

    References:
        Wang et al.: ZeRO++: Extremely Efficient Collective Communication for Giant Model Training.
        arXiv:2306.10209. Xie, Lin, Toh, Zhou: LoCo: Low-Bit Communication Adaptor for Large-scale
        Model Training. arXiv:2407.04480
    """

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
        bits: int | None = None,
        error_decay: float | None = None,
        aggregation: QuantizedAllReduceAggregation | None = None,
    ) -> None:
        make = make_sgd("QuantizedSGD", lr, momentum, dampening, weight_decay, nesterov)
        if aggregation is None:
            chosen_bits = 8
            if bits is not None:
                chosen_bits = bits
            aggregation = QuantizedAllReduceAggregation(
                use_cuda, bits=chosen_bits, error_decay=error_decay, world_size=world_size
            )
        check_aggregation(
            aggregation,
            QuantizedAllReduceAggregation,
            world_size=world_size,
            bits=bits,
            error_decay=error_decay,
        )
        super().__init__(
            world_size, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation
        )
