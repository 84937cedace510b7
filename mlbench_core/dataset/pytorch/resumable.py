"""Iterate over batches in epochs, and resume in the middle of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mlbench_core.arguments import check_int

__all__ = ["ResumablePasses"]


class ResumablePasses(ABC):
    """The common part of loaders and samplers whose batches follow from a seed and the epoch alone.

    Each pass is its own epoch: a second pass continues with the next epoch, unless :meth:`set_epoch` sets another one.
    A run that stops in the middle of a pass and saves :meth:`state_dict` resumes with exactly the same remaining
    batches.

    A subclass starts each pass with :meth:`_begin` and calls :meth:`_hand_out` before it yields a batch. Its
    :meth:`_basis` returns the values that determine its batches.
    """

    # Class attributes need no constructor: samplers also inherit from torch's Sampler, and call none.
    _epoch = 0
    _next_batch = 0  # of the current pass: the first batch that was not yielded yet
    _started = False  # whether a pass of this epoch has begun

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    @abstractmethod
    def _basis(self) -> dict[str, Any]:
        """Return the numbers that determine the batches of an epoch, by name."""

    @property
    def epoch(self) -> int:
        """Return the epoch of the current pass, or of the next one if no pass has begun; from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Right after :meth:`load_state_dict`, setting the loaded epoch keeps the position in it.

        Args:
            epoch: From 0.

        Raises:
            ValueError: It is negative.
        """
        check_int("epoch", epoch, 0)
        # A training loop sets the epoch that it has just loaded: the position in this epoch must survive that.
        if self._started or epoch != self._epoch:
            self._next_batch = 0
        self._epoch = epoch
        self._started = False

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iteration, which a checkpoint needs to resume at the next batch.

        A ``DataLoader`` with worker processes requests batches from a sampler ahead of time. Without worker processes,
        the next batch is the one after the last that was yielded.

        Returns:
            Whole numbers: ``epoch`` and ``batch`` of the next batch, and the values that determine the batches.
        """
        # After the last batch, the state is the start of the next epoch: a resumed run must not repeat this one.
        finished = self._started and self._next_batch >= len(self)
        return {
            "epoch": self._epoch + 1 if finished else self._epoch,
            "batch": 0 if finished else self._next_batch,
            **self._basis(),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the position of a state.

        Args:
            state: The result of :meth:`state_dict`.

        Raises:
            ValueError: The state was saved with other arguments or other data, so the remaining batches would differ.
        """
        # A state of other data or settings would resume silently with wrong batches.
        for name, here in self._basis().items():
            if state.get(name) != here:
                raise ValueError(f"the state was saved with {name} {state.get(name)}, but here it is {here}")
        self._epoch = state["epoch"]
        self._next_batch = state["batch"]
        self._started = False

    def _begin(self) -> int:
        """Begin a pass, of the next epoch if this one was started before, and return the number of its first batch."""
        if self._started:
            self.set_epoch(self._epoch + 1)
        self._started = True
        return self._next_batch

    def _hand_out(self, number: int) -> None:
        """Record that batch ``number`` is yielded now."""
        self._next_batch = number + 1
