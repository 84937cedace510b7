"""Resume interrupted downloads, and unpack archives without writing outside their folder.

This module does not import a deep-learning framework.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterator
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
]

_CHUNK_BYTES = 1 << 16
_RETRY_STATUS = (408, 429, 500, 502, 503, 504)


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

    The bytes go to ``dest`` + ``.part``. This file is renamed once it is complete and its checksum is correct, so
    ``dest`` is never incomplete. An interrupted transfer resumes at the last byte. A partial file from an earlier call
    is resumed too, as long as the server reports the same file. An existing ``dest`` with the correct checksum is kept;
    without a checksum the file is downloaded again.

    Args:
        url: Address, http or https.
        dest: The file to make; folders above it are made too.
        sha256: SHA-256 that the file must have, in hexadecimal digits.
        md5: MD5 that the file must have, in hexadecimal digits; for data sets that do not publish a stronger checksum.
        attempts: Number of consecutive transfers that may fail without a byte of progress, at least 1.
        timeout_s: Seconds to wait for a connection, and for each piece of the response.

    Returns:
        The path of the file.

    Raises:
        ValueError: ``attempts`` is below 1.
        DownloadError: It could not be fetched, its checksum is wrong, or the disk is full.
    """
    check_at_least("attempts", attempts, 1)
    path = Path(dest)
    digests = {name: value.lower() for name, value in (("sha256", sha256), ("md5", md5)) if value}
    if digests and path.is_file() and not _wrong_digests(path, digests):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A small file with the server's version mark next to the partial file decides whether resuming is safe.
    part = path.with_name(path.name + ".part")
    try:
        with _session() as session:
            resumed = _fetch(session, url, part, attempts, timeout_s)
            wrong = _wrong_digests(part, digests)
            if wrong and resumed:  # the partial file may be of another file: start over
                _discard(part)
                _fetch(session, url, part, attempts, timeout_s)
                wrong = _wrong_digests(part, digests)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"the disk is full: {url} does not fit beside {path}; free some space") from error
        raise
    if wrong:
        _discard(part)
        raise DownloadError(f"{url} is not what it should be: {wrong}; nothing was kept, try again or another mirror")
    files.move_into_place(part, path)
    _validator_file(part).unlink(missing_ok=True)
    return path


def _session() -> requests.Session:
    """Return a session that waits and retries if a connection fails."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry = Retry(total=None, connect=3, read=0, status=3, backoff_factor=0.3, status_forcelist=_RETRY_STATUS)
    retry.raise_on_status = False
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    session.mount("https://", HTTPAdapter(max_retries=retry))
    return session


def _fetch(session: requests.Session, url: str, part: Path, attempts: int, timeout_s: float) -> bool:
    """Complete ``part``, and return whether it contains bytes from an earlier call."""
    import requests

    resumed = part.exists() and _validator_file(part).exists()
    if not resumed:
        _discard(part)
    left = attempts
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(session, url, part, timeout_s)
            return resumed
        except requests.RequestException as error:
            # Any progress restores the full number of attempts: a long download over a bad line still completes.
            progress = (part.stat().st_size if part.exists() else 0) > before
            left = attempts if progress else left - 1
            if left <= 0:
                raise DownloadError(f"could not download {url}: {error} (tried {attempts} times)") from error


def _transfer(session: requests.Session, url: str, part: Path, timeout_s: float) -> None:
    """Send one request: append the missing bytes, or start over if the server has another file or ignores ranges."""
    import requests

    have = part.stat().st_size if part.exists() else 0
    # Compressed transfer would make the byte positions of the file meaningless.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator := _read_validator(part):
            headers["If-Range"] = validator
    with session.get(url, headers=headers, stream=True, timeout=timeout_s) as answer:
        if answer.status_code == 416:  # nothing is left to send, or the file is another one
            if answer.headers.get("Content-Range", "").endswith(f"/{have}"):
                return
            _discard(part)
            raise requests.ConnectionError("the server's file is shorter than what was here: starting anew")
        if answer.status_code >= 500 or answer.status_code in _RETRY_STATUS:
            raise requests.ConnectionError(f"the server answered {answer.status_code} {answer.reason}")
        if answer.status_code not in (200, 206):
            raise DownloadError(f"could not download {url}: the server answered {answer.status_code} {answer.reason}")
        if answer.status_code == 200 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            if answer.status_code == 206:
                _discard(part)
                raise requests.ConnectionError("the server sent another range than was asked for")
            have = 0
        _write(answer, part, have)


def _write(answer: requests.Response, part: Path, have: int) -> None:
    """Write the body of an answer behind the first ``have`` bytes of ``part``."""
    length = answer.headers.get("Content-Length")
    total = have + int(length) if length and length.isdigit() else None
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise DownloadError(
            f"the disk is full: {answer.url} needs {total - have} more bytes, {part.parent} has {free}; free some space"
        )
    if validator := answer.headers.get("ETag") or answer.headers.get("Last-Modified"):
        _validator_file(part).write_text(json.dumps({"validator": validator}))
    with part.open("r+b" if have else "wb") as file, _progress(part.name.removesuffix(".part"), have, total) as advance:
        file.seek(have)
        for chunk in answer.iter_content(_CHUNK_BYTES):
            file.write(chunk)
            advance(len(chunk))


@contextlib.contextmanager
def _progress(name: str, done: int, total: int | None) -> Iterator[Any]:
    """Show a progress bar on a terminal, and yield the function that receives a number of bytes."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda count: bar.update(task, advance=count)


def _validator_file(part: Path) -> Path:
    """Return the path that stores the server's version mark, next to the unfinished file."""
    return part.with_name(part.name + ".json")


def _read_validator(part: Path) -> str | None:
    """Return the mark for If-Range; ignore a weak ETag, which is not allowed for ranges (RFC 9110, section 13.1.5)."""
    try:
        validator = json.loads(_validator_file(part).read_text()).get("validator")
    except (OSError, ValueError, AttributeError):
        return None
    return None if not isinstance(validator, str) or validator.startswith("W/") else validator


def _discard(part: Path) -> None:
    """Delete an unfinished file."""
    part.unlink(missing_ok=True)
    _validator_file(part).unlink(missing_ok=True)


def _wrong_digests(path: Path, digests: dict[str, str]) -> str:
    """Return a description of the first wrong checksum of a file, or an empty text."""
    for name, expected in digests.items():
        found = files.digest(path, name)
        if found != expected:
            return f"its {name} is {found} and should be {expected}"
    return ""


def check_digest(path: str | os.PathLike[str], *, sha256: str | None = None, md5: str | None = None) -> None:
    """Check a file against its published checksum.

    Args:
        path: The file.
        sha256: SHA-256 that it must have, in hexadecimal digits.
        md5: MD5 that it must have, in hexadecimal digits.

    Raises:
        DatasetError: It has another one.
    """
    digests = {name: value.lower() for name, value in (("sha256", sha256), ("md5", md5)) if value}
    if wrong := _wrong_digests(Path(path), digests):
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
        Path of the decompressed file: that of the compressed one without ``.bz2``.

    Raises:
        ValueError: The name does not end in ``.bz2`` or leaves the folder.
        DownloadError: It could not be downloaded.
        DatasetError: The file is damaged.
    """
    if not file_name.endswith(".bz2"):
        raise ValueError(f"file_name is {file_name!r}; it must end in .bz2")
    with _archive(root, file_name, data_url, sha256, md5) as archive:
        target = archive.with_suffix("")
        try:
            with files.replacing(target) as temporary, bz2.open(archive) as source, temporary.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except (EOFError, OSError) as error:
            raise _damaged(archive, error) from error
    return target


def maybe_download_and_extract_tar_gz(
    root: str | os.PathLike[str],
    file_name: str,
    data_url: str,
    *,
    sha256: str | None = None,
    md5: str | None = None,
) -> Path:
    """Download a ``.tar.gz`` (or otherwise compressed tar) if it does not exist yet, and unpack it into ``root``.

    Only plain files and folders below ``root`` are written. An archive with an absolute path, with ``..``, with a link
    or a device is refused as a whole, before anything is unpacked.

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
        DownloadError: It could not be downloaded.
        DatasetError: The archive is damaged or tries to leave the folder.
    """
    folder = Path(root)
    with _archive(root, file_name, data_url, sha256, md5) as archive:
        try:
            with tarfile.open(archive, "r:*") as tar:
                members = tar.getmembers()
                for member in members:
                    _check_member(folder, archive, member.name, plain=member.isfile() or member.isdir())
                for member in members:
                    _extract_tar_member(tar, member, folder)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise _damaged(archive, error) from error
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

    As careful as :func:`maybe_download_and_extract_tar_gz`.

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
        DownloadError: It could not be downloaded.
        DatasetError: The archive is damaged or tries to leave the folder.
    """
    folder = Path(root)
    with _archive(root, file_name, data_url, sha256, md5) as archive:
        try:
            with zipfile.ZipFile(archive) as zipped:
                for entry in zipped.infolist():
                    kind = stat.S_IFMT(entry.external_attr >> 16)
                    _check_member(folder, archive, entry.filename, plain=kind in (0, stat.S_IFREG, stat.S_IFDIR))
                zipped.extractall(folder)
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
            raise _damaged(archive, error) from error
    return folder


def _extract_tar_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Unpack a checked member; also apply tar's own filter if this Python has it."""
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, folder, filter="data")
    else:  # Python before 3.10.12 and 3.11.4
        tar.extract(member, folder, set_attrs=False)


@contextlib.contextmanager
def _archive(
    root: str | os.PathLike[str], file_name: str, data_url: str, sha256: str | None, md5: str | None
) -> Iterator[Path]:
    """Lock and yield the downloaded archive, so that other processes on this machine wait."""
    folder = Path(root)
    path = folder / file_name
    if not _is_below(folder, path) or path.name in ("", ".", ".."):
        raise ValueError(f"file_name is {file_name!r}; it must name a file below {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(path.with_name(f".{path.name}.lock")):
        if not path.is_file():
            progress_download(data_url, path, sha256=sha256, md5=md5)
        else:
            check_digest(path, sha256=sha256, md5=md5)
        yield path


def _check_member(folder: Path, archive: Path, name: str, plain: bool) -> None:
    """Refuse a member that could write outside the folder."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or not _is_below(folder, folder / name):
        raise DatasetError(f"{archive} tries to write outside {folder}: {name!r}; nothing was unpacked")
    if not plain:
        raise DatasetError(f"{archive} holds {name!r}, which is a link or a device; nothing was unpacked")


def _is_below(folder: Path, path: Path) -> bool:
    """Return whether a path is in a folder after all links on the way are followed."""
    return path.resolve().is_relative_to(folder.resolve())


def _damaged(archive: Path, error: Exception) -> DatasetError:
    """Return the error for an archive that is unreadable, or for which the disk has no room."""
    if isinstance(error, OSError) and error.errno is not None:
        return DatasetError(f"{archive} could not be unpacked: {error}")
    return DatasetError(f"{archive} is damaged: {error}; delete it and get it again")
