"""Optimizers for PyTorch, by class and by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlbench_core._optional import _torch as _torch
from mlbench_core.optim.pytorch.all_reduce import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
)
from mlbench_core.optim.pytorch.choco import ChocoSGD
from mlbench_core.optim.pytorch.compression.demo import DeMo
from mlbench_core.optim.pytorch.compression.dion import Dion
from mlbench_core.optim.pytorch.compression.ef21 import EF21
from mlbench_core.optim.pytorch.compression.one_bit import OneBitAdam
from mlbench_core.optim.pytorch.compression.power import PowerSGD
from mlbench_core.optim.pytorch.compression.qsgd import QSGD
from mlbench_core.optim.pytorch.compression.quantized import QuantizedSGD
from mlbench_core.optim.pytorch.compression.sign import EFSignSGD, SignSGD
from mlbench_core.optim.pytorch.compression.sparsified import (
    CentralizedSparsifiedSGD,
    SparsifiedSGD,
)
from mlbench_core.optim.pytorch.decentralized import SGP, DecentralizedSGD
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer
from mlbench_core.optim.pytorch.fp_optimizers import (
    DistributedGradScaler,
    DynamicLossScaler,
    FP16Optimizer,
)
from mlbench_core.optim.pytorch.local_steps.des_loc import DESLOC
from mlbench_core.optim.pytorch.local_steps.no_loco import NoLoCo
from mlbench_core.optim.pytorch.local_steps.periodic import DiLoCo, LocalSGD
from mlbench_core.optim.pytorch.local_steps.scaffold import SCAFFOLD
from mlbench_core.optim.pytorch.local_steps.sparse_loco import SparseLoCo
from mlbench_core.optim.pytorch.local_steps.sparta import SPARTA
from mlbench_core.optim.pytorch.local_steps.streaming import StreamingDiLoCo
from mlbench_core.optim.pytorch.updates.dion2 import Dion2, Dion3
from mlbench_core.optim.pytorch.updates.lars import LARS
from mlbench_core.optim.pytorch.updates.muon import MuonAdamW
from mlbench_core.optim.pytorch.updates.normuon import NorMuon
from mlbench_core.optim.pytorch.updates.ntasgd import NTASGD, AveragedSGD, scaled_rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "DESLOC",
    "EF21",
    "LARS",
    "NTASGD",
    "QSGD",
    "SCAFFOLD",
    "SGP",
    "SPARTA",
    "AveragedSGD",
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "ChocoSGD",
    "CustomCentralizedOptimizer",
    "DeMo",
    "DecentralizedSGD",
    "DiLoCo",
    "Dion",
    "Dion2",
    "Dion3",
    "DistributedGradScaler",
    "DynamicLossScaler",
    "EFSignSGD",
    "FP16Optimizer",
    "GenericCentralizedOptimizer",
    "LocalSGD",
    "MuonAdamW",
    "NoLoCo",
    "NorMuon",
    "OneBitAdam",
    "PowerSGD",
    "QuantizedSGD",
    "SignSGD",
    "SparseLoCo",
    "SparsifiedSGD",
    "StreamingDiLoCo",
    "UnknownOptimizerError",
    "get_optimizer",
    "optimizers",
    "scaled_rate",
]

optimizers: dict[str, type[Optimizer]] = {
    "centralized_adam": CentralizedAdam,
    "centralized_sgd": CentralizedSGD,
    "centralized_sparsified_sgd": CentralizedSparsifiedSGD,
    "choco_sgd": ChocoSGD,
    "decentralized_sgd": DecentralizedSGD,
    "demo": DeMo,
    "des_loc": DESLOC,
    "diloco": DiLoCo,
    "dion": Dion,
    "ef21": EF21,
    "ef_sign_sgd": EFSignSGD,
    "local_sgd": LocalSGD,
    "no_loco": NoLoCo,
    "one_bit_adam": OneBitAdam,
    "power_sgd": PowerSGD,
    "qsgd": QSGD,
    "quantized_sgd": QuantizedSGD,
    "scaffold": SCAFFOLD,
    "sgp": SGP,
    "sign_sgd": SignSGD,
    "sparse_loco": SparseLoCo,
    "sparta": SPARTA,
    "sparsified_sgd": SparsifiedSGD,
    "streaming_diloco": StreamingDiLoCo,
}
"""The optimizers that :func:`get_optimizer` can make, by name."""


class UnknownOptimizerError(ValueError, KeyError):
    """An unknown name of an optimizer. It is also a KeyError, as in version 3.0."""

    def __str__(self) -> str:
        # KeyError's own method would put the message in quotes.
        return ValueError.__str__(self)


def get_optimizer(optimizer: str, **kwargs: Any) -> Optimizer:
    """Make an optimizer by name.

    Args:
        optimizer: A key of :data:`optimizers`.
        **kwargs: The optimizer's arguments.

    Returns:
        The optimizer.

    Raises:
        UnknownOptimizerError: The name is unknown. It is a ValueError and a KeyError.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> type(get_optimizer("centralized_sgd", model=model, lr=0.1)).__name__
        'CentralizedSGD'
    """
    if optimizer not in optimizers:
        raise UnknownOptimizerError(
            f"optimizer must be one of {', '.join(sorted(optimizers))}, not {optimizer!r}"
        )
    return optimizers[optimizer](**kwargs)
