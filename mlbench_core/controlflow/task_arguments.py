"""Read the command line that all task scripts share."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.distributed.environment import (
    HostsEnvironment,
    MPICHEnvironment,
    OpenMPIEnvironment,
    TorchrunEnvironment,
    detect_environment,
)
from mlbench_core.errors import ConfigurationError, MLBenchError, WorkerError
from mlbench_core.files import is_file_name
from mlbench_core.paths import user_folder
from mlbench_core.tasks import BACKENDS

__all__ = ["DEFAULT_TIMEOUT_S", "add_run_arguments", "count", "seconds", "task_main"]

DEFAULT_TIMEOUT_S = 1800.0
"""Default of ``--timeout``, the seconds to wait for other workers, as torch has it for Gloo."""


def task_main(
    main_func: Callable[..., Any],
    uid: str = "allreduce",
    *,
    argv: Sequence[str] | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], Any] | None = None,
) -> None:
    """Read a task's command line, create its folders, and run it.

    The call is ``main_func(run_id=..., dataset_dir=..., ckpt_run_dir=..., output_dir=..., rank=...,
    backend=..., hosts=..., validation_only=..., gpu=..., light_target=...)``. All arguments are
    keyword arguments, so a task may declare its parameters in any order.

    Under torchrun, rank, hosts and world size come from the environment. The rank is then ``RANK``.
    The hosts are None, so ``initialize_backends`` reads them from the environment.

    The default of ``--backend`` is ``"nccl"`` with ``--gpu``, ``"mpi"`` under an mpirun if mpi4py
    is installed, and ``"gloo"`` otherwise.

    An option may be shortened as long as it stays unambiguous: ``--root-data`` is
    ``--root-dataset``.

    Errors in the arguments end the process with status 2, and an :class:`MLBenchError` of the task
    with status 1. Both print one line on standard error. If another worker was lost, the traceback
    of the backend's error comes before it.

    Args:
        main_func: The task. It accepts the ten names above as keyword arguments.
        uid: The task's name in paths: ``<root-dataset>/torch/<uid>``,
            ``<root-checkpoint>/<uid>/<run_id>`` and ``<root-output>/<uid>/<run_id>``.
        argv: Arguments to read instead of those of the process.
        add_arguments: Function that adds the task's own arguments to the parser. ``main_func`` is
            then also called with ``args=``, the namespace of all arguments; pass its ``timeout`` to
            ``initialize_backends(timeout_s=...)``. Its attribute ``options`` is a dictionary of the
            options that differ from their defaults.

    Raises:
        TypeError: ``main_func`` cannot be called.
        ValueError: ``uid`` cannot be the name of a folder.

    Example:
        >>> def main(run_id, rank, backend, **others):
        ...     print(run_id, rank, backend)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     roots = [f"--root-{name}={folder}" for name in ("dataset", "checkpoint", "output")]
        ...     argv = ["--run_id", "7", "--hosts", "a,b", "--rank", "1", *roots]
        ...     task_main(main, "task1a", argv=argv)
        7 1 gloo
    """
    if not callable(main_func):
        raise TypeError(
            f"main_func must be callable, not {main_func!r}: pass the task's main function"
        )
    if not is_file_name(uid):
        raise ValueError(f"uid must be a name for a folder, such as 'task1a', not {uid!r}")
    parser = _make_parser()
    if add_arguments is not None:
        parser.add_argument(
            "--timeout",
            type=seconds,
            default=DEFAULT_TIMEOUT_S,
            metavar="SECONDS",
            help="how long to wait for other workers before they count as lost [%(default)g]",
        )
        add_arguments(parser)
    args = parser.parse_args(argv)
    if not is_file_name(args.run_id):
        parser.error(
            f"argument --run_id: {args.run_id!r} cannot name a folder; "
            "use letters, digits, '-', '_' and '.'"
        )
    try:
        rank, hosts = _rank_and_hosts(args.rank, args.hosts, os.environ)
    except (ValueError, ConfigurationError) as error:
        parser.error(str(error))
    args.options = _options(parser, args)
    extra: dict[str, Any] = {}
    if add_arguments is not None:
        extra["args"] = args
    # The last garbage collection of the process looks at every object of torch, which takes a
    # second.
    atexit.register(gc.freeze)
    try:
        main_func(
            run_id=args.run_id,
            dataset_dir=_make_folder("--root-dataset", args.root_dataset, "torch", uid),
            ckpt_run_dir=_make_folder("--root-checkpoint", args.root_checkpoint, uid, args.run_id),
            output_dir=_make_folder("--root-output", args.root_output, uid, args.run_id),
            rank=rank,
            backend=args.backend or _default_backend(args.gpu, os.environ),
            hosts=hosts,
            validation_only=args.validation_only,
            gpu=args.gpu,
            light_target=args.light_target,
            **extra,
        )
    except MLBenchError as error:
        # The cause is the backend's own error, which the line below does not include.
        if isinstance(error, WorkerError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        message = " ".join(str(error).split())
        sys.stderr.write(f"{parser.prog}: error: {message}\n")
        raise SystemExit(1) from error


def _options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that differ from their defaults, as values that can be written as JSON."""
    options = {}
    for name, value in vars(args).items():
        if value != parser.get_default(name):
            if isinstance(value, Path):
                value = str(value)
            options[name] = value
    return options


def add_run_arguments(parser: argparse.ArgumentParser, epochs: int | None = None) -> None:
    """Add the arguments of every task that trains: epochs, resuming, checkpoints and the seed.

    Args:
        parser: Receives ``--epochs``, ``--goal-after``, ``--past-goal``, ``--resume``,
            ``--checkpoint``, ``--no-checkpoint``, ``--seed`` and ``--sink``.
        epochs: The task's budget; None if it depends on other arguments.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_run_arguments(parser, epochs=8)
        >>> args = parser.parse_args(["--resume", "--seed", "0", "--goal-after", "600"])
        >>> args.epochs, args.resume, args.seed, args.goal_after
        (8, True, 0, 600.0)
    """
    shown = "" if epochs is None else " [%(default)s]"
    parser.add_argument(
        "--epochs", type=count, default=epochs, metavar="N", help="largest number of epochs" + shown
    )
    parser.add_argument(
        "--goal-after",
        type=seconds,
        metavar="SECONDS",
        help="the goal is the best value of the task's metric after this training time",
    )
    parser.add_argument(
        "--past-goal", action="store_true", help="train all epochs, even after the goal is reached"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint of this run"
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--checkpoint", action="store_true", help="save one after every epoch, not only of the best"
    )
    kept.add_argument("--no-checkpoint", action="store_true", help="save none")
    parser.add_argument(
        "--seed",
        type=_seed,
        default=42,
        metavar="N",
        help="seed of weights, dropout and data order [%(default)s]",
    )
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        metavar="NAME[:ARGUMENT]",
        help=(
            "also write the numbers of rank 0 to jsonl:PATH, csv:PATH, tensorboard:FOLDER, "
            "wandb, mlflow or a plug-in"
        ),
    )


def count(text: str) -> int:
    """Return a whole number of at least 1; the ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.

    Example:
        >>> count("12")
        12
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Return a positive, finite number of seconds; the ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.

    Example:
        >>> seconds("0.5")
        0.5
    """
    try:
        number = float(text)
    except ValueError:
        # Fails the comparison below.
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return number


def _seed(text: str) -> int:
    """Return a seed that every random generator accepts: NumPy's global one takes 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, not {text!r}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """A parser for which two spellings of one option do not make its short form ambiguous."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that a short form may mean, each once."""
        # The first item of each tuple is the option's action, which its spellings share.
        by_action = {id(match[0]): match for match in super()._get_option_tuples(option_string)}
        return list(by_action.values())


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the shared arguments; each name may have ``_`` or ``-``."""
    parser = _Parser(description="Run a benchmark task.")

    def add(name: str, **options: Any) -> None:
        spellings = dict.fromkeys(
            (f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}")
        )
        parser.add_argument(*spellings, **options)

    add(
        "run_id",
        default=os.environ.get("MLBENCH_RUN_ID") or "1",
        metavar="ID",
        help="id of the run [%(default)s]",
    )
    for name, folder in (
        ("dataset", "datasets"),
        ("checkpoint", "checkpoints"),
        ("output", "output"),
    ):
        default = str(user_folder(folder))
        # An engine sets MLBENCH_OUTPUT, so that it can read the run's result.
        if name == "output":
            default = os.environ.get("MLBENCH_OUTPUT") or default
        # argparse formats help texts with %, and the name of a folder may contain %.
        shown = default.replace("%", "%%")
        add(
            f"root-{name}", default=default, metavar="DIR", help=f"folder of the {folder} [{shown}]"
        )
    add("validation_only", action="store_true", help="only evaluate the checkpoints of the run")
    add("gpu", action="store_true", help="train on GPUs")
    add("light", action="store_true", dest="light_target", help="stop at the light goal")
    add("rank", type=int, help="number of this worker, from 0; needed with several --hosts")
    add(
        "backend",
        type=str.lower,
        choices=BACKENDS,
        help="communication backend [nccl with --gpu, mpi under mpirun, else gloo]",
    )
    add("hosts", help="the workers' hosts by rank, separated by commas; one entry for each worker")
    return parser


def _rank_and_hosts(
    rank: int | None, hosts: str | None, environment: Mapping[str, str]
) -> tuple[int, str | None]:
    """Return this worker's rank, and the hosts if they were given on the command line.

    Args:
        rank: Value of ``--rank``.
        hosts: Value of ``--hosts``.
        environment: The environment variables, in which launchers set the rank.

    Returns:
        Rank and hosts. Hosts is None if the environment has them, or if there is one worker.

    Raises:
        ValueError: Rank and hosts contradict each other.
        ConfigurationError: The launcher's variables contradict each other.
    """
    if rank is None:
        rank = -1
    launcher = detect_environment(hosts, rank, environment)
    if not hosts or isinstance(launcher, TorchrunEnvironment):
        return launcher.read_rank(), None
    world = HostsEnvironment(hosts, launcher.read_rank(), environment)
    return world.rank, ",".join(world.hosts)


def _default_backend(gpu: bool, environment: Mapping[str, str]) -> str:
    """Return the backend of workers that were started without ``--backend``."""
    if gpu:
        return "nccl"
    launcher = detect_environment(environment=environment)
    # srun sets the variables of PMI too, but a usable MPI may be missing there.
    is_mpirun = isinstance(launcher, OpenMPIEnvironment) or (
        isinstance(launcher, MPICHEnvironment) and not environment.get("SLURM_PROCID")
    )
    if is_mpirun and importlib.util.find_spec("mpi4py") is not None:
        return "mpi"
    return "gloo"


def _make_folder(option: str, root: str, *parts: str) -> str:
    """Create a folder below ``root`` and return its path."""
    folder = Path(root).expanduser().absolute().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} cannot be created ({error.strerror}); choose another {option}"
        ) from error
    return str(folder)
