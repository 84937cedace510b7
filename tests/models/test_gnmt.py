"""GNMT: against its formulas cell by cell, what may and what may not change its outputs, its
size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.gnmt import GNMT, modules
from mlbench_core.models.pytorch.gnmt.modules import NormalizedBahdanauAttention
from mlbench_core.ops.pytorch import attention_score

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 13
LENGTHS = torch.tensor([3, 6, 1, 5])
"""Not sorted, one sentence as long as the batch, one of a single word."""


def tiny(seed: int = 0, **changes: Any) -> GNMT:
    torch.manual_seed(seed)
    model = GNMT(VOCABULARY, **{"hidden_size": 6, "num_layers": 4, **changes}).double().eval()
    with torch.no_grad():  # larger than the initial weights, so that everything matters
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Sources, padded, and targets."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(1, VOCABULARY, (6, 4), generator=generator)
    source[torch.arange(6).unsqueeze(1) >= LENGTHS] = 0
    return source, torch.randint(1, VOCABULARY, (5, 4), generator=generator)


def cells(lstm: nn.LSTM, inputs: list[Tensor], suffix: str = "") -> list[Tensor]:
    """An LSTM layer by its definition, gate by gate."""
    weights = {
        name: getattr(lstm, f"{name}_l0{suffix}")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    h = c = torch.zeros(lstm.hidden_size, dtype=inputs[0].dtype)
    outputs = []
    for x in inputs:
        gates = (
            weights["weight_ih"] @ x
            + weights["bias_ih"]
            + weights["weight_hh"] @ h
            + weights["bias_hh"]
        )
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return outputs


def residual(number: int, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """From the third layer on."""
    return [x + y for x, y in zip(inputs, outputs, strict=True)] if number >= 3 else outputs


def by_hand(model: GNMT, source: list[int], target: list[int]) -> Tensor:
    """One sentence pair, word by word, as the docstrings say it."""
    embedding = model.encoder.embedding.weight
    words = [embedding[number] for number in source]
    forward = cells(model.encoder.bidirectional, words)
    backward = cells(model.encoder.bidirectional, words[::-1], "_reverse")[::-1]
    m = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
    for number, layer in enumerate(model.encoder.layers, start=2):
        m = residual(number, m, cells(layer, m))
    decoder, attention = model.decoder, model.decoder.attention
    y = cells(decoder.first, [decoder.embedding.weight[number] for number in target])
    v = attention.g * attention.v / attention.v.square().sum().sqrt()
    contexts = []
    for query in y:
        wq, wk = attention.query_projection.weight, attention.key_projection.weight
        a = torch.stack(
            [(v * torch.tanh(wq @ query + wk @ m_s + attention.bias)).sum() for m_s in m]
        ).softmax(dim=0)
        contexts.append(sum(a_s * m_s for a_s, m_s in zip(a, m, strict=True)))
    for number, layer in enumerate(decoder.layers, start=2):
        y = residual(
            number, y, cells(layer, [torch.cat(pair) for pair in zip(y, contexts, strict=True)])
        )
    return torch.stack([decoder.classifier.weight @ y_t + decoder.classifier.bias for y_t in y])


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize(("num_layers", "share_embedding"), [(2, True), (4, True), (3, False)])
def test_scores_are_those_of_the_formulas(
    num_layers: int, share_embedding: bool, fusion: bool
) -> None:
    model = tiny(num_layers=num_layers, share_embedding=share_embedding, fusion=fusion)
    source, target = batch()
    with torch.no_grad():
        scores = model(source, LENGTHS, target)
        for row, length in enumerate(LENGTHS.tolist()):
            expected = by_hand(model, source[:length, row].tolist(), target[:, row].tolist())
            torch.testing.assert_close(scores[:, row], expected, rtol=0, atol=1e-12)
    assert scores.shape == (5, 4, VOCABULARY)
    assert scores.std() > 0.05


def test_training_runs_each_part_once_over_the_whole_target() -> None:
    model = tiny()
    steps: list[int] = []
    decoder = model.decoder
    for layer in (decoder.first, *decoder.layers):
        layer.register_forward_hook(lambda module, inputs, output: steps.append(len(inputs[0])))
    decoder.attention.register_forward_hook(
        lambda module, inputs, output: steps.append(inputs[0].shape[1])
    )
    source, target = batch()
    model(source, LENGTHS, target)
    assert steps == [5] * 5


def test_fused_scores_have_the_gradients_of_the_plain_ones() -> None:
    gradients = []
    for fusion in (True, False):
        model = tiny(fusion=fusion)
        source, target = batch()
        F.cross_entropy(model(source, LENGTHS, target).flatten(0, 1), target.flatten()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-12)
        assert gradient.abs().max() > 0, f"nothing flows to {name}"


@pytest.mark.parametrize("seed", range(3))
def test_padding_never_matters(seed: int) -> None:
    model = tiny(seed)
    source, target = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    is_padding = torch.arange(9).unsqueeze(1) >= LENGTHS
    longer = torch.randint(0, VOCABULARY, (9, 4), generator=generator)
    longer[:6] = torch.where(
        is_padding[:6], longer[:6], source
    )  # anything at all where padding is, and more of it
    results = []
    for words in (source, longer):
        model.zero_grad()
        scores = model(words, LENGTHS, target)
        scores.square().sum().backward()
        results.append([scores.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert model.encoder.embedding.weight.grad is not None
    assert torch.equal(model.encoder.embedding.weight.grad[0], torch.zeros(6, dtype=torch.float64))


def test_a_batch_of_mixed_lengths_is_its_sentences_one_by_one() -> None:
    model = tiny()
    source, target = batch()
    together = model(source, LENGTHS, target)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model(
            source[:length, row : row + 1], LENGTHS[row : row + 1], target[:, row : row + 1]
        )
        torch.testing.assert_close(together[:, row], alone[:, 0], rtol=0, atol=1e-12)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        model(source[:, order], LENGTHS[order], target[:, order]), together[:, order]
    )


def test_a_word_of_the_target_sees_no_later_one() -> None:
    model = tiny()
    source, target = batch()
    before = model(source, LENGTHS, target)
    target[3:] = 1 + target[3:] % (VOCABULARY - 1)
    after = model(source, LENGTHS, target)
    torch.testing.assert_close(before[:3], after[:3], rtol=0, atol=0)
    assert (before[3:] - after[3:]).abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("width", [1, 3])
def test_decoding_step_by_step_gives_the_same_scores(width: int) -> None:
    model = tiny()
    source, _ = batch()
    target = torch.randint(
        1, VOCABULARY, (5, 4 * width), generator=torch.Generator().manual_seed(4)
    )
    with torch.no_grad():
        expected = model(
            source.repeat_interleave(width, 1), LENGTHS.repeat_interleave(width), target
        )
        context = model.context(model.encode(source, LENGTHS), LENGTHS)
        if (
            width > 1
        ):  # the first words of the rows of a sentence differ here: begin with a state for each row
            zeros = tuple((torch.zeros(1, 4 * width, 6).double(),) * 2 for _ in range(4))
            context = type(context)(context.source, zeros)
        for step, words in enumerate(target):
            scores, attention, context = model.step(words, context)
            torch.testing.assert_close(scores, expected[step], rtol=0, atol=1e-12)
            is_word = (torch.arange(6) < LENGTHS.unsqueeze(1)).repeat_interleave(width, 0)
            assert torch.equal(attention > 0, is_word)
            torch.testing.assert_close(
                attention.sum(dim=1), torch.ones(4 * width, dtype=attention.dtype)
            )


def test_number_of_parameters() -> None:
    def formula(v: int, h: int, layers: int, embeddings: int) -> int:
        encoder = (16 * h * h + 16 * h) + (12 * h * h + 8 * h) + (layers - 2) * (8 * h * h + 8 * h)
        decoder = (8 * h * h + 8 * h) + (layers - 1) * (12 * h * h + 8 * h)
        attention = 2 * h * h + 2 * h + 1
        return embeddings * v * h + encoder + decoder + attention + v * h + v

    def count(**arguments: Any) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in GNMT(**arguments).parameters())

    assert (
        count(vocab_size=32000)
        == formula(32000, 1024, 4, 1)
        == 90 * 1024**2 + 74 * 1024 + 1 + 2049 * 32000
    )
    assert count(vocab_size=32000) == 160_015_617
    assert count(vocab_size=100, hidden_size=8, num_layers=2, share_embedding=False) == formula(
        100, 8, 2, 2
    )
    assert count(vocab_size=100, hidden_size=8, num_layers=5) == formula(100, 8, 5, 1)


def test_matrices_start_within_another_bound() -> None:
    usual, wide = (tiny(init_bound=bound).float() for bound in (0.1, 0.2))
    for (name, parameter), other in zip(usual.named_parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(
            other, parameter * 2 if parameter.dim() == 2 else parameter, msg=name
        )
    with pytest.raises(ValueError, match=r"init_bound must be finite and positive, not 0\.0"):
        tiny(init_bound=0.0)


def test_initial_weights_are_uniform_and_padding_is_zero() -> None:
    torch.manual_seed(0)
    model = GNMT(500, hidden_size=32, share_embedding=False)
    special = {"decoder.attention.g": 32**-0.5, "decoder.attention.bias": 0.0}
    for name, parameter in model.named_parameters():
        if name in special or "bias_hh" in name:
            assert torch.equal(parameter, torch.full_like(parameter, special.get(name, 0.0))), name
        else:
            assert parameter.abs().max() <= 0.1, name
            if parameter.numel() > 1000:  # of a uniform variable: b / sqrt(3)
                assert parameter.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05), name
    for embedding in (model.encoder.embedding, model.decoder.embedding):
        assert torch.equal(embedding.weight[0], torch.zeros(32))
    assert model.encoder.embedding.weight is not model.decoder.embedding.weight


def test_embedding_is_shared_and_the_classifier_is_not() -> None:
    model = tiny()
    assert model.encoder.embedding.weight is model.decoder.embedding.weight
    assert model.decoder.classifier.weight is not model.decoder.embedding.weight


def test_length_of_v_does_not_matter_but_g_does() -> None:
    torch.manual_seed(0)
    attention = NormalizedBahdanauAttention(4).double()
    source = attention.encoded(torch.randn(2, 5, 4).double(), torch.tensor([5, 3]))
    queries = torch.randn(2, 3, 4).double()
    before = attention(queries, source)[1]
    with torch.no_grad():
        attention.v.mul_(7.0)
    torch.testing.assert_close(attention(queries, source)[1], before)
    with torch.no_grad():
        attention.g.mul_(7.0)
    assert (attention(queries, source)[1] - before).abs().max() > 1e-2


def test_state_dict_goes_into_another_model() -> None:
    source, target = batch()
    model, other = tiny(0), tiny(1)
    assert not torch.equal(model(source, LENGTHS, target), other(source, LENGTHS, target))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(source, LENGTHS, target), other(source, LENGTHS, target))


def test_dropout_is_for_training() -> None:
    model = tiny(dropout=0.5)
    source, target = batch()
    assert torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    model.train()
    assert not torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))


def test_bfloat16_is_close_to_float32() -> None:
    source, target = batch()
    model = tiny().float()
    expected = model(source, LENGTHS, target)
    narrow = tiny().bfloat16()
    scores = narrow(source, LENGTHS, target)
    assert scores.dtype == torch.bfloat16
    assert (scores.float() - expected).abs().max() < 0.05 * expected.abs().max()
    scores.float().logsumexp(dim=-1).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in narrow.parameters())


@pytest.mark.parametrize("fusion", [True, False])
def test_autocast_trains(fusion: bool) -> None:
    source, target = batch()
    model = tiny(fusion=fusion).float()
    expected = model(source, LENGTHS, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(source, LENGTHS, target)
        loss = scores.float().logsumexp(dim=-1).sum()
    loss.backward()
    assert (scores.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_a_source_without_words_is_no_nan() -> None:
    model = tiny()
    source, target = batch()
    lengths = torch.tensor([3, 0, 1, 5])
    scores = model(source, lengths, target)
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(
        scores[:, 0], model(source, LENGTHS, target)[:, 0], rtol=0, atol=1e-12
    )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="num_layers must be at least 2, not 1"):
        GNMT(VOCABULARY, num_layers=1)
    with pytest.raises(ValueError, match="hidden_size must be at least 1, not 0"):
        GNMT(VOCABULARY, hidden_size=0)
    with pytest.raises(ValueError, match="preset must be one of big, small, not 'huge'"):
        GNMT.preset("huge", VOCABULARY)
    model = tiny()
    source, target = batch()
    with pytest.raises(
        ValueError, match=r"must have the shapes \(target, batch\) and \(source, batch\), not"
    ):
        model(source, LENGTHS, target[:, :2])
    with pytest.raises(
        ValueError, match=r"shapes \(source, batch\) and \(batch,\), not \(6, 4\) and \(3,\)"
    ):
        model(source, LENGTHS[:3], target)
    with pytest.raises(ValueError, match="lengths must be at most 6, the source positions, not 7"):
        model(source, LENGTHS + 1, target)


def test_presets() -> None:
    with torch.device("meta"):
        small, big = GNMT.preset("small", 100), GNMT.preset("big", 100, dropout=0.1)
    assert (
        small.encoder.embedding.embedding_dim,
        len(small.encoder.layers),
        small.decoder.dropout.p,
    ) == (256, 1, 0.3)
    assert (
        big.encoder.embedding.embedding_dim,
        len(big.decoder.layers),
        big.decoder.dropout.p,
    ) == (1024, 3, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# torch 2.11 joins the weights of an LSTM for cuDNN beforehand, but not those in bfloat16.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_gpu_in_half_precision_is_close_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = batch()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected = tiny().float()(source, LENGTHS, target)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
        model = tiny(dropout=0.0).to("cuda", dtype).train()  # cuDNN has no gradients in evaluation
        scores = model(source.cuda(), LENGTHS.cuda(), target.cuda())
        assert (scores.float().cpu() - expected).abs().max() < tolerance * expected.abs().max()
        scores.float().logsumexp(dim=-1).sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("is_autocast", [True, False])
def test_attention_asks_for_scores_in_a_form_that_the_kernels_take(
    is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Tensor, ...]] = []

    def record(*parts: Tensor) -> Tensor:
        asked.append(parts)
        return attention_score(*parts)

    monkeypatch.setattr(modules, "attention_score", record)
    source, target = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        model = tiny().to(torch.float32 if is_autocast else torch.bfloat16)
        model(source, LENGTHS, target)
    query, keys, bias, v = asked[0]
    assert query.dtype == keys.dtype == torch.bfloat16
    assert bias.dtype == v.dtype == (torch.float32 if is_autocast else torch.bfloat16)
    assert query.stride(-1) == keys.stride(-1) == 1
