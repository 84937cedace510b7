"""Train ResNet-20 in a graph with a session, in the style of version 3.0."""

import argparse

import tensorflow as tf

from mlbench_core.controlflow.tensorflow import TrainValidation
from mlbench_core.dataset.imagerecognition import published
from mlbench_core.dataset.imagerecognition.tensorflow import DatasetCifar
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.tensorflow.criterion import (
    softmax_cross_entropy_with_logits_v2_l2_regularized,
)
from mlbench_core.evaluation.tensorflow.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.tensorflow.lr import manual_stepping
from mlbench_core.models.tensorflow.resnet_model import Cifar10Model
from mlbench_core.utils import Tracker
from mlbench_core.utils.tensorflow import default_session_config


def main(run_id, dataset_root, rank, world_size, batch_size, steps):
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.set_random_seed(42)
    dataset = DatasetCifar("cifar-10", dataset_root, batch_size, world_size, rank, seed=42)
    model = Cifar10Model(resnet_size=20, resnet_version=1)
    logits = model(dataset.inputs, dataset.training)
    loss = softmax_cross_entropy_with_logits_v2_l2_regularized(
        logits,
        dataset.labels,
        l2=2e-4,
        loss_filter_fn=lambda name: "batch_normalization" not in name,
    )
    metrics = [
        TopKAccuracy(logits, dataset.labels, topk=1),
        TopKAccuracy(logits, dataset.labels, topk=5),
    ]
    global_step = tf.compat.v1.train.get_or_create_global_step()
    per_epoch = dataset.num_batches_per_epoch_for_train
    rate = manual_stepping(global_step, [per_epoch, 3 * per_epoch], [0.01, 0.05, 0.01], warmup=True)
    optimizer = tf.compat.v1.train.MomentumOptimizer(rate, 0.9)
    train_op = optimizer.minimize(loss, global_step=global_step)
    with tf.compat.v1.Session(config=default_session_config(True, False, True)) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        tracker = Tracker(metrics, run_id, rank, task1_time_to_accuracy_goal())
        loop = TrainValidation(
            train_op, session, loss, metrics, steps, dataset.train_init_op,
            dataset.validation_init_op, run_id, rank,
            lr_scheduler_level="epoch", tracker=tracker,
        )  # fmt: skip
        loop.train_and_eval(initial_epoch=0, lr_tensor_name=rate.name)
        for epoch, loss in tracker.records["train_loss"].items():
            print("result", epoch, loss, tracker.records["val_global_Prec@1"][epoch])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset-root")
    parser.add_argument("--records", type=int)
    args = parser.parse_args()
    # The files of the test are shorter than those of CIFAR-10, and have other checksums.
    published._CIFAR10_RECORDS, published.CIFAR10_MD5 = args.records, {}
    main("1", args.dataset_root, 0, 1, batch_size=32, steps=22)
