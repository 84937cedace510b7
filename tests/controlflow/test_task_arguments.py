"""The command line of the task scripts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.controlflow.task_arguments import add_run_arguments, task_main
from mlbench_core.errors import DatasetNotFoundError, WorkerError


@pytest.fixture(autouse=True)
def environment() -> Iterator[pytest.MonkeyPatch]:
    """The environment without a launcher, put back before the guard against leaks looks."""
    with pytest.MonkeyPatch.context() as patch:
        forget_launchers(patch)
        yield patch


def forget_launchers(patch: pytest.MonkeyPatch) -> None:
    for name in (*OPEN_MPI, *MPICH, "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        patch.delenv(name, raising=False)


def call(*argv: str, uid: str = "task1a", **options: Any) -> dict[str, Any]:
    """Run a task that notes the keywords it is called with."""
    calls: list[dict[str, Any]] = []
    task_main(lambda **kwargs: calls.append(kwargs), uid, argv=argv, **options)
    assert len(calls) == 1
    return calls[0]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Standard error of a command line that must end with status 2."""
    with pytest.raises(SystemExit) as stop:
        call(*argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_defaults_lie_below_the_users_folder_and_exist(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("MLBENCH_HOME", str(tmp_path))
    folders = {
        "dataset_dir": str(tmp_path / "datasets/torch/task1a"),
        "ckpt_run_dir": str(tmp_path / "checkpoints/task1a/1"),
        "output_dir": str(tmp_path / "output/task1a/1"),
    }
    others = {"run_id": "1", "rank": 0, "backend": "gloo", "hosts": None}
    assert call() == {
        **folders,
        **others,
        "validation_only": False,
        "gpu": False,
        "light_target": False,
    }
    assert all(Path(folder).is_dir() for folder in folders.values())


def test_the_task_is_called_by_keyword_whatever_the_order_of_its_parameters() -> None:
    seen = []

    def hosts_first(
        run_id,
        dataset_dir,
        ckpt_run_dir,
        output_dir,
        rank,
        hosts,
        backend,
        validation_only,
        gpu,
        light_target,
    ):  # type: ignore[no-untyped-def]
        seen.append((rank, hosts, backend, light_target))

    def backend_first(
        run_id,
        dataset_dir,
        ckpt_run_dir,
        output_dir,
        rank,
        backend,
        hosts,
        validation_only,
        gpu,
        light_target,
    ):  # type: ignore[no-untyped-def]
        seen.append((rank, hosts, backend, light_target))

    for main in (hosts_first, backend_first):
        task_main(
            main,
            argv=["--hosts", "127.0.0.1,127.0.0.1", "--rank", "1", "--backend", "mpi", "--light"],
        )
    assert seen == [(1, "127.0.0.1,127.0.0.1", "mpi", True)] * 2


def test_every_task_has_its_own_data_folder() -> None:
    assert call(uid="a")["dataset_dir"] != call(uid="b")["dataset_dir"]
    assert "wmt17" not in call(uid="a")["dataset_dir"]


@pytest.mark.parametrize(
    "spell", [lambda name: name, lambda n: n.replace("_", "-"), lambda n: n.replace("-", "_")]
)
def test_both_spellings_of_every_option(spell: Any, tmp_path: Path) -> None:
    def option(name: str) -> str:
        return "--" + spell(name)

    values = [
        option("run_id"),
        "7",
        option("validation_only"),
        option("gpu"),
        option("light"),
        option("rank"),
        "1",
    ]
    values += [option("backend"), "MPI", option("hosts"), "a,b"]
    for name in ("dataset", "checkpoint", "output"):
        values += [option(f"root-{name}"), str(tmp_path / name)]
    assert call(*values) == {
        "run_id": "7",
        "dataset_dir": str(tmp_path / "dataset/torch/task1a"),
        "ckpt_run_dir": str(tmp_path / "checkpoint/task1a/7"),
        "output_dir": str(tmp_path / "output/task1a/7"),
        "rank": 1,
        "backend": "mpi",
        "hosts": "a,b",
        "validation_only": True,
        "gpu": True,
        "light_target": True,
    }


def test_options_may_be_shortened_as_in_version_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [
        "--run",
        "7",
        "--root-data",
        str(tmp_path),
        "--root_ch",
        str(tmp_path),
        "--val",
        "--back",
        "gloo",
        "--li",
    ]
    seen = call(*short)
    assert seen["run_id"] == "7" and seen["backend"] == "gloo"
    assert seen["dataset_dir"] == str(tmp_path / "torch/task1a")
    assert seen["ckpt_run_dir"] == str(tmp_path / "task1a/7")
    assert seen["validation_only"] and seen["light_target"] and not seen["gpu"]
    assert "ambiguous option: --root could match" in error_of(capsys, "--root", str(tmp_path))


def test_gpu_means_nccl_unless_said_otherwise() -> None:
    assert call("--gpu")["backend"] == "nccl"
    assert call("--gpu", "--backend", "gloo")["backend"] == "gloo"


def test_torchrun_gives_the_rank_and_hosts_are_left_to_its_environment(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "4")
    seen = call()
    assert (seen["rank"], seen["hosts"]) == (3, None)


def test_a_broken_torchrun_environment_is_refused(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("RANK", "4")
    environment.setenv("WORLD_SIZE", "4")
    assert "torchrun gives rank 4 in a world of 4" in error_of(capsys)


def test_mpirun_gives_the_rank(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("OMPI_COMM_WORLD_RANK", "2")
    environment.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert call("--backend", "mpi")["rank"] == 2
    seen = call("--hosts", "a, b,c")
    assert (seen["rank"], seen["hosts"]) == (2, "a,b,c")
    assert "rank is 2, but hosts names 1 workers (a)" in error_of(capsys, "--hosts", "a")


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "argv", "has_mpi4py", "backend"),
    [
        (OPEN_MPI, [], True, "mpi"),
        (MPICH, [], True, "mpi"),
        (OPEN_MPI, [], False, "gloo"),
        (OPEN_MPI, ["--backend", "gloo"], True, "gloo"),
        (OPEN_MPI, ["--gpu"], True, "nccl"),
        ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"}, [], True, "gloo"),
        ({**MPICH, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, [], True, "gloo"),
    ],
)
def test_mpirun_means_mpi_as_in_version_3_unless_said_otherwise(
    environment: pytest.MonkeyPatch,
    variables: dict[str, str],
    argv: list[str],
    has_mpi4py: bool,
    backend: str,
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    environment.setattr("importlib.util.find_spec", lambda name: object() if has_mpi4py else None)
    seen = call(*argv)
    assert (seen["rank"], seen["backend"]) == (1, backend)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--hosts", "a,b", "--rank", "2"],
            "rank is 2, but hosts names 2 workers (a,b): rank must be 0 to 1",
        ),
        (["--hosts", "a,b", "--rank", "-1"], "rank must be 0 to 1"),
        (["--hosts", "a,b"], "rank must be 0 to 1, another one for each worker"),
        (
            ["--hosts", "a,,b", "--rank", "0"],
            "hosts must be host names separated by commas, one for each worker, not 'a,,b'",
        ),
        (["--rank", "1"], "rank is 1, but there are no hosts"),
        (["--backend", "smoke"], "'smoke'"),
        (["--run_id", "../x"], "cannot name a folder"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments_end_with_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *argv)


def test_an_error_of_the_world_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    def main(**_: Any) -> None:
        raise DatasetNotFoundError("no data in /nowhere:\n  download it first")

    with pytest.raises(SystemExit) as stop:
        task_main(main, "task1a", argv=[])
    assert stop.value.code == 1
    assert capsys.readouterr().err.endswith("error: no data in /nowhere: download it first\n")


def test_a_lost_worker_is_one_line_after_the_traceback_of_the_backends_own_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def all_reduce() -> None:
        raise RuntimeError("Connection closed by peer")

    def main(**_: Any) -> None:
        try:
            all_reduce()
        except RuntimeError as error:
            raise WorkerError("lost worker 1") from error

    with pytest.raises(SystemExit) as stop:
        task_main(main, "task1a", argv=[])
    assert stop.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any(line.endswith("in all_reduce") for line in lines)
    assert lines[-2] == "RuntimeError: Connection closed by peer"
    assert lines[-1].endswith("error: lost worker 1")


def test_a_folder_that_cannot_be_made_is_an_error_of_the_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        call("--root-output", str(tmp_path / "file"))
    assert stop.value.code == 1
    assert "choose another --root-output" in capsys.readouterr().err


def test_other_errors_of_the_task_pass_through() -> None:
    def main(**_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        task_main(main, argv=[])


def test_a_task_adds_arguments_of_its_own() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--epochs", type=int)

    assert call("--epochs", "3", add_arguments=add)["args"].epochs == 3


def test_arguments_of_the_function_are_checked() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        task_main("main")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'a/b'"):
        task_main(print, "a/b", argv=[])


@pytest.mark.parametrize(("argv", "seconds"), [((), 1800.0), (("--timeout", "2.5"), 2.5)])
def test_the_timeout_reaches_a_task_that_takes_arguments(
    argv: tuple[str, ...], seconds: float
) -> None:
    assert call(*argv, add_arguments=lambda parser: None)["args"].timeout == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_positive_number_of_seconds(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        call("--timeout", text, add_arguments=lambda parser: None)
    assert stop.value.code == 2
    assert (
        f"argument --timeout: must be a positive number of seconds, not {text!r}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs", "0"], "must be a whole number of at least 1, not '0'"),
        (["--epochs", "2.5"], "must be a whole number of at least 1, not '2.5'"),
        (["--goal-after", "0"], "must be a positive number of seconds, not '0'"),
        (["--seed", "-1"], "must be a whole number from 0 to 2^32 - 1, not '-1'"),
        (["--seed", "4294967296"], "must be a whole number from 0 to 2^32 - 1, not '4294967296'"),
    ],
)
def test_arguments_of_a_training_are_checked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(*argv, add_arguments=add_run_arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_task_ends_without_a_last_look_at_every_object(tmp_path: Path) -> None:
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))\nfrom "
        "mlbench_core.controlflow.task_arguments import task_main\ntask_main(lambda **others: "
        "print(gc.get_freeze_count()), argv=['--hosts', 'a', '--rank', '0'])"
    )
    env = {**os.environ, "MLBENCH_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\nTrue\n", "")
