"""Tokens for language models: shards of the community's format, and their batches.

A shard is a little-endian file: a header of 256 int32 (20240520, the version 1, the number of
tokens, zeros), and then the tokens as uint16. ``karpathy/llm.c`` and
``KellerJordan/modded-nanogpt`` read and publish such files. Shards are mapped into memory, so that
a run needs memory for its batches only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlbench_core import files
from mlbench_core.arguments import check_int, check_rank
from mlbench_core.dataset.local_files import open_file
from mlbench_core.dataset.nlp.pytorch.wikitext2_dataset import find_texts
from mlbench_core.errors import DatasetError, DatasetNotFoundError

__all__ = [
    "FirstTokens",
    "TokenBatches",
    "Tokens",
    "load_shards",
    "load_text_bytes",
    "read_shard",
    "write_shard",
]

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256

Tokens = npt.NDArray[Any]
"""Tokens of shape (tokens,), uint8 or uint16."""


def write_shard(path: Path, tokens: Tokens) -> None:
    """Write a shard; the file is complete or does not exist.

    Args:
        path: The file.
        tokens: Integers from 0 to 65,535, shape (tokens,).

    Raises:
        ValueError: A token does not fit into 16 bits.
        OSError: The file cannot be written.
    """
    # An empty array has no smallest number.
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 16:
        raise ValueError(
            f"tokens must be from 0 to 65535, not {tokens.min()} to {tokens.max()}: a shard has "
            "16 bits for each; use a smaller vocabulary"
        )
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header.data)
        # Nothing is copied if the tokens have this type already.
        file.write(np.ascontiguousarray(tokens, dtype="<u2").data)


def read_shard(path: Path) -> Tokens:
    """Map the tokens of a shard into memory, after a check of its header and size.

    Args:
        path: The file.

    Returns:
        The tokens, uint16 of shape (tokens,), read-only.

    Raises:
        DatasetError: The file cannot be read, is not a shard, or is cut off.
    """
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
        size_bytes = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    if len(content) < HEADER_BYTES:
        raise DatasetError(
            f"{path} is not a shard of tokens: its header must have {HEADER_BYTES} bytes, not "
            f"{len(content)}; get it again"
        )
    magic, version, count = map(int, np.frombuffer(content, dtype="<i4", count=3))
    if magic != MAGIC:
        # Only the byte order of the header can be seen; the tokens have the same one.
        if int.from_bytes(content[:4], "big") == MAGIC:
            raise DatasetError(f"{path} is a big-endian shard: convert it to little-endian")
        raise DatasetError(
            f"{path} is not a shard of tokens: its first number must be {MAGIC}, not {magic}"
        )
    if version != VERSION:
        raise DatasetError(f"{path} must be a shard of version {VERSION}, not {version}")
    if count < 0:
        raise DatasetError(f"{path} is damaged: its header has {count} tokens; get it again")
    expected_bytes = HEADER_BYTES + 2 * count
    if size_bytes != expected_bytes:
        raise DatasetError(
            f"{path} is damaged: it must have {expected_bytes} bytes for {count} tokens, not "
            f"{size_bytes}; get it again"
        )
    # The header is mapped too, because the system cannot map a shard without tokens otherwise.
    tokens: Tokens = np.memmap(path, dtype="<u2", mode="r")[HEADER_BYTES // 2 :]
    return tokens


def load_shards(folder: Path, split: str) -> list[Tokens]:
    """Map all shards of one part of a data set, in the order of their names.

    Args:
        folder: Folder with files such as ``fineweb_train_000001.bin``.
        split: The part, as it is in the names: ``"train"`` or ``"val"``.

    Returns:
        The tokens of each shard, uint16.

    Raises:
        DatasetNotFoundError: The folder has no shard of this part.
        DatasetError: A shard is damaged.
    """
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    if not paths:
        raise DatasetNotFoundError(
            f"{folder} has no shard *_{split}_*.bin: 'mlbench data fetch fineweb10b' downloads "
            "shards, and 'mlbench data prepare text FILE' makes them from text"
        )
    return list(map(read_shard, paths))


def load_text_bytes(folder: Path, split: str) -> Tokens:
    """Read the text of WikiText-2, or other text in files of its names, as bytes.

    Args:
        folder: The folder of the text, or the one above ``wikitext-2``.
        split: ``"train"``, ``"valid"`` or ``"test"``.

    Returns:
        The bytes of the decompressed file, uint8.

    Raises:
        DatasetNotFoundError: The folder has no such file.
        DatasetError: The file is damaged.
    """
    path = find_texts(folder).get(split)
    if path is None:
        raise DatasetNotFoundError(
            f"{folder} has no {split}.txt or wiki.{split}.tokens, plain or compressed: "
            "'mlbench data fetch wikitext2' downloads them"
        )
    with open_file(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8)


class _Sequences:
    """The consecutive sequences of some arrays, by number, and one worker's place.

    Attributes:
        count: Number of sequences in all arrays.
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        batch_size: int,
        context: int,
        rank: int,
        world_size: int,
    ) -> None:
        check_rank(rank, world_size)
        self.batch_size = check_int("batch_size", batch_size)
        self.context = check_int("context", context)
        self.rank, self.world_size = rank, world_size
        arrays: list[Tokens] = []
        if isinstance(tokens, np.ndarray):
            arrays.append(tokens)
        else:
            arrays += tokens
        for array in arrays:
            if array.ndim != 1 or array.dtype not in (np.uint8, np.uint16):
                raise ValueError(
                    "tokens must be uint8 or uint16 of shape (tokens,), not "
                    f"{array.dtype} of shape {array.shape}"
                )
        # A slice of a memory map takes several times as long as one of a plain view of it.
        self._arrays = list(map(np.asarray, arrays))
        counts = []
        for array in arrays:
            # The last token of an array is only a target.
            counts.append(max(0, len(array) - 1) // context)
        self._ends = np.cumsum(counts)
        self.count = sum(counts)
        if not self.count:
            raise ValueError(
                f"tokens must have at least {context + 1} in an array, not "
                f"{max(map(len, arrays), default=0)}: use a longer text or a shorter context"
            )

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the sequences of these numbers, and the token after each of their tokens."""
        # In int64, the type in which torch's embeddings and losses take ids on every device.
        batch = np.empty((len(numbers), self.context + 1), dtype=np.int64)
        for row, number in zip(batch, numbers, strict=True):
            # An array without a sequence has the same end as the one before it, and is skipped.
            index = int(np.searchsorted(self._ends, number, side="right"))
            before = 0
            if index:
                before = int(self._ends[index - 1])
            start = (number - before) * self.context
            row[:] = self._arrays[index][start : start + self.context + 1]
        # Two views of one copy.
        pieces = torch.from_numpy(batch)
        return pieces[:, :-1], pieces[:, 1:]


class TokenBatches:
    """Endless batches of consecutive tokens for training.

    Each array is divided into sequences of ``context`` tokens; a rest at its end is left out. A
    pass contains each sequence once, and one pass follows another. In each step, the k workers with
    batches of B take the next kB sequences of the pass, B consecutive ones each. So their batches
    are disjoint, and together they are the batch of one worker with kB sequences.

    The position is known to the token. A saved one is valid for any batch size and number of
    workers.

    Args:
        tokens: One array or several, for example those of :func:`load_shards`: uint8 or uint16 of
            shape (tokens,).
        batch_size: Sequences B in a worker's batch.
        context: Tokens T of a sequence.
        rank: Rank of this worker.
        world_size: Number of workers.
        seed: Seed of the order of the sequences, at least 0, which differs between passes. With
            None, each pass has the order of the arrays; this reads shards fastest, and needs no
            memory for an order.

    Raises:
        TypeError: An argument has another type than those listed.
        ValueError: An argument is out of range, or no array has a sequence and the token after it.

    Example:
        >>> batches = TokenBatches(np.arange(10, dtype=np.uint8), 2, 3, rank=0, world_size=1)
        >>> inputs, targets = next(iter(batches))
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        batch_size: int,
        context: int,
        rank: int,
        world_size: int,
        seed: int | None = None,
    ) -> None:
        self._sequences = _Sequences(tokens, batch_size, context, rank, world_size)
        self._seed = seed
        if seed is not None:
            self._seed = check_int("seed", seed, 0)
        self._next = 0  # the first sequence, counted over all passes, that no worker has taken
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of whole steps of all workers in a pass."""
        sequences = self._sequences
        return sequences.count // (sequences.batch_size * sequences.world_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets from the position on, each int64 of shape (B, T)."""
        sequences = self._sequences
        while True:
            first = self._next + sequences.rank * sequences.batch_size
            # This is counted before the batch is yielded, so that a state that is saved after the
            # step continues with the next batch.
            self._next += sequences.world_size * sequences.batch_size
            numbers = range(first, first + sequences.batch_size)
            yield sequences.batch([self._place(number) for number in numbers])

    def _place(self, number: int) -> int:
        """Return the place in the arrays of the sequence that has a number in all passes."""
        number_of_pass, place = divmod(number, self._sequences.count)
        if self._seed is None:
            return place
        if self._order is None or self._order[0] != number_of_pass:
            generator = np.random.default_rng((self._seed, number_of_pass))
            self._order = number_of_pass, generator.permutation(self._sequences.count)
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, int | None]:
        """Return the position, so that a run can resume at the next batch.

        Returns:
            The ``position``, which is the number of tokens that all workers have received, and the
            values that determine the order: ``context``, ``sequences`` of a pass, and ``seed``.
        """
        return {"position": self._next * self._sequences.context, **self._settings()}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Resume at the position of a state.

        Args:
            state: The result of :meth:`state_dict`.

        Raises:
            ValueError: The state was saved with other tokens, another context or another seed, or
                its position is not one between two sequences.
        """
        for name, here in self._settings().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the state was saved with {name} {state.get(name)}, but here it is {here}"
                )
        # In tokens, which do not depend on the number of workers and the size of their batches.
        position = check_int("position", state.get("position"), 0)
        self._next, rest = divmod(position, self._sequences.context)
        if rest:
            raise ValueError(
                f"position must be a multiple of {self._sequences.context}, the context, not "
                f"{position}: the state is damaged"
            )

    def _settings(self) -> dict[str, int | None]:
        sequences = self._sequences
        return {"context": sequences.context, "sequences": sequences.count, "seed": self._seed}


class FirstTokens:
    """Batches for validation: the first tokens of some arrays, once each.

    The workers take turns with the sequences, so the shares of two workers differ by at most one
    sequence. Each pass is the same.

    Args:
        tokens: See :class:`TokenBatches`.
        count: Number of tokens to predict, of all workers together, rounded down to whole
            sequences. None means all whole sequences.
        batch_size: Largest number of sequences in a worker's batch.
        context: Tokens T of a sequence.
        rank: Rank of this worker.
        world_size: Number of workers.

    Raises:
        TypeError: An argument has another type than those listed.
        ValueError: An argument is out of range, or there are fewer tokens than ``count``.

    Example:
        >>> first = FirstTokens(np.arange(9, dtype=np.uint8), 6, 2, 2, rank=0, world_size=1)
        >>> [inputs.tolist() for inputs, targets in first]
        [[[0, 1], [2, 3]], [[4, 5]]]
    """

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        count: int | None,
        batch_size: int,
        context: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._sequences = _Sequences(tokens, batch_size, context, rank, world_size)
        sequences = self._sequences.count
        if count is not None:
            available = sequences * context
            if not context <= check_int("count", count) <= available:
                raise ValueError(
                    f"count must be from {context}, the context, to {available}, the tokens in "
                    f"whole sequences, not {count}"
                )
            sequences = count // context
        self._numbers = range(rank, sequences, world_size)

    def __len__(self) -> int:
        """Return the number of this worker's batches; 0 if there are fewer sequences than ranks."""
        return -(-len(self._numbers) // self._sequences.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, int64 of shape (at most ``batch_size``, T)."""
        size = self._sequences.batch_size
        for first in range(0, len(self._numbers), size):
            yield self._sequences.batch(self._numbers[first : first + size])
