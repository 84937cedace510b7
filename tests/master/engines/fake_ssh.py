"""A small ``ssh`` for tests: it runs the command on this machine, in a folder that stands for the
host.

``python fake_ssh.py FOLDER ...`` has the options of the engine. ``FOLDER/calls`` gets a line for
each call. Files in the folder change what happens: ``<host>.error`` has the message of a call that
fails, ``<host>.hang`` lets it hang, ``<host>.drop`` lets the connection break after a command whose
request has its text, and ``<host>.after`` has shell commands that run before it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path


def content(path: Path) -> bytes | None:
    """Return the content of a file, or None without one. A test may delete it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    if "-G" in words:
        print(f"user me\nhostname {'127.0.0.1' if words[-1] == 'loop' else '192.0.2.1'}")
        return 0
    if "-O" in words:
        return 0
    host, line = words[words.index("--") + 1 :]
    request = sys.stdin.buffer.read()
    with (folder / "calls").open("a") as calls:
        calls.write(f"{host} {line}\n")
    while (folder / f"{host}.hang").exists():
        time.sleep(0.02)
    error, greeting = content(folder / f"{host}.error"), content(folder / f"{host}.after")
    if error is not None:
        print(error.decode(), file=sys.stderr)
        return 255
    if greeting is not None:
        line = f"{greeting.decode()}\n{line}"
    home = folder / f"home-{host}"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        ["sh", "-c", line],
        input=request,
        stdout=subprocess.PIPE,
        env={**os.environ, "HOME": str(home)},
    )
    drop = folder / f"{host}.drop"
    dropped = content(drop)
    if dropped is not None and dropped in request:
        drop.unlink(missing_ok=True)
        sys.stdout.buffer.write(done.stdout[:40])
        print(f"Connection to {host} closed by remote host.", file=sys.stderr)
        return 255
    sys.stdout.buffer.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
