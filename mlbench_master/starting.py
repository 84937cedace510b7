"""Start runs: check the requests for them, and record all of them or none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlbench_master.commands import check_options, resolve_backend, resolve_command
from mlbench_master.events import EventBus
from mlbench_master.launchers.interface import Launcher
from mlbench_master.scheduler import Scheduler
from mlbench_master.schemas import RunIn
from mlbench_master.store import Run, Store, new_run

__all__ = ["start_runs"]

_RUN_FIELDS = {"name", "num_workers", "num_cpus", "max_bandwidth", "gpu_enabled", "light_target"}


def start_runs(
    wanted: Sequence[RunIn], store: Store, scheduler: Scheduler, launcher: Launcher, events: EventBus
) -> list[Run]:
    """Record runs, which the scheduler then starts.

    Args:
        wanted: The requested runs, with different names.
        store: The database of runs.
        scheduler: It starts them when enough cores and GPUs are free.
        launcher: The launcher that it starts them with.
        events: The bus that notifies subscribers.

    Returns:
        The runs, which wait for their start.

    Raises:
        ValueError: A request cannot be fulfilled; the message names the field.
        NameInUseError: A run of one of the names exists. No run was recorded.
    """
    runs = store.add_runs([_make_run(item, launcher) for item in wanted])
    for run in runs:
        events.publish("state", {"id": run.id, "name": run.name, "state": run.state})
    scheduler.wake()
    return runs


def _make_run(wanted: RunIn, launcher: Launcher) -> Run:
    image, command = resolve_command(wanted, launcher.uses_image(wanted.engine_options))
    backend = resolve_backend(wanted)
    all_nodes, notes = check_options(wanted, launcher)
    return new_run(
        image=image,
        command=command,
        backend=backend,
        run_all_nodes=all_nodes,
        job_metadata=json.dumps(_first_metadata(wanted, notes)),
        **wanted.model_dump(include=_RUN_FIELDS),
    )


def _first_metadata(wanted: RunIn, notes: list[str]) -> dict[str, Any]:
    known: dict[str, Any] = {"notes": notes}
    if wanted.exclusive:
        known["exclusive"] = True
    if wanted.engine_options:
        known["engine_options"] = wanted.engine_options
    return known
