"""The aggregation by itself, in a world of size 1; tests/optim has what k workers do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.aggregation.pytorch import (
    AVG_CUSTOM,
    AVG_WORLD,
    Aggregation,
    AllReduceAggregation,
    all_reduce,
)
from mlbench_core.aggregation.pytorch.transport import pairwise
from mlbench_core.distributed.pytorch.timing import CommunicationClock
from tests.helpers.ranks import run_ranks


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 6.0)
    return model


@pytest.mark.parametrize("by_layer", [False, True])
def test_one_worker_keeps_its_bits(by_layer: bool) -> None:
    model = model_with_gradients()
    before = copy.deepcopy(model)
    aggregation = AllReduceAggregation(world_size=1)
    aggregation.agg_grad(by_layer=by_layer)(model, AVG_WORLD)
    aggregation.agg_model(by_layer=by_layer)(model, AVG_WORLD)
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then)
        assert torch.equal(now.grad, torch.full_like(now, 6.0))
    assert aggregation.bytes_sent == aggregation.last_bytes == 0
    assert aggregation.compression_ratio == 1


@pytest.mark.parametrize("divide_before", [False, True])
@pytest.mark.parametrize(
    "denom", [4, 4.0, torch.tensor(4), torch.tensor([4.0]), torch.tensor([[4.0]]).double()]
)
def test_a_custom_denominator_divides_in_place(denom: Any, divide_before: bool) -> None:
    model = model_with_gradients()
    gradients = [parameter.grad for parameter in model.parameters()]
    aggregation = AllReduceAggregation(None, divide_before=divide_before)
    aggregation.agg_grad()(model, AVG_CUSTOM, denom=denom)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, torch.full_like(gradient, 1.5))


@pytest.mark.parametrize("denom", [0, -1, float("nan"), float("inf"), torch.tensor(0.0)])
def test_a_denominator_must_be_positive(denom: Any) -> None:
    with pytest.raises(ValueError, match="denom must be a positive finite number, not"):
        AllReduceAggregation(1).agg_grad()(model_with_gradients(), AVG_CUSTOM, denom)


def test_a_denominator_is_one_number_and_needed() -> None:
    aggregate = AllReduceAggregation(1).agg_model()
    with pytest.raises(ValueError, match=r"one element, not shape \(2,\)"):
        aggregate(model_with_gradients(), AVG_CUSTOM, torch.ones(2))
    with pytest.raises(ValueError, match="give denom"):
        aggregate(model_with_gradients(), AVG_CUSTOM)


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
@pytest.mark.parametrize("which", ["agg_grad", "agg_model"])
def test_an_unknown_operation_names_the_known_ones(which: str, kind: type[Exception]) -> None:
    aggregate = getattr(AllReduceAggregation(1), which)()
    with pytest.raises(kind, match="op must be 'avg_world' or 'avg_custom', not 'sum'"):
        aggregate(model_with_gradients(), "sum")


def test_weights_and_statistics_keep_their_memory_and_counters_their_value() -> None:
    model = model_with_gradients()
    tensors = [*model.parameters(), *model.buffers()]
    memory = [tensor.data_ptr() for tensor in tensors]
    before = copy.deepcopy(model.state_dict())
    AllReduceAggregation(1).agg_model()(model, AVG_CUSTOM, denom=2)
    assert memory == [tensor.data_ptr() for tensor in tensors]
    for name, now in model.state_dict().items():
        assert torch.equal(now, before[name] / 2 if now.is_floating_point() else before[name])


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"gradient of '0\.weight' has layout torch\.sparse_coo; only dense"
    ):
        AllReduceAggregation(1).agg_grad()(model, AVG_WORLD)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Aggregation()


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_functions_can_be_copied(copying: Any) -> None:
    model = model_with_gradients()
    copying(AllReduceAggregation(1, divide_before=True).agg_grad(by_layer=True))(
        model, AVG_CUSTOM, 2
    )
    assert model[0].weight.grad.unique().item() == 3


def test_the_clock_hands_out_each_interval_once_and_keeps_few() -> None:
    clock = CommunicationClock(limit=2)
    for size_bytes in (1, 2, 3):
        with clock.measure(torch.device("cpu")) as interval:
            interval.size_bytes = size_bytes
    assert [interval.size_bytes for interval in clock.intervals()] == [2, 3]
    assert list(clock.intervals()) == []
    assert list(copy.deepcopy(clock).intervals()) == []


class Alternating(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(2, dtype=dtype) for _ in range(3))


def rotate_unused(rank: int, world_size: int, dtype: torch.dtype) -> list[list[Any]]:
    """Each round other workers lack other gradients."""
    results = []
    for by_layer in (False, True):
        aggregation = AllReduceAggregation(world_size)
        aggregate = aggregation.agg_grad(by_layer=by_layer)
        for turn in range(4):
            model = Alternating(dtype)
            for i, part in enumerate(model.parts):
                if (turn + i) % 4 == rank:
                    part.grad = torch.full_like(part, 4.0)
            aggregate(model, AVG_WORLD)
            results.append(
                [None if part.grad is None else part.grad.tolist() for part in model.parts]
            )
    return results


@pytest.mark.parametrize("dtype", [torch.float16])
def test_whoever_has_a_gradient_gives_it_to_all(dtype: torch.dtype) -> None:
    for result in run_ranks(2, rotate_unused, dtype):
        one_round = [
            [[2.0, 2.0] if (turn + i) % 4 < 2 else None for i in range(3)] for turn in range(4)
        ]
        assert result == one_round * 2


class Large(nn.Module):
    """Gradients that travel alone or packed: of odd strides, in one memory, of other dtypes, on one
    worker only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(20, 30))
        self.small = nn.Parameter(torch.zeros(3))
        self.transposed = nn.Parameter(torch.zeros(30, 20))
        self.left, self.right = nn.Parameter(torch.zeros(400)), nn.Parameter(torch.zeros(400))
        self.sometimes = nn.Parameter(torch.zeros(500))
        self.never = nn.Parameter(torch.zeros(500))
        self.fine = nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.wave = nn.Parameter(torch.zeros(300, dtype=torch.complex64))

    def set_gradients(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        for parameter in self.parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        self.transposed.grad = self.transposed.grad.t().contiguous().t()
        self.right.grad = self.left.grad  # as autograd's for w.view(-1) + v.view(-1)
        self.sometimes.grad = self.sometimes.grad if rank else None
        self.never.grad = None


def average_large_tensors(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients by settings of the aggregation, if tensors travel together and if those of 1 KiB
    travel alone."""
    results: dict[str, Any] = {}
    on_one_machine, on_several_machines = pairwise.is_on_one_machine, lambda group=None: False
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "by the backend": {},
        "divided before": {"divide_before": True},
        "converted": {"comm_dtype": torch.float64},
        "through shared memory": {"shared_memory": True},
    }
    for name, options in settings.items():
        aggregation = AllReduceAggregation(world_size, **options)
        # Between machines, messages go through the backend's all-reduce.
        pairwise.is_on_one_machine = (
            on_several_machines if name == "by the backend" else on_one_machine
        )
        for least in (1 << 10, 1 << 20):
            all_reduce.LARGE_BYTES = least
            for by_layer, denominator in ((False, None), (True, None), (False, 3)):
                model = Large()
                model.set_gradients(rank)
                addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
                op = AVG_WORLD if denominator is None else AVG_CUSTOM
                aggregation.agg_grad(by_layer=by_layer)(model, op, denominator)
                gradients = [p.grad for p in model.parameters()]
                kept = addresses == [
                    p.grad.data_ptr()
                    for n, p in model.named_parameters()
                    if p.grad is not None and (rank or n != "sometimes")
                ]
                results[f"{name}, by layer: {by_layer}, denominator: {denominator}", least] = (
                    gradients,
                    kept,
                )
    all_reduce.LARGE_BYTES = 1 << 20
    weights = nn.Linear(600, 600)
    memory = weights.weight.data_ptr()
    nn.init.constant_(weights.weight, rank + 1.0)
    aggregation.agg_model()(weights, AVG_WORLD)
    results["weights"] = (
        weights.weight.detach().unique().tolist(),
        memory == weights.weight.data_ptr(),
    )
    return results


def unfreeze_on_worker_0(rank: int, world_size: int) -> list[Any]:
    """All parameters are frozen at the first aggregation, and one worker trains them at the
    second."""
    model, aggregate = (
        nn.Linear(2, 1).requires_grad_(False),
        AllReduceAggregation(world_size).agg_grad(),
    )
    aggregate(model, AVG_WORLD)
    if rank == 0:
        model.requires_grad_(True)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 4.0)
    aggregate(model, AVG_WORLD)
    return [parameter.grad.tolist() for parameter in model.parameters()]


def test_a_model_that_was_wholly_frozen_travels_when_a_worker_trains_it() -> None:
    assert run_ranks(2, unfreeze_on_worker_0) == [[[[2.0, 2.0]], [2.0]]] * 2


class Recording(AllReduceAggregation):
    """Notes the bytes of each message."""

    def _count(self, op: str, group: int, size_bytes: int, overlapped: bool = False) -> None:
        vars(self).setdefault("sizes", []).append(size_bytes)
        super()._count(op, group, size_bytes, overlapped)


def record_sizes_of_messages(rank: int, world_size: int) -> dict[int, list[int]]:
    """Bytes of each message of an average, by the least bytes of a tensor that travels alone."""
    found = {}
    for least in (1 << 10, 1 << 20):
        all_reduce.LARGE_BYTES = least
        aggregation, model = Recording(world_size), Large()
        model.set_gradients(rank)
        aggregation.agg_grad()(model, AVG_WORLD)
        found[least] = vars(aggregation)["sizes"]
    return found


def test_each_large_tensor_is_a_message_and_all_small_ones_are_another() -> None:
    large = [4 * 600, 4 * 600, 4 * 400, 4 * 400, 4 * 500, 4 * 500]
    small = 4 * (3 + 7)  # three numbers, and a flag for each of seven parameters
    fine, wave, flag = 8 * 300, 8 * 300, 8  # of other dtypes, each with its flag
    for found in run_ranks(2, record_sizes_of_messages):
        assert found[1 << 10] == [*large, small, fine, flag, wave, flag]
        assert found[1 << 20] == [sum(large) + small, fine + flag, wave + flag]


def test_large_tensors_travel_in_place_with_the_same_result() -> None:
    ranks = run_ranks(2, average_large_tensors)
    for rank, result in enumerate(ranks):
        assert result.pop("weights") == ([1.5], True)
        for (name, least), (gradients, is_kept) in result.items():
            together, _ = result[name, 1 << 20]
            for gradient, expected, other in zip(
                gradients, together, ranks[1 - rank][name, least][0], strict=True
            ):
                if expected is None:
                    assert gradient is None
                else:
                    assert torch.equal(gradient, expected) and torch.equal(gradient, other), name
            assert is_kept
        for (name, least), (gradients, _) in result.items():
            if name.startswith("by the backend"):
                direct, _ = result[name.replace("by the backend", "plain"), least]
                assert all(
                    a is b is None or torch.equal(a, b)
                    for a, b in zip(gradients, direct, strict=True)
                ), name
        by_hand = []
        for worker in range(2):
            model = Large()
            model.set_gradients(worker)
            by_hand.append(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            )
        plain, _ = result["plain, by layer: False, denominator: None", 1 << 10]
        for gradient, a, b in zip(plain, *by_hand, strict=True):
            assert gradient is None or torch.equal(gradient, (a + b) / 2)
