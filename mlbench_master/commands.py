"""From what a user asks for (a task, an image, a command) to what is started."""

from __future__ import annotations

import re
import shlex

from mlbench_core.errors import ConfigurationError
from mlbench_core.tasks import TASKS, Task, get_task
from mlbench_master.schemas import BACKENDS, RunIn, allowed

__all__ = ["resolve_backend", "resolve_command"]

# Images of 3.0 (mlbench_core.api.MLBENCH_IMAGES) and the tasks that stand for them where there are no containers.
_TASKS_OF_IMAGES = {
    "pytorch-backend-benchmark": "0",
    "pytorch-cifar10-resnet": "1a",
    "pytorch-cifar10-resnet-ddp": "1a",
    "pytorch-epsilon-logistic-regression": "2a",
    "pytorch-wikitext2-lstm": "3a",
    "pytorch-wmt16-gnmt": "4a",
    "pytorch-wmt17-transformer": "4b",
}


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
    task = _task_of_image(run.image_name)
    if task is None:
        raise ValueError(
            f"image_name: unknown image {run.image_name[:80]!r}; known: {allowed(t.folder for t in TASKS.values())}, "
            "or custom_image with custom_image_name and custom_image_command"
        )
    return run.image_name, _task_command(task, run)[1]


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


def _task_command(task: Task, run: RunIn) -> tuple[str, str]:
    arguments = [shlex.quote(argument) for argument in run.arguments]
    arguments += ["--light"] if run.light_target and "--light" not in run.arguments else []
    arguments += ["--gpu"] if run.gpu_enabled and "--gpu" not in run.arguments else []
    try:
        return task.folder, task.command(*arguments)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


def _task_of_image(image: str) -> Task | None:
    """The task of an image such as ``mlbench/pytorch-cifar10-resnet:latest``, or of a task's own name."""
    name = image.rsplit("/", 1)[-1].partition(":")[0].lower()
    folder = re.sub(r"^pytorch_", "", name.replace("-", "_"))
    for candidate in (_TASKS_OF_IMAGES.get(name, name), folder):
        try:
            return get_task(candidate)
        except ValueError:
            continue
    return None
