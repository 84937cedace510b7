"""What several tests of faults need."""

from __future__ import annotations

from mlbench_master.store import Run, Store, new_run

__all__ = ["add_run"]


def add_run(store: Store, name: str, command: str = "true", workers: int = 1) -> Run:
    """Add a run that waits for its start."""
    values = {"num_cpus": 1, "max_bandwidth": 1000, "image": "", "backend": "gloo"}
    return store.add_run(new_run(name=name, command=command, num_workers=workers, **values))
