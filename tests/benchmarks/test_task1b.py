"""Task 1b's script on a few small images: resumed, on two workers, and from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.controlflow.task_arguments import task_main
from mlbench_core.dataset.imagerecognition.pytorch import CenterCrop, RandomCrop
from mlbench_core.errors import ConfigurationError, DatasetNotFoundError
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.updates.lars import LARS
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker
from tests.benchmarks.test_task1a import assert_equal
from tests.helpers.forked import run_script
from tests.helpers.jpegs import write_jpegs, write_tar
from tests.helpers.processes import free_port
from tests.helpers.scripts import load_script
from tests.helpers.tasks import train_task

SCRIPT = get_task("1b").script


@pytest.fixture
def script() -> Iterator[ModuleType]:
    yield load_script("1b")
    for name in ("task1b_main", "recipe"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of different colors."""
    folder = tmp_path_factory.mktemp("images")
    write_jpegs(folder / "train", classes=6, per_class=8)
    write_jpegs(folder / "val", classes=6, per_class=2, seed=1)
    return folder


def parse(script: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    args = parser.parse_args(arguments)
    script.recipe.take_defaults(args)
    return args


def train(script: ModuleType, images: Path, folder: Path, *arguments: str) -> Tracker:
    """Train as the script does on one worker, with crops of 32 pixels in a quarter of the time."""
    script.recipe.PRESETS["small"] = dataclasses.replace(
        script.recipe.PRESETS["small"],
        train=RandomCrop(32, min_area=0.35),
        validation=CenterCrop(32, resize=32),
    )
    args = parse(
        script, "--preset", "small", "--batch-size", "16", "--checkpoint", "--past-goal", *arguments
    )
    return train_task(script, args, images, folder)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--optimizer", "sgd", "--precision", "bf16"),
        ("--optimizer", "lars", "--overlap", "--decay", "step"),
    ],
    ids=["sgd", "lars"],
)
def test_resumed_run_is_bit_identical(
    script: ModuleType, images: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    tracker = train(script, images, tmp_path / "whole", *arguments, "--epochs", "2")
    (tmp_path / "parted").mkdir()
    shutil.copy(
        tmp_path / "whole" / "1_0.pth.tar", tmp_path / "parted"
    )  # as if it had been stopped after an epoch
    train(script, images, tmp_path / "parted", *arguments, "--epochs", "2", "--resume")
    whole, parted = (
        torch.load(tmp_path / run / "2_0.pth.tar", weights_only=True) for run in ("whole", "parted")
    )
    for part in ("model", "optimizer", "scheduler"):
        assert_equal(whole[part], parted[part])
    assert tracker.current_epoch == 2
    assert whole["scheduler"]["last_epoch"] == 2 * (48 // 16)


@pytest.mark.usefixtures("one_thread")
def test_it_learns_classes_of_different_colors(
    script: ModuleType, images: Path, tmp_path: Path
) -> None:
    tracker = train(script, images, tmp_path, "--epochs", "5", "--lr", "0.02")
    assert tracker.best_metric_value > 60  # a sixth by chance
    names = {name for _, name, *_ in tracker.history}
    assert {"val_global_Prec@1", "val_global_Prec@5"} <= names


def test_two_workers_by_torchrun(images: Path, tmp_path: Path) -> None:
    done = run_script(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(SCRIPT), "--run_id", "1", "--backend", "gloo", "--data", str(images), "--preset",
         "small",
         "--batch-size", "8", "--epochs", "1", "--root-checkpoint", str(tmp_path / "ckpt"),
         "--root-output", str(tmp_path / "out")],
        timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert re.search(
        "48 images for training, 12 for validation, decoded by (torchvision|Pillow)", log
    ), log
    assert list((tmp_path / "ckpt").rglob("model_best.pth.tar"))


def test_images_in_parts_and_in_one_tar_file(
    script: ModuleType, images: Path, tmp_path: Path
) -> None:
    train_images, validation = script.find_images(str(images), "small")
    assert (len(train_images), len(validation)) == (48, 12)
    write_tar(tmp_path / "images.tar", images / "train")
    parts = script.find_images(str(tmp_path), "small")
    again = script.find_images(str(tmp_path), "small")
    names = [[part.name(i) for i in range(len(part))] for part in parts]
    assert names == [[part.name(i) for i in range(len(part))] for part in again]
    assert [len(part) for part in names] == [36, 12]  # a fifth of each class, rounded
    assert len({*names[0], *names[1]}) == 48
    assert [part.targets.tolist().count(3) for part in parts] == [6, 2]


def test_wrong_images_are_refused(script: ModuleType, images: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="train does not exist, nor do tar files"):
        script.find_images(str(tmp_path), "full")
    with pytest.raises(ConfigurationError, match="has 6 classes, not the 1,000 of ImageNet: use"):
        script.find_images(str(images), "full")
    shutil.copytree(images, tmp_path / "fewer")
    shutil.rmtree(tmp_path / "fewer" / "val" / "n02")
    with pytest.raises(ConfigurationError, match="have different classes, 6 and 5"):
        script.find_images(str(tmp_path / "fewer"), "small")


def test_the_network_is_that_of_the_task(script: ModuleType) -> None:
    with torch.device("meta"):
        model = get_resnet_model("resnet50", 1, "fp32")
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    # Stride 2 in the 3x3 convolution, as in MLPerf's network.
    assert model.layer2[0].conv2.stride == (2, 2)  # type: ignore[union-attr, index]
    small = get_resnet_model("resnet18_imagenet", 1, "fp32", num_classes=10)
    script.recipe.zero_last_norms(small)
    for stage in (small.layer1, small.layer4):
        for block in stage:  # type: ignore[union-attr]
            assert block.bn2.weight.count_nonzero() == 0
            assert block.bn1.weight.min() == 1


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_biases_and_batch_norm_have_no_weight_decay_and_no_rate_of_their_own(
    script: ModuleType, optimizer: str
) -> None:
    with torch.device("meta"):
        model = get_resnet_model("resnet50", 1, "fp32")
    made = script.recipe.make_optimizer(model, parse(script, "--optimizer", optimizer), 1.0)
    kernels, vectors = made.param_groups
    expected = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert {id(p) for p in kernels["params"]} == expected
    assert len(kernels["params"]) + len(vectors["params"]) == len(list(model.parameters()))
    assert (kernels["weight_decay"], vectors["weight_decay"]) == (
        {"sgd": 1e-4, "lars": 5e-5}[optimizer],
        0,
    )
    assert (kernels["momentum"], vectors["momentum"]) == (0.9, 0.9)
    if optimizer == "sgd":
        assert isinstance(made, torch.optim.SGD)
        assert kernels["nesterov"]
    else:
        assert isinstance(made, LARS)
        assert (kernels["use_lars"], vectors["use_lars"]) == (True, False)


def rates(script: ModuleType, *arguments: str, workers: int = 8, batches: int = 10) -> list[float]:
    args = parse(script, *arguments)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = script.recipe.make_scheduler(optimizer, args, workers, batches)
    return [scheduler.lr_at(t) for t in range(args.epochs * batches + 1)]


def test_rates_of_sgd_are_those_of_goyal_et_al(script: ModuleType) -> None:
    found = rates(script)
    assert found[0] == pytest.approx(0.1)
    assert found[25] == pytest.approx(0.45)  # halfway through the warm-up
    for epoch, rate in [
        (5, 0.8),
        (29.9, 0.8),
        (30, 0.08),
        (59.9, 0.08),
        (60, 0.008),
        (80, 0.0008),
        (90, 0.0008),
    ]:
        assert found[round(epoch * 10)] == pytest.approx(rate)


def test_rates_of_lars_fall_as_a_polynomial(script: ModuleType) -> None:
    found = rates(script, "--optimizer", "lars", workers=128)
    assert (found[0], found[50], found[-1]) == (0, pytest.approx(31.2), 0)
    assert found[50 + 425] == pytest.approx(31.2 / 4)
    assert max(rates(script, "--optimizer", "lars", workers=32)) == pytest.approx(15.6)
    assert max(rates(script, "--optimizer", "lars", "--lr", "7")) == 7


@pytest.mark.parametrize("epochs", ["1", "2", "7"])
@pytest.mark.parametrize("decay", ["step", "polynomial"])
def test_short_trainings_have_shorter_schedules(
    script: ModuleType, epochs: str, decay: str
) -> None:
    found = rates(script, "--epochs", epochs, "--decay", decay, workers=2, batches=3)
    assert max(found) == pytest.approx(0.2)
    assert found[-1] == pytest.approx(0.0 if decay == "polynomial" else 0.0002, abs=1e-9)


def test_task_1b_is_as_specified(script: ModuleType) -> None:
    task = get_task("task1b")
    assert (task.goal, task.light_goal, task.metric, task.minimize, task.max_epochs) == (
        75.9,
        70,
        "Prec@1",
        False,
        90,
    )
    assert (task.datasets, task.optimizers) == (("imagenet",), ("sgd", "lars"))
    assert script.LABEL_SMOOTHING == 0.1
    full = script.recipe.PRESETS["full"]
    assert (full.model, full.batch_size, full.epochs) == ("resnet50", 256, 90)
    assert (full.train, full.validation) == (RandomCrop(224, 0.08), CenterCrop(224, resize=256))
    args = parse(script)
    assert (args.epochs, args.batch_size, args.decay, args.optimizer) == (90, 256, "step", "sgd")
    assert parse(script, "--optimizer", "lars").decay == "polynomial"


def test_commands_of_the_readme_are_understood(script: ModuleType, tmp_path: Path) -> None:
    readme = SCRIPT.with_name("README.md").read_text().replace("\\\n", "")
    commands = re.findall(rf"{SCRIPT.parent.name}/main\.py (.*)", readme)
    commands += re.findall(r"--task 1b .*-- (.*)", readme)
    assert len(commands) == 6
    understood: list[Any] = []
    roots = [f"--root-{name}={tmp_path}" for name in ("dataset", "checkpoint", "output")]
    for command in commands:
        task_main(
            lambda args, **others: understood.append(args),
            "task1b",
            argv=[*shlex.split(command), *roots],
            add_arguments=script.add_arguments,
        )
    assert sorted(args.preset for args in understood) == ["full"] * 3 + ["small"] * 3
