"""Predict a configuration from all of its measured runs."""

from __future__ import annotations

from collections.abc import Sequence

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Network
from mlbench_core.prediction.time_model import Prediction, have_equal_steps, predict

__all__ = ["predict_repeats", "starting_runs"]


def predict_repeats(
    records: Sequence[RunRecord],
    network: Network,
    workers: int,
    critical_workers: int | None = None,
) -> list[Prediction]:
    """Predict each of the runs whose number of workers is nearest, at least 2.

    Of two numbers that are equally near, the smaller one counts. A run of one worker gives the
    compute time if its steps have as many samples. Without a run of several workers, only one
    worker can be predicted.

    Args:
        records: Runs that differ only in network, number of workers and seed; at least one.
        network: See :func:`~mlbench_core.prediction.predict`, as for the other arguments.
        workers: Number of workers.
        critical_workers: Number of workers from which on more workers do not save steps.

    Returns:
        The predictions of the runs that have the figures for one.

    Raises:
        ConfigurationError: None of the runs has them.
    """
    starts, alone = starting_runs(records, workers)
    # Without a run of several workers, the prediction from any run raises the error to show.
    predictions, problems = [], []
    for start in starts:
        try:
            predictions.append(predict(start, network, workers, alone, critical_workers))
        # Another repeat may have the measurement that this one lacks.
        except ConfigurationError as error:
            problems.append(error)
    if not predictions:
        raise problems[0]
    return predictions


def starting_runs(
    records: Sequence[RunRecord], workers: int
) -> tuple[Sequence[RunRecord], RunRecord | None]:
    """Return the runs from which :func:`predict_repeats` starts, and the run of one worker.

    The second is None without one whose steps have as many samples as those of a start. Without a
    run of several workers, the first run is the start, and it cannot be predicted from.
    """
    by_distance: dict[tuple[int, int], list[RunRecord]] = {}
    for record in records:
        count = record.workers or 0
        if count > 1 and record.collectives is not None:
            # With the number itself, because runs of 2 and of 4 workers are not repeats.
            by_distance.setdefault((abs(count - workers), count), []).append(record)
    starts = records[:1]
    if by_distance:
        starts = by_distance[min(by_distance)]
    for record in records:
        if record.workers == 1 and any(have_equal_steps(start, record) for start in starts):
            return starts, record
    return starts, None
