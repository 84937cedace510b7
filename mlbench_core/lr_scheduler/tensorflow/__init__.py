"""Learning rate schedules for TensorFlow."""

from mlbench_core._optional import _tensorflow as _tensorflow
from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "lr")
