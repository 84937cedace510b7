"""VGG for 32x32 images."""

from __future__ import annotations

from torch import Tensor, nn

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch._init import initialize

__all__ = ["VGG"]

# Table 1 of the paper, columns A, B, D and E: the width of each 3x3 convolution; "M" halves height
# and width.
_LAYERS: dict[str, tuple[int | str, ...]] = {
    "VGG11": (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "VGG13": (64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "VGG16": (64, 64, "M", 128, 128, "M", *(256,) * 3, "M", *(512,) * 3, "M", *(512,) * 3, "M"),
    "VGG19": (64, 64, "M", 128, 128, "M", *(256,) * 4, "M", *(512,) * 4, "M", *(512,) * 4, "M"),
}


class VGG(nn.Module):
    """VGG with batch normalization for 32x32 images.

    The convolutions are those of the paper, each followed by batch normalization (Ioffe and Szegedy
    2015) and ReLU. Five poolings reduce a 32x32 image to one position of 512 channels. Therefore
    one linear layer replaces the paper's three, which are designed for 224x224 images.

    Args:
        vgg_name: ``"VGG11"``, ``"VGG13"``, ``"VGG16"`` or ``"VGG19"``; case does not matter.
        num_classes: Number of classes, at least 1.

    Raises:
        ValueError: The name is unknown, or ``num_classes`` is below 1.

    Example:
        >>> import torch
        >>> VGG("VGG11").eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    References:
        Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition,
        arXiv:1409.1556.
    """

    def __init__(self, vgg_name: str, num_classes: int = 10) -> None:
        super().__init__()
        layers = _LAYERS.get(str(vgg_name).upper())
        if layers is None:
            raise ValueError(f"vgg_name must be one of {', '.join(_LAYERS)}, not {vgg_name!r}")
        check_at_least("num_classes", num_classes, 1)
        self.features = _features(layers)
        self.classifier = nn.Linear(512, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores before the softmax.

        Args:
            x: Images, shape (batch, 3, 32, 32).

        Returns:
            Scores, shape (batch, num_classes).
        """
        return self.classifier(self.features(x).flatten(1))


def _features(layers: tuple[int | str, ...]) -> nn.Sequential:
    """Create the convolutions and poolings of one column of the table."""
    modules: list[nn.Module] = []
    width = 3
    for layer in layers:
        if isinstance(layer, str):
            modules.append(nn.MaxPool2d(kernel_size=2))
        else:
            modules += [
                nn.Conv2d(width, layer, kernel_size=3, padding=1),
                nn.BatchNorm2d(layer),
                nn.ReLU(inplace=True),
            ]
            width = layer
    return nn.Sequential(*modules)
