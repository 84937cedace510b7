"""Write, read and verify the folder that a run leaves.

Files in a result folder::

    metrics.jsonl        raw lines of every worker; during the run, each has metrics.rank-R.jsonl
    environment.json     machine, software, command line, seeds, checksums of data files
    official_result.txt  text of the reached goal; missing if it was not reached
    mlperf.log           the run in the format of MLPerf
    result.json          the result, computed from the first two files, and checksums of the others
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_core.files import digest, replacing
from mlbench_core.results.mlperf import mlperf_lines
from mlbench_core.results.raw_lines import (
    RawLines,
    before_start,
    ends_line,
    read_lines,
    statistics,
)
from mlbench_core.results.schema import check_result
from mlbench_core.results.summary import summarize
from mlbench_core.run_terms import GoalAim

__all__ = [
    "FILES",
    "RESULT",
    "find_folders",
    "finish_folder",
    "is_searched",
    "lacking",
    "lines_path",
    "prepare_folder",
    "read_environment",
    "read_result",
    "verify_folder",
    "write_environment",
]

RESULT = "result.json"
LINES = "metrics.jsonl"
ENVIRONMENT = "environment.json"
OFFICIAL = "official_result.txt"
MLPERF = "mlperf.log"

FILES = (RESULT, LINES, ENVIRONMENT, OFFICIAL, MLPERF)
"""Names of the files in a result folder."""

# Results of earlier versions lack these.
_LATER_NUMBERS = ("bytes_on_wire", "exchanges")

# A result has about 5 KB and an environment 20 KB. A larger file is not one of ours.
_MOST_BYTES = 16 << 20

# Errors of a computation if a changed file lacks a field, or has one of another type or an absurd
# size.
_DAMAGE = (
    *(ConfigurationError, ValueError, TypeError, KeyError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, OSError),
)


def lines_path(folder: Path, rank: int) -> Path:
    """Return the path of one worker's raw lines during the run."""
    return folder / f"metrics.rank-{rank}.jsonl"


def prepare_folder(folder: Path, *, resume: bool = False) -> None:
    """Make the folder ready for a run; only one worker calls it, before the others write.

    Args:
        folder: The result folder.
        resume: True to continue an earlier run, whose lines stay. Otherwise the files of an earlier
            run in this folder are moved to ``earlier-1``, ``earlier-2`` and so on below it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for path in folder.iterdir():
        if path.name in FILES or path.match("metrics.rank-*.jsonl"):
            files.append(path)
    if resume:
        # The result is written again at the end. Until then, no result is better than an outdated
        # one.
        for name in (RESULT, OFFICIAL, MLPERF):
            (folder / name).unlink(missing_ok=True)
    elif files:
        number = 1
        while (earlier := folder / f"earlier-{number}").exists():
            number += 1
        earlier.mkdir()
        for path in files:
            path.rename(earlier / path.name)


def write_environment(folder: Path, environment: Mapping[str, Any]) -> None:
    """Write ``environment.json``."""
    _write(folder / ENVIRONMENT, json.dumps(environment, indent=1) + "\n")


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the content of ``environment.json``, empty if the folder has no such file.

    Raises:
        ConfigurationError: The file does not hold a JSON object.
    """
    path = folder / ENVIRONMENT
    if not path.exists():
        return {}
    return _read_json(path)


def finish_folder(folder: Path) -> dict[str, Any]:
    """Write the result of a run that has ended, and the other files that follow from its raw lines.

    The raw lines of all workers are joined in ``metrics.jsonl``.

    Args:
        folder: The result folder, with the raw lines of all workers and ``environment.json``.

    Returns:
        The content of ``result.json``.

    Raises:
        ConfigurationError: The result does not follow its schema, for example because a raw line
            was changed.
        ValueError: The folder has no raw lines.
    """
    # First, because the checksum of the joined file is a part of the result.
    _join(folder)
    environment = read_environment(folder)
    lines = _used(read_lines(folder))
    result = summarize(lines, environment)
    texts = _texts(result, environment, lines)
    for name, text in texts.items():
        _write(folder / name, text)
    # So that a change of any other file of the folder is noticed.
    result["files"] = {}
    for name in FILES:
        path = folder / name
        if name != RESULT and path.exists():
            result["files"][name] = {"sha256": digest(path), "bytes": path.stat().st_size}
    check_result(result)
    # Last: a folder with a result is complete.
    _write(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return result


def _join(folder: Path) -> None:
    """Append the lines of all workers to ``metrics.jsonl``, and remove their files."""
    sources = read_lines(folder).paths
    if sources in ([], [folder / LINES]):
        return
    # Every worker writes its own file during the run, and at the end rank 0 joins them.
    with replacing(folder / LINES) as temporary, temporary.open("wb") as joined:
        for path in sources:
            with path.open("rb") as part:
                shutil.copyfileobj(part, joined)
                # Half a line of a killed worker must not swallow the first line of the next one.
                if not ends_line(part):
                    joined.write(b"\n")
    # Only now that the joined file is in its place: no line may be lost if this process is killed.
    for path in sources:
        if path.name != LINES:
            path.unlink()


def _used(lines: RawLines) -> list[dict[str, Any]]:
    """Return the lines that a result follows from, so that they are read and parsed only once.

    Only the statistics of rank 0 count, and those of all workers may need much memory.
    """
    used = []
    for line in lines:
        if line["rank"] == 0 or line["kind"] != "stat" or "totals" in line:
            used.append(line)
    return used


def _texts(
    result: Mapping[str, Any], environment: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the content of the files that follow from the others."""
    log = ""
    for line in mlperf_lines(result, environment, lines):
        log += line + "\n"
    texts = {MLPERF: log}
    goal = result["goal"]
    if goal is not None and goal["reached"] and goal["text"]:
        texts[OFFICIAL] = goal["text"] + "\n"
    return texts


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result of a run, also of one that was killed.

    Args:
        folder: The result folder. Without ``result.json``, the result is computed from the raw
            lines, and its state is ``"unfinished"``.

    Raises:
        ConfigurationError: The folder has neither a result nor raw lines, or its files are damaged
            or have an unknown version.
    """
    path = folder / RESULT
    if path.exists():
        return dict(check_result(_read_json(path), str(path)))
    # All workers were killed: the raw lines have the totals up to the last epoch that ended.
    environment = read_environment(folder)
    try:
        result = summarize(read_lines(folder), environment)
        # All workers wrote their end, but rank 0 was killed before it wrote the result.
        if result["run"]["state"] == "finished":
            result["run"].update(state="unfinished", reason=f"no {RESULT} was written")
        return dict(check_result({**result, "files": {}}, f"the raw lines in {folder}"))
    except _DAMAGE as error:
        raise ConfigurationError(
            f"{folder} is not a result folder: it has no {RESULT}, and {error}; give the "
            "folder of a run"
        ) from error


def find_folders(path: Path) -> Iterator[Path]:
    """Yield every result folder at or below a path, in order.

    Folders that :func:`is_searched` excludes are left out.

    Args:
        path: A result folder, or a folder with result folders at any depth.
    """
    if (path / RESULT).is_file() or read_lines(path).paths:
        yield path
        return
    for child in sorted(path.iterdir()):
        # A link may lead back to a folder above, and the search would never end.
        if child.is_dir() and not child.is_symlink() and is_searched(child, path):
            yield from find_folders(child)


def is_searched(folder: Path, root: Path) -> bool:
    """Return True if a search for results enters a folder.

    It enters no folder ``earlier-N``, which has an earlier run, and no hidden one, which may have
    an unfinished copy.

    Args:
        folder: The folder.
        root: A folder above it, at which the search begins; its own name does not count.
    """
    names = folder.relative_to(root).parts
    return not any(name.startswith((".", "earlier-")) for name in names)


def verify_folder(folder: Path) -> list[str]:
    """Recompute a result from the raw lines, and check the schema and the checksums.

    Args:
        folder: The result folder.

    Returns:
        The problems, each in one sentence; empty if nothing is wrong.
    """
    if not (folder / RESULT).exists():
        return [f"{RESULT} is missing: the run did not end, or this is not a result folder"]
    try:
        result = read_result(folder)
    except ConfigurationError as error:
        return [str(error)]
    problems = []
    for name, expected in result["files"].items():
        path = folder / name
        if name not in FILES or not path.is_file():
            problems.append(f"{name} is missing")
        # The size first, because the file may have become so large that it takes long to read.
        elif path.stat().st_size != expected["bytes"] or digest(path) != expected["sha256"]:
            problems.append(f"{name} was changed: its SHA-256 is not the one in {RESULT}")
    for name in FILES:
        if name not in (RESULT, *result["files"]) and os.path.lexists(folder / name):
            problems.append(f"{name} has no checksum in {RESULT}")
    lines = read_lines(folder)
    if not lines.paths:
        return [*problems, f"{LINES} is missing: the result cannot be recomputed"]
    try:
        problems += _recompute(folder, result, _used(lines))
    except _DAMAGE as error:
        problems.append(
            f"the result cannot be recomputed from the raw lines: {type(error).__name__}: {error}"
        )
    for line in lines.skipped:
        problems.append(f"{LINES} has a line that cannot be read: {line}")
    return problems


def _recompute(
    folder: Path, result: Mapping[str, Any], lines: Sequence[dict[str, Any]]
) -> list[str]:
    """Compute the result and the files that follow from the raw lines, and name the differences."""
    environment = read_environment(folder)
    again = summarize(lines, environment)
    written = dict(result)
    written.pop("files", None)
    # Through JSON, as the written one: tuples become lists, and the keys of a dictionary texts.
    computed = json.loads(json.dumps(again))
    if lacking(result):
        computed = _as_before(computed)
    problems = _differences(written, computed)
    for name, text in _texts(again, environment, lines).items():
        path = folder / name
        # That a file is missing has been reported by its checksum already.
        is_equal = not path.is_file() or _holds(path, text.encode())
        if name == OFFICIAL and not is_equal:
            # Earlier versions wrote the official result without a line break at its end.
            is_equal = _holds(path, text.removesuffix("\n").encode())
        if name not in result["files"] or not is_equal:
            problems.append(f"{name} does not follow from the raw lines")
    return problems + _check_goal(again, lines) + _check_times(lines)


def lacking(result: Mapping[str, Any]) -> list[str]:
    """Return the names of the numbers that a result lacks, because an earlier version wrote it.

    Args:
        result: The content of a ``result.json``.
    """
    return [name for name in _LATER_NUMBERS if name not in result]


def _as_before(computed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as earlier versions wrote it: communication without a measurement is 0."""
    before = dict(computed)
    for name in _LATER_NUMBERS:
        before.pop(name, None)
    before["bytes_sent"] = {name: value or 0 for name, value in computed["bytes_sent"].items()}
    before["times"] = _with_zeros(computed["times"])
    if computed["goal"] is not None:
        before["goal"] = {**computed["goal"], "times": _with_zeros(computed["goal"]["times"])}
    return before


def _with_zeros(times: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
    if times is None:
        return None
    filled = {}
    for worker, seconds in times.items():
        filled[worker] = {name: value or 0.0 for name, value in seconds.items()}
    return filled


def _holds(path: Path, content: bytes) -> bool:
    """Return True if a file has this content; a file of another size is not read."""
    return path.stat().st_size == len(content) and path.read_bytes() == content


def _differences(written: Any, computed: Any, field: str = "") -> list[str]:
    """Name the fields in which the written result differs from the recomputed one."""
    if isinstance(written, dict) and isinstance(computed, dict):
        differences = []
        for name in dict.fromkeys([*written, *computed]):
            inner = name
            if field:
                inner = f"{field}.{name}"
            differences += _differences(written.get(name), computed.get(name), inner)
        return differences
    if written == computed:
        return []
    return [f"{field} of {RESULT} is {written!r}, and {computed!r} by the raw lines"]


def _check_goal(result: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> list[str]:
    """Check that the result has its goal at the first statistic that reaches the threshold."""
    goal = result["goal"]
    if goal is not None and goal.get("budget_s") is not None:
        return _check_budget(goal, lines)
    if goal is None or goal["metric"] is None or goal["threshold"] is None:
        return []
    aim = GoalAim.from_dict(goal)
    for line in statistics(lines, goal["metric"]):
        if aim.reached_by(line["value"]):
            return _check_moment(goal, line)
    if goal["reached"]:
        return ["the result says that the goal was reached, but no statistic reached it"]
    return []


def _check_moment(goal: Mapping[str, Any], line: Mapping[str, Any]) -> list[str]:
    """Check that the result has its goal at the statistic in a line."""
    step, epoch, value = line["step"], line["epoch"] + 1, line["value"]
    if not goal["reached"]:
        return [f"{goal['metric']} reached the goal at step {step}, but the result says it did not"]
    if (step, epoch, value) == (goal["step"], goal["epochs"], goal["value"]):
        return []
    claimed = f"at step {goal['step']} in epoch {goal['epochs']} with {goal['value']}"
    return [
        f"the goal was reached at step {step} in epoch {epoch} with {value}, but the result says "
        f"{claimed}"
    ]


def _check_budget(goal: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> list[str]:
    """Check the goal of a fixed training time: its moment, and that its value is the best one."""
    budget_s, stats = goal["budget_s"], statistics(lines, goal["metric"])
    # Another worker may be slower than rank 0 and end the run before. None may end it after rank
    # 0's time was over.
    due = None
    for end in _ends_of_epochs(lines):
        if end["totals"].get("train_s", 0.0) >= budget_s:
            due = _first_step(stats, end["step"])
            break
    if not goal["reached"]:
        if due is None:
            return []
        return [f"the training time was over at step {due}, but the result says it was not"]
    problems = []
    if due is not None and due < goal["step"]:
        problems.append(
            f"the training time was over at step {due}, but the result says at step {goal['step']}"
        )
    reached_s = goal["time_to_goal_s"]["slowest"]
    if reached_s < budget_s:
        problems.append(
            f"the goal needs {budget_s:g} s of training, but was reached after {reached_s:.3f} s"
        )
    values = []
    for line in stats:
        if line["step"] <= goal["step"] and line["value"] is not None:
            values.append(line["value"])
    best = min(values, default=None) if goal["minimize"] else max(values, default=None)
    # Of a metric that is not its primary one, a tracker knows the latest value only.
    if goal["value"] not in (best, *values[-1:]):
        problems.append(
            f"the best value until step {goal['step']} was {best}, but the result says "
            f"{goal['value']}"
        )
    return problems


def _first_step(stats: Iterable[Mapping[str, Any]], least: int) -> int | None:
    """Return the first step of a statistic that is at least ``least``; None if there is none."""
    for line in stats:
        step: int = line["step"]
        if step >= least:
            return step
    return None


def _ends_of_epochs(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rank 0's lines of the kind ``epoch``, without those that a resumed run repeated."""
    ends: list[dict[str, Any]] = []
    for line in lines:
        if line["rank"] != 0:
            continue
        if line["kind"] == "start":
            ends = before_start(ends, line)
        elif line["kind"] == "epoch":
            ends.append(dict(line))
    return ends


def _check_times(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Check the times of every worker.

    They only grow, steps take no longer than the training, and the time to the goal is the training
    time.
    """
    # A dictionary, because the same problem may be in many lines.
    problems: dict[str, None] = {}
    last: dict[int, float] = {}
    for line in lines:
        totals, rank = line.get("totals"), line["rank"]
        if line["kind"] == "start":
            # A resumed run continues from its checkpoint, which can be older than the last line.
            last.pop(rank, None)
        if totals is None:
            continue
        train_s, steps_s = totals.get("train_s", 0.0), sum(totals.get("steps_s", {}).values())
        if train_s < last.get(rank, 0.0):
            problems[f"the training time of rank {rank} becomes smaller"] = None
        # A failure inside a batch: its steps count, but the batch does not, because it never ended.
        # 1 % and 1 ms allow for the rounding of CUDA events.
        is_interrupted = line["kind"] == "end" and line.get("state") == "failed"
        if not is_interrupted and steps_s > train_s * 1.01 + 0.001:
            taken = f"{steps_s:.3f} s of {train_s:.3f} s of training"
            problems[f"the steps of rank {rank} take {taken}"] = None
        last[rank] = train_s
        negative = []
        for name, value in totals.items():
            if isinstance(value, int | float) and value < 0:
                negative.append(name)
        if negative:
            problems[f"totals of rank {rank} are negative: {', '.join(negative)}"] = None
        to_goal_s = line.get("time_to_goal_s", train_s)
        if abs(to_goal_s - train_s) > train_s * 0.01 + 0.001:
            moment = f"in {to_goal_s:.3f} s, but had trained {train_s:.3f} s"
            problems[f"rank {rank} reached the goal {moment}"] = None
    return list(problems)


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigurationError: The file is too large, or holds something else.
    """
    try:
        # Reading a pipe would wait without end.
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a JSON object: {error}; restore it from a copy"
        ) from error
    return content
