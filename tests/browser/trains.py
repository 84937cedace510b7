"""A command that looks like a training: it sends metrics, prints, and leaves the results of a
measured run.

usage: trains.py RESULTS EPOCHS [FILE]

With a file, it trains for more epochs until the file exists.
"""

import itertools
import json
import os
import shutil
import sys
import time
import urllib.request
from pathlib import Path

results, epochs = Path(sys.argv[1]), int(sys.argv[2])
ends = [Path(name) for name in sys.argv[3:]]
run_id, rank = int(os.environ["MLBENCH_RUN_ID"]), int(os.environ["RANK"])


def send(name: str, value: object, epoch: int) -> None:
    metadata = {"rank": rank, "epoch": epoch}
    body = json.dumps(
        {"run_id": run_id, "name": f"{name} @ {rank}", "value": str(value), "metadata": metadata}
    )
    url = f"{os.environ['MLBENCH_MASTER_URL']}/api/metrics/"
    headers = {
        "Authorization": f"Bearer {os.environ['MLBENCH_TOKEN']}",
        "Content-Type": "application/json",
    }
    urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=60).close()


print("<script>window.broken = 1</script>", flush=True)
print("\033[31mred\033[0m and a long line: " + "x" * 10_000, flush=True)
for epoch in itertools.count():
    print(f"epoch {epoch} starts", flush=True)
    print(f"epoch {epoch} may go wrong", file=sys.stderr, flush=True)
    send("train_loss", 2.5 / (epoch + 1), epoch)
    send("cum_fwd_pass", 0.3 * (epoch + 1), epoch)
    send("cum_agg", 0.1 * (epoch + 1), epoch)
    if rank == 0:
        send("val_global_loss", 2.7 / (epoch + 1), epoch)
        send("val_global_Prec@1", min(98, 10 * (epoch + 1)), epoch)
    time.sleep(0.25)
    if epoch + 1 >= epochs and all(path.exists() for path in ends):
        break
if rank == 0:
    goal = {"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False, "reached": True}
    phases = {"compute": 3.0, "communication": 1.0, "metrics": 0.1, "data": 0.2}
    send(
        "goal",
        json.dumps({**goal, "time_to_goal_s": 4.5, "epochs": epochs, "phases_s": phases}),
        epochs,
    )
    shutil.copytree(results, Path(os.environ["MLBENCH_OUTPUT"]) / "task1a" / str(run_id))
