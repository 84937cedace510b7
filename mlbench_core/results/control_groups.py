"""Read the limits that the control groups of Linux, and so containers, set for this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cores_limit", "memory_limit"]


def cores_limit(proc: Path, sys: Path) -> float | None:
    """Return the number of cores that the control groups allow, if the machine has more.

    Args:
        proc: The folder ``/proc``.
        sys: The folder ``/sys``.
    """
    limits: list[float] = [os.cpu_count() or math.inf]
    for folder in _folders("cpu", proc, sys):
        # Version 2 has both numbers in one file, version 1 in two; "max" and -1 mean no limit.
        words = (read_file(folder / "cpu.max") or "").split()
        words.append(read_file(folder / "cpu.cfs_quota_us") or "-1")
        words.append(read_file(folder / "cpu.cfs_period_us") or "-1")
        quota, period = words[:2]
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    for folder in _folders("cpuset", proc, sys):
        cores = read_file(folder / "cpuset.cpus.effective") or read_file(folder / "cpuset.cpus")
        if cores:
            count = 0
            # Single cores and ranges, as in "0-3,8".
            for part in cores.split(","):
                ends = part.split("-")
                count += int(ends[-1]) - int(ends[0]) + 1
            limits.append(count)
    # The first one is that of the machine, which is not a limit of a group.
    least = min(limits)
    if least == limits[0]:
        return None
    return least


def memory_limit(proc: Path, sys: Path, total_bytes: int) -> int | None:
    """Return the bytes of memory that the control groups allow, if the machine has more.

    Args:
        proc: The folder ``/proc``.
        sys: The folder ``/sys``.
        total_bytes: Memory of the machine.
    """
    limits = []
    for folder in _folders("memory", proc, sys):
        # The files of version 2 and of version 1.
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_file(folder / name)
            if text is not None and text.isdecimal() and int(text) < total_bytes:
                limits.append(int(text))
    return min(limits, default=None)


def _folders(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups (Linux) for a resource, of both versions.

    Each of them may have a limit. Inside a container, the folder of a group may be missing, and the
    root is the group of the container.
    """
    for line in (read_file(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # The line of version 2 names no controllers.
        if not controllers or controller in controllers.split(","):
            root = sys / "fs/cgroup"
            if controllers:
                root /= controller
            parts = list(filter(None, path.split("/")))
            for length in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:length])


def read_file(path: Path) -> str | None:
    """Return the stripped text of a small file of the system, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    # A description of the machine must not end a run, whatever the system does.
    except Exception:
        return None
