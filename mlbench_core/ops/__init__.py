"""Operators that need less time or memory than the same computation in several steps."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "pytorch")
