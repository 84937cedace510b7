"""An API server as Helm and kubectl need it: it keeps objects, but starts nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

# Kinds by group and version, with the word of their paths; "!" marks kinds without a namespace.
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "LimitRange": "limitranges",
        "Namespace": "!namespaces",
        "PersistentVolume": "!persistentvolumes",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Pod": "pods",
        "ResourceQuota": "resourcequotas",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}
_LISTS = {
    word.strip("!"): {"kind": f"{kind}List", "apiVersion": group}
    for group, kinds in KINDS.items()
    for kind, word in kinds.items()
}
_VERSION = {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}


class Store(ThreadingHTTPServer):
    """The server.

    Attributes:
        objects: The objects by the path at which the API has them.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}

    @property
    def config(self) -> dict[str, Any]:
        """A configuration for kubectl and Helm."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server_address[1]}"}}
            ],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }


class _Handler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: Any, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, reason: str) -> None:
        self._answer(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": reason,
                "code": status,
            },
            status,
        )

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(
            self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        )
        return body

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = address.path
        if path == "/version":
            self._answer(_VERSION)
        elif (
            path in ("/api", "/apis") or path.removeprefix("/apis/").removeprefix("/api/") in KINDS
        ):
            self._answer(_discovery(path))
        elif path in self.server.objects:
            self._answer(self.server.objects[path])
        elif path.rpartition("/")[2] in _LISTS:
            selector = parse_qs(address.query).get("labelSelector", [""])[0]
            wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
            items = [
                entry
                for place, entry in self.server.objects.items()
                if place.rpartition("/")[0] == path
                and wanted.items() <= (entry["metadata"].get("labels") or {}).items()
            ]
            self._answer({**_LISTS[path.rpartition("/")[2]], "metadata": {}, "items": items})
        else:
            self._refuse(404, "NotFound")

    def do_POST(self) -> None:
        body = self._body()
        path = f"{urlsplit(self.path).path}/{body['metadata']['name']}"
        if path in self.server.objects:
            self._refuse(409, "AlreadyExists")
        else:
            self.server.objects[path] = body
            self._answer(body, 201)

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self.server.objects[path] = self._body()
        self._answer(self.server.objects[path])

    def do_PATCH(self) -> None:
        path = urlsplit(self.path).path
        _merge(self.server.objects[path], self._body())
        self._answer(self.server.objects[path])

    def do_DELETE(self) -> None:
        self._body()
        removed = self.server.objects.pop(urlsplit(self.path).path, None)
        self._answer(removed) if removed else self._refuse(404, "NotFound")


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Change an object by a merge patch; lists are replaced."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value


def _discovery(path: str) -> dict[str, Any]:
    """The kinds that the server knows."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        found = [
            {"groupVersion": name, "version": name.partition("/")[2]}
            for name in KINDS
            if "/" in name
        ]
        groups = [
            {
                "name": entry["groupVersion"].partition("/")[0],
                "versions": [entry],
                "preferredVersion": entry,
            }
            for entry in found
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group = path.removeprefix("/apis/").removeprefix("/api/")
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {
            "name": word.strip("!"),
            "singularName": kind.lower(),
            "namespaced": word[0] != "!",
            "kind": kind,
            "verbs": verbs,
        }
        for kind, word in KINDS[group].items()
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group,
        "resources": resources,
    }


@contextmanager
def kubernetes_store() -> Iterator[Store]:
    """Run the server."""
    server = Store()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
