"""Describe the call that starts a run: its folder, and the variables that the run takes from it.

A master serves many calls, and each call may come from another folder with another environment. So
each call sends its own folder and variables to the master. The workers of its runs do not inherit
the folder and variables of the call that started the master.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.errors import ConfigurationError

__all__ = [
    "ENGINE_VARIABLES",
    "FORK_VARIABLE",
    "NAMED_VARIABLES",
    "OBSERVER",
    "PREFIXES",
    "VARIABLES",
    "call_environment",
    "call_folder",
    "check_variable",
    "describe_call",
    "is_carried",
    "module_command",
    "observe_command",
    "safe_environment",
    "split_observed",
]

PREFIXES = (
    # GPUs
    "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "MIOPEN_",
    # communication
    "NCCL_", "RCCL_", "GLOO_", "TP_", "UCX_", "UCC_", "FI_",
    "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "MPICH_",
    # threads, linear algebra and memory
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_",
    "ONEDNN_", "DNNL_", "MALLOC_",
    # frameworks and compilers
    "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "TF_", "XLA_",
    # Python, the loader of libraries, and the language
    "PYTHON", "CONDA_", "LD_", "DYLD_", "LC_",
    # services and their clients
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "TENSORBOARD_",
)  # fmt: skip
"""Prefixes of the environment variables that a run takes from the call that starts it."""

FORK_VARIABLE = "MLBENCH_FORK"
"""Variable of a run: if it is 1, its workers are forks of a process that has imported torch."""

VARIABLES = frozenset(
    {
        FORK_VARIABLE,
        "PATH", "VIRTUAL_ENV", "LANG", "TZ", "GLIBC_TUNABLES",
        # proxies and certificates
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
        "http_proxy", "https_proxy", "all_proxy", "no_proxy",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        # Slurm
        "SBATCH_ACCOUNT", "SBATCH_CONSTRAINT", "SBATCH_PARTITION", "SBATCH_QOS",
        "SBATCH_RESERVATION", "SBATCH_TIMELIMIT", "SBATCH_WCKEY",
        "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_NODE",
    }
)  # fmt: skip
"""Other environment variables that a run takes from the call that starts it."""

# These variables are for the terminal of the call. The output of workers goes to a log in UTF-8.
_OF_TERMINAL = ("PYTHONIOENCODING", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONUNBUFFERED")

ENGINE_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables of torchrun with a worker's place, which an engine sets."""

_OF_MASTER = re.compile(
    "MLBENCH_(?:RUN_.*|MASTER_.*|ELASTIC_.*|TOKEN|OUTPUT|SPOOL|SPOOL_ONLY|NETWORK|NODES|"
    "NAMED_VARIABLES)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

NAMED_VARIABLES = "MLBENCH_NAMED_VARIABLES"
"""Variable of the workers that lists the variables the user chose, separated by spaces."""

OBSERVER = "mlbench_core.observe"
"""The module that measures a training script which knows nothing of MLBench."""

# Like the option -P of Python 3.11, remove the first entry of sys.path: the folder of the call.
_SAFE = (
    "import sys; del sys.path[0]; import runpy; runpy.run_module(sys.argv.pop(1), "
    "run_name='__main__', alter_sys=True)"
)


def is_carried(name: str) -> bool:
    """Return True if a run takes a variable from the call that starts it.

    Example:
        >>> is_carried("NCCL_ALGO"), is_carried("HOME")
        (True, False)
    """
    return (name in VARIABLES or name.startswith(PREFIXES)) and name not in _OF_TERMINAL


def check_variable(name: str) -> str:
    """Return ``name`` if a user may set this variable for the workers of a run.

    Raises:
        ValueError: ``name`` is not a valid name, or MLBench sets this variable for each worker.

    Example:
        >>> check_variable("NCCL_ALGO")
        'NCCL_ALGO'
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name of a variable must be letters, digits and '_', not {name[:80]!r}: "
            "give for example NCCL_DEBUG"
        )
    if name in ENGINE_VARIABLES or _OF_MASTER.fullmatch(name):
        raise ValueError(
            "the variable must be one that MLBench does not set itself, "
            f"not {name[:80]}: leave it out"
        )
    return name


def call_folder(given: Path | None = None) -> str:
    """Return the absolute path of the folder in which workers start.

    Args:
        given: The folder that the user chose; None for the current one.

    Raises:
        ConfigurationError: The current folder was deleted.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        if given is not None and given.is_absolute():
            return str(given)
        raise ConfigurationError(
            f"the current folder cannot be used ({error.strerror}): "
            "change to another one, or give --cwd"
        ) from None
    if given is None:
        return str(here)
    return str(here / given.expanduser())


def call_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that a run takes from a call.

    In the returned ``PATH``, ``python`` is the Python of this process, unless another virtual or
    Conda environment is active.

    Args:
        variables: The environment of the call; by default the environment of this process.

    Example:
        >>> carried = call_environment({"NCCL_ALGO": "Ring", "HOME": "/home/me", "PATH": "/bin"})
        >>> carried["NCCL_ALGO"], "HOME" in carried
        ('Ring', False)
    """
    if variables is None:
        variables = os.environ
    carried = {name: value for name, value in variables.items() if is_carried(name)}
    path = variables.get("PATH", os.defpath)
    own = str(Path(sys.executable).parent)
    folders = [own]
    # If an environment is active, a shell would find the Python of that environment.
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if variables.get(name):
            folders.append(os.path.join(variables[name], "bin"))
    python = shutil.which("python", path=path)
    if python is None or os.path.dirname(python) not in folders:
        path = os.pathsep.join([own, path])
    return {**carried, "PATH": path}


def safe_environment() -> dict[str, str]:
    """Return an environment in which a program of MLBench imports nothing from this folder.

    The modules of the user's folder are for the user's scripts. A ``queue.py`` there must not
    replace the module of the standard library in a master. So ``PYTHONPATH`` has neither that
    folder nor a relative entry. Its last entry is the folder that contains this package, because
    Python would not find a package that is not installed.
    """
    here = ""
    # The folder may have been deleted.
    with contextlib.suppress(OSError):
        here = os.getcwd()
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if os.path.isabs(entry) and os.path.realpath(entry) != here]
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*kept, root])}


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of MLBench in this Python.

    The module imports nothing from the current folder.

    Args:
        module: Full name of the module.
        *arguments: The arguments of the program.

    Example:
        >>> module_command("mlbench_cli", "tasks")[-2:]
        ['mlbench_cli', 'tasks']
    """
    options = ["-P", "-m"]
    if sys.version_info < (3, 11):
        options = ["-c", _SAFE]
    return [sys.executable, *options, module, *arguments]


def describe_call(folder: Path | None = None) -> dict[str, Any]:
    """Return the field ``caller`` of a request for a run: this call's folder and environment.

    Args:
        folder: The folder in which the workers start; None for the current one.

    Raises:
        ConfigurationError: The current folder was deleted.
    """
    return {"cwd": call_folder(folder), "environment": call_environment()}


def observe_command(options: Sequence[str], script: Sequence[str]) -> str:
    """Return the command of a worker that measures an unchanged script.

    Args:
        options: Options of the observer, each followed by its value.
        script: The script and its arguments, or ``-m`` with a module and its arguments.

    Example:
        >>> observe_command(["--method", "bf16"], ["train.py", "--lr", "1"])
        'python -m mlbench_core.observe --method bf16 train.py --lr 1'
    """
    # "python" and not a path: the Python is that of the call, also on other machines.
    return shlex.join(["python", "-m", OBSERVER, *options, *script])


def split_observed(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]] | None:
    """Split a command that :func:`observe_command` made.

    Args:
        words: The words of any command.

    Returns:
        The values of each option, and the script with its arguments; None for another command, and
        for one without a script.

    Example:
        >>> split_observed("python -m mlbench_core.observe --method bf16 train.py --lr 1".split())
        ({'--method': ['bf16']}, ['train.py', '--lr', '1'])
        >>> split_observed(["python", "train.py"]) is None
        True
    """
    if list(words[1:3]) != ["-m", OBSERVER]:
        return None
    options: dict[str, list[str]] = {}
    rest = list(words[3:])
    while len(rest) > 1 and rest[0].startswith("--"):
        option, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0)
        options.setdefault(option, []).append(value)
    if not rest or rest[0].startswith("--"):
        return None
    return options, rest
