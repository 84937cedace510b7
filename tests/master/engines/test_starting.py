"""Runs that are started together: all of them or none."""

from __future__ import annotations

import pytest

from mlbench_master.database.store import NameInUseError, Run, Store, new_run


def make(name: str) -> Run:
    return new_run(
        name=name,
        num_workers=1,
        num_cpus=1.0,
        max_bandwidth=1000.0,
        image="custom_image",
        backend="gloo",
        command="x",
    )


@pytest.mark.parametrize("names", [("a", "taken", "b"), ("a", "b", "a")])
def test_a_name_in_use_starts_none_of_the_runs(names: tuple[str, ...]) -> None:
    store = Store("sqlite://")
    store.add_run(make("taken"))
    with pytest.raises(NameInUseError, match=r"taken|a, b, a"):
        store.add_runs([make(name) for name in names])
    assert [run.name for run in store.runs()] == ["taken"]
    assert [run.id for run in store.add_runs([make("c"), make("b")])] == [2, 3]
    assert [run.name for run in store.runs()] == ["taken", "c", "b"]
