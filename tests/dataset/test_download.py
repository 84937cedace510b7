"""Downloads against a real server that misbehaves on demand, and archives that try to leave their
folder."""

from __future__ import annotations

import bz2
import errno
import hashlib
import io
import multiprocessing
import os
import re
import shutil
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlbench_core.dataset import download
from mlbench_core.dataset.imagerecognition import published
from mlbench_core.errors import DatasetError, DownloadError

BODY = bytes(range(256)) * 2000  # 512,000 bytes
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves one body.

    Attributes:
        cuts: For each coming request, after how many bytes the connection is cut.
        statuses: Status of each coming request, before any body is sent.
        ranges: Whether Range is honoured.
        requests: The Range header of each request so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = BODY
        self.etag = '"one"'
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.ranges = True
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append(wanted)
        if server.statuses:
            self.send_response(server.statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        same = self.headers.get("If-Range") in (None, server.etag)
        start = (
            int(re.fullmatch(r"bytes=(\d+)-", wanted).group(1))
            if wanted and server.ranges and same
            else 0
        )
        size = len(server.body)
        if start >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.send_header("ETag", server.etag)
        self.end_headers()
        until = server.cuts.pop(0) if server.cuts else size
        self.wfile.write(server.body[start : start + until])
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download(server: Server, tmp_path: Path) -> None:
    path = download.progress_download(server.url, str(tmp_path / "deep" / "file"), sha256=SHA256)
    assert path.read_bytes() == BODY
    assert left_over(path.parent) == ["file"]
    assert server.requests == [None]


def test_a_cut_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 200_000]
    path = download.progress_download(server.url, tmp_path / "file", sha256=SHA256)
    assert path.read_bytes() == BODY
    assert server.requests[0] is None
    starts = [int(wanted[6:-1]) for wanted in server.requests[1:] if wanted]
    assert len(starts) == 2
    assert 0 < starts[0] <= 100_000 < starts[1] <= 300_000


def test_a_later_call_goes_on_too(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 0]
    with pytest.raises(DownloadError, match=r"could not download http.* \(tried 1 times\)"):
        download.progress_download(server.url, tmp_path / "file", attempts=1)
    assert left_over(tmp_path) == ["file.part", "file.part.mark"]
    assert download.progress_download(server.url, tmp_path / "file").read_bytes() == BODY
    assert server.requests[-1] is not None
    assert left_over(tmp_path) == ["file"]


def test_a_changed_file_is_not_mixed_with_the_old_one(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 0]
    with pytest.raises(DownloadError):
        download.progress_download(server.url, tmp_path / "file", attempts=1)
    server.body, server.etag = BODY[::-1], '"two"'
    assert download.progress_download(server.url, tmp_path / "file").read_bytes() == BODY[::-1]


def test_left_over_bytes_of_another_file_are_noticed_by_the_checksum(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    (tmp_path / "file.part.mark").write_text('"one"')
    assert (
        download.progress_download(server.url, tmp_path / "file", sha256=SHA256).read_bytes()
        == BODY
    )


def test_left_over_bytes_without_a_mark_are_not_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    assert download.progress_download(server.url, tmp_path / "file").read_bytes() == BODY


def test_a_complete_part_needs_no_more_bytes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(BODY)
    (tmp_path / "file.part.mark").write_text('"one"')
    assert (
        download.progress_download(server.url, tmp_path / "file", sha256=SHA256).read_bytes()
        == BODY
    )
    assert server.requests == [f"bytes={len(BODY)}-"]


def test_a_server_without_ranges_starts_anew(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [100_000], False
    assert (
        download.progress_download(server.url, tmp_path / "file", sha256=SHA256).read_bytes()
        == BODY
    )


@pytest.mark.parametrize("digest", [{"sha256": "0" * 64}, {"md5": "0" * 32}])
def test_a_wrong_checksum_keeps_nothing(
    server: Server, tmp_path: Path, digest: dict[str, str]
) -> None:
    message = r"its (sha256|md5) is [0-9a-f]+, not 0+; it was deleted"
    with pytest.raises(DownloadError, match=message):
        download.progress_download(server.url, tmp_path / "file", **digest)
    assert left_over(tmp_path) == []


def test_a_file_with_the_right_checksum_is_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    download.progress_download(
        server.url, tmp_path / "file", md5=hashlib.md5(BODY).hexdigest().upper()
    )
    assert server.requests == []
    (tmp_path / "file").write_bytes(b"old")
    assert download.progress_download(server.url, tmp_path / "file").read_bytes() == BODY


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503]
    assert download.progress_download(server.url, tmp_path / "file").read_bytes() == BODY
    assert len(server.requests) == 2


def test_a_refusal_is_final_and_named(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(DownloadError, match="answered 404"):
        download.progress_download(server.url, tmp_path / "file")
    assert len(server.requests) == 1
    assert not (tmp_path / "file").exists()


def test_a_full_disk_is_told_before_the_transfer(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        DownloadError, match=r"the disk is full: .* needs 512000 more bytes, .* has 1000"
    ):
        download.progress_download(server.url, tmp_path / "file")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").symlink_to("/dev/full")
    (tmp_path / "file.part.mark").touch()
    with pytest.raises(DownloadError, match="the disk is full"):
        download.progress_download(server.url, tmp_path / "file")


def test_bad_attempts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        download.progress_download("http://127.0.0.1:1/", tmp_path / "file", attempts=0)


def test_progress_is_shown_on_a_terminal_only(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    download.progress_download(server.url, tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(download.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    download.progress_download(server.url, tmp_path / "shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert "shown" in err


# --- archives


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o644
    return info


def test_tar_is_downloaded_once_and_unpacked(server: Server, tmp_path: Path) -> None:
    server.body = tar_of((member("folder/a.txt"), b"hello"))
    root = tmp_path / "data"
    for _ in range(2):
        assert (
            download.maybe_download_and_extract_tar_gz(str(root), "file.tar.gz", server.url) == root
        )
        assert (root / "folder" / "a.txt").read_bytes() == b"hello"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("evil", "message"),
    [
        (member("../out.txt"), "tries to write outside"),
        (member("a/../../out.txt"), "tries to write outside"),
        (member("/tmp/out-of-the-folder.txt"), "tries to write outside"),
        (member("..\\out.txt"), "tries to write outside"),
        (member("link", tarfile.SYMTYPE, ".."), "is a link or a device"),
        (member("link", tarfile.LNKTYPE, "../secret"), "is a link or a device"),
        (member("pipe", tarfile.FIFOTYPE), "is a link or a device"),
    ],
)
def test_evil_tar(tmp_path: Path, evil: tarfile.TarInfo, message: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "evil.tar.gz").write_bytes(tar_of((member("good.txt"), b"good"), (evil, b"")))
    with pytest.raises(DatasetError, match=message):
        download.maybe_download_and_extract_tar_gz(root, "evil.tar.gz", "http://127.0.0.1:1/")
    assert left_over(root) == [".evil.tar.gz.lock", "evil.tar.gz"]  # not even the good member
    assert left_over(tmp_path) == ["data"]


def test_a_link_that_lies_in_the_folder_is_no_way_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "sub").symlink_to(outside)
    (root / "evil.tar.gz").write_bytes(tar_of((member("sub/a.txt"), b"x")))
    with pytest.raises(DatasetError, match="tries to write outside"):
        download.maybe_download_and_extract_tar_gz(root, "evil.tar.gz", "http://127.0.0.1:1/")
    assert left_over(outside) == []


def test_a_disk_that_fills_up_during_unpacking_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.tar.gz").write_bytes(
        tar_of((member("first.txt"), BODY), (member("folder/second.txt"), BODY))
    )
    copy, copied = tarfile.copyfileobj, []

    def fill(source: io.BytesIO, target: io.BytesIO, *rest: object) -> None:
        if copied:
            target.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        copied.append(target)
        copy(source, target, *rest)

    with monkeypatch.context() as inner:
        inner.setattr(tarfile, "copyfileobj", fill)
        with pytest.raises(
            DatasetError, match=r"file.tar.gz could not be unpacked: .*No space left on device"
        ):
            download.maybe_download_and_extract_tar_gz(
                tmp_path, "file.tar.gz", "http://127.0.0.1:1/"
            )
    assert left_over(tmp_path) == [".file.tar.gz.lock", "file.tar.gz"]
    (tmp_path / ".file.tar.gz.unpacking").mkdir()  # of a process that was killed
    download.maybe_download_and_extract_tar_gz(tmp_path, "file.tar.gz", "http://127.0.0.1:1/")
    assert left_over(tmp_path) == [".file.tar.gz.lock", "file.tar.gz", "first.txt", "folder"]
    assert (tmp_path / "folder" / "second.txt").read_bytes() == BODY


def zip_of(name: str, content: bytes = b"x", mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        info = zipfile.ZipInfo("placeholder")
        info.filename = name  # the constructor would make it harmless
        info.external_attr = mode << 16
        zipped.writestr(info, content)
    return buffer.getvalue()


def test_zip(server: Server, tmp_path: Path) -> None:
    server.body = zip_of("folder/a.txt", b"hello")
    assert download.maybe_download_and_extract_zip(tmp_path, "file.zip", server.url) == tmp_path
    assert (tmp_path / "folder" / "a.txt").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("../out.txt", 0, "tries to write outside"),
        ("/out.txt", 0, "tries to write outside"),
        ("C:/out.txt", 0, "tries to write outside"),
        ("link", stat.S_IFLNK | 0o777, "is a link or a device"),
    ],
)
def test_evil_zip(tmp_path: Path, name: str, mode: int, message: str) -> None:
    (tmp_path / "evil.zip").write_bytes(zip_of(name, b"/etc/passwd", mode))
    with pytest.raises(DatasetError, match=message):
        download.maybe_download_and_extract_zip(tmp_path, "evil.zip", "http://127.0.0.1:1/")
    assert left_over(tmp_path) == [".evil.zip.lock", "evil.zip"]


def test_bz2(server: Server, tmp_path: Path) -> None:
    server.body = bz2.compress(BODY)
    path = download.maybe_download_and_extract_bz2(tmp_path, "rows.txt.bz2", server.url)
    assert path == tmp_path / "rows.txt"
    assert path.read_bytes() == BODY
    with pytest.raises(ValueError, match=r"file_name must end in .bz2, not be 'rows.txt'"):
        download.maybe_download_and_extract_bz2(tmp_path, "rows.txt", server.url)


@pytest.mark.parametrize(
    ("extract", "name", "content"),
    [
        (download.maybe_download_and_extract_bz2, "a.bz2", bz2.compress(BODY)[:-10]),
        (download.maybe_download_and_extract_bz2, "a.bz2", b"nothing"),
        (download.maybe_download_and_extract_tar_gz, "a.tar.gz", b"nothing"),
        (download.maybe_download_and_extract_zip, "a.zip", b"nothing"),
    ],
)
def test_damaged_archives_are_named(
    tmp_path: Path, extract: Callable[..., Path], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=f"{name} is damaged"):
        extract(tmp_path, name, "http://127.0.0.1:1/")
    assert left_over(tmp_path) == [f".{name}.lock", name]


def test_an_archive_with_a_wrong_checksum_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of("a.txt"))
    with pytest.raises(DatasetError, match=r"a.zip is damaged: its md5 is"):
        download.maybe_download_and_extract_zip(
            tmp_path, "a.zip", "http://127.0.0.1:1/", md5="0" * 32
        )
    assert not (tmp_path / "a.txt").exists()


@pytest.mark.parametrize("name", ["../a.zip", "/a.zip", ".."])
def test_a_file_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file_name must name a file below"):
        download.maybe_download_and_extract_zip(tmp_path, name, "http://127.0.0.1:1/")


# --- data sets that download themselves


def test_cifar_downloads_what_is_missing_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataloader = pytest.importorskip(
        "mlbench_core.dataset.imagerecognition.pytorch.dataloader", exc_type=ImportError
    )
    record = bytes([3]) + bytes(range(256)) * 12
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    server.body = tar_of(
        *((member(f"cifar-10-batches-bin/{name}.bin"), record * 2) for name in names)
    )
    monkeypatch.setattr(published, "CIFAR10_URL", server.url)
    monkeypatch.setattr(published, "CIFAR10_ARCHIVE_MD5", hashlib.md5(server.body).hexdigest())
    monkeypatch.setattr(published, "_CIFAR10_RECORDS", 2)
    monkeypatch.setattr(published, "CIFAR10_MD5", {})
    root = tmp_path / "data"
    for _ in range(2):
        assert len(dataloader.CIFAR10V1(root, download=True)) == 10
        assert dataloader.CIFAR10V1(root, train=False, download=True).targets == [3, 3]
    assert len(server.requests) == 1


def test_a_wrong_cifar_archive_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataloader = pytest.importorskip(
        "mlbench_core.dataset.imagerecognition.pytorch.dataloader", exc_type=ImportError
    )
    monkeypatch.setattr(published, "CIFAR10_URL", server.url)
    with pytest.raises(DownloadError, match="not c32a1d4ab5d03f1284b67883e8d87530"):
        dataloader.CIFAR10V1(tmp_path, download=True)


def test_mnist_downloads_and_checks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataloader = pytest.importorskip(
        "mlbench_core.dataset.imagerecognition.pytorch.dataloader", exc_type=ImportError
    )
    monkeypatch.setattr(published, "MNIST_URL", server.url + "/")
    with pytest.raises(DownloadError, match="not 9fb629c4189551a2d022fa330f9573f3"):
        dataloader.MNIST(tmp_path, train=False, download=True)


# --- several processes on one machine


def unpack(root: str, url: str) -> None:
    """What each worker of a machine does at its start."""
    download.maybe_download_and_extract_zip(root, "file.zip", url)


def test_workers_of_one_machine_download_once(server: Server, tmp_path: Path) -> None:
    server.body = zip_of("a.txt", BODY)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=unpack, args=(str(tmp_path), server.url)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(server.requests) == 1
    assert (tmp_path / "a.txt").read_bytes() == BODY
