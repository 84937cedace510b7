"""Join the other workers at the start of a run, and leave them at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Import this module before a process group exists. Its functions keep the default group of that
# moment as the default of an argument, so a group that exists by then is never freed, and its
# threads can abort the process at the end. torch itself imports it with the first optimizer.
import torch.distributed.nn.functional

from mlbench_core.arguments import check_positive
from mlbench_core.distributed.environment import (
    ClusterEnvironment,
    HostsEnvironment,
    MPIWorldEnvironment,
    Place,
    SlurmEnvironment,
    TorchrunEnvironment,
    detect_environment,
)
from mlbench_core.distributed.interfaces import interface_variables, resolves
from mlbench_core.distributed.pytorch import mpi, private_store, process_groups
from mlbench_core.distributed.pytorch.devices import FCGraph
from mlbench_core.distributed.pytorch.lost_workers import forget, introduce, naming_lost_workers
from mlbench_core.distributed.pytorch.memory import keep_freed_memory, return_freed_memory
from mlbench_core.distributed.pytorch.settings import config_logging, config_path, config_pytorch
from mlbench_core.errors import BackendError, ConfigurationError, WorkerError
from mlbench_core.tasks import BACKENDS

__all__ = ["initialize_backends"]

_log = logging.getLogger(__name__)

# Time to wait for the name of rank 0's host: the name of a container resolves
# only shortly after its start.
_RESOLVE_S = 20.0
_LOOPBACK = "127.0.0.1"
# Workers that start together meet earlier than this.
_NOTICE_AFTER_S = 5.0


@contextlib.contextmanager
def initialize_backends(
    comm_backend: str = "mpi",
    hosts: str | Sequence[str] | None = None,
    rank: int = -1,
    logging_level: str | int = "INFO",
    logging_file: str | os.PathLike[str] | None = None,
    use_cuda: bool = False,
    seed: int | None = None,
    cudnn_deterministic: bool = False,
    ckpt_run_dir: str | os.PathLike[str] | None = None,
    delete_existing_ckpts: bool = False,
    timeout_s: float = 1800.0,
    *,
    keep_memory: bool = True,
) -> Iterator[tuple[int, int, FCGraph]]:
    """Join the other workers for the length of a ``with`` block.

    One of these describes the workers: torchrun's environment, the arguments ``hosts`` and
    ``rank``, or the environment of ``mpirun`` or Slurm. Without any of them, the process is a world
    of size 1 (see :mod:`mlbench_core.distributed.environment`). With the backend ``mpi``, start the
    workers with ``mpirun`` (or another launcher of MPI programs), which gives rank and world size.
    If ``hosts`` and ``rank`` or torchrun's environment are given too, they must agree.

    Within the block, the process keeps the memory of freed CPU tensors for the next step, so its
    size stays at the peak (:func:`~mlbench_core.distributed.pytorch.memory.keep_freed_memory`).
    Results do not change.

    A worker that waits for others for more than 5 seconds logs a warning, and Ctrl-C then ends the
    process at once.

    At the end of the block, also after an exception, the process group is destroyed. Environment
    variables, loggers and cuDNN's settings are restored, and freed memory is returned. Random
    generators and the current CUDA device are not restored. Over ``mpi`` the other workers would
    wait indefinitely for one that failed. So if an exception leaves the block, the end of the
    process also ends the other workers.

    Args:
        comm_backend: ``"gloo"`` (CPU), ``"nccl"`` (GPU), ``"mpi"`` (CPU, and GPU through the
            memory of the host) or another backend that is registered with torch. ``"mpi"`` is
            torch's own backend if torch was built with MPI. Otherwise it is
            :mod:`mlbench_core.distributed.pytorch.mpi`, which needs mpi4py.
        hosts: Host of each worker, separated by commas; the first one is the rendezvous, at port
            ``MASTER_PORT`` or 29500. Name a host once for each worker that it runs.
        rank: This worker's number in ``hosts``.
        logging_level: Least severe level of messages shown.
        logging_file: File that messages are also written to; None for no file.
        use_cuda: True to compute on the GPU.
        seed: Seed of the random generators of torch, NumPy and ``random``; None to not seed them.
        cudnn_deterministic: True to let cuDNN use deterministic algorithms only.
        ckpt_run_dir: Folder of the checkpoints, which is created; None for ``checkpoints`` in the
            user's data folder.
        delete_existing_ckpts: True to delete the checkpoints in this folder.
        timeout_s: Seconds to wait for the other workers, here and in every later collective
            operation.
        keep_memory: False to not change the settings of the C library's ``malloc``.

    Yields:
        ``(rank, world_size, graph)``.

    Raises:
        BackendError: The backend is unknown or cannot be used here.
        MissingDependencyError: The backend is ``mpi``, torch has none built in, and mpi4py is not
            installed.
        ConfigurationError: The port is taken, the host of rank 0 has no address, or ``use_cuda`` is
            set without a GPU. It is also raised if variables contradict each other or MPI's world,
            or a process group exists already.
        WorkerError: The other workers did not join within ``timeout_s``, or a collective operation
            in the block failed. The message names the workers that ended or do not answer. The
            cause of the exception is the backend's own error. Other errors of the block are raised
            unchanged.
        ValueError: ``rank`` is not a position in ``hosts``, or another argument is wrong.

    Example:
        >>> with initialize_backends("gloo", logging_level="WARNING") as (rank, world_size, graph):
        ...     print(rank, world_size, graph.current_device)
        0 1 cpu
    """
    check_positive("timeout_s", timeout_s)
    comm_backend = _checked_backend(comm_backend)
    if dist.is_initialized():
        raise ConfigurationError(
            "this process belongs to a process group already: leave the with block "
            "of initialize_backends, or call "
            "torch.distributed.destroy_process_group(), before joining another"
        )
    # Chosen before mpi.register() changes torch, so that a wrong rank leaves torch as it was.
    environment = detect_environment(hosts, rank)
    if comm_backend == "mpi" and mpi.register(timeout_s):
        # These environments also state ranks, and the ranks of MPI must agree with them.
        names_ranks = (HostsEnvironment, SlurmEnvironment, TorchrunEnvironment)
        expected: ClusterEnvironment | None = None
        if isinstance(environment, names_ranks):
            expected = environment
        environment = MPIWorldEnvironment(expected, hosts)
    place = environment.place()
    place = private_place(environment, place)
    # Workers of MPI know each other from mpirun, so they do not look for rank 0's host.
    if comm_backend != "mpi":
        _await_address(environment, place, min(timeout_s, _RESOLVE_S))
    # The stack unwinds in reverse: the process group is destroyed before
    # loggers and variables are restored.
    with contextlib.ExitStack() as stack:
        if keep_memory and keep_freed_memory():
            stack.callback(return_freed_memory)
        meeting = place.master_address
        if environment.is_on_one_machine(place):
            # The address of torchrun's agent may be that of another interface.
            meeting = _LOOPBACK
        stack.enter_context(_variables({**place.variables(), **interface_variables(meeting)}))
        cudnn = torch.backends.cudnn
        for setting in ("benchmark", "deterministic"):
            stack.callback(setattr, cudnn, setting, getattr(cudnn, setting))
        stack.callback(config_logging(logging_level, logging_file))
        files: list[Path] = []
        stack.callback(_leave, files, place.world_size)
        stack.push(_note_failure)
        if use_cuda or comm_backend == "nccl":
            # Choose the GPU before joining: NCCL ties its communicator to the current GPU.
            FCGraph(place.rank, place.world_size, use_cuda=True).assigned_gpu_id()
        _join(comm_backend, environment, place, timeout_s, files)
        introduce()
        stack.enter_context(naming_lost_workers())
        world = config_pytorch(use_cuda, seed, cudnn_deterministic)
        config_path(ckpt_run_dir, delete_existing_ckpts)
        # After the barrier all workers have joined and have written their records, which the end of
        # the block reads.
        with naming_lost_workers():
            process_groups.barrier()
        if isinstance(environment, HostsEnvironment) and not use_cuda:
            _warn_of_threads(environment)
        _log.debug("joined over %s, started by %s: %s", comm_backend, environment.name, world[2])
        yield world


def _checked_backend(name: str) -> str:
    name = str(name).lower()
    names = sorted({*BACKENDS} | set(dist.Backend.backend_list) - {"undefined", "fake"})
    if name not in names:
        raise BackendError(
            f"the communication backend {name!r} is unknown; known here are {', '.join(names)}"
        )
    if name == "nccl" and torch.cuda.device_count() == 0:
        raise BackendError(
            "the backend nccl works on GPUs only, and torch sees none on this machine: use gloo"
        )
    # torch may lack MPI: it is registered later.
    if name != "mpi" and not dist.is_backend_available(name):
        raise BackendError(
            f"torch {torch.__version__} was built without the backend {name}: "
            "install another build of torch"
        )
    return name


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _await_address(environment: ClusterEnvironment, place: Place, limit_s: float) -> None:
    """Wait until rank 0's host has an address; torch would try until the run's timeout.

    Raises:
        ConfigurationError: It has none after ``limit_s`` seconds.
    """
    if place.master_address is None or place.world_size == 1:
        return
    remedies = {
        HostsEnvironment: "name its IP address in --hosts",
        TorchrunEnvironment: "give torchrun its --local-addr",
    }
    deadline = time.monotonic() + limit_s
    while not resolves(place.master_address):
        if time.monotonic() > deadline:
            by_variable = "set MASTER_ADDR to its IP address for every worker"
            remedy = remedies.get(type(environment), by_variable)
            raise ConfigurationError(
                f"the host of rank 0, {place.master_address!r} as {environment.name} says, has no "
                f"address that {socket.gethostname()} knows: {remedy}"
            )
        time.sleep(0.5)


def _agent_has_store() -> bool:
    """Return True if torchrun's agent runs the store, and so has chosen its address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def private_place(environment: ClusterEnvironment, place: Place) -> Place:
    """Return the place with the loopback interface as rendezvous, if all workers run here."""
    if environment.is_on_one_machine(place) and not _agent_has_store():
        # No other machine needs to reach the workers, so they listen on the loopback interface.
        return dataclasses.replace(place, master_address=_LOOPBACK)
    return place


def _join(
    backend: str, environment: ClusterEnvironment, place: Place, timeout_s: float, files: list[Path]
) -> None:
    """Create the process group; ``files`` receives the path of its store, if that is a file."""
    timeout = datetime.timedelta(seconds=timeout_s)
    options: dict[str, Any] = {}
    if backend == "nccl":
        # Otherwise NCCL guesses the GPU from the rank, which is wrong if machines have different
        # numbers of GPUs.
        options["device_id"] = torch.device("cuda", torch.cuda.current_device())
    try:
        if backend != "mpi":  # MPI needs no store
            rank, size = place.rank, place.world_size
            with _waiting(place, timeout_s):
                store: dist.Store = rendezvous_store(place, timeout)
                if size > 1 and environment.is_on_one_machine(place):
                    store, path = private_store.meet(store, rank, size, timeout)
                    files.append(path)
            options |= {"store": store, "rank": rank, "world_size": size}
        waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if backend != "mpi":  # the workers of MPI have met already
            waiting = _waiting(place, timeout_s)
        with waiting:
            dist.init_process_group(backend, timeout=timeout, **options)
    except RuntimeError as error:
        # torch raises a plain RuntimeError for all of these causes; only
        # the text distinguishes them.
        text = str(error)
        reason = type(error).__name__
        if text:
            reason = text.splitlines()[0]
        if "EADDRINUSE" in text or os.strerror(errno.EADDRINUSE).lower() in text.lower():
            raise ConfigurationError(
                f"port {place.master_port}, where rank 0 meets the other workers, is in use on "
                f"{place.master_address}: end the program that listens there (maybe an earlier "
                "run), or set MASTER_PORT to a free port, the same for every worker"
            ) from error
        # Gloo fails with these words at its own start, before it contacts another worker.
        if "enforce fail" in text:
            raise BackendError(
                f"the backend {backend} cannot start here (torch says: "
                f"{reason}): if GLOO_SOCKET_IFNAME is set, it must name a "
                "network interface of this machine that has an address"
            ) from error
        raise WorkerError(
            f"rank {place.rank} of {place.world_size} did not meet the other workers at "
            f"{place.master_address}:{place.master_port} within {timeout_s:g} s: check that "
            "all were started, each with its own rank and the same hosts, and that they "
            f"can reach that port. torch says: {reason}"
        ) from error


def rendezvous_store(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """Return the store at the rendezvous port; for one worker, a store in memory."""
    rank, size = place.rank, place.world_size
    address, port = str(place.master_address), place.master_port
    if size == 1:
        return dist.HashStore()
    if _agent_has_store():
        return next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))[0]
    listener: dict[str, Any] = {}
    if rank == 0 and address == _LOOPBACK:
        # Without this socket, torch's store listens on all interfaces.
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind((address, port))
            except OSError as error:
                raise RuntimeError(error.strerror) from error
            listener["master_listen_fd"] = bound.detach()
    return dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, **listener)


def _warn_of_threads(environment: HostsEnvironment) -> None:
    """Warn if workers that were started by hand have more threads than there are cores.

    Launchers set the number of threads of each worker.
    """
    workers = environment.hosts.count(environment.hosts[environment.rank])
    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    # Only the cores that this process may use; macOS does not have this call.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if workers > 1 and workers * threads > cores and environment.place().local_rank == 0:
        _log.warning(
            "%s workers on %s have %s threads each, together more than its %s cores, so they "
            "slow each other down: set OMP_NUM_THREADS=%s for each",
            workers, environment.hosts[environment.rank], threads, cores, max(1, cores // workers),
        )  # fmt: skip


@contextlib.contextmanager
def _waiting(place: Place, timeout_s: float) -> Iterator[None]:
    """Warn after some seconds that other workers are missing, and let Ctrl-C end the process.

    torch waits without returning to Python, so the usual handler of SIGINT would not run.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    message = (
        f"rank {place.rank} of {place.world_size} waits for the others at "
        f"{place.master_address}:{place.master_port}, for up to {timeout_s:g} s"
    )
    if is_ours:
        message += "; Ctrl-C ends it"
    timer = threading.Timer(_NOTICE_AFTER_S, _log.warning, (message,))
    timer.daemon = True
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _note_failure(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
    """Remember an exception that ends the block: over MPI the others would wait indefinitely."""
    # sys.exit() and sys.exit(0) are a normal end.
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        mpi.fail_at_exit(f"{type(error).__name__}: {error}")


def _leave(files: list[Path], world_size: int) -> None:
    forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    for path in files:
        private_store.leave(path, world_size)
