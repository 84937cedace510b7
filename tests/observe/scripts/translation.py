"""A translation model with batches of shape (length, samples).

Like the Transformer example of PyTorch, it counts its batches by reading all of them, and forgets
no_grad() in its evaluation.
"""

import report
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

EPOCHS, BATCHES, SAMPLES = 2, 3, 4

torch.manual_seed(21)


def make_pairs(count):
    lengths = torch.randint(5, 9, (count, 2)).tolist()
    return [[torch.randint(1, 30, (length,)) for length in pair] for pair in lengths]


def collate(pairs):
    return [pad_sequence(side) for side in zip(*pairs, strict=True)]


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.encoder, self.decoder = nn.GRU(8, 8), nn.GRU(8, 8)
        self.head = nn.Linear(8, 30)

    def forward(self, source, target):
        _, state = self.encoder(self.embedding(source))
        return self.head(self.decoder(self.embedding(target), state)[0])


training = DataLoader(make_pairs(SAMPLES * BATCHES - 1), SAMPLES, collate_fn=collate)
validation = DataLoader(make_pairs(6), SAMPLES, collate_fn=collate)
model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, tokens = [], 0


def compute_loss(source, target):
    logits = model(source, target[:-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), target[1:].flatten(), ignore_index=0)


report.begin()
for _ in range(EPOCHS):
    total = 0.0
    model.train()
    for source, target in training:
        tokens += source.numel()
        optimizer.zero_grad()
        loss = compute_loss(source, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        total += loss.item()
    print(f"train loss {total / len(list(training)):.4f}", flush=True)
    model.eval()
    total = sum(compute_loss(source, target).item() for source, target in validation)
    print(f"val loss {total / len(list(validation)):.4f}", flush=True)
report.save([model], losses, 0, samples=EPOCHS * (SAMPLES * BATCHES - 1), tokens=tokens)
