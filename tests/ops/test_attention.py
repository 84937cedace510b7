"""Attention of short sentences in its plain form, and the choice of the CUDA kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mlbench_core.ops.pytorch import extension, fused_attention
from mlbench_core.ops.pytorch.attention import why_not_kernel
from mlbench_core.ops.pytorch.philox import draw_seed, philox4x32

BATCH, QUERIES, KEYS, HEADS, SIZE = 3, 5, 7, 2, 4


def operands(
    queries: int = QUERIES, keys: int = KEYS, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, length, HEADS, SIZE, generator=generator, dtype=dtype).requires_grad_()
        for length in (queries, keys, keys)
    ]


def padding(keys: int = KEYS) -> Tensor:
    """Return the padding of a whole sentence, of one padded on the left, and of one padded on the
    right."""
    lengths = torch.tensor([keys, keys - 2, keys - 3])
    position = torch.arange(keys)
    hidden = position >= lengths.unsqueeze(1)
    hidden[1] = hidden[1].flip(0)
    return hidden


def by_torch(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, is_causal: bool) -> Tensor:
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if is_causal:
        visible = visible.tril(k.shape[1] - q.shape[1])
    if hidden is not None:
        visible = visible & ~hidden[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("queries", [1, QUERIES, KEYS])
def test_output_and_gradients_are_those_of_torch(
    is_causal: bool, is_padded: bool, queries: int
) -> None:
    parts = operands(queries)
    hidden = padding() if is_padded else None
    ours = fused_attention(*parts, key_padding=hidden, is_causal=is_causal)
    theirs = by_torch(*parts, hidden, is_causal)
    # Of queries that see no key, torch returns nan or 0, and we return 0.
    seen = theirs.isfinite() & (theirs != 0)
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=0, atol=1e-12)
    assert (ours[~seen] == 0).all()
    for mine, other in zip(
        torch.autograd.grad(ours[seen].sin().sum(), parts),
        torch.autograd.grad(theirs[seen].sin().sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(mine, other.nan_to_num(), rtol=0, atol=1e-12)


def test_a_module_of_torch_agrees() -> None:
    width = HEADS * SIZE
    module = nn.MultiheadAttention(width, HEADS, bias=False, batch_first=True).double()
    x = torch.randn(BATCH, KEYS, width, dtype=torch.float64)
    expected, _ = module(x, x, x, key_padding_mask=padding(), need_weights=False)
    qkv = F.linear(x, module.in_proj_weight).unflatten(-1, (3, HEADS, SIZE))
    output = F.linear(
        fused_attention(qkv, key_padding=padding()).flatten(2), module.out_proj.weight
    )
    tokens = ~padding()
    torch.testing.assert_close(output[tokens], expected[tokens], rtol=0, atol=1e-6)
    assert (output[padding()] == 0).all()


@pytest.mark.parametrize("fused", [1, 2, 3])
def test_a_fused_projection_gets_the_gradients_of_its_parts_in_one_tensor(fused: int) -> None:
    q, k, v = operands(KEYS)
    parts = {1: [torch.stack([q, k, v], 2)], 2: [q, torch.stack([k, v], 2)], 3: [q, k, v]}[fused]
    parts = [part.detach().requires_grad_() for part in parts]
    expected = torch.autograd.grad(fused_attention(q, k, v).sin().sum(), (q, k, v))
    found = torch.autograd.grad(fused_attention(*parts).sin().sum(), parts)
    flat = [x for part in found for x in (part.unbind(2) if part.dim() == 5 else [part])]
    torch.testing.assert_close(flat, list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.4}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    seed = torch.tensor([11])
    torch.autograd.gradcheck(
        lambda *parts: fused_attention(*parts, key_padding=padding(), seed=seed, **options),
        operands(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    parts = [part.detach().to(dtype) for part in operands()]
    expected = fused_attention(*(part.float() for part in parts))
    assert torch.equal(fused_attention(*parts), expected.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused_attention(*parts), expected.to(dtype))


def test_dropout_drops_at_its_rate_and_keeps_the_expectation() -> None:
    q, k, v = torch.zeros(8, 64, 4, 64), torch.zeros(8, 64, 4, 64), torch.eye(64).expand(4, 64, 64)
    v = v.transpose(0, 1).expand(8, 64, 4, 64)
    # All weights are 1/64, and a head's output is its row of weights.
    weights = fused_attention(q, k, v, dropout_p=0.25, seed=torch.tensor([3]))
    dropped = (weights == 0).double().mean().item()
    assert dropped == pytest.approx(0.25, abs=6 * math.sqrt(0.25 * 0.75 / weights.numel()))
    kept = weights[weights != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 64 / 0.75))
    other = fused_attention(q, k, v, dropout_p=0.25, seed=torch.tensor([3]), offset=1)
    assert not torch.equal(weights, other)


def test_a_seed_repeats_a_mask_and_torchs_generator_repeats_a_seed() -> None:
    parts = operands()
    seeded = [fused_attention(*parts, dropout_p=0.5, seed=torch.tensor([5])) for _ in range(2)]
    assert torch.equal(*seeded)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(fused_attention(*parts, dropout_p=0.5))
    assert torch.equal(*drawn)
    torch.manual_seed(1)
    assert torch.equal(drawn[0], fused_attention(*parts, dropout_p=0.5, seed=draw_seed("cpu")))


def test_recomputed_attention_drops_the_same_weights() -> None:
    parts = operands()

    def attend(*inputs: Tensor) -> Tensor:
        return fused_attention(*inputs, dropout_p=0.3)

    gradients = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        output = (
            checkpoint(attend, *parts, use_reentrant=False) if is_recomputed else attend(*parts)
        )
        gradients.append(torch.autograd.grad(output.sin().sum(), parts))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_philox_is_that_of_the_paper() -> None:
    """The known answers of Random123 are for ten rounds."""
    ones = torch.tensor(0xFFFFFFFF)
    words = philox4x32((ones, ones), (ones, ones, ones, ones), rounds=10)
    assert [int(word) for word in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_time_first_tensors_stay_time_first() -> None:
    parts = [part.detach().transpose(0, 1).contiguous().transpose(0, 1) for part in operands(KEYS)]
    assert fused_attention(*parts).transpose(0, 1).is_contiguous()


def test_a_tensor_that_is_padding_may_hold_anything() -> None:
    q, k, v = (part.detach() for part in operands())
    expected = fused_attention(q, k, v, key_padding=padding())
    k[padding()], v[padding()] = math.nan, math.inf
    assert torch.equal(fused_attention(q, k, v, key_padding=padding()), expected)


def operator_inputs() -> tuple[list[Tensor], list[Any]]:
    rest = [None, None, QUERIES, KEYS, None, padding(), True, 0.5, 0.25, torch.tensor([9]), 2]
    return operands(), rest


def test_operators_say_what_they_do() -> None:
    parts, rest = operator_inputs()
    parts = [part.detach() for part in parts]
    torch.library.opcheck(torch.ops.mlbench.short_attention.default, (*parts, *rest))
    output, logsumexp = torch.ops.mlbench.short_attention(*parts, *rest)
    gradients = [torch.empty_like(part) for part in parts]
    inputs = (torch.ones_like(output), *parts, logsumexp, *rest, *gradients)
    torch.library.opcheck(torch.ops.mlbench.short_attention_backward.default, inputs)


# torch 2.13's compiler makes an object of the autograd.Function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_it_compiles_into_one_graph(dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler shows a progress bar, whose thread would stay.
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    parts = operands()

    def attend(*inputs: Tensor) -> Tensor:
        return fused_attention(*inputs, key_padding=padding(), is_causal=True, dropout_p=dropout_p)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = []
    for function in (attend, compiled):
        torch.manual_seed(0)
        output = function(*parts)
        results.append((output, *torch.autograd.grad(output.sin().sum(), parts)))
    torch.testing.assert_close(*results)
    # One tensor may be queries, keys and values.
    x = parts[1]
    torch.testing.assert_close(compiled(x, x, x).shape, attend(x, x, x).shape)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "the shapes must be"),
        (lambda q, k, v: (q, k[:1], v[:1]), "the shapes must be"),
        (lambda q, k, v: (q, k, v[:, :3]), "the shapes must be"),
        (lambda q, k, v: (q, k[..., :2], v[..., :2]), "the shapes must be"),
        (lambda q, k, v: (q.new_zeros(3, 129, 2, 4), k, v), "at most 128 positions"),
        (lambda q, k, v: (q, k.float(), v.float()), "one floating-point dtype"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "one floating-point dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_attention(*change(*(part.detach() for part in operands())))


def test_other_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"key_padding must be \(3, 7\), not \(3, 6\)"):
        fused_attention(*operands(), key_padding=padding()[:, :6])
    with pytest.raises(ValueError, match="dropout_p must be from 0 to 65535/65536, not 1"):
        fused_attention(*operands(), dropout_p=1.0)


# ---- the choice of the kernels


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "reason"),
    [
        ((2, 128, 4, 64), torch.float16, "cuda", None),
        ((2, 128, 4, 32), torch.bfloat16, "cuda", None),
        ((2, 20, 3, 4, 64), torch.float16, "cuda", None),
        ((2, 128, 4, 64), torch.float16, "cpu", "the tensors are on cpu"),
        ((2, 128, 4, 64), torch.float32, "cuda", "not in half precision"),
        ((2, 128, 4, 48), torch.float16, "cuda", "48 features, not 32 or 64"),
        ((2, 129, 4, 64), torch.float16, "cuda", "more than 128 positions"),
        ((0, 128, 4, 64), torch.float16, "cuda", "multiples of 16 bytes"),
    ],
)
def test_kernels_take_short_sentences_in_half_precision_on_a_gpu(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "why_not", lambda: None)
    with FakeTensorMode():  # tensors without data, which need no GPU
        found = why_not_kernel(torch.empty(shape, dtype=dtype, device=device))
    assert found is None if reason is None else reason in str(found)


def test_strided_rows_must_begin_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_not", lambda: None)
    with FakeTensorMode():
        wide = torch.empty(2, 9, 2, 72, dtype=torch.float16, device="cuda")
        # An index would need a CUDA build of torch, and these functions do not.
        aligned = wide.narrow(-1, 0, 64)
        assert why_not_kernel(aligned) is None
        assert "16 bytes" in str(why_not_kernel(wide.narrow(-1, 4, 64)))
        every_second = wide.as_strided((2, 9, 2, 32), (1296, 144, 72, 2))
        assert "16 bytes" in str(why_not_kernel(every_second))
        monkeypatch.setattr(extension, "why_not", lambda: "they are not built")
        assert why_not_kernel(aligned) == "they are not built"


@pytest.mark.parametrize("reason", [None, "they are not built"])
def test_tensors_that_the_kernels_refuse_do_not_reach_the_operator(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(extension, "why_not", lambda: reason)
    monkeypatch.setitem(
        fused_attention.__globals__,
        "_forward",
        lambda q, *rest: calls.append(q.shape) or (torch.empty_like(q), q.new_empty(2, 4, 9)),
    )
    with FakeTensorMode():
        parts = [torch.empty(2, 9, 4, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
        assert fused_attention(*parts).device.type == "cuda"
    assert calls == ([] if reason is None else [(2, 9, 4, 64)])


def test_without_a_library_the_reason_names_the_command(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension._load_error.cache_clear()
    try:
        monkeypatch.setattr(extension, "LIBRARY", tmp_path / "missing.so")
        assert "python -m mlbench_core.install_cuda_extensions" in str(extension.why_not())
        extension._load_error.cache_clear()
        (tmp_path / "missing.so").write_bytes(b"not a library")
        assert "missing.so cannot be loaded" in str(extension.why_not())
    finally:
        extension._load_error.cache_clear()
