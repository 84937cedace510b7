"""The store of sentence pairs: what comes back, how it is written, and what is wrong with damaged
ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlbench_core.dataset.nlp.pytorch.pair_store import (
    FORMAT_VERSION,
    PairHeader,
    PairStore,
    write_pairs,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError


def header(size: int = 100) -> PairHeader:
    return PairHeader(("en", "de"), size, "0123", extra={"note": "x"})


def random_pairs(count: int, size: int = 100) -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(0)
    sides = (
        [generator.integers(0, size, n) for n in generator.integers(0, 9, count)] for _ in range(2)
    )
    sources, targets = sides
    return sources, targets


@pytest.mark.parametrize(
    ("size", "dtype"), [(100, "uint16"), (65_536, "uint16"), (65_537, "int32")]
)
def test_pairs_come_back(tmp_path: Path, size: int, dtype: str) -> None:
    sources, targets = random_pairs(57, size)
    blocks = [(sources[:20], targets[:20]), ([], []), (sources[20:], targets[20:])]
    written = write_pairs(tmp_path / "store", header(size), blocks)
    for store in (
        written,
        PairStore(tmp_path / "store"),
        PairStore(tmp_path / "store", in_memory=True),
    ):
        assert len(store) == len(store.source) == 57 and store.header.languages == ("en", "de")
        assert store.header.tokens == (sum(map(len, sources)), sum(map(len, targets)))
        assert store.header.extra == {"note": "x"} and store.header.version == FORMAT_VERSION
        for i in range(57):
            np.testing.assert_array_equal(store.source[i], sources[i])
            np.testing.assert_array_equal(store.target[i], targets[i])
        assert store.source.lengths.tolist() == [len(s) for s in sources]
        assert store.source.numbers.dtype == dtype
    assert isinstance(PairStore(tmp_path / "store").source.numbers.base, np.memmap)
    assert not isinstance(
        PairStore(tmp_path / "store", in_memory=True).source.numbers.base, np.memmap
    )


def test_store_is_plain_files_without_pickles(tmp_path: Path) -> None:
    write_pairs(tmp_path / "store", header(), [random_pairs(3)])
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {
        "header.json",
        "source.npy",
        "source.offsets.npy",
        "target.npy",
        "target.offsets.npy",
    }
    np.load(tmp_path / "store" / "source.npy", allow_pickle=False)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_empty_store(tmp_path: Path) -> None:
    store = write_pairs(tmp_path / "store", header(), [])
    assert len(store) == 0 and store.source.lengths.tolist() == []
    with pytest.raises(IndexError, match="index must be at least 0 and below 0"):
        store.source[0]


def test_failed_writing_leaves_what_was_there(tmp_path: Path) -> None:
    write_pairs(tmp_path / "store", header(), [([np.array([1])], [np.array([2])])])
    for block, message in (
        (
            ([np.array([100])], [np.array([1])]),
            "numbers must be those of the vocabulary, 0 to 99, not 100 to 100",
        ),
        (([np.array([1])], [np.array([-1])]), "0 to 99, not -1 to -1"),
        (([np.array([1])], []), "a block must have 1 targets, one per source, not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            write_pairs(tmp_path / "store", header(), [block])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert PairStore(tmp_path / "store").source[0].tolist() == [1]


def test_damaged_and_foreign_stores_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(DatasetNotFoundError, match=r"the store .* does not exist"):
        PairStore(folder)
    write_pairs(folder, header(), [random_pairs(5)])
    with pytest.raises(DatasetError, match="has the vocabulary 0123, not 4567"):
        PairStore(folder, vocabulary_checksum="4567")
    original = (folder / "header.json").read_text()
    for change, message in (
        ({"version": 99}, "has version 99 of the format, not 1"),
        ({"pairs": 6}, "is damaged: the source does not have 6 sentences, one after the other"),
        ({"surprise": 1}, "is damaged: .*surprise"),
    ):
        (folder / "header.json").write_text(json.dumps({**json.loads(original), **change}))
        with pytest.raises(DatasetError, match=message):
            PairStore(folder)
    (folder / "header.json").write_text(original)
    (folder / "target.npy").write_bytes((folder / "target.npy").read_bytes()[:-3])
    with pytest.raises(DatasetError, match=r"target.npy is damaged"):
        PairStore(folder)
