"""Save and load checkpoints that survive a kill at any moment and hold no code.

A checkpoint is written to a temporary file in the same folder, synchronized to the disk and then
renamed. So the file under the name of a checkpoint is always complete. It holds tensors and plain
Python values only: ``torch.load(path, weights_only=True)`` reads it. Its checksums are verified on
reading (torch itself does not).
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
from mlbench_core.errors import CheckpointError, CheckpointNotFoundError, MLBenchError

__all__ = ["CheckpointFreq", "Checkpointer", "determine_restore_ckpt_path", "remove_checkpoints"]

_Path = str | os.PathLike[str]


class CheckpointFreq(enum.IntEnum):
    """The epochs that a :class:`Checkpointer` keeps.

    ``CheckpointFreq("best")`` is ``CheckpointFreq.BEST``.
    """

    ALL = 1
    """Every epoch, and a copy of the best one."""
    BEST = 2
    """Only the best epoch so far."""
    NONE = 3
    """Nothing is saved."""

    @classmethod
    def _missing_(cls, value: object) -> CheckpointFreq | None:
        for freq in cls:
            if freq.name.lower() == value:
                return freq
        return None


def _accepting_an_epoch(save: Callable[..., None]) -> Callable[..., None]:
    """Let ``save`` take the epoch before ``is_best``, the order of version 3.0.0."""

    @functools.wraps(save)
    def wrapper(
        self: Checkpointer,
        tracker: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        first, second = (*args, None, None)[:2]
        # True is an Integral too, but it is never an epoch.
        is_epoch = isinstance(first, numbers.Integral) and not isinstance(first, bool)
        # The second argument of the current order is a sampler, which has none of these types.
        is_flag = isinstance(second, (bool, int, np.bool_, np.integer, torch.Tensor))
        if is_epoch and ("is_best" in kwargs or is_flag):
            kwargs["epoch"], *args = args  # type: ignore[assignment]
        save(self, tracker, model, optimizer, scheduler, *args, **kwargs)

    return wrapper


class Checkpointer:
    """A checkpointer that saves the state of a run after an epoch and restores it.

    With ``CheckpointFreq.ALL``, each worker writes ``{epoch}_{rank}.pth.tar``, and rank 0 writes
    ``model_best.pth.tar``.

    With ``CheckpointFreq.BEST``, rank 0 writes ``model_best.pth.tar``. Each other worker writes
    ``model_best.{id}.{rank}of{k}.pth.tar`` with the part of its state that differs from rank 0. The
    part has its random generators, its tracker, BatchNorm statistics and the memory of its
    optimizer's aggregation, such as an error memory. If an optimizer averages weights instead of
    gradients, the part is the whole state. All workers need the same folder. The state of an
    optimizer from outside this library counts as equal on all workers.

    A checkpoint has the states of model, optimizer, scheduler and tracker, and of other objects
    that are given to it. It also has the global random generators of torch (CPU, and the current
    GPU if one is used), NumPy and ``random``. On a CPU, a run that continues from it gives bit by
    bit the results of an uninterrupted run.

    A run that was killed while it saved continues from the previous save. Each worker takes its own
    file, or rank 0's if it has none, in two cases: parts are missing without a previous save, or
    the number of workers differs. The memory of its optimizer's aggregation is then reset, with one
    warning.

    With ``save_stats``, each worker also writes the records of its tracker to
    ``{epoch}_{rank}.json`` at every save.

    Args:
        ckpt_run_dir: Folder of the checkpoints; created at the first save.
        rank: This worker's rank.
        freq: The epochs to keep.
        save_stats: True to save the state and the statistics of the tracker.

    Raises:
        ValueError: ``freq`` is not a frequency, or ``rank`` is negative.

    Example:
        >>> import tempfile
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpointer = Checkpointer(folder, 0, CheckpointFreq.ALL, save_stats=False)
        ...     tracker = SimpleNamespace(current_epoch=3)
        ...     checkpointer.save(tracker, model, optimizer, None, is_best=True)
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
            allowed = ", ".join(f"CheckpointFreq.{name}" for name in CheckpointFreq.__members__)
            raise ValueError(f"freq must be one of {allowed}, not {freq!r}") from None
        self.save_stats = save_stats
        self._run: str | None = None
        # An epoch that is validated in parts is saved several times; each save needs its own id.
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
        """Save the state at the end of an epoch.

        Every worker must call it; no worker waits for another.

        With ``CheckpointFreq.ALL``, every worker writes its file of the epoch. Rank 0 also writes
        ``model_best.pth.tar`` if ``is_best``. With ``BEST``, files are written only if ``is_best``:
        rank 0 writes ``model_best.pth.tar``, and the others write their parts. With ``NONE``,
        nothing is written.

        As in version 3.0.0, ``save(tracker, model, optimizer, scheduler, epoch, is_best)`` works
        too.

        Args:
            tracker: Has ``current_epoch``; its ``state_dict()`` is saved if it has one and
                ``save_stats`` is set.
            model: The model.
            optimizer: Anything with ``state_dict()``, or None.
            scheduler: Anything with ``state_dict()``, or None.
            is_best: True if this is the best epoch so far; the same on every worker.
            sampler: Source of the order of the samples: an object with ``state_dict()``, a
                ``torch.Generator``, or a sampler with ``set_epoch``. Not needed if the order comes
                from torch's global generator.
            extra: More such objects by name, for example a gradient scaler.
            epoch: The epoch; None takes ``tracker.current_epoch``.

        Raises:
            CheckpointError: Writing failed (disk full, no permission). Earlier files are unchanged.
            TypeError: A state has a value that is not a tensor or a plain Python value.
        """
        if self.freq is CheckpointFreq.NONE:
            return
        if epoch is None:
            epoch = tracker.current_epoch
        epoch = int(epoch)
        folder, world_size = Path(self.dirname), process_groups.world_size()
        keeps_best = self.freq is CheckpointFreq.BEST
        # With Horovod torch does not know the other workers, so the part of a higher rank could not
        # be found.
        is_unknown = keeps_best and self.rank >= world_size
        if (is_best or not keeps_best) and not is_unknown:
            extra_states = {}
            for name, target in (extra or {}).items():
                extra_states[name] = states.capture(name, target)
            state = {
                "format": files.FORMAT,
                # The id and the number of workers show on loading if all files of this save exist.
                "save": self._name_save(epoch),
                "epoch": epoch,
                "rank": self.rank,
                "world_size": world_size,
                "freq": self.freq.name.lower(),
                "save_stats": bool(self.save_stats),
                "model": states.capture("model", model),
                "optimizer": states.capture_optional("optimizer", optimizer),
                "scheduler": states.capture_optional("scheduler", scheduler),
                "tracker": None,
                "sampler": states.capture_optional("sampler", sampler),
                "extra": extra_states,
                "rng": states.rng_state(),
            }
            if self.save_stats:
                # Last, because it waits for the GPU and reads the time, energy and peak of memory.
                state["tracker"] = states.capture_tracker(tracker)
            if not keeps_best:
                files.write(folder / names.epoch_name(epoch, self.rank), state, self.rank)
            # One worker writes this file, because all workers share the folder.
            if is_best and self.rank == 0:
                files.write(folder / names.BEST_NAME, state, self.rank)
            if keeps_best:
                part = None
                # The file of rank 0 has the whole state.
                if self.rank > 0:
                    part = states.own_part(state, model, optimizer)
                files.write_part(folder, state["save"], part, self.rank, world_size)
        if self.save_stats:
            self._save_statistics(tracker, epoch)

    def _name_save(self, epoch: int) -> str:
        """Return the id of this save, the same on every worker."""
        self._saves_of_epoch += 1
        if epoch != self._last_epoch:
            self._last_epoch, self._saves_of_epoch = epoch, 0
        if self._run is None:
            self._run = files.name_run()
        return f"{epoch}-{self._run}-{self._saves_of_epoch}"

    def _save_statistics(self, tracker: Any, epoch: int) -> None:
        """Write the records of a tracker, for people and plotting scripts."""
        records = getattr(tracker, "records", None)
        if not isinstance(records, Mapping) or not records:
            return
        plain: dict[str, dict[str, float | None]] = {}
        for name, by_epoch in records.items():
            numbers_by_epoch: dict[str, float | None] = {}
            plain[str(name)] = numbers_by_epoch
            for epoch_of_value, value in by_epoch.items():
                # JSON has no infinities and no nan, so they become null.
                number = None
                if math.isfinite(value):
                    number = float(value)
                numbers_by_epoch[str(epoch_of_value)] = number
        run_id = getattr(tracker, "run_id", None)
        if run_id is not None:
            run_id = str(run_id)
        content = {"run_id": run_id, "rank": self.rank, "epoch": epoch, "records": plain}
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
        """Restore the state of the newest epoch that was saved. Every worker must call it.

        If a file is damaged, or a kill interrupted a save, the previous save is loaded, with a
        warning. ``model_best.pth.tar`` is loaded last, or if it is the only file. The random
        generators are restored only if the file comes from this rank. The class describes the parts
        that differ by worker.

        Args:
            ckpt_run_dir: Folder of the checkpoints.
            rank: This worker's rank.
            model: Receives the saved weights.
            optimizer: Receives the saved state; None to leave it out.
            scheduler: Receives the saved state; None to leave it out.
            sampler: As in :meth:`save`; receives the saved state.
            extra: As in :meth:`save`; each object receives its saved state.
            tracker: A tracker with ``load_state_dict`` to restore, so that it keeps its metrics and
                goal. By default a new :class:`~mlbench_core.tracking.tracker.Tracker` is made from
                the saved state. It has the names of its metrics, and its goal if that is one of
                :mod:`mlbench_core.evaluation.goals`.
            epoch: Load only this epoch; None for the newest.

        Returns:
            ``(checkpointer, model, optimizer, scheduler, tracker)``: a checkpointer with the
            frequency of the saved one, the objects given, and the tracker. If no tracker was saved,
            it is the given ``tracker`` with its ``current_epoch`` set.

        Raises:
            CheckpointNotFoundError: The folder has no checkpoint. It is a CheckpointError and a
                FileNotFoundError.
            CheckpointError: No checkpoint can be read, or it does not fit the objects given.
        """
        save, state = files.read_newest(Path(ckpt_run_dir), rank, epoch)
        path = save.path
        try:
            states.restore_model(path, model, state["model"])
            if optimizer is not None:
                states.restore_optimizer(path, optimizer, state, rank, save.lacks_parts)
            for name, target in (("scheduler", scheduler), ("sampler", sampler)):
                if target is not None:
                    states.restore(path, name, target, state[name])
            for name, target in (extra or {}).items():
                states.restore(path, name, target, state["extra"].get(name))
            tracker = states.restore_tracker(path, state, rank, tracker)
            # Random states of another rank would make two workers draw the same numbers.
            if state["rank"] == rank:
                states.set_rng_state(state["rng"])
            checkpointer = Checkpointer(
                ckpt_run_dir, rank, CheckpointFreq(state["freq"]), state["save_stats"]
            )
        except MLBenchError:
            raise
        # The checksums are right, but an entry is missing or has a type that no version writes.
        except states.MISFIT_ERRORS as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {type(error).__name__}: {error}"
            ) from error
        return checkpointer, model, optimizer, scheduler, tracker

    @staticmethod
    def load_model_by_epoch(
        ckpt_run_dir: _Path, rank: int, epoch: int, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Load only the weights of one epoch.

        Args:
            ckpt_run_dir: Folder of the checkpoints.
            rank: Rank of the worker that saved it.
            epoch: The epoch.
            model: Receives the weights.

        Returns:
            ``model``.

        Raises:
            CheckpointNotFoundError: The file does not exist. It is a CheckpointError and a
                FileNotFoundError.
            CheckpointError: The file is damaged, or it does not fit the model.
        """
        path = Path(ckpt_run_dir, names.epoch_name(epoch, rank))
        try:
            state = files.read(path)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"there is no checkpoint of epoch {epoch} of rank {rank} in {ckpt_run_dir}; "
                f"looked for {path.name}"
            ) from None
        states.restore_model(path, model, state["model"])
        return model

    @staticmethod
    def checkpoint_exists(ckpt_run_dir: _Path, rank: int, epoch: int) -> bool:
        """Return True if worker ``rank`` saved ``epoch`` in this folder."""
        return Path(ckpt_run_dir, names.epoch_name(epoch, rank)).is_file()


def determine_restore_ckpt_path(rank: int, checkpoint_root: _Path, run_id: str | int) -> str:
    """Return the path of the file that :meth:`Checkpointer.load` would continue from.

    Args:
        rank: The worker's rank.
        checkpoint_root: Folder of the checkpoints, or a folder that has a folder ``run_id`` with
            them.
        run_id: The run's id.

    Returns:
        The path of the newest whole checkpoint: the worker's own, or rank 0's if the worker has
        none or only a part.

    Raises:
        CheckpointNotFoundError: The folder has no checkpoint. It is a CheckpointError and a
            FileNotFoundError.
    """
    folder = Path(checkpoint_root, str(run_id))
    if not folder.is_dir():
        folder = Path(checkpoint_root)
    for candidate in files.find(folder, rank):
        path = candidate.path
        # A part alone cannot be loaded, so the path is then that of rank 0's whole file.
        if candidate.first is not None and names.is_part(path.name):
            path = candidate.first
        if path.is_file():
            return os.fspath(path)
    raise CheckpointNotFoundError(f"there is no checkpoint of rank {rank} in {folder}")
