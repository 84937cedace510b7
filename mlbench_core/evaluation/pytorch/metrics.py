r"""Compute metrics over batches and workers.

A metric is called with one batch and returns the batch's value. :meth:`~MLBenchMetric.update` adds
the batch to the average, and :meth:`~MLBenchMetric.average` returns the value over all batches
added, on all workers::

    metric.reset()
    for data, target in batches:
        output = model(data)
        metric.update(metric(output, target), len(output))
    value = metric.average()          # a collective: every worker calls it

The value over all data is usually not the mean of the values of the batches. For example, the
perplexity of two batches is not the mean of two perplexities. Each metric here therefore sums
*statistics*, a few numbers that add up over batches and workers. It computes its value from the
sums, so the value depends neither on the split into batches nor on the number of workers. All sums
are float64.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import require
from mlbench_core.running_statistics import AverageMeter

__all__ = [
    "BLEUScore",
    "BitsPerByte",
    "CasedBLEUScore",
    "DiceCoefficient",
    "F1Score",
    "MLBenchMetric",
    "Perplexity",
    "TopKAccuracy",
]


class MLBenchMetric:
    r"""Base class of the metrics, which averages the values of batches, weighted by their sizes.

    A subclass defines ``__call__`` and ``name``. Its average is then

    .. math:: \frac{\sum_k \sum_b n_{kb} v_{kb}}{\sum_k \sum_b n_{kb}}

    over the batches :math:`b` of the workers :math:`k`, with values :math:`v` and sizes :math:`n`.
    A subclass may override :meth:`update`: the values that it puts into ``average_meter`` are
    averaged over the workers.

    Attributes:
        average_meter: Mean of the values of this worker's batches, weighted by their sizes.

    Example:
        >>> class Mean(MLBenchMetric):
        ...     name = "Mean"
        ...     def __call__(self, output, target):
        ...         return output.mean()
        >>> mean = Mean()
        >>> mean.update(mean(torch.tensor([1.0, 1.0, 1.0]), None), 3)
        >>> mean.update(mean(torch.tensor([5.0]), None), 1)
        >>> mean.average().item()
        2.0
    """

    def __init__(self) -> None:
        self.average_meter = AverageMeter()

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Compute the value of one batch, without adding it to the average.

        Args:
            output: The model's output.
            target: The correct output.

        Returns:
            The value, float32, one element.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no __call__(output, target); a metric must define it"
        )

    @property
    def name(self) -> str:
        """Return the name of the metric, as the tracker and the master show it."""
        raise NotImplementedError(f"{type(self).__name__} has no name; a metric must define it")

    def update(self, perc: float | Tensor, size: int) -> None:
        """Add a batch to the average.

        Args:
            perc: The batch's value, as the call returned it.
            size: Number of samples in the batch; the weight of the value.

        Raises:
            ValueError: ``size`` is negative.
        """
        check_at_least("size", size, 0)
        if isinstance(perc, Tensor):
            # It is kept as a tensor, because reading its number would wait for the device.
            value = cast(float, perc.detach().to(torch.float64).sum())
        else:
            value = float(perc)
        self.average_meter.update(value, size)

    def average(self) -> Tensor:
        """Compute the value over all batches that all workers have added since the last reset.

        Every worker must call it, because it is a collective: one all-reduce of a few numbers.

        Returns:
            The value, float32, no dimensions; 0 if no worker added a batch.
        """
        # With a count of 1 per worker, global_average divides the sums by the world size, which is
        # undone here.
        mean = process_groups.global_average(self._local_totals(), 1)
        return self._score(mean * process_groups.world_size()).to(torch.float32)

    def reset(self) -> None:
        """Discard all batches added so far."""
        self.average_meter = AverageMeter()

    def _local_totals(self) -> Tensor:
        """Return the sums over this worker's batches: here of weighted values, and of weights."""
        total = torch.as_tensor(self.average_meter.sum, dtype=torch.float64).detach().reshape(())
        return torch.stack([total, total.new_tensor(float(self.average_meter.count))])

    def _score(self, totals: Tensor) -> Tensor:
        """Compute the metric's value from the sums over all workers."""
        return _ratio(totals[0], totals[1])


# Number of calls without an update whose statistics are kept. It is bounded, because training calls
# metrics and never updates them.
_REMEMBERED_CALLS = 256


@dataclass(frozen=True)
class _Call:
    """A value that a call returned, and the statistics from which it was computed."""

    value: Tensor
    statistics: Tensor
    is_per_sample: bool
    """True if the statistics are those of one sample, to be multiplied by the size of the batch."""

    def returned(self, value: float | Tensor) -> bool:
        """Return True if the call returned ``value``, the tensor or its number."""
        # The tensor is recognized without reading its number, which would wait for the device.
        if value is self.value:
            return True
        number, own = float(value), float(self.value)
        # nan differs from itself, but a call that returned nan must be found.
        return number == own or (math.isnan(number) and math.isnan(own))


class _StatisticsMetric(MLBenchMetric):
    """A metric whose batches add statistics instead of a weighted value.

    A call stores the statistics from which it computed its value. An update with this value adds
    the stored statistics to the sums. Calls and updates may come in any order. ``average_meter``
    has the mean of the batches' values, which is not the metric's value.

    :meth:`average` returns this mean only if no statistics were added. Then no update had a value
    that a call returned, or a subclass puts its own values into ``average_meter`` instead of
    calling :meth:`update` of this class.
    """

    def __init__(self) -> None:
        super().__init__()
        self._totals = self._no_statistics()
        self._calls: deque[_Call] = deque(maxlen=_REMEMBERED_CALLS)
        # True if the updates had values that calls returned, False if they had other values, None
        # before any update.
        self._has_statistics: bool | None = None

    def _no_statistics(self) -> Tensor:
        """Return the statistics of no batch, all zero."""
        return torch.zeros(2, dtype=torch.float64)

    def _score_of(self, statistics: Tensor) -> Tensor:
        """Compute the metric's value from statistics."""
        return _ratio(statistics[0], statistics[1])

    def _statistics_of(self, value: float | Tensor, size: int) -> Tensor:
        """Return the statistics of ``size`` samples with a value that no call returned.

        By default all statistics are zero, and :meth:`average` returns the mean of such values.
        """
        self._check_origin(value, has_statistics=False)
        return self._no_statistics()

    def _check_origin(self, value: float | Tensor, has_statistics: bool) -> None:
        """Refuse to mix statistics and plain values, which cannot be combined into one number."""
        if self._has_statistics not in (None, has_statistics):
            raise ValueError(
                "perc must be a value that this metric returned, in all updates or in none, "
                f"not {float(value)} now: call the metric with each batch and pass its result "
                "to update(), or call reset() before"
            )
        self._has_statistics = has_statistics

    def _value_of(self, statistics: Tensor, is_per_sample: bool = False) -> Tensor:
        """Compute the value of a batch with these statistics, and store them for its update."""
        value = self._score_of(statistics).to(torch.float32)
        self._calls.append(_Call(value, statistics, is_per_sample))
        return value

    def reset(self) -> None:
        """Discard all batches added so far, and the statistics of all calls."""
        super().reset()
        self._totals = self._no_statistics()
        self._calls.clear()
        self._has_statistics = None

    def update(self, perc: float | Tensor, size: int) -> None:
        """Add the batch of a call to the average.

        Args:
            perc: The value that a call returned, as the tensor or its number. Only the last 256
                calls that were not added yet are kept. If no update has a value that a call
                returned, the average is the weighted mean of the values.
            size: Number of samples in the batch.

        Raises:
            ValueError: ``size`` is negative, or some updates have values that calls returned and
                others do not.
        """
        check_at_least("size", size, 0)
        statistics = self._pop_statistics(perc, size)
        super().update(perc, size)
        self._totals = self._totals.to(statistics.device) + statistics

    def _pop_statistics(self, perc: float | Tensor, size: int) -> Tensor:
        """Return the statistics of the latest call that returned ``perc``, and remove the call."""
        # Each call counts once: two batches may have the same value.
        for index in reversed(range(len(self._calls))):
            call = self._calls[index]
            if not call.returned(perc):
                continue
            self._check_origin(perc, has_statistics=True)
            del self._calls[index]
            if not call.is_per_sample:
                return call.statistics
            # The mean loss of an empty batch is nan, which times 0 would still be nan.
            if not size:
                return self._no_statistics()
            return call.statistics * size
        return self._statistics_of(perc, size)

    def _local_totals(self) -> Tensor:
        return torch.cat([self._totals, super()._local_totals().to(self._totals.device)])

    def _score(self, totals: Tensor) -> Tensor:
        statistics = totals[:-2]
        return torch.where(
            (statistics != 0).any(), self._score_of(statistics), super()._score(totals[-2:])
        )


class TopKAccuracy(MLBenchMetric):
    r"""Share of samples whose target is among the ``topk`` most likely classes, in percent.

    Args:
        topk: Number of most likely classes among which the target may be, at least 1.
        threshold: Used only for two classes with a single score per sample: the smallest score that
            predicts the positive class. It is 0.5 for probabilities, 0 for logits.

    Raises:
        ValueError: ``topk`` is below 1.

    Example:
        >>> output = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])
        >>> TopKAccuracy(1)(output, torch.tensor([1, 2])).item()
        50.0
        >>> TopKAccuracy(2)(output, torch.tensor([1, 2])).item()
        100.0
        >>> TopKAccuracy()(torch.tensor([[0.9], [0.2]]), torch.tensor([1, 0])).item()
        100.0
        >>> logits = torch.tensor([[2.2], [-1.4]])
        >>> TopKAccuracy(threshold=0.0)(logits, torch.tensor([1, 0])).item()
        100.0
    """

    def __init__(self, topk: int = 1, *, threshold: float = 0.5) -> None:
        check_at_least("topk", topk, 1)
        super().__init__()
        self.topk = topk
        self.threshold = threshold

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the accuracy of one batch.

        Args:
            output: Scores of shape (batch, classes). For two classes also the scores of the
                positive class alone, of shape (batch, 1) or (batch,).
            target: Class numbers, shape (batch,) or (batch, 1).

        Returns:
            Percentage, float32, shape (1,); 0 for an empty batch.

        Raises:
            ValueError: ``topk`` is not below the number of classes, or the shapes do not fit.
        """
        if output.dim() == 1:
            output = output.unsqueeze(1)
        if output.dim() != 2 or target.numel() != output.shape[0]:
            raise ValueError(
                "output must be (batch, classes) and target (batch,), not "
                f"{tuple(output.shape)} and {tuple(target.shape)}"
            )
        # A single column has the scores of the positive class of two.
        classes = max(2, output.shape[1])
        if self.topk >= classes:
            raise ValueError(
                f"topk must be at most {classes - 1} for {classes} classes, not {self.topk}: "
                "with more, every sample would be right"
            )
        target = target.reshape(-1, 1)
        if output.shape[1] == 1:
            predicted = (output >= self.threshold).to(target.dtype)
        else:
            predicted = output.topk(self.topk, dim=1).indices
        correct = (predicted == target).sum().reshape(1).to(torch.float32)
        # new_full() fills on the device; new_tensor() would copy a number there, for which the host
        # waits.
        return _ratio(100.0 * correct, correct.new_full((1,), len(output)))

    @property
    def name(self) -> str:
        """Return ``Prec@k``."""
        return f"Prec@{self.topk}"


class Perplexity(_StatisticsMetric):
    r"""Perplexity of a language model: exp of the mean loss of all tokens.

    .. math:: \exp\Bigl(-\frac{1}{N} \sum_{i=1}^{N} \log p(w_i)\Bigr)

    The :math:`N` tokens are those of all batches and workers.

    Example:
        >>> perplexity = Perplexity()
        >>> for loss in (1.0, 4.0):
        ...     perplexity.update(perplexity(torch.tensor(loss), None), 1)
        >>> round(perplexity.average().item(), 3)  # exp(2.5), not (exp(1) + exp(4)) / 2 = 28.7
        12.182
    """

    def __call__(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        """Compute the perplexity of one batch.

        Args:
            output: Scores or log-probabilities of shape (..., classes), or (batch, classes, ...) as
                torch's cross-entropy takes them. Or the mean loss of the batch, of shape () or
                (1,).
            target: Token ids of shape (...) or (batch, ...). It is not used with a mean loss. If
                one of output and target has all tokens in one dimension, the other may have any
                number of dimensions. Ids of -100 are left out.

        Returns:
            The perplexity, float32, no dimensions; infinite for a mean loss above 88.7. For scores,
            a following :meth:`update` weighs the batch by its number of tokens. For a mean loss, it
            weighs the loss by ``size``.

        Raises:
            ValueError: The shapes do not fit, or fit in two ways.
        """
        if output.dim() == 0 or output.shape == (1,):
            loss = output.detach().to(torch.float64).reshape(())
            return self._value_of(torch.stack([loss, torch.ones_like(loss)]), is_per_sample=True)
        if target is None:
            raise ValueError(
                f"target must be token ids for an output of shape {tuple(output.shape)}, not None: "
                "pass them, or the mean loss as the output"
            )
        scores = _classes_last(output, target).to(torch.promote_types(output.dtype, torch.float32))
        losses = F.cross_entropy(
            scores, target.reshape(-1).long(), ignore_index=-100, reduction="sum"
        )
        tokens = (target != -100).sum()
        statistics = [losses.detach().to(torch.float64), tokens.to(torch.float64)]
        return self._value_of(torch.stack(statistics))

    @property
    def name(self) -> str:
        """Return ``Perplexity``."""
        return "Perplexity"

    def _statistics_of(self, value: float | Tensor, size: int) -> Tensor:
        # No call returned this perplexity, but its logarithm is the mean loss of the samples.
        loss = torch.as_tensor(value, dtype=torch.float64).detach().log()
        return torch.stack([loss, torch.ones_like(loss)]) * size

    def _score_of(self, statistics: Tensor) -> Tensor:
        loss, tokens = statistics
        return torch.where(tokens == 0, torch.zeros_like(loss), torch.exp(_ratio(loss, tokens)))


class BitsPerByte(Perplexity):
    r"""Mean number of bits that a language model needs for a byte: its cross-entropy to base 2.

    .. math:: -\frac{1}{N} \sum_{i=1}^{N} \log_2 p(b_i)

    The :math:`N` bytes are those of all batches and workers. A guess among all 256 needs 8 bits.

    Example:
        >>> bits = BitsPerByte()
        >>> bits(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)).item()
        8.0
    """

    def __call__(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        """Compute the bits per byte of one batch.

        Args:
            output: Scores or log-probabilities of shape (..., 256). Or the mean loss of the batch
                in nats, of shape () or (1,).
            target: The bytes, shape (...). It is not used with a mean loss.

        Returns:
            The bits per byte, float32, no dimensions.
        """
        if target is None or output.dim() < 2:
            return super().__call__(output, target)
        # The classes are always the last dimension here, also of sequences of 256 bytes.
        return super().__call__(output.flatten(0, -2), target.flatten())

    @property
    def name(self) -> str:
        """Return ``BitsPerByte``."""
        return "BitsPerByte"

    def _statistics_of(self, value: float | Tensor, size: int) -> Tensor:
        loss = torch.as_tensor(value, dtype=torch.float64).detach() * math.log(2)
        return torch.stack([loss, torch.ones_like(loss)]) * size

    def _score_of(self, statistics: Tensor) -> Tensor:
        return _ratio(statistics[0], statistics[1]) / math.log(2)


class DiceCoefficient(_StatisticsMetric):
    r"""Dice coefficient of two masks.

    .. math:: \frac{2 \sum_i o_i t_i}{\sum_i o_i + \sum_i t_i}

    with the sums over all elements of all batches and workers. If both masks are empty everywhere,
    it is 1. With predictions of 0 and 1, it is the F1 score.

    Args:
        logits: True if the outputs are logits, whose sigmoids are the probabilities.

    Example:
        >>> output, target = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]])
        >>> round(DiceCoefficient()(output, target).item(), 6)
        0.8
        >>> logits, target = torch.tensor([0.0, 0.0]), torch.tensor([1, 0])
        >>> round(DiceCoefficient(logits=True)(logits, target).item(), 6)
        0.5
    """

    def __init__(self, *, logits: bool = False) -> None:
        super().__init__()
        self.logits = logits

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the Dice coefficient of one batch.

        Args:
            output: Mask or probabilities between 0 and 1, or with ``logits`` any numbers; any
                shape.
            target: The true mask, the same number of elements.

        Returns:
            The coefficient between 0 and 1, float32, no dimensions; 0 for a batch without elements.

        Raises:
            ValueError: The numbers of elements differ.
        """
        predicted, true = _flat_pair(output, target)
        if self.logits:
            predicted = predicted.sigmoid()
        elements = predicted.new_full((), predicted.numel())
        return self._value_of(
            torch.stack([2.0 * (predicted * true).sum(), predicted.sum() + true.sum(), elements])
        )

    @property
    def name(self) -> str:
        """Return ``Dice Coefficient``."""
        return "Dice Coefficient"

    def _no_statistics(self) -> Tensor:
        return torch.zeros(3, dtype=torch.float64)

    def _score_of(self, statistics: Tensor) -> Tensor:
        overlap, total, elements = statistics
        # Two empty masks agree, but a batch without elements shows nothing.
        agree_on_nothing = (total == 0) & (elements > 0)
        return torch.where(agree_on_nothing, torch.ones_like(total), _ratio(overlap, total))


class F1Score(_StatisticsMetric):
    r"""F1 score: harmonic mean of precision and recall.

    .. math:: F_1 = \frac{2\,\mathrm{TP}}{2\,\mathrm{TP} + \mathrm{FP} + \mathrm{FN}}

    with true positives, false positives and false negatives counted over all batches and workers.

    Args:
        threshold: Smallest output that is predicted positive.
        eps: Added to the denominator, so that the score is 0 if neither outputs nor targets are
            positive.

    Example:
        >>> F1Score()(torch.tensor([0.9, 0.6, 0.4, 0.1]), torch.tensor([1, 0, 1, 0])).item()
        0.5
    """

    def __init__(self, threshold: float = 0.5, eps: float = 1e-9) -> None:
        super().__init__()
        self.threshold = threshold
        self.eps = eps

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the F1 score of one batch.

        Args:
            output: Probabilities of the positive class, any shape.
            target: 1 for positive, 0 for negative, the same number of elements.

        Returns:
            The score between 0 and 1, float32, no dimensions.

        Raises:
            ValueError: The numbers of elements differ.
        """
        scores, true = _flat_pair(output, target)
        predicted = (scores >= self.threshold).to(true.dtype)
        true_positives = (predicted * true).sum()
        # predicted.sum() = TP + FP and true.sum() = TP + FN
        return self._value_of(torch.stack([2.0 * true_positives, predicted.sum() + true.sum()]))

    @property
    def name(self) -> str:
        """Return ``F1-Score``."""
        return "F1-Score"

    def _score_of(self, statistics: Tensor) -> Tensor:
        return statistics[0] / (statistics[1] + self.eps)


class BLEUScore(_StatisticsMetric):
    """Corpus BLEU of translations, from 0 to 100, as sacrebleu computes it.

    The matches and counts of n-grams (n = 1 to 4) and both lengths are summed over all batches and
    workers. The score is computed from the sums; a mean of the batches' scores would be another
    number.

    By default, texts are compared in lower case, with sacrebleu's international tokenizer, as the
    goals of the translation tasks require. Papers mostly report ``BLEUScore(tokenize="13a",
    lowercase=False)``. Scores with different settings cannot be compared, see :attr:`signature`.

    Args:
        use_raw: True if the text is tokenized already. Then no tokenizer is used, and the case
            counts unless ``lowercase`` is True. The smoothing is ``floor`` with 0.1 and effective
            order, as in ``sacrebleu.raw_corpus_bleu``. Otherwise it is ``exp``, as in
            ``sacrebleu.corpus_bleu``.
        tokenize: Name of sacrebleu's tokenizer, such as ``"intl"`` or ``"13a"``. None means
            ``"intl"``.
        lowercase: True to compare both texts in lower case. None means True, but False with
            ``use_raw``.

    Raises:
        MissingDependencyError: sacrebleu is not installed.
        ValueError: sacrebleu has no such tokenizer, or ``tokenize`` is given with ``use_raw``.

    References:
        Papineni et al. 2002, BLEU: a Method for Automatic Evaluation of Machine Translation;
        Post 2018, A Call for Clarity in Reporting BLEU Scores, arXiv 1804.08771.
    """

    _MAX_ORDER = 4

    def __init__(
        self, use_raw: bool = False, *, tokenize: str | None = None, lowercase: bool | None = None
    ) -> None:
        super().__init__()
        bleu = cast(Any, require("sacrebleu.metrics", "text")).BLEU
        if use_raw and tokenize is not None:
            raise ValueError(
                "tokenize must be left out with use_raw=True, not "
                f"{tokenize!r}: raw text is tokenized already"
            )
        if lowercase is None:
            lowercase = not use_raw
        self.use_raw = use_raw
        self.lowercase = lowercase
        self._smoothing: dict[str, Any]
        if use_raw:
            # The settings of sacrebleu.raw_corpus_bleu.
            self.tokenize = "none"
            self._smoothing = {
                "smooth_method": "floor",
                "smooth_value": 0.1,
                "effective_order": True,
            }
        else:
            # The smoothing of sacrebleu.corpus_bleu.
            self.tokenize = tokenize or "intl"
            self._smoothing = {"smooth_method": "exp", "effective_order": False}
        if self.tokenize not in bleu.TOKENIZERS:
            raise ValueError(
                f"tokenize must be one of {sorted(bleu.TOKENIZERS)}, "
                f"not {tokenize!r}: pass one of them"
            )
        # force=True suppresses sacrebleu's warning about " ." at line ends (tokenized text), which
        # every batch would repeat.
        self._bleu = bleu(
            tokenize=self.tokenize,
            lowercase=self.lowercase,
            force=True,
            max_ngram_order=self._MAX_ORDER,
            **self._smoothing,
        )

    def __call__(self, output: Sequence[str], target: Sequence[str]) -> Tensor:
        """Compute the BLEU of one batch as if it were the whole corpus.

        Args:
            output: Translations, one string per sentence.
            target: References, one string per translation.

        Returns:
            The score, float32, no dimensions; 0 for an empty batch.

        Raises:
            TypeError: One of them is a string instead of a sequence of strings.
            ValueError: The numbers of sentences differ.
        """
        for argument, sentences in (("output", output), ("target", target)):
            if isinstance(sentences, str):
                raise TypeError(
                    f"{argument} must be a list of sentences, not one string ({sentences!r:.60})"
                )
        if len(output) != len(target):
            raise ValueError(
                "target must have a reference for each of "
                f"{len(output)} translations, not {len(target)}"
            )
        if len(output) == 0:
            return self._value_of(self._no_statistics())
        score = self._bleu.corpus_score(list(output), [list(target)])
        statistics = [score.sys_len, score.ref_len, *score.counts, *score.totals]
        return self._value_of(torch.tensor(statistics, dtype=torch.float64))

    @property
    def name(self) -> str:
        """Return ``BLEU-Score``."""
        return "BLEU-Score"

    @property
    def signature(self) -> str:
        """Return the settings of the score in sacrebleu's notation.

        Scores can be compared only if their signatures are equal.

        Example:
            >>> BLEUScore().signature.split("|version")[0]
            'nrefs:1|case:lc|eff:no|tok:intl|smooth:exp'
            >>> BLEUScore(tokenize="13a", lowercase=False).signature.split("|version")[0]
            'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp'
        """
        # sacrebleu sets the number of references only when it computes a score, and the signature
        # contains it.
        self._bleu.num_refs = 1
        return str(self._bleu.get_signature())

    def _no_statistics(self) -> Tensor:
        return torch.zeros(2 + 2 * self._MAX_ORDER, dtype=torch.float64)

    def _score_of(self, statistics: Tensor) -> Tensor:
        # The sums come from averages times the number of workers, so they are whole numbers only up
        # to rounding.
        sys_len, ref_len, *counts = (round(number) for number in statistics.tolist())
        matches, possible = counts[: self._MAX_ORDER], counts[self._MAX_ORDER :]
        if sys_len == 0:
            return statistics.new_zeros(())
        score = self._bleu.compute_bleu(
            matches, possible, sys_len, ref_len, max_ngram_order=self._MAX_ORDER, **self._smoothing
        )
        return statistics.new_tensor(float(score.score))


class CasedBLEUScore(BLEUScore):
    """BLEU as papers report it: sacrebleu's tokenizer 13a, case-sensitive.

    It computes ``BLEUScore(tokenize="13a", lowercase=False)``. Its name is different, so that a
    tracker can record it in addition to a :class:`BLEUScore`.
    """

    def __init__(self) -> None:
        super().__init__(tokenize="13a", lowercase=False)

    @property
    def name(self) -> str:
        """Return ``BLEU-Score-13a-cased``."""
        return "BLEU-Score-13a-cased"


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``numerator / denominator``, elementwise; 0 for a denominator of 0."""
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / denominator)


def _flat_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 vectors, because sums in float32 or half precision lose counts."""
    if output.numel() != target.numel():
        raise ValueError(
            "target must have as many elements as the output "
            f"{tuple(output.shape)}, not shape {tuple(target.shape)}"
        )
    output, target = output.detach().reshape(-1), target.detach().reshape(-1)
    return output.to(torch.float64), target.to(torch.float64)


def _classes_last(output: Tensor, target: Tensor) -> Tensor:
    """Return scores as a matrix (tokens, classes) in the order of ``target.reshape(-1)``."""
    # torch's cross-entropy has the classes in the second dimension, language models in the last.
    # Some shapes fit both.
    is_second = output.dim() > 2 and output.shape[:1] + output.shape[2:] == target.shape
    is_last = output.shape[:-1] == target.shape
    if is_second and is_last:
        raise ValueError(
            f"output must not have shape {tuple(output.shape)} with a target of shape "
            f"{tuple(target.shape)}: its classes may be the second or the last dimension, "
            "so pass (tokens, classes) and (tokens,)"
        )
    if is_second:
        return output.movedim(1, -1).reshape(-1, output.shape[1])
    is_flat = output.dim() == 2 or target.dim() == 1
    if is_last or (is_flat and output.shape[:-1].numel() == target.numel()):
        return output.reshape(-1, output.shape[-1])
    raise ValueError(
        "output must be (..., classes) and target (...), "
        "or output (batch, classes, ...) and target (batch, ...), "
        f"not {tuple(output.shape)} and {tuple(target.shape)}: give each token one row of scores"
    )
