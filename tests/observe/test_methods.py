"""Methods on a DDP script, compared with the library's optimizers on a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlbench_core.observe.methods.apply import make_method, refusal
from mlbench_core.observe.methods.names import METHODS, parse_method, parse_optimizer
from tests.helpers.ranks import run_ranks
from tests.observe import method_workers as workers

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(2, workers.run_all)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(1, workers.run_all)[0]


def messages_of(ours: dict[str, Any], text: str) -> list[tuple[str, int]]:
    """The library's messages, without those that DDP's buckets do not have."""
    if text not in ("bf16", "fp16"):
        return ours["messages"]  # type: ignore[no-any-return]
    # The library adds a flag of 2 bytes for each parameter, which says if there is a gradient.
    return [(name, size - 2 * workers.PARAMETERS) for name, size in ours["messages"]]


def assert_same(script: dict[str, Any], ours: dict[str, Any], text: str) -> None:
    kind = METHODS[text.partition(":")[0]].kind
    # DDP sends the gradients of Muon and its relatives in C++, which the recording does not see.
    in_cpp = ("muon", "normuon", "dion2", "dion3")
    expected = [] if text.startswith(in_cpp) else messages_of(ours, text)
    assert script["messages"] == expected
    for name, value in ours["state"].items():
        # With gradients, DDP broadcasts the buffers of the first worker, as in the script without a
        # method. They have no part in training.
        if kind == "weights" or "running" not in name:
            assert torch.equal(script["state"][name], value), name


@pytest.mark.parametrize("text", workers.CASES)
def test_a_method_has_the_bits_and_the_messages_of_the_librarys_optimizer(
    text: str, results: Results
) -> None:
    for result in results:
        assert result["script"][text]["messages"]
        assert_same(result["script"][text], result["ours"][text], text)


@pytest.mark.parametrize("text", workers.CASES)
def test_a_worker_alone_has_the_bits_of_the_librarys_optimizer(
    text: str, alone: dict[str, Any]
) -> None:
    assert_same(alone["script"][text], alone["ours"][text], text)
    assert not alone["script"][text]["messages"]


@pytest.mark.parametrize("text", workers.OPTIMIZERS)
def test_an_optimizer_has_the_bits_of_the_librarys_optimizer(text: str, results: Results) -> None:
    for result in results:
        assert_same(result["replaced"][text], result["our optimizers"][text], text)


def test_every_method_is_compared() -> None:
    compared = {text.partition(":")[0] for text in [*workers.CASES, *workers.OPTIMIZERS]}
    assert compared == METHODS.keys() - {"as-is"}


def test_methods_differ_from_each_other(results: Results) -> None:
    weights = [result["state"]["0.weight"] for result in results[0]["script"].values()]
    for i, first in enumerate(weights):
        assert not any(torch.equal(first, second) for second in weights[i + 1 :])


def test_as_is_needs_no_method() -> None:
    assert make_method(parse_method("as-is")) is None


def test_gradients_accumulate_without_communication(results: Results) -> None:
    for rank, result in enumerate(results):
        # Each worker keeps twice the gradient of its own inputs, 1 or 2.
        assert result["accumulated"]["local_sgd"][0].unique().tolist() == [2.0 * (1 + rank)]
        # The average of the two, which scaled signs represent exactly.
        assert result["accumulated"]["ef_sign_sgd"][0].unique().tolist() == [3.0]


def test_the_models_of_an_update_are_averaged_and_others_stay(results: Results) -> None:
    both, second = zip(results[0]["two models"], results[1]["two models"], strict=True)
    assert [torch.equal(*pair) for pair in zip(*both, strict=True)] == [True, True]
    assert [torch.equal(*pair) for pair in zip(*second, strict=True)] == [False, True]


def test_a_checkpoint_may_be_loaded_before_the_first_step(results: Results) -> None:
    for result in results:
        script, ours = result["loaded later"]
        assert torch.equal(script, ours)


def test_options_and_models_that_do_not_fit_name_the_method(results: Results) -> None:
    messages = results[0]["errors"]
    assert messages["local_sgd:period=2,delay=2"] == (
        "local_sgd:period=2,delay=2 cannot be used here: delay must be less than period, 2, not 2: "
        "a message must arrive before the next one is sent"
    )
    assert "size must be" in messages["sparsified_sgd:size=0"]
    assert "des_loc cannot be used here: optimizer must be Adam" in messages["des_loc"]
    for text in ("qsgd", "streaming_diloco"):
        assert messages[text].startswith(f"{text} cannot be used here: parameter 'weight' must be")


def test_the_groups_of_a_script_keep_their_rates_unless_the_user_gives_one() -> None:
    first, second = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [first], "lr": 0.5, "momentum": 0.1}, {"params": [second]}]
    for text, rates in (("muon", [0.5, 0.2]), ("muon:lr=0.3", [0.3, 0.3])):
        method = make_method(parse_optimizer(text))
        assert method is not None
        optimizer = method.new_optimizer(torch.optim.SGD, (groups,), {"lr": 0.2})
        assert [group["lr"] for group in optimizer.param_groups] == rates
        # SGD's momentum is not Muon's.
        assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.95]


def test_a_script_that_maximizes_or_has_no_group_yet_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = make_method(parse_optimizer("one_bit_adam"))
    assert method is not None
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(workers.ConfigurationError, match="maximize=True: negate the loss"):
        method.new_optimizer(torch.optim.Adam, (params,), {"maximize": True})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(workers.ConfigurationError, match="calls init_process_group before"):
        method.new_optimizer(torch.optim.Adam, (params,), {})


@pytest.mark.parametrize(
    ("obstacle", "part"),
    [
        ("own hook", "calls register_comm_hook"),
        ("FSDP", "FSDP shards this model"),
        ("no DDP", "no model was wrapped"),
        ("GradScaler", "each worker would skip other steps"),
    ],
)
def test_refusals_name_the_method_and_the_way_out(obstacle: Any, part: str) -> None:
    message = str(refusal(parse_method("local_sgd:period=4"), obstacle))
    assert message.startswith("--method local_sgd:period=4 needs a script")
    assert part in message
