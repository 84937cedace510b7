"""The image and linear models: sizes by hand arithmetic, shapes, and what version 3.0 got wrong."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlbench_core import errors
from mlbench_core._optional import torchvision
from mlbench_core.models.pytorch.linear_models import LinearRegression, LogisticRegression
from mlbench_core.models.pytorch.resnet import (
    BasicBlockV1,
    BasicBlockV2,
    PaddedIdentity,
    ResNet18CIFAR10,
    ResNetCIFAR,
    get_resnet_model,
    resnet18_32x32,
    resnet18_bkj,
)
from mlbench_core.models.pytorch.vgg import VGG

try:  # here, because importing torchvision sets environment variables of torch's compiler
    torchvision.load("models")
except errors.MissingDependencyError:
    pytestmark = pytest.mark.skip(reason="needs torchvision: the extra vision")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def expected_resnet(size: int, version: int, bottleneck: bool, shortcut: str, classes: int) -> int:
    """Parameters counted from the papers' tables, layer by layer: k*k*in*out a convolution,
    2*channels a batch norm."""
    grow = 4 if bottleneck else 1
    total = 3 * 16 * 9 + (2 * 16 if version == 1 else 0)
    width = 16
    for index, stage in enumerate((16, 32, 64)):
        for position in range((size - 2) // (9 if bottleneck else 6)):
            if bottleneck:
                total += width * stage + stage * stage * 9 + stage * 4 * stage
                norms = [stage, stage, 4 * stage] if version == 1 else [width, stage, stage]
            else:
                total += width * stage * 9 + stage * stage * 9
                norms = [stage, stage] if version == 1 else [width, stage]
            total += 2 * sum(norms)
            out = grow * stage
            if shortcut == "B" and (width != out or (index > 0 and position == 0)):
                total += width * out + (2 * out if version == 1 else 0)
            width = out
    return total + (2 * width if version == 2 else 0) + width * classes + classes


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize(
    ("size", "bottleneck"), [(20, False), (56, False), (110, False), (29, True), (164, True)]
)
def test_resnet_sizes_follow_the_papers(
    size: int, bottleneck: bool, shortcut: str, version: int
) -> None:
    model = ResNetCIFAR(size, bottleneck, 10, version, shortcut=shortcut)
    assert count(model) == expected_resnet(size, version, bottleneck, shortcut, 10)


def test_resnet20_has_the_published_number_of_parameters() -> None:
    assert count(ResNetCIFAR(20, False, 10)) == 272_474
    assert count(ResNetCIFAR(20, False, 10, shortcut="A")) == 269_722
    # "0.27M", "0.46M", "0.66M", "0.85M", "1.7M" in table 6 of He et al. 2015, which uses option A
    sizes = [
        count(ResNetCIFAR(size, False, 10, shortcut="A")) / 1e6 for size in (20, 32, 44, 56, 110)
    ]
    assert [round(size, 2) for size in sizes[:4]] == [0.27, 0.46, 0.66, 0.85]
    assert round(sizes[4], 1) == 1.7


@pytest.mark.parametrize("size", [20, 29])
def test_resnet_has_as_many_weighted_layers_as_its_name_says(size: int) -> None:
    model = ResNetCIFAR(size, size == 29, 10, shortcut="A")
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert len(layers) == size


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_resnet_trains_on_one_batch(version: int, shortcut: str, bottleneck: bool) -> None:
    model = ResNetCIFAR(11 if bottleneck else 8, bottleneck, 7, version, shortcut=shortcut)
    output = model(torch.randn(4, 3, 32, 32))
    assert output.shape == (4, 7)
    nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 6])).backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


def test_option_a_pads_with_zeros_and_has_no_parameters() -> None:
    model = ResNetCIFAR(20, False, 10, shortcut="A")
    padded = [module for module in model.modules() if isinstance(module, PaddedIdentity)]
    assert len(padded) == 2
    assert count(nn.ModuleList(padded)) == 0
    x = torch.randn(2, 16, 8, 8)
    y = padded[0](x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()


def test_stages_shrink_the_image_as_in_the_paper() -> None:
    model = ResNetCIFAR(20, False, 10)
    x = model.stem(torch.randn(1, 3, 32, 32))
    shapes = []
    for stage in model.stages:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_version_2_ends_in_batch_norm_and_relu() -> None:
    model = ResNetCIFAR(8, False, 10, version=2)
    seen = []
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.randn(4, 3, 32, 32))
    assert isinstance(model.final_norm, nn.BatchNorm2d)
    assert (seen[0] >= 0).all()  # an average of what a ReLU let through
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(-1.0)
    model(torch.randn(4, 3, 32, 32))
    assert not seen[1].any()  # everything passes the last norm and the last ReLU


def test_version_2_adds_nothing_after_the_addition() -> None:
    block = ResNetCIFAR(14, False, 10, version=2).stages[0][1].eval()
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), x)  # an identity mapping, negative values included


def test_version_1_ends_each_block_in_relu() -> None:
    block = ResNetCIFAR(14, False, 10, version=1).stages[0][1].eval()
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), x.relu())


@pytest.mark.parametrize("make", [lambda: ResNetCIFAR(8, False, 10, 2), lambda: VGG("VGG11")])
def test_models_copy_and_reload(make) -> None:  # type: ignore[no-untyped-def]
    model = make().eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = make().eval()
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), expected)


def test_weights_come_from_the_global_generator_which_is_never_seeded() -> None:
    torch.manual_seed(7)
    first, second = ResNetCIFAR(8, False, 10), ResNetCIFAR(8, False, 10)
    torch.manual_seed(7)
    again = ResNetCIFAR(8, False, 10)
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)


def test_initial_weights_have_the_variance_of_he_et_al() -> None:
    convolution = resnet18_32x32(10).stages[3][1].residual[0]
    fan_out = 512 * 9
    assert convolution.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (21, False, 10),
            r"resnet_size must be 6n \+ 2 with n >= 1 without bottlenecks .*, not 21",
        ),
        ((2, False, 10), "resnet_size must be .*, not 2$"),
        ((32, True, 10), r"must be 9n \+ 2 with n >= 1 with bottlenecks .*, not 32"),
        ((20, False, 10, 3), r"version must be 1 .* or 2 .*, not 3"),
        ((20, False, 0), "num_classes must be at least 1, not 0"),
    ],
)
def test_bad_resnet_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetCIFAR(*arguments)


def test_bad_shortcut() -> None:
    with pytest.raises(ValueError, match=r"shortcut must be 'A' .*, not 'C'"):
        ResNetCIFAR(20, False, 10, shortcut="C")


@pytest.mark.parametrize("size", [20, 32, 44, 56, 110])
def test_named_cifar_models_honour_num_classes(size: int) -> None:
    model = get_resnet_model(f"resnet{size}", 2, "fp32", num_classes=100, use_cuda=False)
    assert isinstance(model, ResNetCIFAR)
    assert model.version == 2
    assert count(model) == expected_resnet(size, 2, False, "B", 100)


def test_num_classes_left_out_is_10_for_small_images_and_1000_for_imagenet() -> None:
    for size in (20, 32, 44, 56, 110):
        assert get_resnet_model(f"resnet{size}", 1, "fp32").classifier.out_features == 10
    assert get_resnet_model("resnet18", 2, "fp32").classifier.out_features == 10
    assert get_resnet_model("resnet18_imagenet", 1, "fp32").fc.out_features == 1000
    assert get_resnet_model("resnet34", 1, "fp32").fc.out_features == 1000
    for name in ("resnet20", "resnet18"):  # the very number of the signature, given
        assert get_resnet_model(name, 2, "fp32", num_classes=1000).classifier.out_features == 1000
    assert inspect.signature(get_resnet_model).parameters["num_classes"].default == 1000


def test_named_model_gives_as_many_scores_as_classes() -> None:
    assert get_resnet_model("resnet20", 1, "fp32", num_classes=100)(
        torch.randn(2, 3, 32, 32)
    ).shape == (2, 100)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
        ("fp64", torch.float64),
    ],
)
def test_named_model_has_the_dtype(name: str, dtype: torch.dtype) -> None:
    model = get_resnet_model("resnet20", 1, name, num_classes=10)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(torch.randn(2, 3, 32, 32, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("resnet19", 1, "fp32"),
            (
                "model must be one of resnet8, resnet20, .*resnet110, "
                "resnet18, .*resnet18_imagenet, not 'resnet19'"
            ),
        ),
        (("resnet20_imagenet", 1, "fp32"), "model must be .*, not 'resnet20_imagenet'"),
        (("vgg20", 1, "fp32"), "model must be .*, not 'vgg20'"),
        (("resnet20", 4, "fp32"), "version must be .*, not 4"),
        (("resnet20", 1, "fp8"), "dtype must be one of fp16, bf16, fp32, fp64, not 'fp8'"),
    ],
)
def test_bad_names(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_resnet_model(*arguments)


def test_imagenet_model_comes_from_torchvision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = get_resnet_model("resnet18_imagenet", 1, "fp32", num_classes=5)
        assert not caplog.records
        get_resnet_model("resnet18_imagenet", 2, "fp32", num_classes=5)
    assert "exists in version 1 only" in caplog.text
    # 11,689,512 parameters with 1000 classes (torchvision's table)
    assert count(model) == 11_689_512 - 995 * 513
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_a_torchvision_that_imports_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = types.ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", whole)
    monkeypatch.setattr(
        torchvision, "_declare_operators", lambda: pytest.fail("nothing needs declaring")
    )
    assert torchvision.load() is whole


def test_operators_are_declared_only_after_the_import_failed_for_lack_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []

    def failing(module: str, extra: str) -> None:
        steps.append("failed")
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision, "require", failing)
    monkeypatch.setattr(torchvision, "_declare_operators", lambda: steps.append("declared"))
    modules = {"torch": None, "torchvision": None, "torchvision.ops": None}

    def import_module(name: str) -> str:
        steps.append(f"{name} with {list(modules)}")
        return name

    # The failed import left torchvision's modules behind; the next one must not find them.
    monkeypatch.setattr(torchvision, "sys", types.SimpleNamespace(modules=modules))
    monkeypatch.setattr(
        torchvision, "importlib", types.SimpleNamespace(import_module=import_module)
    )
    assert torchvision.load("models") == "torchvision.models"
    assert steps == [
        "failed",
        "declared",
        "torchvision with ['torch']",
        "torchvision.models with ['torch']",
    ]


def test_other_failures_of_the_import_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: str, extra: str) -> None:
        raise RuntimeError("libcudart is broken")

    monkeypatch.setattr(torchvision, "require", failing)
    with pytest.raises(RuntimeError, match="libcudart is broken"):
        torchvision.load()


def test_missing_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        errors.MissingDependencyError, match=r"pip install 'mlbench-core\[vision\]'"
    ):
        get_resnet_model("resnet34", 1, "fp32")


def test_torchvision_loads_once_and_leaves_its_operators_alone() -> None:
    assert torchvision.load() is torchvision.load()
    assert torchvision.load("transforms").RandomCrop(32).size == (32, 32)


def test_resnet18_by_name_is_the_pre_activation_network_for_small_images(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        model = get_resnet_model("resnet18", 2, "fp32", num_classes=7)
        assert not caplog.records
        get_resnet_model("resnet18", 1, "fp32")
    assert "resnet18 exists in version 2 only; version 1 was requested" in caplog.text
    assert isinstance(model, ResNet18CIFAR10) and isinstance(resnet18_bkj(7), ResNet18CIFAR10)
    blocks = width = 0
    before = 64
    for width in (
        64,
        128,
        256,
        256,
    ):  # per stage: two blocks, the first with a projection from the second stage on
        blocks += before * width * 9 + 3 * width * width * 9 + 2 * (before + 3 * width)
        blocks += 0 if width == 64 else before * width
        before = width
    assert count(model) == 3 * 64 * 9 + 2 * 64 + blocks + 7 * (2 * 256 + 1)
    assert count(resnet18_bkj(10)) == 5_205_962
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_resnet18_by_name_computes_what_its_blocks_say() -> None:
    """Pre-activation written out; the classifier sees the mean of each channel, then the
    maximum."""
    model = resnet18_bkj(10).eval()
    x = torch.randn(2, 3, 32, 32)
    y = model.stem(x)
    for stage in model.stages:
        for block in stage:
            active = F.relu(block.activation[0](y))
            first, norm, _, second = block.residual
            around = y if block.shortcut is None else block.shortcut(active)
            y = around + second(F.relu(norm(first(active))))
    assert y.shape == (2, 256, 4, 4)
    pooled = torch.cat([F.adaptive_avg_pool2d(y, 1), F.adaptive_max_pool2d(y, 1)], dim=1).flatten(1)
    torch.testing.assert_close(model(x), model.classifier(pooled))


def test_the_blocks_have_the_names_of_version_3() -> None:
    x = torch.randn(2, 16, 8, 8)
    assert BasicBlockV1(16, 32, 2)(x).shape == BasicBlockV2(16, 32, 2)(x).shape == (2, 32, 4, 4)
    assert BasicBlockV1(16, 16)(x).min() == 0 > BasicBlockV2(16, 16)(x).min()
    assert isinstance(ResNetCIFAR(8, False, 10, 1).stages[0][0], BasicBlockV1)
    assert isinstance(ResNetCIFAR(8, False, 10, 2).stages[0][0], BasicBlockV2)


def test_resnet18_of_the_paper_for_small_images() -> None:
    model = resnet18_32x32(10)
    # stem, then per stage the first block (with a projection from the second stage on) and the
    # second block
    blocks = 0
    width = 64
    for stage in (64, 128, 256, 512):
        blocks += width * stage * 9 + 3 * stage * stage * 9 + 4 * 2 * stage
        blocks += 0 if width == stage else width * stage + 2 * stage
        width = stage
    assert count(model) == 3 * 64 * 9 + 2 * 64 + blocks + 512 * 10 + 10 == 11_173_962
    assert not any(isinstance(module, nn.MaxPool2d) for module in model.modules())
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "convolutions"), [("VGG11", 8), ("VGG13", 10), ("VGG16", 13), ("VGG19", 16)]
)
def test_vgg_follows_the_paper(name: str, convolutions: int) -> None:
    model = VGG(name)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(layers) == convolutions  # the other three of the name are the paper's linear layers
    expected = (
        sum(9 * layer.in_channels * layer.out_channels + 3 * layer.out_channels for layer in layers)
        + 5130
    )
    assert count(model) == expected
    # channels per stage, from columns A, B, D and E of the paper's table 1
    per_stage = {
        "VGG11": (1, 1, 2, 2, 2),
        "VGG13": (2,) * 5,
        "VGG16": (2, 2, 3, 3, 3),
        "VGG19": (2, 2, 4, 4, 4),
    }
    widths = [
        w for w, n in zip((64, 128, 256, 512, 512), per_stage[name], strict=True) for _ in range(n)
    ]
    assert [layer.out_channels for layer in layers] == widths


def test_vgg11_size_and_output() -> None:
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    hand = sum(9 * a * b + b + 2 * b for a, b in itertools.pairwise(widths)) + 512 * 10 + 10
    model = VGG("VGG11")
    assert count(model) == hand == 9_231_114
    output = model(torch.randn(2, 3, 32, 32))
    assert output.shape == (2, 10)
    output.sum().backward()
    assert VGG("vgg11", num_classes=3)(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_unknown_vgg() -> None:
    with pytest.raises(
        ValueError, match="vgg_name must be one of VGG11, VGG13, VGG16, VGG19, not 'VGG12'"
    ):
        VGG("VGG12")


def test_logistic_regression_is_a_probability() -> None:
    model = LogisticRegression(5)
    x = torch.randn(3, 5)
    output = model(x)
    assert output.shape == (3, 1)
    weight, bias = model.linear.weight[0], model.linear.bias[0]
    assert torch.allclose(output[:, 0], 1 / (1 + torch.exp(-(x @ weight + bias))), atol=1e-6)
    assert count(model) == 6


def test_linear_regression() -> None:
    model = LinearRegression(5)
    x = torch.randn(3, 5)
    assert torch.allclose(
        model(x), (x * model.linear.weight).sum(1, keepdim=True) + model.linear.bias, atol=1e-6
    )


@pytest.mark.parametrize("make", [LogisticRegression, LinearRegression])
def test_linear_models_need_a_feature(make: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="n_features must be at least 1, not 0"):
        make(0)
