"""The scheduler with engines and databases that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from mlbench_master.database.store import Run, Store, new_run
from mlbench_master.engines import Job, JobStatus
from mlbench_master.events import EventBus
from mlbench_master.runs.scheduler import Scheduler
from tests.master.helpers import IdleEngine

HOUR_US = 3_600_000_000


class FaultyEngine(IdleEngine):
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
            new_run(
                name=name,
                num_workers=1,
                num_cpus=1,
                max_bandwidth=1000,
                image="",
                backend="gloo",
                command="true",
            )
        )
    return made


def ticks(store: Store, engine: FaultyEngine) -> tuple[Run, Run]:
    """Both runs, after a look that starts them and one at which their processes have ended."""
    scheduler = Scheduler(store, engine, EventBus(), {})
    scheduler.tick()
    engine.state = "finished"
    scheduler.tick()
    first, second = store.runs()
    return first, second


@pytest.mark.parametrize(
    "broken", [("start",), ("poll",), ("poll", "stop", "log_tail"), ("log_tail",), ("logs",)]
)
def test_an_exception_ends_its_run_and_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    monkeypatch.setattr(EventBus, "has_subscribers", True)
    engine = FaultyEngine(KeyError("what"), *broken)
    first, second = ticks(store, engine)
    assert second.state == "finished"
    assert (first.state, first.finished_at is None) == ("failed", False)
    assert (
        first.metadata_dict()["reason"] == "the master cannot look after the run: KeyError: 'what'"
    )
    assert engine.stopped == ([] if "stop" in broken else ["idle-1"])


def test_a_full_disk_or_too_many_files_end_no_run(store: Store) -> None:
    """They concern the machine, not the run, and pass; the other runs go on meanwhile."""
    engine = FaultyEngine(OSError(24, "Too many open files"), "poll")
    first, second = ticks(store, engine)
    assert (first.state, second.state, engine.stopped) == ("started", "finished", [])
    del engine.poll
    assert ticks(store, engine)[0].state == "finished"


def test_a_database_that_is_away_ends_no_run(store: Store) -> None:
    engine = FaultyEngine(OperationalError("", {}, Exception("gone")), "poll")
    with pytest.raises(OperationalError):
        ticks(store, engine)
    del engine.poll
    assert [run.state for run in ticks(store, engine)] == ["finished", "finished"]


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'empty.db'}")


def add(store: Store, name: str, workers: int, metadata: str = "{}", **more: Any) -> Run:
    fields = {
        "num_cpus": 1,
        "max_bandwidth": 1000,
        "image": "",
        "backend": "gloo",
        "command": "true",
        **more,
    }
    return store.add_run(new_run(name=name, num_workers=workers, job_metadata=metadata, **fields))


EXCLUSIVE = '{"exclusive": true}'


def test_an_exclusive_run_runs_alone(empty: Store) -> None:
    made = empty
    for name, workers, metadata in (
        ("a", 1, "{}"),
        ("b", 2, EXCLUSIVE),
        ("c", 3, "{}"),
        ("d", 3, "{}"),
    ):
        add(made, name, workers, metadata)
    engine = FaultyEngine(OSError())
    scheduler = Scheduler(made, engine, EventBus(), {})

    def states_after(state: str) -> list[str]:
        engine.state = state
        scheduler.tick()
        return [run.name for run in made.runs("started")]

    assert states_after("running") == ["a"]
    assert states_after("running") == ["a"]  # the exclusive run waits, and those after it
    assert states_after("finished") == ["b"]
    assert states_after("running") == ["b"]
    assert states_after("finished") == ["c", "d"]


class QueueEngine(IdleEngine):
    """Has cores and GPUs; its runs end when the test says so."""

    capacity = 4.0  # type: ignore[assignment]

    def __init__(self, gpus: tuple[str, ...] | None = None) -> None:
        self._gpus = gpus
        self.jobs: dict[str, Job] = {}
        self.ended: set[str] = set()

    @property
    def gpus(self) -> tuple[str, ...] | None:
        return self._gpus

    def start(self, job: Job) -> str:
        self.jobs[job.name] = job
        return super().start(job)

    def poll(self, job_id: str) -> JobStatus:
        names = {f"idle-{job.run_id}": name for name, job in self.jobs.items()}
        return JobStatus("finished" if names.get(job_id) in self.ended else "running")


def running_after(
    scheduler: Scheduler, store: Store, engine: QueueEngine, *ended: str
) -> list[str]:
    """Names of the runs that run after some have ended."""
    engine.ended.update(ended)
    scheduler.tick()
    return [run.name for run in store.runs("started")]


def test_requests_do_not_wait_for_the_start_of_all_runs(
    empty: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free between two polls, and starts that take long are divided among polls."""
    engine = QueueEngine()
    scheduler = Scheduler(empty, engine, EventBus(), {})
    for number in range(3):
        add(empty, f"s{number}", 1)
    monkeypatch.setattr("mlbench_master.runs.scheduler._LONGEST_START_S", 0.0)
    assert running_after(scheduler, empty, engine) == ["s0"]
    assert scheduler._wake.is_set()
    assert running_after(scheduler, empty, engine) == ["s0", "s1"]
    monkeypatch.undo()
    assert running_after(scheduler, empty, engine) == ["s0", "s1", "s2"]


def test_smaller_runs_overtake_an_exclusive_one_only_for_an_hour(empty: Store) -> None:
    engine = QueueEngine()
    scheduler = Scheduler(empty, engine, EventBus(), {})
    add(empty, "s0", 1)
    assert running_after(scheduler, empty, engine) == ["s0"]
    alone = add(empty, "alone", 3, EXCLUSIVE)
    for number in range(1, 4):  # each new run is smaller and starts at once
        add(empty, f"s{number}", 1)
        assert running_after(scheduler, empty, engine, f"s{number - 1}") == [f"s{number}"]
    empty.update_run(alone.id, created_at=alone.created_at - HOUR_US)
    add(empty, "s4", 1)
    assert running_after(scheduler, empty, engine) == ["s3"]
    assert running_after(scheduler, empty, engine, "s3") == ["alone"]
    assert running_after(scheduler, empty, engine, "alone") == ["s4"]


def test_runs_that_have_waited_long_start_by_age(empty: Store) -> None:
    engine = QueueEngine()
    scheduler = Scheduler(empty, engine, EventBus(), {})
    for name, workers in (("half", 2), ("whole", 4), ("quarter", 1), ("new", 1)):
        run = add(empty, name, workers)
        if name in ("whole", "quarter"):
            empty.update_run(run.id, created_at=run.created_at - 2 * HOUR_US)
        if name == "half":
            assert running_after(scheduler, empty, engine) == ["half"]
    # Two cores are free, but the oldest run needs four.
    assert running_after(scheduler, empty, engine) == ["half"]
    assert running_after(scheduler, empty, engine, "half") == ["whole"]
    assert running_after(scheduler, empty, engine, "whole") == ["quarter", "new"]


def test_runs_wait_for_gpus_and_larger_runs_without_them_do_not(empty: Store) -> None:
    engine = QueueEngine(("a", "b", "c"))
    scheduler = Scheduler(empty, engine, EventBus(), {})
    for name, workers, cores, wants in (
        ("two", 2, 0.1, True), ("also", 2, 0.2, True), ("cpu", 2, 1, False), ("one", 1, 1, True),
    ):  # fmt: skip
        add(empty, name, workers, num_cpus=cores, gpu_enabled=wants)
    assert running_after(scheduler, empty, engine) == ["two", "cpu", "one"]
    assert {name: job.gpus for name, job in engine.jobs.items()} == {
        "two": ("a", "b"),
        "cpu": (),
        "one": ("c",),
    }
    # Another master takes over and knows which GPUs are lent.
    scheduler = Scheduler(empty, engine, EventBus(), {})
    assert running_after(scheduler, empty, engine, "one") == ["two", "cpu"]
    assert running_after(scheduler, empty, engine, "two") == ["also", "cpu"]
    assert engine.jobs["also"].gpus == ("a", "b")
    assert [run.metadata_dict().get("gpus") for run in empty.runs("started")] == [["a", "b"], None]


def test_a_run_that_has_waited_long_for_gpus_gets_the_next_ones(empty: Store) -> None:
    engine = QueueEngine(("a", "b"))
    scheduler = Scheduler(empty, engine, EventBus(), {})
    add(empty, "s0", 1, gpu_enabled=True)
    assert running_after(scheduler, empty, engine) == ["s0"]
    both = add(empty, "both", 2, gpu_enabled=True, num_cpus=0.1)
    add(empty, "s1", 1, gpu_enabled=True)
    assert running_after(scheduler, empty, engine) == ["s0", "s1"]
    add(empty, "s2", 1, gpu_enabled=True)
    empty.update_run(both.id, created_at=both.created_at - HOUR_US)
    assert running_after(scheduler, empty, engine, "s0") == ["s1"]
    assert running_after(scheduler, empty, engine, "s1") == ["both"]


def test_a_master_that_restarts_with_fewer_gpus_fails_a_run_that_needs_more(empty: Store) -> None:
    run = add(empty, "two", 2, gpu_enabled=True)
    empty.update_run(
        add(empty, "old", 1).id, state="started", job_id="idle-2", job_metadata={"gpus": 7}
    )
    engine = QueueEngine(("a",))
    scheduler = Scheduler(empty, engine, EventBus(), {})
    engine.jobs["old"] = Job(run_id=2, name="old", command="true", num_workers=1)
    assert running_after(scheduler, empty, engine) == ["old"]
    assert running_after(scheduler, empty, engine, "old") == []
    failed = empty.run(run.id)
    assert failed is not None and failed.state == "failed" and "two" not in engine.jobs
    assert failed.metadata_dict()["reason"].startswith(
        "num_workers: must be at most 1 with gpu_enabled, not 2: each"
    )


def test_a_waiting_run_says_what_it_waits_for(empty: Store) -> None:
    engine = QueueEngine(("a",))
    scheduler = Scheduler(empty, engine, EventBus(), {})

    def reasons_after(*ended: str) -> dict[str, str]:
        running_after(scheduler, empty, engine, *ended)
        return {
            run.name: scheduler.waits_for(run) for run in empty.runs() if run.state != "finished"
        }

    add(empty, "small", 2, gpu_enabled=False)
    add(empty, "alone", 3, EXCLUSIVE)
    add(empty, "whole", 4)
    assert reasons_after() == {
        "small": "",
        "alone": "waits for run small, because this run is exclusive",
        "whole": "waits for run alone, which comes first",
    }
    assert reasons_after("small") == {
        "alone": "",
        "whole": "waits for run alone, which is exclusive",
    }
    assert reasons_after("alone") == {"whole": ""}
    add(empty, "half", 1, num_cpus=0.5)
    assert reasons_after() == {"whole": "", "half": "waits for cores: 0.5 needed, 0 free"}
    add(empty, "gpu", 1, gpu_enabled=True, num_cpus=0.1)
    add(empty, "gpu-too", 1, gpu_enabled=True, num_cpus=0.2)
    waits = reasons_after("whole")
    assert waits == {"half": "", "gpu": "", "gpu-too": "waits for GPUs: 1 needed"}
