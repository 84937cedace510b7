"""Write the result folder of a run, together with all of its workers.

This module imports no framework. Each worker writes its raw lines to its own file. At the end
rank 0 joins them and writes the result. Workers on hosts that do not share the folder with rank 0
send their lines to it::

    rank 0: prepare the folder, put a mark into it    other ranks: is the mark there?
                                ... training ...
    all: write the last line
    ranks that did not see the mark: send their file
    rank 0: join the files

A resumed run changes nothing in the folder before its training starts. So if its checkpoint is
refused, the result of the earlier run stays.

After an error, or at the exit of the process, rank 0 does not wait for the others. A worker that
ends later finds the lock of the folder free, and computes the result again with its own lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.distributed.worker_messages import Workers
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.files import lock
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import (
    RESULT,
    finish_folder,
    lines_path,
    prepare_folder,
    read_result,
    write_environment,
)
from mlbench_core.results.raw_lines import LinesSink
from mlbench_core.results.summary import goal_message
from mlbench_core.tracking.process_end import delay_sigterm

__all__ = ["FREE_OPTIONS", "RunFolder"]

logger = logging.getLogger(__name__)

# Options that the closed division leaves free. They decide how numbers are computed and sent, when
# a run ends, and on which further data it is evaluated.
FREE_OPTIONS = frozenset(
    {
        "overlap", "shared_memory", "compile", "cuda_graphs", "channels_last", "precision",
        "autocast", "bf16", "epochs", "past_goal", "full_train",
    }
)  # fmt: skip

# Settings that have their own field and that a resumed run keeps.
_FIXED_SETTINGS = ("task", "dataset", "preset", "algorithm", "workers", "seed")

_FLUSH_TIMEOUT_S = 5.0


class RunFolder:
    """The result folder of a run.

    Every worker makes one at the same time, after the workers are connected. Pass :attr:`sink` to
    the tracker. Use it as a context manager around the tracker: at its end the
    result is written, also after an exception. For workers of PyTorch, use
    :class:`mlbench_core.controlflow.pytorch.run_results.RunResults`, which needs no ``workers``.

    Args:
        folder: The result folder. Files of an earlier run in it are moved to ``earlier-1`` and so
            on.
        configuration: The program of the run and its settings.
        run_id: Id of the run.
        rank: Rank of this worker.
        environment: Content of ``environment.json``, see
            :func:`~mlbench_core.results.environment.describe_environment`; used on rank 0.
        resume: True to continue the run in this folder. Its files stay as they are until the
            training starts.
        workers: Messages between the workers; None for a worker alone.

    Raises:
        ConfigurationError: Another run writes to this folder at the moment, or it cannot be written
            to. Or a resumed run has other settings than its first part: another algorithm, data
            set, seed or number of workers, or another option that the closed division fixes.
        MLBenchError: At the end of the block, the training has finished, but its result could not
            be written whole.

    Attributes:
        sink: Writes the raw lines of this worker.
        result: On rank 0, the content of ``result.json`` after the end; None before and on other
            ranks.
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
        workers: Workers | None = None,
    ) -> None:
        self.folder = folder
        self.result: dict[str, Any] | None = None
        self._run_id = run_id
        self._rank = rank
        self._workers = workers or Workers()
        self._size = self._workers.size
        self._claimed = contextlib.ExitStack()
        self._resume = resume

        def prepare() -> None:
            prepare_folder(folder, resume=resume)
            write_environment(folder, environment or {})

        if rank == 0:
            try:
                self._claim()
                if resume:
                    _check_same_settings(folder, configuration.to_dict())
                else:
                    prepare()
            except OSError as error:
                raise ConfigurationError(
                    f"the result folder {folder} cannot be written ({error.strerror or error}): "
                    "choose another one by --root-output, or by --output for an observed script"
                ) from error
            except ConfigurationError:
                self._claimed.close()
                raise
        self._sharing = self._who_shares_the_folder()
        path = lines_path(folder, rank)
        if not self._sharing[rank] and not resume and path.exists():
            # Left by a killed run. Only this worker's file is moved, because others of this host
            # write now, too.
            path.replace(path.with_name(f"earlier-{path.name}"))
        before_start = None
        # The folder keeps the earlier result until the resumed run has begun to train.
        if resume and rank == 0:
            before_start = prepare
        self.sink = LinesSink(path, rank, run_id, configuration.to_dict(), before_start)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    @delay_sigterm()
    def end(self, error: BaseException | None = None, *, alone: bool = False) -> None:
        """Write the result.

        Args:
            error: The exception that ended the run; None if it has finished.
            alone: True if the other workers may not call it at the same time, as at the exit of the
                process. After an error this is always so.

        Raises:
            MLBenchError: The training has finished, but its result could not be written whole.
        """
        # A script may have destroyed its process group before.
        alone = alone or error is not None or self._workers.size != self._size
        if self._resume and not self.sink.has_started:
            # Nothing was trained, so the folder keeps the result of the earlier run.
            self._claimed.close()
            return
        state = "finished"
        reason: str | None = None
        if error is not None:
            state, reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())
        loss: str | None = None
        try:
            self.sink.finish(state, reason)
            # Other workers may be gone, so nothing is received from them.
            if not alone:
                self._bring_lines()
            if self._rank == 0:
                self.result = finish_folder(self.folder)
        except (OSError, ValueError, RuntimeError, MLBenchError) as problem:
            loss = f"{type(problem).__name__}: {problem}"
        finally:
            self._claimed.close()
        if alone and self._sharing[self._rank]:
            self._join_late_lines()
        if self.result is not None:
            log = (self._run_id, 0, self.result["epochs"])
            if self.result["goal"] is not None:
                # The tracker sent the goal with the times of rank 0; this one has those of the
                # slowest worker.
                LogMetrics.log(*log, "goal", json.dumps(goal_message(self.result)))
            LogMetrics.log(*log, "result", json.dumps(self.result))
            LogMetrics.flush(_FLUSH_TIMEOUT_S)
        run: dict[str, Any] = {}
        if self.result is not None:
            run = self.result["run"]
        # The sink also records this state if it could not write all lines.
        if loss is None and error is None and run.get("state") == "failed":
            loss = run["reason"]
        if loss is None:
            return
        text = f"the result in {self.folder} is incomplete: {loss}"
        if error is None:
            raise MLBenchError(f"{text}: free space, or choose another folder, and run it again")
        # An exception here would hide how the training itself failed.
        logger.error("%s", text)

    def _join_late_lines(self) -> None:
        """Compute the result again while the folder has lines that it does not contain.

        It is called if the workers do not end together. The worker that has the lock looks again
        after releasing it. So a worker that finds it taken may leave.
        """
        try:
            while (self.folder / RESULT).exists() and any(self.folder.glob("metrics.rank-*.jsonl")):
                with lock(self.folder / ".lock", wait=False):
                    finish_folder(self.folder)
        except TimeoutError:
            return
        except (NotImplementedError, OSError, ValueError, MLBenchError) as problem:
            logger.error("the result in %s lacks lines of other workers: %s", self.folder, problem)

    def _claim(self) -> None:
        """Keep other runs out of the folder until this one ends, so that their lines do not mix."""
        try:
            self._claimed.enter_context(lock(self.folder / ".lock", wait=False))
        except TimeoutError as error:
            raise ConfigurationError(
                f"another run is writing to {self.folder}: "
                "give another --run_id, or wait until it has ended"
            ) from error
        except NotImplementedError:
            logger.debug("%s is on a file system without locks", self.folder)

    def _who_shares_the_folder(self) -> list[bool]:
        """Return for each rank if its folder is that of rank 0; all workers get the same answer."""
        if self._workers.size == 1:
            return [True] * (self._rank + 1)
        name = f".shared-{os.urandom(8).hex()}"
        if self._rank == 0:
            mark = self.folder / name
            mark.touch()
        name = self._workers.broadcast(name.encode(), 0).decode()
        seen = [0] * self._workers.size
        seen[self._rank] = int((self.folder / name).exists())
        seen = self._workers.sum(seen)
        if self._rank == 0:
            mark.unlink()
        return list(map(bool, seen))

    def _bring_lines(self) -> None:
        """Copy the raw lines of workers on other hosts to the folder of rank 0."""
        if self._workers.size == 1:
            return
        # Rank 0 must not join the files before every worker has written its last line.
        self._workers.sum([0])
        for sender, shares in enumerate(self._sharing):
            if shares:
                continue
            path = lines_path(self.folder, sender)
            kept, content = path.with_name(f"sent-{path.name}"), b""
            if self._rank == sender:
                content = zlib.compress(path.read_bytes())
                # Out of the way before rank 0 writes its copy: if the folders are the same after
                # all, because a network file system showed the mark too late, the copy must not be
                # removed below.
                path.replace(kept)
            content = self._workers.broadcast(content, sender)
            if self._rank == 0:
                path.write_bytes(zlib.decompress(content))
            elif self._rank == sender:
                kept.unlink()


def _check_same_settings(folder: Path, configuration: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other settings: one result is that of one training.

    Raises:
        ConfigurationError: A setting differs.
    """
    try:
        earlier = read_result(folder)["configuration"]
    except ConfigurationError:
        # Nothing is left of the first part, so there is nothing to mix with.
        return
    before, now = _fixed_settings(earlier), _fixed_settings(configuration)
    differences = []
    for name in {**before, **now}:
        then, here = before.get(name), now.get(name)
        if then != here:
            differences.append(f"{name} was {_setting_text(then)} and is {_setting_text(here)}")
    if differences:
        raise ConfigurationError(
            f"the resumed run has other settings than its first part in {folder}, because "
            f"{'; '.join(differences)}: give the same settings, or start a new run without --resume"
        )


def _fixed_settings(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must keep."""
    options = configuration.get("options") or {}
    settings = {name: value for name, value in options.items() if name not in FREE_OPTIONS}
    for name in _FIXED_SETTINGS:
        settings[name] = configuration.get(name)
    # As JSON has them: a tuple of the command line is a list in the file.
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _setting_text(value: Any) -> str:
    if value is None:
        return "not set"
    return repr(value)
