"""Scripts in the style of mlbench-core 3.0 run as they are, with one and with two workers.

They call the library with the names, arguments and types of version 3.0, on small data.
"""

from __future__ import annotations

import lzma
import math
import random
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.compat30.on_small_data import CIFAR10_RECORDS
from tests.helpers.data import test_data
from tests.helpers.forked import run_scripts
from tests.helpers.processes import free_port
from tests.helpers.thorough import some

HERE = Path(__file__).parent
IMAGE_BYTES = 1 + 3 * 32 * 32


def run(script: str, world_size: int, folder: Path, *arguments: str) -> list[CompletedProcess[str]]:
    """Start a script once per worker with the command line of version 3.0; all must succeed."""
    hosts = ",".join(["127.0.0.1"] * world_size)
    roots = [
        word
        for root in ("dataset", "checkpoint", "output")
        for word in (f"--root-{root}", str(folder / root))
    ]
    workers = [
        [str(HERE / "on_small_data.py"), str(HERE / f"{script}.py"), "--run_id", "1", "--hosts",
         hosts,
         "--rank", str(rank), "--backend", "gloo", *roots, *arguments]
        for rank in range(world_size)
    ]  # fmt: skip
    done = run_scripts(workers, timeout_s=240, MASTER_PORT=str(free_port()))
    assert [worker.returncode for worker in done] == [0] * world_size, done
    return done


def results(done: list[CompletedProcess[str]]) -> list[list[str]]:
    """The words of the lines that worker 0 begins with "result"."""
    return [line.split()[1:] for line in done[0].stdout.splitlines() if line.startswith("result ")]


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """The first images of CIFAR-10 in the data folders of both scripts."""
    images = lzma.decompress(test_data("cifar10", "data_batch_1.bin.xz").read_bytes())
    size = CIFAR10_RECORDS * IMAGE_BYTES
    batches = [images[number * size : (number + 1) * size] for number in range(6)]
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for uid in ("allreduce", "ddp"):
        folder = tmp_path / "dataset" / "torch" / uid
        folder.mkdir(parents=True)
        for name, content in zip(names, batches, strict=True):
            (folder / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_task_0(world_size: int, tmp_path: Path) -> None:
    lines = results(run("backend_benchmark", world_size, tmp_path))
    assert [words[:3] for words in lines] == [
        [dtype, size, "True"]
        for dtype in ("torch.float32", "torch.float16")
        for size in ("1", "100", "10000")
    ]


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_task_1a(world_size: int, cifar10: Path) -> None:
    lines = results(run("resnet20_all_reduce", world_size, cifar10))
    assert len(lines) == 3
    assert all(0 <= float(accuracy) <= 100 for _, accuracy, *_ in lines)
    assert lines[0][3] == "True"
    best = max(float(accuracy) for _, accuracy, *_ in lines)
    assert float(lines[-1][4]) == pytest.approx(best)
    checkpoints = cifar10 / "checkpoint"
    assert {f"{epoch}_{rank}.pth.tar" for epoch in range(1, 4) for rank in range(world_size)} <= {
        path.name for path in checkpoints.rglob("*.pth.tar")
    }


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_task_1a_through_ddp(world_size: int, cifar10: Path) -> None:
    lines = results(run("resnet20_ddp", world_size, cifar10))
    assert len(lines) == 1
    assert float(lines[0][1]) > 0


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_task_2a(world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("lmdb", reason="the package lmdb is not installed")
    from mlbench_core.dataset.linearmodels.pytorch.synthetic_dense import write_synthetic_dense

    folder = tmp_path / "dataset" / "torch" / "allreduce"
    folder.mkdir(parents=True)
    for part, rows in (("train", 640), ("test", 160)):
        write_synthetic_dense(folder / f"epsilon_{part}.lmdb", 20, rows, data_type=part)
    done = run("logistic_regression", world_size, tmp_path, "--light")
    lines = results(done)
    losses = [float(loss) for _, _, loss, _ in lines]
    assert losses[-1] < losses[0]
    assert "goal reached" in done[0].stdout
    assert float(lines[-1][1]) >= 80
    assert re.fullmatch(r"0\.\d+", lines[-1][3])


@pytest.mark.parametrize("world_size", some([2, 1]))
def test_task_3a(world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "dataset" / "torch" / "allreduce" / "wikitext-2"
    folder.mkdir(parents=True)
    sentence = " the cat sat on the mat and the dog sat on the log . \n"
    for part, repetitions in (("train", 60), ("valid", 10), ("test", 10)):
        (folder / f"wiki.{part}.tokens").write_text(sentence * repetitions)
    lines = results(run("wikitext2_lstm", world_size, tmp_path))
    assert [line[0] for line in lines] == ["1", "2", "3"]
    perplexities = [float(perplexity) for _, perplexity, *_ in lines]
    assert max(perplexities) < 13  # of one of 13 words at random
    assert all(
        math.log(float(p)) == pytest.approx(float(loss), rel=0.05) for _, p, loss, _ in lines
    )


@pytest.mark.parametrize("world_size", some([2, 1]))
@pytest.mark.parametrize("script", ["wmt16_gnmt", "wmt17_transformer"])
def test_tasks_4a_and_4b(script: str, world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "dataset" / "torch" / "allreduce"
    folder.mkdir(parents=True)
    write_translations(folder)
    lines = results(run(script, world_size, tmp_path))
    assert len(lines) == 2
    updates, bleus, losses, scales = (
        list(map(float, column)) for column in zip(*lines, strict=True)
    )
    assert 0 < updates[0] < updates[1]
    assert all(0 <= bleu <= 100 for bleu in bleus)
    assert losses[1] < losses[0]
    assert scales[-1] >= 64


def write_translations(folder: Path) -> None:
    """Sentence pairs in the names of both archives of version 3.0, each word its own
    translation."""
    words = ["dog", "cat", "runs", "sleeps", "red", "blue", "small", "old"]
    draw = random.Random(0)
    for name, pairs in (("train", 36), ("train.tok.clean.bpe.32000", 36), ("newstest2013", 6),
                        ("newstest2014", 6),
                        ("newstest2014.tok.bpe.32000", 6), ("test", 6),
                        ("validation", 6)):  # fmt: skip
        text = "".join(
            " ".join(draw.choices(words, k=draw.randint(2, 6))) + "\n" for _ in range(pairs)
        )
        for lang in ("en", "de"):
            (folder / f"{name}.{lang}").write_text(text)
    (folder / "vocab.bpe.32000").write_text("".join(f"{word}\n" for word in words))
