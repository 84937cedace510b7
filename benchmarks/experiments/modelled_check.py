"""Compare the modelled times of a sweep with measured ones.

MEASURED and MODELLED are the folders of two sweeps that differ in ``time`` only. Each line has the
median time to the goal of a method, a network and a number of workers, measured and modelled, and
the difference as a share of the measured one. The last line has the mean of these shares without
their signs. The model gives each worker a core, so leave out numbers of workers that share cores in
the measured sweep.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from mlbench_core.sweep.grouped_runs import Outcome
from mlbench_core.sweep.page import read_outcome
from mlbench_core.sweep.toml_file import load_sweep


def read(folder: Path) -> Outcome:
    """Read the runs of a sweep's folder."""
    return read_outcome(folder, load_sweep(folder / "sweep.toml"))


def main(argv: list[str] | None = None) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("modelled", type=Path)
    args = parser.parse_args(argv)
    measured, modelled = read(args.measured), read(args.modelled)
    errors = []
    print("method | network | workers | measured (s) | modelled (s) | error")
    print("|".join(["---"] * 6))
    for cell in measured.cells:
        other = modelled.cell(cell.algorithm, cell.network, cell.workers)
        if cell.median_s is None or other is None or other.median_s is None:
            continue
        error = other.median_s / cell.median_s - 1
        errors.append(abs(error))
        place = f"{cell.algorithm} | {cell.network or 'one machine'} | {cell.workers}"
        print(f"{place} | {cell.median_s:.2f} | {other.median_s:.2f} | {error:+.1%}")
    print(f"mean error {statistics.mean(errors):.1%} of {len(errors)} times")


if __name__ == "__main__":
    main()
