"""What the tests of the methods of recent years run in each worker process."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ChunkedTopKAggregation,
    DeMoAggregation,
    DionAggregation,
    NoLoCoAggregation,
    PeriodicAggregation,
    QSGDAggregation,
    SparseLoCoAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.compression.one_bit import OneBitAggregation
from mlbench_core.optim.pytorch import (
    LARS,
    QSGD,
    SCAFFOLD,
    CentralizedAdam,
    CentralizedSGD,
    DeMo,
    DiLoCo,
    Dion,
    Dion2,
    Dion3,
    GenericCentralizedOptimizer,
    LocalSGD,
    MuonAdamW,
    NoLoCo,
    NorMuon,
    OneBitAdam,
    QuantizedSGD,
    SparseLoCo,
    StreamingDiLoCo,
)
from tests.optim.compressed_workers import quadratic
from tests.optim.weight_averaging import Weights, descend, gradient, start

STEPS = 15  # of descend
DIGITS_STEPS = 160
SPARSE_LOCO: dict[str, Any] = {"density": 3, "bits": 2, "decay": 0.9, "chunk_size": 16}
DION_RANK = 2
RELATIVES: dict[str, Callable[[Any], Optimizer]] = {
    "normuon": partial(NorMuon, lr=0.05),
    "dion2": partial(Dion2, lr=0.05, fraction=0.3),
    "dion3": partial(Dion3, lr=0.05, fraction=0.3),
}
LARS_OPTIONS: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.1}
STREAMING: dict[str, Any] = {"period": 5, "fragments": 2, "delay": 2, "mixing": 0.3}
DELAYED = ((4, 0), (4, 1), (4, 3), (5, 2), (2, 1))  # H and tau
QSGD_LEVELS, QSGD_BUCKET = 3, 8


def qsgd_uniform(shape: tuple[int, ...], rank: int, step: int) -> Tensor:
    """The random numbers of a worker for a tensor, which fills whole buckets."""
    numel = math.prod(shape)
    bits = np.random.Generator(np.random.SFC64(np.random.SeedSequence((0, rank, step))))
    words = bits.integers(0, 2**64, -(-numel // 4), dtype=np.uint64)
    return torch.from_numpy((words.view(np.uint16)[:numel] + 0.5) / 65536).view(shape)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qsgd(rank: int, world_size: int) -> list[Tensor]:
    model = Weights(x=start())
    exchange = QSGDAggregation(levels=QSGD_LEVELS, bucket_size=QSGD_BUCKET)
    return descend(rank, model, QSGD(model=model, lr=0.1, aggregation=exchange))


def scaffold(rank: int, world_size: int) -> dict[str, Any]:
    """Against the reference; and on quadratics of different curvatures and optima, beside local
    SGD."""
    model = Weights(x=start())
    optimizer = SCAFFOLD(model=model, lr=0.1, period=5)
    history, sent = [], []
    for step in range(STEPS):
        history += descend(rank, model, optimizer, range(step, step + 1))
        sent.append(optimizer.aggregation.last_bytes)
    result = {"history": history, "sent": sent, "state": optimizer.aggregation.inside.state_dict()}
    A, b = quadratic(rank)
    for name, make in {"scaffold": SCAFFOLD, "local": LocalSGD}.items():
        far = Weights(x=torch.zeros(6, dtype=torch.float64))
        optimizer = make(model=far, lr=0.1, period=8)
        for _ in range(40 * 8):
            far.x.grad = A @ (far.x.detach() - b)
            optimizer.step()
        result[name] = far.x.detach()
    return result


def sparse_loco(rank: int, world_size: int) -> dict[str, Any]:
    """Against the reference; and without compression, beside local SGD."""
    model = Weights(x=start())
    compressed = ChunkedTopKAggregation(**SPARSE_LOCO)
    optimizer = SparseLoCo(
        model=model, lr=0.05, period=5, aggregation=SparseLoCoAggregation(compressed, outer_lr=0.8)
    )
    history, sent = [], []
    for step in range(STEPS):
        history += descend(rank, model, optimizer, range(step, step + 1))
        sent.append(optimizer.aggregation.last_bytes)
    result = {"history": history, "sent": sent, "memory": compressed.memory("x")}
    whole = SparseLoCoAggregation(ChunkedTopKAggregation(density=1.0, bits=None, decay=0.0))
    model = Weights(x=start())
    inner = partial(torch.optim.SGD, lr=0.1)
    result["whole"] = descend(
        rank, model, DiLoCo(model=model, inner_optimizer=inner, period=5, aggregation=whole)
    )
    model = Weights(x=start())
    result["local"] = descend(rank, model, LocalSGD(model=model, lr=0.1, period=5))
    return result


def no_loco(rank: int, world_size: int) -> dict[str, Any]:
    """Against the reference, resumed, and without an inner optimizer: moved at random, or two
    workers that nothing moves."""
    model = Weights(x=start(rank))
    optimizer = NoLoCo(model=model, lr=0.05, period=5)
    history, sent = [], []
    for step in range(STEPS):
        if step == 7:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        history += descend(rank, model, optimizer, range(step, step + 1))
        sent.append(optimizer.aggregation.last_bytes)
    resumed = Weights(x=start())
    optimizer = NoLoCo(model=resumed, lr=0.05, period=5)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    descend(rank, resumed, optimizer, range(7, STEPS))
    result: dict[str, Any] = {"history": history, "sent": sent, "resumed": resumed.x.detach()}
    two = dist.new_group([0, 1])
    for name, group in {"moved": None, "not moved": two}.items():
        if group is two and rank > 1:
            continue
        x, aggregation = start(rank), NoLoCoAggregation(seed=3, process_group=group)
        aggregation.start({"x": nn.Parameter(x)})
        result[name] = [(x.clone(), torch.zeros_like(x))]
        for call in range(8):
            if name == "moved":
                x += no_loco_move(rank, call)
            aggregation.aggregate({"x": x}, "avg_world")
            momentum = -aggregation.state_dict()["outer_state"]["x"]["momentum_buffer"]
            result[name].append((x.clone(), momentum))
    return result


def no_loco_move(rank: int, call: int) -> Tensor:
    """The way of a worker between two calls."""
    generator = _generator(100 * rank + call)
    return torch.randn(start().shape, generator=generator, dtype=torch.float64)


def streaming(rank: int, world_size: int) -> dict[Any, Any]:
    """Against the reference, resumed at every step, beside DiLoCo, and without waiting for the
    other workers."""
    result: dict[Any, Any] = {}
    for quantize in (False, True):
        model, optimizer = _streaming(quantize=quantize, **STREAMING)
        history, sent, saved = [], [], []
        for step in range(STEPS):
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            fragment_step(rank, model, optimizer, step)
            history.append((model.x.detach().clone(), model.y.detach().clone()))
            sent.append(optimizer.aggregation.last_bytes)
        resumed = []
        for cut in range(4, 9):
            model, optimizer = _streaming(quantize=quantize, **STREAMING)
            model.load_state_dict(saved[cut][0])
            optimizer.load_state_dict(saved[cut][1])
            for step in range(cut, STEPS):
                fragment_step(rank, model, optimizer, step)
            resumed.append((model.x.detach(), model.y.detach()))
        result[quantize] = {"history": history, "sent": sent, "resumed": resumed}
    model = Weights(x=start())
    result["diloco"] = descend(rank, model, DiLoCo(model=model, lr=0.05, period=5))
    model = Weights(x=start())
    exchange = StreamingDiLoCoAggregation(period=5, fragments=1, delay=0, mixing=0)
    result["plain"] = descend(
        rank, model, StreamingDiLoCo(model=model, lr=0.05, aggregation=exchange)
    )
    result["order"] = go_ahead(rank, world_size, *_streaming(**STREAMING))
    for quantize, delay in itertools.product((False, True), (0, 2)):
        model, optimizer = _streaming(quantize=quantize, **{**STREAMING, "delay": delay})
        tracker = Collectives()
        for step in range(6):
            fragment_step(rank, model, optimizer, step, tracker)
        result["collectives", quantize, delay] = (
            tracker.seen,
            optimizer.aggregation.compression_ratio,
        )
    return result


def go_ahead(rank: int, world_size: int, model: Weights, optimizer: Optimizer) -> bool:
    """Worker 0 takes the steps with its message on the way before any other worker takes a step."""
    flag = torch.zeros(1)
    if rank > 0:
        dist.recv(flag, 0)
    for step in range(3):
        fragment_step(rank, model, optimizer, step)
    for other in range(1, world_size) if rank == 0 else ():
        dist.send(torch.ones(1), other)
    fragment_step(rank, model, optimizer, 3)
    return flag.item() == float(rank > 0)


def _streaming(**options: Any) -> tuple[Weights, StreamingDiLoCo]:
    model = Weights(x=start(), y=start()[0])
    return model, StreamingDiLoCo(
        model=model, lr=0.05, aggregation=StreamingDiLoCoAggregation(**options)
    )


def fragment_gradient(rank: int, fragment: int, x: Tensor, step: int) -> Tensor:
    """Of x, and of y, a row."""
    return gradient(rank, x, step) if fragment == 0 else gradient(rank, x.expand(5, 7), step)[0]


def fragment_step(
    rank: int, model: Weights, optimizer: Any, step: int, tracker: Any = None
) -> None:
    for fragment, parameter in enumerate(model.parameters()):
        parameter.grad = fragment_gradient(rank, fragment, parameter.detach(), step)
    optimizer.step(tracker=tracker)


class Collectives:
    """A tracker that keeps the collectives of every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []

    def record_batch_opt_step(self) -> None:
        """Not of interest here."""

    def record_batch_agg(self) -> None:
        """Not of interest here."""

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        self.seen += calls * [(op, size_bytes, overlapped)]


def delayed(rank: int, world_size: int) -> dict[Any, Any]:
    """Local SGD against the reference, with what it sends; resumed at every step; and other uses of
    a delay."""
    result: dict[Any, Any] = {}
    for (period, delay), by_layer in itertools.product(DELAYED, (False, True)):
        model, optimizer = _delayed(period=period, delay=delay, by_layer=by_layer)
        history, sent, collectives = [], [], []
        for step in range(STEPS):
            tracker = Collectives()
            fragment_step(rank, model, optimizer, step, tracker)
            history.append((model.x.detach().clone(), model.y.detach().clone()))
            sent.append(optimizer.aggregation.last_bytes)
            collectives.append(tracker.seen)
        result[period, delay, by_layer] = {
            "history": history,
            "sent": sent,
            "collectives": collectives,
        }
    result["resumed"] = [_resumed(rank, cut) for cut in range(3, 10)]
    half = AllReduceAggregation(comm_dtype=torch.float16)
    model, optimizer = _delayed(period=4, delay=2, aggregation=half)
    for step in range(STEPS):
        fragment_step(rank, model, optimizer, step)
    large = torch.full((2,), 60_000.0)
    aggregation = PeriodicAggregation(half, period=2, delay=1)
    for _ in range(3):
        aggregation.aggregate({"large": large}, "avg_world")
    result["half"] = model.x.detach(), optimizer.aggregation.bytes_sent, large
    result["order"] = go_ahead(rank, world_size, *_delayed(period=3, delay=1))
    return {**result, "late": _late(rank), "kinds": _kinds(rank), "shorter": _shorter(rank)}


def _delayed(lr: float = 0.1, **options: Any) -> tuple[Weights, LocalSGD]:
    model = Weights(x=start(), y=start()[0])
    return model, LocalSGD(model=model, lr=lr, **options)


def _resumed(rank: int, cut: int) -> dict[str, Any]:
    """The ends of a run with momentum, of a run from its state at a step, and of a copy of it."""
    options: dict[str, Any] = {"period": 4, "delay": 3, "momentum": 0.9}
    model, optimizer = _delayed(**options)
    for step in range(cut):
        fragment_step(rank, model, optimizer, step)
    copied_model, copied = copy.deepcopy((model, optimizer))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed_model, resumed = _delayed(**options)
    fragment_step(rank, resumed_model, resumed, 0)
    resumed_model.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    pairs = {
        "through": (model, optimizer),
        "copied": (copied_model, copied),
        "resumed": (resumed_model, resumed),
    }
    for each_model, each in pairs.values():
        for step in range(cut, STEPS):
            fragment_step(rank, each_model, each, step)
    pickle.loads(pickle.dumps(optimizer.aggregation))
    return {
        name: (each_model.x.detach(), each_model.y.detach())
        for name, (each_model, _) in pairs.items()
    }


def _late(rank: int) -> Tensor:
    """A parameter outside the model that comes after the first step, so that it is averaged one
    step later."""
    model, optimizer = _delayed(period=4, delay=2)
    late = nn.Parameter(start())
    fragment_step(rank, model, optimizer, 0)
    optimizer.add_param_group({"params": [late]})
    for step in range(STEPS):
        late.grad = gradient(rank, late.detach(), step)
        fragment_step(rank, model, optimizer, step)
    return late.detach()


def _kinds(rank: int) -> dict[str, Tensor]:
    """Tensors of many kinds, with the value 1 + rank, which grow by 3 while their average
    travels."""
    tensors = {
        "f64": torch.full((3,), rank + 1.0, dtype=torch.float64),
        "bf16": torch.full((2, 2), rank + 1.0, dtype=torch.bfloat16),
        "scalar": torch.tensor(rank + 1.0),
        "empty": torch.zeros(0, 3),
        "complex": torch.full((2,), complex(rank + 1, 0)),
        "strided": torch.full((2, 3, 4, 5), rank + 1.0).to(memory_format=torch.channels_last),
        "large": torch.full((1 << 21,), rank + 1.0),
        ":buffer:mean": torch.full((2,), rank + 1.0),
    }
    memory = [tensor.data_ptr() for tensor in tensors.values()]
    aggregation = PeriodicAggregation(AllReduceAggregation(), period=2, delay=1)
    for change in (0.0, 0.0, 3.0):
        for tensor in tensors.values():
            tensor += change
        aggregation.aggregate(tensors, "avg_world")
    assert memory == [tensor.data_ptr() for tensor in tensors.values()]
    assert tensors["strided"].is_contiguous(memory_format=torch.channels_last)
    return tensors


def _shorter(rank: int) -> list[Tensor]:
    """A state with a message on its way, loaded by aggregations that have other delays and
    periods."""
    x = torch.full((2,), float(rank))
    first = PeriodicAggregation(AllReduceAggregation(), period=4, delay=3)
    for _ in range(4):
        first.aggregate({"x": x}, "avg_world")
    result = []
    for period, delay in ((4, 0), (4, 1), (5, 3)):
        other, y = PeriodicAggregation(AllReduceAggregation(), period, delay), x.clone()
        other.load_state_dict(first.state_dict())
        other.aggregate({"x": y}, "avg_world")
        result.append(y)
    return result


def demo(rank: int, world_size: int) -> dict[Any, Any]:
    """Against the reference with and without the sign, and with nothing left behind."""
    result: dict[Any, Any] = {}
    for name, (sign, top_k) in {
        "sign": (True, 3),
        "plain": (False, 3),
        "whole": (False, 25),
    }.items():
        model = Weights(x=start())
        exchange = DeMoAggregation(decay=0.9, top_k=top_k, block_size=5)
        optimizer = DeMo(model.named_parameters(), lr=0.1, sign=sign, aggregation=exchange)
        history = descend(rank, model, optimizer)
        result[name] = {
            "history": history,
            "momentum": exchange.memory("x"),
            "sent": exchange.last_bytes,
        }
    return result


class Uncompressed(OneBitAggregation):
    """Its compression is the identity."""

    def _compress(
        self, tensors: Mapping[str, Tensor], divisor: Any, extra: Sequence[Tensor]
    ) -> None:
        self._average_uncompressed([*tensors.values(), *extra], divisor)


def one_bit_adam(rank: int, world_size: int) -> dict[Any, Any]:
    """Against the reference, uncompressed too; x has a coordinate without gradients, and the bytes
    of each step."""
    result: dict[Any, Any] = {}
    for kind in (OneBitAggregation, Uncompressed):
        model = Weights(x=start())
        exchange = kind(warmup_steps=6)
        optimizer = OneBitAdam(model.named_parameters(), lr=0.02, aggregation=exchange)
        sent = []
        for step in range(STEPS):
            model.x.grad = partial_gradient(rank, model.x.detach(), step)
            optimizer.step()
            sent.append(exchange.last_bytes)
        state = exchange.state_dict()
        result[kind.__name__] = {"x": model.x.detach(), "state": state, "sent": sent}
    return result


def partial_gradient(rank: int, x: Tensor, step: int) -> Tensor:
    """Without the first coordinate."""
    g = gradient(rank, x, step)
    g[0, 0] = 0
    return g


def dion(rank: int, world_size: int) -> dict[str, Any]:
    """Against the reference: a matrix, and a vector beside it; the first Q, and at the end momentum
    and bytes."""
    model = Weights(x=start(), y=start()[0])
    exchange = DionAggregation(rank=DION_RANK, momentum=0.9)
    optimizer = Dion(model.named_parameters(), lr=0.05, weight_decay=0.1, aggregation=exchange)
    first = exchange._query("x", torch.zeros(5, 7, dtype=torch.float64)).clone()
    for step in range(STEPS):
        model.x.grad = gradient(rank, model.x.detach(), step)
        model.y.grad = gradient(rank, model.x.detach(), step)[0]
        optimizer.step()
    state = exchange.state_dict()
    return {
        "x": model.x.detach(),
        "y": model.y.detach(),
        "first": first,
        "state": state,
        "sent": exchange.last_bytes,
    }


def muon(rank: int, world_size: int) -> dict[str, Any]:
    """A matrix and a vector, with averaged gradients; and as DiLoCo's inner optimizer."""
    model = Weights(x=start(), y=start()[0])
    optimizer: Any = GenericCentralizedOptimizer(None, model, optimizer=partial(MuonAdamW, lr=0.05))
    for step in range(STEPS):
        for fragment, parameter in enumerate(model.parameters()):
            parameter.grad = fragment_gradient(rank, fragment, parameter.detach(), step)
        optimizer.step()
    result = {"x": model.x.detach(), "y": model.y.detach()}
    model = Weights(x=start())
    optimizer = DiLoCo(model=model, inner_optimizer=partial(MuonAdamW, lr=0.05), period=5)
    return {**result, "muloco": descend(rank, model, optimizer)}


def relatives_of_muon(rank: int, world_size: int) -> dict[str, Any]:
    """A wide and a tall matrix, with averaged gradients, and the bytes of a step."""
    result = {}
    for name, make in RELATIVES.items():
        model = Weights(x=start(), y=start().T.clone())
        exchange = AllReduceAggregation()
        optimizer = GenericCentralizedOptimizer(None, model, optimizer=make, aggregation=exchange)
        for step in range(STEPS):
            model.x.grad = gradient(rank, model.x.detach(), step)
            model.y.grad = gradient(rank, model.y.detach().T, step).T.clone()
            optimizer.step()
        result[name] = (model.x.detach(), model.y.detach(), exchange.last_bytes)
    return result


def lars(rank: int, world_size: int) -> dict[str, Any]:
    """A matrix, and a vector that starts at zero, with averaged gradients."""
    model = Weights(x=start(), y=torch.zeros_like(start()[0]))
    optimizer = GenericCentralizedOptimizer(None, model, optimizer=partial(LARS, **LARS_OPTIONS))
    for step in range(STEPS):
        for fragment, parameter in enumerate(model.parameters()):
            parameter.grad = fragment_gradient(rank, fragment, parameter.detach(), step)
        optimizer.step()
    return {"x": model.x.detach(), "y": model.y.detach()}


def digits_data() -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and an order of them: the first 1,400 are for training."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=_generator(0))
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels), order


DIGITS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: CentralizedSGD(2, m, lr=0.2, momentum=0.9),
    "delayed": lambda m: LocalSGD(2, m, lr=0.2, momentum=0.9, period=8, delay=4),
    "qsgd": lambda m: QSGD(
        2, m, lr=0.2, momentum=0.9, aggregation=QSGDAggregation(levels=7, norm=math.inf)
    ),
    "quantized": lambda m: QuantizedSGD(2, m, lr=0.2, momentum=0.9),
    "loco": lambda m: QuantizedSGD(2, m, lr=0.2, momentum=0.9, bits=4, error_decay=0.8),
    "demo": lambda m: DeMo(m.named_parameters(), lr=0.02, aggregation=DeMoAggregation(decay=0.99)),
    "adam": lambda m: CentralizedAdam(2, m, lr=0.01),
    "one-bit adam": lambda m: OneBitAdam(m.named_parameters(), lr=0.01, eps=1e-3, warmup_steps=32),
    "dion": lambda m: Dion(m.named_parameters(), lr=0.2, rank=4),
    "muon": lambda m: GenericCentralizedOptimizer(2, m, optimizer=partial(MuonAdamW, lr=0.08)),
    "normuon": lambda m: GenericCentralizedOptimizer(2, m, optimizer=partial(NorMuon, lr=0.08)),
    "dion2": lambda m: GenericCentralizedOptimizer(2, m, optimizer=partial(Dion2, lr=0.2)),
    "dion3": lambda m: GenericCentralizedOptimizer(2, m, optimizer=partial(Dion3, lr=0.2)),
    "muloco": lambda m: DiLoCo(2, m, inner_optimizer=partial(MuonAdamW, lr=0.01), period=8),
    "diloco": lambda m: DiLoCo(2, m, lr=0.02, period=8),
    "streaming": lambda m: StreamingDiLoCo(
        2, m, lr=0.02, aggregation=StreamingDiLoCoAggregation(period=8, delay=2, quantize=True)
    ),
    "sparse loco": lambda m: SparseLoCo(
        2,
        m,
        lr=0.02,
        period=8,
        aggregation=SparseLoCoAggregation(ChunkedTopKAggregation(density=0.03)),
    ),
}


def digits(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    """Share of test digits that a small net gets right, and bytes sent, by optimizer; by 2
    workers."""
    if world_size != 2:
        return {}
    inputs, targets, order = digits_data()
    result = {}
    for name, make in DIGITS.items():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer, shuffle = make(net), _generator(2)
        scheduler = LambdaLR(optimizer, lambda t: 1 - t / DIGITS_STEPS)
        for _ in range(DIGITS_STEPS):
            batch = order[torch.randint(1400, (64,), generator=shuffle)].chunk(2)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            scheduler.step()
        right = net(inputs[order[1400:]]).argmax(dim=1) == targets[order[1400:]]
        result[name] = right.double().mean().item(), optimizer.aggregation.bytes_sent
    return result


SCENARIOS = (
    qsgd,
    scaffold,
    sparse_loco,
    no_loco,
    streaming,
    delayed,
    demo,
    one_bit_adam,
    dion,
    muon,
    relatives_of_muon,
    lars,
    digits,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
