"""CIFAR-10 for TensorFlow."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mlbench_core.dataset.imagerecognition.arrays import ArrayBatches, cifar10_arrays

__all__ = ["DatasetCifar"]

_NAMES = ("cifar-10", "cifar10")
_CLASSES = 10


class _GraphBatches(NamedTuple):
    """The batches of a graph, and the operations that begin a round of training or validation."""

    train_init_op: Any
    validation_init_op: Any
    inputs: Any
    labels: Any
    training: Any


class DatasetCifar:
    """The batches of CIFAR-10 for one worker, for a graph with a session, or for eager mode.

    Images, augmentation and the parts of the workers are those of task 1a: 4 pixels of zero
    padding, a random 32x32 crop, random mirroring, and normalization by channel. Each worker trains
    on its own part, and validates on all test images. Every round of training is another epoch,
    with another order and other crops, which depend only on the seed, the rank and the number of
    the epoch.

    A graph reads ``inputs``, ``labels`` and ``training`` after it has run ``train_init_op`` or
    ``validation_init_op``. They exist only if the object is used within a graph. In eager mode,
    iterate over :meth:`input_fn`.

    Args:
        dataset: ``"cifar-10"``.
        dataset_root: Folder of the files. Missing files are downloaded (162 MB).
        batch_size: Images per batch.
        world_size: Number of workers.
        rank: Rank of this worker.
        seed: Seed of order and augmentation.
        tf_dtype: Type of the images.

    Attributes:
        num_batches_per_epoch_for_train: Number of training batches of this worker.
        num_batches_per_epoch_for_eval: Number of validation batches.

    Raises:
        ValueError: ``dataset`` is another one.
        DatasetError: The files are damaged.
        DownloadError: The download failed.
    """

    def __init__(
        self,
        dataset: str,
        dataset_root: str | os.PathLike[str],
        batch_size: int,
        world_size: int,
        rank: int,
        seed: int,
        tf_dtype: Any = tf.float32,
    ) -> None:
        if dataset not in _NAMES:
            raise ValueError(f"dataset must be one of {', '.join(_NAMES)}, not {dataset!r}")
        self.batch_size, self.world_size, self.rank, self.seed = batch_size, world_size, rank, seed
        self.tf_dtype = tf.as_dtype(tf_dtype)
        self._arrays = {
            True: cifar10_arrays(dataset_root, True, download=True),
            False: cifar10_arrays(dataset_root, False, download=True),
        }
        self._epochs = itertools.count()
        self.num_batches_per_epoch_for_train = len(self._batches(True, world_size, rank))
        self.num_batches_per_epoch_for_eval = len(self._batches(False, 1, 0))

    def _batches(self, is_train: bool, num_shards: int, shard_index: int) -> ArrayBatches:
        return ArrayBatches(
            self._arrays[is_train],
            self.batch_size,
            train=is_train,
            rank=shard_index,
            world_size=num_shards,
            seed=self.seed,
        )

    def input_fn(
        self, is_train: bool, repeat_count: int = -1, num_shards: int = 1, shard_index: int = 0
    ) -> Any:
        """Return batches as a ``tf.data.Dataset``.

        Args:
            is_train: True for augmented training images in random order, False for validation
                images.
            repeat_count: Number of epochs; -1 for no limit.
            num_shards: Number of parts of the images.
            shard_index: The part to return.

        Returns:
            Pairs of images, shape (batch, 32, 32, 3) and type ``tf_dtype``, and one-hot classes,
            float32 of shape (batch, 10). The last batch of an epoch may be smaller.
        """
        batches = self._batches(is_train, num_shards, shard_index)
        one_hot = np.eye(_CLASSES, dtype=np.float32)

        def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            rounds: Iterable[int] = itertools.count()
            if repeat_count != -1:
                rounds = range(repeat_count)
            for _ in rounds:
                epoch = 0
                if is_train:
                    # Each pass is another epoch, also one of a dataset that is initialized again.
                    epoch = next(self._epochs)
                for images, labels in batches.epoch(epoch):
                    yield images, one_hot[labels]

        shape = self._arrays[is_train].images.shape[1:]
        signature = (
            tf.TensorSpec((None, *shape), tf.float32),
            tf.TensorSpec((None, _CLASSES), tf.float32),
        )
        data = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return data.map(lambda images, labels: (tf.cast(images, self.tf_dtype), labels))

    # At the first use, because in eager mode there is no graph for its operations.
    @functools.cached_property
    def _graph(self) -> _GraphBatches:
        if tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError(
                "train_init_op, validation_init_op, inputs, labels and training must be read "
                "in a graph, not eagerly: create and use the data set within "
                "`with tf.Graph().as_default():`, or iterate over input_fn()"
            )
        training = self.input_fn(True, 1, self.world_size, self.rank)
        validation = self.input_fn(False, 1)
        # Each batch has a flag for training, so that no session has to feed it.
        training = training.map(lambda images, labels: (images, labels, tf.constant(True)))
        validation = validation.map(lambda images, labels: (images, labels, tf.constant(False)))
        iterator = tf.compat.v1.data.Iterator.from_structure(
            tf.compat.v1.data.get_output_types(training),
            tf.compat.v1.data.get_output_shapes(training),
        )
        train_init_op = iterator.make_initializer(training)
        validation_init_op = iterator.make_initializer(validation)
        return _GraphBatches(train_init_op, validation_init_op, *iterator.get_next())

    @property
    def train_init_op(self) -> Any:
        """Return the operation that begins an epoch of training, after which the batches end."""
        return self._graph.train_init_op

    @property
    def validation_init_op(self) -> Any:
        """Return the operation that begins a validation of all images, after which batches end."""
        return self._graph.validation_init_op

    @property
    def inputs(self) -> Any:
        """Return the images of the next batch, a tensor."""
        return self._graph.inputs

    @property
    def labels(self) -> Any:
        """Return the one-hot classes of the next batch, a tensor."""
        return self._graph.labels

    @property
    def training(self) -> Any:
        """Return a bool tensor that is True in training and False in validation."""
        return self._graph.training
