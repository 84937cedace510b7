"""Half-precision training on GPUs: the device's own kernels, NCCL, and no needless waiting."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.optim.pytorch import CentralizedSGD, FP16Optimizer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_one = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device to compute float16 on")
needs_two = pytest.mark.skipif(
    GPUS < 2 or not dist.is_nccl_available(), reason="needs 2 CUDA devices and NCCL"
)

STEPS = 30


def make_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda().to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, 32, generator=generator)
    return inputs.cuda(), inputs[:, :8].sin().cuda()


def train(
    dtype: torch.dtype, rank: int = 0, world_size: int = 1
) -> tuple[nn.Module, FP16Optimizer, float]:
    """Train on this worker's share; returns the loss on a batch that was not trained on."""
    model = make_net(dtype)
    optimizer = FP16Optimizer(model, world_size, use_cuda=True, scale_window=10, grad_clip=5.0)
    optimizer.set_optimizer(torch.optim.AdamW([optimizer.fp32_params], lr=3e-3))
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(world_size)[rank] for tensor in batch(step))
        optimizer.zero_grad()
        optimizer.backward_loss(nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets))
        optimizer.step()
    inputs, targets = batch(STEPS)
    return model, optimizer, nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets).item()


@pytest.mark.gpu
@needs_one
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_learns_as_well_as_float32(dtype: torch.dtype) -> None:
    _, _, expected = train(torch.float32)
    model, optimizer, loss = train(dtype)
    assert optimizer.fp32_params.is_cuda
    assert next(model.parameters()).dtype == dtype
    assert loss == pytest.approx(expected, rel=0.1)


@pytest.mark.gpu
@needs_one
def test_a_multiplier_on_the_device_divides_there() -> None:
    model = make_net(torch.float16)
    optimizer = FP16Optimizer(model, 1, use_cuda=True, init_scale=64, average_custom=True)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 64.0)
    assert optimizer.step(
        multiplier=torch.tensor([2.0], device="cuda"), denom=torch.tensor(4.0, device="cuda")
    )
    assert torch.equal(optimizer.fp32_params.grad, torch.full_like(optimizer.fp32_params, 0.125))


@pytest.mark.gpu
@needs_one
def test_a_grad_scaler_on_the_device_skips_and_unscales() -> None:
    model = make_net(torch.float32)
    optimizer, scaler = (
        CentralizedSGD(1, model, lr=0.1),
        torch.amp.GradScaler("cuda", init_scale=1024.0),
    )
    inputs, targets = batch(0)
    plain = make_net(torch.float32)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    nn.functional.mse_loss(plain(inputs), targets).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert scaler.get_scale() == 512
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def over_nccl(rank: int, folder: str, world_size: int) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    try:
        model, optimizer, loss = train(torch.float16, rank, world_size)
        if rank == 0:  # an overflow on one worker is skipped by both
            next(model.parameters()).grad[0, 0] = float("nan")
        updated = optimizer.step()
        torch.save(
            (optimizer.fp32_params.detach().cpu(), loss, updated), Path(folder) / f"{rank}.pt"
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@needs_two
def test_two_gpus_over_nccl_agree() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(over_nccl, (folder, 2), nprocs=2)
        (first, loss, updated), (second, _, also_updated) = (
            torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1)
        )
    assert torch.equal(first, second)
    assert updated is also_updated is False
    assert loss == pytest.approx(train(torch.float16)[2], rel=0.1)
