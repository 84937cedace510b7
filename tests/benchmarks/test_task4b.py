"""Task 4b's script on a few sentences: resumed, on two workers, and from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sacrebleu
import torch
import torch._dynamo

from mlbench_core.controlflow.pytorch.translation import train_round_by_tokens, translation_round
from mlbench_core.controlflow.task_arguments import task_main
from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import task4_time_to_bleu_goal
from mlbench_core.models.pytorch.transformer import TransformerConfig
from mlbench_core.tasks import get_task
from mlbench_core.utils import Tracker
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.forked import run_script
from tests.helpers.processes import free_port
from tests.helpers.scripts import load_script
from tests.helpers.subtokens import write_subtokens
from tests.helpers.tasks import train_task

SCRIPT = get_task("4b").script
ENGLISH = ["the", "dog", "sees", "a", "small", "house", "and", "two", "red", "trees"]
GERMAN = ["der", "Hund", "sieht", "ein", "kleines", "Haus", "und", "zwei", "rote", "Bäume"]
SIZES = {"embed_dim": 16, "ffn_embed_dim": 32, "layers": 1, "attention_heads": 2}
TINY: dict[str, Any] = {
    f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()
}


@pytest.fixture
def script() -> Iterator[ModuleType]:
    yield load_script("4b")
    del sys.modules["task4b_main"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Word-by-word translations, 3 to 8 words long."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for part, count in (("train", 60), ("val", 9), ("test_2016_flickr", 9)):
        pairs = [draw.choices(range(10), k=draw.randint(3, 8)) for _ in range(count)]
        for lang, words in (("en", ENGLISH), ("de", GERMAN)):
            lines = "".join(" ".join(words[i] for i in pair) + ".\n" for pair in pairs)
            (folder / f"{part}.{lang}").write_text(lines, encoding="utf-8")
    return folder


def train(script: ModuleType, folder: Path, text: Path, *arguments: str) -> Tracker:
    """What the script does on one worker once the backend is there."""
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    defaults = (
        "--dataset",
        "multi30k",
        "--preset",
        "small",
        "--max-tokens",
        "64",
        "--global-tokens",
        "128",
    )
    args = parser.parse_args([*defaults, *arguments])
    script.sizes.take_defaults(args)
    return train_task(script, args, text, folder, light=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_run_is_bit_identical(
    script: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(text))
    monkeypatch.setattr(TransformerConfig, "preset", lambda name: TransformerConfig(**TINY))
    common = ("--checkpoint", "--precision", precision, "--warmup-steps", "3")
    tracker = train(script, tmp_path / "whole", text, *common, "--epochs", "2")
    train(script, tmp_path / "parted", text, *common, "--epochs", "1")
    train(script, tmp_path / "parted", text, *common, "--epochs", "2", "--resume")
    whole, parted = (
        torch.load(tmp_path / run / "2_0.pth.tar", weights_only=True) for run in ("whole", "parted")
    )
    for part in ("model", "optimizer", "scheduler"):
        assert_equal(whole[part], parted[part])
    assert tracker.current_epoch == 2
    assert whole["scheduler"]["last_epoch"] > 8  # updates


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stops", [False, True])
def test_validation_and_goal_are_as_they_were_defined(
    script: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """The goal's measure is of sub-words in lower case; of text as it is, another score is
    recorded."""
    root = tmp_path / "wmt17"
    root.mkdir()
    for lang in ("en", "de"):
        (root / f"train.{lang}").write_bytes(
            (text / f"train.{lang}").read_bytes() * 20
        )  # rare letters have no symbol
        (root / f"newstest2014.{lang}").write_bytes(
            (text / f"test_2016_flickr.{lang}").read_bytes()
        )
    monkeypatch.setattr(TransformerConfig, "preset", lambda name: TransformerConfig(**TINY))
    small, big = (script.sizes.PRESETS[name] for name in ("small", "big"))
    presets = {"small": dataclasses.replace(small, validate_every=big.validate_every)}
    monkeypatch.setattr(script.sizes, "PRESETS", presets)
    if stops:
        monkeypatch.setattr(
            script, "task4_time_to_bleu_goal", lambda threshold: task4_time_to_bleu_goal(0.0)
        )
    texts: list[Any] = []

    def recorded(
        loader: Any, model: Any, loss: Any, translate: Any, metrics: Any, **kwargs: Any
    ) -> Any:
        texts.append([])
        translated = lambda batch: texts[-1].append(translate(batch)) or texts[-1][-1]  # noqa: E731
        return translation_round(loader, model, loss, translated, metrics, **kwargs)

    lengths: list[int] = []

    def counted(batches: Any, *args: Any, **kwargs: Any) -> float:
        lengths.append(len(batches))
        return train_round_by_tokens(batches, *args, **kwargs)

    monkeypatch.setattr(script, "translation_round", recorded)
    monkeypatch.setattr(script, "train_round_by_tokens", counted)
    tracker = train(script, tmp_path / "run", root, "--dataset", "wmt17", "--epochs", "1",
    "--max-tokens", "512",
                    "--global-tokens", "1024", "--warmup-steps", "2")  # fmt: skip
    assert len(lengths) == len(texts) == (1 if stops else 4)
    assert all(length == lengths[0] and length % 2 == 0 for length in lengths[:-1])
    assert tracker.goal_reached is stops
    values = {
        name: value for _, name, value, *_ in tracker.history if name.startswith("val_global_BLEU")
    }
    assert list(values) == ["val_global_BLEU-Score", "val_global_BLEU-Score-13a-cased"]
    sides = [
        [[line for pair in texts[-1] for line in pair[m][side]] for side in (0, 1)] for m in (0, 1)
    ]
    (raw, raw_references), (cased, references) = sides
    assert sorted(references) == sorted(
        (root / "newstest2014.de").read_text(encoding="utf-8").splitlines()
    )
    symbols = {word for line in raw_references for word in line.split()}
    assert {"Hund", "."} <= symbols
    assert not any("@@" in line for line in cased)
    raw_score = sacrebleu.raw_corpus_bleu(
        [r.lower() for r in raw], [[r.lower() for r in raw_references]]
    ).score
    assert values["val_global_BLEU-Score"] == pytest.approx(raw_score, abs=1e-3)
    cased_score = sacrebleu.corpus_bleu(cased, [references]).score
    assert values["val_global_BLEU-Score-13a-cased"] == pytest.approx(cased_score, abs=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_the_vocabulary_of_mlperfs_reference(
    script: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "wmt17"
    root.mkdir()
    for lang in ("en", "de"):
        for name, part in (("train", "train"), ("newstest2014", "test_2016_flickr")):
            (root / f"{name}.{lang}").write_bytes((text / f"{part}.{lang}").read_bytes())
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(TransformerConfig, "preset", lambda name: TransformerConfig(**TINY))
    file = write_subtokens(tmp_path / "vocab.ende.32768", "Hund_", "dog_", *"abeiklmrstwz. ")
    seen: list[tuple[list[str], list[str]]] = []

    def recorded(
        loader: Any, model: Any, loss: Any, translate: Any, metrics: Any, **kwargs: Any
    ) -> Any:
        assert model.decoder.embed_tokens.num_embeddings == SubtokenVocabulary.load(file).size
        raw, cased = translate(next(iter(loader)))
        seen.append((raw[1], cased[1]))
        return translation_round(loader, model, loss, translate, metrics, **kwargs)

    monkeypatch.setattr(script, "translation_round", recorded)
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    args = parser.parse_args(["--vocabulary", str(file), "--preset", "small", "--max-tokens", "512",
                              "--global-tokens", "1024", "--warmup-steps", "2", "--epochs",
                              "1"])  # fmt: skip
    script.sizes.take_defaults(args)
    args.options = {"vocabulary": str(file)}
    tracker = train_task(script, args, root, tmp_path / "run", light=True)
    assert tracker.current_epoch == 1 and len(seen) == 1
    for divided, reference in zip(*seen[0], strict=True):
        assert SubtokenVocabulary.load(file).join(divided) == reference
    assert any("Hund_" in divided.split(" ") for divided in seen[0][0])
    # The result has the content of the file, not its place.
    assert args.options == {"vocabulary": SubtokenVocabulary.load(file).checksum}
    args.dataset = "multi30k"
    with pytest.raises(
        ConfigurationError, match="--dataset must be wmt17 with --vocabulary, not multi30k"
    ):
        script.load_data(args, str(root))


def test_half_precision_is_the_default_on_gpus(script: ModuleType) -> None:
    for given, gpu, expected in [
        (None, True, "fp16"),
        (None, False, "fp32"),
        ("bf16", True, "bf16"),
    ]:
        args = argparse.Namespace(precision=given)
        script.sizes.take_precision(args, gpu)
        assert args.precision == expected


def test_only_training_sentences_are_limited(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    folder = tmp_path / "long"
    folder.mkdir()
    for part in ("train", "val"):
        for lang in ("en", "de"):
            lines = "".join(f"{'a ' * words}\n" for words in (79, 80))
            (folder / f"{part}.{lang}").write_text(lines, encoding="utf-8")
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    args = parser.parse_args(["--dataset", "multi30k", "--evaluate-on", "validation"])
    script.MAX_LEN_TRAIN = 79
    pairs, evaluated = script.load_data(args, str(folder))
    assert pairs.lengths.tolist() == [[80, 80]]  # with the end
    assert evaluated.lengths.tolist() == [[80, 80], [81, 81]]


def test_two_workers_by_torchrun(text: Path, tmp_path: Path) -> None:
    done = run_script(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(SCRIPT), "--run_id", "1", "--backend", "gloo", "--dataset", "multi30k", "--data",
         str(text),
         "--preset", "small", "--max-tokens", "128", "--global-tokens", "256", "--epochs", "1",
         "--root-checkpoint", str(tmp_path / "ckpt"), "--root-output", str(tmp_path / "out")],
        timeout_s=240, MLBENCH_HOME=str(text),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert "goal not reached" in log, log
    assert "case:mixed" in log, log
    assert list((tmp_path / "ckpt").rglob("model_best.pth.tar"))


def test_commands_of_the_readme_are_understood(script: ModuleType, tmp_path: Path) -> None:
    readme = SCRIPT.with_name("README.md").read_text().replace("\\\n", "")
    commands = re.findall(rf"{SCRIPT.parent.name}/main\.py (.*)", readme)
    commands += re.findall(r"--task 4b .*-- (.*)", readme)
    assert len(commands) == 6
    understood: list[argparse.Namespace] = []
    roots = [f"--root-{name}={tmp_path}" for name in ("dataset", "checkpoint", "output")]
    for command in commands:
        task_main(
            lambda args, **others: understood.append(args),
            "task4b",
            argv=[*shlex.split(command), *roots],
            add_arguments=script.add_arguments,
        )
    assert [args.preset for args in understood] == [
        "small",
        "small",
        "big",
        "big",
        "small",
        "small",
    ]


def test_task_4b_is_as_specified(script: ModuleType) -> None:
    task = get_task("task4b")
    assert (task.goal, task.light_goal, task.metric, task.minimize, task.max_epochs) == (
        25,
        20,
        "BLEU-Score",
        False,
        10,
    )
    assert (
        task.goal_on("wmt17"),
        task.goal_on("multi30k"),
        task.goal_on("multi30k", light=True),
    ) == (25, 20, 15)
    assert (script.BETAS, script.EPS, script.LABEL_SMOOTHING) == ((0.9, 0.98), 1e-9, 0.1)
    assert script.LOSS_SCALING == {"init_scale": 128, "scale_factor": 2, "scale_window": 2000}
    assert (script.BEAM_SIZE, script.LENGTH_PENALTY, script.MAX_LEN_TRAIN) == (4, 0.6, 80)
    big = vars(script.sizes.PRESETS["big"])
    assert big == {
        "max_tokens": 8192,
        "global_tokens": 131072,
        "lr": 1.976e-3,
        "warmup_steps": 1000,
        "validate_every": 0.3,
    }
    divided = {k: script.sizes.divided(argparse.Namespace(**big), k) for k in (1, 2, 5, 16, 32, 64)}
    assert divided == {
        1: (8192, 16),
        2: (8192, 8),
        5: (6554, 4),
        16: (8192, 1),
        32: (4096, 1),
        64: (2048, 1),
    }


def test_an_update_has_the_tokens_of_the_definition() -> None:
    """With any number of workers: 2^17 exactly if they divide it, and otherwise the nearest
    possible number."""
    sizes = load_script("4b").sizes
    big = argparse.Namespace(**vars(sizes.PRESETS["big"]))
    for k in range(1, 257):
        tokens, batches = sizes.divided(big, k)
        assert tokens <= 8192
        # No batch more than a worker needs, which reads at most 8,192 tokens at a time.
        assert (batches - 1) * 8192 * k < 2**17 <= batches * 8192 * k
        # A token more or less in each batch would not be nearer.
        assert 2 * abs(k * batches * tokens - 2**17) <= k * batches
        assert 2**17 % (k * batches) or k * batches * tokens == 2**17
