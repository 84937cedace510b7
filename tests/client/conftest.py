"""A stub of the master for each test, and clients that are closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlbench_core.client.api import ApiClient
from tests.client.stub_master import StubMaster


@pytest.fixture
def master() -> Iterator[StubMaster]:
    stub = StubMaster()
    yield stub
    stub.stop()


@pytest.fixture
def connect(master: StubMaster) -> Iterator[Callable[..., ApiClient]]:
    clients: list[ApiClient] = []

    def make(**options: Any) -> ApiClient:
        clients.append(ApiClient(**{"url": master.url, "timeout_s": 60.0, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close(timeout_s=0)
