"""How far workers are apart, and how to make them one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import trainable
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation
from mlbench_core.utils.pytorch import distributed

__all__ = ["average_weights", "consensus_distance"]


@torch.no_grad()
def consensus_distance(model: nn.Module | Mapping[str, Tensor]) -> float:
    r"""Measure how far the workers' weights are from their average.

    .. math:: \sqrt{\frac{1}{k} \sum_{i=1}^{k} \|x_i - \bar x\|^2}, \qquad \bar x = \frac{1}{k} \sum_{i=1}^{k} x_i.

    Every worker must call it; the weights stay as they are. It sends as much as one average of the weights, in
    float64.

    Args:
        model: The model, or a mapping from names to parameters; those that require a gradient count.

    Returns:
        The distance, the same on every worker; 0 in a world of one.

    Example:
        >>> consensus_distance(nn.Linear(2, 1))
        0.0
    """
    weights = {name: weight.detach().to(torch.float64) for name, weight in trainable(model)}
    average = {name: weight.clone() for name, weight in weights.items()}
    AllReduceAggregation(None).aggregate(average, AVG_WORLD)
    squared = sum(float((weights[name] - average[name]).square().sum()) for name in weights)
    return float(distributed.global_average(squared, 1).sqrt())


def average_weights(model: nn.Module) -> None:
    """Replace the weights and floating-point buffers of every worker by their average, for example to evaluate.

    Every worker must call it.

    Args:
        model: The model.

    Example:
        >>> average_weights(nn.Linear(2, 1))
    """
    AllReduceAggregation(None).agg_model()(model, AVG_WORLD)
