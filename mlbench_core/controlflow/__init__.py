"""Run training and validation rounds."""

from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(
    __name__, "pytorch", "run_results", "task_arguments", "tensorflow", "validation_stats"
)
