"""Sizes, optimizers and schedules of task 1b, and the arguments that select and change them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mlbench_core.controlflow.task_arguments import count
from mlbench_core.dataset.imagerecognition.pytorch import CenterCrop, RandomCrop
from mlbench_core.lr_scheduler.pytorch.lr import MultiStepLRLinearWarmUp, PolyDecayLRLinearWarmup
from mlbench_core.optim.pytorch.updates.lars import LARS
from mlbench_core.tasks import get_task

__all__ = [
    "PRESETS",
    "Preset",
    "add_arguments",
    "make_optimizer",
    "make_scheduler",
    "peak_lr",
    "take_defaults",
]

TASK = get_task("1b")
MOMENTUM = 0.9
SGD_DECAY, LARS_DECAY = 1e-4, 5e-5  # weight decay
# Peak rate and images in a step of the runs with LARS that Kumar et al. describe, arXiv:1909.09756.
LARS_LR, LARS_BATCH = 31.2, 32_768
STEPS, STEP_FACTOR = (30 / 90, 60 / 90, 80 / 90), 0.1  # in shares of all epochs


@dataclass(frozen=True)
class Preset:
    """The model, the images and the length of a training. The last four are defaults of arguments.

    Attributes:
        model: Name of the network for ``get_resnet_model``.
        train: Crop of training images.
        validation: Crop of validation images.
        sgd_lr: Peak rate of SGD for 256 images in a step, in proportion to which it grows.
        warmup_epochs: Length of the warm-up; a sixth of all epochs if that is shorter.
        decay: Schedule of SGD after the warm-up.
        epochs: Budget of epochs.
        batch_size: Images per worker.
        processes: Loader processes per worker.
    """

    model: str
    train: RandomCrop
    validation: CenterCrop
    sgd_lr: float
    warmup_epochs: float
    decay: str
    epochs: int
    batch_size: int
    processes: int


PRESETS = {
    # Goyal et al. 2017, arXiv:1706.02677, section 5.1.
    "full": Preset(
        "resnet50", RandomCrop(224), CenterCrop(224, resize=256),
        sgd_lr=0.1, warmup_epochs=5, decay="step",
        epochs=TASK.max_epochs or 0, batch_size=256, processes=8,
    ),
    # The rate, the smallest area and the epochs were chosen on CIFAR-10's test images.
    "small": Preset(
        "resnet18_imagenet", RandomCrop(64, min_area=0.35), CenterCrop(64, resize=64),
        sgd_lr=0.2, warmup_epochs=1, decay="polynomial",
        epochs=10, batch_size=64, processes=0,
    ),
}  # fmt: skip


def take_defaults(args: argparse.Namespace) -> None:
    """Set the arguments that the command line does not give to the values of the preset."""
    preset = PRESETS[args.preset]
    for name in ("epochs", "batch_size", "processes"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    if args.decay is None:
        args.decay = "polynomial" if args.optimizer == "lars" else preset.decay


def peak_lr(args: argparse.Namespace, world_size: int) -> float:
    """Return the rate at the end of the warm-up: ``--lr``, or one that grows with the step."""
    if args.lr is not None:
        return float(args.lr)
    images = args.batch_size * world_size
    if args.optimizer == "lars":
        return LARS_LR * math.sqrt(images / LARS_BATCH)
    return PRESETS[args.preset].sgd_lr * images / 256


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: kernels and matrices; vectors, which have no weight decay."""
    kernels: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        # Biases and the parameters of batch norm are vectors.
        (kernels if parameter.dim() > 1 else vectors).append(parameter)
    return [{"params": kernels}, {"params": vectors, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, args: argparse.Namespace, lr: float) -> Optimizer:
    """Return the torch optimizer that ``--optimizer`` names."""
    groups = parameter_groups(model)
    if args.optimizer == "sgd":
        return SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, weight_decay=SGD_DECAY)
    groups[1]["use_lars"] = False
    return LARS(groups, lr=lr, momentum=MOMENTUM, weight_decay=LARS_DECAY)


def make_scheduler(
    optimizer: Optimizer, args: argparse.Namespace, world_size: int, batches_per_epoch: int
) -> LRScheduler:
    """Return the schedule: a linear warm-up, then ``--decay``; it steps after each batch."""
    lr, total = peak_lr(args, world_size), args.epochs * batches_per_epoch
    # At most half of the time until the first step, so that short trainings reach the peak, too.
    warmup_epochs = min(PRESETS[args.preset].warmup_epochs, args.epochs * STEPS[0] / 2)
    warmup = round(warmup_epochs * batches_per_epoch)
    # SGD begins with the rate of one worker. The rates of LARS are long steps even for one.
    start = 0.0 if args.optimizer == "lars" else lr / world_size
    if args.decay == "step":
        milestones = [round(share * total) for share in STEPS]
        return MultiStepLRLinearWarmUp(optimizer, STEP_FACTOR, milestones, lr, start, warmup)
    return PolyDecayLRLinearWarmup(
        optimizer, start, lr, warmup, decay_steps=total - warmup, power=2
    )


def zero_last_norms(model: nn.Module) -> None:
    """Set the scale of the last batch norm of each residual block to 0.

    Each block then starts as the identity.
    """
    for block in model.modules():
        norm = getattr(block, "bn3", getattr(block, "bn2", None))
        if norm is not None:
            nn.init.zeros_(norm.weight)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a preset and change it."""
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="full",
        help="size of the task (default: full)")  # fmt: skip
    add("--optimizer", choices=TASK.optimizers, default="sgd", help="optimizer (default: sgd)")
    add("--decay", choices=("step", "polynomial"),
        help="schedule (default: that of the preset; polynomial with lars)")  # fmt: skip
    add("--lr", type=float,
        help="rate at the end of the warm-up (default: grows with the images in a step)",
    )  # fmt: skip
    add("--batch-size", type=count, metavar="N", help="images per worker (full: 256, small: 64)")
    add("--processes", type=int, metavar="N",
        help="processes per worker that decode images (full: 8, small: 0)")  # fmt: skip
    add("--gpu-decoding", action="store_true", help="decode the images on the GPU")
    add("--overlap", action="store_true", help="average gradients during the backward pass")
    add("--precision", choices=("fp32", "bf16"),
        help="bf16: torch.autocast with float32 weights (default: bf16 with --gpu, else fp32)",
    )  # fmt: skip
