"""Unpack the archives of results that tests read."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of this repository; the first releases of Python 3.10 and 3.11 have no
    filter."""
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    shutil.unpack_archive(archive, folder, **options)
