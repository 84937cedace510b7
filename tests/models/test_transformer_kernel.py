"""The Transformer with the operator of short attention, in its plain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mlbench_core.models.pytorch.transformer.modules import MultiheadAttention
from mlbench_core.models.pytorch.transformer.modules import multihead_attention as attention_module
from mlbench_core.ops.pytorch.attention import why_not_kernel
from tests.models.test_transformer import random_tokens, tiny

pytestmark = pytest.mark.usefixtures("one_thread", "plain_operator")

TOTAL = 5


class Counted:
    """A function that remembers the arguments of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


@pytest.fixture
def plain_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the models use the operator on the CPU, where it computes in plain PyTorch."""
    monkeypatch.setattr(attention_module, "why_not_kernel", lambda *parts: None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The calls of the operator."""
    counted = Counted(attention_module.fused_attention)
    monkeypatch.setattr(attention_module, "fused_attention", counted)
    return counted


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and padding of 3 sentences: whole, padded, and nothing but padding."""
    generator = torch.Generator().manual_seed(0)
    query, other, third = (
        torch.randn(TOTAL, 3, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )
    padding = torch.zeros(3, TOTAL, dtype=torch.bool)
    padding[1, :-2] = padding[2] = True
    key = query if kind == "self" else other
    return query, key, third if kind == "three" else key, padding


@pytest.mark.parametrize("kind", ["self", "cross", "three"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_reference(
    kind: str, is_causal: bool, is_padded: bool, bias: bool
) -> None:
    module = MultiheadAttention(16, 4, bias=bias).double()
    query, key, value, padding = inputs(kind)
    # Outputs of padded positions differ between the paths, in self-attention.
    wanted = torch.ones(TOTAL, 3, dtype=torch.bool)
    if is_padded and kind == "self":
        wanted = ~padding.t()
    outputs, gradients = [], []
    for backend in ("reference", "kernel"):
        module.backend = backend
        mask = padding if is_padded else None
        output, weights = module(query, key, value, is_causal, mask, need_weights=False)
        assert weights is None
        outputs.append(output[wanted])
        leaves = list({id(x): x for x in (query, key, value, *module.parameters())}.values())
        gradients.append(torch.autograd.grad(output[wanted].sin().sum(), leaves))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_weights_long_sentences_and_caches_take_other_paths(kernel: Counted) -> None:
    module = MultiheadAttention(16, 4, backend="kernel").double().eval()
    short, long = (torch.randn(n, 2, 16, dtype=torch.float64) for n in (128, 129))
    assert module(short, short, short, need_weights=True)[1] is not None
    module(long, long, long, need_weights=False)
    module(short[:1], short, short, incremental_state={}, need_weights=False)
    # Two hypotheses of a sentence share its keys.
    module(short.repeat(1, 2, 1), short, short, incremental_state={}, need_weights=False)
    assert kernel.calls == []
    module(short, short, short, need_weights=False)
    assert len(kernel.calls) == 1


def test_the_fused_projection_is_read_as_it_lies_and_gets_one_gradient(kernel: Counted) -> None:
    module, x = MultiheadAttention(16, 4, backend="kernel"), torch.randn(TOTAL, 3, 16)
    output, _ = module(x, x, x, need_weights=False)
    assert output.is_contiguous()
    ((qkv,), _) = kernel.calls[0]
    assert qkv.shape == (3, TOTAL, 3, 4, 4) and qkv.transpose(0, 1).is_contiguous()
    names, nodes = set(), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            nodes += [parent for parent, _ in node.next_functions]
    assert not any(name.startswith(("Cat", "Split", "Chunk", "Clone")) for name in names), names


@pytest.mark.parametrize(
    ("choice", "reason", "expected"),
    [
        ({"backend": "auto"}, None, 1),
        ({"backend": "auto"}, "they are not built", 0),
        ({"backend": "kernel"}, None, 1),
        ({"backend": "sdpa"}, None, 0),
        ({"backend": "reference"}, None, 0),
        ({"softmax_type": "fast_fill"}, None, 0),
    ],
)
def test_the_backend_chooses(
    choice: dict[str, Any],
    reason: str | None,
    expected: int,
    kernel: Counted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "why_not_kernel", lambda *parts: reason)
    module = MultiheadAttention(16, 4, **choice)
    x = torch.randn(TOTAL, 3, 16)
    for mode in (True, False):
        module.train(mode)(x, x, x, need_weights=False)
    assert len(kernel.calls) == 2 * expected


def test_the_kernels_are_an_error_if_they_are_requested_and_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "why_not_kernel", why_not_kernel)
    x = torch.randn(TOTAL, 3, 16)
    with pytest.raises(RuntimeError, match="but 'auto' can: the tensors are on cpu"):
        MultiheadAttention(16, 4, backend="kernel")(x, x, x, need_weights=False)
    with pytest.raises(RuntimeError, match="but 'auto' can: the tensors are on cpu"):
        tiny(attention_backend="kernel")(*tokens())


def test_random_numbers_without_the_kernel_stay_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the operator draws a seed, so a run on a CPU keeps its losses."""
    monkeypatch.setattr(attention_module, "why_not_kernel", why_not_kernel)
    x = torch.randn(8, 2, 16)
    states = {}
    for backend in ("sdpa", "auto"):
        torch.manual_seed(0)
        MultiheadAttention(16, 4, dropout=0.5, backend=backend)(x, x, x, need_weights=False)
        states[backend] = torch.get_rng_state()
    assert torch.equal(states["sdpa"], states["auto"])


# ---- the whole model


@pytest.mark.parametrize("left_pad_target", [False, True])
def test_the_model_gives_the_same_scores_and_gradients(left_pad_target: bool) -> None:
    source = random_tokens([3, 6, 4], 6, 0, left=True)
    target = random_tokens([5, 2, 3], 5, 1, left=left_pad_target)
    models = [
        tiny(left_pad_target=left_pad_target, attention_backend=name)
        for name in ("reference", "kernel")
    ]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    scores = [model(source, None, target)[0][target != 0] for model in models]
    torch.testing.assert_close(*scores)
    gradients = [
        torch.autograd.grad(score.sin().sum(), list(model.parameters()))
        for score, model in zip(scores, models, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def tokens() -> tuple[Tensor, None, Tensor]:
    source = random_tokens([3, 6, 4], 6, 0, left=True)
    return source, None, random_tokens([5, 2, 3], 5, 1, left=False)


def test_dropout_follows_torchs_generator_and_stops_in_evaluation() -> None:
    options = {"attention_dropout": 0.3, "dropout": 0.0, "relu_dropout": 0.0}
    model = tiny(attention_backend="kernel", **options).train()
    torch.manual_seed(0)
    first, second = model(*tokens())[0], model(*tokens())[0]
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(*tokens())[0], first)
    model.eval()
    assert torch.equal(model(*tokens())[0], model(*tokens())[0])


def test_a_recomputed_module_drops_the_same_weights() -> None:
    module = MultiheadAttention(16, 4, dropout=0.3, backend="kernel").double()
    x = torch.randn(TOTAL, 3, 16, dtype=torch.float64, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        output: Tensor = module(x, x, x, need_weights=False)[0]
        return output

    gradients = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        output = checkpoint(attend, x, use_reentrant=False) if is_recomputed else attend(x)
        gradients.append(torch.autograd.grad(output.sin().sum(), x))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


# torch 2.13's compiler makes an object of the autograd.Function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_training_model_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler shows a progress bar, whose thread would stay.
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)
    torch._dynamo.reset()
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    model = tiny(attention_backend="kernel", attention_dropout=0.3, **layers).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        torch.manual_seed(0)
        scores = run(*tokens())[0]
        gradients = torch.autograd.grad(scores.sin().sum(), list(model.parameters()))
        results.append((scores, *gradients))
    torch.testing.assert_close(*results)
    torch._dynamo.reset()
