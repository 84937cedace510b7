"""Linear models.

Example:
    >>> import torch
    >>> LinearRegression(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 1])
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

__all__ = ["LinearRegression", "LogisticRegression"]


class LogisticRegression(nn.Module):
    r"""Logistic regression: :math:`p(y = 1 \mid x) = \sigma(w^\top x + b)`.

    Returns probabilities, so it goes with a binary cross-entropy on probabilities
    (:class:`~mlbench_core.evaluation.pytorch.criterion.BCELossRegularized`).

    Args:
        n_features: Number of features of a sample, at least 1.

    Raises:
        ValueError: ``n_features`` is below 1.

    Example:
        >>> import torch
        >>> probability = LogisticRegression(4)(torch.zeros(2, 4))
        >>> probability.shape
        torch.Size([2, 1])
    """

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.linear = _linear(n_features)

    def forward(self, x: Tensor) -> Tensor:
        """Probability of the class 1.

        Args:
            x: Samples, shape (batch, n_features).

        Returns:
            Probabilities, shape (batch, 1).
        """
        return torch.sigmoid(self.linear(x))


class LinearRegression(nn.Module):
    r"""Linear regression: :math:`y = w^\top x + b`.

    Args:
        n_features: Number of features of a sample, at least 1.

    Raises:
        ValueError: ``n_features`` is below 1.
    """

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.linear = _linear(n_features)

    def forward(self, x: Tensor) -> Tensor:
        """The prediction.

        Args:
            x: Samples, shape (batch, n_features).

        Returns:
            Predictions, shape (batch, 1).
        """
        return self.linear(x)


def _linear(n_features: int) -> nn.Linear:
    """A layer with one output, after a look at the number of inputs."""
    count = operator.index(n_features)
    if count < 1:
        raise ValueError(f"n_features is {n_features}; a linear model needs at least 1 feature")
    return nn.Linear(count, 1)
