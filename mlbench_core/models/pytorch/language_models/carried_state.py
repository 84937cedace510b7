"""A language model that carries its state from batch to batch of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["CarriedState", "detached"]


class CarriedState(nn.Module):
    """A wrapper that starts each batch of a recurrent language model from its last state.

    The last state is that at the end of the batch before. Use it with functions that call a model
    with the data only, such as
    :func:`~mlbench_core.controlflow.pytorch.controlflow.validation_round`. Create a new one for
    each pass over a text, so that it starts from the state before the first word.

    Args:
        model: A model such as
            :class:`~mlbench_core.models.pytorch.language_models.lstm.LSTMLanguageModel`.

    Example:
        >>> import torch
        >>> from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
        >>> reader = CarriedState(LSTMLanguageModel(7, 3, 4, 1)).eval()
        >>> words = torch.zeros(2, 1, dtype=torch.int64)
        >>> first, second = reader(words), reader(words)
        >>> first.shape, torch.equal(first, second)
        (torch.Size([2, 7]), False)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.hidden: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of the next word after each word.

        Args:
            words: Integer ids of shape (time, batch), with the same number of sequences in each
                call.

        Returns:
            Scores in float32, of shape (time * batch, vocabulary), one row for each word.
        """
        # Any, because the language model may be a wrapper that forwards init_hidden, such as a
        # compiled module.
        model: Any = self.model
        hidden = self.hidden
        if hidden is None:
            hidden = model.init_hidden(words.shape[1])
        scores, hidden = model(words, hidden)
        # Without detached(), the graph of the whole text would stay in memory.
        self.hidden = detached(hidden)
        return scores.float()


def detached(hidden: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the same state, detached so that back-propagation stops there.

    Args:
        hidden: Pairs (h, c), one for each layer.

    Returns:
        Pairs of the same values.
    """
    return [(h.detach(), c.detach()) for h, c in hidden]
