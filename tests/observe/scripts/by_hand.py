"""No optimizer: gradients are averaged and weights are updated by hand."""

import report
import torch
import torch.distributed as dist
from torch import nn

report.join()
torch.manual_seed(15)
model = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))
torch.manual_seed(16 + dist.get_rank())
losses = []
report.begin()
for _ in range(5):
    model.zero_grad()
    loss = model(torch.randn(4, 9)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data.add_(p.grad, alpha=-0.1 / dist.get_world_size())
    losses.append(loss.item())
report.save([model], losses, 5 * 4 * report.numel(model))
dist.destroy_process_group()
