"""Record the messages of workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from mlbench_core.aggregation.pytorch.transport import pairwise


@contextlib.contextmanager
def recording_averages(record: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call a function with every message that is averaged in the block. All workers enter the block
    together."""
    pairwise.is_on_one_machine()  # so that the comparison of machines is not recorded
    original = pairwise.average

    def average(messages: Sequence[Tensor], *args: Any) -> None:
        for message in messages:
            record(message)
        original(messages, *args)

    with mock.patch.object(pairwise, "average", average):
        yield


@contextlib.contextmanager
def recording_collectives(record: Callable[[str, int], Any]) -> Iterator[None]:
    """Call a function with the name and the bytes of every collective in the block; averages count
    as all-reduces."""

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "batch_isend_irecv":
                record(
                    name,
                    sum(
                        transfer.tensor.nbytes for transfer in args[0] if transfer.op is dist.isend
                    ),
                )
            else:
                record(name, args[-1].nbytes)  # of all_gather, the first argument receives
            return original(*args, **kwargs)

        return call

    with (
        recording_averages(lambda message: record("all_reduce", message.nbytes)),
        contextlib.ExitStack() as stack,
    ):
        for name in ("all_reduce", "all_gather", "batch_isend_irecv"):
            stack.enter_context(mock.patch.object(dist, name, recorded(name, getattr(dist, name))))
        yield
