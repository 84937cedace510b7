"""Another user of this machine, and a program that listens on a port of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

NOBODY = 65534

Answer = tuple[int, str]


def as_another_user(action: Callable[[], Any]) -> Any:
    """Run a function in a process of another user; its result, which must be JSON."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(action()).encode())
        except BaseException as error:
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def request(base: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Send one request with nothing but the given headers; the status and the text of the
    answer."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class Listener:
    """A program that keeps what it is sent, and answers every request in the same way.

    Args:
        answer: Called with each request; the body of the answer.
        port: The port; 0 for a free one.
        header: Called after ``answer``; header lines of the answer, each with its end.
    """

    def __init__(
        self,
        answer: Callable[[str], str] = lambda text: "{}",
        port: int = 0,
        header: Callable[[], str] = str,
    ) -> None:
        self.received = ""
        self._answer = answer
        self._header = header
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.settimeout(2)
            with connection:
                try:
                    while text := connection.recv(65536).decode():
                        self.received += text
                        body = self._answer(text)
                        head = (
                            f"HTTP/1.1 200 OK\r\n{self._header()}Content-Length: "
                            f"{len(body)}\r\n\r\n"
                        )
                        connection.sendall((head + body).encode())
                except OSError:
                    continue

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def all_routes(app: Any) -> list[tuple[str, str, Any]]:
    """Method, path and route of everything that an application answers; ``GET`` for a folder of
    files."""
    try:
        from fastapi.routing import iter_route_contexts
    except ImportError:  # an older FastAPI copies the routes of a router
        routes = app.routes
    else:
        routes = iter_route_contexts(app.routes)
    return [
        (method, route.path, route)
        for route in routes
        for method in sorted(getattr(route, "methods", None) or {"GET"})
    ]
