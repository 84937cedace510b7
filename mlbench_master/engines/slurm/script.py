"""Write the scripts of a job for Slurm.

The job's script starts one task for each worker through ``srun``. Each task runs the worker's
script, which sets the variables of torchrun and starts the worker. No script holds a secret: the
worker's script reads the variables of ``env.sh``, which only its user can read.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import Job
from mlbench_master.engines.local.mpirun import is_mpirun, mpirun_command
from mlbench_master.engines.worker_command import split_command

__all__ = ["check_options", "environment_script", "job_script", "sbatch_command", "worker_script"]

# Options that would contradict the script, or the files in which the master looks for its answers.
_OWN = (
    *("--array", "--chdir", "--clusters", "--comment", "--error", "--job-name", "--ntasks"),
    *("--output", "--parsable", "--requeue", "--test-only", "--wait", "--wrap"),
    *("-a", "-D", "-M", "-e", "-J", "-n", "-o", "-W"),
)
_GPU_OPTIONS = ("--gpus", "-G", "--gres", "--tres-per-")

_JOB = """\
#!/bin/sh
# Run {name} of MLBench (id {run_id}) with {num_workers} worker(s), written by its master.
# sbatch got the options.
echo "$SLURM_JOB_ID" > begun
# The addresses at which Slurm reaches the nodes, because their names may not resolve.
# Worker 0 runs on the first one.
MLBENCH_NODES=$(scontrol -o show node "$SLURM_JOB_NODELIST" |
    sed -n 's/^NodeName=.* NodeAddr=\\([^ ]*\\).*/\\1/p')
MLBENCH_NODES=$(echo ${{MLBENCH_NODES:-$(scontrol show hostnames "$SLURM_JOB_NODELIST")}})
MASTER_ADDR=${{MLBENCH_NODES%% *}}
# Two jobs on one node rarely get the same port.
MASTER_PORT=$((15000 + SLURM_JOB_ID % 20000))
export MLBENCH_NODES MASTER_ADDR MASTER_PORT
{start}
status=$?
echo "$status" > exit.part && mv exit.part exit
exit "$status"
"""
_SRUN = """\
srun --export=ALL --ntasks={num_workers} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    --kill-on-bad-exit=1 --output=logs/%t.out --error=logs/%t.err sh worker.sh"""
# Slurm may list PMIx although it cannot load its library.
_MPI = """\
# MPI's workers find each other through PMIx, or through the mpirun of MPI within the job.
if [ -n "$SLURM_MPI_TYPE" ] || srun --mpi=pmix --ntasks=1 true 2> /dev/null; then
    export SLURM_MPI_TYPE="${{SLURM_MPI_TYPE:-pmix}}"
{srun}
else
    {mpirun}
fi"""
_ONE = "sh worker.sh > logs/0.out 2> logs/0.err"

_WORKER = """\
#!/bin/sh
# One worker of run {name} of MLBench (id {run_id}).
own=$PWD
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
. ./env.sh
{ranks}
{folder}
# A signal for all processes of the job must not keep this shell from writing the worker's status.
is_ended=
trap is_ended=1 TERM
{command} &
worker=$!
[ -z "$is_ended" ] || kill "$worker"
wait "$worker"; status=$?
while kill -0 "$worker" 2> /dev/null; do wait "$worker"; status=$?; done
echo "$status" > "$own/status/$rank.part" && mv "$own/status/$rank.part" "$own/status/$rank"
exit "$status"
"""
# "2(x3),1" means four nodes with 2, 2, 2 and 1 tasks.
_COUNTS = """\
counts=$(echo "${SLURM_STEP_TASKS_PER_NODE:-$SLURM_TASKS_PER_NODE}" | tr , '\\n' |
    awk -F '[(x)]+' '{ for (i = $2 ? $2 : 1; i > 0; i--) print $1 }')
"""
_TORCHRUN = """\
export RANK="$rank" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE="$(echo "$counts" | sed -n "$((SLURM_NODEID + 1))p")"
"""
_MPI_RANKS = """\
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
# With these, a worker sees if MPI has found all of them. On a node that mpirun reached,
# SLURM_NTASKS is another number.
export RANK="$rank" WORLD_SIZE={num_workers}
# The mpirun does not write one file for each worker, as srun does.
[ -z "$OMPI_COMM_WORLD_RANK$PMI_RANK" ] || exec >> "logs/$rank.out" 2>> "logs/$rank.err"
"""
_OWN_GPU = """\
# If the worker sees only its own GPU, this GPU has the number 0.
case ${CUDA_VISIBLE_DEVICES:-,} in *,*) ;; *) export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 ;; esac
"""
_HOSTS = """\
hosts=
set -- $MLBENCH_NODES
for count in $counts; do
    while [ "$count" -gt 0 ]; do hosts="$hosts,$1"; count=$((count - 1)); done
    shift
done
hosts=${hosts#,}
"""


def check_options(options: Sequence[str]) -> None:
    """Refuse options of ``sbatch`` that a run cannot have.

    Raises:
        ValueError: An option is one that MLBench sets, or there is a word before the first option.
    """
    if options and not options[0].startswith("-"):
        # sbatch would take it for the script.
        raise ValueError(
            "engine_options: must begin with an option, for example --time=10, not "
            f"{options[0][:80]!r}"
        )
    for option in options:
        name = option.partition("=")[0]
        if name.startswith("--"):
            # sbatch also takes a long option by its beginning, as in --arr=1-4.
            is_own = any(own.startswith(name) for own in _OWN)
        else:
            # The value of a short option may follow without a blank, as in -n4.
            is_own = name[:2] in _OWN
        if is_own:
            raise ValueError(
                "engine_options: must be options of sbatch that MLBench does not set itself, "
                f"not {option[:80]!r}: leave it out; the number of workers, of cores and of GPUs "
                "come from the run"
            )


def sbatch_command(job: Job, folder: str, mark: str) -> list[str]:
    """Return the command line that submits a job.

    Args:
        job: The job.
        folder: The folder of its scripts, on a file system that all nodes share.
        mark: Text by which a later master recognizes it.
    """
    # Slurm assigns whole cores only.
    defaults = [f"--cpus-per-task={math.ceil(job.num_cpus)}"]
    if job.gpu_enabled and not any(option.startswith(_GPU_OPTIONS) for option in job.options):
        defaults.append("--gpus-per-task=1")
    # Of an option that is given twice, sbatch takes the last one.
    return [
        *("sbatch", "--parsable", *defaults, *job.options),
        *(f"--ntasks={job.num_workers}", f"--job-name=mlbench-{job.name}", f"--comment={mark}"),
        *(f"--chdir={folder}", "--output=logs/job.out", "--error=logs/job.out"),
        # A job that starts again after a pre-emption would mix the metrics of two attempts.
        *("--no-requeue", "job.sh"),
    ]


def job_script(job: Job) -> str:
    """Return the script of a job."""
    start = _SRUN.format(num_workers=job.num_workers)
    if _has_one_task(job):
        start = _ONE
    elif job.backend == "mpi":
        try:
            words, _ = mpirun_command(job.num_workers, [["sh", "worker.sh"]])
            # It takes the nodes from Slurm.
            mpirun = shlex.join(words)
        except ConfigurationError as error:
            # The job needs it only if this Slurm cannot start MPI's workers itself.
            mpirun = f"echo {shlex.quote(f'this Slurm has no PMIx: {error}')}; false"
        start = _MPI.format(srun=textwrap.indent(start, "    "), mpirun=mpirun)
    return _JOB.format(name=job.name, run_id=job.run_id, num_workers=job.num_workers, start=start)


def worker_script(job: Job) -> str:
    """Return the script that starts one worker."""
    words = split_command(job)
    has_hosts = any("{hosts}" in word for word in words)
    has_one_task = _has_one_task(job)
    # A command that starts all workers also assigns the ranks.
    needs_torchrun = job.backend != "mpi" and not has_one_task
    parts = ["rank=$SLURM_PROCID\n"]
    if job.backend == "mpi" and not has_one_task:
        parts = [_MPI_RANKS.replace("{num_workers}", str(job.num_workers))]
    if needs_torchrun or has_hosts:
        parts.append(_COUNTS)
    if needs_torchrun:
        parts.append(_TORCHRUN)
    if needs_torchrun and job.gpu_enabled:
        parts.append(_OWN_GPU)
    if has_hosts:
        parts.append(_HOSTS)
    folder = "cd work || exit"
    if job.cwd and job.is_task:
        # The script of a task needs no file of the user's folder.
        folder = f"cd {shlex.quote(job.cwd)} || cd work || exit"
    elif job.cwd:
        folder = f"cd {shlex.quote(job.cwd)} || exit"
    ranks, command = "".join(parts).rstrip("\n"), " ".join(map(_quote, words))
    return _WORKER.format(
        name=job.name, run_id=job.run_id, ranks=ranks, folder=folder, command=command
    )


def environment_script(variables: Mapping[str, str], removed: Sequence[str] = ()) -> str:
    """Return a script that sets variables, after it has removed some that the job inherited."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    if removed:
        lines.insert(0, f"unset {' '.join(removed)}\n")
    return "".join(lines)


def _has_one_task(job: Job) -> bool:
    """Return whether one command starts all workers, as the user's own ``mpirun`` does."""
    return not job.all_nodes or (job.backend == "mpi" and is_mpirun(shlex.split(job.command)[0]))


def _quote(word: str) -> str:
    """Quote a word for the shell, which fills in the rank and the hosts.

    Example:
        >>> _quote("--rank={rank}"), _quote("$HOME"), _quote("")
        ('--rank="$rank"', "'$HOME'", "''")
    """
    variables = {"{rank}": '"$rank"', "{hosts}": '"$hosts"'}
    quoted = ""
    for part in re.split(r"(\{rank\}|\{hosts\})", word):
        if part:
            quoted += variables.get(part) or shlex.quote(part)
    return quoted or "''"
