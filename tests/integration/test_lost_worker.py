"""A worker that is lost in the middle of a reduction is named by the others, who end soon and do
not hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.forked import ForkedScript
from tests.helpers.processes import free_port
from tests.integration.lost_worker import TIMEOUT_S

SCRIPT = Path(__file__).with_name("lost_worker.py")


def run(
    world_size: int, store: str, lost: int, how: str, limit_s: float
) -> dict[int, tuple[int, str, str]]:
    """Exit status, output and errors of the workers that are not lost."""
    processes = [
        ForkedScript([str(SCRIPT), str(rank), str(world_size), store, str(lost), how])
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + limit_s
    try:
        ended = {
            rank: process.finish(max(1, deadline - time.monotonic()))
            for rank, process in enumerate(processes)
            if rank != lost
        }
    finally:
        for process in processes:
            process.kill()
    return {
        rank: (process.returncode, process.stdout, process.stderr)
        for rank, process in ended.items()
    }


@pytest.mark.parametrize("how", ["overlap", "plain", "shared"])
@pytest.mark.parametrize(("world_size", "lost"), [(2, 1), (4, 2), (2, 0)])
def test_a_killed_worker_is_named(tmp_path: Path, world_size: int, lost: int, how: str) -> None:
    store = f"tcp:{free_port()}" if lost == 0 else str(tmp_path / "store")
    survivors = run(world_size, store, lost, how, limit_s=200)
    assert len(survivors) == world_size - 1
    for status, output, errors in survivors.values():
        assert status == 1
        assert output == "step 3\n"
        assert f"mlbench_core.errors.WorkerError: lost worker {lost} (process " in errors


def test_a_worker_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    survivors = run(2, str(tmp_path / "store"), 1, "stop", limit_s=200)
    assert time.monotonic() - start > TIMEOUT_S
    status, output, errors = survivors[0]
    assert (status, output) == (1, "step 3\n")
    assert (
        "WorkerError: communication failed, and these workers do not answer: worker 1 (process "
        in errors
    )
