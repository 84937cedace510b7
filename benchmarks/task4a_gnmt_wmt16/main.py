"""Task 4a: GNMT on WMT16 English-German, synchronous Adam, time to a BLEU of 24 (light goal: 20).

One process per worker, at most 128 sentences per worker and batch; gradients are accumulated until 2,048 sentences of
all k workers are together, averaged, and clipped before the update (Wu et al. 2016, arXiv 1609.08144). After every 30 %
of an epoch the workers translate the validation text by beam search, each its share. README.md has the whole
description, presets.py the sizes.
"""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import replace
from functools import partial

import presets
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mlbench_core.controlflow.pytorch import record_validation_stats, train_round, validation_round
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.controlflow.pytorch.translation import epoch_parts
from mlbench_core.controlflow.pytorch.worker import worker_main
from mlbench_core.controlflow.task_arguments import add_run_arguments, task_main
from mlbench_core.dataset.nlp.pytorch import BucketBatchSampler, Multi30k, TeacherForcedBatches, WMT16Dataset
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
BEAM = {"beam_size": 5, "len_norm_factor": 0.6, "len_norm_const": 5.0, "cov_penalty_factor": 0.1, "max_seq_len": 150}
DATASETS = {"wmt16": (WMT16Dataset, {"lazy": True}, {"validation": True}), "multi30k": (Multi30k, {}, {"test": True})}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def take_precision(args: argparse.Namespace, gpu: bool) -> None:
    """Fill in the precision that the command line does not give: half precision on GPUs, as the task is described."""
    if args.precision is None:
        args.precision = "fp16" if gpu else "fp32"


def scores(dataset: str) -> list[BLEUScore]:
    """The goal's measure first, then the one recorded beside it.

    The task's goal was set for lower case and international tokenization, those of Multi30k for cased text and 13a.
    """
    return [BLEUScore(), CasedBLEUScore()] if dataset == "wmt16" else [CasedBLEUScore(), BLEUScore()]


def load_data(args: argparse.Namespace, folder: str) -> tuple[WMT16Dataset | Multi30k, WMT16Dataset | Multi30k]:
    """Training and validation pairs; both data sets are validated on their test text, as published scores are."""
    kind, for_training, validation_part = DATASETS[args.dataset]
    make = partial(kind, folder, math_precision=args.precision)
    return make(train=True, max_len=MAX_LEN_TRAIN, **for_training), make(max_len=MAX_LEN_VALIDATION, **validation_part)


def sentence_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Label smoothing's loss, summed over the words of a sentence, as a mean over the sentences of a batch."""
    return LabelSmoothing(0, SMOOTHING, fast_xentropy=True)(scores.transpose(0, 1), target) / target.shape[1]


def make_optimizer(model: nn.Module, lr: float, world_size: int, gpu: bool, args: argparse.Namespace) -> Optimizer:
    """Adam on averages of all workers' gradients; in half precision with float32 weights and a loss scale."""
    adam = partial(Adam, lr=lr, betas=(0.9, 0.999), eps=1e-8)
    common = {"use_cuda": gpu, "grad_clip": GRAD_CLIP, "average_custom": True}
    if args.precision == "fp32":
        return CustomCentralizedOptimizer(model, world_size, adam, **common, overlap=args.overlap)
    if args.overlap:
        raise ConfigurationError(f"--overlap needs --precision fp32, not {args.precision}: leave it out")
    optimizer = FP16Optimizer(model, world_size, **common, **LOSS_SCALE)
    optimizer.set_optimizer(adam([optimizer.fp32_params]))
    return optimizer


def train(
    rank: int, world_size: int, run_id: str, dataset_dir: str, ckpt_run_dir: str, gpu: bool, light: bool,
    validation_only: bool, args: argparse.Namespace,
) -> Tracker:  # fmt: skip
    """Train until the goal is reached or the budget of epochs is spent."""
    take_precision(args, gpu)
    preset = presets.chosen(args)
    batch_size, update_freq = preset.divided(world_size)
    train_pairs, validation_pairs = load_data(args, args.data or dataset_dir)
    order = BucketBatchSampler(train_pairs.sizes, batch_size, seed=args.seed, rank=rank, world_size=world_size)
    in_order = BucketBatchSampler(validation_pairs.sizes, batch_size, False, rank=rank, world_size=world_size)
    share = [indices for indices in in_order if indices]  # with fewer sentences than workers some get none
    device = "cuda" if gpu else "cpu"
    batches = TeacherForcedBatches(train_pairs, order, device)
    validation_batches = TeacherForcedBatches(validation_pairs, share, device)
    references = validation_pairs.references()

    model = GNMT.preset(args.preset, train_pairs.vocab_size).to(device, DTYPES[args.precision])
    torch.manual_seed(args.seed + 1 + rank)  # the weights are the same on all workers, dropout is each worker's own
    teacher, metrics = TeacherForcedGNMT(model), scores(args.dataset)
    translator = Translator(model, train_pairs.tokenizer, **BEAM)
    optimizer = make_optimizer(model, preset.lr, world_size, gpu, args)
    updates = math.ceil(min(len(batches), args.max_batches or len(batches)) / update_freq)
    scheduler = ExponentialWarmupMultiStepLR(
        optimizer,
        preset.epochs * updates,
        preset.warmup_steps,
        preset.remain_steps,
        preset.decay_interval,
        decay_steps=4,
    )
    goal = task4_time_to_bleu_goal(TASK.goal_on(args.dataset, light))
    tracker = Tracker(metrics, run_id, rank, goal=replace(goal, metric=f"val_global_{metrics[0].name}"))
    within_epochs = Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.BEST)
    checkpointer = Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.ALL if args.checkpoint else CheckpointFreq.BEST)
    if args.resume or validation_only:
        checkpointer, model, optimizer, scheduler, tracker = Checkpointer.load(
            ckpt_run_dir, rank, model, optimizer, scheduler, tracker=tracker
        )

    def validate() -> bool:
        """Loss and BLEU of the whole validation text; each worker translates its share of it."""
        _, loss = validation_round(validation_batches, teacher, sentence_loss, [], None, tracker)
        tracker.validation_start()
        for metric in metrics:
            metric.reset()
        for indices, ((source, lengths, _), _) in zip(share, validation_batches, strict=True):
            translations, _ = translator.translate((source, lengths))
            for metric in metrics:
                metric.update(metric(translations, [references[i] for i in indices]), len(indices))
        values = {metric: metric.average().item() for metric in metrics}
        tracker.validation_end()
        for metric, value in values.items():
            logger.info("%s %.2f (%s)", metric.name, value, metric.signature)
        return record_validation_stats(values, loss, tracker, rank)

    with tracker:
        if validation_only:
            validate()
            return tracker
        if not args.resume:
            tracker.start()
        for epoch in tracker.epochs(preset.epochs, args.past_goal):
            order.set_epoch(epoch)
            for part in epoch_parts(batches, preset.validate_every, update_freq, args.max_batches):
                train_round(
                    part, teacher, optimizer, sentence_loss, [], scheduler, None, "batch",
                    tracker=tracker, update_freq=update_freq,
                    step_arguments=lambda accumulated: {"denom": world_size * len(accumulated)},  # of all workers
                )  # fmt: skip
                is_best = validate()
                if part.is_last or (tracker.goal_reached and not args.past_goal):
                    break
                within_epochs.save(tracker, model, optimizer, scheduler, is_best)
                tracker.reset_epoch_stats()  # means are those of a part
            tracker.epoch_end()
            checkpointer.save(tracker, model, optimizer, scheduler, is_best)
        tracker.publish_summary(world_size)
    return tracker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this task takes beyond the arguments that all tasks share."""
    add_run_arguments(parser)
    presets.add_arguments(parser)
    add = parser.add_argument
    add("--dataset", choices=sorted(DATASETS), default="wmt16", help="data set (default: wmt16)")
    add("--data", metavar="FOLDER", help="folder that holds the text (default: below --root-dataset)")
    add("--precision", choices=sorted(DTYPES), help="of the model (default: fp16 with --gpu, else fp32)")
    add("--overlap", action="store_true", help="send gradients during the backward pass (fp32)")


if __name__ == "__main__":
    task_main(worker_main(train), uid="task4a", add_arguments=add_arguments)
