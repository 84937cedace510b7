"""Compute running statistics in memory that does not grow with the number of values."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["AverageMeter", "QuantileSketch"]


class AverageMeter:
    """The last value and the weighted mean of all values.

    Attributes:
        val: The latest value.
        sum: Sum of value times weight.
        count: Sum of the weights.
        avg: ``sum / count``, or 0 while ``count`` is 0.

    Example:
        >>> meter = AverageMeter()
        >>> meter.update(1.0, n=3)
        >>> meter.update(5.0)
        >>> meter.val, meter.avg, meter.count
        (5.0, 2.0, 4)
    """

    __slots__ = ("avg", "count", "sum", "val")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all values."""
        self.val: float = 0
        self.avg: float = 0
        self.sum: float = 0
        self.count: float = 0

    def update(self, val: float, n: float = 1) -> None:
        """Add a value.

        Args:
            val: The value, for example the mean loss of a batch of ``n`` samples.
            n: Its weight, at least 0. With a weight of 0, only ``val`` is set and the mean stays.

        Raises:
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(
                f"n must be at least 0, not {n}: pass the number of samples behind the value"
            )
        self.val = val
        # A mean over no samples may be nan, and nan times 0 would make the sum nan.
        if n == 0:
            return
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __repr__(self) -> str:
        return f"AverageMeter(val={self.val}, avg={self.avg}, count={self.count})"


class QuantileSketch:
    r"""Quantiles of a stream of durations, with an error of at most 1 % and in bounded memory.

    A value :math:`x` is counted in bin :math:`i = \lceil \log_\gamma x \rceil` with :math:`\gamma =
    (1 + \alpha) / (1 - \alpha)`. So every value in a bin differs from :math:`2 \gamma^i / (\gamma +
    1)` by at most the fraction :math:`\alpha` = 1 % of the value. The sketch counts all values and
    uses no random generator. Values below 1e-9 count as 0 and values above 1e9 as 1e9, so there are
    at most about 2,100 bins.

    References:
        Masson, Rim, Lee: DDSketch: a fast and fully-mergeable quantile sketch with relative-error
        guarantees. arXiv:1908.10693.

    Example:
        >>> sketch = QuantileSketch()
        >>> for x in range(1, 101):
        ...     sketch.add(float(x))
        >>> abs(sketch.quantile(0.5) - 50) <= 0.5
        True
    """

    __slots__ = ("_bins", "_zeros", "count")

    ALPHA = 0.01
    SMALLEST = 1e-9
    LARGEST = 1e9
    _GAMMA = (1 + ALPHA) / (1 - ALPHA)
    _PER_LOG = 1 / math.log(_GAMMA)

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._zeros = 0
        self.count = 0

    def add(self, value: float) -> None:
        """Count a value.

        Args:
            value: The value, for example in seconds; below 1e-9 it counts as 0.
        """
        # 1e-9 and 1e9 are SMALLEST and LARGEST. This runs in every batch, and literals save two
        # attribute look-ups.
        self.count += 1
        if value < 1e-9:
            self._zeros += 1
            return
        index = math.ceil(math.log(value if value < 1e9 else 1e9) * self._PER_LOG)
        bins = self._bins
        bins[index] = bins.get(index, 0) + 1

    def quantile(self, share: float) -> float | None:
        """Return the value below which ``share`` of the values lie.

        Args:
            share: Between 0 and 1, for example 0.99.

        Returns:
            The quantile with a relative error of at most 1 %, or None before any value.

        Raises:
            ValueError: ``share`` is outside [0, 1].
        """
        if not 0 <= share <= 1:
            raise ValueError(
                f"share must be from 0 to 1, not {share}: pass 0.99 for the 99th percentile"
            )
        if self.count == 0:
            return None
        # The rank of the quantile among the sorted values, from 0.
        rank = share * (self.count - 1)
        seen = self._zeros
        if seen > rank:
            return 0.0
        # The index of a bin grows with its values, so this counts the values from the smallest on.
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen > rank:
                break
        return float(2 * self._GAMMA**index / (self._GAMMA + 1))

    def state(self) -> list[list[int]]:
        """Return pairs of bin and count, in order; the first pair is ``[0, number of zeros]``."""
        return [[0, self._zeros], *map(list, sorted(self._bins.items()))]

    def load(self, state: Iterable[Iterable[int]]) -> None:
        """Restore the state that :meth:`state` returned."""
        (_, zeros), *bins = ((int(index), int(number)) for index, number in state)
        self._zeros = zeros
        self._bins = dict(bins)
        self.count = zeros + sum(self._bins.values())
