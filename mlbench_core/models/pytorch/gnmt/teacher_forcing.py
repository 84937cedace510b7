"""A wrapper of GNMT that takes a whole batch as its only argument, as training rounds require."""

from __future__ import annotations

from torch import Tensor, nn

from mlbench_core.models.pytorch.gnmt.models import GNMT

__all__ = ["TeacherForcedGNMT"]


class TeacherForcedGNMT(nn.Module):
    """GNMT with teacher forcing: it scores each next word after the correct previous words.

    A training round reads the batch size from the first dimension of the scores. They are therefore
    sentences-first.

    Args:
        model: The model, which is not copied.

    Example:
        >>> import torch
        >>> teacher = TeacherForcedGNMT(GNMT(vocab_size=11, hidden_size=4, num_layers=2))
        >>> source, lengths = torch.tensor([[2, 2], [5, 7], [3, 3]]), torch.tensor([3, 3])
        >>> teacher((source, lengths, torch.tensor([[2, 2]]))).shape
        torch.Size([2, 1, 11])
    """

    def __init__(self, model: GNMT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the scores before the softmax, sentences first.

        Args:
            batch: Arguments of :meth:`GNMT.forward`: sources of shape (source, batch), their
                lengths of shape (batch,), and targets without their last symbols, of shape (target,
                batch).

        Returns:
            Shape (batch, target, ``vocab_size``), as a view of time-first scores.
        """
        scores: Tensor = self.model(*batch)
        # A view, because a copy of scores over a whole vocabulary would cost much memory.
        return scores.transpose(0, 1)
