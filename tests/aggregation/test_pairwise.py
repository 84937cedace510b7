"""Averages by sends and receives: their bits, and when they take the place of the backend's
all-reduce."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation
from mlbench_core.aggregation.pytorch.transport import pairwise
from mlbench_core.distributed.pytorch import process_groups
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some

LENGTHS = (
    1,
    2,
    3,
    7,
    8,
    17,
    1000,
    600_001,
    1_700_003,
)  # with empty parts, and with several blocks and segments
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def average(
    rank: int, world_size: int, piece_bytes: int, room_bytes: int
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Averages and sums by dtype, with those of Gloo."""
    pairwise._PIECE_BYTES, pairwise._ROOM_BYTES = piece_bytes, room_bytes
    generator = torch.Generator().manual_seed(rank)
    results = []
    for dtype in DTYPES:
        messages = [
            torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
            for length in LENGTHS
        ]
        averages, sums, of_gloo = ([message.clone() for message in messages] for _ in range(3))
        pairwise.average(averages, world_size)
        pairwise.average(sums, None)
        for message in of_gloo:
            dist.all_reduce(message)
        results.append((averages + sums, [message / world_size for message in of_gloo] + of_gloo))
    return results


@pytest.mark.parametrize("world_size", some([3, 2, 4]))
@pytest.mark.parametrize(
    ("piece_bytes", "room_bytes"), [(1 << 24, 1 << 26), (1 << 19, 1 << 20), (1 << 17, 1)]
)
def test_averages_have_the_bits_of_gloo(world_size: int, piece_bytes: int, room_bytes: int) -> None:
    """With all messages at once, in pieces, and with one piece at a time."""
    for results in run_ranks(world_size, average, piece_bytes, room_bytes):
        for found, expected in results:
            assert all(map(torch.equal, found, expected))


def test_received_parts_need_no_more_room_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "_PIECE_BYTES", 4 * 40)
    monkeypatch.setattr(pairwise, "_ROOM_BYTES", 4 * 75)
    messages = [torch.arange(100.0), torch.arange(100.0, 120)]
    batches = [
        [[part.tolist() for part in parts] for parts in batch]
        for batch in pairwise._batches(messages, 4)
    ]
    # Parts have 26 and 6 elements, and pieces 10 of each part, of which a worker receives three
    # versions.
    sizes = [[[len(part) for part in parts] for parts in batch] for batch in batches]
    assert sizes == [[[10] * 4, [10] * 4], [[6, 6, 6, 2], [6, 6, 6, 2]]]
    flat = [number for batch in batches for parts in batch for part in parts for number in part]
    assert sorted(flat) == [float(number) for number in range(120)]


def beside_another_message(rank: int, world_size: int) -> tuple[float, float]:
    """Worker 0 sends a number before an average, and worker 1 receives it afterwards."""
    number, message = torch.tensor([7.0 if rank == 0 else 0.0]), torch.full((100,), float(rank))
    work = dist.isend(number, 1) if rank == 0 else None
    pairwise.average([message], world_size)
    if work is None:
        dist.recv(number, 0)
    else:
        work.wait()
    return number.item(), message.unique().item()


def test_another_message_is_not_a_part_of_an_average() -> None:
    assert run_ranks(2, beside_another_message) == [(7.0, 0.5), (7.0, 0.5)]


def average_twice(
    rank: int, world_size: int, named: tuple[str, ...], by_layer: bool
) -> tuple[dict[str, int], list[Any]]:
    """The number of calls by operation in two averages if ``named`` are the workers' machines, and
    the last result."""
    process_groups.machine = lambda: named[rank]
    model = nn.Linear(2, 2)
    aggregate = AllReduceAggregation(world_size).agg_grad(by_layer=by_layer)
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in ("all_reduce", "isend", "irecv")
        }
        for turn in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank + turn))
            aggregate(model, AVG_WORLD)
    gradients = [
        parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None
    ]
    return {name: call.call_count for name, call in calls.items()}, gradients


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(
    ("named", "is_direct"),
    [(("here", "here"), True), (("here", "there"), False), (("", ""), False)],
)
def test_workers_of_one_machine_average_directly(
    named: tuple[str, ...], is_direct: bool, by_layer: bool
) -> None:
    """The machines are compared once. Each part travels to its worker and back."""
    messages = (
        6 if by_layer else 2
    )  # in two averages: of the weight, the bias and both flags, or of all of them
    # A part has at least two numbers, so that the bias and the flags are one part each.
    parts = (8 if by_layer else 4) if is_direct else 0
    expected = {"all_reduce": 1 if is_direct else 1 + messages, "isend": parts, "irecv": parts}
    gradients = [[[1.5, 1.5], [1.5, 1.5]], [1.5, 1.5]]
    assert run_ranks(2, average_twice, named, by_layer) == [(expected, gradients)] * 2


def average_in_odd_ways(rank: int, world_size: int, meeting: Path) -> dict[str, Any]:
    """Averages of numbers of other kinds, with other divisors, and in the second process group of a
    process."""
    aggregation = AllReduceAggregation(world_size)
    found: dict[str, Any] = {}

    def average(
        name: str, *, op: str = AVG_WORLD, denom: Any = None, of: AllReduceAggregation = aggregation
    ) -> None:
        tensors = {"x": torch.arange(5.0) + rank, "z": torch.full((3,), complex(3 * rank, rank))}
        tensors["w"] = torch.full((2,), complex(float("inf"), 2.0))
        of.aggregate(tensors, op, denom)
        found[name] = [tensor.tolist() for tensor in tensors.values()]

    with torch.inference_mode():
        average("in inference mode")
    average("outside of it")
    tensor = torch.ones(3, requires_grad=True) * rank
    aggregation.aggregate({"x": tensor}, AVG_WORLD)
    assert tensor.tolist() == [0.5] * 3
    average("by a tensor", op=AVG_CUSTOM, denom=torch.tensor([2.0], dtype=torch.float64))
    average("converted", of=AllReduceAggregation(world_size, comm_dtype=torch.float64))
    average("divided before", of=AllReduceAggregation(world_size, divide_before=True))
    before = dist.group.WORLD
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=world_size)
    assert dist.group.WORLD is not before
    average("in a new group", of=AllReduceAggregation(world_size))
    return found


def test_kinds_of_numbers_and_divisors(tmp_path: Path) -> None:
    for found in run_ranks(2, average_in_odd_ways, tmp_path / "meeting"):
        assert len(found) == 6
        for name, averages in found.items():
            assert averages == [
                [0.5, 1.5, 2.5, 3.5, 4.5],
                [1.5 + 0.5j] * 3,
                [complex("inf+2j")] * 2,
            ], name


def used_operations(rank: int, world_size: int, level: str) -> tuple[int, int]:
    """The number of calls of all-reduce and of sends in an average."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    aggregation = AllReduceAggregation(world_size)
    pairwise.is_on_one_machine()
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
        mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
    ):
        aggregation.aggregate({"x": torch.ones(8)}, AVG_WORLD)
        return all_reduce.call_count, isend.call_count


@pytest.mark.parametrize(("level", "calls"), [("OFF", (0, 2)), ("DETAIL", (1, 0))])
def test_checks_of_torch_see_every_message(level: str, calls: tuple[int, int]) -> None:
    assert run_ranks(2, used_operations, level) == [calls] * 2
