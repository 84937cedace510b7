r"""Scores that compare finished hypotheses of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least

__all__ = ["GNMTScore", "LengthPenaltyScore", "Score"]


class Score(Protocol):
    """A rule that turns the log-probability of a finished hypothesis into the score that ranks it.

    For a given log-probability of at most 0 and no coverage, the score must be monotone in the
    length (rising or falling). Coverage may only lower it. The search relies on both to bound the
    score of an unfinished hypothesis.
    """

    @property
    def uses_coverage(self) -> bool:
        """Return whether the search has to add up attention for this rule."""

    def __call__(self, log_prob: Tensor, length: Tensor, coverage: Tensor | None = None) -> Tensor:
        r"""Return the scores of hypotheses.

        Args:
            log_prob: :math:`\log P(Y \mid X)`, float32 of shape (...).
            length: :math:`|Y|`, tokens with the end symbol, of a shape that broadcasts to (...).
            coverage: Attention that each source position got, summed over all steps, float32 of
                shape (..., source). Positions of padding have exactly 0.

        Returns:
            Scores of shape (...), higher is better.
        """


@dataclass(frozen=True)
class LengthPenaltyScore:
    r"""The log-probability divided by a power of the length.

    .. math:: s(Y, X) = \frac{\log P(Y \mid X)}{|Y|^p}

    Args:
        power: :math:`p`. With 0 the score is the log-probability, which favors short sequences.
            With 1 it is the mean of the tokens' log-probabilities.

    Example:
        >>> LengthPenaltyScore(power=1.0)(torch.tensor([-6.0]), torch.tensor([3])).item()
        -2.0
    """

    power: float = 1.0
    uses_coverage = False

    def __call__(self, log_prob: Tensor, length: Tensor, coverage: Tensor | None = None) -> Tensor:
        """Return the scores of hypotheses as in :class:`Score`."""
        return log_prob / length.to(log_prob.dtype) ** self.power


@dataclass(frozen=True)
class GNMTScore:
    r"""The length normalization and coverage penalty of Google's translation system.

    .. math::
        s(Y, X) = \frac{\log P(Y \mid X)}{lp(Y)} + cp(X; Y), \qquad
        lp(Y) = \left(\frac{c + |Y|}{c + 1}\right)^\alpha, \qquad
        cp(X; Y) = \beta \sum_{i=1}^{|X|} \log \min\Big(\sum_{j=1}^{|Y|} p_{i,j}, 1\Big)

    Here :math:`p_{i,j}` is the attention of target word j on source word i.

    Args:
        len_norm_factor: :math:`\alpha`.
        len_norm_const: :math:`c`, above -1 (5 in the paper).
        cov_penalty_factor: :math:`\beta`, at least 0.

    Raises:
        ValueError: An argument is outside of these bounds.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144, equation 14.

    Example:
        >>> score = GNMTScore(len_norm_factor=1.0, len_norm_const=5.0, cov_penalty_factor=0.0)
        >>> score(torch.tensor([-6.0]), torch.tensor([7])).item()  # -6 / (12 / 6)
        -3.0
    """

    len_norm_factor: float = 0.6
    len_norm_const: float = 5.0
    cov_penalty_factor: float = 0.1

    def __post_init__(self) -> None:
        if not self.len_norm_const > -1:
            raise ValueError(f"len_norm_const must be above -1, not {self.len_norm_const}")
        check_at_least("cov_penalty_factor", self.cov_penalty_factor, 0)

    @property
    def uses_coverage(self) -> bool:
        """Return whether the coverage penalty is used."""
        return self.cov_penalty_factor > 0

    def __call__(self, log_prob: Tensor, length: Tensor, coverage: Tensor | None = None) -> Tensor:
        """Return the scores as in :class:`Score`; without coverage the penalty is 0."""
        c = self.len_norm_const
        lp = ((c + length.to(log_prob.dtype)) / (c + 1)) ** self.len_norm_factor
        if coverage is None or not self.uses_coverage:
            return log_prob / lp
        # log(0) at padding would be -inf. A position that got no attention at all counts as
        # padding.
        attended = torch.where(coverage > 0, coverage, 1.0).clamp(max=1.0)
        return log_prob / lp + self.cov_penalty_factor * attended.log().sum(dim=-1)
