"""Describe the machine, the software and the settings of a run.

The description is for ``environment.json`` and ``mlbench env``. Nothing here raises an exception
because something cannot be read: the value is then None. Secrets are left out or replaced by
``***``. torch and TensorFlow are described only if the process has imported them; this module does
not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mlbench_core.calling_environment import NAMED_VARIABLES, is_carried
from mlbench_core.files import digest
from mlbench_core.results.control_groups import cores_limit, memory_limit, read_file
from mlbench_core.results.masking import as_utf8, mask_command_line, mask_variables
from mlbench_core.results.source_code import describe_checkout

__all__ = [
    "describe_environment",
    "describe_gpus",
    "describe_packages",
    "describe_system",
    "describe_tensorflow",
    "describe_torch",
    "driver_version",
    "machine_of",
    "software_of",
]

_SCHEMA_VERSION = 1

# Tests replace these.
_PROC = Path("/proc")
_SYS = Path("/sys")

# Besides those that a run takes from the call that starts it.
_VARIABLE_PREFIXES = ("MLBENCH_", "OMPI_COMM_WORLD_")
# Of SLURM, only the place of the process and its resources: other variables name users and
# accounts.
_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK"),
    *("SLURM_CPU_BIND", "SLURM_GPUS_ON_NODE"),
}

# Names of accounts.
_UNRECORDED = ("SBATCH_", "MLBENCH_NAMED_VARIABLES")

_MOST_DATA_FILES = 1000
_MOST_HASHED_BYTES = 1 << 30
_PART_BYTES = 1 << 20

_T = TypeVar("_T")


def describe_environment(
    *,
    seeds: Mapping[str, int] | None = None,
    data_files: Iterable[Path] = (),
    program: Path | None = None,
) -> dict[str, Any]:
    """Return the content of ``environment.json``: all that may influence a run except its options.

    Args:
        seeds: Seeds of the run by name, for example ``{"global": 42}``.
        data_files: Files of the data set. At most 1,000 of them are described; folders are left
            out. Each file has its size and its SHA-256. Files beyond the first GiB in total are not
            read as a whole. Instead, they have the time of their last change, and
            ``sha256_of_parts``, the SHA-256 of their first, middle and last MiB.
        program: The script or program of the run; None for that of this process.

    Returns:
        Values that can be written as JSON:

        * ``schema_version``: 1.
        * ``host``: Name of the machine.
        * ``system``: See :func:`describe_system`.
        * ``gpus``, ``driver``: See :func:`describe_gpus` and :func:`driver_version`.
        * ``torch``: See :func:`describe_torch`.
        * ``tensorflow``: See :func:`describe_tensorflow`; missing without it.
        * ``packages``: All installed distributions with their versions.
        * ``checkouts``: Commit and local changes of ``program`` and of ``mlbench_core``, see
          :func:`~mlbench_core.results.source_code.describe_checkout`.
        * ``variables``: Environment variables that libraries and launchers read, and those that the
          user gave to the run. The values of secrets are ``***``.
        * ``command_line``: The arguments of this process, beginning with those of Python, without
          secrets.
        * ``seeds``: As given.
        * ``data_files``: As described above, and ``data_files_left_out``: the number of further
          paths.

    Example:
        >>> environment = describe_environment(seeds={"global": 42})
        >>> environment["seeds"]
        {'global': 42}
    """
    if program is None:
        # An interactive Python has no file.
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        if file is not None:
            program = Path(file)
    files, left_out = _describe_files(data_files)
    environment: dict[str, Any] = {
        "schema_version": _SCHEMA_VERSION,
        "host": _read(platform.node) or None,
        "system": describe_system(),
        "gpus": describe_gpus(),
        "driver": driver_version(),
        "torch": describe_torch(),
    }
    tensorflow = describe_tensorflow()
    if tensorflow is not None:
        environment["tensorflow"] = tensorflow
    environment["packages"] = describe_packages()
    checkouts: dict[str, Any] = {"program": None}
    if program is not None:
        checkouts["program"] = describe_checkout(program, accept_new=True)
    checkouts["mlbench_core"] = describe_checkout(Path(__file__).parents[1] / "__init__.py")
    environment["checkouts"] = checkouts
    recorded = {}
    for name in filter(_is_recorded, sorted(os.environ)):
        recorded[name] = os.environ[name]
    return {
        **environment,
        "variables": mask_variables(recorded),
        "command_line": mask_command_line(sys.orig_argv),
        "seeds": dict(seeds or {}),
        "data_files": files,
        "data_files_left_out": left_out,
    }


def describe_system() -> dict[str, Any]:
    """Describe processor, memory, operating system and Python.

    Returns:
        ``platform``, ``os``, ``kernel``, ``libc``, ``python``, ``executable``, ``cpu`` (the model),
        ``sockets``, and

        * ``cores``: Logical cores of the machine.
        * ``cores_physical``: Cores without those of simultaneous multithreading.
        * ``cores_usable``: Logical cores on which this process may run. A launcher may bind each
          worker to a few.
        * ``cores_limit``: Cores that the control groups of a container or a batch system allow,
          possibly a fraction; None without a limit.
        * ``frequency_mhz``: ``current``, ``min`` and ``max`` frequency in MHz.
        * ``memory_bytes``: Memory of the machine, and ``memory_limit_bytes``: the limit of the
          control groups.

        A value that cannot be read is None.
    """
    readers: dict[str, Callable[[], Any]] = {
        "platform": platform.platform,
        "os": _os_name,
        "kernel": platform.release,
        "libc": lambda: " ".join(platform.libc_ver()).strip() or None,
        "python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
        "executable": lambda: as_utf8(sys.executable),
        "cpu": _cpu_name,
        "sockets": _sockets,
        "cores": os.cpu_count,
        "cores_physical": lambda: _psutil().cpu_count(logical=False),
        "cores_usable": _usable_cores,
        "cores_limit": lambda: cores_limit(_PROC, _SYS),
        "frequency_mhz": _frequency_mhz,
        "memory_bytes": lambda: _psutil().virtual_memory().total,
        "memory_limit_bytes": _memory_limit,
    }
    return {name: _read(reader) for name, reader in readers.items()}


def describe_packages() -> dict[str, str]:
    """Return the versions of all installed distributions.

    The names are normalized, for example ``"scikit-learn"``.
    """
    from mlbench_core import __version__

    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # A damaged installation has no name or no version.
        name = _read(partial(getattr, distribution, "name"))
        version = _read(partial(getattr, distribution, "version"))
        if name and version:
            # Python imports the first of several installations.
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    # From the code itself, because the metadata of an editable installation may be older.
    versions["mlbench-core"] = __version__
    return dict(sorted(versions.items()))


def describe_torch() -> dict[str, Any] | None:
    """Describe the torch that this process has imported; None if it has not.

    Returns:
        ``version``, ``cuda``, ``cudnn``, ``nccl`` (their versions), ``threads``, the threads of an
        operator, and ``attention``: ``"kernels"`` if the CUDA kernels of MLBench compute the
        attention of short sentences in half precision, ``"torch"`` otherwise, None without such a
        model. The versions of cuDNN and NCCL are None if no GPU can be used.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # Functions, because access to an attribute of torch may fail, too.
    description: dict[str, Any] = {
        "version": _read(lambda: str(torch.__version__)),
        "cuda": _read(lambda: torch.version.cuda),
        "cudnn": None,
        "nccl": None,
        "threads": _read(lambda: torch.get_num_threads()),
        "attention": _describe_attention(),
    }
    if _can_use_cuda(torch):
        description["cudnn"] = _read(lambda: torch.backends.cudnn.version())
        description["nccl"] = _read(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    return description


def _describe_attention() -> str | None:
    # Only a process with a model that uses attention has imported it.
    extension = sys.modules.get("mlbench_core.ops.pytorch.extension")
    if extension is None:
        return None
    if extension.why_not() is not None:
        return "torch"
    return "kernels"


def describe_tensorflow() -> dict[str, Any] | None:
    """Describe the TensorFlow that this process has imported; None if it has not.

    Returns:
        ``version`` and ``threads``, the threads of an operator; 0 means as many as the machine has
        cores.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    return {
        "version": _read(lambda: str(tensorflow.__version__)),
        "threads": _read(
            lambda: int(tensorflow.config.threading.get_intra_op_parallelism_threads())
        ),
    }


def describe_gpus() -> list[dict[str, Any]]:
    """Describe the GPUs that this process can use.

    Without torch in the process, they are all GPUs of the machine as NVML (the package
    ``nvidia-ml-py``) lists them.

    Returns:
        ``name``, ``memory_bytes`` and ``capability`` (for example ``"9.0"``) of each GPU; empty if
        none is found.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _read(_nvml_gpus) or []
    if not _can_use_cuda(torch):
        return []
    gpus = []
    for index in range(_read(lambda: torch.cuda.device_count()) or 0):
        device = _read(partial(torch.cuda.get_device_properties, index))
        if device is not None:
            capability = f"{device.major}.{device.minor}"
            memory_bytes = device.total_memory
            gpus.append(
                {"name": device.name, "memory_bytes": memory_bytes, "capability": capability}
            )
    return gpus


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if there is none."""

    def ask_nvml() -> str:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())

    return read_file(_SYS / "module/nvidia/version") or _read(ask_nvml)


def machine_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part ``machine`` of ``result.json``, without the number of hosts.

    Args:
        environment: The result of :func:`describe_environment`, or of reading ``environment.json``.

    Returns:
        ``cpu``, ``cores`` and ``memory_bytes`` within the limits of the container, ``gpu`` (the
        models, or None) and ``gpus``, their number.

    Example:
        >>> system = {"cpu": "A", "cores": 8, "cores_limit": 1.5, "memory_bytes": 100}
        >>> machine_of({"system": system, "gpus": []})
        {'cpu': 'A', 'cores': 2, 'memory_bytes': 100, 'gpu': None, 'gpus': 0}
    """
    system, gpus = environment.get("system") or {}, environment.get("gpus") or []
    cores = [system.get("cores"), system.get("cores_limit")]
    memory = [system.get("memory_bytes"), system.get("memory_limit_bytes")]
    # Each model once: the number of GPUs is an entry of its own.
    models = sorted({str(gpu.get("name")) for gpu in gpus})
    return {
        "cpu": system.get("cpu"),
        # A limit may be a fraction of a core, and the cores of a result are whole ones.
        "cores": min(map(math.ceil, filter(None, cores)), default=None),
        "memory_bytes": min(filter(None, memory), default=None),
        "gpu": ", ".join(models) or None,
        "gpus": len(gpus),
    }


def software_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part ``software`` of ``result.json``.

    Args:
        environment: The result of :func:`describe_environment`, or of reading ``environment.json``.

    Returns:
        ``mlbench_core``, ``python``, ``torch``, ``tensorflow`` (only if the run used it),
        ``attention`` (only if it was the CUDA kernels), ``os``, ``nccl`` and ``driver``, then
        ``commit`` and ``difference_sha256``. These two are those of the program's checkout, or of
        the checkout of ``mlbench_core`` if the program has none. If the checkouts differ, the
        version of ``mlbench_core`` ends with its own commit and difference: ``4.0+g0123.d4567``.
    """
    system, torch = environment.get("system") or {}, environment.get("torch") or {}
    tensorflow = environment.get("tensorflow")
    checkouts = environment.get("checkouts") or {}
    library = checkouts.get("mlbench_core") or {}
    program = checkouts.get("program") or library
    version = (environment.get("packages") or {}).get("mlbench-core")
    # The commit below is that of the program, so another one of the library needs a place, too.
    if version and library and library != program:
        version = f"{version}+g{library['commit'][:12]}"
        if library["changed_files"] != 0:
            version += f".d{(library['difference_sha256'] or 'unknown')[:12]}"
    software = {
        "mlbench_core": version,
        "python": system.get("python"),
        "torch": torch.get("version"),
    }
    if tensorflow:
        software["tensorflow"] = tensorflow.get("version")
    if torch.get("attention") == "kernels":
        software["attention"] = "kernels"
    return {
        **software,
        "os": system.get("os"),
        "nccl": torch.get("nccl"),
        "driver": environment.get("driver"),
        "commit": program.get("commit"),
        "difference_sha256": program.get("difference_sha256"),
    }


def _is_recorded(name: str) -> bool:
    if name.startswith(_UNRECORDED):
        return False
    is_read = name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES) or is_carried(name)
    return is_read or name in os.environ.get(NAMED_VARIABLES, "").split()


def _describe_files(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], int]:
    """Describe the first files, and return the number of the remaining paths."""
    described: list[dict[str, Any]] = []
    left_bytes = _MOST_HASHED_BYTES
    rest = iter(paths)
    while len(described) < _MOST_DATA_FILES and (path := next(rest, None)) is not None:
        status = _read(path.stat)
        if status is not None and stat.S_ISDIR(status.st_mode):
            continue
        entry: dict[str, Any] = {"path": as_utf8(str(path)), "bytes": None, "sha256": None}
        # Anything but a file, for example a pipe, could be read without end.
        if status is not None and stat.S_ISREG(status.st_mode):
            entry["bytes"] = status.st_size
            if status.st_size <= left_bytes:
                left_bytes -= status.st_size
                entry["sha256"] = _read(partial(digest, path))
            else:
                modified_at = datetime.fromtimestamp(status.st_mtime, timezone.utc)
                entry["modified_at"] = modified_at.isoformat()
                entry["sha256_of_parts"] = _read(partial(_hash_parts, path, status.st_size))
        described.append(entry)
    return described, sum(1 for _ in rest)


def _hash_parts(path: Path, size: int) -> str:
    """Return the SHA-256 of the first, the middle and the last MiB of a file."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        for offset in (0, (size - _PART_BYTES) // 2, size - _PART_BYTES):
            file.seek(max(0, offset))
            hasher.update(file.read(_PART_BYTES))
    return hasher.hexdigest()


def _psutil() -> Any:
    # Imported on first use, because `mlbench --help` should start fast.
    import psutil

    return psutil


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    # Only Linux has such a file.
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _cpu_name() -> str:
    # On Linux platform.processor() is empty or names only the architecture.
    model = re.search(r"^model name\s*: (.+)$", read_file(_PROC / "cpuinfo") or "", re.MULTILINE)
    if model:
        return model[1].strip()
    return platform.processor() or platform.machine()


def _sockets() -> int | None:
    # Each core names its socket. The number is -1 if the system does not know it.
    files = _SYS.glob("devices/system/cpu/cpu*/topology/physical_package_id")
    return len(set(map(read_file, files)) - {None, "-1"}) or None


def _usable_cores() -> int | None:
    # macOS has no such function.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_limit() -> int | None:
    return memory_limit(_PROC, _SYS, int(_psutil().virtual_memory().total))


def _frequency_mhz() -> dict[str, float | None]:
    frequencies = _psutil().cpu_freq()._asdict()
    # psutil gives 0 for a frequency that it does not know.
    return {name: value or None for name, value in frequencies.items()}


def _can_use_cuda(torch: ModuleType) -> bool:
    return bool(_read(lambda: torch.cuda.is_available()))


def _nvml_gpus() -> list[dict[str, Any]]:
    import pynvml

    pynvml.nvmlInit()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpus.append(
            {
                "name": str(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "capability": ".".join(map(str, capability)),
            }
        )
    return gpus


def _read(reader: Callable[[], _T]) -> _T | None:
    """Return the result of a function, or None if it raises an exception.

    All exceptions count: a description of the machine must not end a run, whatever a library or a
    driver raises.
    """
    try:
        return reader()
    except Exception:
        return None
