"""A language model on memory-mapped tokens, without a DataLoader.

It toggles require_backward_grad_sync by hand, as nanoGPT does, and its weights are tied.
"""

import sys

import numpy as np
import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO, STEPS, LENGTH = 2, 5, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, targets):
        logits = self.head(torch.tanh(self.middle(self.embedding(ids))))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


report.join()
path = f"{sys.argv[1]}/tokens-{dist.get_rank()}.bin"
(np.arange(2000) * 7 % 50).astype(np.uint16).tofile(path)
tokens = np.memmap(path, dtype=np.uint16, mode="r")
torch.manual_seed(4 + dist.get_rank())


def batch():
    starts = torch.randint(len(tokens) - LENGTH - 1, (3,)).tolist()
    rows = [torch.from_numpy(tokens[i : i + LENGTH + 1].astype(np.int64)) for i in starts]
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
inputs, targets = batch()
report.begin()
for _ in range(STEPS):
    for micro in range(MICRO):
        model.require_backward_grad_sync = micro == MICRO - 1
        logits, loss = model(inputs, targets)
        loss = loss / MICRO
        inputs, targets = batch()
        loss.backward()
        losses.append(loss.item() * MICRO)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
means = [sum(losses[i : i + MICRO]) / MICRO for i in range(0, len(losses), MICRO)]
count = 3 * MICRO * STEPS
report.save([model], means, 4 * report.numel(model) * STEPS, samples=count, tokens=LENGTH * count)
dist.destroy_process_group()
