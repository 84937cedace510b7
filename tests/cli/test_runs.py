"""status, logs, stop, delete, download against a fake master; the failures that every command
shares."""

from __future__ import annotations

import json
import socket
import zipfile
from datetime import datetime, timezone
from pathlib import Path

import click
import pytest

from mlbench_cli import _client
from mlbench_core.client.rest import base_url
from mlbench_core.errors import ConfigurationError
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster, entry
from tests.helpers.processes import free_port


def test_status_lists_runs(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1", state="failed")
    fake.add("a-2", 2)
    lines = call("status").stdout.splitlines()
    assert lines[0].split() == ["RUN", "ID", "STATE", "WORKERS", "BACKEND", "CREATED", "FINISHED"]
    # In local time, with the offset from UTC.
    day, clock, offset = lines[2].split()[5:8]
    assert datetime.fromisoformat(f"{day}T{clock}{offset}") == datetime(
        2024, 5, 1, 10, tzinfo=timezone.utc
    )
    assert (lines[2].split()[:5], lines[2].split()[8:]) == (
        ["a-2", "2", "finished", "2", "gloo"],
        ["-"],
    )
    assert [run["name"] for run in json.loads(call("status", "--json").stdout)] == ["a-1", "a-2"]


def test_status_of_a_run_by_name_or_id(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1", train_loss=0.5)
    fake.metrics[run_id]["train_loss @ 0"].append(entry(0.25))
    text = call("status", "a-1").stdout
    shown_line = next(line for line in text.splitlines() if line.startswith("train_loss @ 0"))
    assert shown_line.endswith("  0.25"), "last, because a text may be longer than a line"
    assert "0.5" not in text
    shown = json.loads(call("status", str(run_id), "--json").stdout)
    assert shown["run"]["name"] == "a-1"
    assert shown["metrics"]["train_loss @ 0"]["value"] == "0.25"


def test_status_of_a_run_that_failed_says_why(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1", state="failed")
    assert "reason" not in call("status", "a-1").stdout
    fake.runs[run_id]["job_metadata"] = {"reason": "worker 1 failed: exit status 1"}
    assert (
        "reason:       worker 1 failed: exit status 1" in call("status", "a-1").stdout.splitlines()
    )


def test_status_of_an_elastic_run_says_who_died_and_its_goodput(
    fake: FakeMaster, call: Call
) -> None:
    run_id = fake.add("spot")
    fake.runs[run_id]["job_metadata"] = {
        "changes": ["worker 1 died: signal 9 (SIGKILL), because its host was lost"],
        "samples": {"useful": 750, "paid": 1000},
    }
    lines = call("status", "spot").stdout.splitlines()
    assert "change:       worker 1 died: signal 9 (SIGKILL), because its host was lost" in lines
    assert "goodput:      75 % (750 of 1000 samples)" in lines


def test_status_of_one_metric_shows_its_history(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1", train_loss=0.5)
    fake.metrics[run_id]["train_loss @ 0"].append(entry(0.25))
    found = json.loads(call("status", "a-1", "--metric", "train_loss @ 0", "--json").stdout)
    assert [item["value"] for item in found["train_loss @ 0"]] == ["0.5", "0.25"]
    assert "it has: train_loss @ 0" in call("status", "a-1", "--metric", "lost", code=1).stderr
    assert "--metric needs" in call("status", "--metric", "loss", code=2).stderr


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Prec@1", "val_global_Prec@1 @ 0"),
        ("val_Prec@1", "val_Prec@1 @ 0"),
        ("val_Prec@1 @ 0", "val_Prec@1 @ 0"),
        ("loss", "loss @ 1"),
        ("lr", "train_lr @ 0"),
        ("summary", "summary @ 0"),
    ],
)
def test_a_metric_is_found_without_prefix_and_rank(
    asked: str, name: str, fake: FakeMaster, call: Call
) -> None:
    run_id = fake.add("a-1")
    names = (
        "train_Prec@1",
        "val_Prec@1",
        "val_global_Prec@1",
        "train_lr",
        "summary",
        "train_x",
        "val_x",
    )
    fake.metrics[run_id] = {f"{known} @ 0": [entry(known)] for known in names} | {
        "loss @ 1": [entry("loss")]
    }
    assert list(json.loads(call("status", "a-1", "-m", asked, "--json").stdout)) == [name]
    told = call("status", "a-1", "-m", asked)
    assert (f"{asked} is {name}\n" == told.stderr) == (asked != name)
    error = call("status", "a-1", "-m", "x", code=1).stderr
    assert error == "mlbench: run a-1 has several metrics 'x': give one of train_x @ 0, val_x @ 0\n"


def test_unknown_run_names_the_known_ones(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1")
    error = call("status", "b-1", code=1).stderr
    assert error == f"mlbench: no run 'b-1' at {fake.url}; runs there: a-1\n"


def test_names_and_logs_cannot_drive_the_terminal(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1", evil="\x1b]0;title\x07\x1b[2Jx")
    fake.lines[run_id] = [
        {"rank": 0, "stream": "stdout", "text": "\x1b[31mred\x1b[0m", "date": "d"}
    ]
    assert "\x1b" not in call("status", "a-1").stdout
    assert call("logs", "a-1").stdout == "[0] red\n"


def test_logs_come_whole_in_pages(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-2", 2)
    fake.lines[run_id] = [
        {"rank": i % 2, "stream": "stdout", "text": f"line {i}", "date": "d"} for i in range(5)
    ]
    assert call("logs", "a-2").stdout.splitlines() == [f"[{i % 2}] line {i}" for i in range(5)]
    lines = [json.loads(line) for line in call("logs", "a-2", "--json").stdout.splitlines()]
    assert [line["text"] for line in lines] == [f"line {i}" for i in range(5)]


def test_logs_are_filtered_by_the_master(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1")
    fake.lines[run_id] = [{"rank": 0, "text": text} for text in ("a", "b", "c", "loss")]
    # The first page has no such line.
    options = ("--rank", "0", "--stream", "stdout", "--search", "loss")
    assert call("logs", "a-1", *options).stdout == "[0] loss\n"
    wanted = {"rank": "0", "stream": "stdout", "search": "loss"}
    assert fake.log_queries == [{**wanted, "since_line": str(line)} for line in (0, 2, 4)]
    call("logs", "a-1", "--stream", "both", code=2)


def test_logs_follow_until_the_run_ends(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    run_id = fake.add("a-1", state="started")
    fake.states[run_id] = ["started", "started", "finished"]
    whole = _client.MasterClient.run

    def grow(client: _client.MasterClient, wanted: int | str) -> dict[str, object]:
        fake.lines[run_id].append({"rank": 0, "text": f"line {len(fake.lines[run_id])}"})
        return whole(client, wanted)

    patch.setattr(_client.MasterClient, "run", grow)
    assert call("logs", "a-1", "--follow").stdout.splitlines() == [
        "[0] line 0",
        "[0] line 1",
        "[0] line 2",
    ]


def test_stop_keeps_and_delete_removes(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1", state="started")
    fake.add("b-1")
    assert call("stop", "a-1", "b-1").stdout.splitlines() == [
        "stopped a-1",
        "b-1 has ended already (finished)",
    ]
    assert fake.runs[1]["state"] == "failed"
    assert "nothing deleted" in call("delete", "a-1", input="n\n").stderr
    assert fake.deleted == []
    call("delete", "a-1", input="y\n")
    call("delete", "b-1", "--yes")
    assert fake.deleted == [1, 2]


def test_delete_in_a_script_asks_nobody_as_in_version_3(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    fake.add("a-1")
    fake.add("b-1")
    assert call("delete", "a-1").stdout == "deleted a-1\n"
    assert fake.deleted == [1]
    patch.setattr("click.confirm", interrupted)
    call("delete", "b-1", code=1)
    assert fake.deleted == [1]


def interrupted(*arguments: object, **options: object) -> None:
    """As click does at Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise click.Abort from None


def test_stop_and_delete_as_json(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1", state="started")
    fake.add("b-1", state="finished")
    stopped = json.loads(call("stop", "a-1", "b-1", "--json").stdout)
    assert [(run["name"], run["state"]) for run in stopped] == [
        ("a-1", "failed"),
        ("b-1", "finished"),
    ]
    assert json.loads(call("delete", "a-1", "--json", input="n\n").stdout) == []
    assert json.loads(call("delete", "a-1", "b-1", "--yes", "--json").stdout) == [
        {"id": 1, "name": "a-1"},
        {"id": 2, "name": "b-1"},
    ]


def test_delete_of_an_unknown_run_deletes_nothing(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1")
    call("delete", "a-1", "missing", "--yes", code=1)
    assert fake.deleted == []


def test_download_writes_a_zip(
    fake: FakeMaster, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.chdir(tmp_path)
    fake.add("a-1", train_loss=0.5)
    call("download", "a-1")
    assert (
        json.loads(zipfile.ZipFile("a-1.zip").read("result_train_loss @ 0.json"))[0]["value"]
        == "0.5"
    )
    told = json.loads(call("download", "a-1", "-o", "sub/x.zip", "--json").stdout)
    assert told["file"] == str(tmp_path / "sub/x.zip")
    assert told["size_bytes"] == Path("sub/x.zip").stat().st_size


def test_broken_download_leaves_the_old_file(fake: FakeMaster, call: Call, tmp_path: Path) -> None:
    fake.add("a-1", train_loss=0.5)
    fake.cut_download = True
    target = tmp_path / "x.zip"
    target.write_text("old")
    assert "an incomplete zip file" in call("download", "a-1", "-o", str(target), code=1).stderr
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_token_is_sent_from_the_environment(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch
) -> None:
    fake.token = "secret"
    assert "needs a token (HTTP 401): set MLBENCH_TOKEN" in call("status", code=1).stderr
    patch.setenv("MLBENCH_TOKEN", "wrong")
    assert "does not accept the token" in call("status", code=1).stderr
    patch.setenv("MLBENCH_TOKEN", "secret")
    call("status")


def test_netrc_and_proxies_do_not_reach_a_master_on_this_machine(
    fake: FakeMaster, call: Call, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    patch.setenv("NETRC", str(tmp_path / "netrc"))
    patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    patch.setenv("http_proxy", "http://127.0.0.1:9")
    fake.token = "secret"
    patch.setenv("MLBENCH_TOKEN", "secret")
    call("status")


def test_refused_connection(call: Call) -> None:
    port = free_port()
    error = call("status", "--dashboard-url", f"127.0.0.1:{port}", code=1).stderr
    assert error == (
        f"mlbench: cannot reach the master at http://127.0.0.1:{port}: "
        "connection refused; is it running?\n"
    )


def test_silent_master_times_out() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            _client.MasterClient(url, timeout_s=0.1) as client,
            pytest.raises(_client.MasterRequestError, match=r"did not answer within 0\.1 s"),
        ):
            client.runs()


@pytest.mark.parametrize("answer", [b"<html>hello</html>", b"7"])
def test_something_else_on_the_port(answer: bytes, fake: FakeMaster, call: Call) -> None:
    fake.broken = answer
    assert "not as an MLBench master does" in call("status", code=1).stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "x:0", "http://x/?y=1"])
def test_bad_address(url: str, call: Call) -> None:
    assert "url of the master must be" in call("status", "--dashboard-url", url, code=1).stderr
    with pytest.raises(ConfigurationError):
        base_url(url)


@pytest.mark.parametrize("ending", ["/", "/api", "/api/"])
def test_the_address_may_be_that_of_the_api(ending: str, fake: FakeMaster, call: Call) -> None:
    call("status", "--dashboard-url", fake.url + ending)


def test_no_master_says_what_to_do(call: Call) -> None:
    error = call("status", code=1).stderr
    assert error.startswith("mlbench: no master is running: start one with 'mlbench master'")


def test_a_run_that_a_user_stopped_is_shown_as_stopped(fake: FakeMaster, call: Call) -> None:
    fake.add("a-1", state="started")
    fake.add("b-1", state="failed")
    call("stop", "a-1")
    assert [line.split()[2] for line in call("status").stdout.splitlines()[1:]] == [
        "stopped",
        "failed",
    ]
    shown = call("status", "a-1").stdout.splitlines()
    assert "state:        stopped" in shown and "reason:       stopped by a user" in shown
    assert call("stop", "a-1").stdout == "a-1 has ended already (stopped)\n"
    assert json.loads(call("status", "a-1", "--json").stdout)["run"]["state"] == "failed", (
        "as in the API"
    )


def test_status_says_what_a_run_waits_for(fake: FakeMaster, call: Call) -> None:
    run_id = fake.add("a-1", state="initialized")
    fake.runs[run_id]["job_metadata"] = {"reason": "waits for run b-1, which is exclusive"}
    assert (
        "reason:       waits for run b-1, which is exclusive"
        in call("status", "a-1").stdout.splitlines()
    )
