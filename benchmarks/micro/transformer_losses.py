"""Does the Transformer learn the same with the library's attention kernels as without them?

Trains the small model of task 4b from the same weights on the same batches, without dropout, in half precision with
float32 master weights: with the kernels, and by two of torch's ways. Rounding makes any two of them drift apart; the
kernels are right if their losses differ no more from torch's than the losses of torch's two ways from one another.
Pairs are those of Multi30k if there is a folder with its text, or made up: a word's translation is another word.

    make cuda && python benchmarks/micro/transformer_losses.py --data FOLDER --append-results
    python benchmarks/micro/transformer_losses.py --steps 3 --backend kernel --tokens 64   # tries it without a GPU
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import markdown, pick_device, where, write_csv
from _sections import RESULTS, update_section
from torch.optim import Adam

from mlbench_core.dataset.nlp.pytorch import Multi30k, get_batches
from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.errors import require
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.lr_scheduler.pytorch.lr import SQRTTimeDecayLRWithWarmup
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.ops.pytorch import extension
from mlbench_core.optim.pytorch import FP16Optimizer

HEADING = "## `transformer_losses.py`: training with the attention kernels and without"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TORCHS = ("fused", "reference")
"""Backends that have nothing of the kernels."""
STEPS = 200
LR, WARM_UP_STEPS, LABEL_SMOOTHING = 1.5e-3, 400, 0.1
LENGTHS = (5, 40)
Batch = dict[str, Any]


def made_up_batches(words: Dictionary, tokens: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Sources of random words, padded on the left; targets of the same length, each word translated, on the right."""
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
    """Batches of the training pairs, epoch after epoch."""
    for epoch in itertools.count():
        for indices in get_batches(pairs, tokens, seed=seed + epoch):
            batch = pairs.collater([pairs[i] for i in indices])
            batch["net_input"] = {name: tensor.to(device) for name, tensor in batch["net_input"].items()}
            yield batch | {"target": batch["target"].to(device)}


def train(backend: str, words: Dictionary, batches: Iterator[Batch], arguments: argparse.Namespace,
          device: torch.device) -> list[float]:  # fmt: skip
    """Train with a backend of attention; the loss of a token in each step."""
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
        losses.append(loss.detach() / batch["ntokens"])
    return torch.stack(losses).tolist()


def largest_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """The largest difference of two curves, and the step (from 1) where it is."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(differences), 1 + differences.index(max(differences))


def conclusion(curves: dict[str, list[float]]) -> str:
    """Differences of all pairs of curves in words, and how ours compare with torch's own."""
    fused, reference = TORCHS
    torchs, at = largest_difference(curves[fused], curves[reference])
    lines = [f"Largest difference of two losses, {fused} and {reference}: {torchs:.2e} (step {at})."]
    for backend in curves.keys() - TORCHS:
        for other in TORCHS:
            ours, at = largest_difference(curves[backend], curves[other])
            times = f", {ours / torchs:.2f} times that" if torchs else ""
            lines.append(f"Largest difference of two losses, {backend} and {other}: {ours:.2e} (step {at}){times}.")
    return "\n".join(lines) + "\n"


def report(curves: dict[str, list[float]], arguments: argparse.Namespace, device: torch.device) -> str:
    """The text of the section."""
    steps = sorted({1, *range(20, arguments.steps + 1, 20), arguments.steps})
    cells = [[step, *(f"{curve[step - 1]:.5f}" for curve in curves.values())] for step in steps]
    data = "Multi30k" if arguments.data else "made-up pairs"
    return (
        f"Preset small, {data}, at most {arguments.tokens:,} tokens a step, {arguments.dtype}, no dropout, seed "
        f"{arguments.seed}; {where(device)}; {date.today()}.\n\n{conclusion(curves)}\n"
        f"{markdown(('step', *curves), cells)}"
    )


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """The curves, and below them how far each is from the first of torch's."""
    require("matplotlib", "charts")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for backend, curve in curves.items():
        upper.plot(range(1, len(curve) + 1), curve, label=backend)
        if backend != TORCHS[0]:
            gaps = [a - b for a, b in zip(curve, curves[TORCHS[0]], strict=True)]
            lower.plot(range(1, len(curve) + 1), gaps, label=f"{backend} - {TORCHS[0]}")
    upper.set(ylabel="loss of a token")
    lower.set(xlabel="step", ylabel="difference")
    for axes in (upper, lower):
        axes.legend()
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda; where there is none cpu, but only if --steps is given"
    )
    parser.add_argument("--backend", default="kernel", help="backend of attention to hold against torch's")
    parser.add_argument("--steps", type=int, help="default: 200")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--data", metavar="FOLDER", help="folder with Multi30k's text (default: made-up pairs)")
    parser.add_argument("--vocabulary", type=int, default=1000, help="words of made-up pairs")
    parser.add_argument("--seed", type=int, default=42, help="of weights and batches")
    parser.add_argument("--output", type=Path, default=Path("transformer-losses-results"), help="folder for CSV, plot")
    parser.add_argument("--append-results", action="store_true", help=f"write the section into {RESULTS.name}")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is no number of steps; at least 1")
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() or arguments.steps is None else "cpu"
    arguments.steps = arguments.steps or STEPS
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Train and compare."""
    arguments = parse(argv)
    device = pick_device(arguments.device, "transformer_losses.py")
    if device is None:
        return
    if reason := extension.why_not():
        print(f"The backend {arguments.backend!r} runs its plain implementation: {reason}.")
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
    section = report(curves, arguments, device)
    print(section)
    rows = [
        {"step": step, **dict(zip(curves, losses, strict=True))}
        for step, losses in enumerate(zip(*curves.values(), strict=True), start=1)
    ]
    write_csv(rows, arguments.output / "transformer_losses.csv")
    plot(curves, arguments.output / "transformer_losses.png")
    if arguments.append_results:
        update_section(RESULTS, HEADING, section)


if __name__ == "__main__":
    main()
