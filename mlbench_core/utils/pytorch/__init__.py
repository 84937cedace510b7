"""Setting up distributed training with PyTorch: backends, topology, checkpoints, tensors."""

from __future__ import annotations

from mlbench_core.utils.pytorch.initialize import initialize_backends
from mlbench_core.utils.pytorch.topology import FCGraph

__all__ = ["FCGraph", "initialize_backends"]
