"""Training loops of tasks 3a, 4a and 4b in the style of version 3.0: what they call, and in which
shapes.

The loops are written as scripts of 3.0 are: they broadcast the sequence lengths, take ``output[0]``
of the Transformer and flatten by hand, and read the constants of ``wmt16_config``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader

from mlbench_core.dataset.nlp.pytorch import (
    Wikitext2Dataset,
    WMT16Dataset,
    WMT17Dataset,
    build_collate_fn,
    get_batches,
)
from mlbench_core.dataset.nlp.pytorch.wmt16 import WMT16Tokenizer, wmt16_config
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.models.pytorch.gnmt import GNMT
from mlbench_core.models.pytorch.gnmt.translator import Translator
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.models.pytorch.transformer import SequenceGenerator, TransformerModel
from mlbench_core.optim.pytorch.centralized import CustomCentralizedOptimizer
from mlbench_core.optim.pytorch.fp_optimizers import FP16Optimizer
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

WORDS = ["dog", "cat", "runs", "sleeps", "red", "blue", "small", "old"]
SIZES = {"embed_dim": 16, "ffn_embed_dim": 32, "layers": 1, "attention_heads": 2}


class Arguments:
    """A script's arguments, of which the model reads what it knows."""

    share_all_embeddings = True
    softmax_type = "fast_fill"
    dropout = 0.0

    def __init__(self) -> None:
        for side in ("encoder", "decoder"):
            for name, size in SIZES.items():
                setattr(self, f"{side}_{name}", size)


def write_texts(folder: Path) -> None:
    """A text for the language model, and pairs in words with vocabularies, as archives of 3.0 had
    them."""
    draw = random.Random(0)
    for part, words in (("train", 500), ("valid", 90)):
        (folder / f"wiki.{part}.tokens").write_text(
            " ".join(WORDS[i % 3] for i in range(words)) + "\n"
        )
    for name, pairs in (
        ("train", 24),
        ("train.tok.clean.bpe.32000", 24),
        ("newstest2013", 5),
        ("validation", 5),
    ):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) + "\n" for _ in range(pairs)]
        for lang in ("en", "de"):
            (folder / f"{name}.{lang}").write_text("".join(lines))
    (folder / "vocab.bpe.32000").write_text("".join(f"{word}\n" for word in WORDS))


def detached(hidden: Any) -> Any:
    return (
        hidden.detach()
        if isinstance(hidden, torch.Tensor)
        else type(hidden)(detached(part) for part in hidden)
    )


def set_sequence_lengths(dataset: Wikitext2Dataset, rank: int) -> None:
    """Rank 0 draws, the others get what it drew."""
    if rank == 0:
        dataset.generate_sequence_lengths(random=True)
    number = torch.tensor([dataset.num_batches()])
    dist.broadcast(number, 0)
    if rank != 0:
        dataset.sequence_lengths = torch.zeros(int(number), dtype=torch.int64)
    dist.broadcast(dataset.sequence_lengths, 0)


def language_model(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Task 3a: two epochs, with averaged SGD in the second."""
    train_set = Wikitext2Dataset(folder, bptt=10, train=True, min_seq_len=5)
    val_set = Wikitext2Dataset(folder, bptt=10, valid=True)
    train_set.generate_batches(global_bsz=4 * world_size, worker_bsz=4, rank=rank)
    val_set.generate_batches(3)
    model = LSTMLanguageModel(len(train_set.dictionary), 8, 12, 2, 0, 0, 0, 0, 0, tie_weights=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    c_optimizer = CustomCentralizedOptimizer(
        model, world_size, optimizer, grad_clip=0.25, average_world=True
    )
    criterion = torch.nn.CrossEntropyLoss()
    losses = []
    for epoch in range(2):
        set_sequence_lengths(train_set, rank)
        if epoch == 1:
            c_optimizer.optimizer = torch.optim.ASGD(model.parameters(), lr=5.0, t0=0, lambd=0.0)
        hidden = model.init_hidden(4)
        for i in range(train_set.num_batches()):
            data, targets = train_set.get_batch(i, cuda=False)
            c_optimizer.zero_grad()
            output, hidden, raw, dropped = model(data, detached(hidden), return_h=True)
            loss = criterion(output, targets)
            penalty = 2 * dropped[-1].pow(2).mean() + (raw[-1][1:] - raw[-1][:-1]).pow(2).mean()
            (loss + penalty).backward()
            group = c_optimizer.optimizer.param_groups[0]
            rate = group["lr"]
            group["lr"] = rate * train_set.sequence_lengths[i] / 10  # a tensor
            c_optimizer.step()
            group["lr"] = rate
            losses.append(loss.item())
    assert output.shape == (targets.numel(), len(train_set.dictionary))
    hidden, total = model.init_hidden(3), 0.0
    with torch.no_grad():
        for i in range(val_set.num_batches()):
            data, targets = val_set.get_batch(i)
            output, hidden = model(data, hidden)
            total += criterion(output, targets).item() * len(targets)
    lengths = train_set.sequence_lengths.tolist()
    return {
        "losses": losses,
        "weights": model.state_dict(),
        "validation": total,
        "lengths": lengths,
    }


def gnmt(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Task 4a: one epoch in half precision."""
    train_data = WMT16Dataset(
        folder, train=True, download=False, lazy=True, preprocessed=True, math_precision="fp16"
    )
    train_data.prepare()
    tokenizer = WMT16Tokenizer(folder, math_precision="fp16")
    part = partition_dataset_by_rank(train_data, rank, world_size)
    loader = DataLoader(part, batch_size=6, collate_fn=build_collate_fn(sort=True))
    model = GNMT(
        tokenizer.vocab_size, hidden_size=16, num_layers=2, dropout=0.0, share_embedding=True
    ).half()
    optimizer = FP16Optimizer(
        model, world_size, grad_clip=5.0, init_scale=1024, max_scale=8192, average_custom=True
    )
    optimizer.set_optimizer(torch.optim.Adam([optimizer.fp32_params], lr=0.02))
    criterion = LabelSmoothing(padding_idx=wmt16_config.PAD, smoothing=0.1)
    updates = 0
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data[0], data[1], target[0][:-1])
        loss = criterion(output.view(-1, tokenizer.vocab_size), target[0][1:].contiguous().view(-1))
        optimizer.backward_loss(loss / target[0].shape[1])
        updates += bool(optimizer.step(denom=world_size))
    translator = Translator(model, tokenizer, beam_size=2, max_seq_len=8)
    translations, references = translator.translate(data, target)
    bleu = BLEUScore()
    bleu.update(bleu(translations, references), len(references))
    return {
        "updates": updates,
        "weights": model.state_dict(),
        "references": references,
        "bleu": bleu.average().item(),
    }


def transformer(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Task 4b: one epoch; positional arguments every other batch."""
    train_set = WMT17Dataset(folder, train=True, download=False, seq_len_multiple=2)
    validation_set = WMT17Dataset(folder, validation=True)
    batches = get_batches(train_set, max_tokens=40, bsz_mult=2, shuffle=True, seed=0)
    mine = batches[rank : len(batches) // world_size * world_size : world_size]
    model = TransformerModel(Arguments(), train_set.src_dict, train_set.trg_dict)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = CustomCentralizedOptimizer(model, world_size, adam, average_custom=True)
    criterion = LabelSmoothing(
        padding_idx=train_set.trg_dict.pad(), smoothing=0.1, fast_xentropy=True
    )
    losses = []
    for i, sample in enumerate(
        DataLoader(train_set, batch_sampler=mine, collate_fn=train_set.collater)
    ):
        data, target = sample["net_input"], sample["target"]
        optimizer.zero_grad()
        output = model(**data) if i % 2 else model(*data.values())
        output = output[0]
        loss = criterion(output.view(-1, output.shape[2:].numel()), target.view(-1))
        assert loss.item() == pytest.approx(criterion(output, target).item())
        loss.backward()
        tokens = torch.tensor([sample["ntokens"]])
        dist.all_reduce(tokens)
        optimizer.step(denom=tokens.item())
        losses.append(loss.item() / sample["ntokens"])
    generator = SequenceGenerator(
        model, train_set.src_dict, train_set.trg_dict, beam_size=4, len_penalty=0.6
    )
    sample = validation_set.collater([validation_set[i] for i in range(len(validation_set))])
    model.eval()
    translated, targets = generator.translate_batch(
        sample, maxlen_a=1, maxlen_b=2, remove_bpe=None, ignore_case=True
    )
    metric = BLEUScore(use_raw=True)
    metric.update(metric(translated, targets), len(targets))
    return {
        "losses": losses,
        "weights": model.state_dict(),
        "references": targets,
        "bleu": metric.average().item(),
    }


def all_three(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    results = {}
    for loop in (language_model, gnmt, transformer):
        torch.manual_seed(42)
        results[loop.__name__] = loop(rank, world_size, folder)
    return results


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_loops_of_3_0_train(tmp_path: Path, world_size: int) -> None:
    write_texts(tmp_path)
    results = run_ranks(world_size, all_three, str(tmp_path))
    for loop in results[0]:
        for result in results[1:]:
            for name, weight in results[0][loop]["weights"].items():
                assert torch.equal(weight, result[loop]["weights"][name]), (loop, name)
    text = results[0]["language_model"]
    assert len(text["losses"]) > 4 and text["losses"][-1] < text["losses"][0] - 0.1
    for result in results:
        assert result["language_model"]["lengths"] == text["lengths"]
        assert (
            result["language_model"]["validation"] == text["validation"]
        )  # every worker reads all streams, as in 3.0
        assert result["gnmt"]["updates"] == 24 // 6 // world_size
        assert result["gnmt"]["references"][0].split()[0] in WORDS
        assert result["transformer"]["references"][0].split()[0] in WORDS
        assert (
            all(0.5 < loss < 6 for loss in result["transformer"]["losses"])
            and result["transformer"]["losses"]
        )
        assert all(0 <= result[loop]["bleu"] <= 100 for loop in ("gnmt", "transformer"))
