"""The reduction that runs during the backward pass gives what the plain one gives, whatever the
user does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.aggregation.pytorch.compression.power import PowerAggregation
from mlbench_core.aggregation.pytorch.transport.buckets import plan_buckets
from mlbench_core.optim.pytorch import CentralizedAdam, CentralizedSGD
from tests.aggregation import overlap_workers as workers
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

Results = list[dict[str, Any]]
AVERAGED_ONE_BY_ONE = ("several_passes", "never_clearing", "locally_after_a_pass")


@pytest.fixture(scope="module", params=some([2, 3]))
def results(request: pytest.FixtureRequest) -> Results:
    return run_ranks(request.param, workers.run_all)


def assert_same(left: Any, right: Any, *, exactly: bool) -> None:
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            assert a is b
        elif exactly:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", workers.WAYS)
@pytest.mark.parametrize("size", workers.BUCKET_SIZES)
def test_it_gives_what_the_plain_reduction_gives(results: Results, way: str, size: int) -> None:
    """With 2 workers to the last bit, unless passes are averaged one by one."""
    exactly = len(results) == 2 and way not in AVERAGED_ONE_BY_ONE
    for result in results:
        weights, gradients = result["ways"][way][size]
        plain_weights, plain_gradients = result["ways"][way]["plain"]
        assert_same(weights, plain_weights, exactly=exactly)
        assert_same(gradients, plain_gradients, exactly=exactly)
        assert_same(weights, results[0]["ways"][way][size][0], exactly=True)


@pytest.mark.parametrize("way", workers.WAYS)
def test_a_fused_update_gives_what_the_plain_one_gives(results: Results, way: str) -> None:
    exactly = len(results) == 2 and way not in AVERAGED_ONE_BY_ONE
    for result in results:
        plain, *overlapped = result["fused_ways"][way]
        for ours in overlapped:
            for values, expected in zip(ours, plain, strict=True):
                assert_same(values, expected, exactly=exactly)


@pytest.mark.parametrize("way", workers.WAYS)
@pytest.mark.parametrize("name", workers.SHARED)
def test_shared_memory_gives_what_the_backend_gives(results: Results, way: str, name: str) -> None:
    exactly = len(results) == 2 and (name == "at the end" or way not in AVERAGED_ONE_BY_ONE)
    for result in results:
        for values, expected in zip(
            result["shared_ways"][way][name], result["ways"][way]["plain"], strict=True
        ):
            assert_same(values, expected, exactly=exactly)
        assert_same(
            result["shared_ways"][way][name][0],
            results[0]["shared_ways"][way][name][0],
            exactly=True,
        )


def test_averages_are_there_when_backward_returns(results: Results) -> None:
    for result in results:
        got = result["gradients_after_backward"]
        for average, expected in zip(got["averages"], got["expected"], strict=True):
            if average is None:
                assert not expected.any()
            else:
                torch.testing.assert_close(average, expected)
        assert got["memory"][0] == got["memory"][1]
        assert got["channels_last"]


def test_messages_have_one_order_on_all_workers_in_all_steps(results: Results) -> None:
    for name in ("own", "half"):
        steps = [step for result in results for step in result["order_of_messages"][name]]
        assert len(steps) == 4 * len(results)
        assert all(step == steps[0] for step in steps)
        assert len(steps[0]) >= 3
    own, half = (
        results[0]["order_of_messages"]["own"][0],
        results[0]["order_of_messages"]["half"][0],
    )
    assert {dtype for _, dtype in own} == {"torch.float32", "torch.float64"}
    assert {dtype for _, dtype in half} == {"torch.float16"}
    assert results[0]["order_of_messages"]["half bytes"] == [2 * sum(numel for numel, _ in half)]


def test_other_dtypes_travel_and_gradients_keep_theirs(results: Results) -> None:
    average = sum(range(1, len(results) + 1)) / len(results)
    for result in results:
        for gradient, dtype, moved in result["half_precision"].values():
            assert dtype == torch.float32
            torch.testing.assert_close(gradient, torch.full((2, 3), average), atol=0.01, rtol=0)
            torch.testing.assert_close(moved, gradient, atol=1e-6, rtol=0)
        assert result["big_values_in_half_precision"] == (True, True)


def test_a_denominator_replaces_the_number_of_workers(results: Results) -> None:
    total = sum(range(1, len(results) + 1))
    for result in results:
        for values in result["denominators"].values():
            assert values == pytest.approx([total / 4, total / 8], rel=1e-6)


def test_gradients_can_be_clipped_as_with_ddp(results: Results) -> None:
    for result in results:
        assert_same(*result["clipping"], exactly=False)


def test_it_agrees_with_the_plain_version(results: Results) -> None:
    for result in results:
        for weights, expected in result["like_the_reference"]:
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_reduced_right(results: Results, reentrant: bool) -> None:
    for result in results:
        plain, *others = result["checkpointing"][reentrant]
        for other in others:
            assert_same(plain, other, exactly=False)


def test_gradients_that_share_memory_are_reduced_once_each(results: Results) -> None:
    factor = sum(range(1, len(results) + 1)) / len(results)
    for result in results:
        for gradient in result["aliased_gradients"]:
            torch.testing.assert_close(gradient, torch.full((8, 4), 4.0 * factor))


@pytest.mark.parametrize("scenario", ["replaced_head", "after_an_error"])
def test_it_follows_the_model_and_recovers(results: Results, scenario: str) -> None:
    for result in results:
        plain, *others = result[scenario]
        for other in others:
            assert_same(plain, other, exactly=False)


def test_copies_go_on_alike(results: Results) -> None:
    for result in results:
        for pair in result["copies"].values():
            assert_same(*pair, exactly=True)


def test_an_optimizer_that_is_gone_leaves_no_hook(results: Results) -> None:
    for result in results:
        assert result["dropped_optimizer"] == (1, 0)


def test_the_tracker_hears_of_total_and_exposed_time_and_bytes(results: Results) -> None:
    for result in results:
        for told, trained_bytes, last_bytes in result["reports"]:
            assert len(told) == 3
            for total_s, exposed_s, size_bytes in told:
                assert 0 < exposed_s <= total_s
                assert size_bytes == last_bytes
                assert (
                    trained_bytes < size_bytes <= trained_bytes + 8 * 20
                )  # and one flag per parameter


def test_parameters_beside_the_model_are_averaged_and_counted(results: Results) -> None:
    for result in results:
        average, sizes = result["beside_the_model"]
        assert average == pytest.approx((len(results) - 1) / 2)
        assert sizes == [4 * (6 + 2), 4 * (5 + 1)]  # numbers and flags


def test_sparse_gradients_are_refused_by_name(results: Results) -> None:
    for result in results:
        assert "gradient of '0.weight' has layout torch.sparse_coo" in result["sparse"]


# -- in one process
# --------------------------------------------------------------------------------------------


def test_one_worker_has_no_hooks_and_sends_nothing() -> None:
    model = nn.Linear(2, 2)
    exchange = AllReduceAggregation(1, overlap=True, comm_dtype=torch.float16)
    optimizer = CentralizedSGD(1, model, lr=0.1, aggregation=exchange)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    with optimizer.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.aggregation.bytes_sent == 0


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Linear(8, 8)
    for make in (CentralizedSGD, CentralizedAdam):
        with pytest.raises(
            ValueError, match="the PowerAggregation given too does not overlap: leave it out"
        ):
            make(1, model, lr=0.1, overlap=True, aggregation=PowerAggregation(model))
        with pytest.raises(
            ValueError,
            match=r"does not overlap: write overlap=True in AllReduceAggregation\(\.\.\.\)",
        ):
            make(1, model, lr=0.1, overlap=True, aggregation=AllReduceAggregation())
        with pytest.raises(ValueError, match="overlap must be False with agg_grad=False"):
            make(1, model, lr=0.1, overlap=True, agg_grad=False)
        with pytest.raises(TypeError, match="overlap must be True or False, not 'step'"):
            make(1, model, lr=0.1, overlap="step")
        make(1, model, lr=0.1, overlap=True, aggregation=AllReduceAggregation(overlap=True))
    with pytest.raises(ValueError, match=r"comm_dtype must be None or one of .*, not torch\.int8"):
        AllReduceAggregation(1, comm_dtype=torch.int8)
    with pytest.raises(ValueError, match="shared_memory must be False for a model on meta"):
        CentralizedSGD(
            1,
            nn.Linear(8, 8, device="meta"),
            lr=0.1,
            aggregation=AllReduceAggregation(shared_memory=True),
        )
    with pytest.raises(ValueError, match="bucket_size_bytes must be at least 0, not -1"):
        AllReduceAggregation(1, overlap=True, bucket_size_bytes=-1)


@pytest.mark.parametrize("size", [0, 1, 16, 100, 10_000])
@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_every_parameter_is_in_one_bucket(size: int, comm_dtype: torch.dtype | None) -> None:
    shapes = [(3,), (), (2, 5), (0,), (4, 1, 2)]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float32, torch.bfloat16]
    parameters = {
        str(i): nn.Parameter(torch.zeros(shape, dtype=dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    buckets = plan_buckets(parameters, size, comm_dtype)
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(parameters)
    assert [bucket.flags is None for bucket in buckets] == [True] * (len(buckets) - 1) + [False]
    for bucket in buckets:
        if bucket.memory is None:
            assert len(bucket.parameters) == 1
            continue
        assert bucket.memory.dim() == 1
        numel = sum(math.prod(p.shape) for p in bucket.parameters)
        assert bucket.memory.numel() == numel + (0 if bucket.flags is None else len(parameters))
        assert [v.shape for v in bucket.views] == [p.shape for p in bucket.parameters]
        assert comm_dtype is not None or len({p.dtype for p in bucket.parameters}) <= 1
