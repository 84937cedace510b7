"""Build the container images with the installed program, and list their sizes.

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
    images = [
        Build("base", "docker/base/Dockerfile", "."),
        Build("master", "docker/master/Dockerfile", "docker/master", (start,)),
    ]
    for task in TASKS.values():
        # Images with the same arguments differ in their tags only. The first one is the task
        # itself.
        by_arguments: dict[tuple[str, ...], list[Image]] = {(): []}
        for image in task.images:
            by_arguments.setdefault(image.arguments, []).append(image)
        for arguments, same in by_arguments.items():
            images.append(_task_build(task, arguments, same, start))
    images.append(Build("custom", "docker/custom/Dockerfile", "docker/custom", (start,)))
    return images


def _task_build(
    task: Task, arguments: tuple[str, ...], images: Sequence[Image], start: str
) -> Build:
    """Return the image of a task with these arguments before those of the user."""
    name = f"task{task.key}"
    for word in arguments:
        if not word.startswith("-"):
            name += f"-{word}"
    build_arguments = [start]
    if arguments:
        build_arguments.append(f"ARGUMENTS={' '.join(arguments)}")
    registry = container_image(name).rpartition("/")[0]
    tags = [image.reference.replace("mlbench/", f"{registry}/", 1) for image in images]
    return Build(
        name, "docker/task/Dockerfile", f"benchmarks/{task.folder}",
        tuple(build_arguments), tuple(tags),
    )  # fmt: skip


def build_command(program: str, build: Build, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line that builds an image.

    Args:
        program: One of :data:`PROGRAMS`.
        build: The image.
        extra: Further options of the program.
    """
    command = [program, "build", "--file", build.file]
    if program != "docker":
        # Images of the OCI format, the default of the other programs, have no health check.
        command += ["--format", "docker", "--layers"]
    for argument in build.arguments:
        command += ["--build-arg", argument]
    for tag in (build.tag, *build.other_tags):
        command += ["--tag", tag]
    return [*command, *extra, build.context]


def main(arguments: Sequence[str]) -> None:
    """Build, push and list the images that the command line names."""
    images = {build.name: build for build in builds()}
    parser = argparse.ArgumentParser(
        description="Build the container images.",
        epilog="Words after -- are options of the program's build command.",
    )
    add = parser.add_argument
    add("--program", choices=PROGRAMS, help="by default the first that is installed")
    add("--registry", help="replaces mlbench/ in the names [MLBENCH_IMAGE_REGISTRY]")
    add("--only", nargs="+", choices=list(images), metavar="NAME", help="not all")
    add("--push", action="store_true", help="push each image to its registry")
    add("--list", action="store_true", help="show the commands without running them")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, extra = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    if args.registry:
        os.environ["MLBENCH_IMAGE_REGISTRY"] = args.registry
        images = {build.name: build for build in builds()}
    program = args.program or next(filter(shutil.which, PROGRAMS), None)
    if program is None and not args.list:
        parser.error(
            f"one of {', '.join(PROGRAMS)} must be installed to build images: "
            "install one, or give --list"
        )
    shown_program = program or PROGRAMS[0]
    rows = []
    for name, build in images.items():
        if args.only and name not in args.only:
            continue
        commands = [build_command(shown_program, build, extra)]
        if args.push:
            commands += [[shown_program, "push", tag] for tag in (build.tag, *build.other_tags)]
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
