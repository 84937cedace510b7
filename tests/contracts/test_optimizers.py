"""Rules that every optimizer of the library obeys. A new one is a new line in the table."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch import ARCTopKAggregation, StreamingDiLoCoAggregation
from mlbench_core.aggregation.pytorch.centralized import (
    EFSignAggregation,
    PowerAggregation,
    SparsifiedAggregation,
)
from mlbench_core.optim.pytorch import (
    DESLOC,
    EF21,
    LARS,
    QSGD,
    SCAFFOLD,
    SGP,
    SPARTA,
    AveragedSGD,
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
    get_optimizer,
    optimizers,
)
from mlbench_core.optim.pytorch.compression.compressed import CompressedOptimizer
from mlbench_core.optim.pytorch.distributed import OptimizerWrapper

Make = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


MEMBERS: dict[str, Make] = {
    "sgd": lambda model: CentralizedSGD(1, model, lr=0.05),
    "momentum": lambda model: CentralizedSGD(
        1, model, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "sgd by layer": lambda model: CentralizedSGD(1, model, lr=0.05, momentum=0.9, by_layer=True),
    "sgd on weights": lambda model: CentralizedSGD(1, model, lr=0.05, momentum=0.9, agg_grad=False),
    "sgd overlapped": lambda model: CentralizedSGD(1, model, lr=0.05, momentum=0.9, overlap=True),
    "averaged sgd": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=AveragedSGD(model.parameters(), lr=0.05, momentum=0.9)
    ),
    "adam": lambda model: CentralizedAdam(1, model, lr=0.05),
    "amsgrad": lambda model: CentralizedAdam(1, model, lr=0.05, amsgrad=True, weight_decay=0.01),
    "custom": lambda model: CustomCentralizedOptimizer(
        model, 1, adamw(model), average_world=True, grad_clip=0.7
    ),
    "generic": lambda model: GenericCentralizedOptimizer(None, model, optimizer=adamw(model)),
    "qsgd": lambda model: QSGD(1, model, lr=0.05, momentum=0.9, weight_decay=0.01),
    "loco": lambda model: QuantizedSGD(1, model, lr=0.05, momentum=0.9, bits=4, error_decay=0.8),
    "sign": lambda model: SignSGD(model.parameters(), lr=0.05),
    "signum": lambda model: SignSGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, world_size=1
    ),
    "ef sign": lambda model: EFSignSGD(model.parameters(), lr=0.05, momentum=0.5, dampening=0.1),
    "top-k": lambda model: SparsifiedSGD(
        model.parameters(), lr=0.05, weight_decay=0.01, sparse_grad_size=5
    ),
    "top 90 %": lambda model: CentralizedSparsifiedSGD(
        model.parameters(), lr=0.05, sparse_grad_size=0.9
    ),
    "random-k": lambda model: CentralizedSparsifiedSGD(
        model.parameters(), lr=0.05, sparse_grad_size=5, random_sparse=True, average_world=False
    ),
    "composed ef sign": lambda model: CentralizedSGD(
        1, model, lr=0.05, aggregation=EFSignAggregation()
    ),
    "ef21": lambda model: EF21(1, model, lr=0.05, weight_decay=0.01, size=5),
    "arc": lambda model: EF21(1, model, lr=0.05, aggregation=ARCTopKAggregation(model, rank=1)),
    "composed random-k": lambda model: GenericCentralizedOptimizer(
        None,
        model,
        optimizer=adamw(model),
        aggregation=SparsifiedAggregation(model, size=0.3, random=True),
    ),
    "power": lambda model: PowerSGD(model, lr=0.05, momentum=0.9, weight_decay=0.01, rank=1),
    "warm power": lambda model: PowerSGD(
        model,
        lr=0.05,
        by_layer=True,
        aggregation=PowerAggregation(model, reuse_query=True, start_after_steps=2),
    ),
    "power in turns": lambda model: PowerSGD(
        model, lr=0.05, aggregation=PowerAggregation(model, alternate=True, start_after_steps=2)
    ),
    "composed power": lambda model: GenericCentralizedOptimizer(
        None,
        model,
        optimizer=adamw(model),
        aggregation=PowerAggregation(model, comm_dtype=torch.bfloat16),
    ),
    "named": lambda model: get_optimizer(
        "centralized_sgd", world_size=1, model=model, lr=0.05, momentum=0.9
    ),
    "decentralized sgd": lambda model: DecentralizedSGD(
        0, [], model, lr=0.05, momentum=0.9, weight_decay=0.01
    ),
    "choco sgd": lambda model: ChocoSGD(0, [], model, lr=0.05, momentum=0.9, by_layer=True),
    "sgp": lambda model: SGP(1, model, lr=0.05, momentum=0.9, weight_decay=0.01),
    "local sgd": lambda model: LocalSGD(1, model, lr=0.05, momentum=0.9, period=4),
    "local sgd delayed": lambda model: LocalSGD(1, model, lr=0.05, momentum=0.9, period=4, delay=2),
    "des loc": lambda model: DESLOC(1, model, lr=0.05, weight_decay=0.01, period=4),
    "scaffold": lambda model: SCAFFOLD(1, model, lr=0.05, weight_decay=0.01, period=4),
    "sparse loco": lambda model: SparseLoCo(1, model, lr=0.05, period=5),
    "sparta": lambda model: SPARTA(1, model, lr=0.05),
    "no loco": lambda model: NoLoCo(1, model, lr=0.05, period=5),
    "demo": lambda model: DeMo(model.parameters(), lr=0.05),
    "one-bit adam": lambda model: OneBitAdam(
        model.parameters(), lr=0.05, weight_decay=0.01, warmup_steps=4
    ),
    "dion": lambda model: Dion(model.parameters(), lr=0.05, rank=1),
    "streaming": lambda model: StreamingDiLoCo(
        1,
        model,
        lr=0.05,
        aggregation=StreamingDiLoCoAggregation(period=5, fragments=2, delay=3, quantize=True),
    ),
    # No momentum: the rate is part of it, so a rate of 0 would not stop the steps at once.
    "lars": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(LARS, lr=0.05, momentum=0, trust_coefficient=0.5)
    ),
    "muon": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(MuonAdamW, lr=0.05)
    ),
    "normuon": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(NorMuon, lr=0.05)
    ),
    "dion2": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(Dion2, lr=0.05)
    ),
    "dion3": lambda model: GenericCentralizedOptimizer(
        None, model, optimizer=partial(Dion3, lr=0.05)
    ),
    "muloco": lambda model: DiLoCo(1, model, inner_optimizer=partial(MuonAdamW, lr=0.05), period=5),
    "diloco": lambda model: DiLoCo(1, model, lr=0.05, period=5),
}
every_member = pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS.keys())

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.fixture(autouse=True)
def no_collective(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process is a world of size 1: whatever would communicate, fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called in a world of size 1")

    for name in (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "broadcast",
        "reduce_scatter_tensor",
        "barrier",
        "batch_isend_irecv",
    ):
        monkeypatch.setattr(dist, name, refuse)
    yield


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def loss_and_gradients(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        loss_and_gradients(model, step)
        optimizer.step()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def owes(optimizer: Optimizer) -> bool:
    """Whether it remembers steps, which are still taken when the learning rate has fallen to 0."""
    return (
        isinstance(optimizer, CompressedOptimizer)
        and "memory" in optimizer.aggregation.state_dict()
    )


def settled(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The weights once everything owed is paid."""
    if not owes(optimizer):
        return snapshot(model)
    owed = optimizer.aggregation.state_dict()["memory"].values()
    return [weight - error for weight, error in zip(snapshot(model), owed, strict=True)]


@every_member
def test_is_a_torch_optimizer_that_learns(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    assert isinstance(optimizer, Optimizer)
    first = loss_and_gradients(model, 0)
    for _ in range(60):
        loss_and_gradients(model, 0)
        assert optimizer.step() is (
            True if isinstance(optimizer, CustomCentralizedOptimizer) else None
        )
    assert loss_and_gradients(model, 0) < 0.8 * first


@every_member
@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_every_scheduler_gives_what_it_gives_a_torch_optimizer(
    make: Make, make_scheduler: Callable[[Optimizer], Any]
) -> None:
    model, plain = make_model(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    optimizer = make(model)
    rates: list[list[float]] = []
    for each in (optimizer, plain):
        scheduler = make_scheduler(each)
        rates.append([])
        for step in range(6):
            if each is optimizer:
                loss_and_gradients(model, step)
            each.step()
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
            rates[-1].append(each.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


@every_member
def test_a_scheduler_changes_the_steps(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch == 0))
    train(model, optimizer, range(1))
    scheduler.step()
    before = settled(model, optimizer)
    train(model, optimizer, range(1, 3))
    torch.testing.assert_close(
        settled(model, optimizer), before, rtol=0, atol=1e-6 * owes(optimizer)
    )


@every_member
def test_resuming_from_a_state_dict_is_bit_identical(make: Make) -> None:
    through, first, second = make_model(), make_model(), make_model()
    train(through, make(through), range(12))
    optimizer = make(first)
    train(first, optimizer, range(6))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    second.load_state_dict(loaded["model"])
    resumed = make(second)
    resumed.param_groups[0]["lr"] = 123.0
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.05
    train(second, resumed, range(6, 12))
    assert same(snapshot(through), snapshot(second))


@every_member
def test_a_state_dict_that_does_not_fit_is_refused(make: Make) -> None:
    other = make(nn.Linear(1, 1)).state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        make(make_model()).load_state_dict(other)


@every_member
def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned(make: Make) -> None:
    model, plain = make_model(), make_model()
    optimizer, calls = make(model), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return loss_and_gradients(model, 0)

    loss = optimizer.step(closure)
    expected = loss_and_gradients(plain, 0)
    make(plain).step()
    assert calls == [True]
    assert torch.equal(loss, expected)
    assert same(snapshot(model), snapshot(plain))


@every_member
def test_gradients_can_be_accumulated_without_communication(make: Make) -> None:
    model, plain = make_model(), make_model()
    optimizer, reference = make(model), make(plain)
    for step in range(3):
        model.zero_grad()
        inputs, targets = batch(step)
        with optimizer.no_sync():
            nn.functional.mse_loss(model(inputs[:4]), targets[:4]).backward()
        nn.functional.mse_loss(model(inputs[4:]), targets[4:]).backward()
        optimizer.step()
        plain.zero_grad()
        for part in (slice(4), slice(4, 8)):
            nn.functional.mse_loss(plain(inputs[part]), targets[part]).backward()
        reference.step()
    assert same(snapshot(model), snapshot(plain))


@every_member
def test_a_copy_goes_on_alike_and_apart(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    lr_scheduler.StepLR(optimizer, 1)  # patches optimizer.step, which must not be copied
    train(model, optimizer, range(4))
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert type(copied) is type(optimizer)
    before = snapshot(model)
    train(copied_model, copied, range(4, 8))
    assert same(before, snapshot(model))
    train(model, optimizer, range(4, 8))
    assert same(snapshot(copied_model), snapshot(model))


@every_member
def test_pickling_keeps_model_groups_and_state(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    optimizer.register_step_post_hook(lambda *_: None)
    train(model, optimizer, range(4))
    loaded_model, loaded = pickle.loads(pickle.dumps((model, optimizer)))
    train(loaded_model, loaded, range(4, 8))
    train(model, optimizer, range(4, 8))
    assert same(snapshot(loaded_model), snapshot(model))


@every_member
def test_a_parameter_group_can_be_added(make: Make) -> None:
    model, added = make_model(), nn.Parameter(torch.ones(3))
    optimizer = make(model)
    optimizer.add_param_group({"params": [added], "lr": 0.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0]
    assert set(optimizer.param_groups[0]) == set(optimizer.param_groups[1])
    added.grad = torch.ones(3)
    train(model, optimizer, range(1))
    assert torch.equal(added, torch.ones(3))
    optimizer.param_groups[1]["lr"] = 0.5
    added.grad = torch.ones(3)
    train(model, optimizer, range(1, 2))
    assert (added < 1).all()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [added]})


@every_member
def test_gradients_are_cleared_to_none_or_zero(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    loss_and_gradients(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@every_member
def test_hooks_run_once_with_the_optimizer_they_were_registered_on(make: Make) -> None:
    model = make_model()
    optimizer, seen = make(model), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("state", o)))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state: {k: v for k, v in state.items() if k != "mine"}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert [name for name, _ in seen] == ["pre", "post", "state", "loaded"]
    assert all(o is optimizer for _, o in seen)


@every_member
def test_frozen_and_unused_parameters_stay(make: Make) -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = make(model)
    loss_and_gradients(model, 0)
    model[2].bias.grad = None
    frozen, unused, used = model[0].weight.clone(), model[2].bias.clone(), model[2].weight.clone()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model[2].bias, unused)
    assert not torch.equal(model[2].weight, used)
    assert model[2].bias.grad is None


@every_member
def test_a_step_leaves_the_global_generator_and_the_grad_mode_alone(make: Make) -> None:
    model = make_model()
    before = torch.get_rng_state()
    train(model, make(model), range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()


@every_member
def test_a_tracker_hears_of_aggregation_update_and_bytes(make: Make) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.marks: list[str] = []
            self.communication: list[tuple[float, float, int]] = []

        def record_batch_agg(self) -> None:
            self.marks.append("agg")

        def record_batch_opt_step(self) -> None:
            self.marks.append("opt_step")

        def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
            self.communication.append((total_s, exposed_s, size_bytes))

    model, tracker = make_model(), Recorder()
    optimizer = make(model)
    loss_and_gradients(model, 0)
    optimizer.step(tracker=tracker)
    assert tracker.marks == (["agg", "opt_step"] if optimizer.agg_grad else ["opt_step", "agg"])
    ((total_s, exposed_s, size_bytes),) = tracker.communication
    assert 0 <= exposed_s == total_s < 10
    assert size_bytes == 0


@every_member
def test_the_optimizer_inside_shares_groups_and_state_and_can_be_swapped(make: Make) -> None:
    model = make_model()
    optimizer = make(model)
    if not isinstance(optimizer, OptimizerWrapper):
        assert not hasattr(optimizer, "optimizer")
        return
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    # DES-LOC averages the moments of Adam, so it refuses others.
    kind = torch.optim.Adam if isinstance(optimizer, DESLOC) else torch.optim.SGD
    optimizer.optimizer = kind(model.parameters(), lr=0.0)
    before = snapshot(model)
    train(model, optimizer, range(2))
    assert same(before, snapshot(model))
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, range(2))
    assert not same(before, snapshot(model))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not str"):
        optimizer.optimizer = "sgd"
    with pytest.raises(ValueError, match="inside itself"):
        optimizer.optimizer = optimizer


@every_member
def test_repr_shows_class_and_groups(make: Make) -> None:
    optimizer = make(make_model())
    text = repr(optimizer)
    assert type(optimizer).__name__ in text
    assert "lr: 0.05" in text


def arguments(name: str) -> dict[str, Any]:
    """What the optimizer of that name optimizes: a model or parameters."""
    if "model" in inspect.signature(optimizers[name]).parameters:
        return {"model": make_model()}
    return {"params": make_model().parameters()}


@pytest.mark.parametrize("name", sorted(optimizers))
class TestByName:
    def test_missing_arguments_are_named(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"lr is missing: \w+ needs a learning rate"):
            get_optimizer(name, **arguments(name))
        if "model" in arguments(name):
            with pytest.raises(ValueError, match=r"model is missing: give model="):
                get_optimizer(name, lr=0.1)
            with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
                get_optimizer(name, model=[], lr=0.1)
        else:
            with pytest.raises(ValueError, match=r"params is missing: give params="):
                get_optimizer(name, params=None, lr=0.1)
            with pytest.raises(ValueError, match=r"empty parameter list"):
                get_optimizer(name, params=[], lr=0.1)

    @pytest.mark.parametrize(
        ("lr", "error", "message"),
        [
            ("0.1", TypeError, "lr must be a number, not '0.1'"),
            (True, TypeError, "lr must be a number, not True"),
            (float("nan"), ValueError, "lr must be finite and at least 0, not nan"),
            (float("inf"), ValueError, "lr must be finite and at least 0, not inf"),
            (-0.1, ValueError, "lr must be finite and at least 0, not -0.1"),
            (torch.tensor([0.1, 0.2]), ValueError, "lr must have one element, not shape (2,)"),
            (torch.tensor(-0.1), ValueError, "lr must be finite and at least 0, not -0.1"),
        ],
    )
    def test_a_learning_rate_that_is_none_is_refused_in_a_sentence(
        self, name: str, lr: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=re.escape(message)):
            get_optimizer(name, **arguments(name), lr=lr)

    def test_numpys_numbers_serve_as_arguments(self, name: str) -> None:
        integers = {"world_size", "rank", "period", "sparse_grad_size", "seed", "start_after_steps"}
        taken = inspect.signature(optimizers[name]).parameters
        given = {key: np.int64(1) for key in integers.intersection(taken)}
        if "neighbors" in taken:
            given.update(rank=np.int64(0), neighbors=np.array([], dtype=int))
        if "compression" in taken:
            given.update(compression="random_k", ratio=np.float32(0.5))
        optimizer = get_optimizer(name, **arguments(name), lr=np.float32(0.1), **given)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

    def test_a_world_that_is_not_there_is_refused(self, name: str) -> None:
        if "neighbors" in inspect.signature(optimizers[name]).parameters:
            with pytest.raises(
                ValueError, match=r"neighbors has \[1\]: rank 0's neighbors must be other ranks"
            ):
                get_optimizer(name, neighbors=[1], model=make_model(), lr=0.1)
            with pytest.raises(
                ValueError, match="rank must be 0, the rank of this process among 1, not 1"
            ):
                get_optimizer(name, rank=1, neighbors=[], model=make_model(), lr=0.1)
            return
        with pytest.raises(ValueError, match="world_size is 2, but there is 1 process"):
            get_optimizer(name, world_size=2, **arguments(name), lr=0.1)
        with pytest.raises(TypeError, match="world_size must be an integer or None, not '1'"):
            get_optimizer(name, world_size="1", **arguments(name), lr=0.1)

    def test_the_default_world_is_the_actual_one(self, name: str) -> None:
        assert get_optimizer(name, **arguments(name), lr=0.1).world_size == 1

    def test_lr_is_marked_as_required(self, name: str) -> None:
        assert inspect.signature(optimizers[name]).parameters["lr"].default is required


def test_the_outer_rate_of_diloco_is_checked_too() -> None:
    with pytest.raises(TypeError, match=r"outer_lr must be a number, not '0\.7'"):
        DiLoCo(1, make_model(), lr=0.1, outer_lr="0.7")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outer_momentum must be finite and at least 0, not nan"):
        DiLoCo(1, make_model(), lr=0.1, outer_momentum=float("nan"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"optimizer must be one of centralized_adam, centralized_sgd.*, not 'sdg'",
    ):
        get_optimizer("sdg", lr=0.1)


def test_an_unknown_name_is_a_key_error_too() -> None:
    """Version 3.0 looked names up in a dictionary."""
    with pytest.raises(KeyError) as raised:
        get_optimizer("sdg", lr=0.1)
    assert str(raised.value).startswith("optimizer must be one of centralized_adam, ")
