"""Which files of several workers belong together: parts, kills between them, files of other
saves."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mlbench_core.controlflow.pytorch import checkpoint_files
from mlbench_core.controlflow.pytorch.checkpoint import (
    Checkpointer,
    CheckpointFreq,
    determine_restore_ckpt_path,
)
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import CheckpointError
from mlbench_core.optim.pytorch import EFSignSGD
from tests.helpers.forked import run_script

BEST, ALL = CheckpointFreq.BEST, CheckpointFreq.ALL


@contextlib.contextmanager
def world(size: int, run: str = "run1") -> Iterator[None]:
    """As if this process were one of several workers."""
    with (
        mock.patch.object(process_groups, "world_size", return_value=size),
        mock.patch.object(checkpoint_files, "name_run", return_value=run),
    ):
        yield


@pytest.fixture(autouse=True)
def generator_kept(no_leaks: None) -> Iterator[None]:
    state = torch.get_rng_state()
    with mock.patch.dict(
        os.environ
    ):  # the first torch optimizer of a process sets TORCHINDUCTOR_CACHE_DIR
        yield
    torch.set_rng_state(state)


class Worker:
    """A model whose weight is the epoch's number, and an optimizer whose memory is that of rank and
    epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = EFSignSGD(self.model.named_parameters(), lr=0.1, world_size=1)

    def save(
        self,
        folder: Path,
        epoch: int,
        freq: CheckpointFreq = BEST,
        size: int = 2,
        run: str = "run1",
    ) -> None:
        torch.nn.init.constant_(self.model.weight, epoch)
        with mock.patch.object(process_groups, "world_size", return_value=1):
            self.optimizer.aggregation.load_state_dict(
                {"memory": {"weight": torch.full((1, 1), memory(self.rank, epoch))}}
            )
        with world(size, run):
            Checkpointer(folder, self.rank, freq).save(
                SimpleNamespace(current_epoch=epoch), self.model, self.optimizer, None, is_best=True
            )

    def load(self, folder: Path, size: int = 2, **options: Any) -> tuple[float, float | None]:
        """The epoch that is loaded, and what is remembered."""
        self.optimizer.aggregation.load_state_dict({})
        with world(size):
            Checkpointer.load(folder, self.rank, self.model, self.optimizer, None, **options)
        error = self.optimizer.aggregation.memory("weight")
        return self.model.weight.item(), None if error is None else error.item()


def memory(rank: int, epoch: int) -> float:
    return 10.0 * epoch + rank


def workers(count: int) -> list[Worker]:
    return [Worker(rank) for rank in range(count)]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("freq", [BEST, ALL])
def test_a_kill_between_the_parts_leaves_the_save_before(
    tmp_path: Path, freq: CheckpointFreq, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    both = workers(2)
    for worker in both:
        worker.save(tmp_path, 1, freq)
    # Files of one step of the file system's clock, which may take milliseconds, are all kept.
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    both[first].save(tmp_path, 2, freq)  # and the other one was killed before it could
    for worker in both:
        assert worker.load(tmp_path) == (1.0, memory(worker.rank, 1))
    both[1 - first].save(tmp_path, 2, freq)
    caplog.clear()
    for worker in both:
        assert worker.load(tmp_path) == (2.0, memory(worker.rank, 2))
    assert not caplog.records
    names = sorted(os.listdir(tmp_path))
    if freq is BEST:  # the save before is gone
        assert names == [
            "model_best.2-run1-0.0of2.pth.tar",
            "model_best.2-run1-0.1of2.pth.tar",
            "model_best.pth.tar",
        ]
        assert os.path.samefile(tmp_path / names[0], tmp_path / names[2])


@pytest.mark.parametrize("freq", [BEST, ALL])
def test_parts_of_different_saves_are_not_mixed(
    tmp_path: Path, freq: CheckpointFreq, caplog: pytest.LogCaptureFixture
) -> None:
    both = workers(2)
    both[1].save(tmp_path, 3, freq, run="killed")
    both[0].save(tmp_path, 3, freq, run="again")
    kept = (
        memory(0, 3) if freq is ALL else None
    )  # rank 0's file of an epoch may lie in a folder that is not shared
    assert both[0].load(tmp_path) == (3.0, kept)
    caplog.clear()
    assert both[1].load(tmp_path) == (3.0, None)
    assert ["is reset" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("freq", [BEST, ALL])
def test_without_own_files_the_memory_starts_afresh(
    tmp_path: Path, freq: CheckpointFreq, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in workers(2):
        worker.save(tmp_path, 1, freq)
    third = Worker(2)
    assert third.load(tmp_path, size=3) == (1.0, None)
    assert "is of worker 0 of 2, and this is worker 2 of 3" in caplog.text
    assert len(caplog.records) == 1
    caplog.clear()
    assert Worker(1).load(tmp_path, size=3) == (
        1.0,
        None,
    )  # another number of workers: all of them start afresh
    assert len(caplog.records) == 1
    caplog.clear()
    for path in tmp_path.glob("*1of2*" if freq is BEST else "1_1*"):
        path.unlink()
    for worker in workers(2):
        kept = memory(0, 1) if freq is ALL and worker.rank == 0 else None
        caplog.clear()
        assert worker.load(tmp_path) == (1.0, kept)
        assert len(caplog.records) == (kept is None)


def test_a_file_of_an_older_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Worker(0).save(tmp_path, 1, size=1)
    path = tmp_path / "model_best.pth.tar"
    state = torch.load(path, weights_only=True)
    del state["save"], state["world_size"]
    torch.save({**state, "freq": "best"}, path)
    assert Worker(0).load(tmp_path, size=1) == (1.0, memory(0, 1))
    assert not caplog.records
    for worker in workers(2):
        caplog.clear()
        assert worker.load(tmp_path) == (1.0, None)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("freq", [BEST, ALL])
@pytest.mark.parametrize("damaged", [0, 1])
def test_all_workers_agree_on_a_damaged_save(
    tmp_path: Path, freq: CheckpointFreq, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    for epoch in (1, 2):
        for worker in workers(2):
            worker.save(tmp_path, epoch, freq)
    paths = {
        ALL: [tmp_path / "2_0.pth.tar", tmp_path / "2_1.pth.tar"],
        BEST: [tmp_path / "model_best.pth.tar", tmp_path / "model_best.2-run1-0.1of2.pth.tar"],
    }[freq]
    os.truncate(paths[damaged], paths[damaged].stat().st_size // 2)
    if damaged == 1:  # rank 0's is whole, so nobody goes back
        assert Worker(0).load(tmp_path) == (2.0, memory(0, 2))
        assert Worker(1).load(tmp_path) == (2.0, None)
        assert str(paths[1]) in caplog.text
    elif freq is ALL:
        for worker in workers(2):
            assert worker.load(tmp_path) == (1.0, memory(worker.rank, 1))
        assert str(paths[0]) in caplog.text
    else:
        for worker in workers(2):
            with pytest.raises(CheckpointError, match=r"model_best\.pth\.tar cannot be read"):
                worker.load(tmp_path)


def test_workers_without_a_shared_folder(tmp_path: Path) -> None:
    for epoch in (1, 2):
        Worker(1).save(tmp_path, epoch, ALL)
    assert Worker(1).load(tmp_path) == (2.0, memory(1, 2))
    assert Worker(1).load(tmp_path, epoch=1) == (1.0, memory(1, 1))


def test_workers_that_torch_does_not_know_have_files_of_their_own(tmp_path: Path) -> None:
    for worker in workers(2):
        worker.save(tmp_path, 1, ALL, size=1, run=f"run{worker.rank}")  # as with Horovod
    for worker in workers(2):
        assert worker.load(tmp_path, size=1) == (1.0, memory(worker.rank, 1))


def test_a_worker_that_torch_does_not_know_writes_no_part(tmp_path: Path) -> None:
    for worker in workers(2):
        worker.save(tmp_path, 1, size=1)
    assert os.listdir(tmp_path) == ["model_best.pth.tar"]


def test_partial_saves_do_not_pile_up(tmp_path: Path) -> None:
    both = workers(2)
    for worker in both:
        worker.save(tmp_path, 1)
    for epoch in range(2, 6):
        both[0].save(tmp_path, epoch, run=f"run{epoch}")
    assert sorted(os.listdir(tmp_path)) == [
        "model_best.1-run1-0.0of2.pth.tar",
        "model_best.1-run1-0.1of2.pth.tar",
        "model_best.5-run5-0.0of2.pth.tar",
        "model_best.pth.tar",
    ]
    for worker in both:
        assert worker.load(tmp_path) == (1.0, memory(worker.rank, 1))
    both[0].save(tmp_path, 6, size=1)
    assert os.listdir(tmp_path) == ["model_best.pth.tar"]


def test_an_epoch_that_is_saved_twice_makes_two_saves(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with world(2):
        checkpointer = Checkpointer(tmp_path, 1)
        for _ in range(2):
            checkpointer.save(SimpleNamespace(current_epoch=7), model, None, None, is_best=True)
    assert sorted(os.listdir(tmp_path)) == [
        "model_best.7-run1-0.1of2.pth.tar",
        "model_best.7-run1-1.1of2.pth.tar",
    ]


def test_a_file_system_without_links(tmp_path: Path) -> None:
    both = workers(2)
    with mock.patch("os.link", side_effect=OSError("not supported")):
        for epoch in (1, 2):
            for worker in both if epoch == 1 else both[:1]:
                worker.save(tmp_path, epoch)
    for worker in both:
        assert worker.load(tmp_path) == (1.0, memory(worker.rank, 1))


def test_the_path_to_restore(tmp_path: Path) -> None:
    run = tmp_path / "run7"
    for worker in workers(2):
        worker.save(run, 4, ALL)
    for root in (tmp_path, run):
        assert determine_restore_ckpt_path(1, root, "run7") == str(run / "4_1.pth.tar")
    assert determine_restore_ckpt_path(2, tmp_path, "run7") == str(run / "4_0.pth.tar")
    for worker in workers(2):
        worker.save(tmp_path / "best", 1)
    assert determine_restore_ckpt_path(1, tmp_path, "best") == str(
        tmp_path / "best" / "model_best.pth.tar"
    )
    with pytest.raises(FileNotFoundError, match="no checkpoint of rank 0 in"):
        determine_restore_ckpt_path(0, tmp_path, "another")


KILLS = """
import os, random, signal, sys, time
from unittest import mock
from types import SimpleNamespace
import torch
from mlbench_core.controlflow.pytorch import checkpoint_files
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer

torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])
mock.patch.object(process_groups, "world_size", return_value=2).start()


class Memory(torch.optim.SGD):
    agg_grad, own_state = False, ()


def make(rank, epoch):
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(epoch)
        model.bias.fill_(rank)
    return model, Memory(model.parameters(), lr=0.1)


def save_on_and_on(rank, epoch, acknowledge, permits):
    checkpointer = Checkpointer(folder, rank)
    while True:
        epoch += 1
        tracker = SimpleNamespace(current_epoch=epoch)
        checkpointer.save(tracker, *make(rank, epoch), None, is_best=True)
        os.write(acknowledge, b"+")
        os.read(permits, 1)  # as a collective would, of the next epoch


done = partial = 0
for attempt in range(20 * kills):
    if attempt >= kills and partial:  # enough kills, and at least one of them hit a save
        break
    mock.patch.object(checkpoint_files, "name_run", return_value=f"run{attempt}").start()
    children, acknowledgements, grants = [], [], []
    for rank in (0, 1):
        (reading, acknowledge), (permits, grant) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_on_and_on(rank, done, acknowledge, permits)
            finally:
                os._exit(1)
        children.append(child), acknowledgements.append(reading), grants.append(grant)
    whole = done
    for _ in range(random.randint(1, 3)):
        for reading in acknowledgements:
            assert os.read(reading, 1) == b"+"
        whole += 1
        for grant in grants:
            os.write(grant, b"+")
    time.sleep(random.uniform(0, 0.006))
    random.shuffle(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        time.sleep(random.choice([0, 0.002]))
    for child in children:
        os.waitpid(child, 0)
    loaded = set()
    for rank in (0, 1):
        model, optimizer = make(7, 7)
        Checkpointer.load(folder, rank, model, optimizer, None)
        assert bool((model.bias == rank).all()), (rank, model.bias)
        loaded.add(int(model.weight[0, 0]))
    done = loaded.pop()
    assert not loaded and whole <= done <= whole + 1, (done, loaded, whole)
    names = os.listdir(folder)
    partial += any(f"best.{done + 1}-" in name or name.endswith(".tmp") for name in names)
print(done, partial)
"""


def test_two_workers_killed_while_they_save(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(KILLS)
    run = run_script([str(script), str(folder), "8"], timeout_s=240)
    assert run.returncode == 0, run.stderr
    saves, partial = map(int, run.stdout.split())
    assert saves >= 8
    assert partial > 0
    assert len(list(folder.glob("model_best.*of2.pth.tar"))) <= 4
