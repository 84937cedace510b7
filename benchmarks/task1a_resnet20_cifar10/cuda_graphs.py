"""Training steps as CUDA graphs, for ``--cuda-graphs``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GraphedNetwork(nn.Module):
    """A network whose forward and backward pass in training are one CUDA graph each.

    ResNet-20 has about 250 kernels in a step, most of them shorter than the time that the host
    needs to start one. A graph is started by one call. The first batch is captured. Batches of
    another shape, such as the last one of an epoch, and evaluation run without graphs.

    Args:
        network: The network, on a GPU. Nothing in it may wait for a result or send a message.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._shape: torch.Size | None = None
        self._replay: Callable[[Tensor], Tensor] = network.forward

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's outputs for a batch."""
        if self.training and self._shape is None:
            self._shape, self._replay = images.shape, capture(self.network, images)
        if self.training and images.shape == self._shape:
            return self._replay(images)
        outputs: Tensor = self.network(images)
        return outputs


def capture(network: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that replays graphs of the network's passes, for images of this shape.

    The network itself is not changed.
    """

    class Captured(nn.Module):
        """Capturing replaces the ``forward`` of the captured module: this one's."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, images: Tensor) -> Tensor:
            outputs: Tensor = self.network(images)
            return outputs

    # Capturing runs the network several times, which must not change the running statistics of
    # batch norm.
    kept = {name: buffer.clone() for name, buffer in network.named_buffers()}
    # autocast keeps converted weights for a whole step; in a graph, they would be those of the
    # captured step.
    with torch.autocast(
        "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), False
    ):
        replay: Callable[[Tensor], Tensor] = torch.cuda.make_graphed_callables(
            Captured(), (torch.zeros_like(images),)
        )
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            buffer.copy_(kept[name])
    return replay
