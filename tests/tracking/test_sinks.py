"""Sinks by name, and sinks of other services, which write to local files here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.errors import ConfigurationError, MissingDependencyError
from mlbench_core.tracking import sinks
from mlbench_core.tracking.sinks import CSVSink, JSONLSink, MLflowSink, make_sink
from mlbench_core.tracking.tracker import Tracker


def run(sink: Any) -> None:
    with Tracker(
        [], "7", 0, sinks=[sink], goal=lambda name, value, tracker: "done" if value < 0.3 else None
    ) as tracker:
        tracker.batch_start()
        tracker.batch_end(samples=8)
        tracker.record_stat("Prec@1", 0.5)
        tracker.record_stat("Prec@1", math.nan)
        tracker.record_stat("late", 0.75, at=(0, 0.0))
        tracker.record_loss(0.25)
        tracker.epoch_end()


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    # In a process of its own, because wandb starts a service, which completes the file when the process ends.
    code = (
        "from mlbench_core.tracking.sinks import WandbSink\n"
        "from tests.tracking.test_sinks import run\n"
        f"run(WandbSink('project', mode='offline', dir={str(tmp_path)!r}, name='my run'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (b"my run", b"train_Prec@1", b"0.5", b"train_late", b"0.75", b"TaskResult", b"done", b"steps_s"):
        assert text in content, text


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("first", "second"):
        run(MLflowSink("experiment", name))
    assert "failed" not in caplog.text
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("experiment").experiment_id
    assert {found.info.run_name for found in client.search_runs([experiment])} == {"first", "second"}
    found = client.search_runs([experiment])[0]
    assert found.info.status == "FINISHED"
    assert found.data.tags["TaskResult"] == "done"
    accuracy = client.get_metric_history(found.info.run_id, "train_Prec_1")
    assert [(metric.value, metric.step) for metric in accuracy[:1]] == [(0.5, 1)]
    assert math.isnan(accuracy[1].value)
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "train_late")] == [0]
    summary = next(tmp_path.rglob("summary.json"))
    assert json.loads(summary.read_text())["samples"] == 8


def test_mlflow_sends_no_more_than_a_server_takes_at_once() -> None:
    class Client:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def log_batch(self, run: str, metrics: list[Any]) -> None:
            self.sizes.append(len(metrics))

    sink = MLflowSink.__new__(MLflowSink)
    client = Client()
    sink._client, sink._metric, sink._run, sink._metrics = client, lambda *metric: metric, "run", []
    for step in range(2001):
        sink("loss", 1.0, 0, step)
    sink.flush()
    sink.flush()
    assert client.sizes == [1000, 1000, 1]


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow:experiment", "mlflow")])
def test_a_missing_package_is_named_with_its_pip_line(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(MissingDependencyError, match=rf"pip install 'mlbench-core\[{package}\]'"):
        make_sink(name)


class Missing:
    """A finder that knows a package as not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(("text", "kind"), [("jsonl:a:b.jsonl", JSONLSink), ("csv:folder/run.csv", CSVSink)])
def test_a_sink_is_made_of_a_text(text: str, kind: type) -> None:
    sink = make_sink(text)
    assert type(sink) is kind
    assert sink.path == Path(text.partition(":")[2])  # type: ignore[attr-defined]


def plain() -> Any:
    return lambda *record: None


def with_argument(folder: str = "default") -> Any:
    return JSONLSink(folder)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages that bring sinks."""
    values = {"plain": f"{__name__}:plain", "other": f"{__name__}:with_argument", "csv": f"{__name__}:plain",
              "broken": f"{__name__}:no_such_sink"}  # fmt: skip
    entries = EntryPoints(EntryPoint(name, value, "mlbench.sinks") for name, value in values.items())
    monkeypatch.setattr(sinks, "entry_points", lambda group: entries.select(group=group))


@pytest.mark.usefixtures("packages")
def test_packages_bring_sinks_but_replace_none() -> None:
    assert callable(make_sink("plain"))
    assert (make_sink("other").path, make_sink("other:x").path) == (Path("default"), Path("x"))  # type: ignore[attr-defined]
    assert type(make_sink("csv:run.csv")) is CSVSink


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NAME is one of .*'broken', 'csv', 'jsonl', 'mlflow', 'other', 'plain', 'tensorboard', 'wandb'"),
        ("json:x", "NAME:ARGUMENT, not 'json:x'"),
        ("jsonl", "not 'jsonl': missing a required argument: 'path'"),
        ("plain:x", "not 'plain:x': too many positional arguments"),
        ("broken", "sink 'broken' .*no_such_sink.* cannot be imported"),
    ],
)
def test_texts_that_name_no_sink_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_sink(text)
