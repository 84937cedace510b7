"""Run the workers of the local engine in containers, through Docker, Podman or Apptainer.

The functions return command lines. The supervisor of a run starts one container for each worker in
place of a process, and waits for the program in the foreground. All containers of a run are on this
machine, and share its network:

* A worker reaches the others and the master at 127.0.0.1, as a process does. In a separate network,
  the workers would not reach a master that listens on 127.0.0.1, and a master on all addresses
  would be less safe.
* They also share its memory for communication between processes, through which NCCL and
  ``--shared-memory`` pass data.

The folders of the run are mounted at the paths that they have on this machine. Values of variables
are in the environment of the program, never in its arguments, which other users of the machine can
read.

Docker and Podman keep a container when their command is killed. Its label is the folder of its run,
by which it is found and removed. Apptainer's containers are processes below the supervisor. Only
the standard library is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from mlbench_master.engines.interface import Job

__all__ = [
    "PROGRAMS",
    "Containers",
    "check_program",
    "image_problem",
    "read_options",
    "remove_containers",
]

PROGRAMS = ("docker", "podman", "apptainer")
"""Programs that run containers on this machine."""

_LABEL = "mlbench.folder"
_REMOVE_S = 60
# The first character keeps an image from being taken for an option.
_IMAGE = re.compile(r"[A-Za-z0-9./][A-Za-z0-9._/:@+-]*")
_VOLUME = re.compile(r"/[^:]*:/[^:]*(:ro)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_APPTAINER_SOURCE = re.compile(r"[a-z-]+://|.*\.sif$|/|\./")


@dataclass(frozen=True)
class Containers:
    """The containers of one run.

    Attributes:
        program: One of :data:`PROGRAMS`.
        volumes: Further folders of this machine, as ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``.
        variables: Names of variables of the master's environment that the workers get.
    """

    program: str
    volumes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def wrap(
        self,
        job: Job,
        commands: Sequence[dict[str, Any]],
        folder: Path,
        mounts: Sequence[Path],
        names: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Return commands that run each of the given ones in a container.

        Args:
            job: The job.
            commands: Commands inside a container, as ``worker_commands`` of the local engine
                returns them.
            folder: The run's folder, by which its containers are found.
            mounts: Folders of this machine that are mounted at the same path; the first one is the
                home of the workers.
            names: Names of the variables that all containers get.
        """
        wrapped = []
        for command in commands:
            env = dict(command["env"])
            if self.program == "apptainer":
                argv = self._apptainer(job, command["argv"], mounts)
            else:
                # The container sees only its own GPUs, which have the numbers from 0 in it.
                env.pop("CUDA_VISIBLE_DEVICES", None)
                argv = self._run(job, command, folder, mounts, [*names, *env])
            wrapped.append({**command, "argv": argv, "env": self.environment(env)})
        return wrapped

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment of the program for workers that get these variables."""
        if self.program != "apptainer":
            return variables
        # With --cleanenv, a container gets the variables with this prefix only.
        return {f"APPTAINERENV_{name}": value for name, value in variables.items()}

    def _run(
        self,
        job: Job,
        command: dict[str, Any],
        folder: Path,
        mounts: Sequence[Path],
        names: Sequence[str],
    ) -> list[str]:
        """Return the command line of Docker or Podman."""
        argv, rank = command["argv"], command["rank"]
        cores = job.num_cpus
        # One mpirun starts all workers in one container.
        if rank is None:
            cores *= job.num_workers
        # With --init, the program is not process 1, for which the kernel ignores SIGTERM without a
        # handler.
        name, label = _name(job.run_id, rank, folder), f"{_LABEL}={folder}"
        options = [
            *("--rm", "--init", "--name", name, "--label", label),
            *("--network", "host", "--ipc", "host"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", *_user(self.program)),
            *("--cpus", f"{cores:g}", *self._gpus(job, rank)),
        ]
        for path in mounts:
            options += ["--volume", f"{path}:{path}"]
        for volume in self.volumes:
            options += ["--volume", volume]
        # Not from the environment of the program, which finds its own settings in its HOME.
        options += ["--env", f"HOME={mounts[0]}"]
        # A name alone takes the value from the program's environment, so no secret is in the
        # command line.
        for variable in names:
            options += ["--env", variable]
        # An entry point of the image would get the command as its arguments.
        return [self.program, "run", *options, "--entrypoint", argv[0], job.image, *argv[1:]]

    def _apptainer(self, job: Job, argv: Sequence[str], mounts: Sequence[Path]) -> list[str]:
        """Return the command line of Apptainer."""
        options = ["--cleanenv", "--home", str(mounts[0])]
        if job.gpus:
            options.append("--nv")
        for bind in (*map(str, mounts[1:]), *self.volumes):
            options += ["--bind", bind]
        image = job.image
        # Apptainer takes a name without a source for a file.
        if not _APPTAINER_SOURCE.match(image):
            image = f"docker://{image}"
        return ["apptainer", "exec", *options, image, *argv]

    def _gpus(self, job: Job, rank: int | None) -> list[str]:
        gpus = job.gpus
        # A process that starts the other workers needs the GPUs of all.
        if rank is not None and job.all_nodes:
            gpus = gpus[rank : rank + 1]
        if not gpus:
            return []
        if self.program == "podman":
            # Podman names GPUs by the Container Device Interface (CDI).
            devices: list[str] = []
            for gpu in gpus:
                devices += ["--device", f"nvidia.com/gpu={gpu}"]
            return devices
        # Docker reads the value as a line of CSV, so a list needs the quotation marks.
        return ["--gpus", f'"device={",".join(gpus)}"']


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"engine_options: {message}")


def read_options(options: Sequence[str]) -> Containers | None:
    """Return the containers that options of the local engine request; None without containers.

    Args:
        options: ``--container PROGRAM``, and with it ``--volume SOURCE:TARGET[:ro]`` and ``--env
            NAME``, both also several times.

    Raises:
        ValueError: An option is unknown, or its value is not allowed.

    Example:
        >>> read_options(["--container", "podman", "--volume", "/data:/data:ro"]).volumes
        ('/data:/data:ro',)
        >>> read_options([]) is None
        True
    """
    parser = _Parser(prog="local", add_help=False, allow_abbrev=False)
    parser.add_argument("--container")
    parser.add_argument("--volume", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    # The message of argparse about an unknown option does not name those that exist.
    values, rest = parser.parse_known_args(options)
    if rest:
        raise ValueError(
            "engine_options: must be --container, --volume or --env for the engine local, not "
            f"{' '.join(rest)[:80]!r}: leave it out"
        )
    if values.container is None:
        if values.volume or values.env:
            raise ValueError(
                "engine_options: --container must be given with --volume or --env, which it needs"
            )
        return None
    if values.container not in PROGRAMS:
        raise ValueError(
            f"engine_options: --container must be one of {', '.join(PROGRAMS)}, not "
            f"{values.container[:80]!r}"
        )
    for volume in values.volume:
        if not _VOLUME.fullmatch(volume):
            raise ValueError(
                "engine_options: --volume must be /SOURCE:/TARGET or /SOURCE:/TARGET:ro, not "
                f"{volume[:80]!r}: give absolute paths"
            )
    for name in values.env:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                "engine_options: --env must be the name of a variable, not "
                f"{name.partition('=')[0][:80]!r}: "
                "its value comes from the environment of the master"
            )
    return Containers(values.container, tuple(values.volume), tuple(values.env))


def check_program(program: str) -> None:
    """Refuse a program that is not installed.

    Raises:
        ValueError: It was not found.
    """
    if shutil.which(program) is None:
        installed = [name for name in PROGRAMS if shutil.which(name)]
        advice = f"install {program}"
        if installed:
            advice = f"give {' or '.join(installed)} instead"
        raise ValueError(
            f"engine_options: {program} was not found on the master's machine: {advice}, or leave "
            "out --container to start processes"
        )


def image_problem(image: str) -> str:
    """Return why a text cannot be the name of an image, or an empty text if it can.

    Example:
        >>> image_problem("registry.example.com:5000/me/mine@sha256:ab")
        ''
        >>> image_problem("--privileged").rpartition(", ")[2]
        "not '--privileged'"
    """
    if _IMAGE.fullmatch(image):
        return ""
    return (
        f"must be the name of an image such as registry.example.com/me/mine:1, not {image[:80]!r}"
    )


def remove_containers(program: str, folder: Path) -> str:
    """Remove the containers of a run that are still there, and wait until they are gone.

    Args:
        program: The program that started them.
        folder: The run's folder.

    Returns:
        The reason if it failed, else an empty text.
    """
    if program not in ("docker", "podman"):
        return ""
    try:
        # Also those that have ended: a container that was killed may still be there.
        label = f"label={_LABEL}={folder}"
        ids = _call(program, "ps", "--all", "--quiet", "--filter", label).split()
        if ids:
            _call(program, "rm", "--force", *ids)
    except OSError as error:
        why = str(error)
    except subprocess.TimeoutExpired:
        why = f"no answer within {_REMOVE_S} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        why = lines[-1]
    else:
        return ""
    return f"cannot remove containers of this run: {program}: {why[:300]}"


def _call(*command: str) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_REMOVE_S,
        check=True,
    )
    return done.stdout


def _name(run_id: int, rank: int | None, folder: Path) -> str:
    """Return the name of a container, which differs from those of other masters of this machine."""
    folder_hash = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    name = f"mlbench-{folder_hash}-{run_id}"
    if rank is None:
        return name
    return f"{name}-{rank}"


def _user(program: str) -> list[str]:
    """Return the options with which the files of a container belong to the user of this process."""
    if not hasattr(os, "getuid"):
        return []
    options = ["--user", f"{os.getuid()}:{os.getgid()}"]
    # Without root, Podman maps users; this keeps the number of the one who starts it.
    if program == "podman" and os.getuid():
        options += ["--userns", "keep-id"]
    return options
