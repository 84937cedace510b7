"""Time the training of task 5a against a plain DDP loop of the same model on the same tokens.

Both have their own worker processes, with one thread each, and the same precision, batches and
AdamW. The plain loop has the shape of nanoGPT: no tracker, no library except the model.

    python benchmarks/micro/gpt_tokens.py [--preset mini] [--workers 1 2] [--save]
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _bench import Subject, Timed, finish, make_parser, measure, parse, positive
from _workers import Workers, largest, run_script
from torch import nn

PLAIN, TASK = "plain DDP loop", "task 5a"
TOKENS = 2**18
SUBJECT = Subject(
    "gpt_tokens",
    "Task 5a against a plain DDP loop (`gpt_tokens.py`)",
    "tokens/s",
    (PLAIN,),
    ("Limit: at least 1.0 times the plain loop on a quiet machine.",),
)


def random_tokens() -> np.ndarray:
    """Return bytes that stand for a text: their values do not change the time."""
    return np.random.default_rng(0).integers(0, 256, TOKENS, dtype=np.uint8)


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make one of the two in a worker; a request then trains for some steps."""
    from mlbench_core.tasks import get_task

    sys.path.insert(0, str(get_task("5a").script.parent))
    make = make_task if setup["is_task"] else make_plain
    torch.manual_seed(42)
    train = make(setup["preset"], setup["bf16"])
    train(2)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        dist.barrier()
        start = time.perf_counter()
        train(setup["steps"])
        return {"seconds": time.perf_counter() - start}

    return handle


def make_plain(preset: str, bf16: bool) -> Callable[[int], None]:
    """Make the loop: DDP, AdamW, clipping, and the loss as a number after each step."""
    import plans
    from torch.nn.parallel import DistributedDataParallel

    from mlbench_core.models.pytorch.gpt import GPT, GPTConfig

    plan = plans.PRESETS[preset]
    size, frequency = plan.divided(dist.get_world_size())
    assert frequency == 1, "the presets for CPUs do not accumulate"
    model = DistributedDataParallel(GPT(GPTConfig.preset(preset)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    tokens = random_tokens()

    def train(steps: int) -> None:
        model.train()
        for _ in range(steps):
            starts = torch.randint(len(tokens) - plan.context - 1, (size,)).tolist()
            pieces = np.stack([tokens[i : i + plan.context + 1].astype(np.int64) for i in starts])
            batch = torch.from_numpy(pieces)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                scores = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    return train


def make_task(preset: str, bf16: bool) -> Callable[[int], None]:
    """Make task 5a's training round from the same parts as its main.py."""
    import methods
    import plans

    from mlbench_core.controlflow.pytorch import train_round
    from mlbench_core.controlflow.pytorch.translation import EpochPart
    from mlbench_core.dataset.nlp.pytorch.token_shards import TokenBatches
    from mlbench_core.distributed.pytorch.memory import keep_freed_memory
    from mlbench_core.lr_scheduler.pytorch.lr import TrapezoidLR
    from mlbench_core.models.pytorch.autocast import Float32Output
    from mlbench_core.models.pytorch.gpt import GPT, GPTConfig, next_token_loss
    from mlbench_core.tracking.tracker import Tracker

    keep_freed_memory()  # as initialize_backends does
    plan, rank, workers = plans.PRESETS[preset], dist.get_rank(), dist.get_world_size()
    size, frequency = plan.divided(workers)
    batches = TokenBatches([random_tokens()], size, plan.context, rank, workers, seed=42)
    model = GPT(GPTConfig.preset(preset))
    network = Float32Output(model, torch.bfloat16 if bf16 else None)
    optimizer = methods.make_optimizer(model, plan.lr, "adamw")
    scheduler = TrapezoidLR(optimizer, plan.warmup_steps, plan.steps)
    tracker = Tracker([], "1", rank, progress=False)
    tracker.start()

    def train(steps: int) -> None:
        part = EpochPart(iter(batches), steps * frequency, is_last=False)
        train_round(
            part, network, optimizer, next_token_loss, [], scheduler, None, schedule_per="batch",
            tracker=tracker, update_freq=frequency, counts_tokens=True,
        )  # fmt: skip

    return train


def start_trainers(
    stack: contextlib.ExitStack, setup: dict[str, Any], count: int, is_task: bool
) -> Callable[[], Timed]:
    """Start workers that train by the task or by the plain loop; return one block of them."""
    workers = stack.enter_context(Workers(__file__, count, {**setup, "is_task": is_task}))
    return lambda: Timed(largest(workers.ask())["seconds"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    from mlbench_core.comparison.group_repeats import plural
    from mlbench_core.models.pytorch.autocast import has_fast_bfloat16
    from mlbench_core.models.pytorch.gpt import GPTConfig

    parser = make_parser(__doc__, blocks=7)
    add = parser.add_argument
    add("--preset", choices=("tiny", "mini"), default="tiny")
    add("--workers", type=positive, nargs="+", default=[1, 2])
    add("--steps", type=positive, default=20, help="steps of a block (default: 20)")
    arguments = parse(parser, argv, steps=2)
    bf16 = has_fast_bfloat16(gpu=False)
    setup = {"preset": arguments.preset, "steps": arguments.steps, "bf16": bf16}
    tokens = {"tiny": 2**11, "mini": 2**13}[arguments.preset]
    rows = []
    for count in arguments.workers:
        with contextlib.ExitStack() as stack:
            start = functools.partial(start_trainers, stack, setup, count)
            rows += measure(
                SUBJECT,
                f"GPT {arguments.preset}, {plural(count, 'worker')}",
                {PLAIN: start(is_task=False), TASK: start(is_task=True)},
                arguments.blocks,
                amount=arguments.steps * tokens,
            )
    flops = GPTConfig.preset(arguments.preset).flops_per_token()
    conditions = (
        f"{arguments.blocks} blocks of {arguments.steps} steps of {tokens:,} tokens, "
        f"{'bfloat16 by autocast' if bf16 else 'float32'}, one thread per worker, "
        f"{flops / 1e6:.1f} million operations per token (6 N + 12 L d T)."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
