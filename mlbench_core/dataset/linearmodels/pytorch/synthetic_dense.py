"""Generate dense data from a known logistic model, and minimize its training loss.

The data has the same bytes on every machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlbench_core.arguments import check_at_least, check_positive
from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter

__all__ = [
    "DEFAULT_FEATURES",
    "DEFAULT_ROWS",
    "LogisticOptimum",
    "logistic_optimum",
    "synthetic_rows",
    "synthetic_weights",
    "write_synthetic_dense",
]

DEFAULT_FEATURES = 2_000  # as epsilon has
DEFAULT_ROWS: Mapping[str, int] = {"train": 40_000, "test": 10_000}
# Each chunk has its own random stream, so this number is part of the definition of the data.
CHUNK_ROWS = 1_024
LOGIT_SCALE = 6.0  # standard deviation of the logits
# The purpose of a stream of random bits is part of its seed.
_WEIGHTS, _STREAMS = 0, {"train": 1, "test": 2}
_LABELS = 1_000
_NEWTON_STEPS = 100  # far more than are needed for the precision of float64
_ROWS_AT_ONCE = 4_096  # keeps the float64 copy of the features small


def _bits(count: int, *purpose: int) -> NDArray[np.uint64]:
    """Return random bits."""
    # numpy guarantees that the raw stream of PCG64 never changes, unlike its distributions.
    return np.random.PCG64(np.random.SeedSequence(purpose)).random_raw(count)


def _whole_numbers(count: int, *purpose: int) -> NDArray[np.int16]:
    """Return uniform 16-bit integers, four from each 64 random bits."""
    # Little-endian on every machine, because the bytes define the data.
    return _bits(-(-count // 4), *purpose).astype("<u8").view("<i2")[:count]


def _feature_exponent(n_features: int) -> int:
    """Return e: features are integers times 2^e."""
    # Rows then have a norm near 1, and a power of two keeps products exact.
    return -15 - round(0.5 * math.log2(n_features / 3))


def synthetic_weights(n_features: int, seed: int = 0) -> NDArray[np.float64]:
    """Return the weights of the model that generates the labels.

    Args:
        n_features: Number of features, at least 1.
        seed: Seed of the data, at least 0.

    Returns:
        Weights, shape (n_features,).
    """
    return _whole_numbers(n_features, seed, _WEIGHTS).astype(np.float64) * _weight_scale(n_features)


def _weight_scale(n_features: int) -> float:
    """Return the factor of the weights that gives logits the standard deviation LOGIT_SCALE."""
    deviation = math.sqrt(n_features) * 2.0**30 / 3 * 2.0 ** _feature_exponent(n_features)
    return LOGIT_SCALE / deviation


def synthetic_rows(
    chunk: int, n_features: int, seed: int = 0, data_type: str = "train"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    r"""Return rows ``chunk * 1024`` to ``(chunk + 1) * 1024 - 1`` of the data.

    Features are independent and uniform: 16-bit integers times a power of two, so that a row's norm
    is near 1. Labels are drawn from the logistic model :math:`P(y = 1 \mid x) = \sigma(w^\top x)`
    with :func:`synthetic_weights`.

    The random bits are numpy's PCG64 stream, which never changes. All sums are sums of integers
    below 2^53, so they are exact in any order of addition. Only the exponential of the last step
    may differ in its last digit between machines. This changes a label with a probability of about
    2^-52.

    Args:
        chunk: Number of the chunk of rows, from 0.
        n_features: Number of features, at least 1 and at most 2^22.
        seed: Seed of the data, at least 0.
        data_type: ``"train"`` or ``"test"``: different rows of the same model.

    Returns:
        Features, shape (1024, n_features), and labels 0 and 1, shape (1024,).

    Raises:
        ValueError: An argument is outside the values listed above.
    """
    # With more features, sums of products of 16-bit integers could pass 2^53 and round.
    if not 1 <= n_features <= 1 << 22:
        raise ValueError(f"n_features must be from 1 to {1 << 22}, not {n_features}")
    check_at_least("chunk", chunk, 0)
    check_at_least("seed", seed, 0)
    if data_type not in _STREAMS:
        raise ValueError(f"data_type must be 'train' or 'test', not {data_type!r}")
    stream = _STREAMS[data_type]
    whole = _whole_numbers(CHUNK_ROWS * n_features, seed, stream, chunk)
    whole = whole.reshape(CHUNK_ROWS, n_features)
    weights = _whole_numbers(n_features, seed, _WEIGHTS).astype(np.float64)
    factor = 2.0 ** _feature_exponent(n_features)
    logits = (whole.astype(np.float64) @ weights) * factor * _weight_scale(n_features)
    # 53 random bits fit the mantissa of a float64, so the conversion is exact.
    bits = _bits(CHUNK_ROWS, seed, stream, chunk, _LABELS) >> np.uint64(11)
    uniform = bits.astype(np.float64) * 2.0**-53
    labels = uniform < 1 / (1 + np.exp(-logits))
    return (whole * np.float32(factor)).astype(np.float32), labels.astype(np.float32)


@dataclass(frozen=True)
class LogisticOptimum:
    r"""The minimum of the regularized logistic loss, with a bound on its error.

    Attributes:
        l2: The penalty :math:`\lambda`.
        loss: The loss at ``weights``, penalty included.
        gap: Upper bound on the difference between ``loss`` and the true minimum. The loss is
            :math:`\lambda`-strongly convex, so :math:`f(w) - \min f \le \lVert \nabla f(w) \rVert^2
            / (2 \lambda)`. The bound does not include rounding, which is about 1e-15 of the loss.
        accuracy: Fraction of the rows that are classified correctly at ``weights``.
        weights: The weights and, last, the bias; float64, shape (n_features + 1,).
    """

    l2: float
    loss: float
    gap: float
    accuracy: float
    weights: NDArray[np.float64]

    def summary(self) -> dict[str, float]:
        """Return all fields except the weights."""
        summary = asdict(self)
        del summary["weights"]
        return summary


def logistic_optimum(features: NDArray[Any], labels: NDArray[Any], l2: float) -> LogisticOptimum:
    r"""Minimize the loss of L2-regularized logistic regression to the precision of float64.

    .. math::
        f(w) = \frac{1}{n} \sum_i \bigl[ \log (1 + e^{z_i}) - y_i z_i \bigr]
        + \frac{\lambda}{2} \lVert w \rVert^2, \quad z_i = w^\top (x_i, 1)

    This is :class:`~mlbench_core.evaluation.pytorch.criterion.BCELossRegularized` over all rows;
    the bias is penalized too. The function uses Newton's method. Conjugate gradients compute each
    step, which is halved until the loss falls.

    Args:
        features: Rows, shape (n, n_features); converted to float64 in chunks.
        labels: 0 and 1, shape (n,) or (n, 1).
        l2: The penalty, above 0.

    Returns:
        The minimum.

    Raises:
        ValueError: ``l2`` is not above 0, or the shapes do not fit.

    Example:
        >>> x = np.array([[1.0], [-1.0]])
        >>> optimum = logistic_optimum(x, np.array([1.0, 0.0]), l2=1.0)
        >>> round(float(optimum.weights[0]), 6)  # w = sigma(-w)
        0.401058
    """
    # Without a penalty, separable data has no minimum: the loss falls as the weights grow.
    check_positive("l2", l2)
    n = len(features)
    if features.ndim != 2 or labels.shape not in ((n,), (n, 1)) or not n:
        raise ValueError(
            f"features and labels must have shapes (n, d) and (n,), not {features.shape} and "
            f"{labels.shape}"
        )
    loss = _Loss(features, labels.reshape(-1).astype(np.float64), l2)
    weights = np.zeros(features.shape[1] + 1)
    value, gradient, curvature = loss.at(weights)
    for _ in range(_NEWTON_STEPS):
        step = loss.newton_step(gradient, curvature)
        # Far from the minimum a full Newton step may raise the loss.
        for halving in range(30):
            candidate = weights + 0.5**halving * step
            new_value, new_gradient, new_curvature = loss.at(candidate)
            # Near the minimum, rounding hides progress of the loss, but not of the gradient.
            if new_value < value or np.linalg.norm(new_gradient) < 0.5 * np.linalg.norm(gradient):
                break
        else:
            # No step makes progress: this is the precision of float64.
            break
        weights, value, gradient, curvature = candidate, new_value, new_gradient, new_curvature
        if np.linalg.norm(gradient) < 1e-14:
            break
    # The docstring of LogisticOptimum derives this bound.
    gap = float(gradient @ gradient) / (2 * l2)
    accuracy = float(np.mean((loss.logits(weights) > 0) == (loss.labels > 0.5)))
    return LogisticOptimum(float(l2), float(value), gap, accuracy, weights)


class _Loss:
    """The loss, its gradient and its curvature, computed over some rows at a time."""

    def __init__(self, features: NDArray[Any], labels: NDArray[np.float64], l2: float) -> None:
        self.features, self.labels, self.l2 = features, labels, l2
        starts = range(0, len(features), _ROWS_AT_ONCE)
        self.slices = [slice(start, start + _ROWS_AT_ONCE) for start in starts]

    def logits(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return z = X w + b."""
        parts = [self.features[rows].astype(np.float64) @ weights[:-1] for rows in self.slices]
        return np.concatenate(parts) + weights[-1]

    def _transposed(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the product of (X, 1) transposed with a vector."""
        product: Any = 0
        for rows in self.slices:
            product = product + vector[rows] @ self.features[rows].astype(np.float64)
        return np.append(product, vector.sum())

    def at(
        self, weights: NDArray[np.float64]
    ) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """Return loss, gradient, and the second derivative of each row's loss by its logit."""
        z = self.logits(weights)
        penalty = self.l2 / 2 * (weights @ weights)
        loss = float(np.mean(np.logaddexp(0, z) - self.labels * z) + penalty)
        # This is the sigmoid. The hyperbolic tangent does not overflow for logits of any size,
        # unlike the exponential.
        p = 0.5 * (1 + np.tanh(z / 2))
        gradient = self._transposed(p - self.labels) / len(z) + self.l2 * weights
        return loss, gradient, p * (1 - p) / len(z)

    def newton_step(
        self, gradient: NDArray[np.float64], curvature: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Solve H d = -g by conjugate gradients; the tolerance shrinks with the gradient."""
        norm = float(np.linalg.norm(gradient))
        # Exact solutions far from the minimum waste work; this tolerance still gives superlinear
        # convergence.
        tolerance = norm * min(0.1, math.sqrt(norm))
        step, residual = np.zeros_like(gradient), -gradient
        direction, square = residual.copy(), float(residual @ residual)
        for _ in range(10 * len(gradient)):
            if math.sqrt(square) <= tolerance:
                break
            product = self._transposed(curvature * self.logits(direction)) + self.l2 * direction
            length = square / float(direction @ product)
            step += length * direction
            residual -= length * product
            square, previous = float(residual @ residual), square
            direction = residual + square / previous * direction
        return step


def write_synthetic_dense(
    path: str | os.PathLike[str],
    n_features: int = DEFAULT_FEATURES,
    n_rows: int = DEFAULT_ROWS["train"],
    seed: int = 0,
    *,
    data_type: str = "train",
    l2: float | None = None,
    rows_per_block: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Path:
    """Write :func:`synthetic_rows` as a store.

    The header of the store describes the data under ``extra["synthetic_dense"]``. With ``l2``,
    ``extra["optimum"]`` holds the minimum of the training loss, see :class:`LogisticOptimum`.

    Args:
        path: The store.
        n_features: Number of features.
        n_rows: Number of rows, at least 1.
        seed: Seed of the data.
        data_type: ``"train"`` or ``"test"``.
        l2: Penalty of the optimum to compute, which needs all rows in memory; None computes no
            optimum.
        rows_per_block: Rows of a block; if None, a number that makes blocks of about half a
            megabyte.
        advance: Function that is called with the number of rows in each written chunk.

    Returns:
        ``path``.

    Raises:
        ValueError: An argument is outside the values listed above.
        DatasetError: The disk is full.
    """
    check_at_least("n_rows", n_rows, 1)
    extra: dict[str, Any] = {
        "synthetic_dense": {"seed": seed, "data_type": data_type, "logit_scale": LOGIT_SCALE}
    }
    all_features: list[NDArray[np.float32]] = []
    all_labels: list[NDArray[np.float32]] = []
    with StoreWriter(path, n_features, rows_per_block=rows_per_block) as writer:
        for chunk in range(-(-n_rows // CHUNK_ROWS)):
            count = min(CHUNK_ROWS, n_rows - chunk * CHUNK_ROWS)
            features, labels = synthetic_rows(chunk, n_features, seed, data_type)
            features, labels = features[:count], labels[:count]
            writer.append(features, labels)
            if l2 is not None:
                all_features.append(features)
                all_labels.append(labels)
            if advance is not None:
                advance(count)
        if l2 is not None:
            features, labels = np.concatenate(all_features), np.concatenate(all_labels)
            optimum = logistic_optimum(features, labels, l2)
            extra["optimum"] = optimum.summary()
        writer.finish(label_map={"0": 0, "1": 1}, source=("synthetic_dense",), extra=extra)
    return Path(path)
