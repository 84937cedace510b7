"""Load subpackages on first use (:pep:`562`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


def lazy_subpackages(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Create the ``__getattr__`` of a package that imports ``names`` on first use.

    Args:
        package: The package's ``__name__``.
        names: Names of its submodules.

    Returns:
        A function to bind to ``__getattr__`` in the package's module.

    Example:
        >>> get = lazy_subpackages("json", "decoder")
        >>> get("decoder").__name__
        'json.decoder'
    """

    # Python calls this only for names that the package does not have. The import adds the submodule
    # to the package, so there is one call per name.
    def __getattr__(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
