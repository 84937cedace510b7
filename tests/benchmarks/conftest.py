"""The scripts under benchmarks/micro, which import one another by lying in one folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets a variable

import benchmarks

MICRO = Path(benchmarks.__file__).parent / "micro"


@pytest.fixture(scope="module")
def micro() -> Iterator[Callable[[str], ModuleType]]:
    """A function that imports a script by name; one thread, as in the scripts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MICRO))
        yield importlib.import_module
        for name in [name for name in sys.modules if (MICRO / f"{name}.py").exists()]:
            patch.delitem(sys.modules, name)
    torch.set_num_threads(threads)
