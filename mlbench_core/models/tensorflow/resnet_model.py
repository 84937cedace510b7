"""Residual networks for TensorFlow 2.

Version 1 is the network of He et al. 2015: batch norm and ReLU after each convolution, ReLU after
the addition. Version 2 is that of He et al. 2016: batch norm and ReLU before each convolution,
nothing after the addition, and one last batch norm and ReLU before the classifier. The shortcut of
a block that changes the shape is a 1x1 convolution (option B). :class:`Cifar10Model` is the same
network as :class:`mlbench_core.models.pytorch.resnet.ResNetCIFAR`, with the same number of
parameters.

A model is a :class:`tf.Module`. Its variables are created with it, and a call creates no more. So
it works in eager mode, in a ``tf.function``, under the scope of a ``tf.distribute.Strategy``, and
in a graph with a session (``tf.compat.v1``). A training call also updates the running statistics of
batch norm.

References:
    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385.

    He, Zhang, Ren and Sun, Identity Mappings in Deep Residual Networks, arXiv:1603.05027.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_at_least

__all__ = [
    "Cifar10Model",
    "Model",
    "batch_norm",
    "block_layer",
    "conv2d_fixed_padding",
    "fixed_padding",
]

DEFAULT_VERSION = 2
_VERSIONS = (1, 2)
_FORMATS = ("channels_first", "channels_last")
_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
# torch's defaults: new = 0.9 * old + 0.1 * batch.
_BATCH_NORM_DECAY = 0.9
_BATCH_NORM_EPSILON = 1e-5


def fixed_padding(inputs: Any, kernel_size: int, data_format: str) -> Any:
    """Pad images with zeros on each side, by an amount that does not depend on their size.

    TensorFlow's own padding ``"SAME"`` of a convolution with strides depends on the size of the
    image.

    Args:
        inputs: Images, shape (batch, height, width, channels), or (batch, channels, height, width).
        kernel_size: Size of the next convolution or pooling; ``kernel_size - 1`` pixels are added
            in each direction.
        data_format: ``"channels_last"`` or ``"channels_first"``.

    Returns:
        The padded images.
    """
    before = (kernel_size - 1) // 2
    margin, none = [before, kernel_size - 1 - before], [0, 0]
    if data_format == "channels_last":
        return tf.pad(inputs, [none, margin, margin, none])
    return tf.pad(inputs, [none, none, margin, margin])


class Convolution(tf.Module):
    """A convolution without a bias, which the next batch norm would subtract.

    Args:
        width_in: Input channels.
        width: Output channels.
        kernel_size: Height and width of the kernel, odd.
        strides: Stride in both directions.
        data_format: ``"channels_last"`` or ``"channels_first"``.
    """

    def __init__(
        self, width_in: int, width: int, kernel_size: int, strides: int, data_format: str
    ) -> None:
        super().__init__()
        self.kernel_size, self.strides, self.data_format = kernel_size, strides, data_format
        shape = (kernel_size, kernel_size, width_in, width)
        # He et al. 2015, arXiv:1502.01852: variance 2/(fan out) keeps the size of the gradients
        # through ReLU layers.
        deviation = math.sqrt(2 / (kernel_size**2 * width))
        self.kernel = tf.Variable(
            lambda: tf.random.normal(shape, stddev=deviation), name="conv2d/kernel"
        )

    def __call__(self, x: Any) -> Any:
        """Convolve images of either layout."""
        padding = "SAME"
        if self.strides > 1:
            padding = "VALID"
            # A 1x1 kernel needs no padding.
            if self.kernel_size > 1:
                x = fixed_padding(x, self.kernel_size, self.data_format)
        kernel, layout = tf.cast(self.kernel, x.dtype), _layout(self.data_format)
        return tf.nn.conv2d(x, kernel, self.strides, padding, data_format=layout)


class BatchNorm(tf.Module):
    """Batch normalization with running statistics.

    Under a strategy, each replica has its own statistics. Read outside of a replica, they are the
    mean over all.

    Args:
        width: Channels.
        data_format: ``"channels_last"`` or ``"channels_first"``.
    """

    def __init__(self, width: int, data_format: str) -> None:
        super().__init__()
        self.layout = _layout(data_format)
        self.gamma = tf.Variable(lambda: tf.ones(width), name="batch_normalization/gamma")
        self.beta = tf.Variable(lambda: tf.zeros(width), name="batch_normalization/beta")
        of_replica: dict[str, Any] = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.MEAN,
        }
        self.moving_mean = tf.Variable(
            lambda: tf.zeros(width), name="batch_normalization/moving_mean", **of_replica
        )
        self.moving_variance = tf.Variable(
            lambda: tf.ones(width), name="batch_normalization/moving_variance", **of_replica
        )

    def __call__(self, x: Any, training: Any) -> Any:
        """Normalize a batch: by its own statistics in training, by the running ones otherwise."""
        # A tensor may get its value only when a graph runs.
        if not isinstance(training, bool):
            return tf.cond(training, lambda: self._train(x), lambda: self._evaluate(x))
        if training:
            return self._train(x)
        return self._evaluate(x)

    def _train(self, x: Any) -> Any:
        # The variance is the unbiased one, as in torch; the batch itself is divided by the biased
        # one.
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x,
            self.gamma,
            self.beta,
            epsilon=_BATCH_NORM_EPSILON,
            data_format=self.layout,
            is_training=True,
        )
        share = 1 - _BATCH_NORM_DECAY
        updates = [
            self.moving_mean.assign_sub(share * (self.moving_mean - mean)),
            self.moving_variance.assign_sub(share * (self.moving_variance - variance)),
        ]
        # In a graph nothing else would run the updates.
        with tf.control_dependencies(updates):
            return tf.identity(y)

    def _evaluate(self, x: Any) -> Any:
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(
            x, self.gamma, self.beta, self.moving_mean, self.moving_variance,
            epsilon=_BATCH_NORM_EPSILON, data_format=self.layout, is_training=False,
        )  # fmt: skip
        return y


class Block(tf.Module):
    """A residual block of version 1 or 2.

    Args:
        width_in: Input channels.
        filters: Channels of the 3x3 convolutions.
        strides: Stride of the first 3x3 convolution.
        bottleneck: If True, use 1x1, 3x3 and 1x1 convolutions, the last four times as wide, instead
            of two 3x3 ones.
        version: 1 or 2.
        first: True for the first block of the network, in which the shortcut of version 2 reads the
            activated input.
        data_format: ``"channels_last"`` or ``"channels_first"``.
    """

    def __init__(
        self,
        width_in: int,
        filters: int,
        strides: int,
        bottleneck: bool,
        version: int,
        first: bool,
        data_format: str,
    ) -> None:
        super().__init__()
        self.version = version
        self.width = 4 * filters if bottleneck else filters
        if bottleneck:
            shapes = [
                (width_in, filters, 1, 1),
                (filters, filters, 3, strides),
                (filters, self.width, 1, 1),
            ]
        else:
            shapes = [(width_in, filters, 3, strides), (filters, filters, 3, 1)]
        changes_shape = width_in != self.width or strides != 1
        self.projection: Convolution | None = None
        self.projection_norm: BatchNorm | None = None
        if changes_shape:
            self.projection = Convolution(width_in, self.width, 1, strides, data_format)
            if version == 1:
                self.projection_norm = BatchNorm(self.width, data_format)
        self.activates_both_paths = first or changes_shape
        self.convolutions = [Convolution(*shape, data_format) for shape in shapes]
        # Version 1 normalizes the output of a convolution, and version 2 its input.
        self.norms = [BatchNorm(shape[2 - version], data_format) for shape in shapes]

    def __call__(self, x: Any, training: Any) -> Any:
        """Map (batch, height, width, width_in) to (batch, height/strides, width/strides, width)."""
        if self.version == 1:
            return self._call_v1(x, training)
        return self._call_v2(x, training)

    def _call_v1(self, x: Any, training: Any) -> Any:
        shortcut = x
        if self.projection is not None and self.projection_norm is not None:
            shortcut = self.projection_norm(self.projection(x), training)
        for convolution, norm in zip(self.convolutions[:-1], self.norms[:-1], strict=True):
            x = tf.nn.relu(norm(convolution(x), training))
        return tf.nn.relu(self.norms[-1](self.convolutions[-1](x), training) + shortcut)

    def _call_v2(self, x: Any, training: Any) -> Any:
        active = tf.nn.relu(self.norms[0](x, training))
        shortcut = x
        if self.activates_both_paths:
            shortcut = active
        if self.projection is not None:
            shortcut = self.projection(shortcut)
        y = self.convolutions[0](active)
        for norm, convolution in zip(self.norms[1:], self.convolutions[1:], strict=True):
            y = convolution(tf.nn.relu(norm(y, training)))
        return y + shortcut


class Model(tf.Module):
    """A residual network for color images.

    It has a convolution, stages of blocks, average pooling and a linear layer.

    Args:
        resnet_size: Number of layers with weights; only a name, because ``block_sizes`` decides.
        bottleneck: If True, the blocks are bottlenecks of three convolutions.
        num_classes: Number of classes, at least 1.
        num_filters: Channels of the first convolution and of the first stage; each further stage
            has twice as many.
        kernel_size: Size of the first convolution.
        conv_stride: Stride of the first convolution.
        first_pool_size: Size of the max pooling after it; None for no pooling.
        first_pool_stride: Stride of this pooling.
        block_sizes: Number of blocks in each stage.
        block_strides: Stride of the first block of each stage.
        resnet_version: 1 or 2.
        data_format: Layout in which the network computes: ``"channels_first"`` is faster on GPUs,
            and ``"channels_last"`` the only one on CPUs. None chooses by the visible devices.
            Images are always given with the channels last.
        dtype: Type in which the network computes: float32, float16 or bfloat16. Variables are
            always float32.

    Raises:
        ValueError: An argument is not one of the values listed above.
    """

    def __init__(
        self,
        resnet_size: int,
        bottleneck: bool,
        num_classes: int,
        num_filters: int,
        kernel_size: int,
        conv_stride: int,
        first_pool_size: int | None,
        first_pool_stride: int | None,
        block_sizes: Sequence[int],
        block_strides: Sequence[int],
        resnet_version: int = DEFAULT_VERSION,
        data_format: str | None = None,
        dtype: Any = tf.float32,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 1)
        if resnet_version not in _VERSIONS:
            raise ValueError(
                "resnet_version must be 1 (He et al. 2015) or 2 "
                f"(He et al. 2016), not {resnet_version!r}"
            )
        if data_format is None:
            data_format = "channels_last"
            if tf.config.get_visible_devices("GPU"):
                data_format = "channels_first"
        if data_format not in _FORMATS:
            raise ValueError(
                f"data_format must be one of {', '.join(_FORMATS)}, not {data_format!r}"
            )
        if tf.as_dtype(dtype) not in _DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(each.name for each in _DTYPES)}, not {dtype!r}"
            )
        if len(block_sizes) != len(block_strides):
            raise ValueError(
                "block_strides must have one number for each of the "
                f"{len(block_sizes)} stages, not {block_strides}"
            )
        self.resnet_size, self.resnet_version = resnet_size, resnet_version
        self.data_format, self.dtype = data_format, tf.as_dtype(dtype)
        self.pool_size, self.pool_stride = first_pool_size, first_pool_stride
        self.stem = Convolution(3, num_filters, kernel_size, conv_stride, data_format)
        self.stem_norm: BatchNorm | None = None
        # Version 2 activates inside its blocks, before each convolution.
        if resnet_version == 1:
            self.stem_norm = BatchNorm(num_filters, data_format)
        width = num_filters
        self.blocks: list[Block] = []
        for stage, (blocks, strides) in enumerate(zip(block_sizes, block_strides, strict=True)):
            filters = num_filters * 2**stage
            for _ in range(blocks):
                is_first = not self.blocks
                block = Block(
                    width, filters, strides, bottleneck, resnet_version, is_first, data_format
                )
                self.blocks.append(block)
                width = block.width
                # Only the first block of a stage has its strides.
                strides = 1
        self.final_norm: BatchNorm | None = None
        # The last block of version 2 ends with an addition, which nothing has normalized yet.
        if resnet_version == 2:
            self.final_norm = BatchNorm(width, data_format)
        # Variance 1/(fan in), as in the networks for PyTorch.
        self.weights = tf.Variable(
            lambda: tf.random.normal((width, num_classes), stddev=1 / math.sqrt(width)),
            name="dense/kernel",
        )
        self.bias = tf.Variable(lambda: tf.zeros(num_classes), name="dense/bias")

    def __call__(self, inputs: Any, training: Any) -> Any:
        """Return the class scores before the softmax.

        Args:
            inputs: Images, shape (batch, height, width, 3).
            training: True to normalize by the batch and to update the running statistics; a bool,
                or a bool tensor.

        Returns:
            Logits, float32 of shape (batch, num_classes).
        """
        x = tf.cast(inputs, self.dtype)
        if self.data_format == "channels_first":
            x = tf.transpose(x, [0, 3, 1, 2])
        x = self.stem(x)
        if self.stem_norm is not None:
            x = tf.nn.relu(self.stem_norm(x, training))
        if self.pool_size:
            layout = _layout(self.data_format)
            x = tf.nn.max_pool2d(
                x, self.pool_size, self.pool_stride or 1, "SAME", data_format=layout
            )
        for block in self.blocks:
            x = block(x, training)
        if self.final_norm is not None:
            x = tf.nn.relu(self.final_norm(x, training))
        image_axes = [2, 3]
        if self.data_format == "channels_last":
            image_axes = [1, 2]
        features = tf.reduce_mean(x, axis=image_axes)
        # The scores are in float32 also if the network computes in half precision, because a loss
        # needs the digits.
        return tf.matmul(tf.cast(features, tf.float32), self.weights) + self.bias


class Cifar10Model(Model):
    """A ResNet for CIFAR: three stages of widths 16, 32 and 64 (He et al. 2015, section 4.2).

    ResNet-20 of version 1 with 10 classes has 272,474 trainable parameters.

    Args:
        resnet_size: Number of layers with weights: 6n + 2, for example 20, 32, 44, 56 or 110.
        data_format: See :class:`Model`.
        num_classes: Number of classes, at least 1.
        resnet_version: 1 or 2.
        dtype: See :class:`Model`.

    Raises:
        ValueError: An argument is not one of the values listed above.

    Example:
        >>> model = Cifar10Model(20, resnet_version=1)
        >>> sum(math.prod(variable.shape) for variable in model.trainable_variables)
        272474
        >>> model(tf.zeros((2, 32, 32, 3)), training=False).shape
        TensorShape([2, 10])
    """

    def __init__(
        self,
        resnet_size: int,
        data_format: str | None = None,
        num_classes: int = 10,
        resnet_version: int = DEFAULT_VERSION,
        dtype: Any = tf.float32,
    ) -> None:
        if resnet_size < 8 or (resnet_size - 2) % 6:
            raise ValueError(
                "resnet_size must be 6n + 2 with n >= 1 "
                f"(8, 14, 20, 32, 44, 56, ...), not {resnet_size}"
            )
        blocks = (resnet_size - 2) // 6
        super().__init__(
            resnet_size,
            bottleneck=False,
            num_classes=num_classes,
            num_filters=16,
            kernel_size=3,
            conv_stride=1,
            first_pool_size=None,
            first_pool_stride=None,
            block_sizes=[blocks] * 3,
            block_strides=[1, 2, 2],
            resnet_version=resnet_version,
            data_format=data_format,
            dtype=dtype,
        )


def conv2d_fixed_padding(
    inputs: Any, filters: int, kernel_size: int, strides: int, data_format: str
) -> Any:
    """Convolve with new weights and without a bias; each call in a graph adds a layer.

    Args:
        inputs: Images in the layout of ``data_format``, whose number of channels is known.
        filters: Output channels.
        kernel_size: Size of the kernel, odd.
        strides: Stride in both directions.
        data_format: ``"channels_last"`` or ``"channels_first"``.

    Returns:
        The result. The padding is that of :func:`fixed_padding`.

    Raises:
        RuntimeError: The call is not in a graph, so its new variables would be lost.
    """
    _check_in_graph("conv2d_fixed_padding")
    width_in = _channels(inputs, data_format)
    return Convolution(width_in, filters, kernel_size, strides, data_format)(inputs)


def batch_norm(inputs: Any, training: Any, data_format: str) -> Any:
    """Normalize a batch with new weights and running statistics; each call in a graph adds a layer.

    Args:
        inputs: Images in the layout of ``data_format``, whose number of channels is known.
        training: True to normalize by the batch and to update the running statistics; a bool, or a
            bool tensor.
        data_format: ``"channels_last"`` or ``"channels_first"``.

    Returns:
        The normalized batch. If ``training`` is True, it depends on the update of the running
        statistics.

    Raises:
        RuntimeError: The call is not in a graph, so its new variables would be lost.
    """
    _check_in_graph("batch_norm")
    return BatchNorm(_channels(inputs, data_format), data_format)(inputs, training)


def block_layer(
    inputs: Any,
    filters: int,
    bottleneck: bool,
    block_fn: Callable[..., Any],
    blocks: int,
    strides: int,
    training: Any,
    name: str,
    data_format: str,
) -> Any:
    """Chain the blocks of one stage; only the first projects its shortcut and has the strides.

    Args:
        inputs: Images in the layout of ``data_format``.
        filters: Channels of the first convolution of each block.
        bottleneck: True if a block ends with four times as many channels.
        block_fn: Add one block: called ``(inputs, filters, training, projection_shortcut, strides,
            data_format)``. The projection is a function of the input, or None for the identity.
        blocks: Number of blocks.
        strides: Stride of the first block.
        training: Passed to ``block_fn``.
        name: Name of the result.
        data_format: ``"channels_last"`` or ``"channels_first"``.

    Returns:
        The output of the last block.
    """
    width = 4 * filters if bottleneck else filters

    def projection_shortcut(x: Any) -> Any:
        return conv2d_fixed_padding(x, width, 1, strides, data_format)

    x = block_fn(inputs, filters, training, projection_shortcut, strides, data_format)
    for _ in range(1, blocks):
        x = block_fn(x, filters, training, None, 1, data_format)
    return tf.identity(x, name)


def _layout(data_format: str) -> str:
    return "NHWC" if data_format == "channels_last" else "NCHW"


def _channels(inputs: Any, data_format: str) -> int:
    return int(inputs.shape[-1 if data_format == "channels_last" else 1])


def _check_in_graph(function: str) -> None:
    if tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"{function} must be called in a graph, not eagerly, because each call creates "
            "variables: call it within `with tf.Graph().as_default():`, or use Cifar10Model"
        )
