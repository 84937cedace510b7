"""Follow the quick start to the letter, and take the pictures that it shows.

``python tools/quickstart.py FOLDER`` runs the commands of ``docs/start/quickstart.md`` in an empty
folder, with a separate master. FOLDER gets a log with the output and the duration of each
command, the chart of the runs, and pictures of the dashboard. With ``--update``, the page gets the
outputs, and ``docs/start`` the two pictures that it shows. The script needs ``mlbench`` in PATH,
Playwright and Chromium. It takes about two minutes on two cores. Nothing else should run on the
machine, because the page shows the times."""

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
WIDTH, HEIGHT = 1200, 860


def read_commands(page: Path = PAGE) -> list[str]:
    """Return the command lines of a page that call ``mlbench``, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith("mlbench ")]


def run(command: str, folder: Path, environment: dict[str, str], log: Path) -> str:
    """Run a command, add it with its output and duration to the log, and return the output."""
    begin = time.monotonic()
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    duration = f"{time.monotonic() - begin:.1f} s"
    with log.open("a") as file:
        file.write(f"$ {command}\n{done.stdout}[status {done.returncode}, {duration}]\n\n")
    print(f"{command}: {duration}", flush=True)
    if done.returncode:
        raise SystemExit(f"{command!r} failed")
    return done.stdout.replace(str(folder), "/home/me")


def shorten(output: str) -> str:
    """Leave out secrets, most lines of progress, and all tables of a comparison but the first."""
    output = re.sub(r"\?code=\S+", "?code=...", output).partition("\n\n")[0].rstrip() + "\n"
    # Another master may run here. A reader's first one has the default port.
    output = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:5080", output)
    # Of each run, the first epoch remains; dots replace the others.
    output = re.sub(
        r"^\[\S+ \S+: started, \d+ epochs done.*\n", "...\n", output, flags=re.MULTILINE
    )
    return re.sub(r"(\.\.\.\n)+", "...\n", output)


def update_page(outputs: dict[str, str], page: Path = PAGE) -> None:
    """Replace each output on the page by that of the first command in the block before it."""

    def replace(blocks: re.Match[str]) -> str:
        command = " ".join(blocks[2].replace("\\\n", " ").partition("\n")[0].split())
        return f"{blocks[1]}{shorten(outputs[command])}```"

    text = page.read_text(encoding="utf-8")
    pattern = r"(```bash\n((?:(?!```).)*)```(?:(?!```bash).)*?```text\n)(?:(?!```).)*```"
    page.write_text(re.sub(pattern, replace, text, flags=re.DOTALL), encoding="utf-8")


def ask(*command: str, environment: dict[str, str]) -> Any:
    """Return the JSON answer of an ``mlbench`` command."""
    done = subprocess.run(
        ["mlbench", *command, "--json"], env=environment, text=True, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def take_pictures(target: Path, environment: dict[str, str]) -> None:
    """Save pictures of the page of every run, of the list of runs and of their comparison."""
    from playwright.sync_api import sync_playwright

    login = ask("get-dashboard-url", "--login", environment=environment)
    address = login["url"] if isinstance(login, dict) else login
    base = "/".join(address.split("/")[:3])
    pages = {"overview": "/", "runs": "/runs/"}
    for item in ask("status", environment=environment):
        pages[item["name"]] = f"/runs/{item['id']}/"
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(address)
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
    parser.add_argument(
        "--update", action="store_true",
        help="put the outputs and two pictures into the documentation",
    )  # fmt: skip
    args = parser.parse_args()
    target = args.folder.resolve()
    target.mkdir(parents=True, exist_ok=True)
    log = target / "commands.txt"
    log.unlink(missing_ok=True)
    # A script that is ended must stop the master, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "MLBENCH_HOME": str(folder / "home"), "COLUMNS": "100"}
        outputs = {}
        try:
            for command in read_commands():
                if command != LAST:
                    outputs[command] = run(command, folder, environment, log)
            for chart in folder.glob("mlbench-results/*/*.png"):
                shutil.copy(chart, target / f"{chart.parent.name}-{chart.name}")
            take_pictures(target, environment)
        finally:
            run(LAST, folder, environment, log)
    if args.update:
        update_page(outputs)
        for picture in ("first-overview.png", "dashboard-first-2.png"):
            shutil.copy(target / picture, PAGE.parent)


if __name__ == "__main__":
    main()
