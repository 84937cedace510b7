"""The allocator's settings, seen by the page faults of a process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from mlbench_core.distributed.pytorch.memory import fits_on_gpu
from tests.helpers.processes import environment

# Prints the page faults of some steps within the block, then the memory of the process in bytes within and after it.
PROGRAM = """
import resource, sys, torch
from mlbench_core.distributed.pytorch import initialize_backends
def step():
    kept = [torch.ones(2_000_000) for _ in range(16)]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with initialize_backends("gloo", logging_level="WARNING", keep_memory=sys.argv[1] == "keep"):
    step()
    print(faults(), resident())
print(resident(), faults())
"""


def run_program(how: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, env=environment(), timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs the GNU C library")
def test_memory_that_was_freed_is_there_for_the_next_step_and_returned_at_the_end() -> None:
    faults, within, after, later_faults = run_program("keep")
    assert faults < run_program("default")[0] / 3
    assert within - after > 0.9 * 16 * 4 * 2_000_000
    assert later_faults > 3 * faults  # memory is returned again


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
