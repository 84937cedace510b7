"""Standard output and standard error of the ``mlbench`` command, whose other end may be anything.

A terminal or a pipe may not know all characters, may be closed before the command starts (``>&-``),
or while it writes (``| head -1``), and a file may be on a full disk. Characters that an encoding
lacks are replaced. Output that nobody can read is dropped: a run is not lost because its table is.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

__all__ = ["lost_output", "open_streams", "stdout_is_closed"]

# The reader has closed the output, so nothing is lost.
_CLOSED = (errno.EPIPE, errno.EBADF, errno.ECONNRESET)


class _Output(io.RawIOBase):
    """A file descriptor that drops everything after the first error.

    Attributes:
        error: The first error.
    """

    def __init__(self, descriptor: int) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        content = memoryview(data)  # type: ignore[arg-type]
        if self.error is None:
            try:
                return os.write(self._descriptor, content)
            except OSError as error:
                self.error = error
        return content.nbytes


class _Ascii(io.TextIOWrapper):
    """A text stream of ASCII whose encoding has another name."""

    # click would write UTF-8 to a stream of "ascii".
    encoding = "7bit"


_stdout: _Output | None = None
_replaced: list[TextIO | None] = []


def open_streams() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that raise no error.

    Call it once, at the start.
    """
    global _stdout
    _open_closed()
    _stdout = _Output(1)
    sys.stdout = _text(_stdout, sys.stdout)
    sys.stderr = _text(_Output(2), sys.stderr)
    if sys.stdin is None:
        # Open for the whole process.
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def stdout_is_closed() -> bool:
    """Return True if nobody reads standard output any more.

    A command that only writes can end then.
    """
    return _stdout is not None and _stdout.error is not None


def lost_output() -> OSError | None:
    """Return why standard output was lost, None if it was not, or if its reader has closed it."""
    if _stdout is None or _stdout.error is None or _stdout.error.errno in _CLOSED:
        return None
    return _stdout.error


def _open_closed() -> None:
    """Open the standard descriptors that are closed.

    Otherwise a file or socket of the command would get the number of one of them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)


def _text(output: _Output, replaced: TextIO | None) -> TextIO:
    encoding = "utf-8"
    if replaced is not None:
        encoding = replaced.encoding or encoding
        with contextlib.suppress(OSError, ValueError):
            replaced.flush()
    is_ascii = encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
    stream_class = _Ascii if is_ascii else io.TextIOWrapper
    is_line_buffered = output.isatty() or output.fileno() == 2
    buffer = io.BufferedWriter(output)
    stream = stream_class(
        buffer, encoding=encoding, errors="replace", line_buffering=is_line_buffered
    )
    # Kept, because its end would close the descriptor.
    _replaced.append(replaced)
    return stream
