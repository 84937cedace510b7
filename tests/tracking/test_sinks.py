"""Sinks by name, and sinks of other services, which write to local files here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlbench_core.errors import ConfigurationError, MissingDependencyError
from mlbench_core.tracking import sinks
from mlbench_core.tracking.sinks import (
    CSVSink,
    JSONLSink,
    MLflowSink,
    TensorBoardSink,
    WandbSink,
    make_sink,
)
from mlbench_core.tracking.tracker import Tracker
from tests.tracking import fake_services
from tests.tracking.fake_services import MlflowClient


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
    # In a process of its own, because wandb starts a service, which completes the file when the
    # process ends.
    code = (
        "from mlbench_core.tracking.sinks import WandbSink\nfrom tests.tracking.test_sinks import "
        f"run\nrun(WandbSink('project', mode='offline', dir={str(tmp_path)!r}, name='my run'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for text in (
        b"my run",
        b"train_Prec@1",
        b"0.5",
        b"train_late",
        b"0.75",
        b"TaskResult",
        b"done",
        b"steps_s",
    ):
        assert text in content, text


def test_mlflow_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("first", "second"):
        run(MLflowSink("experiment", name))
    assert "failed" not in caplog.text
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("experiment").experiment_id
    assert {found.info.run_name for found in client.search_runs([experiment])} == {
        "first",
        "second",
    }
    found = client.search_runs([experiment])[0]
    assert found.info.status == "FINISHED"
    assert found.data.tags["TaskResult"] == "done"
    accuracy = client.get_metric_history(found.info.run_id, "train_Prec_1")
    assert [(metric.value, metric.step) for metric in accuracy[:1]] == [(0.5, 1)]
    assert math.isnan(accuracy[1].value)
    assert [
        metric.step for metric in client.get_metric_history(found.info.run_id, "train_late")
    ] == [0]
    summary = next(tmp_path.rglob("summary.json"))
    assert json.loads(summary.read_text())["samples"] == 8


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> fake_services.Server:
    """MLflow and W&B as modules that record their calls."""
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    fake_services.install()
    return fake_services.MlflowClient.server


def test_mlflow_sends_no_more_than_a_server_takes_at_once(services: fake_services.Server) -> None:
    sink = MLflowSink()
    for step in range(2001):
        sink("loss", 1.0, 0, step)
    sink.flush()
    sink.flush()
    sink.close()
    assert services.sizes == [1000, 1000, 1]


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        (None, "FINISHED", 0),
        (SystemExit(0), "FINISHED", 0),
        (RuntimeError("out of memory"), "FAILED", 1),
        (SystemExit("no data"), "FAILED", 1),
        (SystemExit(3), "FAILED", 1),
        (KeyboardInterrupt(), "KILLED", 255),
    ],
)
def test_services_learn_how_a_run_ended(
    end: BaseException | None, state: str, code: int, services: fake_services.Server
) -> None:
    tracker = Tracker([], "7", 0, sinks=[MLflowSink(), WandbSink()])
    with contextlib.suppress(BaseException), tracker:
        tracker.record_loss(0.5)
        if end is not None:
            raise end
    assert list(services.states.values()) == [state]
    assert fake_services.Run.codes == [code]


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        ("raise RuntimeError", "FAILED", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "KILLED", 255),
        (
            (
                "child = os.fork()\nif not child: "
                "time.sleep(60)\nos.kill(child, signal.SIGTERM); os.wait()"
            ),
            "FINISHED",
            0,
        ),
        ("", "FINISHED", 0),
    ],
)
@pytest.mark.parametrize("start", ["tracker.start()", ""], ids=["started", "not started"])
def test_services_learn_how_a_process_ended_whose_tracker_is_not_closed(
    start: str, end: str, state: str, code: int
) -> None:
    program = f"""
import os, signal, time
from tests.tracking import fake_services
fake_services.install()
from mlbench_core.tracking.sinks import MLflowSink, WandbSink
from mlbench_core.tracking.tracker import Tracker
tracker = Tracker([], "7", 0, sinks=[MLflowSink(), WandbSink()])
{start}
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    calls = [line for line in done.stderr.splitlines() if line.startswith(("mlflow ", "wandb "))]
    assert sorted(calls) == [f"mlflow {state}", f"wandb {code}"]
    assert done.returncode == {"FAILED": 1, "KILLED": -signal.SIGTERM, "FINISHED": 0}[state]


NAMES = ("first", "a//b", "a/b", "../up", "/root", "a/", "Prec@1", "Prec_1", "half\ud800", "a\nb",
"", "m" * 300,
         "m" * 301, "損失", "refused", "last")  # fmt: skip


def test_no_name_and_no_value_costs_another_metric(
    services: fake_services.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, lines = CSVSink(tmp_path / "a.csv"), JSONLSink(tmp_path / "a.jsonl")
    all_sinks = [MLflowSink(), WandbSink(), rows, lines, TensorBoardSink(tmp_path / "b")]
    for sink in all_sinks:
        sink("large", 10**400, 0, 0)
    with Tracker([], "7", 0, sinks=all_sinks) as tracker:
        for number, name in enumerate(NAMES):
            tracker.record_stat(name, number)
            tracker.record_stat(f"{name} again", math.nan)
        tracker.record_stat("first", 99)
    (metrics,) = services.metrics.values()
    by_name: dict[str, list[float]] = {}
    for metric in metrics:
        by_name.setdefault(metric.key, []).append(metric.value)
    numbers = [values for name, values in by_name.items() if not all(map(math.isnan, values))]
    refused = NAMES.index("refused")
    # Each metric has a curve of its own, which no other one shares.
    assert sorted(numbers) == sorted(
        [0.0, 99.0] if n == 0 else [float(n)] for n in range(len(NAMES)) if n != refused
    )
    assert [row["train_first"] for row in fake_services.Run.rows if "train_first" in row] == [0, 99]
    assert len([row for row in fake_services.Run.rows if "train_last" in row]) == 1
    assert "train_last,15" in rows.path.read_text()
    assert json.loads(lines.path.read_text().splitlines()[-2])["value"] == 99
    events = EventAccumulator(str(tmp_path / "b")).Reload()
    assert {"train_first", "train_last", "train_損失", "train_half\\ud800"} <= set(
        events.Tags()["scalars"]
    )
    assert "MLflowSink leaves out the numbers of 'train_refused'" in caplog.text
    assert (
        len([record for record in caplog.records if "train_refused'" in record.getMessage()]) == 1
    )
    assert "receives no more numbers" not in caplog.text


def test_all_lines_of_a_file_are_strict_json(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "a.jsonl")
    with Tracker([types.SimpleNamespace(name="m")], "7", 0, sinks=[sink]) as tracker:
        tracker.record_stat("loss", math.inf)
        tracker.update_primary_metric(math.inf)
    sink.write_summary({"a": [math.nan, {"b": -math.inf}]})
    sink.close()

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in sink.path.read_text().splitlines()]
    assert lines[0]["value"] is None
    assert lines[-1]["summary"] == {"a": [None, {"b": None}]}


def test_a_server_that_does_not_answer_gets_no_request_for_each_name(
    services: fake_services.Server, caplog: pytest.LogCaptureFixture
) -> None:
    with Tracker([], "7", 0, sinks=[MLflowSink()]) as tracker:
        tracker.record_stat("a", 1.0)
        tracker.record_stat("b", 1.0)
        services.is_down = True
    assert "MLflowSink" in caplog.text
    assert "receives no more numbers" in caplog.text
    assert "leaves out" not in caplog.text


def test_two_runs_that_create_one_experiment_both_use_it(services: fake_services.Server) -> None:
    services.is_raced = True
    MLflowSink("new").close()
    assert list(services.states) == ["run 0 of of another run"]


def train(
    sink: Any, batches: int, state: dict[str, Any] | None = None, epoch: int = 5
) -> dict[str, Any]:
    """Train some batches, with a validation after each epoch of 5; return the state after the first
    epoch."""
    saved: dict[str, Any] = {}
    with Tracker([], "7", 0, sinks=[sink]) as tracker:
        if state is not None:
            tracker.load_state_dict(state)
        tracker.start()
        while tracker.position()[0] < batches:
            step = tracker.position()[0]
            tracker.train()
            tracker.batch_start()
            # Inside the batch, so the first loss has the step 0.
            tracker.record_loss(float(step))
            tracker.record_batch_fwd_pass()
            tracker.batch_end()
            if (step + 1) % epoch == 0:
                tracker.validation()
                tracker.record_loss(float(step + 1))
                tracker.epoch_end()
                saved = saved or json.loads(json.dumps(tracker.state_dict()))
    return saved


def test_the_curves_of_tensorboard_continue_after_a_resume(tmp_path: Path) -> None:
    state = train(TensorBoardSink(tmp_path), 8)
    # TensorBoard orders the files of a folder by the second of their start.
    time.sleep(1.1)
    train(TensorBoardSink(tmp_path), 15, state)
    events = EventAccumulator(str(tmp_path)).Reload()
    steps = {
        name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    assert steps["train_loss"] == list(range(15))
    # The validation at the step of the checkpoint stays.
    assert steps["val_loss"] == steps["cum_fwd_pass"] == [5, 10, 15]
    assert [event.value for event in events.Scalars("val_loss")] == [5, 10, 15]


def test_the_curves_of_services_continue_after_a_resume(
    services: fake_services.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = train(MLflowSink(), 8)
    monkeypatch.setenv("MLFLOW_RUN_ID", "run 0 of 1")
    train(MLflowSink(), 15, state)
    assert services.states == {"run 0 of 1": "FINISHED"}
    for name, steps in (("train_loss", list(range(15))), ("val_loss", [5, 10, 15])):
        assert [
            metric.step for metric in MlflowClient().get_metric_history("run 0 of 1", name)
        ] == steps
    train(WandbSink(batch=8), 15, state)
    assert [row["batch"] for row in fake_services.Run.rows if "train_loss" in row] == list(
        range(8, 15)
    )


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow:experiment", "mlflow")])
def test_a_missing_package_is_named_with_its_pip_line(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("text", "kind"), [("jsonl:a:b.jsonl", JSONLSink), ("csv:folder/run.csv", CSVSink)]
)
def test_a_sink_is_made_of_a_text(text: str, kind: type) -> None:
    sink = make_sink(text)
    assert type(sink) is kind
    assert sink.path == Path(text.partition(":")[2])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])
def test_runs_with_one_path_write_to_files_of_their_own(kind: str, tmp_path: Path) -> None:
    text = f"{kind}:{tmp_path / 'sub' / 'run.log'}"

    def write(run_id: str, resume: bool = False, text: str = text) -> Path:
        before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        sink = make_sink(text, run_id, resume)
        sink("loss", 1.0, 0, 0)
        sink.close()  # type: ignore[attr-defined]
        after = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        (changed,) = {path for path in after if after[path] != before.get(path)}
        return changed.parent if kind == "tensorboard" else changed

    first, second, again = write("1"), write("2"), write("1")
    assert len({first, second, again}) == 3
    # The run that is continued is the latest one with its id.
    assert write("1", resume=True) == again
    assert write("2", resume=True) == second
    # A name of its own is used exactly as it is.
    exact = write("3", text=f"{kind}:{tmp_path}/of-{{run_id}}.log")
    assert exact == tmp_path / "of-3.log"


def test_a_path_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigurationError, match=r"a path that can be written, not '.*/file/a\.csv'"
    ):
        make_sink(f"csv:{tmp_path}/file/a.csv", "1")


def plain() -> Any:
    return lambda *record: None


def with_argument(folder: str = "default") -> Any:
    return JSONLSink(folder)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages that bring sinks."""
    values = {"plain": f"{__name__}:plain", "other": f"{__name__}:with_argument",
    "csv": f"{__name__}:plain",
              "broken": f"{__name__}:no_such_sink"}  # fmt: skip
    entries = EntryPoints(
        EntryPoint(name, value, "mlbench.sinks") for name, value in values.items()
    )
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
        (
            "",
            (
                "NAME is one of .*'broken', 'csv', 'jsonl', 'mlflow', "
                "'other', 'plain', 'tensorboard', 'wandb'"
            ),
        ),
        ("json:x", "NAME:ARGUMENT, not 'json:x'"),
        ("jsonl", "not 'jsonl': missing a required argument: 'path'"),
        ("plain:x", "not 'plain:x': too many positional arguments"),
        ("broken", "sink 'broken' .*no_such_sink.* cannot be imported"),
    ],
)
def test_texts_that_name_no_sink_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_sink(text)
