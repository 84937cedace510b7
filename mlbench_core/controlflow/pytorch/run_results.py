"""Write the result folder of a run, together with all of its workers.

Each worker writes its raw lines to a file of its own. At the end rank 0 joins them and writes the result. Workers on
hosts that do not share the folder with rank 0 send their lines to it::

    rank 0: prepare the folder, put a mark into it    other ranks: is the mark there?
                                ... training ...
    all: write the last line; ranks that did not see the mark send their file; rank 0 joins the files
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.distributed.pytorch.process_groups import get_backend_tensor, is_distributed
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.files import lock
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.environment import describe_environment
from mlbench_core.results.folder import finish_folder, lines_path, prepare_folder, write_environment
from mlbench_core.results.lines import LinesSink
from mlbench_core.results.summary import goal_message
from mlbench_core.tasks import TASKS
from mlbench_core.tracking.goal import describe_goal

__all__ = ["RunResults", "task_results"]

logger = logging.getLogger(__name__)

# Arguments that are not settings of the training, or have a field of their own in the configuration.
_NOT_OPTIONS = frozenset(
    (
        *("run_id", "root_dataset", "root_checkpoint", "root_output", "data", "rank", "hosts", "timeout", "resume"),
        *("checkpoint", "validation_only", "gpu", "backend", "light_target", "seed", "dataset", "preset", "optimizer"),
        # The goal of the configuration has it.
        "goal_after",
        "sink",
    )
)
# Options that the closed division leaves free. They decide how numbers are computed and sent, when a run ends, and on
# which further data it is evaluated.
_FREE_OPTIONS = frozenset(
    (
        *("overlap", "shared_memory", "compile", "channels_last", "precision", "autocast", "bf16"),
        *("epochs", "past_goal", "full_train"),
    )
)

_CHUNK_BYTES = 16 << 20
_FLUSH_TIMEOUT_S = 5.0


class RunResults:
    """The result folder of a run; every worker makes one at the same time, after the process group exists.

    Pass :attr:`sink` to the tracker. Use it as a context manager around the tracker: at its end the result is written,
    also after an exception. The tasks do this through :class:`~mlbench_core.controlflow.pytorch.run.Run`.

    Args:
        folder: The result folder. Files of an earlier run in it are moved to ``earlier-1`` and so on.
        configuration: The program of the run and its settings.
        run_id: Id of the run.
        rank: Rank of this worker.
        environment: Content of ``environment.json``, see
            :func:`~mlbench_core.results.environment.describe_environment`; used on rank 0.
        resume: True to continue the run in this folder.

    Raises:
        ConfigurationError: Another run writes to this folder at the moment, or it cannot be written to.

    Attributes:
        sink: Writes the raw lines of this worker.
        result: On rank 0, the content of ``result.json`` after the end; None before and on other ranks.

    Example:
        >>> import pathlib, tempfile
        >>> from mlbench_core.tracking.tracker import Tracker
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "my-run"
        >>> with RunResults(folder, Configuration(workers=1), "my-run") as results:
        ...     with Tracker([], "my-run", 0, sinks=[results.sink]) as tracker:
        ...         tracker.batch_start()
        ...         tracker.batch_end(samples=32)
        ...         tracker.epoch_end()
        >>> results.result["run"]["state"], results.result["samples"]
        ('finished', 32)
    """

    def __init__(
        self,
        folder: Path,
        configuration: Configuration,
        run_id: str,
        rank: int = 0,
        *,
        environment: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        self.folder = folder
        self.result: dict[str, Any] | None = None
        self._run_id = run_id
        self._rank = rank
        self._claimed = contextlib.ExitStack()
        if rank == 0:
            try:
                self._claim()
                prepare_folder(folder, resume=resume)
                write_environment(folder, environment or {})
            except OSError as error:
                raise ConfigurationError(
                    f"the result folder must be on a disk with space and be writable, but {folder} is not "
                    f"({error.strerror or error}): choose another --root-output"
                ) from error
        self._sharing = self._who_shares_the_folder()
        path = lines_path(folder, rank)
        if not self._sharing[rank] and not resume and path.exists():
            # Left by a killed run. Only this worker's file is moved, because others of this host write now, too.
            path.replace(path.with_name(f"earlier-{path.name}"))
        self.sink = LinesSink(path, rank, run_id, configuration.to_dict())

    def __enter__(self) -> RunResults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = None if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        try:
            self.sink.finish("finished" if error is None else "failed", reason)
            # After an error other workers may be gone, so nothing is received from them.
            if error is None:
                self._bring_lines()
            if self._rank == 0:
                self.result = finish_folder(self.folder)
        # An error here, such as a full disk, must not hide how the training itself ended.
        except (OSError, ValueError, RuntimeError, MLBenchError) as problem:
            logger.error("the result in %s is incomplete: %s: %s", self.folder, type(problem).__name__, problem)
        finally:
            self._claimed.close()
        if self.result is not None:
            log = (self._run_id, 0, self.result["epochs"])
            if self.result["goal"] is not None:
                # The tracker sent the goal with the times of rank 0; this one has those of the slowest worker.
                LogMetrics.log(*log, "goal", json.dumps(goal_message(self.result)))
            LogMetrics.log(*log, "result", json.dumps(self.result))
            LogMetrics.flush(_FLUSH_TIMEOUT_S)

    def _claim(self) -> None:
        """Keep other runs out of the folder until this one ends: the lines of two runs must not be mixed."""
        try:
            self._claimed.enter_context(lock(self.folder / ".lock", wait=False))
        except TimeoutError as error:
            raise ConfigurationError(
                f"the result folder must belong to one run at a time, and another run is writing to {self.folder}: "
                "give another --run_id, or wait until it has ended"
            ) from error
        except NotImplementedError:
            logger.debug("%s is on a file system without locks", self.folder)

    def _who_shares_the_folder(self) -> list[bool]:
        """Return for each rank if its folder is that of rank 0; all workers get the same answer."""
        if not is_distributed() or dist.get_world_size() == 1:
            return [True] * (self._rank + 1)
        # 62 bits, because the number travels as int64.
        number = get_backend_tensor(torch.tensor([int.from_bytes(os.urandom(8), "big") >> 2]))
        mark_of = ".shared-{:x}".format
        if self._rank == 0:
            mark = self.folder / mark_of(int(number.item()))
            mark.touch()
        dist.broadcast(number, src=0)
        seen = get_backend_tensor(torch.zeros(dist.get_world_size(), dtype=torch.int64))
        seen[self._rank] = (self.folder / mark_of(int(number.item()))).exists()
        dist.all_reduce(seen)
        if self._rank == 0:
            mark.unlink()
        return [bool(shares) for shares in seen.tolist()]

    def _bring_lines(self) -> None:
        """Copy the raw lines of workers on other hosts to rank 0; after the call every worker's file is there."""
        if len(self._sharing) == 1 or not is_distributed():
            return
        dist.barrier()
        for sender, shares in enumerate(self._sharing):
            if shares:
                continue
            path = lines_path(self.folder, sender)
            kept, content = path.with_name(f"sent-{path.name}"), b""
            if self._rank == sender:
                content = zlib.compress(path.read_bytes())
                # Out of the way before rank 0 writes its copy: if the folders are the same after all, because a network
                # file system showed the mark too late, the copy must not be removed below.
                path.replace(kept)
            size = get_backend_tensor(torch.tensor([len(content)]))
            dist.broadcast(size, src=sender)
            received = bytearray()
            # Broadcast and not send, because every backend has it; a file has a few megabytes.
            for start in range(0, int(size.item()), _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, int(size.item()) - start)
                chunk = torch.zeros(length, dtype=torch.uint8)
                if self._rank == sender:
                    chunk = torch.frombuffer(bytearray(content[start : start + length]), dtype=torch.uint8)
                chunk = get_backend_tensor(chunk)
                dist.broadcast(chunk, src=sender)
                if self._rank == 0:
                    received += chunk.cpu().numpy().tobytes()
            if self._rank == 0:
                path.write_bytes(zlib.decompress(bytes(received)))
            elif self._rank == sender:
                kept.unlink()


def task_results(
    args: argparse.Namespace,
    uid: str,
    rank: int,
    world_size: int,
    backend: str,
    goal: Any = None,
    *,
    output_dir: str,
    dataset_dir: str,
) -> RunResults:
    """Open the result folder of a task from its command line; every worker calls it at the same time.

    Args:
        args: The command line, as :func:`~mlbench_core.controlflow.task_arguments.task_main` read it.
        uid: The task's name in paths, such as ``"task1a"``.
        rank: Rank of this worker.
        world_size: Number of workers.
        backend: Communication backend.
        goal: The goal of the run; None if it has none.
        output_dir: The result folder.
        dataset_dir: Folder of the data, unless the command line names another one.
    """
    seed = getattr(args, "seed", None)
    environment = None
    if rank == 0:
        folder = Path(getattr(args, "data", None) or dataset_dir)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        seeds = {} if seed is None else {"seed": seed}
        environment = describe_environment(seeds=seeds, data_files=files, program=Path(sys.argv[0]))
    return RunResults(
        Path(output_dir),
        _configuration(args, uid, world_size, backend, goal),
        args.run_id,
        rank,
        environment=environment,
        resume=getattr(args, "resume", False),
    )


def _configuration(args: argparse.Namespace, uid: str, workers: int, backend: str, goal: Any) -> Configuration:
    task = TASKS.get(uid.removeprefix("task"))
    options = {name: value for name, value in args.options.items() if name not in _NOT_OPTIONS}
    return Configuration(
        workers=workers,
        task=task.key if task else None,
        program=Path(sys.argv[0]).name or None,
        dataset=getattr(args, "dataset", None) or (task.dataset if task else None),
        preset=getattr(args, "preset", None),
        algorithm=getattr(args, "optimizer", None),
        options=options,
        backend=backend,
        threads=torch.get_num_threads(),
        device="cuda" if args.gpu else "cpu",
        network=os.environ.get("MLBENCH_NETWORK") or None,
        light=args.light_target,
        changed=tuple(sorted(set(options) - _FREE_OPTIONS)),
        goal=None if goal is None else describe_goal(goal),
        seed=getattr(args, "seed", None),
    )
