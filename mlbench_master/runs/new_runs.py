"""Make the record of a requested run, and the job that an engine starts for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_core.calling_environment import NAMED_VARIABLES
from mlbench_master.api.schemas import RunIn
from mlbench_master.database.store import CALLER_ENVIRONMENT, Run, new_run
from mlbench_master.engines.interface import Engine, Job
from mlbench_master.runs.commands import (
    check_options,
    image_of_record,
    resolve_backend,
    resolve_command,
    resolve_folder,
)
from mlbench_master.runs.run_goals import task_of_image

__all__ = ["make_job", "make_run"]

_RUN_FIELDS = {"name", "num_workers", "num_cpus", "max_bandwidth", "gpu_enabled", "light_target"}


def make_run(wanted: RunIn, engine: Engine) -> Run:
    """Make the record of a run, which is not stored yet.

    Args:
        wanted: The requested run.
        engine: The engine that will start it.

    Raises:
        ValueError: The request cannot be fulfilled; the message names the field.
    """
    image, command = resolve_command(wanted, engine.uses_image(wanted.engine_options))
    backend = resolve_backend(wanted)
    all_nodes, notes = check_options(wanted, engine)
    cwd, more = resolve_folder(wanted, engine, command)
    return new_run(
        image=image,
        command=command,
        backend=backend,
        run_all_nodes=all_nodes,
        job_metadata=json.dumps(_first_metadata(wanted, [*notes, *more], cwd)),
        **wanted.model_dump(include=_RUN_FIELDS),
    )


def make_job(
    run: Run, engine: Engine, worker_env: Mapping[str, str], gpus: Sequence[str] = ()
) -> Job:
    """Make the job of a run.

    Args:
        run: The run.
        engine: The engine that will start the job.
        worker_env: Environment variables of the workers, for example the URL of the master.
        gpus: The GPUs that are lent to the run.
    """
    facts = run.metadata_dict()
    env: dict[str, str] = {**facts.get("environment", {})}
    if env:
        # The result's record of the environment keeps the variables that are named here.
        env[NAMED_VARIABLES] = " ".join(env)
    # The variables of the master come last: a run cannot replace them.
    env.update(worker_env)
    env["MLBENCH_RUN_ID"] = str(run.id)
    env["MLBENCH_RUN_NAME"] = run.name
    return Job(
        run_id=run.id,
        name=run.name,
        command=run.command,
        num_workers=run.num_workers,
        num_cpus=run.num_cpus,
        backend=run.backend,
        gpu_enabled=run.gpu_enabled,
        gpus=tuple(gpus),
        all_nodes=run.run_all_nodes,
        image=image_of_record(run.image),
        env=env,
        notes=tuple(facts.get("notes", ())),
        options=tuple(facts.get("engine_options", ())),
        network=str(facts.get("network", "")),
        is_task=task_of_image(run.image) is not None,
        cwd=str(facts.get("cwd", "")),
        caller_env=facts.get(CALLER_ENVIRONMENT),
        oversubscribe=facts.get("oversubscribe") is True,
        elastic=run.elastic,
    )


def _first_metadata(wanted: RunIn, notes: list[str], cwd: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"notes": notes}
    if wanted.exclusive:
        metadata["exclusive"] = True
    if wanted.engine_options:
        metadata["engine_options"] = wanted.engine_options
    if wanted.network:
        metadata["network"] = wanted.network
    if wanted.environment:
        metadata["environment"] = wanted.environment
    if wanted.caller is not None:
        metadata[CALLER_ENVIRONMENT] = wanted.caller.environment
    if cwd:
        metadata["cwd"] = cwd
    if wanted.oversubscribe:
        metadata["oversubscribe"] = True
    if wanted.elastic:
        metadata["elastic"] = wanted.elastic
    if wanted.tags:
        metadata["tags"] = wanted.tags
    return metadata
