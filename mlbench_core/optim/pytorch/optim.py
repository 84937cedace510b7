"""The import path of version 3.0 for optimizers whose workers exchange compressed steps."""

from mlbench_core.optim.pytorch.compression.sign import EFSignSGD, SignSGD
from mlbench_core.optim.pytorch.compression.sparsified import SparsifiedSGD

__all__ = ["EFSignSGD", "SignSGD", "SparsifiedSGD"]
