"""Train and validate translation models, in which every token has the same weight.

Batches are dictionaries as the ``collater`` of
:class:`~mlbench_core.dataset.nlp.pytorch.wmt17_dataset.WMT17Dataset` makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least
from mlbench_core.controlflow.pytorch.controlflow import BatchRecords, prepare_batch, validating
from mlbench_core.controlflow.pytorch.train_validation import Updates
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric
from mlbench_core.tracking.tracker import Tracker

__all__ = ["EpochPart", "epoch_parts", "train_round_by_tokens", "translation_round"]

Batch = Mapping[str, Any]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Texts = tuple[Sequence[str], Sequence[str]]
Translate = Callable[[Batch], Sequence[Texts]]


class EpochPart:
    """Consecutive batches of an epoch, as a loader that can be read once.

    Attributes:
        is_last: True if the epoch ends with this part.

    Args:
        batches: Iterator over the batches of the epoch; the next part continues with it.
        length: Number of batches.
        is_last: As above.
    """

    def __init__(self, batches: Iterator[Any], length: int, is_last: bool) -> None:
        self._batches = itertools.islice(batches, length)
        self._length = length
        self.is_last = is_last

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def epoch_parts(
    batches: Collection[Any], share: float, update_freq: int = 1, most: int | None = None
) -> Iterator[EpochPart]:
    """Split the batches of an epoch into parts, to validate after each part.

    Every worker must call it, because all workers use the same parts: those of the worker with the
    fewest batches.

    Args:
        batches: Batches of this worker, with a length.
        share: Share of the epoch in one part, above 0 and at most 1. The last part has the
            remaining batches.
        update_freq: Number of batches of each worker before an update. Every part except the last
            ends with an update.
        most: Largest number of batches in the epoch; None for all.

    Yields:
        The parts. Read each part to its end before you take the next one.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.

    Example:
        >>> [(list(part), part.is_last) for part in epoch_parts("abcdefgh", 0.3)]
        [(['a', 'b'], False), (['c', 'd'], False), (['e', 'f'], False), (['g', 'h'], True)]
    """
    if not 0 < share <= 1:
        raise ValueError(
            f"share must be above 0 and at most 1, not {share}: "
            "give the share of an epoch in one part"
        )
    # A worker with more parts than another would wait for it indefinitely in the next validation.
    total = process_groups.smallest(len(batches))
    if most is not None:
        total = min(total, most)
    updates = -(-total // update_freq)
    # A part has whole updates, so no validation finds gradients that were not applied yet.
    length = max(1, round(share * updates)) * update_freq
    # All parts share one iterator, so that no part draws batches of another.
    iterator = iter(batches)
    for first in range(0, total, length):
        yield EpochPart(iterator, min(length, total - first), is_last=first + length >= total)


def train_round_by_tokens(
    dataloader: Collection[Batch],
    model: nn.Module,
    optimizer: Any,
    loss_function: LossFunction,
    scheduler: Any = None,
    *,
    update_freq: int = 1,
    autocast: torch.dtype | None = None,
    use_cuda: bool = False,
    tracker: Tracker | None = None,
) -> float:
    r"""Train for one epoch with updates along the mean gradient of the tokens of all workers.

    With k workers, u = ``update_freq`` batches of each before an update, the summed loss
    :math:`L_{ij}` of worker i's j-th batch and :math:`n_{ij}` tokens in it, an update follows

    .. math::
        g = \frac{\sum_{i=1}^{k} \sum_{j=1}^{u} \nabla L_{ij}}
                 {\sum_{i=1}^{k} \sum_{j=1}^{u} n_{ij}},

    the gradient of one batch of all these tokens, however they are distributed. It costs a message
    of 8 bytes for the denominator n. An optimizer with a loss scale divides by k u in half
    precision, which keeps the sum in range, and by n / (k u) in float32. The last update of an
    epoch may have fewer batches than u.

    All workers train on the same number of batches, that of the worker with the fewest.

    Args:
        dataloader: This worker's batches; it has a length. Each has ``net_input``, the model's
            arguments by name, ``target`` and ``ntokens``, the number of tokens of the target that
            the loss counts.
        model: The model. It returns scores, or a tuple that begins with them, and is set to
            training mode.
        optimizer: An optimizer that divides by the ``denom`` of its ``step``
            (``average_custom=True``): a
            :class:`~mlbench_core.optim.pytorch.all_reduce.CustomCentralizedOptimizer` or a
            :class:`~mlbench_core.optim.pytorch.fp_optimizers.FP16Optimizer`.
        loss_function: Called ``(scores, target)``; returns the sum of the losses of all tokens.
        scheduler: Steps after each update; None for a constant rate.
        update_freq: Number of batches of each worker before an update.
        autocast: Type in which the model computes; None for the type of its weights.
        use_cuda: True to move batches to the current GPU.
        tracker: Receives times, loss and tokens of each batch.

    Returns:
        This worker's mean loss per token over the epoch; 0 without a batch.

    Raises:
        ValueError: ``update_freq`` is not positive.

    Example:
        >>> from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
        >>> from mlbench_core.optim.pytorch import CustomCentralizedOptimizer
        >>> model = nn.Embedding(4, 4)  # scores of the next word, from this one alone
        >>> words, next_words = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
        >>> batch = {"net_input": {"input": words}, "target": next_words, "ntokens": 2}
        >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = CustomCentralizedOptimizer(model, None, sgd, average_custom=True)
        >>> loss_function = LabelSmoothing(0)
        >>> first = train_round_by_tokens([batch], model, optimizer, loss_function)
        >>> train_round_by_tokens([batch], model, optimizer, loss_function) < first
        True

    References:
        Ott et al. 2018, Scaling Neural Machine Translation, arXiv 1806.00187.
    """
    check_at_least("update_freq", update_freq, 1)
    model.train()
    if tracker is not None:
        tracker.train()
    total = process_groups.smallest(len(dataloader))

    def scores(batch: Batch) -> Tensor:
        with torch.autocast(batch["target"].device.type, autocast, enabled=autocast is not None):
            return _scores(model(**batch["net_input"]))

    records = BatchRecords(tracker, total)
    divisor = partial(_divisor, optimizer, update_freq=update_freq)
    updates = Updates(scores, optimizer, loss_function, records, update_freq, divisor)
    iterator = iter(dataloader)
    loss_sum: float | Tensor = 0.0
    tokens_seen = 0
    with records:
        for index in range(total):
            records.start_batch()
            batch, _ = prepare_batch(next(iterator), None, None, use_cuda=use_cuda)
            records.mark("batch_load")
            loss, output, is_updated = updates.train_batch(index, batch, batch["target"])
            if scheduler is not None and is_updated:
                scheduler.step()
            records.end_batch(index, loss / batch["ntokens"], len(output), tokens=batch["ntokens"])
            # The sum is in float64, because a float32 sum over many batches loses digits.
            loss_sum = loss_sum + loss.to(torch.float64)
            tokens_seen += batch["ntokens"]
        loss_sum = records.read(loss_sum)[0]
    return loss_sum / max(1, tokens_seen)


def _scores(output: Any) -> Tensor:
    """Return the scores of an output: the first item of a tuple, as in ``TransformerModel``."""
    scores: Tensor = output[0] if isinstance(output, tuple) else output
    return scores


def _divisor(
    optimizer: Any, batches: Sequence[tuple[Batch, Tensor]], update_freq: int
) -> dict[str, Any]:
    """Return the divisor of the sum of all workers' gradients: the tokens of all workers.

    Args:
        optimizer: The optimizer. With a loss scale it receives the divisor in two parts.
        batches: This worker's batches, with their targets.
        update_freq: Number u of batches, unless the epoch ends early.
    """
    count = torch.tensor(sum(batch["ntokens"] for batch, _ in batches), dtype=torch.float64)
    tokens = process_groups.sum_over_workers(process_groups.get_backend_tensor(count))
    if not hasattr(optimizer, "backward_loss"):
        return {"denom": tokens}
    # Half precision overflows above 65,504. So it is divided by k u only; the rest of the division
    # is in float32.
    batches_of_all = process_groups.world_size() * update_freq
    return {"denom": batches_of_all, "multiplier": tokens / batches_of_all}


def translation_round(
    dataloader: Iterable[Batch],
    model: nn.Module,
    loss_function: LossFunction,
    translate: Translate,
    metrics: Sequence[MLBenchMetric],
    *,
    use_cuda: bool = False,
    tracker: Tracker | None = None,
) -> tuple[dict[MLBenchMetric, float], float]:
    """Compute the loss of all workers' validation data, translate it, and score the translations.

    Metrics may score the same translations as different text, for example raw tokens and
    detokenized sentences.

    Every worker must call it with its share. A share may have fewer batches than another, or empty
    ones. The score of all shares comes from statistics that are summed over the workers, not from
    the scores of the shares.

    Args:
        dataloader: This worker's batches, as in :func:`train_round_by_tokens`; an empty dictionary
            is skipped.
        model: The model, as in :func:`train_round_by_tokens`; it is in evaluation mode during the
            round.
        loss_function: Called ``(scores, target)``; returns the sum of the losses of all tokens.
        translate: Function of a batch; returns a pair of translations and references for each
            metric, as text.
        metrics: Metrics of these texts, in the same order, such as
            :class:`~mlbench_core.evaluation.pytorch.metrics.BLEUScore`; they are reset first.
        use_cuda: True to move batches to the current GPU.
        tracker: Receives the time of the round.

    Returns:
        The values of the metrics and the mean loss per token, both of all workers. Pass them to
        :func:`~mlbench_core.controlflow.validation_stats.record_validation_stats`.
    """
    loss_sum: float | Tensor = 0.0
    tokens = 0
    with validating(model, metrics, tracker):
        # Shares may have empty batches; they are skipped, because a model cannot compute on them.
        for batch in filter(None, dataloader):
            batch, _ = prepare_batch(batch, None, None, use_cuda=use_cuda)
            output = _scores(model(**batch["net_input"]))
            loss_sum = loss_sum + loss_function(output, batch["target"]).to(torch.float64)
            tokens += batch["ntokens"]
            for metric, (translations, references) in zip(metrics, translate(batch), strict=True):
                metric.update(metric(translations, references), len(references))
        values = {metric: metric.average().item() for metric in metrics}
        return values, process_groups.global_average(loss_sum, tokens).item()
