"""A step does not wander through more files than a reader can follow."""

from __future__ import annotations

import trace_step

from tests.helpers.ranks import run_ranks

LIMITS = {"CentralizedSGD": (20, 6), "PowerSGD": (40, 8)}
"""The changes of file in a step, and its files, at most."""


def traced(rank: int, world_size: int) -> dict[str, trace_step.Trace]:
    return trace_step.trace()


def test_a_step_stays_in_a_few_files() -> None:
    for traces in run_ranks(2, traced):
        assert traces.keys() == LIMITS.keys()
        for name, (most_changes, most_files) in LIMITS.items():
            changes, files = traces[name]
            assert changes[0][2] == "GenericCentralizedOptimizer.step", "the step was not traced"
            assert "aggregation/pytorch/transport/pairwise.py" in files
            assert len(changes) <= most_changes, changes
            assert len(files) <= most_files, files
