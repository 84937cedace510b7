"""Compute the bytes that collectives put on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["total_wire_bytes", "wire_bytes"]


def wire_bytes(op: str, group: int, size_bytes: float) -> float | None:
    r"""Return the bytes that a worker puts on the wire in one collective, as a mean over the group.

    Let :math:`k` be the size of the group, and :math:`n` the payload of each worker:

    =====================  =========================  ============================================
    collective             bytes of a worker          algorithm
    =====================  =========================  ============================================
    ``all_reduce``         :math:`2 n (k - 1) / k`    a ring, or parts that are sent to all others
    ``reduce_scatter``     :math:`n (k - 1) / k`      a ring
    ``all_gather``         :math:`n (k - 1)`          a ring; each worker passes on all parts
    ``broadcast``          :math:`n (k - 1) / k`      :math:`k - 1` workers receive it once
    ``neighbors``          :math:`n`                  the messages to all neighbors are counted
    ``shared_memory_sum``  0                          nothing leaves the machine's memory
    =====================  =========================  ============================================

    Headers of packets are not included: on Ethernet, they add about 5 %.

    Args:
        op: The kind of the collective.
        group: Number of workers that take part, this one included.
        size_bytes: Payload of this worker: of ``all_gather`` its own part, of ``neighbors`` all its
            messages together.

    Returns:
        The bytes, or None if the kind is not in the table.

    Example:
        >>> wire_bytes("all_reduce", 4, 1000.0), wire_bytes("all_gather", 4, 1000.0)
        (1500.0, 3000.0)

    References:
        Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH.
        International Journal of High Performance Computing Applications 19, 2005.
    """
    others = group - 1
    factors = {
        "all_reduce": 2 * others / group,
        "reduce_scatter": others / group,
        "all_gather": others,
        "broadcast": others / group,
        "neighbors": 1,
        "pair": 1,
        "shared_memory_sum": 0,
    }
    if op not in factors:
        return None
    return factors[op] * size_bytes


def total_wire_bytes(entries: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the bytes that a worker puts on the wire in some collectives.

    Args:
        entries: As ``collectives`` in a ``result.json`` has them, merged or not.

    Returns:
        The bytes, or None if one of the collectives has no known number.

    Example:
        >>> total_wire_bytes([{"op": "all_gather", "group": 3, "calls": 2, "bytes": 200}])
        400
    """
    sizes = []
    for entry in entries:
        size_bytes = wire_bytes(entry["op"], entry["group"], entry["bytes"])
        if size_bytes is None:
            return None
        sizes.append(size_bytes)
    return round(sum(sizes))
