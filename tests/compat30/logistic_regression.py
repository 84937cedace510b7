"""Task 2a in the style of mlbench-core 3.0."""

import os

import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.helpers import iterate_dataloader
from mlbench_core.dataset.linearmodels.pytorch import LMDBDataset
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import (
    task2_time_to_accuracy_goal,
    task2_time_to_accuracy_light_goal,
)
from mlbench_core.evaluation.pytorch.criterion import BCELossRegularized
from mlbench_core.evaluation.pytorch.metrics import DiceCoefficient, F1Score, TopKAccuracy
from mlbench_core.models.pytorch.linear_models import LogisticRegression
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.task_args import task_main

FEATURES = 20


def train_loop(run_id, dataset_dir, ckpt_run_dir, use_cuda=False, light_target=False):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = LogisticRegression(FEATURES)
    loss_function = BCELossRegularized(l1=0.0, l2=0.0000025, model=model)
    metrics = [TopKAccuracy(), F1Score(), DiceCoefficient()]
    optimizer = CentralizedSGD(
        world_size=world_size,
        model=model,
        lr=0.5,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        use_cuda=use_cuda,
        by_layer=False,
    )
    scheduler = ReduceLROnPlateau(
        optimizer.optimizer, factor=0.5, patience=2, threshold_mode="abs", threshold=0.01
    )
    train_set = LMDBDataset(name="epsilon", data_type="train", root=dataset_dir)
    val_set = LMDBDataset(name="epsilon", data_type="test", root=dataset_dir)
    train_set = partition_dataset_by_rank(train_set, rank, world_size)
    val_set = partition_dataset_by_rank(val_set, rank, world_size)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=32)
    checkpointer = Checkpointer(ckpt_run_dir=ckpt_run_dir, rank=rank, freq=CheckpointFreq.NONE)
    goal = task2_time_to_accuracy_light_goal if light_target else task2_time_to_accuracy_goal
    tracker = Tracker(metrics, run_id, rank, goal=goal())
    dist.barrier()
    tracker.start()
    for _ in range(10):
        model.train()
        tracker.train()
        for batch_idx, (data, target) in enumerate(
            iterate_dataloader(train_loader, "fp32", None, use_cuda, transform_target_type=True)
        ):
            tracker.batch_start()
            optimizer.zero_grad()
            tracker.record_batch_init()
            output = model(data)
            tracker.record_batch_fwd_pass()
            loss = loss_function(output, target)
            tracker.record_batch_comp_loss()
            loss.backward()
            tracker.record_batch_backprop()
            optimizer.step(tracker=tracker)
            results = compute_train_batch_metrics(output, target, metrics)
            tracker.record_batch_comp_metrics()
            tracker.batch_end()
            record_train_batch_stats(
                batch_idx, loss.item(), output, results, tracker, len(train_loader)
            )
        tracker.epoch_end()
        values, val_loss = validation_round(
            val_loader,
            model,
            loss_function,
            metrics,
            "fp32",
            tracker=tracker,
            transform_target_type=True,
            use_cuda=use_cuda,
            max_batches=None,
        )
        is_best = record_validation_stats(values, val_loss, tracker, rank)
        checkpointer.save(tracker, model, optimizer, scheduler, is_best)
        scheduler.step(val_loss)
        if rank == 0:
            print("result", tracker.current_epoch, values[metrics[0]], val_loss, values[metrics[1]])
        if tracker.goal_reached:
            print("goal reached")
            return


def main(
    run_id,
    dataset_dir,
    ckpt_run_dir,
    output_dir,
    rank,
    backend,
    hosts,
    validation_only=False,
    gpu=False,
    light_target=False,
):
    with initialize_backends(
        comm_backend=backend,
        hosts=hosts,
        rank=rank,
        logging_file=os.path.join(output_dir, "mlbench.log"),
        use_cuda=gpu,
        seed=42,
        ckpt_run_dir=ckpt_run_dir,
        delete_existing_ckpts=True,
    ):
        train_loop(run_id, dataset_dir, ckpt_run_dir, gpu, light_target)


if __name__ == "__main__":
    task_main(main)
