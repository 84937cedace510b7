"""Measure the load of the workers of a run: CPU, memory, GPU and network.

The supervisor of a local run calls :class:`LoadSampler` every few seconds and writes the figures
into the run's folder, from which the master reads them. So the supervisor needs no address and no
token, and a master that is away costs the run nothing. Only psutil and the standard library are
imported; NVML is loaded if the driver of the GPUs has it.

All figures of a worker belong to its process tree:

==============  ====================================================================cpu
    Percent of one core since the last sample, with processes that started and ended in between.
memory
    Resident memory in bytes. Memory that processes of the tree share counts once for each of them.
gpu
    Percent of the time in which the worker's GPU was busy; of the whole GPU, whoever used it.
gpu_memory
    Bytes in use on the worker's GPU; of the whole GPU.
network_in, network_out
    Bytes per second that arrived and that left. A worker in its own network namespace has its own
    figures, without its loopback interface. Workers that share the network of the machine have the
    figures of the whole machine, with the loopback interface, which carries the traffic between
    local workers. The system counts no bytes of a single process, so these figures are marked with
    ``"network": "machine"``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

__all__ = ["LOAD_METRICS", "GpuMeter", "LoadSampler"]

LOAD_METRICS = ("cpu", "memory", "gpu", "gpu_memory", "network_in", "network_out")
"""The names of the figures, which are also the names of the metrics of a worker."""

# Variables with the rank of a process that mpirun (Open MPI, MPICH) or torchrun has started.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
_OWN_PROCESS = "self"


class LoadSampler:
    """A sampler of the load of all workers below this process.

    Args:
        num_workers: Number of workers.
        roots: The rank of each process that this one has started, by its id; None for one that
            starts all workers.
        gpus: GPUs of the workers by rank, as entries of CUDA_VISIBLE_DEVICES; empty without GPUs.
    """

    def __init__(
        self, num_workers: int, roots: Mapping[int, int | None], gpus: Sequence[str] = ()
    ) -> None:
        self._num_workers = num_workers
        self._roots = roots
        # Then the processes below it have their ranks in their environment.
        self._starts_others = len(roots) < num_workers or None in roots.values()
        self._gpus = GpuMeter(gpus)
        self._own_namespace = _namespace(_OWN_PROCESS)
        self._ranks: dict[psutil.Process, int] = {}
        self._seconds: dict[int, float] = {}  # of the CPU, by rank
        # Received and sent, by network namespace.
        self._bytes = {self._own_namespace: _machine_bytes()}
        self._time = time.monotonic()

    def sample(self) -> dict[int, dict[str, Any]]:
        """Return the load of each worker that has a process, by rank, since the last call."""
        now = time.monotonic()
        elapsed = max(now - self._time, 1e-3)  # not 0 for two calls at once
        seconds: dict[int, float] = {}
        memory: dict[int, int] = {}
        namespaces: dict[int, str] = {}
        counters: dict[str, tuple[int, int] | None] = {self._own_namespace: _machine_bytes()}
        gone: set[int] = set()  # ranks
        for process, rank in self._workers():
            try:
                with process.oneshot():
                    # The time of children that were waited for makes the sum continue when a child
                    # ends.
                    seconds[rank] = seconds.get(rank, 0.0) + sum(process.cpu_times()[:4])
                    memory.setdefault(rank, 0)
                    memory[rank] += process.memory_info().rss
                    namespace = _namespace(process.pid) or self._own_namespace
                    # A worker may have processes in its own namespace and in that of the machine.
                    if namespaces.get(rank, self._own_namespace) == self._own_namespace:
                        namespaces[rank] = namespace
                    if namespace not in counters:
                        counters[namespace] = _namespace_bytes(process.pid)
            except (psutil.Error, OSError):
                gone.add(rank)
        for rank in gone & seconds.keys():
            # A process that ended after its parent was read is in neither time. Its parent has it
            # at the next sample, in which it must not count again.
            seconds[rank] = max(seconds[rank], self._seconds.get(rank, 0.0))
        gpus = self._gpus.read()
        loads: dict[int, dict[str, Any]] = {}
        for rank in sorted(seconds):
            # It falls when a process goes whose parent did not wait for it.
            busy = max(seconds[rank] - self._seconds.get(rank, 0.0), 0.0)
            loads[rank] = {
                "cpu": round(100 * busy / elapsed, 1),
                "memory": memory.get(rank, 0),
                **gpus.get(rank, {}),
            }
            namespace = namespaces.get(rank, self._own_namespace)
            before, after = self._bytes.get(namespace), counters[namespace]
            if before is not None and after is not None:
                loads[rank]["network_in"] = round(max(after[0] - before[0], 0) / elapsed)
                loads[rank]["network_out"] = round(max(after[1] - before[1], 0) / elapsed)
                if namespace == self._own_namespace:
                    loads[rank]["network"] = "machine"
        self._time, self._seconds, self._bytes = now, seconds, counters
        return loads

    def _workers(self) -> Iterator[tuple[psutil.Process, int]]:
        """Yield the processes of all workers with their ranks."""
        ranks_by_id: dict[int, int] = {}
        ranks: dict[psutil.Process, int] = {}
        # Parents come before their children.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                rank = self._ranks.get(process)
                is_certain = rank is not None
                if rank is None:
                    rank = self._roots.get(process.pid, ranks_by_id.get(process.ppid()))
                    is_certain = not self._starts_others
                    if self._starts_others or rank is None:
                        own_rank = self._rank_in_environment(process)
                        if own_rank is not None:
                            rank, is_certain = own_rank, True
                if rank is not None:
                    # A launcher may just have forked a process, which has the launcher's variables
                    # until it executes another program: ask it again at the next sample.
                    if is_certain:
                        ranks[process] = rank
                    ranks_by_id[process.pid] = rank
                    yield process, rank
        self._ranks = ranks

    def _rank_in_environment(self, process: psutil.Process) -> int | None:
        """Return the rank in a process's environment, also of one whose parent has ended."""
        environment = process.environ()
        for variable in _RANK_VARIABLES:
            text = environment.get(variable, "")
            # The command of a run may have set the variable to anything.
            is_number = text.isascii() and text.isdigit() and len(text) < 10
            if is_number and int(text) < self._num_workers:
                return int(text)
        return None


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuMeter:
    """A meter of GPUs, through the library of their driver (NVML).

    It answers in microseconds, without a program.

    Args:
        gpus: Entries of CUDA_VISIBLE_DEVICES by rank. A number is taken in the order of the PCI
            bus, as nvidia-smi counts.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._devices: dict[int, ctypes.c_void_p] = {}
        self._nvml: Any = None
        if not gpus:
            return
        with contextlib.suppress(OSError):
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if self._nvml is None or self._nvml.nvmlInit_v2():
            return
        for rank, gpu in enumerate(gpus):
            device = ctypes.c_void_p()
            if gpu.isdecimal():
                failed = self._nvml.nvmlDeviceGetHandleByIndex_v2(
                    ctypes.c_uint(int(gpu)), ctypes.byref(device)
                )
            else:
                failed = self._nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(device))
            if not failed:
                self._devices[rank] = device

    def read(self) -> dict[int, dict[str, int]]:
        """Return ``gpu`` and ``gpu_memory`` of each rank, if the GPU has these figures."""
        figures: dict[int, dict[str, int]] = {}
        for rank, device in self._devices.items():
            figures[rank] = {}
            busy, memory = _Utilization(), _Memory()
            # The functions of NVML return 0 for success.
            if not self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)):
                figures[rank]["gpu"] = busy.gpu
            if not self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                figures[rank]["gpu_memory"] = memory.used
        return figures


def _namespace(pid: int | str) -> str:
    """Return the name of a process's network namespace; empty on a system without them."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def _machine_bytes() -> tuple[int, int] | None:
    counters = None
    with contextlib.suppress(OSError, RuntimeError):
        counters = psutil.net_io_counters()
    if counters is None:
        return None
    return counters.bytes_recv, counters.bytes_sent


def _namespace_bytes(pid: int) -> tuple[int, int]:
    """Return the bytes that a process's network namespace has received and sent."""
    received = sent = 0
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        # Each line has 8 numbers of received data, the first in bytes, then 8 of sent data.
        name, _, values = line.partition(":")
        if name.strip() != "lo":
            received += int(values.split()[0])
            sent += int(values.split()[8])
    return received, sent
