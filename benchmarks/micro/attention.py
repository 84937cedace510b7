"""Attention for short sentences on a GPU: the library's kernels against torch's ways, core and whole module.

Batches of 8,192 tokens, 16 heads of 64, in half precision. Rivals: (a) ``nn.MultiheadAttention``; (b)
``scaled_dot_product_attention`` with the padding mask, by every backend in turn; (c) FlashAttention on sentences of
different lengths, without padding; (d) the plain reference. Forward is the forward pass of training, which keeps what
the backward pass needs. For each: seconds by the three clocks of ``_gpu.py``; the bytes and FLOPs that the problem
needs by the seconds it took, against what the card reaches in the same run; the share of weights that dropout really
drops; and the largest error without dropout against float64, relative to the largest number.

Ratios above 1 say that ours is faster; they are medians over interleaved blocks of the ratio in the block, against the
fastest rival of a kind. Rivals without padding are held against ours without padding.

    make cuda && python benchmarks/micro/attention.py --append-results
    python benchmarks/micro/attention.py --device cpu --tokens 256 --lengths 16 --blocks 1   # tries the script
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _attention_batch import (
    HEAD_DIM,
    HEADS,
    Batch,
    core_cost,
    dropped,
    exact,
    make_batch,
    module_cost,
    probe_leaves,
    random_gradient,
    random_leaves,
)
from _attention_ways import OURS, Way, core_ways, module_ways
from _gpu import (
    CLOCKS,
    Limits,
    Work,
    add_arguments,
    clock_of,
    first_line,
    markdown,
    measure,
    measure_limits,
    pick_device,
    sets_of_inputs,
    short,
    text,
    timing_columns,
    verdict,
    where,
    write_csv,
)
from _sections import RESULTS, update_section
from torch import Tensor

from mlbench_core.errors import require
from mlbench_core.ops.pytorch import extension
from mlbench_core.ops.pytorch.attention import MAX_POSITIONS

HEADING = "## `attention.py`: attention for short sentences"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORWARD, BOTH = "forward", "forward + backward"
PARTS = {"core": (core_ways, core_cost), "module": (module_ways, module_cost)}
TARGETS: dict[str, dict[str, float | dict[int, float]]] = {
    "core": {"a": 4.0, "b": 1.5, "c": {28: 3.0, 80: 1.8}},
    "module": {"a": 1.4, "b": 1.1, "c": 1.15},
}
"""Ratios aimed at, forward + backward, by rival; (c)'s of the core for two lengths."""
RIVALS = {
    "a": "(a) nn.MultiheadAttention",
    "b": "(b) scaled_dot_product_attention",
    "c": "(c) FlashAttention without padding",
    "d": "(d) plain reference",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is attended to.

    Attributes:
        length: Positions of the longest sentence.
        dtype: Of all tensors.
        dropout: Probability that a weight becomes 0.
        padded: Whether other sentences are shorter.
    """

    length: int
    dtype: torch.dtype
    dropout: float
    padded: bool

    def row(self) -> Row:
        """The columns that name the case."""
        return {"length": self.length, "dtype": short(self.dtype), "dropout": self.dropout, "padded": self.padded}


def target(part: str, rival: str, length: int) -> float | None:
    """The ratio aimed at; None if there is none."""
    found = TARGETS[part].get(rival)
    return found.get(length) if isinstance(found, dict) else found


def make_work(way: Way, batch: Batch, case: Case, sets: int) -> dict[str, Work]:
    """Forward pass, and both passes, of a way on so many sets of tensors."""
    calls: dict[str, list[Any]] = {FORWARD: [], BOTH: []}
    for seed in range(sets):
        prepared = way.prepare(batch, random_leaves(way.part, batch, case.dtype, seed), case.dropout)
        gradient = batch.put(random_gradient(way.part, batch, case.dtype, seed), way.layout)

        def both(prepared: Any = prepared, gradient: Tensor = gradient) -> object:
            return torch.autograd.grad(prepared.run(), prepared.leaves, gradient)

        calls[FORWARD].append(prepared.run)
        calls[BOTH].append(both)
    return {name: Work(of_pass, way.around) for name, of_pass in calls.items()}


def errors(way: Way, batch: Batch, dtype: torch.dtype, expected: Sequence[Tensor]) -> dict[str, float]:
    """Largest errors of output and gradients without dropout, relative to the largest number of each."""
    prepared = way.prepare(batch, random_leaves(way.part, batch, dtype, seed=0), 0.0)
    with way.around():
        output = prepared.run()
        gradient = batch.put(random_gradient(way.part, batch, dtype, seed=0), way.layout)
        gradients = torch.autograd.grad(output, prepared.leaves, gradient)
    found = way.batch_first(batch, output, gradients)
    relative = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)]
    return {"output_error": relative[0], "gradient_error": max(relative[1:])}


def drop_rate(way: Way, batch: Batch, case: Case) -> float | None:
    """The share of weights that the way drops; None without dropout."""
    if not case.dropout:
        return None
    gone = total = 0
    for first_key in range(0, case.length, HEAD_DIM):
        prepared = way.prepare(batch, probe_leaves(way.part, batch, case.dtype, first_key), case.dropout)
        with way.around(), torch.no_grad():
            output = batch.take(prepared.run(), way.layout)
        found, of = dropped(batch, output, first_key)
        gone, total = gone + found, total + of
    return gone / total


def qualities(ways: Sequence[Way], batch: Batch, case: Case) -> dict[str, Row]:
    """Errors and drop rate of each way, or why torch refuses it."""
    part = ways[0].part
    gradient = random_gradient(part, batch, case.dtype, seed=0)
    expected = exact(part, batch, random_leaves(part, batch, case.dtype, seed=0), gradient)
    found: dict[str, Row] = {}
    for way in ways:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                rate = drop_rate(way, batch, case)
                found[way.title] = {"drop_rate": rate, **errors(way, batch, case.dtype, expected)}
            except RuntimeError as error:
                found[way.title] = {"refused": first_line(error, caught)}
    return found


def run_case(part: str, case: Case, arguments: argparse.Namespace, device: torch.device, limits: Limits) -> list[Row]:
    """Measure all ways of one case; one row for each way and pass."""
    make_ways, cost_of = PARTS[part]
    batch = make_batch(case.length, arguments.tokens, case.padded, device, arguments.seed)
    costs = {name: cost_of(batch.lengths.tolist(), name == BOTH) for name in (FORWARD, BOTH)}
    ways = make_ways()
    quality = qualities(ways, batch, case)
    sets = sets_of_inputs(costs[FORWARD].bytes, device)
    works = {way.title: make_work(way, batch, case, sets) for way in ways if "refused" not in quality[way.title]}
    rows: list[Row] = []
    for name in (FORWARD, BOTH):
        timings, refused = measure(
            {title: work[name] for title, work in works.items()},
            device,
            blocks=arguments.blocks,
            rounds=arguments.rounds,
        )
        for way in ways:
            row = {"part": part, **case.row(), "pass": name, "rival": way.rival, "title": way.title}
            row |= quality[way.title] | ({"refused": refused[way.title]} if way.title in refused else {})
            if way.title in timings:
                row |= timing_columns(timings[way.title], timings.get(our_match(way)))
                row |= rate_columns(timings[way.title].best(), costs[name], limits, case.dtype)
            rows.append(row)
    return rows


def our_match(way: Way) -> str:
    """Our way that a rival is held against: the one that has no padding either, or the other one."""
    return "ours, packed rows" if way.layout == "packed" else "ours"


def rate_columns(seconds: float, cost: Any, limits: Limits, dtype: torch.dtype) -> Row:
    """What the problem needs by the seconds it took, and as a share of what the device reaches."""
    bytes_per_s, flops_per_s = cost.bytes / seconds, cost.flops / seconds
    return {
        "gb_per_s": bytes_per_s / 1e9,
        "copy_share": bytes_per_s / limits.copy_bytes_per_s,
        "tflop_per_s": flops_per_s / 1e12,
        "matrix_share": flops_per_s / limits.matrix_flops_per_s[dtype],
    }


def case_table(rows: Sequence[Row]) -> str:
    """All ways and passes of one part of one case."""
    first = rows[0]
    padding = "sentences of half to all of it" if first["padded"] else "no padding"
    columns = ("way", "pass", "wall µs", "GPU µs", "graph µs", "times ours", "range", "GB/s", "of copying", "TFLOP/s",
               "of matrices", "dropped", "error", "gradients' error")  # fmt: skip
    clock = clock_of(rows)
    cells = [
        [f"({row['rival']}) {row['title']}" if row["rival"] != OURS else row["title"], row["pass"], *_cells(row, clock)]
        for row in rows
    ]
    title = f"{first['part']}, {first['length']} positions, {first['dtype']}, dropout {first['dropout']:g}, {padding}"
    return f"### {title}\n\n{markdown(columns, cells)}"


def _cells(row: Row, clock: str) -> list[str | None]:
    """The numbers of a row as text."""
    if "refused" in row:
        return ["refused: " + row["refused"].replace("|", "/")]
    spread = (row.get(f"{clock}_times_least"), row.get(f"{clock}_times_most"))
    return [
        *(text(row[f"{name}_us"], ".1f") for name in CLOCKS),
        text(row.get(f"{clock}_times"), ".2f"),
        None if None in spread else f"{spread[0]:.2f} to {spread[1]:.2f}",
        *(text(row[name], form) for name, form in (("gb_per_s", ",.0f"), ("copy_share", ".0%"))),
        *(text(row[name], form) for name, form in (("tflop_per_s", ".3g"), ("matrix_share", ".0%"))),
        text(row["drop_rate"], ".4f"),
        *(text(row[name], ".1e") for name in ("output_error", "gradient_error")),
    ]


def fastest(rows: Iterable[Row], part: str, rival: str, length: int, clock: str) -> Row | None:
    """The fastest of a kind of rivals, forward + backward; None if all were refused or there is nothing to compare."""
    found = [
        row
        for row in rows
        if (row["part"], row["rival"], row["length"], row["pass"]) == (part, rival, length, BOTH)
        and row.get(f"{clock}_times") is not None
    ]
    return min(found, key=lambda row: row[f"{clock}_us"], default=None)


def ratio_table(rows: Sequence[Row], clock: str) -> str:
    """Ratios to ours of the fastest rival of each kind for every length, beside the targets; rows of one dtype, ..."""
    lengths = sorted({row["length"] for row in rows})
    cells: list[list[object]] = []
    for part, rival in itertools.product(PARTS, RIVALS):
        line: list[object] = [part, RIVALS[rival]]
        for length in lengths:
            row, aim = fastest(rows, part, rival, length, clock), target(part, rival, length)
            ratio = None if row is None else row[f"{clock}_times"]
            line.append(None if ratio is None else verdict(ratio, aim, is_judged=clock != "wall"))
        cells.append(line)
    return markdown(("part", "rival", *(f"{length} positions" for length in lengths)), cells)


def groups(rows: Sequence[Row]) -> dict[tuple[str, float, bool], list[Row]]:
    """Rows by dtype, dropout and padding."""
    found: dict[tuple[str, float, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row["dtype"], row["dropout"], row["padded"]), []).append(row)
    return found


def group_title(key: tuple[str, float, bool]) -> str:
    """A group in words."""
    dtype, dropout, padded = key
    return f"{dtype}, dropout {dropout:g}, {'padding' if padded else 'no padding'}"


def report(rows: Sequence[Row], limits: Limits, arguments: argparse.Namespace, device: torch.device) -> str:
    """The text of the section: conditions, and the ratios by the events' clock and in graphs."""
    parts = [
        f"{arguments.tokens:,} positions, {HEADS} heads of {HEAD_DIM}; forward + backward, {arguments.blocks} blocks "
        f"of {arguments.rounds} rounds; {where(device)}; {date.today()}.\n{limits.sentence()}\n"
    ]
    for clock in ("gpu", "graph") if device.type == "cuda" else ("wall",):
        for key, members in groups(rows).items():
            parts.append(f"### Times ours, {clock} clock, {group_title(key)}\n\n{ratio_table(members, clock)}")
    return "\n".join(parts)


def plot(rows: Sequence[Row], path: Path) -> None:
    """The fastest rival of each kind as multiples of ours over the length, with the targets."""
    require("matplotlib", "charts")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, clock = groups(rows), clock_of(rows)
    figure = Figure(figsize=(5 * len(found), 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(PARTS), len(found), squeeze=False)
    for (line, part), (column, (key, members)) in itertools.product(enumerate(PARTS), enumerate(found.items())):
        axes = panels[line, column]
        for color, (rival, title) in zip(("C0", "C1", "C2", "C3"), RIVALS.items(), strict=True):
            lengths = sorted({row["length"] for row in members})
            best = {length: fastest(members, part, rival, length, clock) for length in lengths}
            points = [(length, row[f"{clock}_times"]) for length, row in best.items() if row is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=color, label=title)
            aims = [(length, aim) for length in lengths if (aim := target(part, rival, length)) is not None]
            axes.plot([x for x, _ in aims], [y for _, y in aims], "_", color=color, markersize=14)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=f"{part}, {group_title(key)}", xlabel="positions", ylabel=f"times ours ({clock}); - target")
    panels[0, 0].legend()
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 28, 48, 64, 80, 128], help="positions")
    parser.add_argument("--tokens", type=int, default=8192, help="positions of a batch, padding included")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1], help="probabilities")
    parser.add_argument("--padding", nargs="+", choices=("without", "with"), default=["without", "with"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_arguments(parser, output="attention-results")
    arguments = parser.parse_args(argv)
    longest = min(MAX_POSITIONS, arguments.tokens)
    if min(arguments.lengths) < 1 or max(arguments.lengths) > longest:
        parser.error(f"argument --lengths: {arguments.lengths}; each must be at least 1 and at most {longest}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = parse(argv)
    device = pick_device(arguments.device, "attention.py")
    if device is None:
        return
    if reason := extension.why_not():
        print(f"Ours runs its plain implementation: {reason}.")
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    limits = measure_limits(device, dtypes)
    rows: list[Row] = []
    chosen = itertools.product(dtypes, arguments.dropout, arguments.padding, arguments.lengths, arguments.parts)
    for dtype, dropout, padding, length, part in chosen:
        found = run_case(part, Case(length, dtype, dropout, padding == "with"), arguments, device, limits)
        print(case_table(found), flush=True)
        rows += found
    section = report(rows, limits, arguments, device)
    print(section)
    write_csv(rows, arguments.output / "attention.csv")
    plot(rows, arguments.output / "attention.png")
    if arguments.append_results:
        update_section(RESULTS, HEADING, section)


if __name__ == "__main__":
    main()
