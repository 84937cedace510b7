"""Task 4b in the style of mlbench-core 3.0: the Transformer with batches of tokens."""

import os

import torch
import torch.distributed as dist
from torch.optim import Adam
from torch.utils.data import DataLoader

from mlbench_core.controlflow.pytorch import record_train_batch_stats, record_validation_stats
from mlbench_core.dataset.nlp.pytorch import WMT17Dataset, get_batches
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.lr_scheduler.pytorch.lr import SQRTTimeDecayLRWithWarmup
from mlbench_core.models.pytorch.transformer import SequenceGenerator, TransformerModel
from mlbench_core.optim.pytorch.fp_optimizers import FP16Optimizer
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.pytorch.distributed import get_backend_tensor
from mlbench_core.utils.task_args import task_main

EPOCHS = 2


class Arguments:
    """The architecture, as the script's arguments name it."""

    share_all_embeddings = True
    dropout = attention_dropout = relu_dropout = 0.1
    encoder_embed_dim = decoder_embed_dim = 16
    encoder_ffn_embed_dim = decoder_ffn_embed_dim = 32
    encoder_layers = decoder_layers = 1
    encoder_attention_heads = decoder_attention_heads = 2


def train_loop(run_id, dataset_dir, ckpt_run_dir, use_cuda=False, light_target=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    update_freq = 2
    train_set = WMT17Dataset(
        dataset_dir, lang=("en", "de"), download=True, train=True, seq_len_multiple=2
    )
    validation_set = WMT17Dataset(
        dataset_dir, lang=("en", "de"), download=False, test=True, seq_len_multiple=2
    )
    src_dict, trg_dict = train_set.src_dict, train_set.trg_dict
    train_batches = get_batches(train_set, max_tokens=40, bsz_mult=2, shuffle=True, seed=0)
    val_batches = get_batches(validation_set, max_sentences=4, shuffle=False)
    train_batches = train_batches[rank : len(train_batches) // world_size * world_size : world_size]
    val_batches = val_batches[rank::world_size]
    train_loader = DataLoader(train_set, batch_sampler=train_batches, collate_fn=train_set.collater)
    val_loader = DataLoader(
        validation_set, batch_sampler=val_batches, collate_fn=validation_set.collater
    )

    model = TransformerModel(Arguments(), src_dict, trg_dict).half()
    criterion = LabelSmoothing(padding_idx=src_dict.pad(), smoothing=0.1, fast_xentropy=True)
    fp_optimizer = FP16Optimizer(
        model, world_size=world_size, use_cuda=use_cuda, use_horovod=False, by_layer=False,
        init_scale=2**7,
        scale_factor=2, scale_window=2000, average_custom=True, divide_before=False,
    )  # fmt: skip
    optimizer = Adam([fp_optimizer.fp32_params], lr=1.976e-3, betas=(0.9, 0.98), eps=1e-9)
    fp_optimizer.set_optimizer(optimizer)
    scheduler = SQRTTimeDecayLRWithWarmup(
        optimizer, base_lr=1.976e-3, warmup_init_lr=0.0, warmup_steps=4
    )
    metrics = [BLEUScore(use_raw=True)]
    checkpointer = Checkpointer(ckpt_run_dir=ckpt_run_dir, rank=rank, freq=CheckpointFreq.NONE)
    translator = SequenceGenerator(
        model, src_dict=src_dict, trg_dict=trg_dict, beam_size=4, stop_early=True,
        normalize_scores=True,
        len_penalty=0.6, sampling=False, sampling_topk=-1, minlen=1,
    )  # fmt: skip
    tracker = Tracker(
        metrics, run_id, rank, goal=task4_time_to_bleu_goal(20 if light_target else 25)
    )
    tracker.start()
    updates = 0
    for _ in range(EPOCHS):
        model.train()
        tracker.train()
        tokens_in_update = 0
        for batch_idx, sample in enumerate(train_loader):
            tracker.batch_start()
            if batch_idx % update_freq == 0:
                fp_optimizer.zero_grad()
                tokens_in_update = 0
            tracker.record_batch_init()
            output = model(**sample["net_input"])
            tracker.record_batch_fwd_pass()
            output = output[0]
            loss = criterion(output.view(-1, output.size(-1)), sample["target"].view(-1))
            tokens_in_update += sample["ntokens"]
            tracker.record_batch_comp_loss()
            fp_optimizer.backward_loss(loss)
            tracker.record_batch_backprop()
            if (batch_idx + 1) % update_freq == 0:
                tokens = get_backend_tensor(torch.tensor([tokens_in_update], dtype=torch.float64))
                dist.all_reduce(tokens)
                denom = world_size * update_freq
                updated = fp_optimizer.step(
                    tracker=tracker, multiplier=denom / tokens.item(), denom=denom
                )
                if updated:
                    scheduler.step()
                    updates += 1
            tracker.batch_end()
            record_train_batch_stats(
                batch_idx, loss.item() / sample["ntokens"], output, {}, tracker, len(train_loader)
            )
        model.eval()
        tracker.validation()
        tracker.validation_start()
        metrics[0].reset()
        total, words = 0.0, 0
        with torch.no_grad():
            for sample in val_loader:
                output = model(**sample["net_input"])[0]
                total += criterion(
                    output.view(-1, output.size(-1)), sample["target"].view(-1)
                ).item()
                words += sample["ntokens"]
                translated, targets = translator.translate_batch(
                    sample, maxlen_a=1.0, maxlen_b=2, nbest=1, ignore_case=True
                )
                metrics[0].update(metrics[0](translated, targets), len(targets))
        tracker.validation_end()
        values = {metrics[0]: metrics[0].average().item()}
        is_best = record_validation_stats(values, total / words, tracker, rank)
        tracker.epoch_end()
        checkpointer.save(tracker, model, fp_optimizer, scheduler, tracker.current_epoch, is_best)
        if rank == 0:
            print(
                "result",
                updates,
                values[metrics[0]],
                total / words,
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
