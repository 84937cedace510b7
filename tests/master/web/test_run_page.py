"""The page of a run: its goal, phases, failure, metrics and workers as the server writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_master import create_app
from mlbench_master.engines import LogPage
from mlbench_master.runs.phases import MOST_EPOCHS
from tests.master.helpers import IdleEngine, TestClient, wait_for


class Failing(IdleEngine):
    """Says what two workers wrote before they ended."""

    def logs(self, *_: Any, **__: Any) -> LogPage:
        return LogPage([], 0)

    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[dict[str, Any]]:  # type: ignore[override]
        return [
            {"rank": rank, "stream": stream, "text": f"{stream} of {rank} <b>{number}", "date": ""}
            for rank in (1, 0)
            for stream in ("stdout", "stderr")
            for number in range(20)
        ]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path, engine=Failing(), token=None)
    with TestClient(app, base_url="http://127.0.0.1:5080") as opened:
        yield opened


def start(client: TestClient, **values: Any) -> int:
    body = {"name": "a", "num_workers": 2, "command": "python x.py", **values}
    answer = client.post("/api/runs/", json=body)
    assert answer.status_code == 201, answer.text
    run_id = int(answer.json()["id"])
    wait_for(lambda: client.get(f"/api/runs/{run_id}/").json()["state"] == "started")
    return run_id


def send(client: TestClient, run_id: int, *metrics: tuple[str, object], epoch: int = 0) -> None:
    items = [
        {
            "run_id": run_id,
            "name": name,
            "value": str(value),
            "metadata": {"rank": 0, "epoch": epoch},
        }
        for name, value in metrics
    ]
    assert client.post("/api/metrics/", json=items).status_code == 201


def page_of(client: TestClient, run_id: int, query: str = "") -> str:
    answer = client.get(f"/runs/{run_id}/{query}")
    assert answer.status_code == 200
    return answer.text


def part(page: str, element_id: str) -> str:
    """The text of an element, without tags and with single blanks."""
    found = re.search(rf'<(\w+)[^>]* id="{element_id}".*?</\1>', page, re.DOTALL)
    assert found is not None
    return " ".join(re.sub("<[^>]*>", " ", found[0]).split())


def test_the_best_value_and_the_epochs_show_the_way_to_the_goal(client: TestClient) -> None:
    run_id = start(client)
    assert "This run has no goal yet" in part(page_of(client, run_id), "goal")
    plan = {"metric": "val_global_Perplexity", "threshold": 70, "minimize": True, "max_epochs": 8}
    send(
        client, run_id, ("plan @ 0", json.dumps(plan)), ("CumulativeTrainTimeEpoch @ 0", 1), epoch=1
    )
    send(
        client,
        run_id,
        ("val_global_Perplexity @ 0", 100),
        ("val_global_Perplexity @ 0", "nan"),
        epoch=0,
    )
    send(client, run_id, ("val_global_Perplexity @ 0", 140), epoch=1)
    page = page_of(client, run_id)
    assert part(page, "goal").startswith(
        "Goal: Perplexity &lt;= 70 not reached yet best 100 of 70 2 of at most 8"
    )
    assert '<progress value="0.7" max="1"' in page and '<progress value="2" max="8"' in page
    assert 'data-metric="val_global_Perplexity" data-threshold="70.0"' in page


def test_a_run_that_counts_steps_shows_them_instead_of_epochs(client: TestClient) -> None:
    run_id = start(client)
    plan = {"metric": "val_loss", "threshold": 1.5, "minimize": True, "unit": "steps"}
    send(client, run_id, ("plan @ 0", json.dumps(plan)))
    send(client, run_id, ("val_loss @ 0", 3), epoch=1200)
    page = page_of(client, run_id)
    assert "best 3 of 1.5 1,200 steps" in part(page, "goal")
    assert 'data-unit="steps"' in page and '<option value="epoch">step</option>' in page
    goal = {**plan, "reached": True, "value": 1.4, "epochs": 1, "steps": 2400}
    send(client, run_id, ("goal @ 0", json.dumps(goal)), epoch=2400)
    assert "reached (2,400 steps)" in part(page_of(client, run_id), "goal")


@pytest.mark.parametrize("plan", ["", "[]", '{"metric": 3}', '{"threshold": NaN}', "x" * 10_000])
def test_a_metric_that_is_no_plan_is_no_goal(client: TestClient, plan: str) -> None:
    run_id = start(client)
    send(client, run_id, ("plan @ 0", plan))
    assert "This run has no goal yet" in part(page_of(client, run_id), "goal")


def test_the_goal_of_a_task_is_known_from_the_beginning(client: TestClient) -> None:
    run_id = start(client, command=None, task="1a")
    assert part(page_of(client, run_id), "goal") == "Goal: Prec@1 &gt;= 80 not reached yet"


def test_a_goal_of_a_fixed_time_shows_the_time_and_the_best_value(client: TestClient) -> None:
    run_id = start(client, command=None, task="1a", arguments=["--goal-after", "60"])
    assert (
        part(page_of(client, run_id), "goal")
        == "Goal: Prec@1 after 60 s of training not reached yet"
    )
    send(client, run_id, ("val_global_Prec@1 @ 0", 70), ("val_global_Prec@1 @ 0", 45), epoch=1)
    assert "not reached yet best 70 so far" in part(page_of(client, run_id), "goal")
    goal = {
        "metric": "val_global_Prec@1",
        "threshold": None,
        "minimize": False,
        "budget_s": 60.0,
        "reached": True,
    }
    goal |= {"value": 91.5, "time_to_goal_s": 63.25, "epochs": 3}
    send(client, run_id, ("goal @ 0", json.dumps(goal)))
    assert (
        part(page_of(client, run_id), "goal")
        == "Goal: Prec@1 after 60 s of training 91.5 after 63.2 s (3 epochs) 2 epochs"
    )


def test_more_cores_than_the_machine_has_are_a_note(client: TestClient) -> None:
    body = {"name": "many", "num_workers": 2, "num_cpus": 4096, "command": "python x.py"}
    (note,) = client.post("/api/runs/", json=body).json()["job_metadata"]["notes"]
    assert note.startswith("warning: 2 workers x 4096 cores want more than the ")


def test_a_failed_run_says_why_with_the_last_lines_of_the_failing_worker(
    client: TestClient,
) -> None:
    run_id = start(client)
    store = client.app.state.store  # type: ignore[attr-defined]
    store.update_run(run_id, {"reason": "worker 1 failed: exit status 1: <i>"}, state="failed")
    page = page_of(client, run_id)
    assert part(page, "why").startswith(
        "Failed: worker 1 failed: exit status 1: &lt;i&gt; Last lines of worker 1 stderr of"
    )
    shown = re.findall(r"(\w+) of (\d) &lt;b&gt;(\d+)", page[: page.index('id="goal"')])
    assert shown == [("stderr", "1", str(number)) for number in range(5, 20)]
    assert re.search(r"/stop/[^>]* disabled>", page)
    store.update_run(run_id, {"reason": "stopped by a user"})
    assert part(page_of(client, run_id), "why") == "Stopped by a user"


def test_phases_are_those_of_the_slowest_worker_and_hidden_communication_is_a_part_of_compute(
    client: TestClient,
) -> None:
    run_id = start(client)
    assert "No times yet" in part(page_of(client, run_id), "totals")
    for epoch, seconds in enumerate((10, 30)):
        send(
            client, run_id, ("cum_fwd_pass @ 0", seconds), ("cum_fwd_pass @ 1", 2 * seconds),
            ("cum_agg @ 0", 8),
            ("cum_agg @ 1", 1), ("cum_hidden_communication @ 0", seconds / 2),
             ("cum_validation @ 0", 3),
            ("cum_mine @ 0", epoch), epoch=epoch,
        )  # fmt: skip
    table = part(page_of(client, run_id), "times")
    # compute, hidden, communication, metrics, data, other, validation, sum
    assert "Slowest worker in each phase 45 15 8 0 0 1 3 72" in table
    assert "Worker 0 15 15 8 0 0 1 3 42" in table
    assert "Epoch 1 5 5 8 0 0 0 3 21 Epoch 2 10 10 0 0 0 1 0 21" in table
    send(client, run_id, *(("cum_agg @ 0", number) for number in range(MOST_EPOCHS + 50)), epoch=7)
    assert part(page_of(client, run_id), "times").count("Epoch ") == MOST_EPOCHS
    times = {"slowest": {"compute_s": 5, "data_s": "x", "wall_s": 9}, "rank_0": []}
    send(client, run_id, ("result @ 0", json.dumps({"times": times})))
    assert "Slowest worker in each phase 5 not measured" in part(page_of(client, run_id), "times")


def test_intervals_of_steps_and_what_was_not_measured(client: TestClient) -> None:
    run_id = start(client)
    plan = {"metric": None, "unit": "steps"}
    send(client, run_id, ("plan @ 0", json.dumps(plan)))
    for finished, seconds in ((1, 2), (16, 5)):
        send(client, run_id, ("cum_backprop @ 0", seconds), epoch=finished)
    times = {"compute_s": 5.0, "communication_s": 0.0, "data_s": None, "metrics_s": None}
    result = {
        "times": {"slowest": times, "rank_0": times},
        "exchanges": 16,
        "bytes_on_wire": {"rank_0": 72_000_000},
        "not_measured": ["data: no <DataLoader> was read"],
    }
    send(client, run_id, ("result @ 0", json.dumps(result)))
    page = page_of(client, run_id)
    assert "Worker 0, steps 1 to 16" in part(page, "phases")
    assert "Worker 0 sent 72 MB on the wire." in page
    assert "Not measured: data: no &lt;DataLoader&gt; was read." in page
    table = part(page, "times")
    assert "Slowest worker in each phase 5 0 0 not measured not measured 0 0 5" in table
    assert "Steps 1 to 1 2" in table and "Steps 2 to 16 3" in table


def test_names_and_values_are_text_and_long_ones_are_cut(client: TestClient) -> None:
    run_id = start(client)
    send(client, run_id, ("<script>alert(1)</script>", "<img src=x>"), ("long", "y" * 10_000))
    page = page_of(client, run_id)
    assert "<script>alert" not in page and "<img" not in page
    assert f"long {'y' * 200}... (10000 characters)" in part(page, "metrics")
    assert "y" * 201 not in page
    # Only numbers can be drawn.
    assert "<option" not in page[page.index('id="names"') : page.index('id="charts"')]


def test_many_metrics_are_a_part_and_a_filter(client: TestClient) -> None:
    run_id = start(client)
    send(
        client,
        run_id,
        *((f"layer{number} @ {rank}", number) for number in range(150) for rank in (0, 1)),
    )
    send(client, run_id, ("train_loss @ 0", 1), ("plain", 1))
    page = page_of(client, run_id)
    assert page.count("<tr data-name=") == 200
    assert "The first 200 of 302 metrics." in part(page, "metrics")
    page = page_of(client, run_id, "?filter=LAYER14")
    assert page.count("<tr data-name=") == 22 and "The first" not in part(page, "metrics")
    assert part(page_of(client, run_id, "?filter=%3Cb%3E"), "metrics").endswith(
        "No metric has this in its name."
    )
    names = re.findall(r'<option value="([^"]*)" data-ranks="([^"]*)">', page)
    assert (
        names[:2] == [("train_loss", "0"), ("layer0", "0 1")]
        and ("plain", "") in names
        and len(names) == 152
    )


def test_workers_have_their_load_and_the_configuration_is_that_of_the_result(
    client: TestClient,
) -> None:
    run_id = start(client)
    loads = [
        {"pod_name": "a-worker-1", "name": name, "value": value}
        for name, value in (("cpu", 93.72), ("memory", 5e8))
    ]
    assert client.post("/api/metrics/", json=loads).status_code == 201
    page = page_of(client, run_id)
    assert part(page, "workers").endswith(
        "rank 1 CPU 94 % Memory 500 MB Network in - Network out -"
    )
    assert "program python x.py" in part(page, "configuration")
    result = {
        "configuration": {"goal": {"metric": "<m>"}, "list": [1, "a"]},
        "software": {"torch": "2"},
        "machine": 3,
    }
    send(client, run_id, ("result @ 0", json.dumps(result)))
    page = page_of(client, run_id)
    assert "goal.metric &lt;m&gt; list 1 a" in part(page, "configuration")
    assert part(page, "environment") == "machine 3 software.torch 2"
    assert f"/api/runs/{run_id}/result/" in page


def test_a_curve_stays_when_its_latest_value_is_not_finite(client: TestClient) -> None:
    run_id = start(client)
    send(client, run_id, ("train_loss @ 0", 1), ("other @ 0", 1), ("text @ 0", "a b"))
    send(client, run_id, ("train_loss @ 0", "nan"), ("other @ 0", "-inf"))
    names = re.findall(r'<option value="([^"]*)" data-ranks', page_of(client, run_id))
    assert names == ["train_loss", "other"]


def test_the_page_says_that_a_run_waits_and_that_an_ended_one_left_no_log(
    client: TestClient,
) -> None:
    assert "waiting for its turn" not in page_of(client, start(client))
    body = {"name": "b", "num_workers": 2, "command": "python x.py"}
    waiting = client.post("/api/runs/", json=body).json()["id"]
    page = page_of(client, waiting)
    assert "waiting for its turn" in part(page, "about") and "has not written anything yet" in page
    client.post(f"/api/runs/{waiting}/stop/")
    page = page_of(client, waiting)
    assert "waiting for its turn" not in page and "This run has no log." in page
