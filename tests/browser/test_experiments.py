"""Lists and groups of many runs in a browser: with the keyboard alone, and on every screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.browser.conftest import Watched
from tests.browser.test_walkthrough import SCREENS, TOO_WIDE
from tests.helpers.thorough import some
from tests.master.helpers import server, wait_for

_RUN = {
    "state": "finished",
    "created_at": "2026-01-31T12:00:00Z",
    "finished_at": "2026-01-31T12:01:00Z",
    "num_workers": 2,
    "command": "python train.py --lr 0.1 --network-of-the-lab",
}
_GOAL = {"metric": "val_global_Prec@1", "threshold": 90.0, "minimize": False, "reached": True}
FOCUS = "document.activeElement.id"


def add_run(client: httpx.Client, number: int) -> None:
    """Import a run that has trained for three epochs."""
    body = {**_RUN, "fingerprint": f"{number:064x}", "name": f"run-{number}"}
    run_id = int(client.post("/api/runs/import/", json=body).json()["id"])
    client.patch(f"/api/runs/{run_id}/", json={"tags": f"group-{number % 3}", "note": "<b>"})
    goal = {**_GOAL, "time_to_goal_s": 10.0 + number}
    metrics = [{"run_id": run_id, "name": "goal @ 0", "value": json.dumps(goal)}]
    for epoch in range(3):
        metadata = {"rank": 0, "epoch": epoch}
        for name, value in (("train_loss", 3 - epoch), ("tokens", 1000 * (epoch + 1))):
            metric = {"run_id": run_id, "name": f"{name} @ 0", "value": value}
            metrics.append({**metric, "metadata": metadata})
    client.post("/api/metrics/", json=metrics).raise_for_status()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("experiments") / "data") as (url, _):
        with httpx.Client(base_url=url) as client:
            for number in range(9):
                add_run(client, number)
        yield url


@pytest.fixture
def watched(playwright_browser: Any, base: str) -> Iterator[Watched]:
    context = playwright_browser.new_context(viewport={"width": 1200, "height": 500})
    seen = Watched(context.new_page(), base)
    seen.watch()
    # The drawing takes seconds, in which the master would not end.
    seen.page.route("**/compare/figures/*", lambda route: route.fulfill(body="<p id=figures></p>"))
    yield seen
    context.close()
    assert seen.complaints() == []


def test_the_keyboard_alone_finds_chooses_and_compares_runs(watched: Watched) -> None:
    page = watched.page
    press = page.keyboard.press
    watched.open("/runs/")
    page.locator("#choose-9").focus()
    for key in ("Space", "ArrowDown", "ArrowDown", "Space"):
        press(key)
    assert page.evaluate(FOCUS) == "choose-7"
    assert page.inner_text("#chosen-count") == "2 chosen"
    # The bar at the bottom does not cover the row that has the focus.
    press("End")
    covered = """(() => {
        const bar = document.getElementById("chosen").getBoundingClientRect();
        return document.activeElement.getBoundingClientRect().bottom > bar.top;
    })()"""
    assert (page.evaluate(FOCUS), page.evaluate(covered)) == ("choose-1", False)
    # A list that is read again keeps the focus.
    press("Tab")
    press("ArrowUp")
    assert page.evaluate(FOCUS) == "run-2"
    httpx.patch(f"{watched.base}/api/runs/3/", json={"tags": "seen"})
    page.wait_for_selector("td:text-is('seen')")
    assert page.evaluate(FOCUS) == "run-2"
    httpx.patch(f"{watched.base}/api/runs/3/", json={"tags": "group-2"})
    # Nothing keeps the focus: Tab leads out of the list.
    press("End")
    press("Tab")
    assert page.evaluate(FOCUS) == "choose-all"
    press("Enter")
    assert page.inner_text("#chosen-count") == "9 chosen"
    press("Tab")
    press("Enter")
    page.wait_for_url("**/compare/?run=*")
    assert page.locator("#compared tbody tr").count() == 9


def test_a_group_is_opened_from_the_list(watched: Watched) -> None:
    page = watched.page
    watched.open("/runs/")
    page.select_option("[name=group]", "tag")
    page.wait_for_selector("#groups")
    assert page.locator("#groups tbody tr").count() == 3
    assert page.inner_text("#groups tbody tr:first-child td:nth-child(4)") == (
        "best 12.0 s, median 15.0 s; 3 of 3 reached it"
    )
    page.locator("#group-1").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare/?q=tag%3Dgroup-1")
    # A run that joins the group appears without a reload, and so does its curve.
    httpx.patch(f"{watched.base}/api/runs/1/", json={"tags": "group-0, group-1"})
    page.wait_for_selector("#compared a:text-is('run-0')")
    page.wait_for_selector("#curves[aria-label*='run-0']")
    httpx.patch(f"{watched.base}/api/runs/1/", json={"tags": "group-0"})
    page.wait_for_selector("#against option[value=tokens]", state="attached")
    page.select_option("#metric", "train_loss @ 0")
    # Each imported run has its seconds to itself, so these repeats have no mean.
    page.wait_for_selector("#curves[aria-label*=': run-7; run-4; run-1. Arrow keys']")
    page.select_option("#against", "tokens")
    wait_for(
        lambda: page.locator("#curves .u-legend").inner_text().startswith("tokens of worker 0"),
        what="the axis",
    )


@pytest.mark.parametrize("event", [["open"], ["state", {"id": 2}]], ids=lambda event: event[0])
def test_compared_curves_catch_up(watched: Watched, event: list[Any]) -> None:
    """After the master was away, and at the end of a run, there may be metrics without events."""
    page = watched.page
    watched.open("/compare/?run=1&run=2")
    page.wait_for_selector("#curves[aria-label*='run-0']")
    asked: list[str] = []

    def answer(route: Any) -> None:
        """Answer as a master that has not got the metric yet."""
        asked.append(route.request.url)
        route.fulfill(json={"curves": []})

    page.route("**/curves/*", answer)
    name = f"late-{event[0]} @ 0"
    metric = {"run_id": 2, "name": name, "value": 1, "metadata": {"rank": 0, "epoch": 0}}
    httpx.post(f"{watched.base}/api/metrics/", json=[metric]).raise_for_status()
    wait_for(lambda: page.wait_for_timeout(100) or asked, what="a reading without the metric")
    page.unroute("**/curves/*")
    page.evaluate("(one) => new BroadcastChannel('mlbench-events /').postMessage([one])", event)
    page.wait_for_selector(f"#metric option[value='{name}']", state="attached")


def test_a_note_keeps_the_tags_that_were_set_elsewhere(watched: Watched) -> None:
    page = watched.page
    run = f"{watched.base}/api/runs/9/"
    watched.open("/runs/9/")
    httpx.patch(run, json={"tags": "group-2, fresh"}).raise_for_status()
    page.wait_for_selector("#words a:text-is('fresh')")
    page.click("#words-box summary")
    page.fill("[name=note]", "two lines")
    page.click("#words-box button")
    page.wait_for_selector("#words .text:has-text('two')")
    saved = httpx.get(run).json()
    assert (saved["tags"], saved["note"]) == (["group-2", "fresh"], "two lines")
    # Nothing was changed.
    page.click("#words-box summary")
    page.click("#words-box button")
    page.wait_for_selector("#words .text:has-text('two')")
    assert httpx.get(run).json() == saved
    httpx.patch(run, json={"tags": "group-2", "note": "<b>"}).raise_for_status()


def test_curves_against_tokens(watched: Watched) -> None:
    page = watched.page
    watched.open("/runs/1/?against=tokens")
    chart = page.locator("#charts .chart").first
    page.wait_for_selector("#charts canvas[aria-label='Loss against thousand tokens of worker 0']")
    chart.focus()
    page.keyboard.press("ArrowRight")
    # After the first epoch, 1,000 tokens.
    assert chart.locator(".u-series .u-value").all_inner_texts() == ["1", "3"]
    # Bytes were not measured.
    assert page.locator("#against option[value=bytes]").evaluate("(option) => option.disabled")


@pytest.mark.parametrize(("width", "theme"), some(SCREENS, 2), ids=str)
def test_every_list_fits_the_screen_and_is_open_to_all(
    watched: Watched, width: int, theme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
    ).Axe()
    page = watched.page
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    found = []
    for name, path in (
        ("experiments", "/runs/?q=lr=0.1"),
        ("groups", "/runs/?group=tag"),
        ("words", "/runs/1/"),
        ("group", "/compare/?q=tag%3Dgroup-0"),
    ):
        watched.open(path)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.evaluate(TOO_WIDE) == [], name
        found += watched.barriers(axe, name)
        watched.picture(f"{name}-{width}-{theme}")
    assert found == []


def test_the_dark_theme_inverts_figures_of_the_command(watched: Watched) -> None:
    page = watched.page
    watched.open("/runs/")
    # They are dark letters on white.
    page.evaluate("document.querySelector('main').innerHTML = '<p class=figures><img alt=a></p>'")
    style = "getComputedStyle(document.querySelector('.figures img')).filter"
    page.emulate_media(color_scheme="dark")
    assert "invert" in page.evaluate(style)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(style) == "none"
