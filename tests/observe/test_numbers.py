"""Numbers of observed scripts that only some kinds of script have."""

from __future__ import annotations

import re

import pytest

from tests.helpers.thorough import some
from tests.observe.conftest import Runner
from tests.observe.test_scripts import both, check

METRIC = ("--metric", "val_loss=val loss ([0-9.]+)")


def printed(log: str) -> list[float]:
    """Return the values that a script has printed."""
    return [float(text) for text in re.findall(r"val loss ([0-9.]+)", log)]


def test_data_loader_and_evaluation(runner: Runner) -> None:
    """Batches without gradients are an evaluation, and its metric reaches the goal."""
    run = both(runner, "ddp_loader", 2, *METRIC, "--goal", "val_loss<=100")
    check(run, 16)
    result = run.result
    assert result["times"]["rank_0"]["validation_s"] > 0
    values = [line["value"] for line in run.lines("stat") if line["name"] == "val_loss"]
    assert values == printed(run.logs[0])
    assert len(values) == 2
    assert result["goal"]["reached"]
    assert result["goal"]["value"] == values[0]
    assert result["goal"]["step"] == 8
    assert (result["best"]["metric"], result["best"]["value"]) == ("val_loss", min(values))
    assert "the broadcasts of buffers by DistributedDataParallel" in run.logs[0]
    # In the first pass all gradients are in one bucket, and then in two.
    assert all(entry["overlapped"] for entry in result["collectives"])
    assert sum(entry["calls"] for entry in result["collectives"]) > 16
    assert result["times"]["rank_0"]["communication_hidden_s"] > 0
    times = result["times"]["rank_0"]
    # The work of one thread, without validation and waiting for the other worker.
    assert 0 < times["compute_cpu_s"] < times["train_s"]
    assert times["communication_cpu_s"] < times["communication_exposed_s"]
    # The goal was reached after half of the steps.
    assert sum(entry["calls"] for entry in result["goal"]["collectives"]) > 8


@pytest.mark.parametrize("option", ["--method=diloco:period=3", "--optimizer=one_bit_adam"])
def test_steps_and_bytes_of_a_method(runner: Runner, option: str) -> None:
    """The optimizers inside of a method end no steps, and its messages are counted."""
    run = runner.run("ddp_loader", 2, options=[option])
    assert run.statuses == [0, 0], run.logs
    (losses,) = {len(report["losses"]) for report in run.reports}
    assert run.result["batches"] == losses
    for rank in (0, 1):
        (end,) = run.lines("end", rank)
        # Five exchanges of all weights in 16 steps, or gradients in the warm-up of 1-bit Adam.
        weights_bytes = run.reports[rank]["bytes"] // losses
        exchanges = 5 if "diloco" in option else losses
        sent_bytes = sum(entry["bytes"] for entry in end["collectives"])
        assert sent_bytes == end["totals"]["communication_size_bytes"]
        # The statistics of BatchNorm and the scales are a small part of it.
        assert 1 <= sent_bytes / (exchanges * weights_bytes) < 1.004


def test_loading_is_data(runner: Runner) -> None:
    run = runner.run("plain", 1)
    times = run.result["times"]["rank_0"]
    assert times["data_s"] >= run.reports[0]["data_s"]
    assert run.result["times"]["rank_0"]["train_s"] <= times["wall_s"]


def test_evaluation_between_steps(runner: Runner) -> None:
    run = runner.run("evaluation", 1, options=METRIC)
    times = run.result["times"]["rank_0"]
    assert times["validation_s"] >= run.reports[0]["validation_s"]
    lines = [line for line in run.lines("stat") if line["name"] == "val_loss"]
    assert [line["value"] for line in lines] == printed(run.logs[0])
    assert [line["step"] for line in lines] == [1, 3, 5]
    # The loop begins at the forward pass before the first backward pass, which is not seen.
    assert times["train_s"] + times["validation_s"] <= run.reports[0]["wall_s"]
    assert times["data_s"] is None
    assert run.result["not_measured"] == [
        "data: no DataLoader was read",
        "samples: neither a DataLoader nor a forward pass of DistributedDataParallel was seen",
    ]


def test_workers_that_train_alone(runner: Runner) -> None:
    """A script that forgets DDP on CPUs, as ImageNet's example of PyTorch does, is told so."""
    run = runner.run("plain", 2)
    (reason,) = run.result["not_measured"]
    assert reason.startswith("communication: no collective of torch.distributed was called")
    assert re.search("^  bytes on the wire +not measured$", run.logs[0], re.MULTILINE)


def test_updates_by_hand(runner: Runner) -> None:
    """A backward pass ends a step, and a method that needs an optimizer is refused."""
    run = runner.run("by_hand", 1)
    assert re.search("^    optimizer +not measured$", run.logs[0], re.MULTILINE)
    assert "each backward pass ends a step" in run.result["not_measured"][1]
    refused = runner.run("by_hand", 1, options=("--method", "local_sgd"))
    assert refused.statuses == [2]
    assert "needs a script with a torch.optim.Optimizer" in refused.logs[0]
    refused = runner.run("by_hand", 1, options=("--method", "bf16"))
    assert "needs a script with DistributedDataParallel" in refused.logs[0]


def test_goal_that_is_missed_ends_nothing(runner: Runner) -> None:
    run = runner.run("evaluation", 1, options=(*METRIC, "--goal", "val_loss<=-1"))
    assert run.statuses == [0]
    assert run.result["goal"]["reached"] is False
    assert run.result["batches"] == 6


def test_a_metric_that_no_line_has(runner: Runner) -> None:
    never = ("--metric", "acc=accuracy ([0-9.]+)", "--goal", "acc>=1")
    run = runner.run("evaluation", 1, options=(*METRIC, *never))
    assert run.result["goal"]["reached"] is False
    reason = "val_acc: no line of the output has 'accuracy ([0-9.]+)'"
    assert run.result["not_measured"][-1] == reason
    assert run.logs[0].count(reason) == 1


def test_sharded_parameters_say_what_is_not_seen(runner: Runner) -> None:
    run = runner.run("fsdp2", 2)
    assert "collectives that DTensor issues in C++" in run.logs[0]
    ops = {entry["op"] for entry in run.result["collectives"]}
    assert ops == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("way", some(["future", "then", "collect_all", "wait_all"]))
def test_waiting_for_futures(runner: Runner, way: str) -> None:
    """As optimizers do that send each gradient themselves."""
    run = runner.run("futures", 2, arguments=[way])
    assert run.statuses == [0, 0], run.logs
    times = run.result["times"]["rank_0"]
    assert times["communication_exposed_s"] > 0
    assert times["communication_hidden_s"] > 0


def test_collectives_in_compiled_code_are_named(runner: Runner) -> None:
    run = both(runner, "compiled_collective", 2)
    check(run, 4)
    assert run.result["not_measured"][0] == "collectives in compiled code"


def test_loss_of_a_tensor_parallel_model(runner: Runner) -> None:
    run = both(runner, "tensor_parallel", 2)
    check(run, 3)
    assert "collectives that DTensor issues in C++" in run.result["not_measured"][0]


def test_frozen_critic_sends_nothing(runner: Runner) -> None:
    """DDP sends no gradients of a model that the script has frozen for a step."""
    check(both(runner, "frozen_critic", 2), 3)


def test_workers_with_unequal_data(runner: Runner) -> None:
    run = both(runner, "joined", 2)
    for rank, report in enumerate(run.reports):
        (end,) = run.lines("end", rank)
        assert end["totals"]["batches"] == len(report["losses"])
        assert end["totals"]["samples"] == report["samples"]
    assert "after a worker's data has ended (Join)" in run.result["not_measured"][0]


def test_one_worker_lacks_no_communication(runner: Runner) -> None:
    assert runner.run("ddp_loader", 1).result["not_measured"] == []


@pytest.mark.parametrize(
    ("script", "method", "message"),
    [
        (
            "own_hook",
            "bf16",
            "--method bf16 needs a script without a communication hook of its own",
        ),
        (
            "plain",
            "bf16",
            "--method bf16 needs a script with DistributedDataParallel, but no model",
        ),
        (
            "fsdp2",
            "bf16",
            "--method bf16 needs a script with DistributedDataParallel, but FSDP shards",
        ),
        ("scaler", "diloco", "--method diloco needs a script without a GradScaler"),
    ],
)
def test_method_that_does_not_fit(runner: Runner, script: str, method: str, message: str) -> None:
    run = runner.run(script, 2, options=("--method", method))
    assert 0 not in run.statuses
    assert message in run.logs[0]


@pytest.mark.parametrize("view", some([True, False]))
def test_bits_on_three_workers(runner: Runner, view: bool) -> None:
    """A third is not exact: DDP multiplies by 1 / 3, and does not divide by 3."""
    arguments = ["view"] if view else []
    observed = runner.run("compiled", 3, arguments=arguments)
    plain = runner.run("compiled", 3, observed=False, arguments=arguments)
    assert observed.statuses == plain.statuses == [0] * 3
    for with_it, without in zip(observed.reports, plain.reports, strict=True):
        assert with_it["weights"] == without["weights"]
    assert observed.result["bytes_sent"]["rank_0"] == observed.reports[0]["bytes"]


def test_method_on_gradients_sends_half(runner: Runner) -> None:
    run = runner.run("compiled", 2, options=("--method", "bf16"))
    assert run.statuses == [0, 0], run.logs
    (end,) = run.lines("end")
    assert end["totals"]["communication_size_bytes"] == run.reports[0]["bytes"] / 2
    assert run.result["configuration"]["algorithm"] == "bf16"


def test_method_on_weights_sends_them_every_period(runner: Runner) -> None:
    run = runner.run("compiled", 2, options=("--method", "local_sgd:period=2"))
    assert run.statuses == [0, 0], run.logs
    (end,) = run.lines("end")
    # Of five steps, the second and the fourth end a period.
    sent = run.reports[0]["bytes"] * 2 // 5
    assert end["totals"]["communication_size_bytes"] == sent
    assert end["collectives"] == [
        {"op": "all_reduce", "group": 2, "calls": 2, "bytes": sent, "overlapped": False}
    ]


@pytest.mark.parametrize("arguments", [[], ["state"]])
def test_method_on_weights_acts_after_all_optimizers_of_a_step(
    runner: Runner, arguments: list[str]
) -> None:
    options = ("--method", "local_sgd:period=1")
    run = runner.run("two_optimizers", 2, options=options, arguments=arguments)
    assert run.statuses == [0, 0], run.logs
    assert run.result["batches"] == 5
    first, second = (report["after"] for report in run.reports)
    assert first == second
    # The workers have different losses.
    assert run.reports[0]["losses"] != run.reports[1]["losses"]
    (end,) = run.lines("end")
    assert sum(entry["calls"] for entry in end["collectives"]) == 5


def test_method_on_weights_acts_while_an_optimizer_takes_no_steps(runner: Runner) -> None:
    options = ("--method", "local_sgd:period=1")
    run = runner.run("two_optimizers", 2, options=options, arguments=["phases"])
    assert run.statuses == [0, 0], run.logs
    # Not after the step, because the other optimizer could follow, but before the next pass.
    first, second = (report["before"] for report in run.reports)
    assert first == second
    first, second = (report["after"] for report in run.reports)
    assert first != second


def test_des_loc_refuses_a_script_with_two_optimizers(runner: Runner) -> None:
    run = runner.run("two_optimizers", 2, options=("--method", "des_loc"))
    assert run.statuses == [2, 2], run.logs
    for log in run.logs:
        assert "des_loc cannot be used here: one optimizer must have all weights" in log


def test_optimizer_takes_the_place_of_the_script_s(runner: Runner) -> None:
    run = runner.run("compiled", 2, options=("--optimizer", "muon:lr=0.01"))
    assert run.statuses == [0, 0], run.logs
    assert run.result["batches"] == 5
    assert run.reports[0]["weights"] != runner.run("compiled", 2).reports[0]["weights"]


def test_only_the_innermost_optimizer_is_replaced(runner: Runner) -> None:
    run = runner.run("wrapped_optimizer", 1, options=("--optimizer", "muon:lr=0.01"))
    assert run.statuses == [0], run.logs
    check(run, 3)
    assert run.reports[0]["optimizers"] == ["Around", "MuonAdamW"]
