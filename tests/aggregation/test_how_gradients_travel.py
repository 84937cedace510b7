"""Conversions on the way, overflows, missing batches and fused kernels: where gradients could go
wrong unnoticed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.aggregation.pytorch.consensus import consensus_distance
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.optim.pytorch import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    DistributedGradScaler,
    GenericCentralizedOptimizer,
)
from mlbench_core.optim.pytorch.distributed import must_skip
from tests.helpers.ranks import run_ranks

Results = list[dict[str, Any]]
OVERLAPS = (False, True)


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(
    model: nn.Module, rank: int, step: int, scale: Any = lambda loss: loss, factor: float = 1.0
) -> None:
    kind = next(model.parameters()).dtype
    images = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * rank + step)).to(kind)
    scale(model(images).square().sum() * factor).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- what each worker runs
# ------------------------------------------------------------------------------


def same_dtype(rank: int, world_size: int) -> dict[str, Any]:
    """Sums that are exact, so that only the division rounds; and any sums, in messages of one
    layout."""
    exact, converted = [], []
    for overlap in OVERLAPS:
        model = nn.Linear(3, 2)
        exchange = AllReduceAggregation(overlap=overlap, comm_dtype=torch.float32)
        optimizer = CentralizedSGD(world_size, model, lr=0.1, aggregation=exchange, fused=False)
        model(torch.tensor([[1.0, 5.0, 7.0]]) * (rank * rank + 1)).sum().backward()
        optimizer.synchronize()
        optimizer.step()
        exact.append(model.weight.grad)
    for comm_dtype in (None, torch.float32):
        model = layers()
        exchange = AllReduceAggregation(overlap=True, comm_dtype=comm_dtype, bucket_size_bytes=40)
        optimizer = CentralizedSGD(world_size, model, lr=0.1, aggregation=exchange)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        converted.append(weights(model))
    return {"exact": exact, "converted": converted}


def without_a_batch(rank: int, world_size: int) -> list[list[Tensor]]:
    """Worker 1 has no batch in two of the steps, another worker's gradients overflow in one of
    them."""
    result = []
    for overlap in OVERLAPS:
        model = layers()
        optimizer = CentralizedSGD(world_size, model, lr=0.1, overlap=overlap)
        scaler = DistributedGradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            if rank != 1 or step not in (1, 3):
                backward(model, rank, step, scaler.scale, factor=math.inf if step == 3 else 1.0)
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        result.append([*weights(model), torch.tensor(scaler.get_scale())])
    return result


def torchs_scaler(rank: int, world_size: int) -> list[list[Tensor]]:
    """torch's own scaler, where every worker has a batch: an overflow on one is seen by all."""
    result = []
    for overlap in (False, True):
        model = layers()
        optimizer = CentralizedSGD(world_size, model, lr=0.1, overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            backward(
                model, rank, step, scaler.scale, factor=math.inf if (rank, step) == (0, 1) else 1.0
            )
            scaler.step(optimizer)
            scaler.update()
        result.append(weights(model))
    return result


def looked_too_early(rank: int, world_size: int) -> str:
    """torch's own scaler looks at gradients before this worker has its averages."""
    model = layers()
    optimizer = CentralizedSGD(world_size, model, lr=0.1, overlap=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(model, rank, 0, scaler.scale)
    optimizer.zero_grad(set_to_none=False)
    if rank != 1:
        backward(model, rank, 1, scaler.scale)
    try:
        scaler.step(optimizer)
    except ValueError as error:
        return str(error)
    return "no error"


def complex_numbers(rank: int, world_size: int) -> dict[Any, Any]:
    """c = 1 + 2j on all workers and the loss |c|^2, whose gradient is 2c; then d, which worker 0
    alone has."""
    result: dict[Any, Any] = {}
    for comm_dtype in (None, torch.float32, torch.float64, torch.bfloat16):
        for overlap in OVERLAPS:
            for size in (0, 1 << 20):
                model = nn.Module()
                model.c = nn.Parameter(torch.tensor([1 + 2j]))
                model.d = nn.Parameter(torch.tensor([1j, 2]))
                exchange = AllReduceAggregation(
                    comm_dtype=comm_dtype, overlap=overlap, bucket_size_bytes=size
                )
                optimizer = CentralizedSGD(world_size, model, lr=0.125, aggregation=exchange)
                loss = model.c.abs().square().sum()
                (loss + model.d.abs().square().sum() if rank == 0 else loss).backward()
                optimizer.step()
                result[comm_dtype, overlap, size] = (model.c.tolist(), model.d.tolist())
    model = nn.Module()
    model.c = nn.Parameter(torch.tensor([1 + 1j * rank]))
    result["distance"] = consensus_distance(model)
    AllReduceAggregation(None, comm_dtype=torch.float64).agg_model()(model, "avg_world")
    result["average"] = model.c.tolist()
    choco = ChocoAggregation(None, None, topology=ring(world_size), compression="sign", gamma=1.0)
    x = torch.tensor([2.0 - 4j, -3 + 3j])  # the mean size of its four numbers is 3
    choco.aggregate({"x": x}, "avg_world")
    result["copy"] = choco.state_dict()["copies"]["x"].tolist()
    return result


def converted(rank: int, world_size: int) -> dict[Any, list[list[Tensor]]]:
    """The model is converted before the first step, and between steps, with and without
    gradients."""

    def there_and_back(model: nn.Module) -> None:
        model.half()
        model.float()

    conversions = {
        "double": lambda model: model.double(),
        "bfloat16": lambda model: model.bfloat16(),
        "there and back": there_and_back,
        "frozen": lambda model: model[0].requires_grad_(False),
        "thawed": lambda model: model[2].requires_grad_(True),
    }
    result = {}
    for name, convert in conversions.items():
        for when in (0, 2):
            for set_to_none in (True, False):
                result[name, when, set_to_none] = [
                    convert_on_the_way(
                        rank,
                        world_size,
                        overlap,
                        convert,
                        when,
                        set_to_none,
                        starts_frozen=name == "thawed",
                    )
                    for overlap in OVERLAPS
                ]
    return result


def convert_on_the_way(
    rank: int,
    world_size: int,
    overlap: Any,
    convert: Any,
    when: int,
    set_to_none: bool,
    starts_frozen: bool,
) -> list[Tensor]:
    model = layers()
    model[2].requires_grad_(not starts_frozen)
    exchange = AllReduceAggregation(overlap=overlap, bucket_size_bytes=40)
    optimizer = CentralizedSGD(world_size, model, lr=0.125, aggregation=exchange, fused=False)
    for step in range(4):
        if step == when:
            convert(model)
        optimizer.zero_grad(set_to_none=set_to_none)
        if rank == 0 or step != 2:
            backward(model, rank, step)
        optimizer.step()
    return weights(model)


def vanishing_flags(rank: int, world_size: int) -> list[list[float]]:
    """Worker 0 alone has a gradient of b, and the denominator is beyond the range of float16."""
    result = []
    for denom in (3e-9, 4e7, torch.tensor(3e11, dtype=torch.float64)):
        for comm_dtype, dtype in ((torch.float16, torch.float32), (None, torch.float16)):
            model = nn.Module()
            model.a, model.b = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
            inside = SGD(model.parameters(), lr=1.0)
            exchange = AllReduceAggregation(comm_dtype=comm_dtype)
            optimizer = CustomCentralizedOptimizer(
                model, world_size, inside, average_custom=True, aggregation=exchange
            )
            (model.a.sum() if rank else (model.a + model.b).sum()).backward()
            optimizer.step(denom=denom)
            result.append([float(model.b.grad is not None), *model.b.detach().tolist()])
    return result


def clipped(rank: int, world_size: int) -> list[list[Tensor]]:
    result = []
    for overlap in OVERLAPS:
        model = layers()
        inside = SGD(model.parameters(), lr=0.1)
        exchange = AllReduceAggregation(overlap=overlap)
        optimizer = CustomCentralizedOptimizer(
            model, world_size, inside, grad_clip=0.01, aggregation=exchange
        )
        before = weights(model)
        backward(model, rank, 0)
        optimizer.step()
        moved = [(a - b) / 0.1 for a, b in zip(before, weights(model), strict=True)]
        result.append([*moved, torch.cat([tensor.flatten() for tensor in moved]).norm()])
    return result


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    scenarios = (
        same_dtype,
        without_a_batch,
        torchs_scaler,
        looked_too_early,
        complex_numbers,
        converted,
        vanishing_flags,
        clipped,
    )
    return {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(2, run_all)


# -- several workers
# ------------------------------------------------------------------------------


def test_a_comm_dtype_that_changes_nothing_changes_no_bit() -> None:
    """Three workers, since a division by two rounds nothing."""
    for result in run_ranks(3, same_dtype):
        plain, *overlapped = result["exact"]
        assert plain[0].tolist() == torch.tensor([8.0, 40.0, 56.0]).div(3).tolist()
        for gradient in overlapped:
            assert torch.equal(gradient, plain)
        for ours, expected in zip(*result["converted"], strict=True):
            assert torch.equal(ours, expected)


def test_a_worker_without_a_batch_fits_in_with_a_scaler(results: Results) -> None:
    plain = results[0]["without_a_batch"][0]
    assert plain[-1].item() == 4.0  # doubled after two steps, halved by the overflow
    for result in results:
        for ours in result["without_a_batch"]:
            for values, expected in zip(ours, plain, strict=True):
                torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)
                assert values.isfinite().all()


def test_torchs_scaler_works_with_overlap(results: Results) -> None:
    for result in results:
        for values, expected in zip(*result["torchs_scaler"], strict=True):
            assert expected.isfinite().all()
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-7)


def test_all_workers_refuse_a_scaler_that_looked_too_early_at_one(results: Results) -> None:
    for result in results:
        assert "before they were averaged" in result["looked_too_early"]
        assert "use mlbench_core.optim.pytorch.DistributedGradScaler" in result["looked_too_early"]


def test_complex_numbers_travel_whole(results: Results) -> None:
    for result in results:
        values = result["complex_numbers"]
        assert values.pop("distance") == pytest.approx(0.5)
        assert values.pop("average") == [1 + 0.5j]
        assert values.pop("copy") == [3 - 3j, -3 + 3j]
        assert len(values) == 4 * 2 * 2
        for c, d in values.values():
            assert c == [0.75 + 1.5j]
            assert d == [0.875j, 1.75]


def test_buckets_follow_a_converted_model(results: Results) -> None:
    for result in results:
        for (name, _, _), (plain, *overlapped) in result["converted"].items():
            for ours in overlapped:
                for values, expected in zip(ours, plain, strict=True):
                    assert values.dtype == expected.dtype
                    tolerance = 0.02 if name == "bfloat16" else 1e-5
                    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)


def test_replicas_stay_equal_under_large_denominators(results: Results) -> None:
    for result in results:
        assert result["vanishing_flags"] == results[0]["vanishing_flags"]
        assert [values[0] for values in result["vanishing_flags"]] == [1.0] * 6


def test_every_overlap_clips(results: Results) -> None:
    for result in results:
        plain, *overlapped = result["clipped"]
        assert plain[-1].item() == pytest.approx(0.01, rel=1e-3)
        for ours in overlapped:
            for values, expected in zip(ours, plain, strict=True):
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


# -- one process
# ------------------------------------------------------------------------------


class Slice(nn.Module):
    """A parameter that is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(24.0).reshape(4, 6)
        self.w = nn.Parameter(self.table[:, :3])


def test_the_rest_of_a_larger_tensor_is_left_alone() -> None:
    model = Slice()
    optimizer = CentralizedSGD(1, model, lr=1.0, overlap=True)
    model.w.sum().backward()
    optimizer.step()
    expected = torch.arange(24.0).reshape(4, 6)
    expected[:, :3] -= 1
    assert torch.equal(model.table, expected)


@pytest.mark.parametrize("make", [CentralizedSGD, CentralizedAdam])
def test_a_fused_kernel_is_refused_for_a_part_of_a_tensor(make: Any) -> None:
    with pytest.raises(
        ValueError, match="fused must be False or None, not True: 'w' is a part of a larger tensor"
    ):
        make(1, Slice(), lr=0.1, fused=True)


def test_gradients_with_other_strides_reach_the_right_weights() -> None:
    models = [
        nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last) for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    for model, options in zip(models, ({"overlap": True}, {"fused": False}), strict=True):
        optimizer = CentralizedSGD(1, model, lr=1.0, momentum=0.9, **options)
        for _ in range(2):
            model.weight.grad = torch.arange(24.0).reshape(3, 2, 2, 2)
            assert model.weight.grad.stride() != model.weight.stride()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_scaler_that_did_not_look_too_early_is_heard() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.found_inf = torch.tensor(3.0)  # type: ignore[attr-defined]  # one for each of three devices
    assert must_skip(optimizer, AllReduceAggregation(1))


def test_what_would_be_ignored_or_overflow_is_refused() -> None:
    model = layers()
    with pytest.raises(
        ValueError, match=r"by_layer must be False with overlap.*bucket_size_bytes=0"
    ):
        CentralizedSGD(1, model, lr=0.1, overlap=True, by_layer=True)
    inside = SGD(model.parameters(), lr=0.1)
    halves, bfloats = (
        AllReduceAggregation(overlap=True, comm_dtype=t) for t in (torch.float16, torch.bfloat16)
    )
    with pytest.raises(
        ValueError, match=r"comm_dtype must not be torch\.float16 with overlap and average_custom"
    ):
        CustomCentralizedOptimizer(model, 1, inside, average_custom=True, aggregation=halves)
    CustomCentralizedOptimizer(model, 1, inside, average_custom=True, aggregation=bfloats)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = layers(), layers()
    with pytest.raises(ValueError, match=r"SGD has none of them: create it with model\.parameters"):
        GenericCentralizedOptimizer(1, model, optimizer=SGD(other.parameters(), lr=0.1))
    optimizer = GenericCentralizedOptimizer(1, model)
    with pytest.raises(ValueError, match="SGD has none of them"):
        optimizer.optimizer = SGD(other.parameters(), lr=0.1)


def test_a_scheduler_of_an_optimizer_without_one_inside_says_so() -> None:
    optimizer = GenericCentralizedOptimizer(1, layers())
    with pytest.raises(
        RuntimeError, match=r"has no 'lr': there is no torch optimizer yet: give optimizer="
    ):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
