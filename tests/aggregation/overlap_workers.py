"""What the tests of the overlapped reduction run in each worker process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.optim.pytorch import CentralizedSGD, CustomCentralizedOptimizer
from tests.references.synchronous_sgd import synchronous_sgd

STEPS = 4
BUCKET_SIZES = (0, 300, 1 << 20)


class Net(nn.Module):
    """A frozen layer, one used twice, one on one worker only, one never, channels-last images, two
    dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Parameter(torch.ones(3))
        self.fine = nn.Linear(16, 2).double()
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.twice.weight
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, with_extra: bool = False) -> Tensor:
        x = self.norm(self.conv(images)).relu().flatten(1)
        x = self.tied(self.twice(self.twice(x).tanh()).tanh()).tanh() + self.frozen(x)
        if with_extra:
            x = x + self.sometimes(x)
        return self.fine(x.double())


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 3, 4, 4, generator=generator), torch.randn(
        4, 2, generator=generator, dtype=torch.float64
    )


def backward(model: nn.Module, rank: int, step: int, **kwargs: Any) -> None:
    images, targets = batch(rank, step)
    nn.functional.mse_loss(model(images, **kwargs), targets).backward()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def make(world_size: int, fused: bool | None = None, **exchange: Any) -> tuple[Net, CentralizedSGD]:
    model, aggregation = Net(), AllReduceAggregation(world_size, **exchange)
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "fused": fused}
    return model, CentralizedSGD(world_size, model, lr=0.1, aggregation=aggregation, **options)


# -- ways to get to a step: (model, optimizer, rank, step) -> None
# -----------------------------------------------


def plainly(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, step, with_extra=rank == 0)
    optimizer.step()


def with_zeros(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model, rank, step)
    optimizer.step()


def accumulating(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(model, rank, 3 * step, with_extra=rank == 1)
        backward(model, rank, 3 * step + 1)
    backward(model, rank, 3 * step + 2)
    optimizer.step()


def only_locally(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(model, rank, step)
    optimizer.step()


def locally_after_a_pass(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, 2 * step)
    with optimizer.no_sync():
        backward(model, rank, 2 * step + 1)
    optimizer.step()


def synchronizing(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.synchronize()
    optimizer.step()


def several_passes(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        backward(model, rank, 3 * step + part, with_extra=part == rank)
    optimizer.step()


def never_clearing(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(model, rank, step)
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = (
            torch.full_like(parameter, rank + i + step) if parameter.requires_grad else None
        )
    optimizer.step()


def by_hand_after_a_pass(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(model, rank, step)
    optimizer.zero_grad()
    by_hand(model, optimizer, rank, step)


def without_a_batch(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    if (rank + step) % 2:
        backward(model, rank, step)
    optimizer.step()


def in_a_closure(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        backward(model, rank, step)
        return 1.0

    assert optimizer.step(closure) == 1.0


def freezing(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    model.frozen.requires_grad_(step % 2 == 1)
    model.conv.weight.requires_grad_(step != 2)
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.step()


WAYS: dict[str, Callable[[nn.Module, Any, int, int], None]] = {
    way.__name__: way
    for way in (
        plainly,
        with_zeros,
        accumulating,
        only_locally,
        locally_after_a_pass,
        synchronizing,
        several_passes,
        never_clearing,
        by_hand,
        by_hand_after_a_pass,
        without_a_batch,
        in_a_closure,
        freezing,
    )
}


def train(
    way: str, rank: int, world_size: int, **options: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    model, optimizer = make(world_size, **options)
    for step in range(STEPS):
        WAYS[way](model, optimizer, rank, step)
    return snapshot(model), gradients(model)


def fused_ways(rank: int, world_size: int) -> dict[str, Any]:
    """Weights and gradients at the end, plain and overlapped, of torch's fused SGD."""
    return {
        way: [
            train(way, rank, world_size, **options)
            for options in (
                {"fused": True},
                {"overlap": True},
                {"overlap": True, "bucket_size_bytes": 300},
            )
        ]
        for way in WAYS
    }


def ways(rank: int, world_size: int) -> dict[str, Any]:
    """Weights and gradients at the end, plain and with each bucket size."""
    return {
        way: {
            "plain": train(way, rank, world_size),
            **{
                size: train(
                    way, rank, world_size, overlap=True, bucket_size_bytes=size, fused=False
                )
                for size in BUCKET_SIZES
            },
        }
        for way in WAYS
    }


SHARED = {
    "at the end": {},
    "while passing": {"overlap": True, "bucket_size_bytes": 300, "fused": False},
    "one by one": {"overlap": True, "bucket_size_bytes": 0, "fused": False},
}


def shared_ways(rank: int, world_size: int) -> dict[str, Any]:
    """Weights and gradients at the end, of sums through shared memory."""
    return {
        way: {
            name: train(way, rank, world_size, shared_memory=True, **options)
            for name, options in SHARED.items()
        }
        for way in WAYS
    }


# -- single claims
# -------------------------------------------------------------------------------------------------


def gradients_after_backward(rank: int, world_size: int) -> dict[str, Any]:
    """Averages are there when backward returns, in memory that stays."""
    model, optimizer = make(world_size, overlap=True)
    memory, averages = [], []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, step, with_extra=rank == 0)
        memory.append(
            [p.grad.data_ptr() for p in (model.conv.bias, model.fine.weight, model.norm.weight)]
        )
        averages.append(gradients(model))
        optimizer.step()
    local, expected = Net(), []
    backward(local, rank, 0, with_extra=rank == 0)
    for parameter in local.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        expected.append(grad / world_size)
    return {
        "averages": averages[0],
        "expected": expected,
        "memory": memory,
        "channels_last": model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last),
    }


def order_of_messages(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Sizes and dtypes of all messages, in order, of passes that differ between workers."""
    original, seen = dist.all_reduce, []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.numel(), str(tensor.dtype)))
        return original(tensor, *args, **kwargs)

    result: dict[str, list[Any]] = {}
    dist.all_reduce = all_reduce
    try:
        for name, options in {"own": {}, "half": {"comm_dtype": torch.float16}}.items():
            model, optimizer = make(world_size, overlap=True, bucket_size_bytes=256, **options)
            result[name] = []
            for step, way in enumerate(("plainly", "without_a_batch", "plainly", "by_hand")):
                seen.clear()
                WAYS[way](model, optimizer, rank, step)
                result[name].append(list(seen))
            result[f"{name} bytes"] = [optimizer.aggregation.last_bytes]
    finally:
        dist.all_reduce = original
    return result


def half_precision(rank: int, world_size: int) -> dict[str, Any]:
    """What arrives when other dtypes travel; the values are exact in all of them."""
    result = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for overlap in (False, True):
            model = nn.Linear(3, 2)
            exchange = AllReduceAggregation(overlap=overlap, comm_dtype=dtype)
            optimizer = CentralizedSGD(world_size, model, lr=1.0, aggregation=exchange)
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            before = snapshot(model)
            optimizer.step()
            result[str(dtype), overlap] = (
                model.weight.grad,
                model.weight.grad.dtype,
                before[0] - model.weight.detach(),
            )
    return result


def big_values_in_half_precision(rank: int, world_size: int) -> tuple[bool, bool]:
    """The sum of the workers' values is beyond the range of float16, their average is not."""
    finite = []
    for overlap in (False, True):
        model = nn.Linear(1, 1)
        exchange = AllReduceAggregation(overlap=overlap, comm_dtype=torch.float16)
        optimizer = CentralizedSGD(world_size, model, lr=1.0, aggregation=exchange)
        (model(torch.ones(1, 1)) * 60000.0).sum().backward()
        optimizer.step()
        finite.append(bool((model.weight.grad == 60000).all()))
    return finite[0], finite[1]


def denominators(rank: int, world_size: int) -> dict[tuple[Any, bool], list[float]]:
    result = {}
    for overlap, fused in ((False, False), (True, False), (True, True)):
        model = nn.Linear(1, 1, bias=False)
        inside = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        exchange = AllReduceAggregation(overlap=overlap)
        optimizer = CustomCentralizedOptimizer(
            model, world_size, inside, average_custom=True, aggregation=exchange
        )
        values = []
        for denom in (4.0, torch.tensor([8.0])):
            optimizer.zero_grad()
            model(torch.full((1, 1), float(rank + 1))).sum().backward()
            optimizer.step(denom=denom)
            values.append(model.weight.grad.item())
        result[overlap, fused] = values
    return result


def clipping(rank: int, world_size: int) -> list[list[Tensor]]:
    """Clipping between backward and step, as with DistributedDataParallel."""
    ours, theirs = Net(), Net()
    optimizer = CentralizedSGD(world_size, ours, lr=0.1, overlap=True)
    parallel = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(STEPS):
        for model, each in ((ours, optimizer), (parallel, plain)):
            each.zero_grad()
            backward(model, rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            each.step()
    return [snapshot(ours), snapshot(theirs)]


def like_the_reference(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Weights of f_i(w) = |w - b_i(t)|^2 / 2 by the library and by the plain version."""
    target = [
        [torch.linspace(i, t, 40, dtype=torch.float64) for i in range(world_size)] for t in range(6)
    ]
    expected = synchronous_sgd(
        lambda w, t, i: w - target[t][i], target[0][0], world_size, 6, 0.2, 0.9, 0.01
    )
    result = []
    for overlap, fused in ((False, None), (True, None), (True, False)):
        model = nn.ParameterList(part.clone() for part in target[0][0].split([3, 30, 7]))
        exchange = AllReduceAggregation(overlap=overlap, bucket_size_bytes=100)
        optimizer = CentralizedSGD(
            world_size,
            model,
            lr=0.2,
            momentum=0.9,
            weight_decay=0.01,
            aggregation=exchange,
            fused=fused,
        )
        for t in range(6):
            optimizer.zero_grad()
            (torch.cat(list(model)) - target[t][rank]).square().sum().div(2).backward()
            optimizer.step()
        result.append((torch.cat(list(model)).detach(), expected))
    return result


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.inner(x).tanh()

        for _ in range(
            2
        ):  # the inner layer gets its gradient in two backward passes inside the outer one
            x = (
                body(x)
                if reentrant is None
                else checkpoint(body, self.outer(x), use_reentrant=reentrant)
            )
        return self.outer(x)


def checkpointing(rank: int, world_size: int) -> dict[bool, list[list[Tensor | None]]]:
    result = {}
    for reentrant in (False, True):
        result[reentrant] = []
        for overlap in (False, True):
            model = Checkpointed()
            exchange = AllReduceAggregation(overlap=overlap, bucket_size_bytes=0)
            optimizer = CentralizedSGD(world_size, model, lr=0.1, aggregation=exchange)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(2):
                optimizer.zero_grad()
                x = torch.randn(3, 4, generator=generator, requires_grad=True)
                model(x, reentrant=reentrant).square().sum().backward()
                optimizer.step()
            result[reentrant].append(gradients(model))
    return result


class Aliased(nn.Module):
    """Autograd gives both parameters one and the same memory as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(8, 4)) for _ in range(2))

    def forward(self) -> Tensor:
        return (self.a.view(-1) + self.b.view(-1)).square().sum()


def aliased_gradients(rank: int, world_size: int) -> list[Tensor]:
    model = Aliased()
    exchange = AllReduceAggregation(overlap=True, bucket_size_bytes=0)
    optimizer = CentralizedSGD(world_size, model, lr=0.1, aggregation=exchange)
    (model() * (rank + 1)).backward()
    optimizer.step()
    return [p.grad for p in model.parameters()]


def replaced_head(rank: int, world_size: int) -> list[list[Tensor]]:
    """A layer is exchanged after the optimizer was made, and the model converted to float64."""
    result = []
    for overlap in (False, True):
        model, optimizer = make(world_size, overlap=overlap)
        plainly(model, optimizer, rank, 0)
        torch.manual_seed(0)
        model.fine = nn.Linear(16, 2).double()
        optimizer.add_param_group({"params": list(model.fine.parameters())})
        plainly(model, optimizer, rank, 1)
        plainly(model, optimizer, rank, 2)
        result.append(snapshot(model))
    return result


def after_an_error(rank: int, world_size: int) -> list[list[Tensor]]:
    """All workers' backward passes break off half way; the next ones are right."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("half way")

    result = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        exchange = AllReduceAggregation(overlap=overlap, bucket_size_bytes=0)
        optimizer = CentralizedSGD(world_size, model, lr=0.1, aggregation=exchange)
        x = torch.full((2, 3), float(rank + 1))
        try:
            model[1](Breaks.apply(model[0](x))).sum().backward()
        except KeyError:
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        result.append(snapshot(model))
    return result


def copies(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    result = {}
    for name, copying in {
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    }.items():
        model, optimizer = make(world_size, overlap=True, shared_memory=name == "pickle")
        plainly(model, optimizer, rank, 0)
        twin, twins_optimizer = copying((model, optimizer))
        for step in (1, 2):
            plainly(model, optimizer, rank, step)
        for step in (1, 2):
            plainly(twin, twins_optimizer, rank, step)
        result[name] = [snapshot(model), snapshot(twin)]
    return result


def dropped_optimizer(rank: int, world_size: int) -> tuple[int, int]:
    """An optimizer that is gone sends nothing any more."""
    model, optimizer = make(world_size, overlap=True)
    hooks = [
        len(p._post_accumulate_grad_hooks or ()) for p in model.parameters() if p.requires_grad
    ]
    del optimizer
    return min(hooks), max(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.communication: list[tuple[float, float, int]] = []
        self.within_backward: list[float] = []

    def record_batch_agg(self) -> None: ...

    def record_batch_opt_step(self) -> None: ...

    def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
        self.communication.append((total_s, exposed_s, size_bytes))

    def book_as_communication(self, step: str, seconds: float) -> None:
        assert step == "backprop"
        self.within_backward.append(seconds)


def reports(rank: int, world_size: int) -> list[tuple[list[tuple[float, float, int]], int, int]]:
    return [report(rank, world_size, shared_memory) for shared_memory in (False, True)]


def report(
    rank: int, world_size: int, shared_memory: bool
) -> tuple[list[tuple[float, float, int]], int, int]:
    model, optimizer = make(world_size, overlap=True, shared_memory=shared_memory)
    tracker = Recorder()
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step(tracker=tracker)
    assert tracker.within_backward == [exposed_s for _, exposed_s, _ in tracker.communication]
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return tracker.communication, trained, optimizer.aggregation.last_bytes


def beside_the_model(rank: int, world_size: int) -> tuple[float, list[int]]:
    """A parameter that is not the model's: its average and the bytes that the tracker hears of."""
    model, extra, tracker = nn.Linear(2, 2), nn.Parameter(torch.zeros(5)), Recorder()
    optimizer = CentralizedSGD(world_size, model, lr=1.0, overlap=True)
    optimizer.add_param_group({"params": [extra]})
    model(torch.ones(1, 2)).sum().backward()
    extra.grad = torch.full((5,), float(rank))
    optimizer.step(tracker=tracker)
    return -extra.mean().item(), [size_bytes for _, _, size_bytes in tracker.communication]


def sparse(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    optimizer = CentralizedSGD(world_size, model, lr=0.1, overlap=True)
    try:
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


SCENARIOS = (
    ways,
    fused_ways,
    shared_ways,
    gradients_after_backward,
    order_of_messages,
    half_precision,
    big_values_in_half_precision,
    denominators,
    clipping,
    like_the_reference,
    checkpointing,
    aliased_gradients,
    replaced_head,
    after_an_error,
    copies,
    dropped_optimizer,
    reports,
    beside_the_model,
    sparse,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
