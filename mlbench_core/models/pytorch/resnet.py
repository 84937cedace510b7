"""Residual networks for images of 32x32 pixels, and ResNets for ImageNet by name.

Version 1 is the network of He et al. 2015: batch norm and ReLU after each convolution, ReLU after
the addition. Version 2 is that of He et al. 2016: batch norm and ReLU before each convolution,
nothing after the addition, and one last batch norm and ReLU before the classifier.

References:
    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385.

    He, Zhang, Ren and Sun, Identity Mappings in Deep Residual Networks, arXiv:1603.05027.
"""

from __future__ import annotations

import logging
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch._init import initialize

__all__ = [
    "BasicBlockV1",
    "BasicBlockV2",
    "ResNet18CIFAR10",
    "ResNetCIFAR",
    "get_resnet_model",
    "resnet18_32x32",
    "resnet18_bkj",
]

_logger = logging.getLogger(__name__)

_DEFAULT_RESNETCIFAR_VERSION = 1
_VERSIONS = (1, 2)
_SHORTCUTS = ("A", "B")
_CIFAR_SIZES = (8, 20, 32, 44, 56, 110)
_CIFAR_CLASSES = 10
_IMAGENET_SIZES = (18, 34, 50, 101, 152)
# The end of the name of ImageNet's ResNet-18, because "resnet18" is a network for 32x32 images.
_ON_IMAGENET = "_imagenet"
_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def _convolution(width_in: int, width_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Create a convolution of odd ``size`` that keeps the size of the image at stride 1."""
    # Without a bias, because the next batch norm would subtract it.
    return nn.Conv2d(width_in, width_out, size, stride, padding=size // 2, bias=False)


class PaddedIdentity(nn.Module):
    """The shortcut of option A, without parameters: the identity, with zeros for new channels.

    Args:
        width_in: Input channels.
        width_out: Output channels, at least ``width_in``.
        stride: Step between the rows, and between the columns, that are kept.
    """

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.new_channels = width_out - width_in
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and pad: (batch, width_in, h, w) to (batch, width_out, h/stride, w/stride)."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels))


def _width_out(width: int, bottleneck: bool) -> int:
    """Return the output channels of a block: the last convolution of a bottleneck is wider."""
    # He et al. 2015, figure 5: the narrow part makes the 3x3 convolution cheap.
    if bottleneck:
        return 4 * width
    return width


def _shortcut(
    width_in: int, width_out: int, stride: int, option: str, norm: bool
) -> nn.Module | None:
    """Return the module of a shortcut; None for the identity, if the shape does not change."""
    if width_in == width_out and stride == 1:
        return None
    # Option A has no parameters; option B is a projection (He et al. 2015, section 3.3).
    if option == "A":
        return PaddedIdentity(width_in, width_out, stride)
    convolution = _convolution(width_in, width_out, 1, stride)
    if not norm:
        return convolution
    return nn.Sequential(convolution, nn.BatchNorm2d(width_out))


class BlockV1(nn.Module):
    r"""A residual block of version 1: :math:`y = \mathrm{ReLU}(x + F(x))`.

    Args:
        width_in: Input channels.
        width: Channels of the 3x3 convolutions.
        stride: Stride of the first 3x3 convolution.
        bottleneck: If True, use 1x1, 3x3 and 1x1 convolutions, the last four times as wide, instead
            of two 3x3 ones.
        shortcut: ``"A"`` or ``"B"``.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        stride: int = 1,
        bottleneck: bool = False,
        shortcut: str = "B",
    ) -> None:
        super().__init__()
        width_out = _width_out(width, bottleneck)
        self.shortcut = _shortcut(width_in, width_out, stride, shortcut, norm=True)
        layers: list[nn.Module] = []
        for convolution in _convolutions(width_in, width, stride, bottleneck):
            layers += [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)]
        # The last ReLU comes after the addition.
        self.residual = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width_in, h, w) to (batch, width_out, h/stride, w/stride)."""
        shortcut = x
        if self.shortcut is not None:
            shortcut = self.shortcut(x)
        # In place, because the backward pass needs neither the sum nor its summands.
        return self.residual(x).add_(shortcut).relu_()


class BlockV2(nn.Module):
    r"""A residual block of version 2: :math:`y = x + F(x)`.

    Batch norm and ReLU come before each convolution. In most blocks only the residual path has the
    first batch norm and ReLU. If the block changes the shape, or is the first block of the network,
    the shortcut also reads the activated input (the paper's appendix).

    Args:
        width_in: Input channels.
        width: Channels of the 3x3 convolutions.
        stride: Stride of the first 3x3 convolution.
        bottleneck: If True, use 1x1, 3x3 and 1x1 convolutions, the last four times as wide, instead
            of two 3x3 ones.
        shortcut: ``"A"`` or ``"B"``.
        first: True for the first block of the network.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        stride: int = 1,
        bottleneck: bool = False,
        shortcut: str = "B",
        first: bool = False,
    ) -> None:
        super().__init__()
        width_out = _width_out(width, bottleneck)
        self.shortcut = _shortcut(width_in, width_out, stride, shortcut, norm=False)
        self.activate_both_paths = first or self.shortcut is not None
        # Not in place: in most blocks the shortcut still needs x.
        self.activation = nn.Sequential(nn.BatchNorm2d(width_in), nn.ReLU(inplace=False))
        first_convolution, *convolutions = _convolutions(width_in, width, stride, bottleneck)
        layers: list[nn.Module] = [first_convolution]
        for convolution in convolutions:
            layers += [nn.BatchNorm2d(convolution.in_channels), nn.ReLU(inplace=True), convolution]
        self.residual = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width_in, h, w) to (batch, width_out, h/stride, w/stride)."""
        active = self.activation(x)
        shortcut = x
        if self.activate_both_paths:
            shortcut = active
        if self.shortcut is not None:
            shortcut = self.shortcut(shortcut)
        return shortcut + self.residual(active)


# The names of version 3.0, which had other classes for bottlenecks.
BasicBlockV1, BasicBlockV2 = BlockV1, BlockV2


def _convolutions(width_in: int, width: int, stride: int, bottleneck: bool) -> list[nn.Conv2d]:
    """Create the convolutions of a block; the first 3x3 one has the stride."""
    if bottleneck:
        # The paper has the stride in the first 1x1 convolution, which then skips three quarters of
        # its input. As in torchvision, it is in the 3x3 one here.
        return [
            _convolution(width_in, width, 1),
            _convolution(width, width, 3, stride),
            _convolution(width, _width_out(width, bottleneck), 1),
        ]
    return [_convolution(width_in, width, 3, stride), _convolution(width, width, 3)]


class _ResNet32(nn.Module):
    """A residual network for 32x32 images.

    It has a 3x3 convolution, stages of blocks, average pooling and a linear layer.

    Args:
        widths: Width of each stage. From the second stage on, the first block halves the size of
            the image.
        blocks: Number of blocks in each stage.
        bottleneck: If True, the blocks are bottlenecks.
        num_classes: Number of classes.
        version: 1 or 2.
        shortcut: ``"A"`` or ``"B"``.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        blocks: int,
        bottleneck: bool,
        num_classes: int,
        version: int,
        shortcut: str,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 1)
        self.version = version
        width = widths[0]
        self.stem = nn.Sequential(_convolution(3, width, 3))
        # Version 2 activates inside its blocks, before each convolution.
        if version == 1:
            self.stem.extend([nn.BatchNorm2d(width), nn.ReLU(inplace=True)])
        stages = []
        for index, stage_width in enumerate(widths):
            # The first block of a stage has this stride, the others 1. In the first stage, the
            # images still have their whole size.
            stride = 2
            if index == 0:
                stride = 1
            stage = nn.Sequential()
            for position in range(blocks):
                if version == 1:
                    stage.append(BlockV1(width, stage_width, stride, bottleneck, shortcut))
                else:
                    first = index == 0 and position == 0
                    stage.append(BlockV2(width, stage_width, stride, bottleneck, shortcut, first))
                width = _width_out(stage_width, bottleneck)
                stride = 1
            stages.append(stage)
        self.stages = nn.Sequential(*stages)
        # The last block of version 2 ends with an addition, which nothing has normalized yet.
        self.final_norm: nn.BatchNorm2d | None = None
        if version == 2:
            self.final_norm = nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores before the softmax.

        Args:
            x: Images, shape (batch, 3, 32, 32).

        Returns:
            Scores, shape (batch, num_classes).
        """
        x = self.stages(self.stem(x))
        if self.final_norm is not None:
            x = F.relu(self.final_norm(x))
        return self.classifier(x.mean(dim=(2, 3)))


class ResNetCIFAR(_ResNet32):
    """A ResNet for CIFAR: three stages of widths 16, 32 and 64 (He et al. 2015, section 4.2).

    ResNet-20 with 10 classes has 272,474 parameters, with ``shortcut="A"`` 269,722.

    Args:
        resnet_size: Number of layers with weights: 6n + 2, or 9n + 2 with bottlenecks; for example
            8, 20, 32, 44, 56, 110.
        bottleneck: If True, each block is a bottleneck of three convolutions instead of two.
        num_classes: Number of classes, at least 1.
        version: 1 (post-activation, He et al. 2015) or 2 (pre-activation, He et al. 2016).
        shortcut: Shortcut of a block that changes the shape: ``"B"``, a 1x1 convolution, or
            ``"A"``, the identity padded with zeros, as in the paper's CIFAR networks.

    Raises:
        ValueError: An argument is not one of the values listed above.

    Example:
        >>> model = ResNetCIFAR(20, bottleneck=False, num_classes=10)
        >>> sum(p.numel() for p in model.parameters())
        272474
    """

    def __init__(
        self,
        resnet_size: int,
        bottleneck: bool,
        num_classes: int,
        version: int = _DEFAULT_RESNETCIFAR_VERSION,
        *,
        shortcut: str = "B",
    ) -> None:
        per_block, kind = 6, "without bottlenecks"
        if bottleneck:
            per_block, kind = 9, "with bottlenecks"
        if resnet_size < per_block + 2 or (resnet_size - 2) % per_block:
            examples = ", ".join(str(per_block * n + 2) for n in (1, 2, 3, 5, 7, 9, 18))
            raise ValueError(
                f"resnet_size must be {per_block}n + 2 with n >= 1 "
                f"{kind} ({examples}, ...), not {resnet_size}"
            )
        if version not in _VERSIONS:
            raise ValueError(
                f"version must be 1 (He et al. 2015) or 2 (He et al. 2016), not {version!r}"
            )
        if shortcut not in _SHORTCUTS:
            raise ValueError(
                f"shortcut must be 'A' (padded identity) or 'B' (1x1 convolution), not {shortcut!r}"
            )
        blocks = (resnet_size - 2) // per_block
        super().__init__((16, 32, 64), blocks, bottleneck, num_classes, version, shortcut)


class ResNet18CIFAR10(nn.Module):
    """The pre-activation ResNet-18 of a DAWNBench entry of 2017 for CIFAR-10.

    It has a 3x3 convolution, four stages of two :class:`BlockV2` each with widths 64, 128, 256 and
    256, and a linear layer on the average and the maximum of each channel. No batch norm follows
    the last block. With 10 classes the network has 5,205,962 parameters.

    Args:
        num_classes: Number of classes, at least 1.

    Raises:
        ValueError: ``num_classes`` is below 1.

    References:
        Coleman et al., DAWNBench: An End-to-End Deep Learning Benchmark and Competition, 2017; the
        entry "ResNet18" of bkj.
    """

    def __init__(self, num_classes: int = _CIFAR_CLASSES) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 1)
        widths = (64, 128, 256, 256)
        self.stem = nn.Sequential(
            _convolution(3, widths[0], 3), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential()
        # Each stage reads the channels of the stage before it, and the first one those of the stem.
        width_in, stride = widths[0], 1
        for width in widths:
            stage = nn.Sequential(BlockV2(width_in, width, stride), BlockV2(width, width))
            self.stages.append(stage)
            width_in, stride = width, 2
        self.classifier = nn.Linear(2 * widths[-1], num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores before the softmax.

        Args:
            x: Images, shape (batch, 3, 32, 32).

        Returns:
            Scores, shape (batch, num_classes).
        """
        x = self.stages(self.stem(x))
        return self.classifier(torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1))


def resnet18_bkj(num_classes: int) -> ResNet18CIFAR10:
    """Build a :class:`ResNet18CIFAR10`.

    Args:
        num_classes: Number of classes, at least 1.

    Returns:
        The network; it maps (batch, 3, 32, 32) to (batch, num_classes).

    Raises:
        ValueError: ``num_classes`` is below 1.
    """
    return ResNet18CIFAR10(num_classes)


def resnet18_32x32(num_classes: int) -> nn.Module:
    """Build the ResNet-18 of He et al. 2015 for 32x32 images.

    Its stages have widths 64 to 512. It begins with a 3x3 convolution, and has no max pooling.

    Args:
        num_classes: Number of classes, at least 1. With 10, the network has 11,173,962 parameters.

    Returns:
        The network; it maps (batch, 3, 32, 32) to (batch, num_classes).

    Raises:
        ValueError: ``num_classes`` is below 1.
    """
    return _ResNet32(
        (64, 128, 256, 512), 2, bottleneck=False, num_classes=num_classes, version=1, shortcut="B"
    )


class _NotGiven(int):
    """A default number in a signature, distinguishable from the same number given by a caller."""


def get_resnet_model(
    model: str, version: int, dtype: str, num_classes: int = _NotGiven(1000), use_cuda: bool = False
) -> nn.Module:
    """Build a ResNet by name.

    Args:
        model: For 32x32 images ``"resnet8"``, ``"resnet20"``, ``"resnet32"``, ``"resnet44"``,
            ``"resnet56"``, ``"resnet110"`` (:class:`ResNetCIFAR`) and ``"resnet18"``
            (:class:`ResNet18CIFAR10`).
            For ImageNet, from torchvision without pretrained weights, ``"resnet18_imagenet"``,
            ``"resnet34"``, ``"resnet50"``, ``"resnet101"`` and ``"resnet152"``.
        version: 1 or 2, see :class:`ResNetCIFAR`. resnet18 exists only in version 2 and the
            networks for ImageNet only in version 1. If the other version is requested, the function
            logs a warning.
        dtype: Type of the parameters: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"``.
        num_classes: Number of classes. By default, a network for 32x32 images has 10 and one for
            ImageNet has 1000.
        use_cuda: If True, put the network on the current GPU.

    Returns:
        The network, with newly drawn weights.

    Raises:
        ValueError: An argument is not one of the values listed above.
        MissingDependencyError: The network is for ImageNet and torchvision is not installed.

    Example:
        >>> get_resnet_model("resnet20", 1, "fp32").classifier.out_features
        10
        >>> get_resnet_model("resnet20", 1, "fp32", num_classes=100).classifier.out_features
        100
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    if version not in _VERSIONS:
        raise ValueError(
            f"version must be 1 (He et al. 2015) or 2 (He et al. 2016), not {version!r}"
        )
    name = str(model).lower()
    match = re.fullmatch(r"resnet[-_]?(\d+)", name.removesuffix(_ON_IMAGENET))
    # No network has the size 0, so another name is refused below.
    size = 0
    if match:
        size = int(match.group(1))
    on_imagenet = size in _IMAGENET_SIZES and (size != 18 or name.endswith(_ON_IMAGENET))
    # The default 1000 is that of ImageNet. A caller's own 1000 is kept.
    if not on_imagenet and isinstance(num_classes, _NotGiven):
        num_classes = _CIFAR_CLASSES
    if on_imagenet:
        # torchvision is optional: the networks for 32x32 images do not need it.
        from mlbench_core._optional import torchvision

        _note_version(f"resnet{size} for ImageNet", version, 1)
        build = getattr(torchvision.load("models"), f"resnet{size}")
        network: nn.Module = build(num_classes=int(num_classes))
    elif name.endswith(_ON_IMAGENET) or size not in (18, *_CIFAR_SIZES):
        sizes = ", ".join(f"resnet{size}" for size in (*_CIFAR_SIZES, *_IMAGENET_SIZES))
        raise ValueError(f"model must be one of {sizes}, resnet18{_ON_IMAGENET}, not {model!r}")
    elif size == 18:
        _note_version(name, version, 2)
        network = ResNet18CIFAR10(num_classes)
    else:
        network = ResNetCIFAR(size, bottleneck=False, num_classes=num_classes, version=version)
    # Drawn in torch's default dtype, so that every dtype starts from the same weights.
    network = network.to(dtype=_DTYPES[dtype])
    if use_cuda:
        network = network.cuda()
    return network


def _note_version(name: str, version: int, only: int) -> None:
    """Log that a network does not exist in the requested version."""
    if version != only:
        _logger.warning(
            "%s exists in version %d only; version %s was requested", name, only, version
        )
