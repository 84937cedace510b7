"""The page of a collection of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.comparison.group_repeats import pool
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.results_page import collection_page, recorded_commands
from mlbench_core.comparison.table import compare_groups
from mlbench_core.errors import ConfigurationError
from tests.results.helpers import ENVIRONMENT, write_run


def test_a_recorded_command_does_not_end_its_block(tmp_path: Path) -> None:
    command = ["python", "x.py", "````\n<script>\n````"]
    write_run(tmp_path / "run", environment={**ENVIRONMENT, "command_line": command})
    groups = pool(load([tmp_path]))
    page = collection_page(
        "Title", groups, compare_groups(groups), tmp_path, commands=recorded_commands(groups)
    )
    lines = page.splitlines()
    start = lines.index("```````bash")
    assert lines[start + 1 : lines.index("```````")] == ["python x.py '````", "<script>", "````'"]


def test_a_damaged_environment_is_one_message(tmp_path: Path) -> None:
    (write_run(tmp_path / "run") / "environment.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"environment\.json is not a JSON object"):
        recorded_commands(pool(load([tmp_path])))
