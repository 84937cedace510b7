"""DDP with a communication hook of the script, which sends half the bytes."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(12)
model = DistributedDataParallel(nn.Linear(30, 4))
model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
report.begin()
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 30)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report.save([model], losses, 2 * report.numel(model) * 5)
dist.destroy_process_group()
