"""Recipes of the tutorial "Porting a training script": parts of DDP scripts, ported.

Each function trains a model on the batches of this worker. Run all of them with two workers::

    torchrun --nproc-per-node 2 recipes.py
"""

import copy
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from mlbench_core.controlflow.pytorch import record_validation_stats, validation_round
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.distributed.pytorch import initialize_backends
from mlbench_core.errors import CheckpointNotFoundError
from mlbench_core.evaluation.goals import TimeToGoal
from mlbench_core.optim.pytorch import CentralizedSGD, DistributedGradScaler
from mlbench_core.tracking import Tracker

Batches = Sequence[tuple[Tensor, Tensor]]


def accumulate_gradients(model: nn.Module, batches: Batches, update_freq: int = 2) -> None:
    """Update the weights after every ``update_freq`` batches."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    for number, (inputs, targets) in enumerate(batches, start=1):
        loss = F.mse_loss(model(inputs), targets) / update_freq
        # Nothing is sent here, so no_sync() is not needed.
        loss.backward()
        if number % update_freq == 0:
            optimizer.step()
            optimizer.zero_grad()


def clip_gradients(model: nn.Module, batches: Batches, max_norm: float = 0.1) -> None:
    """Clip the norm of the averaged gradient."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        # It averages the gradients first; the step sends nothing more.
        optimizer.clip_grad_norm_(max_norm)
        optimizer.step()


def mixed_precision(model: nn.Module, batches: Batches, init_scale: float = 65536.0) -> None:
    """Compute in float16, and scale the loss."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    device = batches[0][0].device.type
    # The gradients of one worker may overflow, and all of them must skip that step.
    scaler = DistributedGradScaler(device, init_scale=init_scale)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def schedule_by_steps(model: nn.Module, batches: Batches) -> None:
    """Change the learning rate after every step."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=len(batches))
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()


def evaluate_by_steps(
    model: nn.Module, batches: Batches, held_out: Batches, rank: int, every: int = 4
) -> None:
    """Evaluate on the data of all workers after every ``every`` steps, until a goal is reached."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    goal = TimeToGoal("val_global_loss", 0.01, minimize=True, description="Loss {threshold}")
    # Tables, curves and the text of the goal then count steps instead of epochs.
    with Tracker([], "recipe", rank, goal, unit="steps", results="auto") as tracker:
        tracker.start()
        for step, (inputs, targets) in enumerate(batches, start=1):
            tracker.batch_start()
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            tracker.record_batch_fwd_pass()
            loss.backward()
            tracker.record_batch_backprop()
            optimizer.step(tracker=tracker)
            tracker.batch_end(samples=len(inputs))
            tracker.record_loss(loss.item(), n=len(inputs))
            if step % every == 0:
                _, val_loss = validation_round(
                    held_out, model, F.mse_loss, [], "fp32", tracker=tracker
                )
                record_validation_stats({}, val_loss, tracker, rank)
                model.train()
                tracker.train()
                # The loss is that of all workers, so all of them stop together.
                if tracker.goal_reached:
                    break


def checkpoint_by_steps(
    model: nn.Module, batches: Batches, folder: str, rank: int, every: int = 3
) -> None:
    """Save a checkpoint after every ``every`` steps, and continue from the newest one."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    with Tracker([], "recipe", rank, unit="steps") as tracker:
        try:
            checkpointer, *_ = Checkpointer.load(
                folder, rank, model, optimizer, None, tracker=tracker
            )
        except CheckpointNotFoundError:
            checkpointer = Checkpointer(folder, rank, CheckpointFreq.ALL)
        # A restored tracker has counted the steps.
        done, _ = tracker.position()
        for step, (inputs, targets) in enumerate(batches[done:], start=done + 1):
            tracker.batch_start()
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step(tracker=tracker)
            tracker.batch_end(samples=len(inputs))
            if step % every == 0:
                checkpointer.save(tracker, model, optimizer, None, is_best=False, epoch=step)


class TiedModel(nn.Module):
    """Predict a token; the embedding and the last layer are the same matrix."""

    def __init__(self, tokens: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def tie_weights(model: TiedModel, batches: Batches) -> None:
    """Train a model with a shared weight; its gradient is sent once."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    for tokens, following in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), following).backward()
        optimizer.step()


def compile_model(model: nn.Module, batches: Batches, backend: str = "inductor") -> None:
    """Compile the model; it shares its weights with the model that the optimizer has."""
    optimizer = CentralizedSGD(model=model, lr=0.1, momentum=0.9)
    compiled = torch.compile(model, backend=backend)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(compiled(inputs), targets).backward()
        optimizer.step()


def main() -> None:
    """Run every recipe on data of this worker, and print the loss after it."""
    with initialize_backends("gloo", seed=0) as (rank, _, _):
        start = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        data = torch.Generator().manual_seed(rank)
        batches: list[tuple[Tensor, Tensor]] = []
        for _ in range(8):
            inputs = torch.randn(32, 4, generator=data)
            batches.append((inputs, inputs.sum(dim=1, keepdim=True)))
        with tempfile.TemporaryDirectory() as folder:
            recipes: dict[Callable[..., None], tuple[Any, ...]] = {
                accumulate_gradients: (batches,),
                clip_gradients: (batches,),
                mixed_precision: (batches,),
                schedule_by_steps: (batches,),
                evaluate_by_steps: (batches, batches[:2], rank),
                checkpoint_by_steps: (batches, folder, rank),
                compile_model: (batches, "eager"),
            }
            for recipe, arguments in recipes.items():
                model = copy.deepcopy(start)
                recipe(model, *arguments)
                if rank == 0:
                    inputs, targets = batches[0]
                    loss = F.mse_loss(model(inputs), targets).item()
                    print(f"{recipe.__name__}: {loss:.4f}")
        tie_weights(TiedModel(), [(torch.arange(16), torch.arange(16).roll(1))] * 8)


if __name__ == "__main__":
    main()
