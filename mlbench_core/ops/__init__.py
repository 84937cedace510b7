"""Single operations that are worth more than their composition of simpler ones."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "pytorch")
