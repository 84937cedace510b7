"""Check the files of a data set against published checksums, or sizes if none are published."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlbench_core import files
from mlbench_core.dataset.download import show_progress
from mlbench_core.dataset.libsvm_names import KNOWN, has_stores
from mlbench_core.dataset.local_files import count_lines, open_file, read_lines
from mlbench_core.dataset.registry import DataFile, DatasetRecord
from mlbench_core.errors import DatasetError, require

__all__ = ["FileStatus", "verify"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileStatus:
    """The result of the check of one file.

    Attributes:
        path: The file; if it is missing, the path at which it is expected.
        status: ``"ok"``, ``"missing"`` or ``"damaged"``.
        detail: The kind of the check if the file is ok, otherwise the problem.
    """

    path: Path
    status: str
    detail: str


def verify(record: DatasetRecord, folder: Path | None = None) -> list[FileStatus]:
    """Check the files of a data set.

    The content is checked after decompression, so a file may be plain or compressed. For a linear
    model's data, the text, the stores that were made from it, or both may exist.

    Args:
        record: The data set.
        folder: Its folder; None is its default folder.

    Returns:
        The result for each file, at least one.

    Raises:
        MissingDependencyError: The folder has stores of a linear model's data, and a package to
            read them is missing.

    Example:
        >>> import tempfile
        >>> from mlbench_core.dataset.registry import get_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train-labels-idx1-ubyte").write_bytes(b"cut off")
        ...     [each.status for each in verify(get_dataset("mnist"), Path(folder))]
        ['missing', 'damaged', 'missing', 'missing']
    """
    folder = folder or record.folder
    if record.origin == "installed":
        return [_check_scikit_learn()]
    if record.origin == "by hand":
        return [_check_classes(folder / "train"), _check_classes(folder / "val")]
    # Functions, so that the progress knows their number before the first one runs.
    checks: list[Callable[[], list[FileStatus]]] = []
    if record.origin == "generated":
        # Generated rows have stores, but no text.
        for part in ("train", "test"):
            checks.append(partial(_check_linear, record, part, None, folder))
    for file in record.files:
        if record.name in KNOWN:
            checks.append(partial(_check_linear, record, file.name, file, folder))
        else:
            checks.append(partial(_check_file, file, folder))
    statuses: list[FileStatus] = []
    with show_progress(record.name, len(checks)) as advance:
        for check in checks:
            statuses += check()
            advance(1)
    return statuses


def _check_file(file: DataFile, folder: Path) -> list[FileStatus]:
    match = file.find(folder)
    if match is None:
        expected = folder / file.forms[0].path
        return [FileStatus(expected, "missing", "does not exist, plain or compressed")]
    path, form = match
    name, measure = _MEASURES[form.check]
    try:
        value = measure(path)
    except DatasetError as error:
        # The status has the path and this word already.
        problem = str(error).removeprefix(f"{path} ").removeprefix("is damaged: ")
        return [FileStatus(path, "damaged", problem)]
    if value != form.expected:
        problem = f"its {name} is {value}, not {form.expected}: delete it and get it again"
        return [FileStatus(path, "damaged", problem)]
    return [FileStatus(path, "ok", name)]


def _check_linear(
    record: DatasetRecord, part: str, text: DataFile | None, folder: Path
) -> list[FileStatus]:
    """Check the text and the stores of one part; one of them is enough."""
    statuses: list[FileStatus] = []
    expected = f"{record.name}_{part}.lmdb"
    if text is not None:
        expected = text.forms[0].path
        if text.find(folder):
            statuses += _check_file(text, folder)
    if has_stores(folder, record.name, part):
        statuses += _check_stores(record, part, folder)
    if statuses:
        return statuses
    return [FileStatus(folder / expected, "missing", "neither its text nor its store exists")]


def _check_stores(record: DatasetRecord, part: str, folder: Path) -> list[FileStatus]:
    """Check the blocks of the stores, and their number of rows if it is known."""
    require("torch", "torch")
    require("lmdb", "linear")
    from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore, find_stores

    statuses: list[FileStatus] = []
    rows = 0
    is_damaged = False
    for path in find_stores(folder, record.name, part):
        try:
            store = LinearStore(path)
            store.verify()
            rows += len(store)
        except DatasetError as error:
            statuses.append(FileStatus(path, "damaged", str(error)))
            is_damaged = True
        else:
            statuses.append(FileStatus(path, "ok", "CRC-32 of its blocks"))
    # A damaged store already has the reason why rows are missing.
    if record.name not in KNOWN or is_damaged:
        return statuses
    expected = KNOWN[record.name].files[part].n_rows
    if rows == expected:
        return statuses
    problem = f"has {rows} rows in all its stores, not {expected}: prepare it again"
    damaged = []
    # It is not known which of them lacks rows.
    for status in statuses:
        damaged.append(FileStatus(status.path, "damaged", problem))
    return damaged


def _check_scikit_learn() -> FileStatus:
    """Check that scikit-learn is installed, without its import, which takes a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        problem = "not installed: pip install 'mlbench-core[vision]'"
        return FileStatus(Path("scikit-learn"), "missing", problem)
    return FileStatus(Path(spec.origin).parent, "ok", "scikit-learn is installed")


def _check_classes(folder: Path) -> FileStatus:
    """Check that a folder has one folder for each class, or tar files."""
    n_classes = 0
    if folder.is_dir():
        n_classes = sum(map(Path.is_dir, folder.iterdir()))
    archives = [*folder.glob("*.tar"), *folder.parent.glob(f"{folder.name}*.tar")]
    if archives:
        content = f"{len(archives)} tar files"
    elif n_classes:
        content = f"{n_classes} classes"
    else:
        problem = "must have one folder of images for each class, or tar files"
        return FileStatus(folder, "missing", problem)
    # No checksums of the images are published.
    return FileStatus(folder, "ok", f"{content}; images are not checked")


def _count_bytes(path: Path) -> int:
    with open_file(path) as file:
        return sum(map(len, iter(partial(file.read, _CHUNK_BYTES), b"")))


def _count_tokens(path: Path) -> int:
    # Each line ends with one more token.
    return sum(len(line.split()) + 1 for line in read_lines(path))


def _shard_version(path: Path) -> int:
    require("torch", "torch")
    from mlbench_core.dataset.nlp.pytorch.token_shards import VERSION, read_shard

    # It refuses other versions, so a shard that it reads has this one.
    read_shard(path)
    return VERSION


def _digest(algorithm: str, path: Path) -> str:
    with open_file(path) as file:
        return files.digest(file, algorithm)


_MEASURES: Mapping[str, tuple[str, Callable[[Path], str | int]]] = {
    "sha256": ("SHA-256", partial(_digest, "sha256")),
    "md5": ("MD5", partial(_digest, "md5")),
    "bytes": ("number of bytes", _count_bytes),
    "lines": ("number of lines", count_lines),
    "tokens": ("number of tokens", _count_tokens),
    "shard": ("header and number of bytes", _shard_version),
}
"""Name of each kind of check, and the function that measures a file."""
