"""GradScaler, clipping, and autograd.backward."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(5 + dist.get_rank())
model = DistributedDataParallel(nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
losses = []
report.begin()
for step in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(6, 20)).float().square().mean()
    if step % 2:
        scaler.scale(loss).backward()
    else:
        torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
report.save([model], losses, 4 * report.numel(model) * 5)
dist.destroy_process_group()
