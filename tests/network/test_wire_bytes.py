"""The bytes on the wire that a tracker computes, against the counter of the interface of each
emulated host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlbench_core.network.emulated import EmulatedNetwork
from tests.helpers.thorough import some

REASON = EmulatedNetwork.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")

WORKER = """
import json
import psutil
import torch, torch.distributed as dist
from torch import nn
from mlbench_core.optim.pytorch import CentralizedSGD, DecentralizedSGD, SignSGD, SparsifiedSGD
from mlbench_core.tracking import Tracker


def gossip(model):
    rank, size = dist.get_rank(), dist.get_world_size()
    return DecentralizedSGD(rank, {(rank + 1) % size, (rank - 1) % size}, model, lr=1e-3)


MAKERS = {
    "all_reduce": lambda model: CentralizedSGD(None, model, lr=1e-3),
    "all_gather": lambda model: SparsifiedSGD(model.parameters(), lr=1e-3, sparse_grad_size=60_000),
    "signs": lambda model: SignSGD(model.parameters(), lr=1e-3),
    "neighbors": gossip,
}
torch.set_num_threads(1)
dist.init_process_group("gloo")

def count():
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent

found = {}
for name, make in MAKERS.items():
    torch.manual_seed(0)
    model = nn.Linear(1000, 600)
    optimizer = make(model)
    tracker = Tracker([], "run", dist.get_rank(), sinks=[])

    def step():
        tracker.batch_start()
        model.weight.grad, model.bias.grad = torch.randn(600, 1000), torch.randn(600)
        optimizer.step(tracker=tracker)
        tracker.batch_end()

    step()  # connections and comparisons of the first step
    dist.barrier()
    before, computed = count(), tracker.totals()["communication_wire_bytes"]
    for _ in range(3):
        step()
    computed = tracker.totals()["communication_wire_bytes"] - computed
    dist.barrier()
    sums = torch.tensor([count() - before, computed], dtype=torch.int64)
    dist.all_reduce(sums)
    found[name] = sums.tolist()
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("workers", some([3, 2, 4]))
def test_the_computed_bytes_are_those_that_the_interfaces_count(workers: int) -> None:
    with EmulatedNetwork(workers, "1gbit") as network:
        processes = [
            network.popen(host, [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
            for host in range(workers)
        ]
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * workers
    for name, (counted, computed) in json.loads(outputs[0]).items():
        assert computed == pytest.approx(counted, rel=0.05), name
