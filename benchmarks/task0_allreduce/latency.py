r"""Evaluate the times of a collective operation: statistics, bandwidths, fits of latency.

The time of a message of n bytes is modeled by the line

.. math:: t(n) = \alpha + n / \beta

with the latency :math:`\alpha` in seconds and the bandwidth :math:`\beta` in bytes per second
(Hockney 1994).

If an operation on S bytes takes the time t, its *algorithm bandwidth* is S / t. It depends on the
number k of workers, because each worker has to send at least S times a factor that depends on k.
The *bus bandwidth* is the algorithm bandwidth times this factor, so it can be compared with the
speed of the hardware for any k:

======================================================  ==============
collective                                              factor
======================================================  ==============
all_reduce                                              2 (k - 1) / k
all_gather, reduce_scatter, all_to_all                  (k - 1) / k
broadcast, reduce, send_recv                            1
======================================================  ==============

S is the size of one worker's larger buffer. For an all_gather that is the output, for a
reduce_scatter the input, which hold data of all workers. For the other collectives it is the data
that one worker sends.

References:
    R. Hockney: The communication challenge for MPP. Parallel Computing 20(3), 1994.
    The factors: PERFORMANCE.md of https://github.com/NVIDIA/nccl-tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlbench_core.arguments import check_int, check_positive

__all__ = [
    "BUS_FACTORS",
    "LatencyFit",
    "LatencyStatistics",
    "Measurement",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bus_factor",
    "element_counts",
    "fit_latency",
    "summarize",
]

BUS_FACTORS: dict[str, tuple[int, int]] = {
    "all_reduce": (2, -2),
    "all_gather": (1, -1),
    "reduce_scatter": (1, -1),
    "all_to_all": (1, -1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "send_recv": (1, 0),
}
"""The numbers (a, b) of each collective, whose factor for k workers is a + b / k."""


def bus_factor(collective: str, world_size: int) -> float:
    """Return the factor from a collective's algorithm bandwidth to its bus bandwidth.

    The table in the module's docstring has the factors.

    Args:
        collective: Its name, one of :data:`BUS_FACTORS`.
        world_size: Number of workers k, at least 1.

    Returns:
        The factor; 0 for one worker if the collective then sends nothing.

    Raises:
        ValueError: The collective is unknown, or ``world_size`` is below 1.

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
        (1.5, 0.75, 1.0)
    """
    if collective not in BUS_FACTORS:
        raise ValueError(f"collective must be one of {', '.join(BUS_FACTORS)}, not {collective!r}")
    check_int("world_size", world_size)
    constant, by_worker = BUS_FACTORS[collective]
    return constant + by_worker / world_size


def algorithm_bandwidth(size_bytes: float, seconds: float) -> float:
    """Return the bytes per second of an operation, S / t.

    Args:
        size_bytes: Size S of the buffer in bytes.
        seconds: Time t of the operation, positive.

    Raises:
        TypeError: ``seconds`` is not a number.
        ValueError: ``seconds`` is not positive and finite.

    Example:
        >>> algorithm_bandwidth(4e6, 0.002)
        2000000000.0
    """
    check_positive("seconds", seconds)
    return size_bytes / seconds


def bus_bandwidth(collective: str, size_bytes: float, seconds: float, world_size: int) -> float:
    """Return the algorithm bandwidth times :func:`bus_factor`, in bytes per second.

    Args:
        collective: Its name, one of :data:`BUS_FACTORS`.
        size_bytes: Size of the buffer in bytes.
        seconds: Time of the operation, positive.
        world_size: Number of workers.

    Raises:
        ValueError: An argument is unknown or out of its range.

    Example:
        >>> bus_bandwidth("all_reduce", 4e6, 0.002, world_size=2)
        2000000000.0
    """
    return algorithm_bandwidth(size_bytes, seconds) * bus_factor(collective, world_size)


@dataclass(frozen=True)
class LatencyStatistics:
    """Statistics of repeated times, in seconds.

    Attributes:
        count: Number of measured times.
        mean_s: Mean of the times.
        min_s: Smallest time.
        p50_s: Median.
        p99_s: 99th percentile, interpolated linearly between the two nearest times.
        max_s: Largest time.
    """

    count: int
    mean_s: float
    min_s: float
    p50_s: float
    p99_s: float
    max_s: float


def summarize(seconds: Iterable[float]) -> LatencyStatistics:
    """Compute mean, median, 99th percentile and extremes of times.

    Args:
        seconds: At least one time in seconds, finite and not negative.

    Raises:
        ValueError: ``seconds`` is empty, or a time is negative or not finite.

    Example:
        >>> summarize([0.125, 0.5, 0.125, 0.25]).p50_s
        0.1875
    """
    times = np.asarray(list(seconds), dtype=np.float64)
    if times.ndim != 1 or times.size == 0:
        raise ValueError("seconds must have at least one time, not none")
    if not np.isfinite(times).all() or times.min() < 0:
        bad = times[~(np.isfinite(times) & (times >= 0))][0]
        raise ValueError(f"seconds must be finite and at least 0, not {bad}")
    p50, p99 = np.percentile(times, [50, 99])
    return LatencyStatistics(
        count=int(times.size),
        mean_s=float(times.mean()),
        min_s=float(times.min()),
        p50_s=float(p50),
        p99_s=float(p99),
        max_s=float(times.max()),
    )


@dataclass(frozen=True)
class LatencyFit:
    r"""The line :math:`t(n) = \alpha + n / \beta` through times of several sizes.

    Attributes:
        alpha_s: Latency in seconds, at least 0.
        beta_bytes_per_s: Bandwidth in bytes per second; infinite if the times do not grow with the
            size.
        relative_error: Root mean square of the relative deviations of the line from the times.
    """

    alpha_s: float
    beta_bytes_per_s: float
    relative_error: float

    def seconds(self, size_bytes: float) -> float:
        """Return the time that the line gives for a message, in seconds.

        Args:
            size_bytes: Size of the message in bytes.
        """
        return self.alpha_s + size_bytes / self.beta_bytes_per_s

    def __str__(self) -> str:
        return f"{self.alpha_s * 1e6:.4g} µs + n / ({self.beta_bytes_per_s / 1e9:.3g} GB/s)"


def fit_latency(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> LatencyFit:
    r"""Fit latency and bandwidth by relative least squares.

    With the times :math:`t_i` of the sizes :math:`n_i` it minimizes

    .. math:: \sum_i \left( \frac{\alpha + n_i \gamma - t_i}{t_i} \right)^2, \qquad \alpha, \gamma
      \ge 0,

    and :math:`\beta = 1 / \gamma`. Deviations are relative to the measured time, because times span
    six orders of magnitude. In a plain sum of squares the largest sizes would dominate, and their
    noise would decide the latency.

    Args:
        sizes_bytes: Sizes in bytes, at least two different ones.
        seconds: The time of each, in seconds, positive.

    Returns:
        The fit.

    Raises:
        ValueError: The lengths differ, there are fewer than two sizes, or a time is not positive
            and finite.

    Example:
        >>> fit = fit_latency([4, 4e3, 4e6], [100e-6 + n / 1e9 for n in (4, 4e3, 4e6)])
        >>> round(fit.alpha_s * 1e6, 3), round(fit.beta_bytes_per_s / 1e9, 3)
        (100.0, 1.0)
    """
    n, t = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if n.shape != t.shape or n.ndim != 1:
        raise ValueError(
            f"seconds must have one time for each size, not shape {t.shape} for sizes of shape "
            f"{n.shape}"
        )
    if np.unique(n).size < 2:
        raise ValueError(
            f"sizes_bytes must have at least 2 different sizes for a line, not {np.unique(n).size}"
        )
    if not np.isfinite(t).all() or t.min() <= 0:
        raise ValueError(
            f"seconds must be finite and positive, not {t[~(np.isfinite(t) & (t > 0))][0]}"
        )
    # Scaled to unknowns of the same order of magnitude, which least squares needs to be accurate:
    # alpha in units of the smallest time, gamma in units of the largest time over the largest size.
    columns = np.stack([t.min() / t, n / n.max() * t.max() / t], axis=1)
    latency, slope = _non_negative_least_squares(columns)
    residuals = columns @ np.array([latency, slope]) - 1
    gamma = slope * t.max() / n.max()
    return LatencyFit(
        alpha_s=float(latency * t.min()),
        beta_bytes_per_s=float(1 / gamma) if gamma > 0 else math.inf,
        relative_error=float(np.sqrt(np.mean(residuals**2))),
    )


def _non_negative_least_squares(
    columns: np.ndarray[Any, np.dtype[np.float64]],
) -> tuple[float, float]:
    """Find the two numbers x >= 0 that minimize ``|columns @ x - 1|``.

    The columns are positive, of shape (m, 2).
    """
    (x0, x1), *_ = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)
    if x0 >= 0 and x1 >= 0:
        return float(x0), float(x1)
    # If one number would be negative, it is 0 at the minimum. The other then follows from its
    # column alone.
    alone = columns.sum(axis=0) / (columns**2).sum(axis=0)
    if x1 < 0:
        return float(alone[0]), 0.0
    return 0.0, float(alone[1])


def element_counts(num: int = 80, largest: int = 10**8) -> list[int]:
    """Return the sizes to measure: ``numpy.logspace(0, log10(largest), num)``, rounded.

    Each size appears once, and they ascend. Small sizes coincide after rounding, so there are fewer
    than ``num``: with the defaults 77 instead of 80.

    Args:
        num: Number of points on the logarithmic scale, at least 1.
        largest: The last point, at least 1.

    Returns:
        Numbers of elements.

    Raises:
        ValueError: An argument is below 1.

    Example:
        >>> element_counts(num=5, largest=100)
        [1, 3, 10, 32, 100]
    """
    for name, value in (("num", num), ("largest", largest)):
        check_int(name, value)
    # Near 1 the points are closer together than whole numbers, so several of them round to the same
    # size.
    points = np.rint(np.logspace(0, math.log10(largest), num=num)).astype(np.int64)
    return sorted(set(points.tolist()))


@dataclass(frozen=True)
class Measurement:
    """Times of one collective on one size and type.

    Attributes:
        collective: Its name, one of :data:`BUS_FACTORS`.
        backend: The backend that did it, for example ``"gloo"``.
        device: Device of the tensors: ``"cpu"`` or ``"cuda"``.
        dtype: Type of the elements, for example ``"float32"``.
        world_size: Number of workers.
        elements: Number of elements of the larger buffer.
        size_bytes: Its size in bytes.
        operations: Number of operations between two readings of the clock.
        seconds: One time for each repetition: the mean time of its ``operations`` on the slowest
            worker.
        wrong_elements: Number of wrong elements in the results of all workers.
    """

    collective: str
    backend: str
    device: str
    dtype: str
    world_size: int
    elements: int
    size_bytes: int
    operations: int
    seconds: tuple[float, ...]
    wrong_elements: int = 0

    @property
    def repetitions(self) -> int:
        """Return the number of repetitions."""
        return len(self.seconds)

    @property
    def statistics(self) -> LatencyStatistics:
        """Return mean, median, 99th percentile and extremes over the repetitions."""
        return summarize(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Return the bytes per second at the median time."""
        return algorithm_bandwidth(self.size_bytes, self.statistics.p50_s)

    @property
    def bus_bandwidth(self) -> float:
        """Return the algorithm bandwidth times :func:`bus_factor`."""
        return bus_bandwidth(
            self.collective, self.size_bytes, self.statistics.p50_s, self.world_size
        )

    def __str__(self) -> str:
        micros = 1e6 * self.statistics.p50_s
        return (
            f"{self.collective} of {self.elements} {self.dtype}: median {micros:.1f} µs of "
            f"{self.repetitions}"
        )

    def row(self) -> dict[str, str | int | float]:
        """Return the measurement as one flat row.

        Times are in seconds, bandwidths in bytes per second.
        """
        # The order is that of the columns in the CSV file.
        statistics = self.statistics
        return {
            "collective": self.collective,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "elements": self.elements,
            "size_bytes": self.size_bytes,
            "repetitions": self.repetitions,
            "operations": self.operations,
            "mean_s": statistics.mean_s,
            "p50_s": statistics.p50_s,
            "p99_s": statistics.p99_s,
            "min_s": statistics.min_s,
            "max_s": statistics.max_s,
            "algorithm_bandwidth_bytes_per_s": self.algorithm_bandwidth,
            "bus_bandwidth_bytes_per_s": self.bus_bandwidth,
            "wrong_elements": self.wrong_elements,
        }
