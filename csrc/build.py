"""Compile the CUDA sources beside this file into one library: two calls of nvcc.

The build needs nvcc 12 or later and the headers of torch 2.11 or later. It does not import torch,
and a CPU build of torch is enough. ``setup.py`` calls it with ``MLBENCH_CUDA=1``, and so does
``python -m mlbench_core.install_cuda_extensions``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["BuildError", "build"]

SOURCES = Path(__file__).resolve().parent
DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"
"""Machine code for Ampere and Hopper; later GPUs translate Hopper's intermediate code (PTX)."""
# With this macro torch's headers declare only the stable ABI of version 2.11, so that one binary
# works with every later version. Its digits are hexadecimal: two each for major, minor and patch.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class BuildError(Exception):
    """The library cannot be built; the message names what is missing, or is nvcc's output."""


def build(library: Path) -> str:
    """Compile all sources for the architectures in ``TORCH_CUDA_ARCH_LIST``, and link the library.

    Args:
        library: The file to write. It is replaced only by a library that was linked.

    Returns:
        One line: the architectures, and the bytes of registers that the kernels spill to memory.

    Raises:
        BuildError: nvcc or torch's headers are missing, an architecture is unknown, or nvcc failed.
    """
    nvcc, torch = _find_nvcc(), _find_torch()
    architectures = _architectures(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHITECTURES)
    library.parent.mkdir(parents=True, exist_ok=True)
    # Beside the library, because a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as name:
        folder = Path(name)

        def compile_one(source: Path) -> str:
            return _run(
                *(nvcc, "-O3", "-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden", STABLE_ABI),
                *("-isystem", torch / "include", "-I", SOURCES, *architectures, "-Xptxas", "-v"),
                *("-c", source, "-o", folder / f"{source.parent.name}-{source.stem}.o"),
            )

        with ThreadPoolExecutor() as pool:
            reports = "".join(pool.map(compile_one, sorted(SOURCES.glob("*/*.cu"))))
        # NVIDIA's packages on PyPI have the static CUDA runtime in lib, and nvcc looks into lib64.
        runtime = nvcc.resolve().parents[1] / "lib"
        _run(
            *(nvcc, "-shared", "-cudart", "static", "-o", folder / library.name),
            *sorted(folder.glob("*.o")),
            *(
                f"-L{runtime}",
                f"-L{torch / 'lib'}",
                "-Xlinker",
                "--no-as-needed",
                "-ltorch",
                "-ltorch_cpu",
            ),
        )
        (folder / library.name).replace(library)
    spilled = sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(reports))
    codes = ", ".join(re.findall(r"code=(\w+)", " ".join(architectures)))
    return f"architectures: {codes}; spilled registers: {spilled} bytes"


def _find_nvcc() -> Path:
    """Return the compiler in ``CUDA_HOME``, on the PATH, or in the usual folder."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin")] if home else [*os.get_exec_path(), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(map(str, places)))
    if nvcc is None:
        where = f"CUDA_HOME ({home})" if home else "CUDA_HOME, on the PATH or in /usr/local/cuda"
        raise BuildError(f"no nvcc in {where}: install NVIDIA's CUDA toolkit 12 or later")
    return Path(nvcc)


def _find_torch() -> Path:
    """Return the folder of torch, without the import, which would take seconds."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    # pip builds in an environment without torch, but with the interpreter of the user's
    # environment.
    folders += [str(Path(sysconfig.get_path(name), "torch")) for name in ("purelib", "platlib")]
    for folder in map(Path, folders):
        if (folder / "include" / "torch" / "headeronly").is_dir():
            return folder
    raise BuildError("no headers of torch 2.11 or later: pip install 'torch>=2.11'")


def _architectures(text: str) -> list[str]:
    """Return nvcc's options for architectures as in ``TORCH_CUDA_ARCH_LIST``: ``"8.0 9.0+PTX"``."""
    options = []
    for word in re.split(r"[\s;,]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", word)
        if match is None or int(match[1]) < 8:
            raise BuildError(
                "TORCH_CUDA_ARCH_LIST must have numbers of at least 8.0, such as '8.0;9.0+PTX', "
                f"not {word!r}"
            )
        number = match[1] + match[2]
        options += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if match[3]:
            options += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return options


def _run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"nvcc failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
