"""Fail tests that leave something behind, and keep the garbage collector out of collection."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# What pytest itself, and the first import of torch's compiler or scikit-learn, set.
SET_BY_IMPORTS = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_CACHE_DIR")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the tests and their parameters out of each search for garbage.

    They are two million objects. A search of them takes seconds, again and again while pytest
    collects them, and later in the middle of tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New folders, one after the other: ``mktemp`` would look through those of all tests so far for
    each."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_leaks(homes: Iterator[Path]) -> Iterator[None]:
    """Fail a test that leaks an environment variable, a thread, or a process group.

    Every test gets folders of its own for the user's data and settings, and no master.
    """
    with pytest.MonkeyPatch.context() as patch:
        home = next(homes)
        home.mkdir()
        patch.setenv("MLBENCH_HOME", str(home))
        for name in ("MASTER_URL", "MASTER_KEY", "TOKEN", "DATABASE_URL", "CA_BUNDLE", "RUN_ID"):
            patch.delenv(f"MLBENCH_{name}", raising=False)
        environment = dict(os.environ)
        threads = set(threading.enumerate())
        yield
        _check(environment, threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small are no work to share, least of all where other processes take the
    cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _check(environment: dict[str, str], threads: set[threading.Thread]) -> None:
    changed = {
        key
        for key in environment.keys() | os.environ.keys()
        if environment.get(key) != os.environ.get(key) and not key.startswith(SET_BY_IMPORTS)
    }
    for key in changed:
        if key in environment:
            os.environ[key] = environment[key]
        else:
            del os.environ[key]
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group initialised")
    # Dummy: a thread of C++ that has called Python, such as those of the backward pass on a GPU.
    allowed = ("pytest", "asyncio_", "Dummy-")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [
            thread
            for thread in threading.enumerate()
            if thread not in threads and thread.is_alive() and not thread.name.startswith(allowed)
        ]
        if not left:
            return
        time.sleep(0.02)
    pytest.fail(f"the test left threads running: {[thread.name for thread in left]}")
