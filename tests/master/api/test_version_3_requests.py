"""Every request that programs of version 3.0 make, byte for byte as they make it.

``CLIENT`` are those of mlbench-core 3.0 (client, tracker and command), ``DASHBOARD`` those of the
scripts of the original dashboard's pages: jQuery with a form, a token against forged requests, and
empty parameters."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from mlbench_master import create_app
from tests.master.helpers import IdleContainers, TestClient, wait_for

DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
JQUERY = {
    "Accept": "application/json, text/javascript, */*; q=0.01",
    "Content-Type": "application/x-www-form-urlencoded; charset=UTF-8",
    "Origin": "http://127.0.0.1:5080",
    "Referer": "http://127.0.0.1:5080/runs/1",
    "X-CSRFToken": "x" * 64,
    "X-Requested-With": "XMLHttpRequest",
}
PYTHON = {
    "User-Agent": "python-requests/2.22.0",
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate",
}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """A master with a run of two workers, which has started, and some metrics of it and of its
    first worker."""
    app = create_app(data_dir=tmp_path, engine=IdleContainers())
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        form = {
            "name": "r",
            "num_workers": 2,
            "custom_image_command": "true",
            "image_name": "custom_image",
        }
        assert (
            test_client.post("/api/runs/", data={**form, "custom_image_name": "i"}).json()["id"]
            == 1
        )
        wait_for(lambda: test_client.get("/api/runs/1/").json()["state"] == "started")
        for name, owner in (
            ("train_loss @ 0", {"run_id": "1"}),
            ("cpu", {"pod_name": "r-worker-0"}),
        ):
            for second in range(4):
                metric = {
                    "name": name,
                    "value": str(second),
                    "date": f"2020-01-01 12:00:0{second}",
                    "metadata": "",
                }
                assert (
                    test_client.post("/api/metrics/", data={**owner, **metric}).status_code == 201
                )
        yield test_client


def form(**fields: str) -> bytes:
    return urlencode(fields).encode()


def ends_in(*values: str) -> Any:
    """Check that the only metric has these values, and entries of exactly three fields."""

    def check(answer: Any) -> bool:
        ((name, entries),) = answer.json().items()
        assert all(set(entry) == {"date", "value", "cumulative"} for entry in entries)
        assert all(DATE.fullmatch(entry["date"]) for entry in entries)
        return name in ("train_loss @ 0", "cpu") and [entry["value"] for entry in entries] == list(
            values
        )

    return check


def is_zip(answer: Any) -> bool:
    names = zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
    return (
        answer.headers["content-type"] == "application/zip"
        and "result_train_loss @ 0.json" in names
    )


def is_all(answer: Any) -> bool:
    metrics = answer.json()
    return set(metrics) == {"run_metrics", "pod_metrics"} and set(metrics["run_metrics"]) == {"r"}


def is_runs(answer: Any) -> bool:
    return [(run["id"], run["state"]) for run in answer.json()] == [(1, "started")]


def is_run(answer: Any) -> bool:
    run = answer.json()
    return (run["job_id"], run["num_workers"]) == ("idle-1", 2) and DATE.fullmatch(
        run["created_at"]
    ) is not None


def is_pods(answer: Any) -> bool:
    pods = answer.json()
    assert [set(pod) for pod in pods] == [{"name", "labels", "phase", "ip"}] * 2
    return [json.loads(pod["labels"])["component"] for pod in pods] == ["worker"] * 2


def is_entry(**wanted: Any) -> Any:
    return lambda answer: {name: answer.json()[name] for name in wanted} == wanted


METRIC = {
    "name": "val_Prec@1 @ 0",
    "cumulative": "False",
    "value": "91.25",
    "metadata": '{"rank": 0, "epoch": 3}',
}
RUN = {
    "name": "new-run",
    "num_workers": "2",
    "num_cpus": "2.0",
    "max_bandwidth": "1000",
    "gpu_enabled": "false",
    "light_target": "true",
}
OFFICIAL = "mlbench/pytorch-cifar10-resnet20-all-reduce:latest"

# Method, address, body, status, and a check of the answer.
CLIENT = [
    ("GET", "/api/metrics/", b"", 200, is_all),
    ("GET", "/api/metrics/1/?metric_type=run", b"", 200, ends_in("0", "1", "2", "3")),
    ("GET", "/api/metrics/1/?since=2020-01-01+12%3A00%3A02&metric_type=run", b"", 200,
     ends_in("2", "3")),
    ("GET", "/api/metrics/1/?since=2020-01-01+12%3A00%3A02.500000&metric_type=run", b"", 200,
     ends_in("3")),
    ("GET", "/api/metrics/1/?since=2020-01-01+12%3A00%3A02%2B00%3A00&metric_type=run", b"", 200,
     ends_in("2", "3")),
    ("GET", "/api/metrics/1/?since=2020-01-01T12%3A00%3A03.000000Z&metric_type=run", b"", 200,
     ends_in("3")),
    ("GET", "/api/metrics/1/?summarize=2&metric_type=run", b"", 200, ends_in("0.5", "2.5")),
    ("GET", "/api/metrics/1/?metric_filter=train_loss+%40+0&last_n=1&metric_type=run", b"", 200,
     ends_in("3")),
    ("GET", "/api/metrics/1/?metric_filter=none&metric_type=run", b"", 200,
     lambda answer: answer.json() == {}),
    ("GET", "/api/metrics/r-worker-0/?metric_type=pod", b"", 200, ends_in("0", "1", "2", "3")),
    ("GET", "/api/metrics/r-worker-0/?since=2020-01-01+12%3A00%3A02&summarize=1&metric_type=pod",
     b"", 200,
     ends_in("2.5")),
    ("GET", "/api/metrics/1/?format=zip&metric_type=run", b"", 200, is_zip),
    ("GET", "/api/metrics/1/?since=2020-01-01+12%3A00%3A02&summarize=9&format=zip&metric_type=run",
     b"", 200, is_zip),
    ("POST", "/api/metrics/", form(run_id="1", date="2020-01-01 12:00:00.250000", **METRIC), 201,
     is_entry(run_id=1, value="91.25", cumulative=False, date="2020-01-01T12:00:00.250000Z",
              metadata='{"rank": 0, "epoch": 3}')),
    ("POST", "/api/metrics/", form(run_id="1", date="2020-01-01 13:00:00+01:00", **METRIC), 201,
     is_entry(date="2020-01-01T12:00:00.000000Z")),
    ("POST", "/api/metrics/", form(run_id="1", name="TaskResult @ 0", cumulative="False",
     metadata="", value="yes"),
     201, is_entry(value="yes", metadata="")),
    ("POST", "/api/metrics/", form(pod_name="r-worker-1", name="cpu", cumulative="True",
     value="nan", metadata=""), 201,
     is_entry(pod_name="r-worker-1", value="nan", cumulative=True)),
    ("POST", "/api/metrics/", form(run_id="99", **METRIC), 404, is_entry(status="Not Found")),
    ("GET", "/api/runs/", b"", 200, is_runs),
    ("GET", "/api/runs/1/", b"", 200, is_run),
    ("GET", "/api/runs/99/", b"", 404, is_entry(status="Not Found")),
    ("DELETE", "/api/runs/1/", b"", 204, lambda answer: answer.content == b""),
    ("DELETE", "/api/runs/99/", b"", 404, is_entry(status="Not Found")),
    ("GET", "/api/pods/", b"", 200, is_pods),
    ("POST", "/api/runs/", form(**RUN, image_name=OFFICIAL, backend="mpi", run_all_nodes="True"),
     201,
     is_entry(name="new-run", image=OFFICIAL, backend="mpi", light_target=True, gpu_enabled=False,
     num_cpus=2.0)),
    ("POST", "/api/runs/", form(**RUN, image_name="custom_image", custom_image_name="a/b",
     backend="custom_backend",
                                custom_image_command="/main.py", custom_backend="b",
                                run_all_nodes="False"), 201,
     is_entry(image="a/b", backend="b", run_all_nodes=False, command="/main.py --light",
     state="initialized")),
    ("POST", "/api/runs/", form(**{**RUN, "name": "Not a label"}, image_name=OFFICIAL,
     backend="gloo"), 400,
     is_entry(status="Bad Request")),
    ("POST", "/api/runs/", form(**{**RUN, "name": "r"}, image_name=OFFICIAL, backend="gloo"), 409,
     is_entry(status="Conflict")),
]  # fmt: skip
DASHBOARD = [
    ("GET", "/api/metrics/r-worker-0/?metric_type=pod&since=2020-01-01T12:00:02.000Z"
     "&summarize=100&_=158000000000",
     b"", 200, ends_in("2", "3")),
    ("GET", "/api/metrics/r-worker-0/?since=&summarize=&metric_filter=&last_n=", b"", 200,
     ends_in("0", "1", "2", "3")),
    ("GET", "/api/metrics/r-worker-0/?since=2020-01-01 12:00:03", b"", 200, ends_in("3")),
    ("GET", ("/api/metrics/r-worker-1/?since=2020-01-01 "
            "12:00:03"), b"", 200, lambda answer: answer.json() == {}),
    ("GET", "/api/metrics/1/?metric_type=run&since=2020-01-01T12:00:01.000000Z&summarize=2", b"",
     200,
     ends_in("1.5", "3")),
    ("GET", "/api/metrics/1/?metric_type=run&format=json", b"", 200, ends_in("0", "1", "2", "3")),
    ("GET", "/api/metrics/1.zip?metric_type=run", b"", 200, is_zip),
    ("GET", "/api/metrics/1?metric_type=run&format=zip", b"", 200, is_zip),
    ("GET", "/api/runs/?format=json", b"", 200, is_runs),
    ("GET", "/api/runs.json", b"", 200, is_runs),
    ("GET", "/api/runs/1", b"", 200, is_run),
    ("GET", "/api/pods/?format=json&_=1580000000000", b"", 200, is_pods),
    ("GET", "/api/pods.json", b"", 200, is_pods),
    ("POST", "/api/runs/", form(**RUN, image_name=OFFICIAL, custom_image_name="",
     custom_image_command="",
                                custom_backend="", backend="gloo", run_all_nodes="false"), 201,
     is_entry(run_all_nodes=True)),
    ("POST", "/api/runs/", form(**RUN, image_name=OFFICIAL, custom_image_name="",
     custom_image_command="",
                                custom_backend="", backend="gloo", csrfmiddlewaretoken="x"), 201,
     is_entry(image=OFFICIAL, backend="gloo", run_all_nodes=True)),
    ("POST", "/api/runs", form(**RUN, image_name=OFFICIAL, backend="GLOO"), 201,
     is_entry(backend="gloo")),
    ("DELETE", "/api/runs/1/", form(csrfmiddlewaretoken="x"), 204,
     lambda answer: answer.content == b""),
]  # fmt: skip


REQUESTS = [(PYTHON, *item) for item in CLIENT] + [(JQUERY, *item) for item in DASHBOARD]
WRITES = [item for item in REQUESTS if item[1] != "GET"]


def check_answer(client: Any, headers: dict[str, str], request: list[Any]) -> None:
    method, address, body, status, check = request
    kind = (
        {"Content-Type": "application/x-www-form-urlencoded"} if body and headers is PYTHON else {}
    )
    answer = client.request(method, address, content=body, headers={**headers, **kind})
    assert answer.status_code == status, (request, answer.text)
    assert check(answer), (request, answer.text)


def test_what_is_read_has_the_form_of_3_0(client: Any) -> None:
    for headers, *request in REQUESTS:
        if request[0] == "GET":
            check_answer(client, headers, request)


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_what_is_written_is_taken_as_by_3_0(client: Any, number: int) -> None:
    headers, *request = WRITES[number]
    check_answer(client, headers, request)
