"""The Transformer with the operator of short attention, in the plain form that runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mlbench_core.models.pytorch.transformer import TransformerModel, transformer
from mlbench_core.models.pytorch.transformer.modules import DecoderLayer, EncoderLayer, MultiheadAttention
from mlbench_core.models.pytorch.transformer.modules import multihead_attention as attention_module
from mlbench_core.ops.pytorch import attention
from tests.models.test_transformer import random_tokens, tiny

TOTAL = 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are no work to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counted:
    """A function that remembers the arguments of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The seeds that are drawn, by the model or by an attention module of its own."""
    counted = Counted(attention.draw_seed)
    monkeypatch.setattr(attention, "draw_seed", counted)
    monkeypatch.setattr(transformer, "draw_seed", counted)
    return counted


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and padding of 3 sentences; one has 2 tokens on the right, one is nothing but padding."""
    generator = torch.Generator().manual_seed(0)
    query, other, third = (
        torch.randn(TOTAL, 3, 16, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    padding = torch.tensor([[False] * TOTAL, [True] * (TOTAL - 2) + [False] * 2, [True] * TOTAL])
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
    wanted = ~padding.t() if is_padded and kind == "self" else torch.ones(TOTAL, 3, dtype=torch.bool)
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


def test_padded_positions_of_self_attention_get_zeros() -> None:
    module = MultiheadAttention(16, 4, backend="kernel").double()
    query, key, value, padding = inputs("self")
    output, _ = module(query, key, value, key_padding_mask=padding, need_weights=False)
    assert output[padding.t()].eq(0).all() and output[~padding.t()].ne(0).all()


def test_weights_and_long_sentences_take_other_paths() -> None:
    module = MultiheadAttention(16, 4).double()
    short, long = (torch.randn(n, 2, 16, dtype=torch.float64) for n in (128, 129))
    for x, need_weights in ((short, True), (long, False)):
        results = []
        for backend in ("reference", "kernel"):
            module.backend = backend
            results.append(module(x, x, x, need_weights=need_weights))
        torch.testing.assert_close(results[0][0], results[1][0])
        assert (results[1][1] is not None) == need_weights


def test_the_fused_projection_is_read_where_it_lies_and_gets_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(attention_module.short_attention_qkv)
    monkeypatch.setattr(attention_module, "short_attention_qkv", counted)
    module, x = MultiheadAttention(16, 4, backend="kernel"), torch.randn(TOTAL, 3, 16)
    output, _ = module(x, x, x, need_weights=False)
    assert output.is_contiguous()
    ((qkv,), _) = counted.calls[0]
    assert qkv.shape == (3, TOTAL, 3, 4, 4) and qkv.transpose(0, 1).is_contiguous()
    names = set()
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            nodes += [parent for parent, _ in node.next_functions]
    assert not any(name.startswith(("Cat", "Split", "Chunk", "Clone")) for name in names), names


@pytest.mark.parametrize("is_taken", [False, True])
def test_auto_takes_the_kernel_where_it_is(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    """In training and evaluation, with and without a cache."""
    monkeypatch.setattr(attention_module, "uses_kernel", lambda *tensors, max_query, max_key: is_taken)
    whole, single = (Counted(getattr(attention_module, name)) for name in ("short_attention_kv", "short_attention"))
    monkeypatch.setattr(attention_module, "short_attention_kv", whole)
    monkeypatch.setattr(attention_module, "short_attention", single)
    module, (query, key, _, _) = MultiheadAttention(16, 4).double(), inputs("cross")
    for mode in (True, False):
        module.train(mode)(query, key, key, need_weights=False)
    module(query, key, key, need_weights=True)
    module(query, key, key, incremental_state={}, need_weights=False)
    assert [len(counted.calls) for counted in (whole, single)] == ([2, 1] if is_taken else [0, 0])


# ---- The whole model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_pad_target", [False, True])
def test_the_model_gives_the_same_scores_and_gradients(left_pad_target: bool) -> None:
    source = random_tokens([3, 6, 4], 6, 0, left=True)
    target = random_tokens([5, 2, 3], 5, 1, left=left_pad_target)
    models = [tiny(left_pad_target=left_pad_target, attention_backend=name) for name in ("reference", "kernel")]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    scores = [model(source, None, target)[0][target != 0] for model in models]
    torch.testing.assert_close(*scores)
    gradients = [
        torch.autograd.grad(score.sin().sum(), list(model.parameters()))
        for score, model in zip(scores, models, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def training_model(seed: int = 0, **changes: Any) -> TransformerModel:
    """A model that drops attention weights and nothing else."""
    options = {"attention_backend": "kernel", "attention_dropout": 0.3, "dropout": 0.0, "relu_dropout": 0.0, **changes}
    return tiny(seed, **options).train()


def tokens(seed: int = 0) -> tuple[Tensor, None, Tensor]:
    return random_tokens([3, 6, 4], 6, seed, left=True), None, random_tokens([5, 2, 3], 5, seed + 1, left=False)


def test_one_seed_is_drawn_for_a_step_and_each_layer_has_its_offset(
    draws: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    spies = [Counted(getattr(attention_module, name)) for name in ("short_attention_qkv", "short_attention_kv")]
    for spy, name in zip(spies, ("short_attention_qkv", "short_attention_kv"), strict=True):
        monkeypatch.setattr(attention_module, name, spy)
    model = training_model()
    torch.manual_seed(0)
    first, second = model(*tokens())[0], model(*tokens())[0]
    assert not torch.equal(first, second)
    assert len(draws.calls) == 2
    calls = [options for spy in spies for _, options in spy.calls]
    assert sorted(options["offset"] for options in calls) == sorted([0, 1, 2, 3, 4, 5] * 2)
    assert len({int(options["seed"]) for options in calls}) == 2
    torch.manual_seed(0)
    assert torch.equal(model(*tokens())[0], first)
    model.eval()
    assert torch.equal(model(*tokens())[0], model(*tokens())[0]) and len(draws.calls) == 3


@pytest.mark.parametrize("changes", [{"attention_backend": "auto"}, {"attention_dropout": 0.0}], ids=str)
def test_nothing_is_drawn_where_the_kernel_is_not_or_nothing_is_dropped(
    draws: Counted, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """So that the random numbers on a CPU stay what they are without the kernels, whether turned on or not."""
    monkeypatch.setenv("MLBENCH_CUDA_KERNELS", "1")
    training_model(**changes)(*tokens())
    assert draws.calls == []


def test_a_module_of_its_own_draws_its_seed_only_for_the_kernel(draws: Counted) -> None:
    x = torch.randn(64, 4, 16)
    for backend, number in (("fused", 0), ("auto", 0), ("kernel", 1)):
        module = MultiheadAttention(16, 4, dropout=0.5, backend=backend)
        module(x, x, x, need_weights=False)
        module.eval()(x, x, x, need_weights=False)
        assert len(draws.calls) == number, backend


def test_modules_drop_at_their_rate() -> None:
    """All weights are equal, the values are a unit matrix: the output is the weights."""
    module = MultiheadAttention(64, 1, dropout=0.25, backend="kernel")
    with torch.no_grad():
        module.in_proj_weight[:128] = 0
        module.in_proj_weight[128:].copy_(torch.eye(64))
        module.out_proj.weight.copy_(torch.eye(64))
    torch.manual_seed(0)
    x = torch.eye(64).unsqueeze(1).expand(64, 8, 64)
    weights, _ = module(x, x, x, need_weights=False)
    kept = weights[weights != 0]
    assert 1 - kept.numel() / weights.numel() == pytest.approx(0.25, abs=0.015)  # 6 standard deviations
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 64 / 0.75))


@pytest.mark.parametrize("layer", [EncoderLayer, DecoderLayer])
def test_recomputed_layers_drop_the_same_weights(monkeypatch: pytest.MonkeyPatch, layer: type) -> None:
    """Even if a second step runs before the first one's backward pass, and no random state is kept."""
    model = training_model()
    parameters = list(model.parameters())

    def gradients() -> list[tuple[Tensor, ...]]:
        torch.manual_seed(0)
        losses = [model(*tokens(seed))[0].sin().sum() for seed in (0, 5)]
        return [torch.autograd.grad(loss, parameters) for loss in losses]

    wanted = gradients()
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    monkeypatch.setattr(layer, "forward", recomputed)
    torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)


def test_a_recomputed_module_of_its_own_drops_the_same_weights() -> None:
    module = MultiheadAttention(16, 4, dropout=0.3, backend="kernel").double()
    x = torch.randn(TOTAL, 3, 16, dtype=torch.float64, requires_grad=True)
    gradients = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(0)
        output = run(lambda x: module(x, x, x, need_weights=False)[0], x)
        gradients.append(torch.autograd.grad(output.sin().sum(), x))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


# torch 2.13's compiler makes an object of the autograd.Function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_training_model_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)  # else progress bars start a thread
    torch._dynamo.reset()
    model = training_model(encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        torch.manual_seed(0)
        scores = run(*tokens())[0]
        results.append((scores, *torch.autograd.grad(scores.sin().sum(), list(model.parameters()))))
    torch.testing.assert_close(*results)
    torch._dynamo.reset()
