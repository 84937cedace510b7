"""Store the state of this user: settings, the last answers to the command, the running masters.

Each file is JSON in :func:`mlbench_core.paths.user_folder`, written atomically and readable by its owner only.
"""

from __future__ import annotations

import json
from typing import Any

from mlbench_core import files
from mlbench_core.paths import user_folder

__all__ = ["LAST_RUN", "MASTER", "SETTINGS", "forget", "read", "remember"]

SETTINGS = "settings.json"
"""Written by the user: ``{"master_url": ..., "token": ...}``."""

LAST_RUN = "last-run.json"
"""Answers of the last ``mlbench run``: the defaults of its next questions."""

MASTER = "master.json"
"""The embedded master; see :class:`~mlbench_core.client.masters.MasterRecord`."""


def read(name: str) -> dict[str, Any]:
    """Read one of the files; a missing or damaged file counts as empty."""
    try:
        value = json.loads(user_folder(name).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def remember(name: str, value: dict[str, Any]) -> None:
    """Write one of the files so that only its owner can read it, because it may hold a token."""
    with files.replacing(user_folder(name)) as temporary:
        # Set the mode before the content, so that no other user can read a token in between.
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def forget(name: str) -> None:
    """Remove one of the files."""
    user_folder(name).unlink(missing_ok=True)
