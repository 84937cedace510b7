"""Translate a request for a run (a task, an image, a command) into the command of its workers."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence

from mlbench_core.calling_environment import split_observed
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.errors import ConfigurationError, MissingDependencyError
from mlbench_core.run_terms import WorkerRange
from mlbench_core.tasks import BACKENDS, TASKS, Task, find_image, get_task
from mlbench_master.api.schemas import DEFAULT_BANDWIDTH, RunIn
from mlbench_master.engines.containers import image_problem
from mlbench_master.engines.interface import WORKERS_PER_CORE, Engine
from mlbench_master.engines.local.emulated_hosts import check_network
from mlbench_master.engines.worker_command import python_environment

__all__ = [
    "CUSTOM_BACKEND",
    "CUSTOM_IMAGE",
    "check_cores",
    "check_gpus",
    "check_options",
    "image_of_record",
    "no_bandwidth_limit",
    "no_gpu",
    "no_network",
    "resolve_backend",
    "resolve_command",
    "resolve_folder",
]

CUSTOM_BACKEND = "custom_backend"
"""The value of ``backend`` if the field ``custom_backend`` names the backend."""

CUSTOM_IMAGE = "custom_image"
"""The value of ``image_name`` if the field ``custom_image_name`` names the image."""


def resolve_command(run: RunIn, in_container: bool = False) -> tuple[str, str]:
    """Return the image and the command of a run's workers.

    Args:
        run: The requested run.
        in_container: True if workers run in a container of the image; the script of a task is then
            the one in it.

    Returns:
        The image's name and a worker's command line.

    Raises:
        ValueError: Task or image is unknown, or nothing was given; the message names the field.
    """
    if run.task is not None:
        try:
            return _task_command(get_task(run.task), run, in_container=in_container)
        except ValueError as error:
            raise ValueError(f"task: {error}") from None
    if run.command is not None:
        image = run.image_name
        if image in (None, CUSTOM_IMAGE):
            image = run.custom_image_name or CUSTOM_IMAGE
        return image, _with_flags(run.command, run)
    if run.image_name is None:
        raise ValueError(
            f"task: give a task ({', '.join(sorted(TASKS))}), a command, or an image_name"
        )
    if run.image_name.startswith(CUSTOM_IMAGE):
        if run.custom_image_command is None:
            raise ValueError("custom_image_command: is required with image_name=custom_image")
        return run.custom_image_name or run.image_name, _with_flags(run.custom_image_command, run)
    task, arguments = _task_of_image(run.image_name)
    return run.image_name, _task_command(task, run, arguments, in_container=in_container)[1]


def image_of_record(image: str) -> str:
    """Return the container image for a run, as an engine that starts containers needs it.

    Args:
        image: The image in the record of the run: the folder of a task, an image of version 3.0, or
            another image.

    Returns:
        The task's own image of this version, another image as it is, or an empty text if the run
        has none.

    Example:
        >>> image_of_record("task1a_resnet20_cifar10").partition(":")[0]
        'mlbench/task1a'
        >>> image_of_record("me/mine:1")
        'me/mine:1'
    """
    if image.startswith(CUSTOM_IMAGE):
        return ""
    for task in TASKS.values():
        if image == task.folder:
            return task.container_image
    try:
        # The images of version 3.0 have scripts that this master does not know.
        return find_image(image)[0].container_image
    except ValueError:
        return image


def resolve_backend(run: RunIn) -> str:
    """Return the communication backend of a run.

    Args:
        run: The requested run.

    Returns:
        The backend's name in lowercase letters; the name of a custom backend as given.

    Raises:
        ValueError: The backend is unknown; the message names the field.
    """
    backend = run.backend.lower()
    if backend in BACKENDS:
        return backend
    if backend == CUSTOM_BACKEND:
        if run.custom_backend is None:
            raise ValueError("custom_backend: is required with backend=custom_backend")
        return run.custom_backend
    raise ValueError(
        f"backend: unknown backend {run.backend!r}; known: {', '.join(BACKENDS)}, {CUSTOM_BACKEND}"
    )


def check_options(run: RunIn, engine: Engine) -> tuple[bool, list[str]]:
    """Refuse options that the engine cannot fulfill, and note those that it fulfills differently.

    Args:
        run: The requested run.
        engine: The engine that will start it.

    Returns:
        True if every worker runs the command, False if only the first one does; and notes for the
        run's log and page.

    Raises:
        ValueError: An option cannot be fulfilled; the message names the field and a remedy.
    """
    engine.check_options(run.engine_options)
    _check_combination(run, engine)
    _check_image(run, engine)
    engine.check_workers(run.num_workers, run.backend.lower(), run.engine_options)
    notes = []
    if run.max_bandwidth < DEFAULT_BANDWIDTH and not engine.limits_bandwidth:
        raise ValueError(
            f"max_bandwidth: must be at least {DEFAULT_BANDWIDTH:g} (Mbit/s, the default), "
            f"not {run.max_bandwidth:g}: {no_bandwidth_limit(engine)}"
        )
    most = run.num_workers
    check_cores(most, run.oversubscribe, engine)
    if run.elastic:
        most = _check_elastic(run, engine).most
        check_cores(most, run.oversubscribe, engine, "elastic: its largest number")
    if run.gpu_enabled:
        check_gpus(run.num_workers, engine)
        variables = {} if run.caller is None else run.caller.environment
        # Two runs on the same GPU would disturb each other's times, so the master's choice wins.
        if engine.gpus is not None and "CUDA_VISIBLE_DEVICES" in variables:
            notes.append(
                "note: the workers get the GPUs that the master lends, "
                "not CUDA_VISIBLE_DEVICES of the call"
            )
    # As in version 3.0, only with a custom backend may the first worker alone run the command.
    all_nodes = run.run_all_nodes or run.backend.lower() != CUSTOM_BACKEND or run.num_workers == 1
    if not all_nodes:
        if run.command is None and run.custom_image_command is None:
            raise ValueError(
                "run_all_nodes: must be true for a task, not false: "
                "each of its workers starts the same script"
            )
        if not engine.starts_first_worker_alone:
            raise ValueError(
                f"run_all_nodes: must be true for {run.num_workers} workers on {engine.name}, "
                "not false: the first worker cannot start the others there; "
                "let every worker run the command"
            )
        notes.append(
            f"note: run_all_nodes is false, so only worker 0 of {run.num_workers} runs the "
            "command; it has to start the others itself, as mpirun does"
        )
    if run.network:
        notes += _check_network(run, most, engine, all_nodes)
    if most * run.num_cpus > engine.capacity:
        notes.append(
            f"warning: {plural(most, 'worker')} x {plural(run.num_cpus, 'core')} "
            f"want more than the {plural(engine.capacity, 'core')} of this machine; "
            "they share them, so times are not comparable"
        )
    return all_nodes, notes


def resolve_folder(run: RunIn, engine: Engine, command: str) -> tuple[str, list[str]]:
    """Return the folder in which the workers of a run start.

    Args:
        run: The requested run.
        engine: The engine that will start it.
        command: A worker's command line.

    Returns:
        The absolute path, empty for a new folder of the run; and notes for the run's log and page.

    Raises:
        ValueError: The folder is missing or cannot be chosen, or the command has no program there;
            the message names the field.
    """
    if engine.uses_image(run.engine_options) or not engine.starts_processes:
        if run.cwd is not None:
            raise ValueError(
                f"cwd: must be left out, not {run.cwd[:80]!r}: the workers of the "
                f"engine {engine.name} start in a container, in the folder of its image"
            )
        return "", []
    cwd = run.cwd or ""
    environment = run.environment
    if run.caller is not None:
        cwd = run.cwd or run.caller.cwd
        environment = {**run.caller.environment, **run.environment}
    is_task = run.task is not None or (run.command is None and run.custom_image_command is None)
    if not cwd or not engine.sees_folders:
        return cwd, []
    if not os.path.isdir(cwd):
        if run.cwd is None and is_task:
            # The script of a task needs no file of the user's folder.
            note = (
                "note: the workers start in the folder of the run, "
                f"because the master's machine has no {cwd}"
            )
            return "", [note]
        raise ValueError(
            f"cwd: must be a folder on the machine of the master, not {cwd[:200]!r}: "
            "give one that exists there, for example with 'mlbench run --cwd /'"
        )
    # The PATH of the workers, because the master's own may lead to other programs.
    search_path = environment.get("PATH") or python_environment()["PATH"]
    try:
        engine.check_program(shlex.split(command), cwd, search_path)
    except ValueError as error:
        raise ValueError(f"command: {error}") from None
    return cwd, []


def no_network(engine: Engine) -> str:
    """Return why a run cannot have an emulated network, and what to do."""
    return (
        f"the engine {engine.name} cannot emulate a network; "
        "leave it out, or choose the engine local"
    )


def _check_network(run: RunIn, most: int, engine: Engine, all_nodes: bool) -> list[str]:
    """Refuse an emulated network that the engine cannot give, and return notes about it."""
    refusal = f"network: must be left out, not {run.network[:80]!r}"
    if not engine.emulates_networks:
        raise ValueError(f"{refusal}: {no_network(engine)}")
    if engine.uses_image(run.engine_options):
        raise ValueError(
            f"{refusal}: containers have their own network; leave out the network or the container"
        )
    try:
        return check_network(
            run.network, run.num_workers, most, run.backend.lower(), all_nodes=all_nodes
        )
    except ValueError as error:
        raise ValueError(f"network: {error}") from None


def _check_elastic(run: RunIn, engine: Engine) -> WorkerRange:
    """Refuse an elastic run that cannot work, and return its range."""
    refusal = f"elastic: must be left out, not {run.elastic!r}"
    if not engine.replaces_workers:
        raise ValueError(
            f"{refusal}: the engine {engine.name} cannot replace a worker that dies; "
            "choose the engine local"
        )
    if engine.uses_image(run.engine_options):
        raise ValueError(
            f"{refusal}: workers in containers do not reach the store in which they would meet; "
            "leave out the container"
        )
    if run.command is None:
        raise ValueError(
            f"{refusal}: the workers of a task have a fixed number; "
            "give a command whose script uses Membership.from_environment()"
        )
    if split_observed(shlex.split(run.command)) is not None:
        raise ValueError(
            f"{refusal}: the steps of workers that may die cannot be measured; "
            "give the command of the script itself"
        )
    for field, value, default in (
        ("gpu_enabled", run.gpu_enabled, False),
        ("backend", run.backend.lower(), "gloo"),
        ("run_all_nodes", run.run_all_nodes, True),
    ):
        if value != default:
            raise ValueError(
                f"{field}: must be left out for an elastic run, not {value!r}: its workers are "
                "processes of this machine that exchange weights by Gloo on the CPU"
            )
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"{refusal}: the Python of the master has no torch, whose store the workers need; "
            "install it there"
        )
    workers = WorkerRange.parse(run.elastic)
    try:
        workers.check(run.num_workers)
    except ValueError as error:
        raise ValueError(f"elastic: {error}") from None
    return workers


def no_bandwidth_limit(engine: Engine) -> str:
    """Return why a run cannot have a bandwidth, and what to do."""
    remedy = "limit the network itself, for example with tc"
    if engine.emulates_networks:
        remedy = "give a network"
    return f"the engine {engine.name} cannot limit the bandwidth; leave it out and {remedy}"


def no_gpu(engine: Engine) -> str:
    """Return why a run cannot have GPUs, and what to do."""
    return (
        f"the engine {engine.name} found no GPU on this machine; "
        "leave it out to compute on the CPU, "
        "or check nvidia-smi and CUDA_VISIBLE_DEVICES and restart the master"
    )


def _check_combination(run: RunIn, engine: Engine) -> None:
    """Refuse fields that would be ignored because of ``task`` or ``command``."""
    # No client of version 3.0 sends these two.
    chosen = "command"
    if run.task is not None:
        chosen = "task"
    is_custom = run.image_name is not None and run.image_name.startswith(CUSTOM_IMAGE)
    if run.arguments and run.task is None and (run.command is not None or is_custom):
        arguments = str(run.arguments)[:80]
        raise ValueError(
            f"arguments: must be left out without a task, not {arguments}: add them to the command"
        )
    if run.custom_backend is not None and run.backend.lower() != CUSTOM_BACKEND:
        raise ValueError(
            f"custom_backend: must be left out with backend {run.backend}, "
            f"not {run.custom_backend!r}: "
            f"it would be ignored; leave it out, or give backend={CUSTOM_BACKEND}"
        )
    if run.image_name is not None and not is_custom:
        for field in ("custom_image_name", "custom_image_command"):
            value = getattr(run, field)
            if value not in (None, CUSTOM_IMAGE):
                raise ValueError(
                    f"{field}: must be left out with this image_name, not {value[:80]!r}: "
                    f"it would be ignored; leave it out, or give image_name={CUSTOM_IMAGE}"
                )
    if run.task is None and run.command is None:
        return
    # A command in a container needs an image, which is then not a rival.
    rivals = {"custom_image_command": run.custom_image_command}
    if run.task is not None or not engine.uses_image(run.engine_options):
        rivals.update(image_name=run.image_name, custom_image_name=run.custom_image_name)
    if run.task is not None:
        rivals["command"] = run.command
    for field, value in rivals.items():
        if value not in (None, CUSTOM_IMAGE):
            raise ValueError(
                f"{field}: must be left out with {chosen}, not {value[:80]!r}: "
                f"the engine {engine.name} would ignore it; leave out {field} or {chosen}"
            )
    if not run.run_all_nodes and run.num_workers > 1 and run.backend.lower() in BACKENDS:
        raise ValueError(
            f"run_all_nodes: must be true with backend {run.backend.lower()}, not false: "
            "every worker runs the command; leave it out, "
            "or give a custom_backend whose first worker starts the others"
        )


def _check_image(run: RunIn, engine: Engine) -> None:
    """Refuse a custom image if no container will run it, and a container without an image."""
    uses_image = engine.uses_image(run.engine_options)
    own_image = run.custom_image_name not in (None, CUSTOM_IMAGE) and run.task is None
    if own_image and not uses_image:
        raise ValueError(
            f"custom_image_name: must be left out, not {str(run.custom_image_name)[:80]!r}: "
            f"the engine {engine.name} starts processes, not containers; "
            f"{engine.container_advice}, or leave out the image to run the command "
            "with the Python and the packages of the master"
        )
    if not uses_image:
        return
    image = image_of_record(resolve_command(run, in_container=True)[0])
    if not image:
        raise ValueError(
            "custom_image_name: must be given for a command in a container of the "
            f"engine {engine.name}: name the image that has the command, "
            "or give a task, which has its own image"
        )
    problem = image_problem(image)
    if problem:
        field = "image_name"
        if own_image:
            field = "custom_image_name"
        raise ValueError(f"{field}: {problem}")


def check_cores(
    num_workers: int, oversubscribe: bool, engine: Engine, subject: str = "num_workers:"
) -> None:
    """Refuse more workers than the cores of an engine can serve.

    Args:
        num_workers: Number of workers.
        oversubscribe: True to allow them.
        engine: The engine that will start them.
        subject: The field and what the message says of it.

    Raises:
        ValueError: There are too many; the message has the number that fits.
    """
    most = engine.most_workers
    if most is not None and num_workers > most and not oversubscribe:
        raise ValueError(
            f"{subject} must be at most {most}, not {num_workers}: "
            f"more than {WORKERS_PER_CORE} workers on each of the "
            f"{plural(most // WORKERS_PER_CORE, 'core')} mostly wait for each other; "
            "start fewer, or give --oversubscribe (the field oversubscribe)"
        )


def check_gpus(num_workers: int, engine: Engine) -> None:
    """Refuse a run with GPUs that the engine can never start.

    Args:
        num_workers: Number of workers, each of which needs a GPU.
        engine: The engine that will start it.

    Raises:
        ValueError: The engine has fewer GPUs; the message names the fields and a remedy.
    """
    gpus = engine.gpus
    # None in a cluster, which assigns the GPUs itself.
    if gpus is None or num_workers <= len(gpus):
        return
    if not gpus:
        raise ValueError(f"gpu_enabled: must be false, not true: {no_gpu(engine)}")
    raise ValueError(
        f"num_workers: must be at most {len(gpus)} with gpu_enabled, not {num_workers}: "
        f"each worker needs its own GPU, and the engine {engine.name} has {len(gpus)}; "
        "start fewer workers"
    )


def _task_command(
    task: Task, run: RunIn, of_image: Sequence[str] = (), *, in_container: bool = False
) -> tuple[str, str]:
    """Return folder and command of a task."""
    # The user's arguments come later than those of the image, so they override them.
    arguments = list(map(shlex.quote, (*of_image, *run.arguments)))
    arguments += _flags(run, run.arguments)
    try:
        # Without torch, each worker would end with a traceback. find_spec() does not import it,
        # which would take seconds.
        if not in_container and importlib.util.find_spec("torch") is None:
            raise MissingDependencyError(
                f"task {task.key} needs the package 'torch', which is not installed: "
                "pip install 'mlbench-core[torch]'"
            )
        return task.folder, task.command(*arguments, in_container=in_container)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


def _with_flags(command: str, run: RunIn) -> str:
    """Return the user's command with the flags of :func:`_flags` at its end, as in version 3.0.

    A script that is measured unchanged gets none.
    """
    words = shlex.split(command)
    if split_observed(words) is not None:
        return command
    return " ".join([command, *_flags(run, words)])


def _flags(run: RunIn, words: Sequence[str]) -> list[str]:
    """Return the flags for the light goal and for GPUs, except those that the user gave."""
    flags = []
    if run.light_target and "--light" not in words:
        flags.append("--light")
    if run.gpu_enabled and "--gpu" not in words:
        flags.append("--gpu")
    return flags


def _task_of_image(image: str) -> tuple[Task, tuple[str, ...]]:
    """Return the task of an image and the arguments that the image implies.

    The image is one of version 3.0, or it is named after a task.
    """
    try:
        task, image_of_3_0 = find_image(image)
        return task, image_of_3_0.arguments
    except ValueError:
        pass
    # An image that is not in the list may be named after a task:
    # "registry/pytorch-task1a-resnet20-cifar10:1".
    name = image.rsplit("/", 1)[-1].partition(":")[0].lower()
    try:
        return get_task(name.replace("-", "_").removeprefix("pytorch_")), ()
    except ValueError:
        known = [task.folder for task in TASKS.values()]
        for task in TASKS.values():
            known += [image_of_task.reference for image_of_task in task.images]
        raise ValueError(
            f"image_name: unknown image {image[:80]!r}; known: {', '.join(known)}, or "
            "custom_image with custom_image_name and custom_image_command"
        ) from None
