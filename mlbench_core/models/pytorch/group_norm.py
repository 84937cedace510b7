"""Group normalization in place of batch normalization, for workers whose data differs."""

from __future__ import annotations

import math

from torch import nn

from mlbench_core.arguments import check_int

__all__ = ["convert_to_group_norm"]


def convert_to_group_norm(model: nn.Module, groups: int = 8) -> nn.Module:
    r"""Replace every :class:`torch.nn.BatchNorm2d` of a model by a :class:`torch.nn.GroupNorm`.

    Group normalization computes the mean and the variance of each image over a group of channels:

    .. math::
        \mu = \frac{1}{n} \sum x, \qquad \sigma^2 = \frac{1}{n} \sum (x - \mu)^2, \qquad
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta,

    with the :math:`n` values :math:`x` of a group in one image. It uses neither other images nor
    running statistics. Therefore the model computes the same in training and in evaluation, and the
    same on every worker. With batch normalization, workers with different classes normalize by
    different statistics, and the average of their running statistics fits none of them.

    The new layers have the weights, biases and epsilon of the old ones, so an existing optimizer
    remains valid.

    Args:
        model: The model, which is changed in place. Subclasses of :class:`torch.nn.BatchNorm2d` are
            not replaced.
        groups: Number of groups of a layer, at least 1. If it does not divide the number of
            channels, the layer has their greatest common divisor of groups. The default divides the
            16, 32 and 64 channels of :class:`~mlbench_core.models.pytorch.resnet.ResNetCIFAR`.

    Returns:
        The model, or the new layer if the model is itself a :class:`torch.nn.BatchNorm2d`.

    Raises:
        TypeError: ``groups`` is not an integer.
        ValueError: ``groups`` is below 1.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
        >>> convert_to_group_norm(model)[1].num_groups
        8

    References:
        Wu and He: Group Normalization. arXiv:1803.08494

        Hsieh et al.: The Non-IID Data Quagmire of Decentralized Machine Learning. arXiv:1910.00189
    """
    check_int("groups", groups)
    # Compare the exact type: subclasses, such as DistributedBatchNorm2d, were chosen for their own
    # behavior.
    if type(model) is nn.BatchNorm2d:
        channels = model.num_features
        new = nn.GroupNorm(math.gcd(groups, channels), channels, model.eps, model.affine)
        # Use the same tensors, not copies: an optimizer may hold them already.
        new.weight, new.bias = model.weight, model.bias
        return new.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, convert_to_group_norm(child, groups))
    return model
