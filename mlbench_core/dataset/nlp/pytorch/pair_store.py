"""Store pairs of sentences as numbers, in files that are mapped into memory.

A store is a folder:

* ``header.json``: the fields of :class:`PairHeader`: version of the format, number of pairs and
  tokens, both languages, checksum and size of the vocabulary, and further entries;
* ``source.npy`` and ``target.npy``: the numbers of all sentences, concatenated;
* ``source.offsets.npy`` and ``target.offsets.npy``: int64, the start of each sentence, and the end
  of the last one.

Numbers are uint16 if the vocabulary has at most 65,536 symbols, otherwise int32. A store is created
under another name and renamed when it is complete. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mlbench_core import files
from mlbench_core.dataset.local_files import load_array
from mlbench_core.errors import DatasetError, DatasetNotFoundError

__all__ = ["FORMAT_VERSION", "PairHeader", "PairStore", "Sentences", "write_pairs"]

FORMAT_VERSION = 1

Numbers = npt.NDArray[np.integer[Any]]

_ADVICE = "delete the folder, and it is created again"


@dataclass(frozen=True)
class PairHeader:
    """The description of a store.

    Attributes:
        languages: Languages of source and target.
        vocabulary_size: All numbers are below this one.
        vocabulary_checksum: SHA-256 of the vocabulary, in hexadecimal digits.
        pairs: Number of pairs.
        tokens: Number of tokens of source and target.
        extra: Further entries that JSON can represent.
        version: Version of the format.
    """

    languages: tuple[str, str]
    vocabulary_size: int
    vocabulary_checksum: str
    pairs: int = 0
    tokens: tuple[int, int] = (0, 0)
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the numbers in the files, little-endian on every machine."""
        # 16 bits are enough for the usual vocabularies and take half of the space.
        if self.vocabulary_size <= 1 << 16:
            return np.dtype("<u2")
        return np.dtype("<i4")


class Sentences:
    """One side of a store: sentences as numbers.

    Args:
        numbers: Numbers of all sentences, of shape (tokens,).
        offsets: Start of each sentence and end of the last one, int64 of shape (sentences + 1,).

    Example:
        >>> sentences = Sentences(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
        >>> len(sentences), sentences[0].tolist(), sentences.lengths.tolist()
        (3, [7, 8], [2, 0, 1])
    """

    def __init__(self, numbers: Numbers, offsets: npt.NDArray[np.int64]) -> None:
        # A plain view of the mapping: slicing a numpy.memmap takes ten times as long.
        self.numbers = np.asarray(numbers)
        self.offsets = np.asarray(offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Numbers:
        """Return a view of the numbers of a sentence, of shape (tokens,); do not write to it."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"index must be at least 0 and below {len(self)}, the number of sentences, not "
                f"{index}"
            )
        return self.numbers[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of symbols of each sentence, int64 of shape (sentences,)."""
        return np.diff(self.offsets)


class PairStore:
    """A store that is mapped into memory.

    Attributes:
        header: Description of the store.
        source: Sentences in the first language.
        target: Their translations.

    Args:
        folder: The store.
        in_memory: If True, read the whole store into memory instead of mapping the files.
        vocabulary_checksum: Checksum that the vocabulary must have; None for any.

    Raises:
        DatasetNotFoundError: The store does not exist.
        DatasetError: The store is damaged, of another version, or of another vocabulary.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     header = PairHeader(("en", "de"), vocabulary_size=10, vocabulary_checksum="")
        ...     pair = (np.array([1, 2, 3]), np.array([4, 5]))
        ...     store = write_pairs(Path(folder, "store"), header, [([pair[0]], [pair[1]])])
        ...     len(store), store.source[0].tolist(), store.target.lengths.tolist()
        (1, [1, 2, 3], [2])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        in_memory: bool = False,
        vocabulary_checksum: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.header = _read_header(self.folder)
        if vocabulary_checksum not in (None, self.header.vocabulary_checksum):
            raise DatasetError(
                f"{self.folder} has the vocabulary {self.header.vocabulary_checksum}, not "
                f"{vocabulary_checksum}: {_ADVICE}"
            )
        source_tokens, target_tokens = self.header.tokens
        self.source = self._load("source", source_tokens, mapped=not in_memory)
        self.target = self._load("target", target_tokens, mapped=not in_memory)

    def _load(self, side: str, tokens: int, mapped: bool) -> Sentences:
        try:
            numbers = load_array(self.folder / f"{side}.npy", mapped=mapped)
            offsets = load_array(self.folder / f"{side}.offsets.npy", mapped=mapped)
        except DatasetError as error:
            raise DatasetError(f"{error}; {_ADVICE}") from error
        if (numbers.dtype, numbers.shape) != (self.header.dtype, (tokens,)):
            raise DatasetError(
                f"{self.folder} is damaged: the {side} is {numbers.dtype} of shape "
                f"{numbers.shape}, not {tokens} numbers of {self.header.dtype}; {_ADVICE}"
            )
        has_form = (offsets.dtype, offsets.shape) == (np.dtype("<i8"), (self.header.pairs + 1,))
        if not has_form or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
            raise DatasetError(
                f"{self.folder} is damaged: the {side} does not have {self.header.pairs} "
                f"sentences, one after the other, with {tokens} numbers; {_ADVICE}"
            )
        return Sentences(numbers, offsets)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self.header.pairs

    def __repr__(self) -> str:
        languages = "-".join(self.header.languages)
        return f"{type(self).__name__}({languages}: {len(self)} pairs, {self.header.tokens} tokens)"


def write_pairs(
    folder: Path, header: PairHeader, blocks: Iterable[tuple[Sequence[Numbers], Sequence[Numbers]]]
) -> PairStore:
    """Write a store, completely or not at all, and replace an existing one.

    Args:
        folder: The store to create.
        header: Description of the store. The function fills in the numbers of pairs and tokens.
        blocks: Blocks of sources and their targets, each a list of integer arrays of shape
            (tokens,). Only one block at a time is in memory.

    Returns:
        The store, mapped into memory.

    Raises:
        ValueError: A block has different numbers of sources and targets, or a number is not in the
            vocabulary.
    """
    with files.creating_folder(folder) as new:
        with (
            _NumberFile(new / "source.npy", header) as source,
            _NumberFile(new / "target.npy", header) as target,
        ):
            for sources, targets in blocks:
                if len(sources) != len(targets):
                    raise ValueError(
                        f"a block must have {len(sources)} targets, one per source, not "
                        f"{len(targets)}"
                    )
                source.append(sources)
                target.append(targets)
        content = asdict(header)
        content["pairs"] = len(source.offsets) - 1
        content["tokens"] = (source.offsets[-1], target.offsets[-1])
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        (new / "header.json").write_text(text, encoding="utf-8")
        # The new store is complete here. Remove the old one, because leaving this block renames the
        # new one.
        shutil.rmtree(folder, ignore_errors=True)
    return PairStore(folder)


class _NumberFile:
    """A one-dimensional .npy file that grows.

    Closing it also writes the file of its sentences' offsets.
    """

    def __init__(self, path: Path, header: PairHeader) -> None:
        self.path = path
        self.header = header
        self.offsets = [0]
        self.file: IO[bytes] = path.open("wb")
        self._write_header()

    def append(self, sentences: Sequence[Numbers]) -> None:
        """Add sentences."""
        if not sentences:
            return
        numbers = np.concatenate(sentences)
        largest = self.header.vocabulary_size - 1
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= largest:
            raise ValueError(
                f"numbers must be those of the vocabulary, 0 to {largest}, not {numbers.min()} "
                f"to {numbers.max()}"
            )
        # Write block by block, so that a text of millions of pairs is never in memory as a whole.
        self.file.write(numbers.astype(self.header.dtype).tobytes())
        ends = self.offsets[-1] + np.cumsum(list(map(len, sentences)))
        self.offsets += ends.tolist()

    def _write_header(self) -> None:
        """Write the header; numpy pads it, so that a larger number of tokens fits later."""
        content = {
            "descr": self.header.dtype.str,
            "fortran_order": False,
            "shape": (self.offsets[-1],),
        }
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, content)

    def __enter__(self) -> _NumberFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._write_header()
        self.file.close()
        offsets = np.array(self.offsets, dtype="<i8")
        np.save(self.path.with_suffix(".offsets.npy"), offsets, allow_pickle=False)


def _read_header(folder: Path) -> PairHeader:
    """Read the header of a store."""
    try:
        content = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        if content["version"] != FORMAT_VERSION:
            raise DatasetError(
                f"{folder} has version {content['version']} of the format, not "
                f"{FORMAT_VERSION}: {_ADVICE}"
            )
        # JSON has no tuples, only lists.
        content["languages"] = tuple(content["languages"])
        content["tokens"] = tuple(content["tokens"])
        return PairHeader(**content)
    except FileNotFoundError:
        raise DatasetNotFoundError(f"the store {folder} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{folder}/header.json is damaged: {error}; {_ADVICE}") from error
