"""Run a task on one worker: resume, epochs, validation, checkpoints, goal and summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlbench_core.checkpoint_names import saved_epochs
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.controlflow.pytorch.controlflow import record_validation_stats
from mlbench_core.controlflow.pytorch.run_results import RunResults, task_results
from mlbench_core.controlflow.pytorch.train_limit import TrainLimit, any_is_over
from mlbench_core.controlflow.pytorch.translation import EpochPart, epoch_parts
from mlbench_core.controlflow.task_arguments import task_main
from mlbench_core.distributed.pytorch.initialize import initialize_backends
from mlbench_core.distributed.pytorch.process_groups import smallest
from mlbench_core.errors import CheckpointError, ConfigurationError
from mlbench_core.evaluation.goals import AccuracyAfterTime, TimeToGoal
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric
from mlbench_core.files import replacing
from mlbench_core.tracking.goal_report import as_goal, finite
from mlbench_core.tracking.sinks import make_sink
from mlbench_core.tracking.tracker import Goal, Tracker

__all__ = ["Run", "run_task"]

logger = logging.getLogger(__name__)

Validate = Callable[[], tuple[Mapping[MLBenchMetric, float], float]]


class Run:
    """The arguments of a task on one worker, and the work around epochs that all tasks share.

    A task makes its data, model, optimizer and scheduler, calls :meth:`track` with its metrics and
    its goal, and trains one epoch in the body of ``for epoch in run.epochs(...)``. Start it with
    :func:`run_task`.

    Use it as a context manager: the tracker is closed at the end, also after an exception.

    Attributes:
        args: The command line: the arguments of all tasks and those of this one.
        rank: This worker's rank.
        world_size: Number of workers.
        run_id: Id of the run.
        gpu: True to train on the GPU.
        light: True if the light goal ends the run.
        validation_only: True if the run only validates its checkpoints.
        dataset_dir: Folder of the task's data.
        ckpt_run_dir: Folder of the run's checkpoints.
        tracker: The tracker that :meth:`track` made.

    Args:
        args: As above. It has ``run_id``, ``gpu``, ``light_target`` and ``validation_only``, which
            every command line of a task has, and the arguments of
            :func:`~mlbench_core.controlflow.task_arguments.add_run_arguments`.
        rank: As above.
        world_size: As above.
        dataset_dir: As above.
        ckpt_run_dir: As above.
        open_results: Return the result folder of a run with the given goal; None for a run that
            leaves none.
        output_dir: The result folder, to which a run that only validates writes its statistics;
            None for no file.

    Example:
        >>> import tempfile
        >>> from functools import partial
        >>> import torch
        >>> from torch import nn
        >>> from mlbench_core.controlflow.pytorch import train_round, validation_round
        >>> from mlbench_core.controlflow.task_arguments import add_run_arguments
        >>> from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
        >>> from mlbench_core.optim.pytorch import CentralizedSGD
        >>> def train(run):
        ...     batches = [(torch.eye(2), torch.tensor([0, 1]))]
        ...     model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
        ...     metrics = [TopKAccuracy(topk=1)]
        ...     optimizer = CentralizedSGD(world_size=run.world_size, model=model, lr=1.0)
        ...     tracker = run.track(metrics)
        ...
        ...     def validate():
        ...         return validation_round(batches, model, loss, metrics, "fp32", tracker=tracker)
        ...
        ...     for epoch in run.epochs(model, optimizer, None, validate):
        ...         train_round(
        ...             batches, model, optimizer, loss, metrics, None, "fp32", tracker=tracker
        ...         )
        ...     print(tracker.current_epoch, tracker.best_metric_value)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     roots = [f"--root-{name}={folder}" for name in ("dataset", "checkpoint", "output")]
        ...     run_task(train, "my_task", partial(add_run_arguments, epochs=5), argv=roots)
        5 100.0
    """

    tracker: Tracker

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        world_size: int,
        dataset_dir: str,
        ckpt_run_dir: str,
        open_results: Callable[[Any], RunResults] | None = None,
        output_dir: str | None = None,
    ) -> None:
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.run_id: str = args.run_id
        self.gpu: bool = args.gpu
        self.light: bool = args.light_target
        self.validation_only: bool = args.validation_only
        self.dataset_dir = dataset_dir
        self.ckpt_run_dir = ckpt_run_dir
        self._open_results = open_results
        self._output_dir = output_dir
        self._open = contextlib.ExitStack()
        self._is_best: bool | None = None
        self._limit = TrainLimit()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def track(
        self,
        metrics: Iterable[MLBenchMetric],
        goal: Goal | Callable[[], Goal] | None = None,
        **options: Any,
    ) -> Tracker:
        """Make the run's tracker and its result folder.

        Every worker calls it once, before :meth:`epochs`. Rank 0 also writes to the sinks of
        ``--sink``, see :func:`~mlbench_core.tracking.sinks.make_sink`.

        Args:
            metrics: The run's metrics; the first is the primary one, which decides about the best
                checkpoint.
            goal: The goal that ends the run; None for a run that trains all epochs. With
                ``--goal-after``, the goal is the best value of its metric after that time, and all
                workers stop after the same validation.
            options: Other arguments of :class:`~mlbench_core.tracking.tracker.Tracker`, such as
                ``sinks`` and ``minimize``. For a goal on the primary metric, ``minimize`` is by
                default that of the goal.

        Returns:
            The tracker, which is ``run.tracker`` from now on.

        Raises:
            ConfigurationError: ``--goal-after`` is given, and ``goal`` is not a
                :class:`~mlbench_core.evaluation.goals.TimeToGoal`. Or ``minimize`` contradicts a
                goal on the primary metric.
        """
        sinks, metrics, goal = list(options.pop("sinks", ())), list(metrics), as_goal(goal)
        primary = None
        if metrics:
            primary = f"val_global_{metrics[0].name}"
        if isinstance(goal, (TimeToGoal, AccuracyAfterTime)) and goal.metric == primary:
            minimize = options.setdefault("minimize", goal.minimize)
            if minimize != goal.minimize:
                raise ConfigurationError(
                    f"minimize must be {goal.minimize}, as in the goal on {goal.metric}, "
                    f"not {minimize}: leave it out"
                )
        if self.args.goal_after is not None:
            goal = _after_time(goal, self.args.goal_after)
        if self.rank == 0:
            continues = self.args.resume or self.validation_only
            sinks += [make_sink(text, self.run_id, continues) for text in self.args.sink]
        if self._open_results is not None and not self.validation_only:
            # Entered before the tracker, so that it ends after the tracker has written its last
            # numbers.
            results = self._open.enter_context(self._open_results(goal))
            sinks.append(results.sink)
        self.tracker = Tracker(metrics, self.run_id, self.rank, goal, sinks=sinks, **options)
        return self._open.enter_context(self.tracker)

    def epochs(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        validate: Validate,
        *,
        extra: Mapping[str, Any] | None = None,
        budget: int | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the epochs to train; validate and save a checkpoint after each.

        The epochs end when the goal is reached (not with ``--past-goal``) or the budget is spent.
        Every worker must iterate over them. The command line decides about the rest:

        * ``--resume`` continues from the last checkpoint of the run, ``--checkpoint`` saves one
          after every epoch instead of the best only.
        * ``--validation_only`` loads every checkpoint of the run, validates it, and yields no
          epoch. Rank 0 writes ``val_stats.json`` and ``train_stats.json`` to the result folder.
          Both are lists with an entry for each checkpoint: ``epoch`` (the number of finished
          epochs), ``loss`` and each metric by its name. The first has the results of the
          validation. The second has the means of rank 0's training batches in the last epoch, as
          they were recorded in training.

        A scheduler that waits for a plateau steps with the loss of each validation. Other
        schedulers step if the task steps them. At the end rank 0 sends the summary of the run to
        the master.

        Args:
            model: The model.
            optimizer: Its optimizer.
            scheduler: Its learning rate schedule; None for a constant rate.
            validate: Return the metrics' values and the loss of the validation data of all workers.
                The result is recorded here.
            extra: More objects with a state to save and restore, by name.
            budget: Largest number of epochs; None for ``--epochs``.

        Yields:
            The epoch's number, from 0. A resumed run continues after the last epoch of its
            checkpoint.

        Raises:
            CheckpointNotFoundError: The run is to resume or to validate only, and no checkpoint
                exists.
            CheckpointError: A checkpoint cannot be read or written, or does not fit the objects
                given.
            ConfigurationError: Nothing has recorded the statistic of the goal until the end of the
                first validation.
        """
        args, tracker = self.args, self.tracker
        # Within an epoch only the best model is saved, also with --checkpoint: its files are those
        # of whole epochs.
        frequency = within_epochs = CheckpointFreq.BEST
        if args.checkpoint:
            frequency = CheckpointFreq.ALL
        elif args.no_checkpoint:
            frequency = within_epochs = CheckpointFreq.NONE
        checkpointer = Checkpointer(self.ckpt_run_dir, self.rank, frequency)
        load = partial(
            Checkpointer.load,
            self.ckpt_run_dir,
            self.rank,
            model,
            optimizer,
            scheduler,
            tracker=tracker,
            extra=extra,
        )
        if args.resume and not self.validation_only:
            checkpointer, *_ = self._load_together(load)

        def validate_and_record() -> bool:
            values, loss = validate()
            # The loss is that of all workers, so their learning rates stay equal.
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            return record_validation_stats(values, loss, tracker, self.rank)

        def validate_in_training() -> bool:
            is_best = validate_and_record()
            needed = getattr(tracker.goal, "metric", None)
            if isinstance(needed, str) and needed not in tracker.records:
                recorded = ", ".join(sorted(tracker.records))
                raise ConfigurationError(
                    "metric of the goal must be a statistic that this run records, not "
                    f"{needed!r}: use one of {recorded}"
                )
            return is_best

        if self.validation_only:
            self._validate_checkpoints(load, validate_and_record)
            return
        # The wall clock starts after the data, the model and a checkpoint are loaded.
        tracker.start()
        parts = Checkpointer(self.ckpt_run_dir, self.rank, within_epochs)
        self._validate = validate_in_training
        self._save_part = partial(parts.save, tracker, model, optimizer, scheduler, extra=extra)
        for epoch in tracker.epochs(budget or args.epochs, args.past_goal):
            self._is_best = None
            yield epoch
            # parts() has already validated after the last part.
            if self._is_best is None:
                self._is_best = validate_in_training()
            # The epoch ends before it is saved, so that a resumed run begins with the next one.
            tracker.epoch_end()
            checkpointer.save(tracker, model, optimizer, scheduler, self._is_best, extra=extra)
            if self._limit.ends(tracker):
                break
        tracker.publish_summary(self.world_size)

    def parts(
        self, batches: Collection[Any], share: float, update_freq: int = 1, most: int | None = None
    ) -> Iterator[EpochPart]:
        """Cut an epoch of :meth:`epochs` into parts and validate after each of them.

        The best checkpoint is saved after a part, too. A goal that is reached after a part ends the
        epoch, and so does the limit of the training time that a sweep sets. The arguments are those
        of :func:`~mlbench_core.controlflow.pytorch.translation.epoch_parts`.

        Yields:
            The parts. Read each of them before you ask for the next one.
        """
        for part in epoch_parts(batches, share, update_freq, most):
            yield part
            self._is_best = self._validate()
            is_reached = self.tracker.goal_reached and not self.args.past_goal
            # epochs() saves after the last part, so it is not saved here.
            if part.is_last or is_reached or self._limit.is_over(self.tracker):
                return
            self._save_part(self._is_best)
            # Each part has its own means.
            self.tracker.reset_epoch_stats()

    def _load_together(self, load: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Load the checkpoint on all workers; if one of them cannot continue from it, none does."""
        refused: CheckpointError | None = None
        try:
            loaded = load()
        except CheckpointError as error:
            refused = error
        if not smallest(int(refused is None)):
            raise refused or CheckpointError(
                "another worker cannot continue from its checkpoint: see its error"
            )
        return loaded

    def _validate_checkpoints(
        self, load: Callable[..., object], validate: Callable[[], object]
    ) -> None:
        """Load and validate every checkpoint of an epoch, or else the best one.

        Rank 0 writes the statistics.
        """
        tracker = self.tracker
        names = ["loss", *(metric.name for metric in tracker.metrics)]
        stats: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
        # Workers may have different folders, in which a kill left different files. All must load
        # the same epochs.
        own_epochs = saved_epochs(self.ckpt_run_dir, self.rank)
        newest = smallest(max(own_epochs, default=-1))
        # smallest() is a message of all workers, so each of them asks for the same numbers.
        epochs: list[int | None] = []
        for number in range(newest + 1):
            if smallest(int(number in own_epochs)):
                epochs.append(number)
        for epoch in epochs or [None]:
            load(epoch=epoch)
            # A checkpoint from within an epoch has the means of its last validation.
            tracker.reset_epoch_stats()
            validate()
            for part, prefix in (("train", "train_"), ("val", "val_global_")):
                entry: dict[str, Any] = {"epoch": tracker.current_epoch}
                for name in names:
                    by_epoch = tracker.records.get(prefix + name)
                    if by_epoch:
                        entry[name] = finite(next(reversed(by_epoch.values())))
                stats[part].append(entry)
        if self.rank == 0 and self._output_dir is not None:
            for part, entries in stats.items():
                with replacing(Path(self._output_dir, f"{part}_stats.json")) as temporary:
                    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


class _AgreedAfterTime(AccuracyAfterTime):
    """The goal of ``--goal-after``, for several workers whose clocks differ."""

    def is_over(self, train_time_s: float) -> bool:
        """Return True on all workers as soon as the time of one is over."""
        return any_is_over(train_time_s, self.budget_s)


def _after_time(goal: object, seconds: float) -> AccuracyAfterTime:
    """Return the goal of the best value of the same metric after a training time."""
    if not isinstance(goal, TimeToGoal):
        raise ConfigurationError(
            "--goal-after needs a task whose goal is a value of a metric (TimeToGoal), "
            f"not {goal!r}: leave it out"
        )
    return _AgreedAfterTime(
        seconds, goal.metric, goal.minimize, goal.description.replace("{threshold}", "{value}")
    )


def run_task(
    train: Callable[[Run], object],
    uid: str,
    add_arguments: Callable[[argparse.ArgumentParser], Any],
    prepare: Callable[[argparse.Namespace], object] | None = None,
    *,
    argv: Sequence[str] | None = None,
) -> None:
    """Read a task's command line, connect the workers and train.

    The global random generators are seeded with ``--seed``, the same on every worker. The run
    leaves a result folder, ``<root-output>/<uid>/<run_id>``, see
    :mod:`mlbench_core.results.folder`. A run that only validates leaves none. After the training,
    rank 0 logs if the goal was reached. For folders, launchers and errors see
    :func:`~mlbench_core.controlflow.task_arguments.task_main`, for an example see :class:`Run`.

    Args:
        train: Train with a :class:`Run`, once the workers are connected.
        uid: The task's name in paths, such as ``"task1a"``.
        add_arguments: Add the task's arguments to the parser, and those of
            :func:`~mlbench_core.controlflow.task_arguments.add_run_arguments`.
        prepare: Check or complete the arguments, before the workers are connected; may be None.
        argv: Arguments to read instead of those of the process.
    """

    def main(
        *, args: argparse.Namespace, dataset_dir: str, ckpt_run_dir: str, output_dir: str,
        rank: int, backend: str, hosts: str | None, **others: Any,
    ) -> None:  # fmt: skip
        # Before the workers meet: a wrong argument then ends each of them at once.
        if args.goal_after is not None and args.light_target:
            raise ConfigurationError(
                "--goal-after gives the run another goal: it does not go with --light"
            )
        if prepare is not None:
            prepare(args)
        with initialize_backends(
            comm_backend=backend,
            hosts=hosts,
            rank=rank,
            use_cuda=args.gpu,
            seed=args.seed,
            ckpt_run_dir=ckpt_run_dir,
            timeout_s=args.timeout,
        ) as (rank, world_size, _):
            open_results = partial(
                task_results,
                args,
                uid,
                rank,
                world_size,
                backend,
                output_dir=output_dir,
                dataset_dir=dataset_dir,
            )
            with Run(
                args, rank, world_size, dataset_dir, ckpt_run_dir, open_results, output_dir
            ) as run:
                train(run)
            if rank == 0 and not args.validation_only:
                logger.info("goal reached" if run.tracker.goal_reached else "goal not reached")

    task_main(main, uid, argv=argv, add_arguments=add_arguments)
