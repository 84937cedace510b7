"""The allocator's settings, seen by the page faults of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlbench_core.distributed.pytorch.memory import fits_on_gpu
from tests.helpers.processes import environment

PROGRAM = """
import resource, sys, torch
from mlbench_core.distributed.pytorch.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
def step():
    kept = [torch.ones(2_000_000) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, env=environment(), timeout=100
    )
    if done.returncode == 3:
        pytest.skip("needs the GNU C library")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_was_freed_is_there_for_the_next_step() -> None:
    assert page_faults("keep") < page_faults("default") / 3


def test_nothing_fits_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not fits_on_gpu(0)


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1000, 2000))
    assert fits_on_gpu(250)
    assert not fits_on_gpu(251)
    with pytest.raises(ValueError, match="share must be from 0 to 1, not 2"):
        fits_on_gpu(1, share=2)
