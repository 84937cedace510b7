"""Goals and times of communication (no framework), metrics and the measuring of collectives."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "goals", "latency", "pytorch")
