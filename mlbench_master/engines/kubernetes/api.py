"""Speak to the API of Kubernetes, in one namespace, through the client of Kubernetes.

Answers are dictionaries with the names of the API. The client's own objects take about a
millisecond each to build, which adds up in a list of a thousand pods. Each method needs one right;
``docs/howto/kubernetes.md`` has the table.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import responses
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlbench_core.errors import ConfigurationError, require
from mlbench_master.engines.interface import EngineError
from mlbench_master.engines.kubernetes.manifests import CONTAINER
from mlbench_master.engines.kubernetes.states import is_on_lost_node

__all__ = ["ApiError", "KubernetesApi"]

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT_S = (5.0, 60.0)  # to connect, and between two parts of an answer
_LOG_TIMEOUT_S = (5.0, 10.0)
_LOG_PART_BYTES = 65_536
_MERGE = "application/merge-patch+json"
_LONGEST_MESSAGE = 400
_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_COLLECTED_S = 30.0


class ApiError(EngineError):
    """Kubernetes does not answer or refuses a request.

    Args:
        message: One line.
        status: The status of HTTP; 0 if there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """The API of Kubernetes in one namespace.

    The configuration is that of ``kubectl`` (``KUBECONFIG`` or ``~/.kube/config``); without one,
    that of the pod in which this process runs.

    Args:
        namespace: The namespace; empty for that of this pod, or of kubectl's context.

    Attributes:
        namespace: The namespace.

    Raises:
        ConfigurationError: There is no configuration.
        MissingDependencyError: The package ``kubernetes`` is not installed.
    """

    def __init__(self, namespace: str = "") -> None:
        client: Any = require("kubernetes.client", "kubernetes")
        config: Any = require("kubernetes.config", "kubernetes")
        # The client passes on the errors of urllib3.
        from urllib3.exceptions import HTTPError

        self._errors = (client.ApiException, HTTPError, OSError)
        configuration = client.Configuration()
        # The client reads KUBECONFIG when it is imported, which may be earlier.
        file = os.environ.get("KUBECONFIG") or None
        try:
            config.load_kube_config(config_file=file, client_configuration=configuration)
            active = config.list_kube_config_contexts(config_file=file)[1]
            default_namespace = active["context"].get("namespace", "")
        except config.ConfigException as problem:
            try:
                config.load_incluster_config(client_configuration=configuration)
                default_namespace = _OWN_NAMESPACE.read_text().strip()
            except (config.ConfigException, OSError) as error:
                raise ConfigurationError(
                    f"the engine kubernetes needs the configuration of kubectl ({problem}), "
                    f"or to run in a pod ({error}): "
                    "set KUBECONFIG, or start the master in the cluster"
                ) from error
        self.namespace = namespace or default_namespace or "default"
        self._client = client.ApiClient(configuration)

    def jobs(self, selector: str) -> list[dict[str, Any]]:
        """Return the Jobs with some labels."""
        return self._list("/apis/batch/v1", "jobs", selector)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Return the pods with some labels."""
        return self._list("/api/v1", "pods", selector)

    def pod_metrics(self, selector: str) -> list[dict[str, Any]]:
        """Return the load of the pods with some labels; it needs a metrics server."""
        return self._list("/apis/metrics.k8s.io/v1beta1", "pods", selector)

    def create_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a Job and return it."""
        return self._request("POST", self._path("/apis/batch/v1", "jobs"), body=manifest)

    def create_service(self, manifest: dict[str, Any]) -> None:
        """Create a Service that belongs to a Job."""
        self._create_owned("services", manifest)

    def create_secret(self, manifest: dict[str, Any]) -> None:
        """Create a Secret that belongs to a Job."""
        self._create_owned("secrets", manifest)

    def patch_job(self, name: str, spec: dict[str, Any]) -> None:
        """Change fields of the specification of a Job."""
        self._request("PATCH", self._path("/apis/batch/v1", "jobs", name), body={"spec": spec})

    def delete_job(self, name: str) -> None:
        """Begin to delete a Job, which ends its pods first; do nothing if it does not exist."""
        try:
            body = {"propagationPolicy": "Foreground"}
            self._request("DELETE", self._path("/apis/batch/v1", "jobs", name), body=body)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    def delete_and_wait(self, name: str, selector: str, timeout_s: float) -> None:
        """Delete a Job, and wait until its pods are gone.

        Args:
            name: The Job.
            selector: Selector of the Job and of its pods.
            timeout_s: Seconds to wait.

        Raises:
            ApiError: Kubernetes does not answer, or the pods are not gone in time.
        """
        deadline = time.monotonic() + timeout_s
        pause = _PAUSE_S
        self.delete_job(name)
        while True:
            pods = self.pods(selector)
            # Nobody can end a program on a node that does not answer.
            left = [pod["metadata"]["name"] for pod in pods if not is_on_lost_node(pod)]
            # Without pods, the Job must be gone, too: it could still create them.
            if not left and (pods or not self.jobs(selector)):
                return
            if time.monotonic() > deadline:
                names = ", ".join(left[:3]) or name
                raise ApiError(
                    f"Kubernetes has not ended {names} within {timeout_s:g} s: look at its "
                    "node; try again"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def log(self, pod: str, since: str) -> Iterator[bytes]:
        """Yield the parts of the log of a pod's worker, with a date before each line.

        Args:
            pod: The pod's name.
            since: Date of the first line wanted, in whole seconds; empty for the beginning.

        Raises:
            ApiError: The log cannot be read.
        """
        query = [("container", CONTAINER), ("timestamps", "true")]
        if since:
            query.append(("sinceTime", since))
        path = f"{self._path('/api/v1', 'pods', pod)}/log"
        response = self._send("GET", path, query=query, timeout_s=_LOG_TIMEOUT_S)
        try:
            with closing(response):
                yield from response.stream(_LOG_PART_BYTES)
        except self._errors as error:
            raise _api_error(error) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._client.rest_client.pool_manager.clear()

    def _path(self, group: str, resource: str, name: str = "") -> str:
        # Names come from the API, and from the settings.
        path = f"{group}/namespaces/{quote(self.namespace, safe='')}/{resource}"
        if name:
            path = f"{path}/{quote(name, safe='')}"
        return path

    def _create_owned(self, resource: str, manifest: dict[str, Any]) -> None:
        deadline = time.monotonic() + _COLLECTED_S
        while True:
            try:
                self._request("POST", self._path("/api/v1", resource), body=manifest)
                return
            except ApiError as error:
                # Kubernetes deletes the objects of an earlier Job of this name some time after the
                # Job itself.
                if error.status != HTTPStatus.CONFLICT or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _list(self, group: str, resource: str, selector: str) -> list[dict[str, Any]]:
        # In one piece: a list in pages would need more calls the more jobs there are, and can
        # expire between two pages.
        query = [("labelSelector", selector)]
        items = self._request("GET", self._path(group, resource), query=query).get("items")
        if not isinstance(items, list):
            return []
        return [item for item in items if isinstance(item, dict)]

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        try:
            answer = json.loads(self._send(method, path, query=query, body=body).data)
        except (ValueError, *self._errors) as error:
            raise _api_error(error) from error
        if not isinstance(answer, dict):
            return {}
        return answer

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: dict[str, Any] | None = None,
        timeout_s: tuple[float, float] = _TIMEOUT_S,
    ) -> Any:
        headers = {"Accept": "application/json, */*"}
        if body is not None:
            headers["Content-Type"] = "application/json"
            if method == "PATCH":
                headers["Content-Type"] = _MERGE
        try:
            return self._client.call_api(
                path,
                method,
                query_params=query or [],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=timeout_s,
            )
        except self._errors as error:
            raise _api_error(error) from error


def _api_error(error: Exception) -> ApiError:
    """Return an error of the client as one line."""
    if isinstance(error, ApiError):
        return error
    status = getattr(error, "status", None) or 0
    if not status:
        return ApiError(
            f"Kubernetes does not answer: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        )
    # A proxy in between may answer with a status that HTTP does not define, such as 520.
    message = getattr(error, "reason", "") or responses.get(status, "no reason was given")
    with suppress(ValueError, KeyError, TypeError):
        message = json.loads(getattr(error, "body", b""))["message"] or message
    line = " ".join(str(message).split())
    return ApiError(
        f"Kubernetes refused a request: {status}: {line}"[:_LONGEST_MESSAGE], int(status)
    )
