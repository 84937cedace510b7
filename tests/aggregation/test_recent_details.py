"""Details of the aggregations of recent methods: one worker in this process, step by step against
formulas.

The runs of several workers against the references are in ``tests/optim/test_recent_methods.py``.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    ARCTopKAggregation,
    ChunkedTopKAggregation,
    DeMoAggregation,
    DESLOCAggregation,
    DionAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    NoLoCoAggregation,
    OneBitAggregation,
    PushSumAggregation,
    QSGDAggregation,
    QuantizedAllReduceAggregation,
    ScaffoldAggregation,
    SparseLoCoAggregation,
    SPARTAAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.compression import qsgd as qsgd_module
from mlbench_core.aggregation.pytorch.compression.demo import dct_matrix
from mlbench_core.aggregation.pytorch.local_steps.streaming import _Fragment
from mlbench_core.aggregation.pytorch.transport import messages
from mlbench_core.optim.pytorch import (
    SCAFFOLD,
    DeMo,
    Dion,
    EFSignSGD,
    OneBitAdam,
    SignSGD,
    SparsifiedSGD,
)
from tests.references.sparse_loco import compress

SHAPE = (6, 10)

# Another default would change the meaning of earlier results.
DEFAULTS: dict[Any, dict[str, Any]] = {
    ChunkedTopKAggregation: {"density": 0.02, "bits": 2, "decay": 0.95, "chunk_size": 4096},
    DESLOCAggregation: {
        "world_size": None, "period": 8, "first_moment_period": None, "second_moment_period": None,
    },
    DeMoAggregation: {"decay": 0.999, "top_k": 32, "block_size": 64, "mean_of_senders": False},
    DionAggregation: {"rank": 8, "momentum": 0.95, "seed": 0},
    EagerDiLoCoAggregation: {"outer_optimizer": None},
    EF21Aggregation: {"model": inspect.Parameter.empty, "size": 0.1, "momentum": 0.9},
    ARCTopKAggregation: {
        "model": inspect.Parameter.empty, "size": 0.2, "rank": 4, "momentum": 0.9, "seed": 0,
    },
    OneBitAggregation: {"beta": 0.9, "warmup_steps": 100},
    QSGDAggregation: {"levels": 7, "bucket_size": 512, "norm": 2, "seed": 0},
    NoLoCoAggregation: {"outer_lr": 0.7, "outer_momentum": 0.5, "gamma": 0.7, "seed": 0},
    PushSumAggregation: {"peers": None},
    QuantizedAllReduceAggregation: {
        "bits": 8, "block": 256, "rounding": "nearest", "error_decay": None, "seed": 0,
    },
    ScaffoldAggregation: {"world_size": None},
    SPARTAAggregation: {"world_size": None, "share": 0.005, "seed": 0},
    SparseLoCoAggregation: {"compressed": None, "outer_lr": 1.0},
    StreamingDiLoCoAggregation: {
        "outer_optimizer": None, "world_size": None, "period": 100, "fragments": 4, "delay": 5,
        "mixing": 0.5,
        "quantize": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_the_defaults_stay(kind: Any) -> None:
    own = {name: value.default for name, value in inspect.signature(kind).parameters.items()}
    every = {"use_cuda": False, "world_size": None, "process_group": None, "elastic": None}
    assert own == {**{name: every[name] for name in own if name in every}, **DEFAULTS[kind]}


def randn(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(step), dtype=dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


class Gradients:
    """An aggregation of gradients, and the results of its steps."""

    def __init__(self, aggregation: Any) -> None:
        self.aggregation = aggregation

    def step(self, t: int) -> list[Tensor]:
        tensors = {"x": randn(t), "y": randn(t + 100, 7)}
        self.aggregation.aggregate(tensors, "avg_world")
        return list(tensors.values())

    def resumed(self, aggregation: Any, state: Any) -> Gradients:
        aggregation.load_state_dict(state)
        return Gradients(aggregation)


class Weights:
    """An aggregation of weights that take a local step before each call."""

    def __init__(self, aggregation: Any, tensors: dict[str, Tensor] | None = None) -> None:
        self.aggregation = aggregation
        self.tensors = tensors or {"x": randn(50), "y": randn(51, 7)}
        aggregation.start({name: nn.Parameter(x) for name, x in self.tensors.items()})

    def step(self, t: int) -> list[Tensor]:
        for i, (name, x) in enumerate(self.tensors.items()):
            x -= 0.1 * randn(t + 200 * i, *x.shape)
            if isinstance(self.aggregation, ScaffoldAggregation):
                self.aggregation.count(name, 0.1 + 0.1 * t)
        if t % 2 or not isinstance(self.aggregation, ScaffoldAggregation):
            self.aggregation.aggregate(self.tensors, "avg_world")
        results = [*self.tensors.values()]
        if isinstance(self.aggregation, ScaffoldAggregation):
            results += [
                c for name in self.tensors if (c := self.aggregation.correction(name)) is not None
            ]
        return [x.clone() for x in results]

    def resumed(self, aggregation: Any, state: Any) -> Weights:
        tensors = {name: x.clone() for name, x in self.tensors.items()}
        result = Weights(aggregation, tensors)
        aggregation.load_state_dict(state)
        return result


MAKERS: dict[str, Callable[[], Gradients | Weights]] = {
    "QSGD": lambda: Gradients(QSGDAggregation(levels=2, bucket_size=8)),
    "LoCo": lambda: Gradients(
        QuantizedAllReduceAggregation(bits=4, error_decay=0.8, rounding="stochastic")
    ),
    "DeMo": lambda: Gradients(DeMoAggregation(top_k=2, decay=0.9)),
    "Dion": lambda: Gradients(DionAggregation(rank=2)),
    "EF21": lambda: Gradients(EF21Aggregation(None, size=3)),
    "ARC-Top-K": lambda: Gradients(ARCTopKAggregation(None, size=2, rank=2)),
    "one bit": lambda: Gradients(OneBitAggregation(warmup_steps=2)),
    "chunked top-k": lambda: Gradients(ChunkedTopKAggregation(density=3, chunk_size=16)),
    "scaffold": lambda: Weights(ScaffoldAggregation()),
    "sparse loco": lambda: Weights(
        SparseLoCoAggregation(ChunkedTopKAggregation(density=3, chunk_size=16))
    ),
    "no loco": lambda: Weights(NoLoCoAggregation()),
    "eager": lambda: Weights(EagerDiLoCoAggregation()),
    "streaming": lambda: Weights(StreamingDiLoCoAggregation(period=4, fragments=2, delay=2)),
    "streaming in 4 bits": lambda: Weights(
        StreamingDiLoCoAggregation(period=3, fragments=2, delay=1, quantize=True)
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("cut", [1, 3, 4, 5])
def test_it_resumes_to_the_bit_and_leaves_the_state_that_it_loads(name: str, cut: int) -> None:
    through = MAKERS[name]()
    for t in range(cut):
        through.step(t)
    state = copy.deepcopy(through.aggregation.state_dict())
    before = str(state)
    resumed = through.resumed(type(MAKERS[name]())(MAKERS[name]().aggregation).aggregation, state)
    for t in range(cut, cut + 4):
        for actual, expected in zip(resumed.step(t), through.step(t), strict=True):
            assert torch.equal(actual, expected)
    assert str(state) == before


@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_is_remembered_in_float32_and_results_keep_their_dtype(name: str) -> None:
    run = MAKERS[name]()
    tensors = {"x": randn(0).bfloat16(), "y": randn(1, 7).bfloat16()}
    if isinstance(run, Weights):
        run = Weights(type(MAKERS[name]())(copy.deepcopy(run.aggregation)).aggregation, tensors)
    for t in range(4):
        step = {
            n: x if isinstance(run, Weights) else randn(t, *x.shape).bfloat16()
            for n, x in tensors.items()
        }
        run.aggregation.aggregate(step, "avg_world")
        assert all(x.dtype == torch.bfloat16 for x in step.values())

    def check(value: Any) -> None:
        if isinstance(value, Mapping):
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)
        elif isinstance(value, Tensor) and value.is_floating_point():
            assert value.dtype in (torch.float32, torch.float64)

    if "streaming" not in name:  # its messages on the way are gradients
        check(run.aggregation.state_dict())


OWN = {
    "DeMo": ["momentum"],
    "Dion": ["momentum"],
    "one bit": ["errors"],
    "chunked top-k": ["memory"],
    "scaffold": ["own"],
    "sparse loco": ["compressed"],
    "no loco": ["shared", "outer_state"],
    "eager": ["shared", "outer_state"],
    "LoCo": ["memory", "owner_memory"],
    "EF21": ["memory", "momentum"],
    "ARC-Top-K": ["memory", "momentum"],
}


@pytest.mark.parametrize("name", MAKERS)
def test_only_what_differs_between_workers_is_left_out_of_a_shared_state(name: str) -> None:
    run = MAKERS[name]()
    for t in range(4):
        run.step(t)
    state = run.aggregation.state_dict()
    shared = run.aggregation.shared_state(state)
    own = [key for key in state if str(shared[key]) != str(state[key])]
    assert own == OWN.get(name, [])


@pytest.mark.parametrize(
    "name", [name for name, make in MAKERS.items() if isinstance(make(), Gradients)]
)
def test_strides_do_not_matter(name: str) -> None:
    one, other = (MAKERS[name]().aggregation for _ in range(2))
    for t in range(4):
        x, y = randn(t), randn(t).t().contiguous().t()
        assert not y.is_contiguous()
        one.aggregate({"x": x}, "avg_world")
        other.aggregate({"x": y}, "avg_world")
        assert torch.equal(x, y)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sign": partial(SignSGD, lr=0.1, momentum=0.9),
    "EF-sign": partial(EFSignSGD, lr=0.1),
    "top-k": partial(SparsifiedSGD, lr=0.1),
    "DeMo": partial(DeMo, lr=0.1),
    "one-bit Adam": partial(OneBitAdam, lr=0.1, warmup_steps=1),
    "Dion": partial(Dion, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_leaves_the_gradients_to_the_script(name: str) -> None:
    parameters = [nn.Parameter(randn(50)), nn.Parameter(randn(51, 7))]
    optimizer = OPTIMIZERS[name](parameters)
    for t in range(3):
        gradients = [randn(t, *parameter.shape) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_one_bit_adam_follows_a_schedule_of_its_betas() -> None:
    x, y = nn.Parameter(randn(50)), nn.Parameter(randn(50))
    optimizers = OneBitAdam([x], lr=0.1, warmup_steps=9), torch.optim.Adam([y], lr=0.1)
    for t in range(6):
        for parameter, optimizer in zip((x, y), optimizers, strict=True):
            optimizer.param_groups[0]["betas"] = (0.5 + 0.05 * t, 0.9 + 0.01 * t)
            parameter.grad = randn(t)
            optimizer.step()
        assert_close(x.detach(), y.detach())


class TestQSGD:
    @pytest.mark.parametrize("bucket_size", [3, 1000])
    def test_a_bucket_may_be_larger_than_a_block_or_than_the_tensor(
        self, bucket_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(qsgd_module, "BLOCK_ELEMENTS", 8)
        x = 2.0 * torch.randint(-1, 2, (29,), generator=torch.Generator().manual_seed(0))
        x[::3] = 2
        expected = x.clone()
        QSGDAggregation(levels=1, bucket_size=bucket_size, norm=math.inf).aggregate(
            {"x": x}, "avg_world"
        )
        assert torch.equal(x, expected)

    @pytest.mark.parametrize("norm", [2, math.inf])
    def test_a_value_is_a_level_next_to_it_of_the_chosen_norm(self, norm: float) -> None:
        x = randn(0, 4000)
        rounded = x.clone()
        QSGDAggregation(levels=5, bucket_size=100, norm=norm).aggregate({"x": rounded}, "avg_world")
        size = torch.linalg.vector_norm(x.view(-1, 100), ord=norm, dim=1).repeat_interleave(100)
        level, exact = rounded / size * 5, x / size * 5
        torch.testing.assert_close(level, level.round(), rtol=0, atol=1e-12)
        assert (level - exact).abs().max() < 1
        assert (level.abs() <= 5).all()

    def test_a_sum_that_rounds_up_stays_at_the_highest_level(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        aggregation, x = QSGDAggregation(levels=127, norm=math.inf), torch.tensor([2.0, -2.0])
        monkeypatch.setattr(
            aggregation, "_source", lambda device: torch.ones_like
        )  # a draw next to 1, rounded up
        aggregation.aggregate({"x": x}, "avg_world")
        assert x.tolist() == [2, -2]

    def test_draws_are_middles_of_65536_intervals(self) -> None:
        drawn = (
            QSGDAggregation()._source(torch.device("cpu"))(
                torch.zeros(5, 1000, dtype=torch.float64)
            )
            * 65536
        )
        assert drawn.shape == (5, 1000)
        assert set((drawn % 1).flatten().tolist()) == {0.5}
        assert drawn.min() < 500
        assert drawn.max() > 65_000
        assert drawn.max() < 65_536

    def test_127_levels_fit_into_eight_bits(self) -> None:
        x = torch.arange(-127.0, 128.0)
        expected = x.clone()
        QSGDAggregation(levels=127, norm=math.inf).aggregate({"x": x}, "avg_world")
        torch.testing.assert_close(x, expected)

    def test_the_sum_is_divided_by_the_given_number(self) -> None:
        x = torch.tensor([4.0, 0.0, -4.0])
        QSGDAggregation(levels=1, norm=math.inf).aggregate(
            {"x": x}, "avg_custom", torch.tensor(8.0)
        )
        assert x.tolist() == [0.5, 0.0, -0.5]

    def test_every_call_draws_anew_and_tensors_of_one_call_too(self) -> None:
        aggregation = QSGDAggregation(levels=1)
        results = []
        for _ in range(3):
            tensors = {name: torch.linspace(-1, 1, 300) for name in "ab"}
            aggregation.aggregate(tensors, "avg_world")
            results += [tuple(x.sign().tolist()) for x in tensors.values()]
        assert len(set(results)) == 6
        assert aggregation.state_dict() == {"draws": 3}
        aggregation.load_state_dict({})
        assert aggregation.state_dict() == {}


class TestScaffold:
    def test_steps_of_any_rates_give_the_mean_gradient_weighted_by_them(self) -> None:
        run = Weights(ScaffoldAggregation())
        start, common = run.tensors["x"].clone(), torch.zeros(SHAPE, dtype=torch.float64)
        for t in range(6):
            run.step(t)
            if t % 2:
                rates = [0.1 + 0.1 * s for s in (t - 1, t)]
                common = (start - run.tensors["x"]) / sum(rates)
                start = run.tensors["x"].clone()
                state = run.aggregation.state_dict()
                assert_close(state["common"]["x"], common)
                assert_close(state["own"]["x"], common)  # of the only worker
                assert state["rates"] == {"x": 0.0, "y": 0.0}
                assert_close(state["shared"]["x"], start)

    def test_the_shared_weights_are_copies(self) -> None:
        x = torch.zeros(3)
        aggregation = ScaffoldAggregation()
        aggregation.start({"x": nn.Parameter(x)})
        x += 1
        aggregation.start({"x": nn.Parameter(x)})  # a second start does nothing
        assert aggregation.state_dict()["shared"]["x"].tolist() == [0, 0, 0]
        aggregation.count("x", 0.5)
        aggregation.aggregate({"x": x}, "avg_world")
        x += 1
        state = aggregation.state_dict()
        assert state["shared"]["x"].tolist() == [1, 1, 1]
        assert state["common"]["x"].tolist() == [-2, -2, -2]

    def test_a_tensor_without_a_step_and_a_buffer_learn_nothing(self) -> None:
        aggregation = ScaffoldAggregation()
        tensors = {"x": torch.ones(2), "late": torch.ones(2), ":buffer:mean": torch.ones(2)}
        aggregation.start({"x": nn.Parameter(tensors["x"])})
        aggregation.aggregate(tensors, "avg_world")
        state = aggregation.state_dict()
        assert sorted(state["shared"]) == ["late", "x"]
        assert not state["common"]
        for name in ("x", "late"):
            aggregation.count(name, 0.1)
        aggregation.aggregate(tensors, "avg_world")
        assert sorted(aggregation.state_dict()["common"]) == ["late", "x"]

    def test_parameters_outside_the_model_have_control_variates_too(self) -> None:
        model, extra = nn.Linear(1, 1, bias=False), nn.Parameter(torch.zeros(2))
        optimizer = SCAFFOLD(model=model, lr=0.5, period=2)
        optimizer.add_param_group({"params": [extra], "lr": 0.25})
        for _ in range(2):
            extra.grad = torch.tensor([4.0, 0.0])
            optimizer.step()
        aggregation = optimizer.aggregation.inside
        assert (
            "group1.0" not in aggregation.state_dict()["common"]
        )  # it was averaged for the first time
        for _ in range(2):
            optimizer.step()
        assert aggregation.state_dict()["common"]["group1.0"].tolist() == [4, 0]
        assert extra.tolist() == [-4, 0]

    def test_a_loaded_state_is_not_that_of_the_checkpoint_and_only_control_variates_are_own(
        self,
    ) -> None:
        aggregation = ScaffoldAggregation()
        aggregation.start({"x": nn.Parameter(torch.ones(2))})
        aggregation.count("x", 0.25)
        aggregation.aggregate({"x": torch.zeros(2)}, "avg_world")
        aggregation.count("x", 0.5)
        shared = aggregation.shared_state(aggregation.state_dict())
        assert shared["own"] == {}
        assert shared["rates"] == {"x": 0.5}
        assert shared["common"]["x"].tolist() == [4, 4]
        assert shared["shared"]["x"].tolist() == [0, 0]
        assert aggregation.remembered_names({"rates": {"z": 1.0}}) == {"z"}


class TestChunkedTopK:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("density", [1, 2, 5, 0.25, 1.0])
    def test_is_the_reference_step_by_step(self, bits: int, density: float) -> None:
        aggregation = ChunkedTopKAggregation(density=density, bits=bits, decay=0.8, chunk_size=16)
        memory = torch.zeros(43, dtype=torch.float64)
        for t in range(5):
            x = randn(t, 43)
            if t == 2:
                x[torch.rand(43, generator=torch.Generator().manual_seed(t)) < 0.6] = 0
                memory.zero_()
                aggregation.load_state_dict({})
            memory = 0.8 * memory + x
            # The last chunk of 11 coordinates has another number of coordinates to send.
            parts = [memory[:32], memory[32:]]
            kept = [
                density if isinstance(density, int) else max(1, round(density * n))
                for n in (16, 11)
            ]
            expected = torch.cat(
                [compress(p, k, bits, 16) for p, k in zip(parts, kept, strict=True)]
            )
            aggregation.aggregate({"x": x}, "avg_world")
            assert_close(x, expected)
            memory = memory - expected
            assert_close(aggregation.memory("x"), memory)

    def test_limits_of_its_arguments_are_allowed(self) -> None:
        aggregation = ChunkedTopKAggregation(decay=1, bits=8, chunk_size=1 << 24, density=1.0)
        for _ in range(2):
            x = torch.tensor([1.0, -2.0])
            aggregation.aggregate({"x": x}, "avg_world")
        assert x.tolist() == [1, -2]
        whole = ChunkedTopKAggregation(decay=1, bits=None, density=1)
        totals = torch.zeros(2)
        for _ in range(4):
            x = torch.tensor([1.0, -2.0])
            whole.aggregate({"x": x}, "avg_world")
            totals += x
        assert (totals + whole.memory("x")).tolist() == [4, -8]  # nothing is lost

    def test_a_sum_of_sizes_stays_in_range(self) -> None:
        x = torch.full((8,), 2e38)
        ChunkedTopKAggregation(density=1.0, bits=1).aggregate({"x": x}, "avg_world")
        torch.testing.assert_close(x, torch.full((8,), 2e38))

    def test_an_overflow_is_not_remembered(self) -> None:
        aggregation = ChunkedTopKAggregation(density=1, chunk_size=2)
        for value in (torch.inf, torch.nan):
            x = torch.tensor([value, 3.0, 1.0, 2.0])
            aggregation.aggregate({"x": x}, "avg_world")
            assert x.isfinite().tolist() == [False, True, True, True]
            assert aggregation.memory("x").isfinite().all()

    def test_the_sum_is_divided_by_the_given_number(self) -> None:
        x = torch.tensor([8.0, 1.0])
        ChunkedTopKAggregation(density=1).aggregate({"x": x}, "avg_custom", 4)
        assert x.tolist() == [2, 0]


class TestSparseLoCo:
    def test_a_shared_state_has_the_shared_weights_without_the_error_memory(self) -> None:
        run = MAKERS["sparse loco"]()
        run.step(0)
        state = run.aggregation.state_dict()
        assert state["compressed"]["memory"]["x"].any()
        shared = run.aggregation.shared_state(state)
        assert shared["compressed"] == {"memory": {}}
        assert torch.equal(shared["shared"]["x"], state["shared"]["x"])
        assert run.aggregation.shared_state({}) == {}
        run.aggregation.load_state_dict(shared)
        assert run.aggregation.compressed.memory("x") is None

    def test_buffers_and_late_parameters_are_averaged_as_they_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        aggregation, calls = SparseLoCoAggregation(), []
        monkeypatch.setattr(
            aggregation._all_reduce, "aggregate", lambda tensors, *op: calls.append(list(tensors))
        )
        aggregation.start({"x": nn.Parameter(torch.zeros(2))})
        aggregation.aggregate(
            {name: torch.zeros(2) for name in ("x", "late", ":buffer:mean")}, "avg_world"
        )
        assert calls == [["late", ":buffer:mean"]]

    def test_its_ratio_is_that_of_the_changes(self) -> None:
        aggregation = SparseLoCoAggregation()
        aggregation.compressed._original_bytes, aggregation.compressed._compressed_bytes = 600, 30
        assert aggregation.compression_ratio == 20

    def test_buffers_are_averaged_and_the_outer_rate_is_that_of_the_optimizer(self) -> None:
        aggregation = SparseLoCoAggregation(
            ChunkedTopKAggregation(density=1.0, bits=None), outer_lr=0.5
        )
        weights = {"x": torch.zeros(2), ":buffer:mean": torch.ones(2)}
        aggregation.start({"x": nn.Parameter(weights["x"])})
        weights["x"] += 4
        aggregation.aggregate(weights, "avg_world")
        assert weights["x"].tolist() == [2, 2]
        assert weights[":buffer:mean"].tolist() == [1, 1]
        aggregation.outer_optimizer.param_groups[0]["lr"] = 1.0
        weights["x"] += 4
        aggregation.aggregate(weights, "avg_world")
        assert weights["x"].tolist() == [6, 6]


class TestDeMo:
    def test_the_last_position_of_the_largest_block_fits_into_its_message(self) -> None:
        dct = dct_matrix(181, torch.float64)
        wave = 5 * torch.outer(dct[180], dct[180])
        aggregation, x = DeMoAggregation(top_k=1, block_size=181), wave.clone()
        aggregation.aggregate({"x": x}, "avg_world")
        torch.testing.assert_close(x, wave, rtol=0, atol=1e-9)
        with pytest.raises(
            ValueError, match="block_size must be at most 181, so that a position fits into 2 bytes"
        ):
            DeMoAggregation(block_size=182)

    @pytest.mark.parametrize("shape", [(12,), (4, 6), (9, 5), (2, 3, 4)])
    def test_sends_the_largest_coefficients_of_scipys_transform(
        self, shape: tuple[int, ...]
    ) -> None:
        from scipy.fft import dctn, idctn

        aggregation, m = (
            DeMoAggregation(decay=0.9, top_k=2, block_size=3),
            torch.zeros(shape, dtype=torch.float64),
        )
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // rows
        a, b = (max(d for d in (1, 2, 3) if n % d == 0) for n in (rows, columns))
        for t in range(3):
            x = randn(t, *shape)
            m = 0.9 * m + x
            sent, matrix = torch.zeros(rows, columns, dtype=torch.float64), m.view(rows, columns)
            for i in range(0, rows, a):
                for j in range(0, columns, b):
                    coefficients = torch.from_numpy(
                        dctn(matrix[i : i + a, j : j + b].numpy(), norm="ortho")
                    ).flatten()
                    small = coefficients.abs().argsort(descending=True)[2:]
                    coefficients[small] = 0
                    block = idctn(coefficients.view(a, b).numpy(), norm="ortho")
                    sent[i : i + a, j : j + b] = torch.from_numpy(block)
            aggregation.aggregate({"x": x}, "avg_world")
            assert_close(x, sent.view(shape))
            m = m - sent.view(shape)
            assert_close(aggregation.memory("x"), m)

    def test_an_overflow_is_seen_in_its_block_and_not_remembered(self) -> None:
        aggregation, x = (
            DeMoAggregation(block_size=2, top_k=1),
            torch.tensor([1.0, torch.inf, 1.0, 2.0]),
        )
        aggregation.aggregate({"x": x}, "avg_world")
        assert x.isfinite().tolist() == [False, False, True, True]
        assert aggregation.memory("x").isfinite().all()

    @pytest.mark.parametrize("mean_of_senders", [False, True])
    def test_a_coefficient_is_divided_by_the_workers_or_by_its_senders(
        self, mean_of_senders: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two workers send a coefficient each: the same one of the first block, others of the
        second."""
        first, second = (
            DeMoAggregation(top_k=1, block_size=2, mean_of_senders=mean_of_senders)
            for _ in range(2)
        )
        dct = dct_matrix(2, torch.float64)
        coefficients = torch.tensor(
            [[[4.0, 1.0], [3.0, 0.0]], [[8.0, 1.0], [0.0, 5.0]]], dtype=torch.float64
        )
        tensors = [(blocks @ dct).view(4) for blocks in coefficients]
        sent: list[Tensor] = []
        monkeypatch.setattr(
            second, "_gather", lambda message, divisor, extra: sent.append(message) or message[None]
        )
        second.aggregate({"x": tensors[1].clone()}, "avg_world")
        monkeypatch.setattr(
            first, "_gather", lambda message, divisor, extra: torch.stack([message, *sent])
        )
        x = tensors[0].clone()
        first.aggregate({"x": x}, "avg_custom", 2)
        expected = [[6.0, 0.0], [3.0, 5.0]] if mean_of_senders else [[6.0, 0.0], [1.5, 2.5]]
        assert_close(x.view(2, 2) @ dct.T, torch.tensor(expected, dtype=torch.float64))

    def test_the_sum_is_divided_by_the_given_number(self) -> None:
        x = torch.tensor([8.0, 4.0])
        DeMoAggregation().aggregate({"x": x}, "avg_custom", 4)
        torch.testing.assert_close(x, torch.tensor([2.0, 1.0]))

    def test_a_later_rate_does_not_rescale_the_momentum(self) -> None:
        x = nn.Parameter(torch.zeros(3))
        optimizer = DeMo(
            [x],
            lr=0.5,
            sign=False,
            weight_decay=0.1,
            aggregation=DeMoAggregation(decay=0.9, top_k=1),
        )
        dct, m, expected = dct_matrix(3), torch.zeros(3), torch.zeros(3)
        for lr in (0.5, 0.25, 2.0):
            optimizer.param_groups[0]["lr"] = lr
            x.grad = torch.tensor([1.0, -2.0, 0.5]) * lr
            m = 0.9 * m + lr * x.grad
            coefficients = dct @ m
            coefficients[coefficients.abs() < coefficients.abs().max()] = 0
            step = dct.T @ coefficients
            m = m - step
            expected = (1 - lr * 0.1) * expected - step
            optimizer.step()
            torch.testing.assert_close(x.detach(), expected)


class TestOneBit:
    def test_each_step_is_the_formula(self) -> None:
        aggregation = OneBitAggregation(beta=0.8, warmup_steps=2)

        def signs(p: Tensor) -> Tensor:
            return p.abs().mean() * torch.where(p >= 0, 1.0, -1.0).double()

        m = e = delta = torch.zeros(SHAPE, dtype=torch.float64)
        for t in range(6):
            x = g = randn(t)
            x = x.clone()
            aggregation.aggregate({"x": x}, "avg_world")
            if t < 2:
                assert torch.equal(x, g)
                m = 0.8 * m + 0.2 * g
                assert aggregation.memory("x") is None
            else:
                p = 0.8 * m + 0.2 * g + e
                e = p - signs(p)
                average = signs(p) + delta
                delta = average - signs(average)
                m = signs(average)
                assert_close(x, m)
                assert_close(aggregation.memory("x"), e)
                assert_close(aggregation.state_dict()["average_errors"]["x"], delta)
            assert_close(aggregation.momentum("x"), m)
            assert aggregation.steps("x") == t + 1

    @pytest.mark.parametrize("warmup_steps", [0, 9])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_an_overflow_is_seen_and_not_remembered(self, warmup_steps: int, value: float) -> None:
        aggregation = OneBitAggregation(beta=0.5, warmup_steps=warmup_steps)
        x = torch.tensor([2.0, value, 4.0])
        aggregation.aggregate({"x": x}, "avg_world")
        assert not x.isfinite().all()
        assert all(
            each.isfinite().all()
            for key, values in aggregation.state_dict().items()
            if key != "steps"
            for each in values.values()
        )
        expected = [1.0, 0.0, 2.0] if warmup_steps else [0.0, 0.0, 0.0]
        assert aggregation.momentum("x").tolist() == expected

    def test_a_zero_counts_as_positive(self) -> None:
        aggregation, x = OneBitAggregation(beta=0.0, warmup_steps=0), torch.tensor([2.0, 0.0])
        aggregation.aggregate({"x": x}, "avg_world")
        assert x.tolist() == [1, 1]
        assert aggregation.memory("x").tolist() == [1, -1]

    def test_extra_tensors_share_the_message_of_the_warm_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        aggregation, calls, x, flag = (
            OneBitAggregation(warmup_steps=1),
            [],
            torch.zeros(2),
            torch.zeros(1),
        )
        aggregation.world_size = 2
        monkeypatch.setattr(
            aggregation._uncompressed, "average", lambda tensors, divisor: calls.append(tensors)
        )
        aggregation.aggregate({"x": x}, "avg_world", extra=[flag])
        assert calls == [[x, flag]]

    def test_a_zero_of_the_average_counts_as_positive_too(self) -> None:
        aggregation, x = OneBitAggregation(beta=0.0, warmup_steps=0), torch.tensor([3.0, 1.0])
        state = {
            "errors": {},
            "average_errors": {"x": torch.tensor([-2.0, 2.0])},
            "momentum": {},
            "steps": {"x": 1},
        }
        aggregation.load_state_dict(state)
        aggregation.aggregate({"x": x}, "avg_world")  # the signs are 2, 2, and with the errors 0, 4
        assert x.tolist() == [2, 2]
        assert aggregation.state_dict()["average_errors"]["x"].tolist() == [-2, 2]

    def test_only_the_errors_of_the_worker_are_its_own(self) -> None:
        aggregation = OneBitAggregation(warmup_steps=0)
        aggregation.aggregate({"x": randn(0)}, "avg_world")
        state = aggregation.state_dict()
        shared = aggregation.shared_state(state)
        assert shared["errors"] == {}
        for key in ("average_errors", "momentum", "steps"):
            assert shared[key] == state[key] != {}

    def test_tensors_are_compressed_in_their_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The order of a set may differ between workers."""
        aggregation, orders = OneBitAggregation(warmup_steps=0), []
        monkeypatch.setattr(
            aggregation, "_compress", lambda tensors, *_: orders.append(list(tensors))
        )
        names = [f"layer{i}" for i in range(40)]
        aggregation.aggregate({name: torch.ones(2) for name in names}, "avg_world")
        assert orders == [names]

    @pytest.mark.parametrize("denom", [10, torch.tensor(10.0)])
    def test_a_custom_denominator_divides_gradients_and_not_the_momentum(self, denom: Any) -> None:
        summed, averaged = (OneBitAggregation(warmup_steps=1) for _ in range(2))
        for t in range(4):
            x, y = 10 * randn(t), randn(t)
            summed.aggregate({"x": x}, "avg_custom", denom)
            averaged.aggregate({"x": y}, "avg_world")
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(summed.momentum("x"), averaged.momentum("x"))


class TestDion:
    def test_the_first_queries_differ_between_names_and_seeds_and_have_length_one(self) -> None:
        def first(seed: int, name: str) -> Tensor:
            aggregation = DionAggregation(rank=2, seed=seed)
            aggregation._query(name, torch.zeros(4, 5))
            return aggregation.state_dict()["queries"][name]

        assert torch.equal(first(0, "x"), first(0, "x"))
        assert not torch.equal(first(0, "x"), first(0, "y"))
        assert not torch.equal(first(0, "x"), first(1, "x"))
        torch.testing.assert_close(first(0, "x").norm(dim=1), torch.ones(2))

    def test_the_momentum_does_not_depend_on_the_denominator(self) -> None:
        custom, world = (DionAggregation(rank=2, momentum=0.5) for _ in range(2))
        for t in range(3):
            x, y = randn(t), randn(t)
            custom.aggregate({"x": x}, "avg_custom", 7)
            world.aggregate({"x": y}, "avg_world")
            assert_close(x, y)
            assert_close(custom.memory("x"), world.memory("x"))

    @pytest.mark.parametrize(
        "gradient",
        [
            torch.outer(randn(0, 4), randn(1, 5)),
            # The second direction is as small as rounding errors are on some processors.
            torch.diag(torch.tensor([1.0, 1e-17, 0.0, 0.0], dtype=torch.float64)),
        ],
    )
    def test_a_direction_without_momentum_takes_no_part_and_keeps_its_query(
        self, gradient: Tensor
    ) -> None:
        """A gradient of rank 1 and an update of rank 2."""
        aggregation, x = DionAggregation(rank=2, momentum=1.0), gradient.clone()
        before = aggregation._query("x", x).clone()
        aggregation.aggregate({"x": x}, "avg_world")
        values = torch.linalg.svdvals(x)
        assert_close(values[:2], torch.tensor([1.0, 0.0], dtype=torch.float64))
        after = aggregation.state_dict()["queries"]["x"]
        assert not torch.equal(after[0], before[0])
        assert torch.equal(after[1], before[1])

    def test_an_overflow_keeps_the_queries_and_clears_the_momentum(self) -> None:
        aggregation = DionAggregation(rank=2)
        aggregation.aggregate({"x": randn(0)}, "avg_world")
        queries, momentum = (
            aggregation.state_dict()[key]["x"].clone() for key in ("queries", "momentum")
        )
        x = randn(1)
        x[2, 3] = torch.inf
        aggregation.aggregate({"x": x}, "avg_world")
        assert not x.isfinite().any()
        assert torch.equal(aggregation.state_dict()["queries"]["x"], queries)
        assert not aggregation.memory("x").any()
        assert momentum.any()

    def test_an_overflow_of_a_product_keeps_the_queries(self) -> None:
        aggregation, x = DionAggregation(rank=1), torch.full((16, 1), 3e38)
        for _ in range(2):
            y = x.clone()
            aggregation.aggregate({"x": y}, "avg_world")
            assert not y.isfinite().any()
            assert aggregation.state_dict()["queries"]["x"].abs().tolist() == [[1.0]]

    def test_extra_tensors_do_not_count_as_compressed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        aggregation, counted = DionAggregation(), []
        x, extra = randn(0), [torch.zeros(3)]
        with monkeypatch.context() as patch:
            patch.setattr(aggregation, "_count_compression", lambda *given: counted.append(given))
            aggregation.aggregate({"x": x}, "avg_world", extra=extra)
        [(tensors, apart, bytes_before)] = counted
        assert [tensor is x for tensor in tensors] == [True]
        assert (apart, bytes_before) == (extra, 0)
        # Two workers, of which each has sent 20 bytes for x's 1200, and 12 for three other numbers.
        aggregation.world_size, aggregation.bytes_sent = 2, 8 + 20 + 12
        aggregation._count_compression([torch.zeros(300)], extra, 8)
        assert aggregation.compression_ratio == 1200 / 20

    def test_an_extra_tensor_is_averaged_even_if_it_is_a_matrix(self) -> None:
        x = torch.full((2, 2), 3.0)
        DionAggregation().aggregate({}, "avg_custom", 3, extra=[x])
        assert x.tolist() == [[1, 1], [1, 1]]

    def test_others_than_matrices_of_real_numbers_are_averaged(self) -> None:
        aggregation = DionAggregation()
        tensors = {
            "v": torch.ones(3),
            "n": torch.tensor(2.0),
            "c": torch.ones(2, 2, dtype=torch.complex64),
        }
        aggregation.aggregate(tensors, "avg_custom", 2)
        assert [x.flatten()[0].item() for x in tensors.values()] == [0.5, 1.0, 0.5]
        assert aggregation.state_dict() == {}
        DionAggregation(momentum=1, rank=1)


class TestStreaming:
    def make(self, **options: Any) -> StreamingDiLoCoAggregation:
        return StreamingDiLoCoAggregation(
            partial(SGD, lr=1.0), **{"fragments": 1, "mixing": 0.0, **options}
        )

    def test_calls_with_other_tensors_do_not_move_a_message_on(self) -> None:
        aggregation, x, other = self.make(period=3, delay=2), torch.zeros(2), torch.zeros(2)
        aggregation.start({"x": nn.Parameter(x)})
        for _ in range(3):
            x += 1
            aggregation.aggregate({"x": x}, "avg_world")
        for _ in range(2):
            aggregation.aggregate({"other": other}, "avg_world")
        for expected in (4, 3):  # 3 was sent after three steps, and is merged two steps of x later
            x += 1
            aggregation.aggregate({"x": x}, "avg_world")
            assert x.tolist() == [expected] * 2

    @pytest.mark.parametrize("delay", [0, 1, 4])
    def test_fragments_are_sent_and_merged_in_their_steps(self, delay: int) -> None:
        """Three fragments in five steps: after steps 0, 1 and 3 of the period."""
        aggregation = self.make(period=5, fragments=3, delay=delay)
        weights = {str(j): torch.zeros(1) for j in range(7)}
        aggregation.start({name: nn.Parameter(x) for name, x in weights.items()})
        sent: dict[int, list[float]] = {}
        for t in range(1, 20):
            for x in weights.values():
                x += 1
            before = {name: x.item() for name, x in weights.items()}
            aggregation.aggregate(weights, "avg_world")
            due = [j for j in range(7) if t % 5 == (0, 1, 3)[j % 3]]
            sent[t] = [before[str(j)] if j in due else math.nan for j in range(7)]
            for j in range(7):
                arrived = sent.get(t - delay, [math.nan] * 7)[j]
                assert weights[str(j)].item() == (
                    before[str(j)] if math.isnan(arrived) else arrived
                )

    def test_buffers_and_late_parameters_are_averaged_with_the_first_fragment(
        self,
    ) -> None:
        aggregation = self.make(period=2, mixing=0.5, delay=1)
        weights = {
            "x": torch.zeros(1),
            "late": torch.full((1,), 8.0),
            ":buffer:mean": torch.full((1,), 4.0),
        }
        aggregation.start({"x": nn.Parameter(weights["x"])})
        seen = []
        for _ in range(3):
            aggregation.aggregate(weights, "avg_world")
            seen.append([x.item() for x in weights.values()][1:])
            for x in weights.values():
                x += 1
        # Sent after the second step, merged after the third: the means of 9 and 10, and of 5 and 6.
        assert seen == [[8, 4], [9, 5], [9.5, 5.5]]
        assert sorted(aggregation.state_dict()["shared"]) == ["late", "x"]

    def test_half_precision_is_mixed_in_float32(self) -> None:
        aggregation, x = (
            self.make(period=1, delay=0, mixing=0.5),
            torch.zeros(1, dtype=torch.bfloat16),
        )
        aggregation.start({"x": nn.Parameter(x)})
        x += 3
        aggregation.aggregate({"x": x}, "avg_world")
        assert x.item() == 3
        assert aggregation.state_dict()["shared"]["x"].dtype == torch.float32

    def test_a_fragment_may_leave_while_its_message_is_on_the_way(self) -> None:
        aggregation, x, y = self.make(period=2, delay=1), torch.zeros(1), torch.zeros(1)
        aggregation.start({"x": nn.Parameter(x), "y": nn.Parameter(y)})
        for _ in range(2):
            x += 1
            y += 1
            aggregation.aggregate({"x": x, "y": y}, "avg_world")
        x += 1
        y += 1
        aggregation.aggregate({"x": x}, "avg_world")
        assert (x.item(), y.item()) == (2, 3)
        assert aggregation.state_dict()["shared"]["y"].item() == 2  # the outer step was taken

    def test_with_a_mixing_of_1_workers_keep_their_weights_and_the_shared_ones_follow(self) -> None:
        aggregation, x = self.make(period=1, delay=0, mixing=1), torch.zeros(1)
        aggregation.start({"x": nn.Parameter(x)})
        for t in range(3):
            x += 1
            aggregation.aggregate({"x": x}, "avg_world")
            assert x.item() == aggregation.state_dict()["shared"]["x"].item() == t + 1

    def test_names_of_a_state_include_those_that_are_only_counted(self) -> None:
        state = {
            "shared": {"x": 0},
            "outer_state": {"x": {}},
            "counts": {"x": 1, "late": 1, ":buffer:m": 1},
        }
        assert self.make(period=2, delay=0).remembered_names(state) == {"x", "late"}

    def test_a_worker_waits_for_its_messages_before_it_loads_another_state(self) -> None:
        aggregation, waited = self.make(period=2, delay=1), []
        aggregation._flights = [_Fragment(1, {}, {}, pending=[lambda: waited.append("arrived")])]
        aggregation.load_state_dict({})
        assert waited == ["arrived"]
        assert aggregation.state_dict() == {}

    def test_each_outer_step_is_that_of_its_own_fragment(self) -> None:
        aggregation = StreamingDiLoCoAggregation(
            partial(SGD, lr=1.0, momentum=0.5), period=2, fragments=2, delay=0, mixing=0.0
        )
        weights = {"x": torch.zeros(1), "y": torch.zeros(1)}
        aggregation.start({name: nn.Parameter(x) for name, x in weights.items()})
        seen = []
        for _ in range(4):
            for x in weights.values():
                x += 1
            aggregation.aggregate(weights, "avg_world")
            seen.append((weights["x"].item(), weights["y"].item()))
        # y after steps 1 and 3, x after steps 2 and 4: the second change is 2, and half of the
        # first is added.
        assert seen == [(1, 1), (2, 2), (3, 3.5), (5, 4.5)]


def test_packed_codes_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BLOCK_ELEMENTS", 16)
    x, y = randn(0, 100), randn(0, 100)
    ChunkedTopKAggregation(density=5, chunk_size=20).aggregate({"x": x}, "avg_world")
    monkeypatch.undo()
    ChunkedTopKAggregation(density=5, chunk_size=20).aggregate({"x": y}, "avg_world")
    assert torch.equal(x, y)
