"""Elastic runs on this machine: workers that die are replaced, and the run goes on or says why
not."""

from __future__ import annotations

import contextlib
import html
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.run_terms import PaidSamples, WorkerRange
from mlbench_master.api.schemas import RunIn
from mlbench_master.engines.interface import Job, JobStatus
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.runs.new_runs import make_job, make_run
from tests.helpers.thorough import thorough
from tests.master.helpers import TestClient, processes_of, wait_for

REASON = EmulatedNetwork.why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")
# Imports of torch take long on a machine with other work.
PATIENCE_S = 300.0
# Its first words say what happens, by the number of the worker.
WORKER = """
import hashlib, os, signal, sys
import torch
from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.distributed.pytorch.elastic import Membership
from mlbench_core.optim.pytorch import LocalSGD

assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
kind, number = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
with Membership.from_environment() as membership:
    assert membership.worker == number
    average = ElasticAverage(membership)
    optimizer = LocalSGD(model=model, lr=0.1, period=2, aggregation=average)
    average.attach(optimizer)
    average.join()
    end = 1000 if kind == "grow" else 6
    while membership.commits < end:
        if kind == "grow" and membership.size == 2:
            # Both know the round since which they are two.
            end = min(end, membership.commits + 2)
        if kind == "lost" and membership.commits == 2:
            raise ValueError("no worker survives round 2")
        if kind == "kill" and number == 1 and membership.commits == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            inputs = torch.randn(8, 4)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            average.count(tokens=8)
            optimizer.step()
    if kind != "grow":
        membership.finish()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("end", membership.commits, average.tokens, digest.hexdigest(), flush=True)
"""
# Without torch, so that it starts quickly.
SLEEPER = """
import os, subprocess, sys, time
if sys.argv[1] == "1":
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    sys.exit(3)
time.sleep(600)
"""


def start(
    folder: Path, text: str, words: str, workers: int, wanted: WorkerRange, network: str = ""
) -> tuple[LocalEngine, str]:
    path = folder / "worker.py"
    path.write_text(text)
    engine = LocalEngine(folder / "runs", cores=4, grace_s=0.5)
    job = Job(1, "a", f"{path} {words}", workers, elastic=wanted, network=network)
    return engine, engine.start(job)


def end_of(engine: LocalEngine, job_id: str) -> JobStatus:
    def look() -> JobStatus | None:
        status = engine.poll(job_id)
        return None if status.state == "running" else status

    status: JobStatus = wait_for(look, PATIENCE_S, "the end of the run")
    return status


def lines(engine: LocalEngine, job_id: str, rank: int | None) -> list[str]:
    return [line["text"] for line in engine.logs(job_id).lines if line["rank"] == rank]


def printed(engine: LocalEngine, job_id: str, rank: int) -> list[str]:
    """Return what a worker printed, without warnings of torch."""
    found = engine.logs(job_id).lines
    return [line["text"] for line in found if (line["rank"], line["stream"]) == (rank, "stdout")]


def deaths(engine: LocalEngine, job_id: str) -> int:
    return sum("died" in line for line in lines(engine, job_id, None))


def test_a_killed_worker_is_replaced_and_the_weights_are_equal_at_the_end(tmp_path: Path) -> None:
    """With fewer than MIN workers, the run waits for the replacement."""
    engine, job_id = start(tmp_path, WORKER, "kill {rank}", 2, WorkerRange(2, 2))
    status = end_of(engine, job_id)
    own = lines(engine, job_id, None)
    assert status.state == "finished", (status, own)
    assert status.changes == (
        "worker 1 died: signal 9 (SIGKILL)",
        "worker 2 joined after round 3",
    )
    assert [text for text in own if text.startswith("worker")] == [
        "worker 1 died: signal 9 (SIGKILL)",
        "worker 2 starts",
        "worker 2 joined after round 3",
    ]
    # In its first round, a joiner has weight 0.
    tokens = 2 * 8 * (3 * 2 + 1 + 2 * 2)
    (first,) = lines(engine, job_id, 0)
    assert re.fullmatch(rf"end 6 {tokens} [0-9a-f]{{64}}", first)
    assert lines(engine, job_id, 1) == []
    assert lines(engine, job_id, 2) == [first]
    assert processes_of(tmp_path) == []


@thorough
def test_workers_join_until_the_largest_number_lives(tmp_path: Path) -> None:
    """The script does not call ``finish``; the run ends with the first worker that ends well."""
    engine, job_id = start(tmp_path, WORKER, "grow {rank}", 1, WorkerRange(1, 2))
    status = end_of(engine, job_id)
    assert status.state == "finished", (status, engine.logs(job_id))
    (change,) = status.changes
    assert re.fullmatch(r"worker 1 joined after round \d+", change)
    (first,) = lines(engine, job_id, 0)
    assert lines(engine, job_id, 1) == [first]
    # A round with weight 0, and two more.
    assert int(first.split()[1]) == int(change.split()[-1]) + 3


def test_a_run_without_a_worker_that_has_the_weights_fails(tmp_path: Path) -> None:
    engine, job_id = start(tmp_path, WORKER, "lost {rank}", 2, WorkerRange(1, 2))
    status = end_of(engine, job_id)
    assert (status.state, status.returncode) == ("failed", 1)
    assert re.fullmatch(
        r"the shared weights are lost, because no worker that had them is left: "
        r"worker [01] failed: exit status 1: ValueError: no worker survives round 2",
        status.reason,
    )
    # No other worker begins from the first weights.
    texts = [line["text"] for line in engine.logs(job_id).lines]
    assert not any(text.startswith("end") for text in texts)
    assert processes_of(tmp_path) == []


def test_a_stop_ends_the_replacement_and_a_death_ends_what_the_worker_left(tmp_path: Path) -> None:
    engine, job_id = start(tmp_path, SLEEPER, "{rank}", 2, WorkerRange(1, 2))

    wait_for(lambda: "worker 2 starts" in lines(engine, job_id, None), 60, "the replacement")
    # A busy machine may read the worker's own line after its end.
    (said,) = wait_for(lambda: lines(engine, job_id, 1), 60, "the line of worker 1")
    left = int(said.removeprefix("child "))

    def has_ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        return True

    # It would sleep for longer.
    wait_for(has_ended, 60, "the end of the child")
    # Two workers and the supervisor.
    wait_for(lambda: len(processes_of(tmp_path)) == 3, 60, "three processes")
    engine.stop(job_id)
    assert processes_of(tmp_path) == []
    assert (engine.poll(job_id).state, engine.poll(job_id).reason) == ("failed", "stopped")
    assert engine.poll(job_id).changes == ("worker 1 failed: exit status 3",)


@needs_namespaces
def test_a_worker_on_a_lost_host_is_replaced_when_the_host_is_up(tmp_path: Path) -> None:
    # Without torch for a while, so that the host is lost before the end of the run.
    text = WORKER.replace("import torch\n", "import time; time.sleep(2)\nimport torch\n", 1)
    network = "unlimited,1ms; host1: kill@1s-10s"
    engine, job_id = start(tmp_path, text, "plain {rank}", 2, WorkerRange(2, 2), network)
    status = end_of(engine, job_id)
    own = lines(engine, job_id, None)
    assert status.state == "finished", (status, engine.logs(job_id))
    events = [line for line in own if line.startswith("network")]
    assert events == ["network: host 1 is lost", "network: host 1 is up"]
    assert own.index("network: host 1 is up") < own.index("worker 2 starts")
    assert status.changes == (
        "worker 1 died: signal 9 (SIGKILL), because its host was lost",
        "worker 2 joined after round 0",
    )
    (first,) = printed(engine, job_id, 0)
    assert printed(engine, job_id, 2) == [first]
    assert status.samples == PaidSamples(useful=2 * 2 * 8 * 6, paid=2 * 2 * 8 * 6)
    assert processes_of(tmp_path) == []


@needs_namespaces
def test_hosts_that_are_often_lost_do_not_fail_the_run(tmp_path: Path) -> None:
    network = "unlimited; kills: 1.5s-mtbf, 0.5s-repair"
    text = "import time; time.sleep(600)"
    engine, job_id = start(tmp_path, text, "", 2, WorkerRange(1, 2), network)
    # Three deaths in a row would end a run without a network, and no worker may live for a while.
    wait_for(lambda: deaths(engine, job_id) >= 5, PATIENCE_S, "five deaths")
    assert engine.poll(job_id).state == "running"
    engine.stop(job_id)
    assert processes_of(tmp_path) == []


@needs_namespaces
@pytest.mark.parametrize(
    ("network", "least", "left"),
    [
        ("unlimited; host1: kill@1s", 2, 1),
        # Random events have no end, and no host comes back by them.
        ("unlimited; host0: kill@1s; host1: cut@1s; pauses: 600s-mtbf, 2s-repair", 1, 0),
    ],
)
def test_a_run_ends_when_too_few_hosts_are_left(
    network: str, least: int, left: int, tmp_path: Path
) -> None:
    text = "import time; time.sleep(600)"
    engine, job_id = start(tmp_path, text, "", 2, WorkerRange(least, 2), network)
    status = end_of(engine, job_id)
    reason = f"too few hosts are left: {left} of 2, and the least number of workers is {least}"
    assert status.reason.startswith(reason)
    assert status.samples is None
    assert processes_of(tmp_path) == []


@needs_namespaces
def test_a_run_ends_although_a_host_stays_stopped(tmp_path: Path) -> None:
    """Its worker cannot notice the end of the run, but gets time to clean up."""
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('cleaned up', flush=True), sys.exit()))\n"
        "print('begins', flush=True)\n"
        "time.sleep(10 if sys.argv[1] == '0' else 600)\n"
    )
    network = "unlimited; host1: pause@5s"
    engine, job_id = start(tmp_path, text, "{rank}", 2, WorkerRange(1, 2), network)
    status = end_of(engine, job_id)
    assert (status.state, status.changes) == ("finished", ())
    # On a busy machine, it may be stopped before its first line.
    assert lines(engine, job_id, 1) in (["begins", "cleaned up"], [])
    assert processes_of(tmp_path) == []


@needs_namespaces
def test_a_worker_starts_when_its_host_joins(tmp_path: Path) -> None:
    network = "unlimited; host1: join@12s"
    text = "import time; time.sleep(600)"
    engine, job_id = start(tmp_path, text, "", 1, WorkerRange(1, 2), network)
    wait_for(lambda: "worker 1 starts" in lines(engine, job_id, None), PATIENCE_S, "its start")
    own = lines(engine, job_id, None)
    assert own.index("network: host 1 is up") < own.index("worker 1 starts")
    engine.stop(job_id)
    assert processes_of(tmp_path) == []


@needs_namespaces
def test_the_record_and_the_page_of_a_run_have_its_goodput(
    client: TestClient, tmp_path: Path
) -> None:
    """A worker alone, on an emulated host."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = f"python {tmp_path}/worker.py alone 0"
    fields = {"num_workers": 1, "elastic": "1:1", "network": "unlimited"}
    made = request(client, command=command, **fields)
    assert made.status_code == 201, made.text
    url = f"/api/runs/{made.json()['id']}/"
    wait_for(
        lambda: client.get(url).json()["state"] in ("finished", "failed"), PATIENCE_S, "the end"
    )
    details = client.get(url).json()["job_metadata"]
    assert details["samples"] == {"useful": 6 * 2 * 8, "paid": 6 * 2 * 8}, details
    assert "100 % (96 of 96 samples)" in client.get(f"/runs/{made.json()['id']}/").text


def request(client: TestClient, **fields: Any) -> Any:
    body = {"name": "a-run", "num_workers": 3, "command": "true", "elastic": "2:4", **fields}
    return client.post("/api/runs/", json=body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elastic": "4:2"}, "elastic: must be MIN:MAX, two numbers of workers"),
        ({"elastic": "0:2"}, "elastic: must be MIN:MAX"),
        ({"elastic": "2"}, "elastic: must be MIN:MAX"),
        ({"num_workers": 5}, "elastic: must be a range with the number of workers, 5, not 2:4"),
        ({"num_workers": 1}, "elastic: must be a range with the number of workers, 1, not 2:4"),
        ({"command": None, "task": "1a"}, "elastic: must be left out, not '2:4': the workers of a"),
        ({"backend": "mpi"}, "backend: must be left out for an elastic run, not 'mpi'"),
        ({"network": "2x1:1gbit/1gbit"}, "network: hosts must be 2 (2 racks of 1), not 4"),
        (
            {"network": "1gbit; host0: join@9s; host2: join@9s"},
            "network: must have a host for each of the first 3 workers from the start, not '1gbit",
        ),
        (
            {"command": "python -m mlbench_core.observe a.py"},
            "elastic: must be left out, not '2:4': the steps of workers that may die",
        ),
        ({"elastic": "2:4000"}, "elastic: its largest number must be at most"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    client: TestClient, fields: dict[str, Any], message: str
) -> None:
    answer = request(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(message), answer.json()["message"]


def test_a_run_books_the_cores_of_its_largest_number_of_workers(tmp_path: Path) -> None:
    wanted = RunIn(name="a", num_workers=3, command="true", elastic=" 2:4 ", oversubscribe=True)
    engine = LocalEngine(tmp_path / "runs", cores=8)
    run = make_run(wanted, engine)
    run.id = 1
    assert (run.worker_count, run.most_workers) == (3, 4)
    assert make_job(run, engine, {}).elastic == WorkerRange(2, 4)
    plain = make_run(wanted.model_copy(update={"elastic": ""}), engine)
    assert (plain.elastic, plain.most_workers) == (None, 3)


def test_another_engine_refuses_an_elastic_run(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "replaces_workers", False)
    message = request(client).json()["message"]
    assert message.endswith("cannot replace a worker that dies; choose the engine local")


def test_a_script_that_always_fails_ends_the_run_and_the_record_has_the_deaths(
    client: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('bad data')")
    made = request(client, command=f"python {tmp_path}/fails.py", oversubscribe=True)
    assert made.status_code == 201, made.text

    def ended() -> Any:
        run = client.get(f"/api/runs/{made.json()['id']}/").json()
        return run if run["state"] == "failed" else None

    details = wait_for(ended, PATIENCE_S, "the end of the run")["job_metadata"]
    assert re.fullmatch(
        r"3 workers in a row died before their first round: "
        r"worker \d failed: exit status 1: ValueError: bad data",
        details["reason"],
    )
    assert details["elastic"] == "2:4"
    assert len(details["changes"]) == 3
    assert details["changes"][-1] in details["reason"]
    page = client.get(f"/runs/{made.json()['id']}/").text
    assert html.escape("; ".join(details["changes"])) in page
    assert processes_of(tmp_path) == []
