"""Iterate over batches in epochs, and resume in the middle of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mlbench_core.arguments import check_int

__all__ = ["ResumablePasses"]


class ResumablePasses(ABC):
    """The base class of loaders and samplers whose batches depend only on a seed and the epoch.

    Each pass is its own epoch: a second pass continues with the next epoch, unless
    :meth:`set_epoch` sets another one. A run that stops in the middle of a pass and saves
    :meth:`state_dict` resumes with exactly the same remaining batches.

    A subclass starts each pass with :meth:`_begin` and calls :meth:`_mark_yielded` before it yields
    a batch. Its :meth:`_settings` returns the values that determine its batches.
    """

    # These are class attributes, so that subclasses need not call a constructor.
    _epoch = 0
    _next_batch = 0  # the first batch of the current pass that was not yielded yet
    _started = False  # True if a pass of this epoch has begun

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the numbers that determine the batches of an epoch, by name."""

    @property
    def epoch(self) -> int:
        """Return the epoch of the current pass, or of the next one if no pass has begun; from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        If the epoch is the one that :meth:`load_state_dict` has just loaded, the position in it is
        kept.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            ValueError: The number is negative.
        """
        check_int("epoch", epoch, 0)
        # A training loop also sets the epoch that it has just loaded, and must then continue at the
        # loaded position.
        if self._started or epoch != self._epoch:
            self._next_batch = 0
        self._epoch = epoch
        self._started = False

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iteration, so that a run can resume at the next batch.

        A ``DataLoader`` with worker processes requests batches from a sampler ahead of time.
        Without worker processes, the next batch is the one after the last that was yielded.

        Returns:
            Integers: the number of the ``epoch`` and of the next ``batch``, and the values that
            determine the batches.
        """
        # After the last batch, the position is the start of the next epoch: a resumed run must not
        # repeat this one.
        epoch, batch = self._epoch, self._next_batch
        if self._started and batch >= len(self):
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch, **self._settings()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the position of a state.

        Args:
            state: The result of :meth:`state_dict`.

        Raises:
            ValueError: The state was saved with other arguments or other data, so the remaining
                batches would differ.
        """
        # With other data or settings, the run would silently continue with wrong batches.
        for name, here in self._settings().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the state was saved with {name} {state.get(name)}, but here it is {here}"
                )
        self._epoch = state["epoch"]
        self._next_batch = state["batch"]
        self._started = False

    def _begin(self) -> int:
        """Begin a pass and return the number of its first batch."""
        # A second pass without `set_epoch` is that of the next epoch.
        if self._started:
            self.set_epoch(self._epoch + 1)
        self._started = True
        return self._next_batch

    def _mark_yielded(self, number: int) -> None:
        """Record that batch ``number`` is yielded now."""
        self._next_batch = number + 1
