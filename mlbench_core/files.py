"""Write files whole or not at all, lock them between processes, and compute their digests.

A file or folder is first written under a temporary name in the same folder. When its content is on
disk, it is renamed. So its path holds either the old content or the complete new content at any
moment: after an error, on a full disk, and after a killed process or a power cut. This module
imports no framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mlbench_core.errors import ConfigurationError

__all__ = [
    "check_only_own",
    "creating_folder",
    "digest",
    "is_file_name",
    "lock",
    "move_into_place",
    "read_bytes",
    "read_text",
    "replacing",
]

_CHUNK_BYTES = 1 << 20
# Settings, names and lists that people write have a few kilobytes.
_SMALL_BYTES = 1 << 24


def is_file_name(name: str) -> bool:
    """Return True if a text is safe as the name of one file or folder.

    Example:
        >>> is_file_name("run-1"), is_file_name("../run-1")
        (True, False)
    """
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Replace a file at once when the block ends, or leave it as it was if the block raises.

    Args:
        path: The file to write; its folder is created.
        temporary: The path to write to first, in the same folder. By default it has a random name,
            so that several processes can write at the same time. If a process is killed, its
            temporary file then stays. Give a path if only one process writes at a time: the next
            write then removes the file of a killed process.

    Yields:
        The temporary path. The block creates the file. If the block or the rename fails, the file
        is removed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "settings.txt"
        >>> with replacing(path) as temporary:
        ...     _ = temporary.write_text("complete")
        >>> path.read_text()
        'complete'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or _new_name(path)
    # The file is removed and not overwritten, because it may be a hard link to a file that is in
    # use.
    temporary.unlink(missing_ok=True)
    try:
        with _naming(path):
            yield temporary
            move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def creating_folder(path: Path) -> Iterator[Path]:
    """Create a folder with its files when the block ends, or not at all if the block raises.

    If the folder exists when the block ends, because another process was faster, it stays as it is.

    Args:
        path: The folder to create; the folders above it are created too.

    Yields:
        An empty temporary folder in which the block writes the files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _new_name(path)
    temporary.mkdir()
    try:
        with _naming(path):
            yield temporary
        try:
            move_into_place(temporary, path)
        # The rename fails if the folder exists and has files, because another process was faster.
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to an error of the system that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        # Errors that Python or a library made have no number.
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def move_into_place(source: Path, path: Path) -> None:
    """Flush a file or folder to the disk, then rename it; a file at the new path is replaced.

    Args:
        source: The file or folder.
        path: Its new path, on the same file system.

    Raises:
        OSError: The disk is full, or the new path is a folder that is not empty.
    """
    for folder, _, names in os.walk(source):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)
    if not source.is_dir():
        _sync(source)
    os.replace(source, path)
    # Without a flush of the folder, a power cut can undo the rename.
    _sync(path.parent)


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock between processes.

    The system releases it when the process ends, even if it is killed.

    Args:
        path: The lock file. Its folder is created, and the empty file stays.
        wait: True to wait until no other process holds the lock.

    Raises:
        TimeoutError: Another process holds the lock, and ``wait`` is False.
    """
    # Imported here, because the import takes 40 ms and most commands lock nothing.
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path, timeout=-1 if wait else 0, thread_local=False):
        yield


def check_only_own(path: Path, found: os.stat_result | None = None) -> None:
    """Refuse a file or folder that other users may change, as ssh does with its own files.

    A group that has only this user as its member, which many systems give to each user, may write.

    Args:
        path: The file or folder.
        found: Its status, if it is known; a file that is open cannot be replaced in between.

    Raises:
        ConfigurationError: It belongs to another user, or others may write it.
        FileNotFoundError: It does not exist.
    """
    found = found or path.stat()
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"{path} belongs to user {found.st_uid}, who could change it: delete it, or choose "
            "another folder with MLBENCH_HOME"
        )
    writes = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writes == stat.S_IWGRP and _is_private_group(found.st_gid):
        return
    if writes:
        raise ConfigurationError(
            f"users other than its owner can write to {path}, which is trusted: chmod go-w {path}"
        )


def _is_private_group(number: int) -> bool:
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    is_own = group.gr_name == user.pw_name and number == user.pw_gid
    return is_own and set(group.gr_mem) <= {user.pw_name}


def digest(source: Path | bytes | IO[bytes], algorithm: str = "sha256") -> str:
    """Compute the digest of a file, which is read piece by piece, or of bytes.

    Args:
        source: A file's path, a file that is open in binary mode, or the bytes themselves.
        algorithm: Name of the hash function for :func:`hashlib.new`, for example ``"md5"``.

    Returns:
        The digest in hexadecimal digits.

    Example:
        >>> digest(b"", "md5")
        'd41d8cd98f00b204e9800998ecf8427e'
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            return digest(file, algorithm)
    # Some systems refuse MD5 without the argument that it does not protect anything.
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    if isinstance(source, bytes):
        hasher.update(source)
    else:
        while chunk := source.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def read_bytes(path: Path, most_bytes: int = _SMALL_BYTES) -> bytes:
    """Read a whole file, which must be a regular one of limited size.

    A directory, a pipe or a device is refused at once: reading ``/dev/zero`` would never end, and a
    pipe without a writer would wait.

    Args:
        path: The file, or a link to it.
        most_bytes: Largest size.

    Returns:
        The content.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.

    Example:
        >>> read_bytes(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: /dev/zero is a folder, a pipe or a device, not a regular file
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is a folder, a pipe or a device, not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            # One byte more than allowed shows that a file is too large, also one that grows.
            content = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise OSError(
            f"{path} has more than {most_bytes} bytes: it is not the file that is meant here"
        )
    return content


def read_text(path: Path, most_bytes: int = _SMALL_BYTES) -> str:
    """Read a text file as :func:`read_bytes` does.

    It must be UTF-8. A byte order mark at its start is left out.

    Args:
        path: The file, or a link to it.
        most_bytes: Largest size.

    Returns:
        The text, in which each line ends with a line feed, as in Python's text mode.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger.
        UnicodeDecodeError: It is not UTF-8, a ``ValueError``.
    """
    text = read_bytes(path, most_bytes).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _new_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def _sync(path: str | os.PathLike[str]) -> None:
    """Flush the content of a file or folder to the disk."""
    # Windows can synchronize neither folders nor files that are open for reading.
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
