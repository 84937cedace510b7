"""The allocator's settings, seen by the page faults of a process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from mlbench_core.distributed.pytorch import initialize, initialize_backends
from mlbench_core.distributed.pytorch.memory import fits_on_gpu
from tests.helpers.processes import environment

# Prints the page faults of some steps within a block that ends by an exception, the memory of the
# process in bytes within and after it, and the page faults of later steps. Their tensor is larger
# than all free memory of the heap. So it shows whether glibc maps large tensors again, while
# smaller ones may lie in the heap.
PROGRAM = """
import contextlib, ctypes, resource, torch
# Whether the kernel has huge pages left, of which one fault gets many pages, is chance.
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
from mlbench_core.distributed.pytorch import initialize_backends
def step(numel):
    kept = [torch.ones(numel) for _ in range(100_000_000 // numel or 1)]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def faults(numel):
    step(numel)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step(numel)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with contextlib.suppress(KeyError), initialize_backends("gloo", logging_level="WARNING"):
    print(faults(2_000_000), resident())
    raise KeyError
print(resident(), faults(150_000_000))
"""


def run_program(**variables: str) -> list[int]:
    # Another allocator, or settings of its own, would change what is counted.
    others = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {name: value for name, value in environment().items() if not name.startswith(others)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**clean, **variables},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_that_was_freed_is_there_for_the_next_step_and_returned_at_the_end() -> None:
    faults, within, after, later_faults = run_program()
    # Settings of the environment are left alone: here, that each tensor is mapped, and unmapped
    # when it is freed.
    mapped_faults, _, _, later_mapped_faults = run_program(MALLOC_MMAP_THRESHOLD_="65536")
    tunable_faults = run_program(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=65536")[0]
    assert faults < min(mapped_faults, tunable_faults) / 3
    assert within - after > 0.9 * 4 * 100_000_000
    assert later_faults > later_mapped_faults / 3


def test_the_settings_of_malloc_stay_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(initialize, "keep_freed_memory", lambda: calls.append("keep") or True)
    monkeypatch.setattr(initialize, "return_freed_memory", lambda: calls.append("return"))
    with initialize_backends("gloo", logging_level="WARNING", keep_memory=False):
        pass
    assert calls == []
    with initialize_backends("gloo", logging_level="WARNING"):
        assert calls == ["keep"]
    assert calls == ["keep", "return"]


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
