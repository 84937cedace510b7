"""The form that starts runs: a task, a script, a command or an image, for numbers of workers.

It names and seeds its runs as ``mlbench run`` does, and starts all of them or none. After an error,
the page shows the form again with everything that the user typed, and the error at its field.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from pydantic import ValidationError

from mlbench_core.calling_environment import observe_command, split_observed
from mlbench_core.client.series import RunSeries, check_backend, parse_workers
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.named_networks import NETWORKS
from mlbench_core.observe.methods.names import METHODS, parse_method
from mlbench_core.observe.options import parse_options
from mlbench_core.observe.output import parse_goal, parse_metric
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
from mlbench_master.api.routes import EnginePart, EventsPart, SchedulerPart, StorePart, run_or_404
from mlbench_master.api.schemas import RunIn, describe_errors
from mlbench_master.database.store import NameInUseError, Run
from mlbench_master.engines.interface import Engine
from mlbench_master.runs.commands import (
    CUSTOM_BACKEND,
    CUSTOM_IMAGE,
    no_bandwidth_limit,
    no_gpu,
    no_network,
)
from mlbench_master.runs.run_goals import split_command, task_of_image
from mlbench_master.runs.start_runs import start_runs
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
    "script": "Script",
    "method": "Method",
    "metrics": "Metrics that it prints",
    "goal": "Goal",
    "command": "Command",
    "num_cpus": "Cores per worker",
    "backend": "Backend",
    "custom_backend": "Name of the backend",
    "run_all_nodes": "Every worker runs the command",
    "gpu_enabled": "A GPU for each worker",
    "max_bandwidth": "Bandwidth",
    "network": "Network",
    "elastic": "Replace workers that die",
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
_FORM_NAMES = {"custom_image_command": "command", "cwd": "script"}
# Fields of a script that are options of its observer, and what checks them.
_OBSERVER: dict[str, tuple[str, Callable[[str], object]]] = {
    "method": ("--method", parse_method),
    "metrics": ("--metric", parse_metric),
    "goal": ("--goal", parse_goal),
}
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
def start_page(request: Request, store: StorePart, engine: EnginePart) -> HTMLResponse:
    values = _DEFAULTS
    earlier = request.query_params.get("from")
    if earlier is not None:
        values = {**_DEFAULTS, **_values_of(run_or_404(store, earlier))}
    return _form_page(request, engine, values, {})


@router.post("/runs/")
def start(
    request: Request,
    body: Annotated[Any, Depends(read_body(MAX_RUN_BYTES))],
    store: StorePart,
    scheduler: SchedulerPart,
    engine: EnginePart,
    events: EventsPart,
) -> Response:
    if not isinstance(body, dict):
        raise HTTPException(400, "body: must be the form of the page /runs/new/")
    form = {}
    for field, value in body.items():
        if field in LABELS and isinstance(value, str):
            form[field] = value.strip()
    errors: dict[str, str] = {}
    wanted = _requests(form, errors)
    if not errors:
        try:
            runs = start_runs(wanted, store, scheduler, engine, events)
            path = "/runs/"
            if len(runs) == 1:
                path = f"/runs/{runs[0].id}/"
            return RedirectResponse(path, status_code=303)
        except NameInUseError as error:
            name = str(error)
            errors["name"] = (
                f"there is a run named {name!r}; choose another name or delete that run"
            )
        except ValueError as error:
            field, _, message = str(error).partition(": ")
            _record(errors, field, message)
    return _form_page(request, engine, form, errors)


def _form_page(
    request: Request, engine: Engine, values: Mapping[str, str], errors: Mapping[str, str]
) -> HTMLResponse:
    # Why a field cannot be used; empty if it can.
    reasons = {"no_gpu": "", "no_network": "", "no_bandwidth_limit": ""}
    if engine.gpus == ():  # not None, with which a cluster assigns them
        reasons["no_gpu"] = no_gpu(engine)
    if not engine.emulates_networks:
        reasons["no_network"] = no_network(engine)
    if not engine.limits_bandwidth:
        reasons["no_bandwidth_limit"] = no_bandwidth_limit(engine)
    methods = {}
    for name, spec in METHODS.items():
        # --method does not take those of --optimizer.
        if spec.kind != "optimizer":
            methods[name] = spec
    answer = page(
        request,
        "start.html",
        values={**dict.fromkeys(LABELS, ""), **values},
        # In the order of the fields.
        errors={name: errors[name] for name in LABELS if name in errors},
        labels=LABELS,
        tasks=TASKS.values(),
        backends=BACKENDS,
        engine=engine,
        infinity=math.inf,
        networks=NETWORKS,
        methods=methods,
        **reasons,
    )
    if errors:
        answer.status_code = 400
    return answer


def _record(errors: dict[str, str], field: str, message: str) -> None:
    """Add an error of a request under the form's name of its field, unless the field has one."""
    field = field.partition(".")[0]  # "arguments.3" is in one field
    name = _FORM_NAMES.get(field, field)
    if name in LABELS:
        errors.setdefault(name, message)
    else:
        errors.setdefault("kind", f"{field}: {message}")


def _requests(form: Mapping[str, str], errors: dict[str, str]) -> list[RunIn]:
    """Return the runs that a form asks for, and add the errors of its fields to ``errors``."""

    def read(field: str, convert: Callable[[str], Any], default: Any) -> Any:
        try:
            return convert(form.get(field, ""))
        except FormError as error:
            errors.setdefault(error.field, str(error))
        except ValueError as error:
            errors.setdefault(field, str(error))
        # With the default for a wrong field, the other fields are still checked.
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
    limiting = None
    # The task limits the backends of BACKENDS, not a custom one.
    if form.get("backend") in BACKENDS:
        limiting = task
    read("backend", lambda backend: check_backend(backend, limiting, "gpu_enabled" in form), None)
    # A script that takes no seed can be repeated, too: its times are never the same.
    if not errors and (form.get("kind") != "script" or series.seed is not None):
        read(series.seed_option or "seed", lambda _: series.check_seeds(), None)
    count = len(series.num_workers) * (series.repeats or 1)
    if count > _MOST_RUNS:
        field = "num_workers"
        if series.repeats is not None:
            field = "repeats"
        message = f"must give at most {_MOST_RUNS} runs at once, not {count}: start them in parts"
        errors[field] = message
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
            "must be 1 to 63 lowercase letters, digits and '-', without '-' at its ends, "
            f"not {text[:80]!r}"
        )
    return text


def _settings(
    form: Mapping[str, str], task: Task | None, engine_options: list[str]
) -> dict[str, Any]:
    """Return the fields of a request other than its program."""
    settings: dict[str, Any] = {"engine_options": engine_options}
    for field in ("num_cpus", "max_bandwidth", "backend", "network", "elastic"):
        settings[field] = form.get(field, "")
    # A browser leaves out a box that is not checked.
    for field in ("gpu_enabled", "light_target", "exclusive"):
        settings[field] = field in form
    if settings["backend"] == CUSTOM_BACKEND:
        settings["custom_backend"] = form.get("custom_backend", "")
        # A task always starts all of its workers.
        settings["run_all_nodes"] = task is not None or "run_all_nodes" in form
    return settings


def _program(form: Mapping[str, str]) -> tuple[Task | None, dict[str, Any]]:
    """Return the task of a form, None for a command, and the fields of the request for it."""
    kind = form.get("kind")
    image = form.get("image_name", "")
    if kind == "command" or (kind == "image" and image == CUSTOM_IMAGE):
        command = form.get("command", "")
        if not command:
            message = (
                "must be a command line, not empty: enter for example python /path/to/train.py"
            )
            raise FormError("command", message)
        _split("command", command)
        if kind == "command":
            return None, {"command": command}
        custom = {"custom_image_name": form.get("custom_image_name", "")}
        return None, {"image_name": image, **custom, "custom_image_command": command}
    if kind == "script":
        return None, _script(form)
    arguments = _split("arguments", form.get("arguments", ""))
    if kind == "image":
        try:
            return find_image(image)[0], {"image_name": image, "arguments": arguments}
        except ValueError as error:
            raise FormError("image_name", str(error)) from None
    if kind != "task":
        raise FormError("kind", f"must be task, script, image or command, not {kind!r}: choose one")
    try:
        task = get_task(form.get("task", ""))
    except ValueError as error:
        raise FormError("task", str(error)) from None
    chosen = _option(form, "dataset", task, task.datasets)
    chosen += _option(form, "optimizer", task, task.optimizers)
    for option in chosen[::2]:
        if option_value(arguments, option) is not None:
            message = f"must not have {option}, which is chosen in its field: leave out one of them"
            raise FormError("arguments", message)
    return task, {"task": task.key, "arguments": [*chosen, *arguments]}


def _script(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the request for a script that is measured unchanged."""
    words = _split("script", form.get("script", ""))
    if not words or not Path(words[0]).is_absolute():
        # The master does not know the folder of the user.
        raise FormError(
            "script",
            f"must begin with the absolute path of a script, not {' '.join(words)[:80]!r}: "
            "enter for example /path/to/train.py --epochs 3",
        )
    options = []
    for field, (option, parse) in _OBSERVER.items():
        values = [form.get(field, "")]
        if field == "metrics":
            values = _split(field, values[0])
        for value in filter(None, values):
            try:
                parse(value)
            except ConfigurationError as error:
                raise FormError(field, str(error)) from None
            options += [option, value]
    try:
        parse_options([*options, *words])
    except ConfigurationError as error:
        raise FormError("goal", str(error)) from None
    command = observe_command(options, words)
    # A script has no light goal, and it starts in its own folder.
    return {"command": command, "light_target": False, "cwd": str(Path(words[0]).parent)}


def _split(field: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"must be quoted as for a shell, not {text[:80]!r}: {error}"
        raise FormError(field, message) from None


def _option(form: Mapping[str, str], field: str, task: Task, values: tuple[str, ...]) -> list[str]:
    """Return the words of an option of a task's script that has its own field."""
    value = form.get(field, "")
    if not value:
        return []
    if value not in values:
        allowed = "left out"
        if values:
            allowed = f"one of {', '.join(values)}"
        message = f"must be {allowed} for task {task.key}, not {value[:80]!r}: choose another one"
        raise FormError(field, message)
    return [f"--{field}", value]


def _number(text: str, least: int = 1, most: int = 0) -> int | None:
    if not text:
        return None
    # isdecimal alone accepts digits of other scripts, and int of thousands of digits is slow.
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and least <= int(text) <= most):
        raise ValueError(f"must be a whole number from {least} to {most}, not {text[:80]!r}")
    return int(text)


def _values_of(run: Run) -> dict[str, str]:
    """Return the values of the form that starts a run again."""
    metadata = run.metadata_dict()
    # The name that was given to a series of runs, of which this is one.
    base_name = re.sub(rf"-{run.num_workers}(-r\d+)?$", "", run.name) or run.name
    values = {
        # Cut, because the number of workers and of the repeat must fit into 63 characters, too.
        "name": f"{base_name[:50].rstrip('-')}-again",
        "num_workers": str(run.num_workers),
        "num_cpus": str(run.num_cpus).removesuffix(".0"),
        "backend": run.backend,
        "run_all_nodes": "",  # the box is checked in a new form
    }
    if run.backend not in BACKENDS:
        values |= {"backend": CUSTOM_BACKEND, "custom_backend": run.backend}
    boxes = {
        "gpu_enabled": run.gpu_enabled,
        "light_target": run.light_target,
        "run_all_nodes": run.run_all_nodes,
        "exclusive": metadata.get("exclusive"),
    }
    for field, is_checked in boxes.items():
        if is_checked:
            values[field] = "true"
    for field in ("network", "elastic"):
        if metadata.get(field):
            values[field] = str(metadata[field])
    # A damaged record may hold any type.
    options = metadata.get("engine_options")
    if isinstance(options, list):
        values["engine_options"] = shlex.join(map(str, options))
    words = split_command(str(run.command))
    task = task_of_image(str(run.image))
    if task is not None:
        arguments = _arguments_of(task, words)
        if arguments is not None:
            return {**values, "kind": "task", "task": task.key, **arguments}
    observed = split_observed(words)
    if observed is not None:
        return {**values, "kind": "script", **_script_values(*observed, metadata)}
    command = {"command": str(run.command)}
    if run.image in ("", CUSTOM_IMAGE) or task is not None:
        return {**values, "kind": "command", **command}
    image = {"image_name": CUSTOM_IMAGE, "custom_image_name": run.image}
    return {**values, "kind": "image", **image, **command}


def _script_values(
    options: Mapping[str, list[str]], words: list[str], metadata: Mapping[str, Any]
) -> dict[str, str]:
    """Return the fields with a script that is measured unchanged, and its observer's options."""
    # A call of the command may name a script relative to its folder.
    path = Path(str(metadata.get("cwd") or "/"), words[0])
    fields = {"script": shlex.join([str(path), *words[1:]])}
    for field, (option, _) in _OBSERVER.items():
        given = options.get(option, [])
        if field == "metrics":
            fields[field] = shlex.join(given)
        elif given:
            fields[field] = given[-1]
    return fields


def _arguments_of(task: Task, words: list[str]) -> dict[str, str] | None:
    """Return the fields with the arguments of a task's script, or None for another command."""
    try:
        commands = [task.command(in_container=False), task.command(in_container=True)]
    except ConfigurationError:
        return None
    for command in map(shlex.split, commands):
        if words[: len(command)] == command:
            rest = words[len(command) :]
            break
    else:
        return None
    # These two have their own fields.
    rest = [word for word in rest if word not in ("--light", "--gpu")]
    fields = {}
    for field, values in (("dataset", task.datasets[1:]), ("optimizer", task.optimizers[1:])):
        option = f"--{field}"
        if option in rest[:-1] and rest[rest.index(option) + 1] in values:
            index = rest.index(option)
            fields[field] = rest[index + 1]
            del rest[index : index + 2]
    return {**fields, "arguments": shlex.join(rest)}
