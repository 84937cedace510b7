"""Rounds of translation models: tokens dealt out to workers and batches are those of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import sacrebleu
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.controlflow.pytorch.translation import (
    epoch_parts,
    train_round_by_tokens,
    translation_round,
)
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.optim.pytorch import CustomCentralizedOptimizer, FP16Optimizer
from tests.helpers.ranks import run_ranks

SIZES = {"embed_dim": 16, "ffn_embed_dim": 32, "layers": 1, "attention_heads": 2}
TINY: dict[str, Any] = {
    f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()
}


class Words:
    """A vocabulary of 12 words: padding is 0, the end 1."""

    def pad(self) -> int:
        return 0

    def eos(self) -> int:
        return 1

    def __len__(self) -> int:
        return 12


def make_batches(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Batches of so many sentences with at most so many words."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for sentences, longest in sizes:
        target = torch.randint(2, 12, (sentences, longest), generator=generator)
        lengths = torch.randint(1, longest + 1, (sentences, 1), generator=generator)
        target = target.masked_fill(torch.arange(longest) >= lengths, 0)
        net_input = {
            "src_tokens": torch.randint(2, 12, (sentences, longest), generator=generator),
            "src_lengths": torch.full((sentences,), longest),
            "prev_output_tokens": F.pad(target[:, :-1], (1, 0), value=1),
        }
        count = int((target != 0).sum())
        batches.append(
            {
                "id": torch.arange(sentences),
                "net_input": net_input,
                "target": target,
                "ntokens": count,
            }
        )
    return batches


BATCHES = make_batches([(2, 3), (5, 9), (1, 2), (7, 6), (3, 4), (4, 4)])
LOSS = LabelSmoothing(0, 0.1)
LR = 0.1


def make_model() -> TransformerModel:
    torch.manual_seed(1)
    words = Words()
    return TransformerModel(
        TransformerConfig(**TINY, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0),
        words,
        words,
    )


def flat(model: TransformerModel) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def updated(
    world_size: int, batches: list[dict[str, Any]], precision: str, freq: int
) -> tuple[Tensor, float]:
    """Weights after one epoch of plain gradient descent, which unlike Adam shows a wrong divisor;
    and the loss."""
    model = make_model()
    if precision == "fp16":
        half = FP16Optimizer(model.half(), world_size, init_scale=2**7, average_custom=True)
        half.set_optimizer(torch.optim.SGD([half.fp32_params], lr=LR))
        loss = train_round_by_tokens(batches, model, half, LOSS, update_freq=freq)
        return half.fp32_params.detach().clone(), loss
    inside = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = CustomCentralizedOptimizer(model, world_size, inside, average_custom=True)
    autocast = torch.bfloat16 if precision == "bf16" else None
    loss = train_round_by_tokens(
        batches, model, optimizer, LOSS, update_freq=freq, autocast=autocast
    )
    return flat(model), loss


def expected(updates: list[list[dict[str, Any]]]) -> Tensor:
    """The weights, each update by the mean loss of all tokens in the batches of all workers."""
    model = make_model()
    for batches in updates:
        model.zero_grad()
        total = sum(LOSS(model(**batch["net_input"])[0], batch["target"]) for batch in batches)
        (total / sum(batch["ntokens"] for batch in batches)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=LR)
    return flat(model)


def translate(batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Made-up translations of some words of the target."""
    rows = [[f"w{number}" for number in row.tolist()] for row in batch["target"]]
    return [" ".join(row[: 2 + len(row) // 2]) for row in rows], [" ".join(row) for row in rows]


def translate_twice(batch: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
    """The same as text for a second metric, in capitals."""
    translations, references = translate(batch)
    return [(translations, references), ([text.upper() for text in translations], references)]


def rounds_on_a_worker(rank: int, world_size: int) -> dict[str, Any]:
    mine = (
        BATCHES[rank::world_size] + BATCHES[rank:1]
    )  # worker 0 has one more, which would wait for ever
    weights = {p: updated(world_size, mine, p, 2) for p in ("fp32", "bf16", "fp16")}
    evaluated = [*BATCHES[:5:world_size], {}] if rank else [*BATCHES[1:5:world_size]]
    bleu, cased = BLEUScore(), BLEUScore(lowercase=False)
    values, loss = translation_round(evaluated, make_model(), LOSS, translate_twice, [bleu, cased])
    parts = [len(part) for part in epoch_parts(mine, 0.5)]
    return {
        "weights": weights,
        "bleu": values[bleu],
        "cased": values[cased],
        "loss": loss,
        "parts": parts,
    }


def test_workers_times_accumulation_are_one_batch_of_the_same_tokens() -> None:
    results = run_ranks(2, rounds_on_a_worker)
    reference = expected([BATCHES[:4], BATCHES[4:]])  # the last update has one batch of each worker
    moved = float((reference - flat(make_model())).norm())
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.03), ("fp16", 0.03)):
        for result in results:
            weights, _ = result["weights"][precision]
            assert torch.equal(weights, results[0]["weights"][precision][0])
            assert float((weights - reference).norm()) < tolerance * moved, precision
    # Validation: each worker's share counts with its tokens and n-grams.
    texts = [translate(batch) for batch in BATCHES[:5]]
    translations, references = (
        [t for out, _ in texts for t in out],
        [t for _, ref in texts for t in ref],
    )
    whole = sacrebleu.corpus_bleu(translations, [references], tokenize="intl", lowercase=True)
    model = make_model().eval()
    with torch.no_grad():
        loss = sum(LOSS(model(**batch["net_input"])[0], batch["target"]) for batch in BATCHES[:5])
    for result in results:
        assert result["bleu"] == pytest.approx(whole.score, abs=1e-4)
        assert result["parts"] == [2, 1]  # of 3 batches, though worker 0 has 4
        assert result["cased"] == 0.0  # "W3" is another word than "w3"
        assert result["loss"] == pytest.approx(
            float(loss) / sum(b["ntokens"] for b in BATCHES[:5]), rel=1e-5
        )


def test_parts_of_an_epoch_are_the_epoch_and_end_with_updates() -> None:
    parts = [(list(part), part.is_last) for part in epoch_parts(range(21), 0.3, update_freq=2)]
    assert [len(batches) for batches, _ in parts] == [6, 6, 6, 3]  # 3 of 11 updates
    assert [i for batches, _ in parts for i in batches] == list(range(21))
    assert [is_last for _, is_last in parts] == [False, False, False, True]
    for share, most, expected in [
        (1.0, None, [21]),
        (0.3, 5, [2, 2, 1]),
        (0.01, 3, [1, 1, 1]),
        (0.3, 30, [6, 6, 6, 3]),
    ]:
        assert [len(part) for part in epoch_parts(range(21), share, most=most)] == expected
    assert list(epoch_parts([], 0.3)) == []
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"share must be above 0 and at most 1, not {share}"):
            next(epoch_parts([1], share))


def test_one_worker_accumulates_to_the_same_weights() -> None:
    weights, loss = updated(1, BATCHES, "fp32", 4)
    torch.testing.assert_close(weights, expected([BATCHES[:4], BATCHES[4:]]), atol=1e-6, rtol=0)
    assert 1.5 < loss < 4.5  # nats a token, of 12 words
    with pytest.raises(ValueError, match="update_freq must be at least 1, not 0"):
        updated(1, BATCHES, "fp32", 0)
