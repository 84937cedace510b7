"""Metrics for TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_int

__all__ = ["TopKAccuracy", "topk_accuracy_with_logits"]


def topk_accuracy_with_logits(logits: Any, labels: Any, k: int = 1) -> Any:
    """Return the percentage of samples whose class is among the k highest scores.

    Args:
        logits: Scores, float of shape (batch, classes).
        labels: Classes, integers of shape (batch,), or one-hot of shape (batch, classes).
        k: Number of scores that count, at least 1.

    Returns:
        The percentage, a float32 tensor without dimensions.

    Raises:
        ValueError: ``k`` is below 1.

    Example:
        >>> float(topk_accuracy_with_logits([[0.1, 0.9], [0.8, 0.2]], [1, 1]))
        50.0
    """
    check_int("k", k)
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank == 2:
        labels = tf.argmax(labels, axis=1)
    is_hit = tf.math.in_top_k(tf.cast(labels, tf.int64), tf.cast(logits, tf.float32), k)
    return 100 * tf.reduce_mean(tf.cast(is_hit, tf.float32))


class TopKAccuracy:
    """The accuracy of a batch, as an operation of a graph.

    Args:
        logits: As in :func:`topk_accuracy_with_logits`.
        labels: As in :func:`topk_accuracy_with_logits`.
        topk: Number of scores that count.

    Attributes:
        metric_op: The percentage, a tensor.
        size: Number of samples in the batch, a tensor.
    """

    def __init__(self, logits: Any, labels: Any, topk: int = 1) -> None:
        self.topk = topk
        self.metric_op = topk_accuracy_with_logits(logits, labels, topk)
        self.size = tf.shape(logits)[0]

    @property
    def name(self) -> str:
        """Return the name of the metric, ``"Prec@k"``."""
        return f"Prec@{self.topk}"
