"""Task 5a's script on a few sentences: resumed, on several workers, with each optimizer."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable
import torch.nn.functional as F

from mlbench_core.errors import ConfigurationError
from mlbench_core.models.pytorch.gpt import GPT, GPTConfig
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import load_script
from tests.helpers.tasks import train_task

TEXT = b"It is a truth universally acknowledged, that a text of a few words repeats itself. " * 60
SMALL = GPTConfig(layers=1, heads=2, width=16, context=16, vocabulary=256)
STEPS = 6


@pytest.fixture
def script() -> Iterator[ModuleType]:
    yield load()
    del sys.modules["task5a_main"]


def load() -> ModuleType:
    """The script with a smaller model and fewer steps in the preset ``tiny``."""
    script = load_script("5a")
    script.plans.PRESETS["tiny"] = dataclasses.replace(
        script.plans.PRESETS["tiny"], context=16, global_tokens=8 * 16, max_tokens=4 * 16,
        steps=STEPS, warmup_steps=2, validate_every=2, validation_tokens=21 * 16, lr=0.02,
    )  # fmt: skip
    script.GPTConfig = type("Small", (), {"preset": staticmethod(lambda name: SMALL)})
    return script


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for part in ("train", "valid"):
        (folder / f"{part}.txt").write_bytes(TEXT)
    return folder


def parsed(script: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(gpu=False)
    script.add_arguments(parser)
    args = parser.parse_args(arguments)
    script.plans.take_defaults(args)
    return args


def train(
    script: ModuleType,
    text: Path,
    folder: Path,
    *arguments: str,
    rank: int = 0,
    world_size: int = 1,
) -> Tracker:
    """What the script does on one worker once the backend is there; it never reaches its goal."""
    args = parsed(script, "--preset", "tiny", "--precision", "fp32", "--past-goal", *arguments)
    return train_task(script, args, text, folder, rank=rank, world_size=world_size)


def checkpoint(folder: Path, epoch: int, rank: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{epoch}_{rank}.pth.tar", weights_only=True)
    return loaded


@pytest.mark.usefixtures("one_thread")
def test_a_run_resumed_within_the_text_is_bit_identical(
    script: ModuleType, text: Path, tmp_path: Path
) -> None:
    tracker = train(script, text, tmp_path / "whole", "--checkpoint")
    train(script, text, tmp_path / "parted", "--checkpoint", "--epochs", "1")
    train(script, text, tmp_path / "parted", "--checkpoint", "--resume")
    whole, parted = (checkpoint(tmp_path / run, 3) for run in ("whole", "parted"))
    for part in ("model", "optimizer", "scheduler", "extra"):
        assert_equal(whole[part], parted[part])
    assert whole["scheduler"]["last_epoch"] == STEPS
    # All steps together read less than the text, so the run was interrupted within it.
    tokens = STEPS * 8 * 16
    assert tokens < len(TEXT)
    assert tracker.totals()["tokens"] == tokens


@pytest.mark.usefixtures("one_thread")
def test_it_learns_and_reports_the_bits_of_the_first_bytes(
    script: ModuleType, text: Path, tmp_path: Path
) -> None:
    tracker = train(script, text, tmp_path, "--checkpoint", "--steps", "40", "--epochs", "20")
    bits = list(tracker.records["val_global_BitsPerByte"].values())
    assert bits[0] > 6.5 and bits[-1] < 4.5
    model = GPT(SMALL)
    model.load_state_dict(checkpoint(tmp_path, 20)["model"])
    first = torch.tensor(list(TEXT[: 21 * 16 + 1]))
    with torch.no_grad():
        scores = model(first[:-1].view(21, 16)).double()
    loss = F.cross_entropy(scores.flatten(0, 1), first[1:])
    assert bits[-1] == pytest.approx(loss.item() / math.log(2), rel=1e-5)


def one_run(rank: int, world_size: int, text: str, folder: str) -> tuple[Any, float]:
    tracker = train(
        load(), Path(text), Path(folder), "--checkpoint", rank=rank, world_size=world_size
    )
    return checkpoint(Path(folder), 3, rank)["model"], tracker.best_metric_value


def test_two_workers_have_one_model_and_one_result(text: Path, tmp_path: Path) -> None:
    (weights, bits), others = run_ranks(2, one_run, str(text), str(tmp_path))
    assert_equal(weights, others[0])
    assert bits == others[1]


def train_with_each(rank: int, world_size: int, text: str, folder: str) -> dict[str, list[float]]:
    script, found = load(), {}
    script.plans.PRESETS["tiny"] = dataclasses.replace(
        script.plans.PRESETS["tiny"], validate_every=8
    )
    for name in get_task("5a").optimizers:
        tracker = train(
            script, Path(text), Path(folder, name), "--optimizer", name, "--steps", "24",
            "--epochs", "3", rank=rank, world_size=world_size,
        )  # fmt: skip
        found[name] = list(tracker.records["val_global_BitsPerByte"].values())
    return found


def test_every_optimizer_learns(text: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, train_with_each, str(text), str(tmp_path))
    assert first == second, "the workers validate one model"
    slow = {name: bits for name, bits in first.items() if not bits[-1] < 7.0}
    assert not slow, f"a guess needs 8 bits: {slow}"
    # DDP and the task's own optimizer are two ways to the same numbers, up to the order of sums.
    assert first["ddp"] == pytest.approx(first["adamw"], rel=1e-3)


def test_the_list_of_optimizers_is_that_of_the_task(script: ModuleType) -> None:
    names = {*script.methods.METHODS, script.methods.DDP}
    assert sorted(get_task("5a").optimizers) == sorted(names)


@pytest.mark.parametrize("method", ["muon", "normuon", "dion2", "dion3"])
def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_embedding(
    script: ModuleType, method: str
) -> None:
    model = GPT(SMALL)
    optimizer = script.methods.make_optimizer(model, 0.01, method)
    rates = {group["use_muon"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {False: 0.01, True: 0.04 if method.startswith("dion") else 0.01}
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_adam = "exp_avg" in optimizer.state[parameter]
        assert is_adam == (name == "embedding.weight"), name


@pytest.mark.parametrize("name", ["adamw", "ddp", "muon", "dion2"])
def test_the_gradient_is_clipped_to_the_norm_1(
    script: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPT(SMALL)
    optimizer = script.methods.make_optimizer(model, 0.01, name)
    (model(torch.zeros(1, 4, dtype=torch.int64)).sum() * 100).backward()
    optimizer.step()
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    assert norms.norm().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("preset", ["gpt2", "mini", "tiny"])
def test_workers_and_accumulation_divide_the_global_batch(preset: str) -> None:
    plan = load_script("5a").plans.PRESETS[preset]
    sequences = plan.global_tokens // plan.context
    assert sequences * plan.context == plan.global_tokens
    for workers in range(1, 257):
        if workers > sequences:
            with pytest.raises(ConfigurationError, match=f"workers must be at most {sequences}"):
                plan.divided(workers)
            continue
        size, frequency = plan.divided(workers)
        assert size * plan.context <= plan.max_tokens
        taken = workers * size * frequency
        # No other size with as many batches would be nearer.
        assert abs(taken - sequences) <= workers * frequency / 2
        if sequences % workers == 0:
            assert taken == sequences


def test_every_schedule_has_whole_validations(script: ModuleType) -> None:
    for plan in load_script("5a").plans.PRESETS.values():
        assert plan.steps % plan.validate_every == 0
    gpt2 = load_script("5a").plans.PRESETS["gpt2"]
    assert gpt2.steps / gpt2.validate_every == get_task("5a").max_epochs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "mini", "--dataset", "fineweb10b"],
         "--dataset must be wikitext2 with --preset mini, not fineweb10b"),
        (["--preset", "gpt2", "--dataset", "wikitext2"], "--dataset must be fineweb10b"),
        (["--max-tokens", "1000"], "--max-tokens must be at least 1024, a sequence, not 1000"),
    ],
)  # fmt: skip
def test_arguments_that_contradict_the_preset_are_named(
    script: ModuleType, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parsed(script, *arguments)


def test_defaults_are_those_of_the_preset(script: ModuleType) -> None:
    assert (parsed(script).preset, parsed(script).dataset) == ("gpt2", "fineweb10b")
    args = parsed(script, "--dataset", "wikitext2")
    assert (args.preset, args.epochs) == ("mini", 30)
    assert parsed(script, "--preset", "mini", "--steps", "90").epochs == 3
