"""Print how a step of CentralizedSGD and one of PowerSGD go through the files of mlbench_core.

``python tools/trace_step.py`` trains a linear layer, a matrix and a vector, with two Gloo workers,
and traces a step with ``sys.setprofile``. It counts calls that go from one file of mlbench_core
into another, and the call of the optimizer. Returns are not counted, and the first step, which
compares the models, is left out. A call through torch or the standard library comes from the
nearest file of mlbench_core on the stack. A ``with`` statement calls at both ends of its block."""

from __future__ import annotations

import os
import sys
import tempfile
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import mlbench_core
from mlbench_core.optim.pytorch.centralized import CentralizedSGD, PowerSGD

FOLDER = os.path.dirname(mlbench_core.__file__) + os.sep


class Trace(NamedTuple):
    """The calls of a step from file to file (caller, called file, function), and all its files."""

    changes: list[tuple[str, str, str]]
    files: set[str]


def file_of(frame: FrameType | None) -> str:
    """Return the file of the nearest frame of mlbench_core; "script" if there is none."""
    while frame is not None and not frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return frame.f_code.co_filename.removeprefix(FOLDER) if frame is not None else "script"


def trace() -> dict[str, Trace]:
    """Take two steps with each optimizer, and trace the second; in a group of two workers."""
    traces = {}
    for kind in (CentralizedSGD, PowerSGD):
        model = nn.Linear(32, 16)
        optimizer = kind(model=model, world_size=2, lr=0.1)
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        calls: list[tuple[str, str, str]] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
                calls.append((file_of(frame.f_back), file_of(frame), frame.f_code.co_qualname))  # noqa: B023

        sys.setprofile(note)
        optimizer.step()
        sys.setprofile(None)
        changes = [call for call in calls if call[0] != call[1]]
        traces[kind.__name__] = Trace(changes, {called for _, called, _ in calls})
    return traces


def work(rank: int, folder: str) -> None:
    """Be one worker; worker 0 prints its path."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, found in trace().items():
        if rank == 0:
            for caller, called, function in found.changes:
                print(f"{caller} -> {called}: {function}")
            print(f"{name}: {len(found.changes)} changes of file, {len(found.files)} files\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        torch.multiprocessing.spawn(work, (name,), nprocs=2)
