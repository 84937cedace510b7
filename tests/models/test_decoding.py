"""The search against enumeration, against itself with one sentence, and its scores against formulas
by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mlbench_core.models.pytorch.generation import (
    GNMTScore,
    Hypotheses,
    LengthPenaltyScore,
    LogitProposer,
    Sampling,
    Score,
    SearchOptions,
    search,
)
from mlbench_core.models.pytorch.generation.beam_search import SequenceGenerator, reorder_context
from mlbench_core.models.pytorch.language_models.lstm import LSTMLanguageModel

pytestmark = pytest.mark.usefixtures("one_thread")

PAD, EOS, START, VOCABULARY = 0, 1, 2, 5


class TableModel:
    """The next token depends on the sentence, the step and the two newest tokens, through a random
    table.

    It keeps what it was fed, so that a wrong ``reorder`` gives wrong scores.
    """

    def __init__(
        self, sentences: list[int], seed: int = 0, steps: int = 8, source: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (8, steps, VOCABULARY, VOCABULARY)
        self.table = 2.0 * torch.randn(*size, VOCABULARY, generator=generator, dtype=torch.float64)
        self.attention_table = torch.rand(*size, source, generator=generator, dtype=torch.float64)
        self.sentence = torch.tensor(sentences)
        self.fed = torch.full((len(sentences), 1), PAD)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.fed = torch.cat((self.fed, tokens.unsqueeze(1)), dim=1)
        place = (self.sentence, self.fed.shape[1] - 2, self.fed[:, -2], self.fed[:, -1])
        return self.table[place], self.attention_table[place].softmax(dim=-1)

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        self.sentence, self.fed = self.sentence[rows], self.fed[rows]


@dataclass
class Found:
    score: float
    tokens: list[int]


def log_prob_and_coverage(
    model: TableModel, sentence: int, tokens: list[int]
) -> tuple[float, Tensor]:
    """Of one sequence, token by token."""
    before, newest, total = PAD, START, 0.0
    coverage = torch.zeros(model.attention_table.shape[-1], dtype=torch.float64)
    for step, token in enumerate(tokens):
        total += model.table[sentence, step, before, newest].log_softmax(dim=-1)[token].item()
        coverage += model.attention_table[sentence, step, before, newest].softmax(dim=-1)
        before, newest = newest, token
    return total, coverage


def enumerate_all(
    model: TableModel, sentence: int, max_len: int, score: Score, min_len: int = 1
) -> list[Found]:
    """Every sequence of at most ``max_len`` tokens that ends, best first."""
    words = [token for token in range(VOCABULARY) if token not in (PAD, EOS)]
    found = []
    for length in range(min_len, max_len + 1):
        for beginning in itertools.product(words, repeat=length - 1):
            tokens = [*beginning, EOS]
            log_prob, coverage = log_prob_and_coverage(model, sentence, tokens)
            value = score(torch.tensor(log_prob), torch.tensor(length), coverage.float())
            found.append(Found(value.item(), tokens))
    return sorted(found, key=lambda f: -f.score)


def run(
    sentences: list[int],
    max_len: int | Tensor,
    seed: int = 0,
    prefix: Tensor | None = None,
    **options,
) -> Hypotheses:
    start = torch.full((len(sentences),), START)
    sampling = options.pop("sampling", None)
    proposer = LogitProposer(TableModel(sentences, seed), sampling)
    return search(proposer, start, SearchOptions(eos=EOS, pad=PAD, **options), max_len, prefix)


SCORES = [
    LengthPenaltyScore(0.0),
    LengthPenaltyScore(1.0),
    LengthPenaltyScore(2.5),
    GNMTScore(0.6, 5, 0.3),
]


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wide_beam_search_is_exhaustive(score: Score, seed: int) -> None:
    max_len, sentences = 4, [0, 3, 5]
    beam_size = 4 * 3**3  # all continuations of all beginnings
    for min_len in (1, 3):
        found = run(
            sentences,
            max_len,
            seed,
            beam_size=beam_size,
            score=score,
            stop_early=False,
            min_len=min_len,
        )
        for i, sentence in enumerate(sentences):
            expected = enumerate_all(TableModel([0], seed), sentence, max_len, score, min_len)
            assert found.to_lists(5)[i] == [f.tokens for f in expected[:5]]
            torch.testing.assert_close(
                found.scores[i, : len(expected)],
                torch.tensor([f.score for f in expected]),
                rtol=1e-5,
                atol=1e-5,
            )
            assert found.scores[i, len(expected) :].eq(float("-inf")).all()


@pytest.mark.parametrize("stop_early", [True, False])
@pytest.mark.parametrize("score", SCORES, ids=str)
def test_scores_are_those_of_the_tokens(score: Score, stop_early: bool) -> None:
    found = run([1, 2, 3, 4], 7, beam_size=3, score=score, stop_early=stop_early)
    for i, sentence in enumerate([1, 2, 3, 4]):
        for rank, tokens in enumerate(found.to_lists(3)[i]):
            log_prob, coverage = log_prob_and_coverage(TableModel([0]), sentence, tokens)
            value = score(torch.tensor(log_prob), torch.tensor(len(tokens)), coverage.float())
            assert found.scores[i, rank].item() == pytest.approx(value.item(), abs=1e-5)
            assert tokens[-1] == EOS
            assert PAD not in tokens
        assert found.scores[i].diff().le(0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_a_batch_is_one_by_one(seed: int, beam_size: int) -> None:
    sentences, limits = [0, 1, 2, 3, 4, 5], torch.tensor([2, 7, 3, 6, 1, 7])
    together = run(sentences, limits, seed, beam_size=beam_size, score=GNMTScore())
    for i, sentence in enumerate(sentences):
        alone = run([sentence], int(limits[i]), seed, beam_size=beam_size, score=GNMTScore())
        assert together.to_lists(beam_size)[i] == alone.to_lists(beam_size)[0]
        torch.testing.assert_close(together.scores[i], alone.scores[0])
        assert max(map(len, together.to_lists(beam_size)[i])) <= limits[i]


def test_beam_of_one_is_greedy() -> None:
    found = run([0, 1, 2, 3], 6)
    for sentence, hypotheses in enumerate(found.to_lists()):
        model, before, newest, expected = TableModel([0]), PAD, START, []
        while len(expected) < 5 and newest != EOS:
            scores = model.table[sentence, len(expected), before, newest].clone()
            scores[PAD] = float("-inf")
            before, newest = newest, int(scores.argmax())
            expected.append(newest)
        assert hypotheses == [expected if newest == EOS else [*expected, EOS]]


def test_finished_sentences_leave_the_batch() -> None:
    class Counting(TableModel):
        def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            rows.append(len(tokens))
            return super().step(tokens)

    rows: list[int] = []
    options, limits = SearchOptions(EOS, PAD, 2, min_len=2), torch.tensor([2, 3, 6])
    found = search(LogitProposer(Counting([0, 1, 2])), torch.full((3,), START), options, limits)
    assert rows[:2] == [3, 6]  # one row a sentence before there is a choice
    assert rows[2] <= 4
    assert max(rows[3:], default=0) <= 2
    assert found.steps == len(rows)


def test_a_prefix_is_kept_and_scored() -> None:
    prefix = torch.tensor([[3, 2], [4, PAD], [2, EOS]])
    found = run([0, 1, 2], 5, beam_size=3, prefix=prefix, score=LengthPenaltyScore(0.0))
    lists = found.to_lists(3)
    assert all(tokens[:2] == [3, 2] for tokens in lists[0])
    assert all(tokens[0] == 4 for tokens in lists[1])
    assert lists[2] == [[2, EOS]]
    for i in range(3):
        expected = log_prob_and_coverage(TableModel([0]), i, lists[i][0])[0]
        assert found.scores[i, 0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("topk", "temperature"), [(-1, 1.0), (2, 1.0), (-1, 0.5), (3, 2.0)])
def test_samples_have_the_models_distribution(topk: int, temperature: float) -> None:
    draws = 4000
    sampling = Sampling(topk, temperature, torch.Generator().manual_seed(5))
    found = run(
        [1], 3, beam_size=draws, independent=True, sampling=sampling, score=LengthPenaltyScore(0.0)
    )
    assert found.ended.tolist() == [draws]
    first = torch.bincount(found.tokens[0, :, 0], minlength=VOCABULARY).double()
    logits = TableModel([0]).table[1, 0, PAD, START] / temperature
    logits[PAD] = float("-inf")
    if topk > 0:
        logits[logits < logits.topk(topk).values.min()] = float("-inf")
    expected = draws * logits.softmax(dim=-1)
    possible = expected > 0
    assert first[~possible].sum() == 0
    chi_square = ((first - expected).square() / expected)[possible].sum().item()
    assert chi_square < 16.3  # 0.1 % with 3 degrees of freedom
    tokens = found.to_lists(draws)[0]
    for rank in (0, draws // 2, draws - 1):
        log_prob = log_prob_and_coverage(TableModel([0]), 1, tokens[rank])[0]
        assert found.scores[0, rank].item() == pytest.approx(log_prob, abs=1e-5)


def test_samples_repeat_from_the_generator_and_leave_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    once, again = (
        run(
            [1, 2],
            6,
            beam_size=4,
            independent=True,
            sampling=Sampling(generator=torch.Generator().manual_seed(9)),
        )
        for _ in range(2)
    )
    assert torch.equal(once.tokens, again.tokens)
    assert torch.equal(before, torch.get_rng_state())


def test_length_normalisation_and_coverage_penalty_by_hand() -> None:
    score = GNMTScore(len_norm_factor=0.6, len_norm_const=5, cov_penalty_factor=0.1)
    coverage = torch.tensor([0.5, 1.7, 0.25, 0.0])  # the last one is padding
    expected = -8.0 / (12 / 6) ** 0.6 + 0.1 * (math.log(0.5) + math.log(1.0) + math.log(0.25))
    assert score(torch.tensor(-8.0), torch.tensor(7), coverage).item() == pytest.approx(
        expected, rel=1e-6
    )
    assert LengthPenaltyScore(0.6)(torch.tensor(-8.0), torch.tensor(7)).item() == pytest.approx(
        -8 / 7**0.6, rel=1e-6
    )


def test_an_empty_batch_is_searched_at_once() -> None:
    found = search(
        LogitProposer(TableModel([])),
        torch.empty(0, dtype=torch.int64),
        SearchOptions(EOS, PAD, 2),
        4,
    )
    assert found.to_lists() == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="beam_size must be at least 1, not 0"):
        SearchOptions(EOS, PAD, beam_size=0)
    with pytest.raises(ValueError, match=r"max_len must be at least min_len \(3\), not 2"):
        run([0], 2, min_len=3)
    with pytest.raises(ValueError, match="max_len must be one number or have shape"):
        run([0], torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=r"start must have shape \(batch,\), not \(1, 1\)"):
        search(LogitProposer(TableModel([0])), torch.tensor([[START]]), SearchOptions(EOS, PAD), 3)
    with pytest.raises(ValueError, match=r"prefix must have shape \(1, length\), not \(2, 1\)"):
        run([0], 3, prefix=torch.tensor([[3], [3]]))
    with pytest.raises(ValueError, match=r"topk must be .*, not 0"):
        Sampling(topk=0)
    with pytest.raises(ValueError, match="temperature must be above 0, not 0"):
        Sampling(temperature=0.0)
    with pytest.raises(ValueError, match="len_norm_const must be above -1, not -1"):
        GNMTScore(len_norm_const=-1)
    with pytest.raises(ValueError, match="cov_penalty_factor must be at least 0, not -1"):
        GNMTScore(cov_penalty_factor=-1)


class LanguageModelState:
    """A recurrent language model in a generation."""

    def __init__(self, model: LSTMLanguageModel, sentences: int) -> None:
        self.model, self.hidden = model, model.init_hidden(sentences)

    def step(self, tokens: Tensor) -> tuple[Tensor, None]:
        scores, self.hidden = self.model(tokens.unsqueeze(0), self.hidden)
        return scores, None

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        self.hidden = [(h[:, rows], c[:, rows]) for h, c in self.hidden]


@pytest.mark.parametrize("sampling", [None, Sampling(generator=torch.Generator().manual_seed(3))])
def test_a_language_model_continues_prompts(sampling: Sampling | None) -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(ntoken=9, ninp=6, nhid=7, nlayers=2).eval()
    prompts = torch.tensor([[3, 4], [5, PAD]])
    options = SearchOptions(
        EOS,
        PAD,
        beam_size=4,
        min_len=5,
        score=LengthPenaltyScore(0.0),
        independent=sampling is not None,
    )
    proposer = LogitProposer(LanguageModelState(model, 2), sampling)
    found = search(proposer, torch.full((2,), START), options, max_len=8, prefix=prompts)
    for i, hypotheses in enumerate(found.to_lists(4)):
        assert len(hypotheses) == 4
        for rank, tokens in enumerate(hypotheses):
            assert tokens[: 2 - i] == prompts[i, : 2 - i].tolist()
            assert 5 <= len(tokens) <= 8
            fed = torch.tensor([START, *tokens[:-1]]).unsqueeze(1)
            with torch.no_grad():
                scores = model(fed, model.init_hidden(1))[0].log_softmax(dim=-1)
            log_prob = scores[torch.arange(len(tokens)), torch.tensor(tokens)].sum().item()
            assert found.scores[i, rank].item() == pytest.approx(log_prob, abs=1e-4)


class ModelOf30:
    """``generate`` as in version 3.0, with a context of encoder outputs, lengths and a hidden
    state."""

    def __init__(self, batch_first: bool) -> None:
        self.batch_first = batch_first

    def context(self, sentences: list[int]) -> list[object]:
        outputs = torch.tensor(sentences, dtype=torch.float32).view(-1, 1, 1).expand(-1, 3, 2)
        return [
            outputs if self.batch_first else outputs.transpose(0, 1),
            torch.tensor(sentences),
            None,
        ]

    def generate(
        self, inputs: Tensor, context: list, beam_size: int
    ) -> tuple[Tensor, Tensor, Tensor, list]:
        rows = inputs.numel()
        assert inputs.shape == ((rows, 1) if self.batch_first else (1, rows))
        outputs, lengths, hidden = context
        sentence = outputs[:, 0, 0] if self.batch_first else outputs[0, :, 0]
        model = TableModel(lengths.tolist(), source=3)
        assert torch.equal(sentence.long(), lengths)
        fed = torch.full((rows, 1), PAD) if hidden is None else hidden[0][0][0, 0].long()
        model.fed = fed
        logits, attention = model.step(inputs.flatten())
        logits[:, PAD] = 0.3  # likely enough to come up, and never taken
        log_probs, words = (
            logits.float().log_softmax(dim=-1).topk(min(beam_size, VOCABULARY), dim=-1)
        )
        dim = 1 if self.batch_first else 0
        hidden = [(model.fed.float().view(1, 1, rows, -1),)]
        return (
            words.unsqueeze(dim),
            log_probs.unsqueeze(dim),
            attention.unsqueeze(dim),
            [outputs, lengths, hidden],
        )


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_generator_of_gnmt_searches_with_a_model_of_version_3(batch_first: bool) -> None:
    model, sentences = ModelOf30(batch_first), [3, 0, 5, 1]
    start = torch.full((4, 1) if batch_first else (1, 4), START)
    generator = SequenceGenerator(model, beam_size=3, max_seq_len=7, eos=EOS, pad=PAD)
    translation, lengths, steps = generator.beam_search(4, start, model.context(sentences))
    assert translation.shape == (4, 7)
    assert translation[:, 0].tolist() == [START] * 4
    assert 1 <= steps <= 6
    for row, length in zip(translation.tolist(), lengths.tolist(), strict=True):
        assert row[length - 1] == EOS
        assert EOS not in row[: length - 1]
        assert PAD not in row[:length]
        assert row[length:] == [PAD] * (7 - length)
    for i, sentence in enumerate(sentences):
        alone, length, _ = generator.beam_search(1, start.view(-1)[:1], model.context([sentence]))
        assert torch.equal(alone[0], translation[i])
        assert length == lengths[i]


def test_greedy_search_is_a_beam_of_one() -> None:
    model = ModelOf30(batch_first=False)
    generator = SequenceGenerator(model, beam_size=1, max_seq_len=7, eos=EOS, pad=PAD)
    start = torch.full((1, 3), START)
    greedy = generator.greedy_search(3, start, model.context([0, 1, 2]))
    beam = generator.beam_search(3, start, model.context([0, 1, 2]))
    assert torch.equal(greedy[0], beam[0])
    assert torch.equal(greedy[1], beam[1])


def test_a_model_can_reorder_its_own_context() -> None:
    class Own(ModelOf30):
        calls = 0

        def reorder_context(self, context: list, rows: Tensor) -> list | None:
            self.calls += 1
            return reorder_context(context, rows)

    model = Own(batch_first=False)
    generator = SequenceGenerator(model, beam_size=2, max_seq_len=6, eos=EOS, pad=PAD)
    generator.beam_search(2, torch.full((1, 2), START), model.context([0, 1]))
    assert model.calls > 0


def test_the_generator_of_gnmt_refuses_wrong_arguments() -> None:
    model = ModelOf30(batch_first=False)
    with pytest.raises(ValueError, match="max_seq_len must be at least 2, not 1"):
        SequenceGenerator(model, max_seq_len=1)
    with pytest.raises(ValueError, match="beam_size must be at least 1, not 0"):
        SequenceGenerator(model, beam_size=0)
    with pytest.raises(
        ValueError, match=r"initial_input must have batch_size \(2\) elements, not shape \(1, 3\)"
    ):
        SequenceGenerator(model).beam_search(2, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the context must have .*, not 2 parts"):
        reorder_context([None, None], torch.tensor([0]))
    assert reorder_context(None, torch.tensor([0])) is None
