"""Task 3a in the style of mlbench-core 3.0."""

import math
import os

import torch
import torch.distributed as dist
from torch.nn import CrossEntropyLoss
from torch.optim import ASGD, SGD

from mlbench_core.controlflow.pytorch import record_train_batch_stats, record_validation_stats
from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset
from mlbench_core.evaluation.goals import task3_time_to_perplexity_goal
from mlbench_core.evaluation.pytorch.metrics import Perplexity
from mlbench_core.lr_scheduler.pytorch.lr import LRLinearWarmUp
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.optim.pytorch.centralized import CustomCentralizedOptimizer
from mlbench_core.utils import AverageMeter, Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.pytorch.distributed import get_backend_tensor, global_average
from mlbench_core.utils.task_args import task_main

EPOCHS = 3
SWITCH_AT = 2


def repackage(hidden):
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    return type(hidden)(repackage(part) for part in hidden)


def validate(val_set, model, criterion, metric, batch_size):
    model.eval()
    metric.reset()
    losses = AverageMeter()
    hidden = model.init_hidden(batch_size)
    with torch.no_grad():
        for i in range(val_set.num_batches()):
            data, targets = val_set.get_batch(i, cuda=False)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            losses.update(loss.item(), data.size(0))
            metric.update(metric(loss, targets), data.size(0))
            hidden = repackage(hidden)
    return {metric: metric.average().item()}, global_average(losses.sum, losses.count).item()


def train_loop(
    run_id,
    dataset_dir,
    ckpt_run_dir,
    output_dir,
    validation_only=False,
    use_cuda=False,
    light_target=False,
):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bptt, batch_size, val_batch_size, lr = 12, 4, 2, 5.0
    train_set = Wikitext2Dataset(dataset_dir, bptt=bptt, train=True, min_seq_len=5)
    val_set = Wikitext2Dataset(dataset_dir, bptt=bptt, valid=True)
    model = LSTMLanguageModel(
        ntoken=len(train_set.dictionary),
        ninp=16,
        nhid=24,
        nlayers=2,
        dropout=0.1,
        dropouth=0.1,
        dropouti=0.1,
        dropoute=0.1,
        wdrop=0.1,
        tie_weights=True,
    )
    train_set.generate_batches(global_bsz=batch_size * world_size, worker_bsz=batch_size, rank=rank)
    val_set.generate_batches(val_batch_size)
    optimizer = SGD(model.parameters(), lr=lr, weight_decay=1.2e-6)
    c_optimizer = CustomCentralizedOptimizer(
        model=model,
        world_size=world_size,
        optimizer=optimizer,
        use_cuda=use_cuda,
        by_layer=False,
        grad_clip=0.25,
        average_world=True,
    )
    scheduler = LRLinearWarmUp(
        c_optimizer.optimizer,
        init_lr=lr,
        scaled_lr=lr * math.sqrt(world_size),
        warmup_duration=3 * world_size,
    )
    metrics = [Perplexity()]
    goal = task3_time_to_perplexity_goal(90 if light_target else 70)
    tracker = Tracker(metrics, run_id, rank, goal=goal, minimize=True)
    checkpointer = Checkpointer(ckpt_run_dir=ckpt_run_dir, rank=rank, freq=CheckpointFreq.NONE)
    criterion = CrossEntropyLoss()
    tracker.start()
    for epoch in range(EPOCHS):
        if epoch == SWITCH_AT:
            c_optimizer.optimizer = ASGD(
                model.parameters(), lr=lr, t0=0, lambd=0.0, weight_decay=1.2e-6
            )
        train_set.generate_sequence_lengths(random=True)
        lengths = get_backend_tensor(train_set.sequence_lengths)
        dist.broadcast(lengths, src=0)
        train_set.sequence_lengths = lengths
        model.train()
        tracker.train()
        hidden = model.init_hidden(batch_size)
        for batch_idx in range(train_set.num_batches()):
            tracker.batch_start()
            data, targets = train_set.get_batch(batch_idx, cuda=use_cuda)
            seq_len = train_set.sequence_lengths[batch_idx]
            tracker.record_batch_load()
            base = c_optimizer.optimizer.param_groups[0]["lr"]
            c_optimizer.optimizer.param_groups[0]["lr"] = base * float(seq_len) / bptt
            hidden = repackage(hidden)
            c_optimizer.zero_grad()
            tracker.record_batch_init()
            output, hidden, raw, dropped = model(data, hidden, return_h=True)
            tracker.record_batch_fwd_pass()
            loss = criterion(output, targets)
            loss = loss + 2 * dropped[-1].pow(2).mean() + (raw[-1][1:] - raw[-1][:-1]).pow(2).mean()
            tracker.record_batch_comp_loss()
            loss.backward()
            tracker.record_batch_backprop()
            updated = c_optimizer.step(tracker=tracker)
            assert updated is True
            c_optimizer.optimizer.param_groups[0]["lr"] = base
            tracker.batch_end()
            record_train_batch_stats(
                batch_idx, loss.item(), output, {}, tracker, train_set.num_batches()
            )
        scheduler.step()
        tracker.epoch_end()
        tracker.validation()
        tracker.validation_start()
        values, val_loss = validate(val_set, model, criterion, metrics[0], val_batch_size)
        tracker.validation_end()
        is_best = record_validation_stats(values, val_loss, tracker, rank)
        checkpointer.save(tracker, model, c_optimizer, scheduler, tracker.current_epoch, is_best)
        if rank == 0:
            print("result", tracker.current_epoch, values[metrics[0]], val_loss, is_best)


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
        cudnn_deterministic=True,
        ckpt_run_dir=ckpt_run_dir,
        delete_existing_ckpts=not validation_only,
    ):
        train_loop(
            run_id, dataset_dir, ckpt_run_dir, output_dir, validation_only, gpu, light_target
        )


if __name__ == "__main__":
    task_main(main)
