"""The scripts of the tutorial, started as the page says, and the losses of its steps."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest

from mlbench_core.results.folder import read_result, verify_folder
from tests.helpers.data import test_data
from tests.helpers.forked import run_scripts
from tests.helpers.processes import ROOT, free_port, post_json, running_master, wait_for
from tests.helpers.thorough import some

PAGE = ROOT / "docs" / "tutorials" / "porting.md"
SCRIPTS = ROOT / "benchmarks" / "tutorial"
STEPS = range(6)
EPOCHS = 3


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
    commands = documented_commands(r"python benchmarks/tutorial/step5\.py")
    assert [re.search(r"--rank (\d)", c)[1] for c in commands] == ["0", "1"]  # type: ignore[index]
    with running_master(tmp_path / "master") as master:
        run = post_json(
            f"{master.url}/api/runs/",
            {"name": "by-hand", "num_workers": 1, "command": "python -c pass"},
        )
        assert all(f"--run_id {run['id']}" in command for command in commands)
        monkeypatch.chdir(ROOT)
        workers = [[*shlex.split(command)[1:], "--data", str(folder)] for command in commands]
        variables = {
            "MASTER_PORT": str(free_port()),
            "MLBENCH_MASTER_URL": master.url,
            "MLBENCH_OUTPUT": str(tmp_path / "output"),
        }
        both = run_scripts(workers, timeout_s=240, **variables)
        assert [done.returncode for done in both] == [0, 0], both
        assert "goal reached" in both[0].stdout
        assert float(master.metric_values(run["id"], "val_global_Prec@1 @ 0")[-1]) >= 80
        assert len(master.metric_values(run["id"], "TaskResult @ 0")) == 1
    results = tmp_path / "output" / "step5" / str(run["id"])
    assert verify_folder(results) == []
    assert read_result(results)["configuration"]["workers"] == 2


def test_run_by_a_master_reports_to_it(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    (documented,) = documented_commands(r"mlbench run tutorial")
    command = shlex.split(documented)[shlex.split(documented).index("--command") + 1]
    assert all(word in command for word in ("{hosts}", "{rank}", "{run_id}"))
    with running_master(tmp_path / "master") as master:
        run = post_json(
            f"{master.url}/api/runs/",
            {"name": "tutorial-2", "num_workers": 2, "num_cpus": 1, "max_bandwidth": 1000,
             "backend": "gloo",
             "image_name": "custom_image",
             "custom_image_command": command.replace("$PWD/data", str(folder))},
        )  # fmt: skip
        wait_for(lambda: master.state(run["id"]) in ("finished", "failed"), 240, "the run to end")
        assert master.state(run["id"]) == "finished", master.log(run["id"])
        assert master.metric_values(run["id"], "TaskResult @ 0")[0].startswith(
            "80% Top 1 Validation Accuracy reached"
        )
        accuracies = master.metric_values(run["id"], "val_global_Prec@1 @ 0")
        assert float(accuracies[-1]) >= 80
        assert len(master.metric_values(run["id"], "TotalCumulativeTrainTime @ 0")) == 1
        assert master.metric_values(run["id"], "batch_load @ 0"), "the loading of data counts"
        (result,) = master.metric_values(run["id"], "result @ 0")
        assert json.loads(result)["samples"] > 0


@pytest.fixture(scope="module")
def small_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 3,200 training images and 640 test images of MNIST, in torchvision's folders."""
    source = test_data("mnist")
    folder = tmp_path_factory.mktemp("small-mnist")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 3200), ("t10k", 640)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            content = gzip.decompress((source / f"{split}-{kind}-ubyte.gz").read_bytes())
            shortened = content[:4] + count.to_bytes(4, "big") + content[8 : header + count * size]
            (raw / f"{split}-{kind}-ubyte").write_bytes(shortened)
    return folder


def losses(step: int, world_size: int, folder: Path) -> list[list[float]]:
    """The loss of each epoch that every worker prints, by rank."""
    hosts = ",".join(["127.0.0.1"] * world_size)
    meeting = ["--world-size", str(world_size)] if step == 0 else ["--hosts", hosts]
    run_id = ["--run_id", "1"] if step >= 4 else []
    workers = [
        [str(ROOT / "tests" / "benchmarks" / "on_small_mnist.py"), str(SCRIPTS / f"step{step}.py"),
         "--rank", str(rank), *meeting, *run_id, "--data", str(folder), "--epochs", str(EPOCHS)]
        for rank in range(world_size)
    ]  # fmt: skip
    done = run_scripts(
        workers,
        timeout_s=240,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        MLBENCH_OUTPUT=str(folder / "output"),
    )
    assert [worker.returncode for worker in done] == [0] * world_size, done
    return [
        [
            float(loss)
            for loss in re.findall(
                rf"^rank {rank} epoch \d loss (\S+)$", worker.stdout, re.MULTILINE
            )
        ]
        for rank, worker in enumerate(done)
    ]


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_each_step_runs_and_trains_as_the_step_before(world_size: int, small_mnist: Path) -> None:
    by_step = [losses(step, world_size, small_mnist) for step in STEPS]
    assert all(len(of_worker) == EPOCHS for of_step in by_step for of_worker in of_step)
    means = [
        [sum(epoch) / world_size for epoch in zip(*of_step, strict=True)] for of_step in by_step
    ]
    assert by_step[1] == by_step[0]
    # Step 2 assigns the images to batches in another way. Augmentation would change the last loss
    # by 8 %.
    assert means[2] == pytest.approx(means[1], rel=0.01)
    # Step 3 adds gradients up in another order.
    assert means[3] == pytest.approx(means[2], rel=1e-5)
    assert by_step[4] == by_step[3]
    # The validation of step 5 draws from the random generator that shuffles the batches of later
    # epochs.
    assert [worker[0] for worker in by_step[5]] == [worker[0] for worker in by_step[4]]
    assert means[5] == pytest.approx(means[4], rel=0.01)


def test_the_page_shows_every_step() -> None:
    page = PAGE.read_text()
    for step in STEPS:
        assert f"benchmarks/tutorial/step{step}.py" in page
    for step in STEPS[1:]:
        assert f":diff: ../../benchmarks/tutorial/step{step - 1}.py" in page
