"""Numbers that a store cannot hold, texts with unusual bytes, images that lie about their size, and
damaged files."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mlbench_core.comparison.prices import load_prices
from mlbench_core.controlflow.pytorch import checkpoint_files
from mlbench_core.dataset import download, local_files
from mlbench_core.dataset.imagerecognition import readers
from mlbench_core.dataset.imagerecognition.arrays import ImageArrays
from mlbench_core.dataset.imagerecognition.pytorch import (
    CenterCrop,
    ImageDataset,
    JpegBatches,
    find_jpegs,
)
from mlbench_core.dataset.imagerecognition.pytorch.decoding import MOST_PIXELS, to_rgb
from mlbench_core.dataset.linearmodels.pytorch import libsvm_text
from mlbench_core.dataset.local_files import read_lines
from mlbench_core.dataset.nlp.pytorch.corpus import load_corpus
from mlbench_core.dataset.nlp.pytorch.pair_store import PairHeader, PairStore, write_pairs
from mlbench_core.errors import CheckpointError, ConfigurationError, DatasetError
from mlbench_core.files import read_bytes, read_text
from mlbench_core.network.parsing import load_network
from mlbench_core.sweep.toml_file import load_sweep

lmdb = pytest.importorskip("lmdb", reason="the package lmdb is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from mlbench_core.dataset.linearmodels.pytorch import LinearBatches, LMDBDataset  # noqa: E402
from mlbench_core.dataset.linearmodels.pytorch.libsvm import convert, store_to_text  # noqa: E402
from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore  # noqa: E402
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter  # noqa: E402


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        *(
            ("16777217", "float32"),
            ("1e39", "float32"),
            ("1e-50", "float32"),
            ("-16777217", "float32"),
        ),
        *(("9007199254740993", "float64"), ("9007199254740993", "float32")),
    ],
)
def test_a_label_that_the_store_cannot_hold_is_refused(
    tmp_path: Path, label: str, dtype: str
) -> None:
    text = tmp_path / "a.svm"
    text.write_text(f"3 1:1\n# remark\n\n{label} 1:2\n4 1:3\n")
    with pytest.raises(
        DatasetError, match=rf"a.svm, line 4: the row has the label .*, which {dtype} cannot hold"
    ):
        convert([text], tmp_path / "a.lmdb", dtype=dtype)
    assert not (tmp_path / "a.lmdb").exists()


def test_labels_that_the_store_can_hold_are_kept(tmp_path: Path) -> None:
    text = tmp_path / "a.svm"
    text.write_text("16777216 1:1\n-3 1:1\n0.5 1:1\n")
    (store,) = convert([text], tmp_path / "a.lmdb")
    assert LinearStore(store).labels.tolist() == [16777216, -3, 0.5]
    # Labels that are mapped to 0 and 1 may be any, and come back with all digits.
    text.write_text("1234567890123 1:1\n1 1:1\n")
    stores = convert([text], tmp_path / "b.lmdb", labels=(1, 1234567890123))
    assert store_to_text(stores, tmp_path / "b.svm").read_text().split()[::2] == [
        "1234567890123",
        "1",
    ]


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("value", [1e39, np.nan, -np.inf])
def test_a_value_that_is_not_finite_in_the_store_is_named(
    tmp_path: Path, layout: str, value: float
) -> None:
    with StoreWriter(tmp_path / "a.lmdb", 3, layout=layout) as writer:
        writer.append(np.ones((2, 3)), np.zeros(2))
        with pytest.raises(
            ValueError, match=r"must be finite in float32, not .* in row 3, column 2"
        ):
            writer.append(np.array([[1, 2, 3.0], [1, 2, value]]), np.zeros(2))


def test_other_numbers_of_the_user_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a.lmdb", 1) as writer:
        with pytest.raises(
            ValueError,
            match="labels must be numbers that float64 holds, not 9007199254740993 in row 0",
        ):
            writer.append(np.ones((1, 1)), np.array([2**53 + 1]))
        with pytest.raises(ValueError, match="features must be real numbers, not complex128"):
            writer.append(np.ones((1, 1), complex), np.zeros(1))
    with pytest.raises(ValueError, match="n_features must be at most 2147483648"):
        StoreWriter(tmp_path / "b.lmdb", 2**31 + 1)
    with pytest.raises(ValueError, match="images must be uint8"):
        ImageArrays(
            np.zeros((1, 2, 2, 3), np.uint16), np.zeros(1, int), (0.5,) * 3, (0.5,) * 3, 0, False
        )
    with pytest.raises(ValueError, match="targets must be whole numbers"):
        ImageDataset(
            torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0.5]), ["a"], (0.5,), (0.5,)
        )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"+1 1:1\r-1 2:1\n-1 1:1\n", 1),
        (b"1 1:1\r\n\r\n1 1:1\r1 x:1\n0 1:1\n", 3),
        (b"1 1:1\n1 4294967297:1\n", 2),
        (b"1 1:1\n1 1:1e39\n", 2),
        (b"1 1:1\x00\n", 1),
    ],
)
def test_the_error_names_the_line_that_a_line_feed_ends(
    tmp_path: Path, text: bytes, line: int
) -> None:
    (tmp_path / "a.svm").write_bytes(text)
    with pytest.raises(DatasetError, match=rf"a.svm, line {line}: .* is not 'label") as caught:
        convert([tmp_path / "a.svm"], tmp_path / "a.lmdb")
    assert not str(caught.value).endswith("None")


def test_byte_order_marks_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_bytes(b"\xef\xbb\xbf1 1:5\r\n-1 1:6\r\n")
    assert LinearStore(convert([path], tmp_path / "a.lmdb")[0]).labels.tolist() == [1, 0]
    path.write_bytes("\ufeffa\r\nb\u2028c\x85d\re\n\nf".encode())
    assert list(read_lines(path)) == ["a", "b\u2028c\x85d\re", "", "f"]
    path.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(DatasetError, match="is not UTF-8 text: line 2"):
        list(read_lines(path))


# --- images


def images_in(folder: Path, content: bytes) -> JpegBatches:
    path = folder / "train" / "c0" / "1.jpg"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return JpegBatches(find_jpegs(folder, "train"), 1, CenterCrop())


def jpeg(width: int, height: int, **options: Any) -> bytearray:
    content = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 200)).save(content, "JPEG", **options)
    return bytearray(content.getvalue())


def promising(content: bytearray, width: int, height: int) -> bytes:
    """Return a JPEG whose header has another size."""
    frame = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (promising(jpeg(8, 8), 13_000, 13_000), "has 13000 x 13000 pixels"),
        (promising(jpeg(8, 8, progressive=True), 65_500, 65_500), "has 65500 x 65500 pixels"),
        (promising(jpeg(8, 8), 0, 8), "has 0 x 8 pixels"),
        (png_header(100_000, 100_000), "has 100000 x 100000 pixels"),
        (bytes(jpeg(300, 300)[:400]), "is damaged"),
        (b"<!DOCTYPE html><html>", r"is not a JPEG or PNG image, but begins with b'<!DOCTYPE"),
        (b"", "is not a JPEG or PNG image"),
        (b"\xff\xd8" + bytes(40), "has no header of a frame"),
        (png_header(8, 8), "is damaged"),
    ],
)
def test_an_image_that_must_not_be_decoded_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        next(iter(images_in(tmp_path, content)))
    assert "1.jpg" in str(caught.value)
    assert "<_io" not in str(caught.value)
    assert MOST_PIXELS < 13_000**2


@pytest.mark.parametrize(
    ("height", "width"), [(1, 100), (3, 300), (16, 1000), (203, 5), (33, 2000), (100, 3)]
)
def test_a_long_image_is_cut_before_it_is_resized(height: int, width: int) -> None:
    """The result is that of the whole image, to one level."""
    image = torch.randint(
        0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    crop = CenterCrop()
    top, left, rows, columns = crop.box(height, width)
    part = image[:, top : top + rows, left : left + columns]
    assert max(rows, columns) <= 34 * min(height, width)
    assert (crop.finish(part).int() - crop.finish(image).int()).abs().max() <= 1


def test_an_ordinary_image_is_not_cut() -> None:
    assert CenterCrop().box(500, 333) == (0, 0, 500, 333)
    assert CenterCrop().box(10, 339) == (0, 0, 10, 339)


def test_16_bits_become_8() -> None:
    levels = np.array([[0, 256, 25_700, 65_535]], np.uint16)
    content = io.BytesIO()
    Image.fromarray(levels).save(content, "PNG")
    found = np.asarray(to_rgb(Image.open(io.BytesIO(content.getvalue()))))
    assert found[0, :, 0].tolist() == [0, 1, 100, 255]
    with pytest.raises(ValueError, match="not 8 or 16 bits"):
        to_rgb(Image.fromarray(np.ones((2, 2), np.float32)))


# --- damaged files


def test_only_regular_files_of_limited_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(100))
    (tmp_path / "mark").write_bytes("\ufefftext".encode())
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_bytes(path)
    with pytest.raises(OSError, match="has more than 99 bytes"):
        read_bytes(tmp_path / "large", 99)
    assert (len(read_bytes(tmp_path / "large", 100)), read_text(tmp_path / "mark")) == (100, "text")


def mutate(content: bytes, draw: random.Random, inserts: bool) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        place, kind = draw.randrange(len(changed)), draw.random()
        if kind < 0.6 or not inserts:
            changed[place] = draw.randrange(256)
        elif kind < 0.8 and len(changed) > 8:
            del changed[place : place + draw.randrange(1, 5)]
        else:
            changed[place:place] = draw.randbytes(draw.randrange(1, 4))
    return bytes(changed)


def archive_of(kind: str) -> bytes:
    buffer, content = io.BytesIO(), random.Random(2).randbytes(200) * 3
    if kind.startswith("tar"):
        with tarfile.open(fileobj=buffer, mode=f"w:{kind[4:]}") as tar:  # type: ignore[call-overload]
            for name in ("a", "b"):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    elif kind == "bz2":
        buffer.write(bz2.compress(content))
    else:
        with zipfile.ZipFile(buffer, "w", getattr(zipfile, f"ZIP_{kind}")) as zipped:
            for name in ("a", "b"):
                zipped.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kind", ["tar:", "tar:gz", "tar:bz2", "tar:xz", "STORED", "DEFLATED", "BZIP2", "LZMA", "bz2"]
)
def test_a_damaged_archive_is_an_error_of_the_data(tmp_path: Path, kind: str) -> None:
    """150 archives of each kind: before the mend, those with LZMA and DEFLATE raised errors of
    their decompressors."""
    draw, whole, refused = random.Random(5), archive_of(kind), 0
    unpack = download.maybe_download_and_extract_zip
    if kind == "bz2":
        unpack = download.maybe_download_and_extract_bz2
    elif kind.startswith("tar"):
        unpack = download.maybe_download_and_extract_tar_gz
    for _ in range(150):
        (tmp_path / "a.bz2").write_bytes(mutate(whole, draw, True))
        try:
            unpack(tmp_path, "a.bz2", "http://127.0.0.1:1/")
        except DatasetError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("kind", "unpack"),
    [
        ("tar:gz", download.maybe_download_and_extract_tar_gz),
        ("DEFLATED", download.maybe_download_and_extract_zip),
    ],
)
def test_an_archive_that_would_fill_the_disk_is_refused(
    tmp_path: Path, kind: str, unpack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(archive_of(kind))
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=1199))
    with pytest.raises(
        DatasetError, match=r"unpacks to 1200 bytes, and .* has 1199 free; nothing was unpacked"
    ):
        unpack(tmp_path, "file", "http://127.0.0.1:1/")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.lock", "file"]


def test_a_small_file_that_expands_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(libsvm_text, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(libsvm_text, "CHUNK_BYTES", 100)
    monkeypatch.setattr(readers, "_MOST_BYTES", 1000)
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"1" * 2000))
    with pytest.raises(DatasetError, match=r"text.gz: line 1 is longer than"):
        list(read_lines(path))
    with pytest.raises(DatasetError, match=r"text.gz has a line of more than"):
        libsvm_text.scan(path, zero_based=False)
    with pytest.raises(DatasetError, match=r"text.gz has more than"):
        readers.read_bytes(path)
    path.write_bytes(gzip.compress(b"1" * 999))
    assert (next(read_lines(path)), readers.read_bytes(path)) == ("1" * 999, b"1" * 999)


def test_a_damaged_store_of_pairs_is_an_error_of_the_data(tmp_path: Path) -> None:
    """400 stores with one damaged file: before the mend, headers of arrays raised errors of
    Python's tokenizer."""
    draw, store = random.Random(3), tmp_path / "store"
    sentences = [np.arange(size) for size in (3, 1, 4, 2)]
    write_pairs(store, PairHeader(("en", "de"), 100, ""), [(sentences, sentences)])
    whole = {path: path.read_bytes() for path in sorted(store.iterdir())}
    refused = 0
    for number in range(400):
        path = draw.choice(list(whole))
        path.write_bytes(mutate(whole[path], draw, True))
        try:
            pairs = PairStore(store, in_memory=number % 2 == 0)
        except DatasetError:
            refused += 1
        else:
            lengths = [
                len(side[index])
                for side in (pairs.source, pairs.target)
                for index in range(len(side))
            ]
            assert sum(lengths) == sum(pairs.header.tokens)
        path.write_bytes(whole[path])
    assert refused > 100


def test_a_damaged_cache_of_a_text_is_read_again(tmp_path: Path) -> None:
    draw, text = random.Random(4), {"train": tmp_path / "train.txt"}
    text["train"].write_text("the cat sat\non the mat\n" * 4)
    words = load_corpus(text, tmp_path / "cache").parts["train"].tolist()
    (cache,) = (tmp_path / "cache").iterdir()
    whole = {path: path.read_bytes() for path in sorted(cache.iterdir())}
    for _ in range(200):
        path = draw.choice(list(whole))
        path.write_bytes(mutate(whole[path], draw, True))
        corpus = load_corpus(text, tmp_path / "cache")
        # A changed number of another word cannot be noticed; a number of no word can.
        assert len(corpus.parts["train"]) == len(words) and max(corpus.parts["train"]) < len(
            corpus.dictionary
        )
        for each, content in whole.items():
            each.write_bytes(content)


def test_a_damaged_checkpoint_is_an_error_of_checkpoints(tmp_path: Path) -> None:
    """400 damaged pickles with right checksums: before the mend, one in some tens raised another
    error."""
    draw, whole = random.Random(1), tmp_path / "whole"
    model = {"w": torch.randn(3, 4), "b": torch.zeros(2, dtype=torch.int64)}
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    state = {
        "format": checkpoint_files.FORMAT,
        "rank": 0,
        "model": model,
        "optimizer": optimizer,
        "epoch": 1,
    }
    torch.save(state, whole)
    with zipfile.ZipFile(whole) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in parts if name.endswith("data.pkl"))
    refused = 0
    for _ in range(400):
        with zipfile.ZipFile(tmp_path / "1_0.pth.tar", "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, mutate(content, draw, True) if name == pickled else content)
        try:
            checkpoint_files.read(tmp_path / "1_0.pth.tar")
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_an_older_save_is_found_after_a_file_that_is_no_file(tmp_path: Path) -> None:
    state = {
        "format": checkpoint_files.FORMAT,
        "rank": 0,
        "model": {},
        "optimizer": None,
        "epoch": 0,
    }
    torch.save(state, tmp_path / "0_0.pth.tar")
    os.mkfifo(tmp_path / "1_0.pth.tar")
    (tmp_path / "2_0.pth.tar").mkdir()
    torch.save({**state, "model": [1, 2]}, tmp_path / "3_0.pth.tar")
    found, _ = checkpoint_files.read_newest(tmp_path, 0, None)
    assert found.path.name == "0_0.pth.tar"


def test_a_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="compressed entries"):
        checkpoint_files.read(tmp_path / "a")


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_a_damaged_store_is_an_error_of_the_data(tmp_path: Path, layout: str) -> None:
    """In a process of its own: without the check of the pages, some of these end it with a bus
    error."""
    numbers, draw = np.random.default_rng(0), random.Random(2)
    with StoreWriter(tmp_path / "whole.lmdb", 6, layout=layout, rows_per_block=8) as writer:
        features = numbers.standard_normal((60, 6)) * (numbers.random((60, 6)) < 0.5)
        writer.append(features, numbers.integers(0, 2, 60) * 2 - 1)
        writer.finish(label_map={"-1": 0, "1": 1})
    whole = (tmp_path / "whole.lmdb").read_bytes()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number in range(150):
                damaged = bytearray(mutate(whole, draw, False))
                # Headers and page numbers are at the starts of pages.
                page = 4096 * draw.randrange(len(damaged) // 4096)
                damaged[page + draw.randrange(64)] = draw.choice([0, 1, 2, 128, 255])
                path = tmp_path / f"{number}.lmdb"
                path.write_bytes(damaged if number % 5 else damaged[:page])
                try:
                    list(LinearBatches(LMDBDataset("x", "train", path, layout="sparse_csr"), 7))
                    store_to_text([path], tmp_path / "out.svm")
                    LinearStore(path).verify()
                except DatasetError:
                    pass
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "content",
    [
        "a = " + "[" * 3000 + "]" * 3000,
        "bandwidth = 1" + "0" * 400,
        "machine = [{name = 1" + "0" * 5000 + "}]",
    ],
)
@pytest.mark.parametrize("read", [load_sweep, load_network, load_prices])
def test_toml_of_any_content_is_an_error_of_configuration(
    tmp_path: Path, read: Callable[[Path], Any], content: str
) -> None:
    (tmp_path / "a.toml").write_text(content)
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "a.toml", tmp_path / "pipe.toml", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigurationError):
            read(path)
