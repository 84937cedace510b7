"""The observer in a process of its own tests: the notice without steps, and what it leaves."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from mlbench_core.observe import host_times, steps
from mlbench_core.observe.communication import collectives
from mlbench_core.observe.communication.traffic import Traffic
from mlbench_core.observe.observer import Observer
from mlbench_core.tracking import tracker as tracking
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.processes import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")


def observer(**options: float) -> Observer:
    """An observer with a tracker of its own."""
    return Observer(Tracker([], "run", 0, progress=False), **options)


def test_the_module_does_not_import_dtensor() -> None:
    """The import would take a second of each observed script."""
    code = (
        "import sys, mlbench_core.observe.observer; "
        "sys.exit('torch.distributed.tensor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_notice_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    notice = "no optimizer step seen yet: 0.01 s after the start"
    with observer(first_step_s=0.01):
        wait_for(lambda: notice in capsys.readouterr().err, 60, "the notice")


def test_no_notice_after_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    # The first step imports parts of torch.
    train(1)
    with observer(first_step_s=3.0) as watched:
        train(2)
        assert watched._notice is not None
        watched._notice.join(60)
        assert watched._notice.finished.is_set()
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


def test_a_script_without_steps_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that forgot no_grad() looks like training that never ends a step."""
    monkeypatch.setattr(steps, "_MOST_MARKS", 10)
    with observer() as watched:
        for _ in DataLoader(torch.ones(100, 2)):
            assert len(watched.clock._host_times.marks) < 15
    assert watched.tracker.totals()["steps_s"]["batch_load"] > 0


def test_with_the_clock_of_a_device_the_tracker_takes_the_marks_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a device, the tracker takes the host's clock at each mark.
    monkeypatch.setattr(Tracker, "prepare", lambda tracker, again: True)
    with observer(interval_s=0.0) as watched:
        train(3)
        assert watched.clock._host_times.marks == []
    totals = watched.tracker.totals()
    assert totals["batches"] == 3
    assert {"fwd_pass", "backprop", "opt_step", "other"} <= set(totals["steps_s"])
    assert 0 < sum(totals["steps_s"].values()) <= totals["train_s"] <= totals["wall_s"]


class _Device:
    """A device clock that keeps the names of the steps."""

    def __init__(self, *_: Any) -> None:
        self.names: list[str] = []

    def mark(self, name: str) -> None:
        self.names.append(name)

    def batch_start(self) -> None:
        pass

    def batch_end(self) -> None:
        pass

    def drain(self, wait: bool = False) -> None:
        pass


def test_a_script_that_looks_at_a_batch_before_it_uses_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_in_use = False
    for module in (steps, tracking):
        monkeypatch.setattr(module, "cuda_in_use", lambda: is_in_use)
    monkeypatch.setattr(tracking, "DeviceClock", _Device)
    with observer() as watched:
        next(iter(DataLoader(torch.ones(6, 2), batch_size=2)))
        assert watched.tracker._device is None
        is_in_use = True
        train(2)
        device: Any = watched.tracker._device
        assert watched.clock._host_times.marks == []
    step = ["backprop", "opt_step", "other"]
    assert device.names == ["fwd_pass", *step, "fwd_pass", *step]
    totals = watched.tracker.totals()
    assert totals["batches"] == 2
    # The time of the batch that it looked at.
    assert totals["steps_s"]["batch_load"] > 0
    assert totals["compute_cpu_s"] is None


def test_communication_that_the_events_of_the_steps_cannot_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_capturing, stream = False, "of the steps"
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with observer() as watched:
            train(1)
            known = watched.communication
            monkeypatch.setattr(collectives, "cuda_in_use", lambda: True)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
            watched.clock.stream = stream

            def waited_s(is_async: bool = False) -> float:
                begin_s = known._waited_s
                work = dist.all_reduce(torch.ones(1), async_op=is_async)
                if is_async:
                    work.wait()
                return known._waited_s - begin_s

            assert waited_s() > 0
            assert not known.unmeasured
            stream = "of FSDP2"
            assert waited_s() == 0
            assert len(known.unmeasured) == 1
            assert waited_s(is_async=True) == 0
            stream = "of the steps"
            thread = threading.Thread(target=waited_s)
            thread.start()
            thread.join()
            assert len(known.unmeasured) == 1
            is_capturing = True
            assert waited_s() == 0
            assert "collectives in CUDA graphs" in known.unmeasured
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize("other", [False, True])
def test_an_exception_in_a_step_ends_no_counting(other: bool) -> None:
    """A script may catch it, and go on with the same or with another optimizer."""

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise FloatingPointError
            # The step of the base class is a step within this one.
            return super().step(closure)

    weight = nn.Parameter(torch.ones(1))
    # torch puts its function around the step of a class when the first one is made.
    torch.optim.SGD([weight], lr=0.1)
    with observer() as watched:
        optimizer: torch.optim.Optimizer = Failing([weight], lr=0.1)
        for step in range(4):
            weight.sum().backward()
            try:
                optimizer.step()
            except FloatingPointError:
                Failing.fails = False
                if other:
                    optimizer = torch.optim.SGD([weight], lr=0.1)
            assert watched.clock.steps == step


def test_an_optimizer_for_each_parameter() -> None:
    """They step during the backward pass, to free each gradient at once."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    with observer() as watched:
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        for param in optimizers:
            param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
        for _ in range(5):
            model(torch.ones(3, 2)).mean().backward()
    assert len(optimizers) == 20
    assert watched.clock.steps == 5


def test_an_optimizer_made_within_a_step_is_a_part_of_it() -> None:
    """As DiLoCo's outer optimizer, it does not belong to the cycle of the script's optimizers."""
    weight = nn.Parameter(torch.ones(1))

    class WithInner(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.optim.SGD([weight], lr=1.0)
            return super().step(closure)

    with observer() as watched:
        optimizer = WithInner([weight], lr=0.1)
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
    assert watched.clock.steps == 3


def test_moments_of_several_collectives_count_once() -> None:
    """The hidden time is that of the union of their flights, in any order of the waits."""
    flights = [(0.0, 10.0), (8.0, 12.0), (20.0, 21.0), (22.0, 23.0), (9.0, 23.0), (24.0, 26.0)]
    traffic, tracker = Traffic(), Tracker([], "run", 0, progress=False)
    traffic.add("all_reduce", 2, 4, True)
    for begin_s, end_s in flights:
        traffic.add_hidden(begin_s, end_s)
    traffic.end_interval(tracker)
    assert tracker.totals()["communication_total_s"] == 25.0


@pytest.mark.parametrize("is_named", [True, False])
def test_the_forward_pass_of_a_closure_is_not_the_optimizer_s(is_named: bool) -> None:
    """As in Lightning, whose optimizers all step with a closure."""
    with observer() as watched:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.ones(6, 2), batch_size=2):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                time.sleep(0.01)
                loss: torch.Tensor = model(batch).mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
            assert loss is not None
    totals = watched.tracker.totals()
    assert totals["batches"] == 3
    assert totals["steps_s"]["fwd_pass"] >= 0.03
    assert {"backprop", "opt_step"} <= set(totals["steps_s"])


def test_evaluation_of_a_script_without_an_optimizer() -> None:
    model = nn.Linear(2, 1)
    with observer() as watched:
        for _ in range(2):
            model.train()
            model(torch.ones(3, 2)).mean().backward()
            model.eval()
            time.sleep(0.01)
    assert watched.clock.steps == 2
    assert watched.tracker.summary().validation_s >= 0.02


def test_samples_in_lists_of_images() -> None:
    """Each image has a size of its own, as in the detection of objects."""
    images = [torch.ones(3, 4 + number, 9) for number in range(7)]
    with observer() as watched:
        model = nn.Linear(9, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch, _ in DataLoader(
            [(image, {"labels": torch.ones(2)}) for image in images],
            batch_size=4,
            collate_fn=lambda pairs: tuple(zip(*pairs, strict=True)),
        ):
            torch.stack([model(image).mean() for image in batch]).mean().backward()
            optimizer.step()
    assert watched.tracker.summary().samples == 7


def test_samples_of_a_chain_of_models_count_once(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with observer() as watched:
            encoder = DistributedDataParallel(nn.Embedding(10, 4))
            decoder = DistributedDataParallel(nn.Linear(4, 10))
            parameters = [*encoder.parameters(), *decoder.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            for _ in range(3):
                for _ in range(2):  # accumulates gradients
                    decoder(encoder(torch.ones(5, 7, dtype=torch.long))).mean().backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    totals = watched.tracker.totals()
    assert (totals["batches"], totals["samples"], totals["tokens"]) == (3, 30, 210)


def test_batches_without_a_tensor_are_said() -> None:
    with observer() as watched:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for text in DataLoader(["a", "b"]):
            model(torch.full((1, 2), float(len(text)))).mean().backward()
            optimizer.step()
    assert watched.unmeasured(1) == [
        "samples: no tensor was found in the batches of the DataLoader"
    ]


def test_batches_of_another_thread_are_said() -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    with observer() as watched:
        loader = DataLoader(torch.ones(6, 2), batch_size=2)
        thread = threading.Thread(target=lambda: [batches.put(batch) for batch in loader])
        thread.start()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(batches.get(timeout=60)).mean().backward()
            optimizer.step()
        thread.join()
    assert "data: a thread that does not train read the DataLoader" in watched.unmeasured(1)


def test_learning_rate_is_read_once_per_interval() -> None:
    with observer(interval_s=0.0) as watched:
        train(3)
    assert watched.tracker.learning_rate == 0.5
    # Each step is an interval here.
    assert watched.tracker.current_epoch == 3
    assert watched.tracker.summary().batches == 3


@pytest.mark.parametrize("group", [{}, {"lr": None}])
def test_optimizer_without_a_learning_rate(group: dict[str, Any]) -> None:
    """As Adafactor of transformers, which computes its own, and as optimizers without a rate."""

    class WithoutRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, group)

        def step(self, closure: Any = None) -> Any:
            return None

    model = nn.Linear(2, 1)
    with observer() as watched:
        optimizer = WithoutRate(model.parameters())
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
    assert watched.tracker.learning_rate is None
    assert watched.clock.steps == 1


def test_work_before_training_is_not_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that the script prints before its first batch passes no times on."""
    monkeypatch.setattr(host_times, "work_s", lambda: 1000.0)
    with observer() as watched:
        watched.clock.pass_on()
        train(1)
    # All readings of the clock are the same.
    assert watched.tracker.totals()["compute_cpu_s"] == 0.0


def test_teacher_in_evaluation_mode_is_not_an_evaluation() -> None:
    teacher = nn.Linear(2, 2)
    model = nn.Linear(2, 2)
    loader = DataLoader(torch.ones(6, 2), batch_size=2)
    with observer() as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            teacher.eval()
            with torch.no_grad():
                target = teacher(batch)
            (model(batch) - target).square().mean().backward()
            optimizer.step()
    summary = watched.tracker.summary()
    assert (summary.batches, summary.samples, summary.validation_s) == (3, 6, 0.0)


def test_model_with_an_eval_of_its_own() -> None:
    """As the models of transformers have it."""

    class Model(nn.Linear):
        def eval(self) -> Model:
            return self.train(False)

    with observer() as watched:
        model = Model(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.ones(6, 2), batch_size=2):
            model.train()
            model(batch).mean().backward()
            optimizer.step()
            model.eval()
            for other in DataLoader(torch.ones(4, 2), batch_size=2):
                with torch.no_grad():
                    model(other)
    summary = watched.tracker.summary()
    assert (summary.batches, summary.samples) == (3, 6)
    assert summary.validation_s > 0


def test_model_that_trains_in_evaluation_mode() -> None:
    with observer() as watched:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.eval()
            model(torch.ones(1, 2)).mean().backward()
            optimizer.step()
    summary = watched.tracker.summary()
    assert (summary.batches, summary.validation_s) == (3, 0.0)


def test_times_between_two_epochs() -> None:
    """A checkpoint is saved, an evaluation follows, and each DataLoader starts its workers."""

    class Slow(DataLoader[torch.Tensor]):
        def _get_iterator(self) -> Any:
            time.sleep(0.02)
            return super()._get_iterator()

    model = nn.Linear(2, 1)
    loader, other = (Slow(torch.ones(4, 2), batch_size=2) for _ in range(2))
    with observer() as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
            time.sleep(0.05)
            with torch.no_grad():
                for batch in other:
                    model(batch)
    totals = watched.tracker.totals()
    assert totals["batches"] == 4
    assert totals["steps_s"]["other"] >= 0.1
    assert totals["validation_s"] >= 0.04
    # The first iterator was made before training.
    assert totals["steps_s"]["batch_load"] >= 0.02


def test_pass_without_gradients_within_a_step_is_not_an_evaluation() -> None:
    """As for pseudo-labels: gradients follow before the next batch."""
    model = nn.Linear(2, 2)
    loader = DataLoader(torch.ones(6, 2), batch_size=2)
    with observer() as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            watched.clock.forward_without_gradients()
            model(batch).mean().backward()
            optimizer.step()
    summary = watched.tracker.summary()
    assert (summary.batches, summary.samples, summary.validation_s) == (3, 6, 0.0)


def test_samples_of_steps_without_a_backward_pass() -> None:
    weight = nn.Parameter(torch.ones(2))
    with observer() as watched:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for batch in DataLoader(torch.ones(6, 2), batch_size=2):
            (weight.grad,) = torch.autograd.grad((batch @ weight).sum(), weight)
            optimizer.step()
    assert watched.tracker.summary().samples == 6


def test_loss_divided_by_another_number_stays() -> None:
    """Only a division by the number of micro-batches is undone."""
    with observer() as watched:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for divisors in ([1], [2], [2, 2], [3, 3]):
            for divisor in divisors:
                (model(torch.full((1, 1), 6.0)).sum() / divisor).backward()
            optimizer.step()
    recorded = [entry[2] for entry in watched.tracker.history if entry[1] == "train_loss"]
    assert recorded == [6.0, 3.0, 6.0, 2.0]
