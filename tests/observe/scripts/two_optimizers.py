"""Two optimizers for the parameters of one DDP model, as with Muon and AdamW."""

import sys

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(9)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
matrices = [param for param in model.parameters() if param.dim() == 2]
others = [param for param in model.parameters() if param.dim() == 1]
first = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
second = torch.optim.AdamW(others, lr=0.01)
if "state" in sys.argv:
    # They take steps of size 0, in another order than those of training.
    get_optimizer_state_dict(model, [second, first])
torch.manual_seed(9 + dist.get_rank())
losses, before, after = [], [], []
report.begin()
for _ in range(5):
    loss = model(torch.randn(4, 6)).square().mean()
    before.append([param.tolist() for param in model.parameters()])
    loss.backward()
    for optimizer in (first, second):
        # The second one may be for a later phase of training.
        if optimizer is first or "phases" not in sys.argv:
            optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    after.append([param.tolist() for param in model.parameters()])
report.save([model], losses, before=before, after=after)
dist.destroy_process_group()
