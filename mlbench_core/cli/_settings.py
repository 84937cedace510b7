"""What the command remembers between calls: settings, the last answers, the embedded master.

All of it is JSON below :func:`mlbench_core.paths.user_folder`, written atomically and readable by its owner only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlbench_core.paths import user_folder

__all__ = ["LAST_RUN", "MASTER", "SETTINGS", "forget", "lock", "read", "remember", "replacing"]

SETTINGS = "settings.json"
"""Chosen by the user: ``{"master_url": ..., "token": ...}``."""

LAST_RUN = "last-run.json"
"""Answers of the last ``mlbench run``, the defaults of its questions."""

MASTER = "master.json"
"""The embedded master: ``{"url": ..., "pid": ..., "token": ...}``."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that a reader sees the old one or the whole new one, never a part.

    Args:
        path: The file to write; its folder is created.

    Yields:
        A temporary path in the same folder to write to. It takes the name ``path`` at the end, or is removed where
        the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(name: str) -> dict[str, Any]:
    """Read one of the files; one that is missing or damaged counts as empty."""
    try:
        value = json.loads(user_folder(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def remember(name: str, value: dict[str, Any]) -> None:
    """Write one of the files, for the owner's eyes only (it may hold a token)."""
    with replacing(user_folder(name)) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def forget(name: str) -> None:
    """Remove one of the files."""
    user_folder(name).unlink(missing_ok=True)


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when the process dies.

    Args:
        name: Name of the lock file below the user's folder.
    """
    path = user_folder(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:  # no such lock outside POSIX, where the embedded master does not run either
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
