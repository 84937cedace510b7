"""Task 1a with DistributedDataParallel and torch.optim.SGD, for comparison with CentralizedSGD.

It is the same run as ``main.py --optimizer ddp``.
"""

from __future__ import annotations

import main

if __name__ == "__main__":
    main.main("ddp")
