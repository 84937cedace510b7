"""EDiT's penalty: real processes over Gloo against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlbench_core.aggregation.pytorch import DiLoCoAggregation, OutlierPenalty
from tests.aggregation import penalty_workers as workers
from tests.helpers.ranks import run_ranks
from tests.references.edit import edit

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """The results of each worker, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all)


def test_it_is_the_reference(ranks: Ranks) -> None:
    changes = [
        [workers.change(rank, step) for rank in range(len(ranks))] for step in range(workers.ROUNDS)
    ]
    expected = edit(changes, workers.FIRST, workers.LARGEST)
    norms = [float(delta.norm()) for delta in expected]
    assert max(norms) == pytest.approx(workers.LARGEST), "the norm was clipped"
    for result in ranks:
        torch.testing.assert_close(result["rounds"]["found"], expected, rtol=0, atol=1e-6)


def test_an_outlier_leaves_the_weighted_mean_of_the_others(ranks: Ranks) -> None:
    for step, wrong in workers.WRONG.items():
        others = [workers.change(rank, step) for rank in range(len(ranks)) if rank != wrong]
        weights = torch.softmax(torch.stack([-delta.norm() for delta in others]), dim=0)
        expected = sum(w * delta for w, delta in zip(weights, others, strict=True))
        expected *= min(1, workers.LARGEST / float(expected.norm()))
        for result in ranks:
            found = result["rounds"]["found"][step]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_equal_norms_are_diloco(ranks: Ranks) -> None:
    for result in ranks:
        for found, plain in result["equal_norms"]:
            torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)


def test_without_any_worker_left_there_is_no_outer_step(ranks: Ranks) -> None:
    for result in ranks:
        assert not result["special"]["all outliers"].any()


def test_all_workers_see_an_overflow_of_one(ranks: Ranks) -> None:
    for result in ranks:
        assert result["special"]["overflow"].isnan().all()


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks: Ranks) -> None:
    assert all(result["rounds"]["resumed"] for result in ranks)


def test_one_number_for_each_tensor_is_gathered_first(ranks: Ranks) -> None:
    for result in ranks:
        sent, counted = result["messages"]
        assert sent == [("all_gather", 4), ("all_reduce", 6 * 8)]
        assert counted == 4 + 6 * 8


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="first_rounds must be at least 2, not 1"):
        OutlierPenalty(first_rounds=1)
    with pytest.raises(ValueError, match="largest_norm must be at least 0, not -1"):
        OutlierPenalty(largest_norm=-1)


def test_the_norms_belong_to_a_worker() -> None:
    model, aggregation = workers.make(OutlierPenalty())
    workers.take(model, aggregation, workers.change(0, 0))
    state = aggregation.state_dict()
    assert state["norms"]["weight"].shape == (3,)
    assert aggregation.shared_state(state)["norms"] == {}
    with pytest.raises(ValueError, match=r"must have the keys .*, not \['norms'"):
        DiLoCoAggregation().load_state_dict(state)
