"""Time the Tracker in a batch of seven steps, and count the memory that it gains over many batches.

python benchmarks/micro/tracker.py [--batches 1000000] [--save]
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

from _bench import Subject, finish, make_parser, measure, parse, positive

from mlbench_core.tracking.tracker import Tracker

BATCHES_PER_BLOCK = 20_000
SUBJECT = Subject(
    "tracker",
    "The Tracker in a batch of seven steps (`tracker.py`)",
    "ns",
    ("calls of empty methods",),
    ("A batch of seven steps costs about 2.5 µs, "
     "and memory does not grow with the number of batches.",
     "Limit: 4 µs, and no growth over a million batches."),
)  # fmt: skip


class NoTracker:
    """The Tracker's methods without any work: the cost of the calls alone."""

    def batch_start(self) -> None:
        """Do nothing."""

    record_batch_load = record_batch_fwd_pass = batch_start
    record_batch_comp_loss = record_batch_backprop = batch_start
    record_batch_agg = record_batch_opt_step = record_batch_comp_metrics = batch_end = batch_start


def run_batches(tracker: Any, batches: int) -> None:
    """Drive the tracker as a training loop does, with seven steps per batch."""
    for _ in range(batches):
        tracker.batch_start()
        tracker.record_batch_load()
        tracker.record_batch_fwd_pass()
        tracker.record_batch_comp_loss()
        tracker.record_batch_backprop()
        tracker.record_batch_agg()
        tracker.record_batch_opt_step()
        tracker.record_batch_comp_metrics()
        tracker.batch_end()


def make_tracker() -> Tracker:
    """Make a tracker that prints nothing."""
    tracker = Tracker([], run_id="micro", rank=0, progress=False)
    tracker.start()
    return tracker


def growth_bytes(batches: int) -> int:
    """Return the bytes that the tracker gains in some batches after its 10,000th."""
    tracker = make_tracker()
    # The resident memory of the process would also show the allocator of other parts.
    tracemalloc.start()
    # Bounded buffers are full from here on.
    run_batches(tracker, 10_000)
    before = tracemalloc.get_traced_memory()[0]
    run_batches(tracker, batches)
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return growth


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=15)
    parser.add_argument(
        "--batches", type=positive, default=1_000_000, help="batches for the memory measurement"
    )
    arguments = parse(parser, argv, batches=1000)
    variants = {
        "calls of empty methods": partial(run_batches, NoTracker(), BATCHES_PER_BLOCK),
        "Tracker": partial(run_batches, make_tracker(), BATCHES_PER_BLOCK),
    }
    case, batches = "batch of 7 steps", arguments.batches
    rows = measure(SUBJECT, case, variants, arguments.blocks, amount=BATCHES_PER_BLOCK)
    rows[1]["extra"][f"bytes gained in {batches:,} batches"] = growth_bytes(batches)
    finish(SUBJECT, rows, arguments, f"{arguments.blocks} blocks of {BATCHES_PER_BLOCK:,} batches.")


if __name__ == "__main__":
    main()
