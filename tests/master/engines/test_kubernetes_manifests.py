"""The objects of a run on Kubernetes and the options of its Job, without a cluster."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_master.engines import Job
from mlbench_master.engines.kubernetes.manifests import (
    job_manifest,
    merge,
    secret_manifest,
    service_manifest,
)
from mlbench_master.engines.kubernetes.options import parse_options
from mlbench_master.engines.kubernetes.settings import Setting

JOB = Job(
    run_id=7,
    name="demo",
    command=(
        "/workspace/main.py --run_id {run_id} --rank {rank} --hosts {hosts} --text "
        "'$(RANK) $$ {backend}'"
    ),
    num_workers=3,
    num_cpus=1.5,
    gpu_enabled=True,
    image="mlbench/task1a:1",
    env={
        "MLBENCH_MASTER_URL": "http://127.0.0.1:1",
        "MLBENCH_TOKEN": "secret",
        "MLBENCH_MASTER_KEY": "key",
    },
)
SETTING = Setting(namespace="lab", mark="m")
OPTIONS = (
    *(
        "--memory",
        "4Gi",
        "--shm-size=2Gi",
        "--time",
        "90m",
        "--node-selector",
        "gpu=a100",
        "--node-selector",
        "disk=ssd",
    ),
    *(
        "--toleration",
        "nvidia.com/gpu:NoSchedule",
        "--toleration",
        "team=ml",
        "--volume",
        "images:/data/images:ro",
    ),
    *(
        "--volume",
        "images:/data/more",
        "--image-pull-secret",
        "registry",
        "--image-pull-policy",
        "Always",
    ),
    *("--priority-class", "low"),
)
TEMPLATE = {
    "metadata": {"labels": {"release": "r"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeSelector": {"pool": "workers"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "securityContext": {"runAsUser": 0, "supplementalGroups": [44]},
        "automountServiceAccountToken": True,
        "volumes": [
            {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}},
            {"name": "nfs", "emptyDir": {}},
        ],
        "containers": [
            {
                "name": "worker",
                "env": [
                    {"name": "OMP_NUM_THREADS", "value": "9"},
                    {"name": "NCCL_DEBUG", "value": "INFO"},
                ],
                "volumeMounts": [{"name": "nfs", "mountPath": "/nfs"}],
                "resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1Gi"}},
                "securityContext": {
                    "privileged": True,
                    "capabilities": {"add": ["SYS_ADMIN"], "drop": ["ALL"]},
                },
            }
        ],
    },
}


def manifest(
    job: Job = JOB, options: tuple[str, ...] = (), setting: Setting = SETTING
) -> dict[str, Any]:
    return job_manifest(job, parse_options(options), setting, attempt="one", folder="master/runs/7")


def pod(**given: Any) -> dict[str, Any]:
    spec: dict[str, Any] = manifest(**given)["spec"]["template"]["spec"]
    return spec


def variants() -> list[dict[str, Any]]:
    """Every object in several forms."""
    shared = replace(SETTING, shared_claim="data", shared_mount=Path("/data"), template=TEMPLATE)
    jobs = [manifest(), manifest(options=OPTIONS), manifest(options=OPTIONS, setting=shared)]
    jobs.append(manifest(replace(JOB, gpu_enabled=False, num_workers=1, num_cpus=0.25)))
    return [*jobs, service_manifest(JOB, SETTING, "uid"), secret_manifest(JOB, SETTING, "uid")]


@pytest.mark.parametrize("version", ["1.37", "1.31", "1.25"])
def test_kubernetes_knows_every_field(version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate"
    ).validate
    for item in variants():
        validate(item, version, strict=True)
    with pytest.raises(Exception, match="unknown"):
        validate({**variants()[0], "unknown": 1}, version, strict=True)


@pytest.mark.parametrize("number", range(4))
def test_pods_are_as_the_restricted_standard_demands(number: int) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, with a template that
    asks for more."""
    spec = variants()[number]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
    }
    kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}
    # Not part of the standard: no right at the API, and no variables of Services.
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    # As the first process of its namespace, a program without a handler would ignore SIGTERM.
    assert spec["shareProcessNamespace"] is True


def test_a_worker_gets_its_place_and_nothing_of_this_machine() -> None:
    (container,) = pod()["containers"]
    hosts = [f"mlbench-m-7-{rank}.mlbench-m-7" for rank in range(3)]
    # Kubernetes turns $(RANK) into the rank, and two dollar signs into one.
    assert container["command"] == [
        *(
            "python",
            "/workspace/main.py",
            "--run_id",
            "7",
            "--rank",
            "$(RANK)",
            "--hosts",
            ",".join(hosts),
        ),
        *("--text", "$$(RANK) $$$$ gloo"),
    ]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (
        env["MASTER_ADDR"] == hosts[0]
        and env["WORLD_SIZE"] == "3"
        and env["LOCAL_WORLD_SIZE"] == "1"
    )
    # A variable is filled in only from those before it; the command may use all.
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"].endswith(
        "['batch.kubernetes.io/job-completion-index']"
    )
    assert pod()["subdomain"] == service_manifest(JOB, SETTING, "u")["metadata"]["name"]
    here = str(Path(__file__).resolve().parents[3])
    assert here not in json.dumps(variants()) and "PYTHONPATH" not in env


def test_the_service_selects_the_pods_of_the_run_and_belongs_to_the_job() -> None:
    service = service_manifest(JOB, SETTING, "uid")
    labels = manifest()["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert (
        service["spec"]["publishNotReadyAddresses"] is True
        and service["spec"]["clusterIP"] == "None"
    )
    (owner,) = service["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (
        "Job",
        manifest()["metadata"]["name"],
        "uid",
    )


def test_the_secret_has_the_address_for_pods_and_no_proof_for_loopback() -> None:
    setting = replace(SETTING, master_url="http://mlbench.lab.svc")
    assert secret_manifest(JOB, setting, "uid")["stringData"] == {
        "MLBENCH_MASTER_URL": "http://mlbench.lab.svc",
        "MLBENCH_TOKEN": "secret",
    }


def test_every_option_reaches_the_job() -> None:
    found = manifest(options=OPTIONS)
    spec = found["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert found["spec"]["activeDeadlineSeconds"] == 5400
    assert spec["nodeSelector"] == {"gpu": "a100", "disk": "ssd"}
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "ml"},
    ]
    assert container["resources"]["limits"] == {
        "cpu": "1500m",
        "memory": "4Gi",
        "nvidia.com/gpu": "1",
    }
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["imagePullPolicy"] == "Always" and spec["priorityClassName"] == "low"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    assert (
        volumes["data-0"] == {"persistentVolumeClaim": {"claimName": "images"}}
        and "data-1" not in volumes
    )
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "data-0"]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in mounts] == [
        ("/data/images", True),
        ("/data/more", False),
    ]


def test_a_template_adds_to_the_pod_but_the_run_and_its_security_come_first() -> None:
    setting = replace(SETTING, template=TEMPLATE)
    found = manifest(
        options=("--node-selector", "pool=other", "--toleration", "x"), setting=setting
    )
    metadata, spec = found["spec"]["template"]["metadata"], found["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert metadata["labels"]["release"] == "r" and metadata["labels"]["app"] == "mlbench"
    assert metadata["annotations"] == {"a": "b"}
    assert spec["nodeSelector"] == {"pool": "other"} and len(spec["tolerations"]) == 2
    assert (
        spec["securityContext"]["supplementalGroups"] == [44]
        and spec["securityContext"]["runAsUser"] == 1000
    )
    assert (
        container["resources"]["limits"]["memory"] == "1Gi"
        and container["resources"]["limits"]["cpu"] == "1500m"
    )
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["NCCL_DEBUG"] == "INFO" and env["OMP_NUM_THREADS"] == "1"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        "/nfs",
        "/dev/shm",
        "/mlbench",
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert TEMPLATE["metadata"]["labels"] == {"release": "r"}  # type: ignore[index]


def test_a_merge_replaces_a_variable_as_a_whole() -> None:
    base = {"env": [{"name": "A", "value": "1"}]}
    assert merge(base, {"env": [{"name": "A", "valueFrom": {}}]}) == {
        "env": [{"name": "A", "valueFrom": {}}]
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--memory", "lots"],
            "argument --memory: must be a size such as 4Gi or 500Mi, not 'lots'",
        ),
        (["--mem", "4Gi"], "unrecognized arguments: --mem 4Gi"),
        (
            ["--time", "10"],
            "argument --time: must be a number with s, m, h or d, such as 90m, not '10'",
        ),
        (["--node-selector", "gpu"], "must be KEY=VALUE, a label of nodes, not 'gpu'"),
        (
            ["--toleration", "a:Never"],
            "where EFFECT is one of NoSchedule, PreferNoSchedule, NoExecute, not 'a:Never'",
        ),
        (
            ["--volume", "/etc:/data/x"],
            "a folder of a node is not a volume here; make a PersistentVolumeClaim",
        ),
        (
            ["--volume", "images"],
            "must be CLAIM:/FOLDER[:ro], with the name of a PersistentVolumeClaim, not 'images'",
        ),
        (
            ["--volume", "images:/dev/shm"],
            "must have another folder than '/dev/shm': take one below /data",
        ),
        *(
            (["--volume", f"images:{folder}"], f"must have another folder than '{folder}'")
            for folder in ("/run", "/run/secrets", "/sbin", "/lib32", "/libx32", "/var/run", "/var")
        ),
        (["--volume", "images:/data/../etc"], "must have another folder than '/data/../etc'"),
        (["--image-pull-secret", "A B"], "must be the name of an object of Kubernetes, not 'A B'"),
        (["--image-pull-policy", "Often"], "invalid choice: 'Often'"),
        (["word"], "unrecognized arguments: word"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="^engine_options: .*" + re.escape(message)):
        parse_options(words)


@pytest.mark.parametrize("folder", ["/data", "/var/data", "/runs", "/home/me", "/tmp"])
def test_a_folder_that_nobody_needs_may_have_a_volume(folder: str) -> None:
    assert parse_options(["--volume", f"images:{folder}"]).volumes[0].folder == folder
