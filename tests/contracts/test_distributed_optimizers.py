"""Rules that every distributed optimizer obeys with k real workers. A new one is a new line in the
table."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    ChocoAggregation,
    DiLoCoAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    OutlierPenalty,
    PowerAggregation,
    QuantizedAllReduceAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.transport.shared_memory import SharedMemorySum
from mlbench_core.optim.pytorch import (
    DESLOC,
    EF21,
    LARS,
    QSGD,
    SCAFFOLD,
    SGP,
    SPARTA,
    CentralizedAdam,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    ChocoSGD,
    CustomCentralizedOptimizer,
    DecentralizedSGD,
    DeMo,
    DiLoCo,
    Dion,
    Dion2,
    Dion3,
    EFSignSGD,
    FP16Optimizer,
    GenericCentralizedOptimizer,
    LocalSGD,
    MuonAdamW,
    NoLoCo,
    NorMuon,
    OneBitAdam,
    PowerSGD,
    QuantizedSGD,
    SignSGD,
    SparseLoCo,
    SparsifiedSGD,
    StreamingDiLoCo,
)
from tests.helpers.collectives import recording_averages
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

STEPS, HALF = 9, 4  # half the way is in the middle of a period
ON_NO_WORKER = frozenset({3, 7})  # steps in which no worker uses the parameter `sometimes`
ON_ONE_WORKER = frozenset({2, 5})  # steps in which worker 0 alone does

device = torch.device("cpu")  # where this process trains

Event = tuple[str, int, str]


class Net(nn.Module):
    """Parameters of many kinds: frozen, unused, without dimensions, used on some workers only, with
    buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32, is_plain: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.Identity() if is_plain else nn.BatchNorm1d(9)
        self.scale = nn.Parameter(
            torch.ones((), dtype=torch.float32 if is_plain else torch.float64)
        )
        self.sometimes = nn.Parameter(torch.empty(4, 9))
        self.unused = nn.Parameter(torch.empty(5))
        self.frozen = nn.Parameter(torch.empty(9), requires_grad=False)
        self.last = nn.Linear(9, 3, bias=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        if dtype != torch.float32:
            self.to(dtype)

    def forward(self, inputs: Tensor, uses_sometimes: bool) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)) + self.frozen) * self.scale.to(
            inputs.dtype
        )
        if uses_sometimes:
            hidden = hidden + (hidden @ self.sometimes.T) @ self.sometimes
        return self.last(hidden)


@dataclass(frozen=True)
class Member:
    """An optimizer and how its workers agree.

    Args:
        make: Makes it of (model, rank, world_size).
        period: Steps from one agreement to the next.
        without: For workers that do not agree to the bit but stay close: the same optimizer without
            communication, to compare with.
        dtype: Of the model.
        takes_world_size: Whether a wrong number of workers can be given to ``make``.
        needs_cpu: Whether it works on the host's memory only.
        draws_on_device: Whether its random numbers differ between the CPU and a GPU.
        sizes_vary: Whether its messages have other sizes from step to step.
    """

    make: Callable[[Net, int, int], Any]
    period: int = 1
    without: Callable[[Net], Any] | None = None
    dtype: torch.dtype = torch.float32
    takes_world_size: bool = True
    needs_cpu: bool = False
    draws_on_device: bool = False
    sizes_vary: bool = False

    def model(self) -> Net:
        """A new model, the same on every worker whatever its generators, which stay as they are."""
        with torch.random.fork_rng():
            return Net(self.dtype, is_plain=self.dtype != torch.float32).to(device)


def ring(rank: int, world_size: int) -> list[int]:
    return sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})


def half(model: Net, rank: int, world_size: int) -> FP16Optimizer:
    optimizer = FP16Optimizer(model, world_size, average_world=True, init_scale=4)
    optimizer.set_optimizer(SGD([optimizer.fp32_params], lr=0.05, momentum=0.9))
    return optimizer


def custom(model: Net, rank: int, world_size: int) -> CustomCentralizedOptimizer:
    inside = AdamW(model.parameters(), lr=0.01)
    return CustomCentralizedOptimizer(model, world_size, inside, average_world=True, grad_clip=0.5)


MEMBERS: dict[str, Member] = {
    "sgd": Member(lambda m, r, k: CentralizedSGD(k, m, lr=0.05, momentum=0.9)),
    "sgd by layer": Member(
        lambda m, r, k: CentralizedSGD(k, m, lr=0.05, momentum=0.9, by_layer=True)
    ),
    "sgd on weights": Member(
        lambda m, r, k: CentralizedSGD(k, m, lr=0.05, momentum=0.9, agg_grad=False)
    ),
    "sgd overlapped": Member(
        lambda m, r, k: CentralizedSGD(k, m, lr=0.05, momentum=0.9, overlap=True)
    ),
    "sgd in small buckets": Member(
        lambda m, r, k: CentralizedSGD(
            k,
            m,
            lr=0.05,
            momentum=0.9,
            aggregation=AllReduceAggregation(overlap=True, bucket_size_bytes=100),
            fused=True,
        )
    ),
    "sgd in fp16": Member(
        lambda m, r, k: CentralizedSGD(
            k, m, lr=0.05, aggregation=AllReduceAggregation(comm_dtype=torch.float16)
        )
    ),
    "sgd overlapped in bf16": Member(
        lambda m, r, k: CentralizedSGD(
            k,
            m,
            lr=0.05,
            aggregation=AllReduceAggregation(
                overlap=True, comm_dtype=torch.bfloat16, bucket_size_bytes=200
            ),
        )
    ),
    "adam overlapped": Member(lambda m, r, k: CentralizedAdam(k, m, lr=0.01, overlap=True)),
    "adam through shared memory": Member(
        lambda m, r, k: CentralizedAdam(
            k,
            m,
            lr=0.01,
            aggregation=AllReduceAggregation(
                overlap=True, bucket_size_bytes=100, shared_memory=True
            ),
        ),
        needs_cpu=True,
    ),
    "adam": Member(lambda m, r, k: CentralizedAdam(k, m, lr=0.01, amsgrad=True)),
    "custom": Member(custom),
    "fp16": Member(half, dtype=torch.float16),
    "bf16": Member(half, dtype=torch.bfloat16),
    "power 1": Member(lambda m, r, k: PowerSGD(m, lr=0.05, world_size=k)),
    "power 2 warm": Member(
        lambda m, r, k: PowerSGD(m, 0.05, momentum=0.9, world_size=k, rank=2, reuse_query=True)
    ),
    "power by layer": Member(lambda m, r, k: PowerSGD(m, lr=0.05, world_size=k, by_layer=True)),
    "power in turns": Member(
        lambda m, r, k: PowerSGD(
            m, 0.05, momentum=0.9, aggregation=PowerAggregation(m, alternate=True, world_size=k)
        ),
        sizes_vary=True,
    ),
    "qsgd": Member(lambda m, r, k: QSGD(k, m, lr=0.05, momentum=0.9), draws_on_device=True),
    "quantized": Member(lambda m, r, k: QuantizedSGD(k, m, lr=0.05, momentum=0.9)),
    "loco": Member(
        lambda m, r, k: QuantizedSGD(
            k,
            m,
            lr=0.05,
            aggregation=QuantizedAllReduceAggregation(
                bits=4, error_decay=0.8, rounding="stochastic"
            ),
        ),
        draws_on_device=True,
    ),
    "sign": Member(
        lambda m, r, k: SignSGD(m.named_parameters(), lr=0.01, momentum=0.9, world_size=k)
    ),
    "ef sign": Member(
        lambda m, r, k: EFSignSGD(m.named_parameters(), lr=0.01, momentum=0.9, world_size=k)
    ),
    "sparsified": Member(
        lambda m, r, k: SparsifiedSGD(m.parameters(), lr=0.05, sparse_grad_size=2, world_size=k)
    ),
    "top-k": Member(
        lambda m, r, k: CentralizedSparsifiedSGD(m.named_parameters(), lr=0.05, world_size=k)
    ),
    "random-k": Member(
        lambda m, r, k: CentralizedSparsifiedSGD(
            m.parameters(), lr=0.05, random_sparse=True, world_size=k
        )
    ),
    "ef21": Member(lambda m, r, k: EF21(k, m, lr=0.05, size=2)),
    "arc": Member(
        lambda m, r, k: EF21(k, m, lr=0.05, aggregation=ARCTopKAggregation(m, rank=1, world_size=k))
    ),
    "ef21 muon": Member(
        lambda m, r, k: GenericCentralizedOptimizer(
            k,
            m,
            optimizer=partial(MuonAdamW, lr=0.01, momentum=0),
            aggregation=EF21Aggregation(m, momentum=0, world_size=k),
        )
    ),
    "demo": Member(
        lambda m, r, k: DeMo(m.named_parameters(), lr=0.01, weight_decay=0.1, world_size=k)
    ),
    "one-bit adam": Member(
        lambda m, r, k: OneBitAdam(m.named_parameters(), lr=0.01, warmup_steps=1, world_size=k)
    ),
    "dion": Member(lambda m, r, k: Dion(m.named_parameters(), lr=0.01, rank=2, world_size=k)),
    "local": Member(lambda m, r, k: LocalSGD(k, m, lr=0.05, momentum=0.9, period=3), period=3),
    "local delayed": Member(
        # Saved and copied while a message is on its way.
        lambda m, r, k: LocalSGD(k, m, lr=0.05, momentum=0.9, period=3, delay=2),
        period=3,
        without=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
    ),
    "des loc": Member(
        lambda m, r, k: DESLOC(
            k, m, lr=0.01, period=3, first_moment_period=3, second_moment_period=6
        ),
        period=3,
        sizes_vary=True,
    ),
    "scaffold": Member(lambda m, r, k: SCAFFOLD(k, m, lr=0.05, period=3), period=3),
    "diloco": Member(lambda m, r, k: DiLoCo(k, m, lr=0.01, period=3), period=3),
    "edit": Member(
        lambda m, r, k: DiLoCo(
            k,
            m,
            lr=0.01,
            period=3,
            aggregation=DiLoCoAggregation(world_size=k, penalty=OutlierPenalty()),
        ),
        period=3,
    ),
    "diloco quantized": Member(
        lambda m, r, k: DiLoCo(
            k,
            m,
            lr=0.01,
            period=3,
            aggregation=DiLoCoAggregation(
                world_size=k, compressed=QuantizedAllReduceAggregation(bits=8)
            ),
        ),
        period=3,
    ),
    "eager": Member(
        # Saved and copied while a message is on its way.
        lambda m, r, k: DiLoCo(
            k, m, lr=0.01, period=3, aggregation=EagerDiLoCoAggregation(world_size=k)
        ),
        period=3,
        without=lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    ),
    "lars": Member(
        lambda m, r, k: GenericCentralizedOptimizer(k, m, optimizer=partial(LARS, lr=10.0))
    ),
    "muon": Member(
        lambda m, r, k: GenericCentralizedOptimizer(k, m, optimizer=partial(MuonAdamW, lr=0.01))
    ),
    "normuon": Member(
        lambda m, r, k: GenericCentralizedOptimizer(k, m, optimizer=partial(NorMuon, lr=0.01))
    ),
    "dion2": Member(
        lambda m, r, k: GenericCentralizedOptimizer(k, m, optimizer=partial(Dion2, lr=0.01))
    ),
    "dion3": Member(
        lambda m, r, k: GenericCentralizedOptimizer(k, m, optimizer=partial(Dion3, lr=0.01))
    ),
    "muloco": Member(
        lambda m, r, k: DiLoCo(k, m, inner_optimizer=partial(MuonAdamW, lr=0.01), period=3),
        period=3,
    ),
    "sparse loco": Member(lambda m, r, k: SparseLoCo(k, m, lr=0.01, period=3), period=3),
    "no loco": Member(
        lambda m, r, k: NoLoCo(k, m, lr=0.01, period=3),
        period=3,
        without=lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    ),
    "streaming": Member(
        lambda m, r, k: StreamingDiLoCo(
            k,
            m,
            lr=0.01,
            # Saved and copied while a message is on its way.
            aggregation=StreamingDiLoCoAggregation(period=3, fragments=1, delay=2, mixing=0.3),
        ),
        period=3,
        without=lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    ),
    "sparta": Member(
        lambda m, r, k: SPARTA(k, m, lr=0.01, share=0.5),
        without=lambda m: AdamW(m.parameters(), lr=0.01),
    ),
    "ring": Member(
        lambda m, r, k: DecentralizedSGD(r, ring(r, k), m, lr=0.05, momentum=0.9),
        without=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
        takes_world_size=False,
    ),
    "choco": Member(
        lambda m, r, k: ChocoSGD(
            model=m, lr=0.05, aggregation=ChocoAggregation(r, ring(r, k), ratio=0.5, gamma=0.5)
        ),
        without=lambda m: SGD(m.parameters(), lr=0.05),
        takes_world_size=False,
    ),
    "sgp": Member(
        lambda m, r, k: SGP(k, m, lr=0.05, momentum=0.9),
        without=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
    ),
}
every_member = pytest.mark.parametrize("name", MEMBERS)


class Recorder:
    """Hears of every collective that this worker calls, and is a tracker."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reported_bytes = 0
        self.collectives: Counter[str] = Counter()

    def record_batch_agg(self) -> None:
        """Not of interest here."""

    def record_batch_opt_step(self) -> None:
        """Not of interest here."""

    def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
        assert 0 <= exposed_s <= total_s
        self.reported_bytes += size_bytes

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        assert group > 1
        assert isinstance(overlapped, bool)
        self.collectives[op] += calls * size_bytes

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def hear(message: Tensor) -> None:
            self.events.append(("all_reduce", message.nbytes, str(message.dtype)))

        with recording_averages(hear), pytest.MonkeyPatch.context() as patch:
            for name, position in SENT.items():
                patch.setattr(dist, name, self._listen(name, getattr(dist, name), position))
            start = SharedMemorySum.start
            patch.setattr(
                SharedMemorySum, "start", self._listen("a sum through shared memory", start, 1)
            )
            yield

    def _listen(
        self, name: str, original: Callable[..., Any], position: int | None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "batch_isend_irecv":
                tensors = [transfer.tensor for transfer in args[0] if transfer.op is dist.isend]
            else:
                tensors = [] if position is None else [args[position]]
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.events.append((name, size_bytes, str(tensors[0].dtype) if tensors else ""))
            return original(*args, **kwargs)

        return call


SENT: dict[str, int | None] = {
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter": None,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "send": 0,
    "batch_isend_irecv": None,
    "barrier": None,
}
"""What may be called, and which argument is sent."""


def take_step(model: Net, optimizer: Any, step: int, rank: int, tracker: Any = None) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    dtype = model.first.weight.dtype
    inputs = torch.randn(8, 6, generator=generator).to(device, dtype)
    targets = torch.randn(8, 3, generator=generator).to(device)
    uses_sometimes = step not in ON_NO_WORKER and (rank == 0 or step not in ON_ONE_WORKER)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs, uses_sometimes).float(), targets)
    getattr(optimizer, "backward_loss", Tensor.backward)(loss)
    optimizer.step(tracker=tracker)


def parameters(model: Net) -> list[Tensor]:
    return [parameter.detach().clone().cpu() for parameter in model.parameters()]


def generator_states() -> list[Any]:
    states = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002
    return [*states, torch.cuda.get_rng_state().tolist()] if device.type == "cuda" else states


def train(member: Member, rank: int, world_size: int) -> dict[str, Any]:
    """A run with everything recorded, and in its middle a copy and a saved state that go on by
    themselves."""
    model = member.model()
    optimizer = member.make(model, rank, world_size)
    account = optimizer.aggregation
    history, events, counted, reported, collectives = [], [], [], [], []
    for step in range(STEPS):
        if step == HALF:
            copied_model, copied = copy.deepcopy((model, optimizer))
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        recorder, before = Recorder(), account.bytes_sent
        with recorder.listening():
            take_step(model, optimizer, step, rank, recorder)
        history.append(parameters(model))
        events.append(recorder.events)
        counted.append(account.bytes_sent - before)
        reported.append(recorder.reported_bytes)
        collectives.append(dict(recorder.collectives))
    for step in range(HALF, STEPS):
        take_step(copied_model, copied, step, rank)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed_model = member.model()
    resumed = member.make(resumed_model, rank, world_size)
    resumed_model.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    for step in range(HALF, STEPS):
        take_step(resumed_model, resumed, step, rank)
    return {
        "history": history,
        "events": events,
        "counted": counted,
        "reported": reported,
        "collectives": collectives,
        "copied": parameters(copied_model),
        "resumed": parameters(resumed_model),
        "is late": device.type == "cuda",
    }


def go_alone(make: Callable[[Net], Any], member: Member, rank: int) -> list[list[Tensor]]:
    """This worker's parameters after every step without communication."""
    model = member.model()
    optimizer, history = _IgnoresTracker(make(model)), []
    for step in range(STEPS):
        take_step(model, optimizer, step, rank)
        history.append(parameters(model))
    return history


class _IgnoresTracker:
    def __init__(self, optimizer: SGD) -> None:
        self.zero_grad = optimizer.zero_grad
        self.step = lambda tracker: optimizer.step()


def wrong_world(member: Member, rank: int, world_size: int) -> str:
    if not member.takes_world_size:
        return "not asked for"
    try:
        member.make(member.model(), rank, world_size + 1)
    except ValueError as error:
        return str(error)
    return "no error"


def run_member(name: str, rank: int, world_size: int) -> dict[str, Any]:
    member = MEMBERS[name]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)  # the workers' own generators differ, and that must not matter
    before = generator_states()
    try:
        result = train(member, rank, world_size)
    except Exception:
        return {"failure": traceback.format_exc()}
    result["leaves generators alone"] = generator_states() == before
    result["wrong world"] = wrong_world(member, rank, world_size)
    result["without"] = member.without and go_alone(member.without, member, rank)
    return result


def run_all(rank: int, world_size: int, device_type: str = "cpu") -> dict[str, Any]:
    global device
    device = torch.device(device_type)
    on_cpu = device_type == "cpu"
    return {
        name: run_member(name, rank, world_size)
        for name in MEMBERS
        if on_cpu or not MEMBERS[name].needs_cpu
    }


@functools.cache
def trained(
    world_size: int, backend: str = "gloo", device_type: str = "cpu"
) -> list[dict[str, Any]]:
    """Return each worker's results, by member. One start of the processes serves all tests."""
    return run_ranks(world_size, run_all, device_type, backend=backend, timeout_s=100)


@pytest.fixture(scope="module", params=some([2, 4]))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return trained(request.param)


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def ranks_on_a_gpu(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return trained(2, request.param, "cuda")


def results(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    for rank, found in enumerate(ranks):
        if "failure" in found[name]:
            pytest.fail(f"rank {rank}: {found[name]['failure']}")
    return [found[name] for found in ranks]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def spread(workers: list[list[Tensor]]) -> float:
    """Mean distance of the workers' parameters from their average."""
    flat = torch.stack(
        [torch.cat([p.double().reshape(-1) for p in tensors]) for tensors in workers]
    )
    return float((flat - flat.mean(0)).norm(dim=1).mean())


@every_member
def test_the_workers_agree_whenever_they_communicate(
    ranks: list[dict[str, Any]], name: str
) -> None:
    member, found = MEMBERS[name], results(ranks, name)
    if member.without is None:
        for step in range(member.period - 1, STEPS, member.period):
            first, *others = (result["history"][step] for result in found)
            assert all(same(first, other) for other in others), f"after step {step}"
    else:
        last = {
            kind: spread([result[kind][-1] for result in found]) for kind in ("history", "without")
        }
        assert last["history"] < 0.8 * last["without"]
    start = parameters(member.model())
    assert not same(start, found[0]["history"][-1])


@every_member
def test_between_two_agreements_each_worker_goes_its_own_way(
    ranks: list[dict[str, Any]], name: str
) -> None:
    member, found = MEMBERS[name], results(ranks, name)
    if member.period > 1:
        assert all(not same(found[0]["history"][0], other["history"][0]) for other in found[1:])
    for result in found:
        silent = [step for step in range(STEPS) if not result["events"][step]]
        assert silent == [step for step in range(STEPS) if (step + 1) % member.period]


@every_member
def test_resuming_in_the_middle_is_bit_identical(ranks: list[dict[str, Any]], name: str) -> None:
    for result in results(ranks, name):
        assert same(result["resumed"], result["history"][-1])


@every_member
def test_a_copy_from_the_middle_goes_on_bit_identically(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for result in results(ranks, name):
        assert same(result["copied"], result["history"][-1])


@every_member
def test_all_workers_call_the_same_collectives_in_one_fixed_order(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """Whatever parameters had a gradient where. The first step may have something to set up."""
    member, found = MEMBERS[name], results(ranks, name)
    events = found[0]["events"]
    assert all(result["events"] == events for result in found[1:])
    rounds = [events[step] for step in range(2 * member.period - 1, STEPS, member.period)]
    if member.sizes_vary:
        rounds = [[(kind, 0, rest) for kind, _, rest in messages] for messages in rounds]
    assert all(messages == rounds[0] for messages in rounds)
    assert rounds[0]


@every_member
def test_bytes_are_what_was_handed_to_the_collectives(
    ranks: list[dict[str, Any]], name: str
) -> None:
    member = MEMBERS[name]
    for result in results(ranks, name):
        seen = [sum(size_bytes for _, size_bytes, _ in messages) for messages in result["events"]]
        assert result["counted"][member.period :] == seen[member.period :]
        # On a GPU, a step's bytes are reported in this step or in the next one.
        counted, reported = [0, *accumulate(result["counted"])], [*accumulate(result["reported"])]
        late = counted if result["is late"] else counted[1:]
        assert all(
            least <= found <= most
            for least, found, most in zip(late, reported, counted[1:], strict=False)
        )
        assert sum(seen) > 0


@every_member
def test_the_record_of_collectives_names_each_kind_with_its_bytes(
    ranks: list[dict[str, Any]], name: str
) -> None:
    member = MEMBERS[name]
    names = {
        "batch_isend_irecv": "pair" if name in ("sgp", "no loco") else "neighbors",
        "a sum through shared memory": "shared_memory_sum",
        "all_to_all_single": "reduce_scatter",
    }
    for result in results(ranks, name):
        seen = [Counter[str]() for _ in result["events"]]
        for found, messages in zip(seen, result["events"], strict=True):
            for op, size_bytes, _ in messages:
                found[names.get(op, op)] += size_bytes
        assert result["collectives"][member.period :] == seen[member.period :]


@every_member
def test_the_users_generators_are_left_alone(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(result["leaves generators alone"] for result in results(ranks, name))


@every_member
def test_a_wrong_number_of_workers_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    k = len(ranks)
    for result in results(ranks, name):
        if MEMBERS[name].takes_world_size:
            assert (
                f"world_size is {k + 1}, but the process group has {k} workers"
                in result["wrong world"]
            )


RULES = (
    test_the_workers_agree_whenever_they_communicate,
    test_between_two_agreements_each_worker_goes_its_own_way,
    test_resuming_in_the_middle_is_bit_identical,
    test_a_copy_from_the_middle_goes_on_bit_identically,
    test_all_workers_call_the_same_collectives_in_one_fixed_order,
    test_bytes_are_what_was_handed_to_the_collectives,
    test_the_record_of_collectives_names_each_kind_with_its_bytes,
    test_the_users_generators_are_left_alone,
)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, which two workers share"
)
@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if not member.needs_cpu])
def test_the_rules_hold_on_a_gpu(ranks_on_a_gpu: list[dict[str, Any]], name: str) -> None:
    for rule in RULES:
        rule(ranks_on_a_gpu, name)
    if not MEMBERS[name].draws_on_device:
        assert_close_to_the_cpu(ranks_on_a_gpu, name)


def assert_close_to_the_cpu(ranks: list[dict[str, Any]], name: str) -> None:
    """Up to the first agreement: later, a rounding can decide about a sign or about which values
    are the largest."""
    member = MEMBERS[name]
    rtol, atol = (0.01, 1e-3) if member.dtype == torch.float32 else (0.05, 0.02)
    # Batch norm takes away what the bias before it adds: its gradient is zero but for roundings,
    # which Adam enlarges.
    compared = [n != "first.bias" for n, _ in member.model().named_parameters()]
    for on_gpu, on_cpu in zip(results(ranks, name), results(trained(2), name), strict=True):
        for step in range(member.period):
            ours, theirs = (
                list(compress(found["history"][step], compared)) for found in (on_gpu, on_cpu)
            )
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_every_collective_that_the_library_calls_is_heard() -> None:
    """A collective that the recorder does not know would make the rules above pass for nothing."""
    sources = Path(inspect.getfile(Aggregation)).parent.glob("*.py")
    names = {name for path in sources for name in re.findall(r"\bdist\.(\w+)\(", path.read_text())}
    assert "all_reduce" in names
    questions = {
        "is_initialized",
        "get_backend",
        "get_debug_level",
        "get_world_size",
        "get_rank",
        "get_process_group_ranks",
    }
    of_averages = {"isend", "irecv"}  # of averages, which are recorded as a whole
    assert names <= {*SENT, *questions, *of_averages, "P2POp"}
