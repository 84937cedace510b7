"""Fixtures of the master's tests."""

from __future__ import annotations

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
