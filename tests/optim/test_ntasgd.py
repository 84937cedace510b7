"""Averaged SGD and what triggers it: against plain means, after a resume, and on several
workers."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.lr_scheduler.pytorch.lr import LRLinearWarmUp
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.optim.pytorch import (
    NTASGD,
    AveragedSGD,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
    scaled_rate,
)
from tests.helpers.ranks import run_ranks


def make_model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator)]


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[list[Tensor]]:
    """Step along fixed gradients, with a rate that differs from step to step; the weights after
    each."""
    seen = []
    for step in steps:
        for p, gradient in zip(model.parameters(), gradients(step), strict=True):
            p.grad = gradient
        with scaled_rate(optimizer, 1 + step % 3):
            optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"fused": True}])
def test_averaged_sgd_walks_like_sgd_and_averages_all_on_the_way(options: dict[str, Any]) -> None:
    model, plain = make_model(), make_model()
    optimizer = AveragedSGD(model.parameters(), lr=0.1, **options)
    start = [p.detach().clone() for p in model.parameters()]
    seen = take_steps(model, optimizer, range(7))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            seen[-1],
            take_steps(plain, SGD(plain.parameters(), lr=0.1, **options), range(7))[-1],
            strict=True,
        )
    )
    for i, p in enumerate(model.parameters()):
        mean = torch.stack([start[i], *(weights[i] for weights in seen)]).double().mean(0)
        torch.testing.assert_close(
            optimizer.state[p]["average"].double(), mean, rtol=1e-5, atol=1e-6
        )
        assert optimizer.state[p]["averaged"] == 8


def test_torchs_own_asgd_follows_a_changing_rate_one_step_late() -> None:
    """The reason for a class of our own; if this fails, torch has mended it."""
    model, plain = make_model(), make_model()
    late = take_steps(model, ASGD(model.parameters(), lr=0.1, lambd=0, t0=0), range(3))
    right = take_steps(plain, SGD(plain.parameters(), lr=0.1), range(3))
    assert not torch.allclose(late[-1][0], right[-1][0])


def test_a_closure_is_evaluated_once_and_frozen_parameters_stay_out() -> None:
    model = make_model()
    model.bias.requires_grad_(False)
    optimizer = AveragedSGD(model.parameters(), lr=0.1)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1
    assert set(optimizer.state) == {model.weight}


@pytest.mark.parametrize("late", [False, True])
def test_a_step_without_a_gradient_counts_for_the_average(late: bool) -> None:
    """The average is over the weights after every step, also those in which a parameter stayed as
    it was."""
    model, seen = make_model(), []
    optimizer = AveragedSGD(model.parameters(), lr=0.1)
    seen.append([p.detach().clone() for p in model.parameters()])
    for step in range(6):
        model.weight.grad, model.bias.grad = gradients(step)
        if step < 2 if late else step in (1, 2, 5):
            model.bias.grad = None
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        mean = torch.stack([weights[i] for weights in seen]).double().mean(0)
        torch.testing.assert_close(
            optimizer.state[p]["average"].double(), mean, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("plain_too", [False, True])
def test_hooks_run_once(plain_too: bool) -> None:
    model = make_model()
    if plain_too:
        SGD(model.parameters(), lr=0.1)
    optimizer, calls = AveragedSGD(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *others: calls.append("before"))
    optimizer.register_step_post_hook(lambda *others: calls.append("after"))
    take_steps(model, optimizer, range(2))
    assert calls == ["before", "after"] * 2


def algorithm_1(values: list[float], n: int) -> int | None:
    """The check at which algorithm 1 of arXiv 1708.02182 starts to average, word by word; None for
    never."""
    logs: list[float] = []
    for t, v in enumerate(values):
        if t > n and v > min(logs[: t - n]):
            return t
        logs.append(v)
    return None


def patience_runs_out(values: list[float], patience: int) -> int | None:
    """The check at which the best value is as old as the patience."""
    for t in range(len(values)):
        seen = values[: t + 1]
        if t - seen.index(min(seen)) >= patience:
            return t
    return None


def when_it_averages(values: list[float], stop: int | None = None, **rule: int) -> int | None:
    """The check at which NTASGD starts to average; with ``stop``, another object goes on from
    there."""
    trigger = NTASGD(CentralizedSGD(model=nn.Linear(1, 1), lr=1.0), **rule)
    for t, value in enumerate(values):
        if t == stop:
            state = copy.deepcopy(trigger.state_dict())
            trigger = NTASGD(CentralizedSGD(model=nn.Linear(1, 1), lr=1.0), **rule)
            trigger.load_state_dict(state)
        if trigger.check(value):
            return t
    return None


def noisy_curves(count: int) -> list[list[float]]:
    """Perplexities that decay to 65."""
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(count, 160, generator=generator, dtype=torch.float64)
    decay = 65 + 100 * torch.exp(-torch.arange(160, dtype=torch.float64) / 20)
    return (decay + noise).tolist()


@pytest.mark.parametrize(
    ("values", "n", "expected"),
    [
        ([90.0, 80, 81, 80.5, 82], 2, 4),
        ([90.0, 80, 85, 79, 84, 78, 83, 77, 86, 76], 2, 4),
        ([80.0] * 6, 2, None),
        ([100.0, 80, 81, 81, 81, 81, 81, 81, 81], 5, 7),
        ([100.0, 90, 80, 79, 85, 85, 78, 80.5, 80.5, 80.4, 80.3, 80.2, 80.1], 5, 8),
        ([90.0, 80, 79, math.nan, 78], 2, 3),
        ([math.nan, math.nan, 79, 78, 77, 78, 80], 2, 6),
    ],
)
def test_the_default_trigger_is_that_of_the_paper(
    values: list[float], n: int, expected: int | None
) -> None:
    assert when_it_averages(values, interval=n) == expected
    assert all(
        when_it_averages(values, stop, interval=n) == expected for stop in range(1, len(values))
    )


def test_the_trigger_agrees_with_algorithm_1_on_noisy_curves_also_when_resumed() -> None:
    found = []
    for i, values in enumerate(noisy_curves(100)):
        n = 1 + i % 7
        expected = algorithm_1(values, n)
        assert when_it_averages(values, interval=n) == expected
        assert when_it_averages(values, stop=(expected or 100) - i % 4, interval=n) == expected
        found.append(expected == patience_runs_out(values, n))
    assert sum(found) < 30, "the curves do not tell the two rules apart"
    assert when_it_averages(values) == algorithm_1(values, 5), "the default interval is 5"


def test_patience_is_the_other_rule() -> None:
    for i, values in enumerate(noisy_curves(20)):
        assert when_it_averages(values, patience=3 + i % 3) == patience_runs_out(values, 3 + i % 3)


def test_it_averages_when_the_best_is_as_old_as_the_patience() -> None:
    trigger = NTASGD(CentralizedSGD(model=make_model(), lr=1.0), patience=3)
    values = [9.0, 8.0, 8.0, 8.5, 7.9, math.nan, 8.0, 7.9, 7.0]
    assert [trigger.check(value) for value in values] == [False] * 7 + [True, False]
    assert (trigger.best, trigger.checks_since_best) == (7.0, 0)
    assert isinstance(trigger.optimizer.optimizer, AveragedSGD)


def test_the_swap_keeps_groups_rates_and_the_scheduler() -> None:
    model = make_model()
    optimizer = GenericCentralizedOptimizer(
        None,
        model,
        optimizer=SGD(
            [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "lr": 7.0}],
            lr=3.0,
        ),
    )
    scheduler = LRLinearWarmUp(optimizer, init_lr=1.0, scaled_lr=2.0, warmup_duration=2)
    trigger = NTASGD(optimizer, patience=1)
    trigger.check(1.0)
    optimizer.step()
    scheduler.step()
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert trigger.check(1.0)
    assert [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ] == before
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight], [model.bias]]
    scheduler.step()
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [2.0, 2.0]


def test_averages_are_swapped_in_and_out_bit_by_bit() -> None:
    model = make_model()
    trigger = NTASGD(CentralizedSGD(model=model, lr=0.1), patience=1)
    with trigger.averaged_weights():  # no averages yet
        pass
    trigger.check(1.0)
    trigger.check(1.0)
    with trigger.averaged_weights():
        pass
    take_steps(model, trigger.optimizer, range(3))
    own = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    averages = [trigger.optimizer.state[p]["average"].clone() for p in model.parameters()]
    with pytest.raises(KeyError), trigger.averaged_weights():
        assert all(
            torch.equal(p, average) for p, average in zip(model.parameters(), averages, strict=True)
        )
        assert not torch.equal(model.weight, own[0])
        raise KeyError
    assert all(torch.equal(p, weight) for p, weight in zip(model.parameters(), own, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_resumed_run_goes_on_exactly(stop: int, optimizer_first: bool) -> None:
    values = [5.0, 4.0, 4.5, 4.2, 4.1, 3.0, 3.5, 3.6, 3.7, 3.8]  # averages after 4 checks

    def make() -> tuple[nn.Linear, Any, NTASGD]:
        model = make_model()
        inside = partial(SGD, lr=0.1, weight_decay=1e-3)
        optimizer = CustomCentralizedOptimizer(
            model, None, inside, grad_clip=0.25, average_world=True
        )
        return model, optimizer, NTASGD(optimizer, patience=2)

    def epochs(model: nn.Linear, optimizer: Any, trigger: NTASGD, numbers: range) -> None:
        for epoch in numbers:
            take_steps(model, optimizer, range(4 * epoch, 4 * epoch + 4))
            trigger.check(values[epoch])

    whole = make()
    epochs(*whole, range(10))
    first = make()
    epochs(*first, range(stop))
    model_state, optimizer_state, trigger_state = (
        copy.deepcopy(part.state_dict()) for part in first
    )
    second = make()
    second[0].load_state_dict(model_state)
    if optimizer_first:
        second[1].load_state_dict(optimizer_state)
    second[2].load_state_dict(trigger_state)
    if not optimizer_first:
        second[1].load_state_dict(optimizer_state)
    epochs(*second, range(stop, 10))
    assert whole[2].is_averaging
    assert second[2].state_dict() == whole[2].state_dict()
    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(whole[1].state[p]["average"], second[1].state[q]["average"])
        assert whole[1].state[p]["averaged"] == second[1].state[q]["averaged"]


def test_state_fits_a_checkpoint(tmp_path: Any) -> None:
    model = make_model()
    trigger = NTASGD(CentralizedSGD(model=model, lr=0.1), interval=1)
    for value in (1.0, 1.5, 2.0):
        trigger.check(value)
    take_steps(model, trigger.optimizer, range(2))
    torch.save(
        {"optimizer": trigger.optimizer.state_dict(), "trigger": trigger.state_dict()},
        tmp_path / "state",
    )
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert loaded["trigger"] == {
        "best": 1.0,
        "checks_since_best": 2,
        "recent": [2.0],
        "best_before_recent": 1.0,
        "is_averaging": True,
    }
    assert loaded["optimizer"]["state"][0]["averaged"] == 3


def test_bad_arguments_are_named() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="CentralizedSGD has"):
        NTASGD(SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="around Adam"):
        NTASGD(GenericCentralizedOptimizer(None, model, optimizer=Adam(model.parameters())))
    with pytest.raises(ValueError, match="patience must be at least 1, not 0"):
        NTASGD(CentralizedSGD(model=model, lr=1.0), patience=0)
    with pytest.raises(TypeError, match=r"interval must be an integer, not 2\.5"):
        NTASGD(CentralizedSGD(model=model, lr=1.0), interval=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interval and patience are both given"):
        NTASGD(CentralizedSGD(model=model, lr=1.0), 5, patience=5)
    averaging = NTASGD(CentralizedSGD(model=model, lr=1.0), patience=1)
    early = averaging.state_dict()
    averaging.check(1.0)
    averaging.check(1.0)
    with pytest.raises(ValueError, match="create the optimizer and NTASGD again"):
        averaging.load_state_dict(early)


def test_scaled_rate_is_given_back_after_an_exception() -> None:
    optimizer = SGD(
        [{"params": [torch.zeros(1)], "lr": 2.0}, {"params": [torch.zeros(1)], "lr": 0.1}], lr=1.0
    )
    with pytest.raises(KeyError), scaled_rate(optimizer, 0.5):
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.05]
        raise KeyError
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.1]


def language_model_run(
    rank: int, world_size: int, sequences: int = 4, overlap: bool = False
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], bool]:
    """A language model in 10 batches with clipping, changing lengths and the switch; this worker's
    share of it."""
    torch.manual_seed(11)
    model = LSTMLanguageModel(19, 6, 8, 2, 0, 0, 0, 0, wdrop=0, tie_weights=True)
    optimizer = CustomCentralizedOptimizer(
        model,
        None,
        partial(SGD, lr=2.0, weight_decay=1e-4),
        grad_clip=0.25,
        average_world=True,
        aggregation=AllReduceAggregation(overlap=overlap),
    )
    trigger = NTASGD(optimizer, patience=2)
    words = torch.randint(19, (61, sequences), generator=torch.Generator().manual_seed(1))
    share = sequences // world_size
    words = words[:, rank * share : (rank + 1) * share]
    hidden, losses = model.init_hidden(share), []
    for i, (start, end) in enumerate(
        itertools.pairwise([0, 7, 12, 19, 22, 30, 36, 43, 47, 55, 60])
    ):
        optimizer.zero_grad()
        hidden = [(h.detach(), c.detach()) for h, c in hidden]
        scores, hidden = model(words[start:end], hidden)
        loss = F.cross_entropy(scores, words[start + 1 : end + 1].flatten())
        loss.backward()
        with scaled_rate(optimizer, (end - start) / 7):
            optimizer.step()
        losses.append(loss.item())
        trigger.check([3.0, 2.9, 2.95, 2.95][min(i, 3)])
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with trigger.averaged_weights():
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, own, averages, trigger.is_averaging


def both_runs(rank: int, world_size: int) -> list[Any]:
    return [language_model_run(rank, world_size, overlap=overlap) for overlap in (False, True)]


def test_two_workers_are_one_worker_on_the_joined_batch() -> None:
    losses, own, averages, is_averaging = language_model_run(0, 1)
    assert is_averaging
    assert any(not torch.equal(own[name], averages[name]) for name in own)
    for of_rank_0, of_rank_1 in zip(*run_ranks(2, both_runs), strict=True):
        means = [(a + b) / 2 for a, b in zip(of_rank_0[0], of_rank_1[0], strict=True)]
        assert means == pytest.approx(losses, rel=1e-5)
        for name in own:
            assert torch.equal(of_rank_0[1][name], of_rank_1[1][name])
            assert torch.equal(of_rank_0[2][name], of_rank_1[2][name])
            torch.testing.assert_close(of_rank_0[1][name], own[name], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(of_rank_0[2][name], averages[name], rtol=1e-4, atol=1e-5)
