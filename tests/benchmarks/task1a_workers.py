"""What the workers of task 1a's tests do: several short runs of the task's own ``train``, one after
the other."""

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
from tests.helpers.tasks import train_task

FOLDER = get_task("1a").script.parent


def load_script() -> ModuleType:
    """The task's ``main.py``, which finds its neighbours by lying in one folder with them; with
    smaller digits."""
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
    with tempfile.TemporaryDirectory() as folder:
        tracker = train_task(main, args, folder, folder, rank=rank, world_size=world_size)
        last = torch.load(
            Path(folder, f"{tracker.current_epoch}_{rank}.pth.tar"), weights_only=True
        )
    return {
        "loss": list(tracker.records["val_global_loss"].values()),
        "train_loss": list(tracker.records["train_loss"].values()),
        "accuracy": list(tracker.records["val_global_Prec@1"].values()),
        "top5": [
            list(tracker.records[f"{part}_Prec@5"].values()) for part in ("train", "val_global")
        ],
        "watched": (tracker.goal.metric, tracker.primary_metric.name),
        "bytes": tracker.summary().communication_size_bytes / tracker.summary().batches,
        "model": last["model"],
    }


def train_all(rank: int, world_size: int, runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """All runs, by name."""
    main = load_script()
    return {name: train(main, rank, world_size, arguments) for name, arguments in runs.items()}


def train_in_float64(rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    """One run with weights and computation in float64."""
    main = load_script()
    make = main.get_resnet_model

    def make_double(*args: Any, **options: Any) -> Any:
        model = make(*args, **options).double()
        model.register_forward_pre_hook(
            lambda module, inputs: tuple(images.double() for images in inputs)
        )
        return model

    main.get_resnet_model = make_double  # type: ignore[attr-defined]
    try:
        return train(main, rank, world_size, arguments)
    finally:
        main.get_resnet_model = make  # type: ignore[attr-defined]


def resume_from_best(rank: int, world_size: int, arguments: list[str]) -> tuple[bool, list[str]]:
    """Two epochs, and two that are parted by a resume from the best one, which is the first.

    Returns:
        Whether the parted run has the bits of the other, and the names of the files that it resumed
        from.
    """
    main = load_script()
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    common = ["--dataset", "digits", "--model", "resnet8", "--no-augment", *arguments]
    models = []
    make = main.variants.make_network

    def remember(model: torch.nn.Module, *rest: Any) -> Any:
        models.append(model)
        return make(model, *rest)

    main.variants.make_network = remember
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as data:
        folders = [own]  # rank 0's, for all
        torch.distributed.broadcast_object_list(folders, 0)
        names: list[str] = []
        for epochs in (["--epochs", "1"], ["--epochs", "2", "--resume"], ["--epochs", "2"]):
            args = parser.parse_args([*common, *epochs])
            folder = folders[0] if "--resume" in epochs or "1" in epochs else own + f"/{rank}"
            if "--resume" in epochs:
                torch.distributed.barrier()
                names = sorted(path.name for path in Path(folder).iterdir())
            train_task(main, args, data, folder, rank=rank, world_size=world_size)
        torch.distributed.barrier()  # nobody needs rank 0's folder any more
    parted, whole = (model.state_dict() for model in models[1:])
    return all(torch.equal(parted[name], whole[name]) for name in whole), names
