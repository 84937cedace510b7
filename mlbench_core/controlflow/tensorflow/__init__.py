"""Run training and validation rounds in a session of TensorFlow."""

from mlbench_core._optional import _tensorflow as _tensorflow
from mlbench_core.controlflow.tensorflow.train_validation import (
    TrainValidation,
    train_round,
    validation_round,
)

__all__ = ["TrainValidation", "train_round", "validation_round"]
