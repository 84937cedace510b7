"""Tensor parallelism, and a loss that is a DTensor."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

report.join()
torch.manual_seed(27)
mesh = dist.device_mesh.init_device_mesh("cpu", (report.workers(),))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
output = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
parallelize_module(model[2], mesh, output)
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
losses = []
report.begin()
for _ in range(3):
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(4, (5,)))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.full_tensor().item())
# None of the collectives of DTensor is seen.
report.save([model], losses, 0)
dist.destroy_process_group()
