"""The log on the page of a run, in a real browser: search, streams, following, and lines that could
do harm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.master.helpers import server, wait_for
from tests.security.browser import Page, chromium

TALK = r"""import sys, time
print("<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>")
print("\x1b[31mred\x1b[0m \x1b]0;title\x07\u202eturned\x08", "x" * 10_000, flush=True)
for n in range(1000):
    print("line", n)
for n in range(1000, 100_000):
    print("line", n, flush=True)
    if n % 10 == 0:
        print("Warning", n, file=sys.stderr, flush=True)
    time.sleep(0.04)
"""


def texts(page: Page, part: str = ".text") -> list[str]:
    found: list[str] = page(
        f"[...document.querySelectorAll('#log .line {part}')].map((e) => e.textContent)"
    )
    return found


def numbers(page: Page, word: str = "line") -> list[int]:
    return [int(text.split()[1]) for text in texts(page) if text.startswith(word)]


def choose(page: Page, name: str, value: str) -> None:
    field = f"document.querySelector('#log-filter [name={name}]')"
    page(
        f"{field}.value = {json.dumps(value)}; "
        f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )


def is_whole(found: list[int], step: int = 1) -> bool:
    return found == list(range(found[0], found[-1] + 1, step))


def number_is(page: Page, expression: str) -> Any:
    return page(f"document.getElementById('log').{expression}")


def test_a_log_is_followed_filtered_and_searched(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    with server(tmp_path / "data") as (base, _), chromium(tmp_path / "profile") as browser:
        body = {"name": "talks", "num_workers": 1, "command": f"python {script}"}
        run = httpx.post(f"{base}/api/runs/", json=body).json()["id"]
        wait_for(
            lambda: httpx.get(f"{base}/api/runs/{run}/logs/?search=line+1010").json()["lines"],
            what="lines",
        )
        page = browser.open(f"{base}/runs/{run}/")
        wait_for(lambda: len(numbers(page)) > 200, what="the live lines")
        assert is_whole(numbers(page)) and number_is(page, "scrollTop") > 1000
        check_harmless_lines(page)
        check_filter_of_live_lines(page)
        check_search(page)
        check_following(page)
        httpx.delete(f"{base}/api/runs/{run}/")


def check_harmless_lines(page: Page) -> None:
    choose(page, "search", "x")
    wait_for(lambda: len(texts(page)) == 2, what="the first lines")
    tags, turned = texts(page)
    assert tags == "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
    assert turned == "red \ufffdturned\ufffd " + "x" * 10_000
    assert page(
        "window.evil === undefined && document.querySelector('#log-lines "
        "img, #log-lines script') === null"
    )
    # The long line wraps in its box.
    assert number_is(page, "scrollWidth - document.getElementById('log').clientWidth") == 0
    assert page("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def check_filter_of_live_lines(page: Page) -> None:
    choose(page, "search", "")
    choose(page, "stream", "stderr")
    wait_for(lambda: len(numbers(page, "Warning")) > 0 and not numbers(page), what="stderr alone")
    last = numbers(page, "Warning")[-1]
    wait_for(lambda: numbers(page, "Warning")[-1] > last + 40, what="further lines of stderr")
    found = numbers(page, "Warning")
    assert found[0] == 1000 and is_whole(found, 10)
    assert set(texts(page, ".who")) == {"rank 0"}
    assert page("document.getElementById('log-download').href").endswith(
        "stream=stderr&format=text"
    )


def check_search(page: Page) -> None:
    choose(page, "stream", "")
    choose(page, "search", "LINE 99")
    wait_for(lambda: page.text("#log-status") == "11 matches", what="the number of matches")
    assert numbers(page) == [99, *range(990, 1000)] and page.text("#log mark") == "line 99"
    page("document.querySelector('#log .around').click()")
    around = [*range(94, 105), *range(990, 1000)]
    wait_for(lambda: numbers(page) == around, what="the lines around")
    # Only what the worker wrote is copied.
    page("getSelection().selectAllChildren(document.getElementById('log-lines'))")
    assert page("getSelection().toString()").split() == " ".join(texts(page)).split()
    choose(page, "search", "nothing")
    wait_for(lambda: page.text("#log-status") == "0 matches", what="no match")
    assert page("document.getElementById('log-empty').offsetHeight > 0")


def check_following(page: Page) -> None:
    choose(page, "search", "")
    wait_for(lambda: len(numbers(page)) > 150, what="all lines")
    page("document.getElementById('follow').click()")
    last = numbers(page)[-1]
    before = numbers(page)[0]
    page("document.getElementById('log').scrollTop = 0")
    page("document.getElementById('log-earlier').click()")
    wait_for(lambda: numbers(page)[0] < before, what="earlier lines")
    time.sleep(1.5)  # the worker writes dozens of lines
    # The reader still sees the same line, and none arrives.
    line = (
        "[...document.querySelectorAll('#log .text')].find((e) "
        f"=> e.textContent === 'line {before}')"
    )
    top = "document.getElementById('log').getBoundingClientRect().top"
    assert abs(page(f"{line}.getBoundingClientRect().top - {top}")) < 80
    assert is_whole(numbers(page)) and numbers(page)[-1] == last
    page("document.getElementById('follow').click()")
    wait_for(lambda: numbers(page)[-1] > last + 30, what="what was missed")
    assert is_whole(numbers(page))
    assert number_is(page, "scrollHeight - document.getElementById('log').scrollTop") < 1000
