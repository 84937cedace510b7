"""Download a data set, and prepare it so that a task can start at once.

The classes that read the data do both when a task starts. Here, both are done before, for machines
without a network or for large data. The results are those of the tasks, so a task with the same
folder uses them.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlbench_core import files
from mlbench_core.dataset.download import progress_download
from mlbench_core.dataset.libsvm_names import KNOWN, SYNTHETIC, has_stores
from mlbench_core.dataset.registry import DEFAULT_FOLDER, FINEWEB10B_FILE_URL, DatasetRecord
from mlbench_core.errors import DatasetError, DatasetNotFoundError, DownloadError, require
from mlbench_core.paths import user_folder

__all__ = ["Prepared", "fetch", "prepare", "prepare_text"]


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation.

    Attributes:
        folder: Folder of the prepared data.
        unit: The things that are counted: ``"rows"``, ``"pairs"`` or ``"tokens"``.
        counts: Number of them in each part.
    """

    folder: Path
    unit: str
    counts: Mapping[str, int]


def fetch(record: DatasetRecord, folder: Path | None = None) -> list[Path]:
    """Download the files of a data set that a folder does not have.

    An interrupted download is resumed by the next call, and a file gets its name only when it is
    complete.

    Args:
        record: The data set.
        folder: Destination folder; None is the default folder of the data set.

    Returns:
        The published files that are in the folder now, plain or compressed; none if the data set
        needs no download.

    Raises:
        DownloadError: A download failed, the disk is full, or only a person can get the data.
        DatasetError: An existing file is damaged, or the folder has other text of the same name.
        MissingDependencyError: torch is not installed.
    """
    folder = folder or record.folder
    if record.origin == "by hand":
        raise DownloadError(
            f"{record.name} cannot be downloaded by a program: get it from {record.sources[0]}, "
            f"and put its folders train and val into {folder}"
        )
    if record.origin != "download":
        return []
    # The modules that download are those that read the data, and these import torch.
    require("torch", "torch")
    _FETCHERS[record.name](record, folder)
    paths: list[Path] = []
    missing: list[str] = []
    for file in record.files:
        match = file.find(folder)
        if match is None:
            missing.append(file.name)
        else:
            paths.append(match[0])
    # The classes read other text in these folders too, and do not mix it with a download.
    if missing:
        raise DatasetError(
            f"{folder} has other text of {record.name}, so {', '.join(missing)} cannot be "
            "downloaded into it: move that text away, or use another folder"
        )
    return paths


def prepare(
    record: DatasetRecord, folder: Path | None = None, *, vocabulary: Path | None = None
) -> Prepared | None:
    """Prepare a data set whose files are on this machine; nothing is downloaded.

    Text is split into words and sub-words, and the text of linear models becomes stores. The
    preparation consists of steps. Each step leaves its complete result or nothing, and a later call
    continues after the last complete step.

    Args:
        record: The data set.
        folder: Folder of its files, the one that a task gets by ``--data``; None is the default
            folder, which a task without ``--data`` reads.
        vocabulary: File with the sub-tokens of MLPerf's reference, for ``wmt17`` only, as a task
            gets it by ``--vocabulary``; None learns a vocabulary from the text.

    Returns:
        The result; None if the data set is read as it is.

    Raises:
        ValueError: ``vocabulary`` is given for another data set.
        DatasetNotFoundError: A file is missing.
        DatasetError: A file is damaged, or the disk is full.
        MissingDependencyError: A package is not installed.
    """
    if vocabulary is not None and record.name != "wmt17":
        raise ValueError(
            f"vocabulary must be None for {record.name}, not {vocabulary}: only wmt17 can use one"
        )
    if record.name not in _PREPARERS:
        return None
    require("torch", "torch")
    with _explaining_full_disk(record.name):
        if vocabulary is not None:
            return _prepare_pairs(record, folder, vocabulary=vocabulary)
        return _PREPARERS[record.name](record, folder)


def prepare_text(
    texts: Sequence[Path],
    folder: Path | None = None,
    *,
    split: str = "train",
    tokenizer: Path | None = None,
) -> Prepared:
    """Convert text files to shards of tokens, which task 5a reads.

    Args:
        texts: Files, plain or compressed, in the order of their tokens.
        folder: Destination folder; None is a folder of the user.
        split: ``"train"`` or ``"val"``.
        tokenizer: A file ``tokenizer.json`` of the package tokenizers; None makes each byte a
            token.

    Returns:
        The result.

    Raises:
        DatasetError: A file is damaged, the folder has shards of this part, or the disk is full.
        MissingDependencyError: A package is not installed.
    """
    require("torch", "torch")
    from mlbench_core.dataset.nlp.pytorch.text_shards import convert_text

    folder = folder or user_folder(*DEFAULT_FOLDER, "text")
    with _explaining_full_disk("text"):
        count = convert_text(texts, folder, split, tokenizer=tokenizer)
    return Prepared(folder, "tokens", {split: count})


@contextlib.contextmanager
def _explaining_full_disk(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A DatasetNotFoundError is an OSError too, but has no number.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DatasetError(
                f"the disk is full: {name} could not be prepared ({error}); free some space and "
                "start again"
            ) from error
        raise


def _fetch_images(record: DatasetRecord, folder: Path) -> None:
    from mlbench_core.dataset.imagerecognition.pytorch.dataloader import CIFAR10V1, MNIST

    # The classes download the missing files of their part when they are created.
    for train in (True, False):
        if record.name == "cifar10":
            CIFAR10V1(folder, train=train, download=True)
        else:
            # Only the files matter, so the images need neither padding nor three channels.
            MNIST(folder, train=train, download=True, pad=0, channels=1)


def _fetch_text(record: DatasetRecord, folder: Path) -> None:
    from mlbench_core.dataset.nlp.pytorch import (
        multi30k,
        wikitext2_dataset,
        wmt16_dataset,
        wmt17_dataset,
    )

    modules = {
        "multi30k": multi30k,
        "wikitext2": wikitext2_dataset,
        "wmt16": wmt16_dataset,
        "wmt17": wmt17_dataset,
    }
    modules[record.name].download_text(folder)


def _fetch_linear(record: DatasetRecord, folder: Path) -> None:
    from mlbench_core.dataset.linearmodels.pytorch.libsvm import download

    for part in KNOWN[record.name].files:
        download(record.name, part, folder)


def _fetch_shards(record: DatasetRecord, folder: Path) -> None:
    from mlbench_core.dataset.nlp.pytorch.token_shards import read_shard

    with files.lock(folder / ".download.lock"):
        for file in record.files:
            path = folder / file.name
            if path.exists():
                read_shard(path)
                continue
            # No checksum is known, so a file gets its name only if it is a complete shard.
            url = FINEWEB10B_FILE_URL.format(name=file.name)
            download = progress_download(url, folder / "downloads" / file.name)
            try:
                read_shard(download)
            except DatasetError as error:
                download.unlink()
                raise DownloadError(
                    f"{url} has the wrong content, which was deleted: {error}"
                ) from error
            files.move_into_place(download, path)


_FETCHERS: Mapping[str, Callable[[DatasetRecord, Path], None]] = {
    **dict.fromkeys(("cifar10", "mnist"), _fetch_images),
    **dict.fromkeys(("multi30k", "wikitext2", "wmt16", "wmt17"), _fetch_text),
    "fineweb10b": _fetch_shards,
    **dict.fromkeys(KNOWN, _fetch_linear),
}


def _prepare_pairs(record: DatasetRecord, folder: Path | None, **options: Any) -> Prepared:
    """Create the vocabulary, and the store of each part; the options are those of the class."""
    from mlbench_core.dataset.nlp.pytorch import Multi30k, WMT16Dataset, WMT17Dataset

    loaders: Mapping[str, Callable[..., Any]] = {
        "multi30k": Multi30k,
        "wmt16": partial(WMT16Dataset, download=False, lazy=True),
        "wmt17": partial(WMT17Dataset, download=False),
    }
    parts = ["train", "validation"]
    # The data of task 4a has no test part.
    if record.name != "wmt16":
        parts.append("test")
    load = partial(loaders[record.name], folder or record.folder, **options)
    counts = {}
    for part in parts:
        # The store has all pairs; a data set may leave out long ones.
        counts[part] = len(load(**{part: True}).part.store)
    return Prepared(user_folder("cache", "text"), "pairs", counts)


def _prepare_wikitext2(record: DatasetRecord, folder: Path | None) -> Prepared:
    """Create the cache of the words' ids."""
    from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset

    load: Callable[..., Any] = partial(Wikitext2Dataset, folder or record.folder, 1, download=False)
    counts = {}
    for part in ("train", "valid", "test"):
        counts[part] = len(load(**{part: True}).tokens)
    return Prepared(user_folder("cache"), "tokens", counts)


def _prepare_linear(record: DatasetRecord, folder: Path | None) -> Prepared:
    """Create the stores, in the folder in which a task looks for them."""
    from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore, find_stores
    from mlbench_core.dataset.linearmodels.pytorch.preparation import prepare_stores

    name, home = record.name, record.folder
    if name == SYNTHETIC:
        stores, parts = prepare_stores(name, folder or home), ["train", "test"]
    else:
        parts = list(KNOWN[name].files)
        if folder is None:
            _check_texts(record)
        stores = prepare_stores(name, home, folder)
    counts = {}
    for part in parts:
        counts[part] = sum(map(len, map(LinearStore, find_stores(stores, name, part))))
    return Prepared(stores, "rows", counts)


def _check_texts(record: DatasetRecord) -> None:
    """Refuse to prepare a part without text and store, which ``prepare_stores`` would download."""
    for file in record.files:
        if has_stores(record.folder, record.name, file.name) or file.find(record.folder):
            continue
        raise DatasetNotFoundError(
            f"{record.folder} has no {file.forms[0].path}, plain or compressed: "
            f"'mlbench data fetch {record.name}' downloads it"
        )


_PREPARERS: Mapping[str, Callable[[DatasetRecord, Path | None], Prepared]] = {
    **dict.fromkeys(("multi30k", "wmt16", "wmt17"), _prepare_pairs),
    "wikitext2": _prepare_wikitext2,
    **dict.fromkeys((*KNOWN, SYNTHETIC), _prepare_linear),
}
