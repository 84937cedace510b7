"""The rounds of an elastic run, by threads that share a store in memory."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from mlbench_core.distributed.pytorch.elastic import (
    FIRST_WORKERS_VARIABLE,
    LEAST_VARIABLE,
    STORE_VARIABLE,
    WORKER_VARIABLE,
    Membership,
    Round,
    Rounds,
)
from mlbench_core.errors import ConfigurationError, WorkerError
from mlbench_core.run_terms import PaidSamples

T = TypeVar("T")
QUICK = {"heartbeat_s": 0.02, "dead_after_s": 30.0}


@contextlib.contextmanager
def workers(count: int, **options: Any) -> Iterator[list[Membership]]:
    """Workers of one run, all alive."""
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:
        members = []
        for worker in range(count):
            one = Membership(store, worker, count, **{**QUICK, **options})
            members.append(stack.enter_context(one))
        yield members


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def agree(members: Sequence[Membership]) -> list[Round]:
    return together([lambda one=one: one.agree(tokens=10 + one.worker) for one in members])  # type: ignore[misc]


def commit(members: Sequence[Membership], round_: Round, sums: Sequence[bool]) -> list[bool]:
    calls = []
    for one, has_sum in zip(members, sums, strict=True):
        calls.append(lambda one=one, has_sum=has_sum: one.commit(round_, has_sum))
    return together(calls)  # type: ignore[arg-type]


def test_all_members_have_one_agreement_and_keep_their_group_while_they_commit() -> None:
    with workers(3) as members:
        first = agree(members)
        assert first == [Round(0, 0, (0, 1, 2), (), 0, 0, 33)] * 3
        assert commit(members, first[0], [True] * 3) == [True] * 3
        second = agree(members)
        assert second == [Round(1, 0, (0, 1, 2), (), 0, 1, 33)] * 3
        assert commit(members, second[0], [True, False, True]) == [False] * 3
        third = agree(members)
        assert third == [Round(2, 2, (0, 1, 2), (), 0, 1, 33)] * 3


def test_a_round_waits_for_the_least_number_of_workers() -> None:
    store = dist.HashStore()
    first = Membership(store, 0, 1, least=2, **QUICK)
    second = Membership(store, 1, 1, least=2, **QUICK)
    with first, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.agree)
        # Alone, the first one has the majority and is all that lived at the start.
        with second:
            assert second.agree().members == (0, 1)
        assert waiting.result(60).members == (0, 1)


def test_a_living_worker_that_does_not_ask_is_left_out_after_a_while() -> None:
    with workers(3, wait_s=0.2) as members:
        rounds = agree(members[:2])
        assert [one.members for one in rounds] == [(0, 1)] * 2
        assert commit(members[:2], rounds[0], [True] * 2) == [True] * 2
        # It missed a round, so it gets the state of another, and the tokens of the lost steps do
        # not count. The other two would begin the next round at once, so it asks before them. On a
        # slow machine one of these may ask late, so the others wait longer.
        for one in members:
            one.wait_s = 60.0
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(members[2].agree, 12)
            while members[2]._read("ask/2") in (None, [0, 0, 0, 12]):
                time.sleep(0.01)
            rounds = [*agree(members[:2]), late.result(60)]
        assert rounds == [Round(1, 1, (0, 1, 2), (2,), 0, 1, 21)] * 3


def test_a_worker_with_fewer_steps_at_the_same_number_of_commits_is_behind() -> None:
    with workers(3) as members:
        steps = (4, 6, 6)
        pairs = zip(members, steps, strict=True)
        rounds = together([lambda one=one, own=own: one.agree(10, own) for one, own in pairs])  # type: ignore[misc]
        assert rounds == [Round(0, 0, (0, 1, 2), (0,), 1, 0, 20)] * 3


def test_a_worker_that_died_before_it_had_a_name_hides_no_later_one() -> None:
    store = dist.HashStore()
    dist.PrefixStore("elastic", store).add("workers", 1)
    with contextlib.ExitStack() as stack:
        members = []
        for worker in range(2):
            members.append(stack.enter_context(Membership(store, worker, 2, **QUICK)))
        assert [one.members for one in agree(members)] == [(0, 1)] * 2
        assert Rounds(store).samples() is None


def test_a_minority_does_not_go_on_alone() -> None:
    # Without the rule, worker 0 would begin a round after wait_s, long before the others ask.
    with workers(4, wait_s=0.01) as members, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(members[0].agree)
        with contextlib.suppress(TimeoutError):
            waiting.result(0.3)
        # Worker 3 lives and never asks: three of four are a majority.
        assert [one.members for one in agree(members[1:3])] == [(0, 1, 2)] * 2
        assert waiting.result(60).members == (0, 1, 2)


def test_the_next_worker_writes_the_outcome_if_the_coordinator_is_gone() -> None:
    with workers(3) as members:
        rounds = agree(members)
        members[0].__exit__()
        assert commit(members[1:], rounds[0], [True] * 2) == [False] * 2
        assert [(one.rank, one.size) for one in members[1:]] == [(0, 2), (1, 2)]
        rounds = agree(members[1:])
        assert [one.members for one in rounds] == [(1, 2)] * 2


def test_a_member_that_is_gone_after_its_report_does_not_undo_the_round() -> None:
    with workers(2) as members:
        rounds = agree(members)
        members[0]._store.set("report/0", "[0, true]")
        members[0].__exit__()
        assert members[1].commit(rounds[0], has_sum=True)
        assert (members[1].rank, members[1].size, members[1].commits) == (0, 1, 1)


def test_a_worker_that_was_stopped_obeys_the_outcome_that_the_others_wrote() -> None:
    with workers(3) as members:
        rounds = agree(members)
        # The coordinator sleeps with the sum in its hands; the others took it for dead.
        members[0]._write_once("outcome/0", {"committed": False, "living": [1, 2]})
        assert commit(members, rounds[0], [True] * 3) == [False] * 3
        assert members[0].commits == 0


def test_a_worker_does_not_wait_for_a_round_after_the_end_of_the_run() -> None:
    with workers(2) as members:
        rounds = agree(members)
        assert commit(members, rounds[0], [True] * 2) == [True] * 2
        members[0].finish()
        with pytest.raises(WorkerError, match="the run ended with round 0, without worker 1"):
            members[1].agree()


def test_a_worker_that_starts_after_the_end_does_not_train_alone() -> None:
    store = dist.HashStore()
    with Membership(store, 0, 1, **QUICK) as first:
        assert first.commit(first.agree(), has_sum=True)
        first.finish()
    # Nobody else lives, so it would be enough for a round.
    with (
        Membership(store, 1, 1, **QUICK) as late,
        pytest.raises(WorkerError, match="the run ended with round 0, without worker 1"),
    ):
        late.agree()


def test_a_worker_whose_heartbeat_cannot_be_written_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("the connection is closed")

    monkeypatch.setattr(dist.HashStore, "clone", lambda store: Broken())
    monkeypatch.setattr(dist.PrefixStore, "clone", lambda store: Broken())
    with (
        Membership(dist.HashStore(), 0, 1, least=2, **QUICK) as member,
        pytest.raises(WorkerError, match=r"does not answer \(the connection is closed"),
    ):
        member.agree()


def test_the_number_of_a_worker_is_used_once() -> None:
    store = dist.HashStore()
    with (
        Membership(store, 0, 1, **QUICK),
        pytest.raises(ConfigurationError, match="worker must be a number that no worker"),
    ):
        Membership(store, 0, 1, **QUICK).__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": -1}, "worker"),
        ({"first_workers": 0}, "first_workers"),
        ({"least": 0}, "least"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"dead_after_s": 0.1}, "dead_after_s must be more than heartbeat_s"),
        ({"wait_s": 0.0}, "wait_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Membership(dist.HashStore(), **{"worker": 0, "first_workers": 1, **options})


def test_the_end_of_the_store_is_named() -> None:
    limit = datetime.timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=limit)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=limit)
    with Membership(store, 0, 1, **QUICK) as membership:
        del server
        with pytest.raises(WorkerError, match="the store in which the workers"):
            membership.agree()


def test_the_holder_of_the_store_sees_who_has_the_state() -> None:
    store = dist.HashStore()
    rounds = Rounds(store)
    assert (rounds.update(), rounds.pending(), rounds.commits) == ({}, set(), 0)
    with Membership(store, 0, 1, **QUICK) as first:
        round_ = first.agree()
        # It has begun, and is not committed.
        assert (rounds.update(), rounds.pending(), rounds.members) == ({}, {0}, set())
        assert first.commit(round_, has_sum=True)
        assert (rounds.update(), rounds.pending(), rounds.members) == ({0: 0}, set(), {0})
        with Membership(store, 1, 1, **QUICK) as joiner:
            second = together([first.agree, joiner.agree])[0]
            assert second.behind == (1,)
            assert commit([first, joiner], second, [True, False]) == [False, False]
            assert (rounds.update(), rounds.members) == ({}, {0})
            third = together([first.agree, joiner.agree])[0]
            assert commit([first, joiner], third, [True, True]) == [True, True]
            assert (rounds.update(), rounds.members, rounds.commits) == ({1: 1}, {0, 1}, 2)
    assert not rounds.restarted and not rounds.is_finished
    # A worker that has nothing of the rounds before, alone.
    with Membership(store, 2, 1, **QUICK) as other:
        assert other.commit(other.agree(), has_sum=True)
    assert (rounds.update(), rounds.restarted, rounds.commits) == ({2: 0}, True, 1)
    rounds.finish()
    assert rounds.is_finished


def test_samples_of_lost_rounds_and_of_the_dead_are_paid_but_not_useful() -> None:
    store = dist.HashStore()
    holder = Rounds(store)
    assert holder.samples() is None
    with contextlib.ExitStack() as stack:
        members = []
        for worker in range(2):
            members.append(stack.enter_context(Membership(store, worker, 2, **QUICK)))
        assert holder.samples() is None
        # Both count 10 and 11 in each of two rounds, and the first round is lost.
        for has_sum in (False, True):
            for one in members:
                one.counted += 10 + one.worker
            rounds = agree(members)
            commit(members, rounds[0], [True, has_sum])
        holder.update()
        assert holder.samples() == PaidSamples(useful=21, paid=42)
        # A worker without a next round: its heart tells what it has counted.
        members[1].counted += 5
        deadline = time.monotonic() + 60
        while holder.samples() != PaidSamples(21, 47) and time.monotonic() < deadline:
            time.sleep(0.01)
        # At its end, without waiting for a heartbeat.
        members[0].counted += 3
    samples = holder.samples()
    assert samples == PaidSamples(useful=21, paid=50)
    assert str(samples) == "42 % (21 of 50 samples)"


def test_the_membership_of_a_worker_is_in_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=f"{STORE_VARIABLE} must be set.* --elastic"):
        Membership.from_environment()
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE_VARIABLE, f"127.0.0.1:{holder.port}")
    monkeypatch.setenv(WORKER_VARIABLE, "4")
    monkeypatch.setenv(FIRST_WORKERS_VARIABLE, "3")
    with pytest.raises(ConfigurationError, match=f"{LEAST_VARIABLE} must be set"):
        Membership.from_environment()
    monkeypatch.setenv(LEAST_VARIABLE, "two")
    with pytest.raises(ConfigurationError, match=f"three numbers, not .*{LEAST_VARIABLE}=two"):
        Membership.from_environment()
    monkeypatch.setenv(LEAST_VARIABLE, "2")
    monkeypatch.setenv(STORE_VARIABLE, "127.0.0.1:99999")
    with pytest.raises(ConfigurationError, match="must be an address HOST:PORT"):
        Membership.from_environment()
    monkeypatch.setenv(STORE_VARIABLE, f"127.0.0.1:{holder.port}")
    with Membership.from_environment(wait_s=7.0) as membership:
        assert (membership.worker, membership.first_workers, membership.least) == (4, 3, 2)
        assert membership.wait_s == 7.0
        assert not membership.has_begun()
        Rounds(holder).finish()
        with pytest.raises(WorkerError, match="without worker 4"):
            membership.agree()
