"""All-reduce of gradients while the backward pass still computes others."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import refuse_sparse, trainable
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation, Transfer
from mlbench_core.aggregation.pytorch.buckets import Bucket, Signature, plan_buckets, signature
from mlbench_core.aggregation.pytorch.timing import CommunicationClock, Interval
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers

__all__ = ["BUCKET_SIZE_BYTES", "OverlappedReduction"]

BUCKET_SIZE_BYTES = 1 << 20
"""Size at which a bucket is sent: 1 MiB. benchmarks/micro/RESULTS.md has the sizes that were tried."""


@dataclass
class _Pass:
    """The state of one backward pass: gradients that arrived and messages on their way.

    Attributes:
        graph_task: Autograd's number of the pass.
        missing: By bucket, the number of gradients that are still to come.
        interval: Its time and bytes.
        is_own_work: True if a poll of the transfers also advances them, and so takes time (shared memory).
        transfers: The messages that were sent, in the order of the buckets.
        landed: Number of transfers that are known to have arrived.
        absent: By bucket, the positions of parameters that have no gradient on this worker.
    """

    graph_task: int
    missing: list[int]
    interval: Interval
    is_own_work: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    landed: int = 0
    absent: list[list[int]] = field(default_factory=list)

    def note_arrivals(self) -> None:
        """Count the transfers that have arrived, up to the first one that has not."""
        if self.landed < len(self.transfers):
            with self.interval.exposed() if self.is_own_work else contextlib.nullcontext():
                while self.landed < len(self.transfers) and self.transfers[self.landed].work.is_completed():
                    self.note_arrival()

    def note_arrival(self) -> None:
        self.landed += 1
        self.interval.lands()


class OverlappedReduction:
    r"""A reduction of a model's gradients over the workers during the backward passes.

    Gradients are grouped in flat buckets (:mod:`mlbench_core.aggregation.pytorch.buckets`). A hook on each parameter
    sends a bucket when its last gradient is there and all buckets before it were sent. So the order of messages is the
    same on all workers, whatever the order of gradients. At the end of the backward pass the remaining buckets are
    sent, with zeros for parameters that took no part. ``backward()`` returns once all buckets are reduced. Gradients
    can then be read, clipped or accumulated on as without communication.

    Without ``waits_in_backward``, ``backward()`` returns at once, and :meth:`arrivals` yields the parameters as their
    averages arrive. Communication then also overlaps the update. Until the end of :meth:`arrivals`, or until
    :meth:`synchronize`, gradients must not be touched.

    A second pass before the step accumulates its gradient on an average, which gives the same average:
    :math:`\frac1k\sum_i (\bar g + g'_i) = \bar g + \frac1k\sum_i g'_i`. With :meth:`no_sync` passes accumulate
    locally and the next one sends the sum.

    :meth:`complete` reduces gradients that no backward pass has reduced (set by hand, or a worker without a batch). It
    sends the same messages as a backward pass, so workers with a pass and workers without one fit together.

    Args:
        model: The model. Its parameters may be frozen, converted or replaced between two steps, on all workers; the
            buckets follow at the next backward pass or step.
        aggregation: The all-reduce that sends the buckets and counts the bytes.
        bucket_size_bytes: A bucket is sent when it holds at least this number of bytes; larger gradients travel alone.
        waits_in_backward: If True, ``backward()`` returns only when all gradients are averages.

    References:
        S. Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv:2006.15704
    """

    def __init__(
        self,
        model: nn.Module,
        aggregation: AllReduceAggregation,
        bucket_size_bytes: int = BUCKET_SIZE_BYTES,
        waits_in_backward: bool = True,
    ) -> None:
        self._model = model
        self._aggregation = aggregation
        self._bucket_size_bytes = bucket_size_bytes
        self.waits_in_backward = waits_in_backward
        self._synchronizes = True
        self._start()

    def _start(self) -> None:
        """Set up everything that belongs to this process."""
        self._clock = CommunicationClock()
        self._pass: _Pass | None = None
        self._is_reduced = False
        self._counts_anew = True
        self._signature: Signature = ()
        self._buckets: list[Bucket] = []
        self._place: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._lay_out()

    # ------------------------------------------------------------------ interface for optimizers

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes in the block locally."""
        before = self._synchronizes  # blocks may be nested
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    def complete(self) -> None:
        """Ensure that all gradients are averages over the workers, and mark them as consumed.

        Nothing is left to do after a backward pass that waited.
        """
        for _ in self.arrivals():
            pass

    def arrivals(self, as_sums: bool = False) -> Iterator[tuple[list[Tensor], bool]]:
        """Do as :meth:`complete`, and yield parameters as soon as their gradients are there.

        Args:
            as_sums: Leave a division by the number of workers that is not done yet to the caller. An optimizer can
                divide in its own pass over the gradients.

        Yields:
            Parameters, each once, and True if their gradients are sums that the caller must divide.
        """
        if self._pass is None and self._is_reduced:
            yield [parameter for bucket in self._buckets for parameter in bucket.parameters], False
        else:  # the pass has not waited, or has raised an error half way
            yield from self._receive(self._pass or self._open(-1), as_sums)
        self.forget()

    def average(self) -> None:
        """Ensure that all gradients are averages: wait for the last backward pass, and send all unsent gradients.

        Every worker must call it before the same step: it sends the messages that the others' passes have sent.
        """
        self.synchronize()
        if not self._is_reduced:
            for _ in self._receive(self._open(-1)):
                pass

    def synchronize(self) -> None:
        """Wait until the gradients of the last backward pass are averages."""
        if self._pass is not None:
            for _ in self._receive(self._pass):
                pass

    @property
    def is_reduced(self) -> bool:
        """Return whether all gradients are averages already."""
        return self._is_reduced and self._pass is None

    def forget(self) -> None:
        """Mark the gradients as consumed: those at the next step were not reduced."""
        self._is_reduced = False
        self._counts_anew = True

    def report(self, tracker: Any | None) -> None:
        """Report the finished communication to a tracker."""
        self._clock.report(tracker)

    # ------------------------------------------------------------------ during a backward pass

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient that the backward pass has accumulated; send the buckets that are full."""
        if not self._synchronizes:
            self._is_reduced = False
            return
        graph_task = torch_private.current_backward_pass()
        if self._pass is None or self._pass.graph_task != graph_task:
            # This pass runs inside another one (checkpointing), or follows one that raised an error. The messages
            # of the other pass must go first: every worker sends them in one order.
            self.synchronize()
            self._open(graph_task)
            torch_private.call_after_backward(self._end_of_pass)
        current = self._pass
        assert current is not None
        bucket = self._place.get(id(parameter))
        if bucket is None:  # the hook of a parameter that the last layout no longer has
            return
        if bucket < len(current.transfers):
            raise RuntimeError(
                "a parameter got a gradient twice in one backward pass, after its first one was sent (does a module "
                "run another backward pass inside?): use overlap=False, or checkpoint(..., use_reentrant=False)"
            )
        current.missing[bucket] -= 1
        current.note_arrivals()
        self._send_full(current)

    def _before_gradient(self, gradient: Tensor) -> None:
        """Wait for the last pass before another one accumulates on a gradient that is on its way."""
        if self._pass is not None and self._pass.graph_task != torch_private.current_backward_pass():
            self.synchronize()

    def _end_of_pass(self) -> None:
        """Send the remaining buckets, and wait for all of them if ``waits_in_backward`` is set."""
        if self._pass is None:  # a pass inside this one has sent it
            return
        self._send_rest(self._pass)
        if self.waits_in_backward:
            self.synchronize()

    def _open(self, graph_task: int) -> _Pass:
        # A change is noticed here and nowhere else: workers with and without a backward pass both come to this point.
        if self._has_changed():
            self._lay_out()
        if self._counts_anew:
            self._aggregation.last_bytes = 0
            self._counts_anew = False
        within = "backprop" if graph_task >= 0 and self.waits_in_backward else None
        missing = [len(bucket.parameters) for bucket in self._buckets]
        self._pass = _Pass(graph_task, missing, Interval(self._device, within), self._aggregation.shared_memory)
        return self._pass

    def _send_full(self, current: _Pass) -> None:
        """Send the buckets that are full, in their order; the last one waits for the end of the pass."""
        position = len(current.transfers)
        while position < len(self._buckets) - 1 and current.missing[position] <= 0:
            self._send(current, self._buckets[position])
            position += 1

    @naming_lost_workers()
    def _send(self, current: _Pass, bucket: Bucket) -> None:
        # A hook only counts gradients, so this is the first place that sees their layout.
        refuse_sparse(dict(zip(bucket.names, bucket.parameters, strict=True)))
        current.interval.sends()
        with current.interval.exposed():
            message = bucket.fill(self._aggregation.world_size if self._divides_early(bucket) else None)
            if bucket.flags is not None:
                self._write_flags(bucket.flags)
            current.transfers.append(self._aggregation.start(message))
            current.interval.size_bytes += current.transfers[-1].size_bytes

    def _divides_early(self, bucket: Bucket) -> bool:
        """Return whether a bucket is divided by the number of workers before it is sent."""
        return bool(bucket.parameters) and self._aggregation.divides_early(bucket.parameters[0].dtype)

    def _write_flags(self, flags: Tensor) -> None:
        present = [float(p.grad is not None) for bucket in self._buckets for p in bucket.parameters]
        flags.copy_(torch.tensor(present, dtype=flags.dtype))

    @torch.no_grad()
    def _send_rest(self, current: _Pass) -> None:
        if len(current.transfers) < len(self._buckets):
            current.absent = [
                [j for j, p in enumerate(bucket.parameters) if p.grad is None] for bucket in self._buckets
            ]
            for bucket in self._buckets[len(current.transfers) :]:
                self._send(current, bucket)

    def _receive(self, current: _Pass, as_sums: bool = False) -> Iterator[tuple[list[Tensor], bool]]:
        """Wait for the messages; yield parameters with averages whenever others are still to come."""
        self._send_rest(current)
        # Cleared before the waits, so that an error in them does not leave a stale pass behind.
        self._pass = None
        early = [self._divides_early(bucket) for bucket in self._buckets]
        # One division by the caller must fit all buckets, so sums are left only if no bucket was divided early.
        are_sums = as_sums and not any(early)
        there: list[Tensor] = []
        for i, bucket in enumerate(self._buckets):
            self._await(current, i, divides=not (early[i] or are_sums))
            there += [p for j, p in enumerate(bucket.parameters) if j not in current.absent[i]]
            # Buckets that have arrived meanwhile are updated together: fewer and larger steps of the optimizer.
            current.note_arrivals()
            if there and current.landed <= i + 1 < len(self._buckets):
                yield there, are_sums
                there = []
        there += self._adopt(current)  # last, because the flags travel in the last bucket
        if there:
            yield there, are_sums
        self._clock.add(current.interval)
        self._is_reduced = True

    @torch.no_grad()
    @naming_lost_workers()
    def _await(self, current: _Pass, position: int, divides: bool) -> None:
        """Wait for one bucket, and divide it by the number of workers if ``divides`` is set."""
        bucket, transfer = self._buckets[position], current.transfers[position]
        with current.interval.exposed():
            self._aggregation.finish(transfer)
            if divides:
                transfer.message.div_(self._aggregation.world_size)
            bucket.deliver()
        if position >= current.landed:
            current.note_arrival()

    @torch.no_grad()
    def _adopt(self, current: _Pass) -> list[Tensor]:
        """Give parameters without a gradient the average of the other workers; return those that got one."""
        if not any(current.absent):
            return []
        flags = self._buckets[-1].flags
        assert flags is not None
        present = flags.abs().tolist()
        adopted, offset = [], 0
        for i, bucket in enumerate(self._buckets):
            for j in current.absent[i]:
                if present[offset + j] > 0:
                    bucket.adopt(j, current.transfers[i].message)
                    adopted.append(bucket.parameters[j])
            offset += len(bucket.parameters)
        return adopted

    # ------------------------------------------------------------------ layout

    @property
    def _device(self) -> torch.device:
        return self._buckets[0].parameters[0].device if self._buckets[0].parameters else torch.device("cpu")

    def _has_changed(self) -> bool:
        """Return whether the model's parameters or gradients differ from those in the buckets."""
        is_intact = all(bucket.is_intact() for bucket in self._buckets)
        return not is_intact or signature(dict(trainable(self._model))) != self._signature

    def _lay_out(self) -> None:
        """Create the buckets and the hooks again."""
        parameters = dict(trainable(self._model))
        self._remove_hooks()
        self._signature = signature(parameters)
        self._buckets = plan_buckets(parameters, self._bucket_size_bytes, self._aggregation.comm_dtype)
        self._place = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        after, before = _hooks_of(weakref.ref(self))
        self._hooks = [p.register_post_accumulate_grad_hook(after) for p in parameters.values()]
        if not self.waits_in_backward:
            self._hooks += [p.register_hook(before) for p in parameters.values()]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __del__(self) -> None:
        self._remove_hooks()

    def __getstate__(self) -> dict[str, Any]:
        """Return the model and the settings, because hooks, buckets and messages belong to this process."""
        kept = ("_model", "_aggregation", "_bucket_size_bytes", "waits_in_backward", "_synchronizes")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _hooks_of(
    reduction: weakref.ref[OverlappedReduction],
) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
    """Make hooks for after and before a gradient is accumulated, which do not keep the reduction alive."""

    def after(parameter: Tensor) -> None:
        alive = reduction()
        if alive is not None:
            alive._on_gradient(parameter)

    def before(gradient: Tensor) -> None:
        alive = reduction()
        if alive is not None:
            alive._before_gradient(gradient)

    return after, before
