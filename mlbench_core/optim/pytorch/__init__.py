"""Optimizers for PyTorch, by class and by name."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from mlbench_core.optim.pytorch.centralized import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
)

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CustomCentralizedOptimizer",
    "GenericCentralizedOptimizer",
    "get_optimizer",
    "optimizers",
]

optimizers: dict[str, type[Optimizer]] = {
    "centralized_adam": CentralizedAdam,
    "centralized_sgd": CentralizedSGD,
}
"""The optimizers that have a name."""


def get_optimizer(optimizer: str, **kwargs: Any) -> Optimizer:
    """Make an optimizer by name.

    Args:
        optimizer: A key of :data:`optimizers`.
        **kwargs: The optimizer's arguments.

    Returns:
        The optimizer.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> type(get_optimizer("centralized_sgd", model=model, lr=0.1)).__name__
        'CentralizedSGD'
    """
    if optimizer not in optimizers:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(sorted(optimizers))}")
    return optimizers[optimizer](**kwargs)
