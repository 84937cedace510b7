"""Write the result folder of a run whose workers are a process group of torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlbench_core.controlflow import run_results
from mlbench_core.controlflow.run_results import task_configuration, task_environment
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.process_groups import get_backend_tensor
from mlbench_core.results.configuration import Configuration

__all__ = ["RunResults", "task_results"]

_CHUNK_BYTES = 16 << 20


class _ProcessGroup(run_results.Workers):
    """The messages of the process group of all workers."""

    @property
    def size(self) -> int:
        return process_groups.world_size()

    def sum(self, numbers: Sequence[int]) -> list[int]:
        total = get_backend_tensor(torch.tensor(numbers, dtype=torch.int64))
        dist.all_reduce(total)
        return list(map(int, total.tolist()))

    def broadcast(self, content: bytes, sender: int) -> bytes:
        is_sender = process_groups.rank() == sender
        (size,) = self.sum([len(content) if is_sender else 0])
        received = bytearray()
        # Broadcast and not send, because every backend has it.
        for start in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - start)
            chunk = torch.zeros(length, dtype=torch.uint8)
            if is_sender:
                chunk = torch.frombuffer(
                    bytearray(content[start : start + length]), dtype=torch.uint8
                )
            chunk = get_backend_tensor(chunk)
            dist.broadcast(chunk, src=sender)
            received += chunk.cpu().numpy().tobytes()
        return bytes(received)


class RunResults(run_results.RunFolder):
    """The result folder of a run.

    Every worker makes one at the same time, after the process group exists. Pass :attr:`sink` to
    the tracker. Use it as a context manager around the tracker: at its end the
    result is written, also after an exception. The tasks do this through
    :class:`~mlbench_core.controlflow.pytorch.run.Run`.

    Args:
        folder: The result folder. Files of an earlier run in it are moved to ``earlier-1`` and so
            on.
        configuration: The program of the run and its settings.
        run_id: Id of the run.
        rank: Rank of this worker.
        environment: Content of ``environment.json``, see
            :func:`~mlbench_core.results.environment.describe_environment`; used on rank 0.
        resume: True to continue the run in this folder. Its files stay as they are until the
            training starts.

    Raises:
        ConfigurationError: Another run writes to this folder at the moment, or it cannot be written
            to. Or a resumed run has other settings than its first part.
        MLBenchError: At the end of the block, the training has finished, but its result could not
            be written whole.

    Attributes:
        sink: Writes the raw lines of this worker.
        result: On rank 0, the content of ``result.json`` after the end; None before and on other
            ranks.

    Example:
        >>> import pathlib, tempfile
        >>> from mlbench_core.tracking.tracker import Tracker
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "my-run"
        >>> with RunResults(folder, Configuration(workers=1), "my-run") as results:
        ...     with Tracker([], "my-run", 0, sinks=[results.sink]) as tracker:
        ...         tracker.batch_start()
        ...         tracker.batch_end(samples=32)
        ...         tracker.epoch_end()
        >>> results.result["run"]["state"], results.result["samples"]
        ('finished', 32)
    """

    def __init__(
        self,
        folder: Path,
        configuration: Configuration,
        run_id: str,
        rank: int = 0,
        *,
        environment: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__(
            folder,
            configuration,
            run_id,
            rank,
            environment=environment,
            resume=resume,
            workers=_ProcessGroup(),
        )


def task_results(
    args: argparse.Namespace,
    uid: str,
    rank: int,
    world_size: int,
    backend: str,
    goal: Any = None,
    *,
    output_dir: str,
    dataset_dir: str,
) -> RunResults:
    """Open the result folder of a task from its command line.

    Every worker calls it at the same time.

    Args:
        args: The command line, as :func:`~mlbench_core.controlflow.task_arguments.task_main` read
            it.
        uid: The task's name in paths, such as ``"task1a"``.
        rank: Rank of this worker.
        world_size: Number of workers.
        backend: Communication backend.
        goal: The goal of the run; None if it has none.
        output_dir: The result folder.
        dataset_dir: Folder of the data, unless the command line names another one.
    """
    return RunResults(
        Path(output_dir),
        task_configuration(args, uid, world_size, backend, goal, torch.get_num_threads()),
        args.run_id,
        rank,
        environment=task_environment(args, dataset_dir) if rank == 0 else None,
        resume=getattr(args, "resume", False),
    )
