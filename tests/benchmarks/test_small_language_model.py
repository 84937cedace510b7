"""The small language model of the sweeps: its model, its data and all of its optimizers."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import benchmarks
from mlbench_core.sweep.toml_file import load_sweep
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import train_task

FOLDER = Path(benchmarks.__file__).parent / "experiments"
TEXT = b"It is a truth universally acknowledged, that a text of a few words repeats itself. " * 60


def load_script() -> ModuleType:
    """The script, which lies outside of any package."""
    spec = importlib.util.spec_from_file_location(
        "small_language_model", FOLDER / "small_language_model.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


def write_text(folder: Path) -> None:
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_bytes(TEXT)


def test_no_byte_sees_a_later_one(script: ModuleType) -> None:
    model = script.ByteTransformer().eval()
    text = torch.randint(256, (2, script.LENGTH))
    changed = text.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_a_fair_guess_needs_8_bits(script: ModuleType) -> None:
    scores, text = torch.zeros(2, 3, 256), torch.randint(256, (2, 3))
    assert script.BitsPerByte()(scores, text).item() == pytest.approx(8)
    assert script.cross_entropy(scores, text).item() == pytest.approx(math.log(256))


def test_a_piece_is_followed_by_its_next_byte(script: ModuleType) -> None:
    text = torch.arange(200, dtype=torch.uint8)
    ((first, following),) = script.Pieces(text, torch.tensor([[5, 100]]))
    assert first[:, 0].tolist() == [5, 100]
    assert torch.equal(following, first + 1)


def test_the_parts_of_the_workers_are_disjoint(script: ModuleType) -> None:
    text = torch.arange(203) % 256
    parts = [script.part_of(text, rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [50] * 4
    assert torch.equal(torch.cat(parts), text[:200])


def test_a_missing_text_is_named(tmp_path: Path, script: ModuleType) -> None:
    with pytest.raises(
        script.DatasetNotFoundError, match=r"no valid.txt of WikiText-2 in .*: name its folder"
    ):
        script.read_bytes(tmp_path, "valid")


def test_the_sweep_has_optimizers_that_exist(script: ModuleType) -> None:
    sweep = load_sweep(FOLDER / "language_networks.toml")
    names = [variant.name for variant in sweep.variants]
    assert len(names) >= 12 and set(names) <= set(script.OPTIMIZERS)


def train_with_each(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, float]:
    """An epoch of a few steps with each of the optimizers; returns the bits per byte after it."""
    script, found = load_script(), {}
    script.STEPS = 8
    for name in names:
        args = parse(script, ["--data", folder, "--epochs", "1", "--optimizer", name])
        tracker = train_task(
            script, args, folder, f"{folder}/{name}", rank=rank, world_size=world_size
        )
        (found[name],) = tracker.records["val_global_BitsPerByte"].values()
    return found


def parse(script: ModuleType, arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    script.add_arguments(parser)
    return parser.parse_args(arguments)


def test_every_optimizer_learns(tmp_path: Path, script: ModuleType) -> None:
    write_text(tmp_path)
    first, second = run_ranks(2, train_with_each, str(tmp_path), list(script.OPTIMIZERS))
    assert first == second, "the workers validate one model"
    slow = {name: value for name, value in first.items() if value > 7.5}
    assert not slow, f"a guess needs 8 bits: {first}"
