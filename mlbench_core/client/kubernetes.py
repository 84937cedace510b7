"""Find the address of the master through Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from mlbench_core.addresses import bracketed
from mlbench_core.errors import MasterNotFoundError, require

__all__ = ["find_master"]

_PORT_IN_POD = 80
_ANY_NAMESPACE = "default"
_OWN_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def find_master(label_selector: str, namespace: str, in_cluster: bool, load_config: bool) -> str:
    """Find the master's address.

    Inside the cluster, the address is that of the master's pod, with port 80. Outside, it is the
    address that the master's service offers: a port of a node (``NodePort``), an address of the
    cluster (``ClusterIP``), or a load balancer (``LoadBalancer``). All namespaces are searched, and
    a master in ``namespace`` takes precedence.

    Args:
        label_selector: Labels of the master's pod and service.
        namespace: Namespace in which the master runs. ``"default"`` means any namespace.
        in_cluster: True if this process runs in the cluster.
        load_config: True to load the cluster's configuration first; False if the caller has loaded
            it.

    Returns:
        ``"HOST:PORT"``.

    Raises:
        MasterNotFoundError: No pod or service has the labels; several services, or pods in several
            namespaces, have them; or the cluster does not answer. The error is also a
            ``ValueError``.
        MissingDependencyError: The package ``kubernetes`` is not installed.
    """
    client: Any = require("kubernetes.client", "kubernetes")
    config: Any = require("kubernetes.config", "kubernetes")
    where = f"labels {label_selector!r} in any namespace"
    if namespace != _ANY_NAMESPACE:
        where = f"labels {label_selector!r} in namespace {namespace!r} or any other"
    try:
        if load_config and in_cluster:
            config.load_incluster_config()
        elif load_config:
            config.load_kube_config()
        search = _in_cluster if in_cluster else _outside
        return search(client.CoreV1Api(), namespace, label_selector)
    except MasterNotFoundError as error:
        raise MasterNotFoundError(
            f"no master found through Kubernetes ({where}): {error}; "
            "correct the labels, start the master if none is running, or give its url"
        ) from None
    # All errors, because kubernetes raises its own, those of urllib3, and those of a missing or
    # damaged configuration.
    except Exception as error:
        raise MasterNotFoundError(
            f"no master found through Kubernetes ({where}): {type(error).__name__}: "
            f"{str(error)[:300]}; check the cluster's configuration or give the master's url"
        ) from error


def _in_cluster(core: Any, namespace: str, label_selector: str) -> str:
    # The workers of a run are in the namespace of their master, so this process's own namespace is
    # searched too.
    namespaces: tuple[str | None, ...] = (namespace, _own_namespace())
    if namespace == _ANY_NAMESPACE:
        namespaces = namespaces[::-1]
    pod = _master_pod(core, namespaces, label_selector)
    if not pod.status.pod_ip:
        raise MasterNotFoundError("its pod has no address yet")
    return f"{bracketed(pod.status.pod_ip)}:{_PORT_IN_POD}"


def _outside(core: Any, namespace: str, label_selector: str) -> str:
    service = _master_service(core, namespace, label_selector)
    port = _port(service)
    kind = service.spec.type
    if kind == "ClusterIP":
        if service.spec.cluster_ip in (None, "", "None"):
            raise MasterNotFoundError("its service is headless and has no address")
        return f"{bracketed(service.spec.cluster_ip)}:{port.port}"
    if kind == "LoadBalancer":
        return f"{bracketed(_load_balancer_address(service))}:{port.port}"
    if kind == "NodePort":
        # The Python client turns the name externalIPs into external_i_ps.
        addresses = _entries(getattr(service.spec, "external_i_ps", None))
        external = [address for address in addresses if isinstance(address, str)]
        if external:
            return f"{bracketed(external[0])}:{port.node_port}"
        pod = _master_pod(core, (_namespace_of(service) or namespace,), label_selector)
        return f"{bracketed(_node_address(core, pod))}:{port.node_port}"
    raise MasterNotFoundError(
        f"its service is of type {kind!r}; known are NodePort, ClusterIP, LoadBalancer"
    )


def _master_service(core: Any, namespace: str, label_selector: str) -> Any:
    """Return the service with the labels, preferably one in the requested namespace."""
    services = _first_allowed(
        lambda: core.list_service_for_all_namespaces(label_selector=label_selector).items,
        lambda: core.list_namespaced_service(namespace, label_selector=label_selector).items,
    )
    if not services:
        raise MasterNotFoundError("no service has these labels")
    if namespace != _ANY_NAMESPACE:
        requested = [service for service in services if _namespace_of(service) == namespace]
        services = requested or services
    _refuse_several(services, "services")
    return services[0]


def _port(service: Any) -> Any:
    """Return port 80 of the service if it has that port, otherwise its first port."""
    ports = _entries(service.spec.ports)
    if not ports:
        raise MasterNotFoundError("its service has no port")
    for port in ports:
        if port.port == _PORT_IN_POD:
            return port
    return ports[0]


def _namespace_of(entry: Any) -> str | None:
    namespace = getattr(getattr(entry, "metadata", None), "namespace", None)
    return namespace if isinstance(namespace, str) else None


def _master_pod(core: Any, namespaces: tuple[str | None, ...], label_selector: str) -> Any:
    """Return the master's pod from the first of ``namespaces`` that has one, or from any other."""
    queries: list[Callable[[], Any]] = []
    for namespace in dict.fromkeys(filter(None, namespaces)):
        queries.append(partial(_pods_in, core, namespace, label_selector))
    queries.append(lambda: core.list_pod_for_all_namespaces(label_selector=label_selector).items)
    pods = _first_allowed(*queries, until_found=True)
    if not pods:
        raise MasterNotFoundError("no pod has these labels")
    if len({_namespace_of(pod) for pod in pods}) > 1:
        _refuse_several(pods, "pods")
    # A pod that was evicted stays next to its replacement.
    return next(filter(_is_running, pods), pods[0])


def _is_running(pod: Any) -> bool:
    metadata = getattr(pod, "metadata", None)
    is_leaving = getattr(metadata, "deletion_timestamp", None) is not None
    return getattr(pod.status, "phase", None) == "Running" and not is_leaving


def _pods_in(core: Any, namespace: str, label_selector: str) -> Any:
    pods = core.list_namespaced_pod(namespace, label_selector=label_selector).items
    return pods if len(pods) > 0 else []


def _first_allowed(*queries: Callable[[], Any], until_found: bool = False) -> list[Any]:
    """Return the result of the first query that this user may make.

    Args:
        queries: The functions that query the cluster.
        until_found: True to continue until a query has a result that is not empty.
    """
    # Many users may query only their own namespace, so the other queries are tried after a refusal
    # (HTTP 403).
    refusal: Exception | None = None
    answered = False
    for query in queries:
        try:
            entries = _entries(query())
        except Exception as error:
            if getattr(error, "status", None) != HTTPStatus.FORBIDDEN:
                raise
            refusal = error
            continue
        answered = True
        if entries or not until_found:
            return entries
    if refusal is not None and not answered:
        raise refusal
    return []


def _refuse_several(entries: list[Any], kind: str) -> None:
    if len(entries) > 1:
        names = ", ".join(f"{_namespace_of(entry)}/{entry.metadata.name}" for entry in entries)
        raise MasterNotFoundError(
            f"{len(entries)} {kind} have these labels ({names}): give more labels, or a "
            "k8s_namespace that has only one of them"
        )


def _own_namespace() -> str | None:
    """Return the namespace of the pod in which this process runs, if it runs in one."""
    try:
        return _OWN_NAMESPACE_FILE.read_text().strip() or None
    except OSError:
        return None


def _load_balancer_address(service: Any) -> str:
    """Return the first address of a load balancer."""
    # A list, or None while the load balancer is created.
    ingress = service.status.load_balancer.ingress
    for entrance in (ingress, *_entries(ingress)):
        for address in (getattr(entrance, "ip", None), getattr(entrance, "hostname", None)):
            if isinstance(address, str) and address:
                return address
    raise MasterNotFoundError("its load balancer has no address yet")


def _node_address(core: Any, pod: Any) -> str:
    """Return an address of the node on which a pod runs, preferably an external one."""
    # Users have different permissions: a user who may not list nodes may be allowed to read one.
    # The pod itself, which every user of this function can read, has only the node's internal
    # address.
    name = pod.spec.node_name

    def listed_node() -> Any:
        return _entries(core.list_node(field_selector=f"metadata.name={name}").items)[0]

    sources: tuple[Callable[[], Any], ...] = (
        lambda: _address_of(listed_node()),
        lambda: _address_of(core.read_node(name)),
        lambda: pod.status.host_ip,
    )
    problems = []
    for source in sources:
        try:
            address = source()
        # Of any type: the request may be forbidden, or the node may not exist.
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error)[:100]}")
            continue
        if isinstance(address, str) and address:
            return address
    raise MasterNotFoundError(
        f"its node {name!r} has no address ({'; '.join(problems) or 'none is listed'})"
    )


def _address_of(node: Any) -> Any:
    addresses = _entries(node.status.addresses)
    for kind in ("ExternalIP", "InternalIP"):
        for entry in addresses:
            if entry.type == kind:
                return entry.address
    if not addresses:
        return None
    return addresses[0].address


def _entries(items: Any) -> list[Any]:
    """Return the cluster's answer as a list; it may be None or support only indexing."""
    if items is None:
        return []
    if isinstance(items, Iterable):
        entries = list(items)
        if entries:
            return entries
    try:
        return [items[0]]
    except (IndexError, TypeError, KeyError):
        return []
