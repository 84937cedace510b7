"""Store the state of this user: settings, the last answers to the command, the running masters.

Each file is JSON in :func:`mlbench_core.paths.user_folder`, written atomically and readable by its
owner only. A file or folder that other users may write is refused: they could send a user's token
to their own server.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

from mlbench_core import files
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder

__all__ = ["LAST_RUN", "MASTER", "SETTINGS", "forget", "read", "remember"]

SETTINGS = "settings.json"
"""Written by the user: ``{"master_url": ..., "token": ...}``."""

LAST_RUN = "last-run.json"
"""Answers of the last ``mlbench run``: the defaults of its next questions."""

MASTER = "master.json"
"""The embedded master; see :class:`~mlbench_core.client.masters.MasterRecord`."""

# Such a file has some kilobytes.
_MOST_BYTES = 1 << 20


def read(name: str) -> dict[str, Any]:
    """Read one of the files; a missing or damaged file counts as empty.

    Raises:
        ConfigurationError: The file cannot be read, or other users may write it or its folder.
    """
    path = user_folder(name)
    try:
        # A pipe of this name must not block.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"{path} is not a regular file: delete it")
            files.check_only_own(path, status)
            files.check_only_own(path.parent)
            text = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read by this user: {error.strerror or error}"
        ) from error
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def remember(name: str, value: dict[str, Any]) -> None:
    """Write one of the files so that only its owner can read it, because it may hold a token.

    Raises:
        ConfigurationError: Other users may write the folder.
    """
    folder = user_folder()
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    # The folder may exist already, made for data sets or a lock with a umask that lets others
    # write. No file in it was trusted so far, so its mode is mended. The setgid bit marks a folder
    # that is shared on purpose.
    if os.name == "posix" and not any(folder.glob("*.json")):
        mode = folder.stat().st_mode
        if not mode & stat.S_ISGID:
            with contextlib.suppress(PermissionError):
                folder.chmod(stat.S_IMODE(mode) & ~0o022)
    files.check_only_own(folder)
    with files.replacing(user_folder(name)) as temporary:
        # Set the mode before the content, so that no other user can read a token in between.
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def forget(name: str) -> None:
    """Remove one of the files."""
    user_folder(name).unlink(missing_ok=True)
