"""What every test of a compiled library shares: a folder for what is compiled, and one thread for torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import cuda_host


@pytest.fixture(scope="session", autouse=True)
def host_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tell `cuda_host` where to keep what it compiles."""
    cuda_host.use_folder(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch's other threads from waiting for the next small tensor at full speed while the emulator runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
