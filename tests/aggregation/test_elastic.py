"""Elastic runs: workers that die at each point of a round, and workers that join.

The references are a simulation in one process, which knows no protocol, and a run of one worker
less that starts from the saved state."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlbench_core.aggregation.pytorch import (
    DiLoCoAggregation,
    NoLoCoAggregation,
    OutlierPenalty,
    QuantizedAllReduceAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.local_steps.elastic import ElasticAverage
from mlbench_core.aggregation.pytorch.local_steps.no_loco import draw_peer
from mlbench_core.distributed.pytorch.elastic import Membership, Round
from mlbench_core.optim.pytorch import DiLoCo, LocalSGD, NoLoCo, StreamingDiLoCo
from tests.aggregation.elastic_workers import (
    FRAGMENTS,
    GAMMA,
    LARGEST_NORM,
    LR,
    MIXING,
    OUTER_LR,
    OUTER_MOMENTUM,
    PERIOD,
    ROUNDS,
    SEED,
    TOKENS,
    Plan,
    loss,
    make_model,
    make_optimizer,
    work,
    work_without_rounds,
)
from tests.helpers.ranks import fork_context, run_ranks
from tests.helpers.thorough import some, thorough

WORKERS = 3
METHODS = ("diloco", "local_sgd", "streaming", "no_loco", "edit")
# A death in the exchange of DiLoCo and of NoLoCo, and in the heal of Streaming DiLoCo and of EDiT.
FIRST_SEEDS = (1, 65, 16, 32)
POINTS = (
    "in heal", "in exchange", "after ask", "after report", "in connect", "before report",
    "after agree", "after outcome",
)  # fmt: skip


@contextlib.contextmanager
def starting(plans: Sequence[Plan]) -> Iterator[list[Any]]:
    """Processes of workers, which end with the block."""
    processes = [fork_context().Process(target=work, args=(plan,), daemon=True) for plan in plans]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(plans: Sequence[Plan], timeout_s: float = 120.0) -> list[int | None]:
    """Run workers side by side, and return their exit codes."""
    deadline = time.monotonic() + timeout_s
    with starting(plans) as processes:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]


def new_store() -> dist.TCPStore:
    """A store in this process, which outlives all workers."""
    limit = datetime.timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=limit)


def read_log(folder: Path, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"log{worker}").read_text().splitlines()]


def shared_lines(method: str, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a log as they must be on all workers; with NoLoCo, without their own weights."""
    own = "digest" if method == "no_loco" else ""
    return [{key: value for key, value in line.items() if key != own} for line in log]


Weights = dict[str, torch.Tensor]


def simulate(method: str, log: list[dict[str, Any]]) -> tuple[dict[int, Weights], int]:
    """The workers' weights and the tokens after the rounds of a log, by plain SGD."""
    first = make_model().state_dict()
    # The shared weights and the outer momentum; with NoLoCo, each worker has its own.
    theta: dict[int, Weights] = collections.defaultdict(lambda: copy.deepcopy(first))
    momentum: dict[int, Weights] = collections.defaultdict(
        lambda: {name: torch.zeros_like(value) for name, value in first.items()}
    )
    # Of each worker: its weights, and the momentum of its inner optimizer.
    own: dict[int, Weights] = collections.defaultdict(lambda: copy.deepcopy(first))
    inner: dict[int, Weights] = collections.defaultdict(dict)
    tokens = commits = steps = 0
    parameters = [name for name, _ in make_model().named_parameters()]
    for line in log:
        ready = [worker for worker in line["members"] if worker not in line["behind"]]
        # Those who die in a round that is not committed leave no trace.
        for worker in ready:
            rank, size = line["before"].index(worker), len(line["before"])
            train(own[worker], inner[worker], commits, steps, rank, size)
            tokens += PERIOD * (TOKENS + rank) * line["committed"]
        for worker in line["behind"]:
            if method == "no_loco":
                theta[worker] = copy.deepcopy(theta[ready[0]])
                momentum[worker] = copy.deepcopy(momentum[ready[0]])
            own[worker] = copy.deepcopy(theta[worker if method == "no_loco" else 0])
        steps += PERIOD
        sent = [name for name, value in first.items() if value.is_floating_point()]
        if method == "streaming":
            odd = parameters[1::FRAGMENTS]
            sent = [name for name in sent if (name in odd) == (steps // PERIOD % FRAGMENTS == 1)]
        if line["committed"]:
            if method == "no_loco":
                step_in_pairs(theta, momentum, own, ready, commits, sent, parameters)
            else:
                changes = average_changes(method, theta[0], own, ready, sent, parameters)
                for name, change in changes.items():
                    if method != "local_sgd" and name in parameters:
                        momentum[0][name] = OUTER_MOMENTUM * momentum[0][name] + change
                        change = OUTER_LR * (change + OUTER_MOMENTUM * momentum[0][name])
                    theta[0][name] = theta[0][name] - change
            commits += 1
        for worker in line["members"]:
            target = theta[worker if method == "no_loco" else 0]
            for name in sent:
                mixing = MIXING if method == "streaming" else 0.0
                own[worker][name] = mixing * own[worker][name] + (1 - mixing) * target[name]
    return own, tokens


def train(
    weights: Weights, momentum: Weights, commits: int, steps: int, rank: int, size: int
) -> None:
    """Take a worker's steps of a round, after a number of steps of the run."""
    model = make_model()
    model.load_state_dict(weights)
    for step in range(PERIOD):
        model.zero_grad()
        loss(model, commits, step, rank, size).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                momentum[name] = 0.5 * momentum.get(name, 0) + parameter.grad
                parameter -= LR * 0.5 ** ((steps + step) // 3) * momentum[name]
    weights.update(copy.deepcopy(model.state_dict()))


def average_changes(
    method: str, theta: Weights, own: dict[int, Weights], workers: Sequence[int],
    sent: Sequence[str], parameters: Sequence[str],
) -> Weights:  # fmt: skip
    """The outer gradients, and the changes of buffers."""
    found = {}
    for name in sent:
        changes = [theta[name] - own[worker][name] for worker in workers]
        weights = [1.0 / len(workers)] * len(workers)
        if method == "edit" and name in parameters:
            weights = torch.stack([-change.norm() for change in changes]).softmax(0).tolist()
        pairs = zip(weights, changes, strict=True)
        found[name] = torch.stack([weight * change for weight, change in pairs]).sum(0)
    if method == "edit":
        norms = [found[name].norm().double() for name in parameters]
        clip = min(1.0, LARGEST_NORM / float(torch.stack(norms).norm()))
        found.update({name: clip * found[name] for name in parameters})
    return found


def step_in_pairs(
    phi: dict[int, Weights], momentum: dict[int, Weights], own: dict[int, Weights],
    workers: Sequence[int], commits: int, sent: Sequence[str], parameters: Sequence[str],
) -> None:  # fmt: skip
    """Take NoLoCo's outer step; the buffers are averaged only."""
    before = {worker: copy.deepcopy(phi[worker]) for worker in workers}
    for position, i in enumerate(workers):
        drawn = draw_peer(position, len(workers), SEED, commits)
        j = i if drawn is None else workers[drawn]
        for name in sent:
            if name not in parameters:
                phi[i][name] = (own[i][name] + own[j][name]) / 2
                continue
            change = (own[i][name] - before[i][name] + own[j][name] - before[j][name]) / 2
            gap = (before[j][name] - before[i][name]) / 2
            momentum[i][name] = OUTER_MOMENTUM * momentum[i][name] + OUTER_LR * change + GAMMA * gap
            phi[i][name] = before[i][name] + momentum[i][name]


def check_means(folder: Path, log: list[dict[str, Any]]) -> int:
    """Check that the average of NoLoCo's slow weights takes steps with heavy-ball momentum.

    Return the number of such steps."""
    found = 0
    for lines in zip(log, log[1:], log[2:], strict=False):
        members = lines[0]["members"]
        if not all(line["members"] == members and not line["behind"] for line in lines):
            continue
        if not (lines[0]["committed"] and lines[1]["committed"]):
            continue
        files = [
            [folder / f"pair{worker}-{line['number']}" for worker in members] for line in lines
        ]
        # One that dies in the last of the rounds may not have sent anything.
        if not all(path.exists() for path in files[2]):
            continue
        sent = [list(map(torch.load, paths)) for paths in files]
        for name, _ in make_model().named_parameters():
            # The slow weights before three rounds, and theta - phi of the second one.
            before, now, after = [
                sum(one[f"phi of {name}"].double() for one in values) / len(members)
                for values in sent
            ]
            change = -sum(one[name].double() for one in sent[1]) / len(members)
            torch.testing.assert_close(
                after - now, OUTER_MOMENTUM * (now - before) + OUTER_LR * change,
                rtol=1e-5, atol=1e-6,
            )  # fmt: skip
        found += 1
    return found


def weights_at_the_end(folder: Path, worker: int) -> dict[str, torch.Tensor]:
    state = torch.load(folder / f"end{worker}.pt", weights_only=True)
    return {name: value for name, value in state.items() if value.is_floating_point()}


def check(folder: Path, method: str, living: Sequence[int]) -> list[dict[str, Any]]:
    """Check the rounds of a run against one another and the simulation; return the longest log."""
    logs = {worker: read_log(folder, worker) for worker in living}
    for worker, log in logs.items():
        for before, line in itertools.pairwise(log):
            if not line["committed"] and worker not in line["behind"]:
                assert (line["digest"], line["tokens"]) == (before["digest"], before["tokens"])
    shared = [shared_lines(method, log) for log in logs.values()]
    log = max(shared, key=len)
    for other in shared:
        # Replicas, outcomes and tokens are equal after each round. One that was not committed may
        # have left a joiner without the state.
        numbers = {line["number"]: line for line in other if line["committed"]}
        assert numbers == {line["number"]: line for line in log if line["number"] in numbers}
    assert sum(line["committed"] for line in log) == ROUNDS
    own, tokens = simulate(method, log)
    assert log[-1]["tokens"] == tokens
    if method == "no_loco":
        assert check_means(folder, log) > 0
    for worker in living:
        expected = {name: value for name, value in own[worker].items() if value.dim()}
        torch.testing.assert_close(
            weights_at_the_end(folder, worker), expected, rtol=1e-5, atol=1e-6
        )
    return log


def plans_of(
    folder: Path, port: int, method: str, newcomer: int | None, death: tuple[int, str] | None,
    victim: int | None,
) -> list[Plan]:  # fmt: skip
    """Three workers, one that joins after the first commit, and one of them that dies."""
    plans = []
    for worker in [*range(WORKERS), *([] if newcomer is None else [newcomer])]:
        own = death if worker == victim else None
        awaited = newcomer if worker < WORKERS else None
        plans.append(Plan(port, str(folder), worker, WORKERS, method, own, awaited))
    return plans


@pytest.mark.parametrize(
    "seed", some(sorted(range(100), key=lambda seed: seed not in FIRST_SEEDS), 4)
)
def test_survivors_of_a_death_continue_as_a_run_of_one_worker_less(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    point = POINTS[seed % len(POINTS)]
    method = METHODS[seed // len(POINTS) % len(METHODS)]
    # The lowest number is the coordinator.
    victim, newcomer = draw.choice([0, 0, 1, 2]), None
    # The group of the first round is kept as long as all live.
    number = 0 if point == "in connect" else draw.randrange(ROUNDS - 2)
    if point == "in heal":
        newcomer = WORKERS
        victim = draw.choice([0, newcomer])
    store = new_store()
    plans = plans_of(tmp_path, store.port, method, newcomer, (number, point), victim)
    assert run(plans) == [-9 if plan.worker == victim else 0 for plan in plans]
    living = [plan.worker for plan in plans if plan.worker != victim]
    check(tmp_path, method, living)
    if newcomer is not None:
        return
    # The first states without the dead one, and a run that starts from them.
    again = tmp_path / "again"
    again.mkdir()
    fresh, plans = new_store(), []
    for worker in living:
        snapshot = tmp_path / f"snapshot{worker}.pt"
        rank, size = torch.load(snapshot, weights_only=True)["share"]
        assert (rank, size) == (living.index(worker), len(living))
        plans.append(Plan(fresh.port, str(again), rank, size, method, snapshot=str(snapshot)))
    assert run(plans) == [0] * len(plans)
    for plan, worker in zip(plans, living, strict=True):
        found = weights_at_the_end(again, plan.worker)
        for name, value in weights_at_the_end(tmp_path, worker).items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("method", some(["diloco", "streaming", "no_loco", "edit", "local_sgd"], 4))
def test_a_joiner_receives_the_shared_state_and_has_weight_0_in_its_first_round(
    method: str, tmp_path: Path
) -> None:
    store = new_store()
    plans = plans_of(tmp_path, store.port, method, WORKERS, None, None)
    assert run(plans) == [0] * len(plans)
    log = check(tmp_path, method, range(WORKERS + 1))
    joined = [line["number"] for line in log if line["behind"] == [WORKERS]]
    assert len(joined) == 1
    own = read_log(tmp_path, WORKERS)
    assert own[0]["number"] == joined[0]
    # The next round counts it.
    assert own[1]["members"] == [*range(WORKERS + 1)]
    assert own[1]["behind"] == []


# Two workers, because sums of more depend on their order. Buffers have only the same values.
@pytest.mark.parametrize(("method", "size"), [("streaming", 2), ("no_loco", 3), ("edit", 2)])
def test_an_undisturbed_run_has_the_bits_of_a_run_of_fixed_workers(
    method: str, size: int, tmp_path: Path
) -> None:
    store = new_store()
    plans = [Plan(store.port, str(tmp_path), worker, size, method) for worker in range(size)]
    assert run(plans) == [0] * size
    log = check(tmp_path, method, range(size))
    if method == "no_loco":
        assert check_means(tmp_path, log) == ROUNDS - 2
    parameters = dict(make_model().named_parameters())
    for worker, expected in enumerate(run_ranks(size, work_without_rounds, method)):
        for name, value in weights_at_the_end(tmp_path, worker).items():
            if name in parameters or method == "no_loco":
                assert torch.equal(value, expected[name]), name
            else:
                torch.testing.assert_close(value, expected[name])


@thorough
@pytest.mark.parametrize("method", ["diloco", "streaming", "no_loco"])
def test_a_worker_that_was_stopped_for_a_while_receives_the_state_that_it_missed(
    method: str, tmp_path: Path
) -> None:
    store, stopped = new_store(), WORKERS - 1
    plans = []
    for worker in range(WORKERS):
        death, awaited = None, stopped
        if worker == stopped:
            death, awaited = (0, "stopped"), None
        plans.append(
            Plan(store.port, str(tmp_path), worker, WORKERS, method, death, newcomer=awaited)
        )
    with starting(plans) as processes:
        # The others have taken it for dead, and have gone on.
        store.wait(["elastic/outcome/1"])
        os.kill(processes[stopped].pid, signal.SIGCONT)
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0] * WORKERS
    own, others = [shared_lines(method, read_log(tmp_path, worker)) for worker in (stopped, 0)]
    assert [line["members"] for line in others] == [
        [0, 1, 2], [0, 1], *[[0, 1, 2]] * (ROUNDS - 1),
    ]  # fmt: skip
    assert [line["committed"] for line in others] == [False, *[True] * ROUNDS]
    assert [line["behind"] for line in others] == [[], [], [stopped], *[[]] * (ROUNDS - 2)]
    assert own[-(ROUNDS - 1) :] == others[-(ROUNDS - 1) :]


def membership() -> Membership:
    return Membership(dist.HashStore(), worker=0, first_workers=1)


def step(optimizer: Any) -> None:
    optimizer.model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_outer_gradients_of_an_elastic_run_travel_as_they_are_and_at_once() -> None:
    average = ElasticAverage(membership())
    with pytest.raises(ValueError, match="elastic must be None with compression"):
        DiLoCoAggregation(elastic=average, compressed=QuantizedAllReduceAggregation())
    for other in ({"delay": 1}, {"delay": 0, "quantize": True}):
        with pytest.raises(ValueError, match="delay must be 0 and quantize must be False in an el"):
            StreamingDiLoCoAggregation(elastic=average, **other)


class FailingMembership(Membership):
    """Its first round is not committed."""

    def commit(self, round_: Round, has_sum: bool) -> bool:
        return super().commit(round_, has_sum and round_.number > 0)


@pytest.mark.parametrize("kind", [Membership, FailingMembership])
def test_a_penalty_knows_the_norms_of_committed_rounds_only(kind: type[Membership]) -> None:
    with kind(dist.HashStore(), worker=0, first_workers=1) as member:
        average = ElasticAverage(member)
        aggregation = DiLoCoAggregation(elastic=average, penalty=OutlierPenalty())
        optimizer = DiLoCo(model=make_model(), lr=0.1, period=1, aggregation=aggregation)
        average.attach(optimizer)
        step(optimizer)
        assert bool(aggregation.state_dict()["norms"]) == (kind is Membership)


def test_a_round_needs_the_state_of_a_joiner_and_the_whole_model() -> None:
    model = make_model()
    with membership() as member:
        average = ElasticAverage(member)
        optimizer = LocalSGD(model=model, lr=0.1, period=1, aggregation=average, by_layer=True)
        with pytest.raises(RuntimeError, match="attach must be called before the first round"):
            step(optimizer)
        average.attach(optimizer)
        with pytest.raises(ValueError, match="by_layer must be False"):
            step(optimizer)
        with pytest.raises(ValueError, match="averages weights, not gradients"):
            average.agg_grad()


def join_after_a_round(
    kind: type[Membership], make: Callable[[ElasticAverage], Any], period: int
) -> list[dict[str, Any]]:
    """Let a worker join in the second round of another one.

    Return the first one's state before that round, and the states of both after it."""
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:
        averages, optimizers = [], []
        for worker in range(2):
            member = kind(store, worker, first_workers=1, timeout_s=20.0)
            averages.append(ElasticAverage(member))
            optimizers.append(make(averages[worker]))
            averages[worker].attach(optimizers[worker])
            stack.enter_context(member)
            if worker == 0:
                for _ in range(period):
                    step(optimizers[0])
        outers = [getattr(one.aggregation, "inside", one.aggregation) for one in optimizers]
        before = copy.deepcopy(outers[0].state_dict())
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(averages[1].join)
            store.wait(["elastic/ask/1"])
            optimizers[0].zero_grad(set_to_none=False)
            for _ in range(period):
                optimizers[0].step()
            # Without a commit, the joiner would wait for another round.
            averages[0].membership.finish()
            assert joining.result(60)
        return [before, *[outer.state_dict() for outer in outers]]


def bfloat16_model() -> torch.nn.Module:
    model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    return model


def test_a_joiner_of_no_loco_takes_no_outer_step_in_half_precision() -> None:
    def make(average: ElasticAverage) -> Any:
        exchange = NoLoCoAggregation(elastic=average)
        return NoLoCo(model=bfloat16_model(), lr=0.01, period=1, aggregation=exchange)

    # theta is phi in bfloat16, so theta - phi is not 0. With it, the joiner would take the step of
    # the donor's momentum.
    before, _, joiner = join_after_a_round(Membership, make, period=1)
    assert joiner["rounds"] == 2
    for key in ("shared", "outer_state"):
        torch.testing.assert_close(joiner[key], before[key], rtol=0, atol=0)


def test_a_joiner_of_edit_has_the_norms_of_the_donor_in_half_precision() -> None:
    def make(average: ElasticAverage) -> Any:
        exchange = DiLoCoAggregation(elastic=average, penalty=OutlierPenalty())
        return DiLoCo(model=bfloat16_model(), lr=0.01, period=1, aggregation=exchange)

    # theta_i is theta in bfloat16, so theta - theta_i is not 0. Its norm is not one of a change.
    before, first, joiner = join_after_a_round(Membership, make, period=1)
    assert before["norms"].keys() == {"weight", "bias"}
    torch.testing.assert_close(joiner["norms"], before["norms"], rtol=0, atol=0)
    torch.testing.assert_close(joiner["shared"], first["shared"], rtol=0, atol=0)


def join_with_a_frozen_layer(rank: int, size: int, method: str) -> list[dict[str, Any]]:
    def make(average: ElasticAverage) -> Any:
        model = make_model()
        model.first.requires_grad_(False)
        return make_optimizer(model, method, average)

    return join_after_a_round(Membership, make, PERIOD)


# In a process, because messages of different lengths end it.
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_joins_a_run_with_a_frozen_layer(method: str) -> None:
    [[before, first, joiner]] = run_ranks(1, join_with_a_frozen_layer, method)
    assert joiner.get("counts") == first.get("counts")
    # In its first round, a joiner of NoLoCo has the slow weights that the donor had before.
    shared = before["shared"] if method == "no_loco" else first["shared"]
    if method != "local_sgd":
        assert shared.keys() == {"norm.weight", "norm.bias", "second.weight", "second.bias"}
    torch.testing.assert_close(joiner["shared"], shared, rtol=0, atol=0)
    assert not torch.equal(joiner["shared"]["second.bias"], make_model().second.bias)


def test_a_joiner_of_streaming_takes_the_fragment_of_the_others_before_the_first_commit() -> None:
    def make(average: ElasticAverage) -> Any:
        exchange = StreamingDiLoCoAggregation(period=4, fragments=2, delay=0, elastic=average)
        return StreamingDiLoCo(model=torch.nn.Linear(3, 1), lr=0.01, aggregation=exchange)

    _, first, joiner = join_after_a_round(FailingMembership, make, period=2)
    assert first["counts"] == joiner["counts"] == {"weight": 4, "bias": 4}
    assert joiner["elastic"]["commits"] == 1
    torch.testing.assert_close(joiner["shared"], first["shared"], rtol=0, atol=0)


def test_one_worker_alone_trains_as_without_rounds() -> None:
    with membership() as member:
        average = ElasticAverage(member)
        optimizer = LocalSGD(model=make_model(), lr=0.1, period=2, aggregation=average)
        average.attach(optimizer)
        assert not average.join()
        plain = make_model()
        alone = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(4):
            step(optimizer)
            optimizer.zero_grad()
            plain(torch.ones(2, 3)).sum().backward()
            alone.step()
            alone.zero_grad()
        assert member.commits == 2
        torch.testing.assert_close(optimizer.model.state_dict(), plain.state_dict())


def test_a_joiner_before_the_first_commit_has_no_weight_either() -> None:
    """The first round is lost, so that all three have committed none."""
    store = dist.HashStore()
    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    start = models[0].weight.detach().clone()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        members = []
        for worker in range(3):
            one = Membership(store, worker, 2, heartbeat_s=0.02, dead_after_s=30.0, wait_s=60.0)
            members.append(one)
        averages = [ElasticAverage(one) for one in members]
        for model, average in zip(models, averages, strict=True):
            average.attach(LocalSGD(model=model, lr=0.1, period=1, aggregation=average))
        for one in members[:2]:
            stack.enter_context(one)
        first = [future.result(60) for future in [pool.submit(one.agree) for one in members[:2]]]
        lost = [pool.submit(one.commit, first[0], False) for one in members[:2]]
        assert [future.result(60) for future in lost] == [False, False]
        assert stack.enter_context(members[2]).has_begun()
        joining = pool.submit(averages[2].join)
        # The others would begin the next round without it.
        while members[2]._read("ask/2") is None:
            time.sleep(0.01)
        rounds = []
        for change, average, model in zip((1.0, 3.0), averages[:2], models[:2], strict=True):
            with torch.no_grad():
                model.weight += change
            rounds.append(pool.submit(average.agg_model(), model, "avg_world"))
        assert joining.result(60)
        for future in rounds:
            future.result(60)
        assert [one.commits for one in members] == [1, 1, 1]
    for model in models:
        torch.testing.assert_close(model.weight.detach(), start + 2)
