"""``mlbench run NAME K SCRIPT.py``: the words that go to the script, and the ones that do not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mlbench_cli import _follow
from mlbench_core.calling_environment import OBSERVER
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script that has an option of its own."""
    (tmp_path / "train.py").write_text('parser.add_argument("--seed")\n', encoding="utf-8")
    patch.chdir(tmp_path)
    return tmp_path


def command(fake: FakeMaster) -> list[str]:
    """Return the words of the worker's command of the last request."""
    return shlex.split(fake.requests[-1]["command"])


def test_a_script_is_enough(fake: FakeMaster, call: Call) -> None:
    result = call("run", "mine", "1", "2", "train.py", "--batch-size", "32", "a b")
    assert [(r["name"], r["num_workers"]) for r in fake.requests] == [("mine-1", 1), ("mine-2", 2)]
    assert command(fake) == ["python", "-m", OBSERVER, "train.py", "--batch-size", "32", "a b"]
    # It waits: the results are the reason for which a script is measured.
    assert "results: " in result.stdout and Path("mlbench-results/mine/mine-2.json").exists()
    assert result.stderr.count("goes to the script") == 0


def test_no_wait_leaves_the_runs_alone(fake: FakeMaster, call: Call) -> None:
    result = call("run", "mine", "2", "--no-wait", "train.py")
    assert result.stdout.splitlines()[1].split() == ["mine-2", "1", "2", "initialized"]
    assert not Path("mlbench-results").exists()


def test_all_words_after_the_script_are_its_own(fake: FakeMaster, call: Call) -> None:
    words = ["train.py", "--help", "-m", "--no-wait", "--", "--seed=3", "--network", "x", "b.py"]
    result = call("run", "mine", "2", *words)
    assert command(fake) == ["python", "-m", OBSERVER, *words]
    assert "network" not in fake.requests[-1]
    # The script has an option --seed, and --help is understood everywhere.
    remarks = [line for line in result.stderr.splitlines() if "goes to the script" in line]
    assert remarks == [
        f"{option} goes to the script: put options of mlbench before it"
        for option in ("--no-wait", "--network")
    ]


def test_no_remark_about_a_variable_of_the_script(fake: FakeMaster, call: Call) -> None:
    """A script may set its variables from the command line, as nanoGPT does."""
    Path("train.py").write_text('backend = "nccl"\nuse_gpu = 1\n', encoding="utf-8")
    result = call("run", "mine", "2", "train.py", "--backend=gloo", "--gpu")
    assert result.stderr.count("goes to the script") == 1
    assert "--gpu goes to the script" in result.stderr


def test_options_before_the_script_are_those_of_the_command(
    fake: FakeMaster, call: Call, folder: Path
) -> None:
    call(
        *("run", "mine", "2", "--network", "lan-1g", "--method", "power_sgd:rank=4"),
        *("--metric", "val_loss=val loss ([0-9.]+)", "--metric", "acc=acc (.+)"),
        *("--goal", "val_loss<=1.5", "--env", "A=b.py", "--cwd", str(folder), "-g", "train.py"),
    )
    assert command(fake)[3:] == [
        *("--method", "power_sgd:rank=4", "--metric", "val_loss=val loss ([0-9.]+)"),
        *("--metric", "acc=acc (.+)", "--goal", "val_loss<=1.5", "train.py"),
    ]
    request = fake.requests[-1]
    assert (request["network"], request["environment"]) == ("1gbit", {"A": "b.py"})
    assert (request["cwd"], request["gpu_enabled"]) == (str(folder), True)


def test_a_module_in_place_of_a_script(fake: FakeMaster, call: Call) -> None:
    call("run", "mine", "2", "--method", "bf16", "-m", "my.train", "--lr", "1")
    assert command(fake)[3:] == ["--method", "bf16", "-m", "my.train", "--lr", "1"]


def test_repeats_of_a_script_need_no_seed(fake: FakeMaster, call: Call) -> None:
    call("run", "mine", "2", "--repeats", "2", "--no-wait", "train.py")
    assert [r["command"].split()[3:] for r in fake.requests] == [["train.py"]] * 2
    call("run", "own", "2", "--repeats", "2", "--seed", "7", "--no-wait", "train.py", "{seed}")
    assert [r["command"].split()[3:] for r in fake.requests[2:]] == [
        ["train.py", seed] for seed in ("7", "8")
    ]


def test_the_script_of_an_elastic_run_is_not_measured(fake: FakeMaster, call: Call) -> None:
    call("run", "mine", "2", "3", "--elastic", "2:4", "--no-wait", "train.py", "--lr", "1")
    assert [request["elastic"] for request in fake.requests] == ["2:4", "2:4"]
    assert command(fake) == ["python", "train.py", "--lr", "1"]
    call("run", "own", "2", "--elastic", "1:2", "--command", "python train.py")
    assert (fake.requests[-1]["elastic"], command(fake)) == ("1:2", ["python", "train.py"])


def test_json_has_the_results(fake: FakeMaster, call: Call) -> None:
    answer = json.loads(call("run", "mine", "2", "--json", "train.py").stdout)
    assert [record["name"] for record in answer["results"]] == ["mine-2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "2", "nothing.py"], "nothing.py does not exist: give its path from this folder"),
        (["train.py"], "the name is missing: give NAME"),
        (["mine", "train.py"], "the number of workers is missing: give NUM_WORKERS"),
        (["mine", "2", "--lr", "train.py"], "Options of the script come after its name."),
        (
            ["mine", "2", "--task", "1a", "train.py"],
            "--task cannot be given with the script train.py: leave out one of them",
        ),
        (["mine", "2", "--command", "x", "train.py"], "--command cannot be given with the script"),
        (["mine", "2", "--image", "x", "train.py"], "--image cannot be given with the script"),
        (["mine", "2", "--light", "train.py"], "--light cannot be given with the script"),
        (
            ["mine", "2", "--task", "1a", "--method", "bf16"],
            "--method is for a script of your own: options of a task's script come after '--'",
        ),
        (
            ["mine", "2", "--command", "train.py", "--goal", "loss<=1"],
            "--goal needs a script, not a command: write for example",
        ),
        (["mine", "2", "--method", "bf61", "train.py"], "bf61"),
        (["mine", "2", "--metric", "loss=(", "train.py"], "loss"),
        (["mine", "2", "--goal", "loss", "train.py"], "goal must be"),
        (["mine", "2", "--seed", "3", "train.py"], "--seed needs {seed} in the command"),
        (["mine", "2", "--elastic", "2", "train.py"], "--elastic': must be MIN:MAX, two numbers"),
        (["mine", "2", "--elastic", "3:2", "train.py"], "with 1 <= MIN <= MAX, not '3:2'"),
        (
            ["mine", "2", "5", "--elastic", "2:4", "train.py"],
            "must be a range with the number of workers, 5, not 2:4",
        ),
        (
            ["mine", "2", "--elastic", "1:2", "--task", "1a"],
            "--elastic cannot be given with --task: the workers of a task have a fixed number",
        ),
        (
            ["mine", "2", "--elastic", "1:2", "--goal", "val_loss<=1", "train.py"],
            "--goal cannot be given with --elastic",
        ),
    ],
)
def test_wrong_words_start_nothing(
    words: list[str], message: str, fake: FakeMaster, call: Call
) -> None:
    assert message in " ".join(call("run", *words, code=2).stderr.split())
    assert fake.requests == []


def test_repeats_of_a_script_show_a_step_of_each_number_of_workers(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    patch.setattr(_follow, "print_steps", lambda records: shown.extend(r.name for r in records))
    call("run", "mine", "1", "2", "--repeats", "2", "train.py")
    assert shown == ["mine-1-r1", "mine-2-r1"]
