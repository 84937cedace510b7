"""Files that are written whole or not at all, locks between processes, digests."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from mlbench_core import files
from mlbench_core.files import creating_folder, replacing


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    for content in ("old", "new"):
        with files.replacing(path) as temporary:
            assert temporary.parent == path.parent
            temporary.write_text(content)
            assert (path.read_text() if path.exists() else "") == (
                "old" if content == "new" else ""
            )
        assert path.read_text() == content
    assert os.listdir(path.parent) == ["file"]


def test_writers_at_the_same_time_have_names_of_their_own(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "file") as one, files.replacing(tmp_path / "file") as other:
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"  # the block that ended last
    assert os.listdir(tmp_path) == ["file"]


def test_a_block_that_raises_leaves_the_file_before(tmp_path: Path) -> None:
    path, temporary = tmp_path / "file", tmp_path / "chosen"
    path.write_text("old")
    temporary.write_text("left by a kill")
    with pytest.raises(KeyError), files.replacing(path, temporary) as given:
        assert given == temporary
        given.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_temporary_file_that_a_kill_left_is_not_written_through(tmp_path: Path) -> None:
    other, temporary = tmp_path / "other", tmp_path / "chosen"
    other.write_text("in use")
    os.link(other, temporary)
    with files.replacing(tmp_path / "file", temporary):
        temporary.write_text("new")
    assert other.read_text() == "in use"
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, folder = tmp_path / "file", tmp_path / "folder"
    path.write_text("old")
    monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="No space left"), files.replacing(path) as temporary:
        temporary.write_text("new")
    with pytest.raises(OSError, match="No space left"), files.creating_folder(folder) as new:
        (new / "part").write_text("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_on_disk_before_the_rename_and_the_rename_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Path, path: Path) -> None:
        done.append("rename")
        replace(source, path)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with files.replacing(tmp_path / "file", tmp_path / "temporary") as temporary:
        temporary.write_text("content")
    assert done == ["temporary", "rename", tmp_path.name]
    done.clear()
    with files.creating_folder(tmp_path / "folder") as new:
        (new / "below").mkdir()
        (new / "below" / "file").write_text("content")
    assert done.index("rename") == 3
    assert set(done[:3]) == {new.name, "below", "file"}
    assert done[4:] == [tmp_path.name]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "above" / "folder"
    with pytest.raises(KeyError), files.creating_folder(path) as temporary:
        (temporary / "file").write_text("half")
        raise KeyError
    assert os.listdir(path.parent) == []
    with files.creating_folder(path) as temporary:
        (temporary / "file").write_text("first")
        assert not path.exists()
    with files.creating_folder(path) as temporary:  # another process was faster
        (temporary / "file").write_text("second")
    assert (path / "file").read_text() == "first"
    assert os.listdir(path.parent) == ["folder"]


HOLDER = """
import pathlib, signal, sys
from mlbench_core import files
from mlbench_core.files import creating_folder, replacing
with files.lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def take(path: Path) -> bool:
    with files.lock(path):
        return True


def test_a_lock_is_held_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with (
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
        ) as holder,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(TimeoutError), files.lock(path, wait=False):
                pass
            waiting = pool.submit(take, path)
            assert not wait([waiting], timeout=0.2).done
        finally:
            holder.kill()
        assert waiting.result()
    with files.lock(path, wait=False):
        pass
    assert path.read_bytes() == b""


def test_digests_are_those_of_hashlib(tmp_path: Path) -> None:
    path, content = tmp_path / "file", bytes(range(256)) * 5000
    path.write_bytes(content)
    assert files.digest(path) == files.digest(content) == hashlib.sha256(content).hexdigest()
    assert files.digest(path, "md5") == hashlib.md5(content, usedforsecurity=False).hexdigest()
    with path.open("rb") as file:
        assert files.digest(file) == files.digest(content)


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path) -> None:
    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for writing in (replacing, creating_folder):
        with (
            pytest.raises(OSError, match="No space left") as caught,
            writing(tmp_path / "new") as temporary,
        ):
            fill(temporary)
        assert caught.value.filename == str(tmp_path / "new")
        assert str(tmp_path / "new") in str(caught.value)
    # A path that the system named stays, and so does an error that is not of the system.
    with pytest.raises(FileNotFoundError) as missing, replacing(tmp_path / "new"):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")
