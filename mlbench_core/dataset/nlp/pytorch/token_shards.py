"""Read tokens for language models: shards of the community's format, and the bytes of a text.

A shard is a file with a header of 256 int32 (20240520, the version 1, the number of tokens, zeros)
and then the tokens as uint16, as ``fineweb_train_000001.bin`` of ``karpathy/llm.c`` and
``KellerJordan/modded-nanogpt`` has them. Shards are mapped into memory and never copied whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlbench_core.arguments import check_at_least, check_rank
from mlbench_core.dataset.local_files import find_file, open_file
from mlbench_core.dataset.registry import WIKITEXT2_FOLDERS, WIKITEXT2_NAMES
from mlbench_core.errors import DatasetError, DatasetNotFoundError

__all__ = ["TokenBatches", "load_shards", "load_text_bytes", "read_shard", "write_shard"]

MAGIC, VERSION = 20240520, 1
HEADER_NUMBERS = 256
HEADER_BYTES = 4 * HEADER_NUMBERS

Tokens = NDArray[Any]


def write_shard(path: Path, tokens: Tokens) -> None:
    """Write a shard.

    Args:
        path: The file.
        tokens: The tokens, from 0 to 65,535.

    Raises:
        ValueError: A token does not fit 16 bits.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**16:
        raise ValueError(
            f"tokens must be from 0 to 65535, not {tokens.min()} to {tokens.max()}: "
            "a shard has 16 bits for each"
        )
    header = np.zeros(HEADER_NUMBERS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())


def read_shard(path: Path) -> Tokens:
    """Map the tokens of a shard into memory.

    Args:
        path: The file.

    Returns:
        The tokens, uint16.

    Raises:
        DatasetError: The file is not a shard, or it is cut off.
    """
    with path.open("rb") as file:
        content = file.read(HEADER_BYTES)
    # A file that is cut off within the header has no numbers to look at.
    header = np.frombuffer(content.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    if tuple(header[:2]) != (MAGIC, VERSION):
        raise DatasetError(
            f"{path} is not a shard of tokens: it must begin with {MAGIC} and {VERSION}"
        )
    count, size = int(header[2]), path.stat().st_size
    if size != HEADER_BYTES + 2 * count:
        raise DatasetError(
            f"{path} must have {HEADER_BYTES + 2 * count} bytes for {count} tokens, not {size}: "
            "download it again"
        )
    tokens: Tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    return tokens


def load_shards(folder: Path, split: str) -> list[Tokens]:
    """Map the shards ``*_train_*.bin`` or ``*_val_*.bin`` of a folder into memory, by name.

    Args:
        folder: The folder.
        split: ``"train"`` or ``"val"``.

    Raises:
        DatasetNotFoundError: The folder has none of these files.
        DatasetError: As in :func:`read_shard`.
    """
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    if not paths:
        raise DatasetNotFoundError(
            f"no shard *_{split}_*.bin in {folder}: give the folder of the shards"
        )
    return list(map(read_shard, paths))


def load_text_bytes(folder: Path, split: str) -> Tokens:
    """Return the bytes of ``train.txt`` or ``valid.txt``, plain or compressed.

    Args:
        folder: The folder, or the one above ``wikitext-2``. The names of the published files,
            ``wiki.train.tokens`` and so on, are found too.
        split: ``"train"``, ``"valid"`` or ``"test"``.

    Returns:
        The bytes, uint8.

    Raises:
        DatasetNotFoundError: The folder does not have the text.
        DatasetError: The file is damaged.
    """
    folders = [folder / below for below in WIKITEXT2_FOLDERS]
    path = find_file(folders, [name.format(part=split) for name in WIKITEXT2_NAMES])
    if path is None:
        raise DatasetNotFoundError(f"no {split}.txt in {folder}: give the folder of the text")
    with open_file(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8)


class TokenBatches:
    """Batches of this worker: sequences of tokens, and the token after each of them.

    Each array is divided into sequences of the context's length. A pass takes every sequence once.
    All workers take turns: a step of k workers with batches of B sequences takes the next k B
    sequences of the pass, B for each worker. The batches never end: one pass follows another, in
    another order.

    The position is known to the sequence, and so to the token. :meth:`state_dict` has it, so a
    resumed run continues with the next batch, also with another number of workers.

    Args:
        tokens: Arrays of uint8 or uint16, for example those of :func:`load_shards`.
        batch_size: Sequences B in a batch.
        context: Tokens of a sequence.
        rank: Rank of this worker.
        world_size: Number of workers.
        seed: Seed of the order of the sequences, at least 0; None for the order of the arrays.

    Raises:
        ValueError: An argument is out of range, or all arrays are shorter than a sequence.

    Example:
        >>> batches = TokenBatches([np.arange(10, dtype=np.uint8)], 2, 3, 0, 1)
        >>> inputs, targets = next(iter(batches))
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """

    def __init__(
        self,
        tokens: Sequence[Tokens],
        batch_size: int,
        context: int,
        rank: int,
        world_size: int,
        seed: int | None = None,
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        check_at_least("context", context, 1)
        check_rank(rank, world_size)
        self.tokens = tokens
        self.batch_size, self.context = batch_size, context
        self.rank, self.world_size, self.seed = rank, world_size, seed
        # The last sequence of an array has a next token too.
        counts = [max(0, len(array) - 1) // context for array in tokens]
        self.ends = np.cumsum(counts)
        self.sequences = int(sum(counts))
        if not self.sequences:
            raise ValueError(
                f"tokens must have at least {context + 1} in an array, not "
                f"{max(map(len, tokens), default=0)}: give a longer text, or a shorter context"
            )
        self.position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets, int64 of shape (batch, context), from the position on."""
        while True:
            first = self.position + self.rank * self.batch_size
            numbers = range(first, first + self.batch_size)
            # Before the batch is given away: who stops here continues with the next one.
            self.position += self.batch_size * self.world_size
            pieces = torch.from_numpy(np.stack([self._sequence(number) for number in numbers]))
            yield pieces[:, :-1], pieces[:, 1:]

    def _sequence(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a sequence and the one after it, by its number in all passes."""
        pass_number, place = divmod(number, self.sequences)
        if self.seed is not None:
            place = int(self._order_of(pass_number)[place])
        array = int(np.searchsorted(self.ends, place, side="right"))
        before = int(self.ends[array - 1]) if array else 0
        start = (place - before) * self.context
        return self.tokens[array][start : start + self.context + 1].astype(np.int64)

    def _order_of(self, pass_number: int) -> NDArray[np.int64]:
        if self._order[0] != pass_number:
            generator = np.random.default_rng([self.seed or 0, pass_number])
            self._order = (pass_number, generator.permutation(self.sequences))
        return self._order[1]

    def state_dict(self) -> dict[str, int]:
        """Return the position: the number of sequences that all workers have taken."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from the position of :meth:`state_dict`."""
        self.position = state_dict["position"]
