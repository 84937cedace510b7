"""Build the container images with the program that there is, and list their sizes.

From the root of a checkout::

    python docker/build.py --list
    python docker/build.py
    python docker/build.py --only base task1a --registry docker.io/me --push
    python docker/build.py -- --build-arg MLBENCH_CUDA=cu130

The words after ``--`` are options of the program's own build command. No test builds an image.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mlbench_core.tasks import TASKS, Image, Task, container_image  # noqa: E402

PROGRAMS = ("docker", "podman", "buildah")


@dataclass(frozen=True)
class Build:
    """One image.

    Attributes:
        name: The name without registry and tag, for example ``"task1a"``.
        file: The Dockerfile, from the root of the checkout.
        context: The folder whose files the Dockerfile copies.
        arguments: Build arguments.
        other_tags: Further full names of the image, for example its name in version 3.0.
    """

    name: str
    file: str
    context: str
    arguments: tuple[str, ...] = ()
    other_tags: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """Return the full name of the image, with the registry and this version."""
        return container_image(self.name)


def builds() -> list[Build]:
    """Return all images, the base first."""
    start = f"MLBENCH_BASE={container_image('base')}"
    found = [
        Build("base", "docker/base/Dockerfile", "."),
        Build("master", "docker/master/Dockerfile", "docker/master", (start,)),
    ]
    for task in TASKS.values():
        # Images with the same arguments differ in their tags only. The first one is the task
        # itself.
        for arguments in dict.fromkeys([(), *(image.arguments for image in task.images)]):
            images = [image for image in task.images if image.arguments == arguments]
            found.append(_task_build(task, arguments, images, start))
    custom = Build("custom", "docker/custom/Dockerfile", "docker/custom", (start,))
    return [*found, custom]


def _task_build(
    task: Task, arguments: tuple[str, ...], images: Sequence[Image], start: str
) -> Build:
    """Return the image of a task with these arguments before those of the user."""
    name = f"task{task.key}" + "".join(f"-{word}" for word in arguments if not word.startswith("-"))
    own = (start, *([f"ARGUMENTS={' '.join(arguments)}"] if arguments else []))
    registry = container_image(name).rpartition("/")[0]
    tags = tuple(image.reference.replace("mlbench/", f"{registry}/", 1) for image in images)
    return Build(name, "docker/task/Dockerfile", f"benchmarks/{task.folder}", own, tags)


def build_command(program: str, build: Build, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line that builds an image.

    Args:
        program: One of :data:`PROGRAMS`.
        build: The image.
        extra: Further options of the program.
    """
    command = [program, "build", "--file", build.file]
    # Images of the OCI format, the default of both, have no health check.
    command += [] if program == "docker" else ["--format", "docker", "--layers"]
    for argument in build.arguments:
        command += ["--build-arg", argument]
    for tag in (build.tag, *build.other_tags):
        command += ["--tag", tag]
    return [*command, *extra, build.context]


def main(arguments: Sequence[str]) -> None:
    """Build, push and list the images that the command line names."""
    known = builds()
    parser = argparse.ArgumentParser(
        description="Build the container images.",
        epilog="Words after -- are options of the program's build command.",
    )
    parser.add_argument(
        "--program", choices=PROGRAMS, help="by default the first that is installed"
    )
    parser.add_argument(
        "--registry", help="replaces mlbench/ in the names [MLBENCH_IMAGE_REGISTRY]"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[build.name for build in known], metavar="NAME", help="not all"
    )
    parser.add_argument("--push", action="store_true", help="push each image to its registry")
    parser.add_argument(
        "--list", action="store_true", help="show the commands without running them"
    )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, extra = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    if args.registry:
        os.environ["MLBENCH_IMAGE_REGISTRY"] = args.registry
        known = builds()
    program = args.program or next((name for name in PROGRAMS if shutil.which(name)), None)
    if program is None and not args.list:
        parser.error(
            f"one of {', '.join(PROGRAMS)} must be installed to build images: install one, or "
            "give --list"
        )
    chosen = [build for build in known if args.only is None or build.name in args.only]
    rows = []
    for build in chosen:
        commands = [build_command(program or PROGRAMS[0], build, extra)]
        if args.push:
            commands += [
                [program or PROGRAMS[0], "push", tag] for tag in (build.tag, *build.other_tags)
            ]
        start = time.monotonic()
        for command in commands:
            print(shlex.join(command), flush=True)
            if not args.list:
                subprocess.run(command, cwd=ROOT, check=True)
        rows.append((build.tag, time.monotonic() - start))
    if not args.list and program is not None:
        for tag, seconds in rows:
            print(f"{tag:40} {_size(program, tag):>10} {seconds:7.1f} s")


def _size(program: str, tag: str) -> str:
    """Return the size of an image with all its layers.

    Images that start from the same one share most of theirs.
    """
    command = [program, "images", "--format", "{{.Size}}", tag]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{shlex.join(error.cmd)}: exit status {error.returncode}")
