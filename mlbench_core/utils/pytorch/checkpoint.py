"""Checkpoints that survive a kill at any moment and hold no code.

A checkpoint is written to a temporary file in the same folder, synchronised to the disk and then renamed, so under a
checkpoint's name there is always a complete file. It holds tensors and plain Python values only:
``torch.load(path, weights_only=True)`` reads it. Its checksums are verified on reading (torch itself does not).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import pickle
import random
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbench_core.errors import CheckpointError

__all__ = ["CheckpointFreq", "Checkpointer", "remove_checkpoints"]

_log = logging.getLogger(__name__)

_BEST_NAME = "model_best.pth.tar"
_EPOCH_NAME = re.compile(r"(\d+)_(\d+)\.pth\.tar")
_TEMPORARY_NAME = re.compile(r"\.saving_\d+\.tmp")
_FORMAT = 1

_Path = str | os.PathLike[str]


class CheckpointFreq(str, enum.Enum):
    """Which epochs a :class:`Checkpointer` keeps."""

    ALL = "all"
    """Every epoch, and a copy of the best one."""
    BEST = "best"
    """Only the best epoch so far."""
    NONE = "none"
    """Nothing is saved."""


class Checkpointer:
    """Saves a run's state after an epoch and brings it back.

    The folder holds ``{epoch}_{rank}.pth.tar`` (each worker writes its own) and ``model_best.pth.tar`` (rank 0 writes
    it). A checkpoint has the states of model, optimizer, scheduler and tracker, of the global random generators of
    torch (CPU, and the current GPU if one is used), NumPy and ``random``, and of whatever else it is given: a run that
    goes on from it computes bit by bit what the uninterrupted run would have, on a CPU.

    Args:
        ckpt_run_dir: Folder of the checkpoints; made at the first save.
        rank: This worker's rank.
        freq: Which epochs are kept.
        save_stats: Whether the tracker's state is saved.

    Raises:
        ValueError: ``freq`` is no frequency, or ``rank`` is negative.

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
        if rank < 0:
            raise ValueError(f"rank is {rank}; it must be at least 0")
        self.dirname = os.fspath(ckpt_run_dir)
        self.rank = int(rank)
        try:
            self.freq = CheckpointFreq(freq)
        except ValueError:
            raise ValueError(f"freq is {freq!r}; it must be one of {', '.join(map(str, CheckpointFreq))}") from None
        self.save_stats = save_stats

    def save(
        self,
        tracker: Any,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        is_best: bool,
        sampler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state at the end of epoch ``tracker.current_epoch``.

        With ``CheckpointFreq.ALL`` the epoch's file is written, and ``model_best.pth.tar`` too if ``is_best``; with
        ``BEST`` only the latter, and only if ``is_best``; with ``NONE`` nothing. Rank 0 alone writes
        ``model_best.pth.tar``.

        Args:
            tracker: Has ``current_epoch``; its ``state_dict()`` is saved if it has one and ``save_stats`` is set.
            model: The model.
            optimizer: Anything with ``state_dict()``, or None.
            scheduler: Anything with ``state_dict()``, or None.
            is_best: Whether this is the best epoch so far.
            sampler: What decides the order of the samples: an object with ``state_dict()``, a ``torch.Generator``, or
                a sampler with ``set_epoch``. Not needed where the order comes from torch's global generator.
            extra: More such objects by name, for example a gradient scaler.

        Raises:
            CheckpointError: Writing failed (disk full, no permission). Earlier files are untouched.
            TypeError: A state has something in it that is not a tensor or plain Python value.
        """
        names = self._names_to_write(int(tracker.current_epoch), is_best)
        if not names:
            return
        state = {
            "format": _FORMAT,
            "epoch": int(tracker.current_epoch),
            "rank": self.rank,
            "freq": self.freq.value,
            "save_stats": bool(self.save_stats),
            "model": _capture("model", model),
            "optimizer": None if optimizer is None else _capture("optimizer", optimizer),
            "scheduler": None if scheduler is None else _capture("scheduler", scheduler),
            "tracker": _capture_tracker(tracker) if self.save_stats else None,
            "sampler": None if sampler is None else _capture("sampler", sampler),
            "extra": {name: _capture(name, value) for name, value in (extra or {}).items()},
            "rng": _rng_state(),
        }
        for name in names:
            _write(Path(self.dirname, name), state, self.rank)

    def _names_to_write(self, epoch: int, is_best: bool) -> list[str]:
        names = []
        if self.freq is CheckpointFreq.ALL:
            names.append(_epoch_name(epoch, self.rank))
        if self.freq is not CheckpointFreq.NONE and is_best and self.rank == 0:
            names.append(_BEST_NAME)
        return names

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
        """Bring back the state of the newest epoch that this worker saved.

        A damaged file is passed over with a warning for the epoch before it; ``model_best.pth.tar`` is the last
        resort, and what is loaded where it is the only file. The random generators are restored if the file comes from
        this same rank.

        Args:
            ckpt_run_dir: Folder of the checkpoints.
            rank: This worker's rank.
            model: Gets the saved weights.
            optimizer: Gets the saved state; None to leave it out.
            scheduler: Gets the saved state; None to leave it out.
            sampler: As in :meth:`save`; gets the saved state.
            extra: As in :meth:`save`; each gets its saved state.
            tracker: A tracker with ``load_state_dict`` to restore, so that it keeps its metrics and goal. By default a
                new :class:`~mlbench_core.utils.tracker.Tracker` is made from the saved state.
            epoch: Load this epoch, and no other.

        Returns:
            ``(checkpointer, model, optimizer, scheduler, tracker)``: a checkpointer with the frequency of the saved
            one, the objects given, and the tracker. Where no tracker was saved it is ``tracker`` as given, with its
            ``current_epoch`` set.

        Raises:
            CheckpointError: There is no checkpoint, none can be read, or it does not fit the objects given.
        """
        path, state = _newest_readable(Path(ckpt_run_dir), rank, epoch)
        _restore(path, "model", model, state["model"])
        for name, target in (("optimizer", optimizer), ("scheduler", scheduler), ("sampler", sampler)):
            if target is not None:
                _restore(path, name, target, state[name])
        for name, target in (extra or {}).items():
            _restore(path, name, target, state["extra"].get(name))
        tracker = _restored_tracker(path, state, rank, tracker)
        if state["rank"] == rank:
            _set_rng_state(state["rng"])
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
            CheckpointError: There is no such file, it is damaged, or it does not fit the model.
        """
        path, state = _newest_readable(Path(ckpt_run_dir), rank, epoch)
        _restore(path, "model", model, state["model"])
        return model

    @staticmethod
    def checkpoint_exists(ckpt_run_dir: _Path, rank: int, epoch: int) -> bool:
        """Whether worker ``rank`` saved ``epoch`` in this folder."""
        return Path(ckpt_run_dir, _epoch_name(epoch, rank)).is_file()


def remove_checkpoints(ckpt_run_dir: _Path) -> None:
    """Delete the checkpoints in a folder, and what interrupted saves left; files with other names stay.

    Args:
        ckpt_run_dir: The folder; need not exist.
    """
    folder = Path(ckpt_run_dir)
    for path in folder.iterdir() if folder.is_dir() else ():
        ours = path.name == _BEST_NAME or _EPOCH_NAME.fullmatch(path.name) or _TEMPORARY_NAME.fullmatch(path.name)
        if ours and path.is_file():
            path.unlink(missing_ok=True)


def _epoch_name(epoch: int, rank: int) -> str:
    return f"{epoch}_{rank}.pth.tar"


# ---- files


def _write(path: Path, state: Mapping[str, Any], rank: int) -> None:
    """Write a checkpoint so that ``path`` is at any moment the old file or the complete new one."""
    temporary = path.with_name(f".saving_{rank}.tmp")  # one name per rank: what a kill leaves is overwritten next time
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(temporary):
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        reason = _os_error(error) or error
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({reason}): free space or choose another folder with "
            f"--root-checkpoint; checkpoints written earlier are intact"
        ) from error


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last through a power cut, where the system can synchronise folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind ``error``: torch raises one of its own when a write fails."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _read(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint onto the CPU."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"the checkpoint {path} is damaged: the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged or holds pickled code, which is not run (files of version 3.0 do): "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read, it is damaged or no checkpoint: {error}"
        ) from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"the checkpoint {path} has format {found!r}; this version reads format {_FORMAT}")
    return state


def _newest_readable(folder: Path, rank: int, epoch: int | None) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of ``rank`` (or that of ``epoch``) that can be read, and its path."""
    if epoch is not None:
        candidates = [folder / _epoch_name(epoch, rank)]
    else:
        epochs = [match for match in map(_EPOCH_NAME.fullmatch, _names(folder)) if match and int(match[2]) == rank]
        epochs.sort(key=lambda match: int(match[1]), reverse=True)
        candidates = [folder / match[0] for match in epochs] + [folder / _BEST_NAME]
    failures = []
    for path in candidates:
        try:
            return path, _read(path)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            failures.append(str(error))
            if path is not candidates[-1]:
                _log.warning("%s; trying the one before it", error)
    if failures:
        raise CheckpointError("; ".join(failures))
    wanted = f"of epoch {epoch} " if epoch is not None else ""
    raise CheckpointError(
        f"there is no checkpoint {wanted}of rank {rank} in {folder}; looked for "
        f"{_epoch_name(epoch, rank) if epoch is not None else f'<epoch>_{rank}.pth.tar and {_BEST_NAME}'}"
    )


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


# ---- states


def _capture(name: str, target: Any) -> Any:
    """The state of an object, checked to be plain."""
    if isinstance(target, torch.Generator):
        return {"generator": target.get_state()}
    if hasattr(target, "state_dict"):
        return _plain(target.state_dict(), name)
    if hasattr(target, "set_epoch") and hasattr(target, "epoch"):
        return {"epoch": int(target.epoch)}
    raise TypeError(
        f"{name} is a {type(target).__name__}; a checkpoint can hold objects with state_dict() and load_state_dict(), "
        f"torch.Generator, and samplers with epoch and set_epoch()"
    )


def _restore(path: Path, name: str, target: Any, state: Any) -> None:
    """Give an object the state that :func:`_capture` took."""
    if state is None:
        raise CheckpointError(f"the checkpoint {path} has no state of {name}; it was saved without one")
    try:
        if isinstance(target, torch.Generator):
            target.set_state(state["generator"])
        elif hasattr(target, "load_state_dict"):
            target.load_state_dict(state)
        else:
            target.set_epoch(state["epoch"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} does not fit the {name} it is loaded into: {error}") from error


def _capture_tracker(tracker: Any) -> dict[str, Any]:
    state = _plain(tracker.state_dict(), "tracker") if hasattr(tracker, "state_dict") else None
    return {"run_id": _plain(getattr(tracker, "run_id", None), "tracker.run_id"), "state": state}


def _restored_tracker(path: Path, state: Mapping[str, Any], rank: int, tracker: Any) -> Any:
    saved = state["tracker"]
    if saved is None or saved["state"] is None:
        if tracker is not None:
            tracker.current_epoch = state["epoch"]
        return tracker
    if tracker is None:
        from mlbench_core.utils.tracker import Tracker

        tracker = Tracker([], saved["run_id"], rank)
    _restore(path, "tracker", tracker, saved["state"])
    return tracker


_PLAIN = (torch.Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))


def _plain(value: Any, name: str) -> Any:
    """A copy of ``value`` that ``torch.load(weights_only=True)`` reads, with subclasses turned into plain types."""
    if type(value) in _PLAIN or type(value) is torch.nn.Parameter:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        copy = {_plain(key, f"{name} key {key!r}"): _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
        if isinstance(value, OrderedDict):
            return OrderedDict(copy)
        return Counter(copy) if isinstance(value, Counter) else copy
    for sequence in (list, tuple, set):
        if isinstance(value, sequence):
            return sequence(_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, str):
        return str.__str__(value)
    for scalar in (int, float):  # a subclass, such as an enumeration of strings
        if isinstance(value, scalar):
            return scalar(value)
    raise TypeError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors and plain Python "
        f"values only, so that reading one never runs code: let state_dict() return such"
    )


def _rng_state() -> dict[str, Any]:
    """States of the global random generators."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global generator is what data sets and scripts draw from
    _, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
