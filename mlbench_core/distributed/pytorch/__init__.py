"""Process groups of torch.distributed: set up and closed, and asked who takes part."""

from mlbench_core.distributed.pytorch.devices import FCGraph
from mlbench_core.distributed.pytorch.initialize import initialize_backends

__all__ = ["FCGraph", "initialize_backends"]
