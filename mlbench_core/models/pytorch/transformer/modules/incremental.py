"""What a decoder remembers between the steps of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["IncrementalState", "KeyValueCache"]


@dataclass
class KeyValueCache:
    """Keys and values that one attention module has computed.

    Args:
        keys: Shape (rows, heads, positions, features of a head).
        values: The same shape.
        is_static: Whether these are the source's keys and values, kept once for a sentence whatever the number of its
            hypotheses, and not those of the rows' own positions.
    """

    keys: Tensor
    values: Tensor
    is_static: bool = False

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, int64 of shape (new rows,)."""
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)


class IncrementalState(dict[nn.Module, KeyValueCache]):
    """The caches of a decoder's attention modules. A plain dict serves as well where nothing is reordered."""

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Let the caches follow a beam search.

        Args:
            rows: int64 of shape (new rows,): the old row that each new row continues.
            sentences: int64 of shape (new sentences,): the old sentences that are still there; None if all are.
        """
        for cache in self.values():
            if not cache.is_static:
                cache.select(rows)
            elif sentences is not None:
                cache.select(sentences)
