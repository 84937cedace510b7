"""Write and read the files of checkpoints, and find the files that belong together.

A *save* consists of the files that all k workers wrote at the same point of training. Its files
have one id, so that files of different saves are never mixed:

=======================================  =========================================================
``{epoch}_{rank}.pth.tar``               state of worker ``rank`` after an epoch; the id is inside
``model_best.pth.tar``                   state of rank 0 after the best epoch; the id is inside
``model_best.{id}.{rank}of{k}.pth.tar``  part of worker ``rank`` of the best epoch
=======================================  =========================================================

The part of rank 0 is ``model_best.pth.tar`` itself under a second name (a hard link).

The workers do not wait for one another while they save. So a save of the best epoch passes through
these states:

1. *partial*: some workers have written their file of the save. ``model_best.pth.tar`` may already
   be the new one. The previous save still exists, under the names that have its id.
2. *whole*: all workers have written their file. The worker that finds all files deletes those of
   previous saves.

If a run is killed, the last save may be partial, but the one before it is whole.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import pickle
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlbench_core import checkpoint_names as names
from mlbench_core import files
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["FORMAT", "find", "name_run", "read", "read_newest", "write", "write_part"]

_log = logging.getLogger("mlbench_core.controlflow.pytorch.checkpoint")

FORMAT = 1
_KINDS: dict[str, Any] = {
    "model": Mapping,
    "rank": int,
    "epoch": int | None,
    "freq": str | None,
    **dict.fromkeys(("optimizer", "tracker", "extra", "rng"), Mapping | None),
}
"""Types of entries of a state, whole or partial; None also marks an entry that is missing."""

PARTIAL = "partial"
"""Key of a state that holds only its differences from the state of rank 0."""


def name_run() -> str:
    """Return a random id of this run, the same for all workers of the process group.

    It uses the store instead of a collective, because a script may save on some workers only.
    """
    own_id = secrets.token_hex(8)
    if process_groups.world_size() == 1:
        return own_id
    # The first worker to get here sets the value; the others receive it.
    try:
        shared: bytes = process_groups.store().compare_set("mlbench/checkpoint", "", own_id)
    except RuntimeError:
        # torch's own MPI has no store, so all runs have this id: saves of different runs look
        # alike.
        return "0"
    return shared.decode()


# ---- writing


def write(path: Path, content: Mapping[str, Any] | bytes, rank: int) -> None:
    """Write a file so that ``path`` is at any moment the old file or the complete new one.

    Args:
        path: Path of the file.
        content: A state for ``torch.save``, or bytes.
        rank: This worker's rank.

    Raises:
        CheckpointError: Writing failed. The old file is unchanged.
    """
    try:
        with (
            files.replacing(path, _temporary(path, rank)) as temporary,
            temporary.open("wb") as file,
        ):
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
    except (OSError, RuntimeError) as error:
        # torch raises its own error when a write fails. The operating system's error has the cause.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({cause or error}): free space or "
            "choose another folder with --root-checkpoint; checkpoints written earlier are intact"
        ) from error


def write_part(
    folder: Path, save: str, part: Mapping[str, Any] | None, rank: int, world_size: int
) -> None:
    """Write this worker's file of a save of the best epoch, and delete files of earlier ones.

    If the save is whole, all files of previous saves are deleted. Otherwise a worker deletes its
    own files except those of this save and of the last whole save.

    Args:
        folder: The folder.
        save: Id of the save.
        part: The part of this worker's state that differs from the state of rank 0. None on rank 0,
            whose ``model_best.pth.tar`` is written already and gets its second name.
        rank: This worker's rank.
        world_size: Number of workers.
    """
    path = folder / names.part_name(save, rank, world_size)
    if part is not None:
        write(path, part, rank)
    elif world_size > 1:
        with files.replacing(path, _temporary(path, rank)) as temporary:
            try:
                os.link(folder / names.BEST_NAME, temporary)
            except OSError:
                # The file system has no hard links.
                shutil.copy2(folder / names.BEST_NAME, temporary)
    # Listed after the write above, so that the last worker to write finds the files of all.
    saves = _best_saves(folder)
    this_save = saves.pop(save, _Save())
    others = list(saves.values())
    if world_size == 1 or this_save.is_whole:
        # Newer files belong to a save that other workers have begun in the meantime.
        limit = math.inf
        if world_size > 1:
            limit = min(map(_written_ns, this_save.files.values()))
        for other in others:
            for path in other.files.values():
                if _written_ns(path) < limit:
                    path.unlink(missing_ok=True)
        return
    # A kill may come before this save is whole, so the newest whole one must stay.
    whole = [other for other in others if other.is_whole]
    kept = max(whole or others, key=_Save.written_ns, default=None)
    for other in others:
        if other is not kept and rank in other.files:
            other.files[rank].unlink(missing_ok=True)


def _temporary(path: Path, rank: int) -> Path:
    # One name per rank: the next save overwrites a file that a kill has left.
    return path.with_name(f".saving_{rank}.tmp")


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        # Another worker deleted the file after it was listed.
        return 0


# ---- reading


def read(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint onto the CPU.

    Raises:
        CheckpointError: The file is damaged or not a checkpoint.
        FileNotFoundError: The file does not exist.
    """
    try:
        _check_regular(path)
        # torch.load does not verify the checksums of the archive.
        with zipfile.ZipFile(path) as archive:
            # torch does not compress. A compressed entry could be far larger than the file.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise CheckpointError(
                    f"the checkpoint {path} has compressed entries, which torch does not write"
                )
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: the checksum of {damaged} is wrong"
            )
        # By default tensors go to the GPU that they were saved from, which may be another worker's.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, CheckpointError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged or holds pickled code, which is not run "
            f"(files of version 3.0 do): {str(error).splitlines()[0]}"
        ) from error
    # A damaged pickle may raise an exception of nearly any type.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"the checkpoint {path} cannot be read, it is damaged or not a checkpoint: {reason}"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        saved_format: Any = type(state).__name__
        if isinstance(state, dict):
            saved_format = state.get("format")
        raise CheckpointError(
            f"the checkpoint {path} has format {saved_format!r}; this version reads format {FORMAT}"
        )
    for name, kind in _KINDS.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(
                f"the checkpoint {path} is damaged: its entry {name!r} is a "
                f"{type(state.get(name)).__name__}"
            )
    return state


def _check_regular(path: Path) -> None:
    """Refuse a folder, a pipe or a device; opening a pipe would wait for its writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(
            f"the checkpoint {path} is a folder, a pipe or a device, not a regular file"
        )


def read_newest(folder: Path, rank: int, epoch: int | None) -> tuple[Candidate, dict[str, Any]]:
    """Read the newest readable save, or the save of one epoch, for one worker.

    Every worker looks at the same files in the same order, so all of them choose the same save.

    Args:
        folder: The folder.
        rank: This worker's rank.
        epoch: The epoch; None for the newest save.

    Returns:
        The save and the state. The state is that of rank 0, with its ``"rank"``, if the save has
        none of this worker.

    Raises:
        CheckpointError: No save exists, or none can be read.
    """
    failures: list[str] = []
    for candidate in find(folder, rank, epoch):
        try:
            if failures:
                _log.warning("%s; trying the one before it", failures[-1])
            return candidate, candidate.read()
        except FileNotFoundError:
            # Rank 0 has no file, or a worker deleted one in the meantime.
            continue
        except CheckpointError as error:
            # The save before this one is tried next; if there is none, all failures are reported.
            failures.append(str(error))
    if failures:
        raise CheckpointError("; ".join(failures))
    wanted, looked_for = "", f"<epoch>_{rank}.pth.tar and {names.BEST_NAME}"
    if epoch is not None:
        wanted, looked_for = f"of epoch {epoch} ", names.epoch_name(epoch, rank)
    raise CheckpointNotFoundError(
        f"there is no checkpoint {wanted}of rank {rank} in {folder}; looked for {looked_for}"
    )


@dataclass(frozen=True)
class Candidate:
    """The files of a save that one worker may read.

    Attributes:
        first: Rank 0's file; None if this folder has only files of other workers because it is not
            shared.
        own: This worker's file; None if it is missing or is rank 0's.
        lacks_parts: True for a save of the best epoch that lacks parts of some workers.
    """

    first: Path | None
    own: Path | None
    lacks_parts: bool = False

    @property
    def path(self) -> Path:
        """Return the file that has this worker's state."""
        path = self.own or self.first
        assert path is not None
        return path

    def read(self) -> dict[str, Any]:
        """Read the state.

        A save is readable if rank 0's file is, so that all workers choose the same save.
        """
        if self.first is None or self.own is None:
            return read(self.path)
        first = read(self.first)
        try:
            own = read(self.own)
        except CheckpointError as error:
            _log.warning("%s; taking the file of rank 0 for it", error)
            return first
        if own.get(PARTIAL):
            own["model"] = {**first["model"], **own["model"]}
            if first["optimizer"] is not None:
                own["optimizer"] = {**first["optimizer"], **own["optimizer"]}
        return own


def find(folder: Path, rank: int, epoch: int | None = None) -> Iterator[Candidate]:
    """Find the saves that a worker may continue from, the best choice first.

    The epochs come first, from the newest to the oldest, and then the best epoch. A save that is
    not whole comes after all others of its kind. So a run that was killed while it saved continues
    from the previous save.

    Args:
        folder: The folder.
        rank: This worker's rank.
        epoch: Only this epoch; None for all.
    """
    epochs: dict[int, dict[int, Path]] = {}
    for name in _names(folder):
        if match := names.EPOCH_NAME.fullmatch(name):
            epochs.setdefault(int(match[1]), {})[int(match[2])] = folder / name
    if epoch is None:
        numbers = sorted(epochs, reverse=True)
    else:
        numbers = [epoch]
    partial: list[Candidate] = []
    passed_over: list[str] = []
    for number in numbers:
        files = epochs.get(number, {})
        if rank not in files and 0 not in files:
            continue
        candidate, is_whole = _of_epoch(files, rank)
        if is_whole or epoch is not None:
            _warn_of_partial(passed_over)
            passed_over.clear()
            yield candidate
        else:
            partial.append(candidate)
            passed_over.append(candidate.path.name)
    # Without a whole save, a partial one is better than a start from scratch.
    yield from partial
    if epoch is None:
        yield from _of_best(folder, rank)


def _of_epoch(files: Mapping[int, Path], rank: int) -> tuple[Candidate, bool]:
    """Return the save of one epoch, and True if it is whole."""
    if 0 not in files:
        return Candidate(None, files[rank]), False
    if rank > 0 and rank in files:
        # With Horovod torch knows one worker only, so each worker's file is a whole save.
        header = _header(files[rank])
        if header is not None and header.world_size == 1:
            return Candidate(None, files[rank]), True
    first = _header(files[0])

    @functools.cache
    def belongs(other: int) -> bool:
        # A damaged file has no header; it counts here, because reading it reports the damage.
        return other in files and _header(files[other]) in (None, first)

    own = None
    if rank != 0 and belongs(rank):
        own = files[rank]
    # Versions that did not save the number of workers count as whole.
    is_whole = (
        first is None
        or first.world_size is None
        or all(belongs(other) for other in range(1, first.world_size))
    )
    return Candidate(files[0], own), is_whole


def _of_best(folder: Path, rank: int) -> Iterator[Candidate]:
    """Find the saves of the best epoch."""
    saves = _best_saves(folder)
    path = folder / names.BEST_NAME
    header = _header(path)
    best_save = _Save()
    is_whole = True
    if header is not None:
        if header.save is not None:
            best_save = saves.pop(header.save, best_save)
        is_whole = all(other in best_save.files for other in range(1, header.world_size or 1))
    best = Candidate(path, best_save.part_of(rank), lacks_parts=not is_whole)
    if is_whole:
        yield best
    for save in sorted(saves.values(), key=_Save.written_ns, reverse=True):
        if save.is_whole:
            if not is_whole:
                _warn_of_partial([names.BEST_NAME])
            yield Candidate(save.files[0], save.part_of(rank))
    if not is_whole:
        yield best


class _Save:
    """The files of one save of the best epoch, by rank."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.files: dict[int, Path] = {}

    @property
    def is_whole(self) -> bool:
        return all(rank in self.files for rank in range(self.world_size))

    def part_of(self, rank: int) -> Path | None:
        """Return the file of a worker; None for rank 0, whose file has the whole state."""
        if rank == 0:
            return None
        return self.files.get(rank)

    def written_ns(self) -> int:
        return max(map(_written_ns, self.files.values()), default=0)


def _best_saves(folder: Path) -> dict[str, _Save]:
    saves: dict[str, _Save] = {}
    for name in _names(folder):
        if match := names.PART_NAME.fullmatch(name):
            saves.setdefault(match[1], _Save(int(match[3]))).files[int(match[2])] = folder / name
    return saves


@dataclass(frozen=True)
class _Header:
    """The id and the world size of the save of a file; None in files of versions without them."""

    save: str | None
    world_size: int | None


def _header(path: Path) -> _Header | None:
    """Return the header of a checkpoint without reading its tensors; None if it cannot be read."""
    # Every worker looks into the files of all workers, so reading whole files would take k times
    # the time.
    try:
        _check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        header = _Header(state.get("save"), state.get("world_size"))
    # A damaged pickle may raise an exception of nearly any type.
    except Exception:
        return None
    is_valid = isinstance(header.save, str | None) and isinstance(header.world_size, int | None)
    if not is_valid:
        return None
    return header


def _names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return os.listdir(folder)


def _warn_of_partial(names: Sequence[str]) -> None:
    for name in names:
        _log.warning(
            "other workers' files of the same save as %s are missing, as after a kill: "
            "taking the save before",
            name,
        )
