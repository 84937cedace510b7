"""Time attention for short sentences on a GPU: the library's kernels against torch's, core and
whole module.

Batches have 8,192 tokens and 16 heads of 64, in half precision. The variants against ours are (a)
``nn.MultiheadAttention``; (b) ``scaled_dot_product_attention`` with the padding mask, by every
backend; (c) FlashAttention on sentences of different lengths, without padding; (d) the plain
reference. The forward pass is that of training, which keeps the tensors that the backward pass
needs.

Each row has the time by the clocks of ``_gpu.py``; the bytes and FLOPs that the problem needs,
divided by that time; the share of weights that dropout really drops; and the largest errors without
dropout against float64.

    MLBENCH_CUDA=1 pip install -e . && python benchmarks/micro/attention.py --save
    python benchmarks/micro/attention.py --device cpu --quick   # tries the script
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import _attention_batch as inputs
import _gpu
import torch
from _attention_batch import HEAD_DIM, Batch
from _attention_variants import OURS, Variant, core_variants, module_variants
from _bench import Row, Subject, finish, parse, positive, summarize
from _gpu import BOTH, DTYPES, FORWARD, Work
from torch import Tensor

from mlbench_core.ops.pytorch.attention import MAX_POSITIONS

PARTS = {"core": (core_variants, inputs.core_cost), "module": (module_variants, inputs.module_cost)}
SUBJECT = Subject(
    "attention",
    "Attention for short sentences (`attention.py`)",
    "µs",
    (OURS,),
    (("Limits for others / ours, both passes. Core: (a) 4, (b) 1.5, (c) 3 at 28 positions and "
      "1.8 at 80. Module: (a) 1.4, (b) 1.1, (c) 1.15."),
     ("The kernels were those of commit dba9900b. Those of `csrc` are the same, and have not run "
      "again. This script no longer has the variant \"ours, packed rows\".")),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        length: Positions of the longest sentence.
        dtype: Of all tensors.
        dropout: Probability that a weight becomes 0.
        padded: True if other sentences are shorter.
    """

    length: int
    dtype: torch.dtype
    dropout: float
    padded: bool

    def __str__(self) -> str:
        padding = "padded" if self.padded else "not padded"
        return (
            f"{self.length} positions, {_gpu.short(self.dtype)}, dropout {self.dropout:g}, "
            f"{padding}"
        )


def make_work(variant: Variant, batch: Batch, case: Case, sets: int) -> dict[str, Work]:
    """Make forward pass, and both passes, of a variant on ``sets`` sets of tensors."""
    calls: dict[str, list[Any]] = {FORWARD: [], BOTH: []}
    for seed in range(sets):
        prepared = variant.prepare(
            batch, inputs.random_leaves(variant.part, batch, case.dtype, seed), case.dropout
        )
        gradient = batch.put(
            inputs.random_gradient(variant.part, batch, case.dtype, seed), variant.layout
        )

        def both(prepared: Any = prepared, gradient: Tensor = gradient) -> object:
            return torch.autograd.grad(prepared.run(), prepared.leaves, gradient)

        calls[FORWARD].append(prepared.run)
        calls[BOTH].append(both)
    return {name: Work(of_pass, variant.around) for name, of_pass in calls.items()}


def errors(
    variant: Variant, batch: Batch, dtype: torch.dtype, expected: Sequence[Tensor]
) -> dict[str, float]:
    """Return the largest errors of output and gradients without dropout."""
    prepared = variant.prepare(batch, inputs.random_leaves(variant.part, batch, dtype, seed=0), 0.0)
    with variant.around():
        output = prepared.run()
        gradient = batch.put(
            inputs.random_gradient(variant.part, batch, dtype, seed=0), variant.layout
        )
        gradients = torch.autograd.grad(output, prepared.leaves, gradient)
    return _gpu.relative_errors(variant.batch_first(batch, output, gradients), expected)


def drop_rate(variant: Variant, batch: Batch, case: Case) -> float | None:
    """Return the share of weights that the variant drops; None without dropout."""
    if not case.dropout:
        return None
    gone = total = 0
    # The probe shows the weights of as many keys as a head has features, so long sentences need
    # several.
    for first_key in range(0, case.length, HEAD_DIM):
        prepared = variant.prepare(
            batch, inputs.probe_leaves(variant.part, batch, case.dtype, first_key), case.dropout
        )
        with variant.around(), torch.no_grad():
            output = batch.take(prepared.run(), variant.layout)
        found, of = inputs.dropped(batch, output, first_key)
        gone, total = gone + found, total + of
    return gone / total


def qualities(variants: Sequence[Variant], batch: Batch, case: Case) -> dict[str, Row]:
    """Return errors and drop rate of each variant, or why torch refuses it."""
    part = variants[0].part
    gradient = inputs.random_gradient(part, batch, case.dtype, seed=0)
    expected = inputs.exact(
        part, batch, inputs.random_leaves(part, batch, case.dtype, seed=0), gradient
    )
    found: dict[str, Row] = {}
    for variant in variants:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                rate = drop_rate(variant, batch, case)
                found[variant.title] = {
                    "dropped": rate,
                    **errors(variant, batch, case.dtype, expected),
                }
            except RuntimeError as error:
                found[variant.title] = {"refused": _gpu.reason(error, caught)}
    return found


def run_case(
    part: str, case: Case, arguments: argparse.Namespace, device: torch.device
) -> list[Row]:
    """Measure all variants of one case; one row for each variant and pass."""
    make_variants, cost_of = PARTS[part]
    batch = inputs.make_batch(case.length, arguments.tokens, case.padded, device, arguments.seed)
    costs = {name: cost_of(batch.lengths.tolist(), name == BOTH) for name in (FORWARD, BOTH)}
    variants = make_variants()
    quality = qualities(variants, batch, case)
    refused = {title: found["refused"] for title, found in quality.items() if "refused" in found}
    # The forward pass touches the fewest bytes, so it needs the most sets.
    sets = _gpu.sets_of_inputs(costs[FORWARD].bytes, device)
    # A variant that failed without a clock would fail with one, too.
    works = {v.title: make_work(v, batch, case, sets) for v in variants if v.title not in refused}
    rows: list[Row] = []
    for name, cost in costs.items():
        title = f"{part}, {case}, {name}"
        of_pass = {variant: work[name] for variant, work in works.items()}
        timed = _gpu.run_pass(SUBJECT, title, of_pass, device, arguments)
        for found in timed:
            if "error" not in found:
                seconds = found["value"] / 1e6
                rates = {"GB/s": cost.bytes / seconds / 1e9, "TFLOP/s": cost.flops / seconds / 1e12}
                found["extra"] |= rates | quality[found["variant"]]
        rows += timed
        rows += [
            {"case": title, "variant": variant, "error": why, **summarize([])}
            for variant, why in refused.items()
        ]
    return rows


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _gpu.make_gpu_parser(__doc__)
    parser.add_argument("--lengths", nargs="+", type=positive, default=[28, 80], help="positions")
    parser.add_argument(
        "--tokens", type=positive, default=8192, help="positions of a batch, padding included"
    )
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.1], help="probabilities")
    parser.add_argument("--padding", nargs="+", choices=("without", "with"), default=["with"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parse(parser, argv, rounds=1, lengths=[4], tokens=8, parts=["core"])
    longest = min(MAX_POSITIONS, arguments.tokens)
    if max(arguments.lengths) > longest:
        parser.error(
            f"argument --lengths: each must be at most {longest}, not {max(arguments.lengths)}"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = read_arguments(argv)
    device = _gpu.pick_device(arguments.device, "attention.py")
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    chosen = itertools.product(
        dtypes, arguments.dropout, arguments.padding, arguments.lengths, arguments.parts
    )
    rows: list[Row] = []
    for dtype, dropout, padding, length, part in chosen:
        rows += run_case(part, Case(length, dtype, dropout, padding == "with"), arguments, device)
    conditions = (
        f"{arguments.tokens:,} positions, {arguments.blocks} blocks of {arguments.rounds} rounds."
    )
    finish(SUBJECT, rows, arguments, f"{conditions} {_gpu.limits(device, dtypes)}")


if __name__ == "__main__":
    main()
