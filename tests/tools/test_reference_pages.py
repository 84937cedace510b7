"""The generated parts of the reference, and the hand-written pages that must name everything that
the code has."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import click
import command_reference
import pytest
import rest_reference
import schema_reference
from api_reference import all_names, find_origin, handed_on, own_names, public_modules
from generated_pages import MARKER, WRITERS, fill_page

from mlbench_cli.cli import COMMANDS, cli_group
from mlbench_core.tasks import TASKS, Task
from tests.helpers.archives import unpack

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def markers(page: str, kind: str) -> list[str]:
    return [words for name, words in MARKER.findall((REFERENCE / page).read_text()) if name == kind]


def test_markers_are_filled_and_other_code_blocks_stay() -> None:
    text = "a\n\n```{commands} tasks\n```\n\n```{note}\nb\n```\n"
    filled = fill_page(text)
    assert "### mlbench tasks" in filled and "```{commands}" not in filled
    assert filled.endswith("```{note}\nb\n```\n")


def test_every_writer_fills_a_page() -> None:
    used = {
        name for page in REFERENCE.rglob("*.md") for name, _ in MARKER.findall(page.read_text())
    }
    assert used == set(WRITERS)


def test_the_page_on_the_command_has_every_command_once_and_links_to_it() -> None:
    named = " ".join(markers("command.md", "commands")).split()
    assert sorted(named) == sorted(COMMANDS)
    page = (REFERENCE / "command.md").read_text()
    assert sorted(re.findall(r"\[`([\w-]+)`\]\(#mlbench-\1\)", page)) == sorted(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_its_options_and_subcommands(name: str) -> None:
    context = click.Context(cli_group, info_name="mlbench")
    text = command_reference.write_commands(name)

    def look(command: click.Command, path: str, parent: click.Context) -> None:
        own = click.Context(command, parent=parent, info_name=path.split()[-1])
        section = text[text.index(f"({path.replace(' ', '-')})=") :]
        for option in (
            found
            for found in command.params
            if isinstance(found, click.Option) and not found.hidden
        ):
            for spelling in option.opts:
                assert re.search(rf"^\| `[^|]*{re.escape(spelling)}[ ,`]", section, re.MULTILINE), (
                    spelling
                )
        if isinstance(command, click.Group):
            for sub in command.list_commands(own):
                look(command.commands[sub], f"{path} {sub}", own)

    command = cli_group.get_command(context, name)
    assert command is not None
    look(command, f"mlbench {name}", context)


@pytest.mark.parametrize(
    ("text", "meaning", "default"),
    [
        ("Cores.  [default: 4; x>=1]", "Cores. Allowed: at least 1.", "4"),
        ("Cores.  [x>0]", "Cores. Allowed: more than 0.", ""),
        (
            "Number; repeatable.  [1<=x<=1024; required]",
            "Number; repeatable. Allowed: 1 to 1024.",
            "required",
        ),
        ("Folder (default: FOLDER).", "Folder.", "FOLDER"),
        ("For example [a].", "For example [a].", ""),
    ],
)
def test_the_help_of_an_option_is_split(text: str, meaning: str, default: str) -> None:
    assert command_reference.split_default(text) == (meaning, default)


def test_a_help_text_becomes_markdown() -> None:
    assert command_reference.escape("see 'mlbench tasks', the task's --light | * NUM_WORKERS") == (
        "see `mlbench tasks`, the task's `--light` \\| \\* `NUM_WORKERS`"
    )
    assert "```bash\nmlbench run demo 1 2 --task 1a --wait -- --dataset digits\n```" in (
        command_reference.write_commands("run")
    )


def test_the_page_on_the_api_has_every_request_and_the_fields_of_each() -> None:
    tags = markers("rest_api.md", "requests")
    requests = rest_reference.list_requests()
    assert tags.count("") == 1 and len(requests) > 14
    with_fields = {
        tag
        for _, _, operation in requests
        for tag in operation["tags"]
        if rest_reference.write_requests(tag)
    }
    assert sorted(filter(None, tags)) == sorted(with_fields)
    overview = rest_reference.write_requests("")
    for method, path, operation in requests:
        assert f"| `{method} {path}` | {operation['summary']} |" in overview
    text = rest_reference.write_requests("runs")
    assert (
        "| `num_workers` | whole number, 1 to 4,096 | Number of worker processes. | required |"
        in text
    )
    assert (
        "| `arguments` | list (text) or text | Further arguments of the task's script. |  |" in text
    )
    assert (
        "| `limit` | whole number, 0 to 5,000 | Maximum number of "
        "lines; with 0 they are only counted. | `5000` |"
    ) in text


def test_the_common_errors_of_the_page_are_those_of_every_request() -> None:
    shared = set.intersection(*(set(operation["responses"]) for _, path,
    operation in rest_reference.list_requests()
                                if path != "/api/health/"))  # fmt: skip
    assert shared == rest_reference.COMMON_ERRORS
    text = (REFERENCE / "rest_api.md").read_text()
    assert all(f"| {status}" in text or f", {status}" in text for status in shared)


def test_every_field_of_a_result_has_a_meaning_and_is_in_the_table(tmp_path: Path) -> None:
    fields = schema_reference.list_fields()
    assert [path for path, _, meaning in fields if not meaning.endswith(".")] == []
    listed = {path for path, _, _ in fields}
    runs = ROOT / "docs" / "results" / "digits" / "runs.tar.xz"
    unpack(runs, tmp_path)
    folder = next((tmp_path / "runs").glob("centralized-sgd-2-*"))
    result = json.loads((folder / "result.json").read_text())
    # What a script names is not in the table; the times are there once.
    named = (
        "configuration.options.",
        "software.",
        "steps_s.slowest.",
        "steps_s.rank_0.",
        "times.rank_0.",
        "goal.times.",
    )

    def look(value: object, prefix: str) -> None:
        for name, inner in value.items() if isinstance(value, dict) else ():
            path = f"{prefix}{'NAME' if prefix == 'files.' else name}"
            assert path in listed or path.startswith(named) or path == "files.NAME", path
            look(inner, f"{path}.")

    look(result, "")
    assert markers("result_folder.md", "schema") == ["result"]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.key)
def test_every_task_has_a_page_with_its_definition_curve_results_and_differences(
    task: Task,
) -> None:
    page = (REFERENCE / "tasks" / f"task{task.key}.md").read_text()
    readme = task.script.with_name("README.md")
    included = re.search(r"```\{include\} (\S+)", page)
    assert page.startswith(f"(task-{task.key})=\n") and included is not None
    assert (REFERENCE / "tasks" / included[1]).resolve() == readme
    sections = re.findall(r"^## (.*)$", readme.read_text(), re.MULTILINE)
    wanted = [
        "Definition",
        "Run it",
        "Expected curve",
        "Measured results",
        "Differences from version 3.0",
    ]
    assert [section for section in sections if section in wanted] == wanted
    row = re.search(
        rf"^\| \[{task.key}\]\(task{task.key}\.md\) \|.*$",
        (REFERENCE / "tasks" / "index.md").read_text(),
        re.M,
    )
    assert row is not None
    assert task.goal is None or re.search(
        rf"\| {task.goal:g}( %)? \({task.light_goal:g}( %)?\) \|", row[0]
    )


def names_in_code() -> set[str]:
    """The environment variables of MLBench that the code reads or sets, by their full names."""
    found: set[str] = set()
    folders = ("mlbench_core", "mlbench_master", "mlbench_cli", "benchmarks")
    for path in [
        ROOT / "setup.py",
        *(path for name in folders for path in (ROOT / name).rglob("*.py")),
    ]:
        text = path.read_text()
        if not re.search(r"MLBENCH_|\bvariable\(|read_interval\(", text):
            continue
        tree = ast.parse(text)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "variable":
                found.add(f"MLBENCH_KUBERNETES_{ast.literal_eval(node.args[0])}")
            elif isinstance(node, ast.Call) and ast.unparse(node) == "read_interval(self.name)":
                engine = re.search(r'^    name = "(\w+)"$', text, re.MULTILINE)
                assert engine is not None
                found.add(f"MLBENCH_{engine[1].upper()}_INTERVAL_S")
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                names = re.findall(r"(?<!\w)(MLBENCH_[A-Z_]*[A-Z])(?==|$)", node.value)
                # __all__ lists constants, which are not variables of the environment.
                found |= {
                    name
                    for name in names
                    if not re.search(rf"^{name}(: .*)? = ", text, re.MULTILINE)
                }
    return found


def test_the_page_on_configuration_has_every_variable_that_the_code_uses_and_no_other() -> None:
    found = names_in_code()
    assert {
        "MLBENCH_HOME",
        "MLBENCH_NODES",
        "MLBENCH_SLURM_INTERVAL_S",
        "MLBENCH_KUBERNETES_MARK",
    } < found
    rows = re.findall(
        r"^\| `(MLBENCH_\w+)` \|.* \(([^()]+)\) \|[^|]*\|$",
        (REFERENCE / "configuration.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for name, _ in rows) == sorted(found)
    places = {place for _, listed in rows for place in listed.split(", ")} - {
        "the script of the job"
    }
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_exported_name_has_an_entry_in_the_api_reference() -> None:
    modules = public_modules()
    entries = {f"{module}.{name}" for module, tree in modules.items() for name in own_names(tree)}
    missing = []
    for module, tree in modules.items():
        passed = handed_on(tree)
        missing += [
            f"{module}.{name}"
            for name in all_names(tree) or []
            if name not in {*own_names(tree), *passed}
        ]
        origins = {name: find_origin(module, name, modules) for name in passed}
        missing += [
            f"{module}.{name}"
            for name, origin in origins.items()
            if origin not in {*entries, *modules}
        ]
    assert len(entries) > 1000
    assert missing == []


def test_the_glossary_is_sorted_and_each_entry_has_a_few_short_sentences() -> None:
    text = (REFERENCE / "glossary.md").read_text()
    entries = re.findall(
        r"^([a-zA-Z][\w -]*)\n((?:  .*\n)+)", text.partition("```{glossary}\n")[2], re.MULTILINE
    )
    terms = [term for term, _ in entries]
    assert 25 <= len(terms) <= 45 and terms == sorted(terms)
    for term, definition in entries:
        sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(definition.split()))
        assert len(sentences) <= 3 and all(len(sentence.split()) <= 30 for sentence in sentences), (
            term
        )
