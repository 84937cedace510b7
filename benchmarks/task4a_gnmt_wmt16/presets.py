"""Sizes of task 4a, and the arguments that select and change them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from mlbench_core.controlflow.task_arguments import count
from mlbench_core.dataset.parts import divide_batch
from mlbench_core.tasks import get_task

__all__ = ["PRESETS", "Preset", "add_arguments", "chosen"]


@dataclass(frozen=True)
class Preset:
    """A size of the task; the model's own sizes are those of the GNMT preset of the same name.

    Attributes:
        global_batch: Sentences of all workers in an update.
        batch_size: Largest number of sentences in a worker's batch.
        epochs: Largest number of epochs.
        lr: Rate after the warm-up.
        warmup_steps: Updates of the warm-up.
        remain_steps: Share of all updates after which the rate is halved.
        decay_interval: Share of all updates after which the rate is halved again, at most 3 times.
        validate_every: Share of an epoch after which the model is validated; also at the end of the
            epoch.
    """

    global_batch: int
    batch_size: int
    epochs: int
    lr: float = 2.0e-3
    warmup_steps: int = 200
    remain_steps: float = 0.4
    decay_interval: float = 0.05
    validate_every: float = 0.3

    def divided(self, world_size: int) -> tuple[int, int]:
        """Return the sentences in a worker's batch, and its batches before an update.

        Example:
            >>> [PRESETS["big"].divided(world_size) for world_size in (1, 4, 16, 32)]
            [(128, 16), (128, 4), (128, 1), (64, 1)]
        """
        return divide_batch(self.global_batch, self.batch_size, world_size)


PRESETS = {
    "big": Preset(global_batch=2048, batch_size=128, epochs=get_task("4a").max_epochs or 8),
    "small": Preset(
        global_batch=128, batch_size=64, epochs=10,
        remain_steps=0.5, decay_interval=0.1, validate_every=1.0,
    ),
}  # fmt: skip


def chosen(args: argparse.Namespace) -> Preset:
    """Return the preset that the arguments select, with their changes."""
    changes = {}
    for name in ("global_batch", "batch_size", "epochs", "lr"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    return replace(PRESETS[args.preset], **changes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a preset and change it."""
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="big",
        help="size of model and batches (default: big)")  # fmt: skip
    add("--batch-size", type=count, metavar="N",
        help="largest number of sentences in a worker's batch (big: 128)")  # fmt: skip
    add("--global-batch", type=count, metavar="N",
        help="sentences of all workers in an update (big: 2048)")  # fmt: skip
    add("--lr", type=float, metavar="RATE", help="learning rate after the warm-up (default: 0.002)")
    add("--max-batches", type=count, metavar="N",
        help="batches of a worker in an epoch, to try something out")  # fmt: skip
