"""Workers that wait until it is their turn: processes which do something for each line they are sent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Party:
    """The workers of one way to do something; others have processes of their own.

    So what one way leaves behind in memory, in caches of the allocator or in torch's state, is not met by another.
    Each worker prints a line when it is ready, and one for each line that it reads.

    Args:
        name: For errors.
        script: What the workers run.
        arguments: What comes after it.
        workers: How many; they see RANK and WORLD_SIZE, and use one thread each.
        stack: Ends the workers when it is left.
    """

    def __init__(
        self, name: str, script: Path, arguments: Sequence[str], workers: int, stack: contextlib.ExitStack
    ) -> None:
        self.name = name
        self.processes = []
        for rank in range(workers):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            stack.callback(_end, process)
            self.processes.append(process)

    def wait(self) -> None:
        """Wait until all are ready."""
        self._read()

    def take_turn(self, line: str = "") -> list[str]:
        """Let all workers act; gives what each says at the end."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return self._read()

    def finish(self) -> None:
        """Send no more, and wait until all have ended by themselves."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            if process.wait() != 0:
                raise SystemExit(f"a worker of {self.name!r} failed; what it said is above")

    def _read(self) -> list[str]:
        lines = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"a worker of {self.name!r} failed; what it said is above")
            lines.append(line)
        return lines


def _end(process: subprocess.Popen[str]) -> None:
    """End a worker, which may be waiting for a line, or for the others."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
