"""Settings of a TensorFlow process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_int

__all__ = ["default_session_config", "set_threads"]


def default_session_config(
    tf_allow_growth: bool, tf_log_device_placement: bool, tf_allow_soft_placement: bool
) -> Any:
    """Return the configuration of a session (``tf.compat.v1.Session(config=...)``).

    Args:
        tf_allow_growth: True to take the memory of a GPU as it is needed, and not at once.
        tf_log_device_placement: True to log the device of each operation.
        tf_allow_soft_placement: True to run an operation on the CPU if it cannot run on the
            requested device.

    Returns:
        A ``tf.compat.v1.ConfigProto``.

    Example:
        >>> default_session_config(True, False, True).gpu_options.allow_growth
        True
    """
    config = tf.compat.v1.ConfigProto(
        log_device_placement=tf_log_device_placement, allow_soft_placement=tf_allow_soft_placement
    )
    config.gpu_options.allow_growth = tf_allow_growth
    return config


def set_threads(threads: int) -> None:
    """Set the number of threads in which this process computes. Call it before the first operation.

    TensorFlow does not read ``OMP_NUM_THREADS``. Without this call, each of several workers on a
    machine would compute in as many threads as the machine has cores.

    Args:
        threads: Number of threads, at least 1.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    check_int("threads", threads)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
