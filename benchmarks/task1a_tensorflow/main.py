"""Task 1a on TensorFlow 2: ResNet-20 on CIFAR-10, synchronous SGD, time to 80 % top-1 accuracy.

Data, model, schedule, goal and measurements are those of ``task1a_resnet20_cifar10``, so that
results of both frameworks can be compared in one table. The workers are those of
``tf.distribute.MultiWorkerMirroredStrategy``. README.md describes the differences."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mlbench_core.controlflow.run_results import RunFolder, task_configuration, task_environment
from mlbench_core.controlflow.task_arguments import count, task_main
from mlbench_core.controlflow.validation_stats import record_validation_stats
from mlbench_core.dataset.imagerecognition.arrays import (
    ArrayBatches,
    cifar10_arrays,
    digits_arrays,
    mnist_arrays,
)
from mlbench_core.distributed.environment import detect_environment
from mlbench_core.distributed.tensorflow.mirrored import MirroredWorkers
from mlbench_core.distributed.tensorflow.settings import set_threads
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.tensorflow.metrics import topk_accuracy_with_logits
from mlbench_core.lr_scheduler.tensorflow.lr import PlateauWithWarmup
from mlbench_core.models.tensorflow.resnet_model import Cifar10Model
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker

logger = logging.getLogger("mlbench.task1a")

TASK = get_task("1a")
BATCH_SIZE = 128  # images per worker
BASE_LR = 0.02  # of one worker
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
LOG_EVERY = 25  # batches


class Accuracy(NamedTuple):
    """A metric: its name, and the number of scores that count."""

    name: str
    topk: int


METRICS = (Accuracy("Prec@1", 1), Accuracy("Prec@5", 5))


def load_data(
    args: argparse.Namespace, dataset_dir: str, rank: int, world_size: int
) -> list[ArrayBatches]:
    """Return this worker's training batches and its validation batches."""
    folder = args.data or dataset_dir
    batches = []
    for train in (True, False):
        if args.dataset == "cifar10":
            arrays = cifar10_arrays(folder, train, download=not args.partial, partial=args.partial)
        elif args.dataset == "mnist":
            arrays = mnist_arrays(folder, train, download=True)
        else:
            arrays = digits_arrays(train, args.image_size, extra="tensorflow")
        batches.append(
            ArrayBatches(
                arrays, BATCH_SIZE, train=train, rank=rank, world_size=world_size, seed=args.seed
            )
        )
    return batches


class Training:
    """The model, its optimizer and the functions of a step.

    The strategy would average gradients inside of the update. Here a step is three calls, so that
    each of them is measured: the gradient of this worker, the sum over all workers, and the update.
    """

    def __init__(self, workers: MirroredWorkers) -> None:
        self.workers, self.strategy = workers, workers.strategy
        with self.strategy.scope():
            self.model = Cifar10Model(20, resnet_version=1)
            self.weights = self.model.trainable_variables
            self.velocities = [
                tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in self.weights
            ]
        self.statistics = self.model.non_trainable_variables
        # The last batch of an epoch is smaller, and must not be traced and compiled again.
        images = tf.TensorSpec((None, None, None, 3), tf.float32)
        labels = tf.TensorSpec((None,), tf.int64)
        of_batch = partial(tf.function, input_signature=(images, labels))
        self.gradient = of_batch(self._on_replica(self._gradient))
        self.evaluate = of_batch(self._on_replica(self._evaluate))
        self.read_statistics = tf.function(self._on_replica(lambda: _flatten(self.statistics)))
        self.write_statistics = tf.function(self._on_replica(self._write_statistics))
        self.update = tf.function(self._update)

    def _on_replica(self, function: Any) -> Any:
        return lambda *args: self.strategy.run(function, args=args)

    def _gradient(self, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Return the gradient of this worker's mean loss as one vector, the loss, the logits."""
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return _flatten(tape.gradient(loss, self.weights)), loss, logits

    def _update(self, gradient: Any, rate: Any) -> None:
        """Update with Nesterov momentum and weight decay, by the formula of torch.optim.SGD."""
        parts = _split(gradient, self.weights)
        for weight, velocity, part in zip(self.weights, self.velocities, parts, strict=True):
            self.strategy.extended.update(weight, _step, args=(velocity, part, rate))

    def _evaluate(self, images: Any, labels: Any) -> Any:
        """Return sums over a batch: the loss, each metric, and the number of images."""
        logits = self.model(images, training=False)
        size = tf.cast(tf.shape(labels)[0], tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        sums = [topk_accuracy_with_logits(logits, labels, m.topk) * size for m in METRICS]
        return tf.stack([tf.reduce_sum(losses), *sums, size])

    def _write_statistics(self, values: Any) -> None:
        for variable, part in zip(self.statistics, _split(values, self.statistics), strict=True):
            variable.assign(part)

    def validate(self, batches: ArrayBatches) -> tuple[dict[Accuracy, float], float]:
        """Return the metrics and the loss of the validation images of all workers.

        Workers differ in the running statistics of batch norm. The validated model has their
        average."""
        own = self.read_statistics()
        self.write_statistics(self.workers.all_reduce(own) / self.workers.size)
        sums = np.zeros(len(METRICS) + 2)
        for images, labels in batches.epoch(0):
            sums += self.evaluate(tf.constant(images), tf.constant(labels)).numpy()
        self.write_statistics(own)
        sums_of_all = self.workers.all_reduce(tf.constant(sums, tf.float64)).numpy()
        loss, *values = (sums_of_all[:-1] / sums_of_all[-1]).tolist()
        return dict(zip(METRICS, values, strict=True)), loss


def _step(weight: Any, velocity: Any, gradient: Any, rate: Any) -> None:
    gradient = gradient + WEIGHT_DECAY * weight
    velocity.assign(MOMENTUM * velocity + gradient)
    weight.assign_sub(rate * (gradient + MOMENTUM * velocity))


def _flatten(tensors: Any) -> Any:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _split(vector: Any, like: Any) -> list[Any]:
    """Cut a vector into tensors of the shapes of some variables."""
    parts = tf.split(vector, [math.prod(variable.shape) for variable in like])
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, like, strict=True)]


def train_epoch(
    training: Training, batches: ArrayBatches, schedule: PlateauWithWarmup, tracker: Tracker
) -> None:
    """Train one epoch."""
    workers = training.workers
    tracker.train()
    tracker.learning_rate = schedule.rate
    data = batches.epoch(tracker.current_epoch)
    for index in range(len(batches)):
        tracker.batch_start()
        images, labels = map(tf.constant, next(data))
        tracker.record_batch_load()
        gradient, loss, logits = training.gradient(images, labels)
        tracker.record_batch_backprop()
        start_s = time.perf_counter()
        mean = workers.all_reduce(gradient) / workers.size
        communication_s = time.perf_counter() - start_s
        tracker.record_batch_agg()
        training.update(mean, tf.constant(schedule.rate, tf.float32))
        tracker.record_batch_opt_step()
        schedule.batch_step()
        values = []
        for metric in METRICS:
            values.append(float(topk_accuracy_with_logits(logits, labels, metric.topk)))
        tracker.record_batch_comp_metrics()
        size, size_bytes = len(labels), gradient.dtype.size * len(gradient)
        tracker.batch_end(samples=size)
        if workers.size > 1:
            tracker.record_communication(communication_s, communication_s, size_bytes)
            tracker.record_collective(
                "all_reduce", workers.size, size_bytes, calls=1, overlapped=False
            )
        logs = index % LOG_EVERY == 0 or index == len(batches) - 1
        tracker.record_loss(float(loss), size, log_to_api=logs)
        for metric, value in zip(METRICS, values, strict=True):
            tracker.record_metric(metric, value, size, log_to_api=logs)


def check(args: argparse.Namespace) -> None:
    """Refuse options of other tasks, and those that cannot be combined.

    Raises:
        ConfigurationError: The message names the option.
    """
    refusals = (
        (args.gpu, "--gpu is not an option of this task: its reference on TensorFlow is for CPUs"),
        (args.validation_only,
         "--validation_only needs checkpoints, and this task saves none: leave it out"),
        (args.backend,
         f"--backend must be left out, not {args.backend}: "
         "TensorFlow's workers communicate over gRPC"),
        (args.partial and args.dataset != "cifar10",
         f"--partial does not go with --dataset {args.dataset}"),
        (args.image_size != 32 and args.dataset != "digits",
         f"--image-size is for the digits: it does not go with --dataset {args.dataset}"),
        (args.data and args.dataset == "digits",
         "--data does not go with --dataset digits, which scikit-learn brings"),
    )  # fmt: skip
    for is_refused, message in refusals:
        if is_refused:
            raise ConfigurationError(message)


def run(
    *, args: argparse.Namespace, run_id: str, dataset_dir: str, output_dir: str, rank: int,
    hosts: str | None, light_target: bool, **others: Any,
) -> None:  # fmt: skip
    """Train until the goal is reached or the budget of epochs is spent."""
    check(args)
    worker = detect_environment(hosts, rank).place()
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    set_threads(threads)
    tf.random.set_seed(args.seed)
    workers = MirroredWorkers(worker, args.timeout)
    goal = time_to_accuracy_goal(TASK.goal_on(args.dataset, light_target))
    configuration = task_configuration(args, "task1a", workers.size, "grpc", goal, threads)
    # The data are there before the environment is described, because it has their checksums.
    batches, validation_batches = load_data(args, dataset_dir, worker.rank, workers.size)
    training = Training(workers)
    schedule = PlateauWithWarmup(
        BASE_LR, BASE_LR * workers.size, math.log2(workers.size), len(batches),
        factor=0.5, patience=1, threshold=0.01, min_lr=BASE_LR,
    )  # fmt: skip
    results = RunFolder(
        Path(output_dir), dataclasses.replace(configuration, algorithm="tensorflow_mirrored"),
        run_id, worker.rank,
        environment=task_environment(args, dataset_dir) if worker.rank == 0 else None,
        workers=workers,
    )  # fmt: skip
    with results, Tracker(METRICS, run_id, worker.rank, goal, sinks=[results.sink]) as tracker:
        tracker.start()
        for _ in tracker.epochs(args.epochs, args.past_goal):
            train_epoch(training, batches, schedule, tracker)
            tracker.validation_start()
            values, loss = training.validate(validation_batches)
            tracker.validation_end()
            schedule.step(loss)
            record_validation_stats(values, loss, tracker, worker.rank)
            tracker.epoch_end()
        tracker.publish_summary(workers.size)
    if worker.rank == 0:
        logger.info("%s", "goal reached" if tracker.goal_reached else "goal not reached")
    # A worker that ends while another one still writes its result would count as lost.
    workers.sum([0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task, which mean what those of ``task1a_resnet20_cifar10`` mean."""
    add = parser.add_argument
    add("--dataset", choices=("cifar10", "digits", "mnist"), default="cifar10",
        help="[%(default)s]")  # fmt: skip
    add("--data", metavar="FOLDER",
        help="folder that holds its files (default: below --root-dataset)")  # fmt: skip
    add("--partial", action="store_true",
        help="use the files that exist, even if others are missing")  # fmt: skip
    add("--image-size", type=int, choices=(8, 16, 32), default=32,
        help="of the digits [%(default)s]")  # fmt: skip
    add("--epochs", type=count, default=TASK.max_epochs, metavar="N",
        help="largest number of epochs [%(default)s]")  # fmt: skip
    add("--past-goal", action="store_true",
        help="train all epochs, even after the goal is reached")  # fmt: skip
    add("--seed", type=count, default=42, metavar="N",
        help="seed of weights and data [%(default)s]")  # fmt: skip


if __name__ == "__main__":
    task_main(run, "task1a", add_arguments=add_arguments)
