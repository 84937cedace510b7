"""NorMuon, Dion2 and Dion3 on single matrices; test_recent_methods.py has them with workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.optim.pytorch import Dion2, Dion3, NorMuon
from mlbench_core.optim.pytorch.updates.orthonormal import orthonormalize

SHAPES = [(6, 10), (10, 6), (7, 7)]
every_kind = pytest.mark.parametrize("kind", [NorMuon, Dion2, Dion3])


def random(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def train(make: Callable[[Any], Optimizer], x: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return the weights after a step with each gradient."""
    x = x.clone().requires_grad_()
    optimizer = make([x])
    for gradient in gradients:
        x.grad = gradient.clone()
        optimizer.step()
    return x.detach()


def first_step(make: Callable[[Any], Optimizer], gradient: Tensor) -> Tensor:
    return -train(make, torch.zeros_like(gradient), [gradient])


@pytest.mark.parametrize(
    ("polar_express", "least", "low", "high"),
    [(False, 0.001, 0.47, 1.21), (True, 0.003, 0.858, 1.142)],
)
def test_singular_values_come_near_1(
    polar_express: bool, least: float, low: float, high: float
) -> None:
    for value in torch.logspace(math.log10(least), 0, 500, dtype=torch.float64):
        # The norm of these singular values is 1.
        values = torch.stack([value, (1 - value**2).clamp(min=0).sqrt()])
        found = orthonormalize(values.diag(), polar_express).diag()
        assert ((found >= low) & (found <= high))[values >= least].all(), value


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_has_the_bits_of_torchs_muon(shape: tuple[int, int]) -> None:
    gradient = random(shape, dtype=torch.float32)
    x = torch.zeros(shape, requires_grad=True)
    x.grad = gradient
    muon = torch.optim.Muon([x], lr=1.0, momentum=0.0, adjust_lr_fn="original")
    muon.step()
    factor = math.sqrt(max(1, shape[0] / shape[1]))
    assert torch.equal(x.detach(), torch.zeros(shape).add(orthonormalize(gradient), alpha=-factor))


@pytest.mark.parametrize("shape", SHAPES)
def test_dion2_of_all_rows_is_muon(shape: tuple[int, int]) -> None:
    """Torch's, without Nesterov's momentum.

    Torch's momentum is an average. With 0.5 it is half of the sum in bfloat16, too."""
    x = random(shape, seed=9, dtype=torch.float32)
    gradients = [random(shape, seed, torch.float32) for seed in range(6)]
    # torch's factor is that of Dion2 for matrices with no more columns than rows.
    lr = 0.1 * min(1, math.sqrt(shape[0] / shape[1]))
    muon = train(
        lambda x: torch.optim.Muon(x, lr=lr, weight_decay=0.2, momentum=0.5, nesterov=False),
        x,
        gradients,
    )
    # The rate decays the weights, too.
    decay = 0.2 * lr / 0.1
    ours = train(
        lambda x: Dion2(x, lr=0.1, weight_decay=decay, fraction=1.0, momentum=0.5), x, gradients
    )
    torch.testing.assert_close(ours, muon, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_dion3_of_all_rows_is_normuon(shape: tuple[int, int]) -> None:
    x, gradients = random(shape, seed=9), [random(shape, seed) for seed in range(6)]
    lr = 0.1 * math.sqrt(shape[0] / shape[1]) / (0.2 * math.sqrt(max(shape)))
    normuon = train(lambda x: NorMuon(x, lr=lr, weight_decay=0), x, gradients)
    dion3 = train(lambda x: Dion3(x, lr=0.1, weight_decay=0, fraction=1.0), x, gradients)
    torch.testing.assert_close(dion3, normuon)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_step_of_dion2_is_orthonormal(shape: tuple[int, int]) -> None:
    """Three rows or columns, whose singular values Polar Express brings within 0.142 of 1."""
    step = first_step(
        lambda x: Dion2(x, lr=1.0, fraction=3 / min(shape), polar_express=True), random(shape)
    )
    if shape[1] < shape[0]:
        step = step.T
    u = step[step.any(1)] / math.sqrt(shape[0] / shape[1])
    values = torch.linalg.svdvals(u)
    assert u.shape == (3, max(shape))
    assert ((values - 1).abs() < 0.142).all()


@pytest.mark.parametrize(("kind", "shape"), [(Dion2, (8, 9)), (Dion2, (9, 8)), (Dion3, (9, 8))])
def test_other_rows_only_decay_and_add_their_gradients(
    kind: type[Dion2], shape: tuple[int, int]
) -> None:
    is_by_columns = kind is Dion2 and shape[1] < shape[0]
    x = random(shape, seed=9).requires_grad_()
    optimizer = kind([x], lr=0.1, weight_decay=0.5, fraction=0.25)
    steps, total, count = 3, torch.zeros(shape, dtype=torch.float64), 0
    ever = torch.zeros(8 if is_by_columns or shape[0] == 8 else 9, dtype=torch.bool)
    for seed in range(steps):
        before, gradient = x.detach().clone(), random(shape, seed)
        x.grad = gradient.clone()
        total += gradient
        optimizer.step()
        moved = x.detach() - (1 - 0.1 * 0.5) * before
        momentum, expected = optimizer.state[x]["momentum_buffer"], total
        if is_by_columns:
            moved, momentum, expected = moved.T, momentum.T, expected.T
        chosen = moved.abs().amax(1) > 1e-12
        count += int(chosen.sum())
        ever |= chosen
        torch.testing.assert_close(momentum[~ever], expected[~ever])
        if seed == 0:
            torch.testing.assert_close(momentum[chosen], 0.95 * expected[chosen])
            assert set(expected.abs().sum(1).topk(len(chosen.nonzero())).indices.tolist()) == set(
                chosen.nonzero().flatten().tolist()
            )
    # A quarter of the rows, rounded up.
    assert count == steps * math.ceil(0.25 * len(ever))
    assert not ever.all()


def test_of_equal_rows_the_first_are_chosen() -> None:
    step = first_step(lambda x: Dion2(x, lr=1.0, fraction=0.5), torch.ones(4, 5))
    assert step.any(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[2:])
def test_the_first_step_of_normuon_has_rows_of_equal_length_and_the_norm_of_muons(
    shape: tuple[int, int],
) -> None:
    gradient = random(shape) * torch.logspace(-1, 1, shape[0], dtype=torch.float64)[:, None]
    step = first_step(lambda x: NorMuon(x, lr=1.0), gradient)
    lengths = step.norm(dim=1)
    torch.testing.assert_close(lengths, lengths.mean().expand(shape[0]), rtol=1e-6, atol=0)
    muons = 0.2 * math.sqrt(max(shape)) * orthonormalize(gradient)
    assert step.norm().item() == pytest.approx(muons.norm().item(), rel=1e-9)
    assert muons.norm(dim=1).std() > 0.01


@every_kind
def test_a_gradient_of_zeros_only_decays(kind: type[NorMuon]) -> None:
    x = random((4, 6))
    found = train(lambda x: kind(x, lr=0.1, weight_decay=0.5), x, [torch.zeros_like(x)])
    torch.testing.assert_close(found, 0.95 * x)


@every_kind
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_steps_as_a_matrix(
    kind: type[NorMuon], memory_format: torch.memory_format
) -> None:
    x = random((4, 3, 2, 2))
    kernel = x.clone(memory_format=memory_format).requires_grad_()
    matrix = x.flatten(1).clone().requires_grad_()
    optimizers = kind([kernel], lr=0.1, kernels=True), kind([matrix], lr=0.1)
    for seed in range(3):
        gradient = random((4, 3, 2, 2), seed)
        kernel.grad, matrix.grad = gradient.to(memory_format=memory_format), gradient.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(kernel.flatten(1), matrix)


@every_kind
def test_wrong_arguments_are_named(kind: type[NorMuon]) -> None:
    x = [torch.ones(2, 2, requires_grad=True)]
    with pytest.raises(ValueError, match="momentum must be at least 0"):
        kind(x, momentum=-1)
    x[0].grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="gradients must be dense, not sparse"):
        kind(x).step()


@pytest.mark.parametrize("fraction", [0, -1, 1.5, math.nan])
def test_a_wrong_fraction_is_named(fraction: float) -> None:
    for kind in (Dion2, Dion3):
        with pytest.raises(ValueError, match="fraction must be above 0 and at most 1, not"):
            kind([torch.ones(2, 2)], fraction=fraction)


@pytest.mark.parametrize(
    ("beta2", "message"), [(-0.1, "at least 0"), (math.nan, "at least 0"), (1.0, "below 1")]
)
def test_a_wrong_beta2_is_named(beta2: float, message: str) -> None:
    for kind in (NorMuon, Dion3):
        with pytest.raises(ValueError, match=f"beta2 must be {message}, not {beta2}"):
            kind([torch.ones(2, 2)], beta2=beta2)
