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
from mlbench_core.observe.steps import StepClock

__all__ = ["DataObserver"]


class DataObserver:
    """Measure the wait for batches, count their samples, and notice evaluations.

    An evaluation begins with ``model.eval()`` or with a batch that is fetched without gradients. It
    ends with ``model.train()`` or with a batch that is fetched with gradients.

    Args:
        clock: The clock of the steps.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._patches = Patches()
        self._patched: set[type] = set()
        self._evaluated: nn.Module | None = None
        self._trained: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Replace functions of torch."""
        self._patches = patches
        patches.replace(DataLoader, "__iter__", self._iter)
        patches.replace(nn.Module, "eval", self._eval)
        patches.replace(nn.Module, "train", self._train)

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(loader: Any) -> Any:
            iterator = original(loader)
            # The iterator stays the same object; the class that has its __next__ is observed.
            for kind in type(iterator).__mro__:
                if "__next__" in vars(kind):
                    if kind not in self._patched:
                        self._patched.add(kind)
                        self._patches.replace(kind, "__next__", self._next)
                    break
            return iterator

        return observed

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        @functools.wraps(original)
        def observed(iterator: Any) -> Any:
            if get_ident() != clock.thread:
                return original(iterator)
            clock.fetch_begins(torch.is_grad_enabled())
            batch = None
            try:
                batch = original(iterator)
            finally:
                clock.fetch_ends(batch)
            return batch

        return observed

    def _eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(module: nn.Module) -> Any:
            result = original(module)
            if not self._clock.is_open or get_ident() != self._clock.thread:
                return result
            # A model that is never trained, such as a teacher, begins no evaluation.
            if module not in self._trained:
                self._trained[module] = self._clock.trains(module)
            if self._trained[module]:
                self._evaluated = module
                self._clock.begin_evaluation()
            return result

        return observed

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(module: nn.Module, mode: bool = True) -> Any:
            result = original(module, mode)
            # torch calls it for each module of a model, so the comparison comes first.
            if mode and self._clock.is_evaluating and self._evaluated in (module, None):
                self._evaluated = None
                self._clock.end_evaluation()
            return result

        return observed
