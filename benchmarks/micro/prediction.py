"""Predict the time of training steps on emulated networks, measure them, and print the errors.

Each worker sleeps in place of the forward and backward pass, so that several workers do not need
the processors at the same time: the network decides the time of a step. The prediction uses the
step of one worker and the collectives of each method. The column "predicted" has the prediction,
"error %" its difference from the measured time. The script prints the table after each block, and
writes it then if --save is given.

    python benchmarks/micro/prediction.py [--networks home-fibre] [--workers 2 4 8] [--save]
"""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from _bench import Row, Subject, finish, make_parser, parse, positive, summarize
from torch import nn

from mlbench_core.network import EmulatedNetwork, get_network
from mlbench_core.optim.pytorch import CentralizedSGD, EFSignSGD, LocalSGD, PowerSGD, SparsifiedSGD
from mlbench_core.prediction import collective_s

SLEEP_S = 0.03
PERIOD = 4  # of LocalSGD; a round of every method has this number of steps
WARM_UP_ROUNDS = 2
TIMEOUT_S = 600
METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "CentralizedSGD": lambda model: CentralizedSGD(model=model, lr=0.01, world_size=None),
    "PowerSGD, rank 2": lambda model: PowerSGD(model=model, lr=0.01, rank=2, world_size=None),
    "EFSignSGD": lambda model: EFSignSGD(model.named_parameters(), lr=0.01),
    "SparsifiedSGD, 1 %": lambda model: SparsifiedSGD(
        model.named_parameters(), lr=0.01, sparse_grad_size=0.01
    ),
    "LocalSGD, 4 steps": lambda model: LocalSGD(
        model=model, lr=0.01, period=PERIOD, world_size=None
    ),
}
SUBJECT = Subject(
    "prediction",
    "Measured and predicted seconds of a training step on emulated networks (`prediction.py`)",
    "ms",
    (),
    ("Each worker sleeps 30 ms and computes little.",
     "In `lan-1g` and `datacenter` with 4 and 8 workers, compressing takes longer than sending: "
     "the workers share 2 cores."),
)  # fmt: skip


class Recorder:
    """A tracker that counts collectives."""

    def __init__(self) -> None:
        self.collectives: Counter[tuple[str, int, int]] = Counter()

    def record_batch_agg(self) -> None:
        """Do nothing."""

    def record_batch_opt_step(self) -> None:
        """Do nothing."""

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        """Add calls."""
        self.collectives[op, group, size_bytes] += calls


def make_model() -> nn.Module:
    """Make a network of 68 thousand parameters: 0.27 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def take_rounds(name: str, rounds: int) -> dict[str, Any]:
    """Train with one method, and return the median seconds and the collectives of a step."""
    model, recorder = make_model(), Recorder()
    optimizer, inputs = METHODS[name](model), torch.randn(4, 256)
    times = []
    for turn in range(WARM_UP_ROUNDS + rounds):
        if turn == WARM_UP_ROUNDS:
            recorder.collectives.clear()
        start = time.perf_counter()
        for _ in range(PERIOD):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            time.sleep(SLEEP_S)
            optimizer.step(tracker=recorder)
        times.append((time.perf_counter() - start) / PERIOD)
    per_step = [[*key, calls / (rounds * PERIOD)] for key, calls in recorder.collectives.items()]
    return {"seconds": median(times[WARM_UP_ROUNDS:]), "collectives": per_step}


def serve(rounds: int, is_alone: bool) -> None:
    """Train with every method in one worker; rank 0 writes the results as one line of JSON."""
    torch.set_num_threads(1)
    if not is_alone:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    results = {name: take_rounds(name, rounds) for name in METHODS}
    if is_alone or dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    if not is_alone:
        dist.destroy_process_group()


def run_workers(network: str, workers: int, rounds: int) -> dict[str, Any]:
    """Train in an emulated network, and return the results that rank 0 wrote."""
    argv = [sys.executable, str(Path(__file__)), "--serve", str(rounds)]
    if workers == 1:
        done = subprocess.run([*argv, "--alone"], check=True, capture_output=True)
        return json.loads(done.stdout)
    with EmulatedNetwork(workers, network=get_network(network)) as emulated:
        processes = [emulated.popen(host, argv, stdout=subprocess.PIPE) for host in range(workers)]
        try:
            return json.loads(processes[0].communicate(timeout=TIMEOUT_S)[0])
        finally:
            for worker in processes:
                worker.kill()
                worker.communicate()


def predicted_s(network: str, alone_s: float, collectives: list[list[Any]]) -> float:
    """Return the predicted seconds of a step."""
    emulated = get_network(network)
    return alone_s + sum(
        calls * collective_s(op, size_bytes, group, emulated)
        for op, group, size_bytes, calls in collectives
    )


def compare(
    turns: dict[tuple[str, int], list[dict[str, Any]]], alone: list[dict[str, Any]]
) -> list[Row]:
    """Make a row for every network, number of workers and method, from the blocks so far."""
    rows = []
    for (network, workers), blocks in turns.items():
        for name in METHODS:
            alone_s = median(block[name]["seconds"] for block in alone)
            predicted_ms = 1e3 * predicted_s(network, alone_s, blocks[0][name]["collectives"])
            row: Row = {"case": f"{network}, {workers} workers", "variant": name}
            row |= summarize([1e3 * block[name]["seconds"] for block in blocks])
            error = 100 * (predicted_ms / row["value"] - 1)
            row["extra"] = {"predicted": predicted_ms, "error %": error}
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, predict, and print the table."""
    parser = make_parser(__doc__, blocks=3)
    named = ["lan-1g", "datacenter", "home-fibre", "mobile-lte", "wan-transatlantic"]
    add = parser.add_argument
    add("--networks", nargs="+", default=named, metavar="NETWORK")
    add("--workers", nargs="+", type=positive, default=[2, 4, 8])
    add("--rounds", type=positive, default=5, help="rounds of 4 steps in a block (default: 5)")
    add("--serve", type=positive, help="internal: train this number of rounds in this process")
    add("--alone", action="store_true", help="internal: train without other workers")
    arguments = parse(parser, argv, networks=["home-fibre"], workers=[2], rounds=2)
    if arguments.serve:
        serve(arguments.serve, arguments.alone)
        return
    cases = list(itertools.product(arguments.networks, arguments.workers))
    turns: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    alone: list[dict[str, Any]] = []
    # Interleaved, because the load of a shared machine changes.
    for _ in range(arguments.blocks):
        alone.append(run_workers("unlimited", 1, arguments.rounds))
        for network, workers in cases:
            turns[network, workers].append(run_workers(network, workers, arguments.rounds))
        rows = compare(turns, alone)
        errors = [abs(row["extra"]["error %"]) for row in rows]
        conditions = (
            f"{len(alone)} of {arguments.blocks} blocks of {arguments.rounds} rounds "
            "on a shared machine. "
            f"Mean error of {len(errors)} predictions: {fmean(errors):.1f} %, "
            f"largest {max(errors):.1f} %."
        )
        # After each block, so that a run that is interrupted keeps its earlier blocks.
        finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
