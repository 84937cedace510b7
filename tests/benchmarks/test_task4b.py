"""Task 4b's script on a few sentences: tokens dealt out to workers, resumed, and from the command line."""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sacrebleu
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.controlflow.pytorch.translation import train_round_by_tokens, translation_round
from mlbench_core.evaluation.pytorch.criterion import LabelSmoothing
from mlbench_core.evaluation.pytorch.metrics import BLEUScore
from mlbench_core.models.pytorch.transformer import TransformerConfig, TransformerModel
from mlbench_core.optim.pytorch import CustomCentralizedOptimizer, FP16Optimizer
from mlbench_core.tasks import get_task
from mlbench_core.utils import Tracker
from mlbench_core.utils.task_args import task_main
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.processes import environment, free_port
from tests.helpers.ranks import run_ranks

SCRIPT = get_task("4b").script
ENGLISH = ["the", "dog", "sees", "a", "small", "house", "and", "two", "red", "trees"]
GERMAN = ["der", "Hund", "sieht", "ein", "kleines", "Haus", "und", "zwei", "rote", "Bäume"]
SIZES = {"embed_dim": 16, "ffn_embed_dim": 32, "layers": 1, "attention_heads": 2}
TINY: dict[str, Any] = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task4b_main", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["task4b_main"] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> Iterator[ModuleType]:
    yield load_script()
    del sys.modules["task4b_main"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads wait for each other longer than they compute, on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


# ---- rounds


class Words:
    """A vocabulary of 12 words: padding is 0, the end 1."""

    def pad(self) -> int:
        return 0

    def eos(self) -> int:
        return 1

    def __len__(self) -> int:
        return 12


def make_batches(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Batches of so many sentences with at most so many words."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for sentences, longest in sizes:
        target = torch.randint(2, 12, (sentences, longest), generator=generator)
        lengths = torch.randint(1, longest + 1, (sentences, 1), generator=generator)
        target = target.masked_fill(torch.arange(longest) >= lengths, 0)
        net_input = {
            "src_tokens": torch.randint(2, 12, (sentences, longest), generator=generator),
            "src_lengths": torch.full((sentences,), longest),
            "prev_output_tokens": F.pad(target[:, :-1], (1, 0), value=1),
        }
        count = int((target != 0).sum())
        batches.append({"id": torch.arange(sentences), "net_input": net_input, "target": target, "ntokens": count})
    return batches


BATCHES = make_batches([(2, 3), (5, 9), (1, 2), (7, 6), (3, 4), (4, 4)])
LOSS = LabelSmoothing(0, 0.1)
LR = 0.1


def make_model() -> TransformerModel:
    torch.manual_seed(1)
    words = Words()
    return TransformerModel(
        TransformerConfig(**TINY, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0), words, words
    )


def flat(model: TransformerModel) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def updated(world_size: int, batches: list[dict[str, Any]], precision: str, freq: int) -> tuple[Tensor, float]:
    """Weights after one epoch of plain gradient descent, which unlike Adam shows a wrong divisor; and the loss."""
    model = make_model()
    if precision == "fp16":
        half = FP16Optimizer(model.half(), world_size, init_scale=2**7, average_custom=True)
        half.set_optimizer(torch.optim.SGD([half.fp32_params], lr=LR))
        loss = train_round_by_tokens(batches, model, half, LOSS, update_freq=freq)
        return half.fp32_params.detach().clone(), loss
    inside = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = CustomCentralizedOptimizer(model, world_size, inside, average_custom=True)
    autocast = torch.bfloat16 if precision == "bf16" else None
    loss = train_round_by_tokens(batches, model, optimizer, LOSS, update_freq=freq, autocast=autocast)
    return flat(model), loss


def expected(updates: list[list[dict[str, Any]]]) -> Tensor:
    """The weights, each update by the mean loss of all tokens in the batches of all workers."""
    model = make_model()
    for batches in updates:
        model.zero_grad()
        total = sum(LOSS(model(**batch["net_input"]), batch["target"]) for batch in batches)
        (total / sum(batch["ntokens"] for batch in batches)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=LR)
    return flat(model)


def translate(batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Made-up translations of some words of the target."""
    rows = [[f"w{number}" for number in row.tolist()] for row in batch["target"]]
    return [" ".join(row[: 2 + len(row) // 2]) for row in rows], [" ".join(row) for row in rows]


def rounds_on_a_worker(rank: int, world_size: int) -> dict[str, Any]:
    mine = BATCHES[rank::world_size]
    weights = {p: updated(world_size, mine, p, 2) for p in ("fp32", "bf16", "fp16")}
    evaluated = [*BATCHES[:5:world_size], {}] if rank else [*BATCHES[1:5:world_size]]
    bleu = BLEUScore()
    values, loss = translation_round(evaluated, make_model(), LOSS, translate, [bleu])
    return {"weights": weights, "bleu": values[bleu], "loss": loss}


def test_workers_times_accumulation_are_one_batch_of_the_same_tokens() -> None:
    results = run_ranks(2, rounds_on_a_worker)
    reference = expected([BATCHES[:4], BATCHES[4:]])  # the last update has one batch of each worker
    moved = float((reference - flat(make_model())).norm())
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.03), ("fp16", 0.03)):
        for result in results:
            weights, _ = result["weights"][precision]
            assert torch.equal(weights, results[0]["weights"][precision][0])
            assert float((weights - reference).norm()) < tolerance * moved, precision
    # Validation: each worker's share counts with its tokens and n-grams.
    texts = [translate(batch) for batch in BATCHES[:5]]
    whole = sacrebleu.corpus_bleu([t for out, _ in texts for t in out], [[t for _, ref in texts for t in ref]])
    model = make_model().eval()
    with torch.no_grad():
        loss = sum(LOSS(model(**batch["net_input"]), batch["target"]) for batch in BATCHES[:5])
    for result in results:
        assert result["bleu"] == pytest.approx(whole.score, abs=1e-4)
        assert result["loss"] == pytest.approx(float(loss) / sum(b["ntokens"] for b in BATCHES[:5]), rel=1e-5)


def test_one_worker_accumulates_to_the_same_weights() -> None:
    weights, loss = updated(1, BATCHES, "fp32", 4)
    torch.testing.assert_close(weights, expected([BATCHES[:4], BATCHES[4:]]), atol=1e-6, rtol=0)
    assert 1.5 < loss < 4.5  # nats a token, of 12 words
    with pytest.raises(ValueError, match="update_freq is 0; it must be at least 1"):
        updated(1, BATCHES, "fp32", 0)


# ---- the script


def train(script: ModuleType, folder: Path, text: Path, *arguments: str) -> Tracker:
    """What the script does on one worker once the backend is there, with a tiny model."""
    script.TransformerConfig.preset = lambda name: TransformerConfig(**TINY)
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    defaults = ("--dataset", "multi30k", "--preset", "small", "--max-tokens", "64", "--global-tokens", "128")
    args = parser.parse_args([*defaults, *arguments])
    script.take_defaults(args)
    torch.manual_seed(args.seed)
    tracker: Tracker = script.train(0, 1, "1", str(text), str(folder), False, True, False, args)
    return tracker


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_run_is_bit_identical(
    script: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(text))
    common = ("--checkpoint", "--precision", precision, "--warmup-steps", "3")
    tracker = train(script, tmp_path / "whole", text, *common, "--epochs", "2")
    train(script, tmp_path / "parted", text, *common, "--epochs", "1")
    train(script, tmp_path / "parted", text, *common, "--epochs", "2", "--resume")
    whole, parted = (torch.load(tmp_path / run / "2_0.pth.tar", weights_only=True) for run in ("whole", "parted"))
    for part in ("model", "optimizer", "scheduler"):
        assert_equal(whole[part], parted[part])
    assert tracker.current_epoch == 2
    assert whole["scheduler"]["last_epoch"] > 8  # updates


def test_two_workers_by_torchrun(text: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(SCRIPT), "--run_id", "1", "--backend", "gloo", "--dataset", "multi30k", "--data", str(text),
         "--preset", "small", "--max-tokens", "128", "--global-tokens", "256", "--epochs", "1",
         "--root-checkpoint", str(tmp_path / "ckpt"), "--root-output", str(tmp_path / "out")],
        capture_output=True, text=True, env=environment(MLBENCH_HOME=str(text)), timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert "goal not reached" in log, log
    assert "case:mixed" in log, log
    assert list((tmp_path / "ckpt").rglob("model_best.pth.tar"))


def test_commands_of_the_readme_are_understood(script: ModuleType, tmp_path: Path) -> None:
    readme = SCRIPT.with_name("README.md").read_text()
    commands = re.findall(rf"{SCRIPT.parent.name}/main\.py (.*)", readme)
    commands += re.findall(r"--task 4b .*-- (.*)", readme)
    assert len(commands) == 5
    understood: list[argparse.Namespace] = []
    roots = [f"--root-{name}={tmp_path}" for name in ("dataset", "checkpoint", "output")]
    for command in commands:
        task_main(
            lambda *others, args: understood.append(args),
            "task4b",
            argv=[*shlex.split(command), *roots],
            add_arguments=script.add_arguments,
        )
    assert [args.preset for args in understood] == ["small", "small", "big", "big", "small"]


def test_task_4b_is_as_specified(script: ModuleType) -> None:
    task = get_task("task4b")
    assert (task.goal, task.light_goal, task.metric, task.minimize, task.max_epochs) == (
        25,
        20,
        "BLEU-Score",
        False,
        10,
    )
    assert (task.goal_on("wmt17"), task.goal_on("multi30k"), task.goal_on("multi30k", light=True)) == (25, 20, 15)
    assert (script.BETAS, script.EPS, script.LABEL_SMOOTHING) == ((0.9, 0.98), 1e-9, 0.1)
    assert script.LOSS_SCALING == {"init_scale": 128, "scale_factor": 2, "scale_window": 2000}
    assert (script.BEAM_SIZE, script.LENGTH_PENALTY) == (4, 0.6)
    big = vars(script.PRESETS["big"])
    assert big == {"max_tokens": 8192, "global_tokens": 131072, "lr": 1.976e-3, "warmup_steps": 1000}
    updates = {k: script.update_freq(argparse.Namespace(**big), k) for k in (1, 2, 5, 16, 32)}
    assert updates == {1: 16, 2: 8, 5: 3, 16: 1, 32: 1}
