"""Half-precision training: float32 master weights, the loss scale, and what k workers agree on."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    DistributedGradScaler,
    DynamicLossScaler,
    FP16Optimizer,
)
from tests.contracts.test_optimizers import SCHEDULERS
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim import fp_workers
from tests.optim.fp_workers import half_line, loss_of, make_adamw, sgd
from tests.optim.workers import make_batches, make_net
from tests.references import fp16_optimizer as reference

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=some([2, 4]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, fp_workers.run_all)


class TestSeveralWorkers:
    def test_shares_give_the_bits_of_one_worker_where_numbers_are_exact(self, ranks: Ranks) -> None:
        for result in ranks:
            assert torch.equal(result["exact_shares"], fp_workers.exact_alone())

    def test_accumulated_passes_are_sent_once(self, ranks: Ranks) -> None:
        for result in ranks:
            master, sizes_between = result["exact_in_two_passes"]
            assert torch.equal(master, fp_workers.exact_alone())
            assert sizes_between == []

    def test_shares_give_what_one_worker_gives_on_the_whole_batch(self, ranks: Ranks) -> None:
        torch.testing.assert_close(
            ranks[0]["adamw_on_shares"][-1], fp_workers.adamw_alone(), rtol=0, atol=5e-3
        )

    def test_all_workers_have_the_same_bits_after_each_step(self, ranks: Ranks) -> None:
        for result in ranks[1:]:
            for ours, theirs in zip(
                ranks[0]["adamw_on_shares"], result["adamw_on_shares"], strict=True
            ):
                assert torch.equal(ours, theirs)

    @pytest.mark.parametrize(
        "name", ["inf", "nan by layer", "nan divided before", "seen by one only"]
    )
    def test_all_skip_when_one_worker_overflows(self, ranks: Ranks, name: str) -> None:
        for result in ranks:
            seen = result["overflow_on_one"][name]
            assert seen["updated"] == [False, True]
            assert seen["scales"] == [4.0, 4.0]
            # the second gradient is 4 everywhere, the scale then 4 and the rate 0.5; without a sum
            # nothing is averaged
            torch.testing.assert_close(
                seen["weight"], torch.tensor([[0.5, 1.5, 3.5]]).half(), rtol=0, atol=0
            )

    def test_the_minimum_scale_is_an_error_on_all_workers(self, ranks: Ranks) -> None:
        for result in ranks:
            first, second = result["minimum_scale"]
            assert first == "False"
            assert "the loss scale fell to 1, which is not above the minimum scale 1" in second

    def test_denominators_of_both_translation_tasks(self, ranks: Ranks) -> None:
        k, unit = len(ranks), torch.tensor([1.0, 2.0, 4.0])
        ones, squares = sum(range(1, k + 1)), sum(r * r for r in range(1, k + 1))
        for result in ranks:
            seen = result["denominators"]
            # losses are means: each of the 2 batches of worker r has the gradient (r + 1) (1, 2, 4)
            torch.testing.assert_close(seen["mean, averaged over the world"], 2 * ones / k * unit)
            torch.testing.assert_close(seen["4a"], ones / k * unit, rtol=1e-3, atol=0)
            torch.testing.assert_close(
                seen["4a, world and multiplier"], ones / k * unit, rtol=1e-3, atol=0
            )
            # losses are sums over 3 (r + 1) tokens with the gradient (r + 1) (1, 2, 4), to be
            # divided by all tokens
            for name in ("4b", "4b, tensor"):
                torch.testing.assert_close(seen[name], squares / ones * unit, rtol=2e-3, atol=0)

    def test_dividing_before_keeps_the_sum_in_range(self, ranks: Ranks) -> None:
        for result in ranks:
            assert result["ranges"]["divide_before=False"][0] is False
            assert result["ranges"]["divide_before=True"] == [True, [40.0] * 3]

    def test_mixed_dtypes_frozen_unused_and_shared_parameters(self, ranks: Ranks) -> None:
        first = ranks[0]["mixed"]
        before, after = first["before"], first["after"]
        for name in ("frozen.weight", "frozen.bias", "unused"):
            assert torch.equal(before[name], after[name])
        for name in ("inside.weight", "norm.weight", "norm.bias", "scalar"):
            assert not torch.equal(before[name], after[name])
        assert torch.equal(after["only_on_rank_0"], torch.full((2, 2), 0.5).half())
        assert {name: tensor.dtype for name, tensor in after.items()} == {
            n: t.dtype for n, t in before.items()
        }
        trained = [tensor for name, tensor in after.items() if not name.startswith("frozen")]
        assert first["master"].numel() == sum(tensor.numel() for tensor in trained) == 22
        parts = first["master"].split([tensor.numel() for tensor in trained])
        assert all(
            torch.equal(p.view(t.shape).to(t.dtype), t) for p, t in zip(parts, trained, strict=True)
        )
        for result in ranks:
            seen = result["mixed"]
            assert seen["updated"]
            assert torch.equal(seen["master"], first["master"])
            assert [name for name, is_there in seen["gradients"].items() if not is_there] == [
                "unused",
                "frozen.weight",
                "frozen.bias",
            ]

    def test_a_step_sends_one_message_a_dtype_and_four_bytes_to_agree(self, ranks: Ranks) -> None:
        for result in ranks:
            # 16 float16 and 6 float32 numbers, and for each parameter a flag that says who has a
            # gradient
            assert result["mixed"]["sizes"] == [2 * (16 + 4), 4 * (6 + 2), 4]
            assert result["mixed"]["bytes_sent"] == 76

    def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(self, ranks: Ranks) -> None:
        for result in ranks:
            (*through, scaler), (*resumed, resumed_scaler) = result["resume"]
            assert scaler == resumed_scaler
            assert scaler["loss_scale"] != 256
            assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))

    def test_the_readable_reference_agrees(self, ranks: Ranks) -> None:
        expected, scales = reference.train(
            torch.tensor([1.0, 2.0, 4.0]),
            fp_workers.reference_gradient,
            len(ranks),
            40,
            0.125,
            2.0**10,
            2.0,
            3,
        )
        changes = [after / before for before, after in itertools.pairwise(scales)]
        assert {0.5, 1.0, 2.0} == set(changes), "the scale must have met an overflow and grown"
        for result in ranks:
            actual, actual_scales = result["like_the_reference"]
            assert actual_scales == scales
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=0 if len(ranks) == 2 else 1e-3
            )


class TestGradScaler:
    """torch.amp.GradScaler on the centralized optimizers, whose steps are collective."""

    @pytest.mark.parametrize(
        "name",
        [
            "torch",
            "torch, unscaled",
            "torch, weights",
            "torch, sparsified",
            "ours",
            "ours, unscaled",
        ],
    )
    def test_an_overflow_on_one_worker_skips_the_step_of_all(self, ranks: Ranks, name: str) -> None:
        gradient = (len(ranks) + 1) / 2  # that of worker r is r + 1
        for result in ranks:
            start, skipped, end = result["grad_scalers"][name]["weights"]
            torch.testing.assert_close(start, torch.tensor([[1.0, 2.0, 4.0]]) - 0.5 * gradient)
            assert torch.equal(skipped, start)
            torch.testing.assert_close(end, start - 0.5 * gradient)

    def test_ours_halves_the_scale_of_all(self, ranks: Ranks) -> None:
        for result in ranks:
            assert result["grad_scalers"]["ours"]["scales"] == [16.0, 8.0, 8.0]
            assert result["grad_scalers"]["ours, unscaled"]["scales"] == [16.0, 8.0, 8.0]

    def test_float16_gradients_are_refused(self) -> None:
        model, scaler = half_line(), torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 3).half()).float().mean()).backward()
        with pytest.raises(ValueError, match="train a float16 model with FP16Optimizer"):
            scaler.step(CentralizedSGD(model=model, lr=0.1))

    @pytest.mark.parametrize("make", [torch.amp.GradScaler, DistributedGradScaler])
    def test_alone_it_is_what_torch_does(self, make: type[torch.amp.GradScaler]) -> None:
        def train(
            optimizer_of: Callable[[nn.Module], Optimizer], scaler: torch.amp.GradScaler
        ) -> Tensor:
            model = half_line(dtype=torch.float32)
            optimizer = optimizer_of(model)
            for step in range(6):
                optimizer.zero_grad()
                loss = model(torch.tensor([[1.0, -0.5, 3.0]])).square().sum()
                scaler.scale(loss * (math.nan if step == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            return torch.cat([model.weight.detach().view(-1), torch.tensor([scaler.get_scale()])])

        ours = train(lambda m: CentralizedSGD(model=m, lr=0.01), make("cpu", growth_interval=2))
        theirs = train(
            lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
            torch.amp.GradScaler("cpu", growth_interval=2),
        )
        assert torch.equal(ours, theirs)


class TestDynamicLossScaler:
    def test_defaults(self) -> None:
        scaler = DynamicLossScaler()
        assert (scaler.loss_scale, scaler.scale_factor, scaler.scale_window, scaler.max_scale) == (
            2**15,
            2,
            2000,
            None,
        )

    @pytest.mark.parametrize(
        ("norm", "overflow"),
        [(math.inf, True), (-math.inf, True), (math.nan, True), (0.0, False), (1e38, False)],
    )
    def test_overflow_is_inf_or_nan(self, norm: float, overflow: bool) -> None:
        assert DynamicLossScaler().has_overflow(norm) is overflow
        assert DynamicLossScaler().has_overflow(torch.tensor(norm)) is overflow

    def test_the_window_counts_updates_running_without_an_overflow(self) -> None:
        scaler = DynamicLossScaler(init_scale=16, scale_factor=4, scale_window=3, max_scale=100)
        scales = []
        for overflow in map(int, "0010001000000000"):
            scaler.update_scale(bool(overflow))
            scales.append(scaler.loss_scale)
        assert scales == [16, 16, 4, 4, 4, 16, 4, 4, 4, 16, 16, 16, 64, 64, 64, 100]

    def test_without_a_maximum_the_scale_stays_finite(self) -> None:
        scaler = DynamicLossScaler(init_scale=2.0**1023, scale_window=1)
        scaler.update_scale(False)
        scaler.update_scale(True)
        assert 0 < scaler.loss_scale < math.inf

    def test_the_error_names_the_minimum_scale(self) -> None:
        scaler = DynamicLossScaler(init_scale=1, min_scale=0.25)
        scaler.update_scale(True)
        with pytest.raises(
            FloatingPointError, match=r"fell to 0\.25, which is not above the minimum scale 0\.25"
        ):
            scaler.update_scale(True)

    def test_state_round_trip(self) -> None:
        scaler, other = (
            DynamicLossScaler(scale_window=3),
            DynamicLossScaler(init_scale=1, scale_window=3),
        )
        for overflow in (True, False, False):
            scaler.update_scale(overflow)
        other.load_state_dict(scaler.state_dict())
        for each in (scaler, other):
            each.update_scale(False)
        assert scaler.loss_scale == other.loss_scale == 2.0**15
        with pytest.raises(ValueError, match=r"lacks \['updates_without_overflow'\]"):
            other.load_state_dict({"loss_scale": 1.0})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"init_scale": 0}, "init_scale is 0; it must be finite and positive"),
            ({"init_scale": math.nan}, "init_scale is nan"),
            ({"scale_factor": 0.5}, "scale_factor is 0.5; it must be finite and at least 1"),
            ({"scale_window": 0}, "scale_window must be at least 1, not 0"),
            ({"max_scale": 1024}, "init_scale is 32768, above max_scale 1024"),
            ({"init_scale": 1, "min_scale": 2}, "init_scale is 1, not above min_scale 2"),
        ],
    )
    def test_numbers_out_of_range_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DynamicLossScaler(**options)


def take_steps(model: nn.Module, optimizer: FP16Optimizer, steps: range) -> None:
    for step in steps:
        inputs, targets = make_batches(next(model.parameters()).dtype)[step]
        optimizer.zero_grad()
        optimizer.backward_loss(loss_of(model, inputs, targets))
        optimizer.step()


class TestFP16Optimizer:
    def test_master_weights_are_one_flat_float32_tensor(self) -> None:
        model = make_net(torch.float16)
        optimizer = FP16Optimizer(model, 1)
        master = optimizer.fp32_params
        assert master.dtype == master.grad.dtype == torch.float32
        assert master.shape == master.grad.shape == (sum(p.numel() for p in model.parameters()),)
        assert torch.equal(master, torch.cat([p.float().view(-1) for p in model.parameters()]))
        inside = torch.optim.AdamW(params=[master], lr=0.1)
        optimizer.set_optimizer(inside)
        assert isinstance(optimizer, Optimizer)
        assert optimizer.optimizer is inside
        assert optimizer.param_groups is inside.param_groups
        assert optimizer.state is inside.state

    def test_the_loss_stays_as_it_is(self) -> None:
        model = half_line()
        optimizer = sgd(model, init_scale=64)
        loss = model(torch.ones(1, 3).half()).float().sum()
        optimizer.backward_loss(loss)
        assert loss.item() == 7
        assert torch.equal(model.weight.grad, torch.full((1, 3), 64.0).half())

    def test_updates_too_small_for_half_precision_add_up(self) -> None:
        model = half_line((1.0,))
        optimizer = sgd(model, lr=1e-4)
        for _ in range(20):
            optimizer.zero_grad()
            optimizer.backward_loss(model(torch.ones(1, 1).half()).float().sum())
            assert optimizer.step() is True
        assert model.weight.item() == pytest.approx(0.998, abs=5e-4)
        assert optimizer.fp32_params.item() == pytest.approx(0.998, abs=1e-6)

    def test_gradients_too_small_for_half_precision_arrive(self) -> None:
        def gradient(scale: float) -> float:
            model = half_line((1.0,))
            optimizer = sgd(model, init_scale=scale)
            optimizer.backward_loss(model(torch.ones(1, 1).half()).float().sum() * 2.0**-26)
            optimizer.step()
            return optimizer.fp32_params.grad.item()

        assert gradient(1) == 0
        assert gradient(2.0**14) == 2.0**-26

    def test_accumulated_batches_are_one_big_batch(self) -> None:
        inputs, factors = fp_workers.power_of_two_batch()
        masters = []
        for parts in (1, 2, 4):
            model = half_line()
            optimizer = sgd(model)
            for some_inputs, some_factors in zip(
                inputs.chunk(parts), factors.chunk(parts), strict=True
            ):
                optimizer.backward_loss((model(some_inputs.half()).float() * some_factors).mean())
            assert optimizer.step(multiplier=parts)
            masters.append(optimizer.fp32_params.detach())
        assert torch.equal(masters[0], masters[1])
        assert torch.equal(masters[0], masters[2])

    def test_the_multiplier_divides_after_the_scale(self) -> None:
        for multiplier in (4, torch.tensor(4.0), torch.tensor([4])):
            model = half_line()
            optimizer = sgd(model, average_custom=True)
            optimizer.backward_loss(model(torch.ones(1, 3).half()).float().sum() * 16)
            optimizer.step(multiplier=multiplier, denom=2)
            assert optimizer.fp32_params.grad.tolist() == [2.0, 2.0, 2.0]

    def test_gradients_are_clipped_after_they_were_unscaled(self) -> None:
        model = half_line((1.0, 1.0))
        optimizer = sgd(model, lr=1.0, grad_clip=1.0)
        optimizer.backward_loss((model(torch.tensor([[3.0, 4.0]]).half())).float().sum())
        optimizer.step()
        torch.testing.assert_close(
            optimizer.fp32_params.detach(), torch.tensor([0.4, 0.2]), rtol=0, atol=1e-5
        )
        optimizer.zero_grad()
        optimizer.backward_loss((model(torch.tensor([[0.5, 0.25]]).half())).float().sum())
        optimizer.step()
        torch.testing.assert_close(
            optimizer.fp32_params.detach(), torch.tensor([-0.1, -0.05]), rtol=0, atol=1e-5
        )

    def test_an_overflow_leaves_weights_and_state_alone(self) -> None:
        model = make_net(torch.float16)
        optimizer = make_adamw(model, 1)
        take_steps(model, optimizer, range(2))
        before = copy.deepcopy(
            [optimizer.state_dict()["state"], optimizer.fp32_params, *model.state_dict().values()]
        )
        next(model.parameters()).grad[0, 0] = math.nan
        assert optimizer.step() is False
        after = [
            optimizer.state_dict()["state"],
            optimizer.fp32_params,
            *model.state_dict().values(),
        ]
        assert str(before[0]) == str(after[0])
        assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
        assert optimizer.loss_scaler.loss_scale == 128

    def test_the_minimum_scale_ends_training(self) -> None:
        model = half_line()
        optimizer = sgd(model, init_scale=1024, min_scale=256)
        model.weight.grad = torch.full((1, 3), math.inf).half()
        assert optimizer.step() is False
        model.weight.grad = torch.full((1, 3), math.inf).half()
        with pytest.raises(FloatingPointError, match="minimum scale 256"):
            optimizer.step()

    def test_bfloat16_is_not_scaled(self) -> None:
        model = make_net(torch.bfloat16)
        optimizer = make_adamw(model, 1)
        first = loss_of(model, *make_batches(torch.bfloat16)[0])
        optimizer.backward_loss(first)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        assert torch.equal(
            torch.cat([g.view(-1) for g in gradients]).float(), one_gradient(optimizer)
        )
        take_steps(model, optimizer, range(20))
        assert optimizer.loss_scaler.loss_scale == 1
        next(model.parameters()).grad[0, 0] = math.inf
        assert optimizer.step() is False
        assert optimizer.loss_scaler.loss_scale == 1

    def test_a_float32_model_is_trained_as_by_the_optimizer_alone(self) -> None:
        ours, theirs = make_net(torch.float32), make_net(torch.float32)
        take_steps(ours, sgd(ours, lr=0.1), range(10))
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for inputs, targets in make_batches(torch.float32)[:10]:
            plain.zero_grad()
            loss_of(theirs, inputs, targets).backward()
            plain.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_quadratic_converges_to_its_minimum(self, dtype: torch.dtype) -> None:
        model, target = half_line(dtype=dtype), torch.tensor([[0.5, -1.25, 3.0]], dtype=dtype)
        optimizer = sgd(model, lr=0.2)
        for _ in range(60):
            optimizer.zero_grad()
            optimizer.backward_loss((model.weight - target).float().square().sum() / 2)
            assert optimizer.step()
        torch.testing.assert_close(model.weight.detach(), target)

    @pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
    @pytest.mark.parametrize("on_inside", [False, True])
    def test_every_scheduler_works_on_it_and_on_the_optimizer_inside(
        self, make_scheduler: Callable[[Optimizer], Any], on_inside: bool
    ) -> None:
        model, plain = half_line(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
        optimizer = sgd(model, lr=0.05)
        model.weight.grad = torch.zeros_like(model.weight)
        rates: list[list[float]] = []
        for each in (optimizer, plain):
            scheduler = make_scheduler(
                optimizer.optimizer if on_inside and each is optimizer else each
            )
            rates.append([])
            for _ in range(6):
                each.step()
                scheduler.step(
                    *([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
                )
                rates[-1].append(each.param_groups[0]["lr"])
        assert rates[0] == rates[1]
        assert len(set(rates[0])) > 1

    def test_resuming_is_bit_identical(self) -> None:
        through, first, second = (make_net(torch.float16) for _ in range(3))
        take_steps(through, make_adamw(through, 1), range(12))
        optimizer = make_adamw(first, 1)
        take_steps(first, optimizer, range(7))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed = make_adamw(second, 1)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()
        take_steps(second, resumed, range(7, 12))
        assert all(
            torch.equal(a, b)
            for a, b in zip(through.parameters(), second.parameters(), strict=True)
        )

    def test_a_state_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match="the state has 3 master weights, but the model has 66 trainable ones"
        ):
            make_adamw(make_net(torch.float16), 1).load_state_dict(
                make_adamw(half_line(), 1).state_dict()
            )

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
    )
    def test_copies_go_on_alike_and_apart(self, copied: Callable[[Any], Any]) -> None:
        model = make_net(torch.float16)
        optimizer = make_adamw(model, 1)
        lr_scheduler.StepLR(optimizer, 1)
        take_steps(model, optimizer, range(4))
        other_model, other = copied((model, optimizer))
        before = optimizer.fp32_params.detach().clone()
        take_steps(other_model, other, range(4, 8))
        assert torch.equal(optimizer.fp32_params, before)
        take_steps(model, optimizer, range(4, 8))
        assert torch.equal(optimizer.fp32_params, other.fp32_params)
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.parameters(), other_model.parameters(), strict=True)
        )

    def test_a_closure_is_evaluated_once_with_gradients(self) -> None:
        model, by_hand = half_line(), half_line()
        optimizer, plain, calls = sgd(model), sgd(by_hand), []

        def closure() -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3).half()).float().sum()
            optimizer.backward_loss(loss)
            return loss

        assert optimizer.step(closure) is True
        assert calls == [True]
        plain.backward_loss(by_hand(torch.ones(1, 3).half()).float().sum())
        plain.step()
        assert torch.equal(model.weight, by_hand.weight)

    def test_a_group_beside_the_master_weights_is_unscaled_too(self) -> None:
        model, beside = half_line((1.0,)), nn.Parameter(torch.ones(1))
        optimizer = sgd(model, lr=0.5, init_scale=1024)
        optimizer.add_param_group({"params": [beside], "lr": 0.25})
        optimizer.backward_loss((model.weight.float() + 2 * beside).sum())
        assert optimizer.step()
        assert (model.weight.item(), beside.item()) == (0.5, 0.5)
        optimizer.zero_grad()
        assert model.weight.grad is None
        assert beside.grad is None

    def test_gradients_are_cleared_to_none_or_zero(self) -> None:
        model = half_line()
        optimizer = sgd(model)
        for set_to_none in (False, True):
            optimizer.backward_loss(model(torch.ones(1, 3).half()).float().sum())
            optimizer.zero_grad(set_to_none=set_to_none)
            assert model.weight.grad is None if set_to_none else not model.weight.grad.any()

    def test_weights_changed_by_hand_are_taken_over(self) -> None:
        model = half_line()
        optimizer = sgd(model)
        model.load_state_dict({"weight": torch.tensor([[8.0, 8.0, 8.0]])})
        optimizer.reset_master_weights()
        assert optimizer.fp32_params.tolist() == [8.0, 8.0, 8.0]

    def test_channels_last_weights(self) -> None:
        torch.manual_seed(1)
        plain = nn.Conv2d(2, 3, 2).half()
        other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        inputs = torch.randn(2, 2, 4, 4).half()
        for model in (plain, other):
            optimizer = sgd(model)
            optimizer.backward_loss(model(inputs).float().square().mean())
            optimizer.step()
        assert other.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(plain.weight, other.weight.contiguous(), rtol=0, atol=2e-3)

    def test_a_tracker_hears_of_the_update_only_if_there_was_one(self) -> None:
        class Recorder:
            def __init__(self) -> None:
                self.marks: list[str] = []

            def record_batch_agg(self) -> None:
                self.marks.append("agg")

            def record_batch_opt_step(self) -> None:
                self.marks.append("opt_step")

            def record_communication(
                self, total_s: float, exposed_s: float, size_bytes: int
            ) -> None:
                self.marks.append(f"{size_bytes} bytes")

        model, tracker = half_line(), Recorder()
        optimizer = sgd(model)
        for value in (1.0, math.inf):
            model.weight.grad = torch.full((1, 3), value).half()
            optimizer.step(tracker=tracker)
        assert tracker.marks == [
            "agg",
            "0 bytes",
            "0 bytes",
            "opt_step",
            "agg",
            "0 bytes",
            "0 bytes",
        ]

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (
                lambda: FP16Optimizer([], 1),
                TypeError,
                "fp16_model must be a torch.nn.Module, not list",
            ),
            (
                lambda: FP16Optimizer(nn.ReLU(), 1),
                ValueError,
                "no parameter that requires a gradient",
            ),
            (
                lambda: FP16Optimizer(nn.Linear(1, 1).double(), 1),
                TypeError,
                "'weight' is torch.float64",
            ),
            (
                lambda: FP16Optimizer(half_line(), 2),
                ValueError,
                "world_size is 2, but there is 1 process",
            ),
            (
                lambda: FP16Optimizer(half_line(), 1, grad_clip=0),
                ValueError,
                "grad_clip must be positive",
            ),
            (
                lambda: FP16Optimizer(half_line(), 1, max_scale=2),
                ValueError,
                "init_scale is 1024, above max_scale 2",
            ),
            (
                lambda: FP16Optimizer(half_line(), 1, average_world=True, average_custom=True),
                ValueError,
                "average_world and average_custom are both True",
            ),
            (lambda: FP16Optimizer(half_line(), 1).step(), RuntimeError, "call set_optimizer"),
            (lambda: sgd(half_line()).backward_loss(1.0), TypeError, "loss must be a tensor"),
            (
                lambda: sgd(half_line()).step(multiplier=0),
                ValueError,
                "multiplier must be a positive finite number, not 0",
            ),
            (
                lambda: sgd(half_line()).step(multiplier=torch.ones(2)),
                ValueError,
                r"one element, not shape \(2,\)",
            ),
            (
                lambda: sgd(half_line(), average_custom=True).step(),
                ValueError,
                "denom, which is None",
            ),
            (
                lambda: FP16Optimizer(half_line(), 1).set_optimizer("sgd"),
                TypeError,
                "must be a torch.optim.Optimizer",
            ),
        ],
    )
    def test_mistakes_are_named(
        self, make: Callable[[], Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            make()

    def test_an_optimizer_over_other_weights_is_refused(self) -> None:
        model = half_line()
        optimizer = FP16Optimizer(model, 1)
        with pytest.raises(ValueError, match=r"build it over \[fp_optimizer\.fp32_params\]"):
            optimizer.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"build it over \[fp_optimizer\.fp32_params\]"):
            optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
            optimizer.set_optimizer(torch.optim.LBFGS([optimizer.fp32_params]))


def one_gradient(optimizer: FP16Optimizer) -> Tensor:
    """The unscaled gradient of a step."""
    assert optimizer.step()
    return optimizer.fp32_params.grad.clone()


def accuracy_on_digits(dtype: torch.dtype) -> float:
    """Test accuracy in percent of a small net after 12 epochs over handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order].to(dtype)
    labels = torch.tensor(digits.target)[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).to(dtype)
    optimizer = FP16Optimizer(model, 1, scale_window=50)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.2, momentum=0.9))
    for _ in range(12):
        for some_inputs, some_labels in zip(
            inputs[:1400].split(50), labels[:1400].split(50), strict=True
        ):
            optimizer.zero_grad()
            optimizer.backward_loss(
                nn.functional.cross_entropy(model(some_inputs).float(), some_labels)
            )
            optimizer.step()
    return 100 * (model(inputs[1400:]).argmax(1) == labels[1400:]).float().mean().item()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread: steps this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_half_precision_learns_the_digits_as_well_as_float32(one_thread: None) -> None:
    expected = accuracy_on_digits(torch.float32)
    assert expected > 94
    for dtype in (torch.float16, torch.bfloat16):
        assert accuracy_on_digits(dtype) > expected - 2
