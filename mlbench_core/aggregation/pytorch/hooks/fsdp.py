"""Aggregations between the replicas of a model that torch's FSDP2 shards (hybrid sharding).

The workers of a replica share its weights: ``fully_shard`` gives each worker a shard of every
module, and sums their gradients by a reduce-scatter. Workers that hold the same shard in different
replicas then aggregate it by the hook ``FSDPModule.set_all_reduce_hook``::

    backward pass of a module -> reduce-scatter in the replica -> hook: aggregate between replicas

The hook receives the shards of all parameters of a module as one flat tensor, without the shapes of
the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import AVG_WORLD, Aggregation
from mlbench_core.aggregation.pytorch.compression.dion import DionAggregation
from mlbench_core.aggregation.pytorch.compression.power import PowerAggregation
from mlbench_core.aggregation.pytorch.hooks.ddp import check_combines_gradients
from mlbench_core.aggregation.pytorch.transport.names import by_plain_name, check_names, plain_name
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers

__all__ = ["FSDPHookState", "set_fsdp_hooks"]

_ROOT = "root"  # the name of the whole model, which has none


class FSDPHookState:
    """The state of the hooks of a model; :func:`set_fsdp_hooks` makes it.

    Attributes:
        aggregation: The aggregation. It counts the bytes (``bytes_sent``) and has the error
            memories.

    Args:
        aggregation: See :func:`set_fsdp_hooks`.
        names: Names of the modules that have a hook.
        parameters: All parameters of the model, by name.
    """

    def __init__(
        self, aggregation: Aggregation, names: frozenset[str], parameters: Mapping[str, Tensor]
    ) -> None:
        self.aggregation = aggregation
        self._names = names
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        """Return the aggregation's state by module name; each worker must save and load its own."""
        return self.aggregation.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, with the same modules and number of shards.

        Raises:
            ValueError: The state is that of another aggregation or other modules.
        """
        check_names(self.aggregation.remembered_names(state_dict), self._names)
        self.aggregation.load_state_dict(state_dict)

    @torch.no_grad()
    @naming_lost_workers()
    def _aggregate(self, name: str, shard: Tensor) -> None:
        """Aggregate the flat shard of a module, in place."""
        self.aggregation.last_bytes = 0
        self.aggregation.compare_models(self._parameters)
        self._parameters = {}  # once is enough
        self.aggregation.aggregate({name: shard}, AVG_WORLD)


def set_fsdp_hooks(aggregation: Aggregation, fsdp_model: nn.Module) -> FSDPHookState:
    """Aggregate gradients between the replicas of a model that FSDP2 shards.

    Shard the model within each replica, and give the aggregation the workers that hold the same
    shard::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replica", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        aggregation = EFSignAggregation(process_group=mesh["replica"].get_group())
        state = set_fsdp_hooks(aggregation, model)

    Nothing else of the script changes. All replicas must start from the same weights, for example
    by the same seed, because FSDP2 copies no weights between meshes.

    Each module that was passed to ``fully_shard`` sends separate messages, as soon as its
    gradients are complete. The shards of its parameters are one flat tensor for the aggregation:
    EF-sign has one scale for it, and top-k selects from all of it. Aggregations that need matrices
    cannot be used (PowerAggregation, DionAggregation), nor can those that combine weights.

    If FSDP2 divides gradients after the reduce-scatter, as it does in float16 and with
    ``set_force_sum_reduction_for_comms(True)``, it also divides the results of SignAggregation. All
    others scale with the gradients.

    To resume exactly, save ``state.state_dict()`` on every worker, besides the shards of weights
    and optimizer. Every parameter must get a gradient in each backward pass that FSDP2 reduces.

    Args:
        aggregation: An aggregation of the workers that hold the same shard.
        fsdp_model: A model on which ``fully_shard`` was called, with a mesh of one dimension.

    Returns:
        The state of the hooks.

    Raises:
        TypeError: ``aggregation`` is not an aggregation, or a parameter is complex.
        ValueError: ``aggregation`` combines weights or needs matrices, contains another worker of
            this replica, or ``fsdp_model`` has no sharded module or a mesh of two dimensions.

    References:
        Zhao et al.: PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
        arXiv:2304.11277
    """
    # The import takes long, and only users of FSDP2 need it.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    check_combines_gradients(aggregation)
    if isinstance(aggregation, (PowerAggregation, DionAggregation)):
        raise ValueError(
            "aggregation must work on flat tensors, not on matrices as "
            f"{type(aggregation).__name__} does: FSDP2 gives "
            "a hook one flat shard for several parameters"
        )
    modules: dict[str, FSDPModule] = {}
    for name, module in fsdp_model.named_modules():
        if isinstance(module, FSDPModule):
            modules[plain_name(name) or _ROOT] = module
    if not modules:
        raise ValueError(
            f"fsdp_model must have a module sharded by FSDP2, but {type(fsdp_model).__name__} has "
            "none: call fully_shard(model, mesh=...) first"
        )
    between = set(dist.get_process_group_ranks(aggregation.group))
    sharded = [p for p in fsdp_model.parameters() if isinstance(p, DTensor)]
    for mesh in {parameter.device_mesh for parameter in sharded}:
        if mesh.ndim != 1:
            raise ValueError(
                "the mesh of fsdp_model must have one dimension, the shards of a "
                f"replica, not {mesh.ndim}: pass mesh['shard'] to fully_shard, because "
                "with two it averages between replicas itself"
            )
        within = set(dist.get_process_group_ranks(mesh.get_group()))
        if within & between != {dist.get_rank()}:
            raise ValueError(
                "process_group of the aggregation must have one worker of each replica, but "
                f"{sorted(between)} and the replica {sorted(within)} share "
                f"{sorted(within & between)}: give mesh['replica'].get_group()"
            )
    parameters = by_plain_name(dict(fsdp_model.named_parameters()))
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise TypeError(
                f"parameter {name!r} must be real, not complex: "
                "FSDP2 does not reduce complex gradients"
            )
    state = FSDPHookState(aggregation, frozenset(modules), parameters)
    for name, sharded_module in modules.items():
        sharded_module.set_all_reduce_hook(partial(state._aggregate, name))
    return state
