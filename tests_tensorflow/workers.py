"""One of several workers: try the messages, and print the results as one line of JSON."""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from mlbench_core.controlflow.run_results import RunFolder
from mlbench_core.distributed.environment import detect_environment
from mlbench_core.distributed.tensorflow.mirrored import MirroredWorkers
from mlbench_core.results.configuration import Configuration
from mlbench_core.tracking import Tracker

if __name__ == "__main__":
    workers = MirroredWorkers(detect_environment().place(), 60)
    content = np.random.default_rng(workers.rank).bytes(3_000_000)
    with workers.strategy.scope():
        variable = tf.Variable(tf.constant(float(workers.rank + 5)))
    first = float(workers.strategy.run(lambda: variable.read_value()).numpy())
    # Each worker has a folder of its own, as on hosts without a shared one.
    folder = Path(sys.argv[1], str(workers.rank))
    with (
        RunFolder(
            folder, Configuration(workers=workers.size), "7", workers.rank, workers=workers
        ) as results,
        Tracker([], "7", workers.rank, sinks=[results.sink]) as tracker,
    ):
        tracker.batch_start()
        tracker.batch_end(samples=10 * (workers.rank + 1))
        tracker.epoch_end()
    answer = {
        "sum": workers.sum([workers.rank + 1, 10]),
        "mean": workers.all_reduce(tf.constant([float(workers.rank)])).numpy().tolist(),
        "broadcast": workers.broadcast(content, 1) == np.random.default_rng(1).bytes(3_000_000),
        "first": first,
        "samples": None if results.result is None else results.result["samples"],
    }
    print("answer", json.dumps(answer), flush=True)
