"""Task 3a: AWD-LSTM on WikiText-2, synchronous SGD, time to a validation perplexity of 70 (light goal: 90).

One process per worker, 80 sequences a worker, a disjoint part of the text each; gradients are averaged over the k
workers before every update, then clipped. The rate is 30 sqrt(k) after a linear warm-up of 3 k epochs, times the
batch's length over 70. SGD becomes averaged SGD when validation has stood still for 5 epochs (Merity et al. 2017,
arXiv 1708.02182). README.md beside this file has the whole description.
"""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer

from mlbench_core.controlflow.pytorch import record_train_batch_stats, record_validation_stats, validation_round
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.controlflow.pytorch.worker import worker_main
from mlbench_core.controlflow.task_arguments import add_run_arguments, count, task_main
from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset
from mlbench_core.evaluation.goals import task3_time_to_perplexity_goal
from mlbench_core.evaluation.pytorch.criterion import ActivationRegularization
from mlbench_core.evaluation.pytorch.metrics import Perplexity
from mlbench_core.lr_scheduler.pytorch.lr import LRLinearWarmUp
from mlbench_core.models.pytorch.language_models import CarriedState, LSTMLanguageModel, detached
from mlbench_core.optim.pytorch import NTASGD, CustomCentralizedOptimizer, scaled_rate
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker

logger = logging.getLogger("mlbench.task3a")

TASK = get_task("3a")
BASE_LR = 30.0  # of one worker with as many sequences as its preset has
WEIGHT_DECAY = 1.2e-6
GRAD_CLIP = 0.25
WARMUP_EPOCHS = 3  # for each worker
NON_MONOTONE_INTERVAL = 5  # validations: SGD averages once one is worse than the best before the last 5
VALIDATION_SEQUENCES = 10  # of all workers


@dataclass(frozen=True)
class Preset:
    """A size of the task: the model's arguments, and how the text is cut into batches."""

    model: dict[str, Any]
    sequences: int  # a worker
    bptt: int
    dataset: str | None = None  # whose goal it has; None is the task's own


FULL = {"ninp": 400, "nhid": 1150, "nlayers": 3,
        "dropout": 0.4, "dropouth": 0.2, "dropouti": 0.65, "dropoute": 0.1, "wdrop": 0.5}  # fmt: skip
SMALL = {"ninp": 200, "nhid": 400, "nlayers": 2,
         "dropout": 0.2, "dropouth": 0.1, "dropouti": 0.2, "dropoute": 0.0, "wdrop": 0.1}  # fmt: skip
PRESETS = {"full": Preset(FULL, 80, 70), "small": Preset(SMALL, 20, 35, dataset="wikitext2-small")}


def base_rate(preset_sequences: int, sequences: int | None) -> float:
    """Rate of one worker, which goes with the root of its sequences: 30 for 80 of them, 15 for 20."""
    return BASE_LR * math.sqrt((sequences or preset_sequences) / preset_sequences)


def train_epoch(
    text: Wikitext2Dataset, model: nn.Module, optimizer: Optimizer, tracker: Tracker, gpu: bool, bf16: bool
) -> None:
    """One pass over this worker's part of the text; back-propagation ends at each batch's start, the state goes on."""
    regularization = ActivationRegularization(alpha=2.0, beta=1.0)
    hidden = None
    model.train()
    tracker.train()
    for i in range(text.num_batches()):
        tracker.batch_start()
        words, next_words = text.get_batch(i, cuda=gpu)
        tracker.record_batch_load()
        optimizer.zero_grad()
        hidden = model.init_hidden(words.shape[1]) if hidden is None else detached(hidden)
        tracker.record_batch_init()
        with torch.autocast(words.device.type, torch.bfloat16, enabled=bf16):
            scores, hidden, raw, dropped = model(words, hidden, return_h=True)
        tracker.record_batch_fwd_pass()
        loss = F.cross_entropy(scores.float(), next_words)
        penalty = regularization(dropped[-1].float(), raw[-1].float())
        tracker.record_batch_comp_loss()
        (loss + penalty).backward()
        tracker.record_batch_backprop()
        with scaled_rate(optimizer, len(words) / text.bptt):
            optimizer.step(tracker=tracker)
        tracker.batch_end(samples=words.shape[1], tokens=words.numel())
        record_train_batch_stats(i, loss.detach(), scores, None, tracker, text.num_batches())


def train(
    rank: int, world_size: int, run_id: str, dataset_dir: str, ckpt_run_dir: str, gpu: bool, light: bool,
    validation_only: bool, args: argparse.Namespace,
) -> Tracker:  # fmt: skip
    """Train until the goal is reached or the budget of epochs is spent."""
    preset, data = PRESETS[args.preset], args.data or dataset_dir
    sequences = args.batch_size or preset.sequences
    base_lr = base_rate(preset.sequences, args.batch_size)
    text = Wikitext2Dataset(data, preset.bptt, train=True, seed=args.seed)
    text.generate_batches(sequences * world_size, sequences, rank)
    validation_text = Wikitext2Dataset(data, preset.bptt, valid=True)
    validation_text.generate_batches(VALIDATION_SEQUENCES, rank=rank, world_size=world_size)

    model = LSTMLanguageModel(len(text.dictionary), tie_weights=True, **preset.model)
    torch.manual_seed(args.seed + 1 + rank)  # the weights are the same on all workers, dropout is each worker's own
    model = model.cuda() if gpu else model
    optimizer = CustomCentralizedOptimizer(
        model,
        world_size,
        partial(SGD, lr=base_lr, weight_decay=WEIGHT_DECAY),
        use_cuda=gpu,
        grad_clip=GRAD_CLIP,
        average_world=True,
    )
    scheduler = LRLinearWarmUp(
        optimizer,
        init_lr=base_lr,
        scaled_lr=base_lr * math.sqrt(world_size),
        warmup_duration=WARMUP_EPOCHS * world_size,  # it steps once an epoch
    )
    averaging = NTASGD(optimizer, interval=NON_MONOTONE_INTERVAL)
    metrics = [Perplexity()]
    goal = task3_time_to_perplexity_goal(TASK.goal_on(preset.dataset, light))
    tracker = Tracker(metrics, run_id, rank, goal=goal, minimize=True)
    checkpointer = Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.ALL if args.checkpoint else CheckpointFreq.BEST)
    if args.resume or validation_only:
        checkpointer, model, optimizer, scheduler, tracker = Checkpointer.load(
            ckpt_run_dir, rank, model, optimizer, scheduler, tracker=tracker, extra={"averaging": averaging}
        )

    def validate() -> bool:
        """Perplexity of the whole validation text, of which each worker reads its streams."""
        batches = (validation_text.get_batch(i) for i in range(validation_text.num_batches()))
        with averaging.averaged_weights():
            values, loss = validation_round(
                batches, CarriedState(model), nn.CrossEntropyLoss(), metrics, None, tracker=tracker, use_cuda=gpu,
            )  # fmt: skip
        averaging.check(values[metrics[0]])
        is_best = record_validation_stats(values, loss, tracker, rank)
        logger.info("%s", tracker)
        return is_best

    with tracker:
        if validation_only:
            validate()
            return tracker
        if not args.resume:
            tracker.start()
        for epoch in tracker.epochs(args.epochs, args.past_goal):
            text.set_epoch(epoch)
            text.generate_sequence_lengths(random=True)
            train_epoch(text, model, optimizer, tracker, gpu, args.bf16)
            is_best = validate()
            scheduler.step()
            tracker.epoch_end()
            checkpointer.save(tracker, model, optimizer, scheduler, is_best, extra={"averaging": averaging})
        tracker.publish_summary(world_size)
    return tracker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this task takes beyond the arguments that all tasks share."""
    add_run_arguments(parser, TASK.max_epochs)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="full", help="size of the model (default: full)")
    add("--batch-size", type=count, metavar="N", help="sequences per worker (full: 80 at rate 30; 20 takes 15)")
    add("--data", metavar="FOLDER", help="folder that holds the text (default: below --root-dataset)")
    add("--bf16", action="store_true", help="compute forward and backward passes in bfloat16")


if __name__ == "__main__":
    task_main(worker_main(train), uid="task3a", add_arguments=add_arguments)
