"""What a task's script does around its training on one worker."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mlbench_core.distributed.pytorch.initialize import initialize_backends
from mlbench_core.distributed.pytorch.memory import keep_freed_memory
from mlbench_core.tracking.tracker import Tracker

__all__ = ["TrainFunction", "worker_main"]

logger = logging.getLogger(__name__)


class TrainFunction(Protocol):
    """A task's training on one worker, once the workers are connected."""

    def __call__(
        self,
        rank: int,
        world_size: int,
        run_id: str,
        dataset_dir: str,
        ckpt_run_dir: str,
        gpu: bool,
        light: bool,
        validation_only: bool,
        args: argparse.Namespace,
        /,
    ) -> Tracker:
        """Train until the goal is reached or the budget of epochs is spent; gives the tracker of the run."""


def worker_main(
    train: TrainFunction,
    prepare: Callable[[argparse.Namespace], object] | None = None,
    *,
    keep_memory: bool = True,
) -> Callable[..., None]:
    """Make the function that :func:`~mlbench_core.controlflow.task_arguments.task_main` calls of the one that trains.

    It connects the workers, seeds the global random generators with ``args.seed``, the same on every worker, and
    trains. Rank 0 then logs whether the goal was reached, and writes the tracker's summary to ``summary.json`` in the
    task's output folder. A run that only validates writes none.

    By default it changes settings of the C library's ``malloc`` for the whole process, for its whole life: freed memory
    is kept for the next step instead of being given back to the system, so the process stays at its peak size
    (:func:`~mlbench_core.distributed.pytorch.memory.keep_freed_memory`).

    Args:
        train: The training.
        prepare: Called with the arguments before the workers are connected, to check or complete them; may be None.
        keep_memory: Whether to change these settings; False leaves ``malloc`` alone.

    Returns:
        The function for ``task_main``, whose parser must have ``--seed``.
    """

    def main(
        run_id: str,
        dataset_dir: str,
        ckpt_run_dir: str,
        output_dir: str,
        rank: int,
        backend: str,
        hosts: str | None,
        validation_only: bool,
        gpu: bool,
        light_target: bool,
        args: argparse.Namespace,
    ) -> None:
        if prepare is not None:
            prepare(args)
        if keep_memory:
            keep_freed_memory()
        with initialize_backends(
            comm_backend=backend,
            hosts=hosts,
            rank=rank,
            use_cuda=gpu,
            seed=args.seed,
            ckpt_run_dir=ckpt_run_dir,
            timeout_s=args.timeout,
        ) as (rank, world_size, _):
            tracker = train(
                rank, world_size, run_id, dataset_dir, ckpt_run_dir, gpu, light_target, validation_only, args
            )
            if rank == 0 and not validation_only:
                summary = json.dumps(tracker.summary().to_dict(), indent=2)
                Path(output_dir, "summary.json").write_text(summary + "\n", encoding="utf-8")
                logger.info("%s", "goal reached" if tracker.goal_reached else "goal not reached")

    return main
