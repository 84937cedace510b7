"""FSDP2: parameters are sharded over the workers."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

report.join()
torch.manual_seed(9)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
mesh = dist.device_mesh.init_device_mesh("cpu", (report.workers(),))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
report.begin()
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
# In each step, a worker gives its shard to an all-gather, and all gradients to a reduce-scatter.
whole = 4 * (8 * 16 + 16 * 4)
report.save([model], losses, 5 * (whole // report.workers() + whole))
dist.destroy_process_group()
