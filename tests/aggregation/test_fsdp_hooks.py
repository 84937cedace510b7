"""The replicas of a model that FSDP2 shards exchange gradients by any aggregation that works on
flat tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aggregation import fsdp_hook_workers as workers
from tests.helpers.ranks import run_ranks

Results = list[dict[str, Any]]
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(workers.REPLICAS * workers.SHARDS, workers.run_all)


@pytest.mark.parametrize("kind", workers.KINDS)
def test_all_workers_have_the_same_weights(results: Results, kind: str) -> None:
    for result in results:
        torch.testing.assert_close(
            result["runs"][kind]["weights"], results[0]["runs"][kind]["weights"], rtol=0, atol=0
        )


def test_an_all_reduce_gives_the_weights_of_one_worker_on_the_joined_batch(
    results: Results,
) -> None:
    for result in results:
        torch.testing.assert_close(
            result["runs"]["all-reduce"]["weights"], result["joined"], **EXACT
        )


def test_scaled_signs_follow_their_formulas_on_the_shards(results: Results) -> None:
    for result in results:
        torch.testing.assert_close(
            result["runs"]["EF-sign"]["weights"], result["scaled signs"], **EXACT
        )


@pytest.mark.parametrize("kind", workers.KINDS)
def test_a_run_resumes_exactly(results: Results, kind: str) -> None:
    for result in results:
        run = result["runs"][kind]
        torch.testing.assert_close(run["resumed"], run["weights"], rtol=0, atol=0)
        assert not torch.equal(run["weights"][0], workers.make_network()[0].weight)


def test_every_module_sends_its_shard(results: Results) -> None:
    """The shards have 24 and 16 numbers; a scale has 8 bytes, and a sign message one more bit."""
    sent = {kind: result["bytes"] for result in results for kind, result in result["runs"].items()}
    assert sent["all-reduce"] == workers.STEPS * (24 + 16) * 8
    assert sent["EF-sign"] == workers.STEPS * (3 + 8 + 2 + 8)
    assert sent["sign"] == workers.STEPS * (4 + 3)
    assert sent["top-k"] == workers.STEPS * 2 * 3 * (8 + 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no aggregation", "TypeError: aggregation must be an Aggregation, not ABCMeta"),
        (
            "not sharded",
            "ValueError: fsdp_model must have a module sharded by FSDP2, but Sequential has none",
        ),
        ("two dimensions", "ValueError: the mesh of fsdp_model must have one dimension"),
        (
            "other group",
            "ValueError: process_group of the aggregation must have one worker of each replica",
        ),
        (
            "all workers",
            "ValueError: process_group of the aggregation must have one worker of each replica",
        ),
        (
            "DiLoCo",
            "ValueError: aggregation must combine gradients, not weights as DiLoCoAggregation does",
        ),
        (
            "Dion",
            (
                "ValueError: aggregation must work on flat tensors, "
                "not on matrices as DionAggregation does"
            ),
        ),
        ("other names", "the names in the state must be those of parameters"),
    ],
)
def test_wrong_use_is_refused(results: Results, name: str, message: str) -> None:
    assert results[0]["errors"][name].startswith(message)
