"""The worker protocol of the timings: requests, replies, and the report of a worker that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.conftest import MICRO

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(MICRO)!r})
import torch.distributed as dist
from _workers import serve

def make(setup):
    print("text of a library")
    def handle(request):
        if request.get("fails") == "abort" and dist.get_rank() == 1:
            os.abort()
        if request.get("fails") == "raise":
            raise ValueError("bad value")
        return {{"rank": dist.get_rank(), "sum": setup["base"] + request.get("value", 0)}}
    return handle

serve(make)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return str(path)


def test_requests_reach_all_workers(micro: Callable[[str], ModuleType], script: str) -> None:
    with micro("_workers").Workers(script, 2, {"base": 1}) as workers:
        assert workers.ask(value=2) == [{"rank": 0, "sum": 3}, {"rank": 1, "sum": 3}]
        assert workers.ask(value=5) == [{"rank": 0, "sum": 6}, {"rank": 1, "sum": 6}]
        processes = workers.processes
    assert all(process.returncode is not None for process in processes)


def test_a_failure_is_named_and_the_next_request_gets_new_workers(
    micro: Callable[[str], ModuleType], script: str
) -> None:
    module = micro("_workers")
    with module.Workers(script, 2, {"base": 1}) as workers:
        with pytest.raises(module.WorkerError, match="exit code -6"):
            workers.ask(fails="abort")
        assert workers.ask(value=2)[1] == {"rank": 1, "sum": 3}
        with pytest.raises(module.WorkerError, match=r"exit code 1: .*ValueError: bad value"):
            workers.ask(fails="raise")
