"""Find the GPUs of this machine that workers may use."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess

__all__ = ["find_gpus", "installed_gpus", "visible_gpus"]

_log = logging.getLogger(__name__)
_TIMEOUT_S = 30  # without the persistence mode, nvidia-smi has to initialize each GPU first
_UUID = re.compile(r"\(UUID: ([^\s)]+)\)")
_ENTRY = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


def find_gpus() -> tuple[str, ...]:
    """Return the GPUs that workers may use.

    They are all GPUs of this machine, or those of this process's CUDA_VISIBLE_DEVICES.

    Returns:
        Entries for the CUDA_VISIBLE_DEVICES of a worker.
    """
    installed = _ask_nvidia_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed or ()
    if installed is None:
        return visible_gpus(visible)
    return visible_gpus(visible, len(installed))


def visible_gpus(visible: str, installed: int | None = None) -> tuple[str, ...]:
    """Return the entries of a CUDA_VISIBLE_DEVICES that CUDA uses.

    Entries stay as they are: the number of a GPU depends on CUDA_DEVICE_ORDER, which workers
    inherit.

    Args:
        visible: The value of the variable.
        installed: Number of GPUs of this machine, if it is known.

    Example:
        >>> visible_gpus("1,GPU-8932f937"), visible_gpus("0,-1,1"), visible_gpus("")
        (('1', 'GPU-8932f937'), ('0',), ())
        >>> visible_gpus("0,4", installed=4)
        ('0',)
    """
    entries = []
    for entry in map(str.strip, visible.split(",")):
        # CUDA ignores an entry that names no GPU, and all entries after it.
        if not _ENTRY.fullmatch(entry) or (
            installed is not None and entry.isdecimal() and int(entry) >= installed
        ):
            break
        entries.append(entry)
    return tuple(dict.fromkeys(entries))


def installed_gpus(listing: str) -> tuple[str, ...]:
    """Return the UUIDs in the output of ``nvidia-smi -L``.

    The instances of a divided GPU (MIG) take its place.

    Example:
        >>> installed_gpus("GPU 0: NVIDIA H100 (UUID: GPU-1a)\\nGPU 1: NVIDIA H100 (UUID: GPU-2b)")
        ('GPU-1a', 'GPU-2b')
    """
    uuids: list[str] = []
    for uuid in _UUID.findall(listing):
        # CUDA cannot use a divided GPU as a whole.
        if uuid.startswith("MIG") and uuids and uuids[-1].startswith("GPU"):
            uuids.pop()
        uuids.append(uuid)
    return tuple(uuids)


def _ask_nvidia_smi() -> tuple[str, ...] | None:
    """Return the GPUs that the driver knows, or None without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("cannot list the GPUs: %s", error)
        return None
    return installed_gpus(done.stdout)
