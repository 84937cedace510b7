"""The all-reduce through Horovod, against a module that stands in for it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.centralized import (
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregationHVD,
)
from mlbench_core.errors import ConfigurationError, MissingDependencyError
from mlbench_core.optim.pytorch import FP16Optimizer


class FakeHorovod(types.ModuleType):
    """Horovod with workers that all send what this one sends."""

    Sum = "sum"

    def __init__(self, size: int) -> None:
        super().__init__("horovod.torch")
        self.workers = size
        self.initialized = True
        self.sent: list[Tensor] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def size(self) -> int:
        return self.workers

    def allreduce(self, tensor: Tensor, op: str) -> Tensor:
        assert op == self.Sum
        self.sent.append(tensor.clone())
        return tensor * self.workers


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHorovod]:
    fake = FakeHorovod(4)
    package = types.ModuleType("horovod")
    package.torch = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)
    yield fake


def test_without_horovod_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_NoHorovod(), *sys.meta_path])
    for make in (
        lambda: AllReduceAggregationHVD(1),
        lambda: FP16Optimizer(nn.Linear(1, 1), 1, use_horovod=True),
    ):
        with pytest.raises(MissingDependencyError, match=r"pip install 'mlbench-core\[horovod\]'"):
            make()


class _NoHorovod:
    """Hides an installed Horovod."""

    def find_spec(self, name: str, *args: object) -> None:
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_process_group_of_gloo_sends_nothing(horovod: FakeHorovod, tmp_path: Path) -> None:
    aggregation = AllReduceAggregationHVD(4)
    dist.init_process_group(
        "gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1
    )
    try:
        aggregation.aggregate({"x": torch.ones(3)}, AVG_WORLD)
    finally:
        dist.destroy_process_group()
    assert len(horovod.sent) == 1


@pytest.mark.parametrize(
    ("op", "denom", "divisor"), [(AVG_WORLD, None, 4), (AVG_CUSTOM, torch.tensor([10.0]), 10)]
)
@pytest.mark.parametrize("divide_before", [False, True])
def test_sums_are_divided(
    horovod: FakeHorovod, op: str, denom: Tensor | None, divisor: float, divide_before: bool
) -> None:
    aggregation = AllReduceAggregationHVD(4, divide_before=divide_before)
    tensors = {
        "a": torch.tensor([[2.0, 4.0]]),
        "b": torch.tensor(8.0),
        "c": torch.ones(2, dtype=torch.float64),
    }
    aggregation.aggregate(tensors, op, denom)
    torch.testing.assert_close(tensors["a"], torch.tensor([[2.0, 4.0]]) * 4 / divisor)
    torch.testing.assert_close(tensors["b"], torch.tensor(8.0) * 4 / divisor)
    torch.testing.assert_close(tensors["c"], torch.ones(2, dtype=torch.float64) * 4 / divisor)
    assert [sent.numel() for sent in horovod.sent] == [3, 2]
    assert horovod.sent[0][0] == (2 / divisor if divide_before else 2)
    assert aggregation.bytes_sent == 3 * 4 + 2 * 8


def test_one_worker_sends_nothing(horovod: FakeHorovod) -> None:
    horovod.workers = 1
    aggregation = AllReduceAggregationHVD(None)
    tensors = {"a": torch.ones(2)}
    aggregation.aggregate(tensors, AVG_WORLD)
    aggregation.any_worker(tensors["a"])
    assert torch.equal(tensors["a"], torch.ones(2))
    assert aggregation.world_size == 1
    assert horovod.sent == []


def test_the_number_of_workers_is_held_against_horovods(horovod: FakeHorovod) -> None:
    with pytest.raises(
        ValueError, match=r"world_size is 2, but Horovod has 4 worker\(s\): give 4, or None"
    ):
        AllReduceAggregationHVD(2)
    horovod.initialized = False
    with pytest.raises(ConfigurationError, match=r"call horovod\.torch\.init\(\) first"):
        AllReduceAggregationHVD(4)


def test_a_half_precision_model_is_trained_through_it(horovod: FakeHorovod) -> None:
    model = nn.Linear(3, 1, bias=False).half()
    optimizer = FP16Optimizer(model, 4, use_horovod=True, init_scale=8)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=1.0))
    before = optimizer.fp32_params.detach().clone()
    optimizer.backward_loss(model(torch.tensor([[1.0, 2.0, 4.0]]).half()).float().sum())
    assert optimizer.step()
    torch.testing.assert_close(
        before - optimizer.fp32_params.detach(), torch.tensor([1.0, 2.0, 4.0])
    )
    assert [sent.dtype for sent in horovod.sent] == [
        torch.float16,
        torch.float32,
    ]  # gradients; was there an overflow?
    model.weight.grad[0, 0] = float("nan")
    assert not optimizer.step()
    assert optimizer.loss_scaler.loss_scale == 4
