"""Train on hosts that fail: DiLoCo, whose workers may die and join, and SGD with checkpoints.

Four workers, each on an emulated host, classify handwritten digits until 95 % accuracy. Hosts
are lost at random times, and are up again 5 s later.

* **diloco**: an elastic run (``--elastic 1:4``). A lost worker is replaced when a host is up.
* **sgd**: synchronous SGD. A lost worker ends the run. It starts again from the last checkpoint
  when all hosts are up, with new random times: the time to the next failure of a host does not
  depend on its past.

Each worker sleeps 400 ms in each step, in place of a larger model, so that the processors do not
decide the times. The learning rate of each method is the one of 0.05, 0.1, 0.2 and 0.4 that needs
the fewest steps without failures, in the sum of five seeds. With it, both reach the goal with each
of these seeds.

Each run has one line in FOLDER/runs.jsonl: its seconds to the goal, its failures, and its goodput,
which is the share of the computed samples whose work is in the result. A run that is interrupted is
missing there, and is done by the next call.

    python benchmarks/experiments/failing_hosts.py FOLDER
    python benchmarks/experiments/failing_hosts_page.py FOLDER/runs.jsonl -o PAGE
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GOAL = 0.95
WORKERS = 4
BATCH_SIZE = 16
SLEEP_S = 0.4
REPAIR_S = 5
PERIOD = 20  # steps of a round of DiLoCo, and between two checkpoints of SGD
EVALUATE_STEPS = 20
LIMIT_S = 900
LINK = "1gbit,1ms"
MEANS_S = (None, 240, 120, 60)  # between the failures of a host; None for no failures
METHODS = ("diloco", "sgd")
RATES = {"diloco": 0.2, "sgd": 0.2}


def make_data() -> tuple[Any, Any, Any, Any]:
    """Return images and labels to train with, and those to test with."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


class Training:
    """The model, the data and the steps of a worker.

    Args:
        seed: Seed of the weights and of the batches.
        folder: Folder in which each worker writes the number of samples it has computed.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.images, self.labels, self.test_images, self.test_labels = make_data()
        self._seed, self._paid = seed, 0
        # Not with its process id, which two workers may share on emulated hosts.
        self._file, _ = tempfile.mkstemp(prefix="paid-", dir=folder)

    def gradient(self, step: int, rank: int, size: int) -> None:
        """Compute the gradient of a worker's part of the batch of a step."""
        import torch
        from torch.nn.functional import cross_entropy

        numbers = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        batch = torch.randint(len(self.images), (size, BATCH_SIZE), generator=numbers)[rank]
        self.model.zero_grad()
        cross_entropy(self.model(self.images[batch]), self.labels[batch]).backward()
        time.sleep(SLEEP_S)
        self._paid += BATCH_SIZE
        # A worker may be killed at any time.
        os.pwrite(self._file, b"%d" % self._paid, 0)

    def reaches_goal(self) -> bool:
        """Return True if the accuracy on the test set reaches the goal."""
        import torch

        with torch.no_grad():
            found = self.model(self.test_images).argmax(1)
        return bool((found == self.test_labels).float().mean() >= GOAL)


def train_diloco(seed: int, lr: float, folder: Path) -> None:
    """Train in an elastic run until a worker reaches the goal."""
    import torch

    from mlbench_core.aggregation.pytorch import DiLoCoAggregation
    from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
    from mlbench_core.distributed.pytorch.elastic import Membership
    from mlbench_core.optim.pytorch import DiLoCo

    training = Training(seed, folder)
    with Membership.from_environment(dead_after_s=2) as membership:
        average = ElasticAverage(membership)
        aggregation = DiLoCoAggregation(elastic=average)
        optimizer = DiLoCo(
            model=training.model,
            inner_optimizer=lambda weights: torch.optim.SGD(weights, lr=lr, momentum=0.9),
            period=PERIOD,
            aggregation=aggregation,
        )
        average.attach(optimizer)
        average.join()
        reached = False
        while not reached:
            for step in range(PERIOD):
                number = membership.commits * PERIOD + step
                training.gradient(number, membership.rank, membership.size)
                average.count(BATCH_SIZE)
                optimizer.step()
            # All workers have the same weights, and so the same answer.
            reached = training.reaches_goal()
        membership.finish()


def train_sgd(seed: int, lr: float, folder: Path) -> None:
    """Train until the goal, from the last checkpoint if there is one."""
    import torch
    import torch.distributed as dist

    from mlbench_core.files import replacing
    from mlbench_core.optim.pytorch import CentralizedSGD

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    training = Training(seed, folder)
    optimizer = CentralizedSGD(model=training.model, lr=lr, momentum=0.9, world_size=None)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        training.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while not (step % EVALUATE_STEPS == 0 and training.reaches_goal()):
        training.gradient(step, dist.get_rank(), WORKERS)
        optimizer.step()
        step += 1
        if step % PERIOD == 0 and dist.get_rank() == 0:
            state = {"model": training.model.state_dict(), "step": step}
            state["optimizer"] = optimizer.state_dict()
            with replacing(checkpoint) as part:
                torch.save(state, part)
    if dist.get_rank() == 0:
        (folder / "useful").write_text(str(step * WORKERS * BATCH_SIZE))
    dist.destroy_process_group()


def network_text(mean_s: float | None, seed: int) -> str:
    """Return the network of a run."""
    kills = "" if mean_s is None else f"; kills: {mean_s}s-mtbf,{REPAIR_S}s-repair,{seed}-seed"
    return LINK + kills


def run(method: str, mean_s: float | None, seed: int, lr: float) -> dict[str, Any]:
    """Train until the goal, and return the figures of the run."""
    from mlbench_core.results.environment import describe_system
    from mlbench_core.run_terms import WorkerRange
    from mlbench_master.engines.interface import Job
    from mlbench_master.engines.local.engine import LocalEngine

    place = Path(tempfile.mkdtemp(prefix="failing_hosts"))
    command = f"{__file__} {place} --serve {method} --seed {seed} --lr {lr}"
    elastic = WorkerRange(1, WORKERS) if method == "diloco" else None
    engine = LocalEngine(place / "runs", grace_s=0.5)
    failures = attempts = 0
    start = time.monotonic()
    while True:
        network = network_text(mean_s, 1000 * seed + attempts)
        job = Job(1, "failing", command, WORKERS, elastic=elastic, network=network)
        job_id = engine.start(job)
        attempts += 1
        while engine.poll(job_id).state == "running" and time.monotonic() - start < LIMIT_S:
            time.sleep(0.05)
        engine.stop(job_id)
        status = engine.poll(job_id)
        ended = status.state == "finished"
        texts = [line["text"] for line in engine.logs(job_id).lines]
        lost = sum(bool(re.fullmatch(r"network: host \d+ is lost", text)) for text in texts)
        failures += lost
        if ended or time.monotonic() - start >= LIMIT_S:
            break
        if not lost:
            raise SystemExit("\n".join([*texts, f"the run failed: {status.reason}"]))
        time.sleep(REPAIR_S)
    seconds = time.monotonic() - start
    # The counts of the workers themselves, for both methods.
    paid = sum(int(file.read_text() or 0) for file in place.glob("paid-*"))
    useful: int | None = None
    if ended and status.samples is not None:
        useful = status.samples.useful
    elif ended:
        useful = int((place / "useful").read_text())
    shutil.rmtree(place)
    return {
        "method": method, "mean_s": mean_s, "seed": seed, "lr": lr,
        "seconds": round(seconds, 2) if ended else None,
        "useful": useful, "paid": paid, "failures": failures, "starts": attempts,
        "date": datetime.date.today().isoformat(), "machine": describe_system()["cpu"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing in the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--seeds", type=int, default=3)
    add("--means", type=float, nargs="*", default=MEANS_S, help="0 for no failures")
    add("--lr", type=float, help="one learning rate for both methods, to choose it")
    add("--serve", choices=METHODS, help="internal: train in this process")
    add("--seed", type=int, help="internal")
    arguments = parser.parse_args(argv)
    if arguments.serve:
        train = {"diloco": train_diloco, "sgd": train_sgd}[arguments.serve]
        train(arguments.seed, arguments.lr, arguments.folder)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "runs.jsonl"
    done: list[Mapping[str, Any]] = []
    if file.exists():
        done = [json.loads(line) for line in file.read_text().splitlines()]
    keys = {(one["method"], one["mean_s"], one["seed"], one["lr"]) for one in done}
    # Seed by seed, so that a change of the machine's load meets all cases.
    for seed in range(1, arguments.seeds + 1):
        for mean_s in arguments.means:
            for method in METHODS:
                key = (method, mean_s or None, seed, arguments.lr or RATES[method])
                if key in keys:
                    continue
                line = json.dumps(run(*key))
                print(line, flush=True)
                with file.open("a") as stream:
                    stream.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
