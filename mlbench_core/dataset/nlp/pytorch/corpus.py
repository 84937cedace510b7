"""Convert texts to ids with a dictionary, and cache the ids for later runs.

The cache of a corpus is a folder. Its name contains a digest of the source files, so that it is
never out of date. ``dictionary.json`` has the words and the number of tokens of each part,
``<part>.npy`` the ids as int32. The folder is created under another name and then renamed, so
several processes can create the same cache at the same time.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlbench_core import files
from mlbench_core.dataset.local_files import digest_texts, load_array, read_lines
from mlbench_core.errors import DatasetError

__all__ = ["EOS", "Corpus", "Dictionary", "Ids", "load_corpus"]

_log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]

EOS = "<eos>"
"""The word at the end of each line."""

# Part of the name of a cache: increase it if the content or the way of splitting changes.
_FORMAT = 3


class Dictionary:
    """Words and their ids, which count from 0 in the order of first occurrence.

    Attributes:
        word2idx: Id of each word.
        idx2word: The words by id.

    Example:
        >>> dictionary = Dictionary()
        >>> [dictionary.add_word(word) for word in "to be or not to be".split()]
        [0, 1, 2, 3, 0, 1]
        >>> len(dictionary), dictionary.idx2word[3], "be" in dictionary
        (4, 'not', True)
    """

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """Add a word, unless it exists already.

        Args:
            word: The word.

        Returns:
            Its id.
        """
        index = self.word2idx.setdefault(word, len(self.idx2word))
        if index == len(self.idx2word):
            self.idx2word.append(word)
        return index

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.idx2word)

    def __contains__(self, word: object) -> bool:
        return word in self.word2idx

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dictionary):
            return NotImplemented
        return self.idx2word == other.idx2word

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Dictionary({len(self)} words)"


@dataclass(frozen=True)
class Corpus:
    """A text in parts, as ids.

    Attributes:
        dictionary: The words of all parts.
        parts: The ids of each part, int32; read-only and mapped from the cache if a cache is used.
    """

    dictionary: Dictionary
    parts: Mapping[str, Ids]


def load_corpus(texts: Mapping[str, Path], cache_dir: Path | None) -> Corpus:
    """Read a text in parts, or map the result of an earlier call from the cache.

    A text is split at white space, and each line, also an empty one, ends with one more word,
    ``<eos>``. Only a line feed ends a line. The dictionary reads the parts in the given order, so
    the ids of the first part do not depend on the others.

    Args:
        texts: The file of each part, UTF-8, plain or compressed.
        cache_dir: Folder for caches, created if it does not exist. With None, or if the folder is
            not writable, no cache is used.

    Returns:
        The corpus.

    Raises:
        DatasetError: A file cannot be decompressed or is not valid UTF-8.
    """
    if cache_dir is None:
        return _read_corpus(texts)
    folder = cache_dir / f"corpus-{digest_texts(texts.values(), [_FORMAT, EOS, *texts])}"
    cached = _load_cache(folder, texts)
    if cached is not None:
        return cached
    corpus = _read_corpus(texts)
    # A cache only saves time, so a folder that cannot be written must not stop a training run.
    try:
        _save_cache(folder, corpus)
    except OSError as error:
        _log.warning(
            "the cache %s cannot be written (%s); the text will be read again at each start",
            folder,
            error,
        )
        return corpus
    # Map the new cache, so that the workers of one machine share the pages of one file.
    return _load_cache(folder, texts) or corpus


def _read_corpus(texts: Mapping[str, Path]) -> Corpus:
    """Read all parts from their texts."""
    dictionary = Dictionary()

    def ids(path: Path) -> Iterator[int]:
        for line in read_lines(path):
            for word in (*line.split(), EOS):
                yield dictionary.add_word(word)

    # `ids` is an iterator, because a list of the words of a large text would take many times the
    # memory of their ids.
    parts = {part: np.fromiter(ids(path), dtype=np.int32) for part, path in texts.items()}
    return Corpus(dictionary, parts)


def _save_cache(folder: Path, corpus: Corpus) -> None:
    """Write a cache; if another process was faster, keep its cache."""
    with files.creating_folder(folder) as new:
        for part, ids in corpus.parts.items():
            np.save(new / f"{part}.npy", ids, allow_pickle=False)
        tokens = {part: len(ids) for part, ids in corpus.parts.items()}
        content = {"format": _FORMAT, "tokens": tokens, "words": corpus.dictionary.idx2word}
        text = json.dumps(content, ensure_ascii=False)
        (new / "dictionary.json").write_text(text, encoding="utf-8")


def _load_cache(folder: Path, texts: Mapping[str, Path]) -> Corpus | None:
    """Map a cache into memory, or return None without one; a damaged cache is deleted."""
    # Do not delete anything in this case: another process may be creating the cache.
    if not folder.is_dir():
        return None
    try:
        content = json.loads((folder / "dictionary.json").read_text(encoding="utf-8"))
        parts = {part: load_array(folder / f"{part}.npy", mapped=True) for part in texts}
        dictionary = Dictionary()
        for word in content["words"]:
            dictionary.add_word(word)
        for part, ids in parts.items():
            if ids.dtype != np.int32 or ids.shape != (content["tokens"][part],):
                raise ValueError(f"{part}.npy has {ids.dtype} of shape {ids.shape}")
            if ids.size and not (ids.min() >= 0 and ids.max() < len(dictionary)):
                raise ValueError(f"{part}.npy has numbers of words that the dictionary lacks")
    except (OSError, ValueError, KeyError, TypeError, DatasetError) as error:
        _log.warning("the cache %s is damaged (%s) and is created again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return Corpus(dictionary, parts)
