"""Reading results from folders, zip files and files of ``mlbench run --wait``."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlbench_core.comparison.group_repeats import usable
from mlbench_core.comparison.load_results import load, save, unpack
from mlbench_core.comparison.table import compare_runs
from mlbench_core.errors import ConfigurationError
from mlbench_core.results.folder import FILES
from tests.cli.fake_master import entry
from tests.comparison.test_result_record import metrics_of, reached
from tests.results.helpers import change, set_in, write_run

RUN = {"name": "demo-2", "num_workers": 2, "state": "finished"}


def write_zip(
    path: Path,
    run: Mapping[str, object] | None,
    metrics: Mapping[str, object],
    result: str = "",
    pods: int = 2,
) -> None:
    """Write a download; ``run=None`` is one of an earlier version."""
    with zipfile.ZipFile(path, "w") as archive:
        if run is not None:
            archive.writestr("run.json", json.dumps(run))
        for name, entries in metrics.items():
            archive.writestr(f"result_{name}.json", json.dumps(entries))
        for rank in range(pods):
            archive.writestr(f"pod_x-worker-{rank}.json", "{}")
        archive.writestr("official_result.txt", result)


def zip_folder(folder: Path, path: Path) -> Path:
    """Write a download with the files of a result folder."""
    write_zip(path, RUN, {})
    with zipfile.ZipFile(path, "a") as archive:
        for file in folder.iterdir():
            if file.name != "official_result.txt":
                archive.write(file, file.name)
        archive.writestr("../../evil.txt", "outside")
    return path


def test_results_at_any_depth_count_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "deep" / "run-2")
    write_run(tmp_path / "a" / "run-1", workers=1)
    save(
        tmp_path / "a" / "run-1.json", {"name": "run-1", "num_workers": 1}, metrics_of(1, 1.0, 1.0)
    )
    save(tmp_path / "a" / "other.json", {**RUN, "name": "other"}, metrics_of(2, 1.0, 1.0))
    (tmp_path / "a" / "notes.json").write_text("{broken")
    (tmp_path / "a" / "list.json").write_text("[]")
    found = load([tmp_path, tmp_path / "a" / "run-1", tmp_path / "a" / "run-1" / "result.json"])
    assert [(record.name, record.workers) for record in found] == [
        ("run-1", 1),
        ("other", 2),
        ("run-2", 2),
    ]
    assert [record.folder for record in found] == [
        tmp_path / "a" / "run-1",
        None,
        tmp_path / "a" / "deep" / "run-2",
    ]


def test_earlier_runs_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    """A run that was killed before its first line leaves only the earlier run in its folder."""
    for name in ("earlier-1", ".new"):
        write_run(tmp_path / "run" / name)
        save(tmp_path / "run" / name / "deep" / "a.json", RUN, metrics_of(2, 1.0, 1.0))
        write_zip(tmp_path / "run" / name / "b.zip", RUN, {})
    assert load([tmp_path], empty_is_error=False) == []
    # The name of the given folder itself does not count.
    assert [record.name for record in load([tmp_path / "run" / "earlier-1"])] == ["earlier-1"]


def test_a_killed_run_is_unfinished_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=1, finish=False)
    lines = folder / "metrics.rank-0.jsonl"
    with lines.open("a") as file:
        file.write('{"rank": 0, "kind": "sta')
    (record,) = load([folder])
    assert (record.state, record.reached, record.time_to_goal_s) == ("unfinished", True, 30.0)
    assert "has no result.json: the run did not end" in record.remarks[0]
    assert "half-written line is left out" in record.remarks[1]
    assert len(record.curve("val_global_Prec@1")) == 3


def test_copies_of_a_killed_run_count_once(tmp_path: Path) -> None:
    """Its remarks have the path of the folder."""
    folder = write_run(tmp_path / "run", finish=False)
    shutil.copytree(folder, tmp_path / "copy")
    assert [record.name for record in load([tmp_path])] == ["run"]


def test_bad_folders_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigurationError, match=r"run has no raw lines of the run \(metrics.js"):
        load([tmp_path])
    folder = write_run(tmp_path / "new")
    set_in(folder / "result.json", 7, "schema_version")
    with pytest.raises(ConfigurationError, match=r"version of .*new/result.json is 7, not 1"):
        load([folder])
    with pytest.raises(ConfigurationError, match="missing does not exist"):
        load([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty has no result: name a result folder"):
        load([tmp_path / "empty"])


def test_zip_and_json_give_the_same_result(tmp_path: Path) -> None:
    metrics = metrics_of(2, 40.0, 8.0)
    save(tmp_path / "a.json", RUN, metrics)
    write_zip(tmp_path / "any name.zip", RUN, metrics)
    (record,) = load([tmp_path])
    assert (record.name, record.phases_s["compute"]) == ("demo-2", 40.0)


def test_a_zip_with_a_result_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = zip_folder(folder, tmp_path / "b.zip")
    (record,) = load([path])
    assert (record.name, record.time_to_goal_s, record.machine["cpu"]) == (
        "demo-2",
        30.1,
        "Model 7",
    )
    set_in(folder / "result.json", 7, "schema_version")
    with pytest.raises(ConfigurationError, match=r"version of result.json in .*c.zip is 7, not 1"):
        load([zip_folder(folder, tmp_path / "c.zip")])


def test_unpacking_writes_known_files_only(tmp_path: Path) -> None:
    path = zip_folder(write_run(tmp_path / "run"), tmp_path / "b.zip")
    target = tmp_path / "x" / "y" / "z"
    target.mkdir(parents=True)
    (target / "old.txt").touch()
    assert unpack(path, target)
    # The result of the run, not the text of the metric, which the archive has as well.
    assert {file.name for file in target.iterdir()} == set(FILES)
    assert not list(tmp_path.rglob("evil.txt"))
    assert [file.name for file in target.parent.iterdir()] == ["z"]
    write_zip(tmp_path / "a.zip", RUN, {})
    assert not unpack(tmp_path / "a.zip", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "cut.zip").write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=r"cut.zip is damaged"):
        unpack(tmp_path / "cut.zip", tmp_path / "none")


def test_a_zip_tells_the_state_of_its_run(tmp_path: Path) -> None:
    times = {"cum_agg @ 0": [entry(8.0)], "cum_fwd_pass @ 0": [entry(40.0)]}
    write_zip(tmp_path / "a.zip", {"name": "bad", "num_workers": 1, "state": "failed"}, times)
    (record,) = load([tmp_path / "a.zip"])
    assert (record.name, record.state, record.total_s) == ("bad", "failed", 48.0)


def test_a_zip_of_version_3_0_has_a_file_for_each_metric_of_a_worker(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "results.zip", "w") as archive:
        for pod in ("rel-mlbench-worker-0", "rel-mlbench-worker-1", "rel-mlbench-worker-12"):
            for metric in ("cpu", "mem_ory"):
                archive.writestr(f"{pod}_{metric}.json", "[]")
        archive.writestr("result_TaskResult @ 0.json", json.dumps([entry(reached(407.123))]))
    (record,) = load([tmp_path])
    assert (record.workers, record.state, record.time_to_goal_s) == (3, "unknown", 407.123)


def test_a_zip_without_a_record_is_honest(tmp_path: Path) -> None:
    times = {"cum_agg @ 0": [entry(8.0)]}
    write_zip(tmp_path / "exp-2024.zip", None, times)
    write_zip(tmp_path / "results.zip", None, times, reached(407.123))
    write_zip(tmp_path / "none.zip", None, times, pods=0)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("me.png", "")
    found = [
        (record.name, record.workers, record.state, record.total_s) for record in load([tmp_path])
    ]
    assert found == [
        ("none", 1, "unknown", 8.0),
        ("exp-2024", 2, "unknown", 8.0),
        ("results", 2, "unknown", 407.123),
    ]


def archive_3_0(
    path: Path, workers: int, text: str, kinds: tuple[str, ...], train_s: float
) -> Path:
    """Write an archive as published with version 3.0: metrics of each rank, without a record and
    without workers."""
    metrics = {f"{kind} @ {rank}": [entry(1.0)] for rank in range(workers) for kind in kinds}
    metrics["TotalCumulativeTrainTime @ 0"] = [entry(train_s)]
    if text:
        metrics["TaskResult @ 0"] = [entry(text)]
    write_zip(path, None, metrics, text, pods=0)
    return path


TRANSLATION = ("train_loss", "val_global_BLEU-Score", "cum_agg")
IMAGES = ("train_loss", "val_global_Prec@1", "val_global_Prec@5")
ROWS = ("train_loss", "val_global_Prec@1", "val_global_F1-Score")


def test_the_published_speed_up_of_gnmt_comes_out_of_its_archives(tmp_path: Path) -> None:
    for workers, train_s in ((1, 65_207.0), (2, 37_500.0), (4, 28_848.0)):
        text = f"BLEU-Score of 24 reached in {train_s:.3f} seconds, Compute: 9000.5 seconds"
        archive_3_0(tmp_path / f"gnmt-{workers}.zip", workers, text, TRANSLATION, train_s)
    records = load([tmp_path])
    assert usable(records) == (records, [])
    groups, found = compare_runs(records)
    assert [(row["workers"], row["goal"]) for row in found.rows] == [
        (n, "BLEU-Score >= 24") for n in (1, 2, 4)
    ]
    assert [round(row["speedup"], 2) for row in found.rows] == [1.0, 1.74, 2.26]
    assert {group.configuration["task"] for group in groups} == {"4a"}
    assert any("it counts as a run of one worker" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("text", "kinds", "name", "task", "goal"),
    [
        ("80% Top 1 Validation Accuracy reached in 9.5 seconds", IMAGES, "a", "1a", "Prec@1 >= 80"),
        ("80% Top 1 Validation Accuracy reached in 9.5 seconds", ROWS, "a", "2a", "Prec@1 >= 80"),
        (
            "80% Top 1 Validation Accuracy reached in 9.5 seconds",
            (),
            "my-task2a",
            "2a",
            "Prec@1 >= 80",
        ),
        ("80% Top 1 Validation Accuracy reached in 9.5 seconds", (), "run", None, "Prec@1 >= 80"),
        ("89% Accuracy reached in 9.5 seconds", (), "a", "2a", "Prec@1 >= 89"),
        ("Perplexity of 70 reached in 9.5 seconds", (), "a", "3a", "Perplexity <= 70"),
        ("Validation BLEU-Score of 25 reached in 9.5 seconds", (), "a", "4b", "BLEU-Score >= 25"),
        (
            "BLEU-Score of 20 reached in 9.5 seconds",
            (),
            "results_transformer_4",
            "4b",
            "BLEU-Score >= 20",
        ),
        ("BLEU-Score of 20 reached in 9.5 seconds", (), "a", None, "BLEU-Score >= 20"),
        ("BLEU-Score of 24 reached", (), "a", "4a", "BLEU-Score >= 24"),
        ("Validation Loss of 0.25 reached in 9.5 seconds", (), "a", None, "Loss <= 0.25"),
        ("done in 9.5 seconds", (), "a", None, "no goal"),
        ("", IMAGES, "a", "1a", "no goal"),
    ],
)
def test_goal_and_task_of_an_archive_are_read_from_its_text_and_metrics(
    tmp_path: Path, text: str, kinds: tuple[str, ...], name: str, task: str | None, goal: str
) -> None:
    (record,) = load([archive_3_0(tmp_path / f"{name}.zip", 2, text, (*kinds, "cum_agg"), 9.5)])
    assert (record.configuration.get("task"), record.goal_text, record.workers) == (task, goal, 2)
    assert record.reached is (True if text else None)


@pytest.mark.parametrize("threshold", [80, 60], ids=["of a task", "of no task"])
def test_three_backends_of_one_task_are_one_task(tmp_path: Path, threshold: int) -> None:
    text = f"{threshold}% Top 1 Validation Accuracy reached in 9.5 seconds"
    for backend in ("gloo", "mpi", "nccl"):
        archive_3_0(tmp_path / f"{backend}-2.zip", 2, text, IMAGES, 9.5)
    groups, found = compare_runs(load([tmp_path]))
    assert len(groups) == 3
    assert len({row["workload"] for row in found.rows}) == 1
    assert not found.profile


def test_an_archive_of_task_0_is_read(tmp_path: Path) -> None:
    metrics = {}
    for rank in range(2):
        metrics[f"val_tensor_size @ {rank}"] = [entry(1.0), entry(100_000.0), entry(100_000.0)]
        metrics[f"val_avg_time @ {rank}"] = [entry(0.001), entry(0.25), entry(0.125)]
    for backend in ("gloo", "mpi"):
        write_zip(tmp_path / f"{backend}.zip", None, metrics, pods=0)
    _, found = compare_runs(load([tmp_path]))
    assert [(row["workload"], row["workers"], row["mean_s"]) for row in found.rows] == [
        ("task 0", 2, None)
    ] * 2
    assert found.remarks[0] == (
        "gloo: it measured 3 all-reduces and has no training time; "
        "the longest mean time with 100,000 elements is 0.25 s"
    )
    assert not found.profile


def test_an_archive_with_files_of_workers_only_is_read(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip", None, {}, pods=2)
    (record,) = load([tmp_path])
    assert (record.workers, record.total_s) == (2, None)


def test_an_image_of_version_3_0_names_its_task(tmp_path: Path) -> None:
    run = {
        "name": "a",
        "num_workers": 2,
        "image": "mlbench/pytorch-wmt17-transformer-all-reduce:latest",
    }
    write_zip(tmp_path / "a.zip", run, {"cum_agg @ 0": [entry(8.0)]})
    (record,) = load([tmp_path])
    assert record.configuration["task"] == "4b"


def test_a_zip_file_that_is_huge_when_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = zip_folder(write_run(tmp_path / "run"), tmp_path / "run.zip")
    for limit in ("_MOST_JSON_BYTES", "MOST_UNPACKED_BYTES"):
        monkeypatch.setattr(f"mlbench_core.comparison.load_results.{limit}", 1000)
    with pytest.raises(
        ConfigurationError, match="bytes when unpacked, and at most 1,000 are allowed"
    ):
        load([archive])
    with pytest.raises(
        ConfigurationError, match="bytes when unpacked, and at most 1,000 are allowed"
    ):
        unpack(archive, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_encrypted_or_damaged_zip_file_is_named(tmp_path: Path) -> None:
    archive = tmp_path / "run.zip"
    write_zip(archive, RUN, {})
    content = archive.read_bytes()
    # The first bit of the flags says that a file is encrypted.
    places = [place for place in range(len(content)) if content[place : place + 4] == b"PK\x01\x02"]
    encrypted = bytearray(content)
    for place in places:
        encrypted[place + 8] |= 1
    unknown = bytearray(content)
    for place in places:
        unknown[place + 10] = 99
    for changed in (encrypted, unknown, b"PK\x03\x04 broken"):
        archive.write_bytes(changed)
        with pytest.raises(ConfigurationError, match=r"run\.zip is damaged .*; download it again"):
            load([archive])


def test_json_files_that_are_not_results_are_skipped(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "deep.json").write_text(100_000 * "[")
    (tmp_path / "big.json").touch()
    os.truncate(tmp_path / "big.json", 1 << 40)
    assert [record.name for record in load([tmp_path])] == ["run"]


def test_a_result_that_is_nested_deeply_is_one_message(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    change(
        folder / "result.json", '"options": {}', '"options": {"x": ' + 900 * "[" + 900 * "]" + "}"
    )
    with pytest.raises(ConfigurationError, match="run is nested hundreds of levels deep"):
        load([folder])


def test_an_absurd_number_of_workers_is_refused_and_a_whole_float_accepted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=2)
    set_in(folder / "result.json", 2.0, "configuration", "workers")
    (record,) = load([folder])
    assert type(record.workers) is int
    set_in(folder / "result.json", 10**400, "configuration", "workers")
    with pytest.raises(
        ConfigurationError, match=r"configuration\.workers must be smaller than or equal to 1000000"
    ):
        load([folder])
