"""Create the missing stores of a data set from local text, the network, or a generator."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mlbench_core import files
from mlbench_core.dataset.libsvm_names import KNOWN, SYNTHETIC, text_names
from mlbench_core.dataset.linearmodels.pytorch.libsvm import (
    convert,
    generate_lmdb_from_libsvm,
    show_text_progress,
)
from mlbench_core.dataset.linearmodels.pytorch.libsvm_text import scan
from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import find_stores
from mlbench_core.dataset.local_files import COMPRESSIONS, find_file
from mlbench_core.errors import DatasetNotFoundError

__all__ = ["find_text", "prepare_stores"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def prepare_stores(
    name: str, root: str | os.PathLike[str], text_folder: str | os.PathLike[str] | None = None
) -> Path:
    """Create the stores of a data set, unless they exist.

    Any number of processes may call it at the same time: of the processes that share ``root``, one
    creates the stores and the others wait. The processes do not communicate, so hosts with separate
    disks create their own stores.

    Args:
        name: A name known to :mod:`mlbench_core.dataset.linearmodels.pytorch.libsvm`; with
            ``text_folder`` any name.
        root: Folder for the stores. Stores made from the text in ``text_folder`` are in their own
            folder below it, and are created again if the text is newer.
        text_folder: Folder with LIBSVM text, plain or compressed (see :func:`find_text`), or with
            stores. None downloads the text, or generates ``synthetic_dense``.

    Returns:
        The folder with the stores.

    Raises:
        DatasetNotFoundError: ``text_folder`` lacks a part of the data set.
        DownloadError: The text could not be downloaded.
        DatasetError: The text does not match its checksum or its expected contents, or the disk is
            full.
        ValueError: The name is unknown and ``text_folder`` is None.
    """
    folder = Path(root)
    texts: Path | None = None
    if text_folder is not None:
        texts = Path(text_folder)
        if _find_or_none(find_stores, texts, name, "train"):
            return texts
        # Stores of different texts with the same data set name must not be confused.
        folder = folder / f"text-{zlib.crc32(os.fsencode(texts.resolve())):08x}"
    with files.lock(folder / f".{name}.lock"):
        for part in _parts(name, texts):
            _make(name, part, folder, texts)
    return folder


def find_text(folder: str | os.PathLike[str], name: str, part: str) -> Path:
    """Return the path of the LIBSVM text of one part of a data set.

    The name of the file is the published one (``epsilon_normalized.t`` for the test part of
    epsilon), or ``NAME`` for training and ``NAME.t`` for test, plain or with ``.gz``, ``.bz2`` or
    ``.xz``.

    Args:
        folder: Folder to search.
        name: Name of the data set.
        part: ``"train"`` or ``"test"``.

    Returns:
        The file.

    Raises:
        DatasetNotFoundError: The file does not exist; the message lists the names that were tried.
    """
    names = text_names(name, part)
    if path := find_file([Path(folder)], names):
        return path
    wanted = [stem + ending for stem in names for ending in COMPRESSIONS]
    raise DatasetNotFoundError(
        f"{folder} has no text of {name} {part}; looked for {', '.join(wanted)}"
    )


def _find_or_none(find: Callable[..., Result], *arguments: Any) -> Result | None:
    """Return the result of :func:`find_text` or :func:`find_stores`, or None without one."""
    try:
        return find(*arguments)
    except DatasetNotFoundError:
        return None


def _parts(name: str, text_folder: Path | None) -> list[str]:
    """Return the parts that the data set has."""
    if name in KNOWN:
        return list(KNOWN[name].files)
    if text_folder is not None:
        has_test = _find_or_none(find_text, text_folder, name, "test") is not None
        return ["train", "test"] if has_test else ["train"]
    if name == SYNTHETIC:
        return ["train", "test"]
    names = ", ".join(sorted([*KNOWN, SYNTHETIC]))
    raise ValueError(
        f"name must be one of {names}, not {name!r}: any other needs a folder with its text"
    )


def _make(name: str, part: str, folder: Path, text_folder: Path | None) -> None:
    """Create one store, unless it exists and is not older than its text."""
    stores = _find_or_none(find_stores, folder, name, part)
    if text_folder is None:
        if not stores:
            generate_lmdb_from_libsvm(name, part, folder)
        return
    text = find_text(text_folder, name, part)
    # Convert a text again if it changed after its conversion.
    if stores and min(store.stat().st_mtime_ns for store in stores) >= text.stat().st_mtime_ns:
        return
    dest = folder / f"{name}_{part}.lmdb"
    logger.info("converting %s to %s", text, dest)
    settings: dict[str, Any] = {}
    if data := KNOWN.get(name):
        settings = {"n_features": data.n_features, "layout": data.layout, "labels": data.labels}
    else:
        # Both parts must have the same columns, but the largest index of one part may be smaller.
        texts = [find_text(text_folder, name, other) for other in _parts(name, text_folder)]
        settings["n_features"] = max(scan(path).n_features for path in texts)
    with show_text_progress(dest.name, [text]) as advance:
        convert([text], dest, **settings, advance=advance)
