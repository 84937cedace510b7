"""A small Slurm for tests: each job runs on this machine at once, and files have the states.

Called as ``fake_slurm.py PROGRAM ARGUMENTS``; :func:`install` makes the programs. The folder
``FAKE_SLURM`` has::

    calls      one line per call: the program and its arguments
    jobs/N     "STATE|reason|time limit|nodes|comment" of job N, in Slurm's order after its number
    pids/N     the process group of job N
    hold       while it exists, jobs stay PENDING
    down       while it exists, the controller does not answer
    lock       held by a program that reads and changes a state
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(os.environ.get("FAKE_SLURM", "/nonexistent"))
PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct")


def install(folder: Path, *programs: str) -> Path:
    """Make the programs of a new fake Slurm; the folder for PATH."""
    for name in ("bin", "jobs", "pids"):
        (folder / name).mkdir(parents=True)
    for name in programs or PROGRAMS:
        program = folder / "bin" / name
        program.write_text(
            f'#!/bin/sh\nFAKE_SLURM={folder} exec {sys.executable} -ISs {__file__} {name} "$@"\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder / "bin"


def values(arguments: list[str]) -> dict[str, str]:
    """The options with ``=``, and the last word as ``script``; the later of two options counts."""
    found = {
        word.partition("=")[0]: word.partition("=")[2]
        for word in arguments
        if word.startswith("--")
    }
    return {**found, "script": arguments[-1]}


def read(job: str) -> list[str]:
    return (ROOT / "jobs" / job).read_text().split("|")


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other programs from changing a state: a job may be cancelled in any instant."""
    with (ROOT / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(job: str, *words: str) -> None:
    """Write the state of a job, of which no reader sees a part."""
    part = ROOT / f"job-{job}.part"
    part.write_text("|".join(words))
    part.replace(ROOT / "jobs" / job)


def set_state(job: str, before: str, after: str) -> bool:
    """Change a state if it is ``before``; whether it was. The caller holds the lock."""
    state, _, *rest = read(job)
    if state == before:
        write(job, after, "None", *rest)
    return state == before


def sbatch(arguments: list[str]) -> None:
    options = values(arguments)
    limit = options.get("--time", "UNLIMITED")
    with locked():
        job = str(len(list((ROOT / "jobs").iterdir())) + 1)
        write(job, "PENDING", "Resources", limit, "", options["--comment"])
    (ROOT / f"environment-{job}.json").write_text(json.dumps(dict(os.environ)))
    (ROOT / f"script-{job}").write_text((Path(options["--chdir"]) / options["script"]).read_text())
    if (ROOT / "no-answer").exists():
        sys.exit(
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        )
    print(job, flush=True)
    if not (ROOT / "hold").exists():
        subprocess.Popen(
            [sys.executable, "-ISs", __file__, "run", job, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def run(arguments: list[str]) -> None:
    """The node: run the script of a job to its end."""
    job, *arguments = arguments
    options = values(arguments)
    with locked():
        (ROOT / "pids" / job).write_text(str(os.getpgid(0)))
        if not set_state(job, "PENDING", "RUNNING"):
            return  # it was cancelled before
    tasks, cpus = options["--ntasks"], options["--cpus-per-task"]
    place = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "f[1-2]",
        "SLURM_NTASKS": tasks,
        "SLURM_CPUS_PER_TASK": cpus,
    }
    place |= {
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    folder = Path(options["--chdir"])
    with (folder / options["--output"]).open("ab") as output:
        script = ["sh", str(ROOT / f"script-{job}")]
        status = subprocess.call(
            script, cwd=folder, env={**os.environ, **place}, stdout=output, stderr=output
        )
    with locked():
        set_state(job, "RUNNING", "FAILED" if status else "COMPLETED")


def srun(arguments: list[str]) -> None:
    if arguments == ["--mpi=pmix", "--ntasks=1", "true"]:
        sys.exit((ROOT / "no-pmix").exists())
    options = values(arguments)
    size = int(options["--ntasks"])
    tasks: dict[int, subprocess.Popen[bytes]] = {}
    command = arguments[arguments.index("sh") :]
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        end(tasks)

    # Before the first task, which would otherwise go on without this process.
    signal.signal(signal.SIGTERM, stop)
    # As on two nodes, the second of which has one task less.
    first = (size + 1) // 2
    shape = {"SLURM_STEP_TASKS_PER_NODE": f"{first},{size - first}" if size > 1 else "1"}
    for rank in range(size):
        local, node = (rank, 0) if rank < first else (rank - first, 1)
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            **shape,
        }
        with (
            Path(options["--output"].replace("%t", str(rank))).open("wb") as out,
            Path(options["--error"].replace("%t", str(rank))).open("wb") as err,
        ):
            tasks[rank] = subprocess.Popen(
                command, env={**os.environ, **place}, stdout=out, stderr=err, start_new_session=True
            )
    if is_stopped:
        end(tasks)  # those that started after the signal, too
    worst = 0
    while tasks:
        for rank, task in list(tasks.items()):
            status = task.poll()
            if status is None:
                continue
            del tasks[rank]
            said = "Killed" if status < 0 else f"Exited with exit code {status}"
            if status:
                print(f"srun: error: f1: task {rank}: {said}", file=sys.stderr, flush=True)
                worst = worst or abs(status)
                end(tasks)
        time.sleep(0.01)
    sys.exit(worst)


def end(tasks: dict[int, subprocess.Popen[bytes]]) -> None:
    for task in tasks.values():
        # The signal may arrive just after the end of a task.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGTERM)


def answer_or_fail() -> None:
    if (ROOT / "down").exists():
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


def squeue(arguments: list[str]) -> None:
    answer_or_fail()
    options = values(arguments)
    known = sorted(path.name for path in (ROOT / "jobs").iterdir() if path.name.isdecimal())
    wanted = [options["--jobs"]] if "--jobs" in options else known
    if not set(wanted) <= set(known):
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for job in wanted:
        print("|".join([job, *read(job)]))


def sacct(arguments: list[str]) -> None:
    accounting = ROOT / "accounting"
    if not accounting.exists():
        sys.exit("Slurm accounting storage is disabled")
    print(accounting.read_text(), end="")


def scancel(arguments: list[str]) -> None:
    answer_or_fail()
    (job,) = arguments
    with locked():
        if set_state(job, "RUNNING", "CANCELLED"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(int((ROOT / "pids" / job).read_text()), signal.SIGTERM)
        set_state(job, "PENDING", "CANCELLED")


def scontrol(arguments: list[str]) -> None:
    for number in (1, 2):
        print(
            f"NodeName=f{number} Arch=x86_64 CPUTot=2 "
            f"NodeAddr=127.0.0.{number} NodeHostName=f{number} Port=1"
        )


if __name__ == "__main__":
    name = sys.argv[1]
    if name != "run":
        with (ROOT / "calls").open("a") as log:
            log.write(" ".join(sys.argv[1:]) + "\n")
    {
        function.__name__: function
        for function in (sbatch, run, srun, squeue, sacct, scancel, scontrol)
    }[name](sys.argv[2:])
