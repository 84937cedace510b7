"""What several tests of faults need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mlbench_master.database.store import Run, Store, new_run

__all__ = ["add_run", "full"]


def add_run(store: Store, name: str, command: str = "true", workers: int = 1) -> Run:
    """Add a run that waits for its start."""
    values = {"num_cpus": 1, "max_bandwidth": 1000, "image": "", "backend": "gloo"}
    return store.add_run(new_run(name=name, command=command, num_workers=workers, **values))


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill a file system to the last byte."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (65_536, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    yield
    ballast.unlink()
