"""Fixtures of the tests of faults."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from mlbench_master import create_app
from tests.master.helpers import TestClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """A client of a master in this process, with the local engine."""
    with TestClient(
        create_app(data_dir=tmp_path / "data"), base_url="http://127.0.0.1:5080"
    ) as test_client:
        yield test_client


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode != 0:
        pytest.skip(f"may not mount a tmpfs: {done.stderr.strip() if done else 'needs root'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
