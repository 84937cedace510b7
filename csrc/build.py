"""Build the CUDA extension: compile ``csrc/*/*.cu`` into one shared library in the folder of the operators.

The build runs nvcc in two steps. It also needs the headers and libraries of torch, but it does not import torch. A CPU
build of torch is sufficient::

    nvcc FLAGS -c csrc/NAME/FILE.cu          for each source, in parallel on all cores
    nvcc -shared -cudart static *.o ...      libmlbench_cuda.so

The library uses only torch's stable ABI and includes its own CUDA runtime. Therefore one binary works with every Python
and with every torch from 2.11 on. ``python setup.py build_cuda`` calls :func:`build`; docs/howto/cuda.md is the manual.

Files of a build, in the order in which they are written::

    build/cuda/unfinished-*/       incomplete files; the next build removes those that a killed build left
    build/cuda/NAME/FILE.ptxas.txt
    build/cuda/NAME/FILE.o         renamed from unfinished-*
    build/cuda/NAME/FILE.sha256    digest of source, headers and command; while it matches, the object is up to date
    libmlbench_cuda.so             renamed from a hidden name in its own folder
    build/cuda/library.sha256      digest of objects and command; while it matches, the library is up to date
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from csrc.ptxas import FunctionUsage, read_ptxas_report, summarize

__all__ = ["BuildError", "BuildResult", "build", "find_nvcc", "find_toolchain", "requested_architectures"]

logger = logging.getLogger(__name__)

MINIMUM_NVCC = (12, 0)
"""The first nvcc that supports C++20 and compute capability 9.0."""
MINIMUM_TORCH = (2, 11)
"""The first torch that has every function of the stable ABI that the kernels call."""
DEFAULT_ARCHITECTURES = (80, 90)
"""Ampere and Hopper. Later GPUs translate the intermediate code (PTX) of the last one."""
ROOT = Path(__file__).resolve().parents[1]
"""The checkout or the unpacked source distribution."""
LIBRARY = ROOT / "mlbench_core" / "ops" / "pytorch" / "lib" / "libmlbench_cuda.so"
"""Path of the library, which :mod:`mlbench_core.ops.pytorch.extension` loads."""

_USUAL_FOLDER = "/usr/local/cuda/bin"
_HEADERS = (".cuh", ".h", ".hpp", ".hh", ".inl")
_POLL_INTERVAL_S = 0.05


class BuildError(Exception):
    """The CUDA extension cannot be compiled; the message names the missing requirement or has the compiler's output."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler, torch and the GPUs of a build.

    Attributes:
        nvcc: The compiler.
        nvcc_version: Output of ``nvcc --version``.
        torch: The folder of the torch package, with ``include`` and ``lib`` in it.
        architectures: Compute capabilities without the dot, ascending: ``(80, 90)``.
    """

    nvcc: Path
    nvcc_version: str
    torch: Path
    architectures: tuple[int, ...] = DEFAULT_ARCHITECTURES


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        library: The shared library.
        compiled: The sources that were compiled by this build; the others had not changed.
        linked: True if the library was written again.
        functions: Resource usage of every kernel, and of every device function that was not inlined, by source.
    """

    library: Path
    compiled: tuple[Path, ...]
    linked: bool
    functions: Mapping[Path, Sequence[FunctionUsage]] = field(repr=False)


def build(
    root: Path = ROOT,
    *,
    library: Path = LIBRARY,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BuildResult:
    """Compile the changed sources under ``root/csrc`` and link the library.

    The build compiles a source again if the source, any header under ``csrc``, the compiler or a flag changed. It
    compares contents, not modification times. It keeps the report of ptxas about each source next to the object file.
    The kernels are designed to keep their values in registers. A kernel that spills registers to local memory is
    therefore an error unless ``MLBENCH_CUDA_ALLOW_SPILLS=1``.

    Args:
        root: The folder that contains ``csrc``.
        library: Path of the library to write.
        folder: Folder of object files and reports; ``root/build/cuda`` if None.
        environment: Environment variables to use instead of those of this process: ``CUDA_HOME``, ``CUDA_PATH``,
            ``PATH``, ``MLBENCH_CUDA_ARCHITECTURES``, ``MLBENCH_CUDA_ALLOW_SPILLS``, and those of nvcc
            (``NVCC_CCBIN``, ...).

    Returns:
        The result, with the resource usage of each kernel.

    Raises:
        BuildError: nvcc, torch or the sources are missing or too old, a source does not compile, or a kernel spills.
            The previous library is then unchanged.
    """
    environment = os.environ if environment is None else environment
    folder = root / "build" / "cuda" if folder is None else folder
    sources = sorted((root / "csrc").glob("*/*.cu"))
    if not sources:
        raise BuildError(
            f"no CUDA sources under {root / 'csrc'}: build from a checkout or a source distribution, "
            f"an installed wheel does not contain them"
        )
    toolchain = find_toolchain(environment)
    with _scratch(folder) as scratch:
        jobs = [_job(source, root, folder, toolchain, environment) for source in sources]
        outdated = [job for job in jobs if not job.is_current()]
        _compile(outdated, scratch, environment)
        functions = {job.source: read_ptxas_report(job.report.read_text()) for job in jobs}
        # The kept reports include those of earlier builds, so that a kernel that spills is an error in every build.
        _check_spills(functions, root, allow_spills=environment.get("MLBENCH_CUDA_ALLOW_SPILLS") == "1")
        linked = _link(jobs, library, folder, toolchain, scratch, environment)
    return BuildResult(library, tuple(job.source for job in outdated), linked, functions)


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """Find nvcc and torch, check their versions, and read the requested architectures.

    Args:
        environment: Variables, as for :func:`build`.

    Returns:
        The compiler, torch and the architectures.

    Raises:
        BuildError: nvcc or torch is missing or too old, or the system is not Linux; the message is one line.
    """
    if sys.platform != "linux":
        raise BuildError(f"the CUDA extension builds on Linux, this is {sys.platform}: install without MLBENCH_CUDA=1")
    nvcc = find_nvcc(environment)
    return Toolchain(nvcc, _nvcc_version(nvcc, environment), _find_torch(), requested_architectures(environment))


def find_nvcc(environment: Mapping[str, str]) -> Path:
    """Find the CUDA compiler in ``CUDA_HOME``, else ``CUDA_PATH``, else ``PATH``, else ``/usr/local/cuda``.

    Args:
        environment: Variables, as for :func:`build`.

    Returns:
        Path of nvcc.

    Raises:
        BuildError: nvcc was not found, or a variable names a folder without it.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environment.get(variable):
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable} must be the folder of NVIDIA's CUDA toolkit, not {home!r}, which has no bin/nvcc: "
                    f"correct or unset the variable"
                )
            return nvcc
    found = shutil.which("nvcc", path=environment.get("PATH", os.defpath)) or shutil.which("nvcc", path=_USUAL_FOLDER)
    if found is None:
        raise BuildError(
            f"no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda: install NVIDIA's CUDA toolkit "
            f"{_dotted(MINIMUM_NVCC)} or later, or name its folder in CUDA_HOME"
        )
    return Path(found)


def requested_architectures(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Read ``MLBENCH_CUDA_ARCHITECTURES``.

    Args:
        environment: Variables, as for :func:`build`. Spaces, commas or semicolons separate the numbers.

    Returns:
        Compute capabilities without the dot, ascending.

    Raises:
        BuildError: A word in the variable is not a whole number of at least 80.

    Example:
        >>> requested_architectures({"MLBENCH_CUDA_ARCHITECTURES": "90 80"})
        (80, 90)
    """
    text = environment.get("MLBENCH_CUDA_ARCHITECTURES", "").strip()
    if not text:
        return DEFAULT_ARCHITECTURES
    words = re.split(r"[\s,;]+", text)
    if not all(word.isdecimal() and int(word) >= min(DEFAULT_ARCHITECTURES) for word in words):
        raise BuildError(
            f"MLBENCH_CUDA_ARCHITECTURES must be compute capabilities of at least 80 without the dot, such as "
            f"'80 90', not {text!r}"
        )
    return tuple(sorted({int(word) for word in words}))


def compile_command(toolchain: Toolchain, source: Path, output: Path, *, include: Path) -> list[str]:
    """Return the command that compiles one source.

    The object has machine code for every architecture, and the intermediate code (PTX) of the last one for later GPUs.

    Args:
        toolchain: The compiler, torch and the architectures.
        source: A ``.cu`` file.
        output: The object file to write.
        include: The folder that the names of included headers are relative to, ``csrc``.

    Returns:
        Program and arguments.
    """
    last = toolchain.architectures[-1]
    codes = [f"arch=compute_{number},code=sm_{number}" for number in toolchain.architectures]
    codes.append(f"arch=compute_{last},code=compute_{last}")
    return [
        str(toolchain.nvcc),
        *("-O3", "-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        # With this macro torch's headers declare only the stable ABI of that version. Its digits are hexadecimal: two
        # each for major, minor and patch version, ten for the rest.
        f"-DTORCH_TARGET_VERSION=0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}{0:012x}",
        *("-isystem", str(toolchain.torch / "include"), "-I", str(include)),
        *(word for code in codes for word in ("-gencode", code)),
        *("-Xptxas", "-v", "-c", str(source), "-o", str(output)),
    ]


def link_command(toolchain: Toolchain, objects: Sequence[Path], output: Path) -> list[str]:
    """Return the command that links the library.

    Args:
        toolchain: The compiler, torch and the architectures.
        objects: The object files.
        output: The library to write.

    Returns:
        Program and arguments.
    """
    home = toolchain.nvcc.resolve().parents[1]
    # NVIDIA's packages on PyPI have their static libraries in ``lib``, but nvcc searches ``lib64`` only.
    unknown_to_nvcc = (home / "lib" / "libcudart_static.a").is_file() and not (home / "lib64").exists()
    return [
        *(str(toolchain.nvcc), "-shared", "-cudart", "static", "-o", str(output), *map(str, objects)),
        *([f"-L{home / 'lib'}"] if unknown_to_nvcc else []),
        *(f"-L{toolchain.torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"),
    ]


@dataclass(frozen=True)
class _Job:
    """One source, its object file, the command without the output's path, and a digest of all inputs."""

    source: Path
    name: str
    object: Path
    command: tuple[str, ...]
    digest: str

    @property
    def report(self) -> Path:
        return self.object.with_suffix(".ptxas.txt")

    @property
    def stamp(self) -> Path:
        return self.object.with_suffix(".sha256")

    def is_current(self) -> bool:
        return self.object.is_file() and self.report.is_file() and _read(self.stamp) == self.digest


def _job(source: Path, root: Path, folder: Path, toolchain: Toolchain, environment: Mapping[str, str]) -> _Job:
    csrc = root / "csrc"
    target = (folder / source.relative_to(csrc)).with_suffix(".o")
    command = compile_command(toolchain, source, target, include=csrc)
    # All headers count for each source, because the build does not know which ones a source includes.
    inputs = [source, *sorted(path for path in csrc.rglob("*") if path.suffix in _HEADERS)]
    contents = [(str(path.relative_to(csrc)), path.read_bytes()) for path in inputs]
    settings = sorted(item for item in environment.items() if item[0].startswith("NVCC_"))
    digest = _digest(toolchain.nvcc_version, command, settings, contents)
    return _Job(source, str(source.relative_to(root)), target, tuple(command[:-1]), digest)


def _compile(jobs: Sequence[_Job], scratch: Path, environment: Mapping[str, str]) -> None:
    """Compile the sources in parallel."""
    if not jobs:
        return
    logger.info("compiling %s", ", ".join(job.name for job in jobs))
    temporaries = {job.name: scratch / f"{number}.o" for number, job in enumerate(jobs)}
    by_name = {job.name: job for job in jobs}

    def keep(name: str, output: str) -> None:
        job = by_name[name]
        job.object.parent.mkdir(parents=True, exist_ok=True)
        # Remove the old stamp first and write the new one last. An interrupted build then never leaves an object next
        # to the stamp of another one, which would pass for up to date.
        job.stamp.unlink(missing_ok=True)
        job.report.write_text(output)
        temporaries[name].replace(job.object)
        job.stamp.write_text(job.digest)

    _run({job.name: [*job.command, str(temporaries[job.name])] for job in jobs}, scratch, environment, keep)


def _link(
    jobs: Sequence[_Job],
    library: Path,
    folder: Path,
    toolchain: Toolchain,
    scratch: Path,
    environment: Mapping[str, str],
) -> bool:
    """Link the library unless it is up to date, and return whether it was linked."""
    # The temporary file is in the library's own folder, because a rename is atomic only within a file system.
    temporary = library.with_name(f".{library.name}.unfinished")
    command = link_command(toolchain, [job.object for job in jobs], temporary)
    stamp = folder / "library.sha256"
    digest = _digest(command, [job.digest for job in jobs])
    if library.is_file() and _read(stamp) == digest:
        logger.info("%s is up to date", library.name)
        return False
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run({library.name: command}, scratch, environment)
        stamp.unlink(missing_ok=True)
        temporary.replace(library)
    finally:
        temporary.unlink(missing_ok=True)
    stamp.write_text(digest)
    logger.info("linked %s (%d bytes)", library, library.stat().st_size)
    return True


def _run(
    commands: Mapping[str, Sequence[str]],
    scratch: Path,
    environment: Mapping[str, str],
    keep: Callable[[str, str], None] = lambda name, output: None,
) -> None:
    """Run commands in parallel on all cores, and call ``keep`` with the name and the output of each that succeeds.

    The first failure, or an exception such as KeyboardInterrupt, ends all commands that still run.
    """
    # nvcc keeps its intermediate files in TMPDIR, so that a killed build leaves none in the system's temporary folder.
    environment = {**environment, "TMPDIR": str(scratch)}
    waiting = list(commands.items())
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                name, command = waiting.pop(0)
                logger.debug("%s", " ".join(command))
                # The output goes to a file, because a command would block at a full pipe that nothing reads. The
                # command gets a session of its own, so that killpg below also ends the programs that nvcc starts.
                log = scratch / f"{len(waiting)}.log"
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                running[name] = process, log
            time.sleep(_POLL_INTERVAL_S)
            for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                process, log = running.pop(name)
                output = log.read_text(errors="replace")
                if process.returncode != 0:
                    raise BuildError(f"nvcc failed on {name} with exit status {process.returncode}:\n{output.strip()}")
                for line in output.splitlines():
                    if "warning" in line:
                        logger.warning("%s", line)
                keep(name, output)
    finally:
        for process, _ in running.values():
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _check_spills(functions: Mapping[Path, Sequence[FunctionUsage]], root: Path, *, allow_spills: bool) -> None:
    """Log the resource usage of the kernels, and reject spills."""
    for source, usages in functions.items():
        logger.info("%s: %s", source.relative_to(root), summarize(usages))
    lines = [
        f"{usage.name} ({usage.architecture}, {usage.registers} registers): "
        f"{usage.spill_store_bytes} bytes spill stores, {usage.spill_load_bytes} bytes spill loads"
        for usages in functions.values()
        for usage in usages
        if usage.spills
    ]
    if not lines:
        return
    message = "functions spill registers (MLBENCH_CUDA_ALLOW_SPILLS=1 builds nevertheless):\n" + "\n".join(lines)
    if not allow_spills:
        raise BuildError(message)
    logger.warning("%s", message)


def _nvcc_version(nvcc: Path, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, env=dict(environment))
    except OSError as error:
        raise BuildError(f"{nvcc} cannot be run: {error.strerror}") from error
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if release is None:
        first_line = (done.stdout + done.stderr).strip().partition("\n")[0]
        raise BuildError(f"{nvcc} --version prints no release: exit status {done.returncode}, {first_line!r}")
    if (int(release[1]), int(release[2])) < MINIMUM_NVCC:
        raise BuildError(
            f"{nvcc} is CUDA {release[1]}.{release[2]}, and the extension needs {_dotted(MINIMUM_NVCC)} or later: "
            f"name another toolkit's folder in CUDA_HOME"
        )
    return done.stdout


def _find_torch() -> Path:
    """Return the folder of the torch package."""
    # Find the folder without importing torch, which would take seconds.
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise BuildError(
            f"the CUDA extension needs torch's headers, and torch is not installed for {sys.executable}: "
            f"pip install 'torch>={_dotted(MINIMUM_TORCH)}', and give pip --no-build-isolation so that it is seen"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    header = _read(folder / "include" / "torch" / "headeronly" / "version.h")
    version = tuple(map(int, re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", header)))
    if version < MINIMUM_TORCH:
        raise BuildError(
            f"torch in {folder} is {_dotted(version) or 'without the headers of the stable ABI'}, and the CUDA "
            f"extension needs {_dotted(MINIMUM_TORCH)} or later"
        )
    return folder


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Lock a build folder, and create a folder for unfinished files in it."""
    # Windows does not have this module. csrc.build must load there nevertheless, so that find_toolchain can raise its
    # error about the system.
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    # Without the lock, two builds would remove each other's files. The system releases it when a process ends.
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in folder.glob("unfinished-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
            yield Path(scratch)


def _digest(*parts: object) -> str:
    # repr quotes each part, so that different parts never give the same text: ("ab", "c") differs from ("a", "bc").
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
