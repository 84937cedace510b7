"""Sums through shared memory are right, whatever the order in which workers come, and say who is
missing."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from mlbench_core.aggregation.pytorch.transport import shared_memory
from mlbench_core.aggregation.pytorch.transport.shared_memory import Arena, SharedMemorySum
from mlbench_core.errors import BackendError
from tests.aggregation import shared_memory_workers as workers
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=some([3, 2]))
def results(request: pytest.FixtureRequest) -> Results:
    return run_ranks(request.param, workers.run_all)


@pytest.mark.parametrize("size", workers.SIZES)
@pytest.mark.parametrize("dtype", workers.DTYPES, ids=str)
def test_sums_are_right_and_the_same_on_all_workers(
    results: Results, size: int, dtype: torch.dtype
) -> None:
    first, *_ = results[0]["sums"][size, dtype]
    for result in results:
        ours, gloo, expected = result["sums"][size, dtype]
        assert ours.dtype == dtype
        assert torch.equal(ours, first)
        tolerance = 0 if dtype == torch.int64 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=64 * tolerance)
        if len(results) == 2:
            assert torch.equal(ours, gloo)


def test_any_number_of_messages_can_be_on_their_way(results: Results) -> None:
    """Also more than the sockets have room for."""
    assert [result["many_on_their_way"][1] for result in results] == [True] * len(results)
    assert results[0]["many_on_their_way"][0]


def test_memory_is_used_again(results: Results) -> None:
    """Six messages at most are in a worker's memory: its last three may not have been collected by
    all."""
    for result in results:
        assert 3 << 20 <= result["memory_is_used_again"] <= 8 << 20


def test_memory_is_not_used_again_before_all_have_read_it(results: Results) -> None:
    total = sum(range(1, len(results) + 1))
    for result in results:
        first, second = result["one_is_slow_to_collect"]
        assert first == [total] * 6
        assert second == [10 * total] * 6


def test_a_copy_gets_memory_of_its_own(results: Results) -> None:
    average = (len(results) - 1) / 2
    for result in results:
        for averages in result["copies"]:
            assert averages == [average, average + 1]


def test_weights_are_averaged_too(results: Results) -> None:
    for result in results:
        whole, by_layer, expected = result["weights_and_layers"]
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(by_layer, expected)


def test_messages_of_other_sizes_are_refused(results: Results) -> None:
    for rank, result in enumerate(results):
        other = 1 if rank == 0 else 0
        assert result["other_sizes"] == (
            f"worker {other} sends a message of {16 + 4 * other} bytes of float32 "
            f"where this worker sends one of {16 + 4 * rank} bytes of float32: all "
            "workers need the same model and settings"
        )


def test_messages_of_other_dtypes_are_refused(results: Results) -> None:
    assert (
        "8 bytes of float16 where this worker sends one of 8 bytes of bfloat16"
        in results[0]["other_dtypes"]
    )
    for result in results[1:]:
        assert (
            "8 bytes of bfloat16 where this worker sends one of 8 bytes of float16"
            in result["other_dtypes"]
        )


def test_who_is_done_has_told_all_that_others_need(results: Results) -> None:
    """Also where sockets were full: it may never look at shared memory again."""
    assert all(result["small_sockets"] > 0 for result in results)


def test_sums_are_waited_for_in_any_order(results: Results) -> None:
    total = sum(range(len(results)))
    assert [result["in_another_order"] for result in results] == [[total, 10 * total]] * len(
        results
    )


def test_too_many_open_files_are_called_so(results: Results) -> None:
    for result in results:
        assert "Too many open files" in result["too_many_files"]


def test_a_new_process_group_shares_anew(results: Results) -> None:
    for result in results:
        said, average = result["second_group"]
        assert said.startswith("this process has no process group")
        assert average == pytest.approx((len(results) - 1) / 2)


def test_who_does_not_come_in_time_is_named(results: Results) -> None:
    *others, late = results
    assert late["who_does_not_come"] == "no error"
    for result in others:
        assert (
            result["who_does_not_come"]
            == f"timed out: worker {len(others)} did not come within 1.5 s"
        )


def test_who_has_ended_is_named_at_once_though_its_children_live(results: Results) -> None:
    for result in results[:-1]:
        assert result["who_ends_while_a_child_goes_on"] == (
            f"connection closed by worker {len(results) - 1}",
            True,
        )


def test_nothing_stays_open(results: Results) -> None:
    assert [result["files_stay_open"] for result in results] == [0] * len(results)


def test_workers_of_different_machines_are_told_so(results: Results) -> None:
    for result in results:
        assert (
            f"worker {len(results) - 1} and worker 0 share no memory, since they run on"
            in result["other_machine"]
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network namespace")
def test_an_emulated_network_is_not_bypassed(results: Results) -> None:
    for result in results:
        assert "worker 1 and worker 0 share no memory" in result["other_network"]
        assert "different network namespaces" in result["other_network"]


# -- in one process
# --------------------------------------------------------------------------------------------


def test_memory_is_given_out_from_the_start() -> None:
    arena = Arena.make()
    first, second, third = (arena.reserve(size) for size in (100, 0, 1))
    assert (first, second, third) == (0, 128, 192)
    arena.release(first)
    assert arena.reserve(200) == 256
    assert arena.reserve(128) == 0
    arena.close()


def test_memory_grows_and_keeps_what_is_in_it() -> None:
    mine = Arena.make()
    theirs = Arena(os.dup(mine.descriptor))
    offset = mine.reserve(8)
    mine.view(offset, 2, torch.float32).fill_(3)
    assert theirs.view(offset, 2, torch.float32).tolist() == [3, 3]
    late = mine.reserve(5 << 20)
    mine.view(late, 10, torch.int64).fill_(7)
    assert theirs.view(late, 10, torch.int64).tolist() == [7] * 10
    assert mine.view(offset, 2, torch.float32).tolist() == [3, 3]
    for arena in (mine, theirs):
        arena.close()


def test_one_process_alone_has_nobody_to_share_with() -> None:
    with pytest.raises(
        BackendError, match=r"this process has no process group, .*: leave shared_memory out"
    ):
        SharedMemorySum()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(BackendError, match="need Linux: leave shared_memory out"):
        SharedMemorySum()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_recognised() -> None:
    with shared_memory._socket(5.0) as listener:
        listener.bind("\0mlbench-test-of-users")
        listener.listen(2)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect("\0mlbench-test-of-users")
                os._exit(0)
        stranger, _ = listener.accept()
        with stranger:
            assert not shared_memory._is_own_user(stranger)
        os.waitpid(child, 0)
        with shared_memory._socket(5.0) as connection:
            connection.connect("\0mlbench-test-of-users")
            own, _ = listener.accept()
            with own:
                assert shared_memory._is_own_user(own)
                assert shared_memory._is_own_user(connection)
