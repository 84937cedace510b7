"""Builds the CUDA extension: ``csrc/*/*.cu`` become one shared library beside the operators.

Two steps of nvcc, and nothing else is needed but the headers of torch (its CPU build will do; torch itself is not
imported)::

    nvcc FLAGS -c csrc/NAME/FILE.cu          for each source, as many at a time as there are cores
    nvcc -shared -cudart static *.o ...      libmlbench_cuda.so

The library uses torch's stable ABI alone, so one binary serves every Python and every torch from 2.11 on, and it
carries its own CUDA runtime. ``python setup.py build_cuda`` calls :func:`build`; docs/cuda.md is the manual.
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
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from csrc.ptxas import FunctionUsage, read_ptxas_report, summarize

__all__ = [
    "DEFAULT_ARCHITECTURES",
    "LIBRARY",
    "MINIMUM_NVCC",
    "MINIMUM_TORCH",
    "ROOT",
    "BuildError",
    "BuildResult",
    "Toolchain",
    "build",
    "compile_command",
    "find_nvcc",
    "find_toolchain",
    "link_command",
    "requested_architectures",
]

logger = logging.getLogger(__name__)

MINIMUM_NVCC = (12, 0)
"""The first nvcc that knows C++20 and compute capability 9.0."""
MINIMUM_TORCH = (2, 11)
"""The first torch that has every function of the stable ABI that the kernels call."""
DEFAULT_ARCHITECTURES = (80, 90)
"""Ampere and Hopper; later cards translate the intermediate code (PTX) of the last one."""
ROOT = Path(__file__).resolve().parents[1]
"""The checkout or the unpacked source distribution."""
LIBRARY = ROOT / "mlbench_core" / "ops" / "pytorch" / "lib" / "libmlbench_cuda.so"
"""Where the library goes, and where :mod:`mlbench_core.ops.pytorch.extension` looks for it."""

_USUAL_FOLDER = "/usr/local/cuda/bin"
_HEADERS = (".cuh", ".h", ".hpp", ".hh", ".inl")
_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_TORCH_VERSION = re.compile(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)")


class BuildError(Exception):
    """The CUDA extension cannot be compiled here; the message says what is missing, or what the compiler said."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles the extension.

    Attributes:
        nvcc: The compiler.
        nvcc_version: What it says about itself, all of it.
        torch: The folder of the torch package, with ``include`` and ``lib`` in it.
        architectures: Compute capabilities without the dot, ascending: ``(80, 90)``.
    """

    nvcc: Path
    nvcc_version: str
    torch: Path
    architectures: tuple[int, ...] = DEFAULT_ARCHITECTURES


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        library: The shared library.
        compiled: The sources that were compiled this time; the others had not changed.
        linked: Whether the library was written anew.
        functions: What every kernel and every device function that was not inlined takes, by source.
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
    """Compile what changed under ``root/csrc`` and link the library.

    A source is compiled again when it, any header under ``csrc``, the compiler or a flag changed (by content, not by
    time). The library appears under its name only when it is whole. What ptxas reports about each source stays beside
    its object file (``build/cuda/NAME/FILE.ptxas.txt``); a function that spills registers is an error unless
    ``MLBENCH_CUDA_ALLOW_SPILLS=1``, for then it was compiled otherwise than it was designed.

    Args:
        root: The folder that has ``csrc``.
        library: Path of the library to write.
        folder: Where object files and reports are kept; ``root/build/cuda`` if None.
        environment: Variables to take instead of this process's: ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``,
            ``MLBENCH_CUDA_ARCHITECTURES``, ``MLBENCH_CUDA_ALLOW_SPILLS``, and nvcc's own (``NVCC_CCBIN``, ...).

    Returns:
        What was done, and what each kernel takes.

    Raises:
        BuildError: No nvcc, torch or source was found, one of them is too old, a source does not compile, or a kernel
            spills. The library is then as it was before.
    """
    environment = os.environ if environment is None else environment
    folder = root / "build" / "cuda" if folder is None else folder
    sources = _find_sources(root)
    toolchain = find_toolchain(environment)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder), _scratch(folder) as scratch, _Processes(environment, scratch) as processes:
        jobs = [_Job.of(source, root, folder, toolchain, environment) for source in sources]
        outdated = [job for job in jobs if not job.is_current()]
        _compile(outdated, scratch, processes)
        functions = {job.source: read_ptxas_report(job.report.read_text()) for job in jobs}
        _judge(functions, root, allow_spills=environment.get("MLBENCH_CUDA_ALLOW_SPILLS") == "1")
        linked = _link(jobs, library, folder, toolchain, processes)
    return BuildResult(library, tuple(job.source for job in outdated), linked, functions)


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """Find nvcc and torch, check their versions, and read which architectures are wanted.

    Args:
        environment: Variables, as for :func:`build`.

    Returns:
        What to build with.

    Raises:
        BuildError: Something is missing or too old; the message is one line.
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
        BuildError: There is none, or a variable names a folder without one.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environment.get(variable):
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable} is {home!r}, but there is no {nvcc}: "
                    f"let it name the folder of NVIDIA's CUDA toolkit, or unset it"
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
        environment: Variables, as for :func:`build`. Numbers are separated by blanks, commas or semicolons.

    Returns:
        Compute capabilities without the dot, ascending.

    Raises:
        BuildError: Something else than numbers from 80 on.

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
            f"MLBENCH_CUDA_ARCHITECTURES is {text!r}: give compute capabilities from 80 on without the dot, "
            f"such as '80 90'"
        )
    return tuple(sorted({int(word) for word in words}))


def compile_command(toolchain: Toolchain, source: Path, output: Path, *, include: Path) -> list[str]:
    """The command that compiles one source.

    Machine code for every architecture, and intermediate code (PTX) of the last one for later cards.

    Args:
        toolchain: What to build with.
        source: A ``.cu`` file.
        output: The object file to write.
        include: The folder that headers are named from, ``csrc``.

    Returns:
        Program and arguments.
    """
    last = toolchain.architectures[-1]
    codes = [f"arch=compute_{number},code=sm_{number}" for number in toolchain.architectures]
    codes.append(f"arch=compute_{last},code=compute_{last}")
    return [
        str(toolchain.nvcc),
        *("-O3", "-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        f"-DTORCH_TARGET_VERSION=0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}{0:012x}",
        *("-isystem", str(toolchain.torch / "include"), "-I", str(include)),
        *(word for code in codes for word in ("-gencode", code)),
        *("-Xptxas", "-v", "-c", str(source), "-o", str(output)),
    ]


def link_command(toolchain: Toolchain, objects: Sequence[Path], output: Path) -> list[str]:
    """The command that links the library.

    A toolkit of NVIDIA's packages on PyPI has its static libraries in ``lib``, and nvcc looks in ``lib64`` alone.

    Args:
        toolchain: What to build with.
        objects: The object files.
        output: The library to write.

    Returns:
        Program and arguments.
    """
    home = toolchain.nvcc.resolve().parents[1]
    unknown_to_nvcc = (home / "lib" / "libcudart_static.a").is_file() and not (home / "lib64").exists()
    return [
        *(str(toolchain.nvcc), "-shared", "-cudart", "static", "-o", str(output), *map(str, objects)),
        *([f"-L{home / 'lib'}"] if unknown_to_nvcc else []),
        *(f"-L{toolchain.torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"),
    ]


@dataclass(frozen=True)
class _Job:
    """One source, the command without its output, and what becomes of it under the build folder."""

    source: Path
    name: str
    object: Path
    command: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, source: Path, root: Path, folder: Path, toolchain: Toolchain, environment: Mapping[str, str]) -> _Job:
        csrc = root / "csrc"
        target = (folder / source.relative_to(csrc)).with_suffix(".o")
        command = compile_command(toolchain, source, target, include=csrc)
        headers = sorted(path for path in csrc.rglob("*") if path.suffix in _HEADERS)
        settings = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("NVCC_")]
        contents = [path.read_bytes() for path in (source, *headers)]
        names = [str(path.relative_to(csrc)) for path in (source, *headers)]
        digest = _digest(toolchain.nvcc_version, *command, *settings, *names, *contents)
        return cls(source, str(source.relative_to(root)), target, tuple(command[:-1]), digest)

    @property
    def report(self) -> Path:
        return self.object.with_suffix(".ptxas.txt")

    @property
    def stamp(self) -> Path:
        return self.object.with_suffix(".sha256")

    def is_current(self) -> bool:
        return self.object.is_file() and self.report.is_file() and _read(self.stamp) == self.digest


def _compile(jobs: Sequence[_Job], scratch: Path, processes: _Processes) -> None:
    """Compile side by side; an object file takes its place when it is whole, its stamp last."""
    if not jobs:
        return
    cores = len(os.sched_getaffinity(0))
    logger.info("compiling %s", ", ".join(job.name for job in jobs))
    temporaries = {job: scratch / f"{number}.o" for number, job in enumerate(jobs)}
    commands = {job: [*job.command, str(temporary)] for job, temporary in temporaries.items()}
    with ThreadPoolExecutor(min(cores, len(jobs))) as pool:
        futures = {pool.submit(processes.run, command, job.name): job for job, command in commands.items()}
        try:
            for future in as_completed(futures):
                job, output = futures[future], future.result()
                job.object.parent.mkdir(parents=True, exist_ok=True)
                job.stamp.unlink(missing_ok=True)
                job.report.write_text(output)
                temporaries[job].replace(job.object)
                job.stamp.write_text(job.digest)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise


def _link(jobs: Sequence[_Job], library: Path, folder: Path, toolchain: Toolchain, processes: _Processes) -> bool:
    """Link under a temporary name in the library's own folder, where a rename is atomic; whether it was needed."""
    command = link_command(toolchain, [job.object for job in jobs], library)
    stamp = folder / "library.sha256"
    digest = _digest(*command, *(job.digest for job in jobs))
    if library.is_file() and _read(stamp) == digest:
        logger.info("%s is up to date", library.name)
        return False
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_name(f".{library.name}.{os.getpid()}")
    command = link_command(toolchain, [job.object for job in jobs], temporary)
    try:
        processes.run(command, library.name)
        stamp.unlink(missing_ok=True)
        temporary.replace(library)
    finally:
        temporary.unlink(missing_ok=True)
    stamp.write_text(digest)
    logger.info("linked %s (%d bytes)", library, library.stat().st_size)
    return True


def _judge(functions: Mapping[Path, Sequence[FunctionUsage]], root: Path, *, allow_spills: bool) -> None:
    """Say what the kernels take, and refuse spills."""
    for source, usages in functions.items():
        logger.info("%s: %s", source.relative_to(root), summarize(usages))
    spilling = [usage for usages in functions.values() for usage in usages if usage.spills]
    if not spilling:
        return
    lines = [
        f"{usage.name} ({usage.architecture}, {usage.registers} registers): "
        f"{usage.spill_store_bytes} bytes spill stores, {usage.spill_load_bytes} bytes spill loads"
        for usage in spilling
    ]
    message = "functions spill registers (MLBENCH_CUDA_ALLOW_SPILLS=1 builds nevertheless):\n" + "\n".join(lines)
    if not allow_spills:
        raise BuildError(message)
    logger.warning("%s", message)


class _Processes:
    """Runs commands, from several threads, so that all can be stopped with their children."""

    def __init__(self, environment: Mapping[str, str], scratch: Path) -> None:
        self._environment = {**environment, "TMPDIR": str(scratch)}
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, command: Sequence[str], name: str) -> str:
        """What the command wrote; BuildError with it when it failed."""
        logger.debug("%s", " ".join(command))
        with self._lock:
            if self._stopped:
                raise BuildError(f"{name}: stopped before it began")
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self._environment,
                start_new_session=True,
            )
            self._running.add(process)
        with process:
            try:
                output = process.communicate()[0]
            except BaseException:
                self.stop()
                raise
        with self._lock:
            self._running.discard(process)
        if process.returncode != 0:
            raise BuildError(f"nvcc failed on {name} with exit status {process.returncode}:\n{output.strip()}")
        for line in output.splitlines():
            if "warning" in line:
                logger.warning("%s", line)
        return output

    def stop(self) -> None:
        """End what runs, and start nothing any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)


def _find_sources(root: Path) -> list[Path]:
    sources = sorted((root / "csrc").glob("*/*.cu"))
    if not sources:
        raise BuildError(
            f"no CUDA sources under {root / 'csrc'}: build from a checkout or a source distribution, "
            f"an installed wheel does not carry them"
        )
    return sources


def _nvcc_version(nvcc: Path, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, env=dict(environment))
    except OSError as error:
        raise BuildError(f"{nvcc} cannot be run: {error.strerror}") from error
    release = _RELEASE.search(done.stdout)
    if release is None:
        said = (done.stdout + done.stderr).strip().partition("\n")[0]
        raise BuildError(f"{nvcc} --version gives no release: exit status {done.returncode}, {said!r}")
    if (int(release[1]), int(release[2])) < MINIMUM_NVCC:
        raise BuildError(
            f"{nvcc} is CUDA {release[1]}.{release[2]}, and the extension needs {_dotted(MINIMUM_NVCC)} or later: "
            f"name another toolkit's folder in CUDA_HOME"
        )
    return done.stdout


def _find_torch() -> Path:
    """The folder of the torch package, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise BuildError(
            f"the CUDA extension needs torch's headers, and torch is not installed for {sys.executable}: "
            f"pip install 'torch>={_dotted(MINIMUM_TORCH)}', and give pip --no-build-isolation so that it is seen"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    header = _read(folder / "include" / "torch" / "headeronly" / "version.h")
    version = tuple(map(int, _TORCH_VERSION.findall(header)))
    if version < MINIMUM_TORCH:
        raise BuildError(
            f"torch in {folder} is {_dotted(version) or 'without the headers of the stable ABI'}, and the CUDA "
            f"extension needs {_dotted(MINIMUM_TORCH)} or later"
        )
    return folder


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One build at a time in a build folder; the lock goes with the process."""
    import fcntl  # Linux has it, and elsewhere this module must still load to say why it builds nothing

    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for what is not finished; what a killed build left there goes first."""
    for left in folder.glob("unfinished-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        yield Path(scratch)


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(b"%d:" % len(data) + data)
    return total.hexdigest()


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
