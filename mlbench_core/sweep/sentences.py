"""Describe the results of a sweep in sentences: the methods with the least time, and missed goals.

Every sentence is made from numbers of the sweep. A method is only called the fastest if all were
tuned. A difference is only called shown if the test shows it at 5 % after Holm's correction, see
:func:`~mlbench_core.sweep.grouped_runs.differ`.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence

from mlbench_core.comparison.figures.canvas import number
from mlbench_core.comparison.figures.numbers import Estimate
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.sweep.fastest_methods import Map, sharing_text
from mlbench_core.sweep.grouped_runs import CLOSE, Cell, Outcome, differ, order, speed_ratio
from mlbench_core.sweep.modelled import ModelledRecord, Place, measured_run
from mlbench_core.sweep.tuning_options import Tuning

__all__ = [
    "NOT_TUNED",
    "TESTS",
    "leads",
    "listed",
    "map_sentence",
    "notes",
    "per_network",
    "places_text",
    "seconds",
    "summary",
    "tuning_rule",
    "unfinished",
]

NOT_TUNED = (
    "The methods are not tuned: each ran with one choice of its settings, and another choice can "
    "change their order."
)
"""The sentence that stands before all results of a sweep without tuning."""

TESTS = {True: "a difference is shown", False: "no difference is shown", None: "not tested"}
"""The texts for the results of :func:`~mlbench_core.sweep.grouped_runs.differ`."""


def summary(outcome: Outcome, maps: Sequence[Map] = ()) -> list[str]:
    """Return the sentences on the whole sweep: which method when.

    Args:
        outcome: The runs.
        maps: The predicted maps, one for each number of workers.
    """
    return [
        *_first_lines(outcome),
        *notes(outcome),
        *_leaders(outcome),
        *_against_one_worker(outcome),
        *map(map_sentence, maps),
        *_not_reached(outcome),
    ]


def notes(outcome: Outcome) -> list[str]:
    """Return the sentences without which the table is misread: runs and numbers that it lacks.

    Args:
        outcome: The runs.
    """
    runs: dict[str, RunRecord] = {}
    lacking: dict[str, dict[str, str]] = {}
    for cell in outcome.cells:
        for record in cell.group.records:
            # A modelled run is in the cells of all networks.
            run = measured_run(record)
            runs[run.name] = run
            for reason in run.not_measured:
                lacking.setdefault(reason, {})[run.name] = cell.algorithm
    sentences = unfinished(outcome.ended, outcome.planned)
    for reason, methods in lacking.items():
        names = listed(dict.fromkeys(methods.values()))
        number_of = f"{len(methods)} of {plural(len(runs), 'run')}"
        sentences.append(f"Not measured in {number_of} ({names}): {reason}.")
    return sentences


def per_network(outcome: Outcome, network: str) -> list[str]:
    """Return one sentence for each number of workers, and one on the second machine.

    The first have the algorithm with the least time, its factor, and the second.

    Args:
        outcome: The runs.
        network: Name of the network.
    """
    sentences = []
    for workers in outcome.several:
        row = outcome.row(network, workers)
        if row:
            sentences.append(f"With {plural(workers, 'worker')}: {_case(outcome, row)}")
    return [*sentences, *_second_machine(outcome, network)]


def listed(words: Iterable[str]) -> str:
    """Join words as in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = list(words) or [""]
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def tuning_rule(tuning: Tuning) -> str:
    """Return the rule by which a sweep tuned its algorithms, in two sentences.

    Args:
        tuning: The table of the sweep's file.
    """
    parameters = ", then ".join(tuning.parameters)
    factors = listed(f"{factor:g}" for factor in tuning.factors)
    arguments = "the same arguments and limit for all"
    if tuning.horizon:
        arguments += f", and {shlex.join(tuning.horizon)} in all trials"
    return (
        "Every algorithm was tuned with each number of workers by the same rule and without a "
        f"network: {parameters} at {factors} times the default, one run each with seed "
        f"{tuning.seed}, and {arguments}. The value with the fewest steps "
        "to the goal is used in the results, else that with the best value of the goal's metric; "
        "if it is at the edge of the grid, the grid grows by one value there, at most twice."
    )


def map_sentence(found: Map) -> str:
    """Return the sentences on a predicted map.

    They have the share of each method, and that of the cells in which the second is close.
    """
    # The shares are sorted, the largest first.
    (first, share), *others = found.shares.items()
    shares = [f"{first} has the least time on {share:.0%} of the map"]
    for name, other_share in others:
        shares.append(f"{name} on {other_share:.0%}")
    close = 0
    for cell in found.cells:
        if cell.ratio is not None and cell.ratio < CLOSE:
            close += 1
    text = (
        f"Predicted, not measured, with {plural(found.workers, 'worker')} and "
        f"{found.range_text}: {listed(shares)}. "
        f"On {close / len(found.cells):.0%} of it, the second is within 10 %."
    )
    agrees = []
    for point in found.points:
        # On a network without a median, no measured method can be compared with.
        if point.measured is not None:
            agrees.append(point.agrees)
    # A modelled point is a prediction itself.
    if not agrees or found.is_modelled:
        return text
    same, networks = agrees.count(True), plural(len(agrees), "network")
    return (
        f"{text} The predicted method also has the least measured median on {same} of {networks}."
    )


def _case(outcome: Outcome, row: Sequence[Cell]) -> str:
    first, *others = row
    # Half of its runs or more missed the goal, and no other algorithm has a median.
    if first.median_s is None:
        late = outcome.missed_text(*row)
        if all(cell.unmeasured and cell.unmeasured == cell.missed for cell in row):
            return "no algorithm has a time to the goal, because the goal was not measured."
        return f"no algorithm reached the goal in more than half of its runs ({late})."
    text = f"median of {plural(first.runs + first.failed, 'run')}"
    if first.missed:
        text += f", {first.missed} {outcome.missed_text(first)}"
    if first.failed:
        text += f", {first.failed} ended with an error"
    parts = [f"{first.algorithm} {leads(outcome, first)}, {seconds(first.median_s)} ({text})"]
    baseline = outcome.cell(outcome.baseline, first.network, first.workers)
    if baseline is not None and baseline is not first and first.complete:
        parts.append(_factor(outcome, baseline, first))
    text = f"{', '.join(parts)}."
    # Cells without a median are the last of a row.
    if not others:
        return text
    if others[0].median_s is None:
        return f"{text} No other algorithm reached the goal in more than half of its runs."
    second = others[0]
    ratio = speed_ratio(second, first)
    assert ratio is not None, "both have a median"
    test = TESTS[differ(first, second, row)]
    if second is baseline:
        return f"{text} {second.algorithm} is also the second; {test}."
    return f"{text} Second: {second.algorithm}, {ratio.value:.2f} times as long; {test}."


def leads(outcome: Outcome, first: Cell) -> str:
    """Return the verb of the sentence on the cell with the least median, such as "was fastest"."""
    # A method that missed the goal may have the least median, but it is not called the fastest.
    verb = "had the least median"
    if first.complete:
        verb = "had the least time"
        # Without tuning, another one may only have settings that suit the task less.
        if outcome.is_tuned:
            verb = "was fastest"
    if outcome.modelled is None:
        return verb
    return {
        "was fastest": "is modelled as fastest",
        "had the least time": "has the least modelled time",
        "had the least median": "has the least modelled median",
    }[verb]


def _second_machine(outcome: Outcome, network: str) -> list[str]:
    """Compare the least medians of one and of two workers."""
    alone, pair = outcome.row(None, 1), outcome.row(network, 2)
    # A row starts with its least median.
    if not alone or not pair or alone[0].median_s is None:
        return []
    one, two = alone[0], pair[0]
    text = f"The second machine: one worker needs {seconds(alone[0].median_s)} ({one.algorithm})"
    ratio = speed_ratio(one, two)
    if ratio is None or two.median_s is None:
        return [f"{text}, and no algorithm with 2 workers has a median."]
    # The faster one was selected from its row, and is compared with all of the other.
    if ratio.value >= 1:
        test = differ(two, one, [two, *alone])
    else:
        test = differ(one, two, [one, *pair])
    return [
        f"{text}, 2 workers {seconds(two.median_s)} ({two.algorithm}): "
        f"{ratio.value:.2f} times as fast; {TESTS[test]}."
    ]


def _factor(outcome: Outcome, baseline: Cell, first: Cell) -> str:
    # By the rule for misses, a baseline with a miss has no ratio.
    if baseline.complete:
        ratio = speed_ratio(baseline, first)
        if ratio is not None:
            return f"{_times(ratio)} as fast as {baseline.algorithm}"
    if not baseline.missed:
        return f"while {baseline.failed} of {baseline.algorithm} ended with an error"
    missed = f"{baseline.missed} of {plural(baseline.runs, 'run')}"
    if baseline.unmeasured:
        return f"while {baseline.algorithm} has no time to the goal in {missed}"
    return f"while {baseline.algorithm} missed the goal in {missed}"


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


def _first_lines(outcome: Outcome) -> list[str]:
    sentences = _modelled(outcome)
    if outcome.is_tuned:
        return sentences
    # The first line says both.
    return [" ".join([*sentences[:1], NOT_TUNED]), *sentences[1:]]


def _modelled(outcome: Outcome) -> list[str]:
    """Return sentences on the parts that are measured and modelled, if a part is modelled."""
    if outcome.modelled is None:
        return []
    sentences = [
        "Steps to the goal, bytes and processor time are measured in "
        f"{plural(outcome.modelled, 'run')} of workers on one machine; seconds on networks are "
        "modelled, from the processor time of a step and the time of its messages."
    ]
    # Ratios to the median, because the times of the cells may differ by orders of magnitude.
    least = most = 1.0
    # Cells with the same remark share a sentence.
    caveats: dict[str, list[Cell]] = {}
    reasons: dict[str, list[Cell]] = {}
    for cell in outcome.cells:
        if cell.not_modelled:
            reasons.setdefault(cell.not_modelled, []).append(cell)
        if cell.model_range_s is not None and cell.median_s:
            low_s, high_s = cell.model_range_s
            least, most = min(least, low_s / cell.median_s), max(most, high_s / cell.median_s)
        for record in cell.reached:
            if isinstance(record, ModelledRecord):
                for caveat in record.caveats:
                    caveats.setdefault(caveat, []).append(cell)
    if least < most:
        sentences.append(
            f"By the measured errors of the model, a time may be up to {1 - least:.0%} shorter or "
            f"{most - 1:.0%} longer. This is apart from the intervals, which are those of the "
            "seeds."
        )
    for caveat, cells in caveats.items():
        sentences.append(f"Less certain: {places_text(cells)}: {caveat}.")
    for reason, cells in reasons.items():
        names = listed(dict.fromkeys(cell.algorithm for cell in cells))
        sentences.append(f"Not modelled: {names} on {places_text(cells)}: {reason}.")
    return sentences


def unfinished(ended: int, planned: int) -> list[str]:
    """Return a sentence on a sweep that goes on; an empty list if all of its runs have ended."""
    # A page can be made at any time, and a comparison of fewer seeds must say so.
    if ended >= planned:
        return []
    text = f"{ended} of {plural(planned, 'planned run')} have ended."
    return [f"{text} Some configurations have fewer seeds, or no run yet."]


def _leaders(outcome: Outcome) -> list[str]:
    leads: dict[str, list[Cell]] = {}
    # For each method that leads: the result of each test against the second.
    tests: dict[str, list[bool | None]] = {}
    repeated = set()
    for network, workers in itertools.product(outcome.networks, outcome.several):
        row = outcome.row(network, workers)
        if not row or row[0].median_s is None:
            continue
        first = row[0]
        leads.setdefault(first.algorithm, []).append(first)
        # By a test with Holm's correction, paired by seed if both have the same seeds.
        if len(row) > 1:
            tests.setdefault(first.algorithm, []).append(differ(first, row[1], row))
            if any(cell.runs + cell.failed > 1 for cell in row[:2]):
                repeated.add(first.algorithm)
    sentences = []
    for name, cells in sorted(leads.items(), key=lambda item: -len(item[1])):
        text = f"{name} had the least median time on {places_text(cells)}."
        results = tests.get(name, [])
        tested = len(results) - results.count(None)
        if tested:
            text += (
                " The difference from the second is significant in "
                f"{results.count(True)} of {tested} cases"
            )
            # A case with a single run or a miss has no test, and must not look like a tie.
            if tested < len(cells):
                text += f" that were tested, of {len(cells)}"
            text += "."
        elif results:
            reason = "one run each"
            if name in repeated:
                reason = "that needs two runs of each, and no missed ones"
            text += f" The difference from the second is not tested: {reason}."
        sentences.append(text)
    return sentences


def places_text(cells: Iterable[Cell | Place]) -> str:
    """Return networks, each with its numbers of workers, such as "home-fibre (2 and 4 workers)"."""
    workers: dict[str | None, list[str]] = {}
    for cell in cells:
        numbers = workers.setdefault(cell.network, [])
        # Several algorithms may have the same place.
        if str(cell.workers) not in numbers:
            numbers.append(str(cell.workers))
    texts = []
    for network, numbers in workers.items():
        noun = "workers"
        if numbers == ["1"]:
            noun = "worker"
        texts.append(f"{network or 'one machine'} ({listed(numbers)} {noun})")
    return listed(texts)


def _against_one_worker(outcome: Outcome) -> list[str]:
    """Compare the networks with the algorithm that has the least median on one worker."""
    # One worker has no network, so it is compared with all of them.
    alone = outcome.row(None, 1)
    if not alone or not outcome.several:
        return []
    least = alone[0].median_s
    if least is None:
        return []
    gain: list[Cell] = []
    loss: list[Cell] = []
    for network, workers in itertools.product(outcome.networks, outcome.several):
        # A row starts with its least median, and the order of a cell with its own.
        for first in outcome.row(network, workers)[:1]:
            if order(first)[0] < least:
                gain.append(first)
            else:
                loss.append(first)
    # In the same words as the other sentences, see leads().
    rank = "the least median"
    if alone[0].complete:
        rank = "the least time"
        if outcome.is_tuned:
            rank = "the fastest"
    text = f"One worker alone needs {seconds(least)} ({alone[0].algorithm}, {rank})."
    if gain:
        text += f" More workers had a lower median on {places_text(gain)}."
    if loss:
        text += (
            f" One machine is enough on {places_text(loss)}: no algorithm had a lower median there."
        )
    shared = sharing_text(outcome.groups)
    if shared and outcome.modelled is None:
        text += f" {shared}."
    return [text]


def _not_reached(outcome: Outcome) -> list[str]:
    sentences = []
    for name in outcome.algorithms:
        cases: dict[str, list[str]] = {}
        for cell in outcome.cells:
            if cell.algorithm == name and cell.missed:
                late = outcome.missed_text(cell)
                text = f"{_place(cell)} ({cell.missed} of {cell.runs})"
                cases.setdefault(late, []).append(text)
        parts = []
        for late, places in cases.items():
            parts.append(f"{late} on {listed(places)}")
        if parts:
            sentences.append(f"{name}: {'; '.join(parts)}.")
    errors = []
    for cell in outcome.cells:
        if cell.failed:
            errors.append(f"{cell.algorithm} on {_place(cell)} ({cell.failed})")
    if errors:
        sentences.append(f"Ended with an error and counted as misses: {listed(errors)}.")
    return sentences


def _place(cell: Cell) -> str:
    workers = plural(cell.workers, "worker")
    if cell.network is None:
        return workers
    return f"{cell.network} with {workers}"
