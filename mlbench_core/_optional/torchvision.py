"""Import torchvision, even if its compiled operators do not fit the installed build of torch.

torchvision's wheels contain compiled operators for one build of torch. With another build (for
example the CPU build of torch and a torchvision wheel made for CUDA), these operators do not load.
Then ``import torchvision`` itself fails, because it declares shape functions for operators that are
not defined. The library needs only the Python parts of torchvision: models, image folders and
transforms. So if the import fails for this reason, and only then, the two missing operators are
declared without an implementation, and the import is repeated.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from mlbench_core.errors import require

# Operators for which torchvision declares shape functions. Without an implementation, calling one
# is still an error.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch removes the definitions of a torch.library.Library when the object is deleted, so it is kept
# here.
_declared: list[Any] = []


def load(submodule: str = "") -> ModuleType:
    """Import torchvision, or one of its submodules.

    Args:
        submodule: For example ``"models"``; empty for the package itself.

    Returns:
        The module.

    Raises:
        MissingDependencyError: torchvision is not installed.

    Example:
        >>> load("models").resnet18.__name__
        'resnet18'
    """
    try:
        require("torchvision", "vision")
    except RuntimeError as error:
        # torch names the undefined operator in its message, as in "torchvision::nms".
        if "torchvision::" not in str(error):
            raise
        _declare_operators()
        # The failed import leaves incomplete modules behind, which the next import would use.
        for name in list(sys.modules):
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]
        importlib.import_module("torchvision")
    name = "torchvision"
    if submodule:
        name += f".{submodule}"
    return importlib.import_module(name)


def lacks_operators() -> bool:
    """Return True if torchvision was imported without its compiled operators."""
    return bool(_declared)


def decodes_images() -> bool:
    """Return True if torchvision's compiled decoders of images can be used."""
    import torch

    load("io")
    # torch raises an AttributeError for an operator that no library has defined.
    return hasattr(torch.ops.image, "decode_image")


def _declare_operators() -> None:
    """Declare the operators that the failed import asked for."""
    if _declared:
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for signature in _OPERATORS:
        library.define(signature)
    _declared.append(library)
