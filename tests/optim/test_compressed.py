"""Sign and sparsified optimizers: real processes over Gloo against the readable references and
exact invariants."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mlbench_core.aggregation.pytorch.centralized import (
    EFSignAggregation,
    SignAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch.compression import sparsified
from mlbench_core.aggregation.pytorch.compression.sign import (
    pack_signs,
    sum_scaled_signs,
    unpack_part,
)
from mlbench_core.aggregation.pytorch.compression.sparsified import (
    coordinates_sent,
    draw_coordinates,
    largest_entries,
)
from mlbench_core.aggregation.pytorch.transport.messages import KeptMemory, as_bytes
from mlbench_core.aggregation.pytorch.transport.packing import (
    pack_bits,
    pack_with_torch,
    unpack_bits,
    unpack_with_torch,
)
from mlbench_core.lr_scheduler.pytorch.lr import SparsifiedSGDLR
from mlbench_core.optim.pytorch import (
    NTASGD,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    EFSignSGD,
    GenericCentralizedOptimizer,
    SignSGD,
    SparsifiedSGD,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim import compressed_workers as workers
from tests.references.ef_sign_sgd import ef_sign_sgd
from tests.references.sign_sgd import one_bit, sign_sgd
from tests.references.sparsified_sgd import sparsified_sgd, top_k

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=some([4, 2]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all)


def start(name: str) -> Tensor:
    return workers.make_params()[name].detach().contiguous()


def gradient_of(name: str) -> Any:
    return lambda i, x, t: workers.gradient(name, i, x, t)


def assert_trajectory(ranks: Ranks, optimizer: str, part: str, name: str, expected: Tensor) -> None:
    for result in ranks:
        actual = result["trajectories"][optimizer][part][name]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", workers.SHAPES)
@pytest.mark.parametrize(("optimizer", "beta"), [("sign", 0.0), ("signum", 0.5)])
def test_sign_sgd_agrees_with_the_reference(
    ranks: Ranks, optimizer: str, beta: float, name: str
) -> None:
    x = sign_sgd(start(name), gradient_of(name), len(ranks), workers.rate, workers.STEPS, beta)
    assert_trajectory(ranks, optimizer, "params", name, x)


@pytest.mark.parametrize("name", workers.SHAPES)
def test_ef_sign_sgd_agrees_with_the_reference(ranks: Ranks, name: str) -> None:
    x, e = ef_sign_sgd(start(name), gradient_of(name), len(ranks), workers.rate, workers.STEPS)
    assert_trajectory(ranks, "ef sign", "params", name, x)
    for result, e_i in zip(ranks, e, strict=True):
        torch.testing.assert_close(
            result["trajectories"]["ef sign"]["memory"][name], e_i, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", workers.SHAPES)
@pytest.mark.parametrize(("optimizer", "size"), [("top-k", 3), ("top 20 %", 0.2)])
def test_sparsified_sgd_agrees_with_the_reference(
    ranks: Ranks, optimizer: str, size: float, name: str
) -> None:
    counts = {key: coordinates_sent(size, start(key).numel()) for key in workers.SHAPES}
    a = max(start(key).numel() / count for key, count in counts.items())
    x, m, estimate = sparsified_sgd(
        start(name),
        gradient_of(name),
        len(ranks),
        workers.rate,
        workers.STEPS,
        lambda m, t: top_k(m, counts[name]),
        a,
    )
    assert_trajectory(ranks, optimizer, "params", name, x)
    assert_trajectory(ranks, optimizer, "estimate", name, estimate)
    for result, m_i in zip(ranks, m, strict=True):
        torch.testing.assert_close(
            result["trajectories"][optimizer]["memory"][name], m_i, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", workers.SHAPES)
def test_random_k_agrees_with_the_reference(ranks: Ranks, name: str) -> None:
    generator, drawn = torch.Generator().manual_seed(0), {}
    for t in range(workers.STEPS):
        for key in workers.SHAPES:
            numel = start(key).numel()
            drawn[key, t] = draw_coordinates(numel, coordinates_sent(3, numel), generator)

    def comp(m: Tensor, t: int) -> Tensor:
        kept = torch.zeros_like(m).view(-1)
        kept[drawn[name, t]] = m.view(-1)[drawn[name, t]]
        return kept.view(m.shape)

    x, m, _ = sparsified_sgd(
        start(name), gradient_of(name), len(ranks), workers.rate, workers.STEPS, comp
    )
    assert_trajectory(ranks, "random-k", "params", name, x)
    for result, m_i in zip(ranks, m, strict=True):
        torch.testing.assert_close(
            result["trajectories"]["random-k"]["memory"][name], m_i, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("optimizer", workers.OPTIMIZERS)
def test_all_workers_have_the_same_bits(ranks: Ranks, optimizer: str) -> None:
    first = ranks[0]["trajectories"][optimizer]["params"]
    for result in ranks[1:]:
        for name, x in result["trajectories"][optimizer]["params"].items():
            assert torch.equal(x, first[name])


@pytest.mark.parametrize("aggregation", workers.AGGREGATIONS)
def test_every_kind_of_tensor_is_aggregated_alike_on_all_workers(
    ranks: Ranks, aggregation: str
) -> None:
    for number in range(2):
        rounds = [result["aggregations"][aggregation]["rounds"][number] for result in ranks]
        for name, tensor in rounds[0]["out"].items():
            assert tensor.dtype == rounds[0]["in"][name].dtype
            assert all(torch.equal(other["out"][name], tensor) for other in rounds[1:])
        assert all(other["flag"] == (len(ranks) - 1) / 2 for other in rounds)


@pytest.mark.parametrize("aggregation", ["ef sign", "top-k", "random-k", "chunked top-k"])
def test_what_is_not_sent_stays_in_the_memory(ranks: Ranks, aggregation: str) -> None:
    for number in range(2):
        rounds = [result["aggregations"][aggregation]["rounds"][number] for result in ranks]
        for name, out in rounds[0]["out"].items():
            if out.numel() == 0:
                continue
            sent = []
            for each in rounds:
                owed = each["owed"].get(name, torch.zeros(()))
                sent.append(
                    each["in"][name].double() + owed.double() - each["still"][name].double()
                )
            mean = torch.stack(sent).mean(0)
            precision = {
                torch.float64: 1e-15,
                torch.float32: 1e-6,
                torch.float16: 2e-3,
                torch.bfloat16: 2e-2,
            }
            torch.testing.assert_close(
                out.double(), mean, rtol=precision[out.dtype], atol=precision[out.dtype]
            )
        if number:
            assert any(owed.any() for owed in rounds[0]["owed"].values())


def test_half_precision_rounding_stays_in_the_memory(ranks: Ranks) -> None:
    for result in ranks:
        still = result["aggregations"]["top-k"]["rounds"][0]["still"]
        assert still["half"].dtype == still["bfloat"].dtype == torch.float32
        assert still["double"].dtype == torch.float64


def test_without_error_feedback_nothing_is_remembered(ranks: Ranks) -> None:
    for result in ranks:
        first, second = result["aggregations"]["top-k without memory"]["rounds"]
        assert first["still"] == {}
        assert all(torch.equal(first["out"][name], second["out"][name]) for name in first["out"])


def test_votes_are_counted(ranks: Ranks) -> None:
    for number in range(2):
        rounds = [result["aggregations"]["sign"]["rounds"][number] for result in ranks]
        for name, out in rounds[0]["out"].items():
            votes = torch.stack(
                [one_bit(each["in"][name].float(), number + i) for i, each in enumerate(rounds)]
            )
            assert torch.equal(out.float(), votes.sum(0).sign())
        assert not rounds[0]["out"]["zeros"].any()
        assert any((each["out"]["matrix"] == 0).any() for each in rounds), "no tie was seen"


DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
NUMELS = {
    "float32": (24, 1, 10, 11),
    "float64": (7,),
    "float16": (9,),
    "bfloat16": (9,),
}  # of mixed_tensors
DEMO_BLOCKS = {
    "float32": (6, 1, 5, 11),
    "float64": (7,),
    "float16": (9,),
    "bfloat16": (9,),
}  # of sides up to 2
KINDS = ("float32", "float64", "float16", "bfloat16")  # in the order of each one's first tensor


def chunked_top_k_bytes(numel: int, b: int) -> int:
    """Of two coordinates of each chunk of four: two means, positions of two bits (fewer in a last
    chunk), codes."""
    size_bytes = 0
    for chunks, length in ((numel // 4, 4), (numel % 4 > 0, numel % 4)):
        kept, bits = chunks * min(2, length), (0, 0, 1, 2, 2)[length]
        size_bytes += kept * b + (kept * bits + 7) // 8 + (kept * 2 + 7) // 8
    return size_bytes


def message_bytes(aggregation: str, dtype: str) -> tuple[str, int]:
    """The documented formulas."""
    b, numels = DTYPE_BYTES[dtype], NUMELS[dtype]
    bits = (sum(numels) + 7) // 8
    K = sum(min(3, numel) for numel in numels)
    return {
        "sign": ("all_gather", (sum(numels) + 1 + 7) // 8),
        "ef sign": ("all_gather", bits + max(4, b) * len(numels)),
        "qsgd": (
            "all_gather",
            (4 * sum(numels) + 7) // 8 + max(4, b) * sum(-(-n // 4) for n in numels),
        ),
        "chunked top-k": ("all_gather", sum(chunked_top_k_bytes(n, max(4, b)) for n in numels)),
        "demo": ("all_gather", (max(4, b) + 2) * sum(DEMO_BLOCKS[dtype])),
        "one bit": ("all_gather", bits + max(4, b) * len(numels)),
        "top-k": ("all_gather", (b + 4) * K),
        "top-k without memory": ("all_gather", (b + 4) * K),
        "random-k": ("all_reduce", b * K),
    }[aggregation]


@pytest.mark.parametrize("aggregation", workers.AGGREGATIONS)
def test_messages_have_the_documented_number_and_size(ranks: Ranks, aggregation: str) -> None:
    expected = [message_bytes(aggregation, dtype) for dtype in KINDS]
    original = sum(DTYPE_BYTES[dtype] * sum(NUMELS[dtype]) for dtype in KINDS)
    for result in ranks:
        report = result["aggregations"][aggregation]
        for each in report["rounds"]:
            # The extra tensor travels with the first message.
            assert each["calls"] == [(expected[0][0], expected[0][1] + 4), *expected[1:]]
        assert report["bytes_sent"] == 2 * (sum(size for _, size in expected) + 4)
        assert report["ratio"] == pytest.approx(original / sum(size for _, size in expected))


def test_extra_tensors_travel_with_the_first_message_on_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aggregation, messages = SignAggregation(), list[Any]()
    aggregation.world_size = 2
    monkeypatch.setattr(
        aggregation, "_aggregate_kind", lambda tensors, divisor, extra: messages.append(extra)
    )
    monkeypatch.setattr(
        aggregation, "_average_uncompressed", lambda extra, divisor: messages.append(list(extra))
    )
    here, elsewhere = torch.ones(1), torch.ones(1, device="meta")
    aggregation.aggregate(
        {"x": torch.ones(2), "y": torch.ones(2).double()}, "avg_world", extra=[here, elsewhere]
    )
    assert messages == [[here], [], [elsewhere]]


@pytest.mark.parametrize("aggregation", workers.AGGREGATIONS)
def test_one_message_per_parameter_gives_the_same(ranks: Ranks, aggregation: str) -> None:
    for result in ranks:
        whole, whole_calls = result["by_layer"][aggregation, False]
        layered, layered_calls = result["by_layer"][aggregation, True]
        assert len(whole_calls) == 2  # two steps
        assert len(layered_calls) == 2 * len(whole)
        if aggregation not in (
            "random-k",
            "qsgd",
        ):  # where the order of drawing is another one only between steps
            assert all(torch.equal(whole[name], layered[name]) for name in whole)


def test_denominators_divide_sums_and_leave_votes(ranks: Ranks) -> None:
    k, total = len(ranks), torch.tensor([1.0, -2.0]) * sum(range(1, len(ranks) + 1))
    for result in ranks:
        for name, (average, custom, tensor) in result["custom_denominators"].items():
            if name == "sign":
                assert all(each.tolist() == [1.0, -1.0] for each in (average, custom, tensor))
            else:
                assert torch.equal(custom, tensor)
                torch.testing.assert_close(average * k, custom * 10)
            if name in ("top-k", "random-k"):
                torch.testing.assert_close(average, total / k)


@pytest.mark.parametrize("optimizer", workers.OPTIMIZERS)
def test_a_gradient_on_one_worker_moves_all_and_one_on_none_moves_nothing(
    ranks: Ranks, optimizer: str
) -> None:
    first = ranks[0]["partly_missing"][optimizer]["first"]
    if "sign" not in optimizer or len(ranks) > 2:  # one vote and a zero may tie
        assert (first["one"] != torch.arange(1.0, 8.0)).any() or optimizer in ("sign", "signum")
    for rank, result in enumerate(ranks):
        found = result["partly_missing"][optimizer]
        assert torch.equal(found["first"]["one"], first["one"])
        assert torch.equal(found["frozen"], torch.arange(1.0, 8.0))
        assert torch.equal(found["lost again"], found["first"]["lost"])
        assert found["grad is none"] == (rank > 0, True)
        before, after = found["memory"]
        assert (before is None) == (optimizer in ("sign", "signum"))
        if before is not None:
            assert before.any()
            assert torch.equal(before, after), "what was thrown away was forgotten"


@pytest.mark.parametrize("optimizer", workers.OPTIMIZERS)
def test_resuming_is_bit_identical_on_every_worker(ranks: Ranks, optimizer: str) -> None:
    for result in ranks:
        through, resumed = result["resume"][optimizer]
        assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_training_apart_by_mistake_is_refused(ranks: Ranks) -> None:
    k = len(ranks)
    for result in ranks:
        assert (
            f"world_size is 1, but the process group has {k} workers" in result["errors"]["default"]
        )
        assert (
            f"world_size is {k + 1}, but the process group has {k} workers"
            in result["errors"]["too many"]
        )


def test_memory_leads_to_the_optimum_of_different_quadratics(ranks: Ranks) -> None:
    if len(ranks) != 2:
        assert ranks[0]["quadratics"] == {}
        return
    quadratics = [workers.quadratic(rank) for rank in range(2)]
    optimum = torch.linalg.solve(sum(A for A, _ in quadratics), sum(A @ b for A, b in quadratics))
    for name, found in ranks[0]["quadratics"].items():
        for estimate in found.values():
            assert (estimate - optimum).norm() < 0.02 * optimum.norm(), name


def test_digits_are_learned_as_well_as_by_sgd(ranks: Ranks) -> None:
    if len(ranks) != 2:
        assert ranks[0]["digits"] == {}
        return
    accuracy = ranks[0]["digits"]
    assert accuracy == ranks[1]["digits"]
    assert accuracy["sgd"] > 0.95
    assert accuracy["ef sign"] > accuracy["sgd"] - 0.02
    assert accuracy["top 1 %"] > accuracy["sgd"] - 0.02


def test_signs_settle_with_a_decaying_rate() -> None:
    x = nn.Parameter(torch.tensor([3.0, -2.0, 0.5]))
    optimizer = SignSGD([x], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (t + 1) ** -0.5)
    for _ in range(1000):
        x.grad = torch.tensor([1.0, 10.0, 0.1]) * (x.detach() - 1)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(x.detach(), torch.ones(3), rtol=0, atol=0.5 * 1000**-0.5 * 1.01)


def test_plain_sign_stalls_where_error_feedback_does_not() -> None:
    """The one-dimensional counterexample of arXiv:1901.09847: x is -1 to 1, gradients 4 and three
    times -1."""
    ends = {}
    for make in (SignSGD, EFSignSGD):
        x = nn.Parameter(torch.zeros(1))
        optimizer = make([x], lr=0.01)
        for t in range(400):
            x.grad = torch.tensor([4.0 if t % 4 == 0 else -1.0])
            optimizer.step()
            with torch.no_grad():
                x.clamp_(-1, 1)
        ends[make] = x.item()
    assert ends[SignSGD] > 0.9  # away from the minimum, at the wrong end
    assert ends[EFSignSGD] < -0.9


def test_the_estimate_of_the_paper_on_a_strongly_convex_problem() -> None:
    generator = torch.Generator().manual_seed(0)
    curvature, optimum = torch.linspace(1, 3, 20), torch.randn(20, generator=generator)
    x = nn.Parameter(torch.zeros(20))
    optimizer = SparsifiedSGD([x], lr=1.0, sparse_grad_size=2)
    schedule = SparsifiedSGDLR(optimizer, gamma=2, l2_coef=1, shifting_param=20)
    for _ in range(1500):
        x.grad = curvature * (x.detach() - optimum) + torch.randn(20, generator=generator)
        optimizer.step()
        schedule.step()
    (estimate,) = optimizer.get_estimated_weights()
    assert (estimate - optimum).norm() < 0.05 * optimum.norm()
    assert (estimate - optimum).norm() < (x.detach() - optimum).norm()


def test_estimated_weights_start_at_the_parameters_and_leave_them_alone() -> None:
    x = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = SparsifiedSGD([{"params": [x]}, {"params": [nn.Parameter(torch.zeros(0))]}], lr=0.1)
    estimates = optimizer.get_estimated_weights()
    assert [each.tolist() for each in estimates] == [[1.0, 2.0], []]
    estimates[0].zero_()
    assert x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (30,), (7, 9), (2, 3, 4, 5)])
@pytest.mark.parametrize("random", [False, True])
def test_every_coordinate_of_every_shape_is_sent_in_the_end(
    shape: tuple[int, ...], random: bool
) -> None:
    x = nn.Parameter(torch.zeros(shape))
    optimizer = CentralizedSparsifiedSGD([x], lr=1.0, sparse_grad_size=4, random_sparse=random)
    g = 1 + torch.rand(shape, generator=torch.Generator().manual_seed(0))
    x.grad = g.clone()
    for step in range(400):
        optimizer.step()
        if step == 0:
            assert x.count_nonzero() == min(4, x.numel())
        x.grad = torch.zeros(shape)
    torch.testing.assert_close(x.detach(), -g)


def test_the_users_weights_and_gradients_are_left_alone() -> None:
    for make in workers.OPTIMIZERS.values():
        x = nn.Parameter(torch.ones(4))
        before = torch.get_rng_state()
        optimizer = make([x])
        assert torch.equal(x, torch.ones(4))
        x.grad = torch.arange(4.0)
        optimizer.step()
        assert torch.equal(x.grad, torch.arange(4.0))
        assert torch.equal(before, torch.get_rng_state())


def test_an_overflow_is_not_remembered() -> None:
    for make in workers.AGGREGATIONS.values():
        aggregation = make()
        aggregation.aggregate(
            {"x": torch.tensor([1.0, float("inf"), float("nan"), -float("inf"), 2.0])}, "avg_world"
        )
        tensor = torch.tensor([1.0, -2.0, 3.0, 4.0, 0.0])
        aggregation.aggregate({"x": tensor}, "avg_world")
        assert tensor.isfinite().all()


def test_coordinates_are_drawn_uniformly_and_once() -> None:
    generator, count = torch.Generator().manual_seed(0), torch.zeros(50)
    for _ in range(2000):
        drawn = draw_coordinates(50, 5, generator)
        assert len(drawn.unique()) == 5
        count[drawn] += 1
    assert ((count - 200).abs() < 5 * (200 * 0.9) ** 0.5).all()
    assert sorted(draw_coordinates(6, 6, generator).tolist()) == list(range(6))


@pytest.mark.parametrize("k", [1, 700, 4096])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "zeros", "nan", "large ones between the samples"]
)
def test_the_largest_of_many_are_those_of_topk(kind: str, k: int) -> None:
    m = torch.randn(70_000, generator=torch.Generator().manual_seed(k))
    if kind == "ties":
        m = m.round()
    elif kind == "zeros":
        m = torch.zeros_like(m)
    elif kind == "nan":
        m[33] = torch.nan
    elif kind == "large ones between the samples":
        step = sparsified._STRIDE
        m[::step] = 100 + m[::step]
        m[1 : step + 1] *= 1000
    found, values = largest_entries(m.__getitem__, len(m), k, KeptMemory())
    assert len(found) == k
    assert (found.diff() > 0).all()
    assert torch.equal(values.nan_to_num(), m[found].nan_to_num())
    expected = m.abs().topk(k).values
    torch.testing.assert_close(
        m[found].abs().sort(descending=True).values, expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("numel", "k"), [(2**15 - 1, 1), (2**15, 1), (2**15, 2**12), (2**16 + 1, 2**13)]
)
def test_the_largest_are_found_on_both_sides_of_the_least_size_that_is_sampled(
    numel: int, k: int
) -> None:
    m = torch.randn(numel, generator=torch.Generator().manual_seed(k))
    found, values = largest_entries(m.__getitem__, numel, k, KeptMemory())
    assert torch.equal(found.long(), m.abs().topk(k).indices.sort().values)
    assert torch.equal(values, m[found])


def test_the_largest_are_found_if_all_but_the_largest_of_the_sample_are_dropped() -> None:
    # The largest value of the sample is the last but one of all, so all values but one are below
    # the high threshold.
    m = torch.arange(400.0 * sparsified._STRIDE + 2)
    found, values = largest_entries(m.__getitem__, len(m), 1, KeptMemory())
    assert (found.tolist(), values.tolist()) == ([len(m) - 1], [len(m) - 1])


@pytest.mark.parametrize("numel", [0, 1, 9, 10, 100, 1000, 5003])
def test_positions_are_those_of_true(numel: int) -> None:
    for count in {0, 1, numel // 50, numel // 50 + 1, numel // 10, numel // 10 + 1, numel}:
        chosen = torch.randperm(numel, generator=torch.Generator().manual_seed(count))[:count]
        flags = torch.zeros(numel, dtype=torch.bool).index_fill(0, chosen, True)
        assert torch.equal(sparsified._positions(flags), chosen.sort().values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_the_largest_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    m = torch.randn(300_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )
    found, values = largest_entries(m.__getitem__, len(m), 3000, KeptMemory())
    assert torch.equal(values, m[found])
    assert torch.equal(values.abs().sort().values, m.abs().topk(3000).values.sort().values)


def test_values_that_are_no_numbers_are_found_where_no_sample_is_taken() -> None:
    m = torch.randn(1000, 2 * sparsified._STRIDE, generator=torch.Generator().manual_seed(0))
    m[:, 1] = torch.nan
    found, _ = largest_entries(m.view(-1).__getitem__, m.numel(), 1000, KeptMemory())
    assert m.view(-1)[found].isnan().all()


@pytest.mark.parametrize("k", [1, 10, 1000])
@pytest.mark.parametrize("width", [64, 100, 512, 768, 2560])
def test_columns_that_differ_in_size_mislead_no_sample(
    width: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, searched, topk = torch.Generator().manual_seed(width), list[int](), torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor,
        "topk",
        lambda m, *args, **named: searched.append(len(m)) or topk(m, *args, **named),
    )
    m = (
        torch.randn(500, width, generator=generator) * torch.randn(width, generator=generator).exp()
    ).view(-1)
    m = m.repeat(-(-(2**17) // len(m)))
    found, _ = largest_entries(m.__getitem__, len(m), k, KeptMemory())
    assert not searched, "all values were searched, which takes ten times as long"
    assert torch.equal(m[found].abs().sort().values, topk(m.abs(), len(found)).values.sort().values)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_bits_survive_packing(count: int) -> None:
    bits = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = pack_bits(bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-count // 8)
    assert torch.equal(unpack_bits(packed, count), bits)
    assert torch.equal(pack_with_torch(bits), packed), "a GPU packs otherwise"
    assert torch.equal(unpack_with_torch(packed, count), bits)


def test_signs_are_packed_across_the_borders_of_tensors_and_blocks() -> None:
    sizes = (3, 300_001, 0, 1, 8, 5)
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes]
    bits = torch.cat(tensors) >= 0
    packed = pack_signs(tensors)
    assert torch.equal(packed, pack_bits(bits))
    for start, stop in ((0, 8), (3, 4), (5, 262_149), (299_999, 300_018), (7, 7)):
        assert torch.equal(unpack_part(packed, start, stop), bits[start:stop])


def test_scaled_signs_of_all_tensors_are_summed_at_once() -> None:
    generator, sizes = torch.Generator().manual_seed(1), [3, 70, 0, 1, 8, 5]
    bits = torch.rand(3, sum(sizes), generator=generator) < 0.5
    scales = torch.rand(len(sizes), 3, generator=generator)
    found = sum_scaled_signs(torch.stack([pack_bits(row) for row in bits]), scales, sizes)
    expected = torch.zeros(sum(sizes))
    for signs, scale in zip(torch.where(bits, 1.0, -1.0), scales.T, strict=True):
        expected += signs * scale.repeat_interleave(torch.tensor(sizes))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cpu_sums_the_scaled_signs_of_three_workers_as_a_gpu_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, sizes = torch.Generator().manual_seed(2), [3, 131_080, 5]
    theirs = torch.randn(2, sum(sizes), generator=generator, dtype=dtype) >= 0
    their_scales = torch.rand(2, len(sizes), generator=generator, dtype=dtype)
    gathered = list[Tensor]()

    def gather(message: Tensor, *_: Any) -> Tensor:
        others = [
            as_bytes(s, pack_bits(bits)) for s, bits in zip(their_scales, theirs, strict=True)
        ]
        gathered.append(torch.stack([message, *others]))
        return gathered[0]

    aggregation = EFSignAggregation()
    monkeypatch.setattr(aggregation, "_gather", gather)
    tensors = {str(n): torch.randn(n, generator=generator, dtype=dtype) for n in sizes}
    aggregation.aggregate(tensors, "avg_custom", 2.0)
    scale_bytes = len(sizes) * dtype.itemsize
    scales = torch.stack([row[:scale_bytes].clone().view(dtype) for row in gathered[0]], dim=1)
    expected = sum_scaled_signs(gathered[0][:, scale_bytes:], scales, sizes) / 2
    assert torch.equal(torch.cat(list(tensors.values())), expected)


def test_a_mean_that_is_rounded_to_zero_gives_no_negative_zeros() -> None:
    tensor = torch.tensor([-1e-45, 0.0, 0.0, 0.0])  # the smallest number of float32
    EFSignAggregation().aggregate({"w": tensor}, "avg_world")
    assert torch.equal(tensor, torch.zeros(4))
    assert not tensor.signbit().any()


def test_a_gpu_packs_the_signs_of_all_tensors_at_once() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += "view" not in str(function)
            return function(*args, **kwargs or {})

    counts = []
    for number in (1, 11):
        with Count() as count:
            # Any device but a CPU.
            packed = pack_signs([torch.ones(5, 3, device="meta")] * number)
        assert (packed.shape, packed.dtype) == ((-(-15 * number // 8),), torch.uint8)
        counts.append(count.calls)
    assert counts[1] - counts[0] == 10, "one comparison for each tensor"


def test_memory_goes_by_the_parameters_names() -> None:
    net = nn.Linear(3, 2)
    net(torch.ones(1, 3)).sum().backward()
    cases: tuple[tuple[Any, list[str]], ...] = (
        (net.named_parameters(), ["weight", "bias"]),
        (net.parameters(), ["group0.0", "group0.1"]),
        ([{"params": [net.weight]}, {"params": [net.bias]}], ["group0.0", "group1.0"]),
    )
    for params, names in cases:
        optimizer = EFSignSGD(params, lr=0.1)
        optimizer.step()
        assert list(optimizer.state_dict()["aggregation"]["memory"]) == names
    with pytest.raises(ValueError, match="several parameters are called w"):
        groups: Any = [{"params": [("w", net.weight)]}, {"params": [("w", net.bias)]}]
        SignSGD(groups, lr=0.1)


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = {"memory": {"weight": torch.zeros(4)}}
    model = nn.Linear(3, 2)
    with pytest.raises(
        ValueError,
        match=r"saved memory of 'weight' must have the shape \(2, 3\) of the parameter, not \(4,\)",
    ):
        SparsifiedAggregation(model).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"SignAggregation must have the keys \['votes_held'\], not \['memory'\]"
    ):
        SignAggregation().load_state_dict(state)
    aggregation = EFSignAggregation()
    aggregation.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"memory of 'weight' has shape \(4,\), its gradient \(2, 3\)"
    ):
        aggregation.aggregate({"weight": torch.ones(2, 3)}, "avg_world")
    with pytest.raises(ValueError, match="generator"):
        SparsifiedAggregation(model).load_state_dict(
            SparsifiedAggregation(model, random=True).state_dict()
        )


def test_half_precision_resumes_bit_identical() -> None:
    def run(x: nn.Parameter, optimizer: Any, steps: range) -> None:
        for t in steps:
            x.grad = torch.linspace(-1, 1, 6).half() * (t + 1) / 7
            optimizer.step()

    whole, first = (nn.Parameter(torch.ones(6).half()) for _ in range(2))
    run(whole, EFSignSGD([whole], lr=0.01), range(8))
    optimizer = EFSignSGD([first], lr=0.01)
    run(first, optimizer, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = EFSignSGD([first], lr=0.01)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(first, resumed, range(4, 8))
    assert torch.equal(whole, first)


def test_weights_are_not_compressed() -> None:
    for aggregation in (SignAggregation(), EFSignAggregation(), SparsifiedAggregation(None)):
        with pytest.raises(
            NotImplementedError, match=r"Aggregation compresses gradients and would destroy weights"
        ):
            CentralizedSGD(1, nn.Linear(1, 1), lr=0.1, agg_grad=False, aggregation=aggregation)


def test_wrong_arguments_are_named() -> None:
    x = nn.Parameter(torch.ones(3))
    sizes: tuple[tuple[Any, type[Exception]], ...] = (
        (0, ValueError),
        (-1, ValueError),
        (1.5, ValueError),
        ("3", TypeError),
        (True, TypeError),
    )
    for size, error in sizes:
        with pytest.raises(error, match="sparse_grad_size"):
            SparsifiedSGD([x], lr=0.1, sparse_grad_size=size)
    with pytest.raises(ValueError, match=r"momentum must be finite and at least 0, not -0\.5"):
        EFSignSGD([x], lr=1, momentum=-0.5)
    with pytest.raises(ValueError, match="weight_decay must be finite and at least 0, not nan"):
        SparsifiedSGD([x], lr=1, weight_decay=float("nan"))
    with pytest.raises(TypeError, match=r"momentum must be a number, not '0\.9'"):
        SignSGD([x], lr=1, momentum="0.9")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dampening must be a number, not '0\.9'"):
        SignSGD([x], lr=1, momentum=0.9, dampening="0.9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nesterov=True needs a momentum above 0"):
        SignSGD([x], lr=1, nesterov=True)
    with pytest.raises(ValueError, match="op must be 'avg_world' or 'avg_custom', not 'sum'"):
        SignAggregation().aggregate({}, "sum")
    with pytest.raises(TypeError, match=r"'x' has dtype torch\.complex64"):
        EFSignAggregation().aggregate({"x": torch.ones(2, dtype=torch.complex64)}, "avg_world")
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    for params, name in ((layer.parameters(), "group0.0"), (layer.named_parameters(), "weight")):
        with pytest.raises(
            ValueError, match=f"the gradient of '{name}' has layout torch.sparse_coo; only dense"
        ):
            SignSGD(params, lr=0.1).step()


DIRECTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.8, "dampening": 0.5},
    {"momentum": 0.6, "nesterov": True},
    {"momentum": 0.6, "weight_decay": 0.3, "dampening": 0.2},
]


@pytest.mark.parametrize("options", DIRECTIONS, ids=str)
def test_less_what_is_owed_error_feedback_walks_like_torchs_sgd(options: dict[str, Any]) -> None:
    """The compression loses nothing, so the direction with all its options can be read off."""
    x, y = nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer, plain = EFSignSGD([x], lr=0.1, **options), torch.optim.SGD([y], lr=0.1, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        g = torch.randn(7, generator=generator)
        owed = optimizer.aggregation.memory("group0.0")
        with torch.no_grad():  # weight decay sees the same weights
            y.copy_(x if owed is None else x - owed)
            before = y.clone()
        decay = options.get("weight_decay", 0)
        x.grad, y.grad = g, g + decay * (x.detach() - y.detach())
        optimizer.step()
        plain.step()
        assert not torch.equal(y, before)
        torch.testing.assert_close(
            x.detach() - optimizer.aggregation.memory("group0.0"), y.detach()
        )


@pytest.mark.parametrize("options", DIRECTIONS, ids=str)
def test_signs_are_those_of_torchs_direction(options: dict[str, Any]) -> None:
    x, y = nn.Parameter(torch.linspace(-1, 1, 50)), nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer, plain = SignSGD([x], lr=0.1, **options), torch.optim.SGD([y], lr=1.0, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        with torch.no_grad():
            y.copy_(x)
        before = x.detach().clone()
        x.grad = torch.randn(50, generator=generator)
        y.grad = x.grad.clone()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(before - x.detach(), 0.1 * torch.sign(before - y.detach()))


def test_sign_sgd_is_a_torch_sgd_as_in_version_3() -> None:
    x = nn.Parameter(torch.ones(2))
    optimizer = SignSGD([x], lr=0.25, momentum=0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    options = set(optimizer.param_groups[0])
    x.grad = torch.tensor([0.1, -3.0])
    optimizer.step()
    assert x.tolist() == [0.75, 1.25]
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.param_groups[0]) == options
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="SignSGD"):
        NTASGD(
            GenericCentralizedOptimizer(None, model, optimizer=SignSGD(model.parameters(), lr=0.1))
        )


def test_a_step_that_a_scaler_skips_is_no_iterate() -> None:
    def estimate(overflows: bool) -> list[float]:
        x = nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = SparsifiedSGD([x], lr=0.1, sparse_grad_size=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 1.0, 2.0) if overflows else (1.0, 1.0, 2.0):
            optimizer.zero_grad()
            scaler.scale((factor * x * torch.tensor([1.0, 3.0])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return optimizer.get_estimated_weights()[0].tolist()

    assert estimate(overflows=True) == estimate(overflows=False)


def test_the_estimate_needs_no_call_of_its_own() -> None:
    """Scripts of version 3.0 call it after each step; the estimate is that of the paper with and
    without."""
    estimates = []
    for calls in (True, False):
        x = nn.Parameter(torch.tensor([2.0, 1.0]))
        optimizer = SparsifiedSGD([x], lr=1.0, sparse_grad_size=1)
        for t in range(4):
            x.grad = torch.tensor([1.0, 0.4])
            optimizer.step()
            if calls:
                optimizer.update_estimated_weights(t, 1)
        estimates.append(optimizer.get_estimated_weights()[0])
    assert torch.equal(*estimates)


def test_accumulated_gradients_are_sent_once(ranks: Ranks) -> None:
    for result in ranks:
        for name, (accumulated, summed, calls) in result["accumulation"].items():
            assert calls == [], name
            assert all(torch.equal(accumulated[key], summed[key]) for key in summed), name


def test_memory_kept_in_inference_mode_can_be_changed_outside_of_it() -> None:
    memory = KeptMemory()
    with torch.inference_mode():
        memory.like("a", torch.zeros(3))
        memory.flat("b", 3, torch.float32, torch.device("cpu"))
    memory.like("a", torch.zeros(3)).zero_()
    memory.flat("b", 3, torch.float32, torch.device("cpu")).zero_()
