"""Find the default folders of a user: data, results, checkpoints, the master's database."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(*parts: str) -> Path:
    """Return a path below the user's MLBench folder; nothing is created.

    The folder is ``MLBENCH_HOME`` if that is set, else the platform's folder for user data
    (``~/.local/share/mlbench`` on Linux).

    Args:
        parts: Names of folders or files in it, for example ``"datasets"``.

    Returns:
        The absolute path.
    """
    home = os.environ.get("MLBENCH_HOME")
    if home:
        return Path(home).expanduser().absolute().joinpath(*parts)
    # Imported here, because 'mlbench --help' needs no folder and should start fast.
    import platformdirs

    return Path(platformdirs.user_data_path("mlbench", appauthor=False)).joinpath(*parts)
