"""A plain loop without DDP: each worker trains alone."""

import time

import report
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Each sample takes a millisecond to load."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), index / 32), torch.tensor(index % 3)


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
losses = []
report.begin()
for _ in range(2):
    for inputs, targets in DataLoader(Slow(), batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
report.save([model], losses, 0, samples=64, data_s=0.064)
