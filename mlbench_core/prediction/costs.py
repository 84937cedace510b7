r"""Estimate the time of collectives over Gloo from latency, bandwidth and the pacing of TCP.

A message of :math:`S` bytes over a link with round-trip time :math:`R` and payload bandwidth
:math:`B` takes :math:`R + e` with :math:`e = S / B` (Hockney). Gloo sends a message only after the
receiver has reported that it is ready. So the latency of a message is a whole round trip, not half
of one.

An all-reduce of :math:`n` bytes over :math:`k` workers is a ring with two phases. Each phase has
:math:`k - 1` messages of :math:`S = n / k` bytes, and each message is two segments that are in
flight together. So the time is:

.. math::

    T = 2 \left[ (k - 2) \max(R + e / 2, e) + R + e \right]

References:
    Hockney: The communication challenge for MPP. Parallel Computing 20, 1994.

    Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH.
    International Journal of High Performance Computing Applications 19, 2005.

    Cardwell et al.: BBR: congestion-based congestion control. ACM Queue 14, 2016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlbench_core.arguments import check_finite_at_least_0, check_int
from mlbench_core.network.description import Link, Network

__all__ = ["OPS", "Collective", "collective_s"]

# A full Ethernet frame of 1514 bytes carries 1448 bytes of a TCP connection.
_PAYLOAD = 1448 / 1514
# An assumed round trip of two processes without any added delay: two wake-ups and Gloo's own work.
_LEAST_ROUND_TRIP_S = 1e-4
_SEGMENT_BYTES = 1 << 20
_NUMBER_BYTES = 4
# If a connection is idle between messages, TCP paces it at 2 / ln 2 times the rate of its last
# round trips (BBR's startup gain). So sending a message takes at least this share of a round trip.
# TCP sends the initial window of 10 segments at once. Two workers have messages in both directions
# of one connection, and TCP then sends more at once. This number was observed in the network lab on
# 2026-11-23; no script of the repository repeats the observation.
_PACED_SHARE = math.log(2) / 2
_UNPACED_BYTES = 10 * 1448
_UNPACED_BYTES_OF_A_PAIR = 1 << 16

OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    *("neighbors", "pair", "shared_memory_sum"),
)
"""The kinds of collectives with a known cost.

A sum through shared memory becomes an all-reduce between hosts.
"""


@dataclass(frozen=True)
class Collective:
    """Equal calls of one collective.

    Attributes:
        op: One of :data:`OPS`.
        group: Number of workers that take part, this one included.
        calls: Number of calls in a training step, possibly a fraction.
        size_bytes: Payload of one worker in one call.
        overlapped: True if training continues during the call.
    """

    op: str
    group: int
    calls: float
    size_bytes: float
    overlapped: bool = False

    def scaled(self, measured: int, workers: int) -> Collective:
        """Return the collective in a run with another number of workers.

        The payload stays the same; in an exchange with neighbors, the payload for each neighbor
        does. The neighbors are those of a ring, or of a complete graph if the measured run had one
        and more than three workers. A pair stays one. Other groups that are smaller than the run
        keep their size.

        Args:
            measured: Number of workers of the run with this collective.
            workers: Number of workers of the other run.
        """
        if self.op == "neighbors":
            is_complete = self.group == measured > 3
            # Two workers have one neighbor, and every other ring has two.
            peers = min(workers, max(self.group, 3)) - 1
            if is_complete:
                peers = workers - 1
            size_bytes = self.size_bytes / (self.group - 1) * peers
            return Collective(self.op, peers + 1, self.calls, size_bytes, self.overlapped)
        group = min(self.group, workers)
        if self.op != "pair" and self.group == measured:
            group = workers
        return Collective(self.op, group, self.calls, self.size_bytes, self.overlapped)


def collective_s(op: str, size_bytes: float, workers: int, network: Network) -> float:
    """Return the seconds of one call of a collective.

    Args:
        op: One of :data:`OPS`.
        size_bytes: Payload of one worker. For ``all_gather`` it is the worker's own part, for
            ``neighbors`` the sum of its messages.
        workers: Number of workers that take part. They are the first hosts of the network. For
            ``neighbors`` and ``pair``, the number of all workers.
        network: The network. If its racks have too few hosts, there are further racks of the same
            size. Jitter, loss and cuts are ignored.

    Raises:
        ValueError: ``op`` is not known, or a number is out of range.

    Example:
        >>> from mlbench_core.network import parse_network
        >>> round(collective_s("all_reduce", 2e6, 2, parse_network("127mbit,90ms")), 3)
        0.312
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}: its cost is not known")
    check_int("workers", workers)
    check_finite_at_least_0("size_bytes", size_bytes)
    if workers == 1 or size_bytes == 0:
        return 0.0
    # The distinct links of a ring in the order of the ranks.
    links = {network.path(rank, (rank + 1) % workers) for rank in range(workers)}
    if op in ("neighbors", "pair", "broadcast"):
        # Messages travel at the same time, so the slowest link decides.
        slowest_s = 0.0
        for link in links:
            slowest_s = max(slowest_s, _round_trip_s(link) + _sending_s(link, size_bytes, workers))
        rounds = 1
        if op == "broadcast":
            # A binomial tree: the number of workers that have the data doubles in each round.
            rounds = math.ceil(math.log2(workers))
        return rounds * slowest_s
    if op == "all_gather":
        return _phase_s(links, workers, size_bytes, segments=2)
    part = size_bytes / workers
    segments = max(2, math.ceil(part / _SEGMENT_BYTES))
    # With fewer numbers than the 2k segments, most workers have nothing to send and are ready
    # early. This saves up to one of the two phases: all of it if the numbers are at most a quarter
    # of the segments, and linearly less for more numbers. This rule was chosen from steps that
    # benchmarks/micro/prediction.py measured on 2026-11-23.
    filled = min(1.0, size_bytes / _NUMBER_BYTES / (2 * workers))
    phases = 1 + max(0.0, (4 * filled - 1) / 3)
    if op == "reduce_scatter":
        phases = 1
    return phases * _phase_s(links, workers, part, segments)


def _phase_s(links: set[Link], workers: int, message_bytes: float, segments: int) -> float:
    """Return the seconds of a phase, in which each worker sends ``workers - 1`` messages."""
    pairs = (workers - 1) * segments / 2
    seconds = []
    for link in links:
        # Two segments are in flight: while one travels, the receiver reports that it is ready for
        # the next.
        pair_s = _sending_s(link, message_bytes * 2 / segments, workers)
        round_trip_s = _round_trip_s(link)
        interval_s = max(round_trip_s + pair_s / 2, pair_s)
        seconds.append((pairs - 1) * interval_s + round_trip_s + pair_s)
    # Each worker waits for the one before it, so the slowest link sets the pace of the ring.
    return max(seconds)


def _round_trip_s(link: Link) -> float:
    return link.round_trip_s + _LEAST_ROUND_TRIP_S


def _sending_s(link: Link, size_bytes: float, workers: int) -> float:
    """Return the seconds from the first to the last byte of a message."""
    sending_s = 0.0
    if link.bandwidth is not None:
        sending_s = size_bytes * 8 / (link.bandwidth * _PAYLOAD)
    unpaced_bytes = _UNPACED_BYTES
    if workers == 2:
        unpaced_bytes = _UNPACED_BYTES_OF_A_PAIR
    if size_bytes > unpaced_bytes:
        return max(sending_s, link.round_trip_s * _PACED_SHARE)
    return sending_s
