"""Install the wheel with each extra into an empty environment, and use what the extra is for.

``python tools/check_extras.py`` builds the wheel, checks the installation without an extra and then
each extra in a separate environment, which it deletes afterwards. ``python tools/check_extras.py
base charts`` checks these two. All extras together download several gigabytes. ``cloud``,
``horovod`` and ``dev`` are checked only if they are named: the first is large, the second needs
compilers, and ``make test`` installs the third. The exit status is 1 if a check fails."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from release import build

# The code that must run with an extra alone. "base" is the installation without an extra.
CHECKS = {
    "base": "from mlbench_core.tracking import Tracker; from mlbench_cli import cli_group",
    "torch": (
        "import mlbench_core.optim.pytorch, mlbench_core.models.pytorch.resnet, "
        "mlbench_core.dataset.pytorch"
    ),
    "vision": (
        "from mlbench_core.dataset.imagerecognition.pytorch import Digits; "
        "assert len(Digits()) == 1438"
    ),
    "text": "import pyarrow, sacrebleu, sacremoses, tokenizers",
    "spacy": "import spacy; assert len(spacy.blank('en')('two words')) == 2",
    "linear": "import lmdb; from sklearn.datasets import load_svmlight_file",
    "tensorflow": (
        "import mlbench_core.models.tensorflow.resnet_model, mlbench_core.controlflow.tensorflow"
    ),
    "mpi": "import mpi4py",
    "master": "from mlbench_master.app import create_app; import mlbench_master.server",
    "postgres": "import psycopg",
    "charts": "from mlbench_core.results import figures; import matplotlib.pyplot",
    "kubernetes": "import kubernetes.client",
    "tensorboard": (
        "from mlbench_core.tracking.sinks import make_sink; make_sink('tensorboard:events').close()"
    ),
    "wandb": "import wandb",
    "mlflow": "import mlflow",
    "docs": "import docutils, furo, myst_parser, sphinx, sphinx_copybutton, sphinx_design",
    "all": (
        "import kubernetes, matplotlib, mlbench_core.optim.pytorch, mlbench_master.app, "
        "sacrebleu, tensorboard"
    ),
}
IF_NAMED = {"cloud": "import sky", "horovod": "import horovod.torch", "dev": "import mypy, pytest"}


def check(wheel: Path, extra: str, folder: Path) -> str:
    """Install an extra into an empty environment.

    Args:
        wheel: The wheel to install.
        extra: Name of the extra; "base" for none.
        folder: Folder of the environment.

    Returns:
        The last lines of the first command that failed; empty if all of them succeeded.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    requirement = str(wheel) if extra == "base" else f"{wheel}[{extra}]"
    commands = [
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement],
        [python, "-m", "pip", "check"],
        [python, "-c", {**CHECKS, **IF_NAMED}[extra]],
        [str(folder / "bin" / "mlbench"), "env"],
    ]
    # Nothing of this checkout may replace a file that the wheel lacks.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            return "\n".join(done.stdout.splitlines()[-8:]) or f"exit status {done.returncode}"
    return ""


def main() -> int:
    """Check the extras that the command line names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "extras", nargs="*", help="extras to check; 'base' is the installation without an extra"
    )
    names = parser.parse_args().extras or list(CHECKS)
    if unknown := set(names) - {*CHECKS, *IF_NAMED}:
        parser.error(f"extras must be some of {[*CHECKS, *IF_NAMED]}, not {sorted(unknown)}")
    has_failed = False
    with tempfile.TemporaryDirectory() as name:
        _, wheel = build(Path(name))
        for extra in names:
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as environment:
                problem = check(wheel, extra, Path(environment))
            has_failed = has_failed or bool(problem)
            result = f"failed\n{problem}" if problem else "ok"
            print(f"{extra:<12} {time.monotonic() - start:5.0f} s  {result}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
