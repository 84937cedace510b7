"""Decentralized and periodic optimizers: real processes over Gloo against the references and known
solutions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor

from mlbench_core.aggregation.pytorch.choco import Compression, Identity, RandomK, ScaledSign, TopK
from mlbench_core.aggregation.pytorch.compression.sparsified import draw_coordinates
from mlbench_core.aggregation.pytorch.transport.messages import KeptMemory
from mlbench_core.aggregation.pytorch.transport.topology import ring
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim import weight_averaging as workers
from tests.optim.weight_averaging import COMPRESSIONS, STEPS, gradient, start, target, topologies
from tests.references.choco_sgd import choco_sgd, scaled_sign, top_k
from tests.references.decentralized_sgd import decentralized_sgd, mixing_matrix
from tests.references.diloco import diloco
from tests.references.local_sgd import local_sgd

Ranks = list[dict[str, Any]]
GRAPHS = tuple(topologies(4))


@pytest.fixture(scope="module", params=some([4, 2]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all, timeout_s=240)


def assert_all_close(actual: list[Tensor], expected: list[Tensor], atol: float) -> None:
    assert len(actual) == len(expected) > 0
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=atol)


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def column(ranks: Ranks, scenario: str, key: Any) -> list[Any]:
    """What every worker has at one place, by rank."""
    return [result[scenario][key] for result in ranks]


class TestDecentralizedSGD:
    @pytest.mark.parametrize("how", [False, True, "topology"])
    @pytest.mark.parametrize("name", GRAPHS)
    def test_is_the_reference(self, ranks: Ranks, name: str, how: bool | str) -> None:
        graph = topologies(len(ranks))[name]
        W = mixing_matrix([graph.neighbours(rank) for rank in range(len(ranks))])
        expected = decentralized_sgd([start() for _ in ranks], gradient, W, eta=0.1, steps=STEPS)
        assert_all_close(
            [history[-1] for history in column(ranks, "decentralized", (name, how))],
            expected,
            1e-12,
        )

    @pytest.mark.parametrize("name", GRAPHS)
    def test_the_average_takes_the_step_of_the_average_gradient(
        self, ranks: Ranks, name: str
    ) -> None:
        histories = column(ranks, "decentralized", (name, False))
        for step in range(1, STEPS):
            before = [history[step - 1] for history in histories]
            gradients = [gradient(rank, x, step) for rank, x in enumerate(before)]
            expected = torch.stack(before).mean(0) - 0.1 * torch.stack(gradients).mean(0)
            actual = torch.stack([history[step] for history in histories]).mean(0)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("lr", [0.1, 0.4])
    def test_constant_steps_end_as_near_one_another_as_the_spectral_gap_says(
        self, ranks: Ranks, lr: float
    ) -> None:
        """On 1/2 ||x - b_i||^2 the fixed point is (I - (1 - lr) W)^-1 lr W b."""
        k, graph = len(ranks), ring(len(ranks))
        W, b = graph.mixing_matrix, torch.stack([target(rank).flatten() for rank in range(k)])
        fixed_point = torch.linalg.solve(torch.eye(k, dtype=b.dtype) - (1 - lr) * W, lr * W @ b)
        x = torch.stack(column(ranks, "steady_state", lr)).view(k, -1)
        torch.testing.assert_close(x, fixed_point, rtol=0, atol=5e-3 if lr == 0.1 else 1e-3)
        torch.testing.assert_close(x.mean(0), b.mean(0), rtol=0, atol=5e-3 if lr == 0.1 else 1e-3)
        second = 1 - graph.spectral_gap
        bound = lr * second / (1 - (1 - lr) * second) * (b - b.mean(0)).norm()
        assert (x - x.mean(0)).norm() <= bound + 1e-6


class TestMixing:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_a_round_shrinks_the_distance_by_the_spectral_gap_and_keeps_the_average(
        self, ranks: Ranks, name: str
    ) -> None:
        graph = topologies(len(ranks))[name]
        distances, _ = ranks[0]["gossip"][name, "plain"]
        assert distances[0] > 1
        for before, after in itertools.pairwise(distances):
            assert after <= (1 - graph.spectral_gap) * before * (1 + 1e-9) + 1e-14
        average = torch.stack([target(rank) for rank in range(len(ranks))]).mean(0)
        mixed = torch.stack([last for _, last in column(ranks, "gossip", (name, "plain"))])
        torch.testing.assert_close(mixed.mean(0), average, rtol=0, atol=1e-14)

    def test_the_complete_graph_averages_exactly(self, ranks: Ranks) -> None:
        average = torch.stack([target(rank) for rank in range(len(ranks))]).mean(0)
        for _, last in column(ranks, "gossip", ("complete", "plain")):
            torch.testing.assert_close(last, average, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("by_layer", [False, True])
    @pytest.mark.parametrize("name", ["decentralized", "choco", "local", "diloco"])
    def test_tensors_of_every_kind_are_averaged_in_place(
        self, ranks: Ranks, name: str, by_layer: bool
    ) -> None:
        mean = (len(ranks) + 1) / 2
        for rank, result in enumerate(ranks):
            tensors = result["odd_tensors"][f"{name} {by_layer}"]
            for key in ("scalar", "f64", "f16", "bf16", "strided", "statistic"):
                torch.testing.assert_close(
                    tensors[key].double(), torch.full_like(tensors[key].double(), mean)
                )
            assert [tensors[key].dtype for key in ("f64", "f16")] == [torch.float64, torch.float16]
            assert tensors["strided"].is_contiguous(memory_format=torch.channels_last)
            assert tensors["empty"].shape == (0, 3)
            assert torch.equal(tensors["frozen"], torch.full((2,), rank + 1.0))
            assert tensors["counter"] == rank

    def test_large_tensors_travel_in_place_with_the_same_result(self, ranks: Ranks) -> None:
        k = len(ranks)
        degree = min(2, k - 1)
        starts = [result["large_tensors"]["start"] for result in ranks]
        mixing = torch.linalg.matrix_power(ring(k).mixing_matrix, 3)
        for rank, result in enumerate(ranks):
            (alone, alone_bytes, alone_messages), (packed, packed_bytes, packed_messages) = (
                result["large_tensors"][which] for which in ("alone", "packed")
            )
            # Of float32: six large ones and the small one; of float64 and float16 one each.
            assert (alone_messages, packed_messages) == (7 + 2, 1 + 2)
            assert (
                alone_bytes
                == packed_bytes
                == 3 * degree * sum(tensor.nbytes for tensor in alone.values())
            )
            for name, tensor in alone.items():
                assert torch.equal(tensor, packed[name]), name
                stacked = torch.stack([values[name].double() for values in starts])
                expected = torch.tensordot(mixing[rank].double(), stacked, dims=1)
                exact = {torch.float16: 3e-3, torch.float32: 1e-6, torch.float64: 1e-14}[
                    tensor.dtype
                ]
                torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=exact)

    def test_the_distance_to_the_average_and_the_average(self, ranks: Ranks) -> None:
        k = len(ranks)
        x = torch.stack([before for _, before in column(ranks, "consensus", "before")])
        expected = (x - x.mean(0)).square().sum().div(k).sqrt().item()
        for result in ranks:
            assert result["consensus"]["before"][0] == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(result["consensus"]["after"], x.mean(0), rtol=0, atol=1e-14)
            assert torch.equal(result["consensus"]["buffers"], torch.full((2,), (k - 1) / 2))
            assert result["consensus"]["distance of equal weights"] < 1e-15


def shared_random_k(world_size: int, ratio: float, seed: int) -> Callable[[Tensor], Tensor]:
    """Random-k whose coordinates are drawn once a round and are the same for all workers, called in
    turn."""
    generator, calls = torch.Generator().manual_seed(seed), 0
    kept = torch.empty(0)

    def compress(x: Tensor) -> Tensor:
        nonlocal calls, kept
        if calls % world_size == 0:
            kept = draw_coordinates(x.numel(), round(ratio * x.numel()), generator)
        calls += 1
        mask = torch.zeros(x.numel(), dtype=x.dtype).index_fill_(0, kept, 1)
        return x * mask.view_as(x)

    return compress


class TestChocoSGD:
    @pytest.mark.parametrize("compression", COMPRESSIONS)
    @pytest.mark.parametrize("name", ["ring", "star"])
    def test_is_the_reference(self, ranks: Ranks, name: str, compression: str) -> None:
        graph, options = topologies(len(ranks))[name], COMPRESSIONS[compression]
        compress = {
            "top_k": lambda x: top_k(x, options["ratio"]),
            "random_k": shared_random_k(len(ranks), 0.2, 5),
            "sign": scaled_sign,
            "identity": lambda x: x,
        }[compression]
        W = mixing_matrix([graph.neighbours(rank) for rank in range(len(ranks))])
        expected = choco_sgd(
            [start() for _ in ranks], gradient, W, compress, 0.1, options["gamma"], STEPS
        )
        assert_all_close(
            [history[-1] for history in column(ranks, "choco", (name, compression))],
            expected,
            1e-12,
        )

    def test_uncompressed_with_gamma_one_is_decentralized_sgd(self, ranks: Ranks) -> None:
        for name in ("ring", "star"):
            for result in ranks:
                plain = result["decentralized"][name, False]
                assert_all_close(result["choco"][name, "identity"], plain, 1e-12)

    @pytest.mark.parametrize("compression", COMPRESSIONS)
    def test_without_gradients_workers_agree_on_the_average_at_a_linear_rate(
        self, ranks: Ranks, compression: str
    ) -> None:
        average = torch.stack([target(rank) for rank in range(len(ranks))]).mean(0)
        distances, _ = ranks[0]["gossip"]["ring", compression]
        first, middle, last = distances  # 50 rounds apart
        assert middle < first
        assert last <= max(0.6 * middle, 1e-13)
        lasts = [x for _, x in column(ranks, "gossip", ("ring", compression))]
        torch.testing.assert_close(torch.stack(lasts).mean(0), average, rtol=0, atol=1e-13)
        for x in lasts:
            assert (x - average).norm() <= last * len(ranks) ** 0.5 * (1 + 1e-9) + 1e-12

    def test_sums_without_the_part_of_the_neighbors_are_not_saved(self, ranks: Ranks) -> None:
        for result in ranks:
            state = result["interrupted"]
            assert (state["copies"], state["sums"], state["origin"]["calls"]) == ({}, {}, 0)

    @pytest.mark.parametrize("count", [1, 7, 8, 1001])
    def test_compressions_are_contractions(self, count: int) -> None:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        kept = max(1, round(0.1 * count))
        for compression, delta in (
            (TopK(0.1), kept / count),
            (ScaledSign(), float(x.abs().sum() ** 2 / (count * x.square().sum()))),
        ):
            error = x.clone()
            compression.add_to(error, compression.compress(x), -1.0)
            assert error.square().sum() <= (1 - delta) * x.square().sum() * (1 + 1e-9) + 1e-15

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("compression", [TopK(0.1), ScaledSign(), Identity(), RandomK(0.1)])
    def test_a_difference_is_compressed_like_its_values(
        self, compression: Compression, dtype: torch.dtype
    ) -> None:
        generator, kept = torch.Generator().manual_seed(1), KeptMemory()
        before = compression.state_dict()
        for count in (300_001, 100):
            x, y = (
                torch.randn(count, generator=generator).to(dtype),
                torch.randn(count, generator=generator),
            )
            fused = compression.compress_difference(x, y, kept)
            compression.compress_difference(
                y.to(dtype), y, kept
            )  # does not overwrite the first result
            compression.load_state_dict(before)
            plain = compression.compress((x - y).to(dtype))
            compression.load_state_dict(before)
            assert len(fused.sent) == len(plain.sent)
            for a, b in zip(fused.sent, plain.sent, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)

    def test_a_tensor_whose_positions_do_not_fit_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"fewer than 2\*\*31 numbers, not 2147483648: split it"
        ):
            TopK(0.1).compress(torch.empty(2**31, device="meta"))

    def test_random_entries_shrink_the_error_on_average(self) -> None:
        x, compression, errors = torch.ones(50, dtype=torch.float64), RandomK(0.2), []
        kept = torch.zeros(50, dtype=torch.float64)
        for _ in range(400):
            error = x.clone()
            compression.add_to(error, compression.compress(x), -1.0)
            errors.append(error.square().sum().item())
            kept += 1 - error
        assert errors == [pytest.approx(40.0)] * 400
        assert 40 < kept.min() <= kept.max() < 130  # 80 times expected, with a deviation of 8

    def test_packed_signs_are_scaled_signs(self) -> None:
        x = torch.tensor([0.5, -1.5, 0.0, 2.0, -1.0, 1.0, -3.0, 0.0, -1.0])
        y = torch.zeros(9)
        ScaledSign().add_to(y, ScaledSign().compress(x), 2.0)
        torch.testing.assert_close(y, 2 * scaled_sign(x))


class TestPeriodic:
    @pytest.mark.parametrize("by_layer", [False, True])
    @pytest.mark.parametrize("period", [1, 4])
    def test_local_sgd_is_the_reference(self, ranks: Ranks, period: int, by_layer: bool) -> None:
        expected = local_sgd([start() for _ in ranks], gradient, eta=0.1, H=period, steps=STEPS)
        actual = [history[-1] for history in column(ranks, "local", (period, by_layer))]
        assert_all_close(actual, expected, 1e-12)

    def test_averages_of_every_step_are_averaged_sgd(self, ranks: Ranks) -> None:
        for result in ranks:
            assert_same_bits(result["local"][1, False], result["local"]["averaged every step"])

    @pytest.mark.parametrize("key", [(4, False), (4, True), ("diloco is local", 4, False)])
    def test_workers_have_the_same_bits_after_a_synchronisation_only(
        self, ranks: Ranks, key: Any
    ) -> None:
        histories = column(ranks, "local", key)
        for step in range(STEPS):
            same = all(torch.equal(history[step], histories[0][step]) for history in histories)
            assert same == ((step + 1) % 4 == 0)

    @pytest.mark.parametrize("by_layer", [False, True])
    def test_diloco_is_the_reference(self, ranks: Ranks, by_layer: bool) -> None:
        expected = diloco(start(), gradient, k=len(ranks), H=5, T=STEPS // 5, lr=0.05)
        for history in column(ranks, "local", ("diloco", by_layer)):
            torch.testing.assert_close(history[-1], expected, rtol=0, atol=1e-12)
            assert torch.equal(history[-1], ranks[0]["local"]["diloco", by_layer][-1])

    @pytest.mark.parametrize("by_layer", [False, True])
    @pytest.mark.parametrize("period", [1, 4])
    def test_diloco_with_a_full_outer_step_is_local_sgd(
        self, ranks: Ranks, period: int, by_layer: bool
    ) -> None:
        for result in ranks:
            plain = result["local"][period, by_layer]
            assert_all_close(result["local"]["diloco is local", period, by_layer], plain, 1e-12)

    def test_without_a_start_the_first_synchronisation_is_an_average(self, ranks: Ranks) -> None:
        histories = column(ranks, "local", "composed")
        own = [torch.nn.Parameter(start()) for _ in ranks]
        for rank, x in enumerate(own):
            inside = torch.optim.AdamW([x], lr=0.05)
            for step in range(5):
                x.grad = gradient(rank, x.detach(), step)
                inside.step()
        average = torch.stack([x.detach() for x in own]).mean(0)
        for history in histories:
            torch.testing.assert_close(history[4], average, rtol=0, atol=1e-12)
            assert torch.equal(history[9], histories[0][9])
            assert not torch.equal(history[9], history[4])


@pytest.mark.parametrize("name", workers.RESUMED)
def test_resuming_in_the_middle_of_a_period_is_bit_identical(ranks: Ranks, name: str) -> None:
    for through, resumed, copied in column(ranks, "resume", name):
        assert_same_bits(through, resumed)
        assert_same_bits(through, copied)


@pytest.mark.parametrize("name", ["decentralized", "choco", "local", "diloco"])
def test_parameters_that_come_later_are_averaged_too(ranks: Ranks, name: str) -> None:
    """Two steps move worker r by -r; then they only average."""
    _, lasts = zip(*column(ranks, "added_later", name), strict=True)
    x = torch.stack(lasts)
    if name == "diloco":  # AdamW takes steps of other lengths
        assert_same_bits([*lasts], [lasts[0]] * len(lasts))
        assert lasts[0].abs().min() > 0.1
    else:
        torch.testing.assert_close(
            x.mean(0), torch.full((4,), -(len(ranks) - 1) / 2), rtol=0, atol=1e-6
        )
        assert (x - x.mean(0)).abs().max() < {"decentralized": 1e-3, "choco": 1.1, "local": 1e-6}[
            name
        ]


@pytest.mark.parametrize(("first_steps", "equal_after"), [(3, [3, 6, 9]), (1, [1, 3, 6, 9])])
def test_a_layer_that_is_unfrozen_is_synchronized_with_the_others(
    ranks: Ranks, first_steps: int, equal_after: list[int]
) -> None:
    """In the middle of a period, too."""
    histories = column(ranks, "unfrozen", ("local", first_steps))
    equal = [
        step + 1
        for step in range(9)
        if all(torch.equal(h[step], histories[0][step]) for h in histories)
    ]
    assert equal == sorted({*range(1, first_steps + 1), *equal_after})
    if first_steps == 3:
        for history in column(ranks, "unfrozen", ("diloco", 3)):
            assert torch.equal(history[8], column(ranks, "unfrozen", ("diloco", 3))[0][8])


class TestBytes:
    def test_plain_messages_are_the_weights_times_the_degree(self, ranks: Ranks) -> None:
        graph = topologies(len(ranks))["star"]
        for rank, result in enumerate(ranks):
            steps, bytes_sent, ratio = result["bytes_and_messages"]["decentralized"]
            size_bytes = 4 * (30 + 7 + 1) + 4 * (4 + 4)  # parameters and buffers
            degree = len(graph.neighbours(rank))
            assert [step for step, _ in steps] == [degree * size_bytes] * 7
            assert bytes_sent == 7 * degree * size_bytes
            assert ratio == 1
            assert [calls["all_gather"] for _, calls in steps] == [1] + [0] * 6
            assert [calls["batch_isend_irecv"] for _, calls in steps] == [1] * 7
            assert [calls["all_reduce"] for _, calls in steps] == [0] * 7

    @pytest.mark.parametrize("name", ["local", "diloco"])
    def test_steps_between_synchronisations_send_nothing(self, ranks: Ranks, name: str) -> None:
        for result in ranks:
            steps, _, _ = result["bytes_and_messages"][name]
            size_bytes = 4 * (30 + 7 + 1) + 4 * (4 + 4)
            assert [step for step, _ in steps] == [0, 0, size_bytes, 0, 0, size_bytes, 0]
            assert [sum(calls.values()) for _, calls in steps] == [0, 0, 1, 0, 0, 1, 0]

    @pytest.mark.parametrize(
        ("name", "size_bytes"),
        [
            ("top_k", (6 + 1 + 1) * (4 + 4)),
            ("random_k", (6 + 1 + 1) * 4),
            ("sign", (4 + 1 + 1) + 3 * 4),
            ("identity", 38 * 4),
        ],
    )
    def test_compressed_messages_are_as_small_as_the_formula_says(
        self, ranks: Ranks, name: str, size_bytes: int
    ) -> None:
        graph = topologies(len(ranks))["star"]
        for rank, result in enumerate(ranks):
            steps, _, ratio = result["bytes_and_messages"][name]
            assert [step for step, _ in steps] == [
                len(graph.neighbours(rank)) * (size_bytes + 4 * 8)
            ] * 7
            assert ratio == pytest.approx(38 * 4 / size_bytes)
            # One batch for the differences of the weights, and one for the buffers.
            assert all(
                calls["batch_isend_irecv"] == 2 and calls["all_reduce"] == 0 for _, calls in steps
            )


MESSAGES = {
    "one-sided pair": r"rank 0 has rank 1 as a neighbor, but not the reverse: .*the edge \(0, 1\)",
    "alone": r"cannot be reached from rank 0 over the edges",
    "twice": r"rank must be left out, not \d, because the aggregation has its own: write it in",
    "missing": r"neighbors is missing: give the ranks that this worker averages with, or topology=",
    "itself": r"neighbors has \[\d\]: rank \d's neighbors must be other ranks from 0 to \d",
    "outside": r"neighbors has \[\d\]: rank \d's neighbors must be other ranks from 0 to \d",
    "rank": r"rank must be \d, the rank of this process among \d, not \d",
    "topology": r"topology is for \d workers, but there are \d",
    "both": r"neighbors and topology are both given",
    "op": r"op must be 'avg_world' .*, not 'sum'",
    "average": r"average_world must be True, not False",
}


class TestRefusals:
    @pytest.mark.parametrize("case", MESSAGES)
    def test_every_worker_hears_what_is_wrong(self, ranks: Ranks, case: str) -> None:
        for result in ranks:
            assert re.search(MESSAGES[case], result["refusals"][case])

    def test_several_one_sided_edges_are_all_named_to_all(self, ranks: Ranks) -> None:
        if len(ranks) == 4:
            for text in column(ranks, "refusals", "one-sided"):
                assert "the edge (0, 1); so for [[2, 3]]" in text
            for text in column(ranks, "refusals", "apart"):
                assert "ranks [2, 3] cannot be reached from rank 0" in text


@pytest.mark.parametrize("name", ["ring", "choco", "local", "diloco"])
def test_the_digits_are_learnt_as_well_as_by_sgd(ranks: Ranks, name: str) -> None:
    if len(ranks) == 4:
        accuracy = ranks[0]["digits"]
        assert accuracy["sgd"] > 94
        assert accuracy[name] > accuracy["sgd"] - 2
