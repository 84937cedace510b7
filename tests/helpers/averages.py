"""Hear what workers average by sends and receives, as one hears the calls of a backend's collective operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mlbench_core.aggregation.pytorch import direct
from mlbench_core.distributed.pytorch import process_groups


@contextlib.contextmanager
def hearing_averages(hear: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call a function with every message that is averaged in the block. All workers enter the block together."""
    process_groups.is_on_one_machine()  # so that the comparison of the machines is not heard in the block
    original = direct.average

    def average(messages: Sequence[Tensor], *args: Any) -> None:
        for message in messages:
            hear(message)
        original(messages, *args)

    direct.average = average
    try:
        yield
    finally:
        direct.average = original
