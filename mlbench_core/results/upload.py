"""Turn a result folder into the record and the metrics that a master keeps of a run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlbench_core.files import digest
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.results.summary import goal_message

__all__ = ["metrics_of", "run_record"]

_LONGEST_NAME = 63
_LONGEST_COMMAND = 16_384
_LONGEST_REASON = 4096


def run_record(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a run, the body of ``POST /api/runs/import/``.

    Args:
        folder: The result folder.
        result: From :func:`~mlbench_core.results.folder.read_result`.

    Returns:
        The record. Its ``fingerprint`` depends on the run's id, its start and its raw lines. So it
        is the same for every copy of the folder.
    """
    run, configuration = result["run"], result["configuration"]
    lines = read_lines(folder)
    ended = run["ended_at"]
    if not ended:
        # A run whose workers were killed has no end: the time of its last line counts.
        times = []
        for line in lines:
            if isinstance(line.get("time"), str):
                times.append(line["time"])
        ended = max(times, default=None) or run["started_at"]
    parts = [run["id"], run["started_at"], *map(digest, lines.paths)]
    state = "finished"
    reason: str | None = None
    if run["state"] != "finished":
        state, reason = "failed", str(run["reason"] or run["state"])[:_LONGEST_REASON]
    return {
        "fingerprint": hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        "name": _valid_name(str(run["name"] or folder.name)),
        "state": state,
        "reason": reason,
        "created_at": run["started_at"],
        "finished_at": ended,
        "num_workers": configuration["workers"],
        "num_cpus": configuration.get("threads") or 1,
        "backend": configuration.get("backend"),
        "command": _command(folder),
        "gpu_enabled": configuration.get("device") == "cuda",
        "light_target": bool(configuration.get("light")),
    }


def _valid_name(name: str) -> str:
    """Return a name as a DNS label, as a master requires it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-") or "run"


def _command(folder: Path) -> str:
    """Return the command line in ``environment.json``, or an empty text."""
    try:
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        command = shlex.join(environment["command_line"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    if len(command) > _LONGEST_COMMAND:
        return ""
    return command


def metrics_of(
    folder: Path, result: Mapping[str, Any], run_id: int, prefix: str
) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a run as its workers would have sent them to the master.

    Args:
        folder: The result folder.
        result: From :func:`~mlbench_core.results.folder.read_result`.
        run_id: The run's id at the master.
        prefix: Beginning of the id of each metric. With the same one, the master ignores a repeated
            delivery.

    Yields:
        The statistics of every worker. The goal and the result follow; ``result @ 0`` is the last
        one.
    """
    ended = reached = result["run"]["ended_at"] or result["run"]["started_at"]

    def metric(
        number: int | str, name: str, date: str, value: object, **metadata: Any
    ) -> dict[str, Any]:
        if value is None:
            # A value that is not finite is null in the raw lines.
            text = "nan"
        elif isinstance(value, str):
            text = value
        else:
            text = repr(value)
        return {
            "run_id": run_id,
            "id": f"{prefix}-{number}",
            "name": name,
            "date": date,
            "value": text,
            "metadata": metadata,
        }

    for number, line in enumerate(read_lines(folder)):
        rank, kind, date, name = line["rank"], line["kind"], line.get("time"), line.get("name")
        # Only a damaged folder has lines without them.
        if not isinstance(date, str):
            continue
        if kind == "goal" and rank == 0:
            reached = date
        elif kind == "stat" and isinstance(name, str):
            details = {key: line.get(key) for key in ("epoch", "step", "time_s")}
            yield metric(number, f"{name} @ {rank}", date, line.get("value"), rank=rank, **details)
    goal = result["goal"]
    if goal is not None:
        yield metric("goal", "goal @ 0", ended, json.dumps(goal_message(result)))
        if goal["reached"] and goal["text"]:
            yield metric("text", "TaskResult @ 0", reached, goal["text"])
    yield metric("result", "result @ 0", ended, json.dumps(result))
