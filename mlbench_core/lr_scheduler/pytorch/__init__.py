"""Learning rate schedules."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.lr_scheduler.pytorch import lr
from mlbench_core.lr_scheduler.pytorch.lr import (
    ExponentialWarmupMultiStepLR,
    LRLinearWarmUp,
    MultiStepLRLinearWarmUp,
    PolyDecayLRLinearWarmup,
    ReduceLROnPlateauWithWarmup,
    SparsifiedSGDLR,
    SQRTTimeDecayLR,
    SQRTTimeDecayLRWithWarmup,
    TimeDecayLR,
    TrapezoidLR,
)

__all__ = [
    "ExponentialWarmupMultiStepLR",
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "PolyDecayLRLinearWarmup",
    "ReduceLROnPlateauWithWarmup",
    "SQRTTimeDecayLR",
    "SQRTTimeDecayLRWithWarmup",
    "SparsifiedSGDLR",
    "TimeDecayLR",
    "TrapezoidLR",
    "lr",
]
