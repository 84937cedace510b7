"""Make the folder of a sweep that never ran, from a result folder of the documentation."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.network.description import Network
from mlbench_core.sweep.toml_file import Point, Sweep, load_sweep
from tests.helpers.earlier_runs import earlier_runs

REAL = earlier_runs() / "centralized-sgd-2-r1"
# Megabytes of a worker and messages in a step, and the number of steps with which an algorithm
# reaches the goal.
KINDS = {
    "centralized_sgd": (1.1, 2, 70),
    "power_sgd": (0.09, 4, 95),
    "ef_sign_sgd": (0.04, 2, 85),
    "local_sgd": (0.14, 0.3, 80),
}


@cache
def _real() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((REAL / "result.json").read_text(encoding="utf-8"))
    return content


def step_s(algorithm: str, network: Network | None, workers: int) -> float:
    """Return the seconds of a step: computing, and sending the bytes of the algorithm."""
    megabytes, messages, _ = KINDS.get(algorithm, KINDS["centralized_sgd"])
    compute = 0.4 / workers
    if network is None or workers == 1:
        return compute
    link = network.path(0, workers - 1)
    sending = megabytes * 8e6 / link.bandwidth if link.bandwidth else 0.0
    return compute + 2 * (workers - 1) / workers * sending + messages * link.round_trip_s


def predict(record: RunRecord, network: Network, workers: int) -> float:
    """Predict the time to the goal by the same law as the runs."""
    return (record.steps_to_goal or 0) * step_s(
        str(record.configuration["algorithm"]), network, workers
    )


def time_of(point: Point, sweep: Sweep) -> float:
    """Return the seconds to the goal of a run, which differ by 5 % between seeds."""
    network = sweep.networks[point.network] if point.network else None
    noise = random.Random(point.name).gauss(1, 0.05)
    return (
        KINDS.get(point.algorithm, KINDS["centralized_sgd"])[2]
        * step_s(point.algorithm, network, point.workers)
        * noise
    )


def make(
    folder: Path, text: str, seconds: Callable[[Point, Sweep], float | None] = time_of
) -> Sweep:
    """Write the folder of a sweep.

    Args:
        folder: The folder.
        text: The file of the sweep.
        seconds: Returns the seconds to the goal of a run; None for a run without a folder. A run
            that is longer than the limit is stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.toml").write_text(text, encoding="utf-8")
    sweep = load_sweep(folder / "sweep.toml")
    for point in sweep.points():
        time_s = seconds(point, sweep)
        if time_s is not None:
            _write(folder / "runs" / point.name, point, sweep, time_s)
    return sweep


def _write(folder: Path, point: Point, sweep: Sweep, time_s: float) -> None:
    result = copy.deepcopy(_real())
    reached = sweep.limit_s is None or time_s <= sweep.limit_s
    network = str(sweep.networks[point.network]) if point.network else None
    megabytes, _, steps = KINDS.get(point.algorithm, KINDS["centralized_sgd"])
    trained = time_s if reached else sweep.limit_s or 0.0
    # A name at the master, which ends with random digits.
    result["run"].update(
        name=f"{point.name}-0a1b2c3d", state="finished" if reached else "unfinished"
    )
    result["configuration"].update(
        workers=point.workers, algorithm=point.algorithm, network=network, seed=point.seed
    )
    for rank in ("slowest", "rank_0"):
        result["times"][rank]["train_s"] = trained
        result["goal"]["times"][rank]["train_s"] = trained
        result["goal"]["time_to_goal_s"][rank] = trained
    result["goal"].update(step=steps, reached=reached)
    sent = 0 if point.workers == 1 else int(megabytes * 1e6 * steps * point.workers)
    result["bytes_sent"] = result["bytes_on_wire"] = {
        "all_workers": sent,
        "rank_0": sent // point.workers,
    }
    result["best"]["value"] = 95 + len(point.algorithm) % 3 if reached else 88.0
    if not reached:
        result["goal"].update(
            time_to_goal_s=None, times=None, text=None, value=None, epochs=None, step=None
        )
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    with (REAL / "metrics.jsonl").open(encoding="utf-8") as lines:
        (folder / "metrics.jsonl").write_text(next(lines), encoding="utf-8")
    record = {
        "outcome": "finished" if reached else "limit",
        "seconds": trained + 5,
        "request": dict(point.request),
    }
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
