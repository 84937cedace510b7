"""Image data sets for PyTorch."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.dataset.imagerecognition.pytorch.augment import Augmentation
from mlbench_core.dataset.imagerecognition.pytorch.batches import ImageBatches
from mlbench_core.dataset.imagerecognition.pytorch.dataloader import (
    CIFAR10V1,
    MNIST,
    Digits,
    Imagenet,
)
from mlbench_core.dataset.imagerecognition.pytorch.images import ImageDataset
from mlbench_core.dataset.imagerecognition.pytorch.jpeg_batches import (
    CenterCrop,
    JpegBatches,
    RandomCrop,
    decoder_name,
)
from mlbench_core.dataset.imagerecognition.pytorch.jpeg_files import JpegFiles, find_jpegs

__all__ = [
    "CIFAR10V1",
    "MNIST",
    "Augmentation",
    "CenterCrop",
    "Digits",
    "ImageBatches",
    "ImageDataset",
    "Imagenet",
    "JpegBatches",
    "JpegFiles",
    "RandomCrop",
    "decoder_name",
    "find_jpegs",
]
