"""Export metrics and results as JSON, CSV or a zip archive, in pieces that fit in memory."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import operator
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_core.comparison.table import safe_cell
from mlbench_master.api.schemas import LogsQuery
from mlbench_master.database.columns import PAGE, Columns, numbers_of
from mlbench_master.database.store import Point, Run, Store, pod_owner, run_owner
from mlbench_master.dates import format_date
from mlbench_master.engines.interface import Engine, LogLine, LogRange
from mlbench_master.runs.result_files import (
    FILES,
    RESULT_FILE,
    RESULT_METRIC,
    RefusedFileError,
    ResultFolder,
    is_result,
)

__all__ = [
    "LEFT_OUT_FILE",
    "Selection",
    "all_metrics_json",
    "log_file_name",
    "log_text",
    "metrics_csv",
    "metrics_json",
    "metrics_zip",
    "result_json",
    "safe_file_name",
    "summarize",
    "summarize_long",
]

LEFT_OUT_FILE = "left_out.txt"
"""The file of an archive with one line for each result file that is not in it."""

_CHUNK_CHARACTERS = 65_536
_CHUNK_BYTES = 2**20
# As many ids as Store.points_with takes.
_GROUPS_AT_ONCE = 500
_OFFICIAL_RESULT = "official_result.txt"
_LINES = "metrics.jsonl"


@dataclass(frozen=True)
class Selection:
    """A selection of entries of metrics.

    Attributes:
        since: Oldest date to include (microseconds since 1970).
        name: Only this metric.
        last_n: Number of the latest entries of each metric to include.
        summarize: Maximum number of entries of each metric; neighbors are averaged.
    """

    since: int | None = None
    name: str | None = None
    last_n: int | None = None
    summarize: int | None = None

    def of(self, store: Store, *owners: str) -> Iterator[tuple[str, str, Iterable[Point]]]:
        """Yield owner, name and entries of each selected metric of some owners."""
        counts = store.metric_counts(owners, self.name, self.since)
        for owner, name, points in store.entries(counts, self.since, self.last_n):
            count = counts[owner, name]
            if self.last_n is not None:
                count = min(count, self.last_n)
            if self.summarize is not None and count > self.summarize:
                if count > PAGE:
                    # The entries of a long metric have not been read yet. Reading its columns takes
                    # a tenth of the time.
                    points = summarize_long(store, owner, name, count, self.summarize)
                else:
                    points = summarize(points, count, self.summarize)
            yield owner, name, points


def summarize(points: Iterable[Point], count: int, most: int) -> Iterator[Point]:
    """Average neighbors, so that at most ``most`` entries remain.

    Entry i of n goes to group floor(i * most / n). A group's value is the average of its numbers,
    or its last text if it has none. Its date is the average of its dates. All other fields are
    those of its last entry.

    Args:
        points: The entries, by date.
        count: Number of entries. Further entries, which arrived in the meantime, join the last
            group.
        most: Maximum number of groups, at least 1.

    Yields:
        The groups in order.
    """
    group: list[Point] = []
    number = 0
    for index, point in enumerate(points):
        target = min(index * most // count, most - 1)
        if target != number and group:
            yield _average(group)
            group = []
        number = target
        group.append(point)
    if group:
        yield _average(group)


def summarize_long(store: Store, owner: str, name: str, count: int, most: int) -> Iterator[Point]:
    """Average neighbors of the last entries of a metric as :func:`summarize` does.

    It reads one row of each group, and the numbers of all entries from columns.

    Args:
        store: The database.
        owner: Owner of the metric.
        name: The metric.
        count: Number of last entries to average.
        most: Maximum number of groups, at least 1.

    Yields:
        The groups in order.
    """
    groups = _groups(store.columns(owner, name), store.size(owner, name) - count, count, most)
    # The members of one group are in memory at a time.
    means = (
        (group.last_id, len(group.dates), *_means(group.dates, group.numbers)) for group in groups
    )
    while some := list(itertools.islice(means, _GROUPS_AT_ONCE)):
        rows = store.points_with([last_id for last_id, *_ in some])
        for last_id, size, date, value in some:
            point = rows.get(last_id)
            if point is None:  # deleted in the meantime
                continue
            if size > 1:
                point = replace(point, date=date, value=value or point.value)
            yield point


@dataclass
class _Group:
    """Neighboring entries: their dates, their finite numbers, and the id of the last one."""

    number: int
    dates: list[int]
    numbers: list[float]
    last_id: int


def _groups(parts: Iterable[Columns], skip: int, count: int, most: int) -> Iterator[_Group]:
    current: _Group | None = None
    start = -skip
    for whole in parts:
        part = whole.at(slice(max(0, -start), None))
        steps = np.arange(max(0, start), start + len(whole))
        start += len(whole)
        numbers = np.minimum(steps * most // count, most - 1)
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for first, end in itertools.pairwise([*firsts.tolist(), len(part)]):
            members = part.at(slice(first, end))
            finite = members.numbers[~np.isnan(members.numbers)].tolist()
            number, last_id = int(numbers[first]), int(members.ids[-1])
            group = _Group(number, members.dates.tolist(), finite, last_id)
            # A group may be in several parts.
            if current is not None and current.number == group.number:
                current.dates += group.dates
                current.numbers += group.numbers
                current.last_id = group.last_id
                continue
            if current is not None:
                yield current
            current = group
    if current is not None:
        yield current


def _average(group: Sequence[Point]) -> Point:
    if len(group) == 1:
        return group[0]
    numbers = numbers_of(point.value for point in group)
    date, value = _means([point.date for point in group], numbers)
    return replace(group[-1], date=date, value=value or group[-1].value)


def _means(dates: Sequence[int], numbers: Sequence[float]) -> tuple[int, str]:
    """Return the mean of the dates of a group, and that of its numbers as text."""
    date = sum(dates) // len(dates)
    if not numbers:
        return date, ""
    # Each number is divided before the sum, because the sum of large finite numbers can overflow.
    return date, repr(math.fsum(number / len(numbers) for number in numbers))


def metrics_json(store: Store, owner: str, selection: Selection) -> Iterator[str]:
    """Yield ``{metric: [{date, value, cumulative}, ...]}`` in pieces."""
    metrics = selection.of(store, owner)
    return _in_chunks(_object((name, _list(map(_short, points))) for _, name, points in metrics))


def metrics_csv(store: Store, owner: str, selection: Selection) -> Iterator[str]:
    """Yield lines of CSV with a header in pieces: name, date, rank, epoch and value of each entry.

    Rank and epoch are those of the metadata, or empty. A name or value that a spreadsheet would
    take for a formula gets an apostrophe before it; numbers stay as they are.
    """
    return _in_chunks(_csv_lines(store, owner, selection))


def _csv_lines(store: Store, owner: str, selection: Selection) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(("name", "date", "rank", "epoch", "value"))
    for _, name, points in selection.of(store, owner):
        name_cell = _cell(name)
        for point in points:
            rank, epoch = _rank_and_epoch(point.extra)
            row = (name_cell, format_date(point.date), rank, epoch, _cell(point.value))
            writer.writerow(row)
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _cell(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return str(safe_cell(text))
    # A negative number begins as a formula does.
    return text


def _rank_and_epoch(extra: str) -> tuple[str, str]:
    metadata = None
    try:
        if extra:
            metadata = json.loads(extra)
    except (ValueError, RecursionError):
        # A client may send any text, also one of thousands of brackets.
        return "", ""
    if not isinstance(metadata, dict):
        return "", ""
    return _number_text(metadata.get("rank")), _number_text(metadata.get("epoch"))


def _number_text(value: object) -> str:
    """Return a number as text, and an empty text for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    return str(value)


def all_metrics_json(store: Store) -> Iterator[str]:
    """Yield every metric of every pod and run in pieces, in the format of ``GET /api/metrics/``."""
    pods = {pod_owner(name): name for name in store.pods_with_metrics()}
    runs = {run_owner(run.id): run.name for run in store.runs()}
    parts = {
        "pod_metrics": _object(_by_owner(store, pods)),
        "run_metrics": _object(_by_owner(store, runs)),
    }
    return _in_chunks(_object(parts.items()))


def result_json(store: Store, run: Run, results: Path | None) -> bytes | None:
    """Return the ``result.json`` of a run, or None if there is no valid one.

    Args:
        store: The database.
        run: The run.
        results: The folder for the results of its workers. If it has no ``result.json``, because
            the workers ran elsewhere, the metric that the first worker sent takes its place.
    """
    folder = ResultFolder.find(results)
    content = None
    if folder is not None:
        with folder:
            content = folder.read(RESULT_FILE)
    if is_result(content):
        return content
    return _sent_result(store, run)


def metrics_zip(
    store: Store, owner: str, run: Run | None, selection: Selection, results: Path | None = None
) -> Iterator[bytes]:
    """Yield a zip archive of metrics and results in pieces, made while it is sent.

    Args:
        store: The database.
        owner: Owner of the metrics.
        run: The run, if the owner is one. Its record (state, number of workers, backend, command,
            ...) is the file ``run.json``, as the API shows it. Each metric of one of its workers
            has a file ``<worker>_<metric>.json``. The result files of its workers follow, see
            :data:`~mlbench_master.runs.result_files.FILES`. If the folder has no
            ``official_result.txt``, it is the value of ``TaskResult @ 0``, which exists if the goal
            was reached. If it has no ``result.json``, that is the value of ``result @ 0``. Files
            that were refused are named in ``left_out.txt``.
        selection: The entries to include.
        results: The folder for the results of the run's workers, which may have any content.

    Yields:
        Bytes of the archive.
    """
    sink = _Sink()
    names: set[str] = set()
    pods: list[str] = []
    if run is not None:
        pods += map(pod_owner, run.worker_names())
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        if run is not None:
            archive.writestr("run.json", json.dumps(run.to_json(), indent=1))
        for source, name, points in selection.of(store, owner, *pods):
            prefix = source.removeprefix("pod:")
            if source == owner:
                prefix = "result"
            file_name = safe_file_name(f"{prefix}_{name}", names) + ".json"
            # The size is unknown before the data, so it has to allow for more than 4 GiB.
            with archive.open(file_name, "w", force_zip64=True) as file:
                for text in _in_chunks(_list(map(_short, points))):
                    file.write(text.encode())
                    yield sink.take()
        if run is not None:
            yield from _add_results(archive, sink, results)
            written = archive.namelist()
            if _OFFICIAL_RESULT not in written and run.goal_result is not None:
                archive.writestr(_OFFICIAL_RESULT, f"{run.goal_result}\n")
            if RESULT_FILE not in written:
                sent = _sent_result(store, run)
                if sent is not None:
                    archive.writestr(RESULT_FILE, sent)
    yield sink.take()


def log_text(engine: Engine, run: Run, query: LogsQuery) -> Iterator[str]:
    """Yield the wanted lines of a run's log in pieces, up to the end that the log has now."""
    if run.job_id is None:
        return
    # A run that writes faster than the client reads must not make the file endless.
    end = engine.log_end(run.job_id)
    if query.before_line is not None:
        end = min(end, query.before_line)
    following = query.since_line
    while following < end:
        page = engine.logs(run.job_id, LogRange(following, wanted=query.wanted))
        yield "".join(_log_line(line) for line in page.lines if line["line"] < end)
        if page.next <= following:
            return
        following = page.next


def _log_line(line: LogLine) -> str:
    who = f"rank {line['rank']}"
    if line["rank"] is None:
        who = "master"
    return f"{line['date']} {who} {line['stream']} | {line['text']}\n"


def log_file_name(run: Run, query: LogsQuery) -> str:
    """Return the name of the file with the wanted lines of a run's log."""
    name = run.name
    if query.rank == "master":
        name += "-master"
    elif query.rank is not None:
        name += f"-rank-{query.rank}"
    if query.stream is not None:
        name += f"-{query.stream}"
    return safe_file_name(name, set()) + ".log"


def safe_file_name(name: str, taken: set[str]) -> str:
    """Return a file name that stays in its folder on every system.

    Args:
        name: Any text.
        taken: Names in use (compared without case); the new one is added.

    Returns:
        The name with everything but letters, digits, blanks and ``@._+-`` replaced by ``_``,
        numbered if taken.

    Example:
        >>> safe_file_name("result_../../etc/passwd @ 0", set())
        'result_.._.._etc_passwd @ 0'
    """
    # Windows drops blanks and dots at the end of a name.
    base = re.sub(r"[^\w @.+-]", "_", name, flags=re.ASCII)[:150].strip(" .") or "_"
    unique, number = base, 1
    # On Windows and macOS, names that differ only in their case mean one file.
    while unique.lower() in taken:
        number += 1
        unique = f"{base}~{number}"
    taken.add(unique.lower())
    return unique


def _sent_result(store: Store, run: Run) -> bytes | None:
    value = store.newest_value(run_owner(run.id), RESULT_METRIC)
    if value is None or not is_result(value):
        return None
    return value.encode()


def _add_results(archive: zipfile.ZipFile, sink: _Sink, results: Path | None) -> Iterator[bytes]:
    """Add the result files of a run to an archive, and yield its bytes."""
    folder = ResultFolder.find(results)
    if folder is None:
        return
    left_out = []
    with folder:
        for name in FILES:
            try:
                # Up to the size that it has now: the file of a running worker grows.
                file, left = folder.open(name)
                with file, archive.open(name, "w", force_zip64=True) as target:
                    while chunk := file.read(min(left, _CHUNK_BYTES)):
                        target.write(chunk)
                        left -= len(chunk)
                        yield sink.take()
            except FileNotFoundError:
                continue
            except (RefusedFileError, OSError) as error:
                left_out.append(f"{name}: {error}\n")
        # A run that was stopped has no result, but its raw lines show how far it came.
        if RESULT_FILE not in archive.namelist() and _LINES not in archive.namelist():
            yield from _join_lines(archive, sink, folder, left_out)
    if left_out:
        archive.writestr(LEFT_OUT_FILE, "".join(left_out))


def _join_lines(
    archive: zipfile.ZipFile, sink: _Sink, folder: ResultFolder, left_out: list[str]
) -> Iterator[bytes]:
    """Add the raw lines of all workers as one file, and yield the bytes of the archive."""
    names = folder.lines_of_workers()
    if not names:
        return
    with archive.open(_LINES, "w", force_zip64=True) as target:
        for name in names:
            end = b"\n"
            try:
                file, left = folder.open(name)
                with file:
                    while chunk := file.read(min(left, _CHUNK_BYTES)):
                        target.write(chunk)
                        left, end = left - len(chunk), chunk[-1:]
                        yield sink.take()
            except (RefusedFileError, OSError) as error:
                left_out.append(f"{name}: {error}\n")
            # A killed worker can leave half a line, and so can an error while reading.
            if end != b"\n":
                target.write(b"\n")


class _Sink:
    """A file that cannot seek, and keeps the written bytes until they are taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing; zipfile requires this method."""

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _short(point: Point) -> dict[str, Any]:
    return {"date": format_date(point.date), "value": point.value, "cumulative": point.cumulative}


def _by_owner(store: Store, names: dict[str, str]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each owner and its metrics in pieces of JSON."""
    left = dict(names)
    metrics = Selection().of(store, *names)
    for owner, group in itertools.groupby(metrics, key=operator.itemgetter(0)):
        pieces = _object((name, _list(_full(name, points))) for _, name, points in group)
        yield left.pop(owner), pieces
    # A run without metrics is part of the answer, too.
    for name in left.values():
        yield name, "{}"


def _full(name: str, points: Iterable[Point]) -> Iterator[dict[str, Any]]:
    return ({"name": name, **_short(point), "metadata": point.extra} for point in points)


def _object(pairs: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    yield "{"
    separator = ""
    for key, pieces in pairs:
        yield f"{separator}{json.dumps(key)}: "
        yield from pieces
        separator = ", "
    yield "}"


def _list(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield "["
    separator = ""
    for entry in entries:
        yield separator + json.dumps(entry)
        separator = ", "
    yield "]"


def _in_chunks(pieces: Iterable[str]) -> Iterator[str]:
    # Every piece becomes one message of the server, so small ones are joined.
    buffer: list[str] = []
    size = 0
    for piece in pieces:
        buffer.append(piece)
        size += len(piece)
        if size >= _CHUNK_CHARACTERS:
            yield "".join(buffer)
            buffer, size = [], 0
    yield "".join(buffer)
