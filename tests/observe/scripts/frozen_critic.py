"""A GAN whose critic takes three steps for each step of the generator, which freezes it."""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CRITIC_STEPS = 3
report.join()
torch.manual_seed(30)
generator = DistributedDataParallel(nn.Linear(3, 5))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)))
of_critic = torch.optim.RMSprop(critic.parameters(), lr=0.01)
of_generator = torch.optim.RMSprop(generator.parameters(), lr=0.01)
losses = []
report.begin()
for _ in range(3):
    shown = []
    for _ in range(CRITIC_STEPS):
        with torch.no_grad():
            fake = generator(torch.randn(4, 3))
        loss = critic(fake).mean() - critic(torch.randn(4, 5)).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        shown.append(loss.item())
    critic.requires_grad_(False)
    loss = -critic(generator(torch.randn(4, 3))).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
    critic.requires_grad_(True)
    shown.append(loss.item())
    losses.append(sum(shown) / len(shown))
values = CRITIC_STEPS * report.numel(critic) + report.numel(generator)
report.save([generator, critic], losses, 3 * 4 * values)
dist.destroy_process_group()
