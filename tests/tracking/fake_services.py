"""Modules that stand in for mlflow and wandb: the rules of mlflow 3.17 for names and runs, and a
record of calls."""

from __future__ import annotations

import posixpath
import re
import sys
import types
from typing import Any, NamedTuple

mlflow: Any = types.ModuleType("mlflow")
wandb: Any = types.ModuleType("wandb")


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class MlflowException(Exception):
    def __init__(self, message: str, error_code: str = "INVALID_PARAMETER_VALUE") -> None:
        super().__init__(message)
        self.error_code = error_code


class Server:
    """What an MLflow server keeps."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.metrics: dict[str, list[Metric]] = {}
        self.tags: dict[str, str] = {}
        self.sizes: list[int] = []
        self.is_raced = False
        self.is_down = False


class MlflowClient:
    server = Server()

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.server.experiments.get(name)
        return found and types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        if self.server.is_raced:
            self.server.experiments[name] = "of another run"
            raise MlflowException(
                f"Experiment(name={name}) already exists.", "RESOURCE_ALREADY_EXISTS"
            )
        return self.server.experiments.setdefault(name, "1")

    def create_run(self, experiment: str, run_name: str | None = None) -> Any:
        run = f"run {len(self.server.states)} of {experiment}"
        self.server.states[run] = "RUNNING"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        self.server.states[run] = status

    def log_batch(self, run: str, metrics: list[Metric]) -> None:
        if self.server.is_down:
            raise MlflowException("no connection", "INTERNAL_ERROR")
        self.server.sizes.append(len(metrics))
        for metric in metrics:
            is_path = posixpath.normpath(metric.key) == metric.key and not metric.key.startswith(
                ("/", "..")
            )
            good = re.fullmatch(r"[/\w.\- :]+", metric.key) and is_path and metric.key != "."
            if not good or len(metric.key) > 250 or metric.key == "train_refused":
                raise MlflowException(f"invalid name {metric.key}")
        self.server.metrics.setdefault(run, []).extend(metrics)

    def get_metric_history(self, run: str, name: str) -> list[Metric]:
        return [metric for metric in self.server.metrics.get(run, []) if metric.key == name]

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.server.tags[name] = value

    def log_dict(self, *_: Any) -> None:
        pass

    def set_terminated(self, run: str, status: str | None = None) -> None:
        self.server.states[run] = status or "FINISHED"
        print(f"mlflow {status}", file=sys.stderr)


class Run:
    """A run of wandb; ``rows`` are of the latest one."""

    rows: list[dict[str, Any]]
    codes: list[int | None]

    def __init__(self, resumed: bool = False, batch: int = 0) -> None:
        self.summary = {"batch": batch} if resumed else {}
        self.resumed = resumed
        Run.rows, Run.codes = [], []

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            name.encode()
            if isinstance(value, int) and value.bit_length() > 1000:
                raise OverflowError("int too large to convert to float")
        Run.rows.append(row)

    def finish(self, exit_code: int | None = None) -> None:
        Run.codes.append(exit_code)
        print(f"wandb {exit_code}", file=sys.stderr)


mlflow.MlflowClient = MlflowClient
mlflow.entities = types.SimpleNamespace(Metric=Metric)


def install() -> None:
    """Put the modules in the place of the real ones; ``wandb.init(batch=9)`` continues a run with 9
    batches."""
    MlflowClient.server = Server()
    wandb.init = lambda project=None, batch=0: Run(batch > 0, batch)
    sys.modules["mlflow"], sys.modules["wandb"] = mlflow, wandb
