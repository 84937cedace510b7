"""The costs of collectives against values computed by hand, and against a simulation of a ring's
messages."""

from __future__ import annotations

import math

import pytest

from mlbench_core.network import parse_network
from mlbench_core.prediction import Collective, collective_s

# A link that carries 12,500,000 bytes of frames, and thus this number of bytes of payload, in a
# second.
RATE = 12_500_000 * 1448 / 1514
LEAST_S = 1e-4


def simulate_phase(workers: int, segments: int, segment_s: float, delays_s: list[float]) -> float:
    """Play one phase of Gloo's ring, message by message, and return the time of the last arrival.

    A worker issues a receive and a send when those of two iterations ago are done. A segment leaves
    when the receiver's notification has come, the sender has issued it, and the link is free."""
    iterations = (workers - 1) * segments
    issued = [[0.0] * iterations for _ in range(workers)]
    done = [[0.0] * iterations for _ in range(workers)]
    free = [0.0] * workers
    for i in range(iterations):
        for rank in range(workers):
            issued[rank][i] = done[rank][i - 2] if i >= 2 else 0.0
        for rank in range(workers):
            sender, delay_s = rank - 1, delays_s[rank - 1]
            leaves = max(issued[rank][i] + delay_s, issued[sender][i], free[sender])
            free[sender] = leaves + segment_s
            done[rank][i] = leaves + segment_s + delay_s
    return max(map(max, done))


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("network", "delay_s"), [("100mbit", 0.0), ("100mbit,1ms", 0.0005)])
@pytest.mark.parametrize("part", [10_000, 400_000])
def test_a_ring_costs_what_its_messages_cost(
    workers: int, network: str, delay_s: float, part: int
) -> None:
    delays_s = [delay_s + LEAST_S / 2] * workers
    phase_s = simulate_phase(workers, 2, part / 2 / RATE, delays_s)
    found = parse_network(network)
    assert collective_s("all_reduce", part * workers, workers, found) == pytest.approx(
        2 * phase_s, rel=1e-9
    )
    assert collective_s("reduce_scatter", part * workers, workers, found) == pytest.approx(
        phase_s, rel=1e-9
    )
    assert collective_s("all_gather", part, workers, found) == pytest.approx(phase_s, rel=1e-9)


def test_large_sums_travel_in_segments_of_a_mebibyte() -> None:
    """With a long delay, two segments in flight do not fill the link."""
    size = 8 << 20
    phase_s = simulate_phase(2, 4, (1 << 20) / RATE, [0.1 + LEAST_S / 2] * 2)
    assert collective_s("all_reduce", size, 2, parse_network("100mbit,200ms")) == pytest.approx(
        2 * phase_s, rel=1e-9
    )
    assert phase_s > 0.25 + (4 << 20) / RATE


def test_the_slowest_link_sets_the_pace_of_a_ring() -> None:
    delays_s = [0.01 + LEAST_S / 2 if rank % 4 == 3 else LEAST_S / 2 for rank in range(8)]
    played = 2 * simulate_phase(8, 2, 5_000 / RATE, delays_s)
    found = collective_s("all_reduce", 80_000, 8, parse_network("2x4:100mbit/100mbit,20ms"))
    assert found == pytest.approx(played, rel=0.05)
    assert found > 5 * collective_s(
        "all_reduce", 80_000, 4, parse_network("2x4:100mbit/100mbit,20ms")
    )


def test_one_slow_host_slows_the_ring_down() -> None:
    size = 4_000_000
    even = collective_s("all_reduce", size, 4, parse_network("100mbit"))
    uneven = parse_network("100mbit; host3: 10mbit")
    assert collective_s("all_reduce", size, 4, uneven) == pytest.approx(10 * even, rel=0.01)
    # The slow host is not among the first three.
    assert collective_s("all_reduce", size, 3, uneven) == collective_s(
        "all_reduce", size, 3, parse_network("100mbit")
    )


@pytest.mark.parametrize(
    ("op", "size", "workers", "expected_s"),
    [
        # Two exchanges, each a notification and 5,000 bytes.
        ("all_reduce", 10_000, 2, 2 * (0.0201 + 5_000 / RATE)),
        # One number passes once round the ring.
        ("all_reduce", 4, 4, 3 * 0.0201 + 1 / RATE),
        # Four numbers in 8 segments: a third of the second phase.
        ("all_reduce", 16, 4, 4 / 3 * (3 * 0.0201 + 4 * 4 / 2 / RATE)),
        ("neighbors", 20_000, 2, 0.0201 + 20_000 / RATE),
        ("pair", 20_000, 2, 0.0201 + 20_000 / RATE),
        ("broadcast", 10_000, 8, 3 * (0.0201 + 10_000 / RATE)),
        # Five workers take as many rounds of a binomial tree as eight.
        ("broadcast", 10_000, 5, 3 * (0.0201 + 10_000 / RATE)),
        # Paced: sending takes ln 2 / 2 of the round trip.
        ("neighbors", 20_000, 3, 0.0201 + 0.02 * math.log(2) / 2),
    ],
)
def test_costs_by_hand(op: str, size: int, workers: int, expected_s: float) -> None:
    assert collective_s(op, size, workers, parse_network("100mbit,20ms")) == pytest.approx(
        expected_s, rel=1e-4
    )


def test_nothing_to_send_costs_nothing() -> None:
    network = parse_network("100mbit,20ms")
    assert collective_s("all_reduce", 1000, 1, network) == 0
    assert collective_s("all_reduce", 0, 8, network) == 0
    # Without a limit only the notifications take time, one for each pair of segments of 1 MiB.
    assert collective_s("all_reduce", 16 << 20, 2, parse_network("unlimited")) == pytest.approx(
        2 * 4 * 1e-4
    )


def test_unknown_kinds_and_wrong_numbers_are_refused() -> None:
    network = parse_network("100mbit")
    with pytest.raises(
        ValueError, match=r"op must be one of all_reduce, .*, not 'gather': its cost is not known"
    ):
        collective_s("gather", 1, 2, network)
    with pytest.raises(ValueError, match="workers"):
        collective_s("all_reduce", 1, 0, network)
    with pytest.raises(ValueError, match="size_bytes"):
        collective_s("all_reduce", -1, 2, network)


@pytest.mark.parametrize(
    ("collective", "measured", "workers", "group", "size_bytes"),
    [
        (Collective("all_reduce", 4, 1, 100), 4, 64, 64, 100),
        (Collective("all_reduce", 2, 1, 100), 4, 64, 2, 100),
        (Collective("neighbors", 2, 1, 100), 2, 64, 3, 200),
        (Collective("neighbors", 3, 1, 200), 4, 2, 2, 100),
        (Collective("neighbors", 4, 1, 300), 4, 64, 64, 6300),
        (Collective("pair", 2, 1, 100), 2, 64, 2, 100),
    ],
)
def test_collectives_of_other_numbers_of_workers(
    collective: Collective, measured: int, workers: int, group: int, size_bytes: float
) -> None:
    assert collective.scaled(measured, workers) == Collective(collective.op, group, 1, size_bytes)
