"""Sentences per second of beam search: the batched search against a Python loop over sentences and hypotheses.

The same Transformer (random weights, preset "small"), the same rules, the same translations. The loop is what one
writes first: it translates one sentence after the other and feeds each hypothesis to the model by itself, with the keys
and values of its earlier tokens kept, as in the batched search. Sentences have mixed lengths, and a translation is at
most 1.2 times as long as its source and 5 tokens, so they end at different steps. Blocks of both ways alternate; the
median of the blocks' ratios counts.

    python benchmarks/micro/decoding.py --append-results
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.models.pytorch.transformer import SequenceGenerator, TransformerConfig, TransformerModel
from mlbench_core.models.pytorch.transformer.modules import IncrementalState

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## `decoding.py`: beam search"
MAXLEN_A, MAXLEN_B, LEN_PENALTY = 1.2, 5, 0.6
LOOP, BATCHED = "Python loop over hypotheses", "`SequenceGenerator`, whole batch"
Translation = tuple[list[int], float]


class Hypothesis(NamedTuple):
    """One of the loop's hypotheses; the last token is not yet fed to the model."""

    tokens: list[int]
    log_prob: float
    state: IncrementalState


class HypothesisLoop:
    """Beam search a sentence at a time and a hypothesis at a time."""

    def __init__(self, model: TransformerModel, words: Dictionary, beam_size: int) -> None:
        self.model, self.beam_size = model, beam_size
        self.eos, self.pad = words.eos(), words.pad()

    def translate(self, source: Tensor, most: int) -> Translation:
        """The best translation of one source, at most ``most`` tokens with the end symbol, and its score."""
        encoded = self.model.encoder(source.unsqueeze(0))
        live, finished = [Hypothesis([], 0.0, IncrementalState())], []
        for length in range(1, most + 1):
            candidates = [c for h in live for c in self.continue_one(h, *encoded, must_end=length == most)]
            candidates.sort(key=lambda candidate: -candidate.log_prob)
            best = candidates[: self.beam_size]
            divisor = ((5 + length) / 6) ** LEN_PENALTY
            finished += [(h.tokens, h.log_prob / divisor) for h in best if h.tokens[-1] == self.eos]
            if len(finished) >= self.beam_size:
                break
            live = [h for h in candidates if h.tokens[-1] != self.eos][: self.beam_size]
        return max(finished, key=lambda translation: translation[1])

    def continue_one(self, parent: Hypothesis, encoder_out: Tensor, mask: Tensor, must_end: bool) -> list[Hypothesis]:
        """The likeliest continuations of a hypothesis: one more than the beam, as one may end."""
        newest = torch.tensor([[parent.tokens[-1] if parent.tokens else self.eos]])
        state = IncrementalState(parent.state)  # caches are replaced, not changed: brothers can share the old ones
        scores, _ = self.model.decoder(newest, encoder_out, mask, state, before=len(parent.tokens))
        log_probs = scores[0, -1].log_softmax(dim=-1)
        log_probs[self.pad] = float("-inf")
        if len(parent.tokens) == 0:
            log_probs[self.eos] = float("-inf")  # at least one word
        if must_end:
            return [Hypothesis([*parent.tokens, self.eos], parent.log_prob + log_probs[self.eos].item(), state)]
        values, tokens = log_probs.topk(self.beam_size + 1)
        return [
            Hypothesis([*parent.tokens, token], parent.log_prob + value, state)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
        ]


def by_loop(loop: HypothesisLoop, sources: Tensor, lengths: Tensor) -> list[Translation]:
    """Translate all sentences, one after the other."""
    with torch.no_grad():
        return [
            loop.translate(source[len(source) - length :], int(MAXLEN_A * length + MAXLEN_B) + 1)
            for source, length in zip(sources, lengths.tolist(), strict=True)
        ]


def by_batch(generator: SequenceGenerator, sources: Tensor, lengths: Tensor) -> list[Translation]:
    """Translate all sentences at once."""
    found = generator.generate(sources, lengths, MAXLEN_A, MAXLEN_B)
    return [(best, score) for (best,), score in zip(found.to_lists(), found.scores[:, 0].tolist(), strict=True)]


def make_sources(sentences: int, words: Dictionary, seed: int) -> tuple[Tensor, Tensor]:
    """Random sources of 5 to 25 tokens, padded on the left, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 26, (sentences,), generator=generator)
    sources = torch.randint(2, len(words), (sentences, 25), generator=generator)
    sources[:, -1] = words.eos()
    sources[torch.arange(25) < 25 - lengths.unsqueeze(1)] = words.pad()
    return sources, lengths


def make_model(words: Dictionary, seed: int) -> TransformerModel:
    """A model whose scores differ enough that rounding does not choose between hypotheses."""
    torch.manual_seed(seed)
    config = TransformerConfig.preset("small", share_all_embeddings=False)
    model = TransformerModel(config, words, words).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(4.0)
    return model


def check(expected: Sequence[Translation], found: Sequence[Translation]) -> None:
    """Both ways have to give the same translations with the same scores."""
    for number, ((tokens, score), (others, other)) in enumerate(zip(expected, found, strict=True)):
        if tokens != others or abs(score - other) > 1e-3 * max(1.0, abs(score)):
            raise SystemExit(f"sentence {number}: the loop found {tokens} ({score}), the batch {others} ({other})")


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each block, after one of each that warms up and is compared."""
    words = Dictionary(symbols=[f"w{i}_" for i in range(arguments.vocabulary - 2)])
    model = make_model(words, arguments.seed)
    sources, lengths = make_sources(arguments.sentences, words, arguments.seed)
    loop = HypothesisLoop(model, words, arguments.beam_size)
    generator = SequenceGenerator(model, words, words, beam_size=arguments.beam_size, len_penalty=LEN_PENALTY)
    ways = {LOOP: lambda: by_loop(loop, sources, lengths), BATCHED: lambda: by_batch(generator, sources, lengths)}
    check(ways[LOOP](), ways[BATCHED]())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.blocks):
        for name, translate in ways.items():
            start = time.perf_counter()
            translate()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> str:
    """A section of RESULTS.md."""
    lines = [
        HEADING,
        "",
        f"Transformer of preset small, {arguments.vocabulary:,} symbols, random weights; {arguments.sentences} sources "
        f"of 5 to 25 tokens, beam {arguments.beam_size};",
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s); medians of {arguments.blocks} alternating "
        "blocks. Both ways give the same translations.",
        "Limit: at least 5 times the loop.",
        "",
        "| way | sentences/s | range | times the loop |",
        "|---|---|---|---|",
    ]
    for name, blocks in seconds.items():
        speeds = [arguments.sentences / block for block in blocks]
        ratio = median(loop / own for loop, own in zip(seconds[LOOP], blocks, strict=True))
        lines.append(f"| {name} | {median(speeds):.1f} | {min(speeds):.1f} to {max(speeds):.1f} | {ratio:.1f} |")
    return "\n".join(lines) + "\n"


def append_results(section: str) -> None:
    """Write the section into RESULTS.md, in place of the one there or at the end."""
    text = RESULTS.read_text()
    pattern = re.compile(re.escape(HEADING) + r"\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(text):
        text = pattern.sub(lambda _: section + "\n", text).rstrip() + "\n"
    else:
        text = f"{text.rstrip()}\n\n{section}"
    RESULTS.write_text(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--beam-size", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--blocks", type=int, default=3, help="blocks of each way; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the seconds of each block")
    parser.add_argument("--append-results", action="store_true", help=f"write the table into {RESULTS.name}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    seconds = measure(arguments)
    section = report(seconds, arguments)
    print(section)
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds, indent=2))
    if arguments.append_results:
        append_results(section)


if __name__ == "__main__":
    main()
