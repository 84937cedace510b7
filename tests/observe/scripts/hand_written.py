"""Hand-written averaging: an asynchronous all-reduce for each gradient, and one of the loss."""

import report
import torch
import torch.distributed as dist
from torch import nn

report.join()
torch.manual_seed(10)
model = nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))
torch.manual_seed(11 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
report.begin()
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 9)).square().mean()
    loss.backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    for p in model.parameters():
        p.grad /= dist.get_world_size()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    optimizer.step()
    losses.append(loss.item())
report.save([model], losses, 5 * (4 * report.numel(model) + 4))
dist.destroy_process_group()
