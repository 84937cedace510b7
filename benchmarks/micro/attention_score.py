"""Time GNMT's attention score on a GPU: the library's kernel, plain torch, the blocked path, and
torch's compiler.

A batch has 128 sentences, as many queries as keys, and 1,024 features, in half precision. Each row
has the time by the clocks of ``_gpu.py``; the tanh that the problem has, divided by that time (they
count twice if the backward pass is timed); the bytes of operands, scores and gradients, divided by
it; and the largest errors against float64.

    MLBENCH_CUDA=1 pip install -e . && python benchmarks/micro/attention_score.py --save
    python benchmarks/micro/attention_score.py --device cpu --quick   # tries the script
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import _gpu
import torch
from _bench import Row, Subject, finish, parse, positive
from _gpu import BOTH, DTYPES, FORWARD, Work
from torch import Tensor

from mlbench_core.ops.pytorch import attention_score, attention_score_reference

OURS, PLAIN = "ours", "plain torch"
BLOCK_ELEMENTS = 1 << 25
ERROR_SENTENCES = 8
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SUBJECT = Subject(
    "attention_score",
    "GNMT's attention score (`attention_score.py`)",
    "µs",
    (OURS,),
    ("Limits for plain torch / ours: 6 for the forward pass, and 5 with the backward pass.",
     ("The kernels were those of commit dba9900b. Those of `csrc` are the same, and have not run "
      "again.")),
)  # fmt: skip


def make_variants(with_compiler: bool) -> dict[str, Score]:
    """Return the variants by name, ours first."""
    variants: dict[str, Score] = {
        OURS: attention_score,
        PLAIN: attention_score_reference,
        "blocked, tanh computed again": partial(attention_score, block_elements=BLOCK_ELEMENTS),
    }
    if with_compiler:
        variants["plain torch, compiled"] = torch.compile(attention_score_reference, dynamic=False)
    return variants


def least_bytes(batch: int, queries: int, keys: int, features: int, backward: bool) -> int:
    """Count operands of 2 bytes and scores of 4 once; with the backward pass once more, and as much
    for gradients."""
    operands = 2 * features * (batch * (queries + keys) + 2)
    scores = 4 * batch * queries * keys
    return operands + scores + (2 * operands + scores if backward else 0)


def make_leaves(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int
) -> list[Tensor]:  # fmt: skip
    """Make random queries, keys, bias and v with gradients, for a batch of shape (sentences,
    length, features)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    features = shape[-1]
    leaves = [
        torch.randn(s, generator=generator, device=device)
        for s in (shape, shape, (features,), (features,))
    ]
    # The score sums one term per feature; with this factor it stays of order 1.
    leaves[3] *= features**-0.5
    return [leaf.to(dtype).requires_grad_() for leaf in leaves]


def make_work(score: Score, sets: Sequence[Sequence[Tensor]]) -> dict[str, Work]:
    """Make forward pass, and both passes, on each set of tensors."""
    calls: dict[str, list[Callable[[], object]]] = {FORWARD: [], BOTH: []}
    for leaves in sets:
        gradient = torch.randn(
            len(leaves[0]), leaves[0].shape[1], leaves[1].shape[1], device=leaves[0].device
        )

        def both(leaves: Sequence[Tensor] = leaves, gradient: Tensor = gradient) -> object:
            return torch.autograd.grad(score(*leaves), leaves, gradient)

        calls[FORWARD].append(partial(score, *leaves))
        calls[BOTH].append(both)
    return {name: Work(of_pass) for name, of_pass in calls.items()}


def errors(score: Score, leaves: Sequence[Tensor]) -> dict[str, float]:
    """Return the largest errors of scores and gradients on the first sentences; none if the variant
    does not run."""
    few = [leaf.detach()[:ERROR_SENTENCES] if leaf.dim() == 3 else leaf.detach() for leaf in leaves]
    generator = torch.Generator(device=few[0].device).manual_seed(0)
    shape = (len(few[0]), few[0].shape[1], few[1].shape[1])
    gradient = torch.randn(shape, generator=generator, device=few[0].device)
    results = []
    for function, dtype in ((score, few[0].dtype), (attention_score_reference, torch.float64)):
        parts = [part.to(dtype).requires_grad_() for part in few]
        try:
            scores = function(*parts)
        except RuntimeError:
            return {}  # the timing that follows reports the reason
        results.append(
            [scores.detach(), *torch.autograd.grad(scores, parts, gradient.to(scores.dtype))]
        )
    return _gpu.relative_errors(*results)


def run_case(
    length: int,
    dtype: torch.dtype,
    variants: dict[str, Score],
    arguments: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """Measure all variants for one length; one row for each variant and pass."""
    torch.compiler.reset()  # otherwise the compiler gives up on a function after some shapes
    batch, features = arguments.batch_size, arguments.features
    sets = _gpu.sets_of_inputs(least_bytes(batch, length, length, features, False), device)
    seeds = range(arguments.seed, arguments.seed + sets)
    leaves = [make_leaves((batch, length, features), dtype, device, seed) for seed in seeds]
    works = {title: make_work(score, leaves) for title, score in variants.items()}
    rows: list[Row] = []
    for name in (FORWARD, BOTH):
        of_pass = {title: work[name] for title, work in works.items()}
        found = _gpu.run_pass(
            SUBJECT,
            f"{length} queries and keys, {_gpu.short(dtype)}, {name}",
            of_pass,
            device,
            arguments,
        )
        for row in (row for row in found if "error" not in row):
            tanh = batch * length * length * features * (2 if name == BOTH else 1)
            row["extra"] |= {
                "10⁹ tanh/s": tanh / row["value"] / 1e3,
                "GB/s": least_bytes(batch, length, length, features, name == BOTH)
                / row["value"]
                / 1e3,
                **errors(variants[row["variant"]], leaves[0]),
            }
        rows += found
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = _gpu.make_gpu_parser(__doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=[25, 50, 80],
        help="queries, and as many keys",
    )
    parser.add_argument("--batch-size", type=positive, default=128, help="sentences")
    parser.add_argument("--features", type=positive, default=1024, help="H")
    parser.add_argument("--without-compiler", action="store_true", help="leave out torch.compile")
    arguments = parse(
        parser, argv, rounds=1, lengths=[3], batch_size=1, features=8, without_compiler=True
    )
    device = _gpu.pick_device(arguments.device, "attention_score.py")
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    variants = make_variants(with_compiler=not arguments.without_compiler)
    rows: list[Row] = []
    for dtype, length in itertools.product(dtypes, arguments.lengths):
        rows += run_case(length, dtype, variants, arguments, device)
    conditions = (
        f"{arguments.batch_size} sentences, {arguments.features:,} features; "
        f"{arguments.blocks} blocks of "
        f"{arguments.rounds} rounds. {_gpu.limits(device, dtypes)}"
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
