"""From what a user asks for (a task, an image, a command) to what is started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mlbench_core.errors import ConfigurationError
from mlbench_core.tasks import TASKS, Task, find_image, get_task
from mlbench_master.schemas import BACKENDS, RunIn, allowed

__all__ = ["resolve_backend", "resolve_command"]


def resolve_command(run: RunIn) -> tuple[str, str]:
    """What a worker of the run executes.

    Args:
        run: What was asked for.

    Returns:
        The image's name and a worker's command line.

    Raises:
        ValueError: Task or image is unknown, or nothing was given; the message names the field.
    """
    if run.task is not None:
        try:
            return _task_command(get_task(run.task), run)
        except ValueError as error:
            raise ValueError(f"task: {error}") from None
    if run.command is not None:
        return run.image_name or run.custom_image_name or "custom_image", run.command
    if run.image_name is None:
        raise ValueError(f"task: give a task ({allowed(sorted(TASKS))}), a command, or an image_name")
    if run.image_name.startswith("custom_image"):
        if run.custom_image_command is None:
            raise ValueError("custom_image_command: is required with image_name=custom_image")
        return run.custom_image_name or run.image_name, run.custom_image_command
    task, arguments = _task_of_image(run.image_name)
    return run.image_name, _task_command(task, run, arguments)[1]


def resolve_backend(run: RunIn) -> str:
    """The communication backend of a run.

    Args:
        run: What was asked for.

    Returns:
        Its name in small letters; that of a custom backend as given.

    Raises:
        ValueError: It is unknown; the message names the field.
    """
    backend = run.backend.lower()
    if backend in BACKENDS:
        return backend
    if backend == "custom_backend":
        if run.custom_backend is None:
            raise ValueError("custom_backend: is required with backend=custom_backend")
        return run.custom_backend
    raise ValueError(f"backend: unknown backend {run.backend!r}; known: {allowed(BACKENDS)}, custom_backend")


def _task_command(task: Task, run: RunIn, of_image: Sequence[str] = ()) -> tuple[str, str]:
    """Folder and command of a task; the arguments that the user gave come last and win."""
    arguments = [shlex.quote(argument) for argument in (*of_image, *run.arguments)]
    arguments += ["--light"] if run.light_target and "--light" not in run.arguments else []
    arguments += ["--gpu"] if run.gpu_enabled and "--gpu" not in run.arguments else []
    try:
        return task.folder, task.command(*arguments)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


def _task_of_image(image: str) -> tuple[Task, tuple[str, ...]]:
    """The task of an image of 3.0, or of a task's own name, and the arguments that make it the image's program."""
    try:
        task, known = find_image(image)
        return task, known.arguments
    except ValueError:
        pass
    name = image.rsplit("/", 1)[-1].partition(":")[0].lower()
    try:
        return get_task(name.replace("-", "_").removeprefix("pytorch_")), ()
    except ValueError:
        raise ValueError(
            f"image_name: unknown image {image[:80]!r}; known: {allowed(t.folder for t in TASKS.values())}, "
            f"{allowed(i.reference for t in TASKS.values() for i in t.images)}, "
            "or custom_image with custom_image_name and custom_image_command"
        ) from None
