"""Read metrics and a goal from the lines that a script prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_core.arguments import hint_for
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import GoalAim

__all__ = ["Metric", "OutputReader", "parse_goal", "parse_metric"]

_NAME = r"[A-Za-z_][\w@.-]*"
# A goal may also be on the loss that the script passes to backward().
_OBSERVED = ("train_loss",)
# A line without an end is cut here, so that a progress bar cannot fill the memory.
_LONGEST_LINE = 10_000


@dataclass(frozen=True)
class Metric:
    """A metric that a script prints.

    Attributes:
        name: Its name in the result, with the prefix ``val_`` or ``train_``.
        regex: Found in a line, its first group is the value.
        typed: The name that the user gave it, for messages.

    Example:
        >>> Metric("val_loss", re.compile("val loss ([0-9.]+)")).value("step 5: val loss 1.25")
        1.25
    """

    name: str
    regex: re.Pattern[str]
    typed: str = ""

    def value(self, line: str) -> float | None:
        """Return the value in a line; None if the line has none."""
        found = self.regex.search(line)
        if found is None:
            return None
        try:
            return float(found.group(1))
        except (TypeError, ValueError):
            return None


def parse_metric(text: str) -> Metric:
    """Read the value of ``--metric``.

    Args:
        text: ``NAME=REGEX``. A name without the prefix ``train_`` or ``val_`` gets ``val_``.

    Raises:
        ConfigurationError: The text has another form, the expression has no group, or the name is
            that of the loss that is observed anyway.

    Example:
        >>> parse_metric("loss=val loss ([0-9.]+)").name
        'val_loss'
    """
    name, separator, pattern = text.partition("=")
    if not separator or not re.fullmatch(_NAME, name):
        raise ConfigurationError(
            f"--metric must be NAME=REGEX, not {text!r}: write for example "
            "--metric 'val_loss=val loss ([0-9.]+)'"
        )
    if name in _OBSERVED:
        raise ConfigurationError(
            f"--metric must not be named {name!r}, which is the loss that the script passes to "
            "backward(): write for example --metric 'train_printed_loss=...'"
        )
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(
            f"--metric {name} must have a regular expression, not {pattern!r}: {error}"
        ) from error
    if regex.groups == 0:
        raise ConfigurationError(
            f"--metric {name} must have a group around the number, not {pattern!r}: "
            "write for example ([0-9.]+)"
        )
    return Metric(_full_name(name), regex, name)


def parse_goal(text: str, metrics: Sequence[Metric] | None = None) -> GoalAim:
    """Read the value of ``--goal``.

    Args:
        text: ``NAME<=VALUE`` or ``NAME>=VALUE``.
        metrics: The metrics of the script; None to allow any name.

    Raises:
        ConfigurationError: The text has another form, or the goal is on none of the metrics.

    Example:
        >>> parse_goal("val_loss<=1.5").text
        'val_loss <= 1.5'
    """
    found = re.fullmatch(rf"\s*({_NAME})\s*([<>])=\s*(\S+)\s*", text)
    threshold: float | None = None
    if found is not None:
        threshold = GoalAim.from_dict({"threshold": found.group(3)}).threshold
    if found is None or threshold is None:
        raise ConfigurationError(
            f"--goal must be NAME<=VALUE or NAME>=VALUE, not {text!r}: write for example "
            "--goal 'val_loss<=1.5'"
        )
    aim = GoalAim(_full_name(found.group(1)), threshold, minimize=found.group(2) == "<")
    if metrics is not None and aim.metric not in (*_OBSERVED, *(one.name for one in metrics)):
        # With the user's own names, who may not know of the prefix.
        name, typed = found.group(1), [one.typed for one in metrics]
        hint = f"add --metric '{name}=REGEX', or take train_loss"
        if typed:
            hint = hint_for(name, typed, f"{hint} or")
        raise ConfigurationError(f"--goal must be on a metric of the script, not {name!r}: {hint}")
    return aim


def _full_name(name: str) -> str:
    if name.startswith(("train_", "val_")):
        return name
    return f"val_{name}"


class OutputReader:
    """Read the metrics in everything that Python code writes to standard output and error.

    Output of C++ code and of other processes is not seen.

    Args:
        metrics: The metrics.
        record: Called with the name of a metric and its value.
    """

    def __init__(self, metrics: Sequence[Metric], record: Callable[[str, float], None]) -> None:
        self._metrics = metrics
        self._record = record

    def watch(self, *streams: Any) -> None:
        """Read what is written to these streams from now on.

        The objects stay the same, because a script may have kept them; only their method ``write``
        is replaced.
        """
        for stream in streams:
            stream.write = self._reading(stream.write)

    def _reading(self, write: Callable[[str], int]) -> Callable[[str], int]:
        rest = ""

        def write_and_read(text: str) -> int:
            nonlocal rest
            count = write(text)
            # A progress bar ends its lines with a carriage return.
            *lines, rest = re.split(r"[\r\n]", rest + text)
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                self._read(line)
            return count

        return write_and_read

    def _read(self, line: str) -> None:
        for metric in self._metrics:
            value = metric.value(line)
            if value is not None:
                self._record(metric.name, value)


def watch_output(metrics: Sequence[Metric], record: Callable[[str, float], None]) -> None:
    """Read the metrics in the output of this process; see :class:`OutputReader`."""
    if metrics:
        OutputReader(metrics, record).watch(sys.stdout, sys.stderr)
