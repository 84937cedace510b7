"""An optimizer around another one, as Accelerate makes it."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Around(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


report.join()
torch.manual_seed(29)
model = DistributedDataParallel(nn.Linear(10, 12))
inner = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer = Around(inner)
losses = []
report.begin()
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 10)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
kinds = [type(optimizer).__name__, type(inner).__name__]
report.save([model], losses, 4 * report.numel(model) * 3, optimizers=kinds)
dist.destroy_process_group()
