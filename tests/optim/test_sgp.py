"""Stochastic gradient push: real processes over Gloo against the reference, and the claims about
push-sum."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch import PushSumAggregation
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.aggregation.pytorch.push_sum import exponential_peers
from mlbench_core.aggregation.pytorch.transport.names import name_of_buffer
from mlbench_core.optim.pytorch import SGP
from tests.helpers.ranks import run_ranks
from tests.optim.weight_averaging import Weights, descend, gradient, start
from tests.references.sgp import sgp

WORKERS, STEPS, HALF, MIXINGS = 3, 8, 3, 12
# In every second step, worker 0 receives two messages and worker 2 none.
IRREGULAR = ((1, 2, 0), (1, 0, 0))
PEERS = {"default": None, "irregular": IRREGULAR}
MOMENTUM = 0.9
# Peers that are refused, and the start of the message.
WRONG = {
    "short": ((1, 0),),
    "itself": ((1, 2, 2),),
    "unknown": ((1, 2, 3),),
    "one way": ((1, 0, 1),),
    "empty": (),
}

Ranks = list[dict[str, Any]]


def make(model: nn.Module, name: str, **options: Any) -> SGP:
    aggregation = PushSumAggregation(PEERS[name])
    return SGP(model=model, lr=0.1, momentum=MOMENTUM, aggregation=aggregation, **options)


def training(rank: int, name: str) -> dict[str, Any]:
    """A run, which is also resumed half way, and the average of its weights."""
    model = Weights(x=start(rank))
    optimizer = make(model, name)
    history, sent, weights = [], [], []
    for step in range(STEPS):
        if step == HALF:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        history += descend(rank, model, optimizer, range(step, step + 1))
        sent.append(optimizer.aggregation.last_bytes)
        weights.append(optimizer.aggregation.weight)
    with averaged_weights(model):
        average = model.x.detach().clone()
    resumed = Weights(x=start())
    optimizer = make(resumed, name)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    descend(rank, resumed, optimizer, range(HALF, STEPS))
    return {
        "history": history,
        "sent": sent,
        "weights": weights,
        "average": average,
        "resumed": resumed.x.detach(),
        "shared": optimizer.shared_state_dict(saved[1])["aggregation"],
    }


def mixing(rank: int, name: str, group: Any = None) -> list[dict[str, Tensor]]:
    """z, x and a buffer after each step without gradients, and the weights."""
    aggregation = PushSumAggregation(PEERS[name], process_group=group)
    z, buffer = start(rank) ** 2, start(rank) ** 2
    history = []
    for _ in range(MIXINGS):
        aggregation.aggregate({"z": z, name_of_buffer("buffer"): buffer}, "avg_world")
        shift = aggregation.state_dict().get("shifts", {}).get("z", 0)
        w = torch.tensor(aggregation.weight, dtype=torch.float64)
        history.append({"z": z.clone(), "x": z + shift, "w": w, "buffer": buffer.clone()})
    return history


def by_layer(rank: int) -> list[list[Tensor]]:
    """The weights of two layers, which are sent together or one by one."""
    result = []
    for one_by_one in (False, True):
        model = Weights(x=start(rank), y=start(rank)[0] + 1)
        optimizer = make(model, "irregular", by_layer=one_by_one)
        for step in range(4):
            model.x.grad = gradient(rank, model.x.detach(), step)
            model.y.grad = model.y.detach().clone()
            optimizer.step()
        result.append([model.x.detach(), model.y.detach()])
    return result


def in_half_precision(rank: int) -> tuple[Tensor, dict[str, Any], int]:
    x, aggregation = start(rank).bfloat16(), PushSumAggregation(IRREGULAR)
    for _ in range(20):
        aggregation.aggregate({"x": x}, "avg_world")
    return x, aggregation.state_dict(), aggregation.bytes_sent


def refusals() -> dict[str, str]:
    messages = {}
    for name, peers in WRONG.items():
        try:
            PushSumAggregation(peers)
        except ValueError as error:
            messages[name] = str(error)
    try:
        PushSumAggregation().load_state_dict({"steps": 1, "weight": 0.5, "shifts": {}})
    except ValueError as error:
        messages["state"] = str(error)
    return messages


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    two = dist.new_group([0, 1])
    result: dict[str, Any] = {"pair": mixing(rank, "default", two) if rank < 2 else None}
    for name in PEERS:
        result[name] = training(rank, name)
        result[f"mixing {name}"] = mixing(rank, name)
    result["by layer"] = by_layer(rank)
    result["half"] = in_half_precision(rank)
    result["refusals"] = refusals()
    return result


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """The results of each worker, by scenario. One start of the processes serves all tests."""
    return run_ranks(WORKERS, run_all)


assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
every_kind = pytest.mark.parametrize("name", PEERS)


def nothing(i: int, z: Tensor, t: int) -> Tensor:
    return torch.zeros_like(z)


def peers_of(name: str) -> Any:
    # The formula of the paper for three workers.
    return PEERS[name] or ((1, 2, 0), (2, 0, 1))


@every_kind
def test_it_is_the_reference(ranks: Ranks, name: str) -> None:
    x = [start(rank) for rank in range(WORKERS)]
    expected = sgp(x, gradient, peers_of(name), 0.1, STEPS, MOMENTUM)
    for rank, result in enumerate(ranks):
        for t, (sums, weights) in enumerate(expected):
            assert_close(result[name]["history"][t], sums[rank] / weights[rank])
            assert result[name]["weights"][t] == pytest.approx(weights[rank], rel=1e-12)


@every_kind
def test_a_resumed_run_has_the_same_bits(ranks: Ranks, name: str) -> None:
    for result in ranks:
        assert torch.equal(result[name]["resumed"], result[name]["history"][-1])


@every_kind
def test_a_step_sends_the_weights_and_one_number_to_one_worker(ranks: Ranks, name: str) -> None:
    for result in ranks:
        assert result[name]["sent"] == [8 * 35 + 8] * STEPS  # float64


def test_with_the_default_peers_the_weights_stay_1_and_the_average_takes_steps_of_sgd(
    ranks: Ranks,
) -> None:
    x = [start(rank) for rank in range(WORKERS)]
    (sums, _), *_ = sgp(x, gradient, peers_of("default"), 0.1, 1)
    step = sum(start(rank) - 0.1 * gradient(rank, start(rank), 0) for rank in range(WORKERS))
    assert_close(sum(sums) / WORKERS, step / WORKERS)
    for result in ranks:
        assert result["default"]["weights"] == [1.0] * STEPS
        own = [other["default"]["history"][-1] for other in ranks]
        assert_close(result["default"]["average"], sum(own) / WORKERS)


@every_kind
def test_without_gradients_the_sums_of_x_and_w_stay(ranks: Ranks, name: str) -> None:
    total = sum(start(rank) ** 2 for rank in range(WORKERS))
    for t in range(MIXINGS):
        found = [result[f"mixing {name}"][t] for result in ranks]
        assert_close(sum(each["x"] for each in found), total)
        assert_close(float(sum(each["w"] for each in found)), float(WORKERS))


def test_with_irregular_peers_z_reaches_the_mean_and_x_does_not(ranks: Ranks) -> None:
    mean = sum(start(rank) ** 2 for rank in range(WORKERS)) / WORKERS
    for result in ranks:
        last = result["mixing irregular"][-1]
        assert_close(last["z"], mean)
        assert_close(last["buffer"], mean)
        assert (last["x"] - mean).norm() > 0.1 * mean.norm()


def test_two_workers_have_the_exact_mean_after_one_step_and_three_never(ranks: Ranks) -> None:
    mean = (start(0) ** 2 + start(1) ** 2) / 2
    for result in ranks[:2]:
        for each in result["pair"]:
            assert_close(each["z"], mean)
    assert torch.equal(ranks[0]["pair"][0]["z"], ranks[1]["pair"][0]["z"])
    mean = sum(start(rank) ** 2 for rank in range(WORKERS)) / WORKERS
    assert (ranks[0]["mixing default"][1]["z"] - mean).norm() > 0.01 * mean.norm()


@pytest.mark.parametrize(("k", "is_exact"), [(1, True), (2, True), (6, False), (8, True)])
def test_a_power_of_two_workers_have_the_exact_mean_after_one_round(k: int, is_exact: bool) -> None:
    peers = exponential_peers(k)
    assert len(peers) == {1: 0, 2: 1, 6: 3, 8: 3}[k]
    x = [start(rank) ** 2 for rank in range(k)]
    mean = sum(x) / k
    for sums, weights in sgp(x, nothing, peers, 0.1, len(peers)):
        x = sums
        assert weights == [1.0] * k
    gaps = [float((x_i - mean).norm() / mean.norm()) for x_i in x]
    assert (max(gaps) < 1e-15) == is_exact
    assert is_exact or min(gaps) > 1e-3


def test_layers_that_are_sent_one_by_one_are_in_one_step(ranks: Ranks) -> None:
    for result in ranks:
        together, one_by_one = result["by layer"]
        for x, y in zip(together, one_by_one, strict=True):
            assert torch.equal(x, y)


def test_half_precision_is_remembered_in_float32(ranks: Ranks) -> None:
    mean = sum(start(rank) for rank in range(WORKERS)) / WORKERS
    for result in ranks:
        x, state, sent = result["half"]
        assert x.dtype == torch.bfloat16
        assert sent == 20 * (2 * 35 + 4)
        assert state["shifts"]["x"].dtype == torch.float32
        torch.testing.assert_close(x.double(), mean, rtol=0.02, atol=0.02)


def test_a_worker_without_own_values_continues_with_the_steps_of_the_others(ranks: Ranks) -> None:
    assert ranks[0]["irregular"]["shared"] == {"steps": HALF, "weight": {}, "shifts": {}}
    assert ranks[0]["default"]["shared"] == {"steps": HALF}
    aggregation = PushSumAggregation()
    aggregation.load_state_dict({"steps": HALF})
    assert aggregation.state_dict() == {"steps": HALF}
    assert aggregation.weight == 1


def test_wrong_peers_are_refused(ranks: Ranks) -> None:
    messages = ranks[0]["refusals"]
    others = "peers must have the 3 ranks to which workers 0 to 2 send, each to another one, not "
    assert messages["short"].startswith(f"{others}(1, 0): give one such sequence")
    assert messages["itself"].startswith(f"{others}(1, 2, 2)")
    assert messages["unknown"].startswith(f"{others}(1, 2, 3)")
    reach = "peers must lead from each worker to all others, not "
    assert messages["one way"].startswith(f"{reach}((1, 0, 1),)")
    assert messages["empty"].startswith(f"{reach}()")
    assert "must have the keys ['steps'], not ['shifts', 'steps', 'weight']" in messages["state"]
