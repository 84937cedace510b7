"""Name the files of checkpoints.

``controlflow/pytorch/checkpoint_files.py`` describes their content.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Scripts written for version 3.0 look for these names. An epoch's name holds the epoch and the
# rank.
BEST_NAME = "model_best.pth.tar"
EPOCH_NAME = re.compile(r"(\d+)_(\d+)\.pth\.tar")
STATISTICS_NAME = re.compile(r"\d+_\d+\.json")
# The id of the save, which all its parts share, then the rank and the world size.
PART_NAME = re.compile(r"model_best\.(\w+-\w+-\d+)\.(\d+)of(\d+)\.pth\.tar")
_TEMPORARY_NAME = re.compile(r"\.saving_\d+\.tmp")


def epoch_name(epoch: int, rank: int) -> str:
    """Return the name of the file in which a worker saves an epoch."""
    return f"{epoch}_{rank}.pth.tar"


def saved_epochs(folder: str | os.PathLike[str], rank: int) -> set[int]:
    """Return the epochs, its own and those of rank 0, that a worker can read from a folder.

    The folder need not exist.
    """
    epochs: set[int] = set()
    if not os.path.isdir(folder):
        return epochs
    for name in os.listdir(folder):
        match = EPOCH_NAME.fullmatch(name)
        if match is not None and int(match[2]) in (0, rank):
            epochs.add(int(match[1]))
    return epochs


def statistics_name(epoch: int, rank: int) -> str:
    """Return the name of the file in which a worker saves the statistics of an epoch."""
    return f"{epoch}_{rank}.json"


def part_name(save: str, rank: int, world_size: int) -> str:
    """Return the name of the file in which a worker saves its part of the best epoch."""
    return f"model_best.{save}.{rank}of{world_size}.pth.tar"


def is_part(name: str) -> bool:
    """Return True if a file name is one that :func:`part_name` returns."""
    return PART_NAME.fullmatch(name) is not None


def is_checkpoint(name: str) -> bool:
    """Return True if a file name belongs to a checkpoint, finished or not."""
    names = (EPOCH_NAME, STATISTICS_NAME, PART_NAME, _TEMPORARY_NAME)
    return name == BEST_NAME or any(pattern.fullmatch(name) for pattern in names)


def remove_checkpoints(ckpt_run_dir: str | os.PathLike[str]) -> None:
    """Delete the checkpoints in a folder and the files of interrupted saves.

    Files with other names stay.

    Args:
        ckpt_run_dir: The folder, which need not exist.
    """
    folder = Path(ckpt_run_dir)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_checkpoint(path.name) and path.is_file():
            path.unlink(missing_ok=True)
