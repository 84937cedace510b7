"""The tutorial's scripts, started with the words of the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.data import test_data
from tests.helpers.forked import run_scripts
from tests.helpers.processes import ROOT, free_port, post_json, running_master, wait_for

PAGE = ROOT / "docs" / "tutorials" / "porting.md"


def documented_commands(pattern: str) -> list[str]:
    """Lines of the page's command blocks that match, continued lines joined."""
    text = PAGE.read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if re.match(pattern, line)]


def mnist_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for file in test_data("mnist").glob("*.gz"):
        (folder / file.name).symlink_to(file)
    return folder


def test_two_workers_started_by_hand_as_documented_reach_the_goal_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mnist_folder(tmp_path)
    commands = documented_commands(r"python benchmarks/tutorial/train_dist\.py")
    assert [re.search(r"--rank (\d)", c)[1] for c in commands] == ["0", "1"]  # type: ignore[index]
    with running_master(tmp_path / "master") as master:
        run = post_json(f"{master.url}/api/runs/", {"name": "by-hand", "num_workers": 1, "command": "python -c pass"})
        assert all(f"--run_id {run['id']}" in command for command in commands)
        monkeypatch.chdir(ROOT)
        workers = [[*shlex.split(command)[1:], "--data", str(folder)] for command in commands]
        variables = {"MASTER_PORT": str(free_port()), "MLBENCH_MASTER_URL": master.url}
        both = run_scripts(workers, timeout_s=240, **variables)
        assert [done.returncode for done in both] == [0, 0], both
        assert "goal reached" in both[0].stdout
        assert float(master.metric_values(run["id"], "val_global_Prec@1 @ 0")[-1]) >= 80
        assert len(master.metric_values(run["id"], "TaskResult @ 0")) == 1


def test_run_by_a_master_reports_to_it(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    (documented,) = documented_commands(r"mlbench run tutorial")
    command = shlex.split(documented)[shlex.split(documented).index("--command") + 1]
    assert all(word in command for word in ("{hosts}", "{rank}", "{run_id}"))
    with running_master(tmp_path / "master") as master:
        run = post_json(
            f"{master.url}/api/runs/",
            {"name": "tutorial-2", "num_workers": 2, "num_cpus": 1, "max_bandwidth": 1000, "backend": "gloo",
             "image_name": "custom_image", "custom_image_name": "none",
             "custom_image_command": command.replace("$PWD/data", str(folder))},
        )  # fmt: skip
        wait_for(lambda: master.state(run["id"]) in ("finished", "failed"), 240, "the run to end")
        assert master.state(run["id"]) == "finished", master.log(run["id"])
        assert master.metric_values(run["id"], "TaskResult @ 0")[0].startswith("80% Top 1 Validation Accuracy reached")
        accuracies = master.metric_values(run["id"], "val_global_Prec@1 @ 0")
        assert float(accuracies[-1]) >= 80
        assert len(master.metric_values(run["id"], "TotalCumulativeTrainTime @ 0")) == 1
