"""``mlbench data``: the sources, downloads, preparation and checks of the tasks' data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mlbench_cli._output import clean, json_option, print_json, print_table, remark
from mlbench_core.dataset.registry import (
    DATASETS,
    DEFAULT_FOLDER,
    FINEWEB10B_SHARDS,
    DatasetRecord,
)
from mlbench_core.errors import DatasetError
from mlbench_core.paths import user_folder

__all__ = ["data"]

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def data() -> None:
    """List, download, prepare and verify the data sets of the tasks."""


_TEXT = "text"  # the name that stands for the user's own files

_folder_option = click.option(
    "--data",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help=(
        "Folder of the files "
        "(default: the folder that the first task with this data set reads; see 'list')."
    ),
)


def _dataset_options(command: Command) -> Command:
    """Give a command NAME and the options ``--data``, ``--shards`` and ``--json``."""
    name = click.argument("name", metavar="NAME", type=click.Choice(sorted(DATASETS)))
    shards = click.option(
        "--shards",
        type=click.IntRange(1, FINEWEB10B_SHARDS),
        metavar="N",
        help="For fineweb10b: only the first N shards for training, and the one for validation.",
    )
    return name(_folder_option(shards(json_option(command))))


def _chosen(name: str, shards: int | None) -> DatasetRecord:
    """Return the record of a data set, with the files that are asked for."""
    record = DATASETS[name]
    if shards is None:
        return record
    if name != "fineweb10b":
        raise click.UsageError(f"--shards is for fineweb10b, not for {name}: leave it out")
    return dataclasses.replace(record, files=record.files[: 1 + shards])


@data.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the data sets with licenses, sizes, sources and folders.

    With --json, the list also has all addresses, and the expected checksum or size of each file. A
    value that nobody has verified is 'unknown', or null in JSON.
    """
    records = []
    rows = []
    for record in DATASETS.values():
        fields = dataclasses.asdict(record)
        records.append({**fields, "tasks": record.tasks, "folder": str(record.folder)})
        tasks, checks = ", ".join(record.tasks) or "-", ", ".join(record.checks) or "-"
        source, *others = record.sources
        if others:
            source += f" and {len(others)} more"
        size = _size(record.download_bytes)
        row = (record.name, tasks, record.title, record.license, size, checks, source)
        rows.append((*row, record.folder.name))
    if as_json:
        print_json(records)
        return
    headers = ("NAME", "TASKS", "DATA SET", "LICENSE", "DOWNLOAD", "CHECKED BY", "SOURCE", "FOLDER")
    print_table(headers, rows, right=(4,))
    # Full paths would take most of the width of a terminal.
    remark(f"the folders are in {clean(user_folder(*DEFAULT_FOLDER))}")


@data.command()
@_dataset_options
def fetch(name: str, folder: Path | None, shards: int | None, as_json: bool) -> None:
    """Download a data set; existing files are kept.

    An interrupted download continues with the next call. Each file is compared with its
    checksum if one is published, otherwise with a number of lines, rows, words or tokens.
    """
    from mlbench_core.dataset import preparation

    record = _chosen(name, shards)
    paths = preparation.fetch(record, folder)
    if as_json:
        files = list(map(str, paths))
        print_json({"name": name, "folder": str(folder or record.folder), "files": files})
        return
    for path in paths:
        click.echo(clean(path))
    if record.origin == "installed":
        remark(f"{name} needs no download: it comes with {record.sources[0]}")
    if record.origin == "generated":
        remark(f"{name} needs no download: 'mlbench data prepare {name}' generates it")


@data.command()
@click.argument("name", metavar="NAME", type=click.Choice(sorted([*DATASETS, _TEXT])))
@click.argument(
    "texts",
    nargs=-1,
    metavar="[FILE]...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@_folder_option
@json_option
@click.option(
    "--split",
    type=click.Choice(["train", "val"]),
    help="For text: the part that the files belong to (default: train).",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="For text: a tokenizer.json of the package tokenizers (default: each byte is a token).",
)
@click.option(
    "--vocabulary",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="For wmt17: use the sub-tokens of MLPerf's reference, for example vocab.ende.32768.",
)
def prepare(
    name: str,
    texts: tuple[Path, ...],
    folder: Path | None,
    as_json: bool,
    split: str | None,
    tokenizer: Path | None,
    vocabulary: Path | None,
) -> None:
    """Prepare a data set for training, from local files.

    Text of WMT16, WMT17, Multi30k and WikiText-2 is converted to ids of words or sub-words. Text
    of the data of linear models is converted to LMDB stores. After an interruption, the same
    command continues with the first step that is not complete. Nothing is downloaded.

    With the name 'text', the given files are converted to shards of tokens for task 5a.
    """
    from mlbench_core.dataset import preparation

    if vocabulary is not None and name != "wmt17":
        raise click.UsageError(f"--vocabulary is for wmt17, not for {name}: leave it out")
    own = {"FILE": texts, "--split": split, "--tokenizer": tokenizer}
    for option, value in own.items():
        if value and name != _TEXT:
            raise click.UsageError(f"{option} is for {_TEXT}, not for {name}: leave it out")
    prepared: preparation.Prepared | None
    if name == _TEXT:
        if not texts:
            raise click.UsageError("text needs at least one FILE: give the files to convert")
        prepared = preparation.prepare_text(
            texts, folder, split=split or "train", tokenizer=tokenizer
        )
    else:
        prepared = preparation.prepare(DATASETS[name], folder, vocabulary=vocabulary)
    if prepared is None:
        if as_json:
            print_json(None)
        else:
            remark(f"{name} needs no preparation")
    elif as_json:
        fields = dataclasses.asdict(prepared)
        print_json({"name": name, **fields, "folder": str(prepared.folder)})
    else:
        for part, count in prepared.counts.items():
            click.echo(f"{part}: {count:,} {prepared.unit}")
        remark(f"the prepared data is in {clean(prepared.folder)}")


@data.command()
@_dataset_options
def verify(name: str, folder: Path | None, shards: int | None, as_json: bool) -> None:
    """Check whether each file is ok, missing or damaged.

    A file is compared with its checksum if one is published, otherwise with its number of bytes,
    lines, words or tokens. The file may be plain or compressed. The exit status is 1 if a file is
    missing or damaged.
    """
    from mlbench_core.dataset import verification

    record = _chosen(name, shards)
    checks = verification.verify(record, folder)
    rows = []
    wrong = 0
    for check in checks:
        rows.append({"path": str(check.path), "status": check.status, "detail": check.detail})
        if check.status != "ok":
            wrong += 1
        if not as_json:
            click.echo(clean(f"{check.path}: {check.status} ({check.detail})"))
    if as_json:
        print_json(rows)
    if wrong:
        message = f"{wrong} of {len(checks)} files of {name} are missing or damaged"
        if record.origin == "download":
            message += f": delete damaged ones; 'mlbench data fetch {name}' downloads missing ones"
        raise DatasetError(message)


def _size(count: int | None) -> str:
    """Format a number of bytes with three digits.

    Example:
        >>> _size(162_000_000), _size(27_670), _size(0), _size(None)
        ('162 MB', '27.7 kB', '-', 'unknown')
    """
    if count is None:
        return "unknown"
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    if count == 0:
        return "-"
    return f"{count} B"
