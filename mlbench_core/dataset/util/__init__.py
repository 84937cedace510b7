"""The import path of version 3.0 for downloads, partitions and the conversion of LIBSVM text."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "pytorch", "tools")
