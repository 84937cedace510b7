"""Chromium through Playwright, which writes down everything that a user's browser would complain
about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Any
    base: str
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.set_default_timeout(90_000)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def _console(self, message: Any) -> None:
        url = message.location.get("url", "")
        # For a page without an icon, such as JSON, the browser asks for the icon of the host.
        is_of_host = url.endswith("/favicon.ico") and not url.startswith(self.base + "/")
        if message.type in ("error", "warning") and not is_of_host:
            self.problems.append(f"{message.type}: {message.text} {url}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.base, "blob:", "data:")):
            self.problems.append(f"asks another host: {request.url}")

    def _response(self, response: Any) -> None:
        if response.status >= 500:
            self.problems.append(f"{response.status}: {response.url}")

    def complaints(self) -> list[str]:
        """The problems, without those of a click that aborts a reading of the page, which htmx
        reports."""
        aborted = "error: htmx:afterRequest", "error: htmx:sendAbort", "error: htmx:sendError"
        return [problem for problem in self.problems if not problem.startswith(aborted)]

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)

    def barriers(self, axe: Any, name: str) -> list[str]:
        """Return what axe finds serious or critical on this page, after its name."""
        found = []
        for violation in axe.run(self.page).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = [node["html"][:200] for node in violation["nodes"]]
                found.append(f"{name}: {violation['id']}: {violation['help']}: {nodes}")
        return found

    def picture(self, name: str) -> None:
        """Save a picture if somebody wants to look: MLBENCH_SCREENSHOTS names the folder."""
        folder = os.environ.get("MLBENCH_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


# Not for the whole session: as long as it is open, other tests in this process cannot use
# asyncio.run.
@pytest.fixture(scope="module")
def playwright_browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()
