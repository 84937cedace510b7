"""Check the advice of ``mlbench recommend`` on networks that it has not seen.

Each measured network of a sweep is left out once. The advice for it comes from the runs on the
other networks, and is compared with the measured times: regret is the measured time of the
recommended method, divided by that of the best method, minus 1. The advice is for workers with a
core each, so a measurement of more workers than cores differs from it.

    python benchmarks/experiments/recommend_check.py FOLDER

FOLDER is the folder of a sweep on emulated networks, with at least two networks.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from mlbench_core.comparison.prices import Pricing
from mlbench_core.sweep.recommend import Runs, read_runs, recommend


def least(runs: Runs, network: str, workers: list[int]) -> list[tuple[str, int, float | None]]:
    """Return method, workers and seconds to the goal of all rows, least first."""
    described = runs.networks[network]
    if not any(place.network == network for place in runs.places):
        # Without its name, the network is one that the runs did not have.
        runs = replace(runs, networks={n: d for n, d in runs.networks.items() if n != network})
    rows = recommend(runs, [described], workers, Pricing()).rows
    return [(row["algorithm"], row["workers"], row["time_to_goal_s"]) for row in rows]


def main() -> None:
    """Print one line for each network and number of workers, and for the choice of both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    runs = read_runs(parser.parse_args().folder)
    several = [count for count in runs.workers if count > 1]
    regrets = []
    print("| network | workers | recommended | best, measured | regret |\n|---|---|---|---|---|")
    for network in runs.networks:
        others = [place for place in runs.places if place.network != network]
        for choice in [*([count] for count in several), several]:
            advised = least(replace(runs, places=others), network, choice)[0]
            measured = {(name, k): time_s for name, k, time_s in least(runs, network, choice)}
            best = min(measured, key=lambda case: measured[case] or float("inf"))
            time_s, best_s = measured[advised[:2]], measured[best]
            regret = "none reached the goal"
            if best_s is not None:
                regrets.append(float("inf") if time_s is None else time_s / best_s - 1)
                regret = f"{regrets[-1]:.1%}"
            names = [f"{name}, {k}" for name, k in (advised[:2], best)]
            print(
                f"| {network} | {' or '.join(map(str, choice))} | {' | '.join(names)} | {regret} |"
            )
    good = sum(regret <= 0.1 for regret in regrets)
    print(f"\nWithin 10 %: {good} of {len(regrets)}; median {statistics.median(regrets):.1%}")


if __name__ == "__main__":
    main()
