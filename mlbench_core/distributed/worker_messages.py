"""Send messages between the workers of a run, whatever framework connects them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Workers"]


class Workers:
    """Messages between the workers; this class is for one worker alone.

    For several workers, a subclass sends the messages through its framework.
    """

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return 1

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all workers, one for each of the numbers; every worker calls it."""
        return list(numbers)

    def broadcast(self, content: bytes, sender: int) -> bytes:
        """Return the content that the sender passed.

        Every worker calls it, the others with any content.
        """
        return content
