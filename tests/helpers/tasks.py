"""Train with a task's script as its command line would, without starting or connecting workers."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import torch

from mlbench_core.controlflow.pytorch.run import Run
from mlbench_core.tracking.tracker import Tracker


def train_task(
    script: ModuleType,
    args: argparse.Namespace,
    data: str | Path,
    checkpoints: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    light: bool = False,
    validation_only: bool = False,
) -> Tracker:
    """Call the script's ``train`` on this worker, with the random generator that the command line
    would seed."""
    args.run_id, args.gpu, args.light_target, args.validation_only = (
        "1",
        False,
        light,
        validation_only,
    )
    torch.manual_seed(args.seed)
    with Run(args, rank, world_size, str(data), str(checkpoints)) as run:
        script.train(run)
    return run.tracker
