"""A training round reads numbers of the device once per logging interval, not once per batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    train_round,
)
from mlbench_core.controlflow.pytorch.controlflow import LOG_EVERY_N_BATCHES
from mlbench_core.controlflow.pytorch.translation import train_round_by_tokens
from mlbench_core.dataset.imagerecognition.pytorch import Augmentation, ImageBatches, ImageDataset
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import (
    DiceCoefficient,
    F1Score,
    MLBenchMetric,
    Perplexity,
    TopKAccuracy,
)
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.utils import Tracker


class HostReads(TorchDispatchMode):
    """Counts the operations for which a host has to wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> HostReads:
        # tolist() of a tensor of the CPU reads the memory without an operation.
        self._patch = pytest.MonkeyPatch()
        for name in ("tolist", "numpy"):
            self._patch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def _counting(self, name: str, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to_host = torch.device(kwargs.get("device") or "cuda").type == "cpu"
        # item(), float() and tolist(); bool(); and cpu(), which the round is to call on whole
        # transfers only.
        if name in ("_local_scalar_dense", "is_nonzero") or (name == "_to_copy" and to_host):
            self.counts[name] += 1
        return func(*args, **kwargs)

    @property
    def waits(self) -> int:
        return sum(self.counts.values())


@pytest.fixture(autouse=True)
def log(mocker) -> Any:
    """What is sent to the master."""
    return mocker.patch("mlbench_core.tracking.tracker.LogMetrics").log


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6) % 2) for _ in range(count)]


def model_of() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 2)


class LastColumn(MLBenchMetric):
    """A mask metric of the second class's probabilities."""

    def __init__(self, metric: MLBenchMetric) -> None:
        super().__init__()
        self.metric = metric

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.metric(output.softmax(1)[:, 1], target)

    @property
    def name(self) -> str:
        return self.metric.name


def metrics_of() -> list[MLBenchMetric]:
    return [TopKAccuracy(), Perplexity(), LastColumn(F1Score()), LastColumn(DiceCoefficient())]


def waits_of_a_round(count: int, with_tracker: bool = True, sized: bool = True) -> int:
    model, metrics = model_of(), metrics_of()
    optimizer = CentralizedSGD(world_size=1, model=model, lr=0.1)
    tracker = Tracker(metrics, "run", 0) if with_tracker else None
    batches = batches_of(count)
    with HostReads() as reads:
        loader = batches if sized else iter(batches)
        train_round(
            loader, model, optimizer, F.cross_entropy, metrics, None, "fp32", tracker=tracker
        )
    return reads.waits


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("with_tracker", [True, False])
def test_a_round_waits_for_the_device_once_per_logging_interval(
    with_tracker: bool, sized: bool
) -> None:
    waits_of_a_round(1)  # the first optimizer reads numbers of its own
    intervals = 4
    few = waits_of_a_round(LOG_EVERY_N_BATCHES, with_tracker, sized)
    many = waits_of_a_round(intervals * LOG_EVERY_N_BATCHES, with_tracker, sized)
    assert few == 1
    assert many == (intervals if with_tracker else 1)


def test_a_round_of_1000_batches_reads_at_most_once_in_25_with_a_sink_of_raw_lines() -> None:
    class Lines:
        """Takes what the sink of a result folder takes."""

        def __init__(self) -> None:
            self.steps: list[int] = []

        def __call__(self, *_: Any) -> None:
            raise AssertionError("record() is called instead")

        def record(self, name: str, value: Any, epoch: int, step: int, time_s: float) -> None:
            assert type(value) is float
            self.steps.append(step)

    count, model, lines = 1000, model_of(), Lines()
    tracker = Tracker([TopKAccuracy()], "run", 0, sinks=[lines], goal=task1_time_to_accuracy_goal)
    with HostReads() as reads:
        train_round(
            batches_of(count), model, SGD(model.parameters(), 0.1), F.cross_entropy,
            tracker.metrics, None, "fp32",
            tracker=tracker,
        )  # fmt: skip
    assert 0 < reads.waits <= count / 25
    assert Counter(lines.steps) == dict.fromkeys(range(1, count + 1), 2)


class SumSGD(SGD):
    """Follows the sum: an optimizer that divides may read the divisor in order to check it."""

    def step(self, closure: Any = None, denom: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_a_round_by_tokens_waits_once_per_logging_interval() -> None:
    def waits(count: int) -> int:
        model = nn.Embedding(4, 4)
        optimizer = SumSGD(model.parameters(), lr=0.1)
        batch = {
            "net_input": {"input": torch.tensor([[1, 2]])},
            "target": torch.tensor([[2, 3]]),
            "ntokens": 2,
        }
        with HostReads() as reads:
            train_round_by_tokens(
                [batch] * count, model, optimizer, LabelSmoothing(0), tracker=Tracker([], "run", 0)
            )
        return reads.waits

    waits(1)
    assert waits(LOG_EVERY_N_BATCHES) == 1
    assert waits(4 * LOG_EVERY_N_BATCHES) == 4


def recorded(tracker: Tracker) -> list[tuple[Any, ...]]:
    """Every recorded statistic with its epoch and its number of finished batches, without times."""
    return [entry[:4] for entry in tracker.history if entry[1] != "batch_time_s"]


@pytest.mark.parametrize("count", [1, 2, 26, 60])
def test_deferred_values_are_those_of_a_loop_that_reads_each_batch(count: int, log) -> None:
    sent: list[Any] = []
    runs = []
    for is_deferred in (True, False):
        log.reset_mock()
        model, metrics = model_of(), metrics_of()
        optimizer = SGD(model.parameters(), 0.1)
        seen: list[Any] = []
        tracker = Tracker(metrics, "run", 0, sinks=[lambda *record, seen=seen: seen.append(record)])
        if is_deferred:
            loss = train_round(
                batches_of(count),
                model,
                optimizer,
                F.cross_entropy,
                metrics,
                None,
                "fp32",
                tracker=tracker,
            )
        else:
            total = 0.0
            for i, (data, target) in enumerate(batches_of(count)):
                tracker.batch_start()
                optimizer.zero_grad()
                output = model(data)
                value = F.cross_entropy(output, target)
                value.backward()
                optimizer.step()
                results = compute_train_batch_metrics(output, target, metrics)
                tracker.batch_end(samples=6)
                record_train_batch_stats(i, value, output, results, tracker, count)
                total += value.item() * 6
            loss = total / (count * 6)
        sent.append([call.args for call in log.call_args_list])
        means = {
            name: (meter.val, meter.sum, meter.count) for name, meter in tracker.epoch_stats.items()
        }
        runs.append((loss, recorded(tracker), seen, means, tracker.records))
    assert sent[0] == sent[1]
    assert runs[0] == runs[1]


def test_times_of_deferred_values_are_those_of_their_batches() -> None:
    tracker = Tracker([], "run", 0)
    model = model_of()
    train_round(
        batches_of(30),
        model,
        SGD(model.parameters(), 0.1),
        F.cross_entropy,
        [],
        None,
        "fp32",
        tracker=tracker,
    )
    times = [entry[4] for entry in tracker.history if entry[1] == "train_loss"]
    assert len(set(times)) == 30 and times == sorted(times)


def test_an_interrupted_round_records_the_batches_before() -> None:
    tracker = Tracker([], "run", 0)
    model = model_of()

    def loss_function(output: Tensor, target: Tensor) -> Tensor:
        if tracker.summary().batches == 5:
            raise ArithmeticError("stop")
        return F.cross_entropy(output, target)

    with pytest.raises(ArithmeticError, match="stop"):
        train_round(
            batches_of(9),
            model,
            SGD(model.parameters(), 0.1),
            loss_function,
            [],
            None,
            "fp32",
            tracker=tracker,
        )
    assert tracker.epoch_stats["train_loss"].count == 5 * 6


def test_a_loss_that_is_not_a_number_is_recorded_as_such() -> None:
    tracker = Tracker([], "run", 0)
    model = model_of()
    loss = train_round(
        batches_of(3), model, SGD(model.parameters(), 0.0),
        lambda output, _: output.sum() * float("nan"), [], None,
        "fp32", tracker=tracker,
    )  # fmt: skip
    assert loss != loss
    assert tracker.epoch_stats["train_loss"].val != tracker.epoch_stats["train_loss"].val


@pytest.mark.parametrize(
    "metric", [TopKAccuracy(), Perplexity(), LastColumn(F1Score()), LastColumn(DiceCoefficient())]
)
def test_no_metric_copies_a_number_from_the_host(metric: MLBenchMetric) -> None:
    """A tensor that is made of a Python number on the host waits for the device when it is copied
    there."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert func.overloadpacket.__name__ not in ("lift_fresh", "lift_fresh_copy"), (
                "a tensor of a Python number"
            )
            return func(*args, **(kwargs or {}))

    output, target = torch.rand(6, 2), torch.arange(6) % 2
    with Copies():
        metric(output, target)


def test_a_number_that_is_no_tensor_is_recorded_exactly() -> None:
    class Share(MLBenchMetric):
        name = "share"  # type: ignore[assignment]

        def __call__(self, output: Tensor, target: Tensor) -> Any:
            return 0.1

    tracker = Tracker([], "run", 0)
    record_train_batch_stats(0, 0.1, torch.zeros(4, 1), {Share(): 0.7}, tracker, None)
    model = model_of()
    train_round(
        batches_of(2),
        model,
        SGD(model.parameters(), 0.1),
        F.cross_entropy,
        [Share()],
        None,
        "fp32",
        tracker=tracker,
    )
    values = [entry[1:3] for entry in recorded(tracker)]
    assert values[:2] == [("train_loss", 0.1), ("train_share", 0.7)]
    assert [value for name, value in values[2:] if name == "train_share"] == [0.1, 0.1]


@pytest.mark.parametrize("has_metric", [True, False])
def test_a_goal_on_a_training_statistic_is_reached_at_its_batch(has_metric: bool) -> None:
    class Goal:
        """Is reached at the fourth batch."""

        def __call__(self, name: str, value: float, tracker: Any) -> str | None:
            if name != "train_loss" or value < 3:
                return None
            return f"{tracker.summary().batches} batches, {tracker.get_total_train_time()} s"

    goal = Goal()
    if has_metric:
        goal.metric = "train_loss"  # type: ignore[attr-defined]
    tracker, model = Tracker([], "run", 0, goal=goal), model_of()
    batch_idx = iter(range(20))
    train_round(
        batches_of(20), model, SGD(model.parameters(), 0.0),
        lambda output, _: output.sum() * 0 + next(batch_idx), [],
        None, "fp32", tracker=tracker,
    )  # fmt: skip
    assert tracker.time_to_goal_s == sum(tracker.batch_times[:4])
    assert tracker.goal_text == f"4 batches, {tracker.time_to_goal_s} s"


def test_a_goal_on_a_validation_statistic_waits_for_no_batch() -> None:
    def waits(goal: Any) -> int:
        model = model_of()
        tracker = Tracker([], "run", 0, goal=goal)
        with HostReads() as reads:
            train_round(
                batches_of(LOG_EVERY_N_BATCHES), model, SGD(model.parameters(), 0.1),
                F.cross_entropy, [], None, "fp32",
                tracker=tracker,
            )  # fmt: skip
        return reads.waits

    waits(None)
    assert waits(task1_time_to_accuracy_goal) == waits(None) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_of_task_1a_waits_for_the_gpu() -> None:
    """Batches that are augmented on the device, autocast, and CentralizedSGD."""
    images = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8)
    dataset = ImageDataset(
        images, torch.arange(96) % 10, list("0123456789"), (0.5,) * 3, (0.5,) * 3, Augmentation()
    )
    batches = ImageBatches(dataset.to("cuda"), 8, memory_format=torch.channels_last)
    model = get_resnet_model("resnet20", 1, "fp32", num_classes=10, use_cuda=True).to(
        memory_format=torch.channels_last
    )
    optimizer = CentralizedSGD(
        world_size=1, model=model, lr=0.1, momentum=0.9, by_layer=False, use_cuda=True
    )

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        # The first steps load kernels, and the last one reads the loss of the round.
        for number, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("error" if 2 <= number < len(batches) - 1 else "default")
            yield batch

    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    try:
        train_round(
            watched(), model, optimizer, F.cross_entropy, [TopKAccuracy()], None, "fp32",
            use_cuda=True, tracker=Tracker([], "run", 0), max_batch_per_epoch=len(batches),
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
