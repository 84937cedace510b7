"""Run ``python -m mlbench_core.observe``: observe a script, and write its result folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlbench_core.controlflow.run_results import RunFolder, Workers
from mlbench_core.distributed.environment import ClusterEnvironment, detect_environment
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.evaluation.goals import TimeToGoal
from mlbench_core.observe.options import USAGE, Options, parse_options
from mlbench_core.observe.output import watch_output
from mlbench_core.observe.script import check_script, end_as_python, run_script
from mlbench_core.observe.table import FAILED_EARLY, NO_STEP
from mlbench_core.paths import user_folder
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.environment import describe_environment
from mlbench_core.results.masking import mask_command_line
from mlbench_core.tasks import command_options
from mlbench_core.tracking.clock import cuda_in_use
from mlbench_core.tracking.process_end import call_at_end, delay_sigterm, forget, state_after
from mlbench_core.tracking.tracker import Tracker

__all__ = ["main"]


class _Stopped(BaseException):
    """SIGTERM, for the reason in the result."""


class _ObservedRun:
    """The result folder, the tracker and the observer of one worker."""

    def __init__(self, options: Options, environment: ClusterEnvironment) -> None:
        from mlbench_core.observe.methods.apply import make_method
        from mlbench_core.observe.observer import Observer
        from mlbench_core.observe.store_messages import StoreWorkers

        place = environment.place()
        self.rank, self.world_size = place.rank, place.world_size
        run_id = options.run_id or os.environ.get("MLBENCH_RUN_ID") or "1"
        self._workers: StoreWorkers | None = None
        if self.world_size > 1:
            self._workers = StoreWorkers(environment)
        machine = None
        # Rank 0 alone writes the description of machine and software.
        if self.rank == 0:
            machine = _environment(options)
        self.results = RunFolder(
            _folder(options, run_id),
            _configuration(options, self.world_size),
            run_id,
            self.rank,
            environment=machine,
            workers=self._workers or Workers(),
        )
        goal, self._goal_metric = None, None
        if options.goal is not None:
            aim = options.goal
            goal = TimeToGoal(str(aim.metric), float(aim.threshold or 0.0), bool(aim.minimize))
            self._goal_metric = goal.metric
        self.tracker = Tracker(
            [],
            run_id,
            self.rank,
            goal,
            minimize=goal is not None and goal.minimize,
            sinks=[self.results.sink],
            progress=False,
            unit="steps",
        )
        methods = []
        for choice in (options.method, options.optimizer):
            if choice is not None:
                method = make_method(choice)
                # The method "as-is" changes nothing, and has no object.
                if method is not None:
                    methods.append(method)
        self.observer = Observer(self.tracker, methods, on_begin=self._describe)
        self._metrics = options.metrics
        self._recorded: set[str] = set()
        watch_output(self._metrics, self._record)
        self._is_over = False

    def _describe(self) -> None:
        """Add to the configuration what is known only when training begins."""
        import torch

        from mlbench_core.distributed.pytorch import process_groups

        device = "cpu"
        if cuda_in_use():
            device = "cuda"
        self.results.sink.configure(
            {
                "backend": process_groups.backend(),
                "threads": torch.get_num_threads(),
                "device": device,
            }
        )

    def begin(self) -> None:
        """Begin to observe, and to look at the time if a sweep limits it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from mlbench_core.controlflow.pytorch.train_limit import TrainLimit
        from mlbench_core.observe.time_limit import ScriptLimit

        self.observer.__enter__()
        limit = TrainLimit()
        if limit.seconds is not None:
            # After the clock, so that a step is counted when the limit looks at it.
            clock, workers = self.observer.clock, self._workers
            script_limit = ScriptLimit(limit.seconds, clock, workers, self.rank)
            register_optimizer_step_post_hook(script_limit.after_step)

    def _record(self, name: str, value: float) -> None:
        tracker = self.tracker
        self._recorded.add(name)
        # The value may reach the goal, whose times are those that are booked by then.
        self.observer.clock.pass_on()
        if name == self._goal_metric:
            tracker.update_primary_metric(value)
        prefix, _, name = name.partition("_")
        was_training, tracker.is_training = tracker.is_training, prefix == "train"
        tracker.record_stat(name, value, log_to_api=self.rank == 0)
        tracker.is_training = was_training

    @delay_sigterm()
    def finish(self, error: BaseException | None) -> None:
        """Write the result and print the table; a second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        self.observer.__exit__()
        if self.observer.clock.steps == 0:
            # A script that trains nothing here has not done what was asked, even if it ends well.
            reason = FAILED_EARLY
            if error is None:
                reason, error = NO_STEP, MLBenchError(NO_STEP)
            unmeasured = [f"everything: {reason}"]
        else:
            unmeasured = self.observer.unmeasured(self.world_size)
            for metric in self._metrics:
                if metric.name not in self._recorded:
                    pattern = metric.regex.pattern
                    unmeasured.append(f"{metric.name}: no line of the output has {pattern!r}")
        if error is None:
            self.tracker.publish_summary(self.world_size)
        self.tracker.end(error=error)
        self.results.sink.add_to_end({"not_measured": unmeasured})
        try:
            self.results.end(error)
        finally:
            if self._workers is not None:
                self._workers.leave()
            if self.rank == 0:
                text = self.observer.table(self.world_size, unmeasured)
                sys.stdout.flush()
                sys.stderr.write(f"{text}\n  result: {self.results.folder}\n")


def main(words: Sequence[str] | None = None) -> None:
    """Observe a script.

    The process ends as the script would: with its traceback and its exit status. Errors of the
    options end it with status 2.

    Args:
        words: The command line; None for that of this process.
    """
    if words is None:
        words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"usage: python -m mlbench_core.observe {USAGE}\n")
        return
    try:
        options = parse_options(words)
        if not options.is_module:
            check_script(options.script)
        environment = detect_environment()
        place = environment.place()
        # A script finds its place in the variables of torchrun, however it was launched.
        for name, value in place.variables().items():
            if place.world_size > 1:
                os.environ.setdefault(name, value)
        run = _ObservedRun(options, environment)
    except MLBenchError as problem:
        sys.stderr.write(f"mlbench observe: error: {problem}\n")
        raise SystemExit(2) from None

    def stop(state: str) -> None:
        error = None
        if state == "stopped":
            error = _Stopped("the process was stopped")
        run.finish(error)

    call_at_end(stop)
    error: BaseException | None = None
    try:
        run.begin()
        run_script(options.script, options.arguments, options.is_module)
    except BaseException as raised:
        error = raised
    failed = None
    # A script may end well by sys.exit(), which is an exception too.
    if state_after(error) != "finished":
        failed = error
    try:
        run.finish(failed)
    except MLBenchError as problem:
        sys.stderr.write(f"mlbench observe: error: {problem}\n")
        raise SystemExit(1) from None
    finally:
        forget(stop)
    if isinstance(error, ConfigurationError):
        sys.stderr.write(f"mlbench observe: error: {error}\n")
        raise SystemExit(2)
    if error is not None:
        end_as_python(error)


def _folder(options: Options, run_id: str) -> Path:
    root = options.output or os.environ.get("MLBENCH_OUTPUT") or user_folder("output")
    return Path(root).expanduser().absolute() / Path(options.script).stem / run_id


def _configuration(options: Options, workers: int) -> Configuration:
    settings = command_options(mask_command_line(options.arguments))
    seed = str(settings.pop("seed", ""))
    if options.optimizer is not None:
        settings["optimizer"] = str(options.optimizer)
    goal = None
    if options.goal is not None:
        goal = options.goal.to_dict()
    seed_number = None
    if seed.isdecimal():
        seed_number = int(seed)
    return Configuration(
        workers=workers,
        program=Path(options.script).name,
        algorithm=str(options.method),
        options=settings,
        network=os.environ.get("MLBENCH_NETWORK") or None,
        goal=goal,
        seed=seed_number,
        unit="steps",
    )


def _environment(options: Options) -> dict[str, Any]:
    program = None
    if not options.is_module:
        program = Path(options.script)
    return describe_environment(program=program)
