"""Task 4a in the style of mlbench-core 3.0: GNMT in half precision."""

import os

import torch
import torch.distributed as dist
from torch.optim import Adam
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import record_train_batch_stats, record_validation_stats
from mlbench_core.dataset.nlp.pytorch import WMT16Dataset
from mlbench_core.dataset.nlp.pytorch.wmt16 import build_collate_fn, wmt16_config
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.lr_scheduler.pytorch.lr import ExponentialWarmupMultiStepLR
from mlbench_core.models.pytorch.gnmt import GNMT, Translator
from mlbench_core.optim.pytorch.fp_optimizers import FP16Optimizer
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.task_args import task_main

EPOCHS = 2


def train_loop(run_id, dataset_dir, ckpt_run_dir, use_cuda=False, light_target=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    math_precision = "fp16"
    batch_size, update_freq = 3, 2
    lang = ("en", "de")
    train_set = WMT16Dataset(
        dataset_dir, lang=lang, math_precision=math_precision, download=True, train=True, lazy=True,
        preprocessed=True,
        sort=False, min_len=0, max_len=75,
    )  # fmt: skip
    train_set.prepare()
    val_set = WMT16Dataset(
        dataset_dir, lang=lang, math_precision=math_precision, download=False, validation=True,
        lazy=False,
        preprocessed=True, min_len=0, max_len=150, sort=True,
    )  # fmt: skip
    tokenizer = train_set.tokenizer
    model = GNMT(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_layers=2,
        dropout=0.1,
        share_embedding=True,
        fusion=True,
    )
    model = model.half()
    fp_optimizer = FP16Optimizer(
        model, world_size=world_size, use_cuda=use_cuda, use_horovod=False, by_layer=False,
        grad_clip=5.0,
        init_scale=1024, scale_factor=2, scale_window=128, max_scale=8192, average_custom=True,
        divide_before=False,
    )  # fmt: skip
    fp_optimizer.set_optimizer(
        Adam(params=[fp_optimizer.fp32_params], lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    )

    collate_fn = build_collate_fn(sort=True)
    train_part = partition_dataset_by_rank(train_set, rank, world_size)
    val_part = partition_dataset_by_rank(val_set, rank, world_size)
    train_loader = DataLoader(
        train_part, batch_size=batch_size, collate_fn=collate_fn, shuffle=True
    )
    val_loader = DataLoader(val_part, batch_size=batch_size, collate_fn=collate_fn)
    scheduler = ExponentialWarmupMultiStepLR(
        fp_optimizer.optimizer,
        iterations=EPOCHS * len(train_loader) // update_freq,
        warmup_steps=2,
        remain_steps=0.4,
        decay_interval=0.05,
        decay_steps=4,
        decay_factor=0.5,
    )
    criterion = LabelSmoothing(padding_idx=wmt16_config.PAD, smoothing=0.1)
    metrics = [BLEUScore()]
    translator = Translator(
        model=model, trg_tokenizer=tokenizer, trg_lang="de", beam_size=2, len_norm_factor=0.6,
        len_norm_const=5.0,
        cov_penalty_factor=0.1, max_seq_len=8,
    )  # fmt: skip
    checkpointer = Checkpointer(ckpt_run_dir=ckpt_run_dir, rank=rank, freq=CheckpointFreq.BEST)
    goal = task4_time_to_bleu_goal(20 if light_target else 24)
    tracker = Tracker(metrics, run_id, rank, goal=goal)
    tracker.start()
    updates = 0
    for _ in range(EPOCHS):
        model.train()
        tracker.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            tracker.batch_start()
            if batch_idx % update_freq == 0:
                fp_optimizer.zero_grad()
                tracker.record_batch_init()
            output = model(data[0], data[1], target[0][:-1])
            tracker.record_batch_fwd_pass()
            loss = criterion(
                output.view(-1, tokenizer.vocab_size), target[0][1:].contiguous().view(-1)
            )
            loss = loss / (target[0].shape[1] * update_freq)
            tracker.record_batch_comp_loss()
            fp_optimizer.backward_loss(loss)
            tracker.record_batch_backprop()
            if (batch_idx + 1) % update_freq == 0 and fp_optimizer.step(
                tracker=tracker, multiplier=1, denom=world_size
            ):
                scheduler.step()
                updates += 1
            tracker.batch_end()
            record_train_batch_stats(
                batch_idx, loss.item() * update_freq, output, {}, tracker, len(train_loader)
            )
        tracker.validation()
        tracker.validation_start()
        model.eval()
        metrics[0].reset()
        total, sentences = 0.0, 0
        with torch.no_grad():
            for data, target in val_loader:
                output = model(data[0], data[1], target[0][:-1])
                total += criterion(
                    output.view(-1, tokenizer.vocab_size), target[0][1:].contiguous().view(-1)
                ).item()
                sentences += target[0].shape[1]
                translations, references = translator.translate(data, target)
                metrics[0].update(metrics[0](translations, references), len(references))
        tracker.validation_end()
        values = {metrics[0]: metrics[0].average().item()}
        is_best = record_validation_stats(values, total / sentences, tracker, rank)
        tracker.epoch_end()
        checkpointer.save(tracker, model, fp_optimizer, scheduler, tracker.current_epoch, is_best)
        if rank == 0:
            print(
                "result",
                updates,
                values[metrics[0]],
                total / sentences,
                fp_optimizer.loss_scaler.loss_scale,
            )


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
        delete_existing_ckpts=not validation_only,
    ):
        train_loop(run_id, dataset_dir, ckpt_run_dir, gpu, light_target)


if __name__ == "__main__":
    task_main(main)
