"""What the workers of task 1a's tests do: several short runs of the task's own ``train``, one after the other."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mlbench_core.tasks import get_task
from tests.benchmarks.small_digits import SmallDigits

FOLDER = get_task("1a").script.parent


def load_script() -> ModuleType:
    """The task's ``main.py``, which finds its neighbours by lying in one folder with them; with smaller digits."""
    sys.path.insert(0, str(FOLDER))
    main = importlib.import_module("main")
    main.DATASETS["digits"] = SmallDigits
    return main


def train(main: ModuleType, rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    """One run; gives its curves, its last weights, and what each worker had of them."""
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    args = parser.parse_args(["--dataset", "digits", "--checkpoint", *arguments])
    main.variants.check(args)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        tracker = main.train(rank, world_size, "1", folder, folder, False, False, False, args)
        last = torch.load(Path(folder, f"{tracker.current_epoch}_{rank}.pth.tar"), weights_only=True)
    return {
        "loss": list(tracker.records["val_global_loss"].values()),
        "train_loss": list(tracker.records["train_loss"].values()),
        "accuracy": list(tracker.records["val_global_Prec@1"].values()),
        "bytes": tracker.summary().communication_size_bytes / tracker.summary().batches,
        "model": last["model"],
    }


def train_all(rank: int, world_size: int, runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """All runs, by name."""
    main = load_script()
    return {name: train(main, rank, world_size, arguments) for name, arguments in runs.items()}
