"""The observer in a process of its own tests: the notice without steps, and what it leaves."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mlbench_core.observe.observer import Observer
from mlbench_core.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("one_thread")


def observer(**options: float) -> Observer:
    """An observer with a tracker of its own."""
    return Observer(Tracker([], "run", 0, progress=False), **options)


def test_notice_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with observer(first_step_s=0.01):
        time.sleep(0.2)
    text = capsys.readouterr().err
    assert "no optimizer step seen yet: 0.01 s after the start" in text


def test_no_notice_after_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    # The first step imports parts of torch.
    train(1)
    with observer(first_step_s=0.3) as watched:
        train(2)
        time.sleep(0.5)
    assert watched.clock.steps == 2
    assert capsys.readouterr().err == ""


def train(steps: int) -> None:
    """Train a small model."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()


def test_torch_is_left_as_it_was() -> None:
    names = [
        (torch.autograd, "backward"), (torch.amp.GradScaler, "scale"), (DataLoader, "__iter__"),
        (nn.Module, "eval"), (nn.Module, "train"), (torch.optim.Optimizer, "__init__"),
        (torch.distributed, "all_reduce"), (torch.distributed.Work, "wait"),
        (torch.distributed.distributed_c10d, "all_reduce"),
        (nn.parallel.DistributedDataParallel, "__init__"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in names]
    with observer() as watched:
        train(1)
    assert [getattr(owner, name) for owner, name in names] == before
    train(1)
    assert watched.clock.steps == 1


def test_unused_optimizer_delays_steps_only_at_first() -> None:
    """With two optimizers of which one never steps, the other one ends steps after a while."""
    with observer() as watched:
        unused = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        train(40)
        del unused
    # The first 16 steps count as one.
    assert watched.clock.steps == 25


def test_learning_rate_is_read_once_per_interval() -> None:
    with observer(interval_s=0.0) as watched:
        train(3)
    assert watched.tracker.learning_rate == 0.5
    # Each step is an interval here, and the last one has no steps.
    assert watched.tracker.current_epoch == 4
    assert watched.tracker.summary().batches == 3
