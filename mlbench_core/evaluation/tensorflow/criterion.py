"""Losses for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_finite_at_least_0

__all__ = ["softmax_cross_entropy_with_logits_v2_l2_regularized"]


def softmax_cross_entropy_with_logits_v2_l2_regularized(
    logits: Any, labels: Any, l2: float, loss_filter_fn: Callable[[str], bool]
) -> Any:
    r"""Return the mean cross-entropy of a batch, with an L2 penalty on the variables of the graph.

    .. math:: \frac{1}{N} \sum_i H(y_i, \mathrm{softmax}(z_i)) + \frac{l_2}{2} \sum_{w} \|w\|_2^2

    Args:
        logits: Scores before the softmax, float of shape (batch, classes).
        labels: One-hot classes or probabilities, shape (batch, classes).
        l2: Factor of the penalty, at least 0.
        loss_filter_fn: Called with the name of each trainable variable of the graph. Variables for
            which it returns True are penalized. In the models of this library, those of batch norm
            have ``batch_normalization`` in their names.

    Returns:
        The loss, a tensor without dimensions.

    Raises:
        ValueError: ``l2`` is negative, or above 0 without variables in the default graph, as in
            eager mode.
    """
    check_finite_at_least_0("l2", l2)
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    if l2 == 0:
        return loss
    variables = tf.compat.v1.trainable_variables()
    if not variables:
        raise ValueError(
            f"l2 must be 0 in a graph without variables, not {l2}: build the model in the same "
            "graph, or add the penalty of your variables yourself"
        )
    penalties = []
    for variable in variables:
        if loss_filter_fn(variable.name):
            penalties.append(tf.nn.l2_loss(tf.cast(variable, tf.float32)))
    if not penalties:
        return loss
    return loss + l2 * tf.add_n(penalties)
