"""The position of a token in its sentence, without counting padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least

__all__ = ["LearnedPositions", "SinusoidalPositions", "token_positions"]


def token_positions(tokens: Tensor, padding_idx: int) -> Tensor:
    """Return positions that count tokens but not padding.

    So padding on either side changes nothing.

    Args:
        tokens: int64 of shape (batch, positions).
        padding_idx: The token that is padding.

    Returns:
        1, 2, ... for the tokens of each sentence and 0 for padding, int64 of shape (batch,
        positions).

    Example:
        >>> token_positions(torch.tensor([[0, 0, 7, 5], [7, 5, 0, 0]]), padding_idx=0).tolist()
        [[0, 0, 1, 2], [1, 2, 0, 0]]
    """
    is_token = tokens != padding_idx
    return is_token.cumsum(dim=1) * is_token


class _Positions(nn.Module):
    """Vectors for positions 1 to ``max_positions``, and position 0 for padding."""

    def __init__(self, max_positions: int, padding_idx: int) -> None:
        super().__init__()
        check_at_least("max_positions", max_positions, 1)
        self.max_positions = max_positions
        self.padding_idx = padding_idx

    def numbers(self, tokens: Tensor, before: int) -> Tensor:
        """Return the positions of tokens that come after ``before`` tokens of each sentence."""
        if tokens.shape[1] + before > self.max_positions:
            raise ValueError(
                f"sentences must have at most {self.max_positions} tokens, not "
                f"{tokens.shape[1] + before}: raise max_source_positions or max_target_positions"
            )
        positions = token_positions(tokens, self.padding_idx)
        if before:
            # Padding keeps the position 0.
            positions = positions + before * (positions > 0)
        return positions


class SinusoidalPositions(_Positions):
    r"""Fixed position vectors.

    .. math::
        PE_{pos, 2i} = \sin\left(pos / 10000^{2i/d}\right), \qquad
        PE_{pos, 2i+1} = \cos\left(pos / 10000^{2i/d}\right)

    for position pos = 0, 1, ... of a sentence's tokens. The vector of padding is zero.

    Args:
        embed_dim: d, even.
        max_positions: Length of the longest sentence, in tokens.
        padding_idx: The token that is padding.

    Raises:
        ValueError: ``embed_dim`` is odd.

    References:
        Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """

    table: Tensor

    def __init__(self, embed_dim: int, max_positions: int, padding_idx: int) -> None:
        super().__init__(max_positions, padding_idx)
        if embed_dim < 2 or embed_dim % 2:
            raise ValueError(
                f"embed_dim must be even and at least 2, not {embed_dim}: sine and cosine alternate"
            )
        # Compute in float64, because float32 loses digits of large angles.
        even = torch.arange(0, embed_dim, 2, dtype=torch.float64)
        rates = torch.exp(-math.log(10000.0) * even / embed_dim)
        angles = torch.arange(max_positions, dtype=torch.float64).unsqueeze(1) * rates
        vectors = torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)
        # Row 0 is the vector of padding.
        table = torch.cat((torch.zeros(1, embed_dim, dtype=torch.float64), vectors))
        # The table follows from the arguments, so a state dict does not need it.
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, before: int = 0) -> Tensor:
        """Return the position vectors of tokens.

        Args:
            tokens: int64 of shape (batch, positions).
            before: Number of tokens of each sentence that came in earlier calls.

        Returns:
            Shape (batch, positions, embed_dim).

        Raises:
            ValueError: The sentences are too long.
        """
        return self.table[self.numbers(tokens, before)]


class LearnedPositions(_Positions):
    """Trained position vectors, one for each position of a sentence's tokens; zeros for padding.

    Args:
        embed_dim: Width of the vectors.
        max_positions: Length of the longest sentence, in tokens.
        padding_idx: The token that is padding.
    """

    def __init__(self, embed_dim: int, max_positions: int, padding_idx: int) -> None:
        super().__init__(max_positions, padding_idx)
        self.vectors = nn.Embedding(max_positions + 1, embed_dim, padding_idx=0)
        nn.init.normal_(self.vectors.weight, std=embed_dim**-0.5)
        with torch.no_grad():
            self.vectors.weight[0].zero_()

    def forward(self, tokens: Tensor, before: int = 0) -> Tensor:
        """Return position vectors; for arguments and errors see :class:`SinusoidalPositions`."""
        return self.vectors(self.numbers(tokens, before))
