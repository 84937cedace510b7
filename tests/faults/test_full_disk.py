"""Disks that are full, and logs that would fill them."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_master.database.store import Store
from mlbench_master.engines import Job
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.engines.logs import LogReader, LogWriter, append_log
from mlbench_master.events import EventBus
from mlbench_master.runs.scheduler import Scheduler
from tests.faults.helpers import add_run, full
from tests.master.helpers import processes_of, wait_for

CHATTY = """
import pathlib, sys, time
goes_on = pathlib.Path(sys.argv[1])
number = 0
while not goes_on.exists():
    print("line", number, "x" * 1000, flush=True)
    number += 1
    time.sleep(0.01)
for number in range(3):
    print("last", number, flush=True)
"""


def test_a_full_disk_ends_no_worker_and_is_stated(small_disk: Path, tmp_path: Path) -> None:
    script = tmp_path / "chatty.py"
    script.write_text(CHATTY)
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    engine = LocalEngine(small_disk)
    run_id = add_run(store, "a", f"{script} {tmp_path / 'go-on'}").id
    scheduler = Scheduler(store, engine, EventBus(), {})
    scheduler.start()

    def run() -> Any:
        return store.run(run_id)

    try:
        wait_for(lambda: engine.logs(f"local-{run_id}").next > 5, what="the first lines")
        with full(small_disk):
            wait_for(
                lambda: "is the disk full?" in run().metadata_dict().get("reason", ""),
                what="the reason",
            )
            assert run().state == "started"
        wait_for(lambda: run().metadata_dict().get("reason") == "", what="the end of the problem")
        (tmp_path / "go-on").touch()
        wait_for(lambda: run().state != "started", what="the end")
    finally:
        scheduler.close()
    assert run().state == "finished"
    reason = run().metadata_dict()["reason"]
    assert " lines of output could not be written: No space left on device: " in reason
    assert reason.endswith("log.jsonl")
    texts = [line["text"] for line in engine.log_tail(f"local-{run_id}")]
    assert texts[-4:] == ["last 0", "last 1", "last 2", "finished"]
    lines = engine.logs(f"local-{run_id}").lines
    (gap,) = [line["text"] for line in lines if "were dropped here" in line["text"]]
    assert gap.split()[0] == reason.split()[0]
    assert all(line["date"] for line in lines), "no line is glued to a part of another"


def test_the_end_of_a_run_is_recorded_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    engine = LocalEngine(small_disk)
    job = engine.start(Job(run_id=1, name="a", command="sleep 100", num_workers=1))
    wait_for(lambda: len(processes_of(small_disk)) == 2)
    with full(small_disk):
        engine.stop(job)
        assert processes_of(small_disk) == []
        assert engine.poll(job).reason.startswith("stopped")
    # A run that cannot start says why, and leaves nothing.
    with full(small_disk), pytest.raises(Exception, match="No space left on device"):
        engine.start(Job(run_id=2, name="b", command="sleep 100", num_workers=1))
    assert processes_of(small_disk) == []


def test_the_end_of_a_run_is_recorded_when_there_is_room_again(
    small_disk: Path, tmp_path: Path
) -> None:
    """The worker has deleted the file that reserves the room."""
    engine = LocalEngine(small_disk)
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, "
        "time\npathlib.Path('../status.json.part').unlink()\nprint('deleted', flush=True)\nwhile "
        "not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.01)\n"
    )
    job = engine.start(
        Job(run_id=1, name="a", command=f"{script} {tmp_path / 'go-on'}", num_workers=1)
    )
    wait_for(lambda: any(line["text"] == "deleted" for line in engine.log_tail(job)))
    with full(small_disk):
        (tmp_path / "go-on").touch()
        wait_for(lambda: len(processes_of(small_disk)) == 1, what="the end of the worker")
        time.sleep(0.5)
        assert engine.poll(job).state == "running"
    wait_for(lambda: engine.poll(job).state == "finished")


def test_another_reader_of_a_database_on_a_full_disk_opens_it(small_disk: Path) -> None:
    address = f"sqlite:///{small_disk / 'master.db'}"
    store = Store(address)
    add_run(store, "a")
    with full(small_disk), closing(store._database_engine.raw_connection()) as first:
        assert first.cursor().execute("SELECT name FROM runs").fetchall() == [("a",)]
        # The pool opens a connection more, since the first one is still lent.
        with closing(store._database_engine.raw_connection()) as second:
            assert second.cursor().execute("SELECT name FROM runs").fetchall() == [("a",)]
    store.close()


def test_a_log_has_a_limit_and_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    limit = 80_000
    writer = LogWriter(tmp_path, limit)
    reader = LogReader(tmp_path)
    for number in range(5000):
        writer.write(0, "stdout", f"line {number}")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    assert [line["text"] for line in reader.read(0, 3).lines] == ["line 0", "line 1", "line 2"]
    page = reader.read(4990, 100)
    assert ([line["text"] for line in page.lines][::9], page.next) == (
        ["line 4990", "line 4999"],
        5000,
    )
    # A reader that follows the log meets each line that is left once, and one sentence for the
    # others.
    texts: list[str] = []
    following = 0
    while page := reader.read(following, 700):
        if not page.lines:
            break
        texts += [line["text"] for line in page.lines]
        following = page.next
    (gap,) = [index for index, text in enumerate(texts) if not text.startswith("line ")]
    assert texts[gap].endswith("were removed: the log has reached its limit")
    first, last = int(texts[gap].split()[1]), int(texts[gap].split()[3])
    left = [number for number in range(5000) if not first <= number <= last]
    assert [text for index, text in enumerate(texts) if index != gap] == [
        f"line {number}" for number in left
    ]
    assert len(reader.tail(65_536)) > 500


def test_binary_output_does_not_grow_the_log(tmp_path: Path) -> None:
    script = tmp_path / "binary.py"
    script.write_text(
        "import os, random\nout = random.Random(1)\nwith os.fdopen(1, 'wb') as "
        "file:\n    file.write(out.randbytes(2_000_000) + b'\\xff' * 2_000_000 + "
        "b'\\n' + bytes(1_000_000) + b'\\nend\\n')\n"
    )
    engine = LocalEngine(tmp_path / "runs")
    job = engine.start(Job(run_id=1, name="a", command=str(script), num_workers=1))
    wait_for(lambda: engine.poll(job).state != "running")
    assert engine.poll(job).state == "finished"
    assert (tmp_path / "runs" / "1" / "log.jsonl").stat().st_size < 5_000_000
    assert engine.log_tail(job)[-2]["text"] == "end"


def test_an_answer_with_lines_has_a_limit_in_bytes(tmp_path: Path) -> None:
    for _ in range(300):
        append_log(tmp_path / "log.jsonl", 0, "stdout", "x" * 16_000)
    reader = LogReader(tmp_path)
    following, sizes = 0, []
    while (page := reader.read(following, 5000)).lines:
        sizes.append(sum(len(line["text"]) for line in page.lines))
        following = page.next
    assert (following, max(sizes) < 1_100_000, sum(sizes)) == (300, True, 300 * 16_000)
    (tmp_path / "log.jsonl").write_bytes(b"\xff" * 3_000_000 + b"\n")
    assert len(LogReader(tmp_path).read(0, 5000).lines[0]["text"]) < 300_000
    assert LogReader(tmp_path).tail(65_536)[-1]["text"]


def test_files_of_the_wrong_kind_block_no_master(tmp_path: Path) -> None:
    """A worker can replace the files of its run by pipes, which block whoever opens them."""
    engine = LocalEngine(tmp_path)
    (tmp_path / "1").mkdir()
    for name in ("log.jsonl", "status.json", "supervisor.json"):
        os.mkfifo(tmp_path / "1" / name)

    def look() -> None:
        engine.note("local-1", "a note")
        states.append(
            (
                engine.poll("local-1").state,
                engine.logs("local-1").lines,
                engine.log_tail("local-1"),
            )
        )

    states: list[Any] = []
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert states == [("failed", [], [])]


TRAINS = """
import pathlib, sys, time
from mlbench_core.controlflow.task_arguments import task_main
from mlbench_core.controlflow.run_results import RunFolder
from mlbench_core.results.configuration import Configuration
from mlbench_core.tracking.tracker import Tracker

def main(run_id, rank, output_dir, **others):
    with RunFolder(pathlib.Path(output_dir), Configuration(workers=1), run_id) as results:
        with Tracker([], run_id, rank, sinks=[results.sink]) as tracker:
            tracker.start()
            print("trains", flush=True)
            while not pathlib.Path(sys.argv[1]).exists():
                time.sleep(0.01)
            for _ in range(2000):
                tracker.record_loss(1.0)

task_main(main, "task9z", argv=["--root-output", sys.argv[2], "--root-checkpoint", sys.argv[2],
                                "--root-dataset", sys.argv[2]])
"""


def test_a_result_that_is_lost_on_a_full_disk_fails_the_run(
    small_disk: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    engine = LocalEngine(tmp_path / "runs")
    job = engine.start(
        Job(
            run_id=1, name="a", command=f"{script} {tmp_path / 'go-on'} {small_disk}", num_workers=1
        )
    )
    wait_for(lambda: any(line["text"] == "trains" for line in engine.log_tail(job)), 60)
    with full(small_disk):
        (tmp_path / "go-on").touch()
        wait_for(lambda: engine.poll(job).state != "running", 60)
    status = engine.poll(job)
    assert (status.state, status.returncode) == ("failed", 1)
    texts = [line["text"] for line in engine.log_tail(job)]
    assert any(
        "error: the result in" in text and "No space left on device" in text for text in texts
    ), texts
    assert not list(small_disk.rglob("result.json"))
