"""MLBench: reference components for benchmarking distributed machine learning.

Importing this package is fast: it loads a subpackage on first use (:pep:`562`), torch only with a
``pytorch`` subpackage, and TensorFlow only with a ``tensorflow`` one.

Example:
    >>> import mlbench_core
    >>> mlbench_core.evaluation.goals.time_to_accuracy_goal  # doctest: +ELLIPSIS
    <function time_to_accuracy_goal at ...>
"""

from __future__ import annotations

from mlbench_core._optional.lazy import lazy_subpackages

__version__ = "4.0.0.dev0"

_SUBPACKAGES = (
    "aggregation",
    "api",
    "cli",
    "client",
    "comparison",
    "controlflow",
    "dataset",
    "distributed",
    "errors",
    "evaluation",
    "experiments",
    "install_cuda_extensions",
    "lr_scheduler",
    "models",
    "network",
    "ops",
    "optim",
    "prediction",
    "results",
    "sweep",
    "tasks",
    "tracking",
    "utils",
)

__all__ = ["__version__", *_SUBPACKAGES]


__getattr__ = lazy_subpackages(__name__, *_SUBPACKAGES)


# Otherwise dir() and completion would miss the subpackages that are not loaded yet.
def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
