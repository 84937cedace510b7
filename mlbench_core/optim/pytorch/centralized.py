"""The import path of version 3.0 for optimizers whose workers all get the same result."""

from mlbench_core.optim.pytorch.all_reduce import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
)
from mlbench_core.optim.pytorch.compression.power import PowerSGD
from mlbench_core.optim.pytorch.compression.sparsified import CentralizedSparsifiedSGD
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "CustomCentralizedOptimizer",
    "GenericCentralizedOptimizer",
    "PowerSGD",
]
