"""DDP with a DataLoader, two buckets, and an evaluation after each epoch."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

report.join()
torch.manual_seed(2)
data = TensorDataset(torch.randn(64, 32), torch.randint(0, 5, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = nn.Sequential(
    nn.Linear(32, 600), nn.BatchNorm1d(600), nn.Dropout(), nn.Linear(600, 600), nn.Linear(600, 5)
)
ddp = DistributedDataParallel(model, bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
losses, steps = [], 0
report.begin()
for epoch in range(2):
    sampler.set_epoch(epoch)
    ddp.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps += 1
    ddp.eval()
    with torch.no_grad():
        total = sum(nn.functional.cross_entropy(ddp(x), y).item() for x, y in loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: val loss {total / len(loader):.6f}", flush=True)
report.save([model], losses, 4 * report.numel(model) * steps, samples=4 * steps)
dist.destroy_process_group()
