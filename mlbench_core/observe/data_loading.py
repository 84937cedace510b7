"""Observe the batches of a DataLoader, and evaluations."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mlbench_core.observe.patches import Patches
from mlbench_core.observe.samples import find_samples
from mlbench_core.observe.steps import StepClock

__all__ = ["DataObserver"]


class DataObserver:
    """Measure the wait for batches, count their samples, and notice evaluations.

    An evaluation begins with ``model.eval()``, or if a DataLoader is read without gradients. It
    ends with ``model.train()``, or if a DataLoader is read with gradients.

    Args:
        clock: The clock of the steps.

    Attributes:
        other_thread_reads: True if another thread than the one that trains has read a DataLoader.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.other_thread_reads = False
        self._patches = Patches()
        self._patched: set[type] = set()
        # Iterator: its loader, and the dimension of the samples, None as long as it is unknown.
        # A dictionary of weak references would cost more in each step.
        self._origins: dict[int, tuple[int, int | None]] = {}
        self._batch_sizes: dict[int, int] = {}
        self._evaluated: nn.Module | None = None
        self._is_in_eval = False
        self._trained: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Replace functions of torch."""
        self._patches = patches
        patches.replace(DataLoader, "__iter__", self._iter)
        patches.replace(nn.Module, "train", self._train)

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(loader: Any) -> Any:
            is_training_thread = get_ident() == self._clock.thread
            if is_training_thread:
                self._clock.loading_begins(torch.is_grad_enabled())
            iterator = original(loader)
            if is_training_thread:
                self._clock.loading_ends()
                self._clock.read_again(id(loader))
            self._note_origin(loader, iterator)
            # The iterator stays the same object; the class that has its __next__ is observed.
            for kind in type(iterator).__mro__:
                if "__next__" in vars(kind):
                    if kind not in self._patched:
                        self._patched.add(kind)
                        self._patches.replace(kind, "__next__", self._next)
                    break
            return iterator

        return observed

    def _note_origin(self, loader: Any, iterator: Any) -> None:
        """Note which loader an iterator is of, and how many samples are in its batches."""
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self._origins[id(iterator)] = id(loader), 0
        if isinstance(size, int):
            self._origins[id(iterator)] = id(loader), None
            self._batch_sizes[id(iterator)] = size

    def _find_samples(self, iterator: Any, batch: Any) -> int | None:
        """Return the dimension of the samples; None if this batch does not show it either."""
        key = id(iterator)
        dimension = find_samples(batch, self._batch_sizes[key])
        self._origins[key] = self._origins[key][0], dimension
        return dimension

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock, origins = self._clock, self._origins

        @functools.wraps(original)
        def observed(iterator: Any) -> Any:
            if get_ident() != clock.thread:
                self.other_thread_reads = True
                return original(iterator)
            clock.fetch_begins(torch.is_grad_enabled())
            batch = None
            try:
                batch = original(iterator)
            finally:
                loader, dimension = origins.get(id(iterator), (0, 0))
                if dimension is None and batch is not None:
                    dimension = self._find_samples(iterator, batch)
                clock.fetch_ends(batch, loader, dimension or 0)
            return batch

        return observed

    def _begin_evaluation(self, module: nn.Module) -> None:
        """Begin an evaluation of a module, unless the script does not train it."""
        if not self._clock.is_open or get_ident() != self._clock.thread:
            return
        # A model that is never trained, such as a teacher, begins no evaluation.
        if module not in self._trained:
            self._trained[module] = self._clock.trains(module)
        if self._trained[module]:
            self._evaluated = module
            self._clock.begin_evaluation()

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(module: nn.Module, mode: bool = True) -> Any:
            # eval() calls train(False). Models of transformers have an eval() of their own.
            if not mode and not self._is_in_eval:
                self._is_in_eval = True
                try:
                    result = original(module, mode)
                finally:
                    self._is_in_eval = False
                self._begin_evaluation(module)
                return result
            result = original(module, mode)
            # torch calls it for each module of a model, so the comparison comes first.
            if mode and self._clock.is_evaluating and self._evaluated in (module, None):
                self._evaluated = None
                self._clock.end_evaluation()
            return result

        return observed
