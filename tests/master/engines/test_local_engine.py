"""Runs on this machine: started, logged, ended, survived."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mlbench_master.engines import Job, make_engine
from mlbench_master.engines.error_search import ErrorSearch
from mlbench_master.engines.local import engine as local
from mlbench_master.engines.local.engine import LocalEngine, worker_commands
from mlbench_master.engines.logs import LogReader, append_log
from tests.helpers.thorough import some
from tests.master.helpers import TestClient, processes_of, server, wait_for

WORKER = """
# torch is named, so that workers may be forks.
import os, sys, time
rank = os.environ["RANK"]
print("args", sys.argv[1:], "world", os.environ["WORLD_SIZE"], "run", os.environ["MLBENCH_RUN_ID"])
print("to stderr", rank, file=sys.stderr)
print("pid", os.getpid())
seconds, status = float(sys.argv[1]), int(sys.argv[2])
end = time.monotonic() + seconds
while time.monotonic() < end and not (sys.argv[3:] and os.path.exists(sys.argv[3])):
    time.sleep(0.05)
sys.exit(status if rank == "0" else 0)
"""


@pytest.fixture(params=some(["0", "1"]), ids={"1": "forks", "0": "new programs"}.get)
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script whose workers are forks of a process that has imported torch, or new programs."""
    monkeypatch.setenv(local.FORK_VARIABLE, request.param)
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def create(
    client: Any, command: str, workers: int = 2, name: str = "a-run", base: str = ""
) -> dict[str, Any]:
    body = {"name": name, "num_workers": workers, "num_cpus": 1, "command": command}
    response = client.post(f"{base}/api/runs/", json=body)
    assert response.status_code == 201, response.text
    return dict(response.json())


def wait_state(
    client: Any, run_id: int, *states: str, timeout_s: float = 60, base: str = ""
) -> dict[str, Any]:
    def look() -> Any:
        run = client.get(f"{base}/api/runs/{run_id}/").json()
        return run if run["state"] in states else None

    return dict(wait_for(look, timeout_s, f"state {states}"))


def lines(client: Any, run_id: int, base: str = "") -> list[dict[str, Any]]:
    return list(client.get(f"{base}/api/runs/{run_id}/logs/").json()["lines"])


def test_a_command_runs_once_for_each_worker(
    client: TestClient, script: Path, tmp_path: Path
) -> None:
    run = create(client, f"python {script} 0 0 '{{run_id}}' {{rank}} {{hosts}} {{backend}}")
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["state"] == "finished", done
    assert done["finished_at"] > done["created_at"]
    assert {"to stderr 0", "to stderr 1"} <= set(done["job_metadata"]["stderr"])
    assert sum(line.startswith("args") for line in done["job_metadata"]["stdout"]) == 2
    said = {
        line["rank"]: line["text"]
        for line in lines(client, run["id"])
        if line["text"].startswith("args")
    }
    for rank in (0, 1):
        wanted = ["0", "0", str(run["id"]), str(rank), "127.0.0.1,127.0.0.1", "gloo"]
        assert said[rank] == f"args {wanted} world 2 run {run['id']}"
    page = client.get(f"/api/runs/{run['id']}/logs/?since_line=1").json()
    assert page["lines"] == lines(client, run["id"])[1:]
    assert (
        client.get(f"/api/runs/{run['id']}/logs/?since_line={page['next']}").json()["lines"] == []
    )
    assert processes_of(tmp_path) == []


def test_a_killed_worker_ends_the_run_and_is_named(
    client: TestClient, script: Path, tmp_path: Path
) -> None:
    script.write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WORKER
    )  # does not listen
    run = create(client, f"{script} 100 0")

    def pids() -> dict[int, int]:
        found = {
            x["rank"]: int(x["text"][4:])
            for x in lines(client, run["id"])
            if x["text"].startswith("pid ")
        }
        return found if len(found) == 2 else {}

    workers = wait_for(pids, 60, "both workers")
    places = {rank: psutil.Process(pid).environ() for rank, pid in workers.items()}
    for rank, place in places.items():
        wanted = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        assert (
            place.items() >= {**wanted, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}.items()
        )
    assert places[0]["MASTER_PORT"] == places[1]["MASTER_PORT"]
    assert psutil.Process(workers[0]).ppid() == psutil.Process(workers[1]).ppid()
    assert (
        len(processes_of(tmp_path)) == 3
    )  # the workers and their supervisor, and nobody in between
    os.kill(workers[1], signal.SIGKILL)
    done = wait_state(client, run["id"], "finished", "failed")
    assert (done["state"], done["job_metadata"]["returncode"]) == ("failed", -9)
    assert done["job_metadata"]["reason"] == "worker 1 died: signal 9 (SIGKILL)"
    assert "worker 1 died: signal 9 (SIGKILL)" in [
        line["text"] for line in lines(client, run["id"])
    ]
    assert "worker 1 died" in "".join(done["job_metadata"]["stderr"])
    assert processes_of(tmp_path) == []


def test_the_first_failure_is_named_and_no_output_is_mistaken_for_it(
    client: TestClient, tmp_path: Path
) -> None:
    """A worker that fails because another one is gone ends a moment later."""
    script = tmp_path / "domino.py"
    script.write_text(
        "import os, pathlib, sys, time, psutil\nprint('[worker1]:failed (exitcode: 7) local_rank: "
        "0 (pid: 1)', flush=True)\npid = pathlib.Path('pid')\nif os.environ['RANK'] == '1':\n    "
        "pathlib.Path('part').write_text(str(os.getpid()))\n    "
        "pathlib.Path('part').rename(pid)\n    os._exit(3)\nwhile not pid.exists(): "
        "time.sleep(0.01)\nwhile psutil.pid_exists(int(pid.read_text())) and "
        "psutil.Process(int(pid.read_text())).status() != 'zombie':\n    "
        "time.sleep(0.001)\ntime.sleep(1)\nos._exit(1)\n"
    )
    run = create(client, f"{script}")
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["job_metadata"]["reason"] == "worker 1 failed: exit status 3"
    said = [
        (line["rank"], line["text"][:10])
        for line in lines(client, run["id"])
        if "exitcode" in line["text"]
    ]
    assert sorted(said) == [(0, "[worker1]:"), (1, "[worker1]:")]


def test_a_worker_that_fails_ends_the_others(
    client: TestClient, script: Path, tmp_path: Path
) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(100)\n"
    )
    run = create(client, f"python {failing}")
    done = wait_state(client, run["id"], "finished", "failed")
    assert (done["state"], done["job_metadata"]["reason"]) == (
        "failed",
        "worker 1 failed: exit status 3",
    )
    assert done["job_metadata"]["returncode"] == 3
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "worker 1 died: signal 9 (SIGKILL)"),
        ("ctypes.string_at(0)", "worker 1 died: signal 11 (SIGSEGV)"),
        ("sys.exit(3)", "worker 1 failed: exit status 3"),
        ("sys.exit(1)", "worker 1 failed: exit status 1"),
        ("sys.exit('no data')", "worker 1 failed: exit status 1: no data"),
        ("sys.stderr.write('no data\\nx.py:1: UserWarning: late\\n  warn()\\n'); sys.exit(3)",
         "worker 1 failed: exit status 3: no data"),
        ("sys.stderr.buffer.write(b'caf\\xe9 is missing'); sys.exit(1)",
         "worker 1 failed: exit status 1: caf\ufffd is missing"),
        ("import logging; logging.basicConfig(level=20); logging.info('ready'); sys.exit(1)",
         "worker 1 failed: exit status 1"),
        ("sys.exit('long ' * 100)", f"worker 1 failed: exit status 1: {('long ' * 100)[:300]}"),
        ("import faulthandler; faulthandler.enable(); os.abort()",
         "worker 1 died: signal 6 (SIGABRT): Fatal Python error: Aborted"),
        ("int('x')",
         "worker 1 failed: exit status 1: ValueError: invalid literal for int() with base 10: 'x'"),
        # The later of two chained exceptions ended the worker; only the first line of its message
        # is shown.
        ("import argparse; argparse.ArgumentParser('a.py').error('no --x')",
         "worker 1 failed: exit status 2: a.py: error: no --x"),
        ("{}['a']", "worker 1 failed: exit status 1: KeyError: 'a'"),
        ("exec(')')", "worker 1 failed: exit status 1: SyntaxError: unmatched ')'"),
        ("raise RuntimeError('one\\n\\ntwo')", "worker 1 failed: exit status 1: RuntimeError: one"),
        ("raise KeyError('x' * 400)", f"worker 1 failed: exit status 1: KeyError: '{'x' * 289}"),
        ("traceback.print_exc(); sys.exit(4)", "worker 1 failed: exit status 4"),
    ],
)  # fmt: skip
def test_the_reason_says_which_rank_failed_and_how(
    tmp_path: Path, ending: str, reason: str
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import ctypes, os, sys, time, traceback\nif os.environ['RANK'] != '1': "
        "time.sleep(100)\ntry:\n    raise OSError('before')\nexcept OSError as error:\n    "
        f"print('  File \"not an error\"')\n    print('ValueError: of stdout')\n    {ending}\n"
    )
    engine = LocalEngine(tmp_path / "runs", grace_s=0.1)
    job = engine.start(Job(run_id=1, name="a", command=str(script), num_workers=2))
    status = wait_for(lambda: None if engine.poll(job).state == "running" else engine.poll(job))
    assert (status.state, status.reason) == ("failed", reason)


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]: ValueError: no such file: data.txt
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 12, in <module>
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1
E1128 05:02:11.000 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) \
local_rank: 1 (pid: 9)
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 9)
============================================================
"""


def test_the_reason_is_the_first_cause_in_the_output_of_torchrun() -> None:
    search = ErrorSearch()
    for line in TORCHRUN.splitlines():
        search.add(line)
    assert search.said(1) == "ValueError: no such file: data.txt"


def test_the_reason_is_that_of_the_worker_that_failed_by_itself(tmp_path: Path) -> None:
    """It has closed its connections, but another worker ends before it."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, pathlib, sys, time\nrank = os.environ['RANK']\nif rank == '0':\n    raise "
        "ConnectionResetError('Connection reset by peer')\n"
        'sys.stderr.write(\'Traceback (most recent call last):\\n  File "a.py", line '
        "1\\nValueError: no data\\n')\nsys.stderr.flush()\nwhile not "
        f"pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\nos._exit(1)\n"
    )
    engine = LocalEngine(tmp_path / "runs", grace_s=60)
    job = engine.start(Job(run_id=1, name="a", command=str(script), num_workers=2))
    wait_for(lambda: any("ConnectionResetError" in line["text"] for line in engine.log_tail(job)))
    (tmp_path / "go").touch()
    status = wait_for(lambda: None if engine.poll(job).state == "running" else engine.poll(job))
    assert status.reason == "worker 1 failed: exit status 1: ValueError: no data"


def test_the_reason_has_no_prefix_of_torch(tmp_path: Path) -> None:
    """After init_process_group, torch writes the rank before each line of an uncaught exception."""
    script = tmp_path / "fails.py"
    trace = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    '
        "^^^\nValueError: bad\n"
    )
    lines = "".join(f"[rank1]: {line}\n" for line in trace.splitlines())
    script.write_text(
        f"import os, sys\nsys.stderr.write({lines!r} + '[W1 "
        "c10d.cpp:1] Warning: late\\n')\nos._exit(1)\n"
    )
    engine = LocalEngine(tmp_path / "runs", grace_s=0.1)
    job = engine.start(Job(run_id=1, name="a", command=str(script), num_workers=1))
    status = wait_for(lambda: None if engine.poll(job).state == "running" else engine.poll(job))
    assert status.reason == "worker 0 failed: exit status 1: ValueError: bad"


def test_a_custom_backend_may_start_the_command_once(client: TestClient, tmp_path: Path) -> None:
    """Without run_all_nodes the first worker starts the others, with an mpirun of its own for
    example."""
    own = tmp_path / "own.py"
    own.write_text(
        "import os, sys\nprint('args', sys.argv[1:], "
        "os.environ.get('WORLD_SIZE'), os.environ['MASTER_ADDR'])"
    )
    body = {
        "name": "own",
        "num_workers": 2,
        "num_cpus": 0.5,
        "backend": "custom_backend",
        "custom_backend": "ucx",
    }
    command = f"{own} {{rank}} {{hosts}} {{backend}}"
    run = client.post(
        "/api/runs/", json={**body, "command": command, "run_all_nodes": False}
    ).json()
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["job_metadata"]["stdout"] == [
        "args ['0', '127.0.0.1,127.0.0.1', 'ucx'] None 127.0.0.1"
    ], done
    assert lines(client, run["id"])[0]["text"].startswith(
        "note: run_all_nodes is false, so only worker 0 of 2 runs"
    )


def test_a_command_that_does_not_exist_says_so(client: TestClient) -> None:
    run = create(client, "no-such-program --x", workers=1)
    done = wait_state(client, run["id"], "failed")
    assert (
        done["job_metadata"]["reason"]
        == "cannot start 'no-such-program': No such file or directory"
    )


def test_stop_keeps_the_run_and_delete_ends_it(client: TestClient, tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"  # ignores SIGTERM, and has a child in a session of its own
    stubborn.write_text(
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, "
        "signal.SIG_IGN)\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(100)'], start_new_session=True)\nprint('ready', flush=True)\ntime.sleep(100)\n"
    )
    first = create(client, f"python {stubborn}", workers=1, name="first")
    client.post("/api/metrics/", json={"run_id": first["id"], "name": "loss @ 0", "value": 1})
    wait_for(lambda: any(line["text"] == "ready" for line in lines(client, first["id"])))
    assert len(processes_of(tmp_path)) == 3
    stopped = client.post(f"/api/runs/{first['id']}/stop/").json()
    assert (stopped["state"], stopped["job_metadata"]["reason"]) == ("failed", "stopped by a user")
    assert (
        lines(client, first["id"])[-1]["text"] == "stopped"
    )  # the supervisor cleaned up and was not killed
    assert processes_of(tmp_path) == []
    assert len(client.get(f"/api/metrics/{first['id']}/?metric_type=run").json()["loss @ 0"]) == 1

    second = create(client, "sleep 100", workers=1, name="second")
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    assert client.delete(f"/api/runs/{second['id']}/").status_code == 204
    assert processes_of(tmp_path) == []
    assert client.get(f"/api/runs/{second['id']}/").status_code == 404
    assert not (tmp_path / "data" / "runs" / str(second["id"])).exists()


def test_a_run_survives_the_master_and_a_lost_one_is_marked(script: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    enough = tmp_path / "enough"  # ends the kept run, which no slow machine ends too early
    with server(data) as (base, master):
        kept = create(httpx, f"python {script} 100 0 {enough}", workers=1, name="kept", base=base)
        lost = create(httpx, "sleep 100", workers=1, name="lost", base=base)
        wait_state(httpx, kept["id"], "started", base=base)
        wait_state(httpx, lost["id"], "started", base=base)
        for run in (kept, lost):
            folder = data / "runs" / str(run["id"])
            wait_for(lambda folder=folder: len(processes_of(folder)) == 2)
        master.kill()
        master.wait()
    assert len(processes_of(data / "runs" / str(kept["id"]))) == 2
    for process in processes_of(data / "runs" / str(lost["id"])):
        if "supervise" in " ".join(process.cmdline()):
            process.kill()
    with server(data) as (base, _):
        assert wait_state(httpx, kept["id"], "started", base=base)["name"] == "kept"
        gone = wait_state(httpx, lost["id"], "failed", base=base)
        assert gone["job_metadata"]["reason"].startswith("lost")
        assert processes_of(data / "runs" / str(lost["id"])) == []
        enough.touch()
        assert wait_state(httpx, kept["id"], "finished", "failed", base=base)["state"] == "finished"


def test_runs_wait_for_free_workers_smallest_first(tmp_path: Path) -> None:
    from mlbench_master import create_app

    app = create_app(data_dir=tmp_path / "data", engine=LocalEngine(tmp_path / "runs", cores=2))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        goes_on = tmp_path / "goes-on"
        command = f"sh -c 'while [ ! -e {goes_on} ]; do sleep 0.05; done'"
        first = create(client, command, workers=1, name="first")
        wait_state(client, first["id"], "started")
        huge = create(client, "sleep 0", workers=3, name="huge")
        small = create(client, "sleep 0", workers=2, name="small")
        assert client.get(f"/api/runs/{small['id']}/").json()["state"] == "initialized"
        phases = {pod["name"]: pod["phase"] for pod in client.get("/api/pods/").json()}
        assert phases["first-worker-0"] == "Running" and phases["small-worker-1"] == "Pending"
        goes_on.touch()
        done = {
            name: wait_state(client, run["id"], "finished")
            for name, run in (("small", small), ("huge", huge))
        }
        assert (
            wait_state(client, first["id"], "finished")["finished_at"]
            <= done["small"]["started_at"]
        )
        assert done["small"]["finished_at"] <= done["huge"]["started_at"]
        assert "warning: 3 workers x 1 core want" in lines(client, huge["id"])[0]["text"]


def test_a_worker_that_writes_into_its_log_and_status_wedges_nothing(
    client: TestClient, tmp_path: Path
) -> None:
    """The folder of the workers lies below that of the run, which holds what the master reads."""
    other = create(client, "sleep 100", workers=1, name="other")
    garbage = tmp_path / "garbage.py"
    garbage.write_text(
        "import pathlib, time\n"
        "log = pathlib.Path('../log.jsonl').open('a', buffering=1)\n"
        "log.write('5\\n{\"rank\": 0}\\nnull\\n' + '[' * 100_000 + '\\n')\n"
        "time.sleep(0.5)\n"
    )
    first = create(client, f"{garbage}", workers=1, name="first")
    done = wait_state(client, first["id"], "finished", "failed")
    assert done["state"] == "finished"
    texts = {line["text"] for line in lines(client, first["id"])}
    assert texts >= {"5", '{"rank": 0}', "null"}
    assert client.get(f"/runs/{first['id']}/").status_code == 200

    garbage.write_text(
        "import pathlib, time\n"
        'pathlib.Path(\'../status.json\').write_text(\'{"returncode": 0, "reason": "", '
        '"finished_at": 0}\')\n'
        "time.sleep(0.5)\npathlib.Path('../status.json').unlink()\npathlib.Path('../status.json').mkdir()\n"
    )
    second = create(client, f"{garbage}", workers=1, name="second")
    failed = wait_state(client, second["id"], "finished", "failed")
    assert failed["state"] == "failed"
    assert "status.json is damaged: [Errno 21] Is a directory" in failed["job_metadata"]["reason"]
    assert processes_of(tmp_path / "data" / "runs" / str(second["id"])) == []
    assert client.get(f"/api/runs/{other['id']}/").json()["state"] == "started"
    assert [
        client.delete(f"/api/runs/{run['id']}/").status_code for run in (first, second, other)
    ] == [204] * 3


def test_an_unknown_engine_and_an_id_of_a_job_that_would_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown engine 'x'; known: local, "):
        make_engine("x", tmp_path)
    with pytest.raises(ValueError, match="job_id must be local-NUMBER"):
        LocalEngine(tmp_path).logs("../../etc")


def test_every_rank_is_a_process_of_its_own() -> None:
    def commands(command: str) -> list[dict[str, Any]]:
        return worker_commands(
            Job(run_id=7, name="a", command=command, num_workers=2, backend="gloo")
        )

    for rank, started in enumerate(
        commands("'/a b/main.py' --run_id {run_id} --backend {backend}")
    ):
        assert started["argv"] == [
            sys.executable,
            "/a b/main.py",
            "--run_id",
            "7",
            "--backend",
            "gloo",
        ]
        assert (started["rank"], started["env"]["RANK"]) == (rank, str(rank))
    ranked = commands("main.py --rank {rank}")
    assert [command["argv"][1:] for command in ranked] == [
        ["main.py", "--rank", "0"],
        ["main.py", "--rank", "1"],
    ]
    assert commands("echo '$HOME; {rank}'")[1]["argv"] == ["echo", "$HOME; 1"]


@pytest.mark.parametrize(
    ("visible", "listing", "gpus"),
    [
        (None, "GPU 0: A (UUID: GPU-1a)\nGPU 1: A (UUID: GPU-2b)", ("GPU-1a", "GPU-2b")),
        (None, "GPU 0: A (UUID: GPU-1)\n  MIG 1g Device 0: (UUID: MIG-2)\n  MIG 1g Device 1: "
               "(UUID: MIG-3)\n"
         "GPU 1: A (UUID: GPU-4)", ("MIG-2", "MIG-3", "GPU-4")),
        (None, None, ()),
        ("1,0", "GPU 0: A (UUID: GPU-1)\nGPU 1: A (UUID: GPU-2)", ("1", "0")),
        ("0, 3", "GPU 0: A (UUID: GPU-1)", ("0",)),
        ("2,GPU-9,2", None, ("2", "GPU-9")),
        ("0,-1,1", None, ("0",)),
        ("", "GPU 0: A (UUID: GPU-1)", ()),
        ("1", "exit 9", ("1",)),
    ],
)  # fmt: skip
def test_the_engine_finds_the_gpus_that_it_may_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    listing: str | None,
    gpus: tuple[str, ...],
) -> None:
    if listing is not None:
        program = tmp_path / "nvidia-smi"
        said = listing if listing.startswith("exit") else f'[ "$*" = -L ] && printf "{listing}"'
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert LocalEngine(tmp_path).gpus == gpus


def test_each_worker_sees_its_own_gpu_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlbench_master import create_app

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2,GPU-3")
    script = tmp_path / "place.py"
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"
    script.write_text(f"import os\nprint('place', *(os.environ[name] for name in {names}))\n")
    app = create_app(data_dir=tmp_path / "data", engine=LocalEngine(tmp_path / "runs", cores=2))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        body = {"num_workers": 2, "num_cpus": 1, "command": str(script)}
        run = client.post("/api/runs/", json={"name": "gpu", "gpu_enabled": True, **body}).json()
        done = wait_state(client, run["id"], "finished", "failed")
        assert sorted(done["job_metadata"]["stdout"]) == [
            "place 0 0 2 1 GPU-1",
            "place 1 0 2 1 GPU-2",
        ]
        assert done["job_metadata"]["gpus"] == ["GPU-1", "GPU-2"]
        run = client.post("/api/runs/", json={"name": "cpu", **body}).json()
        done = wait_state(client, run["id"], "finished", "failed")
        places = ["place 0 0 2 2 GPU-1,GPU-2,GPU-3", "place 1 1 2 2 GPU-1,GPU-2,GPU-3"]
        assert (sorted(done["job_metadata"]["stdout"]), "gpus" in done["job_metadata"]) == (
            places,
            False,
        )


@pytest.mark.parametrize(
    "changes", [{"backend": "mpi", "command": "mpirun -n 2 main.py"}, {"all_nodes": False}]
)
def test_a_command_that_starts_all_workers_sees_all_gpus_of_the_run(
    changes: dict[str, Any],
) -> None:
    fields = {
        "run_id": 1,
        "name": "a",
        "command": "main.py",
        "num_workers": 2,
        "gpus": ("3", "1"),
        **changes,
    }
    (command,) = worker_commands(Job(**fields))
    assert command["env"]["CUDA_VISIBLE_DEVICES"] == "3,1"


MEETING = """
import os, socket, sys, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if sys.argv[1] == "0":
    with socket.create_server(place) as server:
        server.accept()[0].sendall(b"met")
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            print(socket.create_connection(place, timeout=60).recv(3).decode())
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


def test_nobody_takes_the_workers_port_before_they_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program tries to between the choice of the port and the start of the workers, and
    afterwards."""
    script = tmp_path / "meet.py"
    script.write_text(MEETING)
    engine = LocalEngine(tmp_path / "runs")
    rival = socket.socket()
    refused = []

    def take_port(folder: Path, *others: Any) -> Any:
        commands = json.loads((folder / "job.json").read_text())["commands"]
        try:
            rival.bind(("127.0.0.1", int(commands[0]["env"]["MASTER_PORT"])))
            rival.listen()
        except OSError as error:
            refused.append(error.errno)
        return start(folder, *others)

    start = local.start_supervisor
    monkeypatch.setattr(local, "start_supervisor", take_port)
    job = engine.start(Job(run_id=1, name="a", command=f"{script} {{rank}}", num_workers=2))
    try:
        wait_for(lambda: engine.poll(job).state != "running", what="the run")
        assert refused == [errno.EADDRINUSE]
        assert engine.poll(job).state == "finished", engine.logs(job).lines
        assert "met" in [line["text"] for line in engine.logs(job).lines]
    finally:
        rival.close()
        engine.stop(job)


def test_the_log_index_reads_from_any_line_and_waits_for_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    index = LogReader(tmp_path)
    assert index.read(0, 10).next == 0
    for number in range(1200):
        append_log(path, 0, "stdout", str(number))
    assert [line["text"] for line in index.read(0, 2).lines] == ["0", "1"]
    assert [line["text"] for line in index.read(1100, 5000).lines] == [
        str(n) for n in range(1100, 1200)
    ]
    with path.open("a") as file:
        file.write('{"rank": 0, "str')
    page = index.read(1198, 10)
    assert (len(page.lines), page.next) == (2, 1200)
    assert index.read(1200, 10).next == 1200
    assert index.read(5000, 10).lines == []


def test_a_run_starts_in_its_folder_with_the_environment_of_its_call(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_ALGO", "HF_TOKEN", "PYTHONPATH", "PYTHONIOENCODING"):
        monkeypatch.setenv(name, "latin-1" if name == "PYTHONIOENCODING" else "of-the-master")
    folder = tmp_path / "a folder"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "mine.py").write_text("value = 'mine'\n")
    (folder / "show.py").write_text(
        "import os, mine\nprint(mine.value, os.environ['NCCL_ALGO'], os.environ.get('HF_TOKEN'), "
        "os.environ['W_TOKEN'], '\u640d')\nprint(os.getcwd())\n"
    )
    caller = {
        "cwd": str(folder),
        "environment": {"NCCL_ALGO": "Tree", "PYTHONPATH": "lib", "PATH": os.environ["PATH"]},
    }
    body = {"name": "a", "num_workers": 1, "caller": caller, "environment": {"W_TOKEN": "s3cr3t"}}
    for number, command in enumerate(
        ("python -u show.py", "show.py", "env A=1 python show.py", "bash -c './show.sh'")
    ):
        (folder / "show.sh").write_text("#!/bin/sh\nexec python show.py\n")
        (folder / "show.sh").chmod(0o755)
        answer = client.post("/api/runs/", json={**body, "name": f"a{number}", "command": command})
        assert answer.status_code == 201, answer.text
        run = wait_state(client, answer.json()["id"], "finished", "failed")
        said = run["job_metadata"]["stdout"]
        assert said == ["mine Tree None s3cr3t \u640d", str(folder)], run["job_metadata"]
        assert run["job_metadata"]["environment"] == {"W_TOKEN": "***"}
        assert run["job_metadata"]["cwd"] == str(folder)
        assert "s3cr3t" not in answer.text
    assert sorted(path.name for path in folder.iterdir()) == ["lib", "show.py", "show.sh"]
    store = client.app.state.store  # type: ignore[attr-defined]
    # Nobody needs the secrets of a run that has ended.
    assert all(
        "s3cr3t" not in json.dumps(run.metadata_dict()["environment"]) for run in store.runs()
    )
    assert all(run.metadata_dict()["caller_environment"] == {} for run in store.runs())


def test_a_run_without_a_folder_starts_in_one_of_its_own(
    client: TestClient, tmp_path: Path
) -> None:
    run = wait_state(client, create(client, "pwd", workers=1)["id"], "finished")
    assert run["job_metadata"]["stdout"] == [
        str(tmp_path / "data" / "runs" / str(run["id"]) / "work")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cwd": "relative"}, "cwd: must be an absolute path"),
        (
            {"cwd": "/no/such/folder"},
            "cwd: must be a folder on the machine of the master, not '/no/such/folder'",
        ),
        (
            {"caller": {"cwd": "/no/such/folder"}},
            "cwd: must be a folder on the machine of the master",
        ),
        (
            {"caller": {"cwd": "/", "environment": {"HOME": "x"}}},
            "caller.environment: must have only variables",
        ),
        ({"environment": {"RANK": "1"}}, "must be one that MLBench does not set itself, not RANK"),
        ({"environment": {"A B": "1"}}, "the name of a variable must be letters"),
        (
            {"cwd": "/", "command": "no-such-program"},
            "command: must begin with a program on the PATH",
        ),
        (
            {"cwd": "/", "command": "./missing"},
            "command: must begin with a program or script that exists",
        ),
        (
            {"cwd": "/etc", "command": "./passwd"},
            "command: must begin with a program that can be executed",
        ),
        (
            {"cwd": "/", "engine_options": "--container docker", "custom_image_name": "a/b"},
            "cwd: must be left out",
        ),
    ],
)
def test_a_folder_or_a_program_that_is_missing_is_refused_at_the_request(
    client: TestClient, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "check_program", lambda program: None)
    answer = client.post(
        "/api/runs/", json={"name": "a", "num_workers": 1, "command": "true", **change}
    )
    assert (answer.status_code, message in answer.json()["message"]) == (400, True), answer.json()[
        "message"
    ]
    assert client.get("/api/runs/").json() == []


def test_a_task_needs_no_folder_of_its_call(client: TestClient) -> None:
    body = {"name": "a", "num_workers": 1, "task": "1a", "caller": {"cwd": "/no/such/folder"}}
    answer = client.post("/api/runs/", json=body)
    assert answer.status_code == 201
    assert answer.json()["job_metadata"]["notes"] == [
        (
            "note: the workers start in the folder of the run, because the "
            "master's machine has no /no/such/folder"
        )
    ]
    client.post(f"/api/runs/{answer.json()['id']}/stop/")


def test_a_folder_that_was_deleted_before_the_start_is_named(
    client: TestClient, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    first = create(client, "sleep 60", workers=cores)
    body = {"name": "late", "num_workers": cores, "command": "true", "cwd": str(gone)}
    late = client.post("/api/runs/", json=body).json()
    gone.rmdir()
    client.post(f"/api/runs/{first['id']}/stop/")
    run = wait_state(client, late["id"], "finished", "failed")
    assert run["job_metadata"]["reason"].endswith(f"{gone}, does not exist any more")


def test_more_workers_than_the_cores_can_serve_are_refused(client: TestClient) -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    assert client.get("/api/health/").json()["most_workers"] == 4 * cores
    body = {"name": "a", "num_workers": 4 * cores + 1, "command": "true"}
    answer = client.post("/api/runs/", json=body)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(
        f"num_workers: must be at most {4 * cores}, not {4 * cores + 1}: "
    )
    assert client.post("/api/runs/", json={**body, "oversubscribe": True}).status_code == 201
    assert (
        client.post("/api/runs/", json={**body, "name": "b", "num_workers": 4 * cores}).status_code
        == 201
    )
