"""A master of a few lines that can be away, slow, picky or rude."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.processes import free_port

Answer = tuple[int, Any]


class StubMaster:
    """Serves ``/api/`` on a port of its own; keeps metrics by id as the real one does.

    Attributes:
        metrics: Stored metrics in order of arrival, each id once.
        deliveries: Ids in order of arrival, repeated ones too.
        batches: Number of metrics in each accepted request.
        requests: ``(method, path, headers, body)`` of every request.
        respond: Called with method, path and body before anything else; an answer overrules the
            stub's own. That of a redirect is the new address.
    """

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.deliveries: list[str] = []
        self.batches: list[int] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.respond: Callable[[str, str, Any], Answer | None] = lambda method, path, body: None
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        # No other program gets it while this one is away.
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def values(self) -> list[Any]:
        return [metric["value"] for metric in self.metrics]

    def start(self) -> None:
        """Serve, on the same port as before."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_any(self) -> None:
                stub._handle(self)

            do_GET = do_POST = do_DELETE = do_any

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            block_on_close = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Be away: connections are refused. Stopping again does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        text = handler.rfile.read(length)
        body = json.loads(text) if text else None
        with self._lock:
            self.requests.append((handler.command, handler.path, dict(handler.headers), body))
        status, answer = self.respond(handler.command, handler.path, body) or self._answer(
            handler, body
        )
        if status == 0:  # rude: no answer at all
            handler.connection.close()
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header(
            "Content-Type", "text/html" if isinstance(answer, bytes) else "application/json"
        )
        handler.send_header("Content-Length", str(len(content)))
        if 300 <= status < 400:
            handler.send_header("Location", answer)
        handler.end_headers()
        handler.wfile.write(content)

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> Answer:
        if handler.command == "POST" and handler.path == "/api/metrics/":
            return 201, self.store(body)
        return 200, {"method": handler.command, "path": handler.path}

    def store(self, body: Any) -> Any:
        """Keep what is new of a posted body, as the master does."""
        entries = body if isinstance(body, list) else [body]
        with self._lock:
            self.batches.append(len(entries))
            known = {metric["id"] for metric in self.metrics}
            for entry in entries:
                self.deliveries.append(entry["id"])
                if entry["id"] not in known:
                    known.add(entry["id"])
                    self.metrics.append(entry)
        return body
