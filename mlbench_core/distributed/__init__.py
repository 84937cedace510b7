"""How the workers of a run find one another and communicate."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "environment", "interfaces", "pytorch")
