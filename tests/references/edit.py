"""EDiT's pseudo-gradient penalty (arXiv 2412.07210) for one tensor of k workers, in one process."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor


def edit(rounds: list[list[Tensor]], first_rounds: int, largest_norm: float) -> list[Tensor]:
    """Return the outer gradient of each round.

    Args:
        rounds: For every round, the change of each worker.
        first_rounds: Rounds without outliers, and number of deviations that are kept.
        largest_norm: Norm to which the result is clipped.
    """
    k = len(rounds[0])
    mean, square, zs = [0.0] * k, [0.0] * k, [[] for _ in range(k)]
    results = []
    for deltas in rounds:
        exponentials = []
        for i, delta in enumerate(deltas):
            n = float(delta.norm())
            z = (n - mean[i]) / math.sqrt(square[i]) if square[i] else 0.0
            last = zs[i][-first_rounds:]
            if len(last) == first_rounds and z > 3 * max(1, statistics.stdev(last)):
                exponentials.append(0.0)
                continue
            step = n - mean[i]
            mean[i] += 0.02 * step
            square[i] = 0.98 * (square[i] + 0.02 * step * (n - mean[i]))
            zs[i].append(z)
            exponentials.append(math.exp(-n))
        total = sum(exponentials) or 1.0
        average = sum(e / total * delta for e, delta in zip(exponentials, deltas, strict=True))
        results.append(average * torch.clamp(largest_norm / average.norm(), max=1))
    return results
