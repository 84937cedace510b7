"""A script that starts its own workers."""

import report
import torch
import torch.multiprocessing as mp


def work(rank):
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    report.save([model], [])


if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
