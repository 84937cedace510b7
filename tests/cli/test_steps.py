"""The table of the parts of a step, from a result folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlbench_cli._step_table import print_steps, show_unmeasured
from mlbench_core.comparison.result_record import RunRecord

FIRST = {
    "batches": 1, "train_s": 5.0, "compute_s": 4.0, "communication_s": 1.0, "preprocess_s": 0.0,
    "metrics_s": 0.0, "samples": 8, "tokens": 0, "wall_s": 5.0, "validation_s": 0.0,
    "communication_total_s": 1.0, "communication_exposed_s": 1.0, "communication_size_bytes": 8,
    "communication_wire_bytes": 8, "communication_measured": True, "exchanges": 1,
    "steps_s": {"backprop": 4.0, "opt_step": 0.0},
}  # fmt: skip
LAST = {
    **FIRST, "batches": 3, "train_s": 5.1, "compute_s": 4.06, "communication_s": 1.04,
    "communication_total_s": 1.1, "communication_exposed_s": 1.04, "communication_wire_bytes": 24,
    "samples": 24, "steps_s": {"backprop": 4.04, "opt_step": 0.02},
}  # fmt: skip


def record(folder: Path, name: str, workers: int) -> RunRecord:
    """Return a run whose first step was slow, and whose others took 50 ms."""
    where = {"rank": 0, "time": "2026-01-01T00:00:00+00:00", "epoch": 0, "time_s": 0.0}
    lines = [
        {**where, "kind": "stat", "step": 0, "name": "train_loss", "value": 2.5},
        {**where, "kind": "epoch", "step": 1, "totals": FIRST},
        {**where, "kind": "stat", "step": 3, "name": "train_loss", "value": 0.5},
        {**where, "kind": "end", "step": 3, "totals": LAST, "not_measured": ["data: no loader"]},
    ]
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return RunRecord(name, configuration={"workers": workers}, folder=folder)


def test_the_parts_of_a_step_are_those_without_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(tmp_path / "1", "a-1", 1), record(tmp_path / "2", "a-2", 2)]
    print_steps([*records, RunRecord("without-lines")])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines if line != [""]]
    assert rows == [
        ["A STEP", "a-1", "a-2"],
        ["steps", "3", "3"],
        ["seconds of a step", "50.00 ms", "50.00 ms"],
        ["data", "not measured", "not measured"],
        ["compute", "20.00 ms", "20.00 ms"],
        ["waiting", "20.00 ms", "20.00 ms"],
        ["optimizer", "10.00 ms", "10.00 ms"],
        ["other", "0.00 ms", "0.00 ms"],
        ["compute utilization", "60%", "60%"],
        # One worker sends nothing.
        ["hidden communication", "-", "20.00 ms a step"],
        ["bytes on the wire", "-", "8 B a step"],
        ["samples per second", "160.0", "320.0"],
        ["loss", *["2.5 first, 0.5 last"] * 2],
    ]
    show_unmeasured(records[0])
    assert capsys.readouterr().err == "a-1: not measured: data: no loader\n"


def test_runs_without_raw_lines_have_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_steps([RunRecord("a")])
    show_unmeasured(RunRecord("a"))
    assert capsys.readouterr() == ("", "")
