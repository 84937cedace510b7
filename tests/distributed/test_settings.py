"""Logging, seeds and the folder of checkpoints."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from mlbench_core.distributed.pytorch.settings import config_logging, config_path, config_pytorch
from mlbench_core.errors import ConfigurationError


@pytest.fixture
def generators_kept() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def test_logging_to_a_file_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, logger = logging.getLogger(), logging.getLogger("mlbench")
    before = list(root.handlers), root.level, list(logger.handlers), logger.level, logger.propagate
    path = tmp_path / "logs" / "run.log"
    undo = config_logging("debug", path)
    try:
        assert len(logger.handlers) == 2
        logger.debug("halfway")
        logging.getLogger("mlbench_core.some.module").warning("careful")
    finally:
        undo()
    lines = path.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "mlbench:0 DEBUG: halfway",
        "mlbench_core.some.module:0 WARNING: careful",
    ]
    assert capsys.readouterr().err.count("halfway") == 1
    assert (
        list(root.handlers),
        root.level,
        list(logger.handlers),
        logger.level,
        logger.propagate,
    ) == before


def test_a_second_call_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    undo_first = config_logging("INFO")
    undo_second = config_logging("INFO")
    logging.getLogger("mlbench").info("once")
    undo_second()
    undo_first()
    assert capsys.readouterr().err.count("once") == 1
    assert logging.getLogger("mlbench").handlers == []


def test_logging_writes_no_file_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, MLBENCH_HOME=str(tmp_path)):
        config_logging()()
    assert list(tmp_path.iterdir()) == []


def test_logging_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"logging_level must be DEBUG, .* not 'LOUD'"):
        config_logging("LOUD")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        config_logging("INFO", tmp_path)
    assert logging.getLogger("mlbench").handlers == []


@pytest.mark.usefixtures("generators_kept")
def test_seed_zero_seeds() -> None:
    drawn, unseeded = [], []
    for _ in range(2):
        config_pytorch(seed=0)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
        config_pytorch()  # no seed: nothing is reseeded
        unseeded.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != unseeded[0]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_outside(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed must be .* not {seed}"):
        config_pytorch(seed=seed)


def test_config_pytorch_makes_the_graph() -> None:
    with mock.patch("mlbench_core.distributed.pytorch.settings.FCGraph") as graph:
        assert config_pytorch() == (0, 1, graph.return_value)
        graph.assert_called_once_with(0, 1, False)


def test_cudnn_is_made_deterministic_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    config_pytorch()
    assert not torch.backends.cudnn.deterministic
    config_pytorch(cudnn_deterministic=True)
    assert torch.backends.cudnn.deterministic


def test_only_checkpoints_are_deleted(tmp_path: Path) -> None:
    ours = ["0_0.pth.tar", "12_3.pth.tar", "model_best.pth.tar", ".saving_0.tmp"]
    theirs = ["notes.txt", "my_model.pth.tar", "1_0.pth.tar.bak"]
    for name in ours + theirs:
        (tmp_path / name).write_text("x")
    (tmp_path / "5_0.pth.tar").mkdir()
    config_path(tmp_path)
    assert len(list(tmp_path.iterdir())) == 8
    config_path(tmp_path, delete_existing_ckpts=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, "5_0.pth.tar"])


def test_the_folder_is_made_and_defaults_below_the_users(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, MLBENCH_HOME=str(tmp_path)):
        config_path(None)
    assert (tmp_path / "checkpoints").is_dir()
    config_path(str(tmp_path / "a" / "b"), delete_existing_ckpts=True)
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="give a ckpt_run_dir"):
        config_path(tmp_path / "file" / "below")
