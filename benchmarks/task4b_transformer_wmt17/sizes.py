"""Sizes of task 4b, and the arguments that select and change them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mlbench_core.controlflow.task_arguments import count
from mlbench_core.dataset.parts import divide_batch

__all__ = ["PRESETS", "Preset", "add_arguments", "divided", "take_defaults", "take_precision"]


@dataclass(frozen=True)
class Preset:
    """The batches and the rate of one size of the model.

    All except the last are defaults of arguments.

    Attributes:
        max_tokens: Tokens in a batch of one worker.
        global_tokens: Tokens of all workers in an update.
        lr: Rate at the end of the warm-up.
        warmup_steps: Updates of the warm-up.
        validate_every: Share of an epoch after which the model is validated; also at the end of the
            epoch.
    """

    max_tokens: int
    global_tokens: int
    lr: float
    warmup_steps: int
    validate_every: float = 0.3


FULL = Preset(max_tokens=8_192, global_tokens=2**17, lr=1.976e-3, warmup_steps=1_000)
SMALL = Preset(
    max_tokens=1_024, global_tokens=2_048, lr=1.5e-3, warmup_steps=400, validate_every=1.0
)
PRESETS = {"big": FULL, "base": FULL, "small": SMALL}


def take_defaults(args: argparse.Namespace) -> None:
    """Set the arguments that the command line does not give to the values of the preset."""
    # validate_every has no argument: it is always the value of the preset.
    for name, default in vars(PRESETS[args.preset]).items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)


def take_precision(args: argparse.Namespace, gpu: bool) -> None:
    """Fill in a missing precision: half precision on GPUs, as the task is described."""
    if args.precision is None:
        args.precision = "fp16" if gpu else "fp32"


def divided(args: argparse.Namespace, world_size: int) -> tuple[int, int]:
    """Return the tokens in a worker's batch, and its batches before an update.

    Example:
        >>> sizes = argparse.Namespace(global_tokens=2**17, max_tokens=8192)
        >>> [divided(sizes, workers) for workers in (1, 16, 32, 64)]
        [(8192, 16), (8192, 1), (4096, 1), (2048, 1)]
    """
    return divide_batch(args.global_tokens, args.max_tokens, world_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a preset and change it, and the precision."""
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="big", help="size of the model (default: big)")
    add("--max-tokens", type=count, metavar="N",
        help="largest number of tokens in a worker's batch (big: 8192)")  # fmt: skip
    add("--global-tokens", type=count, metavar="N",
        help="tokens of all workers in an update (big: 131072)")  # fmt: skip
    add("--lr", type=float, help="rate at the end of the warm-up (big: 1.976e-3)")
    add("--warmup-steps", type=count, metavar="N", help="updates of the warm-up (big: 1000)")
    add("--precision", choices=("fp32", "bf16", "fp16"),
        help="bf16: autocast; fp16: with a loss scale (default: fp16 with --gpu, else fp32)",
    )  # fmt: skip
