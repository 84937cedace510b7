"""Measuring collectives among real processes."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import measure_collectives as collectives
import pytest
import torch
import torch.distributed as dist
from latency import BUS_FACTORS, Measurement
from measure_collectives import COLLECTIVES, DTYPES, Collective, measure, why_not

from mlbench_core.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

PERIOD = collectives.PERIOD
SIZES = (1, 7, PERIOD, 2 * PERIOD + 5)


def measured_everything(rank: int, world_size: int) -> dict[str, Any]:
    """Every collective on every type and several sizes, and what each worker was told."""
    found: dict[str, Any] = {"measurements": [], "why_not": []}
    for name, kind in COLLECTIVES.items():
        for dtype in DTYPES.values():
            found["why_not"].append(why_not(name, dtype))
            for size in SIZES:
                elements = size * world_size if kind.is_cut else size
                found["measurements"].append(
                    measure(name, elements, dtype, repetitions=2, block_s=1e-6)
                )
    found["int16"] = why_not("all_reduce", torch.int16)
    return found


def agreed_counts(rank: int, world_size: int) -> dict[str, Any]:
    """Workers that see the clock differently agree on counts; barriers and operations are
    counted."""
    calls = {"barrier": 0, "all_reduce": 0, "_sequence": 0}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((dist, "barrier"), (dist, "all_reduce"), (collectives, "_sequence")):
            patch.setattr(module, name, counted(module, name, calls))
        plain = measure("all_reduce", 10, repetitions=5, block_s=1e-3)
        calls_of_plain = dict(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collectives,
            "_host_seconds",
            lambda operation, runs: fake_seconds(operation, runs, rank),
        )
        limited = measure("all_reduce", 10, repetitions=50, block_s=0.02, budget_s=0.4 * (1 + rank))
        least = measure("all_reduce", 10, repetitions=50, block_s=0.02, budget_s=0.0)
        one_way = measure("send_recv", 10, repetitions=3, block_s=0.02)
        fixed = measure("all_reduce", 10, repetitions=1, operations=7)
    return {
        "plain": plain,
        "calls": calls_of_plain,
        "limited": limited,
        "least": least,
        "one_way": one_way,
        "fixed": fixed,
    }


def counted(module: Any, name: str, calls: dict[str, int]) -> Any:
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def fake_seconds(operation: Collective, runs: int, rank: int) -> float:
    """Runs of 1 ms on worker 0, 2 ms on worker 1 and so on."""
    for _ in range(runs):
        operation.run()
    return 0.001 * (1 + rank) * runs


def wrong_reduction(rank: int, world_size: int) -> dict[str, Any]:
    """An all-reduce of float16 that errs in one element at the last worker."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = right(tensor, *args, **kwargs)
        if tensor.dtype == torch.float16 and rank == world_size - 1:
            tensor[-1] += 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", wrong)
        return {
            name: measure("all_reduce", 3 * PERIOD, dtype, repetitions=1).wrong_elements
            for name, dtype in DTYPES.items()
        }


def subgroup(rank: int, world_size: int) -> Any:
    """Workers 1 and 2 measure alone; the root of a broadcast is worker 1, and worker 3 stays
    out."""
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return None
    return [measure(name, 6, group=group, repetitions=2, block_s=1e-6) for name in COLLECTIVES]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    collectives.WARM_UP_S = 1e-3
    found = {
        "all": measured_everything(rank, world_size),
        "wrong": wrong_reduction(rank, world_size),
    }
    found["counts"] = agreed_counts(rank, world_size)
    if world_size == 4:
        found["subgroup"] = subgroup(rank, world_size)
    elif rank == 0:
        with pytest.raises(
            ValueError, match=r"at least 1 and a multiple of the 2 workers for all_gather, not 3"
        ):
            measure("all_gather", 3)
    return found


@functools.cache
def results_of(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(world_size, everything)


@pytest.fixture(params=some([2, 4]))
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return results_of(request.param)


def test_every_collective_is_right_for_every_size_and_type(results: list[dict[str, Any]]) -> None:
    measurements = results[0]["all"]["measurements"]
    assert len(measurements) == len(COLLECTIVES) * len(DTYPES) * len(SIZES)
    assert {m.wrong_elements for m in measurements} == {0}
    assert {m.backend for m in measurements} == {"gloo"}
    for m in measurements:
        assert (m.world_size, m.size_bytes) == (len(results), m.elements * DTYPES[m.dtype].itemsize)
        assert (m.repetitions, m.statistics.min_s > 0, m.bus_bandwidth > 0) == (2, True, True)
    assert results[0]["all"]["why_not"] == [None] * len(COLLECTIVES) * len(DTYPES)
    assert "Invalid scalar type" in results[0]["all"]["int16"]


def test_all_workers_are_told_the_same(results: list[dict[str, Any]]) -> None:
    for other in results[1:]:
        assert other["all"]["measurements"] == results[0]["all"]["measurements"]


def test_a_wrong_reduction_is_noticed(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["wrong"] == {"float32": 0, "float16": 1, "bfloat16": 0}


def test_workers_agree_on_counts_and_the_slowest_counts(results: list[dict[str, Any]]) -> None:
    slowest_s = 0.001 * len(results)
    for result in results:
        counts: dict[str, Measurement] = result["counts"]
        assert counts["limited"].operations == 0.02 / slowest_s
        assert counts["limited"].repetitions == 0.4 / 0.02
        assert counts["least"].repetitions == collectives.MIN_REPETITIONS
        assert counts["fixed"].operations == 7
        for seconds in counts["limited"].seconds:
            assert seconds == pytest.approx(slowest_s)
        assert counts["one_way"].statistics.p50_s == pytest.approx(slowest_s / 2)
        assert counts["one_way"].operations == 2 * 0.02 / slowest_s


def test_a_barrier_precedes_every_repetition_and_the_first_operations_do_not_count(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        counts, calls = result["counts"]["plain"], result["counts"]["calls"]
        assert calls["barrier"] == 5 + 1  # and one before the pilot
        # Values are made once to send and once to compare: making them before every barrier slowed
        # operations by 20 %.
        assert calls["_sequence"] == 1 + len(results)
        exchanges = (
            4  # the first time, the pilot's, and at the end the times and the wrong elements
        )
        uncounted = calls["all_reduce"] - exchanges - 5 * counts.operations
        assert uncounted >= 1 + collectives.WARM_UP_RUNS[0]


def test_a_subgroup_measures_alone() -> None:
    results = results_of(4)
    assert results[0]["subgroup"] is None
    assert [m.wrong_elements for m in results[1]["subgroup"]] == [0] * len(COLLECTIVES)
    assert {m.world_size for m in results[2]["subgroup"]} == {2}


def test_every_collective_has_a_bus_factor() -> None:
    assert set(COLLECTIVES) == set(BUS_FACTORS)


def test_values_are_exact_in_every_type() -> None:
    for workers in (2, 3, 256, 300):
        total = sum(collectives._sequence(rank, workers) for rank in range(workers))
        for dtype in DTYPES.values():
            assert torch.equal(torch.as_tensor(total).to(dtype).long(), total)
        assert len(torch.as_tensor(total).unique()) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"collective": "gossip"}, "one of all_reduce, .*, not 'gossip'"),
        ({"repetitions": 0}, "repetitions must be at least 1, not 0"),
        ({"operations": 0}, "operations must be at least 1, not 0"),
        ({"block_s": 0.0}, r"block_s must be finite and positive, not 0\.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(**{"collective": "all_reduce", "elements": 1, **arguments})


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="no process group"):
        measure("all_reduce", 1)


def test_one_worker_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="at least 2"):
            measure("all_reduce", 1)
        with pytest.raises(ValueError, match=r"elements must be at least 1 for all_reduce, not 0"):
            measure("all_reduce", 0)
    finally:
        dist.destroy_process_group()


def test_on_a_gpu_only_the_ends_of_a_block_are_marked_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of calls, with events that note them; that a GPU does what they say takes a GPU."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, other: Event) -> float:
            return 30.0

    class Operation:
        device = torch.device("cpu")

        def run(self) -> None:
            calls.append("run")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    assert collectives._cuda_seconds(Operation(), 3) == pytest.approx(0.03)  # type: ignore[arg-type]
    assert calls == ["record", "run", "run", "run", "record", "synchronize"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices for NCCL")
def test_nccl_on_two_gpus() -> None:
    for found in run_ranks(2, nccl_measurement):
        assert found.wrong_elements == 0
        assert (found.backend, found.device) == ("nccl", "cuda")


def nccl_measurement(rank: int, world_size: int) -> Measurement:
    torch.cuda.set_device(rank)
    return measure(
        "all_reduce",
        1000,
        device=f"cuda:{rank}",
        group=dist.new_group(backend="nccl"),
        repetitions=3,
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_tensors_of_a_gpu_over_gloo() -> None:
    for found in run_ranks(2, gloo_measurement_of_gpu_tensors):
        assert found.wrong_elements == 0
        assert (found.backend, found.device) == ("gloo", "cuda")
        assert found.statistics.min_s > 0


def gloo_measurement_of_gpu_tensors(rank: int, world_size: int) -> Measurement:
    return measure("all_reduce", 1000, device="cuda:0", repetitions=3)
