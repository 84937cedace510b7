"""The load of workers: measured, kept, thinned."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_master.database.store import NewMetric, Run, Store, new_run, pod_owner
from mlbench_master.dates import format_date
from mlbench_master.engines import Job, LogPage
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.engines.supervisor import load_sampler as measuring
from mlbench_master.engines.supervisor.load_sampler import GpuMeter, LoadSampler
from mlbench_master.events import EventBus
from mlbench_master.runs import load_samples as keeping
from mlbench_master.runs.load_samples import LoadKeeper
from tests.master.helpers import IdleEngine, TestClient, wait_for

HOUR_US = 3_600_000_000
STEP_US = 5_000_000
BUSY = "import sys, time\nprint('x', flush=True)\nwhile time.process_time() < 60: pass\n"
IDLE = "import sys, time\nfat = b'x' * 50_000_000\nprint('x', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def started() -> Iterator[Any]:
    """Start a process that prints a line when it is ready."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, env={**os.environ, **env}, start_new_session=True
        )
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        for child in measuring.psutil.Process(process.pid).children(recursive=True):
            # It may have ended because of the one before.
            with contextlib.suppress(measuring.psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.communicate()


def test_cpu_and_memory_are_those_of_the_whole_tree(started: Any) -> None:
    shell = started("sh", "-c", f'"{sys.executable}" -c "{BUSY}" & wait')
    sampler = LoadSampler(2, {shell.pid: 0, started(sys.executable, "-c", IDLE).pid: 1})
    sampler.sample()

    def load() -> Any:
        time.sleep(0.2)
        busy, idle = sampler.sample().values()
        # Other programs may take most of the machine.
        return busy["cpu"] > 3 > idle["cpu"] and (busy, idle)

    busy, idle = wait_for(load)
    assert busy["memory"] < 50_000_000 < idle["memory"]
    if sys.platform.startswith("linux"):
        assert busy["network"] == "machine" and busy["network_in"] >= 0


def test_a_child_that_has_ended_counts_once(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is seen alive, the second one starts and ends between two samples."""
    child = BUSY.replace("60", "0.3")
    parent = (
        "import subprocess, sys, time\nprint('x', flush=True)\nchild = [sys.executable, '-c', "
        f"{child!r}]\nfor _ in range(2): subprocess.run(child, "
        "stdout=subprocess.DEVNULL)\ntime.sleep(60)\n"
    )
    root = measuring.psutil.Process(started(sys.executable, "-c", parent).pid)
    # One second between two samples, so that their sum is the time of the CPU, however busy the
    # machine is.
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=iter(range(10_000)).__next__))
    sampler = LoadSampler(1, {root.pid: 0})
    seconds = []
    while root.cpu_times().children_user == 0:
        time.sleep(0.05)
        seconds.append(sampler.sample()[0]["cpu"] / 100)
    # Each child counts its own time in its last loop, of which the system may count a part as its
    # own.
    wait_for(lambda: not root.children() and sum(root.cpu_times()[2:4]) > 0.5)
    seconds.append(sampler.sample()[0]["cpu"] / 100)
    assert sum(seconds) == pytest.approx(sum(root.cpu_times()[:4]), abs=0.05)


class FakeProcess:
    """A process that has taken some seconds of the CPU, or None if it is gone."""

    pid = 0

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def oneshot(self) -> Any:
        return contextlib.nullcontext()

    def cpu_times(self) -> tuple[float, float, float, float]:
        if self._seconds is None:
            raise measuring.psutil.NoSuchProcess(0)
        return self._seconds, 0.0, 0.0, 0.0

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=1)


def test_a_child_that_ends_while_a_sample_is_taken_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent is read before it has waited for the child, and the child afterwards."""
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=iter(range(10_000)).__next__))
    sampler = LoadSampler(1, {0: 0})
    seconds = []
    for times in ((1.0, 5.0), (1.0, None), (6.5,)):
        family = [(FakeProcess(each), 0) for each in times]
        monkeypatch.setattr(sampler, "_workers", lambda family=family: iter(family))
        seconds.append(sampler.sample()[0]["cpu"] / 100)
    assert seconds == [6.0, 0.0, 0.5]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"])
def test_the_workers_of_a_launcher_tell_their_ranks(started: Any, variable: str) -> None:
    workers = " & ".join(f'{variable}={rank} "{sys.executable}" -c "{IDLE}"' for rank in (0, 1, 2))
    sampler = LoadSampler(2, {started("sh", "-c", f"{workers} & wait").pid: None})
    # Rank 2 does not exist.
    found = wait_for(lambda: len(load := sampler.sample()) == 2 and load)
    wait_for(lambda: all(load["memory"] > 50_000_000 for load in sampler.sample().values()))
    assert set(found) == {0, 1}


def test_an_orphan_stays_with_its_rank(started: Any) -> None:
    """A process of a killed parent belongs to the supervisor, which adopts it."""
    script = (
        "import ctypes, os, subprocess, sys, time\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "from mlbench_master.engines.supervisor.load_sampler import LoadSampler\n"
        "shell = subprocess.Popen(['sh', '-c', 'sleep 60 & sleep 0.2'], env={**os.environ, "
        "'RANK': '1'})\n"
        "shell.wait()\n"
        "print(list(LoadSampler(2, {1: 0, 2: 1}).sample()))\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux lets a process adopt orphans")
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "[1]\n"
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def test_a_worker_in_its_own_network_has_its_own_figures(started: Any) -> None:
    """Its loopback interface is not the network."""
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-n", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("only root can make a network namespace")
    worker = started(unshare, "-n", sys.executable, "-c", IDLE)
    sampler = LoadSampler(1, {worker.pid: 0})
    sampler.sample()
    load = sampler.sample()[0]
    assert "network" not in load and (load["network_in"], load["network_out"]) == (0, 0)
    counters = measuring._namespace_bytes(os.getpid())
    assert counters != measuring._machine_bytes() or counters == (0, 0)


class FakeNvml:
    """Two GPUs, of which the second one is divided and has no utilization."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0 if index.value < 2 else 6

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = 2
        return 0 if uuid == b"MIG-b" else 6

    def nvmlDeviceGetUtilizationRates(self, device: Any, busy: Any) -> int:
        busy._obj.gpu = 73
        return 0 if device.value == 1 else 3

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.used = 1000 * device.value
        return 0


def test_gpus_have_a_load_if_their_driver_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    wanted = {0: {"gpu": 73, "gpu_memory": 1000}, 1: {"gpu_memory": 2000}}
    assert GpuMeter(["0", "MIG-b", "GPU-gone", "7"]).read() == wanted


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert GpuMeter(["0"]).read() == {}


# From the supervisor to the API


def test_a_run_has_the_load_of_its_workers(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_LOAD_INTERVAL_S", "0.1")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n"
        "    os.environ['RANK'] == '0' or time.sleep(0.05)\n"
    )
    run = client.post(
        "/api/runs/",
        json={"name": "loaded", "num_workers": 2, "num_cpus": 1, "command": str(script)},
    )
    run_id = run.json()["id"]

    def metrics(rank: int) -> dict[str, Any]:
        response = client.get(f"/api/metrics/loaded-worker-{rank}/")
        return dict(response.json())

    def cpu(rank: int) -> float:
        return max((float(entry["value"]) for entry in metrics(rank).get("cpu", ())), default=0)

    # Other programs may take most of the machine.
    wait_for(lambda: cpu(0) > 3 and metrics(1), timeout_s=60)
    assert min(float(entry["value"]) for entry in metrics(1)["memory"]) > 2**20
    shown = client.get("/api/metrics/").json()["pod_metrics"]["loaded-worker-1"]
    assert set(shown) == {
        "cpu",
        "memory",
        "network_in",
        "network_out",
    }  # this machine lends no GPU to the run
    assert shown["cpu"][0]["metadata"] == ""
    assert json.loads(shown["network_in"][0]["metadata"]) == {"network": "machine"}
    assert client.delete(f"/api/runs/{run_id}/").status_code == 204
    assert client.get("/api/metrics/loaded-worker-0/").status_code == 404


def test_the_last_samples_are_kept_and_zero_means_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(tmp_path / "runs", grace_s=0.1)
    store = Store("sqlite://")
    for interval, name in (("0.1", "some"), ("0", "none")):
        monkeypatch.setenv("MLBENCH_LOAD_INTERVAL_S", interval)
        run = added_run(store, name, 1)
        may_end = tmp_path / name
        command = f"sh -c 'while [ ! -e {may_end} ]; do sleep 0.05; done'"
        job_id = run.job_id = engine.start(Job(run.id, name, command, 1))
        if name == "some":
            wait_for(lambda job_id=job_id: engine.load(job_id).lines, what="a sample")
        else:
            time.sleep(0.4)
        may_end.touch()
        wait_for(lambda job_id=job_id: engine.poll(job_id).state != "running", what="the end")
        LoadKeeper(store, engine, EventBus()).finish(run)
        assert bool(store.latest(pod_owner(f"{name}-worker-0"))) is (name == "some")


@pytest.mark.parametrize("value", ["soon", "-1", "0.01", "nan", "inf", "1e300"])
def test_the_interval_is_a_number_of_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MLBENCH_LOAD_INTERVAL_S", value)
    with pytest.raises(
        ConfigurationError, match=f"MLBENCH_LOAD_INTERVAL_S must be 0 or at least .*, not '{value}'"
    ):
        LocalEngine(tmp_path).start(Job(1, "a-run", "true", 1))


# How long it is kept


class Recorded(IdleEngine):
    """An engine with recorded lines."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def load(self, job_id: str, since_line: int = 0, limit: int = 1000) -> LogPage:
        lines = self.lines[since_line : since_line + limit]
        return LogPage(lines, since_line + len(lines))

    def add(self, date: int, text: str | None = None, rank: int | None = 0, **load: Any) -> None:
        text = json.dumps(load) if text is None else text
        self.lines.append({"rank": rank, "stream": "load", "text": text, "date": format_date(date)})


def added_run(store: Store, name: str = "a-run", workers: int = 2) -> Run:
    columns: dict[str, Any] = {
        "num_cpus": 1.0,
        "max_bandwidth": 1.0,
        "image": "",
        "backend": "gloo",
        "command": "",
    }
    run = store.add_run(new_run(name=name, num_workers=workers, **columns))
    run.job_id = f"idle-{run.id}"
    return run


def values(store: Store, name: str = "cpu", rank: int = 0) -> list[tuple[int, float]]:
    return [
        (point.date, float(point.value))
        for point in store.points(pod_owner(f"a-run-worker-{rank}"), name)
    ]


def test_old_samples_become_means_and_a_restart_repeats_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, engine = Store("sqlite://"), Recorded()
    run = added_run(store)
    begin = run.started_at = 1_800_000_000_000_000
    mine = NewMetric(pod_owner("a-run-worker-0"), "cpu", begin + 1, "1000", client_id="my own")
    store.add_metrics([mine])
    keeper = LoadKeeper(store, engine, EventBus())
    count = 3 * 720  # samples of three hours
    for index in range(count):
        now = begin + index * STEP_US
        engine.add(now, cpu=index, memory=2 * index)
        if index % 100 == 0:
            monkeypatch.setattr(keeping, "now_us", lambda now=now: now)
            keeper.keep(run)
        if index == 1500:
            keeper = LoadKeeper(
                store, engine, EventBus()
            )  # another master, which reads all lines again
    monkeypatch.setattr(keeping, "now_us", lambda: now)
    keeper.finish(run)
    stored = [entry for entry in values(store) if entry != (begin + 1, 1000.0)]
    assert (
        len(values(store)) == len(stored) + 1
    )  # a worker's own metric of this name is not touched
    recent = [(begin + index * STEP_US, float(index)) for index in range(count - 720, count)]
    assert stored[-720:] == recent
    # Two hours in means of five minutes each, at the middle of their samples.
    old = stored[:-720]
    assert 24 <= len(old) <= 24 + 60
    means = [(begin + (60 * k * STEP_US) + int(29.5 * STEP_US), 60 * k + 29.5) for k in range(23)]
    assert old[:23] == means
    assert len(values(store, "memory")) == len(stored)
    store.delete_run(run.id)
    keeper.keep(run)  # a poll that began before the end
    assert store.pods_with_metrics() == []


def test_lines_that_the_supervisor_did_not_write_add_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, engine = Store("sqlite://"), Recorded()
    run = added_run(store)
    now = 1_800_000_000_000_000
    monkeypatch.setattr(keeping, "now_us", lambda: now)
    for text in (
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"cpu": NaN}',
        '{"cpu": -1}',
        '{"cpu": "9"}',
        '{"cpu": 1e400}',
    ):
        engine.add(now - 1, text)
    engine.add(now - 1, rank=2, cpu=1)
    engine.add(now - 1, rank=-1, cpu=1)
    engine.add(now - 1, rank=None, cpu=1)
    engine.add(now + HOUR_US, cpu=1)
    engine.add(now - 1, goal=1)
    engine.lines.append({"rank": 0, "stream": "load", "text": '{"cpu": 1}', "date": "soon"})
    engine.add(now - 1, rank=1, cpu=7)
    LoadKeeper(store, engine, EventBus()).keep(run)
    assert store.pods_with_metrics() == ["a-run-worker-1"]
    assert values(store, rank=1) == [(now - 1, 7.0)]


def test_a_database_that_is_away_only_delays_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    store, engine = Store("sqlite://"), Recorded()
    run = added_run(store)
    engine.add(1_800_000_000_000_000, cpu=5)
    monkeypatch.setattr(keeping, "now_us", lambda: 1_800_000_000_000_001)
    keeper = LoadKeeper(store, engine, EventBus())

    def fail(metrics: Any) -> int:
        raise keeping.SQLAlchemyError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "add_metrics", fail)
        keeper.keep(run)
    keeper.keep(run)
    assert [value for _, value in values(store)] == [5.0]


def test_subscribers_get_the_samples_as_events(monkeypatch: pytest.MonkeyPatch) -> None:
    store, engine, published = Store("sqlite://"), Recorded(), []
    bus: Any = SimpleNamespace(
        has_subscribers=True, publish=lambda kind, *items: published.append((kind, *items))
    )
    run = added_run(store)
    run.started_at = 1_700_000_000_000_000
    engine.add(run.started_at, rank=1, memory=2)
    # A run of the last hour has nothing to thin, which would take time for each of its workers.
    monkeypatch.setattr(store, "thin_metrics", None)
    LoadKeeper(store, engine, bus).keep(run)
    [(kind, event)] = published
    assert kind == "metric"
    assert (
        event.items()
        >= {"pod_name": "a-run-worker-1", "run_id": None, "name": "memory", "value": "2"}.items()
    )
