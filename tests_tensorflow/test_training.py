"""Schedules, metrics, losses, data and rounds."""

from __future__ import annotations

import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from mlbench_core.controlflow.tensorflow import TrainValidation, train_round, validation_round
from mlbench_core.dataset.imagerecognition import published
from mlbench_core.dataset.imagerecognition.tensorflow import DatasetCifar
from mlbench_core.distributed.environment import Place
from mlbench_core.distributed.tensorflow.mirrored import MirroredWorkers
from mlbench_core.evaluation.tensorflow.criterion import (
    softmax_cross_entropy_with_logits_v2_l2_regularized,
)
from mlbench_core.evaluation.tensorflow.metrics import TopKAccuracy, topk_accuracy_with_logits
from mlbench_core.lr_scheduler.pytorch.lr import ReduceLROnPlateauWithWarmup
from mlbench_core.lr_scheduler.tensorflow.lr import PlateauWithWarmup, manual_stepping
from mlbench_core.tracking import Tracker
from mlbench_core.utils.tensorflow import default_session_config
from tests.helpers.data import test_data

RECORDS = 30


# --- schedules


@pytest.mark.parametrize("warmup_epochs", [0.0, 1.0, 1.585, 3.0])
def test_the_plateau_schedule_is_that_of_torch(warmup_epochs: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = ReduceLROnPlateauWithWarmup(
        optimizer, 0.02, 0.06, warmup_epochs, batches_per_epoch=4, mode="min", factor=0.5,
        patience=1, threshold=0.01,
        threshold_mode="abs", min_lr=0.02,
    )  # fmt: skip
    ours = PlateauWithWarmup(
        0.02, 0.06, warmup_epochs, 4, factor=0.5, patience=1, threshold=0.01, min_lr=0.02
    )
    losses = [2.0, 1.0, 0.995, 1.1, 1.2, math.nan, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.1]
    seen = []
    for loss in losses:
        for _ in range(4):
            assert ours.rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
            seen.append(ours.rate)
            ours.batch_step()
            theirs.batch_step()
        ours.step(loss)
        theirs.step(loss)
    assert len(set(seen)) >= 3


@pytest.mark.parametrize(("warmup", "expected"), [
    (False, [0.1, 0.1, 0.4, 0.4, 0.2, 0.2]),
    (True, [0.1, 0.25, 0.4, 0.4, 0.2, 0.2]),
])  # fmt: skip
def test_manual_stepping_eagerly_and_in_a_graph(warmup: bool, expected: list[float]) -> None:
    arguments: tuple[Any, ...] = ([2, 4], [0.1, 0.4, 0.2], warmup)
    assert [float(manual_stepping(step, *arguments)) for step in range(6)] == pytest.approx(
        expected
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.placeholder(tf.int64, ())
        rate = manual_stepping(step, *arguments)
        assert [session.run(rate, {step: value}) for value in range(6)] == pytest.approx(expected)


def test_manual_stepping_without_boundaries_is_constant() -> None:
    assert float(manual_stepping(5, [], [0.3], warmup=True)) == pytest.approx(0.3)


@pytest.mark.parametrize(("boundaries", "rates", "message"), [
    ([2, 2], [1, 1, 1], "boundaries must be positive and increasing"),
    ([0], [1, 1], "boundaries must be positive and increasing"),
    ([3], [1], "rates must have 2 numbers"),
])  # fmt: skip
def test_manual_stepping_refuses_wrong_steps(
    boundaries: list[int], rates: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        manual_stepping(0, boundaries, rates)


# --- metrics and losses


def test_topk_accuracy_of_classes_and_of_one_hot_labels() -> None:
    logits = tf.constant([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    labels = tf.constant([0, 1, 0, 1])
    for target in (labels, tf.one_hot(labels, 3)):
        assert [float(topk_accuracy_with_logits(logits, target, k)) for k in (1, 2, 3)] == [
            50.0,
            75.0,
            100.0,
        ]
    metric = TopKAccuracy(logits, labels, topk=2)
    assert (metric.name, float(metric.metric_op), int(metric.size)) == ("Prec@2", 75.0, 4)
    with pytest.raises(ValueError, match="k must be"):
        topk_accuracy_with_logits(logits, labels, 0)


def test_the_penalty_is_on_the_variables_that_the_filter_selects() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.Variable([3.0, 4.0], name="weights")
        tf.Variable([100.0], name="batch_normalization/gamma")
        tf.Variable([100.0], name="counter", trainable=False)
        logits, labels = tf.constant([[0.0, 0.0]]), tf.constant([[1.0, 0.0]])
        loss = softmax_cross_entropy_with_logits_v2_l2_regularized(
            logits, labels, 0.1, lambda name: "batch_normalization" not in name
        )
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(loss) == pytest.approx(math.log(2) + 0.1 * 12.5)
    plain = softmax_cross_entropy_with_logits_v2_l2_regularized(
        [[0.0, 0.0]], [[1.0, 0.0]], 0, lambda name: True
    )
    assert float(plain) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="l2 must be 0 in a graph without variables, not 1"):
        softmax_cross_entropy_with_logits_v2_l2_regularized(
            [[0.0, 0.0]], [[1.0, 0.0]], 1, lambda name: True
        )


def test_the_configuration_of_a_session() -> None:
    config = default_session_config(True, False, True)
    assert (config.gpu_options.allow_growth, config.log_device_placement,
    config.allow_soft_placement) == (
        True, False, True,
    )  # fmt: skip


# --- data


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first images of CIFAR-10 in small files."""
    content = lzma.decompress(test_data("cifar10", "data_batch_1.bin.xz").read_bytes())
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        start = number * RECORDS * 3073
        (tmp_path / f"{name}.bin").write_bytes(content[start : start + RECORDS * 3073])
    monkeypatch.setattr(published, "_CIFAR10_RECORDS", RECORDS)
    monkeypatch.setattr(published, "CIFAR10_MD5", {})
    return tmp_path


def test_input_fn_gives_each_epoch_another_order(root: Path) -> None:
    data = DatasetCifar("cifar-10", root, 64, 1, 0, 7)
    assert (data.num_batches_per_epoch_for_train, data.num_batches_per_epoch_for_eval) == (3, 1)
    batches = list(data.input_fn(True, repeat_count=2))
    assert [x.shape[0] for x, _ in batches] == [64, 64, 22] * 2
    assert all(y.shape[1] == 10 and (tf.reduce_sum(y, 1) == 1).numpy().all() for _, y in batches)
    first, second = (
        tf.concat([y for _, y in part], 0).numpy() for part in (batches[:3], batches[3:])
    )
    assert np.array_equal(first.sum(0), second.sum(0))
    assert not np.array_equal(first, second)
    again = next(iter(DatasetCifar("cifar-10", root, 64, 1, 0, 7).input_fn(True)))
    assert np.array_equal(again[0], batches[0][0])
    with pytest.raises(
        ValueError, match="dataset must be one of cifar-10, cifar10, not 'cifar-100'"
    ):
        DatasetCifar("cifar-100", root, 64, 1, 0, 7)


def test_shards_are_disjoint_and_cover_the_training_images(root: Path) -> None:
    data = DatasetCifar("cifar-10", root, 1000, 2, 0, 7, tf.float16)
    labels = [next(iter(data.input_fn(True, 1, 2, shard)))[1].numpy().sum(0) for shard in range(2)]
    ((images, whole),) = data.input_fn(True, 1)
    assert np.array_equal(labels[0] + labels[1], whole.numpy().sum(0))
    assert images.dtype == tf.float16


def test_a_graph_switches_between_training_and_validation(root: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        data = DatasetCifar("cifar-10", root, 100, 1, 0, 7)
        fetches = (data.inputs, data.labels, data.training)
        orders = []
        for _ in range(2):
            session.run(data.train_init_op)
            images, labels, training = session.run(fetches)
            assert (images.shape, labels.shape, bool(training)) == (
                (100, 32, 32, 3),
                (100, 10),
                True,
            )
            orders.append(labels.argmax(1).tolist())
            session.run(data.validation_init_op)
            images, _, training = session.run(fetches)
            assert (len(images), bool(training)) == (RECORDS, False)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetches)
        assert orders[0] != orders[1]


def test_the_operations_of_a_graph_need_a_graph(root: Path) -> None:
    data = DatasetCifar("cifar-10", root, 100, 1, 0, 7)
    with pytest.raises(RuntimeError, match=r"must be read in a graph.*or iterate over input_fn"):
        _ = data.inputs


# --- rounds


def linear_graph(batches: int) -> dict[str, Any]:
    """A linear model of two classes on batches of 4 and a last one of 2, and its operations."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4 * batches - 2, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    iterator = tf.compat.v1.data.make_initializable_iterator(data)
    inputs, labels = iterator.get_next()
    weights = tf.Variable(tf.zeros((5, 2)))
    logits = inputs @ weights
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    step = tf.compat.v1.train.get_or_create_global_step()
    rate = tf.identity(manual_stepping(step, [batches], [1.0, 0.5]), name="rate")
    train_op = tf.compat.v1.train.GradientDescentOptimizer(rate).minimize(loss, global_step=step)
    return {
        "init": iterator.initializer, "loss": loss, "train": train_op,
        "metrics": [TopKAccuracy(logits, labels)],
        "rate": rate, "x": x, "y": y, "weights": weights,
    }  # fmt: skip


def test_rounds_train_measure_and_weigh_batches_by_their_sizes() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = linear_graph(5)
        session.run(tf.compat.v1.global_variables_initializer())
        with Tracker(graph["metrics"], "1", 0) as tracker:
            losses = []
            for _ in range(3):
                losses.append(
                    train_round(
                        session, graph["init"], graph["train"], graph["loss"], graph["metrics"], 4,
                        10, tracker,
                        graph["rate"], "batch",
                    )
                )  # fmt: skip
                values, loss = validation_round(
                    session, graph["init"], graph["loss"], graph["metrics"], 4, 10, tracker
                )
                tracker.epoch_end()
            assert losses[0] > losses[1] > losses[2]
            logits = graph["x"] @ session.run(graph["weights"])
            assert list(values.values()) == pytest.approx(
                [100 * (logits.argmax(1) == graph["y"]).mean()]
            )
            log_sum = np.log(np.exp(logits).sum(1))
            assert loss == pytest.approx(
                (log_sum - logits[np.arange(18), graph["y"]]).mean(), rel=1e-5
            )
            summary = tracker.summary()
            assert (summary.samples, summary.batches) == (3 * 18, 3 * 5)
            assert summary.validation_s > 0
            assert 0 < summary.steps_s["opt_step"] <= summary.train_s
            assert tracker.records["train_lr"][0] == pytest.approx(1.0)
            assert tracker.records["train_lr"][2] == pytest.approx(0.5)
            assert tracker.records["val_global_Prec@1"][2] == pytest.approx(
                tracker.best_metric_value
            )


def test_a_round_has_at_most_the_given_number_of_batches() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = linear_graph(5)
        session.run(tf.compat.v1.global_variables_initializer())
        tracker = Tracker(graph["metrics"], "1", 0)
        arguments = (
            session,
            graph["init"],
            graph["train"],
            graph["loss"],
            graph["metrics"],
            4,
            2,
            tracker,
        )
        train_round(*arguments)
        assert tracker.summary().batches == 2
        with pytest.raises(
            ValueError, match="lr_scheduler_level must be 'epoch', 'batch' or None, not 'step'"
        ):
            train_round(*arguments, graph["rate"], "step")


@pytest.mark.parametrize(("goal", "batches"), [(101.0, 12), (60.0, 5)])
def test_train_validation_ends_with_its_batches_or_its_goal(goal: float, batches: int) -> None:
    def reach(name: str, value: float, tracker: Any) -> str | None:
        return "reached" if name == "val_global_Prec@1" and value >= goal else None

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = linear_graph(5)
        session.run(tf.compat.v1.global_variables_initializer())
        tracker = Tracker(graph["metrics"], "1", 0, reach)
        loop = TrainValidation(
            graph["train"], session, graph["loss"], graph["metrics"], 12, graph["init"],
            graph["init"], "1", 0,
            tracker=tracker,
        )  # fmt: skip
        loop.train_and_eval(lr_tensor_name="rate:0")
        assert tracker.summary().batches == batches
        assert tracker.current_epoch == math.ceil(batches / 5)
        assert tracker.goal_reached == (goal < 100)


# --- one worker


def test_messages_of_a_worker_alone() -> None:
    workers = MirroredWorkers(Place(rank=0, world_size=1), 10)
    assert (workers.size, workers.sum([3, 4]), workers.broadcast(b"abc", 0)) == (1, [3, 4], b"abc")
