"""Rounds of translation models whose batches hold so many tokens: every token weighs the same.

Batches are dictionaries as the ``collater`` of
:class:`~mlbench_core.dataset.nlp.pytorch.wmt17_dataset.WMT17Dataset` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.controlflow.pytorch.controlflow import prepare_batch, record_train_batch_stats
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric
from mlbench_core.utils.pytorch import distributed
from mlbench_core.utils.pytorch.modes import evaluation_mode
from mlbench_core.utils.tracker import Tracker

__all__ = ["train_round_by_tokens", "translation_round"]

Batch = Mapping[str, Any]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Translate = Callable[[Batch], tuple[Sequence[str], Sequence[str]]]


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
    r"""Train for one epoch with updates along the mean gradient of all tokens that all workers read for them.

    With k workers, u = ``update_freq`` batches of each before an update, the summed loss :math:`L_{ij}` of worker i's
    j-th batch and :math:`n_{ij}` tokens in it, an update follows

    .. math:: g = \frac{\sum_{i=1}^{k} \sum_{j=1}^{u} \nabla L_{ij}}{\sum_{i=1}^{k} \sum_{j=1}^{u} n_{ij}},

    the gradient of one batch of all these tokens, however they are dealt out. It costs a message of 8 bytes for the
    denominator n. An optimizer with a loss scale divides by k u in half precision, which keeps the sum in range, and
    by n / (k u) in float32. The last update of an epoch may have fewer batches than u.

    All workers train on as many batches as the one with the fewest.

    Args:
        dataloader: This worker's batches; it has a length. Each has ``net_input``, the model's arguments by name,
            ``target`` and ``ntokens``, the tokens of the target that the loss counts.
        model: The model; it is put into training mode.
        optimizer: One that divides by what its ``step`` is told (``average_custom=True``): a
            :class:`~mlbench_core.optim.pytorch.centralized.CustomCentralizedOptimizer` or a
            :class:`~mlbench_core.optim.pytorch.fp_optimizers.FP16Optimizer`.
        loss_function: Called ``(output, target)``; gives the sum of the losses of all tokens.
        scheduler: Steps after each update that was not skipped for an overflow; None for a constant rate.
        update_freq: Batches of each worker before an update.
        autocast: Compute the model in this type; None for the type of its weights.
        use_cuda: Whether batches go to the current GPU.
        tracker: Gets times, loss and tokens of each batch.

    Returns:
        This worker's mean loss of a token over the epoch; 0 without a batch.

    Raises:
        ValueError: ``update_freq`` is not positive.

    References:
        Ott et al. 2018, Scaling Neural Machine Translation, arXiv 1806.00187.
    """
    if update_freq < 1:
        raise ValueError(f"update_freq is {update_freq}; it must be at least 1")
    model.train()
    if tracker is not None:
        tracker.train()
    total = distributed.smallest(len(dataloader))
    iterator = iter(dataloader)
    loss_sum: float | Tensor = 0.0
    tokens_seen = tokens_of_update = 0
    for index in range(total):
        if tracker is not None:
            tracker.batch_start()
        batch, _ = prepare_batch(next(iterator), None, None, use_cuda=use_cuda)
        _mark(tracker, "batch_load")
        if index % update_freq == 0:
            optimizer.zero_grad()
            tokens_of_update = 0
        _mark(tracker, "init")
        loss, output = _accumulate(batch, model, optimizer, loss_function, autocast, tracker)
        tokens_of_update += batch["ntokens"]
        if (index + 1) % update_freq == 0 or index + 1 == total:
            is_updated = _update(optimizer, tokens_of_update, update_freq, tracker)
            if scheduler is not None and is_updated:
                scheduler.step()
        if tracker is not None:
            tracker.batch_end(samples=len(output), tokens=batch["ntokens"])
        record_train_batch_stats(index, loss / batch["ntokens"], output, None, tracker, total)
        loss_sum = loss_sum + loss.to(torch.float64)
        tokens_seen += batch["ntokens"]
    return float(loss_sum) / max(1, tokens_seen)


def _accumulate(
    batch: Batch,
    model: nn.Module,
    optimizer: Any,
    loss_function: LossFunction,
    autocast: torch.dtype | None,
    tracker: Tracker | None,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of a batch to the model's; gives the summed loss without its graph, and the scores."""
    with torch.autocast(batch["target"].device.type, autocast, enabled=autocast is not None):
        output = model(**batch["net_input"])
    _mark(tracker, "fwd_pass")
    loss = loss_function(output, batch["target"])
    _mark(tracker, "comp_loss")
    if hasattr(optimizer, "backward_loss"):
        optimizer.backward_loss(loss)
    else:
        loss.backward()
    _mark(tracker, "backprop")
    return loss.detach(), output.detach()


def _update(optimizer: Any, tokens: int, update_freq: int, tracker: Tracker | None) -> bool:
    """Update the weights from the gradients of all workers; gives whether that was done, not skipped.

    Args:
        optimizer: The optimizer.
        tokens: What this worker's gradient is a sum over.
        update_freq: Number u of its batches.
        tracker: Is told of aggregation and update.
    """
    count = distributed.get_backend_tensor(torch.tensor(tokens, dtype=torch.float64))
    tokens_of_all = distributed.sum_over_workers(count)
    if not hasattr(optimizer, "backward_loss"):
        optimizer.step(tracker=tracker, denom=tokens_of_all)
        return True
    batches_of_all = distributed.world_size() * update_freq
    return bool(optimizer.step(tracker=tracker, denom=batches_of_all, multiplier=tokens_of_all / batches_of_all))


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

    Every worker must call it with its share; a share may have fewer batches than another, or empty ones. The score of
    all shares comes from statistics that are summed over the workers, not from the shares' scores.

    Args:
        dataloader: This worker's batches, as in :func:`train_round_by_tokens`; an empty dictionary is passed over.
        model: The model; it is in evaluation mode meanwhile.
        loss_function: Called ``(output, target)``; gives the sum of the losses of all tokens.
        translate: Gives translations and references of a batch, as text.
        metrics: Metrics on these, such as :class:`~mlbench_core.evaluation.pytorch.metrics.BLEUScore`; they are reset
            first.
        use_cuda: Whether batches go to the current GPU.
        tracker: Gets the time of the round.

    Returns:
        The metrics' values, and the mean loss of a token; both of all workers. Pass them to
        :func:`~mlbench_core.controlflow.pytorch.controlflow.record_validation_stats`.
    """
    for metric in metrics:
        metric.reset()
    if tracker is not None:
        tracker.validation()
        tracker.validation_start()
    loss_sum: float | Tensor = 0.0
    tokens = 0
    try:
        with evaluation_mode(model), torch.no_grad():
            for batch in filter(None, dataloader):
                batch, _ = prepare_batch(batch, None, None, use_cuda=use_cuda)
                output = model(**batch["net_input"])
                loss_sum = loss_sum + loss_function(output, batch["target"]).to(torch.float64)
                tokens += batch["ntokens"]
                translations, references = translate(batch)
                for metric in metrics:
                    metric.update(metric(translations, references), len(references))
        values = {metric: metric.average().item() for metric in metrics}
        return values, distributed.global_average(loss_sum, tokens).item()
    finally:
        if tracker is not None:
            tracker.validation_end()


def _mark(tracker: Tracker | None, step: str) -> None:
    if tracker is not None:
        tracker.record_batch_step(step)
