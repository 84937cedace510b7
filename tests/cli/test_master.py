"""The embedded master: found, started once, used for a real run, stopped with nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli import _embedded
from mlbench_cli._client import MasterClient
from mlbench_core.client import settings
from mlbench_core.client.masters import find_credentials, read_record, remember_master, start_mark
from mlbench_core.errors import MasterError, MissingDependencyError
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster
from tests.helpers.processes import free_port


@pytest.fixture
def real_master(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that start the real one: it is stopped at the end, whatever happened."""
    pytest.importorskip("fastapi", reason="needs the extra [master]")
    pytest.importorskip("uvicorn", reason="needs the extra [master]")
    patch.setattr(_embedded, "_ANSWER_S", 60.0)
    patch.setattr(_embedded, "STOP_TIMEOUT_S", 60.0)
    yield
    record = read_record()
    if record is not None and record.is_alive():
        os.kill(record.pid, signal.SIGKILL)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlbench_cli", *arguments]


def test_run_with_the_embedded_master_from_start_to_stop(
    real_master: None, call: Call, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    line = f"{sys.executable} {script}"
    own = (
        "--image",
        "custom_image",
        "--command",
        line,
        "--num-cpus",
        "0.5",
        "--output",
        str(tmp_path / "out"),
    )
    result = call("run", "x", "1", "2", *own, "--wait", "--json", "--", "--a", "b c")
    assert "started the master: http://127.0.0.1:" in result.stderr
    assert "it ends after 30 minutes without a run or a request" in result.stderr
    assert [item["state"] for item in json.loads(result.stdout)["results"]] == [
        "finished",
        "finished",
    ]
    assert "[0] rank 0 ['--a', 'b c']" in call("logs", "x-1").stdout
    assert "[1] rank 1 ['--a', 'b c']" in call("logs", "x-2", "--follow").stdout
    assert {"x-1.json", "x-2.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    call("download", "x-2", "-o", str(tmp_path / "x-2.zip"))

    failing = f'{sys.executable} -c "import sys; sys.exit(\\"no data here\\")"'
    result = call(
        "run", "y", "1", "--command", failing, "--wait", "--output", str(tmp_path / "y"), code=1
    )
    assert "started the master" not in result.stderr, "the one that runs is used"
    assert "no data here" in result.stderr
    assert result.stderr.endswith("mlbench: run y-1 failed\n")

    known = settings.read(settings.MASTER)
    assert call("get-dashboard-url").stdout == f"{known['url']}\n"
    assert "a master with the same data runs at" in call("master", code=1).stderr
    assert json.loads(call("master", "--stop", "--json").stdout) == {
        "url": known["url"],
        "pid": known["pid"],
    }
    assert "--json needs --stop" in call("master", "--json", code=2).stderr
    assert start_mark(known["pid"]) is None
    assert "no embedded master is running" in call("master", "--stop", code=1).stderr
    assert "no master is running" in call("status", code=1).stderr


def test_two_runs_at_once_start_one_master(real_master: None) -> None:
    both = [
        subprocess.Popen(
            command("run", name, "1", "--command", "true"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    output = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sum("started the master" in stderr for _, stderr in output) == 1
    assert len(_connect().runs()) == 2
    _embedded.stop_embedded()


def _connect() -> MasterClient:
    location = _embedded.find()
    return MasterClient(location.url, location.token)


def test_foreground_master_is_found_and_ends_on_ctrl_c(real_master: None, call: Call) -> None:
    port = free_port()
    process = subprocess.Popen(
        command("master", "--port", str(port)), stderr=subprocess.PIPE, text=True
    )
    try:
        pause = threading.Event()
        for _ in range(600):
            if _embedded.embedded() is not None or process.poll() is not None:
                break
            pause.wait(0.1)
        assert call("get-dashboard-url").stdout == f"http://127.0.0.1:{port}\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert settings.read(settings.MASTER) == {}


def test_port_in_use(call: Call) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        error = call("master", "--port", str(port), code=1).stderr
    reason = "Address already in use; choose another with --port"
    assert error == f"mlbench: cannot listen on 127.0.0.1 port {port}: {reason}\n"


def test_no_loopback_address_needs_a_token(call: Call) -> None:
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        error = call(
            "master", "--host", "127.0.0.2", "--port", str(busy.getsockname()[1]), code=1
        ).stderr
    assert "cannot listen on 127.0.0.2" in error


@pytest.mark.parametrize(
    "arguments", [("--host", "0.0.0.0"), ("--port", "-1"), ("--port", "70000")]
)
def test_master_used_wrongly(arguments: tuple[str, ...], call: Call) -> None:
    call("master", *arguments, code=2)


def test_missing_extra_has_the_pip_line(call: Call, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="'fastapi'"):
        _embedded.check_installed()
    patch.setattr(
        _embedded.importlib.util, "find_spec", lambda name: None if name == "jinja2" else name
    )
    with pytest.raises(MissingDependencyError, match="'jinja2'"):
        _embedded.check_installed()
    patch.setattr(_embedded.importlib.util, "find_spec", lambda name: None)
    error = call("run", "x", "1", "--command", "true", code=1).stderr
    assert error.endswith("not installed: pip install 'mlbench-core[master]'\n")


def test_master_that_dies_at_its_start_says_why(call: Call, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_embedded, "check_installed", lambda: None)
    dying = [sys.executable, "-c", "raise SystemExit('disk full')"]
    patch.setattr(_embedded, "master_command", lambda *_: dying)
    with pytest.raises(
        MasterError, match=r"ended at its start: disk full \(all of it: .*master\.log\)"
    ):
        _embedded.find_or_start()
    assert settings.read(settings.MASTER) == {}


def test_a_port_that_is_taken_before_the_master_listens_is_not_the_end(
    real_master: None, patch: pytest.MonkeyPatch
) -> None:
    """Another program takes the port that was found free; the master ends, and starts at another
    port."""
    ports = [free_port(), free_port()]
    started: list[int] = []
    real_command = _embedded.master_command
    patch.setattr(_embedded, "_free_port", lambda: ports[len(started)])
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def command_of(host: str, port: int) -> list[str]:
            started.append(port)
            if len(started) == 1:
                rival.bind((host, port))
                rival.listen()
            return real_command(host, port)

        patch.setattr(_embedded, "master_command", command_of)
        location = _embedded.find_or_start()
    assert started == ports
    assert location.url == f"http://127.0.0.1:{ports[1]}"
    _embedded.stop_embedded()


def test_order_of_places(fake: FakeMaster, patch: pytest.MonkeyPatch) -> None:
    """--dashboard-url before the environment before the settings before the embedded one."""
    remember_master(fake.url, os.getpid(), "t", fake.key)
    settings.remember(settings.SETTINGS, {"master_url": "http://settings:1", "token": "s"})
    assert _embedded.find("http://option:1").url == "http://option:1"
    assert _embedded.find().source == "MLBENCH_MASTER_URL"
    assert find_credentials(fake.url) == ("t", fake.key), "the recorded token of the same address"
    patch.delenv("MLBENCH_MASTER_URL")
    assert _embedded.find() == ("http://settings:1", None, "settings.json")
    assert find_credentials("http://settings:1") == ("s", None)
    settings.forget(settings.SETTINGS)
    assert _embedded.find() == (fake.url, "t", "the embedded master")
    patch.setenv("MLBENCH_TOKEN", "of another master")
    assert _embedded.find().token == "t"


def test_recorded_master_that_is_gone_does_not_count(
    fake: FakeMaster, patch: pytest.MonkeyPatch
) -> None:
    patch.delenv("MLBENCH_MASTER_URL")
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    remember_master(fake.url, ended.pid, None, fake.key)
    assert _embedded.embedded() is None
    fake.broken = b"<html>"
    remember_master(fake.url, os.getpid(), None, fake.key)
    assert _embedded.embedded() is None, "the process lives, but is no master"
