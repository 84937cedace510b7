"""What the tests of methods run in each worker process.

A plain DDP loop with the method installed by hand, and the library's optimizer on the same model
and the same data. The batch norm's buffers show the treatment of buffers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from mlbench_core.aggregation import pytorch as aggregations
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.apply import make_method
from mlbench_core.observe.methods.names import parse_method, parse_optimizer
from mlbench_core.optim.pytorch import (
    DESLOC,
    SGP,
    SPARTA,
    ChocoSGD,
    DecentralizedSGD,
    DiLoCo,
    Dion,
    Dion2,
    Dion3,
    GenericCentralizedOptimizer,
    LocalSGD,
    MuonAdamW,
    NoLoCo,
    NorMuon,
    OneBitAdam,
    SparseLoCo,
    StreamingDiLoCo,
)
from tests.helpers.collectives import recording_collectives

STEPS = 7
PARAMETERS = 6  # of the network, and all of them are in one bucket
SGD_OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
MAKE_SGD = partial(SGD, **SGD_OPTIONS)
# Fused, as in the optimizers of the library.
MAKE_ADAMW = partial(AdamW, fused=True, **ADAMW_OPTIONS)


def new_optimizer(text: str, parameters: Any) -> Optimizer:
    """Replace the script's AdamW."""
    method = make_method(parse_optimizer(text))
    assert method is not None
    # lr stands at its position, as in many scripts.
    return method.new_optimizer(AdamW, (parameters, 0.01), {"weight_decay": 0.1})


Make = Callable[[nn.Module], Optimizer]


def on_gradients(make: Callable[[nn.Module], Any]) -> Make:
    return lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=MAKE_SGD, aggregation=make(model)
    )


def all_reduce(dtype: torch.dtype) -> Make:
    return on_gradients(
        lambda model: aggregations.AllReduceAggregation(overlap=True, comm_dtype=dtype)
    )


def sparsified(**options: Any) -> Make:
    return on_gradients(lambda model: aggregations.SparsifiedAggregation(model, **options))


# By the text of --method: the script's optimizer, and that of the library for a plain model.
CASES: dict[str, tuple[Callable[..., Optimizer], Make]] = {
    "bf16": (MAKE_SGD, all_reduce(torch.bfloat16)),
    "fp16": (MAKE_SGD, all_reduce(torch.float16)),
    "power_sgd:rank=3": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.PowerAggregation(
                model, world_size=None, rank=3, reuse_query=True
            )
        ),
    ),
    "power_sgd:start_after_steps=2,reuse_query=false": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.PowerAggregation(
                model, world_size=None, rank=2, start_after_steps=2
            )
        ),
    ),
    "acp_sgd:rank=2": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.PowerAggregation(
                model, world_size=None, rank=2, alternate=True
            )
        ),
    ),
    "sign_sgd": (MAKE_SGD, on_gradients(lambda model: aggregations.SignAggregation())),
    "ef_sign_sgd": (MAKE_SGD, on_gradients(lambda model: aggregations.EFSignAggregation())),
    "sparsified_sgd:size=0.2": (MAKE_SGD, sparsified(size=0.2)),
    "centralized_sparsified_sgd:seed=3": (MAKE_SGD, sparsified(size=0.1, random=True, seed=3)),
    "ef21:size=0.2,momentum=0.5": (
        MAKE_SGD,
        on_gradients(lambda model: aggregations.EF21Aggregation(model, size=0.2, momentum=0.5)),
    ),
    "arc_top_k:rank=1,seed=3": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.ARCTopKAggregation(model, rank=1, momentum=0, seed=3)
        ),
    ),
    "qsgd:levels=3": (
        MAKE_SGD,
        on_gradients(lambda model: aggregations.QSGDAggregation(levels=3, norm=math.inf)),
    ),
    "quantized_sgd:block=5,rounding=stochastic": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.QuantizedAllReduceAggregation(block=5, rounding="stochastic")
        ),
    ),
    "loco:error_decay=0.5": (
        MAKE_SGD,
        on_gradients(
            lambda model: aggregations.QuantizedAllReduceAggregation(bits=4, error_decay=0.5)
        ),
    ),
    "demo:top_k=2": (MAKE_SGD, on_gradients(lambda model: aggregations.DeMoAggregation(top_k=2))),
    "local_sgd:period=3": (
        MAKE_SGD,
        lambda model: LocalSGD(model=model, period=3, **SGD_OPTIONS),
    ),
    "local_sgd:period=3,delay=2": (
        MAKE_SGD,
        lambda model: LocalSGD(model=model, period=3, delay=2, **SGD_OPTIONS),
    ),
    "diloco:period=3": (
        MAKE_ADAMW,
        lambda model: DiLoCo(model=model, period=3, **ADAMW_OPTIONS),
    ),
    "diloco:period=2,outer_lr=0.5,outer_momentum=0": (
        MAKE_SGD,
        lambda model: DiLoCo(
            model=model, period=2, inner_optimizer=MAKE_SGD, outer_lr=0.5, outer_momentum=0
        ),
    ),
    "edit:period=3": (
        MAKE_ADAMW,
        lambda model: DiLoCo(
            model=model,
            period=3,
            aggregation=aggregations.DiLoCoAggregation(
                partial(torch.optim.SGD, lr=0.7, momentum=0.8, nesterov=True),
                penalty=aggregations.OutlierPenalty(),
            ),
            **ADAMW_OPTIONS,
        ),
    ),
    "eager_diloco:period=3": (
        MAKE_ADAMW,
        lambda model: DiLoCo(
            model=model,
            period=3,
            aggregation=aggregations.EagerDiLoCoAggregation(
                partial(torch.optim.SGD, lr=0.4, momentum=0.9, nesterov=True)
            ),
            **ADAMW_OPTIONS,
        ),
    ),
    # MuLoCo: --method diloco:period=4 --optimizer muon:lr=0.02
    "diloco:period=4": (
        lambda parameters: new_optimizer("muon:lr=0.02", parameters),
        lambda model: DiLoCo(
            model=model,
            period=4,
            inner_optimizer=partial(MuonAdamW, lr=0.02, weight_decay=0.1, kernels=True),
        ),
    ),
    "streaming_diloco:period=4,fragments=2,delay=1": (
        MAKE_ADAMW,
        lambda model: StreamingDiLoCo(
            model=model,
            aggregation=aggregations.StreamingDiLoCoAggregation(
                period=4, fragments=2, delay=1, quantize=True
            ),
            **ADAMW_OPTIONS,
        ),
    ),
    "sparse_loco:period=3,density=0.1": (
        MAKE_ADAMW,
        lambda model: SparseLoCo(
            model=model,
            period=3,
            aggregation=aggregations.SparseLoCoAggregation(
                aggregations.ChunkedTopKAggregation(density=0.1)
            ),
            **ADAMW_OPTIONS,
        ),
    ),
    "des_loc:period=2": (MAKE_ADAMW, lambda model: DESLOC(model=model, period=2, **ADAMW_OPTIONS)),
    "no_loco:period=3,outer_momentum=0.3,gamma=0.6,seed=1": (
        MAKE_ADAMW,
        lambda model: NoLoCo(
            model=model,
            period=3,
            aggregation=aggregations.NoLoCoAggregation(outer_momentum=0.3, gamma=0.6, seed=1),
            **ADAMW_OPTIONS,
        ),
    ),
    "sparta:share=0.2,seed=3": (
        MAKE_ADAMW,
        lambda model: SPARTA(
            model=model,
            aggregation=aggregations.SPARTAAggregation(share=0.2, seed=3),
            **ADAMW_OPTIONS,
        ),
    ),
    "decentralized_sgd": (
        MAKE_SGD,
        lambda model: DecentralizedSGD(
            model=model,
            aggregation=aggregations.DecentralizedAggregation(topology=ring(dist.get_world_size())),
            **SGD_OPTIONS,
        ),
    ),
    "sgp": (MAKE_SGD, lambda model: SGP(model=model, **SGD_OPTIONS)),
    "choco_sgd:compression=sign,gamma=0.3": (
        MAKE_SGD,
        lambda model: ChocoSGD(
            model=model,
            aggregation=aggregations.ChocoAggregation(
                topology=ring(dist.get_world_size()), compression="sign", gamma=0.3
            ),
            **SGD_OPTIONS,
        ),
    ),
}

# By the text of --optimizer, for a script with AdamW. The library optimizer of Muon and its
# relatives averages gradients as DDP does.
OPTIMIZERS: dict[str, Make] = {
    "muon:lr=0.02": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(MuonAdamW, lr=0.02, weight_decay=0.1, kernels=True)
    ),
    "normuon:lr=0.02,beta2=0.8": lambda model: GenericCentralizedOptimizer(
        None,
        model,
        optimizer=partial(NorMuon, lr=0.02, weight_decay=0.1, beta2=0.8, kernels=True),
    ),
    "dion2:lr=0.1,fraction=0.5": lambda model: GenericCentralizedOptimizer(
        None,
        model,
        optimizer=partial(Dion2, lr=0.1, weight_decay=0.1, fraction=0.5, kernels=True),
    ),
    "dion3:lr=0.1,polar_express=true": lambda model: GenericCentralizedOptimizer(
        None,
        model,
        optimizer=partial(Dion3, lr=0.1, weight_decay=0.1, polar_express=True, kernels=True),
    ),
    "dion:rank=2": lambda model: Dion(
        model.parameters(),
        aggregation=aggregations.DionAggregation(rank=2, momentum=0.9),
        **ADAMW_OPTIONS,
    ),
    "one_bit_adam:warmup_steps=3": lambda model: OneBitAdam(
        model.parameters(), warmup_steps=3, **ADAMW_OPTIONS
    ),
}


def make_network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))


def train(model: nn.Module, optimizer: Optimizer, after_step: Callable[[Optimizer], None]) -> None:
    rank = dist.get_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(8, 6, generator=generator)
        targets = torch.randn(8, 4, generator=generator)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        after_step(optimizer)
        optimizer.zero_grad()


def measured(
    model: nn.Module, optimizer: Optimizer, after_step: Callable[[Optimizer], None]
) -> dict[str, Any]:
    """Train, and return weights and buffers, and the messages by name with their bytes."""
    messages: list[tuple[str, int]] = []
    with recording_collectives(lambda name, size: messages.append((name, size))):
        train(model, optimizer, after_step)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return {"state": copy.deepcopy(plain.state_dict()), "messages": messages}


def ours(make: Make) -> dict[str, Any]:
    network = make_network()
    return measured(network, make(network), lambda optimizer: None)


def script(text: str, make: Callable[..., Optimizer]) -> dict[str, Any]:
    """Train as a DDP script with its own optimizer; the workers start from different weights, which
    DDP makes equal."""
    method = make_method(parse_method(text))
    model = DistributedDataParallel(make_network(seed=1 + dist.get_rank()))
    if method is None:
        return measured(model, make(model.parameters()), lambda optimizer: None)
    hook = method.hook(model)
    assert hook is not None
    model.register_comm_hook(*hook)
    return measured(model, make(model.parameters()), method.after_step)


def replaced(text: str) -> dict[str, Any]:
    """Train as a DDP script whose optimizer is replaced."""
    method = make_method(parse_optimizer(text))
    assert method is not None
    model = DistributedDataParallel(make_network(seed=1 + dist.get_rank()))
    hook = method.hook(model)
    if hook is not None:
        model.register_comm_hook(*hook)
    return measured(model, new_optimizer(text, model.parameters()), method.after_step)


def accumulated(text: str) -> list[Tensor]:
    """Return gradients of two passes, of which DDP reduces the second; and those of one worker."""
    method = make_method(parse_method(text))
    assert method is not None
    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    hook = method.hook(model)
    assert hook is not None
    model.register_comm_hook(*hook)
    inputs = torch.full((1, 3), 1.0 + dist.get_rank())
    with model.no_sync():
        model(inputs).sum().backward()
    model(inputs).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def two_models() -> list[tuple[Tensor, Tensor]]:
    """Train two DDP models, then the second one alone, and return their weights after each."""
    method = make_method(parse_method("local_sgd:period=1"))
    assert method is not None
    models, weights = [], []
    for _ in range(2):
        model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
        hook = method.hook(model)
        assert hook is not None
        model.register_comm_hook(*hook)
        models.append(model)
    for trained in (models, models[1:]):
        for model in trained:
            model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
            optimizer = SGD(model.parameters(), lr=1.0)
            optimizer.step()
        # The copies differ until the method acts.
        with torch.no_grad():
            models[0].module.weight.add_(dist.get_rank())
        method.after_step(optimizer)
        first, second = [model.module.weight.detach().clone() for model in models]
        weights.append((first, second))
    return weights


def loaded_later() -> tuple[Tensor, Tensor]:
    """Load a checkpoint between DDP's constructor and the first step of DiLoCo with one outer step,
    and return the weights after it, and those that the library's optimizer gets."""
    method = make_method(parse_method("diloco:period=1"))
    assert method is not None
    weights = []
    checkpoint = {"weight": torch.full((2, 3), 5.0)}
    for is_script in (True, False):
        model: nn.Module = nn.Linear(3, 2, bias=False)
        optimizer: Optimizer
        if is_script:
            model = DistributedDataParallel(model)
            hook = method.hook(model)
            assert hook is not None
            model.register_comm_hook(*hook)
            model.module.load_state_dict(checkpoint)
            optimizer = SGD(model.parameters(), lr=1.0)
        else:
            model.load_state_dict(checkpoint)
            optimizer = DiLoCo(model=model, period=1, inner_optimizer=partial(SGD, lr=1.0))
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        if is_script:
            method.after_step(optimizer)
        weights.append(next(model.parameters()).detach())
    return weights[0], weights[1]


def errors() -> dict[str, str]:
    model = DistributedDataParallel(make_network())
    messages = {}
    for text in ("local_sgd:period=2,delay=2", "sparsified_sgd:size=0"):
        method = make_method(parse_method(text))
        assert method is not None
        try:
            method.hook(model)
        except ConfigurationError as error:
            messages[text] = str(error)
    complex_model = DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))
    for text in ("qsgd", "streaming_diloco"):
        method = make_method(parse_method(text))
        assert method is not None
        try:
            method.hook(complex_model)
        except ConfigurationError as error:
            messages[text] = str(error)
    try:
        script("des_loc", MAKE_SGD)
    except ConfigurationError as error:
        messages["des_loc"] = str(error)
    return messages


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "ours": {text: ours(make) for text, (_, make) in CASES.items()},
        "script": {text: script(text, make) for text, (make, _) in CASES.items()},
        "our optimizers": {text: ours(make) for text, make in OPTIMIZERS.items()},
        "replaced": {text: replaced(text) for text in OPTIMIZERS},
        "accumulated": {text: accumulated(text) for text in ("ef_sign_sgd", "local_sgd")},
        "two models": two_models(),
        "loaded later": loaded_later(),
        "errors": errors(),
    }
