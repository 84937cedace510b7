"""Remember the clusters that ``mlbench create-cluster`` made, and which of them the commands use.

One file in the user's folder holds all of them, with the tokens of their masters, so only its owner
can read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlbench_core import files
from mlbench_core.client import settings
from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder

__all__ = [
    "PROVIDERS",
    "Cluster",
    "choose_cluster",
    "current_cluster",
    "find_cluster",
    "forget_cluster",
    "read_clusters",
    "remember_cluster",
]

PROVIDERS = ("kind", "gcloud", "aws", "azure")
"""Where a cluster can be: in containers of this machine (kind), or at a cloud."""

_FILE = "clusters.json"
_KINDS: dict[str, Any] = {
    "name": str,
    "provider": str,
    "num_workers": int,
    "port": int,
    "token": str | None,
    "key": str | None,
}


@dataclass(frozen=True)
class Cluster:
    """A cluster of this user.

    Attributes:
        name: Its name, also for the program that created it.
        provider: One of :data:`PROVIDERS`.
        num_workers: The number of workers for which it was made.
        port: The port on 127.0.0.1 at which its master is reached.
        token: The token of the master, or None while it is not known.
        key: The key with which the master proves its identity, or None if it cannot be proven.
    """

    name: str
    provider: str
    num_workers: int
    port: int
    token: str | None = None
    key: str | None = None

    @property
    def url(self) -> str:
        """Return the address of the master."""
        return f"http://127.0.0.1:{self.port}"

    def public(self) -> dict[str, Any]:
        """Return the fields without the secrets, to show them on a screen."""
        names = ("name", "provider", "num_workers", "url")
        return {name: getattr(self, name) for name in names}


def read_clusters() -> dict[str, Cluster]:
    """Return all clusters by name; damaged entries are left out."""
    clusters: dict[str, Cluster] = {}
    stored = settings.read(_FILE).get("clusters")
    if not isinstance(stored, dict):
        return clusters
    for name, entry in stored.items():
        cluster = _parse(entry)
        if cluster is not None and cluster.name == name:
            clusters[name] = cluster
    return clusters


def find_cluster(name: str, provider: str | None = None) -> Cluster:
    """Return the cluster with a name.

    Args:
        name: The name, which includes the number of workers: ``my-cluster-2``.
        provider: Where the cluster must be; by default anywhere.

    Raises:
        ConfigurationError: The cluster does not exist; the message names those that do.
    """
    clusters = read_clusters()
    cluster = clusters.get(name)
    if cluster is not None and provider in (None, cluster.provider):
        return cluster
    wanted = name
    if provider:
        wanted = f"{provider} {name}"
    names = ", ".join(f"{other.provider} {other.name}" for other in clusters.values())
    raise ConfigurationError(f"cluster {wanted!r} does not exist; clusters: {names or 'none yet'}")


def current_cluster() -> Cluster | None:
    """Return the cluster whose master the commands use, or None for that of this machine."""
    name = settings.read(_FILE).get("current")
    if not isinstance(name, str):
        return None
    return read_clusters().get(name)


def remember_cluster(cluster: Cluster) -> None:
    """Store a cluster, in place of one of the same name."""
    with _changing() as stored:
        stored["clusters"][cluster.name] = asdict(cluster)


def choose_cluster(name: str | None) -> None:
    """Choose the cluster that the commands use; None for the master of this machine."""
    with _changing() as stored:
        stored["current"] = name


def forget_cluster(name: str) -> None:
    """Remove a cluster.

    If it was the chosen one, the commands use the master of this machine again.
    """
    with _changing() as stored:
        stored["clusters"].pop(name, None)
        if stored.get("current") == name:
            stored["current"] = None


@contextmanager
def _changing() -> Iterator[dict[str, Any]]:
    """Read the file, let the block change its content, and write it; one process at a time."""
    # Without the lock, two commands that run at once could lose the change of one of them.
    with files.lock(user_folder("clusters.lock")):
        stored = settings.read(_FILE)
        if not isinstance(stored.get("clusters"), dict):
            stored["clusters"] = {}
        yield stored
        settings.remember(_FILE, stored)


def _parse(entry: Any) -> Cluster | None:
    """Return the cluster of an entry of the file, or None if the entry is damaged."""
    if not isinstance(entry, dict):
        return None
    values: dict[str, Any] = {field.name: entry.get(field.name) for field in fields(Cluster)}
    if not all(isinstance(values[name], kind) for name, kind in _KINDS.items()):
        return None
    return Cluster(**values)
