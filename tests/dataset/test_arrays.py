"""Batches as arrays: the images, parts and numbers are those of the ``pytorch`` package."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from mlbench_core.dataset.imagerecognition import published
from mlbench_core.dataset.imagerecognition.arrays import (
    ArrayBatches,
    ImageArrays,
    cifar10_arrays,
    digits_arrays,
    mnist_arrays,
)
from mlbench_core.dataset.imagerecognition.pytorch import (
    CIFAR10V1,
    MNIST,
    Digits,
    ImageBatches,
    ImageDataset,
)
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from tests.helpers.data import test_data


def assert_same(arrays: ImageArrays, dataset: ImageDataset) -> None:
    assert np.array_equal(arrays.images, dataset.data)
    assert arrays.labels.tolist() == dataset.targets
    assert arrays.mean == pytest.approx(dataset.mean, rel=1e-12)
    assert arrays.std == pytest.approx(dataset.std, rel=1e-12)
    everything = np.arange(min(100, len(arrays)))
    theirs = dataset.batch(everything, augment=False)[0].permute(0, 2, 3, 1).numpy()
    assert arrays.batch(everything) == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_digits_are_those_of_torch(train: bool, size: int) -> None:
    arrays, dataset = digits_arrays(train, size), Digits(train=train, size=size)
    assert_same(arrays, dataset)
    if train:
        assert dataset.augmentation is not None
        assert (arrays.padding, arrays.flip) == (
            dataset.augmentation.padding,
            dataset.augmentation.flip,
        )


def test_digits_smaller_than_they_are_are_refused() -> None:
    with pytest.raises(
        ValueError, match="size must be at least 8, the size of the digits themselves, not 7"
    ):
        digits_arrays(True, 7)


def test_cifar10_is_that_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = lzma.decompress(test_data("cifar10", "data_batch_1.bin.xz").read_bytes())[: 50 * 3073]
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    monkeypatch.setattr(published, "_CIFAR10_RECORDS", 50)
    monkeypatch.setattr(published, "CIFAR10_MD5", {})
    arrays = cifar10_arrays(tmp_path, True, partial=True)
    assert_same(arrays, CIFAR10V1(tmp_path, partial=True))
    assert (len(arrays), arrays.padding, arrays.flip) == (50, 4, True)


def test_mnist_is_that_of_torch() -> None:
    folder = test_data("mnist")
    assert_same(mnist_arrays(folder, False), MNIST(folder, train=False))


def numbered(count: int, padding: int = 1, flip: bool = True) -> ImageArrays:
    """Images whose pixels all differ within an image, and whose label is their position."""
    images = np.arange(1, 3 * 4 * 4 + 1, dtype=np.uint8).reshape(1, 4, 4, 3).repeat(count, axis=0)
    return ImageArrays(images, np.arange(count), (0.0,) * 3, (1 / 255,) * 3, padding, flip)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_parts_are_those_of_torch_and_every_worker_has_as_many_batches(
    world_size: int, train: bool
) -> None:
    arrays = numbered(13)
    images = torch.zeros(13, 3, 4, 4, dtype=torch.uint8)
    dataset = ImageDataset(images, torch.arange(13), list("abcdefghijklm"), arrays.mean, arrays.std)
    for rank in range(world_size):
        batches = ArrayBatches(arrays, 4, train=train, rank=rank, world_size=world_size)
        part = partition_dataset_by_rank(dataset, rank, world_size, shuffle=train)
        assert batches.positions.tolist() == part.indices
        assert len(batches) == len(ImageBatches(part, 4, augment=False))
        assert len(list(batches.epoch(0))) == len(batches)


def test_an_epoch_shows_each_image_once_in_an_order_of_its_own() -> None:
    batches = ArrayBatches(numbered(10), 4, train=True, seed=5)
    first, again, second = (
        np.concatenate([y for _, y in batches.epoch(n)]).tolist() for n in (0, 0, 1)
    )
    assert first == again
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))
    images = [np.concatenate([x for x, _ in batches.epoch(n)]) for n in (0, 0)]
    assert np.array_equal(*images)


def test_another_seed_and_another_rank_see_other_orders() -> None:
    orders = [
        np.concatenate(
            [y for _, y in ArrayBatches(numbered(40), 8, train=True, seed=seed).epoch(0)]
        ).tolist()
        for seed in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("flip", [True, False])
def test_every_crop_and_mirroring_occurs_and_no_other(flip: bool) -> None:
    arrays = numbered(400, padding=1, flip=flip)
    padded = np.pad(arrays.images[0], ((1, 1), (1, 1), (0, 0)))
    crops = [padded[i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    crops += [crop[:, ::-1] for crop in crops] if flip else []
    found = arrays.batch(np.arange(400), np.random.default_rng(0))
    assert {image.astype(np.uint8).tobytes() for image in found} == {
        crop.tobytes() for crop in crops
    }


def test_validation_images_are_not_augmented() -> None:
    arrays = numbered(6)
    images = np.concatenate([x for x, _ in ArrayBatches(arrays, 4, train=False).epoch(0)])
    assert np.array_equal(images, arrays.images.astype(np.float32))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        ArrayBatches(numbered(4), 0, train=True)
    with pytest.raises(ValueError, match="rank"):
        ArrayBatches(numbered(4), 2, train=True, rank=2, world_size=2)
