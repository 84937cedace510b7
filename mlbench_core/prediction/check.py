"""Check the model of a prediction against the measured runs from which it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mlbench_core.comparison.group_repeats import plural
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Network
from mlbench_core.prediction.repeats import starting_runs
from mlbench_core.prediction.time_model import (
    UNEXPLAINED_SHARE,
    Prediction,
    largest_error,
    network_of,
    predict,
    share_of_core,
    slowest_cpu,
    steps_of,
)

__all__ = ["Check", "check_repeats", "why_unchecked", "widened"]

_AGAIN = "Measure again on a quiet machine."


@dataclass(frozen=True)
class Check:
    """The seconds of a measured step, and those that the model gives for the same case.

    Attributes:
        network: The network of the runs.
        workers: Their number of workers.
        measured_s: Measured seconds of a step, the mean over all steps with the first one. As all
            numbers here, the median over the runs.
        model_s: Seconds of a step by the model.
        model_range_s: The range of ``model_s`` by the largest error of the validation. That of a
            prediction is by the mean error.
        problem: The probable reason why ``measured_s`` is not in this range, and the remedy, a
            sentence each; empty if it is in it.
    """

    network: Network
    workers: int
    measured_s: float
    model_s: float
    model_range_s: tuple[float, float]
    problem: str

    @property
    def holds(self) -> bool:
        """Return True if the measured step is in the range."""
        low_s, high_s = self.model_range_s
        return low_s <= self.measured_s <= high_s


def check_repeats(records: Sequence[RunRecord], workers: int) -> list[Check]:
    """Check the model against the runs from which a prediction starts, on each of their networks.

    Runs are left out as :func:`why_unchecked` says.

    Args:
        records: See :func:`~mlbench_core.prediction.predict_repeats`.
        workers: Number of workers to predict.

    Returns:
        The checks; an empty list if no run can be checked.
    """
    starts, alone = starting_runs(records, workers)
    by_case: dict[tuple[str, int], list[tuple[RunRecord, Prediction]]] = {}
    for record in starts:
        if _obstacle(record):
            continue
        network, count = network_of(record), record.workers or 0
        # Like a prediction, the check leaves out a repeat that lacks another measurement.
        with contextlib.suppress(ConfigurationError):
            prediction = predict(record, network, count, alone)
            # widened() divides by it.
            if prediction.step_s > 0:
                by_case.setdefault((str(network), count), []).append((record, prediction))
    return [_check(pairs, alone) for pairs in by_case.values()]


def why_unchecked(records: Sequence[RunRecord], workers: int) -> str:
    """Return why :func:`check_repeats` gives no check.

    A run of one worker has no messages. Without processor time, the model takes the waiting from
    the run itself, so a comparison would show nothing. Workers that share a core take longer than
    by the model, which gives each one a core.

    Args:
        records: See :func:`check_repeats`.
        workers: Number of workers to predict.

    Returns:
        The reason of the first run that has one.
    """
    starts, _ = starting_runs(records, workers)
    return next(filter(None, map(_obstacle, starts)), "they lack a measurement")


def _obstacle(record: RunRecord) -> str:
    """Return why a run cannot check the model; empty if it can."""
    workers = record.workers or 0
    if workers < 2:
        return "they have no step of several workers"
    if share_of_core(record) < 1:
        cores = (record.machine.get("cores") or 0) * (record.machine.get("hosts") or 1)
        return (
            f"{plural(workers, 'worker')} shared {plural(cores, 'core')}, and the model gives "
            "each one a core"
        )
    if None in (record.compute_cpu_s, record.communication_cpu_s):
        return "they have no processor time"
    if not record.total_s:
        return "they have no training time"
    return ""


def _check(pairs: Sequence[tuple[RunRecord, Prediction]], alone: RunRecord | None) -> Check:
    repeats, predictions = map(list, zip(*pairs, strict=True))
    # All of them have the same network and number of workers.
    first = repeats[0]
    measured_s = _of_step(repeats, "total_s")
    model_s = median(prediction.step_s for prediction in predictions)
    network, workers = network_of(first), first.workers or 0
    error = largest_error(network, workers)
    # The error is a share of the measured time, as in predict().
    low_s, high_s = model_s / (1 + error), model_s / (1 - error)
    problem = ""
    if measured_s > high_s:
        waiting_s = median(prediction.exposed_s for prediction in predictions)
        problem = _why_longer(repeats, alone, waiting_s)
    elif measured_s < low_s:
        problem = _other_work(repeats, alone, is_longer=False) or (
            "messages took less time than by the model, so predicted times may be too long."
        )
    return Check(network, workers, measured_s, model_s, (low_s, high_s), problem)


def _why_longer(repeats: Sequence[RunRecord], alone: RunRecord | None, waiting_s: float) -> str:
    """Return the probable reason why steps took longer than by the model, and the remedy."""
    first = repeats[0]
    step_s, compute_s = (_of_step(repeats, name) for name in ("total_s", "compute_cpu_s"))
    # Time outside of communication without work of the training thread, apart from the part of a
    # processor that a slow host does not have.
    own_s = compute_s / slowest_cpu(network_of(first), first.workers or 1)
    idle_s = _of_step(repeats, "without_communication_s") - own_s
    if idle_s > UNEXPLAINED_SHARE * step_s:
        work_s = compute_s + _of_step(repeats, "communication_cpu_s")
        text = (
            f"a step took {1e3 * step_s:.2f} ms of wall time and {1e3 * work_s:.2f} ms of "
            "processor time"
        )
        data_s = median((each.phases_s.get("data") or 0.0) / steps_of(each) for each in repeats)
        if data_s > idle_s / 2:
            return (
                f"{text}, and {1e3 * data_s:.2f} ms were for its data: loading was slow, or other "
                f"programs used the machine. {_AGAIN}"
            )
        return f"{text}, so probably other programs used the machine. {_AGAIN}"
    waited_s = _of_step(repeats, "communication_exposed_s")
    cores = (first.machine.get("cores") or 0) * (first.machine.get("hosts") or 1)
    text = (
        f"training waited {1e3 * waited_s:.2f} ms in a step, and by the model "
        f"{1e3 * waiting_s:.2f} ms: messages took longer, or a worker waited for another that "
        f"other programs delayed. {_AGAIN}"
    )
    workers = first.workers or 1
    if cores and cores <= workers:
        # A worker has a thread that trains, and others that send.
        text += (
            f" If that does not help, the reason may be that {plural(workers, 'worker')} on "
            f"{plural(cores, 'core')} left none for the threads that send messages."
        )
    return _other_work(repeats, alone, is_longer=True) or text


def _other_work(repeats: Sequence[RunRecord], alone: RunRecord | None, is_longer: bool) -> str:
    """Return the reason that a worker alone, from which the model takes compute, differs."""
    if alone is None or alone.compute_cpu_s is None:
        return ""
    own_s, alone_s = _of_step(repeats, "compute_cpu_s"), _of_step([alone], "compute_cpu_s")
    less_s, more_s = own_s, alone_s
    if is_longer:
        less_s, more_s = alone_s, own_s
    if more_s <= (1 + UNEXPLAINED_SHARE) * less_s:
        return ""
    return (
        f"the computation of a step took {1e3 * own_s:.2f} ms of processor time, and in the run "
        f"{alone.name}, which the model uses, {1e3 * alone_s:.2f} ms. {_AGAIN}"
    )


def _of_step(records: Sequence[RunRecord], name: str) -> float:
    """Return the median of the seconds in a step."""
    return median((getattr(record, name) or 0.0) / steps_of(record) for record in records)


def widened(
    step_s: float, step_range_s: tuple[float, float] | None, checks: Sequence[Check]
) -> tuple[float, float] | None:
    """Widen the range of a predicted step by the checks that failed.

    If the model gave a quarter of a measured step, a predicted one may be four times as long, too.

    Args:
        step_s: The predicted seconds.
        step_range_s: Their range; None for one worker, which waits for no messages.
        checks: The checks of the runs behind the prediction.

    Returns:
        The range; None if it was None.

    Example:
        >>> from mlbench_core.network import parse_network
        >>> check = Check(parse_network("1gbit"), 2, 0.04, 0.01, (0.008, 0.015), "a reason")
        >>> widened(0.02, (0.016, 0.03), [check])
        (0.016, 0.08)
    """
    if step_range_s is None:
        return None
    ends = list(step_range_s)
    for check in checks:
        if not check.holds:
            ends += [step_s, step_s * check.measured_s / check.model_s]
    return min(ends), max(ends)
