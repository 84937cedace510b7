"""Links of the pages lead somewhere, every page is reached, and commands on pages exist."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest

import mlbench_core
from mlbench_cli import cli_group
from mlbench_cli._script import find_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CODE_OF_CONDUCT.md",
    *sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("benchmarks/*/*.md")),
]
PAGES = [page for page in PAGES if "_build" not in page.parts]
FOR_USERS = sorted(
    str(page.relative_to(DOCS))
    for folder in ("start", "tutorials", "howto")
    for page in (DOCS / folder).rglob("*.md")
)


def targets(text: str) -> list[str]:
    """Where the links of a Markdown text lead: of ``[text](target)`` and of definitions ``[name]:
    target``."""
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(([^)\s]+)\)", without_code)
    return inline + [target for _, target in definitions(text).items()]


def definitions(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))


def labels() -> set[str]:
    """Names that pages of the documentation give to places, as ``(name)=``."""
    return {
        label
        for page in DOCS.rglob("*.md")
        for label in re.findall(r"^\(([\w-]+)\)=$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_to_something(page: Path) -> None:
    for target in targets(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        assert (page.parent / file).exists(), target
        if not file and not re.search(
            rf"^#+ .*{anchor.split('-')[0]}", page.read_text(), re.MULTILINE | re.IGNORECASE
        ):
            assert anchor in labels(), target


def test_every_page_can_be_reached_through_the_navigation() -> None:
    pages = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for tree in re.findall(
            r"^`{3,}\{toctree\}\n(.*?)^`{3,}", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            entries = [
                line for line in tree.splitlines() if line.strip() and not line.startswith(":")
            ]
            found = {
                (page.parent / re.sub(r".*<(.*)>$", r"\1", entry).strip()).with_suffix(".md")
                for entry in entries
            }
            waiting += found - reached
    assert sorted(map(str, pages - reached)) == []


@pytest.mark.parametrize("page", ["../README.md", *FOR_USERS])
def test_commands_and_options_of_mlbench_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    fences = re.findall(r"^ *(`{3,})(\S*)[^\n]*\n(.*?)^ *\1 *$", text, re.MULTILINE | re.DOTALL)
    blocks = "\n".join(
        content for _, language, content in fences if language in ("", "bash", "console")
    )
    for line in blocks.replace("\\\n", " ").splitlines():
        called = re.match(r"(?:\$ )?mlbench ([a-z][\w-]*)(.*)", line.strip())
        if called is None:
            continue
        context = click.Context(cli_group)
        command: click.Command | None = cli_group.get_command(context, called[1])
        assert command is not None, line
        words = shlex.split(called[2].partition(" -- ")[0], comments=True)
        words = list(takewhile(lambda word: word not in ("|", ">", "&", "&&"), words))
        if (
            isinstance(command, click.Group)
            and words
            and (inner := command.get_command(context, words[0]))
        ):
            command = inner
        # The words after a script of 'mlbench run' are its own.
        words = words[: find_script(words, command)]
        # It raises an error for an unknown option.
        command.make_parser(click.Context(command)).parse_args(words)


def test_no_warning_of_dead_links_is_suppressed() -> None:
    assert "xref_missing" not in (DOCS / "conf.py").read_text()


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("benchmarks/task*/README.md")), ids=lambda page: page.parent.name
)
def test_every_task_says_how_it_differs_from_version_3_and_is_named_on_the_page_on_upgrading(
    page: Path,
) -> None:
    differences = page.read_text().partition("\n## Differences from version 3.0\n")[2]
    assert len(re.findall(r"^\| .* \|$", differences, re.MULTILINE)) > 2
    task = page.parent.name.partition("_")[0].removeprefix("task")
    assert f"(#task-{task})" in (DOCS / "howto" / "upgrading.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/start/install.md"])
def test_a_page_installs_this_version_and_cpu_builds_that_fit_together(name: str) -> None:
    """The package index has version 3.0 until the release, and another index has torchvision for
    CUDA only."""
    installs = re.findall(r"^pip install .*$", (ROOT / name).read_text(), re.MULTILINE)
    assert "pip install -e '.[torch,vision,master,charts]'" in installs
    if "dev" in mlbench_core.__version__:
        assert not any(re.search(r"mlbench-core\b", line) for line in installs)
    wheels = [line for line in installs if ".whl" in line]
    assert len(wheels) == (0 if name == "README.md" else 2)  # on one machine, on a cluster
    assert all(
        f"mlbench_core-{mlbench_core.__version__}-py3-none-any.whl[" in line for line in wheels
    )
    from_an_index = [line for line in installs if "--index-url" in line]
    assert from_an_index
    assert all(" torch torchvision " in line for line in from_an_index)
    extras = extras_of_the_package()
    for names in re.findall(r"\[([\w,]+)\]'", "\n".join(installs)):
        assert set(names.split(",")) <= extras


def test_the_table_of_extras_is_that_of_the_package() -> None:
    table = (
        (DOCS / "start" / "install.md")
        .read_text()
        .partition("\n## Extras\n")[2]
        .partition("\n## ")[0]
    )
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == extras_of_the_package()


def extras_of_the_package() -> set[str]:
    section = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def test_the_readme_begins_with_the_two_commands_and_a_picture() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (
        re.search(r"^```\n(.*?)```", readme, re.MULTILINE | re.DOTALL)[1]
        == "make demo\nmake test\n"
    )
    assert len(re.findall(r"^!\[[^\]]+\]\([^)]+\.png\)$", readme, re.MULTILINE)) == 1


def test_the_script_of_the_readme_trains_to_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    """Every module that it imports is loaded by other tests as well, and it trains for a second."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(script, "script.py", "exec"), namespace)
    assert namespace["tracker"].goal_reached
    assert "Prec@1" in capsys.readouterr().out
