"""The networks compute what those of torch compute, eagerly and in a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import nn

from mlbench_core.models.pytorch import resnet
from mlbench_core.models.tensorflow.resnet_model import (
    BatchNorm,
    Block,
    Cifar10Model,
    Convolution,
    Model,
    batch_norm,
    block_layer,
    conv2d_fixed_padding,
    fixed_padding,
)

TOLERANCE = 1e-4


def layers_of_block(block: Block) -> Iterator[Any]:
    """The layers in the order in which torch registers them."""
    if block.version == 1:
        yield from (
            layer for layer in (block.projection, block.projection_norm) if layer is not None
        )
        for convolution, norm in zip(block.convolutions, block.norms, strict=True):
            yield from (convolution, norm)
    else:
        yield from (
            layer
            for layer in (block.projection, block.norms[0], block.convolutions[0])
            if layer is not None
        )
        for norm, convolution in zip(block.norms[1:], block.convolutions[1:], strict=True):
            yield from (norm, convolution)


def layers(model: Model) -> Iterator[Any]:
    yield model.stem
    if model.stem_norm is not None:
        yield model.stem_norm
    for block in model.blocks:
        yield from layers_of_block(block)
    if model.final_norm is not None:
        yield model.final_norm


def copy_weights(source: nn.Module, target: Model) -> None:
    """Give the model of TensorFlow the weights of that of torch, and random running statistics to
    both."""
    generator = torch.Generator().manual_seed(0)
    known = [
        module for module in source.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)
    ]
    for theirs, ours in zip(known, layers(target), strict=True):
        if isinstance(theirs, nn.Conv2d):
            assert isinstance(ours, Convolution)
            ours.kernel.assign(theirs.weight.detach().permute(2, 3, 1, 0).numpy())
            continue
        assert isinstance(ours, BatchNorm)
        nn.init.normal_(theirs.bias, generator=generator)
        theirs.running_mean.normal_(generator=generator)  # type: ignore[union-attr]
        theirs.running_var.uniform_(0.5, 2, generator=generator)  # type: ignore[union-attr]
        pairs = zip(
            (ours.gamma, ours.beta, ours.moving_mean, ours.moving_variance),
            (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var),
            strict=True,
        )
        for variable, tensor in pairs:
            variable.assign(tensor.detach().numpy())  # type: ignore[union-attr]
    target.weights.assign(source.classifier.weight.detach().t().numpy())  # type: ignore[union-attr]
    target.bias.assign(source.classifier.bias.detach().numpy())  # type: ignore[union-attr]


def both(version: int, bottleneck: bool = False) -> tuple[nn.Module, Model]:
    torch.manual_seed(1)
    if bottleneck:
        theirs: nn.Module = resnet.ResNetCIFAR(29, True, 10, version)
        ours = Model(29, True, 10, 16, 3, 1, None, None, [3] * 3, [1, 2, 2], resnet_version=version)
    else:
        theirs = resnet.ResNetCIFAR(20, False, 10, version)
        ours = Cifar10Model(20, resnet_version=version)
    copy_weights(theirs, ours)
    return theirs, ours


def count(variables: Any) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [20, 32])
def test_the_number_of_parameters_is_that_of_torch(version: int, size: int) -> None:
    theirs = resnet.ResNetCIFAR(size, False, 10, version)
    assert count(Cifar10Model(size, resnet_version=version).trainable_variables) == sum(
        p.numel() for p in theirs.parameters()
    )
    if (version, size) == (1, 20):
        assert count(Cifar10Model(20, resnet_version=1).trainable_variables) == 272_474


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_the_same_weights_give_the_same_logits_gradients_and_statistics(
    version: int, bottleneck: bool
) -> None:
    theirs, ours = both(version, bottleneck)
    images = np.random.default_rng(0).standard_normal((4, 32, 32, 3)).astype(np.float32)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = theirs.eval()(planes).numpy()
    assert ours(images, training=False).numpy() == pytest.approx(
        expected, rel=TOLERANCE, abs=TOLERANCE
    )
    output = theirs.train()(planes)
    output.square().mean().backward()
    with tf.GradientTape() as tape:
        logits = ours(images, training=True)
        loss = tf.reduce_mean(tf.square(logits))
    assert logits.numpy() == pytest.approx(output.detach().numpy(), rel=TOLERANCE, abs=TOLERANCE)
    last = [module for module in theirs.modules() if isinstance(module, nn.BatchNorm2d)][-1]
    own = [layer for layer in layers(ours) if isinstance(layer, BatchNorm)][-1]
    first = next(module for module in theirs.modules() if isinstance(module, nn.Conv2d)).weight.grad
    assert first is not None
    gradient = tape.gradient(loss, ours.stem.kernel).numpy()
    scale = float(first.abs().max())
    assert gradient / scale == pytest.approx(first.permute(2, 3, 1, 0).numpy() / scale, abs=1e-3)
    assert own.moving_mean.numpy() == pytest.approx(
        last.running_mean.numpy(), rel=1e-3, abs=TOLERANCE
    )  # type: ignore[union-attr]
    assert own.moving_variance.numpy() == pytest.approx(last.running_var.numpy(), rel=1e-3)  # type: ignore[union-attr]


def test_the_first_weights_have_the_variances_of_torch() -> None:
    tf.random.set_seed(3)
    model = Cifar10Model(20, resnet_version=1)
    kernel = model.blocks[-1].convolutions[-1].kernel.numpy()
    assert kernel.std() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.02)
    assert model.weights.numpy().std() == pytest.approx(math.sqrt(1 / 64), rel=0.15)
    assert not model.bias.numpy().any()


def test_in_a_graph_the_model_and_its_running_statistics_are_the_same() -> None:
    _, eager = both(1)
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3)).astype(np.float32)
    # Before the training call, because it changes the running statistics.
    evaluated, trained = (eager(images, training=flag).numpy() for flag in (False, True))
    statistics = [variable.numpy() for variable in eager.non_trainable_variables]
    _, fresh = both(1)
    values = [variable.numpy() for variable in fresh.variables]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = Cifar10Model(20, resnet_version=1)
        training = tf.compat.v1.placeholder(tf.bool, ())
        logits = model(tf.constant(images), training)
        assert len(tf.compat.v1.trainable_variables()) == len(model.trainable_variables)
        session.run(tf.compat.v1.global_variables_initializer())
        for variable, value in zip(model.variables, values, strict=True):
            variable.load(value, session)
        before = session.run(model.non_trainable_variables)
        assert session.run(logits, {training: False}) == pytest.approx(
            evaluated, rel=TOLERANCE, abs=TOLERANCE
        )
        assert all(map(np.array_equal, before, session.run(model.non_trainable_variables)))
        assert session.run(logits, {training: True}) == pytest.approx(
            trained, rel=TOLERANCE, abs=TOLERANCE
        )
        found = session.run(model.non_trainable_variables)
    for own, expected in zip(found, statistics, strict=True):
        assert own == pytest.approx(expected, rel=1e-3, abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_keeps_variables_and_logits_in_float32(dtype: Any) -> None:
    model = Cifar10Model(8, resnet_version=2, dtype=dtype)
    assert {variable.dtype for variable in model.variables} == {tf.float32}
    logits = model(tf.ones((2, 32, 32, 3)), training=False)
    assert logits.dtype == tf.float32
    assert np.isfinite(logits.numpy()).all()


def test_a_network_for_larger_images_pools_after_its_first_convolution() -> None:
    model = Model(18, False, 1000, 64, 7, 2, 3, 2, [2, 2, 2, 2], [1, 2, 2, 2], resnet_version=1)
    assert count(model.trainable_variables) == 11_689_512  # torchvision's resnet18
    assert model(tf.zeros((1, 64, 64, 3)), training=False).shape == (1, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resnet_size": 21}, "resnet_size must be 6n"),
        ({"resnet_version": 3}, "resnet_version must be 1"),
        (
            {"data_format": "NCHW"},
            "data_format must be one of channels_first, channels_last, not 'NCHW'",
        ),
        ({"num_classes": 0}, "num_classes"),
        ({"dtype": tf.int32}, "dtype must be one of float32, float16, bfloat16"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cifar10Model(**{"resnet_size": 20, **arguments})


def test_fixed_padding_does_not_depend_on_the_size_of_the_image() -> None:
    for size in (7, 8):
        assert fixed_padding(tf.ones((1, size, size, 2)), 3, "channels_last").shape == (
            1,
            size + 2,
            size + 2,
            2,
        )
        assert fixed_padding(tf.ones((1, 2, size, size)), 4, "channels_first").shape == (
            1,
            2,
            size + 3,
            size + 3,
        )


def test_functions_that_create_layers_need_a_graph() -> None:
    images = tf.ones((1, 4, 4, 3))
    for call in (
        lambda: conv2d_fixed_padding(images, 8, 3, 1, "channels_last"),
        lambda: batch_norm(images, True, "channels_last"),
    ):
        with pytest.raises(RuntimeError, match=r"must be called in a graph.*or use Cifar10Model"):
            call()


def test_layers_of_a_graph_train() -> None:
    def block(
        inputs: Any, filters: int, training: Any, projection: Any, strides: int, data_format: str
    ) -> Any:
        shortcut = inputs if projection is None else projection(inputs)
        x = conv2d_fixed_padding(inputs, filters, 3, strides, data_format)
        return tf.nn.relu(batch_norm(x, training, data_format) + shortcut)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(1)
        images = tf.random.stateless_normal((8, 8, 8, 3), (1, 2))
        x = block_layer(images, 4, False, block, 2, 2, True, "stage", "channels_last")
        assert (x.name, x.shape) == ("stage:0", (8, 4, 4, 4))
        # One projection and two convolutions.
        shapes = [
            tuple(variable.shape)
            for variable in tf.compat.v1.trainable_variables()
            if len(variable.shape) == 4
        ]
        assert shapes == [(1, 1, 3, 4), (3, 3, 3, 4), (3, 3, 4, 4)]
        loss = tf.reduce_mean(tf.square(x - 1))
        step = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(tf.compat.v1.global_variables_initializer())
        first = session.run(loss)
        for _ in range(20):
            session.run(step)
        assert session.run(loss) < first / 2
