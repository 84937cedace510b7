"""Convert LIBSVM text to LMDB stores and back, as functions and as a command.

    python -m mlbench_core.dataset.util.pytorch.libsvm NAME [train|test] DEST_DIR

The command creates ``DEST_DIR/NAME_train.lmdb`` and ``DEST_DIR/NAME_test.lmdb``, or only the
requested one. :class:`~mlbench_core.dataset.linearmodels.pytorch.LMDBDataset` reads them. The
command downloads a9a, agaricus, australian, duke, epsilon, heart_scale, rcv1 and webspam, and
generates synthetic_dense. For any other name, give the text by ``--file``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_core.dataset.download import check_digest, progress_download, show_progress
from mlbench_core.dataset.libsvm_names import KNOWN, SYNTHETIC, TextFile, text_names
from mlbench_core.dataset.linearmodels.pytorch import LMDBDataset, libsvm_text
from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore, find_stores
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import (
    StoreWriter,
    describe_inexact,
    inexact_labels,
)
from mlbench_core.dataset.linearmodels.pytorch.synthetic_dense import (
    DEFAULT_FEATURES,
    DEFAULT_ROWS,
    write_synthetic_dense,
)
from mlbench_core.dataset.local_files import COMPRESSIONS, find_file
from mlbench_core.errors import DatasetError, DatasetNotFoundError, MLBenchError
from mlbench_core.files import replacing

__all__ = [
    "LIBSVMDataset",
    "convert",
    "download",
    "generate_lmdb_from_libsvm",
    "main",
    "show_text_progress",
    "store_to_text",
]

# Text of unknown layout is stored dense if a dense row is at most this large, or if at least this
# share of its values is written out.
_DENSE_ROW_BYTES = 1 << 14
_DENSE_SHARE = 0.5
_ROWS_AT_ONCE = 1024

Advance = Callable[[int], None]
Labels = str | tuple[int, int]


def convert(
    sources: Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    n_features: int | None = None,
    layout: str = "auto",
    dtype: str = "float32",
    labels: Labels = "auto",
    zero_based: bool = False,
    separate: bool = False,
    advance: Advance | None = None,
) -> list[Path]:
    """Convert LIBSVM text to a store, or to one store for each text.

    The function reads the text in chunks, so the text may be far larger than the memory. A store
    gets its name only when it is complete.

    Args:
        sources: The texts, plain or ``.gz``, ``.bz2``, ``.xz``; their rows follow one another.
        dest: The store to create, ending in ``.lmdb``.
        n_features: Number of columns; if None, the largest index of the texts. None and the layout
            ``"auto"`` need one more pass over the texts.
        layout: ``"dense"``, ``"csr"``, or ``"auto"``. The layout ``"auto"`` is dense if a dense row
            has at most 16 KiB, or if the texts contain at least half of all values.
        dtype: ``"float32"`` or ``"float64"``. Values are rounded to its nearest number. A whole
            label must be one of its numbers.
        labels: ``"auto"`` maps the labels -1 and +1, or 1 and 2, to 0 and 1, and keeps all others.
            If a text has a single label, the first of the pairs (-1, 1), (0, 1), (1, 2) with this
            label decides. ``"keep"`` keeps all labels. A pair is the negative and the positive
            label; a text with any other label is an error.
        zero_based: If True, indices count from 0; LIBSVM indices count from 1.
        separate: If True, create one store for each text, ``NAME-00000-of-00002.lmdb`` and so on,
            instead of ``dest``.
        advance: Function that is called with the number of bytes of each processed piece of text.

    Returns:
        The stores.

    Raises:
        ValueError: An argument is outside the values listed above.
        DatasetNotFoundError: A text is missing.
        DatasetError: A line is wrong, ``dtype`` cannot hold a label, the text has no rows, other
            stores of that name exist, or the disk is full.
    """
    paths, target = list(map(Path, sources)), Path(dest)
    if not paths:
        raise ValueError("sources is empty; give at least one file of text")
    if target.suffix != ".lmdb":
        raise ValueError(f"dest must end in .lmdb, not be {target}")
    if layout not in ("auto", "dense", "csr"):
        raise ValueError(f"layout must be 'auto', 'dense' or 'csr', not {layout!r}")
    if labels not in ("auto", "keep") and (isinstance(labels, str) or len(set(labels)) != 2):
        raise ValueError(
            "labels must be 'auto', 'keep' or two different labels (negative, positive), not "
            f"{labels!r}"
        )
    # The number of columns and the layout must be known before the first block is written.
    n_features, layout = _shape(paths, n_features, layout, dtype, zero_based)
    targets = _targets(target, len(paths) if separate else 1)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(StoreWriter(path, n_features, layout=layout, dtype=dtype))
            for path in targets
        ]
        inexact: tuple[Path, int, float] | None = None  # the first label that the dtype cannot hold
        for number, path in enumerate(paths):
            writer = writers[number if separate else 0]
            rows = 0
            for chunk in libsvm_text.read_chunks(
                path, n_features=n_features, dtype=dtype, zero_based=zero_based
            ):
                writer.append(chunk.features, chunk.labels)
                if inexact is None:
                    wrong = inexact_labels(chunk.labels, dtype)
                    if wrong.size:
                        inexact = path, rows + int(wrong[0]), float(chunk.labels[wrong[0]])
                rows += len(chunk.labels)
                if advance is not None:
                    advance(chunk.text_bytes)
        # All stores share one label map, so that a text with only one of the labels is mapped in
        # the same way.
        distinct_labels = np.concatenate([writer.labels_found() for writer in writers])
        label_map = _label_map(set(distinct_labels.tolist()), labels)
        # Labels that are mapped to 0 and 1 may be any.
        if label_map is None and inexact is not None:
            path, row, label = inexact
            line = libsvm_text.line_of_row(path, row)
            raise DatasetError(f"{path}, line {line}: the row {describe_inexact(label, dtype)}")
        for number, writer in enumerate(writers):
            mine = paths[number : number + 1] if separate else paths
            writer.finish(
                label_map=label_map,
                shard=(number, len(writers)),
                source=tuple(path.name for path in mine),
            )
    return targets


def store_to_text(
    stores: Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    advance: Advance | None = None,
) -> Path:
    """Write stores as LIBSVM text.

    The text has the original labels, and enough digits to restore exactly the same numbers. As is
    usual in LIBSVM text, the zeros of a dense store are left out.

    Args:
        stores: The stores; their rows follow one another.
        dest: The text to create.
        advance: Function that is called with the number of rows in each written block.

    Returns:
        ``dest``.

    Raises:
        ValueError: ``stores`` is empty.
        DatasetError: A store is missing or damaged, or the disk is full.
    """
    if not stores:
        raise ValueError("stores is empty; give at least one")
    path = Path(dest)
    try:
        with replacing(path) as temporary, temporary.open("w") as file:
            for source in stores:
                for text, count in _text_of(LinearStore(source)):
                    file.write(text)
                    if advance is not None:
                        advance(count)
    except OSError as error:
        raise DatasetError(f"{path} could not be written: {error}") from error
    return path


def download(name: str, data_type: str, folder: str | os.PathLike[str]) -> Path:
    """Download the text of a known data set into a folder, unless it exists there.

    Args:
        name: A known name.
        data_type: ``"train"`` or ``"test"``.
        folder: Destination folder.

    Returns:
        The text: compressed as it is published, or the existing one.

    Raises:
        ValueError: The name is not known, or it has no such part.
        DownloadError: The text could not be downloaded.
        DatasetError: The text exists but has the wrong checksum.
    """
    text = _known_text(name, data_type)
    # `progress_download` would download a file again if it has no published checksum.
    if path := find_file([Path(folder)], text_names(name, data_type)):
        # The checksum is that of the published file. A text in another compression has another one.
        if path.name == text.file_name:
            check_digest(path, sha256=text.sha256)
        return path
    return progress_download(text.url, Path(folder) / text.file_name, sha256=text.sha256)


def generate_lmdb_from_libsvm(
    name: str, data_type: str, root: str | os.PathLike[str]
) -> list[Path]:
    """Create the stores of one part of a known data set, as the command of this module does.

    Existing stores are created again.

    Args:
        name: A known name.
        data_type: ``"train"`` or ``"test"``.
        root: Folder for the stores; downloaded text is kept there too.

    Returns:
        The stores.

    Raises:
        ValueError: The name is not known, or it has no such part.
        DownloadError: The text could not be downloaded.
        DatasetError: The text does not match its checksum or its expected contents, or the disk is
            full.
    """
    if name != SYNTHETIC:
        _known_text(name, data_type)
    elif data_type not in ("train", "test"):
        raise ValueError(f"data_type must be 'train' or 'test', not {data_type!r}")
    return _make(_parse([name, data_type, str(root)]), data_type)


class LIBSVMDataset:
    """One part of a known data set; its stores are created if they do not exist.

    It has the rows of :class:`~mlbench_core.dataset.linearmodels.pytorch.LMDBDataset`, which is the
    class to train with.

    Args:
        name: A known name, as for :func:`generate_lmdb_from_libsvm`.
        data_type: ``"train"`` or ``"test"``.
        root: Folder of the stores.

    Raises:
        ValueError: The name is not known, or it has no such part.
        DownloadError: The text could not be downloaded.
        DatasetError: The text or a store is damaged, or the disk is full.
    """

    def __init__(self, name: str, data_type: str, root: str | os.PathLike[str]) -> None:
        try:
            find_stores(Path(root), name, data_type)
        except DatasetNotFoundError:
            generate_lmdb_from_libsvm(name, data_type, root)
        self.rows = LMDBDataset(name, data_type, root)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return one row: features, shape (n_features,), and its label, shape (1,)."""
        return self.rows[index]


def __getattr__(name: str) -> Any:
    """Name the replacement of a removed function."""
    # Version 3.0 had one function for each storage layout.
    if name.startswith("sequential_"):
        raise ImportError(
            f"{name} was removed: use generate_lmdb_from_libsvm(name, data_type, root) for a "
            "known data set, or convert(files, dest) for any text"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _known_text(name: str, data_type: str) -> TextFile:
    """Return the text of a known data set."""
    if name not in KNOWN:
        raise ValueError(
            f"name must be one of {', '.join(sorted([*KNOWN, SYNTHETIC]))}, not {name!r}: "
            "another name needs --file"
        )
    if data_type not in KNOWN[name].files:
        raise ValueError(f"{name} has no part {data_type!r}; it has {', '.join(KNOWN[name].files)}")
    return KNOWN[name].files[data_type]


def _label_map(text_labels: set[float], labels: Labels) -> dict[str, int] | None:
    """Return the mapping from the labels of a text to 0 and 1, or None to keep them."""
    if labels == "keep":
        return None
    if not isinstance(labels, str):
        negative, positive = labels
        if text_labels <= {negative, positive}:
            return {f"{negative}": 0, f"{positive}": 1}
        raise DatasetError(
            f"the text has the labels {sorted(text_labels)[:9]}; "
            f"expected only {negative} and {positive}"
        )
    # The order of the pairs decides for a text with a single label; see the argument `labels` of
    # convert.
    for negative, positive in ((-1, 1), (0, 1), (1, 2)):
        if text_labels <= {negative, positive}:
            return {f"{negative}": 0, f"{positive}": 1}
    return None


def _shape(
    paths: list[Path], n_features: int | None, layout: str, dtype: str, zero_based: bool
) -> tuple[int, str]:
    """Return the number of columns and the layout, read from the texts if they were not given."""
    if n_features is not None and layout != "auto":
        return n_features, layout
    n_rows = n_values = largest_index = 0
    for path in paths:
        shape = libsvm_text.scan(path, zero_based=zero_based)
        n_rows += shape.n_rows
        n_values += shape.n_values
        largest_index = max(largest_index, shape.n_features)
    columns = n_features or largest_index
    if layout == "auto":
        has_short_rows = columns * np.dtype(dtype).itemsize <= _DENSE_ROW_BYTES
        is_full = n_values >= _DENSE_SHARE * (n_rows * columns)
        layout = "dense" if has_short_rows or is_full else "csr"
    if columns < 1:
        raise DatasetError(f"{', '.join(map(str, paths))} has no values")
    return columns, layout


def _targets(target: Path, count: int) -> list[Path]:
    """Return the names of the stores, and refuse to mix them with those of another conversion."""
    targets = [target]
    if count > 1:
        names = (f"{target.stem}-{number:05}-of-{count:05}.lmdb" for number in range(count))
        targets = list(map(target.with_name, names))
    # A reader would read other stores together with the new ones, or instead of them. A store that
    # the conversion replaces is not a conflict.
    others = {target, *target.parent.glob(f"{target.stem}-*-of-*.lmdb")} - set(targets)
    if left := sorted(path.name for path in others if path.exists()):
        raise DatasetError(
            f"{target.parent} has other stores of the same name: {', '.join(left)}; "
            "delete them first"
        )
    return targets


def _text_of(store: LinearStore) -> Iterator[tuple[str, int]]:
    """Yield the text of a store, a block of rows at a time."""
    label_map = store.header.label_map
    labels = store.labels
    if label_map is not None:
        # Stored labels count from 0: each is the position of its original here.
        original = np.array(list(map(float, sorted(label_map, key=label_map.__getitem__))))
        labels = original[labels.astype(np.int64)]
    # Blocks of rows bound the memory, even for a sparse store with millions of columns.
    for start in range(0, len(store), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(store)))
        yield libsvm_text.format_rows(*store.take_csr(rows), labels[rows]), len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes that of the process.

    Returns:
        0, or 1 after an error in data, network or disk, which is reported in one line on standard
        error.
    """
    options = _parse(arguments)
    from rich.console import Console

    # With soft_wrap, rich does not break a long path at the width of the terminal, or at 80
    # characters in a pipe.
    try:
        for line in _run(options):
            Console(soft_wrap=True).print(line, highlight=False, markup=False)
    except MLBenchError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"error: {error}", highlight=False, markup=False, style="red"
        )
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = ", ".join(sorted([*KNOWN, SYNTHETIC]))
    parser = argparse.ArgumentParser(
        prog="python -m mlbench_core.dataset.util.pytorch.libsvm",
        description="Make LMDB stores from LIBSVM text, or text from stores.",
    )
    parser.add_argument("name", help=f"known: {names}; any other with --file")
    parser.add_argument(
        "data_type", nargs="?", choices=("train", "test"), help="by default all parts"
    )
    parser.add_argument(
        "dest_dir", type=Path, help="folder of the stores; downloads are kept there too"
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--file",
        type=Path,
        action="append",
        help="local text in place of a download; may be repeated",
    )
    text.add_argument(
        "--separate", action="store_true", help="one store for each file, in place of one for all"
    )
    text.add_argument(
        "--features", type=int, help="number of columns; by default the known or the largest index"
    )
    text.add_argument("--layout", choices=("auto", "dense", "csr"), default="auto")
    text.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    text.add_argument(
        "--labels", type=_labels, help="auto, keep, or NEGATIVE,POSITIVE as in --labels=-1,1"
    )
    text.add_argument("--zero-based", action="store_true", help="indices count from 0")
    # `const` is the value of --to-text without a path: the default path depends on the other
    # arguments.
    text.add_argument(
        "--to-text",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="PATH",
        help="write the store as text",
    )
    text.add_argument("--verify", action="store_true", help="check the checksums of a store")
    made = parser.add_argument_group(SYNTHETIC)
    made.add_argument(
        "--rows", type=int, help="rows; by default 40,000 for training and 10,000 for test"
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--optimum",
        type=float,
        metavar="L2",
        help="compute the optimum with this penalty (minutes)",
    )
    options = parser.parse_args(arguments)
    is_known = options.name in KNOWN or options.name == SYNTHETIC
    reads_stores = options.to_text is not None or options.verify
    if not (is_known or options.file or reads_stores):
        parser.error(f"the name {options.name!r} is not known ({names}): give its text by --file")
    if options.data_type is None and (options.file or reads_stores or not is_known):
        parser.error("data_type must be train or test here, not left out")
    if options.name in KNOWN and not options.file:
        parts = KNOWN[options.name].files
        if options.data_type not in (None, *parts):
            parser.error(
                f"{options.name} has no part {options.data_type!r}; it has {', '.join(parts)}"
            )
    return options


def _run(options: argparse.Namespace) -> Iterator[str]:
    """Run the command line, and yield lines that describe the results."""
    if options.to_text is not None or options.verify:
        yield from _read_stores(options)
        return
    parts = ["train", "test"]
    if options.data_type:
        parts = [options.data_type]
    elif options.name in KNOWN:
        parts = list(KNOWN[options.name].files)
    for part in parts:
        for path in _make(options, part):
            header = LinearStore(path).header
            labels = "as they were" if header.label_map is None else header.label_map
            yield (
                f"{path}: {header.n_rows} rows, {header.n_features} features, {header.layout}, "
                f"labels {labels}"
            )


def _make(options: argparse.Namespace, part: str) -> list[Path]:
    """Create the stores of one part."""
    dest = options.dest_dir / f"{options.name}_{part}.lmdb"
    if options.name == SYNTHETIC and not options.file:
        features, rows = options.features or DEFAULT_FEATURES, options.rows or DEFAULT_ROWS[part]
        with show_progress(f"{options.name} {part}", rows) as advance:
            write_synthetic_dense(
                dest,
                features,
                rows,
                options.seed,
                data_type=part,
                l2=options.optimum,
                advance=advance,
            )
        return [dest]
    files = options.file or [download(options.name, part, options.dest_dir)]
    n_features, layout, labels = options.features, options.layout, options.labels or "auto"
    data = KNOWN.get(options.name)
    # Options override the known properties of a data set.
    if data:
        n_features = n_features or data.n_features
        labels = options.labels or data.labels
        if layout == "auto":
            layout = data.layout
    with show_text_progress(dest.name, files) as advance:
        paths = convert(
            files,
            dest,
            n_features=n_features or None,
            layout=layout,
            dtype=options.dtype,
            labels=labels,
            zero_based=options.zero_based,
            separate=options.separate,
            advance=advance,
        )
    if data and not options.file:
        # This is the only check of a text without a published checksum. Delete the stores, so that
        # the next run does not use them.
        text, rows = data.files[part], sum(map(len, map(LinearStore, paths)))
        if rows != text.n_rows:
            for path in paths:
                path.unlink()
            raise DatasetError(
                f"{text.file_name} has {rows} rows, not {text.n_rows}: delete it and start again"
            )
    return paths


@contextlib.contextmanager
def show_text_progress(name: str, texts: Sequence[Path]) -> Iterator[Advance]:
    """Show a progress bar for the conversion of texts on standard error if it is a terminal.

    Args:
        name: Text before the bar.
        texts: The texts, plain or compressed.

    Yields:
        The argument ``advance`` of :func:`convert`.
    """
    total: int | None = 0
    for path in texts:
        # The size of a decompressed text is not known before its end.
        if total is None or not path.is_file() or path.suffix in COMPRESSIONS[1:]:
            total = None
        else:
            total += path.stat().st_size
    with show_progress(name, total, of_bytes=True) as advance:
        yield advance


def _labels(text: str) -> Labels:
    """Parse the option ``--labels``."""
    if text in ("auto", "keep"):
        return text
    try:
        negative, positive = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, keep or two integers, as in -1,1"
        ) from None
    return negative, positive


def _read_stores(options: argparse.Namespace) -> Iterator[str]:
    """Check stores, or write them as text."""
    stores = find_stores(options.dest_dir, options.name, options.data_type)
    if options.verify:
        for path in stores:
            LinearStore(path).verify()
            yield f"{path}: all checksums are correct"
    if options.to_text is not None:
        path = options.to_text
        if path == Path():
            path = options.dest_dir / f"{options.name}_{options.data_type}.svm"
        n_rows = sum(map(len, map(LinearStore, stores)))
        with show_progress(path.name, n_rows) as advance:
            store_to_text(stores, path, advance=advance)
        yield f"{path}: written"


if __name__ == "__main__":
    raise SystemExit(main())
