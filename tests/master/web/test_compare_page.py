"""The page that compares runs: the table of the command, notes on every other run, figures, and a
page that is live."""

from __future__ import annotations

import html
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mlbench_cli._records import compare_records, from_master
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.table import cell
from mlbench_master import create_app
from mlbench_master.database.store import NewMetric, Run, new_run, run_owner
from mlbench_master.runs.result_files import RESULT_METRIC
from mlbench_master.web import figures
from mlbench_master.web.compare_page import MOST_RUNS
from tests.cli.fake_master import summary
from tests.master.helpers import IdleEngine, TestClient, server, wait_for
from tests.results.helpers import GOAL, write_run
from tests.security.browser import chromium

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path / "data", engine=IdleEngine())
    app.state.scheduler.start = lambda: None
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


class Master:
    """Adds runs to the database of a master."""

    def __init__(self, client: Any, folder: Path) -> None:
        self.client = client
        self.store = client.app.state.store
        self._folder = folder

    def add(self, name: str, state: str = "finished", **metrics: str) -> int:
        """Add a run with some metrics of its first worker; its id."""
        values = {
            "num_cpus": 1.0,
            "max_bandwidth": 1000.0,
            "image": "i",
            "backend": "gloo",
            "command": "train.py",
        }
        run: Run = self.store.add_run(new_run(name=name, num_workers=1, **values))
        self.send(run.id, **metrics)
        self.store.update_run(run.id, state=state)
        return run.id

    def add_result(self, name: str, **configuration: Any) -> int:
        """Add a finished run with the result of a run that never ran; its id."""
        return self.add(name, result=self.result(name, **configuration))

    def result(self, name: str, **configuration: Any) -> str:
        folder = write_run(self._folder / name.strip("</>()"), **{"workers": 1, **configuration})
        return (folder / "result.json").read_text()

    def send(self, run_id: int, **metrics: str) -> None:
        new = [
            NewMetric(run_owner(run_id), f"{name} @ 0", 1, value) for name, value in metrics.items()
        ]
        self.store.add_metrics(new)

    def of_the_command(self, ids: Sequence[int], *options: Any) -> Any:
        """The comparison of 'mlbench compare NAME...'."""
        runs = [self.client.get(f"/api/runs/{run_id}/").json() for run_id in ids]
        metrics = lambda run_id, last_n: self.client.get(  # noqa: E731
            f"/api/metrics/{run_id}/", params={"metric_type": "run", "last_n": last_n}
        ).json()
        return compare_records(from_master(SimpleNamespace(metrics=metrics), runs), *options)[1]  # type: ignore[arg-type]


@pytest.fixture
def master(client: Any, tmp_path: Path) -> Master:
    return Master(client, tmp_path / "runs")


@pytest.fixture
def four(master: Master) -> list[int]:
    """Two repeats of two algorithms; adam takes half the time."""
    return [
        master.add_result(f"{name}-{seed}", algorithm=name, seed=seed, epoch_s=epoch_s + seed)
        for name, epoch_s in (("adam", 5.0), ("sgd", 10.0))
        for seed in (1, 2)
    ]


def address(ids: Sequence[object], path: str = "/compare/", **more: str) -> str:
    return f"{path}?{httpx.QueryParams([*(('run', str(one)) for one in ids), *more.items()])}"


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table of the page."""
    return [
        [
            html.unescape(re.sub(r"<[^>]*>", "", cell)).strip()
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)
        ]
        for row in re.findall(r"<tr.*?</tr>", text, re.S)
    ]


def test_the_table_is_that_of_the_command(client: Any, master: Master, four: list[int]) -> None:
    # A run that sent only what version 3.0 does has its own row.
    ids = [*four, master.add("old", summary=json.dumps(summary(1, 80.0, 8.0)))]
    table = master.of_the_command(ids)
    assert [row["names"] for row in table.rows] == [
        ["adam-1", "adam-2"],
        ["sgd-1", "sgd-2"],
        ["old"],
    ]
    answer = client.get(address(ids, "/compare/table.csv"))
    assert answer.text == table.as_csv() and answer.headers["content-type"].startswith("text/csv")
    machine = load_prices()["gcp-n1-standard-4"]
    table = master.of_the_command(four, Pricing(machine), "sgd")
    options = {"machine": machine.name, "baseline": "sgd"}
    assert client.get(address(four, "/compare/table.md", **options)).text == table.as_markdown()
    assert client.get(address(four, "/compare/table.json", **options)).json() == table.as_json()
    text = client.get(address(four, **options)).text
    shown = rows(text)
    for columns, of_table in table.tables():
        assert [column.header for column in columns] in shown
        for row in of_table:
            assert [cell(column, row) for column in columns] in shown
    assert len(table.tests) == 1 and "19.50" in text
    assert all(note in html.unescape(text) for note in table.notes())
    for path in ("/compare/figures/", "/compare/table.csv"):
        assert f'"{html.escape(address(four, path, baseline="sgd", machine=machine.name))}"' in text
    assert "<option selected>sgd</option>" in text and f'value="{machine.name}" selected' in text


def test_a_label_that_is_no_baseline_any_more_does_not_hide_the_table(
    client: Any, four: list[int]
) -> None:
    assert "19.50" in client.get(address(four, baseline="gone")).text


def test_every_run_without_a_row_or_without_times_has_its_reason(
    client: Any, master: Master, four: list[int]
) -> None:
    runs = {
        "waits": master.add("waits", "initialized"),
        "trains": master.add("trains", "started"),
        "broke": master.add("broke", "failed"),
        "plain": master.add("plain"),
        "odd": master.add("odd", result='{"schema_version": 7}'),
        "deep": master.add("deep", result="[" * 100_000),
        "numbers": master.add(
            "numbers", summary='{"workers": "x", "total_s": {"train": [1]}, "goal_reached": {}}'
        ),
    }
    shown = {
        row[0]: row
        for row in rows(client.get(address([*four, *runs.values()])).text)
        if row[0] in runs
    }
    assert shown["waits"][1:3] == ["initialized", "Queued: it joins when it ends."]
    assert shown["trains"][2] == "Running: it joins when it ends."
    assert shown["broke"][2] == "broke has the state 'failed': left out."
    assert (
        shown["plain"][2]
        == "plain sent no times, because its program does not use the Tracker: left out."
    )
    assert (
        shown["odd"][2] == "Its result cannot be read: it does not follow the schema of a result."
    )
    master.send(runs["trains"], result=master.result("trains", algorithm="rms"))
    master.store.update_run(runs["trains"], state="finished")
    text = client.get(address([*four, runs["trains"]])).text
    assert "rms, 1 worker" in text and "Running" not in text


def test_different_goals_are_refused_with_both_named(
    client: Any, master: Master, four: list[int]
) -> None:
    light = master.add_result("light", goal={**GOAL, "threshold": 85.0})
    answer = client.get(address([*four, light]))
    assert answer.status_code == 200
    text = html.unescape(answer.text)
    assert (
        "The runs must have the same goal, not 'Prec@1 >= 90' (adam-1) and 'Prec@1 >= 85' (light)"
        in text
    )
    assert f'<a href="{address(four)}">Compare the 4 with the goal Prec@1 >= 90</a>' in text
    answer = client.get(address([*four, light], "/compare/table.csv"))
    assert answer.status_code == 400 and "same goal" in answer.json()["message"]


def test_addresses_that_are_wrong_are_answered_with_a_sentence(
    client: Any, four: list[int]
) -> None:
    text = client.get(address([*four, 99, "x"])).text
    assert (
        "There is no run 99: it was deleted" in text
        and "There is no run x" in text
        and "19.50" in text
    )
    for path in ("/compare/table.csv", "/compare/figures/speedup.svg"):
        answer = client.get(address([*four, 99], path))
        assert answer.status_code == 404 and answer.json()["message"] == "run: there is no run '99'"
        assert client.get(address([], path)).status_code == 404
    answer = client.get(address(range(MOST_RUNS + 1)))
    assert (
        answer.status_code == 400
        and "at most 100 runs are compared, not 101" in answer.json()["message"]
    )
    assert "machine: must be one of" in client.get(address(four, machine="x")).json()["message"]
    assert (
        "must be one of csv, md, json"
        in client.get(address(four, "/compare/table.xls")).json()["message"]
    )


def test_runs_are_added_and_removed(client: Any, master: Master) -> None:
    assert "mlbench run my-run" in client.get("/compare/").text
    ids = [master.add(name) for name in ("a", "b", "c")]
    empty = client.get("/compare").text
    assert "No runs are chosen. Choose two or more." in empty and "<details open>" in empty
    text = client.get(address(ids[:2])).text
    assert re.findall(r'<option value="(\d+)">', text) == [str(ids[2])]
    assert f'<a href="{address(ids[1:2])}" aria-label="Remove a from the comparison">' in text


def test_names_and_settings_are_text(client: Any, master: Master) -> None:
    ids = [
        master.add_result(HOSTILE, algorithm=HOSTILE),
        master.add_result("other", algorithm="=1+1"),
    ]
    text = client.get(address(ids, baseline=HOSTILE)).text
    assert HOSTILE not in text and html.escape(HOSTILE) in text
    assert "\n'=1+1,1," in client.get(address(ids, "/compare/table.csv")).text
    assert "<script>alert" not in client.get(address(ids, "/compare/table.md")).text


def test_figures_are_drawn_once_and_served_as_files(
    client: Any, master: Master, four: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the [charts] extra")
    # Somebody else may have put a module where the master was started.
    (tmp_path / "matplotlib.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    ids = [*four, master.add_result("bad", algorithm=HOSTILE)]
    page = client.get(address(ids, "/compare/figures/")).text
    monkeypatch.setattr(subprocess, "run", None)  # everything else comes from memory
    assert client.get(address(ids, "/compare/figures/")).text == page
    assert HOSTILE not in page and "Task 1a (digits)" in page
    found = re.findall(r'<img src="([^"]*)" alt="([^"]*)"', page)
    assert len(found) >= 3 and found[0][1].startswith("Training time by phase. Task 1a")
    for source, _ in found:
        answer = client.get(html.unescape(source))
        assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml"
        assert "<svg" in answer.text and "<script" not in answer.text
        policy = set(answer.headers["content-security-policy"].split("; "))
        assert {"default-src 'none'", "frame-ancestors 'none'", "sandbox"} <= policy
    assert client.get(address(ids, "/compare/figures/communication_share.png")).content.startswith(
        b"\x89PNG"
    )
    answer = client.get(address(ids, "/compare/figures/x.svg"))
    assert answer.status_code == 404 and "must be one of" in answer.json()["message"]
    assert len(figures._kept) <= figures._MOST_KEPT


def test_without_matplotlib_the_page_says_what_to_install(
    client: Any, four: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_master.web.compare_page.can_draw", lambda: False)
    assert "pip install" in client.get(address(four, "/compare/figures/")).text
    answer = client.get(address(four, "/compare/figures/speedup.svg"))
    assert answer.status_code == 404 and "mlbench-core[charts]" in answer.json()["message"]


def test_a_drawing_that_fails_or_must_wait_is_reported_and_not_kept(
    client: Any, four: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter(
        [
            figures.Figures(missing=["it failed"]),
            figures.Figures({"speedup": "x"}, {"speedup.svg": b"<svg/>"}),
        ]
    )
    monkeypatch.setattr(figures, "_kept", type(figures._kept)())
    monkeypatch.setattr("mlbench_master.web.compare_page.can_draw", lambda: True)
    with monkeypatch.context() as broken:
        broken.setattr(figures.sys, "executable", "/bin/false")
        assert (
            "The figures could not be drawn" in client.get(address(four, "/compare/figures/")).text
        )
    monkeypatch.setattr(figures, "_draw", lambda content: next(made))
    for _ in range(figures._MOST_WAITING):
        figures._turns.acquire()
    assert "is drawing other figures" in client.get(address(four, "/compare/figures/")).text
    figures._turns.release(figures._MOST_WAITING)
    for expected in ("it failed", "speedup.svg", "speedup.svg"):
        assert expected in client.get(address(four, "/compare/figures/")).text


def test_the_page_follows_runs_until_they_end(tmp_path: Path) -> None:
    goes_on = tmp_path / "goes_on"
    goes_on.touch()
    wait = f"import os, time\nwhile os.path.exists({str(goes_on)!r}): time.sleep(0.05)\n"
    (tmp_path / "wait.py").write_text(wait)
    # Drawing would only take time.
    setup = "import mlbench_master.web.compare_page as page; page.can_draw = lambda: False"
    with (
        chromium(tmp_path / "profile") as browser,
        server(tmp_path / "data", setup=setup) as (base, _),
    ):
        ids = []
        for name in ("first", "second"):
            body = {
                "name": name,
                "num_workers": 1,
                "num_cpus": 0.5,
                "command": f"python {tmp_path / 'wait.py'}",
            }
            ids.append(httpx.post(f"{base}/api/runs/", json=body).json()["id"])
        page = browser.open(f"{base}{address(ids)}")
        wait_for(lambda: page.text("#compared").count("Running") == 2, what="both runs")
        assert "No chosen run has a result yet" in page.text("#comparison")
        wait_for(lambda: "have sent no metrics yet" in page.text("#curves"), what="the script")

        def send(name: str, values: Sequence[float | str]) -> None:
            items = [
                {
                    "run_id": run_id,
                    "name": name,
                    "value": value,
                    "date": f"2030-01-01T00:00:{second:02d}",
                }
                for run_id in ids
                for second, value in enumerate(values)
            ]
            assert httpx.post(f"{base}/api/metrics/", json=items).status_code == 201

        send("train_loss @ 0", [3.0, 2.0, 1.0])
        wait_for(
            lambda: page("document.querySelectorAll('#curves canvas').length") == 1,
            what="the chart",
        )
        assert "first" in page.text("#curves") and "second" in page.text("#curves")
        assert page("document.getElementById('metric').value") == "train_loss @ 0"
        result = (write_run(tmp_path / "r" / "result", workers=1) / "result.json").read_text()
        send(RESULT_METRIC, [result])
        goes_on.unlink()
        wait_for(lambda: "MEAN (s)" in page.text("#comparison"), what="the table")
        wait_for(lambda: "centralized_sgd, 1 worker" in page.text("#compared"), what="the rows")
        baselines = ["every", "pair", "centralized_sgd"]
        wait_for(lambda: page.text("#baseline").split() == baselines, what="the baselines")
        wait_for(
            lambda: (
                "The figures need matplotlib" in page.text("#figures")
                and not page("document.getElementById('figures-card').hidden")
            ),
            what="the figures",
        )
        httpx.delete(f"{base}/api/runs/{ids[0]}/")
        wait_for(
            lambda: f"There is no run {ids[0]}: it was deleted" in page.text("#unknown"),
            what="the sentence",
        )
        httpx.delete(f"{base}/api/runs/{ids[1]}/")
        wait_for(lambda: "No runs are chosen" in page.text("main"), what="the page of no runs")
