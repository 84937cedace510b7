"""Start workers as forks of a process that has imported torch: an import takes seconds, and so does
what ``torch.compile`` imports at its first call.

The parent sends lines of JSON, each a list of workers: their words after ``python -m
mlbench_core.observe`` or, for a run without observation, after ``python``, and their variables. It
gets back the exit status of each, as :mod:`subprocess` has it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor

import mlbench_core.observe.command
import mlbench_core.observe.observer
import mlbench_core.observe.store_messages


def start(worker: dict[str, Any]) -> int:
    """Fork a worker and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(worker["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin.close()
        os.environ.update(worker["variables"])
        os.chdir(worker["folder"])
        words = worker["words"]
        sys.argv = ["python", *words]
        if worker["observed"]:
            sys.argv = ["observe", *words]
            mlbench_core.observe.command.main()
        else:
            sys.argv = words
            sys.path[0] = os.path.dirname(words[0])
            # Kept until the process ends. To delete a DDP model may take forever: it waits for
            # Gloo's thread, which may wait for Python's lock to drop its own references.
            kept = runpy.run_path(words[0], run_name="__main__")
            assert kept
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        statuses = []
        for pid in [start(worker) for worker in json.loads(line)]:
            _, status = os.waitpid(pid, 0)
            statuses.append(os.waitstatus_to_exitcode(status))
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
