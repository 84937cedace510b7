"""The command on a terminal of its own, as a user has it: with prompts, colors and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Only a process whose terminal this is gets a signal for Ctrl-C.
# SIGINT is ignored in a process whose parent ignored it, as a shell does for commands in the
# background.
_START = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
)
_MAIN = "from mlbench_cli import main\nmain()"
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
CTRL_C = "\x03"


class Terminal:
    """A process and the screen that it writes to; ``shown`` is everything it wrote, without escape
    sequences."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self._screen = screen
        self._raw = b""

    @property
    def shown(self) -> str:
        return _ESCAPES.sub("", self._raw.decode(errors="replace"))

    def read_until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until a text has been shown, which is empty for the end of the process."""
        deadline = time.monotonic() + timeout_s
        while not text or text not in self.shown:
            assert time.monotonic() < deadline, f"waited for {text!r}, and saw: {self.shown}"
            if select.select([self._screen], [], [], 0.1)[0]:
                try:
                    chunk = os.read(self._screen, 65536)
                except OSError:  # the process has closed its end
                    chunk = b""
                self._raw += chunk
                if not chunk:
                    assert not text, f"it ended without {text!r}: {self.shown}"
                    return

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the end; the exit status."""
        self.read_until("", timeout_s)
        return self.process.wait(timeout_s)


@contextmanager
def on_terminal(*arguments: str, setup: str = "", columns: int = 120) -> Iterator[Terminal]:
    """``mlbench`` with arguments on a terminal; ``setup`` is Python that runs before it."""
    screen, theirs = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    # These variables would count more than the size of the terminal; pytest-xdist sets them.
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_START}{setup}\n{_MAIN}", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**env, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
