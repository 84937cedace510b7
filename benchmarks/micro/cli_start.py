"""How long ``mlbench --help`` takes against an empty Python.

Both are started in turn, so that a busy machine slows both; the medians are compared::

    python benchmarks/micro/cli_start.py --repeats 31
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import click": [sys.executable, "-c", "import click"],
    "mlbench --help": [sys.executable, "-m", "mlbench_core.cli", "--help"],
    "mlbench --version": [sys.executable, "-m", "mlbench_core.cli", "--version"],
}


def measure(repeats: int) -> dict[str, float]:
    """Median wall time of each command in milliseconds, after one start of each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_ in range(repeats + 1):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if round_:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    medians = measure(parser.parse_args().repeats)
    empty = medians["python -c pass"]
    found = {name: {"median_ms": round(ms, 1), "times_empty": round(ms / empty, 2)} for name, ms in medians.items()}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
