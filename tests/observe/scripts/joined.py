"""Workers with unequal numbers of batches, in the context Join."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(28)
model = DistributedDataParallel(nn.Linear(7, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
report.begin()
with Join([model]):
    for _ in range(3 + 2 * dist.get_rank()):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report.save([model], losses, samples=4 * len(losses))
dist.destroy_process_group()
