"""The methods of recent years: real processes over Gloo against the references, and the claims they
are known for.

The contract tests cover what all optimizers share: resuming, copies, the order of collectives,
bytes, subgroups."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ChunkedTopKAggregation,
    DeMoAggregation,
    DiLoCoAggregation,
    DionAggregation,
    NoLoCoAggregation,
    OneBitAggregation,
    PeriodicAggregation,
    QSGDAggregation,
    ScaffoldAggregation,
    SparseLoCoAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.aggregation import UnknownOperationError
from mlbench_core.aggregation.pytorch.compression import qsgd as qsgd_module
from mlbench_core.aggregation.pytorch.compression.demo import dct_matrix
from mlbench_core.aggregation.pytorch.local_steps.no_loco import draw_peer
from mlbench_core.aggregation.pytorch.local_steps.streaming import from_float4, to_float4
from mlbench_core.aggregation.pytorch.transport import messages
from mlbench_core.aggregation.pytorch.transport.packing import (
    pack_codes,
    packed_bytes,
    unpack_codes,
)
from mlbench_core.optim.pytorch import LARS, SCAFFOLD, DeMo, Dion, LocalSGD, MuonAdamW, OneBitAdam
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim import recent_workers as workers
from tests.optim.weight_averaging import SHAPE, gradient, start
from tests.references.demo import demo
from tests.references.dion import dion
from tests.references.dion2 import dion2
from tests.references.lars import lars
from tests.references.local_sgd import local_sgd
from tests.references.muon import muon, newton_schulz
from tests.references.no_loco import no_loco
from tests.references.normuon import normuon
from tests.references.one_bit_adam import one_bit_adam
from tests.references.qsgd import qsgd
from tests.references.scaffold import scaffold
from tests.references.sparse_loco import sparse_loco
from tests.references.streaming_diloco import streaming_diloco

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=some([3, 2]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def assert_learns_as_well_as(ranks: Ranks, other: str, name: str, fewer_bytes: float) -> None:
    """Within two points of another optimizer on the digits, with so many times fewer bytes."""
    if len(ranks) != 2:
        return
    accuracy, size_bytes = ranks[0]["digits"][name]
    best, all_bytes = ranks[0]["digits"][other]
    assert best > 0.94
    assert accuracy > best - 0.02
    assert all_bytes > fewer_bytes * size_bytes


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 17, 20])
def test_codes_are_packed_bit_after_bit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BLOCK_ELEMENTS", 16)
    codes = torch.randint(
        2**bits, (37,), generator=torch.Generator().manual_seed(bits), dtype=torch.int32
    )
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == packed_bytes(37, bits) == math.ceil(37 * bits / 8)
    text = "".join(format(code, f"0{bits}b") for code in codes.tolist()) if bits else ""
    assert "".join(format(byte, "08b") for byte in packed.tolist()) == text.ljust(
        8 * len(packed), "0"
    )
    for skipped in (0, 1, 8, 21, 37):
        assert torch.equal(unpack_codes(packed, 37 - skipped, bits, skipped), codes[skipped:])
    assert torch.equal(unpack_codes(packed, 3, bits, 5), codes[5:8])


class TestQSGD:
    def test_is_the_reference(self, ranks: Ranks) -> None:
        expected = qsgd(
            start(),
            gradient,
            len(ranks),
            lambda t: 0.1,
            workers.STEPS,
            workers.QSGD_LEVELS,
            lambda i, t: workers.qsgd_uniform(SHAPE, i, t),
            workers.QSGD_BUCKET,
        )
        for result in ranks:
            assert_close(result["qsgd"][-1], expected)
            assert torch.equal(result["qsgd"][-1], ranks[0]["qsgd"][-1])

    @pytest.mark.parametrize("norm", [2, math.inf])
    @pytest.mark.parametrize("levels", [1, 3, 7])
    def test_rounding_is_right_on_average_with_the_variance_of_the_paper(
        self, levels: int, norm: float
    ) -> None:
        d, draws = 16, 8000
        v = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v[3] = 0
        rounded = v.repeat(draws)  # every bucket is a draw of its own
        QSGDAggregation(levels=levels, bucket_size=d, norm=norm).aggregate(
            {"x": rounded}, "avg_world"
        )
        rounded = rounded.view(draws, d)
        size = torch.linalg.vector_norm(v, ord=norm)
        steps = rounded * levels / size
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
        assert not rounded[:, 3].any()
        # Five deviations of a mean of draws that are a level apart at most.
        assert (rounded.mean(0) - v).abs().max() < 5 * size / levels / 2 / draws**0.5
        variance = (rounded - v).square().sum(1).mean()
        assert 0 < variance < min(d / levels**2, d**0.5 / levels) * v.square().sum()

    def test_workers_and_steps_draw_apart_and_another_seed_draws_otherwise(
        self, ranks: Ranks
    ) -> None:
        def rounded(seed: int, skipped: int) -> Tensor:
            aggregation = QSGDAggregation(levels=1, seed=seed)
            aggregation.load_state_dict({"draws": skipped})
            x = torch.linspace(-1, 1, 200)
            aggregation.aggregate({"x": x}, "avg_world")
            return x

        assert torch.equal(rounded(0, 0), rounded(0, 0))
        assert not torch.equal(rounded(0, 0), rounded(0, 1))
        assert not torch.equal(rounded(0, 0), rounded(1, 0))
        uniform = [workers.qsgd_uniform(SHAPE, rank, 0) for rank in range(2)]
        assert not torch.equal(*uniform)  # and the reference, which has these, is met

    def test_values_find_their_places_in_blocks_and_messages(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(qsgd_module, "BLOCK_ELEMENTS", 6)
        generator = torch.Generator().manual_seed(0)
        # Values that are levels are not rounded.
        tensors = {
            str(n): 2 * torch.randint(-1, 2, (n,), generator=generator).float()
            for n in (5, 13, 1, 8, 3)
        }
        tensors["columns"] = torch.tensor(
            [[2.0, 0.0, -2.0], [-2.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
        ).t()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        QSGDAggregation(levels=1, norm=math.inf, bucket_size=4).aggregate(tensors, "avg_world")
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            name: tensor.tolist() for name, tensor in before.items()
        }

    def test_an_overflow_makes_its_bucket_nan(self) -> None:
        x = torch.tensor([1.0, torch.inf, 1.0, 2.0, torch.nan, 0.0])
        QSGDAggregation(bucket_size=2).aggregate({"x": x}, "avg_world")
        assert x.isfinite().tolist() == [False, False, True, True, False, False]

    def test_digits_are_learned_with_an_eighth_of_the_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "sgd", "qsgd", fewer_bytes=7.5)

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(
            ValueError,
            match="levels must be at most 127, so that a value fits into 8 bits, not 128",
        ):
            QSGDAggregation(levels=128)
        with pytest.raises(ValueError, match=r"norm must be 2 .*, not 1"):
            QSGDAggregation(norm=1)
        with pytest.raises(
            ValueError, match=r"QSGDAggregation must have the keys \['draws'\], not \['memory'\]"
        ):
            QSGDAggregation().load_state_dict({"memory": {}})


@pytest.mark.parametrize(("name", "fewer_bytes"), [("quantized", 2.5), ("loco", 5)])
def test_digits_are_learned_in_few_bits(ranks: Ranks, name: str, fewer_bytes: float) -> None:
    """In the first message a worker hands over all numbers, and in the second one half."""
    assert_learns_as_well_as(ranks, "sgd", name, fewer_bytes)


class TestScaffold:
    def test_is_the_reference(self, ranks: Ranks) -> None:
        x, c, c_i = scaffold(start(), gradient, len(ranks), eta=0.1, K=5, rounds=workers.STEPS // 5)
        for rank, result in enumerate(ranks):
            found = result["scaffold"]
            assert_close(found["history"][-1], x)
            assert torch.equal(found["history"][-1], ranks[0]["scaffold"]["history"][-1])
            assert torch.equal(
                found["state"]["common"]["x"], ranks[0]["scaffold"]["state"]["common"]["x"]
            )
            assert_close(found["state"]["common"]["x"], c)
            assert_close(found["state"]["own"]["x"], c_i[rank])

    def test_a_call_sends_the_weights_only(self, ranks: Ranks) -> None:
        for result in ranks:
            assert result["scaffold"]["sent"] == [0, 0, 0, 0, 8 * 35] * 3

    def test_different_data_do_not_move_the_fixed_point_as_with_local_sgd(
        self, ranks: Ranks
    ) -> None:
        quadratics = [workers.quadratic(rank) for rank in range(len(ranks))]
        optimum = torch.linalg.solve(
            sum(A for A, _ in quadratics), sum(A @ b for A, b in quadratics)
        )
        for result in ranks:
            assert (result["scaffold"]["scaffold"] - optimum).norm() < 1e-6 * optimum.norm()
            assert (result["scaffold"]["local"] - optimum).norm() > 0.01 * optimum.norm()

    def test_one_worker_walks_like_torchs_sgd_under_any_schedule(self) -> None:
        x, y = workers.Weights(x=start()), torch.nn.Parameter(start())
        optimizer = SCAFFOLD(model=x, lr=0.1, weight_decay=0.1, period=3)
        plain = torch.optim.SGD([y], lr=0.1, weight_decay=0.1)
        for step in range(12):
            x.x.grad, y.grad = gradient(0, x.x.detach(), step), gradient(0, y.detach(), step)
            given = x.x.grad
            for each in (optimizer, plain):
                each.param_groups[0]["lr"] = 0.1 / (1 + step)
                each.step()
            assert x.x.grad is given
            assert_close(x.x.detach(), y.detach())

    def test_a_worker_without_a_state_of_its_own_starts_uncorrected(self) -> None:
        aggregation = ScaffoldAggregation()
        state = {
            "shared": {"x": torch.zeros(2)},
            "common": {"x": torch.ones(2)},
            "own": {"x": torch.tensor([3.0, 4.0])},
        }
        aggregation.load_state_dict({**state, "rates": {"x": 0.5}})
        assert aggregation.correction("x").tolist() == [-2.0, -3.0]
        aggregation.load_state_dict(aggregation.shared_state(aggregation.state_dict()))
        assert aggregation.correction("x").tolist() == [0.0, 0.0]
        with pytest.raises(
            ValueError, match=r"'x' must have the shape \(2,\) of its shared weights, not \(3,\)"
        ):
            aggregation.aggregate({"x": torch.ones(3)}, "avg_world")

    def test_without_a_rate_nothing_is_learnt(self) -> None:
        model = workers.Weights(x=start())
        optimizer = SCAFFOLD(model=model, lr=0.0, period=1)
        workers.descend(0, model, optimizer, range(2))
        assert optimizer.aggregation.inside.correction("x") is None
        assert_close(model.x.detach(), start())


class TestSparseLoCo:
    def test_is_the_reference(self, ranks: Ranks) -> None:
        kept, bits, beta, chunk = workers.SPARSE_LOCO.values()
        rounds = workers.STEPS // 5
        x, e = sparse_loco(
            start(), gradient, len(ranks), 5, rounds, 0.05, kept, bits, chunk, beta, alpha=0.8
        )
        for rank, result in enumerate(ranks):
            found = result["sparse_loco"]
            assert_close(found["history"][-1], x)
            assert_close(found["memory"], e[rank])
            assert torch.equal(found["history"][-1], ranks[0]["sparse_loco"]["history"][-1])

    def test_messages_are_as_small_as_the_formula_says(self, ranks: Ranks) -> None:
        """Of 35 float64: two chunks of 16 with positions of 4 bits, and one of 3, of which all are
        sent."""
        size_bytes = (2 * 16 + 3 + 2) + (16 + 1 + 1)
        for result in ranks:
            assert result["sparse_loco"]["sent"] == [0, 0, 0, 0, size_bytes] * 3

    def test_uncompressed_it_averages_weights_as_local_sgd(self, ranks: Ranks) -> None:
        for result in ranks:
            for actual, expected in zip(
                result["sparse_loco"]["whole"], result["sparse_loco"]["local"], strict=True
            ):
                assert_close(actual, expected)

    @pytest.mark.parametrize("bits", [None, 1, 2, 8])
    def test_what_is_sent_and_what_stays_are_the_decayed_memory_and_the_change(
        self, bits: int | None
    ) -> None:
        aggregation = ChunkedTopKAggregation(density=0.25, bits=bits, decay=0.9, chunk_size=8)
        memory = torch.zeros(27)
        for step in range(3):
            change = torch.randn(27, generator=torch.Generator().manual_seed(step))
            expected = 0.9 * memory + change
            sent = change.clone()
            aggregation.aggregate({"x": sent}, "avg_world")
            memory = aggregation.memory("x").clone()
            torch.testing.assert_close(sent + memory, expected)
            assert sent.count_nonzero() == 3 * 2 + 1
            for part, whole in zip(sent.split(8), expected.split(8), strict=True):
                assert whole[part != 0].abs().min() >= whole[part == 0].abs().max()
                assert (part[part != 0].sign() == whole[part != 0].sign()).all()
            if bits in (None, 8):
                torch.testing.assert_close(
                    sent[sent != 0], expected[sent != 0], rtol=0, atol=0.0 if bits is None else 0.02
                )

    def test_digits_are_learned_with_a_fraction_of_dilocos_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "diloco", "sparse loco", fewer_bytes=60)

    def test_wrong_arguments_are_named(self) -> None:
        for options, message in (
            ({"bits": 9}, "bits must be at most 8, or None for no quantization, not 9"),
            ({"decay": 1.5}, "decay must be at most 1, not 1.5"),
            ({"chunk_size": 1 << 25}, r"chunk_size must be at most 2\*\*24, not 33554432"),
            ({"density": 1.5}, "density must be an integer from 1"),
        ):
            with pytest.raises(ValueError, match=message):
                ChunkedTopKAggregation(**options)
        with pytest.raises(
            TypeError, match="compressed must be a ChunkedTopKAggregation, not QSGDAggregation"
        ):
            SparseLoCoAggregation(QSGDAggregation())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="outer_lr must be finite and at least 0, not -1"):
            SparseLoCoAggregation(outer_lr=-1)


class TestDeMo:
    @pytest.mark.parametrize("name", ["sign", "plain"])
    def test_is_the_reference(self, ranks: Ranks, name: str) -> None:
        """5 x 7 numbers in blocks of 5 x 1, because 7 has no other divisor up to 5."""
        x, m = demo(
            start(),
            gradient,
            len(ranks),
            0.1,
            workers.STEPS,
            5,
            1,
            3,
            beta=0.9,
            signs=name == "sign",
        )
        for rank, result in enumerate(ranks):
            assert_close(result["demo"][name]["history"][-1], x)
            assert_close(result["demo"][name]["momentum"], m[rank])
            assert torch.equal(
                result["demo"][name]["history"][-1], ranks[0]["demo"][name]["history"][-1]
            )
            assert result["demo"][name]["sent"] == 7 * 3 * (8 + 2) + 8  # and one flag

    def test_with_all_coefficients_it_averages_gradients(self, ranks: Ranks) -> None:
        x = start()
        for step in range(workers.STEPS):
            x = x - 0.1 * sum(gradient(rank, x, step) for rank in range(len(ranks))) / len(ranks)
        for result in ranks:
            assert_close(result["demo"]["whole"]["history"][-1], x)
            assert_close(result["demo"]["whole"]["momentum"], torch.zeros_like(x))

    @pytest.mark.parametrize("size", [1, 2, 5, 64])
    def test_the_transform_is_orthonormal(self, size: int) -> None:
        dct = dct_matrix(size, torch.float64)
        assert_close(dct @ dct.T, torch.eye(size, dtype=torch.float64))
        wave = torch.cos(
            torch.arange(size, dtype=torch.float64).add(0.5) * torch.pi * (size // 2) / size
        )
        assert (dct @ wave).abs().gt(1e-9).nonzero().tolist() == [[size // 2]]

    @pytest.mark.parametrize("shape", [(), (7,), (6, 10), (130, 3), (4, 3, 2, 2)])
    def test_the_momentum_is_what_was_not_sent(self, shape: tuple[int, ...]) -> None:
        aggregation, m = DeMoAggregation(decay=0.9, top_k=2, block_size=4), torch.zeros(shape)
        for step in range(3):
            sent = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            expected = 0.9 * m + sent
            aggregation.aggregate({"x": sent}, "avg_world")
            m = aggregation.memory("x").clone()
            torch.testing.assert_close(m + sent, expected)
            # Orthonormal: what stays and what goes are at right angles.
            assert abs(float((m * sent).sum())) < 1e-5 * float(m.norm() * sent.norm()) + 1e-6

    def test_a_scheduler_may_change_the_decay(self) -> None:
        x = torch.nn.Parameter(torch.ones(4))
        optimizer = DeMo([x], lr=1.0, aggregation=DeMoAggregation(top_k=1))
        assert optimizer.param_groups[0]["momentum"] == 0.999
        for momentum in (0.5, 0.25):
            optimizer.param_groups[0]["momentum"] = momentum
            x.grad = torch.tensor([3.0, 0.0, 0.0, 0.0])
            before = optimizer.aggregation.memory("group0.0")
            expected = x.grad if before is None else momentum * before + x.grad
            optimizer.step()
        dct = dct_matrix(4)
        coefficients = dct @ expected
        coefficients[coefficients.abs().argmax()] = 0
        torch.testing.assert_close(optimizer.aggregation.memory("group0.0"), dct.T @ coefficients)

    def test_weight_decay_is_decoupled(self) -> None:
        x = torch.nn.Parameter(torch.tensor([2.0]))
        x.grad = torch.tensor([1.0])
        DeMo([x], lr=0.1, weight_decay=0.5).step()
        assert x.item() == pytest.approx(2 * (1 - 0.05) - 0.1)

    def test_digits_are_learned_with_a_fraction_of_the_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "sgd", "demo", fewer_bytes=20)

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(
            ValueError, match="decay must be below 1, not 1: the momentum would grow"
        ):
            DeMoAggregation(decay=1)
        with pytest.raises(ValueError, match=r"block_size must be at most 181, .*, not 200"):
            DeMoAggregation(block_size=200)
        with pytest.raises(
            ValueError, match=r"DeMoAggregation must have the keys \['momentum'\], not \['memory'\]"
        ):
            DeMoAggregation().load_state_dict({"memory": {}})


class TestOneBitAdam:
    @pytest.mark.parametrize("kind", ["OneBitAggregation", "Uncompressed"])
    def test_is_the_reference(self, ranks: Ranks, kind: str) -> None:
        """Uncompressed it is Adam with a frozen second moment."""
        compress = {"compress": lambda p: p} if kind == "Uncompressed" else {}
        x, e, delta = one_bit_adam(
            start(), workers.partial_gradient, len(ranks), 0.02, workers.STEPS, warmup=6, **compress
        )
        for rank, result in enumerate(ranks):
            found = result["one_bit_adam"][kind]
            assert_close(found["x"], x)
            assert torch.equal(found["x"], ranks[0]["one_bit_adam"][kind]["x"])
            assert found["state"]["steps"] == {"x": workers.STEPS}
            if kind == "OneBitAggregation":
                assert_close(found["state"]["errors"]["x"], e[rank])
                assert_close(found["state"]["average_errors"]["x"], delta)

    def test_messages_have_one_bit_per_coordinate_after_the_warm_up(self, ranks: Ranks) -> None:
        for result in ranks:
            sent = result["one_bit_adam"]["OneBitAggregation"]["sent"]
            assert sent == [8 * 35 + 8] * 6 + [5 + 8 + 8] * 9  # with a flag in float64

    def test_a_weight_that_had_no_gradient_in_the_warm_up_stays(self, ranks: Ranks) -> None:
        for result in ranks:
            found = result["one_bit_adam"]["OneBitAggregation"]
            assert found["x"][0, 0] == start()[0, 0]
            assert found["state"]["momentum"]["x"][0, 0] != 0, "one bit has no zero"

    def test_the_warm_up_is_torchs_adam_under_any_schedule(self) -> None:
        x, y = torch.nn.Parameter(start()), torch.nn.Parameter(start())
        optimizer = OneBitAdam(
            [x], lr=0.1, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1, warmup_steps=8
        )
        plain = torch.optim.Adam([y], lr=0.1, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1)
        for step in range(8):
            x.grad, y.grad = gradient(0, x.detach(), step), gradient(0, y.detach(), step)
            for each in (optimizer, plain):
                each.param_groups[0]["lr"] = 0.1 / (1 + step)
                each.step()
            assert_close(x.detach(), y.detach())

    def test_a_custom_denominator_divides_gradients_and_not_the_momentum(self) -> None:
        aggregation, other = (OneBitAggregation(warmup_steps=0) for _ in range(2))
        for step in range(4):
            g = torch.randn(9, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            summed, averaged = 10 * g, g.clone()
            aggregation.aggregate({"x": summed}, "avg_custom", 10)
            other.aggregate({"x": averaged}, "avg_world")
            assert_close(summed, averaged)

    def test_digits_are_learned_with_a_fraction_of_the_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "adam", "one-bit adam", fewer_bytes=4)

    def test_wrong_arguments_are_named(self) -> None:
        x = torch.nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=r"betas\[1\] must be below 1, not 1"):
            OneBitAdam([x], lr=0.1, betas=(0.9, 1))
        with pytest.raises(ValueError, match="warmup_steps must be at least 1, not 0"):
            OneBitAdam([x], lr=0.1, warmup_steps=0)
        with pytest.raises(ValueError, match="beta must be below 1, not 1"):
            OneBitAggregation(beta=1)
        with pytest.raises(ValueError, match="eps must be finite and at least 0, not -1"):
            OneBitAdam([x], lr=0.1, eps=-1)
        with pytest.raises(ValueError, match="OneBitAggregation must have the keys"):
            OneBitAggregation().load_state_dict({"memory": {}})


class TestDion:
    def test_is_one_worker_with_the_average_gradient(self, ranks: Ranks) -> None:
        """To 1e-6: 15 steps of orthonormalization enlarge the rounding of averages."""
        k = len(ranks)
        Q = ranks[0]["dion"]["first"].T
        x, M, Q = dion(start(), gradient, k, 0.05, workers.STEPS, Q, mu=0.9, weight_decay=0.1)
        found = [result["dion"] for result in ranks]
        for each in found:
            torch.testing.assert_close(each["x"], x, rtol=0, atol=1e-6)
            assert torch.equal(each["x"], found[0]["x"])
            # The sign of a column depends on the way of orthonormalization.
            signs = (each["state"]["queries"]["x"].T * Q).sum(0).sign()
            torch.testing.assert_close(
                each["state"]["queries"]["x"].T * signs, Q, rtol=0, atol=1e-6
            )
        momenta = torch.stack([each["state"]["momentum"]["x"] for each in found])
        torch.testing.assert_close(momenta.mean(0), M, rtol=0, atol=1e-6)
        assert (momenta[0] - momenta[1]).norm() > 0.1
        assert list(found[0]["state"]["momentum"]) == ["x"]

    def test_vectors_take_the_steps_of_adamw(self, ranks: Ranks) -> None:
        k, y = len(ranks), torch.nn.Parameter(start()[0])
        plain = torch.optim.AdamW([y], lr=0.05, weight_decay=0.1)
        x = start()
        for step in range(workers.STEPS):
            y.grad = sum(gradient(rank, x, step)[0] for rank in range(k)) / k
            plain.step()
            if step + 1 < workers.STEPS:  # the way of x, which gives the gradients
                x, *_ = dion(
                    start(), gradient, k, 0.05, step + 1, ranks[0]["dion"]["first"].T, 0.9, 0.1
                )
        for result in ranks:
            torch.testing.assert_close(result["dion"]["y"], y.detach(), rtol=0, atol=1e-6)

    def test_a_step_sends_two_thin_matrices_and_the_vectors(self, ranks: Ranks) -> None:
        for result in ranks:
            assert result["dion"]["sent"] == 8 * 2 * (5 + 7) + 8 * 7 + 8 * 2  # with two flags

    def test_all_directions_of_an_update_have_length_one_and_little_is_forgotten(self) -> None:
        aggregation = DionAggregation(rank=3, momentum=0.9)
        generator, m = torch.Generator().manual_seed(0), torch.zeros(6, 10, dtype=torch.float64)
        for _ in range(4):
            g = torch.randn(6, 10, generator=generator, dtype=torch.float64)
            update = g.clone()
            aggregation.aggregate({"x": update}, "avg_world")
            values = torch.linalg.svdvals(update)
            assert values[3:].max() < 1e-12
            assert 0.3 < values[2] <= values[0] < 1.7  # Q is not quite orthogonal, as in the paper
            basis = torch.linalg.svd(update).U[:, :3]
            b, m = m + g, aggregation.memory("x").clone()
            assert_close(m, b - 0.1 * basis @ (basis.T @ b))

    def test_the_length_of_gradients_does_not_matter_and_zeros_move_nothing(self) -> None:
        g = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
        short, long, none = 1e-6 * g, 1e6 * g, torch.zeros_like(g)
        for tensor in (short, long, none):
            DionAggregation(rank=2).aggregate({"x": tensor}, "avg_custom", 7)
        torch.testing.assert_close(short, long)
        assert not none.any()

    def test_an_overflow_is_seen_and_forgotten(self) -> None:
        aggregation = DionAggregation(rank=1)
        for value, is_finite in ((1.0, True), (torch.inf, False), (1.0, True)):
            x = torch.ones(3, 4)
            x[1, 1] = value
            aggregation.aggregate({"x": x}, "avg_world")
            assert bool(x.isfinite().all()) == is_finite

    def test_digits_are_learned_with_a_fraction_of_the_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "sgd", "dion", fewer_bytes=4)

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"momentum must be at most 1, not 1\.5"):
            DionAggregation(momentum=1.5)
        with pytest.raises(ValueError, match=r"betas\[0\] must be below 1, not 1"):
            Dion([torch.nn.Parameter(torch.ones(2))], lr=0.1, betas=(1, 0.9))
        aggregation = DionAggregation(rank=2)
        aggregation.load_state_dict({"momentum": {}, "queries": {"x": torch.ones(1, 4)}})
        with pytest.raises(
            ValueError, match=r"queries\['x'\] of the state must have shape \(2, 4\), not \(1, 4\)"
        ):
            aggregation.aggregate({"x": torch.ones(3, 4)}, "avg_world")


class TestNoLoCo:
    def test_is_the_reference(self, ranks: Ranks) -> None:
        k, groups = len(ranks), []
        for round_ in range(workers.STEPS // 5):
            peers = [draw_peer(rank, k, 0, round_) for rank in range(k)]
            groups.append({frozenset({i, i if j is None else j}) for i, j in enumerate(peers)})
        expected = no_loco([start(rank) for rank in range(k)], gradient, groups, H=5, lr=0.05)
        for rank, result in enumerate(ranks):
            found = result["no_loco"]
            for phi, x in zip(expected, found["history"][4::5], strict=True):
                assert_close(x, phi[0][rank])
            assert torch.equal(found["resumed"], found["history"][-1])

    def test_a_call_sends_weights_and_changes_to_one_worker(self, ranks: Ranks) -> None:
        k = len(ranks)
        for rank, result in enumerate(ranks):
            expected = [0] * workers.STEPS
            for round_ in range(3):
                if draw_peer(rank, k, 0, round_) is not None:
                    expected[5 * round_ + 4] = 2 * 8 * 35  # float64
            assert result["no_loco"]["sent"] == expected

    def test_the_average_is_heavy_ball_diloco_for_any_pairs(self, ranks: Ranks) -> None:
        k = len(ranks)
        phi, m = sum(map(start, range(k))) / k, torch.zeros_like(start())
        for call in range(8):
            m = 0.5 * m + 0.7 * sum(workers.no_loco_move(rank, call) for rank in range(k)) / k
            phi = phi + m
            found = [result["no_loco"]["moved"][call + 1] for result in ranks]
            assert_close(sum(x for x, _ in found) / k, phi)
            assert_close(sum(momentum for _, momentum in found) / k, m)

    def test_without_gradients_two_workers_approach_as_a_damped_oscillation(
        self, ranks: Ranks
    ) -> None:
        """The roots of z^2 - 0.8 z + 0.5, the recurrence of the difference, are below 1."""
        first, other = (result["no_loco"]["not moved"] for result in ranks[:2])
        gaps = [a - b for (a, _), (b, _) in zip(first, other, strict=True)]
        assert_close(gaps[1], 0.3 * gaps[0])
        for before, now, after in zip(gaps, gaps[1:], gaps[2:], strict=False):
            assert_close(after, 0.8 * now - 0.5 * before)
        assert gaps[-1].norm() < 0.1 * gaps[0].norm()

    @pytest.mark.parametrize("world_size", range(1, 8))
    def test_pairs_are_mutual_and_change(self, world_size: int) -> None:
        drawn = set()
        for round_ in range(40):
            peers = [draw_peer(rank, world_size, 1, round_) for rank in range(world_size)]
            assert peers.count(None) == world_size % 2
            for rank, peer in enumerate(peers):
                assert peer is None or (peer != rank and peers[peer] == rank)
            drawn.update(enumerate(peers))
        alone = world_size if world_size % 2 else 0
        assert len(drawn) == world_size * (world_size - 1) + alone  # each with each

    def test_a_worker_without_a_state_of_its_own_starts_from_its_weights(self) -> None:
        x, aggregation = start(), NoLoCoAggregation()
        aggregation.start({"x": torch.nn.Parameter(x)})
        for _ in range(2):
            aggregation.aggregate({"x": x.add_(1)}, "avg_world")
        joined = NoLoCoAggregation()
        joined.load_state_dict(aggregation.shared_state(aggregation.state_dict()))
        assert joined.rounds == 2  # or it would wait for another peer
        joined.start({"x": torch.nn.Parameter(start(5))})
        y = start(5) + 1
        joined.aggregate({"x": y}, "avg_world")
        assert_close(y, start(5) + 0.7)

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match="outer_lr must be finite and at least 0, not -1"):
            NoLoCoAggregation(outer_lr=-1)
        with pytest.raises(ValueError, match="gamma must be finite and at least 0, not nan"):
            NoLoCoAggregation(gamma=math.nan)
        with pytest.raises(ValueError, match="seed must be"):
            NoLoCoAggregation(seed=-1)


class TestStreamingDiLoCo:
    @pytest.mark.parametrize("quantize", [False, True])
    def test_is_the_reference(self, ranks: Ranks, quantize: bool) -> None:
        H, _, tau, alpha = workers.STREAMING.values()
        expected = streaming_diloco(
            [start(), start()[0]],
            workers.fragment_gradient,
            len(ranks),
            H,
            workers.STEPS,
            0.05,
            tau,
            alpha,
            quantize,
        )
        for result, fragments in zip(ranks, expected, strict=True):
            for actual, fragment in zip(
                result["streaming"][quantize]["history"][-1], fragments, strict=True
            ):
                assert_close(actual, fragment.detach())

    def test_one_fragment_at_once_is_diloco_bit_for_bit(self, ranks: Ranks) -> None:
        for result in ranks:
            for actual, expected in zip(
                result["streaming"]["plain"], result["streaming"]["diloco"], strict=True
            ):
                assert torch.equal(actual, expected)

    @pytest.mark.parametrize("quantize", [False, True])
    def test_it_resumes_while_messages_are_on_their_way(self, ranks: Ranks, quantize: bool) -> None:
        for result in ranks:
            found = result["streaming"][quantize]
            for resumed in found["resumed"]:
                for actual, expected in zip(resumed, found["history"][-1], strict=True):
                    assert torch.equal(actual, expected)

    def test_a_step_sends_one_fragment(self, ranks: Ranks) -> None:
        """Of 35 and of 7 float64; with four bits a scale and half a byte for each."""
        for result in ranks:
            assert result["streaming"][False]["sent"] == [0, 7 * 8, 0, 0, 35 * 8] * 3
            assert result["streaming"][True]["sent"] == [0, 8 + 4, 0, 0, 8 + 18] * 3

    @pytest.mark.parametrize("delay", [0, 2])
    def test_a_message_with_a_delay_is_overlapped_and_the_ratio_is_that_of_four_bits(
        self, ranks: Ranks, delay: int
    ) -> None:
        for result in ranks:
            whole, ratio = result["streaming"]["collectives", False, delay]
            assert whole == [("all_reduce", size, delay > 0) for size in (7 * 8, 35 * 8)]
            assert ratio == 1
            quantized, ratio = result["streaming"]["collectives", True, delay]
            assert quantized == [("all_gather", size, delay > 0) for size in (8 + 4, 8 + 18)]
            assert ratio == (7 + 35) * 8 / (8 + 4 + 8 + 18)

    def test_workers_do_not_wait_while_messages_are_on_their_way(self, ranks: Ranks) -> None:
        assert all(result["streaming"]["order"] for result in ranks)

    def test_four_bits_hold_the_nearest_power_of_two(self) -> None:
        x = torch.randn(999, generator=torch.Generator().manual_seed(0))
        rounded = from_float4(to_float4(x), 999, torch.float32)
        sizes = x.abs().max() * torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
        assert set(rounded.abs().tolist()) == set(sizes.tolist())
        assert torch.equal((rounded - x).abs(), (x.abs()[:, None] - sizes).abs().amin(1))
        assert not from_float4(to_float4(torch.zeros(3)), 3, torch.float32).any()
        assert from_float4(to_float4(torch.tensor([1.0, math.nan])), 2, torch.float32).isnan().any()

    def test_digits_are_learned_with_an_eighth_of_dilocos_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "diloco", "streaming", fewer_bytes=7.5)

    def test_wrong_arguments_are_named(self) -> None:
        for options, message in (
            ({"period": 3, "fragments": 4}, "fragments must be at most period, 3, not 4"),
            ({"period": 5, "delay": 5}, "delay must be less than period, 5, not 5"),
            ({"mixing": 1.5}, "mixing must be at most 1, not 1.5"),
        ):
            with pytest.raises(ValueError, match=message):
                StreamingDiLoCoAggregation(**options)
        with pytest.raises(
            ValueError, match="by_layer must be False, because each message is a fragment"
        ):
            StreamingDiLoCoAggregation().agg_model(by_layer=True)


class TestDelayedAverages:
    """Of local SGD."""

    @pytest.mark.parametrize("by_layer", [False, True])
    @pytest.mark.parametrize(("period", "delay"), workers.DELAYED)
    def test_is_the_reference_after_every_step(
        self, ranks: Ranks, period: int, delay: int, by_layer: bool
    ) -> None:
        def gradient_of(fragment: int) -> Callable[[int, Tensor, int], Tensor]:
            return lambda i, x, t: workers.fragment_gradient(i, fragment, x, t)

        for fragment, steps in itertools.product((0, 1), range(1, workers.STEPS + 1)):
            first = start() if fragment == 0 else start()[0]
            expected = local_sgd(
                [first for _ in ranks], gradient_of(fragment), 0.1, period, steps, delay
            )
            for result, x in zip(ranks, expected, strict=True):
                assert_close(
                    result["delayed"][period, delay, by_layer]["history"][steps - 1][fragment], x
                )

    @pytest.mark.parametrize(("period", "delay"), workers.DELAYED)
    def test_only_the_start_sends_and_a_message_with_a_delay_is_overlapped(
        self, ranks: Ranks, period: int, delay: int
    ) -> None:
        sizes = 35 * 8, 7 * 8
        for result, (by_layer, messages_) in itertools.product(
            ranks, ((False, [sum(sizes)]), (True, sizes))
        ):
            found = result["delayed"][period, delay, by_layer]
            for step in range(workers.STEPS):
                is_due = (step + 1) % period == 0
                assert found["sent"][step] == (sum(sizes) if is_due else 0)
                expected = [("all_reduce", size, delay > 0) for size in messages_] if is_due else []
                assert found["collectives"][step] == expected

    def test_it_resumes_and_is_copied_while_a_message_is_on_its_way(self, ranks: Ranks) -> None:
        for result in ranks:
            for ends in result["delayed"]["resumed"]:
                for name in ("copied", "resumed"):
                    assert all(map(torch.equal, ends[name], ends["through"]))

    def test_workers_do_not_wait_while_a_message_is_on_its_way(self, ranks: Ranks) -> None:
        assert all(result["delayed"]["order"] for result in ranks)

    def test_a_parameter_that_comes_later_counts_its_own_steps(self, ranks: Ranks) -> None:
        expected = local_sgd(
            [start() for _ in ranks], gradient, 0.1, H=4, steps=workers.STEPS, tau=2
        )
        for result, x in zip(ranks, expected, strict=True):
            assert_close(result["delayed"]["late"], x)

    def test_tensors_of_every_kind_keep_their_memory(self, ranks: Ranks) -> None:
        average = (len(ranks) + 1) / 2
        for result in ranks:
            for tensor in result["delayed"]["kinds"].values():
                assert torch.equal(tensor, torch.full_like(tensor, average + 3))

    def test_messages_may_travel_in_half_precision(self, ranks: Ranks) -> None:
        expected = local_sgd(
            [start() for _ in ranks], gradient, 0.1, H=4, steps=workers.STEPS, tau=2
        )
        for result, x in zip(ranks, expected, strict=True):
            found, size_bytes, large = result["delayed"]["half"]
            torch.testing.assert_close(found, x, rtol=0, atol=2e-3)
            assert size_bytes == 3 * (35 + 7) * 2
            assert large.isfinite().all(), "a sum of large numbers has no room in half precision"

    def test_a_state_may_be_loaded_with_another_delay(self, ranks: Ranks) -> None:
        """A shorter one adds the correction in the next step; one of another period in its own
        time."""
        for result in ranks:
            at_once, *others = result["delayed"]["shorter"]
            average = torch.full((2,), (len(ranks) - 1) / 2)
            assert torch.equal(at_once, average)
            for x in others:
                assert torch.equal(x, average)

    def test_digits_are_learned_with_an_eighth_of_the_bytes(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "sgd", "delayed", fewer_bytes=7.5)

    def test_one_worker_alone_sends_nothing_and_changes_nothing(self) -> None:
        model, plain = workers.Weights(x=start()), workers.Weights(x=start())
        optimizer = LocalSGD(model=model, lr=0.1, momentum=0.9, period=3, delay=2)
        workers.descend(0, model, optimizer)
        workers.descend(0, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        assert torch.equal(model.x, plain.x)
        assert optimizer.aggregation.bytes_sent == 0
        assert optimizer.aggregation.state_dict() == {"counts": {"x": workers.STEPS}}

    def test_a_shared_state_has_no_corrections(self) -> None:
        aggregation = PeriodicAggregation(AllReduceAggregation(), period=3, delay=2)
        state = {"counts": {"x": 4}, "corrections": {"x": torch.ones(2)}}
        aggregation.load_state_dict(state)
        assert str(aggregation.state_dict()) == str(state)
        assert aggregation.remembered_names({"corrections": {"y": torch.ones(2)}}) == {"y"}
        aggregation.load_state_dict(aggregation.shared_state(state))
        assert aggregation.state_dict() == {"counts": {"x": 4}}

    def test_wrong_arguments_are_named(self) -> None:
        model = workers.Weights(x=start())
        make = partial(LocalSGD, model=model, lr=0.1, period=4)
        for options, error, message in (
            (
                {"delay": 4},
                ValueError,
                "delay must be less than period, 4, not 4: a message must arrive before",
            ),
            ({"delay": -1}, ValueError, "delay must be at least 0, not -1"),
            ({"delay": 1.5}, TypeError, "delay must be an integer, not 1.5"),
            (
                {"delay": 1, "aggregation": DiLoCoAggregation()},
                TypeError,
                "aggregation must be an AllReduceAggregation if there is a "
                "delay, not DiLoCoAggregation: leave out "
                r"delay, or for DiLoCo, use StreamingDiLoCoAggregation\(delay=",
            ),
            (
                {"delay": 1, "aggregation": AllReduceAggregation(shared_memory=True)},
                ValueError,
                (
                    "shared_memory must be False if there is a "
                    "delay, not True, because no message moves"
                ),
            ),
        ):
            with pytest.raises(error, match=message):
                make(**options)
        make(aggregation=AllReduceAggregation(shared_memory=True))
        aggregation = PeriodicAggregation(AllReduceAggregation(), period=4, delay=1)
        with pytest.raises(
            UnknownOperationError, match="op must be 'avg_world' if weights are averaged"
        ):
            aggregation.aggregate({"x": start()}, "avg_custom", 2)
        with pytest.raises(
            ValueError, match=r"must have the keys \['corrections', 'counts', 'inside'\]"
        ):
            aggregation.load_state_dict({"memory": {}})


class TestLARS:
    def test_is_the_reference_on_average_gradients(self, ranks: Ranks) -> None:
        options = dict(workers.LARS_OPTIONS)
        options["trust"] = options.pop("trust_coefficient")
        x = lars(start(), gradient, len(ranks), workers.STEPS, **options)
        y = torch.zeros_like(start()[0])
        y = lars(
            y,
            lambda i, y, t: workers.fragment_gradient(i, 1, y, t),
            len(ranks),
            workers.STEPS,
            **options,
        )
        assert (x - start()).norm() > 0.1
        assert y.any()
        for result in ranks:
            assert_close(result["lars"]["x"], x)
            assert_close(result["lars"]["y"], y)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_workers_with_average_gradients_are_one_worker_with_the_joined_batch(
        self, dtype: torch.dtype
    ) -> None:
        """A mean of the loss over three equal parts of a batch, as three workers have them."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(12, 5, generator=generator, dtype=dtype)
        one = torch.randn(5, 3, generator=generator, dtype=dtype).requires_grad_()
        several = one.detach().clone().requires_grad_()
        optimizers = [
            LARS([parameter], lr=1.0, trust_coefficient=0.1) for parameter in (one, several)
        ]
        for _ in range(5):
            one.grad = torch.autograd.grad((inputs @ one).square().mean(), one)[0]
            parts = [
                torch.autograd.grad((p @ several).square().mean(), several)[0]
                for p in inputs.chunk(3)
            ]
            several.grad = torch.stack(parts).mean(0)
            for optimizer in optimizers:
                optimizer.step()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(several, one, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    def test_the_first_step_has_the_length_of_the_weights_whatever_the_gradient(
        self, scale: float
    ) -> None:
        x = start().requires_grad_()
        x.grad = scale * gradient(0, start(), 0)
        LARS([x], lr=2.0, weight_decay=0, trust_coefficient=0.05).step()
        torch.testing.assert_close((x.detach() - start()).norm(), 0.1 * start().norm())

    def test_a_group_without_lars_takes_the_steps_of_sgd_with_its_own_decay(self) -> None:
        x, y, z = (start().requires_grad_() for _ in range(3))
        groups = [{"params": [x]}, {"params": [y], "use_lars": False, "weight_decay": 0.3}]
        optimizers = (
            LARS(groups, lr=0.1),
            torch.optim.SGD([z], lr=0.1, momentum=0.9, weight_decay=0.3),
        )
        for step in range(4):
            for parameter in (x, y, z):
                parameter.grad = gradient(0, parameter.detach(), step)
            for optimizer in optimizers:
                optimizer.step()
        assert_close(y.detach(), z.detach())
        assert (x - z).norm() > 0.1

    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_a_norm_of_zero_leaves_the_rate_alone(self, weight_decay: float) -> None:
        no_weights, no_gradient, neither = (
            torch.full((3,), value, requires_grad=True) for value in (0.0, 2.0, 0.0)
        )
        for parameter, value in ((no_weights, 1.0), (no_gradient, 0.0), (neither, 0.0)):
            parameter.grad = torch.full((3,), value)
        LARS([no_weights, no_gradient, neither], lr=0.5, weight_decay=weight_decay).step()
        assert no_weights.tolist() == [-0.5] * 3
        torch.testing.assert_close(
            no_gradient.detach(), torch.full((3,), 2 - 0.5 * weight_decay * 2)
        )
        assert neither.tolist() == [0.0] * 3

    def test_norms_do_not_overflow_in_float16(self) -> None:
        x = torch.full((100_000,), 300.0, dtype=torch.float16, requires_grad=True)
        x.grad = torch.full_like(x, 300.0)
        LARS([x], lr=100.0, weight_decay=0).step()
        torch.testing.assert_close(x.detach(), torch.full_like(x, 270.0))

    def test_a_change_of_the_rate_affects_only_later_gradients(self) -> None:
        x = start().requires_grad_()
        optimizer = LARS([x], lr=1.0, momentum=0.5, trust_coefficient=0.1)
        x.grad = gradient(0, start(), 0)
        optimizer.step()
        first = x.detach() - start()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert_close(x.detach() - start(), 1.5 * first)

    def test_resumes_to_the_bit_with_momentum(self) -> None:
        def make() -> tuple[Tensor, LARS]:
            x = start().float().requires_grad_()
            return x, LARS([x], lr=0.7, trust_coefficient=0.1)

        def train(x: Tensor, optimizer: LARS, steps: range) -> None:
            for step in steps:
                x.grad = gradient(0, x.detach().double(), step).float()
                optimizer.step()

        through, (half, first), (resumed, second) = make(), make(), make()
        train(*through, range(8))
        train(half, first, range(4))
        resumed.data.copy_(half.data)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(resumed, second, range(4, 8))
        assert torch.equal(resumed, through[0])

    @pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "trust_coefficient"])
    @pytest.mark.parametrize("value", [-1, math.nan, math.inf])
    def test_wrong_arguments_are_named(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"^{name} must be finite and .*, not {value}$"):
            LARS([torch.zeros(1)], **{"lr": 1.0, name: value})

    def test_a_sparse_gradient_is_refused(self) -> None:
        x = torch.zeros(3, 2, requires_grad=True)
        x.grad = torch.ones(3, 2).to_sparse()
        with pytest.raises(ValueError, match="gradients must be dense, not sparse"):
            LARS([x], lr=1.0).step()

    def test_a_trust_coefficient_of_zero_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match="trust_coefficient must be finite and positive, not 0"
        ):
            LARS([torch.zeros(1)], lr=1.0, trust_coefficient=0)


class TestMuon:
    def test_is_the_reference_on_average_gradients(self, ranks: Ranks) -> None:
        """To the precision of bfloat16, in which torch iterates."""
        x = muon(start(), gradient, len(ranks), workers.STEPS, 0.05)
        for result in ranks:
            assert (result["muon"]["x"] - x).norm() < 0.01 * (x - start()).norm()
            assert torch.equal(result["muon"]["x"], ranks[0]["muon"]["x"])

    def test_other_parameters_take_the_steps_of_adamw(self, ranks: Ranks) -> None:
        y = start()[0].requires_grad_()
        adamw = torch.optim.AdamW([y], lr=0.05, weight_decay=0.1)
        for step in range(workers.STEPS):
            gradients = [
                workers.fragment_gradient(i, 1, y.detach(), step) for i in range(len(ranks))
            ]
            y.grad = torch.stack(gradients).mean(0)
            adamw.step()
        for result in ranks:
            assert_close(result["muon"]["y"], y.detach())

    @pytest.mark.parametrize(
        ("name", "reference"),
        [
            ("normuon", normuon),
            ("dion2", partial(dion2, fraction=0.3)),
            ("dion3", partial(dion2, fraction=0.3, beta2=0.95)),
        ],
    )
    def test_relatives_are_their_references_on_average_gradients(
        self, name: str, reference: Callable[..., Tensor], ranks: Ranks
    ) -> None:
        """Float64 matrices are not iterated in bfloat16."""
        options = (len(ranks), workers.STEPS, 0.05, newton_schulz)
        wide = reference(start(), gradient, *options)
        tall = reference(start().T, lambda i, y, t: gradient(i, y.T, t).T, *options)
        for result in ranks:
            x, y, size_bytes = result["relatives_of_muon"][name]
            torch.testing.assert_close(x, wide, rtol=0, atol=1e-6)
            torch.testing.assert_close(y, tall, rtol=0, atol=1e-6)
            assert torch.equal(x, ranks[0]["relatives_of_muon"][name][0])
            # The two gradients in float64, and a number for each, which says that it exists.
            assert size_bytes == 8 * (2 * x.numel() + 2)

    def test_muloco_is_dilocos_outer_step_on_muons_changes(self, ranks: Ranks) -> None:
        """Of the first period, whose outer momentum is the change itself: 0.7 times 1.9 of it."""
        ends = []
        for rank in range(len(ranks)):
            ends.append(
                muon(start(), lambda _, x, step, rank=rank: gradient(rank, x, step), 1, 5, 0.05)
            )
        change = torch.stack(ends).mean(0) - start()
        for result in ranks:
            found = result["muon"]["muloco"][4] - start()
            assert (found - 0.7 * 1.9 * change).norm() < 0.01 * found.norm()

    @pytest.mark.parametrize("shape", [(6, 40), (40, 6), (20, 20)])
    def test_a_step_is_nearly_orthonormal_whatever_the_gradient(
        self, shape: tuple[int, int]
    ) -> None:
        """Its singular values are from 0.6 to 1.3, where those of the gradient span two orders of
        magnitude."""
        generator = torch.Generator().manual_seed(0)
        u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
        x = torch.zeros(shape, requires_grad=True)
        x.grad = 1e-3 * u @ torch.logspace(0, -2, min(shape)).diag() @ v
        MuonAdamW([x], lr=0.1).step()
        step = -(u.T @ x.detach() @ v.T) / (0.1 * 0.2 * max(shape) ** 0.5)
        assert ((step.diagonal() > 0.6) & (step.diagonal() < 1.3)).all()
        assert (step - step.diagonal().diag()).abs().max() < 0.05

    def test_options_reach_torchs_optimizers(self) -> None:
        first, second = (
            [torch.ones(3, 2, requires_grad=True), torch.ones(3, requires_grad=True)]
            for _ in range(2)
        )
        ours = MuonAdamW(first, lr=0.1, weight_decay=0.3, momentum=0.5, betas=(0.5, 0.6), eps=0.1)
        muon = torch.optim.Muon(
            second[:1], lr=0.1, weight_decay=0.3, momentum=0.5, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(second[1:], lr=0.1, weight_decay=0.3, betas=(0.5, 0.6), eps=0.1)
        for step in range(3):
            for parameter in (*first, *second):
                parameter.grad = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(step)
                )
            for optimizer in (ours, muon, adamw):
                optimizer.step()
        for parameter, expected in zip(first, second, strict=True):
            assert torch.equal(parameter, expected)

    def test_a_group_can_leave_its_matrices_to_adamw(self) -> None:
        x, y, z = (torch.ones(3, 3, requires_grad=True) for _ in range(3))
        optimizer = MuonAdamW([{"params": [x]}, {"params": [y], "use_muon": False}], lr=0.1)
        adamw = torch.optim.AdamW([z], lr=0.1, weight_decay=0.1)
        for parameter in (x, y, z):
            parameter.grad = torch.arange(9.0).view(3, 3)
        optimizer.step()
        adamw.step()
        assert torch.equal(y, z)
        assert not torch.equal(x, z)

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_a_kernel_steps_as_a_matrix_with_a_row_per_output(
        self, memory_format: torch.memory_format
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        kernel = (
            torch.randn(4, 3, 2, 2, generator=generator)
            .to(memory_format=memory_format)
            .requires_grad_()
        )
        matrix = kernel.detach().flatten(1).clone().requires_grad_()
        optimizers = MuonAdamW([kernel], lr=0.1, kernels=True), MuonAdamW([matrix], lr=0.1)
        for _ in range(3):
            gradient = torch.randn(4, 3, 2, 2, generator=generator)
            kernel.grad, matrix.grad = gradient.to(memory_format=memory_format), gradient.flatten(1)
            for optimizer in optimizers:
                optimizer.step()
            assert torch.equal(kernel.flatten(1), matrix)

    def test_a_kernel_takes_adamws_step_if_not_asked_otherwise(self) -> None:
        x, y, z = (torch.ones(2, 3, 2, 2, requires_grad=True) for _ in range(3))
        old = MuonAdamW([y], lr=0.1, kernels=True)
        del old.param_groups[0]["kernels"]  # as after loading a checkpoint from before the option
        optimizers = MuonAdamW([x], lr=0.1), old, torch.optim.AdamW([z], lr=0.1, weight_decay=0.1)
        for parameter, optimizer in zip((x, y, z), optimizers, strict=True):
            parameter.grad = torch.arange(24.0).view(2, 3, 2, 2)
            optimizer.step()
        assert torch.equal(x, z)
        assert torch.equal(y, z)

    def test_digits_are_learned_as_well_as_with_adam(self, ranks: Ranks) -> None:
        assert_learns_as_well_as(ranks, "adam", "muon", fewer_bytes=0.9)
        assert_learns_as_well_as(ranks, "diloco", "muloco", fewer_bytes=0.9)
        for relative in workers.RELATIVES:
            assert_learns_as_well_as(ranks, "adam", relative, fewer_bytes=0.9)

    def test_wrong_arguments_are_named(self) -> None:
        x = [torch.ones(2, 2, requires_grad=True)]
        with pytest.raises(TypeError, match=r"lr must be a number, not '0\.1'"):
            MuonAdamW(x, lr="0.1")  # type: ignore[arg-type]
        for options in ({"weight_decay": -1}, {"momentum": -1}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 0"):
                MuonAdamW(x, **options)  # type: ignore[arg-type]
