"""Make the objects of a run on Kubernetes: an Indexed Job, a headless Service and a Secret.

All functions are pure. The Job is made suspended. The Service and the Secret belong to it, so
Kubernetes deletes them together with the Job. When both exist, the engine resumes the Job, and
Kubernetes makes its pods.
"""

from __future__ import annotations

import copy
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import Job
from mlbench_master.engines.kubernetes.options import KubernetesOptions, Toleration
from mlbench_master.engines.kubernetes.settings import Setting
from mlbench_master.engines.worker_command import fill, split_container_command

__all__ = [
    "ATTEMPT",
    "CONTAINER",
    "MARK",
    "RANK_ANNOTATION",
    "RUN_ID",
    "check_job",
    "job_manifest",
    "job_name",
    "merge",
    "secret_manifest",
    "selector",
    "service_manifest",
]

_PREFIX = "mlbench.github.io"
MARK = f"{_PREFIX}/master"
"""The label with the mark of the master."""
RUN_ID = f"{_PREFIX}/run-id"
"""The label with the id of the run."""
ATTEMPT = f"{_PREFIX}/attempt"
"""The annotation by which the engine recognizes a Job if the answer to its creation was lost."""
RANK_ANNOTATION = "batch.kubernetes.io/job-completion-index"
"""The annotation of Kubernetes with the index of a pod, which is the rank of its worker."""
CONTAINER = "worker"
"""The name of the container, also in a pod template."""

_RUN_FOLDER = "/mlbench"
_PORT = 29500
_USER = 1000
_SHM_SIZE = "1Gi"
# A worker that is stopped has this time to end before it is killed.
_GRACE_S = 10
# A master that was away for a day still learns how its runs ended.
_KEPT_S = 86_400


def job_name(mark: str, run_id: int) -> str:
    """Return the name of a run's Job, Service and Secret."""
    return f"mlbench-{mark}-{run_id}"


def selector(mark: str, run_id: int | None = None) -> str:
    """Return the selector of the Jobs and pods of a master, or of one run."""
    text = f"app=mlbench,component=worker,{MARK}={mark}"
    if run_id is None:
        return text
    return f"{text},{RUN_ID}={run_id}"


def check_job(job: Job, options: KubernetesOptions, setting: Setting) -> None:
    """Refuse a run that cannot work in pods.

    Raises:
        ConfigurationError: The number of workers, the image or a volume is not possible; the
            message has a remedy.
    """
    if not job.all_nodes and job.num_workers > 1:
        raise ConfigurationError(
            "num_workers must be 1 without run_all_nodes on Kubernetes, not "
            f"{job.num_workers}: a worker cannot start a program in another pod; let every worker "
            "run the command"
        )
    if not job.image:
        raise ConfigurationError(
            "image must be the name of a container image, not '': give a task or an image"
        )
    for volume in options.volumes:
        # It also has the folders of other runs, and perhaps the master's database.
        if volume.claim == setting.shared_claim:
            raise ConfigurationError(
                f"--volume must be another claim than {volume.claim!r}, which belongs to the "
                "master: make one for data"
            )


def job_manifest(
    job: Job, options: KubernetesOptions, setting: Setting, *, attempt: str, folder: str = ""
) -> dict[str, Any]:
    """Return the Job of a run, suspended.

    Args:
        job: The run.
        options: Its options.
        setting: The settings of the master.
        attempt: Text that no other Job has.
        folder: The run's folder, relative to the root of the shared claim, if there is one.
    """
    name = job_name(setting.mark, job.run_id)
    labels = _labels(job, setting)
    pod = merge(_default_pod(), setting.template)
    pod = merge(pod, _pod_of_run(job, options, setting, folder))
    # Last, so that neither the template nor the run gives a pod more rights.
    pod = merge(pod, _RESTRICTED)
    for container in pod["spec"]["containers"]:
        if container["name"] == CONTAINER:
            # A merged list would keep the capabilities that the template adds.
            container["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    pod["metadata"]["labels"].update(labels)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.num_workers,
        "parallelism": job.num_workers,
        # A worker that starts again would meet workers that are in the middle of the training.
        "backoffLimit": 0,
        # The Secret and the Service need the uid of the Job, and its pods need both of them. So the
        # Job comes first, and its pods start later.
        "suspend": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": pod["metadata"], "spec": pod["spec"]},
    }
    if options.time_s is not None:
        spec["activeDeadlineSeconds"] = options.time_s
    metadata = {
        "name": name,
        "namespace": setting.namespace,
        "labels": labels,
        "annotations": {ATTEMPT: attempt},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def service_manifest(job: Job, setting: Setting, job_uid: str) -> dict[str, Any]:
    """Return the headless Service, which gives each pod of a run a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, setting, job_uid),
        "spec": {
            "clusterIP": "None",
            # Workers look for each other before they could be called ready.
            "publishNotReadyAddresses": True,
            "selector": {
                "app": "mlbench",
                "component": "worker",
                MARK: setting.mark,
                RUN_ID: str(job.run_id),
            },
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }


def secret_manifest(job: Job, setting: Setting, job_uid: str) -> dict[str, Any]:
    """Return the Secret with the variables of the run, of which one is the token of the master."""
    env = dict(job.env)
    if setting.master_url:
        env["MLBENCH_MASTER_URL"] = setting.master_url
    # It proves a master at a loopback address, which in a pod is another one.
    env.pop("MLBENCH_MASTER_KEY", None)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _owned(job, setting, job_uid),
        "type": "Opaque",
        "immutable": True,
        "stringData": env,
    }


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an object in which the values of another one come first.

    Lists are joined. Entries with the same name (of volume mounts: the same folder) are merged.

    Example:
        >>> merge({"a": 1, "b": [{"name": "x", "c": 1}]}, {"a": 2, "b": [{"name": "x", "d": 2}]})
        {'a': 2, 'b': [{'name': 'x', 'c': 1, 'd': 2}]}
    """
    merged = copy.deepcopy(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            merged[key] = _merge_lists(before, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _merge_lists(base: list[Any], over: list[Any]) -> list[Any]:
    merged = list(base)
    for entry in over:
        key = _key(entry)
        keys = list(map(_key, merged))
        if not key or key not in keys:
            merged.append(copy.deepcopy(entry))
            continue
        index = keys.index(key)
        if {"value", "valueFrom"} & entry.keys():
            merged[index] = copy.deepcopy(entry)  # a variable has only one of them
        else:
            merged[index] = merge(merged[index], entry)
    return merged


def _key(entry: Any) -> Any:
    """Return the text by which an entry of a list is recognized; None if it has none."""
    if not isinstance(entry, dict):
        return None
    # All volume mounts of one volume have the same name.
    return entry.get("mountPath") or entry.get("name")


def _labels(job: Job, setting: Setting) -> dict[str, str]:
    return {
        "app": "mlbench",
        "component": "worker",
        "app.kubernetes.io/component": "worker",
        MARK: setting.mark,
        RUN_ID: str(job.run_id),
        f"{_PREFIX}/run-name": job.name,
    }


def _owned(job: Job, setting: Setting, job_uid: str) -> dict[str, Any]:
    name = job_name(setting.mark, job.run_id)
    # With blockOwnerDeletion, some clusters demand the right to change the finalizers of Jobs.
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": name,
        "uid": job_uid,
        "blockOwnerDeletion": False,
    }
    return {
        "name": name,
        "namespace": setting.namespace,
        "labels": _labels(job, setting),
        "ownerReferences": [owner],
    }


def _default_pod() -> dict[str, Any]:
    """Return the part of a pod that an administrator may change."""
    return {
        "metadata": {"labels": {}},
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_S,
            # The first process of a PID namespace ignores SIGTERM unless it handles it, so each
            # stop would last for the whole grace period. With a shared namespace, the worker is not
            # the first one.
            "shareProcessNamespace": True,
            "containers": [
                {"name": CONTAINER, "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
            ],
            # PyTorch's data loaders need more than the 64 MiB of a container.
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHM_SIZE}}],
        },
    }


# The Pod Security Standard `restricted`, and no right at the API.
_RESTRICTED: dict[str, Any] = {
    "spec": {
        "automountServiceAccountToken": False,
        # Kubernetes would add variables for each Service, and MLBENCH_MASTER_PORT for one named
        # mlbench-master.
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # A large data set would be changed file by file at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "securityContext": {"allowPrivilegeEscalation": False, "privileged": False},
            }
        ],
    }
}


def _pod_of_run(
    job: Job, options: KubernetesOptions, setting: Setting, folder: str
) -> dict[str, Any]:
    volumes, mounts = _volumes(options, setting, folder)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": _command(job, setting),
        "envFrom": [{"secretRef": {"name": job_name(setting.mark, job.run_id)}}],
        "env": _environment(job, setting),
        "resources": _resources(job, options),
        "volumeMounts": mounts,
    }
    if options.image_pull_policy:
        container["imagePullPolicy"] = options.image_pull_policy
    spec: dict[str, Any] = {
        "subdomain": job_name(setting.mark, job.run_id),
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": dict(options.node_selector),
        "tolerations": list(map(_toleration, options.tolerations)),
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    return {"spec": {key: value for key, value in spec.items() if value}}


def _command(job: Job, setting: Setting) -> list[str]:
    """Return the command; Kubernetes itself fills in the rank."""
    hosts = ",".join(_host(job, setting, rank) for rank in range(job.num_workers))
    command = []
    for word in split_container_command(job):
        # Two dollar signs are one for Kubernetes, so it fills in nothing else.
        escaped = word.replace("$", "$$")
        command.append(fill(escaped, {"{rank}": "$(RANK)", "{hosts}": hosts}))
    return command


def _host(job: Job, setting: Setting, rank: int) -> str:
    """Return the name of a worker's pod within its namespace."""
    name = job_name(setting.mark, job.run_id)
    return f"{name}-{rank}.{name}"


def _environment(job: Job, setting: Setting) -> list[dict[str, Any]]:
    values = {
        "WORLD_SIZE": str(job.num_workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": _host(job, setting, 0),
        "MASTER_PORT": str(_PORT),
        # More threads than cores slow a worker down.
        "OMP_NUM_THREADS": str(max(1, int(job.num_cpus))),
        "PYTHONUNBUFFERED": "1",
        "MLBENCH_SPOOL": f"{_RUN_FOLDER}/spool",
        "MLBENCH_OUTPUT": f"{_RUN_FOLDER}/output",
    }
    rank = {"fieldPath": f"metadata.annotations['{RANK_ANNOTATION}']"}
    variables: list[dict[str, Any]] = [{"name": "RANK", "valueFrom": {"fieldRef": rank}}]
    for name, value in values.items():
        variables.append({"name": name, "value": value})
    return variables


def _resources(job: Job, options: KubernetesOptions) -> dict[str, Any]:
    """Return the resources of a worker, of which it gets neither more nor less.

    A worker without a limit would use free cores of its node, so times would depend on its
    neighbors.
    """
    resources = {"cpu": f"{max(1, round(1000 * job.num_cpus))}m"}
    if options.memory:
        resources["memory"] = options.memory
    if job.gpu_enabled:
        resources["nvidia.com/gpu"] = "1"
    return {"requests": resources, "limits": dict(resources)}


def _volumes(
    options: KubernetesOptions, setting: Setting, folder: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if setting.shared_claim:
        volumes: list[dict[str, Any]] = [
            {"name": "mlbench-run", "persistentVolumeClaim": {"claimName": setting.shared_claim}}
        ]
        # Workers see only these two folders of the claim.
        mounts: list[dict[str, Any]] = [
            {
                "name": "mlbench-run",
                "mountPath": f"{_RUN_FOLDER}/{part}",
                "subPath": f"{folder}/{part}",
            }
            for part in ("output", "spool")
        ]
    else:
        volumes = [{"name": "mlbench-run", "emptyDir": {}}]
        mounts = [{"name": "mlbench-run", "mountPath": _RUN_FOLDER}]
    if options.shm_size:
        # Merged with the default volume of this name, whose medium it keeps.
        volumes.append({"name": "shm", "emptyDir": {"sizeLimit": options.shm_size}})
    claims: dict[str, str] = {}
    for volume in options.volumes:
        # Two volumes of one claim would be attached twice.
        if volume.claim not in claims:
            claims[volume.claim] = f"data-{len(claims)}"
            volumes.append(
                {"name": claims[volume.claim], "persistentVolumeClaim": {"claimName": volume.claim}}
            )
        mounts.append(
            {"name": claims[volume.claim], "mountPath": volume.folder, "readOnly": volume.read_only}
        )
    return volumes, mounts


def _toleration(toleration: Toleration) -> dict[str, str]:
    manifest = {"key": toleration.key, "operator": "Exists"}
    if toleration.value is not None:
        manifest.update(operator="Equal", value=toleration.value)
    if toleration.effect:
        manifest["effect"] = toleration.effect
    return manifest
