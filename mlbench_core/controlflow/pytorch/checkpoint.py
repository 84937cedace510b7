"""Checkpoints that survive a kill at any moment and hold no code.

A checkpoint is written to a temporary file in the same folder, synchronized to the disk and then renamed, so under a
checkpoint's name there is always a complete file. It holds tensors and plain Python values only:
``torch.load(path, weights_only=True)`` reads it. Its checksums are verified on reading (torch itself does not).
"""

from __future__ import annotations

import enum
import functools
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbench_core import checkpoint_names as names
from mlbench_core.arguments import check_at_least
from mlbench_core.checkpoint_names import remove_checkpoints
from mlbench_core.controlflow.pytorch import checkpoint_files as files
from mlbench_core.controlflow.pytorch import checkpoint_state as states
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import CheckpointNotFoundError

__all__ = ["CheckpointFreq", "Checkpointer", "determine_restore_ckpt_path", "remove_checkpoints"]

_Path = str | os.PathLike[str]


class CheckpointFreq(enum.IntEnum):
    """Which epochs a :class:`Checkpointer` keeps; ``CheckpointFreq("best")`` is the same as ``CheckpointFreq.BEST``."""

    ALL = 1
    """Every epoch, and a copy of the best one."""
    BEST = 2
    """Only the best epoch so far."""
    NONE = 3
    """Nothing is saved."""

    @classmethod
    def _missing_(cls, value: object) -> CheckpointFreq | None:
        return next((freq for freq in cls if freq.name.lower() == value), None)


def _accepting_an_epoch(save: Callable[..., None]) -> Callable[..., None]:
    """Let ``save`` take the epoch in front of ``is_best``, where version 3.0.0 had it."""

    @functools.wraps(save)
    def wrapper(
        self: Checkpointer, tracker: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_epoch = bool(args) and isinstance(args[0], numbers.Integral) and not isinstance(args[0], bool)
        if is_epoch and ("is_best" in kwargs or (len(args) > 1 and _is_flag(args[1]))):
            kwargs["epoch"], *args = args  # type: ignore[assignment]
        save(self, tracker, model, optimizer, scheduler, *args, **kwargs)

    return wrapper


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, int, np.bool_, np.integer, torch.Tensor))


class Checkpointer:
    """Saves a run's state after an epoch and brings it back.

    With ``CheckpointFreq.ALL`` the folder holds ``{epoch}_{rank}.pth.tar``, which each worker writes for itself, and
    ``model_best.pth.tar``, which rank 0 writes. With ``CheckpointFreq.BEST`` it holds the latter, and of each other
    worker the part ``model_best.{id}.{rank}of{k}.pth.tar`` that it does not have in common with rank 0: its random
    generators, tracker, BatchNorm statistics and what its optimizer's aggregation remembers, such as an error memory;
    where an optimizer averages weights instead of gradients, everything. So all workers need one folder. The state of
    an optimizer that is not this library's counts as common.

    A checkpoint has the states of model, optimizer, scheduler and tracker, of the global random generators of torch
    (CPU, and the current GPU if one is used), NumPy and ``random``, and of whatever else it is given: a run that goes
    on from it computes bit by bit what the uninterrupted run would have, on a CPU.

    A run that was killed while it saved goes on from the save before. If parts are missing and there is no save before,
    or the run goes on with another number of workers, each worker takes its own file or, without one, rank 0's. The
    memory of its optimizer's aggregation then starts afresh, with one warning.

    With ``save_stats`` each worker also writes ``{epoch}_{rank}.json`` at every save: what its tracker recorded.

    Args:
        ckpt_run_dir: Folder of the checkpoints; made at the first save.
        rank: This worker's rank.
        freq: Which epochs are kept.
        save_stats: Whether the tracker's state and statistics are saved.

    Raises:
        ValueError: ``freq`` is not a frequency, or ``rank`` is negative.

    Example:
        >>> import tempfile
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpointer = Checkpointer(folder, rank=0, freq=CheckpointFreq.ALL, save_stats=False)
        ...     checkpointer.save(SimpleNamespace(current_epoch=3), model, optimizer, None, is_best=True)
        ...     sorted(os.listdir(folder))
        ['3_0.pth.tar', 'model_best.pth.tar']
    """

    def __init__(
        self,
        ckpt_run_dir: _Path,
        rank: int,
        freq: CheckpointFreq = CheckpointFreq.BEST,
        save_stats: bool = True,
    ) -> None:
        check_at_least("rank", rank, 0)
        self.dirname = os.fspath(ckpt_run_dir)
        self.rank = int(rank)
        try:
            self.freq = CheckpointFreq(freq)
        except ValueError:
            known = ", ".join(f"CheckpointFreq.{freq.name}" for freq in CheckpointFreq)
            raise ValueError(f"freq is {freq!r}; it must be one of {known}") from None
        self.save_stats = save_stats
        self._run: str | None = None
        self._last_epoch: int | None = None
        self._saves_of_epoch = 0

    @_accepting_an_epoch
    def save(
        self,
        tracker: Any,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        is_best: bool,
        sampler: Any = None,
        extra: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Save the state at the end of an epoch. Every worker must call it; no worker waits for another.

        With ``CheckpointFreq.ALL`` the epoch's file is written, and rank 0 writes ``model_best.pth.tar`` too if
        ``is_best``. With ``BEST``, only if ``is_best``, rank 0 writes ``model_best.pth.tar`` and the others their parts
        of it. With ``NONE`` nothing is written.

        As in version 3.0.0, ``save(tracker, model, optimizer, scheduler, epoch, is_best)`` works too.

        Args:
            tracker: Has ``current_epoch``; its ``state_dict()`` is saved if it has one and ``save_stats`` is set.
            model: The model.
            optimizer: Anything with ``state_dict()``, or None.
            scheduler: Anything with ``state_dict()``, or None.
            is_best: Whether this is the best epoch so far, the same on every worker.
            sampler: What decides the order of the samples: an object with ``state_dict()``, a ``torch.Generator``, or
                a sampler with ``set_epoch``. Not needed if the order comes from torch's global generator.
            extra: More such objects by name, for example a gradient scaler.
            epoch: The epoch; None takes ``tracker.current_epoch``.

        Raises:
            CheckpointError: Writing failed (disk full, no permission). Earlier files are untouched.
            TypeError: A state has something in it that is not a tensor or plain Python value.
        """
        if self.freq is CheckpointFreq.NONE:
            return
        epoch = int(tracker.current_epoch if epoch is None else epoch)
        if self.freq is CheckpointFreq.ALL or is_best:
            self._save(tracker, model, optimizer, scheduler, bool(is_best), sampler, extra, epoch)
        if self.save_stats:
            self._save_statistics(tracker, epoch)

    def _save(
        self,
        tracker: Any,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        is_best: bool,
        sampler: Any,
        extra: Mapping[str, Any] | None,
        epoch: int,
    ) -> None:
        folder, world_size = Path(self.dirname), process_groups.world_size()
        if self.freq is CheckpointFreq.BEST and self.rank > 0 and self.rank >= world_size:
            return  # torch does not know of other workers, so nobody could find this part
        state = {
            "format": files.FORMAT,
            "save": self._name_save(epoch),
            "epoch": epoch,
            "rank": self.rank,
            "world_size": world_size,
            "freq": self.freq.name.lower(),
            "save_stats": bool(self.save_stats),
            "model": states.capture("model", model),
            "optimizer": None if optimizer is None else states.capture("optimizer", optimizer),
            "scheduler": None if scheduler is None else states.capture("scheduler", scheduler),
            "tracker": states.capture_tracker(tracker) if self.save_stats else None,
            "sampler": None if sampler is None else states.capture("sampler", sampler),
            "extra": {name: states.capture(name, value) for name, value in (extra or {}).items()},
            "rng": states.rng_state(),
        }
        if self.freq is CheckpointFreq.ALL:
            files.write(folder / names.epoch_name(epoch, self.rank), state, self.rank)
        if is_best and self.rank == 0:
            files.write(folder / names.BEST_NAME, state, self.rank)
        if self.freq is CheckpointFreq.BEST:
            self._save_part(folder, state, model, optimizer, world_size)

    def _save_part(
        self, folder: Path, state: Mapping[str, Any], model: torch.nn.Module, optimizer: Any, world_size: int
    ) -> None:
        """Write this worker's part of the best epoch, and delete the parts of epochs before if it is the last."""
        part = names.part_name(state["save"], self.rank, world_size)
        if self.rank > 0:
            files.write(folder / part, states.own_part(state, model, optimizer), self.rank)
        elif world_size > 1:
            files.share_best(folder, part, self.rank)
        files.tidy(folder, state["save"], self.rank, world_size)

    def _name_save(self, epoch: int) -> str:
        """Return the id of this save, the same on every worker."""
        self._saves_of_epoch = self._saves_of_epoch + 1 if epoch == self._last_epoch else 0
        self._last_epoch = epoch
        if self._run is None:
            self._run = files.name_run()
        return f"{epoch}-{self._run}-{self._saves_of_epoch}"

    def _save_statistics(self, tracker: Any, epoch: int) -> None:
        """Write what a tracker recorded, for people and plotting scripts."""
        records = getattr(tracker, "records", None)
        if not isinstance(records, Mapping) or not records:
            return
        plain = {
            str(name): {str(e): float(v) if math.isfinite(v) else None for e, v in values.items()}
            for name, values in records.items()
        }
        run_id = getattr(tracker, "run_id", None)
        content = {
            "run_id": None if run_id is None else str(run_id),
            "rank": self.rank,
            "epoch": epoch,
            "records": plain,
        }
        path = Path(self.dirname, names.statistics_name(epoch, self.rank))
        files.write(path, json.dumps(content, allow_nan=False).encode(), self.rank)

    @staticmethod
    def load(
        ckpt_run_dir: _Path,
        rank: int,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        sampler: Any = None,
        extra: Mapping[str, Any] | None = None,
        tracker: Any = None,
        epoch: int | None = None,
    ) -> tuple[Checkpointer, torch.nn.Module, Any, Any, Any]:
        """Bring back the state of the newest epoch that was saved. Every worker must call it.

        A damaged file, and a save that a kill interrupted, is passed over with a warning for the save before it;
        ``model_best.pth.tar`` is the last resort, and what is loaded if it is the only file. The random generators are
        restored if the file comes from this same rank. See the class for what each worker gets of its own.

        Args:
            ckpt_run_dir: Folder of the checkpoints.
            rank: This worker's rank.
            model: Gets the saved weights.
            optimizer: Gets the saved state; None to leave it out.
            scheduler: Gets the saved state; None to leave it out.
            sampler: As in :meth:`save`; gets the saved state.
            extra: As in :meth:`save`; each gets its saved state.
            tracker: A tracker with ``load_state_dict`` to restore, so that it keeps its metrics and goal. By default a
                new :class:`~mlbench_core.tracking.tracker.Tracker` is made from the saved state. It knows its metrics
                by name, and it has the goal if that is one of :mod:`mlbench_core.evaluation.goals`.
            epoch: Load this epoch, and no other.

        Returns:
            ``(checkpointer, model, optimizer, scheduler, tracker)``: a checkpointer with the frequency of the saved
            one, the objects given, and the tracker. Where no tracker was saved it is ``tracker`` as given, with its
            ``current_epoch`` set.

        Raises:
            CheckpointNotFoundError: There is no checkpoint. It is a CheckpointError and a FileNotFoundError.
            CheckpointError: None can be read, or it does not fit the objects given.
        """
        save, state = files.read_newest(Path(ckpt_run_dir), rank, epoch)
        path = save.path
        states.restore_model(path, model, state["model"])
        if optimizer is not None:
            states.restore_optimizer(path, optimizer, state, rank, save.lacks_parts)
        for name, target in (("scheduler", scheduler), ("sampler", sampler)):
            if target is not None:
                states.restore(path, name, target, state[name])
        for name, target in (extra or {}).items():
            states.restore(path, name, target, state["extra"].get(name))
        tracker = states.restore_tracker(path, state, rank, tracker)
        if state["rank"] == rank:
            states.set_rng_state(state["rng"])
        checkpointer = Checkpointer(ckpt_run_dir, rank, CheckpointFreq(state["freq"]), state["save_stats"])
        return checkpointer, model, optimizer, scheduler, tracker

    @staticmethod
    def load_model_by_epoch(ckpt_run_dir: _Path, rank: int, epoch: int, model: torch.nn.Module) -> torch.nn.Module:
        """Load only the weights of one epoch.

        Args:
            ckpt_run_dir: Folder of the checkpoints.
            rank: Rank of the worker that saved it.
            epoch: The epoch.
            model: Gets the weights.

        Returns:
            ``model``.

        Raises:
            CheckpointNotFoundError: There is no such file. It is a CheckpointError and a FileNotFoundError.
            CheckpointError: It is damaged, or it does not fit the model.
        """
        path = Path(ckpt_run_dir, names.epoch_name(epoch, rank))
        try:
            state = files.read(path)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"there is no checkpoint of epoch {epoch} of rank {rank} in {ckpt_run_dir}; looked for {path.name}"
            ) from None
        states.restore_model(path, model, state["model"])
        return model

    @staticmethod
    def checkpoint_exists(ckpt_run_dir: _Path, rank: int, epoch: int) -> bool:
        """Whether worker ``rank`` saved ``epoch`` in this folder."""
        return Path(ckpt_run_dir, names.epoch_name(epoch, rank)).is_file()


def determine_restore_ckpt_path(rank: int, checkpoint_root: _Path, run_id: str | int) -> str:
    """Return the path of the file that :meth:`Checkpointer.load` would go on from.

    Args:
        rank: The worker's rank.
        checkpoint_root: Folder of the checkpoints, or a folder that has a folder ``run_id`` with them.
        run_id: The run's id.

    Returns:
        The path of the newest whole checkpoint: the worker's own, or rank 0's if it has none or it is a part.

    Raises:
        CheckpointNotFoundError: There is none. It is a CheckpointError and a FileNotFoundError.
    """
    folder = Path(checkpoint_root, str(run_id))
    folder = folder if folder.is_dir() else Path(checkpoint_root)
    for candidate in files.find(folder, rank):
        path = candidate.first if candidate.first is not None and names.is_part(candidate.path.name) else candidate.path
        if path.is_file():
            return os.fspath(path)
    raise CheckpointNotFoundError(f"there is no checkpoint of rank {rank} in {folder}")
