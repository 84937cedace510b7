"""Task 5a: GPT on FineWeb, synchronous AdamW, time to a validation loss of 3.28 (light goal: 3.6).

One process per worker, a disjoint part of the tokens each; a step takes 2^19 tokens of all k
workers, each of which reads at most 2^15 at a time and accumulates the gradients of the others.
They are averaged over the workers, then clipped to the norm 1. The rate rises for 256 steps to
0.0018 and falls to 0 over the last 40 % of all 9,600 steps (Hägele et al. 2024, arXiv 2405.18392).
The model is validated every 128 steps; these are an epoch in the terms of the library. The presets
mini and tiny read the bytes of WikiText-2. README.md describes the task."""

from __future__ import annotations

import argparse
from pathlib import Path

import methods
import plans

from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.pytorch.translation import EpochPart
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.nlp.pytorch.token_shards import (
    FirstTokens,
    TokenBatches,
    load_shards,
    load_text_bytes,
)
from mlbench_core.dataset.nlp.pytorch.wikitext2_dataset import download_text
from mlbench_core.evaluation.goals import TimeToGoal
from mlbench_core.evaluation.pytorch.metrics import BitsPerByte, MLBenchMetric, Perplexity
from mlbench_core.lr_scheduler.pytorch.lr import TrapezoidLR
from mlbench_core.models.pytorch.autocast import Float32Output
from mlbench_core.models.pytorch.gpt import GPT, GPTConfig, next_token_loss
from mlbench_core.tasks import get_task

TASK = get_task("5a")


def load_data(run: Run, plan: plans.Plan, batch_size: int) -> tuple[TokenBatches, FirstTokens]:
    """Return this worker's training batches, and its share of the validation text."""
    folder, seed = Path(run.args.data or run.dataset_dir), run.args.seed
    if run.args.dataset == "wikitext2":
        download_text(folder)
        train, valid = [load_text_bytes(folder, "train")], load_text_bytes(folder, "valid")
    else:
        # Shards are shuffled already, and are read fastest from beginning to end.
        train, valid, seed = load_shards(folder, "train"), load_shards(folder, "val"), None
    context, place = plan.context, (run.rank, run.world_size)
    batches = TokenBatches(train, batch_size, context, *place, seed=seed)
    return batches, FirstTokens(valid, plan.validation_tokens, batch_size, context, *place)


def metrics_and_goal(args: argparse.Namespace, light: bool) -> tuple[list[Perplexity], TimeToGoal]:
    """Return the metrics of a preset and its goal: the loss of tokens, or bits per byte."""
    threshold = TASK.goal_on(args.dataset, light, args.preset)
    if args.dataset == "wikitext2":
        metrics, description = [BitsPerByte()], "{threshold} bits per byte"
    else:
        metrics, description = [Perplexity()], "Validation loss of {threshold}"
    name = TASK.stand_in_metrics.get(args.dataset, TASK.metric)
    return metrics, TimeToGoal(f"val_global_{name}", threshold, True, description)


def train(run: Run) -> None:
    """Train until the goal is reached or the schedule ends."""
    args, plan = run.args, plans.chosen(run.args)
    size, frequency = plan.divided(run.world_size)
    batches, validation = load_data(run, plan, size)
    model = GPT(GPTConfig.preset(args.preset))
    model = model.cuda() if run.gpu else model
    network = methods.parallel(model, args.optimizer)
    optimizer = methods.make_optimizer(network, plan.lr, args.optimizer)
    scheduler = TrapezoidLR(optimizer, plan.warmup_steps, plan.steps)
    metrics, goal = metrics_and_goal(args, run.light)
    tracker = run.track(metrics, goal, minimize=True)
    autocast = plans.autocast(args)

    def validate() -> tuple[dict[MLBenchMetric, float], float]:
        # With some methods, the weights of the workers differ.
        with averaged_weights(model, tracker=tracker):
            return validation_round(
                validation, Float32Output(model, autocast), next_token_loss, metrics, None,
                tracker=tracker, use_cuda=run.gpu,
            )  # fmt: skip

    extra = {"batches": batches}
    for _ in run.epochs(model, optimizer, scheduler, validate, extra=extra):
        # The batches continue where the last validation interrupted them, also after a resume.
        part = EpochPart(iter(batches), plan.validate_every * frequency, is_last=False)
        train_round(
            part, Float32Output(network, autocast), optimizer, next_token_loss, [], scheduler, None,
            schedule_per="batch", use_cuda=run.gpu, tracker=tracker, update_freq=frequency,
            counts_tokens=True,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser)
    parser.add_argument(
        "--optimizer", choices=TASK.optimizers, default="adamw", metavar="NAME",
        help=f"{', '.join(TASK.optimizers)} (default: adamw)",
    )  # fmt: skip
    plans.add_arguments(parser)


if __name__ == "__main__":
    run_task(train, "task5a", add_arguments, plans.take_defaults)
