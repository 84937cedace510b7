"""Translating with a Transformer: against enumeration, one by one, from Python to text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable
from torch import Tensor

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.models.pytorch.transformer import (
    SequenceGenerator,
    TransformerConfig,
    TransformerModel,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 4}
WORDS = Dictionary(symbols=["Ein_", "Hunde", "hals", "band_"])


def make_model(seed: int = 0, **changes: Any) -> TransformerModel:
    """A model whose scores differ much, so that translations are not one word again and again."""
    torch.manual_seed(seed)
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()
    }
    model = TransformerModel(
        TransformerConfig(**sides, share_all_embeddings=False, **changes), WORDS, WORDS
    )
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(4.0)
    return model


SOURCE = torch.tensor([[0, 0, 3, 4, 1], [2, 3, 4, 5, 1], [0, 0, 0, 5, 1], [0, 5, 2, 2, 1]])
LENGTHS = torch.tensor([3, 5, 2, 4])


def make_batch() -> dict[str, Any]:
    target = torch.tensor([[2, 5, 1, 0], [3, 4, 5, 1], [2, 1, 0, 0], [4, 5, 1, 0]])
    return {"net_input": {"src_tokens": SOURCE, "src_lengths": LENGTHS}, "target": target}


def log_probs(model: TransformerModel, source: Tensor, translations: list[list[int]]) -> Tensor:
    """Of translations of one length, without caches."""
    tokens = torch.tensor(translations)
    previous = torch.cat((torch.full((len(tokens), 1), WORDS.eos()), tokens[:, :-1]), dim=1)
    with torch.no_grad():
        scores = model.eval()(source.expand(len(tokens), -1), None, previous)[0].log_softmax(dim=-1)
    return scores.gather(2, tokens.unsqueeze(2)).sum(dim=(1, 2))


@pytest.mark.parametrize("len_penalty", [0.6, 1.5])
def test_beam_search_finds_the_best_of_all_translations(len_penalty: float) -> None:
    model = make_model()
    generator = SequenceGenerator(
        model, WORDS, WORDS, beam_size=5 * 4**3, maxlen=3, stop_early=False, len_penalty=len_penalty
    )
    found = generator.generate(SOURCE, LENGTHS)
    for i, source in enumerate(SOURCE):
        every, scores = [], torch.empty(0)
        for length in (1, 2, 3):
            some = [[*beginning, 1] for beginning in itertools.product(range(2, 6), repeat=length)]
            divisor = ((5 + length + 1) / 6) ** len_penalty
            scores = torch.cat((scores, log_probs(model, source, some) / divisor))
            every += some
        best = scores.topk(5)
        torch.testing.assert_close(found.scores[i, :5], best.values, rtol=1e-4, atol=1e-4)
        assert found.to_lists()[i][0] == every[int(best.indices[0])]


def test_length_penalty_by_hand() -> None:
    """All 6 symbols are equally likely: 3 tokens and the end have log P = -4 log 6 = -7.167,
    divided by (9/6)^0.6."""
    model = make_model()
    with torch.no_grad():
        model.decoder.output_projection.weight.zero_()

    def best_score(**options: Any) -> float:
        generator = SequenceGenerator(model, WORDS, WORDS, minlen=3, maxlen=3, **options)
        return float(generator.generate(SOURCE, LENGTHS).scores[0, 0])

    assert best_score(len_penalty=0.6) == pytest.approx(-7.16704 / 1.27542, abs=1e-4)
    assert best_score() == pytest.approx(-7.16704 / 1.5, abs=1e-4)
    assert best_score(len_penalty=0.6, normalize_scores=False) == pytest.approx(-7.16704, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_batch_of_mixed_lengths_is_one_by_one(seed: int, beam_size: int) -> None:
    generator = SequenceGenerator(make_model(seed), WORDS, WORDS, beam_size=beam_size)
    together = generator.generate(SOURCE, LENGTHS, maxlen_a=1.5, maxlen_b=2)
    for i, source in enumerate(SOURCE):
        alone = generator.generate(
            source[5 - LENGTHS[i] :].unsqueeze(0), None, maxlen_a=1.5, maxlen_b=2
        )
        torch.testing.assert_close(together.scores[i], alone.scores[0], rtol=1e-4, atol=1e-4)
        assert together.to_lists()[i][0] == alone.to_lists()[0][0]
        assert together.lengths[i].max() <= int(1.5 * LENGTHS[i]) + 2 + 1


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_the_model_without_caches(seed: int) -> None:
    model = make_model(seed)
    found = SequenceGenerator(model, WORDS, WORDS, beam_size=4, len_penalty=0.6).generate(
        SOURCE, LENGTHS, 1.0, 6
    )
    for i, hypotheses in enumerate(found.to_lists(4)):
        assert len({tuple(tokens) for tokens in hypotheses}) == len(hypotheses) >= 1
        for rank, tokens in enumerate(hypotheses):
            expected = log_probs(model, SOURCE[i], [tokens]).item() / ((5 + len(tokens)) / 6) ** 0.6
            assert found.scores[i, rank].item() == pytest.approx(expected, abs=1e-4)


def test_beam_of_one_is_greedy() -> None:
    model = make_model(1).eval()
    found = SequenceGenerator(model, WORDS, WORDS, minlen=0).generate(SOURCE, LENGTHS, 0.0, 8)
    for i, (tokens,) in enumerate(found.to_lists()):
        previous = [WORDS.eos()]
        for token in tokens[:8]:
            scores = model(SOURCE[i : i + 1], None, torch.tensor([previous]))[0][0, -1].clone()
            scores[WORDS.pad()] = float("-inf")
            assert token == int(scores.argmax())
            previous.append(token)


def test_lengths_keep_their_bounds() -> None:
    model = make_model(2)
    for minlen in (0, 3, 6):
        generator = SequenceGenerator(model, WORDS, WORDS, beam_size=3, minlen=minlen, maxlen=6)
        found = generator.generate(SOURCE, LENGTHS)
        lengths = found.lengths[found.lengths > 0]
        assert lengths.min() >= minlen + 1
        assert lengths.max() <= 7
        assert (found.tokens == WORDS.eos()).sum(dim=2).le(1).all()


def test_texts_references_prefixes_and_several_translations() -> None:
    generator = SequenceGenerator(make_model(), WORDS, WORDS, beam_size=3)
    batch = make_batch()
    texts, references = generator.translate_batch(batch, remove_bpe="_", maxlen_b=2)
    assert references == ["ein band", "hundehalsband", "ein", "halsband"]
    assert len(texts) == 4
    assert all(isinstance(text, str) and text == text.lower() and "<" not in text for text in texts)
    several, _ = generator.translate_batch(batch, remove_bpe="_", maxlen_b=2, nbest=3)
    assert [best[0] for best in several] == texts
    _, references = generator.translate_batch(batch, remove_bpe="_", ignore_case=False)
    assert references[1] == "Hundehalsband"
    texts, _ = generator.translate_batch(batch, maxlen_b=2, prefix_size=2, ignore_case=False)
    assert [
        text.startswith(start)
        for text, start in zip(texts, ["Ein_ band_", "Hunde hals", "Ein_", "hals"], strict=True)
    ]
    assert texts[2] == "Ein_"  # the reference ends there


def test_a_batch_without_target_and_a_model_that_diverged() -> None:
    model = make_model()
    batch = {"net_input": {"src_tokens": SOURCE, "src_lengths": LENGTHS}}
    generator = SequenceGenerator(model, WORDS, WORDS, beam_size=2)
    texts, references = generator.translate_batch(batch, maxlen_b=2)
    assert len(texts) == 4
    assert references == []
    with pytest.raises(
        ValueError, match="prefix_size must be 0 for a batch without a target, not 1"
    ):
        generator.translate_batch(batch, prefix_size=1)
    with torch.no_grad():
        model.decoder.output_projection.weight.fill_(float("nan"))
    assert generator.translate_batch(batch, maxlen_b=2)[0] == [""] * 4


def test_the_models_mode_is_put_back_and_dropout_can_stay() -> None:
    model = make_model(dropout=0.5).train()
    model.decoder.layers[0].eval()  # type: ignore[operator]
    modes = [module.training for module in model.modules()]
    plain = [
        SequenceGenerator(model, WORDS, WORDS).generate(SOURCE, LENGTHS).scores for _ in range(2)
    ]
    torch.testing.assert_close(*plain)
    assert [module.training for module in model.modules()] == modes
    noisy = SequenceGenerator(model.train(), WORDS, WORDS, retain_dropout=True)
    assert not torch.equal(noisy.generate(SOURCE, LENGTHS).scores, plain[0])
    assert model.training


def test_sampling_repeats_from_its_generator() -> None:
    model = make_model(3)

    def sample(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        options = {
            "beam_size": 5,
            "sampling": True,
            "sampling_topk": 3,
            "sampling_temperature": 1.3,
        }
        return (
            SequenceGenerator(model, WORDS, WORDS, **options, generator=generator)
            .generate(SOURCE, LENGTHS)
            .tokens
        )

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1)[:, :, :4], sample(2)[:, :, :4])


def test_a_trained_model_translates() -> None:
    """Digits into the same digits backwards, from random weights to text."""
    digits = Dictionary(symbols=[f"{digit}_" for digit in range(6)])
    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()
    }
    sides |= {f"{side}_embed_dim": 32 for side in ("encoder", "decoder")}
    model = TransformerModel(TransformerConfig(**sides, dropout=0.0), digits, digits)
    loss, optimizer = LabelSmoothing(digits.pad(), 0.1), torch.optim.Adam(model.parameters(), 5e-3)
    end, generator = torch.ones(64, 1, dtype=torch.int64), torch.Generator().manual_seed(1)
    for _ in range(120):
        content = torch.randint(2, 8, (64, 4), generator=generator)
        source, backwards = torch.cat((content, end), dim=1), content.flip(1)
        output = model(source, None, torch.cat((end, backwards), dim=1))[0]
        optimizer.zero_grad()
        loss(output, torch.cat((backwards, end), dim=1)).div(64 * 5).backward()
        optimizer.step()
    batch = {"net_input": {"src_tokens": source}, "target": torch.cat((backwards, end), dim=1)}
    for options in ({"beam_size": 1}, {"beam_size": 4, "len_penalty": 0.6}):
        texts, references = SequenceGenerator(model, digits, digits, **options).translate_batch(
            batch, remove_bpe="_"
        )
        assert (
            sum(text == reference for text, reference in zip(texts, references, strict=True)) >= 60
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_translates(dtype: torch.dtype) -> None:
    model = make_model()
    expected = (
        SequenceGenerator(model, WORDS, WORDS, beam_size=4).generate(SOURCE, LENGTHS).scores[:, 0]
    )
    found = SequenceGenerator(model.to(dtype), WORDS, WORDS, beam_size=4).generate(SOURCE, LENGTHS)
    assert found.scores.dtype == torch.float32
    torch.testing.assert_close(found.scores[:, 0], expected, rtol=0.1, atol=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_finds_the_same_translations() -> None:
    model = make_model()
    expected = SequenceGenerator(model, WORDS, WORDS, beam_size=4).generate(SOURCE, LENGTHS)
    found = SequenceGenerator(model.cuda(), WORDS, WORDS, beam_size=4).generate(
        SOURCE.cuda(), LENGTHS.cuda()
    )
    torch.testing.assert_close(found.scores.cpu(), expected.scores, rtol=1e-3, atol=1e-3)


def test_wrong_arguments_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="minlen must be at least 0, not -1"):
        SequenceGenerator(model, WORDS, WORDS, minlen=-1)
    with pytest.raises(
        ValueError, match="minlen must be at most 4, the longest translation, not 9"
    ):
        SequenceGenerator(model, WORDS, WORDS, minlen=9, maxlen=4)
    with pytest.raises(ValueError, match="beam_size must be at least 1, not 0"):
        SequenceGenerator(model, WORDS, WORDS, beam_size=0)
    with pytest.raises(ValueError, match=r"nbest must be from 1 to beam_size \(2\), not 3"):
        SequenceGenerator(model, WORDS, WORDS, beam_size=2).translate_batch(make_batch(), nbest=3)
