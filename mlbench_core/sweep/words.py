"""Say in words what the figures of a sweep show: which method was fastest where, and what was not reached.

Every sentence is made from numbers of the sweep. A difference is only called shown if the test
shows it at 5 % after Holm's correction, see :func:`~mlbench_core.sweep.outcome.differ`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlbench_core.comparison.figures.canvas import number
from mlbench_core.comparison.figures.numbers import Estimate
from mlbench_core.comparison.pool import plural
from mlbench_core.sweep.outcome import CLOSE, Cell, Outcome, differ, speed_ratio
from mlbench_core.sweep.winners import Map

__all__ = ["listed", "map_sentence", "per_network", "seconds", "summary"]


def summary(outcome: Outcome, maps: Sequence[Map] = ()) -> list[str]:
    """Return the sentences on the whole sweep: which method when.

    Args:
        outcome: The runs.
        maps: The predicted maps, one for each number of workers.
    """
    cases = [(network, workers) for network in outcome.networks for workers in outcome.several]
    rows = {case: outcome.row(*case) for case in cases}
    found = _winners(outcome, rows)
    sentences = [
        *_unfinished(outcome),
        *found,
        *_against_one_worker(outcome),
        *map(map_sentence, maps),
    ]
    return [*sentences, *_not_reached(outcome)]


def per_network(outcome: Outcome, network: str) -> list[str]:
    """Return one sentence for each number of workers: the fastest algorithm, its factor, and the second.

    Args:
        outcome: The runs.
        network: Name of the network.
    """
    found = []
    for workers in outcome.several:
        row = outcome.row(network, workers)
        if row:
            found.append(f"With {plural(workers, 'worker')}: {_case(outcome, row)}")
    return found


def listed(words: Iterable[str]) -> str:
    """Join words as in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def map_sentence(found: Map) -> str:
    """Return the sentences on a predicted map: the share of each method, and of the cells without a clear winner."""
    (first, share), *others = found.shares.items()
    close = sum(cell.ratio is not None and cell.ratio < CLOSE for cell in found.cells) / len(
        found.cells
    )
    shares = [
        f"{first} has the least time on {share:.0%} of the map",
        *(f"{name} on {s:.0%}" for name, s in others),
    ]
    text = (
        f"Predicted, not measured, with {plural(found.workers, 'worker')} and "
        f"{found.range_text}: {listed(shares)}. "
        f"On {close:.0%} of it, the second is within 10 %."
    )
    known = [point for point in found.points if point.measured is not None]
    same, places = sum(point.agrees for point in known), plural(len(known), "network")
    return text + (
        f" The predicted method is also the measured fastest on {same} of {places}."
        if known
        else ""
    )


def _case(outcome: Outcome, row: Sequence[Cell]) -> str:
    first, *others = row
    if first.median_s is None:
        late = outcome.not_within(first.network, first.workers)
        return f"no algorithm reached the goal in more than half of its runs ({late})."
    text = f"median of {plural(first.runs + first.failed, 'run')}"
    text += f", {first.missed} {outcome.not_within(first.network, first.workers)}" * bool(
        first.missed
    )
    text += f", {first.failed} ended with an error" * bool(first.failed)
    # A method that missed the goal may have the least median, but it is not called the fastest.
    verb = "was fastest" if first.complete else "had the least median"
    parts = [f"{first.algorithm} {verb}, {seconds(first.median_s)} ({text})"]
    baseline = next((cell for cell in row if cell.algorithm == outcome.baseline), None)
    if baseline is not None and baseline is not first and first.complete:
        parts.append(_factor(outcome, baseline, first))
    second = next((cell for cell in others if cell.median_s is not None), None)
    if second is None:
        return (
            f"{', '.join(parts)}. No other algorithm reached the goal in more than half of "
            "its runs."
        )
    text = f"{', '.join(parts)}."
    ratio = speed_ratio(second, first)
    assert ratio is not None, "both have a median"
    shown = {True: "a difference is shown", False: "no difference is shown", None: "not tested"}[
        differ(first, second, row)
    ]
    if second is baseline:
        return f"{text} {second.algorithm} is also the second; {shown}."
    return f"{text} Second: {second.algorithm}, {ratio.value:.2f} times as long; {shown}."


def _factor(outcome: Outcome, baseline: Cell, first: Cell) -> str:
    ratio = speed_ratio(baseline, first) if baseline.complete else None
    if ratio is None and not baseline.missed:
        return f"while {baseline.failed} of {baseline.algorithm} ended with an error"
    if ratio is None:
        missed = f"{baseline.missed} of {plural(baseline.runs, 'run')}"
        return f"while {baseline.algorithm} missed the goal in {missed}"
    return f"{_times(ratio)} as fast as {baseline.algorithm}"


def _times(ratio: Estimate) -> str:
    text = f"{ratio.value:.2f} times"
    if ratio.low is None or ratio.high is None:
        return text
    # The ratio is that of the medians, and an interval is only known for that of the geometric
    # means.
    return f"{text} (ratio of the geometric means: {ratio.low:.2f} to {ratio.high:.2f})"


def seconds(value: float) -> str:
    """Return a time with its unit."""
    return f"{number(value)} s"


def _unfinished(outcome: Outcome) -> list[str]:
    if outcome.ended >= outcome.planned:
        return []
    text = f"{outcome.ended} of {plural(outcome.planned, 'planned run')} have ended."
    return [f"{text} Some configurations have fewer seeds, or no run yet."]


def _winners(outcome: Outcome, rows: dict[tuple[str, int], list[Cell]]) -> list[str]:
    wins: dict[str, list[Cell]] = {}
    clear: dict[str, int] = {}
    for row in rows.values():
        if row and row[0].median_s is not None:
            name = row[0].algorithm
            wins.setdefault(name, []).append(row[0])
            clear[name] = clear.get(name, 0) + (
                len(row) > 1 and differ(row[0], row[1], row) is True
            )
    sentences = []
    for name, cells in sorted(wins.items(), key=lambda item: -len(item[1])):
        text = f"{name} had the least median time on {_places(cells)}"
        sentences.append(
            f"{text}. The difference from the runner-up is significant in {clear[name]} of "
            f"{len(cells)} cases."
        )
    return sentences


def _places(cells: Sequence[Cell]) -> str:
    """Return networks, each with its numbers of workers."""
    found: dict[str | None, list[str]] = {}
    for cell in cells:
        found.setdefault(cell.network, []).append(str(cell.workers))
    texts = [
        f"{name or 'one machine'} ({listed(numbers)} workers)" for name, numbers in found.items()
    ]
    return listed(text.replace("(1 workers)", "(1 worker)") for text in texts)


def _against_one_worker(outcome: Outcome) -> list[str]:
    """Say on which networks more workers were faster than the fastest algorithm on one worker."""
    alone = [cell for cell in outcome.row(None, 1) if cell.median_s is not None]
    if not alone or not outcome.several:
        return []
    least = alone[0].median_s
    assert least is not None, "filtered above"
    gain: list[str] = []
    loss: list[str] = []
    for network in outcome.networks:
        cells = [cell for workers in outcome.several for cell in outcome.row(network, workers)]
        medians = [cell.median_s for cell in cells if cell.median_s is not None]
        if cells:
            (gain if min(medians, default=least) < least else loss).append(network)
    rank = "the fastest" if alone[0].complete else "the least median"
    text = f"One worker alone needs {seconds(least)} ({alone[0].algorithm}, {rank})."
    if gain:
        text += f" More workers had a lower median on {listed(gain)}."
    if loss:
        text += f" No algorithm with more workers had a lower median on {listed(loss)}."
    return [text]


def _not_reached(outcome: Outcome) -> list[str]:
    sentences = []
    for name in outcome.algorithms:
        missed = [cell for cell in outcome.cells if cell.algorithm == name and cell.missed]
        if missed:
            late: dict[str, list[str]] = {}
            for cell in missed:
                text = f"{_place(cell)} ({cell.missed} of {cell.runs})"
                late.setdefault(outcome.not_within(cell.network, cell.workers), []).append(text)
            parts = [f"{text} on {listed(places)}" for text, places in late.items()]
            sentences.append(f"{name}: {'; '.join(parts)}.")
    errors = [cell for cell in outcome.cells if cell.failed]
    if errors:
        places = [f"{cell.algorithm} on {_place(cell)} ({cell.failed})" for cell in errors]
        sentences.append(f"Ended with an error and counted as misses: {listed(places)}.")
    return sentences


def _place(cell: Cell) -> str:
    workers = plural(cell.workers, "worker")
    return workers if cell.network is None else f"{cell.network} with {workers}"
