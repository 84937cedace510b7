"""A DDP model with an aggregation as its hook trains like the library's optimizer with that
aggregation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aggregation import ddp_hook_workers as workers
from tests.helpers.ranks import run_ranks

Results = list[dict[str, Any]]
KINDS = pytest.mark.parametrize("kind", workers.KINDS)


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(2, workers.run_all)


def assert_same(left: Any, right: Any) -> None:
    """Equal to the last bit: weights, or states of nested dictionaries."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), [right[key] for key in left]
    if isinstance(left, list):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def assert_equal_runs(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert_same(left["weights"], right["weights"])
    assert_same(left["state"], right["state"])


@KINDS
@pytest.mark.parametrize("layout", workers.LAYOUTS)
def test_ddp_with_a_hook_trains_like_the_optimizer(
    results: Results, kind: str, layout: str
) -> None:
    for result in results:
        run, ours = result["hooked"][kind, layout], result["ours"][kind]
        assert_equal_runs(run, ours)
        assert_same(run["weights"], results[0]["hooked"][kind, layout]["weights"])
        # Later passes have the small buckets that were asked for, whatever the first one had.
        assert (run["buckets"][-1] > 1) == (layout != "one bucket")


@KINDS
def test_messages_do_not_depend_on_the_buckets(results: Results, kind: str) -> None:
    """Except for those of single buckets, which go without flags of missing gradients: DDP sends
    its own."""
    flags = workers.STEPS * len(results[0]["ours"][kind]["weights"]) * 4 if "overlap" in kind else 0
    flags //= 2 if "bf16" in kind else 1
    for layout in workers.LAYOUTS:
        assert (
            results[0]["hooked"][kind, layout]["bytes"] == results[0]["ours"][kind]["bytes"] - flags
        )


@KINDS
@pytest.mark.parametrize("views", [0, 1])
def test_parameters_that_take_no_part_are_skipped_and_keep_their_memory(
    results: Results, kind: str, views: int
) -> None:
    for result in results:
        assert_equal_runs(result["gaps"][kind][views], result["ours with gaps"][kind])
        assert result["gaps"][kind][views]["buckets"][-1] > 1


@pytest.mark.parametrize("kind", ["overlap", "EF-sign"])
def test_no_sync_accumulates_locally(results: Results, kind: str) -> None:
    for result in results:
        assert_equal_runs(result["accumulated"][kind], result["ours accumulated"][kind])


@KINDS
def test_a_run_resumes_exactly_although_its_buckets_start_again(
    results: Results, kind: str
) -> None:
    for result in results:
        run = result["resumed"][kind]
        before, after = run["buckets"]
        assert before != after
        assert_equal_runs(run["resumed"], run["whole"])


@pytest.mark.parametrize(
    "kind",
    [
        *("periodic", "DES-LOC", "DiLoCo", "eager", "SparseLoCo", "NoLoCo", "SPARTA"),
        *("SCAFFOLD", "gossip", "CHOCO", "SGP"),
    ],
)
def test_aggregations_of_weights_are_refused(results: Results, kind: str) -> None:
    message = results[0]["errors"][kind]
    assert message.startswith("ValueError: aggregation must combine gradients, not weights as ")
    assert "train without a hook" in message


def test_wrong_arguments_are_named(results: Results) -> None:
    errors = results[0]["errors"]
    assert errors["no aggregation"].startswith(
        "TypeError: aggregation must be an Aggregation, not ABCMeta: "
    )
    assert errors["no DDP"].startswith(
        "TypeError: ddp_model must be a DistributedDataParallel, not Network: "
    )
    assert errors["other group"].startswith(
        "ValueError: process_group of the aggregation must have "
        "the workers [0, 1] of ddp_model, not [0]: "
    )
    assert "not 'module.last.weight'" in errors["other names"]
    assert errors["sparse"].startswith(
        "gradients must be dense (torch.strided), not torch.sparse_coo: "
    )


def test_the_example_of_the_documentation_trains_equal_copies(results: Results) -> None:
    assert_same(results[0]["example"], results[1]["example"])
    assert not torch.equal(results[0]["example"][0], workers.make_network().last.weight)
