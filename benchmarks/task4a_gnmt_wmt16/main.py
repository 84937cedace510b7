"""Task 4a: GNMT on WMT16 English-German, synchronous Adam, time to a BLEU of 24 (light goal: 20).

One process per worker, at most 128 sentences per worker and batch; gradients are accumulated until
2,048 sentences (or the nearest number that k allows) of all k workers are together, averaged, and
clipped before the update (Wu et al. 2016, arXiv 1609.08144). After every 30 % of an epoch the
workers translate the validation text by beam search, each its share. README.md describes the task,
presets.py has the sizes."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import presets
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.nlp.pytorch import (
    BucketBatchSampler,
    Multi30k,
    TeacherForcedBatches,
    WMT16Dataset,
)
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore, CasedBLEUScore
from mlbench_core.lr_scheduler.pytorch.lr import ExponentialWarmupMultiStepLR
from mlbench_core.models.pytorch.gnmt import GNMT, TeacherForcedGNMT, Translator
from mlbench_core.optim.pytorch import CustomCentralizedOptimizer, FP16Optimizer
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker

logger = logging.getLogger("mlbench.task4a")

TASK = get_task("4a")
GRAD_CLIP, SMOOTHING = 5.0, 0.1
LOSS_SCALE = {"init_scale": 2.0**10, "scale_factor": 2.0, "max_scale": 2.0**13, "scale_window": 128}
MAX_LEN_TRAIN, MAX_LEN_VALIDATION = 75, 150  # sub-words of a sentence
BEAM = {
    "beam_size": 5, "len_norm_factor": 0.6, "len_norm_const": 5.0, "cov_penalty_factor": 0.1,
    "max_seq_len": 150,
}  # fmt: skip
DATASETS = {
    "wmt16": (WMT16Dataset, {"lazy": True}, {"validation": True}),
    "multi30k": (Multi30k, {}, {"test": True}),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def take_precision(args: argparse.Namespace, gpu: bool) -> None:
    """Fill in a missing precision: half precision on GPUs, as the task is described."""
    if args.precision is None:
        args.precision = "fp16" if gpu else "fp32"


def scores(dataset: str) -> list[BLEUScore]:
    """Return the metric of the goal, then the other metric that is recorded.

    The task's goal was set for lower case and international tokenization, those of Multi30k for
    cased text and 13a."""
    lower, cased = BLEUScore(), CasedBLEUScore()
    return [lower, cased] if dataset == "wmt16" else [cased, lower]


def load_data(
    args: argparse.Namespace, folder: str
) -> tuple[WMT16Dataset | Multi30k, WMT16Dataset | Multi30k]:
    """Return training and validation pairs.

    Both data sets are validated on their test text, as published scores are.
    """
    kind, for_training, validation_part = DATASETS[args.dataset]
    make = partial(kind, folder, math_precision=args.precision)
    train = make(train=True, max_len=MAX_LEN_TRAIN, **for_training)
    return train, make(max_len=MAX_LEN_VALIDATION, **validation_part)


def sentence_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the smoothed loss, summed over the words of a sentence, as a mean over sentences."""
    loss = LabelSmoothing(0, SMOOTHING, fast_xentropy=True)
    return loss(scores.transpose(0, 1), target) / target.shape[1]


def make_optimizer(
    model: nn.Module, lr: float, world_size: int, gpu: bool, args: argparse.Namespace
) -> Optimizer:
    """Return Adam on averages of all workers' gradients.

    Half precision has float32 master weights and a loss scale.
    """
    adam = partial(Adam, lr=lr, betas=(0.9, 0.999), eps=1e-8)
    common = {"use_cuda": gpu, "grad_clip": GRAD_CLIP, "average_custom": True}
    if args.precision == "fp32":
        exchange = AllReduceAggregation(world_size, use_cuda=gpu, overlap=args.overlap)
        return CustomCentralizedOptimizer(model, world_size, adam, **common, aggregation=exchange)
    if args.overlap:
        raise ConfigurationError(
            f"--overlap needs --precision fp32, not {args.precision}: leave it out"
        )
    optimizer = FP16Optimizer(model, world_size, **common, **LOSS_SCALE)
    # Adam updates the float32 master weights, which are then copied to the half-precision model.
    optimizer.set_optimizer(adam([optimizer.fp32_params]))
    return optimizer


def translate_and_score(
    translator: Translator,
    batches: TeacherForcedBatches,
    references: Sequence[Sequence[str]],
    metrics: Sequence[BLEUScore],
    tracker: Tracker,
) -> dict[BLEUScore, float]:
    """Translate this worker's share of the text, and return the scores of all workers' shares."""
    tracker.validation_start()
    for metric in metrics:
        metric.reset()
    for ((source, lengths, _), _), texts in zip(batches, references, strict=True):
        translations, _ = translator.translate((source, lengths))
        for metric in metrics:
            metric.update(metric(translations, texts), len(texts))
    # average() sums the n-gram counts of all workers; a mean of their scores would not be the BLEU
    # of the whole text.
    values = {metric: metric.average().item() for metric in metrics}
    tracker.validation_end()
    for metric, value in values.items():
        logger.info("%s %.2f (%s)", metric.name, value, metric.signature)
    return values


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args, world_size, device = run.args, run.world_size, "cuda" if run.gpu else "cpu"
    take_precision(args, run.gpu)
    preset = presets.chosen(args)
    batch_size, update_freq = preset.divided(world_size)
    train_pairs, validation_pairs = load_data(args, args.data or run.dataset_dir)
    order = BucketBatchSampler(
        train_pairs.sizes, batch_size, seed=args.seed, rank=run.rank, world_size=world_size
    )
    in_order = BucketBatchSampler(
        validation_pairs.sizes, batch_size, False, rank=run.rank, world_size=world_size
    )
    # A batch with fewer sentences than workers leaves some workers without a sentence.
    share = list(filter(None, in_order))
    batches = TeacherForcedBatches(train_pairs, order, device)
    validation_batches = TeacherForcedBatches(validation_pairs, share, device)
    texts = validation_pairs.references()
    references = [list(map(texts.__getitem__, indices)) for indices in share]

    model = GNMT.preset(args.preset, train_pairs.vocab_size).to(device, DTYPES[args.precision])
    # All workers draw the same weights above, but each draws other dropout masks.
    torch.manual_seed(args.seed + 1 + run.rank)
    teacher, metrics = TeacherForcedGNMT(model), scores(args.dataset)
    translator = Translator(model, train_pairs.tokenizer, **BEAM)
    optimizer = make_optimizer(model, preset.lr, world_size, run.gpu, args)
    # The schedule is defined in shares of all updates, so it needs their number. The last one may
    # have fewer batches.
    updates = math.ceil(min(len(batches), args.max_batches or len(batches)) / update_freq)
    scheduler = ExponentialWarmupMultiStepLR(
        optimizer, preset.epochs * updates, preset.warmup_steps, preset.remain_steps,
        preset.decay_interval, decay_steps=4,
    )  # fmt: skip
    # The metric of the goal depends on the data set, see scores().
    goal = task4_time_to_bleu_goal(TASK.goal_on(args.dataset, run.light))
    tracker = run.track(metrics, replace(goal, metric=f"val_global_{metrics[0].name}"))

    def validate() -> tuple[dict[BLEUScore, float], float]:
        _, loss = validation_round(validation_batches, teacher, sentence_loss, [], None, tracker)
        values = translate_and_score(translator, validation_batches, references, metrics, tracker)
        return values, loss

    for epoch in run.epochs(model, optimizer, scheduler, validate, budget=preset.epochs):
        order.set_epoch(epoch)
        for part in run.parts(batches, preset.validate_every, update_freq, args.max_batches):
            train_round(
                part, teacher, optimizer, sentence_loss, [], scheduler, None, "batch",
                tracker=tracker, update_freq=update_freq,
                # The optimizer divides the sum of all workers' gradients by the number of all their
                # batches.
                step_arguments=lambda accumulated: {"denom": world_size * len(accumulated)},
            )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser)
    presets.add_arguments(parser)
    add = parser.add_argument
    add("--dataset", choices=sorted(DATASETS), default="wmt16", help="data set (default: wmt16)")
    add("--data", metavar="FOLDER",
        help="folder that holds the text (default: below --root-dataset)")  # fmt: skip
    add("--precision", choices=sorted(DTYPES),
        help="of the model (default: fp16 with --gpu, else fp32)")  # fmt: skip
    add("--overlap", action="store_true", help="send gradients during the backward pass (fp32)")


if __name__ == "__main__":
    run_task(train, "task4a", add_arguments)
