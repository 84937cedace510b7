"""The Helm chart: its values, its rights, and, if Helm is here, what it renders."""

from __future__ import annotations

import base64
import copy
import ipaddress
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml
from fastapi.testclient import TestClient

import mlbench_core
from mlbench_cli._clusters.kind import chart_folder
from mlbench_cli.commands.master import master
from mlbench_core.tasks import is_run_name
from mlbench_master.app import create_app
from mlbench_master.engines import Job
from mlbench_master.engines.kubernetes.manifests import job_manifest
from mlbench_master.engines.kubernetes.options import KubernetesOptions
from mlbench_master.engines.kubernetes.settings import read_setting
from tests.helpers.kubernetes_store import Store, kubernetes_store

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "mlbench"
VALUE_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
HELM = os.environ.get("MLBENCH_HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(
    HELM is None, reason="no helm here: put it on PATH, or name it in MLBENCH_HELM"
)
# The newest that kubernetes-validate has, one in the middle, and the oldest that Chart.yaml allows.
KUBERNETES = ("1.37.0", "1.31.0", "1.25.0")
# Kinds of volumes that the Pod Security Standard "restricted" allows.
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}

COMPONENT = "app.kubernetes.io/component"

Values = dict[str, Any]


def read(path: Path) -> Values:
    """The content of a YAML file."""
    values: Values = yaml.safe_load(path.read_text())
    return values


def merged(values: Values, changes: Values) -> Values:
    """Values with changes, as Helm merges them."""
    result = copy.deepcopy(values)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def refusal(changes: Values) -> str:
    """The reason for which the schema refuses changes of the default values; empty if it accepts
    them."""
    check = fastjsonschema.compile(json.loads((CHART / "values.schema.json").read_text()))
    try:
        check(merged(read(CHART / "values.yaml"), changes))
    except fastjsonschema.JsonSchemaException as error:
        return str(error)
    return ""


def helm(*arguments: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    """Run ``helm template`` for the release ``demo`` in the namespace ``bench``."""
    command = [
        str(HELM),
        "template",
        "demo",
        str(chart),
        "--namespace=bench",
        f"--kube-version={KUBERNETES[0]}",
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@cache
def render(name: str) -> tuple[Values, ...]:
    """The objects that the chart renders for a value file."""
    done = helm("--values", str(CHART / "ci" / f"{name}-values.yaml"))
    assert done.returncode == 0, done.stderr
    return tuple(entry for entry in yaml.safe_load_all(done.stdout) if entry)


def find(name: str, kind: str, suffix: str = "") -> Values:
    """The only object of a kind whose name has a suffix."""
    (found,) = (
        o for o in render(name) if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)
    )
    return found


def worker_pod(name: str) -> Values:
    """The template of workers that the chart gives to the engine."""
    template: Values = yaml.safe_load(find(name, "ConfigMap")["data"]["worker.yaml"])
    return template


def pods(name: str) -> Iterator[Values]:
    """The specifications of the pods of the master and of the workers."""
    yield find(name, "Deployment")["spec"]["template"]["spec"]
    yield worker_pod(name)["spec"]


def variables(name: str) -> dict[str, Any]:
    """Environment variables of the master; None for those from a Secret."""
    container = find(name, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@cache
def validate_object(text: str, version: str) -> None:
    """Raise an error if a version of Kubernetes refuses an object or does not know one of its
    fields."""
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(json.loads(text), version, strict=True)


def names_of(path: Path) -> str:
    return path.name.removesuffix("-values.yaml")


every_value_file = pytest.mark.parametrize("name", [names_of(path) for path in VALUE_FILES])


# Without Helm.


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = read(CHART / "Chart.yaml")
    assert chart["appVersion"] == mlbench_core.__version__
    # Helm wants a hyphen before the word of a version that is not final.
    assert chart["version"] == mlbench_core.__version__.replace(".dev", "-dev")
    assert chart_folder() == CHART


def test_there_are_value_files_for_a_dozen_uses() -> None:
    assert len(VALUE_FILES) >= 12


@pytest.mark.parametrize("path", VALUE_FILES, ids=names_of)
def test_the_schema_accepts_every_value_file(path: Path) -> None:
    assert refusal(read(path)) == ""


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"workers": 2}, "data "),
        ({"limits": {"worker": 2}}, "data.limits "),
        ({"limits": {"workers": 0}}, "data.limits.workers"),
        ({"limits": {"bandwidth": "1g"}}, "data.limits.bandwidth"),
        ({"limits": {"cpu": 0}}, "data.limits.cpu"),
        ({"limits": {"cpu": -1}}, "data.limits.cpu"),
        ({"limits": {"cpu": "0m"}}, "data.limits.cpu"),
        ({"limits": {"cpu": "0.0"}}, "data.limits.cpu"),
        ({"limits": {"cpu": "8 cores"}}, "data.limits.cpu"),
        ({"limits": {"cpu": ""}}, "data.limits.cpu"),
        ({"master": {"image": {"pullPolicy": "always"}}}, "data.master.image.pullPolicy"),
        ({"master": {"token": {"value": "secret"}}}, "data.master.token "),
        ({"master": {"service": {"type": "ExternalName"}}}, "data.master.service.type"),
        ({"master": {"service": {"nodePort": 80}}}, "data.master.service.nodePort"),
        ({"master": {"env": [{"value": "x"}]}}, "data.master.env"),
        ({"worker": {"replicas": 2}}, "data.worker "),
        ({"persistence": {"size": "big"}}, "data.persistence.size"),
        ({"persistence": {"accessModes": []}}, "data.persistence.accessModes"),
        ({"nfs": {"path": "exports"}}, "data.nfs.path"),
        (
            {"networkPolicy": {"master": {"cidrs": ["everybody"]}}},
            "data.networkPolicy.master.cidrs",
        ),
    ],
)
def test_the_schema_refuses_wrong_names_and_values_and_names_the_place(
    changes: Values, name: str
) -> None:
    assert refusal(changes).startswith(name)


@pytest.mark.parametrize(
    "cpu", ["8000m", "8", "0.5", ".5", "2.", "10", "1e3", "500000u", 8, 0.5, None]
)
def test_the_schema_accepts_every_quantity_of_cores(cpu: object) -> None:
    assert refusal({"limits": {"cpu": cpu}}) == ""
    # Helm compiles patterns with Go's regular expressions, which have no lookahead.
    assert "(?" not in (CHART / "values.schema.json").read_text()


def test_the_schema_and_the_default_values_have_the_same_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(place: str, values: Values, properties: Values) -> None:
        old = {
            name
            for name, entry in properties.items()
            if "version 3.0" in entry.get("description", "")
        }
        assert set(values) == set(properties) - old - {"global"}, place
        for name, value in values.items():
            if "properties" in properties[name] and place + name != "master.resources":
                assert properties[name]["additionalProperties"] is False, place + name
                compare(f"{place}{name}.", value, properties[name]["properties"])

    compare("", read(CHART / "values.yaml"), schema["properties"])


def rules() -> set[tuple[str, str, str]]:
    """API group, resource and verb of every right of the role."""
    # The rules have no template directive, so the file without the lines of directives is YAML.
    text = re.sub(r"(?m)^.*\{\{.*$\n", "", (CHART / "templates" / "role.yaml").read_text())
    role = next(entry for entry in yaml.safe_load_all(text) if entry["kind"] == "Role")
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_role_has_no_right_for_everything() -> None:
    assert rules()
    assert not any("*" in part for rule in rules() for part in rule)
    # With these, a stolen token of the master would give access to other secrets or to running
    # containers.
    assert not {
        rule for rule in rules() if rule[1] in ("pods/exec", "pods/attach", "roles", "rolebindings")
    }
    assert {verb for _, resource, verb in rules() if resource == "secrets"} <= {
        "create",
        "delete",
        "patch",
    }


def test_the_role_has_exactly_the_rights_of_the_page_on_kubernetes() -> None:
    page = ROOT / "docs" / "howto" / "kubernetes.md"
    table = page.read_text().partition("| API group | resource | verb |")[2]
    rows = re.findall(r"^\| `?([a-z0-9.]+)`? \| `([a-z/]+)` \| `([a-z]+)` \| ", table, re.MULTILINE)
    assert {
        ("" if group == "core" else group, resource, verb) for group, resource, verb in rows
    } == rules()


# With Helm.


@needs_helm
@every_value_file
def test_helm_lint_finds_nothing(name: str) -> None:
    command = [
        str(HELM),
        "lint",
        "--strict",
        str(CHART),
        "--values",
        str(CHART / "ci" / f"{name}-values.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # It advises an icon, which the chart does not have.
    assert set(re.findall(r"\[\w+\].*", done.stdout)) <= {"[INFO] Chart.yaml: icon is recommended"}


@needs_helm
@every_value_file
def test_kubernetes_accepts_every_object(name: str) -> None:
    # The template of workers is no object of its own; as a pod it is one.
    pod = {"apiVersion": "v1", "kind": "Pod", **worker_pod(name)}
    pod["spec"]["containers"][0]["image"] = "mlbench/task1a"
    for entry in (*render(name), pod):
        # The same for every rendering, so that it is checked once.
        known = {**entry, "data": {"token": ""}} if entry["kind"] == "Secret" else entry
        for version in KUBERNETES:
            validate_object(json.dumps(known), version)


@needs_helm
@every_value_file
def test_every_pod_satisfies_the_restricted_security_standard(name: str) -> None:
    for spec in pods(name):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {kind for volume in spec["volumes"] for kind in volume} - {"name"} <= VOLUMES
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container.get("ports", []))
    master, worker = pods(name)
    assert master["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert worker["automountServiceAccountToken"] is False


@needs_helm
@every_value_file
def test_nothing_belongs_to_the_whole_cluster_but_a_volume_with_data_sets(name: str) -> None:
    without_namespace = {
        entry["kind"] for entry in render(name) if "namespace" not in entry["metadata"]
    }
    expected = (
        {"PersistentVolume"} if name in ("gpu", "nfs-writable", "gce-disk", "version-3") else set()
    )
    assert without_namespace == expected
    assert {entry["metadata"].get("namespace", "bench") for entry in render(name)} == {"bench"}


@needs_helm
@every_value_file
def test_service_policy_and_binding_select_what_is_there(name: str) -> None:
    deployment = find(name, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        find(name, "Service")["spec"]["selector"],
        deployment["spec"]["selector"]["matchLabels"],
    ]
    if name != "ephemeral":
        of_master, of_workers = (
            entry["spec"] for entry in render(name) if entry["kind"] == "NetworkPolicy"
        )
        selectors.append(of_master["podSelector"]["matchLabels"])
        workers = worker_pod(name)["metadata"]["labels"]
        for spec in (
            of_workers,
            of_workers["ingress"][0]["from"][0],
            of_master["ingress"][0]["from"][0],
        ):
            assert spec["podSelector"]["matchLabels"].items() <= workers.items()
            assert not spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert all(selector.items() <= labels.items() for selector in selectors)
    # Clients of version 3.0 look for these.
    assert {"app": "mlbench", "component": "master"}.items() <= find(name, "Service")["metadata"][
        "labels"
    ].items()
    account = find(name, "RoleBinding")["subjects"][0]["name"]
    assert account == deployment["spec"]["template"]["spec"]["serviceAccountName"]
    assert account != worker_pod(name)["spec"]["serviceAccountName"]
    accounts = {
        entry["metadata"]["name"] for entry in render(name) if entry["kind"] == "ServiceAccount"
    }
    assert accounts == {account, worker_pod(name)["spec"]["serviceAccountName"]}


@needs_helm
def test_the_master_gets_its_secrets_from_secrets() -> None:
    given = variables("default")
    assert given["MLBENCH_TOKEN"] is None
    assert "MLBENCH_DATABASE_URL" not in given
    token = base64.b64decode(find("default", "Secret")["data"]["token"]).decode()
    assert re.fullmatch(r"[A-Za-z0-9]{48}", token)
    others = [entry for entry in render("default") if entry["kind"] != "Secret"]
    assert token not in json.dumps(others)
    # Of existing Secrets, the chart knows only the names.
    assert [entry for entry in render("postgres") if entry["kind"] == "Secret"] == []
    (container,) = find("postgres", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in container["env"]
        if "valueFrom" in entry
    } == {
        "MLBENCH_TOKEN": {"name": "bench-token", "key": "master-token"},
        "MLBENCH_DATABASE_URL": {"name": "bench-database", "key": "uri"},
    }


@needs_helm
def test_the_arguments_of_the_master_are_those_of_the_command() -> None:
    (container,) = find("default", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["mlbench", "master"]
    context = master.make_context("master", list(container["args"]))
    assert context.params["engine"] == "kubernetes"
    assert str(context.params["data_dir"]).startswith("/data/")
    assert [port["containerPort"] for port in container["ports"]] == [context.params["port"]]


@needs_helm
def test_the_probes_ask_a_path_that_needs_no_token(tmp_path: Path) -> None:
    (container,) = find("default", "Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {
        container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "readiness", "liveness")
    }
    (path,) = paths
    with TestClient(
        create_app(data_dir=tmp_path, token="t" * 32), base_url="http://10.244.0.7:5080"
    ) as client:
        assert client.get(path).status_code == 200
        assert client.get("/api/runs/").status_code == 401


@needs_helm
def test_the_engine_gets_the_address_of_the_service_and_the_claim_that_workers_can_mount() -> None:
    given = variables("default")
    assert given["MLBENCH_KUBERNETES_MASTER_URL"] == "http://demo-mlbench-master.bench.svc:80"
    assert given["MLBENCH_KUBERNETES_NAMESPACE"] == "bench"
    assert given["MLBENCH_KUBERNETES_MARK"] == "demo"
    assert given["MLBENCH_KUBERNETES_POD_TEMPLATE"] == "/etc/mlbench/worker.yaml"
    assert given["MLBENCH_IMAGE_REGISTRY"] == "mlbench"
    # A claim of ReadWriteOnce cannot be mounted on a second node.
    assert "MLBENCH_KUBERNETES_SHARED_CLAIM" not in given
    shared = variables("shared-claim")
    assert (
        shared["MLBENCH_KUBERNETES_SHARED_CLAIM"]
        == find("shared-claim", "PersistentVolumeClaim")["metadata"]["name"]
    )
    assert shared["MLBENCH_KUBERNETES_SHARED_MOUNT"] == "/data"


@needs_helm
def test_the_mark_of_a_long_release_name_is_short_and_its_own() -> None:
    marks = set()
    for name in ("a" * 40 + "-1", "a" * 40 + "-2", "with.dot"):
        done = subprocess.run(
            [str(HELM), "template", name, str(CHART), f"--kube-version={KUBERNETES[0]}"],
            capture_output=True,
            text=True,
            check=True,
        )
        (mark,) = re.findall(r'KUBERNETES_MARK\n +value: "(.*)"', done.stdout)
        assert len(mark) <= 30 and is_run_name(mark)
        marks.add(mark)
        assert all(
            is_run_name(entry["metadata"]["name"])
            for entry in yaml.safe_load_all(done.stdout)
            if entry
        )
    assert len(marks) == 3


@needs_helm
def test_the_limits_become_a_quota_a_range_and_annotations() -> None:
    assert find("gpu", "ResourceQuota")["spec"] == {"hard": {"pods": "9"}}
    assert find("gpu", "LimitRange")["spec"]["limits"] == [
        {
            "type": "Container",
            "max": {"cpu": "16", "nvidia.com/gpu": "1"},
            # Otherwise the master would get a GPU.
            "default": {"nvidia.com/gpu": "0"},
            "defaultRequest": {"nvidia.com/gpu": "0"},
        }
    ]
    annotations = worker_pod("gpu")["metadata"]["annotations"]
    assert set(annotations.values()) == {"10000M"}
    assert find("version-3", "LimitRange")["spec"]["limits"][0]["max"]["nvidia.com/gpu"] == "0"
    assert not {"ResourceQuota", "LimitRange"} & {entry["kind"] for entry in render("default")}


@needs_helm
@pytest.mark.parametrize(
    ("name", "source", "mode"),
    [
        (
            "gpu",
            {"nfs": {"server": "nfs.example.org", "path": "/exports/datasets", "readOnly": True}},
            "ReadOnlyMany",
        ),
        (
            "nfs-writable",
            {"nfs": {"server": "10.0.0.7", "path": "/exports", "readOnly": False}},
            "ReadWriteMany",
        ),
        (
            "gce-disk",
            {"gcePersistentDisk": {"pdName": "my-pd-name", "fsType": "ext4", "readOnly": True}},
            "ReadOnlyMany",
        ),
    ],
)
def test_workers_mount_data_sets_through_a_claim(name: str, source: Values, mode: str) -> None:
    volume = find(name, "PersistentVolume")
    assert source.items() <= volume["spec"].items()
    claim = find(name, "PersistentVolumeClaim", "datasets")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == [mode]
    spec = worker_pod(name)["spec"]
    mounted = next(entry for entry in spec["volumes"] if entry["name"] == "datasets")[
        "persistentVolumeClaim"
    ]
    assert mounted == {"claimName": claim["metadata"]["name"], "readOnly": mode == "ReadOnlyMany"}
    place = next(
        entry for entry in spec["containers"][0]["volumeMounts"] if entry["name"] == "datasets"
    )
    assert place["mountPath"] == ("/datasets" if name == "nfs-writable" else "/data/datasets")


@needs_helm
def test_only_named_places_may_reach_the_master() -> None:
    def sources(name: str) -> list[Values]:
        (rule,) = find(name, "NetworkPolicy", "-master")["spec"]["ingress"]
        assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
        return list(rule["from"][1:])

    assert sources("default") == []
    assert sources("ingress") == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    ]
    assert sources("kind") == [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}]
    assert sources("load-balancer") == [
        {"ipBlock": {"cidr": "203.0.113.0/24"}},
        {"ipBlock": {"cidr": "2001:db8::/32"}},
    ]


@needs_helm
def test_an_ingress_below_a_path_tells_the_master() -> None:
    def paths(*options: str) -> tuple[str, list[str]]:
        done = helm("--values", str(CHART / "ci" / "ingress-values.yaml"), *options)
        objects = [entry for entry in yaml.safe_load_all(done.stdout) if entry]
        (ingress,) = (one for one in objects if one["kind"] == "Ingress")
        (deployment,) = (one for one in objects if one["kind"] == "Deployment")
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        return path["path"], [
            argument for argument in arguments if argument.startswith("--root-path")
        ]

    assert paths() == ("/", [])
    assert paths("--set", "ingress.path=/tools/mlbench") == (
        "/tools/mlbench",
        ["--root-path=/tools/mlbench"],
    )


@needs_helm
def test_workers_reach_one_another_the_master_and_name_servers_until_a_value_opens_more() -> None:
    def destinations(name: str) -> list[Values]:
        return list(find(name, "NetworkPolicy", "-worker")["spec"]["egress"])

    workers, to_master, dns = destinations("default")
    assert (
        "ports" not in workers
        and workers["to"][0]["podSelector"]["matchLabels"][COMPONENT] == "worker"
    )
    assert to_master["to"][0]["podSelector"]["matchLabels"][COMPONENT] == "master"
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    *_, downloads = destinations("nfs-writable")
    assert [port["port"] for port in downloads["ports"]] == [80, 443]
    public = ipaddress.ip_network(downloads["to"][0]["ipBlock"]["cidr"])
    closed = [ipaddress.ip_network(text) for text in downloads["to"][0]["ipBlock"]["except"]]
    for address in ("10.96.0.1", "172.17.0.2", "192.168.1.1", "169.254.169.254"):
        assert any(ipaddress.ip_address(address) in network for network in closed)
    assert ipaddress.ip_address("93.184.215.14") in public
    assert destinations("scheduling")[-1] == {
        "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
        "ports": [{"port": 443, "protocol": "TCP"}],
    }


@needs_helm
def test_values_for_nodes_and_pods_arrive() -> None:
    given = read(CHART / "ci" / "scheduling-values.yaml")
    template = find("scheduling", "Deployment")["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == "registry.example.org:5000/lab/master:4.1"
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][name] == given["master"][name]
    assert given["master"]["podLabels"].items() <= template["metadata"]["labels"].items()
    assert given["master"]["podAnnotations"].items() <= template["metadata"]["annotations"].items()
    assert variables("scheduling")["MLBENCH_LOG_LIMIT_MB"] == "100"
    worker = worker_pod("scheduling")
    assert worker["spec"]["affinity"] == given["worker"]["affinity"]
    assert given["worker"]["podLabels"].items() <= worker["metadata"]["labels"].items()
    assert worker["metadata"]["annotations"] == given["worker"]["podAnnotations"]
    assert worker["spec"]["containers"][0]["env"] == given["worker"]["env"]
    for spec in pods("scheduling"):
        assert spec["imagePullSecrets"] == [{"name": "registry-one"}, {"name": "registry-two"}]
    gpu = worker_pod("gpu")["spec"]
    assert gpu["nodeSelector"] == {"example.org/gpu": "a100"}
    assert gpu["containers"][0]["resources"] == {
        "requests": {"memory": "64Gi"},
        "limits": {"memory": "64Gi"},
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in gpu["volumes"]


@needs_helm
def test_the_claim_of_the_master_stays_after_an_uninstallation() -> None:
    claim = find("default", "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "storageClassName" not in claim["spec"]
    own = find("scheduling", "PersistentVolumeClaim")
    assert (
        own["spec"]["storageClassName"] == "fast"
        and own["metadata"]["annotations"]["example.org/backup"] == "daily"
    )
    volumes = find("existing-claim", "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0] == {"name": "data", "persistentVolumeClaim": {"claimName": "bench-data"}}
    assert not [
        entry for entry in render("existing-claim") if entry["kind"] == "PersistentVolumeClaim"
    ]
    assert find("ephemeral", "Deployment")["spec"]["template"]["spec"]["volumes"][0] == {
        "name": "data",
        "emptyDir": {},
    }


@needs_helm
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["worker.sshKey.id_rsa=x"], "worker.sshKey must be left out"),
        (
            ["worker.image.tag=latest"],
            "worker.image.repository and worker.image.tag must be left out",
        ),
        (["nvidiaDevicePlugin.enabled=true"], "nvidiaDevicePlugin must be left out"),
        (["nfs.enabled=true"], "nfs.server and nfs.path must be set"),
        (
            ["nfs.enabled=true", "datasets.existingClaim=x"],
            "datasets.existingClaim, nfs.enabled must not be set together",
        ),
        (["gcePersistentDisk.enabled=true"], "gcePersistentDisk.pdName must be set"),
        (
            [
                "gcePersistentDisk.enabled=true",
                "gcePersistentDisk.pdName=x",
                "datasets.readOnly=false",
            ],
            "datasets.readOnly must be true",
        ),
        (["ingress.enabled=true"], "ingress.host must be set"),
        (
            ["ingress.enabled=true", "ingress.host=x.org"],
            "networkPolicy.master.namespaces must name",
        ),
        (["master.service.nodePort=30080"], "master.service.nodePort must be left out"),
        (["limits.worker=2"], "limits: Additional property worker is not allowed"),
    ],
)
def test_values_without_a_meaning_are_refused_with_a_sentence(
    given: list[str], sentence: str
) -> None:
    done = helm(*(f"--set={value}" for value in given))
    assert done.returncode != 0
    assert sentence in done.stderr


@needs_helm
def test_the_notes_name_the_objects_and_do_not_print_the_token(tmp_path: Path) -> None:
    # "helm template" leaves the notes out, so they are rendered as the text of an object.
    chart = tmp_path / "mlbench"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    body = "\n".join(f"  {line}" for line in notes.splitlines())
    (chart / "templates" / "notes.yaml").write_text(
        f"kind: Notes\nmetadata: {{name: notes}}\ntext: |\n{body}\n"
    )
    for name in ("default", "postgres", "ingress", "kind", "ephemeral"):
        done = helm("--values", str(CHART / "ci" / f"{name}-values.yaml"), chart=chart)
        assert done.returncode == 0, done.stderr
        objects = [entry for entry in yaml.safe_load_all(done.stdout) if entry]
        (text,) = (entry["text"] for entry in objects if entry["kind"] == "Notes")
        named = {(entry["kind"].lower(), entry["metadata"]["name"]) for entry in objects}
        for kind, target in re.findall(r"(deployment|service)/([\w-]+)", text):
            assert (kind, target) in named
        secret = "bench-token" if name == "postgres" else "demo-mlbench-master-token"
        assert f"get secret {secret} " in text
        assert name == "postgres" or ("secret", secret) in named
        assert ("'{.data.master-token}'" if name == "postgres" else "'{.data.token}'") in text
        warnings = {"default": 0, "postgres": 0, "ingress": 0, "kind": 1, "ephemeral": 2}
        assert text.count("WARNING") == warnings[name]
        for entry in objects:
            for value in entry.get("data", {}).values() if entry["kind"] == "Secret" else ():
                assert base64.b64decode(value).decode() not in text


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Store, dict[str, str]]]:
    """An API server that keeps objects, and the environment in which Helm and kubectl use it."""
    with kubernetes_store() as store:
        config = tmp_path / "config"
        config.touch(mode=0o600)
        config.write_text(json.dumps(store.config))
        yield store, {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}


@needs_helm
def test_the_token_stays_over_an_upgrade_and_the_claim_over_an_uninstallation(
    cluster: tuple[Store, dict[str, str]],
) -> None:
    store, environment = cluster
    folder = "/api/v1/namespaces/bench"

    def run(*arguments: str) -> str:
        command = [str(HELM), *arguments, "--namespace=bench"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    def token() -> str:
        return str(store.objects[f"{folder}/secrets/demo-mlbench-master-token"]["data"]["token"])

    printed = run("install", "demo", str(CHART), "--disable-openapi-validation")
    first = token()
    assert "mlbench run demo" in printed
    assert base64.b64decode(first).decode() not in printed
    run("upgrade", "demo", str(CHART), "--disable-openapi-validation", "--set=limits.workers=3")
    assert f"{folder}/resourcequotas/demo-mlbench-worker" in store.objects
    assert token() == first
    run("uninstall", "demo")
    assert list(store.objects) == [f"{folder}/persistentvolumeclaims/demo-mlbench-master"]
    # The same name takes up the claim.
    run("install", "demo", str(CHART), "--disable-openapi-validation")
    assert token() != first


@needs_helm
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_accepts_the_objects(cluster: tuple[Store, dict[str, str]]) -> None:
    command = [
        "kubectl",
        "apply",
        "--dry-run=client",
        "--validate=false",
        "--namespace=bench",
        "--filename=-",
    ]
    text = yaml.safe_dump_all([*render("default"), *render("ingress"), *render("gpu")])
    done = subprocess.run(
        command, env=cluster[1], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(
        [*render("default"), *render("ingress"), *render("gpu")]
    )


@needs_helm
@every_value_file
def test_the_jobs_that_the_engine_makes_of_the_template_are_restricted_and_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.yaml").write_text(find(name, "ConfigMap")["data"]["worker.yaml"])
    for variable, value in variables(name).items():
        if value is not None and variable.startswith("MLBENCH_KUBERNETES_"):
            monkeypatch.setenv(
                variable,
                value.replace("/etc/mlbench", str(tmp_path)).replace("/data", str(tmp_path)),
            )
    setting = read_setting(tmp_path, "bench")
    run = Job(
        7,
        "demo",
        "python main.py --rank {rank}",
        2,
        image="mlbench/task1a:latest",
        gpu_enabled=name == "gpu",
    )
    job = job_manifest(run, KubernetesOptions(), setting, attempt="1", folder="runs/7")
    validate_object(json.dumps(job), KUBERNETES[0])
    pod = job["spec"]["template"]
    # The policies and the claims of the chart are for these pods.
    assert worker_pod(name)["metadata"]["labels"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"] for volume in worker_pod(name)["spec"]["volumes"]}
    assert volumes <= {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["serviceAccountName"].endswith("-worker")
    assert pod["spec"]["automountServiceAccountToken"] is False
    (container,) = pod["spec"]["containers"]
    assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(
        container["volumeMounts"]
    )
    assert container["image"] == run.image
    memory = "64Gi" if name == "gpu" else None
    assert container["resources"]["limits"].get("memory") == memory
