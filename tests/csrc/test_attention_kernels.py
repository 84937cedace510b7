"""The kernels of ``csrc/attention`` on the host emulator, against float64 and against torch's own half precision."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.cuda_host import SCHEDULES, host_library, set_schedule

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SEED, OFFSET = 0x1234_5678_9ABC_DEF1, 7
NAN, INF = math.nan, math.inf


class Strided(ctypes.Structure):
    """``mlbench::attention::Strided``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sentence_stride", ctypes.c_int64),
        ("position_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


class Sentences(ctypes.Structure):
    """``mlbench::attention::Sentences``."""

    _fields_ = [
        ("starts", ctypes.c_void_p),
        ("padding", ctypes.c_void_p),
        ("padding_stride", ctypes.c_int64),
        ("max_length", ctypes.c_int32),
    ]


class Parameters(ctypes.Structure):
    """``mlbench::attention::Parameters``."""

    _fields_ = [
        *((name, Strided) for name in ("query", "key", "value", "output")),
        *((name, Strided) for name in ("grad_output", "grad_query", "grad_key", "grad_value")),
        ("logsumexp", ctypes.c_void_p),
        ("queries", Sentences),
        ("keys", Sentences),
        ("seed", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("is_causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
    ]


@dataclasses.dataclass
class Problem:
    """One call of the operator: tensors as the operator gets them, and what it may see.

    ``query`` (batch, max_query, heads, d) or packed (rows, heads, d), keys and values likewise; ``starts`` and
    ``padding`` of queries and keys as in the operator's schema.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    is_causal: bool = False
    threshold: int = 0
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])

    @property
    def batch(self) -> int:
        return len(self.query) if self.query_starts is None else len(self.query_starts) - 1

    @property
    def max_query(self) -> int:
        return _max_length(self.query, self.query_starts)

    @property
    def max_key(self) -> int:
        return _max_length(self.key, self.key_starts)

    @property
    def gain(self) -> float:
        return 65536 / (65536 - self.threshold)


@dataclasses.dataclass
class Results:
    """What both passes give, in the dtypes and shapes of the operator (or of the reference)."""

    output: Tensor
    logsumexp: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor

    def named(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _max_length(rows: Tensor, starts: Tensor | None) -> int:
    return rows.shape[1] if starts is None else int(starts.diff().max())


# ---- The kernels ----------------------------------------------------------------------------------------------------


def run_kernels(problem: Problem, poison: Callable[[Tensor], Tensor] | None = None, schedule: int = 0) -> Results:
    """Both passes on the emulator; every result starts as NaN (``poison`` makes such a tensor like the one it gets)."""
    poison = poison or (lambda like: torch.full_like(like, NAN))
    library = host_library("attention")
    set_schedule(library, schedule)
    heads = problem.query.shape[-2]
    results = Results(
        output=torch.full_like(problem.query, NAN),
        logsumexp=torch.full((problem.batch, heads, problem.max_query), NAN),
        grad_query=poison(problem.query),
        grad_key=poison(problem.key),
        grad_value=poison(problem.value),
    )
    seed = torch.tensor([SEED], dtype=torch.int64)
    parameters = Parameters(
        **{name: _strided(getattr(problem, name)) for name in ("query", "key", "value", "grad_output")},
        **{name: _strided(getattr(results, name)) for name in ("output", "grad_query", "grad_key", "grad_value")},
        logsumexp=results.logsumexp.data_ptr(),
        queries=_sentences(problem.query_starts, problem.query_padding, problem.max_query),
        keys=_sentences(problem.key_starts, problem.key_padding, problem.max_key),
        seed=seed.data_ptr() if problem.threshold else None,
        batch=problem.batch,
        heads=heads,
        is_causal=problem.is_causal,
        scale=problem.scale,
        threshold=problem.threshold,
        offset=OFFSET,
    )
    is_bfloat16 = problem.query.dtype == torch.bfloat16
    for kernel in (library.mlbench_attention_forward, library.mlbench_attention_backward):
        kernel.restype = ctypes.c_bool
        assert kernel(ctypes.byref(parameters), problem.query.shape[-1], is_bfloat16)
    return results


def _strided(rows: Tensor) -> Strided:
    assert rows.stride(-1) == 1
    sentence_stride = rows.stride(0) if rows.dim() == 4 else 0
    return Strided(rows.data_ptr(), sentence_stride, rows.stride(-3), rows.stride(-2))


def _sentences(starts: Tensor | None, padding: Tensor | None, max_length: int) -> Sentences:
    return Sentences(
        None if starts is None else starts.data_ptr(),
        None if padding is None else padding.data_ptr(),
        0 if padding is None else padding.stride(0),
        max_length,
    )


# ---- What they are compared with ------------------------------------------------------------------------------------


def plain_attention(problem: Problem, dtype: torch.dtype) -> Results:
    """Both passes of each sentence by the formulas, in ``dtype`` throughout, gradients by autograd."""
    query, key, value = (x.to(dtype, copy=True).requires_grad_() for x in (problem.query, problem.key, problem.value))
    output, logsumexp = torch.zeros_like(query), torch.full((problem.batch, query.shape[-2], problem.max_query), INF)
    logsumexp = logsumexp.to(dtype)
    keep = dropout_mask(problem)
    for b in range(problem.batch):
        rows_q, rows_k = _rows(problem.query_starts, b), _rows(problem.key_starts, b)
        q, k, v = (x[rows].transpose(-3, -2) for x, rows in ((query, rows_q), (key, rows_k), (value, rows_k)))
        queries, keys = q.shape[-2], k.shape[-2]
        visible = _visible(problem, b, queries, keys)
        scores = (problem.scale * (q @ k.mT)).masked_fill(~visible, -INF)
        alive = visible.any(-1)
        weights = torch.where(visible, scores.masked_fill(~alive[:, None], 0).softmax(-1), 0)
        weights = weights * keep[b, :, :queries, :keys] * problem.gain
        output[rows_q] = (weights @ v).transpose(-3, -2)
        logsumexp[b, :, :queries] = torch.where(alive, scores.detach().logsumexp(-1), INF)
    output.backward(problem.grad_output.to(dtype))
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return Results(output.detach(), logsumexp, query.grad, key.grad, value.grad)


def _rows(starts: Tensor | None, sentence: int) -> int | slice:
    return sentence if starts is None else slice(int(starts[sentence]), int(starts[sentence + 1]))


def _visible(problem: Problem, sentence: int, queries: int, keys: int) -> Tensor:
    """(queries, keys): what each query of the sentence may see."""
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if problem.is_causal:
        visible = visible.tril(keys - queries)
    if problem.query_padding is not None:
        visible = visible & ~problem.query_padding[sentence, :, None]
    if problem.key_padding is not None:
        visible = visible & ~problem.key_padding[sentence]
    return visible


def dropout_mask(problem: Problem) -> Tensor:
    """(batch, heads, max_query, max_key) bool, True = kept, by the definition of the operator's mask."""
    shape = (problem.batch, problem.query.shape[-2], problem.max_query, problem.max_key)
    head = np.arange(shape[0] * shape[1], dtype=np.uint32)[:, None, None]
    i = np.arange(shape[2], dtype=np.uint32)[:, None]
    j = np.arange(shape[3], dtype=np.uint32)
    words = philox_4x32_7((SEED & 0xFFFFFFFF, SEED >> 32), (j // 32 * 4 + j % 8 // 2, i, head, np.uint32(OFFSET)))
    field = 2 * (j % 32 // 8) + j % 2
    word = np.choose(np.broadcast_to(field // 2, words[0].shape), words)
    bits = word >> (16 * (field % 2)) & 0xFFFF
    return torch.from_numpy(bits >= problem.threshold).view(shape)


def philox_4x32_7(key: tuple[int, int], counter: tuple[np.ndarray | np.uint32, ...]) -> list[np.ndarray]:
    """Seven rounds of Philox4x32 (Salmon et al. 2011), in 64-bit arithmetic."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, dtype=np.uint64) for x in np.broadcast_arrays(*counter)]
    k0, k1 = key
    for _ in range(7):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            product1 >> np.uint64(32) ^ c[1] ^ np.uint64(k0),
            product1 & low,
            product0 >> np.uint64(32) ^ c[3] ^ np.uint64(k1),
            product0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [x.astype(np.uint32) for x in c]


def check(problem: Problem, results: Results | None = None) -> Results:
    """The kernels' errors against float64 are at most twice those of torch in the same half precision."""
    results = results or run_kernels(problem)
    exact = plain_attention(problem, torch.float64)
    halves = plain_attention(problem, problem.query.dtype).named()
    epsilon = torch.finfo(problem.query.dtype).eps
    for name, actual in results.named().items():
        wanted = getattr(exact, name)
        assert torch.equal(actual.isinf(), wanted.isinf()), name
        finite = wanted.isfinite()
        wanted, actual, half = (x[finite].double() for x in (wanted, actual, halves[name]))
        if wanted.numel() == 0:
            continue
        if name == "logsumexp":  # float32 throughout
            allowed = 1e-5 * (1 + wanted.abs().max())
        else:
            allowed = 2 * (half - wanted).abs().max() + epsilon * wanted.abs().max()
        error = (actual - wanted).abs().max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"  # NaN is not <= either
    return results


# ---- Problems -------------------------------------------------------------------------------------------------------


def make_problem(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 2,
    heads: int = 2,
    d: int = 64,
    dtype: str = "fp16",
    is_causal: bool = False,
    threshold: int = 0,
) -> Problem:
    """A padded problem with normal entries; ``keys=None`` is as many as queries."""
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def rows(length: int) -> Tensor:
        return torch.randn(batch, length, heads, d, generator=generator).to(HALVES[dtype])

    return Problem(rows(queries), rows(keys), rows(keys), rows(queries), is_causal, threshold)


def padding_mask(batch: int, length: int, kind: str) -> Tensor:
    """(batch, length) bool, True = padding; the first sentence has none, the others more and more."""
    position = torch.arange(length)
    if kind == "holes":
        return torch.stack([(position * (b + 3)) % 5 < b for b in range(batch)])
    lengths = torch.tensor([length * (batch - b) // batch for b in range(batch)])[:, None]
    return position >= lengths if kind == "right" else position < length - lengths


# ---- Tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are too small for several threads, which would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_structures_agree_with_the_kernels() -> None:
    library = host_library("attention")
    library.mlbench_attention_parameters_bytes.restype = ctypes.c_size_t
    assert library.mlbench_attention_parameters_bytes() == ctypes.sizeof(Parameters)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [1, 7, 16, 28, 48, 80])
def test_self_attention(length: int, dtype: str) -> None:
    check(make_problem(length, dtype=dtype, batch=1, is_causal=length in (7, 28, 80)))


@pytest.mark.parametrize(("queries", "keys"), [(7, 80), (80, 28), (33, 50), (1, 128)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention(queries: int, keys: int, is_causal: bool) -> None:
    check(make_problem(queries, keys, batch=1, heads=1, dtype="bf16" if is_causal else "fp16", is_causal=is_causal))


def test_longest_sentences() -> None:
    check(make_problem(128, batch=1, heads=1, dtype="bf16", threshold=6554))


def test_head_dimension_32() -> None:
    check(make_problem(48, 80, d=32, batch=1, threshold=6554))


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding(kind: str, is_causal: bool) -> None:
    problem = make_problem(40, batch=3, heads=1, is_causal=is_causal)
    problem.query_padding = problem.key_padding = padding_mask(3, 40, kind)
    results = check(problem)
    assert (results.output[problem.query_padding] == 0).all()
    assert (results.grad_query[problem.query_padding] == 0).all()
    assert (results.grad_key[problem.key_padding] == 0).all() and (results.grad_value[problem.key_padding] == 0).all()
    assert results.logsumexp[:, 0][problem.query_padding].isposinf().all()


def test_what_lies_in_the_padding_does_not_matter() -> None:
    problem = make_problem(20, 36, batch=2, heads=1, threshold=6554)
    problem.query_padding, problem.key_padding = padding_mask(2, 20, "holes"), padding_mask(2, 36, "left")
    before = run_kernels(problem).named()
    problem.query[problem.query_padding] = NAN
    problem.grad_output[problem.query_padding] = INF
    problem.key[problem.key_padding] = INF
    problem.value[problem.key_padding] = NAN
    for name, after in run_kernels(problem).named().items():
        assert torch.equal(before[name], after), name


def test_sentence_without_keys_gives_zeros() -> None:
    problem = make_problem(20, 36, batch=2, heads=1)
    problem.key_padding = torch.tensor([[True], [False]]).expand(2, 36).contiguous()
    results = check(problem)
    assert (results.output[0] == 0).all() and results.logsumexp[0].isposinf().all()
    assert all((gradient[0] == 0).all() for gradient in (results.grad_query, results.grad_key, results.grad_value))


def test_no_keys_at_all_give_zeros() -> None:
    results = run_kernels(make_problem(5, 0, batch=1, heads=1))
    assert (results.output == 0).all() and (results.grad_query == 0).all() and results.logsumexp.isposinf().all()


def test_no_queries_at_all_give_zero_gradients() -> None:
    results = run_kernels(make_problem(0, 5, batch=1, heads=1))
    assert (results.grad_key == 0).all() and (results.grad_value == 0).all()


def test_causal_queries_before_the_first_key_give_zeros() -> None:
    results = check(make_problem(36, 20, batch=1, heads=1, is_causal=True))  # queries 0 .. 15 precede key 0
    assert (results.output[0, :16] == 0).all() and results.logsumexp[0, 0, :16].isposinf().all()
    assert (results.output[0, 16:] != 0).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_rows_equal_each_sentence_alone(is_causal: bool) -> None:
    query_lengths, key_lengths = [5, 40, 0, 17], [23, 33, 9, 17]
    starts = [torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in (query_lengths, key_lengths)]
    rows = make_problem(sum(query_lengths), sum(key_lengths), batch=1)
    problem = Problem(rows.query[0], rows.key[0], rows.value[0], rows.grad_output[0], is_causal, 0, *starts)
    packed = check(problem)
    assert packed.logsumexp[0, :, 5:].isposinf().all() and packed.logsumexp[2].isposinf().all()
    q, k = slice(5, 45), slice(23, 56)  # sentence 1
    alone = Problem(rows.query[:, q], rows.key[:, k], rows.value[:, k], rows.grad_output[:, q], is_causal)
    single = run_kernels(alone)
    assert torch.equal(packed.output[q], single.output[0]) and torch.equal(packed.logsumexp[1], single.logsumexp[0])
    assert torch.equal(packed.grad_query[q], single.grad_query[0])
    assert torch.equal(packed.grad_key[k], single.grad_key[0])
    assert torch.equal(packed.grad_value[k], single.grad_value[0])


@pytest.mark.parametrize("time_first", [False, True])
def test_views_of_the_fused_projection(time_first: bool) -> None:
    batch, length, heads, d = 2, 30, 2, 64
    shape = (length, batch, 3, heads, d) if time_first else (batch, length, 3, heads, d)
    fused = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    gradient = torch.full_like(fused, NAN)

    def parts(buffer: Tensor) -> list[Tensor]:
        return [x.transpose(0, 1) if time_first else x for x in buffer.unbind(2)]

    q, k, v = parts(fused)
    grad_output = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).half()
    slices = iter(parts(gradient))
    results = check(Problem(q, k, v, grad_output), run_kernels(Problem(q, k, v, grad_output), lambda _: next(slices)))
    assert gradient.isfinite().all()
    copies = run_kernels(Problem(q.contiguous(), k.contiguous(), v.contiguous(), grad_output))
    for name, expected in copies.named().items():
        assert torch.equal(getattr(results, name), expected), name


def test_nothing_is_written_beside_the_rows() -> None:
    problem = make_problem(21, 37, heads=2)
    buffers: list[Tensor] = []

    def slice_of_larger(like: Tensor) -> Tensor:
        buffers.append(torch.full((*like.shape[:-1], like.shape[-1] + 16), NAN, dtype=like.dtype))
        return buffers[-1][..., 8:-8]

    results = run_kernels(problem, slice_of_larger)
    assert all(x.isfinite().all() for x in (results.grad_query, results.grad_key, results.grad_value))
    assert all(x[..., :8].isnan().all() and x[..., -8:].isnan().all() for x in buffers)


@pytest.mark.parametrize("dtype", HALVES)
def test_dropout_mask_is_the_defined_one(dtype: str) -> None:
    # With an identity as V the output is the matrix of dropped-out weights itself.
    problem = make_problem(50, 64, heads=2, dtype=dtype, threshold=19661)  # 0.3
    problem.query *= 0.25
    problem.value[:] = torch.eye(64, dtype=problem.value.dtype)[:, None]
    results = check(problem)
    keep = dropout_mask(problem)
    assert torch.equal((results.output != 0).transpose(1, 2), keep)
    assert 0.28 < 1 - keep.float().mean() < 0.32


def test_dropout_with_causal_and_padding() -> None:
    problem = make_problem(40, 70, heads=1, threshold=6554, is_causal=True)
    problem.key_padding = padding_mask(2, 70, "left")
    check(problem)


def test_large_scores_do_not_overflow() -> None:
    problem = make_problem(16, 24, batch=1, heads=1)
    problem.query *= 60
    results = run_kernels(problem)
    assert all(x.isfinite().all() for x in results.named().values())
    exact = plain_attention(problem, torch.float64)
    torch.testing.assert_close(results.output.double(), exact.output, rtol=5e-3, atol=5e-3)


def test_every_schedule_gives_the_same_bits() -> None:
    problem = make_problem(37, 60, batch=2, heads=1, threshold=6554, is_causal=True)
    problem.query_padding, problem.key_padding = padding_mask(2, 37, "right"), padding_mask(2, 60, "left")
    first, *others = [run_kernels(problem, schedule=schedule).named() for schedule in SCHEDULES]
    for other in others:
        for name, expected in first.items():
            assert torch.equal(other[name], expected), name
