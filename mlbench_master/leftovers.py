"""Store the metrics that the workers of a run could not deliver before they ended.

A worker keeps metrics in an outbox while the master does not answer, see :mod:`mlbench_core.client.outbox`. The workers
of a run have their own folder for it. The master reads it at the end of the run, so no metric depends on the address,
the port or the token that the workers knew.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from mlbench_core.client.delivery import MAX_BATCH
from mlbench_core.client.outbox import LOST_NAME, Outbox
from mlbench_master.dates import now_us, to_us
from mlbench_master.schemas import MetricIn
from mlbench_master.store import NewMetric, Store, pod_owner, run_owner

__all__ = ["new_metric", "store_leftovers"]

# An outbox has at most 1 GiB, and a batch takes up to 8 MiB of it or 10,000 metrics.
_MOST_BATCHES = 2000


def store_leftovers(spool: Path, store: Store) -> str:
    """Store all metrics of a folder of outboxes and delete them there; ids keep a repetition harmless.

    Args:
        spool: The folder. It belongs to workers, so every file may have any content.
        store: The database.

    Returns:
        A sentence on the metrics that are missing; empty if none is.

    Raises:
        SQLAlchemyError: The database failed; the metrics that it has not stored stay in the folder.
    """
    problems = []
    refused = 0
    for path in sorted(spool.glob("*.sqlite3")):
        if not path.is_file():  # opening a pipe could block
            continue
        outbox = Outbox(spool, path.stem)
        try:
            # A file of a worker may insert rows by itself, so the loop has an end.
            for _ in range(_MOST_BATCHES):
                rows = outbox.read(MAX_BATCH)
                if not rows:
                    break
                refused += _store([line for _, line in rows], store)
                # A full disk has no room for the journal; the outbox then no longer reads these rows.
                with contextlib.suppress(OSError, sqlite3.Error):
                    outbox.delete(key for key, _ in rows)
        except SQLAlchemyError:
            raise
        except Exception as error:  # a damaged file must not keep the run from ending
            problems.append(f"an unknown number in {path}, which cannot be read ({error})")
    if refused:
        problems.append(f"{refused} that are not valid")
    lost = [re.fullmatch(LOST_NAME, path.name) for path in spool.glob("*")]
    if count := sum(int(name[1]) for name in lost if name is not None):
        problems.append(f"{count} that a worker could not keep on disk")
    damaged = len(list(spool.glob("*.damaged-*[0-9]")))
    if damaged:
        problems.append(f"an unknown number in {damaged} damaged file(s) in {spool}")
    return f"metrics are missing: {', '.join(problems)}" if problems else ""


def new_metric(metric: MetricIn, now: int) -> NewMetric:
    """Return a metric as the database takes it.

    Args:
        metric: The metric as a client sent it.
        now: The date of a metric without one, in microseconds since 1970.
    """
    return NewMetric(
        owner=pod_owner(metric.pod_name) if metric.run_id is None else run_owner(metric.run_id),  # type: ignore[arg-type]
        name=metric.name,
        date=now if metric.date is None else to_us(metric.date),
        value=metric.value,
        cumulative=metric.cumulative,
        extra=metric.metadata,
        client_id=metric.id,
    )


def _store(lines: list[str], store: Store) -> int:
    """Store metrics, and return the number of those that the API would refuse."""
    metrics = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            metrics.append(MetricIn.model_validate(json.loads(line)))
    known = store.existing_runs(metric.run_id for metric in metrics if metric.run_id is not None)
    metrics = [metric for metric in metrics if metric.run_id is None or metric.run_id in known]
    now = now_us()
    store.add_metrics([new_metric(metric, now) for metric in metrics])
    return len(lines) - len(metrics)
