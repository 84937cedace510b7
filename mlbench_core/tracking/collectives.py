"""Count the collectives of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["CollectiveCounts"]

# Lists with more entries are merged by powers of two of the size.
_MOST_ENTRIES = 20


class CollectiveCounts(Counter[tuple[str, int, int, bool]]):
    """Numbers of calls by kind, group size, bytes of one call, and overlap.

    Example:
        >>> counts = CollectiveCounts()
        >>> counts["all_reduce", 4, 1000, False] += 2
        >>> counts.as_list()
        [{'op': 'all_reduce', 'group': 4, 'calls': 2, 'bytes': 2000, 'overlapped': False}]
    """

    def as_list(self, *, merged_if_many: bool = True) -> list[dict[str, Any]]:
        """Return one entry for each size as JSON-ready values.

        Args:
            merged_if_many: True for one entry for each power of two if there are more than 20
                sizes.
        """
        merges = merged_if_many and len(self) > _MOST_ENTRIES
        merged: dict[tuple[str, int, int, bool], list[int]] = {}
        for (op, group, size_bytes, overlapped), calls in sorted(self.items()):
            size_class = size_bytes
            if merges:
                size_class = size_bytes.bit_length()
            sums = merged.setdefault((op, group, size_class, overlapped), [0, 0])
            sums[0] += calls
            sums[1] += calls * size_bytes
        entries = []
        for (op, group, _, overlapped), (calls, size_bytes) in merged.items():
            entries.append(
                {
                    "op": op,
                    "group": group,
                    "calls": calls,
                    "bytes": size_bytes,
                    "overlapped": overlapped,
                }
            )
        return entries

    @classmethod
    def from_list(cls, entries: Iterable[Mapping[str, Any]]) -> CollectiveCounts:
        """Return the counts of a list from :meth:`as_list` that was not merged."""
        counts = cls()
        for entry in entries:
            # The list has the bytes of all calls together.
            size_bytes = entry["bytes"] // entry["calls"]
            counts[entry["op"], entry["group"], size_bytes, entry["overlapped"]] = entry["calls"]
        return counts
