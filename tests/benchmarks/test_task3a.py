"""Task 3a's script on a small text: resumed, on several workers, and from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from mlbench_core.dataset.nlp.pytorch import Wikitext2Dataset
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel
from mlbench_core.tasks import get_task
from mlbench_core.utils import Tracker
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.forked import run_script
from tests.helpers.processes import free_port
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import load_script
from tests.helpers.tasks import train_task

WORDS = [f"w{i}" for i in range(30)]
STREAMS = 7  # of validation: two workers do not get equally many


def write_text(folder: Path, valid_is_train: bool) -> Path:
    """A text that repeats itself; validation is the same, or has nothing to do with it, so that it
    gets worse."""
    folder.mkdir()
    train = " ".join(WORDS + [WORDS[i % 7] for i in range(1700)])
    valid = train if valid_is_train else " ".join(random.Random(1).choices(WORDS, k=200))
    (folder / "wiki.train.tokens").write_text(f" {train} \n")
    (folder / "wiki.valid.tokens").write_text(f" {valid} \n")
    return folder


def train(
    folder: Path,
    text: Path,
    *arguments: str,
    rank: int = 0,
    world_size: int = 1,
    stops: bool = False,
) -> Tracker:
    """What the script does on one worker once the backend is there, with a tiny model; a run stops
    at a goal or not."""
    script = load_script("3a")
    small = script.PRESETS["small"]
    script.PRESETS["small"] = dataclasses.replace(
        small, model=small.model | {"ninp": 8, "nhid": 12}
    )
    script.VALIDATION_SEQUENCES = STREAMS
    if not stops:
        script.task3_time_to_perplexity_goal = lambda threshold: None
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    args = parser.parse_args(["--preset", "small", *arguments])
    return train_task(script, args, text, folder, rank=rank, world_size=world_size, light=True)


def test_resumed_run_is_bit_identical_through_the_switch_to_averages(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", valid_is_train=False)
    train(tmp_path / "whole", text, "--checkpoint", "--epochs", "11")
    train(tmp_path / "parted", text, "--checkpoint", "--epochs", "8")
    train(tmp_path / "parted", text, "--checkpoint", "--epochs", "11", "--resume")
    whole, parted = (
        torch.load(tmp_path / run / "11_0.pth.tar", weights_only=True)
        for run in ("whole", "parted")
    )
    for part in ("model", "optimizer", "scheduler", "extra"):
        assert_equal(whole[part], parted[part])
    assert whole["extra"]["averaging"]["is_averaging"] is True
    assert all(state["averaged"] > 1 for state in whole["optimizer"]["state"].values())


def test_small_preset_learns_reaches_its_goal_and_stops(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", valid_is_train=True)
    tracker = train(tmp_path / "run", text, "--epochs", "3", "--bf16", stops=True)
    assert tracker.goal_reached  # 37 words: any perplexity is below 400
    assert tracker.current_epoch == 1
    assert tracker.best_metric_value < 37


def one_epoch(
    rank: int, world_size: int, text: str, folder: str
) -> tuple[float, dict[str, Any], torch.Tensor, float]:
    arguments = ("--epochs", "1", "--batch-size", "10", "--checkpoint")
    tracker = train(Path(folder), Path(text), *arguments, rank=rank, world_size=world_size)
    state = torch.load(Path(folder) / f"1_{rank}.pth.tar", weights_only=True)
    rate = state["optimizer"]["param_groups"][0]["lr"]
    return tracker.best_metric_value, state["model"], state["rng"]["torch"], rate


def plain_perplexity(folder: Path, weights: dict[str, Any]) -> float:
    """exp of the mean loss of all words of all streams, in one pass."""
    valid = Wikitext2Dataset(folder, 35, valid=True)
    model = LSTMLanguageModel(len(valid.dictionary), 8, 12, 2, tie_weights=True).eval()
    model.load_state_dict(weights)
    streams = torch.tensor(valid.tokens[: len(valid.tokens) // STREAMS * STREAMS].copy())
    streams = streams.long().view(STREAMS, -1).T
    with torch.no_grad():
        scores, _ = model(streams[:-1], model.init_hidden(STREAMS))
    losses = F.cross_entropy(scores.double(), streams[1:].flatten(), reduction="none")
    return float((losses.sum() / losses.numel()).exp())


def test_two_workers_report_the_perplexity_of_the_whole_text(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", valid_is_train=False)
    results = run_ranks(2, one_epoch, str(text), str(tmp_path / "run"))
    expected = plain_perplexity(text, results[0][1])
    for perplexity, weights, _, rate in results:
        assert_equal(weights, results[0][1])
        # Half of the preset's 20 sequences: 30 sqrt(1/2), on the way to sqrt(2) times that after 6
        # epochs.
        assert rate == pytest.approx(30 * math.sqrt(0.5) * (1 + (math.sqrt(2) - 1) / 6))
        assert perplexity == pytest.approx(expected, rel=1e-4)
    assert not torch.equal(results[0][2], results[1][2])  # each worker has dropout masks of its own


def test_missing_text_is_one_clear_line(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", valid_is_train=True)
    (text / "wiki.train.tokens").unlink()
    done = run_script(
        [str(get_task("3a").script), "--backend", "gloo", "--data", str(text), "--preset", "small",
         "--root-checkpoint", str(tmp_path / "ckpt"), "--root-output", str(tmp_path / "out")],
        timeout_s=240, MASTER_PORT=str(free_port()),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "no wiki.train.tokens or train.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_task_3a_is_as_specified() -> None:
    task, script = get_task("task3a"), load_script("3a")
    assert (task.goal, task.light_goal, task.metric, task.minimize, task.max_epochs) == (
        70,
        90,
        "Perplexity",
        True,
        750,
    )
    assert task.goal_on("wikitext2") == 70
    assert (script.BASE_LR, script.WEIGHT_DECAY, script.GRAD_CLIP) == (30.0, 1.2e-6, 0.25)
    assert script.NON_MONOTONE_INTERVAL == 5
    full = script.PRESETS["full"]
    assert (full.sequences, full.bptt, full.dataset) == (80, 70, None)
    assert [script.base_rate(full.sequences, n) for n in (None, 80, 20)] == [30.0, 30.0, 15.0]
    assert script.base_rate(script.PRESETS["small"].sequences, None) == 30.0
    with torch.device("meta"):
        model = LSTMLanguageModel(33_278, tie_weights=True, **full.model)
    assert sum(p.numel() for p in model.parameters()) == 33_556_078
    assert (model.drop_output.p, model.drop_hidden.p, model.drop_input.p, model.dropoute) == (
        0.4,
        0.2,
        0.65,
        0.1,
    )
    assert [rnn.dropout for rnn in model.rnns] == [0.5] * 3
