"""``mlbench compare`` and ``mlbench results``."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison import convergence, figures
from mlbench_core.comparison.convergence import Reference
from mlbench_core.comparison.load_results import save
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster, entry, summary
from tests.results.helpers import ENVIRONMENT, GOAL, change, set_in, write_run

PRICES = """
[[machine]]
name = "box"
provider = "own"
cpu = "Model 7"
cores = 2
memory_gib = 16
price_per_hour = 36
spot_per_hour = 3.6
currency = "CHF"
date = 2026-01-01
source = "invoice"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two repeats of two algorithms; adam takes half the time."""
    for name, epoch_s in (("adam", 5.0), ("sgd", 10.0)):
        for seed in (1, 2):
            write_run(
                tmp_path / "runs" / f"{name}-{seed}",
                workers=1,
                epoch_s=epoch_s + seed,
                algorithm=name,
                seed=seed,
            )
    return tmp_path / "runs"


@pytest.fixture
def no_drawing(patch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds; tests of figures draw."""
    patch.setattr(figures, "drawings", lambda *_: [])
    patch.setattr(figures, "draw_all", lambda groups, folder, *_: [folder / "overview.png"])


def test_result_folders_of_anybody_are_compared(folder: Path, call: Call) -> None:
    shown = call("compare", str(folder))
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[1][:6] == ["adam", "1", "2", "2", "0", "19.50"]
    assert lines[2][:6] == ["sgd", "1", "2", "2", "0", "34.50"]
    assert "The rows differ in algorithm (adam, sgd)." in shown.stderr
    assert "Goal: task 1a on digits: Prec@1 >= 90." in shown.stderr


def test_paths_and_names_are_mixed(fake: FakeMaster, folder: Path, call: Call) -> None:
    for index, compute in enumerate((40.0, 42.0, 44.0)):
        fake.add(f"r{index}-2", 2, summary=json.dumps(summary(2, compute, 8.0)))
    fake.add("bad-1", 1, state="failed")
    fake.add("now-1", 1, state="started")
    result = call("compare", str(folder / "sgd-1"), "r*", "bad-1", "now-1", "--json")
    rows = {row["workers"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows[1]["names"] == ["sgd-1"]
    assert (rows[2]["names"], rows[2]["mean_s"]) == (["r0-2", "r1-2", "r2-2"], 51.5)
    assert (rows[2]["standard_deviation_s"], rows[2]["olympic_mean_s"]) == (2.0, 51.5)
    # exp(m -+ t s / sqrt(3)) of the logarithms of 49.5, 51.5 and 53.5.
    assert (rows[2]["interval_low_s"], rows[2]["interval_high_s"]) == pytest.approx(
        (46.737775, 56.690389)
    )
    assert "bad-1 has the state 'failed': left out" in json.loads(result.stdout)["remarks"]
    assert "now-1 has not ended: left out" in result.stderr
    error = call("compare", "bad-1", code=1).stderr
    assert "bad-1 has the state 'failed': left out" in error and "nothing to compare" in error
    assert "no run 'nothing' at" in call("compare", "nothing", code=1).stderr


def test_a_run_at_the_master_whose_folder_is_given_counts_once(
    fake: FakeMaster, folder: Path, call: Call
) -> None:
    fake.add("sgd-1", 1, result=(folder / "sgd-1" / "result.json").read_text())
    result = call("compare", str(folder), "sgd-1", "--json")
    assert [row["names"] for row in json.loads(result.stdout)["rows"]] == [
        ["adam-1", "adam-2"],
        ["sgd-1", "sgd-2"],
    ]
    assert "counts once" not in result.stderr + result.stdout


def test_different_goals_are_refused(folder: Path, call: Call) -> None:
    write_run(folder / "light", workers=1, goal={**GOAL, "threshold": 85.0})
    error = call("compare", str(folder), code=1).stderr
    assert "'Prec@1 >= 90' (adam-1) and 'Prec@1 >= 85' (light)" in error


def test_results_of_version_3_0_have_the_same_goal_as_new_ones(
    folder: Path, call: Call, tmp_path: Path
) -> None:
    command = "/x/task1a_resnet20_cifar10/main.py --dataset digits --light"
    metrics = {"summary @ 0": [entry(json.dumps(summary(1, 80.0, 0.0)))]}
    save(
        tmp_path / "old.json",
        {"name": "old", "num_workers": 1, "state": "finished", "command": command},
        metrics,
    )
    rows = json.loads(call("compare", str(folder), str(tmp_path / "old.json"), "--json").stdout)[
        "rows"
    ]
    assert [row["goal"] for row in rows] == ["Prec@1 >= 90"] * 3
    assert {row["label"].partition(",")[0] for row in rows} == {"adam", "sgd", "light goal"}


def test_a_killed_run_is_named_and_counts_only_if_it_reached_its_goal(
    folder: Path, call: Call
) -> None:
    write_run(folder / "early", workers=1, algorithm="sgd", seed=3, finish=False, epochs=2)
    write_run(folder / "late", workers=1, algorithm="sgd", seed=4, finish=False)
    shown = call("compare", str(folder))
    assert (
        "early has the state 'unfinished' and did not reach its "
        "goal (2 epochs, 20.0 s of training): left out"
    ) in shown.stderr
    assert f"late: {folder / 'late'} has no result.json: the run did not end" in shown.stderr
    assert shown.stdout.splitlines()[2].split()[:4] == ["sgd", "1", "3", "3"]


def test_prices(folder: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    options = ("compare", str(folder), "--prices", str(tmp_path / "prices.toml"), "--json")
    rows = json.loads(call(*options, "--machine", "box").stdout)["rows"]
    assert [row["price"] for row in rows] == pytest.approx([0.195, 0.345])
    content = json.loads(call(*options, "--machine", "box", "--spot").stdout)
    assert content["rows"][0]["price"] == pytest.approx(0.0195)
    assert content["remarks"] == [
        "Price: one box for each worker, spot, 3.6 CHF an hour on 2026-01-01."
    ]
    error = " ".join(call(*options, "--machine", "x", code=2).stderr.split())
    assert "the machine must be one of box, not 'x'" in error
    assert "--prices and --spot need --machine" in call(*options, code=2).stderr
    assert [row["price"] for row in json.loads(call(*options[:2], "--json").stdout)["rows"]] == [
        None,
        None,
    ]


def test_formats_and_files(folder: Path, call: Call, tmp_path: Path, no_drawing: None) -> None:
    assert call("compare", str(folder), "--format", "csv").stdout.startswith("label,workers,")
    assert "| adam | 1 | 2 |" in call("compare", str(folder), "--format", "markdown").stdout
    out = tmp_path / "out"
    shown = call("compare", str(folder), "--baseline", "sgd", "--output", str(out))
    assert {path.name for path in out.iterdir()} == {"table.csv", "table.md", "results.json"}
    assert str(out / "overview.png") in shown.stderr
    (test,) = json.loads((out / "results.json").read_text())["tests"]
    assert (test["a"], test["b"], test["verdict"]) == ("adam", "sgd", "yes")
    assert (
        "baseline must be one of 'adam', 'sgd'"
        in call("compare", str(folder), "--baseline", "x", code=1).stderr
    )


def test_verify(folder: Path, call: Call) -> None:
    shown = call("results", "verify", str(folder)).stdout.splitlines()
    assert shown == [f"{folder / name}: ok" for name in ("adam-1", "adam-2", "sgd-1", "sgd-2")]
    change(folder / "sgd-1" / "metrics.jsonl", "80.0", "80.1")
    result = call("results", "verify", str(folder / "sgd-1"), str(folder), code=1)
    assert f"{folder / 'sgd-1'}: metrics.jsonl was changed" in result.stdout
    assert "mlbench: 1 of 4 result folders cannot be verified" in result.stderr
    found = json.loads(call("results", "verify", str(folder), "--json", code=1).stdout)
    assert [bool(problems) for problems in found.values()] == [False, False, True, False]
    (folder / "empty").mkdir()
    told = call("results", "verify", str(folder / "empty"), code=1).stderr
    assert "empty is not a result folder and has none below it" in told


def test_a_run_that_a_sweep_stopped_has_nothing_to_verify(folder: Path, call: Call) -> None:
    stopped = folder / "sgd-2"
    (stopped / "result.json").unlink()
    assert "result.json is missing" in call("results", "verify", str(folder), code=1).stdout
    (stopped / "run.json").write_text('{"outcome": "finished"}', encoding="utf-8")
    assert "result.json is missing" in call("results", "verify", str(folder), code=1).stdout
    (stopped / "run.json").write_text('{"outcome": "limit"}', encoding="utf-8")
    shown = call("results", "verify", str(folder)).stdout.splitlines()
    assert shown[2:] == [
        f"{folder / 'sgd-1'}: ok",
        f"{stopped}: stopped at the limit, has no result",
    ]


def reference(epochs: int) -> Reference:
    seeds = dict.fromkeys(range(10), float(epochs))
    return Reference("1a", "digits", GOAL, "sgd", 1, 32, seeds)


@pytest.fixture
def submission(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    """Five repeats that follow all rules, and the reference that they agree with."""
    patch.setattr(convergence, "load_references", lambda: [reference(3)])
    for seed in range(5):
        write_run(
            tmp_path / "runs" / f"sgd-{seed}",
            workers=1,
            epoch_s=10.0 + seed,
            algorithm="sgd",
            seed=seed,
        )
    return tmp_path / "runs"


def test_a_submission_that_follows_the_rules(submission: Path, call: Call) -> None:
    lines = call("results", "check", str(submission)).stdout.splitlines()
    assert len(lines) == 5 * 4 + 4
    assert {line.partition(":")[0] for line in lines} == {"ok"}
    assert lines[:4] == [
        "ok: sgd-0: the result follows from the raw lines",
        "ok: sgd-0: closed division: the hyper-parameters are those of the task",
        "ok: sgd-0: the source is commit abababababab",
        "ok: sgd-0: the sum of the phases exceeds the training time by 0.0% at most",
    ]
    assert lines[-4:] == [
        "ok: sgd, 1 worker: the seeds differ: 0, 1, 2, 3, 4",
        "ok: sgd, 1 worker: 5 runs, at least 5 are required",
        "ok: sgd, 1 worker: 5 of 5 runs reached the goal",
        "ok: sgd, 1 worker: 3.00 epochs to the goal, the reference allows 2.64 to 3.36",
    ]


def dirty(division: str) -> dict[str, Any]:
    checkout = {"commit": "ab" * 20, "changed_files": 1, "difference_sha256": "cd" * 32}
    changed = ("batch_size",) if division == "open" else ()
    return {"environment": {**ENVIRONMENT, "checkouts": {"program": checkout}}, "changed": changed}


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        ([{}], "fail: sgd, 1 worker: 1 run, at least 5 are required"),
        (
            [{}, {"epoch_s": 12.0}],
            "fail: sgd, 1 worker: run-1 has the seed 0 of run-0: it counts once",
        ),
        ([{"seed": None}], "fail: sgd, 1 worker: a run did not record its seed"),
        ([{"environment": {}}], "fail: run-0: the commit of the source is not known: run it in a"),
        (
            [dirty("closed")],
            (
                "fail: run-0: the source is commit abababababab with "
                "the local difference cdcdcdcdcdcd: the"
            ),
        ),
        (
            [dirty("open")],
            "cannot be checked: run-0: the source is commit abababababab with the local difference",
        ),
        ([{"changed": ("lr",)}], "ok: run-0: open division, changed: lr"),
        ([{"accuracies": (80.0,)}], "fail: sgd, 1 worker: 0 of 1 runs reached the goal, not run-0"),
        (
            [{"algorithm": "adam"}],
            "cannot be checked: adam, 1 worker: there is no convergence reference",
        ),
        (
            [{"seed": s, "accuracies": (91.0,)} for s in range(5)],
            "fail: sgd, 1 worker: suspiciously fast: 1.00 epochs",
        ),
        (
            [{"seed": s, "accuracies": (1.0, 1.0, 1.0, 1.0, 91.0)} for s in range(4)],
            "ok: sgd, 1 worker: slow: 5.00 epochs to the goal, the reference allows",
        ),
        ([{}], "cannot be checked: sgd, 1 worker: the convergence reference needs at least 3 runs"),
    ],
)
def test_a_broken_rule_is_named(
    runs: list[dict[str, Any]], line: str, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(convergence, "load_references", lambda: [reference(3)])
    for place, options in enumerate(runs):
        write_run(
            tmp_path / f"run-{place}", workers=1, **{"algorithm": "sgd", "seed": 0, **options}
        )
    result = call("results", "check", str(tmp_path), code=1)
    assert any(found.startswith(line) for found in result.stdout.splitlines()), result.stdout
    assert " checks failed" in result.stderr


def test_changed_files_and_phases_break_rules(submission: Path, call: Call) -> None:
    set_in(submission / "sgd-1" / "result.json", 1.0, "times", "rank_0", "train_s")
    lines = (submission / "sgd-2" / "metrics.jsonl").read_text().splitlines()
    end = json.loads(lines[-1])
    end["totals"]["compute_s"] *= 2
    (submission / "sgd-2" / "metrics.jsonl").write_text(
        "\n".join([*lines[:-1], json.dumps(end)]) + "\n"
    )
    found = json.loads(call("results", "check", str(submission), "--json", code=1).stdout)
    failed = {each["subject"]: each["reason"] for each in found if each["status"] == "fail"}
    assert failed["sgd-1"].startswith(
        "it cannot be verified: times.rank_0.train_s of result.json is 1.0"
    )
    assert failed["sgd-2"].startswith("the sum of the phases exceeds the training time by 36.")


def test_a_collection_is_one_page_with_links(
    folder: Path, call: Call, tmp_path: Path, no_drawing: None
) -> None:
    set_in(
        folder / "adam-1" / "environment.json", ["python", "main.py", "--seed", "1"], "command_line"
    )
    out = tmp_path / "docs" / "digits"
    shown = call(
        "results", "collect", str(folder), "-o", str(out), "--title", "Digits | two"
    ).stdout
    assert set(shown.split()) == {
        str(out / name) for name in ("index.md", "table.csv", "runs.csv", "results.json")
    }
    page = (out / "index.md").read_text()
    assert page.startswith("# Digits \\| two\n\n4 runs, 2 of each configuration.")
    assert "- Machine: Model 7, 2 cores, 16 GiB\n" in page
    assert "commit abababababab" in page
    assert "```bash\npython main.py --seed 1\n```" in page
    assert "| adam | 1 | [adam-1](../../runs/adam-1/result.json) | 1 | yes | 18.00 |" in page
    assert (out / "../../runs/adam-1/result.json").is_file()
    row = next(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert (row["name"], row["seed"], row["time_to_goal_s"]) == ("adam-1", "1", "18.0")
    call(
        "results",
        "collect",
        str(folder),
        "-o",
        str(out),
        "--command",
        "mlbench run x\nmlbench run y",
    )
    assert "```bash\nmlbench run x\nmlbench run y\n```" in (out / "index.md").read_text()


def test_files_of_wait_are_collected(call: Call, tmp_path: Path) -> None:
    """One real drawing: the figures are on the page with their captions."""
    for workers, compute in ((1, 80.0), (2, 40.0)):
        run = {
            "name": f"demo-{workers}",
            "num_workers": workers,
            "state": "finished",
            "command": "python x.py",
        }
        metrics = {
            "summary @ 0": [entry(json.dumps(summary(workers, compute, 8.0 * (workers - 1))))]
        }
        save(tmp_path / "runs" / f"demo-{workers}.json", run, metrics)
    made = call(
        "results", "collect", str(tmp_path / "runs"), "-o", str(tmp_path / "page"), "--json"
    ).stdout
    assert str(tmp_path / "page" / "index.md") in json.loads(made)["files"]
    page = (tmp_path / "page" / "index.md").read_text()
    assert "](speedup.png)" in page and "([SVG](speedup.svg))" in page
    assert (tmp_path / "page" / "speedup.png").is_file()
    assert "| x.py | 2 | demo-2 | - | yes | 49.50 |" in page
