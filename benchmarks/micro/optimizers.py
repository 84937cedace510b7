"""Time the training steps of every distributed optimizer.

The peers are torch's DistributedDataParallel and no communication. By default all variants share
the same worker processes. If they need more memory than there is, they are split into several
launches, each with both references. With ``--apart`` each variant has separate worker processes, as
in a training run, and so does not use memory that other variants freed. As in
``initialize_backends``, freed memory is kept, except by the variants whose name ends with
``_returned``.

Exposed communication is the time that the optimizer reports to the Tracker. Variants without a
tracker have the time beyond a step without communication. Bytes are those that one worker hands to
collectives in a step.

    python benchmarks/micro/optimizers.py --models mlp vgg11 --workers 2 [--save]
    python benchmarks/micro/optimizers.py --models mlp --workers 2 --apart --variants sgd_overlap
    python benchmarks/micro/optimizers.py --models vgg11 --workers 2 --network 100mbit --steps 1

With ``--gpu``, all workers compute on one GPU. Their messages travel over Gloo, by way of the host.

With ``--profile``, it lists instead where the time of a step goes on rank 0, from torch's profiler.
Waiting for messages and work outside of torch, such as NumPy's, belongs to no operation.

    python benchmarks/micro/optimizers.py --models mlp --workers 2 --profile --variants ef_sign
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _variants import ALONE, DDP, VARIANTS, WORKLOADS, Context, Trainee
from _workers import Workers, largest, run_script

from mlbench_core.distributed.pytorch.memory import keep_freed_memory
from mlbench_core.network.emulated import EmulatedNetwork

REFERENCES = [ALONE, DDP]
PEERS = (DDP, "ddp_returned", ALONE, "ddp_power2", "sgd")
WARM_UP_STEPS = 4
COPIES = 6  # weights, gradients, momentum, buckets, an error memory, a message in flight
PROCESS_BYTES = 400e6  # of a worker before it has a network: torch itself
SUBJECT = Subject(
    "optimizers",
    "Steps per second of the distributed optimizers (`optimizers.py`)",
    "steps/s",
    tuple(VARIANTS[name].title for name in PEERS),
    ("Runs 1 to 3: CentralizedSGD does 1.03 to 1.22 times the steps of DDP. Limit: 1.0. "
     "On the MLP the limit is 1.2. It is met with two workers (1.22) and not with four (1.16), "
     "where an update that takes no time would give 1.21. "
     "By layer, with averaged weights, and with torch's SGD, the ratio is 0.98 to 1.21. "
     "Over networks, where DDP's overlap helps (runs 4 and 6), "
     "CentralizedSGD has 0.94 and 0.87, and with overlap 0.99 and 1.00.",
     "At 100 Mbit/s, PowerSGD, signs and the largest 1 % do 13 to 27 times the steps "
     "of CentralizedSGD. Limit: 8. "
     "Runs 7 and 8: at 100 Mbit/s, QuantizedSGD with 8 bits does 3.4 times the steps of "
     "CentralizedSGD (3.1 to 3.5 in the blocks). Limit: 3. On the loopback it does 0.91 "
     "times the steps of DDP (0.80 to 0.99). Limit: 0.9. The machine was slower then: a step "
     "without communication took 608 ms, and 233 ms in run 7."),
)  # fmt: skip


@dataclass
class Recorder:
    """The part of a Tracker that an optimizer's step needs; adds up the reports."""

    exposed_s: float = 0.0
    size_bytes: int = 0

    def record_batch_agg(self) -> None:
        """Do nothing."""

    def record_batch_opt_step(self) -> None:
        """Do nothing."""

    def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
        """Add a message."""
        self.exposed_s += exposed_s
        self.size_bytes += size_bytes


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the network in a worker; a request then takes some steps with one variant."""
    if setup["keeps_memory"] and not keep_freed_memory():
        raise RuntimeError(
            "freed memory cannot be kept here: use glibc, and unset MALLOC_... and GLIBC_TUNABLES"
        )
    workload, rank = WORKLOADS[setup["model"]], dist.get_rank()
    steps, device = setup["steps"], setup["device"]
    torch.manual_seed(0)
    model = workload.make().to(device)
    batch = tuple(tensor.to(device) for tensor in workload.batch(rank))
    trainees: dict[str, Trainee] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        name = request["variant"]
        # Made at the first request, as new workers after a failure do not have the variants yet.
        if name not in trainees:
            context = Context(copy.deepcopy(model), dist.get_world_size(), rank, steps)
            trainees[name] = VARIANTS[name].make(context)
            for _ in range(max(WARM_UP_STEPS, steps)):
                trainees[name].step(*batch, Recorder())
        trainee, recorder = trainees[name], Recorder()
        if request.get("profile"):
            return profile_steps(lambda: trainee.step(*batch, recorder), steps)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            trainee.step(*batch, recorder)
        if device == "cuda":
            # Calls return before the device has done the work.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if not trainee.is_tracked:
            return {"seconds": seconds, "bytes": trainee.bytes_per_step()}
        return {
            "seconds": seconds,
            "bytes": recorder.size_bytes / steps,
            "exposed_s": recorder.exposed_s,
        }

    return handle


def profile_steps(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and its operations, the longest first.

    An operation has its name, its milliseconds in a step, and its calls.
    """
    start = time.perf_counter()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        for _ in range(steps):
            step()
        step_ms = 1e3 * (time.perf_counter() - start) / steps
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    operations = []
    for event in events:
        ms = event.self_cpu_time_total / 1e3 / steps
        operations.append((event.key, ms, event.count / steps))
    return {"step_ms": step_ms, "operations": operations}


def make_setup(model: str, arguments: argparse.Namespace, keeps_memory: bool) -> dict[str, Any]:
    """Describe a measurement to the workers."""
    steps = arguments.steps or WORKLOADS[model].steps
    device = "cuda" if arguments.gpu else "cpu"
    return {"model": model, "steps": steps, "device": device, "keeps_memory": keeps_memory}


def print_profile(model: str, count: int, arguments: argparse.Namespace) -> None:
    """Print a table of operations for each variant."""
    steps = arguments.steps or WORKLOADS[model].steps
    for name in arguments.variants:
        setup = make_setup(model, arguments, VARIANTS[name].keeps_memory)
        with Workers(__file__, count, setup) as workers:
            profile = workers.ask(variant=name, profile=True)[0]
        title, step_ms = VARIANTS[name].title.format(steps=steps), profile["step_ms"]
        print(f"\n{WORKLOADS[model].title}, {count} workers, {title}: {step_ms:.1f} ms per step\n")
        print("| operation | ms/step | share % | calls/step |\n|---|---|---|---|")
        rest = step_ms - sum(ms for _, ms, _ in profile["operations"])
        for operation, ms, calls in [*profile["operations"][:15], ("no operation", rest, 0)]:
            print(f"| {operation} | {ms:.2f} | {100 * ms / step_ms:.1f} | {calls:g} |")


def groups(
    names: Sequence[str], model: str, workers: int, memory_bytes: float, apart: bool = False
) -> list[list[str]]:
    """Split the variants so that a launch fits into memory; both references are in each."""
    size = sum(p.numel() * p.element_size() for p in WORKLOADS[model].make().parameters())
    of_variant = COPIES * size
    if apart:
        of_variant += PROCESS_BYTES
    room = max(1, int(memory_bytes / (workers * of_variant)) - len(REFERENCES))
    others = [name for name in names if name not in REFERENCES]
    return [[*REFERENCES, *others[i : i + room]] for i in range(0, max(1, len(others)), room)]


def launch(
    model: str, count: int, names: Sequence[str], arguments: argparse.Namespace
) -> list[Row]:
    """Measure some variants of one network with one number of workers."""
    steps = arguments.steps or WORKLOADS[model].steps
    case = f"{WORKLOADS[model].title}, {count} workers"
    if arguments.network:
        case += f", {arguments.network}"
    if arguments.apart:
        case += ", own processes"
    if arguments.gpu:
        case += ", on one GPU"
    with contextlib.ExitStack() as stack:
        network = None
        if arguments.network:
            network = stack.enter_context(EmulatedNetwork(count, arguments.network))

        def start(keeps_memory: bool) -> Workers:
            setup = make_setup(model, arguments, keeps_memory)
            return stack.enter_context(Workers(__file__, count, setup, network=network))

        def block(workers: Workers, name: str) -> Timed:
            figures = largest(workers.ask(variant=name))
            extra = {"ms/step": 1000 * figures["seconds"] / steps}
            if "exposed_s" in figures:
                extra["exposed ms"] = 1000 * figures["exposed_s"] / steps
            extra["MB/step"] = figures["bytes"] / 1e6
            return Timed(figures["seconds"], extra)

        if not arguments.apart:
            workers = start(keeps_memory=True)
        variants = {}
        for name in names:
            if arguments.apart:
                workers = start(VARIANTS[name].keeps_memory)
            title = VARIANTS[name].title.format(steps=steps)
            variants[title] = partial(block, workers, name)
        rows = measure(SUBJECT, case, variants, arguments.blocks, amount=steps)
    alone_ms = rows[0]["extra"].get("ms/step")
    for row in rows:
        # DistributedDataParallel reports no communication, so its part is the time beyond a step
        # without any.
        if alone_ms and "error" not in row and "exposed ms" not in row["extra"]:
            row["extra"]["exposed ms"] = max(0.0, row["extra"]["ms/step"] - alone_ms)
    return rows


def compare(model: str, count: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure all variants of one network with one number of workers.

    They are split into as many launches as the memory requires.
    """
    rows: dict[str, Row] = {}
    memory_bytes = arguments.memory_gb * 1e9
    for names in groups(arguments.variants, model, count, memory_bytes, arguments.apart):
        print(f"{model}, {count} workers: {', '.join(names)}", file=sys.stderr, flush=True)
        for row in launch(model, count, names, arguments):
            # The references are in each launch, and those of the first one count.
            rows.setdefault(row["variant"], row)
    return list(rows.values())


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    default = [name for name, variant in VARIANTS.items() if variant.is_default]
    others = f"besides {' and '.join(REFERENCES)}, which always run: {', '.join(VARIANTS)}"
    parser = make_parser(__doc__, blocks=8)
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--workers", nargs="+", type=positive, default=[2, 4], help="numbers of workers")
    add("--variants", nargs="+", choices=VARIANTS, default=default, metavar="VARIANT", help=others)
    add("--steps", type=positive, help="steps of a block (default: by network, 2 to 10)")
    add("--apart", action="store_true", help="give each variant its own processes")
    add("--profile", action="store_true",
        help="list the operations of a step instead of timing it")  # fmt: skip
    add("--network", metavar="BANDWIDTH",
        help="put each worker on an emulated host, e.g. 100mbit")  # fmt: skip
    add("--gpu", action="store_true", help="compute on the current GPU")
    memory_gb = 0.75 * psutil.virtual_memory().total / 1e9
    add("--memory-gb", type=float, default=memory_gb, help="memory that a launch may use")
    quick = {"models": ["mlp"], "workers": [2], "steps": 1, "variants": ["sgd_overlap", "power2"]}
    arguments = parse(parser, argv, **quick)
    if arguments.gpu and arguments.profile:
        parser.error("argument --profile: it is for CPUs only")
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("argument --gpu: torch finds no CUDA GPU on this machine")
    if min(arguments.workers) < 2:
        parser.error(f"argument --workers: must be at least 2, not {min(arguments.workers)}")
    apart = [name for name in arguments.variants if not VARIANTS[name].keeps_memory]
    if apart and not arguments.apart:
        parser.error(
            f"argument --variants: {', '.join(apart)} must run in separate processes: add --apart"
        )
    if arguments.network and (reason := EmulatedNetwork.why_not()):
        parser.error(f"argument --network: {reason}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = read_arguments(argv)
    # Workers and emulated networks are only removed if Python ends by an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if arguments.network:
        EmulatedNetwork.cleanup()
    cases = list(itertools.product(arguments.models, arguments.workers))
    if arguments.profile:
        for model, count in cases:
            print_profile(model, count, arguments)
        return
    rows = []
    for model, count in cases:
        rows += compare(model, count, arguments)
    conditions = (
        f"Gloo, {arguments.blocks} blocks, one thread per worker. Most variants keep freed memory."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
