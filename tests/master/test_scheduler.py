"""The scheduler with launchers and databases that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from mlbench_master.events import EventBus
from mlbench_master.launchers import Job, JobStatus
from mlbench_master.scheduler import Scheduler
from mlbench_master.store import Run, Store, new_run
from tests.master.helpers import IdleLauncher


class FaultyLauncher(IdleLauncher):
    """Fails in some of its methods for the first run, and only for that."""

    capacity = 9.0  # type: ignore[assignment]

    def __init__(self, error: Exception, *broken: str) -> None:
        self.error = error
        self.state = "running"
        self.stopped: list[str] = []
        for name in broken:
            setattr(self, name, self._failing(getattr(self, name)))

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(job: Job | str, *arguments: Any) -> Any:
            if job == "idle-1" or (isinstance(job, Job) and job.run_id == 1):
                raise self.error
            return method(job, *arguments)

        return call

    def poll(self, job_id: str) -> JobStatus:
        return JobStatus(self.state)

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"sqlite:///{tmp_path / 'master.db'}")
    for name in ("first", "second"):
        made.add_run(
            new_run(name=name, num_workers=1, num_cpus=1, max_bandwidth=1000, image="", backend="gloo", command="true")
        )
    return made


def ticks(store: Store, launcher: FaultyLauncher) -> tuple[Run, Run]:
    """Both runs, after a look that starts them and one at which their processes have ended."""
    scheduler = Scheduler(store, launcher, EventBus(), {})
    scheduler.tick()
    launcher.state = "finished"
    scheduler.tick()
    first, second = store.runs()
    return first, second


@pytest.mark.parametrize("broken", [("start",), ("poll",), ("poll", "stop", "log_tail"), ("log_tail",), ("logs",)])
def test_an_exception_ends_its_run_and_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    monkeypatch.setattr(EventBus, "has_subscribers", True)
    launcher = FaultyLauncher(KeyError("what"), *broken)
    first, second = ticks(store, launcher)
    assert second.state == "finished"
    assert (first.state, first.finished_at is None) == ("failed", False)
    assert first.metadata_dict()["reason"] == "the master cannot look after the run: KeyError: 'what'"
    assert launcher.stopped == ([] if "stop" in broken else ["idle-1"])


def test_a_full_disk_or_too_many_files_end_no_run(store: Store) -> None:
    """They concern the machine, not the run, and pass; the other runs go on meanwhile."""
    launcher = FaultyLauncher(OSError(24, "Too many open files"), "poll")
    first, second = ticks(store, launcher)
    assert (first.state, second.state, launcher.stopped) == ("started", "finished", [])
    del launcher.poll
    assert ticks(store, launcher)[0].state == "finished"


def test_a_database_that_is_away_ends_no_run(store: Store) -> None:
    launcher = FaultyLauncher(OperationalError("", {}, Exception("gone")), "poll")
    with pytest.raises(OperationalError):
        ticks(store, launcher)
    del launcher.poll
    assert [run.state for run in ticks(store, launcher)] == ["finished", "finished"]


def test_an_exclusive_run_runs_alone(tmp_path: Path) -> None:
    made = Store(f"sqlite:///{tmp_path / 'master.db'}")
    for name, workers, metadata in (("a", 1, "{}"), ("b", 2, '{"exclusive": true}'), ("c", 3, "{}"), ("d", 3, "{}")):
        made.add_run(
            new_run(
                name=name, num_workers=workers, num_cpus=1, max_bandwidth=1000, image="", backend="gloo",
                command="true", job_metadata=metadata,
            )
        )  # fmt: skip
    launcher = FaultyLauncher(OSError())
    scheduler = Scheduler(made, launcher, EventBus(), {})

    def states_after(state: str) -> list[str]:
        launcher.state = state
        scheduler.tick()
        return [run.name for run in made.runs("started")]

    assert states_after("running") == ["a"]
    assert states_after("running") == ["a"]  # the exclusive run waits, and those after it
    assert states_after("finished") == ["b"]
    assert states_after("running") == ["b"]
    assert states_after("finished") == ["c", "d"]
