"""Building the CUDA extension: with a stand-in for nvcc, and, where there is an nvcc, with it."""

from __future__ import annotations

import doctest
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from csrc import build as building
from csrc import ptxas
from csrc.build import BuildError, BuildResult, build, find_nvcc, find_toolchain, requested_architectures
from csrc.ptxas import read_ptxas_report, summarize
from mlbench_core.ops.pytorch import extension

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ["attention_score", "attention_score_backward", "short_attention", "short_attention_backward"]

# In the folder above its own: `release` (what version it is), `log` (its arguments, a line for each run), and for a
# source NAME or the `library`: `NAME.says` (what it prints), `NAME.fails` (it exits with 1 after having begun its
# output), `NAME.hangs` (likewise, but it stays; its number goes into `NAME.pid`).
STAND_IN = """#!/bin/sh
here=$(dirname "$0")/..
if [ "$1" = --version ]; then echo "Cuda compilation tools, release $(cat "$here/release"), V0.0"; exit; fi
echo "$*" >> "$here/log"
for word; do
    case "$word" in *.cu) name=$(basename "$word" .cu);; esac
    if [ "$last" = -o ]; then output=$word; fi
    last=$word
done
name=${name:-library}
printf half > "$output"
if [ -e "$here/$name.says" ]; then cat "$here/$name.says" >&2; fi
if [ -e "$here/$name.fails" ]; then exit 1; fi
if [ -e "$here/$name.hangs" ]; then echo $$ > "$here/$name.pid"; exec sleep 100; fi
printf whole > "$output"
"""

# As nvcc 13.0 wrote it for two architectures; `spilly` has more values than its 32 registers hold.
REPORT = """\
ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_Z9recursivePf' for 'sm_80'
ptxas info    : Function properties for _Z9recursivePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 34.316 ms
ptxas info    : Function properties for _Z3farfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z5twicePfi' for 'sm_80'
ptxas info    : Function properties for _Z5twicePfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 13.746 ms
ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function '_Z5twicePfi' for 'sm_90'
ptxas info    : Function properties for _Z5twicePfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 63.190 ms
"""
SPILLS = """\
ptxas info    : Compiling entry function '_Z6spillyPf' for 'sm_90'
ptxas info    : Function properties for _Z6spillyPf
    720 bytes stack frame, 1564 bytes spill stores, 1596 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 720 bytes cumulative stack size
"""


@dataclass(frozen=True)
class Tree:
    """A source tree with two operators, and a toolkit whose nvcc is the stand-in."""

    root: Path
    toolkit: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_HOME": str(self.toolkit), "PATH": os.environ["PATH"]}

    @property
    def library(self) -> Path:
        return self.root / "lib" / "libmlbench_cuda.so"

    def source(self, name: str) -> Path:
        return self.root / "csrc" / name / f"{name}.cu"

    def build(self, **variables: str) -> BuildResult:
        return build(self.root, library=self.library, environment={**self.environment, **variables})

    def tell(self, name: str, text: str = "") -> None:
        """Write a file that the stand-in reads."""
        (self.toolkit / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.toolkit / name).unlink()

    def commands(self) -> list[str]:
        """What the stand-in was called with since the last time this was asked."""
        log = self.toolkit / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def unfinished(self) -> list[Path]:
        """What a build left lying that is none of its results."""
        kept = {".o", ".txt", ".sha256", ".cu", ".cuh"}
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != "lock"]
        return [path for path in files if path.suffix not in kept and path != self.library]


def make_toolkit(folder: Path, release: str = "13.0") -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(STAND_IN)
    nvcc.chmod(0o755)
    (folder / "release").write_text(release)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    found = Tree(tmp_path / "tree", make_toolkit(tmp_path / "toolkit"))
    for name in ("attention", "score"):
        found.source(name).parent.mkdir(parents=True)
        found.source(name).write_text(f"// {name}\n")
    header = found.root / "csrc" / "common" / "common.cuh"
    header.parent.mkdir()
    header.write_text("// header\n")
    return found


def names(result: BuildResult) -> list[str]:
    return sorted(path.stem for path in result.compiled)


def test_the_commands_are_those_of_the_manual(tree: Tree) -> None:
    result = tree.build()
    torch = find_toolchain(tree.environment).torch
    csrc, objects = tree.root / "csrc", tree.root / "build" / "cuda"
    flags = (
        "-O3 -std=c++20 -Xcompiler -fPIC,-fvisibility=hidden -DTORCH_TARGET_VERSION=0x020b000000000000 "
        f"-isystem {torch}/include -I {csrc} -gencode arch=compute_80,code=sm_80 "
        "-gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90 -Xptxas -v"
    )
    *compiled, linked = tree.commands()
    assert sorted(re.sub(r" -o \S+$", "", line) for line in compiled) == [
        f"{flags} -c {csrc}/attention/attention.cu",
        f"{flags} -c {csrc}/score/score.cu",
    ]
    assert re.sub(r" -o \S+", "", linked) == (
        f"-shared -cudart static {objects}/attention/attention.o {objects}/score/score.o "
        f"-L{torch}/lib -Xlinker --no-as-needed -ltorch -ltorch_cpu"
    )
    assert (names(result), result.linked, result.library) == (["attention", "score"], True, tree.library)
    assert tree.library.read_text() == "whole"
    assert tree.unfinished() == []


@pytest.mark.parametrize("folders", [["lib"], ["lib", "lib64"]])
def test_the_static_runtime_of_nvidias_packages_is_found(tree: Tree, folders: list[str]) -> None:
    for name in folders:
        (tree.toolkit / name).mkdir()
        tree.tell(f"{name}/libcudart_static.a")
    tree.build()
    assert (f" -L{tree.toolkit / 'lib'} " in tree.commands()[-1]) == (folders == ["lib"])


def test_torch_is_found_without_importing_it(tree: Tree) -> None:
    code = (
        "import os, sys; from csrc.build import find_toolchain; "
        "print(find_toolchain(os.environ).torch); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=tree.environment, capture_output=True, text=True)
    assert (done.stderr, Path(done.stdout.strip()).name) == ("", "torch")


def test_only_what_changed_is_compiled(tree: Tree) -> None:
    tree.build()
    tree.commands()
    assert (names(tree.build()), tree.build().linked, tree.commands()) == ([], False, [])

    for path in (tree.root / "csrc").rglob("*.cu*"):
        os.utime(path, (1, 1))
    assert names(tree.build()) == []

    tree.source("score").write_text("// something else\n")
    changed = tree.build()
    assert (names(changed), changed.linked) == (["score"], True)

    (tree.root / "csrc" / "common" / "common.cuh").write_text("// something else\n")
    assert names(tree.build()) == ["attention", "score"]
    assert names(tree.build(MLBENCH_CUDA_ARCHITECTURES="90")) == ["attention", "score"]
    tree.build()

    tree.tell("release", "13.1")
    assert names(tree.build()) == ["attention", "score"]
    assert names(tree.build(NVCC_CCBIN="g++-12")) == ["attention", "score"]
    tree.build()

    (tree.root / "build" / "cuda" / "score" / "score.o").unlink()
    assert names(tree.build()) == ["score"]

    tree.library.unlink()
    assert (names(tree.build()), tree.library.read_text()) == ([], "whole")


def test_nvcc_is_sought_where_the_manual_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, second, third, usual = (make_toolkit(tmp_path / name) for name in ("home", "second", "third", "usual"))
    monkeypatch.setattr(building, "_USUAL_FOLDER", str(usual / "bin"))
    variables = {"CUDA_HOME": str(home), "CUDA_PATH": str(second), "PATH": f"/nowhere:{third / 'bin'}"}
    for folder, name in ((home, "CUDA_HOME"), (second, "CUDA_PATH"), (third, "PATH")):
        assert find_nvcc(variables) == folder / "bin" / "nvcc"
        del variables[name]
    assert find_nvcc({"PATH": "/nowhere"}) == usual / "bin" / "nvcc"

    monkeypatch.setattr(building, "_USUAL_FOLDER", "/nowhere")
    with pytest.raises(
        BuildError, match=r"^no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda: install .* 12\.0"
    ):
        find_nvcc({"PATH": "/nowhere"})
    with pytest.raises(
        BuildError, match=r"^CUDA_PATH must be the folder of .*, not '/nowhere', which has no bin/nvcc: "
    ):
        find_nvcc({"CUDA_PATH": "/nowhere", "PATH": f"{third / 'bin'}"})


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("11.8", r"nvcc is CUDA 11\.8, and the extension needs 12\.0 or later: name another toolkit's folder"),
        (
            "unknown",
            r"nvcc --version prints no release: exit status 0, 'Cuda compilation tools, release unknown, V0\.0'",
        ),
    ],
)
def test_another_nvcc_is_refused(tree: Tree, release: str, message: str) -> None:
    tree.tell("release", release)
    with pytest.raises(BuildError, match=message):
        tree.build()
    assert tree.commands() == []


def test_an_nvcc_that_does_not_start_is_refused(tree: Tree) -> None:
    (tree.toolkit / "bin" / "nvcc").chmod(0o644)
    with pytest.raises(BuildError, match=r"nvcc cannot be run: Permission denied$"):
        tree.build()


def test_torch_must_be_there_and_new_enough(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BuildError, match=r"torch is not installed for .*pip install 'torch>=2\.11'.*--no-build-isolation"
    ):
        tree.build()

    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(BuildError, match=r"is without the headers of the stable ABI, .* needs 2\.11 or later$"):
        tree.build()

    header = tmp_path / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 11\n")
    with pytest.raises(BuildError, match=r"torch in .* is 2\.9, and the CUDA extension needs 2\.11 or later$"):
        tree.build()
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n")
    assert tree.build().linked


def test_another_system_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BuildError, match="builds on Linux, this is darwin"):
        tree.build()


def test_a_tree_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"no CUDA sources under .*csrc: build from a checkout or a source distribution"
    ):
        build(tmp_path)


def test_architectures_are_the_users_choice(tree: Tree) -> None:
    assert requested_architectures({}) == requested_architectures({"MLBENCH_CUDA_ARCHITECTURES": " "}) == (80, 90)
    assert requested_architectures({"MLBENCH_CUDA_ARCHITECTURES": "120, 90;100 90"}) == (90, 100, 120)
    for wrong in ("9.0", "75", "90a", "sm_90", "90 native"):
        with pytest.raises(
            BuildError, match=f"ARCHITECTURES must be compute capabilities .*, not {re.escape(repr(wrong))}"
        ):
            requested_architectures({"MLBENCH_CUDA_ARCHITECTURES": wrong})

    tree.build(MLBENCH_CUDA_ARCHITECTURES="90")
    codes = re.findall(r"-gencode (\S+)", tree.commands()[0])
    assert codes == ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]


def test_a_failed_compilation_says_why_and_leaves_nothing(tree: Tree) -> None:
    tree.tell("score.fails")
    tree.tell("score.says", "score.cu(3): error: identifier 'nonsense' is undefined\n")
    with pytest.raises(BuildError) as failed:
        tree.build()
    first, second = str(failed.value).splitlines()
    assert first == "nvcc failed on csrc/score/score.cu with exit status 1:"
    assert second == "score.cu(3): error: identifier 'nonsense' is undefined"
    assert not (tree.root / "build" / "cuda" / "score").exists()
    assert not tree.library.exists()
    assert tree.unfinished() == []

    tree.forget("score.fails")
    assert "score" in names(tree.build())


@pytest.mark.parametrize("step", ["score", "library"])
def test_a_failed_build_leaves_the_library_of_before(tree: Tree, step: str) -> None:
    tree.build()
    tree.library.write_text("of before")
    tree.source("score").write_text("// something else\n")
    tree.tell(f"{step}.fails")
    with pytest.raises(BuildError, match="with exit status 1"):
        tree.build()
    assert tree.library.read_text() == "of before"
    assert tree.unfinished() == []

    tree.forget(f"{step}.fails")
    assert (tree.build().linked, tree.library.read_text()) == (True, "whole")


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(path: Path, tenths: int = 300) -> str:
    """What a file says, once there is something in it."""
    while not (path.exists() and path.read_text()):
        assert tenths, f"{path} did not appear"
        tenths -= 1
        time.sleep(0.1)
    return path.read_text()


@pytest.mark.parametrize("step", ["score", "library"])
def test_an_interrupted_build_stops_its_compilers_and_leaves_nothing(tree: Tree, step: str) -> None:
    tree.tell(f"{step}.hangs")
    code = (
        "import sys; from pathlib import Path; from csrc.build import build; "
        "build(Path(sys.argv[1]), library=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(tree.root), str(tree.library)]
    process = subprocess.Popen(command, cwd=ROOT, env=tree.environment, stderr=subprocess.PIPE, text=True)
    compiler = int(wait_for(tree.toolkit / f"{step}.pid"))
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert process.returncode != 0
    assert not alive(compiler)
    assert not tree.library.exists()
    assert tree.unfinished() == []

    tree.forget(f"{step}.hangs")
    tree.build()
    assert tree.library.read_text() == "whole"


def test_what_a_killed_build_left_goes_with_the_next(tree: Tree) -> None:
    left = tree.root / "build" / "cuda" / "unfinished-1"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    tree.build()
    assert not left.exists()


def test_one_failure_stops_the_other_compilers(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    nvcc = tree.toolkit / "bin" / "nvcc"
    nvcc.write_text(STAND_IN.replace("exit 1", "while [ ! -s $here/score.pid ]; do sleep 0.05; done; exit 1"))
    tree.tell("attention.fails")
    tree.tell("score.hangs")
    with pytest.raises(BuildError, match=r"nvcc failed on csrc/attention/attention\.cu"):
        tree.build()
    assert not alive(int((tree.toolkit / "score.pid").read_text()))


def test_what_ptxas_reports_is_read() -> None:
    usages = read_ptxas_report("nvcc: some warning\n" + REPORT + SPILLS)
    assert [(usage.name, usage.architecture, usage.is_kernel) for usage in usages] == [
        ("_Z9recursivePf", "sm_80", True),
        ("_Z3farfi", "sm_80", False),
        ("_Z5twicePfi", "sm_80", True),
        ("_Z5twicePfi", "sm_90", True),
        ("_Z6spillyPf", "sm_90", True),
    ]
    assert [usage.registers for usage in usages] == [10, 0, 10, 8, 32]
    assert [usage.shared_bytes for usage in usages] == [0, 0, 256, 256, 0]
    assert [usage.stack_bytes for usage in usages] == [0, 0, 0, 0, 720]
    assert [usage.spills for usage in usages] == [False, False, False, False, True]
    assert (usages[-1].spill_store_bytes, usages[-1].spill_load_bytes) == (1564, 1596)
    assert summarize(usages[:-1]) == (
        "kernels: 3 (sm_80, sm_90), registers: 8 to 10, bytes of static shared memory: 0 to 256, "
        "functions that spill: 0"
    )
    assert summarize(usages).endswith(", functions that spill: 1")
    assert (read_ptxas_report("nothing"), summarize([])) == ([], "no kernels")


@pytest.mark.parametrize("module", [building, ptxas])
def test_examples_of_the_driver(module: ModuleType) -> None:
    examples = Path(str(module.__file__)).read_text().count(">>> ")
    assert examples and doctest.testmod(module) == (0, examples)


def test_a_kernel_that_spills_is_an_error_until_allowed(tree: Tree) -> None:
    tree.tell("attention.says", REPORT)
    tree.tell("score.says", REPORT + SPILLS)
    for _ in range(2):  # the second time from the report that was kept
        with pytest.raises(BuildError) as failed:
            tree.build()
        assert str(failed.value).splitlines() == [
            "functions spill registers (MLBENCH_CUDA_ALLOW_SPILLS=1 builds nevertheless):",
            "_Z6spillyPf (sm_90, 32 registers): 1564 bytes spill stores, 1596 bytes spill loads",
        ]
        assert not tree.library.exists()

    result = tree.build(MLBENCH_CUDA_ALLOW_SPILLS="1")
    assert (names(result), result.linked) == ([], True)
    assert [len(result.functions[tree.source(name)]) for name in ("attention", "score")] == [4, 5]
    with pytest.raises(BuildError, match="spill registers"):
        tree.build()


def test_setup_py_says_in_one_line_that_nvcc_is_missing() -> None:
    environment = {**os.environ, "CUDA_HOME": "/nowhere"}
    command = [sys.executable, "setup.py", "--quiet", "build_cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert (done.stdout, done.stderr.splitlines()) == (
        "",
        [
            "error: CUDA_HOME must be the folder of NVIDIA's CUDA toolkit, not '/nowhere', which has no bin/nvcc: "
            "correct or unset the variable"
        ],
    )


def package(tree: Tree, *commands: str, **variables: str) -> str:
    """Run setup.py commands in a tree that has a part of the library; what it said."""
    if not (tree.root / "setup.py").exists():
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile"):
            shutil.copy(ROOT / name, tree.root)
        for name in ("mlbench_core/ops", "benchmarks/task1a_resnet20_cifar10"):
            skipped = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, tree.root / name, ignore=skipped)
        for name in ("__init__.py", "_lazy.py", "errors.py", "py.typed"):
            shutil.copy(ROOT / "mlbench_core" / name, tree.root / "mlbench_core")
        for path in (ROOT / "csrc").glob("*.py"):
            shutil.copy(path, tree.root / "csrc")
        (tree.root / "benchmarks" / "__init__.py").touch()
    environment = {**os.environ, **tree.environment, **variables}
    environment.pop("PYTHONPATH", None)  # the driver of this checkout would stand in for one that the tree lacks
    done = subprocess.run(
        [sys.executable, "setup.py", *commands], cwd=tree.root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_only_a_wheel_that_asks_for_the_extension_carries_it(tree: Tree) -> None:
    library = "mlbench_core/ops/pytorch/lib/libmlbench_cuda.so"
    package(tree, "bdist_wheel", MLBENCH_CUDA="1")
    (wheel,) = (tree.root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(library) == b"whole"
        assert not any(name.startswith("csrc") for name in archive.namelist())
        assert not any(name.endswith((".cu", ".cuh", ".o")) for name in archive.namelist())
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    assert len(tree.commands()) == 3
    wheel.unlink()

    # The library of before lies in the tree; and an nvcc would be missed if it were needed.
    assert (tree.root / library).read_text() == "whole"
    said = package(tree, "sdist", "bdist_wheel", CUDA_HOME="/nowhere")
    (wheel,) = (tree.root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "build_cuda" not in said
    (source,) = (tree.root / "dist").glob("*.tar.gz")
    listed = subprocess.run(["tar", "tzf", str(source)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"csrc/.+\.\w+$|.+\.so$", listed, re.MULTILINE) == [
        "csrc/__init__.py",
        "csrc/attention/attention.cu",
        "csrc/build.py",
        "csrc/common/common.cuh",
        "csrc/ptxas.py",
        "csrc/score/score.cu",
    ]


def test_an_unpacked_source_distribution_compiles_the_extension(tree: Tree) -> None:
    package(tree, "build_cuda", PYTHONDONTWRITEBYTECODE="")
    assert list((tree.root / "csrc").rglob("*.pyc"))
    # The plain one first: later ones also take what an earlier one listed. The second adds the sources of the command.
    for number, value in enumerate(("0", "1")):
        package(tree, "sdist", MLBENCH_CUDA=value)
        (source,) = (tree.root / "dist").glob("*.tar.gz")
        with tarfile.open(source) as archive:
            assert not any(name.endswith((".pyc", ".so", ".o")) for name in archive.getnames())
            archive.extractall(tree.root.parent / f"unpacked{number}", filter="data")
    tree.commands()
    folder = tree.root.parent / "unpacked0" / source.name.removesuffix(".tar.gz")
    unpacked = Tree(folder, tree.toolkit)
    package(unpacked, "bdist_wheel", MLBENCH_CUDA="1")
    assert (unpacked.root / "mlbench_core/ops/pytorch/lib/libmlbench_cuda.so").read_text() == "whole"
    assert len(tree.commands()) == 3


def test_mlbench_cuda_is_one_or_nothing(tree: Tree) -> None:
    environment = {**os.environ, "MLBENCH_CUDA": "cu130"}
    command = [sys.executable, "setup.py", "--quiet", "build"]
    package(tree, "--version")
    done = subprocess.run(command, cwd=tree.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: MLBENCH_CUDA is 'cu130': 1 compiles the CUDA extension, 0 or nothing does not\n"


patient = pytest.mark.timeout(1800)  # whichever test is the first waits for the compiler


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """The extension, compiled from this checkout for one architecture and as PTX."""
    environment = {**os.environ, "MLBENCH_CUDA_ARCHITECTURES": "90"}
    try:
        find_toolchain(environment)
    except BuildError as error:
        pytest.skip(f"the extension cannot be compiled here: {error}")
    if shutil.which("g++") is None:
        pytest.skip("the extension cannot be compiled here: nvcc needs g++")
    folder = tmp_path_factory.mktemp("extension")
    return build(ROOT, library=folder / "libmlbench_cuda.so", folder=folder / "objects", environment=environment)


def ask_binutils(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here: apt-get install binutils")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@patient
def test_the_extension_compiles_without_spills(real: BuildResult) -> None:
    assert set(real.functions) == set(real.compiled) == set((ROOT / "csrc").glob("*/*.cu"))
    functions = [(source.parent.name, usage) for source, usages in real.functions.items() for usage in usages]
    assert {name for name, usage in functions if usage.is_kernel} == {"attention", "attention_score"}
    for _, usage in functions:
        assert (usage.architecture, usage.spill_store_bytes, usage.spill_load_bytes) == ("sm_90", 0, 0)
        assert 0 < usage.registers <= 255 or not usage.is_kernel


@patient
@pytest.mark.parametrize("defined", ["before", "after"])
def test_the_extension_loads_and_implements_the_operators_for_cuda(real: BuildResult, defined: str) -> None:
    """In a process of its own, whether Python defines the operators before or after the library adds to them."""
    steps = ["torch.ops.load_library(sys.argv[1])", "import mlbench_core.ops.pytorch"]
    code = "; ".join(["import sys, torch", *(steps if defined == "after" else reversed(steps))]) + (
        "; print(sorted(name for name in sys.argv[2:] "
        "if torch._C._dispatch_has_kernel_for_dispatch_key(f'mlbench::{name}', 'CUDA')))"
    )
    command = [sys.executable, "-c", code, str(real.library), *OPERATORS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stderr, done.stdout.strip()) == ("", str(OPERATORS))


def test_the_package_looks_for_the_library_where_the_build_puts_it() -> None:
    assert extension.library_path() == building.LIBRARY


@patient
def test_the_extension_asks_nothing_of_torch_but_its_stable_interface(real: BuildResult) -> None:
    """Symbols of the system's libraries carry a version (``malloc@GLIBC_2.2.5``); torch's do not."""
    lines = ask_binutils("nm", "--dynamic", "--undefined-only", str(real.library)).splitlines()
    symbols = [line.split()[1] for line in lines if line.split()[0] == "U"]
    versioned = {re.sub(r"_[\d.]+$", "", symbol.partition("@")[2]) for symbol in symbols if "@" in symbol}
    assert versioned <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}
    others = [symbol for symbol in symbols if "@" not in symbol]
    assert others
    assert [symbol for symbol in others if not symbol.startswith(("aoti_torch_", "torch_"))] == []


@patient
def test_the_extension_needs_neither_python_nor_a_cuda_runtime(real: BuildResult) -> None:
    needed = re.findall(r"\(NEEDED\).*\[([^\]]+)\]", ask_binutils("readelf", "--dynamic", str(real.library)))
    assert {"libtorch.so", "libtorch_cpu.so"} <= set(needed)
    system = r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux.*"
    assert [name for name in needed if not re.fullmatch(rf"libtorch\.so|libtorch_cpu\.so|{system}", name)] == []
