"""The master is found through Kubernetes, whatever kind of service it has."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Object
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlbench_core.api import ApiClient
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
    mock.list_namespaced_service.return_value.items = []
    return mock


def service(kind: str, **fields: Any) -> Object:
    return Object(
        spec=Object(type=kind, cluster_ip="10.0.0.1", ports=[Object(port=80, node_port=30080)]),
        status=Object(load_balancer=Object(ingress=fields.get("ingress"))),
    )


def serve(core: MagicMock, kind: str, **fields: Any) -> None:
    pod = Object(spec=Object(node_name="node-1"), status=Object(pod_ip="1.1.1.1", host_ip="192.168.0.9"))
    core.list_namespaced_pod.return_value.items = [pod]
    core.list_namespaced_service.return_value.items = [service(kind, **fields)]
    addresses = [Object(type=kind_, address=address) for kind_, address in fields.get("addresses", [])]
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


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        ([("InternalIP", "10.1.1.1"), ("ExternalIP", "8.8.4.4")], "8.8.4.4"),
        ([("Hostname", "node-1"), ("InternalIP", "10.1.1.1")], "10.1.1.1"),
        ([("Hostname", "node-1")], "node-1"),
        ([], "192.168.0.9"),
    ],
)
def test_outside_a_node_port_is_on_the_pods_node(core: MagicMock, addresses: list[Any], host: str) -> None:
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


def test_the_configuration_is_not_loaded_where_the_caller_did(core: MagicMock) -> None:
    serve(core, "ClusterIP")
    assert endpoint(in_cluster=False, load_config=False) == "http://10.0.0.1:80/api/"
    core.load_kube_config.assert_not_called()


@pytest.mark.parametrize(
    ("kind", "fields", "in_cluster", "message"),
    [
        (None, {}, True, "no such pod"),
        (None, {}, False, "no such service"),
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
    with pytest.raises(MasterNotFoundError, match=f"labels 'app=x' in namespace 'lab'.*{message}"):
        ApiClient(in_cluster=in_cluster, label_selector="app=x", k8s_namespace="lab")


def test_a_cluster_that_does_not_answer_is_a_clear_error(core: MagicMock) -> None:
    core.list_namespaced_pod.side_effect = OSError("connection refused")
    with pytest.raises(MasterNotFoundError, match="OSError: connection refused"):
        ApiClient()


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        spec = cluster.list_namespaced_service.return_value.items.__getitem__.return_value.spec
        spec.type = "NodePort"
        spec.ports.__getitem__.return_value.node_port = 12345
        node = cluster.list_node.return_value.items.__getitem__.return_value
        node.status.addresses.__getitem__.return_value.type = "ExternalIP"
        node.status.addresses.__getitem__.return_value.address = "1.1.1.1"
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_cluster_ip(self, cluster: MagicMock) -> None:
        spec = cluster.list_namespaced_service.return_value.items.__getitem__.return_value.spec
        spec.type = "ClusterIP"
        spec.cluster_ip = "1.1.1.1"
        spec.ports.__getitem__.return_value.port = 12345
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_load_balancer(self, cluster: MagicMock) -> None:
        found = cluster.list_namespaced_service.return_value.items.__getitem__.return_value
        found.spec.type = "LoadBalancer"
        found.spec.ports.__getitem__.return_value.port = 12345
        found.status.load_balancer.ingress.ip = "1.1.1.1"
        assert endpoint(in_cluster=False) == "http://1.1.1.1:12345/api/"

    def test_in_cluster(self, cluster: MagicMock) -> None:
        cluster.list_namespaced_pod.return_value.items.__getitem__.return_value.status.pod_ip = "1.1.1.1"
        assert endpoint() == "http://1.1.1.1:80/api/"

    def test_methods_return_what_submit_returned(self, cluster: MagicMock, mocker: Any) -> None:
        cluster.list_namespaced_pod.return_value.items.__getitem__.return_value.status.pod_ip = "1.1.1.1"
        pool = mocker.patch("concurrent.futures.ThreadPoolExecutor")
        client = ApiClient()
        submitted = pool.return_value.submit
        calls = [
            client.get_all_metrics,
            lambda: client.get_run_metrics("1", since="2026-01-01", summarize=100),
            lambda: client.get_pod_metrics("rel-mlbench-worker-0", since="2026-01-01", summarize=100),
            lambda: client.download_run_metrics("1"),
            lambda: client.post_metric("1", "loss", 10.0, cumulative=False, metadata="some additional data"),
            client.get_runs,
            lambda: client.get_run("1"),
            lambda: client.create_run("run", 5, 4, 1000, image="PyTorch Cifar-10 ResNet-20", backend="MPI"),
            lambda: client.delete_run("1"),
            client.get_worker_pods,
        ]
        for call in calls:
            submitted.reset_mock()
            assert call() is submitted.return_value
            submitted.assert_called_once()
        client._delivery.close()
