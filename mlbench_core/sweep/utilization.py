"""Predict the compute utilization, the share of computation in a step, for each bandwidth.

Compression and waiting for messages are not computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import MLBenchError
from mlbench_core.network.description import Link, Network
from mlbench_core.prediction import predict
from mlbench_core.sweep.fastest_methods import steps_between, widest_cell
from mlbench_core.sweep.grouped_runs import Cell, Outcome
from mlbench_core.sweep.modelled import measured_run

__all__ = [
    "BANDWIDTHS",
    "ROUND_TRIP_S",
    "SHARES",
    "Utilization",
    "bandwidth_needed",
    "bandwidth_text",
    "predict_utilization",
    "utilization",
]

BANDWIDTHS = (1e6, 1e11)
"""Range of the bandwidths in bits per second."""

ROUND_TRIP_S = 1e-3
"""Round trip of the networks of a figure."""

SHARES = (0.5, 0.75, 0.9)
"""Utilizations for which the bandwidth is computed."""


@dataclass(frozen=True)
class Utilization:
    """The predicted compute utilization of all algorithms with one number of workers.

    Attributes:
        workers: Number of workers.
        bandwidths: Bits per second, ascending.
        shares: A utilization from 0 to 1 for each bandwidth, by algorithm.
        needed: The bandwidth for each of :data:`SHARES`, by algorithm, see
            :func:`bandwidth_needed`.
        left_out: Sentences on the algorithms that have no prediction.
    """

    workers: int
    bandwidths: tuple[float, ...]
    shares: dict[str, tuple[float, ...]]
    needed: dict[str, tuple[float | None, ...]]
    left_out: tuple[str, ...] = ()


def utilization(record: RunRecord, network: Network, workers: int) -> float:
    """Return the predicted share of computation in a step, from 0 to 1.

    Args:
        record: A measured run with the record of its collectives.
        network: The network.
        workers: Number of workers.

    Raises:
        ConfigurationError: The run lacks a number that the prediction needs.
    """
    prediction = predict(record, network, workers)
    return 1 - prediction.exposed_s / prediction.step_s


def bandwidth_needed(share_at: Callable[[float | None], float], target: float) -> float | None:
    """Return the least bandwidth at which a utilization is reached, by bisection.

    Args:
        share_at: Utilization at a bandwidth in bits per second, which does not fall when the
            bandwidth grows; None is a link without a limit.
        target: The utilization.

    Returns:
        Bits per second within :data:`BANDWIDTHS`. The lower end means that this or a lower
        bandwidth is enough. It is infinite if a bandwidth above the range is needed, and None if
        no bandwidth is enough.
    """
    low, high = BANDWIDTHS
    if share_at(low) >= target:
        return low
    if share_at(high) < target:
        # The round trip and the compression remain without a limit.
        if share_at(None) >= target:
            return math.inf
        return None
    # The geometric mean halves a range of decades; a text has two digits of the result.
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if share_at(middle) >= target:
            high = middle
        else:
            low = middle
    return high


def predict_utilization(outcome: Outcome, workers: int) -> Utilization | None:
    """Predict the compute utilization of every algorithm over the bandwidths.

    The prediction starts from one run: that with the median time to the goal on the network with
    the highest bandwidth.

    Args:
        outcome: The runs.
        workers: Number of workers.

    Returns:
        The utilization, or None if no algorithm can be predicted.
    """
    bandwidths = steps_between(*BANDWIDTHS)
    shares: dict[str, tuple[float, ...]] = {}
    needed: dict[str, tuple[float | None, ...]] = {}
    left_out = []
    for name in outcome.algorithms:
        cell = widest_cell(outcome, name, workers)
        if cell is None or not cell.runs:
            continue
        share_at = _share_at(_median_run(cell), workers)
        try:
            shares[name] = tuple(map(share_at, bandwidths))
            needed[name] = tuple(bandwidth_needed(share_at, target) for target in SHARES)
        except (MLBenchError, ValueError) as error:
            left_out.append(f"{name} is not in the figure with {workers} workers: {error}.")
    if not shares:
        return None
    return Utilization(workers, bandwidths, shares, needed, tuple(left_out))


def _share_at(record: RunRecord, workers: int) -> Callable[[float | None], float]:
    def share_at(bandwidth: float | None) -> float:
        rate: int | None = None
        if bandwidth is not None:
            # A link has whole bits per second.
            rate = round(bandwidth)
        return utilization(record, Network(Link(rate, ROUND_TRIP_S)), workers)

    return share_at


def _median_run(cell: Cell) -> RunRecord:
    """Return the run with the median time to the goal; misses are longer than all others."""

    def time_s(position: int) -> float:
        record = cell.group.records[position]
        if not record.reached:
            return math.inf
        return record.time_to_goal_s or math.inf

    ordered = sorted(range(cell.runs), key=time_s)
    # Of an even number, the lower one of the two in the middle: a mean of two is not a run.
    middle = ordered[(cell.runs - 1) // 2]
    return measured_run(cell.unjudged[middle])


def bandwidth_text(bandwidth: float | None) -> str:
    """Return a bandwidth of :func:`bandwidth_needed` with two digits and its unit.

    Example:
        >>> bandwidth_text(1.234e9), bandwidth_text(1e6), bandwidth_text(None)
        ('1.2 Gbit/s', '1 Mbit/s or less', 'not at any bandwidth')
    """
    if bandwidth is None:
        return "not at any bandwidth"
    low, high = BANDWIDTHS
    if bandwidth > high:
        return f"more than {_rate(high)}"
    if bandwidth <= low:
        return f"{_rate(low)} or less"
    return _rate(bandwidth)


def _rate(bandwidth: float) -> str:
    # Rounded first, so that 999.9 Mbit/s is 1 Gbit/s.
    rounded = float(f"{bandwidth:.2g}")
    if rounded < 1e9:
        return f"{rounded / 1e6:g} Mbit/s"
    return f"{rounded / 1e9:g} Gbit/s"
