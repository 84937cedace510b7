"""Shards of tokens, bytes of texts, and their batches for several workers.

The tests write shards with ``struct``, and derive the expected batches from the whole stream.
"""

from __future__ import annotations

import errno
import gzip
import tracemalloc
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mlbench_core import files
from mlbench_core.dataset.nlp.pytorch.token_shards import (
    FirstTokens,
    TokenBatches,
    load_shards,
    load_text_bytes,
    read_shard,
    write_shard,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError
from tests.helpers.data import test_data
from tests.helpers.shards import shard_bytes

TOKENS = np.arange(0, 60_000, 300)


def starts(batches: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """The first token of each sequence."""
    return [int(token) for inputs, _ in batches for token in inputs[:, 0]]


# --- shards


def test_a_shard_has_the_bytes_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "text_train_000001.bin"
    for dtype in (np.int64, np.uint16, np.dtype(">u2")):
        write_shard(path, TOKENS.astype(dtype))
        assert path.read_bytes() == shard_bytes(TOKENS.tolist())
    write_shard(path, np.empty(0, np.uint16))
    assert path.read_bytes() == shard_bytes([])
    for wrong in (-1, 65_536):
        with pytest.raises(ValueError, match=f"tokens must be from 0 to 65535, not .*{wrong}"):
            write_shard(path, np.array([0, wrong]))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("tokens", [[], [7], [0, 50_256, 65_535]])
def test_a_shard_is_mapped(tmp_path: Path, tokens: list[int]) -> None:
    path = tmp_path / "text_train_000001.bin"
    path.write_bytes(shard_bytes(tokens))
    found = read_shard(path)
    assert found.dtype == np.uint16 and found.tolist() == tokens
    # The memory is that of the file, which the system reads page by page.
    assert isinstance(found.base, np.memmap) and not found.flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header must have 1024 bytes, not 0"),
        (shard_bytes([])[:-1], "its header must have 1024 bytes, not 1023"),
        (shard_bytes([1], magic=7), "its first number must be 20240520, not 7"),
        (shard_bytes([1], order=">"), "is a big-endian shard: convert it to little-endian"),
        (shard_bytes([1], version=2), "must be a shard of version 1, not 2"),
        (shard_bytes([1], count=-1), "its header has -1 tokens"),
        (shard_bytes([1, 2])[:-1], "must have 1028 bytes for 2 tokens, not 1027"),
        (shard_bytes([1, 2]) + b"\0\0", "must have 1028 bytes for 2 tokens, not 1030"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text_val_000000.bin"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        read_shard(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.bin"):
        with pytest.raises(DatasetError, match=f"^{path} cannot be read: "):
            read_shard(path)


def test_a_full_disk_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "move_into_place", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write_shard(tmp_path / "text_train_000001.bin", TOKENS)
    assert list(tmp_path.iterdir()) == []


def test_the_shards_of_a_folder_are_found_by_their_part(tmp_path: Path) -> None:
    for name, tokens in (("train_000002", [3]), ("train_000001", [1, 2]), ("val_000000", [4])):
        (tmp_path / f"fineweb_{name}.bin").write_bytes(shard_bytes(tokens))
    assert [shard.tolist() for shard in load_shards(tmp_path, "train")] == [[1, 2], [3]]
    assert [shard.tolist() for shard in load_shards(tmp_path, "val")] == [[4]]
    with pytest.raises(DatasetNotFoundError, match=r"has no shard \*_test_\*.bin: 'mlbench data"):
        load_shards(tmp_path, "test")


# --- text


def test_the_bytes_of_a_text_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress("Zürich".encode()))
    assert load_text_bytes(tmp_path, "train").tolist() == list("Zürich".encode())
    with pytest.raises(DatasetNotFoundError, match=r"has no valid.txt or wiki.valid.tokens, "):
        load_text_bytes(tmp_path, "valid")


def test_the_bytes_of_wikitext2_are_those_of_its_files() -> None:
    folder = test_data("wikitext-2")
    for split in ("train", "valid", "test"):
        (path,) = folder.glob(f"*{split}*")
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = load_text_bytes(folder, split)
        assert found.dtype == np.uint8 and found.tobytes() == content


# --- batches for training

# Sequences of 4: 6 and 3. The last token of each array is only a target.
ARRAYS = [np.arange(25, dtype=np.uint16), np.arange(100, 115, dtype=np.uint8)]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_sequence_comes_once_in_a_pass(seed: int | None, workers: int) -> None:
    firsts = []
    for rank in range(workers):
        batches = TokenBatches(ARRAYS, 3, 4, rank, workers, seed)
        assert len(batches) == 9 // (3 * workers)
        found = list(islice(batches, 6 // workers))
        for inputs, targets in found:
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape == targets.shape == (3, 4)
            assert torch.equal(targets, inputs + 1)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(4))
        firsts += starts(found)
    assert sorted(firsts) == sorted([0, 4, 8, 12, 16, 20, 100, 104, 108] * 2)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_workers_together_read_the_batch_of_one(
    tmp_path: Path, seed: int | None, workers: int
) -> None:
    # 31 + 7 + 23 sequences, so a joined batch of 8 spans shards and passes.
    random = np.random.default_rng(0)
    shards = []
    for number, count in enumerate((31 * 5 + 1, 7 * 5 + 4, 23 * 5 + 2)):
        path = tmp_path / f"text_train_{number:06d}.bin"
        path.write_bytes(shard_bytes(random.integers(0, 1 << 16, count).tolist()))
        shards.append(read_shard(path))
    one = islice(TokenBatches(shards, 8, 5, 0, 1, seed), 20)
    parts = [TokenBatches(shards, 8 // workers, 5, rank, workers, seed) for rank in range(workers)]
    for (inputs, targets), *shares in zip(one, *(islice(part, 20) for part in parts), strict=True):
        assert torch.equal(torch.cat([share[0] for share in shares]), inputs)
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)


def test_without_a_seed_the_order_is_that_of_the_arrays() -> None:
    found = starts(list(islice(TokenBatches(ARRAYS, 2, 4, 0, 1), 6)))
    assert found == [0, 4, 8, 12, 16, 20, 100, 104, 108, 0, 4, 8]


def test_each_pass_has_another_order_which_the_seed_fixes() -> None:
    array = np.arange(201, dtype=np.uint8)
    orders = []
    for seed in (1, 1, 2):
        found = islice(TokenBatches(array, 50, 4, 0, 1, seed), 2)
        orders += [starts([batch]) for batch in found]
    assert orders[:2] == orders[2:4]
    assert orders[0] != orders[1] and orders[0] != orders[4]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("stop", range(7))
def test_a_run_resumes_at_the_next_batch(seed: int | None, stop: int) -> None:
    def make() -> TokenBatches:
        return TokenBatches(ARRAYS, 2, 4, 1, 2, seed)

    whole = list(islice(make(), 9))
    first, second = make(), make()
    parts = list(islice(first, stop))
    second.load_state_dict(first.state_dict())
    parts += list(islice(second, 9 - stop))
    for (inputs, targets), (all_inputs, all_targets) in zip(parts, whole, strict=True):
        assert torch.equal(inputs, all_inputs) and torch.equal(targets, all_targets)


def test_a_run_resumes_with_another_number_of_workers() -> None:
    four = [TokenBatches(ARRAYS, 1, 4, rank, 4, 3) for rank in range(4)]
    before = [list(islice(batches, 3)) for batches in four]
    states = [batches.state_dict() for batches in four]
    assert states == [{"position": 3 * 4 * 4, "context": 4, "sequences": 9, "seed": 3}] * 4
    one = TokenBatches(ARRAYS, 2, 4, 0, 1, 3)
    one.load_state_dict(states[0])
    found = [token for step in zip(*before, strict=True) for token in starts(step)]
    found += starts(list(islice(one, 3)))
    assert found == starts(list(islice(TokenBatches(ARRAYS, 18, 4, 0, 1, 3), 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 5}, "saved with context 5, but here it is 4"),
        ({"sequences": 10}, "saved with sequences 10, but here it is 9"),
        ({"seed": None}, "saved with seed None, but here it is 3"),
        ({"position": 6}, "position must be a multiple of 4, the context, not 6"),
        ({"position": -4}, "position must be at least 0, not -4"),
    ],
)
def test_the_state_of_another_run_is_refused(change: dict[str, int], message: str) -> None:
    batches = TokenBatches(ARRAYS, 1, 4, 0, 1, 3)
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict({**batches.state_dict(), **change})


def test_a_pass_over_a_shard_needs_memory_for_a_batch_only(tmp_path: Path) -> None:
    path = tmp_path / "text_train_000001.bin"
    write_shard(path, np.zeros(4_000_001, np.uint16))
    batches = TokenBatches(read_shard(path), 10, 1000, 0, 1)
    tracemalloc.start()
    try:
        for _ in islice(batches, len(batches)):
            pass
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Two batches of 10 x 1,001 int64 are 160 kB; the shard has 8 MB.
    assert most_bytes < 1_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(4, dtype=np.uint8)}, "must have at least 5 in an array, not 4"),
        ({"tokens": []}, "must have at least 5 in an array, not 0"),
        ({"tokens": np.arange(9)}, r"must be uint8 or uint16 of shape \(tokens,\), not int64"),
        ({"tokens": np.zeros((9, 9), np.uint8)}, r"not uint8 of shape \(9, 9\)"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"context": 0}, "context must be at least 1, not 0"),
        ({"rank": 2}, "rank must be from 0 to 1, not 2"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"tokens": ARRAYS, "batch_size": 1, "context": 4, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match=message):
        TokenBatches(**{**arguments, **changes})


# --- batches for validation


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_first_tokens_are_validated_once(workers: int) -> None:
    found, sizes = [], []
    for rank in range(workers):
        first = FirstTokens(ARRAYS, 31, 2, 4, rank, workers)
        for _ in range(2):  # each pass is the same
            batches = list(first)
            assert len(batches) == len(first)
            assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)
        found += starts(batches)
        sizes.append(sum(len(inputs) for inputs, _ in batches))
    assert sorted(found) == [0, 4, 8, 12, 16, 20, 100]
    assert max(sizes) - min(sizes) <= 1


def test_the_number_of_tokens_to_validate() -> None:
    assert len(starts(list(FirstTokens(ARRAYS, None, 4, 4, 0, 1)))) == 9
    assert len(starts(list(FirstTokens(ARRAYS, 36, 4, 4, 0, 1)))) == 9
    for count in (3, 37):
        with pytest.raises(ValueError, match=f"count must be from 4, .* to 36, .* not {count}"):
            FirstTokens(ARRAYS, count, 4, 4, 0, 1)
