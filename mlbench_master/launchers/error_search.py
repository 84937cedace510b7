"""Find the exception or the error message that ended a worker in its output. Only the standard library is imported."""

from __future__ import annotations

import re

__all__ = ["CONTAINER_STATUSES", "PYTHON_STATUSES", "ErrorSearch"]

PYTHON_STATUSES = (1, 2)
"""Statuses of a Python program that an exception or argparse ends; another one belongs to a program that chose it."""

CONTAINER_STATUSES = (125, 126, 127, 255)
"""Statuses of ``docker run``, ``podman run`` or ``apptainer exec`` that could not start a container."""

# The form of argparse, in which the tasks report errors of the user and of the network.
_ERROR_LINE = re.compile(r"[\w.-]+: error: ")
# "docker: Error response from daemon: ...", "Error: ...", and "FATAL:   ..." of Apptainer.
_CONTAINER_ERROR = re.compile(r"(docker: )?(Error|FATAL)\b")
# torch writes the rank before each line of a traceback, once the process group is open.
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")
_LONGEST_ERROR = 300


class ErrorSearch:
    """A search through the lines that a worker writes to its standard error.

    Attributes:
        error: The latest exception or error message; empty if there is none.
        container_error: The latest error message of a program that starts containers; empty if there is none.

    Example:
        >>> search = ErrorSearch()
        >>> for line in ("Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: bad"):
        ...     search.add(line)
        >>> search.error
        'ValueError: bad'
    """

    def __init__(self) -> None:
        self.error = ""
        self.container_error = ""
        self._in_traceback = False

    def add(self, text: str) -> None:
        """Look at the next line; the line after a traceback's frames is the exception."""
        line = _TORCH_PREFIX.sub("", text, count=1)
        if _CONTAINER_ERROR.match(line):
            self.container_error = line[:_LONGEST_ERROR]
        if line.startswith('  File "'):
            self._in_traceback = True
        elif _ERROR_LINE.match(line) or (self._in_traceback and line.strip() and not line.startswith(" ")):
            self._in_traceback = False
            self.error = line[:_LONGEST_ERROR]
