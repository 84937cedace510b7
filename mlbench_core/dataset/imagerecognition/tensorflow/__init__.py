"""Image data sets for TensorFlow."""

from mlbench_core._optional import _tensorflow as _tensorflow
from mlbench_core.dataset.imagerecognition.tensorflow.dataset_cifar import DatasetCifar

__all__ = ["DatasetCifar"]
