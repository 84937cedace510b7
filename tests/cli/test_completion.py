"""Completion as the shells ask for it, and in the shells themselves."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlbench_cli.commands import completion
from mlbench_core.errors import MasterError
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster

CODE = "import sys, mlbench_cli as cli\ntry: cli.main()\nfinally: "
# A busy machine may need longer to ask the master than a user waits.
PATIENT = "import mlbench_cli.commands.completion as module; module.ANSWER_S = 60\n"


def complete(words: str, code: str = "pass", setup: str = "") -> list[str]:
    """Complete the last word of a line, as the script of bash asks; ``code`` runs at the end."""
    environment = {**os.environ, "_MLBENCH_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        [sys.executable, "-c", setup + CODE + code], env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    return [line.split(",", 1)[1] for line in done.stdout.splitlines() if line]


def test_commands_and_options_are_completed_without_loading_commands() -> None:
    loaded = (
        "print('x,', [m for m in ('requests', 'mlbench_cli.commands.runs') if m in sys.modules])"
    )
    assert complete("mlbench st", loaded) == ["status", "stop", " []"]
    assert complete("mlbench status --da") == ["--dashboard-url"]
    assert complete("mlbench run x 1 --task 1") == ["1a", "1b"]
    assert complete("mlbench completion ") == ["bash", "zsh", "fish"]


def test_names_of_runs_are_completed(fake: FakeMaster, patch: pytest.MonkeyPatch) -> None:
    for name in ("demo-1", "demo-2", "other", "demo-3\nplain,rm"):
        fake.add(name)
    ask = functools.partial(complete, setup=PATIENT)
    assert ask("mlbench delete demo-1 de") == ["demo-1", "demo-2"]
    assert ask("mlbench compare o") == ["other", "o"]
    patch.delenv("MLBENCH_MASTER_URL")
    assert ask("mlbench status d") == []
    assert ask(f"mlbench status -u {fake.url} demo-2") == ["demo-2"]


def test_a_master_that_does_not_answer_does_not_hold_up_the_shell(
    patch: pytest.MonkeyPatch,
) -> None:
    asking: list[threading.Thread] = []
    is_complete = threading.Event()

    def connect(_: object) -> None:
        asking.append(threading.current_thread())
        is_complete.wait(60)
        raise MasterError("too late")

    patch.setattr(completion, "ANSWER_S", 0.1)
    patch.setattr(completion, "connect", connect)
    context = completion.click.Context(completion.completion)
    assert completion.complete_runs(context, completion.completion.params[0], "") == []
    assert [thread.is_alive() for thread in asking] == [True]
    is_complete.set()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_accepts_its_script(shell: str, call: Call, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(call("completion", shell).stdout)
    assert f"_MLBENCH_COMPLETE={shell}_complete" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=240)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_the_name_of_a_run(fake: FakeMaster, call: Call, tmp_path: Path) -> None:
    fake.add("demo-1")
    program = tmp_path / "mlbench"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlbench_cli "$@"\n')
    program.chmod(0o755)
    script = call("completion", "bash").stdout
    ask = (
        "COMP_WORDS=(mlbench logs d); COMP_CWORD=2; "
        f"_mlbench_completion {program}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=240
    )
    assert (done.stdout, done.stderr) == ("demo-1\n", "")
