"""Methods that average a part of the state at a time: real processes over Gloo against the
references and torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from mlbench_core.aggregation.pytorch import DESLOCAggregation, SPARTAAggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import draw_coordinates
from mlbench_core.optim.pytorch import DESLOC
from tests.helpers.ranks import run_ranks
from tests.optim import partial_averages_workers as workers
from tests.optim.weight_averaging import Weights, gradient, start
from tests.references.des_loc import des_loc
from tests.references.sparta import sparta

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """The results of each worker, by scenario. One start of the processes serves all tests."""
    return run_ranks(workers.WORKERS, workers.run_all)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("periods", workers.PERIODS)
class TestDESLOC:
    def test_it_is_the_reference(self, ranks: Ranks, k: int, periods: Any) -> None:
        expected = des_loc(start(), gradient, k, 0.05, workers.STEPS, *periods)
        for rank, result in enumerate(ranks[:k]):
            found = result[f"des_loc {k}"][periods]
            for actual, values in zip(found["found"], expected, strict=True):
                assert_close(actual, values[rank])

    def test_bytes_are_those_of_what_is_due(self, ranks: Ranks, k: int, periods: Any) -> None:
        """So they are 8 d (1 / Kx + 1 / Ku + 1 / Kv) per step on average, in float64."""
        expected = []
        for step in range(1, workers.STEPS + 1):
            expected.append(8 * 35 * sum(step % period == 0 for period in periods))
        for result in ranks[:k]:
            assert result[f"des_loc {k}"][periods]["sent"] == expected

    def test_a_resumed_run_has_the_same_bits(self, ranks: Ranks, k: int, periods: Any) -> None:
        for result in ranks[:k]:
            found = result[f"des_loc {k}"][periods]
            for actual, expected in zip(found["resumed"], found["found"], strict=True):
                assert torch.equal(actual, expected)

    def test_with_equal_data_it_is_one_worker(self, ranks: Ranks, k: int, periods: Any) -> None:
        model = Weights(x=start())
        adam = AdamW(model.parameters(), lr=0.05, weight_decay=0)
        expected = workers.train(0, range(workers.STEPS), model, adam)
        for result in ranks[:k]:
            found = result[f"des_loc {k}"][periods]["same data"]
            for actual, values in zip(found, expected, strict=True):
                assert_close(actual, values)


@pytest.mark.parametrize("k", [2, 3])
def test_equal_periods_are_local_adam_with_averaged_states(ranks: Ranks, k: int) -> None:
    """Adam of torch on each worker, and after every fourth step all of its state is averaged."""
    models = [Weights(x=start()) for _ in range(k)]
    adams = [Adam(model.parameters(), lr=0.05) for model in models]
    for step in range(workers.STEPS):
        found = []
        for rank, (model, adam) in enumerate(zip(models, adams, strict=True)):
            found.append(workers.train(rank, range(step, step + 1), model, adam))
        if step % 4 == 3:
            for of_workers in zip(*found, strict=True):
                average = sum(of_workers) / k
                for tensor in of_workers:
                    tensor.copy_(average)
    for result, expected in zip(ranks[:k], found, strict=True):
        for actual, values in zip(result[f"des_loc {k}"][4, 4, 4]["found"], expected, strict=True):
            assert_close(actual, values)


def test_a_worker_without_gradients_counts_with_moments_of_zero(ranks: Ranks) -> None:
    """Two steps of Adam with the gradient 1 make a first moment of 0.19."""
    for rank, result in enumerate(ranks):
        found = result["one without gradients"]
        assert found["statistic"].item() == 1
        torch.testing.assert_close(found["y"], torch.full((3,), 1 - 0.2 / workers.WORKERS))
        assert ("exp_avg" in found) is (rank == 0)
    moment = ranks[0]["one without gradients"]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((3,), 0.19 / workers.WORKERS))


def test_a_worker_without_gradients_of_a_coordinate_takes_no_giant_step(ranks: Ranks) -> None:
    """Its second moment is zero there, and the average of the first moments is not."""
    k = workers.WORKERS
    expected, _, _ = des_loc(start(), workers.rare_gradient, k, 0.05, workers.STEPS, 2, 6, 12)
    for result, values in zip(ranks, expected, strict=True):
        history = torch.stack(result["rare"])
        assert_close(history[-1], values)
        # Steps of Adam are about the rate here, and an average moves the weights by a few of them.
        assert history.diff(dim=0).abs().max() < 0.5


def test_the_optimizer_may_leave_out_a_frozen_parameter(ranks: Ranks) -> None:
    assert all(torch.equal(result["frozen"], ranks[0]["frozen"]) for result in ranks)


def test_wrong_arguments_of_des_loc_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="second_moment_period must be"):
        DESLOC(model=model, lr=0.1, second_moment_period=0)
    with pytest.raises(ValueError, match="period must be left out or 8, not 4"):
        DESLOC(model=model, lr=0.1, period=4, aggregation=DESLOCAggregation())
    for other in (SGD(model.parameters(), lr=0.1), Adam(model.parameters(), amsgrad=True)):
        with pytest.raises(TypeError, match="must be Adam or AdamW without amsgrad"):
            DESLOC(model=model, lr=0.1).optimizer = other


class TestSPARTA:
    @pytest.mark.parametrize("k", [2, 3])
    def test_it_is_the_reference(self, ranks: Ranks, k: int) -> None:
        generator = torch.Generator().manual_seed(workers.SEED)

        def draw() -> Tensor:
            return draw_coordinates(35, 7, generator)

        expected = sparta(start(), gradient, k, 0.05, workers.STEPS, draw)
        for result, x in zip(ranks[:k], expected, strict=True):
            assert_close(result[f"sparta {k}"]["x"], x)

    @pytest.mark.parametrize("k", [2, 3])
    def test_bytes_are_those_of_the_share_and_a_resumed_run_is_exact(
        self, ranks: Ranks, k: int
    ) -> None:
        for result in ranks[:k]:
            found = result[f"sparta {k}"]
            assert found["sent"] == [8 * 7] * workers.STEPS  # a fifth of 35 float64
            assert torch.equal(found["resumed"], found["x"])

    def test_a_share_of_1_averages_all_of_every_tensor(self, ranks: Ranks) -> None:
        for result in ranks:
            for x in result["whole"].values():
                assert torch.equal(x, torch.ones_like(x))  # the mean of 0, 1 and 2

    def test_the_mean_stays_and_other_weights_keep_their_bits(self, ranks: Ranks) -> None:
        history = torch.stack([torch.stack(result["spread"]) for result in ranks])
        for before, after in zip(history.unbind(1), history.unbind(1)[1:], strict=False):
            assert_close(after.mean(dim=0), before.mean(dim=0))
            has_changed = (after != before).any(dim=0)
            assert has_changed.sum() <= 500
            assert (after[:, has_changed] == after[0, has_changed]).all()

    def test_the_spread_falls_by_the_share(self, ranks: Ranks) -> None:
        """In the first call exactly, because 500 of 10,000 coordinates become equal. Then on
        average, since some of these are drawn again."""
        history = torch.stack([torch.stack(result["spread"]) for result in ranks])
        is_equal = (history == history[0]).all(dim=0)
        assert is_equal.sum(dim=1)[:2].tolist() == [0, 500]
        spread = (history - history.mean(dim=0)).square().sum(dim=(0, 2))
        assert (spread[-1] / spread[0]).item() == pytest.approx(0.95**20, rel=0.05)

    def test_wrong_arguments_are_named(self) -> None:
        for share in (0, 1.5):
            with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
                SPARTAAggregation(share=share)
        with pytest.raises(ValueError, match="SPARTAAggregation must have the keys"):
            SPARTAAggregation().load_state_dict({"memory": {}})
