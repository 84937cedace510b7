"""Batches of JPEG images: their values, their division among workers, and what they depend on."""

from __future__ import annotations

import gc
import io
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition.pytorch import (
    CenterCrop,
    Imagenet,
    JpegBatches,
    RandomCrop,
    decoder_name,
    find_jpegs,
    jpeg_batches,
)
from mlbench_core.errors import ConfigurationError, DatasetError, MissingDependencyError
from tests.helpers.jpegs import write_jpegs, write_tar

try:  # here, because importing it sets environment variables of the libraries below it
    torchvision.load("transforms")
except MissingDependencyError:
    pytestmark = pytest.mark.skip(reason="needs torchvision: the extra vision")

CROP = RandomCrop(16, min_area=0.3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jpegs")
    write_jpegs(folder / "train", classes=3, per_class=7)
    return folder


def draw(batches: JpegBatches) -> list[tuple[Tensor, Tensor]]:
    return list(batches)


def in_bytes(images: Tensor) -> Tensor:
    """The images before the normalization."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (Imagenet.mean, Imagenet.std))
    return ((images * std + mean) * 255).round()


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    assert len(one) == len(other)
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_validation_images_are_those_of_torchvision(root: Path) -> None:
    """To one level or two: torchvision resizes with Pillow, whose rounding differs."""
    transforms: Any = torchvision.load("transforms")
    folder: Any = torchvision.load("datasets").ImageFolder(str(root / "train"))
    folder.transform = transforms.Compose(
        [transforms.Resize(40), transforms.CenterCrop(32), transforms.PILToTensor()]
    )
    batches = JpegBatches(find_jpegs(root, "train"), 4, CenterCrop(32, resize=40))
    images = torch.cat([in_bytes(images) for images, _ in batches])
    expected = torch.stack([image for image, _ in folder])
    assert torch.cat([labels for _, labels in batches]).tolist() == folder.targets
    assert (images - expected).abs().max() <= 2
    assert (images - expected).abs().mean() < 0.5


def test_training_images_are_crops_resized_as_by_torchvision(root: Path) -> None:
    files = find_jpegs(root, "train")
    batches = JpegBatches(files, 7, CROP, seed=3)
    functional: Any = torchvision.load("transforms.functional")
    loader: Any = torchvision.load("datasets").folder.default_loader
    mirrored = []
    for (images, labels), positions in zip(draw(batches), batches.positions(0), strict=True):
        assert labels.tolist() == files.targets[positions].tolist()
        for image, position in zip(in_bytes(images), positions, strict=True):
            picture = loader(files.name(position))
            generator = batches._reader.generator(0, position)
            top, left, height, width = CROP.box(picture.height, picture.width, generator)
            crop = functional.resized_crop(picture, top, left, height, width, [16, 16])
            expected = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
            plain, flipped = ((image - each).abs().max() for each in (expected, expected.flip(2)))
            assert min(plain, flipped) <= 2
            mirrored.append(bool(flipped < plain))
    assert 3 <= sum(mirrored) <= 18


def test_crops_have_the_distribution_of_torchvision() -> None:
    transforms: Any = torchvision.load("transforms")
    image = torch.empty(3, 300, 400, dtype=torch.uint8)
    generator, crop = np.random.default_rng(0), RandomCrop(64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draw_one = transforms.RandomResizedCrop.get_params
        expected = torch.tensor(
            [draw_one(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
        ).double()
    found = torch.tensor([crop.box(300, 400, generator) for _ in range(4000)]).double()
    top, left, height, width = found.T
    assert (top + height).max() <= 300
    assert (left + width).max() <= 400
    assert found.min() >= 0
    # The differences of means of 4,000 draws, in their own standard deviations.
    error = (found.var(0) / 4000 + expected.var(0) / 4000).sqrt()
    assert ((found.mean(0) - expected.mean(0)).abs() / error).max() < 4
    assert (found.std(0) / expected.std(0) - 1).abs().max() < 0.06


@pytest.mark.parametrize(("height", "width"), [(100, 10), (10, 100), (1, 1)])
def test_crops_of_long_images_are_the_largest_in_the_middle(height: int, width: int) -> None:
    box = RandomCrop(8, min_area=1.0).box(height, width, np.random.default_rng(0))
    if height == width:
        assert box == (0, 0, 1, 1)
        return
    long = round(10 * 4 / 3)
    start = (100 - long) // 2
    assert box == ((start, 0, long, 10) if height > width else (0, start, 10, long))


def test_files_and_tar_file_give_the_same_batches(root: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", root / "train")
    files, members = (
        JpegBatches(find_jpegs(folder, "train"), 4, CROP) for folder in (root, tmp_path)
    )
    assert same(draw(files), draw(members))


def test_an_epoch_depends_on_seed_and_epoch_alone(root: Path) -> None:
    files = find_jpegs(root, "train")
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    batches = JpegBatches(files, 4, CROP, seed=5)
    first, second = draw(batches), draw(batches)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not same(first, second)
    other = JpegBatches(files, 4, CROP, seed=5)
    other.set_epoch(1)
    assert same(draw(other), second)
    other.set_epoch(0)
    assert same(draw(other), first)
    assert not same(draw(JpegBatches(files, 4, CROP, seed=6)), first)
    # An image has other crops in other epochs, and the same ones for another order of the images.
    reader = batches._reader
    content = files.read(0)
    assert not torch.equal(reader.decode(content, 0, 0), reader.decode(content, 1, 0))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("crop", [CROP, CenterCrop(16, resize=16)], ids=["training", "validation"])
def test_loader_processes_change_nothing(root: Path, crop: Any) -> None:
    files = find_jpegs(root, "train")
    alone, together = JpegBatches(files, 4, crop), JpegBatches(files, 4, crop, processes=2)
    for _ in range(2):
        assert same(draw(together), draw(alone))
    # A pass that ends early leaves nothing behind for the next one.
    for batches in (alone, together):
        next(iter(batches))
    assert same(draw(together), draw(alone))


def test_a_pass_resumes_at_the_next_batch(root: Path) -> None:
    files = find_jpegs(root, "train")
    whole = JpegBatches(files, 4, CROP)
    draw(whole)
    expected = draw(whole)
    stopped = JpegBatches(files, 4, CROP)
    stopped.set_epoch(1)
    begun = list(itertools.islice(stopped, 2))
    resumed = JpegBatches(files, 4, CROP)
    resumed.load_state_dict(stopped.state_dict())
    assert same(begun + draw(resumed), expected)
    with pytest.raises(ValueError, match="the state was saved with batch_size 4, but here it is 5"):
        JpegBatches(files, 5, CROP).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_share_the_steps_of_one_worker(root: Path, world_size: int) -> None:
    """The k batches of b images of a step are those of one worker with kb images, and no image
    comes twice."""
    files = find_jpegs(root, "train")
    workers = [
        JpegBatches(files, 2, CROP, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    alone = JpegBatches(files, 2 * world_size, CROP)
    assert {len(worker) for worker in workers} == {len(alone)} == {21 // (2 * world_size)}
    drawn = [draw(worker) for worker in workers]
    joined = [
        tuple(torch.cat(parts) for parts in zip(*step, strict=True))
        for step in zip(*drawn, strict=True)
    ]
    assert same(joined, draw(alone))  # type: ignore[arg-type]
    seen = [int(i) for worker in workers for positions in worker.positions(0) for i in positions]
    assert len(set(seen)) == len(seen) == len(alone) * 2 * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_has_every_image_once(root: Path, world_size: int) -> None:
    files = find_jpegs(root, "train")
    workers = [
        JpegBatches(files, 3, CenterCrop(16, resize=20), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert [len(worker) for worker in workers] == [len(draw(worker)) for worker in workers]
    seen = [int(i) for worker in workers for positions in worker.positions(4) for i in positions]
    assert sorted(seen) == list(range(21))
    shares = [sum(map(len, worker.positions(0))) for worker in workers]
    assert max(shares) - min(shares) <= 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("content", "processes"),
    [(b"no image", 0), (b"", 0), ("the first 300 bytes", 0), (b"no image", 1)],
)
def test_a_damaged_file_is_named(
    root: Path, tmp_path: Path, content: bytes | str, processes: int
) -> None:
    shutil.copytree(root / "train", tmp_path / "train")
    path = tmp_path / "train" / "n01" / "n01_3.JPEG"
    path.write_bytes(path.read_bytes()[:300] if isinstance(content, str) else content)
    batches = JpegBatches(
        find_jpegs(tmp_path, "train"), 4, CenterCrop(16, resize=16), processes=processes
    )
    with pytest.raises(DatasetError, match=r"n01_3\.JPEG is damaged: .*delete it and get it again"):
        draw(batches)
    del batches
    gc.collect()  # the traceback holds the loader, whose end stops its processes


def test_gray_cmyk_and_png_files_become_rgb(tmp_path: Path) -> None:
    """ImageNet has some of each, all with the ending of JPEG."""
    from PIL import Image

    (tmp_path / "n00").mkdir()
    for name, mode, kind in (
        ("a", "L", "JPEG"),
        ("b", "CMYK", "JPEG"),
        ("c", "RGB", "PNG"),
        ("d", "RGBA", "PNG"),
    ):
        Image.new("L", (20, 16), 90).convert("RGB").convert(mode).save(
            tmp_path / "n00" / f"{name}.JPEG", kind
        )
    ((images, _),) = draw(JpegBatches(find_jpegs(tmp_path), 4, CenterCrop(16, resize=16)))
    assert (in_bytes(images) - 90).abs().max() <= 3


def test_memory_format_and_values_do_not_depend_on_one_another(root: Path) -> None:
    files = find_jpegs(root, "train")
    planes, interleaved = (
        JpegBatches(files, 4, CROP, memory_format=each)
        for each in (torch.contiguous_format, torch.channels_last)
    )
    assert same(draw(planes), draw(interleaved))
    assert next(iter(interleaved))[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        (
            {"batch_size": 22},
            ValueError,
            "batch_size must be at most 21 for 21 images and 1 workers, not 22",
        ),
        (
            {"batch_size": 11, "world_size": 2},
            ValueError,
            "at most 10 for 21 images and 2 workers, not 11",
        ),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be from 0 to 1, not 2"),
        ({"processes": -1}, ValueError, "processes must be at least 0, not -1"),
        (
            {"gpu_decoding": True},
            ConfigurationError,
            "gpu_decoding needs a CUDA device and a torchvision whose .*cpu",
        ),
    ],
)
def test_wrong_arguments(
    root: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JpegBatches(find_jpegs(root, "train"), **{"batch_size": 4, "crop": CROP, **arguments})


def test_wrong_crops() -> None:
    with pytest.raises(ValueError, match="min_area must be above 0 and at most 1, not 0"):
        RandomCrop(8, min_area=0)
    with pytest.raises(ValueError, match="resize must be at least 8, not 7"):
        CenterCrop(8, resize=7)
    assert math.isclose(RandomCrop().min_area, 0.08)


def test_the_decoder_that_is_named_is_the_one_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (10, 200, 90)).save(buffer, "JPEG")
    whole = lambda height, width: (0, 0, height, width)  # noqa: E731
    assert (decoder_name() == "torchvision") == torchvision.decodes_images()
    by_pillow = lambda: "Pillow"  # noqa: E731
    monkeypatch.setattr(jpeg_batches, "decoder_name", by_pillow)
    expected = jpeg_batches._decode(buffer.getvalue(), whole)
    assert expected.shape == (3, 20, 30)
    if not torchvision.decodes_images():
        pytest.skip("torchvision's compiled operators do not load with this build of torch")
    monkeypatch.setattr(jpeg_batches, "decoder_name", lambda: "torchvision")
    assert (jpeg_batches._decode(buffer.getvalue(), whole).int() - expected.int()).abs().max() <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_batches_decoded_on_a_gpu_are_those_of_the_cpu(root: Path) -> None:
    if not torchvision.decodes_images():
        pytest.skip("torchvision's compiled operators do not load with this build of torch")
    files = find_jpegs(root, "train")
    expected = draw(JpegBatches(files, 4, CROP))
    found = draw(JpegBatches(files, 4, CROP, device="cuda", gpu_decoding=True))
    for (images, labels), (gpu_images, gpu_labels) in zip(expected, found, strict=True):
        assert gpu_images.device.type == "cuda"
        assert torch.equal(labels, gpu_labels.cpu())
        # The GPU's decoder interpolates the colors, which a JPEG stores at half the resolution, in
        # another way.
        assert (in_bytes(images) - in_bytes(gpu_images.cpu())).abs().mean() < 4


@pytest.mark.parametrize("fails", [False, True])
def test_batches_are_decoded_on_the_device_unless_it_refuses(
    root: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """With a decoder in the place of the GPU's: the images are those of the loader processes."""
    calls = []

    class FakeIO:
        class ImageReadMode:
            RGB = "RGB"

        @staticmethod
        def decode_jpeg(encoded: list[Tensor], mode: str, device: torch.device) -> list[Tensor]:
            calls.append(len(encoded))
            if fails:
                raise RuntimeError("unsupported JPEG")
            whole = lambda height, width: (0, 0, height, width)  # noqa: E731
            return [jpeg_batches._decode(data.numpy().tobytes(), whole) for data in encoded]

    files = find_jpegs(root, "train")
    batches = JpegBatches(files, 4, CROP)
    expected = draw(batches)
    batches.set_epoch(0)
    batches.gpu_decoding, batches._reader.decodes = True, False
    load = torchvision.load
    monkeypatch.setattr(torchvision, "load", lambda name="": FakeIO if name == "io" else load(name))
    jpeg_batches.decoder_name()  # the real one is known by now
    assert same(draw(batches), expected)
    assert calls == [4] * len(expected)
