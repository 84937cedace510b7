"""Check the files of a data set against their published checksums, or against their sizes if none is published."""

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
        return [_check_classes(folder / part) for part in ("train", "val")]
    checks: list[Callable[[], list[FileStatus]]]
    if record.origin == "generated" or record.name in KNOWN:
        parts = [file.name for file in record.files] or ["train", "test"]
        checks = [partial(_check_linear, record, part, folder) for part in parts]
    else:
        checks = [partial(_check_file, file, folder) for file in record.files]
    found: list[FileStatus] = []
    with show_progress(record.name, len(checks)) as advance:
        for check in checks:
            found += check()
            advance(1)
    return found


def _check_file(file: DataFile, folder: Path) -> list[FileStatus]:
    found = file.find(folder)
    if found is None:
        return [
            FileStatus(
                folder / file.forms[0].path, "missing", "does not exist, plain or compressed"
            )
        ]
    path, form = found
    name, measure = _MEASURES[form.check]
    try:
        value = measure(path)
    except DatasetError as error:
        return [FileStatus(path, "damaged", str(error).removeprefix(f"{path} is damaged: "))]
    if value != form.expected:
        problem = f"its {name} is {value}, not {form.expected}: delete it and get it again"
        return [FileStatus(path, "damaged", problem)]
    return [FileStatus(path, "ok", name)]


def _check_linear(record: DatasetRecord, part: str, folder: Path) -> list[FileStatus]:
    """Check the text and the stores of one part; one of them is enough."""
    text = next((file for file in record.files if file.name == part), None)
    found = _check_file(text, folder) if text is not None and text.find(folder) else []
    if has_stores(folder, record.name, part):
        found += _check_stores(record, part, folder)
    expected = text.forms[0].path if text is not None else f"{record.name}_{part}.lmdb"
    return found or [
        FileStatus(folder / expected, "missing", "neither its text nor its store exists")
    ]


def _check_stores(record: DatasetRecord, part: str, folder: Path) -> list[FileStatus]:
    """Check the blocks of the stores, and their number of rows if it is known."""
    require("torch", "torch")
    require("lmdb", "linear")
    from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore, find_stores

    found: list[FileStatus] = []
    rows = 0
    for path in find_stores(folder, record.name, part):
        try:
            store = LinearStore(path)
            store.verify()
            rows += len(store)
        except DatasetError as error:
            found.append(FileStatus(path, "damaged", str(error)))
        else:
            found.append(FileStatus(path, "ok", "CRC-32 of its blocks"))
    known = KNOWN.get(record.name)
    # A damaged store already has the reason why rows are missing.
    if (
        known is None
        or rows == known.files[part].n_rows
        or any(each.status == "damaged" for each in found)
    ):
        return found
    problem = f"has {rows} rows in all its stores, not {known.files[part].n_rows}: prepare it again"
    return [FileStatus(each.path, "damaged", problem) for each in found]


def _check_scikit_learn() -> FileStatus:
    """Check that scikit-learn is installed, without its import, which takes a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        return FileStatus(
            Path("scikit-learn"), "missing", "not installed: pip install 'mlbench-core[vision]'"
        )
    return FileStatus(Path(spec.origin).parent, "ok", "scikit-learn is installed")


def _check_classes(folder: Path) -> FileStatus:
    """Check that a folder has one folder for each class, or tar files; no checksums are known for its images."""
    classes = sum(path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0
    archives = [*folder.glob("*.tar"), *folder.parent.glob(f"{folder.name}*.tar")]
    if not classes and not archives:
        return FileStatus(
            folder, "missing", "must have one folder of images for each class, or tar files"
        )
    found = f"{len(archives)} tar files" if archives else f"{classes} classes"
    return FileStatus(folder, "ok", f"{found}; images are not checked")


def _count_bytes(path: Path) -> int:
    with open_file(path) as file:
        return sum(len(chunk) for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))


def _count_tokens(path: Path) -> int:
    # Each line ends with one more token.
    return sum(len(line.split()) + 1 for line in read_lines(path))


def _digest(algorithm: str, path: Path) -> str:
    with open_file(path) as file:
        return files.digest(file, algorithm)


_MEASURES: Mapping[str, tuple[str, Callable[[Path], str | int]]] = {
    "sha256": ("SHA-256", partial(_digest, "sha256")),
    "md5": ("MD5", partial(_digest, "md5")),
    "bytes": ("number of bytes", _count_bytes),
    "lines": ("number of lines", count_lines),
    "tokens": ("number of tokens", _count_tokens),
}
"""Name of each kind of check, and the function that measures a file."""
