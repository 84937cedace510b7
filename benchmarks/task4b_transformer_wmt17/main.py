"""Task 4b: Transformer on WMT17 English-German, synchronous Adam, time to BLEU 25 (light goal: 20).

One process per worker; an update takes 2^17 tokens of all k workers, each of which reads at most
8,192 at a time and accumulates gradients of 2^17 / (8192 k) batches, rounded up. They are summed
over the workers and divided by the tokens of all of them. The rate rises for 1,000 updates to
1.976e-3 and then falls with the root of the updates (Vaswani et al. 2017, arXiv 1706.03762). The
model is validated after every 30 % of an epoch. README.md describes the task."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sizes
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.pytorch.translation import train_round_by_tokens, translation_round
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.nlp.pytorch import Multi30k, WMT17Dataset, get_batches, shard_batches
from mlbench_core.dataset.nlp.pytorch.pair_datasets import TransformerPairs
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore, CasedBLEUScore, MLBenchMetric
from mlbench_core.lr_scheduler.pytorch.lr import SQRTTimeDecayLRWithWarmup
from mlbench_core.models.pytorch.transformer import (
    SequenceGenerator,
    TransformerConfig,
    TransformerModel,
)
from mlbench_core.optim.pytorch import CustomCentralizedOptimizer, FP16Optimizer
from mlbench_core.tasks import get_task

logger = logging.getLogger("mlbench.task4b")

TASK = get_task("4b")
BETAS, EPS = (0.9, 0.98), 1e-9
LABEL_SMOOTHING = 0.1
MAX_LEN_TRAIN = 80  # tokens of a sentence
LOSS_SCALING = {"init_scale": 2**7, "scale_factor": 2, "scale_window": 2_000}
BEAM_SIZE, LENGTH_PENALTY = 4, 0.6


def scores(dataset: str) -> list[BLEUScore]:
    """Return the metric of the goal, then the other metric that is recorded.

    The task's goal was set for sub-words in lower case, those of Multi30k for detokenized text."""
    raw, cased = BLEUScore(use_raw=True, lowercase=True), CasedBLEUScore()
    return [raw, cased] if dataset == "wmt17" else [cased, raw]


def load_data(args: argparse.Namespace, folder: str) -> tuple[TransformerPairs, TransformerPairs]:
    """Return the pairs for training and for translation."""
    # Lengths of float16 batches fit tensor cores.
    multiple = {"seq_len_multiple": 8 if args.precision == "fp16" else 1}
    # One more position than tokens, for the end symbol.
    for_training = {"max_positions": (MAX_LEN_TRAIN + 1, MAX_LEN_TRAIN + 1), **multiple}
    if args.dataset == "wmt17":
        load = partial(WMT17Dataset, folder, download=True, vocabulary=args.vocabulary)
        train = load(train=True, **for_training)
        if args.vocabulary:
            # Results have the checksum, because the path of the file does not show its content.
            args.options["vocabulary"] = train.part.subwords.checksum
        return train, load(**{args.evaluate_on: True}, **multiple)
    if args.vocabulary:
        raise ConfigurationError(
            f"--dataset must be wmt17 with --vocabulary, not {args.dataset}: leave out --vocabulary"
        )
    train, evaluated = Multi30k(folder, train=True), Multi30k(folder, **{args.evaluate_on: True})
    return train.for_transformer(**for_training), evaluated.for_transformer(**multiple)


def make_optimizer(
    model: TransformerModel, world_size: int, args: argparse.Namespace, gpu: bool
) -> CustomCentralizedOptimizer | FP16Optimizer:
    """Return Adam on sums of all workers' gradients, divided by the ``denom`` of each step."""
    adam = partial(Adam, lr=args.lr, betas=BETAS, eps=EPS, fused=True)
    if args.precision != "fp16":
        return CustomCentralizedOptimizer(
            model, world_size, adam, use_cuda=gpu, average_custom=True
        )
    optimizer = FP16Optimizer(
        model.half(), world_size, use_cuda=gpu, average_custom=True, **LOSS_SCALING
    )
    # Adam updates the float32 master weights, which are then copied to the half-precision model.
    optimizer.set_optimizer(adam([optimizer.fp32_params]))
    return optimizer


def translate(
    batch: Mapping[str, Any],
    generator: SequenceGenerator,
    evaluated: TransformerPairs,
    references: Sequence[str],
    metrics: Sequence[BLEUScore],
) -> list[tuple[list[str], list[str]]]:
    """Return translations and references for each metric: both in sub-words, or both in text."""
    divided, targets = generator.translate_batch(batch, remove_bpe=None, ignore_case=False)
    texts = list(map(evaluated.detokenize, divided))
    own_references = [references[i] for i in batch["id"].tolist()]
    pairs = []
    for metric in metrics:
        pairs.append((divided, targets) if metric.use_raw else (texts, own_references))
    return pairs


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args, rank, world_size = run.args, run.rank, run.world_size
    sizes.take_precision(args, run.gpu)
    pairs, evaluated = load_data(args, args.data or run.dataset_dir)
    references, metrics = evaluated.references(), scores(args.dataset)
    # drop_last=False, because BLEU needs every sentence; in training, remaining batches (fewer than
    # k) are left out.
    every_batch = get_batches(evaluated, args.max_tokens, shuffle=False)
    share = shard_batches(every_batch, rank, world_size, drop_last=False)
    tokens, frequency = sizes.divided(args, world_size)
    # A batch must be able to hold the longest pair.
    tokens = max(tokens, int(pairs.sizes.max()))
    dictionary = pairs.dictionary
    model = TransformerModel(TransformerConfig.preset(args.preset), dictionary, dictionary)
    # All workers draw the same weights above, but each draws other dropout masks.
    torch.manual_seed(args.seed + 1 + rank)
    model = model.cuda() if run.gpu else model
    optimizer = make_optimizer(model, world_size, args, run.gpu)
    scheduler = SQRTTimeDecayLRWithWarmup(
        optimizer, base_lr=args.lr, warmup_init_lr=0.0, warmup_steps=args.warmup_steps
    )
    loss_function = LabelSmoothing(dictionary.pad(), LABEL_SMOOTHING, fast_xentropy=True)
    generator = SequenceGenerator(
        model, dictionary, dictionary, beam_size=BEAM_SIZE, len_penalty=LENGTH_PENALTY
    )
    texts = partial(
        translate, generator=generator, evaluated=evaluated, references=references, metrics=metrics
    )
    # The metric of the goal depends on the data set, see scores().
    goal = task4_time_to_bleu_goal(TASK.goal_on(args.dataset, run.light))
    tracker = run.track(metrics, replace(goal, metric=f"val_global_{metrics[0].name}"))

    def validate() -> tuple[dict[MLBenchMetric, float], float]:
        loader = DataLoader(evaluated, batch_sampler=share, collate_fn=evaluated.collater)
        values, loss = translation_round(
            loader, model, loss_function, texts, metrics, use_cuda=run.gpu, tracker=tracker
        )
        for metric in metrics:
            logger.info("%s %.2f (%s)", metric.name, values[metric], metric.signature)
        return values, loss

    for epoch in run.epochs(model, optimizer, scheduler, validate):
        # The seed changes with the epoch, so batches are resampled and other remaining batches are
        # left out.
        every_batch = get_batches(pairs, tokens, seed=args.seed + epoch)
        batches = shard_batches(every_batch, rank, world_size)
        loader = DataLoader(pairs, batch_sampler=batches, collate_fn=pairs.collater)
        for part in run.parts(loader, args.validate_every, frequency):
            train_round_by_tokens(
                part, model, optimizer, loss_function, scheduler, update_freq=frequency,
                autocast=torch.bfloat16 if args.precision == "bf16" else None,
                use_cuda=run.gpu, tracker=tracker,
            )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser, TASK.max_epochs)
    add = parser.add_argument
    add("--dataset", choices=("wmt17", "multi30k"), default="wmt17",
        help="data set (default: wmt17)")  # fmt: skip
    add("--data", metavar="FOLDER",
        help="folder that holds its text (default: below --root-dataset)")  # fmt: skip
    add("--vocabulary", metavar="FILE",
        help="sub-tokens of MLPerf's reference, for wmt17 (default: learned sub-words)",
    )  # fmt: skip
    add("--evaluate-on", choices=("test", "validation"), default="test",
        help="part to translate (default: test)")  # fmt: skip
    sizes.add_arguments(parser)


if __name__ == "__main__":
    run_task(train, "task4b", add_arguments, sizes.take_defaults)
