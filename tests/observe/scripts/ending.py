"""Two steps, and then the end that the second argument names."""

import os
import signal
import sys

import report
import torch


def fail():
    raise RuntimeError("out of luck")


torch.manual_seed(14)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
report.save([model], [])
match sys.argv[2]:
    case "crash":
        fail()
    case "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    case "sigterm late":
        # While finish_folder() writes the result.
        writing = os.fsync

        def stop(file):
            os.kill(os.getpid(), signal.SIGTERM)
            return writing(file)

        os.fsync = stop
        fail()
    case "exit":
        sys.exit(7)
    case "message":
        sys.exit("no data")
