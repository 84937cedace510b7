"""The board: only verified runs are ranked, a miss never helps, and strangers' files do no harm."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import statistics
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mlbench_cli.cli import cli_group
from mlbench_core.comparison.board import (
    Board,
    board_html,
    board_markdown,
    read_board,
    repeat_command,
)
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from tests.helpers.archives import unpack

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all runs of the digits."""
    folder = tmp_path_factory.mktemp("digits")
    unpack(RESULTS / "digits" / "runs.tar.xz", folder)
    return folder / "runs"


@pytest.fixture
def some_runs(digits: Path, tmp_path: Path) -> Path:
    """Return a folder with three repeats of two algorithms, which a test may change."""
    folder = tmp_path / "results"
    for name in ("centralized-sgd-2", "local-sgd-2"):
        for repeat in (1, 2, 3):
            shutil.copytree(digits / f"{name}-r{repeat}", folder / name / f"r{repeat}")
    return folder


def board_of(folder: Path) -> Board:
    return read_board(folder, is_stopped=lambda _: False, is_trial=lambda _: False)


def test_rows_are_in_the_order_of_their_medians(some_runs: Path) -> None:
    board = board_of(some_runs)
    assert (board.accepted, board.refused) == (6, {})
    medians = {}
    for folder in some_runs.iterdir():
        times = []
        for result in folder.glob("*/result.json"):
            goal = json.loads(result.read_text(encoding="utf-8"))["goal"]
            times.append(goal["time_to_goal_s"]["slowest"])
        medians[folder.name] = statistics.median(times)
    (heading,) = board.headings
    assert heading.title == "Task 1a on digits, Prec@1 >= 95, no emulated network"
    assert [row["rank"] for row in heading.rows] == ["1", "2"]
    assert [row["median_s"] for row in heading.rows] == pytest.approx(sorted(medians.values()))
    first = min(medians, key=lambda name: medians[name])
    assert heading.rows[0]["records"][0].name.startswith(first)
    assert "times, " in heading.rows[1]["against"]


def test_what_was_changed_is_refused_and_not_ranked(some_runs: Path, tmp_path: Path) -> None:
    changed = some_runs / "local-sgd-2" / "r2" / "result.json"
    text = changed.read_text(encoding="utf-8")
    changed.write_text(re.sub(r'("slowest": )\d', r"\g<1>0.", text), encoding="utf-8")
    output = tmp_path / "board"
    result = CliRunner().invoke(cli_group, ["results", "board", str(some_runs), "-o", str(output)])
    assert result.exit_code == 1 and "1 results were refused" in result.output
    assert "refused: local-sgd-2/r2: " in result.output
    for name in ("index.html", "index.md"):
        page = (output / name).read_text(encoding="utf-8")
        ranked, refused = re.split("Refused</h2>|## Refused", page)
        assert "local-sgd-2/r1/" in ranked and "local-sgd-2/r2" not in ranked
        assert "local-sgd-2/r2: " in refused
    (heading,) = board_of(some_runs).headings
    assert sorted(row["runs"] for row in heading.rows) == [2, 3]


def test_a_run_that_was_stopped_at_its_limit_makes_its_row_worse(some_runs: Path) -> None:
    def rows_with(stopped: int) -> dict[str, str]:
        for repeat in range(1, stopped + 1):
            (some_runs / "local-sgd-2" / f"r{repeat}" / "result.json").unlink(missing_ok=True)
        board = read_board(
            some_runs, is_stopped=lambda path: "local" in str(path), is_trial=lambda _: False
        )
        assert board.refused == {}
        ranks = {}
        for row in board.headings[0].rows:
            ranks[row["records"][0].name.rpartition("-")[0]] = row["rank"]
        return ranks

    assert rows_with(0) == {"local-sgd-2": "1", "centralized-sgd-2": "2"}
    # With the misses in two of three runs, the median is longer than every time.
    assert rows_with(2) == {"centralized-sgd-2": "1", "local-sgd-2": "-"}


def test_a_run_that_was_stopped_in_its_first_epoch_is_not_free(some_runs: Path) -> None:
    stopped = some_runs / "local-sgd-2" / "r1"
    (stopped / "result.json").unlink()
    lines = (stopped / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    starts = [line for line in lines if '"kind":"start"' in line]
    (stopped / "metrics.jsonl").write_text("".join(starts), encoding="utf-8")
    board = read_board(some_runs, is_stopped=lambda _: True, is_trial=lambda _: False)
    costs = {}
    for row in board.headings[0].rows:
        costs[row["runs"] - row["reached"]] = row["cost_per_success_s"]
    assert costs.keys() == {0, 1}
    assert costs[0] is not None and costs[1] is None


def test_archives_are_read_and_cannot_write_outside(some_runs: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    for name in ("good", "evil", "link", "damaged"):
        (packed / name).mkdir(parents=True)
    with tarfile.open(packed / "good" / "runs.tar.xz", "w:xz") as tar:
        tar.add(some_runs / "local-sgd-2", "runs")
    with tarfile.open(packed / "evil" / "runs.tar.xz", "w:xz") as tar:
        member = tarfile.TarInfo("../../../escaped.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    with tarfile.open(packed / "link" / "runs.tar.xz", "w:xz") as tar:
        member = tarfile.TarInfo("runs")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(member)
    (packed / "damaged" / "runs.tar.xz").write_bytes(b"no archive")
    whole = (packed / "good" / "runs.tar.xz").read_bytes()
    middle = len(whole) // 2
    (packed / "flipped").mkdir()
    (packed / "flipped" / "runs.tar.xz").write_bytes(
        whole[:middle] + bytes(64) + whole[middle + 64 :]
    )
    (packed / "short").mkdir()
    (packed / "short" / "runs.tar.xz").write_bytes(whole[:middle])
    if not hasattr(tarfile, "data_filter"):
        with pytest.raises(ConfigurationError, match="cannot unpack archives safely"):
            board_of(packed)
        return
    board = board_of(packed)
    assert board.accepted == 3
    assert sorted(board.refused) == [
        f"{name}/runs.tar.xz" for name in ("damaged", "evil", "flipped", "link", "short")
    ]
    assert not list(tmp_path.rglob("escaped.txt"))
    page = board_markdown("Board", board, packed, tmp_path / "board")
    assert "[runs/r1, runs/r2, runs/r3](../packed/good/runs.tar.xz)" in page


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="archives cannot be unpacked")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_copy_in_an_archive_counts_once(
    some_runs: Path, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs without a seed are not recognized by it."""
    monkeypatch.setattr("mlbench_core.comparison.board.verify_folder", lambda folder: [])
    mine = some_runs / "local-sgd-2"
    shutil.rmtree(some_runs / "centralized-sgd-2")
    shutil.rmtree(mine / "r3")
    for folder in (mine / "r1", mine / "r2"):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        result["configuration"]["seed"] = None
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if stopped:
        lines = (mine / "r2" / "metrics.jsonl").read_text(encoding="utf-8")
        without_seed = re.sub(r'"seed":\d+', '"seed":null', lines)
        (mine / "r2" / "metrics.jsonl").write_text(without_seed, encoding="utf-8")
        (mine / "r2" / "result.json").unlink()
    with tarfile.open(mine / "runs.tar.xz", "w:xz") as tar:
        tar.add(mine / "r1", "r1")
        tar.add(mine / "r2", "r2")
    board = read_board(some_runs, is_stopped=lambda _: True, is_trial=lambda _: False)
    (heading,) = board.headings
    (row,) = heading.rows
    assert (row["runs"], row["reached"], board.accepted) == (2, 1 if stopped else 2, 2)
    for name in ("r1", "r2"):
        text = f"local-sgd-2/runs.tar.xz: {name} is a copy of local-sgd-2/{name}: it counts once"
        assert text in board.remarks


def test_archives_in_hidden_folders_are_left_out(some_runs: Path) -> None:
    (some_runs / ".git").mkdir()
    (some_runs / ".git" / "runs.tar.xz").write_bytes(b"no archive")
    assert board_of(some_runs).refused == {}


def test_an_archive_that_would_fill_the_disk_is_refused(
    some_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_core.comparison.board.MOST_UNPACKED_BYTES", 1000)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "runs.tar.xz", "w:xz") as tar:
        tar.add(some_runs, "runs")
    assert "more than 1,000 bytes" in str(board_of(tmp_path / "packed").refused)


@pytest.mark.parametrize(
    ("words", "network", "task", "expected"),
    [
        (
            "/a/python /b/benchmarks/task1a/main.py --run_id 3 --backend gloo --data /c/cifar10",
            "100mbit,20ms",
            "1a",
            "mlbench run repeat 2 --network 100mbit,20ms --task 1a -- --data .../cifar10",
        ),
        (
            "/a/python -m mlbench_core.observe --method bf16 train.py --lr 1",
            None,
            None,
            "mlbench run repeat 2 --method bf16 train.py --lr 1",
        ),
        (
            "/a/python /b/benchmarks/experiments/model.py --light",
            None,
            None,
            "mlbench run repeat 2 --command 'python benchmarks/experiments/model.py --light'",
        ),
    ],
)
def test_the_command_repeats_a_run_elsewhere(
    words: str, network: str | None, task: str | None, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "environment.json").write_text(
        json.dumps({"command_line": words.split()}), encoding="utf-8"
    )
    configuration = {"network": network, "task": task, "workers": 2}
    record = RunRecord("a", configuration=configuration)
    assert repeat_command(record, tmp_path) == expected


def test_the_same_settings_on_another_network_are_another_ranking(
    some_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_core.comparison.board.verify_folder", lambda folder: [])
    for folder in (some_runs / "local-sgd-2").iterdir():
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        result["configuration"]["network"] = "1gbit,0.5ms"
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    titles = [heading.title for heading in board_of(some_runs).headings]
    assert [title.rpartition(", ")[2] for title in titles] == [
        "network 1gbit,0.5ms",
        "no emulated network",
    ]


class _Tags(HTMLParser):
    """The tags of a page; those that are open at its end are in ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_names_on_the_page_are_text(some_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_core.comparison.board.verify_folder", lambda folder: [])
    for result in some_runs.rglob("result.json"):
        content = json.loads(result.read_text(encoding="utf-8"))
        content["configuration"]["algorithm"] = "<script>alert(1)</script>"
        content["configuration"]["task"] = "<img src=x onerror=alert(1)>"
        result.write_text(json.dumps(content), encoding="utf-8")
    board = board_of(some_runs)
    board.refused["<b>name"] = ["<i>reason"]
    page = board_html("<u>Title", board, some_runs, some_runs)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.names.isdisjoint(("script", "img", "b", "i", "u"))
    text = board_markdown("<u>Title", board, some_runs, some_runs)
    assert not re.search(r"(?<!\\)<", re.sub(r"^    .*", "", text, flags=re.MULTILINE))


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no results: give a folder"):
        board_of(tmp_path)


def test_the_workflow_for_github_verifies_a_repository(
    some_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "howto" / "results_board.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}, "a pull request of a stranger runs it"
    steps = workflow["jobs"]["board"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    assert commands.pop(0) == ["pip", "install", "mlbench-core"]
    monkeypatch.chdir(tmp_path)
    for name, *arguments in commands:
        assert name == "mlbench"
        result = CliRunner().invoke(cli_group, arguments)
        assert result.exit_code == 0, result.output
    (upload,) = [step["with"] for step in steps if "upload" in step.get("uses", "")]
    assert (tmp_path / upload["path"] / "index.html").exists()


def test_the_published_board_has_the_rows_of_the_published_runs(
    digits: Path, tmp_path: Path
) -> None:
    """All archives together take half a minute, so one of them stands for the others."""
    folder = tmp_path / "results"
    shutil.copytree(digits, folder / "digits")
    published = (RESULTS / "board" / "index.md").read_text(encoding="utf-8").splitlines()
    (heading,) = board_of(folder).headings
    page = board_markdown("Board of results", board_of(folder), folder, folder)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 2 and set(rows) <= set(published), heading.title
