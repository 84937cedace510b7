"""The engine for Kubernetes, with a mock of its API server; nothing here has met a real
cluster."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="needs the [kubernetes] extra")

import mlbench_core
from mlbench_core.errors import ConfigurationError
from mlbench_master import create_app
from mlbench_master.api.schemas import RunIn
from mlbench_master.engines import EngineError, Job, JobStatus
from mlbench_master.engines.kubernetes import api as kubernetes_api
from mlbench_master.engines.kubernetes import engine as kubernetes
from mlbench_master.engines.kubernetes import job_states as kubernetes_queue
from mlbench_master.engines.kubernetes.engine import KubernetesEngine
from mlbench_master.runs.commands import check_options
from tests.master.engines.fake_kubernetes import NAMESPACE, FakeKubernetes, at, cut, error, kmock
from tests.master.helpers import TestClient, wait_for

TOKEN = "token-of-the-test"
JOB = Job(
    run_id=1,
    name="demo",
    command="/workspace/main.py --run_id {run_id} --rank {rank} --hosts {hosts} --price $5",
    num_workers=2,
    image="mlbench/task1a:1",
    env={
        "MLBENCH_MASTER_URL": "http://10.0.0.1:5080",
        "MLBENCH_TOKEN": TOKEN,
        "MLBENCH_RUN_ID": "1",
    },
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(kubernetes_queue, "_SHORTEST_PAUSE_S", 0.05)
    monkeypatch.setattr(kubernetes_queue, "_LOAD_INTERVAL_S", 0.05)
    monkeypatch.setattr(kubernetes_api, "_PAUSE_S", 0.02)
    with FakeKubernetes() as made:
        monkeypatch.setenv("KUBECONFIG", str(made.write_config(tmp_path / "kubeconfig")))
        yield made


@pytest.fixture
def engine(cluster: FakeKubernetes, tmp_path: Path) -> Iterator[KubernetesEngine]:
    with contextlib.closing(KubernetesEngine(tmp_path / "runs", interval_s=0.1)) as made:
        yield made


def wait_status(
    engine: KubernetesEngine, wanted: Callable[[JobStatus], bool], run_id: int = 1
) -> JobStatus:
    statuses: list[JobStatus] = []

    def poll() -> bool:
        statuses.append(engine.poll(f"kubernetes-{run_id}"))
        return wanted(statuses[-1])

    try:
        wait_for(poll, 60)
    except AssertionError:
        pytest.fail(f"the last status was {statuses[-1]}")
    return statuses[-1]


def wait_state(engine: KubernetesEngine, state: str, run_id: int = 1) -> JobStatus:
    return wait_status(engine, lambda status: status.state == state, run_id)


def texts(engine: KubernetesEngine, rank: int | None, run_id: int = 1) -> list[str]:
    return [
        line["text"] for line in engine.logs(f"kubernetes-{run_id}").lines if line["rank"] == rank
    ]


def test_a_run_from_the_start_to_the_end(engine: KubernetesEngine, cluster: FakeKubernetes) -> None:
    assert engine.start(JOB) == "kubernetes-1"
    name = cluster.job()["metadata"]["name"]
    # The variables exist before a pod does.
    assert [request for request in cluster.requests if request[0] != "GET"] == [
        ("POST", "jobs"),
        ("POST", "secrets"),
        ("POST", "services"),
        ("PATCH", "jobs"),
    ]
    assert wait_state(engine, "waiting").reason.startswith("worker 0 is about to start")
    cluster.run_all()
    cluster.say(0, "epoch 1\n", "10 %\r20 %\n")
    assert wait_state(engine, "running").reason == ""
    wait_for(lambda: texts(engine, 0) == ["epoch 1", "20 %"])
    cluster.say(1, "bye")
    for rank in (0, 1):
        cluster.state(rank, terminated={"exitCode": 0})
    cluster.end()
    status = wait_state(engine, "finished")
    assert status.returncode == 0 and status.finished_at is not None
    assert texts(engine, 1) == ["bye"]  # the last line without a line break, too
    assert f"created Job {name} in namespace {NAMESPACE}" in texts(engine, None)
    assert texts(engine, None)[-1] == "finished"
    # Kubernetes deletes the Job soon, and no list has it any more.
    wait_for(lambda: cluster.job()["spec"]["ttlSecondsAfterFinished"] == 600)
    assert engine.start(JOB) == "kubernetes-1"  # a new database reuses ids
    assert engine.poll("kubernetes-1").state in ("running", "waiting")


def test_the_master_starts_a_task_in_its_image(
    engine: KubernetesEngine,
    cluster: FakeKubernetes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLBENCH_IMAGE_REGISTRY", "registry.example.com/lab")
    app = create_app(data_dir=tmp_path / "data", engine=engine, token=TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {
        "name": "demo",
        "num_workers": 2,
        "num_cpus": 1,
        "task": "1a",
        "arguments": ["--dataset", "digits"],
    }
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=headers) as client:
        refused = client.post("/api/runs/", json={**body, "engine_options": ["--memory", "much"]})
        assert refused.status_code == 400 and "argument --memory: must be a size" in refused.text
        assert (
            client.post(
                "/api/runs/", json={**body, "engine_options": ["--memory", "4Gi"]}
            ).status_code
            == 201
        )
        wait_for(lambda: cluster.objects["pods"])
        (container,) = cluster.job()["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"registry.example.com/lab/task1a:{mlbench_core.__version__}"
        assert container["command"][:2] == ["python", "/workspace/main.py"]
        assert container["resources"]["limits"]["memory"] == "4Gi"
        wait_for(
            lambda: (
                "about to start"
                in client.get("/api/runs/1/").json()["job_metadata"].get("reason", "")
            )
        )
        assert client.post("/api/runs/1/stop/").json()["state"] == "failed"
        assert not any(cluster.objects.values())


def test_the_token_is_only_in_the_secret(
    engine: KubernetesEngine, cluster: FakeKubernetes, tmp_path: Path
) -> None:
    engine.start(JOB)
    assert TOKEN not in json.dumps([cluster.objects["jobs"], cluster.objects["services"]])
    (secret,) = cluster.objects["secrets"].values()
    assert secret["stringData"]["MLBENCH_TOKEN"] == TOKEN
    assert secret["metadata"]["ownerReferences"][0]["uid"] == cluster.job()["metadata"]["uid"]
    for path in tmp_path.rglob("runs/**/*"):
        assert not path.is_file() or TOKEN not in path.read_text()


def disrupt(reason: str) -> Callable[[FakeKubernetes], None]:
    def step(cluster: FakeKubernetes) -> None:
        cluster.condition(
            1, type="DisruptionTarget", status="True", reason=reason, lastTransitionTime=at(1)
        )
        cluster.state(0, terminated={"exitCode": 1, "finishedAt": at(2)})

    return step


def exits(*ends: dict[str, Any]) -> Callable[[FakeKubernetes], None]:
    def step(cluster: FakeKubernetes) -> None:
        for rank, end in enumerate(ends):
            cluster.state(rank, terminated=end)

    return step


def evict(cluster: FakeKubernetes) -> None:
    cluster.state(1, terminated={"exitCode": 137, "finishedAt": at(1)})
    cluster.pod(1)["status"].update(
        reason="Evicted", message="The node was low on resource: memory."
    )


def delete_pod(cluster: FakeKubernetes) -> None:
    cluster.pod(1)["metadata"].update(deletionTimestamp=at(11), deletionGracePeriodSeconds=10)
    cluster.state(0, terminated={"exitCode": 1, "finishedAt": at(3)})


def lose_node(cluster: FakeKubernetes) -> None:
    cluster.pod(1)["status"].update(
        reason="NodeLost", message="Node n1 which was running pod is unresponsive"
    )
    cluster.pod(1)["metadata"].update(deletionTimestamp=at(1))


def lose_contact(cluster: FakeKubernetes, rank: int) -> None:
    """What the node controller does when a node does not answer: the kubelet's states stay as they
    were."""
    cluster.condition(rank, type="Ready", status="False")
    cluster.condition(rank, type="ContainersReady", status="True")


def refuse_pod(cluster: FakeKubernetes) -> None:
    cluster.pod(1)["status"] = {
        "phase": "Failed",
        "reason": "OutOfcpu",
        "message": "Pod was rejected",
    }


KILLED = {"exitCode": 143, "finishedAt": at(1)}


@pytest.mark.parametrize(
    ("step", "reason", "returncode"),
    [
        pytest.param(
            exits({"exitCode": 143, "finishedAt": at(5)}, {"exitCode": 1, "finishedAt": at(5)}),
            "worker 1 failed: exit status 1: ValueError: bad shape",
            1,
            id="exit",
        ),
        pytest.param(
            exits({"exitCode": 1, "finishedAt": at(3)}, {"exitCode": 3, "finishedAt": at(2)}),
            "worker 1 failed: exit status 3",
            3,
            id="the-first-one",
        ),
        pytest.param(
            exits({"exitCode": 0, "finishedAt": at(3)}, {"exitCode": 139, "finishedAt": at(2)}),
            "worker 1 died: signal 11 (SIGSEGV)",
            -11,
            id="signal",
        ),
        pytest.param(
            exits(KILLED, {"exitCode": 137, "reason": "OOMKilled", "finishedAt": at(1)}),
            (
                "worker 1 used more memory than it had (OOMKilled): give a "
                "larger --memory in the engine options"
            ),
            -9,
            id="memory",
        ),
        pytest.param(
            exits(
                KILLED,
                {
                    "exitCode": 128,
                    "reason": "StartError",
                    "message": "no such file",
                    "finishedAt": at(1),
                },
            ),
            "worker 1 cannot start (StartError): no such file",
            128,
            id="start",
        ),
        pytest.param(
            evict,
            "worker 1 was evicted from node n1: The node was low on resource: memory.",
            -9,
            id="evicted",
        ),
        pytest.param(
            disrupt("PreemptionByScheduler"),
            "worker 1 was preempted by a pod of higher priority",
            None,
            id="preempted",
        ),
        pytest.param(
            disrupt("DeletionByTaintManager"),
            "worker 1 was ended, because its node n1 failed or was tainted",
            None,
            id="tainted",
        ),
        pytest.param(
            disrupt("EvictionByEvictionAPI"),
            "worker 1 was evicted, as when node n1 is drained",
            None,
            id="drained",
        ),
        pytest.param(
            lose_node,
            "worker 1 was lost with its node n1: Node n1 which was running pod is unresponsive",
            None,
            id="node-lost",
        ),
        pytest.param(
            delete_pod,
            "the pod of worker 1 was deleted, but not by MLBench",
            None,
            id="pod-deleted",
        ),
        pytest.param(
            refuse_pod,
            "worker 1 failed on node n1 (OutOfcpu): Pod was rejected",
            None,
            id="refused",
        ),
    ],
)
def test_a_failed_run_says_who_failed_first_and_how(
    engine: KubernetesEngine,
    cluster: FakeKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[FakeKubernetes], None],
    reason: str,
    returncode: int | None,
) -> None:
    monkeypatch.setattr(kubernetes, "_LOGS_S", 0.3)  # for pods that do not end
    engine.start(JOB)
    cluster.run_all()
    cluster.say(
        1,
        "Traceback (most recent call last):\n",
        '  File "a.py", line 1\n',
        "ValueError: bad shape\n",
    )
    with cluster.lock:
        step(cluster)
        cluster.end(
            "Failed",
            reason="BackoffLimitExceeded",
            message="Job has reached the specified backoff limit",
        )
    status = wait_state(engine, "failed")
    assert (status.reason, status.returncode) == (reason, returncode)


def test_the_end_of_a_pod_that_is_gone_is_remembered(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    engine.start(JOB)
    cluster.run_all()
    wait_state(engine, "running")
    cluster.condition(
        1,
        type="DisruptionTarget",
        status="True",
        reason="EvictionByEvictionAPI",
        lastTransitionTime=at(1),
    )
    wait_for(lambda: engine._queue.views()[1].troubles)
    with cluster.lock:
        del cluster.objects["pods"][cluster.pod(1)["metadata"]["name"]]
        cluster.state(0, terminated={"exitCode": 1})
        cluster.end("Failed", reason="BackoffLimitExceeded")
    assert wait_state(engine, "failed").reason == "worker 1 was evicted, as when node n1 is drained"


def test_a_job_that_waits_for_a_pod_of_a_lost_node_has_ended(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    """Since Kubernetes 1.31, such a Job has the condition FailureTarget, and never the condition
    Failed."""
    engine.start(JOB)
    cluster.run_all()
    with cluster.lock:
        disrupt("DeletionByTaintManager")(cluster)
        cluster.end("FailureTarget", reason="BackoffLimitExceeded")
    wait_for(lambda: engine._queue.views()[1].troubles)
    time.sleep(0.3)
    assert engine.poll("kubernetes-1").state == "running"  # the pod of worker 1 is being ended
    lose_contact(cluster, 1)
    reason = wait_state(engine, "failed").reason
    assert reason == "worker 1 was ended, because its node n1 failed or was tainted"


def test_a_time_limit_and_an_end_without_a_pod_are_failures(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    for run_id, reason in ((1, "DeadlineExceeded"), (2, "BackoffLimitExceeded")):
        engine.start(replace(JOB, run_id=run_id))
        with cluster.lock:
            for rank in (0, 1):
                del cluster.objects["pods"][cluster.pod(rank, run_id)["metadata"]["name"]]
            cluster.end("Failed", run_id, reason=reason, message="said so")
    assert "reached its time limit" in wait_state(engine, "failed", 1).reason
    assert wait_state(engine, "failed", 2).reason.endswith(
        "-2 failed (BackoffLimitExceeded): said so; a pod was deleted, or its node failed"
    )


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (
            lambda cluster: cluster.condition(
                1,
                type="PodScheduled",
                status="False",
                reason="Unschedulable",
                message="0/3 nodes are available",
            ),
            "worker 1 waits for a node (Unschedulable): 0/3 nodes are available",
        ),
        (
            lambda cluster: cluster.state(
                1, waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling"}
            ),
            "worker 1 cannot start (ImagePullBackOff): Back-off pulling",
        ),
        (
            lambda cluster: cluster.state(
                1, waiting={"reason": "CreateContainerConfigError", "message": "no Secret"}
            ),
            "worker 1 cannot start (CreateContainerConfigError): no Secret",
        ),
        (
            lambda cluster: cluster.objects["pods"].clear(),
            (
                "Job {name} has no pod of worker 0 yet; if this remains, see kubectl describe job "
                "{name}"
            ),
        ),
        (
            lambda cluster: cluster.job()["spec"].update(suspend=True),
            "Job {name} is suspended, but not by MLBench",
        ),
    ],
)
def test_a_waiting_run_says_why(
    engine: KubernetesEngine,
    cluster: FakeKubernetes,
    step: Callable[[FakeKubernetes], None],
    reason: str,
) -> None:
    engine.start(JOB)
    with cluster.lock:
        step(cluster)
        wanted = reason.format(name=cluster.job()["metadata"]["name"])
    wait_status(engine, lambda status: status == JobStatus("waiting", wanted))


def test_a_job_deleted_from_outside_has_failed(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    engine.start(JOB)
    wait_state(engine, "waiting")
    name = cluster.job()["metadata"]["name"]
    cluster.job()["metadata"]["deletionTimestamp"] = at(1)
    wait_status(
        engine, lambda status: status.reason == f"Job {name} is being deleted, but not by MLBench"
    )
    cluster.remove_job(name)
    assert wait_state(engine, "failed").reason == f"Job {name} was deleted, but not by MLBench"


def test_stop_waits_until_the_pods_are_gone_and_keeps_their_last_lines(
    engine: KubernetesEngine, cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start(JOB)
    cluster.run_all()
    cluster.say(0, "last words\n")
    cluster.keeps_pods = True
    monkeypatch.setattr(kubernetes, "_STOP_S", 0.2)
    with pytest.raises(EngineError, match=r"has not ended mlbench-.*-1-0, .* within 0.2 s"):
        engine.stop("kubernetes-1")
    with cluster.lock:
        cluster.pod(0)["status"]["reason"] = "NodeLost"
        lose_contact(cluster, 1)
    engine.stop("kubernetes-1")
    with cluster.lock:
        pods = dict(cluster.objects["pods"])
        cluster.objects["pods"].clear()
    with pytest.raises(
        EngineError, match=r"has not ended mlbench-.*-1 within"
    ):  # it may still make pods
        engine.stop("kubernetes-1")
    cluster.objects["pods"].update(pods)
    cluster.keeps_pods = False
    engine.stop("kubernetes-1")
    assert not any(cluster.objects.values())
    assert texts(engine, 0) == ["last words"]
    engine.remove("kubernetes-1")
    assert texts(engine, 0) == []


def test_lines_are_neither_repeated_nor_lost_over_a_restart(
    engine: KubernetesEngine, cluster: FakeKubernetes, tmp_path: Path
) -> None:
    """Lines of the same nanosecond, of the same second, an unfinished one, and one that is too long
    for a log."""
    engine.start(JOB)
    cluster.run_all()
    second = 1_767_225_600 * 10**9
    cluster.say(0, "a\n", "b\n", time_ns=second + 5)
    cluster.say(0, "c\n", "unfinished", time_ns=second + 7)
    wait_state(engine, "running")
    wait_for(lambda: texts(engine, 0) == ["a", "b", "c"])
    assert engine.logs("kubernetes-1").lines[-1]["date"] == "2026-01-01T00:00:00.000000Z"
    engine.close()
    with cluster.lock:
        log = cluster.logs[cluster.pod(0)["metadata"]["name"]]
        log[-1] = (second + 7, "finished\n")
    cluster.say(0, "x" * 40_000 + "\n", time_ns=second + 9)
    with contextlib.closing(KubernetesEngine(tmp_path / "runs", interval_s=0.1)) as later:
        wait_for(
            lambda: later.poll("kubernetes-1").state == "running" and len(texts(later, 0)) == 7
        )
        time.sleep(0.3)  # further looks find nothing new
        assert texts(later, 0) == ["a", "b", "c", "finished", "x" * 16384, "x" * 16384, "x" * 7232]


def test_a_log_that_cannot_be_read_does_not_hold_up_the_end(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    engine.start(JOB)
    cluster.run_all()
    cluster.broken = lambda request: (
        error(500, "node n1 is gone") if request.subresource == "log" else None
    )
    problem = "cannot be read: Kubernetes refused a request: 500: node n1 is gone"
    wait_status(
        engine, lambda status: status.state == "running" and status.reason.endswith(problem)
    )
    for rank in (0, 1):
        cluster.state(rank, terminated={"exitCode": 0})
    cluster.end()
    wait_state(engine, "finished")
    assert sum(text.endswith(problem) for text in texts(engine, None)) == 2


def test_the_message_of_a_node_is_not_a_line_of_the_log(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    """A kubelet that finds no log answers with status 200 and its message, without a date."""
    message = "unable to retrieve container logs for containerd://0a1b"
    engine.start(JOB)
    cluster.run_all()
    answer = kmock.Response(payload=message.encode())
    cluster.broken = lambda request: answer if request.subresource == "log" else None
    for rank in (0, 1):
        cluster.state(rank, terminated={"exitCode": 0})
    cluster.end()
    wait_state(engine, "finished")
    assert texts(engine, 0) == []
    assert f"the log of worker 0 cannot be read: {message}" in texts(engine, None)


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "Not Found"), (520, "no reason was given"), (520, "it is odd")]
)
def test_each_status_of_http_is_an_error_of_the_api(status: int, reason: str) -> None:
    """A proxy before the API may have statuses of its own, without a reason."""
    client = pytest.importorskip("kubernetes.client")
    given = client.ApiException(status=status, reason="it is odd" if "odd" in reason else None)
    error = kubernetes_api._api_error(given)
    assert str(error) == f"Kubernetes refused a request: {status}: {reason}"
    assert error.status == status


@pytest.mark.parametrize(
    "answer", [cut, lambda _: error(500, "etcd is gone"), lambda _: error(410, "Expired")]
)
def test_a_run_outlives_an_api_that_fails(
    engine: KubernetesEngine, cluster: FakeKubernetes, answer: Callable[[Any], Any]
) -> None:
    engine.start(JOB)
    cluster.run_all()
    wait_state(engine, "running")
    cluster.broken = lambda request: answer(request) if request.resource.plural == "jobs" else None
    reason = wait_status(engine, lambda status: "Kubernetes" in status.reason).reason
    assert reason.startswith(("Kubernetes does not answer", "Kubernetes refused a request: "))
    cluster.broken = lambda request: None
    wait_status(engine, lambda status: status == JobStatus("running"))


def test_a_lost_answer_to_the_creation_does_not_make_a_second_job(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    def lose(request: Any) -> Any:
        if request.method.value != "POST" or request.resource.plural != "jobs":
            return None
        cluster._create("jobs", request)
        return cut(request)

    cluster.broken = lose
    engine.start(JOB)
    assert len(cluster.objects["jobs"]) == 1
    wait_state(engine, "waiting")


def test_a_start_that_fails_half_way_leaves_nothing(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    message = "secrets is forbidden: User cannot create resource"
    cluster.broken = lambda request: (
        error(403, message) if request.resource.plural == "secrets" else None
    )
    with pytest.raises(EngineError, match=message):
        engine.start(JOB)
    assert not any(cluster.objects.values())


def test_an_old_job_of_the_same_name_is_replaced(
    engine: KubernetesEngine, cluster: FakeKubernetes, tmp_path: Path
) -> None:
    engine.start(JOB)
    uid = cluster.job()["metadata"]["uid"]
    (tmp_path / "runs" / "1").rename(tmp_path / "away")  # as after the loss of the folder
    engine.start(JOB)
    assert cluster.job()["metadata"]["uid"] != uid


def test_the_objects_of_an_old_job_may_go_after_it(
    engine: KubernetesEngine,
    cluster: FakeKubernetes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes deletes the Secret and the Service only after the Job."""
    refused: dict[str, int] = {}

    def still_there(request: Any) -> Any:
        kind = request.resource.plural
        if request.method.value != "POST" or kind == "jobs" or refused.get(kind) == 2:
            return None
        refused[kind] = refused.get(kind, 0) + 1
        return error(409, f"{kind} already exists")

    engine.start(JOB)
    (tmp_path / "runs" / "1").rename(tmp_path / "away")
    cluster.broken = still_there
    engine.start(JOB)
    assert refused == {"secrets": 2, "services": 2}
    wait_state(engine, "waiting")
    monkeypatch.setattr(kubernetes_api, "_COLLECTED_S", 0.1)
    cluster.broken = lambda request: (
        error(409, "already exists") if request.resource.plural == "secrets" else None
    )
    with pytest.raises(EngineError, match="already exists"):
        engine.start(replace(JOB, run_id=2))


def test_a_restarted_master_finds_its_runs(
    engine: KubernetesEngine, cluster: FakeKubernetes, tmp_path: Path
) -> None:
    for run_id in (1, 2, 3, 4):
        engine.start(replace(JOB, run_id=run_id))
    cluster.run_all(1)
    cluster.run_all(2)
    wait_state(engine, "running", 1)
    engine.close()
    for rank in (0, 1):
        cluster.state(rank, 2, terminated={"exitCode": 0})
    cluster.end(run_id=2)
    cluster.remove_job(cluster.job(3)["metadata"]["name"])
    # The earlier master ended between the creation of the Job and its resumption.
    (tmp_path / "runs" / "4" / "started").unlink()
    cluster.job(4)["spec"]["suspend"] = True
    with contextlib.closing(KubernetesEngine(tmp_path / "runs", interval_s=0.1)) as later:
        assert later.place == engine.place
        wait_state(later, "finished", 2)
        assert "does not exist any more" in wait_state(later, "lost", 3).reason
        wait_state(later, "unstarted", 4)
        wait_state(later, "unstarted", 5)
        assert later.poll("kubernetes-1") == JobStatus("running")
        later.start(replace(JOB, run_id=4))
        wait_state(later, "waiting", 4)
    # How a run ended is known without its Job.
    cluster.remove_job(cluster.job(2)["metadata"]["name"])
    with contextlib.closing(KubernetesEngine(tmp_path / "runs", interval_s=0.1)) as later:
        assert later.poll("kubernetes-2").state == "finished"


def test_a_master_with_a_new_folder_and_its_mark_goes_on_with_its_runs(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_KUBERNETES_MARK", "lab-1")
    with contextlib.closing(KubernetesEngine(tmp_path / "a", interval_s=0.1)) as first:
        first.start(JOB)
    assert cluster.job()["metadata"]["name"] == "mlbench-lab-1-1"
    cluster.run_all()
    cluster.say(0, "hello\n")
    with contextlib.closing(KubernetesEngine(tmp_path / "b", interval_s=0.1)) as second:
        wait_for(
            lambda: second.poll("kubernetes-1").state == "running" and texts(second, 0) == ["hello"]
        )
        assert second.place != first.place  # it cannot know which runs had not begun


def test_two_masters_in_one_namespace_do_not_mix_up_their_runs(
    engine: KubernetesEngine, cluster: FakeKubernetes, tmp_path: Path
) -> None:
    with contextlib.closing(KubernetesEngine(tmp_path / "others", interval_s=0.1)) as other:
        engine.start(JOB)
        other.start(JOB)
        assert len(cluster.objects["jobs"]) == 2
        other.stop("kubernetes-1")
        (job,) = cluster.objects["jobs"].values()
        assert job["metadata"]["labels"]["mlbench.github.io/master"] == engine._setting.mark
        wait_state(engine, "waiting")


def test_the_load_of_workers_comes_from_the_metrics_server(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    engine.start(JOB)
    cluster.run_all()
    cluster.usage[cluster.pod(1)["metadata"]["name"]] = {"cpu": "1250m", "memory": "300Mi"}
    wait_state(engine, "running")
    page = wait_for(lambda: engine.load("kubernetes-1").lines)
    assert page[0]["rank"] == 1
    assert json.loads(page[0]["text"]) == {"cpu": 125.0, "memory": 300 * 2**20}


def test_a_cluster_without_a_metrics_server_is_asked_rarely(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    cluster.has_metrics = False
    engine.start(JOB)
    cluster.run_all()
    assert wait_state(engine, "running").reason == ""
    wait_for(lambda: cluster.requests.count(("GET", "jobs")) >= 5)
    assert cluster.requests.count(("GET", "pods.metrics.k8s.io")) == 1


def test_the_page_has_the_rights_that_the_engine_uses_and_no_others(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    engine.start(JOB)
    cluster.run_all()
    cluster.usage[cluster.pod(1)["metadata"]["name"]] = {"cpu": "1", "memory": "1"}
    wait_state(engine, "running")
    wait_for(lambda: engine.load("kubernetes-1").lines)
    engine.stop("kubernetes-1")
    verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
    used = set()
    for method, resource in cluster.requests:
        verb = verbs.get(method) or ("get" if "/" in resource else "list")
        used.add((resource.removesuffix(".metrics.k8s.io"), verb))
    page = (Path(__file__).parents[3] / "docs" / "howto" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| \S+ \| `([a-z/]+)` \| `([a-z]+)` \| `([a-z_]+)`", page, re.MULTILINE)
    assert {row[:2] for row in rows} == used and len(rows) == 9
    assert all(hasattr(kubernetes_api.KubernetesApi, row[2]) for row in rows)


def test_the_number_of_calls_does_not_depend_on_the_number_of_jobs(
    engine: KubernetesEngine, cluster: FakeKubernetes
) -> None:
    """1,000 Jobs that wait in the cluster, of which the master looks at all."""
    cluster.has_metrics = False
    engine.start(JOB)
    wait_state(engine, "waiting")
    with cluster.lock:
        template = json.dumps(cluster.job())
        for run_id in range(2, 1001):
            job = json.loads(template)
            job["metadata"]["name"] = job["metadata"]["name"][:-1] + str(run_id)
            job["metadata"]["labels"]["mlbench.github.io/run-id"] = str(run_id)
            job["spec"]["template"]["metadata"]["labels"]["mlbench.github.io/run-id"] = str(run_id)
            cluster.objects["jobs"][job["metadata"]["name"]] = job
            cluster._create_pod(job, 0)
            del job["spec"]["template"]  # only the time of the test depends on it
    for run_id in range(1, 1001):
        engine.poll(f"kubernetes-{run_id}")
    wait_for(
        lambda: all(
            engine.poll(f"kubernetes-{run_id}").state == "waiting" for run_id in range(1, 1001)
        ),
        60,
    )
    with cluster.lock:
        cluster.requests.clear()
    wait_for(lambda: cluster.requests.count(("GET", "jobs")) >= 3, 60)
    asked = list(cluster.requests)
    assert set(asked) == {("GET", "jobs"), ("GET", "pods")}
    assert abs(asked.count(("GET", "pods")) - asked.count(("GET", "jobs"))) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"all_nodes": False}, "num_workers must be 1 without run_all_nodes on Kubernetes, not 2"),
        ({"image": ""}, "image must be the name of a container image"),
    ],
)
def test_a_run_that_cannot_work_in_pods_is_refused(
    engine: KubernetesEngine, cluster: FakeKubernetes, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine.start(replace(JOB, **change))
    assert cluster.requests == []


def test_mpi_between_pods_is_refused_with_the_request(engine: KubernetesEngine) -> None:
    run = RunIn(name="a", num_workers=2, task="1a", backend="mpi")
    with pytest.raises(
        ValueError, match="backend: must be gloo or nccl for 2 workers on Kubernetes, not mpi"
    ):
        check_options(run, engine)
    check_options(run.model_copy(update={"num_workers": 1}), engine)


def test_a_command_of_worker_0_alone_is_refused_with_the_request(
    engine: KubernetesEngine,
) -> None:
    command = {
        "image_name": "custom_image",
        "custom_image_name": "image",
        "custom_image_command": "mpirun x",
    }
    custom = {"backend": "custom_backend", "custom_backend": "mpi", "run_all_nodes": False}
    run = RunIn.model_validate({"name": "a", "num_workers": 2, **command, **custom})
    with pytest.raises(
        ValueError, match="run_all_nodes: must be true for 2 workers on kubernetes, not false"
    ):
        check_options(run, engine)
    check_options(run.model_copy(update={"num_workers": 1}), engine)
    check_options(run.model_copy(update={"run_all_nodes": True}), engine)


def test_what_a_run_misses_is_in_its_log(engine: KubernetesEngine, cluster: FakeKubernetes) -> None:
    engine.start(replace(JOB, env={"MLBENCH_MASTER_URL": "http://127.0.0.1:5080"}))
    notes = " ".join(texts(engine, None))
    assert "pods cannot reach the master at http://127.0.0.1:5080" in notes
    assert "files that workers write into MLBENCH_OUTPUT end with their pods" in notes


def test_a_shared_claim_gives_workers_only_the_folders_of_their_run(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_KUBERNETES_SHARED_CLAIM", "master-data")
    for wrong in ("", str(tmp_path / "other")):
        monkeypatch.setenv("MLBENCH_KUBERNETES_SHARED_MOUNT", wrong)
        with pytest.raises(ConfigurationError, match="SHARED_MOUNT must be a folder above"):
            KubernetesEngine(tmp_path / "runs")
    monkeypatch.setenv("MLBENCH_KUBERNETES_SHARED_MOUNT", str(tmp_path))
    with contextlib.closing(
        KubernetesEngine(tmp_path / "master" / "runs", interval_s=0.1)
    ) as engine:
        engine.start(JOB)
        with pytest.raises(ConfigurationError, match="must be another claim than 'master-data'"):
            engine.start(replace(JOB, run_id=2, options=("--volume", "master-data:/data/all")))
        assert (engine.results("kubernetes-1")).is_dir()
    mounts = cluster.job()["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    paths = {mount["mountPath"]: mount.get("subPath") for mount in mounts}
    assert paths["/mlbench/output"] == "master/runs/1/output"
    assert paths["/mlbench/spool"] == "master/runs/1/spool"
    assert None not in [paths[path] for path in paths if path.startswith("/mlbench")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MARK", "Lab_1", "MLBENCH_KUBERNETES_MARK must be 1 to 30 lowercase letters"),
        ("INTERVAL_S", "0", "MLBENCH_KUBERNETES_INTERVAL_S must be a positive number"),
        ("POD_TEMPLATE", "/nowhere.json", "cannot read the pod template /nowhere.json"),
    ],
)
def test_a_wrong_setting_is_named(
    cluster: FakeKubernetes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"MLBENCH_KUBERNETES_{name}", value)
    with pytest.raises(ConfigurationError, match=message):
        KubernetesEngine(tmp_path / "runs")


def test_without_a_cluster_the_engine_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        ConfigurationError, match="set KUBECONFIG, or start the master in the cluster"
    ):
        KubernetesEngine(tmp_path / "runs")
