"""``mlbench run``: what it asks, sends, shows and writes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import _embedded, _follow, _wait
from mlbench_cli.commands import charts
from mlbench_cli.commands import run as run_module
from mlbench_core.client import settings
from mlbench_core.comparison.load_results import load
from mlbench_core.errors import MasterRequestError
from mlbench_core.results.folder import FILES, verify_folder
from mlbench_core.run_terms import GoalAim
from mlbench_core.tasks import get_task
from tests.cli.conftest import DRAW_OVERVIEW, Call
from tests.cli.fake_master import FakeMaster, entry
from tests.results.helpers import write_run


def test_several_numbers_start_several_runs(fake: FakeMaster, call: Call) -> None:
    text = call(
        "run",
        "demo",
        "1",
        "2",
        "--task",
        "task1a",
        "--num-cpus",
        "1",
        "--light",
        "--",
        "--dataset",
        "digits",
    )
    assert [(r["name"], r["num_workers"]) for r in fake.requests] == [("demo-1", 1), ("demo-2", 2)]
    assert fake.requests[0] == {
        "name": "demo-1",
        "num_workers": 1,
        "num_cpus": 1.0,
        "backend": "gloo",
        "gpu_enabled": False,
        "light_target": True,
        "task": "1a",
        "arguments": ["--dataset", "digits"],
        # The dashboard shows them as one group.
        "tags": ["demo"],
    }
    assert text.stdout.splitlines()[1].split() == ["demo-1", "1", "1", "initialized"]


def test_one_number_names_the_run_too(fake: FakeMaster, call: Call) -> None:
    started = json.loads(call("run", "demo", "2", "--task", "1a", "--json").stdout)
    assert [item["name"] for item in started] == ["demo-2"]


def test_custom_image(fake: FakeMaster, call: Call) -> None:
    call(
        "run",
        "own",
        "1",
        "--image",
        "me/img:1",
        "--command",
        "python x.py",
        "--backend",
        "mpi",
        "--",
        "--a",
        "b c",
    )
    request = fake.requests[0]
    assert request["image_name"] == "custom_image"
    assert request["custom_image_name"] == "me/img:1"
    assert request["custom_image_command"] == "python x.py --a 'b c'"
    assert request["backend"] == "mpi"


def test_custom_command_without_an_image(fake: FakeMaster, call: Call) -> None:
    call("run", "bare", "1", "--command", "true", "-g", "-l", "-c", "3")
    call("run", "same", "1", "--image", "custom_image", "--command", "true", "-g", "-l", "-c", "3")
    wanted = {
        "command": "true",
        "num_workers": 1,
        "backend": "gloo",
        "gpu_enabled": True,
        "light_target": True,
    }
    assert fake.requests == [
        wanted | {"name": name, "num_cpus": 3.0} for name in ("bare-1", "same-1")
    ]


def test_repeats_have_names_and_seeds_of_their_own(fake: FakeMaster, call: Call) -> None:
    call("run", "demo", "1", "2", "--task", "1a", "--repeats", "3", "--", "--dataset", "digits")
    assert [(r["name"], r["num_workers"], r["arguments"][2:]) for r in fake.requests] == [
        (f"demo-{workers}-r{repeat}", workers, ["--seed", str(41 + repeat)])
        for repeat in (1, 2, 3)
        for workers in (1, 2)
    ]
    call(
        "run",
        "own",
        "1",
        "--command",
        "python -m x",
        "--repeats",
        "2",
        "--seed",
        "7",
        "--",
        "--s={seed}",
        "{rank}",
    )
    assert [r["command"] for r in fake.requests[6:]] == [
        f"python -m x --s={seed} '{{rank}}'" for seed in (7, 8)
    ]
    call("run", "one", "1", "--task", "1a", "--seed", "5")
    call("run", "bare", "1", "--command", "x --seed {seed}")
    assert (fake.requests[-2]["name"], fake.requests[-2]["arguments"]) == ("one-1", ["--seed", "5"])
    assert fake.requests[-1]["command"] == "x --seed 42"


def test_an_unknown_placeholder_is_refused_with_the_known_ones(
    fake: FakeMaster, call: Call
) -> None:
    result = call(
        "run", "own", "1", "--command", "train --rank {rank} --size {num_workers}", code=2
    )
    assert (
        "must be one of {run_id}, {rank}, {hosts}, {backend}, {seed}, not '{num_workers}'"
        in " ".join(result.stderr.split())
    )
    assert fake.requests == []
    call("run", "own", "1", "--command", "sh -c 'echo ${HOME}' {run_id}", "--", "--file={epoch}")
    assert fake.requests[0]["command"] == "sh -c 'echo ${HOME}' '{run_id}' '--file={epoch}'"


def test_the_folder_and_the_environment_of_a_call_reach_the_master(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    patch.setenv("NCCL_ALGO", "Ring")
    patch.setenv("MINE", "a b")
    (tmp_path / "data").mkdir()
    call("run", "plain", "1", "--command", "python train.py")
    call(
        "run",
        "other",
        "1",
        "--task",
        "1a",
        "--cwd",
        "data",
        "--env",
        "MINE",
        "--env",
        "NEW=x=y",
        "--oversubscribe",
    )
    call("run", "image", "1", "--image", "me/mine:1", "--command", "x")
    plain, other, image = fake.requests
    sent = [
        caller and (caller["cwd"], caller["environment"]["NCCL_ALGO"]) for caller in fake.callers
    ]
    assert sent == [(str(tmp_path), "Ring"), (str(tmp_path / "data"), "Ring"), None]
    assert "MINE" not in fake.callers[0]["environment"]  # type: ignore[index]
    # A script is found in the folder of the call, under the name that the user gave.
    assert (plain["command"], plain.get("cwd"), plain.get("environment")) == (
        "python train.py",
        None,
        None,
    )
    assert (other["cwd"], other["oversubscribe"]) == (str(tmp_path / "data"), True)
    assert other["environment"] == {"MINE": "a b", "NEW": "x=y"}
    assert image.keys().isdisjoint({"cwd", "environment", "oversubscribe"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--command", "exec python x"],
            "not 'exec': no shell runs it, so write bash -c 'exec ...'",
        ),
        (["--command", "cd /tmp"], "not 'cd': no shell runs it"),
        (["--command", "A=1 python x"], "not 'A=1': no shell runs it, so write env A=1 ..."),
        (["--command", "true && true"], "'&&' is for a shell: write bash -c '...'"),
        (["--command", "true; true"], "';' is for a shell"),
        (["--command", "true > log"], "'>' is for a shell"),
        (["--command", "true 2>&1"], "'2>&1' is for a shell"),
        (["--command", "true | cat"], "'|' is for a shell"),
        (["--command", "true", "--env", "NOT_SET_HERE"], "NOT_SET_HERE is not set here: set it"),
        (
            ["--command", "true", "--env", "RANK=1"],
            "must be one that MLBench does not set itself, not RANK",
        ),
        (
            ["--command", "true", "--env", "=1"],
            "the name of a variable must be letters, digits and '_'",
        ),
    ],
)
def test_a_command_for_a_shell_and_a_wrong_variable_are_refused_at_the_call(
    arguments: list[str], message: str, fake: FakeMaster, call: Call
) -> None:
    assert message in " ".join(call("run", "demo", "1", *arguments, code=2).stderr.split())
    assert fake.requests == []


@pytest.mark.parametrize(
    "command", ["bash -c 'a && b; c > d'", 'python -c "a; b | c"', "echo a\\|b", "x --sep=; y&z"]
)
def test_quoted_characters_of_a_shell_are_no_shell(
    fake: FakeMaster, call: Call, command: str
) -> None:
    if command.startswith("x"):
        command = command.replace("; ", " ")
    call("run", "demo", "1", "--command", command)
    assert len(fake.requests) == 1


def test_too_many_workers_are_refused_before_any_run_starts(fake: FakeMaster, call: Call) -> None:
    fake.most_workers = 8
    error = call("run", "bad", "2", "99", "--task", "1a", code=1).stderr
    assert "the number of workers must be at most 8 at" in error and "--oversubscribe" in error
    assert fake.requests == []
    call("run", "bad", "99", "--task", "1a", "--oversubscribe")
    assert [request["oversubscribe"] for request in fake.requests] == [True]


def test_exclusive_reaches_the_master(fake: FakeMaster, call: Call) -> None:
    call("run", "alone", "1", "--task", "1a", "--exclusive")
    call("run", "beside", "1", "--task", "1a")
    assert [request.get("exclusive") for request in fake.requests] == [True, None]


def test_the_text_of_a_network_reaches_the_master(
    fake: FakeMaster, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("[link]\nbandwidth = '1gbit'\nround_trip = '5ms'\n")
    call("run", "named", "2", "--task", "1a", "--network", "wan-transatlantic")
    call("run", "filed", "2", "--task", "1a", "--network", str(file))
    call("run", "plain", "2", "--task", "1a")
    assert [request.get("network") for request in fake.requests] == [
        "127mbit,90ms",
        "1gbit,5ms",
        None,
    ]
    assert (
        "did you mean 'lan-1g'"
        in call("run", "a", "2", "--task", "1a", "--network", "lan1g", code=2).stderr
    )


def test_the_options_of_the_engine_reach_the_master(fake: FakeMaster, call: Call) -> None:
    call(
        "run",
        "demo",
        "1",
        "--task",
        "1a",
        "--engine",
        "local",
        "--engine-options",
        "--time 1:00 '--comment=a b'",
    )
    assert fake.requests[-1]["engine_options"] == ["--time", "1:00", "--comment=a b"]


def test_a_master_with_another_engine_is_refused(fake: FakeMaster, call: Call) -> None:
    result = call("run", "demo", "1", "--task", "1a", "--engine", "slurm", code=1)
    assert (
        f"the master at {fake.url} starts runs with the engine local, not slurm: stop it with"
        in result.stderr
    )
    assert fake.runs == {}


def test_a_master_that_is_started_gets_the_engine(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("MLBENCH_MASTER_URL", raising=False)
    patch.setattr(_embedded, "_free_port", lambda: 5080)
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError

    patch.setattr(_embedded.subprocess, "Popen", start)
    for engine in ("slurm", None):
        with pytest.raises(OSError):
            _embedded.find_or_start(engine=engine)
    assert [command[-2:] for command in started] == [
        ["--engine", "slurm"],
        ["--end-when-idle", "1800"],
    ]


def test_wait_pools_repeats_and_keeps_their_result_folders(
    fake: FakeMaster, call: Call, tmp_path: Path
) -> None:
    def run_of(item: dict[str, Any]) -> Path:
        seed = int(item["name"][-1])
        return write_run(
            tmp_path / "master" / item["name"], workers=1, epoch_s=10.0 + seed, seed=seed
        )

    fake.result_folder = run_of
    out = tmp_path / "out"
    arguments = (
        "run",
        "demo",
        "1",
        "--task",
        "1a",
        "--repeats",
        "2",
        "--wait",
        "--output",
        str(out),
    )
    shown = call(*arguments).stdout.splitlines()
    assert shown[0].split()[:5] == ["CONFIGURATION", "WORKERS", "N", "REACHED", "MISSED"]
    assert shown[1].split()[:6] == ["centralized_sgd", "1", "2", "2", "0", "34.50"]
    assert {path.name for path in (out / "demo-1-r2").iterdir()} == set(FILES)
    assert verify_folder(out / "demo-1-r2") == []
    assert json.loads((out / "demo-1-r2.json").read_text())["run"]["name"] == "demo-1-r2"
    assert len(load([out])) == 2, "the JSON file of a run is not a second run"
    content = json.loads(call(*arguments, "--replace", "--json").stdout)
    assert content["comparison"]["rows"][0]["mean_s"] == 34.5
    assert [result["folder"] for result in content["results"]] == [
        str(out / f"demo-1-r{k}") for k in (1, 2)
    ]


def test_a_result_folder_that_is_lost_is_an_error_after_the_table(
    fake: FakeMaster, call: Call, tmp_path: Path
) -> None:
    fake.cut_download = True
    result = call(
        "run",
        "demo",
        "1",
        "--task",
        "1a",
        "--repeats",
        "2",
        "--wait",
        "--output",
        str(tmp_path),
        code=1,
    )
    assert "no result folder of demo-1-r1: " in result.stderr
    assert [path.name for path in sorted(tmp_path.glob("demo*"))] == [
        "demo-1-r1.json",
        "demo-1-r2.json",
    ]
    assert "81.50" in result.stdout


def test_a_container_is_an_option_of_the_engine_and_finds_the_script_in_its_image(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.chdir(tmp_path)
    (tmp_path / "main.py").touch()
    own = ("--image", "me/img:1", "--command", "main.py {rank}", "--container", "podman")
    call("run", "own", "1", *own, "--engine-options", "--volume /a:/b")
    call("run", "task", "1", "--task", "1a", "--container", "docker")
    first, second = fake.requests
    assert first["custom_image_command"] == "main.py '{rank}'"
    assert first["engine_options"] == ["--container", "podman", "--volume", "/a:/b"]
    assert second["engine_options"] == ["--container", "docker"]


def test_notes_of_the_master_are_shown(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    create = fake._create

    def create_with_note(body: dict[str, Any]) -> tuple[int, Any]:
        status, made = create(body)
        return status, {**made, "job_metadata": {"notes": ["the image me/img:1 is not used"]}}

    patch.setattr(fake, "_create", create_with_note)
    result = call("run", "own", "1", "--image", "me/img:1", "--command", "true")
    assert "own-1: the image me/img:1 is not used\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the name is missing: give NAME"),
        (["demo"], "the number of workers is missing: give NUM_WORKERS"),
        (
            ["demo", "1"],
            "the task is missing: "
            "give a script, --task TASK (see 'mlbench tasks') or --command COMMAND",
        ),
        (["demo", "0", "--task", "1a"], "0 is not in the range"),
        (["demo", "two", "--task", "1a"], "'two' is not a valid integer"),
        (
            ["demo", "1", "--task", "1a", "--dataset", "digits"],
            "Options of the script come after '--'.",
        ),
        (
            ["demo", "1", "--task", "9z"],
            "task must be one of 0, 1a, 1b, 2a, 3a, 4a, 4b, 5a, not '9z'",
        ),
        (["demo", "1", "--task", "1a", "--image", "x"], "--task cannot be given with --image"),
        (["demo", "1", "--image", "x"], "the command of image x is missing: give --command"),
        (
            ["demo", "1", "--task", "1a", "--backend", "pigeon"],
            "'pigeon' is not one of 'gloo', 'nccl', 'mpi'",
        ),
        (
            ["demo", "1", "--task", "1a", "--backend", "nccl"],
            "nccl needs GPUs: give each worker a GPU (--gpu)",
        ),
        (["Demo_X", "1", "--task", "1a"], "the name of a run must be 1 to 63 lowercase letters"),
        (["a" * 62, "1000", "--task", "1a"], "the name of a run must be"),
        (["demo", "1", "--task", "1a", "--output", "x"], "--output needs --wait"),
        (["demo", "1", "--task", "1a", "--num-cpus", "0"], "0.0 is not in the range"),
        (
            ["demo", "1", "--task", "1a", "--num-cpus", "nan"],
            "'nan' must be a positive number of cores",
        ),
        (
            ["demo", "1", "--task", "1a", "--num-cpus", "inf"],
            "'inf' must be a positive number of cores",
        ),
        (["demo", "1", "--command", "'unbalanced"], "the command must be quoted as for a shell"),
        (["demo", "1", "--task", "1a", "--repeats", "0"], "0 is not in the range"),
        (
            ["demo", "1", "--task", "1a", "--engine", "lsf"],
            "'lsf' must be one of local, hosts, kubernetes, slurm",
        ),
        (
            ["demo", "1", "--task", "1a", "--engine-options", "'a"],
            "the engine options must be quoted as for a shell",
        ),
        (["a" * 60, "1", "--task", "1a", "--repeats", "2"], "the name of a run must be"),
        (
            ["demo", "1", "--command", "python x.py"],
            f"the script {Path.cwd() / 'x.py'} does not exist: give its path from this folder",
        ),
        (
            ["demo", "1", "--command", "true", "--repeats", "2"],
            "--repeats needs {seed} in the command",
        ),
        (["demo", "1", "--command", "true", "--seed", "2"], "--seed needs {seed} in the command"),
        (
            ["demo", "1", "--task", "1a", "--repeats", "2", "--", "--seed", "3"],
            "--seed among the arguments of the script cannot",
        ),
        (
            ["demo", "1", "--task", "1a", "--seed", "2", "--", "--seed=3"],
            "--seed among the arguments of the script cannot be given with --seed",
        ),
        (
            ["demo", "1", "--task", "0", "--repeats", "2"],
            "--repeats cannot be given with task 0: it only measures",
        ),
    ],
)
def test_wrong_use_is_status_2_and_starts_nothing(
    arguments: list[str], message: str, fake: FakeMaster, call: Call
) -> None:
    assert message in " ".join(call("run", *arguments, code=2).stderr.split())
    assert fake.requests == []


def test_asks_on_a_terminal_and_remembers(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(run_module, "_interactive", lambda: True)
    call("run", input="first\n1 2\n1a\nmpi\n")
    assert [r["name"] for r in fake.requests] == ["first-1", "first-2"]
    assert fake.requests[0]["backend"] == "mpi"
    assert settings.read(settings.LAST_RUN)["task"] == "1a"
    fake.runs.clear()
    call("run", "second", input="\n\n\n")
    assert [(r["name"], r["task"], r["backend"]) for r in fake.requests[2:]] == [
        ("second-1", "1a", "mpi"),
        ("second-2", "1a", "mpi"),
    ]


@pytest.mark.parametrize(("answer", "key"), [("0", "0"), ("1", "1a"), ("task2a", "2a")])
def test_a_terminal_shows_a_menu_of_tasks(
    answer: str, key: str, fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(run_module, "_interactive", lambda: True)
    shown = call("run", "demo", "1", input=f"{answer}\n\n").stderr
    assert "  [1] task 1a  Image classification (ResNet-20 (v1), CIFAR-10)" in shown
    assert fake.requests[0]["task"] == key


def test_the_last_entry_of_the_menu_asks_for_image_and_command(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(run_module, "_interactive", lambda: True)
    assert "[8] a command of your own" in call("run", "demo", "1", input="8\n\nsleep 1\n\n").stderr
    assert fake.requests[0]["command"] == "sleep 1"
    call("run", "image", "1", input="8\nme/img:1\npython x.py\n\n")
    assert fake.requests[1]["custom_image_name"] == "me/img:1"
    assert fake.requests[1]["custom_image_command"] == "python x.py"
    assert "4a, 4b, 5a, not '9'" in call("run", "more", "1", input="9\n\n", code=2).stderr


def test_damaged_memory_counts_as_empty(fake: FakeMaster, call: Call) -> None:
    path = Path(os.environ["MLBENCH_HOME"], settings.LAST_RUN)
    path.write_text("{broken")
    call("run", "demo", "1", "--task", "1a")
    assert json.loads(path.read_text())["name"] == "demo"
    assert path.stat().st_mode & 0o077 == 0


def test_a_request_that_is_refused_replaces_nothing(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    call("run", "demo", "1", "2", "--task", "1a")
    before = {run["name"]: run["id"] for run in fake.runs.values()}
    real = fake._create

    def refuse_two(body: Any) -> Any:
        return (
            (400, {"message": "num_workers: too many"}) if body["num_workers"] == 2 else real(body)
        )

    patch.setattr(fake, "_create", refuse_two)
    assert "too many" in call("run", "demo", "1", "2", "--task", "1a", "--replace", code=1).stderr
    assert {run["name"]: run["id"] for run in fake.runs.values()} == before


def test_name_in_use_starts_nothing_unless_replaced(fake: FakeMaster, call: Call) -> None:
    fake.add("demo-2")
    error = call("run", "demo", "1", "2", "--task", "1a", code=1).stderr
    assert error == (
        "mlbench: run demo-2 exists already: choose another "
        "NAME, or give --replace to delete it first\n"
    )
    assert fake.requests == []
    call("run", "demo", "1", "2", "--task", "1a", "--replace")
    assert fake.deleted == [1]
    assert [r["name"] for r in fake.requests] == ["demo-1", "demo-2"]


def test_refusal_says_what_was_started_before(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    create = fake._create

    def refuse_two(body: dict[str, Any]) -> tuple[int, Any]:
        if body["num_workers"] == 2:
            return 400, {"status": "Bad Request", "message": "num_workers: too many"}
        return create(body)

    patch.setattr(fake, "_create", refuse_two)
    error = call("run", "demo", "1", "2", "--task", "1a", code=1).stderr
    assert "started before the failure: demo-1" in error
    assert f"mlbench: num_workers: too many (HTTP 400 from {fake.url})" in error


def test_wait_shows_progress_table_results_and_chart(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(charts, "draw_overview", DRAW_OVERVIEW)
    result = call(
        "run", "demo", "1", "2", "--task", "1a", "--wait", "--output", str(tmp_path / "out")
    )
    progress = [line.split("] ", 1)[1] for line in result.stderr.splitlines()]
    assert "demo-1: started, 2 epochs done, Prec@1 60 of 80" in progress
    assert "demo-2: finished, 2 epochs done, Prec@1 60 of 80" in progress
    assert len(progress) == len(set(progress)), "a line is written only when something changes"
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[0][:6] == ["RUN", "WORKERS", "REACHED", "SECONDS", "COMPUTE", "COMMUNICATION"]
    assert table[0][6:] == ["METRICS", "DATA", "SAMPLES/S"]
    assert table[1] == ["demo-1", "1", "yes", "81.5", "80.0", "0.0", "0.5", "1.0", "400"]
    assert table[2] == ["demo-2", "2", "yes", "45.5", "40.0", "4.0", "0.5", "1.0", "800"]
    saved = json.loads((tmp_path / "out" / "demo-2.json").read_text())
    assert saved["run"]["name"] == "demo-2"
    assert "summary @ 0" in saved["metrics"]
    chart = tmp_path / "out" / "overview.png"
    assert f"results: {tmp_path / 'out'}" in result.stdout
    assert f"chart: {chart}" in result.stdout
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_cannot_be_drawn_is_one_line(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no\nfont")

    patch.setattr("mlbench_cli.commands.charts.draw_overview", fail)
    result = call("run", "demo", "1", "--task", "1a", "--wait", "--output", str(tmp_path / "out"))
    assert result.stderr.splitlines()[-1] == "no chart: RuntimeError: no font"
    assert result.stdout.splitlines()[1].split()[:4] == ["demo-1", "1", "yes", "81.5"]


def test_wait_hides_the_goal_of_data_it_does_not_know(
    fake: FakeMaster, call: Call, tmp_path: Path
) -> None:
    call_ = (
        "run",
        "demo",
        "1",
        "--task",
        "1a",
        "--wait",
        "--output",
        str(tmp_path),
        "--json",
        "--",
    )
    result = call(*call_, "--dataset", "faces")
    assert "Prec@1 60\n" in result.stderr
    assert json.loads(result.stdout)["results"][0]["total_s"] == 81.5


@pytest.mark.parametrize(
    ("key", "options", "threshold"),
    [
        ("1a", "--dataset digits", 95.0),
        ("1a", "--dataset digits --goal-after 60", None),
        ("1b", "--preset small", 50.0),
        ("3a", "", 70.0),
        ("3a", "--preset full", 70.0),
        ("3a", "--preset=small", 300.0),
        ("4b", "--dataset multi30k --preset small", 20.0),
        ("4b", "--dataset faces", None),
        ("5a", "", 3.28),
        ("5a", "--preset gpt2", 3.28),
    ],
)
def test_the_goal_shown_is_that_of_the_data_and_the_preset(
    key: str, options: str, threshold: float | None
) -> None:
    goal = run_module._goal(get_task(key), False, options.split())
    assert goal is not None
    assert goal.aim.threshold == threshold


def test_wait_fails_with_the_end_of_the_log(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    fake.final_state = "failed"
    patch.setattr(_follow, "LOG_LINES_SHOWN", 2)
    create = fake._create

    def create_with_log(body: dict[str, Any]) -> tuple[int, Any]:
        answer = create(body)
        fake.lines[answer[1]["id"]] = [
            *({"rank": 0, "text": f"line {i}"} for i in range(7)),
            {"rank": None, "stream": "stderr", "text": "a long report of torchrun"},
            {"rank": None, "stream": "system", "text": "worker 0 failed: exit status 1"},
        ]
        return answer

    patch.setattr(fake, "_create", create_with_log)
    result = call("run", "demo", "1", "--task", "1a", "--wait", "--output", str(tmp_path), code=1)
    assert result.stderr.splitlines()[-5:] == [
        "--- the last lines of demo-1 (all lines: mlbench logs demo-1)",
        "[0] line 5",
        "[0] line 6",
        "worker 0 failed: exit status 1",
        "mlbench: run demo-1 failed",
    ]
    assert (tmp_path / "demo-1.json").exists()


def test_interrupt_leaves_the_runs_alone(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(_wait, "wait_for", interrupted)
    result = call(
        "run", "demo", "1", "2", "--task", "1a", "--wait", "--output", str(tmp_path), code=1
    )
    assert "the runs continue ('mlbench stop demo-1 demo-2' stops them)" in result.stderr
    assert fake.deleted == []


def test_wait_fails_if_metrics_are_missing(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """A result without some of its metrics must not look like a complete one to a script."""
    add = fake.add

    def add_incomplete(*arguments: Any, **metrics: Any) -> int:
        run_id = add(*arguments, **metrics)
        fake.runs[run_id]["job_metadata"] = {
            "missing_metrics": "metrics are missing: 3 that a worker could not keep"
        }
        return run_id

    patch.setattr(fake, "add", add_incomplete)
    error = call(
        "run", "x", "1", "--command", "true", "--wait", "--output", str(tmp_path), code=1
    ).stderr
    assert error.endswith(
        "mlbench: results of run x-1 are incomplete: metrics are "
        "missing: 3 that a worker could not keep\n"
    )


def test_wait_fails_if_output_is_lost(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    add, lost = fake.add, "7 lines of output could not be written: No space left on device"

    def add_incomplete(*arguments: Any, **metrics: Any) -> int:
        run_id = add(*arguments, **metrics)
        fake.runs[run_id]["job_metadata"] = {"reason": lost}
        return run_id

    patch.setattr(fake, "add", add_incomplete)
    error = call(
        "run", "x", "1", "--command", "true", "--wait", "--output", str(tmp_path), code=1
    ).stderr
    assert error.endswith(f"mlbench: run x-1 finished, but {lost}\n")


def test_wait_survives_a_master_that_is_away_for_a_while(
    fake: FakeMaster, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlbench_cli._client import MasterClient

    run_id = fake.add("a-1")
    real, calls = MasterClient.run, []

    def flaky(client: MasterClient, wanted: int | str) -> dict[str, Any]:
        calls.append(wanted)
        if len(calls) < 3:
            raise MasterRequestError("cannot reach the master")
        return real(client, wanted)

    patch.setattr(MasterClient, "run", flaky)
    with MasterClient(fake.url) as client:
        ended = _wait.wait_for(client, [{"id": run_id, "name": "a-1", "state": "started"}], None)
        assert ended[0]["state"] == "finished"
        assert capsys.readouterr().err.count("trying again") == 1
        calls.clear()
        patch.setattr(_wait, "LOST_MASTER_S", 0.0)
        with pytest.raises(MasterRequestError, match="cannot reach"):
            _wait.wait_for(client, [{"id": run_id, "name": "a-1", "state": "started"}], None)


def test_wait_finds_a_metric_to_show_without_a_task(
    fake: FakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlbench_cli._client import MasterClient

    run_id = fake.add("a-1", val_global_F1=0.5)
    fake.metrics[run_id]["val_global_F1 @ 0"].append(entry(0.75))
    with MasterClient(fake.url) as client:
        _wait.wait_for(client, [{"id": run_id, "name": "a-1", "state": "started"}], None)
    assert "a-1: finished, 2 epochs done, F1 0.75" in capsys.readouterr().err


def test_wait_shows_the_metric_of_a_script_without_epochs(
    fake: FakeMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlbench_cli._client import MasterClient

    run_id = fake.add("a-1", val_loss=0.5)
    goal = _wait.Goal(GoalAim("val_loss", 0.25, minimize=True), has_epochs=False)
    with MasterClient(fake.url) as client:
        _wait.wait_for(client, [{"id": run_id, "name": "a-1", "state": "started"}], goal)
    assert "a-1: finished, val_loss 0.5 of 0.25" in capsys.readouterr().err
    # Without a goal, no number of epochs is made up.
    assert _wait.Progress("a", goal=_wait.Goal(GoalAim(), has_epochs=False)).epoch_text == "-"


@pytest.mark.parametrize(
    ("value", "goal", "fraction"),
    [
        (40.0, _wait.Goal(GoalAim("val_global_Prec@1", 80.0)), 0.5),
        (90.0, _wait.Goal(GoalAim("val_global_Prec@1", 80.0)), 1.0),
        (140.0, _wait.Goal(GoalAim("val_global_Perplexity", 70.0, minimize=True)), 0.5),
        (None, _wait.Goal(GoalAim("val_global_Prec@1", 80.0)), 0.0),
        (40.0, None, 0.0),
    ],
)
def test_fraction_of_the_goal(
    value: float | None, goal: _wait.Goal | None, fraction: float
) -> None:
    assert _wait.Progress("a", "started", value=value, goal=goal).fraction == fraction


@pytest.mark.parametrize(
    ("key", "options", "most"),
    [
        ("1a", "", 164),
        ("1a", "--epochs 3", 3),
        ("1a", "--epochs=3", 3),
        ("1a", "--epochs many", None),
        ("3a", "--preset small", None),
        ("4a", "--epochs 3", None),
    ],
)
def test_the_largest_number_of_epochs_is_that_of_the_script(
    key: str, options: str, most: int | None
) -> None:
    goal = run_module._goal(get_task(key), False, options.split())
    assert goal is not None
    assert goal.max_epochs == most


def test_time_left_is_a_bound_of_a_run_that_runs() -> None:
    goal = _wait.Goal(GoalAim("val_global_Prec@1", 80.0), max_epochs=10)
    running = _wait.Progress("a", "started", 4, "Prec@1", 60.0, goal, epoch_s=2.5)
    assert running.most_left_s == 15.0
    assert dataclasses.replace(running, epochs=12).most_left_s == 0.0
    unknown = ({"state": "finished"}, {"epoch_s": None}, {"goal": None})
    assert [dataclasses.replace(running, **change).most_left_s for change in unknown] == [None] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries", [[entry(1.0)], [entry(1.0), {"value": "2"}], [entry(1.0), {"date": "today"}]]
)
def test_a_rate_needs_two_dates(entries: list[dict[str, Any]]) -> None:
    assert _wait._epoch_s(entries) is None


def test_wait_says_what_a_run_waits_for_and_that_it_was_stopped(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    create = fake._create

    def create_waiting(body: dict[str, Any]) -> tuple[int, Any]:
        status, made = create(body)
        fake.states[made["id"]] = ["initialized", "failed"]
        reason = (
            "waits for run x, which is exclusive"
            if body["num_workers"] == 1
            else "stopped by a user"
        )
        fake.runs[made["id"]]["job_metadata"] = {"reason": reason}
        return status, made

    patch.setattr(fake, "_create", create_waiting)
    text = call(
        "run", "a", "1", "2", "--task", "1a", "--wait", "--output", str(tmp_path), code=1
    ).stderr
    assert "a-1: initialized, waits for run x, which is exclusive\n" in text
    assert text.endswith("mlbench: run a-1 failed; run a-2 stopped\n")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, "Brier 0.25 of 0.1"),
        ({"threshold": None}, "Brier 0.25"),
        # A goal on a value of one worker, and messages that no tracker sends.
        ({"metric": "train_loss"}, "Prec@1 60"),
        ({"threshold": "low"}, "Brier 0.25"),
        ({"max_epochs": float("inf")}, "Prec@1 60"),
        ({"unit": "steps"}, "Brier 0.25 of 0.1"),
    ],
)
def test_wait_shows_the_goal_of_a_script_of_your_own(
    change: dict[str, Any],
    shown: str,
    fake: FakeMaster,
    call: Call,
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
) -> None:
    plan = {
        "metric": "val_global_Brier",
        "threshold": 0.1,
        "minimize": True,
        "max_epochs": 5,
        **change,
    }
    create = fake._create

    def create_with_plan(body: dict[str, Any]) -> tuple[int, Any]:
        answer = create(body)
        more = {"val_global_loss @ 0": [entry(1)], "plan @ 0": [entry(json.dumps(plan))]}
        brier = {"val_global_Brier @ 0": [entry(0.5), entry(0.25)]} if "Brier" in shown else {}
        fake.metrics[answer[1]["id"]].update({**more, **brier})
        return answer

    patch.setattr(fake, "_create", create_with_plan)
    text = call("run", "own", "1", "--command", "true", "--wait", "--output", str(tmp_path)).stderr
    # The number of values of a run that counts steps is not that of its epochs.
    done = "" if "unit" in change else "2 epochs done, "
    assert f"own-1: started, {done}{shown}\n" in text
