"""Attention of short sentences: the operators and their plain implementation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mlbench_core.ops.pytorch import attention, extension
from mlbench_core.ops.pytorch.attention import (
    draw_seed,
    short_attention,
    short_attention_kv,
    short_attention_qkv,
    uses_kernel,
    why_not_kernel,
)
from mlbench_core.ops.pytorch.attention_reference import output_like
from mlbench_core.ops.pytorch.philox import attention_dropout_mask, dropout_threshold, philox4x32

BATCH, HEADS, WIDTH = 3, 2, 8
SEED = 0x7EDCBA9876543210


def numpy_philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Seven rounds of Philox4x32 by the paper, with 64-bit products."""
    k = [np.uint32(word) for word in key]
    c = [np.uint32(word) for word in counter]
    for number in range(7):
        if number > 0:
            with np.errstate(over="ignore"):
                k = [k[0] + np.uint32(0x9E3779B9), k[1] + np.uint32(0xBB67AE85)]
        first = np.uint64(0xD2511F53) * np.uint64(c[0])
        second = np.uint64(0xCD9E8D57) * np.uint64(c[2])
        high = [np.uint32(product >> np.uint64(32)) for product in (first, second)]
        low = [np.uint32(product & np.uint64(0xFFFFFFFF)) for product in (first, second)]
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
    return [int(word) for word in c]


def numpy_keep(seed: int, offset: int, row: int, i: int, j: int, threshold: int) -> bool:
    """Whether dropout keeps the weight of key j for query i in row sentence x heads + head."""
    words = numpy_philox(
        (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), ((j // 32) * 4 + (j % 8) // 2, i, row, offset & 0xFFFFFFFF)
    )
    field = 2 * ((j % 32) // 8) + j % 2
    return (words[field // 2] >> (16 * (field % 2))) & 0xFFFF >= threshold


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kept: Tensor | None = None,
    rate: float = 0.0,
) -> Tensor:
    """Attention query by query, over the keys that it sees and no others; tensors (batch, positions, heads, d)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for b in range(query.shape[0]):
        for i in range(query.shape[1]):
            seen = torch.ones(key.shape[1], dtype=torch.bool) if key_padding is None else ~key_padding[b]
            if is_causal:
                seen = seen & (torch.arange(key.shape[1]) - key.shape[1] <= i - query.shape[1])
            for h in range(query.shape[2]):
                if not seen.any() or (query_padding is not None and query_padding[b, i]):
                    rows.append(0.0 * query[b, i, h])
                    continue
                weights = torch.softmax(scale * key[b, seen, h] @ query[b, i, h], dim=0)
                if kept is not None:
                    weights = weights * kept[b, h, i, seen] / (1 - rate)
                rows.append(weights @ value[b, seen, h])
    return torch.stack(rows).view(query.shape)


def tensors(queries: int, keys: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys and values that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((BATCH, queries, HEADS, WIDTH), (BATCH, keys, HEADS, WIDTH), (BATCH, keys, HEADS, WIDTH))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )


def padding_of(*lengths: int, total: int, left: bool = False) -> Tensor:
    """True at padding, for sentences of these lengths."""
    position = torch.arange(total)
    if left:
        return position < total - torch.tensor(lengths).unsqueeze(-1)
    return position >= torch.tensor(lengths).unsqueeze(-1)


HOLES = torch.tensor([[False, True, False, True, False], [True] * 5, [False] * 5])
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "right padding": {"key_padding": padding_of(5, 2, 3, total=5)},
    "left padding, causal": {"key_padding": padding_of(5, 2, 3, total=5, left=True), "is_causal": True},
    "holes, a sentence of padding alone": {"key_padding": HOLES, "is_causal": True},
    "queries too": {"key_padding": HOLES, "query_padding": HOLES},
}


@pytest.mark.parametrize("name", MASKS)
def test_agrees_with_the_formula_and_so_do_its_gradients(name: str) -> None:
    masks = MASKS[name]
    parts = tensors(5, 5)
    wanted = by_hand(*parts, **masks)
    output = short_attention(*parts, **masks)
    torch.testing.assert_close(output, wanted)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(output, parts, grad), torch.autograd.grad(wanted, parts, grad))


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (7, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention(queries: int, keys: int, is_causal: bool) -> None:
    """The last query and the last key are at the same position: of 7 queries and 3 keys, the first 4 see nothing."""
    parts = tensors(queries, keys)
    masks: dict[str, Any] = {
        "key_padding": padding_of(keys, 1, 2, total=keys),
        "query_padding": padding_of(1, queries, 2, total=queries),
        "is_causal": is_causal,
    }
    wanted = by_hand(*parts, **masks)
    output = short_attention(*parts, **masks)
    torch.testing.assert_close(output, wanted)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(output, parts, grad), torch.autograd.grad(wanted, parts, grad))


def test_rows_that_see_nothing_are_exactly_zero_and_so_are_gradients_of_padding() -> None:
    query, key, value = tensors(5, 5, dtype=torch.float32)
    output = short_attention(query, key, value, key_padding=HOLES, query_padding=HOLES)
    assert output.masked_select(HOLES[:, :, None, None]).eq(0).all()
    output.sum().backward()
    for part in (query, key, value):
        assert part.grad is not None
        assert part.grad.isfinite().all()
        assert part.grad.masked_select(HOLES[:, :, None, None]).eq(0).all()
        assert part.grad.masked_select(~HOLES[:, :, None, None]).ne(0).any()


def test_what_lies_at_padding_is_not_read() -> None:
    """Not even NaN, in tensors and in the gradient of the output."""
    parts = tensors(5, 5)
    hole = HOLES[:, :, None, None]
    spoiled = [part.detach().masked_fill(hole, math.nan).requires_grad_() for part in parts]
    results = []
    for operands, grad in ((parts, torch.ones(())), (spoiled, torch.ones(()).masked_fill(hole, math.nan))):
        output = short_attention(*operands, key_padding=HOLES, query_padding=HOLES)
        results.append((output, *torch.autograd.grad(output, operands, grad.expand_as(output).double())))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_rows_are_padded_ones(is_causal: bool) -> None:
    """With dropout too: positions are counted from a sentence's first row."""
    query_lengths, key_lengths = (4, 1, 5), (5, 2, 6)
    parts = tensors(5, 6)
    masks: dict[str, Any] = {
        "query_padding": padding_of(*query_lengths, total=5),
        "key_padding": padding_of(*key_lengths, total=6),
    }
    packed = (parts[0][~masks["query_padding"]], *(part[~masks["key_padding"]] for part in parts[1:]))
    starts = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (query_lengths, key_lengths)]
    options: dict[str, Any] = {"dropout_p": 0.25, "seed": torch.tensor([SEED]), "offset": 3}
    output = short_attention(
        *packed, query_starts=starts[0], key_starts=starts[1], max_query=5, max_key=6, is_causal=is_causal, **options
    )
    if is_causal:  # sentence by sentence: where the last positions are differs
        pieces = []
        for b in range(BATCH):
            rows = slice(*starts[0][b : b + 2].tolist()), slice(*starts[1][b : b + 2].tolist())
            kept = attention_dropout_mask(options["seed"], 3, (BATCH, HEADS, 5, 6), dropout_threshold(0.25))
            kept = kept[b : b + 1, :, : query_lengths[b], : key_lengths[b]]
            one = packed[0][rows[0]], packed[1][rows[1]], packed[2][rows[1]]
            pieces.append(by_hand(*(x[None] for x in one), is_causal=True, kept=kept, rate=0.25)[0])
        wanted = torch.cat(pieces)
    else:
        wanted = short_attention(*parts, **masks, **options)[~masks["query_padding"]]
    torch.testing.assert_close(output, wanted)
    grad = torch.randn_like(wanted)
    grads = [torch.autograd.grad(x, parts, grad, retain_graph=True) for x in (output, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("packed", [False, True])
def test_fused_projections(packed: bool) -> None:
    """One gradient for the fused tensor, with the memory order of the fused tensor."""
    projection = torch.randn(6, BATCH, 3 * HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"is_causal": True, "dropout_p": 0.1, "seed": torch.tensor([5])}
    masks: dict[str, Any] = {"padding": padding_of(6, 3, 1, total=6)}
    if packed:
        starts = torch.tensor([0, 5, 6, 12, 18], dtype=torch.int32)
        masks = {"starts": starts, "max_length": 6}
        qkv = projection.flatten(0, 1).unflatten(-1, (3, HEADS, WIDTH))
        both: dict[str, Any] = {"query_starts": starts, "key_starts": starts, "max_query": 6, "max_key": 6}
    else:
        qkv = projection.unflatten(-1, (3, HEADS, WIDTH)).transpose(0, 1)
        both = {"query_padding": masks["padding"], "key_padding": masks["padding"]}
    query, key, value = qkv.unbind(-3)
    wanted = short_attention(query, key, value, **both, **options)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), projection)
    for output in (
        short_attention_qkv(qkv, **masks, **options),
        short_attention_kv(query, qkv[..., 1:, :, :], **both, **options),
    ):
        torch.testing.assert_close(output, wanted)
        (grad,) = torch.autograd.grad(output.square().sum(), projection)
        torch.testing.assert_close(grad, wanted_grad)


def test_time_first_tensors_stay_so() -> None:
    projection = torch.randn(6, BATCH, 3 * HEADS * WIDTH, requires_grad=True)
    output = short_attention_qkv(projection.unflatten(-1, (3, HEADS, WIDTH)).transpose(0, 1))
    assert output.transpose(0, 1).is_contiguous()
    query, key, value = (part.detach().transpose(0, 1).contiguous().requires_grad_() for part in tensors(4, 5))
    short_attention(*(part.transpose(0, 1) for part in (query, key, value))).sum().backward()
    for part in (query, key, value):
        assert part.grad is not None and part.grad.is_contiguous()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_other_dtypes_compute_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Autocast, which would turn the products into bfloat16 ones, changes nothing."""
    parts = tensors(5, 5, dtype=dtype)
    wanted = by_hand(*(part.double() for part in parts), is_causal=True)
    output = short_attention(*parts, is_causal=True)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(short_attention(*parts, is_causal=True), output)


# ---- Dropout ---------------------------------------------------------------------------------------------------------


def test_philox_known_answers() -> None:
    """Of 7 rounds, from the authors' test vectors (Random123, philox4x32)."""
    ones, answers = 0xFFFFFFFF, {}
    for word in (0, ones):
        one = torch.tensor(word)
        answers[word] = [int(part) for part in philox4x32((one, one), (one, one, one, one))]
        assert answers[word] == numpy_philox((word, word), (word, word, word, word))
    assert answers[0] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert answers[ones] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


def test_the_mask_is_philox_at_each_weight() -> None:
    shape, offset = (2, 3, 9, 70), 2**32 + 5
    kept = attention_dropout_mask(torch.tensor([SEED]), offset, shape, 30000)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 8, 69), (0, 1, 3, 31), (1, 0, 5, 32), *np.ndindex(1, 1, 3, 40)]:
        assert bool(kept[b, h, i, j]) == numpy_keep(SEED, offset, b * 3 + h, i, j, 30000), (b, h, i, j)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_realised_rates(p: float) -> None:
    """Of 245,760 weights the share that is dropped is within 5 standard deviations of p rounded to 1/65536."""
    threshold = dropout_threshold(p)
    assert abs(threshold / 65536 - p) <= 0.5 / 65536
    kept = attention_dropout_mask(
        draw_seed("cpu", generator=torch.Generator().manual_seed(1)), 0, (8, 8, 128, 120), threshold
    )
    dropped = 1 - kept.double()
    rate = threshold / 65536
    assert dropped.mean().item() == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / kept.numel()))
    each_key = dropped.mean(dim=(0, 1, 2))
    assert (each_key - rate).abs().max() < 5.5 * math.sqrt(rate * (1 - rate) / 2048)


def test_masks_of_seeds_offsets_heads_and_rows_are_independent() -> None:
    """Two fair masks agree on half of their weights."""
    first = attention_dropout_mask(torch.tensor([3]), 0, (2, 2, 64, 64), 32768)
    others = [
        attention_dropout_mask(torch.tensor([3]), 1, (2, 2, 64, 64), 32768),
        attention_dropout_mask(torch.tensor([4]), 0, (2, 2, 64, 64), 32768),
        attention_dropout_mask(torch.tensor([3 + 2**32]), 0, (2, 2, 64, 64), 32768),
        first.roll(1, dims=0),
        first.roll(1, dims=1),
        first.roll(1, dims=2),
        first.roll(1, dims=3),
    ]
    for other in others:
        assert (first == other).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(first.numel()))


def test_output_and_gradients_with_dropout_are_those_of_the_formula_with_its_mask() -> None:
    parts, seed, p = tensors(5, 5), torch.tensor([SEED]), 0.3
    rate = dropout_threshold(p) / 65536
    kept = torch.tensor(
        [
            [
                [[numpy_keep(SEED, 2, b * HEADS + h, i, j, dropout_threshold(p)) for j in range(5)] for i in range(5)]
                for h in range(HEADS)
            ]
            for b in range(BATCH)
        ]
    )
    wanted = by_hand(*parts, is_causal=True, kept=kept, rate=rate)
    output = short_attention(*parts, is_causal=True, dropout_p=p, seed=seed, offset=2)
    torch.testing.assert_close(output, wanted)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(output, parts, grad), torch.autograd.grad(wanted, parts, grad))


def test_a_seed_is_drawn_only_where_there_is_dropout() -> None:
    parts = tensors(4, 4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    short_attention(*parts)
    short_attention(*parts, dropout_p=0.5, seed=torch.tensor([1]))
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (short_attention(*parts, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(short_attention(*parts, dropout_p=0.5), first)


# ---- The operators ---------------------------------------------------------------------------------------------------


def operator_arguments(layout: str, dropout_p: float = 0.25) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Query, key, value, and what follows them, for ``torch.ops.mlbench.short_attention``."""
    parts = [part.detach().float() for part in tensors(5, 6)]
    rest: tuple[Any, ...] = (None, None, 5, 6, padding_of(5, 2, 3, total=5), padding_of(1, 6, 4, total=6))
    if layout == "time first":
        parts = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    elif layout == "packed":
        parts = [part.flatten(0, 1) for part in parts]
        rest = (torch.tensor([0, 5, 11, 15]).int(), torch.tensor([0, 2, 8, 18]).int(), 6, 10, None, None)
    return parts, (*rest, True, 0.3, dropout_p, torch.tensor([SEED]) if dropout_p > 0 else None, 1)


@pytest.mark.parametrize("layout", ["padded", "time first", "packed"])
def test_opcheck(layout: str) -> None:
    parts, rest = operator_arguments(layout)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if layout == "time first":  # the dearest
        utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.mlbench.short_attention, (*parts, *rest), test_utils=utils)
    output, logsumexp = torch.ops.mlbench.short_attention(*parts, *rest)
    gradients = [torch.empty_like(part) for part in parts]
    arguments = (torch.randn_like(output), *parts, logsumexp, *rest, *gradients)
    torch.library.opcheck(torch.ops.mlbench.short_attention_backward, arguments, test_utils=utils)


@pytest.mark.parametrize("layout", ["padded", "time first", "packed"])
def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones(layout: str) -> None:
    parts, rest = operator_arguments(layout)
    real = torch.ops.mlbench.short_attention(*parts, *rest)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in (*parts, *rest)]
        fake = torch.ops.mlbench.short_attention(*fakes)
    for one, other in zip(real, fake, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    assert real[0].transpose(0, 1).is_contiguous() == (layout == "time first")


def test_the_plain_path_goes_round_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA tensors do that the kernels do not take, whatever is registered for the operators."""
    parts, options = tensors(5, 5), {"dropout_p": 0.2, "seed": torch.tensor([SEED])}
    results = []
    for is_plain in (False, True):
        monkeypatch.setattr(attention, "_needs_plain_path", lambda *_, is_plain=is_plain: is_plain)
        with torch.profiler.profile() as profile:
            output = short_attention(*parts, **options)
            results.append((output, *torch.autograd.grad(output.square().sum(), parts)))
        assert any(event.key.startswith("mlbench::") for event in profile.key_averages()) is not is_plain
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_logsumexp() -> None:
    """Natural logarithm of the sum before dropout; infinite where a query sees nothing."""
    parts, rest = operator_arguments("padded")
    logsumexp = torch.ops.mlbench.short_attention(*parts, *rest)[1]
    scores = 0.3 * torch.einsum("bihd,bjhd->bhij", parts[0], parts[1])
    hidden = rest[4][:, None, :, None] | rest[5][:, None, None, :]
    hidden = hidden | torch.ones(5, 6, dtype=torch.bool).triu(2)
    wanted = scores.masked_fill(hidden, -math.inf).logsumexp(dim=-1)
    seen = wanted > -math.inf
    torch.testing.assert_close(logsumexp[seen], wanted[seen])
    assert logsumexp[~seen].eq(math.inf).all() and not seen.all()


def test_the_backward_operator_writes_every_row_of_strided_gradients() -> None:
    parts, rest = operator_arguments("padded")
    output, logsumexp = torch.ops.mlbench.short_attention(*parts, *rest)
    grad = torch.randn_like(output)
    dense = [torch.full_like(part, math.nan) for part in parts]
    torch.ops.mlbench.short_attention_backward(grad, *parts, logsumexp, *rest, *dense)
    fused = torch.full((BATCH, 6, 2, HEADS, WIDTH), math.nan)
    query = torch.full((5, BATCH, HEADS, 3 * WIDTH), math.nan)
    strided = (query[..., :WIDTH].transpose(0, 1), *fused.unbind(2))
    torch.ops.mlbench.short_attention_backward(grad, *parts, logsumexp, *rest, *strided)
    for one, other in zip(dense, strided, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    assert query[..., WIDTH:].isnan().all()


@pytest.mark.parametrize("form", ["q, k, v", "q, kv", "qkv"])
def test_gradcheck(form: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"is_causal": True, "dropout_p": 0.3, "seed": torch.tensor([SEED]), "offset": 4}
    padding = padding_of(4, 2, total=4)
    shapes: dict[str, list[tuple[int, ...]]] = {"q, k, v": [(), (), ()], "q, kv": [(), (2,)], "qkv": [(3,)]}
    parts = [torch.randn(2, 4, *fused, 2, 3, dtype=torch.float64, requires_grad=True) for fused in shapes[form]]

    def attend(*parts: Tensor) -> Tensor:
        if form == "qkv":
            return short_attention_qkv(*parts, padding=padding, **options)
        function = short_attention_kv if form == "q, kv" else short_attention
        return function(*parts, key_padding=padding, **options)

    assert torch.autograd.gradcheck(attend, parts)


# torch 2.13's compiler makes an object of the autograd.Function, of which torch itself warns.
ignores_warning = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh compiler, whose progress bars start no thread."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@ignores_warning
def test_compiled_once_for_all_lengths_forward_and_backward(compiler: None) -> None:
    """The parts of a fused projection's gradient are written into slices of one buffer."""

    def loss(projection: Tensor, padding: Tensor, seed: Tensor) -> Tensor:
        qkv = projection.unflatten(-1, (3, HEADS, WIDTH)).transpose(0, 1)
        return short_attention_qkv(qkv, padding=padding, dropout_p=0.2, seed=seed).square().sum()

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (6, 9):
        projection = torch.randn(length, BATCH, 3 * HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
        arguments = (projection, padding_of(6, 3, 1, total=length), torch.tensor([SEED + length]))
        results = [
            (value, *torch.autograd.grad(value, projection)) for value in (compiled(*arguments), loss(*arguments))
        ]
        torch.testing.assert_close(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@ignores_warning
def test_compiled_code_draws_its_own_seeds(compiler: None) -> None:
    """Of separate tensors, two of which are the same one."""
    query, key, _ = tensors(4, 4)
    compiled = torch.compile(lambda q, k: short_attention(q, k, k, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    outputs = [compiled(query, key) for _ in range(2)]
    assert not torch.equal(*outputs)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(outputs[0].sum(), (query, key)))


# ---- Whether the kernels are used ------------------------------------------------------------------------------------


def test_cpu_tensors_are_not_for_the_kernels() -> None:
    assert not uses_kernel(*tensors(5, 5), max_query=5, max_key=5)
    assert why_not_kernel(*tensors(5, 5), max_query=5, max_key=5) == "the tensors are on cpu; the kernels need CUDA"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "torch.float16 or torch.bfloat16"),
        ({"shape": (2, 5, 3, 4, 48)}, "48 features"),
        ({"shape": (2, 129, 3, 4, 64)}, "129 queries"),
        ({"shape": (0, 5, 3, 4, 64)}, "empty"),
        ({"skip": 4}, "multiples of 16 bytes"),
        ({"shape": (2, 5, 3, 64, 32), "swap": True}, "multiples of 16 bytes"),
        ({}, "experimental and off"),
    ],
)
def test_why_not_kernel(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str) -> None:
    """With fake CUDA tensors, for which no device is needed."""
    monkeypatch.delenv(extension.VARIABLE, raising=False)
    shape = change.get("shape", (2, 5, 3, 4, 64))
    numbers = torch.empty(math.prod(shape) + 8, dtype=change.get("dtype", torch.float16), device="meta")
    meta = numbers[change.get("skip", 0) :][: math.prod(shape)].view(shape)
    if change.get("swap"):
        meta = meta.transpose(-1, -2)[..., :64]
    qkv = FakeTensor(FakeTensorMode(), meta, torch.device("cuda:0"))
    said = why_not_kernel(qkv, max_query=shape[1], max_key=shape[1])
    assert said is not None and reason in said
    monkeypatch.setattr(extension, "is_available", lambda: True)
    assert uses_kernel(qkv, max_query=shape[1], max_key=shape[1]) is (change == {})


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": torch.zeros(3, 5, 2, 7)}, ValueError, "value must have the shape of key"),
        ({"query": torch.zeros(3, 5, 2, 4)}, ValueError, r"\(3, 5, 2, 4\)"),
        ({"query": torch.zeros(3, 5, 2, 8).double()}, TypeError, "float64"),
        ({"query": torch.zeros(3, 5, 2, 8).long()}, TypeError, "floating-point"),
        ({"query": torch.zeros(3, 129, 2, 8)}, ValueError, "at most 128 queries and keys, not 129"),
        (
            {"key_padding": torch.zeros(3, 4).bool()},
            ValueError,
            r"key_padding must be bool of .*, not torch.bool of \(3, 4\)",
        ),
        ({"query_padding": torch.zeros(3, 5)}, ValueError, "query_padding must be bool of .*, not torch.float32"),
        ({"scale": 0.0}, ValueError, "scale must be above 0 and finite, not 0.0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be .*, not 1.0"),
        ({"dropout_p": 0.1, "seed": torch.tensor([1.0])}, ValueError, "int64"),
        ({"max_query": 5}, ValueError, "must be None without starts"),
        ({"query_starts": torch.tensor([0, 3]).int()}, ValueError, "must both be given"),
        ({"query_starts": torch.tensor([0, 3]), "key_starts": torch.tensor([0, 3])}, ValueError, "rows"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    zeros = torch.zeros(3, 5, 2, 8)
    with pytest.raises(error, match=message):
        short_attention(**{"query": zeros, "key": zeros, "value": zeros, **arguments})


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([0, 3, 6]), "int32"),
        (torch.tensor([0]).int(), "at least one sentence"),
        (torch.tensor([0, 3, 5]).int(), "end with the number of rows"),
        (torch.tensor([0, 1, 6]).int(), "longest sentence"),
    ],
)
def test_wrong_packed_rows(starts: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_attention_qkv(torch.zeros(6, 3, 2, 8), starts=starts, max_length=4)
    with pytest.raises(ValueError, match="no padding"):
        short_attention_qkv(
            torch.zeros(6, 3, 2, 8), starts=torch.tensor([0, 6]).int(), padding=torch.zeros(1, 6).bool()
        )


@pytest.mark.parametrize("shape", [(6, 2, 2, 8), (2, 6, 2, 2, 8)])
def test_wrong_fused_projections(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="qkv must have shape"):
        short_attention_qkv(torch.zeros(shape))


def test_output_like_packed_rows_is_contiguous() -> None:
    rows = torch.zeros(2, 6, HEADS, WIDTH).transpose(0, 1)
    assert output_like(rows, is_packed=True).is_contiguous()
    assert output_like(rows).transpose(0, 1).is_contiguous()
