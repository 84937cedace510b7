"""The numbers of an epoch beside the times of its steps, which a dashboard draws while the run goes
on."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from mlbench_core.controlflow.pytorch import train_round
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.tracking.tracker import Tracker

Clock = Any


def sent(log: MagicMock, name: str) -> list[Any]:
    return [entry.args[4] for entry in log.call_args_list if entry.args[3] == name]


def run_epoch(tracker: Tracker, clock: Clock, seconds: float, samples: int) -> None:
    tracker.batch_start()
    clock.tick(seconds)
    tracker.record_batch_fwd_pass()
    tracker.batch_end(samples=samples, tokens=10 * samples)
    tracker.record_communication(3.0, 1.0, 100)
    tracker.validation_start()
    clock.tick(5)
    tracker.validation_end()
    tracker.epoch_end()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_sends_throughput_and_all_send_validation_and_hidden_communication(
    rank: int, clock: Clock, log: MagicMock
) -> None:
    tracker = Tracker([], "7", rank)
    run_epoch(tracker, clock, 2, 8)
    # A resumed run continues with its totals, also within an epoch.
    tracker.count(samples=4)
    resumed = Tracker([], "7", rank)
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    run_epoch(resumed, clock, 4, 8)
    assert sent(log, "samples_per_s") == ([4, 3] if rank == 0 else [])
    assert sent(log, "tokens_per_s") == ([40, 20] if rank == 0 else [])
    assert sent(log, "tokens") == ([80, 160] if rank == 0 else [])
    # The bytes that were recorded without their collectives may be others than those on the wire.
    assert sent(log, "bytes_on_wire") == []
    assert sent(log, "cum_validation") == [5, 10]
    assert sent(log, "cum_hidden_communication") == [2, 4]


def test_the_first_worker_sends_its_bytes_on_the_wire(clock: Clock, log: MagicMock) -> None:
    tracker = Tracker([], "7", 0)
    for _ in range(2):
        # Of a ring of two workers, each sends the whole payload once: 2 (n - 1) / n.
        tracker.record_collective("all_reduce", 2, 1000, 3, overlapped=False)
        run_epoch(tracker, clock, 2, 8)
    assert sent(log, "bytes_on_wire") == [3000, 6000]


def test_a_round_tells_the_learning_rate_at_its_start(log: MagicMock) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1, 0.1)
    batches = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))]
    tracker = Tracker([], "7", 0)
    for _ in range(2):
        train_round(
            batches, model, optimizer, F.cross_entropy, [], scheduler, "fp32", tracker=tracker
        )
        tracker.epoch_end()
    assert sent(log, "lr") == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plan_is_sent_once_after_the_first_epoch(
    rank: int, clock: Clock, log: MagicMock
) -> None:
    tracker = Tracker([], "7", rank, goal=task1_time_to_accuracy_goal)
    for epoch in tracker.epochs(most=3):
        assert len(sent(log, "plan")) == (1 if epoch and rank == 0 else 0)
        run_epoch(tracker, clock, 1, 1)
    plan = {"metric": "val_global_Prec@1", "threshold": 80, "minimize": False, "max_epochs": 3}
    assert [json.loads(text) for text in sent(log, "plan")] == ([plan] if rank == 0 else [])


def test_a_run_that_counts_steps_sends_its_numbers_with_the_step(
    clock: Clock, log: MagicMock
) -> None:
    tracker = Tracker([], "7", 0, unit="steps")
    for _ in range(3):
        tracker.batch_start()
        tracker.batch_end()
        tracker.record_loss(0.5, log_to_api=True)
    places = [entry.args[2] for entry in log.call_args_list if entry.args[3] == "train_loss"]
    assert places == [1, 2, 3]
    assert str(tracker).startswith("3 steps done | train_loss 0.5 | ")
    # The plan comes before the first step, because such a run may never end an epoch.
    (plan,) = sent(log, "plan")
    assert json.loads(plan)["unit"] == "steps"
    assert log.call_args_list[0].args[3] == "plan"
