"""The master is found through Kubernetes, whatever kind of service it has."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Object
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlbench_core.client.api import ApiClient
from mlbench_core.errors import MasterNotFoundError, MissingDependencyError

pytest.importorskip("kubernetes", reason="needs the package kubernetes")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The interface of the cluster, with nothing in it."""
    mock = MagicMock()
    monkeypatch.setattr("kubernetes.client.CoreV1Api", lambda: mock)
    monkeypatch.setattr("kubernetes.config.load_kube_config", mock.load_kube_config)
    monkeypatch.setattr("kubernetes.config.load_incluster_config", mock.load_incluster_config)
    mock.list_namespaced_pod.return_value.items = []
    mock.list_pod_for_all_namespaces.return_value.items = []
    mock.list_service_for_all_namespaces.return_value.items = []
    mock.list_namespaced_service.return_value.items = []
    return mock


def service(kind: str, **fields: Any) -> Object:
    return Object(
        metadata=Object(
            namespace=fields.get("namespace", "default"), name=fields.get("name", "master")
        ),
        spec=Object(
            type=kind,
            cluster_ip=fields.get("cluster_ip", "10.0.0.1"),
            external_i_ps=fields.get("external_ips"),
            ports=[
                Object(port=port, node_port=node)
                for port, node in fields.get("ports", [(80, 30080)])
            ],
        ),
        status=Object(load_balancer=Object(ingress=fields.get("ingress"))),
    )


def forbidden(*args: object, **options: object) -> Any:
    from kubernetes.client.exceptions import ApiException

    raise ApiException(status=403, reason="Forbidden")


def serve(core: MagicMock, kind: str, **fields: Any) -> None:
    pod = Object(
        spec=Object(node_name="node-1"), status=Object(pod_ip="1.1.1.1", host_ip="192.168.0.9")
    )
    core.list_namespaced_pod.return_value.items = [pod]
    core.list_service_for_all_namespaces.return_value.items = [service(kind, **fields)]
    addresses = [
        Object(type=kind_, address=address) for kind_, address in fields.get("addresses", [])
    ]
    core.list_node.return_value.items = [Object(status=Object(addresses=addresses))]
    core.read_node.side_effect = RuntimeError("403 Forbidden")


def endpoint(**options: Any) -> str:
    with ApiClient(**options) as client:
        return client.endpoint


def test_in_the_cluster_it_is_the_pod(core: MagicMock) -> None:
    serve(core, "NodePort")
    assert endpoint(label_selector="app=x", k8s_namespace="lab") == "http://1.1.1.1:80/api/"
    core.list_namespaced_pod.assert_called_once_with("lab", label_selector="app=x")
    core.load_incluster_config.assert_called_once_with()
    core.load_kube_config.assert_not_called()


def test_a_pod_that_was_evicted_or_is_leaving_is_not_the_master(core: MagicMock) -> None:
    def pod(address: str, phase: str, deleted: Any = None) -> Object:
        metadata = Object(namespace="lab", name=address, deletion_timestamp=deleted)
        return Object(metadata=metadata, status=Object(pod_ip=address, phase=phase))

    core.list_namespaced_pod.return_value.items = [
        pod("1.1.1.1", "Failed"),
        pod("1.1.1.2", "Running", deleted="2026-11-30"),
        pod("1.1.1.3", "Pending"),
        pod("1.1.1.4", "Running"),
    ]
    assert endpoint(k8s_namespace="lab") == "http://1.1.1.4:80/api/"


def test_a_headless_service_has_no_address(core: MagicMock) -> None:
    serve(core, "ClusterIP", cluster_ip="None")
    with pytest.raises(MasterNotFoundError, match="its service is headless"):
        ApiClient(in_cluster=False)


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        ([("InternalIP", "10.1.1.1"), ("ExternalIP", "8.8.4.4")], "8.8.4.4"),
        ([("Hostname", "node-1"), ("InternalIP", "10.1.1.1")], "10.1.1.1"),
        ([("Hostname", "node-1")], "node-1"),
        ([], "192.168.0.9"),
    ],
)
def test_outside_a_node_port_is_on_the_pods_node(
    core: MagicMock, addresses: list[Any], host: str
) -> None:
    serve(core, "NodePort", addresses=addresses)
    assert endpoint(in_cluster=False) == f"http://{host}:30080/api/"
    core.list_node.assert_called_once_with(field_selector="metadata.name=node-1")
    core.load_kube_config.assert_called_once_with()
    core.load_incluster_config.assert_not_called()


def test_who_may_not_see_nodes_gets_the_pods_host(core: MagicMock) -> None:
    serve(core, "NodePort")
    core.list_node.side_effect = RuntimeError("403 Forbidden")
    assert endpoint(in_cluster=False) == "http://192.168.0.9:30080/api/"


def test_outside_a_cluster_ip(core: MagicMock) -> None:
    serve(core, "ClusterIP")
    assert endpoint(in_cluster=False) == "http://10.0.0.1:80/api/"


@pytest.mark.parametrize(
    ("ingress", "host"),
    [
        ([Object(ip="34.1.2.3", hostname=None)], "34.1.2.3"),
        ([Object(ip=None, hostname="lb.example.org")], "lb.example.org"),
        (Object(ip="34.1.2.3"), "34.1.2.3"),
        ([Object(ip="2001:db8::1", hostname=None)], "[2001:db8::1]"),
    ],
)
def test_outside_a_load_balancer(core: MagicMock, ingress: Any, host: str) -> None:
    serve(core, "LoadBalancer", ingress=ingress)
    assert endpoint(in_cluster=False) == f"http://{host}:80/api/"


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("ClusterIP", {"cluster_ip": "10.0.0.5"}, "http://10.0.0.5:80/api/"),
        ("NodePort", {"external_ips": ["9.9.9.9"]}, "http://9.9.9.9:30080/api/"),
        ("NodePort", {"addresses": [("ExternalIP", "8.8.4.4")]}, "http://8.8.4.4:30080/api/"),
        (
            "NodePort",
            {"external_ips": ["9.9.9.9"], "ports": [(443, 30443), (80, 30081)]},
            "http://9.9.9.9:30081/api/",
        ),
        ("ClusterIP", {"ports": [(8443, None), (8080, None)]}, "http://10.0.0.1:8443/api/"),
    ],
)
def test_a_master_in_any_namespace_is_found(
    core: MagicMock, kind: str, fields: dict[str, Any], expected: str
) -> None:
    """As version 3.0 found it: nobody had to name the namespace."""
    serve(core, kind, namespace="mlbench", **fields)
    assert endpoint(in_cluster=False) == expected
    core.list_service_for_all_namespaces.assert_called_once_with(
        label_selector="component=master,app=mlbench"
    )
    if kind == "NodePort" and "external_ips" not in fields:
        core.list_namespaced_pod.assert_called_once_with(
            "mlbench", label_selector="component=master,app=mlbench"
        )


def test_of_two_masters_the_namespace_decides_and_without_one_nobody_guesses(
    core: MagicMock,
) -> None:
    core.list_service_for_all_namespaces.return_value.items = [
        service("ClusterIP", namespace="lab", cluster_ip="10.0.0.5"),
        service("ClusterIP", namespace="mlbench", cluster_ip="10.0.0.6"),
    ]
    assert endpoint(in_cluster=False, k8s_namespace="mlbench") == "http://10.0.0.6:80/api/"
    with pytest.raises(
        ValueError,
        match=(
            r"2 services have these labels \(lab/master, mlbench/master\): give more labels, or "
            r"a k8s_namespace"
        ),
    ):
        ApiClient(in_cluster=False)
    with pytest.raises(ValueError, match="2 services have"):
        ApiClient(in_cluster=False, k8s_namespace="elsewhere")


def test_none_is_a_value_error_as_in_version_3(core: MagicMock) -> None:
    with pytest.raises(ValueError, match=r"in any namespace.*no service has these labels"):
        ApiClient(in_cluster=False)


def test_who_may_only_see_one_namespace_searches_that_one(core: MagicMock) -> None:
    core.list_service_for_all_namespaces.side_effect = forbidden
    core.list_namespaced_service.return_value.items = [service("ClusterIP", namespace="lab")]
    assert endpoint(in_cluster=False, k8s_namespace="lab") == "http://10.0.0.1:80/api/"
    core.list_namespaced_service.assert_called_once_with(
        "lab", label_selector="component=master,app=mlbench"
    )
    core.list_namespaced_service.side_effect = forbidden
    with pytest.raises(MasterNotFoundError, match="403"):
        ApiClient(in_cluster=False, k8s_namespace="lab")


def test_a_worker_finds_the_master_of_its_own_namespace(
    core: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = {"default": "1.1.1.1", "lab": "2.2.2.2"}

    def in_namespace(namespace: str, label_selector: str) -> Object:
        items = [
            Object(metadata=Object(namespace=namespace), status=Object(pod_ip=pods[namespace]))
        ]
        return Object(items=items if namespace in pods else [])

    core.list_namespaced_pod.side_effect = in_namespace
    assert endpoint() == "http://1.1.1.1:80/api/"
    monkeypatch.setattr("mlbench_core.client.kubernetes._own_namespace", lambda: "lab")
    assert endpoint() == "http://2.2.2.2:80/api/"
    core.list_namespaced_pod.side_effect = forbidden
    found = Object(metadata=Object(namespace="mlbench", name="a"), status=Object(pod_ip="3.3.3.3"))
    core.list_pod_for_all_namespaces.return_value.items = [found]
    assert endpoint() == "http://3.3.3.3:80/api/"
    other = Object(metadata=Object(namespace="lab", name="b"), status=Object(pod_ip="4.4.4.4"))
    core.list_pod_for_all_namespaces.return_value.items = [found, other]
    with pytest.raises(ValueError, match=r"2 pods have these labels \(mlbench/a, lab/b\)"):
        ApiClient()


def test_the_configuration_is_not_loaded_where_the_caller_did(core: MagicMock) -> None:
    serve(core, "ClusterIP")
    assert endpoint(in_cluster=False, load_config=False) == "http://10.0.0.1:80/api/"
    core.load_kube_config.assert_not_called()


@pytest.mark.parametrize(
    ("kind", "fields", "in_cluster", "message"),
    [
        (None, {}, True, "no pod has these labels"),
        (None, {}, False, "no service has these labels"),
        ("ExternalName", {}, False, "type 'ExternalName'"),
        ("LoadBalancer", {"ingress": None}, False, "no address yet"),
        ("LoadBalancer", {"ingress": []}, False, "no address yet"),
    ],
)
def test_what_was_looked_for_is_said(
    core: MagicMock, kind: str | None, fields: dict[str, Any], in_cluster: bool, message: str
) -> None:
    if kind is not None:
        serve(core, kind, **fields)
    with pytest.raises(
        MasterNotFoundError, match=f"labels 'app=x' in namespace 'lab' or any other.*{message}"
    ):
        ApiClient(in_cluster=in_cluster, label_selector="app=x", k8s_namespace="lab")


def test_a_cluster_that_does_not_answer_is_a_clear_error(core: MagicMock) -> None:
    core.list_namespaced_pod.side_effect = OSError("connection refused")
    with pytest.raises(MasterNotFoundError, match="OSError: connection refused"):
        ApiClient()


def test_without_the_package_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .mlbench-core\[kubernetes\]"):
        ApiClient()


class TestMocksOfVersion3:
    """Clients of version 3.0 tested with mocks that can only be indexed, and a mocked pool."""

    @pytest.fixture
    def cluster(self, mocker: Any) -> MagicMock:
        core: MagicMock = mocker.patch("kubernetes.client.CoreV1Api").return_value
        mocker.patch("kubernetes.config.load_kube_config")
        mocker.patch("kubernetes.config.load_incluster_config")
        core.list_namespaced_pod.return_value.items.__len__.return_value = 1
        return core

    def test_node_port(self, cluster: MagicMock) -> None:
        spec = (
            cluster.list_service_for_all_namespaces.return_value.items.__getitem__.return_value.spec
        )
        spec.type = "NodePort"
        spec.ports.__getitem__.return_value.node_port = 12345
        node = cluster.list_node.return_value.items.__getitem__.return_value
        node.status.addresses.__getitem__.return_value.type = "ExternalIP"
        node.status.addresses.__getitem__.return_value.address = "1.1.1.1"
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_cluster_ip(self, cluster: MagicMock) -> None:
        spec = (
            cluster.list_service_for_all_namespaces.return_value.items.__getitem__.return_value.spec
        )
        spec.type = "ClusterIP"
        spec.cluster_ip = "1.1.1.1"
        spec.ports.__getitem__.return_value.port = 12345
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_load_balancer(self, cluster: MagicMock) -> None:
        found = cluster.list_service_for_all_namespaces.return_value.items.__getitem__.return_value
        found.spec.type = "LoadBalancer"
        found.spec.ports.__getitem__.return_value.port = 12345
        found.status.load_balancer.ingress.ip = "1.1.1.1"
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_in_cluster(self, cluster: MagicMock) -> None:
        cluster.list_namespaced_pod.return_value.items.__getitem__.return_value.status.pod_ip = (
            "1.1.1.1"
        )
        assert endpoint() == "http://1.1.1.1:80/api/"

    def test_methods_return_what_submit_returned(self, cluster: MagicMock, mocker: Any) -> None:
        cluster.list_namespaced_pod.return_value.items.__getitem__.return_value.status.pod_ip = (
            "1.1.1.1"
        )
        pool = mocker.patch("concurrent.futures.ThreadPoolExecutor")
        client = ApiClient()
        submitted = pool.return_value.submit
        calls = [
            client.get_all_metrics,
            lambda: client.get_run_metrics("1", since="2026-01-01", summarize=100),
            lambda: client.get_pod_metrics(
                "rel-mlbench-worker-0", since="2026-01-01", summarize=100
            ),
            lambda: client.download_run_metrics("1"),
            lambda: client.post_metric(
                "1", "loss", 10.0, cumulative=False, metadata="some additional data"
            ),
            client.get_runs,
            lambda: client.get_run("1"),
            lambda: client.create_run(
                "run", 5, 4, 1000, image="PyTorch Cifar-10 ResNet-20", backend="MPI"
            ),
            lambda: client.delete_run("1"),
            client.get_worker_pods,
        ]
        for call in calls:
            submitted.reset_mock()
            assert call() is submitted.return_value
            submitted.assert_called_once()
        client._delivery.close()
