"""What a task's script does around its training on one worker."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Protocol

from mlbench_core.utils.pytorch.initialize import initialize_backends
from mlbench_core.utils.pytorch.memory import keep_freed_memory
from mlbench_core.utils.tracker import Tracker

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
    train: TrainFunction, prepare: Callable[[argparse.Namespace], object] | None = None
) -> Callable[..., None]:
    """Make the function that :func:`~mlbench_core.utils.task_args.task_main` calls of the one that trains.

    It connects the workers, seeds the global random generators with ``args.seed``, the same on every worker, trains,
    and logs on rank 0 whether the goal was reached.

    Args:
        train: The training.
        prepare: Called with the arguments before the workers are connected, to check or complete them; may be None.

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
                logger.info("%s", "goal reached" if tracker.goal_reached else "goal not reached")

    return main
