"""Which errors count as those of a collective operation, and whose they remain otherwise."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.distributed.pytorch import lost_workers, process_groups
from mlbench_core.distributed.pytorch.lost_workers import introduce, naming_lost_workers
from mlbench_core.errors import WorkerError
from mlbench_core.optim.pytorch import CentralizedSGD
from tests.helpers.ranks import run_ranks

TEXTS = (
    "the loader timed out",
    "Connection closed by peer",
    "no such key in the store",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer",
    "NCCL error in my notebook",
)
"""What a user's own error may say; each was once taken for a lost worker."""


def own_errors() -> list[Callable[[], None]]:
    """Functions that raise an error of the user's own, in several ways."""

    def raising(text: str) -> Callable[[], None]:
        def fail() -> None:
            raise RuntimeError(text)

        return fail

    def from_another() -> None:
        try:
            raise ConnectionResetError("Connection reset by peer")
        except OSError as error:
            raise RuntimeError("connection to my data base timed out") from error

    def again() -> None:
        try:
            raise RuntimeError("socket timed out")
        except RuntimeError:
            raise

    def by_a_loader() -> None:
        list(torch.utils.data.DataLoader(Failing()))

    return [*map(raising, TEXTS), from_another, again, by_a_loader]


class Failing(torch.utils.data.Dataset[int]):
    """A data set that cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("connection timed out")


def meet_errors(rank: int, world_size: int) -> list[tuple[str, str, str]]:
    """Rank 0 meets errors of its own, then two of a worker that is gone: their types, texts and
    last calls."""
    lost_workers.SILENCE_S = 0.1
    introduce()
    with naming_lost_workers():
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        return []
    found = []

    def collective() -> None:
        dist.all_reduce(torch.ones(1))

    def waited_for() -> None:
        dist.all_reduce(torch.ones(1), async_op=True).wait()

    for fail in (*own_errors(), collective, waited_for):
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(naming_lost_workers())
                fail()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, WorkerError) else error
            place = "".join(traceback.format_tb(cause.__traceback__)) if cause is not None else ""
            found.append(
                (
                    type(error).__name__,
                    str(error),
                    fail.__name__ if f"in {fail.__name__}" in place else place,
                )
            )
    return found


def test_only_failures_of_collectives_are_those_of_a_lost_worker() -> None:
    own, lost = slice(None, -2), slice(-2, None)
    found = run_ranks(2, meet_errors, timeout_s=120)[0]
    assert [name for name, _, _ in found[own]] == ["RuntimeError"] * len(found[own])
    assert [text for _, text, _ in found[own]][: len(TEXTS)] == list(TEXTS)
    assert [name for name, _, _ in found[lost]] == ["WorkerError"] * 2
    assert all("the backend says: " in text for _, text, _ in found[lost])
    assert [place for _, _, place in found] == ["fail"] * len(TEXTS) + [
        "from_another",
        "again",
        "by_a_loader",
        "collective",
        "waited_for",
    ]


def test_a_failure_of_a_store_of_the_users_own_is_none_of_a_collective() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError) as raised:
        store.wait(["nothing"], datetime.timedelta(milliseconds=1))
    assert not lost_workers.is_failed_communication(raised.value)


def nested(rank: int, world_size: int) -> tuple[bool, str]:
    """Rank 0 loses the other within two places that name lost workers, and catches it as scripts of
    3.0 do."""
    lost_workers.SILENCE_S = 0.1
    introduce()
    if rank == 1:
        return False, ""
    try:
        with naming_lost_workers(), naming_lost_workers():
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return isinstance(error, WorkerError), str(error)
    return False, ""


def test_a_lost_worker_is_a_runtime_error_and_is_named_once() -> None:
    is_named, text = run_ranks(2, nested, timeout_s=120)[0]
    assert is_named
    assert text.count("the backend says: ") == 1


def test_a_worker_that_notices_the_loss_and_ends_meanwhile_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, lost = dist.HashStore(), 2

    def has_ended(rank: int) -> bool:
        if rank != lost:
            store.set(lost_workers._key("noticed", rank), "1")
        return True

    monkeypatch.setattr(lost_workers.process_groups, "store", lambda: store)
    monkeypatch.setattr(lost_workers.process_groups, "world_size", lambda: 4)
    monkeypatch.setattr(lost_workers.process_groups, "rank", lambda: 3)
    monkeypatch.setattr(lost_workers._known, "has_ended", has_ended)
    assert lost_workers._who_is_lost() == "lost worker 2"


def lose_worker_1(rank: int, world_size: int) -> tuple[int, list[list[int]], str]:
    """Workers 0 and 1 take a step as a group, and worker 1 ends. A worker 2 introduces itself only
    after that. Returns the process id, the ranks known after the step and at the end, the error."""
    lost_workers.SILENCE_S = 60  # an ended process is named at once
    group = dist.new_group([0, 1]) if world_size > 2 else None
    store = process_groups.store()
    if rank == 2:
        store.wait(["found"])
        introduce()
        store.set("introduced", "")
        store.wait(["read"])
        return os.getpid(), [], ""
    model = nn.Linear(2, 1)
    aggregation = AllReduceAggregation(process_group=group)
    optimizer = CentralizedSGD(2, model, lr=0.1, aggregation=aggregation)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    known, text = [sorted(lost_workers._known.records)], ""
    if rank == 1:
        return os.getpid(), known, text
    try:
        optimizer.step()
    except WorkerError as error:
        text = str(error)
    store.set("found", "")
    if world_size > 2:
        store.wait(["introduced"])
        lost_workers.read_records()
        known.append(sorted(lost_workers._known.records))
        store.set("read", "")
    return os.getpid(), known, text


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_process_and_the_host_of_a_lost_worker_are_named(world_size: int) -> None:
    (_, known, text), (pid, *_), *_ = run_ranks(world_size, lose_worker_1, timeout_s=120)
    assert text.startswith(f"lost worker 1 (process {pid} on {socket.gethostname()}); the backend")
    assert known == [[0, 1], [0, 1, 2]][: world_size - 1]
