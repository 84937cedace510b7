"""Steps per second of every distributed optimizer, beside torch's own and beside no communication at all.

All variants live in the same worker processes and run interleaved: in every block each takes a few steps after a
barrier, in an order that changes, and the slowest worker's time counts. So a change of the machine's load meets all of
them, and the ratios of a block to DistributedDataParallel's in the same block mean something. Where not all fit into
memory there are several launches, each with DistributedDataParallel and no communication in it.

With ``--apart`` each variant has worker processes of its own, as in a training run: whether the heap grows and shrinks
in every step is then each variant's own doing, and not what the one before it left.

Each combination of network and workers goes to a JSON file in the output folder; table, CSV and plot are made of all
files there.

    python benchmarks/micro/optimizers.py --models mlp vgg11 --workers 2 --output FOLDER
    python benchmarks/micro/optimizers.py --models mlp --workers 2 --apart --variants sgd_overlap --output FOLDER
    python benchmarks/micro/optimizers.py --models vgg11 --workers 2 --network 100mbit --blocks 2 --steps 1
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import _report
from _sections import RESULTS, machine
from _turns import Party
from _variants import ALONE, DDP, PAIRS, VARIANTS, WORKLOADS
from _worker import Plan, rotated

from mlbench_core.network.emulated import EmulatedNetwork

REFERENCES = [ALONE, DDP]
COPIES = 6  # weights, gradients, momentum, buckets, an error memory, something in flight
PATIENCE_S = 3600.0


def groups(names: Sequence[str], model: str, workers: int, memory_bytes: float) -> list[list[str]]:
    """Split the variants so that a launch fits into memory; both references are in each, pairs in the first."""
    size = sum(p.numel() * p.element_size() for p in WORKLOADS[model].make().parameters())
    room = max(1, int(memory_bytes / (workers * COPIES * size)) - len(REFERENCES))
    paired = {name for pair in PAIRS for name in pair}
    others = sorted((name for name in names if name not in REFERENCES), key=lambda name: name not in paired)
    return [[*REFERENCES, *others[i : i + room]] for i in range(0, max(1, len(others)), room)]


def launch(plan: Plan, bandwidth: str | None) -> dict[str, Any]:
    """Run a plan without the variants that kill it; return the results by worker and the errors by variant."""
    errors: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="optimizers-") as name:
            folder = Path(name)
            (folder / "plan.json").write_text(json.dumps(asdict(plan)))
            tails = run_workers(folder, plan.workers, bandwidth)
            if not tails:
                results = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(plan.workers)]
                return {"workers": results, "errors": {**errors, **results[0]["errors"]}}
            variant, error = blame(folder, tails)
        if variant is None or variant in REFERENCES:
            raise SystemExit(f"the run failed: {error}")
        print(f"  without {variant}: {error}", file=sys.stderr, flush=True)
        errors[variant] = error
        plan = replace(plan, variants=[name for name in plan.variants if name != variant])


def launch_apart(plan: Plan) -> dict[str, Any]:
    """Run a plan with processes for each variant, which take turns; a variant that fails ends everything."""
    script = Path(__file__).with_name("_worker.py")
    with tempfile.TemporaryDirectory(prefix="optimizers-") as name, contextlib.ExitStack() as stack:
        parties = {}
        for variant in plan.variants:
            folder = Path(name) / variant
            folder.mkdir()
            (folder / "plan.json").write_text(json.dumps(asdict(replace(plan, variants=[variant], by_turns=True))))
            parties[variant] = Party(variant, script, [str(folder)], plan.workers, stack)
            parties[variant].wait()
            parties[variant].take_turn()  # warm up
        for block in range(plan.blocks):
            for _, variant in rotated(plan.variants, block):
                parties[variant].take_turn()
        for party in parties.values():
            party.finish()
        findings: list[dict[str, Any]] = [{} for _ in range(plan.workers)]
        for variant in plan.variants:
            for rank, found in enumerate(findings):
                found.update(json.loads((Path(name) / variant / f"result{rank}.json").read_text())["findings"])
    return {"workers": [{"findings": found} for found in findings], "errors": {}}


def run_workers(folder: Path, workers: int, bandwidth: str | None) -> dict[int, str]:
    """Start the workers and wait for all; return what those that failed wrote last."""
    argv = [sys.executable, str(Path(__file__).with_name("_worker.py")), str(folder)]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(EmulatedNetwork(workers, bandwidth)) if bandwidth else None
        processes = []
        for rank in range(workers):
            log = stack.enter_context(open(folder / f"log{rank}", "w"))
            if network is not None:
                process = network.popen(rank, argv, stdout=log, stderr=log)
            else:
                env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers)}
                process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        wait(processes)
        codes = [process.poll() for process in processes]
    return {
        rank: f"exit code {code}: " + (folder / f"log{rank}").read_text()[-300:].strip().rpartition("\n")[2]
        for rank, code in enumerate(codes)
        if code != 0
    }


def wait(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait until all have ended, or one has failed and the others have had time to, or patience is over."""
    deadline = time.monotonic() + PATIENCE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.1)


def blame(folder: Path, tails: dict[int, str]) -> tuple[str | None, str]:
    """The variant that a failed run was in first, and what was said of it."""
    seen = []
    for rank, tail in tails.items():
        path = folder / f"progress{rank}.json"
        if not path.exists():
            return None, tail
        at = json.loads(path.read_text())
        seen.append((at["block"], at["place"], at["error"] is None, at["variant"], at["error"] or tail))
    _, _, _, variant, error = min(seen)
    return variant, error


def compare(model: str, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants of one network with one number of workers."""
    steps = arguments.steps or WORKLOADS[model].steps
    merged: dict[str, Any] = {"launches": [], "errors": {}}
    for names in groups(arguments.variants, model, workers, arguments.memory_gb * 1e9):
        print(f"{model}, {workers} workers: {', '.join(names)}", file=sys.stderr, flush=True)
        plan = Plan(model, workers, names, arguments.blocks, steps)
        result = launch_apart(plan) if arguments.apart else launch(plan, arguments.network)
        merged["launches"].append(result["workers"])
        merged["errors"].update(result["errors"])
    return {
        "model": model,
        "workers": workers,
        "network": arguments.network,
        "apart": arguments.apart,
        "steps": steps,
        "blocks": arguments.blocks,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rows": _report.rows(merged, steps),
    }


def parse(argv: Iterable[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    physical_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], help="numbers of workers")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[name for name, variant in VARIANTS.items() if variant.is_default],
        metavar="VARIANT",
        help=f"besides {' and '.join(REFERENCES)}, which are always there: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each variant; the median counts")
    parser.add_argument("--steps", type=int, help="steps of a block (default: by network, 2 to 10)")
    parser.add_argument("--apart", action="store_true", help="give each variant worker processes of its own")
    parser.add_argument("--network", metavar="BANDWIDTH", help="put each worker on an emulated host, e.g. 100mbit")
    parser.add_argument("--memory-gb", type=float, default=0.75 * physical_gb, help="memory that a launch may take")
    parser.add_argument("--output", type=Path, default=Path("optimizers-results"), help="folder for JSON, CSV, plot")
    parser.add_argument("--append-results", action="store_true", help=f"update the section in {RESULTS.name}")
    arguments = parser.parse_args(None if argv is None else list(argv))
    for name in ("blocks", "steps"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    if min(arguments.workers) < 2:
        parser.error(f"--workers must be at least 2 each, not {min(arguments.workers)}")
    alone = [name for name in arguments.variants if VARIANTS[name].needs_own_process]
    if alone and not arguments.apart:
        parser.error(f"{', '.join(alone)}: only with --apart")
    if arguments.network and arguments.apart:
        parser.error("--apart is for loopback; leave --network out")
    if arguments.network and (reason := EmulatedNetwork.why_not()):
        parser.error(f"--network: {reason}")
    return arguments


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that workers and networks are cleared away
    if arguments.network:
        EmulatedNetwork.cleanup()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for model in arguments.models:
        for workers in arguments.workers:
            result = compare(model, workers, arguments)
            name = (
                f"{model}-{workers}"
                + (f"-{arguments.network}" if arguments.network else "")
                + "-apart" * arguments.apart
            )
            (arguments.output / f"{name}.json").write_text(json.dumps(result, indent=1))
            print(_report.table(result), flush=True)
    results = _report.load(arguments.output)
    _report.write_csv(results, arguments.output / "optimizers.csv")
    _report.plot(results, arguments.output / "optimizers.png")
    if arguments.append_results:
        _report.update_section(RESULTS, results)


if __name__ == "__main__":
    main()
