"""Linear models for dense and sparse samples.

Example:
    >>> import torch
    >>> LinearRegression(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 1])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["LinearRegression", "LogisticRegression", "Standardization"]


class LogisticRegression(nn.Module):
    r"""Logistic regression: :math:`p(y = 1 \mid x) = \sigma(w^\top x + b)`.

    The argument of :math:`\sigma` is the logit. The model returns probabilities, so its loss is a
    binary cross-entropy on probabilities
    (:class:`~mlbench_core.evaluation.pytorch.criterion.BCELossRegularized`). In float32 a
    probability is exactly 1 from a logit of about 17 on, and the cross-entropy loses its gradient
    there. If training can reach such logits, let the model and the loss use logits:
    ``LogisticRegression(n, logits=True)`` with ``BCELossRegularized(..., logits=True)``. The
    parameters are the same.

    Args:
        n_features: Number of features of a sample, at least 1.
        logits: If True, :meth:`forward` returns logits instead of probabilities.

    Raises:
        ValueError: ``n_features`` is below 1.

    Example:
        >>> import torch
        >>> probability = LogisticRegression(4)(torch.zeros(2, 4))
        >>> probability.shape
        torch.Size([2, 1])

        Sparse samples give the same probabilities:

        >>> x = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
        >>> model = LogisticRegression(3)
        >>> torch.allclose(model(x.to_sparse()), model(x))
        True
    """

    def __init__(self, n_features: int, *, logits: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(check_int("n_features", n_features), 1)
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the probability of class 1, or its logit.

        Args:
            x: Samples, shape (batch, n_features), dense or sparse (COO or CSR).

        Returns:
            Probabilities, or logits with ``logits=True``; shape (batch, 1).

        Raises:
            ValueError: Sparse samples have another layout or shape.
        """
        z = _affine(self.linear, x)
        if self.logits:
            return z
        return torch.sigmoid(z)


class LinearRegression(nn.Module):
    r"""Linear regression: :math:`y = w^\top x + b`.

    Args:
        n_features: Number of features of a sample, at least 1.

    Raises:
        ValueError: ``n_features`` is below 1.
    """

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(check_int("n_features", n_features), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions.

        Args:
            x: Samples, shape (batch, n_features), dense or sparse (COO or CSR).

        Returns:
            Predictions, shape (batch, 1).

        Raises:
            ValueError: Sparse samples have another layout or shape.
        """
        return _affine(self.linear, x)


class Standardization(nn.Module):
    r"""A layer that gives features mean 0 and standard deviation 1.

    .. math:: x'_j = (x_j - \mu_j) / \sigma_j

    Put it before a linear model whose features have different units, because gradient descent uses
    one learning rate for all of them. Mean and deviation are those of a training set. They are
    buffers, so they are saved with the model but get neither a gradient nor a penalty. A feature
    that is the same in the whole training set (:math:`\sigma_j = 0`) becomes 0 in every sample.

    Args:
        mean: :math:`\mu`, shape (n_features,).
        deviation: :math:`\sigma` at least 0, shape (n_features,).

    Raises:
        ValueError: The shapes differ, or a deviation is negative.

    Example:
        >>> import torch
        >>> samples = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
        >>> scaling = Standardization.of([(samples, None)])
        >>> scaling(samples)
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        if mean.dim() != 1 or mean.shape != deviation.shape:
            raise ValueError(
                f"mean and deviation must both have shape (n_features,), not {tuple(mean.shape)} "
                f"and {tuple(deviation.shape)}"
            )
        if bool((deviation < 0).any()):
            raise ValueError(f"deviation must be at least 0, not {deviation.min().item():g}")
        self.register_buffer("mean", mean)
        # A scale of 0 makes constant features 0.
        self.register_buffer("scale", torch.where(deviation > 0, 1 / deviation, 0))

    @classmethod
    def of(
        cls, batches: Iterable[tuple[Tensor, Any]], dtype: torch.dtype = torch.float32
    ) -> Standardization:
        r"""Compute the statistics of a training set that is divided over all workers.

        Every worker must call it. It takes two passes in float64: first
        :math:`\mu = \frac{1}{n} \sum_i x_i`, then
        :math:`\sigma^2 = \frac{1}{n} \sum_i (x_i - \mu)^2`. One pass, with the mean of the squares,
        would lose digits. The result is the same on every worker.

        Args:
            batches: This worker's pairs (samples, anything), samples dense of shape (batch,
                n_features). They are read twice and must be the same samples both times, in any
                order.
            dtype: Dtype of the result.

        Returns:
            The layer, with the mean and the standard deviation of the whole training set.

        Raises:
            ValueError: This worker has no batch.
        """
        # Generators, so that only one batch at a time has a copy in float64.
        mean = _mean_over_workers(x.to(torch.float64) for x, *_ in batches)
        variance = _mean_over_workers((x.to(torch.float64) - mean).square() for x, *_ in batches)
        deviation = variance.sqrt()
        # The mean of a constant feature is rounded, so its deviation is that rounding error instead
        # of 0.
        is_constant = deviation <= torch.finfo(dtype).eps * mean.abs()
        return cls(mean.to(dtype), deviation.masked_fill(is_constant, 0).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Standardize samples.

        Args:
            x: Samples, shape (batch, n_features), dense, because zeros of sparse samples would not
                stay zeros.

        Returns:
            Samples of the same shape.

        Raises:
            ValueError: The samples are sparse.
        """
        if x.layout != torch.strided:
            raise ValueError(
                f"samples must be dense, not {x.layout}: standardized zeros are no longer zeros"
            )
        return (x - self.mean) * self.scale


def _affine(linear: nn.Linear, x: Tensor) -> Tensor:
    r"""Compute :math:`X w + b`, shape (batch, 1), for samples in the rows of :math:`X`.

    :math:`X` is dense or sparse. A sparse row is a bag of columns: the product gathers the weights
    :math:`w_j` of its entries and sums :math:`x_{ij} w_j`. Time and memory therefore grow with the
    entries, not with the number of features. The gradient of the weights is dense, so that an
    all-reduce can average it.
    """
    if x.layout == torch.strided:
        return linear(x)
    if x.dim() != 2 or x.shape[1] != linear.in_features:
        raise ValueError(
            f"sparse samples must have shape (batch, {linear.in_features}), not {tuple(x.shape)}"
        )
    starts, columns, values = _rows(x)
    products = F.embedding_bag(
        columns,
        # The weight of a column is its embedding, which has a width of 1.
        linear.weight.reshape(-1, 1),
        starts,
        mode="sum",
        # embedding_bag takes values of the dtype of the embeddings only.
        per_sample_weights=values.to(linear.weight.dtype),
        include_last_offset=True,
    )
    return products + linear.bias


def _rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start of each row's entries and the end of the last, the columns, the values."""
    if x.layout == torch.sparse_csr:
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout != torch.sparse_coo:
        raise ValueError(
            f"samples must be strided (dense), sparse_coo or sparse_csr, not {x.layout}"
        )
    # Coalescing sorts the entries by row, and adds entries of the same place.
    x = x.coalesce()
    rows, columns = x.indices()
    # The entries of a row begin after those of all rows before it.
    counts = torch.bincount(rows, minlength=x.shape[0])
    return F.pad(counts.cumsum(0), (1, 0)), columns, x.values()


def _mean_over_workers(parts: Iterable[Tensor]) -> Tensor:
    """Return the mean of all rows of all workers' matrices, in float64."""
    total: Tensor | None = None
    count = 0
    for part in parts:
        part_sum = part.sum(0)
        if total is None:
            total = part_sum
        else:
            total = total + part_sum
        count += len(part)
    if total is None:
        raise ValueError("batches must have at least one batch, not none")
    return process_groups.global_average(total, count).to(total.device)
