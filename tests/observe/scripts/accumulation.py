"""DDP with gradient accumulation and no_sync."""

import contextlib

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO, STEPS = 3, 6
report.join()
torch.manual_seed(3 + dist.get_rank())
model = DistributedDataParallel(nn.Linear(40, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
report.begin()
for _ in range(STEPS):
    shown = 0.0
    for micro in range(MICRO):
        quiet = model.no_sync() if micro < MICRO - 1 else contextlib.nullcontext()
        with quiet:
            loss = model(torch.randn(5, 40)).square().mean()
            (loss / MICRO).backward()
        shown += loss.item() / MICRO
    optimizer.step()
    optimizer.zero_grad()
    losses.append(shown)
report.save([model], losses, 4 * report.numel(model) * STEPS, samples=5 * MICRO * STEPS)
dist.destroy_process_group()
