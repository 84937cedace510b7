"""Training and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode"]


@contextmanager
def evaluation_mode(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Switch a model to evaluation mode, and restore the mode of every module afterwards.

    It is restored also after an exception.

    Args:
        model: The model.
        wanted: If False, no mode is changed.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluation_mode(model):
        ...     [module.training for module in model]
        [False, False]
        >>> [module.training for module in model]
        [True, False]
    """
    if not wanted:
        yield
        return
    # One flag per module: ``model.train()`` would also switch modules that were in evaluation mode
    # before.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
