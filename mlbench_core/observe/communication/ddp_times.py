"""Read the communication of DistributedDataParallel (DDP) from the times that DDP takes itself.

A communication hook in Python costs more than a tenth of a millisecond for each bucket, and changes
how DDP divides gradients. DDP's own clock runs in C++ and changes nothing::

    first bucket ready        last gradient computed        last bucket arrived
    |------------ hidden ------------|----------- exposed -----------|

Taking the times and reading them costs 0.15 ms, so DDP does so for some of the short backward
passes only. Those in between get the times of the last one that was read.
"""

from __future__ import annotations

import time
import weakref

from torch.nn.parallel import DistributedDataParallel

from mlbench_core import torch_private

__all__ = ["DDPTimes"]

_EVERY_S = 0.2
# DDP forms its buckets again after the first pass, and the first passes take longer than others.
_FIRST_PASSES = 3


class DDPTimes:
    """The communication of one model on CPUs, without a hook in Python.

    Args:
        model: The model, to which only a weak reference is kept.
        workers: Number of workers of the model.

    Attributes:
        model: Weak reference to the model.
        workers: As above.
        bucket_bytes: Bytes of each bucket in the last pass that was read, if it is a message: those
            of a model on one worker, and those of a hook in C++, are not.
        sent_bytes: Their sum.
        exposed_s: Seconds from the last gradient to the last bucket.
        hidden_s: Seconds from the first bucket to the last gradient.
        own_hook: Name of the hook in C++ that the script has chosen; empty for none.
    """

    def __init__(self, model: DistributedDataParallel, workers: int) -> None:
        self.model = weakref.ref(model)
        # DDP refuses a model without such a parameter.
        self._first = weakref.ref(next(p for p in model.parameters() if p.requires_grad))
        self.workers = workers
        self.bucket_bytes: list[int] = []
        self.sent_bytes = 0
        self.exposed_s = self.hidden_s = 0.0
        self.own_hook = ""
        self._passes = 0
        self._next_read_s = 0.0
        self._start_ns = 0
        self._sees_forwards = self._is_pending = self._reads_all = False
        self._is_timed = True

    def forward_begins(self, model: DistributedDataParallel) -> None:
        """Note a forward pass with gradients."""
        self._sees_forwards, self._is_pending = True, self._trains(model)
        is_due = self._passes < _FIRST_PASSES or time.perf_counter() >= self._next_read_s
        if self._is_timed != (is_due or self._reads_all):
            self._is_timed = not self._is_timed
            torch_private.time_ddp(model, self._is_timed)

    def _trains(self, model: DistributedDataParallel) -> bool:
        """Return True if a parameter needs gradients: a GAN may freeze its critic in some steps."""
        # Mostly the first one does, and a loop over all of them in each step is saved.
        first = self._first()
        if first is not None and first.requires_grad:
            return True
        return any(param.requires_grad for param in model.parameters())

    def took_part(self, model: DistributedDataParallel) -> bool:
        """Return True if the model has communicated in the backward pass that ends now."""
        # False after a forward pass under no_sync().
        if not model.require_forward_param_sync:
            return False
        # A compiled forward pass is not seen.
        if self._sees_forwards and not self._is_pending:
            return False
        if self._is_timed:
            if not self._read(model):
                # The script computes the gradients of other models only in some passes, for example
                # those of a critic, so only DDP knows.
                self._reads_all = True
                return False
            self._next_read_s = time.perf_counter() + _EVERY_S
        self._is_pending = False
        self._passes += 1
        return True

    def _read(self, model: DistributedDataParallel) -> bool:
        """Read DDP's times; return False if the model took no part in the backward pass."""
        data = torch_private.ddp_times(model)
        start_ns = data.get("backward_comm_time_start", 0)
        if start_ns == self._start_ns:
            return False
        self._start_ns = start_ns
        total_ns = data["backward_comm_time"]
        # The last gradient may complete the first bucket, and then nothing is hidden.
        hidden_ns = min(max(0, data["backward_compute_comm_overlap_time"]), total_ns)
        self.hidden_s, self.exposed_s = hidden_ns / 1e9, (total_ns - hidden_ns) / 1e9
        sizes = data["bucket_sizes"]
        if data["has_rebuilt_buckets"]:
            sizes = data["rebuilt_bucket_sizes"]
        self.own_hook = str(data.get("comm_hook", ""))
        # A hook in C++ sends other bytes than those of the buckets.
        if self.workers > 1 and not self.own_hook:
            self.bucket_bytes = list(map(int, sizes.split(",")))
            self.sent_bytes = sum(self.bucket_bytes)
        return True
