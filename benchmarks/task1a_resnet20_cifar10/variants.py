"""Variants of task 1a: other optimizers, precisions and ways to compute.

main.py in this folder is the task. It takes the parts that a flag changes from here.
"""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cuda_graphs import GraphedNetwork
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    ChocoAggregation,
    ChunkedTopKAggregation,
    DecentralizedAggregation,
    DiLoCoAggregation,
    DionAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    OutlierPenalty,
    PowerAggregation,
    QSGDAggregation,
    SparseLoCoAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.controlflow.task_arguments import count
from mlbench_core.dataset.imagerecognition.pytorch import ImageDataset
from mlbench_core.dataset.pytorch import Partition, parse_partition, partition_dataset_by_rank
from mlbench_core.errors import ConfigurationError
from mlbench_core.lr_scheduler.pytorch.lr import MultiStepLRLinearWarmUp
from mlbench_core.models.pytorch.autocast import Float32Output
from mlbench_core.models.pytorch.batch_norm import convert_batch_norm
from mlbench_core.models.pytorch.group_norm import convert_to_group_norm
from mlbench_core.optim.pytorch import (
    Dion2,
    Dion3,
    FP16Optimizer,
    GenericCentralizedOptimizer,
    MuonAdamW,
    NorMuon,
    get_optimizer,
)
from mlbench_core.optim.pytorch.makers import Maker, of_model, of_parameters, on_ring
from mlbench_core.tasks import get_task

logger = logging.getLogger("mlbench.task1a")

REFERENCE, DDP = "centralized_sgd", "ddp"
NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


@dataclass(frozen=True)
class Variant:
    """An optimizer that replaces that of the reference.

    Args:
        make: Called ``(model, lr)`` in the process group; returns the optimizer.
        lr_factor: Factor between the learning rates of the reference and those of this optimizer.
        scales: True if the rate grows with the number of workers. False if the length of a step
            does not depend on the length of the gradient: k workers improve its direction, and that
            does not justify a longer step.
    """

    make: Maker
    lr_factor: float = 1.0
    scales: bool = True


def for_matrices(kind: type[MuonAdamW]) -> Maker:
    """Return a function that makes an optimizer for the kernels and the matrix, with averaged
    gradients."""
    return lambda model, lr: GenericCentralizedOptimizer(
        None, model, optimizer=partial(kind, lr=lr, kernels=True)
    )


def ef21_muon(model: nn.Module, lr: float) -> Optimizer:
    """Make Muon without momentum of its own, for estimates of the average momentum."""
    inner = partial(MuonAdamW, lr=lr, momentum=0, betas=(0.0, 0.999), kernels=True)
    return GenericCentralizedOptimizer(
        None, model, optimizer=inner, aggregation=EF21Aggregation(model)
    )


def muloco(model: nn.Module, lr: float) -> Optimizer:
    """Make DiLoCo with Muon inside."""
    return get_optimizer(
        "diloco", model=model, inner_optimizer=partial(MuonAdamW, lr=lr, kernels=True), period=20
    )


def acp_sgd(model: nn.Module, lr: float) -> Optimizer:
    """Make PowerSGD that sends one factor in each step."""
    exchange = PowerAggregation(model, rank=4, alternate=True, world_size=None)
    return get_optimizer("power_sgd", model=model, lr=lr, aggregation=exchange, **NESTEROV)


VARIANTS = {
    REFERENCE: Variant(of_model(REFERENCE, **NESTEROV)),
    # Adam's usual rate is 0.001, a twentieth of the task's; the same inside DiLoCo. Kingma and Ba,
    # arXiv:1412.6980; Douillard et al., arXiv:2311.08105.
    "centralized_adam": Variant(
        of_model("centralized_adam", weight_decay=1e-4), lr_factor=0.05, scales=False,
    ),
    # Rank 2 and a warm start reach SGD's accuracy on CIFAR-10. Vogels et al., arXiv:1905.13727,
    # tables 1 and 3.
    "power_sgd": Variant(
        of_model("power_sgd", rank=2, reuse_query=True, world_size=None, **NESTEROV)
    ),
    # Rank 4 is that of the authors' code; the rate is PowerSGD's. Zhang et al., arXiv:2306.08881.
    "acp_sgd": Variant(acp_sgd),
    # Each weight moves by the rate itself, so the rate is only 0.0003: the paper's 0.0001 is for
    # more steps, and takes two workers more than 16 epochs on the digits instead of 12. Bernstein
    # et al., arXiv:1802.04434.
    "sign_sgd": Variant(
        of_parameters("sign_sgd", momentum=0.9, weight_decay=1e-4), lr_factor=0.015, scales=False,
    ),
    # SGD's own rate, since the error feedback makes it SGD in the long run. Karimireddy et al.,
    # arXiv:1901.09847.
    "ef_sign_sgd": Variant(of_parameters("ef_sign_sgd", momentum=0.9, weight_decay=1e-4)),
    # The largest 1 % of each tensor. Stich, Cordonnier and Jaggi, arXiv:1809.07599.
    "sparsified_sgd": Variant(
        of_parameters("sparsified_sgd", sparse_grad_size=0.01, momentum=0.9, weight_decay=1e-4)
    ),
    # 10 % of each tensor at random, the same coordinates on all workers.
    "centralized_sparsified_sgd": Variant(
        of_parameters(
            "centralized_sparsified_sgd", sparse_grad_size=0.1, random_sparse=True,
            world_size=None, momentum=0.9, weight_decay=1e-4,
        )
    ),
    # Lian et al., arXiv:1705.09056.
    "decentralized_sgd": Variant(
        on_ring("decentralized_sgd", DecentralizedAggregation, **NESTEROV)
    ),
    # Koloskova, Stich and Jaggi, arXiv:1902.00340.
    "choco_sgd": Variant(on_ring("choco_sgd", ChocoAggregation, **NESTEROV)),
    # Momentum and weight decay are those of the authors' code. Assran et al., arXiv:1811.10792.
    "sgp": Variant(of_model("sgp", **NESTEROV)),
    # The weights are averaged every 8 steps. Stich, arXiv:1805.09767.
    "local_sgd": Variant(of_model("local_sgd", period=8, **NESTEROV)),
    "diloco": Variant(of_model("diloco", period=20), lr_factor=0.05, scales=False),
    # DiLoCo with the outer momentum of the authors. Cheng et al., arXiv:2412.07210.
    "edit": Variant(
        of_model(
            "diloco",
            lambda: DiLoCoAggregation(
                partial(SGD, lr=0.7, momentum=0.8, nesterov=True), penalty=OutlierPenalty()
            ),
            period=20,
        ),
        lr_factor=0.05, scales=False,
    ),
    # DiLoCo's period and rate, with an outer rate of 0.4 as reported for the paper.
    # Kale, Douillard and Donchev, arXiv:2502.12996.
    "eager_diloco": Variant(
        of_model(
            "diloco",
            lambda: EagerDiLoCoAggregation(partial(SGD, lr=0.4, momentum=0.9, nesterov=True)),
            period=20,
        ),
        lr_factor=0.05, scales=False,
    ),
    # ---- Methods of recent years. All were tried on the digits with 1, 2 and 4 workers, and not on
    # CIFAR-10. Settings that were chosen there, and do not come from the papers, are named.

    # SGD's rate, since the rounding is right on average. 4 bits, buckets of 512 and the largest
    # value as their size are those of the paper's experiments. Alistarh et al., arXiv:1610.02132.
    "qsgd": Variant(
        of_model(
            "qsgd", lambda: QSGDAggregation(levels=7, bucket_size=512, norm=math.inf), **NESTEROV
        )
    ),
    # SGD's rate, since 8 bits change the average little. Blocks as in the library. Wang et al.,
    # arXiv:2306.10209.
    "quantized_sgd": Variant(of_model("quantized_sgd", **NESTEROV)),
    # SGD's rate, since the error feedback makes it SGD in the long run. 4 bits and the decay are
    # those of the paper's code. Xie et al., arXiv:2407.04480.
    "loco": Variant(of_model("quantized_sgd", bits=4, error_decay=0.8, **NESTEROV)),
    # The default share and momentum, which come from no paper. The momentum is an average, so the
    # steps are a tenth of those of SGD's momentum, but the estimate is late. Of 0.5, 1, 2.5 and 5
    # times SGD's rate, 2.5 was the best with two workers on the digits. Fatkhullin, Tyurin and
    # Richtárik, arXiv:2305.15155.
    "ef21": Variant(of_model("ef21", weight_decay=1e-4), lr_factor=2.5),
    # EF21's momentum and rate, which were not tuned for it. The share of rows and the rank are
    # those of github.com/Aris-ma/AllreduceTopK. Chen et al., arXiv:2510.26709.
    "arc_top_k": Variant(
        of_model("ef21", lambda: ARCTopKAggregation(None), weight_decay=1e-4), lr_factor=2.5
    ),
    # The usual momentum makes the steps of SGD ten times longer, and SCAFFOLD has none. Half of
    # that was chosen on the digits: with ten times the rate, four workers diverge at first. The
    # period is that of local SGD. Karimireddy et al., arXiv:1910.06378.
    "scaffold": Variant(of_model("scaffold", period=8, weight_decay=1e-4), lr_factor=5),
    # Each weight moves by the rate itself, so it is Adam's. Decay, blocks and coefficients are
    # those of the paper. Peng, Quesnelle and Kingma, arXiv:2411.19870.
    "demo": Variant(of_parameters("demo"), lr_factor=0.05, scales=False),
    # Adam's rate. The paper's warm-up takes 15 to 20 % of all steps; 20 steps are 20 % of those
    # that one worker needs on the digits. Tang et al., arXiv:2102.02888.
    "one_bit_adam": Variant(
        of_parameters("one_bit_adam", warmup_steps=20, weight_decay=1e-4),
        lr_factor=0.05, scales=False,
    ),
    # Steps have a fixed length: the paper's 0.01 takes four workers more than 24 epochs on the
    # digits, and 0.02 overshoots. A momentum of 0.9 instead of 0.95 overshoots less. Ahn et al.,
    # arXiv:2504.05295.
    "dion": Variant(
        of_parameters("dion", lambda: DionAggregation(rank=8, momentum=0.9)),
        lr_factor=0.75, scales=False,
    ),
    # Liu et al. scale the update to 0.2 times the rate, the size of AdamW's in long trainings. The
    # first updates of Adam are larger, and so 0.003 needs fewer epochs on the digits than Adam's
    # 0.001. Kernels are matrices as in the first experiments, on CIFAR-10. Jordan et al.,
    # kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982.
    "muon": Variant(for_matrices(MuonAdamW), lr_factor=0.15, scales=False),
    # Its steps are as long as Muon's. Li et al., arXiv:2510.05491.
    "normuon": Variant(for_matrices(NorMuon), lr_factor=0.15, scales=False),
    # The rate is Dion's, whose steps have the same factor. Ahn, Amsel and Langford,
    # arXiv:2512.16928; Amsel et al., arXiv:2608.11612.
    "dion2": Variant(for_matrices(Dion2), lr_factor=0.75, scales=False),
    "dion3": Variant(for_matrices(Dion3), lr_factor=0.75, scales=False),
    # Muon's rate, with EF21's momentum in place of Muon's. Gruntkowska et al., arXiv:2510.00643.
    "ef21_muon": Variant(ef21_muon, lr_factor=0.15, scales=False),
    # DiLoCo's period and outer step with Muon inside. Thérien et al., arXiv:2505.23725.
    "muloco": Variant(muloco, lr_factor=0.15, scales=False),
    # The period of local SGD and the rate of Adam, which were not tuned. The periods of the moments
    # are 3 and 6 times as long, as in the paper. Iacob et al., arXiv:2505.22549.
    "des_loc": Variant(of_model("des_loc", period=8), lr_factor=0.05, scales=False),
    # Two fragments with 4 bits, which travel during one step. The paper has a period of 100; 8 was
    # chosen on the digits, where few steps reach the goal. Douillard et al., arXiv:2501.18512.
    "streaming_diloco": Variant(
        of_model(
            "streaming_diloco",
            lambda: StreamingDiLoCoAggregation(period=8, fragments=2, delay=1, quantize=True),
        ),
        lr_factor=0.05, scales=False,
    ),
    # 3 % of the changes with 2 bits, the most of the paper's range, and its decay. Its periods are
    # 15 to 50; 8 was chosen on the digits. Sarfi et al., arXiv:2508.15706.
    "sparse_loco": Variant(
        of_model(
            "sparse_loco", lambda: SparseLoCoAggregation(ChunkedTopKAggregation(density=0.03)),
            period=8,
        ),
        lr_factor=0.05, scales=False,
    ),
    # DiLoCo's period and rate instead of a period of 50, because few steps reach the goal; the
    # rest as in the authors' configuration files. Kolehmainen et al., arXiv:2506.10911.
    "no_loco": Variant(of_model("no_loco", period=20), lr_factor=0.05, scales=False),
    # Adam's rate, and the share of the code of ExoGym. A weight is averaged every 200 steps, which
    # is more than the digits take; not tuned.
    "sparta": Variant(of_model("sparta"), lr_factor=0.05, scales=False),
}  # fmt: skip
OPTIMIZERS = get_task("1a").optimizers


def add_arguments(parser: argparse.ArgumentParser, optimizer: str) -> None:
    """Add the flags of the variants."""
    add = parser.add_argument_group("variants").add_argument
    switch = partial(add, action="store_true")
    add("--optimizer", "--variant", choices=OPTIMIZERS, default=optimizer, metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} (default: {optimizer})")  # fmt: skip
    networks = [f"resnet{layers}" for layers in (8, 20, 32, 44, 56)]
    add("--model", choices=networks, default="resnet20", help="network (default: resnet20)")
    add("--model-version", type=int, choices=(1, 2), default=1,
        help="1: batch norm and ReLU after each convolution; 2: before it (default: 1)",
    )  # fmt: skip
    add("--norm", choices=("batch", "group"), default="batch",
        help="normalization (default: batch)")  # fmt: skip
    add("--partition", default="uniform", metavar="KIND",
        help="training images of a worker: uniform, dirichlet:ALPHA or label_skew:N "
             "(default: uniform)")  # fmt: skip
    switch("--overlap", help="average gradients during the backward pass")
    switch("--shared-memory",
           help="sum gradients through memory that the workers of one machine share")  # fmt: skip
    add("--settings", choices=("reference", "2018"), default="reference",
        help="batch size and schedule")  # fmt: skip
    add("--lr", type=float, metavar="RATE",
        help="rate of SGD with one worker; scaled as the task's own (default: 0.02)")  # fmt: skip
    add("--batch-size", type=count, metavar="N", help="images a worker; the rates grow with it")
    switch("--no-augment", help="train on the images as they are")
    switch("--repartition", help="partition the training set among the workers again in each epoch")
    switch("--sync-batch-norm", help="normalize over the batches of all workers together")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="of the weights; halves have float32 master weights and batch norm (default: fp32)",
    )  # fmt: skip
    add("--autocast", choices=("bf16",), help="compute in bfloat16 where torch.autocast does")
    switch("--compile", help="train through torch.compile")
    switch("--cuda-graphs", help="start the passes of a training step as CUDA graphs; needs --gpu")
    switch("--channels-last", help="images and weights in channels-last order")


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be combined.

    Raises:
        ConfigurationError: Two flags cannot be combined, and the message names both, or
            ``--partition`` is wrong.
    """
    parse_partition(args.partition)
    halves, alone = args.precision != "fp32", args.optimizer == REFERENCE
    optimizer, precision = f"--optimizer {args.optimizer}", f"--precision {args.precision}"
    refusals = (
        (args.overlap and not alone,
         f"--overlap is a way of centralized_sgd: it does not go with {optimizer}"),
        (args.shared_memory and not alone,
         f"--shared-memory is of centralized_sgd: it does not go with {optimizer}"),
        (halves and args.shared_memory,
         f"{precision} sends by the backend: it does not go with --shared-memory"),
        (halves and not alone,
         f"{precision} takes the steps of centralized_sgd: it does not go with {optimizer}"),
        (halves and args.overlap,
         f"{precision} sends all gradients at once: it does not go with --overlap"),
        (halves and args.autocast,
         f"--autocast keeps weights in float32: it does not go with {precision}"),
        (args.sync_batch_norm and args.compile,
         "--sync-batch-norm does not go with --compile: it sends messages"),
        (args.cuda_graphs and not args.gpu, "--cuda-graphs needs a GPU: add --gpu"),
        (args.cuda_graphs and args.compile,
         "--cuda-graphs captures the plain network: it does not go with --compile"),
        (args.cuda_graphs and args.overlap,
         "--cuda-graphs makes the backward pass one piece: leave out --overlap"),
        (args.cuda_graphs and args.sync_batch_norm,
         "--cuda-graphs does not go with --sync-batch-norm, which sends"),
        (args.cuda_graphs and args.optimizer == DDP,
         f"--cuda-graphs does not go with {optimizer}, which sends"),
        (args.sync_batch_norm and args.norm == "group",
         "--sync-batch-norm is a way of batch norm: it does not go with --norm group"),
        (args.repartition and args.partition != "uniform",
         "--repartition shuffles all images in each epoch: "
         f"it does not go with --partition {args.partition}"),
        (args.partial and args.dataset != "cifar10",
         f"--partial does not go with --dataset {args.dataset}"),
        (args.image_size != 32 and args.dataset != "digits",
         f"--image-size is for the digits: it does not go with --dataset {args.dataset}"),
        (args.data and args.dataset == "digits",
         "--data does not go with --dataset digits, which scikit-learn brings"),
    )  # fmt: skip
    for is_refused, message in refusals:
        if is_refused:
            raise ConfigurationError(message)


def partition(images: ImageDataset, args: argparse.Namespace, rank: int, workers: int) -> Partition:
    """Return the training images of a worker."""
    # The uniform parts are those of the reference, the same for every seed. Parts by class differ
    # much from one draw to the next, so repeats with other seeds get other ones.
    seed = 0 if args.partition == "uniform" else args.seed
    return partition_dataset_by_rank(
        images, rank, workers, seed=seed, **parse_partition(args.partition)
    )


def make_exchange(args: argparse.Namespace, use_cuda: bool) -> AllReduceAggregation:
    """Return the average of gradients over all workers, by the way that the flags choose."""
    return AllReduceAggregation(
        use_cuda=use_cuda, overlap=args.overlap, shared_memory=args.shared_memory
    )


@dataclass(frozen=True)
class Plan:
    """Batch size and rates of a run.

    Args:
        batch_size: Images per worker.
        lr: Learning rate before the warm-up, and the lowest rate.
        scaled_lr: Learning rate after the warm-up.
        warmup_epochs: Length of the warm-up in epochs.
    """

    batch_size: int
    lr: float
    scaled_lr: float
    warmup_epochs: float


def make_plan(args: argparse.Namespace, workers: int, batch_size: int, base_lr: float) -> Plan:
    """Scale the task's rate with the number of images in a step, from the rate of one worker.

    In the settings of 2018 a worker has 32 images, and the rate is 0.1/256 for each image of a
    step. ``--lr`` replaces the rate of one worker.

    Args:
        args: The command line.
        workers: Number of workers.
        batch_size: Images per worker in the task's reference.
        base_lr: The task's rate of one worker with this batch size.
    """
    is_2018 = args.settings == "2018"
    if is_2018:
        batch_size, base_lr = 32, 0.1 / 256 * 32
    if args.lr is not None:
        base_lr = args.lr
    variant = VARIANTS.get(args.optimizer, VARIANTS[REFERENCE])
    size = batch_size if args.batch_size is None else args.batch_size
    growth = workers * size / batch_size if variant.scales else 1.0
    lr = base_lr * variant.lr_factor
    # log2 of the growth, so that a run without growth does not warm up.
    warmup_epochs = 5 if is_2018 else math.log2(max(1, growth))
    return Plan(size, lr * min(1, growth), lr * growth, warmup_epochs)


def make_scheduler_of_2018(
    optimizer: Optimizer, plan: Plan, batches_per_epoch: int
) -> MultiStepLRLinearWarmUp:
    """Return the schedule of 2018.

    After a linear warm-up, the rate is a tenth from epoch 82, and a hundredth from epoch 109.
    """
    return MultiStepLRLinearWarmUp(
        optimizer, gamma=0.1, milestones=[82 * batches_per_epoch, 109 * batches_per_epoch],
        scaled_lr=plan.scaled_lr, warmup_init_lr=plan.lr,
        warmup_duration=plan.warmup_epochs * batches_per_epoch,
    )  # fmt: skip


def prepare_model(model: nn.Module, args: argparse.Namespace) -> None:
    """Change the layout, the normalization and its precision in place, as the flags require."""
    if args.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if args.sync_batch_norm:
        convert_batch_norm(model)
    if args.norm == "group":
        convert_to_group_norm(model)
    if args.precision != "fp32":
        for module in model.modules():
            # Sums over a batch and small changes need float32.
            if isinstance(module, nn.BatchNorm2d):
                module.float()
    if args.precision == "fp16" and next(model.parameters()).device.type == "cpu":
        logger.warning("float16 on a CPU is slow: convolutions have no fast kernel there")


def make_optimizer(model: nn.Module, lr: float, args: argparse.Namespace, gpu: bool) -> Any:
    """Return the optimizer of a variant; DDP's comes from :func:`make_network`."""
    if args.precision == "fp32":
        return VARIANTS[args.optimizer].make(model, lr)
    optimizer = FP16Optimizer(model, None, use_cuda=gpu, average_world=True)
    # SGD updates the float32 master weights, which are then copied to the half-precision model.
    optimizer.set_optimizer(SGD([optimizer.fp32_params], lr=lr, **NESTEROV))
    return optimizer


def in_precision(network: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Return the network, computing in the precision that the flags select."""
    if args.autocast is None and args.precision == "fp32":
        return network
    return Float32Output(network, torch.bfloat16 if args.autocast else None)


def ddp_sgd(network: nn.Module, lr: float) -> tuple[DistributedDataParallel, SGD]:
    """Return a network whose backward pass averages gradients over the workers, and its SGD."""
    device = next(network.parameters()).device
    device_ids = [device.index] if device.type == "cuda" else None
    parallel = DistributedDataParallel(network, device_ids=device_ids)
    return parallel, SGD(parallel.parameters(), lr=lr, **NESTEROV)


def make_network(
    model: nn.Module, lr: float, args: argparse.Namespace
) -> tuple[nn.Module, Optimizer | None]:
    """Return the network of the forward pass in training, and the optimizer if it is that of DDP.

    The flags decide if the network is compiled, captured as graphs, or parallel. The validation
    uses the plain model, because a network compiled for training would be compiled a second time
    for validation."""
    network = model
    if args.cuda_graphs:
        network = GraphedNetwork(model)
    elif args.compile:
        network = torch.compile(model)  # type: ignore[assignment]
    optimizer = None
    if args.optimizer == DDP:
        network, optimizer = ddp_sgd(network, lr)
    return in_precision(network, args), optimizer
