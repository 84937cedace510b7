"""Shards of tokens, bytes of texts, and their batches for several workers."""

from __future__ import annotations

import gzip
import struct
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from mlbench_core.dataset.nlp.pytorch.token_shards import (
    TokenBatches,
    load_shards,
    load_text_bytes,
    read_shard,
    write_shard,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError

TOKENS = np.arange(0, 60_000, 300)


def shard_bytes(tokens: list[int], magic: int = 20240520, version: int = 1) -> bytes:
    """The community's format, written byte by byte."""
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(4 * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def test_a_shard_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "text_train_000001.bin"
    write_shard(path, TOKENS)
    assert path.read_bytes() == shard_bytes(TOKENS.tolist())
    found = read_shard(path)
    assert isinstance(found, np.memmap) and found.dtype == np.uint16
    assert np.array_equal(found, TOKENS)
    with pytest.raises(ValueError, match="tokens must be from 0 to 65535, not 0 to 65536"):
        write_shard(path, np.array([0, 65_536]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "is not a shard of tokens"),
        (shard_bytes([1, 2], magic=7), "is not a shard of tokens"),
        (shard_bytes([1, 2], version=2), "is not a shard of tokens"),
        (shard_bytes([1, 2])[:-2], "must have 1028 bytes for 2 tokens, not 1026"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text_val_000000.bin"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        read_shard(path)


def test_the_shards_of_a_folder_are_found_by_their_part(tmp_path: Path) -> None:
    for name, tokens in (("train_000002", [3]), ("train_000001", [1, 2]), ("val_000000", [4])):
        (tmp_path / f"fineweb_{name}.bin").write_bytes(shard_bytes(tokens))
    assert [shard.tolist() for shard in load_shards(tmp_path, "train")] == [[1, 2], [3]]
    assert [shard.tolist() for shard in load_shards(tmp_path, "val")] == [[4]]
    with pytest.raises(DatasetNotFoundError, match=r"no shard \*_test_\*.bin in"):
        load_shards(tmp_path, "test")


def test_the_bytes_of_a_text_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress("Zürich".encode()))
    assert load_text_bytes(tmp_path, "train").tolist() == list("Zürich".encode())
    with pytest.raises(DatasetNotFoundError, match=r"no valid.txt in"):
        load_text_bytes(tmp_path, "valid")


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_read_every_sequence_once_in_a_pass(seed: int | None, workers: int) -> None:
    # 6 sequences of 4 tokens, then 3; the last tokens of both arrays have no next one.
    arrays = [np.arange(25, dtype=np.uint16), np.arange(100, 115, dtype=np.uint8)]
    firsts = []
    for rank in range(workers):
        batches = TokenBatches(arrays, 3, 4, rank, workers, seed)
        for inputs, targets in islice(batches, 6 // workers):
            assert inputs.dtype == targets.dtype == torch.int64
            assert torch.equal(targets, inputs + 1)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(4))
            firsts += inputs[:, 0].tolist()
    assert sorted(firsts) == sorted([0, 4, 8, 12, 16, 20, 100, 104, 108] * 2)


def test_each_pass_has_another_order_which_the_seed_fixes() -> None:
    array = np.arange(201, dtype=np.uint8)
    orders = []
    for seed in (1, 1, 2):
        batches = TokenBatches([array], 50, 4, 0, 1, seed)
        orders += [inputs[:, 0].tolist() for inputs, _ in islice(batches, 2)]
    assert orders[:2] == orders[2:4]
    assert orders[0] != orders[1] and orders[0] != orders[4]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_position_continues_in_the_middle_of_a_pass(seed: int | None) -> None:
    array = np.arange(101, dtype=np.uint8)

    def make() -> TokenBatches:
        return TokenBatches([array], 3, 4, 1, 2, seed)

    whole = list(islice(make(), 9))
    first, second = make(), make()
    parts = list(islice(first, 5))
    second.load_state_dict(first.state_dict())
    parts += list(islice(second, 4))
    for (inputs, _), (expected, _) in zip(parts, whole, strict=True):
        assert torch.equal(inputs, expected)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="must have at least 5 in an array, not 4"):
        TokenBatches([np.arange(4, dtype=np.uint8)], 1, 4, 0, 1)
