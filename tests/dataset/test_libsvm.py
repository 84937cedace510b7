"""LIBSVM text to LMDB stores and back."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlbench_core.dataset.libsvm_names import KNOWN
from mlbench_core.dataset.linearmodels.pytorch import LMDBDataset, collate_rows, libsvm, libsvm_text
from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter
from mlbench_core.dataset.linearmodels.pytorch.synthetic_dense import (
    logistic_optimum,
    synthetic_rows,
    synthetic_weights,
    write_synthetic_dense,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError
from tests.helpers.data import test_data
from tests.helpers.processes import ROOT, environment

lmdb = pytest.importorskip("lmdb", reason="the package lmdb is not installed")
sklearn_datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")

REAL = {
    "a9a-train": ("a9a", "train", "a9a.gz"),
    "a9a-test": ("a9a", "test", "a9a.t.gz"),
    "agaricus-train": ("agaricus", "train", "agaricus.txt.train"),
    "agaricus-test": ("agaricus", "test", "agaricus.txt.test"),
    "australian": ("australian", "train", "australian"),
    "heart_scale": ("heart_scale", "train", "heart_scale"),
}
TEXT = "+1 1:0.5 3:2\n-1 2:-1.25\n+1 3:1e-3 # a remark\n\n-1\n"


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text)
    return path


def run_command(*arguments: Any) -> int:
    return libsvm.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("which", "layout"),
    [*((which, "dense") for which in REAL), ("agaricus-test", "csr"), ("heart_scale", "csr")],
)
def test_every_value_is_what_scikit_learn_reads(
    which: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 5000)  # many borders
    name, part, file_name = REAL[which]
    source = test_data("libsvm", file_name)
    assert (
        run_command(
            name, part, tmp_path, "--file", source, "--layout", layout, "--dtype", "float64"
        )
        == 0
    )
    expected, labels = sklearn_datasets.load_svmlight_file(
        str(source), n_features=KNOWN[name].n_features
    )
    for read_as in ("dense", "sparse_csr"):
        dataset = LMDBDataset(name, part, tmp_path, layout=read_as)
        features, targets = dataset.batch(range(len(dataset)))
        assert np.array_equal(features.to_dense().numpy(), expected.toarray())
        assert targets.flatten().tolist() == (labels > 0).astype(float).tolist()
    store = LinearStore(tmp_path / f"{name}_{part}.lmdb")
    assert store.header.label_map == ({"0": 0, "1": 1} if name == "agaricus" else {"-1": 0, "1": 1})
    store.verify()
    dataset.close()


@pytest.mark.parametrize(
    ("layout", "dtype"), [("dense", "float32"), ("csr", "float32"), ("dense", "float64")]
)
def test_text_written_from_a_store_gives_the_same_numbers_back(
    layout: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 1000)
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((300, 7)).astype(dtype) * 10.0 ** generator.integers(
        -30, 30, (300, 7)
    )
    rows = rows.astype(dtype)
    rows[generator.random(rows.shape) < 0.5] = 0
    with StoreWriter(
        tmp_path / "n_train.lmdb", 7, layout=layout, dtype=dtype, rows_per_block=13
    ) as writer:
        writer.append(rows, generator.choice([1.0, 2.0], 300))
        writer.finish(label_map={"1": 0, "2": 1})
    assert run_command("n", "train", tmp_path, "--to-text") == 0
    again = libsvm.convert(
        [tmp_path / "n_train.svm"],
        tmp_path / "again.lmdb",
        n_features=7,
        layout=layout,
        dtype=dtype,
    )
    before, after = LinearStore(tmp_path / "n_train.lmdb"), LinearStore(again[0])
    everything = np.arange(300)
    for one, other in zip(before.take_csr(everything), after.take_csr(everything), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(before.labels, after.labels)
    assert after.header.label_map == {"1": 0, "2": 1}
    dense = torch.empty(300, 7, dtype=getattr(torch, dtype))
    after.take(everything, dense)
    assert np.array_equal(dense.numpy(), rows)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_text_is_the_same_text(
    suffix: str, compress: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 20)
    packed = tmp_path / f"text{suffix}"
    packed.write_bytes(compress(TEXT.encode()))
    libsvm.convert([packed], tmp_path / "t_train.lmdb")
    dataset = LMDBDataset("t", "train", tmp_path)
    assert dataset.batch(range(4))[0].tolist() == [
        [0.5, 0, 2],
        [0, -1.25, 0],
        [0, 0, pytest.approx(1e-3)],
        [0, 0, 0],
    ]
    assert dataset.targets.tolist() == [1, 0, 1, 0]
    packed.write_bytes(compress(TEXT.encode() * 1000)[:-30])
    with pytest.raises(DatasetError, match=r"text\.\w+ is damaged"):
        libsvm.convert([packed], tmp_path / "t_test.lmdb", n_features=3, layout="dense")


@pytest.mark.parametrize("separate", [False, True])
def test_several_texts_make_one_data_set(separate: bool, tmp_path: Path) -> None:
    # Version 3.0 returned None for several files, and later always rows of the first.
    first = write(tmp_path / "first", "1 1:1\n2 2:2\n")
    second = write(tmp_path / "second", "2 1:3\n2 5:4\n1 1:5\n")
    extra = ["--separate"] if separate else []
    assert run_command("two", "train", tmp_path, "--file", first, "--file", second, *extra) == 0
    assert len(list(tmp_path.glob("*.lmdb"))) == (2 if separate else 1)
    dataset = LMDBDataset("two", "train", tmp_path)
    features, labels = dataset.batch([4, 0, 3, 1, 2, -1])
    assert features.sum(1).tolist() == [5, 1, 4, 2, 3, 5]
    assert labels.flatten().tolist() == [0, 0, 1, 1, 1, 0]
    assert dataset[3][0].tolist() == [0, 0, 0, 0, 4]
    sparse = LMDBDataset("two", "train", tmp_path, layout="sparse_csr")
    assert torch.equal(collate_rows(sparse.__getitems__([4, 0, 3]))[0].to_dense(), features[:3])
    if separate:
        next(tmp_path.glob("*-00001-of-00002.lmdb")).unlink()
        with pytest.raises(DatasetError, match=r"has the parts \[0\] of the data set, not 0 to 1"):
            LMDBDataset("two", "train", tmp_path)
        with pytest.raises(DatasetError, match="other stores of the same name"):
            libsvm.convert([first], tmp_path / "two_train.lmdb")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1 2:1 1:3", "sorted"),
        ("1 1:a", "could not convert"),
        ("x 1:1", "could not convert"),
        ("1 0:1", "Invalid index 0"),
        ("1 1:nan", "not finite"),
        ("1 1:1e39", "not finite"),
        ("1 1", "need more|not enough|split|expected"),
        ("1 99:1", "99 features"),
        ("<!DOCTYPE html>", "could not convert"),
        ("\0\1\2\3", ""),
    ],
)
def test_a_wrong_line_is_named(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 2000)
    text = write(tmp_path / "text", "1 1:1\n" * 5000 + line + "\n" + "1 1:1\n" * 700)
    with pytest.raises(DatasetError, match=f"text, line 5001: .*({says})"):
        libsvm.convert([text], tmp_path / "w_train.lmdb", n_features=9, layout="dense")
    assert {path.name for path in tmp_path.iterdir()} == {"text", ".w_train.lmdb.lock"}


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    text = write(tmp_path / "text")
    for change, says in [
        ({"layout": "sparse"}, "layout must be 'auto', 'dense' or 'csr', not 'sparse'"),
        ({"labels": "0/1"}, "labels must be .* not '0/1'"),
        ({"labels": (1, 1)}, "two different labels"),
        ({"dtype": "float16", "n_features": 3, "layout": "dense"}, "not 'dense' and 'float16'"),
        ({"n_features": 0, "layout": "dense"}, "at least 1, not 0 and None"),
    ]:
        with pytest.raises(ValueError, match=says):
            libsvm.convert([text], tmp_path / "a.lmdb", **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must end in \.lmdb"):
        libsvm.convert([text], tmp_path / "a")
    with pytest.raises(ValueError, match="at least 1, not 3 and 0"):
        StoreWriter(tmp_path / "a.lmdb", 3, rows_per_block=0)
    with pytest.raises(ValueError, match="sources is empty"):
        libsvm.convert([], tmp_path / "a.lmdb")
    with pytest.raises(DatasetNotFoundError, match="absent does not exist"):
        libsvm.convert([tmp_path / "absent"], tmp_path / "a.lmdb", n_features=3, layout="dense")
    with pytest.raises(DatasetError, match=r"no rows"):
        libsvm.convert(
            [write(tmp_path / "e", "# nothing\n")],
            tmp_path / "a.lmdb",
            n_features=3,
            layout="dense",
        )
    with pytest.raises(DatasetError, match=r"labels \[-1.0, 1.0\]; expected only 0 and 1"):
        libsvm.convert([text], tmp_path / "a.lmdb", labels=(0, 1))
    with pytest.raises(ValueError, match=r"name must be one of a9a, .* not 'nothing'"):
        libsvm.download("nothing", "train", tmp_path)
    with pytest.raises(ValueError, match=r"australian has no part 'test'"):
        libsvm.download("australian", "test", tmp_path)


@pytest.mark.parametrize(
    ("labels", "option", "stored", "label_map"),
    [
        ([-1, 1, 1], "auto", [0, 1, 1], {"-1": 0, "1": 1}),
        ([1, 1, 1], "auto", [1, 1, 1], {"-1": 0, "1": 1}),
        ([0, 1, 0], "auto", [0, 1, 0], {"0": 0, "1": 1}),
        ([1, 2, 1], "auto", [0, 1, 0], {"1": 0, "2": 1}),
        ([1, 2, 3], "auto", [1, 2, 3], None),
        ([0.5, -2.25, 7], "auto", [0.5, -2.25, 7], None),
        ([-1, 1, 1], "keep", [-1, 1, 1], None),
        ([4, 4, 9], (9, 4), [1, 1, 0], {"9": 0, "4": 1}),
    ],
)
def test_labels_become_0_and_1(
    labels: list[float], option: Any, stored: Any, label_map: Any, tmp_path: Path
) -> None:
    text = write(tmp_path / "text", "".join(f"{label} 1:1\n" for label in labels))
    store = LinearStore(libsvm.convert([text], tmp_path / "l_train.lmdb", labels=option)[0])
    assert store.labels.tolist() == stored
    assert store.header.label_map == label_map
    libsvm.store_to_text([store.path], tmp_path / "back")
    assert [
        float(line.split()[0]) for line in (tmp_path / "back").read_text().splitlines()
    ] == labels


def test_the_map_grows_and_blocks_are_cut_anew(tmp_path: Path) -> None:
    rows = np.arange(90_000.0).reshape(90, 1000).astype(np.float32)
    with StoreWriter(tmp_path / "m.lmdb", 1000, rows_per_block=7) as writer:
        writer._environment.set_mapsize(1 << 16)
        for start in (0, 1, 2, 40, 85):
            stop = {0: 1, 1: 2, 2: 40, 40: 85, 85: 90}[start]
            writer.append(rows[start:stop], np.zeros(stop - start))
        header = writer.finish()
    assert (header.n_rows, header.n_blocks) == (90, 13)
    out = torch.empty(90, 1000)
    store = LinearStore(tmp_path / "m.lmdb")
    store.take(np.arange(90), out)
    assert np.array_equal(out.numpy(), rows)


KILLED = """
import os, signal, sys
import numpy as np
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter
with StoreWriter(sys.argv[1], 100, rows_per_block=10) as writer:
    for _ in range(50):
        writer.append(np.ones((100, 100)), np.ones(100))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_conversion_leaves_nothing_under_the_name_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    target = tmp_path / "k_train.lmdb"
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(target)], env=environment(), cwd=ROOT, timeout=240
    )
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / ".k_train.lmdb.part").stat().st_size > 1000
    with pytest.raises(DatasetNotFoundError, match=r"it has no \*\.lmdb"):
        LMDBDataset("k", "train", tmp_path)
    libsvm.convert([write(tmp_path / "text")], target)
    assert len(LMDBDataset("k", "train", tmp_path)) == 4
    assert not (tmp_path / ".k_train.lmdb.part").exists()


def test_an_old_store_stays_while_a_conversion_fails(tmp_path: Path) -> None:
    target = libsvm.convert([write(tmp_path / "text")], tmp_path / "o_train.lmdb")[0]
    before = LMDBDataset("o", "train", tmp_path)
    bad = write(tmp_path / "bad", "1 1:1\n1 1:x\n")
    with pytest.raises(DatasetError, match="bad, line 2"):
        libsvm.convert([bad], target, n_features=3, layout="dense")
    assert len(LMDBDataset("o", "train", tmp_path)) == 4
    libsvm.convert([write(tmp_path / "text", "1 1:1\n")], target)  # while the first is open
    assert (len(LMDBDataset("o", "train", tmp_path)), len(before), before[1][1].item()) == (1, 4, 0)


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, hard)
    )  # Python ignores SIGXFSZ: writing fails
    try:
        with pytest.raises(
            DatasetError, match=r"the disk is full: .*d_train\.lmdb could not be written"
        ):
            write_synthetic_dense(tmp_path / "d_train.lmdb", 100, 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [".d_train.lmdb.lock"]


def test_other_files_are_refused_and_pickles_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "code was run"),))

    (tmp_path / "noise_train.lmdb").write_bytes(b"x" * 50_000)
    old = lmdb.open(
        str(tmp_path / "old_train.lmdb"), map_size=1 << 20
    )  # version 3.0's were folders too
    with old, old.begin(write=True) as transaction:
        transaction.put(b"0", pickle.dumps(Trap()))
        transaction.put(b"header", pickle.dumps(Trap()))
    with pytest.raises(
        DatasetError, match=r"pickled rows. They are never loaded.*convert the text again"
    ):
        LMDBDataset("old", "train", tmp_path)
    assert not (tmp_path / "code was run").exists()
    with pytest.raises(DatasetError, match=r"cannot be read as an LMDB"):
        LMDBDataset("noise", "train", tmp_path)
    with pytest.raises(
        DatasetNotFoundError, match=r"no a9a_test\.lmdb .*noise_train\.lmdb.*libsvm a9a test"
    ):
        LMDBDataset("a9a", "test", tmp_path)
    with pytest.raises(ValueError, match="data_type must be 'train' or 'test', not 'valid'"):
        LMDBDataset("a9a", "valid", tmp_path)


def test_damage_is_found(tmp_path: Path) -> None:
    path = write_synthetic_dense(tmp_path / "d_train.lmdb", 50, 3000, rows_per_block=100)
    content = bytearray(path.read_bytes())
    where = content.index(synthetic_rows(0, 50)[0][150].tobytes())  # a row of block 1
    content[where] ^= 1
    flipped = tmp_path / "f_train.lmdb"
    flipped.write_bytes(content)
    LinearStore(path).verify()
    with pytest.raises(DatasetError, match=r"block 1 of .* another checksum"):
        LinearStore(flipped).verify()
    assert run_command("f", "train", tmp_path, "--verify") == 1
    assert run_command("d", "train", tmp_path, "--verify") == 0
    (tmp_path / "c_train.lmdb").write_bytes(content[: len(content) // 2])
    with pytest.raises(DatasetError, match=r"is cut off: it has \d+ of \d+ bytes"):
        LMDBDataset("c", "train", tmp_path)


def test_the_command_makes_all_parts_of_synthetic_dense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(
            "synthetic_dense", tmp_path, "--rows", 1500, "--features", 20, "--optimum", "0.001"
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "synthetic_dense_train.lmdb: 1500 rows, 20 features, dense" in shown
    train, test = (LMDBDataset("synthetic_dense", part, tmp_path) for part in ("train", "test"))
    assert not torch.equal(train.batch(range(100))[0], test.batch(range(100))[0])
    found = train.stores[0].header.extra["optimum"]
    best = logistic_optimum(*(part.numpy() for part in train.batch(range(1500))), l2=0.001)
    assert found["loss"] == pytest.approx(best.loss, abs=1e-14)
    assert found["gap"] < 1e-15


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing", "train", "x"], "the name 'nothing' is not known"),
        (["australian", "test", "x"], "has no part 'test'; it has train"),
        (["mine", "x", "--file", "y"], "data_type must be train or test"),
        (["a9a", "x", "--labels", "1"], "'1' is not auto, keep or two integers"),
    ],
)
def test_wrong_command_lines_are_explained(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        libsvm.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("place", ["util", "linearmodels"])
def test_the_command_runs_under_its_old_and_its_new_path(place: str) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        f"mlbench_core.dataset.{place}.pytorch.libsvm",
        "nothing",
        "train",
        "x",
    ]
    ended = subprocess.run(
        command, env=environment(), cwd=ROOT, timeout=240, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the name 'nothing' is not known" in ended.stderr


def test_a_download_is_kept_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = test_data("libsvm", "heart_scale").read_bytes()

    def fetch(url: str, dest: Path, sha256: str | None) -> Path:
        assert url.endswith("/heart_scale") and sha256
        dest.write_bytes(source)
        return dest

    monkeypatch.setattr(libsvm, "progress_download", fetch)
    assert run_command("heart_scale", "train", tmp_path) == 0
    assert len(LMDBDataset("heart_scale", "train", tmp_path)) == 270
    monkeypatch.undo()
    assert run_command("heart_scale", tmp_path) == 0  # from the file that is there
    (tmp_path / "heart_scale").write_bytes(source[:1000])
    assert run_command("heart_scale", tmp_path) == 1
    (tmp_path / "australian").write_bytes(b"1 1:1\n-1 14:1\n")  # no checksum is known: too few rows
    assert run_command("australian", tmp_path) == 1
    assert not (tmp_path / "australian_train.lmdb").exists()


def test_synthetic_dense_is_the_same_everywhere() -> None:
    import hashlib

    features, labels = synthetic_rows(1, 30, seed=5)
    digest = hashlib.sha256(
        features.astype("<f4").tobytes() + labels.astype("<f4").tobytes()
    ).hexdigest()
    assert digest == "bd305733f5b3ea0160c0447236a8fda015e22eef9422c048ce0f0ee3fb3497e8"
    assert np.linalg.norm(features, axis=1).mean() == pytest.approx(1, abs=0.3)
    logits = features.astype(np.float64) @ synthetic_weights(30, seed=5)
    probability = 1 / (1 + np.exp(-logits))
    assert np.mean(labels) == pytest.approx(probability.mean(), abs=4 * np.sqrt(0.25 / 1024))
    assert np.mean((labels - probability) * np.sign(logits)) == pytest.approx(
        0, abs=4 * np.sqrt(0.25 / 1024)
    )


def test_the_optimum_is_scikit_learns() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    features, labels = sklearn_datasets.load_svmlight_file(str(test_data("libsvm", "heart_scale")))
    x, y = features.toarray(), (labels > 0).astype(float)
    l2 = 1e-3
    ones = np.ones((len(x), 1))
    model = linear.LogisticRegression(
        C=1 / (len(x) * l2), fit_intercept=False, tol=1e-10, max_iter=10_000
    )
    model.fit(np.hstack([x, ones]), y)
    best = logistic_optimum(x, y, l2)
    assert np.allclose(best.weights, model.coef_[0], atol=1e-5)
    assert best.gap < 1e-18
    assert best.accuracy == model.score(np.hstack([x, ones]), y)
    z = x @ best.weights[:-1] + best.weights[-1]
    assert best.loss == pytest.approx(
        np.mean(np.log1p(np.exp(-z * (2 * y - 1)))) + l2 / 2 * best.weights @ best.weights
    )


def test_scan_counts_a_text_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 5)
    shape = libsvm_text.scan(write(tmp_path / "text"))
    assert (shape.n_rows, shape.n_features, shape.n_values) == (4, 3, 4)


def test_the_names_of_version_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        libsvm,
        "download",
        lambda name, part, folder: made.append((name, part)) or test_data("libsvm", "heart_scale"),
    )
    (store,) = libsvm.generate_lmdb_from_libsvm("heart_scale", "train", tmp_path)
    assert store == tmp_path / "heart_scale_train.lmdb"
    again = libsvm.LIBSVMDataset("heart_scale", "train", str(tmp_path))  # the store is there
    other = libsvm.LIBSVMDataset("heart_scale", "train", tmp_path / "other")
    assert made == [("heart_scale", "train")] * 2
    assert len(again) == len(other) == 270
    features, label = other[-1]
    assert (features.shape, label.shape) == ((13,), (1,))
    assert torch.equal(features, again[269][0])
    with pytest.raises(ValueError, match="heart_scale has no part 'test'"):
        libsvm.LIBSVMDataset("heart_scale", "test", tmp_path)
    with pytest.raises(ValueError, match=r"name must be one of .* not 'mine'"):
        libsvm.generate_lmdb_from_libsvm("mine", "train", tmp_path)
    with pytest.raises(
        ImportError, match=r"^sequential_webspam was removed: use generate_lmdb_from_libsvm"
    ):
        exec("from mlbench_core.dataset.linearmodels.pytorch.libsvm import sequential_webspam")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = libsvm.nonsense
