"""Replace public functions of torch while a script is observed, and put them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]


class Patches:
    """Functions that were replaced, to restore them.

    Example:
        >>> class Clock:
        ...     def now(self): return 1
        >>> patches = Patches()
        >>> patches.replace(Clock, "now", lambda now: lambda self: now(self) + 1)
        >>> Clock().now()
        2
        >>> patches.restore()
        >>> Clock().now()
        1
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function of a module or class.

        Args:
            owner: The module or class.
            name: Name of the function in it.
            wrap: Takes the function and returns the new one.
        """
        self.put(owner, name, wrap(getattr(owner, name)))

    def put(self, owner: Any, name: str, new: Any) -> None:
        """Replace a function of a module or class by another one."""
        original = getattr(owner, name)
        setattr(owner, name, new)
        self.add_undo(lambda: setattr(owner, name, original))

    def add_undo(self, undo: Callable[[], object]) -> None:
        """Call a function in :meth:`restore`."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put all functions back."""
        while self._undo:
            self._undo.pop()()
