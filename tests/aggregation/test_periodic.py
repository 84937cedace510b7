"""The values that periodic aggregations keep between calls and in their states, with one worker."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ChunkedTopKAggregation,
    DiLoCoAggregation,
    PeriodicAggregation,
    ScaffoldAggregation,
    SparseLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.local_steps.periodic import Correction, check_delay

AVG = "avg_world"


def start(aggregation: Any, **weights: float) -> dict[str, Tensor]:
    tensors = {name: torch.full((3,), value) for name, value in weights.items()}
    aggregation.start({name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()})
    return tensors


def momentum() -> DiLoCoAggregation:
    return DiLoCoAggregation(partial(SGD, lr=0.5, momentum=0.5))


def test_a_loaded_state_stays_as_it_was_saved() -> None:
    aggregation = momentum()
    weights = start(aggregation, x=0.0)
    weights["x"] += 1
    aggregation.aggregate(weights, AVG)
    saved = aggregation.state_dict()
    before = copy.deepcopy(saved)
    other = momentum()
    other.load_state_dict(copy.copy(before))
    expected = copy.deepcopy(before)
    weights["x"] += 1
    other.aggregate(weights, AVG)
    assert torch.equal(before["shared"]["x"], expected["shared"]["x"])
    key = "momentum_buffer"
    assert torch.equal(before["outer_state"]["x"][key], expected["outer_state"]["x"][key])


def test_the_outer_learning_rate_is_restored() -> None:
    aggregation = momentum()
    start(aggregation, x=0.0)
    aggregation.outer_optimizer.param_groups[0]["lr"] = 0.125
    other = momentum()
    other.load_state_dict(aggregation.state_dict())
    assert other.outer_optimizer.param_groups[0]["lr"] == 0.125
    assert len(other.outer_optimizer.param_groups[0]["params"]) == 1
    other.load_state_dict(aggregation.state_dict())
    assert len(other.outer_optimizer.param_groups[0]["params"]) == 1


def test_a_second_start_changes_nothing() -> None:
    aggregation = momentum()
    start(aggregation, x=1.0)
    start(aggregation, x=5.0, y=5.0)
    assert {name: theta.tolist() for name, theta in aggregation.state_dict()["shared"].items()} == {
        "x": [1.0] * 3
    }


def test_a_tensor_that_is_not_in_a_call_takes_no_step() -> None:
    aggregation = DiLoCoAggregation(partial(SGD, lr=0.5))
    weights = start(aggregation, x=0.0, y=0.0)
    for tensor in weights.values():
        tensor += 1
    aggregation.aggregate(weights, AVG)
    aggregation.aggregate({"x": weights["x"] + 1}, AVG)
    shared = aggregation.state_dict()["shared"]
    assert (shared["x"].tolist(), shared["y"].tolist()) == ([1.0] * 3, [0.5] * 3)


def test_a_tensor_that_no_worker_moved_keeps_its_momentum_and_stays() -> None:
    aggregation = momentum()
    weights = start(aggregation, x=0.0, y=0.0)
    for tensor in weights.values():
        tensor += 1
    aggregation.aggregate(weights, AVG)
    weights["y"] += 1
    aggregation.aggregate(weights, AVG)
    # y: the gradient -1 and half of the momentum -1, times the rate 0.5
    assert (weights["x"].tolist(), weights["y"].tolist()) == ([0.5] * 3, [0.5 + 0.75] * 3)


def test_shared_weights_have_at_least_float32_and_leave_out_buffers() -> None:
    aggregation = momentum()
    tensors = {"x": torch.ones(2, dtype=torch.float16), ":buffer:mean": torch.ones(2)}
    aggregation.aggregate(tensors, AVG)
    shared = aggregation.state_dict()["shared"]
    assert {name: theta.dtype for name, theta in shared.items()} == {"x": torch.float32}
    assert shared["x"].data_ptr() != tensors["x"].data_ptr()


def test_the_shared_state_has_nothing_of_one_worker() -> None:
    sparse = PeriodicAggregation(
        SparseLoCoAggregation(ChunkedTopKAggregation(density=1, bits=None)), period=1
    )
    weights = start(sparse.inside, x=0.0)
    weights["x"] += torch.tensor([3.0, 2.0, 1.0])
    sparse.aggregate(weights, AVG)
    state = sparse.state_dict()
    assert state["inside"]["compressed"]["memory"]["x"].any()
    shared = sparse.shared_state(state)
    assert shared["inside"]["compressed"] == {"memory": {}}
    assert shared["inside"]["shared"].keys() == {"x"}
    assert shared["counts"] == {"x": 1}
    control = PeriodicAggregation(ScaffoldAggregation(), period=1)
    weights = start(control.inside, x=0.0)
    control.inside.count("x", 0.5)
    control.aggregate({"x": weights["x"] + 1}, AVG)
    state = control.state_dict()
    assert state["inside"]["own"].keys() == {"x"}
    assert control.shared_state(state)["inside"]["own"] == {}
    delayed = {"counts": {"x": 4}, "corrections": {"x": torch.ones(3)}}
    assert PeriodicAggregation(AllReduceAggregation(), 3, 1).shared_state(delayed) == {
        **delayed,
        "corrections": {},
    }


def test_names_of_the_wrapped_state_are_remembered() -> None:
    aggregation = PeriodicAggregation(momentum(), period=2)
    state = {
        "counts": {"_orig_mod.x": 1, ":buffer:mean": 1},
        "inside": {"shared": {"y": 0}, "outer_state": {"z": {}}},
    }
    assert aggregation.remembered_names(state) == {"x", "y", "z"}


def test_a_layer_that_was_frozen_before_a_checkpoint_still_travels() -> None:
    """Its weights may differ between workers since the last average."""
    model = nn.Linear(2, 1)
    aggregation = PeriodicAggregation(AllReduceAggregation(), period=4)
    aggregation.agg_model()(model, AVG)
    model.weight.requires_grad_(False)
    aggregation.agg_model()(model, AVG)
    resumed = PeriodicAggregation(AllReduceAggregation(), period=4)
    resumed.load_state_dict(aggregation.state_dict())
    resumed.agg_model()(model, AVG)
    assert resumed.layout.frozen == set()
    fresh = PeriodicAggregation(AllReduceAggregation(), period=4)
    fresh.agg_model()(model, AVG)
    assert fresh.layout.frozen == {"weight"}
    assert fresh.state_dict() == {"counts": {"bias": 1}}


def test_the_ratio_is_that_of_the_wrapped_aggregation() -> None:
    inside = ChunkedTopKAggregation()
    inside._original_bytes, inside._compressed_bytes = 12, 3
    assert PeriodicAggregation(SparseLoCoAggregation(inside), period=2).compression_ratio == 4


@pytest.mark.parametrize("delay", [3, 4])
def test_a_message_arrives_before_the_next_one_is_sent(delay: int) -> None:
    with pytest.raises(ValueError, match=f"delay must be less than period, 3, not {delay}"):
        check_delay(delay, period=3)


def test_an_aggregation_that_compresses_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="would destroy weights"):
        PeriodicAggregation(ChunkedTopKAggregation(), period=2)


def test_corrections_of_a_state_are_added_once_and_as_soon_as_possible() -> None:
    aggregation = PeriodicAggregation(AllReduceAggregation(), period=3, delay=2)
    weights = {"x": torch.zeros(2)}
    for count, expected in ((1, 1.0), (2, 1.0)):  # the next phases are 2, the delay, and 0
        aggregation.load_state_dict({"counts": {"x": count}, "corrections": {"x": torch.ones(2)}})
        weights["x"].zero_()
        aggregation.aggregate(weights, AVG)
        aggregation.aggregate(weights, AVG)
        assert weights["x"].tolist() == [expected] * 2
        assert aggregation.state_dict() == {"counts": {"x": count + 2}}
        assert aggregation._flights == []


def test_a_message_on_its_way_is_received_before_a_copy_and_before_another_state() -> None:
    """The other workers count on this worker's part of it."""
    aggregation, received = (
        PeriodicAggregation(AllReduceAggregation(), period=3, delay=2),
        list[str](),
    )
    aggregation._flights = [
        Correction({"x": torch.ones(2)}, pending=[lambda: received.append("copied")])
    ]
    copy.deepcopy(aggregation)
    assert received == ["copied"]
    aggregation._flights = [
        Correction({"x": torch.ones(2)}, pending=[lambda: received.append("loaded")])
    ]
    aggregation.load_state_dict({})
    assert received == ["copied", "loaded"]
