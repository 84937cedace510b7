"""A small Kubernetes for tests: an API server over HTTP (kmock), with the Job controller's part
that runs need.

It keeps Jobs, pods, Services, Secrets and logs. A resumed Job gets its pods; tests then say what
becomes of them. It checks neither rights nor fields, and knows only what the engine uses."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

kmock = pytest.importorskip("kmock", reason="needs kmock, which needs Python 3.11")

RANK = "batch.kubernetes.io/job-completion-index"
NAMESPACE = "lab"


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def at(second: int) -> str:
    """A time of the tests, which differ by seconds."""
    return f"2026-01-01T00:00:{second:02}Z"


class FakeKubernetes:
    """The API server and its cluster.

    Attributes:
        requests: (method, resource) of every request, in order.
        broken: Gets each request, and returns an answer that comes instead of the right one, or
            None.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, dict[str, Any]]] = {
            kind: {} for kind in ("jobs", "pods", "services", "secrets")
        }
        self.logs: dict[str, list[tuple[int, str]]] = {}
        self.usage: dict[str, dict[str, Any]] = {}
        self.has_metrics = True
        self.keeps_pods = False
        self.requests: list[tuple[str, str]] = []
        self.broken: Callable[[Any], Any] = lambda request: None
        self.url = ""
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="fake-kubernetes"
        )

    def __enter__(self) -> FakeKubernetes:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def write_config(self, path: Path) -> Path:
        """A kubeconfig for this server."""
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: "
            f"[{{name: c, cluster: {{server: '{self.url}'}}}}]\nusers: "
            f"[{{name: u, user: {{token: t}}}}]\ncontexts: "
            f"[{{name: c, context: {{cluster: c, user: u, namespace: {NAMESPACE}}}}}]\n"
        )
        return path

    def job(self, run_id: int = 1) -> dict[str, Any]:
        return next(
            job
            for job in self.objects["jobs"].values()
            if job["metadata"]["name"].endswith(f"-{run_id}")
        )

    def pod(self, rank: int = 0, run_id: int = 1) -> dict[str, Any]:
        return self.objects["pods"][f"{self.job(run_id)['metadata']['name']}-{rank}"]

    def state(self, rank: int, run_id: int = 1, **state: Any) -> None:
        """Set the state of a worker's container: ``running={}``, ``waiting={...}`` or
        ``terminated={...}``."""
        with self.lock:
            pod = self.pod(rank, run_id)
            pod["spec"]["nodeName"] = f"n{rank}"
            ended = state.get("terminated")
            phase = "Pending" if "waiting" in state else "Running"
            if ended is not None:
                ended.setdefault("finishedAt", now())
                phase = "Failed" if ended.get("exitCode") else "Succeeded"
            pod["status"].update(
                phase=phase, containerStatuses=[{"name": "worker", "state": state}]
            )

    def condition(self, rank: int, run_id: int = 1, **condition: Any) -> None:
        with self.lock:
            self.pod(rank, run_id)["status"].setdefault("conditions", []).append(condition)

    def end(
        self, kind: str = "Complete", run_id: int = 1, reason: str = "", message: str = ""
    ) -> None:
        """End a Job with a condition."""
        with self.lock:
            condition = {
                "type": kind,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastTransitionTime": now(),
            }
            self.job(run_id)["status"] = {"conditions": [condition]}

    def run_all(self, run_id: int = 1) -> None:
        with self.lock:
            for rank in range(self.job(run_id)["spec"]["completions"]):
                self.state(rank, run_id, running={"startedAt": now()})

    def say(self, rank: int, *lines: str, run_id: int = 1, time_ns: int | None = None) -> None:
        """Add lines to the log of a pod."""
        with self.lock:
            log = self.logs.setdefault(self.pod(rank, run_id)["metadata"]["name"], [])
            log += [(time_ns or time.time_ns(), line) for line in lines]

    def remove_job(self, name: str) -> None:
        with self.lock:
            self.objects["jobs"].pop(name)
            owned = [
                (kind, key)
                for kind in ("pods", "services", "secrets")
                for key, item in self.objects[kind].items()
                if item["metadata"]["ownerReferences"][0]["name"] == name
            ]
            for kind, key in owned:
                del self.objects[kind][key]

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with kmock.RawHandler() as handler, kmock.Server(handler) as server:
            handler[re.compile(".*")] << self._answer
            self.url = str(server.url).rstrip("/")
            self._ready.set()
            await self._stop.wait()

    def _answer(self, request: Any) -> Any:
        kind = request.resource.plural
        method = request.method.value
        with self.lock:
            is_metrics = request.resource.group == "metrics.k8s.io"
            part = (
                f"/{request.subresource}"
                if request.subresource
                else ".metrics.k8s.io"
                if is_metrics
                else ""
            )
            self.requests.append((method, kind + part))
            broken = self.broken(request)
            if broken is not None:
                return broken
            if is_metrics:
                return self._metrics()
            if request.subresource == "log":
                return self._log(request)
            return {
                "GET": self._list,
                "POST": self._create,
                "PATCH": self._patch,
                "DELETE": self._delete,
            }[method](kind, request)

    def _list(self, kind: str, request: Any) -> Any:
        wanted = dict(part.split("=") for part in request.params["labelSelector"].split(","))
        items = [
            item
            for item in self.objects[kind].values()
            if wanted.items() <= item["metadata"]["labels"].items()
        ]
        return kmock.Response(payload={"kind": "List", "items": items})

    def _create(self, kind: str, request: Any) -> Any:
        item = request.data
        if item["metadata"]["name"] in self.objects[kind]:
            return error(409, "already exists")
        item["metadata"]["uid"] = str(uuid.uuid4())
        item.setdefault("status", {})
        self.objects[kind][item["metadata"]["name"]] = item
        return kmock.Response(status=201, payload=item)

    def _patch(self, kind: str, request: Any) -> Any:
        job = self.objects[kind].get(request.name)
        if job is None:
            return error(404, "not found")
        job["spec"].update(request.data["spec"])
        if request.data["spec"].get("suspend") is False:
            for rank in range(job["spec"]["completions"]):
                self._create_pod(job, rank)
        return kmock.Response(payload=job)

    def _create_pod(self, job: dict[str, Any], rank: int) -> None:
        name = job["metadata"]["name"]
        template = job["spec"]["template"]
        metadata = {
            "name": f"{name}-{rank}",
            "labels": dict(template["metadata"]["labels"]),
            "annotations": {RANK: str(rank)},
            "ownerReferences": [{"name": name}],
        }
        self.objects["pods"][f"{name}-{rank}"] = {
            "metadata": metadata,
            "spec": {},
            "status": {"phase": "Pending"},
        }

    def _delete(self, kind: str, request: Any) -> Any:
        if request.name not in self.objects[kind]:
            return error(404, "not found")
        if self.keeps_pods:
            self.objects[kind][request.name]["metadata"]["deletionTimestamp"] = now()
        else:
            self.remove_job(request.name)
        return kmock.Response(payload={"status": "Success"})

    def _log(self, request: Any) -> Any:
        pod = self.objects["pods"].get(request.name)
        if pod is None:
            return error(404, "pod not found")
        assert request.params["timestamps"] == "true"
        since = request.params.get("sinceTime")
        begin = (
            int(datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp()) * 10**9
            if since
            else 0
        )
        text = "".join(
            f"{stamp(ns)} {line}" for ns, line in self.logs.get(request.name, []) if ns >= begin
        )
        return kmock.Response(payload=text.encode())

    def _metrics(self) -> Any:
        if not self.has_metrics:
            return error(404, "the server could not find the requested resource")
        items = [
            {
                "metadata": {"name": name},
                "timestamp": now(),
                "containers": [{"name": "worker", "usage": usage}],
            }
            for name, usage in self.usage.items()
        ]
        return kmock.Response(payload={"items": items})


def stamp(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns // 10**9, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09}Z"


def error(status: int, message: str) -> Any:
    """An answer of the API that says what went wrong."""
    return kmock.Response(status=status, payload={"kind": "Status", "message": message})


def cut(request: Any) -> Any:
    """Close the connection without an answer."""
    request._raw_request.transport.abort()
    return error(500, "nobody reads this")
