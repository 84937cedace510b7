"""The description of machine, software and settings, and what may not get into it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlbench_core import __version__
from mlbench_core.results import environment, source_code
from mlbench_core.results.environment import (
    describe_environment,
    describe_gpus,
    describe_packages,
    describe_system,
    describe_tensorflow,
    describe_torch,
    driver_version,
    machine_of,
    software_of,
)
from mlbench_core.results.masking import mask_command_line
from mlbench_core.results.source_code import describe_checkout


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undo changes before the leak guards look."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def no_packages(patch: pytest.MonkeyPatch) -> None:
    """Reading the packages takes longest, and only one test looks at them."""
    patch.setattr(environment, "describe_packages", lambda: {"mlbench-core": __version__})


@pytest.fixture
def system(tmp_path: Path, patch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that writes files which then stand for /proc and /sys."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    patch.setattr(environment, "_PROC", tmp_path / "proc")
    patch.setattr(environment, "_SYS", tmp_path / "sys")
    patch.setattr(os, "cpu_count", lambda: 64)
    return write


def test_the_description_can_be_written_and_names_machine_and_software(no_packages: None) -> None:
    found = json.loads(json.dumps(describe_environment(seeds={"global": 42}), allow_nan=False))
    assert found["schema_version"] == 1
    assert found["seeds"] == {"global": 42}
    assert found["system"]["cores"] == os.cpu_count()
    assert found["system"]["memory_bytes"] == psutil.virtual_memory().total
    assert found["command_line"] == mask_command_line(sys.orig_argv)
    machine, software = machine_of(found), software_of(found)
    assert machine["cpu"] == found["system"]["cpu"]
    assert 1 <= machine["cores"] <= (os.cpu_count() or 1)
    assert (software["python"], software["os"]) == (
        found["system"]["python"],
        found["system"]["os"],
    )
    assert software["mlbench_core"].startswith(__version__)


def test_nothing_is_raised_if_nothing_can_be_read(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken driver")

    for name in ("cpu_count", "virtual_memory", "cpu_freq"):
        patch.setattr(psutil, name, fail)
    for name in (
        "platform",
        "node",
        "release",
        "libc_ver",
        "processor",
        "python_version",
        "freedesktop_os_release",
    ):
        patch.setattr(environment.platform, name, fail)
    patch.setattr(os, "cpu_count", fail)
    patch.setattr(os, "sched_getaffinity", fail, raising=False)
    patch.setattr(environment, "_PROC", tmp_path)
    patch.setattr(environment, "_SYS", tmp_path)
    patch.setenv("PATH", str(tmp_path))
    patch.setitem(
        sys.modules,
        "torch",
        SimpleNamespace(backends=SimpleNamespace(), cuda=SimpleNamespace(is_available=fail)),
    )
    patch.delitem(sys.modules, "mlbench_core.ops.pytorch.extension", raising=False)
    patch.setattr(environment.importlib.metadata, "distributions", lambda: [SimpleNamespace()])
    found = describe_environment(data_files=[tmp_path / "missing"])
    assert {value for name, value in found["system"].items() if name != "executable"} == {None}
    assert found["torch"] == {
        "version": None,
        "cuda": None,
        "cudnn": None,
        "nccl": None,
        "threads": None,
        "attention": None,
    }
    assert (found["gpus"], found["driver"], found["host"]) == ([], None, None)
    assert found["checkouts"] == {"program": None, "mlbench_core": None}
    assert found["packages"] == {"mlbench-core": __version__}
    assert found["data_files"] == [
        {"path": str(tmp_path / "missing"), "bytes": None, "sha256": None}
    ]
    assert machine_of(found) == {
        "cpu": None,
        "cores": None,
        "memory_bytes": None,
        "gpu": None,
        "gpus": 0,
    }
    assert set(machine_of({}).values()) == {None, 0}
    assert set(software_of({}).values()) == {None}


def test_the_packages_are_those_that_python_imports() -> None:
    found = describe_packages()
    assert found["mlbench-core"] == __version__
    import numpy

    assert found["numpy"] == numpy.__version__
    assert found["pytest"] == pytest.__version__


def test_the_limits_of_control_groups_of_version_2(
    system: Callable[[dict[str, str]], None],
) -> None:
    group = "sys/fs/cgroup/a/b"
    system({
        "proc/self/cgroup": "0::/a/b", f"{group}/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "150000 100000",
        f"{group}/cpuset.cpus.effective": "0-2,8", "sys/fs/cgroup/memory.max": "max",
        f"{group}/memory.max": "4096",
    })  # fmt: skip
    found = describe_system()
    assert (found["cores_limit"], found["memory_limit_bytes"]) == (1.5, 4096)
    assert machine_of({"system": found})["cores"] == 2
    assert machine_of({"system": found})["memory_bytes"] == 4096
    system({"sys/fs/cgroup/a/cpu.max": "max 100000"})
    assert describe_system()["cores_limit"] == 4
    system({f"{group}/cpuset.cpus.effective": "0-63", f"{group}/memory.max": str(1 << 60)})
    found = describe_system()
    assert (found["cores_limit"], found["memory_limit_bytes"]) == (None, None)
    assert machine_of({"system": found})["cores"] == 64


def test_the_limits_of_control_groups_of_version_1(
    system: Callable[[dict[str, str]], None],
) -> None:
    root = "sys/fs/cgroup"
    # Inside a container, the folders that the first file names do not exist.
    system({
        "proc/self/cgroup": "5:memory:/docker/1\n4:cpuset:/docker/1\n2:cpu,cpuacct:/docker/1",
        f"{root}/cpu/cpu.cfs_quota_us": "50000", f"{root}/cpu/cpu.cfs_period_us": "100000",
        f"{root}/cpuset/cpuset.cpus": "3", f"{root}/memory/memory.limit_in_bytes": "5000",
    })  # fmt: skip
    found = describe_system()
    assert (found["cores_limit"], found["memory_limit_bytes"]) == (0.5, 5000)
    system({f"{root}/cpu/cpu.cfs_quota_us": "-1"})
    assert describe_system()["cores_limit"] == 1


def test_processor_and_driver_are_read_from_the_system(
    system: Callable[[dict[str, str]], None],
) -> None:
    package = "sys/devices/system/cpu/cpu{}/topology/physical_package_id"
    system({"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast 9000 @ 2GHz\nflags\t: x"})
    system({package.format(0): "0", package.format(1): "0", package.format(2): "1"})
    found = describe_system()
    assert (found["cpu"], found["sockets"]) == ("Fast 9000 @ 2GHz", 2)
    assert set(found["frequency_mhz"]) == {"current", "min", "max"}
    assert 0 not in found["frequency_mhz"].values()
    system({"sys/module/nvidia/version": "535.1"})
    assert driver_version() == "535.1"


def test_torch_is_described_if_it_is_imported(patch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="H", total_memory=5, major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda _: device,
        nccl=SimpleNamespace(version=lambda: (2, 20)),
    )  # fmt: skip
    cudnn = SimpleNamespace(version=lambda: 90)
    torch = SimpleNamespace(
        __version__="9", version=SimpleNamespace(cuda="13"), cuda=cuda, get_num_threads=lambda: 3,
        backends=SimpleNamespace(cudnn=cudnn),
    )  # fmt: skip
    patch.setitem(sys.modules, "torch", torch)
    extension = SimpleNamespace(why_not=lambda: None if cuda.is_available() else "no GPU")
    patch.setitem(sys.modules, "mlbench_core.ops.pytorch.extension", extension)
    assert describe_torch() == {
        "version": "9",
        "cuda": "13",
        "cudnn": 90,
        "nccl": "2.20",
        "threads": 3,
        "attention": "kernels",
    }
    assert software_of({"torch": describe_torch()})["attention"] == "kernels"
    assert describe_gpus() == [{"name": "H", "memory_bytes": 5, "capability": "9.0"}] * 2
    assert machine_of({"gpus": describe_gpus()})["gpu"] == "H"
    cuda.is_available = lambda: False
    assert describe_torch() == {
        "version": "9",
        "cuda": "13",
        "cudnn": None,
        "nccl": None,
        "threads": 3,
        "attention": "torch",
    }
    assert "attention" not in software_of({"torch": describe_torch()})
    assert describe_gpus() == []
    patch.delitem(sys.modules, "torch")
    patch.setitem(sys.modules, "pynvml", SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=7),
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 6),
        nvmlSystemGetDriverVersion=lambda: "1.2",
    ))  # fmt: skip
    patch.setattr(environment, "_SYS", Path("/nowhere"))
    assert describe_torch() is None
    assert describe_gpus() == [{"name": "GPU 0", "memory_bytes": 7, "capability": "8.6"}]
    assert driver_version() == "1.2"


def test_tensorflow_is_described_only_if_it_is_imported(
    patch: pytest.MonkeyPatch, no_packages: None
) -> None:
    patch.delitem(sys.modules, "tensorflow", raising=False)
    assert "tensorflow" not in describe_environment()
    assert "tensorflow" not in software_of(describe_environment())
    threading = SimpleNamespace(get_intra_op_parallelism_threads=lambda: 2)
    loaded = SimpleNamespace(__version__="2.21", config=SimpleNamespace(threading=threading))
    patch.setitem(sys.modules, "tensorflow", loaded)  # type: ignore[arg-type]
    assert describe_tensorflow() == {"version": "2.21", "threads": 2}
    assert software_of(describe_environment())["tensorflow"] == "2.21"


def test_no_secret_gets_into_the_description(patch: pytest.MonkeyPatch, no_packages: None) -> None:
    secret = "s3cr3t"
    variables = {
        "MLBENCH_TOKEN": secret, "MLBENCH_MASTER_KEY": secret, "NCCL_DB_PASSWORD": secret,
        "AWS_ACCESS": secret,
        "MLBENCH_DATABASE_URL": f"postgresql://me:{secret}@host/db", "OMP_NUM_THREADS": "3",
        "MLBENCH_MASTER_URL": f"http://host/?token={secret}&page=2#key={secret}",
        "SLURM_JOB_ACCOUNT": secret,
        "TORCH_LOGS": "\udcff", "MLBENCH_PWD": secret, "NCCL_BYPASS": "1",
        "HF_PAT": secret, "MLBENCH_SENTRY_DSN": secret, "NCCL_PIN": secret, "NCCL_PIN_MODE": "2",
        "HF_PATH": "x",
        "MLBENCH_SETTINGS": f'{{"lr": 1, "api_token": "{secret}", "key":"{secret}", "epochs": 3}}',
    }  # fmt: skip
    for name, value in variables.items():
        patch.setenv(name, value)
    patch.setattr(sys, "orig_argv", [
        "python", "main.py", "--token", secret, f"--api-key={secret}", "-x",
        f"MLBENCH_TOKEN={secret}", "--lr", "0.1",
        f"db.password={secret}", f"http://me:a@{secret}@host",
        f"sh -c 'run --auth-token \"{secret} {secret}\" --epochs 3'",
        ("Authorization: Bearer "
        f"{secret}"), "--max-tokens", "512", "--tokenizer", "bpe", "--no-token", "8080", "\udcff",
        "--password", "--" + secret, "--no-secret", "--key", "--key", "x", f"X-Api-Key: {secret}",
        "--db-pass", secret,
    ])  # fmt: skip
    found = describe_environment()
    assert secret not in json.dumps(found, ensure_ascii=False).encode().decode()
    assert found["command_line"] == [
        "python", "main.py", "--token", "***", "--api-key=***", "-x", "MLBENCH_TOKEN=***", "--lr",
        "0.1",
        "db.password=***", "http://***@host", "sh -c 'run --auth-token *** --epochs 3'",
        "Authorization: Bearer ***", "--max-tokens", "512", "--tokenizer", "bpe", "--no-token",
        "8080", "?",
        "--password", "***", "--no-secret", "--key", "***", "x", "X-Api-Key: ***", "--db-pass",
        "***",
    ]  # fmt: skip
    assert {name: found["variables"].get(name) for name in variables} == {
        **dict.fromkeys(variables), "NCCL_BYPASS": "1", "NCCL_PIN_MODE": "2", "HF_PATH": "x",
        **dict.fromkeys(("MLBENCH_TOKEN", "MLBENCH_MASTER_KEY", "NCCL_DB_PASSWORD", "MLBENCH_PWD"),
        "***"),
        **dict.fromkeys(("HF_PAT", "MLBENCH_SENTRY_DSN", "NCCL_PIN"), "***"),
        "MLBENCH_SETTINGS": '{"lr": 1, "api_token": "***", "key":"***", "epochs": 3}',
        "MLBENCH_DATABASE_URL": "postgresql://***@host/db", "OMP_NUM_THREADS": "3",
        "MLBENCH_MASTER_URL": "http://host/?token=***&page=2#key=***", "TORCH_LOGS": "?",
    }  # fmt: skip


def test_data_files_have_checksums_within_a_budget(
    tmp_path: Path, patch: pytest.MonkeyPatch, no_packages: None
) -> None:
    patch.setattr(environment, "_MOST_HASHED_BYTES", 10)
    patch.setattr(environment, "_PART_BYTES", 2)
    patch.setattr(environment, "_MOST_DATA_FILES", 4)
    contents = {"small": b"12345678", "large": b"abcdefgh", "last": b"90"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.utime(tmp_path / "large", (0, 0))
    os.mkfifo(tmp_path / "pipe")
    paths = [tmp_path, *(tmp_path / name for name in (*contents, "pipe", "small", "small"))]
    found = describe_environment(data_files=paths)
    small, large, last, pipe = found["data_files"]
    assert small == {
        "path": str(paths[1]),
        "bytes": 8,
        "sha256": hashlib.sha256(b"12345678").hexdigest(),
    }
    assert large == {
        "path": str(paths[2]), "bytes": 8, "sha256": None,
        "modified_at": "1970-01-01T00:00:00+00:00",
        "sha256_of_parts": hashlib.sha256(b"abdegh").hexdigest(),
    }  # fmt: skip
    assert last["sha256"] == hashlib.sha256(b"90").hexdigest()
    assert pipe == {"path": str(paths[4]), "bytes": None, "sha256": None}
    assert found["data_files_left_out"] == 2


# ------------------------------------------------------------------------------
# checkouts


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a clean checkout with a program, a module that it uses, and a link."""
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "main.py").write_text("1\n")
    (folder / "package" / "module.py").write_text("2\n")
    (folder / "link").symlink_to("main.py")
    (folder / ".gitignore").write_text("ignored.py\n")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def difference(folder: Path) -> tuple[int, str]:
    found = describe_checkout(folder / "package")
    assert found is not None
    return found["changed_files"], found["difference_sha256"]


def test_a_clean_checkout_has_no_difference(repository: Path) -> None:
    expected = {
        "commit": git(repository, "rev-parse", "HEAD"),
        "changed_files": 0,
        "difference_sha256": None,
    }
    assert describe_checkout(repository / "main.py") == expected
    # Neither what Git ignores, nor the results of earlier runs, nor a new time of a file is a
    # difference.
    (repository / "ignored.py").write_text("3")
    (repository / "result.json").write_text("3")
    os.utime(repository / "main.py", (0, 0))
    assert describe_checkout(repository / "package") == expected


def test_the_difference_depends_on_names_kinds_and_contents(repository: Path) -> None:
    changes: list[Callable[[], Any]] = [
        lambda: (repository / "main.py").write_text("4\n"),
        lambda: (repository / "main.py").write_text("5\n"),
        lambda: (repository / "main.py").chmod(0o755),
        lambda: (repository / "package" / "new.py").write_text("5\n"),
        lambda: (repository / "package" / "new.py").rename(repository / "package" / "newer.py"),
        lambda: (repository / "package" / "module.py").unlink(),
        lambda: (repository / "link").unlink(),
        lambda: (repository / "link").symlink_to("nothing"),
    ]
    seen = []
    for change in changes:
        change()
        seen.append(difference(repository))
    assert [count for count, _ in seen] == [1, 1, 1, 2, 2, 3, 4, 4]
    assert len({digest for _, digest in seen}) == len(changes)
    # Git would report a renamed file as one change once both names are staged.
    (repository / ".gitignore").rename(repository / "renamed.py")
    before = difference(repository)
    assert before[0] == 6
    git(repository, "add", "-A")
    assert difference(repository) == before


def test_the_settings_of_git_do_not_change_the_difference(
    repository: Path, patch: pytest.MonkeyPatch
) -> None:
    (repository / "main.py").write_text("4\n")
    before = difference(repository)
    ran = repository.parent / "ran"
    program = repository.parent / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch '{ran}'\necho 2\n")
    program.chmod(0o755)
    git(repository, "config", "status.showUntrackedFiles", "all")
    (repository / "data").write_text("5")
    git(repository, "config", "core.fsmonitor", str(program))
    # A hook of Git starts its programs with these.
    patch.setenv("GIT_DIR", str(repository.parent / "elsewhere"))
    patch.setenv("GIT_INDEX_FILE", str(repository.parent / "elsewhere" / "index"))
    index = (repository / ".git" / "index").read_bytes()
    os.utime(repository / "package" / "module.py", (0, 0))
    assert difference(repository) == before
    assert not ran.exists()
    assert (repository / ".git" / "index").read_bytes() == index


def test_a_difference_that_is_too_large_or_takes_too_long_is_unknown(
    repository: Path, patch: pytest.MonkeyPatch
) -> None:
    (repository / "main.py").write_text("4\n")
    (repository / "package" / "new.py").write_text("5\n")
    patch.setattr(source_code, "_MOST_CHANGED_BYTES", 3)
    assert difference(repository) == (2, None)
    patch.setattr(source_code, "_MOST_CHANGED_BYTES", 4)
    assert difference(repository)[1] is not None
    real = source_code._git

    def slow(folder: Path, command: str, *arguments: str) -> bytes:
        if command == "status":
            raise subprocess.TimeoutExpired(["git"], 10)
        return real(folder, command, *arguments)

    patch.setattr(source_code, "_git", slow)
    assert difference(repository) == (None, None)


def test_a_folder_that_is_in_no_checkout(repository: Path, patch: pytest.MonkeyPatch) -> None:
    assert describe_checkout(repository.parent) is None
    assert describe_checkout(repository / "missing.py") is None
    # An environment inside the checkout of another project is not this project.
    installed = repository / "venv" / "mlbench_core" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    assert describe_checkout(installed) is None
    new = describe_checkout(installed, accept_new=True)
    assert new is not None
    assert new["changed_files"] == 1
    (repository / "ignored.py").write_text("")
    assert describe_checkout(repository / "ignored.py", accept_new=True) is None
    empty = repository.parent / "empty"
    git(repository, "init", "-q", str(empty))
    (empty / "main.py").write_text("")
    assert describe_checkout(empty / "main.py", accept_new=True) is None
    with pytest.MonkeyPatch.context() as other:
        # Git's own tests use this to own a repository as another user.
        other.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        assert describe_checkout(repository / "main.py") is None
    assert describe_checkout(repository / "main.py") is not None
    patch.setenv("PATH", str(empty))
    assert describe_checkout(repository / "main.py") is None


def test_the_software_names_both_checkouts(repository: Path, no_packages: None) -> None:
    (repository / "main.py").write_text("4\n")
    found = describe_environment(program=repository / "main.py")
    program = found["checkouts"]["program"]
    found["checkouts"]["mlbench_core"] = {
        "commit": "c" * 40,
        "changed_files": 2,
        "difference_sha256": "d" * 64,
    }
    software = software_of(found)
    assert (software["commit"], software["difference_sha256"]) == (
        program["commit"],
        program["difference_sha256"],
    )
    assert software["mlbench_core"] == f"{__version__}+g{'c' * 12}.d{'d' * 12}"
    found["checkouts"]["mlbench_core"].update(changed_files=0, difference_sha256=None)
    assert software_of(found)["mlbench_core"] == f"{__version__}+g{'c' * 12}"
    found["checkouts"]["program"] = None
    software = software_of(found)
    assert (software["commit"], software["mlbench_core"]) == ("c" * 40, __version__)
