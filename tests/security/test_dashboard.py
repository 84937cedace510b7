"""The dashboard in a real browser: many tabs, a master that goes away, and a log that is neither
doubled nor lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.master.helpers import server, wait_for
from tests.security.browser import Browser, Page, chromium

HEADERS = {"Authorization": "Bearer sesame"}
TALK = """import time, sys
for n in range(10_000):
    print("line", n, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as opened:
        yield opened


def log_in(browser: Browser, base: str) -> Page:
    page = browser.open(f"{base}/login/")
    wait_for(lambda: page("!!document.querySelector('input[name=token]')"), what="the login page")
    page(
        "document.querySelector('input[name=token]').value = 'sesame'; "
        "document.querySelector('form').submit()"
    )
    wait_for(
        lambda: page("location.pathname === '/' && !!document.querySelector('main')"),
        what="the login",
    )
    return browser.open(f"{base}/runs/")


def talking(base: str, folder: Path, name: str = "talks") -> dict[str, Any]:
    script = folder / "talk.py"
    script.write_text(TALK)
    body = {"name": name, "num_workers": 1, "command": f"python {script}"}
    made: dict[str, Any] = httpx.post(f"{base}/api/runs/", json=body, headers=HEADERS).json()
    return made


def numbers(page: Page) -> list[int]:
    texts = page("[...document.querySelectorAll('#log .text')].map((part) => part.textContent)")
    return [int(text.split()[1]) for text in texts if text.startswith("line ")]


def test_twelve_tabs_share_one_stream_and_follow_a_run(tmp_path: Path, browser: Browser) -> None:
    with server(tmp_path / "data", "--token", "sesame") as (base, _):
        first = log_in(browser, base)
        run = talking(base, tmp_path)
        wait_for(lambda: first.text("#runs tr[data-run] .state") == "started", what="the new row")
        tabs = [browser.open(f"{base}/runs/{run['id']}/") for _ in range(11)]
        for tab in tabs:
            wait_for(lambda tab=tab: len(numbers(tab)) > 3, what="lines in every tab")
            assert tab.text("#metrics .empty") == "No metrics yet."
        httpx.post(
            f"{base}/api/metrics/",
            json={"run_id": run["id"], "name": "<i>loss", "value": "<b>1"},
            headers=HEADERS,
        )
        for tab in tabs:
            wait_for(
                lambda tab=tab: tab.text("#metrics tbody td") == "<b>1",
                what="the metric in every tab",
            )
            assert tab.text("#metrics tbody th") == "<i>loss" and tab.text("#metrics .empty") == ""
        sent = (
            ("goal @ 0", '{"reached": true, "time_to_goal_s": 1.5}'),
            ("result @ 0", '{"schema_version": 1}'),
        )
        items = [{"run_id": run["id"], "name": name, "value": value} for name, value in sent]
        httpx.post(f"{base}/api/metrics/", json=items, headers=HEADERS)
        for tab in (first, *tabs):
            wait_for(
                lambda tab=tab: "reached in 1.5 s" in tab.text("main"), what="the goal in every tab"
            )
        wait_for(lambda: tabs[0].text("#result a") == "result.json", what="the link to the result")
        assert "schema_version" not in tabs[0].text("#metrics")
        # The connections that are left serve the buttons.
        tabs[10](
            "window.confirm = () => true; document.querySelector('[data-post$=\"/stop/\"]').click()"
        )
        for tab in tabs:
            wait_for(
                lambda tab=tab: (
                    tab.text("#state") == "stopped" and "stopped by a user" in tab.text("#facts")
                ),
                what="the end in every tab",
            )
        seen = numbers(tabs[0])
        assert seen == list(range(seen[0], seen[-1] + 1))


def test_a_page_catches_up_after_the_master_was_away(tmp_path: Path, browser: Browser) -> None:
    data = tmp_path / "data"
    with server(data, "--token", "sesame") as (base, process):
        port = base.rsplit(":", 1)[1]
        log_in(browser, base)
        run = talking(base, tmp_path)
        page = browser.open(f"{base}/runs/{run['id']}/")
        wait_for(lambda: len(numbers(page)) > 3, what="lines")
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: "does not answer" in page.text("#live"), what="the notice")
    supervisor = next((data / "1").glob("supervisor.json"), None) or next(
        data.rglob("supervisor.json")
    )
    pid = int(re.search(r'"pid": (\d+)', supervisor.read_text())[1])  # type: ignore[index]
    before = numbers(page)[-1]
    with server(data, "--token", "sesame", "--port", port) as (base, _):
        wait_for(
            lambda: numbers(page)[-1] > before + 5 and page.text("#live") == "",
            what="new lines",
        )
        seen = numbers(page)
        assert seen == list(range(seen[0], seen[-1] + 1))
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: page.text("#state") == "failed", what="the end")

        def are_shown() -> bool:
            facts = page.text("#facts")
            return "stopped" in facts and bool(re.search(r"Finished\s*20\d\d-", facts))

        wait_for(are_shown, what="the reason and the date")


def test_a_page_goes_on_after_an_answer_that_cannot_be_shown(
    tmp_path: Path, browser: Browser
) -> None:
    with server(tmp_path / "data", "--token", "sesame") as (base, _):
        log_in(browser, base)
        run = talking(base, tmp_path)
        page = browser.open(f"{base}/runs/{run['id']}/")
        wait_for(lambda: page.text("#state") == "started", what="the start")
        time.sleep(1)  # the reading after the start is over
        page(
            "const read = XMLHttpRequest.prototype.getResponseHeader; "
            "XMLHttpRequest.prototype.getResponseHeader = function () { "
            "XMLHttpRequest.prototype.getResponseHeader = read; "
            "window.hasFailed = true; throw new Error('broken'); }"
        )
        httpx.post(f"{base}/api/runs/{run['id']}/stop/", headers=HEADERS)
        wait_for(lambda: page.text("#state") == "stopped", what="the end")
        assert page("window.hasFailed")


def test_the_log_of_the_page_and_of_the_events_fit_together(tmp_path: Path) -> None:
    """As the page's script joins them: each line has its number, and the page has that of the next
    line."""
    with server(tmp_path / "data", "--token", "sesame") as (base, _):
        run = talking(base, tmp_path)
        time.sleep(1)
        with httpx.stream("GET", f"{base}/api/events/", headers=HEADERS, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": connected"
            time.sleep(0.5)
            page = httpx.get(f"{base}/runs/{run['id']}/", headers=HEADERS).text
            following = int(re.search(r'data-next="(\d+)"', page)[1])  # type: ignore[index]
            shown = [int(number) for number in re.findall(r'class="text">line (\d+)<', page)]
            for line in lines:
                found = re.search(r'"line": (\d+), .*"text": "line (\d+)"', line)
                if found is None or int(found[1]) < following:
                    continue
                assert int(found[1]) == following
                following += 1
                shown.append(int(found[2]))
                if len(shown) > 60:
                    break
        assert shown == list(range(len(shown)))
        httpx.delete(f"{base}/api/runs/{run['id']}/", headers=HEADERS)
