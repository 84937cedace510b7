"""Compare methods by one call, from a notebook or a script.

:func:`compare` writes the file of a sweep, lets ``mlbench sweep`` run it in a process of its own,
and reads the folder. So a call and the command give the same folder, and each can continue it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from mlbench_core.calling_environment import module_command
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.comparison.html_page import bullets, grid
from mlbench_core.comparison.table import cell
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.files import replacing
from mlbench_core.observe.methods.own_class import describe_own_class
from mlbench_core.paths import user_folder
from mlbench_core.sweep.grouped_runs import Outcome
from mlbench_core.sweep.page import read_outcome
from mlbench_core.sweep.result_table import csv_columns, known_columns, table_rows
from mlbench_core.sweep.sentences import notes, summary
from mlbench_core.sweep.sweep_folder import COPY, SweepFolder
from mlbench_core.sweep.toml_file import load_sweep

__all__ = ["Comparison", "SweepFigure", "compare"]

# Words in errors of a sweep's file and of the command, and those of a call.
_WORDS = (
    (r"^(mlbench|Error): ", ""),
    (r"^the sweep \S+ cannot be used: ", ""),
    (r"\balgorithms (must|=)", r"methods \1"),
    (r"--output folder", "output"),
    # What is written in TOML.
    (r"^metrics must be \{NAME = 'REGEX'\}", "metrics must be {'NAME': 'REGEX'}"),
    (r"\bmetrics = \{([\w@.-]+) = ('[^']*')\}", r"metrics={'\1': \2}"),
    (r'\[price\], then machine = ("[^"]*")', r'price={"machine": \1}'),
    (r'\[tuning\], then parameter = "--lr"', 'tuning={"parameter": "--lr", "default": 0.1}'),
    (r"\[\[variants\]\], then .*", 'variants=[{"name": ..., "arguments": [...]}]'),
    (r"\b(metrics|price|tuning) must be a table\b", r"\1 must be a dictionary"),
    (r"\bvariants must be tables\b", "variants must be dictionaries"),
    (r'\bdefault = \{"--lr" = 0.1\}', '"default": {"--lr": 0.1}'),
    (r"\b(horizon|factors|parameter) = ", r'"\1": '),
    (r"\b(goal|limit|methods|networks|repeat_stopped|script|task|time) = ", r"\1="),
    (r"^repeat_stopped must be true or false\b", "repeat_stopped must be True or False"),
    (r"\brepeat_stopped=false\b", "repeat_stopped=False"),
)
# State of the command, which a copy does not need.
_NOT_COPIED = (".lock", "current.json", "unfinished", "__pycache__")


@dataclass(frozen=True)
class SweepFigure:
    """A figure of a comparison, which a notebook shows.

    Attributes:
        path: Its SVG file.
    """

    path: Path

    def _repr_svg_(self) -> str:
        text = self.path.read_text(encoding="utf-8")
        return text[text.index("<svg") :]


class Comparison:
    """The results of a comparison, as far as its runs have ended.

    Args:
        folder: The folder of a sweep.

    Raises:
        ConfigurationError: It is not the folder of a sweep, or it is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._sweep = load_sweep(self.folder / COPY)
        self._all_rows = table_rows(self._outcome, self._sweep.price)

    @cached_property
    def _outcome(self) -> Outcome:
        return read_outcome(self.folder, self._sweep)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``table.csv``: one for each method, network and number of workers.

        Seconds and megabytes are in columns that end with ``_s`` and ``_mb``. An unknown value is
        None.
        """
        keys = [column.key for column in csv_columns(self._all_rows)]
        rows = []
        for row in self._all_rows:
            rows.append({key: row[key] for key in keys})
        return rows

    @property
    def table(self) -> Any:
        """The rows as a ``pandas.DataFrame``; without pandas, :attr:`rows`."""
        try:
            import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ImportError:
            return self.rows
        return pandas.DataFrame(self.rows)

    @property
    def kinds(self) -> list[str]:
        """The names of the figures."""
        return sorted(path.stem for path in self.folder.glob("*.svg"))

    def figure(self, kind: str) -> SweepFigure:
        """Return a figure of the sweep's page.

        Args:
            kind: One of :attr:`kinds`, for example ``"time"``.

        Raises:
            ConfigurationError: The page does not have it.
        """
        if kind not in self.kinds:
            have = ", ".join(self.kinds) or (
                "drawn at the end of a comparison with matplotlib: "
                "run pip install 'mlbench-core[charts]', and the same call with the same output"
            )
            raise ConfigurationError(
                f"kind must be one of the figures, not {kind!r}: they are {have}"
            )
        return SweepFigure(self.folder / f"{kind}.svg")

    def to_folder(self, path: str | Path) -> Path:
        """Copy page, tables, figures and runs into a new folder, as ``mlbench sweep`` leaves them.

        Args:
            path: The folder, which must not exist.

        Returns:
            Its absolute path.

        Raises:
            ConfigurationError: It exists.
        """
        target = Path(path).expanduser().absolute()
        if target.exists():
            raise ConfigurationError(f"path must be a new folder, not {target}, which exists")
        shutil.copytree(self.folder, target, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        return target

    def __repr__(self) -> str:
        # Column by column, because the widest cell of a column decides the width of all of them.
        padded = []
        for column in known_columns(self._all_rows):
            texts = [column.header]
            for row in self._all_rows:
                texts.append(cell(column, row))
            width = max(map(len, texts))
            padded.append([text.ljust(width) for text in texts])
        text = ""
        for line in zip(*padded, strict=True):
            text += "  ".join(line).rstrip() + "\n"
        for sentence in notes(self._outcome):
            text += f"{sentence}\n"
        return f"{text}results: {self.folder}"

    def _repr_html_(self) -> str:
        rows = self._all_rows
        table = ""
        # Without a run, there is nothing to conclude.
        words = notes(self._outcome)
        if rows:
            table = grid(known_columns(rows), rows)
            words = summary(self._outcome)
        return (
            f"<p><b>{escape(self._sweep.title)}</b></p>{table}"
            f"{bullets(words)}<p>Results: {escape(str(self.folder))}</p>"
        )


def compare(
    methods: Iterable[Any],
    *,
    script: str | None = None,
    task: str | None = None,
    workers: int | Iterable[int],
    networks: Iterable[str] = (),
    seeds: int = 1,
    output: str | Path | None = None,
    **settings: Any,
) -> Comparison:
    """Run each method with each number of workers on each network, and return the results.

    It blocks until all runs have ended, and shows a line for each. Runs that ``output`` already
    has are not repeated. An interrupt ends the current run, and the same call continues. The
    workers start in the current folder.

    Args:
        methods: For a script, texts of ``--method`` or classes of
            :class:`~mlbench_core.aggregation.pytorch.Aggregation`, with options as
            ``(Class, {"rank": 4})``; for a task, values of ``--optimizer``. The others are compared
            with the first.
        script: A training script and its arguments, for example ``"train.py --epochs 3"``.
        task: A task in place of a script, for example ``"1a"``.
        workers: Numbers of workers.
        networks: Names, texts or TOML files of networks; needed for several workers.
        seeds: Number of repeats.
        output: The folder of the results. By default, a new one in the user's data folder.
        **settings: Other keys of a sweep's file: ``arguments``, ``goal``, ``metrics``, ``light``,
            ``limit``, ``time``, ``tuning`` and so on.

    Raises:
        ConfigurationError: An argument is wrong. Nothing was started.
        MLBenchError: A run failed, or the sweep could not go on. The other runs are in ``output``,
            which :class:`Comparison` reads.
        KeyboardInterrupt: The user interrupted it.
    """
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise ConfigurationError(
            f'methods must be a list, not {methods!r}: write for example ["as-is", "bf16"]'
        )
    if output is None:
        output = user_folder("comparisons", f"comparison-{secrets.token_hex(4)}")
    folder = Path(output).expanduser().absolute()
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigurationError(
                f"output must be a folder, not {str(output)!r}: {path} is a file, so give another"
            )
    names: list[str] = []
    modules: dict[Path, str] = {}
    for method in methods:
        name = method
        if not isinstance(method, str):
            if script is None:
                raise ConfigurationError(
                    f"methods must be names if there is no script, not {method!r}: give script to "
                    "compare classes"
                )
            name, path, source = describe_own_class(method, folder)
            modules[path] = source
        names.append(name)
    if "algorithms" in settings:
        raise ConfigurationError("algorithms must be left out: give methods in place of it")
    content: dict[str, Any] = {"title": folder.name, "script": script, "task": task}
    # A sweep file of a task calls them algorithms, and one of a script methods.
    if script is None:
        content["algorithms"] = names
    else:
        content["methods"] = names
    content.update(workers=workers, networks=networks, seeds=seeds, **settings)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / COPY
        with file.open("w", encoding="utf-8") as lines:
            for key, value in content.items():
                if value is not None:
                    lines.write(f"{key} = {_toml(key, value)}\n")
        try:
            _run(file, folder, modules)
        except ConfigurationError as error:
            raise ConfigurationError(_in_words_of_call(str(error))) from None
    return Comparison(folder)


def _in_words_of_call(text: str) -> str:
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def _toml(key: str, value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        # An inline table, because a call may have tables in tables. JSON's text of a name is also
        # a quoted key of TOML.
        pairs = []
        for name, item in value.items():
            pairs.append(f"{json.dumps(name, ensure_ascii=False)} = {_toml(key, item)}")
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{', '.join(_toml(key, item) for item in value)}]"
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{key} must have texts and numbers, not {value!r}: convert it")
    return json.dumps(value, ensure_ascii=False)


def _run(file: Path, folder: Path, modules: Mapping[Path, str]) -> None:
    """Run a sweep by the command, and show its progress."""
    sweep, sweeps = load_sweep(file, Path.cwd()), SweepFolder(folder)
    planned = sweeps.planned(sweep)
    done = sweeps.done(sweep, planned)
    if sweep.script and sweep.script[0] != "-m" and not Path(sweep.script[0]).is_file():
        raise ConfigurationError(
            f"script must begin with a file, not {sweep.script[0]!r}, which does not exist in "
            f"{Path.cwd()}: give its path from there"
        )
    for path, source in modules.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(source, encoding="utf-8")
    progress = _Progress()
    progress(f"{plural(len(planned), 'run')}, of which {len(done)} are done: {folder}")
    words = ["sweep", str(file), "--output", str(folder), "--cwd", os.getcwd()]
    with subprocess.Popen(
        module_command("mlbench_cli", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        # An interrupt may go to all processes of a notebook. The command gets exactly one.
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                progress(line.rstrip())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            for line in process.stderr:
                progress(line.rstrip())
            progress(f"the same call with output={str(folder)!r} continues")
            raise
        finally:
            progress.end()
    if process.returncode:
        raise MLBenchError(_in_words_of_call(progress.last))


class _Progress:
    """Lines on standard error; in a notebook, one line of output that is written again."""

    def __init__(self) -> None:
        self.last = ""
        self._width = 0
        self._is_notebook = "ipykernel" in sys.modules

    def __call__(self, line: str) -> None:
        self.last = line
        # The exception has this line.
        if line.startswith(("mlbench: ", "Error: ")):
            return
        if self._is_notebook and line.startswith("["):
            # A shorter line must cover all of the one before.
            sys.stdout.write(f"\r{line:<{self._width}}")
            self._width = len(line)
        else:
            self.end()
            stream = sys.stderr
            # A notebook marks standard error as an error.
            if self._is_notebook:
                stream = sys.stdout
            stream.write(f"{line}\n")
            stream.flush()

    def end(self) -> None:
        """End the line that is written again."""
        if self._width:
            sys.stdout.write("\n")
        self._width = 0
