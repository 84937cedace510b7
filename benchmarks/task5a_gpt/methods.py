"""Optimizers of task 5a.

The first of the list is the task's own. The others replace it with ``--optimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from mlbench_core.aggregation.pytorch import (
    Aggregation,
    AllReduceAggregation,
    ChunkedTopKAggregation,
    DionAggregation,
    PowerAggregation,
    QSGDAggregation,
    SparseLoCoAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.models.pytorch.gpt import GPT
from mlbench_core.optim.pytorch import (
    CustomCentralizedOptimizer,
    Dion2,
    Dion3,
    MuonAdamW,
    NorMuon,
    get_optimizer,
)
from mlbench_core.optim.pytorch.makers import Maker, of_model, of_parameters

__all__ = ["DDP", "METHODS", "make_optimizer", "parallel"]

DDP = "ddp"
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
LARGEST_NORM = 1.0
ADAMW: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True)
class Method:
    """An optimizer.

    Args:
        make: Called ``(model, lr)`` in the process group; returns the optimizer.
        lr_factor: Factor between the rate of AdamW and that of this optimizer.
    """

    make: Maker
    lr_factor: float = 1.0


def clipped(
    model: nn.Module, optimizer: Callable[[Any], Optimizer] | Optimizer, exchange: Aggregation
) -> Optimizer:
    """Return an optimizer with averaged gradients, whose common norm is at most 1."""
    return CustomCentralizedOptimizer(
        model, None, optimizer, grad_clip=LARGEST_NORM, aggregation=exchange
    )


def averaged(exchange: Callable[[nn.Module], Aggregation]) -> Maker:
    """Return a function that makes AdamW for gradients that an aggregation has averaged."""
    return lambda model, lr: clipped(model, partial(AdamW, lr=lr, **ADAMW), exchange(model))


def muon_groups(parameters: Any, embedding: nn.Parameter) -> list[dict[str, Any]]:
    """Divide the parameters: Muon for the matrices of the layers, AdamW for the embedding.

    The embedding is the output layer too, and the model has no vectors.
    """
    matrices = [parameter for parameter in parameters if parameter is not embedding]
    return [{"params": matrices}, {"params": [embedding], "use_muon": False}]


def make_muon(
    model: GPT,
    lr: float,
    parameters: Any,
    kind: type[MuonAdamW] = MuonAdamW,
    matrix_factor: float = 1.0,
) -> Optimizer:
    """Return Muon or a relative of it, and AdamW, for the parameters of a model.

    ``matrix_factor`` is the factor between the rate of AdamW and that of the matrices. Each
    step decays all weights alike.
    """
    matrices, embedding = muon_groups(parameters, model.embedding.weight)
    matrices |= {"lr": lr * matrix_factor, "weight_decay": WEIGHT_DECAY / matrix_factor}
    return kind([matrices, embedding], lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def muon(model: Any, lr: float, **options: Any) -> Optimizer:
    """Make Muon or a relative of it with averaged gradients."""
    optimizer = make_muon(model, lr, model.parameters(), **options)
    return clipped(model, optimizer, AllReduceAggregation())


def muloco(model: Any, lr: float) -> Optimizer:
    """Make DiLoCo with Muon inside."""
    return get_optimizer(
        "diloco", model=model, inner_optimizer=partial(make_muon, model, lr), period=20,
        outer_momentum=0.5,
    )  # fmt: skip


# Settings and factors are those with which benchmarks/experiments/small_language_model.py, a byte
# Transformer of this kind, was tuned with one and two workers; they were not tuned again here.
# AdamW's are those of GPT-3 (Brown et al., arXiv:2005.14165). The gradients that all workers
# average are clipped; methods that exchange something else have no common gradient to clip.
METHODS = {
    "adamw": Method(averaged(lambda model: AllReduceAggregation())),
    # Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982.
    "muon": Method(muon),
    # Li et al., arXiv:2510.05491.
    "normuon": Method(partial(muon, kind=NorMuon)),
    # The matrices have the rate of Dion. Ahn, Amsel and Langford, arXiv:2512.16928.
    "dion2": Method(partial(muon, kind=Dion2, matrix_factor=4.0)),
    # Amsel et al., arXiv:2608.11612.
    "dion3": Method(partial(muon, kind=Dion3, matrix_factor=4.0)),
    # Vogels et al., arXiv:1905.13727.
    "power_sgd": Method(
        averaged(lambda model: PowerAggregation(model, reuse_query=True, world_size=None, rank=4)),
        lr_factor=0.6,
    ),
    # Alistarh et al., arXiv:1610.02132.
    "qsgd": Method(averaged(lambda model: QSGDAggregation(levels=7, norm=math.inf))),
    # Bernstein et al., arXiv:1802.04434.
    "sign_sgd": Method(of_parameters("sign_sgd", momentum=0.9), lr_factor=0.2),
    # Peng, Quesnelle and Kingma, arXiv:2411.19870.
    "demo": Method(of_parameters("demo"), lr_factor=0.4),
    # Tang et al., arXiv:2102.02888.
    "one_bit_adam": Method(of_parameters("one_bit_adam", warmup_steps=60), lr_factor=0.6),
    # Ahn et al., arXiv:2504.05295.
    "dion": Method(
        of_parameters("dion", lambda: DionAggregation(rank=16, momentum=0.9)), lr_factor=4.0
    ),
    # The average of the workers' weights, an outer step of length 1. Stich, arXiv:1805.09767.
    "local_adamw": Method(
        of_model("diloco", period=20, outer_lr=1.0, outer_momentum=0.0, **ADAMW), lr_factor=0.6
    ),
    # Douillard et al., arXiv:2311.08105. Its outer momentum of 0.9 is for longer trainings.
    "diloco": Method(of_model("diloco", period=20, outer_momentum=0.5, **ADAMW), lr_factor=0.6),
    # Thérien et al., arXiv:2505.23725.
    "muloco": Method(muloco),
    # Douillard et al., arXiv:2501.18512.
    "streaming_diloco": Method(
        of_model(
            "streaming_diloco",
            lambda: StreamingDiLoCoAggregation(period=10, fragments=2, delay=1, quantize=True),
        ),
        lr_factor=0.4,
    ),
    # Sarfi et al., arXiv:2508.15706.
    "sparse_loco": Method(
        of_model(
            "sparse_loco", lambda: SparseLoCoAggregation(ChunkedTopKAggregation(density=0.03)),
            period=10,
        )
    ),
}  # fmt: skip


def make_optimizer(model: nn.Module, lr: float, name: str) -> Optimizer:
    """Return an optimizer by name, with the rate of AdamW times its factor.

    Args:
        model: The GPT; for :data:`DDP` the parallel network.
        lr: The rate of AdamW.
        name: A key of :data:`METHODS`, or :data:`DDP`.
    """
    if name != DDP:
        method = METHODS[name]
        return method.make(model, lr * method.lr_factor)
    optimizer = AdamW(model.parameters(), lr=lr, **ADAMW)

    def clip(optimizer: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)

    # The backward pass of DDP has averaged the gradients when the step begins.
    optimizer.register_step_pre_hook(clip)
    return optimizer


def parallel(model: nn.Module, name: str) -> nn.Module:
    """Return the network of the training: DDP around the model for :data:`DDP`, else the model."""
    if name != DDP:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
