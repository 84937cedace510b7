"""The command in a folder with modules of the user, and with an output that nobody reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.client.masters import read_record
from tests.cli.fake_master import FakeMaster
from tests.helpers.thorough import pairs, some

MLBENCH = [sys.executable, "-m", "mlbench_cli"]
# The script that pip installs, whose first place for modules is its own folder.
INSTALLED = [sys.executable, "-P", "-m", "mlbench_cli"] if sys.version_info >= (3, 11) else MLBENCH


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder with files that have names of modules."""
    folder = tmp_path / "user"
    folder.mkdir()
    names = (
        "click",
        "queue",
        "select",
        "torch",
        "numpy",
        "matplotlib",
        "requests",
        "psutil",
        "pydantic",
        "fastapi",
    )
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('took {name}.py')")
    return folder


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a master, whose master is stopped at the end."""
    monkeypatch.delenv("MLBENCH_MASTER_URL", raising=False)
    monkeypatch.delenv("MLBENCH_TOKEN", raising=False)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    subprocess.run([*MLBENCH, "master", "--stop"], capture_output=True, check=False)


def mlbench(
    *arguments: str, command: list[str] = MLBENCH, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("path", some([".", "", "{folder}", ".:"]))
def test_no_program_imports_a_module_of_the_users_folder(
    user_folder: Path, own_home: Path, path: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": path.format(folder=user_folder)}
    (user_folder / "show.py").write_text("import sys\nprint('path', sys.path[0])\n")
    done = mlbench(
        "run", "a", "1", "--command", "python show.py", "--wait", cwd=user_folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert read_record() is not None
    said = mlbench("logs", "a-1", cwd=user_folder, env=environment)
    # The script of the user has its folder first, as Python gives it.
    assert f"[0] path {user_folder}" in said.stdout.splitlines()
    described = mlbench("env", "--json", cwd=user_folder, env=environment)
    assert described.returncode == 0 and "took" not in described.stdout + described.stderr


def test_a_run_is_one_of_its_call(tmp_path: Path, own_home: Path) -> None:
    """The second call does not get the environment of the first one, which started the master."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "second" / "values.txt").write_text("here")
    (tmp_path / "second" / "show.py").write_text(
        "import os\nprint(*(os.environ.get(name) for name in ('NCCL_ALGO', 'HF_TOKEN', "
        "'CHOSEN')))\nprint(open('values.txt').read(), os.getcwd())\n"
    )
    first = {**os.environ, "NCCL_ALGO": "Ring", "HF_TOKEN": "of-the-first"}
    assert (
        mlbench("run", "a", "1", "--command", "true", cwd=tmp_path / "first", env=first).returncode
        == 0
    )
    second = {**os.environ, "NCCL_ALGO": "Tree"}
    second.pop("HF_TOKEN", None)
    command = ("run", "b", "1", "--wait", "--env", "CHOSEN=a b", "--command")
    done = mlbench(*command, "python -u show.py", cwd=tmp_path / "second", env=second)
    assert done.returncode == 0, done.stderr
    said = mlbench("logs", "b-1").stdout.splitlines()
    assert "[0] Tree None a b" in said and f"[0] here {tmp_path / 'second'}" in said
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "mlbench-results",
        "show.py",
        "values.txt",
    ]


@pytest.fixture
def said(fake: FakeMaster) -> FakeMaster:
    """A master whose run wrote characters that few encodings have."""
    run_id = fake.add("demo-1")
    fake.lines_of_an_answer = 1000
    fake.lines[run_id] = [
        {"rank": 0, "stream": "stdout", "text": f"損失 é {n}", "date": ""} for n in range(3000)
    ]
    return fake


@pytest.mark.parametrize(
    ("command", "encoding"),
    pairs(
        ["logs demo-1", "logs demo-1 --json", "status", "status demo-1 --json", "tasks"],
        ["ascii", "latin-1", "cp1252", "utf-8"],
    ),
)
def test_characters_that_the_terminal_lacks_are_replaced(
    said: FakeMaster, encoding: str, command: str
) -> None:
    done = subprocess.run(
        [*MLBENCH, *command.split()],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)  # it raises an exception for bytes of another encoding
    if command == "logs demo-1":
        wanted = {"utf-8": "損失 é", "ascii": "?? ?"}.get(encoding, "?? é")
        assert text.splitlines()[0] == f"[0] {wanted} 0"


@pytest.mark.parametrize(
    ("command", "redirection"),
    pairs(
        ["logs demo-1", "status", "tasks", "--help", "run new 1 --task 1a"],
        [">&-", "2>&-", ">&- 2>&- <&-", "| head -1 >/dev/null", "2>/dev/full"],
    ),
)
def test_an_output_that_nobody_reads_is_no_failure(
    said: FakeMaster, redirection: str, command: str
) -> None:
    line = f"set -o pipefail; {' '.join(INSTALLED)} {command} {redirection}"
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", line], capture_output=True, text=True, check=False
    )
    # The remarks of run go to standard error.
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert command.startswith("run") or done.stderr == ""


def test_a_full_disk_fails_only_a_command_that_is_nothing_without_its_output(
    said: FakeMaster,
) -> None:
    def full(*command: str) -> tuple[int, str]:
        with Path("/dev/full").open("wb") as file:
            done = subprocess.run(
                [*MLBENCH, *command], stdout=file, stderr=subprocess.PIPE, text=True, check=False
            )
        return done.returncode, done.stderr

    for command in ("status", "--help", "--version", "run --help"):
        said = "mlbench: the output cannot be written: No space left on device\n"
        assert full(*command.split()) == (1, said)
    assert full("run", "new", "1", "--task", "1a")[0] == 0


def test_logs_end_when_their_reader_has_ended(said: FakeMaster) -> None:
    """Otherwise --follow would go on until the end of the run."""
    said.states[1] = ["started"]
    line = f"{' '.join(INSTALLED)} logs demo-1 --follow | head -1 >/dev/null"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
