"""The group: what it loads, how it fails."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlbench_cli import cli_group
from mlbench_cli.cli import COMMANDS
from mlbench_core import __version__
from mlbench_core.errors import MasterError
from tests.cli.conftest import Call

HEAVY = (
    "numpy",
    "requests",
    "rich",
    "torch",
    "kubernetes",
    "matplotlib",
    "platformdirs",
    "mlbench_core.utils",
)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_click_only(option: str) -> None:
    code = (
        f"import sys, mlbench_cli as cli\nsys.argv = ['mlbench', '{option}']\ntry:\n    "
        "cli.main()\nexcept SystemExit as end:\n    assert end.code == 0\nloaded = [m for m in "
        f"{HEAVY!r} if m in sys.modules]\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_and_their_static_help() -> None:
    """Each command loads, and the line of the overview is the line of the command."""
    context = click.Context(cli_group)
    assert set(cli_group.list_commands(context)) == {
        *(
            "charts",
            "compare",
            "completion",
            "delete",
            "download",
            "env",
            "get-dashboard-url",
            "import",
            "logs",
        ),
        *("master", "network", "predict", "recommend", "results", "run"),
        *("status", "stop", "sweep", "tasks"),
        *("create-cluster", "data", "delete-cluster", "list-clusters", "set-cluster"),
    }
    for name in COMMANDS:
        command = cli_group.get_command(context, name)
        assert isinstance(command, click.Command), name
        assert command.name == name
        assert command.help


def test_commands_need_the_base_requirements_only() -> None:
    """A wheel without extras has all commands; only what they do may ask for one."""
    blocked = sorted(set(_modules_of_packages()) - _modules_of_base_requirements())
    assert {"torch", "pydantic", "typing_extensions", "matplotlib"} <= set(blocked)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\nfrom mlbench_cli.cli import "
        "COMMANDS, cli_group\nfor name in COMMANDS:\n    assert cli_group.get_command(None, name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _modules_of_packages() -> dict[str, set[str]]:
    """Every importable module of the installed packages, with the packages that have it."""
    found = importlib.metadata.packages_distributions()
    ours = ("mlbench_cli", "mlbench_core", "mlbench_master", "mlbench_benchmarks")
    return {
        name: {canonicalize_name(package) for package in packages}
        for name, packages in found.items()
        if name.isidentifier() and name not in ours and name not in sys.stdlib_module_names
    }


def _modules_of_base_requirements() -> set[str]:
    """The modules that an installation without extras has."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    packages: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        # Without an extra, the marker "extra == ..." is false.
        if name in packages or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        packages.add(name)
        wanted += [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    return {module for module, owners in _modules_of_packages().items() if owners & packages}


def test_every_command_has_json() -> None:
    context = click.Context(cli_group)
    commands: list[click.Command | None] = []
    for name in COMMANDS:
        command = cli_group.get_command(context, name)
        commands += command.commands.values() if isinstance(command, click.Group) else [command]
    without = [
        c.name
        for c in commands
        if c and not any("--json" in parameter.opts for parameter in c.params)
    ]
    assert without == ["completion"], "its output is a script"


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlbench_cli", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"mlbench, version {__version__}\n",
        "",
    )


def test_unknown_command_is_wrong_use(call: Call) -> None:
    assert "No such command 'nonsense'" in call("nonsense", code=2).stderr
    assert "Did you mean 'get-dashboard-url'?" in call("get-dashboard", code=2).stderr


def test_the_path_of_3_0() -> None:
    from mlbench_cli.cli import cli_group as old

    assert old is cli_group


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MasterError("it broke\nin two lines"), "mlbench: it broke in two lines\n"),
        (
            OSError(28, "No space left on device", "/data/x"),
            "mlbench: No space left on device: /data/x\n",
        ),
    ],
)
def test_expected_errors_are_one_line(
    error: Exception, line: str, call: Call, patch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    patch.setitem(cli_group.commands, "broken", broken)
    result = call("broken", code=1)
    assert result.stdout == ""
    assert result.stderr == line
