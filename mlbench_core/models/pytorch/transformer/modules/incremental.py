"""The keys and values that a decoder keeps between the steps of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["IncrementalState", "KeyValueCache"]


@dataclass
class KeyValueCache:
    """Keys and values computed by one attention module.

    Args:
        keys: Shape (rows, heads, positions, features of a head).
        values: The same shape.
        is_static: If True, the keys and values are those of the source: one row for each sentence,
            shared by all of its hypotheses. Otherwise they are those of the generated tokens, with
            one row for each hypothesis.
    """

    keys: Tensor
    values: Tensor
    is_static: bool = False

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, int64 of shape (new rows,)."""
        # Not in place, because several new rows may continue the same old row.
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)


class IncrementalState(dict[nn.Module, KeyValueCache]):
    """The caches of a decoder's attention modules; a plain dict is enough without reordering."""

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Reorder the caches as a beam search requires.

        Args:
            rows: int64 of shape (new rows,): the old row that each new row continues.
            sentences: int64 of shape (new sentences,): the old sentences that are still in the
                batch; None if all are.
        """
        for cache in self.values():
            if not cache.is_static:
                cache.select(rows)
            elif sentences is not None:
                cache.select(sentences)
