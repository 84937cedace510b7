"""The import paths of version 3.0 that ended in ``tensorflow``: one sentence instead of the modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]


class _NoTensorFlow(MetaPathFinder):
    """Is asked last, for what no other finder has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse ``mlbench_core.*.tensorflow``; know nothing of any other module."""
        if fullname.startswith("mlbench_core.") and fullname.endswith(".tensorflow"):
            # no ModuleNotFoundError: "from package import tensorflow" would swallow that one, and its sentence
            raise ImportError(
                f"{fullname} does not exist: TensorFlow is not supported in this version of mlbench-core; "
                f"use {fullname.removesuffix('tensorflow')}pytorch, or stay with mlbench-core 3.0",
                name=fullname,
            )
        return None


def install() -> None:
    """Let the imports say so from now on; once in a process."""
    if not any(isinstance(finder, _NoTensorFlow) for finder in sys.meta_path):
        sys.meta_path.append(_NoTensorFlow())
