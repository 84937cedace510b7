"""Initial weights of the convolutional networks."""

from __future__ import annotations

from torch import nn

__all__ = ["initialize"]


def initialize(model: nn.Module) -> None:
    """Draw the weights of a new network (He et al. 2015, arXiv:1502.01852).

    Convolutions: normal, variance 2/(fan out), which keeps the size of the gradients through ReLU layers. Linear
    layers: normal, variance 1/(fan in). Biases and batch norm shifts 0, batch norm scales 1. Draws from torch's global
    generator, as torch's own layers do, and never seeds it.

    Args:
        model: The network, just built; its parameters are changed in place.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="linear")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
