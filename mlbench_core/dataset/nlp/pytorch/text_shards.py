"""Convert text files to shards of tokens: their bytes, or the symbols of a tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_core import files
from mlbench_core.arguments import check_int
from mlbench_core.dataset.download import show_progress
from mlbench_core.dataset.local_files import open_file, read_lines
from mlbench_core.dataset.nlp.pytorch.token_shards import Tokens, write_shard
from mlbench_core.errors import DatasetError, require

__all__ = ["convert_text"]

_PIECE_BYTES = 1 << 20
_MOST_TOKENS = 1 << 16
_DOCUMENT = "<|endoftext|>"


def convert_text(
    texts: Sequence[Path],
    folder: Path,
    split: str,
    *,
    tokenizer: Path | None = None,
    shard_tokens: int = 100_000_000,
) -> int:
    """Convert text files to shards ``text_<split>_000001.bin``, ``text_<split>_000002.bin``, ...

    The texts follow each other in the given order. The shards get their names when all of them are
    complete. The memory that is needed is that of one shard and of a piece of the text.

    Args:
        texts: Files, plain or compressed.
        folder: Destination folder; it is created.
        split: ``"train"`` or ``"val"``.
        tokenizer: A file ``tokenizer.json`` of the package tokenizers, for UTF-8 text. Each line
            then ends with one line feed. Each text begins with the symbol ``<|endoftext|>`` if the
            tokenizer has it, as GPT-2's documents do. None makes each byte a token.
        shard_tokens: Tokens of a shard, at least 1; the last one has the rest.

    Returns:
        The number of tokens.

    Raises:
        ValueError: ``split`` or ``shard_tokens`` is not one of the values above.
        DatasetError: A file cannot be read, the tokenizer has more symbols than 16 bits can number,
            the texts are empty, or the folder has shards of this part already.
        MissingDependencyError: The package tokenizers is not installed.
        OSError: The disk is full.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    check_int("shard_tokens", shard_tokens)
    encoder = None if tokenizer is None else _load_tokenizer(tokenizer)
    # A run reads all shards of a part, so old and new ones must not be mixed.
    if found := sorted(folder.glob(f"*_{split}_*.bin")):
        raise DatasetError(
            f"{folder} has shards of the part {split} already, such as {found[0].name}: delete "
            "them, or use another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".shards-", dir=folder) as scratch:
        total = 0
        for number, shard in enumerate(_cut(_read(texts, encoder), shard_tokens), 1):
            total += len(shard)
            write_shard(Path(scratch, f"text_{split}_{number:06d}.bin"), shard)
        if not total:
            raise DatasetError(f"{', '.join(map(str, texts))} must have text, but is empty")
        for path in sorted(Path(scratch).iterdir()):
            files.move_into_place(path, folder / path.name)
    return total


def _load_tokenizer(path: Path) -> Any:
    tokenizers: Any = require("tokenizers", "text")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    # The package raises plain exceptions, for a missing file too.
    except Exception as error:
        raise DatasetError(
            f"{path} must be a tokenizer.json of the package tokenizers: {error}"
        ) from error
    most = max(encoder.get_vocab().values(), default=0)
    if most >= _MOST_TOKENS:
        raise DatasetError(
            f"{path} must number its symbols from 0 to {_MOST_TOKENS - 1}, not to {most}: a shard "
            "has 16 bits for each; use a smaller vocabulary"
        )
    # A tokenizer that is made for batches of sentences would cut the text off, or fill it up.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _read(texts: Sequence[Path], encoder: Any) -> Iterator[Tokens]:
    """Yield the tokens of all texts in pieces."""
    with show_progress("text", len(texts)) as advance:
        for path in texts:
            if encoder is None:
                yield from _read_bytes(path)
            else:
                yield from _encode(path, encoder)
            advance(1)


def _read_bytes(path: Path) -> Iterator[Tokens]:
    with open_file(path) as file:
        while piece := file.read(_PIECE_BYTES):
            yield np.frombuffer(piece, dtype=np.uint8)


def _encode(path: Path, encoder: Any) -> Iterator[Tokens]:
    document = encoder.token_to_id(_DOCUMENT)
    if document is not None:
        yield np.array([document], dtype=np.uint16)
    for piece in _pieces(path):
        ids = encoder.encode(piece, add_special_tokens=False).ids
        yield np.array(ids, dtype=np.uint16)


def _pieces(path: Path) -> Iterator[str]:
    """Yield a text in pieces whose symbols are those of the whole text, for GPT-2's rules."""
    lines: list[str] = []
    size = 0
    for line in read_lines(path):
        # White space of several characters is one word, and a space belongs to the word after it.
        # So the text can be cut only after a line feed between two other characters.
        if size >= _PIECE_BYTES and lines[-1][-2:-1].strip() and line[:1].strip():
            yield "".join(lines)
            lines.clear()
            size = 0
        lines.append(line + "\n")
        size += len(line) + 1
    if lines:
        yield "".join(lines)


def _cut(pieces: Iterable[Tokens], shard_tokens: int) -> Iterator[Tokens]:
    """Yield the tokens of all pieces in shards; each is overwritten by the next one."""
    # The system provides the memory when it is first written, so a short text needs little.
    shard = np.empty(shard_tokens, dtype=np.uint16)
    filled = 0
    for piece in pieces:
        while len(piece):
            taken = piece[: shard_tokens - filled]
            shard[filled : filled + len(taken)] = taken
            filled += len(taken)
            piece = piece[len(taken) :]
            if filled == shard_tokens:
                yield shard
                filled = 0
    if filled:
        yield shard[:filled]
