"""Worker 1 fails after two steps, so the third backward pass of worker 0 fails."""

import report
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

report.join()
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
