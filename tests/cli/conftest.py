"""Fixtures of the command's tests: a fake master, and a way to call the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlbench_cli import _wait, cli_group
from mlbench_cli.commands import charts, runs
from mlbench_core.comparison.group_repeats import Group
from tests.cli.fake_master import FakeMaster

Call = Callable[..., Result]
DRAW_OVERVIEW = charts.draw_overview


def draw_nothing(groups: Sequence[Group], path: Path) -> Path:
    """Take the place of :func:`~mlbench_cli.commands.charts.draw_overview`, which takes seconds."""
    return path


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Like ``monkeypatch``, undone before the leak guard looks at the environment."""
    with pytest.MonkeyPatch.context() as patcher:
        yield patcher


@pytest.fixture
def fake(patch: pytest.MonkeyPatch) -> Iterator[FakeMaster]:
    """A fake master that the environment names."""
    master = FakeMaster()
    patch.setenv("MLBENCH_MASTER_URL", master.url)
    patch.setattr(_wait, "POLL_S", 0.01)
    patch.setattr(runs, "FOLLOW_POLL_S", 0.01)
    patch.setattr(charts, "draw_overview", draw_nothing)
    yield master
    master.close()


@pytest.fixture
def call() -> Call:
    """Call the command: ``call("status", "demo-1", code=1)`` asserts on the exit status."""

    def invoke(*arguments: str, code: int = 0, input: str | None = None) -> Result:
        result = CliRunner().invoke(cli_group, list(arguments), input=input, prog_name="mlbench")
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return invoke
