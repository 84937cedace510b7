"""Compute a network in another precision than that of its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Float32Output"]


class Float32Output(nn.Module):
    """A network with outputs in float32 for the loss, independent of the type in which it computes.

    Args:
        network: The network.
        autocast: The dtype for :func:`torch.autocast`; None for none.

    Example:
        >>> network = Float32Output(nn.Linear(2, 1), autocast=torch.bfloat16)
        >>> network(torch.ones(4, 2)).dtype
        torch.float32
    """

    def __init__(self, network: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self.autocast = autocast

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of the network for a batch.

        Args:
            images: The batch, as the network takes it.

        Returns:
            The outputs as float32.
        """
        if self.autocast is None:
            return self.network(images).float()
        with torch.autocast(images.device.type, dtype=self.autocast):
            return self.network(images).float()
