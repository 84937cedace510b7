"""The CUDA kernels of both operators on a GPU, against their plain implementations.

Run them under the checkers of memory and of races, too. Without torch's cache of memory, which
hides what is read beyond a tensor, there are no graphs::

    python -m mlbench_core.install_cuda_extensions
    python -m pytest tests/ops/test_cuda_kernels.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m pytest tests/ops/test_cuda_kernels.py -k "not graph"
    compute-sanitizer --tool racecheck --error-exitcode 1 \\
        python -m pytest tests/ops/test_cuda_kernels.py -k "not graph"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.models.pytorch.transformer.modules import MultiheadAttention
from mlbench_core.ops.pytorch import attention_score, attention_score_reference, extension
from mlbench_core.ops.pytorch.attention import (
    _backward,
    _forward,
    fused_attention,
    why_not_kernel,
)
from mlbench_core.ops.pytorch.attention_score import why_not_kernel as why_not_score_kernel
from mlbench_core.ops.pytorch.philox import attention_dropout_mask, draw_seed, dropout_threshold

MISSING = extension.why_not()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        MISSING is not None,
        reason=(
            f"needs an NVIDIA GPU of compute capability 8.0 or later, and the kernels: {MISSING}"
        ),
    ),
]

DEVICE = "cuda"
DTYPES = [torch.float16, torch.bfloat16]
LENGTHS = [1, 7, 16, 17, 28, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 112, 127, 128]
"""Every kernel that a length chooses, with lengths on and beside the borders between them."""
CROSS = [(1, 128), (5, 80), (80, 5), (33, 64), (128, 17)]


@dataclass
class Problem:
    """Arguments of the operators, made on the CPU from a seed and then moved."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    seed: Tensor | None = None
    offset: int = 3
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = 1 / math.sqrt(self.query.shape[-1])

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def rest(self) -> tuple[Any, ...]:
        """What follows the operands, and in the backward pass the log-sum-exp."""
        return (
            *(None, None, self.query.shape[1], self.key.shape[1]),
            *(self.query_padding, self.key_padding),
            self.is_causal,
            self.scale,
            self.dropout_p,
            self.seed,
            self.offset,
        )

    def wide(self) -> Problem:
        """The same in float64."""
        q, k, v, grad = (x.double() for x in (*self.operands, self.grad))
        return replace(self, query=q, key=k, value=v, grad=grad)


def problem(
    queries: int, keys: int, dtype: torch.dtype = torch.float16, batch: int = 5, heads: int = 3,
    d: int = 64, padded: bool = False, **changes: Any,
) -> Problem:  # fmt: skip
    """Random operands; if padded, sentences with padding at different places."""
    generator = torch.Generator().manual_seed(1000 * queries + keys)
    shapes = [(batch, n, heads, d) for n in (queries, keys, keys, queries)]
    q, k, v, grad = (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes
    )
    found = Problem(q, k, v, grad, **changes)
    if found.dropout_p and found.seed is None:
        found.seed = torch.tensor([0x0123456789ABCDEF], device=DEVICE)
    if padded:
        # Rolled, so that there is a sentence whose queries have nothing to see.
        found.query_padding = make_padding(batch, queries).roll(1, dims=0).to(DEVICE)
        found.key_padding = make_padding(batch, keys).to(DEVICE)
    return found


def make_padding(batch: int, positions: int) -> Tensor:
    """Five kinds of sentences: whole, padded on the right, on the left, with holes, all padding."""
    position = torch.arange(positions)
    kinds = [
        position < 0,
        position >= (positions + 1) // 2,
        position < positions // 3,
        position % 3 == 1,
        position >= 0,
    ]
    return torch.stack([kinds[row % 5] for row in range(batch)])


def run(given: Problem) -> list[Tensor]:
    """Output, log-sum-exp and the three gradients by the operators, over memory that held nan."""
    poison = [torch.full_like(x, torch.nan) for x in given.operands]
    del poison
    output, logsumexp = torch.ops.mlbench.short_attention(*given.operands, *given.rest)
    gradients = [torch.full_like(x, torch.nan) for x in given.operands]
    torch.ops.mlbench.short_attention_backward(
        given.grad, *given.operands, logsumexp, *given.rest, *gradients
    )
    return [output, logsumexp, *gradients]


def plain(given: Problem) -> list[Tensor]:
    """The same by the plain implementation."""
    output, logsumexp = _forward(*given.operands, *given.rest)
    gradients = [torch.full_like(x, torch.nan) for x in given.operands]
    _backward(given.grad, *given.operands, logsumexp, *given.rest, *gradients)
    return [output, logsumexp, *gradients]


def visible(given: Problem) -> Tensor:
    """bool (batch, 1, queries, keys) or one that broadcasts to it: what each query sees."""
    q, k = given.query.shape[1], given.key.shape[1]
    seen = torch.ones(q, k, dtype=torch.bool, device=DEVICE)
    if given.is_causal:
        seen = seen.tril(k - q)
    for padding, shape in (
        (given.query_padding, (-1, 1, q, 1)),
        (given.key_padding, (-1, 1, 1, k)),
    ):
        if padding is not None:
            seen = seen & ~padding.view(shape)
    return seen


def step_by_step(given: Problem) -> list[Tensor]:
    """Output and gradients by torch's operations in the operands' dtype, the softmax in float32."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in given.operands)
    seen = visible(given)
    scores = (
        (given.scale * (q @ k.transpose(-1, -2)))
        .float()
        .masked_fill(~seen, torch.finfo(torch.float32).min)
    )
    weights = scores.softmax(dim=-1).masked_fill(~seen, 0.0)
    if given.dropout_p:
        assert given.seed is not None
        threshold = dropout_threshold(given.dropout_p)
        shape = (len(q), q.shape[1], q.shape[2], k.shape[2])
        weights = weights * attention_dropout_mask(given.seed, given.offset, shape, threshold)
        weights = weights * (65536 / (65536 - threshold))
    output = weights.to(q.dtype) @ v
    gradients = torch.autograd.grad(output, (q, k, v), given.grad.transpose(1, 2))
    return [x.transpose(1, 2) for x in (output.detach(), *gradients)]


def error(found: Tensor, exact: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - exact).abs().max())


def check_errors(given: Problem) -> None:
    """Output and gradients are at most twice as far from float64 as torch's in half precision."""
    (output, logsumexp, *gradients), torchs = run(given), step_by_step(given)
    exact_output, exact_logsumexp, *exact_gradients = plain(given.wide())
    for name, ours, theirs, exact in zip(
        ("output", "dQ", "dK", "dV"),
        (output, *gradients),
        torchs,
        (exact_output, *exact_gradients),
        strict=True,
    ):
        # A rounding of the largest number is allowed where torch happens to have no error at all.
        rounding = float(exact.abs().max()) * torch.finfo(given.query.dtype).eps / 2
        assert error(ours, exact) <= 2 * max(error(theirs, exact), rounding), name
    seeing = exact_logsumexp.isfinite()
    torch.testing.assert_close(
        logsumexp[seeing].double(), exact_logsumexp[seeing], rtol=1e-4, atol=1e-4
    )
    assert (logsumexp[~seeing] == torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_error_is_at_most_twice_torchs_own(length: int, dtype: torch.dtype) -> None:
    for padded in (False, True):
        for is_causal in (False, True):
            check_errors(problem(length, length, dtype, padded=padded, is_causal=is_causal))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), CROSS)
def test_error_of_cross_attention(queries: int, keys: int, dtype: torch.dtype) -> None:
    for padded in (False, True):
        for is_causal in (False, True):
            check_errors(problem(queries, keys, dtype, padded=padded, is_causal=is_causal))


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_with_heads_of_32(dtype: torch.dtype) -> None:
    for length in (16, 28, 48, 80, 128):
        check_errors(problem(length, length, dtype, d=32, padded=True, dropout_p=0.1))


@pytest.mark.parametrize("length", [16, 28, 48, 64, 80, 96, 128])
def test_error_with_dropout(length: int) -> None:
    for dtype in DTYPES:
        check_errors(problem(length, length, dtype, padded=True, is_causal=True, dropout_p=0.1))


def test_large_scores_do_not_overflow() -> None:
    given = problem(80, 80, torch.float16)
    check_errors(replace(given, query=10 * given.query, key=10 * given.key))


def test_sizes_of_the_benchmark_and_one_sentence() -> None:
    for batch, heads, length in ((1, 1, 80), (102, 16, 80), (512, 16, 16)):
        check_errors(problem(length, length, batch=batch, heads=heads))


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (128, 128), (28, 80), (80, 28)])
def test_both_passes_drop_the_weights_of_the_mask(queries: int, keys: int) -> None:
    """With the columns of the identity as V, and as dO, output and dV are the dropped weights."""
    given = problem(queries, keys, dropout_p=0.25, offset=11)
    seed = given.seed
    assert seed is not None
    mask = attention_dropout_mask(seed, 11, (5, 3, queries, keys), dropout_threshold(0.25))
    eye = torch.eye(128, dtype=torch.float16, device=DEVICE)
    for first in (0, 64):
        part = eye[:, first : first + 64].unsqueeze(1)  # (position, 1, feature)
        value, grad = (part[:n].expand(5, n, 3, 64).contiguous() for n in (keys, queries))
        output, _, _, _, grad_value = run(
            replace(given, query=0 * given.query, value=value, grad=grad)
        )
        columns, rows = max(0, min(64, keys - first)), max(0, min(64, queries - first))
        forward_kept = output.transpose(1, 2)[..., :columns] != 0
        backward_kept = grad_value.permute(0, 2, 3, 1)[:, :, :rows] != 0
        assert torch.equal(forward_kept, mask[..., first : first + columns])
        assert torch.equal(backward_kept, mask[:, :, first : first + rows])


def test_realised_drop_rate_is_the_one_asked_for() -> None:
    for p in (0.1, 0.5):
        given = problem(64, 64, batch=64, heads=16, dropout_p=p)
        value = (
            torch.eye(64, dtype=torch.float16, device=DEVICE)[:, None]
            .expand(64, 64, 16, 64)
            .contiguous()
        )
        output = run(replace(given, query=0 * given.query, value=value))[0]
        rate, real = float((output == 0).double().mean()), dropout_threshold(p) / 65536
        assert abs(rate - real) < 5 * math.sqrt(p * (1 - p) / output.numel())
        kept = output[output != 0].double()
        torch.testing.assert_close(
            kept, torch.full_like(kept, 1 / 64 / (1 - real)), rtol=1e-3, atol=0
        )


def test_seed_and_offset_choose_the_mask() -> None:
    given = problem(80, 80, dropout_p=0.3)
    assert given.seed is not None
    first = run(given)
    assert all(
        torch.equal(x, y) for x, y in zip(first, run(given), strict=True)
    )  # no atomics: the same bits
    for other in (
        replace(given, offset=4),
        replace(given, seed=given.seed + 1),
        replace(given, seed=given.seed + 2**40),
    ):
        assert not torch.equal(run(other)[0], first[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_and_queries_that_see_nothing_give_zeros(dtype: torch.dtype) -> None:
    for length, is_causal in ((17, False), (80, True), (128, True)):
        given = problem(length, length, dtype, padded=True, is_causal=is_causal, dropout_p=0.1)
        output, logsumexp, grad_query, grad_key, grad_value = run(given)
        blind = ~visible(given).expand(5, 1, length, length).any(dim=-1).squeeze(1)
        assert given.query_padding is not None and given.key_padding is not None
        assert bool(
            (blind & ~given.query_padding).any()
        )  # there are queries that see nothing but are no padding
        for tensor in (output, grad_query):
            assert not tensor[blind].any()
        for tensor in (grad_key, grad_value):
            assert not tensor[given.key_padding].any()
        assert (logsumexp.transpose(1, 2)[blind] == torch.inf).all()


def test_padding_that_is_not_a_number_changes_nothing() -> None:
    given = problem(80, 80, padded=True)
    assert given.query_padding is not None and given.key_padding is not None
    expected = run(given)
    for tensor, padding in (
        (given.query, given.query_padding),
        (given.grad, given.query_padding),
        (given.key, given.key_padding),
        (given.value, given.key_padding),
    ):
        tensor[padding] = torch.nan
    for found, before in zip(run(given), expected, strict=True):
        assert torch.equal(found, before)


def test_strides_do_not_matter() -> None:
    """Time first, and slices of the fused projection."""
    given = problem(48, 48, padded=True, dropout_p=0.1)
    expected = run(given)
    time_first = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (*given.operands, given.grad)
    ]
    fused = torch.stack(given.operands, dim=2)  # (batch, positions, 3, heads, d)
    fused_time_first = fused.transpose(0, 1).contiguous().transpose(0, 1)
    for q, k, v, grad in (
        time_first,
        (*fused.unbind(2), given.grad),
        (*fused_time_first.unbind(2), time_first[3]),
    ):
        found = run(replace(given, query=q, key=k, value=v, grad=grad))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert (found[0].stride(0) < found[0].stride(1)) == (q.stride(0) < q.stride(1))
    padding = torch.zeros(5, 100, dtype=torch.bool, device=DEVICE)
    padding[:, :48] = given.key_padding
    assert torch.equal(run(replace(given, key_padding=padding[:, :48]))[0], expected[0])


def test_gradients_are_written_into_slices_of_one_buffer() -> None:
    given = problem(80, 80, padded=True, dropout_p=0.1)
    output, logsumexp, *expected = run(given)
    for buffer in (
        torch.full((5, 80, 3, 3, 64), torch.nan, dtype=torch.float16, device=DEVICE),
        torch.full((80, 5, 3, 3, 64), torch.nan, dtype=torch.float16, device=DEVICE).transpose(
            0, 1
        ),
    ):
        slices = buffer.unbind(2)
        torch.ops.mlbench.short_attention_backward(
            given.grad, *given.operands, logsumexp, *given.rest, *slices
        )
        assert torch.equal(buffer, torch.stack(expected, dim=2))
    assert output.isfinite().all()


def test_fused_projection_gets_one_gradient() -> None:
    given = problem(48, 48, padded=True)
    for qkv in (
        torch.stack(given.operands, dim=2),
        torch.stack(given.operands, dim=2).transpose(0, 1).contiguous(),
    ):
        qkv.requires_grad_()
        batch_first = qkv if qkv.shape[0] == 5 else qkv.transpose(0, 1)
        assert why_not_kernel(batch_first) is None
        # What is padding as a key is padding as a query.
        output = fused_attention(batch_first, key_padding=given.key_padding)
        expected = run(replace(given, query_padding=given.key_padding))
        (gradient,) = torch.autograd.grad(output, batch_first, given.grad)
        assert torch.equal(output, expected[0])
        assert torch.equal(gradient, torch.stack(expected[2:], dim=2))
        assert gradient.stride() == batch_first.stride()


def test_tensors_that_the_kernel_refuses_take_the_plain_path() -> None:
    given = problem(28, 28)
    wide = torch.randn(5, 28, 3, 65, device=DEVICE).half()
    for query, key, value in (
        [x.float() for x in given.operands],
        [x[..., :48] for x in given.operands],
        [wide[..., 1:]] * 3,  # rows that begin at odd places
    ):
        assert why_not_kernel(query, key, value) is not None
        leaves = [
            x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for x in (query, key, value)
        ]
        output = fused_attention(query, key, value)
        # Copies, because torch 2.11 gives wrong results for half-precision rows at odd addresses.
        copies = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        expected = F.scaled_dot_product_attention(*copies).transpose(1, 2)
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
        assert all(
            x.isfinite().all() for x in torch.autograd.grad(fused_attention(*leaves).sum(), leaves)
        )


def on_a_side_stream(fill: Callable[[], None], compute: Callable[[], Tensor]) -> Tensor:
    """Compute on another stream, which first waits for a long time and then fills the inputs."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        fill()
        found = compute()
    side.synchronize()
    return found


def test_the_current_stream_is_used() -> None:
    given = problem(80, 80)
    expected = run(given)[0]
    late = [torch.zeros_like(x) for x in given.operands]

    def fill() -> None:
        for target, source in zip(late, given.operands, strict=True):
            target.copy_(source)

    def compute() -> Tensor:
        output: Tensor = torch.ops.mlbench.short_attention(*late, *given.rest)[0]
        return output

    assert torch.equal(on_a_side_stream(fill, compute), expected)


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step, and the tensors that its replays write; it warms up on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def test_replays_of_a_graph_draw_new_masks() -> None:
    given = problem(64, 64, dropout_p=0.3)

    def step() -> tuple[Tensor, Tensor]:
        seed = draw_seed(DEVICE)
        output: Tensor = torch.ops.mlbench.short_attention(
            *given.operands, *replace(given, seed=seed).rest
        )[0]
        return output, seed

    graph, (output, seed) = capture(step)
    seeds = set()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        expected = plain(replace(given.wide(), seed=seed))[0]
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-3)
        seeds.add(seed.item())
    assert len(seeds) == 3


def test_a_graph_of_a_training_step_draws_new_masks() -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(128, 2, dropout=0.3, backend="kernel").cuda().half()
    x = torch.randn(28, 4, 128, device=DEVICE, dtype=torch.float16)

    def step() -> tuple[Tensor, Tensor]:
        output = module(x, x, x, need_weights=False)[0]
        return output, torch.autograd.grad(output.float().square().sum(), module.in_proj_weight)[0]

    graph, captured = capture(step)
    replays = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        replays.append([x.clone() for x in captured])
    for one, other in zip(*replays, strict=True):
        assert one.isfinite().all()
        assert not torch.equal(one, other)


def modules(
    dtype: torch.dtype, dropout: float = 0.0, width: int = 128
) -> dict[str, MultiheadAttention]:
    """One module by both backends."""
    torch.manual_seed(0)
    plain_module = (
        MultiheadAttention(width, 2, dropout=dropout, backend="reference").cuda().to(dtype)
    )
    kernel = MultiheadAttention(width, 2, dropout=dropout, backend="kernel").cuda().to(dtype)
    kernel.load_state_dict(plain_module.state_dict())
    return {"reference": plain_module, "kernel": kernel}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_module_agrees_with_its_plain_path(dtype: torch.dtype, is_causal: bool) -> None:
    """At tokens: outputs at padding are not defined, and no gradient comes from there."""
    x, memory = (torch.randn(n, 4, 128, device=DEVICE).to(dtype).requires_grad_() for n in (28, 48))
    x_padding, memory_padding = (make_padding(4, n).to(DEVICE) for n in (28, 48))
    tokens = ~x_padding.T.unsqueeze(-1)
    results: list[list[Tensor]] = []
    for module in modules(dtype).values():
        found = []
        for source, padding in ((x, x_padding), (memory, memory_padding)):
            causal = is_causal and source is x
            output, weights = module(
                x, source, source, causal, key_padding_mask=padding, need_weights=False
            )
            assert weights is None
            seen = output * tokens
            found += [
                seen.detach(),
                *torch.autograd.grad(
                    seen.float().square().sum(), (x, source, *module.parameters())
                ),
            ]
        results.append(found)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=16 * torch.finfo(dtype).eps * float(other.abs().max())
        )


def test_weights_longer_sentences_and_other_dtypes_take_the_plain_path() -> None:
    for dtype, length, need_weights in (
        (torch.float16, 28, True),
        (torch.float16, 129, False),
        (torch.float32, 28, False),
    ):
        found = modules(dtype)
        found["kernel"].backend = "auto"
        x = torch.randn(length, 3, 128, device=DEVICE).to(dtype)
        output, weights = found["kernel"](x, x, x, True, need_weights=need_weights)
        expected, expected_weights = found["reference"](x, x, x, True, need_weights=need_weights)
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
        assert (weights is not None) == need_weights
        if need_weights:
            torch.testing.assert_close(weights, expected_weights)


def test_heads_of_another_width_take_the_plain_path() -> None:
    found = modules(torch.float16, width=96)  # heads of 48
    x = torch.randn(28, 3, 96, device=DEVICE, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="48 features, not 32 or 64"):
        found["kernel"](x, x, x, need_weights=False)
    found["kernel"].backend = "auto"
    output, expected = (module(x, x, x, need_weights=False)[0] for module in found.values())
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_reaches_the_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mlbench_core.ops.pytorch.attention._forward")  # the plain path would fail
    found = modules(torch.float32)
    x = torch.randn(28, 3, 128, device=DEVICE)
    with torch.autocast("cuda", dtype=dtype):
        output, expected = (module(x, x, x, need_weights=False)[0] for module in found.values())
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


# torch 2.13's compiler makes an object of the autograd.Function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_module_compiles_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.hub.tqdm, "monitor_interval", 0, raising=False
    )  # no thread for progress bars
    module = modules(torch.float16)["kernel"]
    x = torch.randn(28, 3, 128, device=DEVICE, dtype=torch.float16).requires_grad_()

    def attend(x: Tensor) -> Tensor:
        output: Tensor = module(x, x, x, need_weights=False)[0]
        return output

    torch._dynamo.reset()
    results = []
    for function in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
        output = function(x)
        results.append((output.detach(), *torch.autograd.grad(output.float().square().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()


def test_operators_say_what_they_do() -> None:
    given = problem(28, 28, padded=True, dropout_p=0.1)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.mlbench.short_attention.default, (*given.operands, *given.rest), test_utils=checks
    )
    parts = score_parts(torch.float16)
    torch.library.opcheck(torch.ops.mlbench.attention_score.default, parts, test_utils=checks)


def test_the_library_adds_every_kernel() -> None:
    for name in (
        "short_attention",
        "short_attention_backward",
        "attention_score",
        "attention_score_backward",
    ):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mlbench::{name}", "CUDA")


def score_parts(
    dtype: torch.dtype, batch: int = 3, queries: int = 25, keys: int = 30, width: int = 1024
) -> list[Tensor]:
    """Query, keys, bias and v as GNMT has them."""
    generator = torch.Generator().manual_seed(queries)
    shapes = [(batch, queries, width), (batch, keys, width), (width,), (width,)]
    parts = [torch.randn(shape, generator=generator) for shape in shapes]
    parts[3] /= math.sqrt(width)
    return [part.to(dtype).to(DEVICE) for part in parts]


def score_and_gradients(
    score: Callable[..., Tensor], parts: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    leaves = [part.detach().requires_grad_() for part in parts]
    scores = score(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, grad.to(scores.dtype))]


def kernel_score(*parts: Tensor) -> Tensor:
    """The score, of tensors that the kernel takes."""
    query, keys, bias, v = parts
    assert why_not_score_kernel(query, keys, bias, v) is None
    return attention_score(query, keys, bias, v)


def score_in_own_dtype(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> Tensor:
    """The formula by torch's operations, nothing widened."""
    return (v * torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1) + bias)).sum(dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(1, 1, 8), (1, 50, 1024), (25, 30, 1024), (80, 80, 1024), (7, 65, 40)],
)
def test_score_error_is_at_most_twice_torchs_own(
    queries: int, keys: int, width: int, dtype: torch.dtype
) -> None:
    parts = score_parts(dtype, 3, queries, keys, width)
    grad = torch.randn(3, queries, keys, device=DEVICE)
    ours, theirs = (
        score_and_gradients(score, parts, grad) for score in (kernel_score, score_in_own_dtype)
    )
    exact = score_and_gradients(
        attention_score_reference, [part.double() for part in parts], grad.double()
    )
    assert ours[0].dtype == torch.float32
    for name, found, torchs, expected in zip(
        ("score", "dq", "dk", "db", "dv"), ours, theirs, exact, strict=True
    ):
        rounding = float(expected.abs().max()) * torch.finfo(dtype).eps / 2
        assert error(found, expected) <= 2 * max(error(torchs, expected), rounding), name


def test_score_of_float32_is_that_of_torch() -> None:
    parts, grad = score_parts(torch.float32), torch.randn(3, 25, 30, device=DEVICE)
    ours, expected = (
        score_and_gradients(score, parts, grad)
        for score in (kernel_score, attention_score_reference)
    )
    for found, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_score_is_deterministic_and_strides_do_not_matter() -> None:
    parts, grad = score_parts(torch.float16), torch.randn(3, 25, 30, device=DEVICE)
    expected = score_and_gradients(kernel_score, parts, grad)
    time_first = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts[:2]]
    for chosen in (parts, [*time_first, *parts[2:]]):
        found = score_and_gradients(kernel_score, chosen, grad)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_score_uses_the_current_stream() -> None:
    parts = score_parts(torch.float16)
    expected = kernel_score(*parts)
    late = [torch.zeros_like(part) for part in parts]

    def fill() -> None:
        for target, source in zip(late, parts, strict=True):
            target.copy_(source)

    assert torch.equal(on_a_side_stream(fill, lambda: kernel_score(*late)), expected)


def test_score_in_a_graph() -> None:
    parts = score_parts(torch.float16)
    graph, scores = capture(lambda: kernel_score(*parts))
    parts[0].neg_()
    graph.replay()
    assert torch.equal(scores, kernel_score(*parts))


def test_score_of_tensors_that_the_kernel_refuses() -> None:
    for parts in (
        score_parts(torch.float16, width=1021),
        [part.double() for part in score_parts(torch.float32)],
        [part[:, :0] if part.dim() == 3 else part for part in score_parts(torch.float16)],
    ):
        assert why_not_score_kernel(*parts) is not None
        exact = attention_score_reference(*(part.double() for part in parts))
        torch.testing.assert_close(attention_score(*parts).double(), exact, rtol=1e-4, atol=1e-4)
