"""The workers of the tests of elastic runs, which kill themselves at a point of the protocol."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.aggregation.pytorch.local_steps.no_loco import NoLoCoAggregation
from mlbench_core.aggregation.pytorch.local_steps.penalty import OutlierPenalty
from mlbench_core.aggregation.pytorch.local_steps.periodic import DiLoCoAggregation
from mlbench_core.aggregation.pytorch.local_steps.streaming import StreamingDiLoCoAggregation
from mlbench_core.distributed.pytorch.elastic import Membership, Round
from mlbench_core.optim.pytorch import DiLoCo, LocalSGD, StreamingDiLoCo
from mlbench_core.wire_bytes import wire_bytes

PERIOD = 2
"""Steps from one round to the next."""
ROUNDS = 5
LR = 0.05
OUTER_LR, OUTER_MOMENTUM = 0.5, 0.75
FRAGMENTS, MIXING = 2, 0.25
GAMMA, SEED = 0.6, 5
LARGEST_NORM = 0.1
TOKENS = 7
"""Of each step, plus the rank."""


@dataclass
class Plan:
    """One worker of a run.

    Attributes:
        port: Of the store.
        folder: Of the files that it leaves.
        worker: Its number.
        first: Number of workers that start together.
        method: ``"local_sgd"``, ``"diloco"``, ``"streaming"``, ``"no_loco"``, or ``"edit"`` for
            DiLoCo with a penalty.
        death: Number of the round and the point at which it dies.
        newcomer: A worker for which the others wait before the round after the first commit; it
            joins, or it was stopped.
        snapshot: File of a state from which it starts.
    """

    port: int
    folder: str
    worker: int
    first: int
    method: str
    death: tuple[int, str] | None = None
    newcomer: int | None = None
    snapshot: str | None = None


class MortalMembership(Membership):
    """It dies at a point, and remembers its rounds."""

    death: tuple[int, str] | None = None

    def die(self, number: int, point: str) -> None:
        if self.death == (number, point):
            os.kill(os.getpid(), signal.SIGKILL)

    def _read(self, key: str) -> Any:
        kind, _, number = key.partition("/")
        if kind == "agreement" and int(number) == self._number:
            self.die(self._number, "after ask")
        return super()._read(key)

    def agree(self, tokens: int = 0, steps: int = 0) -> Round:
        number = self._number
        self.before = list(range(self.first_workers))
        if number:
            self.before = self._outcome(number - 1)["living"]
        self.last = super().agree(tokens, steps)
        self.die(self.last.number, "after agree")
        if self.death == (self.last.number, "stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.last

    def connect(self, round_: Round) -> Any:
        if self.death == (round_.number, "in connect"):
            # The others wait for its address, or for its connection.
            threading.Timer(random.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().connect(round_)

    def commit(self, round_: Round, has_sum: bool) -> bool:
        self.die(round_.number, "before report")
        committed = super().commit(round_, has_sum)
        self.die(round_.number, "after outcome")
        return committed

    def _await_outcome(self, round_: Round) -> bool:
        self.die(round_.number, "after report")
        return super()._await_outcome(round_)


class MortalAverage(ElasticAverage):
    """It dies at a point, and writes the values that it sends to another worker of a pair."""

    membership: MortalMembership
    folder: Path
    messages = 0

    def _heal(self, group: Any, round_: Round) -> dict[str, Any] | None:
        death = self.membership.death
        if death is not None and death[1] == "in heal" and round_.behind:
            if self.membership.worker == round_.donor:
                receiver = round_.members.index(round_.behind[0])
                group.send([torch.tensor([1000])], receiver, 0).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._heal(group, round_)

    def _count(self, op: str, group: int, size_bytes: int, overlapped: bool = False) -> None:
        # Of an unknown kind, the bytes of the whole run would count as not measured.
        assert wire_bytes(op, group, size_bytes) is not None, op
        super()._count(op, group, size_bytes, overlapped)

    def _finish(self, send: Any) -> bool:
        self.messages = 0
        return super()._finish(send)

    def _sum(self, group: Any, round_: Round, kind: list[Tensor]) -> Tensor:
        self.begin_message()
        return super()._sum(group, round_, kind)

    def _average_with(self, group: Any, rank: int | None, kind: list[Tensor]) -> Tensor:
        self.begin_message()
        return super()._average_with(group, rank, kind)

    def exchange_in_pairs(self, values: Any, weights: Any, draw: Any) -> bool:
        torch.save(values, self.folder / f"pair{self.membership.worker}-{self.membership._number}")
        return super().exchange_in_pairs(values, weights, draw)

    def begin_message(self) -> None:
        self.messages += 1
        if self.messages == 2:
            self.membership.die(self.membership.last.number, "in exchange")


class TwoKinds(nn.Module):
    """A model whose weights travel in two messages, and that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))).double())


def make_model() -> TwoKinds:
    torch.manual_seed(3)
    return TwoKinds()


def loss(model: nn.Module, commits: int, step: int, rank: int, size: int) -> Tensor:
    """The loss of a worker's share of the data in a step of a round."""
    seed = ((commits * PERIOD + step) * 10 + rank) * 10 + size
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(5, 3, generator=generator)
    target = torch.randn(5, 2, generator=generator).double()
    return ((model(data) - target) ** 2).mean()


def digest(values: Mapping[str, Tensor]) -> str:
    """A hash of the bits of weights and floating-point buffers."""
    found = hashlib.sha256()
    for name, value in values.items():
        if value.is_floating_point():
            found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def weights_of_rounds(optimizer: Any, method: str, average: ElasticAverage) -> Mapping[str, Tensor]:
    """The weights after a round, which only a committed one changes: with NoLoCo, the slow ones."""
    if method == "streaming":
        return {**optimizer.aggregation.state_dict()["shared"], **average.state_dict()["shared"]}
    return optimizer.model.state_dict()


def make_optimizer(model: nn.Module, method: str, average: ElasticAverage | None) -> Any:
    """The optimizer of a method, without an average that of workers who neither die nor join."""
    if method == "local_sgd":
        return LocalSGD(model=model, lr=LR, momentum=0.5, period=PERIOD, aggregation=average)
    inner = partial(torch.optim.SGD, lr=LR, momentum=0.5)
    outer = partial(torch.optim.SGD, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    if method == "streaming":
        exchange = StreamingDiLoCoAggregation(
            outer, period=PERIOD * FRAGMENTS, fragments=FRAGMENTS, delay=0, mixing=MIXING,
            elastic=average,
        )  # fmt: skip
        return StreamingDiLoCo(model=model, inner_optimizer=inner, aggregation=exchange)
    penalty = OutlierPenalty(largest_norm=LARGEST_NORM) if method == "edit" else None
    aggregation = DiLoCoAggregation(outer, elastic=average, penalty=penalty)
    if method == "no_loco":
        aggregation = NoLoCoAggregation(
            outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM, gamma=GAMMA, seed=SEED,
            elastic=average,
        )  # fmt: skip
    return DiLoCo(model=model, inner_optimizer=inner, period=PERIOD, aggregation=aggregation)


def work_without_rounds(rank: int, size: int, method: str) -> dict[str, Tensor]:
    """Train as one of the workers of a process group, which neither die nor join."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_optimizer(model, method, None)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for commits in range(ROUNDS):
        for step in range(PERIOD):
            optimizer.zero_grad()
            loss(model, commits, step, rank, size).backward()
            optimizer.step()
            schedule.step()
    return model.state_dict()


def work(plan: Plan) -> None:
    """Train to the last round, and write a line for each round."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", plan.port, timeout=limit)
    if plan.worker >= plan.first:
        # It joins after the first round.
        store.wait(["elastic/number"])
    membership = MortalMembership(
        store, plan.worker, plan.first, heartbeat_s=0.05, dead_after_s=4.0, timeout_s=20.0
    )
    membership.death = plan.death
    model = make_model()
    average = MortalAverage(membership)
    average.folder = Path(plan.folder)
    optimizer = make_optimizer(model, plan.method, average)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    average.attach(optimizer, schedule=schedule)
    if plan.snapshot is not None:
        saved = torch.load(plan.snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    folder = Path(plan.folder)
    snapshot = folder / f"snapshot{plan.worker}.pt"
    with membership, (folder / f"log{plan.worker}").open("w", buffering=1) as log:

        def note(committed: bool) -> None:
            round_ = membership.last
            line = {
                "number": round_.number,
                "committed": committed,
                "members": round_.members,
                "behind": round_.behind,
                "before": membership.before,
                "digest": digest(weights_of_rounds(optimizer, plan.method, average)),
                "tokens": average.tokens,
                "lr": schedule.get_last_lr(),
            }
            log.write(json.dumps(line) + "\n")

        if average.join():
            schedule.step()
            note(True)
        elif plan.worker < plan.first:
            # All are in the first round.
            store.wait([f"elastic/beat/{worker}" for worker in range(plan.first)])
        newcomer = plan.newcomer
        while membership.commits < ROUNDS:
            if newcomer is not None and membership.commits == 1:
                store.wait([f"elastic/ask/{newcomer}"])
                while json.loads(store.get(f"elastic/ask/{newcomer}"))[0] < membership._number:
                    time.sleep(0.01)
                newcomer = None  # it may die in this round
            commits = membership.commits
            for step in range(PERIOD):
                rank, size = membership.rank, membership.size
                optimizer.zero_grad()
                loss(model, commits, step, rank, size).backward()
                average.count(TOKENS + rank)
                optimizer.step()
                schedule.step()
            note(membership.commits > commits)
            if membership.size < plan.first and not snapshot.exists():
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved["schedule"] = schedule.state_dict()
                torch.save({**saved, "share": (membership.rank, membership.size)}, snapshot)
        torch.save(model.state_dict(), folder / f"end{plan.worker}.pt")
