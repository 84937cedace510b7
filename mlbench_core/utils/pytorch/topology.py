"""The import path of version 3.0 for the place of a worker, and for graphs of workers."""

from mlbench_core.aggregation.pytorch.transport.topology import *  # noqa: F403
from mlbench_core.distributed.pytorch.devices import *  # noqa: F403
