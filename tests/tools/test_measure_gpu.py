"""``make gpu`` without a GPU: its plan, and its order, limits and resumption with short commands as
steps."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure_gpu
import psutil
import pytest
from measure_gpu import Step

from tests.helpers.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"missing": [], "gpu": "a GPU", "source": {"commit": "abc"}}


def python(name: str, code: str, limit_s: int = 100) -> Step:
    return Step(name, f"the step {name}", limit_s, ("-c", code))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU, as the probe would describe it."""
    found = dict(MACHINE)
    monkeypatch.setattr(measure_gpu, "probe", lambda: found)
    return found


def run(steps: list[Step], folder: Path, again: bool = False) -> tuple[int, dict[str, str]]:
    """Run steps; return the status, and how each step of the report ended."""
    status = measure_gpu.run_all(steps, steps, folder, again)
    report = json.loads((folder / "results.json").read_text())
    return status, {result["step"]: result["ended"] for result in report["steps"]}


def test_the_steps_fit_into_ten_minutes_and_their_programs_exist() -> None:
    steps = measure_gpu.make_steps(None)
    assert measure_gpu.PROBE_LIMIT_S + sum(step.limit_s for step in steps) <= 600
    # The kernels first, because their tests are among the others.
    assert [step.name for step in steps if step.is_test] == [steps[1].name]
    assert len({step.name for step in steps}) == len(steps)
    named = {part for step in steps for part in step.command if part.endswith(".py")}
    assert len(named) > 10 and sorted(part for part in named if not (ROOT / part).is_file()) == []


def test_every_test_that_is_skipped_without_a_gpu_has_the_mark() -> None:
    needs = re.compile(r"skipif\((not torch\.cuda\.is_available|torch\.cuda\.device_count)")
    bare = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        lines = path.read_text("utf-8").splitlines()
        marks = [
            number
            for number, line in enumerate(lines)
            if line.startswith("@") and needs.search(line)
        ]
        bare += [
            f"{path.name}:{n + 1}"
            for n in marks
            if "@pytest.mark.gpu" not in (lines[n - 1], lines[n + 1])
        ]
    assert bare == []


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports at its top level, and the names that it takes from them."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_tests_for_a_gpu_import_only_what_the_machine_must_have() -> None:
    """A package that is missing there would fail a whole file, or all of them if a conftest.py
    imports it."""
    left = [ROOT / name for name in measure_gpu.find_gpu_tests(ROOT / "tests")]
    left += {
        folder / "conftest.py"
        for path in left
        for folder in path.parents
        if (folder / "conftest.py").is_file()
    }
    assert len(left) > 10
    settings = measure_gpu.read_project()["tool"]["pytest"]["ini_options"]
    own = {"mlbench_core", "benchmarks", "tests"}
    own |= {path.stem for folder in settings["pythonpath"] for path in (ROOT / folder).glob("*.py")}
    brought = {
        re.split(r"[<>=; ]", requirement)[0] for requirement in measure_gpu.list_requirements()
    }
    brought |= {"torch", "torchvision", "numpy"}
    distributions = importlib.metadata.packages_distributions()
    seen: set[Path] = set()
    missing = set()
    while left:
        path = left.pop()
        seen.add(path)
        for module in imported_modules(path):
            top = module.partition(".")[0]
            helper = ROOT / f"{module.replace('.', '/')}.py"
            if top == "tests" and helper.is_file() and helper not in seen:
                left.append(helper)
            if top not in {*sys.stdlib_module_names, *own} and brought.isdisjoint(
                distributions.get(top, [])
            ):
                missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert missing == set()


def test_a_dry_run_names_the_steps_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert (
        measure_gpu.main(["--dry-run", "--output", str(tmp_path / "out"), "--data", str(tmp_path)])
        == 0
    )
    printed = capsys.readouterr().out
    names = [step.name for step in measure_gpu.make_steps(None)]
    assert re.findall(r"^(\S+) +\d+ s ", printed, re.MULTILINE) == names
    assert f"--dataset cifar10 --data {tmp_path} --partial" in printed
    assert not (tmp_path / "out").exists()


def test_a_machine_that_lacks_something_is_told_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(cuda=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(measure_gpu, "TEST_PACKAGES", ("pytest", "no-such-package"))
    missing = measure_gpu.find_missing()
    assert (
        len(missing) == 2
        and "package no-such-package" in missing[0]
        and "not 2.13.0+cpu" in missing[1]
    )
    torch.version.cuda, torch.cuda = "13.0", SimpleNamespace(is_available=lambda: False)
    assert "finds none" in measure_gpu.find_missing()[1]
    torch.cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (7, 5))
    assert "not 7.5" in measure_gpu.find_missing()[1]
    monkeypatch.setattr(measure_gpu, "probe", lambda: {"missing": missing})
    assert measure_gpu.main(["--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().err
    assert all(line in printed for line in missing)
    assert not (tmp_path / "out").exists()


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    order, child = tmp_path / "order", f"import time; time.sleep(30)  # {tmp_path}"
    note = f"print('x', file=open({str(order)!r}, 'a'))"
    steps = [
        python("first", f"{note}; raise SystemExit('no memory')"),
        # The process that it starts holds the GPU as well, so it must end with it.
        python(
            "hangs",
            f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {child!r}]); {note}",
            limit_s=1,
        ),
        python("last", f"{note}; print('the figures')"),
    ]
    status, ended = run(steps, tmp_path / "out")
    assert (status, ended) == (1, {"first": "failed", "hangs": "timed out", "last": "done"})
    assert order.read_text().splitlines() == ["x", "x"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert (
        "| first: the step first | failed |" in table
        and "no memory" in table
        and "the figures" in table
    )
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if child in (process.info["cmdline"] or [])
    ]
    run(steps[:1], tmp_path / "out")  # a step that failed is not done
    assert len(order.read_text().splitlines()) == 3


def test_a_step_is_done_once_for_the_same_sources_and_gpu(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    count = tmp_path / "count"
    once = [python("once", f"print('x', file=open({str(count)!r}, 'a'))")]
    for again, expected in ((False, 1), (False, 1), (True, 2)):
        assert run(once, tmp_path / "out", again) == (0, {"once": "done"})
        assert len(count.read_text().splitlines()) == expected
    for change in ({"source": {"commit": "def"}}, {"gpu": "another"}):
        machine.update(change)
        run(once, tmp_path / "out")
    assert len(count.read_text().splitlines()) == 4
    (tmp_path / "out" / "steps" / "once.json").write_text('{"half')
    run(once, tmp_path / "out")
    assert len(count.read_text().splitlines()) == 5


def test_tests_that_were_all_skipped_are_a_failure(machine: dict[str, Any], tmp_path: Path) -> None:
    for line, expected in (("3 skipped in 1 s", "failed"), ("1 passed, 2 skipped in 1 s", "done")):
        # Python stops at -c, so the word pytest after the code only marks the step.
        step = Step("tests", "tests", 20, ("-c", f"print({line!r})", "pytest"))
        assert run([step], tmp_path / expected)[1] == {"tests": expected}


def test_timings_are_kept_and_shown_as_tables(machine: dict[str, Any], tmp_path: Path) -> None:
    timing = json.loads((ROOT / "benchmarks" / "micro" / "results" / "tracker.json").read_text())
    save = f"import sys; open(sys.argv[1] + '/t.json', 'w').write({json.dumps(timing)!r})"
    step = Step("timing", "a timing", 20, ("-c", save, "{results}"))
    run([step], tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["steps"][0]["files"] == {
        "t.json": timing
    }
    assert f"## {timing['title']}" in (tmp_path / "table.md").read_text()


def test_the_table_has_the_figures_of_a_task() -> None:
    figures = {"samples_per_s": 1234.5, "goal": {"time_to_goal_s": {"slowest": 1.5, "rank_0": 1.4}}}
    result = {
        "files": {"environment.json": {}, "output/task1a/gpu/result.json": figures},
        "output": "the last line",
    }
    assert measure_gpu.summarize(result) == "1,234 samples/s, goal after 1.50 s"
    figures["goal"] = {"time_to_goal_s": None}
    assert measure_gpu.summarize(result) == "1,234 samples/s, goal not reached"
    assert measure_gpu.summarize({"files": {}, "output": "a\n== 1 | 2 ==\n\n"}) == "1 / 2"


def test_a_killed_run_keeps_what_had_ended_and_the_next_one_goes_on(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    folder, begun = tmp_path / "out", tmp_path / "begun"
    second = (
        f"import os, pathlib, time; p = pathlib.Path({str(begun)!r}); "
        "p.exists() or (p.write_text(str(os.getpid())), time.sleep(100))"
    )
    steps = [python("first", "print(1)"), python("second", second)]
    driver = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tools', '.']; import "
        f"measure_gpu as m\nm.probe = lambda: {MACHINE!r}\nsteps = [m.Step(*parts) for parts "
        f"in {[(s.name, s.title, s.limit_s, s.command) for s in steps]!r}]\nm.run_all(steps, "
        f"steps, Path({str(folder)!r}), False)"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: begun.exists() and begun.read_text(), 120, "the second step")
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(int(begun.read_text()), signal.SIGKILL)
    report = json.loads((folder / "results.json").read_text())
    assert [result["step"] for result in report["steps"]] == ["first"]
    before = (folder / "steps" / "first.json").stat().st_mtime_ns
    assert run(steps, folder) == (0, {"first": "done", "second": "done"})
    assert (folder / "steps" / "first.json").stat().st_mtime_ns == before
