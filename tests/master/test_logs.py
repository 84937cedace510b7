"""The log of a run through the API: filters, pages in both directions, limits, and the download."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_master.api.export import log_text
from mlbench_master.api.schemas import LogsQuery
from mlbench_master.app import create_app
from mlbench_master.engines import logs
from mlbench_master.engines.interface import LogFilter, LogRange, NumberedLine
from mlbench_master.engines.logs import LogReader, LogWriter, append_log
from tests.master.helpers import TestClient

END = 2**60


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    """With a run 1, of which ``folder`` has the log."""
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None
    with TestClient(app, base_url="http://127.0.0.1:5080") as opened:
        opened.post(
            "/api/runs/",
            json={"name": "a-run", "num_workers": 70, "command": "true", "oversubscribe": True},
        )
        app.state.store.update_run(1, state="started", job_id="local-1")
        opened.folder = tmp_path / "runs" / "1"
        opened.folder.mkdir()
        yield opened


def write(folder: Path, *lines: tuple[int | None, str, str]) -> None:
    for line in lines:
        append_log(folder / "log.jsonl", *line)


def walk(reader: LogReader, limit: int, wanted: LogFilter, backwards: bool) -> list[NumberedLine]:
    """All wanted lines of a log, page by page."""
    found: list[NumberedLine] = []
    position = END if backwards else 0
    while True:
        if backwards:
            page = reader.read(0, limit, position, wanted)
            found[:0] = page.lines
        else:
            page = reader.read(position, limit, None, wanted)
            found += page.lines
        assert len(page.lines) == page.matches <= limit
        following = page.previous if backwards else page.next
        if following == (0 if backwards else position):
            return found
        position = following


def test_a_reader_gets_the_lines_that_it_asks_for(client: Any) -> None:
    write(
        client.folder,
        (None, "system", "started"),
        (0, "stdout", "one"),
        (1, "stderr", "an Error"),
        (0, "stderr", "\x1b[31mred\x1b[0m error"),
        (1, "stdout", 'over "a\\b" \u00fc'),
        (None, "system", "finished"),
    )
    for query, numbers in (
        ("", [0, 1, 2, 3, 4, 5]),
        ("rank=0", [1, 3]),
        ("rank=master", [0, 5]),
        ("rank=&stream=&search=", [0, 1, 2, 3, 4, 5]),
        ("stream=stderr", [2, 3]),
        ("rank=1&stream=stdout", [4]),
        ("search=ERROR", [2, 3]),
        ("search=red+error", [3]),
        ("search=%22a%5Cb%22", [4]),
        ("search=%C3%9C", [4]),
        ("search=.*", []),
        ("search=rank", []),
        ("rank=4095", []),
        ("limit=2", [0, 1]),
        ("since_line=4", [4, 5]),
        ("since_line=9", []),
        ("before_line=3&limit=2", [1, 2]),
        ("before_line=99&limit=2", [4, 5]),
        ("before_line=99&since_line=3&rank=0", [3]),
        ("before_line=2&since_line=4", []),
    ):
        answer = client.get(f"/api/runs/1/logs/?{query}").json()
        assert ([line["line"] for line in answer["lines"]], answer["matches"]) == (
            numbers,
            len(numbers),
        ), query
        if "limit" not in query:
            count = client.get(f"/api/runs/1/logs/?{query}&limit=0").json()
            assert count == {**answer, "lines": []}


def test_a_wrong_parameter_is_named(client: Any) -> None:
    for query, message in (
        ("rank=-1", "rank: must be the rank of a worker such as 0, or 'master' (got '-1')"),
        ("rank=all", "rank: must be the rank of a worker"),
        ("rank=\u0663", "rank: must be the rank of a worker"),
        ("stream=both", "stream: Input should be 'stdout', 'stderr' or 'system'"),
        ("search=" + "x" * 1001, "search: Value should have at most 1000"),
        ("search=%00", "search: must not contain a NUL"),
        ("limit=5001", "limit: Input should be less than or equal to 5000"),
        ("limit=-1", "limit: "),
        ("before_line=x", "before_line: "),
        ("since_line=99999999999999999999", "since_line: "),
        ("format=html", "format: "),
    ):
        for path in ("/api/runs/1/logs/", "/runs/1/logs/"):
            answer = client.get(f"{path}?{query}")
            assert answer.status_code == 400 and answer.json()["message"].startswith(message), (
                answer.text
            )


def test_a_run_without_a_log_has_no_lines(client: Any) -> None:
    client.post("/api/runs/", json={"name": "waits", "num_workers": 1, "command": "true"})
    for run in (1, 2):
        answer = client.get(f"/api/runs/{run}/logs/?since_line=3&before_line=9&search=x")
        assert answer.json() == {"lines": [], "next": 3, "previous": 3, "matches": 0}
        download = client.get(f"/api/runs/{run}/logs/?format=text")
        assert (download.status_code, download.text) == (200, "")


@pytest.mark.parametrize("chunk_bytes", [700, 3000, 2**18])
def test_pages_in_both_directions_meet_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(logs, "_CHUNK_BYTES", chunk_bytes)
    randomly = random.Random(chunk_bytes)
    writer, reader = LogWriter(tmp_path, 12_000), LogReader(tmp_path)
    for number in range(200):
        text = f"line {number} " + randomly.choice(
            ["ok", "Bad", '"bad"', "\x1b[1mb\x1b[0mad", "x" * 300]
        )
        writer.write(randomly.choice([None, 0, 1, 11]), randomly.choice(["stdout", "stderr"]), text)
        if number % 40 == 0:
            reader.read(number, 5)  # the index grows with the log
    everything = walk(reader, 5000, LogFilter(), backwards=False)
    assert [line["line"] for line in everything] == sorted({line["line"] for line in everything})
    assert any("were removed" in line["text"] for line in everything) and reader.end() >= 200
    for wanted in (
        LogFilter(),
        LogFilter(rank=1),
        LogFilter("master", "stderr"),
        LogFilter(search="bad"),
        LogFilter(11, "stdout", '"BAD"'),
    ):
        expected = [line for line in everything if wanted.matches(line)]
        assert expected
        for limit in (1, 7, 5000):
            for backwards in (False, True):
                assert walk(reader, limit, wanted, backwards) == expected


def test_a_search_that_takes_long_stops_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr(logs, "_SEARCH_S", -1.0)
    write(tmp_path, *((0, "stdout", f"line {number}") for number in range(400)))
    reader = LogReader(tmp_path)
    wanted = LogFilter(search="line 17")
    first = reader.read(0, 200, END, wanted)
    assert (first.lines, first.matches, first.next) == ([], 0, 400) and 300 < first.previous < 400
    for backwards in (False, True):
        assert [line["line"] for line in walk(reader, 200, wanted, backwards)] == [
            17,
            *range(170, 180),
        ]


def test_a_reader_that_follows_with_a_filter_misses_nothing(tmp_path: Path) -> None:
    reader, wanted = LogReader(tmp_path), LogFilter(search="7")
    seen, following = [], 0
    for number in range(100):
        write(tmp_path, (0, "stdout", str(number)))
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"rank": 0, "stream": "stdout", "text": "7')  # still being written
            file.flush()
            page = reader.read(following, 10, None, wanted)
            file.truncate(file.tell() - 42)
        assert page.next == number + 1
        seen += [int(line["text"]) for line in page.lines]
        following = page.next
    assert seen == [number for number in range(100) if "7" in str(number)]


def test_notes_of_the_master_do_not_shift_the_numbers(tmp_path: Path) -> None:
    writer, reader = LogWriter(tmp_path, 40_000), LogReader(tmp_path)
    for number in range(150):
        writer.write(0, "stdout", f"line {number}")
        append_log(logs.last_file(tmp_path), None, "system", f"note {number}")
    assert len(list(tmp_path.iterdir())) > 2
    page = reader.read(0, 5000)
    assert [line["line"] for line in page.lines] == list(range(300))
    assert [line["text"] for line in page.lines[::2]] == [f"line {number}" for number in range(150)]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("\x1b[31mred\x1b[0m\x1b[2J\x1b[1;5H!", "red!"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b]0;no end", "ab\ufffd]0;no end"),
        ("\x1b7a\x1b(Bb\x1bc", "ab"),
        ("a\x00\x08\x1b\x9b\x7fb\tc", "a\ufffdb\tc"),
        ("a\u202eb\u2066c\u2028d", "a\ufffdb\ufffdc\ufffdd"),
        ("\ud800 \u05d0", "? \u05d0"),
        ("<script>\u00e9", "<script>\u00e9"),
    ],
)
def test_a_line_is_plain_text(tmp_path: Path, raw: str, text: str) -> None:
    line = {"rank": 0, "stream": "stdout", "text": raw, "date": "d"}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    reader = LogReader(tmp_path)
    assert reader.read(0, 5).lines == [{**line, "text": text, "line": 0}]
    assert reader.tail(1000)[0]["text"] == text
    assert reader.read(0, 5, None, LogFilter(search=text)).matches == 1


def test_lines_of_another_format_are_found_too(tmp_path: Path) -> None:
    """A worker can write into the file."""
    content = [
        "not JSON 5",
        '{"stream": "stderr", "text": "5", "date": "", "rank": 5}',
        '{"rank": 5, "stream": 5}',
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{line}\n" for line in content))
    reader = LogReader(tmp_path)
    for wanted, numbers in (
        (LogFilter(rank=5), [1]),
        (LogFilter("master", "system"), [0, 2]),
        (LogFilter(search="5"), [0, 1, 2]),
        (LogFilter(stream="stderr"), [1]),
    ):
        assert [line["line"] for line in reader.read(0, 9, None, wanted).lines] == numbers


def test_the_download_has_every_line(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_PAGE_BYTES", 1000)
    write(
        client.folder,
        *((n % 2, "stderr" if n % 3 == 0 else "stdout", f"line {n} <b>") for n in range(100)),
    )
    whole = client.get("/api/runs/1/logs/?format=text")
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["content-disposition"] == 'attachment; filename="a-run.log"'
    lines = whole.text.splitlines()
    assert [line.split(" | ")[1] for line in lines] == [f"line {n} <b>" for n in range(100)]
    assert lines[3].startswith("20") and " rank 1 stderr | " in lines[3]
    some = client.get(
        "/api/runs/1/logs/?format=text&rank=1&stream=stderr&search=LINE+9&before_line=99"
    )
    assert some.headers["content-disposition"] == 'attachment; filename="a-run-rank-1-stderr.log"'
    assert [line.split(" | ")[1] for line in some.text.splitlines()] == [
        f"line {n} <b>" for n in (9, 93)
    ]
    master = client.get("/api/runs/1/logs/?format=text&rank=master")
    assert (master.text, "a-run-master.log" in master.headers["content-disposition"]) == ("", True)


def test_a_long_log_needs_little_memory(client: Any) -> None:
    line = b'{"rank": 0, "stream": "stdout", "text": "%s", "date": ""}\n' % (b"x" * 20_000)
    (client.folder / "log.jsonl").write_bytes(line * 2000)
    run, engine = client.app.state.store.run(1), client.app.state.engine
    tracemalloc.start()
    try:
        size = sum(map(len, log_text(engine, run, LogsQuery())))
        assert engine.logs("local-1", LogRange(0, 200, END, LogFilter(search="y"))).previous == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 40_000_000 and peak < 8_000_000


def test_the_page_of_a_log_works_without_a_script(client: Any) -> None:
    write(client.folder, *((n % 70, "stdout", f"<script>line {n}") for n in range(1000)))
    text = client.get("/runs/1/logs/").text
    assert (
        text.count('class="line"') == 201
        and "&lt;script&gt;line 999<" in text
        and "<script>line" not in text
    )
    # A choice of 4,096 workers would be long.
    assert '<input name="rank"' in text and "before_line=800" in text
    text = client.get("/runs/1/logs/?rank=3&search=LINE+7%22&before_line=500").text
    assert "No such line." in text and 'value="3"' in text and 'value="LINE 7&#34;"' in text
    text = client.get("/runs/1/logs/?search=line+77&rank=").text
    assert (
        text.count("&lt;script&gt;line 77") == 11
        and "format=text" in text
        and "search=line+77" in text
    )
    client.post("/api/runs/", json={"name": "small", "num_workers": 2, "command": "true"})
    assert '<option value="1">rank 1</option>' in client.get("/runs/2/").text
    assert '<option value="1" selected>' in client.get("/runs/2/logs/?rank=1").text
