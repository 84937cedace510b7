"""Compare the losses of a Transformer with the library's attention kernels to those without them.

The small model of task 4b is trained from the same weights on the same batches, without dropout, in half precision with
float32 master weights: once with the kernels, and with two of torch's backends. Rounding makes any two of them drift
apart. The kernels are right if their distance to torch's backends is at most that between these. Pairs are
those of Multi30k if a folder with its text is given. Otherwise they are made up: each word has another word as
translation.

    make cuda && python benchmarks/micro/transformer_losses.py --data FOLDER --save
    python benchmarks/micro/transformer_losses.py --device cpu --quick   # tries the script
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from _bench import Row, Subject, finish, make_parser, parse, positive, summarize
from _gpu import DTYPES, pick_device
from torch.optim import Adam

from mlbench_core.dataset.nlp.pytorch import Multi30k, get_batches
from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.lr_scheduler.pytorch.lr import SQRTTimeDecayLRWithWarmup
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.optim.pytorch import FP16Optimizer

TORCHS = ("fused", "reference")
"""Backends without the kernels."""
LR, WARM_UP_STEPS, LABEL_SMOOTHING = 1.5e-3, 400, 0.1
LENGTHS = (5, 40)
Batch = dict[str, Any]
SUBJECT = Subject(
    "transformer_losses",
    "Training with the attention kernels and without (`transformer_losses.py`)",
    "loss per token",
    (" and ".join(TORCHS),),
    ("A value is the largest difference of two curves of the loss.",
     "Limit: the kernels differ from each torch backend by at most as much as the two torch backends from each other."),
)  # fmt: skip


def made_up_batches(words: Dictionary, tokens: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield sources of random words, padded on the left, and their word-by-word translations, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    first = max(words.pad(), words.eos()) + 1
    translation = torch.randperm(len(words) - first, generator=generator) + first
    while True:
        longest = int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=generator))
        lengths = torch.randint(LENGTHS[0], longest + 1, (max(1, tokens // (longest + 1)),), generator=generator)
        position, count = torch.arange(longest + 1), lengths.unsqueeze(1)
        content = torch.randint(first, len(words), (len(lengths), longest + 1), generator=generator)
        target = torch.where(position < count, translation[content - first], words.pad())
        target[position == count] = words.eos()
        # Sources are padded on the left and targets on the right, as in the data sets of task 4b.
        source = torch.full_like(target, words.pad())
        for row, length in enumerate(lengths.tolist()):
            source[row, -length - 1 : -1] = content[row, :length]
        source[:, -1] = words.eos()
        previous = torch.where(position <= count, target.roll(1, dims=1), words.pad())
        previous[:, 0] = words.eos()
        inputs = {"src_tokens": source, "src_lengths": lengths + 1, "prev_output_tokens": previous}
        yield {
            "net_input": {name: tensor.to(device) for name, tensor in inputs.items()},
            "target": target.to(device),
            "ntokens": int((lengths + 1).sum()),
        }


def multi30k_batches(pairs: Any, tokens: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Yield batches of the training pairs, epoch after epoch."""
    for epoch in itertools.count():
        for indices in get_batches(pairs, tokens, seed=seed + epoch):
            batch = pairs.collater([pairs[i] for i in indices])
            batch["net_input"] = {name: tensor.to(device) for name, tensor in batch["net_input"].items()}
            yield batch | {"target": batch["target"].to(device)}


def train(
    backend: str, words: Dictionary, batches: Iterator[Batch], arguments: argparse.Namespace, device: torch.device
) -> list[float]:
    """Train with a backend of attention; return the loss per token of each step."""
    torch.manual_seed(arguments.seed)
    config = TransformerConfig.preset(
        "small", dropout=0.0, attention_dropout=0.0, relu_dropout=0.0, attention_backend=backend
    )
    model = TransformerModel(config, words, words).to(device, DTYPES[arguments.dtype])
    optimizer = FP16Optimizer(model, 1, use_cuda=device.type == "cuda", average_custom=True, init_scale=2**7)
    optimizer.set_optimizer(Adam([optimizer.fp32_params], lr=LR, betas=(0.9, 0.98), eps=1e-9))
    scheduler = SQRTTimeDecayLRWithWarmup(optimizer, base_lr=LR, warmup_init_lr=0.0, warmup_steps=WARM_UP_STEPS)
    loss_function = LabelSmoothing(words.pad(), LABEL_SMOOTHING, fast_xentropy=True)
    losses = []
    for batch in itertools.islice(batches, arguments.steps):
        scores, _ = model(**batch["net_input"])
        loss = loss_function(scores, batch["target"])
        optimizer.zero_grad()
        optimizer.backward_loss(loss)
        optimizer.step(multiplier=batch["ntokens"], denom=1)
        scheduler.step()
        # Kept on the device: reading a loss would wait for the GPU in every step.
        losses.append(loss.detach() / batch["ntokens"])
    return torch.stack(losses).tolist()


def largest_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """Return the largest difference of two curves and its step, counted from 1."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences), 1 + differences.index(max(differences))


def compare(curves: dict[str, list[float]], case: str) -> list[Row]:
    """Make a row for each pair of curves: torch's backends, then the kernels and each of these."""
    pairs = [TORCHS, *((name, other) for name in curves if name not in TORCHS for other in TORCHS)]
    rows = []
    for one, other in pairs:
        difference, step = largest_difference(curves[one], curves[other])
        expected = largest_difference(*(curves[name] for name in TORCHS))[0]
        peers = {SUBJECT.peers[0]: [expected]} if expected else {}
        extra = {"step": step, f"last loss, {one}": curves[one][-1], f"last loss, {other}": curves[other][-1]}
        rows.append({"case": case, "variant": f"{one} and {other}", **summarize([difference], peers), "extra": extra})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Train and compare."""
    parser = make_parser(__doc__, blocks=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    parser.add_argument("--backend", default="kernel", help="backend of attention to compare with torch's")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--tokens", type=positive, default=2048, help="most tokens of a step")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--data", metavar="FOLDER", help="folder with Multi30k's text (default: made-up pairs)")
    parser.add_argument("--vocabulary", type=positive, default=1000, help="words of made-up pairs")
    parser.add_argument("--seed", type=int, default=42, help="of weights and batches")
    arguments = parse(parser, argv, steps=2, tokens=128, vocabulary=5, dtype="bfloat16")
    device = pick_device(arguments.device, "transformer_losses.py")
    if arguments.data:
        pairs = Multi30k(arguments.data, train=True).for_transformer(seq_len_multiple=8)
        words, make_batches = pairs.dictionary, partial(multi30k_batches, pairs)
    else:
        words = Dictionary(symbols=[f"w{i}_" for i in range(arguments.vocabulary)])
        make_batches = partial(made_up_batches, words)
    curves = {}
    for backend in dict.fromkeys((arguments.backend, *TORCHS)):
        batches = make_batches(arguments.tokens, arguments.seed, device)
        curves[backend] = train(backend, words, batches, arguments, device)
    conditions = f"Preset small, at most {arguments.tokens:,} tokens per step, no dropout, seed {arguments.seed}."
    data = "Multi30k" if arguments.data else "made-up pairs"
    rows = compare(curves, f"{data}, {arguments.steps} steps, {arguments.dtype}")
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
