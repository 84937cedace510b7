"""The build of the CUDA kernels, with a program in the place of nvcc."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from mlbench_core import install_cuda_extensions

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*/*.cu"))

NVCC = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls.txt"
[ -z "$FAKE_ERROR" ] || { echo "$FAKE_ERROR" >&2; exit 2; }
echo "ptxas info: 0 bytes stack frame, ${FAKE_SPILLS:-0} bytes spill stores, 0 bytes spill loads"
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of each call of the program."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return nvcc.with_name("calls.txt")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the command write into an empty folder, with the sources of the checkout."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "csrc").symlink_to(ROOT / "csrc")
    monkeypatch.setattr(install_cuda_extensions, "ROOT", tmp_path / "root")
    folder = tmp_path / "root" / "mlbench_core" / "ops" / "pytorch" / "lib"
    return folder / "libmlbench_cuda.so"


def test_each_source_is_compiled_and_the_library_linked(
    toolkit: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install_cuda_extensions.main() == 0
    output = capsys.readouterr().out
    assert output == "architectures: sm_80, sm_90, compute_90; spilled registers: 0 bytes\n"
    *compiled, linked = toolkit.read_text().splitlines()
    assert len(compiled) == len(SOURCES) == 4
    folder = Path(torch.__file__).parent
    for source in SOURCES:
        (line,) = (line for line in compiled if str(source) in line)
        assert f"-isystem {folder / 'include'}" in line
        assert "-gencode arch=compute_90,code=compute_90" in line
        assert "-DTORCH_TARGET_VERSION=0x020b000000000000" in line
    assert "-cudart static" in linked and linked.count(".o") == 4
    assert f"-L{folder / 'lib'}" in linked
    assert library.read_text() == "library\n"
    assert list(library.parent.iterdir()) == [library], "no unfinished file stays"


def test_architectures_are_those_of_the_variable(
    toolkit: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6 12.0+PTX")
    monkeypatch.setenv("FAKE_SPILLS", "4")
    assert install_cuda_extensions.main() == 0
    output = capsys.readouterr().out
    assert output == "architectures: sm_86, sm_120, compute_120; spilled registers: 16 bytes\n"


@pytest.mark.parametrize("text", ["7.5", "Ampere", "8.0;90"])
def test_unknown_architectures_are_an_error(
    text: str,
    toolkit: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert install_cuda_extensions.main() == 1
    assert (
        "error: TORCH_CUDA_ARCH_LIST must have numbers of at least 8.0" in capsys.readouterr().err
    )
    assert not toolkit.exists() and not library.exists()


def test_an_error_of_the_compiler_leaves_the_old_library(
    toolkit: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library.parent.mkdir(parents=True)
    library.write_text("old")
    monkeypatch.setenv("FAKE_ERROR", "attention.cu(7): error: expected a ;")
    assert install_cuda_extensions.main() == 1
    assert "expected a ;" in capsys.readouterr().err
    assert library.read_text() == "old" and list(library.parent.iterdir()) == [library]


def test_what_is_missing_is_named_in_one_line(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert install_cuda_extensions.main() == 1
    expected = (
        f"error: no nvcc in CUDA_HOME ({tmp_path}): install NVIDIA's CUDA toolkit 12 or later\n"
    )
    assert capsys.readouterr().err == expected
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    build = importlib.import_module("csrc.build")
    monkeypatch.setattr(build.shutil, "which", lambda *_, **__: None)
    assert install_cuda_extensions.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda" in line
    monkeypatch.setattr(build, "_find_nvcc", lambda: tmp_path / "nvcc")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    assert install_cuda_extensions.main() == 1
    assert "pip install 'torch>=2.11'" in capsys.readouterr().err


@pytest.mark.parametrize("with_cuda", [False, True])
def test_a_wheel_has_the_library_if_it_is_requested(
    with_cuda: bool, toolkit: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc", "benchmarks"):
        (tree / name).symlink_to(ROOT / name)
    for name in ("mlbench_core", "mlbench_master", "mlbench_cli", "helm"):
        (tree / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "bdist_wheel",
        "--dist-dir",
        str(tmp_path / "dist"),
    ]
    env = {**os.environ, "MLBENCH_CUDA": "1" if with_cuda else "0"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert ("mlbench_core/ops/pytorch/lib/libmlbench_cuda.so" in names) == with_cuda
    assert wheel.name.endswith("-py3-none-any.whl") == (not with_cuda)
    assert "-py3-none-" in wheel.name
    assert {f"mlbench_csrc/{source.relative_to(ROOT / 'csrc')}" for source in SOURCES} < set(names)
    assert "mlbench_csrc/build.py" in names
    assert toolkit.exists() == with_cuda


def test_a_wheel_without_a_compiler_is_an_error_of_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "MLBENCH_CUDA": "1", "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "setup.py", "-q", "build_cuda", f"--build-lib={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: no nvcc in CUDA_HOME")
    assert "Traceback" not in done.stderr
