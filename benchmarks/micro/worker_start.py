"""Time the start of local workers: forks of a process that has imported torch, and new programs.

The time is that from the start of a run to the end of the fifth training step of its last worker,
with DDP and Gloo. The fork server has been started by an earlier run.

    python benchmarks/micro/worker_start.py [--workers 2 8 32] [--save]
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from _bench import Subject, Timed, finish, make_parser, measure, parse, positive

PROGRAMS, FORKS = "new programs", "forks"
SUBJECT = Subject(
    "worker_start",
    "Start of local workers (`worker_start.py`)",
    "s",
    (PROGRAMS,),
    ("Limit: with 2 and 8 workers, forks need at most a twentieth of the time of new programs.",),
)
TRAINS = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
print("trained", time.time(), flush=True)
dist.barrier()
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    from mlbench_core.calling_environment import FORK_VARIABLE
    from mlbench_core.comparison.group_repeats import plural
    from mlbench_master.engines import Job
    from mlbench_master.engines.local.engine import LocalEngine

    parser = make_parser(__doc__, blocks=7)
    parser.add_argument("--workers", type=positive, nargs="+", default=[2, 8])
    arguments = parse(parser, argv)
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "trains.py")
        script.write_text(TRAINS)
        engine = LocalEngine(Path(folder, "runs"))

        def start(count: int, forks: str) -> Timed:
            """Run a job, and return the time until its last worker had trained."""
            number = next(numbers)
            env = {FORK_VARIABLE: forks, "OMP_NUM_THREADS": "1"}
            job = Job(run_id=number, name="a", command=str(script), num_workers=count, env=env)
            begin_s = time.time()
            job_id = engine.start(job)
            while engine.poll(job_id).state == "running":
                time.sleep(0.05)
            log = Path(folder, "runs", str(number), "log.jsonl").read_text()
            texts = [json.loads(line)["text"] for line in log.splitlines()]
            ends = [float(text.split()[1]) for text in texts if text.startswith("trained")]
            if len(ends) != count:
                raise SystemExit("error: not all workers trained:\n" + "\n".join(texts))
            return Timed(max(ends) - begin_s)

        start(1, "1")
        rows = []
        for count in arguments.workers:
            variants = {PROGRAMS: partial(start, count, "0"), FORKS: partial(start, count, "1")}
            rows += measure(SUBJECT, plural(count, "worker"), variants, arguments.blocks)
    finish(SUBJECT, rows, arguments, f"{arguments.blocks} starts of each, one thread per worker.")


if __name__ == "__main__":
    main()
