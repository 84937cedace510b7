"""Find the exception or the error message that ended a worker in its output.

The supervisor imports it and must start quickly, so it imports only the standard library.
"""

from __future__ import annotations

import re

__all__ = ["CONTAINER_STATUSES", "ErrorSearch", "is_consequence"]

CONTAINER_STATUSES = (125, 126, 127, 255)
"""Statuses of ``docker``, ``podman`` or ``apptainer`` that could not start a container."""

# Statuses of a Python program that an exception or argparse ends; another one belongs to a program
# that chose it.
_PYTHON_STATUSES = (1, 2)
# The form of argparse, in which the tasks report errors of the user and of the network.
_ERROR_LINE = re.compile(r"[\w.-]+: error: ")
# "docker: Error response from daemon: ...", "Error: ...", and "FATAL:   ..." of Apptainer.
_CONTAINER_ERROR = re.compile(r"(docker: )?(Error|FATAL)\b")
# The last words of a process that a signal ends: of Python's faulthandler, of an exception of C++,
# of assert() in C.
_FATAL = re.compile(r"Fatal Python error: |\s*what\(\): |.*: Assertion .* failed\.$")
# torch writes the rank before each line of a traceback, once the process group is open.
_TORCH_PREFIX = re.compile(r"\[rank(\d+)\]: ?")
# The lines of an exception group.
_GROUP_PREFIX = re.compile(r"\s*(\+ |\| ?)")
# Lines that say nothing about the end: those of a logger below an error, warnings of Python and of
# torch (glog), progress bars, and lines without letters.
_LEVEL = r"(DEBUG|INFO|WARN(ING)?)"
_REMARK = re.compile(
    rf"{_LEVEL}\b|.*[\s:|\[]{_LEVEL}[\s:|\]]|.*Warning: |\[?[IW]\d+[ :]|\[[IW]\d|.*\d%\||[\W\d_]+$"
)
# Messages of a worker, or of a program around it, after another one has ended.
_CONSEQUENCE = re.compile(
    r"WorkerError: |ChildFailedError|CalledProcessError|ProcessExitedException"
    r"|[Cc]onnection (was )?(reset|closed|refused|aborted)|[Cc]losed by peer|[Bb]roken pipe"
    r"|[Tt]imed out|remote process exited"
)
_LONGEST_ERROR = 300


def is_consequence(error: str) -> bool:
    """Return True if an error probably follows from the end of another process.

    A closed connection is such an error.
    """
    return _CONSEQUENCE.search(error) is not None


class ErrorSearch:
    """A search through the lines that a worker writes to its standard error.

    Attributes:
        error: The exception or error message that ended the worker; empty if there is none. It is
            the latest one, but a consequence and an exception of another rank do not replace a
            cause.
        container_error: The latest error message of a program that starts containers; empty if
            there is none.
        last: The last line, unless it belongs to a traceback, a warning or a remark; empty if there
            is none.

    Example:
        >>> search = ErrorSearch()
        >>> search.add("Traceback (most recent call last):")
        >>> search.add('  File "a.py", line 1')
        >>> search.add("ValueError: bad")
        >>> search.error
        'ValueError: bad'
    """

    def __init__(self) -> None:
        self.error = ""
        self.container_error = ""
        self.last = ""
        self._fatal = ""
        self._rank: str | None = None
        self._in_traceback = False

    def add(self, text: str) -> None:
        """Look at the next line; the line after a traceback's frames is the exception."""
        line = text
        rank: str | None = None
        ranked = _TORCH_PREFIX.match(text)
        if ranked is not None:
            line, rank = text[ranked.end() :], ranked[1]
        grouped = _GROUP_PREFIX.match(line)
        if grouped is not None:
            line = line[grouped.end() :]
        if _CONTAINER_ERROR.match(line):
            self.container_error = line[:_LONGEST_ERROR]
        if _FATAL.match(line):
            self._fatal = line.strip()[:_LONGEST_ERROR]
        if line.startswith('  File "'):
            self._in_traceback = True
            self.last = ""
        elif _ERROR_LINE.match(line) or (
            self._in_traceback and line.strip() and not line.startswith(" ")
        ):
            self._in_traceback = False
            self._take(line[:_LONGEST_ERROR], rank)
        elif (
            line.strip()
            and not line.startswith((" ", "\t", "Traceback (most recent"))
            and not _REMARK.match(line)
        ):
            self.last = line[:_LONGEST_ERROR]

    def _take(self, error: str, rank: str | None) -> None:
        """Keep an error, unless the one before is the cause of it."""
        # Of several workers with one output, the first that failed is the cause.
        is_cause = not is_consequence(error) and rank in (None, self._rank)
        if not self.error or is_consequence(self.error) or is_cause:
            self.error, self._rank = error, rank

    def said(self, returncode: int) -> str:
        """Return the line in which a worker says why it ended; empty if there is none.

        Args:
            returncode: Its exit status, negative for a signal.
        """
        if returncode < 0:
            return self._fatal
        if returncode in _PYTHON_STATUSES and self.error:
            return self.error
        return self.last
