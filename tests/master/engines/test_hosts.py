"""The engine for hosts, with an ``ssh`` of this package's tests; ``test_hosts_real`` has a real
one."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core import __version__
from mlbench_core.client.masters import boot_id
from mlbench_core.errors import ConfigurationError
from mlbench_master import create_app
from mlbench_master.engines import EngineError, Job, JobStatus
from mlbench_master.engines.hosts import agent as hosts_agent
from mlbench_master.engines.hosts import engine as hosts
from mlbench_master.engines.hosts import link as hosts_link
from mlbench_master.engines.hosts import results as hosts_results
from mlbench_master.engines.hosts import run_state
from mlbench_master.engines.hosts import ssh as hosts_ssh
from mlbench_master.engines.hosts.engine import HostsEngine
from mlbench_master.engines.hosts.host_file import HOSTFILE_VARIABLE, parse_hosts, read_options
from mlbench_master.engines.hosts.results import UnpackError, unpack
from mlbench_master.engines.hosts.run_state import HostRun
from mlbench_master.engines.supervisor.supervise import write_json
from mlbench_master.processes import processes_with
from tests.master.engines import fake_ssh
from tests.master.engines.test_local_engine import create, lines, wait_state
from tests.master.helpers import TestClient, wait_for

TOKEN = "token-of-the-test"
ENDLESS = "import time\nprint('begun', flush=True)\ntime.sleep(100)\n"

WAITS = """\
import pathlib, time
print("begun", flush=True)
while not pathlib.Path({go!r}).exists():
    time.sleep(0.02)
print("after")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake ssh, which knows every host."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    monkeypatch.setenv("MLBENCH_SSH", f"{sys.executable} -I -S {fake_ssh.__file__} {folder}")
    monkeypatch.setenv("MLBENCH_LOAD_INTERVAL_S", "0.1")
    return folder


@pytest.fixture
def engine(fake: Path, tmp_path: Path) -> Iterator[HostsEngine]:
    made = HostsEngine(tmp_path / "runs", interval_s=0.1)
    yield made
    for path in fake.glob("*.*"):
        path.unlink(missing_ok=True)  # a call may delete its own
    for run_id in (1, 2):
        with contextlib.suppress(EngineError):
            made.stop(f"hosts-{run_id}")
    made.close()


@pytest.fixture
def client(
    engine: HostsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    (tmp_path / "hostfile").write_text("a slots=2  # the first\n\nb slots=2\n")
    monkeypatch.setenv(HOSTFILE_VARIABLE, str(tmp_path / "hostfile"))
    app = create_app(data_dir=tmp_path / "data", engine=engine, token=TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=headers) as test_client:
        yield test_client


def job(command: str, **changes: Any) -> Job:
    return Job(
        **{
            "run_id": 1,
            "name": "a",
            "num_workers": 2,
            "command": command,
            "options": ("--host", "a,b"),
            **changes,
        }
    )


def script(tmp_path: Path, content: str) -> str:
    path = tmp_path / "worker.py"
    path.write_text(content)
    return str(path)


def end_of(engine: HostsEngine, job_id: str) -> JobStatus:
    def look() -> JobStatus | None:
        status = engine.poll(job_id)
        return None if status.state in ("waiting", "running") else status

    found = wait_for(look, what="the end of the run")
    assert isinstance(found, JobStatus)
    return found


def texts(engine: HostsEngine, job_id: str) -> list[str]:
    return [line["text"] for line in engine.logs(job_id).lines]


def begun(engine: HostsEngine, job_id: str, count: int) -> None:
    wait_for(lambda: texts(engine, job_id).count("begun") == count, what="the workers")


def remote(fake: Path, host: str) -> list[Path]:
    """The folders of runs on a host, which the engine deletes at the end."""
    return list(fake.glob(f"home-{host}/.cache/mlbench/hosts/*/*"))


def processes(fake: Path) -> list[psutil.Process]:
    """Processes of runs on all hosts."""
    return [
        p
        for host in "ab"
        for folder in remote(fake, host)
        for p in processes_with("MLBENCH_RUN_DIR", str(folder))
    ]


def test_workers_run_on_their_hosts_with_the_variables_of_torchrun(
    client: TestClient, engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR "
        "OMP_NUM_THREADS MLBENCH_RUN_ID MLBENCH_TOKEN"
    )
    command = script(
        tmp_path,
        "import os, pathlib, sys, time\nprint('args', sys.argv[1:], *(os.environ[name] for name "
        f"in '{names}'.split()))\nprint('to stderr', os.environ['MASTER_PORT'], "
        "file=sys.stderr)\npathlib.Path(os.environ['MLBENCH_OUTPUT'], "
        "'deep').mkdir(exist_ok=True)\npathlib.Path(os.environ['MLBENCH_OUTPUT'], 'deep', "
        "os.environ['RANK']).write_text('result')\ntime.sleep(0.4)\n",
    )
    run = create(
        client, f"python {command} '{{run_id}} $HOME' {{rank}} {{hosts}} {{backend}}", workers=3
    )
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["state"] == "finished", done
    found = lines(client, run["id"])
    said = {line["rank"]: line["text"] for line in found if line["text"].startswith("args")}
    for rank, local, of in ((0, 0, 2), (1, 1, 2), (2, 0, 1)):
        args = [f"{run['id']} $HOME", str(rank), ",".join(["192.0.2.1"] * 3), "gloo"]
        assert said[rank] == f"args {args} {rank} 3 {local} {of} 192.0.2.1 1 {run['id']} {TOKEN}"
    ports = {line["text"] for line in found if line["stream"] == "stderr"}
    assert len(ports) == 1 and ports.pop().startswith("to stderr ")
    assert [line["text"] for line in found if line["rank"] is None][-1] == "finished"
    # The results are those of the first host.
    assert sorted(path.name for path in (tmp_path / "runs/1/output/deep").iterdir()) == ["0", "1"]
    assert {line["rank"] for line in engine.load("hosts-1").lines} == {0, 1, 2}
    wait_for(
        lambda: not remote(fake, "a") and not remote(fake, "b"),
        what="the end of the folders on the hosts",
    )


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("raise ValueError('bad shape')",
         "worker 1 on host b failed: exit status 1: ValueError: bad shape"),
        ("os.kill(os.getpid(), 9)", "worker 1 on host b died: signal 9 (SIGKILL)"),
        ("os.kill(os.getppid(), 9); time.sleep(99)",
         "the workers on host b were lost: the supervisor of the workers was killed"),
    ],
)  # fmt: skip
def test_a_failure_ends_the_workers_of_all_hosts_and_is_told_from_its_consequences(
    engine: HostsEngine, fake: Path, tmp_path: Path, ending: str, reason: str
) -> None:
    gone = tmp_path / "gone"
    command = script(
        tmp_path,
        "import os, pathlib, sys, time\nprint('begun', flush=True)\nwhile os.environ['RANK'] == "
        f"'0' and not pathlib.Path({str(gone)!r}).exists(): time.sleep(0.01)\n"
        # It fails at about the same time as the other one, as Gloo does.
        "if os.environ['RANK'] == '0': raise RuntimeError('Connection closed by peer')\n"
        f"time.sleep(0.3); pathlib.Path({str(gone)!r}).touch()\n{ending}\n",
    )
    job_id = engine.start(job(command))
    status = end_of(engine, job_id)
    assert (status.state, status.reason) == ("failed", reason)
    assert texts(engine, job_id)[-1] == reason
    assert processes(fake) == []


def test_a_failure_of_one_host_stops_the_others(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    ends = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(4)\n"
    status = end_of(engine, engine.start(job(script(tmp_path, ends + ENDLESS))))
    assert (status.state, status.reason, status.returncode) == (
        "failed",
        "worker 1 on host b failed: exit status 4",
        4,
    )
    assert processes(fake) == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known",
         "host b does not answer: ssh: Could not resolve hostname b: Name or service not known"),
        ("me@b: Permission denied (publickey).",
         "host b refuses the login: me@b: Permission denied (publickey)."),
        ("Host key verification failed.", "host b does not answer: Host key verification failed."),
        ("", "host b does not answer: the connection broke"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_reached_at_the_start_fails_the_run(
    engine: HostsEngine, fake: Path, tmp_path: Path, said: str, reason: str
) -> None:
    (fake / "b.error").write_text(said)
    job_id = engine.start(job(script(tmp_path, ENDLESS)))
    assert end_of(engine, job_id) == JobStatus("failed", reason)
    assert remote(fake, "a") == [], "no host may have been given the token"


MARK = hosts_ssh.MARK.decode().strip()


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (None, "host a cannot start Python: {found}: use the same path on all hosts, or name "
               "another one with "
         "--python"),
        ("echo python: No module named mlbench_master >&2; exit 1",
         "host a has no MLBench in {python}: python: No module named mlbench_master: install "
         "the same MLBench there, "
         "or name another Python with --python"),
        ((f"cat > /dev/null; echo; echo '{MARK}'; echo '{{\"version\": \"3.0\", \"now\": 1, "
         f"\"runs\": {{}}}}'"),
         f"host a has MLBench 3.0, and the master has {__version__}: install "
         "the same version there, or name another "
         "Python with --python"),
        (f"cat > /dev/null; echo; echo '{MARK}'; echo '{{}}'", "host a gave a damaged answer: "),
        ("exit 0", "host a cannot run MLBench: exit status 0: it gave no reason"),
    ],
    ids=["missing", "no package", "version", "damaged", "silent"],
)  # fmt: skip
def test_the_python_of_a_host_is_checked(
    engine: HostsEngine, tmp_path: Path, python: str | None, reason: str
) -> None:
    program = tmp_path / "python"
    if python is not None:
        program.write_text(f"#!/bin/sh\n{python}\n")
        program.chmod(0o755)
    options = ("--host", "a", "--python", str(program))
    found = end_of(engine, engine.start(job("true", num_workers=1, options=options))).reason
    begin, _, end = reason.format(python=program, found="{found}").partition("{found}")
    assert found.startswith(begin) and found.endswith(end), found


def test_a_script_that_a_host_does_not_have_is_named(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    command = script(tmp_path, ENDLESS)
    (fake / "a.after").write_text(f"rm -f {command}")
    assert end_of(engine, engine.start(job(command, options=("--host", "a:2")))).reason == (
        f"host a: {command} does not exist: use a file "
        "system that all hosts share, or the same path"
    )


def test_a_greeting_of_the_shell_and_a_lost_answer_do_no_harm(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    """The worker is started once, although the answer to its start is lost."""
    (fake / "a.after").write_text("echo welcome; echo to the host >&2")
    (fake / "a.drop").write_text('"want": "run"')
    command = script(
        tmp_path,
        f"import time\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\ntime.sleep(0.5)\n",
    )
    job_id = engine.start(job(command, options=("--host", "a:2")))
    assert end_of(engine, job_id).state == "finished"
    assert (tmp_path / "starts").read_text() == "xx"
    assert not (fake / "a.drop").exists()


def test_a_host_that_does_not_answer_for_a_while_is_a_problem_that_passes(
    client: TestClient, fake: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = create(client, script(tmp_path, WAITS.format(go=str(go))), workers=4)
    wait_for(lambda: len([x for x in lines(client, run["id"]) if x["text"] == "begun"]) == 4)
    (fake / "b.error").write_text("ssh: connect to host b port 22: No route to host")
    reason = "host b does not answer: ssh: connect to host b port 22: No route to host"
    wait_for(
        lambda: (
            client.get(f"/api/runs/{run['id']}/").json()["job_metadata"].get("reason") == reason
        ),
        what="the reason",
    )
    answer = client.post(f"/api/runs/{run['id']}/stop/")
    assert answer.status_code == 503
    assert (
        answer.json()["message"]
        == f"the run cannot be stopped everywhere yet: {reason}; stop it again later"
    )
    assert client.get(f"/api/runs/{run['id']}/").json()["state"] == "started"
    assert {p.environ()["RANK"] for p in processes(fake) if "RANK" in p.environ()} == {"2", "3"}
    (fake / "b.error").unlink()
    stopped = client.post(f"/api/runs/{run['id']}/stop/").json()
    assert (stopped["state"], stopped["job_metadata"]["reason"][:7]) == ("failed", "stopped")
    assert processes(fake) == []


def test_a_host_that_was_removed_from_the_file_is_given_up(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("a\nb\n")
    job_id = engine.start(job(script(tmp_path, ENDLESS), options=("--hostfile", str(hosts))))
    begun(engine, job_id, 2)
    (fake / "b.error").write_text("No route to host")
    with pytest.raises(EngineError, match="stop it again later"):
        engine.stop(job_id)
    hosts.write_text("a\n")
    engine.stop(job_id)
    assert engine.poll(job_id) == JobStatus(
        "failed", "stopped", finished_at=engine.poll(job_id).finished_at
    )
    for process in processes(fake):
        # It may have ended because of the one before.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_the_next_master_goes_on_with_a_run(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job_id = engine.start(job(script(tmp_path, WAITS.format(go=str(go)))))
    begun(engine, job_id, 2)
    engine.close()
    following = HostsEngine(tmp_path / "runs", interval_s=0.1)
    assert following.place == engine.place
    assert following.poll(job_id).state == "running"
    assert not following.has_room(1, ("--host", "a,b")), "the run must keep its slots"
    go.touch()
    assert end_of(following, job_id).state == "finished"
    assert texts(following, job_id).count("begun") == texts(following, job_id).count("after") == 2
    assert following.has_room(2, ("--host", "a,b"))
    assert following.poll("hosts-99").state == "unstarted"
    following.close()


def test_a_master_that_was_killed_while_it_recorded_a_run_has_not_started_it(
    engine: HostsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def write_a_part(path: Path, text: str) -> int:
        write(path, text[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", write_a_part)
        engine.start(job("true"))
    with contextlib.closing(HostsEngine(tmp_path / "runs", interval_s=0.1)) as following:
        assert following.poll("hosts-1").state == "unstarted"
        assert end_of(following, following.start(job("true"))).state == "finished"


def test_the_token_is_only_in_files_of_its_user(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    job_id = engine.start(job(script(tmp_path, ENDLESS), env={"MLBENCH_TOKEN": TOKEN}))
    begun(engine, job_id, 2)
    holders = []
    for path in (*fake.rglob("*"), *tmp_path.rglob("*")):
        # The run goes on, and renames files that it has written.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and TOKEN in path.read_text(errors="replace"):
                holders.append(path)
    assert {path.name for path in holders} == {"job.json"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(TOKEN in word for command in commands for word in command)
    assert TOKEN not in (fake / "calls").read_text()
    engine.stop(job_id)


def test_undelivered_metrics_of_all_hosts_arrive(client: TestClient, tmp_path: Path) -> None:
    """Outboxes of different hosts have the same name."""
    run = create(
        client,
        script(
            tmp_path,
            "import json, os, pathlib\nfrom mlbench_core.client.undelivered_metrics import Outbox\n"
            "row = {'run_id': int(os.environ['MLBENCH_RUN_ID']), 'name': 'm' + "
            "os.environ['RANK'], 'value': 1}\n"
            "folder = pathlib.Path(os.environ['MLBENCH_SPOOL'])\n"
            "Outbox(folder, 'http://x').insert([('k' + os.environ['RANK'], json.dumps(row))])\n",
        ),
        workers=3,
    )
    done = wait_state(client, run["id"], "finished", "failed")
    assert done["state"] == "finished", done
    assert {"m0", "m1", "m2"} <= set(
        client.get(f"/api/metrics/{run['id']}/?metric_type=run").json()
    )


def test_two_runs_do_not_share_slots_and_a_third_one_waits(
    client: TestClient, tmp_path: Path
) -> None:
    command = script(tmp_path, ENDLESS)
    first, second = (create(client, command, workers=2, name=name) for name in ("one", "two"))
    third = create(client, command, workers=1, name="three")
    wait_for(lambda: [r["state"] for r in client.get("/api/runs/").json()].count("started") == 2)
    states = {r["name"]: r["state"] for r in client.get("/api/runs/").json()}
    assert sorted(states.values()) == ["initialized", "started", "started"]
    jobs = [
        json.loads(path.read_text())["slots"] for path in (tmp_path / "runs").glob("*/job.json")
    ]
    taken = [(name, slot) for slots in jobs for name, numbers in slots.items() for slot in numbers]
    assert len(taken) == len(set(taken))
    for run in (first, second, third):
        client.post(f"/api/runs/{run['id']}/stop/")


def test_a_run_that_can_never_start_is_refused_at_once(client: TestClient) -> None:
    body = {"name": "b", "num_workers": 5, "num_cpus": 1, "command": "true"}
    for change, message in (
        ({}, "num_workers: must be at most 4, not 5: the 2 host(s) have 4 slots together"),
        ({"engine_options": "--host loop,b", "num_workers": 2},
         "engine_options: the host 'loop' has the address "),
        ({"backend": "mpi", "num_workers": 1}, "backend: must be gloo or nccl, not mpi: "),
        ({"engine_options": "--time=10"},
         "engine_options: unrecognized arguments: --time=10; the options are"),
        ({"engine_options": "--hostfile /no/file"},
         "engine_options: the master cannot read the host file /no/file: No such file or"),
    ):  # fmt: skip
        answer = client.post("/api/runs/", json={**body, **change})
        assert answer.status_code == 400
        assert answer.json()["message"].startswith(message)


def test_workers_start_in_the_folder_and_with_the_environment_of_the_call(
    engine: HostsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "of-the-master")
    monkeypatch.setenv("HF_TOKEN", "of-the-master")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "show.py").write_text(
        "import os\nprint(os.getcwd(), os.environ['NCCL_ALGO'], "
        "os.environ.get('HF_TOKEN'), os.environ['MINE'])\n"
    )
    call = {
        "cwd": str(tmp_path / "user"),
        "caller_env": {"NCCL_ALGO": "Tree", "PATH": os.environ["PATH"]},
    }
    job_id = engine.start(job("python show.py", env={"MINE": "x"}, **call))
    assert end_of(engine, job_id).state == "finished", texts(engine, job_id)
    assert texts(engine, job_id).count(f"{tmp_path / 'user'} Tree None x") == 2


def test_a_host_without_the_folder_of_the_call_is_named(
    engine: HostsEngine, tmp_path: Path
) -> None:
    gone = str(tmp_path / "gone")
    reason = end_of(engine, engine.start(job("true", cwd=gone, options=("--host", "a:2")))).reason
    assert reason.startswith(
        f"host a: {gone} does not exist: use a file system that all hosts share"
    )


def test_the_script_of_a_task_needs_no_folder_of_the_call(
    engine: HostsEngine, tmp_path: Path
) -> None:
    job_id = engine.start(
        job("true", cwd=str(tmp_path / "gone"), is_task=True, options=("--host", "a:2"))
    )
    assert end_of(engine, job_id).state == "finished"


def test_a_host_gets_no_more_workers_than_its_cores_can_serve(engine: HostsEngine) -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    many = {"num_workers": 4 * cores + 1, "options": ("--host", f"a:{4 * cores + 1}")}
    reason = end_of(engine, engine.start(job("true", **many))).reason
    assert reason.startswith(
        f"host a: it can get at most {4 * cores} workers, not {4 * cores + 1}: "
    )
    job_id = engine.start(job("true", run_id=2, oversubscribe=True, **many))
    assert end_of(engine, job_id).state == "finished"


@pytest.mark.parametrize(
    ("text", "name", "slots"),
    [
        ("[2001:db8::5]", "2001:db8::5", 1),
        ("[2001:db8::5]:2", "2001:db8::5", 2),
        ("me@[fe80::1%eth0]:3", "me@fe80::1%eth0", 3),
        ("10.0.0.1:4", "10.0.0.1", 4),
        ("me@node-1.example:2", "me@node-1.example", 2),
    ],
)
def test_a_host_may_be_an_address_in_brackets(
    text: str, name: str, slots: int, tmp_path: Path
) -> None:
    (found,) = read_options(["--host", text]).hosts
    assert (found.name, found.slots) == (name, slots)
    (tmp_path / "file").write_text(
        f"{text.rpartition(':')[0] if slots > 1 else text} slots={slots}\n"
    )
    assert read_options(["--hostfile", str(tmp_path / "file")]).hosts == (found,)


@pytest.mark.parametrize(
    "text",
    ["2001:db8::5", "::1", "a:2:3", "[2001:db8::5", "[x]:2", "[::1]:2:3", "[::1]2", "a:", "@a"],
)
def test_a_host_whose_slots_are_not_clear_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="engine_options: --host"):
        read_options(["--host", text])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_host_file_of_another_system_is_read(end: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(f"\ufeffa slots=4{end}b address=2001:db8::1{end}".encode())
    first, second = read_options(["--hostfile", str(tmp_path / "file")]).hosts
    assert (first.name, first.slots, second.name, second.address) == ("a", 4, "b", "2001:db8::1")


def test_the_sockets_of_ssh_have_short_paths_also_with_a_long_folder_for_temporary_files(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with contextlib.closing(hosts_ssh.Ssh()) as ssh:
        (place,) = (word for word in ssh._options() if word.startswith("ControlPath="))
        folder = Path(place.partition("=")[2]).parent
        # %C has 40 characters; ssh makes the socket under a temporary name with 17 more.
        assert len(str(folder / ("c" * 40))) + 17 < 104
        assert (folder.stat().st_mode & 0o777, folder.owner()) == (0o700, Path.home().owner())
        assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "node1:4",
            (
                "line 3: a name with colons must be an IPv6 "
                "address such as [2001:db8::5], not 'node1:4'"
            ),
        ),
        (
            "b slots=x",
            "file, line 3: slots must be from 1 to 1024, not 'x': write for example slots=4",
        ),
        ("b slots=0", "line 3: slots must be from 1 to 1024, not '0'"),
        ("b 4", "line 3: after the name must come slots=N or address=IP, not '4'"),
        ("-oProxyCommand=x", "line 3: the name must be one that ssh knows, not '-oProxyCommand=x'"),
        (
            "b address=me@10.0.0.2",
            "line 3: address must be an IP address without a user, not 'me@10.0.0.2': write the "
            "user before the name, as in me@node1",
        ),
        ("a slots=2", "line 3: each host must have one line, not 'a' again: add up its slots"),
    ],
)
def test_a_wrong_line_of_a_host_file_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"# hosts\na slots=4\n{line}\n")
    with pytest.raises(ValueError, match="engine_options: ") as error:
        read_options(["--hostfile", str(tmp_path / "file")])
    assert message in str(error.value)


def test_a_host_file_needs_hosts_and_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOSTFILE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="--hostfile or --host must be given"):
        read_options([])
    with pytest.raises(ValueError, match="must name at least one host"):
        parse_hosts(["# none"], "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must name at least one host"):
        read_options(["--hostfile", str(tmp_path / "pipe")])


def archive(**files: bytes | None) -> io.BytesIO:
    """A tar archive; a file without content is a link to /etc."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content or b""))
    made.seek(0)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "output/../../x",
        "/etc/x",
        "job.json",
        "output",
        "spool/../job.json",
        "output//../../x",
    ],
)
def test_an_archive_of_a_host_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnpackError, match="is outside the folders of the run"):
        unpack(archive(**{name: b"x"}), tmp_path / "run", 0)
    assert list(tmp_path.rglob("*")) == []


def test_an_archive_has_plain_files_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnpackError, match="'output/link' is not a plain file"):
        unpack(archive(**{"output/link": None, "output/link/x": b"x"}), tmp_path, 0)
    with pytest.raises(UnpackError, match="the archive is damaged"):
        unpack(io.BytesIO(b"x" * 2000), tmp_path, 0)
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "host1-a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        unpack(archive(**{"spool/a": b"x"}), tmp_path, 1)
    monkeypatch.setattr(hosts_results, "RESULT_BYTES", 10)
    with pytest.raises(UnpackError, match="more than"):
        unpack(archive(**{"output/a": b"12345", "output/b": b"123456"}), tmp_path, 0)
    assert not (tmp_path / "elsewhere").exists()


def test_names_that_no_folder_can_have_are_refused_and_not_tried_again(tmp_path: Path) -> None:
    # A worker may choose a name to which the number of its host cannot be added.
    with pytest.raises(UnpackError, match="File name too long"):
        unpack(archive(**{f"spool/{'x' * 255}": b"x"}), tmp_path, 0)
    with pytest.raises(UnpackError, match="a name in the archive cannot be used"):
        unpack(archive(**{"output/a": b"x", "output/a/b": b"x"}), tmp_path, 0)


def test_lines_that_a_worker_wrote_into_the_log_do_not_stop_a_run(
    engine: HostsEngine, fake: Path, tmp_path: Path
) -> None:
    bad = {"rank": -1, "stream": "Out", "text": "of a worker", "date": "yesterday, at noon"}
    content = (
        "with open('../log.jsonl', 'a') as log:\n    "
        f"print({json.dumps(json.dumps(bad))}, file=log)\n"
    )
    job_id = engine.start(job(script(tmp_path, content), num_workers=1))
    assert end_of(engine, job_id).state == "finished"
    assert "host a: of a worker" in texts(engine, job_id)


def test_a_file_that_cannot_be_read_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    add = tarfile.TarFile.add

    def refuse(tar: tarfile.TarFile, path: Path, *rest: Any, **more: Any) -> None:
        # The tests may run as a user who can read everything.
        if path.name == "hidden":
            raise PermissionError
        add(tar, path, *rest, **more)

    monkeypatch.setattr(tarfile.TarFile, "add", refuse)
    output = tmp_path / "root" / "1" / "output"
    output.mkdir(parents=True)
    for name in ("hidden", "seen"):
        (output / name).write_text("x")
    hosts_agent._send_files({"fetch": str(tmp_path / "root"), "id": 1, "parts": ["output"]})
    sys.stdout.buffer.flush()
    sent = io.BytesIO(capfdbinary.readouterr().out.partition(hosts_ssh.MARK)[2])
    with tarfile.open(fileobj=sent) as tar:
        assert tar.getnames() == ["output/seen"]


def test_results_over_the_limit_stay_on_the_host(
    engine: HostsEngine, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_link, "ARCHIVE_BYTES", 2**20)
    content = (
        "import os, pathlib, time\npathlib.Path(os.environ['MLBENCH_OUTPUT'], "
        "'a').write_bytes(bytes(2**22))\n"
    )
    job_id = engine.start(job(script(tmp_path, content), num_workers=1))
    assert end_of(engine, job_id).state == "finished"
    (folder,) = remote(fake, "a")
    place = f"~/.cache/mlbench/hosts/{folder.parent.name}"
    assert f"the files in {place} on host a stay there: host a sends more than 1 MiB" in texts(
        engine, job_id
    )


def test_a_host_that_refuses_calls_is_called_once_per_interval(fake: Path, tmp_path: Path) -> None:
    engine = HostsEngine(tmp_path / "runs", interval_s=1)
    try:
        job_id = engine.start(job(script(tmp_path, ENDLESS), num_workers=1))
        wait_for(lambda: remote(fake, "a"), what="the supervisor")
        (fake / "a.error").write_text("Connection refused")
        wait_for(lambda: engine.poll(job_id).reason, what="the problem")
        began, before = time.monotonic(), len((fake / "calls").read_text().splitlines())
        time.sleep(1.0)
        calls = len((fake / "calls").read_text().splitlines()) - before
        # A slow machine may sleep for longer.
        assert calls <= 1 + (time.monotonic() - began), "about five without the interval"
        (fake / "a.error").unlink()
        engine.stop(job_id)
    finally:
        engine.close()


def test_the_end_does_not_wait_for_each_host(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def join(link: hosts_link.HostLink, timeout_s: float) -> None:
        waited.append(timeout_s)
        time.sleep(0.1)

    monkeypatch.setattr(hosts, "_CLOSE_S", 0.2)
    monkeypatch.setattr(hosts_link.HostLink, "join", join)
    engine = HostsEngine(tmp_path / "runs", interval_s=60)
    for name in "abcd":
        engine._link(name, sys.executable)
    engine.close()
    assert len(waited) == 4
    assert waited[-1] == 0.0, "the time is that of all hosts together"


def ask(root: Path, want: str, **step: Any) -> dict[str, Any]:
    """Ask the agent about one run."""
    request = {
        "version": __version__,
        "runs": {str(root): {"id": 1, "want": want, "log": 0, "load": 0, **step}},
    }
    return dict(hosts_agent.answer(request)["runs"][str(root)])


def test_a_request_to_start_that_arrives_after_a_stop_starts_nothing(tmp_path: Path) -> None:
    assert ask(tmp_path / "run", "stop")["state"] == "missing"
    assert ask(tmp_path / "run", "run", job={})["state"] == "missing"
    assert not (tmp_path / "run" / "1" / "job.json").exists()


def test_an_error_of_the_disk_is_no_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = ask(tmp_path / "file" / "run", "run")
    assert (found["state"], "Not a directory" in found["reason"]) == ("troubled", True)


@pytest.mark.parametrize(
    ("booted", "reason"),
    [
        (boot_id(), "the supervisor of the workers did not start: ImportError: no psutil"),
        ("an-earlier-boot", "it was restarted while the run continued"),
    ],
)
def test_a_supervisor_that_is_not_there_has_a_reason(
    tmp_path: Path, booted: str, reason: str
) -> None:
    folder = tmp_path / "run" / "1"
    folder.mkdir(parents=True)
    (folder / "supervisor.log").write_text("Traceback\nImportError: no psutil\n")
    (folder / "launched").write_text(booted)
    assert ask(tmp_path / "run", "look")["state"] == "running"
    os.utime(folder / "launched", (0, 0))
    found = ask(tmp_path / "run", "look")
    assert (found["state"], found["reason"]) == ("lost", reason)


@pytest.mark.parametrize(("slots", "seen"), [("a:2", {"GPU-1a 0 1", "GPU-2b 0 1"}), ("a:3", None)])
def test_a_worker_sees_the_gpu_of_its_slot(
    engine: HostsEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slots: str,
    seen: set[str] | None,
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: X (UUID: GPU-1a)'\necho 'GPU 1: X (UUID: GPU-2b)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    command = script(tmp_path, f"import os\nprint(*(os.environ[name] for name in {names}))\n")
    workers = int(slots[-1])
    job_id = engine.start(
        job(command, num_workers=workers, gpu_enabled=True, options=("--host", slots))
    )
    status = end_of(engine, job_id)
    if seen is None:
        assert status.reason == "host a: slot 2 has no GPU: there are 2; give it fewer slots"
    else:
        assert seen <= set(texts(engine, job_id)), status


def test_calls_do_not_depend_on_the_number_of_runs(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand runs on two hosts, whose answers are made here."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def answer(self: Any, host: str, command: Any, request: bytes, *_: Any) -> io.BytesIO:
        asked = json.loads(request)
        calls.append((host, asked))
        states = {
            "prepare": {"state": "prepared", "port": 5},
            "run": {"state": "running"},
            "look": {"state": "running"},
        }
        told = {root: states[step["want"]] for root, step in asked["runs"].items()}
        return io.BytesIO(
            json.dumps({"version": __version__, "now": time.time(), "runs": told}).encode()
        )

    monkeypatch.setattr(hosts_ssh.Ssh, "call", answer)
    engine = HostsEngine(tmp_path / "many", interval_s=0.5)
    options = ("--host", "a:1000,b:1000")
    # Each run gets a worker on both hosts.
    monkeypatch.setattr("mlbench_master.engines.hosts.engine.share_slots", halves)
    began = time.monotonic()
    jobs = [
        engine.start(job("true", run_id=number, options=options, env={"MLBENCH_TOKEN": TOKEN}))
        for number in range(1, 1001)
    ]
    wait_for(lambda: all(engine.poll(job_id).state == "running" for job_id in jobs), 100)
    wait_for(
        lambda: (
            len(
                [
                    1
                    for _, asked in calls
                    if len(asked["runs"]) == 1000
                    and all(step["want"] == "look" for step in asked["runs"].values())
                ]
            )
            >= 4
        ),
        100,
    )
    # The token goes to a host only when all hosts of the run have passed the check.
    kinds = {
        (step["want"], TOKEN in str(step)) for _, asked in calls for step in asked["runs"].values()
    }
    assert kinds == {("prepare", False), ("run", True), ("look", False)}
    # At most one call for each of the shortest pauses.
    assert len(calls) <= 2 * (time.monotonic() - began) / 0.2 + 4
    engine.close()


def test_a_late_answer_to_a_deleted_run_does_not_change_the_next_run(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host removes its folder of a run slowly. Meanwhile the run is deleted, and another one gets
    its number."""
    calls: list[str] = []
    late, end = threading.Event(), threading.Event()
    status = json.dumps({"returncode": 0, "reason": "", "finished_at": time.time()})
    states = {
        "prepare": {"state": "prepared", "port": 5},
        "run": {"state": "ended", "status": status},
    }

    def answer(self: Any, host: str, command: Any, request: bytes, *_: Any) -> io.BytesIO:
        asked = json.loads(request)
        if "fetch" in asked:
            return archive()
        wants = {root: step["want"] for root, step in asked["runs"].items()}
        calls.append(" ".join(wants.values()))
        if "remove" in wants.values():
            late.wait(100)
        elif late.is_set():
            end.wait(100)
        told = {root: states.get(want, {"state": "missing"}) for root, want in wants.items()}
        return io.BytesIO(
            json.dumps({"version": __version__, "now": time.time(), "runs": told}).encode()
        )

    monkeypatch.setattr(hosts_ssh.Ssh, "call", answer)
    engine = HostsEngine(tmp_path / "runs", interval_s=0.01)
    wanted = job("true", num_workers=1, options=("--host", "a"))
    job_id = engine.start(wanted)
    assert end_of(engine, job_id).state == "finished"
    wait_for(lambda: calls[-1] == "remove", what="the call that removes the folder")
    assert engine.has_room(1, ("--host", "a"))
    assert engine.start(wanted) == job_id
    late.set()
    wait_for(lambda: calls[-1] == "prepare", what="the call after the late answer")
    try:
        assert sorted(path.name for path in (tmp_path / "runs/1").iterdir()) == [
            "job.json",
            "log.jsonl",
            "output",
        ]
    finally:
        end.set()
        engine.close()


def state_of_a_run(folder: Path) -> HostRun:
    """The state of a run with one worker on each of the hosts a and b, without any calls."""
    folder.mkdir(parents=True)
    hosts = {name: {"root": f"/{name}"} for name in "ab"}
    slots = {name: [0] for name in "ab"}
    content = {"run_id": 1, "python": "python", "options": [], "slots": slots, "hosts": hosts}
    (folder / "job.json").write_text(json.dumps(content))
    return HostRun(folder, 2**20, lambda run: None)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A disk that refuses the files of the state, until the changes are undone."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_state, "write_json", refuse)
        yield patch


def test_a_run_that_ends_on_a_full_disk_ends_when_there_is_space_again(
    tmp_path: Path, full_disk: pytest.MonkeyPatch
) -> None:
    run = state_of_a_run(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_state, "write_json", write_json)
        for name in "ab":
            run.answered(name, {"state": "prepared", "port": 5}, 0.0)
        for name in "ab":
            status = json.dumps({"returncode": 0, "reason": "", "finished_at": 7.0})
            run.answered(name, {"state": "ended", "status": status}, 0.0)
    for name in "ab":
        assert run.to_fetch(name)
        run.fetched(name)
    problem = "the end of the run cannot be recorded: No space left on device"
    assert run.status() == JobStatus("running", problem)
    run.stop()
    assert run.problem_since({}, 0.0) == problem and run.step("a") is None
    full_disk.undo()
    # Recorded before a host deletes its folder.
    step = run.step("a")
    assert step is not None and step["want"] == "remove"
    assert run.status() == JobStatus("finished", returncode=0, finished_at=7.0)
    next_master = HostRun(tmp_path / "run", 2**20, lambda run: None)
    assert next_master.status() == run.status()
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["finished"]


def test_on_a_full_disk_no_worker_starts_and_the_thread_of_the_host_goes_on(
    tmp_path: Path, full_disk: pytest.MonkeyPatch
) -> None:
    run = state_of_a_run(tmp_path / "run")
    run.answered("a", {"state": "prepared", "port": 5}, 0.0)
    with pytest.raises(OSError, match="No space left"):
        run.answered("b", {"state": "prepared"}, 0.0)
    # The thread of the host has nobody who would catch an error of this call.
    run.failed("b", "the answer of host b cannot be kept")
    assert run.step("a") is None and not run.is_over
    full_disk.undo()
    assert run.step("a") is None
    assert run.status() == JobStatus("failed", "the answer of host b cannot be kept")


def test_a_run_stops_on_a_full_disk(tmp_path: Path, full_disk: pytest.MonkeyPatch) -> None:
    run = state_of_a_run(tmp_path / "run")
    run.stop()
    full_disk.undo()
    assert run.step("a") is None
    assert run.status() == JobStatus("failed", "stopped")


def test_a_load_sample_of_the_future_gets_the_date_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullSecond(datetime):
        """A clock that stands at a full second, at which isoformat() omits the microseconds."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> FullSecond:
            return cls(2026, 1, 2, 3, 4, 5, 0, tz)

    run = state_of_a_run(tmp_path / "run")
    for name in "ab":
        run.answered(name, {"state": "prepared", "port": 5}, 0.0)
    monkeypatch.setattr(run_state, "datetime", FullSecond)
    past, future = "2026-01-02T03:04:04.900000Z", "2026-01-02T03:04:05.400000Z"
    samples = [{"rank": 0, "stream": "load", "text": "x", "date": date} for date in (past, future)]
    run.answered("a", {"state": "running", "load": samples}, 0.0)  # type: ignore[typeddict-item]
    lines = (tmp_path / "run/load/log.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["date"] for line in lines)
    assert first == past and second != future


def halves(hosts: Any, num_workers: int, taken: dict[str, set[int]]) -> list[Any]:
    from mlbench_master.engines.hosts.host_file import Share

    return [
        Share(host, (len(taken.get(host.name, ())),), place) for place, host in enumerate(hosts)
    ]


def test_the_engine_needs_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_SSH", "/no/ssh -F file")
    with pytest.raises(ConfigurationError, match="needs ssh, but '/no/ssh' cannot be found"):
        HostsEngine(tmp_path)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, as that of a temporary folder of pytest
    need not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_folders_of_masters_that_were_killed_are_removed(
    fake: Path, tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = short_folder
    for name in ("killed", "new"):
        (temporary / f"mlbench-ssh-{name}").mkdir(parents=True)
        (temporary / f"mlbench-ssh-{name}" / "socket").touch()
    (tmp_path / "foreign").mkdir()
    (temporary / "mlbench-ssh-link").symlink_to(tmp_path / "foreign")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    first = hosts_ssh.Ssh()
    (running,) = (path for path in temporary.iterdir() if (path / "lock").exists())
    for path in (running, temporary / "mlbench-ssh-killed", tmp_path / "foreign"):
        os.utime(path, (0, 0))
    second = hosts_ssh.Ssh()
    left = {path.name for path in temporary.iterdir()}
    assert len(left) == 4 and {"mlbench-ssh-new", "mlbench-ssh-link", running.name} < left
    assert list((tmp_path / "foreign").iterdir()) == []
    for ssh in (first, second):
        ssh.close()
    assert {path.name for path in temporary.iterdir()} == {"mlbench-ssh-new", "mlbench-ssh-link"}


def test_the_next_master_removes_the_folders_of_runs_that_had_ended(
    engine: HostsEngine, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one was killed after the end of a run, before the hosts had deleted their folders
    with the token."""
    step = HostRun.step

    def before_the_end(run: HostRun, name: str) -> dict[str, Any] | None:
        found = step(run, name)
        return None if found is None or found["want"] == "remove" else found

    with monkeypatch.context() as patch:
        patch.setattr(HostRun, "step", before_the_end)
        job_id = engine.start(job(script(tmp_path, "pass"), options=("--host", "a:1,b:1")))
        assert end_of(engine, job_id).state == "finished"
        engine.close()
    assert remote(fake, "a") and remote(fake, "b")
    assert (tmp_path / "runs/1/left_on_hosts").exists()
    (tmp_path / "runs/3").mkdir()
    (tmp_path / "runs/3/left_on_hosts").touch()
    (tmp_path / "runs/3/job.json").write_text("[]")
    second = HostsEngine(tmp_path / "runs", interval_s=0.1)
    try:
        wait_for(
            lambda: not remote(fake, "a") and not remote(fake, "b"),
            what="the end of the folders on the hosts",
        )
        wait_for(
            lambda: not (tmp_path / "runs/1/left_on_hosts").exists(), what="the end of the mark"
        )
        assert second.has_room(1, ("--host", "a")) and second._runs == {}
        assert second.poll(job_id).state == "finished"
    finally:
        second.close()
