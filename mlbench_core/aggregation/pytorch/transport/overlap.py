"""All-reduce of gradients while the backward pass still computes others.

The gradients of a model are in one of three states::

                first gradient of a backward pass, or
                complete() or average() without one
    +-------+ ------------------------------------> +---------+
    | local |                                       | sending |
    +-------+                                       +---------+
        ^                                             |     ^
        |                         end of the pass:    |     |  a gradient of
        |  forget(), or           send the remaining  |     |  another pass
        |  a gradient within      buckets, wait for   |     |
        |  no_sync()              all, divide         v     |
        |                                           +----------+
        +------------------------------------------ | averaged |
                                                    +----------+

In the state *sending*, each bucket is in one of three states:

* *filling*: it counts its missing gradients.
* *sent*: its last gradient has arrived, and all buckets before it were sent. So the order of
  messages is the same on all workers, whatever the order of gradients. The last bucket, with the
  flags, waits for the end of the pass.
* *received*: its sum has arrived and was divided by the number of workers. A parameter without a
  gradient on this worker then gets the average of the others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import parameters_of, refuse_sparse
from mlbench_core.aggregation.pytorch.all_reduce import AVG_WORLD, AllReduceAggregation, Transfer
from mlbench_core.aggregation.pytorch.transport.buckets import (
    Bucket,
    Signature,
    plan_buckets,
    signature,
)
from mlbench_core.aggregation.pytorch.transport.messages import as_real, divide
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers
from mlbench_core.distributed.pytorch.timing import CommunicationClock, Interval

__all__ = ["OverlappedReduction"]

# Takes the place of autograd's number of a pass if gradients are sent outside of one.
_NO_PASS = -1


@dataclass
class _Pass:
    """The state of one backward pass: missing gradients and sent messages.

    Attributes:
        graph_task: Autograd's number of the pass.
        missing: By bucket, the number of gradients that are still to come.
        interval: Its time and bytes.
        transfers: The messages that were sent, in the order of the buckets.
        received: Number of transfers that are known to have arrived.
    """

    graph_task: int
    missing: list[int]
    interval: Interval
    transfers: list[Transfer] = field(default_factory=list)
    received: int = 0


class OverlappedReduction:
    r"""A reduction of a model's gradients over the workers during the backward passes.

    Gradients are grouped in flat buckets
    (:mod:`mlbench_core.aggregation.pytorch.transport.buckets`). A hook on each parameter sends a
    bucket once it is full. At the end of the backward pass the remaining buckets are sent, with
    zeros for parameters that took no part. ``backward()`` returns once all buckets are reduced.
    Gradients can then be read, clipped or accumulated on as without communication.

    A second pass before the step accumulates its gradient on an average, which gives the same
    average: :math:`\frac1k\sum_i (\bar g + g'_i) = \bar g + \frac1k\sum_i g'_i`. With
    :meth:`no_sync` passes accumulate locally and the next one sends the sum.

    :meth:`complete` reduces gradients that no backward pass has reduced (set by hand, or a worker
    without a batch). It sends the same messages as a backward pass, so workers with a pass and
    workers without one fit together.

    Args:
        model: The model. Its parameters may be frozen, converted or replaced between two steps, on
            all workers; the buckets follow at the next backward pass or step.
        aggregation: The all-reduce that sends the buckets, has their settings, and counts the
            bytes.

    References:
        S. Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
        arXiv:2006.15704
    """

    def __init__(self, model: nn.Module, aggregation: AllReduceAggregation) -> None:
        self._model = model
        self._aggregation = aggregation
        self._synchronizes = True
        self._start()

    def _start(self) -> None:
        """Set up everything that belongs to this process."""
        self._clock = CommunicationClock()
        self._pass: _Pass | None = None
        self._is_reduced = False
        self._is_new_step = True
        self._signature: tuple[Signature, list[str]] = (), []
        self._frozen: list[str] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._lay_out()

    # ------------------------------------------------------------------ interface for optimizers

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes in the block locally."""
        # Blocks may be nested, and the inner one must not end the outer one.
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    def complete(self) -> None:
        """Ensure that all gradients are averages over the workers, and mark them as consumed.

        A gradient that was set by hand, after the backward pass, on a parameter that has always
        been frozen is dropped.
        """
        self.average()
        self.forget()
        parameters = parameters_of(self._model)
        for name in self._aggregation.layout.frozen_among(parameters):
            parameters[name].grad = None

    def average(self) -> None:
        """Ensure that all gradients are averages.

        Wait for an unfinished backward pass, and send unsent gradients.

        Every worker must call it before the same step: it sends the messages that the others'
        passes have sent.
        """
        self.synchronize()
        if not self._is_reduced:
            self._receive(self._open(_NO_PASS))

    def synchronize(self) -> None:
        """Wait until the gradients of a failed, unfinished backward pass are averages."""
        if self._pass is not None:
            self._receive(self._pass)

    @property
    def is_reduced(self) -> bool:
        """Return whether all gradients are averages already."""
        return self._is_reduced and self._pass is None

    def forget(self) -> None:
        """Mark the gradients as consumed: those at the next step were not reduced."""
        self._is_reduced = False
        self._is_new_step = True

    def report(self, tracker: Any | None) -> None:
        """Report the finished communication to a tracker."""
        self._clock.report(tracker)

    # ------------------------------------------------------------------ during a backward pass

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Count a gradient that the backward pass has accumulated; send full buckets."""
        if not self._synchronizes:
            # This gradient stays local, so those that were averages before no longer are.
            self._is_reduced = False
            return
        graph_task = torch_private.current_backward_pass()
        if self._pass is None or self._pass.graph_task != graph_task:
            # This pass runs inside another one (checkpointing), or follows one that
            # raised an error. The messages of the other pass must go first: every
            # worker sends them in one order.
            self.synchronize()
            self._open(graph_task)
            # Autograd calls it at the end of the pass, before backward() returns: only then is it
            # known which parameters took no part.
            torch_private.call_after_backward(self.synchronize)
        current = self._pass
        assert current is not None
        bucket = self._bucket_of.get(id(parameter))
        # The hook of a parameter that the last layout no longer has.
        if bucket is None:
            return
        if bucket < len(current.transfers):
            raise RuntimeError(
                "a parameter got a gradient twice in one backward pass, after its first one "
                "was sent (does a module run another backward pass inside?): use "
                "overlap=False, or checkpoint(..., use_reentrant=False)"
            )
        current.missing[bucket] -= 1
        self._note_arrivals(current)
        # The last bucket waits for the end of the pass, because it has the flags of all parameters.
        for i in range(len(current.transfers), len(self._buckets) - 1):
            # In the order of the buckets, which is the same on all workers: a full one waits for
            # those before it.
            if current.missing[i] > 0:
                break
            self._send(current, self._buckets[i])

    def _open(self, graph_task: int) -> _Pass:
        # A change is noticed here and nowhere else: workers with and without a backward pass both
        # come to this point.
        is_intact = all(bucket.is_intact() for bucket in self._buckets)
        parameters = parameters_of(self._model)
        layout = self._aggregation.layout
        self._aggregation.compare_models(parameters)
        current_signature = signature(parameters), layout.frozen_among(parameters)
        if not is_intact or current_signature != self._signature:
            self._lay_out()
        # A step may have several passes, and last_bytes counts the messages of all of them.
        if self._is_new_step:
            self._aggregation.last_bytes = 0
            self._is_new_step = False
        within = None
        if graph_task != _NO_PASS:
            within = "backprop"
        missing = []
        for bucket in self._buckets:
            missing.append(sum(1 for p in bucket.parameters if p.requires_grad))
        self._pass = _Pass(graph_task, missing, Interval(self._device, within))
        return self._pass

    def _note_arrivals(self, current: _Pass) -> None:
        """Count the transfers that have arrived, up to the first one that has not."""
        if current.received == len(current.transfers):
            return
        timed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._aggregation.shared_memory:
            # A poll also copies and sums up, which takes time from the backward pass.
            timed = current.interval.exposed()
        with timed:
            for transfer in current.transfers[current.received :]:
                if not transfer.work.is_completed():
                    return
                current.received += 1
                current.interval.finish_message()

    @naming_lost_workers()
    def _send(self, current: _Pass, bucket: Bucket) -> None:
        # A hook only counts gradients, so this is the first place that sees their layout.
        refuse_sparse(dict(zip(bucket.names, bucket.parameters, strict=True)))
        current.interval.start_message()
        with current.interval.exposed():
            divisor = None
            if self._divides_early(bucket):
                divisor = self._aggregation.world_size
            message = bucket.fill(divisor)
            if bucket.flags is not None:
                present = [float(p.grad is not None) for p in self._sent_parameters()]
                bucket.flags.copy_(torch.tensor(present, dtype=bucket.flags.dtype))
                self._aggregation.mark(bucket.flags, self._frozen)
            current.transfers.append(self._aggregation.start(message, overlapped=True))
            current.interval.size_bytes += current.transfers[-1].size_bytes

    def _divides_early(self, bucket: Bucket) -> bool:
        """Return whether a bucket is divided by the number of workers before it is sent."""
        if not bucket.parameters:
            return False
        return self._aggregation.divides_early(bucket.parameters[0].dtype)

    @torch.no_grad()
    @naming_lost_workers()
    def _receive(self, current: _Pass) -> None:
        """Send the remaining buckets, wait for all messages, and turn sums into averages."""
        for bucket in self._buckets[len(current.transfers) :]:
            self._send(current, bucket)
        # Cleared before the waits, so that an error in them does not leave a stale pass behind.
        self._pass = None
        messages = zip(self._buckets, current.transfers, strict=True)
        for position, (bucket, transfer) in enumerate(messages):
            with current.interval.exposed():
                self._aggregation.finish(transfer)
                if not self._divides_early(bucket):
                    divide(as_real(transfer.message), self._aggregation.world_size)
                bucket.deliver()
            # The arrival of the earlier ones was counted during the pass, when a poll saw it.
            if position >= current.received:
                current.interval.finish_message()
        if self._frozen:
            self._read_mark()
        self._adopt(current)
        if self._frozen:
            self._receive_late(current)
        self._clock.add(current.interval)
        self._is_reduced = True

    def _adopt(self, current: _Pass) -> None:
        """Give parameters without a gradient the average of the other workers."""
        # Only a worker that lacks a gradient reads the flags, because reading them waits for a GPU.
        if all(parameter.grad is not None for parameter in self._sent_parameters()):
            return
        flags = self._buckets[-1].flags
        assert flags is not None
        # Flags have the dtype of their bucket, and complex numbers have no order.
        is_present = iter(flags.abs().tolist())
        for bucket, transfer in zip(self._buckets, current.transfers, strict=True):
            for index, parameter in enumerate(bucket.parameters):
                if next(is_present) > 0 and parameter.grad is None:
                    bucket.adopt(index, transfer.message)

    def _sent_parameters(self) -> list[Tensor]:
        """Return the parameters of all buckets, in the order of the flags."""
        return list(chain.from_iterable(bucket.parameters for bucket in self._buckets))

    def _read_mark(self) -> None:
        """Let frozen parameters that a worker has trained travel from the next pass on."""
        flags = self._buckets[-1].flags
        if flags is None:  # no parameter travels
            self._aggregation.admit(self._frozen)
        else:
            first = self._sent_parameters()[0]
            self._aggregation.read_mark(flags, self._frozen, first.grad is not None)

    def _receive_late(self, current: _Pass) -> None:
        """Aggregate gradients of formerly frozen parameters that are not in the buckets yet."""
        parameters = parameters_of(self._model)
        frozen = self._aggregation.layout.frozen
        admitted = {name: parameters[name] for name in self._frozen if name not in frozen}
        if admitted:
            before = self._aggregation.bytes_sent
            with current.interval.exposed():
                self._aggregation._aggregate_some_gradients(admitted, AVG_WORLD, None)
            current.interval.size_bytes += self._aggregation.bytes_sent - before

    # ------------------------------------------------------------------ layout

    @property
    def _device(self) -> torch.device:
        parameters = self._buckets[0].parameters
        if parameters:
            return parameters[0].device
        return torch.device("cpu")

    def _lay_out(self) -> None:
        """Create the buckets and the hooks again."""
        parameters = parameters_of(self._model)
        self._remove_hooks()
        self._frozen = self._aggregation.layout.frozen_among(parameters)
        self._signature = signature(parameters), self._frozen
        sent = {name: p for name, p in parameters.items() if name not in self._frozen}
        settings = self._aggregation
        self._buckets = plan_buckets(sent, settings.bucket_size_bytes, settings.comm_dtype)
        self._bucket_of = {}
        for i, bucket in enumerate(self._buckets):
            self._bucket_of.update(dict.fromkeys(map(id, bucket.parameters), i))
        # A weak reference, so that the hooks of an optimizer that is no longer used send nothing.
        reduction = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            alive = reduction()
            if alive is not None:
                alive._on_gradient(parameter)

        for parameter in parameters.values():
            if parameter.requires_grad:
                # torch refuses a hook on a tensor that requires no gradient. If that changes, so
                # does the signature, and the hooks are made again.
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __del__(self) -> None:
        self._remove_hooks()

    def __getstate__(self) -> dict[str, Any]:
        """Return model and settings; hooks, buckets and messages belong to this process."""
        return {name: self.__dict__[name] for name in ("_model", "_aggregation", "_synchronizes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
