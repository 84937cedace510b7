"""Task 2a: its script reaches the optimum that scikit-learn finds, with one worker and with two,
however started."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo

from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.table import compare_runs
from mlbench_core.dataset.linearmodels.pytorch import LinearBatches
from mlbench_core.dataset.linearmodels.pytorch.preparation import prepare_stores
from mlbench_core.dataset.linearmodels.pytorch.subset import train_and_validation
from mlbench_core.models.pytorch.linear_models import LogisticRegression
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.tasks import get_task
from tests.helpers.data import test_data
from tests.helpers.forked import run_script, run_scripts
from tests.helpers.processes import environment, free_port
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import load_script
from tests.helpers.tasks import train_task

SCRIPT = get_task("2a").script
L2 = 2.5e-6
ACCURACY, LOSS = "val_global_Prec@1", "val_global_loss"
F1, DICE = "val_global_F1-Score", "val_global_Dice Coefficient"
TRAIN_ACCURACY, TRAIN_LOSS = "val_global_full_train_Prec@1", "val_global_full_train_loss"


def options(main: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    return parser.parse_args(arguments)


def train(rank: int, world_size: int, folder: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """One worker's run of the script's training, as ``main`` starts it; what it ended with."""
    main = load_script("2a")
    checkpoints = Path(folder) / f"checkpoints-{world_size}-{'-'.join(arguments).replace('/', '_')}"
    checkpoints.mkdir(parents=True, exist_ok=True)
    args = options(main, "--past-goal", "--full-train", *arguments)
    tracker = train_task(main, args, folder, checkpoints, rank=rank, world_size=world_size)
    if args.checkpoint:
        model = torch.load(
            checkpoints / f"{tracker.current_epoch}_{rank}.pth.tar", weights_only=True
        )["model"]
    return {
        "weights": torch.cat([model["linear.weight"].flatten(), model["linear.bias"]]).numpy()
        if args.checkpoint
        else None,
        "val_time_to_loss_s": tracker.records.get("val_time_to_loss_s"),
        "watched": (tracker.goal.metric, tracker.primary_metric.name),
        **{
            name: list(tracker.records[name].values())
            for name in (ACCURACY, LOSS, TRAIN_ACCURACY, TRAIN_LOSS, F1, DICE, "train_F1-Score")
        },
    }


def train_several(
    rank: int, world_size: int, folder: str, runs: list[tuple[str, ...]]
) -> list[dict[str, Any]]:
    return [train(rank, world_size, folder, arguments) for arguments in runs]


def write_text(path: Path, rows: int, n_features: int, seed: int) -> None:
    """Separable rows of length 1 with a few values, as LIBSVM text with labels -1 and +1."""
    from sklearn.datasets import dump_svmlight_file

    generator = np.random.default_rng(seed)
    features = np.zeros((rows, n_features), dtype=np.float32)
    features[np.arange(rows)[:, None], generator.integers(1, n_features, (rows, 3))] = 0.5
    labels = np.where(np.arange(rows) % 3 == 0, 1, -1)
    features[:, 0] = 0.5 * labels
    dump_svmlight_file(features, labels, str(path), zero_based=False)


def joined_batches(folder: Path, epochs: int) -> np.ndarray:
    """Weights after plain SGD of one worker on the joined batches of two, computed without the
    library's training."""
    training, _ = train_and_validation("epsilon", folder)
    parts = [LinearBatches(training, 128, seed=42, rank=rank, world_size=2) for rank in range(2)]
    torch.manual_seed(42)
    model = LogisticRegression(training.n_features)
    for epoch in range(epochs):
        for part in parts:
            part.set_epoch(epoch)
        for pair in zip(*parts, strict=True):
            loss = L2 / 2 * sum(w.square().sum() for w in model.parameters())
            for x, y in pair:
                z = model.linear(x)
                loss = loss + torch.nn.functional.softplus((1 - 2 * y) * z).mean() / 2
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data -= 8.0 * gradient
    return torch.cat([model.linear.weight.flatten(), model.linear.bias]).detach().numpy()


def assert_f1_and_dice_of_the_last_weights(run: dict[str, Any], stores: Path) -> None:
    from sklearn.metrics import f1_score

    _, validation = train_and_validation("heart_scale", stores)
    features, labels = (part.double().numpy() for part in validation.batch(range(len(validation))))
    logits = features @ run["weights"][:-1] + run["weights"][-1]
    probabilities, true = 1 / (1 + np.exp(-logits)), labels[:, 0]
    expected = f1_score(true, logits >= 0)
    assert 0 < expected < 1
    assert run[F1][-1] == pytest.approx(expected, rel=1e-6)
    assert run[DICE][-1] == pytest.approx(
        2 * probabilities @ true / (probabilities.sum() + true.sum()), rel=1e-5
    )
    assert 0 < run["train_F1-Score"][-1] <= 1
    assert run["watched"] == (ACCURACY, "Prec@1")


def test_one_and_two_workers_reach_the_optimum_and_two_are_one_on_joined_batches(
    tmp_path: Path,
) -> None:
    check_optimum = load_script("2a", "check_optimum")
    data = str(test_data("libsvm"))
    # Rows of length 1: with longer ones the first steps amplify rounding, and no two orders of a
    # sum stay together.
    write_text(tmp_path / "epsilon_normalized", 1_001, 2_000, seed=0)
    write_text(tmp_path / "epsilon_normalized.t", 100, 2_000, seed=1)
    joined = ("--dataset", "epsilon", "--data", str(tmp_path), "--epochs", "3", "--checkpoint")
    runs = [
        ("--dataset", "australian", "--data", data, "--epochs", "60"),
        ("--dataset", "agaricus", "--data", data, "--epochs", "8"),
        ("--dataset", "heart_scale", "--data", data, "--epochs", "2", "--checkpoint"),
        joined,
        (*joined, "--overlap"),
    ]
    alone = train_several(0, 1, str(tmp_path), runs[:3])
    workers = run_ranks(2, train_several, str(tmp_path), runs)

    stores = prepare_stores("australian", tmp_path, data)
    optimum = check_optimum.find_optimum("australian", stores, standardized=True)
    for australian, agaricus, heart, *_ in (alone, workers[0]):
        assert australian[TRAIN_LOSS][-1] >= optimum.loss - 1e-6
        run = check_optimum.Quality(
            australian[TRAIN_LOSS][-1], australian[TRAIN_ACCURACY][-1], australian[ACCURACY][-1]
        )
        assert run.is_close_to(optimum, "australian")
        assert agaricus[ACCURACY][-1] == agaricus[TRAIN_ACCURACY][-1] == 100.0
        assert_f1_and_dice_of_the_last_weights(heart, prepare_stores("heart_scale", tmp_path, data))

    for first, second in zip(
        *workers, strict=True
    ):  # values are those of all workers, weights are shared
        assert first[LOSS] == second[LOSS]
        assert first[TRAIN_LOSS] == second[TRAIN_LOSS]
        np.testing.assert_equal(first["weights"], second["weights"])
    expected = joined_batches(prepare_stores("epsilon", tmp_path, tmp_path), epochs=3)
    for run in workers[0][3:]:
        np.testing.assert_allclose(run["weights"], expected, rtol=1e-4, atol=1e-5)


def test_settings_of_2018() -> None:
    main = load_script("2a")
    assert [main.settings("2018", k).lr for k in (1, 2, 3, 4, 8, 15, 16, 32)] == [
        200,
        400,
        400,
        600,
        700,
        700,
        800,
        800,
    ]
    chosen = main.settings("2018", 2)
    assert chosen.batch_size == 100
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=chosen.lr)
    schedule = chosen.schedule(optimizer)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([400 / np.sqrt(max(1, t)) for t in range(5)])
    chosen = [main.settings("reference", workers) for workers in (1, 16)]
    assert [(settings.batch_size, settings.lr) for settings in chosen] == [
        (128, 4.0), (128, 64.0)
    ]  # fmt: skip


def test_the_rate_is_halved_after_two_epochs_without_improvement() -> None:
    main = load_script("2a")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=4.0)
    schedule = main.settings("reference", 1).schedule(optimizer)
    rates = []
    for loss in (0.5, 0.4, 0.4, 0.3, 0.31, 0.32, 0.33, 0.34):
        schedule.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [4, 4, 4, 4, 4, 2, 2, 1]


def test_sparse_rows_and_the_loss_beside_the_goal(tmp_path: Path) -> None:
    write_text(tmp_path / "rcv1_train.binary", 300, 1_000, seed=0)
    write_text(tmp_path / "rcv1_test.binary", 60, 1_000, seed=1)
    write_text(tmp_path / "epsilon_normalized", 300, 2_000, seed=0)
    write_text(tmp_path / "epsilon_normalized.t", 60, 2_000, seed=1)
    runs = [
        ("--dataset", name, "--data", str(tmp_path), "--epochs", "8", "--checkpoint")
        for name in ("rcv1", "epsilon")
    ]
    rcv1, epsilon = train_several(0, 1, str(tmp_path), runs)
    assert len(rcv1["weights"]) == 47_236 + 1
    assert rcv1[ACCURACY][-1] == epsilon[ACCURACY][-1] == 100.0
    # one row in three is positive, so nothing but learning gets there
    assert epsilon[LOSS][-1] < 0.2828
    assert epsilon["val_time_to_loss_s"] and not rcv1["val_time_to_loss_s"]


def test_a_partition_by_label_reaches_the_batches(tmp_path: Path) -> None:
    """australian has no validation part, so the rows to divide are themselves a part of its
    file."""
    main = load_script("2a")

    def rows(*arguments: str) -> list[list[list[float]]]:
        """The rows of each worker with their labels at the end."""
        args = options(
            main, "--dataset", "australian", "--data", str(test_data("libsvm")), *arguments
        )
        runs = [
            SimpleNamespace(args=args, rank=rank, world_size=2, dataset_dir=str(tmp_path))
            for rank in range(2)
        ]
        return [
            torch.cat([torch.cat(batch, 1) for batch in main.load_data(run, 32)[0]]).tolist()
            for run in runs
        ]

    uniform, skewed = rows(), rows("--partition", "label_skew:1")
    assert sorted(uniform[0] + uniform[1]) == sorted(skewed[0] + skewed[1])
    shares = [
        [sum(row[-1] for row in worker) / len(worker) for worker in workers]
        for workers in (uniform, skewed)
    ]
    assert abs(shares[0][0] - shares[0][1]) < 0.2
    assert abs(shares[1][0] - shares[1][1]) > 0.8


COMMAND = (str(SCRIPT), "--run_id", "1", "--backend", "gloo")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The result of the last epoch, without the times in it."""
    output = done.stdout + done.stderr
    lines = re.findall(r"rank 0: Epoch \d+ \|.*?val_global_Prec@1 [\d.]+", output)
    assert lines, output
    return str(lines[-1])


def test_old_command_line_and_a_launcher_give_the_same_run(tmp_path: Path) -> None:
    common = (
        "--light", "--dataset", "heart_scale", "--data", str(test_data("libsvm")), "--epochs", "3",
        "--past-goal",
        *(f"--root-{name}={tmp_path / name}" for name in ("dataset", "checkpoint", "output")),
    )  # fmt: skip
    workers = [
        [*COMMAND, "--hosts", "127.0.0.1,127.0.0.1", "--rank", str(rank), *common]
        for rank in range(2)
    ]
    by_hosts = run_scripts(workers, timeout_s=240, MASTER_PORT=str(free_port()))
    assert [done.returncode for done in by_hosts] == [0, 0], by_hosts
    # An MPI's mpirun where there is one, else torchrun: two more starts of Python are enough.
    mpirun = shutil.which(
        "mpirun", path=f"{Path(sys.executable).parent}:{environment().get('PATH', '')}"
    )
    if mpirun is not None:
        launcher = (
            mpirun,
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            "2",
            sys.executable,
        )
    else:
        launcher = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        )
    variables = environment(MASTER_PORT=str(free_port()))
    launched = subprocess.run(
        [*launcher, *COMMAND, *common], env=variables, capture_output=True, text=True, timeout=240
    )
    assert launched.returncode == 0, launched.stderr
    assert last_line(by_hosts[0]) == last_line(launched)
    raw = [
        json.loads(line)
        for line in (tmp_path / "output/task2a/1/metrics.jsonl").read_text().splitlines()
    ]
    recorded = {line["name"]: line["value"] for line in raw if line["kind"] == "stat"}
    assert 0 < recorded[F1] <= 1
    assert 0 < recorded[DICE] <= 1


def test_the_best_value_after_a_time_is_the_result_of_a_run(tmp_path: Path) -> None:
    roots = [f"--root-{name}={tmp_path / name}" for name in ("dataset", "checkpoint", "output")]
    data = ["--dataset", "heart_scale", "--data", str(test_data("libsvm"))]
    # Each epoch takes some milliseconds, so the time is over after the first one.
    done = run_script(
        [*COMMAND, *data, "--goal-after", "1e-6", *roots],
        timeout_s=240,
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "output/task2a/1"
    assert verify_folder(folder) == []
    result = read_result(folder)
    goal, configuration = result["goal"], result["configuration"]
    assert (goal["reached"], goal["epochs"], goal["budget_s"], goal["threshold"]) == (
        True,
        1,
        1e-6,
        None,
    )
    assert goal["value"] == result["best"]["value"]
    assert (result["epochs"], configuration["options"], configuration["division"]) == (
        1,
        {},
        "closed",
    )
    assert (
        (folder / "official_result.txt")
        .read_text()
        .startswith(f"{goal['value']:.3f}% Top 1 Validation Accuracy")
    )
    log = (folder / "mlperf.log").read_text()
    assert "mlbench_task2a_heart_scale_after_1e-06s" in log and '{"status": "success"}' in log
    (record,) = load([folder])
    (row,) = compare_runs([record])[1].rows
    assert (row["goal"], row["goal_value"]) == ("Prec@1 after 1e-06 s of training", goal["value"])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--dataset", "omega"], 2, "omega"),
        (
            ["--light", "--goal-after", "5"],
            1,
            "--goal-after gives the run another goal: it does not go with --light",
        ),
        (["--partition", "label_skew"], 1, "partition must be uniform, dirichlet:ALPHA"),
        (["--dataset", "rcv1", "--data", "/nonexistent/folder"], 1, "looked for rcv1_train.binary"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    roots = [f"--root-{name}={tmp_path / name}" for name in ("dataset", "checkpoint", "output")]
    done = run_script([*COMMAND, *arguments, *roots], timeout_s=240, MASTER_PORT=str(free_port()))
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert message in output
    assert "Traceback" not in output
