"""Stores for a task: made once of what text there is, and split where there is no test part."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from mlbench_core.dataset.linearmodels.pytorch import LinearBatches, LMDBDataset
from mlbench_core.dataset.linearmodels.pytorch.preparation import find_text, prepare_stores
from mlbench_core.dataset.linearmodels.pytorch.subset import RowSubset, train_and_validation
from mlbench_core.errors import DatasetNotFoundError

FEATURES = np.arange(60, dtype=np.float32).reshape(20, 3)
LABELS = np.where(np.arange(20) % 2 == 0, -1, 1)


def write(path: Path, rows: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    dump_svmlight_file(FEATURES[:rows], LABELS[:rows], str(path), zero_based=False)


def test_text_is_converted_once_and_again_when_it_is_newer(tmp_path: Path) -> None:
    text = tmp_path / "text" / "own"
    write(text)
    folder = prepare_stores("own", tmp_path / "stores", text.parent)
    first = (folder / "own_train.lmdb").stat().st_mtime_ns
    assert prepare_stores("own", tmp_path / "stores", text.parent) == folder
    assert (folder / "own_train.lmdb").stat().st_mtime_ns == first
    write(text, rows=10)
    os.utime(text, ns=(first + 10**9, first + 10**9))
    prepare_stores("own", tmp_path / "stores", text.parent)
    assert len(LMDBDataset("own", "train", folder)) == 10


def test_text_of_another_folder_is_another_data_set(tmp_path: Path) -> None:
    for name, rows in (("a", 20), ("b", 12)):
        write(tmp_path / name / "own", rows)
    folders = [prepare_stores("own", tmp_path / "stores", tmp_path / name) for name in ("a", "b")]
    assert [len(LMDBDataset("own", "train", folder)) for folder in folders] == [20, 12]
    assert (
        prepare_stores("own", tmp_path / "elsewhere", folders[0]) == folders[0]
    )  # stores are taken as they are


def test_parts_have_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path / "own")
    dump_svmlight_file(FEATURES[:4, :2], LABELS[:4], str(tmp_path / "own.t"), zero_based=False)
    train, validation = train_and_validation(
        "own", prepare_stores("own", tmp_path / "stores", tmp_path)
    )
    assert (len(train), len(validation)) == (20, 4)
    assert train.n_features == validation.n_features == 3


def test_names_of_texts(tmp_path: Path) -> None:
    for name in ("epsilon_normalized.t.gz", "mine.xz"):
        (tmp_path / name).touch()
    assert find_text(tmp_path, "epsilon", "test").name == "epsilon_normalized.t.gz"
    assert find_text(tmp_path, "mine", "train").name == "mine.xz"
    with pytest.raises(
        DatasetNotFoundError, match=r"no text of mine test; looked for mine\.t, mine\.t\.gz"
    ):
        find_text(tmp_path, "mine", "test")
    with pytest.raises(ValueError, match=r"name must be one of a9a, .* not 'mine'"):
        prepare_stores("mine", tmp_path)


def test_a_published_test_part_that_is_missing_is_not_replaced_by_a_held_out_fifth(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a9a")
    with pytest.raises(DatasetNotFoundError, match="a9a test"):
        prepare_stores("a9a", tmp_path / "stores", tmp_path)
    (folder,) = (tmp_path / "stores").glob("text-*")
    with pytest.raises(DatasetNotFoundError, match="a9a_test"):
        train_and_validation("a9a", folder)


def test_rows_are_held_out_of_each_class_and_batches_are_fetched_whole(tmp_path: Path) -> None:
    write(tmp_path / "own")
    train, validation = train_and_validation(
        "own", prepare_stores("own", tmp_path / "stores", tmp_path)
    )
    assert isinstance(train, RowSubset) and isinstance(validation, RowSubset)
    assert sorted([*train.rows, *validation.rows]) == list(range(20))
    assert validation.targets.sort().values.tolist() == [0, 0, 1, 1]
    x, y = next(iter(LinearBatches(validation, 8, shuffle=False)))
    np.testing.assert_array_equal(x, FEATURES[validation.rows])
    np.testing.assert_array_equal(y.squeeze(1), LABELS[validation.rows] > 0)
    seen = np.concatenate(
        [x[:, 0].numpy() for x, _ in LinearBatches(train, 3, shuffle=True, seed=1)]
    )
    assert sorted(seen) == sorted(FEATURES[train.rows, 0])
    for rows in ([], [3, 1], [0, 20], [-1, 2]):
        with pytest.raises(ValueError, match="0 to 19 in increasing order"):
            RowSubset(train.dataset, rows)
