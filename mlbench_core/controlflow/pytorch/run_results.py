"""Write the result folder of a run whose workers are a process group of torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mlbench_core.controlflow.run_results import task_configuration, task_environment
from mlbench_core.distributed.pytorch.worker_messages import ProcessGroupWorkers
from mlbench_core.results.configuration import Configuration
from mlbench_core.tracking.run_folder import RunFolder

__all__ = ["RunResults", "task_results"]


class RunResults(RunFolder):
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
            workers=ProcessGroupWorkers(),
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
    environment = None
    # Rank 0 alone writes it, and its checksums of the data take a while.
    if rank == 0:
        environment = task_environment(args, dataset_dir)
    return RunResults(
        Path(output_dir),
        task_configuration(args, uid, world_size, backend, goal, torch.get_num_threads()),
        args.run_id,
        rank,
        environment=environment,
        resume=getattr(args, "resume", False),
    )
