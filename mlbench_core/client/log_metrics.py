"""Send metrics of a worker to the master that the environment names.

A training script or :class:`~mlbench_core.tracking.tracker.Tracker` calls :meth:`LogMetrics.log`.
The client is created on first use. Training neither waits for it nor fails because of it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlbench_core.errors import MissingDependencyError

if TYPE_CHECKING:
    from mlbench_core.client.api import ApiClient

__all__ = ["LogMetrics"]

logger = logging.getLogger(__name__)

_FLUSH_AT_CLOSE_S = 5.0

# Process id, address of the master, and token.
_Key = tuple[int, "str | None", "str | None"]


class _SharedClient:
    """The client of this process, for the master that the environment names at the moment.

    A forked child gets a new client, because threads do not survive a fork. A new client is also
    created if ``MLBENCH_MASTER_URL`` or ``MLBENCH_TOKEN`` changes, because a metric goes to the
    master that the environment named when the metric was logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: ApiClient | None = None
        self._key: _Key | None = None
        self._watches_forks = False
        self._lost = 0
        self._problem = ""

    def _forget(self) -> None:
        """Drop the parent's client in a forked child; it stays open, for the parent's metrics."""
        # Another thread of the parent may have held the lock during the fork. In the child, it
        # would never be released.
        self._lock = threading.Lock()
        self._client = None
        self._key = None
        self._lost = 0

    def get(self, counts_lost: bool = True) -> ApiClient | None:
        """Return the client, or None if no master is named or it cannot be found.

        Args:
            counts_lost: True if a metric is lost without a client.
        """
        url = os.environ.get("MLBENCH_MASTER_URL") or None
        if url is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
            return None
        key = (os.getpid(), url, os.environ.get("MLBENCH_TOKEN") or None)
        with self._lock:
            if key != self._key:
                if self._client is not None:
                    self._client.close()
                # A failure is remembered, too, because a search of the cluster for each metric
                # would slow training.
                self._client, self._key = self._make(url), key
            if self._client is None and counts_lost:
                self._lost += 1
            return self._client

    def _make(self, url: str | None) -> ApiClient | None:
        from mlbench_core.client.api import ApiClient

        if not self._watches_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
            self._watches_forks = True
        try:
            return ApiClient(max_workers=1, in_cluster=True, url=url)
        except MissingDependencyError as error:
            self._problem = (
                "this process runs in a Kubernetes cluster, but its master cannot be found: "
                f"{error}, or set MLBENCH_MASTER_URL to the address of the master"
            )
        except Exception as error:
            self._problem = str(error)
        logger.error("metrics are not reported, the run goes on: %s", self._problem)
        atexit.register(self._report_lost)
        return None

    def _report_lost(self) -> None:
        """Log the number of metrics that were not sent.

        It is called at exit, so a user sees it at the end.
        """
        atexit.unregister(self._report_lost)
        lost, self._lost = self._lost, 0
        if lost:
            logger.error("%d metric(s) of this process were not reported: %s", lost, self._problem)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the master has every logged metric; return True if none is left to deliver."""
        with self._lock:
            client = self._client
        return client is None or client.flush(timeout_s)

    def close(self) -> None:
        """Deliver for a few seconds, keep undelivered metrics on disk, and end the threads."""
        with self._lock:
            client, self._client, self._key = self._client, None, None
        self._report_lost()
        if client is not None:
            client.close()


_shared = _SharedClient()


class _Gathered(threading.local):
    """The metrics of a block that is sent at once; None outside of one."""

    metrics: list[dict[str, Any]] | None = None


_gathered = _Gathered()


def _send(client: ApiClient, metric: dict[str, Any]) -> None:
    try:
        client.post_metrics([metric])
    # The value may be a tensor of several elements, for example. Training must not end because a
    # metric cannot be sent.
    except Exception as error:
        logger.warning(
            "metric %r = %r of run %r could not be sent: %s",
            metric["name"],
            metric["value"],
            metric["run_id"],
            error,
        )


class LogMetrics:
    """Send metrics of this worker to the master that the environment names.

    ``MLBENCH_MASTER_URL`` names the master. If it is not set and the process runs in a Kubernetes
    cluster (``KUBERNETES_SERVICE_HOST`` is set), the master is found through Kubernetes. Otherwise
    metrics are ignored. Metrics are delivered in order in the background, see
    :class:`~mlbench_core.client.api.ApiClient`.
    """

    @staticmethod
    def log(run_id: str | int, rank: int, epoch: int, metric_name: str, value: Any) -> None:
        """Send one value; returns at once and never raises because of the master.

        Args:
            run_id: Id of the run, as the master gave it.
            rank: Rank of this worker. The name of the metric is ``"<metric_name> @ <rank>"``.
            epoch: Current epoch, sent with the rank as JSON metadata.
            metric_name: Name of the metric without the rank.
            value: A number, a text, or a tensor or array of one element.

        Example:
            >>> # Without a master, the value is ignored.
            >>> LogMetrics.log(run_id=1, rank=0, epoch=2, metric_name="val_loss", value=0.25)
        """
        client = _shared.get()
        if client is None:
            return
        metric = {
            "run_id": run_id,
            "name": f"{metric_name} @ {rank}",
            "value": value,
            "metadata": json.dumps({"rank": rank, "epoch": epoch}),
        }
        if _gathered.metrics is None:
            _send(client, metric)
        else:
            _gathered.metrics.append(metric)

    @staticmethod
    @contextlib.contextmanager
    def together() -> Iterator[None]:
        """Send the metrics that this thread logs in the block at once, at its end.

        Each sending is a transaction of a database on the disk. 20 numbers at the end of an epoch
        took 15 ms of processor time as 20 of them.
        """
        _gathered.metrics = []
        try:
            yield
        finally:
            metrics, _gathered.metrics = _gathered.metrics, None
            client = _shared.get() if metrics else None
            if client is not None:
                try:
                    client.post_metrics(metrics)
                # The others are right if one of them is wrong.
                except Exception:
                    for metric in metrics:
                        _send(client, metric)

    @staticmethod
    def connect() -> None:
        """Create the client now, without a request; otherwise the first :meth:`log` does.

        Call it before the interpreter exits in order to log metrics while it does: then no client
        can be created.
        """
        _shared.get(counts_lost=False)

    @staticmethod
    def flush(timeout_s: float = _FLUSH_AT_CLOSE_S) -> bool:
        """Wait until the master has every logged metric.

        Args:
            timeout_s: Time limit, in seconds.

        Returns:
            True if no metric is left to deliver, or if no master is named.
        """
        return _shared.flush(timeout_s)

    @staticmethod
    def close() -> None:
        """Deliver waiting metrics, keep undelivered ones on disk, and end the threads."""
        _shared.close()
