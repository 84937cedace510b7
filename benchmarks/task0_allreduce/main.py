"""Task 0: measure the time of a backend's collective operations by size and type of the tensors.

The operation is an all-reduce (or another one, see --collective) of random whole numbers, on at
least 2 workers. Sizes are numpy.logspace(0, 8, num=80) elements, with 100 repetitions each. Types
are float32, float16 and bfloat16, if the backend has them. The task reports mean, median, 99th
percentile, algorithm and bus bandwidth, and a fit of latency and bandwidth. Every result is
checked. README.md in this folder has the whole description."""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from latency import element_counts
from latency_report import LatencyReport
from measure_collectives import (
    COLLECTIVES,
    DTYPES,
    describe_machine,
    describe_versions,
    measure,
    why_not,
)
from show_report import show

from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.controlflow.pytorch.run_results import task_results
from mlbench_core.controlflow.task_arguments import count, seconds, task_main
from mlbench_core.distributed.pytorch.initialize import initialize_backends
from mlbench_core.errors import BackendError, ConfigurationError, require

logger = logging.getLogger("mlbench.task0")

# The description of the task fixes these sizes, so that results can be compared.
SIZES, LARGEST = 80, 10**8
LIGHT_SIZES, LIGHT_LARGEST = 13, 10**6


def choose_sizes(args: argparse.Namespace, world_size: int, left_out: dict[str, str]) -> list[int]:
    """Return the numbers of elements to measure, in ascending order."""
    # Operations that cut a tensor need one part of equal size per worker, so sizes are rounded up
    # below.
    multiple_of = world_size if COLLECTIVES[args.collective].is_cut else 1
    num, largest = SIZES, LARGEST
    if args.light_target:
        num, largest = LIGHT_SIZES, LIGHT_LARGEST
    wanted = args.elements or element_counts(args.sizes or num, largest)
    sizes = [count for count in wanted if args.max_elements is None or count <= args.max_elements]
    if len(sizes) < len(wanted):
        left_out["sizes"] = (
            f"{len(wanted) - len(sizes)} of {len(wanted)} are above "
            f"--max-elements {args.max_elements}"
        )
    if not sizes:
        raise ConfigurationError(
            f"--max-elements must be at least {min(wanted)}, the smallest size, "
            f"not {args.max_elements}"
        )
    return sorted({-(-count // multiple_of) * multiple_of for count in sizes})


def choose_dtypes(
    args: argparse.Namespace, device: torch.device, left_out: dict[str, str]
) -> list[torch.dtype]:
    """Return the types for which the backend has the collective."""
    chosen = []
    for name in args.dtypes:
        reason = why_not(args.collective, DTYPES[name], device)
        if reason is None:
            chosen.append(DTYPES[name])
        else:
            left_out[name] = reason
    if not chosen:
        raise BackendError(
            f"{dist.get_backend()} has no {args.collective} on {device.type} for any of the "
            f"types: {left_out}"
        )
    return chosen


def measure_all(
    args: argparse.Namespace, rank: int, world_size: int, device: torch.device
) -> LatencyReport:
    """Measure every size and type; a time limit is divided among them."""
    report = LatencyReport(machine=describe_machine(device), versions=describe_versions())
    dtypes = choose_dtypes(args, device, report.left_out)
    sizes = choose_sizes(args, world_size, report.left_out)
    report.methodology = {
        "repetitions": args.repetitions,
        "time_limit_s": args.time_limit,
        "barrier": "before every repetition",
        "clock": "CUDA events" if device.type == "cuda" else "time.perf_counter",
        "seconds": (
            "of one operation, of the slowest worker, by repetition: "
            "the mean of `operations` operations"
        ),
        "bandwidths": "at the median",
    }
    start = time.perf_counter()
    cases = list(itertools.product(sizes, dtypes))
    for number, (elements, dtype) in enumerate(cases):
        budget_s = None
        if args.time_limit is not None:
            # Each case has an equal part of the remaining time. Small sizes are fast and leave most
            # of their part to the large ones after them.
            left_s = max(0.0, start + args.time_limit - time.perf_counter())
            budget_s = left_s / (len(cases) - number)
        measurement = measure(
            args.collective, elements, dtype, device,
            repetitions=args.repetitions, budget_s=budget_s,
        )  # fmt: skip
        report.measurements.append(measurement)
        # All workers have the same result, that of the slowest one.
        if rank == 0:
            logger.info("%s", measurement)
    return report


def main(
    run_id: str, dataset_dir: str, ckpt_run_dir: str, output_dir: str, rank: int, backend: str,
    hosts: str | None, gpu: bool, args: argparse.Namespace, **_: object,
) -> None:  # fmt: skip
    """Run the task on this worker.

    Arguments that come unchanged from the command line are read from ``args``.
    """
    if args.validation_only:
        raise ConfigurationError(
            "task 0 trains no model, so it has no checkpoint to evaluate: leave out "
            "--validation_only"
        )
    if args.plot:
        require("matplotlib", "charts")
    with initialize_backends(
        comm_backend=backend, hosts=hosts, rank=rank, use_cuda=gpu,
        ckpt_run_dir=ckpt_run_dir, timeout_s=args.timeout,
    ) as (rank, world_size, graph):  # fmt: skip
        if world_size == 1:
            raise ConfigurationError(
                "task 0 needs at least 2 workers, not 1: README.md shows how to start them"
            )
        folders = {"output_dir": output_dir, "dataset_dir": dataset_dir}
        with task_results(args, "task0", rank, world_size, backend, **folders) as results:
            start = time.perf_counter()
            results.sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
            report = measure_all(args, rank, world_size, graph.current_device)
            if rank == 0:
                # The number of the size takes the place of the epoch of training tasks.
                for name, value, number in report.numbers():
                    results.sink.record(name, value, number, number, time.perf_counter() - start)
                    LogMetrics.log(run_id, 0, number, name, value)
    if rank == 0:
        name = f"{args.collective}-{backend}-{graph.current_device.type}-{world_size}"
        files = list(report.save(Path(output_dir) / name))
        LogMetrics.flush()
        show(report)
        if args.plot:
            # Imported here, because only this option needs matplotlib.
            from plot import draw

            files.append(draw([report], Path(output_dir) / f"{name}.png"))
        for path in files:
            print(f"written: {path}", flush=True)
    # The results are written before this error, because they show the sizes that are wrong.
    if wrong := report.wrong():
        cases = ", ".join(f"{m.elements} elements of {m.dtype}" for m in wrong)
        raise BackendError(f"wrong results: {cases}"[:500])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add = parser.add_argument
    add("--collective", choices=COLLECTIVES, default="all_reduce", help="default: all_reduce")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="types (default: all)")
    add("--repetitions", type=count, default=100, help="of each size and type (default: 100)")
    add("--sizes", type=count, help="number of sizes (default: 80; with --light 13, at most 1e6)")
    add("--elements", type=count, nargs="+", help="these sizes instead")
    add("--max-elements", type=count, help="leave out larger sizes")
    add("--time-limit", type=seconds, metavar="SECONDS",
        help="fewer repetitions, at least 3, to keep it")  # fmt: skip
    add("--plot", action="store_true",
        help="draw time against size (plot.py compares several runs)")  # fmt: skip


if __name__ == "__main__":
    task_main(main, uid="task0", add_arguments=add_arguments)
