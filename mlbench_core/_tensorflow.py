"""Refuse the import paths of version 3.0 that end in ``tensorflow``, with a message that gives the reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]


class _NoTensorFlow:
    """The last finder in ``sys.meta_path``, which Python asks only for modules that no other finder has found.

    It does not derive from ``importlib.abc.MetaPathFinder``, because importing that class takes a fifth of the time in
    which the ``mlbench`` command starts.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise an ImportError for ``mlbench_core.*.tensorflow``; find no other module."""
        if fullname.startswith("mlbench_core.") and fullname.endswith(".tensorflow"):
            # Not a ModuleNotFoundError, because "from package import tensorflow" would replace it by an error with
            # another message.
            raise ImportError(
                f"{fullname} does not exist: TensorFlow is not supported in this version of mlbench-core; "
                f"use {fullname.removesuffix('tensorflow')}pytorch, or stay with mlbench-core 3.0",
                name=fullname,
            )
        return None


def install() -> None:
    """Add the finder to ``sys.meta_path``, once per process."""
    if not any(isinstance(finder, _NoTensorFlow) for finder in sys.meta_path):
        sys.meta_path.append(_NoTensorFlow())
