"""No DDP: an optimizer averages each gradient itself and waits for futures, as in fast GPTs."""

import sys

import report
import torch
import torch.distributed as dist
from torch import nn


class Averaging(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        works = [dist.all_reduce(param.grad, async_op=True) for param in params]
        futures = [work.get_future() for work in works]
        del works
        if "then" in sys.argv:
            futures = [future.then(lambda done: done.value()) for future in futures]
        if "collect_all" in sys.argv:
            torch.futures.collect_all(futures).wait()
        elif "wait_all" in sys.argv:
            torch.futures.wait_all(futures)
        else:
            for future in futures:
                future.wait()
        for param in params:
            param.add_(param.grad, alpha=-0.1 / report.workers())


report.join()
torch.manual_seed(23)
model = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))
torch.manual_seed(24 + dist.get_rank())
optimizer = Averaging(model.parameters())
losses = []
report.begin()
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 9)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report.save([model], losses, 5 * 4 * report.numel(model))
dist.destroy_process_group()
