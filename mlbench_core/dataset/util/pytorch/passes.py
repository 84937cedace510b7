"""Passes over batches that know their epoch and can be resumed."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["ResumablePasses"]


class ResumablePasses(ABC):
    """What loaders and samplers have in common whose batches follow from a seed and the epoch alone.

    Each pass is an epoch of its own: a second pass continues with the next epoch, unless :meth:`set_epoch` says
    another. A run that stops in the middle of a pass and keeps :meth:`state_dict` goes on with the very batches it
    would have had.

    A subclass begins each pass with :meth:`_begin`, calls :meth:`_hand_out` before it gives a batch away, and says in
    :meth:`_basis` what its batches rest on.
    """

    _epoch = 0
    _next_batch = 0  # of the pass under way: the first batch that was not handed out yet
    _started = False  # whether a pass of this epoch has begun

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches of an epoch."""

    @abstractmethod
    def _basis(self) -> dict[str, Any]:
        """What the batches of an epoch depend on: numbers by name."""

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the next one where none has begun; from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is.

        Right after :meth:`load_state_dict`, naming the epoch that was loaded keeps the position in it.

        Args:
            epoch: From 0.

        Raises:
            ValueError: It is negative.
        """
        if operator.index(epoch) < 0:
            raise ValueError(f"epoch is {epoch}; epochs count from 0")
        if self._started or epoch != self._epoch:
            self._next_batch = 0
        self._epoch = epoch
        self._started = False

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands: what a checkpoint needs to go on with the next batch.

        A ``DataLoader`` with worker processes asks a sampler for batches ahead of time; without any, the next batch is
        the one after the last that was handed out.

        Returns:
            Whole numbers: ``epoch`` and ``batch`` of the next batch, and what they rest on.
        """
        finished = self._started and self._next_batch >= len(self)
        return {
            "epoch": self._epoch + 1 if finished else self._epoch,
            "batch": 0 if finished else self._next_batch,
            **self._basis(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: It was taken with other arguments or other data, so the batches would not be the ones that were
                left.
        """
        for name, here in self._basis().items():
            if state.get(name) != here:
                raise ValueError(f"the state was taken with {name} {state.get(name)}, but here it is {here}")
        self._epoch = state["epoch"]
        self._next_batch = state["batch"]
        self._started = False

    def _begin(self) -> int:
        """Begin a pass, of the next epoch if this one had its own already; gives the first batch that is wanted."""
        if self._started:
            self.set_epoch(self._epoch + 1)
        self._started = True
        return self._next_batch

    def _hand_out(self, number: int) -> None:
        """Note that batch ``number`` is given away now."""
        self._next_batch = number + 1
