"""The import path of version 3.0 for CIFAR-10."""

import sys

from mlbench_core.dataset.imagerecognition.tensorflow import dataset_cifar
from mlbench_core.dataset.imagerecognition.tensorflow.dataset_cifar import *  # noqa: F403

sys.modules[__name__] = (
    dataset_cifar  # the same module, so that a name that is set here is set there
)
