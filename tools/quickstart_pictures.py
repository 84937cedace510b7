"""Follow the quick start to the letter, and take the pictures that it shows.

``python tools/quickstart_pictures.py FOLDER`` runs the commands of ``docs/start/quickstart.md`` in an empty folder,
with a master of its own. FOLDER gets a log with the output and the duration of each command, the chart of the runs,
and pictures of the dashboard. Copy the pictures that the page shows to ``docs/start``. The script needs ``mlbench`` in
PATH, Playwright and Chromium. It takes about two minutes on two cores if nothing else runs there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "start" / "quickstart.md"
LAST = "mlbench master --stop"
SIZE = {"width": 1200, "height": 860}


def read_commands(page: Path = PAGE) -> list[str]:
    """Return the command lines of a page that call ``mlbench``, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith("mlbench ")]


def run(command: str, folder: Path, environment: dict[str, str], log: Path) -> None:
    """Run a command, and add it with its output and duration to the log."""
    begin = time.monotonic()
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with log.open("a") as file:
        file.write(f"$ {command}\n{done.stdout}[status {done.returncode}, {time.monotonic() - begin:.1f} s]\n\n")
    print(f"{command}: {time.monotonic() - begin:.1f} s", flush=True)
    if done.returncode:
        raise SystemExit(f"{command!r} failed")


def ask(*command: str, environment: dict[str, str]) -> Any:
    """Return the JSON answer of an ``mlbench`` command."""
    done = subprocess.run(["mlbench", *command, "--json"], env=environment, text=True, capture_output=True, check=True)
    return json.loads(done.stdout)


def take_pictures(target: Path, environment: dict[str, str]) -> None:
    """Save pictures of the page of every run, of the list of runs and of their comparison."""
    from playwright.sync_api import sync_playwright

    login = ask("get-dashboard-url", "--login", environment=environment)
    address = login["url"] if isinstance(login, dict) else login
    base = "/".join(address.split("/")[:3])
    runs = {item["name"]: item["id"] for item in ask("status", environment=environment)}
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        pages = {"overview": "/", "runs": "/runs/", **{name: f"/runs/{number}/" for name, number in runs.items()}}
        for name, path in pages.items():
            # A page stays connected to the master, so the network is never idle.
            page.goto(base + path)
            page.wait_for_timeout(2000)
            page.screenshot(path=target / f"dashboard-{name}.png")
            page.screenshot(path=target / f"dashboard-{name}-whole.png", full_page=True)
        browser.close()


def main() -> None:
    """Follow the page in a folder that is deleted afterwards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for the log and the pictures")
    target = parser.parse_args().folder.resolve()
    target.mkdir(parents=True, exist_ok=True)
    log = target / "commands.txt"
    log.unlink(missing_ok=True)
    # A script that is ended must stop the master, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "MLBENCH_HOME": str(folder / "home"), "COLUMNS": "100"}
        try:
            for command in read_commands():
                if command != LAST:
                    run(command, folder, environment, log)
            for chart in folder.glob("mlbench-results/*/*.png"):
                shutil.copy(chart, target / f"{chart.parent.name}-{chart.name}")
            take_pictures(target, environment)
        finally:
            run(LAST, folder, environment, log)


if __name__ == "__main__":
    main()
