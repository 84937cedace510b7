"""CUDA kernels compiled for the host: ``csrc/<name>/host.cpp`` on the emulator, loaded by ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-x", "c++", "-std=c++20", "-Og", "-fPIC", "-DMLBENCH_HOST", f"-I{CSRC}")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
CHECKS = (
    "-fsanitize=alignment,bounds,null,shift,thread",
    "-fno-sanitize-recover=all",
    "--param=tsan-instrument-func-entry-exit=0",
    "-g1",
)

ASCENDING, DESCENDING = 0, 1
SCHEDULES = (ASCENDING, DESCENDING, 2, 3)

_folder: list[Path] = []  # where the libraries of this test run are, once `use_folder` has said so
_loaded: dict[Path, HostLibrary] = {}


class KernelError(AssertionError):
    """What a kernel did wrong, in the emulator's words: the block, the thread, the file, the line and the reason."""


class HostLibrary(ctypes.CDLL):
    """A library of kernels on the emulator; a function whose launch failed raises `KernelError`."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._failure = super().__getitem__("mlbench_emulator_failure")
        self._failure.restype = ctypes.c_char_p

    def __getitem__(self, name_or_ordinal: Any) -> Any:
        function = super().__getitem__(name_or_ordinal)
        function.errcheck = self._raise_failure
        return function

    def _raise_failure(self, result: Any, function: Any, arguments: Any) -> Any:
        message = self._failure()
        if message:
            raise KernelError(re.sub(r"\[(0x[0-9a-f]+)\]", self._line_of, message.decode()))
        return result

    def _line_of(self, address: re.Match[str]) -> str:
        program = shutil.which("addr2line")
        if program is None:
            return address[0]
        done = subprocess.run([program, "-s", "-e", self._path, address[1]], capture_output=True, text=True)
        return done.stdout.split(" (")[0].strip() or address[0]


def use_folder(factory: pytest.TempPathFactory) -> None:
    """Keep this test run's libraries in pytest's temporary folder, the one that all of pytest's workers share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_host"
    folder.mkdir(exist_ok=True)
    _folder[:] = [folder]


def host_library(name: str) -> HostLibrary:
    """The kernels of ``csrc/<name>`` on the host, compiled once per test run and state of the sources.

    Args:
        name: The operator's folder in ``csrc``, e.g. ``"attention"``.

    Returns:
        The library, with the C functions of ``host.cpp`` and ``mlbench_emulator_schedule``.
    """
    return compile_host(CSRC / name / "host.cpp")


def compile_host(source: Path, *flags: str) -> HostLibrary:
    """A C++ file that includes kernels, compiled for the emulator and loaded; skips the test where g++ is absent.

    Args:
        source: The file; it finds the headers of ``csrc``.
        flags: More flags for the compiler.
    """
    library = build_host(source, *flags)
    if library not in _loaded:
        _loaded[library] = HostLibrary(library)
    return _loaded[library]


def build_host(source: Path, *flags: str) -> Path:
    """Compile like `compile_host` and return the library's path.

    Its name holds a hash of the sources and flags; the workers of one run share the file and one of them compiles.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the CUDA kernels for the host")
    library = _folder[0] / f"{source.parent.name}_{_digest(source, flags)}.so"
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            _compile(compiler, source, library, flags)
    return library


def set_schedule(library: HostLibrary, seed: int) -> None:
    """Choose the order in which later launches run threads: `ASCENDING`, `DESCENDING` or, at random, a seed above."""
    library.mlbench_emulator_schedule(ctypes.c_uint64(seed))


@contextmanager
def unwatched(library: HostLibrary) -> Iterator[None]:
    """Do not look for races in shared memory: only a wrong result under some schedule then shows one."""
    library.mlbench_emulator_watch(ctypes.c_bool(False))
    try:
        yield
    finally:
        library.mlbench_emulator_watch(ctypes.c_bool(True))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's first element, null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _digest(source: Path, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((FLAGS, WARNINGS, CHECKS, flags)).encode())
    headers = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh"))
    for path in (source, *headers):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, source: Path, library: Path, flags: tuple[str, ...]) -> None:
    # Linked in a step of its own, without CHECKS: the emulator has functions of its own for them, g++'s stay out.
    compiled, linked = library.with_suffix(".o"), library.with_suffix(".partial")
    for command in (
        [compiler, *FLAGS, *WARNINGS, *CHECKS, *flags, "-c", str(source), "-o", str(compiled)],
        [compiler, "-shared", str(compiled), "-o", str(linked)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"g++ could not compile {source} for the host:\n{done.stderr}"
    linked.rename(library)
