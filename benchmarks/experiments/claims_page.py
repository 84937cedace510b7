"""Draw the figure of ``claims.py``, and print its tables.

    python benchmarks/experiments/claims_page.py RUNS -o docs/results/claims

RUNS is its file ``runs.jsonl``, which is copied into the folder. The text of the page is written by
hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from _lines import Lines, make_page

from mlbench_core.comparison.figures.canvas import GRAY, PAGE_IN, Drawing, finish, new_figure
from mlbench_core.comparison.significance import paired_test

FIRST_SEED = 42  # of the results; smaller ones are those of the tuning
# Largest ratios that count as equal.
MARGINS = {"steps": 1.1, "loss": 1.02, "sent_bytes": 1.0}
FIGURES = {"steps": "steps to a loss of 0.1", "loss": "bits per byte", "sent_bytes": "bytes sent"}
MARKS = {"reproduced": ("C0", "o"), "undecided": (GRAY, "s"), "contradicted": ("C1", "x")}
TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3)
SEEDS = {"digits": 10, "gpt": 5, "corrupt": 5}


@dataclass(frozen=True)
class Claim:
    """A sentence about two methods.

    Attributes:
        text: The sentence.
        method: The method that it praises.
        peer: The other.
        problem: Problem on which it is tried.
        figure: The figure that decides.
        is_strict: True if the figure must be less than the peer's, and False if it may be larger
            by the margin.
    """

    text: str
    method: str
    peer: str
    problem: str
    figure: str
    is_strict: bool


def make_claims() -> list[Claim]:
    """Return all claims, in the order of the page."""
    claims = []

    def add(text: str, method: str, peer: str, less_bytes: bool = True, problem: str = "") -> None:
        for where, figure in (("digits", "steps"), ("gpt", "loss")):
            if problem in ("", where):
                claims.append(Claim(text, method, peer, where, figure, False))
                if less_bytes:
                    claims.append(Claim(text, method, peer, where, "sent_bytes", True))

    def add_strict(text: str, method: str, peer: str) -> None:
        claims.append(Claim(text, method, peer, "digits", "steps", True))
        claims.append(Claim(text, method, peer, "gpt", "loss", True))

    add("8 bits are as good as 32", "int8", "float32")
    add_strict("4 bits need LoCo's feedback", "int4_loco", "int4")
    add("EF21 is as good as SGD", "ef21", "float32", problem="digits")
    add("EF21-Muon is as good as Muon", "ef21_muon", "muon")
    add("ACP-SGD is as good as PowerSGD", "acp_sgd", "power_sgd")
    add("NorMuon is as good as Muon", "normuon", "muon", less_bytes=False)
    add("Dion2 is as good as Muon", "dion2", "muon", less_bytes=False)
    add("Dion3 is as good as Muon", "dion3", "muon", less_bytes=False)
    for period in (20, 5):
        add(
            f"eager updates are as good as DiLoCo, period {period}",
            f"eager_{period}", f"diloco_{period}", less_bytes=False,
        )  # fmt: skip
        text = f"eager updates are better than a delay, period {period}"
        add_strict(text, f"eager_{period}", f"late_{period}")
    add("NoLoCo is as good as DiLoCo", "no_loco", "diloco_20", less_bytes=False)
    add("DES-LOC is as good as local Adam", "des_loc", "local_adam")
    add("SGP is as good as SGD", "sgp", "float32", less_bytes=False, problem="digits")
    text = "EDiT bears a worker with corrupt data"
    claims.append(Claim(text, "edit_2", "diloco_2", "corrupt", "loss", True))
    return claims


def results_of(lines: Lines, problem: str, method: str) -> list[Mapping[str, Any]]:
    """Return the trainings of the result, by seed."""
    found = {}
    for one in lines:
        if (one["problem"], one["method"]) != (problem, method) or one["seed"] < FIRST_SEED:
            continue
        if one["seed"] in found:
            raise ValueError(f"{method} has two trainings with seed {one['seed']} on {problem}")
        found[one["seed"]] = one
    return [found[seed] for seed in sorted(found)]


def values_of(lines: Lines, claim: Claim, method: str) -> list[float]:
    """Return the figures of a method, infinity for a training that missed or diverged."""
    reached = "steps" if claim.problem == "digits" else "loss"
    values = []
    for one in results_of(lines, claim.problem, method):
        missed = one[reached] is None
        values.append(math.inf if missed else float(one[claim.figure]))
    return values


@dataclass(frozen=True)
class Outcome:
    """Outcome of a claim.

    Attributes:
        claim: The claim.
        medians: Medians of the method and its peer.
        misses: Trainings of both that missed the goal or diverged.
        ratio: Geometric mean of the ratios of the method to the peer, by seed; None with a miss.
        interval: Its 95 % interval.
        verdict: "reproduced"; "contradicted" if the whole interval is on the wrong side; else
            "undecided".
    """

    claim: Claim
    medians: tuple[float, float]
    misses: tuple[int, int]
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: str


def outcome_of(lines: Lines, claim: Claim) -> Outcome | None:
    """Return the outcome of a claim; None while a training is missing."""
    own, peer = (values_of(lines, claim, method) for method in (claim.method, claim.peer))
    if len(own) != SEEDS[claim.problem] or len(own) != len(peer):
        return None
    misses = (own.count(math.inf), peer.count(math.inf))
    medians = (median(own), median(peer))
    if any(misses):
        # Without an interval, only a method that never fails where the other always does is better.
        verdicts = {(0, len(peer)): "reproduced", (len(own), 0): "contradicted"}
        return Outcome(claim, medians, misses, None, None, verdicts.get(misses, "undecided"))
    test = paired_test(map(math.log, own), map(math.log, peer))
    low, high = map(math.exp, test.interval)
    limit = 1.0 if claim.is_strict else MARGINS[claim.figure]
    verdict = "undecided"
    if high < limit:
        verdict = "reproduced"
    elif low > limit:
        verdict = "contradicted"
    return Outcome(claim, medians, misses, math.exp(test.difference), (low, high), verdict)


def outcomes_of(lines: Lines) -> list[Outcome]:
    """Return the outcomes of the claims whose trainings are there."""
    found = [outcome_of(lines, claim) for claim in make_claims()]
    return [outcome for outcome in found if outcome is not None]


def shown(value: float, figure: str) -> str:
    """Return a figure as text."""
    if value == math.inf:
        return "missed"
    if figure == "sent_bytes":
        return f"{value / 1e6:.2f} MB"
    return f"{value:.0f}" if figure == "steps" else f"{value:.3f}"


def ratio_text(outcome: Outcome) -> str:
    """Return the ratio with its interval, or the misses."""
    if outcome.ratio is None or outcome.interval is None:
        return f"missed {outcome.misses[0]} and {outcome.misses[1]}"
    low, high = outcome.interval
    return f"{outcome.ratio:.2f} ({low:.2f} to {high:.2f})"


def claims_table(lines: Lines) -> str:
    """Return the table of the claims in Markdown."""
    rows = []
    for outcome in outcomes_of(lines):
        claim = outcome.claim
        own, peer = (shown(value, claim.figure) for value in outcome.medians)
        rows.append(
            [claim.text, claim.problem, FIGURES[claim.figure], own, peer, ratio_text(outcome),
             outcome.verdict]
        )  # fmt: skip
    columns = ("claim", "problem", "figure", "method", "peer", "ratio", "outcome")
    return markdown(columns, rows)


def methods_table(lines: Lines) -> str:
    """Return the table of the tuned rates and of the medians in Markdown."""
    rows = []
    keys = dict.fromkeys((one["problem"], one["method"]) for one in lines)
    for problem, method in keys:
        runs = results_of(lines, problem, method)
        if not runs:
            continue
        all_of_it = [one for one in lines if (one["problem"], one["method"]) == (problem, method)]
        trials = sorted({one["lr"] for one in all_of_it if one["seed"] < FIRST_SEED})
        lr = runs[0]["lr"]
        edge = " (edge)" if lr in (trials[0], trials[-1]) else ""
        steps = [math.inf if one["steps"] is None else one["steps"] for one in runs]
        losses = [math.inf if one["loss"] is None else one["loss"] for one in runs]
        rows.append(
            [problem, f"`{method}`", f"{lr:g}{edge}", f"{len(trials)}",
             shown(median(steps), "steps") if problem == "digits" else "-",
             shown(median(losses), "loss"),
             shown(median(one["sent_bytes"] for one in runs), "sent_bytes"),
             f"{median(one['collectives'] for one in runs):g}"]
        )  # fmt: skip
    columns = ("problem", "method", "rate", "rates tried", "steps", "loss", "sent", "collectives")
    return markdown(columns, rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return text + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(lines: Lines) -> Drawing:
    """Draw the ratio of each claim with its interval."""
    outcomes = [one for one in outcomes_of(lines) if one.ratio and one.claim.figure != "sent_bytes"]
    figure = new_figure(PAGE_IN, 0.6 + 0.17 * len(outcomes))
    axes = figure.subplots()
    axes.axvline(1, color=GRAY, linewidth=0.8)
    for place, outcome in enumerate(outcomes):
        assert outcome.interval is not None
        color, marker = MARKS[outcome.verdict]
        axes.plot(outcome.interval, [place, place], color=color)
        axes.plot([outcome.ratio], [place], color=color, marker=marker)
    labels = [f"{one.claim.text}, {one.claim.problem}" for one in outcomes]
    axes.set_yticks(range(len(outcomes)), labels)
    limits = axes.get_xlim()
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(limits)
    axes.set_xlabel("steps, or loss, of the method by that of its peer")
    caption = (
        "Ratios by seed with 95 % intervals; less is better for the method. "
        "Circles: reproduced. Squares: undecided. Crosses: contradicted."
    )
    finish(figure, caption, [], [])
    rows: list[list[Any]] = [["claim", "problem", "figure", "ratio", "low", "high", "verdict"]]
    for one in outcomes_of(lines):
        low, high = one.interval or (None, None)
        claim = one.claim
        rows.append([claim.text, claim.problem, claim.figure, one.ratio, low, high, one.verdict])
    return Drawing("claims", figure, caption, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure, copy the lines, and print the tables."""
    make_page(__doc__.partition("\n")[0], draw, [claims_table, methods_table], argv)


if __name__ == "__main__":
    sys.exit(main())
