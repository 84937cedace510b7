"""The REST API as clients of 3.0 and of today speak it."""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import sys
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import mlbench_master
from mlbench_core.client.api import MLBENCH_IMAGES
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.master_metrics import describe_run
from mlbench_core.tasks import container_image, get_task
from mlbench_master import create_app
from mlbench_master.api.schemas import MAX_BATCH
from mlbench_master.database.store import NewMetric
from mlbench_master.engines import Job
from mlbench_master.web import render
from tests.master.helpers import IdleEngine, TestClient, wait_for


@pytest.fixture
def client(tmp_path: Path) -> Any:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


@pytest.fixture
def run(client: Any) -> dict[str, Any]:
    response = client.post(
        "/api/runs/", json={"name": "my-run", "num_workers": 2, "command": "sleep 100"}
    )
    assert response.status_code == 201, response.text
    made = response.json()
    assert (made["state"], made["job_id"]) == ("initialized", "")
    return dict(wait_for(lambda: started(client, made["id"]), what="the start"))


def started(client: Any, run_id: int) -> Any:
    run = client.get(f"/api/runs/{run_id}/").json()
    return run if run["state"] == "started" else None


def post(client: Any, run: dict[str, Any], name: str, values: list[Any], **more: Any) -> None:
    items = [
        {
            "run_id": run["id"],
            "name": name,
            "value": value,
            "date": f"2026-01-01T00:00:{index:02d}",
            **more,
        }
        for index, value in enumerate(values)
    ]
    assert client.post("/api/metrics/", json=items).status_code == 201


def values(client: Any, run: dict[str, Any], query: str = "") -> dict[str, list[str]]:
    response = client.get(f"/api/metrics/{run['id']}/?metric_type=run&{query}")
    assert response.status_code == 200, response.text
    return {
        name: [entry["value"] for entry in entries] for name, entries in response.json().items()
    }


def test_importing_the_package_loads_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys, mlbench_master; print({'torch', 'fastapi', 'sqlalchemy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_health(client: Any) -> None:
    assert client.get("/api/health/").json()["status"] == "ok"
    assert client.get("/api/health").json()["status"] == "ok"
    assert client.get("/openapi.json").status_code == 200


def test_a_run_has_every_field(client: Any, run: dict[str, Any]) -> None:
    old = {
        "id",
        "name",
        "created_at",
        "finished_at",
        "state",
        "job_id",
        "job_metadata",
        "num_workers",
    }
    new = {"backend", "image", "command", "gpu_enabled", "light_target", "goal_result"}
    assert old | new <= set(run)
    assert client.get(f"/api/runs/{run['id']}").json() == run
    (listed,) = client.get("/api/runs").json()
    assert {**listed, "job_metadata": None} == {**run, "job_metadata": None}
    assert {"stdout", "stderr", "command"} <= set(run["job_metadata"])
    assert (run["job_metadata"]["stdout"], run["job_metadata"]["stderr"]) == (["<b>log</b>"], [])
    assert listed["job_metadata"]["stdout"] == []
    datetime.strptime(run["created_at"], "%Y-%m-%dT%H:%M:%S.%fZ")


def test_a_form_of_a_3_0_client_starts_a_run(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleEngine, "starts_containers", True)
    form = {
        "name": "old-client",
        "num_workers": "2",
        "num_cpus": "2.0",
        "max_bandwidth": "1000",
        "image_name": "custom_image",
        "custom_image_name": "me/image:1",
        "custom_image_command": "/app/main.py --run_id {run_id}",
        "backend": "custom_backend",
        "custom_backend": "mine",
        "run_all_nodes": "True",
        "gpu_enabled": "False",
        "light_target": "true",
    }
    made = client.post("/api/runs/", data=form).json()
    assert (made["image"], made["backend"], made["light_target"], made["gpu_enabled"]) == (
        "me/image:1",
        "mine",
        True,
        False,
    )


def test_a_task_becomes_its_command(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_task("1a")), "script", Path("/bench marks/main.py"))
    body = {
        "name": "t",
        "num_workers": 1,
        "task": "task1a",
        "arguments": ["--data", "a b"],
        "backend": "GLOO",
    }
    made = client.post(
        "/api/runs/", json={**body, "light_target": True, "gpu_enabled": True}
    ).json()
    wanted = (
        "'/bench marks/main.py' --run_id {run_id} --backend {backend} --data 'a b' --light --gpu"
    )
    assert (made["command"], made["image"], made["backend"]) == (
        wanted,
        "task1a_resnet20_cifar10",
        "gloo",
    )
    for number, image in enumerate(
        (
            "mlbench/pytorch-cifar10-resnet20-all-reduce:latest",
            "mlbench/pytorch-task1a-resnet20-cifar10:1",
        )
    ):
        made = client.post(
            "/api/runs/", json={"image_name": image, "name": f"i{number}", "num_workers": 1}
        ).json()
        assert (made["image"], made["command"].split()[-1]) == (image, "{backend}")


def test_a_task_without_torch_is_refused_with_the_extra(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = client.post("/api/runs/", json={"name": "t", "num_workers": 1, "task": "1a"})
    message = "needs the package 'torch', which is not installed: pip install 'mlbench-core[torch]'"
    assert (answer.status_code, answer.json()["message"]) == (400, f"task: task 1a {message}")
    assert (
        client.post(
            "/api/runs/", json={"name": "t", "num_workers": 1, "command": "train"}
        ).status_code
        == 201
    )


@pytest.mark.parametrize(
    "image", ["mlbench/pytorch-cifar10-resnet20-ddp:latest", "PyTorch Cifar-10 ResNet-20 (DDP)"]
)
def test_the_image_of_ddp_starts_ddp(client: Any, image: str) -> None:
    body = {"image_name": image, "name": "ddp", "num_workers": 1, "light_target": True}
    made = client.post("/api/runs/", json=body).json()
    assert made["command"].endswith("--backend {backend} --optimizer ddp --light")
    body = {
        "name": "plain",
        "num_workers": 1,
        "image_name": "mlbench/pytorch-cifar10-resnet20-all-reduce:latest",
    }
    assert (
        client.post("/api/runs/", json=body)
        .json()["command"]
        .endswith("main.py --run_id {run_id} --backend {backend}")
    )


def test_the_last_lines_of_the_output_are_lines_and_few(
    client: Any, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [{"rank": 0, "stream": "stdout", "text": f"{n:099}", "date": ""} for n in range(1000)]
    monkeypatch.setattr(IdleEngine, "log_tail", lambda *_: written)
    shown = client.get(f"/api/runs/{run['id']}/").json()["job_metadata"]["stdout"]
    assert (
        shown == [line["text"] for line in written][-163:]
    )  # 16,384 characters with their line breaks
    long = {"rank": 0, "stream": "stdout", "text": "x" * 50_000, "date": ""}
    monkeypatch.setattr(IdleEngine, "log_tail", lambda *_: [*written, long])
    shown = client.get(f"/api/runs/{run['id']}/").json()["job_metadata"]["stdout"]
    assert shown == ["x" * 16_384]


@pytest.mark.parametrize(
    ("image", "folder"),
    [(image, get_task(key).folder) for image, key in MLBENCH_IMAGES.values() if key]
    + [("mlbench/pytorch-backend_benchmark:latest", get_task("0").folder)],
)
def test_every_official_image_starts_its_task(client: Any, image: str, folder: str) -> None:
    form = {
        "name": "old",
        "num_workers": "2",
        "num_cpus": "2.0",
        "max_bandwidth": "1000",
        "image_name": image,
    }
    made = client.post(
        "/api/runs/", data={**form, "backend": "GLOO", "run_all_nodes": "False"}
    ).json()
    assert (made["image"], made["backend"], made["run_all_nodes"]) == (image, "gloo", True)
    assert f"/{folder}/main.py --run_id {{run_id}} --backend {{backend}}" in made["command"]
    assert ("--optimizer ddp" in made["command"]) == ("ddp" in image)


def test_flags_reach_the_users_own_command(client: Any) -> None:
    """As in version 3.0: it appended them to every command."""
    wishes = {"num_workers": 1, "gpu_enabled": "true", "light_target": "true"}
    of_image = {"image_name": "custom_image", "custom_image_name": "custom_image"}
    for name, body, command in (
        ("a", {"command": "main.py {rank}"}, "main.py {rank} --light --gpu"),
        ("b", {**of_image, "custom_image_command": "main.py --gpu x"}, "main.py --gpu x --light"),
        ("c", {"command": "main.py", "gpu_enabled": "false", "light_target": "False"}, "main.py"),
        # The arguments of a script that is measured unchanged are those of its user.
        (
            "d",
            {"command": "python -m mlbench_core.observe a.py"},
            "python -m mlbench_core.observe a.py",
        ),
    ):
        made = client.post("/api/runs/", json={"name": name, **wishes, **body}).json()
        assert made["command"] == command
        # The engine idle of this test has no core.
        assert [note[:21] for note in made["job_metadata"]["notes"]] == ["warning: 1 worker x 1"]


def test_wishes_are_honored_or_refused_never_ignored(client: Any) -> None:
    body = {"name": "wish", "num_workers": 2, "command": "sleep 1"}
    for change, words in (
        (
            {"max_bandwidth": 100},
            "max_bandwidth: must be at least 1000 .*not 100: the engine idle cannot limit",
        ),
        (
            {
                "command": None,
                "task": "1a",
                "backend": "custom_backend",
                "custom_backend": "x",
                "run_all_nodes": "no",
            },
            "run_all_nodes: must be true for a task",
        ),
        (
            {"run_all_nodes": False},
            "run_all_nodes: must be true with backend gloo, not false: every worker runs",
        ),
        (
            {"image_name": "me/mine:1"},
            "image_name: must be left out with command, not 'me/mine:1': the engine idle",
        ),
        (
            {"custom_image_name": "me/mine:1"},
            "custom_image_name: must be left out with command, not 'me/mine:1'",
        ),
        (
            {"custom_image_command": "x"},
            "custom_image_command: must be left out with command, not 'x'",
        ),
        ({"task": "0"}, "command: must be left out with task, not 'sleep 1'"),
        (
            {"command": None, "task": "0", "image_name": "i"},
            "image_name: must be left out with task, not 'i'",
        ),
        (
            {"arguments": ["-x"]},
            r"arguments: must be left out without a task, not \['-x'\]: add them to the command",
        ),
        (
            {
                "command": None,
                "image_name": "custom_image",
                "custom_image_command": "x",
                "arguments": "-x",
            },
            "arguments: must be left out without a task",
        ),
    ):
        refused = client.post("/api/runs/", json={**body, **change})
        assert refused.status_code == 400 and re.search(words, refused.json()["message"])
    assert (
        client.post(
            "/api/runs/", json={**body, "name": "plain", "image_name": "custom_image"}
        ).status_code
        == 201
    )
    assert client.post(
        "/api/runs/", json={**body, "name": "single", "num_workers": 1, "run_all_nodes": 0}
    ).is_success
    own = {
        "name": "own",
        "backend": "custom_backend",
        "custom_backend": "x",
        "run_all_nodes": "false",
    }
    made = client.post("/api/runs/", json={**body, **own}).json()
    assert made["run_all_nodes"] is False
    note, warning = made["job_metadata"]["notes"]
    assert note.startswith("note: run_all_nodes is false, so only worker 0 of 2 runs")
    assert client.get(f"/api/runs/{made['id']}/").json()["job_metadata"]["notes"] == [note, warning]
    assert note in client.get(f"/runs/{made['id']}/").text
    assert (
        client.post("/api/runs/", json={**body, "name": "all", "max_bandwidth": 1000}).json()[
            "run_all_nodes"
        ]
        is True
    )


OWN_IMAGE = {
    "image_name": "custom_image",
    "custom_image_name": "me/mine:1",
    "custom_image_command": "main.py {rank}",
}


def test_an_own_image_is_refused_by_an_engine_without_containers(client: Any) -> None:
    body = {"name": "own", "num_workers": 1}
    refused = client.post("/api/runs/", json={**body, **OWN_IMAGE})
    assert refused.status_code == 400
    assert refused.json()["message"] == (
        "custom_image_name: must be left out, not 'me/mine:1': the engine idle starts processes, "
        "not containers; choose an engine that starts containers, or leave out the image to run "
        "the command with the Python and the packages of the master"
    )
    plain = {"image_name": "custom_image", "custom_image_command": "main.py {rank}"}
    assert client.post("/api/runs/", json={**body, **plain}).json()["command"] == "main.py {rank}"


def test_an_engine_with_containers_gets_an_image_and_the_command_in_it(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdleEngine, "starts_containers", True)
    monkeypatch.setattr(IdleEngine, "capacity", 100.0)
    jobs: list[Job] = []
    monkeypatch.setattr(
        IdleEngine, "start", lambda self, job: jobs.append(job) or f"idle-{job.run_id}"
    )
    own_task = "registry.example.com/me/task1a:2"
    official = "mlbench/pytorch-cifar10-resnet20-ddp:latest"
    script = "/workspace/main.py --run_id {run_id} --backend {backend}"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"task": "1a"}, container_image("task1a"), script),
        ({"image_name": official}, container_image("task1a"), f"{script} --optimizer ddp"),
        ({"image_name": own_task}, own_task, script),
        (OWN_IMAGE, "me/mine:1", "main.py {rank}"),
        (
            {"image_name": "custom_image", "custom_image_name": "me/mine:2", "command": "x.py"},
            "me/mine:2",
            "x.py",
        ),
    ]
    for number, (body, image, command) in enumerate(cases):
        made = client.post("/api/runs/", json={"name": f"run-{number}", "num_workers": 2, **body})
        assert made.status_code == 201, made.text
        wait_for(lambda number=number: len(jobs) > number, what="the start")
        assert (jobs[-1].image, jobs[-1].command) == (image, command)
    for body, message in (
        (
            {"command": "main.py"},
            "custom_image_name: must be given for a command in a container of the engine idle",
        ),
        (
            {**OWN_IMAGE, "custom_image_name": "-v"},
            "custom_image_name: must be the name of an image such as",
        ),
    ):
        refused = client.post("/api/runs/", json={"name": "no", "num_workers": 1, **body})
        assert refused.status_code == 400 and refused.json()["message"].startswith(message), (
            refused.text
        )


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (
            (),
            (
                "gpu_enabled: must be false, not true: the engine idle "
                "found no GPU on this machine; leave it out"
            ),
        ),
        (
            ("0", "1"),
            "num_workers: must be at most 2 with gpu_enabled, not 3: each worker needs its",
        ),
    ],
)
def test_a_run_that_needs_more_gpus_than_there_are_is_refused(
    client: Any, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(IdleEngine, "gpus", gpus)
    body = {"name": "wish", "num_workers": 3, "command": "sleep 1", "gpu_enabled": True}
    refused = client.post("/api/runs/", json=body)
    assert refused.status_code == 400 and refused.json()["message"].startswith(message)
    assert client.post("/api/runs/", json={**body, "gpu_enabled": False}).status_code == 201


def test_refused_runs_say_which_field(client: Any, run: dict[str, Any]) -> None:
    good = {"name": "good", "num_workers": 1, "command": "sleep 1"}
    for change, status, word in (
        ({"name": "my-run"}, 409, "name"),
        ({"name": "My_Run"}, 400, "name"),
        ({"name": "a" * 64}, 400, "name"),
        ({"name": "<b>"}, 400, "name"),
        ({"num_workers": 0}, 400, "num_workers"),
        ({"num_workers": 1.5}, 400, "num_workers"),
        ({"num_cpus": "nan"}, 400, "num_cpus"),
        ({"backend": "carrier-pigeon"}, 400, "known: gloo, nccl, mpi"),
        ({"backend": "custom_backend"}, 400, "custom_backend"),
        ({"task": "99z"}, 400, "must be one of 0, 1a"),
        ({"command": "echo 'unclosed"}, 400, "command"),
        ({"command": None}, 400, "task"),
        ({"command": None, "image_name": "custom_image"}, 400, "custom_image_command"),
        ({"command": None, "image_name": "no/such"}, 400, "image_name"),
        ({"gpu_enabled": "perhaps"}, 400, "gpu_enabled"),
    ):
        response = client.post("/api/runs/", json={**good, **change})
        assert (response.status_code, change) == (status, change), response.text
        assert set(response.json()) == {"status", "message"} and word in response.json()["message"]
    assert "unknown image" not in client.post("/api/runs/", json=good).text


@pytest.mark.parametrize(
    "date", ["2026-01-01 10:00:00.25", "2026-01-01T12:00:00.250+02:00", "2026-01-01T10:00:00.25Z"]
)
@pytest.mark.parametrize("form", [True, False])
def test_dates_of_every_spelling_are_utc(
    client: Any, run: dict[str, Any], date: str, form: bool
) -> None:
    body = {
        "run_id": run["id"],
        "name": "loss @ 0",
        "value": "0.5",
        "date": date,
        "cumulative": "True",
        "metadata": "",
    }
    response = client.post("/api/metrics/", **({"data": body} if form else {"json": body}))
    assert response.status_code == 201
    entry = {"date": "2026-01-01T10:00:00.250000Z", "value": "0.5", "cumulative": True}
    assert response.json().items() >= entry.items()
    assert client.get(f"/api/metrics/{run['id']}?metric_type=run").json() == {"loss @ 0": [entry]}


@pytest.mark.parametrize(
    ("date", "microsecond"),
    [
        ("2026-01-01T12:00:00.5 0200", 500000),  # the + of a query string
        ("2026-01-01 10:00+00", 0),  # PostgreSQL
        ("2026-01-01t10:00:00,123456789z", 123456),
        (" 2026-01-01T05:30:00-04:30 ", 0),
    ],
)
def test_rare_spellings_of_dates(
    client: Any, run: dict[str, Any], date: str, microsecond: int
) -> None:
    response = client.post(
        "/api/metrics/", json={"run_id": run["id"], "name": "m", "value": 1, "date": date}
    )
    assert response.json().get("date") == f"2026-01-01T10:00:00.{microsecond:06}Z", response.text


@pytest.mark.parametrize(
    "date",
    [
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        1e18,
        0.0,
        1767225600,
        True,
        "1767225600",
        "20260101",
        "2026-01-01T25:00",
        "2026-01-01T" + "9" * 100_000,
    ],
    ids=range(10),
)
def test_a_date_that_could_not_be_read_back_is_refused(
    client: Any, run: dict[str, Any], date: Any
) -> None:
    body = {"run_id": run["id"], "name": "m", "value": 1, "date": date}
    response = client.post("/api/metrics/", json=body)
    assert (response.status_code, response.json()["message"][:6]) == (400, "date: "), response.text
    assert len(response.json()["message"]) < 300
    assert values(client, run) == {}


def test_the_first_and_the_last_date_are_read_back(client: Any, run: dict[str, Any]) -> None:
    for date in ("0001-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z"):
        response = client.post(
            "/api/metrics/", json={"run_id": run["id"], "name": "m", "value": 1, "date": date}
        )
        assert (response.status_code, response.json()["date"]) == (201, date)
    assert values(client, run, "summarize=1") == {"m": ["1.0"]}


def test_a_stored_date_out_of_range_does_not_hide_the_other_metrics(
    client: Any, run: dict[str, Any]
) -> None:
    """Earlier versions of the master stored such dates."""
    post(client, run, "m", [1])
    client.app.state.store.add_metrics(
        [NewMetric(f"run:{run['id']}", "m", date, "2") for date in (10**18, -(10**18), 2**63 - 1)]
    )
    entries = client.get(f"/api/metrics/{run['id']}/?metric_type=run").json()["m"]
    assert [entry["date"][:4] for entry in entries] == ["0001", "2026", "9999", "9999"]
    for path in (
        "/api/metrics/",
        f"/api/metrics/{run['id']}/?metric_type=run&format=zip",
        f"/runs/{run['id']}/",
    ):
        assert client.get(path).status_code == 200, path


def test_repeated_delivery_is_harmless_and_order_is_by_date(
    client: Any, run: dict[str, Any]
) -> None:
    items = [
        {"run_id": run["id"], "name": "m", "value": n, "date": "2026-01-01", "id": f"client-{n}"}
        for n in range(3000)
    ]
    assert client.post("/api/metrics/", json=items[:2000]).json()["added"] == 2000
    assert client.post("/api/metrics/", json=items[1000:]).json() == {
        "status": "ok",
        "received": 2000,
        "added": 1000,
    }
    assert client.post("/api/metrics/", json=items[0]).status_code == 201
    assert values(client, run) == {"m": [str(n) for n in range(3000)]}
    late = {"run_id": run["id"], "name": "m", "value": "first", "date": "2025-12-31 23:59:59"}
    client.post("/api/metrics/", json=late)
    assert values(client, run)["m"][:2] == ["first", "0"]


def test_a_list_is_all_or_nothing(client: Any, run: dict[str, Any]) -> None:
    good = {"run_id": run["id"], "name": "m", "value": 1}
    response = client.post("/api/metrics/", json=[good, {**good, "name": ""}])
    assert (response.status_code, "[1].name" in response.json()["message"]) == (400, True)
    assert client.post("/api/metrics/", json=[good, {**good, "run_id": 999}]).status_code == 404
    assert client.post("/api/metrics/", json=[good] * (MAX_BATCH + 1)).status_code == 400
    assert values(client, run) == {}
    assert client.post("/api/metrics/", json=[good] * MAX_BATCH).json()["added"] == MAX_BATCH


def test_asking_for_a_part(client: Any, run: dict[str, Any]) -> None:
    post(client, run, "loss @ 0", [1, 2, 3, 4, 5])
    post(client, run, "text @ 0", ["a", "b", "nan"])
    assert values(client, run, "last_n=2") == {"loss @ 0": ["4", "5"], "text @ 0": ["b", "nan"]}
    assert values(client, run, "metric_filter=loss @ 0&since=2026-01-01 00:00:03") == {
        "loss @ 0": ["4", "5"]
    }
    assert values(client, run, "since=2026-01-01T02:00:04+02:00") == {"loss @ 0": ["5"]}
    assert values(client, run, "summarize=2") == {
        "loss @ 0": ["2.0", "4.5"],
        "text @ 0": ["b", "nan"],
    }
    assert values(client, run, "summarize=1&last_n=2")["loss @ 0"] == ["4.5"]
    assert values(client, run, "summarize=100")["loss @ 0"] == ["1", "2", "3", "4", "5"]
    for query in ("since=yesterday", "summarize=0", "last_n=x", "metric_type=cat", "format=exe"):
        response = client.get(f"/api/metrics/{run['id']}/?metric_type=run&{query}")
        assert (response.status_code, query.split("=")[0] in response.json()["message"]) == (
            400,
            True,
        )


def test_pods_and_all_metrics(client: Any, run: dict[str, Any]) -> None:
    pods = client.get("/api/pods/").json()
    assert [pod["name"] for pod in pods] == ["my-run-worker-0", "my-run-worker-1"]
    assert set(pods[0]) == {"name", "labels", "phase", "ip"} and pods[0]["phase"] == "Running"
    assert json.loads(pods[1]["labels"])["rank"] == "1"  # text, as in version 3.0
    body = {
        "pod_name": "my-run-worker-0",
        "name": "cpu",
        "value": 3,
        "date": "2026-01-01",
        "metadata": {"a": 1},
    }
    client.post("/api/metrics/", json=body)
    post(client, run, "loss @ 0", [1])
    assert client.get("/api/metrics/my-run-worker-0/").json()["cpu"][0]["value"] == "3"
    assert client.get("/api/metrics/my-run-worker-1/").json() == {}
    everything = client.get("/api/metrics/").json()
    date = "2026-01-01T00:00:00.000000Z"
    cpu = {"name": "cpu", "value": "3", "date": date, "metadata": '{"a": 1}', "cumulative": False}
    assert everything["pod_metrics"] == {"my-run-worker-0": {"cpu": [cpu]}}
    assert everything["run_metrics"]["my-run"]["loss @ 0"][0]["value"] == "1"


def test_the_zip_holds_safe_names_and_the_official_result(client: Any, run: dict[str, Any]) -> None:
    post(client, run, "../../evil/x @ 0", list(range(5000 // 100)))
    address = f"/api/metrics/{run['id']}/?metric_type=run&format=zip"
    assert (
        "official_result.txt"
        not in zipfile.ZipFile(io.BytesIO(client.get(address).content)).namelist()
    )
    post(client, run, "TaskResult @ 0", ["Reached 80 in 12.5 s"])
    client.post("/api/metrics/", json={"pod_name": "my-run-worker-1", "name": "cpu", "value": 3})
    response = client.get(address)
    assert response.headers["content-type"] == "application/zip"
    archive = zipfile.ZipFile(io.BytesIO(response.content))
    assert archive.testzip() is None
    assert archive.namelist() == [
        "run.json",
        "result_.._.._evil_x @ 0.json",
        "result_TaskResult @ 0.json",
        "my-run-worker-1_cpu.json",
        "official_result.txt",
    ]
    assert archive.read("official_result.txt") == b"Reached 80 in 12.5 s\n"
    assert (
        json.loads(archive.read("result_TaskResult @ 0.json"))[0]["value"] == "Reached 80 in 12.5 s"
    )
    shown = client.get(f"/api/runs/{run['id']}/").json()
    assert shown["goal_result"] == "Reached 80 in 12.5 s"
    record = json.loads(archive.read("run.json"))
    assert {**record, "job_metadata": None} == {**shown, "job_metadata": None}
    of_pod = client.get("/api/metrics/my-run-worker-0/?format=zip").content
    assert zipfile.ZipFile(io.BytesIO(of_pod)).namelist() == []
    by_suffix = client.get(f"/api/metrics/{run['id']}.zip?metric_type=run")
    assert zipfile.ZipFile(io.BytesIO(by_suffix.content)).namelist() == archive.namelist()


def test_the_command_reads_the_zip(client: Any, run: dict[str, Any], tmp_path: Path) -> None:
    post(
        client,
        run,
        "TaskResult @ 0",
        ["80% Top 1 Validation Accuracy reached in 12.500 seconds, Compute: 9.0 seconds"],
    )
    (tmp_path / "exp-2024.zip").write_bytes(
        client.get(f"/api/metrics/{run['id']}/?metric_type=run&format=zip").content
    )
    (result,) = load([tmp_path])
    shown = client.get(f"/api/runs/{run['id']}/").json()
    assert (result.name, result.workers, result.state) == (
        "my-run",
        run["num_workers"],
        shown["state"],
    )
    assert (result.reached, result.time_to_goal_s) == (True, 12.5)
    # The metrics have no data of the goal, but its text.
    goal = {"metric": "val_global_Prec@1", "threshold": 80.0, "minimize": False}
    assert result.configuration == {**describe_run(shown, run["num_workers"]), "goal": goal}


def test_a_format_may_be_the_end_of_a_path(client: Any, run: dict[str, Any]) -> None:
    for path in ("/api/runs", "/api/pods", "/api/metrics", f"/api/metrics/{run['id']}"):
        plain = client.get(f"{path}/?metric_type=run")
        for suffix in (".json", ".json/"):
            response = client.get(f"{path}{suffix}?metric_type=run")
            assert (response.status_code, response.content) == (200, plain.content), path
    assert (
        client.get(f"/api/runs/{run['id']}.json").json()
        == client.get(f"/api/runs/{run['id']}/").json()
    )
    table = client.get(f"/api/metrics/{run['id']}.csv?metric_type=run")
    assert (table.headers["content-type"], table.text[:10]) == (
        "text/csv; charset=utf-8",
        "name,date,",
    )
    assert client.get("/api/runs/1.exe").status_code == 404


def test_deleting_takes_the_metrics_and_never_reuses_the_id(
    client: Any, run: dict[str, Any]
) -> None:
    post(client, run, "loss @ 0", [1])
    assert client.delete(f"/api/runs/{run['id']}").status_code == 204
    assert client.get(f"/api/metrics/{run['id']}/?metric_type=run").status_code == 404
    again = client.post(
        "/api/runs/", json={"name": "my-run", "num_workers": 1, "command": "sleep 1"}
    ).json()
    assert again["id"] != run["id"] and values(client, again) == {}


@pytest.mark.parametrize(
    "kind", ["/api/runs/{}/", "/api/metrics/{}/", "/api/metrics/{}/?metric_type=run"]
)
@pytest.mark.parametrize(
    "bad",
    [
        "0",
        "-1",
        "9" * 30,
        "x",
        "%00",
        "..%2f..%2fetc%2fpasswd",
        "1.5",
        "%ff",
        "²",
        "1;drop table runs",
    ],
)
def test_ids_that_do_not_exist_are_404(
    client: Any, run: dict[str, Any], kind: str, bad: str
) -> None:
    assert client.get(kind.format(bad)).status_code == 404


NASTY: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"[[]]",
    b"null",
    b"5",
    b'"text"',
    b"\xff\xfe{",
    b"[" * 100_000,
    b'{"run_id": 1, "name": "a", "value": ' + b"9" * 5000 + b"}",
    b'{"run_id": 1, "name": "a", "value": "\\ud800"}',
    b'{"run_id": 1, "name": "\\u0000", "value": 1}',
    b'{"run_id": 1, "name": "a", "value": "\\u0000"}',
    b'{"run_id": 1e400, "name": "a", "value": 1}',
    b'{"run_id": NaN, "name": "a", "value": 1}',
    {"run_id": 2**70, "name": "a", "value": 1},
    {"run_id": -1, "name": "a", "value": 1},
    {"run_id": [], "name": "a", "value": 1},
    {"run_id": 1, "pod_name": "p", "name": "a", "value": 1},
    {"run_id": 1, "name": "a\n", "value": 1},
    {"run_id": 1, "name": "a" * 300, "value": 1},
    {"run_id": 1, "name": {}, "value": 1},
    {"run_id": 1, "name": "a", "value": None},
    {"run_id": 1, "name": "a", "value": []},
    {"run_id": 1, "name": "a", "value": 1, "date": "99999-01-01"},
    {"run_id": 1, "name": "a", "value": 1, "date": "0001-01-01T00:00:00+23:59", "cumulative": "x"},
    {"run_id": 1, "name": "a", "value": 1, "date": 10**300},
    {"run_id": 1, "name": "a", "value": 1, "date": {}},
    {"pod_name": "../x", "name": "a", "value": 1},
    {"name": "a\x00", "num_workers": 10**300, "num_cpus": "1e999"},
    {"name": ["a"], "num_workers": "٣", "arguments": "'", "command": "\x00"},
    {"name": "a", "num_workers": 1, "command": "\ud800"},
]


@pytest.mark.parametrize("body", NASTY, ids=range(len(NASTY)))
def test_bad_bodies_are_never_a_500(client: Any, body: Any) -> None:
    made = client.post(
        "/api/runs/", json={"name": "my-run", "num_workers": 2, "command": "sleep 100"}
    )
    assert made.json()["id"] == 1
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kinds = ("application/json", "application/x-www-form-urlencoded", "x/y")
    for path, kind in itertools.product(("/api/metrics/", "/api/runs/"), kinds):
        response = client.post(path, content=content, headers={"content-type": kind})
        if path == "/api/metrics/" and content == b"[]" and kind in ("application/json", "x/y"):
            assert response.json()["added"] == 0
            continue
        assert response.status_code in (400, 404, 422), (kind, response.text)
        assert set(response.json()) == {"status", "message"}


def test_multipart_forms_are_refused_unread(client: Any) -> None:
    header = b'--B\r\nContent-Disposition: form-data; name="name"'
    for path in ("/api/metrics/", "/api/runs/"):
        response = client.post(
            path, content=header, headers={"content-type": "Multipart/form-data; boundary=B"}
        )
        assert (response.status_code, set(response.json())) == (415, {"status", "message"})
        assert (
            "must be application/json or application/x-www-form-urlencoded"
            in response.json()["message"]
        )


def test_a_long_form_is_refused(client: Any) -> None:
    response = client.post("/api/metrics/", data={"run_id": 1, "name": "a", "value": "x" * 2**21})
    assert (response.status_code, "at most 2097152 bytes" in response.json()["message"]) == (
        413,
        True,
    )


def test_diverged_values_are_kept(client: Any, run: dict[str, Any]) -> None:
    body = (
        b'[{"run_id": %d, "name": "a", "value": NaN}, {"run_id": %d, "name": "a", "value": 1e308}]'
    )
    content = body % (run["id"], run["id"])
    assert client.post(
        "/api/metrics/", content=content, headers={"content-type": "application/json"}
    ).is_success
    assert values(client, run) == {"a": ["nan", "1e+308"]}
    assert values(client, run, "summarize=1") == {"a": ["1e+308"]}


def test_unknown_paths_and_methods_answer_in_the_same_form(client: Any) -> None:
    for response in (client.get("/api/nothing/"), client.put("/api/runs/")):
        assert response.status_code in (404, 405) and set(response.json()) == {"status", "message"}
    assert client.get("/api/runs/1/logs/?since_line=x").status_code == 404


def test_pages_show_text_never_html(client: Any, run: dict[str, Any]) -> None:
    post(client, run, "<script>alert(1)</script>", ["<img src=x>"])
    client.app.state.store.update_run(
        run["id"], name="<b>bold</b>", job_id="idle-1", goal_result="<i> {{ 7 * 7 }} $x"
    )
    for page in (client.get("/"), client.get(f"/runs/{run['id']}/")):
        assert page.status_code == 200
        assert "&lt;b&gt;bold&lt;/b&gt;" in page.text and "&lt;i&gt; {{ 7 * 7 }} $x" in page.text
        assert not any(bad in page.text for bad in ("<b>", "<i>", "<script>", "<img"))
    assert "&lt;b&gt;log&lt;/b&gt;" in page.text
    assert client.get("/runs/77/").status_code == 404
    assert client.get("/static/app.js").status_code == 200


def test_html_comes_from_the_templates_alone() -> None:
    """They escape every value; text that is put together in Python would not be."""
    tag = re.compile(r"</?(?:a|b|div|h\d|li|option|p|pre|span|strong|t[dhr]|table|ul)\b[^`]*>")
    modules = sorted(Path(mlbench_master.__file__).parent.rglob("*.py"))
    assert [path.name for path in modules if tag.search(path.read_text())] == ["render.py"]
    # It writes dates and numbers, always by Markup.format, which escapes the values.
    code = ast.parse(next(path for path in modules if path.name == "render.py").read_text())
    made = [
        node
        for node in ast.walk(code)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Markup"
    ]
    assert made and all(
        isinstance(argument, ast.Constant) for node in made for argument in node.args
    )
    assert render._templates.autoescape is True


def test_names_and_states_are_not_broken_inside_a_word(client: Any) -> None:
    style = client.get("/static/style.css").text
    broken = re.findall(r"^([^/{]*)\{[^}]*overflow-wrap: anywhere", style, re.MULTILINE)
    parts = {part.strip() for selector in broken for part in selector.split(",")}
    assert "pre" in parts and not parts & {
        "body",
        "main",
        "table",
        "td",
        "th",
        "time",
        ".state",
        "a",
        "*",
    }


def test_a_database_in_memory_works(tmp_path: Path) -> None:
    app = create_app(database_url="sqlite://", data_dir=tmp_path, engine=IdleEngine())
    with TestClient(app, base_url="http://localhost") as client:
        body = {"name": "x", "num_workers": 1, "command": "true"}
        assert client.post("/api/runs/", json=body).status_code == 201
        assert len(client.get("/api/runs/").json()) == 1


def test_a_waiting_run_has_the_reason_in_its_metadata(client: Any, run: dict[str, Any]) -> None:
    second = client.post(
        "/api/runs/", json={"name": "second", "num_workers": 1, "command": "true"}
    ).json()

    def reason() -> Any:
        return client.get(f"/api/runs/{second['id']}/").json()["job_metadata"].get("reason")

    assert (
        wait_for(reason, what="the next look at the queue") == "waits for cores: 1 needed, 0 free"
    )
    first, waiting = client.get("/api/runs/").json()
    assert "reason" not in first["job_metadata"] and waiting["job_metadata"]["reason"].startswith(
        "waits for cores"
    )
    client.post(f"/api/runs/{second['id']}/stop/")
    assert reason() == "stopped by a user"
