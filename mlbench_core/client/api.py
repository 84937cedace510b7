"""Ask the master for runs, workers and metrics, and send metrics to it.

The methods of :class:`ApiClient` return futures, so a caller waits for the network only if it asks
for a result. Importing this module loads neither ``requests`` nor ``kubernetes``. Creating a client
does not connect to the master.

Example:
    >>> with ApiClient(url="127.0.0.1:5080") as client:
    ...     client.endpoint
    'http://127.0.0.1:5080/api/'
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import datetime
import functools
import json
import math
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlbench_core.client.kubernetes import find_master
from mlbench_core.client.metric_delivery import MetricDelivery
from mlbench_core.client.rest import RestClient, base_url, message_of, path_part
from mlbench_core.client.undelivered_metrics import Outbox
from mlbench_core.errors import MasterAddressError, MasterNotFoundError, MasterRequestError
from mlbench_core.paths import user_folder
from mlbench_core.tasks import TASKS, find_image

if TYPE_CHECKING:
    import requests

    Answer = concurrent.futures.Future[requests.Response]

__all__ = ["MLBENCH_BACKENDS", "MLBENCH_IMAGES", "ApiClient"]


def _official_images() -> dict[str, tuple[str, str]]:
    images = {}
    for task in TASKS.values():
        for image in task.images:
            images[image.title] = (image.reference, task.key)
    images["Custom Image"] = ("custom_image", "")
    return images


MLBENCH_IMAGES: dict[str, tuple[str, str]] = _official_images()
"""Official images of version 3.0: title to the image's name at the master and its task's key."""

MLBENCH_BACKENDS: list[str] = ["MPI", "GLOO", "NCCL", "Custom Backend"]
"""Communication backends, as :meth:`ApiClient.create_run` takes them."""

_CUSTOM_IMAGE = "custom_image"
_CUSTOM_BACKEND = "custom_backend"
_DEFAULT_BACKEND = "gloo"
_FLUSH_AT_CLOSE_S = 5.0
# Shorter than at close(): a process that exits must not seem to hang while the master is away.
_FLUSH_AT_EXIT_S = 3.0
_RETRIES = 3
_JSON = {"Content-Type": "application/json"}
_METRIC_KEYS = frozenset(
    {"run_id", "pod_name", "name", "value", "cumulative", "metadata", "date", "id"}
)


class ApiClient:
    """Ask one master for runs, workers and metrics, and send metrics to it.

    Methods return at once, with a :class:`concurrent.futures.Future` of the ``requests`` response.
    ``result()`` raises ``requests.RequestException`` if the request failed. An answer with an error
    status is a response, not an exception. Every request has a time limit. A GET request is
    repeated with back-off if the connection fails.

    Metrics (:meth:`post_metric`, :meth:`post_metrics`) are delivered in order and in batches. If
    the master does not answer, they are kept on disk in the user's folder and delivered later. If
    the process has ended by then, the next client for the same address that posts or flushes
    delivers them. Each metric has an id, so the master stores it once. A killed process loses only
    the metrics that wait for the answer to their first request, normally those of a few
    milliseconds.

    The workers of a run that has the variable ``MLBENCH_SPOOL`` lose none: they write each metric
    into a file in that folder before :meth:`post_metric` returns, and remove it when the master has
    it. The master of the run stores the remaining metrics when the run has ended. If the variable
    ``MLBENCH_SPOOL_ONLY`` is ``1``, because the workers cannot reach the master, they send nothing,
    and do not wait for it at their end.

    Use it as a context manager or call :meth:`close`. A client that is still open when the process
    exits is closed.

    Args:
        max_workers: Number of threads for requests. Metrics are sent by an additional thread.
        in_cluster: True if this process runs in the master's Kubernetes cluster.
        label_selector: Labels of the master's pod and service in Kubernetes.
        k8s_namespace: Namespace of the master in Kubernetes. Masters in other namespaces are used
            only if this one has none. ``"default"`` means any namespace.
        url: Address of the master (``"host:port"`` or ``"http://host:port"``). By default,
            Kubernetes is asked for it.
        load_config: True to load the cluster's configuration; False if the caller has loaded it.
        token: Token that the master requires, sent as ``Authorization: Bearer``. By default the
            value of ``MLBENCH_TOKEN``, or else the token of a master that this user runs at this
            address.
        timeout_s: Time limit for connecting and for each wait for an answer, in seconds.
        spill_dir: Folder for metrics that cannot be delivered; by default ``MLBENCH_SPOOL`` if
            ``url`` is the master of this run, else ``spool`` in the user's folder.

    Attributes:
        endpoint: ``http://HOST:PORT/api/``.
        executor: The pool that runs the requests.

    Raises:
        ValueError: An argument is out of its range.
        MasterAddressError: ``url`` is not an address. The error is also a ``ValueError``.
        MasterTokenError: ``token`` has characters that a request cannot carry. The error is also a
            ``ValueError``.
        MasterNotFoundError: Kubernetes has no master, or several. The error is also a
            ``ValueError``.
        MissingDependencyError: ``url`` is missing and the package ``kubernetes`` is not installed.
    """

    def __init__(
        self,
        max_workers: int = 5,
        in_cluster: bool = True,
        label_selector: str = "component=master,app=mlbench",
        k8s_namespace: str = "default",
        url: str | None = None,
        load_config: bool = True,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, not {max_workers}")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
        self.in_cluster = in_cluster
        self.timeout_s = timeout_s
        if url is None:
            url = find_master(label_selector, k8s_namespace, in_cluster, load_config)
        token = token or os.environ.get("MLBENCH_TOKEN")
        self._rest = RestClient(url, token, timeout_s, _RETRIES)
        self.endpoint = f"{self._rest.url}/api/"
        # A second client without retries, because MetricDelivery decides when to repeat a request.
        rest = RestClient(url, token, timeout_s)

        # These functions must not refer to self, which would keep the client alive.
        def post(body: str, limit_s: float) -> requests.Response:
            return rest.request(
                "POST", "metrics/", data=body.encode(), headers=_JSON, timeout=limit_s
            )

        def list_runs(limit_s: float) -> requests.Response:
            return rest.request("GET", "runs/", timeout=limit_s)

        outbox = _outbox(self._rest.url, self.endpoint, spill_dir)
        only_keep = not outbox.is_shared and os.environ.get("MLBENCH_SPOOL_ONLY") == "1"
        self._delivery = MetricDelivery(
            post, list_runs, self.endpoint, outbox, timeout_s, only_keep=only_keep
        )
        # The class is looked up here and not at import, so that a test can replace it. Metrics have
        # their own thread, so that a request that hangs delays no metrics, and metrics delay no
        # requests.
        self.executor = concurrent.futures.ThreadPoolExecutor(max_workers=max_workers)
        self._metric_executor = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._finalizer = weakref.finalize(self, _abandon, self._delivery, self._rest, rest)
        # At exit, _close_open_clients tries to deliver first. _abandon alone would only keep the
        # metrics on disk.
        self._finalizer.atexit = False
        _register_at_exit()
        _open_clients.add(self)

    # ------------------------------------------------------------------ metrics

    def get_all_metrics(self) -> Answer:
        """Return all metrics of all pods and runs.

        Returns:
            Future of a dictionary with the keys ``"pod_metrics"`` and ``"run_metrics"``. Their
            values are ``{pod: {metric: [...]}}`` and ``{run: {metric: [...]}}``.
        """
        return self._get("metrics/")

    def get_run_metrics(
        self,
        run_id: str | int,
        since: str | datetime.datetime | None = None,
        summarize: int | None = None,
        metric_filter: str | None = None,
        last_n: int | None = None,
    ) -> Answer:
        """Return metrics of a run.

        Args:
            run_id: Id of the run.
            since: Return nothing older than this date; a ``datetime`` or ISO 8601 text.
            summarize: Return at most this many entries of each metric, by averaging neighbors.
            metric_filter: Return only the metric of exactly this name, for example ``"train_loss @
                0"``.
            last_n: Return only the last N entries of each metric.

        Returns:
            Future of ``{metric: [{"date", "value", "cumulative"}, ...]}``.
        """
        return self._get_metrics(
            "run", run_id, since, summarize, metric_filter=metric_filter, last_n=last_n
        )

    def get_pod_metrics(
        self,
        pod_id: str,
        since: str | datetime.datetime | None = None,
        summarize: int | None = None,
    ) -> Answer:
        """Return metrics of a worker's pod, such as its load.

        Args:
            pod_id: Name of the pod, see :meth:`get_worker_pods`.
            since: Return nothing older than this date; a ``datetime`` or ISO 8601 text.
            summarize: Return at most this many entries of each metric, by averaging neighbors.

        Returns:
            Future of ``{metric: [{"date", "value", "cumulative"}, ...]}``.
        """
        return self._get_metrics("pod", pod_id, since, summarize)

    def download_run_metrics(
        self,
        run_id: str | int,
        since: str | datetime.datetime | None = None,
        summarize: int | None = None,
    ) -> Answer:
        """Return a zip file with the metrics of a run and of its pods.

        Args:
            run_id: Id of the run.
            since: Return nothing older than this date; a ``datetime`` or ISO 8601 text.
            summarize: Return at most this many entries of each metric, by averaging neighbors.

        Returns:
            Future of the response; its ``content`` is the zip file.
        """
        return self._get_metrics("run", run_id, since, summarize, format="zip")

    def post_metric(
        self,
        run_id: str | int,
        name: str,
        value: Any,
        cumulative: bool = False,
        metadata: str | Mapping[str, Any] = "",
        date: str | datetime.datetime | None = None,
    ) -> Answer:
        """Send one metric of a run.

        Args:
            run_id: Id of the run.
            name: Name of the metric, for example ``"train_loss @ 0"``.
            value: A number, a text, or a tensor or array of one element. Infinities and NaN are
                sent as text.
            cumulative: True if the metric grows over time, like a counter.
            metadata: Text to keep with the metric, or a mapping, which is sent as JSON text.
            date: Date of the measurement, a ``datetime`` or ISO 8601 text. A date without a zone is
                in UTC. Default: now.

        Returns:
            Future of the answer to the request that contained the metric. ``result()`` raises
            :class:`~mlbench_core.errors.MasterNotFoundError` if the master does not answer; the
            metric is then kept and delivered later. It raises
            :class:`~mlbench_core.errors.MasterRequestError` if the master refuses it.

        Raises:
            ValueError: The name or the run is empty, or the value has several elements.
            RuntimeError: The client is closed.
        """
        entry = {
            "run_id": run_id,
            "name": name,
            "value": value,
            "cumulative": cumulative,
            "metadata": metadata,
        }
        return self._post([_metric_line({**entry, "date": date})])

    def post_metrics(self, metrics: Iterable[Mapping[str, Any]]) -> Answer:
        """Send many metrics, in this order, in as few requests as possible.

        Args:
            metrics: Mappings with the arguments of :meth:`post_metric`: ``name``, ``value``,
                ``run_id`` (or ``pod_name``), and optionally ``cumulative``, ``metadata``, ``date``,
                ``id``. Of two metrics with the same ``id``, the master stores the first.

        Returns:
            Future of the answer to the request that contained the last metric; see
            :meth:`post_metric`.

        Raises:
            ValueError: ``metrics`` is empty, or one of them is invalid. None of them is sent.
        """
        lines = [_metric_line(metric) for metric in metrics]
        if not lines:
            raise ValueError("metrics must have at least one entry, not none")
        return self._post(lines)

    def flush(self, timeout_s: float = _FLUSH_AT_CLOSE_S) -> bool:
        """Wait until the master has every metric that was posted so far.

        Args:
            timeout_s: Time limit, in seconds.

        Returns:
            True if nothing is left to deliver.
        """
        return self._delivery.flush(timeout_s)

    # ------------------------------------------------------------------ runs and workers

    def get_runs(self) -> Answer:
        """Return a future of the list of all runs."""
        return self._get("runs/")

    def get_run(self, run_id: str | int) -> Answer:
        """Return one run.

        Args:
            run_id: Id of the run.
        """
        return self._get(f"runs/{_id(run_id, 'run_id')}/")

    def create_run(
        self,
        name: str,
        num_workers: int,
        num_cpus: float = 2.0,
        max_bandwidth: int = 1000,
        image: str | None = None,
        backend: str | None = None,
        custom_image_name: str | None = None,
        custom_image_command: str | None = None,
        custom_backend: str | None = None,
        run_all_nodes: bool = False,
        gpu_enabled: bool = False,
        light_target: bool = False,
        *,
        task: str | None = None,
        arguments: Sequence[str] = (),
    ) -> Answer:
        """Start a run of a task, of one of :data:`MLBENCH_IMAGES`, or of a custom image.

        Args:
            name: Name of the run that no other run has: 1 to 63 lowercase letters, digits and
                hyphens, without a hyphen at its ends (a DNS label).
            num_workers: Number of workers.
            num_cpus: Cores of each worker.
            max_bandwidth: Bandwidth of each worker in Mbit/s. A master that cannot limit the
                bandwidth refuses values below the default.
            image: A key of :data:`MLBENCH_IMAGES`, or the name of one of its images.
            backend: One of :data:`MLBENCH_BACKENDS` in any case; Gloo if left out.
            custom_image_name: Name of a custom image, with ``custom_image_command``. A master
                without containers refuses it with status 400. With ``"custom_image"``, the command
                runs on the master's machine.
            custom_image_command: The command of a worker in the custom image.
            custom_backend: Name of a custom backend.
            run_all_nodes: With ``custom_backend``: run the command in every worker. If False, only
                the first worker runs it and has to start the others.
            gpu_enabled: Use GPUs: the command gets ``--gpu``.
            light_target: Train to the task's light goal: the command gets ``--light``.
            task: Key of a task, for example ``"1a"``, instead of an image.
            arguments: Further arguments of the task's script.

        Returns:
            Future of the run with status 201. The status is 400 if the name is not a DNS label, and
            409 if another run has it.

        Raises:
            ValueError: An image or backend is unknown, or an argument is missing or contradicts
                another one.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        if not 0 < num_cpus < math.inf:  # JSON has no infinity
            raise ValueError(f"num_cpus must be a positive number, not {num_cpus}")
        if not 0 < max_bandwidth < math.inf:
            raise ValueError(
                f"max_bandwidth must be a positive number (Mbit/s), not {max_bandwidth}"
            )
        body: dict[str, Any] = {
            "name": name,
            "num_workers": num_workers,
            "num_cpus": num_cpus,
            "max_bandwidth": max_bandwidth,
            "gpu_enabled": _truth(gpu_enabled),
            "light_target": _truth(light_target),
            **_program_fields(image, custom_image_name, custom_image_command, task, arguments),
            **_backend_fields(backend, custom_backend, run_all_nodes),
        }
        return self._request("POST", "runs/", json=body)

    def delete_run(self, run_id: str | int) -> Answer:
        """Delete a run and its metrics, and stop it first if it still runs.

        Args:
            run_id: Id of the run.
        """
        return self._request("DELETE", f"runs/{_id(run_id, 'run_id')}/")

    def stop_run(self, run_id: str | int) -> Answer:
        """Stop a run and keep its metrics.

        Args:
            run_id: Id of the run.

        Returns:
            Future of the run. ``result()`` raises :class:`~mlbench_core.errors.MasterRequestError`
            if the master is of version 3.0, which can only delete a run.
        """
        advice = "cannot stop a run and keep its metrics; delete_run stops it and deletes them"
        path = f"runs/{_id(run_id, 'run_id')}/stop/"
        return self.executor.submit(_request_unknown_to_3_0, self._rest, advice, "POST", path)

    def get_run_logs(self, run_id: str | int, since_line: int = 0) -> Answer:
        """Return the output of a run's workers.

        Args:
            run_id: Id of the run.
            since_line: Number of the first line wanted, from 0. Pass the answer's ``next`` to
                continue.

        Returns:
            Future of ``{"lines": [...], "next": N}``. ``result()`` raises
            :class:`~mlbench_core.errors.MasterRequestError` if the master is of version 3.0, which
            has no logs.
        """
        advice = "has no logs; the last lines are in job_metadata of get_run"
        path, params = f"runs/{_id(run_id, 'run_id')}/logs/", {"since_line": since_line}
        return self.executor.submit(
            _request_unknown_to_3_0, self._rest, advice, "GET", path, params=params
        )

    def get_worker_pods(self) -> Answer:
        """Return a future of the list of workers.

        Each has ``name``, ``labels`` (JSON text), ``phase`` and ``ip``.
        """
        return self._get("pods/")

    # ------------------------------------------------------------------ closing

    def close(self, timeout_s: float = _FLUSH_AT_CLOSE_S) -> bool:
        """Deliver waiting metrics, keep undelivered ones on disk, and end the threads.

        A second call does nothing.

        Args:
            timeout_s: Time limit for the delivery, in seconds.

        Returns:
            True if all metrics were delivered.
        """
        delivered = self._delivery.close(timeout_s)
        # The request of an undelivered metric may hang for the whole time limit, so close() does
        # not wait for it.
        self._metric_executor.shutdown(wait=delivered)
        self.executor.shutdown(wait=True)
        self._finalizer()
        return delivered

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ private methods

    def _post(self, lines: list[str]) -> Answer:
        receipts = self._delivery.put(lines)
        try:
            return self._metric_executor.submit(self._delivery.settle, receipts[-1])
        except RuntimeError:
            # The interpreter is exiting, and executors accept no more work. _close_open_clients
            # sends the metric.
            answer: Answer = concurrent.futures.Future()
            answer.set_exception(
                MasterNotFoundError("the process is exiting: the metric is sent at its end")
            )
            return answer

    def _get(self, path: str, **params: Any) -> Answer:
        # requests leaves out parameters that are None.
        return self._request("GET", path, params=params)

    def _get_metrics(
        self,
        kind: str,
        owner: str | int,
        since: str | datetime.datetime | None,
        summarize: int | None,
        **params: Any,
    ) -> Answer:
        for name, value in (("summarize", summarize), ("last_n", params.get("last_n"))):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or left out, not {value}")
        path = f"metrics/{_id(owner, f'{kind}_id')}/"
        if since is not None:
            since = _date(since)
        return self._get(path, metric_type=kind, since=since, summarize=summarize, **params)

    def _request(self, method: str, path: str, **options: Any) -> Answer:
        return self.executor.submit(self._rest.request, method, path, **options)


def _request_unknown_to_3_0(
    rest: RestClient, advice: str, method: str, path: str, **options: Any
) -> requests.Response:
    """Send a request that masters of version 3.0 do not know; if it is one, raise an error."""
    response = rest.request(method, path, **options)
    # This version's master answers with a "message" that the run is missing. Another 404 means that
    # the path is unknown.
    if response.status_code == HTTPStatus.NOT_FOUND and message_of(response) is None:
        raise MasterRequestError(
            f"the master at {rest.url} {advice}: it does not know /api/{path}, like version 3.0",
            response.status_code,
        )
    return response


# ---------------------------------------------------------------------- clients left open

_open_clients: weakref.WeakSet[ApiClient] = weakref.WeakSet()


# Registered once, and not at import.
@functools.cache
def _register_at_exit() -> None:
    atexit.register(_close_open_clients)


def _close_open_clients() -> None:
    for client in list(_open_clients):
        client._delivery.close(_FLUSH_AT_EXIT_S)


def _abandon(delivery: MetricDelivery, *rest_clients: RestClient) -> None:
    """Keep undelivered metrics on disk without a last attempt, and close all connections."""
    delivery.close()
    for rest in rest_clients:
        rest.close()


# ---------------------------------------------------------------------- arguments


def _outbox(url: str, endpoint: str, folder: str | os.PathLike[str] | None) -> Outbox:
    """Return the outbox for the master at ``url``, by default in the folder of the run or user."""
    if folder is not None:
        return Outbox(Path(folder).absolute(), endpoint)
    own = os.environ.get("MLBENCH_SPOOL")
    # The master that started this run reads the folder. Metrics for another master would be lost
    # there.
    with contextlib.suppress(MasterAddressError):
        if own and base_url(os.environ.get("MLBENCH_MASTER_URL", "")) == url:
            return Outbox(Path(own).absolute(), endpoint, is_shared=False)
    return Outbox(user_folder("spool"), endpoint)


def _id(value: str | int, name: str) -> str:
    """Return an id as a part of a path."""
    if value is None or not str(value).strip():
        raise ValueError(f"{name} must be an id that the master assigned, not {value!r}")
    return path_part(value)


def _date(value: str | datetime.datetime | None) -> str:
    """Format a date for the master; None is now, and a date without a zone is in UTC."""
    if isinstance(value, str):
        return value
    moment = value or datetime.datetime.now(datetime.timezone.utc)
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _plain_value(value: Any) -> str | int | float:
    """Return a metric's value as a type that JSON has, or as text."""
    # A tensor, an array or a scalar of numpy; item() raises ValueError for several elements.
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
    # JSON has neither infinities nor NaN, and a diverged run must still be able to report its loss.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float)):
        return value
    if value is None:
        raise ValueError("value must be a number or a text, not None")
    return str(value)


def new_metric_id() -> str:
    """Return a new id of a metric, 32 hexadecimal digits.

    It begins with the time, so that new ids lie together in the index of the database. Random ones
    would change pages all over the index, which halves the rate at which the master stores metrics.
    """
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def _metric_line(metric: Mapping[str, Any]) -> str:
    """Return one metric as the JSON text for the master, with its own id."""
    unknown = metric.keys() - _METRIC_KEYS
    if unknown:
        raise ValueError(
            f"a metric has no {', '.join(sorted(map(repr, unknown)))}: see post_metric for its keys"
        )
    name = metric.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name must be a text that is not empty, not {name!r}")
    owner = "run_id"
    if metric.get("pod_name") is not None:
        owner = "pod_name"
        if metric.get("run_id") is not None:
            raise ValueError("run_id and pod_name are both given: give one of them")
    _id(metric.get(owner), owner)  # type: ignore[arg-type]
    metadata = metric.get("metadata", "")
    if not isinstance(metadata, str):
        metadata = json.dumps(metadata, default=str)
    body = {
        "id": str(metric.get("id") or new_metric_id()),
        owner: metric[owner],
        "name": name,
        "date": _date(metric.get("date")),
        "value": _plain_value(metric.get("value")),
        "cumulative": bool(metric.get("cumulative", False)),
        "metadata": metadata,
    }
    return json.dumps(body, allow_nan=False)


def _truth(value: bool) -> str:
    """Return ``"true"`` or ``"false"``."""
    # The master of version 3.0 compares with the text "true", so JSON's true would not count.
    return "true" if value else "false"


def _image(value: str) -> str:
    """Return the master's name of an image, from its key in MLBENCH_IMAGES or its name."""
    if _identifier(value) == _CUSTOM_IMAGE:
        return _CUSTOM_IMAGE
    try:
        return find_image(value)[1].reference
    except ValueError:
        raise ValueError(
            f"image must be one of {', '.join(map(repr, MLBENCH_IMAGES))}, not {value!r}: for "
            "another image give custom_image_name and custom_image_command"
        ) from None


def _identifier(title: str) -> str:
    """Return the master's identifier of a title, such as ``custom_image``."""
    return title.lower().replace(" ", "_")


def _program_fields(
    image: str | None,
    custom_image_name: str | None,
    custom_image_command: str | None,
    task: str | None,
    arguments: Sequence[str],
) -> dict[str, Any]:
    """Return the fields of a run that name its task, image or command."""
    # A text is a sequence, too, and each of its characters would become an argument.
    if isinstance(arguments, str):
        raise ValueError(
            f"arguments must be a list, not the text {arguments!r}: give {arguments.split()!r}"
        )
    if task is not None:
        if image is not None or custom_image_name is not None:
            raise ValueError(
                f"task {task!r} and image {image or custom_image_name!r} are both given: "
                "give one of them"
            )
        return {"task": task, "arguments": list(map(str, arguments))}
    # The command of an image has its arguments already; these would be lost.
    if arguments:
        raise ValueError(
            f"arguments must be left out without a task, not {list(arguments)!r}: give task, "
            "or add them to custom_image_command"
        )
    if image is not None:
        chosen = _image(image)
    elif custom_image_name is not None:
        chosen = _CUSTOM_IMAGE
    else:
        raise ValueError(
            "nothing to run: give task, image, or custom_image_name with custom_image_command"
        )
    if chosen == _CUSTOM_IMAGE:
        if not custom_image_name or not custom_image_command:
            raise ValueError(
                "a custom image needs custom_image_name and custom_image_command, "
                f"given are {custom_image_name!r} and {custom_image_command!r}"
            )
        return {
            "image_name": _CUSTOM_IMAGE,
            "custom_image_name": custom_image_name,
            "custom_image_command": custom_image_command,
        }
    if custom_image_name is not None:
        raise ValueError(
            f"image {image!r} and custom_image_name {custom_image_name!r} are both given: "
            "give one of them"
        )
    return {"image_name": chosen}


def _backend_fields(
    backend: str | None, custom_backend: str | None, run_all_nodes: bool
) -> dict[str, Any]:
    """Return the fields of a run that name its communication backend."""
    chosen = None if backend is None else _identifier(backend)
    if chosen is not None and chosen not in map(_identifier, MLBENCH_BACKENDS):
        raise ValueError(
            f"backend must be one of {', '.join(MLBENCH_BACKENDS)}, not {backend!r}: for "
            "another one give custom_backend"
        )
    if custom_backend is not None and chosen not in (None, _CUSTOM_BACKEND):
        raise ValueError(
            f"backend {backend!r} and custom_backend {custom_backend!r} are both given: "
            "give one of them"
        )
    if custom_backend is not None:
        return {
            "backend": _CUSTOM_BACKEND,
            "custom_backend": custom_backend,
            "run_all_nodes": _truth(run_all_nodes),
        }
    if chosen == _CUSTOM_BACKEND:
        raise ValueError(f"backend {backend!r} needs custom_backend, the name of the backend")
    return {"backend": chosen or _DEFAULT_BACKEND}
