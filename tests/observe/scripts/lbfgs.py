"""LBFGS, whose step calls a closure several times."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
inputs, targets = torch.randn(20, 6), torch.randn(20, 2)
losses, calls = [], []
report.begin()
for _ in range(4):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        calls.append(loss.item())
        return loss

    first = len(calls)
    optimizer.step(closure)
    losses.append(sum(calls[first:]) / len(calls[first:]))
report.save([model], losses, 4 * report.numel(model) * len(calls))
dist.destroy_process_group()
