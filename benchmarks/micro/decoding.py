"""Time beam search: the batched search against a Python loop over sentences and hypotheses.

Both use the same Transformer (random weights, preset "small") and the same rules, and must find the
same translations. The loop is the obvious first version: it translates one sentence after the other
and feeds each hypothesis to the model separately. It keeps the keys and values of earlier tokens,
as the batched search does. Sentences have mixed lengths, and a translation has at most 1.2 times
the tokens of its source plus 5, so translations end at different steps.

    python benchmarks/micro/decoding.py [--save]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from _bench import Subject, finish, make_parser, measure, parse, positive
from torch import Tensor

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.models.pytorch.transformer import (
    SequenceGenerator,
    TransformerConfig,
    TransformerModel,
)
from mlbench_core.models.pytorch.transformer.modules import IncrementalState

MAXLEN_A, MAXLEN_B, LEN_PENALTY = 1.2, 5, 0.6
LOOP, BATCHED = "Python loop over hypotheses", "SequenceGenerator, whole batch"
SUBJECT = Subject(
    "decoding",
    "Beam search (`decoding.py`)",
    "sentences/s",
    (LOOP,),
    ("Searching for the whole batch at once is 15 times as fast as a loop over hypotheses.",
     "Limit: at least 5 times; both variants must give the same translations."),
)  # fmt: skip
Translation = tuple[list[int], float]


class Hypothesis(NamedTuple):
    """One of the loop's hypotheses. Its last token has not been fed to the model yet."""

    tokens: list[int]
    log_prob: float
    state: IncrementalState


class HypothesisLoop:
    """Beam search that handles one sentence and one hypothesis at a time."""

    def __init__(self, model: TransformerModel, words: Dictionary, beam_size: int) -> None:
        self.model, self.beam_size = model, beam_size
        self.eos, self.pad = words.eos(), words.pad()

    def translate(self, source: Tensor, most: int) -> Translation:
        """Return the best translation of at most ``most`` tokens with the end symbol; its score."""
        encoded = self.model.encoder(source.unsqueeze(0))
        live, finished = [Hypothesis([], 0.0, IncrementalState())], []
        for length in range(1, most + 1):
            candidates = []
            for hypothesis in live:
                candidates += self.continue_one(hypothesis, *encoded, must_end=length == most)
            candidates.sort(key=lambda candidate: -candidate.log_prob)
            divisor = ((5 + length) / 6) ** LEN_PENALTY
            for tokens, log_prob, _ in candidates[: self.beam_size]:
                if tokens[-1] == self.eos:
                    finished.append((tokens, log_prob / divisor))
            # The same end as the batched search: a full beam of finished hypotheses.
            if len(finished) >= self.beam_size:
                break
            live = [h for h in candidates if h.tokens[-1] != self.eos][: self.beam_size]
        return max(finished, key=lambda translation: translation[1])

    def continue_one(
        self, parent: Hypothesis, encoder_out: Tensor, mask: Tensor, must_end: bool
    ) -> list[Hypothesis]:
        """Return the likeliest continuations of a hypothesis."""
        newest = torch.tensor([[parent.tokens[-1] if parent.tokens else self.eos]])
        # Caches are replaced, never changed in place: siblings can share them.
        state = IncrementalState(parent.state)
        scores, _ = self.model.decoder(newest, encoder_out, mask, state, before=len(parent.tokens))
        log_probs = scores[0, -1].log_softmax(dim=-1)
        log_probs[self.pad] = float("-inf")
        if len(parent.tokens) == 0:
            # A translation has at least one word.
            log_probs[self.eos] = float("-inf")
        if must_end:
            values, tokens = [log_probs[self.eos].item()], [self.eos]
        else:
            # One more than the beam, because one may end.
            largest = log_probs.topk(self.beam_size + 1)
            values, tokens = largest.values.tolist(), largest.indices.tolist()
        return [
            Hypothesis([*parent.tokens, token], parent.log_prob + value, state)
            for value, token in zip(values, tokens, strict=True)
        ]


def by_loop(loop: HypothesisLoop, sources: Tensor, lengths: Tensor) -> list[Translation]:
    """Translate all sentences, one after the other."""
    translations = []
    with torch.no_grad():
        for source, length in zip(sources, lengths.tolist(), strict=True):
            most = int(MAXLEN_A * length + MAXLEN_B) + 1
            translations.append(loop.translate(source[len(source) - length :], most))
    return translations


def by_batch(generator: SequenceGenerator, sources: Tensor, lengths: Tensor) -> list[Translation]:
    """Translate all sentences at once."""
    translations = generator.generate(sources, lengths, MAXLEN_A, MAXLEN_B)
    scores = translations.scores[:, 0].tolist()
    return [(best, score) for (best,), score in zip(translations.to_lists(), scores, strict=True)]


def make_sources(sentences: int, words: Dictionary, seed: int) -> tuple[Tensor, Tensor]:
    """Make random sources of 5 to 25 tokens, padded on the left; return them and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 26, (sentences,), generator=generator)
    sources = torch.randint(2, len(words), (sentences, 25), generator=generator)
    sources[:, -1] = words.eos()
    sources[torch.arange(25) < 25 - lengths.unsqueeze(1)] = words.pad()
    return sources, lengths


def make_model(words: Dictionary, seed: int) -> TransformerModel:
    """Make a model whose scores differ enough that rounding does not choose between hypotheses."""
    torch.manual_seed(seed)
    config = TransformerConfig.preset("small", share_all_embeddings=False)
    model = TransformerModel(config, words, words).eval()
    with torch.no_grad():
        # Random weights give nearly equal scores, and then rounding would decide.
        model.decoder.output_projection.weight.mul_(4.0)
    return model


def check(variant: str, expected: Sequence[Translation], result: Sequence[Translation]) -> None:
    """End the script if translations or scores differ."""
    pairs = zip(expected, result, strict=True)
    for number, ((tokens, score), (others, other)) in enumerate(pairs):
        if tokens != others or abs(score - other) > 1e-3 * max(1.0, abs(score)):
            raise SystemExit(
                f"sentence {number}: the loop found {tokens} ({score}), "
                f"{variant} found {others} ({other})"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=3)
    add = parser.add_argument
    add("--sentences", type=positive, default=32)
    add("--beam-size", type=positive, default=5)
    add("--vocabulary", type=positive, default=8000)
    add("--seed", type=int, default=0)
    arguments = parse(parser, argv, sentences=4, vocabulary=200)
    torch.set_num_threads(1)
    words = Dictionary(symbols=[f"w{i}_" for i in range(arguments.vocabulary - 2)])
    model = make_model(words, arguments.seed)
    sources, lengths = make_sources(arguments.sentences, words, arguments.seed)
    loop = HypothesisLoop(model, words, arguments.beam_size)
    generator = SequenceGenerator(
        model, words, words, beam_size=arguments.beam_size, len_penalty=LEN_PENALTY
    )
    rows = measure(
        SUBJECT,
        f"Transformer small, beam {arguments.beam_size}",
        {
            LOOP: partial(by_loop, loop, sources, lengths),
            BATCHED: partial(by_batch, generator, sources, lengths),
        },
        arguments.blocks,
        amount=arguments.sentences,
        check=check,
    )
    conditions = (
        f"{arguments.blocks} blocks of {arguments.sentences} sources, "
        f"{arguments.vocabulary:,} symbols, one thread."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
