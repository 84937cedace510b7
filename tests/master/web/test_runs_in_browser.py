"""The list of runs and the start form in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.master.helpers import server, wait_for
from tests.security.browser import Page, chromium

NAMES = "[...document.querySelectorAll('#runs tbody th')].map((head) => head.textContent).join()"
CHOSEN = (
    "[...document.querySelectorAll('#runs input:checked')].map((box) => "
    "box.getAttribute('aria-label')).join()"
)


def fill(page: Page, name: str, value: str) -> None:
    page(
        f"(() => {{ const field = document.querySelector('[name={name}]'); field.value = "
        f"{json.dumps(value)};"
        "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_runs_are_started_chosen_sorted_stopped_and_deleted(tmp_path: Path) -> None:
    with server(tmp_path / "data") as (base, _), chromium(tmp_path / "profile") as browser:
        page = browser.open(f"{base}/runs/new/")
        wait_for(
            lambda: page("!!document.querySelector('#start [data-of-task] optgroup[hidden]')"),
            what="the script",
        )
        # Only the fields of the chosen program are there.
        page("document.querySelector('[name=kind][value=command]').click()")
        assert page(
            "[...document.querySelectorAll('#start .for-task, #start "
            ".for-script')].every((f) => !f.offsetParent)"
        )
        for name, value in (
            ("name", "demo"),
            ("num_workers", "1 2"),
            ("num_cpus", "0.01"),
            ("command", "sleep 100"),
        ):
            fill(page, name, value)
        assert page.text("#preview") == "2 runs: demo-1, demo-2"
        page("document.querySelector('#start button').click()")
        # The list follows the events, and keeps the choice, the focus and the text that is being
        # typed.
        wait_for(lambda: page(NAMES) == "demo-2,demo-1", what="both runs")
        wait_for(
            lambda: page("document.querySelectorAll('#runs .state-started').length") == 2,
            what="their start",
        )
        # Without the regular reading for the growing duration, only events update the list.
        page(
            "(() => { const find = document.querySelector.bind(document);"
            "document.querySelector = (text) => text === '#runs .state-started' ? null : "
            "find(text); })()"
        )
        page("document.querySelector('#filter-text').value = 'typed'")
        page(
            "(() => { const box = document.querySelector('#runs tbody input'); box.focus(); "
            "box.click(); })()"
        )
        page("window.table = document.querySelector('#runs')")
        other = httpx.post(
            f"{base}/api/runs/", json={"name": "a", "num_workers": 1, "command": "true"}
        ).json()
        wait_for(lambda: page(NAMES) == "a,demo-2,demo-1", what="the new run")
        assert page("window.table.isConnected") is False
        assert (page(CHOSEN), page("document.activeElement.checked"),
        page.text("#chosen-count")) == (
            "Choose demo-2", True, "1 chosen"
        )  # fmt: skip
        assert page("document.querySelector('#filter-text').value") == "typed"
        fill(page, "q", "DEMO")
        wait_for(
            lambda: page(NAMES) == "demo-2,demo-1" and page("location.search") == "?q=DEMO",
            what="the filter",
        )
        page("document.querySelector('#sort-name').click()")
        wait_for(
            lambda: (
                page(NAMES) == "demo-1,demo-2" and page("location.search") == "?q=DEMO&sort=name"
            ),
            what="the order",
        )
        assert page(CHOSEN) == "Choose demo-2"
        page("history.back()")
        wait_for(lambda: page(NAMES) == "demo-2,demo-1", what="the way back")
        page("window.confirm = (text) => { window.asked = text; return true; }")
        page("document.querySelector('[data-all=stop]').click()")
        wait_for(
            lambda: (
                page("document.querySelectorAll('#runs .state-stopped').length") == 1
                and page(CHOSEN) == ""
            ),
            what="the stop",
        )
        assert page("window.asked") == "Stop 1 run? Metrics and logs stay."
        page("document.querySelectorAll('#runs tbody input').forEach((box) => box.click())")
        page("document.querySelector('[data-all=delete]').click()")
        wait_for(lambda: "No run matches" in page.text("#list"), what="the end of both")
        assert [run["id"] for run in httpx.get(f"{base}/api/runs/").json()] == [other["id"]]
        fill(page, "q", "")
        wait_for(lambda: page(NAMES) == "a", what="the run that is left")
        page("document.querySelector('#runs tbody input').click()")
        page("document.querySelector('#chosen button:not([type])').click()")
        wait_for(
            lambda: page("location.pathname + location.search") == f"/compare/?run={other['id']}",
            what="compare",
        )
