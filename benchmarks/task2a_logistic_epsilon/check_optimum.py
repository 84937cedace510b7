"""Compare task 2a with the optimum that scikit-learn finds for the same objective.

The objective is the mean binary cross-entropy of the training set + 2.5e-6 / 2 times the squared
norm of all weights, including the bias. scikit-learn does not penalize the intercept, so a column
of ones replaces it. scikit-learn weighs the data instead of the penalty, so C = 1 / (rows *
2.5e-6).

    python benchmarks/task2a_logistic_epsilon/check_optimum.py --data FOLDER a9a australian
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlbench_core.dataset.linearmodels.pytorch.preparation import prepare_stores
from mlbench_core.dataset.linearmodels.pytorch.subset import train_and_validation
from mlbench_core.errors import require

MAIN = Path(__file__).with_name("main.py")
L2 = 2.5e-6
# Tolerances of the loss and of the accuracies.
TOLERANCES = {"a9a": (2e-3, 0.3), "agaricus": (5e-3, 0.0), "australian": (1e-2, 1.0)}


@dataclass(frozen=True)
class Quality:
    """The quality of a model's weights.

    Attributes:
        loss: The objective on the training set.
        train_accuracy: Percentage of training rows that are classified correctly.
        accuracy: Percentage of validation rows that are classified correctly; of a run, after its
            last epoch.
    """

    loss: float
    train_accuracy: float
    accuracy: float

    def is_close_to(self, optimum: Quality, name: str) -> bool:
        """Return True if the loss and both accuracies are within the tolerances."""
        # The loss is compared without abs(), because a loss below that of the solver is not an
        # error.
        of_loss, of_accuracy = TOLERANCES.get(name, (np.inf, np.inf))
        return (
            self.loss - optimum.loss <= of_loss
            and abs(self.train_accuracy - optimum.train_accuracy) <= of_accuracy
            and abs(self.accuracy - optimum.accuracy) <= of_accuracy
        )


def find_optimum(name: str, folder: Path, standardized: bool = False) -> Quality:
    """Return the optimum of a data set with stores in a folder, by Newton's method in float64."""
    LogisticRegression = require("sklearn.linear_model", "linear").LogisticRegression
    parts = train_and_validation(name, folder, layout="dense")
    (x, y), (x_validation, y_validation) = map(dense, parts)
    if standardized:
        mean, deviation = x.mean(0), x.std(0)
        # A constant feature has the deviation 0; it becomes 0 instead of nan.
        scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
        x, x_validation = (x - mean) * scale, (x_validation - mean) * scale
    x = with_ones(x)
    solver = LogisticRegression(
        C=1 / (len(y) * L2), fit_intercept=False, solver="newton-cholesky",
        tol=1e-10, max_iter=1_000,
    )  # fmt: skip
    w = solver.fit(x, y).coef_[0]
    # log(1 + exp(-margin)) in a form that does not overflow
    loss = np.logaddexp(0, (1 - 2 * y) * (x @ w)).mean() + L2 / 2 * w @ w
    return Quality(
        float(loss), accuracy(x, y, w), accuracy(with_ones(x_validation), y_validation, w)
    )


def with_ones(x: np.ndarray) -> np.ndarray:
    """Return a matrix with a further column of ones, which replaces the intercept."""
    return np.hstack([x, np.ones((len(x), 1))])


def accuracy(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    """Return the percentage of rows that the weights classify correctly."""
    return 100 * float(((x @ w >= 0) == (y > 0.5)).mean())


def dense(rows: object) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of a data set and their labels, in float64."""
    x, y = rows.batch(np.arange(len(rows)))  # type: ignore[attr-defined, arg-type]
    return x.double().numpy(), y.double().numpy().ravel()


def reached(name: str, data: str, folder: str, workers: int, epochs: int) -> Quality:
    """Run the task's script, and return its final loss and accuracies on the whole sets."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run",
         "--standalone", "--nproc-per-node", str(workers), str(MAIN),
         "--backend", "gloo", "--dataset", name, "--data", data, "--epochs", str(epochs),
         "--past-goal", "--full-train", f"--root-dataset={folder}",
         f"--root-checkpoint={folder}", f"--root-output={folder}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    last_epoch = [line for line in done.stderr.splitlines() if "rank 0: Epoch" in line][-1]

    def value(stat: str) -> float:
        return float(re.findall(rf"{stat} ([\d.e-]+)", last_epoch)[0])

    return Quality(
        value("val_global_full_train_loss"),
        value("val_global_full_train_Prec@1"),
        value("val_global_Prec@1"),
    )


def main() -> int:
    """Print a table; return 1 if the distance of a run from the optimum exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="data sets")
    add("--data", required=True, metavar="FOLDER", help="folder with their LIBSVM text")
    add("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    add("--epochs", type=int, default=40, help="epochs of each run (default: %(default)s)")
    args = parser.parse_args()
    failed = False
    print(f"{'':24}{'loss':^20}{'training accuracy':^20}{'validation accuracy':^20}")
    print(f"{'data':<14}{'workers':>8}  " + 3 * f"{'reached':>9}{'optimum':>9}  ")
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            stores = prepare_stores(name, folder, args.data)
            optimum = find_optimum(name, stores, standardized=name == "australian")
            for workers in args.workers:
                run = reached(name, args.data, folder, workers, args.epochs)
                columns = [
                    f"{run.loss:>9.5f}{optimum.loss:>9.5f}",
                    f"{run.train_accuracy:>9.2f}{optimum.train_accuracy:>9.2f}",
                    f"{run.accuracy:>9.2f}{optimum.accuracy:>9.2f}",
                ]
                is_close = run.is_close_to(optimum, name)
                failed = failed or not is_close
                verdict = "" if is_close else "too far"
                print(f"{name:<14}{workers:>8}", *columns, verdict, sep="  ", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
