"""Checkpoints: what lies on disk, what a kill or a full disk leaves, and resumed runs."""

from __future__ import annotations

import enum
import errno
import json
import logging
import math
import os
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mlbench_core.controlflow.pytorch.checkpoint import (
    Checkpointer,
    CheckpointFreq,
    remove_checkpoints,
)
from mlbench_core.errors import CheckpointError
from mlbench_core.evaluation.goals import (
    AccuracyAfterTime,
    task1_time_to_accuracy_goal,
    time_to_accuracy_goal,
)
from mlbench_core.tracking.tracker import Tracker
from tests.helpers.forked import run_script
from tests.helpers.thorough import THOROUGH


@pytest.fixture(autouse=True)
def generators_and_variables_kept(no_leaks: None) -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    with mock.patch.dict(
        os.environ
    ):  # the first torch optimizer of a process sets TORCHINDUCTOR_CACHE_DIR
        yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


class Run:
    """A small training run: dropout, momentum, a schedule, shuffled batches.

    Every generator is seeded and the learning rate is low, so that no run diverges: NaN would equal
    no NaN."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.order = torch.Generator().manual_seed(seed)
        data = torch.linspace(-1, 1, 48).reshape(12, 4)
        self.loader = DataLoader(
            TensorDataset(data), batch_size=4, shuffle=True, generator=self.order
        )
        self.tracker = Tracker([], "1", 0)
        self.tracker.start()

    def epoch(self) -> list[float]:
        losses = []
        self.tracker.train()
        for (batch,) in self.loader:
            self.tracker.batch_start()
            self.optimizer.zero_grad()
            noise = float(np.random.rand()) + random.random()  # noqa: NPY002
            loss = ((self.model(batch) - noise) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.tracker.batch_end()
            self.tracker.record_loss(loss.item(), len(batch))
            losses.append(loss.item())
        self.scheduler.step()
        self.tracker.epoch_end()
        return losses

    def state(self) -> tuple[Tracker, torch.nn.Module, torch.optim.Optimizer, Any]:
        return self.tracker, self.model, self.optimizer, self.scheduler


def _tracker(epoch: int) -> Any:
    return SimpleNamespace(current_epoch=epoch)


def _save(
    folder: Path, epoch: int, value: float, best: bool = False, rank: int = 0, freq: str = "all"
) -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, value)
    Checkpointer(folder, rank, CheckpointFreq(freq)).save(_tracker(epoch), model, None, None, best)


def _load(folder: Path, rank: int = 0, **arguments: Any) -> float:
    model = torch.nn.Linear(1, 1)
    Checkpointer.load(folder, rank, model, None, None, **arguments)
    return float(model.weight.item())


@pytest.mark.parametrize(
    "goal", [time_to_accuracy_goal(70.5), AccuracyAfterTime(0.0), task1_time_to_accuracy_goal, None]
)
def test_a_tracker_made_from_a_checkpoint_has_its_goal_and_judges_its_metrics(
    tmp_path: Path, goal: Any
) -> None:
    accuracy = SimpleNamespace(name="Prec@1")
    before = Tracker([accuracy], "1", 0, goal)
    before.validation()
    before.record_metric(accuracy, 60.0)
    Checkpointer(tmp_path, 0, CheckpointFreq.ALL).save(
        before, torch.nn.Linear(1, 1), None, None, True
    )
    tracker = Checkpointer.load(tmp_path, 0, torch.nn.Linear(1, 1), None, None)[4]
    assert tracker.goal == before.goal
    tracker.validation()
    tracker.record_metric(accuracy, 80.0)
    tracker.record_stat("global_Prec@1", 80.0)
    assert tracker.is_best()
    assert tracker.best_metric_value == 80.0
    assert tracker.goal_reached == (goal is not None)


def test_a_goal_that_is_code_is_missed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def goal(metric_name: str, value: float, tracker: Tracker) -> str | None:
        return None

    Checkpointer(tmp_path, 0, CheckpointFreq.ALL).save(
        Tracker([], "1", 0, goal), torch.nn.Linear(1, 1), None, None, True
    )
    own = Tracker([], "1", 0, goal)
    Checkpointer.load(tmp_path, 0, torch.nn.Linear(1, 1), None, None, tracker=own)
    assert caplog.messages == []
    assert Checkpointer.load(tmp_path, 0, torch.nn.Linear(1, 1), None, None)[4].goal is None
    assert "has no goal now, because code is not saved: set tracker.goal" in caplog.messages[0]


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    whole = Run()
    checkpointer = Checkpointer(tmp_path, 0, CheckpointFreq.ALL)
    for _ in range(3):
        whole.epoch()
    checkpointer.save(*whole.state(), is_best=False, sampler=whole.order)
    expected = [whole.epoch() for _ in range(3)]
    assert np.isfinite(expected).all()

    resumed = Run(seed=99)
    torch.rand(7), random.random(), np.random.rand(3)  # noqa: NPY002
    found, model, optimizer, scheduler, tracker = Checkpointer.load(
        tmp_path, 0, resumed.model, resumed.optimizer, resumed.scheduler, sampler=resumed.order
    )
    assert (
        model is resumed.model and optimizer is resumed.optimizer and scheduler is resumed.scheduler
    )
    assert isinstance(tracker, Tracker)
    assert (tracker.current_epoch, found.freq, found.save_stats) == (3, CheckpointFreq.ALL, True)
    assert tracker.get_total_train_time() > 0
    resumed.tracker = tracker
    assert [resumed.epoch() for _ in range(3)] == expected
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr() != [0.01]
    assert resumed.tracker.current_epoch == whole.tracker.current_epoch


def test_a_tracker_of_the_callers_is_restored(tmp_path: Path) -> None:
    run = Run()
    run.epoch()
    Checkpointer(tmp_path, 0, CheckpointFreq.ALL).save(*run.state(), is_best=False)
    mine = Tracker([], "1", 0)
    *_, tracker = Checkpointer.load(tmp_path, 0, run.model, None, None, tracker=mine)
    assert tracker is mine
    assert mine.current_epoch == run.tracker.current_epoch


def test_files_hold_no_code_and_no_tracker_without_save_stats(tmp_path: Path) -> None:
    run = Run()
    Checkpointer(tmp_path, 2, CheckpointFreq.ALL, save_stats=False).save(*run.state(), is_best=True)
    assert [path.name for path in tmp_path.iterdir()] == [
        "0_2.pth.tar"
    ]  # rank 0 writes the best one
    state = torch.load(tmp_path / "0_2.pth.tar", weights_only=True)
    assert state["tracker"] is None
    assert state["model"].keys() == run.model.state_dict().keys()
    checkpointer, *_, tracker = Checkpointer.load(
        tmp_path, 2, run.model, run.optimizer, run.scheduler
    )
    assert tracker is None
    assert not checkpointer.save_stats
    mine = Tracker([], "1", 2)
    mine.current_epoch = 7
    assert Checkpointer.load(tmp_path, 2, run.model, None, None, tracker=mine)[-1] is mine
    assert mine.current_epoch == 0


@pytest.mark.parametrize(
    ("freq", "names"),
    [
        (CheckpointFreq.ALL, ["0_0.pth.tar", "1_0.pth.tar", "2_0.pth.tar", "model_best.pth.tar"]),
        (CheckpointFreq.BEST, ["model_best.pth.tar"]),
        (CheckpointFreq.NONE, []),
    ],
)
def test_what_each_frequency_keeps(tmp_path: Path, freq: CheckpointFreq, names: list[str]) -> None:
    for epoch, best in enumerate([True, True, False]):
        _save(tmp_path, epoch, float(epoch), best, freq=freq.value)
    assert sorted(os.listdir(tmp_path)) == names
    assert [Checkpointer.checkpoint_exists(tmp_path, 0, epoch) for epoch in range(4)] == [
        f"{epoch}_0.pth.tar" in names for epoch in range(4)
    ]
    if names:
        best_model = torch.load(tmp_path / "model_best.pth.tar", weights_only=True)["model"]
        assert best_model["weight"].item() == 1.0  # epoch 2 was worse


def test_a_best_file_alone_loads_on_every_rank(tmp_path: Path) -> None:
    _save(tmp_path, 4, 4.5, best=True, freq="best")
    assert _load(tmp_path, rank=0) == 4.5
    state = torch.get_rng_state()
    assert _load(tmp_path, rank=3) == 4.5
    fresh = torch.Generator()
    fresh.set_state(state)
    torch.nn.init.uniform_(torch.empty(1, 1), generator=fresh)  # rank 3 keeps its own generator
    saved = torch.load(tmp_path / "model_best.pth.tar", weights_only=True)
    assert not torch.equal(torch.get_rng_state(), saved["rng"]["torch"])


def test_the_newest_epoch_of_the_own_rank_is_loaded(tmp_path: Path) -> None:
    for epoch in (2, 9, 10):
        _save(tmp_path, epoch, float(epoch))
    _save(tmp_path, 11, 11.0, rank=1)
    assert _load(tmp_path) == 10.0
    assert _load(tmp_path, epoch=2) == 2.0
    model = torch.nn.Linear(1, 1)
    assert Checkpointer.load_model_by_epoch(tmp_path, 0, 9, model) is model
    assert model.weight.item() == 9.0


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_a_bit_of_a_tensor(path: Path) -> None:
    data = bytearray(path.read_bytes())
    position = data.index(torch.tensor(2.0).numpy().tobytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _empty, _flip_a_bit_of_a_tensor])
def test_a_damaged_file_is_noticed(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 1, 1.0)
    _save(tmp_path, 2, 2.0)
    newest = tmp_path / "2_0.pth.tar"
    damage(newest)
    with caplog.at_level(logging.WARNING):
        assert _load(tmp_path) == 1.0
    assert str(newest) in caplog.text
    with pytest.raises(CheckpointError, match=r"2_0\.pth\.tar.*damaged"):
        Checkpointer.load_model_by_epoch(tmp_path, 0, 2, torch.nn.Linear(1, 1))
    damage_all = [path for path in tmp_path.iterdir() if path != newest]
    for path in damage_all:
        _truncate(path)
    with pytest.raises(CheckpointError, match=r"2_0\.pth\.tar.*1_0\.pth\.tar"):
        _load(tmp_path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"format": 1, "model": Bomb()}, tmp_path / "0_0.pth.tar")
    with pytest.raises(CheckpointError, match="pickled code, which is not run"):
        _load(tmp_path)
    (tmp_path / "0_0.pth.tar").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        _load(tmp_path)
    torch.save([1], tmp_path / "0_0.pth.tar")
    with pytest.raises(CheckpointError, match="format 'list'"):
        _load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nothing_to_load(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="no checkpoint of rank 0 in") as caught:
            _load(folder)
        assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointError, match=r"of epoch 3 of rank 0.*3_0\.pth\.tar"):
        Checkpointer.load_model_by_epoch(tmp_path, 0, 3, torch.nn.Linear(1, 1))


def test_a_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    _save(tmp_path, 0, 1.0)
    with pytest.raises(CheckpointError, match=r"0_0\.pth\.tar does not fit the model"):
        Checkpointer.load(tmp_path, 0, torch.nn.Linear(2, 1), None, None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(CheckpointError, match="has no state of optimizer"):
        Checkpointer.load(tmp_path, 0, torch.nn.Linear(1, 1), optimizer, None)


@pytest.mark.parametrize("where", ["os.fsync", "os.replace"])
def test_a_full_disk_leaves_the_file_before(tmp_path: Path, where: str) -> None:
    _save(tmp_path, 0, 1.0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch(where, side_effect=full),
        pytest.raises(CheckpointError, match=r"0_0\.pth\.tar.*No space left"),
    ):
        _save(tmp_path, 0, 2.0)
    assert os.listdir(tmp_path) == ["0_0.pth.tar"]
    assert _load(tmp_path) == 1.0


FULL_DISK = """
import resource, signal, sys, torch
from types import SimpleNamespace
from mlbench_core.errors import CheckpointError
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpointer = Checkpointer(sys.argv[1], 0, CheckpointFreq.ALL)
checkpointer.save(SimpleNamespace(current_epoch=0), torch.nn.Linear(1, 1), None, None, False)
larger = torch.nn.Linear(1000, 100)
try:
    checkpointer.save(SimpleNamespace(current_epoch=0), larger, None, None, False)
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(FULL_DISK)
    folder.mkdir()
    run = run_script([str(script), str(folder)], timeout_s=240)
    assert run.returncode == 0, run.stderr
    assert "0_0.pth.tar could not be written" in run.stdout
    assert os.strerror(errno.EFBIG) in run.stdout
    assert os.listdir(folder) == ["0_0.pth.tar"]
    Checkpointer.load(folder, 0, torch.nn.Linear(1, 1), None, None)


KILLS = """
import os, random, select, signal, sys, time, traceback
from types import SimpleNamespace
import torch
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq

torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])
checkpointer = Checkpointer(folder, 0, CheckpointFreq.ALL)
model = torch.nn.Linear(20, 20)
done = interrupted = best_before = 0


def save_on_and_on(epoch, acknowledge):
    while True:
        epoch += 1
        with torch.no_grad():
            model.weight.fill_(epoch)
        checkpointer.save(SimpleNamespace(current_epoch=epoch), model, None, None, is_best=True)
        os.write(acknowledge, b"+")


def wait_for(acknowledgements, count):
    # returns how long the last of them took, in seconds
    duration = 0.0
    for _ in range(count):
        start = time.perf_counter()
        assert select.select([acknowledgements], [], [], 60)[0], "no save within a minute"
        assert os.read(acknowledgements, 1), "the child died"
        duration = time.perf_counter() - start
    return duration


for attempt in range(20 * kills):
    if attempt >= kills and interrupted:  # enough kills, and at least one of them hit a file
        break
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_on_and_on(done, writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    saves = random.randint(1, 3)
    duration = wait_for(reading, saves)
    time.sleep(random.uniform(0, 2 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledged = done + saves
    while chunk := os.read(reading, 65536):
        acknowledged += len(chunk)
    os.close(reading)
    interrupted += os.path.exists(os.path.join(folder, ".saving_0.tmp"))
    Checkpointer.load(folder, 0, model, None, None)
    done = int(model.weight[0, 0])
    assert bool((model.weight == done).all()), "a mixture of two epochs"
    assert acknowledged <= done <= acknowledged + 1, (acknowledged, done)
    best = torch.load(os.path.join(folder, "model_best.pth.tar"), weights_only=True)
    assert best_before <= best["epoch"] <= done
    best_before = best["epoch"]
    for name in os.listdir(folder):
        if name.endswith("_0.pth.tar") and int(name.split("_")[0]) < done:
            os.remove(os.path.join(folder, name))
print(done, interrupted)
"""


def test_killed_again_and_again_while_saving(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    folder.mkdir()
    kills = 100 if THOROUGH else 20
    run = run_script([str(script), str(folder), str(kills)], timeout_s=240)
    assert run.returncode == 0, run.stderr
    epochs, interrupted = map(int, run.stdout.split())
    assert epochs >= kills
    assert interrupted > 0  # kills did hit the writing of a file
    _save(folder, epochs + 1, 5.0)
    assert _load(folder) == 5.0
    assert ".saving_0.tmp" not in os.listdir(folder)


def test_states_are_made_plain_or_refused(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state["state"]

    class Color(str, enum.Enum):
        RED = "red"

    nested = {"a": torch.ones(2), "b": OrderedDict(c=Counter([3]))}
    plain = [1, (2.5, None), nested, {7}, np.float64(1.5), Color.RED, CheckpointFreq.ALL]
    saved, loaded = Holder(plain), Holder(None)
    checkpointer, model = Checkpointer(tmp_path, 0, CheckpointFreq.ALL), torch.nn.Linear(1, 1)
    checkpointer.save(_tracker(0), model, None, None, False, extra={"scaler": saved})
    Checkpointer.load(tmp_path, 0, model, None, None, extra={"scaler": loaded})
    assert repr(loaded.state) == repr([*plain[:4], 1.5, "red", 1])
    with pytest.raises(TypeError, match=r"scaler\['state'\] is a builtins.object"):
        checkpointer.save(_tracker(1), model, None, None, False, extra={"scaler": Holder(object())})
    with pytest.raises(TypeError, match="sampler is a int"):
        checkpointer.save(_tracker(1), model, None, None, False, sampler=3)
    assert not Checkpointer.checkpoint_exists(tmp_path, 0, 1)
    with pytest.raises(CheckpointError, match="no state of other"):
        Checkpointer.load(tmp_path, 0, model, None, None, extra={"other": loaded})


def test_the_epoch_of_a_distributed_sampler_is_kept(tmp_path: Path) -> None:
    def make() -> DistributedSampler[Any]:
        return DistributedSampler(range(10), num_replicas=2, rank=0)  # type: ignore[arg-type]

    sampler, resumed = make(), make()
    sampler.set_epoch(5)
    model = torch.nn.Linear(1, 1)
    Checkpointer(tmp_path, 0, CheckpointFreq.ALL).save(
        _tracker(5), model, None, None, False, sampler=sampler
    )
    Checkpointer.load(tmp_path, 0, model, None, None, sampler=resumed)
    assert list(resumed) == list(sampler) != list(make())


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"freq must be one of .* not 'often'"):
        Checkpointer(tmp_path, 0, "often")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank must be at least 0, not -1"):
        Checkpointer(tmp_path, -1)
    assert Checkpointer(tmp_path, 0).freq is CheckpointFreq.BEST


def test_frequencies_of_version_3(tmp_path: Path) -> None:
    for freq, number, text in zip(CheckpointFreq, (1, 2, 3), ("all", "best", "none"), strict=True):
        assert freq == number
        assert {Checkpointer(tmp_path, 0, given).freq for given in (freq, number, text)} == {freq}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        ((5, True), {}),  # 3.0.0
        ((5,), {"is_best": True}),
        ((), {"epoch": 5, "is_best": True}),
        ((np.int64(5), np.bool_(True)), {}),
    ],
)
def test_the_epoch_may_be_given_as_in_version_3(
    tmp_path: Path, positional: tuple[Any, ...], named: dict[str, Any]
) -> None:
    model, optimizer = torch.nn.Linear(1, 1), None
    Checkpointer(tmp_path, 0, CheckpointFreq.ALL).save(
        _tracker(1), model, optimizer, None, *positional, **named
    )
    assert sorted(os.listdir(tmp_path)) == ["5_0.pth.tar", "model_best.pth.tar"]
    assert torch.load(tmp_path / "5_0.pth.tar", weights_only=True)["epoch"] == 5


def test_all_arguments_by_name_or_without_an_epoch(tmp_path: Path) -> None:
    model, order = torch.nn.Linear(1, 1), torch.Generator().manual_seed(4)
    checkpointer = Checkpointer(tmp_path, 0, CheckpointFreq.ALL)
    checkpointer.save(
        tracker=_tracker(1), model=model, optimizer=None, scheduler=None, is_best=False
    )
    checkpointer.save(_tracker(2), model, None, None, 1)  # a number for a flag
    checkpointer.save(_tracker(3), model, None, None, False, order)
    assert sorted(os.listdir(tmp_path)) == [
        "1_0.pth.tar",
        "2_0.pth.tar",
        "3_0.pth.tar",
        "model_best.pth.tar",
    ]
    found = torch.Generator()
    Checkpointer.load(tmp_path, 0, model, None, None, sampler=found)
    assert torch.equal(found.get_state(), order.get_state())


@pytest.mark.parametrize("freq", list(CheckpointFreq))
def test_statistics_are_written_as_json(tmp_path: Path, freq: CheckpointFreq) -> None:
    run = Run()
    for save_stats in (False, True):
        run.epoch()
        run.tracker.record_stat("odd", math.inf)
        Checkpointer(tmp_path, 0, freq, save_stats).save(*run.state(), is_best=False)
    path = tmp_path / "2_0.json"
    assert list(tmp_path.glob("*.json")) == ([] if freq is CheckpointFreq.NONE else [path])
    if path.exists():
        found = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert (found["run_id"], found["rank"], found["epoch"]) == ("1", 0, 2)
        loss = run.tracker.records["train_loss"]
        assert found["records"]["train_loss"] == {
            str(epoch): value for epoch, value in loss.items()
        }
        assert found["records"]["train_odd"] == {"1": None, "2": None}
        remove_checkpoints(tmp_path)
        assert not os.listdir(tmp_path)


def test_a_model_may_be_compiled_or_no_longer(tmp_path: Path) -> None:
    compiled, plain = torch.compile(torch.nn.Linear(2, 1), backend="eager"), torch.nn.Linear(2, 1)
    Checkpointer(tmp_path, 0).save(_tracker(1), compiled, None, None, True)
    Checkpointer.load(tmp_path, 0, plain, None, None)
    assert torch.equal(plain.weight, compiled.weight)
    torch.nn.init.zeros_(compiled.weight)
    Checkpointer(tmp_path, 0).save(_tracker(2), plain, None, None, True)
    Checkpointer.load(tmp_path, 0, compiled, None, None)
    assert torch.equal(plain.weight, compiled.weight)
