"""torch.compile before DDP."""

import sys

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

report.join()
torch.manual_seed(8)
model = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 2))
# No code is generated, which would take many seconds; the graph is captured all the same.
ddp = DistributedDataParallel(
    torch.compile(model, backend="aot_eager"), gradient_as_bucket_view="view" in sys.argv
)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
losses = []
report.begin()
torch.manual_seed(8 + dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    loss = ddp(torch.randn(4, 10)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report.save([model], losses, 4 * report.numel(model) * 5, samples=20)
dist.destroy_process_group()
