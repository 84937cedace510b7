"""Set up, query and close the process groups of torch.distributed."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.distributed.pytorch.devices import FCGraph
from mlbench_core.distributed.pytorch.initialize import initialize_backends

__all__ = ["FCGraph", "initialize_backends"]
