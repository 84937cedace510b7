"""Import the script of a task, which is a program and in no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from mlbench_core.tasks import get_task


def load_script(task: str, name: str = "main") -> ModuleType:
    """Run the script of a task anew as a module, with the files beside it in reach.

    Args:
        task: Number of the task, such as ``"4a"``.
        name: Which script of its folder.
    """
    folder = get_task(task).script.parent
    spec = importlib.util.spec_from_file_location(f"task{task}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
