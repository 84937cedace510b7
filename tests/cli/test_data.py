"""data list, fetch, prepare and verify, with tiny files, a server on this machine and the real test
data."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gzip
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from mlbench_cli.commands.data import _size
from mlbench_core import files
from mlbench_core.dataset import download, preparation, registry
from mlbench_core.dataset.libsvm_names import KNOWN, KnownDataset, TextFile
from mlbench_core.dataset.registry import (
    DATASETS,
    WMT16_ARCHIVES,
    DataFile,
    DatasetRecord,
    FileForm,
    get_dataset,
)
from mlbench_core.paths import user_folder
from mlbench_core.tasks import TASKS, get_task
from tests.cli.conftest import Call
from tests.dataset.test_download import Server
from tests.helpers.data import test_data
from tests.helpers.shards import shard_bytes
from tests.helpers.subtokens import write_subtokens

ROWS = {"a9a": "+1 1:1 3:0.5\n-1 2:1\n+1 1:0.25\n-1 3:2\n", "a9a.t": "+1 1:2\n-1 2:3\n"}


@pytest.fixture
def served(tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server that has a9a, with four training rows and two test rows."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    asked: list[str] = []
    folder = tmp_path / "served"
    folder.mkdir()
    for name, text in ROWS.items():
        (folder / name).write_text(text)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    ) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{http.server_address[1]}"
        parts = {"train": TextFile(f"{url}/a9a", 4), "test": TextFile(f"{url}/a9a.t", 2)}
        patch.setitem(KNOWN, "a9a", KnownDataset("Six rows", 3, parts))
        patch.setitem(DATASETS, "a9a", registry._linear("a9a"))
        yield SimpleNamespace(url=url, folder=folder, asked=asked)
        http.shutdown()
        thread.join()


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def contents(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder, except the empty files of locks."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --- list


def test_the_list_has_every_data_set_with_what_is_known(call: Call) -> None:
    lines = [line.split() for line in call("data", "list").stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == list(DATASETS)
    found = {each["name"]: each for each in json.loads(call("data", "list", "--json").stdout)}
    assert {name for task in TASKS.values() for name in task.datasets} | {
        *KNOWN,
        "imagenet",
    } <= set(found)
    assert (found["epsilon"]["license"], found["epsilon"]["download_bytes"]) == ("unknown", None)
    assert found["multi30k"]["tasks"] == ["4a", "4b"]
    assert found["mnist"]["folder"] == str(user_folder("datasets", "torch", "task1a"))
    checks = {
        form["path"]: form["check"] for file in found["cifar10"]["files"] for form in file["forms"]
    }
    assert (checks["test_batch.bin"], checks["data_batch_2.bin"], checks["data_batch_2"]) == (
        "md5",
        "bytes",
        "md5",
    )


def test_each_record_has_what_its_origin_needs() -> None:
    for name, record in DATASETS.items():
        assert record.name == name and record.title and record.license and record.sources, name
        assert bool(record.files) == (record.origin == "download"), name
        assert (name in preparation._FETCHERS) == (record.origin == "download"), name
        if record.origin == "download":
            assert all(url.startswith("https://") for url in record.sources), name
    with pytest.raises(ValueError, match=r"name must be one of a9a, .*, wmt17, not 'cifar'"):
        get_dataset("cifar")


@pytest.mark.parametrize("name", [name for name, record in DATASETS.items() if record.tasks])
def test_the_default_folder_is_that_of_the_task(name: str) -> None:
    key = DATASETS[name].tasks[0]
    assert DATASETS[name].folder.name == f"task{key}"
    assert f'run_task(train, "task{key}"' in get_task(key).script.read_text()


def test_the_table_of_the_documentation_is_that_of_the_records() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "data.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")][
        : len(DATASETS)
    ]
    assert rows == [
        [
            f"`{record.name}`",
            ", ".join(record.tasks) or "-",
            record.title,
            record.license,
            _size(record.download_bytes),
        ]
        for record in DATASETS.values()
    ]


# --- verify


@pytest.fixture
def whole(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """A folder with a whole data set, one file for each kind of check."""
    text = b"a b\nc\n"
    forms = [
        FileForm("sums/one", "sha256", hashlib.sha256(text).hexdigest()),
        FileForm("two", "md5", hashlib.md5(text, usedforsecurity=False).hexdigest()),
        FileForm("three", "bytes", 6),
        FileForm("four.sgm", "lines", 1),
        FileForm("five", "tokens", 5),
    ]
    entries = tuple(
        DataFile(form.path, (FileForm("elsewhere", "bytes", 0), form)) for form in forms
    )
    patch.setitem(
        DATASETS,
        "mnist",
        DatasetRecord("mnist", "Tiny", "unknown", ("https://x.org",), None, entries),
    )
    folder = tmp_path / "data"
    (folder / "sums").mkdir(parents=True)
    for name in ("sums/one", "three", "five"):
        (folder / name).write_bytes(text)
    (folder / "two.gz").write_bytes(gzip.compress(text))
    (folder / "four.sgm").write_text('<doc>\n<seg id="1">a</seg>\n</doc>\n')
    return folder


def test_whole_files_are_ok(whole: Path, call: Call) -> None:
    checks = ["SHA-256", "MD5", "number of bytes", "number of lines", "number of tokens"]
    names = ["sums/one", "two.gz", "three", "four.sgm", "five"]
    lines = call("data", "verify", "mnist", "--data", str(whole)).stdout.splitlines()
    assert lines == [
        f"{whole / name}: ok ({check})" for name, check in zip(names, checks, strict=True)
    ]


def test_missing_and_damaged_files_are_found(whole: Path, call: Call) -> None:
    (whole / "sums/one").write_bytes(b"a b\nd\n")
    (whole / "two.gz").write_bytes((whole / "two.gz").read_bytes()[:-9])
    (whole / "three").write_bytes(b"a b\n")
    (whole / "four.sgm").unlink()
    (whole / "five").write_bytes(b"a b\n\n")
    result = call("data", "verify", "mnist", "--data", str(whole), code=1)
    lines = [line.removeprefix(f"{whole}/") for line in result.stdout.splitlines()]
    assert lines[0].startswith("sums/one: damaged (its SHA-256 is ")
    assert lines[1].startswith("two.gz: damaged (") and str(whole) not in lines[1]
    assert lines[2:] == [
        "three: damaged (its number of bytes is 4, not 6: delete it and get it again)",
        "elsewhere: missing (does not exist, plain or compressed)",
        "five: damaged (its number of tokens is 4, not 5: delete it and get it again)",
    ]
    assert result.stderr == (
        "mlbench: 5 of 5 files of mnist are missing or damaged: delete damaged ones; 'mlbench "
        "data fetch mnist' downloads missing ones\n"
    )
    found = json.loads(
        call("data", "verify", "mnist", "--json", "--data", str(whole), code=1).stdout
    )
    assert [each["status"] for each in found] == [
        "damaged",
        "damaged",
        "damaged",
        "missing",
        "damaged",
    ]


def test_a_folder_that_does_not_exist_has_no_files(call: Call, tmp_path: Path) -> None:
    for name in ("cifar10", "a9a", "synthetic_dense", "imagenet"):
        result = call("data", "verify", name, "--data", str(tmp_path / "nothing"), code=1)
        assert all(": missing (" in line for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("multi30k", "multi30k"),
        ("wikitext2", "wikitext-2"),
        *((name, "libsvm") for name in ("a9a", "agaricus", "australian", "heart_scale")),
    ],
)
def test_the_real_data_is_ok(name: str, folder: str, call: Call) -> None:
    lines = call("data", "verify", name, "--data", str(test_data(folder))).stdout.splitlines()
    assert len(lines) == len(DATASETS[name].files)


def test_parts_of_real_data_are_ok_and_the_rest_is_missing(call: Call) -> None:
    lines = call(
        "data", "verify", "cifar10", "--data", str(test_data("cifar10"))
    ).stdout.splitlines()
    assert len(lines) == 6 and all(": ok (" in line for line in lines)
    lines = call(
        "data", "verify", "wmt16", "--data", str(test_data("newstest2014")), code=1
    ).stdout.splitlines()
    ok = [line.partition(": ok (number of lines)")[0] for line in lines if ": ok (" in line]
    assert [Path(path).name for path in ok] == ["newstest2014.en", "newstest2014.de"]
    assert len(lines) == 8


# --- fetch


def test_a_data_set_is_downloaded_once_verified_and_prepared(
    served: SimpleNamespace, call: Call
) -> None:
    folder = DATASETS["a9a"].folder
    paths = [str(folder / name) for name in ROWS]
    assert call("data", "fetch", "a9a").stdout.splitlines() == paths
    assert json.loads(call("data", "fetch", "a9a", "--json").stdout)["files"] == paths
    assert served.asked == ["/a9a", "/a9a.t"]
    assert call("data", "prepare", "a9a").stdout.splitlines() == ["train: 4 rows", "test: 2 rows"]
    assert visible(folder) == ["a9a", "a9a.t", "a9a_test.lmdb", "a9a_train.lmdb"]
    lines = call("data", "verify", "a9a").stdout.splitlines()
    assert [line.removeprefix(f"{folder}/") for line in lines] == [
        "a9a: ok (number of lines)",
        "a9a_train.lmdb: ok (CRC-32 of its blocks)",
        "a9a.t: ok (number of lines)",
        "a9a_test.lmdb: ok (CRC-32 of its blocks)",
    ]
    (folder / "a9a").write_text(ROWS["a9a"].rpartition("-1")[0])
    shutil.copy(folder / "a9a_test.lmdb", folder / "copy")
    os.replace(folder / "copy", folder / "a9a_train.lmdb")
    result = call("data", "verify", "a9a", code=1)
    assert "a9a: damaged (its number of lines is 3, not 4: " in result.stdout
    assert (
        "a9a_train.lmdb: damaged (has 2 rows in all its stores, not 4: prepare it again)"
        in result.stdout
    )
    assert result.stderr.startswith("mlbench: 2 of 4 files of a9a ")


def test_compressed_text_in_the_folder_is_enough(served: SimpleNamespace, call: Call) -> None:
    folder = DATASETS["a9a"].folder
    folder.mkdir(parents=True)
    for name, text in ROWS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert call("data", "fetch", "a9a").stdout.splitlines() == [
        str(folder / f"{name}.gz") for name in ROWS
    ]
    call("data", "prepare", "a9a")
    assert served.asked == []


def test_multi30k_is_downloaded_and_checked(
    served: SimpleNamespace, call: Call, patch: pytest.MonkeyPatch
) -> None:
    from mlbench_core.dataset.nlp.pytorch import multi30k

    packed = gzip.compress(b"A dog.\n")
    (served.folder / "train.en.gz").write_bytes(packed)
    record = DATASETS["multi30k"]
    patch.setitem(DATASETS, "multi30k", dataclasses.replace(record, files=record.files[:1]))
    patch.setattr(multi30k, "MULTI30K_URL", f"{served.url}/")
    patch.setattr(multi30k, "MULTI30K_SHA256", {"train.en": ""})
    patch.setattr(
        multi30k, "MULTI30K_ARCHIVE_SHA256", {"train.en": hashlib.sha256(packed).hexdigest()}
    )
    place = DATASETS["multi30k"].folder / "train.en.gz"
    for _ in range(2):
        assert call("data", "fetch", "multi30k").stdout.splitlines() == [str(place)]
    assert (place.read_bytes(), served.asked) == (packed, ["/train.en.gz"])
    place.unlink()
    patch.setattr(multi30k, "MULTI30K_ARCHIVE_SHA256", {"train.en": "0" * 64})
    told = call("data", "fetch", "multi30k", code=1).stderr
    assert "has the wrong content: its sha256 is " in told
    assert ", not 000" in told


def test_shards_of_fineweb_are_downloaded_and_checked(
    served: SimpleNamespace, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(preparation, "FINEWEB10B_FILE_URL", f"{served.url}/{{name}}")
    names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    for number, name in enumerate(names):
        (served.folder / name).write_bytes(shard_bytes([number] * 9))
    folder = DATASETS["fineweb10b"].folder
    paths = [str(folder / name) for name in names]
    assert call("data", "fetch", "fineweb10b", "--shards", "1").stdout.splitlines() == paths[:2]
    assert call("data", "fetch", "fineweb10b", "--shards", "2").stdout.splitlines() == paths
    assert served.asked == [f"/{name}" for name in names]
    for path in paths:
        assert Path(path).read_bytes() == (served.folder / Path(path).name).read_bytes()
    lines = call("data", "verify", "fineweb10b", "--shards", "2").stdout.splitlines()
    assert lines == [f"{path}: ok (header and number of bytes)" for path in paths]
    assert call("data", "prepare", "fineweb10b").stderr == "fineweb10b needs no preparation\n"

    Path(paths[0]).write_bytes(shard_bytes([0] * 9)[:-1])
    Path(paths[1]).write_bytes(shard_bytes([1], magic=3))
    lines = call("data", "verify", "fineweb10b", "--shards", "3", code=1).stdout.splitlines()
    assert [line.partition(": ")[2].partition(";")[0] for line in lines] == [
        "damaged (it must have 1042 bytes for 9 tokens, not 1041",
        "damaged (is not a shard of tokens: its first number must be 20240520, not 3)",
        "ok (header and number of bytes)",
        "missing (does not exist, plain or compressed)",
    ]
    stderr = call("data", "fetch", "fineweb10b", "--shards", "2", code=1).stderr
    assert f"{paths[0]} is damaged: it must have 1042 bytes" in stderr


def test_a_page_instead_of_a_shard_is_deleted(
    served: SimpleNamespace, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(preparation, "FINEWEB10B_FILE_URL", f"{served.url}/{{name}}")
    (served.folder / "fineweb_val_000000.bin").write_text("<html>Sign in</html>")
    stderr = call("data", "fetch", "fineweb10b", "--shards", "1", code=1).stderr
    assert "fineweb_val_000000.bin has the wrong content, which was deleted: " in stderr
    assert contents(DATASETS["fineweb10b"].folder) == {}


def test_an_interrupted_download_of_a_shard_is_resumed(
    call: Call, patch: pytest.MonkeyPatch
) -> None:
    folder = DATASETS["fineweb10b"].folder
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        patch.setattr(preparation, "FINEWEB10B_FILE_URL", f"{server.url}/{{name}}")
        server.body = shard_bytes(list(range(60_000)))
        server.cuts = [100_000, 0, 0, 0, 0, 0]
        stderr = call("data", "fetch", "fineweb10b", "--shards", "1", code=1).stderr
        assert "could not download" in stderr and "(tried 5 times)" in stderr
        assert visible(folder) == ["downloads"]
        server.requests.clear()
        call("data", "fetch", "fineweb10b", "--shards", "1")
        server.shutdown()
        thread.join()
    resumed, from_start = server.requests
    assert resumed is not None and 0 < int(resumed[6:-1]) <= 100_000 and from_start is None
    names = ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    assert contents(folder) == dict.fromkeys(names, server.body)


def test_the_number_of_shards_is_for_fineweb(call: Call) -> None:
    for command in ("fetch", "verify"):
        stderr = call("data", command, "mnist", "--shards", "2", code=2).stderr
        assert "--shards is for fineweb10b, not for mnist: leave it out" in stderr
        stderr = call("data", command, "fineweb10b", "--shards", "104", code=2).stderr
        assert "104 is not in the range 1<=x<=103" in stderr


def test_a_download_is_not_mixed_with_other_text(call: Call, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("mine\n")
    stderr = call("data", "fetch", "wikitext2", "--data", str(tmp_path), code=1).stderr
    assert (
        "has other text of wikitext2, so valid, test cannot "
        "be downloaded into it: move that text away"
    ) in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


def test_without_a_network_a_download_fails_in_one_line(
    served: SimpleNamespace, call: Call, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise requests.ConnectionError("no route to host")

    patch.setattr(requests.Session, "get", fail)
    folder = tmp_path / "new"
    stderr = call("data", "fetch", "a9a", "--data", str(folder), code=1).stderr
    assert stderr == (
        f"mlbench: could not download {served.url}/a9a: no route to host (tried 5 times); on a "
        f"machine without a network, copy the file to {folder}/a9a\n"
    )
    assert list(folder.iterdir()) == []
    shutil.copytree(served.folder, folder, dirs_exist_ok=True)
    call("data", "fetch", "a9a", "--data", str(folder))


def test_data_sets_without_a_download(call: Call, tmp_path: Path) -> None:
    assert (
        "digits needs no download: it comes with scikit-learn"
        in call("data", "fetch", "digits").stderr
    )
    assert (
        "prepare synthetic_dense' generates it" in call("data", "fetch", "synthetic_dense").stderr
    )
    assert "scikit-learn is installed" in call("data", "verify", "digits").stdout
    stderr = call("data", "fetch", "imagenet", code=1).stderr
    assert (
        "imagenet cannot be downloaded by a program: get it from https://image-net.org/download"
        in stderr
    )
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    assert (
        call("data", "verify", "imagenet", "--data", str(tmp_path)).stdout.count(
            ": ok (1 classes; "
        )
        == 2
    )
    (tmp_path / "shards").mkdir()
    for name in ("train-0.tar", "train-1.tar", "val.tar"):
        (tmp_path / "shards" / name).touch()
    lines = call(
        "data", "verify", "imagenet", "--data", str(tmp_path / "shards")
    ).stdout.splitlines()
    assert [line.partition(": ")[2].partition(";")[0] for line in lines] == [
        "ok (2 tar files",
        "ok (1 tar files",
    ]


def test_an_unknown_name_is_wrong_use(call: Call) -> None:
    assert "'cifar' is not one of 'a9a'" in call("data", "fetch", "cifar", code=2).stderr


# --- prepare


def test_what_needs_no_preparation_and_what_is_missing(call: Call) -> None:
    assert call("data", "prepare", "cifar10").stderr == "cifar10 needs no preparation\n"
    assert call("data", "prepare", "digits", "--json").stdout == "null\n"
    stderr = call("data", "prepare", "a9a", code=1).stderr
    assert "has no a9a, plain or compressed: 'mlbench data fetch a9a' downloads it" in stderr
    for name in ("wikitext2", "wmt16", "wmt17", "multi30k"):
        stderr = call("data", "prepare", name, code=1).stderr
        assert "mlbench data fetch" in stderr and stderr.count("\n") == 1


def write_wmt16(folder: Path) -> Path:
    """Four pairs in each of the training texts of WMT16, and four to validate."""
    texts = [
        [archive.text_path(lang) for lang in ("en", "de")] for archive in WMT16_ARCHIVES["train"]
    ]
    for paths in [*texts, ["validation.en", "validation.de"]]:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(
                "".join(f"{Path(path).name}: dog {number} runs.\n" for number in range(4))
            )
    return folder


def test_text_is_prepared_from_where_it_was_interrupted(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    from mlbench_core.dataset.nlp.pytorch import pair_text

    split, seen = pair_text.split_words, []

    def watch(line: str, *rest: Any) -> list[str]:
        if line.startswith("news-commentary") and not resumed:
            raise KeyboardInterrupt
        seen.append(line)
        return split(line, *rest)

    folder, resumed = write_wmt16(tmp_path / "wmt16"), False
    patch.setattr(pair_text, "split_words", watch)
    with pytest.raises(KeyboardInterrupt):
        preparation.prepare(DATASETS["wmt16"], folder)
    cache = user_folder("cache", "text")
    assert [name.partition("-")[0] for name in visible(cache)] == ["words", "words"]
    assert set(contents(cache)) == {
        f"{name}/{side}.txt" for name in visible(cache) for side in ("source", "target")
    }
    seen.clear()
    resumed = True
    prepared = preparation.prepare(DATASETS["wmt16"], folder)
    assert prepared == preparation.Prepared(cache, "pairs", {"train": 12, "validation": 4})
    assert {line.partition(".")[0] for line in seen} == {"news-commentary-v11", "validation"}
    found = contents(cache)
    patch.setenv("MLBENCH_HOME", str(tmp_path / "other"))
    preparation.prepare(DATASETS["wmt16"], folder)
    assert contents(user_folder("cache", "text")) == found


def test_wmt17_is_prepared_with_the_sub_tokens_of_a_file(call: Call, tmp_path: Path) -> None:
    for name in ("train", "newstest2013", "newstest2014"):
        for lang in ("en", "de"):
            (tmp_path / f"{name}.{lang}").write_text("A dog\nruns.\n")
    file = write_subtokens(tmp_path / "vocab.ende.32768", "dog_")
    arguments = ("data", "prepare", "wmt17", "--data", str(tmp_path), "--vocabulary", str(file))
    assert call(*arguments).stdout.splitlines() == [
        "train: 2 pairs",
        "validation: 2 pairs",
        "test: 2 pairs",
    ]
    cache = user_folder("cache", "text")
    headers = [json.loads((cache / name / "header.json").read_text()) for name in visible(cache)]
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    assert [header["vocabulary_checksum"] for header in headers] == [checksum] * 3
    # A task with the same file finds them.
    before = contents(cache)
    assert json.loads(call(*arguments, "--json").stdout)["counts"] == {
        "train": 2,
        "validation": 2,
        "test": 2,
    }
    assert contents(cache) == before
    file.write_text("the@@\n")
    assert (
        "vocab.ende.32768 is not a vocabulary of sub-tokens: line 1 is"
        in call(*arguments, code=1).stderr
    )
    for name in ("multi30k", "cifar10"):
        stderr = call("data", "prepare", name, "--vocabulary", str(file), code=2).stderr
        assert f"--vocabulary is for wmt17, not for {name}: leave it out" in stderr
        with pytest.raises(
            ValueError, match=f"vocabulary must be None for {name}, not .*: only wmt17"
        ):
            preparation.prepare(DATASETS[name], vocabulary=file)


def test_own_text_is_converted_to_shards(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Grüße,\r\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\xff\x00"))
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]
    folder = tmp_path / "shards"
    arguments = ("data", "prepare", "text", "--data", str(folder))
    result = call(*arguments, *texts)
    expected = [*"Grüße,\r\n".encode(), 255, 0]
    assert result.stdout == f"train: {len(expected)} tokens\n"
    assert result.stderr == f"the prepared data is in {folder}\n"
    prepared = json.loads(call(*arguments, "--split", "val", texts[1], "--json").stdout)
    assert prepared == {
        "name": "text",
        "unit": "tokens",
        "counts": {"val": 2},
        "folder": str(folder),
    }
    assert contents(folder) == {
        "text_train_000001.bin": shard_bytes(expected),
        "text_val_000001.bin": shard_bytes([255, 0]),
    }
    stderr = call(*arguments, texts[1], code=1).stderr
    assert "has shards of the part train already, such as text_train_000001.bin: " in stderr
    call("data", "prepare", "text", texts[1])
    assert visible(user_folder("datasets", "torch", "text")) == ["text_train_000001.bin"]


def test_options_of_text_are_refused_for_other_data(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a")
    for extra in ([str(file)], ["--split", "val"], ["--tokenizer", str(file)]):
        stderr = call("data", "prepare", "cifar10", *extra, code=2).stderr
        assert " is for text, not for cifar10: leave it out" in stderr
    assert "text needs at least one FILE" in call("data", "prepare", "text", code=2).stderr
    stderr = call("data", "prepare", "text", str(tmp_path / "none"), code=2).stderr
    assert "does not exist" in stderr
    assert "'text' is not one of" in call("data", "fetch", "text", code=2).stderr


def test_a_full_disk_leaves_no_shards_of_text(
    call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    folder = tmp_path / "shards"

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(files, "move_into_place", fill)
    arguments = ("data", "prepare", "text", str(tmp_path / "a.txt"), "--data", str(folder))
    stderr = call(*arguments, code=1).stderr
    assert stderr.startswith("mlbench: the disk is full: text could not be prepared (")
    assert stderr.count("\n") == 1 and list(folder.iterdir()) == []


def test_rows_are_prepared_from_where_they_were_interrupted(
    served: SimpleNamespace, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    from mlbench_core.dataset.linearmodels.pytorch import libsvm_text

    read_chunks = libsvm_text.read_chunks

    def cut(path: Path, **options: Any) -> Iterator[Any]:
        yield from read_chunks(path, **options)
        if path.name == "a9a.t":
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(libsvm_text, "read_chunks", cut)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(DATASETS["a9a"], served.folder)
    (folder,) = DATASETS["a9a"].folder.glob("text-*")
    assert list(contents(folder)) == ["a9a_train.lmdb"]
    before = (folder / "a9a_train.lmdb").stat().st_mtime_ns
    prepared = preparation.prepare(DATASETS["a9a"], served.folder)
    assert prepared == preparation.Prepared(folder, "rows", {"train": 4, "test": 2})
    assert (folder / "a9a_train.lmdb").stat().st_mtime_ns == before
    patch.setenv("MLBENCH_HOME", str(tmp_path / "other"))
    other = preparation.prepare(DATASETS["a9a"], served.folder)
    assert other is not None and other.folder != folder
    assert contents(other.folder) == contents(folder)


def test_a_full_disk_leaves_no_incomplete_file(
    served: SimpleNamespace, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    def fill(*arguments: Any) -> None:
        path = next(each for each in arguments if isinstance(each, Path))
        if path.suffix == ".part" and not path.exists():
            path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    home, text = DATASETS["a9a"].folder, write_wmt16(tmp_path / "wmt16")
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(download, "_write", fill)
        assert "mlbench: the disk is full: " in call("data", "fetch", "a9a", code=1).stderr
    assert visible(home) == ["a9a.part"]
    call("data", "fetch", "a9a")
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(files, "move_into_place", fill)
        for arguments in (["a9a"], ["wmt16", "--data", str(text)]):
            stderr = call("data", "prepare", *arguments, code=1).stderr
            assert stderr.startswith(
                f"mlbench: the disk is full: {arguments[0]} could not be prepared ("
            )
            assert stderr.count("\n") == 1
    assert set(contents(home)) == set(ROWS)
    assert contents(user_folder("cache", "text")) == {}
    call("data", "prepare", "a9a")
