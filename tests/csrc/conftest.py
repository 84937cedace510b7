"""One folder for the libraries that this session compiles."""

from __future__ import annotations

import pytest

from tests.helpers import cuda_host


@pytest.fixture(scope="session", autouse=True)
def host_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tell `cuda_host` where to keep what it compiles."""
    cuda_host.use_folder(tmp_path_factory)
