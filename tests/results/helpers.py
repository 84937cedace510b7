"""Make result folders of runs that never ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import finish_folder, lines_path, prepare_folder, write_environment
from mlbench_core.results.raw_lines import LinesSink

GOAL = {"metric": "val_global_Prec@1", "threshold": 90.0, "minimize": False}
ENVIRONMENT = {
    "system": {
        "cpu": "Model 7",
        "cores": 2,
        "memory_bytes": 1 << 34,
        "python": "3.11.2",
        "os": "Linux",
    },
    "gpus": [],
    "driver": None,
    "torch": {"version": "2.13.0", "nccl": None},
    "packages": {"mlbench-core": "4.0"},
    "checkouts": {"program": {"commit": "ab" * 20, "changed_files": 0, "difference_sha256": None}},
}


def totals(train_s: float, rank: int = 0, batches: int = 0, **others: Any) -> dict[str, Any]:
    """Return totals of which a third is communication; rank 1 is 10 % slower in communication."""
    slower = 1.1 if rank else 1.0
    return {
        "wall_s": train_s + 2.0, "train_s": train_s, "validation_s": 1.0, "compute_s": train_s / 2,
        "communication_s": train_s / 3 * slower, "metrics_s": 0.0, "preprocess_s": train_s / 30,
        "steps_s": {"fwd_pass": train_s / 2, "agg": train_s / 3, "batch_load": train_s / 30},
        "batches": batches, "samples": 32 * batches, "tokens": 0,
        "communication_total_s": train_s / 2, "communication_exposed_s": train_s / 3 * slower,
        "communication_size_bytes": 1000 * batches, "communication_wire_bytes": 2000 * batches,
        "communication_measured": True, "exchanges": batches, **others,
    }  # fmt: skip


def write_run(
    folder: Path, *, workers: int = 2, epochs: int = 3, epoch_s: float = 10.0,
    accuracies: tuple[float, ...] = (),
    finish: bool = True, environment: Mapping[str, Any] = ENVIRONMENT,
    collectives: list[dict[str, Any]] | None = None,
    collectives_to_goal: list[dict[str, Any]] | None = None, cpu_share: float | None = None,
    **configuration: Any,
) -> Path:  # fmt: skip
    """Write the folder of a run with 10 batches in each epoch; the accuracy is 80, 85, 90, ...
    percent.

    With ``cpu_share``, it has the processor time of communication, this share of the training time,
    and that of computation, half of it. Earlier versions did not write them."""

    def known(train_s: float) -> dict[str, float]:
        if cpu_share is None:
            return {}
        return {"communication_cpu_s": train_s * cpu_share, "compute_cpu_s": train_s / 2}

    values = accuracies or tuple(80.0 + 5 * epoch for epoch in range(epochs))
    chosen = {
        "task": "1a",
        "dataset": "digits",
        "algorithm": "centralized_sgd",
        "seed": 1,
        "goal": GOAL,
    }
    settings = Configuration(workers=workers, **{**chosen, **configuration}).to_dict()
    prepare_folder(folder)
    write_environment(folder, environment)
    for rank in range(workers):
        sink = LinesSink(lines_path(folder, rank), rank, folder.name, settings)
        sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
        reached = False
        for epoch, value in enumerate(values):
            train_s, step = epoch_s * (epoch + 1), 10 * (epoch + 1)
            now = {
                "epoch": epoch,
                "step": step,
                "time_s": train_s + 1,
                "totals": totals(train_s, rank, step, **known(train_s)),
            }
            sink.record("train_loss", 1 / (epoch + 1), epoch, step - 5, train_s - 1)
            sink.record(GOAL["metric"], value, epoch, step, train_s + 0.5)
            goal = settings["goal"]
            # The goal of a fixed training time has the best value until then.
            is_timed = goal is not None and "budget_s" in goal
            is_enough = goal is not None and (
                train_s >= goal["budget_s"] if is_timed else value >= goal["threshold"]
            )
            if goal is not None and is_enough and not reached:
                reached = True
                text = f"90% reached in {train_s} seconds"
                best = max(values[: epoch + 1]) if is_timed else value
                sink.event(
                    "goal",
                    {
                        **now,
                        **goal,
                        "value": best,
                        "text": text,
                        "time_to_goal_s": train_s + rank / 10,
                        "collectives": collectives_to_goal,
                    },
                )
            sink.event("epoch", now)
        last = totals(epoch_s * len(values), rank, 10 * len(values), **known(epoch_s * len(values)))
        sink.event("end", {
            "time_s": last["wall_s"], "totals": last, "epochs": len(values),
            "best_metric_value": max(values),
            "best_epoch": len(values) - 1, "batch_times": [[0, 0], [1, 10 * len(values)]],
            "memory_peak_bytes": None,
            "energy_j": None, "collectives": collectives,
        })  # fmt: skip
        if finish:
            sink.finish("finished")
        else:
            sink.flush()
    if finish:
        finish_folder(folder)
    return folder


def change(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text in a file."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def set_in(path: Path, value: Any, *place: str) -> None:
    """Set a value in a JSON file."""
    content = inner = json.loads(path.read_text(encoding="utf-8"))
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(content), encoding="utf-8")
