"""Open the result folder of a script that leaves it to its Tracker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mlbench_core.distributed.worker_messages import Workers
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import is_file_name
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.environment import describe_environment
from mlbench_core.results.masking import mask_command_line
from mlbench_core.run_terms import GoalAim
from mlbench_core.tasks import command_options
from mlbench_core.tracking.clock import cuda_in_use
from mlbench_core.tracking.goal_report import TrackedRun
from mlbench_core.tracking.run_folder import RunFolder
from mlbench_core.tracking.sinks import Sink

__all__ = ["ScriptResults"]

# Arguments that differ between the workers, or name the run.
_NOT_OPTIONS = ("rank", "local_rank", "world_size", "hosts", "run_id", "seed")


class ScriptRun(TrackedRun, Protocol):
    """The part of a :class:`~mlbench_core.tracking.tracker.Tracker` that this module uses."""

    rank: int

    @property
    def history(self) -> Iterable[tuple[int, str, float, int, float]]:
        """Return the recent records."""


class ScriptResults:
    """The result folder that a tracker opens at its start and writes at its end.

    Args:
        results: The folder. With ``"auto"`` it is ``$MLBENCH_OUTPUT/SCRIPT/RUN_ID``, in which the
            master of the run finds it, or ``mlbench-results/RUN_ID`` if the variable is not set.
            None for no folder.

    Raises:
        TypeError: ``results`` has the wrong type.
    """

    def __init__(self, results: str | os.PathLike[str] | None) -> None:
        if not isinstance(results, str | os.PathLike | None):
            raise TypeError(f'results must be "auto", a folder or None, not {results!r}')
        self.results = results
        self._opened: RunFolder | None = None

    def open(self, tracker: ScriptRun, resume: bool) -> list[Sink]:
        """Open the folder and return the sink of its raw lines; every worker calls it together.

        The sink has received the statistics that the tracker has recorded before.

        Args:
            tracker: The tracker of the run, before its first batch.
            resume: True to continue the run in this folder.

        Raises:
            ConfigurationError: The folder cannot be written, another run writes to it, or there are
                several workers and no process group.
            ValueError: The run's id cannot name a folder.
        """
        if self.results is None:
            return []
        workers, settings = _workers()
        expected = max(int(os.environ.get("WORLD_SIZE") or 1), tracker.rank + 1)
        if workers.size == 1 < expected:
            raise ConfigurationError(
                f"results must be opened by all {expected} workers together, and they are not "
                "connected: start the Tracker after init_process_group()"
            )
        configuration = _configuration(tracker, workers.size, settings)
        environment = None
        if tracker.rank == 0:
            seeds = {}
            if configuration.seed is not None:
                seeds["seed"] = configuration.seed
            environment = describe_environment(seeds=seeds, program=Path(sys.argv[0]))
        self._opened = RunFolder(
            _folder(self.results, str(tracker.run_id)),
            configuration,
            str(tracker.run_id),
            tracker.rank,
            environment=environment,
            resume=resume,
            workers=workers,
        )
        if not resume:
            for epoch, name, value, batch, time_s in tracker.history:
                self._opened.sink.record(name, value, epoch, batch, time_s)
        return [self._opened.sink]

    def end(self, error: BaseException | None, alone: bool) -> None:
        """Write the result, see :meth:`~mlbench_core.tracking.run_folder.RunFolder.end`."""
        if self._opened is not None:
            self._opened.end(error, alone=alone)


def _folder(results: str | os.PathLike[str], run_id: str) -> Path:
    if results != "auto":
        return Path(results).absolute()
    if not is_file_name(run_id):
        raise ValueError(
            f"run_id must be a name for a folder, not {run_id!r}: "
            "use letters, digits, '-', '_' and '.'"
        )
    output = os.environ.get("MLBENCH_OUTPUT")
    if output:
        return Path(output, Path(sys.argv[0]).stem or "script", run_id)
    return Path("mlbench-results", run_id).absolute()


def _configuration(tracker: ScriptRun, workers: int, settings: Mapping[str, Any]) -> Configuration:
    options = command_options(mask_command_line(sys.argv[1:]))
    seed = str(options.get("seed"))
    kept = {name: value for name, value in options.items() if name not in _NOT_OPTIONS}
    device = "cpu"
    # NCCL works on GPUs only, also if this process has not used CUDA yet.
    if cuda_in_use() or settings.get("backend") == "nccl":
        device = "cuda"
    goal = None
    if tracker.goal is not None:
        goal = GoalAim.of(tracker.goal).to_dict()
    seed_number = None
    if seed.isdecimal():
        seed_number = int(seed)
    return Configuration(
        workers=workers,
        program=Path(sys.argv[0]).name or None,
        options=kept,
        device=device,
        network=os.environ.get("MLBENCH_NETWORK") or None,
        goal=goal,
        seed=seed_number,
        unit=tracker.unit,
        **settings,
    )


def _workers() -> tuple[Workers, dict[str, Any]]:
    """Return the workers, and the settings of torch if the process uses it."""
    # A script that has not imported torch cannot have a process group of it.
    if "torch" not in sys.modules:
        return Workers(), {}
    import torch

    from mlbench_core.distributed.pytorch.process_groups import backend
    from mlbench_core.distributed.pytorch.worker_messages import ProcessGroupWorkers

    return ProcessGroupWorkers(), {"backend": backend(), "threads": torch.get_num_threads()}
