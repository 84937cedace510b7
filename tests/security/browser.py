"""Chromium for tests, over its debugging pipe, which needs no further package."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def __call__(self, expression: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        answer = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(
            self(f"(document.querySelector({json.dumps(selector)}) || {{}}).textContent || ''")
        )


class Browser:
    """A browser without a window."""

    def __init__(self, to: int, answers: int) -> None:
        self._to = to
        self._answers = answers
        self._buffer = b""
        self._last = 0

    def open(self, url: str) -> Page:
        target = self.call("Target.createTarget", url=url)["targetId"]
        return Page(
            self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        )

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._last += 1
        message = {
            "id": self._last,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + 90
        while b"\0" not in self._buffer:
            assert time.monotonic() < deadline, "the browser does not answer"
            if select.select([self._answers], [], [], 1)[0]:
                self._buffer += os.read(self._answers, 2**20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with its own profile; the test is skipped if none is installed."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("needs Chromium")
    their_input, to = os.pipe()
    answers, their_output = os.pipe()
    with contextlib.ExitStack() as stack:
        for end in (to, answers):
            stack.callback(os.close, end)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        process = subprocess.Popen(
            [
                program,
                *options,
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            # The browser expects its pipe at the descriptors 3 and 4.
            preexec_fn=lambda: (os.dup2(their_input, 3), os.dup2(their_output, 4)),
            pass_fds=[3, 4],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        stack.callback(process.wait, 60)
        stack.callback(process.kill)
        browser = Browser(to, answers)
        yield browser
        browser.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
