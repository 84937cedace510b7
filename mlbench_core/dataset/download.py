"""Resume interrupted downloads, and unpack archives without writing outside their folder.

This module does not import a deep-learning framework.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import lzma
import os
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_core import files
from mlbench_core.arguments import check_at_least
from mlbench_core.errors import DatasetError, DownloadError

if TYPE_CHECKING:
    import requests

__all__ = [
    "check_digest",
    "maybe_download_and_extract_bz2",
    "maybe_download_and_extract_tar_gz",
    "maybe_download_and_extract_zip",
    "progress_download",
    "show_progress",
]

_CHUNK_BYTES = 1 << 16
_RETRY_STATUS = (408, 429, 500, 502, 503, 504)
# The errors that the readers and decompressors raise for damaged archives.
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    OSError,
    RuntimeError,
    zlib.error,
    lzma.LZMAError,
)


def progress_download(
    url: str,
    dest: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    md5: str | None = None,
    attempts: int = 5,
    timeout_s: float = 30.0,
) -> Path:
    """Download a file, with a progress bar if standard error is a terminal.

    The bytes go to ``dest`` + ``.part``. The function renames this file once it is complete and its
    checksum is correct, so ``dest`` is never incomplete. An interrupted transfer resumes at the
    last byte. A later call also resumes it, if the server still has the same file. An existing
    ``dest`` with the correct checksum is kept; without a checksum, the file is downloaded again.

    Args:
        url: Address, http or https.
        dest: The file to create; missing folders above it are created too.
        sha256: SHA-256 that the file must have, in hexadecimal digits.
        md5: MD5 that the file must have, in hexadecimal digits; for data sets that do not publish a
            stronger checksum.
        attempts: Number of consecutive transfers that may fail without a byte of progress, at least
            1.
        timeout_s: Maximum time in seconds to wait for a connection, and for each piece of the
            response.

    Returns:
        The path of the file.

    Raises:
        ValueError: ``attempts`` is below 1.
        DownloadError: The transfer failed, the checksum is wrong, or the disk is full.
    """
    check_at_least("attempts", attempts, 1)
    path = Path(dest)
    if (sha256 or md5) and path.is_file() and not _wrong_digest(path, sha256, md5):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with _session() as session:
            resumed = _fetch(session, url, part, attempts, timeout_s)
            wrong = _wrong_digest(part, sha256, md5)
            # The bytes of an earlier call may belong to another file, so try one transfer from the
            # start.
            if wrong and resumed:
                _discard(part)
                _fetch(session, url, part, attempts, timeout_s)
                wrong = _wrong_digest(part, sha256, md5)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"the disk is full: {url} does not fit into {path.parent}; free some space"
            ) from error
        raise
    if wrong:
        _discard(part)
        raise DownloadError(
            f"{url} has the wrong content: {wrong}; it was deleted: try again, or use another "
            "mirror"
        )
    files.move_into_place(part, path)
    _mark_file(part).unlink(missing_ok=True)
    return path


def _session() -> requests.Session:
    """Return a session that waits and retries if a connection fails."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    # Reads are not retried here: urllib3 would start an interrupted transfer over, but `_fetch`
    # resumes it.
    retry = Retry(
        total=None, connect=3, read=0, status=3, backoff_factor=0.3, status_forcelist=_RETRY_STATUS
    )
    retry.raise_on_status = False  # `_transfer` raises an error with its own text
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    session.mount("https://", HTTPAdapter(max_retries=retry))
    return session


def _fetch(
    session: requests.Session, url: str, part: Path, attempts: int, timeout_s: float
) -> bool:
    """Complete ``part``, and return whether it contains bytes from an earlier call."""
    import requests

    # Without the server's version mark, nothing shows that the existing bytes belong to the same
    # file.
    resumed = part.exists() and _mark_file(part).exists()
    if not resumed:
        _discard(part)
    left = attempts
    while True:
        before = _size(part)
        try:
            _transfer(session, url, part, timeout_s)
            return resumed
        except requests.RequestException as error:
            left -= 1
            # Any progress restores the full number of attempts, so that a long download over a bad
            # line completes.
            if _size(part) > before:
                left = attempts
            if left <= 0:
                raise DownloadError(
                    f"could not download {url}: {error} (tried {attempts} times); on a machine "
                    f"without a network, copy the file to {part.with_suffix('')}"
                ) from error


def _transfer(session: requests.Session, url: str, part: Path, timeout_s: float) -> None:
    """Send one request, and append the missing bytes.

    The file starts over if the server ignores ranges or now has another file.
    """
    import requests

    have = _size(part)
    # In a compressed transfer, byte positions would not be those of the file.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        mark_file = _mark_file(part)
        # Some servers send no mark. Within one call, the transfer is then resumed without it.
        if mark_file.exists():
            mark = mark_file.read_text()
            # RFC 9110, section 13.1.5: a weak ETag must not be used for ranges.
            if mark and not mark.startswith("W/"):
                headers["If-Range"] = mark
    with session.get(url, headers=headers, stream=True, timeout=timeout_s) as answer:
        content_range = answer.headers.get("Content-Range", "")
        # 416: the server has no byte after these. Either the partial file is complete, or the
        # server's is shorter.
        if answer.status_code == 416:
            if content_range.endswith(f"/{have}"):
                return
            _discard(part)
            raise requests.ConnectionError(
                "the server's file is shorter than the partial file: starting over"
            )
        if answer.status_code >= 500 or answer.status_code in _RETRY_STATUS:
            raise requests.ConnectionError(
                f"the server answered {answer.status_code} {answer.reason}"
            )
        if answer.status_code not in (200, 206):
            raise DownloadError(
                f"could not download {url}: "
                f"the server answered {answer.status_code} {answer.reason}"
            )
        if answer.status_code == 206 and not content_range.startswith(f"bytes {have}-"):
            _discard(part)
            raise requests.ConnectionError("the server sent another range than the requested one")
        # 200: the server sends the whole file, because it ignores ranges or now has another file.
        if answer.status_code == 200:
            have = 0
        _write(answer, part, have)


def _write(answer: requests.Response, part: Path, have: int) -> None:
    """Write the body of a response after the first ``have`` bytes of ``part``."""
    total: int | None = None
    length = answer.headers.get("Content-Length", "")
    if length.isdigit():
        missing = int(length)
        total = have + missing
        free = shutil.disk_usage(part.parent).free
        # Check this before the transfer, which may take an hour.
        if missing > free:
            raise DownloadError(
                f"the disk is full: {answer.url} needs {missing} more bytes, "
                f"{part.parent} has {free}; free some space"
            )
    if mark := answer.headers.get("ETag") or answer.headers.get("Last-Modified"):
        _mark_file(part).write_text(mark)
    with (
        part.open("r+b" if have else "wb") as file,
        show_progress(part.name.removesuffix(".part"), total, have, of_bytes=True) as advance,
    ):
        file.seek(have)
        for chunk in answer.iter_content(_CHUNK_BYTES):
            file.write(chunk)
            advance(len(chunk))


@contextlib.contextmanager
def show_progress(
    name: str, total: int | None, done: int = 0, *, of_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal.

    Args:
        name: Text before the bar.
        total: Total amount of work; None if it is unknown.
        done: Amount of work that was done before.
        of_bytes: If True, the unit of work is the byte: show also size and speed.

    Yields:
        A function to call with the amount of work of each finished piece.
    """
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = [*Progress.get_default_columns()]
    if of_bytes:
        columns += [DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda count: bar.update(task, advance=count)


def _mark_file(part: Path) -> Path:
    """Return the path of the server's version mark (ETag or date), next to the unfinished file."""
    return part.with_name(part.name + ".mark")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _discard(part: Path) -> None:
    """Delete an unfinished file."""
    part.unlink(missing_ok=True)
    _mark_file(part).unlink(missing_ok=True)


def _wrong_digest(path: Path, sha256: str | None, md5: str | None) -> str:
    """Return a description of the first wrong checksum of a file, or an empty text."""
    for name, expected in (("sha256", sha256), ("md5", md5)):
        if not expected:
            continue
        digest = files.digest(path, name)
        if digest != expected.lower():
            return f"its {name} is {digest}, not {expected.lower()}"
    return ""


def check_digest(
    path: str | os.PathLike[str], *, sha256: str | None = None, md5: str | None = None
) -> None:
    """Check a file against its published checksum.

    Args:
        path: The file.
        sha256: SHA-256 that the file must have, in hexadecimal digits.
        md5: MD5 that the file must have, in hexadecimal digits.

    Raises:
        DatasetError: The file has another checksum.
    """
    if wrong := _wrong_digest(Path(path), sha256, md5):
        raise DatasetError(f"{path} is damaged: {wrong}; delete it and get it again")


def maybe_download_and_extract_bz2(
    root: str | os.PathLike[str],
    file_name: str,
    data_url: str,
    *,
    sha256: str | None = None,
    md5: str | None = None,
) -> Path:
    """Download a ``.bz2`` file if it does not exist yet, and decompress it into the same folder.

    Args:
        root: Folder; it is created if it does not exist.
        file_name: Name of the compressed file below ``root``, ending in ``.bz2``.
        data_url: Address of the file.
        sha256: SHA-256 of the compressed file.
        md5: MD5 of the compressed file.

    Returns:
        Path of the decompressed file: the path of the compressed file without ``.bz2``.

    Raises:
        ValueError: The name does not end in ``.bz2`` or leaves the folder.
        DownloadError: The download failed.
        DatasetError: The file is damaged.
    """
    if not file_name.endswith(".bz2"):
        raise ValueError(f"file_name must end in .bz2, not be {file_name!r}")
    with _archive(root, file_name, data_url, sha256, md5) as archive:
        target = archive.with_suffix("")
        with (
            files.replacing(target) as temporary,
            bz2.open(archive) as source,
            temporary.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
    return target


def maybe_download_and_extract_tar_gz(
    root: str | os.PathLike[str],
    file_name: str,
    data_url: str,
    *,
    sha256: str | None = None,
    md5: str | None = None,
) -> Path:
    """Download a tar archive if it does not exist yet, and unpack it into ``root``.

    The archive may be plain or compressed in any format that :mod:`tarfile` reads. The function
    writes only plain files and folders below ``root``. It refuses an archive with an absolute path,
    ``..``, a link or a device as a whole, before it unpacks anything.

    Args:
        root: Folder; it is created if it does not exist.
        file_name: Name of the archive below ``root``.
        data_url: Address of the archive.
        sha256: SHA-256 of the archive.
        md5: MD5 of the archive.

    Returns:
        ``root``.

    Raises:
        ValueError: The name leaves the folder.
        DownloadError: The download failed.
        DatasetError: The archive is damaged or tries to leave the folder.
    """
    folder = Path(root)
    options: dict[str, Any] = {"filter": "data"}
    # Python before 3.10.12 and 3.11.4 has no filters. There, ignore the owners and permissions in
    # the archive.
    if not hasattr(tarfile, "data_filter"):
        options = {"set_attrs": False}
    with (
        _archive(root, file_name, data_url, sha256, md5) as archive,
        tarfile.open(archive, "r:*") as tar,
    ):
        members = tar.getmembers()
        # Check all members before the first one is unpacked.
        for member in members:
            _check_member(folder, archive, member.name, member.isfile() or member.isdir())
        _check_room(folder, archive, sum(member.size for member in members))
        with _unpacking(archive, folder) as scratch:
            for member in members:
                tar.extract(member, scratch, **options)
    return folder


def maybe_download_and_extract_zip(
    root: str | os.PathLike[str],
    file_name: str,
    data_url: str,
    *,
    sha256: str | None = None,
    md5: str | None = None,
) -> Path:
    """Download a ``.zip`` if it does not exist yet, and unpack it into ``root``.

    The checks are those of :func:`maybe_download_and_extract_tar_gz`.

    Args:
        root: Folder; it is created if it does not exist.
        file_name: Name of the archive below ``root``.
        data_url: Address of the archive.
        sha256: SHA-256 of the archive.
        md5: MD5 of the archive.

    Returns:
        ``root``.

    Raises:
        ValueError: The name leaves the folder.
        DownloadError: The download failed.
        DatasetError: The archive is damaged or tries to leave the folder.
    """
    folder = Path(root)
    with (
        _archive(root, file_name, data_url, sha256, md5) as archive,
        zipfile.ZipFile(archive) as zipped,
    ):
        for entry in zipped.infolist():
            # Unix stores the type of a file in the upper 16 bits; archives of other systems have 0
            # there.
            is_plain = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)
            _check_member(folder, archive, entry.filename, is_plain)
        _check_room(folder, archive, sum(entry.file_size for entry in zipped.infolist()))
        with _unpacking(archive, folder) as scratch:
            zipped.extractall(scratch)
    return folder


@contextlib.contextmanager
def _archive(
    root: str | os.PathLike[str], file_name: str, data_url: str, sha256: str | None, md5: str | None
) -> Iterator[Path]:
    """Yield the downloaded archive under a lock, and convert unpacking errors to DatasetError."""
    folder = Path(root)
    path = folder / file_name
    if not _is_below(folder, path) or path.name in ("", ".", ".."):
        raise ValueError(f"file_name must name a file below {folder}, not be {file_name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(path.with_name(f".{path.name}.lock")):
        if not path.is_file():
            progress_download(data_url, path, sha256=sha256, md5=md5)
        else:
            check_digest(path, sha256=sha256, md5=md5)
        try:
            yield path
        except _DAMAGED as error:
            # Errors of the system have a number. For damaged data, the decompressors raise OSErrors
            # without one.
            if isinstance(error, OSError) and error.errno is not None:
                raise DatasetError(f"{path} could not be unpacked: {error}") from error
            raise DatasetError(f"{path} is damaged: {error}; delete it and get it again") from error


@contextlib.contextmanager
def _unpacking(archive: Path, folder: Path) -> Iterator[Path]:
    """Yield an empty folder to unpack into, and then move its files to ``folder``.

    So a full disk or a killed process never leaves an incomplete file that looks like a complete
    one.
    """
    # The caller holds the lock of the archive, so a folder of this name is that of a killed
    # process.
    scratch = archive.with_name(f".{archive.name}.unpacking")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
        # Sorted, so that a folder comes before its files.
        for path in sorted(scratch.rglob("*")):
            target = folder / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                files.move_into_place(path, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_member(folder: Path, archive: Path, name: str, is_plain: bool) -> None:
    """Refuse a member that could write outside the folder."""
    parts = name.replace("\\", "/").split("/")
    if (
        name.startswith(("/", "\\"))
        or ".." in parts
        or ":" in parts[0]
        or not _is_below(folder, folder / name)
    ):
        raise DatasetError(
            f"{archive} tries to write outside {folder}: {name!r}; nothing was unpacked"
        )
    if not is_plain:
        raise DatasetError(
            f"{archive} contains {name!r}, which is a link or a device; nothing was unpacked"
        )


def _check_room(folder: Path, archive: Path, size_bytes: int) -> None:
    """Refuse an archive that would fill the disk, as a small one can that expands to terabytes."""
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise DatasetError(
            f"{archive} unpacks to {size_bytes} bytes, and {folder} has {free} free; "
            "nothing was unpacked"
        )


def _is_below(folder: Path, path: Path) -> bool:
    """Return True if a path is in a folder after symbolic links are resolved."""
    return path.resolve().is_relative_to(folder.resolve())
