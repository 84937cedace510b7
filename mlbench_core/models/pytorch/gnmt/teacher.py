"""GNMT as training rounds call a model: with a batch as one argument."""

from __future__ import annotations

from torch import Tensor, nn

from mlbench_core.models.pytorch.gnmt.models import GNMT

__all__ = ["TeacherForcedGNMT"]


class TeacherForcedGNMT(nn.Module):
    """Scores of the next words where the words before are the right ones; a round takes its batches' size from them.

    Args:
        model: The model, of which this has no copy.

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
        """Scores before the softmax, sentences first.

        Args:
            batch: Arguments of :meth:`GNMT.forward`: sources of shape (source, batch), their lengths of shape (batch,),
                and targets without their last symbols, of shape (target, batch).

        Returns:
            Shape (batch, target, ``vocab_size``); a view of scores that lie time first.
        """
        scores: Tensor = self.model(*batch)
        return scores.transpose(0, 1)
