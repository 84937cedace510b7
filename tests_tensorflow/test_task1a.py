"""Task 1a on TensorFlow, run as users run it, and a script in the style of version 3.0."""

from __future__ import annotations

import json
import lzma
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.table import compare_runs
from mlbench_core.results.folder import read_environment, read_result, verify_folder
from tests.helpers.data import test_data
from tests.helpers.processes import ROOT, environment, free_port

SCRIPT = str(ROOT / "benchmarks" / "task1a_tensorflow" / "main.py")
TIMEOUT_S = 200


def run(*words: str, world_size: int = 1) -> list[subprocess.CompletedProcess[str]]:
    """Start a script once per worker, as a launcher does."""
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                TF_CPP_MIN_LOG_LEVEL="2",
            ),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    done = []
    try:
        for worker in workers:
            out, error = worker.communicate(timeout=TIMEOUT_S)
            done.append(subprocess.CompletedProcess(worker.args, worker.returncode, out, error))
    finally:
        for worker in workers:
            worker.kill()
    return done


def train(folder: Path, world_size: int, *arguments: str) -> dict[str, Any]:
    roots = [
        word
        for root in ("dataset", "checkpoint", "output")
        for word in (f"--root-{root}", str(folder / root))
    ]
    done = run(SCRIPT, "--run_id", str(world_size), "--dataset", "digits", "--image-size", "8",
    *roots, *arguments,
               world_size=world_size)  # fmt: skip
    assert [worker.returncode for worker in done] == [0] * world_size, done
    found = folder / "output" / "task1a" / str(world_size)
    assert verify_folder(found) == []
    return read_result(found)


def test_one_and_two_workers_leave_results_that_stand_in_one_table(tmp_path: Path) -> None:
    results = [train(tmp_path, workers, "--epochs", "2") for workers in (1, 2)]
    for workers, result in enumerate(results, 1):
        assert result["run"]["state"] == "finished"
        configuration = result["configuration"]
        assert configuration["task"] == "1a"
        assert (configuration["workers"], configuration["algorithm"], configuration["backend"]) == (
            workers, "tensorflow_mirrored", "grpc",
        )  # fmt: skip
        assert configuration["goal"] == {
            "metric": "val_global_Prec@1",
            "threshold": 95.0,
            "minimize": False,
        }
        assert (configuration["threads"], configuration["changed"]) == (1, ["image_size"])
        assert result["software"]["tensorflow"]
        assert result["software"]["torch"] is None
        assert (result["epochs"], result["batches"], result["samples"]) == (
            2,
            2 * math.ceil(12 / workers),
            2 * 1438,
        )
    alone, together = results
    # 272,474 float32 numbers in each of the 12 batches.
    assert (alone["bytes_sent"]["all_workers"], together["bytes_sent"]["rank_0"]) == (
        0,
        12 * 4 * 272_474,
    )
    assert together["collectives"] == [
        {
            "op": "all_reduce",
            "group": 2,
            "calls": 12,
            "bytes": 12 * 4 * 272_474,
            "overlapped": False,
        }
    ]
    assert set(together["steps_s"]["rank_0"]) == {
        "batch_load",
        "backprop",
        "agg",
        "opt_step",
        "comp_metrics",
    }
    assert read_environment(tmp_path / "output" / "task1a" / "2")["tensorflow"]["threads"] == 1
    folder = tmp_path / "output" / "task1a"
    _, comparison = compare_runs(load([folder / "1", folder / "2"]))
    assert [row["workers"] for row in comparison.rows] == [1, 2]
    assert {row["workload"] for row in comparison.rows} == {"task 1a on digits"}


def test_training_learns_and_the_light_goal_ends_it(tmp_path: Path) -> None:
    result = train(tmp_path, 1, "--light", "--epochs", "14")
    assert result["goal"]["reached"]
    assert result["goal"]["value"] >= 90
    assert result["epochs"] == result["goal"]["epochs"] < 14


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--gpu"], 1, "--gpu is not an option of this task"),
        (["--validation_only"], 1, "--validation_only needs checkpoints"),
        (["--backend", "gloo"], 1, "--backend must be left out, not gloo"),
        (["--dataset", "faces"], 2, "faces"),
        (["--image-size", "16"], 1, "--image-size is for the digits"),
        (
            ["--dataset", "digits", "--data", "/my/digits"],
            1,
            "--data does not go with --dataset digits",
        ),
        (["--dataset", "digits", "--partial"], 1, "--partial does not go with --dataset digits"),
    ],
)
def test_wrong_options_are_one_clear_line(
    tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    roots = [f"--root-{root}={tmp_path / root}" for root in ("dataset", "checkpoint", "output")]
    (done,) = run(SCRIPT, *roots, *arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_worker_is_one_clear_line(tmp_path: Path) -> None:
    roots = [f"--root-{root}={tmp_path / root}" for root in ("dataset", "checkpoint", "output")]
    port = free_port()
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dataset", "digits", "--timeout", "1", *roots],
        env=environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"error: rank 0 does not listen on 127.0.0.1:{port} after 1 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_messages_and_the_result_folder_of_three_workers(tmp_path: Path) -> None:
    done = run(str(Path(__file__).with_name("workers.py")), str(tmp_path), world_size=3)
    assert [worker.returncode for worker in done] == [0] * 3, done
    answers = [json.loads(worker.stdout.split("answer ")[1]) for worker in done]
    expected = {"sum": [6, 30], "mean": [3.0], "broadcast": True, "first": 5.0}
    assert [{name: answer[name] for name in expected} for answer in answers] == [expected] * 3
    assert [answer["samples"] for answer in answers] == [60, None, None]
    assert verify_folder(tmp_path / "0") == []


def test_a_script_of_version_3_trains(tmp_path: Path) -> None:
    records = 32
    content = lzma.decompress(test_data("cifar10", "data_batch_1.bin.xz").read_bytes())
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        start = number * records * 3073
        (tmp_path / f"{name}.bin").write_bytes(content[start : start + records * 3073])
    script = str(Path(__file__).with_name("graph_script.py"))
    (done,) = run(script, "--dataset-root", str(tmp_path), "--records", str(records))
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    # 22 batches, 5 in an epoch.
    assert [int(epoch) for epoch, _, _ in lines] == [0, 1, 2, 3, 4]
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[-1] < losses[0]
    assert all(0 <= float(accuracy) <= 100 for *_, accuracy in lines)
