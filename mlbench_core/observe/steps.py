"""Divide the time of a training script into steps and their phases.

A step ends with the step of the optimizer, and the next one begins there::

    end of step -> [other] -> fetch -> [batch_load] -> fetched -> [fwd_pass] -> backward()
        -> [backprop] -> end of backward() -> [opt_step: clipping too] -> optimizer.step()
        -> [opt_step] -> end of step

A wait for a collective in between is ``agg``. An evaluation is outside all of them. A script that
makes no ``torch.optim.Optimizer`` updates its weights by hand. Then the backward passes end steps.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlbench_core.observe.communication.traffic import Traffic
from mlbench_core.observe.host_times import BATCH_END, HostTimes
from mlbench_core.observe.samples import count_data
from mlbench_core.processor_time import work_s
from mlbench_core.tracking.clock import cuda_in_use
from mlbench_core.tracking.tracker import Tracker

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["StepClock"]

# With several optimizers, the last one of a cycle ends the step. It is known as soon as all of them
# have stepped. One that takes none in this number of steps counts as unused; with more than 8
# optimizers, in twice their number.
_LONGEST_CYCLE = 16
# Marks of the host's clock that are kept before they are added up, about 1 MB.
_MOST_MARKS = 10_000
_NO_ARGUMENTS: Mapping[str, Any] = {}


class StepClock:
    """The clock of one worker's training steps, which feeds a tracker.

    Training begins with the first batch that is fetched, the first forward pass of DDP or the first
    backward pass, so that the preparation of the script is outside of it. An interval of steps is
    an epoch of the tracker. The first step is the first interval.

    Args:
        tracker: Receives times and counts.
        traffic: The communication of this worker.
        read_losses: Called at the end of an interval.
        end_step: Called at the end of a step, with the number of steps before it and the seconds
            since the first batch.
        on_begin: Called before training begins.
        interval_s: Seconds of an interval.
        exchange: Called with the last optimizer of a step before the step ends, and outside of
            training after each optimizer. If a forward pass of DDP follows the step of another
            optimizer, it is called before this pass.

    Attributes:
        is_open: True while training time is measured: since the first batch, outside evaluations.
        is_waiting: True during a wait for a collective.
        is_in_backward: True during a backward pass.
        has_optimizer: True after the script has made an optimizer.
        has_fetched: True after the first training batch of a DataLoader.
        may_evaluate: True after a forward pass without gradients. A next batch or gradients then
            show if it was an evaluation.
        optimizer_depth: Number of optimizers whose steps run now, one inside the other.
        thread: The thread of the steps.
        stream: The CUDA stream with their events; None without a device.
        steps: Number of finished steps.
        began_s: Time of the first batch on :func:`time.perf_counter`; None before.
        thread: The thread that trains, as :func:`threading.get_ident` names it.
    """

    def __init__(
        self,
        tracker: Tracker,
        traffic: Traffic,
        read_losses: Callable[[], None],
        end_step: Callable[[tuple[int, float]], None],
        on_begin: Callable[[], None],
        interval_s: float = 1.0,
        exchange: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self.tracker = tracker
        self._host_times = HostTimes(tracker)
        self._times: HostTimes | Tracker = self._host_times
        self._mark: Callable[[tuple[str, float]], None] = self._host_times.marks.append
        self.traffic = traffic
        self.is_open = False
        self.is_waiting = False
        self.is_in_backward = False
        self.is_evaluating = False
        self.steps = 0
        self._steps_before = 0
        self.has_optimizer = self.has_fetched = False
        # Of this step, and of the steps that the tracker does not know yet.
        self._samples = self._tokens = 0
        # Of the batches that no backward pass has used yet, and the loader of the last one.
        self._fetched_samples = self._fetched_tokens = self._loader = 0
        # Without a DataLoader: the model whose inputs are these batches.
        self._first_model = 0
        # Of the last batches that were fetched in an evaluation, and their loader.
        self._seen_samples = self._seen_tokens = self._seen_loader = 0
        self._steps_samples = self._steps_tokens = 0
        self.began_s: float | None = None
        self._start_s = 0.0
        self.optimizer: torch.optim.Optimizer | None = None
        self._read_losses = read_losses
        self._end_step = end_step
        self._on_begin = on_begin
        self._exchange = exchange
        # The optimizer whose step no exchange has followed yet.
        self._owed: weakref.ref[Any] | None = None
        self._interval_s = interval_s
        self._interval_end_s = 0.0
        self.thread = threading.get_ident()
        self.stream: Any = None
        # The step of the tracker that the time until the next event belongs to.
        self._label = "other"
        self.optimizer_depth = 0
        self._is_in_closure = False
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waited_for: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waits = False
        self._last: weakref.ref[Any] | None = None
        self._since_last = 0
        self._fetched_in_evaluation = False
        self.may_evaluate = False
        self._wait_cpu_s = 0.0

    def begin(self) -> None:
        """Begin training."""
        self._on_begin()
        self.tracker.start()
        self.began_s = self._start_s = perf_counter()
        self._choose_clock()
        self.is_open = True

    def _choose_clock(self, again: bool = False) -> None:
        # The events of a device are recorded where they happen.
        if self.tracker.prepare(again):
            self._times, self._mark = self.tracker, self._mark_on_device
            import torch

            if torch.cuda.is_initialized():
                self.stream = torch.cuda.current_stream()
        self._times.batch_start()

    def _mark_on_device(self, mark: tuple[str, float]) -> None:
        name, _ = mark
        if name != BATCH_END:
            self.tracker.record_batch_step(name)
            return
        self.tracker.record_batch_step("other")
        self.tracker.batch_end()

    # ------------------------------------------------------------------ data and passes

    def fetch_begins(self, is_training: bool) -> None:
        """Note that the script asks for a batch.

        Args:
            is_training: True if gradients are enabled.
        """
        if is_training:
            if self.may_evaluate:
                # No backward pass has used the last batch.
                self._fetched_samples = self._fetched_tokens = 0
            if self._fetched_in_evaluation or self.may_evaluate:
                self._seen_samples = self._seen_tokens = 0
                self.end_evaluation()
            if self.began_s is None:
                self.begin()
        elif self.began_s is not None:
            self.begin_evaluation()
            self._fetched_in_evaluation = self.is_evaluating
        if self.is_open:
            self._mark((self._label, perf_counter()))
            # A script without steps, such as an evaluation that forgot no_grad(), ends no interval.
            if len(self._host_times.marks) > _MOST_MARKS:
                self._host_times.add_up()

    def fetch_ends(self, batch: Any, loader: int, dimension: int) -> None:
        """Note that the script has a batch, or that the data has ended.

        Args:
            batch: The batch; None at the end.
            loader: The id of the DataLoader.
            dimension: The dimension of the samples in the batch.
        """
        if self.is_open:
            self._mark(("batch_load", perf_counter()))
            self.has_fetched = True
            # After the last batch, a script may save a checkpoint.
            self._label = "other"
            if batch is not None:
                self._label = "fwd_pass"
                samples, tokens = count_data(batch, dimension)
                self._fetched_samples += samples
                self._fetched_tokens += tokens
                self._loader = loader
        elif self.is_evaluating and loader != self._loader:
            # A script may call train() after it has fetched the next batch.
            if batch is None or self._fetched_in_evaluation or loader != self._seen_loader:
                self._seen_samples = self._seen_tokens = 0
                self._seen_loader = loader
            if batch is not None and not self._fetched_in_evaluation:
                samples, tokens = count_data(batch, dimension)
                self._seen_samples += samples
                self._seen_tokens += tokens
        elif self.is_evaluating and batch is not None and not self._fetched_in_evaluation:
            # The loader that trained is read on.
            samples, tokens = count_data(batch, dimension)
            self._fetched_samples += samples
            self._fetched_tokens += tokens

    def loading_begins(self, is_training: bool) -> None:
        """Note that the script makes an iterator of a DataLoader, which may start its workers.

        Args:
            is_training: True if gradients are enabled.
        """
        # Those of the first iterator start before training.
        if self.began_s is not None:
            self.fetch_begins(is_training)

    def loading_ends(self) -> None:
        """Note that the script has an iterator of a DataLoader."""
        if self.is_open:
            self._mark(("batch_load", perf_counter()))

    def read_again(self, loader: int) -> None:
        """Note that the script reads a DataLoader from its beginning.

        Batches of it that no backward pass has used were read for another reason, such as their
        number or their shape.

        Args:
            loader: The id of the DataLoader.
        """
        if loader == self._loader:
            self._fetched_samples = self._fetched_tokens = 0
            if self.is_evaluating:
                # It may be an evaluation with the training data.
                self._loader = 0

    def forward_begins(self, model: int, inputs: Any) -> None:
        """Note that DDP begins its forward pass.

        Args:
            model: The id of the DDP model.
            inputs: Its arguments. Their samples count if the script reads no DataLoader.
        """
        # The last optimizer of a step may not be known yet, or take no steps any more.
        if self._owed is not None and self.optimizer_depth == 0:
            self._exchange_owed()
        if self.may_evaluate:
            # The pass without gradients was a part of this step, as for pseudo-labels.
            self._training_goes_on()
            self._label = "fwd_pass"
        if self.began_s is None:
            self.begin()
        if self._label == "other":
            self._mark(("other", perf_counter()))
            self._label = "fwd_pass"
        if self.has_fetched:
            return
        if not self._fetched_samples:
            self._first_model = model
        # The models after the first one, such as a decoder, mostly read its results.
        if model == self._first_model:
            samples, tokens = count_data(inputs)
            self._fetched_samples += samples
            self._fetched_tokens += tokens

    def forward_without_gradients(self) -> None:
        """Note a forward pass of DDP without gradients.

        It is an evaluation if the script fetches its next batch before it computes gradients.
        """
        self.begin_evaluation()
        self.may_evaluate = self.is_evaluating

    def gather_begins(self) -> None:
        """Note an all-gather before the first batch: with FSDP2, the first forward pass begins."""
        if self._known:
            self.begin()
            self._label = "fwd_pass"

    def backward_begins(self) -> None:
        """Note that a backward pass begins."""
        if self.is_evaluating:
            self._training_goes_on()
        if self.began_s is None:
            self.begin()
        # A script may look at a batch before it uses CUDA.
        elif self.steps == 0 and self._times is self._host_times and cuda_in_use():
            self._mark(("fwd_pass", perf_counter()))
            self._host_times.pass_on()
            self._choose_clock(again=True)
        self.is_in_backward = True
        if self._fetched_samples:
            self._use_batches()
        before = "fwd_pass"
        # A backward pass that an optimizer runs itself, outside a closure, is a part of its step.
        if self._is_stepping():
            before = "opt_step"
        self._mark((before, perf_counter()))
        self._label = "backprop"

    def backward_ends(self) -> None:
        """Note that a backward pass has ended."""
        self.is_in_backward = False
        self._mark(("backprop", perf_counter()))
        self._label = "other"
        if self._is_stepping():
            self._label = "opt_step"
        self.traffic.end_backward()
        if not self.has_optimizer:
            self.end_step()

    def _use_batches(self) -> None:
        self._samples += self._fetched_samples
        self._tokens += self._fetched_tokens
        self._fetched_samples = self._fetched_tokens = 0

    def backward_fails(self) -> None:
        """Note that an exception leaves a backward pass, perhaps because a worker is lost."""
        self.is_in_backward = False
        self.traffic.forget_backward()

    # ------------------------------------------------------------------ waiting

    def wait_begins(self) -> None:
        """Note that training waits for a collective."""
        self.is_waiting = True
        self._mark((self._label, perf_counter()))
        self._wait_cpu_s = work_s()

    def wait_ends(self) -> None:
        """Note that training goes on after a collective."""
        self.is_waiting = False
        self.traffic.worked_s += work_s() - self._wait_cpu_s
        self._mark(("agg", perf_counter()))
        if len(self._host_times.marks) > _MOST_MARKS:
            self._host_times.add_up()

    # ------------------------------------------------------------------ the optimizer

    def add_optimizer(self, optimizer: Any) -> None:
        """Note that the script has made an optimizer."""
        self.has_optimizer = True
        # One that is made in the middle of a step is a part of another one, or of a method.
        if self.optimizer_depth or self.is_in_backward:
            return
        self._known.add(optimizer)
        self._waited_for.add(optimizer)
        self._waits = True

    def trains(self, module: nn.Module) -> bool:
        """Return True if an optimizer of the script has parameters of a module.

        Without an optimizer, a module that needs gradients counts.
        """
        if not self.has_optimizer:
            return any(param.requires_grad for param in module.parameters())
        params = set(map(id, module.parameters()))
        for optimizer in self._known:
            for group in optimizer.param_groups:
                if any(id(param) in params for param in group["params"]):
                    return True
        return False

    def before_optimizer(
        self, optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NO_ARGUMENTS
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note that the step of an optimizer begins; a hook for all optimizers of torch.

        Args:
            optimizer: The optimizer.
            args: The arguments of its step, itself first.
            kwargs: More of them.

        Returns:
            The arguments with an observed closure; None for those without one.
        """
        if self.optimizer_depth:
            # After an exception in a step, torch calls no hook.
            self.optimizer_depth = _steps_around(inspect.currentframe())
        self.optimizer_depth += 1
        self.has_optimizer = True
        if self.optimizer_depth == 1 and self.is_open:
            if self.is_in_backward:
                self._mark(("backprop", perf_counter()))
            # The time since the end of the backward pass is that of clipping and of unscaling. It
            # has the same label, so the mark at the end of the optimizer's step is enough.
            self._label = "opt_step"
        if self.optimizer_depth > 1:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._observed_closure(args[1]), *args[2:]), dict(kwargs)
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._observed_closure(kwargs["closure"])}
        return None

    def _observed_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose forward pass is none of the optimizer's work."""

        @functools.wraps(closure, updated=())
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self.is_open:
                self._mark(("opt_step", perf_counter()))
            self._label, self._is_in_closure = "fwd_pass", True
            try:
                return closure(*args, **kwargs)
            finally:
                # The time after the backward pass is again that of clipping.
                if self._label == "fwd_pass" and self.is_open:
                    self._mark(("fwd_pass", perf_counter()))
                self._label, self._is_in_closure = "opt_step", False

        return observed

    def _is_stepping(self) -> bool:
        """Return True in the step of an optimizer, outside its closure."""
        return self.optimizer_depth > 0 and not self._is_in_closure

    def after_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Note that the step of an optimizer has ended; a hook for all optimizers of torch."""
        # A set that is empty once stays empty until the script makes an optimizer. Before training,
        # a function of a checkpoint may take steps to create the state, in another order.
        if self._waits and self.is_open:
            self._waited_for.discard(optimizer)
            self._waits = bool(self._waited_for)
        # An optimizer that steps inside another one is a part of it.
        if self.optimizer_depth > 1:
            self.optimizer_depth -= 1
            return
        # Steps outside of training have no order.
        ends_step = not self.is_open or self._ends_step(optimizer)
        self._owed = weakref.ref(optimizer)
        if ends_step:
            # An optimizer that a method has is a part of this step, too.
            self._exchange_owed()
        self.optimizer_depth = 0
        if not self.is_open:
            return
        self._mark(("opt_step", perf_counter()))
        self._label = "other"
        # A step in a hook of a parameter ends within the backward pass.
        if self.is_in_backward:
            self._label = "backprop"
        if ends_step:
            self.optimizer = optimizer
            self.end_step()

    def _exchange_owed(self) -> None:
        """Do the exchange after the latest step of an optimizer, if there was none yet."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        optimizer = owed()
        if optimizer is not None:
            self._exchange(optimizer)

    def _ends_step(self, optimizer: Any) -> bool:
        """Return True if an optimizer is the last one of the cycle."""
        last = None
        if self._last is not None:
            last = self._last()
        if last is optimizer:
            self._since_last = 0
            return True
        self._since_last += 1
        longest = max(_LONGEST_CYCLE, 2 * len(self._known))
        if self._waits and self._since_last < longest:
            return False
        # All have stepped, or the last one so far is not used any more.
        if last is None or self._waits or self._since_last >= longest:
            self._waited_for.clear()
            self._waits = False
            self._last = weakref.ref(optimizer)
            self._since_last = 0
            return True
        return False

    def end_step(self) -> None:
        """End a step, and the interval if it is due."""
        now = perf_counter()
        self._end_step((self.steps, now - self._start_s))
        # A step without a backward pass, such as one with torch.autograd.grad.
        if self._fetched_samples and not self._samples:
            self._use_batches()
        self._steps_samples += self._samples
        self._steps_tokens += self._tokens
        self._samples = self._tokens = 0
        self.steps += 1
        self.traffic.end_step()
        # The bookkeeping above belongs to the next step, so it has a phase too.
        self._mark((BATCH_END, now))
        is_due = now >= self._interval_end_s
        if is_due:
            self.end_interval()
            self._interval_end_s = now + self._interval_s
        # On the host's clock, the next batch began with the mark; the interval's end is outside.
        if is_due or self._times is self.tracker:
            self._times.batch_start()

    def end_interval(self) -> None:
        """End an interval: read the values of the device once, and pass all on to the tracker.

        Without a step since the last one, do nothing.
        """
        if self.steps == self._steps_before:
            return
        self._steps_before = self.steps
        # A loss may reach the goal, whose times are those that are booked by then.
        self.pass_on()
        self._read_losses()
        if self.optimizer is not None:
            self.tracker.learning_rate = _number(self.optimizer.param_groups[0].get("lr"))
        self.tracker.epoch_end()

    def pass_on(self) -> None:
        """Pass times, communication, and the data of the finished steps on to the tracker."""
        # A script may print a metric before it trains.
        if self.began_s is None:
            return
        if self._times is self._host_times:
            self._host_times.pass_on()
        self.traffic.end_interval(self.tracker)
        self.tracker.count(self._steps_samples, self._steps_tokens)
        self._steps_samples = self._steps_tokens = 0

    def close(self) -> None:
        """End the clock with the script, also in the middle of a step."""
        self.end_evaluation()
        if self.began_s is None:
            return
        # The part of a step after the last one has times too, which a new batch adds to the total.
        if self._times is self.tracker:
            self._times.batch_start()
        self.is_open = False
        self.traffic.end_step()
        self.pass_on()
        self.end_interval()

    # ------------------------------------------------------------------ evaluation

    def begin_evaluation(self) -> None:
        """Stop the clock of training for an evaluation."""
        if self.is_open and not self.is_in_backward and not self.optimizer_depth:
            self._mark((self._label, perf_counter()))
            self._times.validation_start()
            self.is_open, self.is_evaluating = False, True

    def end_evaluation(self) -> None:
        """Let the clock of training go on after an evaluation."""
        if self.is_evaluating:
            self._times.validation_end()
            self._training_goes_on()

    def _training_goes_on(self) -> None:
        # A model that trains in its evaluation mode begins an evaluation that a backward pass ends.
        # Its time stays training time.
        if self._fetched_in_evaluation:
            self._times.validation_end()
        self._fetched_in_evaluation = self.may_evaluate = False
        self._fetched_samples += self._seen_samples
        self._fetched_tokens += self._seen_tokens
        self._seen_samples = self._seen_tokens = 0
        self.is_open, self.is_evaluating = True, False
        self._label = "other"


def _steps_around(hook: FrameType | None) -> int:
    """Return the number of optimizers' steps that run around the one that has called a hook."""
    assert hook is not None and hook.f_back is not None, "torch calls the hooks in Python"
    # torch calls it in the function that it puts around the step of every optimizer.
    frame, count = hook.f_back, 0
    code = frame.f_code
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code is code
    return count


def _number(value: Any) -> float | None:
    """Return a number or a tensor of one as a float; None for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
