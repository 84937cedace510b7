"""The folder and the variables that a run takes from its call, and programs that take nothing from
that folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_core import calling_environment as calling
from mlbench_core.errors import ConfigurationError

OWN = str(Path(sys.executable).parent)


def make_python(folder: Path) -> str:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return str(folder / "bin")


def test_a_call_sends_what_libraries_read_and_nothing_of_its_terminal() -> None:
    sent = {
        "NCCL_ALGO": "Ring",
        "LD_LIBRARY_PATH": "/x",
        "HF_TOKEN": "t",
        "PYTHONPATH": "lib",
        "https_proxy": "p",
    }
    kept = {
        "HOME": "/h",
        "PYTHONIOENCODING": "latin-1",
        "TERM": "xterm",
        "RANK": "1",
        "MLBENCH_TOKEN": "s",
    }
    found = calling.call_environment({**sent, **kept, "PATH": OWN})
    assert found == {**sent, "PATH": OWN}


def test_python_is_that_of_the_call_or_of_the_active_environment(tmp_path: Path) -> None:
    other = make_python(tmp_path / "other")
    assert calling.call_environment({"PATH": other})["PATH"] == os.pathsep.join([OWN, other])
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        assert (
            calling.call_environment({"PATH": other, name: str(tmp_path / "other")})["PATH"]
            == other
        )
    first = os.pathsep.join(["/mine", OWN, other])
    assert calling.call_environment({"PATH": first})["PATH"] == first


@pytest.mark.parametrize(
    "name", ["", "1A", "A-B", "a b", "RANK", "MASTER_PORT", "MLBENCH_TOKEN", "MLBENCH_RUN_ID"]
)
def test_a_variable_that_a_user_cannot_choose_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        calling.check_variable(name)


def test_a_folder_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match="the current folder cannot be used"):
        calling.describe_call()
    assert calling.call_folder(tmp_path) == str(tmp_path)
    assert calling.safe_environment()["PYTHONPATH"].endswith(str(Path(calling.__file__).parents[1]))


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_a_program_of_mlbench_imports_nothing_from_the_folder_of_its_call(
    version: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < version:
        pytest.skip("this Python has no option -P")
    for name in ("click", "queue", "select", "json", "requests", "mlbench_core"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('took {name}.py')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", str(tmp_path), "/nonexistent"]))
    monkeypatch.setattr(sys, "version_info", version)
    command = calling.module_command("mlbench_cli", "tasks")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", str(tmp_path), "/nonexistent"]))
    environment = calling.safe_environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/nonexistent"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ResNet-20" in done.stdout
