"""A master in memory, which can fail at any request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlbench_core.errors import MasterRequestError
from tests.results.helpers import write_run


class Killed(BaseException):
    """The process of the sweep is killed."""


def plain(run: str) -> str:
    """Return the name of a run without its random digits."""
    return run.rpartition("-")[0]


class MemoryMaster:
    """A master whose runs end when they are asked for the second time.

    Attributes:
        requests: The requests for runs that arrived.
        calls: Number of requests of any kind.
        before: Called with the name of each request before it is carried out, and ``after`` after
            it.
        reasons: Why a run fails, by its name without random digits; the others finish.
        lasting: Such names of runs that do not end by themselves.
        missing: Such names of runs that miss their goal in 20 s of training.
    """

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        self.reasons: dict[str, str] = {}
        self.lasting: set[str] = set()
        self.missing: set[str] = set()
        self.before: Callable[[str], None] = lambda name: None
        self.after: Callable[[str], None] = lambda name: None
        self._last_id = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name not in ("runs", "run", "create", "stop", "delete", "metrics", "fetch_result"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.before(name)
            answer = found(*args, **options)
            self.after(name)
            return answer

        return call

    def runs(self) -> list[dict[str, Any]]:
        return [dict(item) for item in self.items.values()]

    def run(self, run_id: Any) -> dict[str, Any]:
        item = self.items[run_id]
        if item["state"] == "initialized":
            item["state"] = "started"
        elif item["state"] == "started" and plain(item["name"]) not in self.lasting:
            reason = self.reasons.get(plain(item["name"]), "")
            self._end(item, reason)
        return dict(item)

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if any(item["name"] == request["name"] for item in self.items.values()):
            raise MasterRequestError(f"run {request['name']} exists", 409)
        self.requests.append(dict(request))
        self._last_id += 1
        item = {
            "id": self._last_id,
            "name": request["name"],
            "state": "initialized",
            "job_metadata": {},
        }
        item["started_at"] = "2026-01-01T00:00:00Z"
        self.items[self._last_id] = item
        return dict(item)

    def stop(self, run_id: Any) -> None:
        self._end(self.items[run_id], "stopped by a user")

    def delete(self, run_id: Any) -> None:
        if run_id not in self.items:
            raise MasterRequestError("there is no such run", 404)
        del self.items[run_id]

    def metrics(self, run_id: Any) -> dict[str, list[dict[str, Any]]]:
        return {"val_global_Prec@1 @ 0": [{"date": "2026-01-01T00:00:01Z", "value": "50"}]}

    def fetch_result(self, run_id: Any, target: Path, *, unfinished: bool = False) -> bool:
        if plain(self.items[run_id]["name"]) not in self.missing:
            return False
        write_run(target, workers=1, epochs=2)
        return True

    def _end(self, item: dict[str, Any], reason: str) -> None:
        item["state"] = "failed" if reason else "finished"
        item["finished_at"] = "2026-01-01T00:01:00Z"
        item["job_metadata"] = {"reason": reason, "stderr": ["the last line"]} if reason else {}
        json.dumps(item)
