"""The main page and the page of a worker, as the master renders them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlbench_master import create_app
from mlbench_master.database.store import NewMetric, Run, Store, new_run, pod_owner
from mlbench_master.dates import now_us
from tests.master.helpers import IdleEngine, TestClient

MACHINE = '{"network": "machine"}'


class Engine(IdleEngine):
    """An engine with a log of two workers."""

    capacity = 8.0  # type: ignore[assignment]

    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> Any:
        texts = ((0, "of rank 0"), (1, "<b>of rank 1</b>"), (None, "of the master"))
        return [
            {"rank": rank, "stream": "stdout", "text": text, "date": "now"} for rank, text in texts
        ]

    def log_end(self, job_id: str) -> int:
        return 3

    def logs(self, job_id: str, *lines: Any) -> Any:
        page = super().logs(job_id, *lines)
        return type(page)(page.lines, 3)


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = create_app(database_url="sqlite://", engine=Engine())
    with TestClient(app, base_url="http://127.0.0.1:5080") as made:
        yield made


def add(
    client: TestClient, name: str, workers: int = 2, state: str = "started", **columns: Any
) -> Run:
    store: Store = client.app.state.store  # type: ignore[attr-defined]
    values = {
        "num_cpus": 1.5,
        "max_bandwidth": 1.0,
        "image": "",
        "backend": "gloo",
        "command": "true",
        **columns,
    }
    run = store.add_run(new_run(name=name, num_workers=workers, **values))
    ended = None if state == "started" else now_us()
    job_id = f"idle-{run.id}"
    changed = store.update_run(
        run.id, state=state, job_id=job_id, started_at=run.created_at, finished_at=ended
    )
    assert changed is not None
    return changed


def send(client: TestClient, pod: str, extra: str = "", **load: Any) -> None:
    metrics = [
        NewMetric(pod_owner(pod), name, now_us(), str(value), extra=extra)
        for name, value in load.items()
    ]
    client.app.state.store.add_metrics(metrics)  # type: ignore[attr-defined]


def figures(html: str) -> dict[str, str]:
    """Title with its note, and value, of each figure."""
    found = re.findall(
        r"data-metric=\"\w+\">\s*<dt>(.*?)</dt>\s*<dd><span class=\"value\">(.*?)</span>",
        html,
        re.S,
    )
    return {re.sub(r"<.*?>", "", title).strip(): value for title, value in found}


def test_the_main_page_shows_the_load_of_the_workers_that_run(client: TestClient) -> None:
    add(client, "running")
    add(client, "ended", state="finished")
    send(client, "running-worker-1", cpu=123.4, memory=2_500_000, network_in=1000, gpu=7)
    send(client, "running-worker-1", MACHINE, network_out=999)
    send(client, "ended-worker-0", cpu=1)
    html = client.get("/").text
    assert re.findall(r'href="/workers/(.*?)/"', html) == ["running-worker-0", "running-worker-1"]
    first, second = html.split("running-worker-1", 1)
    assert figures(first) == dict.fromkeys(("CPU", "Memory", "Network in", "Network out"), "-")
    wanted = {"CPU": "123 %", "Memory": "2.5 MB", "GPU": "7 %", "Network in": "1 KB/s"}
    assert figures(second) == {**wanted, "Network out machine": "999 B/s"}
    assert "<dd>3 of 8</dd>" in html and "1 running, 0 waiting" in html


def test_an_empty_main_page_says_what_to_do(client: TestClient) -> None:
    html = client.get("/").text
    assert "mlbench run my-run 2" in html and 'href="/runs/new/"' in html
    assert html.count('class="empty"') == 3


def test_the_main_page_shows_50_of_the_runs_that_wait(client: TestClient) -> None:
    client.app.state.scheduler.close()  # type: ignore[attr-defined]  # it would start some of them
    add(client, "running")
    for number in range(60):
        add(client, f"waiting-{number}", state="initialized")
    html = client.get("/").text
    assert "1 running, 60 waiting" in html and "50 of 61 runs are shown here." in html
    assert html.count("<li data-run=") == 50


def test_a_run_of_4096_workers_makes_no_page_of_megabytes(client: TestClient) -> None:
    add(client, "wide", workers=4096)
    html = client.get("/").text
    assert len(html) < 200_000
    assert html.count('class="worker"') == 32
    assert "The first 32 of 4096 workers are shown." in html
    assert 'href="/workers/wide-worker-1/" rel="next"' in client.get("/workers/wide-worker-0/").text
    last = client.get("/workers/wide-worker-4095/").text
    assert 'href="/workers/wide-worker-4094/" rel="prev"' in last and 'rel="next"' not in last


def test_a_worker_has_its_load_and_its_own_log(client: TestClient) -> None:
    run = add(client, "running")
    html = client.get("/workers/running-worker-1/").text
    assert "Nothing has been measured yet." in html
    assert figures(html) == dict.fromkeys(("CPU", "Memory", "Network in", "Network out"), "-")
    assert (
        "&lt;b&gt;of rank 1&lt;/b&gt;" in html
        and "of rank 0" not in html
        and "of the master" not in html
    )
    assert f'href="/runs/{run.id}/"' in html and 'data-next="3"' in html
    send(client, "running-worker-1", cpu="<b>", memory=1)
    html = client.get("/workers/running-worker-1/").text
    assert figures(html)["CPU"] == "-" and "Last measured" in html


def test_a_command_is_text(client: TestClient) -> None:
    add(client, "running", command="<script>alert(1)</script>")
    assert "<script>alert" not in client.get("/").text


@pytest.mark.parametrize(
    "name",
    [
        "running",
        "running-worker-2",
        "running-worker-01",
        "running-worker--1",
        "other-worker-0",
        "%00",
        "<b>",
    ],
)
def test_a_worker_that_does_not_exist_is_not_found(client: TestClient, name: str) -> None:
    add(client, "running")
    answer = client.get(f"/workers/{name}/")
    assert answer.status_code == 404 and "there is no worker" in answer.json()["message"]
