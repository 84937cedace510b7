"""Read the settings of a master for its runs on Kubernetes.

They are environment variables that begin with ``MLBENCH_KUBERNETES_``.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.errors import ConfigurationError, require

__all__ = ["PREFIX", "Setting", "read_setting", "variable"]

PREFIX = "MLBENCH_KUBERNETES_"
"""Prefix of the names of all variables."""

_TEMPLATE_BYTES = 2**20
# The mark is a part of names, which may have at most 63 characters.
_MARK = re.compile(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """The settings of a master for all its runs.

    Attributes:
        namespace: Namespace of the runs.
        mark: The master's mark, which is unique in the namespace.
        master_url: URL of the master for workers in pods; empty to keep the URL of the run.
        shared_claim: PersistentVolumeClaim with the folders of runs; empty if master and workers
            share none.
        shared_mount: The folder at which the master mounts this claim; None without a claim.
        template: The pod template of the administrator, with ``metadata`` and ``spec``.
        folder_id: Unique id of the folder for runs.
    """

    namespace: str
    mark: str
    master_url: str = ""
    shared_claim: str = ""
    shared_mount: Path | None = None
    template: dict[str, Any] = field(default_factory=dict)
    folder_id: str = ""


def read_setting(folder: Path, namespace: str) -> Setting:
    """Read the settings of a master.

    Args:
        folder: Folder that contains the folders of runs.
        namespace: Namespace of the runs.

    Raises:
        ConfigurationError: A variable is wrong; the message names it.
    """
    folder_id = _own_id(folder)
    return Setting(
        namespace=namespace,
        mark=_read_mark(folder_id),
        master_url=variable("MASTER_URL"),
        shared_claim=variable("SHARED_CLAIM"),
        shared_mount=_shared_mount(folder),
        template=_read_template(),
        folder_id=folder_id,
    )


def variable(name: str) -> str:
    """Return the value of a variable, named without the prefix; empty if it is not set."""
    return os.environ.get(f"{PREFIX}{name}", "")


def _own_id(folder: Path) -> str:
    """Return the unique id of the folder for runs; create it if it is missing."""
    # Kept in a file: a master that starts again must find its Jobs by the same mark.
    path = folder / "kubernetes_id"
    try:
        with contextlib.suppress(FileNotFoundError):
            recorded = path.read_text().strip()
            # A file that is empty after a crash is replaced.
            if _MARK.fullmatch(recorded):
                return recorded
        own_id = uuid.uuid4().hex[:10]
        path.write_text(own_id)
    except OSError as error:
        raise ConfigurationError(f"cannot use the folder {folder}: {error}") from error
    return own_id


def _read_mark(own_id: str) -> str:
    mark = variable("MARK") or own_id
    if _MARK.fullmatch(mark) is None:
        raise ConfigurationError(
            f"{PREFIX}MARK must be 1 to 30 lowercase letters, digits and hyphens, not "
            f"{mark[:80]!r}: choose one that no other master of the namespace has"
        )
    return mark


def _shared_mount(folder: Path) -> Path | None:
    """Return the folder at which the shared claim is mounted here; None without a claim."""
    if not variable("SHARED_CLAIM"):
        return None
    mount = Path(variable("SHARED_MOUNT") or "/").absolute()
    if mount == Path("/") or not folder.is_relative_to(mount):
        raise ConfigurationError(
            f"{PREFIX}SHARED_MOUNT must be a folder above {folder}, not "
            f"{variable('SHARED_MOUNT')!r}: "
            f"give the folder at which the claim {variable('SHARED_CLAIM')!r} is mounted, "
            "and keep the data folder of the master below it"
        )
    return mount


def _read_template() -> dict[str, Any]:
    """Return the pod template of the administrator; empty without one."""
    yaml: Any = require("yaml", "kubernetes")  # the client of Kubernetes needs it, too
    path = variable("POD_TEMPLATE")
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            template = yaml.safe_load(file.read(_TEMPLATE_BYTES))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the pod template {path}: {error}") from error
    parts = template
    if not isinstance(template, dict):
        parts = {"": None}  # for the error below
    are_objects = all(isinstance(part, dict) for part in parts.values())
    if not are_objects or not parts.keys() <= {"metadata", "spec"}:
        raise ConfigurationError(
            f"the pod template {path} must have metadata and spec only, not "
            f"{str(sorted(map(str, parts)))[:80]}"
        )
    return parts
