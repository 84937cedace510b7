"""Task 1a with DistributedDataParallel and torch.optim.SGD, for comparison with CentralizedSGD.

Data, model, schedule, goal, measurements and command line are those of main.py in this folder.
``main.py --optimizer ddp`` is the same run.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def ddp_sgd(model: nn.Module, lr: float) -> tuple[DistributedDataParallel, SGD]:
    """Return a network whose backward pass averages gradients over the workers, and its
    optimizer."""
    device = next(model.parameters()).device
    parallel = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )
    return parallel, SGD(
        parallel.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4, dampening=0
    )


if __name__ == "__main__":
    import main

    main.main("ddp")
