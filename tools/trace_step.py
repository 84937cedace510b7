"""Print how a step of CentralizedSGD and one of PowerSGD go through the files of mlbench_core.

``python tools/trace_step.py`` trains a linear layer, a matrix and a vector, with two Gloo workers,
and traces worker 0 with ``sys.setprofile``. It counts calls that go from one file of mlbench_core
into another, and the call of the optimizer. Returns are not counted, and the first step, which
compares the models, is left out. A call through torch or the standard library comes from the
nearest file of mlbench_core on the stack. A ``with`` statement calls at both ends of its block."""

from __future__ import annotations

import os
import sys
import tempfile
from types import FrameType

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import mlbench_core
from mlbench_core.optim.pytorch.centralized import CentralizedSGD, PowerSGD

FOLDER = os.path.dirname(mlbench_core.__file__) + os.sep


def file_of(frame: FrameType | None) -> str:
    """Return the file of the nearest frame of mlbench_core; "script" if there is none."""
    while frame is not None and not frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return frame.f_code.co_filename.removeprefix(FOLDER) if frame is not None else "script"


def work(rank: int, folder: str) -> None:
    """Take two steps with each optimizer; worker 0 traces the second and prints its path."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in (CentralizedSGD, PowerSGD):
        model = nn.Linear(32, 16)
        optimizer = kind(model=model, world_size=2, lr=0.1)
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        calls: list[tuple[str, str, str]] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
                calls.append((file_of(frame.f_back), file_of(frame), frame.f_code.co_qualname))  # noqa: B023

        sys.setprofile(note if rank == 0 else None)
        optimizer.step()
        sys.setprofile(None)
        if rank == 0:
            changes = [call for call in calls if call[0] != call[1]]
            for caller, called, name in changes:
                print(f"{caller} -> {called}: {name}")
            files = {called for _, called, _ in calls}
            print(f"{kind.__name__}: {len(changes)} changes of file, {len(files)} files\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        torch.multiprocessing.spawn(work, (name,), nprocs=2)
