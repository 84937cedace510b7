"""Evaluate the checkpoints of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer
from mlbench_core.controlflow.pytorch.controlflow import validation_round
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric

__all__ = ["CheckpointsEvaluationControlFlow"]


class CheckpointsEvaluationControlFlow:
    """An evaluation of the models that a run saved after each of its epochs.

    Every worker loads its own checkpoint of an epoch. The weights are averaged over the workers,
    and the averaged model is evaluated on the data of all workers. Run it with the number of
    workers that trained. The run must have saved :attr:`CheckpointFreq.ALL` checkpoints.

    Args:
        ckpt_dir: Folder of the checkpoints.
        rank: This worker's rank.
        world_size: Number of workers.
        checkpointer: Its ``load_model_by_epoch`` loads the weights; None for :class:`Checkpointer`.
        model: Receives the weights of each epoch.
        epochs: Number of epochs (0 to ``epochs - 1`` are evaluated), or the epochs themselves.
        loss_function: Called ``(output, target)``; returns the mean loss of a batch.
        metrics: The metrics.
        use_cuda: True to move batches to the current GPU.
        dtype: Type of floating-point data, as in
            :func:`~mlbench_core.controlflow.pytorch.validation_round`.
        max_batch_per_epoch: Largest number of batches for each evaluation; None for all.
    """

    def __init__(
        self,
        ckpt_dir: str,
        rank: int,
        world_size: int,
        checkpointer: Checkpointer | type[Checkpointer] | None,
        model: nn.Module,
        epochs: int | Sequence[int],
        loss_function: Callable[[Any, Any], Tensor],
        metrics: Sequence[MLBenchMetric],
        use_cuda: bool = False,
        dtype: str | None = None,
        max_batch_per_epoch: int | None = None,
    ) -> None:
        self.ckpt_dir = ckpt_dir
        self.rank = rank
        self.world_size = world_size
        # Its method is static, so the class serves as well as an object.
        self.checkpointer = checkpointer if checkpointer is not None else Checkpointer
        self.model = model
        self.epochs = range(epochs) if isinstance(epochs, int) else list(epochs)
        self.loss_function = loss_function
        self.metrics = metrics
        self.use_cuda = use_cuda
        self.dtype = dtype
        self.max_batch_per_epoch = max_batch_per_epoch

    def evaluate_by_epochs(self, dataloader: Iterable[Any]) -> list[dict[str, float]]:
        """Evaluate the model of every epoch.

        Args:
            dataloader: This worker's pairs (data, target).

        Returns:
            One dict per epoch, in order: ``"epoch"``, ``"loss"`` and each metric by its name, over
            all workers.

        Raises:
            CheckpointError: A checkpoint is missing, damaged or does not fit the model.
        """
        return [self._evaluate(epoch, dataloader) for epoch in self.epochs]

    def _evaluate(self, epoch: int, dataloader: Iterable[Any]) -> dict[str, float]:
        self.model = self.checkpointer.load_model_by_epoch(
            self.ckpt_dir, self.rank, epoch, self.model
        )
        # Workers may have different weights: in decentralized training, or between two averages.
        AllReduceAggregation(self.world_size).agg_model()(self.model, "avg_world")
        values, loss = validation_round(
            dataloader,
            self.model,
            self.loss_function,
            self.metrics,
            self.dtype,
            use_cuda=self.use_cuda,
            max_batches=self.max_batch_per_epoch,
        )
        entry: dict[str, float] = {"epoch": epoch, "loss": loss}
        for metric, value in values.items():
            entry[metric.name] = value
        return entry
