"""Evaluations between the steps: eval() and train() in a function, as many scripts have it."""

import time

import report
import torch
from torch import nn

torch.manual_seed(13)
model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


@torch.no_grad()
def evaluate():
    model.eval()
    time.sleep(0.05)
    value = model(torch.ones(3, 5)).square().mean().item()
    model.train()
    return value


report.begin()
for step in range(6):
    if step % 2 == 1:
        print(f"step {step} | val loss {evaluate():.6f}", flush=True)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report.save([model], losses, 0, validation_s=0.15)
