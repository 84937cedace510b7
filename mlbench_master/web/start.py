"""The form that starts runs: a task, a command or an image, for one number of workers or several.

It names and seeds its runs as ``mlbench run`` does, and starts all of them or none. After an error,
the page shows the form again with everything that the user typed, and the error at its field.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from mlbench_core.client.series import RunSeries, check_backend, parse_workers
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.named import NETWORKS
from mlbench_core.tasks import (
    BACKENDS,
    TASKS,
    Task,
    find_image,
    get_task,
    is_run_name,
    option_value,
)
from mlbench_master.api.bodies import MAX_RUN_BYTES, read_body
from mlbench_master.api.routes import EventsPart, LauncherPart, SchedulerPart, StorePart, run_or_404
from mlbench_master.database.store import NameInUseError, Run
from mlbench_master.goals import split_command, task_of_image
from mlbench_master.launchers.interface import Launcher
from mlbench_master.runs.commands import (
    CUSTOM_BACKEND,
    CUSTOM_IMAGE,
    no_bandwidth_limit,
    no_gpu,
    no_network,
)
from mlbench_master.runs.starting import start_runs
from mlbench_master.schemas import RunIn, describe_errors
from mlbench_master.web.render import page

__all__ = ["router"]

LABELS = {
    "name": "Name",
    "num_workers": "Numbers of workers",
    "kind": "Program",
    "task": "Task",
    "dataset": "Data set",
    "optimizer": "Optimizer",
    "image_name": "Image",
    "custom_image_name": "Name of the image",
    "arguments": "Further arguments of the script",
    "command": "Command",
    "num_cpus": "Cores per worker",
    "backend": "Backend",
    "custom_backend": "Name of the backend",
    "run_all_nodes": "Every worker runs the command",
    "gpu_enabled": "A GPU for each worker",
    "max_bandwidth": "Bandwidth",
    "network": "Network",
    "engine_options": "Options of the engine",
    "light_target": "Light goal",
    "repeats": "Repeats",
    "seed": "First seed",
    "exclusive": "Run each run alone",
}
_DEFAULTS = {
    "num_workers": "1 2",
    "kind": "task",
    "task": "1a",
    "num_cpus": "1",
    "backend": BACKENDS[0],
    "run_all_nodes": "true",
}
# Fields of a request that the form has under another name.
_FORM_NAMES = {"custom_image_command": "command"}
_MOST_RUNS = 500

router = APIRouter()


class FormError(ValueError):
    """A field of the form has a value that cannot be used.

    Args:
        field: The name of the field.
        message: Its problem.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@router.get("/runs/new/")
def start_page(request: Request, store: StorePart, launcher: LauncherPart) -> HTMLResponse:
    earlier = request.query_params.get("from")
    values = (
        _DEFAULTS if earlier is None else {**_DEFAULTS, **_values_of(run_or_404(store, earlier))}
    )
    return _form_page(request, launcher, values, {})


@router.post("/runs/")
def start(
    request: Request,
    body: Annotated[Any, Depends(read_body(MAX_RUN_BYTES))],
    store: StorePart,
    scheduler: SchedulerPart,
    launcher: LauncherPart,
    events: EventsPart,
) -> Response:
    if not isinstance(body, dict):
        raise HTTPException(400, "body: must be the form of the page /runs/new/")
    form = {
        key: value.strip()
        for key, value in body.items()
        if key in LABELS and isinstance(value, str)
    }
    errors: dict[str, str] = {}
    wanted = _requests(form, errors)
    if not errors:
        try:
            runs = start_runs(wanted, store, scheduler, launcher, events)
            return RedirectResponse(
                f"/runs/{runs[0].id}/" if len(runs) == 1 else "/runs/", status_code=303
            )
        except NameInUseError as error:
            errors["name"] = (
                f"there is a run named {str(error)!r}; choose another name or delete that run"
            )
        except ValueError as error:
            _record(errors, *str(error).partition(": ")[::2])
    return _form_page(request, launcher, form, errors)


def _form_page(
    request: Request, launcher: Launcher, values: Mapping[str, str], errors: Mapping[str, str]
) -> HTMLResponse:
    answer = page(
        request,
        "start.html",
        values={name: values.get(name, "") for name in LABELS},
        # In the order of the fields.
        errors={name: errors[name] for name in LABELS if name in errors},
        labels=LABELS,
        tasks=TASKS.values(),
        backends=BACKENDS,
        launcher=launcher,
        infinity=math.inf,
        no_gpu=no_gpu(launcher) if launcher.gpus == () else "",
        networks=NETWORKS,
        no_network="" if launcher.emulates_networks else no_network(launcher),
        no_bandwidth_limit="" if launcher.limits_bandwidth else no_bandwidth_limit(launcher),
    )
    answer.status_code = 400 if errors else 200
    return answer


def _record(errors: dict[str, str], field: str, message: str) -> None:
    """Add an error of a request under the form's name of its field; only the first one of a field."""
    field = field.partition(".")[0]  # "arguments.3" is in one field
    name = _FORM_NAMES.get(field, field)
    if name in LABELS:
        errors.setdefault(name, message)
    else:
        errors.setdefault("kind", f"{field}: {message}")


def _requests(form: Mapping[str, str], errors: dict[str, str]) -> list[RunIn]:
    """Return the runs that a form asks for, and add what is wrong with its fields to ``errors``."""

    def read(field: str, convert: Callable[[str], Any], default: Any) -> Any:
        # With the default for a wrong field, the other fields are still checked.
        try:
            return convert(form.get(field, ""))
        except ValueError as error:
            errors.setdefault(error.field if isinstance(error, FormError) else field, str(error))
            return default

    task, program = read("kind", lambda _: _program(form), (None, {"command": "none"}))
    options = read("engine_options", partial(_split, "engine_options"), [])
    series = RunSeries(
        read("name", _name, "none"),
        read("num_workers", parse_workers, (1,)),
        {**_settings(form, task, options), **program},
        task,
        read("repeats", partial(_number, most=1000), None),
        read("seed", partial(_number, least=0, most=2**31), None),
    )
    known = task if form.get("backend") in BACKENDS else None
    read("backend", lambda backend: check_backend(backend, known, "gpu_enabled" in form), None)
    if not errors:
        read(series.seed_option or "seed", lambda _: series.check_seeds(), None)
    count = len(series.num_workers) * (series.repeats or 1)
    if count > _MOST_RUNS:
        field = "num_workers" if series.repeats is None else "repeats"
        errors[field] = (
            f"must give at most {_MOST_RUNS} runs at once, not {count}: start them in parts"
        )
        return []
    wanted = []
    for request in series.requests():
        try:
            wanted.append(RunIn.model_validate(request))
        except ValidationError as error:
            # The other runs have the same errors.
            for field, message in describe_errors(error):
                _record(errors, field, message)
            break
    return wanted


def _name(text: str) -> str:
    if not is_run_name(text):
        raise ValueError(
            "must be 1 to 63 lowercase letters, digits and '-', without '-' at its ends, not "
            f"{text[:80]!r}"
        )
    return text


def _settings(
    form: Mapping[str, str], task: Task | None, engine_options: list[str]
) -> dict[str, Any]:
    """Return the fields of a request that do not say what to run."""
    settings: dict[str, Any] = {
        field: form.get(field, "") for field in ("num_cpus", "max_bandwidth", "backend", "network")
    }
    if settings["backend"] == CUSTOM_BACKEND:
        settings["custom_backend"] = form.get("custom_backend", "")
        # A browser leaves out a box that is not checked. A task always starts all of its workers.
        settings["run_all_nodes"] = task is not None or "run_all_nodes" in form
    flags = {field: field in form for field in ("gpu_enabled", "light_target", "exclusive")}
    return {**settings, **flags, "engine_options": engine_options}


def _program(form: Mapping[str, str]) -> tuple[Task | None, dict[str, Any]]:
    """Return the task of a form, None for a command, and the fields of the request that say what to run."""
    kind = form.get("kind")
    image = form.get("image_name", "")
    if kind == "command" or (kind == "image" and image == CUSTOM_IMAGE):
        command = form.get("command", "")
        if not command:
            raise FormError(
                "command",
                "must be a command line, not empty: enter for example python /path/to/train.py",
            )
        _split("command", command)
        if kind == "command":
            return None, {"command": command}
        name = form.get("custom_image_name", "")
        return None, {
            "image_name": image,
            "custom_image_name": name,
            "custom_image_command": command,
        }
    arguments = _split("arguments", form.get("arguments", ""))
    if kind == "image":
        try:
            return find_image(image)[0], {"image_name": image, "arguments": arguments}
        except ValueError as error:
            raise FormError("image_name", str(error)) from None
    if kind != "task":
        raise FormError("kind", f"must be task, image or command, not {kind!r}: choose one")
    try:
        task = get_task(form.get("task", ""))
    except ValueError as error:
        raise FormError("task", str(error)) from None
    chosen = [
        *_option(form, "dataset", task, task.datasets),
        *_option(form, "optimizer", task, task.optimizers),
    ]
    for option in chosen[::2]:
        if option_value(arguments, option) is not None:
            raise FormError(
                "arguments",
                f"must not have {option}, which is chosen in its field: leave out one of them",
            )
    return task, {"task": task.key, "arguments": [*chosen, *arguments]}


def _split(field: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise FormError(
            field, f"must be quoted as for a shell, not {text[:80]!r}: {error}"
        ) from None


def _option(form: Mapping[str, str], field: str, task: Task, known: tuple[str, ...]) -> list[str]:
    """Return the words of an option of a task's script that has its own field."""
    value = form.get(field, "")
    if not value:
        return []
    if value not in known:
        allowed = f"one of {', '.join(known)}" if known else "left out"
        raise FormError(
            field, f"must be {allowed} for task {task.key}, not {value[:80]!r}: choose another one"
        )
    return [f"--{field}", value]


def _number(text: str, least: int = 1, most: int = 0) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and least <= int(text) <= most):
        raise ValueError(f"must be a whole number from {least} to {most}, not {text[:80]!r}")
    return int(text)


def _values_of(run: Run) -> dict[str, str]:
    """Return the values of the form that starts a run again."""
    values = {
        "name": f"{_base_name(run)[:50].rstrip('-')}-again",
        "num_workers": str(run.num_workers),
        "num_cpus": str(run.num_cpus).removesuffix(".0"),
        **({"gpu_enabled": "true"} if run.gpu_enabled else {}),
        **({"light_target": "true"} if run.light_target else {}),
        **({"exclusive": "true"} if run.metadata_dict().get("exclusive") else {}),
        **(
            {"network": str(run.metadata_dict()["network"])}
            if run.metadata_dict().get("network")
            else {}
        ),
        "backend": run.backend if run.backend in BACKENDS else CUSTOM_BACKEND,
        "custom_backend": "" if run.backend in BACKENDS else run.backend,
        "run_all_nodes": "true" if run.run_all_nodes else "",
        **_engine_options_of(run),
    }
    # A damaged record may hold any type.
    words = split_command(str(run.command))
    task = task_of_image(str(run.image))
    if task is not None:
        arguments = _arguments_of(task, words)
        if arguments is not None:
            return {**values, "kind": "task", "task": task.key, **arguments}
    command = {"command": str(run.command)}
    if run.image in ("", CUSTOM_IMAGE) or task is not None:
        return {**values, "kind": "command", **command}
    return {
        **values,
        "kind": "image",
        "image_name": CUSTOM_IMAGE,
        "custom_image_name": run.image,
        **command,
    }


def _engine_options_of(run: Run) -> dict[str, str]:
    options = run.metadata_dict().get("engine_options")
    # A damaged record may hold any type.
    return {"engine_options": shlex.join(map(str, options))} if isinstance(options, list) else {}


def _base_name(run: Run) -> str:
    """Return the name that was given to a series of runs, of which this is one."""
    return re.sub(rf"-{run.num_workers}(-r\d+)?$", "", run.name) or run.name


def _arguments_of(task: Task, words: list[str]) -> dict[str, str] | None:
    """Return the fields with the arguments of a task's script, or None if the command is another one."""
    try:
        commands = [
            shlex.split(task.command(in_container=in_container)) for in_container in (False, True)
        ]
    except ConfigurationError:
        return None
    own = next((own for own in commands if words[: len(own)] == own), None)
    if own is None:
        return None
    rest = [word for word in words[len(own) :] if word not in ("--light", "--gpu")]
    fields = {}
    for field, known in (("dataset", task.datasets[1:]), ("optimizer", task.optimizers[1:])):
        option = f"--{field}"
        if option in rest[:-1] and rest[rest.index(option) + 1] in known:
            place = rest.index(option)
            fields[field] = rest[place + 1]
            del rest[place : place + 2]
    return {**fields, "arguments": shlex.join(rest)}
