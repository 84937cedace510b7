"""The import path of version 3.0 for :mod:`mlbench_core.distributed.pytorch`."""

from __future__ import annotations

from mlbench_core._optional.lazy import lazy_subpackages
from mlbench_core.distributed.pytorch import FCGraph, initialize_backends
from mlbench_core.distributed.pytorch.settings import config_logging, config_path, config_pytorch

__all__ = ["FCGraph", "config_logging", "config_path", "config_pytorch", "initialize_backends"]

__getattr__ = lazy_subpackages(
    __name__, "checkpoint", "distributed", "helpers", "inference", "topology", "utils"
)
