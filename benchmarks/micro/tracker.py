"""What the tracker costs: nanoseconds a batch of seven steps, and the memory it gains over many batches.

Run: python benchmarks/micro/tracker.py [--batches 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc

from mlbench_core.tracking.tracker import Tracker

REPEATS = 15
BATCHES_PER_REPEAT = 20_000
TARGET_NS = 4_000


def run_batches(tracker: Tracker, batches: int) -> None:
    """Drive the tracker as a training loop does, with seven steps a batch."""
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


def nanoseconds_per_batch() -> list[float]:
    """One figure for each repeat, after a warm-up."""
    tracker = Tracker([], run_id="micro", rank=0, progress=False)
    tracker.start()
    run_batches(tracker, BATCHES_PER_REPEAT)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        run_batches(tracker, BATCHES_PER_REPEAT)
        times.append((time.perf_counter_ns() - start) / BATCHES_PER_REPEAT)
    return times


def growth_bytes(batches: int) -> int:
    """Bytes that the tracker holds more after ``batches`` batches than after 10,000."""
    tracker = Tracker([], run_id="micro", rank=0, progress=False)
    tracker.start()
    tracemalloc.start()
    run_batches(tracker, 10_000)
    before = tracemalloc.get_traced_memory()[0]
    run_batches(tracker, batches)
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return growth


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1_000_000, help="batches for the memory measurement")
    batches = parser.parse_args().batches
    times = nanoseconds_per_batch()
    print(f"{'batch of 7 steps, median':32}{statistics.median(times):10.0f} ns   (target {TARGET_NS} ns)")
    print(f"{'batch of 7 steps, fastest':32}{min(times):10.0f} ns")
    print(f"{'batch of 7 steps, slowest':32}{max(times):10.0f} ns")
    print(f"{f'memory gained in {batches} batches':32}{growth_bytes(batches):10d} bytes")


if __name__ == "__main__":
    main()
