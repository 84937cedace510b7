"""The protocol that the scripts under benchmarks/micro share, their JSON files, and the page made
from these."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.conftest import MICRO
from tests.helpers.forked import run_script
from tests.helpers.thorough import some

# Two scripts time nothing: one writes the page, one watches the master's memory.
SCRIPTS = sorted(
    path.stem for path in MICRO.glob("[!_]*.py") if path.stem not in ("report", "master_soak")
)
MACHINE = {"cpu": "a", "cores": 2, "memory_gb": 4, "gpu": "none"}


@pytest.fixture
def bench(micro: Callable[[str], ModuleType]) -> ModuleType:
    return micro("_bench")


@pytest.fixture
def subject(bench: ModuleType) -> Any:
    return bench.Subject("example", "An example", "ms", ("a",), ("Reading.",))


def result(subject: Any, rows: list[dict[str, Any]], date: str = "2026-01-01") -> dict[str, Any]:
    head = {"date": date, "command": "python x.py", "commit": "not recorded", "conditions": "Some."}
    found: dict[str, Any] = subject.as_result(
        [{**head, "machine": MACHINE, "versions": {}, "rows": rows}]
    )
    return found


def row(case: str, variant: str, value: float) -> dict[str, Any]:
    return {
        "case": case,
        "variant": variant,
        "value": value,
        "low": None,
        "high": None,
        "ratios": {},
        "extra": {},
    }


def test_every_block_has_all_variants_in_another_order(bench: ModuleType) -> None:
    names = ["a", "b", "c"]
    orders = [tuple(bench.rotated(names, block)) for block in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)
    assert len(set(orders[:4])) == 4


def test_variants_are_interleaved_after_a_turn_that_warms_up(
    bench: ModuleType, subject: Any
) -> None:
    calls: list[str] = []
    bench.measure(subject, "case", {name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == ["a", "b", "a", "b", "a", "b"]


def test_values_are_medians_and_ratios_are_those_within_a_block(
    bench: ModuleType, subject: Any
) -> None:
    seconds = {"a": iter([9.0, 1.0, 2.0, 4.0]), "b": iter([9.0, 3.0, 4.0, 4.0])}
    variants = {
        name: lambda name=name: bench.Timed(next(seconds[name]), {"extra": 1.0}) for name in "ab"
    }
    rows = bench.measure(subject, "case", variants, 3, amount=2)
    first, second = rows
    assert (first["value"], first["low"], first["high"]) == (
        1000.0,
        500.0,
        2000.0,
    )  # milliseconds of one of two items
    assert second["ratios"] == {"a": [pytest.approx(2.0), 1.0, 3.0]}
    assert second["extra"] == {"extra": 1.0}
    assert bench.Subject("x", "", "rows/s", (), ("",)).value(2.0, 10) == 5.0


def test_a_variant_that_fails_is_reported_and_the_others_go_on(
    bench: ModuleType, subject: Any
) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel |\nfor this")

    rows = bench.measure(subject, "case", {"a": lambda: None, "b": fail}, 2)
    assert rows[0]["value"] > 0
    assert (rows[1]["value"], rows[1]["error"]) == (None, "no kernel | for this")
    assert "| case | b | failed: no kernel / for this |" in bench.markdown(result(subject, rows))


def test_results_that_disagree_end_the_script(bench: ModuleType, subject: Any) -> None:
    with pytest.raises(SystemExit, match="b gives 2, but the other variants give 1"):
        bench.measure(subject, "case", {"a": lambda: 1, "b": lambda: 2}, 1)


def test_a_new_run_replaces_the_cases_that_it_measured_again(
    bench: ModuleType, subject: Any, tmp_path: Path
) -> None:
    bench.save(result(subject, [row("one", "a", 1.0), row("two", "a", 2.0)]), tmp_path)
    bench.save(result(subject, [row("two", "a", 3.0)], "2026-02-02"), tmp_path)
    runs = bench.read(tmp_path / "example.json")["runs"]
    assert [(run["date"], [(r["case"], r["value"]) for r in run["rows"]]) for run in runs] == [
        ("2026-01-01", [("one", 1.0)]),
        ("2026-02-02", [("two", 3.0)]),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["example.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": 3}, r"result\.unit must be .*str.*, not 3"),
        ({"reading": ["a", "b", "c"]}, "one or two lines, not 3"),
        ({"runs": [{}]}, r"runs\[0\] must have command, commit, conditions"),
        ({"more": 1}, "must not have more"),
    ],
)
def test_a_file_of_another_form_is_refused(
    bench: ModuleType, subject: Any, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "example.json"
    path.write_text(json.dumps({**result(subject, []), **change}))
    with pytest.raises(ValueError, match=f"example.json: .*{message}"):
        bench.read(path)


def test_the_page_is_what_the_committed_files_give(micro: Callable[[str], ModuleType]) -> None:
    report = micro("report")
    page = report.page(report.RESULTS)
    assert report.PAGE.read_text() == page, "run: python benchmarks/micro/report.py"
    assert page.count("\n## ") == len(list(report.RESULTS.glob("*.json")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_declares_the_subject_of_its_file(
    micro: Callable[[str], ModuleType], name: str
) -> None:
    script = micro(name)
    declared = script.SUBJECT.as_result([])
    committed = micro("_bench").read(MICRO / "results" / f"{name}.json")
    assert declared == {**committed, "runs": []}


@pytest.mark.parametrize("name", [*SCRIPTS, "report", "master_soak"])
def test_each_script_explains_itself(
    micro: Callable[[str], ModuleType], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        micro(name).main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", some(["cli_start", "tracker", "linear_loading", "cifar_batches"], 3)
)
def test_quick_runs_write_their_file(
    name: str, tmp_path: Path, micro: Callable[[str], ModuleType]
) -> None:
    done = run_script(
        [str(MICRO / f"{name}.py"), "--quick", "--save", str(tmp_path)], timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    found = micro("_bench").read(tmp_path / f"{name}.json")
    (run,) = found["runs"]
    assert run["command"] == f"python benchmarks/micro/{name}.py --quick --save {tmp_path}"
    assert run["machine"]["cores"] >= 1
    assert all(r["value"] > 0 for r in run["rows"])


def test_text_store_needs_data(tmp_path: Path) -> None:
    command = [sys.executable, str(MICRO / "text_store.py"), "--help"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    done = run_script([str(MICRO / "text_store.py")], timeout_s=240, MLBENCH_TEST_DATA="")
    assert done.returncode == 1
    assert done.stderr == (
        "text_store.py needs the text of Multi30k: give --data FOLDER with train.en and train.de\n"
    )


def test_predictions_are_saved_after_each_block(
    micro: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, calls = micro("prediction"), 0

    def run_workers(network: str, workers: int, rounds: int) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls > 2:  # a block is one worker alone and one network
            raise TimeoutError
        collectives = [] if workers == 1 else [["all_reduce", workers, 1000, 1]]
        return {
            name: {"seconds": 0.03 * workers, "collectives": collectives} for name in script.METHODS
        }

    monkeypatch.setattr(script, "run_workers", run_workers)
    with pytest.raises(TimeoutError):
        script.main(["--quick", "--blocks", "3", "--save", str(tmp_path)])
    found = micro("_bench").read(tmp_path / "prediction.json")
    (run,) = found["runs"]
    assert run["conditions"].startswith("1 of 3 blocks of 2 rounds")
    assert {row["value"] for row in run["rows"]} == {60.0}
