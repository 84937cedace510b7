"""GNMT's attention score on a GPU: the library's kernel against plain torch, its blocked path, and torch's compiler.

128 sentences, as many queries as keys, 1,024 features, in half precision. For each way: seconds by the three clocks of
``_gpu.py``; the tanh that the problem has by these seconds, counted once more for the backward pass; the bytes of
operands, scores and gradients by these seconds, against copying in the same run; and the largest errors against
float64, relative to the largest number. Ratios above 1 say that ours is faster; they are medians over interleaved
blocks of the ratio in the block.

    make cuda && python benchmarks/micro/attention_score.py --append-results
    python benchmarks/micro/attention_score.py --device cpu --batch-size 1 --lengths 5 --blocks 1   # tries the script
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import (
    CLOCKS,
    Limits,
    Timing,
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
from mlbench_core.ops.pytorch import attention_score, attention_score_reference, extension

HEADING = "## `attention_score.py`: GNMT's attention score"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORWARD, BOTH = "forward", "forward + backward"
OURS, UNFUSED, BLOCKED, COMPILED = "ours", "plain torch", "blocked, tanh computed again", "plain torch, compiled"
TARGETS = {FORWARD: 6.0, BOTH: 5.0}
"""Ratios to plain torch that are aimed at."""
BLOCK_ELEMENTS = 1 << 25
ERROR_SENTENCES = 8
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def make_ways(with_compiler: bool) -> dict[str, Score]:
    """The ways by name, ours first."""
    ways: dict[str, Score] = {
        OURS: attention_score,
        UNFUSED: attention_score_reference,
        BLOCKED: partial(attention_score, block_elements=BLOCK_ELEMENTS),
    }
    return ways | ({COMPILED: torch.compile(attention_score_reference, dynamic=False)} if with_compiler else {})


def least_bytes(batch: int, queries: int, keys: int, features: int, backward: bool) -> int:
    """Operands of 2 bytes and scores of 4 once; with the backward pass once more, and as much of gradients."""
    operands = 2 * features * (batch * (queries + keys) + 2)
    scores = 4 * batch * queries * keys
    return operands + scores + (2 * operands + scores if backward else 0)


def make_leaves(
    batch: int, length: int, features: int, dtype: torch.dtype, device: torch.device, seed: int
) -> list[Tensor]:
    """Random queries, keys, bias and v, which gradients can be taken of."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = [(batch, length, features), (batch, length, features), (features,), (features,)]
    leaves = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    leaves[3] *= features**-0.5
    return [leaf.to(dtype).requires_grad_() for leaf in leaves]


def make_work(score: Score, sets: Sequence[Sequence[Tensor]]) -> dict[str, Work]:
    """Forward pass, and both passes, on each set of tensors."""
    calls: dict[str, list[Callable[[], object]]] = {FORWARD: [], BOTH: []}
    for leaves in sets:
        gradient = torch.randn(len(leaves[0]), leaves[0].shape[1], leaves[1].shape[1], device=leaves[0].device)

        def both(leaves: Sequence[Tensor] = leaves, gradient: Tensor = gradient) -> object:
            return torch.autograd.grad(score(*leaves), leaves, gradient)

        calls[FORWARD].append(partial(score, *leaves))
        calls[BOTH].append(both)
    return {name: Work(of_pass) for name, of_pass in calls.items()}


def errors(score: Score, leaves: Sequence[Tensor]) -> Row:
    """Largest errors of scores and gradients on the first sentences, relative to the largest number of each."""
    few = [leaf.detach()[:ERROR_SENTENCES] if leaf.dim() == 3 else leaf.detach() for leaf in leaves]
    generator = torch.Generator(device=few[0].device).manual_seed(0)
    shape = (len(few[0]), few[0].shape[1], few[1].shape[1])
    gradient = torch.randn(shape, generator=generator, device=few[0].device)
    results = []
    for function, dtype in ((score, few[0].dtype), (attention_score_reference, torch.float64)):
        parts = [part.to(dtype).requires_grad_() for part in few]
        scores = function(*parts)
        results.append([scores.detach(), *torch.autograd.grad(scores, parts, gradient.to(scores.dtype))])
    relative = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(*results, strict=True)]
    return {"output_error": relative[0], "gradient_error": max(relative[1:])}


def qualities(score: Score, leaves: Sequence[Tensor]) -> Row:
    """The errors of a way, or why it does not run."""
    try:
        return errors(score, leaves)
    except RuntimeError as error:
        return {"refused": first_line(error)}


def run_case(
    length: int, dtype: torch.dtype, ways: dict[str, Score], arguments: argparse.Namespace, device: torch.device,
    limits: Limits,
) -> list[Row]:  # fmt: skip
    """Measure all ways for one length; one row for each way and pass."""
    torch.compiler.reset()  # the compiler gives up on a function after some shapes
    shape = (arguments.batch_size, length, arguments.features)
    sets = sets_of_inputs(least_bytes(arguments.batch_size, length, length, arguments.features, False), device)
    leaves = [make_leaves(*shape, dtype, device, arguments.seed + number) for number in range(sets)]
    quality = {title: qualities(score, leaves[0]) for title, score in ways.items()}
    works = {title: make_work(score, leaves) for title, score in ways.items() if "refused" not in quality[title]}
    rows: list[Row] = []
    for name in (FORWARD, BOTH):
        of_pass = {title: work[name] for title, work in works.items()}
        timings, refused = measure(of_pass, device, blocks=arguments.blocks, rounds=arguments.rounds)
        for title in ways:
            row: Row = {"length": length, "dtype": short(dtype), "pass": name, "title": title, **quality[title]}
            if title in refused:
                row["refused"] = refused[title]
            if title in timings:
                row |= timing_columns(timings[title], timings.get(OURS))
                row |= rate_columns(timings[title], length, name == BOTH, arguments, limits)
            rows.append(row)
    return rows


def rate_columns(timing: Timing, length: int, backward: bool, arguments: argparse.Namespace, limits: Limits) -> Row:
    """Tanh in a second, and the least traffic by the seconds it took."""
    seconds, batch, features = timing.best(), arguments.batch_size, arguments.features
    bytes_per_s = least_bytes(batch, length, length, features, backward) / seconds
    tanh = batch * length * length * features * (2 if backward else 1)
    return {
        "gtanh_per_s": tanh / seconds / 1e9,
        "gb_per_s": bytes_per_s / 1e9,
        "copy_share": bytes_per_s / limits.copy_bytes_per_s,
    }


def table(rows: Sequence[Row]) -> str:
    """All ways and passes of some lengths of one dtype."""
    columns = ("length", "way", "pass", "wall µs", "GPU µs", "graph µs", "times ours", "range", "10⁹ tanh/s", "GB/s",
               "of copying", "error", "gradients' error")  # fmt: skip
    clock = clock_of(rows)
    cells = []
    for row in rows:
        cell = [row["length"], row["title"], row["pass"]]
        if "refused" in row:
            cells.append([*cell, "refused: " + row["refused"].replace("|", "/"), *[None] * (len(columns) - 4)])
            continue
        ratio = row.get(f"{clock}_times")
        is_judged = clock != "wall"
        aim = TARGETS[row["pass"]] if row["title"] == UNFUSED else None
        spread = [row.get(f"{clock}_times_{end}") for end in ("least", "most")]
        cell += [text(row[f"{name}_us"], ".1f") for name in CLOCKS]
        cell.append(None if ratio is None else verdict(ratio, aim, is_judged=is_judged))
        cell.append(None if None in spread else f"{spread[0]:.2f} to {spread[1]:.2f}")
        cell += [text(row["gtanh_per_s"], ",.1f"), text(row["gb_per_s"], ",.0f"), text(row["copy_share"], ".0%")]
        cells.append(cell + [text(row[name], ".1e") for name in ("output_error", "gradient_error")])
    return markdown(columns, cells)


def report(rows: Sequence[Row], limits: Limits, arguments: argparse.Namespace, device: torch.device) -> str:
    """The text of the section."""
    parts = [
        f"{arguments.batch_size} sentences, {arguments.features:,} features; {arguments.blocks} blocks of "
        f"{arguments.rounds} rounds; {where(device)}; {date.today()}.\n{limits.sentence()}\n"
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        parts.append(f"### {dtype}\n\n{table([row for row in rows if row['dtype'] == dtype])}")
    return "\n".join(parts)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Each way as a multiple of ours over the length, with the target against plain torch."""
    require("matplotlib", "charts")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes, clock = list(dict.fromkeys(row["dtype"] for row in rows)), clock_of(rows)
    figure = Figure(figsize=(10, 4.5 * len(dtypes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(dtypes), 2, squeeze=False)
    for (line, dtype), (column, name) in itertools.product(enumerate(dtypes), enumerate((FORWARD, BOTH))):
        axes = panels[line, column]
        for title in dict.fromkeys(row["title"] for row in rows):
            points = [
                (row["length"], row[f"{clock}_times"])
                for row in rows
                if (row["dtype"], row["pass"], row["title"]) == (dtype, name, title) and f"{clock}_times" in row
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=title)
        axes.axhline(TARGETS[name], color="black", linestyle=":", label="target against plain torch")
        axes.set(title=f"{name}, {dtype}", xlabel="queries = keys", ylabel=f"times ours ({clock})")
    panels[0, 0].legend()
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[25, 50, 80], help="queries, and as many keys")
    parser.add_argument("--batch-size", type=int, default=128, help="sentences")
    parser.add_argument("--features", type=int, default=1024, help="H")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--without-compiler", action="store_true", help="leave out torch.compile")
    add_arguments(parser, output="attention-score-results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = parse(argv)
    device = pick_device(arguments.device, "attention_score.py")
    if device is None:
        return
    if reason := extension.why_not():
        print(f"Ours runs its plain implementation: {reason}.")
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    limits = measure_limits(device, dtypes)
    ways = make_ways(with_compiler=not arguments.without_compiler)
    rows: list[Row] = []
    for dtype, length in itertools.product(dtypes, arguments.lengths):
        found = run_case(length, dtype, ways, arguments, device, limits)
        print(table(found), flush=True)
        rows += found
    section = report(rows, limits, arguments, device)
    print(section)
    write_csv(rows, arguments.output / "attention_score.csv")
    plot(rows, arguments.output / "attention_score.png")
    if arguments.append_results:
        update_section(RESULTS, HEADING, section)


if __name__ == "__main__":
    main()
