"""Setting up distributed training with PyTorch: backends, topology, checkpoints, tensors."""

from __future__ import annotations

from mlbench_core.utils.pytorch.helpers import config_logging, config_path, config_pytorch
from mlbench_core.utils.pytorch.initialize import initialize_backends
from mlbench_core.utils.pytorch.topology import FCGraph

__all__ = ["FCGraph", "config_logging", "config_path", "config_pytorch", "initialize_backends"]
