"""Run variants side by side and keep the figures as JSON; all scripts of this folder use it.

A script declares a :class:`Subject`, and calls :func:`measure` once per case with the variants of
that case. Variants run interleaved. A change of the machine's load therefore meets all of them, and
ratios are taken within a block. The first turn of each variant is a warm-up; its result must agree
with that of the other variants.

:func:`finish` prints the table. With ``--save`` it also writes ``results/SUBJECT.json``, from which
``report.py`` makes RESULTS.md. A subject's file has a list of runs, because its cases may have been
measured on different days or machines; a new run replaces the rows of the cases that it measured
again. `FORM` is the schema of a file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from mlbench_core.files import replacing

RESULTS = Path(__file__).with_name("results")
NOT_RECORDED = "not recorded"
SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}
PACKAGES = ("torch", "torchvision", "numpy", "mlbench-core")
Row = dict[str, Any]

NUMBER = (int, float, type(None))
OPTIONAL = {"error"}
FORM: Any = {
    "subject": str,
    "title": str,
    "unit": str,
    "peers": [str],
    "reading": [str],
    "reproduce": str,
    "runs": [
        {
            "date": str,
            "command": str,
            "commit": str,
            "conditions": str,
            "machine": {"cpu": str, "cores": (int, str), "memory_gb": (int, str), "gpu": str},
            "versions": {...: str},
            "rows": [
                {
                    "case": str,
                    "variant": str,
                    "value": NUMBER,
                    "low": NUMBER,
                    "high": NUMBER,
                    # By peer: the median, the least and the largest ratio of the blocks; null if
                    # not recorded.
                    "ratios": {...: [NUMBER]},
                    "extra": {...: NUMBER},
                    "error": str,
                }
            ],
        }
    ],
}
"""Keys and types of a result; ``...`` is any key, and a list is any number of such values."""


@dataclass(frozen=True)
class Subject:
    """The declaration of a script's measurement.

    Attributes:
        subject: Name of the JSON file.
        title: Heading in RESULTS.md.
        unit: Of all values: a rate such as ``"images/s"``, or a time: ``"s"``, ``"ms"``, ``"µs"``,
            ``"ns"``.
        peers: Variants to which the others are compared.
        reading: One or two lines: the conclusion and the limit.
    """

    subject: str
    title: str
    unit: str
    peers: tuple[str, ...]
    reading: tuple[str, ...]

    def as_result(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the content of the subject's file."""
        declared = {**asdict(self), "peers": [*self.peers], "reading": [*self.reading]}
        return {
            **declared,
            "reproduce": f"python benchmarks/micro/{self.subject}.py --save",
            "runs": runs,
        }

    def value(self, seconds: float, amount: float) -> float:
        """Convert the seconds of a block with ``amount`` items to the unit."""
        if self.unit.endswith("/s"):
            return amount / seconds
        return SCALES[self.unit] * seconds / amount


class Timed(NamedTuple):
    """Result of a variant that takes its own time: seconds, further figures, value to compare."""

    seconds: float
    extra: Mapping[str, float] = {}
    result: Any = None


def rotated(names: Sequence[str], block: int) -> list[str]:
    """Return the variants of a block: the first one changes, every other block runs backwards."""
    start = block % len(names)
    # Every variant gets every place, because the one after it meets the memory and the caches that
    # it left.
    order = [*names[start:], *names[:start]]
    if block % 2:
        order.reverse()
    return order


def equal(variant: str, expected: Any, result: Any) -> None:
    """End the script if two variants have different results."""
    if expected != result:
        raise SystemExit(f"{variant} gives {result}, but the other variants give {expected}")


def measure(
    subject: Subject,
    case: str,
    variants: Mapping[str, Callable[[], Any]],
    blocks: int,
    *,
    amount: float = 1.0,
    check: Callable[[str, Any, Any], None] = equal,
) -> list[Row]:
    """Run the variants of one case interleaved.

    Args:
        subject: The declaration.
        case: Name of the case, for the table.
        variants: By name, a function that does the work of one block. It returns a result, or a
            :class:`Timed`.
        blocks: Turns of each variant after the warm-up.
        amount: Items in a block, in the unit's terms.
        check: Compares the first variant's result with that of another; ends the script if they
            disagree.

    Returns:
        One row per variant. A variant that raised a RuntimeError has only the error.
    """
    turns: dict[str, list[Timed]] = {name: [] for name in variants}
    errors: dict[str, str] = {}
    # Block -1 is the warm-up: it fills caches, compiles, and sets up connections.
    for block in range(-1, blocks):
        order = list(variants)
        if block >= 0:
            order = rotated(order, block)
        for name in order:
            if name in errors:
                continue
            try:
                start = time.perf_counter()
                result = variants[name]()
                seconds = time.perf_counter() - start
            # torch raises RuntimeError if a kernel or backend refuses its input, and WorkerError is
            # one.
            except RuntimeError as error:
                errors[name] = " ".join(str(error).split())[:200]
                continue
            if not isinstance(result, Timed):
                result = Timed(seconds, result=result)
            turns[name].append(result)
    # Only variants with all their blocks can be compared block by block.
    working = {name: turn for name, turn in turns.items() if name not in errors}
    first = next(iter(working.values()), [])
    values = {}
    for name, turn in working.items():
        # A variant with random output, such as augmented images, returns None.
        if turn[0].result is not None:
            check(name, first[0].result, turn[0].result)
        values[name] = [subject.value(t.seconds, amount) for t in turn[1:]]
    rows = []
    for name in variants:
        row: Row = {"case": case, "variant": name}
        if name in errors:
            row |= {"error": errors[name], **summarize([])}
        else:
            row |= summarize(
                values[name], {peer: values[peer] for peer in subject.peers if peer in values}
            )
            warm_up, *measured = turns[name]
            for key in warm_up.extra:
                row["extra"][key] = median(turn.extra[key] for turn in measured)
        rows.append(row)
    return rows


def summarize(values: Sequence[float], peers: Mapping[str, Sequence[float]] | None = None) -> Row:
    """Summarize a variant's blocks: median and range of the values and of the ratios to peers."""
    ratios = {}
    for peer, others in (peers or {}).items():
        # The ratio is taken within a block, because the load of a shared machine changes from block
        # to block.
        of_blocks = [own / other for own, other in zip(values, others, strict=True)]
        ratios[peer] = [median(of_blocks), min(of_blocks), max(of_blocks)]
    row = {"value": None, "low": None, "high": None, "ratios": ratios, "extra": {}}
    if values:
        row |= {"value": median(values), "low": min(values), "high": max(values)}
    return row


def positive(text: str) -> int:
    """Read a whole number from 1, as a type of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


def make_parser(description: str | None, *, blocks: int) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all scripts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--blocks", type=positive, default=blocks,
        help=f"blocks of each variant (default: {blocks})")  # fmt: skip
    add("--quick", action="store_true", help="small sizes and one block, to try the script")
    add("--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER",
        help="write SUBJECT.json (default: results)")  # fmt: skip
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
    """Read the command line; ``quick`` has the defaults under ``--quick``."""
    arguments = parser.parse_args(argv)
    if arguments.quick:
        # Set as defaults, so that an argument on the command line wins over --quick.
        parser.set_defaults(blocks=1, **quick)
        arguments = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    arguments.command = shlex.join([f"benchmarks/micro/{Path(parser.prog).name}", *words])
    return arguments


def finish(
    subject: Subject, rows: list[Row], arguments: argparse.Namespace, conditions: str
) -> None:
    """Print the table of a run, and store the run if ``--save`` was given."""
    run = {
        "date": date.today().isoformat(),
        "command": f"python {arguments.command}",
        "commit": commit(),
        "conditions": conditions,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "rows": rows,
    }
    result = subject.as_result([run])
    # Printed first: a run of an hour must not be lost because a figure is not finite.
    print(markdown(result), flush=True)
    check_form(result)
    if arguments.save:
        save(result, arguments.save)


def save(result: dict[str, Any], folder: Path) -> None:
    """Write a result; rows of other cases that the file already has stay."""
    path = folder / f"{result['subject']}.json"
    cases = set()
    for run in result["runs"]:
        cases.update(row["case"] for row in run["rows"])
    runs = []
    if path.exists():
        # A run keeps its own date and machine, so its rows are never merged into another run.
        for run in read(path)["runs"]:
            kept = [row for row in run["rows"] if row["case"] not in cases]
            if kept:
                runs.append({**run, "rows": kept})
    runs += result["runs"]
    with replacing(path) as temporary:
        text = json.dumps({**result, "runs": runs}, indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a result and check its form.

    Raises:
        ValueError: The file has another form; the message names the place.
    """
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        check_form(result)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return result


def check_form(value: Any, form: Any = FORM, name: str = "result") -> None:
    """Compare a value with a form, recursively."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, not {value!r}")
        named = form.keys() - {...}
        if missing := sorted(named - value.keys() - OPTIONAL):
            raise ValueError(f"{name} must have {', '.join(missing)}")
        if ... not in form and (unknown := sorted(value.keys() - named)):
            raise ValueError(f"{name} must not have {', '.join(unknown)}")
        for key, part in value.items():
            check_form(part, form.get(key, form.get(...)), f"{name}.{key}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, not {value!r}")
        for number, part in enumerate(value):
            check_form(part, form[0], f"{name}[{number}]")
    elif not isinstance(value, form) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} must be {form}, not {value!r}")
    if name == "result" and not 1 <= len(value["reading"]) <= 2:
        raise ValueError(f"{name}.reading must have one or two lines, not {len(value['reading'])}")


def machine() -> dict[str, Any]:
    """Describe this machine."""
    import torch

    cpu = ""
    if sys.platform == "linux":
        # platform.processor() is empty on most Linux distributions.
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if model is not None:
            cpu = model[1]
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or NOT_RECORDED,
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter, without importing them."""
    installed = {
        distribution.metadata["Name"] for distribution in importlib.metadata.distributions()
    }
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}


def commit() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else NOT_RECORDED


def number(value: float | None) -> str:
    """Format a figure with four significant digits; None is an empty cell."""
    if value is None:
        return ""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def markdown(result: Mapping[str, Any]) -> str:
    """Make the table of a result, and below it how each of its runs was made."""
    rows, notes = [], []
    compared: set[str] = set()
    extras: dict[str, Any] = {}
    for run_number, run in enumerate(result["runs"], 1):
        notes.append(f"{run_number}. {provenance(run)}")
        for row in run["rows"]:
            rows.append((run_number, row))
            compared.update(row["ratios"])
            extras |= row["extra"]
    if not rows:
        return "Not measured yet.\n"
    peers = [peer for peer in result["peers"] if peer in compared]
    header = ["run", "case", "variant", result["unit"], *map("times {}".format, peers), *extras]
    has_many_runs = len(result["runs"]) > 1
    lines = []
    for run_number, row in rows:
        line = [str(run_number) if has_many_runs else "", row["case"], row["variant"]]
        error = row.get("error", "").replace("|", "/")
        if error:
            line.append(f"failed: {error}")
        else:
            line.append(_span(row["value"], row["low"], row["high"], number))
        for peer in peers:
            line.append(_span(*row["ratios"].get(peer, [None] * 3), _ratio))
        for key in extras:
            line.append(number(row["extra"].get(key)))
        lines.append(line)
    # A column without a figure in any row is left out.
    is_used = [any(column) for column in zip(*lines, strict=True)]
    table = [f"| {' | '.join(compress(line, is_used))} |" for line in (header, *lines)]
    table.insert(1, "|---" * is_used.count(True) + "|")
    return "\n".join([*table, "", *notes]) + "\n"


def provenance(run: Mapping[str, Any]) -> str:
    """Describe how a run was made."""
    machine, command = run["machine"], run["command"]
    if command != NOT_RECORDED:
        command = f"`{command}`"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"{run['conditions']} Command: {command}. "
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"GPU: {machine['gpu']}. Versions: {versions or NOT_RECORDED}. "
        f"Date: {run['date']}. Commit: {run['commit']}."
    )


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _span(
    value: float | None, low: float | None, high: float | None, form: Callable[[float | None], str]
) -> str:
    """Format a median and its range; a single block, or the ratio to itself, has no range."""
    if low is None or low == high:
        return form(value)
    return f"{form(value)} ({form(low)} to {form(high)})"
