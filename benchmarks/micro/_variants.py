"""The networks that `optimizers.py` trains, and the training steps that it compares."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    PowerAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.models.pytorch.resnet import get_resnet_model, resnet18_32x32
from mlbench_core.models.pytorch.vgg import VGG
from mlbench_core.optim.pytorch import FP16Optimizer

LR, MOMENTUM = 1e-3, 0.9
SIGN_LR = 1e-6
DDP, ALONE = "ddp", "alone"
HUGE_MB = 10_000


@dataclass(frozen=True)
class Workload:
    """A network, the size of a worker's batch, and the number of steps in a block.

    Args:
        title: For tables.
        make: Makes the network.
        inputs: Shape of a batch.
        steps: Steps of a block. The methods with a period communicate once per block.
    """

    title: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    steps: int

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Make a worker's batch, the same for every variant."""
        generator = torch.Generator().manual_seed(rank)
        return (
            torch.randn(self.inputs, generator=generator),
            torch.randint(0, 10, self.inputs[:1], generator=generator),
        )


def make_mlp() -> nn.Module:
    """Make an MLP of 19.7 million parameters: much to send, little to compute."""
    # Large matrices, so that communication dominates the step.
    return nn.Sequential(
        nn.Linear(3072, 2560), nn.ReLU(),
        nn.Linear(2560, 2560), nn.ReLU(),
        nn.Linear(2560, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


IMAGE = (3, 32, 32)
WORKLOADS = {
    "resnet20": Workload(
        "ResNet-20, batch 128",
        lambda: get_resnet_model("resnet20", 2, "fp32", num_classes=10), (128, *IMAGE), 2,
    ),
    "resnet18": Workload("ResNet-18 (32x32), batch 8", lambda: resnet18_32x32(10), (8, *IMAGE), 4),
    "vgg11": Workload("VGG11, batch 16", lambda: VGG("VGG11"), (16, *IMAGE), 4),
    "mlp": Workload("MLP, 19.7 million parameters, batch 16", make_mlp, (16, 3072), 10),
}  # fmt: skip


@dataclass
class Trainee:
    """A network under one optimizer.

    Args:
        module: Computes the forward pass.
        optimizer: Takes the steps.
        backward: Computes the gradients of a loss.
        dtype: Of the inputs.
        is_tracked: True if ``step`` takes a tracker and reports bytes and exposed time to it.
        bytes_per_step: Bytes that a worker hands to collectives in a step, if no tracker counts
            them.
    """

    module: nn.Module
    optimizer: Any
    backward: Callable[[Tensor], Any] = torch.Tensor.backward
    dtype: torch.dtype = torch.float32
    is_tracked: bool = False
    bytes_per_step: Callable[[], float] = field(default=lambda: 0.0)

    def step(self, inputs: Tensor, targets: Tensor, tracker: Any) -> None:
        """Run forward pass, backward pass and update, as a user writes them."""
        self.optimizer.zero_grad()
        output = self.module(inputs.to(self.dtype))
        self.backward(nn.functional.cross_entropy(output.float(), targets))
        if self.is_tracked:
            self.optimizer.step(tracker=tracker)
        else:
            self.optimizer.step()


@dataclass(frozen=True)
class Context:
    """The surroundings of a variant: its copy of the network, the workers, a block's steps."""

    model: nn.Module
    workers: int
    rank: int
    steps: int

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the gradient."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


@dataclass(frozen=True)
class Variant:
    """A variant of the training step.

    Args:
        title: For tables; ``{steps}`` becomes the steps of a block.
        make: Makes it.
        is_default: True if it runs without being named. (Convolutions in fp16 take many seconds on
            a CPU.)
        keeps_memory: True to keep freed memory, as ``initialize_backends`` does. If False,
            ``--apart`` is needed.
    """

    title: str
    make: Callable[[Context], Trainee]
    is_default: bool = True
    keeps_memory: bool = True


def alone(context: Context, fused: bool | None = None) -> Trainee:
    """Train without communication: the upper bound of the speed."""
    return Trainee(context.model, SGD(context.model.parameters(), LR, MOMENTUM, fused=fused))


def ddp(
    context: Context, share: float = 1.0, fused: bool | None = None, hook: Any = None,
    **options: Any,
) -> Trainee:  # fmt: skip
    """Make torch's DDP; a hook sends the part ``share`` of the gradient's bytes."""
    module = DistributedDataParallel(context.model, **options)
    if hook is not None:
        module.register_comm_hook(None, hook)
    sent = share * context.size_bytes
    optimizer = SGD(module.parameters(), LR, MOMENTUM, fused=fused)
    return Trainee(module, optimizer, bytes_per_step=lambda: sent)


def ddp_power(context: Context, rank: int) -> Trainee:
    """Make torch's PowerSGD."""
    # On Gloo it hangs or aborts with more than one bucket.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    module = DistributedDataParallel(context.model, bucket_cap_mb=HUGE_MB)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def bytes_per_step() -> float:
        # torch counts the elements of all steps; the first steps are not compressed.
        compressed_steps = max(1, state.iter - state.start_powerSGD_iter)
        return 4 * state.total_numel_after_compression / compressed_steps

    return Trainee(module, SGD(module.parameters(), LR, MOMENTUM), bytes_per_step=bytes_per_step)


def ours(name: str, context: Context, **options: Any) -> Trainee:
    """Make one of the library's optimizers, by class."""
    optimizer = find(name)(model=context.model, lr=LR, **options)
    return Trainee(context.model, optimizer, is_tracked=True)


def find(name: str) -> Any:
    """Return a class of the library's optimizers."""
    return getattr(importlib.import_module("mlbench_core.optim.pytorch"), name)


def sgd(context: Context, **options: Any) -> Trainee:
    """Make the library's counterpart of DDP + SGD."""
    return ours("CentralizedSGD", context, momentum=MOMENTUM, **options)


def overlapping(context: Context, fused: bool | None = None, **settings: Any) -> Trainee:
    """Make CentralizedSGD whose gradients travel during the backward pass."""
    return sgd(context, fused=fused, aggregation=AllReduceAggregation(overlap=True, **settings))


def sharing(context: Context) -> Trainee:
    """Make CentralizedSGD that sums through shared memory, after the backward pass."""
    return sgd(context, aggregation=AllReduceAggregation(shared_memory=True))


def custom(context: Context) -> Trainee:
    """Make the library's wrapper around a given torch optimizer."""
    wrapped = SGD(context.model.parameters(), LR, MOMENTUM)
    optimizer = find("CustomCentralizedOptimizer")(context.model, None, wrapped)
    return Trainee(context.model, optimizer, is_tracked=True)


class NoUpdate(SGD):
    """An optimizer that leaves the parameters as they are."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def only_sums(context: Context) -> Trainee:
    """Average gradients as CentralizedSGD does, without an update: a bound for every update."""
    make, no_update = find("GenericCentralizedOptimizer"), partial(NoUpdate, lr=LR)
    optimizer = make(None, context.model, optimizer=no_update)
    return Trainee(context.model, optimizer, is_tracked=True)


def ddp_adam(context: Context) -> Trainee:
    """Make DistributedDataParallel with torch's Adam."""
    module = DistributedDataParallel(context.model)
    return Trainee(module, Adam(module.parameters(), LR), bytes_per_step=lambda: context.size_bytes)


def power(context: Context, rank: int) -> Trainee:
    """Make PowerSGD with warm start."""
    return ours(
        "PowerSGD", context, momentum=MOMENTUM, rank=rank, reuse_query=True,
        world_size=context.workers,
    )  # fmt: skip


def acp(context: Context, rank: int) -> Trainee:
    """Make PowerSGD with one factor in each step."""
    exchange = PowerAggregation(
        context.model, rank=rank, alternate=True, world_size=context.workers
    )
    return ours("PowerSGD", context, momentum=MOMENTUM, aggregation=exchange)


def arc(context: Context) -> Trainee:
    """Make EF21 with the rows of ARC-Top-K."""
    return ours("EF21", context, aggregation=ARCTopKAggregation(context.model))


def sign(context: Context, name: str) -> Trainee:
    """Make an optimizer of signs."""
    # Its steps do not shrink with the gradient, so the learning rate is smaller.
    return compressed(context, name, lr=SIGN_LR, momentum=MOMENTUM)


def compressed(context: Context, name: str, lr: float = LR, **options: Any) -> Trainee:
    """Make one of the library's optimizers that take parameters, by class."""
    optimizer = find(name)(context.model.named_parameters(), lr=lr, **options)
    return Trainee(context.model, optimizer, is_tracked=True)


def sparse(context: Context, random: bool) -> Trainee:
    """Send one percent of the gradient."""
    make, named = find("CentralizedSparsifiedSGD"), context.model.named_parameters()
    optimizer = make(
        named, LR, sparse_grad_size=0.01, random_sparse=random, world_size=context.workers
    )
    return Trainee(context.model, optimizer, is_tracked=True)


def gossip(name: str, context: Context) -> Trainee:
    """Average with the neighbors on a ring."""
    aggregations = importlib.import_module("mlbench_core.aggregation.pytorch")
    make_exchange = getattr(aggregations, name.replace("SGD", "Aggregation"))
    exchange = make_exchange(topology=ring(context.workers))
    return ours(name, context, momentum=MOMENTUM, aggregation=exchange)


def periodic(name: str, **options: Any) -> Callable[[Context], Trainee]:
    """Average once per block."""
    return lambda context: ours(name, context, period=context.steps, **options)


def local4(context: Context, delay: int = 0) -> Trainee:
    """Average every fourth step.

    With a delay, a block needs several periods: its last message travels between two blocks, and so
    costs no time."""
    return ours("LocalSGD", context, momentum=MOMENTUM, period=4, delay=delay)


def muon(context: Context, name: str = "MuonAdamW") -> Trainee:
    """Average gradients for Muon or a relative, whose matrices include the kernels."""
    optimizer = find("GenericCentralizedOptimizer")(
        None, context.model, optimizer=partial(make_muon, name=name)
    )
    return Trainee(context.model, optimizer, is_tracked=True)


def make_muon(parameters: Any, name: str = "MuonAdamW") -> Any:
    """Make Muon or a relative for matrices and kernels."""
    return find(name)(parameters, lr=LR, kernels=True)


def muloco(context: Context) -> Trainee:
    """Make DiLoCo with Muon as its inner optimizer."""
    optimizer = find("DiLoCo")(model=context.model, inner_optimizer=make_muon, period=context.steps)
    return Trainee(context.model, optimizer, is_tracked=True)


def streaming(context: Context) -> Trainee:
    """Make DiLoCo in two fragments of 4 bits, if the steps of a block leave room for two.

    The message of a block's last step travels between two blocks, so this row looks a little better
    than a run."""
    steps = context.steps
    exchange = StreamingDiLoCoAggregation(
        period=steps, fragments=min(2, steps), delay=min(1, steps - 1), quantize=True
    )
    return ours("StreamingDiLoCo", context, aggregation=exchange)


def half(context: Context, dtype: torch.dtype) -> Trainee:
    """Train in half precision with float32 master weights."""
    model = context.model.to(dtype)
    optimizer = FP16Optimizer(model, context.workers, average_world=True)
    optimizer.set_optimizer(SGD([optimizer.fp32_params], LR, MOMENTUM))
    return Trainee(model, optimizer, optimizer.backward_loss, dtype, is_tracked=True)


def with_buckets(size_mb: int) -> Variant:
    """Declare CentralizedSGD with overlap and buckets of a size."""
    title = f"CentralizedSGD, overlap, buckets of {size_mb} MB"
    make = partial(overlapping, bucket_size_bytes=size_mb * 10**6)
    return Variant(title, make, is_default=False)


def returning(title: str, make: Callable[[Context], Trainee]) -> Variant:
    """Declare a variant that returns freed memory to the system."""
    title = f"{title}, freed memory returned"
    return Variant(title, make, is_default=False, keeps_memory=False)


SHARED = "CentralizedSGD, shared memory"
VARIANTS = {
    ALONE: Variant("no communication", alone),
    "alone_fused": Variant("no communication, fused SGD", partial(alone, fused=True)),
    DDP: Variant("DDP + SGD (both default)", ddp),
    "ddp_fused": Variant(
        "DDP, gradients as bucket views, fused SGD",
        partial(ddp, fused=True, gradient_as_bucket_view=True),
    ),
    "ddp_fp16": Variant(
        "DDP, fp16 hook", partial(ddp, share=0.5, hook=default_hooks.fp16_compress_hook)
    ),
    "ddp_power2": Variant("DDP, PowerSGD hook, rank 2, one bucket", partial(ddp_power, rank=2)),
    "sgd": Variant("CentralizedSGD", sgd),
    "sgd_no_update": Variant("CentralizedSGD, no update", only_sums, is_default=False),
    "sgd_fused": Variant("CentralizedSGD, fused", partial(sgd, fused=True)),
    "sgd_by_layer": Variant(
        "CentralizedSGD, by layer", partial(sgd, by_layer=True), is_default=False
    ),
    "sgd_weights": Variant(
        "CentralizedSGD, averaged weights", partial(sgd, agg_grad=False), is_default=False
    ),
    "custom": Variant("CustomCentralizedOptimizer, torch's SGD", custom, is_default=False),
    "ddp_adam": Variant("DDP + Adam", ddp_adam, is_default=False),
    "adam": Variant("CentralizedAdam", partial(ours, "CentralizedAdam"), is_default=False),
    "sgd_overlap_unfused": Variant(
        "CentralizedSGD, overlap, not fused", partial(overlapping, fused=False), is_default=False
    ),
    "sgd_overlap": Variant("CentralizedSGD, overlap", overlapping),
    "shared": Variant(SHARED, sharing),
    "shared_overlap": Variant(f"{SHARED}, overlap", partial(overlapping, shared_memory=True)),
    "sgd_overlap_fp16": Variant(
        "CentralizedSGD, overlap, fp16 transfer", partial(overlapping, comm_dtype=torch.float16)
    ),
    "sgd_overlap_1mb": with_buckets(1),
    "sgd_overlap_4mb": with_buckets(4),
    "sgd_overlap_25mb": with_buckets(25),
    "sgd_overlap_1000mb": with_buckets(1000),
    "ddp_returned": returning("DDP + SGD", ddp),
    "sgd_returned": returning("CentralizedSGD", sgd),
    "power1": Variant("PowerSGD, rank 1", partial(power, rank=1)),
    "power2": Variant("PowerSGD, rank 2", partial(power, rank=2)),
    "power4": Variant("PowerSGD, rank 4", partial(power, rank=4)),
    "acp4": Variant("ACP-SGD, rank 4", partial(acp, rank=4)),
    "sign": Variant("SignSGD", partial(sign, name="SignSGD")),
    "ef_sign": Variant("EFSignSGD", partial(sign, name="EFSignSGD")),
    "top1": Variant("CentralizedSparsifiedSGD, largest 1 %", partial(sparse, random=False)),
    "ef21": Variant("EF21, largest 10 %", partial(ours, "EF21")),
    "arc": Variant("EF21, 20 % of the rows (ARC-Top-K)", arc),
    "random1": Variant("CentralizedSparsifiedSGD, random 1 %", partial(sparse, random=True)),
    "ring": Variant("DecentralizedSGD, ring", partial(gossip, "DecentralizedSGD")),
    "choco": Variant("ChocoSGD, ring, largest 10 %", partial(gossip, "ChocoSGD")),
    "sgp": Variant("SGP", partial(ours, "SGP", momentum=MOMENTUM)),
    "local": Variant("LocalSGD, every {steps} steps", periodic("LocalSGD", momentum=MOMENTUM)),
    "local4": Variant("LocalSGD, every 4 steps", local4, is_default=False),
    "local4_delay": Variant(
        "LocalSGD, every 4 steps, delay of 3", partial(local4, delay=3), is_default=False
    ),
    "diloco": Variant("DiLoCo (AdamW), every {steps} steps", periodic("DiLoCo")),
    "des_loc": Variant("DES-LOC (AdamW), weights every {steps} steps", periodic("DESLOC")),
    "qsgd": Variant("QSGD, 4 bits", partial(ours, "QSGD", momentum=MOMENTUM, levels=7)),
    "quantized": Variant("QuantizedSGD, 8 bits", partial(ours, "QuantizedSGD", momentum=MOMENTUM)),
    "loco": Variant(
        "QuantizedSGD, 4 bits and feedback (LoCo)",
        partial(ours, "QuantizedSGD", momentum=MOMENTUM, bits=4, error_decay=0.8),
    ),
    "demo": Variant("DeMo", partial(compressed, name="DeMo")),
    # One step of warm-up, because the steps that follow are those with one bit.
    "one_bit_adam": Variant("OneBitAdam", partial(compressed, name="OneBitAdam", warmup_steps=1)),
    "dion": Variant("Dion, rank 8", partial(compressed, name="Dion", rank=8)),
    "muon": Variant("MuonAdamW, kernels too", muon),
    "normuon": Variant("NorMuon, kernels too", partial(muon, name="NorMuon")),
    "dion2": Variant("Dion2, a quarter, kernels too", partial(muon, name="Dion2")),
    "dion3": Variant("Dion3, a quarter, kernels too", partial(muon, name="Dion3")),
    "scaffold": Variant("SCAFFOLD, every {steps} steps", periodic("SCAFFOLD")),
    "muloco": Variant("MuLoCo, every {steps} steps", muloco),
    "streaming": Variant("StreamingDiLoCo, 2 fragments of 4 bits, every {steps} steps", streaming),
    "sparse_loco": Variant("SparseLoCo, every {steps} steps", periodic("SparseLoCo")),
    "no_loco": Variant("NoLoCo, every {steps} steps", periodic("NoLoCo")),
    "sparta": Variant("SPARTA (AdamW), 0.5 %", partial(ours, "SPARTA")),
    "half_fp16": Variant(
        "FP16Optimizer, fp16", partial(half, dtype=torch.float16), is_default=False
    ),
    "half_bf16": Variant("FP16Optimizer, bf16", partial(half, dtype=torch.bfloat16)),
}
"""In the order of the table. A variant that fails is reported with its error."""
