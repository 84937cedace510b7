"""The recipes of the tutorial about porting, against the same training by torch's own DDP."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.tutorial import recipes
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.results.raw_lines import read_lines, statistics
from tests.helpers.processes import ROOT
from tests.helpers.ranks import run_ranks

Batches = list[tuple[Tensor, Tensor]]
PAGE = ROOT / "docs" / "tutorials" / "porting.md"


def batches_of(rank: int) -> Batches:
    random = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(8):
        inputs = torch.randn(16, 4, generator=random)
        batches.append((inputs, inputs.sum(dim=1, keepdim=True)))
    return batches


def start() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def with_ddp(
    model: nn.Module,
    batches: Batches,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    update_freq: int = 1,
    max_norm: float | None = None,
    max_lr: float | None = None,
    init_scale: float | None = None,
) -> int:
    """Train as a script with DDP does, and return the number of steps that overflow skipped."""
    ddp = DDP(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = None
    if max_lr is not None:
        scheduler = OneCycleLR(optimizer, max_lr=max_lr, total_steps=len(batches))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=bool(init_scale))
    skipped = 0
    for number, (inputs, targets) in enumerate(batches, start=1):
        is_update = number % update_freq == 0
        with contextlib.nullcontext() if is_update else ddp.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=bool(init_scale)):
                loss = loss_of(ddp(inputs), targets) / update_freq
            scaler.scale(loss).backward()
        if not is_update:
            continue
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm, "otherwise nothing is clipped"
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return skipped


def _worker(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Return the largest difference of the weights after each recipe, and further numbers."""
    batches = batches_of(rank)
    held_out = [(2 * inputs, targets) for inputs, targets in batches[:2]]
    tokens = [(torch.randint(16, (8,)), torch.randint(16, (8,))) for _ in range(8)]
    numbers: dict[str, Any] = {}

    def compare(recipe: Callable[..., None], data: Any, *arguments: Any, **plain: Any) -> nn.Module:
        model = recipes.TiedModel() if recipe is recipes.tie_weights else start()
        other = copy.deepcopy(model)
        recipe(model, data, *arguments)
        numbers["skipped"] = numbers.get("skipped", 0) + with_ddp(other, data, **plain)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        numbers[recipe.__name__] = max((a - b).abs().max().item() for a, b in pairs)
        return model

    compare(recipes.accumulate_gradients, batches, update_freq=2)
    compare(recipes.clip_gradients, batches, max_norm=0.1)
    # The first steps overflow in float16.
    compare(recipes.mixed_precision, batches, 2.0**24, init_scale=2.0**24)
    compare(recipes.schedule_by_steps, batches, max_lr=0.2)
    torch.manual_seed(5)
    compare(recipes.tie_weights, tokens, loss_of=F.cross_entropy)
    compare(recipes.compile_model, batches, "aot_eager")
    os.chdir(folder)
    model = compare(recipes.evaluate_by_steps, batches, held_out, rank)
    losses = torch.stack([F.mse_loss(model(inputs), targets) for inputs, targets in held_out])
    mean = losses.mean().detach()
    dist.all_reduce(mean)
    numbers["val_loss"] = mean.item() / world_size
    # Another process would begin with weights of its own.
    recipes.checkpoint_by_steps(start(), batches[:5], f"{folder}/checkpoints", rank)
    compare(recipes.checkpoint_by_steps, batches, f"{folder}/checkpoints", rank)
    return numbers


def test_recipes_train_as_torchs_ddp_does() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(2, _worker, folder)
        results = Path(folder, "mlbench-results", "recipe")
        assert verify_folder(results) == []
        result = read_result(results)
        evaluations = statistics(read_lines(results), "val_global_loss")
    assert first == second
    val_loss, skipped = first.pop("val_loss"), first.pop("skipped")
    assert {name: difference for name, difference in first.items() if difference > 1e-6} == {}
    assert set(first) == {name for name in RECIPES if name != "TiedModel"}
    assert skipped > 0, "otherwise no step of the scaler is skipped"
    assert [line["step"] for line in evaluations] == [4, 8]
    assert evaluations[-1]["value"] == pytest.approx(val_loss, rel=1e-6)
    assert (result["configuration"]["unit"], result["batches"]) == ("steps", 8)


RECIPES = [
    *("accumulate_gradients", "clip_gradients", "mixed_precision", "schedule_by_steps"),
    *("evaluate_by_steps", "checkpoint_by_steps", "TiedModel", "tie_weights", "compile_model"),
]


def test_the_page_shows_every_recipe() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = [name for name in RECIPES if f":pyobject: {name}\n" in page]
    assert shown == RECIPES
