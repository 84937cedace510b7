"""Make a convergence reference: epochs to the goal of a task over at least 10 seeds.

    python benchmarks/references/make.py digits
    python benchmarks/references/make.py mnist --data FOLDER
    python benchmarks/references/make.py cifar10 --data FOLDER --autocast bf16 --jobs 2

Each seed is one run of task 1a with one worker and one thread, until the goal is reached. The
results stay in the folder of --runs. With --keep, finished runs in this folder are not repeated, so
an interrupted command can continue. The reference is written to
mlbench_core/comparison/references/. It depends on the task's program and settings; make it again
when one of them changes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mlbench_core.comparison.convergence import LEAST_SEEDS, Reference, deciding_options
from mlbench_core.tasks import get_task

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "mlbench_core" / "comparison" / "references"
# The script and the library of this checkout, even if another one is installed.
SCRIPT = ROOT / "benchmarks" / get_task("1a").folder / "main.py"
# Images of all workers in a step: one worker with the batch size of the task.
BATCH_SIZE = 128
DATASETS = ("digits", "mnist", "cifar10")


def run_seed(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train with one seed, and return the result of the run.

    Raises:
        SystemExit: The run failed; its output is in the message.
    """
    run_id = f"reference-{args.dataset}-{seed}"
    folder = args.runs / "task1a" / run_id
    path = folder / "result.json"
    is_kept = args.keep and path.is_file() and read_result(path)["run"]["state"] == "finished"
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable, str(SCRIPT),
            "--dataset", args.dataset, "--seed", str(seed), "--channels-last",
            "--run-id", run_id, "--root-output", str(args.runs),
            "--root-checkpoint", str(args.runs / "saved"),
        ]  # fmt: skip
        if args.data is not None:
            command += ["--data", str(args.data)]
        if args.autocast is not None:
            command += ["--autocast", args.autocast]
        # One thread: the time of a run does not matter, and the workers of --jobs share the cores.
        libraries = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": libraries}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: the run with seed {seed} failed:\n{done.stderr[-4000:]}")
    result = read_result(path)
    print(f"{args.dataset}, seed {seed}: {epochs_to_goal(result)} epochs", flush=True)
    return result


def read_result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def epochs_to_goal(result: Mapping[str, Any]) -> int:
    """Return the number of epochs until the goal.

    Raises:
        SystemExit: The run did not reach it. A reference needs seeds that all reach the goal.
    """
    goal = result["goal"]
    if not goal or not goal["reached"]:
        raise SystemExit(
            f"error: run {result['run']['id']} did not reach its goal: "
            "no reference can be made of it"
        )
    return goal["epochs"]


def describe_machine(machine: Mapping[str, Any]) -> str:
    memory = round(machine["memory_bytes"] / 2**30)
    parts = (machine["cpu"], f"{machine['cores']} cores, {memory} GiB", machine.get("gpu"))
    return ", ".join(filter(None, parts))


def make_reference(dataset: str, results: Mapping[int, Mapping[str, Any]]) -> Reference:
    """Combine the results of all seeds.

    Args:
        dataset: Name of the data set.
        results: The result of each run, by seed.

    Raises:
        SystemExit: The runs differ in more than the seed, or a run did not reach its goal.
    """
    settings = []
    for result in results.values():
        configuration = result["configuration"]
        options = deciding_options(configuration["options"])
        settings.append({**configuration, "options": options, "seed": None})
    first = settings[0]
    if settings.count(first) < len(settings):
        raise SystemExit("error: the runs differ in more than the seed: run again without --keep")
    autocast = first["options"].get("autocast")
    flag = "" if autocast is None else f" --autocast {autocast}"
    latest = max(results.values(), key=lambda result: result["run"]["ended_at"])
    return Reference(
        task=first["task"],
        dataset=first["dataset"],
        preset=first["preset"],
        goal={name: first["goal"][name] for name in ("metric", "threshold", "minimize")},
        algorithm=first["algorithm"],
        workers=first["workers"],
        batch_size=BATCH_SIZE * first["workers"],
        options=first["options"],
        values=dict(zip(results, map(epochs_to_goal, results.values()), strict=True)),
        unit="epochs",
        resolution=1.0,  # the task validates at the end of each epoch
        version=latest["software"]["mlbench_core"],
        date=latest["run"]["ended_at"][:10],
        machine=describe_machine(latest["machine"]),
        command=f"python benchmarks/references/make.py {dataset}{flag}",
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("dataset", choices=DATASETS, help="data set of task 1a")
    add("--seeds", type=int, default=LEAST_SEEDS, metavar="N", help="seeds 1 to N [%(default)s]")
    add("--jobs", type=int, default=1, metavar="N", help="runs at the same time [%(default)s]")
    add("--data", type=Path, metavar="FOLDER", help="folder of the data set's files")
    add("--autocast", choices=("bf16",), help="compute in bfloat16, as the runs to be checked")
    add("--runs", type=Path, default=Path("reference-runs"),
        help="folder of the runs [%(default)s]")  # fmt: skip
    add("--keep", action="store_true", help="do not repeat runs that have finished")
    add("--output", type=Path, metavar="FILE", help="file to write [task1a-DATASET.json]")
    args = parser.parse_args(arguments)
    if args.seeds < LEAST_SEEDS:
        parser.error(f"argument --seeds: must be at least {LEAST_SEEDS}, not {args.seeds}")
    if args.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, not {args.jobs}")
    if not SCRIPT.is_file():
        parser.error(f"{SCRIPT} does not exist: run this from a checkout")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    seeds = range(1, args.seeds + 1)
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(seeds, pool.map(partial(run_seed, args), seeds), strict=True))
    reference = make_reference(args.dataset, results)
    precision = "" if args.autocast is None else f"-{args.autocast}"
    path = args.output or FOLDER / f"task1a-{args.dataset}{precision}.json"
    reference.save(path)
    print(
        f"{path}: mean {reference.mean:.3g} epochs, "
        f"standard deviation {reference.standard_deviation:.2g}"
    )


if __name__ == "__main__":
    main()
