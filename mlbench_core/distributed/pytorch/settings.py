"""Set up logging, PyTorch and the folder of checkpoints for a run."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mlbench_core.checkpoint_names import remove_checkpoints
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.devices import FCGraph
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder

__all__ = ["config_logging", "config_path", "config_pytorch"]

_LOGGERS = ("mlbench", "mlbench_core")
_FORMAT = "%(asctime)s %(name)s:%(rank)s %(levelname)s: %(message)s"


class _RankFilter(logging.Filter):
    """A filter that gives every record the worker's rank.

    It marks the handlers that :func:`config_logging` made.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = process_groups.rank()
        return True


def config_logging(
    logging_level: str | int = "INFO", logging_file: str | os.PathLike[str] | None = None
) -> Callable[[], None]:
    """Send messages of this library and task scripts to standard error and, if wanted, a file.

    Only the loggers ``mlbench`` (for scripts) and ``mlbench_core`` are touched, never the root
    logger. Each line has the worker's rank. A second call replaces the settings of the first one.

    Args:
        logging_level: Name or number of the least severe level that is shown, for example
            ``"DEBUG"``.
        logging_file: File to which lines are appended; its folder is created. None writes no file.

    Returns:
        A function that undoes this call and closes the file. Handlers of an earlier call stay
        removed.

    Raises:
        ValueError: ``logging_level`` is not a level.
        ConfigurationError: The file cannot be written.

    Example:
        >>> undo = config_logging("WARNING")
        >>> logging.getLogger("mlbench").level == logging.WARNING
        True
        >>> undo()
    """
    level = logging_level
    if not isinstance(level, int):
        # getLevelName() returns a text for a name that it does not know.
        level = logging.getLevelName(str(logging_level).upper())
    if not isinstance(level, int):
        raise ValueError(
            "logging_level must be DEBUG, INFO, WARNING, ERROR, "
            f"CRITICAL or a number, not {logging_level!r}"
        )
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if logging_file is not None:
        try:
            Path(logging_file).parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(logging_file))
        except OSError as error:
            raise ConfigurationError(
                f"the log file {os.fspath(logging_file)} cannot be written ({error}): give a "
                "logging_file in a folder of yours, or None for no file"
            ) from error
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(_RankFilter())
    loggers = list(map(logging.getLogger, _LOGGERS))
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        # A copy of the list, because the loop removes handlers.
        for old in list(logger.handlers):
            # Only our own handlers: those that a user has added stay.
            if any(isinstance(filter_, _RankFilter) for filter_ in old.filters):
                logger.removeHandler(old)
                old.close()
        for handler in handlers:
            logger.addHandler(handler)
        logger.setLevel(level)
        # Otherwise a handler of the root logger would show each line a second time.
        logger.propagate = False

    def undo() -> None:
        for logger, old_level, old_propagate in before:
            for handler in handlers:
                logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = old_propagate
        for handler in handlers:
            handler.close()

    return undo


def config_pytorch(
    use_cuda: bool = False, seed: int | None = None, cudnn_deterministic: bool = False
) -> tuple[int, int, FCGraph]:
    """Choose this worker's device and seed the random generators.

    Args:
        use_cuda: True to compute on a GPU, which becomes the current CUDA device. cuDNN may then
            try out its algorithms (``torch.backends.cudnn.benchmark``) unless
            ``cudnn_deterministic``.
        seed: Seed of the global generators of torch (all devices), NumPy and ``random``, the same
            on every worker; 0 is a seed like any other. None leaves them alone.
        cudnn_deterministic: True to let cuDNN use deterministic algorithms only (slower).

    Returns:
        ``(rank, world_size, graph)``.

    Raises:
        ValueError: ``seed`` is negative or above 2^32 - 1.
        ConfigurationError: ``use_cuda`` is set, but this machine has no GPU.
    """
    if seed is not None:
        seed_everything(seed)
    rank, world_size = process_groups.rank(), process_groups.world_size()
    graph = FCGraph(rank, world_size, use_cuda)
    if use_cuda:
        graph.assigned_gpu_id()
        torch.backends.cudnn.benchmark = not cudnn_deterministic
    if cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
    return rank, world_size, graph


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), NumPy and ``random``.

    Args:
        seed: 0 to 2^32 - 1.

    Raises:
        ValueError: ``seed`` lies outside.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2^32 - 1, not {seed}")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - data sets and scripts draw from the global generator
    random.seed(seed)


def config_path(
    ckpt_run_dir: str | os.PathLike[str] | None, delete_existing_ckpts: bool = False
) -> None:
    """Create the folder of a run's checkpoints.

    Args:
        ckpt_run_dir: The folder; None is ``checkpoints`` in the user's data folder.
        delete_existing_ckpts: True to let rank 0 delete the checkpoints that lie there, while the
            other workers wait. Only files with a checkpoint's name are deleted.

    Raises:
        ConfigurationError: The folder cannot be created, or a checkpoint cannot be deleted.
    """
    if ckpt_run_dir is None:
        folder = user_folder("checkpoints")
    else:
        folder = Path(ckpt_run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder for checkpoints {folder} cannot be made ({error}): give a ckpt_run_dir "
            "(--root-checkpoint) that you may write to"
        ) from error
    if delete_existing_ckpts:
        if process_groups.rank() == 0:
            try:
                remove_checkpoints(folder)
            except OSError as error:
                raise ConfigurationError(
                    f"a checkpoint in {folder} cannot be deleted ({error}): give a ckpt_run_dir "
                    "(--root-checkpoint) that you may write to"
                ) from error
        # Nobody may save a checkpoint before rank 0 has finished deleting.
        process_groups.barrier()
