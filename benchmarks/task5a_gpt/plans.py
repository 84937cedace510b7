"""Presets of task 5a, and the arguments that select and change them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from mlbench_core.controlflow.task_arguments import count
from mlbench_core.dataset.parts import divide_batch
from mlbench_core.errors import ConfigurationError
from mlbench_core.models.pytorch.autocast import has_fast_bfloat16
from mlbench_core.tasks import get_task

__all__ = ["PRESETS", "Plan", "add_arguments", "chosen", "take_defaults"]

TASK = get_task("5a")


@dataclass(frozen=True)
class Plan:
    """Batches, steps and rates of one size of the model.

    Attributes:
        context: Tokens of a sequence.
        global_tokens: Tokens of all workers in a step. It is a part of the task's definition.
        max_tokens: Tokens that a worker reads at a time; it accumulates gradients for more.
        steps: Steps of the whole schedule.
        warmup_steps: Steps of the warm-up.
        validate_every: Steps between two validations.
        validation_tokens: First tokens of the validation text that are validated.
        lr: Rate of AdamW between warm-up and decay.
    """

    context: int
    global_tokens: int
    max_tokens: int
    steps: int
    warmup_steps: int
    validate_every: int
    validation_tokens: int
    lr: float

    def divided(self, world_size: int) -> tuple[int, int]:
        """Return the sequences in a worker's batch, and its batches before a step.

        Raises:
            ConfigurationError: There are more workers than sequences in a step.

        Example:
            >>> [PRESETS["gpt2"].divided(world_size) for world_size in (1, 8, 16, 64, 256)]
            [(32, 16), (32, 2), (32, 1), (8, 1), (2, 1)]
        """
        sequences = self.global_tokens // self.context
        if world_size > sequences:
            raise ConfigurationError(
                f"workers must be at most {sequences}, one for each sequence of a step, not "
                f"{world_size}: start fewer, or give more tokens in a step with --global-tokens"
            )
        return divide_batch(sequences, self.max_tokens // self.context, world_size)


PRESETS = {
    # 2^19 tokens, 256 steps of warm-up, the rate and the validation are those of the speed runs;
    # 9,600 steps are 5.0 billion tokens, with which their AdamW reached the goal.
    "gpt2": Plan(
        context=1_024, global_tokens=2**19, max_tokens=2**15, steps=9_600, warmup_steps=256,
        validate_every=128, validation_tokens=10_485_760, lr=1.8e-3,
    ),
    "mini": Plan(
        context=256, global_tokens=2**13, max_tokens=2**13, steps=1_200, warmup_steps=60,
        validate_every=40, validation_tokens=2**18, lr=2e-3,
    ),
    "tiny": Plan(
        context=128, global_tokens=2**11, max_tokens=2**11, steps=400, warmup_steps=20,
        validate_every=20, validation_tokens=2**15, lr=2.5e-3,
    ),
}  # fmt: skip


def chosen(args: argparse.Namespace) -> Plan:
    """Return the plan of the preset, with the changes of the arguments."""
    changes = {}
    for name in ("global_tokens", "max_tokens", "steps", "lr"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    return replace(PRESETS[args.preset], **changes)


def take_defaults(args: argparse.Namespace) -> None:
    """Fill in what the command line leaves to the preset: data set, precision and validations.

    Raises:
        ConfigurationError: Preset and data set do not belong together, or a worker's batch would
            not hold a sequence.
    """
    if args.preset is None:
        args.preset = "mini" if args.dataset == "wikitext2" else "gpt2"
    dataset = TASK.dataset_of(args.preset)
    if args.dataset not in (None, dataset):
        raise ConfigurationError(
            f"--dataset must be {dataset} with --preset {args.preset}, not {args.dataset}: "
            "leave it out"
        )
    args.dataset = dataset
    if args.precision is None:
        args.precision = "bf16" if has_fast_bfloat16(args.gpu) else "fp32"
    plan = chosen(args)
    for name in ("global_tokens", "max_tokens"):
        if getattr(plan, name) < plan.context:
            option = name.replace("_", "-")
            raise ConfigurationError(
                f"--{option} must be at least {plan.context}, a sequence, not "
                f"{getattr(plan, name)}: give a multiple of it"
            )
    if args.epochs is None:
        args.epochs = -(-plan.steps // plan.validate_every)


def autocast(args: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype in which the model computes; None for that of its weights."""
    return torch.bfloat16 if args.precision == "bf16" else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a preset and change it, and the precision."""
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS),
        help="size of model, data and batches (default: gpt2; mini with --dataset wikitext2)",
    )  # fmt: skip
    add("--dataset", choices=TASK.datasets, help="data set (default: that of the preset)")
    add("--data", metavar="FOLDER",
        help="folder that holds its files (default: below --root-dataset)")  # fmt: skip
    add("--steps", type=count, metavar="N", help="steps of the schedule (gpt2: 9600)")
    add("--global-tokens", type=count, metavar="N",
        help="tokens of all workers in a step (gpt2: 524288)")  # fmt: skip
    add("--max-tokens", type=count, metavar="N",
        help="largest number of tokens in a worker's batch (gpt2: 32768)")  # fmt: skip
    add("--lr", type=float, metavar="RATE",
        help="rate of AdamW between warm-up and decay (gpt2: 0.0018)")  # fmt: skip
    add("--precision", choices=("fp32", "bf16"),
        help="bf16: autocast (default: bf16 on GPUs and on CPUs that have it)")  # fmt: skip
