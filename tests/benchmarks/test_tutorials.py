"""The tutorials, followed command by command; see tutorial_pages.py for how a page is read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlbench_core
from mlbench_cli.commands.run import run
from mlbench_core.network import EmulatedNetwork
from tests.benchmarks.tutorial_pages import (
    COMPLETE,
    PAGES,
    Reader,
    as_pattern,
    blocks,
    missing_line,
)
from tests.helpers.archives import unpack
from tests.helpers.processes import ROOT

RUNS = ROOT / "docs" / "results" / "digits" / "runs.tar.xz"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data of MLBench: one master serves all pages."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def reader(tmp_path: Path, home: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path / "reader", tmp_path / "programs", {"MLBENCH_HOME": str(home)})
    yield reader
    reader.run("mlbench master --stop || true")


def test_first_benchmark(reader: Reader) -> None:
    shorter = [
        ("--dataset digits", "--dataset digits --image-size 8 --channels-last --epochs 1"),
        ("yes", "no"),
        ("goal reached", "goal not reached"),
    ]
    reader.follow("first_benchmark", changes=shorter)
    assert (reader.folder / "mlbench-results" / "first" / "overview.svg").is_file()


@pytest.mark.skipif(EmulatedNetwork.why_not() is not None, reason=str(EmulatedNetwork.why_not()))
def test_own_script(reader: Reader) -> None:
    """The sweep is only planned, and its torchrun is the same as in tests/observe."""
    shutil.copy(ROOT / "benchmarks" / "tutorial" / "train.py", reader.folder)
    page = blocks("own_script")
    sweep = next(i for i, block in enumerate(page) if block.text.startswith("mlbench sweep"))
    reader.follow("own_script", changes=[("--epochs 5", "--epochs 1")], only=page[:sweep])
    plan = reader.run("mlbench sweep mine.toml --output mine-sweep --dry-run")
    assert re.search(r"diloco-2-lan-1g-s42 +diloco +2 +lan-1g +42 +to run", plan)


def test_own_aggregation(reader: Reader) -> None:
    reader.follow("own_aggregation")
    # The page says how the check fails.
    median = reader.folder / "median.py"
    median.write_text(median.read_text().replace("k // 2", "0"))
    with pytest.raises(AssertionError, match="difference < 1e-6"):
        reader.run("torchrun --nproc-per-node 3 check_median.py")


def test_own_task(reader: Reader) -> None:
    reader.follow("own_task")
    result = json.loads(
        (reader.folder / "mlbench-results" / "brier" / "brier-2" / "result.json").read_text()
    )
    assert (result["goal"]["metric"], result["goal"]["reached"]) == ("val_global_Brier", True)


@pytest.mark.skipif(EmulatedNetwork.why_not() is not None, reason=str(EmulatedNetwork.why_not()))
def test_slow_network(reader: Reader) -> None:
    """The whole sweep takes minutes, so its plan is compared with the page, and then one run of one
    epoch is made."""
    page = blocks("slow_network")
    start = next(
        i
        for i, block in enumerate(page)
        if block.commands() == ["mlbench sweep slow.toml --output slow"]
    )
    if COMPLETE:
        reader.follow("slow_network")
        return
    reader.follow("slow_network", only=page[:start])
    small = (reader.folder / "slow.toml").read_text()
    for old, new in (
        ('"--channels-last"]', '"--channels-last", "--epochs", "1", "--image-size", "8"]'),
        ("workers = [1, 2]", "workers = [2]"),
        ('limit = "90s"', 'limit = "10min"'),
        ('["datacenter", "wan-transatlantic"]', '["wan-transatlantic"]'),
        ('["centralized_sgd", "power_sgd", "ef_sign_sgd", "local_sgd"]', '["centralized_sgd"]'),
    ):
        assert old in small
        small = small.replace(old, new)
    (reader.folder / "slow.toml").write_text(small)
    reader.run("mlbench sweep slow.toml --output slow")
    reader.follow(
        "slow_network", only=[block for block in page[start:] if block.language == "python"]
    )
    # Twelve batches in the epoch of two workers, six for each.
    assert re.search(
        r"centralized-sgd-2-wan-transatlantic-s42 +6 +6 ", reader.run("python messages.py")
    )
    assert (
        reader.folder / "slow" / "runs" / "centralized-sgd-2-wan-transatlantic-s42" / "result.json"
    ).is_file()
    assert (reader.folder / "slow" / "index.html").is_file()


def test_reproduce(reader: Reader, tmp_path: Path) -> None:
    """Three published runs stand in for the reader's, and the command for these is only parsed."""
    (reader.folder / "docs").symlink_to(ROOT / "docs")
    page = blocks("reproduce")
    start = next(i for i, block in enumerate(page) if block.text.startswith("mlbench run again "))
    if not COMPLETE:
        parsed = run.make_context("run", shlex.split(page[start].commands()[0])[2:])
        assert (parsed.params["repeats"], parsed.params["seed"]) == (3, 42)
        unpack(RUNS, tmp_path)
        for number in (1, 2, 3):
            runs = reader.folder / "mlbench-results" / "again"
            shutil.copytree(
                tmp_path / "runs" / f"centralized-sgd-2-r{number}", runs / f"again-2-r{number}"
            )
        # The published runs stand in for the reader's, so the comparison has one row, and not the
        # page's two.
        is_table = [block.language == "text" and "IS A FASTER?" in block.text for block in page]
        page = [b for i, b in enumerate(page) if i not in (start, start + 1) and not is_table[i]]
    reader.follow("reproduce", only=page)


def test_own_image(reader: Reader, tmp_path: Path) -> None:
    """No container is started: the files that go into the image are those of the task, and the
    commands are parsed."""
    page = (PAGES / "own_image.md").read_text()
    (dockerfile,) = re.findall(r"```\n# Dockerfile\n(.*?)```", page, re.DOTALL)
    assert f"FROM mlbench/base:{mlbench_core.__version__}\n" in dockerfile
    files = {block.file_name for block in blocks("own_task") if block.file_name}
    assert set(re.findall(r"^COPY (.*) \./$", dockerfile, re.MULTILINE)[0].split()) == files
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)[0]) == [
        "python",
        "digits_task.py",
    ]
    (command,) = re.findall(r"^mlbench run (.*?[^\\])$", page, re.DOTALL | re.MULTILINE)
    parsed = run.make_context("run", shlex.split(command.replace("\\\n", " ")))
    assert parsed.params["container"] == "docker"


def test_the_pages_begin_with_what_the_reader_gets_and_needs() -> None:
    for page in PAGES.glob("*.md"):
        text = page.read_text()
        # MyST reads such a line as a comment, and a wrapped "90 %" can begin one.
        assert not re.search(r"^ *%(?! test: )", text, re.MULTILINE), page.name
        begin = text.partition("\n## ")[0]
        for part in ("The result:", "You need:", "Time:"):
            assert f"* **{part}**" in begin, (page.name, part)


def test_a_line_of_output_is_compared_without_its_numbers() -> None:
    assert (
        missing_line("first-1  1  yes  23.8\n...\nend", "x\nfirst-1    2 yes 9,123.80\ny\nend\n")
        is None
    )
    assert missing_line("a\nb", "b\na") == "b"
    assert missing_line("first-1 yes", "first-1 no") == "first-1 yes"
    assert not re.fullmatch(as_pattern("a ... c"), "a b d")
