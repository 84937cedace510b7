"""``mlbench env``: describe hardware, versions and backends for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mlbench_core.cli import _embedded
from mlbench_core.cli._output import clean, json_option, print_json
from mlbench_core.paths import user_folder

__all__ = ["describe", "env"]

PACKAGES = (
    "mlbench-core",
    "torch",
    "torchvision",
    "numpy",
    "click",
    "requests",
    "rich",
    "fastapi",
    "uvicorn",
    "sqlalchemy",
    "scikit-learn",
    "matplotlib",
    "mpi4py",
    "horovod",
    "kubernetes",
)

# This runs in another process, because a torch that crashes or hangs while it loads must not break the command.
_ASK_TORCH = """
import json, torch
import torch.distributed as dist
from mlbench_core.distributed.pytorch import mpi
cuda = torch.cuda.is_available()
on = dist.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and on and dist.is_nccl_available() else None,
    "threads": torch.get_num_threads(),
    "gpus": [{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
             for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))] if cuda else [],
    "backends": [name for name, there in (
        ("gloo", on and dist.is_gloo_available()),
        ("nccl", on and dist.is_nccl_available() and cuda),
        ("mpi", mpi.is_available()),
    ) if there],
}))
"""
_TORCH_TIMEOUT_S = 120.0


def describe() -> dict[str, Any]:
    """Return everything that ``mlbench env`` prints, as values that can be written as JSON."""
    import psutil

    master = _embedded.configured() or _embedded.embedded()
    return {
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "executable": sys.executable,
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            # A container or a batch system may leave fewer cores to this process. macOS has no such function.
            "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": _torch(),
        "mlbench": {"folder": str(user_folder()), "master": master and {"url": master.url, "source": master.source}},
    }


def _version(package: str) -> str | None:
    if package == "mlbench-core":
        from mlbench_core import __version__

        # From the code itself, because the metadata of an editable installation may be older.
        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        # On Linux platform.processor() is empty or names only the architecture.
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _torch() -> dict[str, Any]:
    if _version("torch") is None:
        return {"problem": "not installed: pip install 'mlbench-core[torch]'"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S
        )
        # Libraries may print while torch loads, so the answer is the last line.
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"problem": f"did not load within {_TORCH_TIMEOUT_S:g} s"}
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"problem": f"does not load: {lines[-1]}"}


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Describe this machine: hardware, versions, backends. Put it into a bug report."""
    found = describe()
    if as_json:
        print_json(found)
        return
    for section, values in found.items():
        click.secho(section, bold=True)
        for key, value in values.items():
            click.echo(f"  {key:14} {_text(key, value)}")


def _text(key: str, value: object) -> str:
    if value is None:
        return "-"
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return clean(", ".join(f"{k} {_text(k, v)}" for k, v in value.items()))
    if isinstance(value, list):
        return clean("; ".join(_text("", item) for item in value) or "-")
    return clean(value)
