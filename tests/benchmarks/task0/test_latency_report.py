"""The files of Task 0."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from latency import Measurement
from latency_report import LatencyReport

from mlbench_core.errors import ConfigurationError


def measurement(
    dtype: str, elements: int, seconds: tuple[float, ...], wrong: int = 0
) -> Measurement:
    size = {"float32": 4, "float16": 2}[dtype] * elements
    return Measurement("all_reduce", "gloo", "cpu", dtype, 2, elements, size, 5, seconds, wrong)


@pytest.fixture
def report() -> LatencyReport:
    measurements = [
        measurement("float32", 1000, (0.0011, 0.0011)),
        measurement("float32", 10, (0.0001, 0.0003, 0.0002), wrong=4),
        measurement("float16", 10, (0.0001,)),
    ]
    return LatencyReport(
        {"cores": 2},
        {"torch": "2"},
        {"repetitions": 3},
        {"bfloat16": "no such type"},
        measurements=measurements,
    )


def test_what_was_written_is_read_again(report: LatencyReport, tmp_path: Path) -> None:
    table, everything = report.save(tmp_path / "new" / "all_reduce-gloo-2")
    assert LatencyReport.load(everything) == report
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["elements"] for row in rows] == ["1000", "10", "10"]
    assert float(rows[1]["p50_s"]) == 0.0002
    assert sorted(path.name for path in table.parent.iterdir()) == [
        "all_reduce-gloo-2.csv",
        "all_reduce-gloo-2.json",
    ]


def test_what_is_said_of_the_measurements(report: LatencyReport) -> None:
    assert report.title == "all_reduce, gloo, cpu, 2 workers"
    assert report.dtypes == ["float32", "float16"]
    assert [m.elements for m in report.of("float32")] == [10, 1000]
    assert [m.repetitions for m in report.incomplete()] == [2, 1]
    assert [m.wrong_elements for m in report.wrong()] == [4]
    fits = report.fits()
    assert list(fits) == ["float32"]  # of float16 there is one size
    assert fits["float32"].seconds(4000) == pytest.approx(0.0011)


def test_an_infinite_bandwidth_is_valid_json(tmp_path: Path) -> None:
    flat = LatencyReport(measurements=[measurement("float32", n, (1 / n,)) for n in (1, 2)])
    assert flat.fits()["float32"].beta_bytes_per_s == math.inf
    text = flat.save(tmp_path / "flat")[1].read_text()
    assert (
        json.loads(text, parse_constant=pytest.fail)["fits"]["float32"]["beta_bytes_per_s"] is None
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "another"}', '{"format": "mlbench-latency-1"}']
)
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"other\.json is not a result of Task 0"):
        LatencyReport.load(path)
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        LatencyReport.load(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_made_is_named(report: LatencyReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file"):
        report.save(tmp_path / "file" / "result")
