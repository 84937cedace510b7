"""Find the workers of a run and let them communicate."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(
    __name__, "environment", "interfaces", "pytorch", "tensorflow", "worker_addresses"
)
