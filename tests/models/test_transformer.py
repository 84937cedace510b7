"""The Transformer: attention against a formula, what may and what may not change its outputs, its
size."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.models.pytorch.transformer.modules import (
    DecoderLayer,
    EncoderLayer,
    IncrementalState,
    LearnedPositions,
    MultiheadAttention,
    SinusoidalPositions,
    multihead_attention,
)
from mlbench_core.models.pytorch.transformer.modules.attention import sdpa_attention

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "max_source_positions": 32,
    "max_target_positions": 32,
}
DTYPES = [torch.float16, torch.bfloat16]


def words(number: int = 12) -> Dictionary:
    return Dictionary(symbols=[f"w{i}_" for i in range(number - 2)])


def tiny(seed: int = 0, **changes) -> TransformerModel:
    torch.manual_seed(seed)
    vocabulary = words()
    return (
        TransformerModel(TransformerConfig(**{**TINY, **changes}), vocabulary, vocabulary)
        .double()
        .eval()
    )


def random_tokens(lengths: list[int], width: int, seed: int, left: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in zip(tokens, lengths, strict=True):
        content = torch.randint(2, 12, (length,), generator=generator)
        row[width - length :] = content if left else row[width - length :]
        row[:length] = row[:length] if left else content
    return tokens


def attention_by_hand(
    module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, hidden
) -> Tensor:
    """Position by position and head by head; ``hidden(b, t, s)`` says what is masked."""
    wq, wk, wv = module.in_proj_weight.chunk(3)
    heads, d = module.num_heads, module.head_dim
    output = torch.zeros_like(query)
    for b in range(query.shape[1]):
        for t in range(query.shape[0]):
            parts = []
            for h in range(heads):
                rows = slice(h * d, (h + 1) * d)
                q = wq[rows] @ query[t, b]
                seen = [s for s in range(key.shape[0]) if not hidden(b, t, s)]
                if not seen:
                    parts.append(torch.zeros(d, dtype=query.dtype))
                    continue
                scores = torch.stack([q @ (wk[rows] @ key[s, b]) / math.sqrt(d) for s in seen])
                values = torch.stack([wv[rows] @ value[s, b] for s in seen])
                parts.append(scores.softmax(dim=0) @ values)
            output[t, b] = module.out_proj.weight @ torch.cat(parts)
    return output


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross", "three"])
def test_attention_is_the_papers_formula(
    backend: str, causal: bool, padded: bool, kind: str
) -> None:
    torch.manual_seed(1)
    module = MultiheadAttention(8, 2, backend=backend).double()
    query = torch.randn(4, 3, 8, dtype=torch.float64)
    key = query if kind == "self" else torch.randn(4 if causal else 5, 3, 8, dtype=torch.float64)
    value = torch.randn_like(key) if kind == "three" else key
    padding = torch.zeros(3, key.shape[0], dtype=torch.bool)
    padding[1, 2:], padding[2, :] = padded, padded  # the last sentence is nothing but padding
    mask = padding if padded else None

    def hidden(b: int, t: int, s: int) -> bool:
        return bool(padding[b, s]) or (causal and s > t)

    with torch.no_grad():
        expected = attention_by_hand(module, query, key, value, hidden)
        output, weights = module(query, key, value, causal, mask, need_weights=False)
        assert weights is None
        torch.testing.assert_close(output, expected)
        output, weights = module(query, key, value, causal, mask)
        torch.testing.assert_close(output, expected)
    assert weights.shape == (3, 4, key.shape[0])
    empty = torch.tensor(
        [[all(hidden(b, t, s) for s in range(key.shape[0])) for t in range(4)] for b in range(3)]
    )
    torch.testing.assert_close(weights.sum(dim=-1), (~empty).double())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_both_paths_have_the_same_gradients_and_no_nan_for_padding_only(backend: str) -> None:
    torch.manual_seed(2)
    module = MultiheadAttention(8, 2, bias=True).double()
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 4, [True, True, False, False], [True] * 4])
    gradients = []
    for path in ("reference", backend):
        module.backend = path
        output, _ = module(x, x, x, True, padding, need_weights=False)
        loss = output.square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *module.parameters()]))
    for one, other in zip(*gradients, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("seed", range(4))
def test_masked_keys_never_matter(backend: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    module = MultiheadAttention(8, 4, backend=backend).eval()
    key = torch.randn(7, 5, 8, generator=generator)
    query = torch.randn(3, 5, 8, generator=generator)
    padding = torch.rand(5, 7, generator=generator) < 0.4
    changed = torch.where(
        padding.t().unsqueeze(2), 1000 * torch.randn(7, 5, 8, generator=generator), key
    )
    outputs = [
        module(query, k, k, key_padding_mask=padding, need_weights=False)[0] for k in (key, changed)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("softmax_type", ["default", "fast_fill"])
def test_attention_weights_are_dropped_out_in_training_only(softmax_type: str) -> None:
    torch.manual_seed(3)
    module = MultiheadAttention(64, 1, dropout=0.25, softmax_type=softmax_type)
    with torch.no_grad():
        for weight in (module.in_proj_weight[:64], module.in_proj_weight[64:128]):
            weight.zero_()  # all weights are equal
        module.in_proj_weight[128:].copy_(torch.eye(64))
        module.out_proj.weight.copy_(torch.eye(64))
    x = torch.eye(64).unsqueeze(1)  # the output shows the weights
    for needed in (True, False):
        weights = module(x, x, x, need_weights=needed)[0].squeeze(1)
        dropped = (weights == 0).double().mean().item()
        assert dropped == pytest.approx(0.25, abs=0.04)
        torch.testing.assert_close(
            weights[weights > 0], torch.tensor(1 / 64 / 0.75).expand(int((weights > 0).sum()))
        )
    module.eval()
    torch.testing.assert_close(module(x, x, x)[0].squeeze(1), torch.full((64, 64), 1 / 64))


def test_torchs_kernel_is_told_of_causality_and_gets_a_mask_only_for_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[bool, bool]] = []
    kernel = F.scaled_dot_product_attention

    def spy(
        *args: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **others: float
    ) -> Tensor:
        calls.append((is_causal, attn_mask is not None))
        return kernel(*args, attn_mask=attn_mask, is_causal=is_causal, **others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    module, x = MultiheadAttention(8, 2), torch.randn(4, 2, 8)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    module(x, x, x, mask_future_timesteps=True, need_weights=False)
    module(x, x, x, need_weights=False)
    module(x, x, x, mask_future_timesteps=True, key_padding_mask=padding, need_weights=False)
    module(x, x, x, mask_future_timesteps=True)  # the weights are asked for: the plain path
    assert calls == [(True, False), (False, False), (False, True)]


def test_attention_refuses_wrong_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"embed_dim must be a multiple of num_heads \(4\), not 10"
    ):
        MultiheadAttention(10, 4)
    with pytest.raises(ValueError, match=r"dropout must be .* below 1, not 1\.0"):
        MultiheadAttention(8, 4, dropout=1.0)
    with pytest.raises(
        ValueError, match="softmax_type must be one of default, fast_fill, not 'hard'"
    ):
        MultiheadAttention(8, 4, softmax_type="hard")
    with pytest.raises(
        ValueError,
        match="backend must be 'auto' or 'sdpa' with softmax_type='fast_fill', not 'reference'",
    ):
        MultiheadAttention(8, 4, softmax_type="fast_fill", backend="reference")
    with pytest.raises(ValueError, match=r"backend must be one of .*, not 'magic'"):
        MultiheadAttention(8, 4, backend="magic")  # type: ignore[arg-type]
    module, x = MultiheadAttention(8, 4), torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"query must have .* features, not shape \(3, 2, 4\)"):
        module(x[:, :, :4], x, x)
    with pytest.raises(
        ValueError, match=r"key_padding_mask must have shape \(2, 3\), not \(3, 2\)"
    ):
        module(x, x, x, key_padding_mask=torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="key and value must be tensors, not None"):
        module(x, None, None)
    with pytest.raises(ValueError, match="query must have a multiple of the key's 3 rows, not 2"):
        module(x, torch.zeros(3, 3, 8), torch.zeros(3, 3, 8))


def test_sinusoidal_positions_are_the_papers() -> None:
    positions = SinusoidalPositions(6, 10, padding_idx=0)
    vectors = positions(torch.tensor([[0, 0, 5, 6, 7]]))[0]
    assert vectors[:2].abs().max() == 0
    for pos in range(3):
        for i in range(3):
            angle = pos / 10000 ** (2 * i / 6)
            assert vectors[2 + pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert vectors[2 + pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    with pytest.raises(ValueError, match="at most 10 tokens, not 11"):
        positions(torch.ones(1, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match="embed_dim must be even and at least 2, not 5"):
        SinusoidalPositions(5, 10, padding_idx=0)


@pytest.mark.parametrize("kind", [SinusoidalPositions, LearnedPositions])
def test_positions_continue_where_earlier_calls_ended(kind: type) -> None:
    positions = kind(6, 10, padding_idx=0)
    tokens = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(positions(tokens)[:, 2:], positions(tokens[:, 2:], before=2))


def copy_attention(own: MultiheadAttention, torchs: nn.MultiheadAttention) -> None:
    torchs.in_proj_weight.copy_(own.in_proj_weight)
    torchs.out_proj.weight.copy_(own.out_proj.weight)
    for bias in (torchs.in_proj_bias, torchs.out_proj.bias):
        bias.zero_()


@pytest.mark.parametrize("normalize_before", [True, False])
def test_layers_are_torchs_layers(normalize_before: bool) -> None:
    torch.manual_seed(5)
    orders = {f"{side}_normalize_before": normalize_before for side in ("encoder", "decoder")}
    config = TransformerConfig(**TINY, **orders)
    sizes = {"dropout": 0.0, "norm_first": normalize_before, "dtype": torch.float64}
    encoder, decoder = EncoderLayer(config).double().eval(), DecoderLayer(config).double().eval()
    torch_encoder = nn.TransformerEncoderLayer(16, 4, 24, **sizes)
    torch_decoder = nn.TransformerDecoderLayer(16, 4, 24, **sizes)
    with torch.no_grad():
        for norm in (module for layer in (encoder, decoder) for module in layer.modules()):
            if isinstance(norm, nn.LayerNorm):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        for own, other in ((encoder, torch_encoder), (decoder, torch_decoder)):
            copy_attention(own.self_attn, other.self_attn)
            other.linear1.load_state_dict(own.feed_forward.fc1.state_dict())
            other.linear2.load_state_dict(own.feed_forward.fc2.state_dict())
            other.norm1.load_state_dict(own.self_attn_residual.layer_norm.state_dict())
        copy_attention(decoder.encoder_attn, torch_decoder.multihead_attn)
        torch_encoder.norm2.load_state_dict(encoder.feed_forward_residual.layer_norm.state_dict())
        torch_decoder.norm2.load_state_dict(decoder.encoder_attn_residual.layer_norm.state_dict())
        torch_decoder.norm3.load_state_dict(decoder.feed_forward_residual.layer_norm.state_dict())
    source = torch.randn(5, 3, 16, dtype=torch.float64)
    target = torch.randn(4, 3, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False], [False] * 4 + [True]])
    torch.testing.assert_close(
        encoder(source, padding), torch_encoder(source, src_key_padding_mask=padding)
    )
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected = torch_decoder(target, source, tgt_mask=causal, memory_key_padding_mask=padding)
    torch.testing.assert_close(decoder(target, source, padding)[0], expected)


def expected_parameters(vocabulary: int, d: int, f: int, layers: int) -> int:
    """Vaswani et al. 2017: four d x d matrices an attention, two d x f a feed-forward network,
    layer norms of 2 d."""
    attention, norm = 4 * d * d, 2 * d
    feed_forward = d * f + f + f * d + d
    encoder = layers * (attention + feed_forward + 2 * norm) + norm
    decoder = layers * (2 * attention + feed_forward + 3 * norm) + norm
    return vocabulary * d + encoder + decoder


@pytest.mark.parametrize(
    ("preset", "d", "f", "layers"), [("big", 1024, 4096, 6), ("base", 512, 2048, 6)]
)
def test_number_of_parameters(preset: str, d: int, f: int, layers: int) -> None:
    vocabulary = words(32_768)
    with torch.device("meta"):
        model = TransformerModel(TransformerConfig.preset(preset), vocabulary, vocabulary)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == expected_parameters(32_768, d, f, layers)
    if preset == "big":
        assert number == 209_842_176  # the paper says 213 million, with its 37,000 symbols


def test_number_of_parameters_without_sharing() -> None:
    source, target = words(11), words(9)
    model = TransformerModel(
        argparse.Namespace(**TINY, share_all_embeddings=False, data="x"), source, target
    )
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == expected_parameters(11 + 9 + 9, 16, 24, 2)
    assert model(torch.tensor([[10, 1]]), None, torch.tensor([[1, 8]]))[0].shape == (1, 2, 9)
    with pytest.raises(
        ValueError, match=r"src_dict \(11 symbols\) and trg_dict \(9 symbols\) are not equal"
    ):
        TransformerModel(argparse.Namespace(**TINY), source, target)


VARIANTS = [
    {},
    {"encoder_learned_pos": True, "decoder_learned_pos": True},
    {"encoder_normalize_before": False, "decoder_normalize_before": False},
    {"attention_backend": "reference"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_left_padding_is_right_padding_shifted(changes: dict, seed: int) -> None:
    model, lengths = tiny(seed, **changes), [3, 7, 5]
    left, right = (random_tokens(lengths, 9, seed, left) for left in (True, False))
    target = random_tokens([4, 6, 2], 6, seed + 10, left=False)
    outputs = [model(source, torch.tensor(lengths), target)[0] for source in (left, right)]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)


def test_left_padded_targets_are_right_padded_ones_shifted() -> None:
    model, lengths = tiny(left_pad_target=True), [3, 6, 5]
    source = random_tokens([4, 2, 5], 5, 0, left=True)
    left, right = (random_tokens(lengths, 6, 1, left) for left in (True, False))
    shifted, plain = model(source, None, left)[0], model(source, None, right)[0]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            shifted[row, 6 - length :], plain[row, :length], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_padding_never_matters(changes: dict, seed: int) -> None:
    model, lengths = tiny(seed, **changes), [3, 7, 5]
    source = random_tokens(lengths, 7, seed, left=True)
    target = random_tokens([4, 6, 2], 6, seed + 10, left=False)
    expected = model(source, torch.tensor(lengths), target)[0]
    wider = torch.cat((torch.zeros(3, 4, dtype=torch.int64), source), dim=1)
    torch.testing.assert_close(
        model(wider, torch.tensor(lengths), target)[0], expected, rtol=1e-9, atol=1e-9
    )
    with (
        torch.no_grad()
    ):  # shared weights: the column of the padding's score changes, and nothing else
        model.encoder.embed_tokens.weight[0] = 100.0
    changed = model(wider, torch.tensor(lengths), target)[0]
    is_token = target != 0
    torch.testing.assert_close(
        changed[is_token][:, 1:], expected[is_token][:, 1:], rtol=1e-9, atol=1e-9
    )
    for row in range(3):
        alone = model(source[row : row + 1, 7 - lengths[row] :], None, target[row : row + 1])[0]
        torch.testing.assert_close(alone[0, is_token[row], 1:], expected[row, is_token[row], 1:])


@pytest.mark.parametrize("seed", range(3))
def test_later_tokens_never_matter(seed: int) -> None:
    model = tiny(seed)
    source = random_tokens([3, 5], 5, seed, left=True)
    target = random_tokens([6, 6], 6, seed, left=False)
    expected = model(source, None, target)[0]
    for position in range(1, 6):
        changed = target.clone()
        changed[:, position:] = random_tokens(
            [6 - position] * 2, 6 - position, seed + 50, left=False
        )
        output = model(source, None, changed)[0]
        torch.testing.assert_close(
            output[:, :position], expected[:, :position], rtol=1e-12, atol=1e-12
        )
        assert not torch.equal(output[:, position:], expected[:, position:])


def test_gradients_reach_every_parameter() -> None:
    model = tiny().train()
    source = random_tokens([3, 5], 5, 0, left=True)
    model(source, None, random_tokens([4, 2], 4, 1, left=False))[0].square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_cached_decoding_is_uncached_decoding(changes: dict) -> None:
    model = tiny(3, **changes).float()
    source = random_tokens([3, 6, 1], 6, 3, left=True)
    target = random_tokens([5, 5, 5], 5, 4, left=False)
    with torch.no_grad():
        expected = model(source, None, target)[0]
        encoder_out, mask = model.encoder(source)
        state = IncrementalState()
        for t in range(5):
            scores, _ = model.decoder(target[:, t : t + 1], encoder_out, mask, state, before=t)
            torch.testing.assert_close(scores[:, 0], expected[:, t], rtol=1e-5, atol=1e-5)
    assert sorted({cache.keys.shape[2] for cache in state.values()}) == [5, 6]


def test_caches_follow_the_rows_and_hypotheses_share_the_source() -> None:
    model = tiny(4)
    source = random_tokens([3, 6, 2], 6, 3, left=True)
    target = random_tokens([4] * 4, 4, 5, left=False)
    sentence_of = torch.tensor([2, 2, 0, 0])
    with torch.no_grad():
        expected = model(source[sentence_of], None, target)[0]
        encoder_out, mask = model.encoder(source)
        state = IncrementalState()
        # One row a sentence, then two rows of sentences 2 and 0, which began with tokens that are
        # theirs only later.
        first = torch.stack((target[2], target[2], target[0]))[:, :1]
        model.decoder(first, encoder_out, mask, state, before=0)
        kept = torch.tensor([2, 0])
        state.reorder(sentence_of, kept)
        encoder_out, mask = encoder_out[:, kept], mask[kept]
        target[1, 0], target[3, 0] = target[0, 0], target[2, 0]
        expected = model(source[sentence_of], None, target)[0]
        swap = torch.tensor([1, 0, 3, 2])
        order = torch.arange(4)
        for t in range(1, 4):
            scores, weights = model.decoder(
                target[order, t : t + 1], encoder_out, mask, state, before=t, need_weights=True
            )
            torch.testing.assert_close(scores[:, 0], expected[order, t])
            assert weights.shape == (4, 1, 6)
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights.sum(dim=-1)))
            assert weights[:2, 0, :4].abs().max() == 0  # sentence 2 has two tokens, on the right
            state.reorder(swap, None)
            order = order[swap]
    assert {cache.keys.shape[0] for cache in state.values() if cache.is_static} == {2}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_several_new_positions_continue_a_cache(backend: str) -> None:
    torch.manual_seed(0)
    module, state = MultiheadAttention(8, 2, backend=backend).double(), {}
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    expected, _ = module(x, x, x, mask_future_timesteps=True, need_weights=False)
    parts = [
        module(
            part,
            part,
            part,
            mask_future_timesteps=True,
            incremental_state=state,
            need_weights=False,
        )[0]
        for part in x.split([1, 3, 2])
    ]
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_finite_and_near(dtype: torch.dtype) -> None:
    model = tiny().float()
    source, target = random_tokens([3, 6], 6, 0, left=True), random_tokens([5, 2], 5, 1, left=False)
    expected = model(source, None, target)[0]
    for backend in ("reference", "sdpa"):
        half = tiny(attention_backend=backend).to(dtype)
        output = half(source, None, target)[0]
        assert output.dtype == dtype
        error = (output.float() - expected).abs().max() / expected.abs().max()
        assert error < (0.01 if dtype == torch.float16 else 0.06)
        output.float().square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in half.parameters())


def test_auto_and_fast_fill_are_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def count(*args: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        return sdpa_attention(*args)

    monkeypatch.setattr(multihead_attention, "sdpa_attention", count)
    x, outputs = torch.randn(4, 2, 16), []
    for choice in ({"backend": "auto"}, {"backend": "sdpa"}, {"softmax_type": "fast_fill"}):
        torch.manual_seed(0)
        outputs.append(MultiheadAttention(16, 4, **choice)(x, x, x, need_weights=False)[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert calls == 3


def test_large_scores_do_not_overflow_in_half_precision() -> None:
    for backend in ("reference", "sdpa"):
        module = MultiheadAttention(8, 2, backend=backend).half().eval()
        x = 200 * torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).half()
        padding = torch.tensor([[True, True, False, False], [True] * 4])
        output, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
        assert torch.isfinite(output).all()


def test_the_whole_model_compiles_into_one_graph() -> None:
    model = tiny()
    source, target = random_tokens([3, 6], 6, 0, left=True), random_tokens([5, 2], 5, 1, left=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(source, None, target)[0], model(source, None, target)[0]
        )
    torch._dynamo.reset()


def test_the_config_reads_namespaces_and_refuses_what_cannot_be() -> None:
    read = TransformerConfig.from_args(argparse.Namespace(dropout=0.2, arch="ignored"))
    assert read == TransformerConfig(dropout=0.2)
    assert TransformerConfig.preset("small", encoder_layers=1).encoder_layers == 1
    with pytest.raises(ValueError, match="preset must be one of big, base, small, not 'huge'"):
        TransformerConfig.preset("huge")
    with pytest.raises(
        ValueError, match=r"decoder_embed_dim must be encoder_embed_dim \(512\), not 1024"
    ):
        TransformerConfig(encoder_embed_dim=512)
    with pytest.raises(ValueError, match="decoder_layers must be at least 1, not 0"):
        TransformerConfig(decoder_layers=0)
    with pytest.raises(ValueError, match="relu_dropout must be at least 0 and below 1, not 1"):
        TransformerConfig(relu_dropout=1)
