"""Reference models for PyTorch."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "linear_models", "resnet", "vgg")
