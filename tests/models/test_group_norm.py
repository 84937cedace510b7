"""Group normalization in place of batch normalization, against its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mlbench_core.models.pytorch.batch_norm import DistributedBatchNorm2d
from mlbench_core.models.pytorch.group_norm import convert_to_group_norm
from mlbench_core.models.pytorch.resnet import ResNetCIFAR


@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (12, 4), (3, 1)])
def test_each_image_is_normalized_in_groups_of_channels(channels: int, groups: int) -> None:
    norm = nn.BatchNorm2d(channels, eps=1e-3).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    images = torch.randn(5, channels, 6, 6, dtype=torch.float64) * 3 + 1
    parts = images.reshape(5, groups, -1)
    mean, variance = parts.mean(2, keepdim=True), parts.var(2, unbiased=False, keepdim=True)
    plain = ((parts - mean) / (variance + 1e-3).sqrt()).reshape(images.shape)
    expected = norm.weight[:, None, None] * plain + norm.bias[:, None, None]
    torch.testing.assert_close(convert_to_group_norm(norm)(images), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_a_network_without_running_statistics_computes_the_same_in_evaluation(version: int) -> None:
    torch.manual_seed(0)
    network = ResNetCIFAR(20, bottleneck=False, num_classes=10, version=version)
    parameters = list(network.parameters())
    converted = convert_to_group_norm(network)
    assert converted is network
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert list(network.buffers()) == []
    assert not [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    images = torch.randn(4, 3, 16, 16)
    together = network.train()(images)
    torch.testing.assert_close(network.eval()(images), together, rtol=0, atol=0)
    # An image does not depend on the others of its batch, as it does with batch norm.
    torch.testing.assert_close(network.train()(images[:1]), together[:1], rtol=1e-4, atol=1e-5)


def test_other_layers_stay_and_the_mode_is_kept() -> None:
    joint = nn.Sequential(DistributedBatchNorm2d(2), nn.BatchNorm2d(2, affine=False)).eval()
    convert_to_group_norm(joint, groups=2)
    assert isinstance(joint[0], DistributedBatchNorm2d)
    assert isinstance(joint[1], nn.GroupNorm) and joint[1].weight is None
    assert not joint[1].training
    with pytest.raises(ValueError, match="groups must be at least 1, not 0"):
        convert_to_group_norm(joint, groups=0)
