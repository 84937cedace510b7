"""Commands on clusters: create-cluster, delete-cluster, list-clusters, set-cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlbench_cli._clusters import cloud as cloud_clusters
from mlbench_cli._clusters import kind as kind_clusters
from mlbench_cli._clusters.programs import ProgramFailed, Step, check_programs, perform, show
from mlbench_cli._output import confirm_deletion, json_option, print_json, print_table, remark
from mlbench_core.client.clusters import (
    PROVIDERS,
    Cluster,
    choose_cluster,
    current_cluster,
    find_cluster,
    forget_cluster,
    read_clusters,
)
from mlbench_core.errors import ConfigurationError
from mlbench_core.tasks import is_run_name

__all__ = ["create_cluster", "delete_cluster", "list_clusters", "set_cluster"]

Command = TypeVar("Command", bound=Callable[..., Any])

FIRST_PORT = 15080
_PORTS_TRIED = 200
# The most characters of a label in DNS.
_LONGEST_NAME = 63
# A node of kind has a host name: that of the cluster, and "-control-plane".
_LONGEST_KIND_NAME = _LONGEST_NAME - 14

_NO_KUBERNETES = "the machines of a cloud run MLBench without Kubernetes"
_NO_REGISTRY = "the images of this machine are loaded without a registry; see --load-image"
# Options of version 3.0 without a meaning today: name in the function, option and reason.
_WITHOUT_MEANING = {
    "kubernetes_version": ("--kubernetes-version", _NO_KUBERNETES),
    "custom_value": ("--custom-value", _NO_KUBERNETES),
    "chart_location": ("--chart-location", _NO_KUBERNETES),
    "ssh_key": ("--ssh-key", "SkyPilot makes its own key"),
    "registry_name": ("--registry_name", _NO_REGISTRY),
    "registry_port": ("--registry_port", _NO_REGISTRY),
    "host_port": ("--host_port", _NO_REGISTRY),
}


def _common(command: Command) -> Command:
    """Give a command the arguments and options of all providers."""
    for decorate in (
        json_option,
        click.option(
            "--dry-run", is_flag=True, help="Print files and commands, and create nothing."
        ),
        click.argument("name"),
        click.argument("num_workers", type=click.IntRange(min=1, max=1000)),
    ):
        command = decorate(command)
    return command


def _cloud_options(command: Command) -> Command:
    """Give a command the options of all clouds."""
    options = cloud_clusters.CloudOptions
    for decorate in (
        click.option("--yes", "-y", is_flag=True, help="Do not ask whether the price is accepted."),
        click.option(
            "--package",
            metavar="REQUIREMENT",
            help=(
                "What pip installs on the machines: "
                "a wheel of MLBench, or a requirement (default: this version)."
            ),
        ),
        click.option(
            "--autostop",
            type=click.IntRange(min=0),
            metavar="MINUTES",
            default=options.autostop_min,
            show_default=True,
            help=(
                "Delete the cluster after this time without a run and without a request; "
                "0 for never."
            ),
        ),
        click.option(
            "--preemptible",
            "-e",
            "--spot",
            "spot",
            is_flag=True,
            help="Cheaper machines that the cloud may take back.",
        ),
        click.option("--zone", "-z", help="Zone of the cloud (default: the cheapest)."),
        click.option("--region", help="Region of the cloud (default: the cheapest)."),
        click.option(
            "--disk-size",
            "-d",
            type=click.IntRange(min=1),
            default=options.disk_size,
            show_default=True,
            help="Disk of each machine in GB.",
        ),
        click.option(
            "--gpu-type",
            default=options.gpu_type,
            show_default=True,
            help="Type of the GPUs, see 'sky gpus list'.",
        ),
        click.option(
            "--num-gpus",
            "-g",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Number of GPUs of each machine.",
        ),
        click.option(
            "--num-cpus",
            "-c",
            type=click.IntRange(min=1),
            default=options.num_cpus,
            show_default=True,
            help="Smallest number of cores of a machine, without --machine-type.",
        ),
        click.option(
            "--machine-type", "-t", help="The cloud's name of the machines (default: the cheapest)."
        ),
        click.option("--kubernetes-version", "-k", hidden=True),
        click.option("--custom-value", "-v", multiple=True, hidden=True),
        click.option("--chart-location", "-cl", hidden=True),
        _common,
    ):
        command = decorate(command)
    return command


@click.group("create-cluster")
def create_cluster() -> None:
    """Create a cluster with a master, which the other commands then use.

    The cluster is called NAME-NUM_WORKERS. A cluster at a cloud costs money until it is deleted.
    """


@create_cluster.command(context_settings={"help_option_names": ["--help"]})
@_common
@click.option(
    "--num-cpus",
    "-c",
    type=click.IntRange(min=1),
    help="Largest number of cores of a worker (default: no limit).",
)
@click.option("--num-gpus", "-g", type=int, default=0, hidden=True)
@click.option(
    "--kubernetes-version",
    "-k",
    metavar="VERSION",
    help="For example 1.33.1 (default: that of kind).",
)
@click.option(
    "--custom-value", "-v", multiple=True, metavar="NAME=VALUE", help="A value of the Helm chart."
)
@click.option(
    "--chart-location",
    "-cl",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the Helm chart (default: MLBench's own).",
)
@click.option(
    "--load-image",
    "images",
    multiple=True,
    metavar="IMAGE",
    help="An image of this machine to load into the cluster; can be given several times.",
)
@click.option("--registry_name", "-r", hidden=True)
@click.option("--registry_port", "-p", hidden=True)
@click.option("--host_port", "-h", hidden=True)
def kind(num_workers: int, name: str, dry_run: bool, as_json: bool, **chosen: Any) -> None:
    """Create a Kubernetes cluster in containers of this machine, with the program kind."""
    # Scripts for version 3.0 may give these.
    _say_what_has_no_meaning(chosen, ("registry_name", "registry_port", "host_port"))
    if chosen["num_gpus"]:
        raise click.UsageError(
            "--num-gpus must be 0: a cluster of kind has no GPUs; "
            "'mlbench run --gpu' uses them here"
        )
    cluster = _new_cluster("kind", num_workers, name)
    options = kind_clusters.KindOptions(
        num_cpus=chosen["num_cpus"],
        kubernetes_version=chosen["kubernetes_version"],
        chart=chosen["chart_location"],
        values=chosen["custom_value"],
        images=chosen["images"],
    )
    if dry_run:
        _show_plan(cluster, kind_clusters.steps(cluster, options), as_json)
        return
    kind_clusters.check()
    _use(kind_clusters.create(cluster, options), as_json)


@create_cluster.command()
@_cloud_options
@click.option("--project", "-p", hidden=True)
def gcloud(**chosen: Any) -> None:
    """Rent machines of Google Cloud, with SkyPilot."""
    if chosen.pop("project") is not None:
        raise click.UsageError(
            "--project must not be given: SkyPilot uses the project of 'gcloud config set project "
            "NAME', or gcp.project_id in ~/.sky/config.yaml"
        )
    _create_cloud("gcloud", chosen)


@create_cluster.command()
@_cloud_options
@click.option("--ami-id", "-a", "image", help="Image of the machines (default: that of SkyPilot).")
@click.option("--ssh-key", hidden=True)
def aws(**chosen: Any) -> None:
    """Rent machines of Amazon Web Services, with SkyPilot."""
    _create_cloud("aws", chosen)


@create_cluster.command()
@_cloud_options
def azure(**chosen: Any) -> None:
    """Rent machines of Microsoft Azure, with SkyPilot."""
    _create_cloud("azure", chosen)


def _create_cloud(provider: str, chosen: Mapping[str, Any]) -> None:
    _say_what_has_no_meaning(
        chosen, ("kubernetes_version", "custom_value", "chart_location", "ssh_key")
    )
    cluster = _new_cluster(provider, chosen["num_workers"], chosen["name"])
    options = cloud_clusters.CloudOptions(
        num_cpus=chosen["num_cpus"],
        num_gpus=chosen["num_gpus"],
        gpu_type=chosen["gpu_type"],
        machine_type=chosen["machine_type"],
        region=chosen["region"],
        zone=chosen["zone"],
        disk_size=chosen["disk_size"],
        spot=chosen["spot"],
        # Only Amazon's command has the option.
        image=chosen.get("image"),
        autostop_min=chosen["autostop"],
        package=chosen["package"],
    )
    if chosen["dry_run"]:
        text = cloud_clusters.task_text(cluster, options)
        price, todo = cloud_clusters.price(cluster), cloud_clusters.steps(cluster)
        _show_plan(cluster, [price, *todo], chosen["as_json"], text)
        # The price is shown only by SkyPilot itself, which needs the file.
        check_programs(["sky"])
        cloud_clusters.write_task(cluster, options)
        perform(price)
        return
    _use(cloud_clusters.create(cluster, options, confirmed=chosen["yes"]), chosen["as_json"])


def _new_cluster(provider: str, num_workers: int, name: str) -> Cluster:
    """Return the record of an earlier call, or a new one with a port that nothing uses."""
    full_name = f"{name}-{num_workers}"
    longest = _LONGEST_NAME
    if provider == "kind":
        longest = _LONGEST_KIND_NAME
    if not is_run_name(full_name) or not name[0].isalpha() or len(full_name) > longest:
        raise click.BadParameter(
            f"{name!r} must have lowercase letters, digits and hyphens, begin with a letter, and "
            f"have at most {longest - len(full_name) + len(name)} characters",
            param_hint="NAME",
        )
    clusters = read_clusters()
    earlier = clusters.get(full_name)
    if earlier is not None:
        if earlier.provider != provider:
            raise ConfigurationError(
                f"cluster {full_name} already exists at {earlier.provider}: choose another name"
            )
        return earlier
    # The port of a recorded cluster stays its own while nothing listens on it.
    taken = {cluster.port for cluster in clusters.values()}
    for port in range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED):
        if port not in taken and _is_free(port):
            return Cluster(full_name, provider, num_workers, port)
    raise ConfigurationError(
        f"no port from {FIRST_PORT} to {FIRST_PORT + _PORTS_TRIED - 1} is free: delete a cluster"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Without this option, old connections in TIME_WAIT make a free port look used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _say_what_has_no_meaning(chosen: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if chosen.get(name):
            option, reason = _WITHOUT_MEANING[name]
            remark(f"{option} has no effect: {reason}")


def _show_plan(
    cluster: Cluster, steps: Sequence[Step], as_json: bool, task: str | None = None
) -> None:
    if as_json:
        plan: dict[str, Any] = {"cluster": cluster.public()}
        plan["steps"] = [step.public() for step in steps]
        if task is not None:
            plan["task"] = task
        print_json(plan)
        return
    if task is not None:
        click.echo(f"# {cloud_clusters.task_file(cluster)}\n{task}")
    show(steps)


def _use(cluster: Cluster, as_json: bool) -> None:
    """Make a new cluster the one that the commands use, and say so."""
    choose_cluster(cluster.name)
    if as_json:
        print_json(cluster.public())
        return
    click.echo(
        f"created {cluster.name}; 'mlbench run' uses it now, and its dashboard is at {cluster.url}"
    )
    remark("open the dashboard with 'mlbench get-dashboard-url --login'")
    remark(f"delete the cluster with 'mlbench delete-cluster {cluster.provider} {cluster.name}'")


def _complete(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of clusters, and at the first place also the providers."""
    words = ctx.params.get("words") or ()
    choices = []
    for cluster in read_clusters().values():
        if not words or cluster.provider == words[0]:
            choices.append(cluster.name)
    if not words:
        choices += PROVIDERS
    return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


def _find(words: Sequence[str]) -> Cluster:
    """Return the cluster that the words ``[PROVIDER] NAME`` name."""
    if len(words) == 2 and words[0] in PROVIDERS:
        return find_cluster(words[1], words[0])
    if len(words) != 1:
        raise click.UsageError(f"give NAME, or one of {', '.join(PROVIDERS)} and NAME")
    return find_cluster(words[0])


_WORDS = click.argument(
    "words", nargs=-1, metavar=f"[{'|'.join(PROVIDERS)}] NAME", shell_complete=_complete
)


@click.command("delete-cluster")
@_WORDS
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Print the commands, and delete nothing.")
@click.option("--project", "-p", hidden=True)
@click.option("--zone", "-z", hidden=True)
@json_option
def delete_cluster(
    words: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    project: str | None,
    zone: str | None,
    as_json: bool,
) -> None:
    """Delete a cluster with all runs that are only there."""
    cluster = _find(words)
    for option, value in (("--project", project), ("--zone", zone)):
        if value is not None:
            remark(f"{option} has no effect: SkyPilot knows where it created {cluster.name}")
    if cluster.provider == "kind":
        steps = kind_clusters.delete_steps(cluster)
    else:
        steps = cloud_clusters.delete_steps(cluster)
    if dry_run:
        _show_plan(cluster, steps, as_json)
        return
    check_programs([steps[0].command[0]])
    if not yes and not confirm_deletion(f"Delete {cluster.name} with its runs and their metrics?"):
        remark("nothing deleted")
        if as_json:
            print_json(None)
        return
    for step in steps:
        perform(step)
    # Only now: a cluster that could not be deleted must stay known.
    forget_cluster(cluster.name)
    if as_json:
        print_json(cluster.public())
    else:
        click.echo(f"deleted {cluster.name}")


@click.command("list-clusters")
@json_option
def list_clusters(as_json: bool) -> None:
    """List the clusters that mlbench created, with their states."""
    current = current_cluster()
    clusters = list(read_clusters().values())
    states = _states(clusters)
    rows = []
    cells = []
    for cluster in clusters:
        state, is_current = states[cluster.name], cluster == current
        row = {**cluster.public(), "state": state, "current": is_current}
        rows.append(row)
        mark = ""
        if is_current:
            mark = " *"
        cells.append((f"{cluster.name}{mark}", cluster.provider, state, cluster.url))
    if as_json:
        print_json(rows)
        return
    print_table(("CLUSTER", "PROVIDER", "STATE", "MASTER"), cells)
    if current:
        remark("* is the cluster in use")
    else:
        remark("in use: the master of this machine")


def _states(clusters: Sequence[Cluster]) -> dict[str, str]:
    """Return the states of clusters by name, after one call of each program that knows some."""
    of_kind = []
    of_clouds = []
    for cluster in clusters:
        if cluster.provider == "kind":
            of_kind.append(cluster.name)
        else:
            of_clouds.append(cluster.name)
    return {
        **_ask_states(of_kind, lambda: dict.fromkeys(kind_clusters.names(), "exists")),
        **_ask_states(of_clouds, cloud_clusters.states),
    }


def _ask_states(names: Sequence[str], ask: Callable[[], dict[str, str]]) -> dict[str, str]:
    if not names:
        return {}
    try:
        states = ask()
    except ProgramFailed as error:
        # The clusters of the other program can still be shown.
        remark(f"mlbench: {error}")
        return dict.fromkeys(names, "unknown")
    return {name: states.get(name, "gone") for name in names}


@click.command("set-cluster")
@_WORDS
@click.option("--none", "none", is_flag=True, help="Use the master of this machine.")
@json_option
def set_cluster(words: tuple[str, ...], none: bool, as_json: bool) -> None:
    """Choose the cluster that run, status and the other commands use."""
    if none == bool(words):
        raise click.UsageError(
            "give the NAME of a cluster, or --none for the master of this machine"
        )
    name: str | None = None
    public: dict[str, Any] | None = None
    text = "in use: the master of this machine"
    if not none:
        cluster = _find(words)
        # Asked again here, because the master of a cluster may have started again with new secrets.
        if cluster.provider != "kind":
            cluster = cloud_clusters.connect(cluster)
        name, public = cluster.name, cluster.public()
        text = f"in use: {cluster.name} ({cluster.url})"
    choose_cluster(name)
    if os.environ.get("MLBENCH_MASTER_URL"):
        remark("MLBENCH_MASTER_URL is set, and the commands use that master as long as it is")
    if as_json:
        print_json(public)
    else:
        click.echo(text)
