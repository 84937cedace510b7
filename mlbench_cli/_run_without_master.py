"""Runs without a master, for ``mlbench run --no-master``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli import _embedded
from mlbench_cli._output import clean, print_table, remark
from mlbench_core.paths import user_folder

if TYPE_CHECKING:
    from mlbench_master.runs.masterless import MasterlessRuns

__all__ = ["ENGINE", "open_runs", "show_submitted"]

ENGINE = "slurm"
"""The only engine that needs no master.

It has its own queue, and its workers share a folder with this machine.
"""


def open_runs(name: str, data_dir: Path | None) -> MasterlessRuns:
    """Return the runs of a name, whose folder is created.

    Args:
        name: The name of the series of runs.
        data_dir: Folder for the folders of all names; by default ``no-master`` in the user's
            folder.

    Raises:
        ConfigurationError: Slurm's commands were not found.
        MissingDependencyError: The master's packages are not installed.
    """
    _embedded.check_installed()
    # After the check, because this import fails if a package of the master is missing.
    from mlbench_master.runs.masterless import MasterlessRuns

    return MasterlessRuns((data_dir or user_folder("no-master")) / name)


def show_submitted(runs: MasterlessRuns, started: Sequence[Mapping[str, Any]], waits: bool) -> None:
    """Write the jobs and the folders of submitted runs.

    If the command does not wait, also write how to go on.
    """
    rows = []
    for item in started:
        details = item["job_metadata"]
        row = (item["name"], item["num_workers"], details["slurm_job"], details["folder"])
        rows.append(row)
    if waits:
        for name, _, job, folder in rows:
            remark(clean(f"{name} is job {job} in {folder}"))
        return
    print_table(("RUN", "WORKERS", "JOB", "FOLDER"), rows, right=(1, 2))
    jobs = ",".join(str(job) for _, _, job, _ in rows)
    stop_command = clean(runs.stop_command(started))
    remark(f"'squeue --jobs={jobs}' shows the jobs, and '{stop_command}' ends them")
    path = clean(shlex.quote(str(runs.folder)))
    remark(f"when they have ended, 'mlbench compare {path}' shows their results")
