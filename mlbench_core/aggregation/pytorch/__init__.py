"""Aggregation of PyTorch tensors."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.centralized import (
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
    EFSignAggregation,
    PowerAggregation,
    SignAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.aggregation.pytorch.compression.arc_top_k import ARCTopKAggregation
from mlbench_core.aggregation.pytorch.compression.demo import DeMoAggregation
from mlbench_core.aggregation.pytorch.compression.dion import DionAggregation
from mlbench_core.aggregation.pytorch.compression.ef21 import EF21Aggregation
from mlbench_core.aggregation.pytorch.compression.one_bit import OneBitAggregation
from mlbench_core.aggregation.pytorch.compression.qsgd import QSGDAggregation
from mlbench_core.aggregation.pytorch.compression.quantized import QuantizedAllReduceAggregation
from mlbench_core.aggregation.pytorch.consensus import average_weights, consensus_distance
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.hooks.ddp import DDPHookState, as_ddp_hook
from mlbench_core.aggregation.pytorch.hooks.fsdp import FSDPHookState, set_fsdp_hooks
from mlbench_core.aggregation.pytorch.local_steps.des_loc import DESLOCAggregation
from mlbench_core.aggregation.pytorch.local_steps.eager import EagerDiLoCoAggregation
from mlbench_core.aggregation.pytorch.local_steps.no_loco import NoLoCoAggregation
from mlbench_core.aggregation.pytorch.local_steps.penalty import OutlierPenalty
from mlbench_core.aggregation.pytorch.local_steps.periodic import (
    DiLoCoAggregation,
    PeriodicAggregation,
)
from mlbench_core.aggregation.pytorch.local_steps.scaffold import ScaffoldAggregation
from mlbench_core.aggregation.pytorch.local_steps.sparse_loco import (
    ChunkedTopKAggregation,
    SparseLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.local_steps.sparta import SPARTAAggregation
from mlbench_core.aggregation.pytorch.local_steps.streaming import StreamingDiLoCoAggregation
from mlbench_core.aggregation.pytorch.push_sum import PushSumAggregation

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "ARCTopKAggregation",
    "Aggregation",
    "AllReduceAggregation",
    "ChocoAggregation",
    "ChunkedTopKAggregation",
    "DDPHookState",
    "DESLOCAggregation",
    "DeMoAggregation",
    "DecentralizedAggregation",
    "DiLoCoAggregation",
    "DionAggregation",
    "EF21Aggregation",
    "EFSignAggregation",
    "EagerDiLoCoAggregation",
    "FSDPHookState",
    "NoLoCoAggregation",
    "OneBitAggregation",
    "OutlierPenalty",
    "PeriodicAggregation",
    "PowerAggregation",
    "PushSumAggregation",
    "QSGDAggregation",
    "QuantizedAllReduceAggregation",
    "SPARTAAggregation",
    "ScaffoldAggregation",
    "SignAggregation",
    "SparseLoCoAggregation",
    "SparsifiedAggregation",
    "StreamingDiLoCoAggregation",
    "as_ddp_hook",
    "average_weights",
    "consensus_distance",
    "set_fsdp_hooks",
]
