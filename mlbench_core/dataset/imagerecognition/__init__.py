"""Image data sets."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "arrays", "published", "pytorch", "readers", "tensorflow")
