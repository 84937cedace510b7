"""Rules that every metric obeys."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlbench_core.evaluation.pytorch.metrics import (
    BitsPerByte,
    BLEUScore,
    DiceCoefficient,
    F1Score,
    MLBenchMetric,
    Perplexity,
    TopKAccuracy,
)

CLASSES = (
    torch.tensor([[0.1, 0.5, 0.4], [0.8, 0.1, 0.1], [0.2, 0.2, 0.6]]),
    torch.tensor([1, 0, 0]),
)
MASKS = (torch.tensor([0.9, 0.6, 0.2, 0.1]), torch.tensor([1, 0, 1, 0]))
SENTENCES = (
    ["the cat sat on the mat", "hello big world"],
    ["the cat is on the mat", "hello world"],
)

FAMILY: list[tuple[Callable[[], MLBenchMetric], tuple[Any, Any]]] = [
    (TopKAccuracy, CLASSES),
    (lambda: TopKAccuracy(2), CLASSES),
    (Perplexity, CLASSES),
    (BitsPerByte, CLASSES),
    (DiceCoefficient, MASKS),
    (F1Score, MASKS),
    (BLEUScore, SENTENCES),
    (lambda: BLEUScore(use_raw=True), SENTENCES),
]
every_metric = pytest.mark.parametrize(("make", "batch"), FAMILY)


@every_metric
def test_values_are_float32_numbers(make, batch) -> None:
    metric = make()
    value = metric(*batch)
    metric.update(value, len(batch[0]))
    for tensor in (value, metric.average()):
        assert tensor.dtype == torch.float32
        assert tensor.numel() == 1
        assert not tensor.requires_grad
    assert value.shape == ((1,) if isinstance(metric, TopKAccuracy) else ())
    assert metric.average().shape == ()


@every_metric
def test_a_call_alone_changes_no_average(make, batch) -> None:
    metric = make()
    metric.update(metric(*batch), len(batch[0]))
    before = metric.average()
    metric(batch[0][:1], batch[1][:1])
    assert metric.average() == before == metric.average()


@every_metric
def test_the_average_of_one_batch_is_its_value(make, batch) -> None:
    metric = make()
    value = metric(*batch)
    metric.update(value, len(batch[0]))
    torch.testing.assert_close(metric.average(), value.reshape(()))


@every_metric
def test_an_average_of_nothing_is_zero(make, batch) -> None:
    metric = make()
    assert metric.average().item() == 0.0
    metric.update(metric(*batch), len(batch[0]))
    assert metric.average().item() != 0.0
    metric.reset()
    assert metric.average().item() == 0.0


@every_metric
def test_order_of_batches_does_not_matter(make, batch) -> None:
    pieces = [(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(len(batch[0]))]
    averages = []
    for order in (pieces, pieces[::-1]):
        metric = make()
        for piece in order:
            metric.update(metric(*piece), 1)
        averages.append(metric.average())
    torch.testing.assert_close(averages[0], averages[1])


@every_metric
def test_values_carry_no_graph_and_leave_the_input_alone(make, batch) -> None:
    output = batch[0]
    if isinstance(output, torch.Tensor):
        output = output.clone().requires_grad_()
        before = output.detach().clone()
        metric = make()
        metric.update(metric(output, batch[1]), len(output))
        assert not metric.average().requires_grad
        assert torch.equal(output.detach(), before)
    else:
        before = list(output)
        make()(output, batch[1])
        assert output == before


@every_metric
def test_a_metric_can_be_copied_with_its_sums(make, batch) -> None:
    metric = make()
    metric.update(metric(*batch), len(batch[0]))
    for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert twin.average() == metric.average()


@every_metric
def test_a_negative_size_is_refused(make, batch) -> None:
    with pytest.raises(ValueError, match="-1"):
        make().update(0.5, -1)


@every_metric
def test_the_name_says_it_is_constant(make, batch) -> None:
    assert make().name == make().name != ""
