"""The GPT against closed forms, and its training on one worker and on several."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode

from mlbench_core.models.pytorch.gpt import GPT, GPTConfig, next_token_loss
from mlbench_core.optim.pytorch import CustomCentralizedOptimizer
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

SMALL = GPTConfig(layers=2, heads=2, width=16, context=12, vocabulary=50)


def make(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def draw(*shape: int, seed: int = 1, vocabulary: int = 50) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "layers", "width", "rows", "parameters"),
    [
        ("gpt2", 12, 768, 50_304, 123_568_128),
        ("mini", 6, 192, 256, 2_703_360),
        ("tiny", 3, 128, 256, 622_592),
    ],
)
def test_presets_have_the_parameters_of_the_closed_form(
    name: str, layers: int, width: int, rows: int, parameters: int
) -> None:
    config = GPTConfig.preset(name)
    with torch.device("meta"):
        model = GPT(config)
    # Four matrices of the attention, and two of the perceptron that are four times as large.
    assert rows * width + layers * (4 + 2 * 4) * width**2 == parameters
    assert sum(p.numel() for p in model.parameters()) == parameters == config.parameters
    assert all(p.ndim == 2 for p in model.parameters())


def test_operations_of_a_token_are_those_that_torch_counts() -> None:
    model, tokens = make(), draw(3, 12)
    # torch does not count those of its fast attention on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == SMALL.flops_per_token() * tokens.numel()


@pytest.mark.parametrize("name", ["mini", "tiny"])
def test_a_fresh_model_guesses(name: str) -> None:
    config = GPTConfig.preset(name)
    tokens = draw(4, 65, vocabulary=256)
    loss = next_token_loss(make(config)(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.15)


def test_initial_weights_have_their_deviations() -> None:
    model = make(GPTConfig.preset("mini"))
    for name, parameter in model.named_parameters():
        adds = name.endswith(("out.weight", "shrink.weight"))
        expected = 0.02 / math.sqrt(2 * 6) if adds else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_a_later_token_changes_no_earlier_score() -> None:
    model, tokens = make(), draw(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def plain_scores(model: GPT, tokens: Tensor) -> Tensor:
    """The formulas of the docstring for one sequence, with a loop over places and heads."""
    config, weights = model.config, dict(model.named_parameters())
    features = config.width // config.heads

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    def turned(x: Tensor) -> Tensor:
        places = torch.arange(len(x), dtype=x.dtype)[:, None]
        rates = 10_000.0 ** (-torch.arange(features // 2, dtype=x.dtype) * 2 / features)
        # Multiplying a complex number by exp(-i angle) turns it.
        numbers = torch.complex(x[:, : features // 2], x[:, features // 2 :])
        numbers = numbers * torch.exp(-1j * places * rates)
        return torch.cat([numbers.real, numbers.imag], 1)

    x = weights["embedding.weight"][tokens]
    for number in range(config.layers):
        of_layer = f"layers.{number}."
        read = norm(x)
        query, key, value, out = (
            weights[f"{of_layer}attention.{name}.weight"]
            for name in ("query", "key", "value", "out")
        )
        heads = []
        for head in range(config.heads):
            rows = slice(head * features, (head + 1) * features)
            scores = turned(read @ query[rows].T) @ turned(read @ key[rows].T).T
            scores = scores / math.sqrt(features)
            later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -math.inf).softmax(1) @ (read @ value[rows].T))
        x = x + torch.cat(heads, 1) @ out.T
        hidden = (norm(x) @ weights[f"{of_layer}grow.weight"].T).clamp(min=0) ** 2
        x = x + hidden @ weights[f"{of_layer}shrink.weight"].T
    return norm(x) @ weights["embedding.weight"].T


def test_scores_are_those_of_the_formulas() -> None:
    model, tokens = make().double(), draw(3, 9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # so that all parts matter
        scores = model(tokens)
        for sequence, its_scores in zip(tokens, scores, strict=True):
            # Cosine and sine of the model are rounded to float32.
            torch.testing.assert_close(
                its_scores, plain_scores(model, sequence), rtol=1e-5, atol=1e-5
            )


def test_a_sequence_may_be_shorter_than_the_context_and_not_longer() -> None:
    model, tokens = make(), draw(1, 12)
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]))
    with pytest.raises(ValueError, match=r"must have at most 12 in a sequence, .* not 13"):
        model(draw(1, 13))


def test_the_loss_is_that_of_float32_also_for_scores_in_bfloat16() -> None:
    scores, targets = torch.randn(2, 3, 50, dtype=torch.bfloat16), draw(2, 3)
    loss = next_token_loss(scores, targets)
    assert loss.dtype == torch.float32
    chosen = F.log_softmax(scores.double(), -1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-6)


def test_attention_under_autocast_is_near_that_in_float32() -> None:
    model, tokens = make(GPTConfig.preset("tiny")), draw(2, 128, vocabulary=256)
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(tokens)
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.float(), expected, rtol=0.05, atol=0.05)


def test_it_learns_one_batch_by_heart() -> None:
    model, tokens = make(), draw(4, 13)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(300):
        optimizer.zero_grad()
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    # The first tokens differ, so every next token follows from the tokens before it.
    assert loss.item() < 0.01


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"width": 18}, "width must be a multiple of 4, twice the number of heads, not 18"),
    ],
)
def test_wrong_sizes_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**vars(SMALL), **sizes})
    with pytest.raises(ValueError, match="name must be one of gpt2, mini, tiny, not 'huge'"):
        GPTConfig.preset("huge")


def train_share(rank: int, world_size: int, frequency: int) -> dict[str, Tensor]:
    """Three steps on this worker's share of 8 sequences, in ``frequency`` batches."""
    model = make().double()
    adamw = partial(AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    # The norm is above 1 at first, so that gradients are clipped.
    optimizer = CustomCentralizedOptimizer(model, None, adamw, grad_clip=0.05)
    for step in range(3):
        tokens = draw(8, 13, seed=step)
        share = tokens.chunk(world_size)[rank]
        optimizer.zero_grad()
        for batch in share.chunk(frequency):
            (next_token_loss(model(batch[:, :-1]), batch[:, 1:]) / frequency).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def joined(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    return [train_share(rank, world_size, frequency) for frequency in (1, 2)]


def plain_training() -> dict[str, Tensor]:
    """The same steps without this library's optimizers."""
    model: nn.Module = make().double()
    optimizer = AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        tokens = draw(8, 13, seed=step)
        optimizer.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("workers", some([2, 4]))
def test_workers_equal_one_worker_on_the_joined_batch(workers: int) -> None:
    expected = plain_training()
    for results in run_ranks(workers, joined):
        for weights in results:
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11)
