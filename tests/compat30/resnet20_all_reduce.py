"""Task 1a in the style of mlbench-core 3.0."""

import math
import os

import torch.distributed as dist
from torch.nn.modules.loss import CrossEntropyLoss
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.checkpoints_evaluation import CheckpointsEvaluationControlFlow
from mlbench_core.controlflow.pytorch.helpers import convert_dtype, iterate_dataloader, maybe_range
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import (
    task1_time_to_accuracy_goal,
    task1_time_to_accuracy_light_goal,
)
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch import ReduceLROnPlateauWithWarmup
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.task_args import task_main

MAX_BATCHES = 6
EPOCHS = 3


def train_loop(
    run_id,
    dataset_dir,
    ckpt_run_dir,
    output_dir,
    validation_only=False,
    use_cuda=False,
    light_target=False,
):
    batch_size = 16
    dtype = "fp32"
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    lr = 0.02
    model = get_resnet_model("resnet20", 1, dtype, num_classes=10, use_cuda=use_cuda)
    optimizer = CentralizedSGD(
        world_size=world_size,
        model=model,
        lr=lr,
        momentum=0.9,
        dampening=0,
        weight_decay=1e-4,
        nesterov=True,
        use_cuda=use_cuda,
        by_layer=False,
    )
    scheduler = ReduceLROnPlateauWithWarmup(
        optimizer.optimizer,
        warmup_init_lr=lr,
        scaled_lr=lr * world_size,
        warmup_epochs=int(math.log(world_size, 2)),
        batches_per_epoch=MAX_BATCHES,
        factor=0.5,
        threshold_mode="abs",
        threshold=0.01,
        patience=1,
        verbose=True,
        min_lr=lr,
    )
    loss_function = CrossEntropyLoss()
    metrics = [TopKAccuracy(topk=1), TopKAccuracy(topk=5)]

    train_set = CIFAR10V1(dataset_dir, train=True, download=True)
    val_set = CIFAR10V1(dataset_dir, train=False, download=True)
    train_set = partition_dataset_by_rank(train_set, rank, world_size)
    val_set = partition_dataset_by_rank(val_set, rank, world_size)
    train_loader = DataLoader(
        train_set, batch_size=batch_size, shuffle=True, pin_memory=use_cuda, drop_last=False
    )
    val_loader = DataLoader(
        val_set, batch_size=batch_size, shuffle=False, pin_memory=use_cuda, drop_last=False
    )

    checkpointer = Checkpointer(ckpt_run_dir=ckpt_run_dir, rank=rank, freq=CheckpointFreq.ALL)
    if validation_only:
        evaluation = CheckpointsEvaluationControlFlow(
            ckpt_dir=ckpt_run_dir,
            rank=rank,
            world_size=world_size,
            checkpointer=checkpointer,
            model=model,
            epochs=EPOCHS,
            loss_function=loss_function,
            metrics=metrics,
            use_cuda=use_cuda,
            dtype="fp32",
            max_batch_per_epoch=None,
        )
        evaluation.evaluate_by_epochs(val_loader)
        return

    goal = task1_time_to_accuracy_light_goal() if light_target else task1_time_to_accuracy_goal()
    tracker = Tracker(metrics, run_id, rank, goal=goal)
    dist.barrier()
    tracker.start()
    for _ in range(EPOCHS):
        model.train()
        tracker.train()
        batches = iterate_dataloader(train_loader, dtype, MAX_BATCHES, use_cuda)
        for batch_idx, (data, target) in zip(maybe_range(MAX_BATCHES), batches, strict=False):
            tracker.batch_start()
            data = convert_dtype(dtype, data)
            tracker.record_batch_load()
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
            scheduler.batch_step()
        tracker.epoch_end()

        values, val_loss = validation_round(
            val_loader,
            model,
            loss_function,
            metrics,
            dtype,
            tracker=tracker,
            transform_target_type=False,
            use_cuda=use_cuda,
            max_batches=MAX_BATCHES,
        )
        is_best = record_validation_stats(values, val_loss, tracker, rank)
        scheduler.step(val_loss)
        checkpointer.save(tracker, model, optimizer, scheduler, tracker.current_epoch, is_best)
        if rank == 0:
            print(
                "result",
                tracker.current_epoch,
                values[metrics[0]],
                val_loss,
                is_best,
                tracker.best_metric_value,
            )
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
        logging_level="INFO",
        logging_file=os.path.join(output_dir, "mlbench.log"),
        use_cuda=gpu,
        seed=42,
        cudnn_deterministic=False,
        ckpt_run_dir=ckpt_run_dir,
        delete_existing_ckpts=not validation_only,
    ):
        train_loop(
            run_id,
            dataset_dir,
            ckpt_run_dir,
            output_dir,
            validation_only,
            use_cuda=gpu,
            light_target=light_target,
        )


if __name__ == "__main__":
    task_main(main)
