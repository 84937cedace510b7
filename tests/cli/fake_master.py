"""A master that answers from memory: enough of the REST API for the command, over real HTTP."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mlbench_core.client.masters import NONCE_HEADER, PROOF_HEADER, make_proof


def summary(
    workers: int, compute: float, communication: float, reached: bool = True
) -> dict[str, Any]:
    """What a training script posts as ``summary @ 0``."""
    train = compute + communication + 1.5
    return {
        "workers": workers,
        "goal_reached": reached,
        "time_to_goal_s": train if reached else None,
        "total_s": {
            "train": train,
            "compute": compute,
            "communication": communication,
            "exposed_communication": communication,
            "metrics": 0.5,
            "preprocess": 1.0,
            "validation": 2.0,
        },
        "samples_per_s": 400.0 * workers,
        "epochs": 3,
        "best": 95.5,
        "bytes_sent": 1000,
    }


def entry(value: object) -> dict[str, Any]:
    """One entry of a metric."""
    return {"date": "2024-05-01T10:00:00.000000Z", "value": str(value), "cumulative": False}


class FakeMaster:
    """Serves on a free port of 127.0.0.1 in a thread.

    Attributes:
        runs: Runs by id.
        metrics: Metrics of a run by id.
        lines: Log lines of a run by id.
        result_folder: Function that returns the folder whose files are in the zip file of a run,
            from its description.
        states: States that a run goes through, one a question; the last one stays.
        requests: Bodies of ``POST /api/runs/``, without the field ``caller``.
        callers: This field of each of them.
        log_queries: Parameters of the requests for log lines.
        most_workers: The largest number of workers of a run that it names.
        token: Needed in each request where it is set, except for the health.
        key: The key with which it proves that it is the recorded master.
        broken: Raw body that every request gets instead of an answer.
    """

    def __init__(self) -> None:
        self.runs: dict[int, dict[str, Any]] = {}
        self.metrics: dict[int, dict[str, list[dict[str, Any]]]] = {}
        self.lines: dict[int, list[dict[str, Any]]] = {}
        self.lines_of_an_answer = 2
        self.result_folder: Callable[[dict[str, Any]], Path] | None = None
        self.states: dict[int, list[str]] = {}
        self.final_state = "finished"
        self.requests: list[dict[str, Any]] = []
        self.callers: list[dict[str, Any] | None] = []
        self.deleted: list[int] = []
        self.log_queries: list[dict[str, str]] = []
        self.token: str | None = None
        self.most_workers: int | None = None
        self.key = "the key of the fake"
        self.broken: bytes | None = None
        self.cut_download = False
        self._last_id = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, workers: int = 1, state: str = "finished", **metrics: object) -> int:
        """Add a run; metrics are given as ``name=value`` for ``name @ 0``."""
        self._last_id += 1
        run_id = self._last_id
        self.runs[run_id] = {
            "id": run_id,
            "name": name,
            "num_workers": workers,
            "state": state,
            "backend": "gloo",
            "command": "train",
            "created_at": "2024-05-01T10:00:00.000000Z",
            "finished_at": None,
        }
        self.metrics[run_id] = {f"{key} @ 0": [entry(value)] for key, value in metrics.items()}
        self.lines[run_id] = []
        return run_id

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Status and JSON (or bytes) for a request."""
        parts = path.strip("/").split("/")[1:]
        if parts == ["health"]:
            return 200, {"status": "ok", "version": "0", "most_workers": self.most_workers}
        if parts == ["runs"]:
            return self._create(body) if method == "POST" else (200, list(self.runs.values()))
        run_id = int(parts[1])
        if run_id not in self.runs:
            return 404, {"status": "Not Found", "message": f"no run {run_id}"}
        if parts[0] == "metrics":
            return self._metrics(run_id, query)
        if parts[2:] == ["stop"]:
            self.runs[run_id].update(state="failed", job_metadata={"reason": "stopped by a user"})
            return 200, self.runs[run_id]
        if parts[2:] == ["logs"]:
            self.log_queries.append(query)
            since = int(query.get("since_line", 0))
            end = since + self.lines_of_an_answer
            page = self.lines[run_id][since:end]
            return 200, {
                "lines": [line for line in page if query.get("search", "") in line["text"]],
                "next": min(end, len(self.lines[run_id])),
            }
        if method == "DELETE":
            del self.runs[run_id]
            self.deleted.append(run_id)
            return 204, b""
        states = self.states.get(run_id)
        if states:
            self.runs[run_id]["state"] = states.pop(0)
        return 200, self.runs[run_id]

    def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        if any(run["name"] == body["name"] for run in self.runs.values()):
            return 409, {"status": "Conflict", "message": f"name: a run {body['name']!r} exists"}
        self.callers.append(body.pop("caller", None))
        self.requests.append(body)
        workers = body["num_workers"]
        text = json.dumps(summary(workers, 80.0 / workers, 4.0 * (workers - 1)))
        run_id = self.add(body["name"], workers, "initialized", summary=text)
        self.metrics[run_id]["val_global_Prec@1 @ 0"] = [entry(40.0), entry(60.0)]
        self.states[run_id] = ["started", "started", self.final_state]
        return 201, dict(self.runs[run_id])

    def _metrics(self, run_id: int, query: dict[str, str]) -> tuple[int, Any]:
        assert query["metric_type"] == "run"
        wanted = query.get("metric_filter")
        last_n = int(query.get("last_n", 0))
        found = {k: v[-last_n:] for k, v in self.metrics[run_id].items() if wanted in (None, k)}
        if query.get("format") != "zip":
            return 200, found
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, entries in found.items():
                archive.writestr(f"result_{name}.json", json.dumps(entries))
            if self.result_folder is None:
                archive.writestr("official_result.txt", "")
            else:
                for file in self.result_folder(self.runs[run_id]).iterdir():
                    archive.write(file, file.name)
        content = buffer.getvalue()
        return 200, content[: len(content) // 2] if self.cut_download else content

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        master = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(size)
                if master.broken is not None:
                    self.reply(200, master.broken)
                    return
                is_open = self.path.startswith("/api/health/")
                if (
                    master.token
                    and not is_open
                    and self.headers.get("Authorization") != f"Bearer {master.token}"
                ):
                    self.reply(401, {"status": "Unauthorized", "message": "token"})
                    return
                url = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                self.reply(
                    *master.answer(self.command, url.path, query, json.loads(raw) if raw else None)
                )

            def reply(self, status: int, answer: Any) -> None:
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if nonce := self.headers.get(NONCE_HEADER):
                    self.send_header(
                        PROOF_HEADER, make_proof(master.key, nonce, *self.server.server_address)
                    )
                # Only the proof must leave the connection open: a thread would wait for the end of
                # each one.
                if not self.path.startswith("/api/health/"):
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

            do_GET = do_POST = do_DELETE = handle_any

        return Handler
