"""JPEG images are found in folders and in tar files, and others are refused."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition.pytorch import JpegFiles, find_jpegs
from mlbench_core.errors import DatasetError, DatasetNotFoundError, MissingDependencyError
from tests.helpers.jpegs import write_jpegs, write_tar

try:  # here, because importing it sets environment variables of the libraries below it
    torchvision.load("transforms")
except MissingDependencyError:
    pytestmark = pytest.mark.skip(reason="needs torchvision: the extra vision")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jpegs")
    write_jpegs(folder / "train", classes=3, per_class=4)
    return folder


def entries(images: JpegFiles) -> list[tuple[str, int, bytes]]:
    names = [Path(images.name(i).partition(" in ")[0]).name for i in range(len(images))]
    return [(names[i], int(images.targets[i]), images.read(i)) for i in range(len(images))]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_folders_are_found_as_torchvision_finds_them(root: Path) -> None:
    images = find_jpegs(root, "train")
    expected = torchvision.load("datasets").ImageFolder(str(root / "train"))
    assert images.classes == expected.classes == ["n00", "n01", "n02"]
    assert [(images.name(i), images.targets[i]) for i in range(len(images))] == expected.samples
    assert [images.read(i) for i in range(len(images))] == [
        Path(path).read_bytes() for path, _ in expected.samples
    ]


def test_other_files_are_ignored(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "train", tmp_path / "train")
    (tmp_path / "train" / "n00" / "notes.txt").write_text("x")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "n01" / "n01_0.JPEG").rename(tmp_path / "train" / "n01" / "n01_0.jpg")
    assert [entry[1:] for entry in entries(find_jpegs(tmp_path, "train"))] == [
        entry[1:] for entry in entries(find_jpegs(root, "train"))
    ]


@pytest.mark.parametrize("place", ["train.tar", "train-7.tar", "train/x.tar"])
def test_a_tar_file_has_the_same_images_in_the_same_order(
    root: Path, tmp_path: Path, place: str
) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    folder = root / "train"
    write_tar(
        path,
        folder,
        sorted((str(each.relative_to(folder)) for each in folder.rglob("*.JPEG")), reverse=True),
    )
    before = path.read_bytes()
    images = find_jpegs(tmp_path, "train")
    assert images.classes == ["n00", "n01", "n02"]
    assert entries(images) == entries(find_jpegs(root, "train"))
    assert f"n00_0.JPEG in {path}" in images.name(0)
    assert path.read_bytes() == before
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]


def test_several_shards_with_classes_in_files_of_their_own(root: Path, tmp_path: Path) -> None:
    """As WebDataset writes them: numbers of classes, in numerical order."""
    contents = [find_jpegs(root, "train").read(i) for i in range(12)]
    for shard in range(2):
        with tarfile.open(tmp_path / f"train-{shard:06d}.tar", "w") as archive:
            for i in range(shard, 12, 2):
                add(archive, f"{i:05d}.jpg", contents[i])
                add(archive, f"{i:05d}.cls", f"{i}\n".encode())
    images = find_jpegs(tmp_path, "train")
    assert images.classes == [str(i) for i in range(12)]
    assert images.targets.tolist() == list(range(12))
    assert [images.read(i) for i in range(12)] == contents


def test_the_tar_files_of_classes_as_imagenet_has_them(root: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("n00", "n01", "n02"):
        write_tar(tmp_path / "train" / f"{name}.tar", root / "train" / name)
    assert entries(find_jpegs(tmp_path, "train")) == entries(find_jpegs(root, "train"))


@pytest.mark.parametrize("in_tar", [False, True])
def test_the_validation_images_of_imagenet_have_their_classes_in_a_table(
    root: Path, tmp_path: Path, in_tar: bool
) -> None:
    images = find_jpegs(root, "train")
    (tmp_path / "flat").mkdir()
    lines = ["ImageId,PredictionString"]
    for i in range(len(images)):
        number = len(images) - i
        (tmp_path / "flat" / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(images.read(i))
        lines.append(f"ILSVRC2012_val_{number:08d},{images.classes[images.targets[i]]} 1 2 3 4 ")
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    if in_tar:
        write_tar(tmp_path / "val.tar", tmp_path / "flat")
    else:
        (tmp_path / "flat").rename(tmp_path / "val")
    found = find_jpegs(tmp_path, "val")
    assert found.classes == images.classes
    # Within a class, the numbers run the other way.
    expected = [
        images.read(i) for label in range(3) for i in np.flatnonzero(images.targets == label)[::-1]
    ]
    assert [found.read(i) for i in range(len(found))] == expected
    assert found.targets.tolist() == images.targets.tolist()


def test_selected_images_keep_the_classes_of_all(root: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "images.tar", root / "train")
    for images in (find_jpegs(root, "train"), find_jpegs(tmp_path)):
        part = images.select([5, 4, 11])
        assert part.classes == images.classes
        assert part.targets.tolist() == [1, 1, 2]
        assert entries(part) == [entries(images)[i] for i in (5, 4, 11)]


def test_missing_and_empty_folders(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DatasetNotFoundError, match=r"val does not exist, nor do tar files .*val\*\.tar: put"
    ):
        find_jpegs(root, "val")
    with pytest.raises(DatasetNotFoundError, match="no JPEG images in"):
        find_jpegs(tmp_path)
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        add(archive, "n00/a.txt", b"x")
    with pytest.raises(DatasetNotFoundError, match=r"no JPEG images in .*val\.tar"):
        find_jpegs(tmp_path, "val")
    (tmp_path / "train" / "n00").mkdir(parents=True)
    with pytest.raises(DatasetError, match="n00 has no JPEG images of the class n00"):
        find_jpegs(tmp_path, "train")


def test_images_without_a_known_class(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.JPEG").write_bytes(b"x")
    with pytest.raises(
        DatasetError,
        match=r"the class of .*a\.JPEG is not known: put images into one folder for each",
    ):
        find_jpegs(tmp_path, "val")
    (tmp_path / "LOC_val_solution.csv").write_text("Image,Class\na,n00\n")
    with pytest.raises(DatasetError, match=r"csv is damaged: it does not have the columns ImageId"):
        find_jpegs(tmp_path, "val")


def test_tar_files_beside_folders_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "train", tmp_path / "train")
    write_tar(tmp_path / "train" / "all.tar", root / "train")
    with pytest.raises(DatasetError, match=r"all\.tar is beside folders in .*train: move"):
        find_jpegs(tmp_path, "train")


def link(kind: bytes, target: str) -> Callable[[tarfile.TarFile], None]:
    def write(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("n00/b.jpg")
        member.type, member.linkname = kind, target
        archive.addfile(member)

    return write


@pytest.mark.parametrize(
    "write",
    [
        link(tarfile.SYMTYPE, "/etc/passwd"),
        link(tarfile.LNKTYPE, "n00/a.jpg"),
        link(tarfile.FIFOTYPE, ""),
    ],
    ids=["symbolic link", "hard link", "pipe"],
)
def test_members_that_are_no_files_are_refused(
    tmp_path: Path, write: Callable[[tarfile.TarFile], None]
) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        add(archive, "n00/a.jpg", b"x")
        write(archive)
    with pytest.raises(
        DatasetError, match=r"n00/b\.jpg in .*train\.tar is a link or a device, not a regular file"
    ):
        find_jpegs(tmp_path, "train")


@pytest.mark.parametrize("name", ["../../n00/a.jpg", "/n00/a.jpg"])
def test_names_that_lead_out_of_the_archive_are_only_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inner" / "root"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "train.tar", "w") as archive:
        add(archive, name, b"content")
    images = find_jpegs(folder, "train")
    assert (images.classes, images.read(0)) == (["n00"], b"content")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["train.tar"]


def test_damaged_tar_files_are_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    write_tar(path, root / "train")
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        headers = [member.offset for member in archive]
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(DatasetError, match="is damaged, or is not an uncompressed tar file"):
        find_jpegs(tmp_path, "train")
    # In the middle of an image, in the middle of a header, and a header of other bytes.
    start = headers[7]
    for content in (
        whole[: start - 600],
        whole[: start + 100],
        whole[:start] + b"x" * 512 + whole[start + 512 :],
    ):
        path.write_bytes(content)
        with pytest.raises(DatasetError, match=r"train\.tar is damaged"):
            find_jpegs(tmp_path, "train")
    path.write_bytes(whole[: headers[-1]])
    assert len(find_jpegs(tmp_path, "train")) == 11  # a tar file without an end is usual
    with tarfile.open(path, "w") as archive:
        add(archive, "a.jpg", b"x")
        add(archive, "a.cls", b"n" * 300)
    with pytest.raises(DatasetError, match=r"a\.cls in .*train\.tar does not have the name or"):
        find_jpegs(tmp_path, "train")


def test_files_that_change_after_they_were_found(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "train", tmp_path / "files")
    write_tar(tmp_path / "train.tar", root / "train")
    images, members = find_jpegs(tmp_path, "files"), find_jpegs(tmp_path, "train")
    (tmp_path / "files" / "n00" / "n00_0.JPEG").unlink()
    with pytest.raises(DatasetError, match=r"n00_0\.JPEG cannot be read"):
        images.read(0)
    (tmp_path / "train.tar").write_bytes(b"")
    with pytest.raises(
        DatasetError,
        match=r"n00_0\.JPEG in .*train\.tar has 0 bytes, not .*the tar file has changed",
    ):
        members.read(0)
