"""Start runs: check the requests for them, and record all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

from mlbench_master.api.schemas import RunIn
from mlbench_master.database.store import Run, Store
from mlbench_master.engines.interface import Engine
from mlbench_master.events import EventBus
from mlbench_master.runs.new_runs import make_run
from mlbench_master.runs.scheduler import Scheduler

__all__ = ["start_runs"]


def start_runs(
    wanted: Sequence[RunIn],
    store: Store,
    scheduler: Scheduler,
    engine: Engine,
    events: EventBus,
) -> list[Run]:
    """Record runs, which the scheduler then starts.

    Args:
        wanted: The requested runs, with different names.
        store: The database of runs.
        scheduler: It starts them when enough cores and GPUs are free.
        engine: The engine that it starts them with.
        events: The bus that notifies subscribers.

    Returns:
        The runs, which wait for their start.

    Raises:
        ValueError: A request cannot be fulfilled; the message names the field.
        NameInUseError: A run of one of the names exists. No run was recorded.
    """
    # All requests are checked before the first run is recorded.
    runs = store.add_runs([make_run(item, engine) for item in wanted])
    for run in runs:
        events.publish("state", {"id": run.id, "name": run.name, "state": run.state})
    # After the events: the scheduler publishes the next state of a run at once.
    scheduler.wake()
    return runs
