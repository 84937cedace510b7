"""Values of the metrics, on one worker and on several."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score

from mlbench_core.errors import MissingDependencyError
from mlbench_core.evaluation.pytorch.metrics import (
    BLEUScore,
    CasedBLEUScore,
    DiceCoefficient,
    F1Score,
    MLBenchMetric,
    Perplexity,
    TopKAccuracy,
)
from tests.helpers.ranks import run_ranks

HYPOTHESES = [
    "the cat sat on the mat",
    "a quick brown fox jumps over the dog .",
    "hello world",
    "there is a house in New Orleans",
    "it is raining",
    "he reads the book, she writes one",
]
REFERENCES = [
    "the cat is on the mat",
    "the quick brown fox jumps over the lazy dog.",
    "hello there, world",
    "there is a house in New Orleans, they call",
    "it rains",
    "he reads the book, and she writes one",
]


def batches_of_classes() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight uneven batches of scores and classes."""
    generator = torch.Generator().manual_seed(5)
    sizes = [3, 7, 1, 5, 2, 4, 6, 8]
    return [
        (torch.randn(n, 6, generator=generator) * 3, torch.randint(0, 6, (n,), generator=generator))
        for n in sizes
    ]


def batches_of_masks() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight uneven batches of probabilities and zeros or ones."""
    generator = torch.Generator().manual_seed(6)
    sizes = [3, 7, 1, 5, 2, 4, 6, 8]
    return [
        (torch.rand(n, generator=generator), torch.randint(0, 2, (n,), generator=generator))
        for n in sizes
    ]


def batches_of_sentences() -> list[tuple[list[str], list[str]]]:
    """Eight uneven batches of translations, one of them empty."""
    cuts = [0, 1, 1, 2, 3, 4, 5, 5, 6]
    return [(HYPOTHESES[a:b], REFERENCES[a:b]) for a, b in itertools.pairwise(cuts)]


def joined(batches: list[Any]) -> tuple[Any, Any]:
    """All batches as one."""
    if isinstance(batches[0][0], list):
        return [s for batch, _ in batches for s in batch], [
            s for _, batch in batches for s in batch
        ]
    return torch.cat([output for output, _ in batches]), torch.cat(
        [target for _, target in batches]
    )


def expected_accuracy(k: int) -> float:
    output, target = joined(batches_of_classes())
    rank_of_target = (output > output.gather(1, target[:, None])).sum(1)
    return 100.0 * (rank_of_target < k).double().mean().item()


def expected_perplexity() -> float:
    output, target = joined(batches_of_classes())
    return math.exp(F.cross_entropy(output.double(), target).item())


def expected_f1() -> float:
    output, target = joined(batches_of_masks())
    return float(f1_score(target.numpy(), (output >= 0.5).numpy()))


def expected_dice() -> float:
    output, target = joined(batches_of_masks())
    return (2 * (output * target).sum() / (output.sum() + target.sum())).item()


METRICS: dict[
    str, tuple[Callable[[], MLBenchMetric], Callable[[], list[Any]], Callable[[], float]]
] = {
    "Prec@1": (TopKAccuracy, batches_of_classes, lambda: expected_accuracy(1)),
    "Prec@3": (lambda: TopKAccuracy(3), batches_of_classes, lambda: expected_accuracy(3)),
    "Perplexity": (Perplexity, batches_of_classes, expected_perplexity),
    "F1-Score": (F1Score, batches_of_masks, expected_f1),
    "Dice Coefficient": (DiceCoefficient, batches_of_masks, expected_dice),
    "BLEU-Score": (
        BLEUScore,
        batches_of_sentences,
        lambda: (
            sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize="intl", lowercase=True).score
        ),
    ),
    "BLEU-Score cased": (
        lambda: BLEUScore(tokenize="13a", lowercase=False),
        batches_of_sentences,
        lambda: sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score,
    ),
    "BLEU-Score-13a-cased": (
        CasedBLEUScore,
        batches_of_sentences,
        lambda: sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score,
    ),
    "BLEU-Score raw": (
        lambda: BLEUScore(use_raw=True),
        batches_of_sentences,
        lambda: sacrebleu.raw_corpus_bleu(HYPOTHESES, [REFERENCES]).score,
    ),
}


def average_of_my_part(rank: int, world_size: int) -> dict[str, float]:
    """What each worker gets from all metrics over its share of the batches."""
    averages = {}
    for key, (make, batches, _) in METRICS.items():
        metric = make()
        for output, target in batches()[rank::world_size]:
            metric.update(metric(output, target), len(output))
        averages[key] = metric.average().item()
    # One worker without a batch neither hangs the others nor changes their average.
    lonely = TopKAccuracy()
    if rank == world_size - 1:
        lonely.update(75.0, 4)
    averages["lonely"] = lonely.average().item()
    averages["nobody"] = BLEUScore().average().item()
    return averages


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_averages_over_workers_are_those_of_the_joined_batches(world_size: int) -> None:
    for averages in run_ranks(world_size, average_of_my_part):
        for key, (_, _, expected) in METRICS.items():
            assert averages[key] == pytest.approx(expected(), rel=1e-6), key
        assert averages["lonely"] == 75.0
        assert averages["nobody"] == 0.0


@pytest.mark.parametrize("key", METRICS)
def test_without_a_process_group_the_world_is_one_worker(key: str) -> None:
    make, batches, expected = METRICS[key]
    metric = make()
    for output, target in batches():
        metric.update(metric(output, target).item(), len(output))  # a number instead of the tensor
    assert metric.average().item() == pytest.approx(expected(), rel=1e-6)
    assert metric.name == key.removesuffix(" raw").removesuffix(" cased")


@pytest.mark.parametrize("key", METRICS)
def test_one_batch_has_the_value_of_the_call(key: str) -> None:
    make, batches, expected = METRICS[key]
    assert make()(*joined(batches())).item() == pytest.approx(expected(), rel=1e-6)


def test_averages_with_the_collectives_patched(mocker) -> None:
    mocker.patch("mlbench_core.distributed.pytorch.process_groups.dist")
    metric = TopKAccuracy(1)
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    accuracy = metric(output, torch.tensor([1, 0, 0, 0]))
    assert accuracy.item() == 75.0
    metric.update(accuracy, 4)
    metric.update(metric(output[:2], torch.tensor([0, 1])), 2)
    assert metric.average().item() == 50.0


def test_an_average_costs_one_all_reduce(mocker) -> None:
    dist = mocker.patch("mlbench_core.distributed.pytorch.process_groups.dist", MagicMock())
    metric = F1Score()
    metric.update(metric(torch.ones(3), torch.ones(3)), 3)
    metric.average()
    assert dist.all_reduce.call_count == 1


def test_counts_beyond_float32_are_exact() -> None:
    metric = F1Score()
    ones = 2**24
    metric._totals += torch.tensor([0.0, float(ones)], dtype=torch.float64)
    for _ in range(3):
        metric.update(metric(torch.tensor([1.0]), torch.tensor([0.0])), 1)
    assert metric._totals[1].item() == ones + 3


def test_perplexity_is_exp_of_the_mean_loss() -> None:
    """Not the mean of exp(loss), which is 75.2 for these two batches."""
    metric = Perplexity()
    for loss in (0.01, 5.0):
        metric.update(metric(torch.tensor(loss)), 10)
    assert metric.average().item() == pytest.approx(math.exp(2.505), rel=1e-6)


def test_perplexity_takes_scores_of_any_layout_and_log_probabilities() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = math.exp(F.cross_entropy(scores.reshape(-1, 7), target.reshape(-1)).item())
    metric = Perplexity()
    for output in (scores, scores.movedim(-1, 1), scores.log_softmax(-1)):
        assert metric(output, target).item() == pytest.approx(expected, rel=1e-5)
    assert metric(scores.reshape(-1, 7), target).item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        metric(scores, torch.zeros(3, dtype=torch.long))


def test_perplexity_weighs_tokens_not_batches_and_skips_ignored_ones() -> None:
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([1, 2, -100, 0, -100, 3])
    metric = Perplexity()
    metric.update(metric(scores[:3], target[:3]), 1)
    metric.update(metric(scores[3:], target[3:]), 1)
    assert metric.average().item() == pytest.approx(
        math.exp(F.cross_entropy(scores, target).item()), rel=1e-6
    )


def test_perplexity_takes_a_loss_with_one_dimension() -> None:
    for loss in (torch.tensor(2.0), torch.tensor([2.0])):
        perplexity = Perplexity()
        value = perplexity(loss, torch.tensor([1, 2]))
        assert value.shape == ()
        assert value.item() == pytest.approx(math.exp(2))
        perplexity.update(value, 2)
        assert perplexity.average().item() == pytest.approx(math.exp(2))


def test_perplexity_of_large_losses_does_not_overflow() -> None:
    metric = Perplexity()
    metric.update(metric(torch.tensor(100.0)), 1)
    metric.update(metric(torch.tensor(0.0)), 9)
    assert metric.average().item() == pytest.approx(math.exp(10), rel=1e-6)
    metric.reset()
    metric.update(metric(torch.tensor(100.0)).item(), 1)  # infinite as a float32, but known
    metric.update(1.0, 9)  # a perplexity from elsewhere
    metric.update(metric(torch.tensor(math.nan)), 0)  # the mean loss of no sample
    assert metric.average().item() == pytest.approx(math.exp(10), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_perplexity_of_half_precision_is_computed_in_float32(dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    scores, target = (4 * torch.randn(64, 500, generator=generator)).to(dtype), torch.arange(64)
    expected = math.exp(F.cross_entropy(scores.float(), target).item())
    assert Perplexity()(scores, target).item() == pytest.approx(expected, rel=1e-5)
    loss = torch.tensor(12.0, dtype=dtype)  # its perplexity, 162,755, is no float16
    assert Perplexity()(loss).item() == pytest.approx(math.exp(12), rel=1e-5)


@pytest.mark.parametrize(
    ("output", "target"), [((4, 5, 3), (5, 4)), ((2, 12, 6), (4, 6)), ((2, 5, 7), (2, 7, 5))]
)
def test_perplexity_refuses_targets_that_do_not_fit(output, target) -> None:
    with pytest.raises(ValueError, match=re.escape(f"not {output} and {target}")):
        Perplexity()(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_perplexity_reads_classes_in_the_second_dimension_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((4, 5, 3), (2, 3, 4, 4), (6, 6, 2)):
        scores = torch.randn(shape, generator=generator)
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        expected = math.exp(F.cross_entropy(scores, target).item())
        assert Perplexity()(scores, target).item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="second or the last"):
        Perplexity()(torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.long))
    # A language model's scores of (time, batch, words) with the targets in one row.
    scores, target = (
        torch.randn(4, 2, 5, generator=generator),
        torch.randint(0, 5, (8,), generator=generator),
    )
    expected = math.exp(F.cross_entropy(scores.reshape(8, 5), target).item())
    assert Perplexity()(scores, target).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([([0, 0, 1, 0], [0, 0, 0, 1])], 0.0),
        ([([0, 0], [0, 0]), ([1, 0], [0, 1])], 0.0),
        ([([0], [0]), ([0], [0]), ([0], [0]), ([1, 1], [1, 0])], 2 / 3),
        ([([0, 0], [0, 0]), ([0], [0])], 1.0),
        ([([], [])], 0.0),
        ([], 0.0),
    ],
)
def test_dice_does_not_depend_on_how_the_data_was_cut(batches, expected) -> None:
    metric = DiceCoefficient()
    for output, target in batches:
        metric.update(metric(torch.tensor(output), torch.tensor(target)), len(output))
    assert metric.average().item() == pytest.approx(expected)


def test_dice_of_logits_is_that_of_their_probabilities() -> None:
    logits, target = torch.tensor([3.0, -2.0, 0.5]), torch.tensor([1, 1, 0])
    assert DiceCoefficient(logits=True)(logits, target).item() == DiceCoefficient()(
        logits.double().sigmoid(), target
    )
    assert (
        DiceCoefficient()(target.float(), target.flip(0)).item()
        == F1Score()(target.float(), target.flip(0)).item()
    )


def test_f1_counts_an_output_at_the_threshold_as_positive() -> None:
    output, target = torch.tensor([0.5, 0.75, 0.25]), torch.tensor([1, 1, 0])
    assert F1Score()(output, target).item() == 1.0
    assert F1Score(threshold=0.75)(output, target).item() == pytest.approx(2 / 3)


def test_f1_sums_counts_over_batches() -> None:
    """The mean of these two batches' scores is 0.333; over all of their elements it is 0.667."""
    metric = F1Score()
    for output, target in [([0.9, 0.9], [1, 1]), ([0.1, 0.1], [0, 0]), ([0.9, 0.9], [0, 0])]:
        metric.update(metric(torch.tensor(output), torch.tensor(target)), 2)
    assert metric.average().item() == pytest.approx(2 / 3)


def pieces(metric: MLBenchMetric) -> list[tuple[Any, Any]]:
    """Two batches of different value and size for a metric of statistics."""
    if isinstance(metric, BLEUScore):
        return [(HYPOTHESES[:2], REFERENCES[:2]), (HYPOTHESES[2:], REFERENCES[2:])]
    if isinstance(metric, Perplexity):
        return batches_of_classes()[:2]
    return batches_of_masks()[5:7]


STATISTICS_METRICS = [F1Score, DiceCoefficient, BLEUScore, Perplexity]


@pytest.mark.parametrize("make", STATISTICS_METRICS)
def test_calls_may_come_before_updates_in_any_order(make) -> None:
    metric = make()
    one, two = pieces(metric)
    expected = metric(*joined([one, two])).item()
    for as_number, order in itertools.product((False, True), ((0, 1), (1, 0))):
        metric.reset()
        values = [metric(*one), metric(*two)]
        assert values[0] != values[1]
        for i in order:
            metric.update(values[i].item() if as_number else values[i], 1)
        assert metric.average().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [F1Score, DiceCoefficient, BLEUScore])
def test_counts_and_values_of_another_origin_are_not_mixed(make) -> None:
    metric = make()
    value = metric(*pieces(metric)[0])
    metric.update(value, 1)
    assert metric.average() == value
    with pytest.raises(
        ValueError, match=r"perc must be a value .* returned, in all updates or in none, not 0\.123"
    ):
        metric.update(0.123, 2)
    with pytest.raises(ValueError, match="perc must be"):
        metric.update(value, 1)  # a second time
    with pytest.raises(ValueError, match="size must be at least 0"):
        metric.update(value, -1)
    assert metric.average() == value
    metric.reset()
    value = metric(*pieces(metric)[0])
    metric.update(0.5, 2)
    with pytest.raises(ValueError, match="perc must be"):
        metric.update(value, 1)


@pytest.mark.parametrize("make", [F1Score, DiceCoefficient, BLEUScore])
def test_values_of_another_origin_have_a_weighted_mean_as_in_version_3(make) -> None:
    metric = make()
    metric.update(0.5, 10)
    metric.update(torch.tensor(1.0), 30)
    assert metric.average().item() == 0.875
    metric.reset()
    value = metric(*pieces(metric)[0])
    metric.reset()
    metric.update(
        value.item(), 1
    )  # the call is forgotten with the batches: this number is of another origin, too
    metric.update(value.item() + 1, 1)
    assert metric.average().item() == pytest.approx(value.item() + 0.5)
    metric.reset()
    assert metric.average().item() == 0.0


def test_calls_that_are_never_taken_in_are_not_all_kept() -> None:
    metric = F1Score()
    for _ in range(1000):
        metric(torch.ones(1), torch.ones(1))
    assert len(metric._calls) == 256


class OwnMean(MLBenchMetric):
    """As scripts of version 3.0 write one: it puts what it likes into the meter."""

    name = "Own"

    def __init__(self) -> None:
        super().__init__()
        self.topk = 1

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        return output.mean().unsqueeze(0)

    def update(self, perc: Any, size: int) -> None:
        self.average_meter.update(2 * perc, size)


class OwnF1(F1Score):
    """One that is derived from a metric with statistics of its own."""

    def update(self, perc: Any, size: int) -> None:
        self.average_meter.update(float(perc), size)


def averages_of_own_metrics(rank: int, world_size: int) -> tuple[float, float, float]:
    own, f1, plain = OwnMean(), OwnF1(), TopKAccuracy()
    own.update(
        own(torch.tensor([float(rank + 1)], requires_grad=True), None), 1 + 2 * rank
    )  # 1 x 1, 2 x 3
    f1.update(0.25, 1)
    f1.update(0.5, 1)
    plain.update(50.0, 1)
    plain.update(torch.tensor([100.0]), 3)
    assert plain.average_meter.avg == 87.5
    assert plain.average_meter.count == 4
    return own.average().item(), f1.average().item(), plain.average().item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_that_fill_the_meter_are_averaged_over_the_workers(world_size) -> None:
    expected = {1: 2.0, 2: 2 * (1 * 1 + 2 * 3) / 4}[world_size]
    for own, f1, plain in run_ranks(world_size, averages_of_own_metrics):
        assert (own, f1, plain) == (pytest.approx(expected), 0.375, 87.5)


def test_sums_of_plain_numbers_are_not_rounded_to_float32() -> None:
    metric = OwnMean()
    metric.update(2.0**24 / 2, 1)
    metric.update(0.5, 1)
    assert metric._local_totals()[0].item() == 2**24 + 1
    plain = TopKAccuracy()
    plain.update(75.0, 4)
    assert type(plain.average_meter.avg) is float


def test_a_reset_empties_the_meter() -> None:
    metric = OwnMean()
    metric.update(3.0, 1)
    metric.reset()
    assert metric.average_meter.count == 0
    assert metric.average().item() == 0.0


def test_accuracy_of_a_batch_has_one_dimension() -> None:
    value = TopKAccuracy()(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    assert value.shape == (1,)
    assert value[0].item() == 50.0


def test_bleu_refuses_what_is_no_list_of_pairs() -> None:
    with pytest.raises(TypeError, match="list of sentences"):
        BLEUScore()("one sentence", ["one sentence"])
    with pytest.raises(ValueError, match="each of 2 translations, not 1"):
        BLEUScore()(["a", "b"], ["a"])


def test_bleu_compares_lower_case_unless_text_is_raw_or_case_is_asked_for() -> None:
    pair = (["the cat sat on THE mat"], ["The cat sat on the mat"])
    assert BLEUScore()(*pair).item() == pytest.approx(100.0)
    assert BLEUScore(use_raw=True, lowercase=True)(*pair).item() == pytest.approx(100.0)
    for cased in (
        BLEUScore(lowercase=False),
        BLEUScore(use_raw=True),
        BLEUScore(True, lowercase=False),
    ):
        assert cased(*pair).item() < 50.0


def test_bleu_divides_text_as_the_tokenizer_says() -> None:
    pair = (["das alte haus \u00abgarten\u00bb"], ["das alte haus \u00ab garten \u00bb"])
    assert BLEUScore()(*pair).item() == pytest.approx(100.0)
    thirteen = BLEUScore(tokenize="13a", lowercase=False)(
        *pair
    ).item()  # it leaves guillemets on their word
    assert thirteen == pytest.approx(sacrebleu.corpus_bleu(pair[0], [pair[1]]).score)
    assert thirteen < 50.0


def test_raw_bleu_of_sentences_shorter_than_four_words_counts_the_orders_there_are() -> None:
    """The effective order of ``sacrebleu.raw_corpus_bleu``; without it every corpus of short
    sentences has 0."""
    metric = BLEUScore(use_raw=True)
    pairs = [(["guten tag"], ["guten tag"]), (["auf wiedersehen"], ["auf bald"])]
    for output, target in pairs:
        metric.update(metric(output, target), 1)
    expected = sacrebleu.raw_corpus_bleu([o for (o,), _ in pairs], [[t for _, (t,) in pairs]]).score
    assert expected > 50.0
    assert metric.average().item() == pytest.approx(expected)


def test_bleu_refuses_a_tokenizer_that_it_could_not_use() -> None:
    with pytest.raises(ValueError, match=r"tokenize must be one of .*'intl'.* not 'moses'"):
        BLEUScore(tokenize="moses")
    with pytest.raises(ValueError, match="tokenize must be left out with use_raw=True, not '13a'"):
        BLEUScore(use_raw=True, tokenize="13a")


def test_bleu_says_how_to_install_sacrebleu(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MissingDependencyError, match="text"):
        BLEUScore()


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_accuracy_of_probabilities_of_two_classes(shape) -> None:
    output = torch.tensor([0.9, 0.5, 0.49, 0.1]).reshape(shape)
    assert TopKAccuracy(1)(output, torch.tensor([1, 1, 1, 0])).item() == 75.0
    assert TopKAccuracy(1)(output, torch.tensor([[1.0], [1.0], [1.0], [0.0]])).item() == 75.0


@pytest.mark.parametrize(("topk", "classes"), [(2, 2), (10, 10), (11, 10), (2, 1)])
def test_k_must_be_below_the_number_of_classes(topk: int, classes: int) -> None:
    with pytest.raises(ValueError, match=f"topk must be at most .* not {topk}"):
        TopKAccuracy(topk)(torch.zeros(3, classes), torch.zeros(3, dtype=torch.long))


def test_accuracy_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="topk must be at least 1, not 0"):
        TopKAccuracy(0)
    with pytest.raises(ValueError, match=r"not \(3, 4\) and \(2,\)"):
        TopKAccuracy()(torch.zeros(3, 4), torch.zeros(2))


def test_masks_must_have_the_same_size() -> None:
    for metric in (DiceCoefficient(), F1Score()):
        with pytest.raises(ValueError, match=r"output \(3,\), not shape \(2,\)"):
            metric(torch.zeros(3), torch.zeros(2))


def test_empty_masks_agree() -> None:
    assert DiceCoefficient()(torch.zeros(3), torch.zeros(3)).item() == 1.0
    assert F1Score()(torch.zeros(3), torch.zeros(3)).item() == 0.0


def test_the_base_says_what_a_metric_must_define() -> None:
    with pytest.raises(NotImplementedError, match="__call__"):
        MLBenchMetric()(None, None)
    with pytest.raises(NotImplementedError, match="name"):
        _ = MLBenchMetric().name
