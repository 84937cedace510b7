"""Read results from folders, zip files of the master, and files of ``mlbench run --wait``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlbench_core.comparison.master_metrics import Metrics, count_ranks
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import creating_folder, replacing
from mlbench_core.results.folder import FILES, RESULT, find_folders, is_searched, read_result
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.results.schema import check_result

__all__ = ["MOST_UNPACKED_BYTES", "identity", "load", "save", "unpack"]

# Metrics of a long run have some megabytes. After parsing, more than this may not fit in memory.
_MOST_JSON_BYTES = 256 << 20
# Raw lines of a long run with many workers have some hundred megabytes.
MOST_UNPACKED_BYTES = 4 << 30
"""The most bytes that an archive of result folders may have when it is unpacked."""

# Errors of a zip file that is damaged, encrypted, or compressed in a way that Python does not know.
_BAD_ZIP = (zipfile.BadZipFile, ValueError, zlib.error, EOFError, RuntimeError, NotImplementedError)

_NAME_IN_ZIP = re.compile(r"(?:^|/)result_(.+)\.json$")
# Name of a file with the metrics of one worker: of this master, of earlier ones and of version 3.0.
# On Kubernetes, more words may follow "worker", but no underscore.
_WORKER_IN_ZIP = re.compile(r"(?:pod_)?([^_/]+-worker(?:-[^_/]+)?-\d+)(?:_.*)?\.json$")


def load(
    paths: Iterable[str | os.PathLike[str]],
    *,
    empty_is_error: bool = True,
    unreadable: Callable[[str], None] | None = None,
) -> list[RunRecord]:
    """Read all results at the given paths.

    Args:
        paths: Each is a result folder, a folder with results at any depth, a zip file of the
            master, or a JSON file of ``mlbench run --wait``.
        empty_is_error: False to accept a path that has no result.
        unreadable: Function to call with a message about each result that cannot be read. The
            result is then left out. None to raise an exception instead.

    Returns:
        One record for each run, sorted by the number of workers, then by name. A run that is found
        twice counts once, and its result folder takes precedence. Other files in folders are
        skipped.

    Raises:
        ConfigurationError: A path has no result, a file is damaged, or a result has an unknown
            version.
    """
    records: dict[str, RunRecord] = {}
    for path in map(Path, paths):
        problems: list[str] = []
        if unreadable is None:
            at_path = list(_load(path, None))
        else:
            at_path = list(_load(path, problems.append))
            for problem in problems:
                unreadable(problem)
        if not at_path and not problems and empty_is_error:
            raise ConfigurationError(
                f"{path} has no result: name a result folder, or a file of 'mlbench run "
                "--wait' or 'mlbench download'"
            )
        for record in at_path:
            key = identity(record)
            if key not in records or record.folder is not None:
                records[key] = record
    return sorted(records.values(), key=lambda record: (record.workers or 0, record.name))


def identity(record: RunRecord) -> str:
    """Return a text that is equal for copies of a run.

    Copies differ only in the path from which they were read. Remarks may contain it, so they do
    not count.

    Args:
        record: The run.

    Raises:
        ConfigurationError: A setting of the run is nested too deeply.
    """
    try:
        without_place = dataclasses.replace(record, source="", folder=None, remarks=())
        return json.dumps(without_place.as_json(), sort_keys=True, default=str)
    except RecursionError as error:
        raise ConfigurationError(
            f"{record.source} is nested hundreds of levels deep: remove it"
        ) from error


def _load(path: Path, unreadable: Callable[[str], None] | None) -> Iterator[RunRecord]:
    if path.is_file():
        if path.name == RESULT:
            yield from _read(_load_folder, path.parent, unreadable)
        elif path.suffix == ".zip":
            yield from _read(_load_zip, path, unreadable)
        elif path.suffix == ".json":
            yield from _read(_load_json, path, unreadable)
        return
    if not path.is_dir():
        raise ConfigurationError(f"{path} does not exist")
    folders = set(find_folders(path))
    for folder in sorted(folders):
        yield from _read(_load_folder, folder, unreadable)
    for file in sorted(itertools.chain(path.rglob("*.json"), path.rglob("*.zip"))):
        # 'mlbench run --wait' keeps NAME.json beside the result folder NAME of the same run.
        in_folder = file.with_suffix("") in folders or not folders.isdisjoint(file.parents)
        if file.is_file() and is_searched(file.parent, path) and not in_folder:
            yield from _load(file, unreadable)


def _read(
    read: Callable[[Path], RunRecord | None], path: Path, unreadable: Callable[[str], None] | None
) -> Iterator[RunRecord]:
    try:
        record = read(path)
    except ConfigurationError as error:
        if unreadable is None:
            raise
        unreadable(str(error))
        return
    if record is not None:
        yield record


def _load_folder(folder: Path) -> RunRecord:
    lines = read_lines(folder)
    if not lines.paths:
        raise ConfigurationError(
            f"{folder} has no raw lines of the run (metrics.jsonl): copy the whole folder"
        )
    result = read_result(folder)
    remarks = []
    if not (folder / RESULT).exists():
        remarks.append(
            f"{folder} has no {RESULT}: the run did not end, and its raw lines are shown"
        )
        # Iterating finds the lines that cannot be read, such as the last line of a killed run.
        for _ in lines:
            pass
        for skipped in lines.skipped:
            remarks.append(f"{folder}: {skipped} is left out")
    return RunRecord.from_result(result, folder, str(folder), tuple(remarks))


def _load_json(path: Path) -> RunRecord | None:
    if path.stat().st_size > _MOST_JSON_BYTES:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    # Deeply nested brackets raise RecursionError.
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
        return None
    run = content.get("run")
    if not isinstance(run, dict):
        run = {"name": path.stem}
    return RunRecord.from_metrics(content["metrics"], run, str(path))


def _load_zip(path: Path) -> RunRecord | None:
    metrics: dict[str, Any] = {}
    run: dict[str, Any] = {"name": path.stem.removeprefix("results_")}
    workers: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            # The size of the raw lines does not count, because they are not read.
            read = [name for name in names if name not in FILES or name == RESULT]
            _check_size(archive, _MOST_JSON_BYTES, read)
            for name in names:
                if name == "run.json":
                    content = json.loads(archive.read(name))
                    if isinstance(content, dict):
                        run.update(content)
                elif name == "official_result.txt":
                    text = archive.read(name).decode("utf-8", errors="replace")
                    # The file of the metric itself, if the archive has one, takes precedence.
                    metrics.setdefault("TaskResult @ 0", [{"value": text.strip()}])
                elif match := _NAME_IN_ZIP.search(name):
                    content = json.loads(archive.read(name))
                    if not isinstance(content, dict):
                        content = {match[1]: content}
                    metrics.update(content)
                elif match := _WORKER_IN_ZIP.match(name):
                    workers.add(match[1])
            if RESULT in names:
                result = check_result(json.loads(archive.read(RESULT)), f"{RESULT} in {path}")
                metrics["result @ 0"] = [{"value": dict(result)}]
    except _BAD_ZIP as error:
        raise ConfigurationError(f"{path} is damaged ({error}); download it again") from error
    has_record = not {"run.json", "official_result.txt", RESULT}.isdisjoint(names)
    if not workers and not has_record and not any(map(_NAME_IN_ZIP.search, names)):
        return None
    if workers:
        # Archives of earlier versions have no run.json, but one file or more for each worker.
        run.setdefault("num_workers", len(workers))
    record = RunRecord.from_metrics(metrics, run, str(path))
    if record.workers is None and count_ranks(metrics):
        # Some archives of version 3.0 lack these files. In that version all workers sent metrics,
        # so the metrics of only one rank mean one worker.
        record = RunRecord.from_metrics(metrics, {**run, "num_workers": 1}, str(path))
        remark = (
            "the archive does not state the number of workers, and one worker sent metrics: "
            "it counts as a run of one worker"
        )
        record = dataclasses.replace(record, remarks=(*record.remarks, remark))
    return record


def _check_size(archive: zipfile.ZipFile, most_bytes: int, names: Iterable[str]) -> None:
    """Refuse an archive whose files are too large when they are unpacked.

    Raises:
        ValueError: The named files together have more than ``most_bytes``. This limit is safe,
            because no more than the stated size of a file is ever read.
    """
    total = 0
    for name in names:
        total += archive.getinfo(name).file_size
    if total > most_bytes:
        raise ValueError(
            f"it has {total:,} bytes when unpacked, and at most {most_bytes:,} are allowed"
        )


def save(path: Path, run: Mapping[str, Any], metrics: Metrics) -> None:
    """Write a run and its metrics to a JSON file that :func:`load` reads.

    Args:
        path: The file. It is written atomically, and its folder is created.
        run: The run as the master describes it.
        metrics: Entries of every metric.
    """
    text = json.dumps({"run": dict(run), "metrics": dict(metrics)}, indent=1)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def unpack(archive: Path, folder: Path, *, unfinished: bool = False) -> bool:
    """Unpack the result folder of a run from a zip file of the master.

    Only :data:`FILES` are written; other files of the archive are ignored. An older result folder
    is replaced.

    Args:
        archive: The zip file.
        folder: The folder to create.
        unfinished: True to also unpack the raw lines of a run without ``result.json``, for example
            of a stopped one.

    Returns:
        False if the archive has no raw lines, or has no ``result.json`` and ``unfinished`` is
        False. Then nothing is written.

    Raises:
        ConfigurationError: The zip file is damaged.
    """
    required = {"metrics.jsonl"} if unfinished else {"metrics.jsonl", RESULT}
    try:
        with zipfile.ZipFile(archive) as content:
            names = [name for name in FILES if name in content.namelist()]
            if not required.issubset(names):
                return False
            _check_size(content, MOST_UNPACKED_BYTES, names)
            with creating_folder(folder.with_name(f".{folder.name}.new")) as temporary:
                for name in names:
                    with content.open(name) as source, (temporary / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    except _BAD_ZIP as error:
        raise ConfigurationError(f"{archive} is damaged ({error}); download it again") from error
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f".{folder.name}.new").replace(folder)
    return True
