"""Run a function in k processes that communicate, and bring back what each returned.

The processes are forked from a server that has imported torch and done nothing else: importing it
anew in each of them would take most of the time of most tests. For the same reason it has imported
what many tests read digits with, and pytest, which is the main module that ``multiprocessing``
imports into every process."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

IMPORTED_BEFORE = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "mlbench_core.optim.pytorch",
    "pytest",
    "sklearn.datasets",
]


def fork_context() -> ForkServerContext:
    """Where processes are forked from the server; its first process starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    return context


class _Pickler(pickle.Pickler):
    """Pickle plain tensors as their bytes.

    torch writes an archive for each tensor, which takes ten times as long for small ones.
    """

    def reducer_override(self, value: Any) -> Any:
        import torch

        is_plain = type(value) is torch.Tensor and value.is_cpu and not value.requires_grad
        if not is_plain or value.layout is not torch.strided or not value.numel():
            return NotImplemented
        if value.is_quantized or value.__dict__:
            return NotImplemented
        if not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


class RankFailure(AssertionError):
    """At least one worker failed; the message has each failing rank's traceback."""


def _worker(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    timeout_s: float,
    args: tuple[Any, ...],
    environment: dict[str, str],
    channel: multiprocessing.connection.Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.clear()  # it is the one in which the server was started
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if backend == "nccl":
            # NCCL refuses a GPU that two workers of a machine share, so they appear to be on
            # machines of their own.
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
            torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        # A worker that ends at once would close its connections while another one is still joining.
        store.set(f"joined {rank}", "")
        store.wait([f"joined {other}" for other in range(world_size)])
        result = function(rank, world_size, *args)
        channel.send_bytes(_pickled((True, result)))
    except BaseException:
        channel.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        channel.close()


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` processes.

    ``function`` must be importable (defined at module level), its arguments and result picklable.
    The processes meet through a file, so no port is used; each computes with one thread.

    Args:
        world_size: Number of processes.
        function: What each process runs.
        args: Further arguments for every process.
        backend: ``"gloo"`` or ``"nccl"``. With NCCL, each worker uses a GPU, which it may share
            with others.
        timeout_s: Limit in seconds for the whole run; also the process group's timeout.

    Returns:
        The results by rank.

    Raises:
        RankFailure: A worker raised, died or the limit passed. The message names the rank and has
            its traceback.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        channels, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            given = (
                function,
                rank,
                world_size,
                folder,
                backend,
                timeout_s,
                args,
                dict(os.environ),
                theirs,
            )
            process = context.Process(target=_worker, args=given, daemon=True)
            process.start()
            theirs.close()
            channels.append(ours)
            processes.append(process)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(enumerate(channels))
        try:
            while waiting and time.monotonic() < deadline:
                for ready in multiprocessing.connection.wait(list(waiting.values()), timeout=0.5):
                    rank = next(r for r, c in waiting.items() if c is ready)
                    del waiting[rank]
                    try:
                        succeeded, value = pickle.loads(channels[rank].recv_bytes())
                    except EOFError:
                        processes[rank].join(60)
                        succeeded, value = False, f"died with exit code {processes[rank].exitcode}"
                    if succeeded:
                        results[rank] = value
                    else:
                        failures[rank] = value
                        deadline = min(
                            deadline, time.monotonic() + 10
                        )  # the others get a moment to fail too
            for rank in waiting:
                failures.setdefault(rank, f"did not end within {timeout_s} s")
        finally:
            for process in processes:
                process.join(0.1 if failures else 60)
                if process.is_alive():
                    process.kill()
                    process.join()
            for channel in channels:
                channel.close()
    if failures:
        raise RankFailure(
            "\n".join(
                f"--- rank {rank} of {world_size}:\n{text}" for rank, text in failures.items()
            )
        )
    return [results[rank] for rank in range(world_size)]
