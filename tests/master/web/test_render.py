"""Numbers, dates and texts as the pages write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_master import create_app
from mlbench_master.dates import now_us
from mlbench_master.web.log_page import ERROR_LINE
from mlbench_master.web.render import ago, duration, number, render, size
from tests.master.helpers import IdleEngine, TestClient, wait_for


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (-5, "now"),
        (1, "1 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7300, "2 h ago"),
        (90_000, "1 d ago"),
    ],
)
def test_an_age_has_one_unit(seconds: int, text: str) -> None:
    assert f">{text}</time>" in ago(now_us() - seconds * 1_000_000 - 1000)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.09779698171323388", '<span title="0.09779698171323388">0.0978</span>'),
        ("97.49303436279297", '<span title="97.49303436279297">97.49</span>'),
        ("123456.789", '<span title="123456.789">123457</span>'),
        ("0.0000123456", '<span title="0.0000123456">1.235e-05</span>'),
        ("300", "300"),
        ("-12", "-12"),
        ("123456789012345678901", "123456789012345678901"),
        ("inf", "inf"),
        ("", ""),
        ('{"a": 1}', "{&#34;a&#34;: 1}"),
        ("<script>", "&lt;script&gt;"),
    ],
)
def test_a_number_is_rounded_and_keeps_its_digits_for_the_mouse(value: str, text: str) -> None:
    assert str(number(value)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.000 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (100_000, "1 d 3 h"),
    ],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 KB"), (1e9, "1 GB"), (1e20, "1e+05 PB")],
)
def test_a_size_has_a_unit(count: float, text: str) -> None:
    assert size(count) == text


def test_half_a_surrogate_pair_does_not_break_a_page() -> None:
    answer = render("login.html", message="\ud800<b>")
    assert b"?&lt;b&gt;" in bytes(answer.body)


def test_pages_open_without_the_final_slash(tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path, engine=IdleEngine(), token=None)
    with TestClient(app, base_url="http://127.0.0.1:5080") as client:
        run_id = client.post(
            "/api/runs/", json={"name": "a", "num_workers": 1, "command": "true"}
        ).json()["id"]
        for path in (
            "/runs",
            "/runs/new",
            f"/runs/{run_id}",
            f"/runs/{run_id}/logs",
            "/workers/a-worker-0",
            "/compare",
        ):
            assert client.get(path).status_code == 200, path


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("INFO:root:epoch 3", False),
        ("2026-11-28 05:02:10 INFO 0 errors in 3 files", False),
        ("x.py:3: UserWarning: slow", False),
        ("[W1128 c10d.cpp:1] Warning: late", False),
        (" 50%|#####     | 5/10", False),
        ("[rank1]: ValueError: bad", True),
        ("torch.OutOfMemoryError: CUDA", True),
        ("Traceback (most recent call last):", True),
        ("2026-11-28 05:02:10 ERROR no such file", True),
        ("main.py: error: no --x", True),
        ("E1128 05:02:11.000 7 api.py:984] failed", True),
    ],
)
def test_a_line_of_the_log_is_an_error_by_its_content_and_not_by_its_stream(
    line: str, is_error: bool
) -> None:
    assert (ERROR_LINE.search(line) is not None) == is_error


def test_the_log_marks_only_errors(tmp_path: Path) -> None:
    class Talking(IdleEngine):
        def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[dict[str, Any]]:
            texts = ("INFO: ready", "ValueError: bad")
            return [
                {"rank": 0, "stream": "stderr", "text": text, "date": "2026-11-28T05:02:10.5Z"}
                for text in texts
            ]

    app = create_app(data_dir=tmp_path, engine=Talking())
    with TestClient(app, base_url="http://127.0.0.1:5080") as client:
        run_id = client.post(
            "/api/runs/", json={"name": "a", "num_workers": 1, "command": "x"}
        ).json()["id"]
        wait_for(lambda: client.get(f"/api/runs/{run_id}/").json()["state"] == "started")
        page = client.get(f"/runs/{run_id}/").text
    lines = re.findall(r'<div class="(line[^"]*)" data-line="\d".*?class="who">([^<]*)<', page)
    assert lines[:2] == [("line", "rank 0"), ("line bad", "rank 0 err")]
    assert 'title="2026-11-28 05:02:10.5 UTC"' in page
    assert re.search(
        r'<dt>Created</dt><dd><time class="exact" datetime="[^"]+Z">[-0-9]+ [:0-9]+ UTC</time>',
        page,
    )
