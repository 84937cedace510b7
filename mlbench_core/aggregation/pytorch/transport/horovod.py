"""The average over all workers, uncompressed, through Horovod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation, Transfer
from mlbench_core.errors import ConfigurationError, require

__all__ = ["AllReduceAggregationHVD"]


class AllReduceAggregationHVD(AllReduceAggregation):
    r"""Average over all workers, uncompressed, through Horovod instead of ``torch.distributed``.

    The result is that of
    :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation`: :math:`\frac{1}{d}
    \sum_{i=1}^{k} x_i` with :math:`d = k` or ``denom``. Horovod is an optional package and is
    started by its own launcher; call ``horovod.torch.init()`` before this.

    Args:
        world_size: Number of workers; None takes Horovod's.
        divide_before: Divide before the sum instead of after it, so that sums of half-precision
            numbers stay in range.
        use_cuda: See :class:`~mlbench_core.aggregation.pytorch.aggregation.Aggregation`.

    Raises:
        MissingDependencyError: Horovod is not installed. The message has the pip line.
        ConfigurationError: Horovod was not initialized.
        ValueError: ``world_size`` is not the number of workers that Horovod knows.

    Example:
        >>> from mlbench_core.errors import MissingDependencyError
        >>> try:
        ...     AllReduceAggregationHVD(world_size=1)
        ... except MissingDependencyError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        this needs the package 'horovod', which is not installed: pip install ...

    References:
        Sergeev and Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow.
        arXiv:1802.05799
    """

    def __init__(
        self, world_size: int | None, divide_before: bool = False, use_cuda: bool = False
    ) -> None:
        hvd = _horovod()
        if not hvd.is_initialized():
            raise ConfigurationError(
                "Horovod must be initialized: call horovod.torch.init() first, in a "
                "run started by horovodrun (or mpirun)"
            )
        if world_size is not None and world_size != hvd.size():
            raise ValueError(
                f"world_size is {world_size!r}, but Horovod has {hvd.size()} "
                f"worker(s): give {hvd.size()}, or None"
            )
        # None, because the base class would compare a number with the group of torch.distributed,
        # which a run of horovodrun does not have.
        super().__init__(None, divide_before=divide_before, use_cuda=use_cuda)
        self.world_size = int(hvd.size())

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        """Sum a tensor over the workers, in place. A sum of flags is positive if one of them is."""
        if self.world_size > 1:
            tensor.copy_(_horovod().allreduce(tensor, op=_horovod().Sum))
            self._count("all_reduce", self.world_size, tensor.nbytes)

    def compare_models(
        self,
        parameters: Mapping[str, Tensor] | None = None,
        pending: list[Callable[[], None]] | None = None,
    ) -> None:
        """Do nothing, because Horovod compares the names, shapes and dtypes of messages itself."""
        self.layout.note(parameters or {})
        self.layout.new.clear()

    def _goes_directly(self, tensor: Tensor) -> bool:
        """Return False, because Horovod sends all messages."""
        return False

    def start(self, message: Tensor, overlapped: bool = False) -> Transfer:
        """Sum a flat message over the workers."""
        message.copy_(_horovod().allreduce(message, op=_horovod().Sum))
        self._count("all_reduce", self.world_size, message.nbytes)
        return Transfer(message, message, work=None)

    def finish(self, transfer: Transfer) -> None:
        """Do nothing, because :meth:`start` has waited already."""


def _horovod() -> Any:
    """Return Horovod's module for torch, which is imported on first use."""
    return require("horovod.torch", "horovod")
