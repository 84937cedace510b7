"""Image data sets: what is read, what is refused, and that whole batches are what single images
would be."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition import published
from mlbench_core.dataset.imagerecognition.pytorch import (
    CIFAR10V1,
    MNIST,
    Augmentation,
    Digits,
    ImageBatches,
    ImageDataset,
    Imagenet,
)
from mlbench_core.dataset.imagerecognition.pytorch.augment import (
    Draws,
    crop_and_flip,
    crop_and_flip_reference,
    normalize,
)
from mlbench_core.dataset.pytorch import Partition, partition_dataset_by_rank
from mlbench_core.errors import DatasetError, DatasetNotFoundError, MissingDependencyError, require
from tests.helpers.data import test_data

try:  # here, because importing these sets environment variables of the libraries below them
    torchvision.load("models")
    transforms = torchvision.load("transforms")
    require("sklearn.datasets", "vision")
except MissingDependencyError:
    pytestmark = pytest.mark.skip(reason="needs torchvision and scikit-learn: the extra vision")


def tiny(count: int = 10, augmentation: Augmentation | None = None, size: int = 32) -> ImageDataset:
    """A data set whose image number i is recognisable: random bytes from a fixed seed, label i."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    classes = [str(number) for number in range(count)]
    return ImageDataset(images, torch.arange(count), classes, (0.5,) * 3, (0.25,) * 3, augmentation)


# --- augmentation


def all_draws(padding: int) -> Draws:
    tops, lefts, flips = torch.meshgrid(
        torch.arange(2 * padding + 1), torch.arange(2 * padding + 1), torch.arange(2), indexing="ij"
    )
    return Draws(tops.flatten(), lefts.flatten(), flips.flatten().bool())


def test_every_crop_is_torchvisions() -> None:
    functional = torchvision.load("transforms.functional")
    draws = all_draws(4)
    images = tiny(len(draws.tops)).images
    found = crop_and_flip(images, draws, 4)
    for index, (top, left, flip) in enumerate(
        zip(draws.tops, draws.lefts, draws.flips, strict=True)
    ):
        crop = functional.crop(functional.pad(images[index], 4), int(top), int(left), 32, 32)
        assert torch.equal(found[index], functional.hflip(crop) if flip else crop)


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_the_batch_is_the_plain_reference(padding: int, size: int) -> None:
    images = tiny(50, size=size).images
    draws = Augmentation(padding).draw(50, torch.Generator().manual_seed(3))
    assert torch.equal(
        crop_and_flip(images, draws, padding), crop_and_flip_reference(images, draws, padding)
    )


def test_offsets_and_flips_are_uniform() -> None:
    count = 81 * 400
    draws = Augmentation().draw(count, torch.Generator().manual_seed(0))
    seen = torch.bincount(draws.tops * 9 + draws.lefts, minlength=81).double()
    assert len(seen) == 81
    chi_square = ((seen - 400) ** 2 / 400).sum().item()
    assert chi_square < 124.8  # 80 degrees of freedom: above that in 1 of 1,000 seeds
    flips = draws.flips.double()
    assert (flips.sum().item() - count / 2) ** 2 / (
        count / 4
    ) < 10.8  # 1 degree of freedom, likewise
    together = torch.corrcoef(torch.stack([draws.tops.double(), draws.lefts.double(), flips]))
    assert (together - torch.eye(3)).abs().max() < 0.03


def test_torchvision_draws_from_the_same_distribution() -> None:
    """The crops of a marked pixel fall where torchvision's fall, equally often."""
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    image[:, 10, 12] = 255
    steps = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = {tuple(steps(image)[0].nonzero()[0].tolist()) for _ in range(3000)}
    batch = Augmentation()(image.expand(3000, -1, -1, -1), torch.Generator().manual_seed(0))
    ours = {tuple(position[1:].tolist()) for position in batch[:, 0].nonzero()}
    assert ours == theirs
    assert len(ours) == 9 * 16  # 9 rows; columns 8 to 16, mirrored 15 to 23


def test_normalisation_is_torchvisions() -> None:
    dataset = tiny(4)
    steps = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(dataset.mean, dataset.std)]
    )
    expected = torch.stack([steps(array) for array in dataset.data])
    assert torch.allclose(dataset.batch(range(4))[0], expected, atol=1e-6)


def test_digits_are_never_mirrored() -> None:
    assert not Augmentation(4, flip=False).draw(1000).flips.any()


def test_memory_format() -> None:
    images, _ = tiny(4, Augmentation()).batch(range(4), memory_format=torch.channels_last)
    assert images.is_contiguous(memory_format=torch.channels_last)
    plain = normalize(tiny(4).images, (0.5,) * 3, (0.25,) * 3)
    last = normalize(tiny(4).images, (0.5,) * 3, (0.25,) * 3, torch.channels_last)
    assert torch.equal(plain, last)


def test_bad_padding() -> None:
    with pytest.raises(ValueError, match="padding must be at least 0, not -1"):
        Augmentation(-1)


# --- the data set


def test_samples_are_as_with_torchvision() -> None:
    dataset = tiny(5)
    image, label = dataset[3]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert (label, type(label)) == (3, int)
    assert torch.equal(dataset[-2][0], image)
    assert len(list(dataset)) == 5  # an IndexError ends the iteration
    with pytest.raises(IndexError):
        dataset[5]
    assert dataset.data.shape == (5, 32, 32, 3)
    assert (dataset.data[2, 7, 8] == dataset.images[2, :, 7, 8].numpy()).all()
    assert dataset.class_to_idx["4"] == 4


def test_loader_batches_equal_single_samples() -> None:
    dataset = tiny(6)
    images, labels = next(iter(DataLoader(dataset, batch_size=6)))
    assert torch.equal(images, torch.stack([dataset[index][0] for index in range(6)]))
    assert labels.tolist() == list(range(6))
    partition = Partition(dataset, [4, 2])
    assert next(iter(DataLoader(partition, batch_size=2)))[1].tolist() == [4, 2]
    assert partition.targets == [4, 2]


def test_a_transform_takes_the_place_of_augmentation_and_normalization() -> None:
    dataset = tiny(4, Augmentation())
    seen = []

    def first_pixel(image: Any) -> torch.Tensor:
        seen.append((image.mode, image.size))
        return torch.tensor(image.getpixel((0, 1)), dtype=torch.float32)

    dataset.transform = first_pixel
    expected = dataset.images[:, :, 1, 0].float()
    assert torch.equal(dataset[2][0], expected[2])
    assert dataset[2][1] == 2
    assert torch.equal(
        next(iter(DataLoader(Partition(dataset, [3, 1]), batch_size=2)))[0], expected[[3, 1]]
    )
    for augment in (True, False):
        batches = ImageBatches(dataset, 4, augment=augment, shuffle=False)
        assert torch.equal(next(iter(batches))[0], expected)
    assert set(seen) == {("RGB", (32, 32))}
    dataset.transform = str
    assert isinstance(dataset[0][0], str)
    with pytest.raises(TypeError, match="transform must return tensors, not str"):
        dataset.batch([0])
    dataset.transform = None
    assert dataset[0][0].shape == (3, 32, 32)


def test_targets_are_a_list_whose_changes_count() -> None:
    dataset = tiny(4)
    assert dataset.targets == [0, 1, 2, 3]
    assert len(set(dataset.targets)) == 4
    dataset.targets[1] = 3
    assert dataset[1][1] == 3
    assert dataset.batch([0, 1])[1].tolist() == [0, 3]
    assert next(iter(DataLoader(dataset, batch_size=4)))[1].tolist() == [0, 3, 2, 3]
    dataset.target_transform = lambda label: 10.0 * label
    assert dataset[3][1] == 30.0
    assert dataset.batch([0, 1])[1].tolist() == [0.0, 30.0]


def test_single_samples_are_augmented_from_the_global_generator() -> None:
    dataset = tiny(2, Augmentation())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = dataset[0][0], dataset[0][0]
        torch.manual_seed(3)
        assert torch.equal(dataset[0][0], first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": torch.zeros(2, 3, 4, 4)},
            r"images must be uint8 \(N, C, H, W\), not torch.float32",
        ),
        ({"targets": torch.zeros(3)}, r"targets must have shape \(2,\) as images, not \(3,\)"),
        ({"mean": (0.5,)}, "mean and std must have 3 values, one per channel, not 1 and 3"),
    ],
)
def test_bad_data_set(change: dict, message: str) -> None:
    good = {
        "images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        "targets": torch.zeros(2),
        "classes": ["a"],
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    with pytest.raises(ValueError, match=message):
        ImageDataset(**{**good, **change})


# --- batches


def drain(batches: ImageBatches) -> list[tuple[Tensor, list[int]]]:
    return [(images, labels.tolist()) for images, labels in batches]


def same(first: list, second: list) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(first, second, strict=True)
    )


def test_batches_cover_the_data_once_and_follow_from_the_seed() -> None:
    dataset = tiny(10, Augmentation())
    state = torch.get_rng_state()
    first = drain(ImageBatches(dataset, 4, seed=2))
    assert [len(labels) for _, labels in first] == [4, 4, 2]
    assert sorted(label for _, labels in first for label in labels) == list(range(10))
    assert same(drain(ImageBatches(dataset, 4, seed=2)), first)
    assert not same(drain(ImageBatches(dataset, 4, seed=3)), first)
    assert not same(drain(ImageBatches(dataset, 4, seed=2, rank=1)), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_each_pass_is_another_epoch() -> None:
    batches = ImageBatches(tiny(10, Augmentation()), 4)
    first, second = drain(batches), drain(batches)
    assert not same(first, second)
    assert batches.epoch == 1
    batches.set_epoch(0)
    assert same(drain(batches), first)
    batches.set_epoch(1)
    next(iter(batches))  # left after one batch
    drain(batches)
    assert batches.epoch == 2


@pytest.mark.parametrize("done", [0, 1, 2, 3])
@pytest.mark.parametrize("name_epoch", [False, True])
def test_a_resumed_run_gets_the_very_batches(done: int, name_epoch: bool) -> None:
    dataset = tiny(10, Augmentation())
    whole = ImageBatches(dataset, 4, seed=1)
    drain(whole)
    expected = drain(whole) + drain(whole)

    interrupted = ImageBatches(dataset, 4, seed=1)
    drain(interrupted)
    iterator = iter(interrupted)
    got = [next(iterator) for _ in range(done)]
    state = interrupted.state_dict()
    resumed = ImageBatches(dataset, 4, seed=1)
    resumed.load_state_dict(state)
    if name_epoch:
        resumed.set_epoch(state["epoch"])
    rest = drain(resumed)
    if done < 3:
        rest += drain(resumed)
    assert same([(images, labels.tolist()) for images, labels in got] + rest, expected)
    assert all(type(value) is int for value in state.values())


def test_resuming_something_else_is_refused() -> None:
    state = ImageBatches(tiny(10), 4, seed=1).state_dict()
    with pytest.raises(ValueError, match="saved with seed 1, but here it is 0"):
        ImageBatches(tiny(10), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with samples 10, but here it is 9"):
        ImageBatches(tiny(9), 4, seed=1).load_state_dict(state)


def test_every_worker_has_the_same_number_of_batches() -> None:
    dataset = tiny(9)
    for drop_last in (False, True):
        workers = [
            ImageBatches(
                partition_dataset_by_rank(dataset, rank, 2), 4, drop_last=drop_last, rank=rank
            )
            for rank in range(2)
        ]
        assert [len(worker.dataset) for worker in workers] == [5, 4]
        assert (
            [len(drain(worker)) for worker in workers]
            == [len(worker) for worker in workers]
            == [1, 1]
        )


def test_batches_of_a_partition_are_its_samples() -> None:
    part = Partition(Partition(tiny(10), [9, 8, 7, 6]), [0, 3])
    assert drain(ImageBatches(part, 4, shuffle=False))[0][1] == [9, 6]


def test_batches_without_augmentation() -> None:
    dataset = tiny(6, Augmentation())
    images, labels = next(iter(ImageBatches(dataset, 6, augment=False, shuffle=False)))
    assert torch.equal(images, normalize(dataset.images, dataset.mean, dataset.std))
    assert labels.tolist() == list(range(6))
    assert len(ImageBatches(dataset, 4, drop_last=True)) == 1


@pytest.mark.parametrize(
    ("samples", "workers", "left_out"), [(16, 2, 0), (23, 2, 1), (22, 4, 2), (17, 4, 1)]
)
def test_dealt_out_batches_are_those_of_one_worker(
    samples: int, workers: int, left_out: int
) -> None:
    dataset = tiny(samples)
    alone = ImageBatches(dataset, 4 * workers, seed=6)
    dealt = [
        ImageBatches(dataset, 4, seed=6, rank=rank, world_size=workers) for rank in range(workers)
    ]
    for _ in range(2):  # epochs
        whole = [labels for _, labels in drain(alone)]
        shares = [[labels for _, labels in drain(part)] for part in dealt]
        for part, share in zip(dealt, shares, strict=True):
            assert len(share) == len(part)
        joint = [
            [label for labels in step for label in labels] for step in zip(*shares, strict=True)
        ]
        expected = [batch[: len(batch) // workers * workers] for batch in whole]
        assert joint == [batch for batch in expected if batch]
        seen = [label for step in joint for label in step]
        assert len(set(seen)) == len(seen) == samples - left_out


def test_dealt_out_batches_are_augmented_apart_and_resume() -> None:
    dataset = tiny(16, Augmentation())
    workers = [ImageBatches(dataset, 4, rank=rank, world_size=2) for rank in range(2)]
    assert not torch.equal(next(iter(workers[0]))[0], next(iter(workers[1]))[0])
    state = workers[1].state_dict()
    resumed = ImageBatches(dataset, 4, rank=1, world_size=2)
    resumed.load_state_dict(state)
    again = ImageBatches(dataset, 4, rank=1, world_size=2)
    assert same(drain(resumed), drain(again)[1:])
    with pytest.raises(ValueError, match="saved with world_size 2, but here it is 1"):
        ImageBatches(dataset, 4, rank=1).load_state_dict(state)
    older = {
        name: value
        for name, value in ImageBatches(dataset, 4).state_dict().items()
        if name != "world_size"
    }
    ImageBatches(dataset, 4).load_state_dict(older)


def test_a_data_set_moves_to_a_device() -> None:
    dataset = tiny(6)
    assert dataset.size_bytes == dataset.images.numel() + 8 * 6
    assert dataset.to("cpu") is dataset
    moved = tiny(6).to("meta")
    assert moved.images.device.type == "meta"
    assert [part.device.type for part in moved.batch(torch.arange(2))] == ["meta", "meta"]


class Transfers(TorchDispatchMode):
    """Counts the copies from the CPU to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and args[0].device != result.device:
            self.count += 1
        return result


def test_a_batch_on_another_device_takes_three_transfers() -> None:
    """Positions, draws, and the constants of the normalization: the images themselves are there."""
    batches = iter(ImageBatches(tiny(8, Augmentation()).to("meta"), 4))
    with Transfers() as transfers:
        next(batches)
    assert transfers.count == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_batches_are_made_on_the_gpu() -> None:
    on_gpu = next(iter(ImageBatches(tiny(16, Augmentation()).to("cuda"), 8)))
    on_cpu = next(iter(ImageBatches(tiny(16, Augmentation()), 8)))
    assert on_gpu[0].is_cuda and on_gpu[1].is_cuda
    torch.testing.assert_close(on_gpu[0].cpu(), on_cpu[0])
    assert torch.equal(on_gpu[1].cpu(), on_cpu[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be from 0 to 1, not 2"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, not 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, not -1"),
        ({"augment": True}, ValueError, "must be False for a data set without augmentation"),
        (
            {"dataset": [1, 2]},
            TypeError,
            "dataset must be an ImageDataset or a partition of one, not a list",
        ),
    ],
)
def test_bad_batches(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ImageBatches(**{"dataset": tiny(), "batch_size": 2, **arguments})
    with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
        ImageBatches(tiny(), 2).set_epoch(-1)


# --- CIFAR-10


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> int:
    """Batches of 20 images instead of 10,000, with checksums nobody knows."""
    monkeypatch.setattr(published, "_CIFAR10_RECORDS", 20)
    monkeypatch.setattr(published, "CIFAR10_MD5", {})
    return 20


def records(seed: int, count: int = 20) -> tuple[bytes, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count).astype(np.uint8)
    pixels = generator.integers(0, 256, (count, 3072)).astype(np.uint8)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes(), pixels, labels


def python_batch(seed: int, protocol: int = 2) -> bytes:
    _, pixels, labels = records(seed)
    return pickle.dumps(
        {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x"}, protocol=protocol
    )


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_cifar_binary_version(tmp_path: Path, small_cifar: int, folder: str, suffix: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    pack = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix]
    for number in range(1, 6):
        (tmp_path / folder / f"data_batch_{number}.bin{suffix}").write_bytes(
            pack(records(number)[0])
        )
    dataset = CIFAR10V1(str(tmp_path))
    assert len(dataset) == 100
    _, pixels, labels = records(2)
    assert (dataset.images[20:40].numpy() == pixels.reshape(-1, 3, 32, 32)).all()
    assert dataset.targets[20:40] == labels.tolist()
    assert dataset.augmentation == Augmentation(padding=4, flip=True)
    assert dataset[0][0].shape == (3, 32, 32)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_python_version(tmp_path: Path, small_cifar: int, protocol: int) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(python_batch(7, protocol))
    dataset = CIFAR10V1(tmp_path, train=False)
    _, pixels, labels = records(7)
    assert (dataset.images.numpy() == pixels.reshape(-1, 3, 32, 32)).all()
    assert dataset.targets == labels.tolist()
    assert dataset.augmentation is None


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickled_code_is_never_run(tmp_path: Path, small_cifar: int, protocol: int) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "test_batch").write_bytes(
        pickle.dumps({b"data": Touch(str(trap))}, protocol=protocol)
    )
    with pytest.raises(
        DatasetError, match=r"test_batch: the pickle requests .*open, which no array needs"
    ):
        CIFAR10V1(tmp_path, train=False)
    assert not trap.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", pickle.dumps([1]), pickle.dumps({"data": 1, "labels": [1]})]
)
def test_damaged_pickle(tmp_path: Path, small_cifar: int, content: bytes) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(DatasetError, match="test_batch is damaged"):
        CIFAR10V1(tmp_path, train=False)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([], "has no images"), ([-1, 3], "a label is -1"), (["cat"], "labels are <U3, not integers")],
)
def test_labels_of_a_pickle_are_checked(
    tmp_path: Path, small_cifar: int, labels: list[Any], message: str
) -> None:
    content = {"data": np.zeros((len(labels), 3072), np.uint8), "labels": labels}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(DatasetError, match=f"test_batch is damaged: .*{message}"):
        CIFAR10V1(tmp_path, train=False)


def test_cifar_checks_known_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = records(1)[0]
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(DatasetError, match=r"test_batch.bin is damaged: .* not 803d5f7f4d78ea53"):
        CIFAR10V1(tmp_path, train=False)
    monkeypatch.setitem(published.CIFAR10_MD5, "test_batch.bin", hashlib.md5(content).hexdigest())
    with pytest.raises(DatasetError, match="has 20 images, not 10000"):
        CIFAR10V1(tmp_path, train=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_batch.bin", b"12345", "5 bytes are not a whole number of records"),
        ("test_batch.bin", bytes([10]) + bytes(3072), "a label is 10, but classes go from 0 to 9"),
        ("test_batch.bin.xz", b"12345", "test_batch.bin.xz is damaged"),
        ("test_batch.bin.gz", gzip.compress(records(1)[0])[:-50], "test_batch.bin.gz is damaged"),
    ],
)
def test_damaged_cifar(
    tmp_path: Path, small_cifar: int, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        CIFAR10V1(tmp_path, train=False)


def test_missing_cifar(tmp_path: Path, small_cifar: int) -> None:
    with pytest.raises(
        DatasetNotFoundError, match=r"folder .*nowhere does not exist; pass download=True"
    ):
        CIFAR10V1(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"missing data_batch_1, .*data_batch_5"):
        CIFAR10V1(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(records(1)[0])
    (tmp_path / "data_batch_3.bin").write_bytes(records(3)[0])
    with pytest.raises(
        DatasetError, match=r"missing data_batch_2, data_batch_4, data_batch_5; .*partial=True"
    ):
        CIFAR10V1(tmp_path)
    assert len(CIFAR10V1(tmp_path, partial=True)) == 40


def test_real_cifar_batches() -> None:
    folder = test_data("cifar10")
    train = CIFAR10V1(folder)
    assert len(train) == 50_000
    assert [train.classes[label] for label in train.targets[:5]] == [
        "frog",
        "truck",
        "truck",
        "deer",
        "automobile",
    ]
    numbers = train.batch(range(10_000), augment=False)[0]
    assert numbers.mean(dim=(0, 2, 3)).abs().max() < 0.02  # the constants are those of all 50,000
    assert (numbers.std(dim=(0, 2, 3)) - 1).abs().max() < 0.02


def test_real_cifar_test_records() -> None:
    folder = test_data("cifar10", "test_batch.bin.xz").parent
    test = CIFAR10V1(folder, train=False)
    assert len(test) == 10_000
    assert [list(test.targets).count(label) for label in range(10)] == [1_000] * 10


@pytest.mark.parametrize("shape", [(5, 3, 224, 224), (50, 3, 32, 32), (0, 3, 8, 8)])
def test_normalizing_in_parts_changes_no_bit(shape: tuple[int, ...]) -> None:
    images = torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    given = (published.CIFAR10_MEAN, published.CIFAR10_STD)
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in given)
    scale, shift = (1 / (255 * std)).float()[:, None, None], (-mean / std).float()[:, None, None]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        found = normalize(images, *given, memory_format)
        assert torch.equal(found, images.float() * scale + shift)
        assert found.is_contiguous(memory_format=memory_format)


# --- MNIST, digits, ImageNet


@pytest.mark.parametrize(("pad", "channels", "shape"), [(2, 3, (3, 32, 32)), (0, 1, (1, 28, 28))])
def test_real_mnist(pad: int, channels: int, shape: tuple[int, ...]) -> None:
    dataset = MNIST(test_data("mnist"), train=False, pad=pad, channels=channels)
    assert len(dataset) == 10_000
    assert dataset[0][0].shape == shape
    assert dataset.targets[:5] == [7, 2, 1, 0, 4]
    assert not dataset.images[:, :, :pad].any()
    assert MNIST(test_data("mnist"), train=False, augment=True).augmentation == Augmentation(
        4, flip=False
    )


def test_mnist_plain_files_and_damage(tmp_path: Path) -> None:
    source = test_data("mnist")
    (tmp_path / "raw").mkdir()
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / "raw" / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))
    assert len(MNIST(tmp_path, train=False)) == 10_000
    with (tmp_path / "raw" / "t10k-labels-idx1-ubyte").open("r+b") as file:
        file.seek(100)
        file.write(b"\x63")
    with pytest.raises(DatasetError, match="t10k-labels-idx1-ubyte is damaged: the md5"):
        MNIST(tmp_path, train=False)


def test_missing_mnist(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetNotFoundError, match=r"missing train-images-idx3-ubyte .*pass download=True"
    ):
        MNIST(tmp_path)
    with pytest.raises(ValueError, match="channels must be 1 or 3, not 2"):
        MNIST(tmp_path, channels=2)
    with pytest.raises(ValueError, match="pad must be at least 0, not -1"):
        MNIST(tmp_path, pad=-1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file"),
        (bytes((0, 0, 8, 3)), "is not an idx file"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 5, 1)), "1 bytes for"),
    ],
)
def test_damaged_idx(content: bytes, message: str) -> None:
    from mlbench_core.dataset.imagerecognition.readers import parse_idx

    with pytest.raises(DatasetError, match=message):
        parse_idx(Path("labels"), content, 1)


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Digits(augment=False)
    # A package without the file: scikit-learn reads it by itself.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    same = Digits(augment=False)
    assert torch.equal(train.images, same.images)
    assert torch.equal(torch.as_tensor(train.targets), torch.as_tensor(same.targets))


def test_digits() -> None:
    train, validation = Digits(), Digits(train=False)
    assert len(train) + len(validation) == 1797
    assert train[0][0].shape == (3, 32, 32)
    held_out, kept = np.bincount(validation.targets), np.bincount(train.targets)
    shares = held_out / (kept + held_out)
    assert np.abs(shares - 0.2).max() < 0.005
    assert torch.equal(Digits(train=False).images, validation.images)
    assert train.augmentation == Augmentation(2, flip=False)
    assert validation.augmentation is None
    assert train.mean == validation.mean
    numbers = train.batch(range(len(train)), augment=False)[0]
    assert abs(numbers.mean().item()) < 1e-3
    assert abs(numbers.std().item() - 1) < 1e-3
    assert Digits(channels=1)[0][0].shape == (1, 32, 32)
    with pytest.raises(ValueError, match="channels must be 1 or 3, not 4"):
        Digits(channels=4)


def test_digits_of_another_size() -> None:
    """At their own size they are scikit-learn's, with gray levels from 0 to 255 instead of 0 to
    16."""
    from sklearn.datasets import load_digits

    own = Digits(channels=1, size=8, augment=False)
    gray = {tuple(image) for image in np.round(load_digits().data * 255 / 16).astype(int)}
    assert {tuple(image) for image in own.images.flatten(1).tolist()} <= gray
    assert Digits(size=16)[0][0].shape == (3, 16, 16)
    with pytest.raises(
        ValueError, match="size must be at least 8, the size of the digits themselves, not 4"
    ):
        Digits(size=4)


def test_digits_need_no_folder() -> None:
    """A nearest-centroid rule tells the held-out digits apart, so images and labels belong
    together."""
    train, validation = Digits("/nowhere", augment=False), Digits("/nowhere", train=False)
    centres = torch.stack(
        [
            train.images[torch.tensor(train.targets) == digit].float().mean(0).flatten()
            for digit in range(10)
        ]
    )
    guesses = torch.cdist(validation.images.float().flatten(1), centres).argmin(1)
    assert (guesses == torch.tensor(validation.targets)).float().mean() > 0.85


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    from PIL import Image

    for split in ("train", "val"):
        for index, (name, kind) in enumerate([("n01", "JPEG"), ("n02", "png")]):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (300, 280), (200 * index, 30, 60)).save(folder / f"a.{kind}")
    return tmp_path


@pytest.mark.parametrize("train", [True, False])
def test_imagenet(imagenet: Path, train: bool) -> None:
    dataset = Imagenet(str(imagenet), train)
    assert len(dataset) == 2
    assert dataset.classes == ["n01", "n02"]
    assert dataset.targets == [0, 1]
    image, label = dataset[1]
    assert (image.shape, label) == ((3, 224, 224), 1)
    expected = (torch.tensor([200, 30, 60]) / 255 - torch.tensor(dataset.mean)) / torch.tensor(
        dataset.std
    )
    assert torch.allclose(image[:, 100, 100], expected, atol=0.02)


def test_missing_or_damaged_imagenet(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"other.train does not exist"):
        Imagenet(tmp_path / "other")
    (tmp_path / "empty" / "val").mkdir(parents=True)
    with pytest.raises(DatasetNotFoundError, match="no ImageNet in"):
        Imagenet(tmp_path / "empty", train=False)
    (imagenet / "val" / "n01" / "a.JPEG").write_bytes(b"no image")
    with pytest.raises(DatasetError, match=r"a.JPEG is damaged"):
        Imagenet(imagenet, train=False)[0]
