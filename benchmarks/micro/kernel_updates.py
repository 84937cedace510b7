"""Time whole updates of the translation tasks on a GPU: with the library's attention kernels, and with torch's best.

An update is that of tasks 4a and 4b with four workers: 4 batches forward and backward, and a step of Adam, in float16
with float32 master weights. Task 4b has the big Transformer and batches of 8,192 tokens; its variants are the backends
of attention. Task 4a has the big GNMT and batches of 128 sentences; its variants are ways to compute the attention
score. Sentences are random words. The longest ones of a batch have the length of the case, and the shortest half of it.

    make cuda && python benchmarks/micro/kernel_updates.py --save
    python benchmarks/micro/kernel_updates.py --device cpu --quick   # tries the script
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from _attention_batch import make_batch
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _gpu import pick_device
from torch import Tensor, nn
from torch.optim import Adam

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.models.pytorch.gnmt import GNMT, TeacherForcedGNMT
from mlbench_core.models.pytorch.gnmt import modules as gnmt_modules
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.ops.pytorch import attention_score_reference, extension
from mlbench_core.optim.pytorch import FP16Optimizer

OURS = "ours"
SUBJECT = Subject(
    "kernel_updates",
    "Updates of the translation tasks with the attention kernels and without (`kernel_updates.py`)",
    "ms",
    (OURS,),
    ("Limit: a kernel is kept if its task takes at least 1.2 times as long with the best of torch's variants.",),
)
Batch = tuple[Any, Tensor]
Update = Callable[[], None]


def optimizer_of(model: nn.Module, device: torch.device, **options: Any) -> FP16Optimizer:
    """Make Adam on float32 master weights."""
    optimizer = FP16Optimizer(model, 1, use_cuda=device.type == "cuda", average_custom=True, **options)
    optimizer.set_optimizer(Adam([optimizer.fp32_params], lr=1e-4, fused=True))
    return optimizer


def transformer_update(length: int, arguments: argparse.Namespace, device: torch.device, backend: str) -> Update:
    """Make an update of task 4b with a backend of attention."""
    words = Dictionary(symbols=[f"w{i}_" for i in range(arguments.vocabulary)])
    torch.manual_seed(arguments.seed)
    config = TransformerConfig.preset(arguments.preset, attention_backend=backend)
    with device:  # drawing the weights on the CPU would take seconds
        model = TransformerModel(config, words, words).to(device, arguments.dtype)
    optimizer = optimizer_of(model, device, init_scale=2**7)
    loss_function = LabelSmoothing(words.pad(), 0.1, fast_xentropy=True)
    batch = make_batch(length, arguments.tokens, True, device, arguments.seed)
    generator = torch.Generator(device=device).manual_seed(arguments.seed)
    shape = (batch.sentences, length)
    draw = partial(torch.randint, max(words.pad(), words.eos()) + 1, len(words), shape, generator=generator)
    target = draw(device=device).masked_fill(~batch.real, words.pad())
    # Sources are padded on the left and targets on the right, as in the task.
    source = draw(device=device).masked_fill(~batch.real.flip(1), words.pad())
    inputs = {"src_tokens": source, "src_lengths": batch.lengths, "prev_output_tokens": target}

    def update() -> None:
        optimizer.zero_grad()
        for _ in range(arguments.batches):
            optimizer.backward_loss(loss_function(model(**inputs)[0], target))
        optimizer.step(multiplier=arguments.batches * batch.lengths.sum(), denom=arguments.batches)

    return update


def gnmt_update(
    length: int, arguments: argparse.Namespace, device: torch.device, score: Callable[..., Tensor] | None, kernel: bool
) -> Update:
    """Make an update of task 4a, with the library's attention score or another function for it."""
    torch.manual_seed(arguments.seed)
    with device:
        teacher = TeacherForcedGNMT(GNMT.preset(arguments.preset, arguments.vocabulary).to(device, arguments.dtype))
    optimizer = optimizer_of(teacher, device, init_scale=2.0**10, grad_clip=5.0)
    loss_function = LabelSmoothing(0, 0.1, fast_xentropy=True)
    batch = make_batch(length, arguments.sentences * length, True, device, arguments.seed)
    words = torch.randint(4, arguments.vocabulary, (length, batch.sentences), device=device)
    words = words.masked_fill(~batch.real.T, 0)
    inputs = (words, batch.lengths, words)

    def update() -> None:
        replaced = patch.object(gnmt_modules, "attention_score", score or gnmt_modules.attention_score)
        with replaced, patch.dict(os.environ, {extension.VARIABLE: str(int(kernel))}):
            optimizer.zero_grad()
            for _ in range(arguments.batches):
                optimizer.backward_loss(loss_function(teacher(inputs).transpose(0, 1), words) / batch.sentences)
            optimizer.step(denom=arguments.batches)

    return update


def timed(make: Callable[[], Update], device: torch.device) -> Callable[[], Timed]:
    """Make a variant that is built in its first turn, the warm-up."""
    made: list[Update] = []

    def run() -> Timed:
        if not made:
            made.append(make())
            made[0]()
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        made[0]()
        wait()
        return Timed(time.perf_counter() - start)

    return run


def run_case(task: str, length: int, arguments: argparse.Namespace, device: torch.device) -> list[Row]:
    """Measure all variants of one task at one length."""
    torch.compiler.reset()  # otherwise the compiler gives up on a function after some shapes
    makers: dict[str, Callable[[], Update]]
    if task == "4b":
        make = partial(transformer_update, length, arguments, device)
        makers = {
            OURS: partial(make, "kernel"),
            "scaled_dot_product_attention": partial(make, "fused"),
        }
    else:
        of_score = partial(gnmt_update, length, arguments, device)
        makers = {
            OURS: partial(of_score, None, True),
            "blocked, tanh computed again": partial(of_score, None, False),
        }
        if not arguments.without_compiler:
            compiled = torch.compile(attention_score_reference, dynamic=False)
            makers["plain torch, compiled"] = partial(of_score, compiled, False)
    variants = {title: timed(maker, device) for title, maker in makers.items()}
    rows = measure(SUBJECT, f"task {task}, {length} positions", variants, arguments.blocks)
    print(*((row["case"], row["variant"], row["value"]) for row in rows), sep="\n", file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    parser.add_argument("--tasks", nargs="+", choices=("4a", "4b"), default=["4b", "4a"])
    parser.add_argument("--lengths", nargs="+", type=positive, default=[28, 64], help="positions")
    parser.add_argument("--tokens", type=positive, default=8192, help="positions of a batch of 4b, padding included")
    parser.add_argument("--sentences", type=positive, default=128, help="sentences of a batch of 4a")
    parser.add_argument("--batches", type=positive, default=4, help="batches of an update")
    parser.add_argument("--vocabulary", type=positive, default=32_000, help="words")
    parser.add_argument("--preset", choices=("small", "big"), default="big", help="size of the models")
    parser.add_argument("--without-compiler", action="store_true", help="leave out torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    small = {"tokens": 16, "sentences": 2, "batches": 1, "vocabulary": 20, "preset": "small"}
    arguments = parse(parser, argv, lengths=[4], without_compiler=True, **small)
    device = pick_device(arguments.device, "kernel_updates.py")
    arguments.dtype = torch.float16 if device.type == "cuda" else torch.float32
    rows = [
        row
        for task in arguments.tasks
        for length in arguments.lengths
        for row in run_case(task, length, arguments, device)
    ]
    finish(SUBJECT, rows, arguments, f"Preset {arguments.preset}, {arguments.batches} batches in an update, float16.")


if __name__ == "__main__":
    main()
