"""Eager updates of DiLoCo: real processes over Gloo against the reference and closed forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from mlbench_core.aggregation.pytorch import DiLoCoAggregation, EagerDiLoCoAggregation
from tests.aggregation import eager_workers as workers
from tests.helpers.ranks import run_ranks
from tests.optim.weight_averaging import gradient, start
from tests.references.eager_diloco import eager_diloco

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """The results of each worker, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all, timeout_s=120)


def test_it_is_the_reference(ranks: Ranks) -> None:
    rounds = workers.STEPS // workers.PERIOD
    expected = eager_diloco(start(), gradient, len(ranks), workers.PERIOD, rounds, workers.LR)
    for rank, result in enumerate(ranks):
        found = result["trained"]["history"][workers.PERIOD - 1 :: workers.PERIOD]
        ours = [theta[rank] for theta in expected]
        torch.testing.assert_close(found, ours, rtol=0, atol=1e-6)


def test_without_momentum_all_earlier_changes_and_the_own_part_of_the_last_count(
    ranks: Ranks,
) -> None:
    k, earlier = len(ranks), torch.zeros_like(start())
    for t in range(workers.ROUNDS):
        for rank, result in enumerate(ranks):
            own = workers.change(rank, t) / k
            expected = start() - workers.OUTER_LR * (earlier + own)
            torch.testing.assert_close(result["moved"][t], expected, rtol=0, atol=1e-6)
        earlier += sum(workers.change(rank, t) for rank in range(k)) / k


def test_a_run_goes_on_bit_for_bit_while_its_message_travels(ranks: Ranks) -> None:
    for result in ranks:
        for end in result["trained"]["ends"]:
            assert torch.equal(end, result["trained"]["history"][-1])


def test_the_message_of_each_layer_may_travel_alone(ranks: Ranks) -> None:
    for result in ranks:
        by_layer, together = result["trained"]["by layer"], result["trained"]["history"][-1]
        torch.testing.assert_close(by_layer, together, rtol=0, atol=1e-6)


def test_a_round_sends_the_bytes_of_the_weights_in_one_message(ranks: Ranks) -> None:
    size_bytes = (35 + 7) * 8
    for result in ranks:
        silent = [[]] * (workers.PERIOD - 1)
        later = workers.STEPS // workers.PERIOD - 1
        assert result["trained"]["messages"] == [*silent, [("all_reduce", size_bytes)]] * later
        assert result["trained"]["counted"] == (later + 1) * size_bytes


def test_no_worker_waits_for_the_message_of_its_round(ranks: Ranks) -> None:
    assert all(result["ahead"] for result in ranks)


def test_buffers_stay_and_new_parameters_are_averaged_once(ranks: Ranks) -> None:
    k = len(ranks)
    mean = (k - 1) / 2  # of the ranks
    for rank, result in enumerate(ranks):
        buffers = [10.0 * step + rank for step in range(3)]
        late = [mean, mean + rank / k, mean + mean + rank / k]
        expected = list(zip(buffers, late, strict=True))
        for found, values in zip(result["others"], expected, strict=True):
            assert found == pytest.approx(values, rel=1e-6)


def test_one_worker_is_diloco_bit_for_bit() -> None:
    found = []
    for aggregation in (EagerDiLoCoAggregation(), DiLoCoAggregation()):
        x = start()
        aggregation.start({"x": nn.Parameter(x)})
        for step in range(workers.ROUNDS):
            x -= workers.change(0, step)
            aggregation.aggregate({"x": x}, "avg_world")
        found.append(x)
    assert torch.equal(*found)


def test_a_shared_state_has_nothing_of_a_worker() -> None:
    aggregation, tensors = EagerDiLoCoAggregation(), {"x": torch.ones(2), "y": torch.ones(2)}
    aggregation.start({"x": nn.Parameter(torch.ones(2))})
    state = {**aggregation.state_dict(), "corrections": tensors}
    aggregation.load_state_dict(state)
    assert str(aggregation.state_dict()) == str(state)
    assert aggregation.remembered_names(state) == {"x", "y"}
    shared = aggregation.shared_state(state)
    assert [key for key in state if not shared[key]] == ["shared", "outer_state", "corrections"]
    aggregation.load_state_dict(shared)
    assert aggregation.state_dict() == {}


def test_other_outer_optimizers_and_penalties_are_refused() -> None:
    with pytest.raises(TypeError, match=r"outer_optimizer must make a torch.optim.SGD, not AdamW"):
        EagerDiLoCoAggregation(partial(AdamW, lr=0.1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'penalty'"):
        EagerDiLoCoAggregation(penalty=None)  # type: ignore[call-arg]
