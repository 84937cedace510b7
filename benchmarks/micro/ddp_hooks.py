"""Time steps of DistributedDataParallel with this library's hooks and with torch's.

The accuracy of the trained networks is compared, too. Torch's hook of PowerSGD needs one bucket on
Gloo. Its bf16 hook needs NCCL, so it is left out.

The large networks show the speed. The network for digits starts again in every block, so its
accuracy on images that no worker trained on can be compared. Its column "resume" is the largest
difference of a weight between a run without interruption and one that was resumed in the middle: 0
if the run resumes to the last bit.

    python benchmarks/micro/ddp_hooks.py [--models mlp resnet20 digits] [--workers 2] [--save]
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _variants import HUGE_MB, MOMENTUM, WORKLOADS
from _workers import Workers, largest, run_script
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    EFSignAggregation,
    PowerAggregation,
    QSGDAggregation,
    SparsifiedAggregation,
    as_ddp_hook,
)

WARM_UP_STEPS = 4
RANK = 2
DDP, TORCH_FP16, TORCH_POWER = "DDP, no hook", "torch, fp16", "torch, PowerSGD, rank 2, one bucket"
SUBJECT = Subject(
    "ddp_hooks",
    "Steps per second of DistributedDataParallel with communication hooks (`ddp_hooks.py`)",
    "steps/s",
    (DDP, TORCH_FP16, TORCH_POWER),
    ("Hooks of this library work with any number of buckets "
     "and resume to the last bit (resume: 0).",
     "On the MLP over Gloo, PowerSGD does 1.11 times the steps of DDP without a hook, "
     "torch's hook 0.64, QSGD 0.45."),
)  # fmt: skip

Make = Callable[[DistributedDataParallel], tuple[Any, Any]]


@dataclass(frozen=True)
class Hook:
    """A communication hook.

    Attributes:
        make: Makes its state and the hook; None for DDP without a hook.
        needs_one_bucket: True if it fails with several buckets.
    """

    make: Make | None = None
    needs_one_bucket: bool = False


def torch_power(model: DistributedDataParallel) -> tuple[Any, Any]:
    """Make torch's PowerSGD, which compresses from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def ours(make: Callable[[nn.Module], Any]) -> Hook:
    """Make a hook of this library."""
    return Hook(lambda model: as_ddp_hook(make(model.module), model))


VARIANTS = {
    DDP: Hook(),
    TORCH_FP16: Hook(lambda model: (None, default_hooks.fp16_compress_hook)),
    TORCH_POWER: Hook(torch_power, needs_one_bucket=True),
    "all-reduce, overlap": ours(lambda model: AllReduceAggregation(overlap=True)),
    "all-reduce, overlap, fp16": ours(
        lambda model: AllReduceAggregation(overlap=True, comm_dtype=torch.float16)
    ),
    "all-reduce, overlap, bf16": ours(
        lambda model: AllReduceAggregation(overlap=True, comm_dtype=torch.bfloat16)
    ),
    "PowerSGD, rank 2": ours(
        lambda model: PowerAggregation(
            model, world_size=None, rank=RANK, reuse_query=True, start_after_steps=2
        )
    ),
    "EF-sign": ours(lambda model: EFSignAggregation()),
    "largest 1 %": ours(lambda model: SparsifiedAggregation(model, size=0.01)),
    "QSGD": ours(lambda model: QSGDAggregation()),
}


class Trainee:
    """A network, its hook and its optimizer.

    Args:
        variant: A name of :data:`VARIANTS`.
        network: The network; it is changed.
        lr: Learning rate.
        bucket_mb: Size of DDP's buckets; its default is 25.
    """

    def __init__(self, variant: str, network: nn.Module, lr: float, bucket_mb: float = 25) -> None:
        hook = VARIANTS[variant]
        if hook.needs_one_bucket:
            bucket_mb = HUGE_MB
        self.model = DistributedDataParallel(network, bucket_cap_mb=bucket_mb)
        self.optimizer = SGD(self.model.parameters(), lr, MOMENTUM)
        self.state, self._hook = None, None
        if hook.make is not None:
            self.state, self._hook = hook.make(self.model)
        self._is_registered = False

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Take a step."""
        # Registered late, because resume() may replace the state.
        if self._hook is not None and not self._is_registered:
            self.model.register_comm_hook(self.state, self._hook)
            self._is_registered = True
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()

    def save(self) -> list[Any]:
        """Return all that a checkpoint can hold."""
        state = self.state
        # torch's states have no state_dict() and are copied whole.
        if hasattr(state, "state_dict"):
            state = state.state_dict()
        return copy.deepcopy([self.model.module.state_dict(), self.optimizer.state_dict(), state])

    def resume(self, saved: list[Any]) -> None:
        """Continue from the result of :meth:`save`, before the first step."""
        self.model.module.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        if hasattr(self.state, "load_state_dict"):
            self.state.load_state_dict(saved[2])
        else:
            self.state = saved[2]


class Digits:
    """A small network for images of digits; every tenth image is kept for the test."""

    lr = 0.05
    batch_size = 32
    bucket_mb = 0.1  # three buckets

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
        images = images.float() / 16
        is_test = torch.arange(len(images)) % 10 == 0
        self._test = images[is_test], labels[is_test]
        rank, workers = dist.get_rank(), dist.get_world_size()
        self._train = images[~is_test][rank::workers], labels[~is_test][rank::workers]
        torch.manual_seed(0)
        self._network = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def start(self, variant: str) -> Trainee:
        """Make the network as it starts."""
        return Trainee(variant, copy.deepcopy(self._network), self.lr, self.bucket_mb)

    def train(self, trainee: Trainee, steps: range) -> None:
        """Take some steps, each with a batch that its number determines."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            drawn = torch.randint(len(self._train[0]), (self.batch_size,), generator=generator)
            trainee.step(self._train[0][drawn], self._train[1][drawn])

    def accuracy(self, trainee: Trainee) -> float:
        """Return the percentage of test images that the network recognizes."""
        with torch.no_grad():
            predicted = trainee.model.module(self._test[0]).argmax(dim=1)
        return 100 * (predicted == self._test[1]).double().mean().item()

    def difference(self, variant: str, steps: int) -> float:
        """Return the largest difference of a weight after a run that was resumed in the middle."""
        whole = self.start(variant)
        self.train(whole, range(steps // 2))
        saved = whole.save()
        self.train(whole, range(steps // 2, steps))
        resumed = self.start(variant)
        resumed.resume(saved)
        self.train(resumed, range(steps // 2, steps))
        pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)


def make_digits_handler(steps: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Train the network for digits from the start at every request."""
    digits = Digits()
    differences: dict[str, float] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        name = request["variant"]
        if name not in differences:
            differences[name] = digits.difference(name, min(steps, 40))
        trainee = digits.start(name)
        dist.barrier()
        start = time.perf_counter()
        digits.train(trainee, range(steps))
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "accuracy %": digits.accuracy(trainee),
            "resume": differences[name],
        }

    return handle


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the network in a worker; a request then takes some steps with one variant."""
    if setup["model"] == "digits":
        return make_digits_handler(setup["steps"])
    workload = WORKLOADS[setup["model"]]
    torch.manual_seed(0)
    network = workload.make()
    batch = workload.batch(dist.get_rank())
    trainees: dict[str, Trainee] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        name = request["variant"]
        if name not in trainees:
            trainees[name] = Trainee(name, copy.deepcopy(network), lr=1e-3)
            for _ in range(WARM_UP_STEPS):
                trainees[name].step(*batch)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(setup["steps"]):
            trainees[name].step(*batch)
        return {"seconds": time.perf_counter() - start}

    return handle


def run(model: str, count: int, arguments: Any) -> list[Row]:
    """Measure all variants of one network with one number of workers."""
    if model == "digits":
        steps, title = arguments.digits_steps, f"digits, {arguments.digits_steps} steps"
    else:
        steps, title = WORKLOADS[model].steps, WORKLOADS[model].title
    with Workers(__file__, count, {"model": model, "steps": steps}) as workers:

        def block(variant: str) -> Timed:
            figures = largest(workers.ask(variant=variant))
            seconds = figures.pop("seconds")
            return Timed(seconds, {"ms/step": 1000 * seconds / steps, **figures})

        case = f"{title}, {count} workers"
        variants = {name: partial(block, name) for name in VARIANTS}
        return measure(SUBJECT, case, variants, arguments.blocks, amount=steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=8)
    models = ["mlp", "resnet20", "digits"]
    add = parser.add_argument
    add("--models", nargs="+", choices=[*WORKLOADS, "digits"], default=models)
    add("--workers", nargs="+", type=positive, default=[2], help="numbers of workers")
    add("--digits-steps", type=positive, default=300, help="steps of a block (default: 300)")
    arguments = parse(parser, argv, models=["digits"], digits_steps=20)
    if min(arguments.workers) < 2:
        parser.error(f"argument --workers: must be at least 2, not {min(arguments.workers)}")
    rows = []
    for model, count in itertools.product(arguments.models, arguments.workers):
        rows += run(model, count, arguments)
    finish(SUBJECT, rows, arguments, f"Gloo, {arguments.blocks} blocks, one thread per worker.")


if __name__ == "__main__":
    run_script(main, make_handler)
