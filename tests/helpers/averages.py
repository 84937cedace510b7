"""Record the messages that workers average by sends and receives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from mlbench_core.aggregation.pytorch import direct
from mlbench_core.distributed.pytorch import process_groups


@contextlib.contextmanager
def recording_averages(record: Callable[[Tensor], Any]) -> Iterator[None]:
    """Call a function with every message that is averaged in the block. All workers enter the block together."""
    process_groups.is_on_one_machine()  # so that the comparison of machines is not recorded
    original = direct.average

    def average(messages: Sequence[Tensor], *args: Any) -> None:
        for message in messages:
            record(message)
        original(messages, *args)

    with mock.patch.object(direct, "average", average):
        yield
