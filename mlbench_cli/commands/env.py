"""``mlbench env``: describe hardware, versions and backends for a bug report."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click

from mlbench_cli import _embedded
from mlbench_cli._output import clean, json_option, print_json
from mlbench_core.caller import safe_environment
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
import sys; sys.path[:] = [place for place in sys.path if place]
import importlib.util, json
import torch.distributed as dist
from mlbench_core import _torchvision
from mlbench_core.distributed.pytorch import mpi
from mlbench_core.results import environment
vision = None
if importlib.util.find_spec("torchvision"):
    try:
        _torchvision.load()
        vision = "loads without its compiled operators" if _torchvision.lacks_operators() else "loads"
    except Exception as error:
        vision = "does not load: " + " ".join(str(error).split())
gpus, on = environment.describe_gpus(), dist.is_available()
print(json.dumps({
    **environment.describe_torch(),
    "torchvision": vision,
    "driver": environment.driver_version(),
    "gpus": gpus,
    "backends": [name for name, there in (
        ("gloo", on and dist.is_gloo_available()),
        ("nccl", on and dist.is_nccl_available() and gpus),
        ("mpi", mpi.is_available()),
    ) if there],
}))
"""
_TORCH_TIMEOUT_S = 120.0


def describe() -> dict[str, Any]:
    """Return everything that ``mlbench env`` prints, as values that can be written as JSON."""
    try:
        found = _embedded.configured() or _embedded.embedded()
        master = found and {"url": found.url, "source": found.source}
    except MLBenchError as error:
        master = {"problem": str(error)}
    installed = describe_packages()
    return {
        "system": describe_system(),
        "packages": {name: installed.get(name) for name in PACKAGES},
        "torch": _torch()
        if "torch" in installed
        else {"problem": "not installed: pip install 'mlbench-core[torch]'"},
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
            click.echo(f"  {key:18} {_text(key, value)}")


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
