"""What `optimizers.py` found, as rows, table, CSV, plot and a section of RESULTS.md."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import _sections
from _variants import ALONE, DDP, PAIRS, VARIANTS, WORKLOADS

from mlbench_core.errors import require

HEADING = "## `optimizers.py`: steps per second of the distributed optimizers"
INTRODUCTION = """\
Gloo, one thread for each worker, loopback unless a bandwidth is named. Medians over interleaved blocks; a block's time
is its slowest worker's. "x DDP" is the ratio of steps/s to `DistributedDataParallel` + `torch.optim.SGD` (both default)
in the same block, "x alone" that to no communication. Exposed communication is what the Tracker is told; for DDP, which
tells nothing, it is the time beyond a step without communication. Bytes are what one worker hands to collectives in a
step. Limits, with 2 workers: overlap at least 1.2 times DDP on the MLP, 1.1 on ResNet-18, 1.0 on ResNet-20, ahead of
DDP with bucket views and fused SGD; PowerSGD rank 2 at least 1.3 times torch's hook on the MLP, and at 100 Mbit/s at
least 5 times CentralizedSGD on VGG11."""
COLUMNS = ("variant", "steps/s", "x DDP", "range", "x alone", "ms/step", "exposed ms", "MB/step")


def rows(merged: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """One row for each variant, in the table's order; a variant with an error has nothing else."""
    found: dict[str, dict[str, Any]] = {}
    for number, workers in enumerate(merged["launches"]):
        seconds = {
            name: [max(times) for times in zip(*(w["findings"][name]["seconds"] for w in workers), strict=True)]
            for name in workers[0]["findings"]
        }
        for name in seconds:
            if name not in found:
                parts = [worker["findings"][name] for worker in workers]
                found[name] = {"launch": number, **_row(name, seconds, parts, steps)}
    for name, error in merged["errors"].items():
        found[name] = {"variant": name, "error": error}
    return [found[name] for name in VARIANTS if name in found]


def _row(name: str, seconds: dict[str, list[float]], parts: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    ratios = [ddp / own for own, ddp in zip(seconds[name], seconds[DDP], strict=True)]
    alone = [alone / own for own, alone in zip(seconds[name], seconds[ALONE], strict=True)]
    beyond = [max(0.0, own - alone) for own, alone in zip(seconds[name], seconds[ALONE], strict=True)]
    told = [max(blocks) for blocks in zip(*(part["exposed_s"] for part in parts), strict=True)]
    return {
        "variant": name,
        "title": VARIANTS[name].title.format(steps=steps),
        "steps_per_s": steps / median(seconds[name]),
        "ms_per_step": 1000 * median(seconds[name]) / steps,
        "times_ddp": median(ratios),
        "times_ddp_min": min(ratios),
        "times_ddp_max": max(ratios),
        "times_alone": median(alone),
        "exposed_ms": 1000 * median(told if VARIANTS[name].is_ours else beyond) / steps,
        "bytes_per_step": max(part["bytes_per_step"] for part in parts),
        "block_seconds": seconds[name],
    }


def title(result: dict[str, Any]) -> str:
    """What was measured, in words."""
    where = f", {result['network']}" if result["network"] else ""
    apart = ", each variant in processes of its own" if result.get("apart") else ""
    return f"{WORKLOADS[result['model']].title}, {result['workers']} workers{where}{apart}"


def table(result: dict[str, Any]) -> str:
    """A Markdown table under a heading."""
    lines = [
        f"### {title(result)}",
        "",
        f"{result['blocks']} blocks of {result['steps']} steps. {result['machine']}; {result['date']}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for row in result["rows"]:
        if "error" in row:
            name = VARIANTS[row["variant"]].title.format(steps=result["steps"])
            lines.append(f"| {name} | failed: {row['error'].replace('|', '/')} |" + " |" * (len(COLUMNS) - 2))
            continue
        lines.append(
            f"| {row['title']} | {row['steps_per_s']:.2f} | {row['times_ddp']:.2f} "
            f"| {row['times_ddp_min']:.2f} to {row['times_ddp_max']:.2f} | {row['times_alone']:.2f} "
            f"| {row['ms_per_step']:.1f} | {row['exposed_ms']:.1f} | {row['bytes_per_step'] / 1e6:.3f} |"
        )
    return "\n".join(lines) + "\n" + "".join(f"\n{line}\n" for line in pairs(result))


def pairs(result: dict[str, Any]) -> list[str]:
    """One sentence for each pair that ran interleaved: how many times faster the first was in the same block."""
    by_name = {row["variant"]: row for row in result["rows"] if "error" not in row}
    lines = []
    for name, rival in PAIRS:
        if name in by_name and rival in by_name and by_name[name]["launch"] == by_name[rival]["launch"]:
            own, other = by_name[name], by_name[rival]
            ratios = [b / a for a, b in zip(own["block_seconds"], other["block_seconds"], strict=True)]
            times = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"{own['title']}: {times} times {other['title']}.")
    return lines


def load(folder: Path) -> list[dict[str, Any]]:
    """All results of a folder, by network, bandwidth and workers."""
    order = list(WORKLOADS)
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(
        results, key=lambda r: (r["network"] or "", r.get("apart", False), order.index(r["model"]), r["workers"])
    )


def write_csv(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One line for each variant of each result."""
    keys = ("variant", "title", "steps_per_s", "ms_per_step", "times_ddp", "times_ddp_min", "times_ddp_max",
            "times_alone", "exposed_ms", "bytes_per_step", "error")  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "workers", "network", *keys))
        for result in results:
            for row in result["rows"]:
                values = (row.get(key, "") for key in keys)
                writer.writerow((result["model"], result["workers"], result["network"] or "", *values))


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of the ratio to DDP with their range, one panel for each result."""
    require("matplotlib", "charts")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(results))
    lines = -(-len(results) // columns)
    figure = Figure(figsize=(9 * columns, 6.5 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, result in zip(figure.subplots(lines, columns, squeeze=False).flat, results, strict=False):
        rows = [row for row in reversed(result["rows"]) if "error" not in row]
        ratios = [row["times_ddp"] for row in rows]
        spread = [
            [row["times_ddp"] - row["times_ddp_min"] for row in rows],
            [row["times_ddp_max"] - row["times_ddp"] for row in rows],
        ]
        colors = ["tab:blue" if VARIANTS[row["variant"]].is_ours else "tab:gray" for row in rows]
        axes.barh([row["title"] for row in rows], ratios, xerr=spread, color=colors, ecolor="black", capsize=2)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(title(result))
        axes.set_xlabel("steps/s, times DDP + SGD")
    for axes in figure.axes[len(results) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=110)


def update_section(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write the section of the results file, in place of the one there or at the end."""
    _sections.update_section(path, HEADING, "\n".join((INTRODUCTION, "", *map(table, results))))
