"""Compare recent methods with those that their papers compare them with, at tuned rates.

Four workers, on three problems:

* **digits**: a perceptron with a hidden layer classifies handwritten digits. The figure is the
  number of steps until the loss on the test images is at most 0.1, which is checked every 5 steps.
  After a warm-up of 10 steps, the rate is constant.
* **gpt**: the model of task 5a's preset ``tiny`` predicts the bytes of WikiText-2. The figure is
  the loss in bits per byte on the first 32,768 bytes of the validation text after 150 steps, at the
  end of the decay. A step has 1,024 bytes of all workers.
* **corrupt**: the same model, 300 steps. After step 240, one worker reads random bytes. The figure
  is the largest loss on 8,192 bytes of the validation text from step 245 on.

All losses are those of the average of the workers' weights.

The rate of each method is tuned by one rule, with other seeds than those of the results: half,
one and two times its usual rate are tried, on the digits with three seeds each, since their numbers
of steps vary much by chance, and else with one. While the best is at the edge, one more is tried
beyond it, at most twice. The best rate misses the goal least often, then has the fewest steps to
it, and then the lowest loss. With the best rate the method trains with ten seeds on the digits,
and else with five. The rates are tuned on the test data of the results.

Each training has one line in FOLDER/runs.jsonl, with its bytes and collectives. A training that is
interrupted is missing there, and is done by the next call. Take a new folder after a change of this
file. Nothing here is timed, so other work on
the machine changes no figure.

    python benchmarks/experiments/claims.py FOLDER --data WIKITEXT_FOLDER
    python benchmarks/experiments/claims_page.py FOLDER/runs.jsonl -o docs/results/claims
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from mlbench_core.aggregation.pytorch import (
    Aggregation,
    AllReduceAggregation,
    DiLoCoAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    OutlierPenalty,
    PowerAggregation,
    QuantizedAllReduceAggregation,
)
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.dataset.nlp.pytorch.token_shards import (
    FirstTokens,
    TokenBatches,
    load_text_bytes,
)
from mlbench_core.lr_scheduler.pytorch.lr import TrapezoidLR
from mlbench_core.models.pytorch.gpt import GPT, GPTConfig, next_token_loss
from mlbench_core.optim.pytorch import (
    Dion2,
    Dion3,
    GenericCentralizedOptimizer,
    MuonAdamW,
    NorMuon,
    get_optimizer,
)
from mlbench_core.wire_bytes import wire_bytes

WORKERS = 4
FIRST_SEED = 42  # of the results; smaller ones are those of the tuning
FACTORS = (0.5, 1, 2)
WEIGHT_DECAY = 0.1
MOST_EXTENSIONS = 2
PERIOD = 20  # steps between the messages of the methods with local steps
SHORT_PERIOD = 5
Make = Callable[[nn.Module, float], Optimizer]
Result = dict[str, Any]


# ---- Problems


class Digits:
    """Handwritten digits of 8x8 pixels, the model and this worker's batches."""

    tuning_seeds, result_seeds = 3, 10
    steps, validate_every, warm_up = 400, 5, 10
    goal, batch_size, corrupt_from = 0.1, 16, 0
    decays = False  # its figure would otherwise be read in the middle of the decay

    def __init__(self, seed: int, rank: int, data: Path | None) -> None:
        from sklearn.datasets import load_digits

        images, self.labels = map(torch.from_numpy, load_digits(return_X_y=True))
        self.images = images.float() / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.test, self.train = order[:360], order[360:]
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self._seed, self._rank = seed, rank

    def loss(self, step: int) -> Tensor:
        """Return the loss of this worker's batch of a step."""
        numbers = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        size = (WORKERS, self.batch_size)
        batch = self.train[torch.randint(len(self.train), size, generator=numbers)[self._rank]]
        return F.cross_entropy(self.model(self.images[batch]), self.labels[batch])

    def score(self) -> Tensor:
        """Return the sum of the losses of this worker's test images, and their number."""
        part = self.test[self._rank :: WORKERS]
        losses = F.cross_entropy(self.model(self.images[part]), self.labels[part], reduction="sum")
        return torch.tensor([float(losses), len(part)])


class SmallGPT:
    """The bytes of WikiText-2, the model of task 5a's preset tiny, and this worker's batches."""

    tuning_seeds, result_seeds = 1, 5
    steps, validate_every, warm_up = 150, 50, 15
    sequences, context, validation_bytes = 2, 128, 2**15
    goal, corrupt_from = None, 0
    decays = True

    def __init__(self, seed: int, rank: int, data: Path | None) -> None:
        if data is None:
            raise SystemExit("--data must name the folder of WikiText-2: give it")
        place = (self.context, rank, WORKERS)
        self._batches = iter(
            TokenBatches([load_text_bytes(data, "train")], self.sequences, *place, seed=seed)
        )
        valid = [load_text_bytes(data, "valid")]
        self._validation = FirstTokens(valid, self.validation_bytes, 16, *place)
        self.model = GPT(GPTConfig.preset("tiny"))

    def loss(self, step: int) -> Tensor:
        """Return the loss of this worker's batch of a step."""
        inputs, targets = self.batch(step)
        return next_token_loss(self.model(inputs), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step."""
        return next(self._batches)

    def score(self) -> Tensor:
        """Return the sum of the losses in bits of this worker's validation text, and its bytes."""
        total = torch.zeros(2)
        for inputs, targets in self._validation:
            loss = next_token_loss(self.model(inputs), targets) / math.log(2)
            count = targets.numel()
            total += torch.tensor([float(loss) * count, count])
        return total


class CorruptGPT(SmallGPT):
    """The GPT, with one worker that reads random bytes after step :attr:`corrupt_from`.

    EDiT's averages need 60 rounds, with a message every second step.
    """

    steps, validate_every, validation_bytes = 300, 5, 2**13
    corrupt_from = 240
    decays = False

    def __init__(self, seed: int, rank: int, data: Path | None) -> None:
        super().__init__(seed, rank, data)
        self._is_corrupt = rank == 0
        self._noise = torch.Generator().manual_seed(seed)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step."""
        inputs, targets = super().batch(step)
        if self._is_corrupt and step > self.corrupt_from:
            noise = torch.randint(256, (2, *inputs.shape), generator=self._noise)
            return noise[0], noise[1]
        return inputs, targets


# ---- Methods


@dataclass(frozen=True)
class Method:
    """A method and its usual rate, around which it is tuned."""

    make: Make
    lr: float


def averaging(exchange: Callable[[nn.Module], Aggregation], inner: Callable[..., Any]) -> Make:
    """Return a function that makes an optimizer for gradients that an aggregation averages."""
    return lambda model, lr: GenericCentralizedOptimizer(
        None, model, optimizer=partial(inner, lr=lr), aggregation=exchange(model)
    )


def low_rank(model: nn.Module, **options: Any) -> Aggregation:
    """Return PowerSGD's aggregation of rank 4."""
    return PowerAggregation(model, rank=4, world_size=None, **options)


COMPRESSORS: Mapping[str, Callable[[nn.Module], Aggregation]] = {
    "float32": lambda model: AllReduceAggregation(),
    "int8": lambda model: QuantizedAllReduceAggregation(),
    "int4": lambda model: QuantizedAllReduceAggregation(bits=4),
    "int4_loco": lambda model: QuantizedAllReduceAggregation(bits=4, error_decay=0.8),
    "power_sgd": partial(low_rank, reuse_query=True),
    "acp_sgd": partial(low_rank, alternate=True),
}
MATRIX_METHODS = {"muon": MuonAdamW, "normuon": NorMuon, "dion2": Dion2, "dion3": Dion3}


def for_matrices(
    kind: Callable[..., Any], factor: float = 1.0, **options: Any
) -> Callable[..., Optimizer]:
    """Return a function that makes Muon or a relative for parameters and a rate of AdamW.

    Biases and the embedding of the GPT, which has 256 rows, take steps of AdamW. The rate of the
    matrices is larger by the factor. Each step decays all weights alike.
    """

    def make(parameters: Any, lr: float) -> Optimizer:
        matrices, others = [], []
        for parameter in parameters:
            is_matrix = parameter.ndim == 2 and len(parameter) != 256
            (matrices if is_matrix else others).append(parameter)
        decay = {"lr": lr * factor, "weight_decay": WEIGHT_DECAY / factor}
        groups = [{"params": matrices, **decay}, {"params": others, "use_muon": False}]
        return kind(groups, lr=lr, weight_decay=WEIGHT_DECAY, **options)

    return make


class LateDiLoCoAggregation(DiLoCoAggregation):
    """Take each outer step along the changes of the round before: the naive delay."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._late: dict[str, Tensor] = {}

    def _average(
        self, outer_gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]
    ) -> None:
        current = {name: gradient.clone() for name, gradient in outer_gradients.items()}
        super()._average(current, averages)
        for name, gradient in outer_gradients.items():
            gradient.copy_(self._late.get(name, torch.zeros(())))
        self._late = current


def diloco(kind: Callable[..., Any], period: int, outer_lr: float = 0.7) -> Make:
    """Return a function that makes DiLoCo with an aggregation of this kind.

    The outer rates are those reported for the papers, and are not tuned. The outer momentum is 0.5;
    the papers' 0.9 suits much longer trainings.
    """
    outer = partial(SGD, lr=outer_lr, momentum=0.5, nesterov=True)
    return lambda model, lr: get_optimizer(
        "diloco", model=model, lr=lr, period=period, aggregation=kind(outer)
    )


def with_penalty(outer: Any) -> DiLoCoAggregation:
    """Return DiLoCo's aggregation with the penalty of EDiT."""
    return DiLoCoAggregation(outer, penalty=OutlierPenalty(first_rounds=60))


def named(name: str, **options: Any) -> Make:
    """Return a function that makes an optimizer that takes a model."""
    return lambda model, lr: get_optimizer(name, model=model, lr=lr, **options)


def common_methods(
    base: Callable[..., Any], base_lr: float, adam_lr: float, muon_lr: float
) -> dict[str, Method]:
    """Return the methods of the digits and of the GPT.

    Args:
        base: Makes the optimizer behind the compressors.
        base_lr: Its usual rate.
        adam_lr: That of AdamW in local steps.
        muon_lr: That of Muon.
    """
    methods = {
        name: Method(averaging(exchange, base), base_lr) for name, exchange in COMPRESSORS.items()
    }
    for name, kind in MATRIX_METHODS.items():
        # Their steps have another factor than Muon's, as in task 5a.
        factor = 4.0 if name in ("dion2", "dion3") else 1.0
        make = averaging(COMPRESSORS["float32"], for_matrices(kind, factor))
        methods[name] = Method(make, muon_lr)
    without_momentum = for_matrices(MuonAdamW, momentum=0, betas=(0.0, 0.999))
    methods["ef21_muon"] = Method(averaging(EF21Aggregation, without_momentum), muon_lr)
    for period in (PERIOD, SHORT_PERIOD):
        methods[f"diloco_{period}"] = Method(diloco(DiLoCoAggregation, period), adam_lr)
        methods[f"eager_{period}"] = Method(diloco(EagerDiLoCoAggregation, period, 0.4), adam_lr)
        methods[f"late_{period}"] = Method(diloco(LateDiLoCoAggregation, period, 0.4), adam_lr)
    methods["no_loco"] = Method(named("no_loco", period=PERIOD), adam_lr)
    methods["des_loc"] = Method(named("des_loc", period=8), adam_lr)
    same_periods = named("des_loc", period=8, first_moment_period=8, second_moment_period=8)
    methods["local_adam"] = Method(same_periods, adam_lr)
    return methods


nesterov = partial(SGD, momentum=0.9, nesterov=True, weight_decay=1e-4)
adamw = partial(AdamW, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
PROBLEMS: Mapping[str, tuple[Any, Mapping[str, Method]]] = {
    "digits": (
        Digits,
        {
            **common_methods(nesterov, base_lr=0.3, adam_lr=0.008, muon_lr=0.02),
            "ef21": Method(named("ef21", weight_decay=1e-4), 1.5),
            "sgp": Method(named("sgp", momentum=0.9, nesterov=True, weight_decay=1e-4), 0.3),
        },
    ),
    "gpt": (
        SmallGPT,
        common_methods(adamw, base_lr=0.0025, adam_lr=0.0015, muon_lr=0.0025),
    ),
    "corrupt": (
        CorruptGPT,
        {
            "diloco_2": Method(diloco(DiLoCoAggregation, 2), 0.0015),
            "edit_2": Method(diloco(with_penalty, 2), 0.0015),
        },
    ),
}


# ---- Trainings


class Sent:
    """Count the bytes and collectives that this worker sends, in place of a tracker."""

    def __init__(self) -> None:
        self.bytes, self.collectives = 0.0, 0

    def record_batch_opt_step(self) -> None:
        """Ignore the time of the update."""

    def record_batch_agg(self) -> None:
        """Ignore the time of the aggregation."""

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        """Add the bytes of some collectives."""
        sent = wire_bytes(op, group, size_bytes)
        if sent is None:
            raise ValueError(f"the bytes of {op} are not known")
        self.bytes += calls * sent
        self.collectives += calls


def validate(problem: Any) -> float:
    """Return the loss of the workers' average."""
    problem.model.eval()
    with torch.no_grad(), averaged_weights(problem.model):
        total = problem.score()
    problem.model.train()
    dist.all_reduce(total)
    loss, count = total.tolist()
    return float(loss / count)


def train(kind: Any, make: Make, lr: float, seed: int, data: Path | None) -> Result:
    """Train with all workers, and return the same figures on each."""
    torch.manual_seed(seed)
    problem = kind(seed, dist.get_rank(), data)
    optimizer, sent = make(problem.model, lr), Sent()
    length = problem.steps if problem.decays else 10**9
    scheduler = TrapezoidLR(optimizer, problem.warm_up, length)
    steps = problem.steps
    if problem.corrupt_from and seed < FIRST_SEED:
        steps = problem.corrupt_from  # the rate is chosen on data as they should be
    figures: Result = {"steps": None, "loss": None, "loss_before": None}
    worst = 0.0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step(tracker=sent)
        scheduler.step()
        if step % problem.validate_every or step < problem.corrupt_from:
            continue
        loss = validate(problem)
        if not math.isfinite(loss):
            figures["loss"] = None
            break
        if step == problem.corrupt_from:
            figures["loss_before"] = loss
        elif problem.corrupt_from:
            worst = loss = max(loss, worst)
        figures["loss"] = loss
        if problem.goal is not None and loss <= problem.goal:
            figures["steps"] = step
            break
    return {**figures, "sent_bytes": round(sent.bytes), "collectives": sent.collectives}


def rank_of(results: Sequence[Result]) -> tuple[int, int, float]:
    """Return the key of a rate, smaller for a better one: misses, steps to the goal, loss."""
    steps = [one["steps"] for one in results]
    losses = [math.inf if one["loss"] is None else one["loss"] for one in results]
    return steps.count(None), sum(filter(None, steps)), sum(losses)


def next_rate(tried: Mapping[float, Sequence[Result]], base: float) -> float | None:
    """Return the next rate to try; None if the rule of the tuning is done."""
    for factor in FACTORS:
        if base * factor not in tried:
            return base * factor
    if len(tried) == len(FACTORS) + MOST_EXTENSIONS:
        return None
    best = best_rate(tried, base)
    if best == min(tried):
        return best / 2
    return best * 2 if best == max(tried) else None


def best_rate(tried: Mapping[float, Sequence[Result]], base: float) -> float:
    """Return the best rate; of equal ones, that nearest to the usual one, then the smaller."""
    return min(tried, key=lambda lr: (*rank_of(tried[lr]), abs(math.log(lr / base)), lr))


def cases(done: Sequence[Result], problem: str, name: str) -> Iterator[tuple[float, int]]:
    """Yield rate and seed of each training of a method; ``done`` grows in between."""
    kind, methods = PROBLEMS[problem]
    base = methods[name].lr
    tried: dict[float, Sequence[Result]] = {}

    def done_with(lr: float) -> dict[int, Result]:
        key = (problem, name, lr)
        return {
            one["seed"]: one for one in done if (one["problem"], one["method"], one["lr"]) == key
        }

    while (lr := next_rate(tried, base)) is not None:
        seeds = range(1, kind.tuning_seeds + 1)
        for seed in seeds:
            if seed not in done_with(lr):
                yield lr, seed
        results = done_with(lr)
        tried[lr] = [results[seed] for seed in seeds]
    best = best_rate(tried, base)
    for seed in range(FIRST_SEED, FIRST_SEED + kind.result_seeds):
        if seed not in done_with(best):
            yield best, seed


def work(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """Do all trainings that are missing, as one of the workers."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS
    )
    file = arguments.folder / "runs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    dist.barrier()  # no worker reads a file to which the first has written
    for problem in arguments.problems:
        kind, methods = PROBLEMS[problem]
        for name in methods:
            if arguments.methods and name not in arguments.methods:
                continue
            for lr, seed in cases(done, problem, name):
                result = train(kind, methods[name].make, lr, seed, arguments.data)
                line = {"problem": problem, "method": name, "lr": lr, "seed": seed, **result}
                done.append(line)
                if rank == 0:
                    print(json.dumps(line), flush=True)
                    with file.open("a") as stream:
                        stream.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is missing in the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--data", type=Path, help="folder of WikiText-2")
    add("--problems", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    add("--methods", nargs="*", help="only these")
    arguments = parser.parse_args(argv)
    known = {name for problem in arguments.problems for name in PROBLEMS[problem][1]}
    unknown = set(arguments.methods or ()) - known
    if unknown:
        parser.error(f"--methods: {', '.join(sorted(unknown))}: no such method in these problems")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.start_processes(
        work, (port, arguments), nprocs=WORKERS, start_method="spawn"
    )


if __name__ == "__main__":
    sys.exit(main())
