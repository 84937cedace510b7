"""A class Trainer with DDP that evaluates without eval(), as minGPT does.

It fetches a batch of its own to know the size, as the tutorials of PyTorch do.
"""

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SAMPLES = 2, 4


class Trainer:
    def __init__(self, model, training, validation):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.training, self.validation = map(self.load, (training, validation))
        self.losses = []

    def load(self, data):
        dataset = TensorDataset(data, data.sum(1, keepdim=True))
        return DataLoader(dataset, SAMPLES, sampler=DistributedSampler(dataset))

    def run_batch(self, source, target, train):
        with torch.set_grad_enabled(train):
            loss = (self.model(source) - target).square().mean()
        if train:
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
        return loss.item()

    def run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        size = len(next(iter(loader))[0])
        for source, target in loader:
            loss = self.run_batch(source, target, train)
        print(f"epoch {epoch} | batch {size} | {'train' if train else 'val'} loss {loss:.4f}")


report.join()
torch.manual_seed(22)
size = dist.get_world_size()
trainer = Trainer(nn.Linear(6, 1), torch.randn(12 * size, 6), torch.randn(8 * size, 6))
report.begin()
for epoch in range(EPOCHS):
    trainer.run_epoch(epoch, trainer.training, train=True)
    trainer.run_epoch(epoch, trainer.validation, train=False)
steps = len(trainer.losses)
sent = 4 * report.numel(trainer.model) * steps
report.save([trainer.model], trainer.losses, sent, samples=EPOCHS * 12)
dist.destroy_process_group()
