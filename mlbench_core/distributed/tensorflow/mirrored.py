"""Connect workers through ``tf.distribute.MultiWorkerMirroredStrategy``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mlbench_core.distributed import environment
from mlbench_core.distributed.worker_addresses import worker_addresses
from mlbench_core.errors import WorkerError

__all__ = ["MirroredWorkers"]

_CHUNK_BYTES = 1 << 20


class MirroredWorkers:
    """The workers of a run, each with a replica of the variables, in a TensorFlow strategy.

    Variables that are created in ``strategy.scope()`` are equal on all workers: their first values
    are those of rank 0, and an update must be the same everywhere. The messages of this class
    average gradients and combine numbers. Every worker must send the same messages in the same
    order.

    The list of the workers is not read from ``TF_CONFIG``. The workers exchange it at the address
    of rank 0, which every launcher gives them.

    Args:
        place: This worker's place.
        timeout_s: Seconds to wait for the other workers, at the start and in each message.

    Attributes:
        strategy: The ``tf.distribute.MultiWorkerMirroredStrategy``.
        rank: This worker's rank.
        size: Number of workers.

    Raises:
        WorkerError: A worker did not arrive in time. Each message raises it too if a worker was
            lost.

    Example:
        >>> workers = MirroredWorkers(environment.Place(rank=0, world_size=1), timeout_s=10)
        >>> workers.sum([1, 2])
        [1, 2]
    """

    def __init__(self, place: environment.Place, timeout_s: float) -> None:
        self.rank, self.size = place.rank, place.world_size
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
        if self.size == 1:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        else:
            # The port stays reserved until the server of the strategy listens on it.
            with worker_addresses(place, timeout_s) as addresses:
                cluster = tf.train.ClusterSpec({"worker": addresses})
                resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                    cluster, task_type="worker", task_id=self.rank, rpc_layer="grpc"
                )
                self.strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        # One function for each dtype and shape: a single one for all would
        # warn that it is traced again.
        self._all_reduces: dict[tuple[Any, ...], Any] = {}

    def _all_reduce(self, tensor: Any) -> Any:
        def add(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            # The argument of a function has no device, and the strategy needs one. The copy is on
            # that of the replica.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        return self.strategy.run(add, args=(tensor,))

    def all_reduce(self, tensor: Any) -> Any:
        """Return the sum of a tensor over all workers.

        Args:
            tensor: A tensor with the same dtype and shape on every worker.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self.size == 1:
            return tensor
        kind = (tensor.dtype, *tensor.shape)
        if kind not in self._all_reduces:
            self._all_reduces[kind] = tf.function(self._all_reduce)
        with _lost_workers():
            return self._all_reduces[kind](tensor)

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of integers over all workers, one for each of the numbers."""
        return list(map(int, self.all_reduce(tf.constant(numbers, tf.int64)).numpy()))

    def broadcast(self, content: bytes, sender: int) -> bytes:
        """Return the content that the sender passed.

        Args:
            content: Any bytes; those of the other workers do not count.
            sender: Rank of the sender.
        """
        if self.rank != sender:
            content = b""
        (size,) = self.sum([len(content)])
        received = bytearray()
        # A sum in which all others add zeros. Each chunk has the same shape, because
        # each new shape costs a trace.
        for start in range(0, size, _CHUNK_BYTES):
            chunk = np.zeros(_CHUNK_BYTES, dtype=np.uint8)
            part = np.frombuffer(content[start : start + _CHUNK_BYTES], dtype=np.uint8)
            chunk[: len(part)] = part
            received += self.all_reduce(tf.constant(chunk.view(np.int32))).numpy().tobytes()
        return bytes(received[:size])


@contextlib.contextmanager
def _lost_workers() -> Iterator[None]:
    """Raise a WorkerError for the errors by which TensorFlow reports a lost worker."""
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.DeadlineExceededError,
        tf.errors.AbortedError,
    ) as error:
        # The message of TensorFlow contains a traceback of the graph, so it stays in the cause.
        raise WorkerError(
            "another worker was lost during a message of TensorFlow: "
            "read the log of the worker that ended first"
        ) from error
