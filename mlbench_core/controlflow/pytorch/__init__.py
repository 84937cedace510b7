"""Run training and validation rounds."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.controlflow.pytorch.checkpoints_evaluation import CheckpointsEvaluationControlFlow
from mlbench_core.controlflow.pytorch.controlflow import (
    compute_train_batch_metrics,
    prepare_batch,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.train_validation import train_round

__all__ = [
    "CheckpointsEvaluationControlFlow",
    "compute_train_batch_metrics",
    "prepare_batch",
    "record_train_batch_stats",
    "record_validation_stats",
    "train_round",
    "validation_round",
]
