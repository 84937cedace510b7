"""Clusters of Kubernetes in containers of this machine, by the program ``kind``.

MLBench's Helm chart is installed in them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlbench_cli._client import MasterClient
from mlbench_cli._clusters.programs import ProgramFailed, Step, ask, check_programs, perform
from mlbench_cli._output import remark
from mlbench_core.client.clusters import Cluster, forget_cluster, read_clusters, remember_cluster
from mlbench_core.errors import ConfigurationError, MasterError

__all__ = ["KindOptions", "chart_folder", "check", "create", "delete_steps", "names", "steps"]

NAMESPACE = "mlbench"
# Kubernetes gives ports from 30000 to 32767 to services of this type.
NODE_PORT = 30080
RELEASE = "mlbench"
ANSWER_S = 60.0
_DEPLOYMENT = "deployment/mlbench-master"
_ENGINES = ("docker", "podman", "nerdctl")
_SECRET = "mlbench-master-token"
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class KindOptions:
    """The options of one call of the command.

    Attributes:
        num_cpus: The largest number of cores of a worker, or None for no limit.
        kubernetes_version: Version of Kubernetes such as ``1.33.1``, or None for the one that
            ``kind`` comes with.
        chart: Folder of the Helm chart, or None for MLBench's own.
        values: Values of the chart, as ``name=value``.
        images: Images to load into the cluster, besides those of MLBench.
    """

    num_cpus: int | None = None
    kubernetes_version: str | None = None
    chart: Path | None = None
    values: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


def chart_folder() -> Path:
    """Return the absolute path of the folder with the Helm chart.

    Raises:
        ConfigurationError: The chart is not installed.
    """
    spec = importlib.util.find_spec("mlbench_helm")
    roots: list[Path] = []
    if spec is not None:
        roots += map(Path, spec.submodule_search_locations or ())
    # In a checkout, the chart is in the folder helm next to the library, even if it is not
    # installed.
    roots.append(Path(__file__).resolve().parents[2] / "helm")
    for root in roots:
        folder = root / "mlbench"
        if (folder / "Chart.yaml").is_file():
            return folder.resolve()
    raise ConfigurationError(
        f"the Helm chart is missing: no mlbench/Chart.yaml below {', '.join(map(str, roots))}; "
        "reinstall mlbench-core or run from a checkout"
    )


def check() -> None:
    """Raise an error unless all programs are installed and a container engine answers.

    Raises:
        ConfigurationError: A program is missing, or no engine runs.
    """
    engine = _engine() or "docker"
    check_programs(["kind", "kubectl", "helm", engine])
    try:
        ask([engine, "info"])
    except ProgramFailed as error:
        raise ConfigurationError(
            f"kind needs a container engine that runs, but {error}: "
            "start it, for example with 'sudo systemctl start docker'"
        ) from error


def steps(cluster: Cluster, options: KindOptions, *, exists: bool = False) -> list[Step]:
    """Return the calls that make a cluster.

    Args:
        cluster: Its record; without a token, a placeholder is used.
        options: The options of the command.
        exists: True if the cluster was created by an earlier call that ended before its end.
    """
    context = ("--context", f"kind-{cluster.name}", "--namespace", NAMESPACE)
    calls: list[Step] = []
    if not exists:
        calls.append(_create_step(cluster, options))
    images = [*_local_images(), *options.images]
    if images:
        load = ["kind", "load", "docker-image", *dict.fromkeys(images), "--name", cluster.name]
        calls.append(Step("load the images of this machine", load))
    # Without a namespace in the arguments, because this call makes the namespace.
    token = ["kubectl", *context[:2], "apply", "--filename", "-"]
    hidden = _token_manifest("<a random token>")
    manifest = _token_manifest(cluster.token) if cluster.token else hidden
    calls.append(Step("store the token of the master", token, manifest, shown=hidden))
    calls.append(_helm_step(cluster, options))
    wait = ["kubectl", *context, "rollout", "status", _DEPLOYMENT, "--timeout", "300s"]
    return [*calls, Step("wait for the master", wait)]


def create(cluster: Cluster, options: KindOptions) -> Cluster:
    """Create a cluster, or go on with one that an earlier call began, and return its record.

    Args:
        cluster: A new record, or that of the earlier call.
        options: The options of the command.

    Raises:
        ConfigurationError: Another cluster has the name.
        ProgramFailed: A step failed; the message says what is left and how to remove it.
    """
    exists = cluster.name in names()
    if exists and cluster.name not in read_clusters():
        raise ConfigurationError(
            f"cluster {cluster.name} already exists and was not created by mlbench: 'kind get "
            f"clusters' shows it, so remove it with 'kind delete cluster --name {cluster.name}', "
            "or choose another name"
        )
    if exists:
        remark(f"the cluster {cluster.name} exists, so only what is missing is done")
    else:
        cluster = replace(cluster, token=secrets.token_hex(32))
    todo = steps(cluster, options, exists=exists)
    words = itertools.chain.from_iterable(step.command for step in todo)
    if not any(word.startswith("mlbench/master:") for word in words):
        remark(
            "no image mlbench/master was found in Docker, so the cluster pulls it from its "
            "registry; to build it here, see docs/howto/docker.md"
        )
    # Stored before the first step: whatever happens, delete-cluster then knows the cluster.
    remember_cluster(cluster)
    try:
        for step in todo:
            perform(step)
        _await_answer(cluster)
    # After Ctrl-C, too, the user must read what is left.
    except BaseException as error:
        hint = _hint(cluster)
        if isinstance(error, (ProgramFailed, MasterError)):
            raise ProgramFailed(f"{error}. {hint}") from error
        remark(hint)
        raise
    return cluster


def names() -> list[str]:
    """Return the names of all clusters of ``kind``, also of those that mlbench did not create."""
    # "No kind clusters found." goes to standard error.
    return ask(["kind", "get", "clusters"]).split()


def delete_steps(cluster: Cluster) -> list[Step]:
    """Return the calls that delete a cluster."""
    return [Step("delete the cluster", ["kind", "delete", "cluster", "--name", cluster.name])]


def _hint(cluster: Cluster) -> str:
    """Describe what a failed call has left, and forget the cluster if nothing is left."""
    try:
        left = cluster.name in names()
    except ProgramFailed:
        left = True
    if not left:
        forget_cluster(cluster.name)
        return "Nothing is left of the cluster"
    return (
        f"The cluster {cluster.name} is left: look at it with "
        f"'kubectl --context kind-{cluster.name} --namespace {NAMESPACE} get pods', repeat the "
        f"command to go on, or remove it with 'mlbench delete-cluster kind {cluster.name}'"
    )


def _engine() -> str | None:
    """Return the container engine that ``kind`` will use, or None if there is none."""
    chosen = os.environ.get("KIND_EXPERIMENTAL_PROVIDER")
    return chosen or next(filter(shutil.which, _ENGINES), None)


def _create_step(cluster: Cluster, options: KindOptions) -> Step:
    command = ["kind", "create", "cluster", "--name", cluster.name]
    command += ["--config", "-", "--wait", "300s"]
    if options.kubernetes_version is not None:
        version = _VERSION.fullmatch(options.kubernetes_version)
        if version is None:
            raise ConfigurationError(
                "--kubernetes-version must be a full version such as 1.33.1, not "
                f"{options.kubernetes_version}: kind publishes images of full versions only"
            )
        command += ["--image", f"kindest/node:v{version[1]}"]
    return Step("create the cluster", command, _configuration(cluster))


def _configuration(cluster: Cluster) -> str:
    """Return the configuration for ``kind``: a control plane, workers, the port of the master."""
    # On 127.0.0.1 only, because the token travels over http.
    return (
        f"""kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraPortMappings:
  - containerPort: {NODE_PORT}
    hostPort: {cluster.port}
    listenAddress: "127.0.0.1"
    protocol: TCP
"""
        + "- role: worker\n" * cluster.num_workers
    )


def _token_manifest(token: str) -> str:
    labels = {"app": "mlbench"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    metadata = {"name": _SECRET, "namespace": NAMESPACE, "labels": labels}
    data = {"token": token}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [namespace, secret]}, indent=2)


def _helm_step(cluster: Cluster, options: KindOptions) -> Step:
    chart = options.chart or chart_folder()
    values = {
        "limits": {"workers": cluster.num_workers, "cpu": options.num_cpus, "gpu": 0},
        "master": {
            "service": {"type": "NodePort", "nodePort": NODE_PORT},
            "token": {"existingSecret": _SECRET},
        },
    }
    context = ["--kube-context", f"kind-{cluster.name}", "--namespace", NAMESPACE]
    command = ["helm", "upgrade", "--install", RELEASE, str(chart), *context, "--values", "-"]
    for value in options.values:
        command += ["--set", value]
    return Step("install MLBench in the cluster", command, json.dumps(values, indent=2))


def _local_images() -> Sequence[str]:
    """Return the images of MLBench on this machine; none if no engine answers."""
    # "kind load docker-image" reads from Docker only.
    if _engine() != "docker":
        return []
    try:
        images = ask(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]).split()
    except ProgramFailed:
        return []
    own = []
    for image in images:
        # An image that lost its tag to a newer one has the tag "<none>", and cannot be loaded.
        if image.startswith("mlbench/") and not image.endswith(":<none>"):
            own.append(image)
    return own


def _await_answer(cluster: Cluster) -> None:
    deadline = time.monotonic() + ANSWER_S
    with MasterClient(cluster.url, cluster.token, timeout_s=5.0) as client:
        while True:
            try:
                # Unlike the question for its health, this one needs the right token.
                client.runs()
                return
            except MasterError as error:
                if time.monotonic() > deadline:
                    reason = f"the master does not answer at {cluster.url}: {error}"
                    raise ProgramFailed(reason) from error
                time.sleep(1.0)
