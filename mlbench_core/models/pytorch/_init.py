"""Initial weights of the convolutional networks."""

from __future__ import annotations

from torch import nn

__all__ = ["initialize"]


def initialize(model: nn.Module) -> None:
    """Draw the weights of a new network (He et al. 2015, arXiv:1502.01852).

    Weights of convolutions are normal with variance 2/(fan out), which keeps the size of the
    gradients through ReLU layers. Weights of linear layers are normal with variance 1/(fan in).
    Biases and batch norm shifts are 0, batch norm scales 1. The numbers come from torch's global
    generator, as for torch's own layers. This function never seeds it.

    Args:
        model: The newly built network; its parameters are changed in place.
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
