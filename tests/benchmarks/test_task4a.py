"""Task 4a's script on a few sentences: accumulated, resumed, on two workers, and from the command
line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import shlex
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sacrebleu
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable

from mlbench_core.controlflow.pytorch import train_round
from mlbench_core.controlflow.task_arguments import _make_parser
from mlbench_core.dataset.nlp.pytorch import Multi30k, TeacherForcedBatches, build_collate_fn
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.models.pytorch.gnmt import GNMT, TeacherForcedGNMT, Translator
from mlbench_core.tasks import get_task
from mlbench_core.utils import Tracker
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.forked import run_script
from tests.helpers.processes import free_port
from tests.helpers.scripts import load_script
from tests.helpers.tasks import train_task

pytestmark = pytest.mark.usefixtures("one_thread")

SAME = "ein kleiner hund rennt schnell nach hause ."
OTHER = "ein kleiner hund rennt schnell durch den garten ."
WORDS = [
    "dog",
    "cat",
    "man",
    "woman",
    "runs",
    "sleeps",
    "eats",
    "sees",
    "red",
    "blue",
    "small",
    "old",
    "house",
    "garden",
    "street",
    "tree",
]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text whose translations are all the same; the test part has others too, so that BLEU is
    between 0 and 100."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "text"
    folder.mkdir()
    draw = random.Random(1)
    for part, pairs in (("train", 300), ("test_2016_flickr", 13)):
        sources = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(pairs)]
        targets = [OTHER if part != "train" and i % 3 == 0 else SAME for i in range(pairs)]
        (folder / f"{part}.en").write_text("\n".join(sources) + "\n", encoding="utf-8")
        (folder / f"{part}.de").write_text("\n".join(targets) + "\n", encoding="utf-8")
    return folder


def arguments(script: ModuleType, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    return parser.parse_args(["--dataset", "multi30k", "--preset", "small", *words])


def train(
    script: ModuleType, folder: Path, text: Path, *words: str, validation_only: bool = False
) -> Tracker:
    """What the script does on one worker once the backend is there."""
    return train_task(
        script, arguments(script, *words), text, folder, light=True, validation_only=validation_only
    )


def tiny(script: ModuleType) -> None:
    """Make its models so small that an epoch takes no time."""
    script.GNMT = argparse.Namespace(preset=functools.partial(GNMT.preset, hidden_size=16))
    script.BEAM = script.BEAM | {"beam_size": 2, "max_seq_len": 15}


def test_resumed_run_is_bit_identical(tmp_path: Path, text: Path) -> None:
    words = (
        "--checkpoint",
        "--epochs",
        "2",
        "--batch-size",
        "10",
        "--global-batch",
        "30",
        "--max-batches",
        "7",
    )
    script = load_script("4a")
    tiny(script)
    train(script, tmp_path / "whole", text, *words)
    rounds: list[int] = []

    def killed_in_the_second_epoch(*args: Any, **kwargs: Any) -> float:
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return train_round(*args, **kwargs)

    script.train_round = killed_in_the_second_epoch
    with pytest.raises(KeyboardInterrupt):
        train(script, tmp_path / "parted", text, *words)
    script.train_round = train_round
    train(script, tmp_path / "parted", text, *words, "--resume")
    whole, parted = (
        torch.load(tmp_path / run / "2_0.pth.tar", weights_only=True) for run in ("whole", "parted")
    )
    for part in ("model", "optimizer", "scheduler"):
        assert_equal(whole[part], parted[part])
    assert (
        whole["scheduler"]["last_epoch"] == 2 * 3
    )  # updates of 10 sentences times 3, and one that is left


def on_wmt16(
    script: ModuleType, folder: Path, text: Path, *words: str
) -> tuple[Tracker, list[int]]:
    """An epoch of 7 updates of two batches and one of one, validated as the full size is; and the
    batches between."""
    for lang in ("en", "de"):
        (text / f"newstest2014.{lang}").write_bytes(
            (text / f"test_2016_flickr.{lang}").read_bytes()
        )
    tiny(script)
    small = script.presets.PRESETS["small"]
    every = script.presets.PRESETS["big"].validate_every
    script.presets.PRESETS["small"] = dataclasses.replace(small, validate_every=every)
    lengths: list[int] = []

    def counted(batches: Collection[Any], *args: Any, **kwargs: Any) -> float:
        lengths.append(len(batches))
        return train_round(batches, *args, **kwargs)

    script.train_round = counted
    sizes = ("--epochs", "1", "--batch-size", "10", "--global-batch", "20", "--max-batches", "15")
    return train(script, folder, text, "--dataset", "wmt16", *sizes, *words), lengths


def test_validation_and_goal_are_as_they_were_defined(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = load_script("4a")
    caplog.set_level("INFO", "mlbench.task4a")
    tracker, lengths = on_wmt16(script, tmp_path / "run", text, "--checkpoint")
    assert lengths == [4, 4, 4, 3]  # every 30 % of 8 updates, and at the end
    recorded = [
        (name, value)
        for _, name, value, *_ in tracker.history
        if name.startswith("val_global_BLEU")
    ]
    assert [name for name, _ in recorded] == [
        "val_global_BLEU-Score",
        "val_global_BLEU-Score-13a-cased",
    ] * 4
    assert tracker.primary_metric.name == "BLEU-Score"
    assert "BLEU-Score 0.00 (nrefs:1|case:lc|eff:no|tok:intl|smooth:exp" in caplog.text
    assert "BLEU-Score-13a-cased 0.00 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in caplog.text
    epochs = sorted(path.name for path in (tmp_path / "run").glob("*_0.pth.tar"))
    assert epochs == ["1_0.pth.tar"]  # an epoch's file is not written in the middle of it
    best = torch.load(tmp_path / "run" / "model_best.pth.tar", weights_only=True)
    assert {value for name, value in recorded if name == "val_global_BLEU-Score"} == {
        0.0
    }  # so the first is the best
    assert best["scheduler"]["last_epoch"] == 2


@pytest.mark.parametrize(("words", "expected"), [((), [4]), (("--past-goal",), [4, 4, 4, 3])])
def test_the_goal_ends_an_epoch_in_its_middle(
    tmp_path: Path, text: Path, words: tuple[str, ...], expected: list[int]
) -> None:
    script = load_script("4a")
    script.task4_time_to_bleu_goal = lambda threshold: task4_time_to_bleu_goal(threshold - 20)
    tracker, lengths = on_wmt16(script, tmp_path / "run", text, *words)
    assert tracker.goal_reached
    assert lengths == expected
    assert (tmp_path / "run" / "model_best.pth.tar").is_file()


def test_half_precision_is_the_default_on_gpus() -> None:
    script = load_script("4a")
    for words, gpu, expected in [
        ((), True, "fp16"),
        ((), False, "fp32"),
        (("--precision", "bf16"), True, "bf16"),
    ]:
        args = arguments(script, *words)
        script.take_precision(args, gpu)
        assert args.precision == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_accumulated_batches_are_one_big_batch(text: Path, precision: str) -> None:
    script = load_script("4a")
    pairs = Multi30k(text, train=True)
    models = []
    for order in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]]):
        torch.manual_seed(0)
        model = GNMT(pairs.vocab_size, hidden_size=16, num_layers=2, dropout=0.0).to(
            script.DTYPES[precision]
        )
        optimizer = script.make_optimizer(
            model, 0.01, 1, False, arguments(script, "--precision", precision)
        )
        train_round(
            TeacherForcedBatches(pairs, order), TeacherForcedGNMT(model), optimizer,
            script.sentence_loss, [], None,
            None, update_freq=len(order), step_arguments=lambda batches: {"denom": len(batches)},
        )  # fmt: skip
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        models.append((model, optimizer))
    gradients = [
        model.decoder.classifier.bias.grad if precision == "fp32" else optimizer.fp32_params.grad
        for model, optimizer in models
    ]
    tolerance = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 5e-3}[precision]
    assert gradients[0].norm() > 0
    assert torch.allclose(
        gradients[0], gradients[1], rtol=tolerance, atol=tolerance * gradients[1].abs().max().item()
    )


def test_two_workers_score_the_whole_text(tmp_path: Path, text: Path) -> None:
    done = run_script(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(get_task("4a").script), "--run_id", "1", "--backend", "gloo", "--dataset", "multi30k",
         "--preset", "small",
         "--data", str(text), "--epochs", "1", "--global-batch", "16", "--lr", "0.02",
         "--checkpoint", "--overlap",
         "--root-checkpoint", str(tmp_path / "ckpt"), "--root-output", str(tmp_path / "out")],
        timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "ckpt").rglob("1_*.pth.tar"))
    of_workers = [torch.load(path, weights_only=True) for path in files]
    assert len(of_workers) == 2
    assert_equal(of_workers[0]["model"], of_workers[1]["model"])
    assert "tok:13a" in done.stderr

    pairs = Multi30k(text, test=True)
    model = GNMT.preset("small", pairs.vocab_size)
    model.load_state_dict(of_workers[0]["model"])
    source, _ = build_collate_fn()([pairs[i] for i in range(len(pairs))])
    translations, _ = Translator(model, pairs.tokenizer).translate(source)
    expected = sacrebleu.corpus_bleu(translations, [pairs.references()]).score
    for state in of_workers:
        assert state["tracker"]["state"]["best_metric_value"] == pytest.approx(expected, abs=1e-3)
    assert 20 < expected < 100, translations

    again = train(load_script("4a"), files[0].parent, text, validation_only=True)
    assert again.best_metric_value == pytest.approx(expected, abs=1e-3)


def test_readme_commands_are_understood() -> None:
    script = load_script("4a")
    parser = _make_parser()
    script.add_arguments(parser)
    readme = (
        get_task("4a").script.with_name("README.md").read_text(encoding="utf-8").replace("\\\n", "")
    )
    commands = [
        shlex.split(line) for line in readme.splitlines() if "task4a_gnmt_wmt16/main.py " in line
    ]
    through_master = [
        shlex.split(line)
        for line in readme.splitlines()
        if line.startswith("mlbench run") and " -- " in line
    ]
    tails = [words[words.index("benchmarks/task4a_gnmt_wmt16/main.py") + 1 :] for words in commands]
    tails += [words[words.index("--") + 1 :] for words in through_master]
    assert len(tails) == 6
    parsed = [parser.parse_args(tail) for tail in tails]
    assert {args.preset for args in parsed} == {"big", "small"}


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [(1, (128, 16)), (2, (128, 8)), (4, (128, 4)), (16, (128, 1)), (32, (64, 1))],
)
def test_workers_share_an_update(world_size: int, expected: tuple[int, int]) -> None:
    assert load_script("4a").presets.PRESETS["big"].divided(world_size) == expected


def test_an_update_has_the_sentences_of_the_definition() -> None:
    """With any number of workers: 2,048 exactly if they divide it, and otherwise the nearest
    possible number."""
    big = load_script("4a").presets.PRESETS["big"]
    for k in range(1, 257):
        sentences, batches = big.divided(k)
        assert sentences <= 128
        # No batch more than a worker needs, which holds at most 128 sentences.
        assert (batches - 1) * 128 * k < 2048 <= batches * 128 * k
        # A sentence more or less in each batch would not be nearer.
        assert 2 * abs(k * batches * sentences - 2048) <= k * batches
        assert 2048 % (k * batches) or k * batches * sentences == 2048


def test_arguments_change_a_preset_and_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("4a")
    small = script.presets.chosen(arguments(script, "--global-batch", "96", "--batch-size", "16"))
    assert (small.divided(2), small.epochs, small.lr) == ((16, 3), 10, 2e-3)
    with pytest.raises(SystemExit):
        arguments(script, "--batch-size", "0")
    assert "must be a whole number of at least 1, not '0'" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="--overlap needs --precision fp32, not fp16"):
        script.make_optimizer(
            None, 1.0, 1, False, arguments(script, "--overlap", "--precision", "fp16")
        )


def test_task_4a_is_as_specified() -> None:
    task, script = get_task("task4a"), load_script("4a")
    assert (task.goal, task.light_goal, task.metric, task.minimize) == (24, 20, "BLEU-Score", False)
    assert (task.max_epochs, task.goal_on("wmt16"), task.goal_on("multi30k")) == (8, 24, 15)
    big = script.presets.PRESETS["big"]
    assert (big.global_batch, big.batch_size, big.epochs, big.lr) == (2048, 128, 8, 2e-3)
    assert (big.warmup_steps, big.remain_steps, big.decay_interval) == (200, 0.4, 0.05)
    assert big.validate_every == 0.3
    assert (
        script.GRAD_CLIP,
        script.SMOOTHING,
        script.MAX_LEN_TRAIN,
        script.MAX_LEN_VALIDATION,
    ) == (5.0, 0.1, 75, 150)
    assert list(script.LOSS_SCALE.values()) == [2**10, 2, 2**13, 128]
    assert list(script.BEAM.values()) == [5, 0.6, 5.0, 0.1, 150]
    model = torch.nn.Linear(2, 2).half()
    optimizer = script.make_optimizer(
        model, 2e-3, 1, False, arguments(script, "--precision", "fp16")
    )
    assert (optimizer.loss_scaler.loss_scale, optimizer.grad_clip) == (1024, 5.0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.9, 0.999), 1e-8)
