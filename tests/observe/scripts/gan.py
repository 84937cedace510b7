"""Two optimizers in a cycle: the discriminator steps twice for each step of the generator."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
report.join()
torch.manual_seed(6)
generator = DistributedDataParallel(nn.Linear(3, 8))
critic = DistributedDataParallel(nn.Linear(8, 1))
ours = torch.optim.Adam(generator.parameters(), lr=0.01)
theirs = torch.optim.Adam(critic.parameters(), lr=0.01)
losses = []
report.begin()
for _step in range(STEPS):
    found = []
    for _ in range(2):
        theirs.zero_grad()
        fake = generator(torch.randn(4, 3)).detach()
        loss = critic(fake).mean() - critic(torch.randn(4, 8)).mean()
        loss.backward()
        theirs.step()
        found.append(loss.item())
    ours.zero_grad()
    loss = -critic(generator(torch.randn(4, 3))).mean()
    loss.backward()
    ours.step()
    found.append(loss.item())
    losses.append(sum(found) / len(found))
# The generator's pass computes gradients of the critic, too.
sent = 4 * (report.numel(generator) + 3 * report.numel(critic)) * STEPS
report.save([generator, critic], losses, sent)
dist.destroy_process_group()
