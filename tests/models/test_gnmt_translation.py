"""Translating with GNMT: against enumeration, one by one, from numbers to text, and after learning
to."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.dataset.nlp.pytorch import Multi30k, build_collate_fn
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.models.pytorch.generation import GNMTScore
from mlbench_core.models.pytorch.generation.beam_search import SequenceGenerator
from mlbench_core.models.pytorch.gnmt import GNMT, Translator

pytestmark = pytest.mark.usefixtures("one_thread")

PAD, UNK, BOS, EOS = 0, 1, 2, 3
VOCABULARY = 9
LENGTHS = torch.tensor([4, 6, 3, 5])


class Digits:
    """Writes numbers; notes what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def detokenize(self, inputs: list[int], delim: str = " ") -> str:
        self.seen.append(list(inputs))
        return delim.join(str(number) for number in inputs)


def make_model(seed: int = 3, vocab_size: int = VOCABULARY, **changes: Any) -> GNMT:
    """A model whose scores differ much, so that translations are not one word again and again."""
    torch.manual_seed(seed)
    model = GNMT(vocab_size, **{"hidden_size": 8, "num_layers": 3, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.5)
        model.decoder.attention.g.fill_(3.0)
        model.decoder.classifier.bias.zero_()
    return model


def make_batch(seed: int = 1, vocab_size: int = VOCABULARY) -> Tensor:
    source = torch.randint(4, vocab_size, (6, 4), generator=torch.Generator().manual_seed(seed))
    source[0] = BOS
    source[LENGTHS - 1, torch.arange(4)] = EOS
    source[torch.arange(6).unsqueeze(1) >= LENGTHS] = PAD
    return source


def translator(model: GNMT, **options: Any) -> Translator:
    return Translator(model, Digits(), **{"max_seq_len": 12, **options})


def test_batch_is_its_sentences_one_by_one() -> None:
    model, source = make_model(), make_batch()
    search = translator(model, beam_size=3)
    together, none = search.translate((source, LENGTHS))
    assert none == []
    for row, length in enumerate(LENGTHS.tolist()):
        alone, _ = search.translate((source[:length, row : row + 1], LENGTHS[row : row + 1]))
        assert alone == [together[row]]
    order = torch.tensor([3, 1, 0, 2])
    assert search.translate((source[:, order], LENGTHS[order]))[0] == [
        together[row] for row in order.tolist()
    ]
    assert len(set(together)) == 4


def test_beam_of_one_takes_the_likeliest_word_each_time() -> None:
    model, source = make_model(), make_batch()
    found = translator(model, beam_size=1).generate(source, LENGTHS).to_lists()
    for row in range(4):
        words = [BOS]
        with torch.no_grad():
            while len(words) < 11 and words[-1] != EOS:
                scores = model(
                    source[:, row : row + 1],
                    LENGTHS[row : row + 1],
                    torch.tensor(words).unsqueeze(1),
                )
                scores[:, :, PAD] = float("-inf")
                words.append(int(scores[-1, 0].argmax()))
        if words[-1] != EOS:
            words.append(EOS)
        assert found[row] == [words[1:]]


def test_sequence_generator_finds_the_same() -> None:
    model, source = make_model(), make_batch()
    expected = translator(model, beam_size=3).generate(source, LENGTHS).to_lists()
    generator = SequenceGenerator(model, beam_size=3, max_seq_len=12)
    start = torch.full((4, 1), BOS)
    with torch.no_grad():
        memory = model.encode(source, LENGTHS)
        for context in (model.context(memory, LENGTHS), [memory, LENGTHS, None]):
            tokens, lengths, _ = generator.beam_search(4, start, context)
            found = [row[1:end].tolist() for row, end in zip(tokens, lengths.tolist(), strict=True)]
            assert [[words] for words in found] == expected
        greedy, lengths, _ = generator.greedy_search(4, start, model.context(memory, LENGTHS))
    expected = translator(model, beam_size=1).generate(source, LENGTHS).to_lists()
    assert [
        [row[1:end].tolist()] for row, end in zip(greedy, lengths.tolist(), strict=True)
    ] == expected


def test_wide_beam_ranks_all_translations_as_enumeration_does() -> None:
    """Six symbols, at most 3 words and the end: every translation is scored by the paper's formula,
    word by word."""
    model = make_model(vocab_size=6)
    source, lengths = torch.tensor([[4], [5], [3]]), torch.tensor([3])
    score = GNMTScore(0.6, 5.0, 0.1)
    ranked = []
    with torch.no_grad():
        start = model.context(model.encode(source, lengths), lengths)
        for length in range(4):
            for words in itertools.product([UNK, BOS, 4, 5], repeat=length):
                context, log_prob, coverage = start, torch.zeros(1), torch.zeros(1, 3)
                for previous, number in itertools.pairwise([BOS, *words, EOS]):
                    scores, attention, context = model.step(torch.tensor([previous]), context)
                    log_prob = log_prob + scores.log_softmax(dim=-1)[:, number]
                    coverage = coverage + attention
                value = score(log_prob, torch.tensor([length + 1]), coverage)
                ranked.append((value.item(), [*words, EOS]))
    ranked.sort(reverse=True)
    found = translator(model, beam_size=100, max_seq_len=5).generate(source, lengths)
    assert found.ended.tolist() == [len(ranked)] == [1 + 4 + 16 + 64]
    assert found.to_lists(len(ranked)) == [[words for _, words in ranked]]
    assert found.scores[0, : len(ranked)].tolist() == pytest.approx(
        [value for value, _ in ranked], abs=1e-4
    )


def test_texts_have_no_special_symbols_and_keep_the_order() -> None:
    search = translator(make_model())
    source = torch.tensor([[BOS, BOS, BOS, 5], [5, EOS, 6, PAD], [EOS, PAD, EOS, PAD]])
    after_the_end = 5
    target = torch.tensor([[BOS, BOS, 6, BOS], [8, EOS, 4, EOS], [EOS, PAD, PAD, after_the_end]])
    reference = (target, torch.tensor([3, 2, 2, 3]))
    translations, references = search.translate((source, torch.tensor([3, 2, 3, 0])), reference)
    assert references == ["8", "", "6 4", ""]
    assert translations[1] == translations[3] == ""
    alone, _ = search.translate((source[:, [0, 2]], torch.tensor([3, 3])))
    assert alone == [translations[0], translations[2]]
    assert all(
        number not in (PAD, BOS, EOS) for words in search.trg_tokenizer.seen for number in words
    )
    BLEUScore(use_raw=True)(translations, references)


def test_batch_without_any_words() -> None:
    search = translator(make_model())
    source = (torch.tensor([[BOS, 0], [EOS, 0]]), torch.tensor([2, 0]))
    assert search.translate(source, source) == (["", ""], ["", ""])
    empty = (torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert search.translate(empty, empty) == ([], [])


def test_model_gets_its_modes_back_and_dropout_is_off() -> None:
    model, source = make_model(dropout=0.5).train(), make_batch()
    model.encoder.eval()
    first = translator(model).translate((source, LENGTHS))
    assert translator(model).translate((source, LENGTHS)) == first
    assert model.decoder.training
    assert not model.encoder.training


def test_no_translation_is_longer_than_allowed() -> None:
    model, source = make_model(), make_batch()
    with torch.no_grad():
        model.decoder.classifier.bias[EOS] = -100.0
    found = translator(model, max_seq_len=7).generate(source, LENGTHS)
    assert found.lengths.tolist() == [[6, 6, 6, 6, 6]] * 4  # the start symbol is the seventh
    assert found.steps == 6


def test_diverged_model_writes_nothing() -> None:
    model, source = make_model(), make_batch()
    with torch.no_grad():
        model.decoder.classifier.bias.fill_(float("nan"))
    assert translator(model).translate((source, LENGTHS))[0] == [""] * 4


def test_bfloat16_translates() -> None:
    model, source = make_model().bfloat16(), make_batch()
    texts, _ = translator(model, beam_size=2).translate((source, LENGTHS))
    assert all(texts)


def test_wrong_arguments_are_named() -> None:
    model, source = make_model(), make_batch()
    with pytest.raises(ValueError, match="max_seq_len must be at least 2, not 1"):
        translator(model, max_seq_len=1)
    with pytest.raises(ValueError, match="beam_size must be at least 1, not 0"):
        translator(model, beam_size=0)
    search = translator(model)
    with pytest.raises(
        ValueError, match=r"shapes \(words, batch\) and \(batch,\), not \(4, 6\) and \(4,\)"
    ):
        search.translate((source.t(), LENGTHS))
    with pytest.raises(
        ValueError, match="trg must have one reference for each of the 4 sentences, not 3"
    ):
        search.translate((source, LENGTHS), (source[:, :3], LENGTHS[:3]))


Batch = tuple[Tensor, Tensor]


def reversed_digits(generator: torch.Generator, number: int = 32) -> tuple[Batch, Batch]:
    """Sentences of 1 to 4 of 5 digits with start and end, and the same backwards."""
    counts = torch.randint(1, 5, (number,), generator=generator)
    source = torch.full((6, number), PAD)
    target = source.clone()
    for row, count in enumerate(counts.tolist()):
        digits = torch.randint(4, 9, (count,), generator=generator)
        for tensor, words in ((source, digits), (target, digits.flip(0))):
            tensor[0, row], tensor[1 : count + 1, row], tensor[count + 1, row] = BOS, words, EOS
    return (source, counts + 2), (target, counts + 2)


def test_learns_to_write_digits_backwards() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GNMT(VOCABULARY, hidden_size=32, num_layers=2, dropout=0.0)
    with torch.no_grad():
        for parameter in model.parameters():  # the initial weights are meant for 1,024 features
            parameter.mul_(3.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        (source, lengths), (target, _) = reversed_digits(generator)
        scores = model(source, lengths, target[:-1])
        loss = F.cross_entropy(scores.flatten(0, 1), target[1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    translations, references = translator(model).translate(*reversed_digits(generator, 100))
    right = sum(one == other for one, other in zip(translations, references, strict=True))
    assert right >= 95, f"{right} of 100 are right, the loss is {loss.item():.3f}"


def test_translates_batches_of_the_data_set(tmp_path: Path) -> None:
    texts = {
        "en": ["A dog runs.", "It sleeps / eats.", "He said: 'yes!'"],
        "de": ["Ein Hund rennt.", "Er schläft / frisst.", "Er sagte: 'Na, so was!'"],
    }
    for lang, lines in texts.items():
        (tmp_path / f"train.{lang}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs = Multi30k(tmp_path, train=True, vocab_size=80, cache_dir=tmp_path / "cache")
    src, trg = build_collate_fn()([pairs[i] for i in range(3)])
    model = make_model(vocab_size=pairs.vocab_size)
    translations, references = Translator(model, pairs.tokenizer, max_seq_len=9).translate(src, trg)
    assert references == texts["de"]
    assert all(isinstance(text, str) for text in translations)
    assert len(translations) == 3
