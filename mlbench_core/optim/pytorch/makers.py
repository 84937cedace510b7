"""Functions that make an optimizer for a model, for tasks that offer many of them by name.

An aggregation needs the process group of the run, so it cannot be made when a table of optimizers
is written. Each function here takes the settings and returns a function ``(model, lr)``, to be
called once the workers are connected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch import Aggregation
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.distributed.pytorch.process_groups import world_size
from mlbench_core.optim.pytorch import get_optimizer

__all__ = ["Maker", "of_model", "of_parameters", "on_ring"]

Maker: TypeAlias = Callable[[nn.Module, float], Optimizer]
_Exchange: TypeAlias = "Callable[[], Aggregation] | None"


def of_model(name: str, exchange: _Exchange = None, **options: Any) -> Maker:
    """Return a function that makes an optimizer that takes a model.

    Args:
        name: A key of :data:`~mlbench_core.optim.pytorch.optimizers`.
        exchange: Makes the aggregation; None for the optimizer's own.
        options: Other arguments of the optimizer.

    Example:
        >>> make = of_model("local_sgd", period=8)
        >>> type(make(nn.Linear(2, 1), 0.1)).__name__
        'LocalSGD'
    """
    return lambda model, lr: get_optimizer(name, model=model, lr=lr, **options, **_made(exchange))


def of_parameters(name: str, exchange: _Exchange = None, **options: Any) -> Maker:
    """Return a function that makes an optimizer that takes parameters; else as :func:`of_model`."""
    return lambda model, lr: get_optimizer(
        name, params=model.named_parameters(), lr=lr, **options, **_made(exchange)
    )


def on_ring(name: str, exchange: Callable[..., Aggregation], **options: Any) -> Maker:
    """Return a function that makes an optimizer whose workers send to their neighbors on a ring.

    Args:
        name: As in :func:`of_model`.
        exchange: Makes the aggregation, with the argument ``topology``.
        options: Other arguments of the optimizer.
    """
    return lambda model, lr: get_optimizer(
        name, model=model, lr=lr, aggregation=exchange(topology=ring(world_size())), **options
    )


def _made(exchange: _Exchange) -> dict[str, Any]:
    """Return the argument ``aggregation``, made in the process group; nothing for the default."""
    if exchange is None:
        return {}
    return {"aggregation": exchange()}
