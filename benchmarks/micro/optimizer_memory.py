"""Measure the memory that distributed optimizers need beyond their wrapped optimizers.

The unit is bytes per parameter. Each variant has its own worker processes. The backward pass gives
fixed gradients, because activations would hide the optimizer's intermediate results. A worker
counts the memory of its process: the peak while the optimizer is made and takes some steps, and the
memory that is kept after them. The state of the wrapped optimizer (momentum and the moments of
Adam) is subtracted from both. Freed memory is returned at once here. Within
``initialize_backends``, a process keeps its peak.

    python benchmarks/micro/optimizer_memory.py [--models mlp resnet18] [--workers 2] [--save]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _bench import Row, Subject, finish, make_parser, parse, positive, summarize
from _variants import VARIANTS, WORKLOADS, Context
from _workers import WorkerError, Workers, run_script
from torch import Tensor, nn

STEPS = 3
OTHERS = ("sgd_by_layer", "sgd_weights", "custom", "adam")
WRAPPED_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq")
SUBJECT = Subject(
    "optimizer_memory",
    "Memory of the distributed optimizers (`optimizer_memory.py`)",
    "bytes per parameter",
    (),
    ("The peak beyond parameters, gradients and the state of the wrapped optimizer; "
     "kept: after the steps.",
     "In float32, a copy of the model is 4 bytes per parameter."),
)  # fmt: skip


def process_bytes(field: str) -> int:
    """Return a size of this process: ``"VmRSS"`` is its memory now, and ``"VmHWM"`` the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: run this on Linux")


class Loss(torch.autograd.Function):
    """A loss of one parameter whose gradient is given."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return 0."""
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        """Return a copy of the gradient, because the optimizer may change it."""
        return ctx.gradient.clone(), None


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the network in a worker; the only request measures a variant."""
    torch.manual_seed(0)
    model = WORKLOADS[setup["model"]].make()
    numel = sum(parameter.numel() for parameter in model.parameters())

    def give_gradients(model: nn.Module) -> list[Tensor]:
        gradients = []
        for parameter in model.parameters():
            gradients.append(1e-3 * torch.randn_like(parameter))
            parameter.grad = gradients[-1].clone()
        return gradients

    def train(name: str, model: nn.Module, gradients: list[Tensor]) -> Any:
        trainee = VARIANTS[name].make(Context(model, dist.get_world_size(), dist.get_rank(), STEPS))
        for _ in range(STEPS):
            trainee.optimizer.zero_grad()
            # No name for the losses: it would keep their graph during the step.
            torch.stack(list(map(Loss.apply, model.parameters(), gradients))).sum().backward()
            trainee.optimizer.step()
        return trainee.optimizer

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        # The first steps import modules and connect the workers, which takes 75 MB.
        small = nn.Linear(64, 64)
        train(request["variant"], small, give_gradients(small))
        gradients = give_gradients(model)
        gc.collect()
        before = process_bytes("VmRSS")
        # The peak starts again from the memory now.
        Path("/proc/self/clear_refs").write_text("5")
        optimizer = train(request["variant"], model, gradients)
        peak, kept = process_bytes("VmHWM"), process_bytes("VmRSS")
        wrapped = 0
        for state in optimizer.state_dict()["state"].values():
            wrapped += sum(state[name].nbytes for name in WRAPPED_STATE if name in state)
        return {
            "peak": (peak - before - wrapped) / numel,
            "kept": (kept - before - wrapped) / numel,
            "wrapped": wrapped / numel,
        }

    return handle


def measure_variant(model: str, count: int, name: str) -> Row:
    """Measure a variant in separate processes."""
    case = f"{WORKLOADS[model].title}, {count} workers"
    title = VARIANTS[name].title.format(steps=STEPS)
    try:
        with Workers(__file__, count, {"model": model}) as workers:
            replies = workers.ask(variant=name)
    except WorkerError as error:
        return {"case": case, "variant": title, "error": str(error)[:200], **summarize([])}
    largest = max(replies, key=lambda reply: float(reply["peak"]))
    return {
        "case": case,
        "variant": title,
        **summarize([reply["peak"] for reply in replies], {}),
        "extra": {"kept": largest["kept"], "wrapped optimizer": largest["wrapped"]},
    }


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names, default = [], []
    for name, variant in VARIANTS.items():
        # DistributedDataParallel needs its own forward pass, FP16Optimizer makes the network
        # smaller, and a period of 4 needs more steps.
        if variant.keeps_memory and not name.startswith(("ddp", "half", "local4")):
            names.append(name)
            if variant.is_default or name in OTHERS:
                default.append(name)
    parser = make_parser(__doc__, blocks=1)
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "resnet18"])
    add("--workers", nargs="+", type=positive, default=[2], help="numbers of workers")
    add("--variants", nargs="+", choices=names, default=default, metavar="VARIANT",
        help=", ".join(names))  # fmt: skip
    return parse(parser, argv, models=["mlp"], variants=["ef_sign"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = read_arguments(argv)
    # glibc of the workers then returns every freed tensor at once, so their memory is that in use.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    cases = itertools.product(arguments.models, arguments.workers, arguments.variants)
    with mock.patch.dict(os.environ, settings):
        rows = list(itertools.starmap(measure_variant, cases))
    finish(SUBJECT, rows, arguments, f"Gloo, {STEPS} steps, given gradients.")


if __name__ == "__main__":
    run_script(main, make_handler)
