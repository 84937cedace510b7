"""Unpack the files of a run that a host sends: results, and metrics that were not delivered."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from mlbench_core.client.undelivered_metrics import LOST_NAME

__all__ = ["ARCHIVE_BYTES", "RESULT_BYTES", "UnpackError", "unpack"]

RESULT_BYTES = 4 * 2**30
"""Largest size of the files of a run on one host."""

_MOST_FILES = 10_000
# Each file has some kilobytes for its name.
ARCHIVE_BYTES = RESULT_BYTES + _MOST_FILES * 8192
"""Largest size of their archive."""

# Another attempt would not change these errors, which are due to the names in the archive.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


class UnpackError(Exception):
    """An archive is damaged, too large, or has other content than files in folders of a run."""


def unpack(archive: IO[bytes], folder: Path, host_index: int) -> None:
    """Write the files of an archive below the folder of a run.

    Only plain files are written, so no later file can follow a link out of the folder.

    Args:
        archive: A tar archive, which may have any content.
        folder: The folder.
        host_index: Number of the host among those of the run. The workers of all hosts have files
            of the same names for their metrics, so it becomes a part of these names.

    Raises:
        UnpackError: The archive is not one of the agent.
        OSError: A file cannot be written.
    """
    size = count = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            for member in tar:
                size, count = size + max(member.size, 0), count + 1
                if size > RESULT_BYTES or count > _MOST_FILES:
                    raise UnpackError(f"more than {_MOST_FILES} files or {RESULT_BYTES >> 30} GiB")
                content = None
                if member.isreg() and not member.issparse():
                    content = tar.extractfile(member)
                if content is None:
                    raise UnpackError(f"{member.name[:80]!r} is not a plain file")
                _write(content, _target(member.name, folder, host_index))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UnpackError(f"the archive is damaged: {error}") from error
    except OSError as error:
        if error.errno not in _OF_NAMES:
            raise
        raise UnpackError(f"a name in the archive cannot be used: {error.strerror}") from error


def _target(name: str, folder: Path, host_index: int) -> Path:
    first, *rest = PurePosixPath(name).parts or ("",)
    if first not in ("spool", "output") or not rest or ".." in rest:
        raise UnpackError(f"{name[:80]!r} is outside the folders of the run")
    # The names of lost metrics are different on each host, and the master reads the number in them.
    if first == "spool" and not re.fullmatch(LOST_NAME, rest[-1]):
        rest[-1] = f"host{host_index}-{rest[-1]}"
    return folder.joinpath(first, *rest)


def _write(content: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(target, flags, 0o600), "wb") as file:
        shutil.copyfileobj(content, file)
