"""Task 3a: AWD-LSTM on WikiText-2, synchronous SGD, time to a validation perplexity of 70.

The light goal is 90. One process per worker, 80 sequences per worker, a disjoint part of the text
each; gradients are averaged over the k workers before every update, then clipped. The rate is
30 sqrt(k) after a linear warm-up of 3 k epochs, times the batch's length over 70. SGD becomes
averaged SGD when validation has not improved for 5 epochs (Merity et al. 2017, arXiv 1708.02182).
README.md describes the task.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from mlbench_core.controlflow.pytorch import validation_round
from mlbench_core.controlflow.pytorch.controlflow import BatchRecords
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments, count
from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset
from mlbench_core.evaluation.goals import task3_time_to_perplexity_goal
from mlbench_core.evaluation.pytorch.criterion import ActivationRegularization
from mlbench_core.evaluation.pytorch.metrics import Perplexity
from mlbench_core.lr_scheduler.pytorch.lr import LRLinearWarmUp
from mlbench_core.models.pytorch.language_models import CarriedState, LSTMLanguageModel, detached
from mlbench_core.optim.pytorch import NTASGD, CustomCentralizedOptimizer, scaled_rate
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker

TASK = get_task("3a")
BASE_LR = 30.0  # of one worker with the number of sequences of its preset
WEIGHT_DECAY = 1.2e-6
GRAD_CLIP = 0.25
WARMUP_EPOCHS = 3  # for each worker
# Validations: SGD averages once one is worse than the best before the last 5.
NON_MONOTONE_INTERVAL = 5
VALIDATION_SEQUENCES = 10  # of all workers


@dataclass(frozen=True)
class Preset:
    """A size of the task: the arguments of the model and the shape of its batches."""

    model: dict[str, Any]
    sequences: int  # per worker
    bptt: int
    dataset: str | None = None  # whose goal it has; None is the task's own


FULL = {
    "ninp": 400, "nhid": 1150, "nlayers": 3,
    "dropout": 0.4, "dropouth": 0.2, "dropouti": 0.65, "dropoute": 0.1, "wdrop": 0.5,
}  # fmt: skip
SMALL = {
    "ninp": 200, "nhid": 400, "nlayers": 2,
    "dropout": 0.2, "dropouth": 0.1, "dropouti": 0.2, "dropoute": 0.0, "wdrop": 0.1,
}  # fmt: skip
PRESETS = {"full": Preset(FULL, 80, 70), "small": Preset(SMALL, 20, 35, dataset="wikitext2-small")}


def base_rate(preset_sequences: int, sequences: int | None) -> float:
    """Return the rate of one worker, proportional to the square root of its sequences.

    It is 30 for 80 sequences, and 15 for 20.
    """
    return BASE_LR * math.sqrt((sequences or preset_sequences) / preset_sequences)


def train_epoch(
    text: Wikitext2Dataset,
    model: LSTMLanguageModel,
    optimizer: Optimizer,
    tracker: Tracker,
    gpu: bool,
    bf16: bool,
) -> None:
    """Train on this worker's part of the text once.

    The state continues from batch to batch, and back-propagation stops at each batch.
    """
    regularization = ActivationRegularization(alpha=2.0, beta=1.0)
    hidden = None
    model.train()
    tracker.train()
    # Losses stay on the device for 25 batches: reading one would make the device wait for the next
    # batch.
    with BatchRecords(tracker, text.num_batches()) as records:
        for i in range(text.num_batches()):
            tracker.batch_start()
            words, next_words = text.get_batch(i, cuda=gpu)
            tracker.record_batch_load()
            optimizer.zero_grad()
            # Truncated back-propagation: the state of the previous batch is kept, its graph is not.
            hidden = model.init_hidden(words.shape[1]) if hidden is None else detached(hidden)
            tracker.record_batch_init()
            with torch.autocast(words.device.type, torch.bfloat16, enabled=bf16):
                raw, dropped, hidden = model.encode(words, hidden)
                tracker.record_batch_fwd_pass()
                # comp_loss includes the scores and, if computed in pieces on a CPU, their
                # gradients.
                loss = model.loss(dropped[-1], next_words)
            # The penalty is added to the gradient only: the recorded loss gives the perplexity.
            penalty = regularization(dropped[-1].float(), raw[-1].float())
            tracker.record_batch_comp_loss()
            (loss + penalty).backward()
            tracker.record_batch_backprop()
            # Batches have random lengths; a rate proportional to the length keeps short ones from
            # weighing too much.
            with scaled_rate(optimizer, len(words) / text.bptt):
                optimizer.step(tracker=tracker)
            tracker.batch_end(samples=words.shape[1], tokens=words.numel())
            # The mean loss of the epoch is that of its tokens, so each batch weighs as much as it
            # has tokens.
            records.add(i, loss, len(next_words))


def load_data(run: Run, preset: Preset) -> tuple[Wikitext2Dataset, Wikitext2Dataset]:
    """Return this worker's part of the training text and of the validation text."""
    folder, sequences = run.args.data or run.dataset_dir, run.args.batch_size or preset.sequences
    text = Wikitext2Dataset(folder, preset.bptt, train=True, seed=run.args.seed)
    text.generate_batches(sequences * run.world_size, sequences, run.rank)
    validation_text = Wikitext2Dataset(folder, preset.bptt, valid=True)
    validation_text.generate_batches(VALIDATION_SEQUENCES, rank=run.rank, world_size=run.world_size)
    return text, validation_text


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args, world_size, preset = run.args, run.world_size, PRESETS[run.args.preset]
    base_lr = base_rate(preset.sequences, args.batch_size)
    text, validation_text = load_data(run, preset)
    model = LSTMLanguageModel(len(text.dictionary), tie_weights=True, **preset.model)
    # All workers draw the same weights above, but each draws other dropout masks.
    torch.manual_seed(args.seed + 1 + run.rank)
    model = model.cuda() if run.gpu else model
    sgd = partial(SGD, lr=base_lr, weight_decay=WEIGHT_DECAY)
    optimizer = CustomCentralizedOptimizer(
        model, world_size, sgd, use_cuda=run.gpu, grad_clip=GRAD_CLIP, average_world=True
    )
    # The schedule steps once an epoch.
    scheduler = LRLinearWarmUp(
        optimizer, init_lr=base_lr, scaled_lr=base_lr * math.sqrt(world_size),
        warmup_duration=WARMUP_EPOCHS * world_size,
    )  # fmt: skip
    averaging = NTASGD(optimizer, interval=NON_MONOTONE_INTERVAL)
    metrics = [Perplexity()]
    goal = task3_time_to_perplexity_goal(TASK.goal_on(preset.dataset, run.light))
    tracker = run.track(metrics, goal)

    def validate() -> tuple[dict[Perplexity, float], float]:
        """Return the perplexity of the whole validation text. Each worker reads its own streams."""
        batches = map(validation_text.get_batch, range(validation_text.num_batches()))
        # After the trigger, the average of the weights is validated, but training continues with
        # the weights.
        with averaging.averaged_weights():
            values, loss = validation_round(
                batches, CarriedState(model), nn.CrossEntropyLoss(), metrics, None,
                tracker=tracker, use_cuda=run.gpu,
            )  # fmt: skip
        averaging.check(values[metrics[0]])
        return values, loss

    for epoch in run.epochs(model, optimizer, scheduler, validate, extra={"averaging": averaging}):
        text.set_epoch(epoch)
        text.generate_sequence_lengths(random=True)
        train_epoch(text, model, optimizer, tracker, run.gpu, args.bf16)
        scheduler.step()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser, TASK.max_epochs)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="full",
        help="size of the model (default: full)")  # fmt: skip
    add("--batch-size", type=count, metavar="N",
        help="sequences per worker (full: 80 at rate 30; 20 takes 15)")  # fmt: skip
    add("--data", metavar="FOLDER",
        help="folder that holds the text (default: below --root-dataset)")  # fmt: skip
    add("--bf16", action="store_true", help="compute forward and backward passes in bfloat16")


if __name__ == "__main__":
    run_task(train, "task3a", add_arguments)
