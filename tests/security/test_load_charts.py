"""The charts of the load of workers, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.master.helpers import server, wait_for
from tests.security.browser import chromium

CHARTS = "document.querySelectorAll('.load canvas').length"
# It ends by itself, so that a test that fails leaves nothing behind for long.
BUSY = (
    "import os, time\nfor _ in range(3000):\n    "
    "print('<i>line</i>', flush=True)\n    time.sleep(0.1)\n"
)


def test_charts_of_workers_grow_and_survive_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_LOAD_INTERVAL_S", "0.2")
    script = tmp_path / "busy.py"
    script.write_text(BUSY)

    def start(name: str, workers: int) -> Any:
        body = {
            "name": name,
            "num_workers": workers,
            "num_cpus": 0.1,
            "command": f"python {script}",
        }
        return httpx.post(f"{base}/api/runs/", json=body).json()["id"]

    with server(tmp_path / "data") as (base, _), chromium(tmp_path / "profile") as browser:
        page = browser.open(base)
        wait_for(lambda: "mlbench run" in page.text("#open"), what="the empty page")
        first = start("first", 2)
        wait_for(lambda: page(CHARTS) == 8, what="four charts of each worker")
        memory = "#load-first-worker-1-memory"
        wait_for(lambda: page.text(f"{memory} .value").endswith("MB"), what="a value with its unit")
        assert "machine" in page.text("#load-first-worker-0-network_in dt")
        # Another run changes the lists of the page, but not the charts that are there.
        page(f"document.querySelector('{memory} canvas').mark = 1")
        page("(window.link = document.querySelector('#open a')).focus()")
        second = start("second", 1)
        wait_for(
            lambda: page(CHARTS) == 12 and "second" in page.text("#open"),
            what="the charts of the second run",
        )
        assert page(f"document.querySelector('{memory} canvas').mark") == 1
        # The link in the new list has the focus of the old one.
        assert page("[link.isConnected, document.activeElement.textContent]") == [False, "first"]
        page(f"document.querySelector('{memory} .value').textContent = 'old'")
        wait_for(lambda: page.text(f"{memory} .value") != "old", what="a new value")

        whole = browser.open(f"{base}/runs/{first}/")
        wait_for(lambda: whole(CHARTS) == 8, what="the charts on the page of the run")
        one = browser.open(f"{base}/workers/first-worker-0/")
        wait_for(lambda: one(CHARTS) == 4, what="the charts of one worker")
        wait_for(lambda: one.text("#log").count("<i>line</i>") > 10, what="lines of the log")
        httpx.post(f"{base}/api/runs/{first}/stop/")
        wait_for(lambda: one.text("#state") == "Stopped", what="the end on the page of the worker")
        wait_for(
            lambda: page(CHARTS) == 4 and "first" in page.text("#latest"),
            what="the end on the main page",
        )
        assert (one(CHARTS), whole(CHARTS)) == (4, 8)
        httpx.post(f"{base}/api/runs/{second}/stop/")
