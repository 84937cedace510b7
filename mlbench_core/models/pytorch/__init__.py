"""Reference models for PyTorch."""

from mlbench_core._optional import _torch as _torch
from mlbench_core._optional.lazy import lazy_subpackages

__getattr__ = lazy_subpackages(
    __name__, "gnmt", "language_models", "layers", "linear_models", "resnet", "transformer", "vgg"
)
