"""Draw the figure of ``failing_hosts.py``, and print its table.

    python benchmarks/experiments/failing_hosts_page.py RUNS -o docs/results/failing_hosts

RUNS is its file ``runs.jsonl``, which is copied into the folder. The text of the page is written by
hand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from _lines import Lines, make_page

from mlbench_core.comparison.figures.canvas import PAGE_IN, Drawing, finish, new_figure
from mlbench_core.run_terms import PaidSamples

NAMES = {"diloco": "DiLoCo, elastic", "sgd": "SGD with checkpoints"}
COLUMNS = (
    *("failures of a host", "method", "seconds to the goal", "range", "times without failures"),
    *("goodput", "failures in a run"),
)


def means_of(lines: Lines) -> list[float | None]:
    """Return the mean times between failures, that of no failures first, and then the longest."""
    return sorted({one["mean_s"] for one in lines}, key=lambda mean: -(mean or 1e9))


def select(lines: Lines, method: str, mean_s: float | None) -> list[Mapping[str, Any]]:
    """Return the runs of a method with one rate of failures."""
    return [one for one in lines if (one["method"], one["mean_s"]) == (method, mean_s)]


def seconds_of(runs: Lines) -> list[float]:
    """Return the seconds to the goal, infinity for a run that missed it."""
    return [one["seconds"] or float("inf") for one in runs]


def goodput_of(runs: Lines) -> list[float]:
    """Return the goodput of the runs that reached the goal, in percent."""
    reached = [one for one in runs if one["useful"] is not None]
    return [100 * PaidSamples(one["useful"], one["paid"]).goodput for one in reached]


def table_rows(lines: Lines) -> list[list[str]]:
    """Return the rows of the table: medians over the seeds."""
    rows = []
    for mean_s in means_of(lines):
        for method, name in NAMES.items():
            runs = select(lines, method, mean_s)
            seconds, goodput = seconds_of(runs), goodput_of(runs)
            alone = median(seconds_of(select(lines, method, None)))
            middle = median(seconds)
            rows.append(
                [
                    "none" if mean_s is None else f"every {mean_s:g} s",
                    name,
                    _seconds(middle),
                    f"{_seconds(min(seconds))} to {_seconds(max(seconds))}",
                    "missed" if middle == float("inf") else f"{middle / alone:.2f}",
                    f"{median(goodput):.0f} %" if goodput else "not measured",
                    f"{median(one['failures'] for one in runs):g}",
                ]
            )
    return rows


def _seconds(seconds: float) -> str:
    return "missed" if seconds == float("inf") else f"{seconds:.0f}"


def table(lines: Lines) -> str:
    """Return the table in Markdown."""
    text = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    for row in table_rows(lines):
        text += f"| {' | '.join(row)} |\n"
    return text


def draw(lines: Lines) -> Drawing:
    """Draw seconds to the goal and goodput against the rate of failures."""
    from mlbench_core.comparison.figures.styles import method_looks

    figure = new_figure(PAGE_IN, 2.4)
    left, right = figure.subplots(1, 2)
    means = means_of(lines)
    looks = method_looks({"diloco": "diloco", "sgd": "centralized_sgd"}.values())
    for method, label in NAMES.items():
        look = looks["centralized_sgd" if method == "sgd" else method]
        look = {key: value for key, value in look.items() if key != "hatch"}
        for axes, values_of in ((left, seconds_of), (right, goodput_of)):
            values = [values_of(select(lines, method, mean_s)) for mean_s in means]
            middles = [median(found) if found else float("nan") for found in values]
            axes.plot(range(len(means)), middles, label=label, **look)
            for place, found in enumerate(values):
                axes.plot([place] * len(found), found, color=look["color"], marker="_", ls="")
    for axes in (left, right):
        labels = ["none" if mean_s is None else f"{mean_s:g} s" for mean_s in means]
        axes.set_xticks(range(len(means)), labels)
        axes.set_xlabel("mean time between failures of a host")
        axes.set_ylim(bottom=0)
    left.set_ylabel("seconds to the goal")
    right.set_ylabel("goodput, %")
    right.set_ylim(0, 105)
    seeds = len({one["seed"] for one in lines})
    caption = (
        f"Four workers, handwritten digits, to 95 % accuracy, {seeds} seeds. "
        "Lines: medians. Dashes: runs."
    )
    finish(figure, caption, *left.get_legend_handles_labels())
    rows = [["method", "mean_s", "seed", "seconds", "useful", "paid", "failures"]]
    rows += [[one[key] for key in rows[0]] for one in lines]
    return Drawing("failing_hosts", figure, caption, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure, copy the lines, and print the table."""
    make_page(__doc__.partition("\n")[0], draw, [table], argv)


if __name__ == "__main__":
    sys.exit(main())
