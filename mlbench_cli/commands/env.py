"""``mlbench env``: describe hardware, versions and backends for a bug report."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click

from mlbench_cli import _embedded
from mlbench_cli._clusters.programs import last_line
from mlbench_cli._output import clean, json_option, print_json
from mlbench_core.calling_environment import safe_environment
from mlbench_core.errors import MLBenchError
from mlbench_core.paths import user_folder
from mlbench_core.results.environment import describe_packages, describe_system

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

# This runs in another process, because a torch that crashes or hangs while it loads must not break
# the command. Its first line leaves out the current folder, in which a user may have a torch.py.
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import importlib.util, json
import torch.distributed as dist
from mlbench_core._optional import torchvision
from mlbench_core.distributed.pytorch import mpi
from mlbench_core.results import environment
vision = None
if importlib.util.find_spec("torchvision"):
    try:
        torchvision.load()
        vision = "loads"
        if torchvision.lacks_operators():
            vision += " without its compiled operators"
    except Exception as error:
        vision = "does not load: " + " ".join(str(error).split())
gpus, backends = environment.describe_gpus(), []
if dist.is_available() and dist.is_gloo_available():
    backends.append("gloo")
if dist.is_available() and dist.is_nccl_available() and gpus:
    backends.append("nccl")
if mpi.is_available():
    backends.append("mpi")
print(json.dumps({
    **environment.describe_torch(),
    "torchvision": vision,
    "driver": environment.driver_version(),
    "gpus": gpus,
    "backends": backends,
}))
"""
_TORCH_TIMEOUT_S = 120.0


def describe() -> dict[str, Any]:
    """Return everything that ``mlbench env`` prints, as values that can be written as JSON."""
    master: dict[str, Any] | None = None
    try:
        location = _embedded.configured() or _embedded.embedded()
        if location is not None:
            master = {"url": location.url, "source": location.source}
    except MLBenchError as error:
        master = {"problem": str(error)}
    installed = describe_packages()
    torch = {"problem": "not installed: pip install 'mlbench-core[torch]'"}
    if "torch" in installed:
        torch = _torch()
    return {
        "system": describe_system(),
        "packages": {name: installed.get(name) for name in PACKAGES},
        "torch": torch,
        "mlbench": {"folder": str(user_folder()), "master": master},
    }


def _torch() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            env=safe_environment(),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
        )
        # Libraries may print while torch loads, so the answer is the last line.
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"problem": f"did not load within {_TORCH_TIMEOUT_S:g} s"}
    except (ValueError, IndexError):
        reason = last_line(done.stderr) or f"exit status {done.returncode}"
        return {"problem": f"does not load: {reason}"}


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Describe this machine: hardware, versions, backends. Put it into a bug report."""
    description = describe()
    if as_json:
        print_json(description)
        return
    for section, values in description.items():
        click.secho(section, bold=True)
        for key, value in values.items():
            click.echo(f"  {key:18} {_text(key, value)}")


def _text(key: str, value: object) -> str:
    if value is None:
        return "-"
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return clean(", ".join(f"{name} {_text(name, each)}" for name, each in value.items()))
    if isinstance(value, list):
        return clean("; ".join(_text("", item) for item in value) or "-")
    return clean(value)
