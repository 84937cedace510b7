"""The dashboard as a user meets it: start two runs, watch them, compare, download, stop and delete,
on every screen."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.conftest import Watched
from tests.helpers.earlier_runs import earlier_runs
from tests.helpers.thorough import some
from tests.master.helpers import server, wait_for

HEADERS = {"Authorization": "Bearer sesame"}
TRAINS = Path(__file__).with_name("trains.py")
# Width, theme: a narrow phone and a large screen, and then the other combinations.
SCREENS = ((360, "dark"), (1600, "light"), (390, "light"), (1600, "dark"), (390, "dark"))
# What makes a page scroll sideways; a wide table scrolls inside its box, which does not.
TOO_WIDE = """(() => {
    const width = document.documentElement.clientWidth;
    const wide = (one) => !one.closest(".scroll") && one.getBoundingClientRect().right > width;
    if (document.documentElement.scrollWidth <= width) return [];
    const elements = [...document.querySelectorAll("main *")].filter(wide);
    return elements.map((one) => one.outerHTML.slice(0, 200));
})()"""


@pytest.fixture(scope="module", params=some(["/user/me/proxy/5080", ""]), ids=lambda path: path)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--root-path", request.param) if request.param else ()
    with server(tmp_path_factory.mktemp("walk") / "data", "--token", "sesame", *options) as (
        url,
        _,
    ):
        yield url + request.param


@pytest.fixture
def watched(playwright_browser: Any, base: str) -> Iterator[Watched]:
    context = playwright_browser.new_context(
        viewport={"width": 1200, "height": 800}, accept_downloads=True
    )
    seen = Watched(context.new_page(), base)
    seen.watch()
    seen.open("/login/")
    seen.page.fill("input[name=token]", "sesame")
    seen.page.click("main button")
    seen.page.wait_for_url(f"{base}/")
    yield seen
    context.close()


def test_dates_are_in_the_zone_of_the_browser(playwright_browser: Any, base: str) -> None:
    body = {
        "name": "zone",
        "num_workers": 1,
        "num_cpus": 0.1,
        "command": f"{sys.executable} -c print(1)",
    }
    run = httpx.post(f"{base}/api/runs/", json=body, headers=HEADERS).json()["id"]
    wait_for(lambda: state_of(base, "zone") == "finished", timeout_s=60, what="the end of the run")
    context = playwright_browser.new_context(timezone_id="Asia/Kolkata", locale="en-US")
    page = context.new_page()
    page.goto(f"{base}/login/")
    page.fill("input[name=token]", "sesame")
    page.click("main button")
    page.goto(f"{base}/runs/{run}/")
    page.wait_for_selector("#log-zone:text-is('GMT+5:30')")
    date = page.locator("#facts time.exact").first
    given = datetime.fromisoformat(date.get_attribute("datetime").replace("Z", "+00:00"))
    local = given.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert date.text_content() == f"{local:%Y-%m-%d %H:%M:%S} GMT+5:30"
    clock = page.locator("#log-lines .clock").first
    assert clock.get_attribute("title").endswith(f"{clock.text_content()} GMT+5:30")
    context.close()
    httpx.delete(f"{base}/api/runs/{run}/", headers=HEADERS)


def command(name: str, epochs: int, end: Path | str = "") -> str:
    return f"{sys.executable} {TRAINS} {earlier_runs() / name} {epochs} {end}"


def state_of(base: str, name: str) -> str:
    runs = {run["name"]: run for run in httpx.get(f"{base}/api/runs/", headers=HEADERS).json()}
    return str(runs[name]["state"]) if name in runs else ""


def saved(watched: Watched, link: str) -> bytes:
    with watched.page.expect_download() as download:
        watched.page.click(link)
    return Path(download.value.path()).read_bytes()


def answer_late(route: Any) -> None:
    """Let a request of the browser wait."""
    time.sleep(0.5)
    route.continue_()


def test_a_user_starts_watches_compares_stops_and_deletes_runs(
    watched: Watched, tmp_path: Path
) -> None:
    page, base = watched.page, watched.base
    end = tmp_path / "end"  # of both runs, after the user has watched them
    # An empty master says what to do, and the way is one click.
    page.click("text=Start runs")
    page.wait_for_url(f"{base}/runs/new/")
    page.check("input[name=kind][value=command]")
    page.fill("[name=name]", "walk")
    page.fill("[name=num_workers]", "1 2")
    page.fill("[name=num_cpus]", "0.1")
    page.fill("[name=command]", command("centralized-sgd-1-r1", 3, end))
    page.click("#start button:has-text('Start')")
    page.wait_for_selector("#runs .state-started")
    page.click("#runs a:text-is('walk-2')")
    # The curves grow while the user looks.
    page.wait_for_selector("#charts canvas")
    latest = page.locator("#charts figure").first
    before = latest.inner_text()
    wait_for(lambda: latest.inner_text() != before, what="a new point")
    assert page.evaluate("window.broken") is None
    # The log is text: markup, colors of terminals and long lines.
    page.wait_for_selector("#log >> text=<script>window.broken = 1</script>")
    assert "\x1b" not in page.inner_text("#log")
    # One run ends, the other one is stopped.
    with httpx.Client(base_url=base, headers=HEADERS) as client:
        runs = {run["name"]: run["id"] for run in client.get("/api/runs/").json()}
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#stop button")
    page.wait_for_selector("#state.state-stopped")
    page.wait_for_selector("#why >> text=stopped by a user")
    end.touch()
    wait_for(
        lambda: state_of(base, "walk-1") == "finished",
        timeout_s=60,
        what="the end of the first run",
    )
    watched.open(f"/runs/{runs['walk-1']}/")
    page.wait_for_selector("#goal >> text=reached in 4.5 s")
    # A link that stays the same is not replaced when the page reads itself again.
    link = page.query_selector("#downloads a:text-is('zip')")
    page.evaluate(
        f"""async () => {{
            const again = new Promise((resume) =>
                document.addEventListener("refreshed", resume, {{ once: true }}));
            (await import("{base}/static/app.js")).refresh();
            await again;
        }}"""
    )
    assert link.evaluate("(link) => link.isConnected")
    archive = zipfile.ZipFile(io.BytesIO(saved(watched, "#downloads a:text-is('zip')")))
    assert {"run.json", "result.json", "metrics.jsonl", "official_result.txt"} <= set(
        archive.namelist()
    )
    assert b"val_global_Prec@1" in saved(watched, "#downloads a:text-is('CSV')")
    page.click("#result a")
    assert json.loads(page.inner_text("body"))["goal"]["reached"] is True
    # Another one, so that there is something to compare.
    body = {
        "name": "other",
        "num_workers": 2,
        "num_cpus": 0.1,
        "command": command("centralized-sgd-2-r1", 3),
    }
    httpx.post(f"{base}/api/runs/", json=body, headers=HEADERS).raise_for_status()
    wait_for(lambda: state_of(base, "other") == "finished", timeout_s=60, what="the other run")
    watched.open("/runs/")
    for name in ("walk-1", "other"):
        page.check(f"input[aria-label='Choose {name}']")
    page.click("#chosen button:has-text('Compare')")
    page.wait_for_selector("text=Time to the goal")
    assert page.locator(".tables tbody").first.locator("tr").count() == 2
    watched.open(f"/runs/{runs['walk-2']}/")
    page.wait_for_selector(
        "#charts canvas"
    )  # a reading of the curves would not find the deleted run
    # The answer and an event tell of the deletion. While the next page is slow, a second navigation
    # would abort it.
    navigations: list[str] = []
    page.route(f"{base}/runs/", answer_late, times=1)
    page.on(
        "request",
        lambda request: (
            navigations.append(request.url) if request.is_navigation_request() else None
        ),
    )
    page.click("button:has-text('Delete')")
    page.wait_for_url(f"{base}/runs/")
    assert navigations == [f"{base}/runs/"]
    assert state_of(base, "walk-2") == ""
    assert page.locator("#runs a:text-is('walk-2')").count() == 0
    # The deletion may overtake the page's last questions about the run, and htmx reports each with
    # a second line.
    late = re.compile(rf"404.*{re.escape(base)}/(api/)?runs/{runs['walk-2']}/")
    assert [problem for problem in watched.complaints() if not late.search(problem)] == []


def pages(base: str) -> dict[str, str]:
    """The address of every page, with runs that have ended, failed and never started."""
    with httpx.Client(base_url=base, headers=HEADERS) as client:
        if not state_of(base, "seen"):
            body = {"num_workers": 2, "num_cpus": 0.1}
            client.post(
                "/api/runs/",
                json={**body, "name": "seen", "command": command("centralized-sgd-2-r2", 4)},
            )
            fails = f"{sys.executable} -c 'raise SystemExit(\"no such file: a.txt\")'"
            client.post("/api/runs/", json={**body, "name": "fails", "command": fails})
            wait_for(lambda: state_of(base, "seen") == "finished", timeout_s=60, what="the run")
            wait_for(lambda: state_of(base, "fails") == "failed", timeout_s=60, what="the failure")
        ids = {run["name"]: run["id"] for run in client.get("/api/runs/").json()}
    return {
        "main": "/",
        "runs": "/runs/",
        "filtered": "/runs/?q=nothing-of-this-name",
        "start": "/runs/new/",
        "run": f"/runs/{ids['seen']}/",
        "failed": f"/runs/{ids['fails']}/",
        "worker": "/workers/seen-worker-0/",
        "compare": f"/compare/?run={ids['seen']}&run={ids['fails']}",
        "compare-nothing": "/compare/",
        "api": "/docs/",
    }


def test_the_form_has_only_the_fields_of_the_chosen_program(watched: Watched) -> None:
    page = watched.page
    watched.open("/runs/new/")
    fields = ("task", "script", "method", "metrics", "goal", "command", "light_target")
    for kind, shown in (
        ("task", {"task", "light_target"}),
        ("script", {"script", "method", "metrics", "goal"}),
        ("command", {"command", "light_target"}),
    ):
        page.check(f"input[name=kind][value={kind}]")
        assert {name for name in fields if page.is_visible(f"[name={name}]")} == shown


@pytest.mark.parametrize(("width", "theme"), some(SCREENS, 2), ids=str)
def test_every_page_fits_the_screen_and_is_open_to_all(
    watched: Watched, width: int, theme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
    ).Axe()
    page = watched.page
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    found = []
    for name, path in pages(watched.base).items():
        watched.open(path)
        page.wait_for_load_state("load")
        if name in ("run", "compare"):
            page.wait_for_selector("canvas")
        assert page.evaluate(TOO_WIDE) == [], name
        found += watched.barriers(axe, name)
        watched.picture(f"{name}-{width}-{theme}")
    assert found == []
    assert watched.problems == []


def test_the_keyboard_does_in_a_chart_what_a_mouse_does(watched: Watched) -> None:
    page = watched.page
    watched.open(pages(watched.base)["run"])
    page.wait_for_selector("#charts canvas")
    chart = page.locator("#charts .chart").first
    drawn = "(one) => one.querySelector('canvas').toDataURL()"
    everything = chart.evaluate(drawn)
    chart.focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert chart.locator(".u-series .u-value").all_inner_texts() == ["2", "1.25", "1.35"]
    page.keyboard.press("+")
    wait_for(lambda: chart.evaluate(drawn) != everything, what="a part of the curves")
    page.keyboard.press("0")
    wait_for(lambda: chart.evaluate(drawn) == everything, what="all of the curves")
    page.keyboard.press("2")
    assert chart.locator(".u-series.u-off").inner_text().startswith("validation")
    assert watched.problems == []
