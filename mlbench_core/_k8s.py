"""Where the master is, asked of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlbench_core.errors import MasterNotFoundError, require

__all__ = ["find_master"]

_PORT_IN_POD = 80


def find_master(label_selector: str, namespace: str, in_cluster: bool, load_config: bool) -> str:
    """Find the master's address.

    Inside the cluster that is the address of its pod, port 80; outside, what its service offers: a port on the
    pod's node (``NodePort``), an address of the cluster (``ClusterIP``), or a load balancer.

    Args:
        label_selector: Labels of the master's pod and service.
        namespace: Namespace in which it runs.
        in_cluster: Whether this process runs in the cluster.
        load_config: Whether to load the cluster's configuration first; False where the caller did.

    Returns:
        ``"HOST:PORT"``.

    Raises:
        MasterNotFoundError: There is no such pod or service, or the cluster does not answer.
        MissingDependencyError: The package ``kubernetes`` is not installed.
    """
    client: Any = require("kubernetes.client", "kubernetes")
    config: Any = require("kubernetes.config", "kubernetes")
    where = f"labels {label_selector!r} in namespace {namespace!r}"
    try:
        if load_config:
            config.load_incluster_config() if in_cluster else config.load_kube_config()
        core = client.CoreV1Api()
        query = (core, namespace, label_selector)
        return _in_cluster(*query) if in_cluster else _outside(*query)
    except MasterNotFoundError as error:
        raise MasterNotFoundError(
            f"no master found through Kubernetes ({where}): {error}; start one, correct the labels, or give its url"
        ) from None
    except Exception as error:  # the client raises urllib3's, its own and the configuration's errors
        raise MasterNotFoundError(
            f"no master found through Kubernetes ({where}): {type(error).__name__}: {str(error)[:300]}; "
            "check the cluster's configuration or give the master's url"
        ) from error


def _in_cluster(core: Any, namespace: str, label_selector: str) -> str:
    pod = _master_pod(core, namespace, label_selector)
    if not pod.status.pod_ip:
        raise MasterNotFoundError("its pod has no address yet")
    return f"{_bracketed(pod.status.pod_ip)}:{_PORT_IN_POD}"


def _outside(core: Any, namespace: str, label_selector: str) -> str:
    services = _entries(core.list_namespaced_service(namespace, label_selector=label_selector).items)
    if not services:
        raise MasterNotFoundError("there is no such service")
    service = services[0]
    ports = _entries(service.spec.ports)
    if not ports:
        raise MasterNotFoundError("its service has no port")
    kind = service.spec.type
    if kind == "ClusterIP":
        return f"{_bracketed(service.spec.cluster_ip)}:{ports[0].port}"
    if kind == "LoadBalancer":
        return f"{_bracketed(_load_balancer_address(service))}:{ports[0].port}"
    if kind == "NodePort":
        pod = _master_pod(core, namespace, label_selector)
        return f"{_bracketed(_node_address(core, pod))}:{ports[0].node_port}"
    raise MasterNotFoundError(f"its service is of type {kind!r}; known are NodePort, ClusterIP, LoadBalancer")


def _master_pod(core: Any, namespace: str, label_selector: str) -> Any:
    pods = core.list_namespaced_pod(namespace, label_selector=label_selector).items
    if len(pods) == 0:
        raise MasterNotFoundError("there is no such pod")
    return pods[0]


def _load_balancer_address(service: Any) -> str:
    """The address of the first entrance of a load balancer; ``ingress`` is a list, or None while it is being made."""
    ingress = service.status.load_balancer.ingress
    for entrance in (ingress, *_entries(ingress)):
        for address in (getattr(entrance, "ip", None), getattr(entrance, "hostname", None)):
            if isinstance(address, str) and address:
                return address
    raise MasterNotFoundError("its load balancer has no address yet")


def _node_address(core: Any, pod: Any) -> str:
    """An address of the node on which a pod runs, from outside the cluster where there is one.

    Whoever may not list nodes may still read one, or knows the node's inner address from the pod itself.
    """
    name = pod.spec.node_name
    sources: tuple[Callable[[], Any], ...] = (
        lambda: _address_of(_entries(core.list_node(field_selector=f"metadata.name={name}").items)[0]),
        lambda: _address_of(core.read_node(name)),
        lambda: pod.status.host_ip,
    )
    problems = []
    for source in sources:
        try:
            address = source()
        except Exception as error:  # forbidden, or no such node
            problems.append(f"{type(error).__name__}: {str(error)[:100]}")
            continue
        if isinstance(address, str) and address:
            return address
    raise MasterNotFoundError(f"its node {name!r} has no address ({'; '.join(problems) or 'none is listed'})")


def _address_of(node: Any) -> Any:
    addresses = _entries(node.status.addresses)
    for kind in ("ExternalIP", "InternalIP"):
        for entry in addresses:
            if entry.type == kind:
                return entry.address
    return addresses[0].address if addresses else None


def _entries(items: Any) -> list[Any]:
    """A list of the cluster's answer: a list, None, or an object that can only be indexed."""
    if items is None:
        return []
    entries = list(items) if isinstance(items, Iterable) else []
    if not entries:
        try:
            entries = [items[0]]
        except (IndexError, TypeError, KeyError):
            return []
    return entries


def _bracketed(host: str) -> str:
    """An IPv6 address in the brackets that a URL wants; anything else as it is."""
    return f"[{host}]" if ":" in str(host) else host
