"""Task 1a through DistributedDataParallel in the style of mlbench-core 3.0, with another order of
parameters."""

import os

import torch
import torch.distributed as dist
import torch.optim as optim
from torch.nn.modules.loss import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import (
    compute_train_batch_metrics,
    prepare_batch,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import MultiStepLRLinearWarmUp
from mlbench_core.models.pytorch.resnet import ResNetCIFAR
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.task_args import task_main


def train_loop(run_id, dataset_dir, ckpt_run_dir, use_cuda):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = ResNetCIFAR(20, False, 10, 1)
    if use_cuda:
        model = DDP(model.cuda(), device_ids=[torch.cuda.current_device()])
    else:
        model = DDP(model)
    optimizer = optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    train_set = partition_dataset_by_rank(
        CIFAR10V1(dataset_dir, train=True, download=True), rank, world_size
    )
    val_set = partition_dataset_by_rank(
        CIFAR10V1(dataset_dir, train=False, download=True), rank, world_size
    )
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=16)
    scheduler = MultiStepLRLinearWarmUp(
        optimizer,
        gamma=0.1,
        milestones=[20, 30],
        scaled_lr=0.02 * world_size,
        warmup_init_lr=0.02,
        warmup_duration=5,
    )
    loss_function = CrossEntropyLoss()
    metrics = [TopKAccuracy(1)]
    tracker = Tracker(metrics, run_id, rank, goal=task1_time_to_accuracy_goal)
    checkpointer = Checkpointer(ckpt_run_dir, rank, CheckpointFreq.BEST)
    tracker.start()
    for _ in range(2):
        model.train()
        tracker.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            if batch_idx == 4:
                break
            tracker.batch_start()
            data, target = prepare_batch(
                data, target, "fp32", transform_target_dtype=False, use_cuda=use_cuda
            )
            tracker.record_batch_load()
            optimizer.zero_grad()
            output = model(data)
            tracker.record_batch_fwd_pass()
            loss = loss_function(output, target)
            tracker.record_batch_comp_loss()
            loss.backward()
            tracker.record_batch_backprop()
            optimizer.step()
            tracker.record_batch_opt_step()
            results = compute_train_batch_metrics(output, target, metrics)
            tracker.record_batch_comp_metrics()
            tracker.batch_end()
            record_train_batch_stats(
                batch_idx, loss.item(), output, results, tracker, len(train_loader)
            )
            scheduler.step()
        tracker.epoch_end()
        values, val_loss = validation_round(
            val_loader, model, loss_function, metrics, "fp32", tracker, max_batches=4
        )
        is_best = record_validation_stats(values, val_loss, tracker, rank)
        checkpointer.save(tracker, model, optimizer, scheduler, is_best)
    if rank == 0:
        print("result", tracker.current_epoch, val_loss, tracker.get_total_communication_time())


def main(
    run_id,
    dataset_dir,
    ckpt_run_dir,
    output_dir,
    validation_only=False,
    gpu=False,
    light_target=False,
    rank=-1,
    backend="mpi",
    hosts=None,
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
        train_loop(run_id, dataset_dir, ckpt_run_dir, gpu)


if __name__ == "__main__":
    task_main(main, uid="ddp")
