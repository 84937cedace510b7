"""Clusters at clouds, by SkyPilot.

Its program ``sky`` rents the machines, and MLBench's master runs on the first one. SkyPilot is a
program here and not a library, because it requires older versions of packages that MLBench uses. It
has its own environment. The master listens on the first machine's 127.0.0.1 only; a tunnel of
``ssh`` leads there::

    mlbench run ---> 127.0.0.1:PORT
                          |
                      ssh tunnel
                          |
                          v
                     127.0.0.1:PORT on the first machine: mlbench master
                          |
                      engine "hosts": ssh
                          |
                          +--> worker on each machine

The port is the same at both ends, because the proof of a master includes its own port.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from mlbench_cli._clusters.programs import (
    ProgramFailed,
    Step,
    ask,
    check_programs,
    last_line,
    perform,
)
from mlbench_cli._output import clean, remark
from mlbench_core import __version__, files
from mlbench_core.client.clusters import Cluster, remember_cluster
from mlbench_core.client.masters import check_token
from mlbench_core.errors import ConfigurationError, MasterTokenError
from mlbench_core.paths import user_folder

__all__ = [
    "CloudOptions",
    "connect",
    "create",
    "delete_steps",
    "price",
    "states",
    "steps",
    "task_file",
    "task_text",
]

CLOUDS = {"gcloud": "gcp", "aws": "aws", "azure": "azure"}
"""SkyPilot's names of the clouds."""

# After the master has ended. SkyPilot counts in minutes.
DOWN_MIN = 5
ANSWER_S = 120.0
POLL_S = 2.0
_EXTRAS = "[master,vision]"
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True)
class CloudOptions:
    """The options of one call of the command.

    Attributes:
        num_cpus: The least number of cores per machine, unless ``machine_type`` is given.
        num_gpus: GPUs per machine.
        gpu_type: SkyPilot's name of the GPU, for example ``T4``.
        machine_type: The cloud's name of the machine, or None to let SkyPilot choose the cheapest
            one.
        region: A region of the cloud, or None for any.
        zone: A zone of the cloud, or None for any.
        disk_size: Size of the disk of a machine in GB.
        spot: True for machines that the cloud may take back, at a lower price.
        image: The cloud's name of an image for the machines, or None for SkyPilot's default.
        autostop_min: Minutes without a run and without a request after which the cluster is
            deleted; 0 for never.
        package: The requirement that pip installs on the machines, or a wheel.
    """

    num_cpus: int = 4
    num_gpus: int = 0
    gpu_type: str = "T4"
    machine_type: str | None = None
    region: str | None = None
    zone: str | None = None
    disk_size: int = 50
    spot: bool = False
    image: str | None = None
    autostop_min: int = 60
    package: str | None = None


def task_text(cluster: Cluster, options: CloudOptions) -> str:
    """Return SkyPilot's description of a cluster in YAML; it holds no secret."""
    lines = [f"name: {cluster.name}", f"num_nodes: {cluster.num_workers}", "resources:"]
    # A value in JSON is also one in YAML.
    for name, value in _resources(cluster, options).items():
        lines.append(f"  {name}: {json.dumps(value)}")
    package, mounts = _package(options)
    if mounts:
        lines.append("file_mounts:")
    for target, source in mounts.items():
        lines.append(f"  {json.dumps(target)}: {json.dumps(source)}")
    idle = ""
    if options.autostop_min:
        idle = f" --end-when-idle {options.autostop_min * 60}"
    # A machine has room for one worker, or for one on each of its GPUs.
    slots = max(options.num_gpus, 1)
    setup = f"""
setup: |
  python3 -m venv ~/mlbench-env
  ~/mlbench-env/bin/pip install {package}
run: |
  # The other machines only wait for workers. This job lasts as long as the master; \
then SkyPilot's idle time begins.
  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
    echo "$SKYPILOT_NODE_IPS" | sed 's/$/ slots={slots}/' > ~/mlbench-hosts
    export MLBENCH_HOME=~/mlbench MLBENCH_HOSTFILE=~/mlbench-hosts
    ~/mlbench-env/bin/mlbench master --engine hosts --port {cluster.port}{idle}
  fi
"""
    return "\n".join(lines) + setup


def _resources(cluster: Cluster, options: CloudOptions) -> dict[str, Any]:
    region = options.region
    # A zone is the third part of SkyPilot's CLOUD/REGION/ZONE.
    if options.zone and not region:
        region = "*"
    parts = filter(None, (CLOUDS[cluster.provider], region, options.zone))
    resources: dict[str, Any] = {"infra": "/".join(parts)}
    if options.machine_type is not None:
        resources["instance_type"] = options.machine_type
    else:
        resources["cpus"] = f"{options.num_cpus}+"
    if options.num_gpus:
        resources["accelerators"] = {_gpu_name(options.gpu_type): options.num_gpus}
    resources["disk_size"] = options.disk_size
    resources["use_spot"] = options.spot
    if options.image is not None:
        resources["image_id"] = options.image
    if options.autostop_min:
        # Not "jobs_and_ssh", the default: the tunnel would keep the machines.
        resources["autostop"] = {"idle_minutes": DOWN_MIN, "down": True, "wait_for": "jobs"}
    return resources


def _gpu_name(name: str) -> str:
    """Return SkyPilot's name of a GPU."""
    # Version 3.0 used the names of Google Cloud, such as nvidia-tesla-t4.
    for prefix in ("nvidia-tesla-", "nvidia-"):
        if name.startswith(prefix):
            return name.removeprefix(prefix).upper()
    return name


def _package(options: CloudOptions) -> tuple[str, dict[str, str]]:
    """Return the word for pip, quoted for a shell, and the files to copy to the machines."""
    if options.package is None:
        return f"'mlbench-core{_EXTRAS}=={__version__}'", {}
    if not options.package.endswith(".whl"):
        return _quote(options.package), {}
    wheel = Path(options.package).absolute()
    if not wheel.is_file():
        raise ConfigurationError(
            f"{wheel} does not exist: give --package a requirement or a wheel that exists"
        )
    # pip wants the name of a wheel unchanged.
    return f"~/{_quote(wheel.name)}{_quote(_EXTRAS)}", {f"~/{wheel.name}": str(wheel)}


def _quote(text: str) -> str:
    # A line break would end the block of YAML.
    if not text.isprintable():
        raise ConfigurationError(
            f"--package must be one line of printable characters, not {text!r}"
        )
    return shlex.quote(text)


def task_file(cluster: Cluster) -> Path:
    """Return the path of a cluster's YAML file."""
    return user_folder("clusters", f"{cluster.name}.yaml")


def price(cluster: Cluster) -> Step:
    """Return the call that shows the machines that SkyPilot chooses, and their price."""
    command = _launch(cluster, "--dryrun", "--yes")
    return Step("show the machines and the price of all of them per hour", command)


def steps(cluster: Cluster) -> list[Step]:
    """Return the calls that make a cluster."""
    # Detached: the job lasts as long as the master.
    command = _launch(cluster, "--yes", "--detach-run")
    return [Step("rent the machines and start the master", command)]


def _launch(cluster: Cluster, *options: str) -> list[str]:
    return ["sky", "launch", *options, "--cluster", cluster.name, str(task_file(cluster))]


def write_task(cluster: Cluster, options: CloudOptions) -> None:
    """Write the YAML file of a cluster."""
    with files.replacing(task_file(cluster)) as temporary:
        temporary.write_text(task_text(cluster, options), encoding="utf-8")


def create(cluster: Cluster, options: CloudOptions, *, confirmed: bool) -> Cluster:
    """Show the price, ask the user, rent the machines and start the master.

    Args:
        cluster: The record.
        options: The options of the command.
        confirmed: True to begin without a question.

    Returns:
        The record with the secrets of the master.

    Raises:
        ConfigurationError: A program is missing.
        click.Abort: The user declined.
        ProgramFailed: A step failed; the message says what may be left and how to remove it.
    """
    check_programs(["sky", "ssh"])
    if options.package is None and ".dev" in __version__:
        raise ConfigurationError(
            f"the package index does not have the development version {__version__}: build a wheel "
            "with 'python -m build --wheel' and give --package dist/NAME.whl"
        )
    write_task(cluster, options)
    perform(price(cluster))
    if not confirmed:
        click.confirm(
            f"The cloud charges this price until {_end(options)}. Go on?", abort=True, err=True
        )
    # Stored before the first step: whatever happens, delete-cluster then knows the cluster.
    remember_cluster(cluster)
    try:
        for step in steps(cluster):
            perform(step)
        remark("waiting for the master")
        return connect(cluster, wait_s=ANSWER_S)
    # After Ctrl-C, too, the user must read what is left.
    except BaseException as error:
        hint = (
            "Machines may be left, and they cost money: 'sky status' shows them, the same command "
            f"goes on, and 'mlbench delete-cluster {cluster.provider} {cluster.name}' deletes them"
        )
        if isinstance(error, ProgramFailed):
            raise ProgramFailed(f"{error}. {hint}") from error
        remark(hint)
        raise


def _end(options: CloudOptions) -> str:
    if not options.autostop_min:
        return "you delete the cluster, because --autostop is 0"
    minutes = options.autostop_min + DOWN_MIN
    return (
        f"the cluster is deleted, which happens about {minutes} minutes "
        "after the last run or request"
    )


def connect(cluster: Cluster, wait_s: float = 0.0) -> Cluster:
    """Read the secrets of a cluster's master, and open the tunnel to it if it is not open.

    Args:
        cluster: The record.
        wait_s: How long to wait for the master.

    Returns:
        The record with the secrets.

    Raises:
        ProgramFailed: The machine cannot be reached, or no master runs there.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            # SkyPilot writes the name of each cluster to the configuration of ssh.
            text = ask(["ssh", *_SSH_OPTIONS, cluster.name, "cat mlbench/master.json"])
            break
        except ProgramFailed as error:
            if time.monotonic() >= deadline:
                raise ProgramFailed(
                    f"no master was found on the first machine of {cluster.name}: {error}"
                ) from error
            time.sleep(POLL_S)
    cluster = _with_secrets(cluster, text)
    remember_cluster(cluster)
    open_tunnel(cluster)
    return cluster


def _with_secrets(cluster: Cluster, text: str) -> Cluster:
    try:
        # Read through ssh, so that neither is in a file of SkyPilot, in an argument or in a log.
        record = json.loads(text)
        token, key = record["token"], record["key"]
        if not isinstance(key, str):
            raise TypeError("key")
        return replace(cluster, token=check_token(token), key=key)
    except (ValueError, TypeError, KeyError, MasterTokenError):
        raise ProgramFailed(
            f"the first machine of {cluster.name} has no valid record of a master"
        ) from None


def open_tunnel(cluster: Cluster) -> None:
    """Open the tunnel to a cluster's master, unless it is open.

    Raises:
        ProgramFailed: ``ssh`` failed.
    """
    if _is_open(cluster.port):
        return
    forward = f"127.0.0.1:{cluster.port}:127.0.0.1:{cluster.port}"
    # The process ends when the machine does not answer any more, so nothing must end it.
    options = [*_SSH_OPTIONS, "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15"]
    command = ["ssh", "-f", "-N", *options, "-L", forward, cluster.name]
    log = user_folder("clusters", f"{cluster.name}.ssh.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not a pipe: ssh keeps it open in the background, and reading it would not end.
    with log.open("wb") as errors:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
    if done.returncode != 0:
        reason = last_line(log.read_text(encoding="utf-8", errors="replace"))
        raise ProgramFailed(
            f"no tunnel to the cluster {cluster.name}: {reason or 'it wrote nothing'}; see its "
            "state with 'mlbench list-clusters', or return to the master of this machine with "
            "'mlbench set-cluster --none'"
        )


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def states() -> dict[str, str]:
    """Return the states of all clusters of SkyPilot, such as ``up`` or ``stopped``, by name.

    Raises:
        ProgramFailed: ``sky`` failed, or its answer is not understood.
    """
    # With --refresh, SkyPilot asks the clouds: machines may have been deleted without it.
    text = clean(ask(["sky", "status", "--refresh", "--output", "json"], timeout_s=120.0))
    try:
        # Messages may come before the list and after it.
        clusters, _ = json.JSONDecoder().raw_decode(text, text.index("["))
        return {str(each["name"]): str(each["status"]).lower() for each in clusters}
    except (ValueError, TypeError, KeyError):
        raise ProgramFailed(
            "'sky status' gave an unknown answer; SkyPilot 0.14 is known to work"
        ) from None


def delete_steps(cluster: Cluster) -> list[Step]:
    """Return the calls that delete a cluster."""
    return [Step("delete the machines", ["sky", "down", "--yes", cluster.name])]
